"""The drawing of a scalable topic's segments: where boxes stand, what is said in words, and what hostile names can do."""

from __future__ import annotations

import random
from collections.abc import Iterable
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from braid.cli.dag import DagLook, drawing, screen
from braid.cli.scalable_output import age, blocked, generations, metadata_parts, stats_parts
from braid.client.admin_scalable_types import (
    Blocked,
    Hashes,
    Pending,
    ScalableTopicInfo,
    ScalableTopicStats,
    SegmentNode,
    SegmentSummary,
    SubscriptionSummary,
)
from braid.model.layout import SegmentLayout

NOW = 1_780_000_000_000


def nodes(layout: SegmentLayout) -> dict[int, SegmentNode]:
    return {
        number: SegmentNode(
            segment_id=number,
            hash_range=Hashes(start=each.hash_range.start, end=each.hash_range.end),
            state=each.state.value,
            parent_ids=each.parent_ids,
            child_ids=each.child_ids,
        )
        for number, each in layout.all_segments.items()
    }


def look(layout: SegmentLayout, stats: ScalableTopicStats | None = None, pending: Pending | None = None) -> DagLook:
    segments = nodes(layout)
    metadata = ScalableTopicInfo(epoch=layout.epoch, segments=segments, routing="high16", pending_operation=pending)
    return DagLook(
        topic="topic://public/default/orders",
        metadata=metadata,
        stats=stats,
        generations=generations(segments.values()),
        seen_ms=NOW,
    )


def text(parts: Iterable[Any], width: int = 200) -> str:
    console = Console(file=StringIO(), width=width, markup=False, highlight=False, emoji=False)
    for part in parts:
        console.print(part)
    found = console.file
    assert isinstance(found, StringIO)
    return "\n".join(line.rstrip() for line in found.getvalue().splitlines())


def test_a_split_and_a_merge_are_drawn_below_what_they_came_from() -> None:
    layout = SegmentLayout.initial(1, NOW).split(0, NOW).split(1, NOW).merge(4, 2, NOW)
    found = look(layout)
    assert found.generations == {0: 0, 1: 1, 2: 1, 3: 2, 4: 2, 5: 3}
    lines = text(drawing(found, 64)).splitlines()
    assert [line.count("[") for line in lines] == [1, 2, 2, 1, 0]
    assert all(len(line) <= 64 for line in lines)
    assert lines[0].startswith("[·") and "0 sealed 0000-ffff" in lines[0] and lines[0].endswith("·]")
    assert (lines[1].index("["), lines[1].rindex("[")) == (0, 32)
    assert (lines[2].index("["), lines[2].rindex("[")) == (0, 16)
    assert lines[3].index("[") == 16 and len(lines[3]) == 64 and "5 active 4000-ffff" in lines[3]


def test_boxes_stand_where_their_hashes_are_however_the_topic_was_changed() -> None:
    chance = random.Random(5)
    layout = SegmentLayout.initial(3, NOW)
    for _ in range(60):
        active = layout.active_in_order
        if chance.random() < 0.45 and len(active) > 1:
            at = chance.randrange(len(active) - 1)
            layout = layout.merge(active[at].segment_id, active[at + 1].segment_id, NOW)
        else:
            layout = layout.split(chance.choice(active).segment_id, NOW)
        sealed = [number for number, each in layout.all_segments.items() if each.is_sealed]
        if len(sealed) > 20:  # in any order: the edges to what is pruned are gone
            layout = layout.prune(chance.sample(sealed, 3))
        found = generations(nodes(layout).values())
        for one in layout.all_segments.values():
            for other in layout.all_segments.values():
                is_over = one.hash_range.start <= other.hash_range.end and other.hash_range.start <= one.hash_range.end
                if one.segment_id < other.segment_id and is_over:
                    assert found[one.segment_id] < found[other.segment_id]
        for width in (32, 80, 160):
            assert all(len(line) <= width for line in text(drawing(look(layout), width)).splitlines())


