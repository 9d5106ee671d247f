"""Bundles tile the hash space whatever is done to them, and every hash has exactly one."""

from __future__ import annotations

import zlib
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.errors import InvalidArgument
from braid.model.bundles import (
    LAST_HASH,
    MAX_BUNDLES,
    Bundle,
    boundaries_of,
    find,
    from_boundaries,
    hash_of,
    split,
    split_evenly,
)
from braid.model.names import TopicName

hashes = st.one_of(st.integers(0, LAST_HASH), st.sampled_from([0, 1, LAST_HASH - 1, LAST_HASH, 1 << 31]))


@given(count=st.integers(1, MAX_BUNDLES), number=hashes)
def test_even_bundles_tile_the_space(count: int, number: int) -> None:
    bundles = split_evenly(count)
    assert len(bundles) == count
    assert bundles[0].start == 0
    assert bundles[-1].end == LAST_HASH
    assert all(a.end == b.start for a, b in pairwise(bundles))
    assert find(bundles, number).contains(number)


@given(count=st.integers(1, 64), number=hashes, cuts=st.lists(st.integers(0, 1 << 20), max_size=12))
def test_one_bundle_per_hash_after_any_splits(count: int, number: int, cuts: list[int]) -> None:
    bundles = split_evenly(count)
    for cut in cuts:
        bundles = split(bundles, bundles[cut % len(bundles)])
    assert [bundle for bundle in bundles if bundle.contains(number)] == [find(bundles, number)]
    assert from_boundaries(tuple(boundaries_of(bundles))) == bundles
    assert [Bundle.parse(str(bundle)) for bundle in bundles] == list(bundles)


def test_text_form_is_pulsars() -> None:
    assert [str(bundle) for bundle in split_evenly(4)] == [
        "0x00000000_0x40000000",
        "0x40000000_0x80000000",
        "0x80000000_0xc0000000",
        "0xc0000000_0xffffffff",
    ]
    assert boundaries_of(split_evenly(3)) == ["0x00000000", "0x55555555", "0xaaaaaaaa", "0xffffffff"]


def test_a_topic_is_hashed_by_its_full_name() -> None:
    assert hash_of(TopicName.parse("x")) == zlib.crc32(b"persistent://public/default/x")
    assert hash_of(TopicName.parse("t/n/x-partition-3")) == zlib.crc32(b"persistent://t/n/x-partition-3")


@pytest.mark.parametrize(
    "text",
    ["", "0x0", "0_1", "0x0_", "0x00000000-0x40000000", "0x4_0x4", "0x5_0x4", "0x100000000_0x2", "0x0_0xg", "0x0_0x4_0x8", "−"],
)
def test_what_is_no_bundle_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        Bundle.parse(text)


@pytest.mark.parametrize(
    "given",
    [
        (),
        ("0x00000000",),
        ("0x00000001", "0xffffffff"),
        ("0x00000000", "0xfffffffe"),
        ("0x00000000", "0x80000000", "0x40000000", "0xffffffff"),
        ("0x00000000", "0x40000000", "0x40000000", "0xffffffff"),
        ("0x00000000", "half", "0xffffffff"),
    ],
)
def test_boundaries_that_do_not_tile_the_space_are_refused(given: tuple[str, ...]) -> None:
    with pytest.raises(InvalidArgument):
        from_boundaries(given)


@pytest.mark.parametrize("count", [0, -1, MAX_BUNDLES + 1])
def test_a_number_of_bundles_out_of_bounds_is_refused(count: int) -> None:
    with pytest.raises(InvalidArgument):
        split_evenly(count)


def test_the_smallest_bundle_is_not_split() -> None:
    with pytest.raises(InvalidArgument, match="too small"):
        Bundle(7, 8).halves()
