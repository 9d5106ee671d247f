"""`Planner`: decides what each micro-batch of a source reads, from the offset before, the layout and what is stable.

Owns the order of segments: with `ordering=key` a segment is read only in batches after the one that finished everything it came
from, so the messages of a key come in order. An offset never lies below the one before and never above what is stable, and what
lies between two offsets depends on these two alone, so a batch that is run again reads the same. Asks the cluster through
`Reads` and does nothing else; positions are the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from braid.errors import NotReady
from braid_spark.frontiers import NO_CAP, Lane, TopicCap, TopicPlan
from braid_spark.losses import Losses
from braid_spark.offsets import EARLIEST, LATEST, BadOffset, Frontier, Offset, Start, TopicOffset, canonical_json, read_offset
from braid_spark.options import Options
from braid_spark.pieces import Piece, cut, shares
from braid_spark.ports import Reads
from braid_spark.starting import check_incarnation, resolve_end, resolve_start

__all__ = ["Cap", "Limits", "Piece", "Planner", "Reads", "TopicCap"]


class Limits(msgspec.Struct, frozen=True):
    """What one micro-batch may hold; `Limits()` is all there is."""

    max_messages: int | None = None
    max_bytes: int | None = None
    min_messages: int | None = None
    max_delay_ms: int = 0

    @classmethod
    def of(cls, options: Options) -> Limits:
        """Those the user set."""
        return cls(
            options.max_messages_per_trigger,
            options.max_bytes_per_trigger,
            options.min_messages_per_trigger,
            options.max_trigger_delay_ms,
        )


class Cap(msgspec.Struct, frozen=True):
    """Up to where a query reads that is to end (AvailableNow)."""

    topics: dict[str, TopicCap]


class Planner:
    """Of one query. `clock` gives seconds; it is only looked at for the longest wait for a minimum."""

    def __init__(self, options: Options, clock: Callable[[], float]) -> None:
        self._options = options
        self._clock = clock
        self._losses = Losses(is_fatal=options.fail_on_data_loss)
        self._bases: dict[str, Frontier] = {}
        """Where topics begin that no offset names yet; found once, so that it does not move while nothing is read."""
        self._base_of: str | None = None
        """The symbolic offset that was resolved."""
        self._ends: dict[str, dict[int, int]] = {}
        """Of each topic, ends of segments that were read to their ends and will never grow."""
        self._released: tuple[str, float] | None = None
        """The last start from which a batch was planned, and when."""

    def initial(self) -> dict[str, Any]:
        """The symbolic offset of a query without a checkpoint. Raises ConfigError for options that no stream can have."""
        self._options.refuse_in_stream()
        return (self._options.starting or Start(word=LATEST)).document()

    def latest(self, start: dict[str, Any], limit: Limits, reads: Reads, *, until: Cap | None = None) -> dict[str, Any]:
        """The end of the next batch: `start` itself if there is nothing to read. The start is resolved here if nobody did.

        Raises BadOffset, IncarnationMismatch, DataLost."""
        offset = read_offset(start)
        names = [name for name in reads.topics() if until is None or name in until.topics]
        begin, base = self._begin(offset, names, reads)
        plans = {name: self._plan(name, frontier, reads, until) for name, frontier in begin.items()}
        lanes = [lane for plan in plans.values() for lane in plan.lanes if lane.top > lane.at]
        is_first = isinstance(offset, Start)
        if is_first or until is not None or self._is_enough(canonical_json(start), lanes, limit):
            _advance(lanes, limit, reads)
        if not is_first and not any(plan.is_moved for plan in plans.values()):
            return start
        self._released = canonical_json(start), self._clock()
        return Offset(topics={name: plan.offset() for name, plan in plans.items()}, base=base).document()

    def cap(self, reads: Reads) -> Cap:
        """What a query reads up to that is to end: all that is stable now."""
        found: dict[str, TopicCap] = {}
        for name in reads.topics():
            view = reads.view(name)
            active = [number for number, segment in view.segments.items() if not segment.is_sealed]
            states = reads.states(name, active)
            stops = {number: states[number].stable if number in states else 0 for number in active}
            found[name] = TopicCap(next=view.next_id, stops=stops)
        return Cap(topics=found)

    def partitions(self, start: dict[str, Any], end: dict[str, Any], reads: Reads | None) -> list[Piece]:
        """What lies between two offsets, parents before children. Without `reads` the pieces have no physical names.

        Raises BadOffset, IncarnationMismatch, DataLost, and NotReady while the known layout is older than the offsets."""
        if canonical_json(start) == canonical_json(end):
            return []
        first, last = read_offset(start), read_offset(end)
        if isinstance(last, Start):
            raise BadOffset(f"The batch ends at the symbolic offset {canonical_json(end)}, which says no position.")
        ranges = []
        for name in sorted(last.topics):
            before = last.base.get(name) if isinstance(first, Start) or name not in first.topics else first.topics[name]
            if before is None:
                raise BadOffset(
                    f"The offset {canonical_json(end)} does not say where {name} begins. The checkpoint is damaged or of "
                    "another query; start with a new one."
                )
            if reads is not None and self._options.topics_pattern is not None and name not in reads.topics():
                for piece in _between(name, before, last.topics[name]):
                    self._losses.gone(name, piece.segment, piece.start, piece.stop)
                continue
            view = None if reads is None else reads.view(name)
            if reads is not None and view is not None:
                check_incarnation(name, last.topics[name].inc, view, reads)
            for piece in _between(name, before, last.topics[name]):
                segment = None if view is None else view.segments.get(piece.segment)
                if view is not None and segment is None:
                    if piece.segment >= view.next_id:  # as a layout that is older than the offset does not know it either
                        raise NotReady(
                            f"Segment {piece.segment} of {name}, which the batch reads, is not in the layout that is known at "
                            "the moment. Try again."
                        )
                    self._losses.gone(name, piece.segment, piece.start, piece.stop)
                    continue
                physical = "" if segment is None else segment.topic
                ranges.append((msgspec.structs.replace(piece, physical=physical), segment))
        return cut(ranges, self._options)

    def batch(self, reads: Reads) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start and end of a batch read. Raises ConfigError, IncarnationMismatch, DataLost."""
        starting = self._options.starting or Start(word=EARLIEST)
        first: dict[str, TopicOffset] = {}
        last: dict[str, TopicOffset] = {}
        for name in reads.topics():
            begin = resolve_start(starting, name, reads, self._losses)
            first[name] = TopicOffset(inc=begin.inc, next=begin.next, segs=begin.segs, incs=begin.incs)
            plan = TopicPlan(name, begin, reads.view(name), reads, self._losses, {}, cap=NO_CAP, is_ordered=False)
            stops = resolve_end(self._options.ending, name, {lane.segment: lane.at for lane in plan.lanes}, reads)
            for lane in plan.lanes:
                lane.at = max(lane.at, min(lane.top, stops[lane.segment]))
            last[name] = plan.offset()
        return Offset(topics=first).document(), Offset(topics=last).document()

    def lag(self, end: dict[str, Any], reads: Reads) -> dict[str, Any]:
        """How much waits behind an offset: in all, in each segment, and what was lost. Never raises for what is lost."""
        offset = read_offset(end)
        known = {} if isinstance(offset, Start) else offset.topics
        topics: dict[str, dict[str, int]] = {}
        for name in sorted(known.keys() & set(reads.topics())):
            frontier = known[name]
            positions = dict.fromkeys(range(frontier.next, reads.view(name).next_id), 0) | frontier.segs
            states = reads.states(name, sorted(positions))
            topics[name] = {
                str(number): max(0, states[number].stable - max(positions[number], states[number].low))
                for number in sorted(states)
            }
        total = sum(sum(lags.values()) for lags in topics.values())
        return {"v": 1, "lag": total, "lost": self._losses.document(), "topics": topics}

    def _begin(self, offset: Offset | Start, names: list[str], reads: Reads) -> tuple[dict[str, Frontier], dict[str, Frontier]]:
        """Where each topic begins in this batch, and those of them that the start does not say."""
        if isinstance(offset, Start):
            key = canonical_json(offset.document())
            if self._base_of != key:
                self._bases = {name: resolve_start(offset, name, reads, self._losses) for name in names}
                self._base_of = key
            known: dict[str, Frontier] = {}
        else:
            known = self._known(offset, reads)
        for name in [name for name in self._bases if name in known]:
            del self._bases[name]
        for name in names:
            if name not in known and name not in self._bases:
                self._bases[name] = resolve_start(Start(word=EARLIEST), name, reads, self._losses)
        base = {name: self._bases[name] for name in names if name not in known}
        return known | base, base

    def _known(self, offset: Offset, reads: Reads) -> dict[str, Frontier]:
        """The topics of an offset; one that is not read any more is another query's, or was deleted."""
        known: dict[str, Frontier] = {}
        current = set(reads.topics())
        for name, topic in offset.topics.items():
            if name in current:
                known[name] = topic
            elif self._options.topics_pattern is None:
                raise BadOffset(
                    f"The checkpoint is of a query that reads {name}; this one reads {', '.join(sorted(current))}. Start with "
                    "a new checkpoint, or read that topic too."
                )
            else:
                for number, at in topic.segs.items():
                    self._losses.gone(name, number, at)
        return known

    def _plan(self, name: str, frontier: Frontier, reads: Reads, until: Cap | None) -> TopicPlan:
        view = reads.view(name)
        check_incarnation(name, frontier.inc, view, reads)
        cap = NO_CAP
        if until is not None:  # a topic that was not there when the query began to end stays where it is
            cap = until.topics.get(name, TopicCap(next=0, stops={}))
        return TopicPlan(
            name,
            frontier,
            view,
            reads,
            self._losses,
            self._ends.setdefault(name, {}),
            cap=cap,
            is_ordered=self._options.ordering == "key",
        )

    def _is_enough(self, start: str, lanes: list[Lane], limit: Limits) -> bool:
        """Whether so much waits that a batch is worth it, or the wait was long enough."""
        if limit.min_messages is None or sum(lane.top - lane.at for lane in lanes) >= limit.min_messages:
            return True
        if self._released is None or self._released[0] == start:
            return True
        return (self._clock() - self._released[1]) * 1000 >= limit.max_delay_ms


