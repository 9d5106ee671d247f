"""Bulk reads while topics move: brokers that stop, die or sleep, splits, data on a disk that is opened again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import braid
from braid.broker.config import BrokerConfig
from braid.client import Client
from braid.client.config import ClientConfig
from braid.client.segment_reads import SegmentReads, SegmentState
from braid.errors import DataLost, NotReady
from braid.managedledger.config import ManagedLedgerConfig
from braid.model.names import TopicName
from braid.runtime.env import Runtime
from braid.scalable.controller import ScalableTopicController
from braid.testing.broker import InProcessBroker
from braid.web.config import StandaloneConfig, StorageConfig

TOPIC = "topic://public/default/orders"
NAME = TopicName.parse(TOPIC)
MB = 1 << 20
CONFIG = ClientConfig(operation_timeout=30, backoff_initial=0.01, backoff_max=0.2)
LEDGERS = ManagedLedgerConfig(max_entries_per_ledger=20, min_ledger_age_ms=0)
SMALL_LEDGERS = StandaloneConfig(managed_ledger=LEDGERS)
CLUSTER = StandaloneConfig(
    managed_ledger=LEDGERS,
    storage=StorageConfig(session_timeout_seconds=2.0),
    broker=BrokerConfig(retention_minutes=-1, retention_mb=-1, balance=False),
)


async def produce(client: Client, first: int, last: int) -> None:
    async with client.producer(TOPIC, batching=False) as producer:
        await asyncio.gather(*[producer.send(b"%d" % number, key=f"key-{number % 8}") for number in range(first, last)])


async def all_states(reads: SegmentReads) -> list[SegmentState]:
    view = await reads.topic(TOPIC)
    states = await reads.states([each.topic for each in view.segments.values()])
    return [states[each.topic] for each in view.segments.values()]


async def bodies(reads: SegmentReads, state: SegmentState, step: int = 7) -> bytes:
    """Everything of a segment, in many small reads."""
    found = b""
    at = state.low
    while at < state.stable:
        got = await reads.fetch(state.topic, state.incarnation, at, min(at + step, state.stable), max_bytes=MB)
        found += bytes(got.data)
        at = got.covered_to
    return found


@pytest.mark.inv("INV2")
@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_reads_follow_their_topic_to_another_broker(how: str) -> None:
    async with InProcessBroker(brokers=3, config=CLUSTER) as cluster:
        await cluster.nodes[0].service.create_scalable_topic(NAME, 4)
        async with braid.connect(cluster.service_urls, config=CONFIG) as client:
            await produce(client, 0, 200)
            reads = client.segment_reads()
            states = await all_states(reads)
            before = [await bodies(reads, state) for state in states]
            reading = [asyncio.create_task(bodies(reads, state, 1)) for state in states]
            victim = next(
                number for number, node in enumerate(cluster.nodes) if any("orders" in name for name in node.service.topics)
            )
            await (cluster.stop(victim) if how == "stop" else cluster.kill(victim))
            assert await asyncio.gather(*reading) == before
            after = await all_states(reads)
            assert [(each.low, each.stable, each.end) for each in after] == [(0, each.end, each.end) for each in states]


async def test_a_split_and_a_merge_leave_every_range_as_it_was() -> None:
    async with InProcessBroker(with_http=False) as broker:
        await broker.nodes[0].service.create_scalable_topic(NAME, 1)
        async with braid.connect(broker.service_url, config=CONFIG) as client:
            await produce(client, 0, 100)
            reads = client.segment_reads()
            (first,) = await all_states(reads)
            before = await bodies(reads, first)
            controller = await broker.nodes[0].service.scalable.lead(NAME)
            assert isinstance(controller, ScalableTopicController)
            reading = asyncio.create_task(bodies(reads, first, 1))
            await controller.split_segment(0)
            assert await reading == before
            await produce(client, 100, 200)
            await controller.merge_segments(1, 2)
            await produce(client, 200, 250)
            async with asyncio.timeout(10):
                while (await reads.topic(TOPIC)).next_id < 4:  # noqa: ASYNC110 - brokers tell in their own time
                    await asyncio.sleep(0.005)
            states = await all_states(reads)
            assert [each.is_sealed for each in states] == [True, True, True, False]
            assert sum(each.end for each in states) == 250
            assert await bodies(reads, states[0]) == before
            assert states[3].end == 50


async def test_what_is_on_a_disk_is_read_after_a_restart(tmp_path: Path) -> None:
    found = []
    for turn in range(2):
        async with InProcessBroker(with_http=False, data_dir=tmp_path, config=SMALL_LEDGERS) as broker:
            if turn == 0:
                await broker.nodes[0].service.create_scalable_topic(NAME, 2)
            async with braid.connect(broker.service_url, config=CONFIG) as client:
                if turn == 0:
                    reads = client.segment_reads()
                    for state in await all_states(reads):  # nothing is trimmed then
                        await reads.move_cursor(state.topic, state.incarnation, "keeps", 0)
                    await produce(client, 0, 300)
                reads = client.segment_reads()
                states = await all_states(reads)
                found.append([(each, await bodies(reads, each)) for each in states])
    assert [(each.incarnation, each.low, each.end, data) for each, data in found[0]] == [
        (each.incarnation, each.low, each.end, data) for each, data in found[1]
    ]
    assert sum(each.end for each, _data in found[1]) == 300


async def test_data_that_goes_while_it_is_read_is_told() -> None:
    async with InProcessBroker(with_http=False, config=SMALL_LEDGERS) as broker:
        await broker.nodes[0].service.create_scalable_topic(NAME, 1)
        async with braid.connect(broker.service_url, config=CONFIG) as client:
            reads = client.segment_reads()
            (state,) = await all_states(reads)
            await reads.move_cursor(state.topic, state.incarnation, "keeps", 0)
            await produce(client, 0, 100)
            await reads.fetch(state.topic, state.incarnation, 0, 10, max_bytes=MB)
            await reads.move_cursor(state.topic, state.incarnation, "keeps", 70)
            await broker.nodes[0].service.topics[state.topic].log.trim()
            (state,) = await all_states(reads)
            assert state.low == 60
            with pytest.raises(DataLost) as lost:
                await reads.fetch(state.topic, state.incarnation, 10, 100, max_bytes=MB)
            assert lost.value.low == 60
            with pytest.raises(DataLost):
                await reads.offset_for(state.topic, state.incarnation, 59, max_messages=5, max_bytes=None)
            assert (await reads.fetch(state.topic, state.incarnation, 60, 100, max_bytes=MB)).covered_to == 100


async def test_many_segments_are_described_by_few_requests() -> None:
    async with InProcessBroker(brokers=2) as cluster:
        await cluster.nodes[0].service.create_scalable_topic(NAME, 64)
        async with braid.connect(cluster.service_urls, config=CONFIG) as client:
            reads = client.segment_reads()
            view = await reads.topic(TOPIC)
            names = [each.topic for each in view.segments.values()]
            assert len(await reads.states(names)) == 64
            asked = 0
            for connection in client.pool.connections.values():
                request = connection.request

                async def counted(build: object, request: object = request, **options: object) -> object:
                    nonlocal asked
                    asked += 1
                    return await request(build, **options)  # type: ignore[operator]

                connection.request = counted  # type: ignore[method-assign]
            states = await reads.states(names)
            assert {state.end for state in states.values()} == {0}
            assert asked <= 2, "one for each owner"
            gone = "segment://public/default/orders/0000-ffff-99"
            assert gone not in await reads.states([*names, gone])


async def test_a_broker_that_is_away_is_waited_for_and_no_longer() -> None:
    async with InProcessBroker(with_http=False, config=StandaloneConfig(broker=BrokerConfig(port=0))) as broker:
        await broker.nodes[0].service.create_scalable_topic(NAME, 1)
        config = ClientConfig(operation_timeout=0.5, backoff_initial=0.01, backoff_max=0.1, connect_timeout=0.5)
        async with braid.connect(broker.service_url, config=config, runtime=Runtime()) as client:
            await produce(client, 0, 5)
            reads = client.segment_reads()
            (state,) = await all_states(reads)
            await broker.kill(0)
            with pytest.raises((braid.errors.TransportError, NotReady)):
                await reads.fetch(state.topic, state.incarnation, 0, 5, max_bytes=MB)
            with pytest.raises((braid.errors.TransportError, NotReady)):
                await reads.states([state.topic])
