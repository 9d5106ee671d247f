"""Cursors: reading, acknowledging, batches, durability, recovery, reset."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from braid.errors import AlreadyExists, Closed, InvalidArgument, LedgerFenced, LedgerStoreReadOnly, StoreUnavailable
from braid.managedledger.config import ManagedLedgerConfig
from braid.managedledger.records import CursorRecord, decode_record
from braid.model.positions import EARLIEST, LATEST, Position


async def record(world: Any, kit: Any, name: str = "s") -> CursorRecord:
    handle = await world.handle()
    found = await handle.get(f"/managed-ledgers/{kit.NAME}/{name}")
    return decode_record(CursorRecord, found.key, found.value)


async def filled(world: Any, kit: Any, entries: int = 12, **options: Any) -> tuple[Any, Any, list[Position]]:
    log, listener = await world.open(**options)
    cursor = await log.open_cursor("s", initial="earliest")
    await kit.fill(log, listener, range(entries))
    return log, cursor, [Position(entry.ledger_id, entry.entry_id) for entry, _ in listener.added]


async def rest(cursor: Any) -> list[Position]:
    """What is still to be delivered, from storage."""
    cursor.rewind()
    found: list[Position] = []
    while entries := await cursor.read(5, 1 << 20):
        found += [Position(entry.ledger_id, entry.entry_id) for entry in entries]
    return found


async def test_reads_from_memory_and_from_storage_agree(world: Any, kit: Any) -> None:
    _log, cursor, positions = await filled(world, kit)
    cursor.acknowledge([positions[3], positions[6]])
    seen: list[Position] = []
    while entries := cursor.read_cached(4, 1 << 20):
        seen += [Position(entry.ledger_id, entry.entry_id) for entry in entries]
    assert entries == []
    assert seen == await rest(cursor) == [p for p in positions if p not in (positions[3], positions[6])]
    assert cursor.read_cached(4, 1 << 20) == []


async def test_in_order_acks_move_the_mark_delete_position(world: Any, kit: Any) -> None:
    _log, cursor, positions = await filled(world, kit)
    for i, position in enumerate(positions):
        cursor.acknowledge([position])
        assert cursor.mark_delete == position
        assert cursor.backlog() == len(positions) - i - 1
    cursor.acknowledge(positions)
    assert cursor.consumed == len(positions)
    assert await rest(cursor) == []


async def test_out_of_order_acks_fill_gaps_across_ledgers(world: Any, kit: Any) -> None:
    _log, cursor, positions = await filled(world, kit)
    cursor.acknowledge(reversed(positions[1:]))
    assert cursor.mark_delete.entry_id == -1
    assert cursor.backlog() == 1
    assert cursor.is_acknowledged(positions[5]) and not cursor.is_acknowledged(positions[0])
    assert cursor.describe_ranges().startswith(f"[({positions[0].ledger_id}:0..{positions[0].ledger_id}:4]")
    cursor.acknowledge([positions[0]])
    assert cursor.mark_delete == positions[-1]
    assert cursor.ranges_count == 0 and cursor.backlog() == 0


async def test_ack_of_unknown_positions(world: Any, kit: Any) -> None:
    log, cursor, positions = await filled(world, kit)
    cursor.acknowledge([Position(positions[0].ledger_id, 99), EARLIEST])
    assert cursor.backlog() == 12
    beyond = Position(log.last_position.ledger_id, log.last_position.entry_id + 1)
    with pytest.raises(InvalidArgument):
        cursor.acknowledge([beyond])
    with pytest.raises(InvalidArgument):
        cursor.acknowledge_cumulative(beyond)
    with pytest.raises(InvalidArgument):
        cursor.acknowledge_batch(LATEST, 1)
    assert cursor.backlog() == 12


async def test_cumulative(world: Any, kit: Any) -> None:
    _log, cursor, positions = await filled(world, kit)
    cursor.acknowledge([positions[7], positions[9]])
    cursor.acknowledge_cumulative(positions[6], properties={"p": 7})
    assert cursor.mark_delete == positions[7]
    assert cursor.consumed == 9
    cursor.acknowledge_cumulative(positions[2])
    assert cursor.mark_delete == positions[7]
    assert await rest(cursor) == [positions[8], *positions[10:]]
    await cursor.flush()
    _log, _ = await world.open()
    assert _log.cursors["s"].position_properties == {"p": 7}


async def test_batch_acks_are_anded(world: Any, kit: Any) -> None:
    _log, cursor, positions = await filled(world, kit)
    entry = positions[2]
    assert not cursor.has_partial_acks
    assert cursor.acknowledge_batch(entry, 0b11110) is False
    assert cursor.acknowledge_batch(entry, 0b11101) is False
    assert cursor.unacked_mask(entry) == 0b11100 and cursor.has_partial_acks
    await cursor.flush()
    log, _ = await world.open()
    cursor = log.cursors["s"]
    assert cursor.unacked_mask(entry) == 0b11100
    assert cursor.acknowledge_batch(entry, 0b00011) is True
    assert cursor.is_acknowledged(entry) and cursor.unacked_mask(entry) is None
    assert cursor.acknowledge_batch(entry, 0b1) is False
    assert await rest(cursor) == [*positions[:2], *positions[3:]]


async def test_cumulative_into_a_batch(world: Any, kit: Any) -> None:
    _log, cursor, positions = await filled(world, kit)
    cursor.acknowledge_cumulative(positions[5], 0b1100)
    assert cursor.mark_delete == positions[4]
    assert cursor.unacked_mask(positions[5]) == 0b1100
    cursor.acknowledge_cumulative(positions[5], 0b1110)
    assert cursor.unacked_mask(positions[5]) == 0b1100
    cursor.acknowledge_cumulative(positions[5], 0b0011)
    assert cursor.mark_delete == positions[5] and not cursor.has_partial_acks


async def test_state_survives_a_crash_after_flush_and_only_then(world: Any, kit: Any) -> None:
    _log, cursor, positions = await filled(world, kit)
    cursor.acknowledge([positions[0], positions[4], positions[5], positions[11]])
    await cursor.flush()
    cursor.acknowledge([positions[1]])
    log, _ = await world.open()
    cursor = log.cursors["s"]
    assert cursor.mark_delete == positions[0]
    assert await rest(cursor) == [*positions[1:4], *positions[6:11]]
    assert cursor.backlog() == 8


async def test_lazy_write_after_the_flush_interval(world: Any, kit: Any) -> None:
    _log, cursor, positions = await filled(world, kit)
    cursor.acknowledge(positions[:3])
    assert cursor.ledger_id == -1
    world.clock.advance(world.config.cursor_flush_ms)
    await cursor._writes.writing
    assert cursor.ledger_id >= 0
    log, _ = await world.open()
    assert log.cursors["s"].mark_delete == positions[2]


async def test_what_is_wanted_soon_is_written_without_the_interval(world: Any, kit: Any) -> None:
    _log, cursor, positions = await filled(world, kit)
    cursor.acknowledge(positions[:2])
    cursor.save_soon()
    await asyncio.sleep(0)  # the first write has begun, with the state of now
    cursor.acknowledge([positions[2]])
    cursor.save_soon()
    await cursor._writes.writing
    log, _ = await world.open()
    assert log.cursors["s"].mark_delete == positions[2]


async def test_flushes_share_writes(world: Any, kit: Any) -> None:
    faults = kit.Faults()
    _log, cursor, positions = await filled(world, kit, faults=faults)
    cursor.acknowledge([positions[0]])
    await cursor.flush()
    await cursor.flush()
    before = len(faults.log)
    loop = asyncio.get_running_loop()
    flushes = []
    for position in positions[1:]:
        cursor.acknowledge([position])
        flushes.append(loop.create_task(cursor.flush()))
    await asyncio.gather(*flushes)
    assert faults.log[before:].count("add") <= 2


async def test_cursor_ledgers_roll_over(world: Any, kit: Any) -> None:
    config = ManagedLedgerConfig(max_entries_per_ledger=100, min_ledger_age_ms=0, max_entries_per_cursor_ledger=3)
    _log, cursor, positions = await filled(world, kit, config=config)
    seen = set()
    for position in positions:
        cursor.acknowledge([position])
        await cursor.flush()
        seen.add(cursor.ledger_id)
        assert (await record(world, kit)).cursors_ledger_id == cursor.ledger_id
    assert len(seen) == 4
    ids = [ledger_id async for ledger_id in world.ledgers.ledgers()]
    assert seen & set(ids) == {cursor.ledger_id}
    log, _ = await world.open()
    assert log.cursors["s"].mark_delete == positions[-1]


async def test_clean_close_puts_a_small_position_into_the_record(world: Any, kit: Any) -> None:
    log, cursor, positions = await filled(world, kit)
    cursor.acknowledge([positions[0], positions[2]])
    await cursor.flush()
    cursor.acknowledge([positions[4]])
    old = cursor.ledger_id
    await log.close()
    stored = await record(world, kit)
    assert stored.cursors_ledger_id == -1 and len(stored.position.ranges) == 2
    assert old not in [ledger_id async for ledger_id in world.ledgers.ledgers()]
    with pytest.raises(Closed):
        await cursor.flush()


async def test_clean_close_keeps_a_large_position_in_the_ledger(world: Any, kit: Any) -> None:
    config = ManagedLedgerConfig(max_ranges_in_record=2)
    log, cursor, positions = await filled(world, kit, config=config)
    cursor.acknowledge(positions[1::2])
    await log.close()
    stored = await record(world, kit)
    assert stored.cursors_ledger_id >= 0 and stored.position.ranges == ()
    log, _ = await world.open(config=config)
    assert await rest(log.cursors["s"]) == positions[::2]


async def test_persisted_ranges_are_bounded(world: Any, kit: Any) -> None:
    config = ManagedLedgerConfig(max_persisted_ranges=2)
    _log, cursor, positions = await filled(world, kit, config=config)
    cursor.acknowledge(positions[1::2])
    await cursor.flush()
    log, _ = await world.open(config=config)
    assert await rest(log.cursors["s"]) == [p for p in positions if p not in (positions[1], positions[3])]


async def test_an_empty_cursor_ledger_leaves_the_snapshot(world: Any, kit: Any) -> None:
    _log, cursor, positions = await filled(world, kit)
    cursor.acknowledge(positions[:2])
    await cursor.flush()
    handle = await world.handle()
    empty = await world.ledgers.create()
    found = await handle.get(f"/managed-ledgers/{kit.NAME}/s")
    text = found.value.replace(b'"cursorsLedgerId":%d' % cursor.ledger_id, b'"cursorsLedgerId":%d' % empty.ledger_id)
    await handle.put(found.key, text)
    log, _ = await world.open()
    assert log.cursors["s"].mark_delete == positions[1]


@pytest.mark.inv("INV2")
async def test_fenced_cursor_ledger_ends_the_log(world: Any, kit: Any) -> None:
    log, cursor, positions = await filled(world, kit)
    cursor.acknowledge([positions[0]])
    await cursor.flush()
    await world.ledgers.open(cursor.ledger_id, fence=True)
    cursor.acknowledge([positions[1]])
    with pytest.raises(LedgerFenced):
        await cursor.flush()
    assert log.is_fenced


@pytest.mark.inv("INV2")
async def test_a_deletion_that_finds_another_owner_ends_the_log(world: Any, kit: Any) -> None:
    """Found by simulation: the stale owner kept the topic and was asked for ever."""
    log, cursor, _positions = await filled(world, kit)
    await world.open()
    with pytest.raises(LedgerFenced):
        await cursor.delete()
    assert log.is_fenced


async def test_out_of_space_for_cursor_ledgers(world: Any, kit: Any) -> None:
    faults = kit.Faults()
    _log, cursor, positions = await filled(world, kit, faults=faults)
    cursor.acknowledge([positions[0]])
    faults.arm(1, after=False, error=LedgerStoreReadOnly("full"))
    await cursor.flush()
    assert (await record(world, kit)).position.mark_delete.entry_id == positions[0].entry_id
    assert cursor.ledger_id == -1
    cursor.acknowledge([positions[1]])
    await cursor.flush()
    assert cursor.ledger_id >= 0
    faults.arm(1, after=False, error=LedgerStoreReadOnly("full"))
    cursor.acknowledge([positions[2]])
    await cursor.flush()
    log, _ = await world.open()
    assert log.cursors["s"].mark_delete == positions[2]


async def test_failed_flush_is_told_and_repeated(world: Any, kit: Any) -> None:
    faults = kit.Faults()
    _log, cursor, positions = await filled(world, kit, faults=faults)
    cursor.acknowledge([positions[0]])
    faults.arm(3, after=False, error=StoreUnavailable("away"))  # create, add, then the record
    with pytest.raises(StoreUnavailable):
        await cursor.flush()
    world.clock.advance(world.config.cursor_flush_ms)
    await cursor._writes.writing
    log, _ = await world.open()
    assert log.cursors["s"].mark_delete == positions[0]


async def test_reset(world: Any, kit: Any) -> None:
    log, cursor, positions = await filled(world, kit)
    log.retention_minutes = log.retention_mb = -1
    cursor.acknowledge([*positions[:8], positions[9]])
    await cursor.reset(positions[3])
    assert await rest(cursor) == positions[3:]
    assert cursor.read_cached(1, 1) == []
    await cursor.reset(EARLIEST)
    assert await rest(cursor) == positions
    await cursor.reset(LATEST)
    assert cursor.mark_delete == log.last_position and await rest(cursor) == []
    await cursor.reset(positions[5], 0b10)
    assert cursor.unacked_mask(positions[5]) == 0b10
    log, _ = await world.open()
    cursor = log.cursors["s"]
    assert cursor.unacked_mask(positions[5]) == 0b10 and await rest(cursor) == positions[5:]
    await cursor.reset(Position(positions[0].ledger_id, 77))
    assert await rest(cursor) == positions[5:]


async def test_initial_positions(world: Any, kit: Any) -> None:
    log, listener = await world.open()
    early = await log.open_cursor("early", initial="earliest")
    late = await log.open_cursor("late", initial="latest")
    assert early.mark_delete == late.mark_delete == EARLIEST
    await kit.fill(log, listener, range(3))
    first = log.first_position
    assert early.mark_delete == late.mark_delete == Position(first.ledger_id, -1)
    now = await log.open_cursor("now", initial="latest", properties={"k": "v"})
    assert now.mark_delete == log.last_position and now.backlog() == 0
    at = await log.open_cursor("at", initial=Position(first.ledger_id, 1))
    assert at.mark_delete == first and at.backlog() == 2
    assert await log.open_cursor("now", initial="earliest") is now
    reader = log.non_durable_cursor("r", Position(first.ledger_id, 2))
    assert reader.backlog() == 1 and not reader.is_durable
    assert log.non_durable_cursor("r2", LATEST).backlog() == 0
    with pytest.raises(AlreadyExists):
        log.non_durable_cursor("r", first)
    with pytest.raises(AlreadyExists):
        await log.open_cursor("r", initial="earliest")
    with pytest.raises(InvalidArgument):
        await reader.set_properties({"a": "b"})
    await reader.flush()
    log, _ = await world.open()
    assert set(log.cursors) == {"early", "late", "now", "at"}
    assert log.cursors["now"].properties == {"k": "v"}
    assert log.cursors["early"].backlog() == 3


async def test_properties_are_apart_from_internal_ones(world: Any, kit: Any) -> None:
    log, cursor, _positions = await filled(world, kit)
    await cursor.set_properties({"a": "1", "b": "2"})
    assert await cursor.set_properties({"a": None}) == {"b": "2"}
    await log.close()
    log, _ = await world.open()
    assert log.cursors["s"].properties == {"b": "2"}
    assert (await record(world, kit)).internal_properties == {}


async def test_deleted_cursor_is_gone_with_its_ledger(world: Any, kit: Any) -> None:
    log, cursor, positions = await filled(world, kit)
    cursor.acknowledge([positions[0]])
    await cursor.flush()
    ledger = cursor.ledger_id
    await log.delete_cursor("s")
    assert ledger not in [ledger_id async for ledger_id in world.ledgers.ledgers()]
    log, _ = await world.open()
    assert not log.cursors
    again = await log.open_cursor("s", initial="earliest")
    assert again.mark_delete.entry_id == -1


async def test_names_with_any_characters(world: Any, kit: Any) -> None:
    log, _listener = await world.open()
    for name in ("a/b", "ü%2F", "x y"):
        await log.open_cursor(name, initial="latest")
    log, _listener = await world.open()
    assert set(log.cursors) == {"a/b", "ü%2F", "x y"}


async def test_rewind_during_a_read_wins(world: Any, kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    log, cursor, positions = await filled(world, kit)
    gate = asyncio.Event()
    read = type(log).read

    async def slow(*arguments: Any) -> Any:
        found = await read(*arguments)
        await gate.wait()
        return found

    monkeypatch.setattr(type(log), "read", slow)
    cursor.read_position = positions[8]
    reading = asyncio.get_running_loop().create_task(cursor.read(100, 1 << 20))
    await asyncio.sleep(0)
    cursor.rewind()
    gate.set()
    entries = await reading
    assert Position(entries[0].ledger_id, entries[0].entry_id) == positions[0]
