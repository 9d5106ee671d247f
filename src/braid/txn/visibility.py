"""`Visibility`: how far a log may be read, and which of its transactions are hidden (INV13).

An entry is readable if it lies at or below `max_read_position` and its transaction is not among the aborted ones; one that
nobody knows is committed. Pure: knows neither stores nor clocks. Nothing here grows with the log: pins are bounded by the open
transactions, the aborted ones go when their entries are trimmed.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from braid.model.positions import LATEST, Position
from braid.model.txn import TxnId

SPARE = 64
"""Pins that were lifted and may still be in the order, besides as many as there are."""


class Visibility:
    """Of one log, in memory."""

    __slots__ = ("_order", "_pins", "aborted", "hides", "max_read_position")

    def __init__(self) -> None:
        self.max_read_position = LATEST
        self.aborted: dict[tuple[int, int], Position | None] = {}
        """Transactions (sub number included) whose entries are hidden, each with the last position that can hold one; None
        while that is not known yet."""
        self.hides = False
        """Whether there is anything to look at: False, and everything may be read."""
        self._pins: dict[TxnId, Position] = {}
        self._order: list[tuple[Position, TxnId]] = []
        """A heap of all pins; those that were lifted or lowered meanwhile are still in it."""

    def pin(self, root: TxnId, limit: Position) -> None:
        """Nothing after `limit` may be read until this root lets go. A pin is only ever lowered."""
        pinned = self._pins.get(root)
        if pinned is None or limit < pinned:
            self._pins[root] = limit
            heappush(self._order, (limit, root))
            self._changed()

    def unpin(self, root: TxnId) -> None:
        if self._pins.pop(root, None) is not None:
            self._changed()

    def pinned(self, root: TxnId) -> Position | None:
        return self._pins.get(root)

    def abort(self, txn: TxnId, last: Position | None) -> None:
        """Hide the entries of this transaction. Before its root is unpinned, or they would be seen in between."""
        self.aborted[txn] = last
        self.hides = True

    def prunable(self, first: Position) -> list[TxnId]:
        """Aborted transactions all of whose entries lie before `first`, the first one that is not trimmed."""
        return [TxnId(*txn) for txn, last in self.aborted.items() if last is not None and last < first]

    def forget(self, txn: TxnId) -> None:
        """Nothing of this aborted transaction is left in the log."""
        self.aborted.pop(txn, None)
        self._changed()

    def _changed(self) -> None:
        order, pins = self._order, self._pins
        while order and pins.get(order[0][1]) != order[0][0]:
            heappop(order)
        if len(order) > 2 * len(pins) + SPARE:  # behind a pin that stays, the others come and go
            order[:] = [(limit, root) for root, limit in pins.items()]
            heapify(order)
        self.max_read_position = order[0][0] if order else LATEST
        self.hides = bool(pins or self.aborted)
