"""The embedded backend: its file, its refusals, its failures."""

import asyncio
import errno
import shutil
import sqlite3
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from braid.errors import ConfigError, DataDirectoryBusy, StoreMismatch, StoreUnavailable
from braid.metadata.api import IndexSpan, Span
from braid.metadata.backends import embedded
from braid.metadata.backends.embedded import FILE_NAME, LOG_BYTES, ROOM_BYTES, SqliteJournal
from braid.metadata.engine import Engine, Storage
from braid.metadata.journal import VolatileJournal
from braid.metadata.pipeline import IDLE_SECONDS, PROBE_SECONDS
from braid.runtime.env import Runtime
from braid.runtime.files import File, SystemFiles
from braid.testing.conformance.metadata_world import SteppedClock, collect, collect_names


@pytest.fixture
async def root(tmp_path: Path) -> AsyncIterator[Engine]:
    engine = await embedded.open_store(Runtime(), path=tmp_path)
    yield engine
    await engine.close()


async def test_store_id_and_counter_survive_and_grow(tmp_path: Path) -> None:
    ids, counters = set(), []
    for _ in range(3):
        root = await embedded.open_store(Runtime(), path=tmp_path / "new" / "deep")
        store = root.handle("a")
        await store.put("/k", b"")
        await store.delete("/k")  # the newest record is gone, its number is not
        ids.add(root.store_id)
        counters.append(root.commit_counter)
        await root.close()
        await root.close()
    assert len(ids) == 1
    assert counters == [2, 4, 6]
    other = await embedded.open_store(Runtime(), path=tmp_path / "other")
    assert other.store_id not in ids
    await other.close()


async def test_file_is_durable_and_exclusive(tmp_path: Path, root: Engine) -> None:
    with pytest.raises(DataDirectoryBusy, match=r"metadata\.sqlite"):
        await embedded.open_store(Runtime(), path=tmp_path)
    journal = root._storage.journal
    assert isinstance(journal, SqliteJournal)
    assert journal._db is not None
    assert journal._db.execute("PRAGMA synchronous").fetchone() == (2,)
    assert journal._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert journal._db.execute("PRAGMA locking_mode").fetchone() == ("exclusive",)


async def test_second_process_is_refused_at_once(tmp_path: Path, root: Engine) -> None:
    program = (
        "import asyncio, pathlib, sys\n"
        "from braid.metadata.backends import embedded\n"
        "from braid.runtime.env import Runtime\n"
        "from braid.errors import DataDirectoryBusy\n"
        "try:\n"
        "    asyncio.run(embedded.open_store(Runtime(), path=pathlib.Path(sys.argv[1])))\n"
        "except DataDirectoryBusy:\n"
        "    sys.exit(42)\n"
    )
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", program, str(tmp_path))
    async with asyncio.timeout(10):
        assert await child.wait() == 42
    await root.handle("a").put("/k", b"still mine")


async def test_path_is_needed() -> None:
    with pytest.raises(ConfigError, match="directory"):
        await embedded.open_store(Runtime())


@pytest.mark.parametrize(
    "content", [b"not a database, but long enough to look at" * 40, b"SQLite format 3\x00" + b"\xff" * 4096]
)
async def test_foreign_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    with pytest.raises(StoreMismatch, match=r"metadata\.sqlite"):
        await embedded.open_store(Runtime(), path=tmp_path)


async def test_other_databases_and_newer_formats_are_refused(tmp_path: Path) -> None:
    root = await embedded.open_store(Runtime(), path=tmp_path)
    await root.close()
    edit(tmp_path, "PRAGMA user_version = 2")
    with pytest.raises(StoreMismatch, match="format 2"):
        await embedded.open_store(Runtime(), path=tmp_path)
    edit(tmp_path, "PRAGMA user_version = 1", "PRAGMA application_id = 7")
    with pytest.raises(StoreMismatch, match="not a Braid metadata store"):
        await embedded.open_store(Runtime(), path=tmp_path)
    edit(tmp_path, "PRAGMA application_id = 1112689988", "UPDATE record SET body = x'00' WHERE key = ''")
    with pytest.raises(StoreMismatch, match="header"):
        await embedded.open_store(Runtime(), path=tmp_path)


