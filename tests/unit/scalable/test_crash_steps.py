"""A leader that dies before or after any step of any plan: the next one finishes what it began (INV6, INV7).

The steps are taken from the plans at run time. Each crash point is a world of its own, in virtual time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest
from tests.unit.scalable.fakes import TOPIC, Broker, BrokerDied, World, simulate

from braid.errors import BraidError
from braid.model.segments import SegmentEnd, physical_name
from braid.runtime.plans import Moment, watching
from braid.scalable.records import controller_path, subscriptions_path
from braid.scalable.service import ScalableTopicService
from braid.testing.sim.loop import NODE

Work = Callable[[ScalableTopicService], Coroutine[Any, Any, Any]]
BOUND = 16.0
"""Seconds from the leader's death until its successor is done: session timeout (10), and a look at the record (5)."""
ADOPTION = 47.0
"""The same if no other broker had a controller of the topic: `adopt_seconds` (30) more."""


async def _prepare(world: World, broker: Broker) -> None:
    """A topic with 3 segments, one of them sealed; subscriptions of three kinds; producers that ask for deduplication."""
    await broker.do(lambda service: service.create_topic(TOPIC, 1))
    controller = await broker.lead()
    world.segments.named(TOPIC, controller.layout, 0).messages = 10
    await broker.do(lambda _service: controller.create_subscription("stream", "STREAM", "earliest"))
    await broker.do(lambda service: service.register_queue_subscription(TOPIC, "queue", "latest"))
    world.segments.named(TOPIC, controller.layout, 0).producers["p-seg-0"] = 4
    await broker.do(lambda _service: controller.split_segment(0))
    for number in (1, 2):
        topic = world.segments.named(TOPIC, controller.layout, number)
        topic.messages = 5
        topic.producers[f"p-seg-{number}"] = 6 + number
    world.segments.named(TOPIC, controller.layout, 2).cursors["only at the owner"] = 0


async def _split(service: ScalableTopicService) -> None:
    await (await service.lead_scalable(TOPIC)).split_segment(2)


async def _merge(service: ScalableTopicService) -> None:
    await (await service.lead_scalable(TOPIC)).merge_segments(1, 2)


async def _prune(service: ScalableTopicService) -> None:
    await (await service.lead_scalable(TOPIC)).prune()


async def _delete(service: ScalableTopicService) -> None:
    await service.delete_topic(TOPIC)


async def _create(service: ScalableTopicService) -> None:
    await service.create_topic(TOPIC, 3)


async def _create_subscription(service: ScalableTopicService) -> None:
    await (await service.lead_scalable(TOPIC)).create_subscription("another")


async def _delete_subscription(service: ScalableTopicService) -> None:
    await (await service.lead_scalable(TOPIC)).delete_subscription("stream")


async def _seek(service: ScalableTopicService) -> None:
    await (await service.lead_scalable(TOPIC)).seek("stream", 0)


async def _clear_backlog(service: ScalableTopicService) -> None:
    await (await service.lead_scalable(TOPIC)).clear_backlog("stream")


PLANS: dict[str, Work] = {
    "create": _create,
    "delete": _delete,
    "split": _split,
    "merge": _merge,
    "prune": _prune,
    "create-subscription": _create_subscription,
    "delete-subscription": _delete_subscription,
    "seek": _seek,
    "clear-backlog": _clear_backlog,
}
LAYOUT_AFTER = {
    # ids of all segments before and after
    "create": (None, {0, 1, 2}),
    "delete": ({0, 1, 2}, None),
    "split": ({0, 1, 2}, {0, 1, 2, 3, 4}),
    "merge": ({0, 1, 2}, {0, 1, 2, 3}),
    "prune": ({0, 1, 2}, {1, 2}),
}


