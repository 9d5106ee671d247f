"""`HashRange`: an inclusive range of 16-bit hashes, what a segment of a scalable topic covers. Pure."""

from __future__ import annotations

from typing import Final, NamedTuple

from braid.errors import InvalidArgument

MAX_HASH: Final = 0xFFFF


class HashRange(NamedTuple):
    """`[start, end]`, both included; ordered by start, then end."""

    start: int
    end: int

    @classmethod
    def of(cls, start: int, end: int) -> HashRange:
        """A checked range."""
        if not 0 <= start <= end <= MAX_HASH:
            raise InvalidArgument(f"[{start:#x}, {end:#x}] is no hash range: 0 <= start <= end <= 0xffff must hold.")
        return cls(start, end)

    @property
    def size(self) -> int:
        """How many hashes the range covers."""
        return self.end - self.start + 1

    @property
    def hex(self) -> str:
        """The form used in segment names, `0000-7fff`."""
        return f"{self.start:04x}-{self.end:04x}"

    def __str__(self) -> str:
        return f"[{self.start:04x}, {self.end:04x}]"

    def covers(self, hash16: int) -> bool:
        """Whether the hash falls into the range."""
        return self.start <= hash16 <= self.end

    def split(self) -> tuple[HashRange, HashRange]:
        """The two halves; the first is the larger if the size is odd."""
        if self.size < 2:
            raise InvalidArgument(f"The hash range {self} covers one hash and cannot be split.")
        middle = self.start + (self.end - self.start) // 2
        return HashRange(self.start, middle), HashRange(middle + 1, self.end)

    def is_adjacent(self, other: HashRange) -> bool:
        """Whether one range begins where the other ends."""
        return self.end + 1 == other.start or other.end + 1 == self.start

    def merge(self, other: HashRange) -> HashRange:
        """The union of two adjacent ranges."""
        if not self.is_adjacent(other):
            raise InvalidArgument(f"The hash ranges {self} and {other} are not adjacent and cannot be merged.")
        return HashRange(min(self.start, other.start), max(self.end, other.end))


def initial_ranges(count: int) -> list[HashRange]:
    """The whole ring cut into `count` ranges of equal width, the last one taking the remainder."""
    if not 1 <= count <= MAX_HASH + 1:
        raise InvalidArgument(f"A topic cannot begin with {count} segments; 1 to {MAX_HASH + 1} are possible.")
    width = (MAX_HASH + 1) // count
    ranges = [HashRange(i * width, (i + 1) * width - 1) for i in range(count)]
    ranges[-1] = HashRange(ranges[-1].start, MAX_HASH)
    return ranges
