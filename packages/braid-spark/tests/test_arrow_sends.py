"""Arrow columns sent to a real broker by the blocking client, also while the topic is split and merged, read by the official
Pulsar client and by the SDK."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pulsar
import pyarrow as pa
import pytest

from braid.client import blocking
from braid.client.config import ClientConfig
from braid.errors import InvalidTransactionStatus, TooLarge, TransactionConflict
from braid.testing.broker import BackgroundBroker
from braid_spark.blocks import ArrowBlock

SECONDS = 60
SMALL = ClientConfig(block_max_bytes=1024)


@pytest.fixture(scope="module")
def broker() -> Iterator[BackgroundBroker]:
    with BackgroundBroker() as made:
        yield made


@pytest.fixture
def client(broker: BackgroundBroker) -> Iterator[blocking.Client]:
    with blocking.connect(broker.service_url, config=SMALL) as made:
        yield made


@pytest.fixture
def admin(broker: BackgroundBroker) -> Iterator[blocking.AdminClient]:
    with blocking.AdminClient(broker.http_url) as made:
        yield made


def numbered(start: int, stop: int, keys: int = 20) -> ArrowBlock:
    rows = range(start, stop)
    return ArrowBlock.of(
        pa.array([b"%d" % number for number in rows]), keys=pa.array([f"key-{number % keys}" for number in rows])
    )


@contextlib.contextmanager
def official(broker: BackgroundBroker) -> Iterator[pulsar.Client]:
    made = pulsar.Client(broker.service_url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("compression", ["none", "lz4", "zlib", "zstd", "snappy"])
def test_the_official_client_reads_what_was_sent(broker: BackgroundBroker, client: blocking.Client, compression: Any) -> None:
    topic = f"persistent://public/default/columns-{compression}"
    with official(broker) as theirs:
        consumer = theirs.subscribe(topic, "s", initial_position=pulsar.InitialPosition.Earliest)
        block = ArrowBlock.of(
            pa.array([b"one", b"", b"\x00\xff" * 5000]),
            keys=pa.array(["first", None, "kéy"]),
            event_times=pa.array([1_700_000_000_123, None, 5]),
            properties=pa.array([[("a", "b"), ("c", "")], None, []], pa.map_(pa.string(), pa.string())),
        )
        with client.producer(topic, compression=compression) as producer:
            producer.send_block(block).result(SECONDS)
        got = [consumer.receive(10_000) for _each in range(3)]
    assert [message.data() for message in got] == [b"one", b"", b"\x00\xff" * 5000]
    assert [message.partition_key() for message in got] == ["first", "", "kéy"]
    assert [message.event_timestamp() for message in got] == [1_700_000_000_123, 0, 5]
    assert [message.properties() for message in got] == [{"a": "b", "c": ""}, {}, {}]


@pytest.mark.req("R468-47", "R468-51")
def test_order_of_keys_while_segments_are_split_and_merged(client: blocking.Client, admin: blocking.AdminClient) -> None:
    topic = "topic://public/default/columns-moving"
    admin.scalable_topics.create(topic, segments=2)
    admin.scalable_topics.create_subscription(topic, "all")
    pending: list[Future[None]] = []
    with client.producer(topic, name="columns", deduplication=True) as producer:
        for turn in range(40):
            pending.append(producer.send_block(numbered(turn * 60, (turn + 1) * 60)))
            match turn:
                case 3:
                    admin.scalable_topics.split_segment(topic, 0)
                case 11:
                    admin.scalable_topics.split_segment(topic, 1)
                case 19:
                    admin.scalable_topics.merge_segments(topic, 2, 3)
                case 27:
                    admin.scalable_topics.split_segment(topic, 6)
                case 35:
                    admin.scalable_topics.merge_segments(topic, 4, 5)
        for each in pending:
            each.result(SECONDS)
    found: dict[str | None, list[int]] = defaultdict(list)
    with client.stream_consumer(topic, "all") as consumer:
        for _each in range(2400):
            message = consumer.receive(timeout=SECONDS)
            found[message.key].append(int(message.value))
            consumer.acknowledge_cumulative(message)
    assert {key: sorted(values) for key, values in found.items()} == found
    assert sorted(number for values in found.values() for number in values) == list(range(2400))


def test_only_the_winner_of_two_attempts_is_seen(client: blocking.Client) -> None:
    topic = "topic://public/default/columns-attempts"
    decider = client.begin_decider()
    attempts = [decider.sub(), decider.sub()]
    for number, sub in enumerate(attempts):
        with client.producer(topic, name=f"attempt-{sub.number}", deduplication=True) as producer:
            for turn in range(5):
                producer.send_block(numbered(10_000 * number + turn * 100, 10_000 * number + (turn + 1) * 100), txn=sub)
            sub.finish()
            with pytest.raises(InvalidTransactionStatus):
                producer.send_block(numbered(0, 1), txn=sub)
    decider.decide([attempts[1]])
    with client.producer(topic) as producer:
        producer.send(b"-1", key="key-0")
    got: list[int] = []
    with client.stream_consumer(topic, "all") as consumer:
        while not got or got[-1] != -1:
            got.append(int(consumer.receive(timeout=SECONDS).value))
    assert sorted(got) == [-1, *range(10_000, 10_500)]


def test_blocks_and_messages_of_a_thread_keep_its_order(broker: BackgroundBroker, client: blocking.Client) -> None:
    """Messages wait for room in the window of three, and a block does not pass them."""
    topic = "topic://public/default/columns-mixed"
    with (
        blocking.connect(broker.service_url, config=ClientConfig(max_pending_messages=3)) as writer,
        writer.producer(topic) as producer,
    ):
        for turn in range(30):
            for number in range(turn * 30, turn * 30 + 20):
                producer.send_nowait(b"%d" % number, key="key-0")
            producer.send_block(numbered(turn * 30 + 20, turn * 30 + 30, keys=1))
        producer.flush()
    with client.stream_consumer(topic, "all") as consumer:
        assert [int(consumer.receive(timeout=SECONDS).value) for _each in range(900)] == list(range(900))


def test_a_refused_block_leaves_the_producer_usable(client: blocking.Client) -> None:
    with client.producer("topic://public/default/columns-refused") as producer:
        producer.send(b"first")
        with pytest.raises(TooLarge, match="nothing of its block was sent"):
            producer.send_block(ArrowBlock.of(pa.array([b"small", bytes(6 << 20)])))
        decider = client.begin_decider()
        sub = decider.sub()
        with pytest.raises(TooLarge):
            producer.send_block(ArrowBlock.of(pa.array([bytes(6 << 20)])), txn=sub)
        with pytest.raises(TransactionConflict, match="must not win"):
            sub.finish()
        producer.send_block(numbered(0, 10)).result(SECONDS)
        producer.flush()
