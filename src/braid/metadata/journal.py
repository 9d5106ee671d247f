"""Rows and the journal port: what the engine keeps in memory and what it hands to stable storage.

Owns the row layout, its byte form (one codec with a checksum for every journal) and the two-method port `Journal`. Does no
I/O. Rows are plain tuples of atoms because the garbage collector stops tracking those; a store of 200,000 record objects would
stall the loop for tenths of a second.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Protocol, TypeAlias

import msgspec

from braid.errors import StoreError, StoreMismatch
from braid.metadata.api import Record
from braid.wire.checksum import crc32c

Row: TypeAlias = tuple[str, str | None, int, int, int, int, str | None, tuple[tuple[str, str], ...], bytes]
"""(key, partition, version, mods, created_ms, modified_ms, owner, index entries, value)"""
KEY: Final = 0
PARTITION: Final = 1
VERSION: Final = 2
MODS: Final = 3
CREATED: Final = 4
OWNER: Final = 6
INDEX: Final = 7
VALUE: Final = 8

Change: TypeAlias = tuple[str, Row | None]
"""A key and its new row; None removes it."""

FORMAT_VERSION: Final = 1
"""Of a row's bytes; every journal notes it in its file."""


class JournalFull(StoreError):
    """There was no room and nothing of the group was kept; it may be tried again."""


class Image(msgspec.Struct, frozen=True):
    """What a journal holds."""

    store_id: str
    counter: int
    """Highest commit ever made durable."""
    rows: Iterable[Row]


class Journal(Protocol):
    """Stable storage under the engine. Both calls block and run on one worker."""

    def load(self) -> Image:
        """Open or create the storage and return everything in it."""
        ...

    def commit(self, changes: Sequence[Change], counter: int) -> None:
        """Make all changes and the counter durable together, in order, before returning.

        JournalFull: nothing was kept. Any other error: unknown, and the journal is never used again.
        """
        ...


class VolatileJournal:
    """Keeps nothing: the journal of the `memory` backend."""

    def __init__(self, store_id: str) -> None:
        self._store_id = store_id

    def load(self) -> Image:
        return Image(self._store_id, 0, ())

    def commit(self, changes: Sequence[Change], counter: int) -> None:
        """Nothing outlives the process, so there is nothing to do."""


def record_of(row: Row, session_id: str | None) -> Record:
    """The record a caller sees; `session_id` is the live session of its handle."""
    key, _partition, version, mods, created, modified, owner, index, value = row
    return Record(
        key,
        value,
        version,
        mods,
        created,
        modified,
        owner,
        owner is not None and owner == session_id,
        dict(index) if index else {},
    )


_decoder: msgspec.msgpack.Decoder[Row] = msgspec.msgpack.Decoder(Row)
_encoder = msgspec.msgpack.Encoder()


def encode_row(row: Row) -> bytes:
    """Checksum and row."""
    body = _encoder.encode(row)
    return crc32c(body).to_bytes(4, "big") + body


def decode_row(data: bytes, where: str) -> Row:
    """The row, or StoreMismatch if a byte of it changed since it was written."""
    body = data[4:]
    if len(data) < 5 or crc32c(body) != int.from_bytes(data[:4], "big"):
        raise StoreMismatch(f"{where} is damaged: it fails its checksum. Restore the data directory from a backup.")
    try:
        return _decoder.decode(body)
    except msgspec.DecodeError as exc:
        raise StoreMismatch(f"{where} holds a record this version cannot read ({exc}).") from exc
