"""Random histories of topics x random limits: what a query reads over time, checked against everything that was ever sent.

`PLANNER_CASES=10` plays ten times as many."""

from __future__ import annotations

import json
import os
from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_world import TOPIC, LateWorld, Sent, Topic, World, make_options

from braid.errors import DataLost, NotReady
from braid_spark.offsets import Offset, canonical_json, read_offset
from braid_spark.options import Options
from braid_spark.planner import Cap, Limits, Planner

TIMES = int(os.environ.get("PLANNER_CASES", "1"))
"""How many times as many cases are played as in an ordinary run."""
CASES = settings(max_examples=150 * TIMES, deadline=None, derandomize=True)
MORE = [
    {"ordering": "key"},
    {"ordering": "key", "key_split": 3},
    {"ordering": "key", "min_partitions": 7},
    {"ordering": "none"},
    {"ordering": "none", "max_messages_per_partition": 5},
    {"ordering": "none", "min_partitions": 9},
]


class Query:
    """A streaming query: keeps the checkpoint, restarts now and then, and notes what it read in which batch and piece."""

    def __init__(self, world: World, options: Options, random: Random, *, restarts: float = 0.2) -> None:
        self.world = world
        self.options = options
        self.random = random
        self.restarts = restarts
        self.planner = Planner(options, lambda: 0.0)
        self.start = self.planner.initial()
        self.batches: list[list[list[Sent]]] = []
        self.base: dict[str, Any] = {}
        self.is_begun = False

    def step(self, limit: Limits, until: Cap | None = None) -> bool:
        """One trigger; whether it was a batch."""
        if self.random.random() < self.restarts:
            self.planner = Planner(self.options, lambda: 0.0)
            if not self.is_begun:
                self.start = self.planner.initial()
        end = self.planner.latest(self.start, limit, self.world, until=until)
        if end is self.start:
            return False
        self._check_offset(end)
        pieces = self.planner.partitions(self.start, end, self.world)
        again = Planner(self.options, lambda: 9.0).partitions(
            json.loads(json.dumps(self.start)), json.loads(json.dumps(end)), self.world
        )
        assert pieces == again
        order = [(piece.topic, piece.segment) for piece in pieces]
        assert order == sorted(order)
        self.batches.append([self.world.read(piece) for piece in pieces])
        if not self.is_begun:
            self.base = end["base"]
        self.start, self.is_begun = end, True
        return True

    def _check_offset(self, end: dict[str, Any]) -> None:
        parsed = read_offset(json.loads(json.dumps(end)))
        assert isinstance(parsed, Offset)
        assert json.dumps(parsed.document()) == json.dumps(end)  # canonical
        before = read_offset(self.start)
        if isinstance(before, Offset):
            for name, topic in before.topics.items():
                after = parsed.topics[name]
                assert after.next >= topic.next
                kept = self.world.by_name[name].segments
                for number, at in topic.segs.items():  # never below the start
                    if number not in kept and not self.options.fail_on_data_loss and number not in after.drained:
                        continue  # lost
                    assert after.segs.get(number, after.drained.get(number, -1)) >= at
            assert canonical_json(end) != canonical_json(self.start)

    def positions(self, topic: str = TOPIC) -> tuple[dict[int, int] | None, int]:
        """What was read: as retention may know it."""
        if not self.is_begun:
            return None, 0
        found = self.start["topics"][topic]
        return {int(number): at for number, at in found["segs"].items()}, found["next"]

    def finish(self) -> None:
        """Read all that is left."""
        for topic in self.world.by_name.values():
            for segment in topic.everything.values():
                segment.open_at = None
        for _ in range(200):
            if not self.step(Limits()):
                break
        else:
            pytest.fail("the query does not come to rest")
        self.step(Limits())

    def check(self, expected: list[Sent], *, is_ordered: bool) -> None:
        """Every message once, and if so asked, those of a key one after the other, in one piece of each batch."""
        seen = Counter(each.number for batch in self.batches for rows in batch for each in rows)
        assert seen == Counter(each.number for each in expected)
        last: dict[int, int] = {}
        for batch in self.batches if is_ordered else ():
            owners: dict[int, int] = {}
            for number, rows in enumerate(batch):
                for each in rows:
                    if each.hash16 is not None:
                        assert owners.setdefault(each.hash16, number) == number
                        assert last.get(each.hash16, -1) < each.number
                        last[each.hash16] = each.number


