"""`SubscriptionPlans`: create, delete, seek and clear-backlog of a topic's subscriptions, as plans over their records.

The record shows the intent before anything is touched and is cleared, or removed, when everything is done (INV6); whoever leads
then rolls an interrupted one forward, never back. What an owner refuses until it is repaired is refused before its intent is
written; if it is in the record already it waits alone, and a deletion takes the place of everything but a deletion. Runs under
the topic's operation lock, so no layout changes meanwhile. A seek takes all segments away from everyone first and forgets what
was drained (INV8). Assignment itself is the coordinator's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import msgspec

from braid.errors import (
    BraidError,
    InvalidArgument,
    KindConflict,
    NotFound,
    OutcomeUnknown,
    PreconditionFailed,
    StoreMismatch,
    StoreUnavailable,
    SubscriptionLimit,
    SubscriptionNotFound,
    TopicNotFound,
    VersionConflict,
)
from braid.metadata.api import ABSENT, MetadataStore, Span
from braid.metadata.claims import GuardedRecord, StaleLeader
from braid.metadata.election import Leadership
from braid.model.layout import SegmentLayout
from braid.model.names import TopicName, check_subscription_name
from braid.model.names import decode as decode_name
from braid.model.segments import SegmentInfo, physical_name
from braid.runtime.env import Runtime
from braid.runtime.plans import step
from braid.scalable.api import UNTIL_REPAIRED, SegmentOps
from braid.scalable.config import ScalableConfig
from braid.scalable.coordinator import SubscriptionCoordinator
from braid.scalable.draining import initial_for
from braid.scalable.plans import each
from braid.scalable.records import (
    TOPICS,
    Initial,
    SubscriptionChange,
    SubscriptionKind,
    SubscriptionMetadata,
    SubscriptionOperation,
    decode,
    partitions_of,
    subscription_path,
    subscriptions_path,
)
from braid.scalable.sessions import Registrations, given
from braid.scalable.subscription_state import UNREADABLE

log = logging.getLogger(__name__)
ATTEMPTS: Final = 20


class SubscriptionPlans:
    """What a leader does to the subscriptions of one topic. Any call may raise StaleLeader, StoreError and the errors of
    `SegmentOps`; what was begun then stays in the record, and `roll_forward` finishes it."""

    def __init__(
        self,
        runtime: Runtime,
        store: MetadataStore,
        config: ScalableConfig,
        segments: SegmentOps,
        leadership: Leadership,
        topic: TopicName,
        *,
        layout: Callable[[], SegmentLayout],
        coordinator: Callable[[str], SubscriptionCoordinator | None],
        root: str = TOPICS,
        incarnation: Callable[[], str] = lambda: "",
    ) -> None:
        """`incarnation` is the topic's, known once its record is claimed; a regular one has none."""
        self._runtime = runtime
        self._store = store
        self._config = config
        self._segments = segments
        self._leadership = leadership
        self._topic = topic
        self._layout = layout
        self._coordinator = coordinator
        self._root = root
        self._incarnation = incarnation

    async def create(self, name: str, kind: SubscriptionKind, initial: Initial) -> SubscriptionMetadata:
        """Make a subscription with cursors on every segment, or return the one that is there. Raises Conflict if that is of
        another kind, SubscriptionLimit if the topic has too many."""
        check_subscription_name(name)
        record = await self._find(name)
        if record is not None and record.pending is not None:
            await self._roll(name, record)
            record = await self._find(name)
        if record is None:
            if kind != "CHECKPOINT":
                await self._check_usable(name)  # before anything shows, as in `_begin`
            async with step("create-subscription:intend"):
                record = await self._intend(name, kind, initial)
            if record.pending is not None:
                await self._roll(name, record)
                record = await self._need(name)
        if record.type != kind:
            raise KindConflict(
                f"Subscription {name} of {self._topic} is one of {record.type} consumers; "
                f"a {kind} consumer needs one of its own."
            )
        return record

    async def delete(self, name: str) -> None:
        """Remove a subscription: its consumers, its cursors, its record. Raises SubscriptionNotFound.

        Where a segment is refused until it is repaired, its cursor is left, the record shows the deletion until then, and the
        error of the segment is raised: a new subscription of that name must not find the old position."""
        replaced = await self._replace_unreadable(name)
        if replaced is None:
            await self._begin(name, "delete")
        else:
            await self._roll(name, replaced)

    async def seek(self, name: str, timestamp_ms: int) -> None:
        """Go to the first message at or after a time, on every segment. Raises SubscriptionNotFound, PreconditionFailed."""
        if timestamp_ms < 0:
            raise InvalidArgument(f"{timestamp_ms} is no time to seek to; give milliseconds since 1970.")
        await self._begin(name, "seek", timestamp_ms)

    async def clear_backlog(self, name: str) -> None:
        """Acknowledge everything there is. Raises SubscriptionNotFound, PreconditionFailed."""
        await self._begin(name, "clear-backlog")

    async def roll_forward(self) -> None:
        """Finish every operation that a record shows as unfinished; raises the first error after all were tried."""
        errors: list[BraidError] = []
        async for stored in self._store.scan(Span(subscriptions_path(self._topic, self._root)), fresh=True):
            name = decode_name(stored.name)
            try:
                record = decode(SubscriptionMetadata, stored.key, stored.value)
            except StoreMismatch as error:  # of a newer version: left alone, and nobody else's concern
                log.warning("subscription %s of %s is not looked after: %s", name, self._topic, error)
                continue
            try:
                if record.is_foreign(self._incarnation()):
                    continue
                if record.is_resetting:
                    await self._check_usable(name)
                if record.pending is not None:
                    log.info("finishing the %s of subscription %s of %s", record.pending.kind, name, self._topic)
                    await self._roll(name, record)
                else:
                    await self._give_back(name, record)
            except StaleLeader:
                raise
            except UNTIL_REPAIRED as error:  # or somebody deletes it; the topic's other operations go on
                log.warning("subscription %s of %s is left as it is: %s", name, self._topic, error)
            except BraidError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    # Beginning.

    async def _intend(self, name: str, kind: SubscriptionKind, initial: Initial) -> SubscriptionMetadata:
        """The record of a new subscription, or the one somebody else made meanwhile."""
        count = 0
        async for _name in self._store.names(Span(subscriptions_path(self._topic, self._root)), fresh=True):
            count += 1
        if count >= self._config.max_subscriptions_per_topic:
            raise SubscriptionLimit(
                f"{self._topic} has {count} subscriptions, the limit scalable_topics.max_subscriptions_per_topic; delete one. "
                "Checkpoint groups count for scalable_topics.group_grace_seconds after their last member has left."
            )
        now, layout = self._runtime.clock.now_ms(), self._layout()
        record = SubscriptionMetadata(
            type=kind,
            initial=initial,
            created_at_epoch=layout.epoch,
            partitions=partitions_of(kind, layout),
            created_ms=now,
            pending=self._change_to("create"),
            leader_epoch=self._leadership.epoch,
            incarnation=self._incarnation(),
        )
        self._check_leading()
        try:
            await self._store.put(self._key(name), msgspec.json.encode(record), expected=ABSENT)
        except VersionConflict:
            return await self._need(name)
        except OutcomeUnknown:
            found = await self._find(name)
            if found is None:
                raise  # it may still come; then it is finished by whoever looks after the topic
            return found
        return record

    async def _begin(self, name: str, kind: SubscriptionOperation, timestamp_ms: int = 0) -> None:
        record = await self._need(name)
        if record.type == "CHECKPOINT" and kind != "delete":
            raise PreconditionFailed(
                f"Subscription {name} of {self._topic} is one of checkpoint consumers; their position is in their checkpoints."
            )
        if kind != "delete":
            await self._check_usable(name)  # before anything shows: what cannot be finished would stand in everybody's way
        # A deletion needs no end of what was begun before, unless that is a deletion.
        if record.pending is not None and (kind != "delete" or record.pending.kind == "delete"):
            await self._roll(name, record)
            await self._need(name)
        change = self._change_to(kind, timestamp_ms)
        async with step(f"{_called(kind)}:intend"):
            record = await self._change(name, lambda old: msgspec.structs.replace(old, pending=change))
        await self._roll(name, record)

    async def _check_usable(self, name: str) -> None:
        """Raise one of UNTIL_REPAIRED if an owner cannot serve a segment at all, or cannot read the subscription's cursor
        there, so that nobody can make or move it."""

        async def look(segment: SegmentInfo) -> None:
            try:
                stats = await self._segments.stats(self._physical(segment))
            except UNTIL_REPAIRED:
                raise
            except BraidError:  # who is to move the cursor is told what is wrong, or tries again
                return
            for why in stats.blocked_by.get(name, ()):
                if why.kind == UNREADABLE:
                    raise StoreMismatch(f"{why.detail.get('error', '')} Repair it, or delete the subscription {name}.")

        await each(self._all(), look)

    def _change_to(self, kind: SubscriptionOperation, timestamp_ms: int = 0) -> SubscriptionChange:
        now = self._runtime.clock.now_ms()
        return SubscriptionChange(kind=kind, operation_id=self._runtime.token(), timestamp_ms=timestamp_ms, started_ms=now)

    # Rolling forward. Every step can be repeated.

    async def _roll(self, name: str, record: SubscriptionMetadata) -> None:
        if record.leader_epoch != self._leadership.epoch:
            record = await self._change(name, lambda old: old)  # claim before act
        if record.pending is None:
            return
        match record.pending.kind:
            case "create":
                await self._roll_create(name, record, record.pending.operation_id)
            case "delete":
                await self._roll_delete(name, record, record.pending.operation_id)
            case "seek" | "clear-backlog":
                await self._roll_reset(name, record, record.pending)

    async def _roll_create(self, name: str, record: SubscriptionMetadata, operation: str) -> None:
        async def make(segment: SegmentInfo) -> None:
            self._check_leading()
            try:
                await self._make_cursor(segment, name, initial_for(record, segment), operation)
            except TopicNotFound:
                if segment.is_active and self._root == TOPICS:
                    raise  # a regular topic may be made by the first who attaches

        if record.type != "CHECKPOINT":
            async with step("create-subscription:cursors"):
                await each(self._all(), make)
        async with step("create-subscription:finish"):
            await self._done(name)

    async def _roll_delete(self, name: str, record: SubscriptionMetadata, operation: str) -> None:
        async def remove(segment: SegmentInfo) -> None:
            self._check_leading()
            await self._segments.delete_subscription(
                self._physical(segment),
                name,
                epoch=self._leadership.epoch,
                incarnation=self._incarnation(),
                operation=operation,
            )

        async with step("delete-subscription:close"):
            coordinator = self._coordinator(name)
            if coordinator is not None:
                await coordinator.close(SubscriptionNotFound(f"Subscription {name} of {self._topic} was deleted."))
        async with step("delete-subscription:registrations"):
            await self._registrations(name, record).remove_all()
        if record.type != "CHECKPOINT":
            async with step("delete-subscription:cursors"):
                await each(self._all(), remove)
        async with step("delete-subscription:record"):
            await self._remove(name)

    async def _roll_reset(self, name: str, record: SubscriptionMetadata, change: SubscriptionChange) -> None:
        async def reset(segment: SegmentInfo) -> None:
            self._check_leading()
            try:
                await self._reset(name, segment, change)
            except TopicNotFound:
                if segment.is_active:
                    raise  # a sealed one without data needs nothing

        called = _called(change.kind)
        coordinator = self._coordinator(name)
        async with step(f"{called}:revoke"):
            if coordinator is not None and not coordinator.is_closed:
                await coordinator.revoke()
            else:  # so that the next coordinator takes nothing for drained
                registrations = self._registrations(name, record)
                epoch = self._layout().epoch
                await registrations.save_all({consumer: given(epoch, ()) for consumer in await registrations.load()})
                await registrations.remove_unreadable()
        async with step(f"{called}:reset"):
            await each(self._all(), reset)
        async with step(f"{called}:finish"):
            record = await self._change(name, _after_reset)
        async with step(f"{called}:give-back"):
            await self._give_back(name, record)

    async def _reset(self, name: str, segment: SegmentInfo, change: SubscriptionChange) -> None:
        """Move one cursor, making it if it is missing. The owner's append times decide; a segment made at or after the time is
        read whole. Times of sealing are another clock's and decide nothing."""
        physical = self._physical(segment)
        leader: dict[str, Any] = {"epoch": self._leadership.epoch, "incarnation": self._incarnation()}
        is_seek = change.kind == "seek"
        target = 0 if segment.created_at_ms >= change.timestamp_ms else change.timestamp_ms
        for is_last in (False, True):
            try:
                if is_seek:
                    await self._segments.seek(physical, name, target, operation=change.operation_id, **leader)
                else:
                    await self._segments.skip_all(physical, name, operation=change.operation_id, **leader)
                return
            except SubscriptionNotFound:
                if is_last:
                    raise
                await self._make_cursor(segment, name, "earliest" if is_seek else "latest", change.operation_id)

    async def _make_cursor(self, segment: SegmentInfo, name: str, initial: Initial, operation: str) -> None:
        await self._segments.create_subscription(
            self._physical(segment),
            name,
            initial,
            epoch=self._leadership.epoch,
            incarnation=self._incarnation(),
            operation=operation,
        )

    async def _give_back(self, name: str, record: SubscriptionMetadata) -> None:
        coordinator = self._coordinator(name)
        if coordinator is not None and coordinator.is_revoked and not coordinator.is_closed:
            await coordinator.resume(record)

    # Records and segments.

    async def _find(self, name: str) -> SubscriptionMetadata | None:
        stored = await self._store.get(self._key(name), fresh=True)
        if stored is None:
            return None
        record = decode(SubscriptionMetadata, stored.key, stored.value)
        if not record.is_foreign(self._incarnation()):
            return record
        self._check_leading()
        with suppress(VersionConflict):  # removed by whoever put it
            await self._store.delete(stored.key, expected=stored.version)
        return None

    async def _need(self, name: str) -> SubscriptionMetadata:
        record = await self._find(name)
        if record is None:
            raise SubscriptionNotFound(f"{self._topic} has no subscription {name}; its stats list those it has.")
        return record

    async def _replace_unreadable(self, name: str) -> SubscriptionMetadata | None:
        """Put a readable record in the place of one that only a newer version can read, so that it can be deleted. It says so
        itself: nobody may take it for a subscription that somebody made. Returns it; None if the record can be read."""
        stored = await self._store.get(self._key(name), fresh=True)
        if stored is None:
            return None
        try:
            decode(SubscriptionMetadata, stored.key, stored.value)
        except StoreMismatch as error:
            log.warning("subscription %s of %s is deleted although its record is not understood: %s", name, self._topic, error)
        else:
            return None
        record = SubscriptionMetadata(
            created_ms=self._runtime.clock.now_ms(),
            pending=self._change_to("delete"),
            leader_epoch=self._leadership.epoch,
            incarnation=self._incarnation(),
        )
        self._check_leading()
        async with step("delete-subscription:intend"):
            await self._store.put(stored.key, msgspec.json.encode(record), expected=stored.version)
        return record

    async def _change(self, name: str, modify: Callable[[SubscriptionMetadata], SubscriptionMetadata]) -> SubscriptionMetadata:
        record = GuardedRecord(self._store, self._leadership, self._key(name), SubscriptionMetadata)
        try:
            return await record.change(modify)
        except NotFound as error:
            raise SubscriptionNotFound(f"Subscription {name} of {self._topic} was deleted meanwhile.") from error

    async def _done(self, name: str) -> None:
        await self._change(name, lambda old: msgspec.structs.replace(old, pending=None))

    async def _remove(self, name: str) -> None:
        for _attempt in range(ATTEMPTS):
            stored = await self._store.get(self._key(name), fresh=True)
            if stored is None:
                return
            epoch = decode(SubscriptionMetadata, stored.key, stored.value).leader_epoch
            if epoch > self._leadership.epoch:
                self._leadership.step_down()
                raise StaleLeader(f"{stored.key} was claimed by a leader of epoch {epoch}, above our {self._leadership.epoch}.")
            self._check_leading()
            try:
                await self._store.delete(stored.key, expected=stored.version)
                return
            except (VersionConflict, OutcomeUnknown):
                continue
        raise StoreUnavailable(f"{self._key(name)} could not be removed in {ATTEMPTS} attempts; try again.")

    def _key(self, name: str) -> str:
        return subscription_path(self._topic, name, self._root)

    def _registrations(self, name: str, record: SubscriptionMetadata) -> Registrations:
        mark = record.mark(self._incarnation())
        return Registrations(self._store, self._leadership, self._topic, name, self._root, mark=mark)

    def _physical(self, segment: SegmentInfo) -> TopicName:
        return physical_name(self._topic, segment)

    def _all(self) -> list[SegmentInfo]:
        return [self._layout().all_segments[number] for number in sorted(self._layout().all_segments)]

    def _check_leading(self) -> None:
        if not self._leadership.holds():
            raise StaleLeader(f"The leader of {self._topic} may have a successor, so nothing more was done.")


def _after_reset(old: SubscriptionMetadata) -> SubscriptionMetadata:
    """The record once every cursor is moved; the same if that is written already."""
    return msgspec.structs.replace(old, pending=None, resets=old.resets + 1) if old.is_resetting else old


def _called(kind: SubscriptionOperation) -> str:
    """How the plan of an operation calls itself."""
    return {"create": "create-subscription", "delete": "delete-subscription"}.get(kind, kind)
