"""Records of logs and cursors in the metadata store, and the positions in cursor ledgers: shapes, bytes, paths.

Every shape carries a format version; a newer one than this build knows is refused, never guessed at. Ledger properties written
by others are kept as they are. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypeVar

import msgspec

from braid.errors import StoreMismatch
from braid.metadata.values import MAX_INT64
from braid.model.retention import RetentionPolicies

FORMAT_VERSION = 1
ROOT = "/managed-ledgers"


Id = Annotated[int, msgspec.Meta(ge=-1, le=MAX_INT64)]
"""Of a ledger or an entry, or an index; -1 = none, or the place before the first."""
Incarnation = Annotated[str, msgspec.Meta(pattern="^[0-9A-Za-z-]+$")]
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_INT64)]


class PositionRecord(msgspec.Struct, frozen=True, rename="camel"):
    """A position inside a JSON record."""

    ledger_id: Id
    entry_id: Id


class LedgerInfo(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A ledger in the list of a log."""

    ledger_id: Count
    entries: Count = 0
    """Final if `timestamp` is set."""
    size: Count = 0
    timestamp: Count = 0
    """When it was closed, in ms; 0 while it may grow."""
    last_index: Id = -1
    """Index of its last message, and append time of its last entry; set when it was closed with entries."""
    last_append_ms: Count = 0
    properties: dict[str, str] = {}
    """Kept whatever happens to the ledger."""


class LogRecord(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """`/managed-ledgers/<name>`."""

    format_version: int = FORMAT_VERSION
    incarnation: Incarnation
    owner_epoch: Count = 0
    owner_token: str = ""
    """Tells two openers apart that read the same record (an unknown outcome is settled by reading it back)."""
    fence: str | None = None
    properties: dict[str, str] = {}
    retention: RetentionPolicies | None = None
    """What the topic itself says; None = its namespace's policy."""
    created_ms: Count = 0
    terminated_position: PositionRecord | None = None
    ledgers: tuple[LedgerInfo, ...] = ()
    last_ledger_id: Id = -1
    """Highest id the list ever had: ids grow even when the list became empty (INV3)."""
    last_index: Id = -1
    last_append_ms: Count = 0
    """Where the numbering stood at the last update; counts when no ledger with entries is left."""
    trimmed_position: PositionRecord | None = None
    """The last entry deleted from the front of the log that a reader can have got; None if none was."""
    trimmed_index: Id = -1
    """Index of the last message deleted from the front; -1 if none was, or if the version that did it noted none."""
    is_deleted: bool = False
    """Being deleted: gone for everybody, whoever meets it finishes the work."""


class RangeRecord(msgspec.Struct, frozen=True, array_like=True):
    """Acknowledged entries `first..last` of a ledger."""

    ledger_id: Id
    first: Count
    last: Count


class MaskRecord(msgspec.Struct, frozen=True, array_like=True):
    """Messages of an entry that are not acknowledged yet: bit i = message i, as hexadecimal text (any length)."""

    ledger_id: Id
    entry_id: Id
    unacked: str


class CursorPosition(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Where a cursor stands: one entry of its ledger, or part of its record."""

    format_version: int = FORMAT_VERSION
    mark_delete: PositionRecord
    ranges: tuple[RangeRecord, ...] = ()
    masks: tuple[MaskRecord, ...] = ()
    properties: dict[str, int] = {}


class CursorRecord(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """`/managed-ledgers/<name>/<encoded cursor name>`."""

    format_version: int = FORMAT_VERSION
    incarnation: Incarnation
    """Of the log; a record left over from an earlier log of the same name does not match."""
    owner_epoch: Count
    owner_token: str
    cursors_ledger_id: Id = -1
    """-1: `position` is all there is. Otherwise the last entry of that ledger counts and `position` is the fall-back."""
    ledger_properties: dict[str, str] = {}
    position: CursorPosition
    properties: dict[str, str] = {}
    """What users set."""
    internal_properties: dict[str, str] = {}
    """What the broker and plug-ins set; users cannot reach it."""


R = TypeVar("R", LogRecord, CursorRecord)
_json = msgspec.json.Encoder()
_msgpack = msgspec.msgpack.Encoder()


class _Versioned(msgspec.Struct, rename="camel"):
    format_version: int


def encode_record(record: LogRecord | CursorRecord) -> bytes:
    """Record to JSON."""
    return _json.encode(record)


def decode_record(kind: type[R], key: str, data: bytes) -> R:
    """JSON to record; StoreMismatch if it is not one or is newer than this build."""
    try:
        version = msgspec.json.decode(data, type=_Versioned).format_version
        check_version(version, key)
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError) as exc:
        raise StoreMismatch(f"The record {key} is not readable ({exc}); restore the metadata store.") from exc


def encode_position(position: CursorPosition) -> bytes:
    """Position to the bytes of a cursor-ledger entry."""
    return _msgpack.encode(position)


def decode_position(ledger_id: int, data: bytes) -> CursorPosition:
    """Bytes of a cursor-ledger entry to the position."""
    where = f"cursor ledger {ledger_id}"
    try:
        check_version(msgspec.msgpack.decode(data, type=_Versioned).format_version, where)
        return msgspec.msgpack.decode(data, type=CursorPosition)
    except (msgspec.MsgspecError, ValueError) as exc:
        raise StoreMismatch(f"The last entry of {where} is not a cursor position ({exc}).") from exc


def check_version(version: int, where: str) -> None:
    """Refuse a format that this build does not know."""
    if not 1 <= version <= FORMAT_VERSION:
        raise StoreMismatch(
            f"The format version {version} of {where} is unknown to this build (1 to {FORMAT_VERSION}); use a newer one."
        )


def log_key(name: str) -> str:
    """Key of a log's record."""
    return f"{ROOT}/{name}"


def changed(properties: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """A property map with `changes` applied; None removes a key."""
    merged = dict(properties)
    for key, value in changes.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = value
    return merged
