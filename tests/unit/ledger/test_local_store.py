"""The `local` ledger store beyond the port: restart, checkpoints, bounds, one process per directory."""

from __future__ import annotations

import asyncio
import errno
import logging
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.errors import (
    ConfigError,
    DataDirectoryBusy,
    EntryNotFound,
    LedgerExists,
    LedgerFenced,
    LedgerNotFound,
    LedgerOverloaded,
)
from braid.ledger.backends.local import LocalLedgerStore, LocalSettings, open_store
from braid.ledger.backends.local import store as store_module
from braid.ledger.backends.local.ledgerfile import BlockReader, BlockWriter
from braid.ledger.ids import LedgerIds
from braid.runtime.config import load
from braid.runtime.env import Runtime
from braid.runtime.files import File, SystemFiles
from braid.runtime.threads import InlineThreads
from braid.testing.clock import ManualClock
from braid.testing.conformance.ledger import RecordingListener, read_all
from braid.testing.files import ForgetfulFiles
from braid.web.config import StandaloneConfig

PATH = Path("/data")
SMALL = LocalSettings(
    group_bytes=4000,
    segment_bytes=20_000,
    checkpoint_bytes=50_000,
    buffer_bytes=40_000,
    tail_bytes=500,
    block_bytes=2000,
    open_files=8,
    reserve_bytes=0,
)


def simulated(disk: ForgetfulFiles, clock: ManualClock | None = None) -> Runtime:
    return replace(Runtime(), files=disk, threads=InlineThreads(), random=Random(1), clock=clock or ManualClock())


async def simulated_store(disk: ForgetfulFiles, chosen: LocalSettings = SMALL) -> LocalLedgerStore:
    return await open_store(simulated(disk), path=PATH, settings=chosen)


@pytest.mark.parametrize("is_orderly", [True, False])
async def test_everything_is_back_after_a_restart(is_orderly: bool) -> None:
    disk = ForgetfulFiles(Random(1))
    store = await simulated_store(disk)
    closed = await store.create(custom={"k": b"v"})
    await closed.add(b"a" * 1000)
    metadata = await closed.close()
    left_open = await store.create()
    for number in range(200):
        await left_open.add(b"%d" % number * 10)
    deleted = await store.create(ledger_id=50)
    await store.delete(deleted.ledger_id)
    if is_orderly:
        await store.close()
    else:
        disk = disk.power_cut()
    store = await simulated_store(disk)
    assert await store.metadata(closed.ledger_id) == metadata
    assert [i async for i in store.ledgers()] == [closed.ledger_id, left_open.ledger_id]
    reader = await store.open(left_open.ledger_id, fence=False)
    assert (reader.last_confirmed, reader.is_closed) == (199, False)
    reader = await store.open(left_open.ledger_id, fence=True)
    assert (reader.last_confirmed, reader.is_closed) == (199, True)
    assert await read_all(reader) == [b"%d" % number * 10 for number in range(200)]
    with pytest.raises(LedgerNotFound):
        await store.open(50, fence=False)
    with pytest.raises(LedgerExists):
        await store.create(ledger_id=50)
    assert (await store.create(ledger_id=30)).ledger_id == 30
    assert (await store.create()).ledger_id == 51
    await store.close()


async def test_ids_are_not_reused_after_delete_checkpoint_and_restart() -> None:
    disk = ForgetfulFiles(Random(1))
    for expected in range(1, 6):
        store = await simulated_store(disk)
        writer = await store.create()
        assert writer.ledger_id == expected
        await store.delete(writer.ledger_id)
        if expected % 2:
            await store.checkpoint()
        disk = disk.power_cut()


