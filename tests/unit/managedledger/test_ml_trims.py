"""Trims beside other work: slow writes of cursors, policies that change, other trims."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from braid.managedledger.retention import Limits
from braid.model.positions import Position
from braid.model.retention import RetentionPolicies

KEEP_ALL, KEEP_NOTHING = Limits(-1, -1), Limits(0, 0)


class Held:
    """Calls to the stores whose name begins with a text wait until they are let go, one after the other."""

    def __init__(self, faults: Any, start: str) -> None:
        self.asked = asyncio.Event()
        self.turns = asyncio.Semaphore(0)
        self._start = start
        self._run = faults.run
        faults.run = self._held_up

    async def _held_up(self, what: str, work: Callable[[], Any]) -> Any:
        if what.startswith(self._start):
            self.asked.set()
            await self.turns.acquire()
        return await self._run(what, work)

    def let_all_go(self) -> None:
        for _ in range(100):
            self.turns.release()


@pytest.fixture
def hold(world: Any) -> Iterator[Callable[[Any, str], Held]]:
    """Makes a `Held`, and ends the waiting before the logs of the world are closed."""
    made: list[Held] = []

    def make(faults: Any, start: str) -> Held:
        made.append(Held(faults, start))
        return made[-1]

    yield make
    for each in made:
        each.let_all_go()


async def filled(world: Any, kit: Any, *cursors: str) -> tuple[Any, Any]:
    """A log of three ledgers with the numbers 0 to 11 that keeps everything, its cursors at the start; and the faults."""
    faults = kit.Faults()
    log, listener = await world.open(faults=faults)
    log.limits = KEEP_ALL
    for name in cursors:
        await log.open_cursor(name, initial="earliest")
    await kit.fill(log, listener, range(12))
    return log, faults


async def settled(log: Any) -> None:
    """The trim that an acknowledgment asked for is over."""
    while log._trimming is not None:
        await asyncio.wait([log._trimming])


async def test_a_trim_does_not_pass_what_was_written_of_the_cursors(world: Any, kit: Any, hold: Any) -> None:
    """One cursor's write is slow, another one moves on meanwhile: what that one stores carries more than a place."""
    log, faults = await filled(world, kit, "quick", "slow")
    first, second, _third = [info.ledger_id for info in log.infos]
    quick, slow = log.cursors["quick"], log.cursors["slow"]
    slow.acknowledge_cumulative(log.last_position)
    await settled(log)
    quick.acknowledge_cumulative(Position(first, 4), properties={"p": 4})
    await quick.flush()
    log.limits = KEEP_NOTHING
    held = hold(faults, "add")
    trimming = asyncio.ensure_future(log.trim())
    await held.asked.wait()
    quick.acknowledge_cumulative(Position(second, 4), properties={"p": 9})  # in memory, written later
    held.turns.release()
    assert await trimming == 1
    log, _listener = await world.open()  # the broker died before it was written
    assert log.cursors["quick"].position_properties == {"p": 4}
    assert [kit.number_of(entry) for entry in await kit.everything(log)] == list(range(5, 12))


async def test_a_cursor_that_joins_during_a_trim_is_asked_too(world: Any, kit: Any, hold: Any) -> None:
    log, faults = await filled(world, kit, "slow")
    log.cursors["slow"].acknowledge_cumulative(log.last_position)
    await settled(log)
    log.limits = KEEP_NOTHING
    held = hold(faults, "create ledger")
    trimming = asyncio.ensure_future(log.trim())
    await held.asked.wait()
    late = await log.open_cursor("late", initial="earliest")
    late.acknowledge_cumulative(log.last_position, properties={"p": 11})
    held.turns.release()
    assert await trimming == 0
    log, _listener = await world.open()
    assert log.cursors["late"].position_properties == {}
    assert [kit.number_of(entry) for entry in await kit.everything(log)] == list(range(12))
    held.let_all_go()


@pytest.mark.inv("INV7")
@pytest.mark.parametrize("way", ["refused", "policy"])
async def test_the_guard_of_a_trim_is_asked_after_all_that_takes_time(world: Any, kit: Any, hold: Any, way: str) -> None:
    """An operation that begins, or a policy that is set, while cursors are written or the end is read is not passed over."""
    log, faults = await filled(world, kit, "c")
    log.cursors["c"].acknowledge_cumulative(log.last_position)
    await settled(log)
    log.limits = KEEP_NOTHING
    is_set = False

    async def guard(managed: Any) -> bool:
        if way == "policy":
            managed.policy = RetentionPolicies(retention_time_in_minutes=-1, retention_size_in_mb=-1) if is_set else None
            return True
        return not is_set

    log.trim_guard = guard
    held = hold(faults, "add")
    trimming = asyncio.ensure_future(log.trim())
    await held.asked.wait()
    is_set = True
    held.let_all_go()
    assert await trimming == 0
    assert log.total_entries == 12


async def test_two_trims_at_the_same_time_say_it_once(
    world: Any, kit: Any, hold: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """One that the log began by itself, and one that an administrator asked for."""
    caplog.set_level(logging.INFO, "braid")
    log, faults = await filled(world, kit)
    log.limits = KEEP_NOTHING
    held = hold(faults, "put")
    trims = [asyncio.ensure_future(log.trim()) for _ in range(2)]
    await held.asked.wait()
    for _ in range(5):
        await asyncio.sleep(0)
    held.let_all_go()
    assert sorted(await asyncio.gather(*trims)) == [0, 2]
    assert [line.message.split(" of ")[0] for line in caplog.records if "deleted" in line.message] == ["deleted 10 messages"]


async def test_nothing_goes_while_a_cursor_cannot_be_read(world: Any, kit: Any) -> None:
    """Nobody knows what it needs; the others have passed everything, and no policy keeps it."""
    log, _faults = await filled(world, kit, "bad", "good")
    log.cursors["good"].acknowledge_cumulative(log.last_position)
    await log.close()
    handle = await world.handle()
    key = f"/managed-ledgers/{kit.NAME}/bad"
    await handle.put(key, b'{"position":"x"}', expected=(await handle.get(key)).version)
    log, _listener = await world.open()
    world.clock.advance(1)
    assert list(log.unreadable) == ["bad"]
    assert await log.trim(keeps_unread=False) == 0
    assert log.next_trim().rule == "needed"
    assert log.total_entries == 12
    await log.delete_cursor("bad")
    await log.trim()
    await settled(log)
    assert log.total_entries == 2
