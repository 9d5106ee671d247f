"""Streaming queries over a topic with real Spark: starts, limits, restarts, layout changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from spark_streams import Batches, forget_commit, last_offset, run_to_the_end, running, stream

from braid.client import blocking
from braid.testing.broker import BackgroundBroker

Send = Callable[[str, Iterable[tuple[str | None, str]]], None]
Topic = Callable[..., str]
KEYS = [f"key-{number}" for number in range(16)]


def pairs(count: int, first: int = 0) -> list[tuple[str | None, str]]:
    return [(KEYS[number % len(KEYS)], f"value-{number}") for number in range(first, first + count)]


def texts(first: int, stop: int) -> list[str]:
    return [f"value-{number}" for number in range(first, stop)]


@pytest.mark.parametrize("domain", ["topic", "persistent"])
def test_everything_once_and_then_only_what_is_new(
    spark: SparkSession, broker: BackgroundBroker, send: Send, topic: Topic, tmp_path: Path, domain: str
) -> None:
    name = topic(domain)
    send(name, pairs(100))
    frame = stream(spark, broker, name)
    assert run_to_the_end(frame, tmp_path).texts == texts(0, 100)
    assert run_to_the_end(frame, tmp_path).texts == []
    send(name, pairs(50, first=100))
    assert run_to_the_end(frame, tmp_path).texts == texts(100, 150)


def test_a_query_that_runs_gets_what_is_sent(
    spark: SparkSession, broker: BackgroundBroker, send: Send, topic: Topic, tmp_path: Path
) -> None:
    name = topic()
    send(name, pairs(10))
    batches = Batches()
    with running(stream(spark, broker, name), tmp_path, batches) as query:
        query.processAllAvailable()
        assert batches.texts == texts(0, 10)
        for number in range(1, 4):
            send(name, pairs(10, first=10 * number))
            query.processAllAvailable()
            assert batches.texts == texts(0, 10 * number + 10)


@pytest.mark.parametrize("options", [{"maxMessagesPerTrigger": "30"}, {"maxOffsetsPerTrigger": "30"}])
def test_messages_per_trigger(
    spark: SparkSession,
    broker: BackgroundBroker,
    send: Send,
    topic: Topic,
    tmp_path: Path,
    options: dict[str, str],
) -> None:
    name = topic()
    send(name, pairs(100))
    batches = run_to_the_end(stream(spark, broker, name, schema="value binary", **options), tmp_path)
    assert batches.texts == texts(0, 100)
    assert batches.sizes == [30, 30, 30, 10]


def test_bytes_per_trigger_alone_and_with_messages(
    spark: SparkSession, broker: BackgroundBroker, client: blocking.Client, topic: Topic, tmp_path: Path
) -> None:
    name = topic()
    with client.producer(name, batching=False) as producer:
        for sent in [producer.send_nowait(b"%03d" % number + bytes(997)) for number in range(40)]:
            sent.result()
    frame = stream(spark, broker, name, maxBytesPerTrigger="8k")
    sizes = run_to_the_end(frame, tmp_path / "bytes").sizes
    assert sum(sizes) == 40
    assert max(sizes) <= 8
    assert len(sizes) >= 5
    both = stream(spark, broker, name, maxBytesPerTrigger="8k", maxMessagesPerTrigger="3")
    assert max(run_to_the_end(both, tmp_path / "both").sizes) == 3


def test_a_minimum_of_messages_is_waited_for(
    spark: SparkSession, broker: BackgroundBroker, send: Send, topic: Topic, tmp_path: Path
) -> None:
    name = topic()
    send(name, pairs(10))
    batches = Batches()
    frame = stream(spark, broker, name, minMessagesPerTrigger="20", maxTriggerDelay="1h")
    with running(frame, tmp_path, batches) as query:
        query.processAllAvailable()
        first = len(batches.rows)
        send(name, pairs(5, first=10))
        query.processAllAvailable()
        assert len(batches.rows) == first, "fifteen are not enough"
        send(name, pairs(20, first=15))
        query.processAllAvailable()
        assert batches.texts == texts(0, 35)
    assert run_to_the_end(frame, tmp_path / "now").texts == texts(0, 35), "a run to the end waits for nothing"


def test_latest_begins_where_the_query_began_also_after_a_crash_in_its_first_batch(
    spark: SparkSession, broker: BackgroundBroker, send: Send, topic: Topic, tmp_path: Path
) -> None:
    name = topic()
    send(name, pairs(100))
    frame = stream(spark, broker, name, startingOffsets="latest")
    assert run_to_the_end(frame, tmp_path).texts == []
    forget_commit(tmp_path, 0)
    send(name, pairs(20, first=100))
    assert run_to_the_end(frame, tmp_path).texts == texts(100, 120)


def test_a_batch_that_is_done_again_has_the_same_rows(
    spark: SparkSession, broker: BackgroundBroker, send: Send, topic: Topic, tmp_path: Path
) -> None:
    name = topic()
    send(name, pairs(100))
    frame = stream(spark, broker, name, maxMessagesPerTrigger="40")
    first = run_to_the_end(frame, tmp_path)
    last = max(first)
    forget_commit(tmp_path, last)
    send(name, pairs(40, first=100))
    again = run_to_the_end(frame, tmp_path)
    assert again[last] == first[last]
    assert again.texts == [*texts(80, 100), *texts(100, 140)]


def test_start_by_offsets_and_by_time(
    spark: SparkSession, broker: BackgroundBroker, send: Send, topic: Topic, tmp_path: Path
) -> None:
    name = topic()
    send(name, pairs(30))
    frame = stream(spark, broker, name, startingOffsets=f'{{"{name}": {{"0": 12}}}}')
    assert run_to_the_end(frame, tmp_path / "offsets").texts == texts(12, 30)
    by_time = (
        spark.readStream.format("braid")
        .options(**{"service.url": broker.service_url, "topic": name, "startingTimestamp": "0"})
        .load()
    )
    assert run_to_the_end(by_time, tmp_path / "time").texts == texts(0, 30)


def test_order_of_keys_while_the_topic_splits_and_merges(
    spark: SparkSession,
    broker: BackgroundBroker,
    admin: blocking.AdminClient,
    send: Send,
    topic: Topic,
    tmp_path: Path,
) -> None:
    name = topic()
    admin.scalable_topics.create(name)
    batches = Batches()
    frame = stream(spark, broker, name, maxMessagesPerTrigger="150")
    with running(frame, tmp_path, batches) as query:
        send(name, pairs(200))
        admin.scalable_topics.split_segment(name, 0)
        send(name, pairs(200, first=200))
        query.processAllAvailable()
        admin.scalable_topics.split_segment(name, 1)
        send(name, pairs(200, first=400))
        admin.scalable_topics.merge_segments(name, 2, 4)
        send(name, pairs(200, first=600))
        query.processAllAvailable()
    assert sorted(batches.texts) == sorted(texts(0, 800))
    assert {row["__segment"] for row in batches.rows} == {0, 1, 2, 3, 4, 5}
    for key in KEYS:
        mine = [bytes(row["value"]).decode() for row in batches.rows if bytes(row["__key"]).decode() == key]
        assert mine == sorted(mine, key=lambda text: int(text.removeprefix("value-")))
    family = [(0, {1, 2}), (1, {3, 4})]
    for number, rows in batches.items():
        present = {row["__segment"] for row in rows}
        for parent, children in family:
            assert not (parent in present and children & present), f"batch {number} has {present}"


def test_what_is_read_is_forgotten_by_the_offsets(
    spark: SparkSession, broker: BackgroundBroker, admin: blocking.AdminClient, send: Send, topic: Topic, tmp_path: Path
) -> None:
    name = topic()
    admin.scalable_topics.create(name)
    send(name, pairs(10))
    admin.scalable_topics.split_segment(name, 0)
    send(name, pairs(10, first=10))
    frame = stream(spark, broker, name)
    done = run_to_the_end(frame, tmp_path)
    end = last_offset(tmp_path, max(done))["topics"][name]
    assert sorted(end["segs"]) == ["1", "2"]
    assert end["next"] == 3


def test_new_topics_of_a_pattern_join_the_query(
    spark: SparkSession, broker: BackgroundBroker, send: Send, topic: Topic, tmp_path: Path
) -> None:
    first, second = topic("topic", "a"), topic("topic", "b")
    send(first, [("k", "one")])
    frame = stream(spark, broker, None, topicsPattern=first[:-1] + "[a-z]")
    assert run_to_the_end(frame, tmp_path).texts == ["one"]
    send(second, [("k", "two")])
    assert run_to_the_end(frame, tmp_path).texts == ["two"]


def test_the_durable_cursor_follows_the_query(
    spark: SparkSession,
    broker: BackgroundBroker,
    client: blocking.Client,
    admin: blocking.AdminClient,
    topic: Topic,
    tmp_path: Path,
) -> None:
    name = topic()
    with client.producer(name, batching=False) as producer:
        for key, value in pairs(20):
            producer.send(value.encode(), key=key)
    frame = stream(spark, broker, name, subscription="spark-query", maxMessagesPerTrigger="5")
    batches = run_to_the_end(frame, tmp_path)
    assert batches.sizes == [5, 5, 5, 5]
    subscription = admin.scalable_topics.get_stats(name).subscriptions["spark-query"]
    assert subscription.backlog == 5, "it trails behind by one batch"


def test_progress_shows_the_lag(
    spark: SparkSession, broker: BackgroundBroker, send: Send, topic: Topic, tmp_path: Path
) -> None:
    name = topic()
    send(name, pairs(50))
    frame = stream(spark, broker, name, maxMessagesPerTrigger="20")
    query = (
        frame.writeStream.foreachBatch(Batches()).option("checkpointLocation", str(tmp_path)).trigger(availableNow=True).start()
    )
    query.awaitTermination()
    lags = [progress["sources"][0]["latestOffset"] for progress in query.recentProgress]
    assert '"lag":30' in str(lags[0]).replace(" ", "") or "'lag':30" in str(lags[0]).replace(" ", "")
