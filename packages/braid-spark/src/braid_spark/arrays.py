"""Arrow arrays of decoded messages: gathered out of the bytes they came in, without a Python object per message.

Owns how offsets become a blob, and the columns that need more than a gather (message ids, properties, keys in base64).
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Final

import numpy as np
import pyarrow as pa
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from braid.errors import ProtocolError
from braid.wire.messages import KeyValue, MessageIdData
from braid.wire.varints import varint
from braid_spark.buffers import bytes_value, positions
from braid_spark.entries import Entries
from braid_spark.fields import Mask
from braid_spark.hashing import Bytes, Numbers, murmur3
from braid_spark.messages import Messages

_LONGEST_MS: Final = np.iinfo(np.int64).max // 1000


def gather(data: Bytes, at: Numbers, sizes: Numbers, valid: Mask | None, type_: pa.DataType) -> pa.Array:
    """The slices of `data` as a binary or string array; `at` must not descend, and slices not overlap."""
    found = _gather(data, at, sizes, valid)
    return found if type_ == pa.binary() else as_text(found)


def as_text(found: pa.Array) -> pa.Array:
    """Binary as strings; bytes that are no UTF-8 are replaced, as Java does."""
    try:
        return found.cast(pa.string())  # looks at the bytes and leaves them where they are
    except pa.ArrowInvalid:
        return pa.array([None if each is None else each.decode("utf-8", "replace") for each in found.to_pylist()], pa.string())


def _gather(data: Bytes, at: Numbers, sizes: Numbers, valid: Mask | None) -> pa.Array:
    type_ = pa.binary()
    count = len(at)
    bitmap, nulls = _bitmap(valid)
    if valid is not None:
        sizes = np.where(valid, sizes, 0)
    size = int(sizes[0]) if count else 0
    if not count or not (sizes - size).any():
        offsets = np.arange(count + 1, dtype=np.int32) * np.int32(size)
        blob = pa.py_buffer(_blocks(data, at, size) if size else b"")
        return pa.Array.from_buffers(type_, count, [bitmap, pa.py_buffer(offsets), blob], nulls)
    # Slices and the gaps between them are one Arrow array over the bytes as they are; every second element is kept.
    bounds = np.empty(2 * count, np.int32)
    bounds[0::2] = at
    bounds[1::2] = at + sizes
    pieces = pa.Array.from_buffers(type_, 2 * count - 1, [None, pa.py_buffer(bounds), pa.py_buffer(data)], 0)
    found = pieces.filter(_every_second(count))
    if bitmap is None:
        return found
    return pa.Array.from_buffers(type_, count, [bitmap, *found.buffers()[1:]], nulls)


def _blocks(data: Bytes, at: Numbers, size: int) -> NDArray[np.void]:
    """Slices of one size, one behind the other."""
    windows: NDArray[np.void] = np.ndarray((len(data) - size + 1,), f"V{size}", data, 0, (1,))
    return windows[at]


def _every_second(count: int) -> pa.Array:
    bits = np.full((2 * count + 7) // 8, 0b01010101, np.uint8)
    return pa.Array.from_buffers(pa.bool_(), 2 * count - 1, [None, pa.py_buffer(bits)], 0)


def _bitmap(valid: Mask | None) -> tuple[pa.Buffer | None, int]:
    if valid is None or valid.all():
        return None, 0
    return pa.py_buffer(np.packbits(valid, bitorder="little")), int(len(valid) - np.count_nonzero(valid))


def numbers(values: NDArray[np.generic], type_: pa.DataType, valid: Mask | None = None) -> pa.Array:
    """Numbers of the width of `type_` as they are."""
    bitmap, nulls = _bitmap(valid)
    return pa.Array.from_buffers(type_, len(values), [bitmap, pa.py_buffer(np.ascontiguousarray(values))], nulls)


def times(milliseconds: NDArray[np.uint64], type_: pa.DataType, valid: Mask | None = None) -> pa.Array:
    """Microseconds."""
    return numbers(np.minimum(milliseconds, np.uint64(_LONGEST_MS)).astype(np.int64) * 1000, type_, valid)


def of_entries(data: Bytes, at: Numbers, sizes: Numbers, rows: Numbers, type_: pa.DataType) -> pa.Array:
    """The slice of each row's entry."""
    size = int(sizes[0])
    first = data[at[0] : at[0] + size]
    if (sizes == size).all() and (not size or (_blocks(data, at, size).view((np.uint8, size)) == first).all()):
        text = first.tobytes().decode("utf-8", "replace").encode()  # as `as_text` has it
        return pa.repeat(bytes_value(text, type_), len(rows))  # nearly always
    return gather(data, at, sizes, None, type_).take(positions(rows))


