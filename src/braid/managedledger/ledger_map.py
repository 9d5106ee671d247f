"""`LedgerMap`: which entries a log has, as positions and as ordinals.

Owns the arithmetic over the list of ledgers: what comes after or before a position, how many entries lie between two, where
the log begins and ends. An *ordinal* numbers the existing entries in log order; it is stable while the log is loaded (trimming
moves the start, it renumbers nothing) and is never stored. Pure; knows neither stores nor cursors.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from braid.model.positions import EARLIEST, Position


class LedgerMap:
    """Ledgers in order, each with the number of its readable entries. Only the last one grows."""

    __slots__ = ("_bases", "_ids", "end")

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._bases: list[int] = []
        """Ordinal of each ledger's first entry."""
        self.end = 0
        """Ordinal the next entry will get; the log counts it up with each entry that joins its last ledger."""

    def __len__(self) -> int:
        return len(self._ids)

    def append(self, ledger_id: int, count: int = 0) -> None:
        """A ledger joins at the end; its id is higher than every other (INV3)."""
        self._bases.append(self.end)
        self._ids.append(ledger_id)
        self.end += count

    def grow(self, count: int) -> None:
        """The last ledger now has `count` readable entries."""
        self.end = self._bases[-1] + count

    def drop_first(self, ledgers: int) -> None:
        """The oldest ledgers are gone."""
        del self._ids[:ledgers], self._bases[:ledgers]

    def drop_last(self) -> None:
        """The last ledger, which never got an entry, is gone."""
        del self._ids[-1], self._bases[-1]

    @property
    def start(self) -> int:
        """Ordinal of the first entry."""
        return self._bases[0] if self._bases else self.end

    def count(self, ledger_id: int) -> int:
        """Readable entries of a ledger; 0 if it is not here."""
        i = bisect_left(self._ids, ledger_id)
        return self._end_of(i) - self._bases[i] if i < len(self._ids) and self._ids[i] == ledger_id else 0

    def ordinal(self, position: Position) -> int:
        """Ordinal of the first entry at or after `position`, which need not exist."""
        ledger_id, entry_id = position
        i = bisect_left(self._ids, ledger_id)
        if i == len(self._ids):
            return self.end
        if self._ids[i] != ledger_id or entry_id <= 0:
            return self._bases[i]
        return min(self._bases[i] + entry_id, self._end_of(i))

    def at(self, ordinal: int) -> Position:
        """Position of an ordinal, kept inside the log; at the end, where the next entry of the last ledger would be."""
        if ordinal >= self.end:
            return Position(self._ids[-1], self.end - self._bases[-1]) if self._ids else EARLIEST
        ordinal = max(ordinal, self._bases[0])
        i = bisect_right(self._bases, ordinal) - 1
        return Position(self._ids[i], ordinal - self._bases[i])

    def _end_of(self, i: int) -> int:
        return self._bases[i + 1] if i + 1 < len(self._bases) else self.end

    def contains(self, position: Position) -> bool:
        """Whether this entry exists."""
        return 0 <= position[1] < self.count(position[0])

    def clamp(self, position: Position) -> Position:
        """The first existing position at or after `position`, else the end."""
        return self.at(self.ordinal(position))

    def after(self, position: Position) -> Position:
        """The next existing position, else the end."""
        return self.at(self.ordinal(Position(position[0], position[1] + 1)))

    def before(self, position: Position) -> Position:
        """The previous existing position, else the place before the first entry."""
        ordinal = self.ordinal(position)
        if ordinal > self.start:
            return self.at(ordinal - 1)
        return Position(self._ids[0], -1) if self._ids else EARLIEST

    @property
    def first(self) -> Position:
        """First entry, else the end."""
        return self.at(self.start)

    @property
    def last(self) -> Position:
        """Last entry, or (-1, -1)."""
        return self.at(self.end - 1) if self.end > self.start else EARLIEST

    def between(self, after: Position, upto: Position) -> int:
        """How many entries lie in `after` (exclusive) .. `upto` (inclusive)."""
        return self.ordinal(Position(upto[0], upto[1] + 1)) - self.ordinal(Position(after[0], after[1] + 1))

    def runs(self, after: Position, upto: Position) -> Iterator[tuple[int, int, int]]:
        """The same entries, as (ledger id, first entry, last entry) of each ledger that has some of them."""
        at = self.ordinal(Position(after[0], after[1] + 1))
        end = self.ordinal(Position(upto[0], upto[1] + 1))
        while at < end:
            i = bisect_right(self._bases, at) - 1
            base, stop = self._bases[i], min(self._end_of(i), end)
            yield self._ids[i], at - base, stop - 1 - base
            at = stop
