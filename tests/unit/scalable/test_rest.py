"""Topics at rest: a controller that nobody needs lets go of its topic, and the next use makes a new one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import pytest
from tests.unit.scalable.fakes import (
    TOPIC,
    Broker,
    FakeTopic,
    World,
    brokers_with_topic,
    controller_of,
    prune,
    simulate,
    split,
    topic_with,
)

from braid.errors import BraidError, NotReady, StoreUnavailable
from braid.scalable.api import ConsumerAssignment, ConsumerRegistration
from braid.scalable.config import ScalableConfig
from braid.scalable.records import SubscriptionChange, SubscriptionMetadata, controller_path, decode, subscription_path

IDLE = ScalableConfig().idle_seconds
LOOK = ScalableConfig().prune_seconds
LONG = IDLE + 2 * LOOK
ADOPTED = 3 * ScalableConfig().adopt_seconds


class Attached:
    """A consumer's connection."""

    def push(self, assignment: ConsumerAssignment) -> None: ...
    def displaced(self) -> None: ...
    def ended(self, error: BraidError) -> None: ...


async def is_led(world: World) -> bool:
    return await world.store.get(controller_path(TOPIC), fresh=True) is not None


async def at_rest(world: World) -> Broker:
    broker = await topic_with(world, 2)
    await asyncio.sleep(LONG)
    assert not await is_led(world)
    return broker


@pytest.mark.inv("INV17")
def test_a_topic_that_nobody_uses_is_let_go_and_stays_so() -> None:
    async def main(world: World) -> None:
        broker = await topic_with(world, 2)
        other = await world.broker()
        await asyncio.sleep(IDLE - LOOK)
        assert await is_led(world)
        await asyncio.sleep(3 * LOOK)
        for _ in range(3):
            assert not await is_led(world)
            assert broker.service.controllers() == other.service.controllers() == []
            await asyncio.sleep(ADOPTED)
        found = await world.metadata()
        assert found is not None
        assert found.is_at_rest

    simulate(main)


def test_the_next_use_finds_a_leader_that_does_everything() -> None:
    async def main(world: World) -> None:
        broker = await topic_with(world, 2)
        await broker.do(lambda service: service.register_queue_subscription(TOPIC, "q", "earliest"))
        controller = await broker.lead()
        await broker.do(lambda _service: controller.create_subscription("s"))
        await asyncio.sleep(LONG)
        assert broker.service.controllers() == []
        await split(broker, 0)
        assert await is_led(world)
        found = await world.metadata()
        assert found is not None
        assert not found.is_at_rest
        assert set(found.layout.active_segments) == {1, 2, 3}
        assert all(set(each.cursors) == {"s", "q"} for each in world.segments.topics.values())
        await broker.do(lambda service: service.delete_topic(TOPIC))
        assert await world.metadata() is None
        await broker.do(lambda service: service.create_topic(TOPIC, 1))
        assert await is_led(world)

    simulate(main)


def test_each_call_keeps_it_for_another_while() -> None:
    async def main(world: World) -> None:
        broker = await topic_with(world, 1)
        for _ in range(4):
            await asyncio.sleep(IDLE - 1)
            assert await is_led(world)
            await broker.lead()
        await asyncio.sleep(LONG)
        assert not await is_led(world)

    simulate(main)


def test_a_standby_takes_its_turn_and_lets_go_too() -> None:
    async def main(world: World) -> None:
        await brokers_with_topic(world, 3)
        for broker in world.brokers:
            await controller_of(broker)
        await asyncio.sleep(4 * LONG)
        assert not await is_led(world)
        assert [broker.service.controllers() for broker in world.brokers] == [[], [], []]

    simulate(main)


def test_zero_keeps_it_for_ever() -> None:
    async def main(world: World) -> None:
        broker = await topic_with(world, 1)
        await asyncio.sleep(10 * IDLE)
        assert [each.is_leading for each in broker.service.controllers()] == [True]

    simulate(main, config=ScalableConfig(idle_seconds=0))


# What is needed is kept.


@pytest.mark.parametrize(
    "use",
    [
        lambda topic: setattr(topic, "connected_producers", 1),
        lambda topic: setattr(topic, "readers", 1),
        lambda topic: topic.attached.update(s=("c",)),
    ],
    ids=["producer", "reader", "consumer"],
)
def test_a_topic_with_clients_keeps_its_leader(use: Callable[[FakeTopic], None]) -> None:
    async def main(world: World) -> None:
        broker = await topic_with(world, 2)
        controller = await broker.lead()
        await broker.do(lambda _service: controller.create_subscription("s"))
        use(world.segments.named(TOPIC, await world.layout(), 1))
        await asyncio.sleep(3 * LONG)
        assert controller.is_leading

    simulate(main)


def test_a_registered_consumer_keeps_it_also_while_it_is_away() -> None:
    async def main(world: World) -> None:
        broker = await topic_with(world, 2)
        controller, handle = await broker.lead(), Attached()
        await broker.do(lambda _service: controller.register_consumer("s", ConsumerRegistration("c", 1, handle), "STREAM"))
        await asyncio.sleep(LONG)
        assert controller.is_leading
        await broker.do(lambda _service: _lost(controller, handle))
        await asyncio.sleep(LOOK - 5)
        assert controller.is_leading
        await asyncio.sleep(ScalableConfig().consumer_grace_seconds + LOOK)
        assert not await is_led(world)

    async def _lost(controller: object, handle: Attached) -> None:
        controller.consumer_disconnected("s", "c", handle)  # type: ignore[attr-defined]

    simulate(main)


