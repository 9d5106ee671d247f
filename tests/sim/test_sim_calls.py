"""Calls between simulated processes: what an HTTP call can meet, and that a late request is done although nobody waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from braid.errors import ConnectFailed, ConnectionLost, DeadlineExceeded, NotReady
from braid.runtime.env import Random
from braid.testing.sim.calls import Calls
from braid.testing.sim.loop import Node, SimLoop, on, run
from braid.testing.sim.network import Fabric


class Stage:
    """A caller, a callee and the network between them."""

    def __init__(self, loop: SimLoop) -> None:
        self.loop = loop
        self.fabric = Fabric(Random(1))
        self.calls = Calls(self.fabric)
        self.caller, self.callee = Node("caller"), Node("callee")
        self.done: list[str] = []

    async def serve(self) -> None:
        with on(self.callee):
            task = self.loop.create_task(self.calls.serve(self.callee, "callee", None))  # type: ignore[arg-type]
        await task

    def ask(self, name: str, seconds: float = 5.0, error: Exception | None = None) -> asyncio.Task[Any]:
        async def work(_service: Any) -> str:
            self.done.append(name)
            if error is not None:
                raise error
            return name.upper()

        with on(self.caller):
            return self.loop.create_task(self.calls.call(self.caller, "callee", work, seconds))


def staged(body: Callable[[Stage], Coroutine[Any, Any, None]]) -> None:
    async def main(loop: SimLoop) -> None:
        stage = Stage(loop)
        await stage.serve()
        await body(stage)

    run(1, main)


def test_a_call_is_answered_with_a_result_or_an_error() -> None:
    async def body(stage: Stage) -> None:
        assert await stage.ask("a") == "A"
        with pytest.raises(NotReady):
            await stage.ask("b", error=NotReady("not now"))

    staged(body)


def test_nobody_is_there() -> None:
    async def body(stage: Stage) -> None:
        stage.fabric.kill(stage.callee, silently=False)
        with pytest.raises(ConnectFailed):
            await stage.ask("a")
        assert stage.done == []

    staged(body)


def test_the_callee_dies_with_the_request_unread() -> None:
    async def body(stage: Stage) -> None:
        stage.callee.is_paused = True
        asked = stage.ask("a")
        await asyncio.sleep(0.5)
        stage.callee.is_dead = True
        stage.fabric.kill(stage.callee, silently=False)
        with pytest.raises(ConnectionLost):
            await asked
        assert stage.done == []

    staged(body)


def test_a_request_that_is_read_late_is_done_although_nobody_waits() -> None:
    async def body(stage: Stage) -> None:
        stage.callee.is_paused = True
        with pytest.raises(DeadlineExceeded):
            await stage.ask("a", 1.0)
        assert stage.done == []
        stage.loop.resume(stage.callee)
        await asyncio.sleep(0.5)
        assert stage.done == ["a"]

    staged(body)


def test_a_partition_holds_calls_up() -> None:
    async def body(stage: Stage) -> None:
        stage.fabric.cut("caller", "callee")
        asked = stage.ask("a", 30.0)
        await asyncio.sleep(3.0)
        assert not asked.done() and stage.done == []
        stage.fabric.heal("caller", "callee")
        assert await asked == "A"

    staged(body)
