"""`ScalableTopicController`: one topic at one broker, leading it or standing by.

Owns what follows from the outcome of the campaign (`candidate.py`): a `Term` while it leads, nothing but a view of the layout
while it does not. Leadership is a state driven by the election's events (L-01); a mutating call without it is
refused. The record is watched and also read every `reconcile_seconds` (INV15); a controller whose topic is gone closes itself
and never campaigns for it again (L-05). So does one that nobody needs: the record says that the topic is at rest.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from braid.errors import BraidError, Closed, InvariantBroken, LedElsewhere, StoreError, TopicNotFound
from braid.metadata.api import MetadataStore
from braid.metadata.claims import StaleLeader
from braid.metadata.election import Leadership
from braid.model.layout import SegmentLayout
from braid.model.names import NamespaceName, TopicName, check_subscription_name
from braid.model.retention import RetentionPolicies
from braid.runtime.env import Runtime
from braid.scalable import plans_topic, plans_upkeep
from braid.scalable.api import ConsumerAssignment, ConsumerRegistration, Retention, SegmentOps
from braid.scalable.candidate import TopicCandidate
from braid.scalable.config import ScalableConfig
from braid.scalable.counts import OperationCounts
from braid.scalable.plans import TopicWork
from braid.scalable.records import (
    Initial,
    ScalableTopicMetadata,
    SubscriptionKind,
    controller_path,
    decode,
    topic_path,
)
from braid.scalable.term import Term
from braid.scalable.topic_stats import topic_stats

log = logging.getLogger(__name__)


class ScalableTopicController(TopicCandidate[Term]):
    """A candidate for the leadership of one scalable topic, and its leader when it wins."""

    def __init__(
        self,
        runtime: Runtime,
        store: MetadataStore,
        config: ScalableConfig,
        segments: SegmentOps,
        topic: TopicName,
        *,
        broker_id: str,
        retention: Callable[[NamespaceName], Awaitable[Retention]],
        partitions: Callable[[TopicName], Awaitable[int | None]],
        on_closed: Callable[[ScalableTopicController], None],
        counts: OperationCounts,
    ) -> None:
        super().__init__(
            runtime,
            store,
            config,
            topic,
            broker_id=broker_id,
            path=controller_path(topic),
            on_closed=lambda: on_closed(self),
            may_win=self._exists,
        )
        self._segments = segments
        self._retention = retention
        self._partitions = partitions
        self._counts = counts
        self._metadata: ScalableTopicMetadata | None = None
        self._layout: SegmentLayout | None = None
        self._is_gone = False
        self._is_resting = False
        self._starting: asyncio.Future[None] | None = None
        self._hint = asyncio.Event()

    # What everybody may ask.

    @property
    def metadata(self) -> ScalableTopicMetadata:
        """As last seen; raises TopicNotFound before `start`."""
        if self._term is not None and self._term.work.is_claimed:
            return self._term.work.metadata
        if self._metadata is None:
            raise TopicNotFound(f"The scalable topic {self.topic} does not exist.")
        return self._metadata

    @property
    def layout(self) -> SegmentLayout:
        if self._term is not None and self._term.work.is_claimed:
            return self._term.work.layout
        if self._layout is None:
            self._layout = self.metadata.layout
        return self._layout

    @property
    def incarnation(self) -> str:
        return self.metadata.incarnation

    async def claim(self) -> ScalableTopicMetadata | None:
        """What the record says at this moment, claimed once more; None if this broker does not lead the topic. Raises what
        changing the record raises."""
        term = self._term
        if not self.is_leading or term is None or not term.work.is_claimed:
            return None
        await term.work.claim()
        return term.work.metadata

    @property
    def is_ready(self) -> bool:
        """Whether this broker leads the topic and serves it."""
        return self.is_leading and self._term is not None and self._term.is_ready

    # Life.

    async def start(self) -> None:
        """Look at the topic and campaign; returns after the first attempt. Shared by all callers. Raises TopicNotFound, without
        a campaign, if there is no such topic."""
        if self._starting is None:
            self._starting = asyncio.get_running_loop().create_future()
            self._starting.add_done_callback(_seen)
            starting = self._starting
            task = self._tasks.spawn(self._start(starting), "start")
            task.add_done_callback(lambda _task: _fail(starting, Closed(f"The controller of {self.topic} was closed.")))
        await asyncio.shield(self._starting)

    async def _start(self, started: asyncio.Future[None]) -> None:
        try:
            await self._look()
            if self._metadata is None:
                raise TopicNotFound(f"The scalable topic {self.topic} does not exist.")
            await self._election.start()
            self._tasks.spawn(self._watch(), "watch")
            self._tasks.spawn(self._follow(), "follow")
        except BraidError as error:
            _fail(started, error)
        if not started.done():
            started.set_result(None)

    async def wait_ready(self) -> None:
        """Until this leader serves. Raises LedElsewhere if it does not lead, Conflict if the topic is being deleted."""
        term = self._leading()
        term.used()
        await term.wait_ready()

    # Operations of the leader.

    async def split_segment(self, segment_id: int) -> SegmentLayout:
        """Replace an active segment by two halves. Raises NotFound, PreconditionFailed, Conflict, LedElsewhere."""
        term = await self._ready()
        await term.split(segment_id)
        return term.work.layout

    async def merge_segments(self, first_id: int, second_id: int) -> SegmentLayout:
        """Replace two adjacent active segments by one; raises as `split_segment`."""
        term = await self._ready()
        await term.merge(first_id, second_id)
        return term.work.layout

    async def prune(self) -> list[int]:
        """Remove sealed segments that retention does not keep and every subscription has read; returns their ids."""
        return await (await self._ready()).prune()

    async def delete(self, *, force: bool = False) -> None:
        """Delete the topic with everything in it; returns when nothing of it is left. `force` does not wait for an operation
        that cannot be finished."""
        term = self._leading()
        await term.delete(force=force)
        await self.close()

    async def create_subscription(self, name: str, kind: SubscriptionKind = "STREAM", initial: Initial = "earliest") -> None:
        """Make a subscription with its cursors, if there is none of the name."""
        check_subscription_name(name)
        await (await self._ready()).create_subscription(name, kind, initial)

    async def delete_subscription(self, name: str) -> None:
        """Raises SubscriptionNotFound."""
        await (await self._ready()).delete_subscription(name)

    async def seek(self, name: str, timestamp_ms: int) -> None:
        """Continue with the messages stored at or after the time. Raises SubscriptionNotFound."""
        await (await self._ready()).seek(name, timestamp_ms)

    async def clear_backlog(self, name: str) -> None:
        """Acknowledge everything there is. Raises SubscriptionNotFound."""
        await (await self._ready()).clear_backlog(name)

    async def remove_consumer(self, subscription: str, consumer: str) -> None:
        """Remove the registration of a consumer that is not connected, its record readable or not. Raises SubscriptionNotFound,
        ConsumerNotFound, PreconditionFailed if it is connected."""
        await (await self._ready()).remove_consumer(subscription, consumer)

    # Consumers.

    async def register_consumer(
        self,
        subscription: str,
        registration: ConsumerRegistration,
        kind: SubscriptionKind,
        *,
        initial: Initial = "earliest",
    ) -> ConsumerAssignment:
        """A stream or checkpoint consumer is here: its assignment. `initial` matters if the subscription does not exist yet."""
        check_subscription_name(subscription)
        term = await self._ready()
        coordinator = await term.coordinator(subscription, kind, initial)
        try:
            return await coordinator.register(registration)
        except (StaleLeader, Closed) as error:
            raise self._led_elsewhere() from error

    @property
    def consumer_count(self) -> int:
        """Registered stream and checkpoint consumers, as far as this broker leads."""
        coordinators = [] if self._term is None else self._term.coordinators.values()
        return sum(each.state().consumer_count for each in coordinators)

    async def stats(self) -> dict[str, Any]:
        """The topic's state in the shape the admin API shows; consumers are known to the leader only."""
        term = self._term
        return await topic_stats(
            self._store,
            self._segments,
            self.topic,
            self.metadata,
            self.layout,
            leader=self.broker_id if self.is_leading else None,
            coordinators={} if term is None else dict(term.coordinators),
            retention=await self._kept(),
        )

    async def set_retention(self, policy: RetentionPolicies | None) -> None:
        """Say how long the topic keeps messages; None leaves it to its namespace. Raises as `prune`."""
        try:
            await plans_topic.set_retention((await self._ready()).work, policy)
        except StaleLeader as error:
            raise self._led_elsewhere() from error

    async def _kept(self) -> Retention:
        own = self.metadata.retention_policies
        return await self._retention(self.topic.namespace) if own is None else Retention(own.retention_time_in_minutes)

    async def _ready(self) -> Term:
        term = self._leading()
        term.used()
        if not term.is_ready:
            await term.wait_ready()
        return term

    def _led_elsewhere(self) -> LedElsewhere:
        return LedElsewhere(f"Broker {self.broker_id} does not lead {self.topic}; ask its leader.")

    # Leadership.

    def _new_term(self, leadership: Leadership) -> Term | None:
        if self._metadata is None:
            return None
        work = TopicWork(self._runtime, self._store, self._config, self._segments, leadership, self.topic, self._metadata)
        term = Term(
            work,
            self._kept,
            lambda: self._partitions(self.topic),
            self._gone,
            self._unused,
            self._counts,
        )
        term.start()
        self._hint.set()
        return term

    def _unused(self) -> None:
        """Nobody needs a leader at the moment."""
        if self._closing is None:
            self._tasks.spawn(self._rest(), "rest")

    async def _rest(self) -> None:
        """Let go of the topic, unless it was used since; the next use makes a new controller."""
        if self._closing is None and self._term is not None and self._term.is_unused:
            log.debug("%s is left alone until somebody uses it", self.topic)
            self._is_resting = True
            await self.close()

    async def _resigning(self, term: Term) -> None:
        if self._is_resting:
            try:
                await plans_upkeep.rest(term.work)
            except BraidError as error:
                log.info("%s was left alone, but that could not be noted, so it is adopted again: %s", self.topic, error)

    async def _exists(self) -> bool:
        await self._look()
        return self._metadata is not None

    def _gone(self) -> None:
        """The topic was deleted."""
        if self._closing is None and not self._is_gone:
            self._is_gone = True
            if self._term is None or not self._term.has_deleted:
                log.info("%s was deleted by another broker; its controller here ends", self.topic)
            self._close_soon()

    # The record.

    async def _look(self) -> None:
        """Read the record."""
        key = topic_path(self.topic)
        record = await self._store.get(key, fresh=True)
        found = None if record is None else decode(ScalableTopicMetadata, key, record.value)
        known = self._metadata
        if found is None or known is None or (found.epoch, found.incarnation) != (known.epoch, known.incarnation):
            self._layout = None
        self._metadata = found

    async def _watch(self) -> None:
        """Turn changes of the record into hints."""
        while True:
            try:
                async with self._store.watch(topic_path(self.topic)) as events:
                    async for _event in events:
                        self._hint.set()
            except StoreError as error:
                log.info("the watch on %s ended and is set up again: %s", self.topic, error)
            except Closed:
                return
            await self._runtime.clock.sleep(self._config.reconcile_seconds)
            self._hint.set()

    async def _follow(self) -> None:
        while self._closing is None:
            timer = self._runtime.clock.call_later(self._config.reconcile_seconds, self._hint.set)
            try:
                await self._hint.wait()
            finally:
                timer.cancel()
            self._hint.clear()
            try:
                await self._look()
            except StoreError as error:
                log.info("the record of %s cannot be read at the moment: %s", self.topic, error)
                continue
            except Closed:
                return
            except InvariantBroken:
                raise
            except Exception:  # or this broker would never hear of the topic again
                log.exception("the record of %s could not be looked at and is looked at again", self.topic)
                continue
            self._compare()

    def _compare(self) -> None:
        """Does the record still fit to what we do?"""
        found, term = self._metadata, self._term
        if found is None:
            self._gone()
        elif term is not None and term.work.is_claimed:
            leadership = term.work.leadership
            if found.leader_epoch > leadership.epoch or found.incarnation != term.work.incarnation:
                leadership.step_down()


def _seen(future: asyncio.Future[None]) -> None:
    if not future.cancelled():
        future.exception()


def _fail(outcome: asyncio.Future[None], error: BraidError) -> None:
    if not outcome.done():
        outcome.set_exception(error)
