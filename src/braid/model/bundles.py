"""Namespace bundles: ranges of the 32-bit hash space, each owned by one broker at a time.

Owns their text form (`0x00000000_0x40000000`), the hash of a topic (CRC-32 of its full name, as Pulsar does; a partition is
hashed by its own full name) and splitting. The bundles of a namespace tile the whole space, in order. Pure.
"""

from __future__ import annotations

import re
import zlib
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Final, NamedTuple

from braid.errors import InvalidArgument
from braid.model.names import TopicName

LAST_HASH: Final = 0xFFFFFFFF
MAX_BUNDLES: Final = 4096
"""Bundles of one namespace."""
_BOUNDARY = re.compile(r"0[xX][0-9a-fA-F]{1,8}", re.ASCII)


class Bundle(NamedTuple):
    """Hashes from `start` up to, not including, `end`; the last bundle, whose end is 0xffffffff, includes that one too."""

    start: int
    end: int

    def __str__(self) -> str:
        return f"{boundary(self.start)}_{boundary(self.end)}"

    @staticmethod
    def parse(text: str) -> Bundle:
        """Read `0x00000000_0x40000000`; raises InvalidArgument."""
        low, separator, high = text.partition("_")
        if not separator or not _BOUNDARY.fullmatch(low) or not _BOUNDARY.fullmatch(high):
            raise InvalidArgument(f"{text[:60]!r} is no bundle; write it as 0x00000000_0x40000000.")
        bundle = Bundle(int(low, 16), int(high, 16))
        if bundle.start >= bundle.end:
            raise InvalidArgument(f"The bundle {bundle} is empty: its first boundary must be below the second.")
        return bundle

    def contains(self, number: int) -> bool:
        """Whether a topic with this hash belongs to the bundle."""
        return self.start <= number < self.end or number == self.end == LAST_HASH

    def halves(self) -> tuple[Bundle, Bundle]:
        """The two bundles that replace this one when it is split."""
        middle = self.start + (self.end - self.start) // 2
        if middle == self.start:
            raise InvalidArgument(f"The bundle {self} is too small to be split.")
        return Bundle(self.start, middle), Bundle(middle, self.end)


def boundary(number: int) -> str:
    """One boundary in its text form."""
    return f"0x{number:08x}"


@lru_cache(maxsize=20_000)
def hash_of(topic: TopicName) -> int:
    """Where a topic lies in the hash space."""
    return zlib.crc32(str(topic).encode())


def split_evenly(count: int) -> tuple[Bundle, ...]:
    """The whole space in `count` bundles of one size; the last one takes what is left over."""
    if not 1 <= count <= MAX_BUNDLES:
        raise InvalidArgument(f"A namespace has 1 to {MAX_BUNDLES} bundles, not {count}.")
    size = (LAST_HASH + 1) // count
    starts = [number * size for number in range(count)]
    return tuple(map(Bundle, starts, [*starts[1:], LAST_HASH]))


def find(bundles: Sequence[Bundle], number: int) -> Bundle:
    """The bundle of a hash; `bundles` tile the whole space in order."""
    return bundles[bisect_right(bundles, number, key=lambda bundle: bundle.start) - 1]


def boundaries_of(bundles: Sequence[Bundle]) -> list[str]:
    """The boundaries of bundles that tile the space, one more than there are bundles."""
    return [boundary(bundle.start) for bundle in bundles] + [boundary(LAST_HASH)]


@lru_cache(maxsize=1000)
def from_boundaries(boundaries: tuple[str, ...]) -> tuple[Bundle, ...]:
    """The bundles between boundaries that begin at 0x00000000, end at 0xffffffff and grow; raises InvalidArgument."""
    for text in boundaries:
        if not _BOUNDARY.fullmatch(text):
            raise InvalidArgument(f"{text[:60]!r} is no boundary of a bundle; write it as 0x40000000.")
    if not 2 <= len(boundaries) <= MAX_BUNDLES + 1:
        raise InvalidArgument(f"A namespace has 1 to {MAX_BUNDLES} bundles, so 2 to {MAX_BUNDLES + 1} boundaries.")
    numbers = [int(text, 16) for text in boundaries]
    if numbers[0] != 0 or numbers[-1] != LAST_HASH or any(a >= b for a, b in pairwise(numbers)):
        raise InvalidArgument("The boundaries of bundles must begin at 0x00000000, end at 0xffffffff and grow.")
    return tuple(map(Bundle, numbers, numbers[1:]))


def split(bundles: Sequence[Bundle], bundle: Bundle) -> tuple[Bundle, ...]:
    """The same bundles with `bundle`, which must be one of them, replaced by its halves."""
    place = bundles.index(bundle)
    return (*bundles[:place], *bundle.halves(), *bundles[place + 1 :])
