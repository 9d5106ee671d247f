"""Fields of JSON and Avro values as columns."""

from __future__ import annotations

import datetime
import io
import json
from decimal import Decimal
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from made_fetches import TOPIC, Made, batch, fetched

from braid_spark.columns import Columns, default_schema
from braid_spark.decode import SegmentDecoder
from braid_spark.values import ValueUnreadable

ORDER = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "who", "type": ["null", "string"], "default": None},
        {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "day", "type": {"type": "int", "logicalType": "date"}},
        {"name": "kind", "type": {"type": "enum", "name": "Kind", "symbols": ["A", "B"]}},
        {"name": "tags", "type": {"type": "array", "items": "string"}},
        {"name": "counts", "type": {"type": "map", "values": "int"}},
        {"name": "where", "type": {"type": "record", "name": "Where", "fields": [{"name": "zip", "type": "int"}]}},
        {"name": "raw", "type": "bytes"},
        {"name": "ratio", "type": "float"},
        {"name": "yes", "type": "boolean"},
    ],
}


def rows(values: list[bytes | None], columns: Columns) -> list[dict[str, Any]]:
    decoder = SegmentDecoder(columns, topic=TOPIC, segment=0, start=0, stop=1 << 40)
    found: list[dict[str, Any]] = []
    for one in decoder.decode(fetched([batch([Made(value=each) for each in values])], 100)):
        one.validate(full=True)
        assert one.schema.equals(columns.schema)
        found += one.to_pylist(maps_as_pydicts="strict")
    return found


def json_columns(**types: pa.DataType) -> Columns:
    return Columns.of(pa.schema(list(types.items())), value_format="json")


def test_json_without_fields_stays_text() -> None:
    schema = pa.schema([default_schema(value_format="json").field("value")])
    assert rows([b'{"a": 1}', None, b"no json"], Columns.of(schema, value_format="json")) == [
        {"value": '{"a": 1}'},
        {"value": None},
        {"value": "no json"},
    ]


def test_text_that_is_no_utf8_is_shown_with_replacements() -> None:
    schema = pa.schema([("value", pa.string())])
    assert rows([b"\xff!", b"fine"], Columns.of(schema, value_format="string")) == [{"value": "\ufffd!"}, {"value": "fine"}]


def test_fields_of_json_values_become_columns() -> None:
    columns = json_columns(
        id=pa.int64(),
        __index=pa.int64(),
        name=pa.string(),
        price=pa.decimal128(9, 2),
        at=pa.timestamp("us", tz="UTC"),
        day=pa.date32(),
        tags=pa.list_(pa.field("element", pa.string())),
        where=pa.struct([("zip", pa.int32()), ("city", pa.string())]),
        counts=pa.map_(pa.string(), pa.int32()),
        raw=pa.binary(),
        ratio=pa.float64(),
    )
    value = {
        "id": 5,
        "name": {"first": "A"},
        "price": 2.5,
        "at": "2024-01-02T03:04:05Z",
        "day": "2024-01-02",
        "tags": ["x", None],
        "where": {"zip": 1, "other": 2},
        "counts": {"a": 1},
        "raw": "AAE=",
        "ratio": 1,
        "more": [1],
    }
    first, second = rows([json.dumps(value).encode(), None], columns)
    assert first == {
        "id": 5,
        "__index": 100,
        "name": '{"first":"A"}',
        "price": Decimal("2.50"),
        "at": datetime.datetime(2024, 1, 2, 3, 4, 5, tzinfo=datetime.UTC),
        "day": datetime.date(2024, 1, 2),
        "tags": ["x", None],
        "where": {"zip": 1, "city": None},
        "counts": {"a": 1},
        "raw": b"\0\x01",
        "ratio": 1.0,
    }
    assert {name for name, each in second.items() if each is not None} == {"__index"}


@pytest.mark.parametrize(
    ("value", "type_", "said"),
    [
        (b"{", pa.int64(), "it is no JSON"),
        (b"[1]", pa.int64(), "it is a list, not an object"),
        (b'{"a": "x"}', pa.int64(), "its field a is 'x', which is no int64"),
        (b'{"a": 1.5}', pa.int32(), "its field a is 1.5, which is no int32"),
        (b'{"a": 99999999999}', pa.int32(), "which is no int32"),
        (b'{"a": "never"}', pa.timestamp("us", tz="UTC"), "its field a is 'never'"),
        (b'{"a": "text"}', pa.list_(pa.string()), "its field a is 'text'"),
        (b'{"a": 5}', pa.struct([("b", pa.int32())]), "its field a is 5"),
        (b'{"a": "!"}', pa.binary(), "its field a is '!'"),
    ],
)
def test_a_json_value_that_does_not_fit_is_named(value: bytes, type_: pa.DataType, said: str) -> None:
    with pytest.raises(ValueUnreadable) as caught:
        rows([b'{"a": null}', value], json_columns(a=type_))
    assert said in str(caught.value)
    assert f"index 101 of segment 0 of {TOPIC}" in str(caught.value)


def order(number: int) -> dict[str, Any]:
    return {
        "id": number,
        "who": None if number % 2 else "me",
        "price": Decimal("1.25"),
        "at": datetime.datetime(2024, 1, 2, 3, 4, 5, tzinfo=datetime.UTC),
        "day": datetime.date(2024, 1, 2),
        "kind": "B",
        "tags": ["x"],
        "counts": {"a": 1},
        "where": {"zip": 7},
        "raw": b"\0",
        "ratio": 0.5,
        "yes": True,
    }


def avro(value: dict[str, Any]) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(ORDER), value)
    return out.getvalue()


def test_fields_of_avro_values_become_columns() -> None:
    text = json.dumps(ORDER)
    schema = default_schema(value_format="avro", avro_schema=text)
    columns = Columns.of(schema, value_format="avro", avro_schema=text)
    wanted = [order(1), order(2)]
    found = rows([avro(each) for each in wanted], columns)
    assert [{name: row[name] for name in wanted[0]} for row in found] == wanted
    some = Columns.of(pa.schema([("who", pa.string()), ("value", pa.binary())]), value_format="avro", avro_schema=text)
    assert rows([avro(order(2)), None], some) == [{"who": "me", "value": avro(order(2))}, {"who": None, "value": None}]


@pytest.mark.parametrize("value", [b"", b"\xff", avro(order(1))[:-1], avro(order(1)) + b"x"])
def test_an_avro_value_that_does_not_fit_is_named(value: bytes) -> None:
    columns = Columns.of(pa.schema([("id", pa.int64())]), value_format="avro", avro_schema=json.dumps(ORDER))
    with pytest.raises(ValueUnreadable, match=r"index 101 of .* it is no Avro Order"):
        rows([avro(order(1)), value], columns)
