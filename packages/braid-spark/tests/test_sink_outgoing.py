"""Which columns a sink takes, and what it says about those it does not."""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    DoubleType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructType,
    TimestampType,
)

from braid.errors import BraidError, ConfigError, InvalidArgument
from braid_spark.options import parse
from braid_spark.outgoing import Outgoing, _properties, producer_options

TEXT = StringType()
HEADER = StructType().add("key", StringType()).add("value", BinaryType())
TYPES: dict[str, DataType] = {
    "binary": BinaryType(),
    "string": TEXT,
    "int": IntegerType(),
    "bigint": LongType(),
    "double": DoubleType(),
    "timestamp": TimestampType(),
    "map<string,string>": MapType(TEXT, TEXT),
    "map<string,int>": MapType(TEXT, IntegerType()),
    "array<string>": ArrayType(TEXT),
    "struct<a:int>": StructType().add("a", IntegerType()),
    "headers": ArrayType(HEADER),
}


def schema(text: str) -> StructType:
    """Of `name type` pairs; Spark's own parser needs a JVM."""
    made = StructType()
    for each in text.split(", "):
        name, kind = each.split(" ")
        made = made.add(name, TYPES[kind])
    return made


@pytest.mark.parametrize(
    "columns",
    [
        "value binary",
        "value string, __key string",
        "key binary, value binary, topic string, headers headers",
        "value string, __eventTime timestamp, __messageProperties map<string,string>",
        "value binary, __event_time bigint, __properties map<string,string>, __segment bigint, __index bigint, __hash int",
    ],
)
def test_spellings_of_braid_pulsar_and_kafka_are_taken(columns: str) -> None:
    Outgoing(schema(columns), "t")


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ("__key string", "no column value"),
        ("value int", "column value is int"),
        ("value struct<a:int>", "to_json"),
        ("value binary, __key double", "column __key is double"),
        ("value binary, __properties map<string,int>", "column __properties is map<string,int>"),
        ("value binary, headers array<string>", "column headers is array<string>"),
        ("value binary, __kee string", "Did you mean __key?"),
        ("value binary, amount double", "to_json(struct(*))"),
        ("value binary, __key string, key string", "__key and key"),
        ("value binary, __deliver_at timestamp", "not delayed"),
    ],
)
def test_a_schema_that_does_not_fit_is_named(columns: str, says: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Outgoing(schema(columns), "t")
    assert says in str(caught.value)


def test_somebody_must_say_where_to_write() -> None:
    with pytest.raises(InvalidArgument, match="give the option topic, or a column __topic"):
        Outgoing(schema("value binary"), None)


def test_rows_go_to_the_topic_they_name_in_order() -> None:
    outgoing = Outgoing(schema("value string, __topic string"), None)
    batch = pa.record_batch({"value": ["1", "2", "3"], "__topic": ["a", "b", "a"]})
    assert [(topic, block.count) for topic, block in outgoing.blocks(batch)] == [
        ("persistent://public/default/a", 2),
        ("persistent://public/default/b", 1),
    ]


def test_the_option_wins_over_the_column() -> None:
    """Rows of a source name the topic they came from; a copy must not go back there."""
    outgoing = Outgoing(schema("value string, __topic string"), "out")
    batch = pa.record_batch({"value": ["1"], "__topic": ["in"]})
    assert [topic for topic, _block in outgoing.blocks(batch)] == ["out"]


def test_a_row_without_a_topic_is_an_error() -> None:
    outgoing = Outgoing(schema("value string, __topic string"), None)
    with pytest.raises(InvalidArgument, match="names no topic"):
        list(outgoing.blocks(pa.record_batch({"value": ["1", "2"], "__topic": ["a", None]})))


HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


def test_headers_become_properties() -> None:
    rows = [[("a", b"1"), ("b", b"2")], None, [], [("c", b"3")]]
    column = pa.array([None if row is None else [{"key": k, "value": v} for k, v in row] for row in rows], HEADERS)
    found = _properties(column)
    assert found is not None
    assert [dict(row or []) for row in found.to_pylist()] == [{"a": "1", "b": "2"}, {}, {}, {"c": "3"}]


def test_headers_of_a_slice_become_those_of_the_slice() -> None:
    column = pa.array([[{"key": "a", "value": b"1"}], [{"key": "b", "value": b"2"}]], HEADERS).slice(1)
    found = _properties(column)
    assert found is not None
    assert [dict(row) for row in found.to_pylist()] == [{"b": "2"}]


@pytest.mark.parametrize("value", [b"\xff", None])
def test_a_header_that_is_no_text_is_an_error(value: bytes | None) -> None:
    with pytest.raises(InvalidArgument, match="header"):
        _properties(pa.array([[{"key": "a", "value": value}]], HEADERS))


def test_options_of_producers() -> None:
    def given(**options: str) -> dict[str, object]:
        return producer_options(parse({f"braid.producer.{name}": value for name, value in options.items()}))

    assert given(compression="ZSTD") == {"compression": "zstd"}
    assert given() == {}
    for wrong in ({"compression": "rar"}, {"colour": "red"}):
        with pytest.raises(ConfigError) as caught:
            given(**wrong)
        assert isinstance(caught.value, BraidError)
        assert "Known" in str(caught.value)


def test_spellings_of_a_topic_are_one_topic() -> None:
    """Two producers for one topic would be of one name, and their rows out of order."""
    outgoing = Outgoing(schema("value binary, topic string"), None)
    spelled = ["orders", "persistent://public/default/orders", "public/default/orders", "other", "orders"]
    batch = pa.record_batch({"value": pa.array([b"%d" % n for n in range(5)], pa.binary()), "topic": spelled})
    found = {name: block._rows.to_pylist() for name, block in outgoing.blocks(batch)}
    assert [[row[-1:] for row in found[f"persistent://public/default/{name}"]] for name in ("orders", "other")] == [
        [b"0", b"1", b"2", b"4"],
        [b"3"],
    ]
    assert len(found) == 2


@pytest.mark.parametrize("name", ["", " ", "a/b", "http://a/b/c", "persistent://public/default/"])
def test_a_row_whose_topic_cannot_be_is_told(name: str) -> None:
    outgoing = Outgoing(schema("value binary, topic string"), None)
    with pytest.raises(InvalidArgument, match="topic column"):
        list(outgoing.blocks(pa.record_batch({"value": pa.array([b"v"], pa.binary()), "topic": [name]})))
