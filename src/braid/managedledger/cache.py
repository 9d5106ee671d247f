"""`EntryCache`: the newest entries of all logs of a broker, bounded in bytes (INV17).

Entries live in chunks: runs of consecutive entries of one ledger. A log's chunks are contiguous as well, so a read is a few
slices; eviction takes whole chunks, oldest first over all logs. Costs one step per commit group, not per entry.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict

from braid.managedledger.api import Entry
from braid.model.positions import Position

CHUNK_ENTRIES = 128
CHUNK_BYTES = 128 << 10
ENTRY_OVERHEAD = 200
"""What an entry costs in memory beside its body, roughly."""


class Chunk:
    """A run of consecutive entries of one ledger."""

    __slots__ = ("entries", "first", "log", "size")

    def __init__(self, log: LogCache, entries: list[Entry], size: int) -> None:
        self.log = log
        self.entries = entries
        self.first = Position(entries[0].ledger_id, entries[0].entry_id)
        self.size = size


class EntryCache:
    """Budget and order of eviction for the caches of all logs."""

    __slots__ = ("_chunks", "max_bytes", "size")

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.size = 0
        self._chunks: OrderedDict[Chunk, None] = OrderedDict()

    def log(self) -> LogCache:
        """A cache for one log."""
        return LogCache(self)

    def _entered(self, chunk: Chunk) -> None:
        self._chunks[chunk] = None

    def _grown(self, size: int) -> None:
        self.size += size
        while self.size > self.max_bytes and self._chunks:
            chunk, _ = self._chunks.popitem(last=False)
            self.size -= chunk.size
            chunk.log.chunks.remove(chunk)  # the oldest chunk of its log: found at once

    def _left(self, chunk: Chunk) -> None:
        if self._chunks.pop(chunk, self) is None:
            self.size -= chunk.size


class LogCache:
    """The cached tail of one log: contiguous up to its last confirmed entry, or empty."""

    __slots__ = ("_cache", "chunks")

    def __init__(self, cache: EntryCache) -> None:
        self._cache = cache
        self.chunks: list[Chunk] = []

    def add(self, entries: list[Entry], size: int, *, follows: bool) -> None:
        """New entries at the end of the log, all of one ledger, `size` body bytes in all.

        `follows`: nothing lies between the newest cached entry and these; otherwise what is here is dropped first."""
        if not follows:
            self.clear()
        size += ENTRY_OVERHEAD * len(entries)
        if size > self._cache.max_bytes:
            self.clear()
            return
        chunk = self.chunks[-1] if self.chunks else None
        if (
            chunk is not None
            and len(chunk.entries) < CHUNK_ENTRIES
            and chunk.size < CHUNK_BYTES
            and chunk.first[0] == entries[0].ledger_id
        ):
            chunk.entries += entries
            chunk.size += size
        else:
            chunk = Chunk(self, entries, size)
            self.chunks.append(chunk)
            self._cache._entered(chunk)
        self._cache._grown(size)

    def read(self, start: Position, max_entries: int, max_bytes: int) -> list[Entry] | None:
        """Entries from `start`, which must exist in the log, up to the bounds and at least one; None if it is not cached."""
        chunks = self.chunks
        if not chunks:
            return None
        i = len(chunks) - 1
        if chunks[i].first > start:  # not the newest chunk, where readers that keep up are
            i = bisect_right(chunks, start, key=_first) - 1
            if i < 0:
                return None
        chunk = chunks[i]
        offset = start[1] - chunk.first[1]
        if chunk.first[0] != start[0] or offset >= len(chunk.entries):
            return None
        found = chunk.entries[offset : offset + max_entries]
        while len(found) < max_entries and (i := i + 1) < len(chunks):
            found += chunks[i].entries[: max_entries - len(found)]
        return within(found, max_bytes)

    def clear(self) -> None:
        """Forget everything."""
        for chunk in self.chunks:
            self._cache._left(chunk)
        self.chunks.clear()


def _first(chunk: Chunk) -> Position:
    return chunk.first


def within(entries: list[Entry], max_bytes: int) -> list[Entry]:
    """The longest prefix whose bodies fit `max_bytes`, but at least one entry."""
    for i, entry in enumerate(entries):
        max_bytes -= len(entry.body)
        if max_bytes < 0:
            return entries[: max(i, 1)]
    return entries
