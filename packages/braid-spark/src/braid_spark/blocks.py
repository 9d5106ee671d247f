"""`ArrowBlock`: Arrow columns as a block of messages for `Producer.send_block`.

Owns how columns become the bytes of a batch. A row is encoded once, when the block is made, into a column of finished rows:
cutting such a block, spreading it over segments and doing so again when a segment is sealed moves rows without looking inside.
No Python loop over rows, but for keys that are no UTF-8 text. Imports no pyspark.
"""

from __future__ import annotations

import base64
import itertools
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from braid.client.blocks import NO_KEY
from braid.errors import InvalidArgument
from braid.model.routing import Routing
from braid_spark.buffers import bytes_value, nulls_of, number_value, numbers_of, positions
from braid_spark.hashing import murmur3

Numbers = npt.NDArray[np.uint64]
Flags = npt.NDArray[np.bool_]
Part = tuple[int, Numbers, Flags | None]
"""Tag of a number in a message's metadata, the numbers, and which rows have it if not all."""

MAX_BLOCK_BYTES: Final = (1 << 31) - 1
"""What Arrow's 32-bit offsets reach."""
LARGEST_TIME_MS: Final = (1 << 63) - 1

PROPERTIES, KEY, PAYLOAD_SIZE, EVENT_TIME, KEY_IS_BASE64, IS_NULL = 0x0A, 0x12, 0x18, 0x28, 0x30, 0x48
"""Tags of SingleMessageMetadata."""
NAME, TEXT = 0x0A, 0x12
"""Tags of KeyValue."""
_NOTHING: Final = bytes_value(b"", pa.binary())
_ZERO: Final = number_value(0)


class ArrowBlock:
    """Finished rows, and what routes them. Made by `ArrowBlock.of`."""

    def __init__(self, rows: pa.BinaryArray, keys: pa.BinaryArray | None, hashes: npt.NDArray[np.uint32] | None = None) -> None:
        self._rows = rows
        self._keys = keys
        """As they are routed; None for rows without keys, or when the hashes are known."""
        self._hashes = hashes
        self._ends = _offsets(rows)

    @classmethod
    def of(cls, values: Any, *, keys: Any = None, event_times: Any = None, properties: Any = None) -> ArrowBlock:
        """A block of these columns: values and keys in binary or string, event times as timestamps with a time zone or as
        milliseconds, properties as maps of string to string. A value that is null is sent as Pulsar's null value; what else is
        null is left out of its message. Raises InvalidArgument."""
        body = _bytes_of("value", values)
        count = len(body)
        tail: list[Part] = [(PAYLOAD_SIZE, _lengths(body), None)]
        if event_times is not None:
            tail.append(_event_times(_column("event time", event_times, count)))
        text: pa.BinaryArray | None = None
        if keys is not None:
            text, is_base64 = _keys(_column("key", keys, count))
            if is_base64 is not None:
                tail.append((KEY_IS_BASE64, np.ones(count, np.uint64), is_base64))
        if body.null_count:
            tail.append((IS_NULL, np.ones(count, np.uint64), nulls_of(body)))
        before = None if properties is None else _properties(_column("properties", properties, count))
        return cls(_joined(before, text, _numbers(count, tail), body), text)

    @property
    def count(self) -> int:
        return len(self._rows)

    @property
    def size(self) -> int:
        return int(self._ends[-1] - self._ends[0])

    @property
    def largest(self) -> int:
        return int(np.diff(self._ends).max(initial=0))

    def spread(self, routing: Routing, starts: Sequence[int]) -> list[tuple[int, ArrowBlock]]:
        """See `braid.client.blocks.Block`."""
        if self._hashes is None and self._keys is None:
            return [(NO_KEY, self)] if self.count else []
        hashes = self._hashes if self._hashes is not None else _hashes_of(self._keys)
        if routing is Routing.MOD_N:
            place = ((hashes & np.uint32(0x7FFFFFFF)) % np.uint32(len(starts))).astype(np.int32)
        else:
            ring = hashes & np.uint32(0xFFFF) if routing is Routing.LOW16 else hashes >> np.uint32(16)
            place = (np.searchsorted(np.asarray(starts, np.uint32), ring, side="right") - 1).astype(np.int32)
        if self._keys is not None and self._keys.null_count:
            place[nulls_of(self._keys)] = NO_KEY
        order = np.argsort(place, kind="stable")
        sorted_place = place[order]
        edges = [0, *(np.flatnonzero(np.diff(sorted_place)) + 1).tolist(), self.count]
        rows, moved = self._rows.take(positions(order)), hashes[order]
        found = []
        for start, stop in itertools.pairwise(edges):
            if start < stop:
                number = int(sorted_place[start])
                part = rows.slice(start, stop - start)
                found.append((number, ArrowBlock(part, None, None if number == NO_KEY else moved[start:stop])))
        return found

    def cut(self, max_size: int, max_count: int) -> list[ArrowBlock]:
        """See `braid.client.blocks.Block`."""
        count, ends = self.count, self._ends
        if count <= max_count and self.size <= max_size:
            return [self] if count else []
        found, start = [], 0
        while start < count:
            stop = int(np.searchsorted(ends, ends[start] + max_size, side="right")) - 1
            stop = min(max(stop, start + 1), start + max_count, count)
            found.append(self._slice(start, stop))
            start = stop
        return found

    def encode(self) -> memoryview:
        """The rows, without a copy."""
        data = self._rows.buffers()[2]
        return memoryview(b"") if data is None else memoryview(data)[int(self._ends[0]) : int(self._ends[-1])]

    def _slice(self, start: int, stop: int) -> ArrowBlock:
        length = stop - start
        return ArrowBlock(
            self._rows.slice(start, length),
            None if self._keys is None else self._keys.slice(start, length),
            None if self._hashes is None else self._hashes[start:stop],
        )