def edit(directory: Path, *statements: str) -> None:
    db = sqlite3.connect(directory / FILE_NAME, isolation_level=None)
    for statement in statements:
        db.execute(statement)
    db.close()


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE record SET body = CAST(substr(body, 1, length(body) - 1) || x'7a' AS BLOB) WHERE key = '/k'",
        "UPDATE record SET body = CAST(body AS TEXT) WHERE key = '/k'",
        "UPDATE record SET body = 'text' WHERE key = '/k'",
        "UPDATE record SET body = x'0000' WHERE key = '/k'",
        "UPDATE record SET key = '/other' WHERE key = '/k'",
    ],
)
async def test_damaged_record_is_refused(tmp_path: Path, statement: str) -> None:
    root = await embedded.open_store(Runtime(), path=tmp_path)
    await root.handle("a").put("/k", b"value")
    await root.close()
    edit(tmp_path, statement)
    with pytest.raises(StoreMismatch, match="damaged") as refusal:
        await embedded.open_store(Runtime(), path=tmp_path)
    if "AS TEXT" not in statement:  # SQLite itself refuses to read that one, and does not tell which it is
        assert "record '/other'" in str(refusal.value) or "record '/k'" in str(refusal.value)


async def test_keys_of_every_kind_survive(tmp_path: Path) -> None:
    names = ["a\x00b", "a", "é", "中文", "\U0001f600", "x" * 600]
    root = await embedded.open_store(Runtime(), path=tmp_path)
    store = root.handle("a")
    made = [await store.put(f"/n/{name}", name.encode(), index={"i": name, "j": ""}, partition=name) for name in names]
    await root.close()
    root = await embedded.open_store(Runtime(), path=tmp_path)
    store = root.handle("a")
    assert await collect(store.scan(Span("/n"))) == sorted(made, key=lambda record: record.key)
    assert [record.name for record in await collect(store.scan(IndexSpan("i")))] == sorted(names)
    await root.close()


async def test_full_disk_is_read_only_until_there_is_room(tmp_path: Path) -> None:
    clock = SteppedClock()
    root = await embedded.open_store(replace(Runtime(), clock=clock), path=tmp_path)
    journal = root._storage.journal
    assert isinstance(journal, SqliteJournal)
    store = root.handle("a")
    kept = await store.put("/full/kept", b"x")
    worker = root._storage.worker

    def limit(pages: int) -> None:
        assert journal._db is not None
        journal._db.execute(f"PRAGMA max_page_count = {pages}")

    await worker.run(lambda: limit(1))
    with pytest.raises(StoreUnavailable, match="no room"):
        await store.put("/full/big", b"x" * 100_000)
    with pytest.raises(StoreUnavailable, match="read-only"):
        await store.put("/full/kept", b"y")
    assert await store.get("/full/kept") == kept
    await worker.run(lambda: limit(1_000_000))
    clock.advance(PROBE_SECONDS)
    await worker.run(lambda: None)
    big = await store.put("/full/big", b"x" * 100_000)
    await root.close()
    root = await embedded.open_store(Runtime(), path=tmp_path)
    store = root.handle("a")
    assert await collect(store.scan(Span("/full"))) == [big, kept]
    assert root.commit_counter == big.version
    await root.close()