def _advance(lanes: list[Lane], limit: Limits, reads: Reads) -> None:
    """Move the lanes as far as the limits allow."""
    messages = [lane.top - lane.at for lane in lanes]
    if limit.max_messages is not None:
        messages = shares(limit.max_messages, messages)
    if limit.max_bytes is None:
        for lane, count in zip(lanes, messages, strict=True):
            lane.at += count
        return
    for lane, count, size in zip(lanes, messages, shares(limit.max_bytes, [lane.waiting_bytes for lane in lanes]), strict=True):
        stop = lane.at + count
        if lane.state.stored_bytes > size:
            found = reads.offset_for(lane.topic, lane.segment, lane.at, count, size)
            stop = max(lane.at, min(stop, found))
        lane.at = stop


def _between(topic: str, before: Frontier, after: TopicOffset) -> list[Piece]:
    """The ranges of a topic between two offsets, by segment id, which is an order in which parents come first."""
    found: list[Piece] = []
    stops: Mapping[int, int] = after.segs | after.drained
    for number in sorted(stops):
        start = before.segs.get(number, 0)
        if number < before.next and number not in before.segs:
            raise BadOffset(
                f"Segment {number} of {topic} was read to its end before the batch, and is in its end again. The checkpoint is "
                "damaged; restore it from a copy, or start with a new one."
            )
        start = max(start, after.skipped.get(number, 0))
        if stops[number] < start:
            raise BadOffset(
                f"The batch would end at index {stops[number]} of segment {number} of {topic}, before its start at {start}. "
                "The checkpoint is damaged; restore it from a copy, or start with a new one."
            )
        if stops[number] > start:
            incarnation = after.incs.get(number, after.inc)
            found.append(
                Piece(topic=topic, incarnation=incarnation, segment=number, physical="", start=start, stop=stops[number])
            )
    return found
