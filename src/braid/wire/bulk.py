"""Answers with a payload, in SEND's shape: command, magic, CRC-32C, payload. Braid's own, for reading ranges in bulk.

Owns requests and answers of commands 1010 to 1017. The payload is never cut up here, and copied together only if it consists of
small pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from struct import Struct
from typing import Any, Final, TypeAlias

from google.protobuf.message import Message

from braid.errors import ProtocolError
from braid.wire import messages
from braid.wire.checksum import crc32c
from braid.wire.commands import encode
from braid.wire.entries import MAGIC_CHECKSUM
from braid.wire.types import CommandType

_CHECKED: Final = Struct(">HI")
_MAGIC: Final = MAGIC_CHECKSUM.to_bytes(2, "big")
CHECKSUM_SIZE: Final = _CHECKED.size
LARGE: Final = 1 << 15
"""Pieces of a payload of this size on average go to the socket as they are; smaller ones are cheaper to copy together."""

Piece: TypeAlias = bytes | memoryview


def bulk_head(kind: int, body: Message, payload: Sequence[Piece]) -> bytes:
    """Everything of the frame that stands in front of its payload."""
    plain = encode(kind, body)
    total = len(plain) - 4 + CHECKSUM_SIZE + sum(map(len, payload))
    checksum = 0
    for piece in payload:
        checksum = crc32c(piece, checksum)
    return b"".join((total.to_bytes(4, "big"), plain[4:], _CHECKED.pack(MAGIC_CHECKSUM, checksum)))


def bulk_payload(data: bytes | memoryview, start: int, end: int) -> memoryview | None:
    """The payload whose magic is at `start` and which ends at `end`; None if its checksum is wrong."""
    if end - start < CHECKSUM_SIZE or data[start : start + 2] != _MAGIC:
        raise ProtocolError("An answer came with a payload that has no checksum; the broker is broken.")
    payload = memoryview(data)[start + CHECKSUM_SIZE : end].toreadonly()
    return payload if crc32c(payload) == int.from_bytes(data[start + 2 : start + CHECKSUM_SIZE], "big") else None


# What clients ask.


def describe_segments(request_id: int, topics: Iterable[str]) -> bytes:
    """DESCRIBE_SEGMENTS: what these topics hold."""
    return encode(CommandType.DESCRIBE_SEGMENTS, messages.CommandDescribeSegments(request_id=request_id, topics=topics))


def pruned_segments(request_id: int, topic: str) -> bytes:
    """DESCRIBE_SEGMENTS: where the segments ended that a topic does not have any more."""
    return encode(CommandType.DESCRIBE_SEGMENTS, messages.CommandDescribeSegments(request_id=request_id, pruned_of=topic))


def index_at_time(request_id: int, topic: str, incarnation: str, timestamp_ms: int) -> bytes:
    """FIND_INDEX by time."""
    return encode(
        CommandType.FIND_INDEX,
        messages.CommandFindIndex(request_id=request_id, topic=topic, incarnation=incarnation, timestamp=timestamp_ms),
    )


def offset_for(
    request_id: int, topic: str, incarnation: str, start: int, max_messages: int | None, max_bytes: int | None
) -> bytes:
    """FIND_INDEX by size."""
    body = messages.CommandFindIndex(request_id=request_id, topic=topic, incarnation=incarnation, from_index=start)
    if max_messages is not None:
        body.max_messages = max_messages
    if max_bytes is not None:
        body.max_bytes = max_bytes
    return encode(CommandType.FIND_INDEX, body)


def fetch_entries(request_id: int, topic: str, incarnation: str, start: int, stop: int, max_bytes: int) -> bytes:
    """FETCH_ENTRIES: the entries that overlap `[start, stop)`, as many as fit."""
    return encode(
        CommandType.FETCH_ENTRIES,
        messages.CommandFetchEntries(
            request_id=request_id,
            topic=topic,
            incarnation=incarnation,
            from_index=start,
            to_index=stop,
            max_bytes=max_bytes,
        ),
    )


def move_cursor(request_id: int, topic: str, incarnation: str, subscription: str, index: int) -> bytes:
    """MOVE_CURSOR: everything below `index` is read."""
    return encode(
        CommandType.MOVE_CURSOR,
        messages.CommandMoveCursor(
            request_id=request_id, topic=topic, incarnation=incarnation, subscription=subscription, index=index
        ),
    )


# What brokers answer.


def fetched(
    request_id: int,
    covered_to: int,
    last_index: Sequence[int],
    ledger_id: Sequence[int],
    entry_id: Sequence[int],
    append_ms: Sequence[int],
    bodies: Sequence[Piece],
) -> list[Piece]:
    """FETCH_ENTRIES_RESPONSE: the frame in pieces, of which all but the first hold the entries."""
    sizes = list(map(len, bodies))
    payload = bodies if sum(sizes) >= LARGE * len(bodies) else [b"".join(bodies)]
    body = messages.CommandFetchEntriesResponse(
        request_id=request_id,
        covered_to=covered_to,
        last_index=last_index,
        ledger_id=ledger_id,
        entry_id=entry_id,
        append_time=append_ms,
        size=sizes,
    )
    return [bulk_head(CommandType.FETCH_ENTRIES_RESPONSE, body, payload), *payload]


def check_fetched(body: Any, payload: Piece) -> None:
    """Raise ProtocolError unless the lists of an answer fit its payload."""
    counts = {len(body.last_index), len(body.ledger_id), len(body.entry_id), len(body.append_time), len(body.size)}
    if len(counts) != 1 or sum(body.size) != len(payload):
        raise ProtocolError("The lists of a bulk answer do not fit its payload; the broker is broken.")