async def test_a_full_disk_is_written_to_again_only_with_room_to_spare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe that is content with the room for its own row would let the next commit fail, once a second."""
    free = 10 << 30
    monkeypatch.setattr(SystemFiles, "free_bytes", lambda _self, _path: free)
    clock = SteppedClock()
    root = await embedded.open_store(replace(Runtime(), clock=clock), path=tmp_path)
    journal = root._storage.journal
    assert isinstance(journal, SqliteJournal)
    store, worker = root.handle("a"), root._storage.worker
    assert journal._db is not None
    journal._db.execute("PRAGMA max_page_count = 1")
    with pytest.raises(StoreUnavailable, match="no room"):
        await store.put("/full/big", b"x" * 1_000_000)
    journal._db.execute("PRAGMA max_page_count = 1000000")
    free = 2_000_000  # enough for the probe, not for what was refused
    for _ in range(3):
        clock.advance(PROBE_SECONDS)
        await worker.run(lambda: None)
        assert store.is_read_only
    free = 4_000_000
    clock.advance(PROBE_SECONDS)
    await worker.run(lambda: None)
    assert not store.is_read_only
    await store.put("/full/big", b"x" * 1_000_000)
    await root.close()


async def test_write_ahead_log_is_checkpointed_when_idle_and_when_large(tmp_path: Path) -> None:
    clock = SteppedClock()
    root = await embedded.open_store(replace(Runtime(), clock=clock), path=tmp_path)
    journal = root._storage.journal
    assert isinstance(journal, SqliteJournal)
    store = root.handle("a")
    await store.put("/k", b"")
    assert journal._wal_pages > 0
    clock.advance(IDLE_SECONDS)
    clock.advance(IDLE_SECONDS)
    await root._storage.worker.run(lambda: None)
    assert journal._wal_pages == 0
    wal = tmp_path / (FILE_NAME + "-wal")
    largest = 0
    for n in range(60):
        await store.put(f"/big/{n % 3}", bytes([n]) * 1_000_000)
        largest = max(largest, wal.stat().st_size)
    assert 8 << 20 < largest < 24 << 20
    await root.close()
    assert not wal.exists()


async def test_ephemerals_of_a_killed_process_are_dropped_at_open(tmp_path: Path) -> None:
    journal = SqliteJournal(Runtime().files, tmp_path, "id")
    journal.load()
    journal.commit(
        [("/e/k", ("/e/k", None, 1, 0, 5, 5, "dead-session", (), b"")), ("/e/l", ("/e/l", None, 2, 0, 5, 5, None, (), b""))], 2
    )
    journal.close()
    root = await embedded.open_store(Runtime(), path=tmp_path)
    assert await collect_names(root.handle("a").names(Span("/e"))) == ["l"]
    assert root.commit_counter == 3
    await root.close()
    journal.load()
    assert journal._db is not None
    assert journal._db.execute("SELECT count(*) FROM record").fetchone() == (2,)
    journal.close()


async def test_failed_open_releases_the_file(tmp_path: Path) -> None:
    root = await embedded.open_store(Runtime(), path=tmp_path)
    await root.close()
    edit(tmp_path, "PRAGMA user_version = 9")
    with pytest.raises(StoreMismatch):
        await embedded.open_store(Runtime(), path=tmp_path)
    edit(tmp_path, "PRAGMA user_version = 1")
    root = await embedded.open_store(Runtime(), path=tmp_path)
    await root.close()


async def test_storage_without_jobs_closes() -> None:
    worker = Runtime().threads.worker("test")
    root = await Engine.open(Runtime(), Storage(VolatileJournal("v"), worker))
    await root.handle("a").put("/k", b"")
    await root.close()


class OddFiles(SystemFiles):
    """A disk with so much room, which may refuse what is written."""

    def __init__(self, free: int, error: OSError | None = None) -> None:
        self._free = free
        self._error = error

    def free_bytes(self, directory: Path) -> int:
        return self._free

    def open(self, path: Path, *, create: bool = False) -> File:
        if self._error is not None:
            raise self._error
        return super().open(path, create=create)


def test_commits_do_not_lengthen_the_write_ahead_log_and_a_copy_of_it_is_whole(tmp_path: Path) -> None:
    """A growing file makes each commit wait for the file system's own journal, and one in a hundred very long."""
    files = OddFiles(ROOM_BYTES)
    for life in range(3):  # new, after a crash with a used log, after a clean end without one
        here, wal = tmp_path / str(life), tmp_path / str(life) / (FILE_NAME + "-wal")
        journal = SqliteJournal(files, here, "id")
        image = journal.load()
        assert image.counter == 400 * life
        assert len(list(image.rows)) == (100 if life else 0)
        assert wal.stat().st_size == LOG_BYTES
        for number in range(400):
            key = f"/k/{number % 100}"
            row = (key, None, number, 0, 5, 5, None, (), b"x" * 150)
            journal.commit([(key, row)], 400 * life + number + 1)
        assert wal.stat().st_size == LOG_BYTES
        if life == 0:
            shutil.copytree(here, tmp_path / "1")  # as a crash leaves it
        journal.close()
        assert not wal.exists()
        if life == 1:
            shutil.copytree(here, tmp_path / "2")


def test_a_log_of_nothing_but_zeros_is_an_empty_one(tmp_path: Path) -> None:
    """As after a crash between the start and the first commit."""
    journal = SqliteJournal(OddFiles(ROOM_BYTES), tmp_path / "a", "id")
    journal.load()
    journal.commit([("/k", ("/k", None, 1, 0, 5, 5, None, (), b""))], 1)
    journal.close()
    (tmp_path / "a" / (FILE_NAME + "-wal")).write_bytes(bytes(LOG_BYTES))
    journal.load()
    assert journal._db is not None
    assert journal._db.execute("SELECT count(*) FROM record").fetchone() == (2,)
    journal.close()


@pytest.mark.parametrize("files", [OddFiles(ROOM_BYTES - 1), OddFiles(ROOM_BYTES, OSError(errno.ENOSPC, "full"))])
def test_a_log_that_cannot_be_lengthened_grows(tmp_path: Path, files: OddFiles) -> None:
    journal = SqliteJournal(files, tmp_path, "id")
    journal.load()
    journal.commit([("/k", ("/k", None, 1, 0, 5, 5, None, (), b""))], 1)
    assert (tmp_path / (FILE_NAME + "-wal")).stat().st_size < 1 << 20
    journal.close()