def some_limits(random: Random) -> Limits:
    messages = random.choice([None, 1, 3, 10, 40])
    size = random.choice([None, None, 1, 100, 1000])
    return Limits(max_messages=messages, max_bytes=size)


def expected_from(query: Query, topic: str = TOPIC) -> list[Sent]:
    """What comes after the base."""
    base = query.base[topic]
    found = []
    for number, segment in query.world.by_name[topic].everything.items():
        at = base["segs"].get(str(number), len(segment.sent) if number < base["next"] else 0)
        found += segment.sent[at:]
    return found


@pytest.mark.parametrize("how", MORE, ids=str)
@pytest.mark.parametrize("start", ["earliest", "latest"])
@settings(CASES, max_examples=60 * TIMES)
@given(seed=st.integers(0, 1 << 32))
def test_everything_is_read_once_and_in_the_order_of_keys(how: dict[str, Any], start: str, seed: int) -> None:
    random = Random(seed)
    world = World(Topic(TOPIC, count=random.randrange(1, 4)))
    options = make_options(start, **how)
    for _ in range(random.randrange(6)):
        world.disturb(random, None, 0)
    query = Query(world, options, random)
    for _ in range(random.randrange(4, 30)):
        position, next_id = query.positions()
        world.disturb(random, position, next_id, may_step_back=True)
        if random.random() < 0.6:
            query.step(some_limits(random))
    query.finish()
    if start == "earliest":
        kept = {each.number for each in expected_from(query)}
        assert all(each.number in kept for each in world.all_sent())  # nothing was trimmed before the first batch
    query.check(expected_from(query), is_ordered=options.ordering == "key")


@pytest.mark.parametrize("is_loss_fatal", [True, False])
@pytest.mark.parametrize("how", MORE, ids=str)
@settings(CASES, max_examples=40 * TIMES)
@given(seed=st.integers(0, 1 << 32))
def test_answers_that_are_late_lose_nothing_and_repeat_nothing(how: dict[str, Any], is_loss_fatal: bool, seed: int) -> None:
    random = Random(seed)
    world = LateWorld(Topic(TOPIC, count=random.randrange(1, 4)), random=random)
    options = make_options(random.choice(["earliest", "latest"]), fail_on_data_loss=is_loss_fatal, **how)
    query = Query(world, options, random)
    for _ in range(30):
        world.disturb(random, *query.positions())
        world.note()
        if random.random() < 0.7:
            try:
                query.step(some_limits(random))
            except NotReady:  # a layout that is older than the offset
                continue
    world.is_late = False
    for segment in world.by_name[TOPIC].everything.values():
        segment.open_at = None
    world.note()
    query.finish()
    query.check(expected_from(query), is_ordered=options.ordering == "key")


@pytest.mark.parametrize("how", MORE, ids=str)
@settings(CASES, max_examples=60 * TIMES)
@given(seed=st.integers(0, 1 << 32))
def test_what_was_removed_unread_is_told_and_nothing_else_is(how: dict[str, Any], seed: int) -> None:
    """Segments go at any time, read or not. A query that must not lose anything fails if and only if something is lost; one
    that may counts it, message by message."""
    random = Random(seed)
    world = World(Topic(TOPIC, count=random.randrange(1, 4)))
    query = Query(world, make_options("earliest", fail_on_data_loss=False, **how), random, restarts=0.0)
    query.step(Limits())
    strict = make_options("earliest", **how)
    missing: set[int] = set()
    for _ in range(random.randrange(4, 25)):
        world.disturb(random, *query.positions())
        if random.random() < 0.3:
            world.lose(random)
        now = lost_now(query)
        missing |= now
        if now:
            with pytest.raises(DataLost, match=r"Messages of segment \d+ of .* are lost, [1-9]\d* in number"):
                Planner(strict, lambda: 0.0).latest(query.start, Limits(), world)
        else:
            Planner(strict, lambda: 0.0).latest(query.start, Limits(), world)
        if random.random() < 0.6:
            query.step(some_limits(random))
    query.finish()
    kept = [each for each in expected_from(query) if each.number not in missing]
    query.check(kept, is_ordered=False)
    assert query.planner.lag(query.start, world)["lost"]["messages"] == len(missing)


def lost_now(query: Query) -> set[int]:
    """Messages that the query has not read and that are in no segment any more."""
    topic = query.world.by_name[TOPIC]
    position, next_id = query.positions()
    found: set[int] = set()
    for number, each in topic.everything.items():
        if number not in topic.segments:
            at = (position or {}).get(number, len(each.sent) if number < next_id else 0)
            found.update(one.number for one in each.sent[at:])
    return found


