"""The hand-written encoders write byte for byte what protobuf writes, and read back what they wrote."""

from __future__ import annotations

from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.errors import EntryCorrupt
from braid.wire.commands import encode, unsigned64
from braid.wire.encode import MessageEncoder, broker_entry_metadata, message_header, send_receipt
from braid.wire.entries import build_entry, entry_metadata, payload_offset, split_entry, verify
from braid.wire.messages import BrokerEntryMetadata, CommandMessage, CommandSendReceipt, MessageIdData, MessageMetadata
from braid.wire.plain_entries import plain_entry, plain_send, read_plain_entry
from braid.wire.requests import send
from braid.wire.types import CommandType
from braid.wire.varints import read_varint, varint

U64 = st.one_of(st.integers(0, 300), st.integers(0, 2**64 - 1), st.sampled_from([2**14 - 1, 2**14, 2**21, 2**28, 2**35, 2**63]))
S64 = st.one_of(st.integers(-2, 300), st.integers(-(2**63), 2**63 - 1))
many = settings(max_examples=250, deadline=None)


@many
@given(S64)
def test_varint(value: int) -> None:
    raw = varint(value)
    assert raw == MessageIdData(ledgerId=unsigned64(value), entryId=0).SerializeToString()[1:-2]
    assert read_varint(b"?" + raw, 1) == (unsigned64(value), len(raw) + 1)


@many
@given(U64, S64, st.none() | S64, S64, S64)
def test_send_receipt(producer_id: int, sequence_id: int, highest: int | None, ledger_id: int, entry_id: int) -> None:
    body = CommandSendReceipt(
        producer_id=producer_id,
        sequence_id=unsigned64(sequence_id),
        message_id=MessageIdData(ledgerId=unsigned64(ledger_id), entryId=unsigned64(entry_id)),
        highest_sequence_id=None if highest is None else unsigned64(highest),
    )
    assert send_receipt(producer_id, sequence_id, highest, ledger_id, entry_id) == encode(CommandType.SEND_RECEIPT, body)


@many
@given(st.text(max_size=200), S64, U64, st.none() | st.text(max_size=200), st.binary(max_size=50))
def test_plain_entries(producer: str, sequence_id: int, publish_ms: int, key: str | None, payload: bytes) -> None:
    metadata = MessageMetadata(producer_name=producer, sequence_id=unsigned64(sequence_id), publish_time=publish_ms)
    if key is not None:
        metadata.partition_key = key
    entry = build_entry(metadata, payload)
    assert plain_entry(producer, sequence_id, publish_ms, key, payload) == entry
    if sequence_id >= 0 and len(producer.encode()) < 128 and len((key or "").encode()) < 128:
        assert read_plain_entry(entry) == (producer, sequence_id, publish_ms, key, payload)
    else:
        assert read_plain_entry(entry) is None
    assert read_plain_entry(entry[: len(entry) - len(payload) - 1]) is None
    metadata.event_time = 5
    assert read_plain_entry(build_entry(metadata, payload)) is None


@many
@given(st.binary(max_size=60) | st.binary(max_size=30).map(b"\x0e\x01????\x00\x00\x00\x08\x0a\x01p\x10\x01\x18\x05".__add__))
def test_any_bytes_as_plain_entry(entry: bytes) -> None:
    found = read_plain_entry(entry)
    if found is not None:
        producer, sequence_id, publish_ms, key, payload = found
        metadata = entry_metadata(entry)
        assert (metadata.producer_name, metadata.sequence_id, metadata.publish_time) == (producer, sequence_id, publish_ms)
        assert (metadata.partition_key if metadata.HasField("partition_key") else None) == key
        assert entry[payload_offset(entry) :] == payload


@many
@given(U64, S64, st.binary(max_size=300))
def test_plain_sends(producer_id: int, sequence_id: int, entry: bytes) -> None:
    assert plain_send(producer_id, sequence_id, entry) == send(producer_id, sequence_id, entry)


@many
@given(
    U64,
    st.lists(st.tuples(S64, S64, st.integers(0, 2**32 - 1), st.integers(0, 10_000)), min_size=1, max_size=5),
    st.integers(-1, 2**31 - 1),
    st.lists(S64, max_size=30),
    st.none() | S64,
)
def test_message_header(
    consumer_id: int, entries: list[tuple[int, int, int, int]], partition: int, ack_set: list[int], epoch: int | None
) -> None:
    encoder = MessageEncoder(consumer_id, partition)
    for ledger_id, entry_id, redelivered, size in entries:
        message_id = MessageIdData(ledgerId=unsigned64(ledger_id), entryId=unsigned64(entry_id), partition=partition)
        body = CommandMessage(consumer_id=consumer_id, message_id=message_id, redelivery_count=redelivered or None)

        def whole(body: CommandMessage, size: int) -> bytes:
            frame = encode(CommandType.MESSAGE, body)
            return (len(frame) - 4 + size).to_bytes(4, "big") + frame[4:]

        assert encoder.header(ledger_id, entry_id, redelivered, size) == whole(body, size)
        body.ack_set.extend(ack_set)
        if epoch is not None:
            body.consumer_epoch = unsigned64(epoch)
        assert encoder.full_header(ledger_id, entry_id, redelivered, ack_set, epoch, size) == whole(body, size)
        assert message_header(consumer_id, ledger_id, entry_id, partition, redelivered, ack_set, epoch, size) == whole(
            body, size
        )


TIMES = st.one_of(st.integers(1_600_000_000_000, 1_900_000_000_000), U64)


@many
@given(TIMES, U64, st.none() | st.tuples(U64, U64), st.binary(max_size=30))
def test_broker_entry_metadata(time: int, index: int, txn: tuple[int, int] | None, entry: bytes) -> None:
    most, least = txn or (None, None)
    raw = BrokerEntryMetadata(broker_timestamp=time, index=index, txn_most_bits=most, txn_least_bits=least).SerializeToString()
    head = broker_entry_metadata(time, index, txn)
    assert head == b"\x0e\x02" + len(raw).to_bytes(4, "big") + raw
    assert split_entry(head + entry) == (time, index, txn, len(head))


@many
@given(st.binary(min_size=1, max_size=14), st.binary(max_size=3))
def test_any_bytes_as_broker_entry_metadata(tail: bytes, entry: bytes) -> None:
    raw = bytes.fromhex("0880d095ffbc3110") + tail
    try:
        parsed = BrokerEntryMetadata.FromString(raw)
        txn = (parsed.txn_most_bits, parsed.txn_least_bits) if parsed.HasField("txn_least_bits") else None
        expected: object = (parsed.broker_timestamp, parsed.index, txn, 6 + len(raw))
    except DecodeError:
        expected = None
    try:
        assert split_entry(b"\x0e\x02" + len(raw).to_bytes(4, "big") + raw + entry) == expected
    except EntryCorrupt:
        assert expected is None


@many
@given(st.text(max_size=20), U64, st.none() | st.integers(1, 5000), st.binary(max_size=100))
def test_entries(producer: str, sequence_id: int, count: int | None, payload: bytes) -> None:
    metadata = MessageMetadata(producer_name=producer, sequence_id=sequence_id, publish_time=1, num_messages_in_batch=count)
    entry = build_entry(metadata, payload)
    assert verify(entry)
    for form in (entry, entry[6:]):
        assert entry_metadata(form) == metadata
        assert form[payload_offset(form) :] == payload
