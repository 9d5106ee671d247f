"""Retention: which ledgers a log may forget. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from braid.managedledger.records import LedgerInfo
from braid.model.positions import Position

MINUTE_MS = 60_000
MEGABYTE = 1 << 20


def trimmable(
    ledgers: Sequence[LedgerInfo],
    slowest: Position | None,
    *,
    total_size: int,
    retention_minutes: int,
    retention_mb: int,
    now_ms: int,
) -> int:
    """How many of the oldest ledgers to delete.

    `slowest` is the lowest mark-delete position of the durable cursors, None without any. Only closed ledgers whose entries are
    all acknowledged come into question, and never the last one. Of these the oldest go while they are too old or the log
    is too large; a limit of -1 never is.
    """
    deleted = 0
    deleted_size = 0
    for info in ledgers[:-1]:
        if slowest is not None and (slowest.ledger_id, slowest.entry_id) < (info.ledger_id, info.entries - 1):
            break
        too_old = retention_minutes >= 0 and now_ms - info.timestamp > retention_minutes * MINUTE_MS
        too_large = retention_mb >= 0 and total_size - deleted_size >= retention_mb * MEGABYTE
        if not (too_old or too_large):
            break
        deleted += 1
        deleted_size += info.size
    return deleted
