"""A log's life on the memory backends: order, index, rollover, fencing, trimming, terminating, reading."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from braid.errors import (
    Closed,
    LedgerClosed,
    LedgerFenced,
    LedgerStoreReadOnly,
    StorageUnavailable,
    StoreMismatch,
    SubscriptionNotFound,
    TopicNotFound,
    TopicTerminated,
)
from braid.managedledger.cache import EntryCache
from braid.managedledger.config import ManagedLedgerConfig
from braid.managedledger.records import LogRecord, decode_record
from braid.managedledger.retention import Limits
from braid.model.positions import EARLIEST, LATEST, Position
from braid.model.retention import RetentionPolicies


async def stored(world: Any, kit: Any) -> LogRecord:
    handle = await world.handle()
    found = await handle.get(f"/managed-ledgers/{kit.NAME}")
    return decode_record(LogRecord, found.key, found.value)


async def ledger_ids(world: Any) -> list[int]:
    return [ledger_id async for ledger_id in world.ledgers.ledgers()]


async def test_opening_creates_no_ledger_and_the_first_entry_is_0(world: Any, kit: Any) -> None:
    log, listener = await world.open()
    assert await ledger_ids(world) == []
    assert log.last_position == EARLIEST
    await kit.fill(log, listener, range(3))
    first = listener.added[0][0]
    assert [(entry.entry_id, entry.index) for entry, _ in listener.added] == [(0, 0), (1, 1), (2, 2)]
    assert log.first_position == Position(first.ledger_id, 0)
    assert log.last_position == Position(first.ledger_id, 2)


async def test_missing_log_is_not_created_by_accident(world: Any, kit: Any) -> None:
    with pytest.raises(TopicNotFound):
        await world.open(create=False)
    factory = world.factory()
    assert not await factory.exists(kit.NAME)
    with pytest.raises(TopicNotFound):
        await factory.delete(kit.NAME)


async def test_order_and_index_across_rollover_and_restart(world: Any, kit: Any) -> None:
    counts = [1, 3, 2, 7, 1, 1, 5, 2, 9, 1, 4, 1, 1]
    log, listener = await world.open()
    await log.open_cursor("keep", initial="earliest")
    await kit.fill(log, listener, range(7), counts.__getitem__)
    await log.close()
    log, listener = await world.open(create=False)
    assert log.owner_epoch == 2
    await kit.fill(log, listener, range(7, len(counts)), counts.__getitem__)
    found = await kit.everything(log)
    assert [kit.number_of(entry) for entry in found] == list(range(len(counts)))
    assert [entry.messages for entry in found] == counts
    assert [entry.index for entry in found] == [sum(counts[: i + 1]) - 1 for i in range(len(counts))]
    assert [info.ledger_id for info in log.infos] == sorted({entry.ledger_id for entry in found})
    for info in log.infos:
        assert [entry.entry_id for entry in found if entry.ledger_id == info.ledger_id] == list(
            range(log.map.count(info.ledger_id))
        )


async def test_adds_made_while_ledgers_change_keep_their_order(world: Any, kit: Any) -> None:
    log, listener = await world.open()
    await log.open_cursor("keep", initial="earliest")
    for number in range(40):
        log.add(kit.body_of(number), 1, number)
        if number % 7 == 0:
            await asyncio.sleep(0)
    assert log.pending_entries == 40 - len(listener.added)
    await listener.until(40)
    assert listener.contexts == list(range(40))
    assert log.pending_bytes == log.pending_entries == 0
    assert len(log.infos) == 8
    assert log.total_entries == 40


async def test_append_time_never_goes_back(world: Any, kit: Any) -> None:
    log, listener = await world.open()
    await kit.fill(log, listener, range(1))
    first = listener.added[0][0].append_ms
    world.clock.ms -= 5000
    await kit.fill(log, listener, range(1, 2))
    await log.close()
    log, listener = await world.open()
    await kit.fill(log, listener, range(2, 3))
    assert [entry.append_ms for entry in await kit.everything(log)] == [first] * 3


async def test_rollover_by_size_and_age(world: Any, kit: Any) -> None:
    size = len(kit.body_of(0, size=1000))
    log, listener = await world.open(
        config=ManagedLedgerConfig(max_ledger_bytes=size * 2, min_ledger_age_ms=0, max_ledger_age_ms=10_000)
    )
    await log.open_cursor("keep", initial="earliest")
    for number in range(4):
        log.add(kit.body_of(number, size=1000), 1, number)
    await listener.until(4)
    assert [entry.entry_id for entry, _ in listener.added] == [0, 1, 0, 1]
    await kit.fill(log, listener, range(4, 5))
    log.roll_if_needed()
    world.clock.advance(10_000)
    log.roll_if_needed()
    await kit.fill(log, listener, range(5, 6))
    assert [entry.entry_id for entry, _ in listener.added[4:]] == [0, 0]


async def test_full_ledger_is_kept_until_its_minimum_age(world: Any, kit: Any) -> None:
    log, listener = await world.open(config=ManagedLedgerConfig(max_entries_per_ledger=2, min_ledger_age_ms=1000))
    await kit.fill(log, listener, range(4))
    assert len(log.infos) == 1
    world.clock.advance(1000)
    await kit.fill(log, listener, range(4, 6))
    assert [entry.entry_id for entry, _ in listener.added] == [0, 1, 2, 3, 4, 0]


async def test_crash_leaves_the_end_to_be_recovered(world: Any, kit: Any) -> None:
    _log, listener = await world.open()
    await kit.fill(_log, listener, range(3))
    properties = {"where": "here"}
    handle = await world.handle()
    found = await handle.get(f"/managed-ledgers/{kit.NAME}")
    record = decode_record(LogRecord, found.key, found.value)
    assert record.ledgers[0].timestamp == 0
    stamped = msgspec.structs.replace(record, ledgers=(msgspec.structs.replace(record.ledgers[0], properties=properties),))
    await handle.put(found.key, msgspec.json.encode(stamped))
    log, _listener = await world.open()
    info = (await stored(world, kit)).ledgers[0]
    assert (info.entries, info.properties, info.last_index) == (3, properties, 2)
    assert info.size == sum(len(kit.body_of(n)) for n in range(3)) + 3 * (info.size // 3 - len(kit.body_of(0)))
    assert log.last_index == 2


@pytest.mark.inv("INV2")
async def test_stale_owner_is_refused_everywhere(world: Any, kit: Any) -> None:
    old, heard = await world.open()
    cursor = await old.open_cursor("s", initial="earliest")
    written = await old.open_cursor("written", initial="earliest")
    await kit.fill(old, heard, range(3))
    written.acknowledge([old.first_position])
    await written.flush()
    new, listener = await world.open()
    written.acknowledge([old.last_position])
    with pytest.raises(LedgerFenced):
        await written.flush()
    assert new.cursors["written"].backlog() == 2
    with pytest.raises(LedgerFenced):
        old.add(kit.body_of(9), 1, 9)
    cursor.acknowledge([Position(*new.first_position)])
    with pytest.raises(LedgerFenced):
        await cursor.flush()
    for call in (
        old.set_properties({"a": "b"}),
        old.terminate(),
        old.open_cursor("late", initial="earliest"),
        old.trim(),
        old.delete_cursor("s"),
        cursor.set_properties({"a": "b"}),
    ):
        with pytest.raises(LedgerFenced):
            await call
    assert old.is_fenced and old.state == "Fenced"
    assert any(isinstance(error, LedgerFenced) for error, _contexts in heard.failed)
    assert set(new.cursors) == {"s", "written"} and new.cursors["s"].backlog() == 3
    await kit.fill(new, listener, range(3, 5))
    assert [kit.number_of(entry) for entry in await kit.everything(new)] == [0, 1, 2, 3, 4]


@pytest.mark.inv("INV2")
async def test_stale_owner_without_a_ledger_is_refused_too(world: Any, kit: Any) -> None:
    """No ledger to fence: the record alone must stop it, for entries, cursor positions, properties and new cursors."""
    old, heard = await world.open()
    cursor = await old.open_cursor("s", initial="earliest")
    new, listener = await world.open()
    old.add(kit.body_of(9), 1, 9)
    await heard.until(1)
    assert heard.failed_contexts == [9] and isinstance(heard.failed[0][0], LedgerFenced)
    await kit.fill(new, listener, range(2))
    assert await ledger_ids(world) == [new.last_position.ledger_id]

    with pytest.raises(LedgerFenced):
        await old.open_cursor("late", initial="earliest")
    quiet = "t/ns/persistent/quiet"
    old, _ = await world.open(quiet)
    await world.open(quiet)
    with pytest.raises(LedgerFenced):
        await old.open_cursor("late", initial="earliest")
    handle = await world.handle()
    assert await handle.get(f"/managed-ledgers/{quiet}/late") is None
    with pytest.raises(LedgerFenced):
        await cursor.set_properties({"a": "b"})


@pytest.mark.inv("INV2")
async def test_stale_roll_is_refused(world: Any, kit: Any) -> None:
    old, heard = await world.open()
    await kit.fill(old, heard, range(4))
    new, _ = await world.open()
    before = await ledger_ids(world)
    with pytest.raises(LedgerFenced):
        old.add(kit.body_of(4), 1, 4)
    await old.close()
    assert await ledger_ids(world) == before
    assert new.total_entries == 4


@pytest.mark.inv("INV2")
async def test_loss_seen_at_the_record_fails_what_is_in_flight_once(world: Any, kit: Any) -> None:
    log, listener = await world.open()
    await kit.fill(log, listener, range(2))
    handle = await world.handle()
    found = await handle.get(f"/managed-ledgers/{kit.NAME}")
    await handle.put(found.key, found.value)
    tail = log.tail
    tail.append = lambda _head, _body: 2  # on its way, not confirmed yet
    log.add(kit.body_of(2), 1, 2)
    with pytest.raises(LedgerFenced):
        await log.set_properties({"a": "b"})
    tail.ledger_advanced(2)
    assert listener.contexts == [0, 1] and listener.failed_contexts == [2]
    assert log.pending_bytes == log.pending_entries == 0


async def test_deleting_a_log_with_adds_in_flight(world: Any, kit: Any) -> None:
    log, listener = await world.open()
    await kit.fill(log, listener, range(2))
    for number in range(2, 9):
        log.add(kit.body_of(number), 1, number)
    await log.delete()
    await world.ledgers.confirmed()
    assert sorted([*listener.contexts, *listener.failed_contexts]) == list(range(9))
    with pytest.raises(LedgerFenced):
        log.add(kit.body_of(9), 1, 9)
    assert await ledger_ids(world) == []


async def test_nothing_is_trimmed_before_every_cursor_is_known(world: Any, kit: Any) -> None:
    """A cursor whose restored position moves into another ledger asks for a trim; a slower one may not be loaded yet."""
    log, listener = await world.open()
    await log.open_cursor("a", initial="earliest")
    await log.open_cursor("b", initial="earliest")
    await kit.fill(log, listener, range(12))
    ids = [info.ledger_id for info in log.infos]
    await log.close()
    handle = await world.handle()
    found = await handle.get(f"/managed-ledgers/{kit.NAME}/a")
    record = msgspec.json.decode(found.value)
    record["position"]["markDelete"] = {"ledgerId": ids[0], "entryId": 4}
    record["position"]["ranges"] = [[ids[1], 0, 4]]
    await handle.put(found.key, msgspec.json.encode(record))
    log, _listener = await world.open()
    assert log.cursors["a"].mark_delete == Position(ids[1], 4)
    if log._trimming is not None:
        await asyncio.wait([log._trimming])
    assert [info.ledger_id for info in log.infos] == ids
    assert log.cursors["b"].backlog() == 12


async def test_reading_goes_on_behind_a_trimmed_ledger(world: Any, kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    log, listener = await world.open()
    cursor = await log.open_cursor("s", initial="earliest")
    await kit.fill(log, listener, range(7))
    read = log._reader.read

    async def late(*bounds: Any) -> Any:
        cursor.acknowledge_cumulative(log.last_position)
        await log.trim()
        return await read(*bounds)

    monkeypatch.setattr(type(log._reader), "read", lambda _self, *bounds: late(*bounds))
    assert [kit.number_of(entry) for entry in await log.read(EARLIEST, 10, 1 << 20)] == [5, 6]


class Lowering:
    """A resolver whose active store can be swapped for one whose ids start low."""

    def __init__(self, store: Any) -> None:
        self.now = store
        self.first = store

    def active(self) -> Any:
        return self.now

    def for_ledger(self, ledger_id: int, properties: Any) -> Any:
        return self.now if ledger_id < 5 else self.first


@pytest.mark.inv("INV3")
async def test_lower_ledger_id_is_deleted_and_refused(world: Any, kit: Any) -> None:
    for _ in range(10):
        await (await world.ledgers.create()).close()
    resolver = Lowering(world.ledgers)
    log, listener = await world.open(resolver=resolver)
    await log.open_cursor("keep", initial="earliest")
    await kit.fill(log, listener, range(5))
    other = await kit.memory_ledgers.open_store(world.runtime)
    resolver.now = other
    log.add(kit.body_of(5), 1, 5)
    await listener.until(6)
    assert listener.failed_contexts == [5]
    assert isinstance(listener.failed[0][0], StorageUnavailable)
    assert [ledger_id async for ledger_id in other.ledgers()] == []
    resolver.now = world.ledgers
    await kit.fill(log, listener, range(5, 7))
    assert [entry.index for entry in await kit.everything(log)] == list(range(7))


async def test_out_of_space_fails_what_waits_and_recovers(world: Any, kit: Any) -> None:
    faults = kit.Faults()
    log, listener = await world.open(faults=faults)
    await log.open_cursor("keep", initial="earliest")
    await kit.fill(log, listener, range(2))
    log.add(kit.body_of(2), 1, 2)
    log.tail.ledger_failed(LedgerStoreReadOnly("full"))
    assert listener.failed_contexts == [2]
    assert log.pending_bytes == 0
    faults.arm(1, after=False, error=LedgerStoreReadOnly("still full"))
    log.add(kit.body_of(3), 1, 3)
    await listener.until(4)
    assert listener.failed_contexts == [2, 3]
    await kit.fill(log, listener, range(4, 6))
    assert not log.is_fenced


async def test_refused_append_consumes_no_index(world: Any, kit: Any) -> None:
    faults = kit.Faults()
    log, listener = await world.open(faults=faults)
    await log.open_cursor("keep", initial="earliest")
    await kit.fill(log, listener, range(2))
    faults.arm(1, after=False, error=LedgerStoreReadOnly("full"))
    with pytest.raises(StorageUnavailable):
        log.add(kit.body_of(2), 5, 2)
    await kit.fill(log, listener, range(3, 5))
    assert [(kit.number_of(entry), entry.index) for entry in await kit.everything(log)] == [(0, 0), (1, 1), (3, 2), (4, 3)]


async def test_failed_writer_is_settled_and_the_rest_appended_again(world: Any, kit: Any) -> None:
    """An error that says nothing about the unconfirmed entries: what survived is confirmed, the rest goes on, in order."""
    log, listener = await world.open()
    await log.open_cursor("keep", initial="earliest")
    await kit.fill(log, listener, range(2))
    log.add(kit.body_of(2), 1, 2)
    log.tail.ledger_failed(LedgerClosed("broken link"))
    log.add(kit.body_of(3), 1, 3)
    await listener.until(4)
    assert listener.contexts == [0, 1, 2, 3]
    found = await kit.everything(log)
    assert [(kit.number_of(entry), entry.index) for entry in found] == [(0, 0), (1, 1), (2, 2), (3, 3)]


async def test_entries_lost_with_their_ledger_are_appended_again(world: Any, kit: Any) -> None:
    log, listener = await world.open()
    await log.open_cursor("keep", initial="earliest")
    await kit.fill(log, listener, range(2))
    lost = iter(range(2, 4))
    log.tail.append = lambda _head, _body: next(lost)  # accepted by a writer that never gets them out
    for number in (2, 3):
        log.add(kit.body_of(number, 2), 2, number)
    log.tail.ledger_failed(LedgerClosed("broken link"))
    log.add(kit.body_of(4), 1, 4)
    await listener.until(5)
    assert listener.contexts == [0, 1, 2, 3, 4] and log.pending_bytes == 0
    found = await kit.everything(log)
    assert [(kit.number_of(entry), entry.index) for entry in found] == [(0, 0), (1, 1), (2, 3), (3, 5), (4, 6)]


async def test_queue_is_bounded(world: Any, kit: Any) -> None:
    log, listener = await world.open(config=ManagedLedgerConfig(max_queued_entries=3))
    for number in range(3):
        log.add(kit.body_of(number), 1, number)
    with pytest.raises(StorageUnavailable):
        log.add(kit.body_of(3), 1, 3)
    await listener.until(3)
    await kit.fill(log, listener, range(3, 5))
    log, listener = await world.open("t/ns/persistent/other", config=ManagedLedgerConfig(max_queued_bytes=10))
    log.add(kit.body_of(0), 1, 0)
    with pytest.raises(StorageUnavailable):
        log.add(kit.body_of(1), 1, 1)


async def test_terminate_is_durable_and_refuses_at_once(world: Any, kit: Any) -> None:
    log, listener = await world.open()
    await log.open_cursor("keep", initial="earliest")
    for number in range(7):
        log.add(kit.body_of(number), 1, number)
    ending = asyncio.get_running_loop().create_task(log.terminate())
    await asyncio.sleep(0)
    with pytest.raises(TopicTerminated):
        log.add(kit.body_of(7), 1, 7)
    end = await ending
    assert listener.contexts == list(range(7))
    assert log.is_terminated and log.terminated_position == end == log.last_position
    assert await log.terminate() == end
    await log.close()
    log, listener = await world.open()
    assert log.is_terminated and log.terminated_position == end and log.state == "Terminated"
    with pytest.raises(TopicTerminated):
        log.add(kit.body_of(7), 1, 7)
    assert len(await kit.everything(log)) == 7


async def test_failed_terminate_can_be_repeated(world: Any, kit: Any) -> None:
    faults = kit.Faults()
    log, listener = await world.open(faults=faults)
    await kit.fill(log, listener, range(2))
    faults.arm(2, after=False, error=kit.StoreUnavailable("away"))
    with pytest.raises((StorageUnavailable, kit.StoreUnavailable)):
        await log.terminate()
    assert not log.is_terminated
    await kit.fill(log, listener, range(2, 3))
    assert await log.terminate() == log.last_position


async def test_terminating_an_empty_log(world: Any, kit: Any) -> None:
    log, _listener = await world.open()
    assert await log.terminate() == EARLIEST
    assert log.is_terminated
    with pytest.raises(TopicTerminated):
        log.add(kit.body_of(0), 1, 0)


async def test_closed_log_refuses(world: Any, kit: Any) -> None:
    log, listener = await world.open()
    for number in range(7):
        log.add(kit.body_of(number), 1, number)
    await log.close()
    assert listener.contexts == list(range(7))
    with pytest.raises(Closed):
        log.add(kit.body_of(7), 1, 7)
    with pytest.raises(Closed):
        await log.read(EARLIEST, 1, 1)
    assert [info.timestamp > 0 for info in (await stored(world, kit)).ledgers] == [True] * 2


async def test_trim_follows_the_slowest_durable_cursor(world: Any, kit: Any) -> None:
    log, listener = await world.open()
    slow = await log.open_cursor("slow", initial="earliest")
    fast = await log.open_cursor("fast", initial="earliest")
    log.non_durable_cursor("reader", EARLIEST)
    await kit.fill(log, listener, range(22))
    ids = [info.ledger_id for info in log.infos]
    assert len(ids) == 5
    fast.acknowledge_cumulative(log.last_position)
    assert await log.trim() == 0
    slow.acknowledge_cumulative(Position(ids[1], 3))
    await log.trim()
    assert [info.ledger_id for info in log.infos] == ids[1:]
    slow.acknowledge([Position(ids[1], 4)])  # the last entry of its ledger
    await log.trim()
    assert [info.ledger_id for info in log.infos] == ids[2:]
    assert log.first_position == Position(ids[2], 0)
    slow.acknowledge_cumulative(log.last_position)
    await log.trim()
    assert [info.ledger_id for info in log.infos] == ids[4:]
    assert set(ids[:4]).isdisjoint(await ledger_ids(world))
    assert log.total_entries == 2
    assert [kit.number_of(entry) for entry in await kit.everything(log)] == [20, 21]


async def test_trim_happens_by_itself(world: Any, kit: Any) -> None:
    log, listener = await world.open()
    cursor = await log.open_cursor("s", initial="earliest")
    await kit.fill(log, listener, range(11))
    ids = [info.ledger_id for info in log.infos]
    cursor.acknowledge([Position(entry.ledger_id, entry.entry_id) for entry, _ in listener.added[:6]])
    await asyncio.wait([log._trimming])
    assert [info.ledger_id for info in log.infos] == ids[1:]
    await log.delete_cursor("s")
    await asyncio.wait([log._trimming])
    assert [info.ledger_id for info in log.infos] == ids[2:]


@pytest.mark.parametrize(("minutes", "megabytes", "left"), [(0, 0, 1), (-1, -1, 3), (10, -1, 2), (-1, 0, 1), (10, 1, 2)])
async def test_retention_keeps_acknowledged_ledgers(world: Any, kit: Any, minutes: int, megabytes: int, left: int) -> None:
    log, listener = await world.open()
    cursor = await log.open_cursor("s", initial="earliest")
    log.retention_minutes, log.retention_mb = minutes, megabytes
    await kit.fill(log, listener, range(5))
    await kit.fill(log, listener, range(5, 6))
    world.clock.advance(11 * 60_000)
    await kit.fill(log, listener, range(6, 11))
    cursor.acknowledge_cumulative(log.last_position)
    await log.trim()
    assert len(log.infos) == left


async def test_numbering_survives_when_every_entry_is_gone(world: Any, kit: Any) -> None:
    log, listener = await world.open()
    await kit.fill(log, listener, range(5))  # the ledger is full and closed
    handle = await world.handle()
    await log.close()
    found = await handle.get(f"/managed-ledgers/{kit.NAME}")
    record = decode_record(LogRecord, found.key, found.value)
    assert record.last_ledger_id == record.ledgers[-1].ledger_id
    await handle.put(found.key, msgspec.json.encode(msgspec.structs.replace(record, ledgers=())))
    log, listener = await world.open()
    await kit.fill(log, listener, range(5, 6))
    entry = listener.added[0][0]
    assert entry.index == 5 and entry.entry_id == 0
    assert entry.ledger_id > record.ledgers[-1].ledger_id


async def test_find_time_equals_a_linear_search(world: Any, kit: Any) -> None:
    log, listener = await world.open()
    await log.open_cursor("keep", initial="earliest")
    start = world.clock.ms
    for number in range(23):
        await kit.fill(log, listener, range(number, number + 1))
        world.clock.advance([0, 0, 3, 1, 0, 7][number % 6])
    for reopened in (False, True):
        if reopened:
            await log.close()
            log, listener = await world.open()
        entries = await kit.everything(log)
        for ms in range(start - 2, world.clock.ms + 3):
            wanted = next((Position(e.ledger_id, e.entry_id) for e in entries if e.append_ms >= ms), log.clamp(LATEST))
            assert await log.find_time(ms) == wanted


async def test_reading_is_bounded_and_starts_at_the_next_position(world: Any, kit: Any) -> None:
    log, listener = await world.open()
    await log.open_cursor("keep", initial="earliest")
    await kit.fill(log, listener, range(12))
    ids = [info.ledger_id for info in log.infos]
    assert [e.entry_id for e in await log.read(Position(ids[0], 1), 3, 1 << 20)] == [1, 2, 3]
    assert [e.ledger_id for e in await log.read(Position(ids[0], 5), 1, 1 << 20)] == [ids[1]]
    assert len(await log.read(EARLIEST, 100, 1)) == 1
    assert await log.read(LATEST, 1, 1) == []
    assert log.read_cached(LATEST, 1, 1) == []
    assert log.position_after(Position(ids[0], 4)) == Position(ids[1], 0)
    assert log.position_before(Position(ids[1], 0)) == Position(ids[0], 4)
    assert log.position_before(log.first_position) == Position(ids[0], -1)
    cached = log.read_cached(Position(ids[0], 3), 100, 1 << 20)
    assert cached == (await kit.everything(log))[3:]


async def test_a_record_that_cannot_be_read_does_not_hide_the_others(world: Any, kit: Any) -> None:
    for name in ("a", "b", "c"):
        await world.open(f"t/ns/persistent/{name}")
    store = await world.handle()
    await store.put("/managed-ledgers/t/ns/persistent/b", b"nonsense")
    assert [name async for name in world.factory().names("t/ns/persistent")] == ["a", "b", "c"]


async def test_delete_and_create_again_is_another_log(world: Any, kit: Any) -> None:
    log, listener = await world.open()
    cursor = await log.open_cursor("s", initial="earliest")
    await kit.fill(log, listener, range(7))
    cursor.acknowledge_cumulative(log.first_position)
    await cursor.flush()
    first = log.incarnation
    await log.close()
    factory = world.factory()
    assert [name async for name in factory.names("t/ns/persistent")] == ["topic"]
    await factory.delete(kit.NAME)
    assert await ledger_ids(world) == []
    assert not await factory.exists(kit.NAME)
    log, listener = await world.open()
    assert log.incarnation != first and not log.cursors
    await kit.fill(log, listener, range(1))
    await log.delete()
    assert await ledger_ids(world) == []
    assert not await factory.exists(kit.NAME)


@pytest.mark.inv("INV5")
async def test_cursor_of_an_earlier_log_never_matches(world: Any, kit: Any) -> None:
    log, _listener = await world.open()
    await log.open_cursor("s", initial="earliest")
    handle = await world.handle()
    left_over = await handle.get(f"/managed-ledgers/{kit.NAME}/s")
    await log.delete()
    await handle.put(left_over.key, left_over.value)
    log, _listener = await world.open()
    assert not log.cursors
    assert await handle.get(left_over.key) is None


async def test_properties_are_durable(world: Any, kit: Any) -> None:
    log, _listener = await world.open()
    await log.set_properties({"a": "1", "b": "2"})
    assert await log.set_properties({"a": None, "c": "3"}) == {"b": "2", "c": "3"}
    await log.close()
    log, _listener = await world.open()
    assert log.properties == {"b": "2", "c": "3"}


async def test_a_policy_is_durable_and_wins_over_limits(world: Any, kit: Any) -> None:
    log, _listener = await world.open()
    log.limits = Limits(5, -1, 10)
    assert log.limits == (5, -1, 10)
    await log.set_policy(RetentionPolicies(retention_time_in_minutes=-1, retention_size_in_mb=7))
    await log.close()
    log, _listener = await world.open()
    log.limits = Limits(5, -1, 10)
    assert log.limits == (-1, 7, 0), "also over the rule for messages that nobody has read"
    await log.set_policy(None)
    assert log.limits == (5, -1, 10)


@pytest.mark.inv("INV2")
async def test_a_former_owner_sets_no_policy(world: Any, kit: Any) -> None:
    log, _listener = await world.open()
    later, _listener = await world.open()
    with pytest.raises(LedgerFenced):
        await log.set_policy(RetentionPolicies())
    assert (log.policy, later.policy) == (None, None)


async def test_newer_format_is_refused(world: Any, kit: Any) -> None:
    log, _listener = await world.open()
    await log.close()
    handle = await world.handle()
    found = await handle.get(f"/managed-ledgers/{kit.NAME}")
    await handle.put(found.key, found.value.replace(b'"formatVersion":1', b'"formatVersion":99'))
    with pytest.raises(StoreMismatch, match="99"):
        await world.open()
    await handle.put(found.key, b"{}")
    with pytest.raises(StoreMismatch):
        await world.open()


async def test_unknown_cursor(world: Any) -> None:
    log, _listener = await world.open()
    with pytest.raises(SubscriptionNotFound):
        await log.delete_cursor("nobody")


async def test_cache_is_bounded_over_all_logs(world: Any, kit: Any) -> None:
    cache = EntryCache(20_000)
    logs = []
    for number in range(4):
        log, listener = await world.open(f"t/ns/persistent/{number}", cache=cache, config=ManagedLedgerConfig())
        await log.open_cursor("s", initial="earliest")
        logs.append((log, listener))
    for turn in range(10):
        for log, listener in logs:
            log.add(kit.body_of(turn, size=500), 1, turn)
            await listener.until(turn + 1)
            assert cache.size <= cache.max_bytes
    for log, _listener in logs:
        newest = log.read_cached(log.last_position, 1, 1)
        assert newest is None or kit.number_of(newest[0]) == 9
        assert len(await kit.everything(log)) == 10
    assert cache.size > 0
    for log, _listener in logs:
        await log.close()
    assert cache.size == 0


async def test_log_without_cursors_is_not_cached(world: Any, kit: Any) -> None:
    cache = EntryCache(1 << 20)
    log, listener = await world.open(cache=cache)
    await kit.fill(log, listener, range(3))
    assert cache.size == 0
    reader = log.non_durable_cursor("r", log.first_position)
    assert reader.read_cached(10, 1 << 20) is None
    await kit.fill(log, listener, range(3, 4))
    assert cache.size > 0
    assert reader.read_cached(10, 1 << 20) is None
    assert len(await reader.read(10, 1 << 20)) == 4
    assert reader.read_cached(10, 1 << 20) == []
    log.drop_non_durable(reader)
    await kit.fill(log, listener, range(4, 5))
    assert cache.size == 0


async def test_internal_stats(world: Any, kit: Any) -> None:
    log, listener = await world.open()
    await log.open_cursor("s", initial="earliest")
    await kit.fill(log, listener, range(6))
    stats = msgspec.to_builtins(log.internal_stats())
    assert stats["state"] == "LedgerOpened"
    assert stats["numberOfEntries"] == stats["entriesAddedCounter"] == 6
    assert [ledger["entries"] for ledger in stats["ledgers"]] == [5, 1]
    assert stats["totalSize"] == sum(ledger["size"] for ledger in stats["ledgers"])
    assert stats["lastConfirmedEntry"] == str(log.last_position)
    assert stats["cursors"]["s"]["numberOfEntriesSinceFirstNotAckedMessage"] == 6
