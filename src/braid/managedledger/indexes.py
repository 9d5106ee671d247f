"""`LogIndexes`: from the dense message index of a log to its entries and back.

Owns the search by index, by time and by bytes: what the list of ledgers knows is used first, then a few single entries are
read, O(log n) of them. Half-open ranges of messages; an entry's own `index` is that of its last message. Never changes a log.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, NamedTuple

from braid.errors import DataLost, NotReady
from braid.managedledger.api import Entry
from braid.model.positions import Position

if TYPE_CHECKING:
    from braid.managedledger.log import ManagedLedger

MAX_BOUNDARIES: Final = 256
"""Places between two entries that are remembered: where readers stopped, so that they go on without a search."""


class Stretch(NamedTuple):
    """The messages of one ledger, both ends included."""

    first: int
    last: int
    size: int | None
    """Bytes as stored; None while it grows."""
    start: int
    """Ordinal of its first entry."""
    entries: int


class LogIndexes:
    """Of one loaded log."""

    __slots__ = ("_after", "_boundaries", "_log", "_low")

    def __init__(self, log: ManagedLedger) -> None:
        self._log = log
        self._low = (-1, 0)
        """Ordinal of an entry that was the first one, and the index of its first message."""
        self._after: tuple[Position, int] | None = None
        self._boundaries: OrderedDict[int, int] = OrderedDict()
        """Index of an entry's first message: ordinal of that entry."""

    @property
    def end(self) -> int:
        """One above the last message."""
        return self._log.last_index + 1

    async def low(self) -> int:
        """Index of the first message that is kept; the end if there is none."""
        ledgers = self._log.map
        while (start := ledgers.start) < ledgers.end:
            if self._low[0] == start:
                return self._low[1]
            if (entry := await self._entry(start)) is not None:
                self._low = (start, entry.index - entry.messages + 1)
        return self.end

    async def after(self, position: Position) -> int:
        """One above the last message of the entries at or before `position`."""
        ledgers = self._log.map
        while True:
            ordinal = ledgers.ordinal(Position(position.ledger_id, position.entry_id + 1))
            if ordinal >= ledgers.end:
                return self.end
            if ordinal <= ledgers.start:
                return await self.low()
            if self._after is not None and self._after[0] == position:
                return self._after[1]
            if (entry := await self._entry(ordinal - 1)) is not None:
                self._after = (position, entry.index + 1)
                self.remember(entry.index + 1, ordinal)

    async def at_time(self, ms: int) -> int:
        """Index of the first message appended at `ms` or later; the end if there is none."""
        ledgers = self._log.map
        while True:
            ordinal = ledgers.ordinal(await self._log.find_time(ms))
            if ordinal >= ledgers.end:
                return self.end
            if (entry := await self._entry(ordinal)) is not None:
                return entry.index - entry.messages + 1

    async def find(self, index: int) -> int:
        """Ordinal of the entry that holds a message; where the next entry will be for the end. Raises DataLost below the first
        message that is kept."""
        while True:
            if index >= self.end:
                return self._log.map.end
            if index < (low := await self.low()):
                raise self.lost(index, low)
            known = self._boundaries.get(index)
            if known is not None and known >= self._log.map.start:
                self._boundaries.move_to_end(index)
                return known
            found = await self._search(index)
            if found is not None:
                return found

    def remember(self, index: int, ordinal: int) -> None:
        """The entry with this ordinal begins with message `index`."""
        self._boundaries[index] = ordinal
        self._boundaries.move_to_end(index)
        if len(self._boundaries) > MAX_BOUNDARIES:
            self._boundaries.popitem(last=False)

    async def by_bytes(self, start: int, stop: int, max_bytes: int) -> int:
        """Where a range that begins at `start` ends, at or before `stop`, so that its entries, which are read whole, take no
        more than `max_bytes` as stored; it has at least the entry that holds `start`. Raises DataLost as `find` does."""
        while True:
            ordinal = await self.find(start)
            end = await self._after_bytes(ordinal, stop, max_bytes)
            if end is None:
                return stop
            end = max(end, ordinal + 1)
            if (entry := await self._entry(end - 1)) is not None:
                self.remember(entry.index + 1, end)
                return min(stop, entry.index + 1)

    async def _after_bytes(self, ordinal: int, stop: int, max_bytes: int) -> int | None:
        """Ordinal behind the last of the entries from `ordinal` on that fit; None if all before message `stop` do. What ledgers
        say of their length is enough for it: O(log n) questions about one of them, and no entry is read."""
        log = self._log
        left = max_bytes
        for stretch in self._stretches(await self.low()):
            if not stretch.entries or stretch.start + stretch.entries <= ordinal:
                continue
            ledger_id = log.map.at(stretch.start).ledger_id
            low, high = max(ordinal - stretch.start, 0), stretch.entries
            before = await log.size_before(Position(ledger_id, low)) if low else 0
            size = stretch.size if stretch.size is not None else await log.size_before(Position(ledger_id, high))
            if size - before <= left:
                if stretch.last >= stop - 1:
                    return None
                left -= size - before
                continue
            while high - low > 1:  # what ends before `low` fits, what ends before `high` does not
                middle = (low + high) // 2
                if await log.size_before(Position(ledger_id, middle)) - before <= left:
                    low = middle
                else:
                    high = middle
            return stretch.start + low
        return None

    def lost(self, index: int, low: int) -> DataLost:
        """What to say of a message that is gone."""
        return DataLost(
            f"Message {index} of {self._log.name} is not stored any more: the first one kept from there on is {low}. What "
            "every subscription has acknowledged is kept as long as the namespace's retention says.",
            low,
        )

    def _stretches(self, low: int) -> list[Stretch]:
        log = self._log
        found = []
        first = low
        for info in log.infos:
            is_open = not info.timestamp
            last, size = (log.last_index, None) if is_open else (info.last_index, info.size)
            start = log.map.ordinal(Position(info.ledger_id, 0))
            found.append(Stretch(first, last, size, start, log.map.count(info.ledger_id)))
            first = max(first, last + 1)
        return found

    async def _search(self, index: int) -> int | None:
        """Ordinal of the entry that holds `index`; None if the log was trimmed meanwhile."""
        stretches = self._stretches(await self.low())
        at = bisect_left(stretches, index, key=lambda each: each.last)
        if at == len(stretches):
            return None
        first, last, _size, low, count = stretches[at]
        high = low + count - 1
        is_guess = True
        while low < high:
            if last - first == high - low:  # one message each
                return low + max(0, index - first)
            # Entries of one size are found by the first guess; halving every other time bounds the number of reads for others.
            share = (high - low) * (index - first) // (last - first + 1) if is_guess and last > first else (high - low) // 2
            middle = low + min(max(share, 0), high - low)
            is_guess = not is_guess
            entry = await self._entry(middle)
            if entry is None:
                return None
            if entry.index < index:
                low, first = middle + 1, entry.index + 1
            elif entry.index - entry.messages >= index:
                if middle == low:  # what lay before is lost: the reader notices that the numbers have a gap
                    return low
                high, last = middle - 1, entry.index - entry.messages
            else:
                return middle
        return low

    async def _entry(self, ordinal: int) -> Entry | None:
        """The entry with this ordinal; None if it was trimmed meanwhile."""
        log = self._log
        position = log.map.at(ordinal)
        entries = log.read_cached(position, 1, 1) or await log.read(position, 1, 1)
        if entries and (entries[0].ledger_id, entries[0].entry_id) == position and log.map.start <= ordinal:
            return entries[0]
        if log.map.start <= ordinal < log.map.end and log.map.contains(position):
            raise NotReady(f"Entry {position} of {log.name} cannot be read at the moment; try again.")
        return None
