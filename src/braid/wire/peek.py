"""Reading single facts of an entry without decoding all of its metadata, for dispatch."""

from __future__ import annotations

from typing import Final, NamedTuple

from braid.wire.checksum import crc32c
from braid.wire.entries import entry_metadata, payload_offset

_UUID_TAG: Final = b"\xd2\x01"
"""Tag of `MessageMetadata.uuid`, which only chunks carry."""
_CHECKSUM_MAGIC: Final = b"\x0e\x01"
_SHORT: Final = 2048
"""Below this the whole entry is searched for the tag: cheaper than finding out where its metadata ends."""


class Chunk(NamedTuple):
    """Which piece of which message an entry is."""

    uuid: str
    chunk_id: int
    num_chunks: int


def chunk_of(entry: bytes) -> Chunk | None:
    """The chunk an entry is, or None for a whole message. Cheap for whole messages: their metadata lacks the tag."""
    if entry.find(_UUID_TAG, 0, None if len(entry) < _SHORT else payload_offset(entry)) < 0:
        return None
    metadata = entry_metadata(entry)
    if not metadata.HasField("uuid") or not metadata.HasField("chunk_id"):
        return None
    return Chunk(metadata.uuid, metadata.chunk_id, metadata.num_chunks_from_msg)


def has_checksum(entry: bytes) -> bool:
    return entry.startswith(_CHECKSUM_MAGIC)


def with_checksum(entry: bytes) -> bytes:
    """An entry that came without checksum, with one: Go and Rust clients take no other."""
    return b"%b%b%b" % (_CHECKSUM_MAGIC, crc32c(entry).to_bytes(4, "big"), entry)
