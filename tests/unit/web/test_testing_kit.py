"""The shipped test kit: brokers in the process, the fixture, and the clock that is moved by hand."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

import braid
from braid.errors import ConfigError
from braid.runtime.network import SystemNetwork
from braid.testing.broker import BackgroundBroker, InProcessBroker
from braid.testing.clock import ManualClock
from braid.testing.raw_client import RawClient


async def test_timers_fire_in_order_each_at_its_moment() -> None:
    clock = ManualClock(start_ms=1000)
    seen: list[tuple[str, float]] = []
    clock.call_later(2, lambda: seen.append(("b", clock.monotonic())))
    clock.call_later(1, lambda: seen.append(("a", clock.monotonic())))
    clock.call_later(1.5, seen.append, ("never", 0.0)).cancel()
    await clock.advance(1.75)
    assert seen == [("a", 1.0)]
    assert clock.now_ms() == 2750
    await clock.advance(10)
    assert seen == [("a", 1.0), ("b", 2.0)]


async def test_a_periodic_sleeper_wakes_as_often_as_it_should() -> None:
    clock = ManualClock()
    ticks: list[float] = []

    async def tick() -> None:
        while True:
            await clock.sleep(10)
            ticks.append(clock.monotonic())

    task = asyncio.get_running_loop().create_task(tick())
    await clock.advance(60)
    task.cancel()
    assert ticks == [10, 20, 30, 40, 50, 60]


def test_the_fixture_gives_a_broker_with_a_clock_of_its_own(braid_broker: BackgroundBroker) -> None:
    before = braid_broker.broker.clock.now_ms()
    braid_broker.advance(3600)
    assert braid_broker.broker.clock.now_ms() == before + 3_600_000
    assert httpx.get(f"{braid_broker.http_url}/admin/v2/brokers/health").text == "ok"


def test_brokers_are_isolated() -> None:
    with BackgroundBroker() as one, BackgroundBroker() as two:
        assert httpx.put(f"{one.http_url}/admin/v2/persistent/public/default/only-here").status_code == 204
        assert httpx.get(f"{two.http_url}/admin/v2/persistent/public/default").json() == []


async def test_a_durable_broker_keeps_its_data(tmp_path: Path) -> None:
    async with InProcessBroker(data_dir=tmp_path) as broker, braid.connect(broker.service_url) as client:
        await client.consumer("kept", "s")
        producer = await client.producer("kept")
        for number in range(10):
            await producer.send(b"%d" % number)
    async with InProcessBroker(data_dir=tmp_path) as broker, braid.connect(broker.service_url) as client:
        consumer = await client.consumer("kept", "s")
        assert [(await consumer.receive(5)).payload for _number in range(10)] == [b"%d" % number for number in range(10)]


async def test_the_machines_clock_cannot_be_moved() -> None:
    async with InProcessBroker(with_http=False) as broker:
        with pytest.raises(ConfigError, match="ManualClock"):
            await broker.advance(1)


def test_a_failed_start_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match="cannot be used"), BackgroundBroker(data_dir=tmp_path / "file"):
        pass


HIDING = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hidden())
"""


@pytest.mark.parametrize("hidden", [["sortedcontainers"], ["litestar"]], ids=["when-imported", "when-started"])
def test_a_user_without_the_server_extra_is_told_what_to_install(tmp_path: Path, hidden: list[str]) -> None:
    (tmp_path / "hiding.py").write_text(HIDING.format(names=hidden))
    (tmp_path / "test_users.py").write_text("def test_plain(): pass\ndef test_broker(braid_broker): pass\n")
    without = ["hypothesispytest", "schemathesis", "cacheprovider"]  # the first two need one of the packages themselves
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "hiding", *(f"-pno:{each}" for each in without), tmp_path],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "1 passed, 1 error" in ran.stdout, ran.stdout + ran.stderr
    assert f"needs the package {hidden[0]}" in ran.stdout
    assert "braidmq[server]" in ran.stdout
    assert "Traceback" not in ran.stdout
    assert "site-packages" not in ran.stdout  # no stack of ours either


async def test_a_raw_client_that_is_given_up_while_it_connects_leaves_no_connection() -> None:
    class Silent(asyncio.Protocol):
        def data_received(self, data: bytes) -> None:
            connecting.cancel()  # it has said hello, and nobody answers

        def connection_lost(self, exc: Exception | None) -> None:
            over.set()

    over = asyncio.Event()
    listener = await SystemNetwork().listen("127.0.0.1", 0, Silent)
    connecting = asyncio.ensure_future(RawClient.connect(f"pulsar://127.0.0.1:{listener.port}"))
    with pytest.raises(asyncio.CancelledError):
        await connecting
    async with asyncio.timeout(10):
        await over.wait()
    listener.close()
    await asyncio.sleep(0)
