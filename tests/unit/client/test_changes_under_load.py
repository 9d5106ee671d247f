"""What splits and merges promise while clients go on: no message is lost or out of order, one generation of segments takes
messages at a time, and nobody stays attached to what is gone."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from functools import partial
from itertools import count
from typing import Any

import pytest
from tests.unit.client.scalable_cluster import TOPIC as ORDERS
from tests.unit.client.scalable_cluster import Cluster
from tests.unit.client.test_producer_scalable import QUICK

import braid
from braid.broker.subscription import Subscription
from braid.client import Client
from braid.client.client import Initial
from braid.client.producer import Producer
from braid.client.queue_consumer import QueueConsumer
from braid.client.stream_consumer import StreamConsumer
from braid.managedledger.appending import LogAppender
from braid.model.names import TopicName
from braid.model.segments import physical_name
from braid.runtime.plans import Moment, watching
from braid.scalable.config import ScalableConfig
from braid.testing.broker import InProcessBroker
from braid.web.config import StandaloneConfig

SECONDS = 20.0
TURNS = 20
"""Of the loop, by which each step of a plan is longer: whoever may come in between does."""


@pytest.fixture
async def broker() -> AsyncIterator[InProcessBroker]:
    config = StandaloneConfig(scalable_topics=ScalableConfig(drain_poll_seconds=0.01))
    async with InProcessBroker(config=config, with_http=False) as one:
        yield one


@pytest.fixture
async def client(broker: InProcessBroker) -> AsyncIterator[Client]:
    async with braid.connect(broker.service_url) as one:
        yield one


async def made(broker: InProcessBroker, topic: TopicName, segments: int) -> Any:
    """A topic, and its leading controller."""
    service = broker.nodes[0].service
    await service.create_scalable_topic(topic, segments)
    return await service.scalable.lead(topic)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110 - brokers take their own time, no event tells
            await asyncio.sleep(0.002)


class Sending:
    """Sends numbered messages when it is told to, however many are without an answer."""

    def __init__(self, producer: Producer, keys: int = 16) -> None:
        self.started = 0
        self.stored: set[int] = set()
        self._producer = producer
        self._keys = keys
        self._flying: set[asyncio.Future[Any]] = set()

    def send(self, number: int) -> None:
        for _ in range(number):
            sent = self._producer.send_nowait(b"%d" % self.started, key=f"key-{self.started % self._keys}")
            self._flying.add(sent)
            sent.add_done_callback(partial(self._sent, self.started))
            self.started += 1

    def _sent(self, number: int, sent: asyncio.Future[Any]) -> None:
        self._flying.discard(sent)
        if not sent.cancelled() and sent.exception() is None:
            self.stored.add(number)

    async def all(self) -> None:
        """Return when everything is stored that was sent."""
        async with asyncio.timeout(SECONDS):
            await asyncio.gather(*self._flying)
        assert len(self.stored) == self.started


# Subscriptions that come in the middle.

SPLITS_OF_A_TOPIC = 10
STEPS = ("intend", "discover", "create-children", "seal-parent", "hand-over-producers", "flip", "late-cursors", "finish")


class Newcomer:
    """A subscription that is made when a split comes to one of its steps. Messages are sent at every step, and before the split
    looks for late subscriptions they are stored in the children. Half of the consumers are away meanwhile: nobody but the split
    itself makes the subscription's cursors then."""

    def __init__(self, rng: random.Random, load: Sending, client: Client, topic: TopicName, name: str) -> None:
        self.initial: Initial = rng.choice(("earliest", "latest"))
        self._is_stream = rng.random() < 0.2
        self._is_away = rng.random() < 0.5
        self._step = f"split:{rng.choice(STEPS)}"
        self._load = load
        self._client = client
        self._topic = str(topic)
        self._name = name
        self.first = 0
        """Number of the first message that is sent after it was made."""
        self.opening: asyncio.Task[None] | None = None
        self._consumer: StreamConsumer | QueueConsumer | None = None

    async def __call__(self, step: str, moment: Moment) -> None:
        self._load.send(1)
        if moment == "after":
            return
        if step == self._step:
            self.opening = asyncio.create_task(self._open())
            await asyncio.wait([self.opening], timeout=0.02)  # it may wait for the split itself
        if step == "split:late-cursors":
            await self._load.all()

    async def _open(self) -> None:
        self._consumer = await self._opened()
        self.first = self._load.started
        if self._is_away:
            await self._consumer.close()
            self._consumer = None

    async def _opened(self) -> StreamConsumer | QueueConsumer:
        if self._is_stream:
            return await self._client.stream_consumer(self._topic, self._name, initial=self.initial)
        return await self._client.queue_consumer(self._topic, self._name, initial=self.initial)

    async def check(self) -> None:
        """That it gets everything it has a right to."""
        assert self.opening is not None
        await self.opening
        consumer = self._consumer or await self._opened()
        self._load.send(8)
        await self._load.all()
        due = {number for number in self._load.stored if number >= self.first or self.initial == "earliest"}
        while due:
            message = await consumer.receive(SECONDS)
            due.discard(int(message.payload))
            if isinstance(consumer, StreamConsumer):
                await consumer.acknowledge_cumulative(message)
            else:
                await consumer.acknowledge(message)
        await consumer.close()


