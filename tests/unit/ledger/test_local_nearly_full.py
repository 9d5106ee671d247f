"""A nearly full disk: refusing and resuming do not alternate, nothing keeps what was refused, the log stays short, and
deleting makes room."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.unit.ledger.test_local_disk_faults import PATH, World

from braid.errors import LedgerError, LedgerStoreReadOnly
from braid.ledger.backends.local import LocalLedgerStore, LocalSettings
from braid.ledger.backends.local.commit import GroupCommit, Op
from braid.ledger.backends.local.room import Room
from braid.ledger.backends.local.writer import LocalLedgerWriter
from braid.runtime.env import Runtime
from braid.testing.conformance.ledger import RecordingListener, filled, read_all

RESERVE, RESUME = 100_000, 80_000
SETTINGS = LocalSettings(
    reserve_bytes=RESERVE, resume_bytes=RESUME, tail_bytes=100, group_bytes=10_000, buffer_bytes=50_000, checkpoint_bytes=50_000
)


class Filled:
    """A store that has just refused an entry, because of the reserve."""

    def __init__(self) -> None:
        self.world = World(capacity=600_000)
        self.listener = RecordingListener()
        self.kept = 0
        self.store: LocalLedgerStore
        self.writer: LocalLedgerWriter

    async def fill(self, settings: LocalSettings = SETTINGS) -> Filled:
        self.store = await self.world.open(settings)
        writer = await self.store.create(listener=self.listener)
        assert isinstance(writer, LocalLedgerWriter)
        self.writer = writer
        while not self.listener.failures:
            self.writer.append(b"", b"x" * 5000)
            await self.listener.confirmed(self.kept)
            self.kept += 1
        self.kept = self.listener.last + 1
        await self.world.clock.advance(5)  # the checkpoint that a full disk starts
        return self

    def free(self, size: int) -> None:
        """Let this many bytes be free."""
        disk = self.world.disk
        disk.capacity += size - disk.free_bytes(PATH)


async def test_resuming_needs_more_room_than_refusing() -> None:
    """First-hour repro: a probe content with a byte above the reserve lets the next group fail again, once a second."""
    full = await Filled().fill()
    changes = 0
    was = True
    for step in range(60):
        full.free(RESERVE + 1000 + step * (RESUME // 60))  # above the reserve, but too little for more than a few groups
        await full.world.clock.advance(1.1)
        changes += was is not full.store.is_read_only
        was = full.store.is_read_only
    assert changes == 0
    full.free(RESERVE + RESUME + 100)
    await full.world.clock.advance(1.1)
    assert not full.store.is_read_only
    writer = await full.store.create()
    for _ in range(RESUME // 10_000):
        await writer.add(b"y" * 5000)
    assert not full.store.is_read_only, "there was room for that much"
    await full.store.close()


@pytest.mark.parametrize("kind", ["disk", "quota"])
@pytest.mark.parametrize("first", ["checkpoint", "group"])
async def test_room_for_a_checkpoint_that_failed_is_waited_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, first: str, kind: str
) -> None:
    """It gives back at once what it has written, which is not enough for the next try: once a second it would fail again."""
    caplog.set_level(logging.INFO, "braid")
    world = World(capacity=1_000_000)
    store = await world.open(
        LocalSettings(
            reserve_bytes=10_000, resume_bytes=5000, tail_bytes=100, group_bytes=10_000, buffer_bytes=400_000, probe_seconds=1.0
        )
    )
    writer = await store.create()
    for number in range(28):
        await writer.add(b"%7d" % number * 1000)
    assert store.buffered_bytes > 190_000

    left = world.disk.free_bytes

    def leave(size: int) -> None:
        world.disk.capacity += size - left(PATH)

    if kind == "quota":
        monkeypatch.setattr(world.disk, "free_bytes", lambda _path: 1 << 30)
    leave(150_000)
    if first == "group":
        world.disk.fail("append", "journal-", errno.ENOSPC)
        with pytest.raises(LedgerStoreReadOnly):
            await writer.add(b"x")
    for _ in range(64):
        await world.clock.advance(1.0)
    assert store.is_read_only
    caplog.clear()
    for _ in range(30):
        await world.clock.advance(1.1)
        assert store.is_read_only
    assert not [line for line in caplog.messages if "since" not in line]
    leave(350_000)
    for _ in range(5):
        await world.clock.advance(1.0)
    assert not store.is_read_only
    assert store.buffered_bytes == 0, "the checkpoint was not made"
    assert await (await store.create()).add(b"y") == 0
    await store.close()


async def test_a_checkpoint_that_failed_is_made_out_of_the_reserve() -> None:
    """What it moves leaves the journal: waiting until there is as much above the reserve would be waiting for too much."""
    world = World(capacity=1_000_000)
    store = await world.open(
        LocalSettings(
            reserve_bytes=100_000,
            resume_bytes=5000,
            tail_bytes=100,
            group_bytes=10_000,
            buffer_bytes=400_000,
            probe_seconds=1.0,
        )
    )
    writer = await store.create()
    for number in range(28):
        await writer.add(b"%7d" % number * 1000)
    buffered, left = store.buffered_bytes, world.disk.free_bytes
    assert buffered > 190_000

    def leave(size: int) -> None:
        world.disk.capacity += size - left(PATH)

    leave(90_000)
    world.disk.fail("append", "journal-", errno.ENOSPC)
    with pytest.raises(LedgerStoreReadOnly):
        await writer.add(b"x")
    await store.checkpoint()
    assert store.is_read_only and store.buffered_bytes == buffered
    leave(buffered + 20_000)
    for _ in range(5):
        await world.clock.advance(1.0)
    assert store.buffered_bytes == 0 and not store.is_read_only
    assert await (await store.create()).add(b"y") == 0
    await store.close()


async def test_room_for_what_was_refused_is_waited_for() -> None:
    """Also for an entry that is larger than the distance."""
    world = World(capacity=1_000_000)
    store = await world.open(SETTINGS)
    writer = await store.create()
    with pytest.raises(LedgerStoreReadOnly):
        await writer.add(b"x" * 950_000)
    await world.clock.advance(10)
    assert store.is_read_only
    world.disk.capacity = 1_200_000
    await world.clock.advance(1.1)
    assert not store.is_read_only
    assert await (await store.create()).add(b"x" * 950_000) == 0
    await store.close()


async def test_a_quota_that_the_free_space_does_not_show() -> None:
    """The probe writes as much as was refused."""
    world = World()
    store = await world.open(SETTINGS)
    writer = await store.create()
    world.disk.fail("append", "journal-", errno.EDQUOT)
    with pytest.raises(LedgerStoreReadOnly):
        await writer.add(b"x" * 1000)
    world.disk.fail("append", "probe", errno.EDQUOT)
    await world.clock.advance(1.1)
    assert store.is_read_only
    await world.clock.advance(1.1)
    assert not store.is_read_only
    assert not world.fatal
    await store.close()


@pytest.mark.parametrize("operation", ["reserve", "append", "sync"])
async def test_a_refused_payload_is_let_go(operation: str) -> None:
    """Refused writers live until their ledgers are deleted; what they keep must not hold the frames that held the payload."""
    world = World()
    store = await world.open(SETTINGS)
    listener = RecordingListener()
    writer = await store.create(listener=listener)
    assert isinstance(writer, LocalLedgerWriter)
    body = bytes(bytearray(2 << 20))  # more than is written without a look at the free space
    before = sys.getrefcount(body)
    gc.collect()
    gc.disable()
    try:
        if operation == "reserve":
            world.disk.capacity = RESERVE
        else:
            world.disk.fail("append" if operation == "append" else "sync", "journal-", errno.ENOSPC)
        writer.append(b"", body)
        error = await listener.failed()
        assert isinstance(error, LedgerStoreReadOnly)
        for kept in (error, writer._refusal, store.refusal):
            assert kept is not None
            assert (kept.__traceback__, kept.__cause__, kept.__context__) == (None, None, None)
        for _ in range(3):
            with pytest.raises(LedgerError):
                writer.append(b"", body)
            with pytest.raises(LedgerError):
                await writer.add(body)
            with pytest.raises(LedgerError):
                await store.create()
        await world.clock.advance(0.5)
        assert sys.getrefcount(body) == before, "something keeps the payload"
    finally:
        gc.enable()
    await store.close()


async def test_the_log_says_it_once_then_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "braid")
    full = await Filled().fill()
    for _ in range(600):
        with pytest.raises(LedgerStoreReadOnly):
            await full.store.create()
        with pytest.raises(LedgerStoreReadOnly):
            full.writer.append(b"", b"x")
        await full.world.clock.advance(1)
    lines = [record.getMessage() for record in caplog.records]
    assert 10 <= len(lines) <= 12, lines
    assert "is read-only: The disk of" in lines[0]
    assert str(RESERVE) in lines[0]
    assert all("is read-only since" in line and str(RESERVE + RESUME) in line for line in lines[1:])
    full.world.disk.capacity = 1 << 30
    await full.world.clock.advance(2)
    assert "has room again" in caplog.records[-1].getMessage()
    assert len(caplog.records) == len(lines) + 1
    await full.store.close()


async def test_a_store_that_starts_with_less_than_the_reserve_closes_and_deletes() -> None:
    """Before it has refused anything: a log is recovered, which closes its last ledger, before it can be read."""
    world = World()
    store = await world.open(SETTINGS)
    first, second = [await filled(store, 1) for _ in range(2)]
    world.disk = world.disk.power_cut()
    store = await world.open(SETTINGS)
    world.disk.capacity += RESERVE // 2 - world.disk.free_bytes(PATH)
    assert await read_all(await store.open(first.ledger_id, fence=True)) == [b"0.........."]
    await store.delete(second.ledger_id)
    assert not store.is_read_only
    with pytest.raises(LedgerStoreReadOnly):
        await store.create()
    await store.close()


async def test_deleting_works_from_the_reserve_and_makes_room() -> None:
    full = await Filled().fill()
    store = full.store
    assert store.is_read_only
    reader = await store.open(full.writer.ledger_id, fence=True)  # who reads or deletes a topic opens its log
    assert len(await read_all(reader)) == full.kept
    await store.delete(full.writer.ledger_id)
    assert store.is_read_only, "the bytes are still there"
    await full.world.clock.advance(5)
    assert not store.is_read_only
    assert full.world.disk.free_bytes(PATH) > RESERVE + RESUME
    again = await store.create()
    assert await again.add(b"z" * 5000) == 0
    full.world.disk = full.world.disk.power_cut()
    store = await full.world.open(SETTINGS)
    assert [each async for each in store.ledgers()] == [again.ledger_id]
    assert await read_all(await store.open(again.ledger_id, fence=True)) == [b"z" * 5000]
    await store.close()


async def test_deleting_frees_the_journal_too() -> None:
    """What no checkpoint could move out of the journal, for lack of room, is freed by one after its ledger is deleted."""
    full = await Filled().fill(LocalSettings(reserve_bytes=RESERVE, resume_bytes=RESUME, tail_bytes=100, group_bytes=10_000))
    disk = full.world.disk
    assert not [path for path in disk.paths() if path.suffix == ".ledger" and disk.open(path).size()], "given back at once"
    assert disk.free_bytes(PATH) > RESERVE // 2
    await full.store.delete(full.writer.ledger_id)
    await full.world.clock.advance(5)
    assert not full.store.is_read_only
    await full.store.close()


async def test_what_is_queued_when_a_checkpoint_finds_no_room_fails_with_the_end_behind_it() -> None:
    world = World()
    store = await world.open(SETTINGS)
    listener = RecordingListener()
    writer = await store.create(listener=listener)
    writer.append(b"", b"under way")
    await asyncio.sleep(0)  # written, its confirmation is on its way
    writer.append(b"", b"queued")
    store._commit.failed_job(OSError(errno.ENOSPC, "no room for a snapshot"))
    with pytest.raises(LedgerStoreReadOnly):
        await store.open(writer.ledger_id, fence=True)
    assert isinstance(await listener.failed(), LedgerStoreReadOnly)
    assert await read_all(await store.open(writer.ledger_id, fence=True)) == [b"under way"]
    world.disk = world.disk.power_cut()
    store = await world.open(SETTINGS)
    assert await read_all(await store.open(writer.ledger_id, fence=True)) == [b"under way"]
    await store.close()


async def test_an_end_behind_failing_entries_is_refused() -> None:
    """Or the journal would say that the ledger ends after entries that were never written."""
    world = World()
    store = await world.open(SETTINGS)
    listener = RecordingListener()
    writer = await store.create(listener=listener)
    await writer.add(b"kept")
    world.disk.fail("sync", "journal-", errno.ENOSPC)
    writer.append(b"", b"lost")
    closing = store.open(writer.ledger_id, fence=True)
    with pytest.raises(LedgerStoreReadOnly):
        await closing
    assert await read_all(await store.open(writer.ledger_id, fence=True)) == [b"kept"]
    world.disk = world.disk.power_cut()
    store = await world.open(SETTINGS)
    assert await read_all(await store.open(writer.ledger_id, fence=True)) == [b"kept"]
    assert not world.fatal
    await store.close()


async def test_no_room_even_for_a_deletion_is_refused_and_tried_again() -> None:
    full = await Filled().fill()
    full.world.disk.fail("append", "journal-", errno.ENOSPC)
    with pytest.raises(LedgerStoreReadOnly):
        await full.store.delete(full.writer.ledger_id)
    await full.store.delete(full.writer.ledger_id)
    assert [each async for each in full.store.ledgers()] == []
    assert not full.world.fatal
    await full.store.close()


async def test_a_refused_group_is_told_so_before_the_next_one_begins() -> None:
    """Found by simulation: what came meanwhile was begun first, and those of the failed group waited for ever."""
    world, posted = World(), list[Callable[[Any, BaseException | None], None]]()

    class HeldWorker:
        def post(self, _work: Any, done: Callable[[Any, BaseException | None], None]) -> None:
            posted.append(done)

    commit = GroupCommit(
        cast(Any, SimpleNamespace(refused_bytes=0)),
        cast(Any, HeldWorker()),
        world.clock,
        Runtime().slow,
        world.disk,
        PATH,
        SETTINGS,
        on_confirmed=lambda _group: None,
        on_space=lambda: None,
        on_fatal=world.fatal.append,
    )

    async def submitted() -> asyncio.Future[None]:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        commit.submit(b"delete", Op(done, lambda: None, None), frees=True)
        await asyncio.sleep(0)
        return done

    for _ in range(2):  # the first refusal, and one of a store that is read-only already
        under_way, queued = await submitted(), await submitted()
        posted.pop()(None, LedgerStoreReadOnly("No space."))
        assert isinstance(under_way.exception(), LedgerStoreReadOnly)
        assert isinstance(queued.exception(), LedgerStoreReadOnly)
        assert commit.is_idle and not posted
    commit.close()


async def test_a_probe_that_is_under_way_at_the_end_is_the_last_one() -> None:
    """Its answer comes after the store was told to close; the next one would find no thread."""
    world, posted = World(), list[Callable[[Any, BaseException | None], None]]()

    class HeldWorker:
        def post(self, _work: Any, done: Callable[[Any, BaseException | None], None]) -> None:
            posted.append(done)

    told: list[object] = []
    room = Room(
        world.disk,
        PATH,
        SETTINGS,
        world.clock,
        cast(Any, HeldWorker()),
        unmoved=lambda: 0,
        still_full=told.append,
        ended=told.append,
    )
    room.wanted(LedgerStoreReadOnly("full"), 0)
    await world.clock.advance(1.1)
    room.stop()
    posted.pop()((0, 1), None)
    await world.clock.advance(10)
    assert not posted and not told
