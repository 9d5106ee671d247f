"""Frames: `totalSize, commandSize, command[, payload]`, cut out of received bytes.

Owns the size limits and the bytes of a frame that has not arrived whole. The two protocol ends walk the frames themselves,
because a call per frame would cost as much as the rest of the decoding.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from braid.errors import ProtocolError

DEFAULT_MAX_MESSAGE_SIZE: Final = 5 * 1024 * 1024
FRAME_PADDING: Final = 10 * 1024
"""What a frame may hold beyond the largest message: command, message metadata, checksum."""
MAX_COMMAND_SIZE: Final = 1024 * 1024
"""Largest command a broker decodes: far above any real one, far below what would hurt."""

SIZES: Final = Struct(">II")
_MAX_PARTS: Final = 256
IN_PLACE: Final = 1 << 17
"""A frame of which so much is missing is received where it stays; smaller ones are cut out of what came together."""
_PLACE: Final = 1 << 18
"""Room for what comes together; as much as an event loop reads at once."""
_SPARE: Final = 3
"""Rooms for large frames that are kept: one for what is being read, one for what has arrived, one for what arrives."""
_ROOM_STEP: Final = 1 << 20
"""Their sizes are multiples of this, so that a room for one frame does for the next, which is a little larger."""


class LargeRooms:
    """Where large frames are received. A room is used again once nobody looks at the frame that was in it: new memory would
    have to be cleared, and its pages be had from the kernel, for every frame. Never more than `_SPARE` are kept."""

    __slots__ = ("_rooms",)

    def __init__(self) -> None:
        self._rooms: list[bytearray] = []

    @property
    def kept(self) -> int:
        """How many there are to be used again."""
        return len(self._rooms)

    def take(self, size: int) -> memoryview:
        """Room for exactly so many bytes, whatever is in them."""
        free = None
        for number, room in enumerate(self._rooms):
            if _is_free(room):
                if len(room) >= size:
                    return memoryview(room)[:size]
                free = number
        made = bytearray(-(-size // _ROOM_STEP) * _ROOM_STEP)
        if free is not None:
            self._rooms[free] = made
        elif len(self._rooms) < _SPARE:
            self._rooms.append(made)
        return memoryview(made)[:size]


def _is_free(room: bytearray) -> bool:
    """Whether nobody has a view of it: Python refuses to change the size of a bytearray that somebody looks at."""
    try:
        room.append(0)
    except BufferError:
        return False
    room.pop()
    return True


class FrameBuffer:
    """Holds the beginning of an unfinished frame between two reads; never more than one frame and one read.

    Whoever reads hands over what came (`join`) or asks where to put it (`room`, `filled`): large frames are spared two copies.
    """

    __slots__ = ("_large", "_limit", "_parts", "_place", "_size", "_wanted", "_whole")

    def __init__(self, max_message_size: int) -> None:
        self._limit = max_message_size + FRAME_PADDING
        self._parts: list[bytes] = []
        self._size = 0
        self._wanted = 0
        self._place: memoryview | None = None
        """Where bytes are put that are not the rest of a large frame; None unless somebody asks for room."""
        self._large = LargeRooms()
        self._whole: memoryview | None = None
        """The large frame under way."""

    @property
    def limit(self) -> int:
        """Largest `totalSize` accepted: the frame with its length field fits into message size plus padding."""
        return self._limit - 4

    def resize(self, max_message_size: int) -> None:
        """Follow the limit the other side announced."""
        self._limit = max_message_size + FRAME_PADDING

    @property
    def size(self) -> int:
        """Bytes held."""
        return self._size

    def room(self) -> memoryview:
        """Where the next bytes may be put; `filled` takes them."""
        if self._whole is not None:
            return self._whole[self._size :]
        if self._place is None:
            self._place = memoryview(bytearray(_PLACE))
        return self._place

    def filled(self, count: int) -> bytes | memoryview:
        """As `join`, with so many bytes that were put into `room`."""
        if self._whole is None:
            return self.join(bytes(self.room()[:count]))
        self._size += count
        if self._size < self._wanted:
            return b""
        whole, self._whole = self._whole, None
        self._size = 0
        return whole

    def join(self, data: bytes) -> bytes:
        """The bytes to decode now: what was kept plus `data`; empty while the frame under way is incomplete.

        A large frame that comes in many reads is joined once, at its end, not once per read.
        """
        if not self._size:
            return data
        parts = self._parts
        parts.append(data)
        self._size += len(data)
        if self._size < self._wanted:
            if len(parts) >= _MAX_PARTS:
                self._parts = [b"".join(parts)]
            return b""
        joined = b"".join(parts)
        self._parts = []
        self._size = 0
        return joined

    def keep(self, data: bytes | memoryview, start: int) -> None:
        """Keep `data[start:]`, the beginning of a frame. Raises ProtocolError if that frame can never be accepted."""
        size = len(data) - start
        if not size:
            return
        if size >= 4:
            total = int.from_bytes(data[start : start + 4], "big")
            command = int.from_bytes(data[start + 4 : start + 8], "big") if size >= 8 else 0
            self.check(total, command)
            self._wanted = total + 4
        else:
            self._wanted = 4
        self._size = size
        if self._place is not None and self._wanted - size >= IN_PLACE:
            self._whole = self._large.take(self._wanted)
            self._whole[:size] = data[start:]
        else:
            self._parts = [bytes(data[start:])]

    def check(self, total: int, command: int) -> None:
        """Raise ProtocolError unless the two lengths can be those of a frame."""
        if total > self.limit:
            raise ProtocolError(
                f"A frame of {total + 4} bytes was announced; the limit is {self._limit}. Send smaller messages."
            )
        if command > total - 4:
            raise ProtocolError(
                f"A frame of {total} bytes cannot hold a command of {command} bytes; the lengths are not Pulsar's."
            )
