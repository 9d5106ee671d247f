"""`EntryReader`: what comes for a lane, entry by entry, as messages: puts chunks together, decompresses, opens batches.

Owns the chunks of messages that have not come whole yet (bounded, INV17). Says how many permits an entry took, so that those of
messages nobody gets are given back. Never acknowledges anything itself.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import msgspec

from braid.client.config import ClientConfig
from braid.client.consumer_lanes import LaneOptions
from braid.client.messages import Message, MessageId, messages_of, plain_message
from braid.errors import ProtocolError, TooLarge
from braid.model.ackset import from_words, full
from braid.model.positions import Position
from braid.wire import messages as pb
from braid.wire.chunks import ChunkAssembler, is_chunk
from braid.wire.client import Delivery
from braid.wire.commands import signed64
from braid.wire.compression import decompress
from braid.wire.entries import entry_metadata, payload_offset
from braid.wire.plain_entries import read_plain_entry

log = logging.getLogger(__name__)


class Read(NamedTuple):
    """What became of one entry."""

    messages: list[Message]
    permits: int
    """How many the broker took for it."""
    given_up: list[Position]
    """Entries with chunks that will never be a message."""
    is_readable: bool


class EntryReader:
    """Reads the entries of one lane."""

    def __init__(self, topic: str, options: LaneOptions, config: ClientConfig) -> None:
        self._topic = topic
        self._options = options
        self._max_bytes = config.max_message_bytes
        self._ledger_id = -1
        """Of the entry read last."""
        self._chunks = ChunkAssembler(config.max_chunked_messages, config.max_message_bytes)

    def clear(self) -> None:
        """Everything comes again."""
        self._chunks.clear()

    def read(self, delivery: Delivery) -> Read:
        command, entry, options = delivery.command, delivery.entry, self._options
        position = position_of(delivery)
        topic, count = options.shown_topic or self._topic, command.redelivery_count
        if position.ledger_id != self._ledger_id:
            self._ledger_id = position.ledger_id
            if options.origin is not None:
                options.origin.note(position.ledger_id)
        message_id = MessageId(*position, options.partition, segment_id=options.segment_id)
        if (plain := read_plain_entry(entry)) is not None and not command.ack_set:
            found = [plain_message(topic, message_id, *plain, count, options.codec, options.origin)]
            return Read(found, 1, [], is_readable=True)
        permits = 1
        given_up: list[Position] = []
        chunks: tuple[MessageId, ...] = ()
        try:
            metadata = entry_metadata(entry)
            acks = list(command.ack_set)
            permits = _permits(metadata, acks)
            payload = entry[payload_offset(entry) :]
            if is_chunk(metadata):
                whole, lost = self._chunks.add(metadata, payload, position)
                for each in lost:
                    log.warning("chunks of message %s on %s do not fit together and are dropped", each.uuid, self._topic)
                    given_up += each.positions
                if whole is None:
                    return Read([], permits, given_up, is_readable=True)
                payload = whole.payload
                chunks = tuple(
                    MessageId(*each, options.partition, segment_id=options.segment_id) for each in whole.positions[:-1]
                )
            payload = decompress(metadata.compression, payload, metadata.uncompressed_size, self._max_bytes)
            found = messages_of(topic, message_id, metadata, payload, count, acks, options.codec, options.origin)
        except (ProtocolError, TooLarge) as error:
            log.error("the entry %s of %s cannot be read and is left out: %s", message_id, self._topic, error)
            return Read([], permits, given_up, is_readable=False)
        if chunks:
            found = [msgspec.structs.replace(found[0], chunks=chunks)]
        return Read(found, permits, given_up, is_readable=True)


def position_of(delivery: Delivery) -> Position:
    where = delivery.command.message_id
    return Position(signed64(where.ledgerId), signed64(where.entryId))


def permits_of(delivery: Delivery) -> int:
    """How many permits an entry took that is not read at all."""
    try:
        return _permits(entry_metadata(delivery.entry), list(delivery.command.ack_set))
    except ProtocolError:
        return 1


def _permits(metadata: pb.MessageMetadata, ack_words: list[int]) -> int:
    """One for each message that is not acknowledged yet."""
    count: int = max(metadata.num_messages_in_batch, 1)
    return (from_words(ack_words) & full(count)).bit_count() if ack_words else count
