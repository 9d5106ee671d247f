"""The messages of many batches at once: the fields of their metadata as columns of offsets and numbers.

All messages are read in lock step with numpy, field by field in the order every known client writes them; metadata in another
order is read one by one. Where the messages are is `starts`' business. Pure.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from braid.errors import ProtocolError
from braid.wire.varints import read_varint
from braid_spark.hashing import Bytes, Numbers

_PROPERTY, _KEY, _SIZE, _COMPACTED, _EVENT = 0x0A, 0x12, 0x18, 0x20, 0x28
_KEY_B64, _ORDERING, _SEQUENCE, _NULL, _NULL_KEY = 0x30, 0x3A, 0x40, 0x48, 0x50
_WITH_BYTES: Final = frozenset((_PROPERTY, _KEY, _ORDERING))
_NUMBERS: Final = frozenset((_SIZE, _COMPACTED, _EVENT, _KEY_B64, _SEQUENCE, _NULL, _NULL_KEY))
_END: Final = 0xFF
"""Stands for a tag behind the last field."""


class Properties(NamedTuple):
    """All properties of several messages; one row per property."""

    row: Numbers
    """Its message, ascending."""
    at: Numbers
    end: Numbers


class Messages(NamedTuple):
    """Columns; one row per message, offsets into the bytes they were read from."""

    value_at: Numbers
    value_size: Numbers
    key_at: Numbers
    key_size: Numbers
    """-1: the message has no key."""
    event_ms: NDArray[np.uint64]
    """0: not set."""
    has_value: NDArray[np.bool_]
    is_compacted: NDArray[np.bool_]
    is_key_b64: NDArray[np.bool_]
    properties: Properties


class _Reading:
    """The metadata of all messages, read up to `at` in each."""

    def __init__(self, data: Bytes, raw: memoryview, starts: Numbers) -> None:
        count = len(starts)
        self.data = data
        self.raw = raw
        self.starts = starts
        sizes: NDArray[np.uint32] = np.ndarray((len(data) - 3,), ">u4", data, 0, (1,))
        self.at = starts + 4
        self.end = self.at + sizes[starts]
        self.bodies = self.end.copy()
        self.odd = np.zeros(count, np.bool_)
        """Not in the usual order, or too near to the end of the bytes: to be read one by one."""
        self.numbers: dict[int, NDArray[np.uint64]] = {}
        self.key_at = np.zeros(count, np.int64)
        self.key_size = np.full(count, -1, np.int64)
        self.properties: list[tuple[Numbers, Numbers, Numbers]] = []

    def run(self) -> None:
        """Read field after field until all messages are at their end."""
        data, last = self.data, len(self.data) - 1
        before = 0
        while True:
            if np.array_equal(self.at, self.end):
                return
            tags = data.take(self.at, mode="clip") if self.at[-1] > last else data[self.at]
            behind = self.at >= self.end
            if behind.any():
                tags[behind] = _END
            tag = int(tags.min())
            if tag == _END:
                return
            rows = None if tag == int(tags.max()) else np.flatnonzero(tags == tag)
            if tag < before or not self._read(tag, rows):
                self._set_aside(rows)
            else:
                before = tag

    def _set_aside(self, rows: Numbers | None) -> None:
        picked = slice(None) if rows is None else rows
        self.odd[picked] = True
        self.at[picked] = self.end[picked]

    def _read(self, tag: int, rows: Numbers | None) -> bool:
        """Read one field of these messages; False if the tag is not known."""
        at = (self.at if rows is None else self.at[rows]) + 1
        if tag in _WITH_BYTES:
            sizes, at, is_odd = self._varints(at)
            end = at + sizes.astype(np.int64)
            if tag == _KEY:
                _put(self.key_at, rows, at)
                _put(self.key_size, rows, end - at)
            elif tag == _PROPERTY:
                self.properties.append((np.arange(len(at)) if rows is None else rows, at, end))
        elif tag in _NUMBERS:
            values, end, is_odd = self._varints(at)
            if tag != _SEQUENCE:
                if tag not in self.numbers:
                    self.numbers[tag] = np.zeros(len(self.at), np.uint64)
                _put(self.numbers[tag], rows, values)
        else:
            return False
        _put(self.at, rows, end)
        is_odd = is_odd | (end > (self.end if rows is None else self.end[rows]))
        if is_odd.any():
            self._set_aside(np.flatnonzero(is_odd) if rows is None else rows[is_odd])
        return True

    def _varints(self, at: Numbers) -> tuple[NDArray[np.uint64], Numbers, NDArray[np.bool_]]:
        """The numbers at these offsets, what is behind each, and which of them could not be read this way."""
        data = self.data
        is_odd = at > len(data) - 8
        if is_odd.any():
            at = np.where(is_odd, 0, at)
            if len(data) < 8:
                return np.zeros(len(at), np.uint64), at, is_odd
        first = data[at]
        if int(first.max()) < 128:
            return first.astype(np.uint64), at + 1, is_odd
        wide: NDArray[np.uint64] = np.ndarray((len(data) - 7,), "<u8", data, 0, (1,))
        words = wide[at].astype(np.uint64, copy=False)
        stops = ~words & np.uint64(0x8080808080808080)
        stops &= np.uint64(0) - stops  # the highest bit of the last byte
        is_odd = is_odd | (stops == 0)  # nine bytes or more
        mask = (stops - np.uint64(1)) | stops
        words &= mask & np.uint64(0x7F7F7F7F7F7F7F7F)
        words = words & np.uint64(0x007F007F007F007F) | words >> np.uint64(1) & np.uint64(0x3F803F803F803F80)
        words = words & np.uint64(0x00003FFF00003FFF) | words >> np.uint64(2) & np.uint64(0x0FFFC0000FFFC000)
        words = words & np.uint64(0x000000000FFFFFFF) | words >> np.uint64(4) & np.uint64(0x00FFFFFFF0000000)
        return words, at + (np.bitwise_count(mask) >> 3), is_odd

    def flag(self, tag: int) -> NDArray[np.bool_]:
        values = self.numbers.get(tag)
        return np.zeros(len(self.at), np.bool_) if values is None else values != 0

    def number(self, tag: int) -> NDArray[np.uint64]:
        values = self.numbers.get(tag)
        return np.zeros(len(self.at), np.uint64) if values is None else values


def _put(column: NDArray[np.generic], rows: Numbers | None, values: NDArray[np.generic]) -> None:
    column[slice(None) if rows is None else rows] = values


def read_messages(data: Bytes, raw: memoryview, starts: Numbers, ends: Numbers) -> Messages:
    """The messages that begin at `starts` and end at `ends`; raises ProtocolError if one of them does not."""
    reading = _Reading(data, raw, starts)
    reading.run()
    if reading.odd.any():
        for tag in _NUMBERS - {_SEQUENCE}:
            reading.numbers.setdefault(tag, np.zeros(len(starts), np.uint64))
    properties = _properties(reading)
    sizes = reading.number(_SIZE).astype(np.int64)
    if not np.array_equal(reading.bodies + sizes, ends):
        raise ProtocolError("A message in a batch says a size that does not fit its place; the batch is corrupt.")
    key_size = reading.key_size
    if _NULL_KEY in reading.numbers:
        key_size[reading.flag(_NULL_KEY)] = -1
    return Messages(
        value_at=reading.bodies,
        value_size=sizes,
        key_at=reading.key_at,
        key_size=key_size,
        event_ms=reading.number(_EVENT),
        has_value=~reading.flag(_NULL),
        is_compacted=reading.flag(_COMPACTED),
        is_key_b64=reading.flag(_KEY_B64),
        properties=properties,
    )


def _properties(reading: _Reading) -> Properties:
    """All properties, in the order of their messages; reads what was set aside."""
    found = reading.properties
    odd = np.flatnonzero(reading.odd)
    if len(odd):
        kept = [~reading.odd[rows] for rows, _, _ in found]
        found = [(rows[keep], at[keep], end[keep]) for (rows, at, end), keep in zip(found, kept, strict=True)]
        more = [(int(row), *each) for row in odd for each in _read_one(reading, int(row))]
        if more:
            columns = np.array(more, np.int64).T
            found.append((columns[0], columns[1], columns[2]))
    if not found:
        nothing = np.zeros(0, np.int64)
        return Properties(nothing, nothing, nothing)
    rows, at, end = (np.concatenate(parts) for parts in zip(*found, strict=True))
    if len(found) > 1:
        order = np.argsort(rows, kind="stable")
        rows, at, end = rows[order], at[order], end[order]
    return Properties(rows, at, end)


def _read_one(reading: _Reading, row: int) -> list[tuple[int, int]]:
    """Read one message's metadata field by field, as protobuf does: the last of several wins. Gives its properties."""
    begin, end = int(reading.starts[row]) + 4, int(reading.bodies[row])
    metadata = bytes(reading.raw[begin:end])
    for column in reading.numbers.values():
        column[row] = 0
    reading.key_size[row] = -1
    properties = []
    at = 0
    while at < len(metadata):
        tag, at = read_varint(metadata, at)
        behind = at
        if tag & 7 == 0:
            number, behind = read_varint(metadata, at)
            if tag in reading.numbers:
                reading.numbers[tag][row] = number & 0xFFFFFFFF if tag == _SIZE else number
        elif tag & 7 == 2:
            size, at = read_varint(metadata, at)
            behind = at + size
            if tag == _KEY:
                reading.key_at[row], reading.key_size[row] = begin + at, size
            elif tag == _PROPERTY:
                properties.append((begin + at, begin + behind))
        elif tag & 7 in (1, 5):
            behind = at + (8 if tag & 7 == 1 else 4)
        if behind > len(metadata) or tag & 7 in (3, 4, 6, 7):
            raise ProtocolError("The metadata of a message in a batch is not valid protobuf; it is corrupt.")
        at = behind
    return properties


def pick(messages: Messages, kept: NDArray[np.bool_]) -> Messages:
    """The messages that are kept."""
    row, at, end = messages.properties
    has_row = kept[row]
    numbers = kept.cumsum() - 1
    return Messages(
        value_at=messages.value_at[kept],
        value_size=messages.value_size[kept],
        key_at=messages.key_at[kept],
        key_size=messages.key_size[kept],
        event_ms=messages.event_ms[kept],
        has_value=messages.has_value[kept],
        is_compacted=messages.is_compacted[kept],
        is_key_b64=messages.is_key_b64[kept],
        properties=Properties(numbers[row[has_row]], at[has_row], end[has_row]),
    )
