"""The planner, case by case: starts and ends, barriers, losses, other topics, partitions."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from planner_world import TOPIC, Topic, World, make_options

from braid.errors import ConfigError, DataLost, IncarnationMismatch, NotReady
from braid_spark.offsets import BadOffset, Start
from braid_spark.options import Options, parse
from braid_spark.planner import Limits, Piece, Planner

OTHER = "topic://public/default/returns"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def planner(start: str = "earliest", **more: Any) -> Planner:
    return Planner(make_options(start, **more), Clock())


def topic_of(document: dict[str, Any], name: str = TOPIC) -> dict[str, Any]:
    found: dict[str, Any] = document["topics"][name]
    return found


def split_world() -> World:
    """Segment 0 with 4 messages, its children 1 and 2 with 3 each; the message with number n was sent at time n."""
    world = World(Topic(TOPIC))
    for _ in range(4):
        world.send(1)
    world.by_name[TOPIC].split(0)
    for _ in range(3):
        world.send(1)
    for _ in range(3):
        world.send(60_000)
    return world


def ranges(pieces: list[Piece]) -> list[tuple[int, int, int]]:
    return [(piece.segment, piece.start, piece.stop) for piece in pieces]


# The document.


def test_a_query_goes_through_a_split_in_two_batches_with_the_documented_offsets() -> None:
    world, plan = split_world(), planner()
    start = plan.initial()
    assert start == {"v": 1, "from": "earliest"}
    first = plan.latest(start, Limits(), world)
    assert json.dumps(first, separators=(",", ":")) == (
        '{"v":1,"topics":{"topic://public/default/orders":{"inc":"inc-1","next":3,"segs":{"1":0,"2":0},"drained":{"0":4}}},'
        '"base":{"topic://public/default/orders":{"inc":"inc-1","next":3,"segs":{"0":0,"1":0,"2":0}}}}'
    )
    assert plan.partitions(start, first, world) == [Piece(TOPIC, "inc-1", 0, "segment://public/default/orders/0", 0, 4)]
    assert plan.partitions(first, first, world) == []
    second = plan.latest(first, Limits(), world)
    assert second == {"v": 1, "topics": {TOPIC: {"inc": "inc-1", "next": 3, "segs": {"1": 3, "2": 3}}}}
    assert ranges(plan.partitions(first, second, world)) == [(1, 0, 3), (2, 0, 3)]
    assert plan.latest(second, Limits(), world) is second
    assert plan.partitions(second, second, world) == []


def test_without_ordering_everything_is_in_one_batch() -> None:
    world, plan = split_world(), planner(ordering="none")
    end = plan.latest(plan.initial(), Limits(), world)
    assert ranges(plan.partitions(plan.initial(), end, None)) == [(0, 0, 4), (1, 0, 3), (2, 0, 3)]


def test_batch_0_at_latest_is_replayed_from_where_it_began() -> None:
    world = split_world()
    end = planner("latest").latest({"v": 1, "from": "latest"}, Limits(), world)
    world.send(1)
    again = planner("latest")  # after a crash: the start is symbolic again, the end was logged
    assert again.partitions(again.initial(), end, world) == []
    later = again.latest(end, Limits(), world)
    assert ranges(again.partitions(end, later, world)) == [(1, 3, 4)]


def test_the_start_is_resolved_once_and_an_empty_first_batch_still_says_it() -> None:
    world, plan = split_world(), planner("latest")
    first = plan.latest(plan.initial(), Limits(), world)
    assert topic_of(first)["segs"] == {"1": 3, "2": 3}
    world.send(1)
    second = plan.latest(plan.initial(), Limits(), world)
    assert second["base"] == first["base"]
    assert ranges(plan.partitions(plan.initial(), second, world)) == [(1, 3, 4)]


def test_a_layout_change_without_messages_is_no_batch_and_bars_nobody() -> None:
    world, plan = World(Topic(TOPIC)), planner()
    world.send(1)
    start = plan.latest(plan.initial(), Limits(), world)
    topic = world.by_name[TOPIC]
    topic.split(0)
    topic.split(1)
    assert plan.latest(start, Limits(), world) is start
    world.send(1)
    end = plan.latest(start, Limits(), world)
    assert topic_of(end) == {"inc": "inc-1", "next": 5, "segs": {"2": 0, "3": 1, "4": 0}, "drained": {"0": 1, "1": 0}}
    assert ranges(plan.partitions(start, end, world)) == [(3, 0, 1)]


def test_a_parent_behind_an_open_transaction_holds_its_children_back() -> None:
    world, plan = split_world(), planner()
    world.by_name[TOPIC].segments[0].open_at = 2
    start = plan.initial()
    first = plan.latest(start, Limits(), world)
    assert ranges(plan.partitions(start, first, world)) == [(0, 0, 2)]
    assert plan.latest(first, Limits(), world) is first
    world.by_name[TOPIC].segments[0].open_at = None
    second = plan.latest(first, Limits(), world)
    assert ranges(plan.partitions(first, second, world)) == [(0, 2, 4)]


def test_a_stable_index_that_steps_back_moves_no_offset() -> None:
    world, plan = split_world(), planner("latest")
    start = plan.latest(plan.initial(), Limits(), world)
    world.by_name[TOPIC].segments[1].open_at = 1
    assert plan.latest(start, Limits(), world) is start


def test_a_layout_older_than_the_offset_loses_nothing() -> None:
    world, plan = split_world(), planner("latest")
    start = plan.latest(plan.initial(), Limits(), world)
    topic = world.by_name[TOPIC]
    del topic.segments[1], topic.segments[2], topic.everything[1], topic.everything[2]
    topic.segments[0].is_sealed, topic.segments[0].children = False, ()
    assert plan.latest(start, Limits(), world) is start


# Starts.


@pytest.mark.parametrize(
    ("time", "segs", "asked"),
    [
        (0, {"0": 0, "1": 0, "2": 0}, 3),
        (2, {"0": 2, "1": 0, "2": 0}, 3),
        (5, {"1": 1, "2": 0}, 2),  # 0 is older than what 1 holds, and need not be asked
        (8, {"1": 3, "2": 1}, 2),
        (99, {"1": 3, "2": 3}, 2),
    ],
)
def test_a_start_by_time(time: int, segs: dict[str, int], asked: int) -> None:
    world = split_world()
    plan = Planner(msgspec.structs.replace(make_options(), starting=Start(timestamp_ms=time)), Clock())
    assert plan.initial() == {"v": 1, "from": {"time": time}}
    end = plan.latest(plan.initial(), Limits(), world)
    assert end["base"][TOPIC] == {"inc": "inc-1", "next": 3, "segs": segs}
    assert world.calls["index_at_time"] == asked


@pytest.mark.parametrize(
    ("said", "segs"),
    [
        ({"0": 3}, {"0": 3, "1": 0, "2": 0}),
        ({"0": -1}, {"1": 0, "2": 0}),
        ({"1": 2, "2": -2}, {"1": 2, "2": 0}),
        ({"0": 3, "1": 1}, {"0": 3, "1": 1, "2": 0}),
    ],
)
def test_a_start_by_segment(said: dict[str, int], segs: dict[str, int]) -> None:
    end = planner(json.dumps({TOPIC: said})).latest(planner(json.dumps({TOPIC: said})).initial(), Limits(), split_world())
    assert end["base"][TOPIC]["segs"] == segs


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"1": 0}, "says nothing of segment 2 of .*Name it too"),
        ({"0": 5}, "names segment 0 of .* at 5, but its last index is 3"),
        ({"7": 0}, "names segment 7 of .*only those below 3"),
    ],
)
def test_a_start_by_segment_that_cannot_be(said: dict[str, int], message: str) -> None:
    plan = planner(json.dumps({TOPIC: said}))
    with pytest.raises(ConfigError, match=message):
        plan.latest(plan.initial(), Limits(), split_world())


def test_a_start_from_the_offset_of_a_checkpoint() -> None:
    world = split_world()
    old = planner().latest(planner().initial(), Limits(max_messages=2), world)
    plan = planner(json.dumps(old))
    reached = {"inc": "inc-1", "next": 3, "segs": {"0": 2, "1": 0, "2": 0}}
    assert plan.initial() == {"v": 1, "from": {"reached": {TOPIC: reached}}}
    end = plan.latest(plan.initial(), Limits(), world)
    assert ranges(plan.partitions(plan.initial(), end, world)) == [(0, 2, 4)]
    world.by_name[TOPIC].incarnation = "inc-2"
    with pytest.raises(IncarnationMismatch, match=r"inc-1, now inc-2.*new checkpoint"):
        planner(json.dumps(old)).latest(plan.initial(), Limits(), world)


def sealed_while_it_ran(count: int) -> tuple[World, str]:
    """A run to the end, during which the first segment was split: that one is read, its children are not begun."""
    world, plan = World(Topic(TOPIC, count=count)), planner()
    for key in (1, 1, 60_000, 60_000):
        world.send(key)
    cap = plan.cap(world)
    start = plan.latest(plan.initial(), Limits(max_messages=1), world, until=cap)
    world.by_name[TOPIC].split(0)
    for key in (1, 30_000, 60_000):
        world.send(key)
    return world, json.dumps(plan.latest(start, Limits(), world, until=cap))


@pytest.mark.parametrize(
    ("count", "segs", "before", "after"),
    [
        (1, {}, [(0, 0, 4)], [(1, 0, 2), (2, 0, 1)]),
        (2, {"1": 2}, [(0, 0, 2), (1, 0, 2)], [(1, 2, 3), (2, 0, 1), (3, 0, 1)]),
    ],
)
def test_the_checkpoint_of_a_run_during_which_a_segment_was_sealed_says_a_start_and_an_end(
    count: int, segs: dict[str, int], before: list[tuple[int, int, int]], after: list[tuple[int, int, int]]
) -> None:
    world, offset = sealed_while_it_ran(count)
    assert topic_of(json.loads(offset))["segs"] == segs
    plan = planner(offset)
    assert ranges(plan.partitions(plan.initial(), plan.latest(plan.initial(), Limits(), world), world)) == after
    for option, expected in (("startingOffsets", after), ("endingOffsets", before)):
        plan = Planner(batch_options(**{option: offset}), Clock())
        assert ranges(plan.partitions(*plan.batch(world), world)) == expected


def test_what_came_and_went_behind_the_offset_of_a_checkpoint_is_a_loss() -> None:
    world, offset = sealed_while_it_ran(1)
    world.by_name[TOPIC].merge(1, 2)
    world.by_name[TOPIC].prune(0)
    world.by_name[TOPIC].prune(1)
    plan = planner(offset)
    with pytest.raises(DataLost, match=r"segment 1 of .* are lost, 2 in number"):
        plan.latest(plan.initial(), Limits(), world)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"segs": {"1": 9}}, "names segment 1 of .* at 9, but its last index is 2"),
        ({"segs": {"7": 0}, "next": 8}, "names segment 7 of .*only those below 4"),
    ],
)
def test_the_offset_of_a_checkpoint_that_cannot_be(changed: dict[str, Any], message: str) -> None:
    world, offset = sealed_while_it_ran(2)
    damaged = {"v": 1, "topics": {TOPIC: topic_of(json.loads(offset)) | {"drained": {}} | changed}}
    plan = planner(json.dumps(damaged))
    with pytest.raises(ConfigError, match=message):
        plan.latest(plan.initial(), Limits(), world)


def test_an_active_segment_nobody_answers_for_is_no_reason_to_leave_it_out() -> None:
    world = split_world()
    states = world.states
    world.states = lambda topic, ids: {k: v for k, v in states(topic, ids).items() if k != 2}  # type: ignore[method-assign]
    with pytest.raises(NotReady, match="Segment 2 of"):
        planner().latest(planner().initial(), Limits(), world)


def test_a_position_that_the_segment_has_not_reached_is_not_waited_for_in_silence() -> None:
    world = split_world()
    end = planner().latest(planner().initial(), Limits(max_messages=2), world)
    damaged = {**end, "topics": {TOPIC: {**end["topics"][TOPIC], "segs": {"0": 9, "1": 0, "2": 0}}}}
    with pytest.raises(NotReady, match=r"Segment 0 of .* was read to index 9, .* but it ends at 4.* new checkpoint"):
        planner().latest(damaged, Limits(), world)


# Batches.


def batch_options(**raw: str) -> Options:
    return parse({"service.url": "pulsar://localhost:6650", "topic": TOPIC, **raw}).for_reading()


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({}, [(0, 0, 4), (1, 0, 3), (2, 0, 3)]),
        ({"startingTimestamp": "2", "endingTimestamp": "6"}, [(0, 2, 4), (1, 0, 2)]),
        ({"endingOffsets": json.dumps({TOPIC: {"0": 3}})}, [(0, 0, 3)]),
        ({"endingOffsets": json.dumps({TOPIC: {"1": 1, "2": -1}})}, [(0, 0, 4), (1, 0, 1), (2, 0, 3)]),
        ({"startingOffsets": "latest"}, []),
        ({"ordering": "none", "maxMessagesPerPartition": "3"}, [(0, 0, 2), (0, 2, 4), (1, 0, 3), (2, 0, 3)]),
    ],
)
def test_a_batch_read(raw: dict[str, str], expected: list[tuple[int, int, int]]) -> None:
    world, plan = split_world(), Planner(batch_options(**raw), Clock())
    start, end = plan.batch(world)
    assert ranges(plan.partitions(start, end, world)) == expected


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"endingOffsets": json.dumps({TOPIC: {"1": 1}})}, "says no index of segment 2"),
        ({"endingOffsets": json.dumps({TOPIC: {"0": 9}})}, "at 9, but only what is below 4 can be read now"),
        (
            {"startingOffsets": json.dumps({TOPIC: {"0": 3}}), "endingOffsets": json.dumps({TOPIC: {"0": 1}})},
            "at 1, before its start at 3",
        ),
    ],
)
def test_an_end_that_cannot_be(raw: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Planner(batch_options(**raw), Clock()).batch(split_world())


def test_an_end_is_nothing_for_a_stream() -> None:
    with pytest.raises(ConfigError, match="for batch reads"):
        Planner(batch_options(endingOffsets="latest"), Clock()).initial()


# Losses.


def test_trimmed_messages_stop_the_query_or_are_left_out_and_counted() -> None:
    world, plan = split_world(), planner()
    start = plan.latest(plan.initial(), Limits(max_messages=1), world)
    world.by_name[TOPIC].segments[0].low = 3
    with pytest.raises(
        DataLost, match=r"segment 0 of topic://public/default/orders are lost.*index 1, the first one stored is 3"
    ) as lost:
        plan.latest(start, Limits(), world)
    assert lost.value.low == 3
    plan = planner(fail_on_data_loss=False)
    end = plan.latest(start, Limits(), world)
    assert plan.latest(start, Limits(), world) == end  # and counts once
    assert topic_of(end)["skipped"] == {"0": 3}
    assert ranges(plan.partitions(start, end, world)) == [(0, 3, 4)]
    assert ranges(planner().partitions(start, end, None)) == [(0, 3, 4)]
    assert plan.lag(end, world) == {
        "v": 1,
        "lag": 6,
        "lost": {"messages": 2, "segments": 0},
        "topics": {TOPIC: {"1": 3, "2": 3}},
    }


def test_a_pruned_segment_stops_the_query_or_is_left_out_and_counted() -> None:
    world, plan = split_world(), planner()
    start = plan.latest(plan.initial(), Limits(max_messages=1), world)
    end_before = plan.latest(start, Limits(), world)
    del world.by_name[TOPIC].segments[0]
    with pytest.raises(DataLost, match=r"segment 0 of .* may be lost.*index 1.*not stored any more.*failOnDataLoss"):
        plan.latest(start, Limits(), world)
    with pytest.raises(DataLost, match="segment 0 of"):
        plan.partitions(start, end_before, world)
    plan = planner(fail_on_data_loss=False)
    assert plan.partitions(start, end_before, world) == []
    end = plan.latest(start, Limits(), world)
    assert ranges(plan.partitions(start, end, world)) == [(1, 0, 3), (2, 0, 3)]
    assert plan.lag(end, world)["lost"] == {"messages": 3, "segments": 1}  # the batch that was not read says so
    plan = planner(fail_on_data_loss=False)
    assert plan.latest(start, Limits(), world) == end
    assert plan.lag(end, world)["lost"] == {"messages": 0, "segments": 1}  # nobody knows how many


def test_a_pruned_segment_that_was_read_to_where_it_ended_is_no_loss() -> None:
    """Sealed and pruned while the query was away: its offset still lists the segment, read as far as it went."""
    for ordering in ("key", "none"):
        world = World(Topic(TOPIC, count=2))
        world.send(1)
        world.send(1)
        world.send(60_000)
        start = planner(ordering=ordering).latest(planner().initial(), Limits(), world)
        assert topic_of(start)["segs"] == {"0": 2, "1": 1}
        topic = world.by_name[TOPIC]
        topic.merge(0, 1)
        topic.prune(0)
        topic.prune(1)
        plan = planner(ordering=ordering)
        world.calls.clear()
        assert plan.latest(start, Limits(), world) is start  # there is nothing to read
        assert plan.latest(start, Limits(), world) is start
        assert world.calls["pruned_ends"] == 1  # an end stays what it is
        assert plan.lag(start, world) == {"v": 1, "lag": 0, "lost": {"messages": 0, "segments": 0}, "topics": {TOPIC: {"2": 0}}}
        world.send(1)
        assert planner(ordering=ordering).lag(start, world)["lag"] == 1
        end = planner(ordering=ordering).latest(start, Limits(), world)
        assert topic_of(end) == {"inc": "inc-1", "next": 3, "segs": {"2": 1}, "drained": {"0": 2, "1": 1}}
        for one in (plan, planner(ordering=ordering)):  # also if the batch is planned again
            assert ranges(one.partitions(start, end, world)) == [(2, 0, 1)]
        assert topic_of(planner().latest(end, Limits(), world))["segs"] == {"2": 1}


def test_a_pruned_segment_that_was_not_read_to_where_it_ended_says_how_much_is_missing() -> None:
    world = split_world()
    start = planner().latest(planner().initial(), Limits(max_messages=1), world)
    world.by_name[TOPIC].prune(0)
    with pytest.raises(DataLost, match=r"segment 0 of .* are lost, 3 in number.*index 1 to 4.*not stored any more.*subscr"):
        planner().latest(start, Limits(), world)
    plan = planner(fail_on_data_loss=False)
    world.calls.clear()
    end = plan.latest(start, Limits(), world)
    assert ranges(plan.partitions(start, end, world)) == [(1, 0, 3), (2, 0, 3)]
    assert plan.latest(start, Limits(), world) == end
    assert world.calls["pruned_ends"] == 1  # asked once, not in each poll
    assert plan.lag(end, world)["lost"] == {"messages": 3, "segments": 1}


def test_a_segment_that_goes_before_the_layout_says_so_is_no_loss() -> None:
    """The layout at hand is older than the removal: its owner does not know the segment any more."""
    world = split_world()
    unread = planner().latest(planner().initial(), Limits(max_messages=1), world)
    read = planner().latest(unread, Limits(), world)
    read["topics"][TOPIC] = {"inc": "inc-1", "next": 1, "segs": {"0": 4}}  # as if 0 had not been sealed yet
    topic, view = world.by_name[TOPIC], world.view(TOPIC)
    topic.prune(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world, "view", lambda _topic: view)
        end = planner().latest(read, Limits(), world)
        assert topic_of(end)["drained"] == {"0": 4}
        assert ranges(planner().partitions(read, end, world)) == [(1, 0, 3), (2, 0, 3)]
        with pytest.raises(DataLost, match=r"segment 0 of .* are lost, 3 in number"):
            planner().latest(unread, Limits(), world)


def test_a_start_at_the_end_of_a_pruned_segment_is_no_loss() -> None:
    world = World(Topic(TOPIC, count=2))
    world.send(1)
    topic = world.by_name[TOPIC]
    topic.split(0)
    topic.prune(0)
    for named, is_lost in ((1, False), (0, True)):
        plan = planner(json.dumps({TOPIC: {"0": named, "1": 0, "2": 0, "3": 0}}))
        if is_lost:
            with pytest.raises(DataLost, match=r"segment 0 of .* are lost, 1 in number"):
                plan.latest(plan.initial(), Limits(), world)
        else:
            assert topic_of(plan.latest(plan.initial(), Limits(), world))["segs"] == {"1": 0, "2": 0, "3": 0}


def test_a_segment_that_came_and_went_unseen_is_a_loss() -> None:
    world, plan = World(Topic(TOPIC)), planner()
    world.send(1)
    start = plan.latest(plan.initial(), Limits(), world)
    topic = world.by_name[TOPIC]
    topic.split(0)
    topic.merge(1, 2)
    del topic.segments[0], topic.segments[1]
    with pytest.raises(DataLost, match="segment 0 of"):
        planner().latest(start, Limits(), world)
    with pytest.raises(DataLost, match="segment 1 of"):
        planner().latest({"v": 1, "topics": {TOPIC: {"inc": "inc-1", "next": 1, "segs": {}}}}, Limits(), world)


def test_a_pruned_segment_that_was_seen_to_be_read_is_no_loss() -> None:
    world, plan = World(Topic(TOPIC)), planner()
    world.send(1)
    start = plan.latest(plan.initial(), Limits(), world)
    topic = world.by_name[TOPIC]
    topic.split(0)
    assert plan.latest(start, Limits(), world) is start  # sealed at its end, and known so from now on
    del topic.segments[0]
    world.send(1)
    end = plan.latest(start, Limits(), world)
    assert topic_of(end)["drained"] == {"0": 1}
    assert ranges(plan.partitions(start, end, world)) == [(1, 0, 1)]


# Other topics.


def test_a_topic_that_was_created_again_is_never_read_on() -> None:
    world, plan = split_world(), planner()
    start = plan.latest(plan.initial(), Limits(max_messages=1), world)
    end = plan.latest(start, Limits(), world)
    world.by_name[TOPIC] = Topic(TOPIC, incarnation="inc-2")
    for act in (lambda: plan.latest(start, Limits(), world), lambda: plan.partitions(start, end, world)):
        with pytest.raises(IncarnationMismatch, match=r"deleted and created again.*new checkpoint"):
            act()


def test_a_segment_of_another_incarnation_is_never_read_on() -> None:
    world, plan = split_world(), planner()
    world.by_name[TOPIC].segments[0].incarnation = "log-1"
    start = plan.latest(plan.initial(), Limits(max_messages=1), world)
    assert topic_of(start)["incs"] == {"0": "log-1"}
    end = plan.latest(start, Limits(), world)
    assert plan.partitions(start, end, world)[0].incarnation == "log-1"
    world.by_name[TOPIC].segments[0].incarnation = "log-2"
    with pytest.raises(IncarnationMismatch, match=r"Segment 0 of .*log-1, now log-2"):
        plan.latest(start, Limits(), world)


def test_a_regular_topic_that_becomes_scalable_is_read_on() -> None:
    world, plan = World(Topic(TOPIC, incarnation="log-1")), planner()
    topic = world.by_name[TOPIC]
    topic.segments[0].topic = "persistent://public/default/orders"
    world.send(1)
    start = plan.latest(plan.initial(), Limits(), world)
    world.send(1)
    logged = plan.latest(start, Limits(), world)
    topic.incarnation = "scalable-1"
    assert plan.partitions(start, logged, world)[0].incarnation == "log-1"
    end = plan.latest(start, Limits(), world)
    assert topic_of(end) == {"inc": "scalable-1", "next": 1, "segs": {"0": 2}, "incs": {"0": "log-1"}}
    assert ranges(plan.partitions(start, end, world)) == [(0, 1, 2)]


def test_the_checkpoint_of_another_query() -> None:
    world, plan = split_world(), planner()
    start = plan.latest(plan.initial(), Limits(), world)
    start["topics"][OTHER] = start["topics"][TOPIC]
    with pytest.raises(BadOffset, match=rf"reads {OTHER}; this one reads {TOPIC}\. Start with a new checkpoint"):
        plan.latest(start, Limits(), world)


def pattern_planner(**more: Any) -> Planner:
    return planner("latest", topics_pattern="public/default/.*", topics=(), topic=None, **more)


def test_a_topic_that_appears_is_read_from_its_beginning() -> None:
    world, plan = split_world(), pattern_planner()
    start = plan.latest(plan.initial(), Limits(), world)
    world.by_name[OTHER] = Topic(OTHER, count=2)
    assert plan.latest(start, Limits(), world) is start
    world.send(1, topic=OTHER)
    end = plan.latest(start, Limits(), world)
    assert end["base"] == {OTHER: {"inc": "inc-1", "next": 2, "segs": {"0": 0, "1": 0}}}
    assert [(piece.topic, piece.start, piece.stop) for piece in plan.partitions(start, end, world)] == [(OTHER, 0, 1)]
    world.send(1, topic=OTHER)
    last = plan.latest(end, Limits(), world)
    assert "base" not in last
    assert [(piece.topic, piece.start, piece.stop) for piece in plan.partitions(end, last, world)] == [(OTHER, 1, 2)]


def test_a_topic_that_disappears_is_a_loss() -> None:
    world = split_world()
    world.by_name[OTHER] = Topic(OTHER)
    start = pattern_planner().latest(pattern_planner().initial(), Limits(), world)
    del world.by_name[OTHER]
    world.send(1)
    with pytest.raises(DataLost, match=OTHER):
        pattern_planner().latest(start, Limits(), world)
    end = pattern_planner(fail_on_data_loss=False).latest(start, Limits(), world)
    assert list(end["topics"]) == [TOPIC]


def test_a_topic_that_disappears_before_its_batch_is_read_is_a_loss() -> None:
    """The batch is in the checkpoint by then: a query that was told to go on must not fail at it for ever."""
    world = split_world()
    world.by_name[OTHER] = Topic(OTHER)
    start = pattern_planner().latest(pattern_planner().initial(), Limits(), world)
    world.send(1)
    world.send(1, topic=OTHER)
    end = pattern_planner().latest(start, Limits(), world)
    del world.by_name[OTHER]
    with pytest.raises(DataLost, match=rf"{OTHER} are lost, 1 in number"):
        pattern_planner().partitions(start, end, world)
    pieces = pattern_planner(fail_on_data_loss=False).partitions(start, end, world)
    assert {piece.topic for piece in pieces} == {TOPIC}


def test_a_topic_that_appears_after_the_cap_waits_for_the_next_run() -> None:
    world, plan = split_world(), pattern_planner()
    start = plan.latest(plan.initial(), Limits(), world)
    cap = plan.cap(world)
    world.by_name[OTHER] = Topic(OTHER)
    world.send(1, topic=OTHER)
    world.send(1)
    assert plan.latest(start, Limits(), world, until=cap) is start
    assert plan.latest(start, Limits(), world) is not start


@pytest.mark.parametrize(
    ("start", "end", "message"),
    [
        (
            {"segs": {"0": 3}, "next": 1},
            {"segs": {"0": 1}, "next": 1},
            "end at index 1 of segment 0 of .*before its start at 3",
        ),
        ({"segs": {"1": 3}, "next": 2}, {"segs": {"0": 9, "1": 4}, "next": 2}, "Segment 0 of .* was read to its end before"),
        (None, {"segs": {"0": 9}, "next": 1}, "does not say where .* begins"),
    ],
)
def test_offsets_that_do_not_fit(start: dict[str, Any] | None, end: dict[str, Any], message: str) -> None:
    def document(topic: dict[str, Any]) -> dict[str, Any]:
        return {"v": 1, "topics": {TOPIC: {"inc": "inc-1"} | topic}}

    first = {"v": 1, "from": "latest"} if start is None else document(start)
    with pytest.raises(BadOffset, match=message):
        planner().partitions(first, document(end), None)


# Limits.


def test_the_messages_of_a_batch_are_shared_by_what_waits() -> None:
    world, plan = World(Topic(TOPIC, count=3)), planner()
    for hash16, count in ((0, 60), (30_000, 30), (60_000, 1)):
        for _ in range(count):
            world.send(hash16)
    end = plan.latest(plan.initial(), Limits(max_messages=10), world)
    assert topic_of(end)["segs"] == {"0": 6, "1": 3, "2": 1}
    end = plan.latest(plan.initial(), Limits(max_messages=1), world)
    assert topic_of(end)["segs"] == {"0": 1, "1": 1, "2": 1}
    assert world.calls["offset_for"] == 0  # counting needs no question


def test_bytes_become_an_index_and_both_limits_hold() -> None:
    world, plan = World(Topic(TOPIC)), planner()
    for _ in range(50):
        world.send(1, size=10)
    assert topic_of(plan.latest(plan.initial(), Limits(max_bytes=205), world))["segs"] == {"0": 20}
    assert topic_of(plan.latest(plan.initial(), Limits(max_bytes=205, max_messages=7), world))["segs"] == {"0": 7}
    assert topic_of(plan.latest(plan.initial(), Limits(max_bytes=1), world))["segs"] == {"0": 1}
    world.calls.clear()
    assert topic_of(plan.latest(plan.initial(), Limits(max_bytes=500), world))["segs"] == {"0": 50}
    assert world.calls["offset_for"] == 0  # all of it fits


def test_a_batch_waits_for_its_minimum_but_not_for_ever() -> None:
    clock = Clock()
    world, plan = World(Topic(TOPIC)), Planner(make_options(), clock)
    limit = Limits(min_messages=3, max_delay_ms=10_000)
    start = plan.latest(plan.initial(), limit, world)
    world.send(1)
    assert plan.latest(start, limit, world) is start
    clock.now = 9.9
    assert plan.latest(start, limit, world) is start
    assert plan.latest(start, limit, world, until=plan.cap(world)) is not start  # who wants to end does not wait
    plan = Planner(make_options(), clock)
    start = plan.latest(plan.initial(), limit, world)
    world.send(1)
    assert plan.latest(start, limit, world) is start
    clock.now = 20.0
    end = plan.latest(start, limit, world)
    assert end is not start
    assert plan.latest(start, limit, world) == end  # asked again
    for _ in range(3):
        world.send(1)
    assert plan.latest(end, limit, world) is not end


# Partitions.


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"key_split": 2}, [(0, 0x3FFF), (0x4000, 0xFFFF), (0, 0xBFFF), (0xC000, 0xFFFF)]),
        ({"min_partitions": 3}, [(0, 0x3FFF), (0x4000, 0xFFFF), (None, None)]),
        ({"min_partitions": 2}, [(None, None), (None, None)]),
    ],
)
def test_segments_are_split_by_the_hash_of_keys(more: dict[str, Any], expected: list[tuple[int, int]]) -> None:
    world, plan = World(Topic(TOPIC, count=2)), planner(**more)
    for hash16 in (0, 1, 2, 3, 60_000, 60_001):
        world.send(hash16)
    end = plan.latest(plan.initial(), Limits(), world)
    assert [(piece.hash_start, piece.hash_end) for piece in plan.partitions(plan.initial(), end, world)] == expected


def test_a_regular_topic_has_keys_of_all_hashes_in_each_partition() -> None:
    world, plan = World(Topic(TOPIC, count=2)), planner(key_split=2)
    for segment in world.by_name[TOPIC].segments.values():
        segment.topic = "persistent://public/default/orders-partition-0"
    for hash16 in (0, 1, 2, 3):
        world.send(hash16)
    end = plan.latest(plan.initial(), Limits(), world)
    pieces = plan.partitions(plan.initial(), end, world)
    assert [(piece.hash_start, piece.hash_end) for piece in pieces] == [(0, 0x7FFF), (0x8000, 0xFFFF)]


def test_a_lag_of_each_segment() -> None:
    world, plan = split_world(), planner()
    assert plan.lag(plan.initial(), world)["lag"] == 0
    start = plan.latest(plan.initial(), Limits(max_messages=1), world)
    world.by_name[TOPIC].split(1)
    world.send(1)
    assert plan.lag(start, world) == {
        "v": 1,
        "lag": 10,
        "lost": {"messages": 0, "segments": 0},
        "topics": {TOPIC: {"0": 3, "1": 3, "2": 3, "3": 1, "4": 0}},
    }
