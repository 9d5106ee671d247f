"""What a leader repairs although nobody asks for it, and what it tells of what it did."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
import pytest
from tests.unit.scalable.fakes import (
    TOPIC,
    Broker,
    World,
    brokers_with_topic,
    controller_of,
    merge,
    prune,
    simulate,
    split,
    topic_with,
    until_led_by,
)

from braid.errors import (
    BraidError,
    ConsumerNotFound,
    KindConflict,
    LedgerLost,
    NotReady,
    OutcomeUnknown,
    PreconditionFailed,
    StoreUnavailable,
    SubscriptionNotFound,
)
from braid.metadata.api import ABSENT
from braid.model.segments import physical_name
from braid.scalable.api import ConsumerAssignment, ConsumerRegistration
from braid.scalable.config import ScalableConfig
from braid.scalable.records import (
    RangeRecord,
    RegistrationRecord,
    ScalableTopicMetadata,
    SubscriptionChange,
    SubscriptionMetadata,
    consumer_path,
    consumers_path,
    controller_path,
    decode,
    subscription_path,
    topic_path,
)

PRUNE = ScalableConfig().prune_seconds


class Told:
    """A consumer's connection."""

    def __init__(self) -> None:
        self.segments: set[int] = set()

    def push(self, assignment: ConsumerAssignment) -> None:
        self.segments = {each.segment_id for each in assignment.segments}

    def displaced(self) -> None:
        raise AssertionError("displaced")

    def ended(self, error: Exception) -> None:
        self.segments = set()


async def register(broker: Broker, subscription: str = "sub", consumer: str = "c") -> Told:
    controller, told = await broker.lead(), Told()
    told.push(
        await broker.do(
            lambda _service: controller.register_consumer(subscription, ConsumerRegistration(consumer, 1, told), "STREAM")
        )
    )
    return told


async def cursors(world: World) -> dict[int, list[str]]:
    """Of the active segments."""
    layout = await world.layout()
    return {number: sorted(world.segments.named(TOPIC, layout, number).cursors) for number in sorted(layout.active_segments)}


@pytest.mark.inv("INV6", "INV15")
@pytest.mark.parametrize("operation", ["split", "merge", "prune"])
def test_coordinators_learn_the_layout_although_the_answer_to_the_last_step_was_lost(operation: str) -> None:
    async def main(world: World) -> None:
        world.retention_minutes = 0 if operation == "prune" else -1
        broker = await topic_with(world, 2)
        told = await register(broker)
        if operation == "prune":
            await split(broker, 0)
            await world.until(_is_told(told, {1, 2, 3}))
        store: Any = broker.store
        put, get = store.put, store.get
        lost: list[str] = []

        async def put_without_answer(key: str, value: bytes, **options: Any) -> Any:
            made = await put(key, value, **options)
            is_record = key == topic_path(TOPIC) and not lost
            if is_record and decode(ScalableTopicMetadata, key, value).pending_operation is None:
                lost.append("put")
                raise OutcomeUnknown("The answer was lost.")
            return made

        async def unreadable_once(key: str, **options: Any) -> Any:
            if key == topic_path(TOPIC) and lost == ["put"]:
                lost.append("get")
                raise StoreUnavailable("No connection.")
            return await get(key, **options)

        store.put, store.get = put_without_answer, unreadable_once
        with pytest.raises(OutcomeUnknown):
            if operation == "split":
                await split(broker, 0)
            elif operation == "merge":
                await merge(broker, 0, 1)
            else:
                await prune(broker)
        assert lost == ["put", "get"]
        wanted = {"split": {1, 2, 3}, "merge": {2}, "prune": {1, 2, 3}}[operation]
        if operation != "prune":
            await world.until(_is_told(told, wanted))
        controller = await broker.lead()
        term = controller._term
        assert term is not None
        await world.until(_knows(term.coordinators["sub"], lambda: term.work.layout.epoch), patience=20)

    simulate(main)


def _is_told(told: Told, wanted: set[int]) -> Any:
    async def happened() -> bool:
        return told.segments == wanted

    return happened


