"""Batches: the payload of an entry whose metadata has `num_messages_in_batch`, as single messages.

Owns the layout `size, SingleMessageMetadata, payload` and its bounds. Works on plain payloads: compression and encryption are
around it. Only clients open batches; a broker never does.
"""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct
from typing import Final

from google.protobuf.message import DecodeError

from braid.errors import ProtocolError
from braid.wire.messages import SingleMessageMetadata

MAX_BATCH_MESSAGES: Final = 1_000_000
"""More messages than any batch of a legal size holds: each takes at least six bytes."""
_SIZE: Final = Struct(">I")
_unpack_size: Final = _SIZE.unpack_from
_parse: Final = SingleMessageMetadata.FromString


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
    return [(metadata, body) for metadata, _size, body in read_batch(payload, count)]


def read_batch(payload: bytes, count: int) -> list[tuple[SingleMessageMetadata, int, bytes]]:
    """The same, with the number of bytes of each metadata."""
    if not 0 < count <= MAX_BATCH_MESSAGES:
        raise ProtocolError(f"A batch of {count} messages was announced; 1 to {MAX_BATCH_MESSAGES} are possible.")
    messages: list[tuple[SingleMessageMetadata, int, bytes]] = []
    at, end = 0, len(payload)
    for number in range(count):
        start = at + 4
        body = start + _unpack_size(payload, at)[0] if start <= end else end + 1
        if body > end:
            raise ProtocolError(f"A batch of {end} bytes ends inside message {number} of {count}; it is corrupt.")
        try:
            metadata = _parse(payload[start:body])
        except DecodeError:
            raise ProtocolError(f"The metadata of message {number} in a batch is not valid protobuf; it is corrupt.") from None
        size = metadata.payload_size  # the only required field: asked for only where it may be missing
        at = body + size
        if size < 0 or at > end or (size == 0 and not metadata.IsInitialized()):
            raise ProtocolError(f"Message {number} of {count} in a batch does not say a size that fits; the batch is corrupt.")
        messages.append((metadata, body - start, payload[body:at]))
    if at != end:
        raise ProtocolError(f"A batch of {count} messages is followed by {end - at} bytes that belong to none; it is corrupt.")
    return messages
