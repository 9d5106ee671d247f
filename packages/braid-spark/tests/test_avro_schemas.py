"""Avro values of a topic whose schema changed: each is read by the schema it was written with."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from typing import Any

import fastavro
import pulsar
import pulsar.schema
import pyarrow as pa
import pytest
from made_fetches import TOPIC, fetched
from pyspark.sql.types import IntegerType, LongType, StringType, StructType

from braid.errors import InvalidArgument
from braid.testing.broker import BackgroundBroker
from braid.wire import messages as pb
from braid.wire.batch import encode_batch
from braid.wire.entries import build_entry
from braid_spark import topic_schemas
from braid_spark.columns import Columns
from braid_spark.decode import SegmentDecoder
from braid_spark.source import BraidDataSource
from braid_spark.values import ValueUnreadable


def record(*fields: tuple[Any, ...], name: str = "Order") -> str:
    """The schema of a record; a field is its name, its type and, if it has one, its default."""
    made = [dict(zip(("name", "type", "default"), each, strict=False)) for each in fields]
    return json.dumps({"type": "record", "name": name, "fields": made})


OLD = record(("item", "string"), ("count", "int"))
NEW = record(("price", "double", 0.5), ("count", "long"), ("item", "string"), ("note", ["null", "string"]))
OTHER = record(("item", "string"), ("count", "string"))


def written(schema: str, value: dict[str, Any]) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(json.loads(schema)), value)
    return out.getvalue()


def entry(values: list[bytes], version: int | None, *, is_batch: bool = False) -> bytes:
    metadata = pb.MessageMetadata(producer_name="p", sequence_id=0, publish_time=1)
    if version is not None:
        metadata.schema_version = version.to_bytes(8, "big")
    if not is_batch:
        (value,) = values
        return build_entry(metadata, value)
    metadata.num_messages_in_batch = len(values)
    return build_entry(
        metadata, encode_batch([(pb.SingleMessageMetadata(sequence_id=at), each) for at, each in enumerate(values)])
    )


def registry(*schemas: str) -> Callable[[bytes], str | None]:
    def find(version: bytes) -> str | None:
        number = int.from_bytes(version, "big")
        if number >= len(schemas):
            raise InvalidArgument(f"version {number} cannot be found")
        return schemas[number]

    return find


def rows(entries: list[bytes], reader: str, *schemas: str, **types: pa.DataType) -> list[dict[str, Any]]:
    columns = Columns.of(pa.schema(list(types.items())), value_format="avro", avro_schema=reader)
    decoder = SegmentDecoder(columns, topic=TOPIC, segment=4, start=0, stop=1 << 60, writer_schema=registry(*schemas))
    return [row for each in decoder.decode(fetched(entries, 100)) for row in each.to_pylist()]


ORDERS = {"item": pa.string(), "count": pa.int64()}


@pytest.mark.parametrize("is_batch", [False, True])
def test_each_value_is_read_by_the_schema_it_was_written_with(is_batch: bool) -> None:
    entries = [
        entry([written(OLD, {"item": "pen", "count": 3})], 0, is_batch=is_batch),
        entry([written(NEW, {"item": "ink", "count": 1 << 40, "price": 2.5, "note": "blue"})], 1, is_batch=is_batch),
        entry([written(OLD, {"item": "cap", "count": 4})], 0, is_batch=is_batch),
        entry([written(NEW, {"item": "unversioned", "count": 5, "price": 1.0, "note": None})], None, is_batch=is_batch),
    ]
    found = rows(entries, NEW, OLD, NEW, **ORDERS, price=pa.float64(), note=pa.string())
    assert found == [
        {"item": "pen", "count": 3, "price": 0.5, "note": None},
        {"item": "ink", "count": 1 << 40, "price": 2.5, "note": "blue"},
        {"item": "cap", "count": 4, "price": 0.5, "note": None},
        {"item": "unversioned", "count": 5, "price": 1.0, "note": None},
    ]


def test_versions_hold_for_all_messages_of_a_batch_and_for_what_is_kept_of_it() -> None:
    old = [written(OLD, {"item": f"old {at}", "count": at}) for at in range(3)]
    new = [written(NEW, {"item": f"new {at}", "count": at, "price": 1.0}) for at in range(3)]
    columns = Columns.of(pa.schema([("item", pa.string())]), value_format="avro", avro_schema=NEW)
    decoder = SegmentDecoder(columns, topic=TOPIC, segment=4, start=102, stop=105, writer_schema=registry(OLD, NEW))
    entries = [entry(old, 0, is_batch=True), entry(new[:1], 1), entry(new[1:], 1, is_batch=True)]
    found = [row["item"] for each in decoder.decode(fetched(entries, 100)) for row in each.to_pylist()]
    assert found == ["old 2", "new 0", "new 1"]


def test_records_of_other_names_and_unversioned_bytes_are_read() -> None:
    renamed = record(("count", "int"), ("item", "string"), name="Renamed")
    assert rows([entry([written(renamed, {"item": "a", "count": 1})], 0)], NEW, renamed, **ORDERS) == [
        {"item": "a", "count": 1}
    ]
    columns = Columns.of(pa.schema([("item", pa.string())]), value_format="avro", avro_schema=OLD)
    decoder = SegmentDecoder(columns, topic=TOPIC, segment=4, start=0, stop=9, writer_schema=lambda _: None)
    (found,) = decoder.decode(fetched([entry([written(OLD, {"item": "b", "count": 1})], 7)]))
    assert found.to_pylist() == [{"item": "b"}]


@pytest.mark.parametrize(
    ("reader", "schemas", "why"),
    [
        (NEW, [OLD], "version 1 cannot be found"),
        (NEW, [OLD, OTHER], "cannot be read as Avro Order: .*string"),
        (record(("needed", "int"), ("item", "string"), ("count", "int")), [OLD, OLD], "No default value for field needed"),
        (NEW, [OLD, '"string"'], "is no record"),
        (NEW, [OLD, "{"], "cannot be read"),
    ],
)
def test_a_value_whose_schema_does_not_fit_is_named(reader: str, schemas: list[str], why: str) -> None:
    entries = [entry([written(reader, {"item": "a", "count": 1, "needed": 1})], None), entry([b"\x02a\x02"], 1)]
    place = rf"index 101 of segment 4 of {TOPIC}, written with version 1 of the topic's schema,"
    with pytest.raises(ValueUnreadable, match=f"{place}.*{why}"):
        rows(entries, reader, *schemas, **ORDERS)


# With Pulsar's own client.


class V1:
    class Order(pulsar.schema.Record):  # type: ignore[misc]  # untyped
        item = pulsar.schema.String()
        count = pulsar.schema.Integer()


class V2:
    class Order(pulsar.schema.Record):  # type: ignore[misc]  # untyped
        count = pulsar.schema.Long()
        currency = pulsar.schema.String()
        item = pulsar.schema.String()


@pytest.fixture(scope="module")
def broker() -> Iterator[BackgroundBroker]:
    with BackgroundBroker(with_http=False) as started:
        yield started


def publish(broker: BackgroundBroker, topic: str, *, batching: bool) -> None:
    client = pulsar.Client(broker.service_url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    try:
        for number, order in enumerate((V1.Order, V2.Order, V1.Order)):
            schema = pulsar.schema.AvroSchema(order)
            producer = client.create_producer(topic, schema=schema, batching_enabled=batching)
            for at in range(3):
                more = {"currency": "EUR"} if order is V2.Order else {}
                producer.send_async(order(item=f"{number}-{at}", count=at, **more), None)
            producer.flush()
            producer.close()
    finally:
        client.close()


@pytest.mark.parametrize("batching", [False, True])
def test_two_versions_of_pulsars_client_are_read(
    broker: BackgroundBroker, batching: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bytes | None] = []
    ask = topic_schemas._schema

    async def counted(link: Any, topic: str, version: bytes | None) -> Any:
        asked.append(version)
        return await ask(link, topic, version)

    monkeypatch.setattr(topic_schemas, "_schema", counted)
    topic = f"persistent://public/default/avro-{batching}"
    publish(broker, topic, batching=batching)
    options = {"service.url": broker.service_url, "topic": topic, "valueFormat": "avro"}
    wanted = StructType().add("item", StringType()).add("count", LongType()).add("currency", StringType())
    latest = json.dumps(V2.Order.schema())
    expected = [
        {"item": f"{number}-{at}", "count": at, "currency": "EUR" if number == 1 else None}
        for number in range(3)
        for at in range(3)
    ]
    asked.clear()
    assert sorted(read(options | {"avroSchema": latest}, wanted), key=str) == sorted(expected, key=str)
    assert sorted(each for each in asked if each) == [bytes(8), bytes(7) + b"\x01"]
    older = StructType().add("item", StringType()).add("count", IntegerType())
    with pytest.raises(ValueUnreadable, match=r"index 3 of segment 0 of .* version 1 .*mismatch"):
        read(options | {"avroSchema": json.dumps(V1.Order.schema())}, older)


def read(options: dict[str, str], schema: StructType) -> list[dict[str, Any]]:
    reader = BraidDataSource(options).reader(schema)
    batches: list[Any] = [batch for part in reader.partitions() for batch in reader.read(part)]
    return [row for batch in batches for row in batch.to_pylist()]
