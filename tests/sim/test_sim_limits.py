"""A run that spins fails in bounded time, whatever it spins in."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from braid.runtime.env import Random
from braid.testing.sim.checkers import Violation
from braid.testing.sim.history import History
from braid.testing.sim.limits import Interrupted, WallClock
from braid.testing.sim.loop import SimLoop
from braid.testing.sim.run import Outcome, run_seed

SOON = 0.05
"""Wall-clock limit of these runs: each of them reaches it, so a short one only makes the tests quick."""


class Work:
    """A workload of one function."""

    faults = 1

    def __init__(self, loop: SimLoop, work: Callable[[], Awaitable[None]], check: Callable[[], None]) -> None:
        self.history = History(loop.time)
        self._work = work
        self._check = check

    async def run(self) -> None:
        await self._work()

    def check(self) -> list[Violation]:
        self._check()
        return []


def nothing() -> None:
    return


def outcome(
    work: Callable[[], Awaitable[None]], *, check: Callable[[], None] = nothing, seconds: float = 60.0, steps: int = 1_000_000
) -> Outcome:
    def make(_seed: int, loop: SimLoop, _rng: Random) -> Work:
        return Work(loop, work, check)

    return run_seed("planted", 17, make, seconds=seconds, max_steps=steps)


async def spinning_task() -> None:
    """A wait of an event that is set for good: `await` without a suspension."""
    event = asyncio.Event()
    event.set()
    while True:
        await event.wait()


async def swallowing_task() -> None:
    """Spins, and lets nobody end it the first times."""
    for _time in range(2):
        with suppress(BaseException):
            await spinning_task()


async def spins_beside() -> None:
    asyncio.get_running_loop().create_task(spinning_task())
    await asyncio.sleep(10)


async def turning_task() -> None:
    """Suspends each time, for a moment of virtual time: the loop turns and never ends."""
    while True:  # noqa: ASYNC110 - that is the bug
        await asyncio.sleep(0.000_001)


async def ping_pong() -> None:
    """Two tasks that wake each other for ever, while time passes."""
    ping: asyncio.Queue[int] = asyncio.Queue()
    pong: asyncio.Queue[int] = asyncio.Queue()

    async def player(mine: asyncio.Queue[int], other: asyncio.Queue[int]) -> None:
        while True:
            other.put_nowait(await mine.get())
            await asyncio.sleep(0.001)

    tasks = [asyncio.get_running_loop().create_task(player(*pair)) for pair in ((ping, pong), (pong, ping))]
    for number, task in enumerate(tasks):
        task.set_name(f"player {number}")
    ping.put_nowait(0)
    await asyncio.gather(*tasks)


async def done() -> None:
    await asyncio.sleep(1)


@pytest.mark.parametrize(
    ("work", "place"),
    [
        (spinning_task, "in spinning_task"),
        (swallowing_task, "in spinning_task"),
        (spins_beside, "in spinning_task"),
        (turning_task, "run_until_complete"),
    ],
)
def test_a_task_that_spins_fails_its_seed_and_says_where(work: Callable[[], Awaitable[None]], place: str) -> None:
    [violation] = [each for each in outcome(work, seconds=SOON, steps=1 << 60).violations if each.checker == "limit"]
    assert violation.text.startswith(f"planted seed 17: it was not over after {SOON} s of wall clock; it stood in:\n")
    assert place in violation.text


def test_a_checker_that_spins_fails_its_seed() -> None:
    def endless() -> None:
        while True:
            pass

    [violation] = outcome(done, check=endless, seconds=SOON).violations
    assert violation.checker == "limit" and "in endless" in violation.text


def test_tasks_that_wake_each_other_for_ever_reach_the_limit_of_steps() -> None:
    [violation] = outcome(ping_pong, steps=5_000).violations
    assert violation.checker == "C18"
    assert violation.text.startswith("planted seed 17: 5000 steps were not enough; the last turn had ")
    assert "task player 0 of world:" in violation.text and "task player 1 of world:" in violation.text


def test_a_run_in_time_is_left_alone() -> None:
    before = threading.active_count()
    assert outcome(done).violations == []
    assert threading.active_count() == before


def test_an_interruption_that_comes_late_is_taken_back() -> None:
    """The run ends while its interruption is under way: nothing is raised afterwards."""
    told = threading.Event()
    with WallClock(0.0, lambda _verdict: told.set()) as limit:
        told.wait()
    assert limit.verdict
    for _step in range(1000):
        pass


@pytest.mark.parametrize(
    ("seconds", "until"),
    [(60.0, "pass"), (0.0, "told.wait()"), (0.0, "while True: pass")],
    ids=["in time", "late", "interrupted"],
)
def test_nothing_is_left_on_its_way(seconds: float, until: str) -> None:
    """Traced functions begin only if nothing is; what would hang is tried in a process of its own."""
    program = f"""
import faulthandler, sys, threading
from braid.testing.sim.limits import WallClock

faulthandler.dump_traceback_later(30, exit=True)
told = threading.Event()
with WallClock({seconds}, lambda _verdict: told.set()):
    {until}
sys.settrace(lambda *_event: None)
(lambda: None)()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_what_is_interrupted_ends_there() -> None:
    def spin() -> None:
        while True:
            pass

    with WallClock(SOON, lambda _verdict: None) as limit:
        with pytest.raises(Interrupted):
            spin()
        spin()
    assert "in spin" in limit.verdict
