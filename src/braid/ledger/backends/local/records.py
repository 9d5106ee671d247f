"""Record formats of the `local` store: what a journal group and a snapshot hold, and the file headers.

Pure: bytes in, values out. Every file starts with a header that carries a magic, a format version and a checksum; newer formats
are refused with a clear message. A record has no checksum of its own: the group (journal) or frame (snapshot) around it has.

    record  = kind u8 · ledger id u64 · entry id i64 · size u32 · payload
    group   = salt 8 · sequence u64 · size u32 · crc32c(payload) u32 · crc32c(the fields before) u32 · records
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from enum import IntEnum

import msgspec

from braid.errors import EntryCorrupt, StoreMismatch
from braid.wire.checksum import crc32c

FORMAT = 1


class Kind(IntEnum):
    """What a record says. The numbers are on disk."""

    ENTRY = 1
    CREATE = 2
    CLOSE = 3
    DELETE = 4
    MARK = 5
    LEDGER = 6
    """Snapshot only: the whole state of a ledger except its buffered entries, which follow as ENTRY records."""
    HEAD = 7
    """Snapshot only, first record: where to replay from, the id allocator."""
    END = 8
    """Snapshot only, last record; the entry id is the number of records before it."""


RECORD = struct.Struct(">BQqI")
GROUP = struct.Struct(">8sQIII")
_GROUP_FIELDS = struct.Struct(">8sQII")
_CRC = struct.Struct(">I")
HEADER = struct.Struct(">8sHQ8s8sQI")
"""File header: magic, format, number (segment, ledger id), store id, salt, first sequence, crc."""

JOURNAL_MAGIC = b"BRDJRNL\n"
LEDGER_MAGIC = b"BRDLEDG\n"
SNAPSHOT_MAGIC = b"BRDSNAP\n"


class CreateBody(msgspec.Struct, array_like=True):
    """Payload of CREATE."""

    created_ms: int
    custom: Mapping[str, bytes]


class LedgerBody(msgspec.Struct, array_like=True):
    """Payload of LEDGER."""

    created_ms: int
    custom: Mapping[str, bytes]
    is_closed: bool
    last_entry: int
    length: int
    file_entries: int
    file_bytes: int
    file_length: int


class HeadBody(msgspec.Struct, array_like=True):
    """Payload of HEAD."""

    segment: int
    next_id: int
    gaps: list[tuple[int, int]]


class MarkBody(msgspec.Struct, array_like=True):
    """Payload of MARK: the newest metadata commit known to be acknowledged."""

    store_id: str
    commit: int


class FileHeader(msgspec.Struct, frozen=True):
    """The decoded header of a file."""

    number: int
    store_id: bytes
    salt: bytes
    first_sequence: int


encode_body = msgspec.msgpack.encode
decode_create = msgspec.msgpack.Decoder(CreateBody).decode
decode_ledger = msgspec.msgpack.Decoder(LedgerBody).decode
decode_head = msgspec.msgpack.Decoder(HeadBody).decode
decode_mark = msgspec.msgpack.Decoder(MarkBody).decode


def record(kind: Kind, ledger_id: int, entry_id: int, payload: bytes = b"") -> bytes:
    """One encoded record."""
    return RECORD.pack(kind, ledger_id, entry_id, len(payload)) + payload


def records(payload: bytes, where: str) -> Iterator[tuple[int, int, int, bytes]]:
    """The (kind, ledger id, entry id, payload) of each record in a verified group or frame."""
    unpack, size = RECORD.unpack_from, RECORD.size
    at, end = 0, len(payload)
    while at < end:
        if at + size > end:
            raise EntryCorrupt(f"{where}: a record is cut at byte {at}; restore the file from a backup.")
        kind, ledger_id, entry_id, length = unpack(payload, at)
        at += size
        if at + length > end:
            raise EntryCorrupt(f"{where}: a record of {length} bytes passes the end at byte {at}; restore it from a backup.")
        yield kind, ledger_id, entry_id, payload[at : at + length]
        at += length


def group(salt: bytes, sequence: int, payload: bytes) -> bytes:
    """A framed and checksummed run of records."""
    fields = _GROUP_FIELDS.pack(salt, sequence, len(payload), crc32c(payload))
    return fields + _CRC.pack(crc32c(fields)) + payload


def group_header(data: bytes, salt: bytes) -> tuple[int, int, int] | None:
    """(sequence, size, payload crc) of a valid group header, None for anything else."""
    if len(data) < GROUP.size or data[:8] != salt:
        return None
    _, sequence, size, payload_crc, crc = GROUP.unpack_from(data)
    if crc32c(data[: GROUP.size - 4]) != crc:
        return None
    return sequence, size, payload_crc


def header(magic: bytes, number: int, store_id: bytes, salt: bytes = bytes(8), first_sequence: int = 0) -> bytes:
    """An encoded file header."""
    packed = HEADER.pack(magic, FORMAT, number, store_id, salt, first_sequence, 0)
    return packed[:-4] + _CRC.pack(crc32c(packed[:-4]))


def read_header(data: bytes, magic: bytes, where: str) -> FileHeader:
    """Decode a file header; `StoreMismatch` for another format, `EntryCorrupt` for damage."""
    if len(data) < HEADER.size:
        raise EntryCorrupt(f"{where} is too short for its header; restore it from a backup.")
    found, version, number, store_id, salt, first_sequence, crc = HEADER.unpack_from(data)
    if found != magic:
        raise EntryCorrupt(f"{where} does not start with {magic!r}; it is damaged or not ours.")
    if crc32c(data[: HEADER.size - 4]) != crc:
        raise EntryCorrupt(f"{where} has a damaged header; restore it from a backup.")
    if version != FORMAT:
        raise StoreMismatch(f"{where} has format {version}, this version reads {FORMAT}; use the version that wrote it.")
    return FileHeader(number, store_id, salt, first_sequence)