@pytest.mark.parametrize("ordering", ["key", "none"])
@CASES
@given(seed=st.integers(0, 1 << 32))
def test_available_now_ends_and_reads_what_was_there(ordering: str, seed: int) -> None:
    random = Random(seed)
    world = World(Topic(TOPIC, count=random.randrange(1, 3)))
    for _ in range(random.randrange(25)):
        world.disturb(random, None, 0)
    if is_open := random.random() < 0.3:
        for segment in world.by_name[TOPIC].segments.values():
            segment.open_at = random.randint(0, len(segment.sent)) if random.random() < 0.5 else None
    else:
        for segment in world.by_name[TOPIC].segments.values():
            segment.open_at = None
    query = Query(world, make_options("earliest", ordering=ordering), random)
    if random.random() < 0.5:
        query.step(some_limits(random))
    before = {each.number for batch in query.batches for rows in batch for each in rows}
    stable = {each.number for segment in world.by_name[TOPIC].segments.values() for each in segment.sent[: segment.stable]}
    there = {each.number for each in world.all_sent()}
    cap = query.planner.cap(world)
    limit = some_limits(random)
    for _ in range(3000):
        position, next_id = query.positions()
        if random.random() < 0.3:
            world.disturb(random, position, next_id)  # life goes on
        if not query.step(limit, until=cap):
            break
    else:
        pytest.fail("AvailableNow does not end")
    seen = [each.number for batch in query.batches for rows in batch for each in rows]
    assert len(seen) == len(set(seen))
    assert set(seen) <= there | before  # nothing newer
    if not is_open:
        assert stable <= set(seen)
    other = Query(world, make_options(json.dumps(query.start), ordering=ordering), random)
    query.finish()  # and the next run finds the rest
    query.check(expected_from(query), is_ordered=ordering == "key")
    other.finish()  # so does another query that begins where this run ended
    other.check([each for each in expected_from(query) if each.number not in seen], is_ordered=ordering == "key")


@CASES
@given(seed=st.integers(0, 1 << 32))
def test_limits_hold(seed: int) -> None:
    random = Random(seed)
    world = World(Topic(TOPIC, count=random.randrange(1, 4)))
    for _ in range(random.randrange(4, 20)):
        world.disturb(random, None, 0)
    query = Query(world, make_options("earliest", ordering=random.choice(["key", "none"])), random)
    messages, size = random.choice([None, 1, 7, 30]), random.choice([None, 1, 60, 500])
    while query.step(Limits(max_messages=messages, max_bytes=size)):
        rows = query.batches[-1]
        pieces = len(rows)
        if messages is not None:
            assert sum(len(each) for each in rows) <= max(messages, pieces)
        if size is not None:  # each segment may have one message beyond its share
            assert sum(each.size for one in rows for each in one) <= size + 50 * pieces
        if len(query.batches) > 2000:
            pytest.fail("the query does not come to rest")


def grown(count: int) -> World:
    """A topic with so many kept segments, of which one is active."""
    topic = Topic(TOPIC)
    world = World(topic)
    while len(topic.everything) < count:
        world.send(5)
        topic.split(topic.active[0])
        world.send(5)
        world.send(60_000)
        topic.merge(*topic.active)
    world.send(5)
    return world


@pytest.mark.parametrize("ordering", ["key", "none"])
def test_planning_costs_the_same_however_many_segments_are_kept(ordering: str) -> None:
    costs = []
    for count in (10, 1000):
        world = grown(count)
        query = Query(world, make_options("latest", ordering=ordering), Random(1))
        query.step(Limits())
        planner = Planner(query.options, lambda: 0.0)
        cost = []
        for _ in range(3):  # idle, with news, after a split
            world.calls.clear()
            end = planner.latest(query.start, Limits(max_messages=10, max_bytes=10), world)
            planner.partitions(query.start, end, world)
            planner.lag(end, world)
            planner.cap(world)
            cost.append(dict(world.calls))
            query.start = end
            world.send(5)
            world.send(5)
            if len(cost) == 2:
                topic = world.by_name[TOPIC]
                topic.split(topic.active[0])
        costs.append(cost)
    assert costs[0] == costs[1]
    assert costs[0][0]["ids"] <= 6