def _knows(coordinator: Any, epoch: Any) -> Any:
    async def happened() -> bool:
        return bool(coordinator._layout.epoch == epoch())

    return happened


@pytest.mark.inv("INV7")
def test_a_queue_subscription_whose_record_came_after_the_split_looked_is_on_the_children() -> None:
    async def main(world: World) -> None:
        world.retention_minutes = -1
        leader, other = await brokers_with_topic(world, 2, segments=1)
        store: Any = other.store
        put, reached, go = store.put, asyncio.Event(), asyncio.Event()

        async def held_up(key: str, value: bytes, **options: Any) -> Any:
            if key == subscription_path(TOPIC, "workers"):
                reached.set()
                await go.wait()
            return await put(key, value, **options)

        store.put = held_up
        attach = asyncio.ensure_future(
            other.do(lambda service: service.register_queue_subscription(TOPIC, "workers", "latest"))
        )
        await reached.wait()
        await split(leader, 0)
        for number in (1, 2):
            world.segments.named(TOPIC, await world.layout(), number).messages = 3
        go.set()
        record = await attach
        assert record.created_at_epoch == 0
        assert await cursors(world) == {1: ["workers"], 2: ["workers"]}
        for number in (1, 2):  # younger than the subscription, so from the beginning
            assert world.segments.named(TOPIC, await world.layout(), number).cursors["workers"] == 0

    simulate(main)


@pytest.mark.inv("INV7", "INV15")
def test_missing_cursors_are_made_with_the_next_look() -> None:
    async def main(world: World) -> None:
        world.retention_minutes = -1
        broker = await topic_with(world, 1)
        controller = await broker.lead()
        await broker.do(lambda _service: controller.create_subscription("stream"))
        await broker.do(lambda _service: controller.create_subscription("marks", "CHECKPOINT"))
        await broker.do(lambda service: service.register_queue_subscription(TOPIC, "new", "latest"))
        await split(broker, 0)
        for number in (1, 2):
            topic = world.segments.named(TOPIC, await world.layout(), number)
            topic.messages = 3
            topic.cursors.clear()
        await asyncio.sleep(PRUNE + 1)
        assert await cursors(world) == {1: ["new", "stream"], 2: ["new", "stream"]}
        assert world.segments.named(TOPIC, await world.layout(), 1).cursors == {"stream": 0, "new": 0}

    simulate(main)


@pytest.mark.inv("INV7")
def test_a_missing_active_segment_is_made_anew_with_all_cursors_while_the_leader_leads() -> None:
    async def main(world: World) -> None:
        broker = await topic_with(world, 2)
        controller = await broker.lead()
        await broker.do(lambda _service: controller.create_subscription("sub"))
        await asyncio.sleep(1)
        del world.segments.topics[str(physical_name(TOPIC, controller.layout.segment(1)))]
        await asyncio.sleep(PRUNE + 1)
        assert await cursors(world) == {0: ["sub"], 1: ["sub"]}

    simulate(main)


@pytest.mark.inv("INV6")
@pytest.mark.parametrize("has_new_leader", [False, True])
def test_an_active_segment_that_was_terminated_is_replaced(has_new_leader: bool) -> None:
    async def main(world: World) -> None:
        world.retention_minutes = -1
        first, second = await brokers_with_topic(world, 2, segments=2)
        told = None if has_new_leader else await register(first)
        await asyncio.sleep(1)
        world.segments.named(TOPIC, await world.layout(), 1).is_sealed = True
        if has_new_leader:
            first.die()
            await until_led_by(world, second)
            await asyncio.sleep(5)
        else:
            await asyncio.sleep(PRUNE + 1)
        layout = await world.layout()
        layout.check()
        assert sorted(layout.active_segments) == [0, 2, 3]
        assert all(not world.segments.named(TOPIC, layout, number).is_sealed for number in layout.active_segments)
        if told is not None:
            await world.until(_is_told(told, {0, 2, 3}))

    simulate(main, config=ScalableConfig(max_segments_per_topic=3))  # the repair is not held up by the limit


