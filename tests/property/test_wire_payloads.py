"""Batches, compression and chunks return what went in; names survive every form they are written in."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.errors import BraidError, InvalidTopicName
from braid.model.ackset import from_words, to_words
from braid.model.names import TopicName
from braid.model.positions import Position
from braid.wire.batch import decode_batch, encode_batch, read_batch
from braid.wire.chunks import ChunkAssembler, chunk_sizes, mark_chunk
from braid.wire.compression import compress, decompress
from braid.wire.messages import MessageMetadata, SingleMessageMetadata
from braid.wire.types import CompressionType

many = settings(max_examples=150, deadline=None)


@many
@given(st.lists(st.tuples(st.none() | st.text(max_size=5), st.binary(max_size=20)), min_size=1, max_size=20))
def test_batch(messages: list[tuple[str | None, bytes]]) -> None:
    payload = encode_batch((SingleMessageMetadata(partition_key=key), body) for key, body in messages)
    decoded = decode_batch(payload, len(messages))
    assert [(one.partition_key if one.HasField("partition_key") else None, body) for one, body in decoded] == messages


def short_and_long(payload: bytes, count: int) -> None:
    """`read_batch` takes and refuses what `decode_batch` does, for the same reasons, and reads the same from it."""
    try:
        expected = decode_batch(payload, count)
    except BraidError as error:
        assert error.message.endswith(".")
        with pytest.raises(type(error)) as refused:
            read_batch(payload, count)
        assert refused.value.message == error.message
        return
    found = read_batch(payload, count)
    assert [body for _number, _key, body, _metadata in found] == [body for _metadata, body in expected]
    for (sequence_id, key, body, metadata), (wanted, _body) in zip(found, expected, strict=True):
        if metadata is None:
            metadata = SingleMessageMetadata(sequence_id=sequence_id, partition_key=key, payload_size=len(body))
        assert metadata == wanted


FIELDS = st.sampled_from(
    [
        b"",
        b"\x12\x01k",
        b"\x12\x00",
        b"\x12\x81\x00k",  # numbers may be longer than they need to be
        b"\x12\x02\xff\xfe",  # not text
        b"\x12\x80\x01" + b"k" * 127 + b"\x18",
        b"\x18\x02",
        b"\x18\x82\x00",
        b"\x18\x82\x80\x00",
        b"\x18\x40",
        b"\x20\x01",
        b"\x28\x05",
        b"\x40\x00",
        b"\x40\x05",
        b"\x40\x85\x01",
        b"\x40\xff\xff\xff\xff\xff\xff\xff\xff\x7f",
        b"\x40\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        b"\x40" + b"\xff" * 40,
    ]
)


@many
@given(st.binary(max_size=60) | st.binary(max_size=20).map(b"\x00\x00\x00\x04\x18\x02\x40\x07ab".__add__), st.integers(-1, 5))
def test_any_bytes_as_batch(payload: bytes, count: int) -> None:
    short_and_long(payload, count)


@many
@given(
    st.lists(st.tuples(st.lists(FIELDS, max_size=4).map(b"".join), st.binary(min_size=2, max_size=2)), min_size=1, max_size=4)
)
def test_metadata_in_any_order_and_length(messages: list[tuple[bytes, bytes]]) -> None:
    payload = b"".join(b"".join((len(metadata).to_bytes(4, "big"), metadata, body)) for metadata, body in messages)
    short_and_long(payload, len(messages))


def test_numbers_without_an_end_take_no_time() -> None:
    short_and_long(b"\x00\x00\x00\x04\x18\x02\x40" + b"\xff" * 4_000_000, 1)


@many
@given(st.sampled_from(CompressionType), st.binary(max_size=3000) | st.binary(max_size=10).map(lambda some: some * 300))
def test_compression(codec: CompressionType, payload: bytes) -> None:
    assert decompress(codec, compress(codec, payload), len(payload), len(payload)) == payload


@many
@given(st.sampled_from(CompressionType), st.binary(max_size=200), st.integers(0, 5000))
def test_any_bytes_decompressed(codec: CompressionType, payload: bytes, size: int) -> None:
    try:
        plain = decompress(codec, payload, size, 4000)
    except BraidError as error:
        assert error.message.endswith(".")
    else:
        assert codec == CompressionType.NONE or len(plain) == size


@many
@given(st.binary(max_size=300), st.integers(1, 60))
def test_chunks(payload: bytes, chunk_size: int) -> None:
    sizes = chunk_sizes(len(payload), chunk_size)
    assert sum(sizes) == len(payload)
    assert all(size <= chunk_size for size in sizes)
    assembler = ChunkAssembler(1, 300)
    at = 0
    for number, size in enumerate(sizes):
        metadata = MessageMetadata(producer_name="p", sequence_id=0, publish_time=0)
        mark_chunk(metadata, "p-0", number, len(sizes), len(payload))
        whole, abandoned = assembler.add(metadata, payload[at : at + size], Position(0, number))
        at += size
        assert not abandoned
        assert (whole is None) is (number < len(sizes) - 1)
        if whole is not None:
            assert whole.payload == payload


@many
@given(st.integers(0, 2**200))
def test_ack_sets(mask: int) -> None:
    words = to_words(mask)
    assert from_words(words) == mask
    assert all(-(2**63) <= word < 2**63 for word in words)
    assert not words or words[-1] != 0


LOCAL = (
    st.text(st.characters(blacklist_categories=["Cc", "Cf", "Cs", "Zl", "Zp"]), min_size=1, max_size=20)
    .map(lambda name: unicodedata.normalize("NFC", name))
    .filter(lambda name: name.strip() != "")
)


@many
@given(st.sampled_from(["persistent", "non-persistent", "topic"]), LOCAL)
def test_names(domain: str, local: str) -> None:
    if domain != "topic":
        local = local.replace("/", "|")
    name = TopicName.parse(f"{domain}://t/n/{local}")
    assert name.local_name == local
    assert TopicName.from_managed_ledger_name(name.managed_ledger_name) == name
    assert TopicName.parse(str(name)) == name
    assert name.base.schema_id == name.schema_id


@many
@given(st.text(max_size=40) | st.text("apt:/-01.", max_size=30))
def test_any_text_is_a_name_or_a_clear_refusal(text: str) -> None:
    try:
        assert TopicName.parse(str(TopicName.parse(text))) == TopicName.parse(text)
    except InvalidTopicName as error:
        assert error.message.endswith(".")
