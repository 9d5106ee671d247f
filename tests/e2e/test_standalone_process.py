"""`braid standalone` as a real process: the ready line, signals, restarts, and everything it refuses."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

import braid

COMMAND = [sys.executable, "-m", "braid.cli.main", "standalone", "--port", "0", "--http-port", "0"]
READY = re.compile(r"ready (pulsar://localhost:\d+) (http://localhost:\d+)\n")


class Process:
    """A broker process that has said it is ready."""

    def __init__(self, data_dir: Path, *arguments: str, env: dict[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [*COMMAND, "--data-dir", str(data_dir), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        match = READY.fullmatch(line)
        if match is None:
            _out, err = self._process.communicate(timeout=10)
            pytest.fail(f"not ready: {line!r} {err}")
        self.service_url, self.http_url = match.groups()

    def cpu_seconds(self) -> float:
        """What the process has used so far."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self, number: signal.Signals) -> tuple[int, str, str]:
        """Send a signal; exit code, rest of standard output, standard error."""
        self._process.send_signal(number)
        out, err = self._process.communicate(timeout=20)
        return self._process.returncode, out, err


def refused(data_dir: Path, *arguments: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    """Exit code and standard error of a process that must not start."""
    done = subprocess.run(
        [*COMMAND, "--data-dir", str(data_dir), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **(env or {})},
        check=False,
    )
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


async def send(url: str, first: int, count: int) -> None:
    async with braid.connect(url) as client:
        producer = await client.producer("t")
        for number in range(first, first + count):
            await producer.send(b"%d" % number)


async def receive(url: str, count: int, acknowledge: int) -> list[int]:
    async with braid.connect(url) as client:
        consumer = await client.consumer("t", "s", initial="earliest")
        messages = [await consumer.receive(10) for _number in range(count)]
        for message in messages[:acknowledge]:
            await consumer.acknowledge(message, wait=True)
        return [int(message.payload) for message in messages]


@contextmanager
def hearing(number: signal.Signals) -> Iterator[None]:
    """Processes started meanwhile hear the signal also where the tests ignore it (under nohup, in the background)."""
    before = signal.getsignal(number)
    if before is signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_one_ready_line_and_a_clean_end(tmp_path: Path, number: signal.Signals) -> None:
    with hearing(number):
        process = Process(tmp_path / "made" / "by it")
    assert httpx.get(f"{process.http_url}/metrics").status_code == 200
    assert httpx.get(f"{process.http_url}/admin/v2/brokers/health").text == "ok"
    code, out, err = process.end(number)
    assert (code, out) == (0, "")
    assert "Traceback" not in err


def test_the_loop_of_a_process_is_watched(tmp_path: Path) -> None:
    process = Process(tmp_path)
    name = "braid_loop_longest_turn_seconds"
    for _time in range(1000):  # until its timer came for the first time
        lines = httpx.get(f"{process.http_url}/metrics").text.splitlines()
        if any(line.startswith(name) and float(line.removeprefix(name)) > 0 for line in lines):
            break
    else:
        pytest.fail("no turn of the loop was measured")
    assert process.end(signal.SIGTERM)[0] == 0


def test_ready_in_about_a_second(tmp_path: Path) -> None:
    """Of CPU time, which a busy machine disturbs least: nothing in the start waits for anything."""
    process = Process(tmp_path)
    used = process.cpu_seconds()
    process.end(signal.SIGTERM)
    assert used < 2.5  # about 0.9 s


@pytest.mark.inv("INV1")
async def test_messages_and_positions_survive_a_stop_and_a_kill(tmp_path: Path) -> None:
    process = Process(tmp_path)
    await send(process.service_url, 0, 10)
    assert await receive(process.service_url, 10, acknowledge=4) == list(range(10))
    assert process.end(signal.SIGTERM)[0] == 0
    process = Process(tmp_path)
    assert await receive(process.service_url, 6, acknowledge=2) == list(range(4, 10))
    await send(process.service_url, 10, 5)
    assert process.end(signal.SIGKILL)[0] == -signal.SIGKILL
    process = Process(tmp_path)
    assert await receive(process.service_url, 9, acknowledge=0) == list(range(6, 15))
    assert process.end(signal.SIGTERM)[0] == 0


def test_a_second_process_is_refused_while_the_first_goes_on(tmp_path: Path) -> None:
    process = Process(tmp_path)
    code, err = refused(tmp_path)
    assert (code, err.count("\n")) == (1, 1)
    assert f"The data directory {tmp_path} is in use by another process" in err
    assert httpx.get(f"{process.http_url}/admin/v2/brokers/health").text == "ok"
    assert process.end(signal.SIGTERM)[0] == 0


def test_a_port_in_use(tmp_path: Path) -> None:
    process = Process(tmp_path / "one")
    port = process.service_url.rpartition(":")[2]
    code, err = refused(tmp_path / "two", "--port", port)
    assert (code, err.count("\n")) == (2, 1)
    assert f"cannot listen on localhost:{port}" in err
    http_port = process.http_url.rpartition(":")[2]
    code, err = refused(tmp_path / "two", "--http-port", http_port)
    assert code == 2
    assert "HTTP server cannot listen" in err
    process.end(signal.SIGTERM)


def test_settings_from_file_and_environment(tmp_path: Path) -> None:
    file = tmp_path / "braid.toml"
    file.write_text("[broker]\nmax_message_size = 100000\nclusterName = 'one'\n[log]\nlevel = 'warning'\n")
    env = {"BRAID__BROKER__CLUSTER_NAME": "two", "BRAID__BROKER__DEDUPLICATION": "true"}
    process = Process(tmp_path / "data", "--config", str(file), "--max-message-size", "200000", env=env)
    values = httpx.get(f"{process.http_url}/admin/v2/brokers/configuration/runtime").json()
    assert (values["max_message_size"], values["cluster_name"], values["deduplication"]) == ("200000", "two", "True")
    process.end(signal.SIGTERM)
    assert refused(tmp_path / "data", env={"BRAID__BROKER__NONSENSE": "1"})[0] == 2


def stop_after_some_work(data_dir: Path) -> None:
    process = Process(data_dir)
    assert httpx.put(f"{process.http_url}/admin/v2/persistent/public/default/made").status_code == 204
    assert process.end(signal.SIGTERM)[0] == 0


@pytest.mark.parametrize("lost", [True, False])
def test_the_metadata_of_another_store_is_refused(tmp_path: Path, lost: bool) -> None:
    stop_after_some_work(tmp_path / "one")
    before = sorted(path.name for path in (tmp_path / "one" / "ledgers").iterdir())
    shutil.rmtree(tmp_path / "one" / "metadata")
    if not lost:
        stop_after_some_work(tmp_path / "two")
        shutil.copytree(tmp_path / "two" / "metadata", tmp_path / "one" / "metadata")
    code, err = refused(tmp_path / "one")
    assert (code, err.count("\n")) == (1, 1)
    assert "belong to the metadata store" in err
    assert before == sorted(path.name for path in (tmp_path / "one" / "ledgers").iterdir())


def test_an_older_copy_of_the_metadata_is_refused(tmp_path: Path) -> None:
    stop_after_some_work(tmp_path / "data")
    shutil.copytree(tmp_path / "data" / "metadata", tmp_path / "copy")
    process = Process(tmp_path / "data")
    for name in ("more", "and-more"):
        assert httpx.put(f"{process.http_url}/admin/v2/persistent/public/default/{name}").status_code == 204
    assert process.end(signal.SIGTERM)[0] == 0
    shutil.rmtree(tmp_path / "data" / "metadata")
    shutil.copytree(tmp_path / "copy", tmp_path / "data" / "metadata")
    code, err = refused(tmp_path / "data")
    assert (code, err.count("\n")) == (1, 1)
    assert "is older than the ledgers" in err


def test_a_directory_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, err = refused(tmp_path / "file")
    assert (code, err.count("\n")) == (2, 1)
    assert "cannot be used" in err


def test_a_data_directory_without_a_name(tmp_path: Path) -> None:
    code, err = refused(Path(), "--data-dir", "", env={"HOME": str(tmp_path)})
    assert (code, err.count("\n")) == (2, 1)
    assert "storage.data_dir) has an empty name" in err


def test_an_address_that_is_not_ours(tmp_path: Path) -> None:
    code, err = refused(tmp_path, "--host", "192.0.2.1")
    assert (code, err.count("\n")) == (2, 1)
    assert "give an address of this machine" in err


def test_it_serves_when_nobody_can_read_the_ready_line(tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        process = subprocess.Popen(
            [*COMMAND, "--data-dir", str(tmp_path)], stdout=full, stderr=subprocess.PIPE, text=True, bufsize=1
        )
    assert process.stderr is not None
    line = process.stderr.readline()
    found = re.search(r"ready pulsar://\S+ (http://\S+)", line)
    assert found is not None, line
    assert httpx.get(f"{found[1]}/admin/v2/brokers/health").text == "ok"
    process.send_signal(signal.SIGTERM)
    _out, rest = process.communicate(timeout=20)
    assert (process.returncode, rest) == (0, "")


def test_nohup_is_respected(tmp_path: Path) -> None:
    ignore = "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    process = subprocess.Popen(
        [sys.executable, "-c", ignore, *COMMAND, "--data-dir", str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    match = READY.fullmatch(process.stdout.readline())
    assert match is not None
    process.send_signal(signal.SIGHUP)
    assert httpx.get(f"{match[2]}/admin/v2/brokers/health").text == "ok"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("topic", ["persistent://public/default/orders", "topic://public/default/orders"])
def test_what_nobody_has_read_outlives_restarts(tmp_path: Path, number: signal.Signals, topic: str) -> None:
    """As a user does it: produce, end the broker, start it again, produce one more, consume from the beginning."""

    def braid(url: str, *arguments: str) -> str:
        command = [sys.executable, "-m", "braid.cli.main", *arguments, "--url", url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return done.stderr

    for count in ("1000", "1"):
        process = Process(tmp_path)
        braid(process.service_url, "produce", topic, "-n", count)
        process.end(number)
    process = Process(tmp_path)
    told = braid(process.service_url, "consume", topic, "-s", "late", "--from", "earliest", "-q", "--count", "1001")
    process.end(signal.SIGTERM)
    assert "received 1,001 messages" in told
