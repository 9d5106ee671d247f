"""Planted bugs of scalable topics; see `planted.py`. Numbers are those of the reliability sheet; 1010 and 1037 are its 10 and
37 once more, in the watches of layouts."""

from __future__ import annotations

from typing import Any

import msgspec
from tests.sim.planting import Patch, Plant, changed

from braid.broker.segments import LocalSegments
from braid.broker.topic_records import TopicRecords
from braid.client import checkpoint_starts
from braid.client.checkpoints import Checkpoint, check_fits
from braid.client.producer import Producer
from braid.client.producer_lanes import LaneSet
from braid.client.stream_consumer import StreamConsumer
from braid.client.stream_lanes import StreamLane
from braid.model.assignment import in_order
from braid.scalable import coordinator, draining, plans_layout, plans_upkeep
from braid.scalable.dag_watch import DagWatchSession
from braid.testing.sim import world
from braid.testing.sim.trouble import Trouble

RETRIES = 10
RECENT_MS = 15_000
"""Subscriptions of the last seconds: a split takes less, but not in the eyes of bug 11."""


def ack_on_close() -> list[Patch]:
    honest = StreamConsumer.close

    async def close(consumer: Any) -> None:
        for lane in consumer._lanes.values():
            if lane.newest is not None:
                lane.acknowledge_up_to(lane.newest)
        await honest(consumer)

    return [(StreamConsumer, "close", close)]


def children_before_parents() -> list[Patch]:
    def all_at_once(layout: Any, drained: Any) -> Any:
        return in_order([each for number, each in layout.all_segments.items() if number not in drained])

    return [(coordinator, "assignable", all_at_once), (draining, "assignable", all_at_once)]


def producer_per_retry() -> list[Patch]:
    honest = LaneSet.lane_sealed

    def sealed(lanes: Any, lane: Any) -> None:
        honest(lanes, lane)
        if lane in lanes.lanes.values():
            for number in range(RETRIES):
                lanes._lane(lane.topic, f"{lane.name}-{number}", lane.segment).start()

    return [(LaneSet, "lane_sealed", sealed)]


def seal_before_intent() -> list[Patch]:
    """Both that the leader does not write down first what it does, and that no owner asks for it."""
    intend = '    async with step("split:intend"):\n'
    first = "    await work.terminate(work.layout.segment(segment_id))\n"
    guard = "if not (listed.is_pending or listed.segment.is_sealed or force):"
    return [
        *changed(plans_layout, "split", intend, first + intend),
        *changed(LocalSegments, "terminate", guard, "if False:"),
    ]


def leaking_sessions() -> list[Patch]:
    def stay(_session: Any) -> None:
        """The client is gone and its session goes on."""

    return [(DagWatchSession, "close", stay)]


def children_without_new_subscriptions() -> list[Patch]:
    """Neither found before the split, nor completed after it, nor repaired later."""
    honest = plans_layout._discover

    async def discover(work: Any, parents: Any) -> set[str]:
        found = await honest(work, parents)
        now = work.runtime.clock.now_ms()
        recent = {name for name, record in (await work.subscriptions()).items() if record.created_ms > now - RECENT_MS}
        return found - recent

    async def no_late_cursors(_work: Any, _pending: Any, _children: Any) -> None:
        """Whoever subscribed meanwhile is forgotten."""

    async def no_upkeep(_work: Any, _notify: Any) -> list[int]:
        return []

    return [
        (plans_layout, "_discover", discover),
        (plans_layout, "_late_cursors", no_late_cursors),
        (plans_upkeep, "look_after", no_upkeep),
    ]


def early_flush() -> list[Patch]:
    async def flush(_producer: Any) -> None:
        """Returns at once."""

    return [(Producer, "flush", flush)]


def any_incarnation() -> list[Patch]:
    def lenient(checkpoint: Checkpoint, topic: str, incarnation: str, *more: Any, **options: Any) -> None:
        check_fits(msgspec.structs.replace(checkpoint, incarnation=incarnation), topic, incarnation, *more, **options)

    return [(checkpoint_starts, "check_fits", lenient)]


def no_layout_reconcile() -> list[Patch]:
    """Notifications are lost from the beginning to the end."""
    honest = Trouble.__init__

    def lossy(trouble: Any, *args: Any, **options: Any) -> None:
        honest(trouble, *args, **{**options, "drop_every": 3})

    def stay(_trouble: Any) -> None:
        """It never gets better."""

    never = msgspec.structs.replace(world.SCALABLE, reconcile_seconds=3600.0)
    return [(world, "SCALABLE", never), (Trouble, "__init__", lossy), (Trouble, "clear", stay)]


SCALABLE_PLANTS: dict[int, Plant] = {
    7: Plant("ack on consumer close", "W1", 3, ("C1",), ack_on_close),
    8: Plant("parent not drained before child", "W1", 1, ("C5", "C4"), children_before_parents),
    9: Plant("new producer per retry on a sealed parent", "W1", 11, ("C19",), producer_per_retry),
    11: Plant(
        "children without a subscription created during the split", "W6", 43, ("C1",), children_without_new_subscriptions
    ),
    12: Plant(
        "layout CAS before parent sealed",
        "W1",
        1,
        ("C11",),
        lambda: changed(
            plans_layout,
            "roll_forward",
            "        known: list[Mapping[str, int]] = []\n",
            "        await _flip(work, pending)\n        known: list[Mapping[str, int]] = []\n",
        ),
    ),
    22: Plant("flush returns early", "W1", 9, ("C1",), early_flush),
    25: Plant(
        "rebalance moves a segment whose in-flight acks are unresolved",
        "W6",
        0,
        ("C3", "C4", "C5"),
        lambda: [(StreamLane, "is_unresolved", property(lambda _lane: False))],
    ),
    30: Plant("topic re-created under the same name accepts an old checkpoint", "W3", 0, ("C17",), any_incarnation),
    32: Plant(
        "merged child inherits the higher sequence of the other parent's lane",
        "W1",
        27,
        ("C1", "C3"),
        lambda: changed(
            plans_layout,
            "roll_forward",
            "            if producers:\n",
            "            producers = dict.fromkeys(producers, max(producers.values(), default=0))\n            if producers:\n",
        ),
    ),
    34: Plant(
        "an owner ignores the leader epoch",
        "W6",
        2,
        ("C13", "C11"),
        lambda: changed(TopicRecords, "checked", "if epoch < listed.record.leader_epoch:", "if False:"),
    ),
    35: Plant(
        "a segment touched before the pending operation is written",
        "W1",
        1,
        ("C11",),
        seal_before_intent,
    ),
    1010: Plant("watch listener leak, of layouts", "W1", 1, ("C19",), leaking_sessions),
    1037: Plant(
        "no reconcile of layouts while every third notification is dropped", "W6", 7, ("C1", "C17", "C18"), no_layout_reconcile
    ),
}
