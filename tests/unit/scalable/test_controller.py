"""Who leads a topic, what only the leader may do, and how the leadership moves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest
from tests.unit.scalable.fakes import SESSION, TOPIC, World, brokers_with_topic, controller_of, simulate, until_led_by

from braid.errors import BraidError, Conflict, LedElsewhere, NotReady, TopicNotFound
from braid.metadata.election import LeaderElection
from braid.scalable.api import ConsumerAssignment, ConsumerRegistration
from braid.scalable.records import controller_path, topic_path


class Handle:
    """A consumer's connection."""

    def __init__(self) -> None:
        self.pushed: list[ConsumerAssignment] = []
        self.error: BraidError | None = None

    def push(self, assignment: ConsumerAssignment) -> None:
        self.pushed.append(assignment)

    def displaced(self) -> None:
        raise AssertionError("nobody took the name")

    def ended(self, error: BraidError) -> None:
        self.error = error


@pytest.mark.req("R468-3", "R468-14")
def test_of_three_brokers_one_leads() -> None:
    async def main(world: World) -> None:
        brokers = [await world.broker() for _ in range(3)]
        await brokers[0].do(lambda service: service.create_topic(TOPIC, 1))
        brokers[0].die()
        await asyncio.sleep(SESSION + 1)
        brokers[0] = await world.broker()
        controllers = await asyncio.gather(*map(controller_of, brokers))
        assert [controller.is_leading for controller in controllers].count(True) == 1
        leader = next(broker for broker, each in zip(brokers, controllers, strict=True) if each.is_leading)
        record = await world.store.get(controller_path(TOPIC), fresh=True)
        assert record is not None
        assert record.value == f'"{leader.id}"'.encode()
        assert record.owner is not None
        for broker in brokers:
            assert await broker.do(lambda service: service.leader_id(TOPIC)) == leader.id

    for seed in range(5):
        simulate(main, seed=seed)


@pytest.mark.req("R468-4")
def test_a_follower_does_nothing_and_says_who_leads() -> None:
    async def main(world: World) -> None:
        leader, other = await brokers_with_topic(world, 2)
        follower = await controller_of(other)
        before = (await world.metadata(), list(world.segments.trace))
        calls: list[Callable[[], Coroutine[Any, Any, Any]]] = [
            lambda: follower.split_segment(0),
            lambda: follower.merge_segments(0, 1),
            follower.prune,
            follower.delete,
            lambda: follower.create_subscription("s"),
            lambda: follower.delete_subscription("s"),
            lambda: follower.seek("s", 0),
            lambda: follower.clear_backlog("s"),
            lambda: follower.register_consumer("s", ConsumerRegistration("c", 1, Handle()), "STREAM"),
            lambda: follower.unregister_consumer("s", "c", Handle()),
        ]
        for call in calls:
            with pytest.raises(LedElsewhere):
                await other.do(lambda _service, call=call: call())  # type: ignore[misc]
        follower.consumer_disconnected("s", "c", Handle())
        with pytest.raises(LedElsewhere) as caught:
            await other.do(lambda service: service.lead(TOPIC))
        assert caught.value.broker_id == leader.id
        with pytest.raises(LedElsewhere) as caught:
            await other.do(lambda service: service.delete_topic(TOPIC))
        assert caught.value.broker_id == leader.id
        assert (await world.metadata(), world.segments.trace) == before
        assert follower.layout == (await world.layout())
        assert (await other.do(lambda _service: follower.stats()))["activeSegments"] == 2

    simulate(main)


def test_a_follower_sees_the_layout_change() -> None:
    async def main(world: World) -> None:
        leader, other = await brokers_with_topic(world, 2)
        follower, controller = await controller_of(other), await leader.lead()
        await leader.do(lambda _service: controller.split_segment(0))
        await asyncio.sleep(0.1)
        assert follower.layout == controller.layout
        assert follower.layout.epoch == 1

    simulate(main)


