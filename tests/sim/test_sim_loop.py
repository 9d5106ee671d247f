"""The simulator's own parts: loop, threads, network."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from braid.runtime.env import Random
from braid.testing.sim.loop import NODE, START, WORLD, Deadlock, Node, SimLoop, on, run
from braid.testing.sim.network import Fabric
from braid.testing.sim.ports import DiskSpeed, SimClock, SimThreads


def test_the_private_names_of_asyncio_are_as_expected() -> None:
    """The loop takes part in asyncio's queues; this fails on a Python whose loop is made differently."""
    assert sys.version_info[:2] in ((3, 11), (3, 12), (3, 13))
    loop = SimLoop(Random(1))
    ran: list[str] = []

    async def step() -> None:
        ran.append("step")

    handle = loop.call_soon(ran.append, "soon")
    timer = loop.call_later(5, ran.append, "later")
    task = loop.create_task(step())
    assert next(iter(loop._ready)) is handle and handle._callback == ran.append and not handle._cancelled
    assert list(loop._ready)[1]._callback.__self__ is task
    assert loop._scheduled == [(START + 5, timer)] and timer.when() == START + 5
    assert handle._context.get(NODE, WORLD) is WORLD and loop._stopping is False
    loop.run_until_complete(task)
    assert ran == ["soon", "step"] and loop.time() == START
    loop.run_until_complete(asyncio.sleep(10))
    assert ran == ["soon", "step", "later"] and loop.time() == START + 10
    loop.close()


def schedule(seed: int) -> list[str]:
    seen: list[str] = []

    async def worker(name: str) -> None:
        for number in range(3):
            seen.append(f"{name}{number}")
            await asyncio.sleep(0)

    async def main(_loop: SimLoop) -> None:
        async with asyncio.TaskGroup() as group:
            for name in "abcd":
                group.create_task(worker(name))

    run(seed, main)
    return seen


def test_task_steps_run_in_an_order_that_the_seed_decides() -> None:
    schedules = {tuple(schedule(seed)) for seed in range(200)}
    assert len(schedules) > 150
    assert schedule(7) == schedule(7)
    assert all([step for step in each if step[0] == "a"] == ["a0", "a1", "a2"] for each in schedules)


def test_plain_callbacks_stay_in_order() -> None:
    async def main(loop: SimLoop) -> list[int]:
        seen: list[int] = []
        tasks = [loop.create_task(asyncio.sleep(0)) for _ in range(5)]
        for number in range(50):
            loop.call_soon(seen.append, number)
        await asyncio.gather(*tasks)
        await asyncio.sleep(0)
        return seen

    for seed in range(20):
        assert run(seed, main) == list(range(50))


def test_a_deadlock_names_the_tasks_and_where_they_wait() -> None:
    async def main(loop: SimLoop) -> None:
        async def stuck() -> None:
            await loop.create_future()

        await loop.create_task(stuck(), name="the stuck one")

    with pytest.raises(Deadlock, match=r"(?s)no timer is left.*the stuck one.*test_sim_loop.py:\d+ stuck"):
        run(0, main)


def test_a_livelock_is_noticed() -> None:
    async def main(_loop: SimLoop) -> None:
        while True:  # noqa: ASYNC110 - that is the bug
            await asyncio.sleep(0)

    with pytest.raises(Deadlock, match="Time stands still"):
        run(0, main)


def test_a_paused_node_does_nothing_and_catches_up_and_a_dead_one_never_acts_again() -> None:
    async def main(loop: SimLoop) -> list[tuple[float, str]]:
        seen: list[tuple[float, str]] = []

        async def tick(name: str) -> None:
            try:
                while True:
                    await asyncio.sleep(1)
                    seen.append((loop.time() - START, name))
            finally:
                seen.append((loop.time() - START, f"{name} cleaned up"))

        paused, killed = Node("paused"), Node("killed")
        for node in (paused, killed):
            with on(node):
                loop.create_task(tick(node.name))
        await asyncio.sleep(1.5)
        paused.is_paused = True
        await asyncio.sleep(3)
        killed.is_dead = True
        loop.resume(paused)
        await asyncio.sleep(1.2)
        return list(seen)

    assert sorted(run(3, main)) == [
        (1.0, "killed"),
        (1.0, "paused"),
        (2.0, "killed"),
        (3.0, "killed"),
        (4.0, "killed"),
        (4.5, "paused"),
        (5.5, "paused"),
    ]


def test_jobs_of_a_worker_take_virtual_time_and_keep_their_order() -> None:
    async def main(loop: SimLoop) -> tuple[list[int], float]:
        worker = SimThreads(DiskSpeed(Random(1))).worker("disk")
        done: list[int] = []
        for number in range(5):
            worker.post(lambda number=number: number, lambda result, error: done.append(result))  # type: ignore[misc]
        assert done == []
        assert await worker.run(lambda: 42) == 42
        await worker.close()
        return done, loop.time()

    done, moment = run(0, main)
    assert done == [0, 1, 2, 3, 4] and moment > START


