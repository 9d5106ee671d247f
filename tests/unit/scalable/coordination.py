"""A leader's coordination without a broker: the memory store, segments in memory, virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, TypeVar

import msgspec

from braid.errors import BraidError, LedgerLost, StoreUnavailable, SubscriptionNotFound, TopicNotFound
from braid.metadata.api import ABSENT, MetadataStore, Record, Span
from braid.metadata.backends import memory
from braid.metadata.election import LeaderElection, Leadership
from braid.metadata.engine import Engine
from braid.metadata.handle import Handle
from braid.model.layout import SegmentLayout
from braid.model.names import TopicName
from braid.model.positions import Position
from braid.model.segments import physical_name
from braid.runtime.env import Runtime
from braid.runtime.threads import InlineThreads
from braid.scalable.api import BlockedBy, ConsumerAssignment, ConsumerRegistration, Sealed, SegmentBacklog, SegmentStats
from braid.scalable.config import ScalableConfig
from braid.scalable.coordinator import SubscriptionCoordinator
from braid.scalable.records import (
    TOPICS,
    Initial,
    RegistrationRecord,
    ScalableTopicMetadata,
    SubscriptionMetadata,
    consumers_path,
    controller_path,
    decode,
    subscription_path,
    topic_path,
)
from braid.scalable.subscription_plans import SubscriptionPlans
from braid.testing.sim.loop import SimLoop, run
from braid.testing.sim.ports import SimClock

T = TypeVar("T")
TOPIC = TopicName.parse("topic://public/default/orders")


@dataclass
class Stored:
    """One segment's topic."""

    times: list[int] = field(default_factory=list)
    """When each message was appended."""
    is_sealed: bool = False
    read: dict[str, int] = field(default_factory=dict)
    """Messages acknowledged, by subscription."""
    unreadable: list[str] = field(default_factory=list)
    """Subscriptions whose cursors cannot be read: nobody can move them, but they can be deleted."""
    attached: list[str] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)


class Segments:
    """`SegmentOps` in memory."""

    def __init__(self) -> None:
        self.topics: dict[str, Stored] = {}
        self.trace: list[tuple[str, str]] = []
        self.lost: set[str] = set()
        """Segments whose owners refuse everything until their data is put back."""
        self.fail: Callable[[str, str], BraidError | None] = lambda _operation, _segment: None
        self.hook: Callable[[str, str], None] = lambda _operation, _segment: None

    def fill(self, topic: TopicName, layout: SegmentLayout, messages: int = 0, *subscriptions: str) -> None:
        """Topics for all segments of a layout."""
        for segment in layout.all_segments.values():
            name = str(physical_name(topic, segment))
            if name not in self.topics:
                self.topics[name] = Stored([0] * messages, read=dict.fromkeys(subscriptions, 0))
            self.topics[name].is_sealed = segment.is_sealed

    def at(self, layout: SegmentLayout, number: int, topic: TopicName = TOPIC) -> Stored:
        return self.topics[str(physical_name(topic, layout.segment(number)))]

    async def _enter(self, operation: str, segment: TopicName) -> Stored:
        await asyncio.sleep(0.001)
        self.hook(operation, str(segment))
        self.trace.append((operation, str(segment)))
        if str(segment) in self.lost:
            raise LedgerLost(f"The store does not know ledger 7, which the topic {segment} needs.")
        error = self.fail(operation, str(segment))
        if error is not None:
            raise error
        found = self.topics.get(str(segment))
        if found is None:
            raise TopicNotFound(f"{segment} does not exist.")
        return found

    async def create(
        self,
        segment: TopicName,
        *,
        subscriptions: Mapping[str, Initial],
        producers: Mapping[str, int],
        epoch: int,
        incarnation: str,
    ) -> None:
        raise NotImplementedError

    async def terminate(self, segment: TopicName, *, epoch: int, incarnation: str) -> Sealed:
        return Sealed(Position(0, len((await self._enter("terminate", segment)).times) - 1))

    async def delete(self, segment: TopicName, *, epoch: int, incarnation: str) -> None:
        self.topics.pop(str(segment), None)

    async def subscriptions(self, segment: TopicName) -> list[str]:
        return sorted((await self._enter("subscriptions", segment)).read)

    async def create_subscription(
        self, segment: TopicName, subscription: str, initial: Initial, *, epoch: int, incarnation: str, operation: str = ""
    ) -> None:
        stored = await self._enter("create_subscription", segment)
        stored.read.setdefault(subscription, 0 if initial == "earliest" else len(stored.times))

    async def delete_subscription(
        self, segment: TopicName, subscription: str, *, epoch: int, incarnation: str, operation: str = ""
    ) -> None:
        try:
            stored = await self._enter("delete_subscription", segment)
            stored.read.pop(subscription, None)
            stored.unreadable = [name for name in stored.unreadable if name != subscription]
        except TopicNotFound:
            return

    async def backlog(self, segment: TopicName, subscription: str) -> SegmentBacklog:
        stored = await self._enter("backlog", segment)
        if subscription not in stored.read:
            raise SubscriptionNotFound(f"{segment} has no subscription {subscription}.")
        return SegmentBacklog(
            messages=len(stored.times) - stored.read[subscription],
            is_terminated=stored.is_sealed,
            consumers=tuple(stored.attached),
            closed=tuple(stored.closed),
        )

    async def seek(
        self, segment: TopicName, subscription: str, timestamp_ms: int, *, epoch: int, incarnation: str, operation: str = ""
    ) -> None:
        stored = await self._enter("seek", segment)
        if subscription in stored.unreadable:
            raise StoreUnavailable("The record x cannot be read.")
        if subscription not in stored.read:
            raise SubscriptionNotFound(f"{segment} has no subscription {subscription}.")
        stored.read[subscription] = sum(time < timestamp_ms for time in stored.times)

    async def skip_all(
        self, segment: TopicName, subscription: str, *, epoch: int, incarnation: str, operation: str = ""
    ) -> None:
        stored = await self._enter("skip_all", segment)
        if subscription in stored.unreadable:
            raise StoreUnavailable("The record x cannot be read.")
        if subscription not in stored.read:
            raise SubscriptionNotFound(f"{segment} has no subscription {subscription}.")
        stored.read[subscription] = len(stored.times)

    async def stats(self, segment: TopicName) -> SegmentStats:
        topic = await self._enter("stats", segment)
        why = BlockedBy(kind="unreadable-record", detail={"error": "The record x cannot be read."})
        return SegmentStats(messages=len(topic.times), blocked_by=dict.fromkeys(topic.unreadable, (why,)))

    async def settle(self, segment: TopicName) -> None:
        await self._enter("settle", segment)


