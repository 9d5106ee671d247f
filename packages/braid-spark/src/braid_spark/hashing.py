"""The hash of many keys at once: MurmurHash3 (x86, 32 bit), as the SDK computes it for one key. Pure; numpy only."""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

Bytes: TypeAlias = NDArray[np.uint8]
Numbers: TypeAlias = NDArray[np.int64]
Hashes: TypeAlias = NDArray[np.uint32]

_C1: Final = np.uint32(0xCC9E2D51)
_C2: Final = np.uint32(0x1B873593)
_FIVE: Final = np.uint32(5)
_ADD: Final = np.uint32(0xE6546B64)


def murmur3(data: Bytes, starts: Numbers, lengths: Numbers) -> Hashes:
    """The unsigned 32-bit hash of each slice `data[start : start + length]`."""
    hashes = np.zeros(len(starts), np.uint32)
    if not len(starts):
        return hashes
    words = lengths >> 2
    for word in range(int(words.max())):
        rows: Numbers | slice = slice(None) if word < int(words.min()) else np.flatnonzero(words > word)
        mixed = hashes[rows] ^ _mixed(_words(data, starts[rows] + 4 * word))
        hashes[rows] = _rotated(mixed, 13) * _FIVE + _ADD
    _mix_tails(hashes, data, starts + (words << 2), lengths & 3)
    hashes ^= lengths.astype(np.uint32)
    hashes ^= hashes >> np.uint32(16)
    hashes *= np.uint32(0x85EBCA6B)
    hashes ^= hashes >> np.uint32(13)
    hashes *= np.uint32(0xC2B2AE35)
    hashes ^= hashes >> np.uint32(16)
    return hashes


def _mix_tails(hashes: Hashes, data: Bytes, tails: Numbers, sizes: Numbers) -> None:
    """The one to three bytes behind the last whole word."""
    rows = np.flatnonzero(sizes)
    if not len(rows):
        return
    tail = np.zeros(len(rows), np.uint32)
    for byte in range(3):
        has = np.flatnonzero(sizes[rows] > byte)
        tail[has] |= data[tails[rows[has]] + byte].astype(np.uint32) << np.uint32(8 * byte)
    hashes[rows] ^= _mixed(tail)


def _words(data: Bytes, at: Numbers) -> Hashes:
    """The little-endian words at these offsets, which need not be aligned."""
    view: Hashes = np.ndarray((len(data) - 3,), "<u4", data, 0, (1,))
    return view[at].astype(np.uint32)


def _mixed(block: Hashes) -> Hashes:
    return _rotated(block * _C1, 15) * _C2


def _rotated(value: Hashes, by: int) -> Hashes:
    return value << np.uint32(by) | value >> np.uint32(32 - by)