def test_a_thousand_segments_fit_the_screen() -> None:
    layout = SegmentLayout.initial(1024, NOW)
    lines = text(drawing(look(layout), 80)).splitlines()
    assert len(lines) == 2 and len(lines[0]) == 80
    shown = text(screen(look(layout), 10, 80))
    assert "1014 more are not shown" in shown


def test_everything_is_on_the_screen() -> None:
    layout = SegmentLayout.initial(1, NOW).split(0, NOW)
    stats = ScalableTopicStats(
        epoch=1,
        leader="host:8080",
        segments={
            0: SegmentSummary(name="a", state="SEALED", owner="host:8081", backlog={"billing": 7}),
            1: SegmentSummary(name="b", state="ACTIVE", owner="host:8082", msg_rate_in=12.34, msg_rate_out=5.0),
            2: SegmentSummary(name="c", state="ACTIVE", is_reachable=False),
        },
        subscriptions={
            "billing": SubscriptionSummary(
                type="STREAM",
                state="DRAINING",
                consumer_count=2,
                connected_consumers=1,
                backlog=7,
                blocked_by=[
                    Blocked(
                        kind="draining-parent",
                        segment=0,
                        detail={"waiting": [1, 2], "messages": 7, "consumer": "c1"},
                        since=NOW - 5000,
                    )
                ],
            ),
            "audit": SubscriptionSummary(type="QUEUE", state="RUNNING", connected_consumers=3, backlog=0),
        },
    )
    pending = Pending(kind="split", stage="prepare", parents=(1,), started_ms=NOW - 2000)
    shown = text(screen(look(layout, stats, pending), 100, 120))
    for expected in (
        "topic://public/default/orders: epoch 1, 2 active and 1 sealed segments, routing high16",
        "leader: host:8080; under way: split of 1, being prepared, for 2 s",
        "0000-7fff",
        "host:8082",
        "12.3",
        "billing=7",
        "does not answer",
        "1 of 2",
        "segment 0 is being read to its end by c1, 7 entries are left; segments 1, 2 wait for it (for 5 s)",
        "nothing",
    ):
        assert expected in shown, expected
    without = text(screen(look(layout), 100, 100))
    assert "leader: not known at the moment; under way: nothing" in without
    assert "Subscriptions" not in without


def loaded(layout: SegmentLayout, **more: Any) -> ScalableTopicStats:
    segments = {
        number: SegmentSummary(
            name="x", state=each.state.value, owner="broker-7.example.org:8080", msg_rate_in=1234.5, backlog={"billing": number}
        )
        for number, each in layout.all_segments.items()
    }
    waiting = Blocked(kind="draining-parent", segment=0, detail={"waiting": [1, 2, 3]})
    billing = SubscriptionSummary(type="STREAM", state="DRAINING", consumer_count=1, backlog=7, blocked_by=[waiting])
    found = {"epoch": layout.epoch, "segments": segments, "subscriptions": {"billing": billing}}
    return ScalableTopicStats(**{**found, **more})


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_every_segment_has_one_line_on_a_screen_of_any_width(width: int) -> None:
    layout = SegmentLayout.initial(2, NOW).split(0, NOW).split(1, NOW)
    shown = text(screen(look(layout, loaded(layout)), None, width, 60), width)
    table = shown[shown.index("Segments\n") :].splitlines()
    assert len(table) == 4 + 6 and all(len(line) <= width for line in table)
    for number, each in layout.all_segments.items():
        assert sum(line.split()[:2] == [str(number), each.state.value.lower()] for line in table) == 1
    assert table[2].split()[0] == "segment" and table[2].endswith("entries left")
    assert ("range" in table[2], "in/s" in table[2]) == (width >= 60, width >= 60)
    assert ("owner" in table[2], "bytes" in table[2]) == (width >= 120, width >= 120)


