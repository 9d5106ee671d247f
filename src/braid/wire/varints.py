"""Protobuf's base-128 integers, by hand, for the few places where a message object per entry would cost too much.

Pure; encodes 0 to 2^64-1 (a negative number as its two's complement, as protobuf does).
"""

from __future__ import annotations

from typing import Final

from braid.errors import ProtocolError

_MASK: Final = (1 << 64) - 1


def _slow_varint(value: int) -> bytes:
    value &= _MASK
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


_CACHED: Final = 4096
_SMALL: Final = tuple(_slow_varint(value) for value in range(_CACHED))


def varint(value: int) -> bytes:
    """Encode one number."""
    if 0 <= value < 0x200000:
        if value < _CACHED:
            return _SMALL[value]
        if value < 0x4000:
            return bytes((value & 0x7F | 0x80, value >> 7))
        return bytes((value & 0x7F | 0x80, value >> 7 & 0x7F | 0x80, value >> 14))
    if 0 <= value < 0x10000000:
        return bytes((value & 0x7F | 0x80, value >> 7 & 0x7F | 0x80, value >> 14 & 0x7F | 0x80, value >> 21))
    return _slow_varint(value)


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at `at` and the offset behind it; raises ProtocolError when it is cut off or longer than ten bytes."""
    value = shift = 0
    try:
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value & _MASK, at
            shift += 7
            if shift == 70:
                raise ProtocolError("A number of more than ten bytes was received; the bytes are not valid protobuf.")
    except IndexError:
        raise ProtocolError("A number is cut off by the end of its message; the bytes are not valid protobuf.") from None
