"""A full or failing disk: out of space is refused and heals by itself, an I/O error stops the store for good."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from braid.errors import LedgerError, LedgerStoreFailed, LedgerStoreReadOnly
from braid.ledger.backends.local import LocalLedgerStore, LocalSettings, open_store
from braid.runtime.env import Runtime
from braid.runtime.threads import InlineThreads
from braid.testing.clock import ManualClock
from braid.testing.conformance.ledger import RecordingListener, read_all
from braid.testing.files import ForgetfulFiles, Operation

PATH = Path("/data")
SETTINGS = LocalSettings(reserve_bytes=1000, tail_bytes=100, segment_bytes=100_000)


class World:
    """A store on a simulated disk with a clock moved by hand."""

    def __init__(self, capacity: int = 1 << 40) -> None:
        self.disk = ForgetfulFiles(Random(4), capacity=capacity)
        self.clock = ManualClock()
        self.fatal: list[BaseException] = []

    async def open(self, settings: LocalSettings = SETTINGS) -> LocalLedgerStore:
        runtime = replace(Runtime(), files=self.disk, threads=InlineThreads(), random=Random(2), clock=self.clock)
        return await open_store(runtime, path=PATH, settings=settings, on_fatal=self.fatal.append)


@pytest.mark.parametrize("operation", ["append", "sync"])
async def test_out_of_space_rolls_the_group_back_and_heals(operation: Operation) -> None:
    world = World()
    store = await world.open()
    first, second = RecordingListener(), RecordingListener()
    writer = await store.create(listener=first)
    idle = await store.create(listener=second)
    await writer.add(b"kept")
    world.disk.fail(operation, "journal-", errno.ENOSPC)
    writer.append(b"", b"lost" * 100)
    assert isinstance(await first.failed(), LedgerStoreReadOnly)
    assert first.last == 0
    assert store.is_read_only
    for act in (store.create(), writer.add(b"x")):
        with pytest.raises(LedgerStoreReadOnly):
            await act
    with pytest.raises(LedgerStoreReadOnly):
        idle.append(b"", b"x")
    reader = await store.open(writer.ledger_id, fence=False)
    assert await read_all(reader) == [b"kept"]
    await world.clock.advance(1.1)
    assert not store.is_read_only
    assert await idle.add(b"works again") == 0
    assert not second.failures
    with pytest.raises(LedgerStoreReadOnly):
        writer.append(b"", b"this writer is done")
    reader = await store.open(writer.ledger_id, fence=True)
    assert await read_all(reader) == [b"kept"]
    world.disk = world.disk.power_cut()
    store = await world.open()
    assert await read_all(await store.open(writer.ledger_id, fence=True)) == [b"kept"], "a refused entry came back"
    assert await read_all(await store.open(idle.ledger_id, fence=True)) == [b"works again"]
    assert not world.fatal
    await store.close()


async def test_the_reserve_is_kept_and_a_given_id_is_free_again() -> None:
    world = World(capacity=300_000)
    store = await world.open(LocalSettings(reserve_bytes=100_000))
    listener = RecordingListener()
    writer = await store.create(listener=listener)
    pushed = 0
    while not listener.failures:
        writer.append(b"", b"x" * 5000)
        await listener.confirmed(pushed)
        pushed += 1
    confirmed = listener.last
    assert confirmed > 10
    assert store.is_read_only
    with pytest.raises(LedgerStoreReadOnly):
        await store.create(ledger_id=77)
    used_by_checkpoint = sum(world.disk.open(path).size() for path in world.disk.paths() if path.suffix != ".log")
    assert world.disk.free_bytes(PATH) + used_by_checkpoint >= 100_000, "the journal ate the reserve"
    world.disk.capacity = 1 << 30
    await world.clock.advance(1.1)
    assert not store.is_read_only
    assert (await store.create(ledger_id=77)).ledger_id == 77
    assert len(await read_all(await store.open(writer.ledger_id, fence=True))) == confirmed + 1
    await store.close()


async def test_a_create_that_failed_for_space_leaves_no_ledger() -> None:
    world = World()
    store = await world.open()
    world.disk.fail("sync", "journal-", errno.ENOSPC)
    with pytest.raises(LedgerStoreReadOnly):
        await store.create(ledger_id=9)
    await world.clock.advance(1.1)
    assert [i async for i in store.ledgers()] == []
    assert (await store.create(ledger_id=9)).ledger_id == 9
    await store.close()


@pytest.mark.parametrize(
    ("operation", "name"), [("append", ".ledger"), ("append", "snapshot"), ("sync", "snapshot"), ("open", "journal-")]
)
async def test_out_of_space_in_a_checkpoint_heals(operation: Operation, name: str) -> None:
    world = World()
    store = await world.open()
    listener = RecordingListener()
    writer = await store.create(listener=listener)
    for number in range(10):
        await writer.add(b"%d" % number * 100)
    world.disk.fail(operation, name, errno.ENOSPC)
    await store.checkpoint()
    assert store.is_read_only
    assert not world.fatal
    await world.clock.advance(1.1)
    assert not store.is_read_only
    assert await writer.add(b"more") == 10, "a writer without refused entries must go on"
    assert not listener.failures
    await store.checkpoint()
    assert [path.suffix for path in world.disk.paths()].count(".log") == 1
    world.disk = world.disk.power_cut()
    store = await world.open()
    found = await read_all(await store.open(writer.ledger_id, fence=True))
    assert found == [b"%d" % number * 100 for number in range(10)] + [b"more"]
    await store.close()


async def test_a_roll_that_found_no_space_leaves_no_segment_behind() -> None:
    world = World()
    store = await world.open(LocalSettings(reserve_bytes=0, segment_bytes=500))
    listener = RecordingListener()
    writer = await store.create(listener=listener)
    await writer.add(b"x" * 300)
    world.disk.fail("append", "journal-0000000002", errno.ENOSPC)
    writer.append(b"", b"y" * 300)
    assert isinstance(await listener.failed(), LedgerStoreReadOnly)
    await world.clock.advance(1.1)
    other = await store.create()
    await other.add(b"z" * 300)
    world.disk = world.disk.power_cut()
    store = await world.open()
    assert await read_all(await store.open(writer.ledger_id, fence=True)) == [b"x" * 300]
    assert await read_all(await store.open(other.ledger_id, fence=True)) == [b"z" * 300]
    await store.close()


@pytest.mark.parametrize(
    ("operation", "name"),
    [("append", "journal-"), ("sync", "journal-"), ("append", ".ledger"), ("sync", ".ledger"), ("replace", "snapshot")],
)
async def test_an_io_error_stops_the_store_for_good(operation: Operation, name: str) -> None:
    world = World()
    store = await world.open()
    listener = RecordingListener()
    writer = await store.create(listener=listener)
    await writer.add(b"kept" * 100)
    world.disk.fail(operation, name, errno.EIO)
    if name == "journal-":
        writer.append(b"", b"unknown")
        assert isinstance(await listener.failed(), LedgerStoreFailed)
    else:
        await store.checkpoint()
    assert [error.errno for error in world.fatal if isinstance(error, OSError)] == [errno.EIO]
    with pytest.raises(LedgerStoreFailed):
        writer.append(b"", b"x")
    for act in (store.create(), store.open(1, fence=True), store.open(1, fence=False), store.metadata(1), store.delete(1)):
        with pytest.raises(LedgerStoreFailed):
            await act
    await world.clock.advance(100)
    assert len(world.fatal) == 1
    await store.close()
    assert listener.last == 0
    world.disk = world.disk.power_cut()
    world.fatal.clear()
    store = await world.open()
    found = await read_all(await store.open(1, fence=True))
    assert found[0] == b"kept" * 100
    await store.close()


async def test_an_unreadable_directory_is_a_clear_error() -> None:
    world = World()
    world.disk.fail("open", "snapshot", errno.EIO)
    with pytest.raises(LedgerStoreFailed, match=str(PATH)):
        await world.open()
    store = await world.open()
    await store.close()


async def test_everything_queued_fails_together_without_gaps() -> None:
    """Entries behind a refused group must not be written: the ledger would have a hole."""
    world = World()
    store = await world.open(LocalSettings(reserve_bytes=0, group_bytes=1000))
    listener = RecordingListener()
    writer = await store.create(listener=listener)
    world.disk.fail("sync", "journal-", errno.ENOSPC)
    for _ in range(20):
        writer.append(b"", b"x" * 400)
    errors: list[LedgerError] = [await listener.failed()]
    await world.clock.advance(5)
    assert errors == listener.failures
    assert listener.last == -1
    world.disk = world.disk.power_cut()
    store = await world.open()
    assert await read_all(await store.open(1, fence=True)) == []
    await store.close()
