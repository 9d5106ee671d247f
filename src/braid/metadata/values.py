"""`read_json`: the value of a record, or an error that names the record.

Every reader of JSON records goes through this or says the same: what is stored may be damaged, edited by hand or of a newer
version, and whoever meets it must be told which record that is. Pure.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from braid.errors import StoreMismatch

T = TypeVar("T")
MAX_INT64 = (1 << 63) - 1


def read_json(kind: type[T], key: str, value: bytes) -> T:
    """The value of the record at `key`; raises StoreMismatch if it is not of this kind."""
    try:
        return msgspec.json.decode(value, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise unreadable(key, error) from error


def unreadable(key: str, why: object) -> StoreMismatch:
    """What to say of a record that makes no sense."""
    return StoreMismatch(f"The record {key} cannot be read: {str(why).rstrip('.')}.")
