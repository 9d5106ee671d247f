"""The protobuf fields of many messages at once, read in lock step with numpy.

In each round the fields with the lowest tag are read in all messages that are at one, so that messages which say the same in
the same order, as those of one client do, cost a few array operations per field. What does not fit (very long tags, numbers at
the end of the bytes, dozens of fields) is read message by message, and so are messages of which there are only a few. As in
protobuf, fields may come in any order, the last of several counts, and what nobody asked for is passed over. Knows no message
type. Pure.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from braid.errors import ProtocolError
from braid.wire.varints import read_varint
from braid_spark.hashing import Bytes, Numbers

Mask = NDArray[np.bool_]
Values = NDArray[np.uint64]
_END: Final = 0xFF
"""Stands for a tag behind the last field. (No tag begins so: its wire type would be 7.)"""
_MAX_ROUNDS: Final = 64
"""After which what is left is read message by message: a round costs as much as all messages, however few are at it."""
_FEW: Final = 24
"""Messages below which arrays do not pay: what a round costs does not depend on how few there are."""
_FIXED: Final = {1: 8, 5: 4}
"""Bytes of a number, by wire type."""


class Wanted(NamedTuple):
    """The tags of the fields to be kept, each the field's number and its wire type as protobuf writes them."""

    numbers: frozenset[int]
    slices: frozenset[int]
    """Text, bytes and messages of which one counts."""
    repeated: frozenset[int]
    """Those of which all count."""


class Repeated(NamedTuple):
    """All values of a repeated field; one row per value."""

    row: Numbers
    """Its message, ascending."""
    at: Numbers
    end: Numbers


class FieldsBroken(ProtocolError):
    """The bytes of a message are not valid protobuf."""

    def __init__(self, row: int, why: object) -> None:
        super().__init__(f"Its metadata is not valid protobuf: {why}")
        self.row = row
        """Which message it is."""


