"""What a topic's record remembers of segments that left its layout: where they ended."""

from __future__ import annotations

import msgspec
import pytest
from tests.unit.scalable.fakes import TOPIC, World, merge, prune, simulate, split, topic_with

from braid.model.hashranges import MAX_HASH, HashRange
from braid.model.layout import SegmentLayout
from braid.model.segments import SegmentEnd, physical_name
from braid.scalable import plans_prune, records
from braid.scalable.api import Retention
from braid.scalable.records import ScalableTopicMetadata

FULL_RANGE = HashRange(0, MAX_HASH)


def record_of(layout: SegmentLayout) -> ScalableTopicMetadata:
    return ScalableTopicMetadata(epoch=0, next_segment_id=0, segments={}).with_layout(layout)


def test_ends_outlive_json_and_records_without_them_are_read() -> None:
    old = record_of(SegmentLayout.initial(1, 0).split(0, 1))
    written = msgspec.json.encode(old)
    assert b"prunedEnds" not in written  # nothing changes for topics that never pruned anything
    read = msgspec.json.decode(written, type=ScalableTopicMetadata)
    assert (read, read.pruned_ends) == (old, {})
    pruned = read.without([0], {0: SegmentEnd(7, 3, 6), 1: SegmentEnd(9, 9, 9)})
    assert pruned.pruned_ends == {0: SegmentEnd(7, 3, 6, FULL_RANGE)}  # not of what stays
    assert pruned.layout == read.layout.prune([0])
    written = msgspec.json.encode(pruned)
    assert b'"prunedEnds":{"0":{"index":7,"ledgerId":3,"entryId":6,"hashRange":[0,65535]}}' in written
    assert msgspec.json.decode(written, type=ScalableTopicMetadata) == pruned
    earlier = msgspec.json.decode(written.replace(b',"hashRange":[0,65535]', b""), type=ScalableTopicMetadata)
    assert earlier.pruned_ends == {0: SegmentEnd(7, 3, 6)}  # of a version that did not note which keys it had


def test_only_the_newest_ends_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    assert records.MAX_PRUNED_ENDS == 1024
    monkeypatch.setattr(records, "MAX_PRUNED_ENDS", 3)
    record = record_of(SegmentLayout.initial(1, 0))
    for number in range(6):
        record = record.with_layout(record.layout.split(max(record.layout.active_segments), number))
        doomed = [each.segment_id for each in record.layout.all_segments.values() if each.is_sealed]
        record = record.without(doomed, {each: SegmentEnd(each, 1, each) for each in doomed})
    assert sorted(record.pruned_ends) == [6, 8, 10]
    assert 12 in record.layout.all_segments  # the ones before it are gone


def test_a_prune_says_how_many_messages_it_deletes_and_why(caplog: pytest.LogCaptureFixture) -> None:
    """A segment goes as a whole, so that no trim of its log tells."""
    caplog.set_level("INFO")

    async def main(world: World) -> None:
        broker = await topic_with(world, 2)
        segment = world.segments.named(TOPIC, await world.layout(), 0)
        segment.messages, segment.trimmed = 7, 3
        await split(broker, 0)
        await split(broker, 1)  # without messages: nothing to be told
        assert await prune(broker) == [0, 1]

    simulate(main)
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("deleted ")]
    assert lines == [
        "deleted 4 messages of segment://public/default/orders/0000-7fff-0 (40 bytes): the topic has no subscription",
    ]


def test_a_sealed_segment_is_shown_to_wait_for_its_ancestors() -> None:
    async def main(world: World) -> None:
        world.unread_minutes = 10
        broker = await topic_with(world, 1)
        controller = await broker.lead()
        parent = world.segments.named(TOPIC, controller.layout, 0)
        parent.messages, parent.last_append_ms = 7, world.runtime.clock.now_ms()
        await split(broker, 0)
        await split(broker, 1)  # empty: alone it could go at once
        assert await prune(broker) == []
        shown = (await broker.do(lambda _service: controller.stats()))["segments"]
        assert shown["1"]["nextTrim"]["atMs"] == shown["0"]["nextTrim"]["atMs"] == parent.last_append_ms + 600_000
        assert (shown["1"]["nextTrim"]["rule"], shown["1"]["nextTrim"]["messages"]) == ("unread", 0)

    simulate(main)


@pytest.mark.parametrize(
    ("retention", "is_read", "why"),
    [
        (Retention(), True, "every subscription has read them"),
        (
            Retention(5),
            True,
            "every subscription has read them; the segment was sealed more than the policy's 5 minutes ago",
        ),
        (
            Retention(0, 9),
            False,
            "no subscription wants them and they are older than 9 minutes (retention.unread_minutes)",
        ),
        (Retention(5), False, "the topic has no subscription; the segment was sealed more than the policy's 5 minutes ago"),
    ],
)
def test_why_a_segment_goes(retention: Retention, is_read: bool, why: str) -> None:
    assert plans_prune._reason(retention, is_read=is_read) == why


def test_a_prune_notes_where_its_segments_ended() -> None:
    async def main(world: World) -> None:
        broker = await topic_with(world, 2)
        world.segments.named(TOPIC, await world.layout(), 0).messages = 7
        await split(broker, 0)
        assert await prune(broker) == [0]
        metadata = await world.metadata()
        assert metadata is not None
        lower, upper = SegmentLayout.initial(2, 0).active_in_order
        assert metadata.pruned_ends == {0: SegmentEnd(7, 1, 6, lower.hash_range)}
        world.segments.named(TOPIC, metadata.layout, 1).messages = 5
        await merge(broker, 1, 3)
        lost = str(physical_name(TOPIC, metadata.layout.segment(3)))
        del world.segments.topics[lost]  # somebody took its data away: nobody knows where it ended
        assert await prune(broker) == [1, 3]
        metadata = await world.metadata()
        assert metadata is not None
        assert metadata.pruned_ends == {0: SegmentEnd(7, 1, 6, lower.hash_range), 1: SegmentEnd(5, 1, 4, upper.hash_range)}
        await split(broker, 4)  # other changes of the record keep them
        metadata = await world.metadata()
        assert metadata is not None
        assert sorted(metadata.pruned_ends) == [0, 1]

    simulate(main)


def test_the_ends_are_in_the_record_before_a_topic_is_deleted() -> None:
    """A reader that finds a segment gone finds its end, also while the prune is not finished."""

    async def main(world: World) -> None:
        broker = await topic_with(world, 1)
        world.segments.named(TOPIC, await world.layout(), 0).messages = 7
        await split(broker, 0)
        seen: list[object] = []

        async def before(operation: str, _segment: str) -> None:
            if operation == "delete":
                metadata = await world.metadata()
                assert metadata is not None
                seen.append((set(metadata.segments), metadata.pruned_ends))

        world.segments.before = before
        assert await prune(broker) == [0]
        assert seen == [({1, 2}, {0: SegmentEnd(7, 1, 6, FULL_RANGE)})]

    simulate(main)