async def _check(world: World, kind: str) -> None:
    """The rules that hold whenever nothing is pending."""
    metadata = await world.metadata()
    segments = world.segments.topics
    if metadata is None:
        assert kind in ("create", "delete")
        assert not segments, "a segment outlived its topic"
        assert await world.records(subscriptions_path(TOPIC)) == []
        return
    assert metadata.pending_operation is None
    layout = metadata.layout
    layout.check()
    gone = set(range(layout.next_segment_id)) - set(layout.all_segments)
    ends = {number: msgspec.structs.replace(end, hash_range=None) for number, end in metadata.pruned_ends.items()}
    assert ends == dict.fromkeys(gone, SegmentEnd(10, 1, 9)), "where a removed segment ended is not remembered"
    assert all(end.hash_range is not None for end in metadata.pruned_ends.values()), "which keys it had is not remembered"
    names = {number: str(physical_name(TOPIC, each)) for number, each in layout.all_segments.items()}
    assert set(segments) == set(names.values()), "topics and segments of the DAG are not the same"
    records = await world.records(subscriptions_path(TOPIC))
    for number, each in layout.all_segments.items():
        topic = segments[names[number]]
        assert topic.incarnation == metadata.incarnation
        assert topic.is_sealed == each.is_sealed
        if kind != "create" and each.parent_ids:
            assert {record.name for record in records if record.name != "queue"} <= set(topic.cursors)
        for parent in each.parent_ids:
            above = segments[names[parent]]
            assert above.producers.items() <= topic.producers.items(), "a child does not know what its parent has stored"
            assert set(above.cursors) <= set(topic.cursors), "a child lacks a cursor of its parent"
            assert all(topic.cursors[name] == 0 for name in topic.cursors if each.child_ids == () and each.created_at_epoch > 1)
    for record in records:
        assert b'"pending"' not in record.value


async def _run_to(world: World, kind: str, crash_at: int | None, standby: bool) -> tuple[list[tuple[str, Moment]], bool]:
    """Run a plan and kill its broker at the given point; returns the points passed and whether the plan ended."""
    world.owners[TOPIC] = 2
    first = await world.broker()
    if kind != "create":
        await _prepare(world, first)
    if kind == "prune":
        world.segments.named(TOPIC, await world.layout(), 0).cursors = {"stream": 10, "queue": 10}
    if standby:
        second = await world.broker()
        if kind != "create":
            await second.do(lambda service: service.controller(TOPIC))
    points: list[tuple[str, Moment]] = []

    async def hook(name: str, moment: Moment) -> None:
        if NODE.get() is not first.node:
            return
        points.append((name, moment))
        if len(points) - 1 == crash_at:
            await first.crash_here()

    with watching(hook):
        try:
            await first.do(PLANS[kind])
        except BrokerDied:
            return points, False
    return points, True


async def _crash_world(world: World, kind: str, crash_at: int, standby: bool) -> float:
    points, is_done = await _run_to(world, kind, crash_at, standby)
    assert not is_done, f"the broker was to die at {points[-1]}"
    died = asyncio.get_running_loop().time()
    if not standby:
        await world.broker()
    last = points[-1]

    async def settled() -> bool:
        metadata = await world.metadata()
        leader = await world.store.get(controller_path(TOPIC), fresh=True)
        if metadata is None:
            return leader is None
        if leader is None or leader.value != b'"broker-2:8080"':
            return False
        try:
            await world.brokers[1].lead()
        except BraidError:
            return False
        return (await world.until_settled()) is not None

    await world.until(settled, patience=120)
    took = asyncio.get_running_loop().time() - died
    assert took < (BOUND if standby and kind != "create" else ADOPTION), f"{last} took {took:.1f} s"
    await _check(world, kind)
    before_after = LAYOUT_AFTER.get(kind)
    if before_after is not None:
        metadata = await world.metadata()
        found = None if metadata is None else set(metadata.segments)
        begins = "prune:flip" if kind == "prune" else f"{kind}:intend"
        is_unbegun = last == (begins, "before") or last[0] == "prune:discover"
        assert found == before_after[0 if is_unbegun else 1], f"{kind} was not rolled forward from {last}"
    # The topic works: its successor can be split, or made, or is gone for good.
    if await world.metadata() is not None:
        controller = await world.brokers[1].lead()
        layout = await world.brokers[1].do(lambda _service: controller.split_segment(max(controller.layout.active_segments)))
        layout.check()
    return took


@pytest.mark.inv("INV6", "INV7")
@pytest.mark.req("R468-10", "R468-12", "R468-44", "R468-54", "R468-74")
@pytest.mark.parametrize("standby", [True, False], ids=["standby", "newcomer"])
@pytest.mark.parametrize("kind", list(PLANS))
def test_every_crash_point_is_rolled_forward(kind: str, standby: bool) -> None:
    points, is_done = simulate(lambda world: _run_to(world, kind, None, standby))
    assert is_done
    assert {name.partition(":")[0] for name, _moment in points} == {kind}
    slowest = max(
        simulate(lambda world, at=at: _crash_world(world, kind, at, standby), seed=at)  # type: ignore[misc]
        for at in range(len(points))
    )
    steps = dict.fromkeys(name for name, _moment in points)
    print(f"crash points of {kind}: {len(points)} ({', '.join(steps)}); slowest {slowest:.1f} s")
