"""Hash ranges."""

from __future__ import annotations

from itertools import pairwise

import pytest

from braid.errors import InvalidArgument
from braid.model.hashranges import HashRange, initial_ranges


def test_forms() -> None:
    part = HashRange.of(0, 0x7FFF)
    assert (str(part), part.hex, part.size) == ("[0000, 7fff]", "0000-7fff", 0x8000)
    assert part.covers(0)
    assert part.covers(0x7FFF)
    assert not part.covers(0x8000)
    assert sorted([HashRange(4, 9), HashRange(1, 3), HashRange(1, 2)]) == [(1, 2), (1, 3), (4, 9)]


@pytest.mark.parametrize(("start", "end"), [(-1, 3), (4, 3), (0, 0x10000)])
def test_refused(start: int, end: int) -> None:
    with pytest.raises(InvalidArgument, match="no hash range"):
        HashRange.of(start, end)


def test_split_and_merge() -> None:
    left, right = HashRange(0, 4).split()
    assert (left, right) == ((0, 2), (3, 4))
    assert left.merge(right) == right.merge(left) == HashRange(0, 4)
    with pytest.raises(InvalidArgument, match="cannot be split"):
        HashRange(7, 7).split()
    with pytest.raises(InvalidArgument, match="not adjacent"):
        HashRange(0, 1).merge(HashRange(3, 4))


def test_initial_ranges() -> None:
    assert initial_ranges(3) == [(0, 21844), (21845, 43689), (43690, 65535)]
    for count in (1, 2, 5, 1024, 65536):
        ranges = initial_ranges(count)
        assert len(ranges) == count
        assert sum(part.size for part in ranges) == 65536
        assert all(a.end + 1 == b.start for a, b in pairwise(ranges))
    for count in (0, 65537):
        with pytest.raises(InvalidArgument, match="cannot begin with"):
            initial_ranges(count)
