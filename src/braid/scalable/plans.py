"""`TopicWork`: what the plans of one scalable topic work with during one leadership.

Owns the rules that hold for every step of every plan: the topic's record changes only through its claim and only for the
incarnation that was claimed; every call to a segment carries the leader's epoch and that incarnation, and is made only while
the leadership holds (INV4, INV5). The order of steps is the business of the `plans_*` modules.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from typing import Final, TypeVar

from braid.errors import BraidError, Conflict, NotFound, StoreMismatch, TopicNotFound, VersionConflict
from braid.metadata.api import MetadataStore, Span
from braid.metadata.claims import GuardedRecord, StaleLeader
from braid.metadata.election import Leadership
from braid.model.layout import SegmentLayout
from braid.model.names import TopicName
from braid.model.names import decode as decode_name
from braid.model.segments import SegmentInfo, physical_name
from braid.runtime.env import Runtime
from braid.scalable.api import Sealed, SegmentOps
from braid.scalable.config import ScalableConfig
from braid.scalable.records import (
    Initial,
    PendingOperation,
    ScalableTopicMetadata,
    SubscriptionMetadata,
    consumers_path,
    decode,
    subscription_path,
    subscriptions_path,
    topic_path,
)

log = logging.getLogger(__name__)
AT_ONCE: Final = 16
"""Segments that one plan asks at the same time."""
T = TypeVar("T")
V = TypeVar("V")


class TopicGone(TopicNotFound):
    """The topic's record is gone, or is that of another topic of the same name."""