def test_the_wall_clock_of_a_node_may_be_wrong() -> None:
    async def main(_loop: SimLoop) -> tuple[int, int]:
        await asyncio.sleep(2)
        return SimClock().now_ms(), SimClock(skew_ms=-500).now_ms()

    right, wrong = run(0, main)
    assert right - wrong == 500 and right % 1000 == 0


class Peer(asyncio.Protocol):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.transport: Any = None
        self.data = b""
        self.lost: list[Exception | None] = []
        self.pauses = 0
        self.resumes = 0

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.data += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.append(exc)

    def pause_writing(self) -> None:
        self.pauses += 1

    def resume_writing(self) -> None:
        self.resumes += 1


async def connected(fabric: Fabric) -> tuple[Peer, Peer, Node]:
    """A connection from `client` to `server`."""
    servers: list[Peer] = []

    def factory() -> Peer:
        servers.append(Peer())
        return servers[-1]

    client, server = Node("client"), Node("server")
    await fabric.port(server).listen("server", 1, factory)
    with on(client):
        task = asyncio.get_running_loop().create_task(fabric.port(client).connect("server", 1, Peer))
    _transport, near = await task
    await asyncio.sleep(1)
    return near, servers[-1], server


def in_network(work: Any) -> None:
    async def main(_loop: SimLoop) -> None:
        await work(Fabric(Random(5)))

    run(0, main)


def test_bytes_arrive_in_order_and_a_close_arrives_after_them() -> None:
    async def work(fabric: Fabric) -> None:
        near, far, _ = await connected(fabric)
        for number in range(100):
            near.transport.write(bytes([number]))
        near.transport.close()
        await asyncio.sleep(1)
        assert far.data == bytes(range(100)) and far.lost == [None] and near.lost == [None]
        assert fabric.ends() == []

    in_network(work)


def test_a_reset_is_heard_by_both_ends_and_an_abort_by_the_other() -> None:
    async def work(fabric: Fabric) -> None:
        near, far, _ = await connected(fabric)
        near.transport.write(b"under way")
        fabric.ends()[0].reset()
        await asyncio.sleep(1)
        assert far.data == b""
        assert isinstance(near.lost[0], ConnectionResetError) and isinstance(far.lost[0], ConnectionResetError)
        near, far, _ = await connected(Fabric(Random(6)))
        near.transport.abort()
        await asyncio.sleep(1)
        assert near.lost == [None] and isinstance(far.lost[0], ConnectionResetError)

    in_network(work)


def test_a_half_open_connection_swallows_everything_and_tells_nobody() -> None:
    async def work(fabric: Fabric) -> None:
        near, far, _ = await connected(fabric)
        fabric.ends()[0].vanish()
        near.transport.write(b"lost")
        far.transport.write(b"lost")
        await asyncio.sleep(100)
        assert near.data == far.data == b"" and near.lost == far.lost == []

    in_network(work)


def test_a_partition_holds_bytes_and_connections_back_until_it_heals() -> None:
    async def work(fabric: Fabric) -> None:
        near, far, _ = await connected(fabric)
        fabric.cut("client", "server")
        near.transport.write(b"later")
        client = Node("client")
        with on(client):
            task = asyncio.get_running_loop().create_task(fabric.port(client).connect("server", 1, Peer))
        await asyncio.sleep(50)
        assert far.data == b"" and not task.done()
        fabric.heal("client", "server")
        await asyncio.sleep(1)
        assert far.data == b"later" and task.done()

    in_network(work)


def test_a_clog_makes_everything_late() -> None:
    async def work(fabric: Fabric) -> None:
        near, far, _ = await connected(fabric)
        fabric.clog("client", "server", 3.0)
        near.transport.write(b"late")
        await asyncio.sleep(2.9)
        assert far.data == b""
        await asyncio.sleep(0.2)
        assert far.data == b"late"

    in_network(work)


def test_a_sender_is_paused_while_nobody_reads() -> None:
    async def work(fabric: Fabric) -> None:
        near, far, server = await connected(fabric)
        far.transport.pause_reading()
        near.transport.write(bytes(100_000))
        await asyncio.sleep(1)
        assert near.pauses == 1 and near.resumes == 0 and far.data == b""
        assert near.transport.get_write_buffer_size() == 100_000
        far.transport.resume_reading()
        await asyncio.sleep(1)
        assert near.resumes == 1 and len(far.data) == 100_000
        server.is_paused = True
        near.transport.write(bytes(100_000))
        await asyncio.sleep(1)
        assert near.pauses == 2 and near.resumes == 1

    in_network(work)


def test_a_killed_node_refuses_connections_and_its_peers_hear_a_reset() -> None:
    async def work(fabric: Fabric) -> None:
        near, far, server = await connected(fabric)
        server.is_dead = True
        fabric.kill(server, silently=False)
        await asyncio.sleep(1)
        assert isinstance(near.lost[0], ConnectionResetError) and far.lost == []
        with pytest.raises(ConnectionRefusedError), on(Node("client")):
            await fabric.connect(Node("client"), "server", 1, Peer)

    in_network(work)