@pytest.mark.parametrize("at", [0, 1])
def test_a_terminated_segment_of_one_hash_is_joined_with_a_neighbour(at: int) -> None:
    async def main(world: World) -> None:
        world.retention_minutes = -1
        broker = await topic_with(world, 1)
        number = 0
        for _ in range(16):  # halves of halves, on one side
            await split(broker, number)
            number = (await world.layout()).segment(number).child_ids[at]
        assert (await world.layout()).segment(number).hash_range.size == 1
        world.segments.named(TOPIC, await world.layout(), number).is_sealed = True
        await asyncio.sleep(PRUNE + 1)
        layout = await world.layout()
        layout.check()
        child = layout.segment(layout.segment(number).child_ids[0])
        assert child.hash_range.size == 2
        assert number in child.parent_ids

    simulate(main)


# Cursors and records that belong to nobody.


@pytest.mark.inv("INV5")
def test_the_cursor_of_a_deleted_subscription_goes_and_is_not_handed_on() -> None:
    async def main(world: World) -> None:
        broker = await topic_with(world, 2)
        controller = await broker.lead()
        await broker.do(lambda _service: controller.create_subscription("sub"))
        await asyncio.sleep(1)
        for number in (0, 1):  # an owner finished a late call
            world.segments.named(TOPIC, await world.layout(), number).cursors["gone"] = 0
            world.segments.named(TOPIC, await world.layout(), number).messages = 1
        world.segments.named(TOPIC, await world.layout(), 0).cursors["sub"] = 1
        await asyncio.sleep(PRUNE)
        assert await cursors(world) == {0: ["gone", "sub"], 1: ["gone", "sub"]}  # seen once: it could be a mistake
        await split(broker, 0)
        assert await cursors(world) == {1: ["gone", "sub"], 2: ["sub"], 3: ["sub"]}
        await asyncio.sleep(2 * PRUNE + 1)
        assert await cursors(world) == {1: ["sub"], 2: ["sub"], 3: ["sub"]}
        assert 0 not in (await world.layout()).all_segments  # it held up its removal no longer

    simulate(main)


@pytest.mark.inv("INV5")
def test_a_subscription_record_of_an_earlier_topic_is_nobodys() -> None:
    async def main(world: World) -> None:
        broker = await topic_with(world, 1)
        leftover = SubscriptionMetadata(type="QUEUE", incarnation="of the topic before")
        key = subscription_path(TOPIC, "old")
        await world.store.put(key, msgspec.json.encode(leftover), expected=ABSENT)
        controller = await broker.lead()
        assert (await broker.do(lambda _service: controller.stats()))["subscriptions"] == {}
        await split(broker, 0)
        assert await cursors(world) == {1: [], 2: []}
        with pytest.raises(SubscriptionNotFound):
            await broker.do(lambda _service: controller.seek("old", 0))
        await world.store.put(key, msgspec.json.encode(leftover))
        made = await broker.do(lambda service: service.register_queue_subscription(TOPIC, "old", "latest"))
        assert (made.incarnation, made.initial) == (controller.incarnation, "latest")
        await world.store.put(subscription_path(TOPIC, "other"), msgspec.json.encode(leftover), expected=ABSENT)
        await asyncio.sleep(PRUNE + 1)
        assert [each.name for each in await world.records(f"{topic_path(TOPIC)}/subscriptions")] == ["old"]

    simulate(main)


