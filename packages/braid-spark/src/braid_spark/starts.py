"""Where the messages of a batch begin: three ways, the fastest that fits.

Messages of one size stand at equal distances, which is seen by comparing columns. Otherwise what looks like the beginning of a
message is searched for in the whole batch, and those that lie where the one before them ends are its messages. What is left
(few messages, large ones, bytes full of zeros) is walked through one by one. Every way ends in the same check: the messages
follow each other without a gap from the first byte of the batch to its last. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from google.protobuf.message import DecodeError

from braid.errors import ProtocolError
from braid.wire.batch import MAX_BATCH_MESSAGES
from braid.wire.messages import SingleMessageMetadata
from braid_spark.hashing import Bytes, Numbers

_PROPERTY, _KEY, _SIZE = 0x0A, 0x12, 0x18
_FEW: Final = 16
"""Messages below which arrays do not pay."""
_PROBED: Final = 3
"""Messages looked at before equal distances are believed in."""
_LARGE: Final = 4096
"""Bytes per message from which on a walk is cheaper than a search of all bytes."""
_MAX_FIELDS: Final = 16
"""Properties before the size, up to which messages are searched for."""


def find_starts(data: Bytes, raw: memoryview, bounds: Sequence[tuple[int, int]], counts: Sequence[int]) -> Numbers:
    """Where the messages of all batches begin; `bounds` says where each batch is, `counts` how many messages it holds.

    Raises ProtocolError unless each holds exactly these."""
    found: dict[int, Numbers | None] = {}
    for number, ((at, end), count) in enumerate(zip(bounds, counts, strict=True)):
        if not 0 < count <= MAX_BATCH_MESSAGES:
            raise ProtocolError(f"A batch of {count} messages was announced; 1 to {MAX_BATCH_MESSAGES} are possible.")
        if count >= _FEW:
            found[number] = _equal_steps(data, raw, at, end, count)
    to_search = [number for number, each in found.items() if each is None]
    to_search = [each for each in to_search if bounds[each][1] - bounds[each][0] < counts[each] * _LARGE]
    if to_search:
        at, end = bounds[to_search[0]][0], bounds[to_search[-1]][1]
        starts, behind = _search(data, at, end, 8 * sum(counts[to_search[0] : to_search[-1] + 1]))
        for number in to_search:
            found[number] = _chain(starts, behind, *bounds[number], counts[number])
    return _joined(raw, bounds, counts, found)


def _joined(
    raw: memoryview, bounds: Sequence[tuple[int, int]], counts: Sequence[int], found: Mapping[int, Numbers | None]
) -> Numbers:
    """What was found; what was not is looked for one by one."""
    parts: list[Numbers] = []
    few: list[int] = []
    for number, ((at, end), count) in enumerate(zip(bounds, counts, strict=True)):
        starts = found.get(number)
        if starts is None:
            few += _walk(bytes(raw[at:end]), at, count) or _parse(raw, at, end, count)
        else:
            parts += (np.array(few, np.int64), starts)
            few = []
    parts.append(np.array(few, np.int64))
    return np.concatenate(parts)


# Messages of one size.


def _equal_steps(data: Bytes, raw: memoryview, at: int, end: int, count: int) -> Numbers | None:
    """None unless the batch is a few runs of messages of the same size. (Sequence numbers grow longer now and then.)"""
    runs: list[Numbers] = []
    while count:
        probed = min(count, _PROBED)
        first = _walk(bytes(raw[at : min(end, at + (probed + 1) * _LARGE)]), at, probed, is_last=False)
        if first is None:
            return None
        step = first[1] - at
        if first[-1] - at != probed * step:
            return None  # most batches without equal steps are seen here
        run = _alike(data, at, step, min(count, (end - at) // step))
        if run < min(_FEW, count):
            return None
        runs.append(np.arange(at, at + run * step, step, dtype=np.int64))
        at += run * step
        count -= run
    if at != end:
        return None
    return runs[0] if len(runs) == 1 else np.concatenate(runs)


def _alike(data: Bytes, at: int, step: int, rows: int) -> int:
    """How many of the first rows say the same sizes as the first."""
    if rows < 1:
        return 0
    heads: Bytes = np.ndarray((rows, step), np.uint8, data, at, (step, 1))
    first = heads[0].tobytes()
    marks = [0, 1, 2, 3]
    p = 4
    try:
        while first[p] in (_PROPERTY, _KEY):
            marks += (p, p + 1)
            if first[p + 1] > 127:
                return 1
            p += 2 + first[p + 1]
        marks += (p, p + 1)
        while first[marks[-1]] > 127:
            marks.append(marks[-1] + 1)
    except IndexError:
        return 1  # its fields are not where it says
    is_alike = (heads[:, marks] == heads[0, marks]).all(axis=1)
    return rows if is_alike.all() else int(is_alike.argmin())


# Messages of any size.


def _search(data: Bytes, at: int, end: int, most: int) -> tuple[Numbers, Numbers]:
    """What looks like the beginning of a message between `at` and `end`, and where that message would end.

    Nothing if the bytes are full of zeros, of which `most` words are borne: then nearly everything looks like one."""
    zeros = np.flatnonzero(data[at : at + (end - at) // 2 * 2].view("<u2") == 0)
    if len(zeros) > most:
        zeros = zeros[:0]
    # A size below 256 begins with three zeros, two of which are such a word: at its first byte or at its second.
    zeros *= 2
    zeros += at
    starts: Numbers = zeros - (data.take(zeros + 2, mode="clip") != 0)
    starts = starts[(starts >= at) & (starts <= end - 6)]
    starts = starts[data[starts] == 0]
    behind = _behind(data, starts)
    is_usable = behind <= end
    return (starts, behind) if is_usable.all() else (starts[is_usable], behind[is_usable])


def _behind(data: Bytes, starts: Numbers) -> Numbers:
    """The end of the message that would begin at each of these; far beyond everything where none can."""
    nowhere = np.int64(1 << 60)
    last = len(data) - 1
    at = starts + 4
    bodies = at + data[starts + 3]
    field = data[at]
    for _ in range(_MAX_FIELDS):
        is_longer = (field == _KEY) | (field == _PROPERTY)
        if not is_longer.any():
            break
        steps = data.take(at + 1, mode="clip") + np.int64(2)
        if not is_longer.all():
            steps[~is_longer] = 0
        at += steps
        field = data.take(at, mode="clip")
    digit = data.take(at + 1, mode="clip")
    behind = bodies + (digit & 127)
    is_open = digit > 127
    for byte in (1, 2):
        if not is_open.any():
            break
        digit = data.take(at + (byte + 1), mode="clip")
        behind += np.where(is_open, (digit & 127).astype(np.int64) << 7 * byte, 0)
        is_open &= digit > 127
    behind[is_open | (field != _SIZE) | (at > last)] = nowhere
    return behind


def _chain(starts: Numbers, behind: Numbers, at: int, end: int, count: int) -> Numbers | None:
    """Those of the beginnings in `[at, end)` that follow from the first one; None if they do not lead to the end."""
    low, high = np.searchsorted(starts, (at, end))
    starts, behind = starts[low:high], behind[low:high]
    if not len(starts) or starts[0] != at:
        return None
    if len(starts) == count and behind[-1] == end and np.array_equal(behind[:-1], starts[1:]):
        return starts
    numbers = np.searchsorted(starts, behind)
    after = np.where(np.append(starts, end)[np.minimum(numbers, len(starts))] == behind, numbers, -1).tolist()
    number = 0
    chain = []
    for _ in range(count):
        if not 0 <= number < len(after):
            return None
        chain.append(number)
        number = after[number]
    found: Numbers = starts[chain]
    return found if number == len(after) else None


# One by one.


def _walk(batch: bytes, at: int, count: int, *, is_last: bool = True) -> list[int] | None:
    """Where `count` messages begin and, if they are not all, the next; None if that is not easily seen. Hot."""
    starts: list[int] = []
    add = starts.append
    here, end = 0, len(batch)
    try:
        for _ in range(count):
            add(at + here)
            p = here + 4
            field = batch[p]
            while field == 0x0A or field == 0x12:
                size = batch[p + 1]
                p += 2
                if size > 127:
                    more = batch[p]
                    if more > 127:
                        return None
                    size += (more << 7) - 128
                    p += 1
                p += size
                field = batch[p]
            if field != 0x18:
                return None
            size = batch[p + 1]
            if size > 127:
                more = batch[p + 2]
                size += (more << 7) - 128
                if more > 127:
                    more = batch[p + 3]
                    if more > 127:
                        return None
                    size += (more << 14) - 16384
            here += 4 + (batch[here] << 24 | batch[here + 1] << 16 | batch[here + 2] << 8 | batch[here + 3]) + size
    except IndexError:
        return None
    if is_last and here != end:
        return None
    if not is_last:
        add(at + here)
    return starts


def _parse(raw: memoryview, at: int, end: int, count: int) -> list[int]:
    """The same by the letter of protobuf; says what is wrong."""
    starts = []
    size = end - at
    for number in range(count):
        starts.append(at)
        begin = at + 4
        body = begin + int.from_bytes(raw[at:begin], "big") if begin <= end else end + 1
        if body > end:
            raise ProtocolError(f"A batch of {size} bytes ends inside message {number} of {count}; it is corrupt.")
        try:
            metadata = SingleMessageMetadata.FromString(bytes(raw[begin:body]))
        except DecodeError:
            raise ProtocolError(f"The metadata of message {number} in a batch is not valid protobuf; it is corrupt.") from None
        at = body + metadata.payload_size
        if metadata.payload_size < 0 or at > end or not metadata.IsInitialized():
            raise ProtocolError(f"Message {number} of {count} in a batch does not say a size that fits; the batch is corrupt.")
    if at != end:
        raise ProtocolError(f"A batch of {count} messages is followed by {end - at} bytes that belong to none; it is corrupt.")
    return starts
