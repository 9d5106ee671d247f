"""Chunked messages: one large message sent as several entries.

Owns how a payload is cut and how a consumer puts it together again. The assembler is bounded in messages and in bytes (INV17):
when a bound is hit, the oldest unfinished message is given up and its chunks are named, so that the caller can drop them.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, NamedTuple

from braid.errors import ProtocolError
from braid.model.positions import Position
from braid.wire.messages import MessageMetadata

MAX_CHUNKS: Final = 100_000


def chunk_sizes(total: int, chunk_size: int) -> list[int]:
    """The sizes of the chunks a payload of `total` bytes is cut into; one chunk of size 0 for an empty payload."""
    if chunk_size < 1:
        raise ValueError(f"A chunk of {chunk_size} bytes holds nothing; raise the maximum message size.")
    full, rest = divmod(total, chunk_size)
    return [chunk_size] * full + ([rest] if rest or not full else [])


def mark_chunk(metadata: MessageMetadata, uuid: str, chunk_id: int, num_chunks: int, total_size: int) -> None:
    """Write into a chunk's metadata which chunk of which message it is."""
    metadata.uuid = uuid
    metadata.chunk_id = chunk_id
    metadata.num_chunks_from_msg = num_chunks
    metadata.total_chunk_msg_size = total_size


def is_chunk(metadata: MessageMetadata) -> bool:
    """Whether an entry is one of several chunks of a message."""
    return metadata.HasField("chunk_id") and metadata.num_chunks_from_msg > 1


class Assembled(NamedTuple):
    """A whole message: its payload (still compressed) and where its chunks are, first to last."""

    payload: bytes
    positions: list[Position]


class Abandoned(NamedTuple):
    """An unfinished message that was given up, or a chunk that belongs to none: where its chunks are."""

    uuid: str
    positions: list[Position]


class _Open:
    __slots__ = ("num_chunks", "parts", "positions", "size", "total_size")

    def __init__(self, num_chunks: int, total_size: int) -> None:
        self.num_chunks = num_chunks
        self.total_size = total_size
        self.parts: list[bytes] = []
        self.positions: list[Position] = []
        self.size = 0


class ChunkAssembler:
    """Puts the chunks of one consumer's messages together again."""

    __slots__ = ("_bytes", "_max_bytes", "_max_messages", "_open")

    def __init__(self, max_messages: int, max_bytes: int) -> None:
        self._open: OrderedDict[str, _Open] = OrderedDict()
        self._bytes = 0
        self._max_messages = max_messages
        self._max_bytes = max_bytes

    def __len__(self) -> int:
        """The number of unfinished messages."""
        return len(self._open)

    @property
    def size(self) -> int:
        """Bytes held in unfinished messages."""
        return self._bytes

    def add(self, metadata: MessageMetadata, payload: bytes, position: Position) -> tuple[Assembled | None, list[Abandoned]]:
        """Take one chunk: the message if this chunk completes it, and what had to be given up.

        A chunk at a known position is ignored, a copy of a known chunk is abandoned, and one without its predecessor is
        abandoned with its message. Raises ProtocolError for impossible numbers.
        """
        uuid, chunk_id, num_chunks = metadata.uuid, metadata.chunk_id, metadata.num_chunks_from_msg
        if not 0 <= chunk_id < num_chunks <= MAX_CHUNKS or metadata.total_chunk_msg_size < 0:
            raise ProtocolError(f"Chunk {chunk_id} of {num_chunks} of message {uuid!r} is impossible; the producer is broken.")
        abandoned: list[Abandoned] = []
        message = self._open.get(uuid)
        if message is not None and chunk_id < len(message.positions):
            if message.positions[chunk_id] == position:
                return None, abandoned  # delivered again
            if chunk_id > 0:
                return None, [Abandoned(uuid, [position])]  # sent again
        if chunk_id == 0:
            if message is not None:  # the producer began again
                abandoned.append(self._drop(uuid))
            message = self._open[uuid] = _Open(num_chunks, metadata.total_chunk_msg_size)
        elif message is None:
            return None, [Abandoned(uuid, [position])]
        message.positions.append(position)
        message.parts.append(payload)
        message.size += len(payload)
        self._bytes += len(payload)
        if not self._fits(message, chunk_id, num_chunks):
            abandoned.append(self._drop(uuid))
        elif len(message.parts) == num_chunks:
            self._drop(uuid)
            return Assembled(b"".join(message.parts), message.positions), abandoned
        while len(self._open) > self._max_messages or self._bytes > self._max_bytes:
            abandoned.append(self._drop(next(iter(self._open))))
        return None, abandoned

    def _fits(self, message: _Open, chunk_id: int, num_chunks: int) -> bool:
        """Whether the newest part is the next chunk of this message and the sizes can come out right."""
        is_next = chunk_id == len(message.parts) - 1 and num_chunks == message.num_chunks
        is_last = chunk_id == num_chunks - 1
        sizes_agree = message.size == message.total_size if is_last else message.size <= message.total_size
        return is_next and sizes_agree and message.total_size <= self._max_bytes

    def clear(self) -> None:
        """Forget all unfinished messages, as after a seek."""
        self._open.clear()
        self._bytes = 0

    def _drop(self, uuid: str) -> Abandoned:
        message = self._open.pop(uuid)
        self._bytes -= message.size
        return Abandoned(uuid, message.positions)