async def test_a_checkpoint_removes_the_journal_before_it_and_entries_stay_readable() -> None:
    disk = ForgetfulFiles(Random(1))
    store = await simulated_store(disk)
    large, small = await store.create(), await store.create()
    await small.add(b"small")
    for number in range(300):
        await large.add(b"%d" % number * 50)
    await store.checkpoint()
    journal = [path for path in disk.paths() if path.suffix == ".log"]
    assert len(journal) == 1
    assert [path.name for path in disk.paths() if path.suffix == ".ledger"] == ["1.ledger"], "a small ledger got a file"
    assert [path.suffix for path in disk.paths()].count(".snap") == 1
    for ledger_id, count in ((1, 300), (2, 1)):
        reader = await store.open(ledger_id, fence=False)
        assert len(await read_all(reader)) == count
    await store.checkpoint()
    assert [path for path in disk.paths() if path.suffix == ".log"] == journal, "an idle store wrote a checkpoint"
    await store.close()


async def test_checkpoints_start_by_time_and_by_growth() -> None:
    disk, clock = ForgetfulFiles(Random(1)), ManualClock()
    store = await open_store(simulated(disk, clock), path=PATH, settings=SMALL)
    writer = await store.create()
    before = disk.paths()
    await clock.advance(59)
    assert disk.paths() == before
    await clock.advance(2)
    assert disk.paths() != before
    before = disk.paths()
    for _ in range(60):
        await writer.add(b"x" * 1000)
    assert len([path for path in disk.paths() if path.suffix == ".log"]) < 5
    assert {path.suffix for path in disk.paths()} >= {".ledger"}
    await store.close()


@pytest.mark.inv("INV17")
async def test_memory_and_files_stay_bounded() -> None:
    disk = ForgetfulFiles(Random(1))
    store = await simulated_store(disk)
    listeners = [RecordingListener() for _ in range(20)]
    writers = [await store.create(listener=listener) for listener in listeners]
    highest = 0
    for number in range(100):
        for writer in writers:
            writer.append(b"%d:" % writer.ledger_id, b"%d" % number * 50)
        for listener in listeners:
            await listener.confirmed(number)
        highest = max(highest, store.buffered_bytes)
    assert highest <= SMALL.buffer_bytes + 2 * SMALL.group_bytes
    for writer in writers:
        reader = await store.open(writer.ledger_id, fence=False)
        assert await read_all(reader) == [b"%d:" % writer.ledger_id + b"%d" % number * 50 for number in range(100)]
    await store.close()


