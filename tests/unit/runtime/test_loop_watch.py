"""The watch of the event loop: a loop that is held says where it stands, while it is."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator

import pytest

from braid.runtime.loop_watch import PERIOD_SECONDS, LoopTurns, LoopWatch

LIMIT = 0.04
STALL = 5.0
NAME = "braid.runtime.loop_watch"


class Now:
    """Time as the watch sees it: it passes when the test says so, however slow the machine is."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


class Said(logging.Handler):
    """What the watch logged, and an event for the first line of each kind; told from any thread."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.is_told = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        assert record.levelno == logging.WARNING
        if "it stands in" in self.texts[-1]:
            self.is_told.set()


@pytest.fixture
def said() -> Iterator[Said]:
    handler = Said()
    logging.getLogger(NAME).addHandler(handler)
    yield handler
    logging.getLogger(NAME).removeHandler(handler)


def hold_the_loop(now: Now, said: Said) -> None:
    """Return when the watch has reported, and not before."""
    now.seconds += STALL
    said.is_told.wait()
    said.is_told.clear()


async def turned_again(turns: LoopTurns, stalls: int) -> None:
    while turns.stalls < stalls:  # noqa: ASYNC110 - there is no event for it, and the loop must turn
        await asyncio.sleep(0)


@pytest.mark.timeout(60)
async def test_a_loop_that_is_held_says_where_it_stands_and_then_how_long(said: Said) -> None:
    turns, now = LoopTurns(), Now()
    with LoopWatch(turns, LIMIT, now):
        for number in (1, 2):
            hold_the_loop(now, said)
            await turned_again(turns, number)
    stacks = [text for text in said.texts if "it stands in" in text]
    ends = [text for text in said.texts if "turns again" in text]
    assert len(stacks) == turns.stalls == len(ends) == 2  # once per stall
    assert all("in hold_the_loop" in text and __file__ in text for text in stacks)
    assert stacks[0].startswith("the loop has not turned for 5.0 s")
    assert ends[0] == "the loop turns again; it stood still for 4.9 s and served nobody"
    assert turns.longest == pytest.approx(STALL - PERIOD_SECONDS)


async def test_a_loop_that_turns_is_left_alone(said: Said) -> None:
    turns = LoopTurns()
    before = threading.active_count()
    with LoopWatch(turns, LIMIT, Now()):
        assert threading.active_count() == before + 1
        await asyncio.sleep(0)
    assert threading.active_count() == before
    assert said.texts == [] and turns.stalls == 0


async def test_without_a_limit_nothing_is_watched() -> None:
    before = threading.active_count()
    with LoopWatch(LoopTurns(), 0):
        assert threading.active_count() == before
