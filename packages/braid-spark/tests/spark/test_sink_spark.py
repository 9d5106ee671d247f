"""Writing topics from Spark: batch and stream, what is written once, what is refused, and what is left behind by failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import BinaryType, StringType, StructType

from braid.client import blocking
from braid.errors import DeadlineExceeded
from braid.testing.broker import BackgroundBroker

Topic = Callable[..., str]


@pytest.fixture
def read(client: blocking.Client) -> Callable[[str], list[Any]]:
    """Everything a consumer is given from the beginning; ends when nothing more comes."""

    def messages(topic: str) -> list[Any]:
        found: list[Any] = []
        with client.queue_consumer(topic, "check", initial="earliest") as consumer:
            try:
                while True:
                    found.append(consumer.receive(1.0 if found else 5.0))
                    consumer.acknowledge(found[-1])
            except DeadlineExceeded:
                return found

    return messages


def numbers(spark: SparkSession, count: int) -> DataFrame:
    return spark.range(count).selectExpr("CAST(id AS STRING) AS value", "CAST(id % 5 AS STRING) AS __key")


def values(messages: list[Any]) -> Counter[int]:
    return Counter(int(each.payload) for each in messages)


def write(frame: DataFrame, broker: BackgroundBroker, topic: str, **options: str) -> None:
    frame.write.format("braid").option("service.url", broker.service_url).option("topic", topic).options(**options).mode(
        "append"
    ).save()


def open_writes(admin: blocking.AdminClient, topic: str) -> int:
    name = topic.rpartition("/")[2]
    return sum(any(name in each.topic for each in found.writes) for found in admin.transactions.list())


class Files:
    """A stream of numbers from files, two files to a batch, into a topic."""

    def __init__(self, spark: SparkSession, broker: BackgroundBroker, folder: Path, topic: str, **options: str) -> None:
        self.spark, self.broker, self.folder, self.topic, self.options = spark, broker, folder, topic, options
        self.fed = 0
        (folder / "in").mkdir()

    def feed(self, batches: int) -> None:
        for _ in range(2 * batches):
            (self.folder / "in" / f"{self.fed:05}.txt").write_text("".join(f"{self.fed + n}\n" for n in range(10)))
            self.fed += 10

    def frame(self) -> DataFrame:
        return self.spark.readStream.format("text").option("maxFilesPerTrigger", 2).load(str(self.folder / "in"))

    def run(self) -> None:
        """To the end of the input."""
        writer = self.frame().writeStream.format("braid").option("service.url", self.broker.service_url)
        writer = writer.option("topic", self.topic).options(**self.options)
        query = writer.option("checkpointLocation", str(self.folder / "checkpoint")).trigger(availableNow=True).start()
        query.awaitTermination()

    def forget_last_commit(self) -> None:
        """As if the driver had died after the sink's commit and before Spark wrote that down."""
        commits = self.folder / "checkpoint" / "commits"
        last = max((each for each in commits.iterdir() if each.name.isdigit()), key=lambda each: int(each.name))
        last.unlink()
        for each in commits.glob(f".{last.name}.*"):
            each.unlink()


@pytest.mark.parametrize("domain", ["topic", "persistent"])
def test_a_batch_job_writes_all_rows(
    spark: SparkSession, broker: BackgroundBroker, topic: Topic, read: Any, admin: Any, domain: str
) -> None:
    name = topic(domain)
    write(numbers(spark, 500), broker, name)
    assert values(read(name)) == Counter(range(500))
    assert open_writes(admin, name) == 0


def test_columns_become_parts_of_messages(spark: SparkSession, broker: BackgroundBroker, topic: Topic, read: Any) -> None:
    name = topic("persistent")
    frame = spark.range(1).selectExpr(
        "'v' AS value",
        "'k' AS __key",
        "timestamp_millis(1234) AS __event_time",
        "map('a', '1') AS __properties",
        f"'{name}' AS __topic",
    )
    frame.write.format("braid").option("service.url", broker.service_url).mode("append").save()
    (message,) = read(name)
    assert (message.payload, message.key, message.event_ms, dict(message.properties)) == (b"v", "k", 1234, {"a": "1"})


