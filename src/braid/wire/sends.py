"""Encoders of what a producer writes per message: the entry of a single plain message, and its SEND.

By hand and byte for byte what protobuf would write (tests hold them equal): two message objects cost several times as much, and
whoever awaits each answer waits for them. Everything less usual is encoded by `entries.build_entry` and `requests.send`.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from braid.wire.checksum import crc32c
from braid.wire.entries import MAGIC_CHECKSUM
from braid.wire.varints import varint

_SIZE: Final = Struct(">I")
_CHECKSUM: Final = Struct(">HI")
_SEND: Final = Struct(">II3sB")
"""Both lengths of the frame, the type with the tag of the sub-message, its size."""


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