@pytest.mark.inv("INV5")
def test_a_registration_that_was_left_behind_takes_no_segments() -> None:
    async def main(world: World) -> None:
        first, second = await brokers_with_topic(world, 2, segments=2)
        ghost = RegistrationRecord(epoch=0, segments=(0, 1), mark="of the topic before:1", leader_epoch=1)
        await world.store.put(consumer_path(TOPIC, "sub", "ghost"), msgspec.json.encode(ghost), expected=ABSENT)
        told = await register(first)
        assert told.segments == {0, 1}
        stored = {each.name: each for each in await world.records(consumers_path(TOPIC, "sub"))}
        assert list(stored) == ["c"]
        mine = decode(RegistrationRecord, "c", stored["c"].value)
        found = await world.metadata()
        assert found is not None
        assert mine.mark.startswith(found.incarnation)
        first.die()
        await until_led_by(world, second)  # the mark is the same for the next leader
        controller = await controller_of(second)
        assert (await second.do(lambda _service: controller.stats()))["subscriptions"]["sub"]["consumerCount"] == 1

    simulate(main)


@pytest.mark.inv("INV5")
@pytest.mark.parametrize("what", ["subscription", "topic"])
@pytest.mark.parametrize(
    ("write", "delay"),  # the registration, then what is assigned to it; within the patience of the deletion, and beyond it
    [(0, 1.0), (0, 30.0), (1, 1.0)],
)
def test_a_registration_being_written_at_a_deletion_leaves_nothing(what: str, write: int, delay: float) -> None:
    async def main(world: World) -> None:
        broker = await topic_with(world, 1)
        controller = await broker.lead()
        await broker.do(lambda _service: controller.create_subscription("sub"))
        store: Any = broker.store
        put = store.put

        async def slow(key: str, value: bytes, **options: Any) -> Any:
            if key == consumer_path(TOPIC, "sub", "c"):
                await asyncio.sleep(delay)
            return await put(key, value, **options)

        store.put = slow
        joining = asyncio.ensure_future(register(broker))
        await asyncio.sleep((write + 0.5) * delay)
        if what == "topic":
            await broker.do(lambda service: service.delete_topic(TOPIC, force=True))
        else:
            await broker.do(lambda _service: controller.delete_subscription("sub"))
        with pytest.raises(BraidError):
            await joining
        assert await world.records(consumers_path(TOPIC, "sub")) == []

    simulate(main)


@pytest.mark.inv("INV7")
def test_a_record_that_is_not_understood_stops_nothing_and_loses_nothing() -> None:
    async def main(world: World) -> None:
        first, second = await brokers_with_topic(world, 2, segments=1)
        controller = await first.lead()
        await first.do(lambda _service: controller.create_subscription("future"))
        await first.do(lambda _service: controller.create_subscription("sub"))
        world.segments.named(TOPIC, await world.layout(), 0).messages = 1
        world.segments.named(TOPIC, await world.layout(), 0).cursors["sub"] = 1
        await world.store.put(subscription_path(TOPIC, "future"), b'{"type":"STREAM-2"}')
        first.die()
        await until_led_by(world, second)
        told = await register(second)
        assert told.segments == {0}
        await split(second, 0)
        assert await cursors(world) == {1: ["future", "sub"], 2: ["future", "sub"]}
        world.segments.named(TOPIC, await world.layout(), 1).cursors.pop("future")
        await asyncio.sleep(PRUNE + 1)
        assert await cursors(world) == {1: ["future", "sub"], 2: ["future", "sub"]}
        assert await prune(second) == []
        controller = await controller_of(second)
        shown = (await second.do(lambda _service: controller.stats()))["subscriptions"]["future"]
        assert (shown["type"], shown["backlog"]) == ("UNKNOWN", 1)
        await second.do(lambda _service: controller.delete_subscription("future"))
        assert await cursors(world) == {1: ["sub"], 2: ["sub"]}
        await world.store.put(subscription_path(TOPIC, "another"), b"[]", expected=ABSENT)
        await second.do(lambda service: service.delete_topic(TOPIC, force=True))
        assert await world.records(f"{topic_path(TOPIC)}/subscriptions") == []

    simulate(main)


# Readers, adoption, statistics, the log.


def test_a_segment_is_not_removed_while_a_reader_is_in_the_middle_of_it() -> None:
    async def main(world: World) -> None:
        broker = await topic_with(world, 1)
        world.segments.named(TOPIC, await world.layout(), 0).readers = 1
        await split(broker, 0)
        assert await prune(broker) == []
        world.segments.named(TOPIC, await world.layout(), 0).readers = 0
        assert await prune(broker) == [0]

    simulate(main)


