"""Consumer sessions: what a coordinator remembers of each registered consumer, and the records that outlive it.

Owns the registration records of one subscription: membership and the last assignment, written when those change and never for
liveness (R468-38). Every write is made by a leader that claimed the record (INV4). When a session ends is the coordinator's
decision; the arithmetic of the grace period is here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

import msgspec

from braid.errors import NotFound, OutcomeUnknown, StoreError, StoreMismatch, VersionConflict
from braid.metadata.api import ABSENT, MetadataStore, Record, Span
from braid.metadata.claims import GuardedRecord, StaleLeader
from braid.metadata.election import Leadership
from braid.model.names import TopicName, decode
from braid.runtime.clock import Timer
from braid.scalable.api import ConsumerHandle, ConsumerRegistration, RegistrationNumber
from braid.scalable.records import TOPICS, RegistrationRecord, consumer_path, consumers_path
from braid.scalable.records import decode as decode_record

log = logging.getLogger(__name__)
ABSENT_GRACES: Final = 3
"""Grace periods after which a consumer that no leader has seen is gone, however often the leader changed (hole 15)."""
ATTEMPTS: Final = 20
SHOWN_BYTES: Final = 200
"""Of a record that is removed unread, in the log."""
WRITES: Final = 16
"""Records written at the same time."""

Change = Callable[[RegistrationRecord], RegistrationRecord]


class ConsumerSession:
    """One registered consumer in the leader's memory. Connected while it has a handle, else in its grace period."""

    __slots__ = (
        "absent_since_ms",
        "attached",
        "consumer_id",
        "disconnected_ms",
        "evicted_at_ms",
        "grace",
        "handle",
        "hands_over",
        "is_expired",
        "is_in_doubt",
        "is_untold",
        "is_waiting",
        "missing_since",
        "name",
        "number",
        "owed",
        "saved",
        "says_goodbye",
        "segments",
    )

    def __init__(self, name: str, record: RegistrationRecord) -> None:
        self.name = name
        self.handle: ConsumerHandle | None = None
        self.consumer_id = -1
        self.number: RegistrationNumber | None = None
        """Of the last registration that this leader took."""
        self.says_goodbye = False
        self.segments = record.segments
        """Assigned now."""
        self.saved = record.segments
        """Assigned, as the record says; what it has still to hand over counts as assigned there. While a write of it is in
        doubt: all that it may say."""
        self.is_in_doubt = False
        self.hands_over = True
        """In a checkpoint group: whether it says where it stopped. Of a restored one nobody knows before it is back."""
        self.owed: dict[int, float] = {}
        """In a checkpoint group: taken away, and it has not said where it stopped. It is waited for until then (monotonic)."""
        self.is_waiting = False
        """In a checkpoint group: something that it is to get is still owed."""
        self.is_untold = False
        """Whether it was assigned something since it was last told what."""
        self.absent_since_ms = record.absent_since_ms
        self.disconnected_ms: int | None = None
        self.grace: Timer | None = None
        self.evicted_at_ms = 0
        """When the grace period ends, while it lasts."""
        self.is_expired = False
        self.attached: set[int] = set()
        """Assigned segments that it was seen attached to since they were assigned."""
        self.missing_since: float | None = None
        """Since when it is attached nowhere although it is connected (monotonic)."""

    @property
    def is_connected(self) -> bool:
        return self.handle is not None

    @property
    def kept(self) -> tuple[int, ...]:
        """What its record is to say: a leader that comes in between takes what is owed for assigned, and so asks again."""
        return (*self.segments, *sorted(self.owed)) if self.owed else self.segments

    def is_newer_than(self, number: RegistrationNumber | None) -> bool:
        """Whether a registration that comes from an earlier leader is that of a connection which has lost the name since."""
        return number is not None and self.number is not None and number < self.number

    def attach(self, registration: ConsumerRegistration, number: RegistrationNumber) -> ConsumerHandle | None:
        """The consumer is here, on this connection. Returns the live one it takes the place of, if another."""
        displaced = self.handle if self.handle is not registration.handle else None
        self.stop_grace()
        self.handle = registration.handle
        self.consumer_id = registration.consumer_id
        self.number = number
        self.says_goodbye = registration.says_goodbye
        self.hands_over = registration.hands_over
        if not self.hands_over:
            self.owed.clear()
        self.is_untold = False
        self.disconnected_ms = None
        self.missing_since = None
        return displaced

    def detach(self, now_ms: int) -> None:
        """The connection was lost."""
        self.handle = None
        self.disconnected_ms = now_ms

    def give(self, segments: tuple[int, ...]) -> None:
        """Change the assignment in memory."""
        self.segments = segments
        self.is_untold = True
        self.attached.intersection_update(segments)
        self.missing_since = None

    def stop_grace(self) -> None:
        self.is_expired = False
        if self.grace is not None:
            self.grace.cancel()
            self.grace = None


