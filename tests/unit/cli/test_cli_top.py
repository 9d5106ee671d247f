"""`braid top`: what it adds up, its order and bounds, and a terminal that is rewritten."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from typing import Any

import pytest

import braid
from braid.cli import main as cli
from braid.cli.top import Look, TopOptions, Watcher
from braid.testing.broker import BackgroundBroker
from braid.testing.clock import ManualClock


@pytest.fixture(scope="module")
def broker() -> Iterator[BackgroundBroker]:
    with BackgroundBroker() as running:
        yield running


def options(broker: BackgroundBroker, **changes: Any) -> TopOptions:
    given: dict[str, Any] = {
        "interval": 2.0,
        "sort": "in",
        "rows": 20,
        "namespace": None,
        "is_once": True,
        "url": broker.http_url,
        "is_json": True,
        "timeout": 10.0,
    }
    return TopOptions(**(given | changes))


async def send(broker: BackgroundBroker, topic: str, count: int) -> None:
    async with braid.connect(broker.service_url) as client:
        producer = await client.producer(topic, batching=False)
        for number in range(count):
            await producer.send(b"%d" % number)


async def test_rates_are_those_between_two_looks(broker: BackgroundBroker) -> None:
    clock = ManualClock()
    await send(broker, "fast", 1)
    await send(broker, "slow", 1)
    async with Watcher(options(broker), clock) as watcher:
        first = await watcher.look()
        assert {row.rate_in for row in first.topics} == {0.0}
        async with braid.connect(broker.service_url) as client:
            consumer = await client.consumer("fast", "s", initial="earliest")
            await send(broker, "fast", 20)
            await send(broker, "slow", 4)
            await consumer.receive(5)
            await clock.advance(2)
            second = await watcher.look()
    fast, slow = second.topics[:2]
    assert (fast.topic, fast.rate_in, slow.topic, slow.rate_in) == (
        "persistent://public/default/fast",
        10.0,
        "persistent://public/default/slow",
        2.0,
    )
    assert (fast.backlog, fast.consumers, fast.subscriptions, slow.backlog) == (21, 1, 1, 0)
    assert fast.owner == broker.http_url.removeprefix("http://")
    (row,) = second.brokers
    assert (row.broker, row.state, row.is_leader, row.rate_in) == (fast.owner, "up", True, 12.0)
    assert row.bundles >= 1


async def look(given: TopOptions) -> Look:
    async with Watcher(given, ManualClock()) as watcher:
        return await watcher.look()


async def test_order_rows_and_namespace(broker: BackgroundBroker) -> None:
    for name in ("b", "c", "a"):
        await send(broker, name, 1)
    named = await look(options(broker, sort="topic", rows=2))
    assert [row.topic for row in named.topics] == ["persistent://public/default/a", "persistent://public/default/b"]
    assert named.total_topics > 2
    elsewhere = await look(options(broker, namespace="public/none"))
    assert (elsewhere.topics, elsewhere.total_topics) == ([], 0)
    by_size = [row.storage_size for row in (await look(options(broker, sort="size"))).topics]
    assert by_size == sorted(by_size, reverse=True)


def test_once(broker: BackgroundBroker, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    broker.run(send(broker, "shown", 3))

    def top(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["braid", "top", "--once", "--interval", "0.1", "--url", broker.http_url, *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        seen = capfdbinary.readouterr()
        assert (ended.value.code or 0, seen.err) == (0, b"")
        return seen.out.decode()

    found = json.loads(top("--output", "json"))
    assert set(found) == {"brokers", "topics", "totalTopics", "warnings"}
    assert set(found["topics"][0]) == {
        "topic",
        "owner",
        "rateIn",
        "rateOut",
        "bytesIn",
        "bytesOut",
        "backlog",
        "storageSize",
        "producers",
        "subscriptions",
        "consumers",
    }
    assert set(found["brokers"][0]) == {"broker", "state", "isLeader", "topics", "bundles", "rateIn", "rateOut", "backlog"}
    text = top("--rows", "1", "--sort", "backlog")
    assert "1 of " in text
    assert broker.http_url.removeprefix("http://") in text


@pytest.mark.parametrize(("columns", "shown"), [(160, b"persistent://public/default/live "), (80, b" public/default/live ")])
def test_a_terminal_is_rewritten_until_the_user_has_seen_enough(broker: BackgroundBroker, columns: int, shown: bytes) -> None:
    """Names stay in one piece, also where there is little room."""
    broker.run(send(broker, "live", 1))
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    command = [sys.executable, "-m", "braid.cli.main", "top", "--interval", "0.1", "--url", broker.http_url]
    process = subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")} | {"TERM": "xterm"},
        start_new_session=True,
    )
    os.close(theirs)
    seen = b""
    while seen.count(shown) < 3:  # the screen is drawn again and again before the first look is over
        seen += os.read(ours, 65536)
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(OSError):  # the other side is closed
        while os.read(ours, 65536):
            pass
    _out, err = process.communicate(timeout=30)
    os.close(ours)
    assert (process.returncode, err) == (130, b"")
