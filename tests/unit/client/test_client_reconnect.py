"""The SDK when the broker goes away: nothing acknowledged is lost, order is kept, waiting calls go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

import braid
from braid.broker.config import BrokerConfig
from braid.client import ClientConfig
from braid.client.connection import Connection
from braid.errors import DeadlineExceeded, MetadataFailure
from braid.runtime.env import Runtime
from braid.testing.broker import InProcessBroker
from braid.testing.clock import ManualClock
from braid.web.config import StandaloneConfig
from braid.wire import requests

QUICK = ClientConfig(backoff_initial=0.005, backoff_max=0.02, operation_timeout=5)


def at_port(url: str) -> StandaloneConfig:
    return StandaloneConfig(broker=BrokerConfig(port=int(url.rpartition(":")[2])))


async def until(holds: Callable[[], bool]) -> None:
    """Let the loop turn until something that no event announces has happened."""
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0)


async def test_a_restart_loses_nothing_and_keeps_order(tmp_path: Path) -> None:
    async with InProcessBroker(data_dir=tmp_path, with_http=False) as broker:
        url = broker.service_url
        client = await braid.connect(url, config=QUICK).__aenter__()
        consumer = await client.consumer("t", "s")
        producer = await client.producer("t", batching=False)
        futures = [producer.send_nowait(b"%d" % number) for number in range(50)]
        await producer.flush()
        futures += [producer.send_nowait(b"%d" % number) for number in range(50, 100)]
    await until(lambda: not producer.is_connected)
    futures += [producer.send_nowait(b"%d" % number) for number in range(100, 150)]
    async with InProcessBroker(data_dir=tmp_path, config=at_port(url), with_http=False):
        ids = [await future for future in futures]
        assert ids == sorted(ids)
        seen: list[int] = []
        while len(set(seen)) < 150:
            message = await consumer.receive(5)
            seen.append(int(message.payload))
            await consumer.acknowledge(message)
        await client.close()
    # Messages in flight at the end may be stored twice (deduplication is off), but never out of order.
    firsts = list(dict.fromkeys(seen))
    assert firsts == list(range(150))


async def test_with_deduplication_a_restart_duplicates_nothing(tmp_path: Path) -> None:
    config = StandaloneConfig(broker=BrokerConfig(deduplication=True))
    async with InProcessBroker(data_dir=tmp_path, config=config, with_http=False) as broker:
        url = broker.service_url
        client = await braid.connect(url, config=QUICK).__aenter__()
        consumer = await client.consumer("t", "s")
        producer = await client.producer("t", name="p", batching=False)
        futures = [producer.send_nowait(b"%d" % number) for number in range(100)]
        await asyncio.sleep(0)
    again = msgspec.structs.replace(config, broker=msgspec.structs.replace(at_port(url).broker, deduplication=True))
    async with InProcessBroker(data_dir=tmp_path, config=again, with_http=False):
        await producer.flush()
        assert all(future.exception() is None for future in futures)
        await producer.send(b"100")
        reader = await client.consumer("t", "all", initial="earliest")
        got = [int((await reader.receive(5)).payload) for _number in range(101)]
        await consumer.close()
        await client.close()
    assert got == list(range(101))


async def test_an_unloaded_topic_is_found_again() -> None:
    async with InProcessBroker() as broker, braid.connect(broker.service_url, config=QUICK) as client:
        consumer = await client.consumer("t", "s")
        producer = await client.producer("t")
        async with httpx.AsyncClient(base_url=broker.http_url) as http:
            for number in range(5):
                waiting = asyncio.gather(consumer.receive(5))
                await producer.send(b"%d" % number)
                message = (await waiting)[0]
                assert message.payload == b"%d" % number
                await consumer.acknowledge(message, wait=True)
                assert (await http.put("/admin/v2/persistent/public/default/t/unload")).status_code == 204


async def test_acknowledgements_made_while_away_are_sent_later() -> None:
    async with InProcessBroker(with_http=False) as broker, braid.connect(broker.service_url, config=QUICK) as client:
        consumer = await client.consumer("t", "s", type="shared")
        producer = await client.producer("t", batching=False)
        await producer.send(b"1")
        message = await consumer.receive(5)
        for connection in list(broker.standalone.server.connections):
            connection.link.abort()
        await asyncio.sleep(0)
        await consumer.acknowledge(message, wait=True)
        subscription = broker.standalone.service.topics["persistent://public/default/t"].subscriptions["s"]
        assert subscription.cursor.backlog() == 0


async def test_a_send_fails_after_its_timeout_and_all_behind_it() -> None:
    clock = ManualClock()
    async with InProcessBroker(with_http=False) as broker:
        client = await braid.connect(broker.service_url, runtime=Runtime(clock=clock)).__aenter__()
        producer = await client.producer("t", batching=False)
    futures = [producer.send_nowait(b"x") for _number in range(3)]
    await clock.advance(59)
    assert not any(future.done() for future in futures)
    await clock.advance(2)
    for future in futures:
        with pytest.raises(DeadlineExceeded, match="60 s"):
            future.result()
    await client.close()


async def test_a_silent_broker_is_left() -> None:
    """PING goes out; a connection on which nothing comes back is dropped."""
    silent: list[asyncio.Transport] = []

    class Silent(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            silent.append(transport)  # type: ignore[arg-type]

    clock = ManualClock()
    runtime = Runtime(clock=clock)
    listener = await runtime.network.listen("localhost", 0, Silent)
    connecting = asyncio.gather(
        braid.connect(f"pulsar://localhost:{listener.port}", runtime=runtime).__aenter__(), return_exceptions=True
    )
    await until(lambda: bool(silent and clock._timers))
    await clock.advance(11)
    assert "did not accept" in str((await connecting)[0])
    listener.close()
    for transport in silent:
        transport.abort()
    await asyncio.sleep(0)


async def test_a_topic_that_moves_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Brokers answer a lookup with MetadataError while a topic changes hands: that is no reason to give up."""
    honest = Connection.request
    refusals: list[Any] = []

    async def moving(self: Connection, build: Any, *args: Any, **options: Any) -> Any:
        if build(0)[8:10] == requests.lookup(0, "x", False)[8:10] and len(refusals) < 2:
            refusals.append(build)
            raise MetadataFailure("The topic is being moved.")
        return await honest(self, build, *args, **options)

    async with InProcessBroker(with_http=False) as broker, braid.connect(broker.service_url, config=QUICK) as client:
        monkeypatch.setattr(Connection, "request", moving)
        async with client.producer("moving") as producer:
            await producer.send(b"x")
    assert len(refusals) == 2
