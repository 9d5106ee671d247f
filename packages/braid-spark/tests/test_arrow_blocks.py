"""Arrow columns as blocks of messages: the bytes are those of the SDK's own encoder, rows go where the SDK sends such a key,
and what is no message is refused in one sentence."""

from __future__ import annotations

import base64
import datetime
import itertools
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.client.blocks import NO_KEY, places
from braid.errors import InvalidArgument
from braid.model.layout import SegmentLayout
from braid.model.routing import Routing
from braid.wire import messages as pb
from braid.wire.batch import decode_batch, encode_batch
from braid_spark.blocks import ArrowBlock

Row = tuple[bytes | None, bytes | None, int | None, dict[str, str] | None]
SIZES = st.one_of(st.integers(0, 20), st.sampled_from([127, 128, 129, 16383, 16384, 20000]))
VALUES = st.one_of(st.none(), st.binary(max_size=20), SIZES.map(bytes))
TEXTS = st.text(max_size=12)
KEYS = st.one_of(st.none(), TEXTS.map(str.encode), st.binary(max_size=6), st.sampled_from([b"k" * 127, b"k" * 128]))
TIMES = st.one_of(st.none(), st.integers(0, (1 << 63) - 1), st.sampled_from([0, 1, 127, 128, 1_700_000_000_000]))
MAPS = st.one_of(st.none(), st.dictionaries(TEXTS, TEXTS, max_size=3), st.just({"long": "x" * 200}))
ROWS = st.lists(st.tuples(VALUES, KEYS, TIMES, MAPS), max_size=30)
STRING_MAP = pa.map_(pa.string(), pa.string())


def columns(rows: list[Row]) -> dict[str, Any]:
    return {
        "values": pa.array([row[0] for row in rows], pa.binary()),
        "keys": pa.array([row[1] for row in rows], pa.binary()),
        "event_times": pa.array([row[2] for row in rows], pa.int64()),
        "properties": pa.array([None if row[3] is None else list(row[3].items()) for row in rows], STRING_MAP),
    }


def made(rows: list[Row]) -> ArrowBlock:
    given = columns(rows)
    return ArrowBlock.of(given.pop("values"), **given)


def single(row: Row) -> tuple[pb.SingleMessageMetadata, bytes]:
    """The message as the SDK writes it, one at a time."""
    value, key, event_ms, properties = row
    into = pb.SingleMessageMetadata()
    for name, text in (properties or {}).items():
        into.properties.add(key=name, value=text)
    if key is not None:
        try:
            into.partition_key = key.decode()
        except UnicodeDecodeError:
            into.partition_key = base64.b64encode(key).decode()
            into.partition_key_b64_encoded = True
    if event_ms:
        into.event_time = event_ms
    if value is None:
        into.null_value = True
    return into, value or b""


def payload(rows: list[Row]) -> bytes:
    return encode_batch(single(row) for row in rows)


def routed_key(row: Row) -> str | None:
    return single(row)[0].partition_key if row[1] is not None else None


@settings(max_examples=300, deadline=None)
@given(ROWS)
def test_the_bytes_are_those_of_the_sdk(rows: list[Row]) -> None:
    block = made(rows)
    assert bytes(block.encode()) == payload(rows)
    assert (block.count, block.size) == (len(rows), len(payload(rows)))
    assert block.largest == max((len(payload([row])) for row in rows), default=0)


@settings(max_examples=150, deadline=None)
@given(ROWS, st.integers(0, 10), st.integers(0, 10), st.data())
def test_slices_of_columns_are_understood(rows: list[Row], before: int, after: int, data: st.DataObject) -> None:
    """Spark's batches may be parts of larger ones."""
    around: list[Row] = [(b"other", b"\xff", 7, {"a": "b"})]
    table = pa.record_batch(columns(around * before + rows + around * after))
    part = table.slice(before, len(rows))
    block = ArrowBlock.of(part["values"], keys=part["keys"], event_times=part["event_times"], properties=part["properties"])
    assert bytes(block.encode()) == payload(rows)
    if rows:
        start = data.draw(st.integers(0, len(rows)))
        assert b"".join(bytes(each.encode()) for each in block.cut(1, start + 1)) == payload(rows)


@settings(max_examples=200, deadline=None)
@given(ROWS, st.integers(1, 40000), st.integers(1, 40))
def test_pieces_are_as_large_as_they_may(rows: list[Row], max_size: int, max_count: int) -> None:
    pieces = made(rows).cut(max_size, max_count)
    assert b"".join(bytes(each.encode()) for each in pieces) == payload(rows)
    assert all(1 <= each.count <= max_count and (each.size <= max_size or each.count == 1) for each in pieces)
    for one, other in itertools.pairwise(pieces):  # no row of the next one would fit
        first = other.cut(1, 1)[0]
        assert one.count == max_count or one.size + first.size > max_size


@settings(max_examples=200, deadline=None)
@given(ROWS, st.sampled_from(["high16", "low16", "mod-N"]), st.integers(1, 12), st.integers(0, 5))
def test_rows_go_where_the_sdk_sends_their_keys(rows: list[Row], routing: str, count: int, splits: int) -> None:
    if routing == "mod-N":
        layout = SegmentLayout.synthetic([f"part-{number}" for number in range(count)])
    else:
        layout = SegmentLayout.initial(count, 0, Routing(routing))
        for number in range(splits):
            layout = layout.split(layout.active_in_order[number % len(layout.active_in_order)].segment_id, 0)
    starts, at = places(layout)
    found = made(rows).spread(layout.routing, starts)
    wanted: dict[int | None, list[Row]] = {}
    for row in rows:
        key = routed_key(row)
        wanted.setdefault(None if key is None else layout.segment_of_key(key).segment_id, []).append(row)
    got = {None if place == NO_KEY else at[place].segment_id: bytes(each.encode()) for place, each in found}
    assert got == {segment: payload(some) for segment, some in wanted.items()}
    for place, each in found:  # and again, as after a change of the layout
        again = each.spread(layout.routing, starts)
        assert [(number, bytes(part.encode())) for number, part in again] == [(place, bytes(each.encode()))]


