"""`SegmentDecoder`: the fetches of one range of a segment as Arrow record batches with exactly the columns asked for.

A hot path: entries are opened one by one, their messages never. What of an entry lies outside the range, and keys outside the
hash sub-range, are left out here. Owns the size of batches; asks for nothing by itself but the first chunks of a message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from braid.errors import ProtocolError
from braid_spark import arrays
from braid_spark.arrays import Mask
from braid_spark.chunks import ChunkJoiner, is_chunk
from braid_spark.columns import Columns
from braid_spark.entries import Entry, EntryUnreadable, batch_of_one, entries_of, plain_payload
from braid_spark.hashing import Bytes, Numbers
from braid_spark.messages import Messages, pick, read_messages
from braid_spark.rows import Rows
from braid_spark.starts import find_starts

if TYPE_CHECKING:
    from braid.client.segment_reads import Fetched

__all__ = ["EntryUnreadable", "SegmentDecoder"]

BATCH_BYTES: Final = 2 << 20
"""Bytes of messages after which a record batch is made. (Spark takes batches of 1 to 4 MB best.)"""
_MAX_BATCH_BYTES: Final = 4 << 20
_RING: Final = 0xFFFF
_SPREAD: Final = 40503
"""An odd number that scatters successive indexes over the ring of hashes."""


class _Group:
    """Entries that become one record batch."""

    def __init__(self, fetched: memoryview) -> None:
        self._fetched = fetched
        self._parts: list[bytes | memoryview] = []
        self._is_copied = False
        self.entries: list[Entry] = []
        self.first_chunks: dict[int, tuple[int, int]] = {}
        """Where the first chunk is, by the number of the entry that is the last."""
        self.bounds: list[tuple[int, int]] = []
        """Where each entry's messages are in the bytes."""
        self.size = 0

    def add(self, entry: Entry, head: bytes, payload: bytes | memoryview) -> None:
        """Take the messages of an entry, `head` and `payload` one behind the other."""
        size = len(head) + len(payload)
        is_in_place = payload is entry.payload and not head
        if not is_in_place and not self._is_copied:
            self._copy()
        if self._is_copied:
            self._parts += (head, payload)
            self.bounds.append((self.size, self.size + size))
        else:
            self.bounds.append((entry.at, entry.at + size))
        self.entries.append(entry)
        self.size += size

    def _copy(self) -> None:
        """Something is not in the fetched bytes as it is: from now on the messages are put behind each other."""
        self._is_copied = True
        self._parts = [self._fetched[at:end] for at, end in self.bounds]
        at = 0
        for number, (begin, end) in enumerate(self.bounds):
            self.bounds[number] = (at, at + end - begin)
            at += end - begin

    def only(self, number: int) -> _Group:
        """One of its entries alone."""
        found = _Group(self.bytes())
        found.entries, found.bounds = [self.entries[number]], [self.bounds[number]]
        return found

    def bytes(self) -> memoryview:
        return memoryview(b"".join(self._parts)) if self._is_copied else self._fetched


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
        self._chunks = ChunkJoiner(topic, look_back, is_loss_fatal=is_loss_fatal)

    @property
    def lost(self) -> int:
        """Chunked messages left out because their first chunks are gone."""
        return self._chunks.lost

    def decode(self, fetched: Fetched) -> Iterator[pa.RecordBatch]:
        """The rows of the next fetch; raises EntryUnreadable, ChunksMissing or ValueUnreadable."""
        group = _Group(fetched.data)
        for entry in entries_of(self._topic, fetched):
            if entry.last_index < self._start or entry.last_index - entry.messages + 1 >= self._stop:
                continue
            self._open(entry, group)
            if group.size >= BATCH_BYTES:
                yield from self._batches(group)
                group = _Group(fetched.data)
        if group.entries:
            yield from self._batches(group)

    def _open(self, entry: Entry, group: _Group) -> None:
        payload: bytes | memoryview = entry.payload
        if is_chunk(entry.metadata):
            whole = self._chunks.take(entry)
            if whole is None:
                return
            payload = whole.payload
            group.first_chunks[len(group.entries)] = whole.first
        payload = plain_payload(entry, payload, self._max_bytes)
        group.add(entry, b"" if entry.is_batch else batch_of_one(entry.metadata, len(payload)), payload)

    def _batches(self, group: _Group) -> Iterator[pa.RecordBatch]:
        try:
            batch = self._batch(group)
        except ProtocolError as error:
            raise self._culprit(group).unreadable(error) from None
        if not batch.num_rows:
            return
        pieces = min(-(-batch.nbytes // _MAX_BATCH_BYTES), batch.num_rows)
        rows = -(-batch.num_rows // pieces)
        for at in range(0, batch.num_rows, rows):
            yield batch.slice(at, rows)

    def _culprit(self, group: _Group) -> Entry:
        """The entry that makes a group unreadable."""
        for number, entry in enumerate(group.entries):
            try:
                self._batch(group.only(number))
            except ProtocolError:
                return entry
        return group.entries[-1]

    def _batch(self, group: _Group) -> pa.RecordBatch:
        raw = group.bytes()
        data: Bytes = np.frombuffer(raw, np.uint8)
        entries = group.entries
        counts = np.array([entry.messages for entry in entries], np.int64)
        starts, ends = _bounds(group, data, raw)
        messages = read_messages(data, raw, starts, ends)
        entry_rows = np.repeat(np.arange(len(entries)), counts)
        firsts = np.array([entry.last_index + 1 for entry in entries], np.int64) - counts.cumsum()
        index = np.arange(len(starts), dtype=np.int64) + firsts[entry_rows]
        kept = self._kept(data, messages, index)
        if kept is not None:
            messages, index, entry_rows = pick(messages, kept), index[kept], entry_rows[kept]
        picked = None if kept is None else np.flatnonzero(kept)
        rows = Rows(
            self._topic,
            self._segment,
            data,
            messages,
            index,
            entries,
            entry_rows,
            self._partition,
            group.first_chunks,
            picked,
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


def _bounds(group: _Group, data: Bytes, raw: memoryview) -> tuple[Numbers, Numbers]:
    """Where the messages of all entries begin and end; raises ProtocolError."""
    counts = [entry.messages for entry in group.entries]
    starts = find_starts(data, raw, group.bounds, counts)
    ends = np.append(starts[1:], 0)
    ends[np.cumsum(counts) - 1] = [end for _, end in group.bounds]
    return starts, ends
