"""`Outgoing`: which columns of a table are which part of a message, and rows as blocks of messages by topic.

Owns the names and types that a sink takes, and says on the driver what is wrong with them. Must not send anything.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import ArrayType, BinaryType, DataType, LongType, MapType, StringType, StructType, TimestampType

from braid.errors import ConfigError, InvalidArgument, InvalidTopicName
from braid.model.names import TopicName
from braid_spark.blocks import ArrowBlock
from braid_spark.options import PRODUCER_PREFIX, Options

NAMES = {
    "value": ("value",),
    "key": ("__key", "key"),
    "topic": ("__topic", "topic"),
    "event_time": ("__event_time", "__eventTime"),
    "properties": ("__properties", "__messageProperties", "headers"),
}
"""Parts of a message, each with the columns it may come from: Braid's own spelling first, then those of other connectors."""
IGNORED = {
    *("__segment", "__index", "__message_id", "__publish_time", "__producer", "__hash"),
    *("__messageId", "__publishTime", "__sequence_id", "__sequenceId"),
}
"""What a source adds to its rows and a broker gives anew."""
TYPES: dict[str, tuple[tuple[type[DataType], ...], str]] = {
    "value": ((BinaryType, StringType), "binary or string; to_json(struct(*)) AS value makes a string of a row"),
    "key": ((BinaryType, StringType), "binary or string; CAST(... AS STRING) makes a string of it"),
    "topic": ((StringType,), "string"),
    "event_time": ((TimestampType, LongType), "timestamp, or bigint of milliseconds since 1970"),
    "properties": ((MapType, ArrayType), "map<string,string>, or array<struct<key:string,value:binary>>"),
}


HEADERS = "array<struct<key:string,value:binary>>"
CODECS = ("none", "lz4", "zlib", "zstd", "snappy")
PRODUCER_OPTIONS = {"compression": "compression", "compressiontype": "compression"}
"""Options of producers that a sink passes on, in lower case and without underlines."""


class Outgoing:
    """Made on the driver from the table's schema; tasks use copies of it."""

    def __init__(self, schema: StructType, topic: str | None) -> None:
        """`topic` is where all rows go; without it, a column says so. Raises InvalidArgument for a schema that does not fit."""
        self._topic = topic
        self._columns = _columns(schema, is_topic_given=topic is not None)

    def blocks(self, batch: pa.RecordBatch, first: Collection[str] = ()) -> Iterator[tuple[str, ArrowBlock]]:
        """The rows as messages, by topic, those of the topics `first` before others; rows of one topic stay in order."""
        if self._topic is not None:
            yield self._topic, self._block(batch)
            return
        names = batch.column(self._columns["topic"])
        if names.null_count:
            raise InvalidArgument("A row names no topic in its topic column; give the option topic, or leave such rows out.")
        spellings: dict[str, list[str]] = {}
        for name in pc.unique(names).to_pylist():
            spellings.setdefault(_full_name(name), []).append(name)
        known = frozenset(first)
        for topic in sorted(spellings, key=lambda each: each not in known):
            yield topic, self._block(batch.filter(pc.is_in(names, pa.array(spellings[topic], names.type))))

    def _block(self, batch: pa.RecordBatch) -> ArrowBlock:
        def column(part: str) -> pa.Array | None:
            place = self._columns.get(part)
            return None if place is None else batch.column(place)

        return ArrowBlock.of(
            batch.column(self._columns["value"]),
            keys=column("key"),
            event_times=column("event_time"),
            properties=_properties(column("properties")),
        )


def _full_name(topic: str) -> str:
    """Of a topic as a row names it: one topic has one producer, however it is spelled."""
    try:
        return str(TopicName.parse(topic))
    except InvalidTopicName as error:
        raise InvalidArgument(f"A row names {topic!r} in its topic column, which cannot be: {error}") from None


def _columns(schema: StructType, *, is_topic_given: bool) -> dict[str, int]:
    """Where the parts of a message stand in a row."""
    place = {name: number for number, name in enumerate(schema.fieldNames())}
    found: dict[str, int] = {}
    for part, names in NAMES.items():
        given = [name for name in names if name in place]
        if len(given) > 1:
            raise InvalidArgument(f"The columns {given[0]} and {given[1]} both mean the {part} of a message; leave one out.")
        if not given or (part == "topic" and is_topic_given):
            continue
        kinds, wanted = TYPES[part]
        kind = schema[given[0]].dataType
        if not isinstance(kind, kinds) or (part == "properties" and not _is_properties(kind)):
            raise InvalidArgument(f"The column {given[0]} is {kind.simpleString()}; it must be {wanted}.")
        found[part] = place[given[0]]
    known = {name for names in NAMES.values() for name in names} | IGNORED
    if "__deliver_at" in place:
        raise InvalidArgument("The column __deliver_at cannot be used: messages are not delayed in this version; leave it out.")
    for name in place:
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known - IGNORED), n=1)
            hint = (
                f"Did you mean {near[0]}?"
                if near
                else "Put it into value, as to_json(struct(*)) AS value does, or leave it out."
            )
            raise InvalidArgument(f"The column {name} is no part of a message. {hint}")
    if "value" not in found:
        raise InvalidArgument("There is no column value, which every message needs; to_json(struct(*)) AS value makes one.")
    if not is_topic_given and "topic" not in found:
        raise InvalidArgument("Nothing says where to write: give the option topic, or a column __topic.")
    return found


def _is_properties(kind: DataType) -> bool:
    if isinstance(kind, MapType):
        return isinstance(kind.keyType, StringType) and isinstance(kind.valueType, StringType)
    return kind.simpleString() == HEADERS


def _properties(column: pa.Array | None) -> pa.Array | None:
    """Properties as a map, of headers too, whose values must be text."""
    if column is None or not pa.types.is_list(column.type):
        return column
    entries = column.flatten()
    try:
        texts = entries.field("value").cast(pa.string())
    except pa.ArrowInvalid:
        raise InvalidArgument("A header's value is not text in UTF-8, as a message's properties are; leave it out.") from None
    lengths = pc.fill_null(pc.list_value_length(column), 0)
    offsets = pa.concat_arrays([pa.array([0], pa.int32()), pc.cumulative_sum(lengths)])
    keep = pc.is_valid(texts)
    if not pc.all(keep).as_py():
        raise InvalidArgument("A header has no value, which a message's property needs; leave it out.")
    return pa.MapArray.from_arrays(offsets, entries.field("key"), texts)


def producer_options(options: Options) -> dict[str, Any]:
    """What the user gave under `braid.producer.`, as `Client.producer` takes it; raises ConfigError."""
    found = {}
    for given, value in options.producer.items():
        name = PRODUCER_OPTIONS.get(given.lower().replace("_", ""))
        if name is None:
            raise ConfigError(f"There is no option {PRODUCER_PREFIX}{given} of a sink. Known: compression.")
        if value.lower() not in CODECS:
            raise ConfigError(f"The option {PRODUCER_PREFIX}{given} cannot be {value!r}. Known: {', '.join(CODECS)}.")
        found[name] = value.lower()
    return found
