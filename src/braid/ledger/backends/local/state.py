"""What the `local` store knows of its ledgers: `LedgerState` per ledger and `Catalog` for all, changed by records.

No I/O. The catalog is filled from a snapshot and the journal after it (`Catalog.apply`), then changed by the store on the loop.
Applying a record twice is harmless, because a snapshot is taken while writing goes on and may be newer than the journal
position it names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from braid.errors import EntryCorrupt, LedgerNotFound
from braid.ledger.api import NO_ENTRY, LedgerMetadata
from braid.ledger.backends.local import records
from braid.ledger.backends.local.records import Kind, LedgerBody, MarkBody
from braid.ledger.ids import LedgerIds

if TYPE_CHECKING:
    import asyncio

    from braid.ledger.backends.local.writer import LocalLedgerWriter

ENTRY_OVERHEAD = 48
"""Bytes of memory a buffered entry takes beyond its data."""


class LedgerState:
    """One ledger. Entries `0 .. file_entries-1` are in its file, the rest up to `last` in `tail`."""

    __slots__ = (
        "created_ms",
        "custom",
        "file_bytes",
        "file_entries",
        "file_length",
        "is_closed",
        "is_deleted",
        "is_file_missing",
        "last",
        "ledger_id",
        "length",
        "settling",
        "tail",
        "writer",
    )

    def __init__(self, ledger_id: int, created_ms: int, custom: Mapping[str, bytes]) -> None:
        self.ledger_id = ledger_id
        self.created_ms = created_ms
        self.custom = custom
        self.is_closed = False
        self.is_deleted = False
        self.is_file_missing = False
        """Its file was not there at the start: nobody can open it; what is known of it is kept until the file is back."""
        self.last = NO_ENTRY
        self.length = 0
        self.file_entries = 0
        self.file_bytes = 0
        self.file_length = 0
        self.tail: list[bytes] = []
        self.writer: LocalLedgerWriter | None = None
        self.settling: asyncio.Future[None] | None = None
        """Done when the close that is under way is durable."""

    @property
    def tail_length(self) -> int:
        """Bytes of the buffered entries."""
        return self.length - self.file_length

    @property
    def tail_memory(self) -> int:
        """Memory taken by the buffered entries."""
        return self.length - self.file_length + ENTRY_OVERHEAD * len(self.tail)

    def grow(self, entries: list[bytes]) -> int:
        """Add confirmed entries after the last one; returns the last one's id. With many ledgers it is one entry at a time."""
        self.tail += entries
        self.length += len(entries[0]) if len(entries) == 1 else sum(map(len, entries))
        self.last = last = self.last + len(entries)
        return last

    def flushed(self, count: int, length: int, file_bytes: int) -> None:
        """The first `count` buffered entries are in the file now."""
        del self.tail[:count]
        self.file_entries += count
        self.file_length += length
        self.file_bytes = file_bytes

    def metadata(self) -> LedgerMetadata:
        return LedgerMetadata(
            ledger_id=self.ledger_id,
            is_closed=self.is_closed,
            last_entry=self.last,
            length=self.length,
            created_ms=self.created_ms,
            custom=self.custom,
        )

    def body(self) -> LedgerBody:
        """The state as a snapshot keeps it; for an open ledger `last_entry` and `length` follow from file and tail."""
        return LedgerBody(
            self.created_ms,
            self.custom,
            self.is_closed,
            self.last,
            self.length,
            self.file_entries,
            self.file_bytes,
            self.file_length,
        )


class Catalog:
    """All ledgers, the id allocator and the metadata mark."""

    def __init__(self) -> None:
        self.ledgers: dict[int, LedgerState] = {}
        self.ids = LedgerIds()
        self.mark: MarkBody | None = None
        self._orphans: dict[int, str] = {}
        self._deleted: set[int] = set()

    def find(self, ledger_id: int) -> LedgerState:
        state = self.ledgers.get(ledger_id)
        if state is None:
            raise LedgerNotFound(f"Ledger {ledger_id} does not exist.")
        if state.is_file_missing:
            raise LedgerNotFound(f"The file of ledger {ledger_id} is missing; restore it from a backup and start again.")
        return state

    def apply(self, payload: bytes, where: str) -> int:
        """Apply the records of one journal group; returns the growth of buffered memory in bytes."""
        grown = 0
        ledgers = self.ledgers
        for kind, ledger_id, entry_id, data in records.records(payload, where):
            state = ledgers.get(ledger_id)
            if kind == Kind.ENTRY and state is not None:
                if entry_id == state.last + 1 and not state.is_closed:
                    state.tail.append(data)
                    state.last = entry_id
                    state.length += len(data)
                    grown += len(data) + ENTRY_OVERHEAD
                elif entry_id > state.last:
                    raise EntryCorrupt(
                        f"{where}: entry {entry_id} of ledger {ledger_id} follows entry {state.last}; "
                        "entries are missing, restore the journal from a backup."
                    )
            elif kind == Kind.MARK:
                self.mark = records.decode_mark(data)
            elif kind == Kind.CREATE:
                self._created(ledger_id, data)
            elif kind == Kind.DELETE:
                self._deleted.add(ledger_id)
                if state is not None:
                    del ledgers[ledger_id]
                    grown -= state.tail_memory
            elif state is None:
                self._orphans.setdefault(ledger_id, where)
            elif kind == Kind.CLOSE:
                self._closed(state, entry_id, where)
            else:
                raise EntryCorrupt(f"{where}: a record of unknown kind {kind}; use the version that wrote this journal.")
        return grown

    def check_complete(self) -> None:
        """After the replay: a record of an unknown ledger is fine only if that ledger was deleted later."""
        for ledger_id, where in self._orphans.items():
            if ledger_id not in self._deleted:
                raise EntryCorrupt(f"{where}: a record of ledger {ledger_id}, whose creation is missing; restore the journal.")
        self._orphans.clear()
        self._deleted.clear()

    def _created(self, ledger_id: int, data: bytes) -> None:
        # The snapshot notes ids first and ledgers later: it may know the id but not the ledger, or the ledger but not its id.
        if not self.ids.is_used(ledger_id):
            self.ids.take(ledger_id)
        if ledger_id in self.ledgers:
            return
        body = records.decode_create(data)
        self.ledgers[ledger_id] = LedgerState(ledger_id, body.created_ms, body.custom)

    def _closed(self, state: LedgerState, last: int, where: str) -> None:
        if last != state.last:
            raise EntryCorrupt(
                f"{where}: ledger {state.ledger_id} was closed at entry {last} but {state.last} is stored; restore the journal."
            )
        state.is_closed = True
