"""`PositionRanges`: the individually acknowledged entries of a cursor, kept as runs of entry ids.

Mutable, in memory, no locks: belongs to one cursor on one loop. A run never spans two ledgers, because only the managed ledger
knows where a ledger ends. Adding is a binary search in one ledger's runs. The owner bounds the number of runs (`len`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator

from braid.model.positions import Position


class _Runs:
    """Sorted, disjoint, non-adjacent runs `[first, last]` of entry ids of one ledger."""

    __slots__ = ("firsts", "lasts")

    def __init__(self) -> None:
        self.firsts: list[int] = []
        self.lasts: list[int] = []

    def add(self, first: int, last: int) -> tuple[int, int]:
        """Add a run; returns how many entries and how many runs (may be negative) that adds."""
        firsts, lasts = self.firsts, self.lasts
        low = bisect_left(lasts, first - 1)  # the first run that touches or follows the new one
        high = bisect_right(firsts, last + 1, low)  # the first run wholly behind it
        if low == high:
            firsts.insert(low, first)
            lasts.insert(low, last)
            return last - first + 1, 1
        covered = sum(lasts[i] - firsts[i] + 1 for i in range(low, high))
        first, last = min(first, firsts[low]), max(last, lasts[high - 1])
        firsts[low], lasts[low] = first, last
        del firsts[low + 1 : high], lasts[low + 1 : high]
        return last - first + 1 - covered, 1 - (high - low)

    def run_of(self, entry_id: int) -> int:
        """Number of the run that holds the entry, -1 if none does."""
        i = bisect_left(self.lasts, entry_id)
        return i if i < len(self.firsts) and self.firsts[i] <= entry_id else -1

    def remove_up_to(self, entry_id: int) -> tuple[int, int]:
        """Forget all entries up to `entry_id`; returns how many entries and runs that takes away."""
        gone = bisect_right(self.lasts, entry_id)
        entries = sum(self.lasts[i] - self.firsts[i] + 1 for i in range(gone))
        del self.firsts[:gone], self.lasts[:gone]
        if self.firsts and self.firsts[0] <= entry_id:
            entries += entry_id + 1 - self.firsts[0]
            self.firsts[0] = entry_id + 1
        return entries, gone


class PositionRanges:
    """A set of positions, cheap while it is made of few runs."""

    __slots__ = ("_by_ledger", "_count", "_ledgers", "_runs")

    def __init__(self) -> None:
        self._by_ledger: dict[int, _Runs] = {}
        self._ledgers: list[int] = []
        self._count = 0
        self._runs = 0

    def __len__(self) -> int:
        """The number of runs."""
        return self._runs

    @property
    def count(self) -> int:
        """The number of entries."""
        return self._count

    def __contains__(self, position: tuple[int, int]) -> bool:
        runs = self._by_ledger.get(position[0])
        return runs is not None and runs.run_of(position[1]) >= 0

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """All runs in order, as (ledger id, first entry, last entry)."""
        for ledger_id in self._ledgers:
            runs = self._by_ledger[ledger_id]
            for first, last in zip(runs.firsts, runs.lasts, strict=True):
                yield ledger_id, first, last

    def add(self, position: tuple[int, int]) -> bool:
        """Add one entry; False if it was there."""
        return self.add_range(position[0], position[1], position[1]) == 1

    def add_range(self, ledger_id: int, first: int, last: int) -> int:
        """Add the entries `first` to `last`, both included; returns how many are new."""
        if not 0 <= first <= last:
            raise ValueError(f"{ledger_id}:{first}..{last} is no range of entries.")
        runs = self._by_ledger.get(ledger_id)
        if runs is None:
            runs = self._by_ledger[ledger_id] = _Runs()
            insort(self._ledgers, ledger_id)
        entries, grown = runs.add(first, last)
        self._count += entries
        self._runs += grown
        return entries

    def remove_up_to(self, position: tuple[int, int]) -> int:
        """Forget every entry at or before `position`; returns how many that were."""
        before = self._count
        ledger_id, entry_id = position
        passed = bisect_left(self._ledgers, ledger_id)
        for old in self._ledgers[:passed]:
            runs = self._by_ledger.pop(old)
            self._count -= sum(runs.lasts) - sum(runs.firsts) + len(runs.firsts)
            self._runs -= len(runs.firsts)
        del self._ledgers[:passed]
        current = self._by_ledger.get(ledger_id)
        if current is not None:
            entries, gone = current.remove_up_to(entry_id)
            self._count -= entries
            self._runs -= gone
            if not current.firsts:
                del self._by_ledger[ledger_id]
                del self._ledgers[0]
        return before - self._count

    def contiguous_from(self, position: Position) -> Position:
        """The last entry of the run that follows directly on `position` in its ledger; `position` itself if none does.

        This is how far a mark-delete position may advance; going on into the next ledger is the caller's decision.
        """
        runs = self._by_ledger.get(position.ledger_id)
        if runs is None:
            return position
        i = runs.run_of(position.entry_id + 1)
        return position if i < 0 else Position(position.ledger_id, runs.lasts[i])

    def clear(self) -> None:
        """Forget everything."""
        self._by_ledger.clear()
        self._ledgers.clear()
        self._count = self._runs = 0