def test_a_job_that_fails_writes_nothing(
    spark: SparkSession, broker: BackgroundBroker, topic: Topic, read: Any, admin: Any
) -> None:
    name = topic("persistent")
    frame = spark.range(100).selectExpr("CAST(IF(id = 99, raise_error('no'), id) AS STRING) AS value")
    with pytest.raises(PySparkException):
        write(frame.repartition(2), broker, name)
    with pytest.raises(PySparkException):
        write(frame, broker, name)
    assert open_writes(admin, name) == 0
    write(numbers(spark, 3), broker, name)
    assert values(read(name)) == Counter(range(3))


def test_a_named_write_is_done_once(spark: SparkSession, broker: BackgroundBroker, topic: Topic, read: Any) -> None:
    name = topic("persistent")
    for version in (1, 1, 0, 2):
        write(numbers(spark, 10), broker, name, txnAppId=f"{name}/load", txnVersion=str(version))
    assert values(read(name)) == Counter(dict.fromkeys(range(10), 2))


def test_a_batch_that_spark_does_again_is_written_once(
    spark: SparkSession, broker: BackgroundBroker, topic: Topic, read: Any, tmp_path: Path, admin: Any
) -> None:
    files = Files(spark, broker, tmp_path, topic("topic"))
    files.feed(2)
    files.run()
    files.forget_last_commit()
    files.feed(1)
    files.run()
    assert values(read(files.topic)) == Counter(range(60))
    assert open_writes(admin, files.topic) == 0


def test_at_least_once_shows_the_batch_that_spark_does_again(
    spark: SparkSession, broker: BackgroundBroker, topic: Topic, read: Any, tmp_path: Path
) -> None:
    files = Files(spark, broker, tmp_path, topic("persistent"), semantics="at-least-once")
    files.feed(2)
    files.run()
    files.forget_last_commit()
    files.run()
    found = values(read(files.topic))
    assert set(found) == set(range(40))
    assert sum(found.values()) == 60


def test_for_each_batch_writes_a_batch_once(
    spark: SparkSession, broker: BackgroundBroker, topic: Topic, read: Any, tmp_path: Path
) -> None:
    files = Files(spark, broker, tmp_path, topic("persistent"))

    def work(frame: DataFrame, _batch: int) -> None:
        write(frame, broker, files.topic)

    def run() -> None:
        query = files.frame().writeStream.foreachBatch(work).trigger(availableNow=True)
        query.option("checkpointLocation", str(tmp_path / "checkpoint")).start().awaitTermination()

    files.feed(2)
    run()
    files.forget_last_commit()
    run()
    assert values(read(files.topic)) == Counter(range(40))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"asyncProgressTrackingEnabled": "true"}, "does not support async progress tracking"),
        ({"txnAppId": "a", "txnVersion": "1"}, "txnAppId and txnVersion are for batch writes"),
        ({"semantics": "exactly-onse"}, "exactly-once"),
        ({"sinkID2": "x"}, "Did you mean sinkId?"),
        ({"startingOffsets": "latest"}, "has no meaning to write"),
    ],
)
def test_what_a_stream_cannot_do_is_said(
    spark: SparkSession, broker: BackgroundBroker, topic: Topic, tmp_path: Path, options: dict[str, str], says: str
) -> None:
    files = Files(spark, broker, tmp_path, topic("persistent"), **options)
    files.feed(1)
    with pytest.raises((PySparkException, StreamingQueryException)) as caught:
        files.run()
    assert says in str(caught.value)


def test_what_a_batch_cannot_do_is_said(spark: SparkSession, broker: BackgroundBroker, topic: Topic) -> None:
    name = topic("persistent")
    with pytest.raises(PySparkException, match="cannot be overwritten"):
        numbers(spark, 1).write.format("braid").option("service.url", broker.service_url).option("topic", name).mode(
            "overwrite"
        ).save()
    with pytest.raises(PySparkException, match="no column value"):
        write(spark.range(1).selectExpr("CAST(id AS STRING) AS __key"), broker, name)
    with pytest.raises(PySparkException, match="Nothing says where to write"):
        numbers(spark, 1).write.format("braid").option("service.url", broker.service_url).mode("append").save()


def test_an_empty_table_writes_nothing(
    spark: SparkSession, broker: BackgroundBroker, topic: Topic, client: blocking.Client, admin: Any
) -> None:
    name = topic("persistent")
    empty = StructType().add("value", BinaryType()).add("__key", StringType())
    before = len(admin.transactions.list())
    write(spark.createDataFrame([], empty), broker, name, txnAppId=name, txnVersion="1")
    write(spark.createDataFrame([], empty), broker, name)
    assert client.sink(f"{name}/{name}") is None
    assert len(admin.transactions.list()) <= before
