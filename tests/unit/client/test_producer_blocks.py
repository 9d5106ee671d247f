"""Blocks of messages on scalable topics of real brokers: order and count under splits, merges, kills and transactions."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.unit.client.row_block import Row, RowBlock
from tests.unit.client.scalable_cluster import TOPIC, Cluster

import braid
from braid.client import Client, ClientConfig
from braid.client.producer import Producer
from braid.client.transactions import Joinable

QUICK = ClientConfig(
    backoff_initial=0.005, backoff_max=0.05, operation_timeout=20, max_pending_messages=200, block_max_bytes=1024
)
KEYS = [f"key-{number}" for number in range(32)]


class BlockLoad:
    """Sends blocks of numbered rows of several keys all the time, and single messages in between."""

    def __init__(self, producer: Producer, txn: Joinable | None = None) -> None:
        self.producer = producer
        self.futures: list[asyncio.Future[Any]] = []
        self.wanted: dict[str | None, list[bytes]] = defaultdict(list)
        self.count = 0
        self._txn = txn
        self._rng = random.Random(3)
        self._stop = False

    async def run(self) -> None:
        while not self._stop:
            rows = [self._row() for _each in range(self._rng.choice([1, 7, 60, 200]))]
            self.futures.append(await self.producer.send_block(RowBlock(rows), txn=self._txn))
            key, value = self._row()
            await self.producer.room()
            self.futures.append(self.producer.send_nowait(value, key=key, txn=self._txn))
            await asyncio.sleep(0)

    def stop(self) -> None:
        self._stop = True

    def failures(self) -> list[BaseException]:
        return [error for each in self.futures if (error := each.exception()) is not None]

    def _row(self) -> Row:
        key = self._rng.choice(KEYS)
        value = b"%d" % self.count
        self.count += 1
        self.wanted[key].append(value)
        return key, value


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[Client]:
    async with braid.connect(cluster.broker.service_urls, config=QUICK) as made:
        yield made


@pytest.mark.req("R468-47", "R468-51", "R468-56")
@pytest.mark.parametrize("deduplication", [False, True])
@pytest.mark.parametrize("compression", ["none", "lz4"])
async def test_order_and_count_under_splits_and_merges(
    cluster: Cluster, client: Client, deduplication: bool, compression: Any
) -> None:
    await cluster.create(2)
    producer = await client.producer(str(TOPIC), name="p", deduplication=deduplication, compression=compression)
    load = BlockLoad(producer)
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        group.create_task(load.run())
        await cluster.change_often(12, seed=7)
        load.stop()
    await producer.flush()
    assert load.failures() == []
    assert await cluster.stored() == load.wanted
    assert load.count > 1000


@pytest.mark.req("R468-51")
async def test_an_owner_that_is_killed_during_a_split(cluster: Cluster, client: Client) -> None:
    await cluster.create(2)
    producer = await client.producer(str(TOPIC), name="p", deduplication=True)
    load = BlockLoad(producer)
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        group.create_task(load.run())
        await cluster.kill_during_a_split()
        load.stop()
    await producer.flush()
    assert load.failures() == []
    assert await cluster.stored() == load.wanted


@pytest.mark.inv("INV14")
async def test_blocks_of_the_winning_sub_transaction_count_once_across_splits(cluster: Cluster, client: Client) -> None:
    await cluster.create(2)
    decider = await client.begin_decider()
    won, lost = await decider.sub(), await decider.sub()
    loads = [
        BlockLoad(await client.producer(str(TOPIC), name=f"attempt-{txn.number}", deduplication=True), txn)
        for txn in (won, lost)
    ]
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for load in loads:
            group.create_task(load.run())
        await cluster.change_often(5, seed=11)
        for load in loads:
            load.stop()
    await won.finish()
    await decider.decide([won])
    found: dict[str | None, list[bytes]] = defaultdict(list)
    async with asyncio.timeout(60), client.stream_consumer(str(TOPIC), "all") as consumer:
        while sum(map(len, found.values())) < loads[0].count:
            message = await consumer.receive()
            found[message.key].append(message.value)
            await consumer.acknowledge_cumulative(message)
    assert found == loads[0].wanted
