"""The two ports of transactions, and the values that cross them.

`AppendLog`: what a transaction buffer sees of a topic's log. `CursorAcks`: what pending acknowledgments see of a cursor. The
broker has the adapters; nothing here knows a managed ledger.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from braid.model.positions import Position
from braid.model.txn import TxnId


class AppendLog(Protocol):
    """A log that this broker owns, as a transaction buffer sees it."""

    @property
    def incarnation(self) -> str: ...

    @property
    def first_position(self) -> Position:
        """First entry that is not trimmed; where the next one will be if there is none."""
        ...

    @property
    def last_position(self) -> Position:
        """Last durable entry."""
        ...

    @property
    def is_in_doubt(self) -> bool:
        """Some entries that were reported as failed may be stored after all."""
        ...

    def position_before(self, position: Position) -> Position:
        """The existing position before this one."""
        ...

    async def check_owner(self) -> None:
        """Read the log's record afresh; raise LedgerFenced if the log is not ours any more."""
        ...


class CursorAcks(Protocol):
    """A durable cursor of such a log, as pending acknowledgments see it."""

    @property
    def incarnation(self) -> str:
        """Of the log."""
        ...

    @property
    def mark_delete(self) -> Position: ...

    @property
    def last_position(self) -> Position:
        """Of the log; nothing beyond it can be acknowledged."""
        ...

    def position_before(self, position: Position) -> Position:
        """The existing position before this one."""
        ...

    def is_acknowledged(self, position: Position) -> bool:
        """Whether the whole entry is acknowledged."""
        ...

    def unacked_mask(self, position: Position) -> int | None:
        """Messages of a partly acknowledged batch that are not acknowledged; None if nothing is known of this entry."""
        ...

    def acknowledge(self, positions: Sequence[Position], masks: Mapping[Position, int]) -> None:
        """Whole entries, and batch entries of which `masks` says what stays open."""
        ...

    def acknowledge_cumulative(self, position: Position, mask: int | None) -> None: ...

    async def flush(self) -> None:
        """Return once the present state is durable."""
        ...

    async def check_owner(self) -> None:
        """Read the log's record afresh; raise LedgerFenced if the log is not ours any more (INV11)."""
        ...


class Ack(msgspec.Struct, frozen=True):
    """One acknowledgment inside a transaction."""

    position: Position
    mask: int | None = None
    """Of a batch: bits of the messages that this does NOT acknowledge; None = the whole entry."""
    batch_size: int = 0


class HeldTransaction(msgspec.Struct, frozen=True, kw_only=True):
    """A transaction that holds something back here, for stats and `blocked_by`."""

    txn: TxnId
    since_ms: int
    writes: int = 0
    """Entries it wrote to this segment, as far as known."""
    acks: int = 0
    """Positions it holds in this subscription."""
    position: str = ""
    """Of writes: the last position that can be read while it is open. Of acknowledgments: the first, or the cumulative one."""