# Columns.


def _bytes_of(what: str, column: Any) -> pa.BinaryArray:
    """A column of bytes or text as bytes."""
    found = _one_array(what, column)
    kind = found.type
    if pa.types.is_dictionary(kind):
        words = _bytes_of(what, found.dictionary)
        lengths = pc.binary_length(words).cast(pa.int64())
        if (pc.sum(lengths.take(found.indices)).as_py() or 0) > MAX_BLOCK_BYTES:
            raise _too_much()  # and nothing so large was made
        return words.take(found.indices)
    is_bytes = pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind)
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    if pa.types.is_null(kind):
        return pa.nulls(len(found), pa.binary())
    if not (is_bytes or is_text or pa.types.is_fixed_size_binary(kind)):
        raise InvalidArgument(
            f"The column {what} is of type {kind}; it must be binary or string: cast it, or write it as JSON (to_json)."
        )
    try:
        return found.cast(pa.binary())
    except pa.ArrowInvalid:
        raise _too_much() from None


def _one_array(what: str, column: Any) -> Any:
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
        if isinstance(column, pa.ChunkedArray):  # so much that one array cannot hold it
            raise _too_much()
    if not isinstance(column, pa.Array):
        raise InvalidArgument(f"The column {what} is a {type(column).__name__}; give a pyarrow array.")
    return column


def _column(what: str, column: Any, count: int) -> Any:
    found = _one_array(what, column)
    if len(found) != count:
        raise InvalidArgument(f"The column {what} has {len(found)} rows and the values {count}; give columns of equal length.")
    return found


def _keys(column: Any) -> tuple[pa.BinaryArray, Flags | None]:
    """The keys as they are written, and which of them are base64: keys that are no UTF-8 text, as Pulsar's clients do it."""
    found = _bytes_of("key", column)
    try:
        found.cast(pa.string())  # checks them, without a copy
    except pa.ArrowInvalid:
        pass
    else:
        return found, None
    flags = np.zeros(len(found), np.bool_)
    texts: list[bytes | None] = found.to_pylist()
    for row, each in enumerate(texts):
        if each is not None:
            try:
                each.decode()
            except UnicodeDecodeError:
                flags[row] = True
                texts[row] = base64.b64encode(each)
    return pa.array(texts, pa.binary()), flags


