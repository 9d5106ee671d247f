"""What kill, pause, resume, restart and a power cut do to a world."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from braid.testing.sim.loop import Node, SimLoop, run
from braid.testing.sim.world import SESSION_SECONDS, World

TOPIC = "persistent://public/default/t"


def in_world(brokers: int, work: Callable[[World], Coroutine[Any, Any, None]]) -> None:
    async def main(loop: SimLoop) -> None:
        world = World(1, loop, brokers=brokers)
        await world.start()
        await work(world)

    run(1, main)


def registered(world: World) -> list[str]:
    return [key for key in sorted(world.engine.tables.rows) if key.startswith("/loadbalance/brokers/")]


async def send(world: World, payload: bytes) -> None:
    node = Node("client")

    async def work() -> None:
        async with world.client(node) as client, client.producer(TOPIC) as producer:
            await producer.send(payload)

    await world.spawn(node, work(), "send")


async def received(world: World, count: int) -> list[bytes]:
    node = Node("client")

    async def work() -> list[bytes]:
        async with world.client(node) as client, client.consumer(TOPIC, "s", initial="earliest") as consumer:
            return [(await consumer.receive(timeout=60)).payload for _ in range(count)]

    result: list[bytes] = await world.spawn(node, work(), "receive")
    return result


@pytest.mark.inv("INV2", "INV15")
def test_a_broker_paused_past_its_session_loses_everything_and_comes_back() -> None:
    async def work(world: World) -> None:
        await send(world, b"one")
        owner = next(broker.number for broker in world.brokers if broker.service.topics)
        assert len(registered(world)) == 2
        world.pause(owner)
        await asyncio.sleep(SESSION_SECONDS / 2)
        assert len(registered(world)) == 2
        await asyncio.sleep(SESSION_SECONDS)
        assert len(registered(world)) == 1
        await send(world, b"two")
        assert world.brokers[1 - owner].service.topics
        world.resume(owner)
        await asyncio.sleep(SESSION_SECONDS)
        assert len(registered(world)) == 2 and not world.brokers[owner].service.topics
        assert await received(world, 2) == [b"one", b"two"]
        await world.stop()

    in_world(2, work)


def test_a_killed_broker_leaves_its_session_to_expire_and_a_restarted_one_takes_its_place() -> None:
    async def work(world: World) -> None:
        await send(world, b"one")
        node = world.brokers[0].node
        world.kill(0)
        await asyncio.sleep(1)
        assert len(registered(world)) == 1  # nobody cleaned up
        assert world.loop.tasks_of(node)  # its tasks never run again
        await world.restart(0)
        await send(world, b"two")
        assert await received(world, 2) == [b"one", b"two"]
        await world.stop()

    in_world(1, work)


@pytest.mark.inv("INV1")
def test_a_power_cut_forgets_nothing_that_was_acknowledged() -> None:
    async def work(world: World) -> None:
        for number in range(30):
            await send(world, b"%d" % number)
        await world.power_cut()
        assert await received(world, 30) == [b"%d" % number for number in range(30)]
        assert world.failures == []
        await world.stop()

    in_world(2, work)
