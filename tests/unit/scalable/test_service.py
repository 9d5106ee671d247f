"""What a broker does for scalable topics without leading them: create, read, list, register queue subscriptions, adopt."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from tests.unit.scalable.fakes import TOPIC, BrokerDied, World, simulate, steps_of

from braid.errors import (
    AlreadyExists,
    InvalidArgument,
    InvalidTopicName,
    LedElsewhere,
    NotReady,
    SubscriptionLimit,
    SubscriptionNotFound,
    TopicNotFound,
)
from braid.model.names import NamespaceName, TopicName
from braid.model.routing import Routing
from braid.model.segments import physical_name
from braid.runtime.plans import Moment, watching
from braid.scalable.config import ScalableConfig
from braid.scalable.records import SubscriptionMetadata, controller_path, subscription_path, topic_path
from braid.testing.sim.loop import NODE

NAMESPACE = NamespaceName.parse("public/default")


@pytest.mark.req("R468-10", "R468-35")
def test_create_and_the_record_it_makes() -> None:
    async def main(world: World) -> None:
        broker = await world.broker()
        await broker.do(lambda service: service.create_topic(TOPIC, 2, properties={"a": "b"}, routing=Routing.LOW16))
        record = await world.store.get("/topics/public/default/orders", fresh=True)
        assert record is not None
        raw = msgspec.json.decode(record.value)
        assert raw["epoch"] == 0
        assert raw["nextSegmentId"] == 2
        assert raw["properties"] == {"a": "b"}
        assert raw["routing"] == "low16"
        assert len(raw["incarnation"]) == 32
        assert not {"pendingOperation", "autoScalePolicy", "migratedFrom"} & raw.keys()
        await broker.do(lambda service: service.create_topic(TopicName.parse("topic://public/default/plain"), 1))
        record = await world.store.get("/topics/public/default/plain", fresh=True)
        assert record is not None
        plain = msgspec.json.decode(record.value)
        assert (plain["properties"], plain["routing"], plain["formatVersion"]) == ({}, "high16", 1)
        assert msgspec.json.decode(msgspec.json.encode(SubscriptionMetadata()))["type"] == "STREAM"
        assert msgspec.json.decode(b"{}", type=SubscriptionMetadata).type == "STREAM"
        assert raw["segments"]["0"]["hashRange"] == {"start": 0, "end": 0x7FFF}
        assert sorted(world.segments.topics)[:2] == [
            "segment://public/default/orders/0000-7fff-0",
            "segment://public/default/orders/8000-ffff-1",
        ]
        with pytest.raises(AlreadyExists, match="orders"):
            await broker.do(lambda service: service.create_topic(TOPIC, 2))

    simulate(main)


@pytest.mark.req("R468-73")
@pytest.mark.parametrize("count", [1, 3, 4, 64])
def test_a_topic_begins_with_equal_ranges_and_its_record_comes_before_its_segments(count: int) -> None:
    async def main(world: World) -> None:
        broker = await world.broker()

        async def look(step: str) -> None:
            if step == "create:segments":
                assert await world.metadata() is not None
                assert not world.segments.topics

        steps = await steps_of(broker.do(lambda service: service.create_topic(TOPIC, count)), look)
        assert steps.index("create:intend") < steps.index("create:segments")
        made = await world.until_settled()
        assert (made.epoch, made.next_segment_id) == (0, count)
        assert sorted(made.segments) == list(range(count))
        sizes = set()
        begins = 0
        for number in range(count):
            each = made.layout.segment(number)
            assert each.is_active
            assert (each.parent_ids, each.child_ids, each.created_at_epoch) == ((), (), 0)
            assert each.hash_range.start == begins
            begins = each.hash_range.end + 1
            sizes.add(each.hash_range.size)
            assert str(physical_name(TOPIC, each)) in world.segments.topics
        assert begins == 1 << 16
        assert max(sizes) - min(sizes) <= 1
        assert len(world.segments.topics) == count

    simulate(main)


@pytest.mark.req("R468-73")
@pytest.mark.parametrize("count", [0, -1, 1025, 65_536])
def test_more_segments_than_allowed_are_refused_with_the_setting_that_says_so(count: int) -> None:
    async def main(world: World) -> None:
        broker = await world.broker()
        with pytest.raises(InvalidArgument, match=r"1 to 1024 are allowed \(scalable_topics\.max_segments_per_topic\)"):
            await broker.do(lambda service: service.create_topic(TOPIC, count))
        assert await world.metadata() is None

    simulate(main)


def test_of_several_creators_one_succeeds() -> None:
    async def main(world: World) -> None:
        brokers = [await world.broker() for _ in range(3)]
        results = await asyncio.gather(
            *[broker.do(lambda service, n=n: service.create_topic(TOPIC, n)) for n, broker in enumerate(brokers, 1)],  # type: ignore[misc]
            return_exceptions=True,
        )
        assert sorted(type(each).__name__ for each in results) == ["AlreadyExists", "AlreadyExists", "NoneType"]
        assert len((await world.until_settled()).segments) == results.index(None) + 1 == len(world.segments.topics)

    for seed in range(5):
        simulate(main, seed=seed)


@pytest.mark.parametrize("count", [0, -1, 1025, 65_537])
def test_impossible_counts(count: int) -> None:
    async def main(world: World) -> None:
        broker = await world.broker()
        with pytest.raises(InvalidArgument, match=f"cannot begin with {count} segments; 1 to 1024"):
            await broker.do(lambda service: service.create_topic(TOPIC, count))
        assert await world.metadata() is None

    simulate(main)


def test_names_and_properties_that_cannot_be() -> None:
    async def main(world: World) -> None:
        broker = await world.broker()
        for name in (
            "topic://public/default/ orders",
            "topic://public/default/__orders",
            "topic://public/default/x-partition-1",
        ):
            with pytest.raises(InvalidTopicName):
                await broker.do(lambda service, name=name: service.create_topic(TopicName.parse(name), 1))  # type: ignore[misc]
        for wrong in ({"": "x"}, {"k": "v" * 300}, {f"k{n}": "v" for n in range(65)}):
            with pytest.raises(InvalidArgument):
                await broker.do(lambda service, wrong=wrong: service.create_topic(TOPIC, 1, properties=wrong))  # type: ignore[misc]
        with pytest.raises(InvalidArgument, match="mod-N"):
            await broker.do(lambda service: service.create_topic(TOPIC, 1, routing=Routing.MOD_N))
        with pytest.raises(InvalidArgument, match="no name of a scalable topic"):
            await broker.do(lambda service: service.create_topic(TopicName.parse("persistent://public/default/x"), 1))
        assert not world.segments.topics

    simulate(main)


def test_a_regular_topic_keeps_its_name() -> None:
    async def main(world: World) -> None:
        broker = await world.broker()
        world.regular[TopicName.parse("persistent://public/default/orders")] = 0
        with pytest.raises(AlreadyExists, match="regular topic"):
            await broker.do(lambda service: service.create_topic(TOPIC, 1))
        world.regular.clear()

        async def appear(name: str, moment: Moment) -> None:
            if name == "create:intend" and moment == "before":
                asyncio.get_running_loop().call_later(0, world.regular.update, {name_of: 3})

        name_of = TopicName.parse("persistent://public/default/orders")
        with watching(appear), pytest.raises(AlreadyExists):
            await broker.do(lambda service: service.create_topic(TOPIC, 1))
        assert await world.metadata() is None

    simulate(main)


@pytest.mark.req("R468-76")
def test_topics_are_listed_by_namespace_and_properties() -> None:
    async def main(world: World) -> None:
        broker = await world.broker()
        for name, properties in {
            "topic://public/default/a": {"team": "x", "env": "prod"},
            "topic://public/default/b c/d": {"team": "x"},
            "topic://public/default/ü": {},
            "topic://public/other/a": {"team": "x"},
        }.items():
            await broker.do(
                lambda service, name=name, properties=properties: service.create_topic(  # type: ignore[misc]
                    TopicName.parse(name), 1, properties=properties
                )
            )
        service = broker.service
        assert await service.topics(NAMESPACE) == [
            "topic://public/default/a",
            "topic://public/default/b c/d",
            "topic://public/default/ü",
        ]
        assert await service.topics(NAMESPACE, {"team": "x"}) == ["topic://public/default/a", "topic://public/default/b c/d"]
        assert await service.topics(NAMESPACE, {"team": "x", "env": "prod"}) == ["topic://public/default/a"]
        assert await service.topics(NAMESPACE, {"team": "y"}) == []
        assert await service.topics(NamespaceName.parse("public/none")) == []
        index = (await world.store.get(topic_path(TopicName.parse("topic://public/default/a")))).index  # type: ignore[union-attr]
        assert index["prop:team"] == "public:default:x"

    simulate(main)


@pytest.mark.req("R468-11")
def test_operations_do_not_cross_topics() -> None:
    async def main(world: World) -> None:
        broker = await world.broker()
        other = TopicName.parse("topic://public/default/other")
        for topic in (TOPIC, other):
            await broker.do(lambda service, topic=topic: service.create_topic(topic, 1))  # type: ignore[misc]
        first, second = await broker.lead(TOPIC), await broker.lead(other)
        await asyncio.gather(
            broker.do(lambda _service: first.split_segment(0)), broker.do(lambda _service: second.split_segment(0))
        )
        await broker.do(lambda _service: first.split_segment(1))
        assert first.layout.epoch == 2
        assert second.layout.epoch == 1
        assert (await world.layout(other)).epoch == 1

    simulate(main)


def test_one_identity_for_all_spellings_of_a_name() -> None:
    """L-32: a regular name of a scalable topic finds the same controller."""

    async def main(world: World) -> None:
        broker = await world.broker()
        await broker.do(lambda service: service.create_topic(TOPIC, 1))
        for name in ("persistent://public/default/orders", "segment://public/default/orders/0000-ffff-0"):
            found = await broker.do(lambda service, name=name: service.lead(TopicName.parse(name)))  # type: ignore[misc]
            assert found is await broker.lead()
        assert await broker.service.leader_id(TopicName.parse("persistent://public/default/orders")) == broker.id

    simulate(main)


def test_a_regular_topic_has_a_controller_too() -> None:
    async def main(world: World) -> None:
        broker, other = await world.broker(), await world.broker()
        regular = TopicName.parse("persistent://public/default/plain")
        world.regular[regular] = 3
        controller = await broker.do(lambda service: service.lead(regular))
        assert len(controller.layout.active_segments) == 3
        with pytest.raises(LedElsewhere) as caught:
            await other.do(lambda service: service.lead(regular.partition(1)))
        assert caught.value.broker_id == broker.id

    simulate(main)


# Queue subscriptions.


def test_a_queue_subscription_is_registered_once() -> None:
    async def main(world: World) -> None:
        broker, other = await world.broker(), await world.broker()
        await broker.do(lambda service: service.create_topic(TOPIC, 1))
        controller = await broker.lead()
        await broker.do(lambda _service: controller.split_segment(0))
        first = await other.do(lambda service: service.register_queue_subscription(TOPIC, "a b", "latest"))
        again = await broker.do(lambda service: service.register_queue_subscription(TOPIC, "a b", "earliest"))
        assert first == again
        assert (first.type, first.initial, first.created_at_epoch) == ("QUEUE", "latest", 1)
        assert await world.store.get("/topics/public/default/orders/subscriptions/a%20b", fresh=True) is not None

    simulate(main)


def test_a_queue_subscription_of_a_topic_that_is_not_there() -> None:
    async def main(world: World) -> None:
        broker = await world.broker()
        with pytest.raises(TopicNotFound):
            await broker.do(lambda service: service.register_queue_subscription(TOPIC, "s", "latest"))
        world.segments.fail = lambda name, _segment: NotReady("Not yet.") if name == "create" else None
        creating = asyncio.get_running_loop().create_task(broker.do(lambda service: service.create_topic(TOPIC, 1)))
        await asyncio.sleep(1)
        with pytest.raises(NotReady, match="being made"):
            await broker.do(lambda service: service.register_queue_subscription(TOPIC, "s", "latest"))
        world.segments.fail = lambda _name, _segment: None
        await creating
        await broker.do(lambda service: service.register_queue_subscription(TOPIC, "s", "latest"))

    simulate(main)


def test_no_subscription_outlives_a_topic_that_is_deleted_meanwhile() -> None:
    """The record is put after the deletion has listed the subscriptions: whoever put it takes it away again."""

    async def main(world: World) -> None:
        broker, other = await world.broker(), await world.broker()
        await broker.do(lambda service: service.create_topic(TOPIC, 1))

        async def register(name: str, moment: Moment) -> None:
            if (name, moment) == ("delete:record", "before") and NODE.get() is broker.node:
                key = subscription_path(TOPIC, "s")
                await world.store.put(key, b'{"type":"QUEUE"}')  # as put by somebody who had read the topic before

        async def late() -> None:
            await other.do(lambda service: service.register_queue_subscription(TOPIC, "t", "latest"))

        real = other.service._records.living
        calls = 0

        async def slow(topic: TopicName) -> object:
            nonlocal calls
            calls += 1
            found = await real(topic)
            if calls == 1:
                await broker.do(lambda service: service.delete_topic(TOPIC, force=True))
            return found

        other.service._records.living = slow  # type: ignore[method-assign, assignment]
        with pytest.raises(TopicNotFound):
            await late()
        assert await world.records("/topics/public/default/orders/subscriptions") == []
        with watching(register):
            await broker.do(lambda service: service.create_topic(TOPIC, 1))
            await broker.do(lambda service: service.delete_topic(TOPIC))
        assert len(await world.records("/topics/public/default/orders/subscriptions")) == 1
        await broker.do(lambda service: service.create_topic(TOPIC, 1))  # a new topic does not inherit it
        assert await world.records("/topics/public/default/orders/subscriptions") == []

    simulate(main)


@pytest.mark.inv("INV17")
def test_subscriptions_of_a_topic_are_bounded() -> None:
    async def main(world: World) -> None:
        broker = await world.broker()
        await broker.do(lambda service: service.create_topic(TOPIC, 1))
        for name in ("a", "b", "a"):
            await broker.do(lambda service, name=name: service.register_queue_subscription(TOPIC, name, "latest"))  # type: ignore[misc]
        with pytest.raises(SubscriptionLimit, match="max_subscriptions_per_topic"):
            await broker.do(lambda service: service.register_queue_subscription(TOPIC, "c", "latest"))

    simulate(main, config=ScalableConfig(max_subscriptions_per_topic=2))


def test_subscription_operations_go_to_the_plans() -> None:
    async def main(world: World) -> None:
        broker = await world.broker()
        await broker.do(lambda service: service.create_topic(TOPIC, 1))
        controller = await broker.lead()
        topic = world.segments.named(TOPIC, controller.layout, 0)
        topic.messages = 5
        await broker.do(lambda _service: controller.create_subscription("s", "STREAM", "latest"))
        assert topic.cursors == {"s": 5}
        await broker.do(lambda _service: controller.seek("s", 0))
        assert topic.cursors == {"s": 0}
        await broker.do(lambda _service: controller.clear_backlog("s"))
        assert topic.cursors == {"s": 5}
        await broker.do(lambda _service: controller.delete_subscription("s"))
        assert topic.cursors == {}
        for call in (
            lambda _service: controller.delete_subscription("s"),
            lambda _service: controller.seek("s", 0),
            lambda _service: controller.clear_backlog("s"),
        ):
            with pytest.raises(SubscriptionNotFound):
                await broker.do(call)
        with pytest.raises(InvalidTopicName):
            await broker.do(lambda _service: controller.create_subscription(" "))

    simulate(main)


# Adoption.


@pytest.mark.req("R468-12", "R468-36")
def test_a_broker_adopts_topics_of_its_bundles_that_nobody_leads() -> None:
    async def main(world: World) -> None:
        first = await world.broker()
        await first.do(lambda service: service.create_topic(TOPIC, 1))
        second, third = await world.broker(), await world.broker()
        world.owners[TOPIC] = 3
        first.die()
        await asyncio.sleep(world.config.adopt_seconds + 15)
        assert second.service.controllers() == []
        assert [each.topic for each in third.service.controllers()] == [TOPIC]
        assert await third.service.leader_id(TOPIC) == third.id
        third.die()
        await asyncio.sleep(11)
        assert await world.store.get(controller_path(TOPIC), fresh=True) is None

    simulate(main)


@pytest.mark.req("R468-36")
def test_one_leaders_record_that_cannot_be_read_keeps_no_other_topic_without_a_leader() -> None:
    async def main(world: World) -> None:
        first = await world.broker()
        topics = [TopicName.parse(f"topic://public/default/{name}") for name in ("a", "b")]
        await first.do(lambda service: service.create_topic(topics[0], 1))
        await first.do(lambda service: service.create_topic(topics[1], 1))
        second = await world.broker()
        world.owners.update(dict.fromkeys(topics, 2))
        first.die()
        await asyncio.sleep(11)
        await world.store.put(controller_path(topics[0]), b"{")
        await asyncio.sleep(world.config.adopt_seconds + 15)
        assert topics[1] in [each.topic for each in second.service.controllers()]

    simulate(main)


def test_a_creation_whose_broker_died_is_finished_by_another() -> None:
    async def main(world: World) -> None:
        first, second = await world.broker(), await world.broker()
        world.owners[TOPIC] = 2

        async def crash(name: str, moment: Moment) -> None:
            if (name, moment) == ("create:intend", "after"):
                await first.crash_here()

        with watching(crash), pytest.raises(BrokerDied):
            await first.do(lambda service: service.create_topic(TOPIC, 4))
        with pytest.raises(AlreadyExists):
            await second.do(lambda service: service.create_topic(TOPIC, 2))
        await world.until_settled(patience=60)
        assert len(world.segments.topics) == 4

    simulate(main)


@pytest.mark.req("R468-86")
def test_switched_off() -> None:
    async def main(world: World) -> None:
        broker = await world.broker()
        with pytest.raises(InvalidArgument, match="switched off"):
            await broker.do(lambda service: service.create_topic(TOPIC, 1))

    simulate(main, config=ScalableConfig(enabled=False))