def _event_times(column: Any) -> Part:
    kind = column.type
    if pa.types.is_timestamp(kind) and kind.tz is None:
        raise InvalidArgument("The column event time has no time zone; cast it to a timestamp with one.")
    if not (pa.types.is_timestamp(kind) or pa.types.is_integer(kind) or pa.types.is_null(kind)):
        raise InvalidArgument(f"The column event time is of type {kind}; give a timestamp or milliseconds since 1970.")
    try:
        times = numbers_of(column.cast(pa.int64()).fill_null(_ZERO))
    except pa.ArrowInvalid:
        raise InvalidArgument(f"The column event time holds a number above {LARGEST_TIME_MS}; give milliseconds.") from None
    if len(times) and times.min() < 0:
        row = int(np.argmax(times < 0))
        raise InvalidArgument(f"The event time of row {row} is before 1970; give a later one, or null.")
    unit = kind.unit if pa.types.is_timestamp(kind) else "ms"
    if unit == "s":
        if len(times) and times.max() > LARGEST_TIME_MS // 1000:
            raise InvalidArgument(f"The column event time holds a time beyond {LARGEST_TIME_MS} ms since 1970.")
        times = times * 1000
    elif unit != "ms":
        times = times // (1000 if unit == "us" else 1_000_000)
    is_set = times > 0
    return EVENT_TIME, times.astype(np.uint64), None if is_set.all() else is_set


def _properties(column: Any) -> pa.BinaryArray:
    """The properties of each row as they stand in its metadata."""
    kind = column.type
    if pa.types.is_null(kind):
        return pa.array([b""] * len(column), pa.binary())
    if not pa.types.is_map(kind) or not all(_is_text(each) for each in (kind.key_type, kind.item_type)):
        raise InvalidArgument(f"The column properties is of type {kind}; give a map of string to string.")
    if column.null_count:
        column = column.take(positions(np.arange(len(column))))  # what is null is empty then
    starts = np.asarray(column.offsets)
    first, last = int(starts[0]), int(starts[-1])
    names, texts = column.keys[first:last], column.items[first:last]
    if texts.null_count:
        name = names[int(np.argmax(nulls_of(texts)))]
        raise InvalidArgument(f"The property {name} of a row is null; give a string, or leave it out.")
    name_bytes, text_bytes = _bytes_of("properties", names), _bytes_of("properties", texts)
    name_size, text_size = _lengths(name_bytes), _lengths(text_bytes)
    sizes = np.uint64(2) + _width(name_size) + name_size + _width(text_size) + text_size
    count = len(names)
    items = _glued(
        [
            _numbers(count, [(PROPERTIES, sizes, None), (NAME, name_size, None)]),
            name_bytes,
            _numbers(count, [(TEXT, text_size, None)]),
            text_bytes,
        ]
    )
    ends = _offsets(items)[starts - first].astype(np.int32)
    return pa.BinaryArray.from_buffers(pa.binary(), len(column), [None, pa.py_buffer(ends), items.buffers()[2]])