@pytest.mark.inv("INV17")
async def test_a_full_queue_refuses_and_stays_usable() -> None:
    store = await simulated_store(ForgetfulFiles(Random(1)), LocalSettings(reserve_bytes=0, pending_bytes=1000))
    listener = RecordingListener()
    writer = await store.create(listener=listener)
    assert [writer.append(b"", b"x" * 250) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(LedgerOverloaded):
        writer.append(b"", b"x")
    assert store.pending_bytes == 1000
    await listener.confirmed(3)
    assert await writer.add(b"again") == 4
    assert not listener.failures
    await store.close()


@pytest.mark.inv("INV17")
async def test_few_files_are_open_with_many_ledgers(tmp_path: Path) -> None:
    store = await open_store(Runtime(), path=tmp_path, settings=replace_settings(SMALL, open_files=16, tail_bytes=0))
    writers = await asyncio.gather(*[store.create() for _ in range(300)])
    await asyncio.gather(*[writer.add(b"%d" % writer.ledger_id) for writer in writers])
    await store.checkpoint()
    for writer in writers:
        reader = await store.open(writer.ledger_id, fence=False)
        assert await reader.read(0, 0) == [b"%d" % writer.ledger_id]
    assert 0 < open_ledger_files(tmp_path) <= 16
    await store.close()


def open_ledger_files(path: Path) -> int:
    """How many ledger files below `path` this process has open."""
    links = [link.resolve() for link in Path("/proc/self/fd").iterdir() if link.exists()]
    return sum(link.suffix == ".ledger" and path in link.parents for link in links)


def replace_settings(base: LocalSettings, **changes: Any) -> LocalSettings:
    return LocalSettings(**{**{name: getattr(base, name) for name in base.__struct_fields__}, **changes})


class SlowFiles(SystemFiles):
    """Ledger files whose sync or append waits until a test lets it go on."""

    def __init__(self, operation: str) -> None:
        self.operation = operation
        self.reached = threading.Event()
        self.go_on = threading.Event()

    def open(self, path: Path, *, create: bool = False) -> File:
        file = super().open(path, create=create)
        return SlowFile(file, self) if path.suffix == ".ledger" else file


class SlowFile:
    def __init__(self, file: File, files: SlowFiles) -> None:
        self._files = files
        self.read, self.size, self.truncate, self.close = file.read, file.size, file.truncate, file.close
        self._append, self._sync = file.append, file.sync

    def append(self, data: bytes) -> int:
        self._wait("append")
        return self._append(data)

    def sync(self) -> None:
        self._wait("sync")
        self._sync()

    def _wait(self, operation: str) -> None:
        if operation == self._files.operation:
            self._files.reached.set()
            assert self._files.go_on.wait(20)


async def test_commits_and_reads_do_not_wait_for_a_checkpoint(tmp_path: Path) -> None:
    files = SlowFiles("sync")
    store = await open_store(replace(Runtime(), files=files), path=tmp_path, settings=LocalSettings(tail_bytes=0))
    writer = await store.create()
    await writer.add(b"first")
    checkpoint = asyncio.gather(store.checkpoint())
    await asyncio.to_thread(files.reached.wait, 20)
    assert await writer.add(b"second") == 1
    reader = await store.open(writer.ledger_id, fence=False)
    assert await read_all(reader) == [b"first", b"second"]
    assert not checkpoint.done()
    files.go_on.set()
    await checkpoint
    await store.close()


@pytest.mark.inv("INV17")
async def test_groups_wait_while_the_buffer_is_full(tmp_path: Path) -> None:
    files = SlowFiles("append")
    store = await open_store(replace(Runtime(), files=files), path=tmp_path, settings=SMALL)
    listener = RecordingListener()
    writer = await store.create(listener=listener)
    count = 4 * SMALL.buffer_bytes // 1000
    for _ in range(count):
        writer.append(b"", b"x" * 1000)
    await asyncio.to_thread(files.reached.wait, 20)
    async with asyncio.timeout(20):
        while store.buffered_bytes <= SMALL.buffer_bytes:
            await listener.confirmed(listener.last + 1)
    stalled_at = listener.last
    assert store.buffered_bytes <= SMALL.buffer_bytes + SMALL.group_bytes + 100 * 48
    assert store.pending_bytes > 0
    for _ in range(3):
        await store._commit.roll()  # the journal's thread is free; only the full buffer holds the groups back
    assert listener.last == stalled_at, "a group was confirmed although the buffer is full"
    files.go_on.set()
    await listener.confirmed(count - 1)
    assert len(await read_all(await store.open(writer.ledger_id, fence=True))) == count
    await store.close()


async def test_a_second_process_is_refused(tmp_path: Path) -> None:
    store = await open_store(Runtime(), path=tmp_path)
    with pytest.raises(DataDirectoryBusy, match=str(tmp_path)):
        await open_store(Runtime(), path=tmp_path)
    code = (
        "import asyncio, pathlib, sys\n"
        "from braid.errors import DataDirectoryBusy\n"
        "from braid.ledger.backends.local import open_store\n"
        "from braid.runtime.env import Runtime\n"
        "try:\n"
        "    asyncio.run(open_store(Runtime(), path=pathlib.Path(sys.argv[1])))\n"
        "except DataDirectoryBusy as exc:\n"
        "    sys.exit(42)\n"
    )
    other = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code, str(tmp_path)], check=False)
    assert other.returncode == 42
    await store.close()
    again = await open_store(Runtime(), path=tmp_path)
    await again.close()


async def test_turning_sync_off_warns_at_start(caplog: pytest.LogCaptureFixture) -> None:
    disk = ForgetfulFiles(Random(1))
    with caplog.at_level(logging.WARNING):
        store = await simulated_store(disk, LocalSettings(sync=False, reserve_bytes=0))
    assert "SYNC IS OFF" in caplog.text
    writer = await store.create()
    await writer.add(b"x")
    await store.close()
    store = await simulated_store(disk.power_cut())
    assert await read_all(await store.open(1, fence=True)) == [b"x"], "an orderly close did not sync"
    await store.close()


