"""What the broker sees of topic logs: the values and ports of `ManagedLedger` and `ManagedCursor`.

Owns the shapes only. The classes behind them: `log.ManagedLedger`, `cursor.ManagedCursor`, `factory.ManagedLedgerFactory`,
`cache.EntryCache`, `schemas.SchemaStorage`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from braid.errors import BraidError
from braid.ledger.api import LedgerStore


class Entry(msgspec.Struct, gc=False):
    """One stored entry as dispatched. Never changed after it was made."""

    ledger_id: int
    entry_id: int
    index: int
    """Dense number of its last message in this log."""
    messages: int
    """How many messages it holds."""
    append_ms: int
    """Broker's append time; never goes back inside a log."""
    txn: tuple[int, int] | None
    body: bytes
    """Exactly what the producer sent, after the SEND command."""
    context: Any = None
    """What was given to `add`, until the listener takes it off: nothing may hang on to an entry that is kept."""


class LogListener(Protocol):
    """Who a log reports to. Calls come on the loop."""

    def entries_added(self, entries: list[Entry]) -> None:
        """These adds are durable, in log order, each with its context, which the listener sets to None. The list is the log's.
        Empty: entries that were reported as failed turned out to be stored after all; they are in the log and can be read."""
        ...

    def log_failed(self, error: BraidError, contexts: list[Any]) -> None:
        """These adds failed, in order; no index was used for them. After `LedgerFenced` the log is closed for good (also told
        with no contexts), after anything else it takes adds again."""
        ...


class LedgerResolver(Protocol):
    """Says which store holds which ledger."""

    def active(self) -> LedgerStore:
        """Where new ledgers go."""
        ...

    def for_ledger(self, ledger_id: int, properties: Mapping[str, str]) -> LedgerStore:
        """Where the ledger with these record properties is."""
        ...


class SingleStore:
    """The resolver of a broker with one store."""

    __slots__ = ("_store",)

    def __init__(self, store: LedgerStore) -> None:
        self._store = store

    def active(self) -> LedgerStore:
        return self._store

    def for_ledger(self, ledger_id: int, properties: Mapping[str, str]) -> LedgerStore:
        return self._store


class LedgerStats(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A ledger in the internal stats."""

    ledger_id: int
    entries: int
    size: int
    offloaded: bool = False
    under_replicated: bool = False


class CursorStats(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A cursor in the internal stats."""

    mark_delete_position: str
    read_position: str
    waiting_read_op: bool
    pending_read_ops: int
    messages_consumed_counter: int
    cursor_ledger: int
    cursor_ledger_last_entry: int
    individually_deleted_messages: str
    last_ledger_switch_timestamp: str
    state: str
    active: bool
    number_of_entries_since_first_not_acked_message: int
    total_non_contiguous_deleted_messages_range: int
    properties: Mapping[str, int]


class InternalStats(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """State of a log as the admin API shows it."""

    entries_added_counter: int
    number_of_entries: int
    total_size: int
    current_ledger_entries: int
    current_ledger_size: int
    last_ledger_created_timestamp: str
    last_ledger_creation_failure_timestamp: str | None
    waiting_cursors_count: int
    pending_add_entries_count: int
    last_confirmed_entry: str
    state: str
    ledgers: list[LedgerStats]
    cursors: dict[str, CursorStats]
    schema_ledgers: list[LedgerStats]
    compacted_ledger: LedgerStats
    properties: Mapping[str, str]
