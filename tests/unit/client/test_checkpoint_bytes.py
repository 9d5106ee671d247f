"""Checkpoints as bytes: round trips, every kind of damage, and whether one fits a topic."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.client.checkpoints import END, AtTime, Checkpoint, Place, check_fits
from braid.client.messages import EARLIEST, LATEST, MessageId
from braid.errors import CheckpointInvalid, CheckpointOutdated
from braid.model.layout import SegmentLayout
from braid.model.segments import SegmentEnd

TOPIC = "topic://public/default/orders"
longs = st.integers(0, (1 << 63) - 1)
ints = st.integers(-1, (1 << 31) - 1)
segment_ids = st.integers(0, (1 << 32) - 1)


@st.composite
def places(draw: st.DrawFn) -> dict[int, Place]:
    found: dict[int, Place] = {}
    for number in draw(st.sets(segment_ids, max_size=8)):
        position = st.builds(MessageId, longs, longs, ints, ints, ints, st.just(number))
        found[number] = draw(st.one_of(st.just(END), st.just(EARLIEST), st.builds(AtTime, longs), position))
    return found


ours = st.builds(Checkpoint, st.text(min_size=1, max_size=30), st.text(max_size=30), longs, places())
EXAMPLE = Checkpoint(TOPIC, "a1b2", 9, {1: MessageId(7, 8, -1, 3, 4, 1), 2: END, 3: EARLIEST, 4: AtTime(1_750_000_000_000)})
JAVA = Checkpoint(places={3: MessageId(5, 7, -1, -1, 0, 3), 12: MessageId(1, 2, 4, 1, 10, 12)})


@given(ours)
def test_our_form_comes_back_as_it_was(checkpoint: Checkpoint) -> None:
    assert Checkpoint.from_bytes(checkpoint.to_bytes()) == checkpoint


def test_our_form_begins_with_its_type_and_version() -> None:
    assert EXAMPLE.to_bytes()[:2] == b"\x03\x01"


@pytest.mark.parametrize("checkpoint", [EXAMPLE, JAVA], ids=["ours", "java"])
def test_truncated_at_every_byte(checkpoint: Checkpoint) -> None:
    data = checkpoint.to_bytes()
    for length in range(len(data)):
        with pytest.raises(CheckpointInvalid, match="EARLIEST"):
            Checkpoint.from_bytes(data[:length])


@pytest.mark.parametrize("checkpoint", [EXAMPLE, JAVA], ids=["ours", "java"])
def test_bytes_after_the_end(checkpoint: Checkpoint) -> None:
    with pytest.raises(CheckpointInvalid):
        Checkpoint.from_bytes(checkpoint.to_bytes() + b"\x00")


def test_every_flipped_bit_is_noticed() -> None:
    data = EXAMPLE.to_bytes()
    for bit in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CheckpointInvalid):
            Checkpoint.from_bytes(bytes(damaged))


@given(st.binary(max_size=200))
@settings(max_examples=500)
def test_garbage_is_refused_or_read_but_nothing_else(data: bytes) -> None:
    for head in (b"", b"\x00", b"\x03\x01"):
        try:
            Checkpoint.from_bytes(head + data)
        except CheckpointInvalid as error:
            assert str(error).endswith(".")


def test_java_forms() -> None:
    assert Checkpoint.from_bytes(b"\x01").boundary == EARLIEST
    assert Checkpoint.from_bytes(b"\x02").boundary == LATEST
    assert Checkpoint(boundary=LATEST).to_bytes() == b"\x02"
    # Segment 3 at ledger 5, entry 7, as scalable.md 5.3 and 5.4 write it.
    data = bytes.fromhex("00 00000001 0000000000000003 00000006 080510073000")
    assert Checkpoint.from_bytes(data) == Checkpoint(places={3: MessageId(5, 7, -1, -1, 0, 3)})
    assert Checkpoint.from_bytes(data).to_bytes() == data
    assert Checkpoint.from_bytes(JAVA.to_bytes()) == JAVA


@pytest.mark.parametrize("data", [b"", b"\x01\x00", b"\x04", b"\xff" * 20, b"\x00\xff\xff\xff\xff", b"\x00\x7f\xff\xff\xff"])
def test_no_checkpoint(data: bytes) -> None:
    with pytest.raises(CheckpointInvalid):
        Checkpoint.from_bytes(data)


def test_another_format_version_says_so() -> None:
    with pytest.raises(CheckpointInvalid, match="format version 9"):
        Checkpoint.from_bytes(b"\x03\x09" + EXAMPLE.to_bytes()[2:])


def layout() -> SegmentLayout:
    return SegmentLayout.initial(1, 0).split(0, 1).split(1, 2)


def test_a_checkpoint_of_another_topic() -> None:
    with pytest.raises(CheckpointInvalid, match="topic://public/default/other"):
        check_fits(Checkpoint("topic://public/default/other", "a", 1, {}), TOPIC, "a", layout())


@pytest.mark.inv("INV5")
def test_a_checkpoint_of_an_earlier_incarnation() -> None:
    with pytest.raises(CheckpointOutdated, match="created again"):
        check_fits(Checkpoint(TOPIC, "a", 1, {}), TOPIC, "b", layout())


def test_a_checkpoint_of_a_pruned_segment() -> None:
    pruned = layout().prune([0])
    read = Checkpoint(TOPIC, "a", 5, {0: END, 1: MessageId(1, 1)})
    check_fits(read, TOPIC, "a", pruned)
    for place in (MessageId(3, 4), EARLIEST, AtTime(5)):
        with pytest.raises(CheckpointOutdated, match="Retention"):
            check_fits(Checkpoint(TOPIC, "a", 5, {0: place}), TOPIC, "a", pruned)
    with pytest.raises(CheckpointOutdated):
        check_fits(Checkpoint(places={0: MessageId(3, 4)}), TOPIC, "a", pruned)


def test_a_checkpoint_of_a_pruned_segment_that_was_read_to_where_it_ended() -> None:
    pruned = layout().prune([0])
    ends = {0: SegmentEnd(40, 3, 4)}
    for read in (MessageId(3, 4), MessageId(3, 4, batch_index=7, batch_size=8), MessageId(3, 5), MessageId(4, 0)):
        check_fits(Checkpoint(TOPIC, "a", 5, {0: read}), TOPIC, "a", pruned, ends=ends)
        check_fits(Checkpoint(places={0: read}), TOPIC, "a", pruned, ends=ends)
    unread: tuple[Place, ...] = (
        MessageId(3, 3),
        MessageId(2, 9),
        MessageId(3, 4, batch_index=6, batch_size=8),
        EARLIEST,
        AtTime(5),
    )
    for place in unread:
        with pytest.raises(CheckpointOutdated, match="Retention"):
            check_fits(Checkpoint(TOPIC, "a", 5, {0: place}), TOPIC, "a", pruned, ends=ends)
    for place in unread:  # nothing was ever in it
        check_fits(Checkpoint(TOPIC, "a", 5, {0: place}), TOPIC, "a", pruned, ends={0: SegmentEnd(0, 3, -1)})


def test_an_empty_segment_that_came_and_went_is_not_missed() -> None:
    read = Checkpoint(TOPIC, "a", 1, {0: END})
    pruned = layout().prune([0, 1])
    with pytest.raises(CheckpointOutdated, match=r"\(1\)"):
        check_fits(read, TOPIC, "a", pruned)
    with pytest.raises(CheckpointOutdated, match=r"\(1\)"):
        check_fits(read, TOPIC, "a", pruned, ends={1: SegmentEnd(1, 3, 0)})
    check_fits(read, TOPIC, "a", pruned, ends={1: SegmentEnd(0, 3, -1)})


def test_boundaries_fit_everywhere() -> None:
    check_fits(Checkpoint(boundary=EARLIEST), TOPIC, "b", layout())
