"""`Standalone` stopped in the middle of everything: it comes to an end, keeps what it acknowledged and leaves no task."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path
from typing import Any

import pytest

from braid.broker.config import BrokerConfig
from braid.errors import BraidError
from braid.managedledger.config import ManagedLedgerConfig
from braid.model.names import TopicName
from braid.model.positions import Position
from braid.runtime.env import Runtime
from braid.testing.files import ForgetfulFiles
from braid.testing.raw_client import RawClient, position_of
from braid.web.config import StandaloneConfig, StorageConfig
from braid.web.standalone import Standalone
from braid.wire.client import Delivery
from braid.wire.types import CommandType, InitialPosition, ProducerAccessMode, SubType

TOPICS = [f"persistent://public/default/t{number}" for number in range(4)]
LOGS = ManagedLedgerConfig(max_entries_per_ledger=5, min_ledger_age_ms=0)
BROKER = BrokerConfig(port=0, http_port=0, deduplication=True, deduplication_snapshot_entries=3)
OVER = (BraidError, ConnectionError, OSError)


class Traffic:
    """Clients that do everything at once, and what they were promised."""

    def __init__(self, url: str, seed: int) -> None:
        self.url = url
        self.random = random.Random(seed)
        self.stored: dict[tuple[str, Position], bytes] = {}
        self.acked: set[tuple[str, str, Position]] = set()
        self.publishers: dict[str, RawClient] = {}
        self.clients: list[RawClient] = []

    async def connect(self) -> RawClient:
        client = await RawClient.connect(self.url, answers_pings=True)
        self.clients.append(client)
        return client

    async def publish(self, topic: str) -> None:
        client = await self.connect()
        await client.producer(topic, name="p")
        self.publishers[topic] = client
        for number in range(100_000):
            client.publish(b"%d" % number, number)
            await asyncio.sleep(0)
            self._receipts(client, topic)
            if client.is_closed:
                return

    def _receipts(self, client: RawClient, topic: str) -> None:
        events, client.inbox = client.inbox, []
        for event in events:
            if not isinstance(event, Delivery) and event.type == CommandType.SEND_RECEIPT:
                self.stored[topic, position_of(event.body.message_id)] = b"%d" % event.body.sequence_id

    async def consume(self, topic: str, sub_type: SubType) -> None:
        client = await self.connect()
        name = sub_type.name
        await client.subscribe(topic, name, sub_type, permits=10_000, initial=InitialPosition.EARLIEST)
        while not client.is_closed:
            for delivery in await client.messages(1):
                position = position_of(delivery.command.message_id)
                if not (await client.acked(position)).HasField("error"):
                    self.acked.add((topic, name, position))

    async def meddle(self, topic: str) -> None:
        """Readers that seek, subscriptions that come and go, producers that wait."""
        client = await self.connect()
        for number in range(1, 1000):
            await client.subscribe(topic, f"s{number % 3}", consumer_id=number, initial=InitialPosition.EARLIEST)
            if number % 2:
                await client.seek(Position(-1, -1), consumer_id=number)
            else:
                await client.unsubscribe(consumer_id=number)
            await client.producer(f"{topic}-x", number, mode=ProducerAccessMode.WAIT_FOR_EXCLUSIVE, name=f"w{number}")

    async def stall(self, topic: str) -> None:
        """A consumer that asks for everything and reads nothing."""
        client = await self.connect()
        await client.subscribe(topic, "stalled", permits=100_000, initial=InitialPosition.EARLIEST)
        client.stop_reading()

    def start(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        works = [self.publish(topic) for topic in TOPICS]
        works += [self.consume(topic, kind) for topic in TOPICS[:2] for kind in (SubType.EXCLUSIVE, SubType.SHARED)]
        works += [self.meddle(TOPICS[2]), self.meddle(TOPICS[3]), self.stall(TOPICS[0])]
        return [group.create_task(self._quietly(work)) for work in works]

    @staticmethod
    async def _quietly(work: Any) -> None:
        with contextlib.suppress(*OVER, AssertionError):
            await work

    def stop(self) -> None:
        for client in self.clients:
            client.close()


async def stop_in_traffic(config: StandaloneConfig, runtime: Runtime, seed: int, turns: int, trouble: Any = None) -> Traffic:
    before = asyncio.all_tasks()
    broker = Standalone(config, runtime, with_http=False)
    await broker.__aenter__()
    traffic = Traffic(broker.service_url, seed)
    async with asyncio.TaskGroup() as group:
        workers = traffic.start(group)
        for _ in range(turns):
            await asyncio.sleep(0)
        if trouble is not None:
            trouble()
        await asyncio.wait_for(broker.__aexit__(None, None, None), 10)
        # What was answered before the end is on its way to the clients: let them read it.
        for _ in range(50):
            await asyncio.sleep(0)
        for topic, client in traffic.publishers.items():
            traffic._receipts(client, topic)
        traffic.stop()
        for worker in workers:
            worker.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert {task.get_name() for task in asyncio.all_tasks() - before} == set()
    return traffic


async def check(config: StandaloneConfig, runtime: Runtime, traffic: Traffic) -> None:
    async with Standalone(config, runtime, with_http=False) as broker:
        for topic in TOPICS:
            promised = {at: payload for (name, at), payload in traffic.stored.items() if name == topic}
            if not promised:
                continue
            client = await RawClient.connect(broker.service_url, answers_pings=True)
            loaded = await broker.service.topic(TopicName.parse(topic), create=False)
            slow = min((each.cursor.mark_delete for each in loaded.subscriptions.values()), default=Position(-1, -1))
            await client.subscribe(topic, "check", initial=InitialPosition.EARLIEST, permits=1_000_000)
            got = await client.messages(loaded.subscriptions["check"].cursor.backlog())
            found = {position_of(each.command.message_id) for each in got}
            assert {at for at in promised if at > slow} <= found
            for of_topic, name, at in traffic.acked:
                if of_topic == topic:
                    assert loaded.subscriptions[name].cursor.is_acknowledged(at)
            client.close()


@pytest.mark.parametrize("turns", [3, 30, 100, 300, 800, 2000])
async def test_a_stop_in_the_middle_of_everything(tmp_path: Path, turns: int) -> None:
    config = StandaloneConfig(broker=BROKER, managed_ledger=LOGS, storage=StorageConfig(data_dir=str(tmp_path)))
    traffic = await stop_in_traffic(config, Runtime(), turns, turns)
    await check(config, Runtime(), traffic)


@pytest.mark.parametrize("turns", [30, 300, 1000])
async def test_a_stop_with_a_full_disk_comes_to_an_end(turns: int) -> None:
    files = ForgetfulFiles(random.Random(turns))
    storage = StorageConfig(data_dir="/disk", metadata_backend="memory", ledger_backend="local")
    config = StandaloneConfig(broker=BROKER, managed_ledger=LOGS, storage=storage)

    def fill() -> None:
        files.capacity = 0

    await stop_in_traffic(config, Runtime(files=files), turns, turns, fill)
