"""`RowBlock`: a block of messages as a plain list, so that sending blocks can be tested without columns."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from braid.client.blocks import NO_KEY
from braid.model.hashing import masked, murmur3_x86_32
from braid.model.routing import Routing, ring_hash
from braid.wire import messages as pb
from braid.wire.batch import encode_batch

Row = tuple[str | None, bytes]


class RowBlock:
    """Messages with their keys."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = list(rows)
        self._sizes = [len(_encoded([row])) for row in self.rows]

    @property
    def count(self) -> int:
        return len(self.rows)

    @property
    def size(self) -> int:
        return sum(self._sizes)

    @property
    def largest(self) -> int:
        return max(self._sizes, default=0)

    def spread(self, routing: Routing, starts: Sequence[int]) -> list[tuple[int, RowBlock]]:
        found: dict[int, list[Row]] = {}
        for row in self.rows:
            found.setdefault(_place(row[0], routing, starts), []).append(row)
        return [(place, RowBlock(rows)) for place, rows in found.items()]

    def cut(self, max_size: int, max_count: int) -> list[RowBlock]:
        found: list[list[Row]] = []
        room = 0
        for row, size in zip(self.rows, self._sizes, strict=True):
            if not found or size > room or len(found[-1]) == max_count:
                found.append([])
                room = max_size
            found[-1].append(row)
            room -= size
        return [RowBlock(rows) for rows in found]

    def encode(self) -> bytes:
        return _encoded(self.rows)


def _encoded(rows: Sequence[Row]) -> bytes:
    return encode_batch((pb.SingleMessageMetadata(partition_key=key), value) for key, value in rows)


def _place(key: str | None, routing: Routing, starts: Sequence[int]) -> int:
    if key is None:
        return NO_KEY
    if routing is Routing.MOD_N:
        return masked(murmur3_x86_32(key.encode())) % len(starts)
    return bisect_right(starts, ring_hash(routing, key)) - 1
