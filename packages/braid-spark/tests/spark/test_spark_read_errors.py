"""What a user sees who asks for something that cannot be: one sentence with the cause, where he looks."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from spark_streams import Batches, last_offset, run_to_the_end, running, stream

from braid.client import blocking
from braid.testing.broker import BackgroundBroker
from braid.web.config import StandaloneConfig
from braid_spark.connections import Link
from braid_spark.reads import ClusterReads

Send = Callable[[str, Iterable[tuple[str | None, str]]], None]
Topic = Callable[..., str]


def pairs(count: int, first: int = 0) -> list[tuple[str | None, str]]:
    return [("key", f"value-{number}") for number in range(first, first + count)]


def texts(first: int, stop: int) -> list[str]:
    return [f"value-{number}" for number in range(first, stop)]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"startingOfsets": "earliest"}, "Did you mean startingOffsets"),
        ({"startingOffsets": "sometimes"}, "startingOffsets"),
        ({"maxMessagesPerTrigger": "many"}, "maxMessagesPerTrigger"),
        ({"braid.client.operationTimeOutt": "5"}, "Did you mean braid.client.operation_timeout"),
        ({"braid.client.operationTimeout": "soon"}, "braid.client.operation_timeout"),
        ({"valueFormat": "xml"}, "valueFormat"),
        ({"startingOffsets": '{"topic://public/default/another": {"0": 1}}'}, "which is not read"),
    ],
)
def test_options_are_refused_at_load(
    spark: SparkSession,
    broker: BackgroundBroker,
    topic: Topic,
    options: dict[str, str],
    said: str,
    is_stream: bool,
) -> None:
    reader = (spark.readStream if is_stream else spark.read).format("braid")
    with pytest.raises(PySparkException, match=re.escape(said)):
        reader.options(**{"service.url": broker.service_url, "topic": topic(), **options}).load()


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("missing", ["service.url", "topic"])
def test_what_is_needed_is_asked_for(
    spark: SparkSession, broker: BackgroundBroker, topic: Topic, is_stream: bool, missing: str
) -> None:
    options = {"service.url": broker.service_url, "topic": topic()}
    del options[missing]
    reader = (spark.readStream if is_stream else spark.read).format("braid")
    with pytest.raises(PySparkException, match=missing):
        reader.options(**options).load()


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("domain", ["topic", "persistent"])
def test_a_topic_that_does_not_exist_is_told_at_load_and_not_made(
    spark: SparkSession, broker: BackgroundBroker, admin: blocking.AdminClient, topic: Topic, is_stream: bool, domain: str
) -> None:
    name = topic(domain, "missing")
    reader = (spark.readStream if is_stream else spark.read).format("braid")
    with pytest.raises(PySparkException, match=r"(not exist|not found|no topic)"):
        reader.options(**{"service.url": broker.service_url, "topic": name}).load()
    assert name not in [*admin.topics.list("public/default"), *admin.scalable_topics.list("public/default")]


def test_a_topic_that_does_not_exist_with_a_schema_of_the_user(
    spark: SparkSession, broker: BackgroundBroker, topic: Topic, tmp_path: Path
) -> None:
    with pytest.raises(PySparkException, match=r"(not exist|not found|no topic)"):
        run_to_the_end(stream(spark, broker, topic("topic", "missing"), schema="value binary"), tmp_path)


def test_nobody_at_the_address_is_told_at_load(spark: SparkSession, topic: Topic) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"pulsar://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(PySparkException, match="ConnectFailed"):
            spark.read.format("braid").options(**{"service.url": url, "topic": topic()}).load()


@pytest.mark.parametrize(
    ("schema", "said"), [("value binary, __kay binary", "__kay"), ("value int", "value"), ("__index string", "__index")]
)
def test_a_schema_that_does_not_fit(
    spark: SparkSession, broker: BackgroundBroker, send: Send, topic: Topic, tmp_path: Path, schema: str, said: str
) -> None:
    name = topic()
    send(name, pairs(1))
    with pytest.raises(PySparkException, match=rf"InvalidArgument: .*{said}"):
        spark.read.format("braid").schema(schema).options(**{"service.url": broker.service_url, "topic": name}).load().collect()
    with pytest.raises(PySparkException, match=rf"InvalidArgument: .*{said}"):
        run_to_the_end(stream(spark, broker, name, schema=schema), tmp_path)


def test_a_topic_that_was_made_anew_is_not_taken_for_the_old_one(
    spark: SparkSession, broker: BackgroundBroker, admin: blocking.AdminClient, send: Send, topic: Topic, tmp_path: Path
) -> None:
    name = topic()
    admin.scalable_topics.create(name)
    send(name, pairs(10))
    frame = stream(spark, broker, name)
    assert run_to_the_end(frame, tmp_path).texts == texts(0, 10)
    admin.scalable_topics.delete(name, force=True)
    admin.scalable_topics.create(name)
    send(name, pairs(20, first=100))
    with pytest.raises(PySparkException, match="IncarnationMismatch"):
        run_to_the_end(frame, tmp_path)


def test_a_checkpoint_of_another_topic(
    spark: SparkSession, broker: BackgroundBroker, send: Send, topic: Topic, tmp_path: Path
) -> None:
    name, other = topic("topic", "a"), topic("topic", "b")
    send(name, pairs(3))
    send(other, pairs(3))
    run_to_the_end(stream(spark, broker, name), tmp_path)
    with pytest.raises(PySparkException, match="BadOffset"):
        run_to_the_end(stream(spark, broker, other), tmp_path)


def test_a_checkpoint_of_another_version(
    spark: SparkSession, broker: BackgroundBroker, send: Send, topic: Topic, tmp_path: Path
) -> None:
    name = topic()
    send(name, pairs(3))
    run_to_the_end(stream(spark, broker, name), tmp_path)
    assert last_offset(tmp_path, 0)["v"] == 1
    log = tmp_path / "offsets" / "0"
    log.write_text(log.read_text().replace('"v":1', '"v":9').replace('"v": 1', '"v": 9'))
    (tmp_path / "offsets" / ".0.crc").unlink(missing_ok=True)
    send(name, pairs(3, first=3))
    with pytest.raises(PySparkException, match="version 9"):
        run_to_the_end(stream(spark, broker, name), tmp_path)


@pytest.fixture
def forgetful() -> StandaloneConfig:
    """A broker that deletes soon what it need not retain."""
    config = StandaloneConfig()
    replace = msgspec.structs.replace
    return replace(
        config,
        broker=replace(config.broker, retention_minutes=-1, retention_mb=-1, retention_check_seconds=1),
        managed_ledger=replace(config.managed_ledger, max_entries_per_ledger=5, min_ledger_age_ms=0),
    )


@pytest.mark.parametrize("domain", ["topic", "persistent"])
def test_messages_that_were_deleted_before_they_were_read(
    spark: SparkSession, forgetful: StandaloneConfig, topic: Topic, tmp_path: Path, domain: str
) -> None:
    name = topic(domain)
    with (
        BackgroundBroker(config=forgetful) as broker,
        blocking.connect(broker.service_url) as client,
        blocking.AdminClient(broker.http_url) as admin,
    ):
        with client.producer(name, batching=False) as producer:
            for key, value in pairs(50):
                producer.send(value.encode(), key=key)
        frame = stream(spark, broker, name, schema="value binary, __index bigint")
        assert run_to_the_end(frame, tmp_path).texts == texts(0, 50)
        with client.producer(name, batching=False) as producer:
            for key, value in pairs(50, first=50):
                producer.send(value.encode(), key=key)
        admin.namespaces.set_retention("public/default", minutes=0, megabytes=0)
        low = _until_deleted(broker, name, 50)
        with pytest.raises(PySparkException, match=rf"DataLost: .*\b50\b.*\b{low}\b"):
            run_to_the_end(frame, tmp_path)
        patient = stream(spark, broker, name, schema="value binary, __index bigint", failOnDataLoss="false")
        again = run_to_the_end(patient, tmp_path)
        assert again.texts[-1] == "value-99"
        assert [row["__index"] for row in again.rows] == list(range(low, 100))


def _until_deleted(broker: BackgroundBroker, topic: str, read: int) -> int:
    """Index of the first message kept, once it is behind what was read."""
    with Link(broker.service_url) as link:
        reads = ClusterReads(link, [topic])
        for _attempt in range(1200):
            reads.refresh()
            low = reads.states(topic, [0])[0].low
            if low > read:
                return low
    raise AssertionError("nothing was deleted")


def test_a_broker_that_is_away_for_a_while_ends_no_query(spark: SparkSession, topic: Topic, tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    config = StandaloneConfig()
    config = msgspec.structs.replace(config, broker=msgspec.structs.replace(config.broker, port=port))
    name = topic()
    batches = Batches()

    def send_to(broker: BackgroundBroker, rows: list[tuple[str | None, str]]) -> None:
        with blocking.connect(broker.service_url) as client, client.producer(name) as producer:
            for key, value in rows:
                producer.send(value.encode(), key=key)

    with BackgroundBroker(data_dir=tmp_path / "data", config=config) as broker:
        send_to(broker, pairs(10))
        started = running(stream(spark, broker, name), tmp_path / "checkpoint", batches)
        query = started.__enter__()
        query.processAllAvailable()
    try:
        assert batches.texts == texts(0, 10)
        with BackgroundBroker(data_dir=tmp_path / "data", config=config) as broker:
            send_to(broker, pairs(10, first=10))
            query.processAllAvailable()
            assert batches.texts == texts(0, 20)
    finally:
        started.__exit__(None, None, None)
