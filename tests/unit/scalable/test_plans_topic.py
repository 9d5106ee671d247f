"""Prune and delete: the order of their steps, what they wait for, and what they leave behind."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from tests.unit.scalable.fakes import TOPIC, World, prune, simulate, split, steps_of, topic_with

from braid.errors import (
    AlreadyExists,
    BraidError,
    Conflict,
    LedElsewhere,
    NotReady,
    OutcomeUnknown,
    PreconditionFailed,
    TopicNotFound,
)
from braid.model.segments import physical_name
from braid.runtime.plans import Moment, watching
from braid.scalable.records import (
    PendingOperation,
    ScalableTopicMetadata,
    SegmentRecord,
    SubscriptionChange,
    SubscriptionMetadata,
    controller_path,
    decode,
    subscription_path,
    topic_path,
)
from braid.scalable.service import ScalableTopicService


async def _delete_subscription(service: ScalableTopicService, name: str) -> None:
    await (await service.lead_scalable(TOPIC)).delete_subscription(name)


async def _is_gone(world: World) -> bool:
    return await world.metadata() is None


def pruned_of(record: ScalableTopicMetadata) -> tuple[SegmentRecord, ...]:
    return () if record.pending_operation is None else record.pending_operation.pruned


@pytest.mark.req("R468-23")
def test_prune_waits_for_retention_and_for_every_subscription() -> None:
    async def main(world: World) -> None:
        broker = await topic_with(world, 1)
        controller = await broker.lead()
        await broker.do(lambda _service: controller.create_subscription("s"))
        await broker.do(lambda _service: controller.create_subscription("group", "CHECKPOINT"))
        world.segments.named(TOPIC, controller.layout, 0).messages = 3
        await split(broker, 0)
        world.retention_minutes = -1
        assert await prune(broker) == []
        world.retention_minutes = 10
        world.segments.named(TOPIC, controller.layout, 0).cursors["s"] = 3
        assert await prune(broker) == []
        await asyncio.sleep(599)
        assert await prune(broker) == []
        world.segments.named(TOPIC, controller.layout, 0).cursors["s"] = 2
        await asyncio.sleep(2)
        assert await prune(broker) == []
        world.segments.named(TOPIC, controller.layout, 0).cursors["s"] = 3
        world.segments.trace.clear()
        names = await steps_of(prune(broker))
        assert names == ["prune:discover", "prune:flip", "prune:delete-topics", "prune:finish", "prune:notify"]
        metadata = await world.metadata()
        assert metadata is not None
        assert metadata.epoch == 2
        assert set(metadata.segments) == {1, 2}
        assert set(world.segments.topics) == {str(physical_name(TOPIC, each)) for each in metadata.layout.all_segments.values()}

    simulate(main)


def test_a_topic_without_subscriptions_keeps_its_sealed_segments_for_their_time() -> None:
    """The time begins with the last message. Groups of checkpoint consumers are no subscriptions, and an empty segment has
    nothing to keep."""

    async def main(world: World) -> None:
        world.unread_minutes = -1
        broker = await topic_with(world, 2)
        controller = await broker.lead()
        await broker.do(lambda _service: controller.create_subscription("group", "CHECKPOINT"))
        parent = world.segments.named(TOPIC, controller.layout, 0)
        parent.messages, parent.last_append_ms = 3, world.runtime.clock.now_ms()
        await asyncio.sleep(60)
        await split(broker, 0)
        await split(broker, 1)
        assert await prune(broker) == [1]
        world.unread_minutes = 10
        stats = await broker.do(lambda _service: controller.stats())
        assert stats["segments"]["0"]["nextTrim"]["atMs"] == parent.last_append_ms + 600_000
        assert stats["segments"]["0"]["nextTrim"]["rule"] == "unread"
        await asyncio.sleep(530)  # the leader looks by itself, too
        assert await prune(broker) == []
        assert 0 in (await world.layout()).all_segments
        await asyncio.sleep(11)
        await prune(broker)
        assert 0 not in (await world.layout()).all_segments

    simulate(main)


def test_with_a_subscription_unread_messages_are_those_it_has_not_read() -> None:
    async def main(world: World) -> None:
        broker = await topic_with(world, 1)
        controller = await broker.lead()
        world.segments.named(TOPIC, controller.layout, 0).messages = 3
        await split(broker, 0)
        world.unread_minutes = 10
        await broker.do(lambda _service: controller.create_subscription("s", "STREAM", "latest"))
        assert await prune(broker) == [0]

    simulate(main)


@pytest.mark.req("R473-2")
def test_a_segment_with_an_undecided_write_is_not_pruned() -> None:
    async def main(world: World) -> None:
        broker = await topic_with(world, 1)
        controller = await broker.lead()
        parent = world.segments.named(TOPIC, controller.layout, 0)
        parent.messages = parent.undecided = 1
        await split(broker, 0)
        assert await prune(broker) == []
        parent.undecided = 0
        assert await prune(broker) == [0]

    simulate(main)


def test_the_leader_prunes_by_itself() -> None:
    async def main(world: World) -> None:
        broker = await topic_with(world, 1)
        await split(broker, 0)
        await asyncio.sleep(world.config.prune_seconds + 1)
        assert set((await world.layout()).all_segments) == {1, 2}

    simulate(main)


@pytest.mark.inv("INV8")
def test_a_segment_is_not_pruned_before_its_ancestors() -> None:
    """Else its children would lose their tie to the ancestor and be handed out before that is read."""

    async def main(world: World) -> None:
        broker = await topic_with(world, 1)
        controller = await broker.lead()
        await broker.do(lambda _service: controller.create_subscription("s"))
        oldest = world.segments.named(TOPIC, controller.layout, 0)
        oldest.messages = 5
        await split(broker, 0)
        await split(broker, 1)  # empty, so read at once
        assert await prune(broker) == []
        oldest.cursors["s"] = 5
        assert await prune(broker) == [0, 1]

    simulate(main)


def test_a_sealed_segment_without_a_topic_is_pruned() -> None:
    async def main(world: World) -> None:
        broker = await topic_with(world, 1)
        controller = await broker.lead()
        await broker.do(lambda _service: controller.create_subscription("s"))
        await split(broker, 0)
        del world.segments.topics[str(physical_name(TOPIC, controller.layout.segment(0)))]
        assert await prune(broker) == [0]

    simulate(main)


def test_a_late_queue_subscription_does_not_keep_what_it_never_wants() -> None:
    async def main(world: World) -> None:
        broker = await topic_with(world, 1)
        world.segments.named(TOPIC, await world.layout(), 0).messages = 5
        await split(broker, 0)
        await broker.do(lambda service: service.register_queue_subscription(TOPIC, "all", "earliest"))
        assert await prune(broker) == []
        await broker.do(lambda service: _delete_subscription(service, "all"))
        await broker.do(lambda service: service.register_queue_subscription(TOPIC, "new", "latest"))
        world.segments.named(TOPIC, await world.layout(), 0).cursors.pop("new")  # as if its owner had not answered
        assert await prune(broker) == [0]

    simulate(main)


def test_topics_of_pruned_segments_are_deleted_in_the_end() -> None:
    async def main(world: World) -> None:
        broker = await topic_with(world, 1)
        await split(broker, 0)
        until = asyncio.get_running_loop().time() + 5

        def fail(name: str, _segment: str) -> Exception | None:
            return NotReady("Later.") if name == "delete" and asyncio.get_running_loop().time() < until else None

        world.segments.fail = fail
        with pytest.raises(NotReady):
            await prune(broker)
        metadata = await world.metadata()
        assert metadata is not None
        assert set(metadata.segments) == {1, 2}
        assert [each.segment_id for each in pruned_of(metadata)] == [0]
        assert len(world.segments.topics) == 3
        await world.until_settled()
        assert len(world.segments.topics) == 2

    simulate(main)


# Delete.


@pytest.mark.req("R468-10", "R468-74")
def test_delete_removes_segments_then_subscriptions_then_the_record() -> None:
    async def main(world: World) -> None:
        broker, other = await topic_with(world, 2), await world.broker()
        standby = await other.do(lambda service: service.controller(TOPIC))
        controller = await broker.lead()
        await broker.do(lambda _service: controller.create_subscription("s"))
        await split(broker, 0)

        async def look(name: str) -> None:
            if name == "delete:subscriptions":
                assert not world.segments.topics
            assert await world.metadata() is not None

        names = await steps_of(broker.do(lambda service: service.delete_topic(TOPIC)), look)
        assert names == [
            "delete:intend",
            "delete:close-coordinators",
            "delete:segments",
            "delete:subscriptions",
            "delete:record",
        ]
        assert await world.store.get(controller_path(TOPIC), fresh=True) is None
        await asyncio.sleep(60)
        assert standby.is_closed
        assert broker.service.controllers() == other.service.controllers() == []
        assert [key for key in world.engine.tables.rows if key.startswith("/topics/")] == []
        with pytest.raises(TopicNotFound):
            await broker.do(lambda service: service.delete_topic(TOPIC))

    simulate(main)


@pytest.mark.req("R468-74")
def test_delete_with_an_owner_that_fails_for_a_while() -> None:
    async def main(world: World) -> None:
        broker = await topic_with(world, 3)
        controller = await broker.lead()
        until = asyncio.get_running_loop().time() + 8

        def fail(name: str, segment: str) -> Exception | None:
            is_broken = name == "delete" and segment.endswith("-1") and asyncio.get_running_loop().time() < until
            return NotReady("Not now.") if is_broken else None

        world.segments.fail = fail
        with pytest.raises(NotReady):
            await broker.do(lambda service: service.delete_topic(TOPIC))
        for refused in (
            lambda _service: controller.split_segment(0),
            lambda _service: controller.create_subscription("s"),
            lambda service: service.lead(TOPIC),
        ):
            with pytest.raises(Conflict, match="being deleted"):
                await broker.do(refused)
        with pytest.raises(TopicNotFound, match="being deleted"):
            await broker.do(lambda service: service.register_queue_subscription(TOPIC, "s", "latest"))

        async def gone() -> bool:
            return await world.metadata() is None and await world.store.get(controller_path(TOPIC), fresh=True) is None

        await world.until(gone)
        assert not world.segments.topics

    simulate(main)


@pytest.mark.req("R468-74")
def test_a_topic_disappears_although_one_of_its_segments_cannot_be_deleted() -> None:
    """For everybody who uses it, at once: only its record stays, and whoever leads tries again. Nothing of it is left behind
    when the segment can be deleted at last."""

    async def main(world: World) -> None:
        broker, other = await topic_with(world, 3), await world.broker()
        controller = await broker.lead()
        await broker.do(lambda _service: controller.create_subscription("s"))
        is_broken = True

        def fail(name: str, segment: str) -> Exception | None:
            return NotReady("Not now.") if is_broken and name == "delete" and segment.endswith("-1") else None

        world.segments.fail = fail
        with pytest.raises(NotReady):
            await broker.do(lambda service: service.delete_topic(TOPIC))
        for leader in (broker, other):
            assert [name.rpartition("-")[2] for name in world.segments.topics] == ["1"]
            for asked in (broker, other):
                if asked is leader or leader is broker:
                    assert await asked.do(lambda service: service.topics(TOPIC.namespace, living=True)) == []
                    with pytest.raises(TopicNotFound, match="being deleted"):
                        await asked.do(lambda service: service.register_queue_subscription(TOPIC, "s", "latest"))
                    with pytest.raises(AlreadyExists, match="being deleted"):
                        await asked.do(lambda service: service.create_topic(TOPIC, 1))
            if leader is broker:
                broker.die()  # the next one goes on with it
                await asyncio.sleep(60)
        is_broken = False

        async def gone() -> bool:
            return await world.metadata() is None

        await world.until(gone)
        await asyncio.sleep(60)
        assert not world.segments.topics
        assert await world.store.get(controller_path(TOPIC), fresh=True) is None
        assert [key for key in world.engine.tables.rows if key.startswith("/topics/")] == []
        assert other.service.controllers() == []
        await other.do(lambda service: service.create_topic(TOPIC, 1))

    simulate(main)


def test_delete_without_force_spares_a_topic_in_use() -> None:
    async def main(world: World) -> None:
        broker = await topic_with(world, 2)
        world.segments.named(TOPIC, await world.layout(), 1).connected_producers = 1
        with pytest.raises(PreconditionFailed, match="1 producers and consumers"):
            await broker.do(lambda service: service.delete_topic(TOPIC))
        assert len(world.segments.topics) == 2
        await broker.do(lambda service: service.delete_topic(TOPIC, force=True))
        assert await world.metadata() is None

    simulate(main)


def test_delete_by_force_takes_the_place_of_an_operation_that_cannot_be_finished() -> None:
    async def main(world: World) -> None:
        broker = await topic_with(world, 2)
        world.segments.fail = lambda name, _segment: NotReady("Never.") if name == "terminate" else None
        with pytest.raises(NotReady):
            await split(broker, 0)
        assert len(world.segments.topics) == 4
        with pytest.raises(Conflict, match="split of segment 0"):
            await broker.do(lambda service: service.delete_topic(TOPIC))
        await broker.do(lambda service: service.delete_topic(TOPIC, force=True))
        assert await world.metadata() is None
        assert not world.segments.topics
        assert await world.store.get(controller_path(TOPIC), fresh=True) is None

    simulate(main)


@pytest.mark.inv("INV6", "INV14")
def test_delete_by_force_is_done_if_the_other_operation_is_finished_meanwhile() -> None:
    """Nobody tries to finish that one any more when the deletion comes into the record."""

    async def main(world: World) -> None:
        broker = await topic_with(world, 2)
        world.segments.fail = lambda name, _segment: NotReady("Later.") if name == "terminate" else None
        with pytest.raises(NotReady):
            await split(broker, 0)

        is_split: list[bool] = []

        async def is_finished() -> bool:
            found = await world.metadata()
            return found is None or found.pending_operation is None

        async def let_the_split_finish(name: str) -> None:
            if name == "delete:intend" and not is_split:
                is_split.append(True)
                world.segments.fail = lambda _name, _segment: None
                await world.until(is_finished)
                await asyncio.sleep(1)  # and give its turn back

        await steps_of(broker.do(lambda service: service.delete_topic(TOPIC, force=True)), let_the_split_finish)
        assert await world.metadata() is None
        assert not world.segments.topics

    simulate(main)


@pytest.mark.inv("INV6", "INV14")
def test_a_deletion_that_comes_into_the_record_late_is_done() -> None:
    """By force, in the place of an operation that was finished meanwhile; the answer of the store was an error."""

    async def main(world: World) -> None:
        await topic_with(world, 2)
        found = await world.until_settled()
        pending = PendingOperation(kind="delete", operation_id="late", started_ms=1)
        late = msgspec.structs.replace(found, pending_operation=pending)
        await world.store.put(topic_path(TOPIC), msgspec.json.encode(late))
        await world.until(lambda: _is_gone(world))
        assert not world.segments.topics

    simulate(main)


@pytest.mark.inv("INV6", "INV14")
@pytest.mark.parametrize("kind", ["create", "delete", "seek"])
def test_an_operation_on_a_subscription_that_comes_into_its_record_late_is_done(kind: Any) -> None:
    """W6, seed 1616539545: the store did not know whether it had taken the record, and took it seconds later."""

    async def main(world: World) -> None:
        broker = await topic_with(world, 2)
        metadata = await world.until_settled()
        if kind != "create":
            controller = await broker.lead()
            await broker.do(lambda _service: controller.create_subscription("s"))
        change = SubscriptionChange(kind=kind, operation_id="late", timestamp_ms=0, started_ms=1)
        late = SubscriptionMetadata(
            type="STREAM",
            initial="earliest",
            created_at_epoch=0,
            created_ms=1,
            pending=change,
            leader_epoch=metadata.leader_epoch,
            incarnation=metadata.incarnation,
        )
        key = subscription_path(TOPIC, "s")
        await world.store.put(key, msgspec.json.encode(late))

        async def is_done() -> bool:
            found = await world.store.get(key, fresh=True)
            return found is None or decode(SubscriptionMetadata, key, found.value).pending is None

        await world.until(is_done, patience=100.0)
        assert (await world.store.get(key, fresh=True) is None) == (kind == "delete")
        assert all(("s" in each.cursors) == (kind != "delete") for each in world.segments.topics.values())

    simulate(main)


def test_a_second_delete_is_told_of_the_first() -> None:
    async def main(world: World) -> None:
        broker = await topic_with(world, 2)
        until = asyncio.get_running_loop().time() + 5

        def fail(name: str, _segment: str) -> Exception | None:
            return NotReady("Later.") if name == "delete" and asyncio.get_running_loop().time() < until else None

        world.segments.fail = fail
        first = asyncio.ensure_future(broker.do(lambda service: service.delete_topic(TOPIC, force=True)))
        await asyncio.sleep(0.0005)  # not even in the record yet
        with pytest.raises(Conflict, match=r"orders is being deleted already; wait until it is gone"):
            await broker.do(lambda service: service.delete_topic(TOPIC, force=True))
        with pytest.raises(NotReady):
            await first
        for _attempt in range(3):
            with pytest.raises(Conflict, match=r"orders is being deleted already"):
                await broker.do(lambda service: service.delete_topic(TOPIC))
        await world.until(lambda: _is_gone(world))
        with pytest.raises(TopicNotFound):
            await broker.do(lambda service: service.delete_topic(TOPIC))

    simulate(main)


@pytest.mark.inv("INV5")
def test_a_topic_made_anew_under_a_split_is_not_touched() -> None:
    """Somebody removes the record and makes another topic of the name, which nobody has claimed yet."""

    async def main(world: World) -> None:
        broker = await topic_with(world, 2)
        found = await world.metadata()
        assert found is not None
        other = msgspec.json.encode(msgspec.structs.replace(found, incarnation="another", leader_epoch=0))

        async def replace_it(name: str) -> None:
            if name == "split:flip":
                await world.store.put(topic_path(TOPIC), other)

        with pytest.raises(TopicNotFound, match="made anew"):
            await steps_of(split(broker, 0), replace_it)
        await asyncio.sleep(5)
        after = await world.until_settled()
        assert (after.incarnation, after.epoch) == ("another", 0)

    simulate(main)


def test_nobody_campaigns_for_a_topic_that_is_gone() -> None:
    """L-05: the standbys see the leader's record go after the topic's own."""

    async def main(world: World) -> None:
        broker = await topic_with(world, 1)
        for _ in range(3):
            other = await world.broker()
            await other.do(lambda service: service.controller(TOPIC))
        seen: list[str] = []

        async def look() -> None:
            async with world.store.watch(controller_path(TOPIC)) as events:
                async for event in events:
                    seen.append(type(event).__name__)  # noqa: PERF401

        looking = asyncio.get_running_loop().create_task(look())
        await asyncio.sleep(1)
        await broker.do(lambda service: service.delete_topic(TOPIC))
        await asyncio.sleep(30)
        assert seen == ["Put", "Synced", "Delete"]
        looking.cancel()

    for seed in range(10):
        simulate(main, seed=seed)


@pytest.mark.inv("INV4")
def test_the_record_of_a_successor_is_not_deleted() -> None:
    """It has claimed the record at the last moment, and finishes the deletion itself."""

    async def main(world: World) -> None:
        broker = await topic_with(world, 1)
        claimed: list[ScalableTopicMetadata] = []

        async def claim(name: str, moment: Moment) -> None:
            if (name, moment) == ("delete:record", "before") and not claimed:
                found = await world.metadata()
                assert found is not None
                claimed.append(msgspec.structs.replace(found, leader_epoch=found.leader_epoch + 1000))
                await world.store.put(topic_path(TOPIC), msgspec.json.encode(claimed[0]))

        with watching(claim), pytest.raises(LedElsewhere):
            await broker.do(lambda service: service.delete_topic(TOPIC))
        assert [await world.metadata()] == claimed

    simulate(main)


@pytest.mark.inv("INV7")
def test_a_prune_of_another_layout_than_the_one_it_looked_at_is_refused() -> None:
    async def main(world: World) -> None:
        broker = await topic_with(world, 1)
        await split(broker, 0)

        async def change(name: str, moment: Moment) -> None:
            if (name, moment) == ("prune:flip", "before"):
                found = await world.metadata()
                assert found is not None
                await world.store.put(
                    topic_path(TOPIC), msgspec.json.encode(msgspec.structs.replace(found, epoch=found.epoch + 1))
                )

        with watching(change), pytest.raises(Conflict, match="changed from epoch 1 to 2"):
            await prune(broker)
        found = await world.metadata()
        assert found is not None and set(found.segments) == {0, 1, 2} and found.pending_operation is None
        assert len(world.segments.topics) == 3

    simulate(main)


@pytest.mark.inv("INV17")
def test_a_record_whose_removal_gets_no_answer_is_not_removed_without_a_pause() -> None:
    async def main(world: World) -> None:
        broker = await topic_with(world, 1)
        store: Any = broker.store
        delete, asked, is_away = store.delete, list[float](), True

        async def unanswered(key: str, **options: Any) -> Any:
            if key != topic_path(TOPIC) or not is_away:
                return await delete(key, **options)
            asked.append(world.runtime.clock.monotonic())
            await asyncio.sleep(0.01)
            raise OutcomeUnknown("no answer")

        store.delete = unanswered
        with pytest.raises(BraidError):
            await broker.do(lambda service: service.delete_topic(TOPIC))
        await asyncio.sleep(20)  # pauses grow
        asked.clear()
        await asyncio.sleep(60)
        assert len(asked) <= 20 * 60 / world.config.reconcile_seconds
        is_away = False
        await asyncio.sleep(10)
        assert await world.metadata() is None

    simulate(main)
