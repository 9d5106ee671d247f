"""Internal stats: a log's state in the words of the admin API."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from braid.managedledger.api import CursorStats, InternalStats, LedgerStats

if TYPE_CHECKING:
    from braid.managedledger.cursor import ManagedCursor
    from braid.managedledger.log import ManagedLedger

NO_LEDGER = LedgerStats(ledger_id=-1, entries=-1, size=-1)


def internal_stats(log: ManagedLedger) -> InternalStats:
    """A snapshot of `log`."""
    last = log.infos[-1].ledger_id if log.infos else -1
    return InternalStats(
        entries_added_counter=log.entries_added,
        number_of_entries=log.total_entries,
        total_size=log.total_size,
        current_ledger_entries=log.map.count(last),
        current_ledger_size=log.tail_size or (log.infos[-1].size if log.infos else 0),
        last_ledger_created_timestamp=iso(log.last_ledger_created_ms),
        last_ledger_creation_failure_timestamp=(
            None if log.last_creation_failure_ms is None else iso(log.last_creation_failure_ms)
        ),
        waiting_cursors_count=0,
        pending_add_entries_count=log.pending_entries,
        last_confirmed_entry=str(log.last_position),
        state=log.state,
        ledgers=[
            LedgerStats(
                ledger_id=info.ledger_id,
                entries=log.map.count(info.ledger_id),
                size=info.size or (log.tail_size if info.ledger_id == last else 0),
            )
            for info in log.infos
        ],
        cursors={name: _cursor(cursor) for name, cursor in log.cursors.items()},
        schema_ledgers=[],
        compacted_ledger=NO_LEDGER,
        properties=log.properties,
    )


def _cursor(cursor: ManagedCursor) -> CursorStats:
    return CursorStats(
        mark_delete_position=str(cursor.mark_delete),
        read_position=str(cursor.read_position),
        waiting_read_op=False,
        pending_read_ops=0,
        messages_consumed_counter=cursor.consumed,
        cursor_ledger=cursor.ledger_id,
        cursor_ledger_last_entry=cursor.ledger_last_entry,
        individually_deleted_messages=cursor.describe_ranges(),
        last_ledger_switch_timestamp=iso(cursor.ledger_switched_ms),
        state="Open" if cursor.ledger_id >= 0 else "NoLedger",
        active=True,
        number_of_entries_since_first_not_acked_message=cursor.entries_since_mark_delete(),
        total_non_contiguous_deleted_messages_range=cursor.ranges_count,
        properties=cursor.position_properties,
    )


def iso(ms: int) -> str:
    """Milliseconds as ISO-8601 with offset."""
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds")
