"""`Entries`: the entries of a fetch as columns: where each is, what its metadata says and how many messages it holds.

Owns how entries are laid out and which fields of their metadata matter; all of them are read at once, because clients that do
not batch send one entry per message. Also opens single entries that need more (compression, chunks; what is encrypted is
refused). Checksums are not looked at: the answer that brought the entries had its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn

import msgspec
import numpy as np
from numpy.typing import NDArray

from braid.errors import BraidError, ProtocolError, TooLarge
from braid.wire.compression import decompress
from braid.wire.entries import MAGIC_CHECKSUM
from braid.wire.messages import MessageMetadata
from braid_spark.fields import Fields, FieldsBroken, Mask, Repeated, Wanted
from braid_spark.hashing import Bytes, Numbers
from braid_spark.messages import Messages, pick

if TYPE_CHECKING:
    from braid.client.segment_reads import Fetched

_PRODUCER, _SEQUENCE, _PUBLISHED, _PROPERTY, _KEY = 1 << 3 | 2, 2 << 3, 3 << 3, 4 << 3 | 2, 6 << 3 | 2
_COMPRESSION, _PLAIN_SIZE, _COUNT, _EVENT, _ENCRYPTION = 8 << 3, 9 << 3, 11 << 3, 12 << 3, 13 << 3 | 2
_VERSION, _KEY_B64, _NULL, _CHUNKS, _CHUNK, _NULL_KEY = 16 << 3 | 2, 17 << 3, 25 << 3, 27 << 3, 29 << 3, 30 << 3
_WANTED: Final = Wanted(
    numbers=frozenset(
        (_SEQUENCE, _PUBLISHED, _COMPRESSION, _PLAIN_SIZE, _COUNT, _EVENT, _KEY_B64, _NULL, _CHUNKS, _CHUNK, _NULL_KEY)
    ),
    slices=frozenset((_PRODUCER, _KEY, _VERSION)),
    repeated=frozenset((_PROPERTY, _ENCRYPTION)),
)


class EntryUnreadable(BraidError):
    """An entry that cannot become rows."""


def _unreadable(topic: str, index: int, position: tuple[int, int], why: object) -> EntryUnreadable:
    return EntryUnreadable(
        f"The entry {position[0]}:{position[1]} of {topic}, whose last message has index {index}, cannot be read: {why} "
        f"To leave it out, start the query behind it, at index {index + 1}."
    )


class Entry(NamedTuple):
    """One entry as its producer sent it."""

    topic: str
    last_index: int
    ledger_id: int
    entry_id: int
    metadata: MessageMetadata
    payload: memoryview

    def unreadable(self, why: object) -> EntryUnreadable:
        """The error that names it."""
        return _unreadable(self.topic, self.last_index, (self.ledger_id, self.entry_id), why)

    def plain(self, payload: bytes | memoryview, max_bytes: int) -> bytes | memoryview:
        """Its payload, or that of all its chunks, decompressed; raises EntryUnreadable."""
        metadata = self.metadata
        if metadata.encryption_keys:
            raise self.unreadable("It is encrypted, and Braid's Spark source has no keys.")
        if not metadata.compression:
            return payload
        try:
            return decompress(metadata.compression, bytes(payload), metadata.uncompressed_size, max_bytes)
        except (ProtocolError, TooLarge) as error:
            raise self.unreadable(error) from None


class Places(NamedTuple):
    """Where entries are."""

    last_index: Numbers
    ledger_id: Numbers
    entry_id: Numbers
    metadata_at: Numbers
    payload_at: Numbers
    end: Numbers


class Said(NamedTuple):
    """What the metadata of entries says, besides what belongs to a message."""

    held: Numbers
    """Messages in it; 1 unless it is a batch."""
    is_batch: Mask
    is_plain: Mask
    """Its payload can be used as it is: it is neither compressed nor encrypted nor a chunk."""
    is_chunk: Mask
    plain_size: Numbers
    """Bytes of its payload once it is decompressed."""
    publish_ms: NDArray[np.uint64]
    producer_at: Numbers
    producer_size: Numbers
    version_at: Numbers
    version_size: Numbers
    """Of the schema's version; -1: it says none."""


class Entries(msgspec.Struct, frozen=True):
    """Columns; one row per entry, offsets into `raw`."""

    topic: str
    raw: memoryview
    places: Places
    said: Said
    messages: Messages
    """Of entries that are no batches: the message that is alone in it. Of batches it means nothing."""

    def __len__(self) -> int:
        return len(self.places.end)

    def only(self, kept: Mask) -> Entries:
        """Those that are kept."""
        if kept.all():
            return self
        places = Places._make([each[kept] for each in self.places])
        said = Said._make([each[kept] for each in self.said])
        return Entries(self.topic, self.raw, places, said, pick(self.messages, kept))

    def part(self, first: int, behind: int) -> Entries:
        """Those from one number up to another."""
        numbers = np.arange(len(self))
        return self.only((numbers >= first) & (numbers < behind))

    def moved(self, raw: memoryview, by: Numbers, sizes: Numbers) -> Entries:
        """The same in other bytes, each entry's metadata `by` so much further on, directly before a payload of these sizes."""
        places, said, messages = self.places, self.said, self.messages
        payload_at = places.payload_at + by
        row, at, end = messages.properties
        return Entries(
            self.topic,
            raw,
            places._replace(metadata_at=places.metadata_at + by, payload_at=payload_at, end=payload_at + sizes),
            said._replace(producer_at=said.producer_at + by, version_at=said.version_at + by),
            messages._replace(
                value_at=payload_at,
                value_size=sizes,
                key_at=messages.key_at + by,
                properties=Repeated(row, at + by[row], end + by[row]),
            ),
        )

    def one(self, number: int) -> Entry:
        """One of them alone."""
        index, ledger_id, entry_id, begin, body, end = (int(each[number]) for each in self.places)
        metadata = MessageMetadata.FromString(bytes(self.raw[begin:body]))
        return Entry(self.topic, index, ledger_id, entry_id, metadata, self.raw[body:end])

    def unreadable(self, number: int, why: object) -> EntryUnreadable:
        """The error that names one of them."""
        index, ledger_id, entry_id = (int(each[number]) for each in self.places[:3])
        return _unreadable(self.topic, index, (ledger_id, entry_id), why)


