"""`Tail`: the ledger a log is being written to, and the entries on their way into it.

Owns the order of unconfirmed entries. Hot: one list append per entry, one call per commit group (INV1: the log hears of
entries only when they are durable).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from braid.errors import LedgerError
from braid.ledger.api import LedgerWriter
from braid.managedledger.api import Entry


class TailOwner(Protocol):
    """The log behind a tail."""

    def tail_confirmed(self, entries: list[Entry], size: int) -> None: ...

    def tail_failed(self, tail: Tail, error: LedgerError) -> None: ...


class Tail:
    """Listener of one ledger's writer."""

    __slots__ = (
        "_owner",
        "append",
        "confirmed",
        "created_ms",
        "is_failed",
        "ledger_id",
        "pending",
        "pending_size",
        "refused_size",
        "roll_ms",
        "writer",
    )

    writer: LedgerWriter
    append: Callable[[bytes, bytes], int]

    def __init__(self, owner: TailOwner, created_ms: int, roll_ms: int) -> None:
        self._owner = owner
        self.created_ms = created_ms
        self.roll_ms = roll_ms
        """When it is too old to go on, whatever its size."""
        self.ledger_id = -1
        self.pending: list[Entry] = []
        self.pending_size = 0
        """Bytes of the pending bodies."""
        self.refused_size = 0
        """Bytes of the bodies that were taken back; the writer has counted them."""
        self.confirmed = -1
        self.is_failed = False

    def attach(self, writer: LedgerWriter) -> None:
        """The ledger exists now."""
        self.writer = writer
        self.append = writer.append
        self.ledger_id = writer.ledger_id

    def ledger_advanced(self, last_confirmed: int) -> None:
        count = last_confirmed - self.confirmed
        if count == len(self.pending) and count and not self.is_failed:  # nearly always: everything on its way has arrived
            self.confirmed = last_confirmed
            entries, size = self.pending, self.pending_size
            self.pending, self.pending_size = [], 0
            self._owner.tail_confirmed(entries, size)
        elif not self.is_failed:  # a failed writer's end is asked for, not heard of
            self.confirm(last_confirmed)

    def confirm(self, last_confirmed: int) -> None:
        """Everything up to `last_confirmed` is durable."""
        count = last_confirmed - self.confirmed
        if count <= 0:
            return
        self.confirmed = last_confirmed
        entries = self.pending[:count]
        del self.pending[:count]
        size = sum([len(entry.body) for entry in entries])
        self.pending_size -= size
        self._owner.tail_confirmed(entries, size)

    def take_back(self) -> list[Entry]:
        """What is not confirmed and never will be by this tail."""
        entries, self.pending = self.pending, []
        self.refused_size += self.pending_size
        self.pending_size = 0
        return entries

    def ledger_failed(self, error: LedgerError) -> None:
        if not self.is_failed:
            self.is_failed = True
            self._owner.tail_failed(self, error)
