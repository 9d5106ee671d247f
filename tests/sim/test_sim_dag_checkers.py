"""Checkers of scalable topics on histories made by hand: each accepts a good one and names what is wrong with a bad one."""

from __future__ import annotations

from typing import Any

import pytest

from braid.testing.sim import dag_checkers
from braid.testing.sim.checkers import Violation
from braid.testing.sim.history import Event

T = "topic://public/default/t"
Row = tuple[Any, ...]
A, S = "ACTIVE", "SEALED"


def history(*rows: Row) -> list[Event]:
    """Events from (proc, kind, op, value[, more]); time is their place."""
    return [Event(float(at), row[0], row[1], row[2], row[3], **(row[4] if len(row) > 4 else {})) for at, row in enumerate(rows)]


def names(found: list[Violation]) -> list[str]:
    return [violation.checker for violation in found]


def layout(epoch: int, following: int, leader: int = 1, pending: Any = None, **segments: list[Any]) -> Row:
    """`s0=[first, last, state, parents, children]` and so on."""
    value = {
        "topic": T,
        "incarnation": "i",
        "leader": leader,
        "next": following,
        "segments": {name[1:]: each for name, each in segments.items()},
        "pending": pending,
    }
    return ("store", "info", "layout", value, {"epoch": epoch})


WHOLE = layout(0, 1, s0=[0, 0xFFFF, A, [], []])
SPLIT = layout(1, 3, s0=[0, 0xFFFF, S, [], [1, 2]], s1=[0, 0x7FFF, A, [0], []], s2=[0x8000, 0xFFFF, A, [0], []])
MERGED = layout(
    2,
    4,
    s0=[0, 0xFFFF, S, [], [1, 2]],
    s1=[0, 0x7FFF, S, [0], [3]],
    s2=[0x8000, 0xFFFF, S, [0], [3]],
    s3=[0, 0xFFFF, A, [1, 2], []],
)
PRUNED = layout(3, 4, s1=[0, 0x7FFF, S, [], [3]], s2=[0x8000, 0xFFFF, S, [], [3]], s3=[0, 0xFFFF, A, [1, 2], []])


def test_a_life_of_splits_merges_and_prunes_is_a_dag() -> None:
    assert dag_checkers.dag(history(WHOLE, WHOLE, SPLIT, MERGED, PRUNED)) == []


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([layout(0, 1, s0=[0, 0x7FFF, A, [], []])], "no active segment covers hash 8000"),
        ([layout(0, 2, s0=[0, 0x8000, A, [], []], s1=[0x8000, 0xFFFF, A, [], []])], "gap or overlap"),
        ([layout(0, 2, s0=[0, 0x7FFE, A, [], []], s1=[0x8000, 0xFFFF, A, [], []])], "gap or overlap"),
        ([SPLIT, WHOLE], "the epoch went back"),
        ([WHOLE, layout(0, 3, **{f"s{n}": v for n, v in SPLIT[3]["segments"].items()})], "the epoch did not"),
        ([PRUNED, layout(4, 4, **{f"s{n}": v for n, v in MERGED[3]["segments"].items()})], "its id is not"),
        ([WHOLE, layout(1, 1, s0=[0, 0xFFFF, A, [], []], s1=[0, 0, S, [], []])], "not below the next id"),
        ([SPLIT, layout(2, 3, s0=[0, 0xFFFF, A, [], []])], "active again"),
        ([layout(1, 2, s0=[0, 0xFFFF, A, [1], []])], "older than a parent"),
        (
            [WHOLE, layout(1, 3, s0=[0, 0x7FFF, S, [], [1]], s1=[0, 0xFFFF, A, [0], []])],
            "reaches out of its parents",
        ),
        ([WHOLE, layout(1, 2, s0=[0, 0xFFFF, S, [], [1]], s1=[0, 0xFFFF, A, [], []])], "does not know it"),
        ([MERGED, PRUNED, layout(4, 4, **{f"s{n}": v for n, v in MERGED[3]["segments"].items()})], "used again"),
    ],
)
def test_a_layout_that_is_no_dag_is_found(rows: list[Row], text: str) -> None:
    found = dag_checkers.dag(history(*rows))
    assert any(text in violation.text for violation in found), found
    assert set(names(found)) == {"C11"}


