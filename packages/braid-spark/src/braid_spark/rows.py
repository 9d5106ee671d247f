"""`Rows`: decoded messages that become a record batch, and how each column is made of them.

Owns the table from sources of columns (see `columns`) to Arrow arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import msgspec
import numpy as np
import pyarrow as pa

from braid_spark import arrays
from braid_spark.avro_values import WriterSchema
from braid_spark.buffers import bytes_value, number_value, positions
from braid_spark.columns import Columns
from braid_spark.entries import Entries
from braid_spark.hashing import Bytes, Numbers
from braid_spark.messages import Messages
from braid_spark.values import Origin


class Rows(msgspec.Struct, frozen=True):
    """Messages of several entries."""

    topic: str
    segment: int
    data: Bytes
    messages: Messages
    index: Numbers
    entries: Entries
    entry: Numbers
    """Of each row: the number of its entry."""
    partition: int
    first_chunks: Mapping[int, tuple[int, int]]
    """Where the first chunk is, by the number of the entry that is the last."""
    kept: Numbers | None
    """Which of all messages of the entries these are; None if all."""
    writer_schema: WriterSchema | None = None
    """How the schema of a version is found."""

    def record_batch(self, columns: Columns) -> pa.RecordBatch:
        """These rows with the columns asked for; raises ValueUnreadable or ProtocolError."""
        values = columns.values
        fields = iter(values.columns(_value(self, pa.binary()), self._origin()) if values.fields else ())
        found = [
            _BUILDERS[source](self, field.type) if source else next(fields)
            for field, source in zip(columns.schema, columns.sources, strict=True)
        ]
        return pa.RecordBatch.from_arrays(found, schema=columns.schema)

    def _origin(self) -> Origin:
        said, rows = self.entries.said, self.entry.tolist()
        versions = None
        if (said.version_size > 0).any():
            places = zip(said.version_at.tolist(), np.maximum(said.version_size, 0).tolist(), strict=True)
            of_entries = [self.data[at : at + size].tobytes() for at, size in places]
            versions = [of_entries[row] for row in rows]
        return Origin(self.topic, self.segment, self.index.tolist(), versions, self.writer_schema)


def _value(rows: Rows, type_: pa.DataType) -> pa.Array:
    messages = rows.messages
    return arrays.gather(rows.data, messages.value_at, messages.value_size, messages.has_value, type_)


def _key(rows: Rows, type_: pa.DataType) -> pa.Array:
    return arrays.keys(rows.data, rows.messages, type_)


def _topic(rows: Rows, type_: pa.DataType) -> pa.Array:
    return pa.repeat(bytes_value(rows.topic.encode(), type_), len(rows.index))


def _segment(rows: Rows, type_: pa.DataType) -> pa.Array:
    return pa.repeat(number_value(rows.segment), len(rows.index))


def _index(rows: Rows, type_: pa.DataType) -> pa.Array:
    return arrays.numbers(rows.index, type_)


def _message_id(rows: Rows, type_: pa.DataType) -> pa.Array:
    every = arrays.message_ids(rows.entries, rows.partition, rows.first_chunks, type_)
    return every if rows.kept is None else every.take(positions(rows.kept))


def _publish_time(rows: Rows, type_: pa.DataType) -> pa.Array:
    return arrays.times(rows.entries.said.publish_ms[rows.entry], type_)


def _event_time(rows: Rows, type_: pa.DataType) -> pa.Array:
    return arrays.times(rows.messages.event_ms, type_, rows.messages.event_ms != 0)


def _properties(rows: Rows, type_: pa.DataType) -> pa.Array:
    return arrays.properties(rows.data, rows.messages, type_)


def _headers(rows: Rows, type_: pa.DataType) -> pa.Array:
    return arrays.headers(rows.data, rows.messages, type_)


def _producer(rows: Rows, type_: pa.DataType) -> pa.Array:
    said = rows.entries.said
    return arrays.of_entries(rows.data, said.producer_at, said.producer_size, rows.entry, type_)


def _hash(rows: Rows, type_: pa.DataType) -> pa.Array:
    hashes = arrays.key_hashes(_key(rows, pa.binary()))
    return arrays.numbers(hashes, type_, rows.messages.key_size >= 0)


def _timestamp_type(rows: Rows, type_: pa.DataType) -> pa.Array:
    return pa.repeat(pa.scalar(0, type_), len(rows.index))  # the producer's time


_BUILDERS: Final[dict[str, Callable[[Rows, pa.DataType], pa.Array]]] = {
    "value": _value,
    "__key": _key,
    "__topic": _topic,
    "__segment": _segment,
    "__index": _index,
    "__message_id": _message_id,
    "__publish_time": _publish_time,
    "__event_time": _event_time,
    "__properties": _properties,
    "__producer": _producer,
    "__hash": _hash,
    "partition": _segment,
    "timestampType": _timestamp_type,
    "headers": _headers,
}
