"""Queries written for Kafka's source and for pulsar-spark run after changing the format's name, the address and the topic."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from braid.testing.broker import BackgroundBroker

Send = Callable[[str, Iterable[tuple[str | None, str]]], None]
Topic = Callable[..., str]


def kafka_query(spark: SparkSession, format_name: str, servers: str, source: str, target: str, checkpoint: str) -> None:
    """As one writes it for Kafka: read with limits, cast, count words, write with key and value."""
    lines = (
        spark.readStream.format(format_name)
        .option("kafka.bootstrap.servers", servers)
        .option("subscribe", source)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", "20")
        .option("failOnDataLoss", "true")
        .load()
    )
    words = lines.selectExpr(
        "CAST(key AS STRING) AS sender", "CAST(value AS STRING) AS line", "topic", "partition", "offset", "timestamp"
    )
    words = words.select("sender", F.explode(F.split("line", " ")).alias("word"), "offset", "timestamp")
    (
        words.selectExpr("sender AS key", "to_json(struct(word, offset)) AS value")
        .writeStream.format(format_name)
        .option("kafka.bootstrap.servers", servers)
        .option("topic", target)
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
        .awaitTermination()
    )


def kafka_batch(spark: SparkSession, format_name: str, servers: str, topic: str) -> DataFrame:
    read = spark.read.format(format_name).option("kafka.bootstrap.servers", servers).option("subscribe", topic)
    return read.option("startingOffsets", "earliest").option("endingOffsets", "latest").option("includeHeaders", "true").load()


def pulsar_query(
    spark: SparkSession, format_name: str, url: str, admin: str, source: str, target: str, checkpoint: str
) -> None:
    """As one writes it for pulsar-spark: its option names, its columns of metadata."""
    messages = (
        spark.readStream.format(format_name)
        .option("service.url", url)
        .option("admin.url", admin)
        .option("topic", source)
        .option("startingOffsets", "earliest")
        .option("predefinedSubscription", "ported")
        .load()
    )
    (
        messages.selectExpr("__key", "CAST(value AS STRING) AS value", "__messageProperties", "__eventTime")
        .where("__publishTime IS NOT NULL AND __messageId IS NOT NULL")
        .writeStream.format(format_name)
        .option("service.url", url)
        .option("admin.url", admin)
        .option("topic", target)
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
        .awaitTermination()
    )


def test_a_query_written_for_kafka(
    spark: SparkSession, broker: BackgroundBroker, send: Send, topic: Topic, tmp_path: Path
) -> None:
    source, target = topic("topic", "in"), topic("persistent", "out")
    send(source, [(f"k{number % 3}", f"a{number} b{number}") for number in range(50)])
    kafka_query(spark, "braid", broker.service_url, source, target, str(tmp_path / "state"))
    written = kafka_batch(spark, "braid", broker.service_url, target)
    assert {"key", "value", "topic", "partition", "offset", "timestamp", "timestampType", "headers"} <= set(written.columns)
    rows = written.selectExpr("CAST(key AS STRING)", "get_json_object(CAST(value AS STRING), '$.word') AS word").collect()
    assert sorted(row.word for row in rows) == sorted(f"{letter}{number}" for number in range(50) for letter in "ab")
    assert {row.key for row in rows} == {"k0", "k1", "k2"}


def test_a_query_written_for_pulsar_spark(
    spark: SparkSession, broker: BackgroundBroker, send: Send, topic: Topic, tmp_path: Path
) -> None:
    source, target = topic("persistent", "in"), topic("persistent", "out")
    send(source, [(f"k{number % 3}", str(number)) for number in range(40)])
    pulsar_query(spark, "braid", broker.service_url, broker.http_url, source, target, str(tmp_path / "state"))
    read = spark.read.format("braid").option("service.url", broker.service_url).option("admin.url", broker.http_url)
    written = read.option("topic", target).load()
    assert {"__key", "__topic", "__messageId", "__publishTime", "__eventTime", "__messageProperties"} <= set(written.columns)
    assert sorted(int(bytes(row.value)) for row in written.collect()) == list(range(40))
