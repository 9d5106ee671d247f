"""MurmurHash3 (x86, 32 bit) and the numbers routing derives from it.

`raw` is always the unsigned 32-bit hash of a key's bytes. Pure.
"""

from __future__ import annotations

from struct import iter_unpack
from typing import Final

_MASK: Final = 0xFFFFFFFF
_C1: Final = 0xCC9E2D51
_C2: Final = 0x1B873593


def murmur3_x86_32(data: bytes, seed: int = 0) -> int:
    """The unsigned 32-bit hash of `data`."""
    h = seed & _MASK
    whole = len(data) & ~3
    for (k,) in iter_unpack("<I", data[:whole]):
        k = k * _C1 & _MASK
        k = (k << 15 | k >> 17) & _MASK
        h ^= k * _C2 & _MASK
        h = (h << 13 | h >> 19) & _MASK
        h = (h * 5 + 0xE6546B64) & _MASK
    if whole != len(data):
        k = int.from_bytes(data[whole:], "little") * _C1 & _MASK
        k = (k << 15 | k >> 17) & _MASK
        h ^= k * _C2 & _MASK
    h ^= len(data)
    h = (h ^ h >> 16) * 0x85EBCA6B & _MASK
    h = (h ^ h >> 13) * 0xC2B2AE35 & _MASK
    return h ^ h >> 16


def masked(raw: int) -> int:
    """The non-negative form Pulsar's clients route by: partition = masked % partitions."""
    return raw & 0x7FFFFFFF


def segment_hash(raw: int) -> int:
    """The half that chooses a scalable topic's segment (`high16` routing)."""
    return raw >> 16


def bucket_hash(raw: int) -> int:
    """The half that chooses an entry bucket inside a segment (and the segment under `low16` routing)."""
    return raw & 0xFFFF


def sticky_slot(raw: int) -> int:
    """Key_Shared slot with auto-split and sticky ranges: 1 to 65535, never 0."""
    return masked(raw) % 65536 or 1


def consistent_slot(raw: int) -> int:
    """Key_Shared slot with consistent hashing: 1 to 65535."""
    return masked(raw) % 65535 + 1