class Fields:
    """What messages say that lie in `data` from `begins` to `ends`; raises FieldsBroken."""

    def __init__(self, data: Bytes, raw: memoryview, begins: Numbers, ends: Numbers, wanted: Wanted) -> None:
        self._data = data
        self._raw = raw
        self._begins = begins
        self._ends = ends
        self._wanted = wanted
        self._at = begins.copy()
        self._odd: Mask = np.zeros(len(begins), np.bool_)
        """To be read one by one."""
        self._numbers: dict[int, Values] = {}
        self._has: dict[int, Mask] = {}
        self._slices: dict[int, tuple[Numbers, Numbers]] = {}
        self._repeated: dict[int, list[tuple[Numbers, Numbers, Numbers]]] = {}
        if len(begins) < _FEW:
            self._odd[:] = True
        else:
            self._run()
        if self._odd.any():
            self._read_odd()

    # What was read.

    def number(self, tag: int) -> Values:
        """The values of a field; 0 where it is not set."""
        found = self._numbers.get(tag)
        return np.zeros(len(self._at), np.uint64) if found is None else found

    def flag(self, tag: int) -> Mask:
        """The same of a field that is true or false."""
        found = self._numbers.get(tag)
        return np.zeros(len(self._at), np.bool_) if found is None else found != 0

    def has(self, tag: int) -> Mask:
        """Where a number is set."""
        found = self._has.get(tag)
        return np.zeros(len(self._at), np.bool_) if found is None else found

    def place(self, tag: int) -> tuple[Numbers, Numbers]:
        """Where the values of a field begin, and how long they are; -1 where it is not set."""
        found = self._slices.get(tag)
        return found if found is not None else (self._begins, np.full(len(self._at), -1, np.int64))

    def every(self, tag: int) -> Repeated:
        """All values of a repeated field, in the order of their messages."""
        found = self._repeated.get(tag)
        if not found:
            nothing = np.zeros(0, np.int64)
            return Repeated(nothing, nothing, nothing)
        if len(found) == 1:
            return Repeated(*found[0])
        rows, at, end = (np.concatenate(parts) for parts in zip(*found, strict=True))
        order = np.argsort(rows, kind="stable")
        return Repeated(rows[order], at[order], end[order])

    # In lock step.

    def _run(self) -> None:
        data = self._data
        for _ in range(_MAX_ROUNDS if len(data) else 0):
            if np.array_equal(self._at, self._ends):
                return
            heads = data.take(self._at, mode="clip")
            behind = self._at >= self._ends
            if behind.any():
                heads[behind] = _END
            head = int(heads.min())
            if head == _END:
                return
            rows = None if head == int(heads.max()) else np.flatnonzero(heads == head)
            if head < 0x80:
                self._read(head, rows, 1)
            else:
                self._read_long(head, rows)
        self._set_aside(np.flatnonzero(self._at < self._ends))

    def _read_long(self, head: int, rows: Numbers | None) -> None:
        """Read a field whose tag has two bytes."""
        seconds = self._data.take((self._at if rows is None else self._at[rows]) + 1, mode="clip")
        second = int(seconds.min())
        if second >= 0x80:
            self._set_aside(rows)
            return
        if second != int(seconds.max()):
            picked = np.flatnonzero(seconds == second)
            rows = picked if rows is None else rows[picked]
        self._read(head & 0x7F | second << 7, rows, 2)

    def _read(self, tag: int, rows: Numbers | None, width: int) -> None:
        """Read one field of these messages."""
        at = (self._at if rows is None else self._at[rows]) + width
        kind = tag & 7
        is_odd: Mask | None = None
        if tag < 8:
            self._set_aside(rows)  # there is no field 0
            return
        if kind == 2:
            sizes, at, is_odd = self._varints(at)
            end = at + np.minimum(sizes, np.uint64(len(self._data) + 1)).astype(np.int64)
            self._keep_slices(tag, rows, at, end)
        elif kind == 0:
            values, end, is_odd = self._varints(at)
            self._keep_numbers(tag, rows, values)
        elif kind in _FIXED:
            end = at + _FIXED[kind]
        else:
            self._set_aside(rows)  # groups
            return
        _put(self._at, rows, end)
        is_beyond = end > (self._ends if rows is None else self._ends[rows])
        is_odd = is_beyond if is_odd is None else is_odd | is_beyond
        if is_odd.any():
            self._set_aside(np.flatnonzero(is_odd) if rows is None else rows[is_odd])

    def _keep_numbers(self, tag: int, rows: Numbers | None, values: Values) -> None:
        if tag not in self._wanted.numbers:
            return
        if tag not in self._numbers:
            self._numbers[tag] = np.zeros(len(self._at), np.uint64)
            self._has[tag] = np.zeros(len(self._at), np.bool_)
        _put(self._numbers[tag], rows, values)
        self._has[tag][slice(None) if rows is None else rows] = True

    def _keep_slices(self, tag: int, rows: Numbers | None, at: Numbers, end: Numbers) -> None:
        if tag in self._wanted.slices:
            if tag not in self._slices:
                self._slices[tag] = (self._begins.copy(), np.full(len(self._at), -1, np.int64))
            _put(self._slices[tag][0], rows, at)
            _put(self._slices[tag][1], rows, end - at)
        elif tag in self._wanted.repeated:
            every = np.arange(len(at)) if rows is None else rows
            self._repeated.setdefault(tag, []).append((every, at, end))

    def _set_aside(self, rows: Numbers | None) -> None:
        picked = slice(None) if rows is None else rows
        self._odd[picked] = True
        self._at[picked] = self._ends[picked]

    def _varints(self, at: Numbers) -> tuple[Values, Numbers, Mask]:
        """The numbers at these offsets, what is behind each, and which of them could not be read this way."""
        data = self._data
        is_odd = at > len(data) - 8
        if is_odd.any():
            at = np.where(is_odd, 0, at)
            if len(data) < 8:
                return np.zeros(len(at), np.uint64), at, is_odd
        first = data[at]
        if int(first.max()) < 128:
            return first.astype(np.uint64), at + 1, is_odd
        wide: Values = np.ndarray((len(data) - 7,), "<u8", data, 0, (1,))
        words = wide[at].astype(np.uint64, copy=False)
        stops = ~words & np.uint64(0x8080808080808080)
        stops &= np.uint64(0) - stops  # the highest bit of the last byte
        is_long = stops == 0
        mask = (stops - np.uint64(1)) | stops
        words &= mask & np.uint64(0x7F7F7F7F7F7F7F7F)
        words = words & np.uint64(0x007F007F007F007F) | words >> np.uint64(1) & np.uint64(0x3F803F803F803F80)
        words = words & np.uint64(0x00003FFF00003FFF) | words >> np.uint64(2) & np.uint64(0x0FFFC0000FFFC000)
        words = words & np.uint64(0x000000000FFFFFFF) | words >> np.uint64(4) & np.uint64(0x00FFFFFFF0000000)
        behind = at + (np.bitwise_count(mask) >> 3)
        if is_long.any():
            self._lengthen(at, words, behind, is_odd, np.flatnonzero(is_long))
        return words, behind, is_odd

    def _lengthen(self, at: Numbers, words: Values, behind: Numbers, is_odd: Mask, rows: Numbers) -> None:
        """Add the ninth and tenth byte of numbers that have them."""
        ninth, tenth = (self._data.take(at[rows] + each, mode="clip").astype(np.uint64) for each in (8, 9))
        has_tenth = ninth >= 128
        words[rows] |= (ninth & np.uint64(127)) << np.uint64(56)
        words[rows] |= np.where(has_tenth, tenth << np.uint64(63), np.uint64(0))
        behind[rows] = at[rows] + 9 + has_tenth
        is_odd[rows] |= (has_tenth & (tenth >= 128)) | (behind[rows] > len(self._data))

    # One by one.

    def _read_odd(self) -> None:
        odd = np.flatnonzero(self._odd)
        for tag in self._wanted.numbers:
            self._keep_numbers(tag, odd, np.zeros(len(odd), np.uint64))
            self._has[tag][odd] = False
        for tag in self._wanted.slices:
            self._keep_slices(tag, odd, self._begins[odd], self._begins[odd] - 1)
        for tag, found in self._repeated.items():
            kept = [~self._odd[rows] for rows, _, _ in found]
            self._repeated[tag] = [(rows[keep], at[keep], end[keep]) for (rows, at, end), keep in zip(found, kept, strict=True)]
        more: dict[int, list[tuple[int, int, int]]] = {}
        for row in odd.tolist():
            try:
                self._read_one(row, more)
            except ProtocolError as error:
                raise FieldsBroken(row, error) from None
        for tag, each in more.items():
            columns = np.array(each, np.int64).T
            self._repeated.setdefault(tag, []).append((columns[0], columns[1], columns[2]))

    def _read_one(self, row: int, more: dict[int, list[tuple[int, int, int]]]) -> None:
        begin, end = int(self._begins[row]), int(self._ends[row])
        raw = bytes(self._raw[begin:end])
        at = 0
        while at < len(raw):
            tag, at = read_varint(raw, at)
            kind = tag & 7
            behind = at + _FIXED.get(kind, 0)
            if kind == 0:
                number, behind = read_varint(raw, at)
                if tag in self._wanted.numbers:
                    self._numbers[tag][row] = number
                    self._has[tag][row] = True
            elif kind == 2:
                size, at = read_varint(raw, at)
                behind = at + size
                if tag in self._wanted.slices:
                    self._slices[tag][0][row], self._slices[tag][1][row] = begin + at, size
                elif tag in self._wanted.repeated:
                    more.setdefault(tag, []).append((row, begin + at, begin + behind))
            elif kind not in _FIXED:
                raise ProtocolError(f"the wire type of tag {tag} is not used")
            if behind > len(raw) or tag < 8:
                raise ProtocolError(f"tag {tag} is not possible where it is")
            at = behind


def _put(column: NDArray[np.generic], rows: Numbers | None, values: NDArray[np.generic]) -> None:
    column[slice(None) if rows is None else rows] = values
