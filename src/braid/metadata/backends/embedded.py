"""The `embedded` backend: the engine with an SQLite journal, durable across crashes and power loss.

Owns the file `metadata.sqlite` in the store's directory: one table of keys and encoded rows, plus one row (empty key) with the
commit counter, the store id and the format, written in every transaction: the highest surviving row is not enough, the newest
record may have been deleted. SQLite does its own I/O (WAL, `synchronous=FULL`: one sync per commit); the file is held
exclusively while open. Index entries are not stored, the engine rebuilds them.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from braid.errors import ConfigError, DataDirectoryBusy, StoreMismatch
from braid.metadata.engine import DEFAULT_SESSION_TIMEOUT, Engine, Storage
from braid.metadata.journal import FORMAT_VERSION, Change, Image, JournalFull, Row, decode_row, encode_row
from braid.runtime.env import Runtime
from braid.runtime.files import FileSystem

log = logging.getLogger(__name__)

FILE_NAME: Final = "metadata.sqlite"
APPLICATION_ID: Final = 0x42524D44  # "BRMD"
CHECKPOINT_PAGES: Final = 4096
"""Pages in the write-ahead log after which it is copied into the table: 16 MB of 4 KB pages."""
PAGE: Final = 4096
LOG_BYTES: Final = CHECKPOINT_PAGES * PAGE // 2
"""Length that the write-ahead log is given at the start: about what it holds at a checkpoint, as its pages are counted high."""
ROOM_BYTES: Final = 64 * LOG_BYTES
"""Free room that there must be for that."""

RESUME_BYTES: Final = 1 << 20
"""Free room, and twice what was refused, with which a full disk is written to again: a probe that is content with the room for
its own row would let the next commit fail, once a second."""

_UPSERT = "INSERT INTO record (key, body) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET body = excluded.body"
_DELETE = "DELETE FROM record WHERE key = ?"


class Header(msgspec.Struct, frozen=True):
    """What the row with the empty key says."""

    format: int
    store_id: str
    counter: int


class SqliteJournal:
    """`Journal` on one SQLite file. Every method runs on one worker."""

    def __init__(self, files: FileSystem, directory: Path, new_store_id: str) -> None:
        self._files = files
        self._directory = directory
        self._path = directory / FILE_NAME
        self._store_id = new_store_id
        self._db: sqlite3.Connection | None = None
        self._needed = 0  # free bytes that a probe wants to see
        self._wal_pages = 0  # at most; counted since the last checkpoint

    def load(self) -> Image:
        self._files.make_dir(self._directory)
        is_new = not self._files.exists(self._path)
        try:
            db = self._connect()
            header = self._read_header(db)
            if header is None:
                self._create(db)
                header = Header(FORMAT_VERSION, self._store_id, 0)
            self._store_id = header.store_id
            self._lengthen_log()
            if is_new:
                self._files.sync_dir(self._directory)
            return Image(header.store_id, header.counter, list(self._rows(db)))
        except sqlite3.Error as exc:
            raise self._refusal(exc) from exc

    def commit(self, changes: Sequence[Change], counter: int) -> None:
        db = self._db
        if db is None:
            raise sqlite3.ProgrammingError("the journal is not open")
        header = msgspec.msgpack.encode(Header(FORMAT_VERSION, self._store_id, counter))
        # One statement per kind: the last change of a key within a group decides.
        last = dict(changes)
        puts = [(key, encode_row(row)) for key, row in last.items() if row is not None]
        if self._needed and self._files.free_bytes(self._directory) < self._needed:
            raise JournalFull(f"There is too little room for {self._path}: {self._needed} bytes must be free.")
        try:
            db.execute("BEGIN IMMEDIATE")
            if len(puts) < len(last):
                db.executemany(_DELETE, [(key,) for key, row in last.items() if row is None])
            db.executemany(_UPSERT, puts)
            db.execute(_UPSERT, ("", header))
            db.execute("COMMIT")
        except sqlite3.Error as exc:
            # SQLITE_FULL is reported before anything is synced, so the transaction certainly did not happen.
            if _code(exc) == sqlite3.SQLITE_FULL:
                if db.in_transaction:
                    db.execute("ROLLBACK")
                self._needed = RESUME_BYTES + 2 * sum([PAGE + len(body) for _, body in puts])
                raise JournalFull(f"There is no room left for {self._path}.") from exc
            raise
        self._needed = 0
        # Counted high: new rows share the table's last page, each may touch one page of the key index.
        self._wal_pages += 4 + sum([1 + len(body) // PAGE for _, body in puts]) + 2 * (len(last) - len(puts))
        if self._wal_pages > CHECKPOINT_PAGES:
            self.checkpoint()

    def checkpoint(self) -> None:
        """Copy the write-ahead log into the table, so that it starts over."""
        if self._db is None or self._wal_pages == 0:
            return
        try:
            self._db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        except sqlite3.Error as exc:
            if _code(exc) != sqlite3.SQLITE_FULL:
                raise
            log.warning("no room to checkpoint %s; the write-ahead log stays", self._path)
        self._wal_pages = 0

    def close(self) -> None:
        """Release the file. Idempotent."""
        if self._db is not None:
            self._db.close()
            self._db = None

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(self._path, timeout=0, isolation_level=None, check_same_thread=False)
        self._db = db
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        db.execute("PRAGMA fullfsync = 1")
        db.execute("PRAGMA wal_autocheckpoint = 0")  # ours is explicit, so that its errors are seen
        db.execute("BEGIN IMMEDIATE")  # takes the file for this process, or fails at once
        db.execute("COMMIT")
        return db

    def _lengthen_log(self) -> None:
        """Let commits overwrite the write-ahead log from the start on, as they do after the first checkpoint. While it grows,
        each commit waits until the file system has written down its new length, and with that whatever others have on their
        way: on a busy disk one in a hundred took 10 to 32 ms instead of 8 to 12. SQLite reads frames up to the first that is
        not its own, so zeros mean nothing."""
        path = self._directory / f"{FILE_NAME}-wal"
        try:
            if not self._files.exists(path) or self._files.free_bytes(self._directory) < ROOM_BYTES:
                return
            file = self._files.open(path)
            try:
                if (missing := LOG_BYTES - file.size()) > 0:
                    file.append(bytes(missing))
                    file.sync()
            finally:
                file.close()
        except OSError as error:
            log.info("the write-ahead log %s grows as it is used: %s", path, error)

    def _read_header(self, db: sqlite3.Connection) -> Header | None:
        (application,) = db.execute("PRAGMA application_id").fetchone()
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if (application, version) == (0, 0) and not db.execute("SELECT name FROM sqlite_master").fetchall():
            return None
        if application != APPLICATION_ID:
            raise StoreMismatch(f"The file {self._path} is not a Braid metadata store; choose another data directory.")
        if version != FORMAT_VERSION:
            raise StoreMismatch(
                f"The metadata store {self._path} has format {version}, this version of Braid reads format {FORMAT_VERSION}; "
                "run the version that wrote it, or a newer one."
            )
        found = db.execute("SELECT body FROM record WHERE key = ''").fetchone()
        try:
            return msgspec.msgpack.decode(found[0], type=Header)
        except (msgspec.MsgspecError, TypeError) as exc:
            raise StoreMismatch(f"The metadata store {self._path} is damaged: it has no valid header.") from exc

    def _create(self, db: sqlite3.Connection) -> None:
        header = msgspec.msgpack.encode(Header(FORMAT_VERSION, self._store_id, 0))
        db.execute("BEGIN IMMEDIATE")
        db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        db.execute(f"PRAGMA user_version = {FORMAT_VERSION}")
        db.execute("CREATE TABLE record (key TEXT PRIMARY KEY, body BLOB NOT NULL)")
        db.execute(_UPSERT, ("", header))
        db.execute("COMMIT")

    def _rows(self, db: sqlite3.Connection) -> Iterator[Row]:
        where = f"The metadata store {self._path}"
        for key, body in db.execute("SELECT key, body FROM record WHERE key <> ''"):
            row = decode_row(body, f"{where}, record {key!r},") if isinstance(body, bytes) else None
            if row is None or row[0] != key:
                raise StoreMismatch(f"{where} is damaged: the record {key!r} is not what was stored under its key.")
            yield row

    def _refusal(self, exc: sqlite3.Error) -> Exception:
        code = _code(exc)
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return DataDirectoryBusy(
                f"The metadata store {self._path} is in use by another process; stop that one or choose another directory."
            )
        if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT, 0):  # 0: Python could not decode a column
            return StoreMismatch(
                f"The metadata store {self._path} is damaged ({exc}); restore the data directory from a backup."
            )
        return ConfigError(f"The metadata store {self._path} cannot be opened: {exc}.")


def _code(exc: sqlite3.Error) -> int:
    """SQLite's primary result code."""
    return getattr(exc, "sqlite_errorcode", 0) & 0xFF


async def open_store(runtime: Runtime, *, path: Path | None = None, session_timeout: float = DEFAULT_SESSION_TIMEOUT) -> Engine:
    """Open or create the store in the directory `path`. Raises DataDirectoryBusy, StoreMismatch, ConfigError."""
    if path is None:
        raise ConfigError("The embedded metadata store needs a directory; set its path.")
    journal = SqliteJournal(runtime.files, path, runtime.token(128))
    storage = Storage(journal, runtime.threads.worker("metadata-journal"), journal.checkpoint, journal.close)
    return await Engine.open(runtime, storage, session_timeout=session_timeout)