def keys(data: Bytes, messages: Messages, type_: pa.DataType) -> pa.Array:
    """The keys; null where a message has none."""
    has_key = messages.key_size >= 0
    if not has_key.any():
        return pa.nulls(len(has_key), type_)
    if not (messages.is_key_b64 & has_key).any():
        at = messages.key_at if has_key.all() else np.where(has_key, messages.key_at, messages.value_at)
        return gather(data, at, messages.key_size, has_key, type_)
    found: list[bytes | None] = []
    for at, size, is_b64 in zip(
        messages.key_at.tolist(), messages.key_size.tolist(), messages.is_key_b64.tolist(), strict=True
    ):
        key = None if size < 0 else data[at : at + size].tobytes()
        found.append(_plain_key(key) if is_b64 and key is not None else key)
    every = pa.array(found, pa.binary())
    return every if type_ == pa.binary() else as_text(every)


def _plain_key(key: bytes) -> bytes:
    try:
        return base64.b64decode(key)
    except binascii.Error:
        return key  # the flag is wrong; the key is as it is


def key_hashes(keys: pa.Array) -> NDArray[np.int32]:
    """The 16 bits of each key's hash that choose a segment; 0 where there is no key."""
    _, offset_buffer, data_buffer = keys.buffers()
    offsets = np.frombuffer(offset_buffer, np.int32)[: len(keys) + 1].astype(np.int64)
    data = np.frombuffer(data_buffer, np.uint8) if data_buffer is not None else np.zeros(0, np.uint8)
    return (murmur3(data, offsets[:-1], np.diff(offsets)) >> np.uint32(16)).astype(np.int32)


# Message ids.


@cache
def _index_tails(count: int) -> tuple[list[bytes], Numbers]:
    """What the index inside a batch looks like in a message id, for indexes up to `count`; and how long each is."""
    tails = [b"\x20" + varint(index) for index in range(count)]
    return tails, np.array([len(each) for each in tails], np.int64)


def message_ids(entries: Entries, partition: int, first_chunks: Mapping[int, tuple[int, int]], type_: pa.DataType) -> pa.Array:
    """The serialised message ids of all messages of these entries, as Pulsar's clients write and read them.

    `first_chunks` says of the entries that are last chunks, by number, where the first is."""
    ledger_ids, entry_ids = entries.places.ledger_id, entries.places.entry_id
    tail = b"" if partition < 0 else b"\x18" + varint(partition)
    if not entries.said.is_batch.any() and not first_chunks:
        return _ids_alone(ledger_ids, entry_ids, tail, type_)
    blobs: list[bytes] = []
    sizes: list[int] = []
    columns = (ledger_ids, entry_ids, entries.said.is_batch, entries.said.held)
    for number, (ledger_id, entry_id, is_batch, count) in enumerate(zip(*(each.tolist() for each in columns), strict=True)):
        head = b"\x08%b\x10%b%b" % (varint(ledger_id), varint(entry_id), tail)
        if not is_batch:
            if number in first_chunks:
                first_ledger_id, first_entry_id = first_chunks[number]
                first = MessageIdData(ledgerId=first_ledger_id, entryId=first_entry_id).SerializeToString()
                head += b"\x3a%b%b" % (varint(len(first)), first)
            blobs.append(head)
            sizes.append(len(head))
            continue
        tails, lengths = _index_tails(1 << max(count - 1, 1023).bit_length())
        end = b"\x30" + varint(count)
        blobs += (head, (end + head).join(tails[:count]), end)
        sizes += (lengths[:count] + (len(head) + len(end))).tolist()
    return _joined(b"".join(blobs), sizes, type_)


def _ids_alone(ledger_ids: Numbers, entry_ids: Numbers, tail: bytes, type_: pa.DataType) -> pa.Array:
    """The ids of messages that are alone in their entries."""
    bytes_, is_used = _varints(b"\x08", ledger_ids)
    more, is_more_used = _varints(b"\x10", entry_ids)
    tails: Bytes = np.broadcast_to(np.frombuffer(tail, np.uint8), (len(ledger_ids), len(tail)))
    every = np.concatenate([bytes_, more, tails], axis=1)
    used = np.concatenate([is_used, is_more_used, np.ones(tails.shape, np.bool_)], axis=1)
    return _joined(every[used], used.sum(axis=1), type_)


