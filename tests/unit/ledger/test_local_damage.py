"""Damage on disk: a torn tail is cut, anything else is an error that names the file; nothing is skipped silently."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from random import Random

import msgspec
import pytest

from braid.errors import EntryCorrupt, LedgerNotFound, StoreMismatch
from braid.ledger.backends.local import LocalLedgerStore, LocalSettings, open_store, records
from braid.ledger.backends.local.journal import segment_name
from braid.ledger.backends.local.ledgerfile import ledger_path
from braid.ledger.backends.local.recovery import FORMAT_FILE
from braid.runtime.env import Runtime
from braid.runtime.threads import InlineThreads
from braid.testing.conformance.ledger import RecordingListener, read_all
from braid.testing.files import ForgetfulFiles
from braid.wire.checksum import crc32c

PATH = Path("/data")
JOURNAL = PATH / "journal"
SETTINGS = LocalSettings(reserve_bytes=0, tail_bytes=100, block_bytes=1000)
RNG = Random(77)
ENTRIES = [RNG.randbytes(size) for size in (30, 1, 200, 700, 64, 0, 90)]


async def opened(disk: ForgetfulFiles, settings: LocalSettings = SETTINGS) -> LocalLedgerStore:
    return await open_store(
        replace(Runtime(), files=disk, threads=InlineThreads(), random=Random(5)), path=PATH, settings=settings
    )


async def one_ledger(disk: ForgetfulFiles) -> None:
    """Ledger 1 with one entry per commit group, then the machine stops; every byte is on the platter."""
    store = await opened(disk)
    writer = await store.create()
    for data in ENTRIES:
        await writer.add(data)


async def content(disk: ForgetfulFiles) -> list[bytes]:
    store = await opened(disk)
    found = await read_all(await store.open(1, fence=True))
    await store.close()
    return found


def size_of(disk: ForgetfulFiles, path: Path) -> int:
    return disk.open(path).size()


class Copies:
    """Fresh copies of one disk."""

    def __init__(self, disk: ForgetfulFiles) -> None:
        self._files = {path: disk.open(path).read(0, 1 << 30) for path in disk.paths()}
        self._folders = [PATH / "ledgers" / name for name in disk.names(PATH / "ledgers")]

    def new(self) -> ForgetfulFiles:
        disk = ForgetfulFiles(Random(3))
        for folder in self._folders:
            disk.make_dir(folder)
        for path, data in self._files.items():
            disk.make_dir(path.parent)
            file = disk.open(path, create=True)
            file.append(data)
            file.sync()
            disk.sync_dir(path.parent)
        return disk


async def test_a_torn_tail_is_cut_at_every_byte() -> None:
    disk = ForgetfulFiles(Random(1))
    await one_ledger(disk)
    copies = Copies(disk)
    journal = JOURNAL / segment_name(1)
    whole = size_of(disk, journal)
    last_group = records.GROUP.size + records.RECORD.size + len(ENTRIES[-1])
    for size in range(whole - last_group, whole):
        torn = copies.new()
        torn.open(journal).truncate(size)
        assert await content(torn) == ENTRIES[:-1], f"cut at byte {size} of {whole}"
    assert await content(copies.new()) == ENTRIES


async def test_missing_sectors_in_the_last_group_are_a_torn_tail() -> None:
    disk = ForgetfulFiles(Random(1))
    store = await opened(disk)
    listener = RecordingListener()
    writer = await store.create(listener=listener)
    await writer.add(b"first")
    before = size_of(disk, JOURNAL / segment_name(1))
    for _ in range(5):
        writer.append(b"", RNG.randbytes(800))
    await listener.confirmed(5)
    data = disk.open(JOURNAL / segment_name(1)).read(0, 1 << 30)
    hole = (before // 512 + 2) * 512
    file = disk.open(JOURNAL / segment_name(1))
    file.truncate(hole)
    file.append(bytes(512) + data[hole + 512 :])
    file.sync()
    assert await content(disk.power_cut()) == [b"first"]


async def test_missing_sectors_before_intact_groups_are_damage() -> None:
    disk = ForgetfulFiles(Random(1))
    store = await opened(disk)
    writer = await store.create()
    for _ in range(5):
        await writer.add(RNG.randbytes(2000))
    file = disk.open(JOURNAL / segment_name(1))
    data = file.read(0, 1 << 30)
    file.truncate(2048)
    file.append(bytes(1024) + data[3072:])
    file.sync()
    with pytest.raises(EntryCorrupt, match="intact groups follow"):
        await opened(disk.power_cut())


async def test_every_flipped_bit_in_the_journal_is_noticed() -> None:
    disk = ForgetfulFiles(Random(1))
    await one_ledger(disk)
    copies = Copies(disk)
    journal = JOURNAL / segment_name(1)
    for offset in range(size_of(disk, journal)):
        bad = copies.new()
        bad.flip(journal, offset, offset % 8)
        with pytest.raises(EntryCorrupt, match=segment_name(1)):
            await opened(bad)


async def test_every_flipped_bit_in_the_snapshot_is_noticed() -> None:
    disk = ForgetfulFiles(Random(1))
    store = await opened(disk)
    writer = await store.create(custom={"a": b"b"})
    await writer.add(b"tail")
    await store.close()
    copies = Copies(disk)
    (snapshot,) = [path for path in disk.paths() if path.suffix == ".snap"]
    for offset in range(size_of(disk, snapshot)):
        bad = copies.new()
        bad.flip(snapshot, offset, offset % 8)
        with pytest.raises(EntryCorrupt, match=r"\.snap"):
            await opened(bad)
    for size in range(size_of(disk, snapshot)):
        bad = copies.new()
        bad.open(snapshot).truncate(size)
        with pytest.raises(EntryCorrupt, match=r"\.snap"):
            await opened(bad)


async def test_a_flipped_bit_in_a_ledger_file_is_noticed_and_spares_the_others() -> None:
    disk = ForgetfulFiles(Random(1))
    await one_ledger(disk)
    store = await opened(disk := disk.power_cut())
    await store.open(1, fence=True)
    await store.close()
    copies = Copies(disk)
    path = ledger_path(PATH / "ledgers", 1)
    noticed = 0
    for offset in range(size_of(disk, path)):
        bad = copies.new()
        bad.flip(path, offset, offset % 8)
        store = await opened(bad)
        reader = await store.open(1, fence=False)
        with pytest.raises(EntryCorrupt, match=r"1\.ledger"):
            await read_all(reader)
        good = 0
        for entry_id, data in enumerate(ENTRIES):
            try:
                assert await reader.read(entry_id, entry_id) == [data]
                good += 1
            except EntryCorrupt:
                noticed += 1
        assert good in (0, len(ENTRIES) - 1) or offset < size_of(disk, path) // 2
    assert noticed


async def test_a_lost_or_short_ledger_file_is_noticed() -> None:
    disk = ForgetfulFiles(Random(1))
    await one_ledger(disk)
    store = await opened(disk := disk.power_cut())
    await store.close()
    copies = Copies(disk)
    path = ledger_path(PATH / "ledgers", 1)
    lost, lost_later, short = copies.new(), copies.new(), copies.new()
    lost.remove(path)
    short.open(path).truncate(size_of(disk, path) - 1)
    for bad, error in ((lost, LedgerNotFound), (lost_later, EntryCorrupt), (short, EntryCorrupt)):
        store = await opened(bad)
        if bad is lost_later:
            bad.remove(path)
        with pytest.raises(error, match=r"1\.ledger|ledger 1"):
            await read_all(await store.open(1, fence=False))
        await store.close()


async def test_another_ledgers_file_is_noticed() -> None:
    disk = ForgetfulFiles(Random(1))
    store = await opened(disk)
    for _ in range(2):
        writer = await store.create()
        await writer.add(b"x" * 500)
    await store.close()
    other = ledger_path(PATH / "ledgers", 2)
    data = disk.open(ledger_path(PATH / "ledgers", 1)).read(0, 1 << 20)
    disk.open(other).truncate(0)
    disk.open(other).append(data)
    store = await opened(disk)
    with pytest.raises(EntryCorrupt, match="another ledger"):
        await read_all(await store.open(2, fence=False))


async def test_damage_before_the_end_is_never_cut() -> None:
    disk = ForgetfulFiles(Random(1))
    settings = LocalSettings(reserve_bytes=0, segment_bytes=600)
    store = await opened(disk, settings)
    writer = await store.create()
    for _ in range(10):
        await writer.add(b"x" * 200)
    copies = Copies(disk)
    segments = [path for path in disk.paths() if path.suffix == ".log"]
    assert len(segments) > 3
    short = copies.new()
    short.open(segments[1]).truncate(size_of(disk, segments[1]) - 1)
    with pytest.raises(EntryCorrupt, match=segments[1].name):
        await opened(short, settings)
    lost = copies.new()
    lost.remove(segments[1])
    with pytest.raises(EntryCorrupt, match=segments[1].name):
        await opened(lost, settings)
    group = records.GROUP.size + records.RECORD.size + 200
    ends_early = copies.new()
    ends_early.open(segments[1]).truncate(size_of(disk, segments[1]) - group)
    with pytest.raises(EntryCorrupt, match="lost its end"):
        await opened(ends_early, settings)


async def test_a_lost_snapshot_or_format_file_is_noticed() -> None:
    disk = ForgetfulFiles(Random(1))
    await one_ledger(disk)
    copies = Copies(disk)
    for path in disk.paths():
        if path.suffix == ".snap" or path.name == FORMAT_FILE:
            bad = copies.new()
            bad.remove(path)
            with pytest.raises(EntryCorrupt):
                await opened(bad)


async def test_a_newer_format_is_refused() -> None:
    disk = ForgetfulFiles(Random(1))
    await one_ledger(disk)
    copies = Copies(disk)
    bad = copies.new()
    file = bad.open(PATH / FORMAT_FILE)
    file.truncate(0)
    file.append(b'{"format": 2, "store_id": "00"}')
    with pytest.raises(StoreMismatch, match="format 2"):
        await opened(bad)
    bad = copies.new()
    file = bad.open(JOURNAL / segment_name(1))
    data = bytearray(file.read(0, 1 << 20))
    data[9] = 9
    data[records.HEADER.size - 4 : records.HEADER.size] = crc32c(bytes(data[: records.HEADER.size - 4])).to_bytes(4, "big")
    file.truncate(0)
    file.append(bytes(data))
    with pytest.raises(StoreMismatch, match="format 9"):
        await opened(bad)


async def test_a_crash_at_every_step_of_a_checkpoint_leaves_a_good_store() -> None:
    steps = 0
    while True:
        disk = ForgetfulFiles(Random(steps))
        store = await opened(disk)
        writer = await store.create()
        doomed = await store.create()
        await doomed.add(b"y" * 300)
        for data in ENTRIES:
            await writer.add(data)
        await store.delete(doomed.ledger_id)
        disk.cut_after(steps)
        await store.checkpoint()
        is_done = not is_off(disk)
        disk = disk.power_cut()
        store = await opened(disk)
        assert await read_all(await store.open(1, fence=False)) == ENTRIES, f"crash at step {steps}"
        with pytest.raises(LedgerNotFound):
            await store.open(doomed.ledger_id, fence=False)
        assert (await store.create()).ledger_id == 3
        await store.close()
        if is_done:
            break
        steps += 1
    assert steps > 8


def is_off(disk: ForgetfulFiles) -> bool:
    try:
        disk.check_power()
    except OSError:
        return True
    return False


async def test_a_deleted_ledgers_file_left_by_a_crash_is_removed() -> None:
    disk = ForgetfulFiles(Random(1))
    store = await opened(disk)
    writer = await store.create()
    await writer.add(b"x" * 500)
    await store.checkpoint()
    path = ledger_path(PATH / "ledgers", 1)
    assert disk.exists(path)
    disk.fail("remove", "1.ledger", 5)
    await store.delete(1)
    await asyncio.sleep(0)
    assert disk.exists(path)
    await store.close()
    store = await opened(disk)
    assert not disk.exists(path)
    await store.close()


async def test_a_ledger_without_its_file_is_not_known_and_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    """Else its log would be loaded, and readers would stand before the hole."""
    disk = ForgetfulFiles(Random(1))
    store = await opened(disk)
    writers = [await store.create() for _ in range(4)]
    for writer in writers:
        await writer.add(RNG.randbytes(500))
    await writers[0].close()
    await store.checkpoint()  # all four have files now
    await writers[1].add(b"in the journal only")
    paths = [ledger_path(PATH / "ledgers", number) for number in (1, 2, 3, 4)]
    disk = disk.power_cut()
    kept = disk.open(paths[0]).read(0, 1 << 30)
    for path in paths[:3]:
        disk.remove(path)
    await (await opened(disk)).close()  # a checkpoint on the way loses nothing, and makes no file
    assert not [path for path in paths[:3] if disk.exists(path)]
    caplog.clear()
    store = await opened(disk)
    assert "ledger files are missing in /data/ledgers: 01/1.ledger, 02/2.ledger, 03/3.ledger;" in caplog.text
    for number in (1, 2, 3):
        with pytest.raises(LedgerNotFound, match=f"The file of ledger {number} is missing"):
            await store.metadata(number)
        for fence in (False, True):
            with pytest.raises(LedgerNotFound, match=f"The file of ledger {number} is missing"):
                await store.open(number, fence=fence)
    assert len(await read_all(await store.open(4, fence=True))) == 1
    await (await store.create()).add(b"new")
    await store.delete(3)
    await store.close()

    file = disk.open(paths[0], create=True)
    file.append(kept)
    file.sync()
    disk.sync_dir(paths[0].parent)
    store = await opened(disk)
    assert len(await read_all(await store.open(1, fence=True))) == 1, "it was put back"
    assert 3 not in [number async for number in store.ledgers()]
    await store.close()


async def test_a_missing_file_that_the_replay_needs_is_not_made_anew() -> None:
    """The memory for what was written since the last checkpoint is bounded: the start is refused, by name."""
    disk = ForgetfulFiles(Random(1))
    small = msgspec.structs.replace(SETTINGS, buffer_bytes=4000)
    store = await opened(disk, small)
    writer = await store.create()
    await writer.add(RNG.randbytes(500))
    await store.checkpoint()
    for _ in range(3):
        await writer.add(RNG.randbytes(900))
    disk = disk.power_cut()
    path = ledger_path(PATH / "ledgers", 1)
    disk.remove(path)
    for _attempt in range(2):
        with pytest.raises(EntryCorrupt, match="The file of ledger 1 is missing"):
            await opened(disk, small)
    assert not disk.exists(path)
