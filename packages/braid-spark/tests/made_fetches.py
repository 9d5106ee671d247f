"""Fetches made by hand: entries as producers write them, and as odd as protobuf allows, with what the SDK reads out of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from braid.client.messages import Message, MessageId, messages_of
from braid.client.segment_reads import Fetched
from braid.wire import messages as pb
from braid.wire.compression import compress, decompress
from braid.wire.entries import build_entry, entry_metadata, payload_offset

TOPIC = "topic://public/default/orders"
PUBLISHED_MS = 1_700_000_000_000
LEDGER = 7


class Made(msgspec.Struct, frozen=True, kw_only=True):
    """One message to be written."""

    value: bytes | None = b""
    key: str | None = None
    is_key_b64: bool = False
    is_key_null: bool = False
    properties: tuple[tuple[str, str], ...] = ()
    event_ms: int = 0
    sequence_id: int | None = 0
    is_compacted: bool = False
    ordering_key: bytes | None = None
    is_versioned: bool = False
    """Whether it says a version of its schema; only if it is alone in its entry."""
    oddity: str = ""
    """How its metadata differs from what clients write: "backwards", "twice", "unknown", "far", "many" or nothing."""


def describe(into: Any, message: Made) -> None:
    """Write a message's fields into its metadata."""
    if message.key is not None:
        into.partition_key = message.key
        if message.is_key_b64:
            into.partition_key_b64_encoded = True
    if message.is_key_null:
        into.null_partition_key = True
    for name, value in message.properties:
        into.properties.add(key=name, value=value)
    if message.event_ms:
        into.event_time = message.event_ms
    if message.value is None:
        into.null_value = True
    if message.ordering_key is not None:
        into.ordering_key = message.ordering_key


def batch_payload(messages: Sequence[Made]) -> bytes:
    """The payload of a batch."""
    parts = []
    for message in messages:
        metadata = pb.SingleMessageMetadata(payload_size=len(message.value or b""))
        describe(metadata, message)
        if message.sequence_id is not None:
            metadata.sequence_id = message.sequence_id
        if message.is_compacted:
            metadata.compacted_out = True
        raw = odd(metadata.SerializeToString(), message.oddity)
        parts += [len(raw).to_bytes(4, "big"), raw, message.value or b""]
    return b"".join(parts)


def odd(raw: bytes, oddity: str) -> bytes:
    """The same metadata in another spelling."""
    if oddity == "backwards":
        fields = []
        while raw:
            field = _first_field(raw)
            fields.append(field)
            raw = raw[len(field) :]
        return b"".join(reversed(fields))
    if oddity == "twice":
        return b"\x28\x07\x18\x01" + raw  # an event time and a size that do not count, if others come behind them
    if oddity == "unknown":
        return raw + b"\xfa\x01\x02hi\xf8\x01\x80\x01\xf1\x0112345678\xf5\x011234"
    if oddity == "far":
        return b"\xc2\xbb\x01\x02hi" + raw + b"\xc0\xbb\x01" + b"\xff" * 9 + b"\x01"  # the field 3000, twice
    if oddity == "many":
        return b"\xc0\x02\x01" * 70 + raw
    return raw


def _first_field(raw: bytes) -> bytes:
    at = 2 if raw[0] > 127 else 1
    size = 0
    shift = 0
    while True:
        size |= (raw[at] & 127) << shift
        shift += 7
        at += 1
        if raw[at - 1] < 128:
            break
    return raw[: at + size] if raw[0] & 7 == 2 else raw[:at]


def batch(messages: Sequence[Made], codec: int = 0, number: int = 0, producer: str = "p-1") -> bytes:
    """An entry with several messages."""
    metadata = _metadata(number, producer)
    metadata.num_messages_in_batch = len(messages)
    return _entry(metadata, batch_payload(messages), codec)


def alone(message: Made, codec: int = 0, number: int = 0, producer: str = "p-1") -> bytes:
    """An entry that is one message."""
    metadata = _metadata(number, producer)
    describe(metadata, message)
    if message.sequence_id is not None:
        metadata.sequence_id = message.sequence_id
        metadata.txnid_most_bits = message.sequence_id
    if message.is_versioned:
        metadata.schema_version = number.to_bytes(8, "big")
    entry = _entry(metadata, message.value or b"", codec)
    if message.oddity == "twice":
        return respelled(entry, lambda raw: b"\x60\x07\x18\x01" + raw)
    return respelled(entry, lambda raw: odd(raw, message.oddity)) if message.oddity else entry


def respelled(entry: bytes, spell: Callable[[bytes], bytes]) -> bytes:
    """The same entry with its metadata written in another way, and without a checksum."""
    size = int.from_bytes(entry[6:10], "big")
    raw = spell(entry[10 : 10 + size])
    return len(raw).to_bytes(4, "big") + raw + entry[10 + size :]


def chunks(message: Made, count: int, uuid: str, codec: int = 0, number: int = 0) -> list[bytes]:
    """The entries of a message in chunks."""
    payload = message.value or b""
    whole = compress(codec, payload)
    size = -(-len(whole) // count)
    entries = []
    for each in range(count):
        metadata = _metadata(number + each, "p-1")
        describe(metadata, message)
        metadata.uuid = uuid
        metadata.chunk_id = each
        metadata.num_chunks_from_msg = count
        metadata.total_chunk_msg_size = len(whole)
        if codec:
            _compressed(metadata, codec, len(payload))
        entries.append(build_entry(metadata, whole[each * size : (each + 1) * size]))
    return entries


def _metadata(number: int, producer: str) -> pb.MessageMetadata:
    return pb.MessageMetadata(producer_name=producer, sequence_id=number, publish_time=PUBLISHED_MS + number)


def _entry(metadata: pb.MessageMetadata, payload: bytes, codec: int) -> bytes:
    if codec:
        _compressed(metadata, codec, len(payload))
        payload = compress(codec, payload)
    return build_entry(metadata, payload)


def _compressed(metadata: pb.MessageMetadata, codec: int, size: int) -> None:
    metadata.compression = int(codec)  # type: ignore[assignment]
    metadata.uncompressed_size = size


def fetched(entries: Sequence[bytes], first: int = 0, entry_id: int = 0, *, before: bytes = b"") -> Fetched:
    """The answer that holds these entries, the first message of which has index `first`; `before` shifts their bytes."""
    last, index = [], first - 1
    for entry in entries:
        index += entry_metadata(entry).num_messages_in_batch
        last.append(index)
    return Fetched(
        covered_to=index + 1,
        last_index=last,
        ledger_id=[LEDGER] * len(entries),
        entry_id=list(range(entry_id, entry_id + len(entries))),
        append_ms=[PUBLISHED_MS] * len(entries),
        size=[len(entry) for entry in entries],
        data=memoryview(before + b"".join(entries))[len(before) :],
    )


class Expected(msgspec.Struct, frozen=True):
    """A message as the SDK reads it, with its index."""

    index: int
    message: Message


def sdk_messages(entries: Sequence[bytes], first: int = 0, partition: int = -1) -> list[Expected]:
    """What the SDK reads out of the same entries, one by one. No chunks."""
    found: list[Expected] = []
    for number, entry in enumerate(entries):
        metadata = entry_metadata(entry)
        payload = decompress(metadata.compression, entry[payload_offset(entry) :], metadata.uncompressed_size, 1 << 30)
        messages = messages_of(TOPIC, MessageId(LEDGER, number, partition), metadata, payload, 0, [])
        found += [Expected(first + max(message.id.batch_index, 0), message) for message in messages]
        first += metadata.num_messages_in_batch
    return found
