"""Leaders that were away, or whose topic was made anew: whatever they try is refused (INV4, INV5)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from tests.unit.scalable.coordination import Client
from tests.unit.scalable.fakes import (
    SESSION,
    TOPIC,
    World,
    brokers_with_topic,
    controller_of,
    simulate,
    topic_with,
    until_led_by,
)

from braid.errors import LedElsewhere, TopicNotFound
from braid.metadata.api import SessionState
from braid.metadata.claims import StaleLeader
from braid.runtime.plans import Moment, watching
from braid.scalable.api import ConsumerRegistration
from braid.scalable.records import controller_path, topic_path
from braid.testing.sim.loop import NODE


@pytest.mark.inv("INV4")
@pytest.mark.parametrize(
    "at", ["split:discover", "split:create-children", "split:seal-parent", "split:flip", "split:late-cursors", "split:finish"]
)
def test_a_leader_that_stood_still_is_refused(at: str) -> None:
    """It stops in the middle of a split, its successor finishes that and does another; then it goes on where it was."""

    async def main(world: World) -> None:
        leader, other = await brokers_with_topic(world, 2)
        controller = await leader.lead()
        old = controller.leadership
        assert old is not None
        is_first = True

        async def stop(name: str, moment: Moment) -> None:
            nonlocal is_first
            if is_first and NODE.get() is leader.node and (name, moment) == (at, "before"):
                is_first = False
                leader.pause()
                await asyncio.sleep(0)

        with watching(stop):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(SESSION - 1):
                    await leader.do(lambda _service: controller.split_segment(0))
            await until_led_by(world, other)
            successor = await other.lead()
            await other.do(lambda _service: successor.split_segment(1))
            after = await world.metadata()
            world.segments.trace.clear()
            leader.resume()
            await asyncio.sleep(30)
        assert await world.metadata() == after
        assert world.segments.traced("create", "terminate", "delete") == []
        assert not controller.is_leading
        with pytest.raises(LedElsewhere):
            await leader.do(lambda _service: controller.split_segment(2))
        assert successor.is_ready

    simulate(main)


@pytest.mark.inv("INV4")
def test_each_call_of_a_stale_leader_is_refused_by_itself() -> None:
    """Even one that does not ask whether it still leads."""

    async def main(world: World) -> None:
        leader, other = await brokers_with_topic(world, 2)
        controller = await leader.lead()
        term = controller._term
        assert term is not None
        work = term.work
        leader.pause()
        await until_led_by(world, other)
        successor = await other.lead()
        await other.do(lambda _service: successor.split_segment(0))
        before = (await world.metadata(), list(world.segments.trace))
        work.check = lambda: None  # type: ignore[method-assign] # the bug of a leader that trusts itself
        segment = work.layout.segment(0)
        for call in (lambda: work.create(segment, ()), lambda: work.terminate(segment), lambda: work.delete(segment)):
            with pytest.raises(StaleLeader):
                await call()
        with pytest.raises(StaleLeader):
            await work.change(lambda value: value)
        assert (await world.metadata(), world.segments.trace) == before

    simulate(main)


@pytest.mark.inv("INV5")
def test_a_leader_of_a_topic_that_was_made_anew_touches_nothing() -> None:
    async def main(world: World) -> None:
        leader, other = await brokers_with_topic(world, 2)
        controller = await leader.lead()
        leader.pause()
        await until_led_by(world, other)
        await other.do(lambda service: service.delete_topic(TOPIC))
        await other.do(lambda service: service.create_topic(TOPIC, 3))
        after = await world.metadata()
        world.segments.trace.clear()
        leader.resume()
        await asyncio.sleep(30)
        assert await world.metadata() == after
        assert world.segments.traced("create", "terminate", "delete") == []
        assert not controller.is_leading

    simulate(main)


def test_somebody_deletes_the_record() -> None:
    async def main(world: World) -> None:
        brokers = await brokers_with_topic(world, 3)
        await world.store.delete(topic_path(TOPIC))
        await asyncio.sleep(2)
        assert [broker.service.controllers() for broker in brokers] == [[], [], []]
        assert await world.store.get(controller_path(TOPIC), fresh=True) is None
        with pytest.raises(TopicNotFound):
            await brokers[0].lead()

    simulate(main)


@pytest.mark.inv("INV4")
def test_a_leader_whose_time_is_up_asks_no_owner() -> None:
    """Nobody else is there to take over: it could do no harm, but it cannot know that."""

    async def main(world: World) -> None:
        leader = (await brokers_with_topic(world, 1))[0]
        controller = await leader.lead()
        term = controller._term
        assert term is not None
        world.segments.epochs.clear()
        leader.pause()
        await asyncio.sleep(SESSION + 1)
        work, segment = term.work, term.work.layout.segment(0)
        calls: list[Callable[[], Coroutine[Any, Any, Any]]] = [
            lambda: work.create(segment, ()),
            lambda: work.terminate(segment),
            lambda: work.delete(segment),
            work.claim,
        ]
        for call in calls:
            with pytest.raises(StaleLeader):
                await call()
        assert world.segments.epochs == []
        leader.resume()
        await until_led_by(world, leader)
        await leader.do(lambda _service: controller.split_segment(0))
        assert set(world.segments.epochs) == {(await world.until_settled()).leader_epoch}

    simulate(main)


@pytest.mark.inv("INV4", "INV15")
def test_a_leader_that_is_unsure_for_a_moment_goes_on_or_steps_down() -> None:
    """The link to the store is down while a consumer's grace period ends; the session outlives that, and so does the record."""

    async def main(world: World) -> None:
        broker = await topic_with(world, 2)
        controller = await controller_of(broker)
        stays, goes = Client("stays"), Client("goes")
        for client in (stays, goes):
            registration = ConsumerRegistration(client.name, 1, client)
            await broker.do(lambda _service, of=registration: controller.register_consumer("sub", of, "STREAM"))  # type: ignore[misc]
        await broker.do(lambda _service: controller.split_segment(0))
        await asyncio.sleep(20)  # so that nothing else is looked at in that moment
        controller.consumer_disconnected("sub", "goes", goes)
        await asyncio.sleep(world.config.consumer_grace_seconds - 0.5)
        session: Any = broker.store.session
        session.state = SessionState.SUSPENDED
        await asyncio.sleep(1)
        session.state = SessionState.CONNECTED
        await asyncio.sleep(30)
        controller = await broker.lead()
        stats = (await broker.do(lambda _service: controller.stats()))["subscriptions"]["sub"]
        if stays.error is None:  # else it looks for a leader, and finds one that works
            assert stats["consumers"] == {"stays": {"segments": [1, 2, 3], "isConnected": True}}

    simulate(main)
