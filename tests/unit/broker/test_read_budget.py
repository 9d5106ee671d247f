"""The memory of bulk reads: who finds it spent waits in line, and who gives up leaves nothing behind."""

from __future__ import annotations

import asyncio
import random

import pytest

from braid.broker.budget import ReadBudget


class Reader:
    """Holds some of a budget until it is told to let go."""

    def __init__(self, budget: ReadBudget, size: int) -> None:
        self.is_reading = False
        self._done = asyncio.Event()
        self.task = asyncio.create_task(self._run(budget, size))

    async def _run(self, budget: ReadBudget, size: int) -> None:
        async with budget.hold(size):
            self.is_reading = True
            await self._done.wait()

    async def finish(self) -> None:
        self._done.set()
        await asyncio.gather(self.task, return_exceptions=True)


async def turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.inv("INV17")
async def test_they_read_in_the_order_in_which_they_came() -> None:
    budget = ReadBudget(100)
    readers = [Reader(budget, size) for size in (60, 50, 10, 1000)]
    await turn()
    assert [each.is_reading for each in readers] == [True, False, False, False], "a small one does not overtake"
    await readers[0].finish()
    await turn()
    assert [each.is_reading for each in readers[1:]] == [True, True, False]
    assert budget.used == 60
    await readers[1].finish()
    await readers[2].finish()
    await turn()
    assert (readers[3].is_reading, budget.used) == (True, 100), "one that is too large gets all there is"
    await readers[3].finish()
    assert budget.used == 0


@pytest.mark.inv("INV17")
@pytest.mark.parametrize("seed", range(20))
async def test_who_gives_up_leaves_nothing_behind(seed: int) -> None:
    chance = random.Random(seed)
    budget = ReadBudget(100)
    readers = [Reader(budget, chance.randrange(1, 120)) for _ in range(30)]
    while readers:
        reader = readers.pop(chance.randrange(len(readers)))
        if chance.random() < 0.5:
            if chance.random() < 0.5 and readers and readers[0].is_reading:
                await readers.pop(0).finish()  # so that its turn comes just before it gives up
            reader.task.cancel()
        await reader.finish() if reader.is_reading or reader.task.cancelling() else readers.append(reader)
        assert 0 <= budget.used <= 100
        await asyncio.sleep(0) if chance.random() < 0.5 else None
    assert (budget.used, len(budget._line)) == (0, 0)


async def test_a_turn_that_comes_while_it_gives_up_is_passed_on() -> None:
    budget = ReadBudget(100)
    first, second, third = (Reader(budget, 100) for _ in range(3))
    await turn()
    first._done.set()
    await asyncio.sleep(0)  # it lets go: the second's turn has come, and it does not know yet
    assert budget.used == 100
    second.task.cancel()
    await turn()
    assert (second.is_reading, third.is_reading, budget.used) == (False, True, 100)
    await third.finish()
    assert budget.used == 0
