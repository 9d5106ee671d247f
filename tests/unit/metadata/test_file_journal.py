"""The journal over the file layer: power cuts, torn tails, full and failing disks."""

import asyncio
import errno
import random
from dataclasses import replace
from pathlib import Path

import pytest

from braid.errors import BraidError, OutcomeUnknown, StoreMismatch, StoreUnavailable
from braid.metadata.api import MetadataStore, Span
from braid.metadata.engine import Engine
from braid.metadata.pipeline import PROBE_SECONDS
from braid.runtime.env import Runtime
from braid.runtime.files import FileSystem
from braid.runtime.threads import InlineThreads
from braid.testing.conformance.metadata_world import SteppedClock, collect, collect_names
from braid.testing.files import ForgetfulFiles
from braid.testing.journal import FILE_NAME, open_store
from braid.wire.checksum import crc32c

HOME = Path("/store")


def runtime(files: FileSystem, clock: SteppedClock | None = None) -> Runtime:
    return replace(Runtime(), files=files, threads=InlineThreads(), clock=clock or SteppedClock())


async def write(store: MetadataStore, acknowledged: dict[str, int], number: int) -> None:
    for n in range(6):
        try:
            record = await (
                store.append("/p/s", b"x" * 40, partition="p") if n % 2 else store.put(f"/p/{number}", b"%d" % n, partition="p")
            )
        except BraidError:
            return
        acknowledged[record.key] = record.version


async def cut_and_check(seed: int, early_receipt: str = "") -> None:
    choose = random.Random(seed)
    files = ForgetfulFiles(choose, early_receipt=early_receipt)
    root = await open_store(runtime(files), path=HOME)
    files.cut_after(choose.randrange(24))  # often in the middle of a write, sometimes after the last one
    acknowledged: dict[str, int] = {}
    store = root.handle("a")
    await asyncio.gather(*(write(store, acknowledged, number) for number in range(5)))
    files = files.power_cut()
    root = await open_store(runtime(files), path=HOME)
    store = root.handle("b")
    for key, version in acknowledged.items():
        found = await store.get(key, partition="p")
        assert found is not None, f"{key} was acknowledged and lost"
        assert found.version >= version
    numbers = await collect_names(store.names(Span("/p", "s-", "s.")))
    assert numbers == [f"s-{n:020d}" for n in range(1, len(numbers) + 1)]
    assert root.commit_counter >= max(acknowledged.values(), default=0)
    made = await store.append("/p/s", b"", partition="p")
    await root.close()
    root = await open_store(runtime(files), path=HOME)
    assert await root.handle("c").get(made.key, partition="p") is not None
    await root.close()


@pytest.mark.inv("INV1")
async def test_power_cuts_lose_nothing_acknowledged() -> None:
    for seed in range(150):
        await cut_and_check(seed)


async def test_receipt_before_fsync_is_caught() -> None:
    caught = 0
    for seed in range(30):
        try:
            await cut_and_check(seed, early_receipt=FILE_NAME)
        except (AssertionError, StoreMismatch):
            caught += 1
    assert caught > 0


async def test_torn_tail_is_cut_at_every_byte(tmp_path: Path) -> None:
    root = await open_store(Runtime(), path=tmp_path)
    store = root.handle("a")
    kept = await store.put("/t/kept", b"value")
    before = (tmp_path / FILE_NAME).stat().st_size
    await store.put("/t/last", b"value")
    await root.close()
    data = (tmp_path / FILE_NAME).read_bytes()
    for size in range(before, len(data)):
        for tail in (b"", b"\x00" * 20, b"\xff" * 20):
            (tmp_path / FILE_NAME).write_bytes(data[:size] + tail)
            root = await open_store(runtime(Runtime().files), path=tmp_path)
            assert await collect(root.handle("a").scan(Span("/t"))) == [kept]
            await root.close()
            assert (tmp_path / FILE_NAME).stat().st_size == before


async def test_foreign_log_is_refused(tmp_path: Path) -> None:
    root = await open_store(Runtime(), path=tmp_path)
    await root.close()
    data = (tmp_path / FILE_NAME).read_bytes()
    await rewrite(tmp_path, data, b"braid-metadata\x01", b"braid-metadata\x02")


async def rewrite(directory: Path, data: bytes, old: bytes, new: bytes) -> None:
    body = data[8:].replace(old, new)
    assert body != data[8:]
    (directory / FILE_NAME).write_bytes(data[:4] + crc32c(body).to_bytes(4, "big") + body)
    with pytest.raises(StoreMismatch, match="format 2"):
        await open_store(Runtime(), path=directory)


async def test_full_disk_resumes() -> None:
    clock = SteppedClock()
    files = ForgetfulFiles(random.Random(1), capacity=2000)
    root = await open_store(runtime(files, clock), path=HOME)
    store = root.handle("a")
    kept = await store.put("/f/k", b"1")
    with pytest.raises(StoreUnavailable):
        await store.put("/f/k", b"x" * 3000)
    with pytest.raises(StoreUnavailable, match="read-only"):
        await store.put("/f/k", b"2")
    assert await store.get("/f/k") == kept
    files.capacity = 1 << 20
    clock.advance(PROBE_SECONDS)
    await asyncio.sleep(0)
    last = await store.put("/f/k", b"x" * 3000, expected=kept.version)
    await check_reopened(root, files, last.version)


async def check_reopened(root: Engine, files: ForgetfulFiles, version: int) -> None:
    await root.close()
    root = await open_store(runtime(files), path=HOME)
    found = await root.handle("b").get("/f/k")
    assert found is not None
    assert found.version == version == root.commit_counter
    await root.close()


async def test_failed_sync_is_final() -> None:
    files = ForgetfulFiles(random.Random(1))
    root = await open_store(runtime(files), path=HOME)
    store = root.handle("a")
    failures: list[BaseException] = []
    root.on_failure = failures.append
    files.fail("sync", FILE_NAME, errno.EIO)
    with pytest.raises(OutcomeUnknown):
        await store.put("/f/k", b"")
    assert len(failures) == 1
    with pytest.raises(BraidError, match="must be reopened"):
        await store.put("/f/k", b"")
    await root.close()
