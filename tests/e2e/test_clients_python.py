"""The official Python client (its C++ library) against a real `braid standalone` process, restarted in the middle."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pulsar
import pytest
from _pulsar import ProducerAccessMode

pytestmark = pytest.mark.req("R468-87")
"""Topics of clients that know nothing of scalable ones, on a broker that has some, with segments of both states."""
SCALABLE = "topic://public/default/beside"
SEGMENT = "segment://public/default/beside/8000-ffff-1"
WAIT_MS = 10_000
QUIET_MS = 300


class Standalone:
    """A broker process on a data directory; the port stays the same over restarts."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self.port = 0
        self.url = self.http_url = ""
        self._process: subprocess.Popen[str]

    def start(self) -> None:
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "braid.cli.main", "standalone"),
                *("--data-dir", str(self._data_dir), "--port", str(self.port), "--http-port", "0"),
            ],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"BRAID__BROKER__MAX_MESSAGE_SIZE": "102400"},
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line.startswith("ready pulsar://"), line
        self.url, self.http_url = line.split()[1:3]
        self.port = int(self.url.rpartition(":")[2])

    def admin(self, method: str, path: str, body: bytes | None = None) -> str:
        request = urllib.request.Request(self.http_url + path, body, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request) as answer:
            return str(answer.read().decode())

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._reap()

    def stop(self) -> int:
        self._process.send_signal(signal.SIGTERM)
        return self._reap()

    def _reap(self) -> int:
        code = self._process.wait(20)
        if self._process.stdout is not None:
            self._process.stdout.close()
        return code


@pytest.fixture(scope="module")
def standalone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    process = Standalone(tmp_path_factory.mktemp("braid"))
    process.start()
    process.admin("PUT", "/admin/v2/scalable/public/default/beside?numInitialSegments=2")
    process.admin("POST", "/admin/v2/scalable/public/default/beside/split/0")
    yield process
    # Nothing of one kind came to be among the other.
    assert json.loads(process.admin("GET", "/admin/v2/scalable/public/default")) == [SCALABLE]
    assert not [each for each in json.loads(process.admin("GET", "/admin/v2/persistent/public/default")) if "beside" in each]
    assert process.stop() == 0


@pytest.fixture
def client(standalone: Standalone) -> Iterator[Any]:
    made = pulsar.Client(standalone.url, logger=pulsar.FileLogger(pulsar.LoggerLevel.Error, os.devnull))
    yield made
    made.close()


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    name: str = request.node.name
    return "e2e-" + name.replace("[", "-").replace("]", "")


def received(consumer: Any, count: int, *, ack: bool = True) -> list[bytes]:
    payloads = []
    for _ in range(count):
        message = consumer.receive(WAIT_MS)
        payloads.append(message.data())
        if ack:
            consumer.acknowledge(message)
    return payloads


def assert_quiet(consumer: Any) -> None:
    with pytest.raises(pulsar.Timeout):
        consumer.receive(QUIET_MS)


def payloads(count: int) -> list[bytes]:
    return [b"message %d" % number for number in range(count)]


@pytest.mark.parametrize(
    "compression",
    [
        pulsar.CompressionType.NONE,
        pulsar.CompressionType.LZ4,
        pulsar.CompressionType.ZLib,
        pulsar.CompressionType.ZSTD,
        pulsar.CompressionType.SNAPPY,
    ],
    ids=str,
)
@pytest.mark.parametrize("batching", [True, False], ids=["batches", "single"])
def test_every_compression_with_and_without_batches(client: Any, compression: Any, batching: bool) -> None:
    topic = f"e2e-{compression}-{batching}"
    consumer = client.subscribe(topic, "sub")
    producer = client.create_producer(
        topic, compression_type=compression, batching_enabled=batching, batching_max_publish_delay_ms=5
    )
    for payload in payloads(50):
        producer.send_async(payload, callback=None)
    producer.flush()
    assert received(consumer, 50) == payloads(50)


