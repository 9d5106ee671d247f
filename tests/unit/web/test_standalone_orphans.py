"""`Standalone` sweeps what an earlier process left behind in its ledger store, some time after the start."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import braid
from braid.broker.config import BrokerConfig
from braid.managedledger.config import ManagedLedgerConfig
from braid.managedledger.labels import ledger_labels
from braid.runtime.env import Runtime
from braid.testing.clock import ManualClock
from braid.web.config import StandaloneConfig, StorageConfig
from braid.web.standalone import Standalone


async def ids_of(broker: Standalone) -> set[int]:
    return {ledger_id async for ledger_id in broker.ledgers.ledgers()}


@pytest.mark.parametrize("minutes", [1, 0])
async def test_leftovers_of_an_earlier_process_go(tmp_path: Path, minutes: int) -> None:
    config = StandaloneConfig(
        broker=BrokerConfig(port=0, http_port=0),
        storage=StorageConfig(data_dir=str(tmp_path)),
        managed_ledger=ManagedLedgerConfig(orphan_sweep_minutes=minutes),
    )
    async with Standalone(config, with_http=False) as broker, braid.connect(broker.service_url) as client:
        consumer = await client.consumer("t", "s")
        producer = await client.producer("t")
        for number in range(3):
            await producer.send(b"%d" % number)
        await consumer.acknowledge(await consumer.receive(5), wait=True)
        made = await broker.ledgers.create(custom=ledger_labels("managed-ledger", "public/default/persistent/t", "i"))
        orphan = made.ledger_id
    clock = ManualClock()
    async with Standalone(config, Runtime(clock=clock), with_http=False) as broker:
        before = await ids_of(broker)
        assert orphan in before
        under_creation = (await broker.ledgers.create(custom=ledger_labels("managed-ledger", "t", ""))).ledger_id
        for _minute in range(3):
            await clock.advance(61)
        async with asyncio.timeout(5):
            while minutes and orphan in await ids_of(broker):  # noqa: ASYNC110 - the disk takes its own time
                await asyncio.sleep(0.01)
        assert await ids_of(broker) == (before | {under_creation}) - ({orphan} if minutes else set())
    async with (
        Standalone(config, with_http=False) as broker,
        braid.connect(broker.service_url) as client,
    ):
        consumer = await client.consumer("t", "s")
        assert [(await consumer.receive(5)).payload for _number in range(2)] == [b"1", b"2"]
