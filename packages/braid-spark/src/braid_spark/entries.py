"""The entries of a fetch: each entry's metadata and payload, and one buffer with the messages of several.

Owns opening entries as producers sent them (metadata, payload, compression; what is encrypted is refused). A message that is
alone in its entry is given the shape of a batch of one, so that everything behind this module sees batches only. Checksums are
not looked at: the answer that brought the entries had its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

from google.protobuf.message import DecodeError

from braid.errors import BraidError, ProtocolError, TooLarge
from braid.wire.compression import decompress
from braid.wire.entries import MAGIC_CHECKSUM
from braid.wire.messages import MessageMetadata
from braid.wire.varints import varint

if TYPE_CHECKING:
    from braid.client.segment_reads import Fetched

_MAGIC: Final = Struct(">H")
_SIZE: Final = Struct(">I")


class EntryUnreadable(BraidError):
    """An entry that cannot become rows."""


class Entry(NamedTuple):
    """One entry as its producer sent it."""

    topic: str
    last_index: int
    ledger_id: int
    entry_id: int
    metadata: MessageMetadata
    payload: memoryview
    at: int
    """Where the payload begins in the fetch."""
    messages: int
    """How many it holds; 1 unless it is a batch."""
    is_batch: bool

    def unreadable(self, why: object) -> EntryUnreadable:
        """The error that names it."""
        return _unreadable(self.topic, self.last_index, (self.ledger_id, self.entry_id), why)


def _unreadable(topic: str, index: int, position: tuple[int, int], why: object) -> EntryUnreadable:
    return EntryUnreadable(
        f"The entry {position[0]}:{position[1]} of {topic}, whose last message has index {index}, cannot be read: {why} "
        f"To leave it out, start the query behind it, at index {index + 1}."
    )


def entries_of(topic: str, fetched: Fetched) -> Iterator[Entry]:
    """The entries of a fetch in order; raises EntryUnreadable."""
    data = fetched.data
    at = 0
    columns = zip(fetched.last_index, fetched.ledger_id, fetched.entry_id, fetched.size, strict=True)
    for index, ledger_id, entry_id, size in columns:
        end = at + size
        start = at + (10 if size >= 10 and _MAGIC.unpack_from(data, at)[0] == MAGIC_CHECKSUM else 4)
        body = start + _SIZE.unpack_from(data, start - 4)[0] if start <= end <= len(data) else end + 1
        if body > end:
            raise _unreadable(topic, index, (ledger_id, entry_id), "It is shorter than it says; it is corrupt.")
        try:
            metadata = MessageMetadata.FromString(bytes(data[start:body]))
        except DecodeError:
            metadata = None
        count = 0 if metadata is None else metadata.num_messages_in_batch
        if metadata is None or count < 1 or not metadata.IsInitialized():
            raise _unreadable(topic, index, (ledger_id, entry_id), "Its metadata is not valid; its producer is broken.")
        is_batch = count > 1 or metadata.HasField("num_messages_in_batch")
        yield Entry(topic, index, ledger_id, entry_id, metadata, data[body:end], body, count, is_batch)
        at = end


def plain_payload(entry: Entry, payload: bytes | memoryview, max_bytes: int) -> bytes | memoryview:
    """The payload decompressed; raises EntryUnreadable."""
    metadata = entry.metadata
    if metadata.encryption_keys:
        raise entry.unreadable("It is encrypted, and Braid's Spark source has no keys.")
    if not metadata.compression:
        return payload
    try:
        return decompress(metadata.compression, bytes(payload), metadata.uncompressed_size, max_bytes)
    except (ProtocolError, TooLarge) as error:
        raise entry.unreadable(error) from None


def batch_of_one(metadata: MessageMetadata, payload_size: int) -> bytes:
    """What stands before the payload of a message that is alone in its entry, to make it a batch of one."""
    raw = b"\x18" + varint(payload_size)
    if metadata.HasField("partition_key"):
        key: str | bytes = metadata.partition_key  # bytes if it is no UTF-8
        key = key.encode() if isinstance(key, str) else key
        raw = b"\x12%b%b%b" % (varint(len(key)), key, raw)
    for each in reversed(metadata.properties):
        written = each.SerializeToString()
        raw = b"\x0a%b%b%b" % (varint(len(written)), written, raw)
    if metadata.event_time:
        raw += b"\x28" + varint(metadata.event_time)
    if metadata.partition_key_b64_encoded:
        raw += b"\x30\x01"
    if metadata.null_value:
        raw += b"\x48\x01"
    if metadata.null_partition_key:
        raw += b"\x50\x01"
    return _SIZE.pack(len(raw)) + raw
