"""A full, failing or decaying disk under a real `braid standalone` process.

No space: publishes are refused, reads go on, publishing resumes by itself, nothing acknowledged is lost. A failed fsync or an
I/O error ends the process with a clear message. A changed bit is named, with its file, at the start or at the read, and
never served.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from braid.errors import QuotaExceeded
from braid.model.positions import Position
from braid.testing.raw_client import RawClient, id_of, payload_of
from braid.wire.commands import Command
from braid.wire.types import CommandType, InitialPosition

COMMAND = [sys.executable, "-m", "braid.cli.main"]
OPTIONS = ["standalone", "--port", "0", "--http-port", "0", "--log-level", "warning", "--data-dir"]
TOPIC = "persistent://public/default/faults"
FAILING_DISK = """
import errno, os, sys
from braid.runtime.files import SystemFile
path, wanted, operation = sys.argv.pop(1), sys.argv.pop(1), sys.argv.pop(1)
honest = {"open": SystemFile.__init__, "sync": SystemFile.sync, "append": SystemFile.append}
names = {}
def init(self, file, flags):
    honest["open"](self, file, flags)
    names[id(self)] = str(file)
def broken(self, *args):
    if wanted in names.get(id(self), "") and os.path.exists(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO), names[id(self)])
    return honest[operation](self, *args)
SystemFile.__slots__ = ()
SystemFile.__init__ = init
setattr(SystemFile, operation, broken)
from braid.cli.main import main
main()
"""


class Process:
    """A broker process."""

    def __init__(self, data_dir: Path, *, command: list[str] | None = None, env: dict[str, str] | None = None) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - a pipe that nobody empties would stop the broker
        self.process = subprocess.Popen(
            [*(command or COMMAND), *OPTIONS, str(data_dir)],
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, **(env or {})},
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.url, self.http_url = line.split()[1:3] if line.startswith("ready ") else ("", "")

    def end(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        """Exit code and standard error."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.wait()

    def wait(self) -> tuple[int, str]:
        self.process.communicate(timeout=30)
        self._errors.seek(0)
        with self._errors:
            return self.process.returncode, self._errors.read()


def refusal(data_dir: Path) -> str:
    """What a process says that refuses to start: one line, exit code 1."""
    broker = Process(data_dir)
    assert broker.url == "", "the broker started on damaged data"
    code, err = broker.wait()
    assert code == 1
    assert "Traceback" not in err
    return err


async def publish(url: str, count: int, size: int = 1000, topic: str = TOPIC) -> None:
    """Store messages `0..count-1`, each acknowledged."""
    client = await RawClient.connect(url, answers_pings=True)
    await client.producer(topic)
    await client.subscribe(topic, "keeper")
    for number in range(count):
        await client.store(b"%d:" % number + bytes([number % 251]) * size, number)
    client.close()


async def read_back(url: str, count: int, topic: str = TOPIC) -> list[bytes]:
    """The first messages of a topic."""
    client = await RawClient.connect(url, answers_pings=True)
    await client.subscribe(topic, "check", permits=count, durable=False, start_message_id=id_of(Position(-1, -1)))
    found = [payload_of(delivery) for delivery in await client.messages(count)]
    client.close()
    return found


class Publisher:
    """A producer that is closed by the broker when it cannot store, and comes back with the next message, as every client."""

    def __init__(self, client: RawClient) -> None:
        self._client = client
        self._is_attached = False

    async def is_stored(self, number: int, size: int) -> bool:
        client = self._client
        if not self._is_attached:
            try:
                await client.producer(TOPIC)
            except QuotaExceeded:
                return False
            self._is_attached = True
        client.publish(b"%d:" % number + bytes(size), number)
        answers = (CommandType.SEND_RECEIPT, CommandType.SEND_ERROR, CommandType.CLOSE_PRODUCER)
        event = await client.take(lambda each: isinstance(each, Command) and each.type in answers, "a receipt or a refusal")
        self._is_attached = event.type != CommandType.CLOSE_PRODUCER
        return bool(event.type == CommandType.SEND_RECEIPT)