@pytest.mark.inv("INV6")
def test_what_was_begun_is_finished_although_nobody_owns_the_topics_bundle() -> None:
    async def main(world: World) -> None:
        first, second = await world.broker(), await world.broker()
        await world.broker()
        await first.do(lambda service: service.create_topic(TOPIC, 2))
        controller = await first.lead()

        async def die(operation: str, _segment: str) -> None:
            if operation == "delete":
                world.segments.before = None
                await first.crash_here()

        world.segments.before = die
        with pytest.raises(Exception, match=first.id):
            await first.do(lambda _service: controller.delete())
        await world.until(lambda: _gone(world), patience=120)  # its bundle is still said to be the dead one's
        assert world.segments.topics == {}
        assert not second.node.is_dead

    simulate(main)


async def _gone(world: World) -> bool:
    return await world.metadata() is None and await world.store.get(controller_path(TOPIC), fresh=True) is None


def test_a_queue_subscription_that_nobody_consumes_says_so() -> None:
    async def main(world: World) -> None:
        broker = await topic_with(world, 1)
        controller = await broker.lead()
        await broker.do(lambda service: service.register_queue_subscription(TOPIC, "workers", "earliest"))

        async def shown() -> Any:
            return (await broker.do(lambda _service: controller.stats()))["subscriptions"]["workers"]["blocked_by"]

        assert await shown() == []  # nothing to do
        topic = world.segments.named(TOPIC, controller.layout, 0)
        topic.messages = 3
        assert [each["kind"] for each in await shown()] == ["no-consumer"]
        topic.attached["workers"] = ("w",)
        assert await shown() == []

    simulate(main)


@pytest.mark.inv("INV5")
def test_a_standby_shows_the_layout_of_the_topic_made_anew() -> None:
    async def main(world: World) -> None:
        first, second = await brokers_with_topic(world, 2, segments=2)
        controller = await controller_of(second)
        assert len(controller.layout.active_segments) == 2
        found = await world.metadata()
        assert found is not None
        whole = msgspec.structs.replace(found.segments[0], hash_range=RangeRecord(0, 0xFFFF))
        other = msgspec.structs.replace(found, segments={0: whole}, incarnation="another", leader_epoch=0)
        await world.store.put(topic_path(TOPIC), msgspec.json.encode(other))
        await asyncio.sleep(1)
        assert not second.service.controllers() or not controller.is_leading
        assert len(controller.layout.active_segments) == 1
        assert first.id

    simulate(main)


def test_the_log_has_one_line_for_each_operation(caplog: pytest.LogCaptureFixture) -> None:
    async def main(world: World) -> None:
        broker = await topic_with(world, 2)
        controller = await broker.lead()
        await broker.do(lambda _service: controller.create_subscription("sub"))
        await broker.do(lambda _service: controller.create_subscription("sub"))  # there already
        await split(broker, 0)
        await merge(broker, 2, 3)
        await broker.do(lambda _service: controller.seek("sub", 5))
        await broker.do(lambda _service: controller.clear_backlog("sub"))
        await broker.do(lambda _service: controller.delete_subscription("sub"))
        await prune(broker)
        await asyncio.sleep(3 * PRUNE)  # looks that find nothing are not worth a line
        deletions = [broker.do(lambda service: service.delete_topic(TOPIC)) for _ in range(2)]
        answers = await asyncio.gather(*deletions, return_exceptions=True)
        assert sorted(type(each).__name__ for each in answers) == ["Conflict", "NoneType"]

    with caplog.at_level(logging.INFO, logger="braid.scalable"):
        simulate(main)
    lines = [each.getMessage() for each in caplog.records if each.levelno >= logging.INFO]
    said = [line.split(str(TOPIC))[0] + line.split(str(TOPIC))[1].partition(": done")[0] for line in lines]
    assert said == [
        "create of ",
        "creation of subscription sub of  (STREAM, earliest)",
        "split of segment 0 of  into 2, 3 (epoch 1)",
        "merge of segments 2 and 3 of  into 4 (epoch 2)",
        "seek of subscription sub of  to 5",
        "clear-backlog of subscription sub of ",
        "deletion of subscription sub of ",
        "prune of , segments 0, 2, 3 removed",
        "deletion of  with 2 segments",
    ]
    assert all(" ms" in line for line in lines)


