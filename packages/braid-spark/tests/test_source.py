"""The door of the format: what it checks, what it makes, what it costs to import. Without a session of Spark."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import pulsar
import pulsar.schema
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxBytes, ReadMaxRows, ReadMinRows
from pyspark.sql.types import BinaryType, IntegerType, LongType, StringType, StructType

from braid.client import blocking
from braid.client.segment_reads import SegmentState, SegmentView, TopicView
from braid.errors import ConfigError, ConnectFailed, InvalidArgument, NotReady
from braid.testing.broker import BackgroundBroker
from braid_spark.planner import Piece
from braid_spark.source import BraidDataSource
from braid_spark.stream_reader import BraidStreamReader

GIVEN = {"service.url": "pulsar://127.0.0.1:1", "topic": "topic://public/default/orders"}
SCHEMA = StructType().add("value", BinaryType()).add("__index", LongType())


def source(**options: str) -> BraidDataSource:
    return BraidDataSource({**GIVEN, **options})


def test_spark_finds_it_on_its_own() -> None:
    from pyspark_braid import DefaultSource

    assert DefaultSource is BraidDataSource
    assert DefaultSource.name() == "braid"


def test_importing_it_is_cheap() -> None:
    """Spark imports it in every Python process, for every format that is looked up."""
    code = (
        "import sys, pyspark.sql.datasource; before = set(sys.modules); import pyspark_braid; print(*set(sys.modules) - before)"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout.split()
    assert "braid_spark.source" in loaded
    assert not {"asyncio", "pyarrow", "pandas", "braid.client", "google.protobuf"} & set(loaded)


def test_options_are_checked_before_anything_is_asked() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean startingOffsets\?"):
        source(startingofsets="earliest")
    with pytest.raises(ConfigError, match=r"braid\.client\.operation_timeout"):
        source(**{"braid.client.operationtimeout": "soon"})


def test_the_schema_is_where_a_missing_cluster_is_told() -> None:
    with pytest.raises(ConnectFailed):
        source().schema()


def test_it_and_its_readers_pickle() -> None:
    copy = pickle.loads(pickle.dumps(source(valueFormat="string")))
    reader = pickle.loads(pickle.dumps(copy.streamReader(StructType().add("value", StringType()))))
    assert isinstance(reader, BraidStreamReader)
    pickle.loads(pickle.dumps(copy.reader(StructType().add("value", StringType()))))


@pytest.mark.parametrize(
    ("options", "schema"), [({}, StructType().add("__kay", BinaryType())), ({"endingOffsets": "latest"}, SCHEMA)]
)
def test_what_stands_in_the_way_of_a_stream_is_raised_by_its_first_call(options: dict[str, str], schema: StructType) -> None:
    reader = source(**options).streamReader(schema)
    with pytest.raises((InvalidArgument, ConfigError)):
        reader.initialOffset()


def test_what_stands_in_the_way_of_a_batch_is_raised_at_once() -> None:
    with pytest.raises(InvalidArgument, match="__kay"):
        source().reader(StructType().add("__kay", BinaryType()))


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({}, ReadAllAvailable()),
        ({"maxMessagesPerTrigger": "7"}, ReadMaxRows(7)),
        ({"maxBytesPerTrigger": "1m"}, ReadMaxBytes(1 << 20)),
        ({"maxBytesPerTrigger": "1m", "maxMessagesPerTrigger": "7"}, ReadMaxRows(7)),
        ({"minMessagesPerTrigger": "5"}, ReadMinRows(5)),
    ],
)
def test_the_limit_that_spark_is_told(options: dict[str, str], limit: ReadLimit) -> None:
    assert source(**options).streamReader(SCHEMA).getDefaultReadLimit() == limit


class _Recorded:
    """A planner and a cluster that note how they are asked."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.end: dict[str, Any] | None = None

    def refresh(self) -> None:
        self.calls.append("refresh")

    def latest(self, start: dict[str, Any], limits: Any, reads: Any, *, until: Any) -> dict[str, Any]:
        self.calls.append((limits, until))
        return self.end or start

    def cap(self, reads: Any) -> str:
        return "target"

    def move_cursor(self, topic: str, segment: int, incarnation: str, subscription: str, index: int) -> None:
        self.calls.append((topic, segment, incarnation, subscription, index))

    def view(self, topic: str) -> TopicView:
        segments = {number: SegmentView(number, f"segment-{number}", 0, 65535, (), (), number < 2) for number in range(4)}
        return TopicView(topic, "abc", 4, 0, segments)

    def states(self, topic: str, ids: Iterable[int]) -> dict[int, SegmentState]:
        return {number: SegmentState(f"segment-{number}", "abc", 0, 70, 70, number < 2, 100) for number in ids}

    def partitions(self, start: dict[str, Any], end: dict[str, Any], reads: Any) -> list[Piece]:
        self.calls.append("partitions")
        if self.calls.count("refresh") < 2:
            raise NotReady("Segment 7 is not in the layout that is known at the moment.")
        return [Piece("t", "abc", 7, "segment-7", 0, 5)]


def _recorded(**options: str) -> tuple[BraidStreamReader, _Recorded]:
    reader = source(**options).streamReader(SCHEMA)
    assert isinstance(reader, BraidStreamReader)
    asked = _Recorded()
    reader._planner = reader._reads = asked  # type: ignore[assignment]
    return reader, asked


