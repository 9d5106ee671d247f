"""`SegmentDecoder`: the fetches of one range of a segment as Arrow record batches with exactly the columns asked for.

A hot path: neither entries nor messages are looked at one by one, but for entries that are compressed or chunks. What of an
entry lies outside the range, and keys outside the hash sub-range, are left out here. Owns the size of batches; asks for nothing
by itself but the first chunks of a message, and the schemas that Avro values were written with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import pyarrow as pa

from braid.errors import ProtocolError
from braid_spark import arrays
from braid_spark.avro_values import WriterSchema
from braid_spark.chunks import ChunkJoiner
from braid_spark.columns import Columns
from braid_spark.entries import Entries, EntryUnreadable, read_entries
from braid_spark.fields import Mask
from braid_spark.hashing import Bytes, Numbers
from braid_spark.messages import Messages, interleave, pick, read_messages
from braid_spark.rows import Rows
from braid_spark.starts import find_starts

if TYPE_CHECKING:
    from braid.client.segment_reads import Fetched

__all__ = ["EntryUnreadable", "SegmentDecoder"]

BATCH_BYTES: Final = 4 << 20
"""Bytes of messages after which a record batch is made: those of a fetch, mostly. (Spark takes batches of 1 to 4 MB best.)"""
_MAX_BATCH_BYTES: Final = 4 << 20
_RING: Final = 0xFFFF
_SPREAD: Final = 40503
"""An odd number that scatters successive indexes over the ring of hashes."""


class _Opened(NamedTuple):
    """Entries that become one record batch, with payloads as they were before they were compressed or cut into chunks."""

    data: Bytes
    entries: Entries
    first_chunks: dict[int, tuple[int, int]]
    """Where the first chunk is, by the number of the entry that is the last."""

    def part(self, first: int, behind: int) -> _Opened:
        chunks = {number - first: each for number, each in self.first_chunks.items() if first <= number < behind}
        return _Opened(self.data, self.entries.part(first, behind), chunks)


class SegmentDecoder:
    """Decodes the messages `[start, stop)` of one segment, fetch by fetch in order."""

    def __init__(
        self,
        columns: Columns,
        *,
        topic: str,
        segment: int,
        start: int,
        stop: int,
        hash_range: tuple[int, int] | None = None,
        partition: int = -1,
        look_back: Callable[[int, int], Fetched] | None = None,
        writer_schema: WriterSchema | None = None,
        is_loss_fatal: bool = True,
        max_message_bytes: int = 128 << 20,
    ) -> None:
        self._columns = columns
        self._topic = topic
        self._segment = segment
        self._start = start
        self._stop = stop
        self._hash_range = hash_range
        self._partition = partition
        self._max_bytes = max_message_bytes
        self._writer_schema = writer_schema
        self._chunks = ChunkJoiner(topic, look_back, is_loss_fatal=is_loss_fatal)

    @property
    def lost(self) -> int:
        """Chunked messages left out because their first chunks are gone."""
        return self._chunks.lost

    def decode(self, fetched: Fetched) -> Iterator[pa.RecordBatch]:
        """The rows of the next fetch; raises EntryUnreadable, ChunksMissing or ValueUnreadable."""
        entries = read_entries(self._topic, fetched, self._start, self._stop)
        for first, behind in _cuts(entries.said.plain_size):
            opened = self._opened(entries.part(first, behind))
            if len(opened.entries):
                yield from self._batches(opened)

    def _opened(self, entries: Entries) -> _Opened:
        if entries.said.is_plain.all():
            return _Opened(np.frombuffer(entries.raw, np.uint8), entries, {})
        # Something cannot be used as it is: the entries are put behind each other anew, those between as they are.
        raw, places = entries.raw, entries.places
        parts: list[bytes | memoryview] = []
        by, sizes = np.zeros(len(entries), np.int64), places.end - places.payload_at
        is_kept = np.ones(len(entries), np.bool_)
        chunks: dict[int, tuple[int, int]] = {}
        done, at = 0, 0
        for number in [*np.flatnonzero(~entries.said.is_plain).tolist(), len(entries)]:
            if done < number:
                begin, end = int(places.metadata_at[done]), int(places.end[number - 1])
                parts.append(raw[begin:end])
                by[done:number] = at - begin
                at += end - begin
            done = number + 1
            if number == len(entries):
                break
            payload = self._payload(entries, number, chunks)
            if payload is None:
                is_kept[number] = False
                continue
            begin, body = int(places.metadata_at[number]), int(places.payload_at[number])
            parts += (raw[begin:body], payload)
            by[number], sizes[number] = at - begin, len(payload)
            at += body - begin + len(payload)
        joined = memoryview(b"".join(parts))
        numbers = is_kept.cumsum() - 1
        return _Opened(
            np.frombuffer(joined, np.uint8),
            entries.moved(joined, by, sizes).only(is_kept),
            {int(numbers[number]): first for number, first in chunks.items()},
        )

    def _payload(self, entries: Entries, number: int, first_chunks: dict[int, tuple[int, int]]) -> bytes | memoryview | None:
        """Of an entry that is compressed or a chunk; None if a message is not complete with it."""
        entry = entries.one(number)
        payload: bytes | memoryview = entry.payload
        if entries.said.is_chunk[number]:
            whole = self._chunks.take(entry)
            if whole is None:
                return None
            payload, first_chunks[number] = whole
        return entry.plain(payload, self._max_bytes)

    def _batches(self, opened: _Opened) -> Iterator[pa.RecordBatch]:
        try:
            batch = self._batch(opened)
        except ProtocolError as error:
            raise self._culprit(opened).unreadable(0, error) from None
        if not batch.num_rows:
            return
        pieces = min(-(-batch.nbytes // _MAX_BATCH_BYTES), batch.num_rows)
        rows = -(-batch.num_rows // pieces)
        for at in range(0, batch.num_rows, rows):
            yield batch.slice(at, rows)

    def _culprit(self, opened: _Opened) -> Entries:
        """The first entry that makes these unreadable."""
        while len(opened.entries) > 1:
            middle = len(opened.entries) // 2
            try:
                self._batch(opened.part(0, middle))
            except ProtocolError:
                opened = opened.part(0, middle)
            else:
                opened = opened.part(middle, len(opened.entries))
        return opened.entries

    def _batch(self, opened: _Opened) -> pa.RecordBatch:
        data, entries = opened.data, opened.entries
        messages = _messages(data, entries)
        counts = entries.said.held
        entry_rows = np.repeat(np.arange(len(entries)), counts)
        firsts = entries.places.last_index + 1 - counts.cumsum()
        index = np.arange(len(entry_rows), dtype=np.int64) + firsts[entry_rows]
        kept = self._kept(data, messages, index)
        if kept is not None:
            messages, index, entry_rows = pick(messages, kept), index[kept], entry_rows[kept]
        rows = Rows(
            topic=self._topic,
            segment=self._segment,
            data=data,
            messages=messages,
            index=index,
            entries=entries,
            entry=entry_rows,
            partition=self._partition,
            first_chunks=opened.first_chunks,
            kept=None if kept is None else np.flatnonzero(kept),
            writer_schema=self._writer_schema,
        )
        return rows.record_batch(self._columns)

    def _kept(self, data: Bytes, messages: Messages, index: Numbers) -> Mask | None:
        """Which messages are rows; None if all are."""
        kept = ~messages.is_compacted
        if index[0] < self._start or index[-1] >= self._stop:
            kept &= (index >= self._start) & (index < self._stop)
        if self._hash_range is not None:
            first, last = self._hash_range
            keys = arrays.keys(data, messages, pa.binary())
            hashes = np.where(messages.key_size >= 0, arrays.key_hashes(keys), index * _SPREAD & _RING)
            kept &= (hashes >= first) & (hashes <= last)
        return None if kept.all() else kept


def _cuts(sizes: Numbers) -> Iterator[tuple[int, int]]:
    """Numbers of entries between which record batches are made."""
    ends = sizes.cumsum()
    first = 0
    while first < len(sizes):
        before = int(ends[first - 1]) if first else 0
        behind = min(int(np.searchsorted(ends, before + BATCH_BYTES)) + 1, len(sizes))
        yield first, behind
        first = behind


def _messages(data: Bytes, entries: Entries) -> Messages:
    """All messages of the entries in order; raises ProtocolError."""
    is_batch = entries.said.is_batch
    if not is_batch.any():
        return entries.messages
    places = entries.places
    bounds = list(zip(places.payload_at[is_batch].tolist(), places.end[is_batch].tolist(), strict=True))
    counts = entries.said.held[is_batch]
    starts = find_starts(data, entries.raw, bounds, counts.tolist())
    ends = np.append(starts[1:], 0)
    ends[counts.cumsum() - 1] = [end for _, end in bounds]
    batched = read_messages(data, entries.raw, starts, ends)
    if is_batch.all():
        return batched
    return interleave(pick(entries.messages, ~is_batch), batched, np.repeat(is_batch, entries.said.held))
