"""Turns of operations: one after the other, and none is lost with whoever gave up."""

import asyncio

import pytest

from braid.errors import Conflict
from braid.runtime.clock import SystemClock
from braid.runtime.tasks import Tasks
from braid.scalable.turns import OperationTurns


async def test_a_turn_that_came_to_somebody_who_was_cancelled_goes_to_the_next() -> None:
    turns, tasks = OperationTurns(SystemClock(), "topic"), Tasks("operations")
    await turns.take("split")
    merge = tasks.spawn(turns.take("merge"), "merge")
    prune = tasks.spawn(turns.take("prune"), "prune")
    await asyncio.sleep(0)
    turns.give_back()  # merge's turn has come, and it has not noticed
    merge.cancel()
    await asyncio.wait([merge])
    await asyncio.sleep(0)
    assert merge.cancelled() and prune.done() and turns.holder == "prune"
    turns.give_back()
    assert turns.holder is None
    await tasks.close()


async def test_whoever_is_cancelled_or_impatient_before_its_turn_is_passed_over() -> None:
    turns, tasks = OperationTurns(SystemClock(), "topic"), Tasks("operations")
    await turns.take("split")
    merge = tasks.spawn(turns.take("merge"), "merge")
    prune = tasks.spawn(turns.take("prune", patience=0), "prune")
    await asyncio.sleep(0)
    merge.cancel()
    await asyncio.wait([merge, prune])
    with pytest.raises(Conflict, match="prune waited 0 s for another operation, the split"):
        prune.result()
    seek = tasks.spawn(turns.take("seek"), "seek")
    await asyncio.sleep(0)
    turns.give_back()
    await seek
    assert turns.holder == "seek"
    await tasks.close()


@pytest.mark.inv("INV17")
async def test_nothing_is_kept_of_those_who_gave_up() -> None:
    """An operation may be under way for days, if the owner of a segment is away."""
    turns, tasks = OperationTurns(SystemClock(), "topic"), Tasks("operations")
    await turns.take("split")
    for _ in range(5):
        waiting = [tasks.spawn(turns.take("seek", patience=0), "seek"), tasks.spawn(turns.take("merge"), "merge")]
        await asyncio.sleep(0)
        waiting[1].cancel()
        await asyncio.wait(waiting)
        assert isinstance(waiting[0].exception(), Conflict)
    assert len(turns) == 0
    last = tasks.spawn(turns.take("prune"), "prune")
    await asyncio.sleep(0)
    assert len(turns) == 1
    turns.give_back()
    await last
    assert len(turns) == 0
    await tasks.close()
