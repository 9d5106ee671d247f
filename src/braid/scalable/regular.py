"""`RegularTopicController`: stream and checkpoint consumers of a `persistent://` topic, coordinated by one broker (L-28).

A candidate (`candidate.py`) below `/regular-topics/...`. Owns, while it leads, the coordinators of the topic's subscriptions:
the same ones as for scalable topics, over a synthetic layout whose segments are the partitions. Partitions have no parents, so
nothing waits to be drained. Their number is looked up every `reconcile_seconds`. The topic itself is never created, changed or
deleted here, except for cursors that a consumer asks for; what is written is coordination, and it is removed when the topic is
gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec

from braid.errors import (
    BraidError,
    Closed,
    InvariantBroken,
    LedElsewhere,
    NotReady,
    StoreMismatch,
    TopicNotFound,
)
from braid.metadata.api import MetadataStore, Span
from braid.metadata.claims import GuardedRecord, StaleLeader
from braid.metadata.election import Leadership
from braid.model.layout import SegmentLayout
from braid.model.names import TopicName, check_subscription_name
from braid.model.names import decode as decode_name
from braid.model.segments import SegmentInfo, physical_name
from braid.runtime.env import Runtime
from braid.runtime.tasks import Tasks
from braid.runtime.waiting import wait_at_most
from braid.scalable.api import ConsumerAssignment, ConsumerRegistration, LogOf, SegmentOps
from braid.scalable.candidate import TopicCandidate
from braid.scalable.config import ScalableConfig
from braid.scalable.coordinator import SubscriptionCoordinator
from braid.scalable.group_ends import create_subscription, end_groups
from braid.scalable.plans import each
from braid.scalable.records import (
    REGULAR,
    Initial,
    SubscriptionKind,
    SubscriptionMetadata,
    controller_path,
    subscription_path,
    subscriptions_path,
)
from braid.scalable.subscription_plans import SubscriptionPlans

log = logging.getLogger(__name__)
RETRY_SECONDS: Final = 0.5


class RegularTopicController(TopicCandidate["_Term"]):
    """A candidate for the coordination of one regular topic."""

    def __init__(
        self,
        runtime: Runtime,
        store: MetadataStore,
        config: ScalableConfig,
        segments: SegmentOps,
        topic: TopicName,
        *,
        broker_id: Callable[[], str],
        partitions: Callable[[TopicName], Awaitable[int | None]],
        log_of: LogOf,
        on_closed: Callable[[RegularTopicController], None],
    ) -> None:
        super().__init__(
            runtime,
            store,
            config,
            topic,
            broker_id=broker_id(),
            path=controller_path(topic, REGULAR),
            on_closed=lambda: on_closed(self),
        )
        self._segments = segments
        self._partitions = partitions
        self._log_of = log_of

    @property
    def layout(self) -> SegmentLayout:
        """As the leader saw it last."""
        return self._leading().layout

    @property
    def is_ready(self) -> bool:
        return self.is_leading and self._term is not None and self._term.ready.is_set()

    async def start(self) -> None:
        """Campaign; returns after the first attempt."""
        await self._election.start()

    async def wait_ready(self) -> None:
        """Until this leader serves. Raises LedElsewhere if it does not lead, NotReady if it takes long."""
        term = self._leading()
        await wait_at_most(self._runtime.clock, term.changed, self._config.operation_wait_seconds)
        self._leading()
        if not term.ready.is_set():
            raise NotReady(f"The coordinator of {self.topic} is not ready yet; try again.")

    async def register_consumer(
        self,
        subscription: str,
        registration: ConsumerRegistration,
        kind: SubscriptionKind,
        *,
        initial: Initial = "earliest",
    ) -> ConsumerAssignment:
        """A stream or checkpoint consumer is here: the partitions it is to read. Raises Conflict for another kind."""
        check_subscription_name(subscription)
        await self.wait_ready()
        try:
            return await (await self._leading().coordinator(subscription, kind, initial)).register(registration)
        except (StaleLeader, Closed) as error:
            raise self._led_elsewhere() from error

    async def stats(self) -> dict[str, Any]:
        """The subscriptions that are coordinated here."""
        term = self._leading()
        return {
            "epoch": term.layout.epoch,
            "leader": self.broker_id,
            "routing": term.layout.routing.value,
            "segments": {str(number): {"name": str(term.name(item))} for number, item in term.layout.all_segments.items()},
            "subscriptions": {
                name: msgspec.to_builtins(coordinator.state()) | {"blocked_by": msgspec.to_builtins(coordinator.blocked_by())}
                for name, coordinator in term.coordinators.items()
            },
        }

    async def _ready(self) -> _Term:
        await self.wait_ready()
        return self._leading()

    def _led_elsewhere(self) -> LedElsewhere:
        return LedElsewhere(f"Broker {self.broker_id} does not coordinate {self.topic}; ask its leader.")

    def _new_term(self, leadership: Leadership) -> _Term:
        return _Term(
            self._runtime,
            self._store,
            self._config,
            self._segments,
            leadership,
            self.topic,
            self._partitions,
            self._log_of,
            self._unused,
        )

    def _unused(self) -> None:
        """Nobody has needed the coordination for a while: let go of it; the next consumer makes a new controller."""
        if self._closing is None:
            self._close_soon()


class _Term:
    """One time in office."""

    def __init__(
        self,
        runtime: Runtime,
        store: MetadataStore,
        config: ScalableConfig,
        segments: SegmentOps,
        leadership: Leadership,
        topic: TopicName,
        partitions: Callable[[TopicName], Awaitable[int | None]],
        log_of: LogOf,
        on_unused: Callable[[], None],
    ) -> None:
        self.leadership = leadership
        self.layout = SegmentLayout.synthetic([str(topic)])
        self.coordinators: dict[str, SubscriptionCoordinator] = {}
        self.ready = asyncio.Event()
        self.changed = asyncio.Event()
        """Ready, or over, or somebody's patience is."""
        self.is_over = False
        self._runtime = runtime
        self._store = store
        self._config = config
        self._segments = segments
        self._topic = topic
        self._partitions = partitions
        self._log_of = log_of
        self._on_unused = on_unused
        self._has_topic = True
        self._used_at = runtime.clock.monotonic()
        self._turn = asyncio.Lock()
        self._plans = SubscriptionPlans(
            runtime,
            store,
            config,
            segments,
            leadership,
            topic,
            layout=lambda: self.layout,
            coordinator=self.coordinators.get,
            root=REGULAR,
        )
        self._tasks = Tasks(f"coordinator of {topic}")
        self._tasks.spawn(self._run(), "term")

    def name(self, segment: SegmentInfo) -> TopicName:
        return physical_name(self._topic, segment)

    def stop(self) -> None:
        self.is_over = True
        self.changed.set()
        self._tasks.cancel()

    async def close(self) -> None:
        """Stop and tell the consumers; writes nothing."""
        self.stop()
        await self._tasks.close()
        for coordinator in list(self.coordinators.values()):
            await coordinator.close()

    def kill(self) -> None:
        self.stop()
        for coordinator in self.coordinators.values():
            coordinator.kill()

    async def coordinator(self, name: str, kind: SubscriptionKind, initial: Initial) -> SubscriptionCoordinator:
        """Of a subscription, which is made if there is none; raises Conflict if it is of another kind."""
        self._used_at = self._runtime.clock.monotonic()
        async with self._turn:
            await self._look()  # a consumer of a topic made a moment ago sees all its partitions
            grace = self._config.group_grace_seconds
            record = await create_subscription(self._plans, self.coordinators, grace, name, kind, initial)
            found = await self._coordinate(name, record)
            await found.check_logs()  # nobody begins at a place in a topic that was deleted since
            return found

    async def _coordinate(self, name: str, record: SubscriptionMetadata) -> SubscriptionCoordinator:
        found = self.coordinators.get(name)
        if found is None or found.is_closed:
            found = SubscriptionCoordinator(
                self._runtime,
                self._store,
                self._config,
                self._segments,
                self.leadership,
                self._topic,
                name,
                record,
                self.layout,
                root=REGULAR,
                log_of=self._log_of,
            )
            await found.restore()
            self.coordinators[name] = found
            found.on_layout_change(self.layout)
        return found

    async def _run(self) -> None:
        while not await self._attempt(self._take_over):
            await self._runtime.clock.sleep(RETRY_SECONDS)
        self.ready.set()
        self.changed.set()
        while True:
            await self._runtime.clock.sleep(self._config.reconcile_seconds)
            await self._attempt(self._reconcile)

    async def _attempt(self, action: Callable[[], Awaitable[None]]) -> bool:
        try:
            async with self._turn:
                await action()
        except StaleLeader as error:
            log.info("this broker no longer coordinates %s: %s", self._topic, error)
            self.leadership.step_down()
            return False
        except BraidError as error:
            log.info("the coordination of %s waits: %s", self._topic, error)
            return False
        except InvariantBroken:
            raise
        except Exception:  # or nobody would look after the topic's consumers any more
            log.exception("the coordination of %s failed in an unexpected way and is tried again", self._topic)
            return False
        return True

    async def _take_over(self) -> None:
        """Claim every subscription, finish what is pending, go on with the consumers there were."""
        await self._look()
        names = [
            decode_name(name) async for name in self._store.names(Span(subscriptions_path(self._topic, REGULAR)), fresh=True)
        ]
        records = {}
        for name in names:
            key = subscription_path(self._topic, name, REGULAR)
            try:
                records[name] = await GuardedRecord(self._store, self.leadership, key, SubscriptionMetadata).claim()
            except StoreMismatch as error:  # its own concern, as everywhere
                log.warning("subscription %s of %s is not looked after: %s", name, self._topic, error)
        await self._plans.roll_forward()
        for name, record in records.items():
            if record.pending is None or record.pending.kind != "delete":
                await self._coordinate(name, msgspec.structs.replace(record, pending=None))

    async def _look(self) -> None:
        """How many partitions there are; new ones get cursors at their beginning before anybody reads them."""
        count = await self._partitions(self._topic)
        self._has_topic = count is not None
        if count is None:
            return
        names = [str(self._topic.partition(number)) for number in range(count)] if count else [str(self._topic)]
        layout = SegmentLayout.synthetic(names)
        if layout == self.layout:
            return
        before = {each.legacy_topic_name for each in self.layout.all_segments.values()}
        new = [segment for segment in layout.all_segments.values() if segment.legacy_topic_name not in before]
        for name, coordinator in self.coordinators.items():
            if coordinator.has_barrier:
                await self._add_cursors(name, new)
        self.layout = layout
        for coordinator in self.coordinators.values():
            coordinator.on_layout_change(layout)

    async def _add_cursors(self, subscription: str, segments: list[SegmentInfo]) -> None:
        async def add(segment: SegmentInfo) -> None:
            try:
                await self._segments.create_subscription(
                    self.name(segment), subscription, "earliest", epoch=self.leadership.epoch, incarnation=""
                )
            except TopicNotFound:
                pass  # made by the first who attaches

        await each(segments, add)

    async def _reconcile(self) -> None:
        await self._look()
        for name, coordinator in self.coordinators.items():
            try:
                if not coordinator.is_closed:
                    await coordinator.check_logs()
            except StaleLeader:
                raise
            except BraidError as error:  # its own concern; the next look tries again
                log.info("where the group %s of %s reads could not be checked: %s", name, self._topic, error)
        await end_groups(self._plans, self.coordinators, self._config.group_grace_seconds)
        now = self._runtime.clock.monotonic()
        if any(coordinator.state().consumer_count for coordinator in self.coordinators.values()):
            self._used_at = now
        elif now - self._used_at >= self._config.consumer_grace_seconds:
            if not self._has_topic:
                for name in list(self.coordinators):
                    await self._plans.delete(name)
                    del self.coordinators[name]
            self._on_unused()
