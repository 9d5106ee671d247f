"""`Standalone` and its storage: fatal errors are reported, a full disk is survived, a failed start leaves nothing behind."""

from __future__ import annotations

import asyncio
import errno
import random
from pathlib import Path

import httpx
import pytest

import braid
from braid.broker.config import BrokerConfig
from braid.client import ClientConfig
from braid.errors import BraidError, ConfigError, DataDirectoryBusy
from braid.runtime.env import Runtime
from braid.testing.files import ForgetfulFiles
from braid.web import http as web_http
from braid.web.config import StandaloneConfig, StorageConfig
from braid.web.standalone import Standalone

CONFIG = StandaloneConfig(
    broker=BrokerConfig(port=0, http_port=0),
    storage=StorageConfig(data_dir="/disk", metadata_backend="memory", ledger_backend="local"),
)
IMPATIENT = ClientConfig(send_timeout=0.2)


async def test_a_failed_sync_ends_the_broker() -> None:
    files = ForgetfulFiles(random.Random(1))
    fatal: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
    async with (
        Standalone(CONFIG, Runtime(files=files), on_fatal=fatal.set_result, with_http=False) as broker,
        braid.connect(broker.service_url, config=IMPATIENT) as client,
    ):
        producer = await client.producer("t")
        await producer.send(b"kept")
        files.fail("sync", "", errno.EIO)
        with pytest.raises(BraidError):
            await producer.send(b"lost")
        assert isinstance(await asyncio.wait_for(fatal, 5), BaseException)


async def test_a_full_disk_is_shown_and_survived() -> None:
    files = ForgetfulFiles(random.Random(1))
    fatal: list[BaseException] = []
    async with (
        Standalone(CONFIG, Runtime(files=files), on_fatal=fatal.append) as broker,
        braid.connect(broker.service_url, config=IMPATIENT) as client,
        httpx.AsyncClient(base_url=broker.http_url) as http,
    ):
        producer = await client.producer("t")
        await producer.send(b"fits")
        files.capacity = 0
        with pytest.raises(BraidError):
            await producer.send(b"does not fit")
        health = await http.get("/admin/v2/brokers/health")
        assert (health.status_code, "full" in health.json()["reason"]) == (503, True)
        files.capacity = 1 << 40
        while (await http.get("/admin/v2/brokers/health")).status_code != 200:  # noqa: ASYNC110 - the store probes for room
            await asyncio.sleep(0.05)
        await (await client.producer("t", name="again")).send(b"fits again")
    assert fatal == []


async def test_a_start_that_fails_releases_everything(tmp_path: Path) -> None:
    storage = StorageConfig(data_dir=str(tmp_path))
    taken = StandaloneConfig(broker=BrokerConfig(port=0, http_port=0), storage=storage)
    async with Standalone(taken) as broker:
        with pytest.raises(DataDirectoryBusy):
            await Standalone(taken).__aenter__()
        port = int(broker.service_url.rpartition(":")[2])
        other = StandaloneConfig(broker=BrokerConfig(port=port), storage=StorageConfig(data_dir=str(tmp_path / "other")))
        for _attempt in range(2):  # the second would find a lock if the first had kept one
            with pytest.raises(ConfigError, match="cannot listen"):
                await Standalone(other).__aenter__()


async def test_an_unknown_backend_names_those_there_are() -> None:
    config = StandaloneConfig(storage=StorageConfig(ledger_backend="locl", metadata_backend="memory", data_dir="/disk"))
    with pytest.raises(ConfigError, match="did you mean local"):
        await Standalone(config, Runtime(files=ForgetfulFiles(random.Random(1)))).__aenter__()


async def test_http_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_http, "MAX_CONNECTIONS", 2)
    memory = StandaloneConfig(
        broker=BrokerConfig(port=0, http_port=0), storage=StorageConfig(metadata_backend="memory", ledger_backend="memory")
    )
    async with Standalone(memory) as broker:
        host, _, port = broker.http_url.removeprefix("http://").partition(":")
        held = [await asyncio.open_connection(host, int(port)) for _number in range(2)]
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            assert await reader.read() == b""
        except ConnectionError:
            pass
        for _reader, each in (*held, (reader, writer)):
            each.close()
            try:
                await each.wait_closed()
            except ConnectionError:
                continue