def test_another_incarnation_begins_anew() -> None:
    again = layout(0, 1, s0=[0, 0xFFFF, A, [], []])
    again[3]["incarnation"] = "j"
    assert dag_checkers.dag(history(SPLIT, again)) == []


def test_terms_of_leaders_never_go_back() -> None:
    assert dag_checkers.leader_terms(history(layout(0, 1, 1), layout(0, 1, 4), layout(1, 1, 4))) == []
    assert names(dag_checkers.leader_terms(history(layout(0, 1, 4), layout(1, 1, 1)))) == ["C13"]


def test_intent_is_written_before_segments_are_touched() -> None:
    def segment(op: str, number: str) -> Row:
        return ("store", "info", op, [T, number])

    intent = layout(0, 1, pending={"kind": "split", "parents": [0], "children": [1, 2]}, s0=[0, 0xFFFF, A, [], []])
    made = [segment("segment-made", "1"), segment("segment-made", "2")]
    good = [WHOLE, segment("segment-made", "0"), intent, *made, segment("segment-sealed", "0"), SPLIT]
    assert dag_checkers.intent_first(history(*good)) == []
    early = [WHOLE, made[0], intent]
    assert "without intent" in dag_checkers.intent_first(history(*early))[0].text
    sealed_early = [WHOLE, segment("segment-sealed", "0"), intent]
    assert "without intent" in dag_checkers.intent_first(history(*sealed_early))[0].text
    flipped = [WHOLE, intent, *made, SPLIT, segment("segment-sealed", "0")]
    assert "not sealed" in dag_checkers.intent_first(history(*flipped))[0].text


def got(sequence: int, segment: int, *, subscription: str = "s", key: str = "k") -> Row:
    return ("c", "ok", "deliver", [T, subscription, "p", key, sequence, f"1:{sequence}", 0], {"segment": segment})


def test_a_parent_is_drained_before_its_children_begin() -> None:
    def check(*rows: Row) -> list[str]:
        return names(dag_checkers.drained_first(history(WHOLE, SPLIT, MERGED, *rows), ordered=["s"]))

    assert check(got(0, 0), got(1, 0), got(2, 1), got(3, 2), got(4, 1), got(5, 3)) == []
    assert check(got(0, 0), got(1, 1), got(0, 0)) == [], "it came again"
    assert check(got(0, 1), got(1, 0)) == ["C5"]
    assert check(got(0, 3), got(1, 2)) == ["C5"]
    assert check(got(0, 3), got(1, 0)) == ["C5"], "not a parent but an ancestor"
    assert check(got(0, 1), got(1, 0, subscription="other")) == []
    begin, end = ("op", "invoke", "seek-to", [T, "s", 0]), ("op", "ok", "seek-to", [T, "s", 0])
    assert check(got(0, 3), begin, got(1, 2), end, got(0, 0)) == []
    assert check(got(0, 3), begin, end, got(2, 1), got(0, 0)) == ["C5"]
    assert check(got(0, 3), ("op", "info", "seek-to", [T, "s", 0]), got(2, 1), got(0, 0)) == [], "nobody knows when"


def test_after_a_prune_the_order_still_counts() -> None:
    rows = history(WHOLE, SPLIT, MERGED, got(0, 3), PRUNED, got(1, 0))
    assert names(dag_checkers.drained_first(rows, ordered=["s"])) == ["C5"]


def restore(reader: str, checkpoint: str | None = None, incarnation: str = "i") -> Row:
    return (reader, "ok", "restore", [T, reader, checkpoint, incarnation])


