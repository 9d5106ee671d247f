"""Fields of values: JSON or Avro objects as Arrow columns with the types the user's schema asks for.

Owns the two formats and the type an Avro field has in Spark. A value that does not fit is an error that names its index; values
that are null give null in every field. Knows nothing of batches or offsets.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import io
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import pyarrow as pa

from braid.errors import BraidError, InvalidArgument

_TIME: Final = pa.timestamp("us", tz="UTC")
_Convert = Callable[[Any], Any]
_FAILURES: Final = (
    pa.ArrowException,
    ValueError,
    TypeError,
    OverflowError,
    KeyError,
    EOFError,
    IndexError,
    decimal.DecimalException,
)


class ValueUnreadable(BraidError):
    """A value that is not what valueFormat or the schema says."""


class Values(msgspec.Struct, frozen=True):
    """How values become the columns `fields`."""

    value_format: str
    fields: tuple[pa.Field, ...] = ()
    avro_schema: Any = None
    """Parsed."""

    @classmethod
    def of(cls, value_format: str, fields: Sequence[pa.Field], avro_schema: str | None) -> Values:
        """Raises InvalidArgument for a field the format cannot give."""
        if not fields or value_format not in ("json", "avro"):
            return cls(value_format)
        if value_format == "json":
            return cls(value_format, tuple(fields))
        parsed = _parsed(avro_schema or "")
        known = {each["name"] for each in parsed["fields"]}
        for field in fields:
            if field.name not in known:
                raise InvalidArgument(
                    f"The Avro schema {parsed['name']} has no field {field.name}; it has {', '.join(sorted(known))}."
                )
        return cls(value_format, tuple(fields), parsed)

    def columns(self, values: pa.Array, topic: str, indexes: Sequence[int]) -> list[pa.Array]:
        """The fields of these values, in the order of `fields`; raises ValueUnreadable."""
        if not self.fields:
            return []
        read = msgspec.json.Decoder().decode if self.value_format == "json" else self._read_avro
        objects: list[dict[str, Any]] = []
        for at, value in enumerate(values.to_pylist()):
            try:
                found = {} if value is None else read(value)
            except (*_FAILURES, msgspec.DecodeError) as error:
                raise _misfit(topic, indexes[at], f"it is no {self._format}: {error}") from None
            if not isinstance(found, dict):
                raise _misfit(topic, indexes[at], f"it is a {type(found).__name__}, not an object with fields")
            objects.append(found)
        return [self._column(field, objects, topic, indexes) for field in self.fields]

    @property
    def _format(self) -> str:
        return "JSON" if self.value_format == "json" else f"Avro {self.avro_schema['name']}"

    def _read_avro(self, value: bytes) -> Any:
        from fastavro import schemaless_reader

        stream = io.BytesIO(value)
        found = schemaless_reader(stream, self.avro_schema, None)
        if stream.tell() != len(value):
            raise ValueError(f"{len(value) - stream.tell()} bytes are behind its end")
        return found

    def _column(self, field: pa.Field, objects: list[dict[str, Any]], topic: str, indexes: Sequence[int]) -> pa.Array:
        name = field.name
        convert = _converter(field.type)
        try:
            found = [each.get(name) for each in objects]
            if convert is not None:
                found = [None if each is None else convert(each) for each in found]
            return pa.array(found, field.type)
        except _FAILURES:
            pass
        for at, each in enumerate(objects):  # which one was it?
            value = each.get(name)
            try:
                pa.array([None if value is None or convert is None else convert(value)], field.type)
                if convert is None:
                    pa.array([value], field.type)
            except _FAILURES:
                raise _misfit(topic, indexes[at], f"its field {name} is {_short(value)}, which is no {field.type}") from None
        raise ValueUnreadable(f"The field {name} of values of {topic} cannot be read as {field.type}; change the schema.")


def _misfit(topic: str, index: int, why: str) -> ValueUnreadable:
    return ValueUnreadable(
        f"The value at index {index} of {topic} does not fit the schema: {why}. "
        "Change the schema, or read the column value alone."
    )


def _short(value: object) -> str:
    said = repr(value)
    return said if len(said) <= 60 else said[:57] + "..."


# What JSON and Avro cannot say themselves.


def _converter(type_: pa.DataType) -> _Convert | None:
    """What turns a decoded value into what Arrow takes for this type; None if nothing has to be done."""
    for is_it, convert in _SIMPLE:
        if is_it(type_):
            return convert
    if pa.types.is_struct(type_):
        return _struct_converter(type_)
    if pa.types.is_map(type_):
        item = _converter(type_.item_type) or _same
        return lambda value: [(name, None if each is None else item(each)) for name, each in _checked(value, dict).items()]
    if pa.types.is_list(type_):
        element = _converter(type_.value_type) or _same
        return lambda value: [None if each is None else element(each) for each in _checked(value, list)]
    return None


def _struct_converter(type_: pa.StructType) -> _Convert:
    parts = [(field.name, _converter(field.type) or _same) for field in type_.fields]

    def convert(value: Any) -> Any:
        _checked(value, dict)
        return {name: None if value.get(name) is None else part(value[name]) for name, part in parts}

    return convert


def _same(value: Any) -> Any:
    return value


def _checked(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"not a {kind.__name__}")
    return value


def _text(value: Any) -> str:
    """A string; anything else as the JSON it was, as Spark's own `from_json` does."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _binary(value: Any) -> Any:
    return base64.b64decode(value, validate=True) if isinstance(value, str) else value


