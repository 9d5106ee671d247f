"""Three brokers and real clients: topics spread, clients follow, a third of the cluster may go."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pulsar
import pytest

from braid.broker.config import BrokerConfig
from braid.model.names import NamespaceName, TopicName
from braid.testing.broker import BackgroundBroker
from braid.web.config import StandaloneConfig, StorageConfig

PUBLIC = NamespaceName.parse("public/default")
CONFIG = StandaloneConfig(
    broker=BrokerConfig(balance=False, reconcile_seconds=0.5, retention_minutes=-1, retention_mb=-1),
    storage=StorageConfig(session_timeout_seconds=1.0),
)


@pytest.fixture
def cluster() -> Iterator[BackgroundBroker]:
    with BackgroundBroker(brokers=3, config=CONFIG, with_http=False) as brokers:
        yield brokers


@pytest.fixture
def client(cluster: BackgroundBroker) -> Iterator[pulsar.Client]:
    client = pulsar.Client(cluster.service_url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    yield client
    client.close()


def owned(cluster: BackgroundBroker) -> list[int]:
    """Bundles of each broker."""

    async def count() -> list[int]:
        return [len(node.service.ownership.owned().get(PUBLIC, [])) for node in cluster.broker.nodes]

    return cluster.run(count())


def topics(cluster: BackgroundBroker) -> list[set[str]]:
    async def names() -> list[set[str]]:
        return [set(node.service.topics) for node in cluster.broker.nodes]

    return cluster.run(names())


def payloads(client: pulsar.Client, topic: str, count: int) -> list[bytes]:
    reader = client.create_reader(topic, pulsar.MessageId.earliest)
    found: list[bytes] = [reader.read_next(timeout_millis=10_000).data() for _ in range(count)]
    assert not reader.has_message_available()
    reader.close()
    return found


def test_topics_spread_and_are_reached_through_any_broker(cluster: BackgroundBroker, client: pulsar.Client) -> None:
    producer = client.create_producer("spread-0")
    producer.send(b"x")
    names = [f"spread-{number}" for number in range(24)]
    for name in names:
        client.create_producer(name).send(name.encode())
    assert sorted(owned(cluster)) == [1, 1, 2]
    loaded = topics(cluster)
    assert all(loaded)
    assert not loaded[0] & loaded[1]
    assert sum(map(len, loaded)) == 24
    for number in range(3):
        url = cluster.broker.nodes[number].service_url
        other = pulsar.Client(url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
        for name in names[1::5]:
            assert payloads(other, name, 1) == [name.encode()]
        assert len(other.get_topic_partitions("spread-3")) == 1
        other.close()


def test_a_partitioned_topic_is_served_by_all_brokers(cluster: BackgroundBroker, client: pulsar.Client) -> None:
    async def create() -> None:
        await cluster.broker.standalone.service.create_partitioned(TopicName.parse("wide"), 12)

    cluster.run(create())
    consumer = client.subscribe("wide", "sub", consumer_type=pulsar.ConsumerType.Shared)
    producer = client.create_producer("wide", message_routing_mode=pulsar.PartitionsRoutingMode.RoundRobinDistribution)
    sent = {b"%d" % number for number in range(120)}
    for payload in sorted(sent):
        producer.send_async(payload, None)
    producer.flush()
    received: set[bytes] = set()
    while len(received) < len(sent):
        message = consumer.receive(timeout_millis=10_000)
        received.add(message.data())
        consumer.acknowledge(message)
    assert received == sent
    assert all(topics(cluster)), "every broker has some of the partitions"


def test_every_bundle_is_transferred_under_load_and_order_is_kept(cluster: BackgroundBroker, client: pulsar.Client) -> None:
    """No deduplication: a clean hand-over needs none."""
    name = "load"
    producer = client.create_producer(
        name, producer_name="p", send_timeout_millis=0, block_if_queue_full=True, batching_enabled=False
    )
    stored: list[int] = []
    count = 0

    async def transfer(round_: int) -> None:
        for number, node in enumerate(list(cluster.broker.nodes)):
            target = cluster.broker.nodes[(number + 1 + round_ % 2) % 3].broker_id
            for bundle in node.service.ownership.owned().get(PUBLIC, []):
                await node.service.ownership.unload(PUBLIC, bundle, destination=target)

    for round_ in range(6):
        for _ in range(100):
            producer.send_async(b"%d" % count, lambda _result, _id, number=count: stored.append(number))
            count += 1
        cluster.run(transfer(round_))
    producer.flush()
    assert stored == list(range(count))
    assert payloads(client, name, count) == [b"%d" % number for number in range(count)]


def test_the_topics_of_a_killed_broker_move_when_its_session_has_run_out(
    cluster: BackgroundBroker, client: pulsar.Client
) -> None:
    names = [f"kill-{number}" for number in range(12)]
    producers = {name: client.create_producer(name, send_timeout_millis=0) for name in names}
    for name, producer in producers.items():
        producer.send(b"before " + name.encode())
    victim = max((1, 2), key=lambda number: owned(cluster)[number])  # not the one that the client was given
    hit = {name for name in names if f"persistent://public/default/{name}" in topics(cluster)[victim]}
    assert hit
    began = time.monotonic()
    cluster.kill(victim)
    for name, producer in producers.items():
        producer.send(b"after " + name.encode())
    took = time.monotonic() - began
    assert took < 20
    for name in names:
        assert payloads(client, name, 2) == [b"before " + name.encode(), b"after " + name.encode()]
    assert owned(cluster)[victim] == 0
    assert sum(owned(cluster)) == 4


def test_a_broker_paused_past_its_session_comes_back_as_one_among_others(
    cluster: BackgroundBroker, client: pulsar.Client
) -> None:
    names = [f"sleep-{number}" for number in range(12)]
    for name in names:
        client.create_producer(name).send(b"1")
    paused = max((1, 2), key=lambda number: owned(cluster)[number])
    cluster.pause(paused)
    stale = cluster.broker.nodes[paused]

    async def expired() -> None:
        async with asyncio.timeout(10):
            while len(await cluster.broker.nodes[0].service.ownership.brokers()) == 3:  # noqa: ASYNC110 - real time
                await asyncio.sleep(0.05)

    cluster.run(expired())
    assert stale.service.topics, "it goes on serving as if nothing had happened"
    other = pulsar.Client(cluster.service_url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    for name in names:
        other.create_producer(name).send(b"2")
    cluster.resume(paused)

    async def back() -> None:
        async with asyncio.timeout(10):
            while len(await stale.service.ownership.brokers()) < 3 or stale.service.ownership.owned():  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    cluster.run(back())
    for name in names:
        assert payloads(other, name, 2) == [b"1", b"2"]
    other.close()


def test_drain_of_a_broker_under_real_clients(cluster: BackgroundBroker, client: pulsar.Client) -> None:
    producers = [client.create_producer(f"drain-{number}", send_timeout_millis=0) for number in range(12)]
    for producer in producers:
        producer.send(b"1")
    node = cluster.broker.nodes[1]
    cluster.run(node.service.ownership.drain())
    assert owned(cluster)[1] == 0
    for producer in producers:
        producer.send(b"2")
    assert owned(cluster)[1] == 0
    assert sum(owned(cluster)) == 4


def test_the_command_starts_several_brokers_and_names_them_all(tmp_path: Path) -> None:
    process: Any = subprocess.Popen(
        [
            *(sys.executable, "-m", "braid.cli.main", "standalone", "--brokers", "3"),
            *("--port", "0", "--http-port", "0", "--data-dir", str(tmp_path)),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        word, binary, http = process.stdout.readline().split()
        assert word == "ready"
        assert binary.startswith("pulsar://")
        assert len(set(binary.removeprefix("pulsar://").split(","))) == 3
        assert len(set(http.removeprefix("http://").split(","))) == 3
        client = pulsar.Client(binary, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
        for number in range(8):
            client.create_producer(f"t{number}").send(b"x")
        client.close()
    finally:
        process.terminate()
        assert process.wait(20) == 0
        process.stdout.close()
