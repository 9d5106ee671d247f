"""Values: what becomes of text and objects, and how their classes are described to the broker."""

from __future__ import annotations

import dataclasses
import datetime
import enum
from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec
import pytest

import braid
from braid.client import Client
from braid.client.values import BYTES, avro_definition, codec_of
from braid.errors import InvalidArgument
from braid.testing.broker import InProcessBroker
from braid.wire import requests
from braid.wire.types import SchemaType


class Colour(enum.Enum):
    RED = "RED"
    BLUE = "BLUE"


class Size(enum.Enum):
    SMALL = 1


class Place(msgspec.Struct):
    street: str


class Order(msgspec.Struct, rename="camel"):
    order_id: int
    total: float
    place: Place
    billing: Place | None = None
    colours: list[Colour] = []
    tags: dict[str, str] = {}
    note: Annotated[str, msgspec.Meta(max_length=100)] = ""
    at: datetime.datetime | None = None
    size: Size = Size.SMALL


@dataclasses.dataclass
class Plain:
    name: str
    parts: tuple[int, ...] = ()
    data: bytes | None = None


def test_bytes_stay_bytes() -> None:
    assert codec_of(None) is BYTES
    assert codec_of(bytes) is BYTES
    assert BYTES.schema is None
    assert BYTES.encode(b"x") == BYTES.encode(bytearray(b"x")) == BYTES.encode(memoryview(b"x")) == b"x"
    with pytest.raises(InvalidArgument, match="schema=str"):
        BYTES.encode("text")


@pytest.mark.parametrize("schema", [str, "string"])
def test_text(schema: Any) -> None:
    codec = codec_of(schema)
    assert codec.decode(codec.encode("ключ")) == "ключ"
    assert codec.schema is not None
    assert (int(codec.schema.type), codec.schema.schema_data) == (SchemaType.STRING, b"")
    with pytest.raises(InvalidArgument):
        codec.encode(b"bytes")
    with pytest.raises(InvalidArgument, match="UTF-8"):
        codec.decode(b"\xff")


@pytest.mark.parametrize(
    "value",
    [Order(order_id=1, total=2.5, place=Place("a"), colours=[Colour.RED], tags={"a": "b"}), Plain("a", (1, 2), b"x")],
)
def test_objects_become_json_and_come_back(value: Any) -> None:
    codec = codec_of(type(value))
    assert codec.decode(codec.encode(value)) == value
    assert codec.schema is not None
    assert int(codec.schema.type) == SchemaType.JSON
    with pytest.raises(InvalidArgument, match="type dict"):
        codec.encode({"name": "a"})
    with pytest.raises(InvalidArgument, match="cannot be read"):
        codec.decode(b"{}")
    with pytest.raises(InvalidArgument, match="cannot be read"):
        codec.decode(b"no json")


@pytest.mark.parametrize(
    "value",
    [
        Place(5),  # type: ignore[arg-type]
        Plain("a", ("1",)),  # type: ignore[arg-type]
        Order(order_id="no", total=1, place=Place("a")),  # type: ignore[arg-type]
        Order(order_id=1, total=float("nan"), place=Place("a")),
        Order(order_id=1, total=1, place=Place("a"), note="x" * 101),
        Order(order_id=1, total=1, place=Plain("a")),  # type: ignore[arg-type]
    ],
)
def test_an_object_whose_fields_do_not_fit_is_not_sent(value: Any) -> None:
    with pytest.raises(InvalidArgument, match="do not fit"):
        codec_of(type(value)).encode(value)


def test_the_definition_is_an_avro_record() -> None:
    place = {"type": "record", "name": "Place", "fields": [{"name": "street", "type": "string"}]}
    colour = {"type": "enum", "name": "Colour", "symbols": ["RED", "BLUE"]}
    assert avro_definition(Order) == {
        "type": "record",
        "name": "Order",
        "fields": [
            {"name": "orderId", "type": "long"},
            {"name": "total", "type": "double"},
            {"name": "place", "type": place},
            {"name": "billing", "type": ["null", "Place"], "default": None},
            {"name": "colours", "type": {"type": "array", "items": colour}},
            {"name": "tags", "type": {"type": "map", "values": "string"}},
            {"name": "note", "type": "string"},
            {"name": "at", "type": ["null", "string"], "default": None},
            {"name": "size", "type": "long"},
        ],
    }
    assert avro_definition(Plain)["fields"] == [
        {"name": "name", "type": "string"},
        {"name": "parts", "type": {"type": "array", "items": "long"}},
        {"name": "data", "type": ["null", "bytes"], "default": None},
    ]


def test_what_cannot_be_described() -> None:
    class Odd(msgspec.Struct):
        what: complex

    class Pair(msgspec.Struct):
        pair: tuple[int, str]

    for schema in (Odd, Pair, 5, int, dict, "avro"):
        with pytest.raises(InvalidArgument):
            codec_of(schema)


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with InProcessBroker(with_http=False) as broker, braid.connect(broker.service_url) as made:
        yield made


async def test_the_schema_is_registered_and_its_version_goes_with_the_messages(client: Client) -> None:
    consumer = await client.consumer("t", "s")
    producer = await client.producer("t", schema=Place)
    await producer.send(Place("a"), event_time=77)
    message = await consumer.receive(5)
    assert message.payload == b'{"street":"a"}'
    assert (message.value, message.event_ms, message.segment_id) == (message.payload, 77, -1)
    connection = await client.service_connection()
    answer = await connection.request(lambda number: requests.get_schema(number, "persistent://public/default/t"))
    assert int(answer.schema.type) == SchemaType.JSON
    assert msgspec.json.decode(answer.schema.schema_data)["name"] == "Place"
