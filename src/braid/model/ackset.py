"""Ack sets: which messages of a batch are still unacknowledged.

On the wire a list of signed 64-bit words, here one `int` used as a bit mask, so that combining two sets is one `&`. A bit is 1
while its message is unacknowledged; trailing zero words are dropped, so nothing left is the empty list. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

_WORD: Final = (1 << 64) - 1
_SIGN: Final = 1 << 63


def full(batch_size: int) -> int:
    """The mask of a batch of which nothing is acknowledged."""
    return (1 << batch_size) - 1


def from_words(words: Iterable[int]) -> int:
    """The mask a peer sent; cut it with `& full(batch_size)` before use, because bits beyond the batch may be set."""
    return int.from_bytes(b"".join((word & _WORD).to_bytes(8, "little") for word in words), "little")


def to_words(mask: int) -> list[int]:
    """The signed words of a mask."""
    words = []
    while mask:
        word = mask & _WORD
        words.append(word - (1 << 64) if word & _SIGN else word)
        mask >>= 64
    return words


def acknowledged_up_to(batch_size: int, index: int) -> int:
    """The mask of a batch whose messages 0 to `index` are acknowledged (a cumulative acknowledgement inside a batch)."""
    done = min(max(index + 1, 0), batch_size)
    return full(batch_size) & ~full(done)
