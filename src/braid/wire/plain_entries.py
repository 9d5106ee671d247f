"""Plain entries: a single message that says no more than its producer, number, time and perhaps a key, and its SEND.

Written and read by hand, byte for byte as protobuf would (tests hold them equal): message objects cost several times as much,
and where messages are not batched each of them pays. Everything less usual is the business of `entries` and `requests`.
"""

from __future__ import annotations

from struct import Struct
from struct import error as StructError
from typing import Final

from braid.errors import ProtocolError
from braid.wire.checksum import crc32c
from braid.wire.entries import MAGIC_CHECKSUM
from braid.wire.varints import read_varint, varint

_SIZE: Final = Struct(">I")
_CHECKSUM: Final = Struct(">HI")
_unpack_head: Final = Struct(">H4xI2B").unpack_from
"""Magic, size of the metadata, its first tag with the size of the producer's name."""
_SIGN: Final = 1 << 63
_SEND: Final = Struct(">II3sB")
"""Both lengths of the frame, the type with the tag of the sub-message, its size."""


def read_plain_entry(entry: bytes) -> tuple[str, int, int, str | None, bytes] | None:
    """Producer, sequence id, publish time in ms, key and payload; None for an entry that is not plain, or broken."""
    try:
        magic, size, tag, length = _unpack_head(entry)
        end, i = size + 10, length + 12
        if magic != MAGIC_CHECKSUM or tag != 0x0A or length > 0x7F or entry[i] != 0x10 or end > len(entry):
            return None
        producer = entry[12:i].decode()
        sequence_id, i = read_varint(entry, i + 1)
        if entry[i] != 0x18:
            return None
        publish_ms, i = read_varint(entry, i + 1)
        key = None
        if i < end and entry[i] == 0x32 and (length := entry[i + 1]) < 0x80:
            i += 2 + length
            key = entry[i - length : i].decode()
    except (IndexError, StructError, UnicodeDecodeError, ProtocolError):
        return None
    return (producer, sequence_id, publish_ms, key, entry[end:]) if i == end and sequence_id < _SIGN else None


def plain_entry(producer: str, sequence_id: int, publish_ms: int, key: str | None, payload: bytes) -> bytes:
    """A checksummed entry of one message that says nothing else: no properties, no compression, no transaction."""
    name = producer.encode()
    metadata = b"\x0a%b%b\x10%b\x18%b" % (varint(len(name)), name, varint(sequence_id), varint(publish_ms))
    if key is not None:
        raw = key.encode()
        metadata += b"\x32%b%b" % (varint(len(raw)), raw)
    body = b"%b%b%b" % (_SIZE.pack(len(metadata)), metadata, payload)
    return _CHECKSUM.pack(MAGIC_CHECKSUM, crc32c(body)) + body


def plain_send(producer_id: int, sequence_id: int, entry: bytes) -> bytes:
    """The whole SEND frame of an entry with one message, outside transactions."""
    ids = b"\x08%b\x10%b" % (varint(producer_id), varint(sequence_id))
    size = len(ids)  # at most 22, so its own length is one byte
    return b"%b%b%b" % (_SEND.pack(size + 8 + len(entry), size + 4, b"\x08\x06\x32", size), ids, entry)
