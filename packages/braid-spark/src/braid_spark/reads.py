"""`ClusterReads`: what the planner asks, answered by the cluster.

Owns how often brokers are asked. Spark polls an idle source about ninety times a second; `refresh` begins a poll and paces it,
so that every answer is younger than the poll that gets it and brokers are asked a bounded number of times a second. Within a
poll each state is asked for once, those of the poll before all at the same time. Plans nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence

from braid.client.segment_reads import SegmentState, TopicView
from braid.errors import NotReady, TopicNotFound
from braid_spark.connections import Link

log = logging.getLogger(__name__)

POLL_SECONDS = 0.05
"""The least time between two polls that ask brokers."""
LIST_SECONDS = 1.0
"""How old the list of topics that match a pattern may be."""


class ClusterReads:
    """The planner's `Reads` over a link. Used by one thread."""

    def __init__(self, link: Link, names: Sequence[str], pattern: str | None = None) -> None:
        self._link = link
        self._names = list(names)
        self._pattern = pattern
        self._listed_at = -LIST_SECONDS
        self._polled_at = -POLL_SECONDS
        self._views: dict[str, TopicView] = {}
        self._states: dict[str, SegmentState | None] = {}
        self._asked: set[str] = set()
        """Segments whose state this poll wanted: the next one gets them all at once."""

    def refresh(self) -> None:
        """Begin a poll: forget what the one before was told. Waits if that was only just."""
        left = self._polled_at + POLL_SECONDS - time.monotonic()
        if left > 0:
            time.sleep(left)
        self._polled_at = time.monotonic()
        self._views.clear()
        self._states.clear()
        wanted, self._asked = sorted(self._asked), set()
        if wanted:
            self._ask(wanted)

    def topics(self) -> list[str]:
        """Names of the topics to read, now."""
        pattern = self._pattern
        if pattern is not None and time.monotonic() >= self._listed_at + LIST_SECONDS:
            self._names = self._link.run(lambda: self._link.reads.topics_matching(pattern))
            self._listed_at = time.monotonic()
        return self._names

    def view(self, topic: str) -> TopicView:
        """The segments of a topic; raises TopicNotFound, of one that the list still has NotReady: the next list tells."""
        view = self._views.get(topic)
        if view is None:
            try:
                view = self._views[topic] = self._link.run(lambda: self._link.reads.topic(topic))
            except TopicNotFound:
                if self._pattern is None:
                    raise
                self._listed_at = -LIST_SECONDS
                raise NotReady(f"{topic} was deleted just now, or is being made. Try again.") from None
        return view

    def states(self, topic: str, ids: Iterable[int]) -> dict[int, SegmentState]:
        """How far each of these segments reaches; those that are gone are left out."""
        segments = self.view(topic).segments
        physical = {number: segments[number].topic for number in ids if number in segments}
        unknown = [name for name in physical.values() if name not in self._states]
        if unknown:
            self._ask(unknown)
        self._asked.update(physical.values())
        found = ((number, self._states[name]) for number, name in physical.items())
        return {number: state for number, state in found if state is not None}

    def pruned_ends(self, topic: str) -> dict[int, int]:
        """Of segments that the topic does not have any more: one above the index of the last message, as far as it is known."""
        told = self._link.run(lambda: self._link.reads.pruned(topic))
        if told.incarnation not in ("", self.view(topic).incarnation):
            raise NotReady(f"{topic} was deleted and created again just now. Try again.")
        return {number: end.index for number, end in told.ends.items()}

    def offset_for(self, topic: str, segment: int, start: int, max_messages: int | None, max_bytes: int | None) -> int:
        """How far a reader gets from `start` within both limits."""
        name, incarnation = self._place(topic, segment)
        return self._link.run(
            lambda: self._link.reads.offset_for(name, incarnation, start, max_messages=max_messages, max_bytes=max_bytes)
        )

    def index_at_time(self, topic: str, segment: int, timestamp_ms: int) -> int:
        """The first index at or after a time."""
        name, incarnation = self._place(topic, segment)
        return self._link.run(lambda: self._link.reads.index_at_time(name, incarnation, timestamp_ms))

    def move_cursor(self, topic: str, segment: int, incarnation: str, subscription: str, index: int) -> None:
        """Let the subscription begin at `index` of a segment; one that is gone needs no cursor."""
        found = self.view(topic).segments.get(segment)
        if found is not None:
            try:
                self._link.run(lambda: self._link.reads.move_cursor(found.topic, incarnation, subscription, index))
            except TopicNotFound:  # the layout at hand is older than the segment's end
                log.info("segment %d of %s needs no cursor any more: it is gone", segment, topic)

    def _ask(self, names: Sequence[str]) -> None:
        told = self._link.run(lambda: self._link.reads.states(names))
        self._states.update({name: told.get(name) for name in names})

    def _place(self, topic: str, segment: int) -> tuple[str, str]:
        """A segment's physical name and incarnation."""
        view = self.view(topic)
        name = view.segments[segment].topic
        state = self._states.get(name)
        return name, view.incarnation if state is None else state.incarnation
