"""Power cuts and store errors at every call of a log's life, then a restart: nothing durable is lost, nothing acked comes back
unacked below a flush, the index stays dense (INV1, INV2, INV3)."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from braid.errors import BraidError, Closed, LedgerStoreReadOnly, OutcomeUnknown, StoreUnavailable, TopicTerminated
from braid.managedledger.config import ManagedLedgerConfig
from braid.model.positions import Position

CONFIG = ManagedLedgerConfig(max_entries_per_ledger=3, min_ledger_age_ms=0, max_entries_per_cursor_ledger=2)
LAST = 13


class Life:
    """One scripted life of a log and what its users were told."""

    def __init__(self, world: Any, kit: Any, faults: Any) -> None:
        self.world = world
        self.kit = kit
        self.faults = faults
        self.pushed: list[int] = []
        self.confirmed: list[int] = []
        self.failed: list[int] = []
        self.acked: set[int] = set()
        self.flushed: set[int] = set()
        self.has_cursor = False
        self.is_terminated = False
        self.log: Any = None

    def entries_added(self, entries: list[Any]) -> None:
        self.confirmed += [entry.context for entry in entries]

    def log_failed(self, error: BraidError, contexts: list[Any]) -> None:
        self.failed += contexts

    async def add(self, *numbers: int) -> None:
        for number in numbers:
            self.pushed.append(number)
            try:
                self.log.add(self.kit.body_of(number, number % 3 + 1), number % 3 + 1, number)
            except BraidError:
                self.failed.append(number)
        while len(self.confirmed) + len(self.failed) < len(self.pushed):
            if self.faults.is_dead:
                raise self.kit.PowerCut
            await asyncio.sleep(0)

    async def ack(self, cursor: Any, *numbers: int) -> None:
        entries = await self.kit.everything(self.log)
        known = {self.kit.number_of(entry): Position(entry.ledger_id, entry.entry_id) for entry in entries}
        self.acked |= {number for number in numbers if number in known}
        cursor.acknowledge([known[number] for number in numbers if number in known])
        await cursor.flush()
        self.flushed |= self.acked

    async def live(self) -> None:
        """Open, roll, flush and roll the cursor, trim, change properties, close, open again, terminate."""
        factory = self.world.factory(config=CONFIG, faults=self.faults)
        self.log = await factory.open(self.kit.NAME, self, create=True)
        cursor = await self.log.open_cursor("s", initial="earliest")
        self.has_cursor = True
        await self.add(0, 1, 2, 3, 4)
        await self.ack(cursor, 0, 2)
        await self.ack(cursor, 4)
        await self.add(5, 6)
        await self.ack(cursor, 1)
        await self.ack(cursor, 3)
        await self.log.trim()
        await self.log.set_properties({"a": "b"})
        await self.add(7)
        await self.log.close()
        self.log = await factory.open(self.kit.NAME, self, create=True)
        await self.add(8, 9)
        await self.ack(self.log.cursors["s"], 6, 8)
        await self.add(10, 11, 12)
        await self.log.terminate()
        self.is_terminated = True
        await self.log.close()


async def check(world: Any, kit: Any, life: Life) -> None:
    """Restart on healthy stores and compare with what the users of the dead broker know."""
    log, listener = await world.open(config=CONFIG)
    first_new = LAST
    entries = await kit.everything(log)
    numbers = [kit.number_of(entry) for entry in entries]
    assert numbers == sorted(set(numbers)), "order"
    assert set(numbers) <= set(life.pushed)
    present = set(numbers)
    trimmed = {number for number in life.confirmed if number not in present}
    assert trimmed <= life.acked, f"lost {trimmed - life.acked}"
    assert all(b.index - a.index == b.messages for a, b in pairwise(entries)), "dense"
    if not entries and life.confirmed:
        assert log.last_index >= sum(number % 3 + 1 for number in life.confirmed) - 1
    assert all(a.append_ms <= b.append_ms for a, b in pairwise(entries))
    ids = [info.ledger_id for info in log.infos]
    assert ids == sorted(set(ids))
    if life.is_terminated:
        assert log.is_terminated
    if life.has_cursor:
        cursor = log.cursors["s"]
        delivered = set()
        while batch := await cursor.read(100, 1 << 20):
            delivered |= {kit.number_of(entry) for entry in batch}
        assert delivered >= present - life.acked, "an unacknowledged entry is not delivered"
        assert delivered.isdisjoint(life.flushed), "an acknowledgment that was durable is gone"
        assert cursor.backlog() == len(delivered)
    try:
        log.add(kit.body_of(first_new), 1, first_new)
    except TopicTerminated:
        assert log.is_terminated
    else:
        await listener.until(1)
        assert listener.contexts == [first_new]
        added = listener.added[0][0]
        assert added.index == (entries[-1].index if entries else log.last_index - 1) + 1
    await log.close()


async def calls_of_a_life(kit: Any) -> int:
    world = await kit.memory_world()
    faults = kit.Faults()
    await Life(world, kit, faults).live()
    await world.close()
    return int(faults.calls)


@pytest.mark.inv("INV1", "INV2", "INV3")
@pytest.mark.parametrize("after", [False, True])
async def test_power_cut_at_every_call(kit: Any, after: bool) -> None:
    total = await calls_of_a_life(kit)
    assert total > 60
    for at in range(1, total + 1):
        world = await kit.memory_world()
        faults = kit.Faults()
        faults.arm(at, after=after)
        life = Life(world, kit, faults)
        with pytest.raises((kit.PowerCut, Closed)):
            await life.live()
        await life_ended(life)
        try:
            await check(world, kit, life)
        except BaseException as error:
            error.add_note(f"power cut {'after' if after else 'before'} call {at}: {faults.log[-1]}")
            raise
        await world.close()


@pytest.mark.inv("INV1", "INV2", "INV3")
@pytest.mark.parametrize(
    ("kind", "after"),
    [(StoreUnavailable, False), (OutcomeUnknown, False), (OutcomeUnknown, True), (LedgerStoreReadOnly, False)],
)
async def test_one_error_at_every_call(kit: Any, kind: type[BraidError], after: bool) -> None:
    """An error at one call fails at most what was under way; a restart finds everything that was confirmed."""
    total = await calls_of_a_life(kit)
    for at in range(1, total + 1):
        world = await kit.memory_world()
        faults = kit.Faults()
        faults.arm(at, after=after, error=kind("injected"))
        faults.only = "put delete get scan" if kind is not LedgerStoreReadOnly else "create append add close"
        life = Life(world, kit, faults)
        try:
            await life.live()
        except BraidError:
            await life_ended(life)
        try:
            await check(world, kit, life)
        except BaseException as error:
            error.add_note(f"{kind.__name__} {'after' if after else 'before'} call {at}: {faults.log[at - 1]}")
            raise
        await world.close()


async def life_ended(life: Life) -> None:
    """Drop the dead broker's tasks; it does nothing more."""
    life.faults.is_dead = True
    if life.log is not None:
        await life.log.tasks.close()
        for cursor in life.log.cursors.values():
            cursor.stop()


