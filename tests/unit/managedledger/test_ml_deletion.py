"""Deleting a log: what its warnings say is true, and two who do it at the same time never touch a new log of the same name."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from braid.errors import LedgerStoreReadOnly
from braid.managedledger.api import SingleStore
from braid.managedledger.deletion import remove_log
from braid.managedledger.records import log_key


async def filled(world: Any, kit: Any) -> tuple[int, int]:
    """A log whose owner knows nothing of the deletion; returns the ids of its ledger and of its cursor's."""
    log, listener = await world.open()
    cursor = await log.open_cursor("s", initial="earliest")
    await kit.fill(log, listener, range(3))
    cursor.acknowledge([log.first_position])
    await cursor.flush()
    return log.infos[0].ledger_id, cursor._store.ledger_id


async def test_a_ledger_that_cannot_be_deleted_is_named_with_the_remedy(
    world: Any, kit: Any, caplog: pytest.LogCaptureFixture
) -> None:
    ledger_id, cursor_ledger = await filled(world, kit)
    faults = kit.Faults()
    handle = await world.handle()
    faults.arm(2, after=False, error=LedgerStoreReadOnly("The disk is full."))
    await remove_log(handle, SingleStore(kit.FaultyLedgers(world.ledgers, faults)), log_key(kit.NAME))
    assert await handle.get(log_key(kit.NAME)) is None
    assert [each async for each in world.ledgers.ledgers()] == [ledger_id] != [cursor_ledger]
    assert f"the log {log_key(kit.NAME)} is removed, but its ledger {ledger_id} could not be deleted" in caplog.text
    assert "managed_ledger.orphan_sweep_minutes): The disk is full." in caplog.text


async def test_a_cursor_that_cannot_be_read_goes_and_its_ledger_is_not_claimed_to_be_deleted(
    world: Any, kit: Any, caplog: pytest.LogCaptureFixture
) -> None:
    _ledger_id, cursor_ledger = await filled(world, kit)
    handle = await world.handle()
    await handle.put(f"{log_key(kit.NAME)}/s", b"{")
    await remove_log(handle, SingleStore(world.ledgers), log_key(kit.NAME))
    assert await handle.get(f"{log_key(kit.NAME)}/s") is None
    assert [each async for each in world.ledgers.ledgers()] == [cursor_ledger]
    assert "its ledger, if it has one, is deleted after the next start" in caplog.text


class Held:
    """A ledger store whose first delete waits until the test lets it go on."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.reached = asyncio.Event()
        self.go_on = asyncio.Event()

    async def delete(self, ledger_id: int) -> None:
        self.reached.set()
        await self.go_on.wait()
        await self._inner.delete(ledger_id)


@pytest.mark.inv("INV2", "INV5")
async def test_a_slow_removal_spares_the_log_that_was_made_meanwhile(world: Any, kit: Any) -> None:
    await filled(world, kit)
    held = Held(world.ledgers)
    handle = await world.handle()
    slow = asyncio.get_running_loop().create_task(remove_log(handle, SingleStore(held), log_key(kit.NAME)))  # type: ignore[arg-type]
    await held.reached.wait()
    log, listener = await world.open()  # finishes the removal and makes a new log
    for name in ("s", "t"):
        await log.open_cursor(name, initial="earliest")
    await kit.fill(log, listener, range(3))
    held.go_on.set()
    await slow
    await log.check_owner()
    for name in ("s", "t"):
        assert await handle.get(f"{log_key(kit.NAME)}/{name}") is not None
    assert len(await kit.everything(log)) == 3


async def test_a_cursor_that_its_former_owner_writes_once_more_goes_as_well(world: Any, kit: Any) -> None:
    await filled(world, kit)
    held = Held(world.ledgers)
    handle = await world.handle()
    removal = asyncio.get_running_loop().create_task(remove_log(handle, SingleStore(held), log_key(kit.NAME)))  # type: ignore[arg-type]
    await held.reached.wait()
    key = f"{log_key(kit.NAME)}/s"
    found = await handle.get(key)
    await handle.put(key, found.value)
    held.go_on.set()
    await removal
    assert await handle.get(key) is None and await handle.get(log_key(kit.NAME)) is None
    assert [each async for each in world.ledgers.ledgers()] == []


async def test_a_removal_is_finished_although_another_one_was_begun_and_given_up(world: Any, kit: Any) -> None:
    """W13, seed 6: two leaders removed a segment, the second one's broker stopped, and the first left the rest to it."""
    await filled(world, kit)
    handle = await world.handle()
    loop = asyncio.get_running_loop()
    stores = [Held(world.ledgers), Held(world.ledgers)]
    removals = []
    for held in stores:
        resolver: Any = SingleStore(held)  # type: ignore[arg-type]
        removals.append(loop.create_task(remove_log(handle, resolver, log_key(kit.NAME))))
        await held.reached.wait()
    removals[1].cancel()
    await asyncio.wait([removals[1]])
    stores[0].go_on.set()
    await removals[0]
    assert await handle.get(log_key(kit.NAME)) is None
    assert [each async for each in world.ledgers.ledgers()] == []
