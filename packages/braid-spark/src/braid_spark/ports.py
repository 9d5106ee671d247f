"""What the planner asks of the cluster, and the shapes it looks at in the answers. Types only; the SDK's structs fit them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol


class SegmentLike(Protocol):
    """What is looked at in `braid.client.segment_reads.SegmentView`."""

    @property
    def topic(self) -> str: ...
    @property
    def hash_start(self) -> int: ...
    @property
    def hash_end(self) -> int: ...
    @property
    def parents(self) -> tuple[int, ...]: ...
    @property
    def children(self) -> tuple[int, ...]: ...
    @property
    def is_sealed(self) -> bool: ...


class ViewLike(Protocol):
    """What is looked at in `braid.client.segment_reads.TopicView`."""

    @property
    def incarnation(self) -> str: ...
    @property
    def next_id(self) -> int: ...
    @property
    def segments(self) -> Mapping[int, SegmentLike]: ...


class StateLike(Protocol):
    """What is looked at in `braid.client.segment_reads.SegmentState`."""

    @property
    def incarnation(self) -> str: ...
    @property
    def low(self) -> int: ...
    @property
    def stable(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def is_sealed(self) -> bool: ...
    @property
    def stored_bytes(self) -> int: ...


class Reads(Protocol):
    """The cluster. Calls block; what fails for a moment is tried again in there."""

    def topics(self) -> list[str]:
        """Names of the topics to read, now."""

    def view(self, topic: str) -> ViewLike:
        """The segments of a topic; raises TopicNotFound."""

    def states(self, topic: str, ids: Iterable[int]) -> Mapping[int, StateLike]:
        """How far each of these segments reaches; those that are gone are left out."""

    def pruned_ends(self, topic: str) -> Mapping[int, int]:
        """Of segments that the topic does not have any more: one above the index of the last message, as far as it is known."""

    def offset_for(self, topic: str, segment: int, start: int, max_messages: int | None, max_bytes: int | None) -> int:
        """How far a reader gets from `start` within both limits."""

    def index_at_time(self, topic: str, segment: int, timestamp_ms: int) -> int:
        """The first index at or after a time."""


def is_legacy(segment: SegmentLike) -> bool:
    """Whether the segment is a partition of a regular topic, perhaps of one that became a scalable topic since."""
    return segment.topic.startswith("persistent://")


def is_finished(state: StateLike, position: int) -> bool:
    """Whether a segment was read to an end that will never move."""
    return state.is_sealed and state.stable >= state.end and position >= state.end
