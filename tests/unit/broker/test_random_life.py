"""Random lives of a topic: producers, subscriptions of every type, disk trouble, unloads, kills, rival brokers, time jumps.

Afterwards everything heals, and the log and the subscriptions are held against what the clients were told: nothing
acknowledged is lost, nothing is made up, nothing is doubled without a reason, producers keep their order, the index is dense,
and an acknowledgement that was answered stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from braid.errors import BraidError, LedgerOverloaded, OutcomeUnknown, StoreUnavailable, TopicTerminated
from braid.managedledger.config import ManagedLedgerConfig
from braid.model.names import TopicName
from braid.model.positions import Position
from braid.testing.raw_client import RawClient, id_of, metadata_of, position_of
from braid.wire import requests
from braid.wire.client import Delivery
from braid.wire.commands import signed64
from braid.wire.entries import entry_metadata
from braid.wire.types import AckType, CommandType, InitialPosition, SubType

# A killed broker abandons sockets, as a dead process does; here nobody else closes them.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


@pytest.fixture(autouse=True)
def abandoned_sockets() -> Iterator[None]:
    """Collect what a killed broker left within this test, not in the next one."""
    yield
    gc.collect()


TOPIC = "persistent://public/default/life"
Key = tuple[str, int]
NOWHERE = Position(-1, -1)
LIMIT_SECONDS = 30.0
TROUBLE = (BraidError, ConnectionError, OSError)


class Life:
    """One seed: who lives in it, and what is promised to whom."""

    def __init__(self, world: Any, seed: int, dedup: bool) -> None:
        self.world = world
        self.random = random.Random(seed)
        self.dedup = dedup
        self.brokers: list[Any] = []
        self.retention = self.random.choice([-1, 0])
        self.is_terminated = False
        self.was_trimmed = False
        self.is_ending = False
        self.favourite = 0
        """The broker most clients go to; it changes, and each change is a fight for the topic."""
        self.metadata_trouble = 0.0
        self.logs = ManagedLedgerConfig(
            max_entries_per_ledger=self.random.choice([3, 7, 20]),
            min_ledger_age_ms=0,
            max_entries_per_cursor_ledger=self.random.choice([3, 50]),
            max_queued_entries=self.random.choice([40, 1000]),
            max_queued_bytes=1 << 20,
            cache_bytes=self.random.choice([0, 2000, 1 << 20]),
        )

    async def start_broker(self) -> None:
        broker = await self.world.broker(
            self.logs,
            believes=True,
            deduplication=self.dedup,
            deduplication_snapshot_entries=self.random.choice([2, 10, 1000]),
            retention_check_seconds=5.0,
            retention_minutes=self.retention,
            retention_mb=self.retention,
            liveness_check_ms=50,
        )
        self._trouble_for(broker)
        self.brokers.append(broker)

    def _trouble_for(self, broker: Any) -> None:
        """Metadata writes of this broker fail now and then, applied or not."""
        handle = broker.service.metadata
        put, delete = handle.put, handle.delete

        async def trouble(work: Callable[[], Any]) -> Any:
            roll = self.random.random()
            if roll < self.metadata_trouble / 2:
                raise StoreUnavailable("The metadata store does not answer.")
            result = await work()
            if roll < self.metadata_trouble:
                raise OutcomeUnknown("The answer of the metadata store was lost.")
            return result

        handle.put = lambda *args, **options: trouble(lambda: put(*args, **options))
        handle.delete = lambda *args, **options: trouble(lambda: delete(*args, **options))

    async def connect(self) -> RawClient:
        if not self.brokers:
            raise ConnectionError("no broker is up")
        broker = (
            self.random.choice(self.brokers)
            if self.random.random() < 0.02
            else self.brokers[self.favourite % len(self.brokers)]
        )
        client: RawClient = await broker.client(answers_pings=True)
        return client

    async def pause(self, most: int = 20) -> None:
        for _ in range(self.random.randint(1, most)):
            await asyncio.sleep(0)


class LifeProducer:
    """Sends numbered entries; after any trouble it comes back and sends again what was not answered, in order."""

    def __init__(self, life: Life, name: str, total: int) -> None:
        self.life = life
        self.name = name
        self.total = total
        self.next = 0
        self.unanswered: deque[tuple[int, int]] = deque()
        self.first_last: dict[int, int] = {}
        """Every entry ever made: first and last sequence id."""
        self.receipts: dict[int, Position] = {}
        self.resent: set[int] = set()
        self.client: RawClient | None = None
        self.is_attached = False

    async def run(self) -> None:
        life = self.life
        while self.next < self.total or self.unanswered:
            try:
                if self.client is None or self.client.is_closed or not self.is_attached:
                    await self._attach()
                self._listen()
                if self.is_attached and self.next < self.total and len(self.unanswered) < 30:
                    self._send_new()
                if life.random.random() < 0.005:
                    self._leave()
            except TopicTerminated:
                assert life.is_terminated
                return
            except TROUBLE:
                self._leave()
            await life.pause()

    async def _attach(self) -> None:
        if self.client is None or self.client.is_closed:
            self.client = await self.life.connect()
        await self.client.producer(TOPIC, name=self.name)
        self.is_attached = True
        for first, last in self.unanswered:
            self.resent.add(first)
            self._send(first, last)

    def _listen(self) -> None:
        client = self.client
        assert client is not None
        events, client.inbox = client.inbox, []
        for event in events:
            if isinstance(event, Delivery):
                continue
            if event.type == CommandType.SEND_RECEIPT:
                sequence = signed64(event.body.sequence_id)
                if not self.unanswered or sequence < self.unanswered[0][0]:
                    continue  # of an entry that was sent again and answered twice
                assert self.unanswered[0][0] == sequence, f"{self.name}: receipt {sequence} out of order"
                self.unanswered.popleft()
                self.receipts[sequence] = position_of(event.body.message_id)
            elif event.type == CommandType.CLOSE_PRODUCER:
                self.is_attached = False
                if self.life.random.random() < 0.3:
                    self._leave()
                    return
            elif event.type == CommandType.SEND_ERROR:
                self._leave()
                return

    def _leave(self) -> None:
        self.is_attached = False
        if self.client is not None:
            self.client.close()
        self.client = None

    def _send_new(self) -> None:
        size = self.life.random.choice([1, 1, 3])
        for _ in range(self.life.random.choice([1, 1, 5])):
            first, last = self.next, self.next + size - 1
            self.next += size
            self.first_last[first] = last
            self.unanswered.append((first, last))
            self._send(first, last)

    def _send(self, first: int, last: int) -> None:
        assert self.client is not None
        if first == last:
            self.client.publish(b"x", first, producer_name=self.name)
        else:
            batch = [b"y"] * (last - first + 1)
            self.client.publish(b"", first, producer_name=self.name, batch=batch, highest=last, highest_sequence_id=last)


class Sub:
    """What the consumers of one subscription saw and were promised."""

    def __init__(self, name: str, sub_type: SubType) -> None:
        self.name = name
        self.sub_type = sub_type
        self.seen: set[Position] = set()
        self.acked: set[Position] = set()
        """Acknowledged, answered, and not undone by a seek."""
        self.skipped_below = Position(-1, -1)
        self.seeks = 0
        self.seeking = 0


class LifeConsumer:
    """Receives, acknowledges, refuses, seeks, leaves and comes back."""

    def __init__(self, life: Life, sub: Sub, number: int) -> None:
        self.life = life
        self.sub = sub
        self.number = number
        self.client: RawClient | None = None
        self.waiting: dict[int, tuple[set[Position], int]] = {}
        self.last = Position(-1, -1)
        self.rewinds = 0
        """How often the stream may start again: once per redelivery asked for, and when the consumer becomes active."""

    async def run(self) -> None:
        life = self.life
        while not life.is_ending:
            try:
                if self.client is None or self.client.is_closed:
                    await self._attach()
                self._listen()
                roll = life.random.random()
                if roll < 0.004 and self.client is not None:
                    self.client.close()
                    self.client = None
                elif roll < 0.008 and self.client is not None:
                    await self.client.close_consumer()
                    self._gone()
                elif roll < 0.010 and self.client is not None and self.sub.seen:
                    await self._seek()
            except TROUBLE:
                self._gone()
            await life.pause()
        self._gone()

    def _gone(self) -> None:
        if self.client is not None:
            self.client.close()
        self.client = None

    async def _attach(self) -> None:
        self.waiting.clear()
        self.last = Position(-1, -1)
        self.rewinds = 0
        self.client = client = await self.life.connect()
        await client.subscribe(
            TOPIC,
            self.sub.name,
            self.sub.sub_type,
            permits=self.life.random.choice([1, 10, 100]),
            initial=InitialPosition.EARLIEST,
            consumer_name=f"c{self.number}",
        )

    def _listen(self) -> None:
        client = self.client
        assert client is not None
        events, client.inbox = client.inbox, []
        for event in events:
            if isinstance(event, Delivery):
                self._received(client, event)
            elif event.type == CommandType.CLOSE_CONSUMER:
                self._gone()
                return
            elif event.type == CommandType.ACTIVE_CONSUMER_CHANGE:
                self.rewinds += 1
            elif event.type == CommandType.ACK_RESPONSE:
                positions, seeks = self.waiting.pop(event.body.request_id, (set(), -1))
                if not event.body.HasField("error") and seeks == self.sub.seeks and not self.sub.seeking:
                    self.sub.acked |= positions

    def _received(self, client: RawClient, event: Delivery) -> None:
        sub, chance = self.sub, self.life.random
        position = position_of(event.command.message_id)
        sub.seen.add(position)
        client.flow(max(1, metadata_of(event).num_messages_in_batch))
        if sub.sub_type is not SubType.SHARED:
            if position <= self.last:
                assert self.rewinds, f"{sub.name}: {position} came after {self.last}"
                self.rewinds -= 1
            self.last = position
        roll = chance.random()
        if roll < 0.5:
            self._ack(client, position, AckType.INDIVIDUAL, {position})
        elif roll < 0.6 and sub.sub_type is not SubType.SHARED:
            self._ack(client, position, AckType.CUMULATIVE, {each for each in sub.seen if each <= position})
        elif roll < 0.65:
            client.redeliver(position)
            self.rewinds += 1

    def _ack(self, client: RawClient, position: Position, kind: AckType, covered: set[Position]) -> None:
        if self.life.random.random() < 0.7:
            request = client.next_request()
            self.waiting[request] = (covered, self.sub.seeks)
            client.send(requests.ack(1, [id_of(position)], kind, request))
        else:
            client.send(requests.ack(1, [id_of(position)], kind, None))

    async def _seek(self) -> None:
        sub = self.sub
        target = self.life.random.choice(sorted(sub.seen))
        sub.skipped_below = max(sub.skipped_below, target)
        sub.seeks += 1
        sub.seeking += 1
        try:
            assert self.client is not None
            await self.client.seek(target)
        finally:
            sub.seeking -= 1
            sub.seeks += 1
            sub.acked = {each for each in sub.acked if each < target}
            self._gone()


async def chaos(life: Life) -> None:
    """Trouble of every kind, then calm, until the producers are done: what does not end then hangs."""
    chance, world = life.random, life.world
    troubles = chance.randint(10, 60)
    while not life.is_ending:
        await life.pause(60)
        troubles -= 1
        roll = chance.random() if troubles > 0 else 0.0
        broker = chance.choice(life.brokers)
        topic = broker.service.topics.get(TOPIC)
        if troubles > 0 and chance.random() < 0.1:
            life.favourite += 1
        if roll < 0.15:
            await world.advance(chance.choice([0.01, 0.2, 1.5, 6.0]))
        elif roll < 0.25:
            world.ledgers.hold()
            await life.pause(100)
            world.ledgers.release()
        elif roll < 0.32:
            world.ledgers.hold()
            await life.pause(60)
            world.ledgers.fill()
        elif roll < 0.38 and topic is not None:
            await broker.service.unload(topic)
        elif roll < 0.41 and topic is not None:
            await asyncio.gather(broker.service.unload(topic), broker.service.unload(topic))
        elif roll < 0.46:
            life.metadata_trouble = 0.3
            await life.pause(100)
            life.metadata_trouble = 0.0
        elif roll < 0.49:
            world.ledgers.is_unreadable = True
            if topic is not None and chance.random() < 0.5:
                overload(topic.log)
            await life.pause(60)
            world.ledgers.is_unreadable = False
        elif roll < 0.51:
            life.brokers.remove(broker)
            await broker.kill()
            await life.start_broker()
        elif roll < 0.53:
            life.brokers.remove(broker)
            await broker.stop()
            await life.start_broker()
        elif roll < 0.57:
            world.clock._start_ms += chance.choice([-36_000_000, 1000, 36_000_000])
        elif roll < 0.58:
            life.retention = chance.choice([-1, 0])
            policy = {"retentionTimeInMinutes": life.retention, "retentionSizeInMB": life.retention}
            with contextlib.suppress(*TROUBLE):
                await broker.policy("retention_policies", policy)
        elif roll < 0.60 and topic is not None:
            overload(topic.log)
        elif roll < 0.605 and topic is not None:
            life.is_terminated = True
            with contextlib.suppress(*TROUBLE):
                await topic.terminate()
        elif roll < 0.64 and topic is not None:
            for name in list(topic.subscriptions):
                if name == "victim":
                    with contextlib.suppress(*TROUBLE):
                        await topic.delete_subscription(name)


def overload(log: Any) -> None:
    """The store refuses the next entry; what it took before is still on its way."""
    tail = log.tail
    if tail is not None:

        def refuse(_head: bytes, _body: bytes) -> int:
            raise LedgerOverloaded("Too much waits for the disk.")

        tail.append = refuse


async def heal(life: Life) -> Any:
    """The end of all trouble: one broker with the topic loaded anew."""
    life.metadata_trouble = 0.0
    life.world.ledgers.is_unreadable = False
    life.world.ledgers.release()
    if life.random.random() < 0.5:
        for broker in life.brokers:
            await broker.kill()
    else:
        for broker in life.brokers:
            await broker.stop()
    life.brokers.clear()
    await life.start_broker()
    return await life.brokers[0].service.topic(TopicName.parse(TOPIC), create=True)


async def stored(topic: Any) -> list[tuple[Position, Key, int, int]]:
    """Everything in the log: position, producer and sequence id, messages, index."""
    found: list[tuple[Position, Key, int, int]] = []
    position = Position(-1, -1)
    while entries := await topic.log.read(position, 100, 1 << 20):
        for each in entries:
            metadata = entry_metadata(each.body)
            at = Position(each.ledger_id, each.entry_id)
            found.append((at, (metadata.producer_name, metadata.sequence_id), each.messages, each.index))
        position = Position(entries[-1].ledger_id, entries[-1].entry_id + 1)
    return found


def check_log(life: Life, producers: list[LifeProducer], subs: list[Sub], log: list[tuple[Position, Key, int, int]]) -> None:
    start = log[0][0] if log else Position(1 << 62, 0)
    by_position = {position: key for position, key, _, _ in log}
    index = log[0][3] - log[0][2] if log else -1
    highest: dict[str, int] = {}
    times: dict[Key, int] = {}
    made = {(each.name, first): last - first + 1 for each in producers for first, last in each.first_last.items()}
    resent = {(each.name, first) for each in producers for first in each.resent}
    for position, key, messages, number in log:
        assert made.get(key) == messages, f"phantom {key} at {position}"
        index += messages
        assert number == index, f"index {number} at {position}, {index} expected"
        times[key] = times.get(key, 0) + 1
        if times[key] == 1 and not (life.was_trimmed and key in resent):  # its first copy may be gone
            assert key[1] > highest.get(key[0], -1), f"{key} at {position} after {highest[key[0]]}"
            highest[key[0]] = key[1]
    for each in producers:
        for first, position in each.receipts.items():
            if NOWHERE < position < start:  # trimmed
                assert all(position in sub.seen or position < sub.skipped_below for sub in subs), f"trimmed unread: {position}"
                continue
            if position == NOWHERE and life.was_trimmed and (each.name, first) not in times:
                continue
            assert times.get((each.name, first)), f"lost {each.name} {first}, receipt {position}"
            if position.ledger_id >= 0:
                assert by_position.get(position) == (each.name, first), f"another entry at {position} than {each.name} {first}"
            elif not life.dedup:
                raise AssertionError("a receipt without position")
    for name, first in [key for key, count in times.items() if count > 1]:
        assert not life.dedup and (name, first) in resent, f"duplicate {name} {first}"


async def check_subscription(life: Life, sub: Sub, log: list[tuple[Position, Key, int, int]]) -> None:
    client = await life.brokers[0].client(answers_pings=True)
    await client.subscribe(TOPIC, sub.name, sub.sub_type, permits=100_000, initial=InitialPosition.EARLIEST)
    topic = life.brokers[0].topic(TOPIC)
    expected = topic.subscriptions[sub.name].cursor.backlog()
    got = [position_of(each.command.message_id) for each in await client.messages(expected)]
    assert got == sorted(set(got)), sub.name
    again = set(got) & sub.acked
    assert not again, f"{sub.name}: acknowledged, answered and delivered again: {sorted(again)[:5]}"
    missing = {position for position, *_ in log if position >= sub.skipped_below} - sub.seen - set(got)
    assert not missing, f"{sub.name}: never delivered {sorted(missing)[:5]}"
    client.close()


async def live(world: Any, seed: int, *, brokers: int, dedup: bool, total: int = 60) -> None:
    life = Life(world, seed, dedup)
    for _ in range(brokers):
        await life.start_broker()
    producers = [LifeProducer(life, f"p{number}", total) for number in range(3)]
    subs = [Sub("ex", SubType.EXCLUSIVE), Sub("fo", SubType.FAILOVER), Sub("sh", SubType.SHARED), Sub("victim", SubType.SHARED)]
    for sub in subs:
        first = await life.brokers[0].client()
        await first.subscribe(TOPIC, sub.name, sub.sub_type, initial=InitialPosition.EARLIEST)
        first.close()
    consumers = [LifeConsumer(life, sub, number) for sub in subs for number in range(1 if sub.name == "ex" else 2)]
    async with asyncio.timeout(LIMIT_SECONDS):
        async with asyncio.TaskGroup() as group:
            for consumer in consumers:
                group.create_task(consumer.run())
            trouble = group.create_task(chaos(life))
            makers = [group.create_task(producer.run()) for producer in producers]
            await asyncio.wait(makers)
            for _ in range(life.random.randint(0, 200)):
                await asyncio.sleep(0)
            life.is_ending = True
            await trouble
        topic = await heal(life)
        log = await stored(topic)
        life.was_trimmed = bool(log) and log[0][3] >= log[0][2]
        check_log(life, producers, subs[:3], log)
        if topic.log.is_terminated:
            assert life.is_terminated
            assert topic.log.terminated_position == topic.log.last_position
        elif life.is_terminated:
            assert all(not each.unanswered for each in producers)
        for sub in subs[:3]:
            await check_subscription(life, sub, log)
        await life.brokers[0].stop()


@pytest.mark.parametrize("seed", range(10))
async def test_random_life(world: Any, seed: int) -> None:
    await live(world, seed, brokers=1, dedup=seed % 2 == 0)


@pytest.mark.parametrize("seed", range(10))
async def test_two_brokers_fight_for_one_topic(world: Any, seed: int) -> None:
    await live(world, 1000 + seed, brokers=2, dedup=seed % 2 == 0)
