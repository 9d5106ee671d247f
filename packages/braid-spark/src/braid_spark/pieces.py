"""`Piece`: what one task reads, and how a range of a segment is cut into several of them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from braid.model.hashranges import MAX_HASH
from braid_spark.options import Options
from braid_spark.ports import SegmentLike, is_legacy


class Piece(msgspec.Struct, frozen=True):
    """The messages [start, stop) of a segment, or those among them whose key's hash lies in a range, both ends included.

    The hash ranges of a segment's pieces together cover all of 0 to 0xffff, so that every message is in one of them whatever
    its hash, also one without a key."""

    topic: str
    incarnation: str
    segment: int
    physical: str
    start: int
    stop: int
    hash_start: int | None = None
    hash_end: int | None = None


def shares(budget: int, sizes: Sequence[int]) -> list[int]:
    """The budget, shared in proportion to the sizes: at least 1 each, at most the size, else exactly the budget in all."""
    total, count = sum(sizes), len(sizes)
    if budget >= total:
        return list(sizes)
    if budget <= count:
        return [min(1, size) for size in sizes]
    spare, weight = budget - count, total - count
    wholes = [spare * (size - 1) // weight for size in sizes]
    by_rest = sorted(range(count), key=lambda at: -(spare * (sizes[at] - 1) % weight))
    for at in by_rest[: spare - sum(wholes)]:
        wholes[at] += 1
    return [1 + whole for whole in wholes]


def cut(ranges: Sequence[tuple[Piece, SegmentLike | None]], options: Options) -> list[Piece]:
    """The pieces of a batch, in the order of `ranges`. By position only if the order of keys does not matter."""
    sizes = [piece.stop - piece.start for piece, _segment in ranges]
    counts = [options.key_split] * len(ranges)
    if options.ordering == "none" and options.max_messages_per_partition is not None:
        counts = [-(-size // options.max_messages_per_partition) for size in sizes]
    if sum(counts) < options.min_partitions:
        counts = [max(pair) for pair in zip(counts, shares(options.min_partitions, sizes), strict=True)]
    is_by_position = options.ordering == "none" and options.key_split == 1
    found: list[Piece] = []
    for (piece, segment), count in zip(ranges, counts, strict=True):
        found += _by_position(piece, count) if is_by_position else _by_hash(piece, segment, count)
    return found


def _by_position(piece: Piece, count: int) -> list[Piece]:
    size = piece.stop - piece.start
    count = min(count, size)
    bounds = [piece.start + size * number // count for number in range(count + 1)]
    return [msgspec.structs.replace(piece, start=start, stop=stop) for start, stop in pairwise(bounds)]


def _by_hash(piece: Piece, segment: SegmentLike | None, count: int) -> list[Piece]:
    """Cut the segment's own range of hashes evenly; a regular topic's partition has keys of all hashes."""
    if segment is None or count == 1:
        return [piece]
    first, last = (0, MAX_HASH) if is_legacy(segment) else (segment.hash_start, segment.hash_end)
    width = last - first + 1
    count = min(count, width, piece.stop - piece.start)
    starts = [0, *(first + width * number // count for number in range(1, count))]
    ends = [*(start - 1 for start in starts[1:]), MAX_HASH]
    if count == 1:
        return [piece]
    return [msgspec.structs.replace(piece, hash_start=start, hash_end=end) for start, end in zip(starts, ends, strict=True)]
