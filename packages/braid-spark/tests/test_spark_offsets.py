"""The offset document: canonical text, and what cannot be read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid_spark.offsets import BadOffset, Frontier, Offset, Start, TopicOffset, canonical_json, parse_position, read_offset

NAMES = st.sampled_from(["topic://a/b/c", "persistent://a/b/c", "topic://a/b/ü"])
INDEXES = st.integers(0, 1 << 62)
TEXTS = st.text("0123456789abcdef", min_size=1, max_size=6)


@st.composite
def positions(draw: st.DrawFn) -> dict[int, int]:
    """In any order."""
    ids = draw(st.permutations(sorted(draw(st.sets(st.integers(0, 200), max_size=6)))))
    return {number: draw(INDEXES) for number in ids}


@st.composite
def topic_offsets(draw: st.DrawFn) -> TopicOffset:
    segs, drained = draw(positions()), draw(positions())
    drained = {number: at for number, at in drained.items() if number not in segs}
    incs = {number: draw(TEXTS) for number in segs if draw(st.booleans())}
    return TopicOffset(inc=draw(TEXTS), next=201, segs=segs, incs=incs, drained=drained, skipped=dict.fromkeys(drained, 1))


@st.composite
def offsets(draw: st.DrawFn) -> Offset:
    base = {name: Frontier(inc="i", next=201, segs=draw(positions())) for name in draw(st.sets(NAMES))}
    return Offset(
        topics={name: draw(topic_offsets()) for name in draw(st.permutations(sorted(draw(st.sets(NAMES)))))}, base=base
    )


def shuffled(document: Any) -> Any:
    """The same with keys the other way round."""
    if isinstance(document, dict):
        return {key: shuffled(document[key]) for key in reversed(list(document))}
    return document


@given(offsets())
def test_equal_offsets_are_equal_text(offset: Offset) -> None:
    document = offset.document()
    again = read_offset(json.loads(json.dumps(shuffled(document))))
    assert again == offset
    assert isinstance(again, Offset)
    assert json.dumps(again.document()) == json.dumps(document)
    assert canonical_json(again.document()) == canonical_json(document)


@pytest.mark.parametrize("text", ["earliest", "latest", '{"a": {"1": 5, "0": -1, "10": -2}, "b": "latest"}'])
def test_a_symbolic_offset_is_read_back(text: str) -> None:
    start = parse_position(text, "startingOffsets")
    document = start.document()
    again = read_offset(json.loads(json.dumps(document)))
    assert again == start
    assert json.dumps(again.document()) == json.dumps(document)


def test_a_time_is_read_back() -> None:
    assert read_offset({"v": 1, "from": {"time": 5}}) == Start(timestamp_ms=5)


GOOD = {"inc": "i", "next": 2, "segs": {"0": 1}}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (None, "is no offset of a Braid source"),
        ({}, "has version None; this connector reads version 1"),
        ({"v": 2, "topics": {}}, "has version 2; this connector reads version 1.*or a newer one"),
        ({"v": True, "topics": {}}, "has version True"),
        ({"v": 1}, "cannot be read: Object missing required field `topics`"),
        ({"v": 1, "topics": {}, "more": 1}, "unknown field `more`"),
        ({"v": 1, "topics": {"t": {"inc": "i", "next": 2}}}, "missing required field `segs`"),
        ({"v": 1, "topics": {"t": GOOD | {"segs": {"0": -1}}}}, "cannot be read: Expected `int` >= 0"),
        ({"v": 1, "topics": {"t": GOOD | {"segs": {"x": 1}}}}, "cannot be read: Expected `int`"),
        ({"v": 1, "topics": {"t": GOOD | {"segs": {"2": 1}}}}, "segment 2 of t is not below next = 2"),
        ({"v": 1, "topics": {"t": GOOD | {"drained": {"0": 1}}}}, "segment 0 of t is both in segs and in drained"),
        ({"v": 1, "from": "sometimes"}, "says no start"),
        ({"v": 1, "from": {"topics": {"t": {"x": 1}}}}, "names the segment 'x'"),
    ],
)
def test_a_damaged_offset_is_named(document: Any, message: str) -> None:
    with pytest.raises(BadOffset, match=message):
        read_offset(document)


def test_a_long_offset_is_not_shown_whole() -> None:
    with pytest.raises(BadOffset) as error:
        read_offset({"v": 3, "topics": {f"t{number}": GOOD for number in range(1000)}})
    assert len(str(error.value)) < 500
