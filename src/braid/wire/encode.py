"""Encoders of what a broker writes per entry: receipts, the head of a MESSAGE frame, the metadata it stores with an entry.

By hand and byte for byte what protobuf would write (tests hold them equal), because a message object per entry costs several
times as much. Everything else is encoded by `commands.encode`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from struct import Struct
from typing import Final

from braid.wire.entries import MAGIC_BROKER_METADATA
from braid.wire.varints import varint

_SIZES: Final = Struct(">II")
_RECEIPT: Final = Struct(">II3sBB")
"""Both lengths, the type with the tag of the sub-message, its size, the tag of the producer id."""
_MESSAGE_ID: Final = tuple(b"\x1a%c\x08" % size for size in range(23))
"""Tag of a receipt's message id, its size, tag of the ledger id: by size."""
_BROKER_HEAD: Final = Struct(">HI")
_TXN_MOST: Final = varint(1000 << 3)
_TXN_LEAST: Final = varint(1001 << 3)
_time_varint: Final = lru_cache(maxsize=64)(varint)
"""Entries of one commit group share a few milliseconds."""


def send_receipt(producer_id: int, sequence_id: int, highest_sequence_id: int | None, ledger_id: int, entry_id: int) -> bytes:
    """The whole SEND_RECEIPT frame; negative ids are allowed (-1:-1 says that a duplicate was dropped)."""
    ids = varint(producer_id) + b"\x10" + varint(sequence_id)
    position = varint(ledger_id) + b"\x10" + varint(entry_id)
    tail = b"" if highest_sequence_id is None else b"\x20" + varint(highest_sequence_id)
    size = len(ids) + len(position) + len(tail) + 4  # at most 58, so its own length is one byte
    return (
        _RECEIPT.pack(size + 8, size + 4, b"\x08\x07\x3a", size, 0x08) + ids + _MESSAGE_ID[len(position) + 1] + position + tail
    )


def broker_entry_metadata(timestamp_ms: int, index: int, txn: tuple[int, int] | None) -> bytes:
    """What stands in front of a stored entry: magic, size, append time, index of its last message, transaction."""
    body = b"\x08%b\x10%b" % (_time_varint(timestamp_ms), varint(index))
    if txn is not None:
        body += b"%b%b%b%b" % (_TXN_MOST, varint(txn[0]), _TXN_LEAST, varint(txn[1]))
    return _BROKER_HEAD.pack(MAGIC_BROKER_METADATA, len(body)) + body


class MessageEncoder:
    """Writes the heads of one consumer's MESSAGE frames: everything before the entry's bytes.

    `partition` is always written, -1 for a topic without partitions. What repeats from entry to entry is made once per ledger.
    """

    __slots__ = ("_consumer", "_ledger", "_ledger_id", "_partition", "_prefixes")

    def __init__(self, consumer_id: int, partition: int = -1) -> None:
        self._consumer = b"\x08" + varint(consumer_id) + b"\x12"
        self._partition = b"\x18" + varint(partition)
        self._ledger_id = 0
        self._ledger = b""
        self._prefixes: list[tuple[bytes, int]] = []
        self._use_ledger(0)

    def header(self, ledger_id: int, entry_id: int, redelivery_count: int, body_length: int) -> bytes:
        """The head of a frame whose entry has `body_length` bytes."""
        if ledger_id != self._ledger_id:
            self._use_ledger(ledger_id)
        if redelivery_count:
            return self.full_header(ledger_id, entry_id, redelivery_count, (), None, body_length)
        entry = varint(entry_id)
        prefix, size = self._prefixes[len(entry)]
        return b"%b%b%b%b" % (_SIZES.pack(size + 4 + body_length, size), prefix, entry, self._partition)

    def full_header(
        self,
        ledger_id: int,
        entry_id: int,
        redelivery_count: int,
        ack_set: Sequence[int],
        consumer_epoch: int | None,
        body_length: int,
    ) -> bytes:
        """Like `header`, with the rarer fields: unacknowledged batch indexes (signed words) and the consumer epoch."""
        message_id = b"\x08%b\x10%b%b" % (varint(ledger_id), varint(entry_id), self._partition)
        parts = [self._consumer, varint(len(message_id)), message_id]
        if redelivery_count:
            parts.append(b"\x18" + varint(redelivery_count))
        parts.extend(b"\x20" + varint(word) for word in ack_set)
        if consumer_epoch is not None:
            parts.append(b"\x28" + varint(consumer_epoch))
        body = b"".join(parts)
        length = varint(len(body))
        size = 3 + len(length) + len(body)
        return b"%b\x08\x09\x4a%b%b" % (_SIZES.pack(size + 4 + body_length, size), length, body)

    def _use_ledger(self, ledger_id: int) -> None:
        """Prepare, for each length an entry id may have, the command up to the entry id and the command's size."""
        self._ledger_id = ledger_id
        self._ledger = b"\x08" + varint(ledger_id) + b"\x10"
        self._prefixes = []
        for length in range(11):
            inner = len(self._ledger) + length + len(self._partition)
            outer = len(self._consumer) + 1 + inner
            prefix = b"\x08\x09\x4a%c%b%c%b" % (outer, self._consumer, inner, self._ledger)
            self._prefixes.append((prefix, 4 + outer))


def message_header(
    consumer_id: int,
    ledger_id: int,
    entry_id: int,
    partition: int,
    redelivery_count: int,
    ack_set: Sequence[int],
    consumer_epoch: int | None,
    body_length: int,
) -> bytes:
    """The head of one MESSAGE frame, for callers that keep no `MessageEncoder`."""
    encoder = MessageEncoder(consumer_id, partition)
    return encoder.full_header(ledger_id, entry_id, redelivery_count, ack_set, consumer_epoch, body_length)
