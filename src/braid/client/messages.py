"""What an application sends and receives: `MessageId`, `Message`, and how an entry becomes messages. Pure."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import msgspec

from braid.model.ackset import from_words
from braid.wire import messages as pb
from braid.wire.batch import decode_batch
from braid.wire.commands import signed64

EARLIEST_NUMBER = -1
LATEST_NUMBER = (1 << 63) - 1


class MessageId(msgspec.Struct, frozen=True, order=True):
    """Where a message is: entry, index inside its batch (-1 = not in one), partition (-1 = not partitioned)."""

    ledger_id: int
    entry_id: int
    partition: int = -1
    batch_index: int = -1
    batch_size: int = 0

    def __str__(self) -> str:
        batch = f":{self.batch_index}" if self.batch_index >= 0 else ""
        return f"{self.ledger_id}:{self.entry_id}:{self.partition}{batch}"


EARLIEST = MessageId(EARLIEST_NUMBER, EARLIEST_NUMBER)
"""Before the first message that is kept."""
LATEST = MessageId(LATEST_NUMBER, LATEST_NUMBER)
"""After the last message."""


class Message(msgspec.Struct, frozen=True, kw_only=True):
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


def messages_of(
    topic: str, message_id: MessageId, metadata: pb.MessageMetadata, payload: bytes, redeliveries: int, ack_words: list[int]
) -> list[Message]:
    """The messages of one entry that are not acknowledged yet; raises ProtocolError for a broken batch."""
    if not metadata.HasField("num_messages_in_batch"):
        return [_message(topic, message_id, metadata, metadata, payload, redeliveries)]
    count = metadata.num_messages_in_batch
    still_open = from_words(ack_words) if ack_words else -1
    found = []
    for index, (single, body) in enumerate(decode_batch(payload, count)):
        if still_open >> index & 1 and not single.compacted_out:
            each = MessageId(message_id.ledger_id, message_id.entry_id, message_id.partition, index, count)
            found.append(_message(topic, each, metadata, single, body, redeliveries))
    return found


def _message(
    topic: str, message_id: MessageId, entry: pb.MessageMetadata, single: Any, payload: bytes, redeliveries: int
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
    )