def read_entries(topic: str, fetched: Fetched, start: int, stop: int) -> Entries:
    """The entries of a fetch that hold messages of `[start, stop)`, in order; raises EntryUnreadable."""
    data: Bytes = np.frombuffer(fetched.data, np.uint8)
    places = _places(topic, fetched, data)
    if len(places.end) and places.last_index[0] < start:
        kept = places.last_index >= start
        places = Places._make([each[kept] for each in places])
    try:
        fields = Fields(data, fetched.data, places.metadata_at, places.payload_at, _WANTED)
    except FieldsBroken as error:
        _refuse(topic, places, error.row, "Its metadata is not valid; its producer is broken.")
    said = _said(fields, places)
    is_bad = ~fields.has(_SEQUENCE) | ~fields.has(_PUBLISHED) | (said.producer_size < 0) | (said.held < 1)
    if is_bad.any():
        _refuse(topic, places, int(is_bad.argmax()), "Its metadata is not valid; its producer is broken.")
    entries = Entries(topic, fetched.data, places, said, _alone(fields, places))
    return entries.only(places.last_index - said.held + 1 < stop)


def _places(topic: str, fetched: Fetched, data: Bytes) -> Places:
    sizes, *known = (
        np.array(each, np.int64) for each in (fetched.size, fetched.last_index, fetched.ledger_id, fetched.entry_id)
    )
    end: Numbers = sizes.cumsum()
    at = end - sizes
    high, low = MAGIC_CHECKSUM >> 8, MAGIC_CHECKSUM & 0xFF
    if len(data) < 4:
        data = np.zeros(4, np.uint8)  # too short for any entry
    has_magic = (sizes >= 10) & (data.take(at, mode="clip") == high) & (data.take(at + 1, mode="clip") == low)
    metadata_at = at + np.where(has_magic, 10, 4)
    lengths: NDArray[np.uint32] = np.ndarray((len(data) - 3,), ">u4", data, 0, (1,))
    payload_at = metadata_at + lengths[np.minimum(metadata_at, len(data)) - 4]
    places = Places._make([*known, metadata_at, payload_at, end])
    is_bad = (metadata_at > end) | (payload_at > end) | (end > len(fetched.data))
    if is_bad.any():
        _refuse(topic, places, int(is_bad.argmax()), "It is shorter than it says; it is corrupt.")
    return places


def _refuse(topic: str, places: Places, number: int, why: str) -> NoReturn:
    index, ledger_id, entry_id = (int(each[number]) for each in places[:3])
    raise _unreadable(topic, index, (ledger_id, entry_id), why) from None


def _said(fields: Fields, places: Places) -> Said:
    is_batch = fields.has(_COUNT)
    count = fields.number(_COUNT).astype(np.uint32).astype(np.int32).astype(np.int64)
    is_compressed = fields.flag(_COMPRESSION)
    chunks = fields.number(_CHUNKS).astype(np.uint32).astype(np.int32)
    is_chunk = fields.has(_CHUNK) & (chunks > 1)
    is_plain = ~(is_compressed | is_chunk)
    is_plain[fields.every(_ENCRYPTION).row] = False
    said_size = fields.number(_PLAIN_SIZE).astype(np.uint32).astype(np.int64)
    producer_at, producer_size = fields.place(_PRODUCER)
    version_at, version_size = fields.place(_VERSION)
    return Said(
        held=np.where(is_batch, count, 1),
        is_batch=is_batch,
        is_plain=is_plain,
        is_chunk=is_chunk,
        plain_size=np.where(is_compressed & ~is_chunk, said_size, places.end - places.payload_at),
        publish_ms=fields.number(_PUBLISHED),
        producer_at=producer_at,
        producer_size=producer_size,
        version_at=version_at,
        version_size=version_size,
    )


def _alone(fields: Fields, places: Places) -> Messages:
    key_at, key_size = fields.place(_KEY)
    return Messages(
        value_at=places.payload_at,
        value_size=places.end - places.payload_at,
        key_at=key_at,
        key_size=np.where(fields.flag(_NULL_KEY), -1, key_size),
        event_ms=fields.number(_EVENT),
        has_value=~fields.flag(_NULL),
        is_compacted=np.zeros(len(places.end), np.bool_),
        is_key_b64=fields.flag(_KEY_B64),
        properties=fields.every(_PROPERTY),
    )