@pytest.mark.req("R468-49")
@pytest.mark.inv("INV7")
@pytest.mark.parametrize("number", range(20))
async def test_a_new_subscription_in_each_of_ten_random_splits_misses_nothing(
    broker: InProcessBroker, client: Client, number: int
) -> None:
    """Two hundred splits in all."""
    rng = random.Random(number)
    topic = TopicName.parse(f"topic://public/default/fresh-{number}")
    controller = await made(broker, topic, 1)
    async with client.producer(str(topic), batching=False) as producer:
        load = Sending(producer)
        load.send(8)
        for each in range(SPLITS_OF_A_TOPIC):
            newcomer = Newcomer(rng, load, client, topic, f"s{each}")
            with watching(newcomer):
                await controller.split_segment(rng.choice(sorted(controller.layout.active_segments)))
            await newcomer.check()
    assert len(controller.layout.all_segments) == 1 + 2 * SPLITS_OF_A_TOPIC


# When segments are written.


class History:
    """When each log was first written to and when its last entry was durable, by a clock that ticks with each of these."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began: dict[str, int] = {}
        self.ended: dict[str, int] = {}
        ticks = count()
        add, confirmed = LogAppender.add, LogAppender.tail_confirmed

        def added(log: LogAppender, *given: Any, **named: Any) -> None:
            add(log, *given, **named)
            self.began.setdefault(log.name, next(ticks))

        def stored(log: LogAppender, *given: Any, **named: Any) -> None:
            self.ended[log.name] = next(ticks)
            confirmed(log, *given, **named)

        monkeypatch.setattr(LogAppender, "add", added)
        monkeypatch.setattr(LogAppender, "tail_confirmed", stored)


@pytest.mark.req("R468-50")
@pytest.mark.inv("INV6")
async def test_no_segment_is_written_to_before_the_last_entry_of_its_parents(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = History(monkeypatch)
    await cluster.create(2)
    async with AsyncExitStack() as stack:
        loads = []
        for number, node in enumerate(cluster.broker.nodes):
            client = await stack.enter_async_context(braid.connect(node.service_url, config=QUICK))
            producer = await stack.enter_async_context(client.producer(str(ORDERS), name=f"p{number}", batching=False))
            loads.append(Sending(producer))

        async def slow(_step: str, _moment: Moment) -> None:
            await cluster.check_sealed()
            for _ in range(TURNS):
                for load in loads:
                    load.send(1)
                await asyncio.sleep(0)

        with watching(slow):
            await cluster.change_often(16, seed=50)
        for load in loads:
            await load.all()
    layout = (await cluster.services[0].scalable.metadata(ORDERS)).layout
    logs = {number: physical_name(ORDERS, each).managed_ledger_name for number, each in layout.all_segments.items()}
    looked_at = 0
    for number, segment in layout.all_segments.items():
        for parent in segment.parent_ids:
            if logs[number] in history.began and logs[parent] in history.ended:
                assert history.ended[logs[parent]] < history.began[logs[number]], (parent, number)
                looked_at += 1
    assert looked_at >= 16


# A hundred thousand.

MESSAGES, KEYS = 100_000, 100


@pytest.mark.req("R468-51", "R468-56")
async def test_a_hundred_thousand_messages_come_once_and_in_order_per_key(broker: InProcessBroker, client: Client) -> None:
    topic = TopicName.parse("topic://public/default/many")
    controller = await made(broker, topic, 2)
    rng = random.Random(51)
    changes = Counter[str]()
    half = asyncio.Event()
    next_of = [0] * KEYS

    async def send(producer: Producer) -> None:
        keys = [f"{key}" for key in range(KEYS)]
        for start in range(0, MESSAGES, 1000):
            sent = [producer.send_nowait(b"%d" % n, key=keys[n % KEYS]) for n in range(start, start + 1000)]
            if start % 8000 == 0:
                await change()
            await asyncio.gather(*sent)
            if start >= MESSAGES // 2:
                half.set()

    async def change() -> None:
        active = controller.layout.active_in_order
        if len(active) > 3:
            at = rng.randrange(len(active) - 1)
            await controller.merge_segments(active[at].segment_id, active[at + 1].segment_id)
            changes["merge"] += 1
        else:
            await controller.split_segment(rng.choice(active).segment_id)
            changes["split"] += 1

    async with (
        asyncio.timeout(120),
        client.producer(str(topic)) as producer,
        client.stream_consumer(str(topic), "s") as consumer,
        asyncio.TaskGroup() as group,
    ):
        group.create_task(send(producer))
        await half.wait()  # so that sealed segments have a backlog, which their children must wait for
        received = 0
        while received < MESSAGES:
            batch = await consumer.receive_batch(1000, timeout=SECONDS)
            for message in batch:
                number = int(message.payload)
                key, place = number % KEYS, number // KEYS
                assert message.key == f"{key}"
                assert place == next_of[key], f"key {key}: number {place} came when {next_of[key]} was due"
                next_of[key] += 1
            received += len(batch)
            if batch:
                await consumer.acknowledge_cumulative(batch[-1])
        assert await consumer.receive_batch(1, timeout=0.05) == []
    assert next_of == [MESSAGES // KEYS] * KEYS
    assert changes["split"] >= 5 and changes["merge"] >= 5


# Attachments of queue consumers.


@pytest.mark.req("R468-34")
async def test_a_queue_consumer_attaches_once_to_each_segment_and_leaves_what_is_pruned(
    broker: InProcessBroker, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    attached: Counter[str] = Counter()
    attach = Subscription.attach

    async def counted(subscription: Subscription, *given: Any) -> Any:
        consumer = await attach(subscription, *given)
        if subscription.name == "q":
            attached[str(subscription.topic.name)] += 1
        return consumer

    monkeypatch.setattr(Subscription, "attach", counted)
    topic = TopicName.parse("topic://public/default/queue")
    service, controller = broker.nodes[0].service, await made(broker, topic, 2)
    got: Counter[int] = Counter()

    async def receive(consumer: QueueConsumer) -> None:
        while True:
            message = await consumer.receive()
            got[int(message.payload)] += 1
            await consumer.acknowledge(message)

    async with client.queue_consumer(str(topic), "q", initial="earliest") as consumer:
        receiving = asyncio.create_task(receive(consumer))
        removed: set[int] = set()
        async with client.producer(str(topic), batching=False) as producer:
            load = Sending(producer)

            async def send(_step: str, _moment: Moment) -> None:
                load.send(4)

            with watching(send):
                for number in range(6):
                    await controller.split_segment(number)
                ever = dict(controller.layout.all_segments)
                await load.all()
                # What is sealed and drained is left at once, what is pruned later is not missed.
                await until(lambda: consumer.segments == sorted(controller.layout.active_segments))
                sealed = [service.topics[str(physical_name(topic, ever[number]))] for number in range(6)]
                assert [len(each.subscriptions["q"].consumers) for each in sealed] == [0] * 6
                async with asyncio.timeout(SECONDS):
                    while removed != set(range(6)):
                        removed |= set(await controller.prune())
                        await load.all()
        await until(lambda: set(got) >= load.stored)
        active = {str(physical_name(topic, each)) for each in controller.layout.active_segments.values()}
        assert consumer.segments == sorted(controller.layout.active_segments)
        # At the broker: one consumer on each active segment, and the others are no more.
        assert {name for name in service.topics if name.startswith("segment:")} == active
        assert {name: len(service.topics[name].subscriptions["q"].consumers) for name in active} == dict.fromkeys(active, 1)
        assert attached == {str(physical_name(topic, each)): 1 for each in ever.values()}
        receiving.cancel()
    assert set(got.values()) == {1}
