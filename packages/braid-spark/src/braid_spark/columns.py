"""The columns of a read: which there are, of which types, and which of them a schema asks for.

Owns the names (Braid's, pulsar-spark's and those of Spark's Kafka source) and the check of a user's schema, whose errors are
seen on the driver. With valueFormat json or avro, columns of other names are fields of the value. Builds no data.
"""

from __future__ import annotations

import difflib
from typing import Final

import msgspec
import pyarrow as pa

from braid.errors import InvalidArgument
from braid_spark.avro_values import avro_columns
from braid_spark.values import Values

_TIME: Final = pa.timestamp("us", tz="UTC")
_MAP: Final = pa.map_(pa.string(), pa.string())
_HEADERS: Final = pa.list_(pa.field("element", pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])))
_BYTES: Final = (pa.binary(), pa.string())
_TYPES: Final[dict[str, tuple[pa.DataType, ...]]] = {
    "value": _BYTES,
    "__key": _BYTES,
    "__topic": (pa.string(),),
    "__segment": (pa.int64(),),
    "__index": (pa.int64(),),
    "__message_id": (pa.binary(),),
    "__publish_time": (_TIME,),
    "__event_time": (_TIME,),
    "__properties": (_MAP,),
    "__producer": (pa.string(),),
    "__hash": (pa.int32(),),
    "partition": (pa.int32(),),
    "timestampType": (pa.int32(),),
    "headers": (_HEADERS,),
}
"""Each source of a column that is no field of the value: the types it can have, its own one first."""
_BRAID: Final = {name: name for name in _TYPES if name.startswith("__")}
_PULSAR: Final = _BRAID | {
    "__message_id": "__messageId",
    "__publish_time": "__publishTime",
    "__event_time": "__eventTime",
    "__properties": "__messageProperties",
}
_KAFKA: Final = {
    "__key": "key",
    "__topic": "topic",
    "partition": "partition",
    "__index": "offset",
    "__publish_time": "timestamp",
    "timestampType": "timestampType",
}
_STYLES: Final = {"braid": _BRAID, "pulsar": _PULSAR, "kafka": _KAFKA}
"""How sources are called, of those that are columns by themselves."""
_ON_REQUEST: Final = {"kafka": {"headers": "headers"}}
"""What a schema may ask for besides. (Kafka's source has headers only if it is told so.)"""
_SPARK_NAMES: Final = {
    pa.binary(): "binary",
    pa.string(): "string",
    pa.int64(): "bigint",
    pa.int32(): "int",
    _TIME: "timestamp",
    _MAP: "map<string,string>",
    _HEADERS: "array<struct<key:string,value:binary>>",
}

VALUE_FORMATS: Final = ("binary", "string", "json", "avro")


def default_schema(
    names: str = "braid", value_format: str = "binary", avro_schema: str | None = None, *, include_headers: bool = False
) -> pa.Schema:
    """All columns of a read whose user gives no schema."""
    _check_choices(names, value_format)
    if value_format == "avro":
        fields = avro_columns(_needed(avro_schema))
    else:
        fields = [pa.field("value", pa.binary() if value_format == "binary" else pa.string())]
    shown_as = _STYLES[names] | (_ON_REQUEST.get(names, {}) if include_headers else {})
    metadata = [pa.field(shown, _TYPES[source][0]) for source, shown in shown_as.items()]
    return pa.schema(fields + metadata)


class Columns(msgspec.Struct, frozen=True):
    """What a schema asks for. Pickles."""

    schema: pa.Schema
    sources: tuple[str, ...]
    """Of each column: `value`, metadata by Braid's name (by Kafka's where only Kafka has it), "" for a field of the value."""
    values: Values
    """Reads the fields of values."""

    @classmethod
    def of(
        cls, schema: pa.Schema, *, names: str = "braid", value_format: str = "binary", avro_schema: str | None = None
    ) -> Columns:
        """Check a schema; raises InvalidArgument that names the column and what it may be."""
        _check_choices(names, value_format)
        if not len(schema):
            raise InvalidArgument("The schema has no columns; name at least one, or give no schema to read all.")
        known = {"value": "value"} | _BRAID
        for style in (_STYLES[names], _ON_REQUEST.get(names, {})):
            known |= {shown: source for source, shown in style.items()}
        sources, fields = [], []
        for field in schema:
            if schema.names.count(field.name) > 1:
                raise InvalidArgument(f"The column {field.name} stands twice in the schema; leave one out.")
            source = known.get(field.name, "")
            if source:
                _check_type(field, _TYPES[source])
            elif field.name.startswith("__") or value_format in ("binary", "string"):
                raise InvalidArgument(_unknown(field.name, list(known), value_format))
            else:
                fields.append(field)
            sources.append(source)
        if value_format == "avro" and fields:
            avro_schema = _needed(avro_schema)
        return cls(schema, tuple(sources), Values.of(value_format, fields, avro_schema))


def _check_type(field: pa.Field, types: tuple[pa.DataType, ...]) -> None:
    if field.type not in types:
        wanted = " or ".join(_SPARK_NAMES[each] for each in types)
        given = _SPARK_NAMES.get(field.type, str(field.type))
        raise InvalidArgument(f"The column {field.name} is {wanted}, not {given}; change the schema.")


def _check_choices(names: str, value_format: str) -> None:
    if names not in _STYLES:
        raise InvalidArgument(f"columnNames={names} is not known; give one of {', '.join(_STYLES)}.")
    if value_format not in VALUE_FORMATS:
        raise InvalidArgument(f"valueFormat={value_format} is not known; give one of {', '.join(VALUE_FORMATS)}.")


def _needed(avro_schema: str | None) -> str:
    if avro_schema is None:
        raise InvalidArgument("valueFormat=avro needs a schema and the topic has none; give it as option avroSchema.")
    return avro_schema


def _unknown(name: str, known: list[str], value_format: str) -> str:
    near = difflib.get_close_matches(name, known, 1)
    if near:
        return f"There is no column {name}; did you mean {near[0]}?"
    if name.startswith("__"):
        return f"There is no column {name}; there are {', '.join(known)}."
    return (
        f"There is no column {name} with valueFormat={value_format}; use json or avro to read fields of values, or remove it."
    )