def _varints(tag: bytes, values: Numbers) -> tuple[Bytes, Mask]:
    """A field of each row: its bytes in as many columns as the longest needs, and which of them are used."""
    width = len(varint(int(values.max())))
    shifted = values[:, None] >> np.arange(width) * 7
    is_used = np.concatenate([np.ones((len(values), 2), np.bool_), shifted[:, 1:] > 0], axis=1)
    found = np.empty((len(values), width + 1), np.uint8)
    found[:, 0] = tag[0]
    found[:, 1:] = shifted & 0x7F
    found[:, 1:-1] |= is_used[:, 2:].astype(np.uint8) << 7
    return found, is_used


def _joined(blob: bytes | Bytes, sizes: Sequence[int] | Numbers, type_: pa.DataType) -> pa.Array:
    offsets = np.zeros(len(sizes) + 1, np.int32)
    np.cumsum(sizes, out=offsets[1:])
    return pa.Array.from_buffers(type_, len(sizes), [None, pa.py_buffer(offsets), pa.py_buffer(blob)], 0)


# Properties.


def properties(data: Bytes, messages: Messages, type_: pa.MapType) -> pa.Array:
    """The properties of each message; an empty map where it has none."""
    count = len(messages.value_at)
    parts = _plain_properties(data, *messages.properties)
    if parts is None:
        return pa.array([list(each.items()) for each in _odd_properties(data, messages)], type_)
    key_at, key_size, value_at, value_size = parts
    offsets = np.zeros(count + 1, np.int32)
    np.cumsum(np.bincount(messages.properties.row, minlength=count), out=offsets[1:])
    names = gather(data, key_at, key_size, None, type_.key_type)
    values = gather(data, value_at, value_size, None, type_.item_type)
    entries = pa.StructArray.from_arrays([names, values], fields=[type_.key_field, type_.item_field])
    return pa.Array.from_buffers(type_, count, [None, pa.py_buffer(offsets)], 0, children=[entries])


def headers(data: Bytes, messages: Messages, type_: pa.ListType) -> pa.Array:
    """The properties as Kafka's source shows headers; null where a message has none."""
    found = _odd_properties(data, messages)
    return pa.array([[{"key": name, "value": value.encode()} for name, value in each.items()] or None for each in found], type_)


def _plain_properties(data: Bytes, rows: Numbers, at: Numbers, end: Numbers) -> tuple[Numbers, ...] | None:
    """Where names and values are, if all are written in the usual way, are short, and no message names one twice."""
    if not len(rows):
        return (rows,) * 4

    def byte(where: Numbers) -> Numbers:
        return data.take(where, mode="clip").astype(np.int64)

    key_at, key_size = at + 2, byte(at + 1)
    middle = key_at + key_size
    value_at, value_size = middle + 2, byte(middle + 1)
    is_long = value_size > 127
    if is_long.any():
        value_size = np.where(is_long, value_size - 128 + (byte(middle + 2) << 7), value_size)
        value_at = value_at + is_long
        is_usual = not (is_long & (byte(middle + 2) > 127)).any()
    else:
        is_usual = True
    is_usual = is_usual and bool(
        ((byte(at) == 0x0A) & (key_size < 128) & (byte(middle) == 0x12) & (value_at + value_size == end)).all()
    )
    if not is_usual:
        return None
    if (rows[1:] == rows[:-1]).any():
        named = rows << 32 | murmur3(data, key_at, key_size)
        if len(np.unique(named)) < len(named):
            return None
    return key_at, key_size, value_at, value_size


def _odd_properties(data: Bytes, messages: Messages) -> list[dict[str, str]]:
    found: list[dict[str, str]] = [{} for _ in range(len(messages.value_at))]
    for row, at, end in zip(*(column.tolist() for column in messages.properties), strict=True):
        try:
            each = KeyValue.FromString(data[at:end].tobytes())
        except DecodeError:
            raise ProtocolError("A property of a message is not valid protobuf; it is corrupt.") from None
        found[row][text(each.key)] = text(each.value)
    return found


def text(value: str | bytes) -> str:
    """A string out of protobuf, which gives bytes that are no UTF-8 as they are."""
    return value if isinstance(value, str) else value.decode("utf-8", "replace")