def grace_left(absent_since_ms: int | None, now_ms: int, grace_seconds: float) -> float:
    """Seconds that a consumer without a connection keeps its segments: the full period, but never beyond three of them since a
    leader first found it absent."""
    if absent_since_ms is None:
        return grace_seconds
    end = min(absent_since_ms, now_ms) / 1000 + ABSENT_GRACES * grace_seconds
    return max(0.0, min(grace_seconds, end - now_ms / 1000))


def absent_since(now_ms: int) -> Change:
    """A new leader finds the consumer without a connection; only the first one's time counts."""
    return lambda old: msgspec.structs.replace(
        old, absent_since_ms=now_ms if old.absent_since_ms is None else min(old.absent_since_ms, now_ms)
    )


def present(old: RegistrationRecord) -> RegistrationRecord:
    """The consumer was seen."""
    return msgspec.structs.replace(old, absent_since_ms=None)


def given(epoch: int, segments: tuple[int, ...]) -> Change:
    """The consumer has another assignment."""
    return lambda old: msgspec.structs.replace(old, epoch=epoch, segments=segments)


class Registrations:
    """The records below one subscription, as its leader writes them."""

    def __init__(
        self,
        store: MetadataStore,
        leadership: Leadership,
        topic: TopicName,
        subscription: str,
        root: str = TOPICS,
        *,
        mark: str = "",
    ) -> None:
        """`mark` is the subscription's; a registration with another one was left behind by an earlier subscription of the name,
        because it was written while that was being deleted (INV5). It counts as missing."""
        self.unreadable: dict[str, StoreMismatch] = {}
        """Consumers whose records `load` could not read, and why: they have no session until they register anew, which puts a
        new record in the place of the old one. Nobody else is concerned."""
        self._store = store
        self._leadership = leadership
        self._mark = mark
        self._collection = consumers_path(topic, subscription, root)
        self._key: Callable[[str], str] = lambda consumer: consumer_path(topic, subscription, consumer, root)

    async def load(self) -> dict[str, RegistrationRecord]:
        """All of them by consumer name, read fresh; what an earlier subscription left behind is removed, and what cannot be
        read is left out and is `unreadable`."""
        found, foreign, unreadable = {}, [], {}
        async for record in self._store.scan(Span(self._collection), fresh=True):
            name = decode(record.name)
            try:
                registration = decode_record(RegistrationRecord, record.key, record.value)
            except StoreMismatch as error:
                log.warning("the registration of %s is passed over: %s", name, error)
                unreadable[name] = error
                continue
            if self._is_foreign(registration):
                foreign.append(name)
            else:
                found[name] = registration
        self.unreadable = unreadable
        for name in foreign:
            await self.remove(name)
        return found

    async def save(self, consumer: str, modify: Change) -> RegistrationRecord:
        """Change a record under our epoch, making it if there is none. Raises StaleLeader, StoreUnavailable, OutcomeUnknown."""
        guarded = GuardedRecord(self._store, self._leadership, self._key(consumer), RegistrationRecord)

        def marked(old: RegistrationRecord) -> RegistrationRecord:
            return msgspec.structs.replace(modify(RegistrationRecord() if self._is_foreign(old) else old), mark=self._mark)

        for _attempt in range(ATTEMPTS):
            expected = ABSENT
            try:
                return await guarded.change(marked)
            except NotFound:
                self.check_leading()
            except StoreMismatch as error:
                stored = await self._store.get(self._key(consumer), fresh=True)
                if stored is None or _is_readable(stored):
                    continue
                self.check_leading()
                log.warning("the registration of %s is written anew: %s", consumer, error)
                expected = stored.version
            fresh = msgspec.structs.replace(marked(RegistrationRecord()), leader_epoch=self._leadership.epoch)
            try:
                await self._store.put(self._key(consumer), msgspec.json.encode(fresh), expected=expected)
            except (VersionConflict, OutcomeUnknown):
                continue  # it is there now, ours or not
            self.unreadable.pop(consumer, None)
            return fresh
        raise OutcomeUnknown(f"The registration of {consumer} came and went {ATTEMPTS} times; try again.")

    async def save_all(
        self, changes: Mapping[str, Change], on_saved: Callable[[str], None] = lambda _consumer: None
    ) -> dict[str, RegistrationRecord]:
        """Change several at once; raises the worst error after all were tried. `on_saved` is told of each that is written."""
        turns = asyncio.Semaphore(WRITES)
        saved: dict[str, RegistrationRecord] = {}
        errors: list[StoreError] = []

        async def save(name: str, change: Change) -> None:
            async with turns:
                try:
                    saved[name] = await self.save(name, change)
                    on_saved(name)
                except StoreError as error:
                    errors.append(error)

        async with asyncio.TaskGroup() as group:
            for name, change in changes.items():
                group.create_task(save(name, change))
        for error in sorted(errors, key=lambda each: not isinstance(each, StaleLeader)):
            raise error
        return saved

    async def remove(self, consumer: str) -> None:
        """Delete a record; a missing one is fine. Raises as `save` does."""
        for _attempt in range(ATTEMPTS):
            record = await self._store.get(self._key(consumer), fresh=True)
            if record is None:
                self.unreadable.pop(consumer, None)
                return
            if _is_readable(record):
                self._check_epoch(record)
            else:
                log.warning("%s is removed although it cannot be read: %r", record.key, record.value[:SHOWN_BYTES])
            self.check_leading()
            try:
                await self._store.delete(record.key, expected=record.version)
            except (VersionConflict, OutcomeUnknown):
                continue
            self.unreadable.pop(consumer, None)
            return
        raise OutcomeUnknown(f"Whether the registration of {consumer} was removed is unknown; try again.")

    async def take_back(self, consumer: str, saved: RegistrationRecord) -> None:
        """Delete a record that is still as we have just written it, whoever leads by now."""
        record = await self._store.get(self._key(consumer), fresh=True)
        if record is not None and record.value == msgspec.json.encode(saved):
            with suppress(VersionConflict):  # somebody else's now
                await self._store.delete(record.key, expected=record.version)

    async def has(self, consumer: str) -> bool:
        """Whether there is a record of this name, whatever it says."""
        return await self._store.get(self._key(consumer), fresh=True) is not None

    async def remove_all(self) -> None:
        """All of them, readable or not."""
        for consumer in await self.load():
            await self.remove(consumer)
        await self.remove_unreadable()

    async def remove_unreadable(self) -> None:
        """Those that cannot be read. What they assign is not known, so nobody may find them after a reset (INV8)."""
        for consumer in sorted(self.unreadable):
            await self.remove(consumer)

    def _is_foreign(self, registration: RegistrationRecord) -> bool:
        return bool(registration.mark and self._mark) and registration.mark != self._mark

    def check_leading(self) -> None:
        """Raise StaleLeader unless we may act now."""
        if not self._leadership.holds():
            raise StaleLeader(f"The leader of {self._leadership.key} may have a successor, so nothing was changed.")

    def _check_epoch(self, record: Record) -> None:
        stored = decode_record(RegistrationRecord, record.key, record.value).leader_epoch
        if stored > self._leadership.epoch:
            self._leadership.step_down()
            raise StaleLeader(f"{record.key} was claimed by a leader of epoch {stored}, above our {self._leadership.epoch}.")


def _is_readable(record: Record) -> bool:
    try:
        decode_record(RegistrationRecord, record.key, record.value)
    except StoreMismatch:
        return False
    return True
