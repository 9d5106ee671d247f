"""Payload compression with the five codecs of the protocol.

Owns the formats (raw LZ4 block, zlib stream, zstd frame, raw snappy block) and the bound on what a payload may grow to: a
payload whose announced or real size exceeds it is refused before memory is spent (INV17). Pure.
"""

from __future__ import annotations

import zlib

import cramjam

from braid.errors import ProtocolError, TooLarge
from braid.wire.types import CompressionType


def compress(codec: int, payload: bytes | memoryview) -> bytes:
    """The compressed form of a payload."""
    if codec == CompressionType.NONE:
        return bytes(payload)
    if codec == CompressionType.LZ4:
        return bytes(cramjam.lz4.compress_block(payload, store_size=False))
    if codec == CompressionType.ZLIB:
        return zlib.compress(payload)
    if codec == CompressionType.ZSTD:
        return bytes(cramjam.zstd.compress(payload))
    if codec == CompressionType.SNAPPY:
        return bytes(cramjam.snappy.compress_raw(payload))
    raise ProtocolError(f"Compression type {codec} is unknown; known are 0 to 4.")


def decompress(codec: int, payload: bytes, uncompressed_size: int, max_size: int) -> bytes:
    """The original payload, exactly `uncompressed_size` bytes.

    Raises TooLarge if that exceeds `max_size`, ProtocolError if the payload does not decode to exactly that size.
    """
    if codec == CompressionType.NONE:
        return payload
    if uncompressed_size > max_size:
        raise TooLarge(f"A payload announces {uncompressed_size} bytes uncompressed; the limit is {max_size}.")
    try:
        plain = _decompress(codec, payload, uncompressed_size)
    except (cramjam.DecompressionError, zlib.error, ValueError):
        raise _corrupt(codec, uncompressed_size) from None
    if len(plain) != uncompressed_size:
        raise _corrupt(codec, uncompressed_size)
    return plain


def _decompress(codec: int, payload: bytes, size: int) -> bytes:
    # Every codec writes into a buffer of the announced size (or is cut at it), so that a bomb ends in an error, not in memory.
    if codec == CompressionType.ZLIB:
        # Java ends its stream without a trailer, so its end is not insisted on; one byte more shows a payload that is too long.
        return zlib.decompressobj().decompress(payload, size + 1)
    buffer = bytearray(size)
    if codec == CompressionType.LZ4:
        written = cramjam.lz4.decompress_block_into(payload, buffer, output_len=size)
    elif codec == CompressionType.ZSTD:
        written = cramjam.zstd.decompress_into(payload, buffer)
    elif codec == CompressionType.SNAPPY:
        written = cramjam.snappy.decompress_raw_into(payload, buffer)
    else:
        raise ProtocolError(f"Compression type {codec} is unknown; known are 0 to 4.")
    return bytes(buffer[:written])


def _corrupt(codec: int, size: int) -> ProtocolError:
    name = CompressionType(codec).name
    return ProtocolError(f"A {name} payload does not decode to the {size} bytes it announces; it is corrupt.")
