"""`ManagedLedger`: one topic's log, a list of ledgers of which the last is written to.

Owns reading, trimming, terminating, properties and the set of cursors; appending is the other half (`appending.py`), a cursor
keeps itself (`cursor.py`), opening and deleting are plans (`factory.py`, `deletion.py`). Upholds INV2: every update of the
record is a CAS, and a conflict ends this log for good.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Literal, TypeAlias

import msgspec

from braid.errors import AlreadyExists, BraidError, LedgerFenced, LedgerNotFound, SubscriptionNotFound
from braid.managedledger import trimming
from braid.managedledger.api import Entry, InternalStats, LedgerResolver, LogListener
from braid.managedledger.appending import LogAppender
from braid.managedledger.cache import EntryCache
from braid.managedledger.config import ManagedLedgerConfig
from braid.managedledger.cursor import ManagedCursor
from braid.managedledger.cursor_store import CursorStore
from braid.managedledger.deletion import remove_log
from braid.managedledger.lost import lost
from braid.managedledger.owned_record import OwnedRecord
from braid.managedledger.reading import decode
from braid.managedledger.records import LedgerInfo, LogRecord, PositionRecord, changed, decode_record
from braid.managedledger.retention import Limits
from braid.managedledger.stats import internal_stats
from braid.managedledger.topic_names import topic_of
from braid.managedledger.unreadable import UnreadableCursors
from braid.metadata.api import MetadataStore
from braid.model.positions import Position
from braid.model.retention import NextTrim, RetentionPolicies
from braid.runtime.env import Runtime

log = logging.getLogger(__name__)
Initial = Literal["earliest", "latest"] | Position
NO_LIMITS = Limits()
"""Nothing is kept that every subscription has read."""


TrimGuard: TypeAlias = "Callable[[ManagedLedger], Awaitable[bool]]"


class ManagedLedger(LogAppender):
    """A loaded log. Made by `ManagedLedgerFactory.open`."""

    __slots__ = (
        "_is_loaded",
        "_lifecycle",
        "_trim_lock",
        "_trimming",
        "cursors",
        "last_shown",
        "metadata",
        "on_trimmed",
        "policy",
        "readable",
        "retention_mb",
        "retention_minutes",
        "trim_guard",
        "unread_minutes",
        "unreadable",
    )

    def __init__(
        self,
        name: str,
        record: OwnedRecord[LogRecord],
        *,
        runtime: Runtime,
        metadata: MetadataStore,
        resolver: LedgerResolver,
        config: ManagedLedgerConfig,
        cache: EntryCache,
        listener: LogListener,
        limits: Limits = NO_LIMITS,
        policy: RetentionPolicies | None = None,
        readable: Callable[[], Position] | None = None,
        trim_guard: TrimGuard | None = None,
    ) -> None:
        super().__init__(name, record, runtime=runtime, resolver=resolver, config=config, cache=cache.log(), listener=listener)
        self.metadata = metadata
        self.cursors: dict[str, ManagedCursor] = {}
        """By name, durable or not. Changed by this object only."""
        self.unreadable = UnreadableCursors()
        self.limits = limits
        self.policy = record.value.retention if policy is None else policy
        """What the topic itself says of retention, which wins over the limits given by others; None = nothing."""
        self.readable = readable
        """Says behind which position entries belong to open transactions: these are not trimmed."""
        self.trim_guard = trim_guard
        """Asked before anything is deleted: False keeps everything for now."""
        self.last_shown: Callable[[Position], Awaitable[Position]] | None = None
        """Says which entry up to one is the last that a reader can have got; (-1, -1): none. Without it, every one can."""
        self.on_trimmed: Callable[[], None] | None = None
        """Told when the first position has moved."""
        self._lifecycle = asyncio.Lock()
        self._trim_lock = asyncio.Lock()
        self._trimming: asyncio.Task[int] | None = None
        self._is_loaded = False
        """All cursors are known, so that it is known what they no longer need."""
        self._is_terminating = self.is_terminated

    @property
    def incarnation(self) -> str:
        return self._record.value.incarnation

    @property
    def owner_epoch(self) -> int:
        return self._record.value.owner_epoch

    @property
    def owner_token(self) -> str:
        return self._record.value.owner_token

    @property
    def created_ms(self) -> int:
        return self._record.value.created_ms

    @property
    def properties(self) -> Mapping[str, str]:
        return self._record.value.properties

    @property
    def limits(self) -> Limits:
        """How long it keeps what nobody needs."""
        if (own := self.policy) is not None:
            return Limits(own.retention_time_in_minutes, own.retention_size_in_mb)
        return Limits(self.retention_minutes, self.retention_mb, self.unread_minutes)

    @limits.setter
    def limits(self, limits: Limits) -> None:
        self.retention_minutes, self.retention_mb, self.unread_minutes = limits

    @property
    def first_position(self) -> Position:
        """First entry; where the next one will be if there is none."""
        return self.map.first

    @property
    def is_terminated(self) -> bool:
        return self._record.value.terminated_position is not None

    @property
    def terminated_position(self) -> Position | None:
        found = self._record.value.terminated_position
        return None if found is None else Position(found.ledger_id, found.entry_id)

    @property
    def trimmed_position(self) -> Position | None:
        """The last entry deleted from the front that a reader can have got; None if none was."""
        found = self._record.value.trimmed_position
        return None if found is None else Position(found.ledger_id, found.entry_id)

    @property
    def trimmed_index(self) -> int | None:
        """Index of the last message deleted from the front, -1 if none was; None if an older version did not note it."""
        record = self._record.value
        return None if record.trimmed_index < 0 and record.trimmed_position is not None else record.trimmed_index

    @property
    def is_fenced(self) -> bool:
        """Another owner took over."""
        return self._fenced is not None

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def last_append_ms(self) -> int:
        """Append time of the last durable entry, 0 if there never was one."""
        return self._confirmed_append_ms

    @property
    def total_entries(self) -> int:
        return self.map.end - self.map.start

    @property
    def total_size(self) -> int:
        """Bytes of all ledgers, as stored."""
        return sum([info.size for info in self.infos]) + self.tail_size

    @property
    def state(self) -> str:
        """As the admin API names it."""
        if self.is_fenced:
            return "Fenced"
        if self._is_closed:
            return "Closed"
        return "Terminated" if self.is_terminated else "LedgerOpened"

    def position_after(self, position: Position) -> Position:
        """The next existing position, else where the next entry will be."""
        return self.map.after(position)

    def position_before(self, position: Position) -> Position:
        """The previous existing position, else the place before the first entry."""
        return self.map.before(position)

    def clamp(self, position: Position) -> Position:
        """The first existing position at or after `position`, else where the next entry will be."""
        return self.map.clamp(position)

    def internal_stats(self) -> InternalStats:
        """What the admin API shows of a log's inside."""
        return internal_stats(self)

    # ---- reading ----------------------------------------------------------------------------------------------------------

    def read_cached(self, start: Position, max_entries: int, max_bytes: int) -> list[Entry] | None:
        """Entries at or after `start` from memory, [] at the end of the log; None = ask `read`."""
        if start > self.last_position:
            return []
        found = self._cache.read(start, max_entries, max_bytes)
        if found is None and (position := self.map.clamp(start)) != start:
            found = self._cache.read(position, max_entries, max_bytes)
        return found

    async def read(self, start: Position, max_entries: int, max_bytes: int) -> list[Entry]:
        """Entries at or after `start` from storage: of one ledger, within both limits but at least one unless the log ends.

        Raises EntryCorrupt, StorageUnavailable and the ledger store's errors; never leaves out an entry.
        """
        position, stored = await self.read_stored(start, max_entries, max_bytes)
        return decode(position.ledger_id, position.entry_id, stored)

    async def read_stored(self, start: Position, max_entries: int, max_bytes: int) -> tuple[Position, list[bytes]]:
        """The same as stored, the broker's metadata in front, and the position of the first."""
        while True:
            self._check_open()
            ledger_id, first = position = self.map.clamp(start)
            if not self.map.contains(position):
                return position, []
            last = min(first + max(max_entries, 1), self.map.count(ledger_id)) - 1
            info = next(info for info in reversed(self.infos) if info.ledger_id == ledger_id)
            try:
                return position, await self._reader.read(ledger_id, info.properties, first, last, max(max_bytes, 1))
            except LedgerNotFound:
                if self.map.contains(position):
                    store = self.resolver.for_ledger(ledger_id, info.properties)
                    raise lost(f"the topic {topic_of(self.name)}", [ledger_id], store) from None
                # trimmed meanwhile: go on with what is left

    async def size_before(self, position: Position) -> int:
        """Bytes, as stored, of the entries in front of this one in its ledger, without reading them; of all for the end of a
        ledger. Raises LedgerNotFound if it is trimmed."""
        self._check_open()
        ledger_id, entry_id = position
        for info in reversed(self.infos):
            if info.ledger_id == ledger_id:
                return await self._reader.length_before(ledger_id, info.properties, entry_id)
        raise LedgerNotFound(f"Ledger {ledger_id} is not part of log {self.name} any more.")

    async def find_time(self, ms: int) -> Position:
        """The first entry appended at `ms` or later, else the position after the last; a binary search."""
        low, high = self.map.start, self.map.end
        for info in self.infos:
            if not info.timestamp or info.last_append_ms >= ms:
                break
            low = self.map.ordinal(Position(info.ledger_id, info.entries))
        while low < high:
            middle = (low + high) // 2
            position = self.map.at(middle)
            entries = self.read_cached(position, 1, 1) or await self.read(position, 1, 1)
            if entries and entries[0].append_ms < ms:
                low = middle + 1
            else:
                high = middle
        return self.map.at(low)

    # ---- cursors ----------------------------------------------------------------------------------------------------------

    async def open_cursor(self, name: str, *, initial: Initial, properties: Mapping[str, str] | None = None) -> ManagedCursor:
        """The durable cursor of this name, created at `initial` (a position: read from there, inclusive) if there is none."""
        async with self._lifecycle:
            self._check_open()
            found = self.cursors.get(name)
            if found is not None:
                if not found.is_durable:
                    raise AlreadyExists(f"The cursor {name} of log {self.name} is in use by a reader; choose another name.")
                return found
            self.unreadable.check(name)
            mark_delete = self._mark_delete_for(initial)
            store = await CursorStore.create(self, name, mark_delete, dict(properties or {}))
            if mark_delete.ledger_id < 0:
                # The log was empty. If its first ledger came meanwhile, it anchored only the cursors that had joined; this one
                # must not be anchored to a later ledger, or it would skip the first.
                mark_delete = self._mark_delete_for("earliest")
            return self._joined(ManagedCursor(self, name, mark_delete, store))

    def non_durable_cursor(self, name: str, start: Position) -> ManagedCursor:
        """A cursor in memory that reads from `start`, inclusive."""
        self._check_open()
        if name in self.cursors:
            raise AlreadyExists(f"The log {self.name} already has a cursor {name}; choose another name.")
        return self._joined(ManagedCursor(self, name, self._mark_delete_for(start), None))

    def drop_non_durable(self, cursor: ManagedCursor) -> None:
        """Forget a cursor in memory."""
        if self.cursors.get(cursor.name) is cursor and not cursor.is_durable:
            del self.cursors[cursor.name]
            cursor.stop()
            self._is_cached = bool(self.cursors)

    async def delete_cursor(self, name: str) -> None:
        """Remove a cursor for good. Raises SubscriptionNotFound."""
        async with self._lifecycle:
            self._check_open()
            cursor = self.cursors.get(name)
            if cursor is None and name in self.unreadable:
                await CursorStore.remove_unread(self, name)
                del self.unreadable[name]
                self.request_trim()
                return
            if cursor is None:
                raise SubscriptionNotFound(f"The log {self.name} has no cursor {name}.")
            if not cursor.is_durable:
                self.drop_non_durable(cursor)
                return
            await cursor.delete()
            del self.cursors[name]
            self._is_cached = bool(self.cursors)
        self.request_trim()

    def restore_cursor(self, cursor: ManagedCursor) -> None:
        """A cursor found in the store while the log is opened."""
        self._joined(cursor)

    def loaded(self) -> None:
        """Every stored cursor was restored; only now may the log be trimmed."""
        self._is_loaded = True
        self.request_trim()

    def _joined(self, cursor: ManagedCursor) -> ManagedCursor:
        self.cursors[cursor.name] = cursor
        self._is_cached = True
        return cursor

    def _mark_delete_for(self, start: Initial) -> Position:
        """The mark-delete position from which `start` is read next."""
        if start == "latest":
            return self.last_position if self.last_position.ledger_id >= 0 else self.map.before(self.map.first)
        if isinstance(start, str):
            return self.map.before(self.map.first)
        return self.map.before(self.map.clamp(start))

    # ---- trimming, properties ---------------------------------------------------------------------------------------------

    def request_trim(self) -> None:
        """Trim soon, in the background; many requests make one pass."""
        if len(self.infos) > 1 and self._trimming is None and self._is_loaded and not self._is_closed and not self.is_fenced:
            self._trimming = self.tasks.spawn(self._trim_quietly(), "trim")

    async def trim(self, *, keeps_unread: bool = True) -> int:
        """Delete the oldest ledgers that nobody needs and retention no longer keeps; returns how many. An administrator may
        give up what is kept only because no subscription has read it."""
        async with self._trim_lock:
            self._check_open()
            return await trimming.trim(self, keeps_unread=keeps_unread)

    def next_trim(self) -> NextTrim:
        """What goes next, and when."""
        return trimming.next_trim(self)

    async def forget(self, info: LedgerInfo) -> None:
        """Delete a ledger that left the record."""
        await self._reader.forget(info.ledger_id)
        await self.ledgers.discard(info.ledger_id, info.properties)

    async def _trim_quietly(self) -> int:
        try:
            return await self.trim()
        except BraidError as error:
            if not self._is_closed:  # else whoever opens it next trims it
                log.warning("log %s could not be trimmed, it is tried again later: %s", self.name, error)
            return 0
        finally:
            self._trimming = None

    def _ledger_listed(self, ledger_id: int) -> None:
        """The first ledger gives positions to cursors that stood before everything; later ones let older ledgers go."""
        for cursor in self.cursors.values():
            cursor.anchor(Position(ledger_id, -1))
        self.request_trim()

    async def set_properties(self, changes: Mapping[str, str | None]) -> Mapping[str, str]:
        """Change properties of the log (None removes one), durably; returns all of them."""
        self._check_open()
        await self.ledgers.update(
            lambda record: msgspec.structs.replace(record, properties=changed(record.properties, changes))
        )
        return self.properties

    async def set_policy(self, policy: RetentionPolicies | None) -> None:
        """Say, durably, how long this log keeps messages; None leaves it to the limits given by others."""
        self._check_open()
        await self.ledgers.update(lambda record: msgspec.structs.replace(record, retention=policy))
        self.policy = policy

    async def check_owner(self) -> None:
        """Read the record fresh; raise LedgerFenced, for good, if it is not ours any more."""
        found = await self.metadata.get(self._record.key, fresh=True)
        if found is not None and found.version == self._record.version and self.metadata.capabilities.unique_versions:
            return  # as we wrote it last: no need to decode it
        if found is None or decode_record(LogRecord, found.key, found.value).owner_token != self.owner_token:
            error = self._record.lost()
            self._fence(error)
            raise error

    # ---- the end ----------------------------------------------------------------------------------------------------------

    async def terminate(self) -> Position:
        """Take no more entries, for good: refused from now on, durable when this returns the last position. Idempotent."""
        async with self._lifecycle:
            self._check_open()
            if self.is_terminated:
                return self.last_position
            self._is_terminating = True
            try:
                await self._settle_down()
                end = PositionRecord(*self.last_position)
                await self.ledgers.update(lambda record: msgspec.structs.replace(record, terminated_position=end))
            except BaseException:
                self._is_terminating = self.is_terminated
                raise
            return self.last_position

    async def close(self) -> None:
        """Finish the adds under way, make cursors durable, release everything. Idempotent; a log taken over just lets go."""
        async with self._lifecycle:
            if self._is_closed:
                return
            self._is_closed = True
            try:
                if not self.is_fenced:
                    await self._end_well(self._settle_down())
                for cursor in self.cursors.values():
                    if not self.is_fenced:
                        await self._end_well(cursor.close())
            finally:
                await self._release()

    async def delete(self) -> None:
        """Close, then remove everything the log has (see `factory.ManagedLedgerFactory.delete`)."""
        async with self._lifecycle:
            self._is_closed = True
            self._fence(LedgerFenced(f"The log {self.name} is being deleted."))
            await self._release()
        await remove_log(self.metadata, self.resolver, self._record.key)

    async def _end_well(self, work: Coroutine[Any, Any, None]) -> None:
        """A step of closing; what it cannot write down is recovered by the next open."""
        try:
            await work
        except LedgerFenced as error:
            self._fence(error)
        except BraidError as error:
            log.warning("log %s is closed without a clean end, the next open recovers it: %s", self.name, error)

    async def _release(self) -> None:
        for cursor in self.cursors.values():
            cursor.stop()
        await self.tasks.close()
        await self._reader.close()
        self._cache.clear()
