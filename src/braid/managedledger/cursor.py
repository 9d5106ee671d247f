"""`ManagedCursor`: how far one subscription is in a log.

Owns the mark-delete position (it and everything before is acknowledged), the individually acknowledged entries beyond it, the
partly acknowledged batches, and the read position. Changes are in memory at once and durable later: after `cursor_flush_ms`, or
when `flush` returns (`cursor_writes.py` sees to that). What is lost in a crash is delivered again, never skipped. Hot:
`read_cached`, `acknowledge`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import TYPE_CHECKING

from sortedcontainers import SortedDict

from braid.errors import InvalidArgument, LedgerFenced
from braid.managedledger.api import Entry
from braid.managedledger.cursor_store import CursorStore
from braid.managedledger.cursor_writes import CursorWrites
from braid.managedledger.records import CursorPosition, MaskRecord, PositionRecord, RangeRecord
from braid.model.positions import LATEST, Position
from braid.model.ranges import PositionRanges

if TYPE_CHECKING:
    from braid.managedledger.log import ManagedLedger


class ManagedCursor:
    """A cursor of a loaded log; without a store it lives in memory only."""

    def __init__(self, owner: ManagedLedger, name: str, mark_delete: Position, store: CursorStore | None) -> None:
        self.name = name
        self.mark_delete = mark_delete
        self.read_position = Position(mark_delete.ledger_id, mark_delete.entry_id + 1)
        """Where the next read starts; the dispatcher may set it back."""
        self.position_properties: Mapping[str, int] = {}
        self.consumed = 0
        """Entries acknowledged since the log was loaded."""
        self._log = owner
        self._store = store
        self._ranges = PositionRanges()
        self._masks: SortedDict[Position, int] = SortedDict()
        """Messages that are missing of partly acknowledged batches. Sorted, so that those that are passed are found first."""
        self._is_plain = True
        """Neither ranges nor masks: the fast paths apply."""
        self._writes = CursorWrites(owner, name, store, self._snapshot)

    @classmethod
    def restored(cls, owner: ManagedLedger, name: str, store: CursorStore, position: CursorPosition) -> ManagedCursor:
        """A cursor as it was stored."""
        cursor = cls(owner, name, Position(position.mark_delete.ledger_id, position.mark_delete.entry_id), store)
        for run in position.ranges:
            cursor._ranges.add_range(run.ledger_id, run.first, run.last)
        for mask in position.masks:
            cursor._masks[Position(mask.ledger_id, mask.entry_id)] = int(mask.unacked, 16)
        cursor.position_properties = position.properties
        cursor._normalise()
        cursor.rewind()
        return cursor

    @property
    def is_durable(self) -> bool:
        return self._store is not None

    @property
    def properties(self) -> Mapping[str, str]:
        """What users set on the subscription."""
        return {} if self._store is None else self._store.properties

    @property
    def has_partial_acks(self) -> bool:
        """Whether `unacked_mask` can have an answer for any entry."""
        return bool(self._masks)

    @property
    def ranges_count(self) -> int:
        """How many separate ranges are acknowledged beyond the mark-delete position."""
        return len(self._ranges)

    @property
    def ledger_id(self) -> int:
        """Ledger of the stored position, -1 if there is none."""
        return -1 if self._store is None else self._store.ledger_id

    @property
    def ledger_last_entry(self) -> int:
        return -1 if self._store is None else self._store.ledger_last_entry

    @property
    def ledger_switched_ms(self) -> int:
        return 0 if self._store is None else self._store.ledger_switched_ms

    def describe_ranges(self) -> str:
        """Ranges in the form `[(1:2..1:5],...]`, lower end exclusive."""
        return "[" + ",".join(f"({ledger}:{first - 1}..{ledger}:{last}]" for ledger, first, last in self._ranges) + "]"

    def entries_since_mark_delete(self) -> int:
        """Entries after the mark-delete position, acknowledged or not."""
        ledger_id, entry_id = self.mark_delete
        return self._log.map.end - self._log.map.ordinal(Position(ledger_id, entry_id + 1))

    def backlog(self) -> int:
        """Unacknowledged entries."""
        return self.entries_since_mark_delete() - self._ranges.count

    def nth_unacknowledged(self, count: int) -> Position | None:
        """The `count`-th (from 1) unacknowledged entry; None if there are fewer."""
        if count > self.backlog():
            return None
        ledgers = self._log.map
        at = ledgers.ordinal(Position(self.mark_delete.ledger_id, self.mark_delete.entry_id + 1))
        for ledger_id, first, last in self._ranges:
            start = ledgers.ordinal(Position(ledger_id, first))
            if count <= start - at:
                break
            count -= start - at
            at = start + last - first + 1
        return ledgers.at(at + count - 1)

    # ---- reading ----------------------------------------------------------------------------------------------------------

    def read_cached(self, max_entries: int, max_bytes: int, upto: Position = LATEST) -> list[Entry] | None:
        """The next unacknowledged entries at or before `upto` from memory, moving the read position; [] at the end; None = ask
        `read`."""
        while True:
            if self.read_position <= self.mark_delete:
                self._read_after_mark_delete()
            if self._ranges:
                self.read_position = self._skip(self.read_position)
            if self.read_position > upto:
                return []
            entries = self._log.read_cached(self.read_position, max_entries, max_bytes)
            if not entries:
                return entries
            if entries := self._taken(entries, upto):
                return entries

    def take_new(self, entries: list[Entry]) -> bool:
        """Whether these entries, just added to the log, are what is to be read next; then the read position moves past them."""
        first = entries[0]
        if self.read_position != (first.ledger_id, first.entry_id):
            return False
        last = entries[-1]
        self.read_position = Position(last.ledger_id, last.entry_id + 1)
        return True

    async def read(self, max_entries: int, max_bytes: int, upto: Position = LATEST) -> list[Entry]:
        """The next unacknowledged entries at or before `upto` from storage, moving the read position; [] at the end."""
        while True:
            if self.read_position <= self.mark_delete:
                self._read_after_mark_delete()
            if self.read_position > upto:
                return []
            start = self.read_position
            wanted = self._skip(start)
            if wanted > upto:
                self.read_position = wanted
                return []
            if upto < self._log.last_position:
                before = Position(wanted.ledger_id, wanted.entry_id - 1)
                max_entries = min(max_entries, self._log.map.between(before, upto))
            entries = await self._log.read(wanted, max_entries, max_bytes)
            if self.read_position != start:  # rewound or reset meanwhile: what was read is not what is wanted now
                continue
            if not entries:
                self.read_position = wanted  # the end: all up to it is acknowledged, so that nobody asks for it again
                return entries
            if entries := self._taken(entries, upto):
                return entries

    def rewind(self) -> None:
        """Read again from the first unacknowledged entry."""
        self._read_after_mark_delete()
        self.read_position = self._skip(self.read_position)

    def anchor(self, start: Position) -> None:
        """The log got its first ledger: a cursor that stood before everything stands before that ledger's first entry."""
        if self.mark_delete.ledger_id < 0:
            self.mark_delete = start
            self._read_after_mark_delete()

    def _read_after_mark_delete(self) -> None:
        self.read_position = Position(self.mark_delete.ledger_id, self.mark_delete.entry_id + 1)

    def _skip(self, position: Position) -> Position:
        """The first position at or after this one that is not individually acknowledged."""
        if not self._ranges:
            return position
        position = self._log.map.clamp(position)
        while position in self._ranges:
            end = self._ranges.contiguous_from(Position(position.ledger_id, position.entry_id - 1))
            position = self._log.map.after(end)
        return position

    def _taken(self, entries: list[Entry], upto: Position) -> list[Entry]:
        last = entries[-1]
        if (last.ledger_id, last.entry_id) > upto:
            entries = [e for e in entries if (e.ledger_id, e.entry_id) <= upto]
            if not entries:  # `upto` is no entry of this log, or those up to it are acknowledged
                self.read_position = Position(upto.ledger_id, upto.entry_id + 1)
                return entries
            last = entries[-1]
        self.read_position = Position(last.ledger_id, last.entry_id + 1)
        first = entries[0]
        # While they were read from storage, acknowledgments may have moved the mark-delete position over some of them.
        mark_delete, ranges = self.mark_delete, self._ranges
        if ranges or (first.ledger_id, first.entry_id) <= mark_delete:
            return [e for e in entries if (at := (e.ledger_id, e.entry_id)) > mark_delete and at not in ranges]
        return entries

    # ---- acknowledging ----------------------------------------------------------------------------------------------------

    def acknowledge(self, positions: Iterable[Position]) -> None:
        """Acknowledge entries one by one; idempotent. Raises InvalidArgument for one beyond the end of the log."""
        for position in positions:
            mark_delete = self.mark_delete
            if (
                self._is_plain
                and position[1] == mark_delete[1] + 1
                and position[0] == mark_delete[0]
                and position <= self._log.last_position
            ):
                self.mark_delete = position
                self.consumed += 1
            else:
                self._acknowledge(position)
        if not self._writes.is_dirty:
            self._writes.touch()

    def acknowledge_spans(self, spans: Iterable[tuple[Position, Position]]) -> None:
        """Acknowledge the whole entries of each span: those after its first position, up to its second. Costs nothing for each
        entry; otherwise as `acknowledge`."""
        for after, upto in spans:
            self._check_exists(upto)
            for ledger_id, first, last in self._log.map.runs(max(after, self.mark_delete), upto):
                self.consumed += self._ranges.add_range(ledger_id, first, last)
                if self._masks:
                    for position in list(self._masks.irange(Position(ledger_id, first), Position(ledger_id, last))):
                        del self._masks[position]
        self._is_plain = not self._ranges and not self._masks
        self._advance()
        self._writes.touch()

    def acknowledge_batch(self, position: Position, ack_set: int) -> bool:
        """Acknowledge the messages of a batch whose bit in `ack_set` is 0; True when that completed the entry."""
        if self.is_acknowledged(position):
            return False
        self._check_exists(position)
        unacked = self._masks.get(position, ack_set) & ack_set
        if unacked:
            self._masks[position] = unacked
            self._is_plain = False
        else:
            self._acknowledge(position)
        self._writes.touch()
        return not unacked

    def acknowledge_cumulative(
        self, position: Position, ack_set: int | None = None, properties: Mapping[str, int] | None = None
    ) -> None:
        """Acknowledge everything up to `position`; with a non-zero `ack_set` of this entry only the messages whose bit is 0.

        `properties` replace the ones stored with the position. A position that is already passed changes nothing else.
        """
        self._check_exists(position)
        if properties is not None:
            self.position_properties = dict(properties)
        target = self._log.map.before(position) if ack_set else position
        if target > self.mark_delete:
            self._move(target)
        if ack_set:
            self.acknowledge_batch(position, ack_set)
        self._writes.touch()

    def is_acknowledged(self, position: Position) -> bool:
        """Whether the whole entry is acknowledged."""
        return position <= self.mark_delete or position in self._ranges

    def unacked_mask(self, position: Position) -> int | None:
        """Messages of a partly acknowledged batch that are not acknowledged; None if nothing is known of this entry."""
        unacked: int | None = self._masks.get(position)
        return unacked

    def _acknowledge(self, position: Position) -> None:
        self._check_exists(position)
        if position <= self.mark_delete or not self._log.map.contains(position):
            return
        self._masks.pop(position, None)
        if self._ranges.add(position):
            self.consumed += 1
        self._is_plain = False
        mark_delete = self.mark_delete
        # Only the entry right after the mark-delete position moves it; in another ledger that can only be entry 0.
        if position[1] == 0 or (position[1] == mark_delete[1] + 1 and position[0] == mark_delete[0]):
            self._advance()

    def _move(self, target: Position) -> None:
        """Everything up to `target` is acknowledged."""
        if not self._log.map.contains(target):
            target = self._log.map.before(target)
            if target <= self.mark_delete:
                return
        before = self.backlog()
        self._set_mark_delete(target)
        self._advance()
        self.consumed += before - self.backlog()

    def _advance(self) -> None:
        """Move the mark-delete position over the acknowledged entries that follow it, into other ledgers too."""
        mark_delete = self.mark_delete
        while self._ranges:
            end = self._ranges.contiguous_from(mark_delete)
            if end == mark_delete:
                following = self._log.map.after(mark_delete)
                if following.ledger_id == mark_delete.ledger_id or following not in self._ranges:
                    break
                end = following
            mark_delete = end
        if mark_delete != self.mark_delete:
            self._set_mark_delete(mark_delete)

    def _set_mark_delete(self, target: Position) -> None:
        is_other_ledger = target.ledger_id != self.mark_delete.ledger_id
        self.mark_delete = target
        self._ranges.remove_up_to(target)
        while self._masks and self._masks.peekitem(0)[0] <= target:
            self._masks.popitem(0)
        self._is_plain = not self._ranges and not self._masks
        if is_other_ledger and self.is_durable:
            self._log.request_trim()

    def _normalise(self) -> None:
        """Bring a stored state in line with the log: what it names may have been trimmed."""
        self.mark_delete = max(self.mark_delete, self._log.map.before(self._log.map.first))
        self._ranges.remove_up_to(self.mark_delete)
        for position in [each for each in self._masks if self.is_acknowledged(each)]:
            del self._masks[position]
        self._is_plain = not self._ranges and not self._masks
        self._advance()

    def _check_exists(self, position: Position) -> None:
        if position > self._log.last_position:
            raise InvalidArgument(
                f"The position {position} lies beyond the end {self._log.last_position} of log {self._log.name}; "
                "acknowledge only what was received."
            )

    # ---- durability -------------------------------------------------------------------------------------------------------

    @property
    def is_saved(self) -> bool:
        """Whether the present state would survive a crash, as far as it ever does."""
        return self._writes.is_saved

    def save_soon(self) -> None:
        """Write the present state now rather than after `cursor_flush_ms`; nobody waits for it."""
        self._writes.hurry()

    async def flush(self) -> None:
        """Return once the present state is durable. Calls made at the same time share one write."""
        await self._writes.flush()

    async def reset(self, position: Position, ack_set: int | None = None) -> None:
        """Read from `position` on, inclusive (else from the next that exists); nothing after it is acknowledged, except, with
        `ack_set`, the messages of that entry whose bit is 0. Durable when this returns."""
        start = self._log.map.clamp(position)
        self._ranges.clear()
        self._masks.clear()
        self._set_mark_delete(self._log.map.before(start))
        if ack_set and start == position and self._log.map.contains(start):
            self._masks[start] = ack_set
            self._is_plain = False
        self._read_after_mark_delete()
        self._writes.touch()
        await self.flush()

    async def set_properties(self, changes: Mapping[str, str | None]) -> Mapping[str, str]:
        """Change the user's properties (None removes one), durably; returns all of them."""
        if self._store is None:
            raise InvalidArgument(f"The cursor {self.name} of log {self._log.name} is not durable and has no properties.")
        try:
            await self._store.set_properties(changes)
        except LedgerFenced as error:
            self._log.lost(error)
            raise
        return self.properties

    async def close(self) -> None:
        """Make the present state durable and stop."""
        await self._writes.stop_and_wait()
        if self._store is not None:
            await self._store.close(self._snapshot(), is_dirty=self._writes.is_dirty)
            self._writes.is_dirty = False

    async def delete(self) -> None:
        """Stop and remove what is stored. If that fails, the cursor goes on as before."""
        await self._writes.stop_and_wait()
        if self._store is not None:
            try:
                await self._store.delete()
            except LedgerFenced as error:
                self._log.lost(error)
                raise
            except BaseException:
                self._writes.go_on()
                raise

    def stop(self) -> None:
        """Write no more; what is not durable is lost."""
        self._writes.stop()

    def _snapshot(self) -> CursorPosition:
        limit = self._log.config.max_persisted_ranges
        return CursorPosition(
            mark_delete=PositionRecord(*self.mark_delete),
            ranges=tuple(RangeRecord(*run) for run in islice(self._ranges, limit)),
            masks=tuple(MaskRecord(at.ledger_id, at.entry_id, f"{mask:x}") for at, mask in islice(self._masks.items(), limit)),
            properties=dict(self.position_properties),
        )