def test_many_rows_keep_their_order_in_each_place() -> None:
    rng = np.random.default_rng(1)
    rows: list[Row] = [(b"%d" % number, b"key-%d" % rng.integers(50), None, None) for number in range(5000)]
    layout = SegmentLayout.initial(8, 0)
    for place, each in made(rows).spread(layout.routing, places(layout)[0]):
        values = [int(body) for _metadata, body in decode_batch(bytes(each.encode()), each.count)]
        assert values == sorted(values) and place >= 0


@pytest.mark.parametrize(
    "kind",
    [
        pa.string(),
        pa.large_string(),
        pa.large_binary(),
        pa.binary_view(),
        pa.string_view(),
        pa.dictionary(pa.int32(), pa.string()),
    ],
)
def test_text_and_other_forms_of_bytes(kind: Any) -> None:
    plain = ArrowBlock.of(pa.array([b"one", None, b"three"]), keys=pa.array([b"a", b"b", None]))
    texts = pa.array(["one", None, "three"])
    keys = pa.array(["a", "b", None])
    if pa.types.is_dictionary(kind):
        block = ArrowBlock.of(texts.dictionary_encode(), keys=keys.dictionary_encode())
    else:
        block = ArrowBlock.of(texts.cast(kind), keys=pa.chunked_array([keys[:1].cast(kind), keys[1:].cast(kind)]))
    assert bytes(block.encode()) == bytes(plain.encode())
    fixed = ArrowBlock.of(pa.array([b"abc"], pa.binary(3)))
    assert bytes(fixed.encode()) == payload([(b"abc", None, None, None)])


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_event_times_of_any_unit(unit: str) -> None:
    moment = datetime.datetime(2026, 11, 16, 12, 0, tzinfo=datetime.UTC)
    times = pa.array([moment, None], pa.timestamp("us", "UTC")).cast(pa.timestamp(unit, "UTC"))
    block = ArrowBlock.of(pa.array([b"a", b"b"]), event_times=times)
    assert bytes(block.encode()) == payload([(b"a", None, int(moment.timestamp() * 1000), None), (b"b", None, None, None)])


def test_columns_that_are_null_altogether_are_left_out() -> None:
    block = ArrowBlock.of(pa.nulls(2), keys=pa.nulls(2), event_times=pa.nulls(2), properties=pa.nulls(2))
    assert bytes(block.encode()) == payload([(None, None, None, None)] * 2)
    assert [place for place, _each in block.spread(Routing.HIGH16, [0, 0x8000])] == [NO_KEY]


VALUE = pa.array([b"a", b"b"])


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"values": pa.array([1, 2])},
            r"The column value is of type int64; it must be binary or string: cast it, or .*to_json",
        ),
        ({"values": [b"a"]}, "The column value is a list; give a pyarrow array"),
        ({"values": pa.array([{"a": 1}])}, "The column value is of type struct"),
        ({"keys": pa.array([1, 2])}, "The column key is of type int64"),
        ({"keys": pa.array([b"a"])}, "The column key has 1 rows and the values 2; give columns of equal length"),
        ({"event_times": pa.array([1.5, 2.5])}, "The column event time is of type double; give a timestamp or milliseconds"),
        ({"event_times": pa.array([5, -1])}, "The event time of row 1 is before 1970"),
        ({"event_times": pa.array([5])}, "The column event time has 1 rows"),
        ({"event_times": pa.array([1 << 63, 1], pa.uint64())}, "The column event time holds a number above"),
        ({"event_times": pa.array([1 << 60, 1], pa.timestamp("s", "UTC"))}, "The column event time holds a time beyond"),
        ({"event_times": pa.array([1, 2], pa.timestamp("us"))}, "The column event time has no time zone"),
        ({"properties": pa.array(["a", "b"])}, "The column properties is of type string; give a map of string to string"),
        ({"properties": pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.int64()))}, "give a map of string to string"),
        ({"properties": pa.array([[], [("a", "b"), ("c", None)]], STRING_MAP)}, "The property c of a row is null"),
    ],
)
def test_bad_columns_get_one_sentence(given: dict[str, Any], text: str) -> None:
    values = given.pop("values", VALUE)
    with pytest.raises(InvalidArgument, match=text):
        ArrowBlock.of(values, **given)


def test_more_than_arrow_can_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    one = pa.array([bytes(1 << 20)])
    many = pa.DictionaryArray.from_arrays(pa.array(np.zeros(2100, np.int32)), one)
    with pytest.raises(InvalidArgument, match="take more than 2147483647 bytes; give smaller batches"):
        ArrowBlock.of(many)
    monkeypatch.setattr("braid_spark.blocks.MAX_BLOCK_BYTES", 100)
    with pytest.raises(InvalidArgument, match="take more than 100 bytes"):
        ArrowBlock.of(pa.array([b"a" * 50]), keys=pa.array([b"k" * 50]))