async def test_the_metadata_mark_is_kept() -> None:
    disk = ForgetfulFiles(Random(1))
    store = await simulated_store(disk)
    assert store.metadata_mark() is None
    store.note_metadata("abc", 7)
    store.note_metadata("abc", 5)
    await store.create()
    store = await simulated_store(disk := disk.power_cut())
    assert store.metadata_mark() == ("abc", 7)
    store.note_metadata("abc", 9)
    await store.close()
    store = await simulated_store(disk)
    assert store.metadata_mark() == ("abc", 9)
    await store.checkpoint()
    store.note_metadata("other", 1)
    await store.create()
    store = await simulated_store(disk.power_cut())
    assert store.metadata_mark() == ("other", 1)


async def test_the_metadata_mark_is_kept_by_the_checkpoint_after_one_that_failed() -> None:
    """Nothing else was written, so that the mark alone is what the next one is for."""
    disk = ForgetfulFiles(Random(1))
    store = await simulated_store(disk)
    await store.create()
    await store.checkpoint()
    store.note_metadata("abc", 7)
    disk.fail("append", "snapshot", errno.ENOSPC)
    await store.checkpoint()
    await store.checkpoint()
    store = await simulated_store(disk.power_cut())
    assert store.metadata_mark() == ("abc", 7)
    await store.close()


async def test_the_store_keeps_its_identity(tmp_path: Path) -> None:
    store = await open_store(Runtime(), path=tmp_path)
    identity = store.store_id
    await store.close()
    store = await open_store(Runtime(), path=tmp_path)
    assert store.store_id == identity
    await store.close()


async def test_a_bug_in_one_listener_does_not_silence_the_others() -> None:
    class Broken(RecordingListener):
        def ledger_advanced(self, last_confirmed: int) -> None:
            raise AssertionError("a bug")

    caught: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: caught.append(context))
    store = await simulated_store(ForgetfulFiles(Random(1)))
    broken = await store.create(listener=Broken())
    listener = RecordingListener()
    writer = await store.create(listener=listener)
    broken.append(b"", b"x")
    writer.append(b"", b"x")
    await listener.confirmed(0)
    assert [str(context["exception"]) for context in caught] == ["a bug"]
    await store.close()


async def test_a_fenced_writer_is_told_after_its_last_confirmation() -> None:
    store = await simulated_store(ForgetfulFiles(Random(1)))
    listener = RecordingListener()
    writer = await store.create(listener=listener)
    for _ in range(50):
        writer.append(b"", b"x" * 500)
    reader = await store.open(writer.ledger_id, fence=True)
    assert listener.last == reader.last_confirmed == 49
    assert isinstance(listener.failures[0], LedgerFenced)
    await store.close()


