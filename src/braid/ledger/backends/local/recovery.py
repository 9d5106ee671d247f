"""Opening the directory of a `local` store: format check, first creation, snapshot, replay, clean-up.

Blocking; runs on one worker before the store serves anyone. After it the journal continues in a new segment.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from braid.errors import EntryCorrupt, StoreMismatch
from braid.ledger.backends.local import records
from braid.ledger.backends.local.journal import Journal, Replay
from braid.ledger.backends.local.ledgerfile import BlockWriter, ledger_path, open_file_share
from braid.ledger.backends.local.records import HeadBody
from braid.ledger.backends.local.snapshot import SnapshotWriter, load_snapshot
from braid.ledger.backends.local.state import Catalog
from braid.ledger.config import LocalSettings
from braid.runtime.files import FileSystem

log = logging.getLogger(__name__)

FORMAT_FILE = "FORMAT"
JOURNAL_FOLDER = "journal"
LEDGER_FOLDER = "ledgers"
MAX_SHOWN = 10


class StoreFormat(msgspec.Struct, frozen=True):
    """Content of the file `FORMAT`."""

    format: int
    store_id: str


class Recovered(msgspec.Struct):
    """A directory ready for use."""

    store_id: bytes
    catalog: Catalog
    journal: Journal
    writer: BlockWriter
    buffered: int
    """Memory taken by entries that are not in ledger files."""
    replayed: int
    """Bytes of journal that the next checkpoint will make superfluous."""


def recover(files: FileSystem, path: Path, settings: LocalSettings, salt: Callable[[], bytes]) -> Recovered:
    """Read the store in `path`, or make a new one, and start its journal."""
    files.make_dir(path / JOURNAL_FOLDER)
    files.make_dir(path / LEDGER_FOLDER)
    store_id = _store_id(files, path, salt)
    catalog, segment = load_snapshot(files, path, store_id)
    _find_missing(files, path / LEDGER_FOLDER, catalog)
    writer = BlockWriter(
        files,
        path / LEDGER_FOLDER,
        store_id,
        block_bytes=settings.block_bytes,
        open_files=open_file_share(files, settings.open_files),
    )
    buffered = sum(state.tail_memory for state in catalog.ledgers.values())
    replay = Replay(files, path / JOURNAL_FOLDER, store_id, segment)
    damaged: dict[int, EntryCorrupt] = {}
    for payload, where in replay.groups():
        buffered += catalog.apply(payload, where)
        if buffered > settings.buffer_bytes // 2:
            buffered -= _flush(catalog, writer, settings.tail_bytes, damaged)
    catalog.check_complete()
    for ledger_id, error in damaged.items():
        if ledger_id in catalog.ledgers:
            raise error
    if replay.bytes_read:
        log.info("replayed %d journal bytes, %d ledgers", replay.bytes_read, len(catalog.ledgers))
    _report_missing(path / LEDGER_FOLDER, catalog)
    _remove_leftovers(files, path / LEDGER_FOLDER, catalog)
    journal = Journal(
        files,
        path / JOURNAL_FOLDER,
        store_id,
        salt,
        segment_bytes=settings.segment_bytes,
        reserve_bytes=settings.reserve_bytes,
        sync=settings.sync,
    )
    journal.start(replay.end_segment, replay.sequence)
    return Recovered(store_id, catalog, journal, writer, buffered, replay.bytes_read)


def _flush(catalog: Catalog, writer: BlockWriter, tail_bytes: int, damaged: dict[int, EntryCorrupt]) -> int:
    """Move buffered entries to ledger files, large tails only unless that frees too little; returns the memory freed.

    A file that lacks bytes is noted in `damaged`: it may belong to a ledger whose deletion comes later in the journal.
    """
    freed = 0
    for least in (tail_bytes, 0):
        for state in catalog.ledgers.values():
            if not state.tail or state.tail_memory < least or state.ledger_id in damaged:
                continue
            try:
                if state.is_file_missing:  # before the writer makes an empty one
                    raise EntryCorrupt(f"The file of ledger {state.ledger_id} is missing; restore it from a backup.")
                size = writer.append(state.ledger_id, state.file_bytes, state.file_entries, state.tail)
            except EntryCorrupt as exc:
                damaged[state.ledger_id] = exc
                continue
            freed += state.tail_memory
            state.flushed(len(state.tail), state.tail_length, size)
        if freed > tail_bytes:
            break
    return freed


def _store_id(files: FileSystem, path: Path, salt: Callable[[], bytes]) -> bytes:
    """The id in `FORMAT`; a directory without that file becomes a new, empty store."""
    target = path / FORMAT_FILE
    if files.exists(target):
        file = files.open(target)
        try:
            data = file.read(0, file.size())
        finally:
            file.close()
        try:
            found = msgspec.json.decode(data, type=StoreFormat)
            store_id = bytes.fromhex(found.store_id)
        except (msgspec.MsgspecError, ValueError):
            raise EntryCorrupt(f"The file {target} is damaged; restore it from a backup.") from None
        if found.format != records.FORMAT:
            raise StoreMismatch(
                f"The ledger store in {path} has format {found.format}, this version reads {records.FORMAT}; "
                "use the version that wrote it."
            )
        return store_id
    if files.names(path / JOURNAL_FOLDER) or files.names(path / LEDGER_FOLDER):
        raise EntryCorrupt(f"The file {target} is missing but {path} holds data; restore it from a backup.")
    store_id = salt()
    first = SnapshotWriter(files, path, store_id, HeadBody(1, 1, []))
    first.finish(None)
    temporary = path / (FORMAT_FILE + ".tmp")
    file = files.open(temporary, create=True)
    try:
        file.truncate(0)
        file.append(msgspec.json.encode(StoreFormat(records.FORMAT, store_id.hex())))
        file.sync()
    finally:
        file.close()
    files.replace(temporary, target)
    files.sync_dir(path)
    return store_id


def _find_missing(files: FileSystem, directory: Path, catalog: Catalog) -> None:
    """Note which ledgers have lost their file. One that was just deleted has none either: the journal will say so."""
    found = {ledger_id for ledger_id, _path in _ledger_files(files, directory)}
    for state in catalog.ledgers.values():
        state.is_file_missing = state.file_bytes > 0 and state.ledger_id not in found


def _report_missing(directory: Path, catalog: Catalog) -> None:
    missing = [state.ledger_id for state in catalog.ledgers.values() if state.is_file_missing]
    if missing:
        more = f" and {len(missing) - MAX_SHOWN} more" if len(missing) > MAX_SHOWN else ""
        log.error(
            "ledger files are missing in %s: %s%s; whatever needs one of them is refused until they are restored",
            directory,
            ", ".join(str(ledger_path(directory, ledger_id).relative_to(directory)) for ledger_id in missing[:MAX_SHOWN]),
            more,
        )


def _remove_leftovers(files: FileSystem, directory: Path, catalog: Catalog) -> None:
    """Delete files of ledgers that were deleted just before the last stop."""
    for ledger_id, path in list(_ledger_files(files, directory)):
        if ledger_id not in catalog.ledgers:
            files.remove(path)


def _ledger_files(files: FileSystem, directory: Path) -> Iterator[tuple[int, Path]]:
    """Every ledger file there is."""
    for folder in files.names(directory):
        for name in files.names(directory / folder):
            stem, _, suffix = name.partition(".")
            if suffix == "ledger" and stem.isdigit():
                yield int(stem), directory / folder / name
