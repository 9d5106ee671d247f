"""`Checkpoint`: where a checkpoint consumer stands in every segment, as a value an application can store. Pure.

Bytes begin with a type: 03 is ours (format version, topic, incarnation, `next`, then a place per segment, then a checksum);
01 and 02 stand for the beginning and the end; 00 is the form of Pulsar's Java client, which names no topic and incarnation.
Whether a checkpoint still fits its topic is decided when it is used (`check_fits`); nothing here reads a layout by itself.
"""

from __future__ import annotations

import datetime
import struct
from collections.abc import Mapping
from enum import Enum
from typing import Final

import msgspec
from google.protobuf.message import DecodeError

from braid.client.messages import EARLIEST, LATEST, MessageId
from braid.errors import CheckpointInvalid, CheckpointOutdated, InvalidArgument
from braid.model.layout import SegmentLayout
from braid.model.segments import SegmentEnd
from braid.wire import messages as pb
from braid.wire.checksum import crc32c
from braid.wire.commands import signed64, unsigned64

FORMAT_VERSION: Final = 1
MAX_SEGMENTS: Final = 1 << 20
"""More than a topic can have ever had in one layout; larger counts are garbage."""
REMEDY: Final = "start from EARLIEST, LATEST or a time instead, or from a newer checkpoint"


class End(Enum):
    """The segment was sealed and read to its end."""

    END = "end"


END: Final = End.END


class AtTime(msgspec.Struct, frozen=True):
    """Nothing of the segment was read yet; reading begins at the first message stored at or after this time."""

    ms: int


Place = MessageId | End | AtTime
"""Where reading of one segment stands: the last message received (EARLIEST = none yet), its end, or a time to begin at."""


