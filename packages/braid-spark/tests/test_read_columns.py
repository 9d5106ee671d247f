"""Which columns a read has, and what a user is told about a schema that asks for others."""

from __future__ import annotations

import pickle

import pyarrow as pa
import pytest

from braid.errors import InvalidArgument
from braid_spark.columns import Columns, default_schema

AVRO = """{
    "type": "record",
    "name": "Order",
    "fields": [{"name": "id", "type": "long"}, {"name": "who", "type": ["null", "string"]}]
}"""


def test_the_columns_without_a_schema() -> None:
    assert default_schema().names == [
        "value",
        "__key",
        "__topic",
        "__segment",
        "__index",
        "__message_id",
        "__publish_time",
        "__event_time",
        "__properties",
        "__producer",
        "__hash",
    ]
    assert default_schema().field("value").type == pa.binary()
    assert default_schema(value_format="json").field("value").type == pa.string()
    assert default_schema("pulsar").names[5:9] == ["__messageId", "__publishTime", "__eventTime", "__messageProperties"]
    assert default_schema("kafka").names == ["value", "key", "topic", "partition", "offset", "timestamp", "timestampType"]
    assert default_schema("kafka", include_headers=True).names[-1] == "headers"
    assert default_schema(value_format="avro", avro_schema=AVRO).names[:3] == ["id", "who", "__key"]


@pytest.mark.parametrize("names", ["braid", "pulsar", "kafka"])
@pytest.mark.parametrize("value_format", ["binary", "string", "json", "avro"])
def test_every_default_schema_is_a_good_one_and_pickles(names: str, value_format: str) -> None:
    schema = default_schema(names, value_format, AVRO)
    columns = Columns.of(schema, names=names, value_format=value_format, avro_schema=AVRO)
    again = pickle.loads(pickle.dumps(columns))
    assert again.schema == schema
    assert again.sources == columns.sources


@pytest.mark.parametrize(
    ("schema", "options", "said"),
    [
        ({"__keys": pa.binary()}, {}, "no column __keys; did you mean __key?"),
        ({"__nonsense_of_mine": pa.binary()}, {}, "no column __nonsense_of_mine; there are value, __key"),
        ({"__messageId": pa.binary()}, {}, "did you mean __message_id?"),
        ({"amount": pa.int64()}, {}, "no column amount with valueFormat=binary; use json or avro"),
        ({"value": pa.int64()}, {}, "The column value is binary or string, not bigint; change the schema."),
        ({"__index": pa.int32()}, {}, "The column __index is bigint, not int"),
        ({"__event_time": pa.timestamp("us")}, {}, "The column __event_time is timestamp, not"),
        ({}, {}, "The schema has no columns"),
        ({"id": pa.int64()}, {"value_format": "avro"}, "option avroSchema"),
        ({"nix": pa.int64()}, {"value_format": "avro", "avro_schema": AVRO}, "schema Order has no field nix; it has id, who"),
        ({"id": pa.int64()}, {"value_format": "avro", "avro_schema": "{"}, "Avro schema cannot be read"),
        ({"id": pa.int64()}, {"value_format": "avro", "avro_schema": "{}"}, "Avro schema cannot be read: 'type' is missing"),
        ({"id": pa.int64()}, {"value_format": "avro", "avro_schema": '"string"'}, "is no record"),
        (
            {"value": pa.binary()},
            {"value_format": "xml"},
            "valueFormat=xml is not known; give one of binary, string, json, avro.",
        ),
        ({"value": pa.binary()}, {"names": "flink"}, "columnNames=flink is not known; give one of braid, pulsar, kafka."),
    ],
)
def test_a_schema_that_does_not_fit_is_refused(schema: dict[str, pa.DataType], options: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Columns.of(pa.schema(list(schema.items())), **options)
    assert said in str(caught.value)


def test_avro_types_that_no_column_can_have_are_named() -> None:
    union = '{"type": "record", "name": "R", "fields": [{"name": "u", "type": ["int", "string"]}]}'
    with pytest.raises(InvalidArgument, match="field u is a union of several types"):
        default_schema(value_format="avro", avro_schema=union)
    with pytest.raises(InvalidArgument, match="avroSchema"):
        default_schema(value_format="avro")


def test_a_column_that_stands_twice_is_refused() -> None:
    """Spark would fail in its own words, about buffers."""
    with pytest.raises(InvalidArgument, match="column value stands twice"):
        Columns.of(pa.schema([("value", pa.binary()), ("__key", pa.binary()), ("value", pa.binary())]))
