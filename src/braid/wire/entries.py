"""Entries: `[0x0e01, CRC,] metadata size, metadata, payload`, the blob that travels unchanged from producer to consumer, and
the broker's own metadata (`0x0e02, size, BrokerEntryMetadata`) that stands in front of it in storage.

Owns reading and building both. Looks at metadata only; never opens a payload. Hot: `admit`, `split_entry`.
"""

from __future__ import annotations

from struct import Struct
from typing import Final, TypeAlias

from google.protobuf.message import DecodeError, EncodeError

from braid.errors import EntryCorrupt, ProtocolError
from braid.wire.checksum import crc32c
from braid.wire.messages import BrokerEntryMetadata, MessageMetadata

MAGIC_CHECKSUM: Final = 0x0E01
MAGIC_BROKER_METADATA: Final = 0x0E02

_CHECKED: Final = b"\x0e\x01"
_LARGE: Final = 1 << 14
_CHECKSUM: Final = Struct(">HI")
_BROKER: Final = Struct(">HI8B")
_TIME_BIAS: Final = 0x80 + (0x80 << 7) + (0x80 << 14) + (0x80 << 21) + (0x80 << 28)
"""What the five continuation bits of a six-byte number add up to."""
_parse: Final = MessageMetadata.FromString
_unpack_checksum: Final = _CHECKSUM.unpack_from
_unpack_head: Final = Struct(">HII").unpack_from
_unpack_broker: Final = _BROKER.unpack_from


StoredHead: TypeAlias = tuple[int, int, tuple[int, int] | None, int]
"""Append time in ms, index of the entry's last message, its transaction (most, least bits), offset of the producer's bytes.

A plain tuple: it is made once per entry delivered."""


def _checksum_of(entry: bytes) -> int:
    """Of what follows the checksum; only large entries are worth not being copied."""
    return crc32c(entry[6:] if len(entry) < _LARGE else memoryview(entry)[6:])


def verify(entry: bytes) -> bool:
    """Whether the entry's checksum holds; an entry without one is accepted, as Pulsar does."""
    if len(entry) < 6:
        return entry[:2] != _CHECKED
    magic, checksum = _unpack_checksum(entry)
    return bool(magic != MAGIC_CHECKSUM or _checksum_of(entry) == checksum)


def entry_metadata(entry: bytes | memoryview) -> MessageMetadata:
    """The message metadata of an entry; raises ProtocolError if there is none that can be read."""
    start = payload_start = 10 if entry[:2] == _CHECKED else 4
    size = int.from_bytes(entry[start - 4 : start], "big")
    payload_start += size
    if payload_start > len(entry):
        raise ProtocolError(f"An entry of {len(entry)} bytes cannot hold the {size} bytes of metadata it announces.")
    try:
        metadata = _parse(bytes(entry[start:payload_start]))
    except DecodeError:
        raise ProtocolError("The metadata of an entry is not valid protobuf; the producer's client is broken.") from None
    if not metadata.IsInitialized():
        raise ProtocolError("The metadata of an entry lacks a required field; the producer's client is broken.")
    return metadata


def message_count(entry: bytes | memoryview) -> int:
    """How many messages an entry holds, 1 unless it is a batch; raises ProtocolError for unreadable metadata."""
    count: int = entry_metadata(entry).num_messages_in_batch
    if count < 1:
        raise ProtocolError(f"The metadata of an entry counts {count} messages; an entry holds at least one.")
    return count


def admit(entry: bytes) -> int:
    """`verify` and `message_count` in one pass, for every entry published: the number of messages, 0 for a wrong checksum,
    and less than 0 (as many, with a minus) if the metadata names a transaction."""
    if len(entry) < 10:
        return _signed_count(entry) if verify(entry) else 0
    magic, checksum, size = _unpack_head(entry)
    if magic != MAGIC_CHECKSUM:
        return _signed_count(entry)
    if _checksum_of(entry) != checksum:
        return 0
    end = 10 + size
    if end > len(entry):
        raise ProtocolError(f"An entry of {len(entry)} bytes cannot hold the {size} bytes of metadata it announces.")
    try:
        metadata = _parse(entry[10:end])
    except DecodeError:
        raise ProtocolError("The metadata of an entry is not valid protobuf; the producer's client is broken.") from None
    count: int = metadata.num_messages_in_batch
    if count < 1 or not metadata.IsInitialized():
        return message_count(entry)  # says what is wrong
    return -count if metadata.HasField("txnid_most_bits") else count


def _signed_count(entry: bytes) -> int:
    count = message_count(entry)
    return -count if entry_metadata(entry).HasField("txnid_most_bits") else count


def payload_offset(entry: bytes) -> int:
    """Where the payload begins; the entry must have passed `entry_metadata` before."""
    start = 10 if entry[:2] == _CHECKED else 4
    return start + int.from_bytes(entry[start - 4 : start], "big")


def build_entry(metadata: MessageMetadata, payload: bytes | memoryview) -> bytes:
    """A checksummed entry."""
    try:
        raw = metadata.SerializeToString()
    except EncodeError as missing:
        raise ValueError(f"The message metadata to send is incomplete: {missing}.") from None
    body = b"".join((len(raw).to_bytes(4, "big"), raw, payload))
    return _CHECKSUM.pack(MAGIC_CHECKSUM, crc32c(body)) + body


def split_entry(stored: bytes) -> StoredHead:
    """Read the broker's metadata of a stored entry; raises EntryCorrupt if it is not there or not readable."""
    if len(stored) >= _BROKER.size:
        magic, size, tag_time, a, b, c, d, e, f, tag_index = _unpack_broker(stored)
        # The usual shape, times of the years 1971 to 2109: a six-byte number, then the index and nothing else.
        if magic == MAGIC_BROKER_METADATA and tag_time == 0x08 and tag_index == 0x10 and a & b & c & d & e > 0x7F and f < 0x80:
            i, end = _BROKER.size, size + 6
            index = shift = 0
            if end <= len(stored) and size > 8:
                while (byte := stored[i]) > 0x7F and shift < 49 and i + 1 < end:
                    index |= (byte & 0x7F) << shift
                    shift += 7
                    i += 1
                if i + 1 == end and byte < 0x80:
                    time = a + (b << 7) + (c << 14) + (d << 21) + (e << 28) + (f << 35) - _TIME_BIAS
                    return time, index | byte << shift, None, end
    return _split_unusual(stored)


def _split_unusual(stored: bytes) -> StoredHead:
    if len(stored) < 6 or stored[:2] != b"\x0e\x02":
        raise EntryCorrupt("A stored entry does not begin with the broker's metadata; the log holds bytes Braid did not write.")
    end = 6 + int.from_bytes(stored[2:6], "big")
    try:
        if end > len(stored):
            raise DecodeError
        metadata = BrokerEntryMetadata.FromString(stored[6:end])
    except DecodeError:
        raise EntryCorrupt("The broker's metadata of a stored entry is not readable.") from None
    if not (metadata.HasField("broker_timestamp") and metadata.HasField("index")):
        raise EntryCorrupt("The broker's metadata of a stored entry lacks its append time or its index.")
    txn = None
    if metadata.HasField("txn_most_bits") and metadata.HasField("txn_least_bits"):
        txn = (metadata.txn_most_bits, metadata.txn_least_bits)
    return metadata.broker_timestamp, metadata.index, txn, end