class TopicWork:
    """One topic in the hands of one leader."""

    def __init__(
        self,
        runtime: Runtime,
        store: MetadataStore,
        config: ScalableConfig,
        segments: SegmentOps,
        leadership: Leadership,
        topic: TopicName,
        metadata: ScalableTopicMetadata,
    ) -> None:
        self.runtime = runtime
        self.store = store
        self.config = config
        self.segments = segments
        self.leadership = leadership
        self.topic = topic
        self.metadata = metadata
        """As we wrote it last; before `claim` as it was read."""
        self.layout = metadata.layout
        self.is_claimed = False
        self.known: set[str] = set()
        """Names of subscriptions that have a record, as last seen."""
        self.strays: dict[int, set[str]] = {}
        """Cursors that were seen without a record of their subscription, by segment."""
        self._unreadable: set[str] = set()
        self._record = GuardedRecord(store, leadership, topic_path(topic), ScalableTopicMetadata)

    @property
    def incarnation(self) -> str:
        return self.metadata.incarnation

    @property
    def pending(self) -> PendingOperation | None:
        return self.metadata.pending_operation

    # The record.

    async def claim(self) -> None:
        """Make the record ours, and learn what it says. Raises as `change`."""
        await self.change(lambda value: value)

    async def change(self, modify: Callable[[ScalableTopicMetadata], ScalableTopicMetadata]) -> None:
        """Change the record. Raises TopicGone, StaleLeader, StoreUnavailable, OutcomeUnknown and whatever `modify` raises."""

        def guarded(value: ScalableTopicMetadata) -> ScalableTopicMetadata:
            if self.is_claimed and value.incarnation != self.incarnation:
                raise TopicGone(f"{self.topic} was deleted and made anew; this leader belongs to the old one.")
            return modify(value)

        try:
            changed = await self._record.change(guarded)
        except TopicGone:
            raise
        except NotFound as error:
            if await self.store.get(topic_path(self.topic), fresh=True) is not None:
                raise  # said by `modify`, of a segment
            raise TopicGone(f"{self.topic} does not exist any more.") from error
        self.is_claimed = True
        self._learn(changed)

    async def refresh(self) -> None:
        """Learn what the record says now, after an outcome that is not known. Raises as `change`."""
        key = topic_path(self.topic)
        record = await self.store.get(key, fresh=True)
        if record is None:
            raise TopicGone(f"{self.topic} does not exist any more.")
        found = decode(ScalableTopicMetadata, key, record.value)
        if not self.is_claimed or found.leader_epoch != self.leadership.epoch or found.incarnation != self.incarnation:
            await self.claim()
        else:
            self._learn(found)

    def _learn(self, found: ScalableTopicMetadata) -> None:
        if found.epoch != self.layout.epoch or found.segments != self.metadata.segments:
            self.layout = found.layout
            self.strays = {number: names for number, names in self.strays.items() if number in self.layout.all_segments}
        self.metadata = found

    def check(self) -> None:
        """Raise StaleLeader unless we may still act."""
        if not self.leadership.holds():
            raise StaleLeader(f"The leader of {self.topic} may have a successor, so nothing more was done.")

    # Segments.

    def name(self, segment: SegmentInfo) -> TopicName:
        return physical_name(self.topic, segment)

    async def create(
        self, segment: SegmentInfo, subscriptions: Iterable[str], producers: Mapping[str, int] | None = None
    ) -> None:
        """Make a segment's topic, with cursors at its beginning; or add to it what it lacks."""
        self.check()
        initial: dict[str, Initial] = dict.fromkeys(sorted(subscriptions), "earliest")
        await self.segments.create(
            self.name(segment),
            subscriptions=initial,
            producers=producers or {},
            epoch=self.leadership.epoch,
            incarnation=self.incarnation,
        )

    async def terminate(self, segment: SegmentInfo) -> Sealed:
        self.check()
        return await self.segments.terminate(self.name(segment), epoch=self.leadership.epoch, incarnation=self.incarnation)

    async def delete(self, segment: SegmentInfo) -> None:
        self.check()
        await self.segments.delete(self.name(segment), epoch=self.leadership.epoch, incarnation=self.incarnation)

    # Subscriptions.

    async def subscriptions(self) -> dict[str, SubscriptionMetadata]:
        """The topic's subscription records, by name. Left out are those of an earlier topic of the name, and those that only a
        newer version understands: they are `unreadable`."""
        found, unreadable = {}, set()
        async for record in self.store.scan(Span(subscriptions_path(self.topic)), fresh=True):
            name = decode_name(record.name)
            try:
                value = decode(SubscriptionMetadata, record.key, record.value)
            except StoreMismatch as error:
                if name not in self._unreadable:
                    log.warning("subscription %s of %s is not looked after, its cursors are kept: %s", name, self.topic, error)
                unreadable.add(name)
                continue
            if not value.is_foreign(self.incarnation):
                found[name] = value
        self._unreadable = unreadable
        self.known = found.keys() | unreadable
        return found

    @property
    def unreadable(self) -> frozenset[str]:
        """Subscriptions whose records are not understood, as last seen: nothing may be taken away from them."""
        return frozenset(self._unreadable)

    async def cursors(self) -> dict[str, SubscriptionMetadata | None]:
        """Subscriptions that need a cursor on every new segment; None if the record is not understood."""
        found: dict[str, SubscriptionMetadata | None] = {
            name: record
            for name, record in (await self.subscriptions()).items()
            if record.type != "CHECKPOINT" and (record.pending is None or record.pending.kind != "delete")
        }
        return found | dict.fromkeys(self._unreadable)

    async def has_record(self, subscription: str) -> bool:
        """Whether the subscription is one of this topic's."""
        key = subscription_path(self.topic, subscription)
        record = await self.store.get(key, fresh=True)
        if record is None:
            return False
        try:
            return not decode(SubscriptionMetadata, key, record.value).is_foreign(self.incarnation)
        except StoreMismatch:
            return True

    async def create_cursor(self, segment: SegmentInfo, subscription: str, initial: Initial) -> None:
        self.check()
        await self.segments.create_subscription(
            self.name(segment), subscription, initial, epoch=self.leadership.epoch, incarnation=self.incarnation
        )

    async def delete_cursor(self, segment: SegmentInfo, subscription: str) -> None:
        self.check()
        await self.segments.delete_subscription(
            self.name(segment), subscription, epoch=self.leadership.epoch, incarnation=self.incarnation
        )

    async def remove_foreign_subscriptions(self) -> None:
        """Remove records that were put for an earlier topic of this name by somebody who did not see it go."""
        async for record in self.store.scan(Span(subscriptions_path(self.topic)), fresh=True):
            try:
                if not decode(SubscriptionMetadata, record.key, record.value).is_foreign(self.incarnation):
                    continue
            except StoreMismatch:
                continue
            self.check()
            with suppress(VersionConflict):  # gone
                await self.store.delete(record.key, expected=record.version)

    async def delete_subscription_records(self) -> None:
        """Remove every subscription record with its registrations; those of a topic made later have other versions and stay."""
        names = [name async for name in self.store.names(Span(subscriptions_path(self.topic)), fresh=True)]
        for name in map(decode_name, names):
            await self._delete_all(consumers_path(self.topic, name))
            await self._delete_one(subscription_path(self.topic, name))

    async def _delete_all(self, collection: str) -> None:
        async for record in self.store.scan(Span(collection), fresh=True):
            self.check()
            try:
                await self.store.delete(record.key, expected=record.version)
            except VersionConflict:
                continue  # gone, or written by somebody who sees for himself that the topic is going

    async def _delete_one(self, key: str) -> None:
        record = await self.store.get(key, fresh=True)
        if record is not None:
            self.check()
            try:
                await self.store.delete(key, expected=record.version)
            except VersionConflict:
                raise Conflict(f"The record {key} was changed while {self.topic} is being deleted.") from None


async def each(items: Iterable[T], action: Callable[[T], Awaitable[V]]) -> list[V]:
    """Do it for all of them, a bounded number at a time; all are finished when it ends. Raises the first error in order."""
    limit = asyncio.Semaphore(AT_ONCE)

    async def one(item: T) -> V | BraidError:
        async with limit:
            try:
                return await action(item)
            except BraidError as error:
                return error

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(item)) for item in items]
    results: list[V] = []
    for task in tasks:
        result = task.result()
        if isinstance(result, BraidError):
            raise result
        results.append(result)
    return results


def no_other(value: ScalableTopicMetadata) -> None:
    """Raise Conflict if the record shows an operation that is not finished."""
    if value.pending_operation is not None:
        raise Conflict(f"The {describe(value.pending_operation)} is not finished; try again later.")


def describe(pending: PendingOperation) -> str:
    """An operation, for messages."""
    if pending.parents:
        return f"{pending.kind} of segment{'s' * (len(pending.parents) > 1)} {' and '.join(map(str, pending.parents))}"
    return pending.kind


Notify = Callable[[SegmentLayout], None]
