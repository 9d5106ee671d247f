"""`braid produce` and `braid consume` as real processes: pipes, signals, outputs that take nothing, missing packages."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import httpx
import pytest

from braid.testing.broker import BackgroundBroker

COMMAND = [sys.executable, "-m", "braid.cli.main"]
INTERRUPTED = 130


@pytest.fixture(scope="module")
def broker() -> Iterator[BackgroundBroker]:
    with BackgroundBroker() as running:
        yield running


def start(
    broker: BackgroundBroker, *arguments: str, stdin: int | None = None, stdout: int | IO[bytes] = subprocess.PIPE
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*COMMAND, *arguments, "--url", broker.service_url],
        stdin=stdin,
        stdout=stdout,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": ""},
    )


def finish(process: subprocess.Popen[bytes]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=30)
    assert b"Traceback" not in err
    return process.returncode, (out or b"").decode(), err.decode()


def wait_for(broker: BackgroundBroker, topic: str, what: str) -> None:
    """Until `topic` has something under `what` in its statistics."""
    url = f"{broker.http_url}/admin/v2/persistent/public/default/{topic}/stats"
    pause = threading.Event()
    for _attempt in range(400):
        answer = httpx.get(url)
        if answer.status_code == 200 and answer.json()[what]:
            return
        pause.wait(0.05)
    pytest.fail(f"{topic} has no {what}")


def test_lines_of_a_pipe_go_out_as_they_come(broker: BackgroundBroker) -> None:
    process = start(broker, "produce", "pipe", "--file", "-", stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(b"one\nhalf")
    process.stdin.flush()
    wait_for(broker, "pipe", "msgInCounter")  # while the pipe stays open and silent
    process.stdin.write(b" two\r\nlast")
    assert finish(process)[0] == 0
    reader = start(broker, "consume", "pipe", "-s", "s", "--from", "earliest", "--count", "3", "--timeout", "20")
    assert finish(reader)[:2] == (0, "one\nhalf two\nlast\n")


def test_messages_come_out_of_a_pipe_as_they_arrive(broker: BackgroundBroker) -> None:
    process = start(broker, "consume", "live", "-s", "s")
    wait_for(broker, "live", "subscriptions")
    assert finish(start(broker, "produce", "live", "--text", "now"))[0] == 0
    assert process.stdout is not None
    assert process.stdout.readline() == b"now\n"
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 0  # without --count, Ctrl-C is how it ends


def test_an_interrupted_producer_says_what_is_durable(broker: BackgroundBroker) -> None:
    process = start(broker, "produce", "cut", "--messages", "1000000", "--rate", "50", "--output", "json")
    wait_for(broker, "cut", "msgInCounter")
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    stats = httpx.get(f"{broker.http_url}/admin/v2/persistent/public/default/cut/stats").json()
    assert (code, json.loads(out)["messages"]) == (INTERRUPTED, stats["msgInCounter"])
    assert "sent " in err


def test_a_producer_that_waits_for_a_silent_pipe_can_be_interrupted(broker: BackgroundBroker) -> None:
    process = start(broker, "produce", "silent", "--file", "-", stdin=subprocess.PIPE)
    wait_for(broker, "silent", "publishers")
    process.send_signal(signal.SIGINT)
    process.wait(timeout=20)  # with the pipe still open
    assert finish(process)[0] == INTERRUPTED


def test_an_interrupted_count_is_not_reached(broker: BackgroundBroker) -> None:
    process = start(broker, "consume", "few", "-s", "s", "--count", "2", "--timeout", "60")
    wait_for(broker, "few", "subscriptions")
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == INTERRUPTED


def test_a_count_beyond_the_end_of_the_topic(broker: BackgroundBroker) -> None:
    path = f"{broker.http_url}/admin/v2/persistent/public/default/ended"
    assert finish(start(broker, "produce", "ended", "--text", "x"))[0] == 0
    httpx.post(f"{path}/terminate").raise_for_status()
    code, out, err = finish(start(broker, "consume", "ended", "-s", "s", "--from", "earliest", "--count", "2"))
    assert (code, out) == (1, "x\n")
    assert "Only 1 of 2 messages came from persistent://public/default/ended, which was terminated." in err


def test_what_the_output_did_not_take_comes_again(broker: BackgroundBroker) -> None:
    assert finish(start(broker, "produce", "full", "--text", "x"))[0] == 0
    with Path("/dev/full").open("wb") as full:
        code, _out, err = finish(start(broker, "consume", "full", "-s", "s", "--from", "earliest", "--count", "1", stdout=full))
        assert (code, err) == (1, "error: Standard output cannot be written: No space left on device.\n")
        code, _out, err = finish(start(broker, "produce", "other", "--output", "json", stdout=full))
        assert (code, err.splitlines()[1:]) == (1, ["error: Standard output cannot be written: No space left on device."])
    assert finish(start(broker, "consume", "full", "-s", "s", "--count", "1", "--timeout", "20"))[:2] == (0, "x\n")


def test_a_reader_that_goes_away(broker: BackgroundBroker) -> None:
    assert finish(start(broker, "produce", "gone", "--messages", "50000"))[0] == 0
    process = start(broker, "consume", "gone", "-s", "s", "--from", "earliest")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=20) == 1
    assert process.stderr is not None
    with process.stderr as errors:
        assert errors.read() == b""


def test_the_http_port_is_recognised(broker: BackgroundBroker) -> None:
    url = broker.http_url.replace("http://", "pulsar://")
    done = subprocess.run([*COMMAND, "produce", "t", "--url", url], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "It speaks HTTP; give the port of the binary protocol" in done.stderr


def test_an_installation_without_the_server_says_what_is_missing() -> None:
    program = "import sys; sys.modules['typer'] = None; from braid.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert done.stderr == "error: The braid command needs the package typer; install Braid with its server: braidmq[server].\n"


def test_the_sdk_needs_nothing_of_the_server() -> None:
    server = ("typer", "rich", "litestar", "uvicorn", "httpx", "uvloop", "prometheus_client", "sortedcontainers")
    program = f"import sys; sys.modules.update(dict.fromkeys({server})); import braid, braid.client; braid.connect"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)