def _is_text(kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


# Bytes.


def _joined(before: Any, keys: Any, tail: Any, body: Any) -> pa.BinaryArray:
    """The rows: size of the metadata, properties, key, numbers, value."""
    count = len(body)
    size = _lengths(tail)
    if before is not None:
        size = size + _lengths(before)
    parts = [] if before is None else [before]
    if keys is not None:
        length = _lengths(keys)
        has_key = ~nulls_of(keys) if keys.null_count else None
        head = np.uint64(1) + _width(length) + length
        size = size + (head if has_key is None else head * has_key)
        parts += [_numbers(count, [(KEY, length, has_key)]), _filled(keys)]
    first = np.ascontiguousarray(size.astype(">u4")).view(np.uint8)
    return _glued([_fixed(first, count, 4), *parts, tail, _filled(body)])


def _numbers(count: int, parts: Sequence[Part]) -> pa.BinaryArray:
    """Tags and numbers of each row, one behind the other."""
    columns: list[npt.NDArray[np.uint8]] = []
    present: list[Flags | None] = []
    for tag, numbers, is_there in parts:
        columns.append(np.full(count, tag, np.uint8))
        present.append(is_there)
        most = int(numbers.max(initial=0))
        for place in range(max(1, (most.bit_length() + 6) // 7)):
            rest = numbers >> np.uint64(7 * place)
            byte = (rest & np.uint64(0x7F)).astype(np.uint8)
            if most >> 7 * (place + 1):
                goes_on = rest > np.uint64(0x7F)
                byte |= goes_on.astype(np.uint8) << np.uint8(7)
            columns.append(byte)
            reaches = rest > 0 if place else None  # this byte is there if the one before goes on
            if reaches is not None and reaches.all():
                reaches = None
            present.append(is_there if reaches is None else reaches if is_there is None else reaches & is_there)
    matrix = np.stack(columns, axis=1)
    if all(each is None for each in present):
        return _fixed(matrix.reshape(-1), count, len(columns))
    mask = np.stack([np.ones(count, np.bool_) if each is None else each for each in present], axis=1)
    ends = np.zeros(count + 1, np.int32)
    np.cumsum(mask.sum(axis=1), out=ends[1:])
    return pa.BinaryArray.from_buffers(pa.binary(), count, [None, pa.py_buffer(ends), pa.py_buffer(matrix[mask])])


def _width(numbers: Numbers) -> Numbers:
    """How many bytes each number takes as a varint."""
    width = np.ones(len(numbers), np.uint64)
    bound = 128
    most = int(numbers.max(initial=0))
    while most >= bound:
        width += numbers >= np.uint64(bound)
        bound <<= 7
    return width


def _fixed(data: npt.NDArray[np.uint8], count: int, width: int) -> pa.BinaryArray:
    ends = np.arange(0, (count + 1) * width, width, dtype=np.int32)[: count + 1]
    return pa.BinaryArray.from_buffers(pa.binary(), count, [None, pa.py_buffer(ends), pa.py_buffer(data)])


def _glued(parts: Sequence[pa.BinaryArray]) -> pa.BinaryArray:
    """Row by row, the parts one behind the other."""
    if sum(len(each) and int(_offsets(each)[-1] - _offsets(each)[0]) for each in parts) > MAX_BLOCK_BYTES:
        raise _too_much()
    return pc.binary_join_element_wise(*parts, _NOTHING)


def _too_much() -> InvalidArgument:
    return InvalidArgument(f"The rows of a block take more than {MAX_BLOCK_BYTES} bytes; give smaller batches.")


def _filled(column: pa.BinaryArray) -> pa.BinaryArray:
    return column.fill_null(_NOTHING) if column.null_count else column


def _offsets(column: pa.BinaryArray) -> npt.NDArray[np.int64]:
    """Where rows begin and the last one ends in the column's buffer."""
    buffer = column.buffers()[1]
    if buffer is None or not len(column):
        return np.zeros(1, np.int64)
    return np.frombuffer(buffer, np.int32, len(column) + 1, column.offset * 4).astype(np.int64)


def _lengths(column: pa.BinaryArray) -> Numbers:
    lengths = np.diff(_offsets(column))
    if column.null_count:
        lengths = lengths * ~nulls_of(column)
    return lengths.astype(np.uint64)


def _hashes_of(keys: pa.BinaryArray) -> npt.NDArray[np.uint32]:
    data, starts = keys.buffers()[2], _offsets(keys)
    raw = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
    return murmur3(raw, starts[:-1], np.diff(starts))
