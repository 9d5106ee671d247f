"""What a producer holds until it is answered: drafts (messages), unanswered entries, and the window that bounds them (INV17).

Owns how drafts become an entry. Pure but for the futures it carries.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from braid.client.messages import MessageId
from braid.client.values import BYTES, Codec
from braid.errors import BraidError, InvalidArgument
from braid.model.txn import TxnId
from braid.wire import messages as pb
from braid.wire import requests
from braid.wire.batch import encode_batch
from braid.wire.commands import unsigned64
from braid.wire.compression import compress
from braid.wire.entries import build_entry
from braid.wire.plain_entries import plain_entry, plain_send
from braid.wire.types import CompressionType

Sent = asyncio.Future[MessageId]


class ProducerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for when the producer was made."""

    batching: bool = True
    compression: CompressionType = CompressionType.NONE
    codec: Codec = BYTES
    deduplication: bool = False


def compression_type(value: object) -> CompressionType:
    """How payloads are compressed, as an application says it; raises InvalidArgument."""
    if value not in ("none", "lz4", "zlib", "zstd", "snappy"):
        raise InvalidArgument(f'compression={value!r} cannot be used; give "none", "lz4", "zlib", "zstd" or "snappy".')
    return CompressionType[str(value).upper()]


class Draft:
    """A message on its way into an entry."""

    __slots__ = (
        "deadline",
        "done",
        "event_ms",
        "key",
        "payload",
        "properties",
        "sequence_id",
        "size",
        "txn",
        "wanted_id",
    )
    count = 1
    """How many messages it stands for."""

    def __init__(
        self,
        payload: bytes,
        key: str | None,
        properties: Mapping[str, str] | None,
        event_ms: int,
        wanted_id: int | None,
        size: int,
        deadline: float,
        done: asyncio.Future[Any],
        txn: TxnId | None = None,
    ) -> None:
        self.payload = payload
        self.key = key
        self.properties = properties
        self.event_ms = event_ms
        self.wanted_id = wanted_id
        """The sequence id the application gave, if it did."""
        self.sequence_id = -1
        """Its number in its lane; known when it is put into an entry."""
        self.size = size
        self.deadline = deadline
        """When to give up; 0 = as its entry says."""
        self.done = done
        self.txn = txn

    def fail(self, error: BraidError) -> None:
        """Tell whoever waits for it."""
        if not self.done.done():
            self.done.set_exception(type(error)(*error.args))
            self.done.exception()  # nobody may be waiting; that is no reason for a warning


class UnansweredEntry:
    """An entry sent, or to be sent, and not answered yet."""

    __slots__ = ("deadline", "drafts", "entry", "is_batch", "size")

    def __init__(self, drafts: list[Draft], entry: bytes, is_batch: bool, size: int, deadline: float) -> None:
        self.drafts = drafts
        self.entry = entry
        self.is_batch = is_batch
        self.size = size
        """What its messages take of the window."""
        self.deadline = deadline

    @property
    def sequence_id(self) -> int:
        return self.drafts[0].sequence_id

    @property
    def highest_sequence_id(self) -> int:
        last = self.drafts[-1]
        return last.sequence_id + last.count - 1

    @property
    def txn(self) -> TxnId | None:
        """Of all its messages."""
        return self.drafts[0].txn

    def frame(self, producer_id: int) -> bytes:
        first = self.drafts[0]
        if not self.is_batch:
            if first.txn is None:
                return plain_send(producer_id, first.sequence_id, self.entry)
            return requests.send(producer_id, first.sequence_id, self.entry, 1, None, first.txn)
        count = first.count if len(self.drafts) == 1 else len(self.drafts)  # a block is alone in its entry
        return requests.send(producer_id, first.sequence_id, self.entry, count, self.highest_sequence_id, first.txn)


def make_entry(
    drafts: Sequence[Draft],
    *,
    is_batch: bool,
    producer: str,
    publish_ms: int,
    compression: CompressionType,
    schema_version: bytes,
) -> bytes:
    """The bytes of one entry that holds these messages."""
    first = drafts[0]
    if not (is_batch or first.properties or first.event_ms or first.txn or schema_version or compression):
        return plain_entry(producer, first.sequence_id, publish_ms, first.key, first.payload)
    metadata = pb.MessageMetadata(producer_name=producer, sequence_id=unsigned64(first.sequence_id), publish_time=publish_ms)
    if schema_version:
        metadata.schema_version = schema_version
    if first.txn is not None:
        metadata.txnid_most_bits, metadata.txnid_least_bits = first.txn
    if is_batch:
        metadata.num_messages_in_batch = len(drafts)
        metadata.highest_sequence_id = unsigned64(drafts[-1].sequence_id)
        payload = encode_batch([(_single(each), each.payload) for each in drafts])
    else:
        _describe(metadata, first)
        payload = first.payload
    if compression is not CompressionType.NONE:
        metadata.compression = int(compression)  # type: ignore[assignment]
        metadata.uncompressed_size = len(payload)
        payload = compress(compression, payload)
    return build_entry(metadata, payload)


def _single(draft: Draft) -> pb.SingleMessageMetadata:
    into = pb.SingleMessageMetadata(sequence_id=unsigned64(draft.sequence_id))
    _describe(into, draft)
    return into


def _describe(into: Any, draft: Draft) -> None:
    """Write a message's own fields into its metadata."""
    if draft.key is not None:
        into.partition_key = draft.key
    if draft.properties:
        for name, value in draft.properties.items():
            into.properties.add(key=name, value=value)
    if draft.event_ms:
        into.event_time = draft.event_ms


def fail(drafts: Iterable[Draft], error: BraidError) -> None:
    """Tell whoever waits for these messages."""
    for draft in drafts:
        draft.fail(error)


class Window:
    """How much of a producer may be unanswered, over all its lanes. Who wants more waits in line, and passes in that order."""

    __slots__ = ("line", "max_messages", "max_size", "messages", "size")

    def __init__(self, max_messages: int, max_size: int) -> None:
        self.max_messages = max_messages
        self.max_size = max_size
        self.messages = 0
        self.size = 0
        self.line: deque[asyncio.Event] = deque()
        """Places of those who wait; the first one is set when it is worth looking again."""

    @property
    def is_full(self) -> bool:
        return self.messages >= self.max_messages or self.size >= self.max_size

    def give(self, messages: int, size: int) -> None:
        """So many messages were answered."""
        self.messages -= messages
        self.size -= size
        if self.line and not self.is_full:
            self.line[0].set()

    def wake(self) -> None:
        """Let everybody in line look again."""
        for place in self.line:
            place.set()

    def join(self) -> asyncio.Event:
        """Take the last place in line."""
        place = asyncio.Event()
        self.line.append(place)
        return place

    def leave(self, place: asyncio.Event) -> None:
        """The place is given up, whether it was one's turn or not; the next one looks, after the caller's own message."""
        self.line.remove(place)
        if self.line:
            self.line[0].set()