def numbers(payloads: list[bytes]) -> list[int]:
    return [int(payload.split(b":")[0]) for payload in payloads]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 32 MB."""
    mount = shutil.which("mount")
    folder = tmp_path / "small"
    folder.mkdir()
    if mount is None or subprocess.run([mount, "-t", "tmpfs", "-o", "size=32m", "tmpfs", folder], check=False).returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.inv("INV1")
async def test_a_full_disk_refuses_reads_on_and_heals(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(12 << 20))
    settings = {"BRAID__LEDGER__RESERVE_BYTES": str(4 << 20), "BRAID__LEDGER__RESUME_BYTES": str(4 << 20)}
    broker = Process(small_disk / "data", env=settings)
    try:
        client = await RawClient.connect(broker.url, answers_pings=True)
        producer = Publisher(client)
        await client.subscribe(TOPIC, "keeper")  # never acknowledges: nothing is trimmed
        acknowledged = 0
        while await producer.is_stored(acknowledged, 100_000):
            acknowledged += 1
            assert acknowledged < 300, "the disk never fills"
        assert acknowledged > 50
        for number in range(2000, 2003):
            assert not await producer.is_stored(number, 1000)
        assert numbers(await read_back(broker.url, acknowledged)) == list(range(acknowledged)), "reads go on"
        assert broker.process.poll() is None
        ballast.unlink()
        resumed = 3000
        async with asyncio.timeout(20):
            while not await producer.is_stored(resumed, 10):
                resumed += 1
        client.close()
    finally:
        code, err = broker.end(signal.SIGKILL)
    assert code == -signal.SIGKILL
    assert "Traceback" not in err
    assert "has room again" in err
    broker = Process(small_disk / "data", env=settings)
    try:
        found = numbers(await read_back(broker.url, acknowledged + 1))
        assert found == [*range(acknowledged), resumed], "acknowledged is there, refused is not"
    finally:
        code, err = broker.end()
    assert (code, "Traceback" in err) == (0, False)


@pytest.mark.parametrize(("name", "operation"), [("journal-", "sync"), ("journal-", "append"), (".ledger", "sync")])
async def test_a_failing_disk_ends_the_process(tmp_path: Path, name: str, operation: str) -> None:
    """The file layer of a real process answers EIO from a moment on."""
    script, trigger = tmp_path / "failing.py", tmp_path / "now"
    script.write_text(FAILING_DISK)
    env = {"BRAID__LEDGER__CHECKPOINT_SECONDS": "0.5"}
    command = [sys.executable, str(script), str(trigger), name, operation]
    broker = Process(tmp_path / "data", command=command, env=env)
    await publish(broker.url, 40)
    client = await RawClient.connect(broker.url, answers_pings=True)
    await client.producer(TOPIC)
    trigger.touch()
    client.publish(bytes(30_000), 40)
    if name == ".ledger":
        await client.receipt()  # it is in the journal; the checkpoint fails later
    await client.expect_close()
    assert not [event for event in client.inbox if isinstance(event, Command) and event.type == CommandType.SEND_RECEIPT]
    code, err = broker.wait()
    assert code == 1
    assert "storage failed, the process ends" in err
    assert "Input/output error" in err
    trigger.unlink()
    broker = Process(tmp_path / "data")
    try:
        assert numbers(await read_back(broker.url, 40)) == list(range(40))
    finally:
        broker.end()


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


@pytest.fixture
async def stopped(tmp_path: Path) -> Path:
    """The data directory of a broker that stored 60 messages in ledger files and was stopped cleanly."""
    broker = Process(tmp_path / "data")
    await publish(broker.url, 60)
    await publish(broker.url, 60, topic=TOPIC + "-sound")
    assert broker.end()[0] == 0
    return tmp_path / "data"


async def test_a_changed_bit_in_a_ledger_file_is_never_served(stopped: Path) -> None:
    files = sorted((stopped / "ledgers" / "ledgers").rglob("*.ledger"), key=lambda path: int(path.stem))
    assert len(files) >= 2
    damaged = files[0]
    flip(damaged, damaged.stat().st_size // 2)
    broker = Process(stopped)
    try:
        topics = [TOPIC, TOPIC + "-sound"]
        outcome = {}
        for topic in topics:
            client = await RawClient.connect(broker.url, answers_pings=True)
            await client.subscribe(topic, "check", permits=100, initial=InitialPosition.EARLIEST)
            try:
                outcome[topic] = numbers([payload_of(each) for each in await client.messages(60)])
            except AssertionError:
                outcome[topic] = numbers([payload_of(each) for each in client.inbox])  # type: ignore[arg-type]
            client.close()
        assert sorted(len(found) == 60 for found in outcome.values()) == [False, True], "one topic is damaged, one sound"
        assert all(found == list(range(len(found))) for found in outcome.values()), "something was skipped"
        assert broker.process.poll() is None
    finally:
        code, err = broker.end()
    assert code == 0
    assert str(damaged) in err, "the log names the file"
    assert "checksum" in err


async def test_a_changed_bit_in_the_journal_refuses_the_start(tmp_path: Path) -> None:
    broker = Process(tmp_path / "data")
    await publish(broker.url, 60)
    broker.end(signal.SIGKILL)
    [journal] = sorted((tmp_path / "data" / "ledgers" / "journal").glob("journal-*"))
    intact = journal.read_bytes()
    for part in (3, 2):
        journal.write_bytes(intact)
        flip(journal, len(intact) // part)
        assert str(journal) in refusal(tmp_path / "data")
    journal.write_bytes(intact)
    broker = Process(tmp_path / "data")
    try:
        assert numbers(await read_back(broker.url, 60)) == list(range(60)), "a refused start changed something"
    finally:
        broker.end()


async def test_a_changed_bit_in_the_snapshot_refuses_the_start(stopped: Path) -> None:
    [snapshot] = list((stopped / "ledgers").glob("snapshot*"))
    flip(snapshot, snapshot.stat().st_size // 2)
    assert str(snapshot) in refusal(stopped)


async def test_a_damaged_metadata_store_refuses_the_start(stopped: Path) -> None:
    store = stopped / "metadata" / "metadata.sqlite"
    data = store.read_bytes()
    places = [match.start() for match in re.finditer(b"persistent", data)]
    assert places
    for at in places:  # some may lie in cells that are no longer used
        flip(store, at + 2)
    assert str(store) in refusal(stopped)


async def test_older_metadata_is_refused_and_a_second_process_too(tmp_path: Path) -> None:
    """Also with ledgers that only a kill left behind: the mark is in the journal."""
    data = tmp_path / "data"
    broker = Process(data)
    await publish(broker.url, 1)
    assert broker.end()[0] == 0
    shutil.copytree(data / "metadata", tmp_path / "old")
    broker = Process(data)
    await publish(broker.url, 5, topic=TOPIC + "-new")
    second = refusal(data)
    assert "in use by another process" in second
    broker.end(signal.SIGKILL)
    shutil.rmtree(data / "metadata")
    shutil.copytree(tmp_path / "old", data / "metadata")
    assert "is older than the ledgers there" in refusal(data)
    shutil.rmtree(data / "metadata")
    assert "belong to the metadata store" in refusal(data)