@pytest.mark.parametrize("height", [24, 40])
def test_what_holds_subscriptions_up_is_never_off_the_screen(height: int) -> None:
    layout = SegmentLayout.initial(4, NOW)
    for _ in range(12):
        layout = layout.split(layout.active_in_order[0].segment_id, NOW)
    lines = text(screen(look(layout, loaded(layout)), None, 80, height), 80).splitlines()
    assert len(lines) <= height
    shown = "\n".join(lines)
    assert "billing is held up: segment 0 is being read to its end" in shown and "more are not shown" in shown
    assert sum(" active " in line for line in lines[shown[: shown.index("Segments (")].count("\n") :]) >= 3
    whole = text(screen(look(layout, loaded(layout)), None, None))
    assert "not shown" not in whole and "broker-7.example.org:8080" in whole


def test_an_active_segment_that_takes_nothing_is_shown_as_such() -> None:
    layout = SegmentLayout.initial(2, NOW)
    ended = {
        0: SegmentSummary(name="a", state="ACTIVE", owner="h:1", is_terminated=True),
        1: SegmentSummary(name="b", state="ACTIVE", owner="h:1"),
    }
    for parts in (
        screen(look(layout, loaded(layout, segments=ended)), None, 80),
        stats_parts(loaded(layout, segments=ended), NOW),
    ):
        shown = text(parts)
        assert any(line.split()[:2] == ["0", "terminated"] for line in shown.splitlines())
        assert any(line.split()[:2] == ["1", "active"] for line in shown.splitlines())
        assert "terminated and not sealed: 0. Nothing can be sent to their hashes" in shown
    drawn = text(screen(look(layout, loaded(layout, segments=ended)), 1, 80))
    assert "0 terminated 0000-7fff" in drawn and "1 more are not shown" in drawn  # the one to be repaired is
    assert any(line.split()[:2] == ["0", "terminated"] for line in drawn.splitlines())
    splitting = Pending(kind="split", parents=(0,))
    assert "not sealed" not in text(stats_parts(loaded(layout, segments=ended, pending_operation=splitting), NOW))
    assert "not sealed" not in text(stats_parts(loaded(layout), NOW))


@pytest.mark.parametrize(
    ("why", "words"),
    [
        (Blocked(kind="no-consumer"), "nobody consumes it"),
        (
            Blocked(kind="consumer-away", detail={"consumer": "c", "segments": [1], "evictedAtMs": NOW + 30_000}),
            "the consumer c is away with segments 1; others get them in 30 s",
        ),
        (Blocked(kind="consumer-away"), "the consumer ? is away with segments -"),
        (Blocked(kind="open-transaction", segment=4, since=NOW - 600_000), "an open transaction in segment 4 (for 10 min)"),
        (Blocked(kind="draining-parent", segment=3), "segment 3 is being read to its end"),
        (Blocked(kind="something-new"), "something-new"),
    ],
)
def test_what_holds_a_subscription_up_in_words(why: Blocked, words: str) -> None:
    assert blocked(why, NOW) == words


def test_ages() -> None:
    assert [age(ms) for ms in (-5, 0, 1499, 119_000, 121_000, 7_300_000, 200_000_000)] == [
        "0 s",
        "0 s",
        "1 s",
        "119 s",
        "2 min",
        "2 h",
        "2 days",
    ]


def test_names_of_others_are_text() -> None:
    hostile = "[red]x[/red]\x1b[2J\n:smile:"
    stats = ScalableTopicStats(
        epoch=0, leader=hostile, segments={0: SegmentSummary(name=hostile, owner=hostile)}, subscriptions={
            hostile: SubscriptionSummary(type="STREAM", state="RUNNING", blocked_by=[Blocked(kind=hostile)])
        },
    )  # fmt: skip
    layout = SegmentLayout.initial(1, NOW)
    info = ScalableTopicInfo(epoch=0, segments=nodes(layout), properties={hostile: hostile})
    for parts in (screen(look(layout, stats), 10, 80), stats_parts(stats, NOW), metadata_parts(info)):
        shown = text(parts)
        assert "\x1b" not in shown and ":smile:" in shown and "[red]" in shown
