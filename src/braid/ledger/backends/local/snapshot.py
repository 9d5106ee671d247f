"""Snapshots: the state of all ledgers at a checkpoint, so that the journal before it can go.

Owns `snapshot-<n>.snap`, where n is the first journal segment to replay after it. Written to a temporary name, synced, renamed:
a snapshot under its final name is whole, and damage in it refuses to start. The file is a header and checksummed frames of
records: HEAD, then per ledger LEDGER and its buffered ENTRYs, an optional MARK, END. Blocking; one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from braid.errors import EntryCorrupt
from braid.ledger.backends.local import records
from braid.ledger.backends.local.records import GROUP, HEADER, SNAPSHOT_MAGIC, HeadBody, Kind, LedgerBody, MarkBody
from braid.ledger.backends.local.state import Catalog, LedgerState
from braid.ledger.ids import LedgerIds
from braid.runtime.files import FileSystem
from braid.wire.checksum import crc32c

_PREFIX, _SUFFIX = "snapshot-", ".snap"
_TEMPORARY = "snapshot.tmp"
_FRAME_BYTES = 1 << 20
_SALT = b"SNAPSHOT"

Captured = tuple[int, LedgerBody, list[bytes]]
"""A ledger as it was at one moment: id, state, buffered entries."""


def snapshot_name(segment: int) -> str:
    return f"{_PREFIX}{segment:010}{_SUFFIX}"


def snapshot_segments(files: FileSystem, directory: Path) -> list[int]:
    """Journal segments at which snapshots on disk start, ascending."""
    return sorted(
        int(name[len(_PREFIX) : -len(_SUFFIX)])
        for name in files.names(directory)
        if name.startswith(_PREFIX) and name.endswith(_SUFFIX)
    )


class SnapshotWriter:
    """Writes one snapshot, a run of ledgers at a time."""

    def __init__(self, files: FileSystem, directory: Path, store_id: bytes, head: HeadBody) -> None:
        self._files = files
        self._directory = directory
        self._segment = head.segment
        self._count = 0
        self._frames = 0
        self._parts: list[bytes] = []
        self._size = 0
        self._file = files.open(directory / _TEMPORARY, create=True)
        try:
            self._file.truncate(0)
            self._file.append(records.header(SNAPSHOT_MAGIC, head.segment, store_id, _SALT))
            self._add(records.record(Kind.HEAD, 0, 0, records.encode_body(head)))
        except OSError:
            self._file.close()
            raise

    def add(self, ledgers: Sequence[Captured]) -> None:
        for ledger_id, body, tail in ledgers:
            self._add(records.record(Kind.LEDGER, ledger_id, 0, records.encode_body(body)))
            for entry_id, data in enumerate(tail, body.file_entries):
                self._add(records.record(Kind.ENTRY, ledger_id, entry_id, data))

    def finish(self, mark: MarkBody | None) -> None:
        """Make the snapshot the one to start from, durably; older ones are removed."""
        if mark is not None:
            self._add(records.record(Kind.MARK, 0, 0, records.encode_body(mark)))
        self._add(records.record(Kind.END, 0, self._count))
        self._frame()
        self._file.sync()
        self._file.close()
        self._files.replace(self._directory / _TEMPORARY, self._directory / snapshot_name(self._segment))
        self._files.sync_dir(self._directory)
        for segment in snapshot_segments(self._files, self._directory):
            if segment < self._segment:
                self._files.remove(self._directory / snapshot_name(segment))

    def abandon(self) -> None:
        """Give up after an error; the temporary file is overwritten by the next attempt."""
        self._file.close()

    def _add(self, record: bytes) -> None:
        self._parts.append(record)
        self._size += len(record)
        self._count += 1
        if self._size >= _FRAME_BYTES:
            self._frame()

    def _frame(self) -> None:
        if self._parts:
            self._file.append(records.group(_SALT, self._frames, b"".join(self._parts)))
            self._frames += 1
            self._parts, self._size = [], 0


def load_snapshot(files: FileSystem, directory: Path, store_id: bytes) -> tuple[Catalog, int]:
    """The catalog of the newest snapshot and the journal segment to replay from. Missing or damaged: `EntryCorrupt`."""
    segments = snapshot_segments(files, directory)
    if not segments:
        raise EntryCorrupt(f"The ledger store in {directory} has no snapshot; restore the directory from a backup.")
    path = directory / snapshot_name(segments[-1])
    where = f"The snapshot {path}"
    file = files.open(path)
    try:
        head = records.read_header(file.read(0, HEADER.size), SNAPSHOT_MAGIC, where)
        if head.store_id != store_id or head.number != segments[-1]:
            raise EntryCorrupt(f"{where} belongs to another place or store; restore the right one.")
        loader = _Loader(where)
        at, frame = HEADER.size, 0
        while at < file.size():
            found = records.group_header(file.read(at, GROUP.size), _SALT)
            payload = file.read(at + GROUP.size, found[1]) if found is not None else b""
            if found is None or found[0] != frame or len(payload) != found[1] or crc32c(payload) != found[2]:
                raise EntryCorrupt(f"{where} is damaged at byte {at}; restore it from a backup.")
            loader.add(payload)
            at += GROUP.size + found[1]
            frame += 1
    finally:
        file.close()
    return loader.finish(), segments[-1]


class _Loader:
    """Turns snapshot records into a catalog."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._catalog = Catalog()
        self._count = 0
        self._is_ended = False
        self._closed: list[tuple[LedgerState, LedgerBody]] = []

    def add(self, payload: bytes) -> None:
        catalog = self._catalog
        for kind, ledger_id, entry_id, data in records.records(payload, self._where):
            if kind == Kind.LEDGER:
                self._ledger(ledger_id, records.decode_ledger(data))
            elif kind == Kind.ENTRY:
                catalog.ledgers[ledger_id].grow([data])
            elif kind == Kind.HEAD:
                head = records.decode_head(data)
                catalog.ids = LedgerIds(head.next_id, head.gaps)
            elif kind == Kind.MARK:
                catalog.mark = records.decode_mark(data)
            elif kind == Kind.END:
                self._is_ended = entry_id == self._count
            else:
                raise EntryCorrupt(f"{self._where} has a record of unknown kind {kind}; use the version that wrote it.")
            self._count += 1

    def finish(self) -> Catalog:
        if not self._is_ended:
            raise EntryCorrupt(f"{self._where} has no proper end; restore it from a backup.")
        for state, body in self._closed:
            if (state.last, state.length) != (body.last_entry, body.length):
                raise EntryCorrupt(f"{self._where} lacks entries of ledger {state.ledger_id}; restore it from a backup.")
        return self._catalog

    def _ledger(self, ledger_id: int, body: LedgerBody) -> None:
        state = self._catalog.ledgers[ledger_id] = LedgerState(ledger_id, body.created_ms, body.custom)
        state.file_entries = body.file_entries
        state.file_bytes = body.file_bytes
        state.length = state.file_length = body.file_length
        state.last = body.file_entries - 1
        state.is_closed = body.is_closed
        if body.is_closed:
            self._closed.append((state, body))
