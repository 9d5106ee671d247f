"""`wait_at_most`: patience is the waiter's own."""

from __future__ import annotations

import asyncio

import pytest

from braid.runtime.clock import SystemClock
from braid.runtime.waiting import wait_at_most
from braid.testing.clock import ManualClock


@pytest.mark.inv("INV17")
async def test_the_end_of_ones_patience_tells_nobody_else() -> None:
    clock, news = ManualClock(), asyncio.Event()
    hasty = asyncio.create_task(wait_at_most(clock, news, 1.0))
    patient = asyncio.create_task(wait_at_most(clock, news, 10.0))
    await clock.advance(1.0)
    assert hasty.done() and not hasty.result()
    assert not patient.done() and not news.is_set()
    news.set()
    assert await patient


async def test_who_has_no_patience_left_gives_way_to_others() -> None:
    news, is_over = asyncio.Event(), asyncio.Event()

    async def impatient() -> None:
        while not is_over.is_set():
            await wait_at_most(SystemClock(), news, -1.0)

    waiting = asyncio.create_task(impatient())
    asyncio.get_running_loop().call_soon(is_over.set)
    await waiting
    news.set()
    assert await wait_at_most(SystemClock(), news, 0.0)


async def test_a_cancelled_wait_leaves_nothing_behind() -> None:
    clock, news = ManualClock(), asyncio.Event()
    before = asyncio.all_tasks()
    waiting = asyncio.create_task(wait_at_most(clock, news, 1.0))
    await clock.advance(0.5)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await clock.advance(0.0)
    assert asyncio.all_tasks() == before
