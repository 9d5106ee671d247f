"""Fields of values: JSON or Avro objects as Arrow columns with the types the user's schema asks for.

Owns JSON and what becomes of objects; reading Avro is `avro_values`' business. A value that does not fit is an error that names
its place; values that are null give null in every field. Knows nothing of batches.
"""

from __future__ import annotations

import base64
import datetime
import decimal
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import pyarrow as pa

from braid.errors import BraidError, InvalidArgument
from braid_spark.avro_values import FAILURES, AvroMisfit, AvroReader, WriterSchema, reader_schema

_Convert = Callable[[Any], Any]


class ValueUnreadable(BraidError):
    """A value that is not what valueFormat or the schema says."""


class Origin(NamedTuple):
    """Where values come from."""

    topic: str
    segment: int
    indexes: Sequence[int]
    versions: Sequence[bytes] | None
    """Of each value: the version of the schema it was written with, empty if it says none; None if none of them says one."""
    writer_schema: WriterSchema | None

    def misfit(self, number: int, why: str) -> ValueUnreadable:
        """The error that names one of the values."""
        version = self.versions[number] if self.versions is not None else b""
        written = f", written with version {int.from_bytes(version, 'big')} of the topic's schema," if version else ""
        return ValueUnreadable(
            f"The value at index {self.indexes[number]} of segment {self.segment} of {self.topic}{written} does not fit the "
            f"schema: {why}. Change the schema, or read the column value alone."
        )


class Values(msgspec.Struct, frozen=True):
    """How values become the columns `fields`."""

    value_format: str
    fields: tuple[pa.Field, ...] = ()
    avro_schema: Any = None
    """Parsed: the schema by which values are shown, whatever they were written with."""

    @classmethod
    def of(cls, value_format: str, fields: Sequence[pa.Field], avro_schema: str | None) -> Values:
        """Raises InvalidArgument for a field the format cannot give."""
        if not fields or value_format not in ("json", "avro"):
            return cls(value_format)
        if value_format == "json":
            return cls(value_format, tuple(fields))
        parsed = reader_schema(avro_schema or "")
        known = {each["name"] for each in parsed["fields"]}
        for field in fields:
            if field.name not in known:
                raise InvalidArgument(
                    f"The Avro schema {parsed['name']} has no field {field.name}; it has {', '.join(sorted(known))}."
                )
        return cls(value_format, tuple(fields), parsed)

    def columns(self, values: pa.Array, origin: Origin) -> list[pa.Array]:
        """The fields of these values, in the order of `fields`; raises ValueUnreadable."""
        if not self.fields:
            return []
        read = _read_json if self.value_format == "json" else AvroReader(self.avro_schema, origin.writer_schema).read
        objects: list[dict[str, Any]] = []
        versions = origin.versions or [b""] * len(values)
        for number, (value, version) in enumerate(zip(values.to_pylist(), versions, strict=True)):
            try:
                found = {} if value is None else read(value, version)
            except AvroMisfit as error:
                raise origin.misfit(number, error.message) from None
            except (*FAILURES, msgspec.DecodeError) as error:
                raise origin.misfit(number, f"it is no JSON: {error}") from None
            if not isinstance(found, dict):
                raise origin.misfit(number, f"it is a {type(found).__name__}, not an object with fields")
            objects.append(found)
        return [self._column(field, objects, origin) for field in self.fields]

    def _column(self, field: pa.Field, objects: list[dict[str, Any]], origin: Origin) -> pa.Array:
        name = field.name
        convert = _converter(field.type)
        try:
            found = [each.get(name) for each in objects]
            if convert is not None:
                found = [None if each is None else convert(each) for each in found]
            return pa.array(found, field.type)
        except FAILURES:
            pass
        for at, each in enumerate(objects):  # which one was it?
            value = each.get(name)
            try:
                pa.array([None if value is None or convert is None else convert(value)], field.type)
                if convert is None:
                    pa.array([value], field.type)
            except FAILURES:
                raise origin.misfit(at, f"its field {name} is {_short(value)}, which is no {field.type}") from None
        raise ValueUnreadable(
            f"The field {name} of values of {origin.topic} cannot be read as {field.type}; change the schema."
        )


def _read_json(value: bytes, _version: bytes) -> Any:
    return msgspec.json.decode(value)


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