def test_refusals_say_what_to_do() -> None:
    async def main(world: World) -> None:
        broker = await topic_with(world, 2)
        controller = await broker.lead()
        with pytest.raises(PreconditionFailed, match=r"2 are allowed\. Raise scalable_topics\.max_segments_per_topic\."):
            await split(broker, 0)
        with pytest.raises(SubscriptionNotFound) as caught:
            await broker.do(lambda _service: controller.delete_subscription("nobody"))
        assert "create it first" not in str(caught.value)
        await broker.do(lambda service: service.register_queue_subscription(TOPIC, "workers", "latest"))
        with pytest.raises(KindConflict, match="is one of QUEUE consumers; a STREAM consumer needs one of its own"):
            await register(broker, "workers")
        world.segments.fail = lambda name, _segment: NotReady("Later.") if name == "delete" else None
        with pytest.raises(NotReady):
            await broker.do(lambda service: service.delete_topic(TOPIC))
        with pytest.raises(Exception, match=r"is being deleted; it can be made again when that is done"):
            await broker.do(lambda service: service.register_queue_subscription(TOPIC, "late", "latest"))

    simulate(main, config=ScalableConfig(max_segments_per_topic=2))


NONSENSE = [b'{"segments":"x"}', b"[]", b"{", b'{"epoch":1e99}', b"\xff\x00", b'{"segments":[0,"1"]}', b'{"mark":7}']


@pytest.mark.inv("INV15")
@pytest.mark.parametrize("value", NONSENSE)
def test_a_registration_that_cannot_be_read_costs_nobody_else_anything(value: bytes) -> None:
    async def main(world: World) -> None:
        first, second = await brokers_with_topic(world, 2, segments=1)
        await register(first)
        odd = consumer_path(TOPIC, "sub", "odd")
        await world.store.put(odd, value, expected=ABSENT)
        first.die()
        await until_led_by(world, second)
        told = await register(second)
        assert told.segments == {0}
        await split(second, 0)
        controller = await controller_of(second)
        stats = (await second.do(lambda _service: controller.stats()))["subscriptions"]["sub"]
        [held_up] = [each for each in stats["blocked_by"] if each["kind"] == "unreadable-record"]
        assert held_up["detail"]["consumer"] == "odd"
        assert odd in held_up["detail"]["error"]
        with pytest.raises(PreconditionFailed, match="connected"):
            await second.do(lambda _service: controller.remove_consumer("sub", "c"))
        await second.do(lambda _service: controller.remove_consumer("sub", "odd"))
        assert [each.name for each in await world.records(consumers_path(TOPIC, "sub"))] == ["c"]
        stats = (await second.do(lambda _service: controller.stats()))["subscriptions"]["sub"]
        assert "unreadable-record" not in {each["kind"] for each in stats["blocked_by"]}
        with pytest.raises(ConsumerNotFound, match="odd"):
            await second.do(lambda _service: controller.remove_consumer("sub", "odd"))
        with pytest.raises(SubscriptionNotFound, match="other"):
            await second.do(lambda _service: controller.remove_consumer("other", "odd"))

    simulate(main)


