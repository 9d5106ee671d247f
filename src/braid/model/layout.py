"""`SegmentLayout`: one version of a scalable topic's DAG, and what split, merge and prune make of it.

Immutable: every change returns a new layout with a higher epoch. The active ranges always cover every hash exactly once, ids
are never used twice. Knows nothing of topics, brokers or storage. Pure.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from types import MappingProxyType

import msgspec

from braid.errors import InvalidArgument, NotFound, PreconditionFailed
from braid.model.hashing import masked, murmur3_x86_32
from braid.model.hashranges import MAX_HASH, HashRange, initial_ranges
from braid.model.routing import Routing, ring_hash
from braid.model.segments import NOT_SEALED, SegmentInfo, SegmentState


class SegmentLayout:
    """A snapshot of the DAG. Equal if epoch, counter, routing and segments are."""

    def __init__(
        self, epoch: int, next_segment_id: int, segments: Mapping[int, SegmentInfo], routing: Routing = Routing.HIGH16
    ) -> None:
        self.epoch = epoch
        self.next_segment_id = next_segment_id
        self.all_segments: Mapping[int, SegmentInfo] = MappingProxyType(dict(segments))
        self.routing = routing

    @classmethod
    def initial(cls, count: int, now_ms: int, routing: Routing = Routing.HIGH16) -> SegmentLayout:
        """The layout of a new topic; raises InvalidArgument for an impossible count."""
        segments = {
            number: SegmentInfo(segment_id=number, hash_range=hashes, created_at_ms=now_ms)
            for number, hashes in enumerate(initial_ranges(count))
        }
        return cls(0, count, segments, routing)

    @classmethod
    def synthetic(cls, topics: list[str]) -> SegmentLayout:
        """The layout shown for a regular topic: one active segment per partition, routed modulo their number."""
        count = len(topics)
        ranges = initial_ranges(count) if count <= MAX_HASH + 1 else [HashRange(n % 65536, n % 65536) for n in range(count)]
        segments = {
            number: SegmentInfo(segment_id=number, hash_range=ranges[number], legacy_topic_name=topic)
            for number, topic in enumerate(topics)
        }
        return cls(0, count, segments, Routing.MOD_N)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SegmentLayout) and (self.epoch, self.next_segment_id, self.routing, self.all_segments) == (
            other.epoch,
            other.next_segment_id,
            other.routing,
            other.all_segments,
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"SegmentLayout(epoch={self.epoch}, active={sorted(self.active_segments)}, all={len(self.all_segments)})"

    @cached_property
    def active_segments(self) -> Mapping[int, SegmentInfo]:
        """Those that are written to, by id."""
        return MappingProxyType({number: each for number, each in self.all_segments.items() if each.is_active})

    @cached_property
    def active_in_order(self) -> tuple[SegmentInfo, ...]:
        """The active segments by range; under MOD_N by id."""
        if self.routing is Routing.MOD_N:
            return tuple(sorted(self.active_segments.values(), key=lambda each: each.segment_id))
        return tuple(sorted(self.active_segments.values(), key=lambda each: each.hash_range))

    @cached_property
    def _starts(self) -> list[int]:
        return [each.hash_range.start for each in self.active_in_order]

    def find_active_segment(self, hash16: int) -> SegmentInfo:
        """The one active segment that covers a hash; raises NotFound if none does, which no valid layout has."""
        at = bisect_right(self._starts, hash16) - 1
        if at >= 0 and (found := self.active_in_order[at]).hash_range.covers(hash16):
            return found
        raise NotFound(f"No active segment covers the hash {hash16:04x} in the layout of epoch {self.epoch}.")

    def segment_of_key(self, key: str) -> SegmentInfo:
        """Where messages with this key go now."""
        if self.routing is Routing.MOD_N:
            return self.active_in_order[masked(murmur3_x86_32(key.encode())) % len(self.active_in_order)]
        return self.find_active_segment(ring_hash(self.routing, key))

    def segment(self, segment_id: int) -> SegmentInfo:
        """A segment by id; raises NotFound."""
        found = self.all_segments.get(segment_id)
        if found is None:
            raise NotFound(f"The topic has no segment {segment_id}; its segments are {_listed(self.all_segments)}.")
        return found

    # The DAG.

    def ancestors(self, segment_id: int) -> set[int]:
        """Every segment that is still in the layout and from which this one came, itself left out."""
        return self._reach(segment_id, lambda each: each.parent_ids)

    def descendants(self, segment_id: int) -> set[int]:
        """Every segment that came from this one, itself left out."""
        return self._reach(segment_id, lambda each: each.child_ids)

    def lineage(self, segment_id: int) -> set[int]:
        """Ancestors and descendants and the segment itself; raises NotFound."""
        self.segment(segment_id)
        return self.ancestors(segment_id) | self.descendants(segment_id) | {segment_id}

    def _reach(self, segment_id: int, edges: Callable[[SegmentInfo], tuple[int, ...]]) -> set[int]:
        found: set[int] = set()
        waiting = [segment_id]
        while waiting:
            each = self.all_segments.get(waiting.pop())
            for neighbour in edges(each) if each is not None else ():
                if neighbour in self.all_segments and neighbour not in found:
                    found.add(neighbour)
                    waiting.append(neighbour)
        return found

    # Changes.

    def split(self, segment_id: int, now_ms: int, *, sealed_ms: int | None = None) -> SegmentLayout:
        """The layout in which two children halve an active segment. The parent was sealed at `sealed_ms`, if given.
        Raises NotFound, PreconditionFailed."""
        parent = self._active(segment_id, "split")
        if parent.hash_range.size < 2:
            raise PreconditionFailed(f"Segment {segment_id} covers the one hash {parent.hash_range} and cannot be split.")
        return self._replace((parent,), parent.hash_range.split(), now_ms, sealed_ms)

    def merge(self, first_id: int, second_id: int, now_ms: int, *, sealed_ms: int | None = None) -> SegmentLayout:
        """The layout in which one child joins two adjacent active segments, otherwise as `split`."""
        if first_id == second_id:
            raise PreconditionFailed(f"Segment {first_id} cannot be merged with itself; give two neighbours.")
        first, second = self._active(first_id, "merge"), self._active(second_id, "merge")
        if not first.hash_range.is_adjacent(second.hash_range):
            raise PreconditionFailed(
                f"Segments {first_id} {first.hash_range} and {second_id} {second.hash_range} are no neighbours; "
                "merge two whose ranges touch."
            )
        parents = (first, second) if first.hash_range < second.hash_range else (second, first)
        return self._replace(parents, (first.hash_range.merge(second.hash_range),), now_ms, sealed_ms)

    def prune(self, segment_ids: Iterable[int]) -> SegmentLayout:
        """The layout without these sealed segments and the edges to them; the epoch grows by one for each (scalable.md 3.4)."""
        gone = set(segment_ids)
        for segment_id in gone:
            if self.segment(segment_id).is_active:
                raise PreconditionFailed(f"Segment {segment_id} is active and cannot be pruned.")
        kept = {}
        for number, each in self.all_segments.items():
            if number in gone:
                continue
            if not gone.isdisjoint(each.parent_ids) or not gone.isdisjoint(each.child_ids):
                each = msgspec.structs.replace(
                    each,
                    parent_ids=tuple(number for number in each.parent_ids if number not in gone),
                    child_ids=tuple(number for number in each.child_ids if number not in gone),
                )
            kept[number] = each
        return SegmentLayout(self.epoch + len(gone), self.next_segment_id, kept, self.routing)

    def _active(self, segment_id: int, what: str) -> SegmentInfo:
        if self.routing is Routing.MOD_N:
            raise PreconditionFailed(f"A regular topic has no segments to {what}; migrate it first.")
        found = self.segment(segment_id)
        if not found.is_active:
            raise PreconditionFailed(
                f"Segment {segment_id} was sealed at epoch {found.sealed_at_epoch}; {what} one of the active ones, "
                f"{_listed(self.active_segments)}."
            )
        return found

    def _replace(
        self, parents: tuple[SegmentInfo, ...], ranges: Iterable[HashRange], now_ms: int, sealed_ms: int | None
    ) -> SegmentLayout:
        epoch = self.epoch + 1
        parent_ids = tuple(each.segment_id for each in parents)
        children = [
            SegmentInfo(
                segment_id=self.next_segment_id + number,
                hash_range=hashes,
                parent_ids=parent_ids,
                created_at_epoch=epoch,
                created_at_ms=now_ms,
            )
            for number, hashes in enumerate(ranges)
        ]
        child_ids = tuple(each.segment_id for each in children)
        segments = dict(self.all_segments)
        segments.update(
            {each.segment_id: each.sealed(child_ids, epoch, now_ms if sealed_ms is None else sealed_ms) for each in parents}
        )
        segments.update({each.segment_id: each for each in children})
        return SegmentLayout(epoch, self.next_segment_id + len(children), segments, self.routing)

    def check(self) -> None:
        """Raise InvalidArgument, naming the fault, unless this is a valid layout (C11)."""
        if self.routing is not Routing.MOD_N:
            expected = 0
            for each in self.active_in_order:
                if each.hash_range.start != expected:
                    raise InvalidArgument(f"The active segments leave a gap or overlap at hash {expected:04x}.")
                expected = each.hash_range.end + 1
            if expected != MAX_HASH + 1:
                raise InvalidArgument(f"The active segments end at hash {expected:04x} instead of {MAX_HASH + 1:04x}.")
        for number, each in self.all_segments.items():
            if number != each.segment_id or number >= self.next_segment_id or number < 0:
                raise InvalidArgument(f"Segment {number} has a wrong id; the next new one is {self.next_segment_id}.")
            if (each.state is SegmentState.SEALED) != (each.sealed_at_epoch != NOT_SEALED):
                raise InvalidArgument(f"Segment {number} is {each.state} but was sealed at epoch {each.sealed_at_epoch}.")
            if any(parent >= number for parent in each.parent_ids):
                raise InvalidArgument(f"Segment {number} is older than one of its parents {_listed(each.parent_ids)}.")


def _listed(ids: Iterable[int]) -> str:
    found = sorted(ids)
    return ", ".join(map(str, found[:10])) + (f" and {len(found) - 10} more" if len(found) > 10 else "")