def _time(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    found = datetime.datetime.fromisoformat(value)
    return found if found.tzinfo else found.replace(tzinfo=datetime.UTC)


def _integer(value: Any) -> int:
    if isinstance(value, bool | str) or value != int(value):
        raise TypeError("not an integer")  # Arrow would cut it off
    return int(value)


def _date(value: Any) -> Any:
    return datetime.date.fromisoformat(value) if isinstance(value, str) else value


def _decimal(value: Any) -> decimal.Decimal:
    return decimal.Decimal(str(value))


_SIMPLE: Final[tuple[tuple[Callable[[pa.DataType], bool], _Convert], ...]] = (
    (pa.types.is_integer, _integer),
    (pa.types.is_string, _text),
    (pa.types.is_binary, _binary),
    (pa.types.is_timestamp, _time),
    (pa.types.is_date, _date),
    (pa.types.is_decimal, _decimal),
)


# Avro's types.

_PRIMITIVES: Final = {
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "bytes": pa.binary(),
    "string": pa.string(),
    "enum": pa.string(),
    "fixed": pa.binary(),
    "null": pa.null(),
}
_LOGICAL: Final = {
    "timestamp-millis": _TIME,
    "timestamp-micros": _TIME,
    "date": pa.date32(),
    "uuid": pa.string(),
}


def avro_columns(avro_schema: str) -> list[pa.Field]:
    """The fields of an Avro record as columns; raises InvalidArgument for a schema that is none, or no record."""
    return [pa.field(each["name"], _avro_type(each["type"], each["name"])) for each in _parsed(avro_schema)["fields"]]


def _parsed(avro_schema: str) -> Any:
    try:
        import fastavro
    except ImportError:
        raise InvalidArgument('valueFormat=avro needs the package fastavro; install "braidmq-spark[avro]".') from None
    try:
        parsed = fastavro.parse_schema(msgspec.json.decode(avro_schema))
    except (msgspec.DecodeError, fastavro.schema.SchemaParseException, fastavro.schema.UnknownType, *_FAILURES) as error:
        raise InvalidArgument(f"The Avro schema cannot be read: {error}. Correct option avroSchema.") from None
    if not isinstance(parsed, dict) or parsed.get("type") != "record":
        raise InvalidArgument("The Avro schema is no record, so that it has no columns; give the schema of a record.")
    return parsed


def _avro_type(avro: Any, name: str) -> pa.DataType:
    """The type of an Avro field."""
    if isinstance(avro, list):
        others = [each for each in avro if each != "null"]
        if len(others) != 1:
            raise InvalidArgument(f"The Avro field {name} is a union of several types, which no column can be; leave it out.")
        return _avro_type(others[0], name)
    if isinstance(avro, str):
        avro = {"type": avro}
    kind = avro["type"]
    found = _logical_type(avro) or (_PRIMITIVES.get(kind) if isinstance(kind, str) else _avro_type(kind, name))
    if kind == "record":
        found = pa.struct([pa.field(each["name"], _avro_type(each["type"], each["name"])) for each in avro["fields"]])
    elif kind == "array":
        found = pa.list_(pa.field("element", _avro_type(avro["items"], name)))
    elif kind == "map":
        found = pa.map_(pa.string(), _avro_type(avro["values"], name))
    if found is None:
        raise InvalidArgument(f"The Avro field {name} has the type {kind}, which no column can have; leave it out.")
    return found


def _logical_type(avro: dict[str, Any]) -> pa.DataType | None:
    logical = avro.get("logicalType")
    if logical == "decimal":
        return pa.decimal128(avro["precision"], avro.get("scale", 0))
    return _LOGICAL.get(str(logical))