async def test_restart_on_disk(tmp_path: Path, kit: Any) -> None:
    """The same life on the embedded and local backends, over real restarts of the stores."""
    world = await kit.disk_world(tmp_path)
    life = Life(world, kit, kit.Faults())
    await life.live()
    await world.close()
    world = await kit.disk_world(tmp_path)
    await check(world, kit, life)
    await world.close()


@pytest.mark.parametrize("at", range(3, 66, 9))
async def test_power_cut_on_disk(tmp_path: Path, kit: Any, at: int) -> None:
    world = await kit.disk_world(tmp_path)
    faults = kit.Faults()
    faults.arm(at, after=False)
    life = Life(world, kit, faults)
    with pytest.raises((kit.PowerCut, Closed)):
        await life.live()
    await life_ended(life)
    await world.close()
    world = await kit.disk_world(tmp_path)
    await check(world, kit, life)
    await world.close()


@pytest.mark.parametrize("after", [False, True])
async def test_power_cut_while_deleting(kit: Any, after: bool) -> None:
    """Half-deleted is deleted: the next open finishes the work and makes a new log."""
    for at in range(1, 40):
        world = await kit.memory_world()
        log, listener = await world.open(config=CONFIG)
        cursor = await log.open_cursor("s", initial="earliest")
        await kit.fill(log, listener, range(4))
        cursor.acknowledge([log.first_position])
        await cursor.flush()
        old = log.incarnation
        await log.close()
        faults = kit.Faults()
        faults.arm(at, after=after)
        try:
            await world.factory(faults=faults).delete(kit.NAME)
        except kit.PowerCut:
            is_cut = True
        else:
            is_cut = False
        log, listener = await world.open(config=CONFIG)
        if log.incarnation != old:
            assert not log.cursors and log.total_entries == 0
            assert [ledger_id async for ledger_id in world.ledgers.ledgers()] == []
        else:
            assert log.total_entries == 4 and set(log.cursors) == {"s"}
            assert is_cut
        await log.close()
        await world.close()
        if not is_cut:
            return
    raise AssertionError("the deletion never ended")