@pytest.mark.req("R468-12")
def test_when_the_leader_dies_a_standby_leads_and_serves() -> None:
    """L-01: it notices, and does everything a leader does."""

    async def main(world: World) -> None:
        leader, other = await brokers_with_topic(world, 2)
        controller = await leader.lead()
        await leader.do(lambda _service: controller.create_subscription("s"))
        leader.die()
        assert await until_led_by(world, other) <= SESSION + 1
        successor = await other.lead()
        layout = await other.do(lambda _service: successor.split_segment(0))
        assert layout.epoch == 1
        handle = Handle()
        assignment = await other.do(
            lambda _service: successor.register_consumer("s", ConsumerRegistration("c", 1, handle), "STREAM")
        )
        assert assignment.layout_epoch == 1
        assert await other.do(lambda service: service.leader_id(TOPIC)) == other.id

    simulate(main)


def test_when_the_leader_is_closed_a_standby_follows_at_once() -> None:
    async def main(world: World) -> None:
        leader, other = await brokers_with_topic(world, 2)
        await leader.do(lambda service: service.close())
        assert await until_led_by(world, other) < 1.0

    simulate(main)


@pytest.mark.req("R468-9")
def test_controllers_are_shared_and_released() -> None:
    async def main(world: World) -> None:
        broker = await world.broker()
        await broker.do(lambda service: service.create_topic(TOPIC, 1))
        await broker.do(lambda service: service.close())
        broker = await world.broker()
        found = await asyncio.gather(*[controller_of(broker) for _ in range(100)])
        assert len({id(each) for each in found}) == 1
        assert len(broker.service.controllers()) == 1
        assert await world.store.get(controller_path(TOPIC), fresh=True) is not None
        await broker.do(lambda service: service.close())
        assert await world.store.get(controller_path(TOPIC), fresh=True) is None

    simulate(main)


@pytest.mark.req("R468-13")
def test_a_missing_topic_fails_without_an_election() -> None:
    async def main(world: World) -> None:
        broker = await world.broker()
        for _ in range(2):
            with pytest.raises(TopicNotFound, match="orders"):
                await broker.do(lambda service: service.controller(TOPIC))
        assert await world.store.get(controller_path(TOPIC), fresh=True) is None
        assert broker.service.controllers() == []

    simulate(main)


@pytest.mark.req("R468-52", "R468-72")
def test_consumers_are_told_of_a_split() -> None:
    async def main(world: World) -> None:
        broker = (await brokers_with_topic(world, 1, segments=1))[0]
        controller = await broker.lead()
        handle = Handle()
        first = await broker.do(
            lambda _service: controller.register_consumer("s", ConsumerRegistration("c", 1, handle), "STREAM")
        )
        assert [each.segment_id for each in first.segments] == [0]
        await broker.do(lambda _service: controller.split_segment(0))

        async def told() -> bool:
            return bool(handle.pushed) and {each.segment_id for each in handle.pushed[-1].segments} == {1, 2}

        await world.until(told)
        assert handle.pushed[-1].layout_epoch == 1
        with pytest.raises(Conflict, match="needs one of its own"):
            await broker.do(
                lambda _service: controller.register_consumer("s", ConsumerRegistration("d", 2, Handle()), "CHECKPOINT")
            )
        stats = await broker.do(lambda _service: controller.stats())
        assert stats["subscriptions"]["s"]["consumerCount"] == 1
        assert stats["subscriptions"]["s"]["consumers"]["c"]["isConnected"] is True
        assert stats["leader"] == broker.id
        await broker.do(lambda service: service.close())
        assert handle.error is not None

    simulate(main)


def test_a_queue_subscription_takes_no_stream_consumers() -> None:
    async def main(world: World) -> None:
        broker = (await brokers_with_topic(world, 1))[0]
        controller = await broker.lead()
        await broker.do(lambda service: service.register_queue_subscription(TOPIC, "q", "latest"))
        with pytest.raises(Conflict, match="QUEUE"):
            await broker.do(
                lambda _service: controller.register_consumer("q", ConsumerRegistration("c", 1, Handle()), "STREAM")
            )
        stats = await broker.do(lambda _service: controller.stats())
        assert stats["subscriptions"]["q"]["type"] == "QUEUE"

    simulate(main)


