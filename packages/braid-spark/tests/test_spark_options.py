"""The options of format `braid`: spellings, values, what belongs together, and the page of the reference."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.errors import ConfigError
from braid_spark.offsets import Start
from braid_spark.option_table import BY_NAME, HIDDEN, TABLE
from braid_spark.options import Options, markdown, parse

TOPIC = "topic://public/default/orders"
NEEDED = {"service.url": "pulsar://localhost:6650", "topic": TOPIC}
PAGE = Path(__file__).parents[3] / "docs/reference/spark-options.md"


def refusal(raw: dict[str, str]) -> str:
    with pytest.raises(ConfigError) as error:
        parse(raw)
    return str(error.value)


@given(st.sampled_from(sorted(BY_NAME)), st.randoms(use_true_random=False))
def test_case_does_not_matter(name: str, random: Random) -> None:
    spelled = "".join(random.choice((each.upper(), each.lower())) for each in name)
    try:
        parse({spelled: "1"})
    except ConfigError as error:
        assert "There is no option" not in str(error)


def test_every_row_is_a_field_and_every_default_is_what_the_page_says() -> None:
    combined = {"starting_offsets", "starting_timestamp", "ending_offsets", "ending_timestamp"}
    assert {row.field for row in (*TABLE, *HIDDEN)} - combined <= set(Options.__struct_fields__)
    plain = Options()
    for row in TABLE:
        shown = row.default.strip("`")
        if row.field not in combined and row.default.startswith("`"):
            assert row.parse(shown) == getattr(plain, row.field), row.name
        assert row.doc[0] in "`ABCDEFGHIJKLMNOPQRSTUVWXYZ"
        assert not row.doc.endswith(".")


def test_what_is_given_is_what_is_had() -> None:
    raw = {
        "SERVICE.URL": "pulsar://localhost:6650",
        "path": "orders",
        "maxoffsetspertrigger": "100",
        "maxBytesPerTrigger": "64m",
        "minMessagesPerTrigger": "5",
        "maxTriggerDelay": "2 minutes",
        "failondataloss": "FALSE",
        "startingTime": "1970-01-01T00:00:01Z",
        "braid.client.operationTimeout": "5",
        "braid.producer.compression": "zstd",
        "checkpointLocation": "/tmp/x",
    }
    options = parse(raw)
    assert pickle.loads(pickle.dumps(options)) == options
    assert options.url == "pulsar://localhost:6650"
    assert options.topics == ("persistent://public/default/orders",)
    assert (options.max_messages_per_trigger, options.max_bytes_per_trigger) == (100, 64 << 20)
    assert (options.min_messages_per_trigger, options.max_trigger_delay_ms) == (5, 120_000)
    assert options.starting == Start(timestamp_ms=1000)
    assert not options.fail_on_data_loss
    assert options.client == {"operationTimeout": "5"}
    assert options.producer == {"compression": "zstd"}
    assert options.for_reading() is options


def test_a_query_taken_from_kafka() -> None:
    raw = {"kafka.bootstrap.servers": "one:6650,two:6650", "subscribe": "a, b,a", "startingOffsets": "earliest"}
    options = parse(raw).for_reading()
    assert options.url == "pulsar://one:6650"
    assert options.topics == ("persistent://public/default/a", "persistent://public/default/b")
    assert options.column_names == "kafka"
    assert options.starting == Start(word="earliest")
    assert parse(raw | {"columnNames": "braid"}).column_names == "braid"
    assert parse({"subscribePattern": "topic.*"}).topics_pattern == "public/default/topic.*"


def test_a_query_taken_from_pulsar_spark() -> None:
    raw = NEEDED | {
        "admin.url": "http://localhost:8080",
        "predefinedSubscription": "mine",
        "startingOffsets": json.dumps({TOPIC: {"0": -2}}),
    }
    options = parse(raw).for_reading()
    assert options.column_names == "pulsar"
    assert options.subscription == "mine"
    assert options.starting == Start(named={TOPIC: {0: "earliest"}})


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (
            {"maxmessagepertrigger": "1"},
            "There is no option maxmessagepertrigger of the format braid. Did you mean maxMessagesPerTrigger?",
        ),
        ({"service_url": "x"}, "Did you mean service.url?"),
        ({"startingOfsets": "x"}, "Did you mean startingOffsets?"),
        ({"braid.clients.x": "1"}, "Did you mean braid.client.*?"),
        ({"kafka.group.id": "x"}, "Settings of the client go under braid.client.*"),
        ({"zzz": "x"}, "The options are service.url, topic,"),
        ({"ordering": "keys"}, "The option ordering = 'keys' cannot be used: it must be one of key, none; did you mean key?"),
        ({"failOnDataLoss": "no"}, "it must be true or false."),
        ({"keySplit": "0"}, "it must be a whole number of at least 1 and at most 65536."),
        ({"maxMessagesPerTrigger": "1e3"}, "it must be a whole number of at least 1."),
        ({"maxBytesPerTrigger": "0"}, "write a number of bytes of at least 1"),
        ({"maxTriggerDelay": "soon"}, "write a time such as 500ms, 30s, 15m or 1h."),
        ({"startingTimestamp": "2026-01-01T00:00"}, "say how far the time is from UTC"),
        ({"startingTimestamp": "yesterday"}, "write milliseconds since 1970"),
        ({"startingTimestamp": "1969-01-01T00:00Z"}, "not be before 1970"),
        ({"topic": "a//b"}, "The option topic = 'a//b' cannot be used:"),
        ({"topics": " , "}, "write the names of topics with commas between them"),
        ({"topicsPattern": "public/default/("}, "must be a regular expression"),
        ({"topic": "a", "subscribe": "b"}, "Only one of topic, topics and topicsPattern can be set, not topic and subscribe."),
        ({"topic": "a", "path": "b"}, "The options topic and path mean the same but differ. Leave one out."),
        ({"startingOffsets": "sometimes"}, 'write earliest, latest or JSON such as {"topic": {"0": 23}}.'),
        ({"startingOffsets": "[1]"}, "write an object of topics"),
        ({"startingOffsets": '{"a": {"x": 1}}'}, "names the segment 'x' of a; a segment's name is a number."),
        ({"startingOffsets": '{"a": {"0": -3}}'}, "gives -3 for segment 0 of a; write an index, -2 (earliest) or -1 (latest)."),
        ({"startingOffsets": '{"a": 5}'}, "gives 5 for a; write earliest, latest or an index for each segment."),
        ({"startingOffsets": '{"v": 7}'}, "has version 7; this connector reads version 1."),
        ({"topic": "a", "startingOffsets": '{"b": {"0": 1}}'}, "names persistent://public/default/b, which is not read."),
        ({"topics": "a,b", "startingOffsets": '{"b": {"0": 1}}'}, "says nothing of persistent://public/default/a."),
        (
            {"startingOffsets": "latest", "startingTimestamp": "1"},
            "Only one of startingOffsets and startingTimestamp can be set.",
        ),
        ({"endingOffsets": "earliest"}, "cannot be earliest: nothing would be read."),
        (
            {"maxRecordsPerPartition": "5"},
            "maxRecordsPerPartition splits a segment by position, which breaks the order of its keys.",
        ),
        ({"minMessagesPerTrigger": "5", "maxMessagesPerTrigger": "4"}, "is above maxMessagesPerTrigger = 4. Lower it."),
        ({"txnVersion": "-1"}, "it must be a whole number of at least 0."),
    ],
)
def test_a_wrong_option_gets_one_sentence(raw: dict[str, str], message: str) -> None:
    assert message in refusal(raw)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"topic": "a"}, "Set the option service.url"),
        ({"service.url": "x"}, "No topic to read is given."),
        (NEEDED | {"sinkId": "a"}, "The option sinkId is of a query's write side"),
    ],
)
def test_what_reading_needs(raw: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(raw).for_reading()


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"topic": "a"}, "Set the option service.url"),
        ({"service.url": "x", "topics": "a,b"}, "A sink writes to one topic"),
        (NEEDED | {"startingOffsets": "latest"}, "The option startingOffsets is of a query's read side"),
        (NEEDED | {"txnAppId": "a"}, "txnAppId and txnVersion belong together"),
    ],
)
def test_what_writing_needs(raw: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(raw).for_writing()


def test_a_sink_may_go_without_a_topic_and_sees_what_spark_adds() -> None:
    raw = {"service.url": "x", "checkpointlocation": "/c", "queryname": "q", "asyncprogresstrackingenabled": "true"}
    options = parse(raw).for_writing()
    assert (options.topic, options.checkpoint_location, options.query_name, options.is_progress_async) == (
        None,
        "/c",
        "q",
        True,
    )


def test_the_page_of_the_reference_is_fresh() -> None:
    assert PAGE.read_text() == markdown(), "write it again: python -m braid_spark.options > docs/reference/spark-options.md"


def test_the_options_module_prints_the_page_and_needs_neither_spark_nor_arrow() -> None:
    code = (
        "import runpy, sys; runpy.run_module('braid_spark.options', run_name='__main__'); import braid_spark.planner; "
        "sys.exit(bool({'pyspark', 'pyarrow', 'braid.client'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == markdown()


def test_options_are_immutable() -> None:
    with pytest.raises(AttributeError):
        parse(NEEDED).topic = "x"  # type: ignore[misc]


def test_headers_are_among_kafkas_columns_if_they_are_wanted() -> None:
    wanted = parse({**NEEDED, "includeHeaders": "true"})
    assert (wanted.include_headers, wanted.column_names) == (True, "kafka")
    assert not parse({**NEEDED, "includeHeaders": "false"}).include_headers
    assert "__properties" in refusal({**NEEDED, "includeHeaders": "true", "columnNames": "braid"})
    assert "true or false" in refusal({**NEEDED, "includeHeaders": "yes"})
