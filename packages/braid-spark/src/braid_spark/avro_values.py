"""Avro: which columns a schema has, and values read by the schema they were written with, as the reader's schema shows them.

Owns the type an Avro field has in Spark and what becomes of a field that a writer did not have: its default, else null if it
may be null. Asks nobody: who reads hands over how a writer's schema is found.
"""

from __future__ import annotations

import decimal
import io
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

import msgspec
import pyarrow as pa

from braid.errors import BraidError, InvalidArgument

_TIME: Final = pa.timestamp("us", tz="UTC")
FAILURES: Final = (
    pa.ArrowException,
    ValueError,
    TypeError,
    OverflowError,
    KeyError,
    EOFError,
    IndexError,
    decimal.DecimalException,
)
"""What libraries raise for values that are not what they should be."""
WriterSchema = Callable[[bytes], str | None]
"""The schema of a version, as messages name it; None if values of it say nothing of themselves. Raises BraidError."""


class AvroMisfit(BraidError):
    """A value that cannot be read as Avro; the message is a part of a sentence."""


class AvroReader:
    """Reads values, each by its writer's schema. Keeps what it has been told of writers."""

    def __init__(self, schema: Any, writer_schema: WriterSchema | None) -> None:
        self._schema = schema
        self._writer_schema = writer_schema
        self._by_version: dict[bytes, tuple[Any, Any]] = {}
        """Of each version: the writer's schema, and the reader's if it is another one."""

    def read(self, value: bytes, version: bytes) -> Any:
        """A value; `version` is empty if its message says none. Raises AvroMisfit."""
        from fastavro import schemaless_reader
        from fastavro.read import SchemaResolutionError

        writer, reader = self._schemas(version) if version else (self._schema, None)
        stream = io.BytesIO(value)
        try:
            found = schemaless_reader(stream, writer, reader)
        except SchemaResolutionError as error:
            why = _first_line(error)
            raise AvroMisfit(f"the schema it was written with cannot be read as Avro {self._schema['name']}: {why}") from None
        except FAILURES as error:
            raise AvroMisfit(f"it is no Avro {writer['name']}: {error}") from None
        if stream.tell() != len(value):
            raise AvroMisfit(f"it is no Avro {writer['name']}: {len(value) - stream.tell()} bytes are behind its end")
        return found

    def _schemas(self, version: bytes) -> tuple[Any, Any]:
        found = self._by_version.get(version)
        if found is None:
            try:
                text = None if self._writer_schema is None else self._writer_schema(version)
                found = (self._schema, None) if text is None else self._resolved(text)
            except InvalidArgument as error:
                raise AvroMisfit(f"the schema it was written with cannot be used: {error.message.rstrip('.')}") from None
            self._by_version[version] = found
        return found

    def _resolved(self, text: str) -> tuple[Any, Any]:
        writer, reader = parsed(text), self._schema
        if _bare(writer) == _bare(reader):
            return writer, None
        if writer["name"] != reader["name"]:
            # What a record is called says nothing about its bytes; columns are found by the names of fields.
            reader = {**reader, "aliases": [*reader.get("aliases", ()), writer["name"]]}
        return writer, reader


def _bare(schema: Any) -> Any:
    return {name: value for name, value in schema.items() if not name.startswith("__")}


def _first_line(error: Exception) -> str:
    said = str(error).partition("\n")[0]
    return said if len(said) <= 200 else said[:197] + "..."


def avro_columns(avro_schema: str) -> list[pa.Field]:
    """The fields of an Avro record as columns; raises InvalidArgument for a schema that is none, or no record."""
    return [pa.field(each["name"], _avro_type(each["type"], each["name"])) for each in reader_schema(avro_schema)["fields"]]


def reader_schema(avro_schema: str) -> Any:
    """A schema that values are to be shown by, parsed; raises InvalidArgument."""
    try:
        return parsed(avro_schema)
    except InvalidArgument as error:
        raise InvalidArgument(f"{error.message} Correct option avroSchema.") from None


@lru_cache(maxsize=256)
def parsed(text: str) -> Any:
    """The schema of a record; raises InvalidArgument."""
    try:
        import fastavro
    except ImportError:
        raise InvalidArgument('valueFormat=avro needs the package fastavro; install "braidmq-spark[avro]".') from None
    try:
        found = fastavro.parse_schema(_with_nulls(msgspec.json.decode(text)))
    except (msgspec.DecodeError, fastavro.schema.SchemaParseException, fastavro.schema.UnknownType, *FAILURES) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else str(error).rstrip(".")
        raise InvalidArgument(f"The Avro schema cannot be read: {why}.") from None
    if not isinstance(found, dict) or found.get("type") != "record":
        raise InvalidArgument("The Avro schema is no record, so that it has no columns; give the schema of a record.")
    return found


def _with_nulls(schema: Any) -> Any:
    """A schema whose fields are null by default if they may be null and no default is said, as in those of Pulsar's Python
    client: who reads what was written before a field was added sees null."""
    if isinstance(schema, list):
        return [_with_nulls(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: _with_nulls(value) if name in ("type", "items", "values") else value for name, value in schema.items()}
    if isinstance(schema.get("fields"), list):
        made["fields"] = [_with_null(each) for each in schema["fields"]]
    return made


def _with_null(field: Any) -> Any:
    made = _with_nulls(field)
    if isinstance(made, dict) and "default" not in made and isinstance(made.get("type"), list) and "null" in made["type"]:
        made["default"] = None
    return made


# Types.

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