class Client:
    """A consumer's connection, as the coordinator sees it."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.pushed: list[ConsumerAssignment] = []
        self.was_displaced = False
        self.error: BraidError | None = None
        self.log: list[str] = []

    def push(self, assignment: ConsumerAssignment) -> None:
        self.pushed.append(assignment)
        self.log.append(f"push {ids(assignment)}")

    def displaced(self) -> None:
        self.was_displaced = True

    def ended(self, error: BraidError) -> None:
        self.error = error


def ids(assignment: ConsumerAssignment) -> list[int]:
    return [each.segment_id for each in assignment.segments]


class CountingStore:
    """Counts writes on their way to a real handle, and can refuse them."""

    def __init__(self, inner: MetadataStore) -> None:
        self.inner = inner
        self.writes: list[str] = []
        self.refuse: Callable[[str], BraidError | None] = lambda _key: None
        self.refuse_delete: Callable[[str], BraidError | None] = lambda _key: None
        self.is_lost: Callable[[str], bool] = lambda _key: False
        """Whether a write never arrives and is not answered."""
        self.refuse_read: Callable[[str], BraidError | None] = lambda _key: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def get(self, key: str, **options: Any) -> Record | None:
        error = self.refuse_read(key)
        if error is not None:
            raise error
        return await self.inner.get(key, **options)

    async def put(self, key: str, value: bytes, **options: Any) -> Record:
        error = self.refuse(key)
        if error is not None:
            raise error
        if self.is_lost(key):
            await asyncio.Event().wait()
        self.writes.append(key)
        return await self.inner.put(key, value, **options)

    async def delete(self, key: str, **options: Any) -> bool:
        error = self.refuse_delete(key)
        if error is not None:
            raise error
        if self.is_lost(key):
            await asyncio.Event().wait()
        self.writes.append(key)
        return await self.inner.delete(key, **options)


class Leader:
    """One leader with a session of its own."""

    def __init__(self, world: World, handle: Handle, election: LeaderElection, leadership: Leadership) -> None:
        self.world = world
        self.handle = handle
        self.store = CountingStore(handle)
        self.election = election
        self.leadership = leadership
        self.coordinators: dict[str, SubscriptionCoordinator] = {}

    def coordinator(
        self, layout: SegmentLayout, record: SubscriptionMetadata | None = None, *, name: str = "sub", root: str = TOPICS
    ) -> SubscriptionCoordinator:
        made = SubscriptionCoordinator(
            self.world.runtime,
            self.store,
            self.world.config,
            self.world.segments,
            self.leadership,
            TOPIC,
            name,
            record or SubscriptionMetadata(created_at_epoch=0),
            layout,
            root=root,
        )
        self.coordinators[name] = made
        self.world.made.append(made)
        return made

    def plans(self, layout: Callable[[], SegmentLayout]) -> SubscriptionPlans:
        return SubscriptionPlans(
            self.world.runtime,
            self.store,
            self.world.config,
            self.world.segments,
            self.leadership,
            TOPIC,
            layout=layout,
            coordinator=self.coordinators.get,
        )

    async def crash(self) -> None:
        """Gone without a word; the session ends at once, so that a test need not wait."""
        for each in self.coordinators.values():
            each.kill()
        self.election.abandon()
        await self.handle.close()


class World:
    def __init__(self, engine: Engine, runtime: Runtime, config: ScalableConfig) -> None:
        self.engine = engine
        self.runtime = runtime
        self.config = config
        self.clock = runtime.clock
        self.segments = Segments()
        self.made: list[SubscriptionCoordinator] = []
        self.store = engine.handle("observer")
        self._count = 0

    async def leader(self, root: str = TOPICS) -> Leader:
        self._count += 1
        handle = self.engine.handle(f"broker-{self._count}")
        election = LeaderElection(
            handle, self.clock, controller_path(TOPIC, root), msgspec.json.encode(f"broker-{self._count}")
        )
        await election.start()
        assert election.leadership is not None
        return Leader(self, handle, election, election.leadership)

    async def put_topic(self, layout: SegmentLayout, *, incarnation: str = "one", topic: TopicName = TOPIC) -> None:
        """The topic's record as it is, whatever was there."""
        metadata = ScalableTopicMetadata(
            epoch=0, next_segment_id=0, segments={}, incarnation=incarnation, routing=layout.routing
        )
        await self.store.put(topic_path(topic), msgspec.json.encode(metadata.with_layout(layout)))

    async def put_subscription(self, record: SubscriptionMetadata, name: str = "sub") -> None:
        await self.store.put(subscription_path(TOPIC, name), msgspec.json.encode(record), expected=ABSENT)

    async def subscription(self, name: str = "sub", root: str = TOPICS) -> SubscriptionMetadata | None:
        record = await self.store.get(subscription_path(TOPIC, name, root), fresh=True)
        return None if record is None else decode(SubscriptionMetadata, record.key, record.value)

    async def registrations(self, name: str = "sub", root: str = TOPICS) -> dict[str, RegistrationRecord]:
        return {
            record.name: decode(RegistrationRecord, record.key, record.value)
            async for record in self.store.scan(Span(consumers_path(TOPIC, name, root)), fresh=True)
        }

    async def close(self) -> None:
        for each in self.made:
            await each.close()
        await self.engine.close()


async def join(coordinator: SubscriptionCoordinator, name: str, client: Client | None = None) -> tuple[Client, list[int]]:
    """Register a consumer; its connection and segments."""
    client = client or Client(name)
    return client, ids(await coordinator.register(ConsumerRegistration(name, 1, client)))


def held(coordinator: SubscriptionCoordinator) -> dict[str, tuple[int, ...]]:
    return {name: each.segments for name, each in coordinator.state().consumers.items()}


def virtually(main: Callable[[World], Coroutine[Any, Any, T]], *, seed: int = 1, config: ScalableConfig | None = None) -> T:
    """Run a test in virtual time."""

    async def start(_loop: SimLoop) -> T:
        runtime = replace(Runtime(random=Random(f"runtime-{seed}"), threads=InlineThreads()), clock=SimClock())
        world = World(await memory.open_store(runtime), runtime, config or ScalableConfig())
        try:
            return await main(world)
        finally:
            await world.close()

    result: T = run(seed, start)
    return result
