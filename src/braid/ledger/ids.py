"""`LedgerIds`: which ledger ids are free. Ids grow and are never reused, not even after a delete (INV3 rests on this).

Pure. Ids skipped by a `create` with a given id stay free as ranges, so the memory used does not grow with plain creates.
"""

from __future__ import annotations

from bisect import bisect_right

from braid.errors import InvalidArgument, LedgerExists

MAX_LEDGER_ID = 2**63 - 1


class LedgerIds:
    """The allocator: everything from `next_id` on is free, and the listed gaps below it."""

    __slots__ = ("_gaps", "next_id")

    def __init__(self, next_id: int = 1, gaps: list[tuple[int, int]] | None = None) -> None:
        self.next_id = next_id
        self._gaps = gaps if gaps is not None else []

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """Free ranges below `next_id`, both ends inclusive, ascending."""
        return list(self._gaps)

    def take_next(self) -> int:
        """A new id, higher than every id taken before."""
        taken = self.next_id
        self.next_id = taken + 1
        return taken

    def take(self, ledger_id: int) -> None:
        """Take a given id; `LedgerExists` if it is or ever was in use."""
        if not 0 < ledger_id < MAX_LEDGER_ID:
            raise InvalidArgument(f"Ledger id {ledger_id} is out of range; use an id from 1 to {MAX_LEDGER_ID - 1}.")
        if ledger_id >= self.next_id:
            if ledger_id > self.next_id:
                self._gaps.append((self.next_id, ledger_id - 1))
            self.next_id = ledger_id + 1
            return
        at = self._gap_of(ledger_id)
        if at < 0:
            raise LedgerExists(f"Ledger id {ledger_id} is or was in use; ids are never reused, choose another.")
        first, last = self._gaps[at]
        self._gaps[at : at + 1] = [part for part in ((first, ledger_id - 1), (ledger_id + 1, last)) if part[0] <= part[1]]

    def give_back(self, ledger_id: int) -> None:
        """Free an id whose creation certainly left no trace."""
        self._gaps.append((ledger_id, ledger_id))
        self._gaps.sort()

    def is_used(self, ledger_id: int) -> bool:
        """Whether the id is or ever was in use."""
        return 0 < ledger_id < self.next_id and self._gap_of(ledger_id) < 0

    def _gap_of(self, ledger_id: int) -> int:
        at = bisect_right(self._gaps, (ledger_id, MAX_LEDGER_ID)) - 1
        return at if at >= 0 and self._gaps[at][0] <= ledger_id <= self._gaps[at][1] else -1