def test_settings_out_of_range_are_refused() -> None:
    for bad in ({"group_bytes": 0}, {"open_files": 1}, {"checkpoint_seconds": -1.0}, {"group_bytes": 1 << 31}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            load(StandaloneConfig, None, {}, {"ledger": bad})


@settings(deadline=None)
@given(st.lists(st.one_of(st.none(), st.integers(1, 40)), max_size=40))
def test_ids_are_taken_once(wanted: list[int | None]) -> None:
    ids, taken = LedgerIds(), set[int]()
    for given_id in wanted:
        if given_id is None:
            new = ids.take_next()
            assert new > max(taken, default=0)
            taken.add(new)
        elif given_id in taken:
            with pytest.raises(LedgerExists):
                ids.take(given_id)
        else:
            ids.take(given_id)
            taken.add(given_id)
    again = LedgerIds(ids.next_id, ids.gaps)
    for ledger_id in range(1, 60):
        assert again.is_used(ledger_id) == (ledger_id in taken)


@settings(deadline=None)
@given(
    st.lists(st.lists(st.binary(max_size=40), min_size=1, max_size=10), min_size=1, max_size=6),
    st.integers(1, 60),
    st.integers(0, 120),
    st.data(),
)
def test_blocks_give_back_what_was_written(parts: list[list[bytes]], block: int, max_bytes: int, data: st.DataObject) -> None:
    files = ForgetfulFiles(Random(1))
    files.make_dir(PATH)
    writer = BlockWriter(files, PATH, b"8bytesid", block_bytes=block, open_files=1)
    reader = BlockReader(files, PATH, b"8bytesid", open_files=1)
    written: list[bytes] = []
    size = 0
    for part in parts:
        size = writer.append(9, size, len(written), part)
        written += part
        last = data.draw(st.integers(0, len(written) - 1))
        first = data.draw(st.integers(0, last))
        found = reader.read(9, size, first, last, max_bytes)
        assert found == written[first : first + len(found)]
        if max_bytes == 0:
            assert len(found) == last - first + 1
        else:
            assert found
            assert len(found) == 1 or sum(map(len, found)) <= max_bytes
            rest = written[first + len(found) : last + 1]
            # An empty entry after the last that fits may be left to the next read.
            assert not rest or sum(map(len, found)) + max(len(rest[0]), 1) > max_bytes


@pytest.mark.parametrize("seed", range(5))
async def test_lengths_in_files_and_in_memory(seed: int) -> None:
    """Of blocks of all kinds, before and after a restart, with the file's table as the only source."""
    chance = Random(seed)
    disk = ForgetfulFiles(Random(1))
    store = await simulated_store(disk)
    writer = await store.create()
    sizes = [chance.choice([0, 1, 100, 1999, 2000, 2001, 7000]) for _ in range(120)]
    for size in sizes:
        await writer.add(bytes(size))
        if chance.random() < 0.1:
            await store.checkpoint()
    for _attempt in range(2):
        reader = await store.open(writer.ledger_id, fence=False)
        assert [await reader.length_before(number) for number in range(len(sizes) + 1)] == [
            sum(sizes[:number]) for number in range(len(sizes) + 1)
        ]
        assert (await store.metadata(writer.ledger_id)).length == sum(sizes)
        await store.checkpoint()
        await store.close()
        store = await simulated_store(disk)
    await store.close()


async def test_reads_across_file_and_memory(tmp_path: Path) -> None:
    store = await open_store(Runtime(), path=tmp_path, settings=replace_settings(SMALL, tail_bytes=0))
    writer = await store.create()
    for number in range(20):
        await writer.add(b"%03d" % number)
        if number == 12:
            await store.checkpoint()
    reader = await store.open(writer.ledger_id, fence=False)
    everything = [b"%03d" % number for number in range(20)]
    for first in range(20):
        for last in range(first, 20):
            assert await reader.read(first, last) == everything[first : last + 1]
            for limit in (1, 7, 12, 1000):
                some = await reader.read(first, last, max_bytes=limit)
                assert some == everything[first : first + len(some)]
                assert some
                assert len(some) == 1 or 3 * len(some) <= limit
    with pytest.raises(EntryNotFound):
        await reader.read(0, 20)
    await store.close()


@pytest.mark.inv("INV17")
@pytest.mark.parametrize("window", [100, 1000])
async def test_a_full_buffer_never_stops_the_writers_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    """More arrives during a flush than it writes: the next flush must follow by itself."""
    monkeypatch.setattr(store_module, "_FLUSH_JOB_BYTES", 64 << 10)
    bounds = LocalSettings(
        buffer_bytes=512 << 10, group_bytes=32 << 10, checkpoint_seconds=3600.0, checkpoint_bytes=1 << 30, reserve_bytes=0
    )
    store = await open_store(Runtime(), path=tmp_path, settings=bounds)
    writers = [await store.create() for _ in range(200)]
    for start in range(0, 6000, window):
        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            for number in range(start, min(start + window, 6000)):
                group.create_task(writers[number % 200].add(b"x" * 500))
    await store.close()
