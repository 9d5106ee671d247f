"""The messages of many batches at once: what their metadata says as columns of offsets and numbers.

Owns the fields of a message in a batch. Where the messages are is `starts`' business, how fields are read `fields`'. Pure.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from braid.errors import ProtocolError
from braid_spark.fields import Fields, Mask, Repeated, Wanted
from braid_spark.hashing import Bytes, Numbers

_PROPERTY, _KEY, _SIZE, _COMPACTED, _EVENT = 0x0A, 0x12, 0x18, 0x20, 0x28
_KEY_B64, _NULL, _NULL_KEY = 0x30, 0x48, 0x50
_WANTED: Final = Wanted(
    numbers=frozenset((_SIZE, _COMPACTED, _EVENT, _KEY_B64, _NULL, _NULL_KEY)),
    slices=frozenset((_KEY,)),
    repeated=frozenset((_PROPERTY,)),
)


class Messages(NamedTuple):
    """Columns; one row per message, offsets into the bytes they were read from."""

    value_at: Numbers
    value_size: Numbers
    key_at: Numbers
    key_size: Numbers
    """-1: the message has no key."""
    event_ms: NDArray[np.uint64]
    """0: not set."""
    has_value: Mask
    is_compacted: Mask
    is_key_b64: Mask
    properties: Repeated


def read_messages(data: Bytes, raw: memoryview, starts: Numbers, ends: Numbers) -> Messages:
    """The messages that begin at `starts` and end at `ends`; raises ProtocolError if one of them does not."""
    lengths: NDArray[np.uint32] = np.ndarray((len(data) - 3,), ">u4", data, 0, (1,))
    bodies = starts + 4 + lengths[starts]
    fields = Fields(data, raw, starts + 4, bodies, _WANTED)
    sizes = fields.number(_SIZE).astype(np.uint32).astype(np.int64)
    if not np.array_equal(bodies + sizes, ends):
        raise ProtocolError("A message in a batch says a size that does not fit its place; the batch is corrupt.")
    key_at, key_size = fields.place(_KEY)
    return Messages(
        value_at=bodies,
        value_size=sizes,
        key_at=key_at,
        key_size=np.where(fields.flag(_NULL_KEY), -1, key_size),
        event_ms=fields.number(_EVENT),
        has_value=~fields.flag(_NULL),
        is_compacted=fields.flag(_COMPACTED),
        is_key_b64=fields.flag(_KEY_B64),
        properties=fields.every(_PROPERTY),
    )


def pick(messages: Messages, kept: Mask) -> Messages:
    """The messages that are kept."""
    row, at, end = messages.properties
    has_row = kept[row]
    numbers = kept.cumsum() - 1
    properties = Repeated(numbers[row[has_row]], at[has_row], end[has_row])
    return Messages._make([*(column[kept] for column in messages[:-1]), properties])


def interleave(some: Messages, others: Messages, is_other: Mask) -> Messages:
    """Both as one, each message in its place: `is_other` says of all whether it is the next of `others`."""
    columns: list[NDArray[np.generic]] = []
    for one, other in zip(some[:-1], others[:-1], strict=True):
        column: NDArray[np.generic] = np.empty(len(is_other), one.dtype)
        column[~is_other], column[is_other] = one, other
        columns.append(column)
    places = (np.flatnonzero(~is_other), np.flatnonzero(is_other))
    rows = np.concatenate([place[each.properties.row] for place, each in zip(places, (some, others), strict=True)])
    order = np.argsort(rows, kind="stable")
    at, end = (np.concatenate([some.properties[part], others.properties[part]])[order] for part in (1, 2))
    return Messages._make([*columns, Repeated(rows[order], at, end)])