def test_a_new_leader_makes_missing_segments() -> None:
    """L-06: an owner lost it, or the creation was cut short by something worse than a crash."""

    async def main(world: World) -> None:
        leader, other = await brokers_with_topic(world, 2)
        controller = await leader.lead()
        await leader.do(lambda _service: controller.create_subscription("s"))
        await leader.do(lambda _service: controller.split_segment(0))
        lost = [name for name in world.segments.topics if name.endswith(("-1", "-0"))]
        for name in lost:
            del world.segments.topics[name]
        leader.die()
        await until_led_by(world, other)
        await asyncio.sleep(1)
        assert world.segments.named(TOPIC, controller.layout, 1).cursors == {"s": 0}
        assert not any(name.endswith("-0") for name in world.segments.topics)  # sealed ones are never made again

    simulate(main)


def test_a_service_that_is_killed_writes_nothing() -> None:
    async def main(world: World) -> None:
        leader, other = await brokers_with_topic(world, 2)
        before = {key: row for key, row in world.engine.tables.rows.items() if key.startswith("/topics")}
        leader.service.kill()
        await asyncio.sleep(1)
        assert {key: row for key, row in world.engine.tables.rows.items() if key.startswith("/topics")} == before
        leader.die()
        await until_led_by(world, other)

    simulate(main)


def test_a_call_that_comes_as_the_term_ends_is_answered() -> None:
    async def main(world: World) -> None:
        leader = (await brokers_with_topic(world, 1))[0]
        controller = await leader.lead()
        for turns in range(6):
            await until_led_by(world, leader)
            term = controller._term
            assert term is not None
            call = asyncio.get_running_loop().create_task(term.split(max(controller.layout.active_segments)))
            for _ in range(turns):
                await asyncio.sleep(0)
            term.stop()
            async with asyncio.timeout(1):
                with pytest.raises(LedElsewhere):
                    await call
            term.work.leadership.step_down()
            await asyncio.sleep(1)

    simulate(main)


def test_a_topic_made_anew_has_its_leader_at_once() -> None:
    async def main(world: World) -> None:
        leader = (await brokers_with_topic(world, 1))[0]
        controller = await leader.lead()
        found = await world.metadata()
        assert found is not None
        other = msgspec.structs.replace(found, incarnation="another", leader_epoch=0)
        await world.store.put(topic_path(TOPIC), msgspec.json.encode(other))
        await asyncio.sleep(1)
        assert controller.is_ready
        assert controller.incarnation == "another"
        assert (await leader.do(lambda _service: controller.split_segment(0))).epoch == 1

    simulate(main)


def test_interrupted_changes_of_a_subscription_are_finished() -> None:
    async def main(world: World) -> None:
        leader = (await brokers_with_topic(world, 1))[0]
        controller = await leader.lead()

        def break_for(seconds: float) -> None:
            until = asyncio.get_running_loop().time() + seconds

            def fail(name: str, _segment: str) -> Exception | None:
                is_broken = name.endswith("_subscription") and asyncio.get_running_loop().time() < until
                return NotReady("Not now.") if is_broken else None

            world.segments.fail = fail

        break_for(2)
        with pytest.raises(NotReady):
            await leader.do(lambda _service: controller.create_subscription("s"))
        await asyncio.sleep(5)
        stats = await leader.do(lambda _service: controller.stats())
        assert stats["subscriptions"]["s"]["state"] == "NO_CONSUMER"
        assert stats["subscriptions"]["s"]["blocked_by"][0]["kind"] == "no-consumer"  # it has its coordinator
        break_for(2)
        with pytest.raises(NotReady):
            await leader.do(lambda _service: controller.delete_subscription("s"))
        await asyncio.sleep(5)
        stats = await leader.do(lambda _service: controller.stats())
        assert stats["subscriptions"] == {}
        assignment = await leader.do(
            lambda _service: controller.register_consumer("s", ConsumerRegistration("c", 1, Handle()), "STREAM")
        )
        assert len(assignment.segments) == 2

    simulate(main)


def test_an_election_without_anything_to_lead_is_not_won() -> None:
    async def main(world: World) -> None:
        is_there = False

        async def may_win() -> bool:
            return is_there

        election = LeaderElection(world.store, world.runtime.clock, "/key", b"me", may_win=may_win, reconcile_seconds=2)
        await election.start()
        await asyncio.sleep(10)
        assert election.leadership is None
        assert await world.store.get("/key", fresh=True) is None
        is_there = True
        await asyncio.sleep(3)
        assert election.leadership is not None
        await election.close()

    simulate(main)