def test_the_consumer_of_a_record_that_cannot_be_read_registers_anew() -> None:
    async def main(world: World) -> None:
        first, second = await brokers_with_topic(world, 2, segments=2)
        await register(first)
        await register(first, consumer="odd")
        odd = consumer_path(TOPIC, "sub", "odd")
        await world.store.put(odd, b'{"segments":"x"}')
        first.die()
        await until_led_by(world, second)
        assert (await register(second)).segments == {0, 1}
        assert len((await register(second, consumer="odd")).segments) == 1
        controller = await controller_of(second)
        stats = (await second.do(lambda _service: controller.stats()))["subscriptions"]["sub"]
        assert stats["blocked_by"] == []
        record = await world.store.get(odd, fresh=True)
        assert record is not None
        assert len(decode(RegistrationRecord, odd, record.value).segments) == 1
        # Spoilt while it leads: what the leader knows is written again with the next change.
        await world.store.put(odd, b"[]")
        await split(second, 0)
        await split(second, 1)
        await asyncio.sleep(60)
        record = await world.store.get(odd, fresh=True)
        assert record is not None
        assert set(decode(RegistrationRecord, odd, record.value).segments) <= {1, 3, 4, 5, 2}
        await world.store.put(odd, b"[]")
        await second.do(lambda _service: controller.delete_subscription("sub"))
        assert await world.records(f"{topic_path(TOPIC)}/subscriptions") == []
        assert await world.records(consumers_path(TOPIC, "sub")) == []

    simulate(main)


@pytest.mark.inv("INV8")
@pytest.mark.parametrize("has_coordinator", [True, False])
def test_a_seek_removes_what_cannot_be_read(has_coordinator: bool) -> None:
    """Repaired afterwards, or read by a newer version, it would prove that what it assigned may be read."""

    async def main(world: World) -> None:
        first, second = await brokers_with_topic(world, 2, segments=1)
        await register(first)
        odd = consumer_path(TOPIC, "sub", "odd")
        if has_coordinator:
            await world.store.put(odd, b"[]", expected=ABSENT)
            first.die()
            await until_led_by(world, second)
            controller = await controller_of(second)
            await second.do(lambda _service: controller.seek("sub", 0))
        else:
            key = subscription_path(TOPIC, "sub")
            record = await world.store.get(key, fresh=True)
            assert record is not None
            change = SubscriptionChange(kind="seek", operation_id="interrupted")
            found = msgspec.structs.replace(decode(SubscriptionMetadata, key, record.value), pending=change)
            first.die()
            await world.store.put(key, msgspec.json.encode(found))
            await world.store.put(odd, b"[]", expected=ABSENT)
            await until_led_by(world, second)
        assert [each.name for each in await world.records(consumers_path(TOPIC, "sub"))] == ["c"]

    simulate(main)


@pytest.mark.inv("INV17")
def test_a_group_without_members_ends_although_nobody_asks_for_anything() -> None:
    async def main(world: World) -> None:
        broker, told = await topic_with(world, 1), Told()
        controller = await broker.lead()
        registration = ConsumerRegistration("c", 1, told)
        await broker.do(lambda _service: controller.register_consumer("g", registration, "CHECKPOINT"))
        await broker.do(lambda _service: controller.unregister_consumer("g", "c", told))
        await asyncio.sleep(4 * PRUNE)
        assert [each.name for each in await world.records(f"{topic_path(TOPIC)}/subscriptions")] == ["g"]
        await asyncio.sleep(3 * PRUNE)
        assert await world.records(f"{topic_path(TOPIC)}/subscriptions") == []

    simulate(main, config=ScalableConfig(group_grace_seconds=5 * PRUNE, idle_seconds=0))


@pytest.mark.inv("INV16")
def test_a_segment_that_is_refused_keeps_no_other_from_being_repaired() -> None:
    async def main(world: World) -> None:
        await topic_with(world, 3)
        layout = await world.layout()
        lost = str(physical_name(TOPIC, layout.segment(0)))
        world.segments.fail = lambda _operation, segment: LedgerLost("Ledger 7.") if segment == lost else None
        world.segments.named(TOPIC, layout, 1).is_sealed = True
        del world.segments.topics[str(physical_name(TOPIC, layout.segment(2)))]

        async def is_repaired() -> bool:
            now = await world.layout()
            return set(now.active_segments) == {0, 2, 3, 4} and len(world.segments.topics) >= 4

        await world.until(is_repaired, PRUNE * 3)

    simulate(main)
