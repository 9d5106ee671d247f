"""The decoder of fetches against the SDK, which reads the same bytes message by message."""

from __future__ import annotations

import base64
import datetime
import os
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_fetches import LEDGER, PUBLISHED_MS, TOPIC, Made, alone, batch, chunks, fetched, sdk_messages

from braid.client.segment_reads import Fetched
from braid.model.hashing import murmur3_x86_32, segment_hash
from braid.wire import messages as pb
from braid.wire.entries import build_entry
from braid_spark import fields
from braid_spark.columns import Columns, default_schema
from braid_spark.decode import EntryUnreadable, SegmentDecoder
from braid_spark.entries import Entries
from braid_spark.fields import Fields

EVERYTHING = Columns.of(default_schema())
FOR_EVER = 1 << 60


def decoded(entries: Sequence[bytes], columns: Columns = EVERYTHING, first: int = 0, **options: Any) -> list[dict[str, Any]]:
    """The rows of these entries in one fetch: by the way that suits so many, which gives what the one for many gives."""
    found = rows_of([fetched(entries, first)], columns, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fields, "_FEW", 0)
        assert rows_of([fetched(entries, first)], columns, **options) == found
    return found


def rows_of(fetches: Iterable[Fetched], columns: Columns = EVERYTHING, **options: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    usual: dict[str, Any] = {"topic": TOPIC, "segment": 3, "start": 0, "stop": FOR_EVER}
    decoder = SegmentDecoder(columns, **(usual | options))
    for each in fetches:
        for one in decoder.decode(each):
            one.validate(full=True)
            assert one.schema.equals(columns.schema)
            found += one.to_pylist(maps_as_pydicts="strict")
    return found


def milliseconds(time: datetime.datetime) -> int:
    return round(time.timestamp() * 1000)


# Against the SDK.

texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
values = st.one_of(
    st.binary(max_size=40), st.sampled_from([b"", bytes(20), b"\0\0\0\x05\x18\x01", b"x" * 127, b"y" * 128, b"z" * 16384])
)


@st.composite
def made_messages(draw: st.DrawFn) -> Made:
    key: str | None = draw(st.one_of(st.none(), texts, st.sampled_from(["k" * 127, "k" * 300])))
    is_b64 = key is not None and draw(st.integers(0, 9)) == 0
    if key is not None and is_b64:
        key = base64.b64encode(key.encode()).decode()
    value = draw(values)
    return Made(
        value=None if draw(st.integers(0, 9)) == 0 else value,
        key=key,
        is_key_b64=is_b64,
        is_key_null=draw(st.integers(0, 9)) == 0,
        properties=tuple(draw(st.lists(st.tuples(texts, texts | st.just("v" * 200)), max_size=3))),
        event_ms=draw(st.sampled_from([0, 0, 1, 127, 128, PUBLISHED_MS])),
        sequence_id=draw(st.sampled_from([None, 0, 1, 127, 128, 16383, 16384, (1 << 63) - 1, (1 << 64) - 1])),
        is_compacted=draw(st.integers(0, 9)) == 0,
        ordering_key=draw(st.sampled_from([None, None, None, b"", b"order"])),
        is_versioned=draw(st.booleans()),
        oddity=draw(st.sampled_from([""] * 12 + ["backwards", "twice", "unknown", "far", "many"])),
    )


@st.composite
def made_entries(draw: st.DrawFn) -> list[tuple[bytes, list[Made]]]:
    found = []
    is_unbatched = draw(st.booleans())  # by most producers
    for number in range(draw(st.integers(1, 20 if is_unbatched else 5))):
        codec = draw(st.sampled_from([0, 0, 0, 1, 2, 3, 4]))
        producer = draw(st.sampled_from(["p-1", "p-1", "another"]))
        if (draw(st.integers(0, 4)) == 0) != is_unbatched:
            message = draw(made_messages())
            found.append((alone(message, codec, number, producer), [message]))
        else:
            messages = draw(st.lists(made_messages(), min_size=1, max_size=4)) * draw(st.sampled_from([1, 1, 1, 7, 20]))
            found.append((batch(messages, codec, number, producer), messages))
    return found


@given(made_entries(), st.integers(0, 1000), st.integers(0, 300), st.integers(0, 300), st.sampled_from([-1, 5]))
@settings(max_examples=100, deadline=None)
def test_the_decoder_reads_what_the_sdk_reads(
    made: list[tuple[bytes, list[Made]]], first: int, skip: int, short: int, partition: int
) -> None:
    entries = [entry for entry, _ in made]
    total = sum(len(messages) for _, messages in made)
    start, stop = first + min(skip, total), first + max(total - short, 0)
    found = decoded(entries, first=first, start=start, stop=stop, partition=partition)
    wanted = [each for each in sdk_messages(entries, first, partition) if start <= each.index < stop]
    is_null = {
        first + at: each.value is None for at, each in enumerate(message for _, messages in made for message in messages)
    }
    assert [row["__index"] for row in found] == [each.index for each in wanted]
    for row, each in zip(found, wanted, strict=True):
        index, message = each.index, each.message
        assert row["value"] == (None if is_null[index] else message.payload)
        assert (None if row["__key"] is None else row["__key"].decode("utf-8", "replace")) == message.key
        assert row["__properties"] == message.properties
        assert (0 if row["__event_time"] is None else milliseconds(row["__event_time"])) == message.event_ms
        assert milliseconds(row["__publish_time"]) == message.publish_ms
        assert row["__producer"] == message.producer
        assert (row["__topic"], row["__segment"]) == (TOPIC, 3)
        assert row["__hash"] == (None if message.key is None else segment_hash(murmur3_x86_32(message.key.encode())))
        where = pb.MessageIdData.FromString(row["__message_id"])
        assert (where.ledgerId, where.entryId, where.partition) == (LEDGER, message.id.entry_id, partition)
        assert (where.batch_index, where.batch_size) == (message.id.batch_index, message.id.batch_size)


@given(made_entries(), st.lists(st.integers(1, 0xFFFF), max_size=4, unique=True))
@settings(max_examples=40, deadline=None)
def test_hash_sub_ranges_share_all_rows_and_keep_keys_together(made: list[tuple[bytes, list[Made]]], cuts: list[int]) -> None:
    entries = [entry for entry, _ in made]
    bounds = [0, *sorted(cuts), 0x10000]
    parts = [decoded(entries, hash_range=(low, high - 1)) for low, high in pairwise(bounds)]
    together = sorted((row for part in parts for row in part), key=lambda row: int(row["__index"]))
    assert together == decoded(entries)
    keys = [{row["__key"] for row in part} - {None} for part in parts]
    assert sum(len(each) for each in keys) == len(set().union(*keys))


@given(made_entries(), st.lists(st.integers(1, 0xFFFF), max_size=4, unique=True), st.integers(0, 7))
@settings(max_examples=25, deadline=None)
def test_ranges_share_all_rows_wherever_they_are_cut(made: list[tuple[bytes, list[Made]]], cuts: list[int], shift: int) -> None:
    entries = [entry for entry, _ in made]
    everything = decoded(entries)
    total = sum(len(messages) for _, messages in made)
    bounds = sorted({0, total, *(cut % total for cut in cuts)})
    parts = []
    for start, stop in pairwise(bounds):
        parts += rows_of([fetched(entries, before=bytes(shift))], start=start, stop=stop)
    assert parts == everything


# Shapes that take each of the ways to find messages.


@pytest.mark.parametrize("codec", [0, 1, 2, 3, 4])
@pytest.mark.parametrize(
    "sizes",
    [[100] * 500, [100, 99, 3] * 200, [0] * 40, [1, 0] * 30, [5000, 6000] * 20, [300] * 5, [100] * 300 + [101] * 300],
    ids=["equal", "varying", "empty", "tiny", "large", "few", "two sizes"],
)
@pytest.mark.parametrize("has_keys", [False, True])
def test_batches_of_all_shapes_are_read(sizes: list[int], codec: int, has_keys: bool) -> None:
    messages = [
        Made(value=os.urandom(size), key=f"k{at}" if has_keys else None, sequence_id=at) for at, size in enumerate(sizes)
    ]
    found = decoded([batch(messages, codec)])
    assert [row["value"] for row in found] == [each.value for each in messages]
    assert [row["__key"] for row in found] == [None if each.key is None else each.key.encode() for each in messages]


@pytest.mark.parametrize("milliseconds", [1, 1 << 34, 1 << 55, 1 << 56, 1 << 62, (1 << 64) - 1])
def test_times_of_any_size_are_read(milliseconds: int) -> None:
    columns = Columns.of(pa.schema([default_schema().field("__event_time")]))
    decoder = SegmentDecoder(columns, topic=TOPIC, segment=0, start=0, stop=FOR_EVER)
    entry = batch([Made(value=b"v" * 20, event_ms=milliseconds, sequence_id=1)] * 3)
    (found,) = decoder.decode(fetched([entry]))
    longest = ((1 << 63) - 1) // 1000 * 1000
    assert found.column(0).cast(pa.int64()).to_pylist() == [min(milliseconds * 1000, longest)] * 3


def test_a_message_alone_in_its_entry_keeps_all_it_says() -> None:
    first, second = decoded(
        [
            alone(Made(value=b"v", key="a2V5", is_key_b64=True, properties=(("a", "1"), ("b", "2")), event_ms=5)),
            alone(Made(value=None, key="key", is_key_null=True)),
        ]
    )
    assert (first["value"], first["__key"], first["__properties"]) == (b"v", b"key", {"a": "1", "b": "2"})
    assert milliseconds(first["__event_time"]) == 5
    assert (second["value"], second["__key"], second["__event_time"]) == (None, None, None)


def test_unbatched_messages_are_read_without_looking_at_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a message was looked at by itself")

    monkeypatch.setattr(Entries, "one", refuse)
    monkeypatch.setattr(Fields, "_read_one", refuse)
    made = [
        Made(
            value=b"v" * (at % 300 + 8),
            key=None if at % 7 == 0 else f"key-{at}",
            properties=(("a", str(at)),) * (at % 2),
            event_ms=at,
            sequence_id=at,
            ordering_key=b"o" if at % 3 == 0 else None,
            is_versioned=at % 2 == 0,
            oddity="unknown" if at % 5 == 0 else "",
        )
        for at in range(3000)
    ]
    among = [batch([Made(value=b"in a batch", sequence_id=at) for at in range(50)])]
    found = decoded([*(alone(each, number=at) for at, each in enumerate(made)), *among])
    assert [row["value"] for row in found] == [*(each.value for each in made), *[b"in a batch"] * 50]
    assert [row["__properties"] for row in found[:3000]] == [dict(each.properties) for each in made]
    assert [pb.MessageIdData.FromString(row["__message_id"]).entryId for row in found[:3000]] == list(range(3000))


@pytest.mark.parametrize("numbers", [[0, 127, 128], [16383, 16384], [1 << 31, (1 << 62) + 5, 1]])
@pytest.mark.parametrize("partition", [-1, 0, 300])
def test_ids_of_unbatched_messages_have_numbers_of_any_length(numbers: list[int], partition: int) -> None:
    one = fetched([alone(Made(value=b"x" * 20)) for _ in numbers])
    one.entry_id[:], one.ledger_id[:] = numbers, numbers[::-1]
    columns = Columns.of(pa.schema([default_schema().field("__message_id")]))
    wanted = [
        pb.MessageIdData(ledgerId=ledger_id, entryId=entry_id, partition=partition)
        for ledger_id, entry_id in zip(numbers[::-1], numbers, strict=True)
    ]
    for each in wanted:
        if partition < 0:
            each.ClearField("partition")
    found = rows_of([one], columns, partition=partition)
    assert [row["__message_id"] for row in found] == [each.SerializeToString() for each in wanted]


def test_a_property_that_is_none_names_its_entry() -> None:
    entries = [alone(Made(value=b"x" * 20, properties=(("a", "b"),))) for _ in range(300)]
    one = fetched(entries)
    place = len(entries[0]) * 200 + entries[0].index(b"\x0a\x01a\x12\x01b") + 4
    one.data = memoryview(damaged(bytes(one.data), place, b"\xff"))
    with pytest.raises(EntryUnreadable, match=r"entry 7:200 of .*property"):
        rows_of([one])


def test_compressed_and_chunked_messages_stay_in_their_places_among_unbatched_ones() -> None:
    whole = os.urandom(900)
    first, second = chunks(Made(value=whole, key="chunked"), 2, "uuid")
    plain = [alone(Made(value=f"v{at}".encode() * 5, key=f"k{at}", properties=(("p", str(at)),))) for at in range(9)]
    packed = alone(Made(value=b"p" * 500, key="packed"), codec=3)
    entries = [*plain[:3], first, packed, *plain[3:6], second, batch([Made(value=b"b1"), Made(value=b"b2")]), *plain[6:]]
    found = decoded(entries)
    values = [f"v{at}".encode() * 5 for at in range(9)]
    assert [row["value"] for row in found] == [*values[:3], b"p" * 500, *values[3:6], whole, b"b1", b"b2", *values[6:]]
    assert [row["__index"] for row in found] == [0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]
    assert [row["__key"] for row in found][2:6] == [b"k2", b"packed", b"k3", b"k4"]
    assert [row["__properties"] for row in found][-1] == {"p": "8"}
    where = pb.MessageIdData.FromString(found[7]["__message_id"])
    assert (where.entryId, where.first_chunk_message_id.entryId) == (8, 3)


def test_values_that_look_like_messages_are_values() -> None:
    # A batch inside a batch, and zeros: what looks like the beginning of a message and is none.
    inner = batch([Made(value=b"inner", key="k", sequence_id=at) for at in range(5)])
    messages = [
        Made(value=each, sequence_id=at) for at, each in enumerate([inner, inner + b"x", b"\0\0\0\x04\x18\x00\x40\x01"] * 40)
    ]
    assert [row["value"] for row in decoded([batch(messages)])] == [each.value for each in messages]


def test_a_large_fetch_becomes_batches_of_a_few_megabytes() -> None:
    entries = [batch([Made(value=os.urandom(1000)) for _ in range(500)], number=each) for each in range(20)]
    decoder = SegmentDecoder(EVERYTHING, topic=TOPIC, segment=0, start=0, stop=FOR_EVER)
    sizes = [each.nbytes for each in decoder.decode(fetched(entries))]
    assert len(sizes) > 1
    assert all(1 << 20 <= each <= 5 << 20 for each in sizes)


def test_a_payload_that_grows_when_decompressed_is_cut_into_batches() -> None:
    entry = batch([Made(value=bytes(10_000)) for _ in range(2000)], codec=3)
    assert len(entry) < 100_000
    decoder = SegmentDecoder(EVERYTHING, topic=TOPIC, segment=0, start=0, stop=FOR_EVER)
    found = list(decoder.decode(fetched([entry])))
    assert sum(each.num_rows for each in found) == 2000
    assert max(each.nbytes for each in found) <= 5 << 20


def test_nothing_comes_of_an_empty_fetch_or_one_outside_the_range() -> None:
    entries = [batch([Made(value=b"x")] * 3)]
    assert decoded([]) == []
    assert decoded(entries, start=3, stop=9) == []
    assert decoded(entries, first=9, start=3, stop=9) == []


def test_only_the_columns_asked_for_come_in_their_order() -> None:
    schema = pa.schema([("__index", pa.int64()), ("value", pa.string()), ("__key", pa.string())])
    found = decoded([batch([Made(value="wörth".encode(), key="schlüssel")])], Columns.of(schema))
    assert found == [{"__index": 0, "value": "wörth", "__key": "schlüssel"}]


def test_columns_of_kafkas_source() -> None:
    headers = pa.list_(pa.field("element", pa.struct([("key", pa.string()), ("value", pa.binary())])))
    schema = default_schema("kafka").append(pa.field("headers", headers))
    found = decoded(
        [batch([Made(value=b"v", key="k", properties=(("a", "1"),)), Made(value=b"w")])],
        Columns.of(schema, names="kafka"),
        first=40,
    )
    assert [
        (row["key"], row["value"], row["topic"], row["partition"], row["offset"], row["timestampType"]) for row in found
    ] == [
        (b"k", b"v", TOPIC, 3, 40, 0),
        (None, b"w", TOPIC, 3, 41, 0),
    ]
    assert [row["headers"] for row in found] == [[{"key": "a", "value": b"1"}], None]
    assert milliseconds(found[0]["timestamp"]) == PUBLISHED_MS


# What cannot be read.


def damaged(entry: bytes, at: int, by: bytes) -> bytes:
    return entry[:at] + by + entry[at + len(by) :]


def test_an_entry_without_checksum_is_read() -> None:
    entry = batch([Made(value=b"one"), Made(value=b"two")])
    assert [row["value"] for row in decoded([entry[6:], entry])] == [b"one", b"two"] * 2


def test_an_encrypted_entry_is_named() -> None:
    metadata = pb.MessageMetadata(producer_name="p", sequence_id=0, publish_time=1)
    metadata.encryption_keys.add(key="k", value=b"secret")
    with pytest.raises(EntryUnreadable, match=r"entry 7:1 of topic://public/default/orders.*index 1,.*encrypted.*at index 2"):
        decoded([alone(Made(value=b"x")), build_entry(metadata, b"???")])


@pytest.mark.parametrize("count", [3, 40])
@pytest.mark.parametrize("damage", ["cut", "longer", "size", "metadata", "count"])
def test_a_corrupt_batch_is_named_and_gives_no_rows(damage: str, count: int) -> None:
    metadata = pb.MessageMetadata(producer_name="p", sequence_id=0, publish_time=1, num_messages_in_batch=count)
    payload = b"\0\0\0\x04\x18\x03\x40\x01abc" * count
    if damage == "cut":
        payload = payload[:-1]
    elif damage == "longer":
        payload += b"x"
    elif damage == "size":
        payload = damaged(payload, 11 * (count - 1) + 5, b"\x05")
    elif damage == "metadata":
        payload = damaged(payload, 11 * (count - 1) + 4, b"\xff\xff\xff\xff")
    else:
        metadata.num_messages_in_batch = count + 1
    good = batch([Made(value=b"x")])
    with pytest.raises(EntryUnreadable, match="entry 7:1 of"):
        decoded([good, build_entry(metadata, payload), good])


def test_corrupt_heads_and_payloads_are_named() -> None:
    short = fetched([alone(Made(value=b"x"))])
    short.size[0] = 12
    with pytest.raises(EntryUnreadable, match="corrupt"):
        rows_of([short])
    beyond = fetched([alone(Made(value=b"x"))])
    beyond.size[0] += 1
    with pytest.raises(EntryUnreadable, match="corrupt"):
        rows_of([beyond])
    broken = fetched([alone(Made(value=b"x"))])
    broken.data = memoryview(damaged(bytes(broken.data), 10, b"\xff\xff\xff\xff\xff"))
    with pytest.raises(EntryUnreadable, match="metadata is not valid"):
        rows_of([broken])
    metadata = pb.MessageMetadata(producer_name="p", sequence_id=0, publish_time=1, compression="LZ4", uncompressed_size=50)
    with pytest.raises(EntryUnreadable, match="LZ4"):
        decoded([build_entry(metadata, b"no lz4")])
    metadata.uncompressed_size = 1 << 31
    with pytest.raises(EntryUnreadable, match="limit"):
        decoded([build_entry(metadata, b"no lz4")])


def damaged_anywhere(entry: bytes) -> list[bytes]:
    return [damaged(entry, at, b"\xff") for at in range(10, len(entry), 2)]


@pytest.mark.parametrize("is_alone", [False, True])
def test_damage_anywhere_ends_in_rows_or_in_a_named_error(is_alone: bool) -> None:
    made = [Made(value=b"abc", key=f"k{at}", properties=(("a", "b"),), event_ms=5, sequence_id=at) for at in range(17)]
    entry = alone(made[0]) if is_alone else batch(made)
    for each in damaged_anywhere(entry):
        one = fetched([entry])
        one.data = memoryview(each)
        try:
            rows_of([one])
        except EntryUnreadable:
            pass


def test_both_ends_of_a_hash_sub_range_belong_to_it() -> None:
    entries = [batch([Made(value=b"v", key="the key")])]
    ring = segment_hash(murmur3_x86_32(b"the key"))
    assert len(decoded(entries, hash_range=(ring, ring))) == 1
    assert decoded(entries, hash_range=(0, ring - 1)) == []
    assert decoded(entries, hash_range=(ring + 1, 0xFFFF)) == []