def taken(reader: str, checkpoint: str, incarnation: str = "i") -> Row:
    return (reader, "ok", "checkpoint", [T, reader, checkpoint, incarnation])


def read(reader: str, sequence: int, key: str = "k") -> Row:
    return (reader, "ok", "deliver", [T, reader, "p", key, sequence, f"1:{sequence}", 0])


def sent(sequence: int, key: str = "k") -> Row:
    return ("p", "ok", "send", [T, "p", key, sequence, f"1:{sequence}"])


def test_a_restored_reader_goes_on_where_the_checkpoint_was_taken() -> None:
    def check(*rows: Row) -> list[str]:
        return [violation.text for violation in dag_checkers.checkpoints(history(*rows))]

    first = (restore("a"), read("a", 0), read("a", 9, "l"), taken("a", "one"), read("a", 1), read("a", 2))
    assert check(*first, restore("b", "one"), read("b", 1), read("b", 2), read("b", 3)) == []
    assert check(*first, restore("b", "one"), taken("b", "two"), restore("c", "two"), read("c", 1)) == []
    assert "where others had ('p', 1)" in check(*first, restore("b", "one"), read("b", 2))[0], "a gap"
    assert "again" in check(*first, restore("b", "one"), read("b", 0))[0]
    assert "where others had" in check(*first, restore("b"), read("b", 1))[0]
    assert check(sent(0), sent(9, "l"), *first, ("a", "ok", "complete", [T, "a"])) == []
    ended = check(sent(0), sent(7), *first, ("a", "ok", "complete", [T, "a"]))
    assert len(ended) == 1 and "never got ('p', 7)" in ended[0]


def test_a_checkpoint_of_a_deleted_topic_is_refused_by_its_successor() -> None:
    rows = (restore("a"), read("a", 0), taken("a", "one"), ("store", "info", "topic-gone", T))
    refused = ("b", "fail", "restore", [T, "b", "one", "j"])
    assert dag_checkers.checkpoints(history(*rows, refused, restore("c", None, "j"), read("c", 5))) == []
    found = dag_checkers.checkpoints(history(*rows, restore("b", "one", "j")))
    assert names(found) == ["C17"] and "predecessor" in found[0].text


def call(kind: str, term: int, number: int = 1) -> Row:
    return ("b", kind, "segment-call", [T, "segment://s", "terminate"], {"epoch": term, "number": number})


def test_owners_refuse_leaders_that_have_a_successor() -> None:
    def check(*rows: Row) -> list[str]:
        return names(dag_checkers.stale_calls(history(*rows)))

    assert check(layout(0, 1, 4), call("invoke", 4), call("ok", 4)) == []
    assert check(layout(0, 1, 4), call("invoke", 4), layout(0, 1, 7), call("ok", 4)) == [], "it was under way"
    assert check(layout(0, 1, 7), call("invoke", 4)) == [], "refused"
    assert check(layout(0, 1, 7), call("invoke", 4), call("ok", 4)) == ["C13"]


def test_in_peace_a_message_comes_twice_only_after_its_consumer_left() -> None:
    def check(*rows: Row) -> list[str]:
        return names(dag_checkers.handed_over(history(*rows), ordered=["s"]))

    again = ("d", *got(0, 0)[1:])
    assert check(got(0, 0), got(1, 0)) == []
    assert check(got(0, 0), again) == ["C3"]
    assert check(got(0, 0), ("c", "info", "leave", [T, "s"]), again) == []
    assert check(got(0, 0), ("world", "info", "fault", ["kill"]), again) == []


def test_lanes_are_bounded_by_segments() -> None:
    assert dag_checkers.lanes_bounded(history(("p", "info", "lanes", [T, "p", 8, 3]))) == []
    assert names(dag_checkers.lanes_bounded(history(("p", "info", "lanes", [T, "p", 9, 3])))) == ["C19"]
