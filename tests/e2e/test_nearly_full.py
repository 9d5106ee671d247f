"""A nearly full disk under a real `braid standalone` process, as its clients and its operator meet it.

The file layer of the process says how much is free by a file of the test, so that no file system has to be mounted or filled:
every refused publish is told to every client at once, with the reason; deleting a topic makes room; the log stays short.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pulsar
import pytest
from tests.e2e.test_disk_faults import Process

import braid
from braid.errors import QuotaExceeded

RESERVE = 64 << 20
PLENTY = 10 << 30
LARGE = bytes(2 << 20)
"""More than is written without a look at the free space."""
TOPIC, OTHER = "persistent://public/default/full", "persistent://public/default/other"
MEASURED_DISK = """
import sys
from pathlib import Path
from braid.runtime.files import SystemFiles
free = Path(sys.argv.pop(1))
SystemFiles.free_bytes = lambda self, directory: int(free.read_text())
from braid.cli.main import main
main()
"""


class Broker(Process):
    """A broker on a disk with as much room as `free` says."""

    def __init__(self, folder: Path) -> None:
        script, self._free = folder / "measured.py", folder / "free"
        script.write_text(MEASURED_DISK)
        self.set_free(PLENTY)
        env = {"BRAID__LEDGER__PROBE_SECONDS": "0.05"}
        super().__init__(folder / "data", command=[sys.executable, str(script), str(self._free)], env=env)
        assert self.http_url

    def set_free(self, size: int) -> None:
        new = self._free.with_suffix(".new")
        new.write_text(str(size))
        new.replace(self._free)

    def get(self, path: str, method: str = "GET") -> tuple[int, str]:
        request = urllib.request.Request(self.http_url + path, method=method)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def gauge(self, name: str) -> float:
        [line] = [line for line in self.get("/metrics")[1].splitlines() if line.startswith(name) and not line.startswith("#")]
        return float(line.split()[-1])


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    started = Broker(tmp_path)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.end(signal.SIGKILL)


@pytest.mark.inv("INV17")
def test_the_official_client_shows_it_at_once_and_goes_on(broker: Broker) -> None:
    """Without a send timeout it would wait for ever if it were not told."""
    client = pulsar.Client(broker.url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    try:
        producer = client.create_producer(TOPIC, send_timeout_millis=0, batching_enabled=False)
        producer.send(LARGE)
        broker.set_free(RESERVE + (1 << 20))
        for _ in range(2):
            with pytest.raises(pulsar.ProducerBlockedQuotaExceededException):
                producer.send(LARGE)
        with pytest.raises(pulsar.ProducerBlockedQuotaExceededException):
            client.create_producer(OTHER)
        broker.set_free(PLENTY)
        while not _is_taken(producer):
            pass  # each attempt waits for the client's own next one
    finally:
        client.close()


def _is_taken(producer: Any) -> bool:
    try:
        producer.send(LARGE)
    except pulsar.ProducerBlockedQuotaExceededException:
        return False
    return True


@pytest.mark.inv("INV17")
@pytest.mark.parametrize("topic", [TOPIC, "topic://public/default/full"])
async def test_the_sdk_shows_it_at_once_and_goes_on(broker: Broker, topic: str) -> None:
    async with braid.connect(broker.url) as client:
        producer = await client.producer(topic)
        consumer = await client.queue_consumer(topic, "reader", initial="earliest")
        await producer.send(LARGE)
        broker.set_free(RESERVE + (1 << 20))
        with pytest.raises(QuotaExceeded, match="nearly full"):
            await producer.send(LARGE)
        results = await asyncio.gather(*[producer.send(b"more") for _ in range(10)], return_exceptions=True)
        assert {type(result) for result in results} == {QuotaExceeded}
        with pytest.raises(QuotaExceeded):
            await client.producer(TOPIC + "-new")
        message = await consumer.receive()
        await consumer.acknowledge(message, wait=True)  # reading and acknowledging go on
        broker.set_free(PLENTY)
        while True:
            with suppress(QuotaExceeded):
                await producer.send(b"again")
                break
        assert (await consumer.receive()).payload == b"again", "what was refused is not stored"
        await producer.close()
        await consumer.close()


async def test_the_operator_sees_it_and_frees_space(broker: Broker) -> None:
    """Delete, expire and unload work out of the reserve; the log has one line at the beginning and one at the end."""
    assert (broker.gauge("braid_storage_free_bytes"), broker.gauge("braid_storage_reserved_bytes")) == (PLENTY, RESERVE)
    assert broker.gauge("braid_storage_writable") == 1
    base = "/admin/v2/persistent/public/default"
    async with braid.connect(broker.url) as client:
        producers = [await client.producer(topic) for topic in (TOPIC, OTHER)]
        for producer in producers:
            await producer.send(LARGE)
        broker.set_free(RESERVE)
        for _ in range(3):
            for producer in producers:
                with pytest.raises(QuotaExceeded):
                    await producer.send(LARGE)
        for free in (RESERVE + (5 << 20), RESERVE + (10 << 20)) * 10:  # room, but not enough to resume
            broker.set_free(free)
            await asyncio.to_thread(lambda: [broker.get("/admin/v2/brokers/health") for _ in range(5)])
            assert broker.gauge("braid_storage_writable") == 0
        status, text = broker.get("/admin/v2/brokers/health")
        assert (status, "nearly full" in text, str(RESERVE) in text) == (503, True, True)
    assert broker.get(f"{base}/other/unload", "PUT")[0] == 204
    assert broker.get(f"{base}/other/subscription/old", "PUT")[0] == 204
    assert broker.get(f"{base}/other/subscription/old/skip_all", "POST")[0] == 204
    assert broker.get(f"{base}/full", "DELETE")[0] == 204
    assert broker.get(f"{base}/full/stats")[0] == 404
    broker.set_free(PLENTY)
    while broker.get("/admin/v2/brokers/health")[0] != 200:
        pass
    code, err = broker.end()
    assert code == 0
    assert "Traceback" not in err
    lines = err.splitlines()
    assert [("is read-only" in line, "has room again" in line) for line in lines] == [(True, False), (False, True)], err
