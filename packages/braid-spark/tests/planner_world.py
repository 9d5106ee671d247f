"""A cluster in memory for tests of the planner: topics whose segments split, merge, are trimmed and pruned, and in which open
transactions hold the stable index back. Counts what it is asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from copy import copy
from random import Random
from typing import Any

import msgspec

from braid.errors import TopicNotFound
from braid_spark.offsets import parse_position
from braid_spark.options import Options, parse
from braid_spark.pieces import Piece

TOPIC = "topic://public/default/orders"
MAX_HASH = 0xFFFF


def make_options(start: str = "earliest", **more: Any) -> Options:
    """Options of a query on the one topic; `more` are fields of them."""
    options = parse({"service.url": "pulsar://localhost:6650", "topic": TOPIC})
    return msgspec.structs.replace(options, starting=parse_position(start, "startingOffsets"), **more)


class Sent(msgspec.Struct, frozen=True):
    """A message: its number in the whole world is also the time it was sent at."""

    number: int
    hash16: int | None
    size: int = 10


class View(msgspec.Struct, frozen=True):
    topic: str
    incarnation: str
    next_id: int
    segments: dict[int, Segment]


class State(msgspec.Struct, frozen=True):
    incarnation: str
    low: int
    stable: int
    end: int
    is_sealed: bool
    stored_bytes: int


class Segment:
    """A segment and its log."""

    def __init__(self, topic: str, incarnation: str, hashes: tuple[int, int], parents: tuple[int, ...] = ()) -> None:
        self.topic = topic
        self.incarnation = incarnation
        self.hash_start, self.hash_end = hashes
        self.parents = parents
        self.children: tuple[int, ...] = ()
        self.is_sealed = False
        self.sent: list[Sent] = []
        self.size = 0
        self.low = 0
        self.open_at: int | None = None
        """Index of the first message of an open transaction."""

    @property
    def stable(self) -> int:
        return len(self.sent) if self.open_at is None else self.open_at

    def state(self) -> State:
        return State(self.incarnation, self.low, self.stable, len(self.sent), self.is_sealed, self.size)


class Topic:
    """The segments of one topic. `layouts` are never changed by a prune of the past: `segments` holds what is kept."""

    def __init__(self, name: str, count: int = 1, incarnation: str = "inc-1") -> None:
        self.name = name
        self.incarnation = incarnation
        self.segments: dict[int, Segment] = {}
        self.everything: dict[int, Segment] = {}
        """With those that were pruned."""
        self.pruned_ends: dict[int, int] = {}
        """Where those ended, as far as somebody noted it."""
        width = (MAX_HASH + 1) // count
        for number in range(count):
            end = MAX_HASH if number == count - 1 else (number + 1) * width - 1
            self._create((number * width, end))

    def _create(self, hashes: tuple[int, int], parents: tuple[int, ...] = ()) -> int:
        number = len(self.everything)
        physical = f"{self.name}/{number}".replace("topic://", "segment://")
        self.segments[number] = self.everything[number] = Segment(physical, self.incarnation, hashes, parents)
        return number

    @property
    def active(self) -> list[int]:
        return [number for number, each in self.segments.items() if not each.is_sealed]

    def split(self, number: int) -> None:
        parent = self.segments[number]
        middle = (parent.hash_start + parent.hash_end) // 2
        self._replace((number,), [(parent.hash_start, middle), (middle + 1, parent.hash_end)])

    def merge(self, first: int, second: int) -> None:
        hashes = self.segments[first].hash_start, self.segments[second].hash_end
        self._replace((first, second), [hashes])

    def prune(self, number: int) -> None:
        """Remove a sealed segment as a leader does: noting its end, cutting the edges to it."""
        self.pruned_ends[number] = len(self.segments.pop(number).sent)
        for each in self.segments.values():
            each.parents = tuple(parent for parent in each.parents if parent != number)

    def _replace(self, parents: tuple[int, ...], ranges: list[tuple[int, int]]) -> None:
        children = tuple(self._create(each, parents) for each in ranges)
        for number in parents:
            self.segments[number].children = children
            self.segments[number].is_sealed = True


class World:
    """Topics by name; plays the planner's `Reads`."""

    def __init__(self, *topics: Topic) -> None:
        self.by_name = {topic.name: topic for topic in topics}
        self.count = 0
        """Messages sent so far, and the time."""
        self.calls: Counter[str] = Counter()
        """What was asked, and under `ids` of how many segments."""

    # What the planner asks.

    def topics(self) -> list[str]:
        return list(self.by_name)

    def view(self, topic: str) -> View:
        self.calls["view"] += 1
        found = self.by_name.get(topic)
        if found is None:
            raise TopicNotFound(f"There is no topic {topic}.")
        return View(topic, found.incarnation, len(found.everything), dict(found.segments))

    def states(self, topic: str, ids: Iterable[int]) -> dict[int, State]:
        wanted = list(ids)
        self.calls["states"] += 1
        self.calls["ids"] += len(wanted)
        segments = self.by_name[topic].segments
        return {number: segments[number].state() for number in wanted if number in segments}

    def pruned_ends(self, topic: str) -> dict[int, int]:
        self.calls["pruned_ends"] += 1
        return dict(self.by_name[topic].pruned_ends)

    def offset_for(self, topic: str, segment: int, start: int, max_messages: int | None, max_bytes: int | None) -> int:
        self.calls["offset_for"] += 1
        found = self.by_name[topic].segments[segment]
        stop = found.stable if max_messages is None else min(found.stable, start + max_messages)
        left = max_bytes
        for index in range(start, stop):
            if left is not None:
                left -= found.sent[index].size
                if left < 0:
                    return max(index, start + 1)
        return stop

    def index_at_time(self, topic: str, segment: int, timestamp_ms: int) -> int:
        self.calls["index_at_time"] += 1
        found = self.by_name[topic].segments[segment]
        return next(
            (at for at, each in enumerate(found.sent) if each.number >= timestamp_ms and at >= found.low), len(found.sent)
        )

    # What happens.

    def send(self, hash16: int | None, *, topic: str = TOPIC, size: int = 10) -> None:
        """A message without a hash goes anywhere."""
        found = self.by_name[topic]
        active = found.active
        number = next(
            (
                each
                for each in active
                if hash16 is not None and found.segments[each].hash_start <= hash16 <= found.segments[each].hash_end
            ),
            active[self.count % len(active)],
        )
        found.segments[number].sent.append(Sent(self.count, hash16, size))
        found.segments[number].size += size
        self.count += 1

    def read(self, piece: Piece) -> list[Sent]:
        """What a task reads of a piece: rows without a key are spread by their index."""
        found = self.by_name[piece.topic].everything[piece.segment]
        assert piece.physical in ("", found.topic)
        assert piece.incarnation == found.incarnation
        assert found.low <= piece.start < piece.stop <= found.stable
        rows = []
        for index in range(piece.start, piece.stop):
            each = found.sent[index]
            place = index & MAX_HASH if each.hash16 is None else each.hash16
            if piece.hash_start is None or piece.hash_end is None or piece.hash_start <= place <= piece.hash_end:
                rows.append(each)
        return rows

    def all_sent(self, topic: str = TOPIC) -> list[Sent]:
        return [each for segment in self.by_name[topic].everything.values() for each in segment.sent]

    # At random.

    def disturb(
        self, random: Random, position: dict[int, int] | None, next_id: int, topic: str = TOPIC, *, may_step_back: bool = False
    ) -> None:
        """One thing that may happen: messages, a split or merge, a transaction that opens or ends, retention of what was read
        (`position`: of each segment not fully read below `next_id`; None: nothing was)."""
        found = self.by_name[topic]
        active = found.active
        what = random.randrange(9)
        if what < 3:
            for _ in range(random.randrange(1, 30)):
                self.send(None if random.random() < 0.1 else random.choice(HASHES), topic=topic, size=random.randrange(1, 50))
        elif what == 3 and len(found.everything) < 40:
            wide = [each for each in active if found.segments[each].hash_end > found.segments[each].hash_start]
            found.split(random.choice(wide))
        elif what == 4 and len(active) > 1 and len(found.everything) < 40:
            ordered = sorted(active, key=lambda each: found.segments[each].hash_start)
            at = random.randrange(len(ordered) - 1)
            found.merge(ordered[at], ordered[at + 1])
        elif what == 5:
            each = found.segments[random.choice(active)]
            if each.open_at is None:
                each.open_at = random.randint(each.low, len(each.sent)) if may_step_back else len(each.sent)
        elif what == 6:
            for each in found.segments.values():
                if random.random() < 0.7:
                    each.open_at = None
        elif what == 7 and position is not None:
            for number, each in found.segments.items():
                done = position.get(number, len(each.sent) if number < next_id else 0)
                each.low = max(each.low, random.randint(0, min(done, each.stable)))
        elif what == 8 and position is not None:
            self.prune(topic, position, next_id)

    def prune(self, topic: str, position: dict[int, int], next_id: int) -> None:
        """Remove sealed segments that were read, oldest first: also those of which the reader does not know yet that they are
        sealed, or that they were there at all."""
        found = self.by_name[topic]
        for number, each in list(found.segments.items()):
            at = position.get(number, len(each.sent) if number < next_id else 0)
            if at >= len(each.sent) and each.is_sealed and not any(parent in found.segments for parent in each.parents):
                found.prune(number)

    def lose(self, random: Random, topic: str = TOPIC) -> None:
        """Remove some sealed segments, read or not, oldest first."""
        found = self.by_name[topic]
        for number, each in list(found.segments.items()):
            if each.is_sealed and not any(parent in found.segments for parent in each.parents) and random.random() < 0.5:
                found.prune(number)