def test_a_sealed_segment_keeps_it_until_it_is_removed() -> None:
    async def main(world: World) -> None:
        world.retention_minutes = 10_000
        broker = await topic_with(world, 1)
        await split(broker, 0)
        await asyncio.sleep(2 * LONG)
        assert await is_led(world)
        world.retention_minutes = 0
        assert await prune(broker) == [0]
        await asyncio.sleep(LONG)
        assert not await is_led(world)

    simulate(main)


def test_a_segment_that_cannot_be_asked_keeps_it() -> None:
    async def main(world: World) -> None:
        await topic_with(world, 2)
        world.segments.fail = lambda operation, _segment: StoreUnavailable("away") if operation == "stats" else None
        await asyncio.sleep(2 * LONG)
        assert await is_led(world)
        world.segments.fail = lambda _operation, _segment: None
        await asyncio.sleep(2 * LOOK)
        assert not await is_led(world)

    simulate(main)


def test_an_operation_under_way_keeps_it() -> None:
    async def main(world: World) -> None:
        broker = await topic_with(world, 2)
        controller = await broker.lead()
        held = asyncio.Event()

        async def hold(operation: str, _segment: str) -> None:
            if operation == "create_subscription":
                await held.wait()

        world.segments.before = hold
        making = asyncio.ensure_future(broker.do(lambda _service: controller.create_subscription("s")))
        await asyncio.sleep(2 * LONG)
        assert controller.is_leading
        held.set()
        await making

    simulate(main)


# What others would have to finish.


@pytest.mark.inv("INV6")
def test_what_a_leader_begins_after_a_rest_is_finished_by_the_next() -> None:
    """The word of an earlier leader that nothing is to be done counts for nothing any more."""

    async def main(world: World) -> None:
        broker = await at_rest(world)
        other = await world.broker()
        controller = await broker.lead()
        await broker.do(lambda _service: controller.create_subscription("s"))
        key = subscription_path(TOPIC, "s")
        record = await world.store.get(key, fresh=True)
        assert record is not None
        pending = SubscriptionChange(kind="seek", operation_id="x", timestamp_ms=1)
        value = msgspec.structs.replace(decode(SubscriptionMetadata, key, record.value), pending=pending)
        broker.die()  # in the middle of a seek, of which the topic's own record says nothing
        await world.store.put(key, msgspec.json.encode(value), expected=record.version)

        async def is_finished() -> bool:
            found = await world.store.get(key, fresh=True)
            return found is not None and decode(SubscriptionMetadata, key, found.value).pending is None

        await world.until(is_finished, patience=10 + ADOPTED)
        assert [each.is_leading for each in other.service.controllers()] == [True]

    simulate(main)


def test_a_leader_that_cannot_say_so_is_followed_by_another() -> None:
    async def main(world: World) -> None:
        broker = await topic_with(world, 1)
        other = await world.broker()
        put = broker.store.put

        async def fail(key: str, value: bytes, **options: object) -> object:
            if b"restedEpoch" in value:
                raise StoreUnavailable("away")
            return await put(key, value, **options)  # type: ignore[arg-type]

        broker.store.put = fail  # type: ignore[method-assign,assignment]
        await asyncio.sleep(LONG + ADOPTED)
        assert await is_led(world)
        assert [*broker.service.controllers(), *other.service.controllers()]

    simulate(main)


@pytest.mark.inv("INV7")
def test_a_new_subscription_of_a_topic_at_rest_gets_its_cursors_from_a_leader() -> None:
    """Also where an owner did not answer, and the consumer that asked for it never comes back."""

    async def main(world: World) -> None:
        broker = await at_rest(world)
        refusals = [StoreUnavailable("The owner is away for a moment.")]
        world.segments.fail = lambda call, _segment: refusals.pop() if call == "create_subscription" and refusals else None
        await broker.do(lambda service: service.register_queue_subscription(TOPIC, "q", "latest"))
        assert not refusals
        await asyncio.sleep(2 * LOOK)
        assert [sorted(topic.cursors) for topic in world.segments.topics.values()] == [["q"], ["q"]]

    simulate(main)


def test_a_missing_cursor_that_cannot_be_made_yet_keeps_it() -> None:
    async def main(world: World) -> None:
        broker = await topic_with(world, 2)
        is_refused = True
        world.segments.fail = lambda name, segment: (
            NotReady("not now") if is_refused and name == "create_subscription" and segment.endswith("-1") else None
        )
        await broker.do(lambda service: service.register_queue_subscription(TOPIC, "queue", "latest"))
        await asyncio.sleep(LONG)
        assert await is_led(world)  # or nobody would make it
        is_refused = False
        await asyncio.sleep(2 * LOOK)
        layout = await world.layout()
        assert [list(world.segments.named(TOPIC, layout, number).cursors) for number in (0, 1)] == [["queue"], ["queue"]]
        await asyncio.sleep(LONG)
        assert not await is_led(world)

    simulate(main)


@pytest.mark.inv("INV17")
def test_nothing_is_remembered_of_segments_that_are_gone() -> None:
    """A stray cursor on one of them, seen once, would keep the topic from its rest for ever."""

    async def main(world: World) -> None:
        broker = await topic_with(world, 2)
        world.retention_minutes = 5
        await split(broker, 0)
        gone = world.segments.named(TOPIC, await world.layout(), 0)
        world.retention_minutes = 0
        world.segments.fail = lambda name, _segment: NotReady("not now") if name == "delete_subscription" else None
        gone.cursors["stray"] = 0
        assert await prune(broker) == []
        for name, each in list(world.segments.topics.items()):
            if each is gone:
                del world.segments.topics[name]
        assert await prune(broker) == [0]
        term = (await controller_of(broker))._term
        assert term is not None and term.work.strays.keys() <= {1, 2, 3}
        await asyncio.sleep(LONG)
        assert not await is_led(world)

    simulate(main)
