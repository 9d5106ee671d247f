"""Segments without logs, and several brokers' scalable-topic services over one metadata store, in virtual time.

`FakeSegments` is the cluster's segment topics; `ops(store)` is the `SegmentOps` of one broker. As real owners do, it reads the
topic's record fresh and refuses a stale leader, another incarnation and a segment that the record does not know.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, TypeVar

from braid.errors import NotFound, SubscriptionNotFound, TopicNotFound
from braid.metadata.api import MetadataStore, Record, Span
from braid.metadata.claims import StaleLeader
from braid.metadata.engine import Storage
from braid.metadata.journal import VolatileJournal
from braid.model.layout import SegmentLayout
from braid.model.names import NamespaceName, TopicName
from braid.model.positions import Position
from braid.model.segments import SegmentEnd, physical_name
from braid.runtime.env import Runtime
from braid.runtime.plans import Moment, watching
from braid.runtime.threads import InlineThreads
from braid.scalable.api import Retention, Sealed, SegmentBacklog, SegmentOps, SegmentStats
from braid.scalable.config import ScalableConfig
from braid.scalable.controller import ScalableTopicController
from braid.scalable.records import Initial, ScalableTopicMetadata, decode, from_record, topic_path
from braid.scalable.service import ScalableTopicService
from braid.testing.sim.history import History
from braid.testing.sim.loop import NODE, WORLD, Node, SimLoop, on, run
from braid.testing.sim.ports import SimClock
from braid.testing.sim.stores import EpochNotes, NodeEngine

T = TypeVar("T")
SESSION = 10.0
"""Seconds after which a silent broker has lost its session."""
TOPIC = TopicName.parse("topic://public/default/orders")


@dataclass
class FakeTopic:
    """The topic of one segment."""

    incarnation: str
    messages: int = 0
    trimmed: int = 0
    is_sealed: bool = False
    producers: dict[str, int] = field(default_factory=dict)
    cursors: dict[str, int] = field(default_factory=dict)
    """Messages acknowledged, by subscription."""
    attached: dict[str, tuple[str, ...]] = field(default_factory=dict)
    connected_producers: int = 0
    readers: int = 0
    undecided: int = 0
    """Open transactions that wrote here."""
    last_append_ms: int = 0


class FakeSegments:
    """All segment topics of the cluster."""

    def __init__(self) -> None:
        self.topics: dict[str, FakeTopic] = {}
        self.trace: list[tuple[str, str]] = []
        """Operation and segment, in the order in which they took effect."""
        self.epochs: list[int] = []
        """Of the leaders that created, sealed and deleted, in the order of the calls."""
        self.fail: Callable[[str, str], Exception | None] = lambda _operation, _segment: None
        """Asked before each call: the error to raise instead."""
        self.before: Callable[[str, str], Coroutine[Any, Any, None]] | None = None
        """Awaited before each call."""

    def ops(self, store: MetadataStore) -> SegmentOps:
        return _Ops(self, store)

    def named(self, topic: TopicName, layout: SegmentLayout, segment_id: int) -> FakeTopic:
        return self.topics[str(physical_name(topic, layout.segment(segment_id)))]

    def traced(self, *operations: str) -> list[tuple[str, str]]:
        """The part of the trace with these operations, segments by descriptor."""
        return [(each, name.rpartition("/")[2]) for each, name in self.trace if each in operations]


class _Ops:
    def __init__(self, segments: FakeSegments, store: MetadataStore) -> None:
        self._all = segments
        self._store = store

    async def create(
        self,
        segment: TopicName,
        *,
        subscriptions: Mapping[str, Initial],
        producers: Mapping[str, int],
        epoch: int,
        incarnation: str,
    ) -> None:
        await self._enter("create", segment)
        await self._check(segment, epoch, incarnation)
        topic = self._all.topics.setdefault(str(segment), FakeTopic(incarnation))
        for name, initial in subscriptions.items():
            topic.cursors.setdefault(name, 0 if initial == "earliest" else topic.messages)
        for name, last in producers.items():
            topic.producers[name] = max(last, topic.producers.get(name, last))
        self._done("create", segment)

    async def terminate(self, segment: TopicName, *, epoch: int, incarnation: str) -> Sealed:
        await self._enter("terminate", segment)
        await self._check(segment, epoch, incarnation)
        topic = self._topic(segment)
        topic.is_sealed = True
        self._done("terminate", segment)
        return Sealed(Position(1, topic.messages - 1), dict(topic.producers))

    async def delete(self, segment: TopicName, *, epoch: int, incarnation: str) -> None:
        await self._enter("delete", segment)
        await self._check(segment, epoch, incarnation)
        self._all.topics.pop(str(segment), None)
        self._done("delete", segment)

    async def subscriptions(self, segment: TopicName) -> list[str]:
        await self._enter("subscriptions", segment)
        self._done("subscriptions", segment)
        return sorted(self._topic(segment).cursors)

    async def create_subscription(
        self, segment: TopicName, subscription: str, initial: Initial, *, epoch: int, incarnation: str, operation: str = ""
    ) -> None:
        await self._enter("create_subscription", segment)
        await self._check_subscription(segment, epoch, incarnation)
        topic = self._topic(segment)
        topic.cursors.setdefault(subscription, 0 if initial == "earliest" else topic.messages)
        self._done("create_subscription", segment)

    async def delete_subscription(
        self, segment: TopicName, subscription: str, *, epoch: int, incarnation: str, operation: str = ""
    ) -> None:
        await self._enter("delete_subscription", segment)
        await self._check_subscription(segment, epoch, incarnation)
        topic = self._all.topics.get(str(segment))
        if topic is not None:
            topic.cursors.pop(subscription, None)
            topic.attached.pop(subscription, None)
        self._done("delete_subscription", segment)

    async def backlog(self, segment: TopicName, subscription: str) -> SegmentBacklog:
        await self._enter("backlog", segment)
        topic = self._topic(segment)
        left = topic.messages - self._cursor(segment, subscription)
        return SegmentBacklog(messages=left, is_terminated=topic.is_sealed, consumers=topic.attached.get(subscription, ()))

    async def seek(
        self, segment: TopicName, subscription: str, timestamp_ms: int, *, epoch: int, incarnation: str, operation: str = ""
    ) -> None:
        await self._enter("seek", segment)
        await self._check_subscription(segment, epoch, incarnation)
        self._cursor(segment, subscription)
        topic = self._topic(segment)
        topic.cursors[subscription] = 0 if timestamp_ms == 0 else topic.messages
        self._done("seek", segment)

    async def skip_all(
        self, segment: TopicName, subscription: str, *, epoch: int, incarnation: str, operation: str = ""
    ) -> None:
        await self._enter("skip_all", segment)
        await self._check_subscription(segment, epoch, incarnation)
        self._cursor(segment, subscription)
        topic = self._topic(segment)
        topic.cursors[subscription] = topic.messages
        self._done("skip_all", segment)

    async def settle(self, segment: TopicName) -> None:
        await self._enter("settle", segment)

    async def stats(self, segment: TopicName) -> SegmentStats:
        await self._enter("stats", segment)
        topic = self._topic(segment)
        return SegmentStats(
            owner="somebody",
            messages=topic.messages,
            trimmed=topic.trimmed,
            storage_size=10 * (topic.messages - topic.trimmed),
            producers=topic.connected_producers,
            backlog={name: topic.messages - read for name, read in topic.cursors.items()},
            consumers=dict(topic.attached),
            readers=topic.readers,
            is_terminated=topic.is_sealed,
            end=SegmentEnd(topic.messages, 1, topic.messages - 1) if topic.is_sealed else None,
            undecided=topic.undecided,
            last_append_ms=topic.last_append_ms,
        )

    async def _enter(self, operation: str, segment: TopicName) -> None:
        await asyncio.sleep(0.001)  # a call takes time
        if self._all.before is not None:
            await self._all.before(operation, str(segment))
        error = self._all.fail(operation, str(segment))
        if error is not None:
            raise error

    def _done(self, operation: str, segment: TopicName) -> None:
        self._all.trace.append((operation, str(segment)))

    def _topic(self, segment: TopicName) -> FakeTopic:
        found = self._all.topics.get(str(segment))
        if found is None:
            raise TopicNotFound(f"{segment} does not exist.")
        return found

    def _cursor(self, segment: TopicName, subscription: str) -> int:
        found = self._topic(segment).cursors.get(subscription)
        if found is None:
            raise SubscriptionNotFound(f"{segment} has no subscription {subscription}.")
        return found

    async def _check_subscription(self, segment: TopicName, epoch: int, incarnation: str) -> None:
        if await self._store.get(topic_path(segment.scalable), fresh=True) is not None:  # else a regular topic
            await self._check(segment, epoch, incarnation)

    async def _check(self, segment: TopicName, epoch: int, incarnation: str) -> None:
        self._all.epochs.append(epoch)
        key = topic_path(segment.scalable)
        record = await self._store.get(key, fresh=True)
        if record is None:
            raise NotFound(f"{segment.scalable} does not exist.")
        metadata = decode(ScalableTopicMetadata, key, record.value)
        if epoch < metadata.leader_epoch or metadata.incarnation != incarnation:
            raise StaleLeader(f"{segment}: epoch {epoch} is below {metadata.leader_epoch}, or the incarnation is another.")
        pending = metadata.pending_operation
        known = [*metadata.segments.values(), *(() if pending is None else (*pending.children, *pending.pruned))]
        if str(segment) not in {str(physical_name(segment.scalable, from_record(each))) for each in known}:
            raise NotFound(f"{segment} is neither a segment of its topic nor about to become one.")


class Broker:
    """One broker's scalable topics, on a node of its own that can die or stand still."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.id = f"broker-{number}:8080"
        self.node = Node(self.id)
        with on(self.node):
            self.store = world.engine.handle(self.id)
            self.service = ScalableTopicService(
                world.runtime,
                self.store,
                world.config,
                world.segments.ops(self.store),
                broker_id=lambda: self.id,
                retention=self._retention,
                owns=lambda topic: world.owners.get(topic, 1) == number,
                partitions=self._partitions,
                log_of=self._log_of,
            )

    async def _retention(self, _namespace: NamespaceName) -> Retention:
        return Retention(self.world.retention_minutes, self.world.unread_minutes)

    async def _partitions(self, topic: TopicName) -> int | None:
        return self.world.regular.get(topic)

    async def _log_of(self, _topic: TopicName) -> str | None:
        return None

    async def do(self, work: Callable[[ScalableTopicService], Coroutine[Any, Any, T]]) -> T:
        """Run something as this broker. Raises BrokerDied if the broker dies meanwhile."""
        with on(self.node):
            task: asyncio.Task[T] = asyncio.get_running_loop().create_task(work(self.service))
        while not task.done():
            if self.node.is_dead:
                raise BrokerDied(self.id)
            await asyncio.wait([task], timeout=0.01)
        return task.result()

    async def lead(self, topic: TopicName = TOPIC) -> ScalableTopicController:
        return await self.do(lambda service: service.lead_scalable(topic))

    def die(self) -> None:
        """As a killed process: nothing of it runs any more."""
        self.node.is_dead = True
        self.world.engine.node_died(self.node)

    def pause(self) -> None:
        self.node.is_paused = True

    def resume(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        loop.resume(self.node)

    async def crash_here(self) -> None:
        """Called by code that runs as this broker: it ends at this very place."""
        assert NODE.get() is self.node
        self.die()
        await asyncio.get_running_loop().create_future()


class BrokerDied(Exception):
    """The broker that was to do something is dead."""


class World:
    """A metadata store, segment topics and brokers."""

    def __init__(self, engine: NodeEngine, runtime: Runtime, config: ScalableConfig) -> None:
        self.engine = engine
        self.runtime = runtime
        self.config = config
        self.segments = FakeSegments()
        self.brokers: list[Broker] = []
        self.owners: dict[TopicName, int] = {}
        """Number of the broker whose bundle a topic is in; 1 unless given."""
        self.regular: dict[TopicName, int] = {}
        """Partitions of regular topics."""
        self.retention_minutes = 0
        self.unread_minutes = 0
        self.store: MetadataStore = engine.handle("observer")

    async def broker(self) -> Broker:
        made = Broker(self, len(self.brokers) + 1)
        self.brokers.append(made)
        await made.do(lambda service: service.start())
        return made

    async def metadata(self, topic: TopicName = TOPIC) -> ScalableTopicMetadata | None:
        key = topic_path(topic)
        record = await self.store.get(key, fresh=True)
        return None if record is None else decode(ScalableTopicMetadata, key, record.value)

    async def layout(self, topic: TopicName = TOPIC) -> SegmentLayout:
        found = await self.metadata(topic)
        assert found is not None
        return found.layout

    async def records(self, collection: str) -> list[Record]:
        return [record async for record in self.store.scan(Span(collection), fresh=True)]

    async def until(self, happened: Callable[[], Coroutine[Any, Any, bool]], patience: float = 60.0) -> float:
        """Wait in virtual time; returns how long it took."""
        loop = asyncio.get_running_loop()
        begin = loop.time()
        while not await happened():
            assert loop.time() - begin < patience, "it did not happen in time"
            await asyncio.sleep(0.05)
        return loop.time() - begin

    async def until_settled(self, topic: TopicName = TOPIC, patience: float = 60.0) -> ScalableTopicMetadata:
        """Until no operation is pending."""
        found: list[ScalableTopicMetadata] = []

        async def settled() -> bool:
            now = await self.metadata(topic)
            if now is None or now.pending_operation is not None:
                return False
            found.append(now)
            return True

        await self.until(settled, patience)
        return found[-1]


def simulate(
    main: Callable[[World], Coroutine[Any, Any, T]], *, seed: int | str = 1, config: ScalableConfig | None = None
) -> T:
    """Run a test in virtual time."""

    async def start(_loop: SimLoop) -> T:
        runtime = replace(Runtime(random=Random(f"runtime-{seed}"), threads=InlineThreads()), clock=SimClock())
        storage = Storage(VolatileJournal(runtime.token(128)), runtime.threads.worker("metadata"))
        engine = await NodeEngine.open(runtime, storage)
        assert isinstance(engine, NodeEngine)
        engine.home, engine.epochs = WORLD, EpochNotes(History(runtime.clock.monotonic), engine.tables)
        return await main(World(engine, runtime, config or ScalableConfig()))

    result: T = run(seed, start)
    return result


async def topic_with(world: World, segments: int) -> Broker:
    broker = await world.broker()
    await broker.do(lambda service: service.create_topic(TOPIC, segments))
    return broker


async def split(broker: Broker, segment_id: int) -> None:
    controller = await broker.lead()
    await broker.do(lambda _service: controller.split_segment(segment_id))


async def merge(broker: Broker, first_id: int, second_id: int) -> None:
    controller = await broker.lead()
    await broker.do(lambda _service: controller.merge_segments(first_id, second_id))


async def prune(broker: Broker) -> list[int]:
    controller = await broker.lead()
    return await broker.do(lambda _service: controller.prune())


async def steps_of(work: Awaitable[object], seen: Callable[[str], Awaitable[None]] | None = None) -> list[str]:
    names: list[str] = []

    async def note(name: str, moment: Moment) -> None:
        if moment == "before":
            names.append(name)
            if seen is not None:
                await seen(name)

    with watching(note):
        await work
    return names


async def brokers_with_topic(world: World, count: int, segments: int = 2) -> list[Broker]:
    """The first leads, the others stand by."""
    brokers = [await world.broker() for _ in range(count)]
    await brokers[0].do(lambda service: service.create_topic(TOPIC, segments))
    for broker in brokers[1:]:
        await broker.do(lambda service: service.controller(TOPIC))
    return brokers


async def controller_of(broker: Broker) -> ScalableTopicController:
    found = await broker.do(lambda service: service.controller(TOPIC))
    assert isinstance(found, ScalableTopicController)
    return found


async def until_led_by(world: World, broker: Broker, patience: float = 30.0) -> float:
    controller = await controller_of(broker)

    async def ready() -> bool:
        return controller.is_ready

    return await world.until(ready, patience)
