"""`TopicPlan`: one topic in one micro-batch: which segments may be read, how far, and what the offset is then. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from braid.errors import IncarnationMismatch, NotReady
from braid_spark.losses import Losses
from braid_spark.offsets import Frontier, TopicOffset
from braid_spark.ports import Reads, StateLike, ViewLike, is_finished


class TopicCap(msgspec.Struct, frozen=True):
    """Of one topic: segments from `next` on are left out, and those in `stops` end there."""

    next: int
    stops: dict[int, int]

    def top(self, segment: int, stable: int) -> int:
        """How far a segment may be read."""
        return 0 if segment >= self.next else min(stable, self.stops.get(segment, stable))


NO_CAP: Final = TopicCap(next=1 << 63, stops={})


class Lane:
    """A segment that this batch may read: `at` moves from its start to at most `top`."""

    __slots__ = ("at", "segment", "state", "top", "topic")

    def __init__(self, topic: str, segment: int, at: int, top: int, state: StateLike) -> None:
        self.topic = topic
        self.segment = segment
        self.at = at
        self.top = top
        self.state = state

    @property
    def waiting_bytes(self) -> int:
        """About how many bytes wait, at least 1."""
        stored = max(1, self.state.end - self.state.low)
        return max(1, self.state.stored_bytes * (self.top - self.at) // stored)


class TopicPlan:
    """Made from the frontier at the batch's start. Only segments that may be read are asked for, so the cost follows what is
    not read yet and not what is kept."""

    def __init__(
        self,
        topic: str,
        before: Frontier,
        view: ViewLike,
        reads: Reads,
        losses: Losses,
        ends: dict[int, int],
        *,
        cap: TopicCap,
        is_ordered: bool,
    ) -> None:
        """`ends` holds ends of segments that will never grow and is kept up to date."""
        self.topic = topic
        self.lanes: list[Lane] = []
        self._before = before
        self._view = view
        self._reads = reads
        self._losses = losses
        self._ends = ends
        self._cap = cap
        self._next = max(before.next, min(cap.next, view.next_id))
        self._waiting = before.segs | dict.fromkeys(range(before.next, self._next), 0)
        """Every segment that is not fully read, with its position at the start."""
        self._skipped: dict[int, int] = {}
        self._finished: set[int] = set()
        """Those without anything left to read."""
        self._incs = dict(before.incs)
        self._leave_gone()
        for number in [number for number in ends if number not in self._waiting]:
            del ends[number]
        self._open(is_ordered=is_ordered)

    @property
    def is_moved(self) -> bool:
        """Whether the batch reads anything, or leaves something lost behind."""
        return any(lane.at != self._waiting[lane.segment] for lane in self.lanes)

    def offset(self) -> TopicOffset:
        """The topic's part of the offset at the end of the batch."""
        positions = self._waiting | {lane.segment: lane.at for lane in self.lanes}
        drained = {number: positions[number] for number in self._finished}
        drained |= {lane.segment: lane.at for lane in self.lanes if is_finished(lane.state, lane.at)}
        return TopicOffset(
            inc=self._view.incarnation,
            next=self._next,
            segs={number: at for number, at in positions.items() if number not in drained},
            incs={number: inc for number, inc in self._incs.items() if number in positions},
            drained=drained,
            skipped=self._skipped,
        )

    def _leave_gone(self) -> None:
        """Leave out what the layout does not have any more. A layout older than the offset does not say what is gone."""
        self._lose(number for number in self._waiting if number < self._view.next_id and number not in self._view.segments)

    def _lose(self, numbers: Iterable[int]) -> None:
        """These are not stored any more: nothing is lost of one that was read to where it ended, all else is."""
        gone = sorted(numbers)
        news = [
            number
            for number in gone
            if number not in self._ends and not self._losses.is_counted(self.topic, number, self._waiting[number])
        ]
        known = self._reads.pruned_ends(self.topic) if news else {}
        self._ends.update({number: known[number] for number in news if number in known})
        for number in gone:
            at, end = self._waiting[number], self._ends.get(number)
            if end is not None and at >= end:
                self._finished.add(number)
            else:
                self._losses.gone(self.topic, number, at, end)
                del self._waiting[number]

    def _open(self, *, is_ordered: bool) -> None:
        """Find the segments that may be read: those of which no ancestor has anything left. One that turns out to have nothing
        left lets its children in, with whom this begins again."""
        asked: set[int] = set()
        while True:
            for number, at in self._waiting.items():
                if at >= self._ends.get(number, at + 1):
                    self._finished.add(number)
            barred = self._descendants(self._waiting.keys() - self._finished) if is_ordered else set()
            shown = {number for number in self._waiting if number in self._view.segments}
            wanted = sorted(shown - self._finished - barred - asked)
            if not wanted:
                return
            asked.update(wanted)
            states = self._reads.states(self.topic, wanted)
            self._lose(number for number in wanted if number not in states)
            for number in wanted:
                if number in states:
                    self._add(number, states[number])

    def _add(self, number: int, state: StateLike) -> None:
        at = self._waiting[number]
        self._check(number, at, state)
        if at > state.end:  # an owner that has lost the segment may know less of it, for a while
            raise NotReady(
                f"Segment {number} of {self.topic} was read to index {at}, says the offset, but it ends at {state.end}. If "
                "that stays so, the checkpoint is damaged or the topic was restored from an older copy; start with a new "
                "checkpoint."
            )
        if state.low > at:
            self._losses.trimmed(self.topic, number, at, state.low)
            self._skipped[number] = at = state.low
        elif is_finished(state, at):
            self._finished.add(number)
            self._ends[number] = state.end
            return
        self.lanes.append(Lane(self.topic, number, at, max(at, self._cap.top(number, state.stable)), state))

    def _check(self, number: int, at: int, state: StateLike) -> None:
        """Another log under the same name is never read on from a position in the old one."""
        noted = self._before.incs.get(number, self._before.inc if at > 0 else state.incarnation)
        if state.incarnation != noted:
            raise IncarnationMismatch(
                f"Segment {number} of {self.topic} was deleted and created again since the offset was written (incarnation "
                f"{noted or 'none'}, now {state.incarnation}). Start with a new checkpoint to read the new one."
            )
        if state.incarnation != self._view.incarnation:
            self._incs[number] = state.incarnation

    def _descendants(self, numbers: Iterable[int]) -> set[int]:
        found: set[int] = set()
        waiting = list(numbers)
        while waiting:
            segment = self._view.segments.get(waiting.pop())
            for child in segment.children if segment is not None else ():
                if child not in found:
                    found.add(child)
                    waiting.append(child)
        return found
