"""Batches, compression and chunks: what comes back, and what is refused."""

from __future__ import annotations

import zlib

import pytest

from braid.errors import ProtocolError, TooLarge
from braid.model.positions import Position
from braid.wire.batch import MAX_BATCH_MESSAGES, decode_batch, encode_batch
from braid.wire.chunks import MAX_CHUNKS, Abandoned, Assembled, ChunkAssembler, chunk_sizes, is_chunk, mark_chunk
from braid.wire.compression import compress, decompress
from braid.wire.messages import MessageMetadata, SingleMessageMetadata
from braid.wire.types import CompressionType

CODECS = [codec for codec in CompressionType if codec != CompressionType.NONE]


@pytest.mark.parametrize(
    ("payload", "count", "reason"),
    [
        (b"", 1, "ends inside message 0"),
        (b"\x00\x00\x00", 1, "ends inside message 0"),
        (b"\x00\x00\x00\x05\x18\x00", 1, "ends inside message 0"),
        (b"\xff\xff\xff\xff\x18\x00", 1, "ends inside message 0"),
        (b"\x00\x00\x00\x02\x18\x03ab", 1, "a size that fits"),
        (b"\x00\x00\x00\x00", 1, "a size that fits"),
        (b"\x00\x00\x00\x0b\x18\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", 1, "a size that fits"),
        (b"\x00\x00\x00\x02\xff\xff", 1, "not valid protobuf"),
        (b"\x00\x00\x00\x02\x18\x01a?", 1, "followed by 1 bytes"),
        (b"\x00\x00\x00\x02\x18\x01a", 2, "ends inside message 1"),
        (b"\x00\x00\x00\x02\x18\x01a", 0, "1 to 1000000"),
        (b"\x00\x00\x00\x02\x18\x01a", -1, "1 to 1000000"),
        (b"", MAX_BATCH_MESSAGES + 1, "1 to 1000000"),
    ],
)
def test_corrupt_batches(payload: bytes, count: int, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        decode_batch(payload, count)


def test_batch_sets_the_payload_sizes() -> None:
    metadata = SingleMessageMetadata(payload_size=99, sequence_id=5)
    ((decoded, payload),) = decode_batch(encode_batch([(metadata, b"abc")]), 1)
    assert (decoded.payload_size, decoded.sequence_id, payload) == (3, 5, b"abc")


@pytest.mark.parametrize("codec", CODECS, ids=[codec.name for codec in CODECS])
def test_compression_bombs_and_wrong_sizes(codec: CompressionType) -> None:
    plain = bytes(200_000)
    packed = compress(codec, plain)
    assert decompress(codec, packed, len(plain), len(plain)) == plain
    with pytest.raises(TooLarge, match="the limit is 199999"):
        decompress(codec, packed, len(plain), len(plain) - 1)
    for size in (0, 100, len(plain) - 1, len(plain) + 1):
        with pytest.raises(ProtocolError, match="does not decode to"):
            decompress(codec, packed, size, 1 << 20)
    for junk in (b"", b"\xff" * 30, packed[: len(packed) // 2]):
        with pytest.raises(ProtocolError, match="does not decode to"):
            decompress(codec, junk, len(plain), 1 << 20)


def test_zlib_without_a_trailer() -> None:
    packer = zlib.compressobj()
    packed = packer.compress(b"hello") + packer.flush(zlib.Z_SYNC_FLUSH)
    assert decompress(CompressionType.ZLIB, packed, 5, 100) == b"hello"


def test_uncompressed_payloads_pass() -> None:
    assert decompress(CompressionType.NONE, b"abc", 0, 0) == b"abc"
    assert compress(CompressionType.NONE, b"abc") == b"abc"


def test_unknown_codec() -> None:
    with pytest.raises(ProtocolError, match="type 9 is unknown"):
        compress(9, b"")
    with pytest.raises(ProtocolError, match="type 9 is unknown"):
        decompress(9, b"", 0, 0)


def test_chunk_sizes() -> None:
    assert chunk_sizes(10, 4) == [4, 4, 2]
    assert chunk_sizes(8, 4) == [4, 4]
    assert chunk_sizes(0, 4) == [0]
    with pytest.raises(ValueError, match="holds nothing"):
        chunk_sizes(10, 0)


def chunk(uuid: str, chunk_id: int, num_chunks: int, total: int) -> MessageMetadata:
    metadata = MessageMetadata(producer_name="p", sequence_id=0, publish_time=1)
    mark_chunk(metadata, uuid, chunk_id, num_chunks, total)
    assert is_chunk(metadata) is (num_chunks > 1)
    return metadata


def at(entry: int) -> Position:
    return Position(1, entry)


def test_interleaved_messages() -> None:
    assembler = ChunkAssembler(10, 100)
    assert assembler.add(chunk("a", 0, 2, 4), b"aa", at(0)) == (None, [])
    assert assembler.add(chunk("b", 0, 2, 3), b"bb", at(1)) == (None, [])
    assert (len(assembler), assembler.size) == (2, 4)
    assert assembler.add(chunk("b", 1, 2, 3), b"b", at(2)) == (Assembled(b"bbb", [at(1), at(2)]), [])
    assert assembler.add(chunk("a", 1, 2, 4), b"AA", at(3)) == (Assembled(b"aaAA", [at(0), at(3)]), [])
    assert (len(assembler), assembler.size) == (0, 0)


def test_redelivered_and_repeated_chunks() -> None:
    assembler = ChunkAssembler(10, 100)
    assembler.add(chunk("a", 0, 3, 3), b"1", at(0))
    assembler.add(chunk("a", 1, 3, 3), b"2", at(1))
    assert assembler.add(chunk("a", 0, 3, 3), b"1", at(0)) == (None, []), "the same entry again"
    assert assembler.add(chunk("a", 1, 3, 3), b"2", at(1)) == (None, [])
    assert assembler.add(chunk("a", 1, 3, 3), b"2", at(2)) == (None, [Abandoned("a", [at(2)])]), "a copy at another place"
    assert assembler.add(chunk("a", 2, 3, 3), b"3", at(3)) == (Assembled(b"123", [at(0), at(1), at(3)]), [])


def test_a_message_that_begins_again() -> None:
    assembler = ChunkAssembler(10, 100)
    assembler.add(chunk("a", 0, 2, 2), b"1", at(0))
    assert assembler.add(chunk("a", 0, 2, 2), b"1", at(5)) == (None, [Abandoned("a", [at(0)])])
    assert assembler.add(chunk("a", 1, 2, 2), b"2", at(6)) == (Assembled(b"12", [at(5), at(6)]), [])


def test_missing_chunks() -> None:
    assembler = ChunkAssembler(10, 100)
    assert assembler.add(chunk("a", 1, 3, 3), b"2", at(1)) == (None, [Abandoned("a", [at(1)])])
    assembler.add(chunk("a", 0, 3, 3), b"1", at(2))
    assert assembler.add(chunk("a", 2, 3, 3), b"3", at(3)) == (None, [Abandoned("a", [at(2), at(3)])])
    assert (len(assembler), assembler.size) == (0, 0)


@pytest.mark.parametrize(("parts", "total"), [((b"12", b"34"), 3), ((b"1", b"2"), 3), ((b"1", b"2"), 101)])
def test_sizes_that_do_not_come_out(parts: tuple[bytes, bytes], total: int) -> None:
    assembler = ChunkAssembler(10, 100)
    gone = [assembler.add(chunk("a", i, 2, total), part, at(i))[1] for i, part in enumerate(parts)]
    assert sum(len(one.positions) for some in gone for one in some) == 2
    assert (len(assembler), assembler.size) == (0, 0)


@pytest.mark.inv("INV17")
def test_bounds() -> None:
    assembler = ChunkAssembler(2, 100)
    assembler.add(chunk("a", 0, 2, 60), bytes(40), at(0))
    assembler.add(chunk("b", 0, 2, 60), bytes(40), at(1))
    assert assembler.add(chunk("c", 0, 2, 60), bytes(10), at(2))[1] == [Abandoned("a", [at(0)])], "too many messages"
    assembler = ChunkAssembler(5, 100)
    assembler.add(chunk("a", 0, 2, 90), bytes(80), at(0))
    assert assembler.add(chunk("b", 0, 2, 60), bytes(40), at(1))[1] == [Abandoned("a", [at(0)])], "too many bytes"
    assert assembler.size == 40
    assert assembler.add(chunk("c", 0, 2, 101), b"1", at(2))[1] == [Abandoned("c", [at(2)])], "can never be held"
    assembler.clear()
    assert (len(assembler), assembler.size) == (0, 0)


@pytest.mark.parametrize(("chunk_id", "num_chunks"), [(-1, 2), (2, 2), (0, MAX_CHUNKS + 1)])
def test_impossible_chunks(chunk_id: int, num_chunks: int) -> None:
    with pytest.raises(ProtocolError, match="is impossible"):
        ChunkAssembler(2, 100).add(chunk("a", chunk_id, num_chunks, 5), b"", at(0))
