"""Chunked messages inside a range of a segment: puts the chunks together again.

A message belongs to the range that holds its last chunk, however the ranges were cut, so its first chunks may lie before it:
they are read once more through `look_back`, at most 10,000 indexes before the last one. Owns the chunks held in memory, which
are bounded (INV17): what is dropped to stay within the bound is read again when it is needed.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from braid.errors import BraidError, DataLost
from braid.wire.chunks import MAX_CHUNKS
from braid_spark.entries import Entry, read_entries

if TYPE_CHECKING:
    from braid.client.segment_reads import Fetched

log = logging.getLogger(__name__)

LOOK_BACK: Final = 10_000
"""Indexes before a last chunk among which its first ones are looked for."""
_MAX_HELD: Final = 64 << 20
"""Bytes of unfinished messages kept."""


class ChunksMissing(BraidError):
    """The first chunks of a message are not where they can be read."""


class Whole(NamedTuple):
    """A message put together: its payload (still compressed) and where its first chunk is."""

    payload: bytes
    first: tuple[int, int]


class _Open:
    __slots__ = ("first", "num_chunks", "parts", "size")

    def __init__(self, first: tuple[int, int], num_chunks: int) -> None:
        self.first = first
        self.num_chunks = num_chunks
        self.parts: list[bytes] = []
        self.size = 0


class ChunkJoiner:
    """Puts the chunked messages of one range together."""

    def __init__(self, topic: str, look_back: Callable[[int, int], Fetched] | None, *, is_loss_fatal: bool) -> None:
        self._topic = topic
        self._look_back = look_back
        self._is_loss_fatal = is_loss_fatal
        self._open: OrderedDict[str, _Open] = OrderedDict()
        self._held = 0
        self.lost = 0
        """Messages left out because their first chunks are gone."""

    def take(self, entry: Entry) -> Whole | None:
        """Take the next chunk: the message if this chunk is its last; raises ChunksMissing if its first ones are gone."""
        metadata = entry.metadata
        uuid, chunk_id, num_chunks = metadata.uuid, metadata.chunk_id, metadata.num_chunks_from_msg
        if not 0 <= chunk_id < num_chunks <= MAX_CHUNKS:
            log.warning("chunk %d of %d on %s is impossible and left out", chunk_id, num_chunks, self._topic)
            return None
        if chunk_id and uuid not in self._open:
            if chunk_id < num_chunks - 1:
                return None  # if the message is finished inside the range, all of it is looked for then
            self._restore(entry)
        return self._add(entry)

    def _add(self, entry: Entry) -> Whole | None:
        metadata = entry.metadata
        uuid, chunk_id = metadata.uuid, metadata.chunk_id
        if chunk_id == 0:
            self._drop(uuid)  # the producer began again
            self._open[uuid] = _Open((entry.ledger_id, entry.entry_id), metadata.num_chunks_from_msg)
        message = self._open.get(uuid)
        if message is None or chunk_id < len(message.parts):
            return None  # sent again, or never begun
        payload = bytes(entry.payload)
        message.parts.append(payload)
        message.size += len(payload)
        self._held += len(payload)
        is_last = chunk_id == message.num_chunks - 1
        if (
            chunk_id != len(message.parts) - 1
            or metadata.num_chunks_from_msg != message.num_chunks
            or (message.size != metadata.total_chunk_msg_size if is_last else message.size > metadata.total_chunk_msg_size)
        ):
            log.warning("chunks of message %s on %s do not fit together and are left out", uuid, self._topic)
            self._drop(uuid)
        elif is_last:
            self._drop(uuid)
            return Whole(b"".join(message.parts), message.first)
        while self._held > _MAX_HELD and len(self._open) > 1:
            self._drop(next(iter(self._open)))
        return None

    def _drop(self, uuid: str) -> None:
        message = self._open.pop(uuid, None)
        if message is not None:
            self._held -= message.size

    # What lies before the range.

    def _restore(self, last: Entry) -> None:
        """Read the chunks before a last one again."""
        floor = max(last.last_index - LOOK_BACK, 0)
        found: list[Entry] = []
        stop = last.last_index
        width = 64
        lost: BraidError | None = None
        while stop > floor and not (found and found[0].metadata.chunk_id == 0):
            start = max(stop - width, floor)
            try:
                found[:0] = self._chunks_between(last.metadata.uuid, start, stop)
            except DataLost as error:
                lost, floor = error, min(max(error.low, start + 1), stop)  # what is kept may be all that is needed
                continue
            except ChunksMissing as error:
                lost, floor = error, stop
                continue
            stop, width = start, width * 4
        begins = [at for at, entry in enumerate(found) if entry.metadata.chunk_id == 0]
        if not begins:
            if lost is not None:
                self._give_up(last, f"the segment does not hold them any more ({lost})", lost)
            elif floor:
                self._give_up(last, f"they are not among the {LOOK_BACK:,} messages before it", None)
            else:
                log.warning("message %s on %s has no first chunk and is left out", last.metadata.uuid, self._topic)
            return
        for entry in found[begins[-1] :]:
            self._add(entry)

    def _give_up(self, last: Entry, why: str, cause: BraidError | None) -> None:
        said = (
            f"The message at index {last.last_index} of {self._topic} was sent in {last.metadata.num_chunks_from_msg} chunks, "
            f"and its first ones cannot be read: {why}."
        )
        if self._is_loss_fatal:
            raise ChunksMissing(f"{said} Set failOnDataLoss=false to leave it out.") from cause
        self.lost += 1
        log.warning("%s It is left out.", said)

    def _chunks_between(self, uuid: str, start: int, stop: int) -> list[Entry]:
        if self._look_back is None:
            raise ChunksMissing("what is before the range cannot be read")
        found: list[Entry] = []
        while start < stop:
            fetched = self._look_back(start, stop)
            entries = read_entries(self._topic, fetched, start, stop)
            chunks = [entries.one(number) for number in entries.said.is_chunk.nonzero()[0].tolist()]
            found += [entry for entry in chunks if entry.metadata.uuid == uuid and entry.last_index < stop]
            if fetched.covered_to <= start:
                raise ChunksMissing(f"the range from index {start} on is not given out")
            start = fetched.covered_to
        return found
