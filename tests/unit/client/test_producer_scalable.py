"""The producer on scalable topics of real brokers: order and count under splits and merges, with owners that are killed."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.unit.client.scalable_cluster import TOPIC, Cluster

import braid
from braid.client import Client, ClientConfig
from braid.client.producer import Producer
from braid.errors import TopicNotFound

QUICK = ClientConfig(backoff_initial=0.005, backoff_max=0.05, operation_timeout=20, max_pending_messages=2000)


class Load:
    """Sends numbered messages of several keys all the time, with up to 500 in flight."""

    def __init__(self, producer: Producer, keys: int = 32) -> None:
        self.producer = producer
        self.futures: list[asyncio.Future[Any]] = []
        self.wanted: dict[str | None, list[bytes]] = defaultdict(list)
        self._keys = [f"key-{number}" for number in range(keys)]
        self._stop = False

    async def run(self) -> None:
        flying: list[asyncio.Future[Any]] = []
        while not self._stop:
            for _each in range(10):
                number = len(self.futures)
                key = self._keys[number % len(self._keys)]
                self.wanted[key].append(b"%d" % number)
                self.futures.append(self.producer.send_nowait(b"%d" % number, key=key))
                flying.append(self.futures[-1])
            await asyncio.sleep(0)
            while len(flying) >= 500 and not self._stop:
                await asyncio.wait(flying, timeout=0.1, return_when=asyncio.FIRST_COMPLETED)
                flying = [each for each in flying if not each.done()]

    def stop(self) -> None:
        self._stop = True


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[Client]:
    async with braid.connect(cluster.broker.service_urls, config=QUICK) as made:
        yield made


@pytest.mark.req("R468-47", "R468-51", "R468-56")
@pytest.mark.parametrize("deduplication", [False, True])
async def test_order_and_count_under_splits_and_merges(cluster: Cluster, client: Client, deduplication: bool) -> None:
    await cluster.create(2)
    producer = await client.producer(str(TOPIC), name="p", deduplication=deduplication)
    load = Load(producer)
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        group.create_task(load.run())
        await cluster.change_often(12, seed=7)
        load.stop()
    await producer.flush()
    assert [each.exception() for each in load.futures if each.exception() is not None] == []
    assert await cluster.stored() == load.wanted
    assert len(load.futures) > 1000


@pytest.mark.req("R468-51")
@pytest.mark.parametrize("deduplication", [False, True])
async def test_an_owner_that_is_killed_during_a_split(cluster: Cluster, client: Client, deduplication: bool) -> None:
    await cluster.create(2)
    producer = await client.producer(str(TOPIC), name="p", deduplication=deduplication)
    load = Load(producer)
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        group.create_task(load.run())
        await cluster.kill_during_a_split()
        load.stop()
    await producer.flush()
    assert [each.exception() for each in load.futures if each.exception() is not None] == []
    stored = await cluster.stored()
    for key, wanted in load.wanted.items():
        if deduplication:
            assert stored[key] == wanted
        else:
            assert list(dict.fromkeys(stored[key])) == wanted


async def test_a_deleted_topic_ends_the_producer(cluster: Cluster, client: Client) -> None:
    await cluster.create(1)
    producer = await client.producer(str(TOPIC))
    await producer.send(b"x")
    leader = await cluster.services[0].scalable.leader_id(TOPIC)
    service = next(each for each in cluster.services if each.ownership.broker_id == leader)
    await service.scalable.delete_topic(TOPIC, force=True)
    with pytest.raises(TopicNotFound):
        async with asyncio.timeout(20):
            while True:
                await producer.send(b"y")


async def test_a_topic_is_made_by_its_first_producer(cluster: Cluster, client: Client) -> None:
    async with client.producer("topic://public/default/new", schema=str) as producer:
        assert (await producer.send("text", key="k")).segment_id == 0


async def test_partitions_that_are_added_are_used(cluster: Cluster, client: Client) -> None:
    """A regular topic is followed by a layout session too."""
    async with braid.AdminClient(cluster.broker.http_url) as admin:
        await admin.topics.create("grown", partitions=1)
        producer = await client.producer("grown")
        assert {(await producer.send(b"x")).partition for _number in range(4)} == {0}
        await admin.topics.grow("grown", 3)
    async with asyncio.timeout(20):
        seen: set[int] = set()
        while seen != {0, 1, 2}:
            sent = await producer.send(b"x")
            assert sent.segment_id == -1
            seen.add(sent.partition)
