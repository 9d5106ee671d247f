"""`SegmentLayout`: what split, merge and prune make of a DAG, by example and at random."""

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.errors import InvalidArgument, NotFound, PreconditionFailed
from braid.model.hashranges import HashRange
from braid.model.layout import SegmentLayout
from braid.model.names import TopicName
from braid.model.routing import Routing, ring_hash
from braid.model.segments import NOT_SEALED, SegmentInfo, SegmentState, physical_name
from braid.scalable.records import ScalableTopicMetadata, to_record

ALL_HASHES = range(65_536)


def metadata_of(layout: SegmentLayout) -> ScalableTopicMetadata:
    return ScalableTopicMetadata(epoch=0, next_segment_id=0, segments={}, routing=layout.routing).with_layout(layout)


@pytest.mark.req("R468-73", "R468-24")
@pytest.mark.parametrize("count", [1, 3, 4, 64, 65_536])
def test_initial_layout_cuts_the_ring_into_equal_ranges(count: int) -> None:
    layout = SegmentLayout.initial(count, 1000)
    layout.check()
    assert layout.epoch == 0
    assert layout.next_segment_id == count
    assert sorted(layout.all_segments) == list(range(count))
    widths = [each.hash_range.size for each in layout.active_in_order]
    assert set(widths[:-1]) <= {65_536 // count}
    assert sum(widths) == 65_536
    for each in layout.all_segments.values():
        assert each.is_active
        assert each.parent_ids == each.child_ids == ()
        assert (each.created_at_epoch, each.sealed_at_epoch, each.created_at_ms, each.sealed_at_ms) == (0, -1, 1000, -1)


@pytest.mark.parametrize("count", [0, -1, 65_537])
def test_impossible_counts_are_refused(count: int) -> None:
    with pytest.raises(InvalidArgument, match=str(count)):
        SegmentLayout.initial(count, 0)


@pytest.mark.req("R468-18")
@pytest.mark.parametrize("count", [1, 3, 1000, 65_536])
def test_every_hash_has_its_one_segment(count: int) -> None:
    layout = SegmentLayout.initial(count, 0)
    for hash16 in ALL_HASHES:
        assert layout.find_active_segment(hash16).hash_range.covers(hash16)


@pytest.mark.req("R468-19")
def test_split_halves_the_range_and_seals_the_parent() -> None:
    old = SegmentLayout.initial(2, 1000)
    new = old.split(1, 2000, sealed_ms=2500)
    new.check()
    assert new.epoch == 1
    assert new.next_segment_id == 4
    parent, first, second = (new.segment(number) for number in (1, 2, 3))
    assert parent.state is SegmentState.SEALED
    assert parent.child_ids == (2, 3)
    assert (parent.sealed_at_epoch, parent.sealed_at_ms) == (1, 2500)
    assert (first.hash_range, second.hash_range) == (HashRange(0x8000, 0xBFFF), HashRange(0xC000, 0xFFFF))
    for child in (first, second):
        assert child.parent_ids == (1,)
        assert (child.created_at_epoch, child.created_at_ms, child.sealed_at_epoch) == (1, 2000, NOT_SEALED)
    assert new.segment(0) is old.segment(0)


@pytest.mark.req("R468-19")
def test_split_of_an_odd_range_gives_the_first_child_more() -> None:
    layout = SegmentLayout(
        0,
        2,
        {
            0: SegmentInfo(segment_id=0, hash_range=HashRange(0, 2)),
            1: SegmentInfo(segment_id=1, hash_range=HashRange(3, 65_535)),
        },
    )
    new = layout.split(0, 0)
    assert [new.segment(number).hash_range for number in (2, 3)] == [HashRange(0, 1), HashRange(2, 2)]


@pytest.mark.req("R468-19")
def test_what_cannot_be_split() -> None:
    layout = SegmentLayout.initial(65_536, 0)
    with pytest.raises(PreconditionFailed, match="one hash"):
        layout.split(7, 0)
    with pytest.raises(NotFound, match="no segment 65536"):
        layout.split(65_536, 0)
    layout = SegmentLayout.initial(1, 0).split(0, 0)
    with pytest.raises(PreconditionFailed, match="sealed at epoch 1"):
        layout.split(0, 0)
    with pytest.raises(PreconditionFailed, match="regular topic"):
        SegmentLayout.synthetic(["persistent://public/default/x"]).split(0, 0)


@pytest.mark.req("R468-20")
@pytest.mark.parametrize("ids", [(1, 2), (2, 1)])
def test_merge_joins_neighbours_whatever_their_order(ids: tuple[int, int]) -> None:
    old = SegmentLayout.initial(4, 1000)
    new = old.merge(*ids, 2000)
    new.check()
    child = new.segment(4)
    assert new.epoch == 1
    assert child.hash_range == HashRange(0x4000, 0xBFFF)
    assert child.parent_ids == (1, 2)
    for number in (1, 2):
        assert new.segment(number).is_sealed
        assert new.segment(number).child_ids == (4,)
        assert new.segment(number).sealed_at_epoch == 1


@pytest.mark.req("R468-20")
def test_what_cannot_be_merged() -> None:
    layout = SegmentLayout.initial(4, 0)
    with pytest.raises(PreconditionFailed, match="itself"):
        layout.merge(1, 1, 0)
    with pytest.raises(PreconditionFailed, match="no neighbours"):
        layout.merge(0, 2, 0)
    with pytest.raises(NotFound):
        layout.merge(0, 9, 0)
    with pytest.raises(PreconditionFailed, match="sealed"):
        layout.merge(0, 1, 0).merge(1, 2, 0)


@pytest.mark.req("R468-21")
def test_lineage_over_three_generations() -> None:
    layout = SegmentLayout.initial(2, 0).split(0, 0).merge(3, 1, 0).split(4, 0)
    assert layout.lineage(4) == {0, 1, 3, 4, 5, 6}
    assert layout.ancestors(5) == {0, 1, 3, 4}
    assert layout.descendants(0) == {2, 3, 4, 5, 6}
    assert layout.lineage(2) == {0, 2}
    with pytest.raises(NotFound):
        layout.lineage(9)


@pytest.mark.req("R468-23")
def test_prune_removes_sealed_segments_with_their_edges() -> None:
    old = SegmentLayout.initial(2, 0).split(0, 0).split(2, 0)
    new = old.prune([0, 2])
    new.check()
    assert new.epoch == old.epoch + 2
    assert new.next_segment_id == old.next_segment_id
    assert set(new.all_segments) == {1, 3, 4, 5}
    assert all(each.parent_ids == () for each in new.all_segments.values())
    partly = old.prune([0])
    assert partly.segment(2).parent_ids == ()
    assert partly.segment(4).parent_ids == (2,)
    with pytest.raises(PreconditionFailed, match="active"):
        old.prune([1])
    with pytest.raises(NotFound):
        old.prune([77])


@pytest.mark.req("R468-15")
def test_changes_leave_the_old_layout_as_it_was() -> None:
    old = SegmentLayout.initial(4, 0).split(0, 5)
    before = (old.epoch, old.next_segment_id, dict(old.all_segments), dict(old.active_segments))
    old.split(1, 9)
    old.merge(1, 2, 9)
    old.prune([0])
    assert (old.epoch, old.next_segment_id, dict(old.all_segments), dict(old.active_segments)) == before
    with pytest.raises(TypeError):
        old.all_segments[9] = old.segment(1)  # type: ignore[index]
    with pytest.raises(AttributeError):
        old.segment(1).state = SegmentState.SEALED  # type: ignore[misc]


@pytest.mark.req("R468-22", "R468-24")
def test_record_round_trip_keeps_what_is_not_layout() -> None:
    layout = SegmentLayout.initial(2, 1000, Routing.LOW16).split(1, 2000)
    record = ScalableTopicMetadata(
        epoch=0,
        next_segment_id=0,
        segments={},
        properties={"k": "v"},
        auto_scale_policy={"maxSegments": 8},
        migrated_from={"partitions": 3},
        incarnation="abc",
        routing=Routing.LOW16,
        leader_epoch=7,
    ).with_layout(layout)
    body = msgspec.json.encode(record)
    read = msgspec.json.decode(body, type=ScalableTopicMetadata)
    assert read == record
    assert read.layout == layout
    raw = msgspec.json.decode(body)
    assert raw["properties"] == {"k": "v"}
    assert raw["autoScalePolicy"] == {"maxSegments": 8}
    assert raw["nextSegmentId"] == 4
    assert raw["segments"]["1"] == {
        "segmentId": 1,
        "hashRange": {"start": 0x8000, "end": 0xFFFF},
        "state": "SEALED",
        "parentIds": [],
        "childIds": [2, 3],
        "createdAtEpoch": 0,
        "sealedAtEpoch": 1,
        "createdAtMs": 1000,
        "sealedAtMs": 2000,
    }
    assert raw["segments"]["2"]["sealedAtEpoch"] == -1


@pytest.mark.req("R468-22", "R468-24")
def test_records_of_pulsar_are_read() -> None:
    """Derived booleans and fields from the future are ignored; a sealed epoch of an active segment means nothing."""
    body = (
        b'{"epoch":1,"nextSegmentId":3,"segments":{"1":{"segmentId":1,"hashRange":{"start":0,"end":32767},"state":"ACTIVE",'
        b'"parentIds":[0],"childIds":[],"createdAtEpoch":1,"sealedAtEpoch":-1,"createdAtMs":5,"sealedAtMs":-1,'
        b'"entryBucketSplits":[16384],"sealed":false,"active":true,"root":false,"leaf":true,"legacy":false},'
        b'"2":{"segmentId":2,"hashRange":{"start":32768,"end":65535},"state":"ACTIVE","parentIds":[0],"childIds":[],'
        b'"createdAtEpoch":1,"sealedAtEpoch":0,"createdAtMs":5,"sealedAtMs":0}},"properties":{},"somethingNew":{}}'
    )
    layout = msgspec.json.decode(body, type=ScalableTopicMetadata).layout
    layout.check()
    assert layout.segment(2).sealed_at_epoch == NOT_SEALED
    assert to_record(layout.segment(1)).parent_ids == (0,)


def test_a_segment_is_stored_under_its_own_name_or_the_one_it_had_before() -> None:
    topic = TopicName.parse("topic://public/default/orders")
    layout = SegmentLayout.initial(2, 0)
    assert str(physical_name(topic, layout.segment(1))) == "segment://public/default/orders/8000-ffff-1"
    legacy = SegmentLayout.synthetic(["persistent://public/default/orders-partition-0"]).segment(0)
    assert str(physical_name(topic, legacy)) == "persistent://public/default/orders-partition-0"


def test_keys_are_routed_as_the_layout_says() -> None:
    for routing in (Routing.HIGH16, Routing.LOW16):
        layout = SegmentLayout.initial(64, 0, routing)
        for number in range(200):
            found = layout.segment_of_key(f"key-{number}")
            assert found.hash_range.covers(ring_hash(routing, f"key-{number}"))
    synthetic = SegmentLayout.synthetic([f"persistent://public/default/x-partition-{n}" for n in range(3)])
    assert {synthetic.segment_of_key(f"key-{n}").segment_id for n in range(50)} == {0, 1, 2}


@st.composite
def histories(draw: st.DrawFn) -> list[SegmentLayout]:
    """A layout and what random changes made of it, one by one."""
    layout = SegmentLayout.initial(draw(st.sampled_from([1, 2, 3, 7, 64])), 0)
    history = [layout]
    for now in range(draw(st.integers(0, 30))):
        order = layout.active_in_order
        sealed = [number for number, each in layout.all_segments.items() if each.is_sealed]
        kind = draw(st.sampled_from(["split", "merge", "prune"]))
        if kind == "split":
            wide = [each.segment_id for each in order if each.hash_range.size > 1]
            layout = layout.split(draw(st.sampled_from(wide)), now)
        elif kind == "merge" and len(order) > 1:
            at = draw(st.integers(0, len(order) - 2))
            first, second = draw(st.permutations([order[at].segment_id, order[at + 1].segment_id]))
            layout = layout.merge(first, second, now)
        elif kind == "prune" and sealed:
            layout = layout.prune(draw(st.sets(st.sampled_from(sealed), min_size=1)))
        history.append(layout)
    return history


@pytest.mark.req("R468-15", "R468-16", "R468-17", "R468-21", "R468-22")
@settings(max_examples=150, deadline=None)
@given(histories())
def test_random_histories_keep_the_rules(history: list[SegmentLayout]) -> None:
    seen: set[int] = set(history[0].all_segments)
    for old, new in pairwise(history):
        new.check()
        if new is old:
            continue
        assert new.epoch > old.epoch
        assert new.next_segment_id >= old.next_segment_id
        born = set(new.all_segments) - set(old.all_segments)
        assert born.isdisjoint(seen), "an id was used twice"
        assert born <= set(range(old.next_segment_id, new.next_segment_id))
        seen |= born
        assert set(new.active_segments) == {number for number, each in new.all_segments.items() if each.is_active}
        for number, each in new.all_segments.items():
            for parent in each.parent_ids:
                assert number in new.segment(parent).child_ids
            for child in each.child_ids:
                assert number in new.segment(child).parent_ids
            assert all(number in new.descendants(above) for above in new.ancestors(number))
    last = history[-1]
    assert msgspec.json.decode(msgspec.json.encode(metadata_of(last)), type=ScalableTopicMetadata).layout == last
    assert sum(each.hash_range.size for each in last.active_in_order) == 65_536
    for each in last.active_in_order:
        assert last.find_active_segment(each.hash_range.start) is each
        assert last.find_active_segment(each.hash_range.end) is each


def test_every_segment_split_until_65536_and_merged_back_to_one() -> None:
    """The algebra at its largest; each change of such a layout costs in proportion to it, so the tree is grown in one piece."""
    wide = SegmentLayout.initial(65_536, 0)
    merged = wide.merge(0, 1, 0)
    merged.check()
    assert merged.find_active_segment(1).segment_id == 65_536
    assert len(merged.active_segments) == 65_535
    assert merged.ancestors(65_536) == {0, 1}
    pruned = merged.prune([0, 1])
    pruned.check()
    again = pruned.split(65_536, 0)
    again.check()
    assert len(again.active_segments) == 65_536
    small = SegmentLayout.initial(1, 0)
    while len(small.active_segments) < 256:
        small = small.split(max(small.active_in_order, key=lambda each: each.hash_range.size).segment_id, 0)
    while len(small.active_segments) > 1:
        first, second = small.active_in_order[:2]
        small = small.merge(first.segment_id, second.segment_id, 0)
    small.check()
    assert small.epoch == 510
    assert len(small.ancestors(small.active_in_order[0].segment_id)) == len(small.all_segments) - 1


@pytest.mark.parametrize(
    ("segments", "fault"),
    [
        ({0: SegmentInfo(segment_id=0, hash_range=HashRange(0, 5))}, "end at hash"),
        ({0: SegmentInfo(segment_id=0, hash_range=HashRange(1, 65_535))}, "gap or overlap"),
        (
            {
                0: SegmentInfo(segment_id=0, hash_range=HashRange(0, 40_000)),
                1: SegmentInfo(segment_id=1, hash_range=HashRange(30_000, 65_535)),
            },
            "gap or overlap",
        ),
        ({5: SegmentInfo(segment_id=5, hash_range=HashRange(0, 65_535))}, "wrong id"),
        ({0: SegmentInfo(segment_id=0, hash_range=HashRange(0, 65_535), sealed_at_epoch=3)}, "but was sealed"),
        ({0: SegmentInfo(segment_id=0, hash_range=HashRange(0, 65_535), parent_ids=(1,))}, "older than"),
    ],
)
def test_check_names_the_fault(segments: dict[int, SegmentInfo], fault: str) -> None:
    with pytest.raises(InvalidArgument, match=fault):
        SegmentLayout(0, 2, segments).check()
