"""`FileJournal`: the metadata engine's journal over the file layer, for simulation and power-loss tests.

SQLite does its own I/O, so a file layer that forgets unsynced bytes cannot sit under it; this journal is the second
implementation of the same two methods. One append-only log of checksummed groups: a torn tail is cut at load, nothing is ever
compacted. Not for production.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from braid.errors import StoreMismatch
from braid.metadata.engine import DEFAULT_SESSION_TIMEOUT, Engine, Storage
from braid.metadata.journal import FORMAT_VERSION, Change, Image, JournalFull, Row, decode_row, encode_row
from braid.runtime.env import Runtime
from braid.runtime.files import File, FileSystem
from braid.wire.checksum import crc32c

FILE_NAME: Final = "metadata.log"
_FRAME = struct.Struct(">II")  # size and checksum of what follows


class _Group(msgspec.Struct, frozen=True, array_like=True):
    counter: int
    changes: list[tuple[str, bytes | None]]


class _Start(msgspec.Struct, frozen=True, array_like=True):
    magic: str
    format: int
    store_id: str


class FileJournal:
    """`Journal` on one append-only file."""

    def __init__(self, files: FileSystem, directory: Path, new_store_id: str) -> None:
        self._files = files
        self._directory = directory
        self._path = directory / FILE_NAME
        self._store_id = new_store_id
        self._file: File | None = None

    def load(self) -> Image:
        self._files.make_dir(self._directory)
        self._file = file = self._files.open(self._path, create=True)
        frames, end = self._read(file)
        if end < file.size():
            file.truncate(end)
            file.sync()
        if not frames:
            file.append(_frame(msgspec.msgpack.encode(_Start("braid-metadata", FORMAT_VERSION, self._store_id))))
            file.sync()
            self._files.sync_dir(self._directory)
            return Image(self._store_id, 0, ())
        try:
            start = msgspec.msgpack.decode(frames[0], type=_Start)
        except msgspec.MsgspecError as exc:
            raise StoreMismatch(f"The file {self._path} is not a metadata journal.") from exc
        if start.format != FORMAT_VERSION:
            raise StoreMismatch(f"The metadata journal {self._path} has format {start.format}, not {FORMAT_VERSION}.")
        self._store_id = start.store_id
        rows: dict[str, Row] = {}
        counter = 0
        for frame in frames[1:]:
            group = msgspec.msgpack.decode(frame, type=_Group)
            counter = group.counter
            for key, body in group.changes:
                if body is None:
                    rows.pop(key, None)
                else:
                    rows[key] = decode_row(body, f"The metadata journal {self._path}")
        return Image(start.store_id, counter, list(rows.values()))

    def commit(self, changes: Sequence[Change], counter: int) -> None:
        if self._file is None:
            raise OSError(errno.EBADF, "the journal is not open")
        group = _Group(counter, [(key, None if row is None else encode_row(row)) for key, row in changes])
        before = self._file.size()
        try:
            self._file.append(_frame(msgspec.msgpack.encode(group)))
        except OSError as exc:
            if exc.errno != errno.ENOSPC:
                raise
            self._file.truncate(before)
            raise JournalFull(f"There is no room left for {self._path}.") from exc
        self._file.sync()

    def close(self) -> None:
        """Release the file. Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _read(self, file: File) -> tuple[list[bytes], int]:
        """Every whole frame, and where the last one ends."""
        data = file.read(0, file.size())
        frames = []
        position = 0
        while position + _FRAME.size <= len(data):
            size, checksum = _FRAME.unpack_from(data, position)
            body = data[position + _FRAME.size : position + _FRAME.size + size]
            if size == 0 or len(body) < size or crc32c(body) != checksum:
                break  # torn; a run of zeros is no empty frame
            frames.append(body)
            position += _FRAME.size + size
        return frames, position


def _frame(body: bytes) -> bytes:
    return _FRAME.pack(len(body), crc32c(body)) + body


async def open_store(runtime: Runtime, *, path: Path | None = None, session_timeout: float = DEFAULT_SESSION_TIMEOUT) -> Engine:
    """A durable store on the runtime's file layer, in the directory `path`."""
    directory = path or Path("metadata")
    journal = FileJournal(runtime.files, directory, runtime.token(128))
    storage = Storage(journal, runtime.threads.worker("metadata-journal"), None, journal.close)
    return await Engine.open(runtime, storage, session_timeout=session_timeout)