@pytest.mark.parametrize(
    "kind", [pulsar.ConsumerType.Exclusive, pulsar.ConsumerType.Shared, pulsar.ConsumerType.Failover], ids=str
)
def test_what_is_acknowledged_is_not_seen_again_by_any_type(client: Any, topic: str, kind: Any) -> None:
    consumer = client.subscribe(topic, "sub", consumer_type=kind)
    producer = client.create_producer(topic)
    for payload in payloads(10):
        producer.send(payload)
    assert received(consumer, 4) == payloads(10)[:4]
    consumer.close()
    consumer = client.subscribe(topic, "sub", consumer_type=kind)
    assert received(consumer, 6) == payloads(10)[4:]
    assert_quiet(consumer)


def test_shared_consumers_share_and_failover_takes_over(client: Any, topic: str) -> None:
    consumers = [client.subscribe(topic, "shared", consumer_type=pulsar.ConsumerType.Shared) for _ in range(2)]
    first = client.subscribe(topic, "failover", consumer_type=pulsar.ConsumerType.Failover, consumer_name="a")
    second = client.subscribe(topic, "failover", consumer_type=pulsar.ConsumerType.Failover, consumer_name="b")
    producer = client.create_producer(topic)
    for payload in payloads(40):
        producer.send(payload)
    got = [received(consumer, 20) for consumer in consumers]
    assert sorted(got[0] + got[1]) == sorted(payloads(40))
    assert received(first, 20) == payloads(40)[:20]
    first.close()
    assert received(second, 20) == payloads(40)[20:]


def test_chunked_messages(client: Any, topic: str) -> None:
    consumer = client.subscribe(topic, "sub")
    producer = client.create_producer(topic, chunking_enabled=True, batching_enabled=False)
    large = os.urandom(1_000_000)
    producer.send(large)
    producer.send(b"small")
    assert received(consumer, 2) == [large, b"small"]


def test_partitioned_topics(client: Any, topic: str, standalone: Standalone) -> None:
    standalone.admin("PUT", f"/admin/v2/persistent/public/default/{topic}/partitions", b"3")
    assert len(client.get_topic_partitions(topic)) == 3
    consumers = [
        client.subscribe(topic, "sub", consumer_type=pulsar.ConsumerType.Failover, consumer_name=name) for name in "ab"
    ]
    producer = client.create_producer(topic, message_routing_mode=pulsar.PartitionsRoutingMode.RoundRobinDistribution)
    for payload in payloads(30):
        producer.send(payload)
    got: list[bytes] = []
    partitions = set()
    for consumer in consumers:
        while len(got) < 30:
            try:
                message = consumer.receive(QUIET_MS)
            except pulsar.Timeout:
                break
            got.append(message.data())
            partitions.add(message.partition_key() or message.message_id().partition())
    assert sorted(got) == sorted(payloads(30))
    assert len(partitions) == 3


def test_readers_seek_and_know_what_is_there(client: Any, topic: str) -> None:
    producer = client.create_producer(topic)
    ids = [producer.send(payload) for payload in payloads(10)]
    reader = client.create_reader(topic, pulsar.MessageId.earliest)
    assert [reader.read_next(WAIT_MS).data() for _ in range(10)] == payloads(10)
    assert not reader.has_message_available()
    reader.seek(ids[4])
    assert reader.has_message_available()
    assert reader.read_next(WAIT_MS).data() == b"message 5"
    middle = client.create_reader(topic, ids[7], start_message_id_inclusive=True)
    assert middle.read_next(WAIT_MS).data() == b"message 7"
    end = client.create_reader(topic, pulsar.MessageId.latest)
    assert not end.has_message_available()


