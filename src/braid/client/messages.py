"""What an application sends and receives: `MessageId`, `Message`, and how an entry becomes messages. Pure."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from braid.client.values import BYTES, Codec
from braid.model.ackset import from_words
from braid.wire import messages as pb
from braid.wire.batch import read_batch
from braid.wire.commands import signed64

EARLIEST_NUMBER = -1
LATEST_NUMBER = (1 << 63) - 1


class MessageId(msgspec.Struct, frozen=True, gc=False, cache_hash=True):
    """Where a message is: entry, index inside its batch (-1 = not in one), partition and segment (-1 = the topic has none).

    Ordered by segment first: ids of one segment, or of one topic without segments, are in the order of storage.
    """

    ledger_id: int
    entry_id: int
    partition: int = -1
    batch_index: int = -1
    batch_size: int = 0
    segment_id: int = -1

    def __str__(self) -> str:
        batch = f":{self.batch_index}" if self.batch_index >= 0 else ""
        segment = f" in segment {self.segment_id}" if self.segment_id >= 0 else ""
        return f"{self.ledger_id}:{self.entry_id}:{self.partition}{batch}{segment}"

    def __lt__(self, other: MessageId) -> bool:
        return _order(self) < _order(other)

    def __le__(self, other: MessageId) -> bool:
        return _order(self) <= _order(other)

    def __gt__(self, other: MessageId) -> bool:
        return _order(self) > _order(other)

    def __ge__(self, other: MessageId) -> bool:
        return _order(self) >= _order(other)


def _order(each: MessageId) -> tuple[int, ...]:
    return each.segment_id, each.ledger_id, each.entry_id, each.partition, each.batch_index, each.batch_size


def is_after(one: MessageId, other: MessageId) -> bool:
    """Whether `one` is stored after `other`, both of one segment or of one topic without: the cheap comparison for every
    message. Sizes of batches are not looked at: ids from elsewhere may not know them."""
    if one.entry_id == other.entry_id and one.ledger_id == other.ledger_id:
        return one.batch_index > other.batch_index
    return (one.ledger_id, one.entry_id) > (other.ledger_id, other.entry_id)


def is_of_one_entry(one: MessageId, other: MessageId) -> bool:
    """Whether two messages of a topic without segments, or of one segment, came in the same batch."""
    return one.entry_id == other.entry_id and one.ledger_id == other.ledger_id


EARLIEST = MessageId(EARLIEST_NUMBER, EARLIEST_NUMBER)
"""Before the first message that is kept."""
LATEST = MessageId(LATEST_NUMBER, LATEST_NUMBER)
"""After the last message."""


class Message(msgspec.Struct, frozen=True, weakref=True):
    """One received message."""

    id: MessageId
    topic: str
    payload: bytes
    key: str | None = None
    properties: Mapping[str, str] = {}
    publish_ms: int = 0
    event_ms: int = 0
    sequence_id: int = 0
    producer: str = ""
    redelivery_count: int = 0
    chunks: tuple[MessageId, ...] = ()
    """All entries of a chunked message but the last."""
    vector: Mapping[int, MessageId] = {}
    """Of a stream consumer: the newest position delivered per segment when this message was; what a cumulative ack covers."""
    codec: Codec = BYTES
    origin: object = None
    """The consumer that received it: nobody else can acknowledge it."""

    @property
    def value(self) -> Any:
        """The payload as the consumer's schema reads it, decoded at each use; raises InvalidArgument if it does not fit."""
        return self.codec.decode(self.payload)

    @property
    def segment_id(self) -> int:
        """The segment it came from; -1 if the topic has none."""
        return self.id.segment_id


class _Nothing(dict[Any, Any]):
    """A dictionary that stays empty. Most messages have no properties and no vector: making two for each of them is a tenth of
    what receiving one costs, so they share this one."""

    def _refuse(self, *_arguments: Any, **_more: Any) -> Any:
        raise TypeError("What a received message says cannot be changed.")

    __setitem__ = setdefault = update = __ior__ = _refuse


_NOTHING: Final = _Nothing()


def plain_message(
    topic: str,
    message_id: MessageId,
    producer: str,
    sequence_id: int,
    publish_ms: int,
    key: str | None,
    payload: bytes,
    redeliveries: int,
    codec: Codec,
    origin: object,
) -> Message:
    """A message that says nothing else."""
    nothing = _NOTHING
    return Message(
        message_id,
        topic,
        payload,
        key,
        nothing,
        publish_ms,
        0,
        sequence_id,
        producer,
        redeliveries,
        (),
        nothing,
        codec,
        origin,
    )


def messages_of(
    topic: str,
    message_id: MessageId,
    metadata: pb.MessageMetadata,
    payload: bytes,
    redeliveries: int,
    ack_words: list[int],
    codec: Codec = BYTES,
    origin: object = None,
) -> list[Message]:
    """The messages of one entry that are not acknowledged yet; raises ProtocolError for a broken batch."""
    if not metadata.HasField("num_messages_in_batch"):
        return [_message(topic, message_id, metadata, metadata, payload, redeliveries, codec, origin)]
    count = metadata.num_messages_in_batch
    still_open = from_words(ack_words) if ack_words else -1
    ledger_id, entry_id, partition = message_id.ledger_id, message_id.entry_id, message_id.partition
    segment_id, publish_ms, producer = message_id.segment_id, metadata.publish_time, metadata.producer_name
    found = []
    for index, (sequence_id, key, body, single) in enumerate(read_batch(payload, count)):
        if ack_words and not still_open >> index & 1:
            continue
        where = MessageId(ledger_id, entry_id, partition, index, count, segment_id)
        if single is None:
            found.append(
                Message(
                    where,
                    topic,
                    body,
                    key,
                    _NOTHING,
                    publish_ms,
                    0,
                    sequence_id,
                    producer,
                    redeliveries,
                    (),
                    _NOTHING,
                    codec,
                    origin,
                )
            )
        elif not single.compacted_out:
            found.append(_message(topic, where, metadata, single, body, redeliveries, codec, origin))
    return found


def _message(
    topic: str,
    message_id: MessageId,
    entry: pb.MessageMetadata,
    single: Any,
    payload: bytes,
    redeliveries: int,
    codec: Codec,
    origin: object = None,
) -> Message:
    key: str | None = None
    if single.HasField("partition_key") and not single.null_partition_key:
        key = single.partition_key
        if single.partition_key_b64_encoded:
            key = base64.b64decode(key).decode("utf-8", "replace")
    return Message(
        id=message_id,
        topic=topic,
        payload=payload,
        key=key,
        properties={each.key: each.value for each in single.properties},
        publish_ms=entry.publish_time,
        event_ms=single.event_time,
        sequence_id=signed64(single.sequence_id if single.HasField("sequence_id") else entry.sequence_id),
        producer=entry.producer_name,
        redelivery_count=redeliveries,
        codec=codec,
        origin=origin,
    )
