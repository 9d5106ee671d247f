"""What a transaction buffer knows of the writes of one root: its ops, its entries, what is on the way.

Owns the bookkeeping only. Pure: when a root is materialised, and how, is the buffer's part.
"""

from __future__ import annotations

from typing import Protocol

from braid.model.positions import Position
from braid.model.txn import TxnId
from braid.txn import records
from braid.txn.records import TxnHeader
from braid.txn.store import StoredOp


class Appended(Protocol):
    """What the buffer sees of an entry."""

    @property
    def ledger_id(self) -> int: ...

    @property
    def entry_id(self) -> int: ...

    @property
    def txn(self) -> tuple[int, int] | None: ...


class WritePermit:
    """Entries of one transaction that may be appended now, covered by one op."""

    __slots__ = ("entries", "op", "txn")

    def __init__(self, txn: TxnId, entries: int, op: StoredOp) -> None:
        self.txn = txn
        self.entries = entries
        self.op = op


class Writes:
    """What is known of the entries of one transaction, sub number included."""

    __slots__ = ("entries", "floor", "is_vague", "last")

    def __init__(self, floor: Position) -> None:
        self.entries = 0
        self.floor = floor
        """All of its entries come after it."""
        self.last: Position | None = None
        self.is_vague = False
        """There may be entries in the log that were not counted here."""


class HeldWrites:
    """What this log holds of one root."""

    __slots__ = ("header", "in_flight", "is_decided", "is_finishing", "misses_ops", "ops", "root", "since_ms", "writes")

    def __init__(self, root: TxnId, since_ms: int) -> None:
        self.root = root
        self.since_ms = since_ms
        self.in_flight = 0
        """Entries that are asked for or appended, and neither confirmed nor failed (INV12)."""
        self.ops: dict[str, StoredOp] = {}
        self.misses_ops = False
        """An op may be stored that is not in `ops`: nobody heard what became of its append."""
        self.writes: dict[TxnId, Writes] = {}
        self.is_decided = False
        self.header: TxnHeader | None = None
        """Once decided; None then: there is none, so nothing of it was ever appended."""
        self.is_finishing = False

    def covered(self, op: StoredOp) -> Writes:
        """Entries may be appended under this op."""
        floor = records.text_position(op.op.position)
        writes = self.writes.setdefault(op.txn, Writes(floor))
        writes.floor = min(writes.floor, floor)
        return writes

    def aborts(self, txn: TxnId) -> bool:
        return self.header is not None and self.header.outcome(txn.sub) == "ABORTED"