class LateWorld(World):
    """A world in which any answer may be one of the last three: of an owner that does not know yet that it is none any more, of
    a layout whose change is not heard of yet. Never of a segment that is gone."""

    def __init__(self, *topics: Topic, random: Random) -> None:
        super().__init__(*topics)
        self.random = random
        self.is_late = True
        self._past: list[dict[str, tuple[View, dict[int, State]]]] = []
        self.note()

    def note(self) -> None:
        """Remember how everything is."""
        now = {
            name: (
                msgspec.structs.replace(super(LateWorld, self).view(name), segments=copied(topic.segments)),
                {number: each.state() for number, each in topic.segments.items()},
            )
            for name, topic in self.by_name.items()
        }
        self._past = [*self._past[-2:], now]

    def view(self, topic: str) -> View:
        return self._some()[topic][0]

    def states(self, topic: str, ids: Iterable[int]) -> dict[int, State]:
        now = self._past[-1][topic][1]
        return {number: self._some()[topic][1].get(number, now[number]) for number in ids if number in now}

    def _some(self) -> dict[str, tuple[View, dict[int, State]]]:
        return self.random.choice(self._past) if self.is_late else self._past[-1]


def copied(segments: dict[int, Segment]) -> dict[int, Segment]:
    """As they are now."""
    return {number: copy(each) for number, each in segments.items()}


HASHES = [number * 2731 % (MAX_HASH + 1) for number in range(24)]
"""Of the keys that are used."""