def test_negative_acknowledgment_and_dead_letters(client: Any, topic: str) -> None:
    policy = pulsar.ConsumerDeadLetterPolicy(
        max_redeliver_count=2, dead_letter_topic=f"{topic}-dead", initial_subscription_name="dlq"
    )
    consumer = client.subscribe(
        topic,
        "sub",
        consumer_type=pulsar.ConsumerType.Shared,
        negative_ack_redelivery_delay_ms=50,
        dead_letter_policy=policy,
    )
    producer = client.create_producer(topic)
    producer.send(b"bad")
    counts = []
    for _ in range(3):
        message = consumer.receive(WAIT_MS)
        counts.append(message.redelivery_count())
        consumer.negative_acknowledge(message)
    assert counts == [0, 1, 2]
    dead = client.subscribe(f"{topic}-dead", "dlq", consumer_type=pulsar.ConsumerType.Shared)
    assert received(dead, 1) == [b"bad"]


class Order(pulsar.schema.Record):  # type: ignore[misc]
    a = pulsar.schema.String()
    b = pulsar.schema.Integer()


@pytest.mark.parametrize("schema", [pulsar.schema.AvroSchema, pulsar.schema.JsonSchema])
def test_schemas(client: Any, topic: str, schema: Any) -> None:
    consumer = client.subscribe(topic, "sub", schema=schema(Order))
    producer = client.create_producer(topic, schema=schema(Order))
    producer.send(Order(a="x", b=1))
    message = consumer.receive(WAIT_MS)
    assert (message.value().a, message.value().b) == ("x", 1)
    assert message.schema_version() == bytes(8).decode()


def test_exclusive_producers(client: Any, topic: str) -> None:
    producer = client.create_producer(topic, access_mode=ProducerAccessMode.Exclusive)
    with pytest.raises(pulsar.ProducerFenced):
        client.create_producer(topic, access_mode=ProducerAccessMode.Exclusive)
    producer.close()
    client.create_producer(topic, access_mode=ProducerAccessMode.Exclusive)


@pytest.mark.req("R468-89")
@pytest.mark.parametrize("name", [SCALABLE, SEGMENT], ids=["topic", "segment"])
def test_scalable_topics_are_refused_and_the_client_goes_on(client: Any, topic: str, name: str) -> None:
    """By the client itself, which does not know such names; what one is told that does ask is in the broker's tests."""
    with pytest.raises(pulsar.InvalidTopicName):
        client.create_producer(name)
    with pytest.raises(pulsar.InvalidTopicName):
        client.subscribe(name, "sub")
    with pytest.raises(pulsar.InvalidTopicName):
        client.create_reader(name, pulsar.MessageId.earliest)
    consumer = client.subscribe(topic, "sub")
    client.create_producer(topic).send(b"x")
    assert received(consumer, 1) == [b"x"]


@pytest.mark.inv("INV1")
def test_producer_and_consumer_live_through_a_kill_and_a_restart(standalone: Standalone, client: Any, topic: str) -> None:
    """Nothing acknowledged is lost, nothing is reordered; the clients reconnect by themselves."""
    consumer = client.subscribe(topic, "sub")
    producer = client.create_producer(topic, batching_enabled=False, block_if_queue_full=True, send_timeout_millis=60_000)
    confirmed: queue.SimpleQueue[int] = queue.SimpleQueue()

    def answered(number: int, result: Any) -> None:
        assert result == pulsar.Result.Ok
        confirmed.put(number)

    number = 0
    for restart in (standalone.kill, standalone.stop):
        for _ in range(300):
            producer.send_async(b"%d" % number, lambda result, _id, number=number: answered(number, result))
            number += 1
        while confirmed.get(timeout=20) < number - 200:
            pass
        restart()
        standalone.start()
    producer.flush()
    seen: list[int] = []
    while not seen or seen[-1] < number - 1:
        message = consumer.receive(WAIT_MS)
        seen.append(int(message.data()))
        consumer.acknowledge(message)
    firsts = list(dict.fromkeys(seen))
    assert firsts == list(range(number))
