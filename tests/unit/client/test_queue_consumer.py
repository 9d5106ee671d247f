"""Queue consumers against real brokers: all segments, sharing, messages that come again, dead letters, drained segments."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

import braid
from braid.client import Client
from braid.client.config import ClientConfig
from braid.client.dead_letters import DeadLetterPolicy
from braid.client.messages import Message, MessageId
from braid.client.queue_consumer import Backoff, QueueConsumer
from braid.errors import Closed, DeadlineExceeded, InvalidArgument, TopicNotFound
from braid.metadata.api import Span
from braid.model.names import TopicName
from braid.runtime.env import Runtime
from braid.scalable.config import ScalableConfig
from braid.scalable.controller import ScalableTopicController
from braid.scalable.records import consumers_path
from braid.testing.broker import InProcessBroker
from braid.testing.clock import ManualClock
from braid.web.config import StandaloneConfig
from braid.wire.types import SubType

TOPIC = "topic://public/default/orders"
NAME = TopicName.parse(TOPIC)
SECONDS = 10.0


@pytest.fixture
async def broker() -> AsyncIterator[InProcessBroker]:
    config = StandaloneConfig(scalable_topics=ScalableConfig(drain_poll_seconds=0.1))
    async with InProcessBroker(config=config, with_http=False) as one:
        await one.nodes[0].service.create_scalable_topic(NAME, 2)
        yield one


@pytest.fixture
async def client(broker: InProcessBroker) -> AsyncIterator[Client]:
    async with braid.connect(broker.service_url) as one:
        yield one


async def leader(broker: InProcessBroker) -> ScalableTopicController:
    found = await broker.nodes[0].service.scalable.lead(NAME)
    assert isinstance(found, ScalableTopicController)
    return found


async def until(condition: Callable[[], bool], seconds: float = SECONDS) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - brokers take their own time, no event tells
            await asyncio.sleep(0.005)


async def produce(client: Client, first: int, last: int, *, batching: bool = True) -> None:
    async with client.producer(TOPIC, batching=batching) as producer:
        for number in range(first, last):
            await producer.send(b"%d" % number, key=f"key-{number % 8}")


async def take(consumer: QueueConsumer, count: int) -> list[Message]:
    found = []
    for _ in range(count):
        found.append(await consumer.receive(SECONDS))
        await consumer.acknowledge(found[-1])
    return found


def numbers(messages: list[Message]) -> list[int]:
    return sorted(int(message.payload) for message in messages)


@pytest.mark.req("R468-32", "R468-34")
async def test_all_segments_are_read_and_drained_ones_are_left(broker: InProcessBroker, client: Client) -> None:
    service = broker.nodes[0].service
    controller = await leader(broker)
    async with client.queue_consumer(TOPIC, "q", initial="earliest") as consumer:
        assert consumer.segments == [0, 1]
        await produce(client, 0, 16)
        got = [await consumer.receive(SECONDS) for _ in range(16)]
        await controller.split_segment(0)
        await produce(client, 16, 32)
        got += await take(consumer, 16)
        assert numbers(got) == list(range(32))
        assert consumer.segments == [0, 1, 2, 3]  # the sealed one too, while messages of it are with the application
        for lane in consumer._lanes.values():
            topic = await service.topic(TopicName.parse(lane.topic), create=False)
            assert [each.info.name for each in topic.subscriptions["q"].consumers] == [consumer.name]
        for message in got[:16]:
            await consumer.acknowledge(message)
        await until(lambda: consumer.segments == [1, 2, 3])
        await consumer.acknowledge(got[0])  # again, of a segment that was left: harmless
        assert (await controller.stats())["subscriptions"]["q"]["type"] == "QUEUE"
        registered = service.metadata.names(Span(consumers_path(NAME, "q")), fresh=True)
        assert [name async for name in registered] == []  # no command 73


@pytest.mark.req("R468-33")
async def test_consumers_share_the_messages(broker: InProcessBroker) -> None:
    config = ClientConfig(receiver_queue=4)
    async with (
        braid.connect(broker.service_url, config=config) as client,
        client.queue_consumer(TOPIC, "q", initial="earliest") as first,
        client.queue_consumer(TOPIC, "q") as second,
    ):
        await produce(client, 0, 40, batching=False)
        here, there = await take(first, 4), await take(second, 4)
        while len(here) + len(there) < 40:
            for consumer, found in ((first, here), (second, there)):
                for message in await consumer.receive_batch(4, 0.05):
                    await consumer.acknowledge(message)
                    found.append(message)
        assert numbers([*here, *there]) == list(range(40))


async def test_a_subscription_at_latest_misses_nothing_of_new_segments(broker: InProcessBroker, client: Client) -> None:
    controller = await leader(broker)
    await produce(client, 0, 8)
    async with client.queue_consumer(TOPIC, "q") as consumer:
        async with client.producer(TOPIC) as producer:
            for number in range(100):
                if number in (20, 40):
                    await controller.split_segment(0 if number == 20 else 1)
                if number == 60:
                    await controller.merge_segments(2, 3)
                await producer.send(b"%d" % number, key=f"key-{number % 8}")
        assert numbers(await take(consumer, 100)) == list(range(100))
        with pytest.raises(DeadlineExceeded):
            await consumer.receive(0.1)
        await until(lambda: len(consumer.segments) == 3)


async def test_a_segment_stays_while_the_application_has_messages_of_it(broker: InProcessBroker, client: Client) -> None:
    controller = await leader(broker)
    async with client.queue_consumer(TOPIC, "q", initial="earliest") as consumer:
        await produce(client, 0, 16)
        got = [await consumer.receive(SECONDS) for _ in range(16)]
        await controller.split_segment(0)
        await until(lambda: len(consumer.segments) == 4)
        consumer._lanes[0].ended()  # a broker that tells the end early
        assert 0 in consumer.segments
        for message in got:
            await consumer.acknowledge(message)
        assert consumer.segments == [1, 2, 3]


@pytest.mark.req("R468-34")
async def test_pruned_segments_are_left(broker: InProcessBroker, client: Client) -> None:
    controller = await leader(broker)
    async with client.queue_consumer(TOPIC, "q", initial="earliest") as consumer:
        await controller.split_segment(0)
        await until(lambda: consumer.segments == [1, 2, 3])
        await until(lambda: 0 in consumer._drained)
        assert await controller.prune() == [0]
        await until(lambda: 0 not in consumer._drained)
        await produce(client, 0, 8)
        assert numbers(await take(consumer, 8)) == list(range(8))


@pytest.mark.parametrize("seconds", [1.0, 3600.0])
async def test_a_drained_segment_that_was_set_back_is_read_again(broker: InProcessBroker, seconds: float) -> None:
    """Soon, because brokers close the consumers of a subscription that is set back; else at the next look."""
    config = ClientConfig(drained_check=seconds)
    controller = await leader(broker)
    async with (
        braid.connect(broker.service_url, config=config) as client,
        client.queue_consumer(TOPIC, "q", initial="earliest") as consumer,
    ):
        await produce(client, 0, 16)
        await controller.split_segment(0)
        old = await take(consumer, 16)
        await until(lambda: consumer.segments == [1, 2, 3])
        await controller.seek("q", 0)
        assert numbers(await take(consumer, 16)) == numbers(old)


async def test_refused_messages_come_again_later_each_time(broker: InProcessBroker) -> None:
    clock = ManualClock()
    async with braid.connect(broker.service_url, runtime=Runtime(clock=clock)) as client:
        options = Backoff(first=1.0, longest=3.0)
        async with client.queue_consumer(TOPIC, "q", initial="earliest", nack_backoff=options) as consumer:
            await produce(client, 0, 1)
            message = await consumer.receive()
            for count, pause in enumerate((1.0, 2.0, 3.0, 3.0)):
                assert message.redelivery_count == count
                await consumer.negative_acknowledge(message)
                await clock.advance(pause - 0.1)
                await asyncio.sleep(0.05)
                assert consumer.receive_nowait() is None
                await clock.advance(0.1)
                message = await consumer.receive()
                assert message.payload == b"0"
            await consumer.acknowledge(message, wait=True)
            await clock.advance(100.0)
            assert consumer.receive_nowait() is None


async def test_refused_neighbours_in_a_batch_come_again_together(broker: InProcessBroker) -> None:
    clock = ManualClock()
    async with braid.connect(broker.service_url, runtime=Runtime(clock=clock)) as client:
        options = Backoff(first=1.0, longest=1.0)
        async with client.queue_consumer(TOPIC, "q", initial="earliest", nack_backoff=options) as consumer:
            async with client.producer(TOPIC) as producer:
                await asyncio.gather(*[producer.send_nowait(b"%d" % number, key="same") for number in range(2)])
            first = [await consumer.receive(), await consumer.receive()]
            assert first[0].id.batch_size == 2
            await consumer.negative_acknowledge(first[0])
            await clock.advance(0.5)
            await consumer.negative_acknowledge(first[1])
            await clock.advance(0.5)
            again = [await consumer.receive(), await consumer.receive()]
            assert numbers(again) == [0, 1]
            assert {message.redelivery_count for message in again} == {1}
            await clock.advance(5.0)
            await asyncio.sleep(0.05)
            assert consumer.receive_nowait() is None  # not a third time because of the second refusal


async def test_messages_kept_for_too_long_come_again(broker: InProcessBroker) -> None:
    clock = ManualClock()
    async with (
        braid.connect(broker.service_url, runtime=Runtime(clock=clock)) as client,
        client.queue_consumer(TOPIC, "q", initial="earliest", ack_timeout=10.0) as consumer,
    ):
        await produce(client, 0, 8, batching=False)
        got = [await consumer.receive() for _ in range(8)]
        for message in got[2:]:
            await consumer.acknowledge(message)
        await clock.advance(9.9)
        await asyncio.sleep(0.05)
        assert consumer.receive_nowait() is None
        await clock.advance(1.0)
        again = [await consumer.receive(), await consumer.receive()]
        assert numbers(again) == numbers(got[:2])
        assert {message.redelivery_count for message in again} == {1}
        for message in again:
            await consumer.acknowledge(message, wait=True)
        await clock.advance(100.0)
        await asyncio.sleep(0.05)
        assert consumer.receive_nowait() is None


@pytest.mark.parametrize("domain", ["topic", "persistent"])
async def test_dead_letters(broker: InProcessBroker, client: Client, domain: str) -> None:
    topic = f"{domain}://public/default/{'orders' if domain == 'topic' else 'regular'}"
    policy = DeadLetterPolicy(max_redeliveries=2)
    async with (
        client.queue_consumer(f"{topic}-DLQ", "graveyard", initial="earliest") as graveyard,
        client.queue_consumer(
            topic, "q", initial="earliest", dead_letter=policy, nack_backoff=Backoff(first=0.01, longest=0.01)
        ) as consumer,
        client.producer(topic, batching=False) as producer,
    ):
        await producer.send(b"bad", key="k", properties={"a": "b"}, event_time=1234)
        await producer.send(b"good", key="k")
        deliveries = 0
        origin: MessageId | None = None
        while deliveries < 4:  # three times the bad one, once the good one
            message = await consumer.receive(SECONDS)
            deliveries += 1
            if message.payload == b"bad":
                origin = message.id
                await consumer.negative_acknowledge(message)
            else:
                await consumer.acknowledge(message)
        dead = await graveyard.receive(SECONDS)
        assert (dead.payload, dead.key, dead.event_ms) == (b"bad", "k", 1234)
        assert dead.properties == {
            "a": "b",
            "REAL_TOPIC": topic,
            "REAL_SUBSCRIPTION": "q",
            "ORIGIN_MESSAGE_ID": str(origin),
        }
        with pytest.raises(DeadlineExceeded):
            await consumer.receive(0.1)


async def test_a_dead_letter_that_cannot_be_stored_stays(broker: InProcessBroker, client: Client) -> None:
    policy = DeadLetterPolicy(max_redeliveries=0, topic="persistent://public/nowhere/dead")
    backoff = Backoff(first=0.01, longest=0.01)
    async with client.queue_consumer(TOPIC, "q", initial="earliest", dead_letter=policy, nack_backoff=backoff) as consumer:
        await produce(client, 0, 1)
        await consumer.negative_acknowledge(await consumer.receive(SECONDS))
        await asyncio.sleep(0.1)
    async with client.queue_consumer(TOPIC, "q") as consumer:
        assert (await consumer.receive(SECONDS)).payload == b"0"


async def test_batches_are_acknowledged_message_by_message(broker: InProcessBroker, client: Client) -> None:
    async with client.queue_consumer(TOPIC, "q", initial="earliest") as consumer:
        async with client.producer(TOPIC) as producer:
            sent = [producer.send_nowait(b"%d" % number, key="same") for number in range(10)]
            await asyncio.gather(*sent)
        got = [await consumer.receive(SECONDS) for _ in range(10)]
        assert got[0].id.batch_size == 10
        for message in got[:7]:
            await consumer.acknowledge(message, wait=True)
    async with client.queue_consumer(TOPIC, "q") as consumer:
        assert numbers(await take(consumer, 3)) == [7, 8, 9]


async def test_regular_partitioned_topics(broker: InProcessBroker, client: Client) -> None:
    topic = "persistent://public/default/parts"
    await broker.nodes[0].service.create_partitioned(TopicName.parse(topic), 3)
    async with client.queue_consumer(topic, "q", initial="earliest") as consumer, client.producer(topic) as producer:
        assert consumer.segments == [0, 1, 2]
        for number in range(12):
            await producer.send(b"%d" % number)
        got = await take(consumer, 12)
        assert numbers(got) == list(range(12))
        assert {message.id.partition for message in got} == {0, 1, 2}
        assert {message.topic for message in got} == {topic}
        assert all(lane.options.sub_type is SubType.SHARED for lane in consumer._lanes.values())


async def test_bad_arguments(broker: InProcessBroker, client: Client) -> None:
    with pytest.raises(InvalidArgument, match="ack_timeout"):
        await client.queue_consumer(TOPIC, "q", ack_timeout=0)
    with pytest.raises(InvalidArgument, match="max_redeliveries"):
        DeadLetterPolicy(max_redeliveries=-1)
    with pytest.raises(InvalidArgument, match="back-off"):
        Backoff(first=2.0, longest=1.0)
    async with client.queue_consumer(TOPIC, "q") as consumer:
        with pytest.raises(InvalidArgument, match="not received"):
            await consumer.acknowledge(MessageId(1, 1))
        with pytest.raises(InvalidArgument, match="not received"):
            await consumer.acknowledge(MessageId(1, 1, segment_id=99))
    with pytest.raises(Closed):
        await consumer.acknowledge(MessageId(1, 1, segment_id=0))


async def test_a_deleted_topic_ends_its_consumers(broker: InProcessBroker, client: Client) -> None:
    async with client.queue_consumer(TOPIC, "q") as consumer:
        waiting = asyncio.ensure_future(consumer.receive(SECONDS))
        await asyncio.sleep(0)
        await broker.nodes[0].service.scalable.delete_topic(NAME, force=True)
        with pytest.raises(TopicNotFound):
            await waiting


async def test_a_batch_of_which_one_message_comes_again_is_acknowledged_as_a_whole(
    broker: InProcessBroker, client: Client
) -> None:
    controller = await leader(broker)
    async with client.queue_consumer(TOPIC, "q", initial="earliest", nack_backoff=Backoff(first=0.0)) as consumer:
        async with client.producer(TOPIC) as producer:
            await asyncio.gather(*[producer.send(b"%d" % number, key="k") for number in range(4)])
        got = [await consumer.receive(SECONDS) for _ in range(4)]
        assert {each.id.batch_size for each in got} == {4}
        await consumer.acknowledge(got[0])
        await consumer.negative_acknowledge(got[1])
        again = await consumer.receive(SECONDS)
        assert again.payload == b"1"  # the others are with the application, or acknowledged
        for message in (*got[2:], again):
            await consumer.acknowledge(message, wait=True)
        assert (await controller.stats())["subscriptions"]["q"]["backlog"] == 0
        assert [lane._acks._open for lane in consumer._lanes.values()] == [{}, {}]


async def test_a_batch_refused_in_part_and_forgotten_in_part_is_sent_again_once(broker: InProcessBroker) -> None:
    """Else it is counted twice, and its messages are dead letters before they were tried as often as the policy says."""
    clock = ManualClock()
    async with braid.connect(broker.service_url, runtime=Runtime(clock=clock)) as client:
        options = Backoff(first=1.5, longest=1.5)
        async with client.queue_consumer(TOPIC, "q", initial="earliest", ack_timeout=1.0, nack_backoff=options) as consumer:
            async with client.producer(TOPIC) as producer:
                await asyncio.gather(*[producer.send(b"%d" % number, key="k") for number in range(2)])
            for count in range(3):
                got = [await consumer.receive() for _ in range(2)]
                assert [each.redelivery_count for each in got] == [count, count]
                await consumer.negative_acknowledge(got[0])
                await clock.advance(1.0)  # the other one is overdue; both come
                while len(consumer._queue) < 2:  # noqa: ASYNC110 - the broker takes its own time
                    await asyncio.sleep(0.005)
                await clock.advance(0.9)  # when the refused one would have come by itself


async def test_a_segment_that_comes_while_it_opens_does_not_decide_where_the_subscription_begins(
    broker: InProcessBroker, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first attachment makes the subscription. A segment younger than the consumer used to ask for its beginning, and then
    a subscription at the latest message began at the earliest on every other segment too."""
    await produce(client, 0, 20)
    honest, released = client.locate, asyncio.Event()

    async def late(topic: str, *args: Any, **options: Any) -> Any:
        if topic.endswith(("-0", "-1")):
            await released.wait()
        return await honest(topic, *args, **options)

    monkeypatch.setattr(client, "locate", late)
    service = broker.nodes[0].service
    consumer = QueueConsumer(client, TOPIC, "q", initial="latest")
    opening = asyncio.get_running_loop().create_task(consumer.open())
    await until(lambda: consumer.segments == [0, 1])
    await (await leader(broker)).split_segment(0)
    await until(lambda: any("q" in topic.subscriptions for name, topic in service.topics.items() if name.endswith("-2")))
    released.set()
    await opening
    record = await service.records.subscription(NAME, "q", (await service.scalable.metadata(NAME)).incarnation)
    assert record is not None and record.initial == "latest"
    await produce(client, 20, 30)
    assert numbers(await take(consumer, 10)) == list(range(20, 30))
    await consumer.close()
