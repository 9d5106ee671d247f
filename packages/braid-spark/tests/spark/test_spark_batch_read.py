"""Reading a topic in a batch with real Spark."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import pytest
from pyspark.sql import DataFrame, SparkSession

from braid.client import blocking
from braid.testing.broker import BackgroundBroker

Send = Callable[[str, Iterable[tuple[str | None, str]]], None]
Topic = Callable[..., str]
KEYS = [f"key-{number}" for number in range(10)]


def pairs(count: int, first: int = 0) -> list[tuple[str | None, str]]:
    return [(KEYS[number % len(KEYS)], f"value-{number}") for number in range(first, first + count)]


def load(spark: SparkSession, broker: BackgroundBroker, topic: str, schema: str | None = None, **options: str) -> DataFrame:
    reader = spark.read.format("braid").options(**{"service.url": broker.service_url, "topic": topic, **options})
    return (reader if schema is None else reader.schema(schema)).load()


def values(frame: DataFrame) -> list[str]:
    return [bytes(row[0]).decode() for row in frame.select("value").collect()]


def test_scalable_topic_with_all_columns(
    spark: SparkSession, broker: BackgroundBroker, admin: blocking.AdminClient, send: Send, topic: Topic
) -> None:
    name = topic("topic")
    admin.scalable_topics.create(name, segments=2)
    send(name, pairs(200))
    frame = load(spark, broker, name)
    assert [(field.name, field.dataType.simpleString()) for field in frame.schema] == [
        ("value", "binary"),
        ("__key", "binary"),
        ("__topic", "string"),
        ("__segment", "bigint"),
        ("__index", "bigint"),
        ("__message_id", "binary"),
        ("__publish_time", "timestamp"),
        ("__event_time", "timestamp"),
        ("__properties", "map<string,string>"),
        ("__producer", "string"),
        ("__hash", "int"),
    ]
    rows = frame.collect()
    assert sorted((bytes(row["__key"]).decode(), bytes(row["value"]).decode()) for row in rows) == sorted(pairs(200))
    assert {row["__topic"] for row in rows} == {name}
    assert {row["__segment"] for row in rows} == {0, 1}
    for segment in (0, 1):
        assert [row["__index"] for row in rows if row["__segment"] == segment] == list(
            range(sum(row["__segment"] == segment for row in rows))
        )
    assert frame.rdd.getNumPartitions() == 2


@pytest.mark.parametrize("partitions", [0, 3])
def test_regular_topic(
    spark: SparkSession, broker: BackgroundBroker, admin: blocking.AdminClient, send: Send, topic: Topic, partitions: int
) -> None:
    name = topic("persistent")
    admin.topics.create(name, partitions=partitions)
    send(name, pairs(100))
    frame = load(spark, broker, name)
    assert sorted(values(frame)) == sorted(value for _key, value in pairs(100))
    filled = {row[0] for row in frame.select("__segment").collect()}
    assert filled <= set(range(partitions or 1))
    assert frame.rdd.getNumPartitions() == len(filled) >= min(partitions, 1)


def test_only_the_columns_of_the_users_schema_are_made(
    spark: SparkSession, broker: BackgroundBroker, send: Send, topic: Topic
) -> None:
    name = topic("topic")
    send(name, pairs(20))
    frame = load(spark, broker, name, "__index bigint, value string", valueFormat="string")
    assert frame.columns == ["__index", "value"]
    assert [tuple(row) for row in frame.collect()] == [(number, f"value-{number}") for number in range(20)]


def test_json_fields_become_columns(spark: SparkSession, broker: BackgroundBroker, send: Send, topic: Topic) -> None:
    name = topic("topic")
    send(name, [("a", '{"id": 1, "city": "Bonn"}'), ("b", '{"id": 2, "city": null}')])
    frame = load(spark, broker, name, "id bigint, city string, __key string", valueFormat="json")
    assert [tuple(row) for row in frame.collect()] == [(1, "Bonn", "a"), (2, None, "b")]


def test_columns_in_the_spelling_of_pulsar(spark: SparkSession, broker: BackgroundBroker, send: Send, topic: Topic) -> None:
    name = topic("persistent")
    send(name, pairs(3))
    frame = load(spark, broker, name, columnNames="pulsar")
    assert {"__messageId", "__publishTime", "__eventTime", "__messageProperties"} <= set(frame.columns)
    assert frame.count() == 3


def test_offsets_of_start_and_end(spark: SparkSession, broker: BackgroundBroker, send: Send, topic: Topic) -> None:
    name = topic("topic")
    send(name, pairs(100))
    frame = load(
        spark,
        broker,
        name,
        startingOffsets=f'{{"{name}": {{"0": 10}}}}',
        endingOffsets=f'{{"{name}": {{"0": 25}}}}',
    )
    assert values(frame) == [f"value-{number}" for number in range(10, 25)]


def test_start_and_end_by_time(spark: SparkSession, broker: BackgroundBroker, send: Send, topic: Topic) -> None:
    name = topic("topic")
    send(name, pairs(30))
    millis = int(time.time() * 1000) + 1  # by the time of the broker, which is behind that of the producer
    while time.time() * 1000 <= millis:  # the next ones are in another millisecond
        time.sleep(0.001)
    send(name, pairs(20, first=30))
    assert values(load(spark, broker, name, startingTimestamp=str(millis))) == [f"value-{number}" for number in range(30, 50)]
    assert values(load(spark, broker, name, endingTimestamp=str(millis))) == [f"value-{number}" for number in range(30)]


def test_several_topics_and_a_pattern(spark: SparkSession, broker: BackgroundBroker, send: Send, topic: Topic) -> None:
    names = [topic("topic", "a"), topic("topic", "b"), topic("topic", "other")]
    for name in names:
        send(name, [("k", name)])
    reader = spark.read.format("braid").option("service.url", broker.service_url)
    listed = reader.option("topics", ",".join(names[:2])).load()
    assert sorted(row["__topic"] for row in listed.collect()) == sorted(names[:2])
    pattern = names[0][:-1] + "[ab]"
    matching = spark.read.format("braid").option("service.url", broker.service_url).option("topicsPattern", pattern).load()
    assert sorted(row["__topic"] for row in matching.collect()) == sorted(names[:2])


def test_more_partitions_by_key(spark: SparkSession, broker: BackgroundBroker, send: Send, topic: Topic) -> None:
    name = topic("topic")
    send(name, pairs(500))
    frame = load(spark, broker, name, minPartitions="4")
    assert frame.rdd.getNumPartitions() == 4
    by_partition = frame.rdd.mapPartitions(lambda rows: [[(bytes(row["__key"]), row["__index"]) for row in rows]]).collect()
    assert sorted(index for rows in by_partition for _key, index in rows) == list(range(500))
    owners: dict[bytes, int] = {}
    for number, rows in enumerate(by_partition):
        assert [index for _key, index in rows] == sorted(index for _key, index in rows)
        for key, _index in rows:
            assert owners.setdefault(key, number) == number


def test_layout_history_is_read_in_order(
    spark: SparkSession, broker: BackgroundBroker, admin: blocking.AdminClient, send: Send, topic: Topic
) -> None:
    name = topic("topic")
    admin.scalable_topics.create(name)
    send(name, pairs(100))
    admin.scalable_topics.split_segment(name, 0)
    send(name, pairs(100, first=100))
    admin.scalable_topics.merge_segments(name, 1, 2)
    send(name, pairs(100, first=200))
    rows = load(spark, broker, name).select("__key", "value", "__segment", "__index").collect()
    assert len(rows) == 300
    for key in KEYS:
        mine = [row for row in rows if bytes(row["__key"]).decode() == key]
        numbers = [int(bytes(row["value"]).decode().removeprefix("value-")) for row in mine]
        assert numbers == sorted(numbers)
        places = [(row["__segment"], row["__index"]) for row in mine]
        assert places == sorted(places)


def test_empty_topic_and_empty_range(
    spark: SparkSession, broker: BackgroundBroker, admin: blocking.AdminClient, topic: Topic
) -> None:
    name = topic("topic")
    admin.scalable_topics.create(name)
    assert load(spark, broker, name).collect() == []


def test_a_view_in_sql(spark: SparkSession, broker: BackgroundBroker, send: Send, topic: Topic) -> None:
    name = topic("topic")
    send(name, pairs(7))
    spark.sql(f"CREATE TEMPORARY VIEW seven USING braid OPTIONS ('service.url' '{broker.service_url}', topic '{name}')")
    try:
        assert spark.sql("SELECT count(*) FROM seven").collect()[0][0] == 7
    finally:
        spark.catalog.dropTempView("seven")


def test_load_takes_the_topic_as_a_path(spark: SparkSession, broker: BackgroundBroker, send: Send, topic: Topic) -> None:
    name = topic("topic")
    send(name, pairs(3))
    assert spark.read.format("braid").option("service.url", broker.service_url).load(name).count() == 3