def test_both_limits_are_kept_unless_all_is_asked_for() -> None:
    reader, asked = _recorded(maxMessagesPerTrigger="7", maxBytesPerTrigger="1m")
    reader.latestOffset({}, reader.getDefaultReadLimit())
    limits, _until = asked.calls[-1]
    assert (limits.max_messages, limits.max_bytes) == (7, 1 << 20)
    reader.latestOffset({}, ReadAllAvailable())
    limits, until = asked.calls[-1]
    assert (limits.max_messages, limits.max_bytes, until) == (None, None, None)
    assert asked.calls.count("refresh") == 2, "every poll gets answers of its own"


def test_a_run_to_the_end_has_one_target() -> None:
    reader, asked = _recorded()
    reader.prepareForTriggerAvailableNow()
    for _batch in range(2):
        reader.latestOffset({}, ReadAllAvailable())
        assert asked.calls[-1][1] == "target"


def test_the_cursor_moves_to_what_is_done_and_only_if_it_has_a_name() -> None:
    end = {
        "v": 1,
        "topics": {"topic://public/default/orders": {"inc": "abc", "next": 3, "segs": {"1": 5, "2": 0}, "drained": {"0": 9}}},
    }
    reader, asked = _recorded(subscription="query")
    reader.commit(end)
    assert sorted(asked.calls) == [
        ("topic://public/default/orders", segment, "abc", "query", index) for segment, index in ((0, 9), (1, 5), (2, 0))
    ]
    reader, asked = _recorded()
    reader.commit(end)
    assert asked.calls == []


def test_the_cursor_is_there_before_the_first_batch_is_read() -> None:
    topic = GIVEN["topic"]
    begin = {"inc": "abc", "next": 2, "segs": {"0": 3, "1": 4}}
    reader, asked = _recorded(subscription="query")
    asked.end = {"v": 1, "topics": {topic: {**begin, "segs": {"0": 10, "1": 10}}}, "base": {topic: begin}}
    for _poll in range(2):
        reader.latestOffset({"v": 1, "from": "latest"}, ReadAllAvailable())
    moved = [call for call in asked.calls if call[0] == topic]
    assert moved == [(topic, 0, "abc", "query", 3), (topic, 1, "abc", "query", 4)]


def test_a_new_cursor_keeps_nothing_that_lies_before_the_beginning() -> None:
    topic = GIVEN["topic"]
    begin = {"inc": "abc", "next": 4, "segs": {"2": 3, "3": 4}}
    reader, asked = _recorded(subscription="query")
    asked.end = {"v": 1, "topics": {topic: begin}, "base": {topic: begin}}
    reader.latestOffset({"v": 1, "from": "latest"}, ReadAllAvailable())
    moved = {call[1]: call[4] for call in asked.calls if call[0] == topic}
    assert moved == {0: 70, 1: 70, 2: 3, 3: 4}


def test_a_layout_that_is_older_than_the_checkpoint_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, asked = _recorded()
    (piece,) = reader.partitions({}, {})
    assert piece.value.segment == 7
    assert asked.calls == ["partitions", "refresh", "partitions", "refresh", "partitions"]
    reader, asked = _recorded()
    monkeypatch.setattr("braid_spark.stream_reader.LAYOUT_SECONDS", 0.0)
    with pytest.raises(NotReady):
        reader.partitions({}, {})


def test_a_query_that_comes_back_finds_or_makes_its_cursor_where_it_goes_on() -> None:
    topic = GIVEN["topic"]
    start = {"v": 1, "topics": {topic: {"inc": "abc", "next": 2, "segs": {"1": 4}}}}
    reader, asked = _recorded(subscription="query")
    reader.latestOffset(start, ReadAllAvailable())
    assert asked.calls[-1] == (topic, 1, "abc", "query", 4)


class _Order(pulsar.schema.Record):  # type: ignore[misc]  # untyped
    item = pulsar.schema.String()
    count = pulsar.schema.Integer()


def test_avro_values_are_read_by_the_schema_of_the_topic() -> None:
    name = "persistent://public/default/avro"
    with BackgroundBroker(with_http=False) as broker:
        client = pulsar.Client(broker.service_url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
        try:
            client.create_producer(name, schema=pulsar.schema.AvroSchema(_Order)).send(_Order(item="pen", count=3))
        finally:
            client.close()
        made = BraidDataSource({"service.url": broker.service_url, "topic": name, "valueFormat": "avro"})
        assert {"item", "count"} <= set(made.schema().fieldNames())
        reader = made.reader(StructType().add("count", IntegerType()))
        batches: list[Any] = [batch for part in reader.partitions() for batch in reader.read(part)]
        rows = [row for batch in batches for row in batch.to_pylist()]
        assert rows == [{"count": 3}]


def test_avro_without_any_schema_says_so() -> None:
    with BackgroundBroker(with_http=False) as broker, blocking.connect(broker.service_url) as client:
        with client.producer("persistent://public/default/plain") as producer:
            producer.send(b"x")
        options = {"service.url": broker.service_url, "topic": "persistent://public/default/plain", "valueFormat": "avro"}
        with pytest.raises(InvalidArgument, match="avroSchema"):
            BraidDataSource(options).schema()