class Checkpoint(msgspec.Struct, frozen=True):
    """What a checkpoint consumer had received, segment by segment.

    `topic` and `incarnation` are empty in checkpoints of other clients, which do not say them.
    """

    topic: str = ""
    incarnation: str = ""
    next_segment: int = 0
    """Segments from this id on did not exist yet; they are read from their beginning."""
    places: Mapping[int, Place] = {}
    boundary: MessageId | None = None
    """EARLIEST or LATEST for the two checkpoints that are the same for every topic."""

    def to_bytes(self) -> bytes:
        """Bytes to be stored; `from_bytes` reads them in any later version."""
        if self.boundary is not None:
            return b"\x01" if self.boundary == EARLIEST else b"\x02"
        if not self.topic:
            return _write_java(self)
        return _write(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Checkpoint:
        """Read what `to_bytes` wrote, or a checkpoint of Pulsar's Java client. Raises CheckpointInvalid."""
        if not isinstance(data, bytes | bytearray | memoryview):
            raise InvalidArgument(
                f"A checkpoint is read from bytes, not from {type(data).__name__}; give what to_bytes() gave."
            )
        data = bytes(data)
        if not data:
            raise CheckpointInvalid(f"An empty value is no checkpoint; {REMEDY}.")
        try:
            if data[0] == 3:
                return _read(data)
            if data[0] == 0:
                return _read_java(data)
        except (struct.error, UnicodeDecodeError, ValueError, DecodeError) as error:
            raise CheckpointInvalid(f"The checkpoint is damaged or cut off ({error}); {REMEDY}.") from None
        if data in (b"\x01", b"\x02"):
            return cls(boundary=EARLIEST if data == b"\x01" else LATEST)
        raise CheckpointInvalid(f"{len(data)} bytes that begin with {data[0]:#04x} are no checkpoint; {REMEDY}.")


def understood_start(start: object) -> MessageId | Checkpoint | AtTime:
    """The start given by an application; raises InvalidArgument."""
    if isinstance(start, bytes | bytearray | memoryview):
        return Checkpoint.from_bytes(bytes(start))
    if isinstance(start, Checkpoint) or (isinstance(start, MessageId) and start in (EARLIEST, LATEST)):
        return start
    if isinstance(start, datetime.datetime):
        if start.tzinfo is None:
            raise InvalidArgument(f"start={start} has no time zone; give one, such as datetime.now(UTC), or milliseconds.")
        start = int(start.timestamp() * 1000)
    if isinstance(start, int) and not isinstance(start, bool) and 0 <= start < 1 << 62:
        return AtTime(start)
    raise InvalidArgument(
        f"start={start!r:.100} cannot be used; give EARLIEST, LATEST, a Checkpoint or its bytes, an aware datetime or "
        "milliseconds since 1970."
    )


def check_fits(
    checkpoint: Checkpoint,
    topic: str,
    incarnation: str,
    layout: SegmentLayout,
    *,
    is_whole: bool = True,
    ends: Mapping[int, SegmentEnd] | None = None,
) -> None:
    """Raise CheckpointInvalid if the checkpoint is of another topic, CheckpointOutdated if data it needs is gone (INV5).

    `is_whole`: everything is read by whoever has the checkpoint, so segments that came and went since then are missing too.
    `ends`: where segments ended that are gone, if known; of one that had been read that far, nothing is missing."""
    if checkpoint.boundary is not None:
        return
    if checkpoint.topic and checkpoint.topic != topic:
        raise CheckpointInvalid(f"The checkpoint is of {checkpoint.topic} and cannot be used for {topic}; {REMEDY}.")
    if checkpoint.incarnation != incarnation and checkpoint.topic:
        raise CheckpointOutdated(
            f"{topic} was deleted and created again since the checkpoint was taken (incarnation {incarnation or 'none'} "
            f"instead of {checkpoint.incarnation or 'none'}); {REMEDY}."
        )
    known = ends or {}
    gone = [
        number
        for number, place in removed(checkpoint, layout, is_whole=is_whole).items()
        if number not in known or not _reaches(place, known[number])
    ]
    if gone:
        listed = ", ".join(map(str, sorted(gone)[:10]))
        raise CheckpointOutdated(
            f"Retention has removed segments ({listed}) of {topic} that the checkpoint had not read to their end; {REMEDY}, "
            "and keep data longer if that must not happen."
        )


def removed(checkpoint: Checkpoint, layout: SegmentLayout, *, is_whole: bool) -> dict[int, Place]:
    """Segments that are gone and were not read to their ends as far as the checkpoint knows, and how far they were read."""
    gone: dict[int, Place] = {
        number: place for number, place in checkpoint.places.items() if place is not END and number not in layout.all_segments
    }
    if is_whole and checkpoint.topic:
        gone |= dict.fromkeys(missing(layout, checkpoint.next_segment), EARLIEST)
    return gone


def _reaches(place: Place, end: SegmentEnd) -> bool:
    """Whether a place is behind the last message of a segment that ended there."""
    if end.index == 0:
        return True
    if not isinstance(place, MessageId):
        return False
    at, last = (place.ledger_id, place.entry_id), (end.ledger_id, end.entry_id)
    return at > last or (at == last and place.batch_index + 1 >= place.batch_size)


def missing(layout: SegmentLayout, first: int) -> list[int]:
    """Segments with ids from `first` on that were made and removed again."""
    return [number for number in range(first, layout.next_segment_id) if number not in layout.all_segments]


# Our form.

_POSITION, _END, _START, _TIME = range(4)
_LENGTH: Final = struct.Struct(">H")
_HEAD: Final = struct.Struct(">QI")
_SEGMENT: Final = struct.Struct(">Q")
_KIND: Final = struct.Struct(">B")
_ID: Final = struct.Struct(">qqiii")
_MS: Final = struct.Struct(">q")
_SUM: Final = struct.Struct(">I")


def _write(checkpoint: Checkpoint) -> bytes:
    out = [bytes((3, FORMAT_VERSION))]
    for text in (checkpoint.topic, checkpoint.incarnation):
        raw = text.encode()
        out += [_LENGTH.pack(len(raw)), raw]
    out.append(_HEAD.pack(checkpoint.next_segment, len(checkpoint.places)))
    for number, place in sorted(checkpoint.places.items()):
        out += [_SEGMENT.pack(number), write_place(place)]
    body = b"".join(out)
    return body + _SUM.pack(crc32c(body))


def _read(data: bytes) -> Checkpoint:
    if len(data) < 2:
        raise ValueError("it ends after its first byte")
    if data[1] != FORMAT_VERSION:
        raise CheckpointInvalid(
            f"The checkpoint has format version {data[1]}, this client reads {FORMAT_VERSION}; use the version of Braid that "
            "wrote it."
        )
    body, found = data[:-4], data[-4:]
    if _SUM.pack(crc32c(body)) != found:
        raise ValueError("its checksum is wrong")
    at = 2
    texts = []
    for _ in range(2):
        (length,) = _LENGTH.unpack_from(body, at)
        at += _LENGTH.size
        texts.append(_slice(body, at, length).decode())
        at += length
    next_segment, count = _HEAD.unpack_from(body, at)
    at += _HEAD.size
    places: dict[int, Place] = {}
    for _ in range(_counted(count)):
        (number,) = _SEGMENT.unpack_from(body, at)
        places[number], at = _read_place(body, at + _SEGMENT.size, number)
    if at != len(body):
        raise ValueError(f"{len(body) - at} bytes follow its end")
    return Checkpoint(texts[0], texts[1], next_segment, places)


def write_place(place: Place) -> bytes:
    """One place, as checkpoints have it and as the members of a group tell it each other."""
    if place is END:
        return _KIND.pack(_END)
    if isinstance(place, AtTime):
        return _KIND.pack(_TIME) + _MS.pack(place.ms)
    if place.ledger_id < 0:
        return _KIND.pack(_START)
    return _KIND.pack(_POSITION) + _ID.pack(
        place.ledger_id, place.entry_id, place.partition, place.batch_index, place.batch_size
    )


def read_place(data: bytes, number: int) -> Place:
    """What `write_place` wrote of the segment of this number. Raises CheckpointInvalid."""
    try:
        place, end = _read_place(data, 0, number)
        if end != len(data):
            raise ValueError(f"{len(data) - end} bytes follow its end")
    except (struct.error, ValueError) as error:
        raise CheckpointInvalid(
            f"What the group knows of segment {number} is damaged ({error}); delete the group's subscription and {REMEDY}."
        ) from None
    return place


def _read_place(body: bytes, at: int, number: int) -> tuple[Place, int]:
    """A place and where it ends."""
    (kind,) = _KIND.unpack_from(body, at)
    at += _KIND.size
    if kind == _END:
        return END, at
    if kind == _START:
        return EARLIEST, at
    if kind == _TIME:
        return AtTime(_MS.unpack_from(body, at)[0]), at + _MS.size
    if kind == _POSITION:
        ledger_id, entry_id, partition, index, size = _ID.unpack_from(body, at)
        return MessageId(ledger_id, entry_id, partition, index, size, number), at + _ID.size
    raise ValueError(f"segment {number} has an unknown kind of place, {kind}")


# The form of Pulsar's Java client.

_COUNT: Final = struct.Struct(">i")
_JAVA_SEGMENT: Final = struct.Struct(">qi")


def _write_java(checkpoint: Checkpoint) -> bytes:
    out = [b"\x00", _COUNT.pack(len(checkpoint.places))]
    for number, place in sorted(checkpoint.places.items()):
        if not isinstance(place, MessageId):
            raise CheckpointInvalid("A checkpoint without a topic cannot say more than positions; take one from a consumer.")
        raw = _java_id(place)
        out += [_JAVA_SEGMENT.pack(number, len(raw)), raw]
    return b"".join(out)


def _java_id(place: MessageId) -> bytes:
    found = pb.MessageIdData(
        ledgerId=unsigned64(place.ledger_id), entryId=unsigned64(place.entry_id), batch_size=max(place.batch_size, 0)
    )
    if place.partition >= 0:
        found.partition = place.partition
    if place.batch_index >= 0:
        found.batch_index = place.batch_index
    return found.SerializeToString()


def _read_java(data: bytes) -> Checkpoint:
    (count,) = _COUNT.unpack_from(data, 1)
    at = 1 + _COUNT.size
    places: dict[int, Place] = {}
    for _ in range(_counted(count)):
        number, length = _JAVA_SEGMENT.unpack_from(data, at)
        at += _JAVA_SEGMENT.size
        if number < 0:
            raise ValueError(f"it names the segment {number}")
        raw = _slice(data, at, length)
        at += length
        found = pb.MessageIdData.FromString(raw)
        places[number] = MessageId(
            signed64(found.ledgerId), signed64(found.entryId), found.partition, found.batch_index, found.batch_size, number
        )
    if at != len(data):
        raise ValueError(f"{len(data) - at} bytes follow its end")
    return Checkpoint(places=places)


def _slice(data: bytes, at: int, length: int) -> bytes:
    if length < 0 or at + length > len(data):
        raise ValueError(f"{length} bytes are announced at byte {at}, {max(len(data) - at, 0)} are left")
    return data[at : at + length]


def _counted(count: int) -> int:
    if not 0 <= count <= MAX_SEGMENTS:
        raise ValueError(f"it names {count} segments")
    return count
