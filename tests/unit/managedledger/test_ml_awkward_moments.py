"""Logs at awkward moments: a clock that jumped, ledgers that cannot be deleted, cursors behind what is trimmed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from braid.errors import BraidError, LedgerStoreReadOnly, StoreUnavailable
from braid.managedledger.config import ManagedLedgerConfig
from braid.managedledger.records import LogRecord, decode_record, log_key
from braid.model.positions import Position


async def ledger_ids(world: Any) -> list[int]:
    return [ledger_id async for ledger_id in world.ledgers.ledgers()]


async def test_a_clock_that_was_ahead_for_a_while_does_not_make_a_ledger_per_entry(world: Any, kit: Any) -> None:
    log, listener = await world.open(config=ManagedLedgerConfig(max_ledger_age_ms=1000, min_ledger_age_ms=100))
    log.retention_minutes = log.retention_mb = -1
    await kit.fill(log, listener, range(3))
    world.clock.ms += 366 * 86_400_000
    await kit.fill(log, listener, range(3, 4))
    world.clock.ms -= 366 * 86_400_000
    for number in range(4, 20):
        await kit.fill(log, listener, range(number, number + 1))
    assert len(log.infos) == 2  # left once, when the clock jumped
    stamps = [entry.append_ms for entry in await kit.everything(log)]
    assert stamps == sorted(stamps)


async def test_a_ledger_that_could_not_be_deleted_is_deleted_by_a_later_trim(world: Any, kit: Any) -> None:
    faults = kit.Faults()
    log, listener = await world.open(faults=faults)
    await kit.fill(log, listener, range(12))  # trims by itself whatever it can
    while await log.trim():
        pass
    kept = [info.ledger_id for info in log.infos]
    cursor = await log.open_cursor("c", initial="earliest")
    await kit.fill(log, listener, range(12, 24))
    log.retention_minutes = log.retention_mb = -1
    cursor.acknowledge_cumulative(log.last_position)
    await cursor.flush()
    log.retention_minutes = log.retention_mb = 0
    is_full = True
    hit = faults._hit

    def full(what: str) -> bool:
        if is_full and what.startswith("delete ledger"):
            raise LedgerStoreReadOnly("The disk is full.")
        return bool(hit(what))

    faults._hit = full
    assert await log.trim()
    named = {info.ledger_id for info in log.infos}
    assert kept[0] not in named
    assert kept[0] in await ledger_ids(world)
    is_full = False
    await log.trim()
    left = set(await ledger_ids(world)) - {cursor.ledger_id}
    assert left == named


async def test_trimming_waits_until_the_cursors_are_durable(world: Any, kit: Any) -> None:
    faults = kit.Faults()
    log, listener = await world.open(faults=faults)
    log.retention_minutes = log.retention_mb = 0
    cursor = await log.open_cursor("c", initial="earliest")
    await kit.fill(log, listener, range(12))
    faults.only = "put"
    faults.arm(3, after=False, error=StoreUnavailable("The metadata store does not answer."))  # after create and add
    before = [info.ledger_id for info in log.infos]
    cursor.acknowledge_cumulative(Position(before[1], 4), properties={"p": 9})
    with pytest.raises(BraidError):
        await log.trim()
    assert [info.ledger_id for info in log.infos] == before
    faults.arm(-1, after=False)
    await log.trim()  # or the one that the log began by itself
    assert [info.ledger_id for info in log.infos] == before[2:]
    reopened, _listener = await world.open()
    assert reopened.cursors["c"].position_properties == {"p": 9}


async def test_a_cursor_that_could_not_be_deleted_goes_on(world: Any, kit: Any) -> None:
    faults = kit.Faults()
    log, listener = await world.open(faults=faults)
    cursor = await log.open_cursor("c", initial="earliest")
    await kit.fill(log, listener, range(3))
    faults.only = "delete"
    faults.arm(1, after=False, error=StoreUnavailable("The metadata store does not answer."))
    with pytest.raises(StoreUnavailable):
        await log.delete_cursor("c")
    cursor.acknowledge_cumulative(log.last_position)
    await cursor.flush()
    reopened, _listener = await world.open()
    assert reopened.cursors["c"].mark_delete == log.last_position


@pytest.mark.parametrize("initial", ["earliest", "latest"])
async def test_a_cursor_made_while_the_first_ledger_opens_misses_nothing(world: Any, kit: Any, initial: Any) -> None:
    faults = kit.Faults()
    log, listener = await world.open(faults=faults)
    asked, gate = asyncio.Event(), asyncio.Event()
    run = faults.run

    async def held_up(what: str, work: Callable[[], Any]) -> Any:
        if what.startswith("put") and what.endswith("/late"):
            asked.set()
            await gate.wait()
        return await run(what, work)

    faults.run = held_up
    async with asyncio.TaskGroup() as group:
        opening = group.create_task(log.open_cursor("late", initial=initial))
        await asked.wait()
        await kit.fill(log, listener, range(3))  # the log's first ledger
        gate.set()
    cursor = opening.result()
    await kit.fill(log, listener, range(3, 12))  # further ledgers
    assert [kit.number_of(entry) for entry in await kit.everything(log)] == list(range(12))
    assert cursor.backlog() == 12
    assert kit.number_of((await cursor.read(1, 1 << 20))[0]) == 0


@pytest.mark.inv("INV1")
async def test_a_cursor_that_goes_back_in_the_last_moment_of_a_trim_keeps_its_messages(world: Any, kit: Any) -> None:
    """The trim reads the end of what it is about to delete, which takes time; a seek comes in between."""
    log, listener = await world.open()
    log.retention_minutes = log.retention_mb = -1
    cursor = await log.open_cursor("c", initial="earliest")
    await kit.fill(log, listener, range(12))
    cursor.acknowledge_cumulative(log.last_position)
    await cursor.flush()
    log.retention_minutes = log.retention_mb = 0

    async def shown(last: Position) -> Position:
        await cursor.reset(log.first_position)
        return last

    log.last_shown = shown
    assert await log.trim() == 0
    assert cursor.backlog() == 12
    assert [kit.number_of(entry) for entry in await kit.everything(log)] == list(range(12))


async def test_a_ledger_closed_while_a_trim_is_written_is_recorded_as_closed(world: Any, kit: Any) -> None:
    """The record that the trim writes shows it open, and the write that was to correct that fails. A log that ends cleanly
    leaves nothing to recover nevertheless."""
    faults = kit.Faults()
    log, listener = await world.open(faults=faults)
    log.retention_minutes = log.retention_mb = -1
    await kit.fill(log, listener, range(12))
    key = log_key(log.name)
    gate, run = asyncio.Event(), faults.run
    puts: list[str] = []

    async def held_up(what: str, work: Callable[[], Any]) -> Any:
        if what == f"put {key}":
            puts.append(what)
            if len(puts) == 1:
                await gate.wait()
            elif len(puts) == 2:
                raise StoreUnavailable("The metadata store does not answer.")
        return await run(what, work)

    faults.run = held_up
    log.retention_minutes = log.retention_mb = 0
    async with asyncio.TaskGroup() as group:
        trimming = group.create_task(log.trim())
        await kit.fill(log, listener, range(12, 15))  # the last ledger is full
        async with asyncio.timeout(10):
            while not (puts and log.ledgers.has_news):  # noqa: ASYNC110 - it is a flag
                await asyncio.sleep(0)
        gate.set()
    assert trimming.result() == 2
    await log.close()
    found = await (await world.handle()).get(key, fresh=True)
    ledgers = decode_record(LogRecord, key, found.value).ledgers
    assert [(info.entries, info.timestamp > 0) for info in ledgers] == [(5, True)]
