"""Batches: the payload of an entry whose metadata has `num_messages_in_batch`, as single messages.

Owns the layout `size, SingleMessageMetadata, payload` and its bounds. Works on plain payloads: compression and encryption are
around it. Only clients open batches; a broker never does.
"""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct
from struct import error as StructError
from typing import Final

from google.protobuf.message import DecodeError

from braid.errors import ProtocolError
from braid.wire.messages import SingleMessageMetadata

MAX_BATCH_MESSAGES: Final = 1_000_000
"""More messages than any batch of a legal size holds: each takes at least six bytes."""
_SIZE: Final = Struct(">I")
_unpack_size: Final = _SIZE.unpack_from
_parse: Final = SingleMessageMetadata.FromString
_KEY: Final = 0x12
_SIZE_TAG: Final = 0x18
_SEQUENCE_TAG: Final = 0x40
_SIGN: Final = 1 << 63


def encode_batch(messages: Iterable[tuple[SingleMessageMetadata, bytes]]) -> bytes:
    """The payload that holds the messages in order; sets each metadata's `payload_size`."""
    parts: list[bytes] = []
    for metadata, payload in messages:
        metadata.payload_size = len(payload)
        raw = metadata.SerializeToString()
        parts += (len(raw).to_bytes(4, "big"), raw, payload)
    return b"".join(parts)


def decode_batch(payload: bytes, count: int) -> list[tuple[SingleMessageMetadata, bytes]]:
    """The `count` messages of a batch; raises ProtocolError unless the payload holds exactly these."""
    _check_count(count)
    messages = []
    at = 0
    for number in range(count):
        metadata, start, end = _read_one(payload, at, number, count)
        messages.append((metadata, payload[start:end]))
        at = end
    _check_end(payload, at, count)
    return messages


def read_batch(payload: bytes, count: int) -> list[tuple[int, str | None, bytes, SingleMessageMetadata | None]]:
    """The same for those who read many: sequence id, key, body and None for a message whose metadata says its size, its
    sequence id and perhaps a key, and nothing else, which is the usual one; of any other one only body and metadata count.

    By hand: a protobuf object per message that is asked for its fields costs more than everything else there is to do.
    """
    _check_count(count)
    messages: list[tuple[int, str | None, bytes, SingleMessageMetadata | None]] = []
    add = messages.append
    at, end = 0, len(payload)
    for number in range(count):
        try:
            i = at + 4
            start = i + _unpack_size(payload, at)[0]
            tag = payload[i]
            key = None
            if tag == _KEY and (size := payload[i + 1]) < 0x80:
                i += 2 + size
                key = payload[i - size : i].decode()
                tag = payload[i]
            size = payload[i + 1]
            if size > 0x7F:
                i += 1
                size += (payload[i + 1] << 7) - 0x80
            is_usual = tag == _SIZE_TAG and payload[i + 2] == _SEQUENCE_TAG and size < 0x4000
            sequence_id = payload[i + 3]
            i += 4
            if sequence_id > 0x7F:
                sequence_id -= 0x80
                shift = 7
                while (byte := payload[i]) > 0x7F and shift < 63:
                    sequence_id += (byte - 0x80) << shift
                    shift += 7
                    i += 1
                sequence_id += byte << shift
                i += 1
            if is_usual and i == start and sequence_id < _SIGN and start + size <= end:
                at = start + size
                add((sequence_id, key, payload[start:at], None))
                continue
        except (IndexError, StructError, UnicodeDecodeError):
            pass  # it may be short, or broken
        metadata, start, at = _read_one(payload, at, number, count)
        add((0, None, payload[start:at], metadata))
    _check_end(payload, at, count)
    return messages


def _read_one(payload: bytes, at: int, number: int, count: int) -> tuple[SingleMessageMetadata, int, int]:
    """The metadata of the message at `at`, and from where to where its body goes."""
    end = len(payload)
    start = at + 4
    body = start + _unpack_size(payload, at)[0] if start <= end else end + 1
    if body > end:
        raise ProtocolError(f"A batch of {end} bytes ends inside message {number} of {count}; it is corrupt.")
    try:
        metadata = _parse(payload[start:body])
    except DecodeError:
        raise ProtocolError(f"The metadata of message {number} in a batch is not valid protobuf; it is corrupt.") from None
    size = metadata.payload_size  # the only required field: asked for only where it may be missing
    if size < 0 or body + size > end or (size == 0 and not metadata.IsInitialized()):
        raise ProtocolError(f"Message {number} of {count} in a batch does not say a size that fits; the batch is corrupt.")
    return metadata, body, body + size


def _check_count(count: int) -> None:
    if not 0 < count <= MAX_BATCH_MESSAGES:
        raise ProtocolError(f"A batch of {count} messages was announced; 1 to {MAX_BATCH_MESSAGES} are possible.")


def _check_end(payload: bytes, at: int, count: int) -> None:
    if at != len(payload):
        rest = len(payload) - at
        raise ProtocolError(f"A batch of {count} messages is followed by {rest} bytes that belong to none; it is corrupt.")
