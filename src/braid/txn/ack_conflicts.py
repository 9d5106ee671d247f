"""Which acknowledgments inside transactions contradict each other (INV14).

Owns who holds what in one subscription, and the rules that let a transaction hold something more. Messages of an entry are
bits: an acknowledgment names some of them, `WHOLE` names all, however many there are. Two transactions are different when
their ids are, sub-transactions of one root included. Pure: it never looks at a store, a clock or a cursor's insides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from braid.errors import TransactionConflict
from braid.model.ackset import full
from braid.model.positions import Position
from braid.model.txn import TxnId
from braid.txn.api import Ack

WHOLE: Final = -1
"""Every bit: the whole entry."""


class Acknowledged(Protocol):
    """What the rules ask of a cursor."""

    @property
    def mark_delete(self) -> Position: ...

    def is_acknowledged(self, position: Position) -> bool: ...

    def unacked_mask(self, position: Position) -> int | None: ...

    def position_before(self, position: Position) -> Position: ...


class Hold(NamedTuple):
    """One thing a transaction holds: some messages of an entry, and with `is_cumulative` everything before it too."""

    position: Position
    bits: int
    is_cumulative: bool


class Conflict(NamedTuple):
    """Why something cannot be held."""

    why: str
    holder: TxnId | None = None
    """The transaction in the way; None if it is acknowledged for good."""


class HeldByAnother(TransactionConflict):
    """Another transaction is in the way."""

    def __init__(self, text: str, holder: TxnId) -> None:
        super().__init__(text)
        self.holder = holder


def bits_of(ack: Ack) -> int:
    """The messages an acknowledgment names. A mask without a batch size says nothing of the messages behind its last bit."""
    if ack.mask is None:
        return WHOLE
    everything = full(max(ack.batch_size, ack.mask.bit_length() if not ack.batch_size else 0))
    bits = everything & ~ack.mask
    return WHOLE if bits == everything else bits


class Holds:
    """Who holds what."""

    def __init__(self) -> None:
        self._entries: dict[Position, dict[TxnId, int]] = {}
        self._named: dict[TxnId, dict[Position, None]] = {}
        """The same the other way round."""
        self._upto: dict[TxnId, list[Hold]] = {}
        """Cumulative holds, the furthest last; of more than one transaction only if they were found in the store."""

    def __bool__(self) -> bool:
        return bool(self._entries or self._upto)

    # The rules.

    def conflict(self, txn: TxnId, hold: Hold, cursor: Acknowledged) -> Conflict | None:
        """Why this transaction may not hold this, or None."""
        return self._of_all_before(txn, hold, cursor) if hold.is_cumulative else self._of_one(txn, hold, cursor)

    def _of_one(self, txn: TxnId, hold: Hold, cursor: Acknowledged) -> Conflict | None:
        position = hold.position
        if cursor.is_acknowledged(position):
            return Conflict(f"the entry {position} is acknowledged already")
        unacked = cursor.unacked_mask(position)
        if unacked is not None and hold.bits & ~unacked:
            # One is enough: it was processed by somebody else. Whoever got the rest of a batch names the rest.
            return Conflict(f"some of these messages of the entry {position} are acknowledged already")
        for other, upto in self._upto.items():
            if other != txn and _covers(upto[-1], hold):
                return _holds_up_to(other, upto[-1])
        for other, bits in self._entries.get(position, {}).items():
            if other != txn and bits & hold.bits:
                return Conflict(f"the transaction {other} holds the entry {position}", other)
        return None

    def _of_all_before(self, txn: TxnId, hold: Hold, cursor: Acknowledged) -> Conflict | None:
        if _is_passed(hold, cursor):
            return Conflict(f"everything up to {hold.position} is acknowledged already")
        for other, upto in self._upto.items():
            if other != txn:
                return _holds_up_to(other, upto[-1])
        for position, holders in self._entries.items():
            for other, bits in holders.items():
                if other != txn and _covers(hold, Hold(position, bits, False)):
                    return Conflict(f"the transaction {other} holds the entry {position}", other)
        return None

    # What is held.

    def add(self, txn: TxnId, hold: Hold) -> Hold | None:
        """Hold it; returns what that adds, None if the transaction held it all already."""
        if hold.is_cumulative:
            upto = self._upto.setdefault(txn, [])
            if upto and _reach(upto[-1]) >= _reach(hold):
                return None
            upto.append(hold)
            return hold
        had = self._entries.get(hold.position, {}).get(txn, 0)
        if not hold.bits & ~had:
            return None
        self._entries.setdefault(hold.position, {})[txn] = had | hold.bits
        self._named.setdefault(txn, {})[hold.position] = None
        return Hold(hold.position, hold.bits & ~had, False)

    def remove(self, txn: TxnId, hold: Hold) -> None:
        """Take back what `add` returned."""
        if hold.is_cumulative:
            upto = self._upto.get(txn, [])
            if hold in upto:
                upto.remove(hold)
            if not upto:
                self._upto.pop(txn, None)
            return
        holders = self._entries.get(hold.position, {})
        left = holders.get(txn, 0) & ~hold.bits
        if left:
            holders[txn] = left
        elif holders.pop(txn, None) is not None:
            self._named[txn].pop(hold.position)
            if not self._named[txn]:
                del self._named[txn]
            if not holders:
                del self._entries[hold.position]

    def forget(self, txn: TxnId) -> list[Hold]:
        """Let go of everything the transaction holds; returns it, in order."""
        gone = self.of(txn)
        for hold in gone:
            self.remove(txn, hold)
        self._upto.pop(txn, None)
        return gone

    def clear(self) -> None:
        self._entries.clear()
        self._named.clear()
        self._upto.clear()

    def of(self, txn: TxnId) -> list[Hold]:
        """What the transaction holds, in order; of its cumulative holds the furthest."""
        found = [Hold(position, self._entries[position][txn], False) for position in self._named.get(txn, ())]
        return sorted(found + self._upto.get(txn, [])[-1:])

    def holds_any(self, txn: TxnId) -> bool:
        return txn in self._named or txn in self._upto

    def upto(self, txn: TxnId) -> Hold | None:
        """Its furthest cumulative hold."""
        return self._upto[txn][-1] if txn in self._upto else None

    def held_bits(self, position: Position) -> int:
        """The messages of an entry that anybody holds; 0 = none."""
        held = 0
        for bits in self._entries.get(position, {}).values():
            held |= bits
        for upto in self._upto.values():
            if position < upto[-1].position:
                return WHOLE
            if position == upto[-1].position:
                held |= upto[-1].bits
        return held

    def positions(self, upto: Position) -> list[Position]:
        """Entries at or before `upto` that are held one by one, in order."""
        return sorted(position for position in self._entries if position <= upto)

    def highest_upto(self) -> Hold | None:
        """The furthest cumulative hold."""
        return max((upto[-1] for upto in self._upto.values()), key=_reach, default=None)

    # Plain acknowledgments.

    def unheld(
        self, positions: Sequence[Position], masks: Mapping[Position, int]
    ) -> tuple[list[Position], dict[Position, int]]:
        """Of a plain acknowledgment, what nobody holds: the rest is ignored until the outcome. Masks say what stays open."""
        whole: list[Position] = []
        parts: dict[Position, int] = {}
        for position in positions:
            held = self.held_bits(position)
            if not held:
                whole.append(position)
            elif held != WHOLE:
                parts[position] = held
        for position, mask in masks.items():
            held = self.held_bits(position)
            if held != WHOLE:
                parts[position] = parts.get(position, -1) & mask | held
        return whole, parts


def _holds_up_to(other: TxnId, hold: Hold) -> Conflict:
    return Conflict(f"the transaction {other} holds everything up to {hold.position}", other)


def _covers(upto: Hold, one: Hold) -> bool:
    """Whether a cumulative hold covers one of the messages of an entry."""
    return one.position < upto.position or (one.position == upto.position and bool(upto.bits & one.bits))


def _reach(hold: Hold) -> tuple[Position, int, int]:
    """An order of cumulative holds: the whole entry reaches further than any part of it."""
    return hold.position, int(hold.bits == WHOLE), hold.bits


def _is_passed(hold: Hold, cursor: Acknowledged) -> bool:
    """Whether a cumulative acknowledgment acknowledges nothing new."""
    if hold.position <= cursor.mark_delete:
        return True
    if hold.bits == WHOLE or cursor.position_before(hold.position) > cursor.mark_delete:
        return False
    unacked = cursor.unacked_mask(hold.position)
    return unacked is not None and not hold.bits & unacked
