"""Split and merge: the order of their steps, and what they do when something is in the way."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from tests.unit.scalable.fakes import TOPIC, World, merge, prune, simulate, split, steps_of, topic_with

from braid.errors import Conflict, LedgerLost, NotFound, NotReady, PreconditionFailed, SubscriptionNotFound
from braid.model.segments import physical_name
from braid.scalable.config import ScalableConfig
from braid.scalable.records import (
    ScalableTopicMetadata,
    topic_path,
)


@pytest.mark.req("R468-44", "R468-45", "R468-52", "R468-72")
@pytest.mark.inv("INV6", "INV7")
def test_split_in_order() -> None:
    async def main(world: World) -> None:
        broker = await topic_with(world, 1)
        layout = await world.layout()
        parent = world.segments.named(TOPIC, layout, 0)
        await broker.do(lambda service: service.register_queue_subscription(TOPIC, "known", "latest"))
        parent.cursors["only its owner knows"] = 3
        parent.producers["p-seg-0"] = 41
        world.segments.trace.clear()
        stored: dict[str, ScalableTopicMetadata] = {}

        async def look(name: str) -> None:
            found = await world.metadata()
            assert found is not None
            stored[name] = found
            if name == "split:seal-parent":  # before anybody can write to them
                children = [world.segments.topics[each] for each in world.segments.topics if not each.endswith("-0")]
                assert [sorted(child.cursors) for child in children] == [["known", "only its owner knows"]] * 2

        names = await steps_of(split(broker, 0), look)
        assert names == [
            "split:intend",
            "split:discover",
            "split:create-children",
            "split:seal-parent",
            "split:hand-over-producers",
            "split:flip",
            "split:late-cursors",
            "split:finish",
            "split:notify",
        ]
        assert world.segments.traced("create", "terminate") == [
            ("create", "0000-7fff-1"),
            ("create", "8000-ffff-2"),
            ("terminate", "0000-ffff-0"),
            ("create", "0000-7fff-1"),
            ("create", "8000-ffff-2"),
        ]
        pending = stored["split:discover"].pending_operation
        assert pending is not None
        assert (pending.kind, pending.stage, pending.parents) == ("split", "prepare", (0,))
        assert [each.segment_id for each in pending.children] == [1, 2]
        assert stored["split:flip"].epoch == 0  # the parent is sealed, and nobody has seen it yet
        flipped = stored["split:late-cursors"]
        assert flipped.epoch == 1
        assert flipped.pending_operation is not None
        assert flipped.pending_operation.stage == "finish"
        assert stored["split:notify"].pending_operation is None
        layout = await world.layout()
        assert parent.is_sealed
        for number in (1, 2):
            child = world.segments.named(TOPIC, layout, number)
            assert child.cursors == {"known": 0, "only its owner knows": 0}
            assert child.producers == {"p-seg-0": 41}
        assert layout.segment(0).sealed_at_ms >= layout.segment(1).created_at_ms

    simulate(main)


def test_a_child_hears_last_of_those_who_were_active_last_in_either_parent() -> None:
    """A segment remembers so many producers and forgets first whom it was told of first. A parent with many that are gone must
    not push out those who write to the other one at this moment: what they have to send again would be stored twice."""

    async def main(world: World) -> None:
        broker = await topic_with(world, 2)
        layout = await world.layout()
        for number in (0, 1):
            known = {f"gone-{number}-{each}": each for each in range(10 * number + 5)} | {f"active-{number}": 7}
            world.segments.named(TOPIC, layout, number).producers.update(known)
        await merge(broker, 0, 1)
        told = world.segments.named(TOPIC, await world.layout(), 2).producers
        assert len(told) == 22
        assert set(list(told)[-2:]) == {"active-0", "active-1"}
        assert "gone-0-4" in list(told)[-4:]

    simulate(main)


@pytest.mark.req("R468-53", "R468-54")
def test_merge_in_order() -> None:
    async def main(world: World) -> None:
        broker = await topic_with(world, 2)
        layout = await world.layout()
        first, second = (world.segments.named(TOPIC, layout, number) for number in (0, 1))
        first.producers.update({"p-seg-0": 7, "replayed": 3})
        second.producers.update({"p-seg-1": 9, "replayed": 5})
        world.segments.trace.clear()

        async def subscribe(name: str) -> None:
            if name == "merge:intend":
                second.cursors["only at the second"] = 0

        names = await steps_of(merge(broker, 1, 0), subscribe)
        assert [name for name in names if name.startswith("merge:seal")] == ["merge:seal-parent"] * 2
        assert world.segments.traced("create", "terminate") == [
            ("create", "0000-ffff-2"),
            ("terminate", "8000-ffff-1"),
            ("terminate", "0000-7fff-0"),
            ("create", "0000-ffff-2"),
        ]
        layout = await world.layout()
        assert layout.epoch == 1
        assert all(layout.segment(number).is_sealed and layout.segment(number).child_ids == (2,) for number in (0, 1))
        child = world.segments.named(TOPIC, layout, 2)
        assert child.cursors == {"only at the second": 0}
        assert child.producers == {"p-seg-0": 7, "p-seg-1": 9, "replayed": 5}

    simulate(main)


@pytest.mark.parametrize(("at", "begins"), [("split:flip", 0), ("split:late-cursors", 3)])
def test_a_subscription_at_latest_begins_in_children_that_it_was_shown_at_their_end(at: str, begins: int) -> None:
    """In children that are younger than the subscription it misses nothing; in those that were there already it wants nothing
    of what came before it."""

    async def main(world: World) -> None:
        broker = await topic_with(world, 1)

        async def appear(name: str) -> None:
            if name == at:
                await world.brokers[1].service.register_queue_subscription(TOPIC, "new", "latest")
            if name == "split:late-cursors":
                for number in (1, 2):
                    child = world.segments.named(TOPIC, await world.layout(), number)
                    child.messages = 3
                    child.cursors.pop("new", None)  # its owner could not be reached then

        await world.broker()
        await steps_of(split(broker, 0), appear)
        layout = await world.layout()
        assert [world.segments.named(TOPIC, layout, number).cursors for number in (1, 2)] == [{"new": begins}] * 2

    simulate(main)


@pytest.mark.inv("INV7")
@pytest.mark.parametrize("at", ["split:create-children", "split:seal-parent", "split:flip", "split:late-cursors"])
def test_a_subscription_that_appears_during_a_split_is_on_the_children(at: str) -> None:
    async def main(world: World) -> None:
        broker = await topic_with(world, 1)
        parent = world.segments.named(TOPIC, await world.layout(), 0)

        async def appear(name: str) -> None:
            if name == at:
                parent.cursors["at the parent"] = 0
                other = world.brokers[1].service
                await other.register_queue_subscription(TOPIC, "at the topic", "latest")

        await world.broker()
        await steps_of(split(broker, 0), appear)
        layout = await world.layout()
        for number in (1, 2):
            assert world.segments.named(TOPIC, layout, number).cursors == {"at the parent": 0, "at the topic": 0}

    simulate(main)


@pytest.mark.inv("INV7")
def test_a_subscription_that_appears_during_a_split_misses_nothing_of_the_children() -> None:
    """The layout shows the children before the last cursors are made: what was sent to them meanwhile counts."""

    async def main(world: World) -> None:
        broker = await topic_with(world, 1)
        parent = world.segments.named(TOPIC, await world.layout(), 0)

        async def appear(name: str) -> None:
            if name == "split:late-cursors":
                parent.cursors["late"] = 0
                for number in (1, 2):
                    world.segments.named(TOPIC, await world.layout(), number).messages = 3

        await steps_of(split(broker, 0), appear)
        layout = await world.layout()
        assert [world.segments.named(TOPIC, layout, number).cursors for number in (1, 2)] == [{"late": 0}] * 2

    simulate(main)


@pytest.mark.req("R468-48")
@pytest.mark.parametrize("at", ["split:discover", "split:flip", "split:finish"])
def test_somebody_else_writes_the_record_during_a_split(at: str) -> None:
    """The CAS fails, is computed anew from what was written, and nothing of that is lost."""

    async def main(world: World) -> None:
        broker = await topic_with(world, 2)

        async def meddle(name: str) -> None:
            if name == at:
                key = topic_path(TOPIC)
                found, record = await world.metadata(), await world.store.get(key, fresh=True)
                assert found is not None
                assert record is not None
                changed = msgspec.structs.replace(found, properties={"owner": "me"})
                await world.store.put(key, msgspec.json.encode(changed), expected=record.version, index=record.index)

        await steps_of(split(broker, 0), meddle)
        metadata = await world.until_settled()
        assert metadata.properties == {"owner": "me"}
        assert metadata.epoch == 1
        metadata.layout.check()

    simulate(main)


@pytest.mark.parametrize("routing", ["high16", "low16"])
def test_layout_changes_keep_everything_else_in_the_record(routing: str) -> None:
    async def main(world: World) -> None:
        broker = await world.broker()
        await broker.do(lambda service: service.create_topic(TOPIC, 2, properties={"team": "a/b"}))
        before = await world.metadata()
        await split(broker, 0)
        await merge(broker, 2, 3)
        after = await world.metadata()
        assert before is not None
        assert after is not None
        assert after.properties == {"team": "a/b"}
        assert after.routing.value == routing
        assert after.incarnation == before.incarnation
        found = await broker.do(lambda service: service.topics(TOPIC.namespace, {"team": "a/b"}))
        assert found == [str(TOPIC)]

    config = ScalableConfig(default_routing="low16" if routing == "low16" else "high16")
    simulate(main, config=config)


def test_bad_requests_change_nothing() -> None:
    async def main(world: World) -> None:
        broker = await topic_with(world, 2)
        await split(broker, 0)
        before = await world.metadata()
        world.segments.trace.clear()
        with pytest.raises(PreconditionFailed, match="sealed"):
            await split(broker, 0)
        with pytest.raises(NotFound, match=rf"split of {TOPIC} is refused.*no segment 9"):
            await split(broker, 9)
        with pytest.raises(PreconditionFailed, match="no neighbours"):
            await merge(broker, 1, 2)
        with pytest.raises(PreconditionFailed, match="itself"):
            await merge(broker, 1, 1)
        assert await world.metadata() == before
        assert world.segments.traced("create", "terminate", "delete") == []

    simulate(main)


@pytest.mark.inv("INV17")
def test_segments_of_a_topic_are_bounded() -> None:
    async def main(world: World) -> None:
        world.retention_minutes = -1
        broker = await topic_with(world, 2)
        await split(broker, 0)  # 4 with the sealed one
        with pytest.raises(PreconditionFailed, match=r"retention.*max_segments_per_topic"):
            await split(broker, 1)
        await merge(broker, 2, 3)  # 5
        world.retention_minutes = 0
        assert await prune(broker) == [0, 2, 3]
        await split(broker, 1)

    simulate(main, config=ScalableConfig(max_segments_per_topic=5))


@pytest.mark.req("R468-8")
@pytest.mark.parametrize("operation", ["create", "terminate", "subscriptions"])
def test_an_owner_that_fails_for_a_while(operation: str) -> None:
    """The caller is told; the operation goes on by itself; the next request waits for it."""

    async def main(world: World) -> None:
        broker = await topic_with(world, 2)
        controller = await broker.lead()
        until = asyncio.get_running_loop().time() + 3.0

        def fail(name: str, _segment: str) -> Exception | None:
            is_broken = name == operation and asyncio.get_running_loop().time() < until
            return NotReady("The owner of this segment is not ready.") if is_broken else None

        world.segments.fail = fail
        with pytest.raises(NotReady, match="owner of this segment"):
            await split(broker, 0)
        stats = await broker.do(lambda _service: controller.stats())
        assert stats["pendingOperation"]["kind"] == "split"
        layout = await broker.do(lambda _service: controller.split_segment(1))
        assert asyncio.get_running_loop().time() >= until
        assert layout.epoch == 2
        assert set(layout.active_segments) == {2, 3, 4, 5}

    simulate(main)


@pytest.mark.inv("INV17")
def test_a_request_waits_its_time_and_is_told_for_what() -> None:
    async def main(world: World) -> None:
        broker = await topic_with(world, 2)
        world.segments.fail = lambda name, _segment: NotReady("Never.") if name == "terminate" else None
        with pytest.raises(NotReady):
            await split(broker, 0)
        begin = asyncio.get_running_loop().time()
        with pytest.raises(Conflict, match="the split of segment 1 waited 30 s for another operation, the split of segment 0"):
            await split(broker, 1)
        assert 30.0 <= asyncio.get_running_loop().time() - begin < 31.0
        world.segments.fail = lambda _name, _segment: None
        layout = (await world.until_settled()).layout
        assert set(layout.active_segments) == {1, 2, 3}  # the second one was never begun

    simulate(main)


def test_operations_take_turns() -> None:
    async def main(world: World) -> None:
        broker = await topic_with(world, 4)
        controller = await broker.lead()
        async with asyncio.TaskGroup() as group:
            for number in range(4):
                group.create_task(broker.do(lambda _service, number=number: controller.split_segment(number)))  # type: ignore[misc]
        layout = await world.layout()
        layout.check()
        assert layout.epoch == 4
        assert len(layout.active_segments) == 8
        assert len(world.segments.topics) == 12

    simulate(main)


def test_a_caller_that_goes_away_does_not_stop_its_split() -> None:
    async def main(world: World) -> None:
        broker = await topic_with(world, 1)
        controller = await broker.lead()
        task = asyncio.get_running_loop().create_task(controller.split_segment(0))
        await asyncio.sleep(0.002)
        task.cancel()

        async def is_split() -> bool:
            return (await world.layout()).epoch == 1

        await world.until(is_split)
        await world.until_settled()

    simulate(main)


@pytest.mark.inv("INV16")
def test_a_segment_that_is_refused_until_it_is_repaired_is_in_no_other_operations_way() -> None:
    async def main(world: World) -> None:
        broker = await topic_with(world, 4)
        await split(broker, 0)
        layout = await world.layout()
        lost = {str(physical_name(TOPIC, layout.segment(number))) for number in (0, 1, 4)}

        def fail(_operation: str, segment: str) -> Exception | None:
            return LedgerLost(f"{segment} needs ledger 7.") if segment in lost else None

        world.segments.fail = fail
        for refused in (split(broker, 1), merge(broker, 1, 2), merge(broker, 4, 5)):
            with pytest.raises(LedgerLost, match="needs ledger 7"):
                await refused
        assert (await world.metadata()) == (await world.until_settled(patience=0.1))  # nothing was begun
        controller = await broker.lead()
        with pytest.raises(LedgerLost, match="needs ledger 7"):
            await broker.do(lambda _service: controller.create_subscription("s"))
        with pytest.raises(SubscriptionNotFound):
            await broker.do(lambda _service: controller.delete_subscription("s"))
        begin = asyncio.get_running_loop().time()
        await split(broker, 5)
        await merge(broker, 2, 3)
        assert asyncio.get_running_loop().time() - begin < 1.0
        assert await prune(broker) == [2, 3]  # 0 is refused, and 5 came out of it
        lost.clear()
        assert await prune(broker) == [0, 5]
        await broker.do(lambda _service: controller.create_subscription("s"))
        await split(broker, 1)

    simulate(main)


def test_a_lost_parent_can_still_be_split() -> None:
    """An active segment whose topic is missing is made, empty, and sealed (L-06)."""

    async def main(world: World) -> None:
        broker = await topic_with(world, 1)
        await broker.do(lambda service: service.register_queue_subscription(TOPIC, "s", "latest"))
        world.segments.topics.clear()
        await split(broker, 0)
        layout = await world.layout()
        assert world.segments.named(TOPIC, layout, 0).is_sealed
        assert world.segments.named(TOPIC, layout, 1).cursors == {"s": 0}

    simulate(main)
