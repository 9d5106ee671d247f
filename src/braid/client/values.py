"""Values: what an application sends and receives in place of bytes, and the schema registered for it.

`codec_of(schema)` gives the `Codec` of what `schema=` accepts: nothing or `bytes`, `str`, a msgspec `Struct` class or a
dataclass (written as JSON, registered as Pulsar's JSON schema with an Avro record definition). Pure.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import types
import typing
from collections.abc import Mapping
from typing import Any, Final, Protocol

import msgspec

from braid.errors import InvalidArgument
from braid.wire.messages import Schema
from braid.wire.types import SchemaType


class Codec(Protocol):
    """How values become payloads and back."""

    schema: Schema | None
    """What is registered at the broker; None for bytes."""

    def encode(self, value: Any) -> bytes: ...

    def decode(self, payload: bytes) -> Any: ...


class BytesCodec:
    """Payloads as they are."""

    schema: Schema | None = None

    def __repr__(self) -> str:
        return "bytes"

    def encode(self, value: Any) -> bytes:
        if isinstance(value, bytes):
            return value
        if isinstance(value, bytearray | memoryview):
            return bytes(value)
        raise InvalidArgument(
            f"A value of type {type(value).__name__} was sent by a producer without a schema, which takes bytes; "
            "encode it, or give the producer schema=str or the value's class."
        )

    def decode(self, payload: bytes) -> bytes:
        return payload


class StringCodec:
    """UTF-8 text."""

    def __init__(self) -> None:
        self.schema: Schema | None = _schema("String", SchemaType.STRING, b"")

    def __repr__(self) -> str:
        return "str"

    def encode(self, value: Any) -> bytes:
        if not isinstance(value, str):
            raise InvalidArgument(f"A value of type {type(value).__name__} was sent by a producer with schema=str.")
        return value.encode()

    def decode(self, payload: bytes) -> str:
        try:
            return payload.decode()
        except UnicodeDecodeError as error:
            raise InvalidArgument(f"A payload read with schema=str is no UTF-8 text: {error}.") from None


class JsonCodec:
    """Objects of one class as JSON, checked when they are sent and when they are received."""

    def __init__(self, cls: type) -> None:
        self._cls = cls
        self._decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(cls)
        self.schema: Schema | None = _schema("JSON", SchemaType.JSON, msgspec.json.encode(avro_definition(cls)))

    def __repr__(self) -> str:
        return self._cls.__name__

    def encode(self, value: Any) -> bytes:
        if not isinstance(value, self._cls):
            raise InvalidArgument(
                f"A value of type {type(value).__name__} was sent by a producer whose schema is {self._cls.__name__}."
            )
        try:
            payload = msgspec.json.encode(value)
            self._decoder.decode(payload)  # neither class checks its fields when an object is made, and readers will
        except msgspec.DecodeError as error:
            raise InvalidArgument(f"A {self._cls.__name__} was sent whose fields do not fit its types: {error}.") from None
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"A {self._cls.__name__} cannot be written as JSON: {error}.") from None
        return payload

    def decode(self, payload: bytes) -> Any:
        try:
            return self._decoder.decode(payload)
        except msgspec.DecodeError as error:  # also what is JSON but does not fit the class
            raise InvalidArgument(f"A payload cannot be read as {self._cls.__name__}: {error}.") from None


BYTES: Final = BytesCodec()


def codec_of(schema: Any) -> Codec:
    """The codec of a `schema=` argument; raises InvalidArgument."""
    if schema is None or schema is bytes:
        return BYTES
    if schema is str or schema == "string":
        return StringCodec()
    if isinstance(schema, type) and (issubclass(schema, msgspec.Struct) or dataclasses.is_dataclass(schema)):
        return JsonCodec(schema)
    raise InvalidArgument(f"schema={schema!r} cannot be used; give bytes, str, a msgspec Struct class or a dataclass.")


def _schema(name: str, kind: SchemaType, data: bytes) -> Schema:
    return Schema(name=name, schema_data=data, type=int(kind))  # type: ignore[arg-type]


# The Avro definition of a class.

_PRIMITIVES: Final[Mapping[Any, Any]] = {
    str: "string",
    bytes: "bytes",
    bytearray: "bytes",
    bool: "boolean",
    int: "long",
    float: "double",
    type(None): "null",
    datetime.datetime: "string",
    datetime.date: "string",
    datetime.time: "string",
    datetime.timedelta: "string",
    decimal.Decimal: "string",
}
"""As msgspec writes them in JSON."""


def avro_definition(cls: type) -> Any:
    """The Avro record that describes the class as JSON writes it; raises InvalidArgument for what Avro has no word for."""
    return _Definitions().of(cls, cls.__name__)


class _Definitions:
    """Named types are spelled out once and named after that."""

    def __init__(self) -> None:
        self._named: dict[Any, str] = {}

    def of(self, kind: Any, where: str) -> Any:
        if kind in _PRIMITIVES:
            return _PRIMITIVES[kind]
        if typing.get_origin(kind) is not None or kind in (list, set, frozenset, tuple, dict):
            return self._generic(kind, typing.get_origin(kind), typing.get_args(kind), where)
        if isinstance(kind, type) and issubclass(kind, enum.Enum):
            return self._enum(kind, where)
        if isinstance(kind, type) and (issubclass(kind, msgspec.Struct) or dataclasses.is_dataclass(kind)):
            return self._record(kind)
        raise self._unknown(kind, where)

    def _generic(self, kind: Any, origin: Any, args: tuple[Any, ...], where: str) -> Any:
        if origin is typing.Annotated:
            return self.of(args[0], where)
        if origin in (typing.Union, types.UnionType):
            return self._union(args, where)
        items = [each for each in args if each is not Ellipsis]
        if origin in (list, set, frozenset, tuple) and len(items) == 1:
            return {"type": "array", "items": self.of(items[0], where)}
        if origin in (dict, Mapping) and args[0] is str:
            return {"type": "map", "values": self.of(args[1], where)}
        raise self._unknown(kind, where)

    def _record(self, cls: type) -> Any:
        if cls in self._named:
            return self._named[cls]
        self._named[cls] = cls.__name__
        fields = []
        for name, kind, default in _fields(cls):
            field = {"name": name, "type": self.of(kind, f"{cls.__name__}.{name}")}
            if default is None and isinstance(field["type"], list) and field["type"][0] == "null":
                field["default"] = None
            fields.append(field)
        return {"type": "record", "name": cls.__name__, "fields": fields}

    def _enum(self, kind: type[enum.Enum], where: str) -> Any:
        if not all(isinstance(each.value, str) for each in kind):
            if not all(isinstance(each.value, int) for each in kind):
                raise self._unknown(kind, where)
            return "long"
        symbols = [each.value for each in kind]
        if not all(symbol.isidentifier() and symbol.isascii() for symbol in symbols):
            return "string"  # Avro's symbols are identifiers
        if kind in self._named:
            return self._named[kind]
        self._named[kind] = kind.__name__
        return {"type": "enum", "name": kind.__name__, "symbols": symbols}

    def _union(self, kinds: tuple[Any, ...], where: str) -> Any:
        found: list[Any] = []
        for each in sorted(kinds, key=lambda kind: kind is not type(None)):  # null first, so that null can be the default
            one = self.of(each, where)
            if one not in found:
                found.append(one)
        return found if len(found) > 1 else found[0]

    @staticmethod
    def _unknown(kind: Any, where: str) -> InvalidArgument:
        return InvalidArgument(
            f"The type {kind!r} of {where} cannot be described by a schema; use numbers, text, bytes, bool, dates, enums, "
            "lists, dict[str, ...], other classes, or None."
        )


def _fields(cls: type) -> list[tuple[str, Any, Any]]:
    """Name as written, type and default of each field."""
    hints = typing.get_type_hints(cls, include_extras=True)
    if issubclass(cls, msgspec.Struct):
        return [(each.encode_name, hints[each.name], each.default) for each in msgspec.structs.fields(cls)]
    return [(each.name, hints[each.name], each.default) for each in dataclasses.fields(cls)]  # type: ignore[arg-type]
