"""What goes wrong with one consumer, segment, group or topic costs nobody else anything, also if nobody foresaw it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.scalable import fakes
from tests.unit.scalable.coordination import TOPIC, Client, World, held, join, virtually
from tests.unit.scalable.test_dag_watch import Broker as WatchingBroker

from braid.errors import BraidError, StoreUnavailable, SubscriptionNotFound
from braid.model.layout import SegmentLayout
from braid.model.names import NamespaceName, TopicName
from braid.model.segments import physical_name
from braid.runtime.clock import Timer
from braid.runtime.plans import Moment, watching
from braid.scalable.api import ConsumerAssignment, ConsumerRegistration, PlaceReport
from braid.scalable.config import ScalableConfig
from braid.scalable.members import RETRY_SECONDS
from braid.scalable.namespace_watch import NamespaceWatches
from braid.scalable.records import SubscriptionMetadata, controller_path, subscription_path, topic_path
from braid.testing.sim.ports import SimClock


class Deaf(Client):
    """A connection that fails in a way nobody foresaw."""

    def push(self, assignment: ConsumerAssignment) -> None:
        raise ValueError("cannot be encoded")

    def displaced(self) -> None:
        raise ValueError("cannot be encoded")

    def ended(self, error: BraidError) -> None:
        raise ValueError("cannot be encoded")


def failing(segment: TopicName) -> Callable[[str, str], None]:
    def fail(operation: str, name: str) -> None:
        if operation == "backlog" and name == str(segment):
            raise ValueError("nonsense from its owner")

    return fail


@pytest.mark.inv("INV15")
def test_an_owner_that_answers_nonsense_holds_up_its_own_segment_only() -> None:
    async def main(world: World) -> None:
        layout = SegmentLayout.initial(2, 0).split(0, 1).split(1, 1)
        world.segments.fill(TOPIC, layout, 0, "sub")
        coordinator = (await world.leader()).coordinator(layout)
        world.segments.hook = failing(physical_name(TOPIC, layout.segment(0)))
        await join(coordinator, "a")
        await asyncio.sleep(20)
        assert held(coordinator) == {"a": (0, 4, 5)}
        world.segments.hook = lambda _operation, _name: None
        await asyncio.sleep(20)
        assert held(coordinator) == {"a": (2, 3, 4, 5)}

    virtually(main)


def test_one_that_left_and_cannot_be_told_is_gone_and_others_are_looked_at() -> None:
    async def main(world: World) -> None:
        layout = SegmentLayout.initial(3, 0)
        world.segments.fill(TOPIC, layout, 0, "sub")
        coordinator = (await world.leader()).coordinator(layout)
        await join(coordinator, "a", Deaf("a"))
        await join(coordinator, "b")
        await join(coordinator, "c")
        of = {name: numbers[0] for name, numbers in held(coordinator).items()}
        world.segments.hook = failing(physical_name(TOPIC, layout.segment(of["c"])))
        for name, number in of.items():
            world.segments.at(layout, number).attached.append(f"{name}-seg-{number}")
        await asyncio.sleep(5)
        for name in ("a", "b"):
            stored = world.segments.at(layout, of[name])
            stored.attached.clear()
            stored.closed.append(f"{name}-seg-{of[name]}")
        await asyncio.sleep(30)
        assert held(coordinator) == {"c": (0, 1, 2)}

    virtually(main)


def test_one_that_cannot_be_told_the_end_keeps_it_from_nobody() -> None:
    async def main(world: World) -> None:
        layout = SegmentLayout.initial(4, 0)
        world.segments.fill(TOPIC, layout, 0, "sub")
        coordinator = (await world.leader()).coordinator(layout)
        await join(coordinator, "a", Deaf("a"))
        b, _ = await join(coordinator, "b")
        await coordinator.close(SubscriptionNotFound("It was deleted."))
        assert isinstance(b.error, SubscriptionNotFound)

    virtually(main)


def test_one_that_cannot_be_told_that_it_lost_its_name_loses_it() -> None:
    async def main(world: World) -> None:
        layout = SegmentLayout.initial(4, 0)
        world.segments.fill(TOPIC, layout, 0, "sub")
        coordinator = (await world.leader()).coordinator(layout)
        await join(coordinator, "a", Deaf("a"))
        _, mine = await join(coordinator, "a")
        assert mine == [0, 1, 2, 3]

    virtually(main)


class HastyClock(SimClock):
    """Its timers are early by less than a clock can show, as those of a loop that counts milliseconds."""

    def call_later(self, seconds: float, callback: Callable[..., Any], *args: Any) -> Timer:
        return super().call_later(max(0.0, seconds - 1e-9), callback, *args)


@pytest.mark.inv("INV17")
def test_a_member_that_does_not_answer_is_given_up_although_the_timer_was_early() -> None:
    async def main(world: World) -> None:
        world.clock = HastyClock()
        world.runtime = replace(world.runtime, clock=world.clock)
        group = SubscriptionMetadata(type="CHECKPOINT", created_at_epoch=0)
        await world.put_subscription(group)
        coordinator = (await world.leader()).coordinator(SegmentLayout.initial(2, 0), group)
        a, b = Client("a"), Client("b")
        for client in (a, b):
            await coordinator.register(ConsumerRegistration(client.name, 1, client, says_goodbye=True, hands_over=True))
        assert held(coordinator) == {"a": (0,), "b": ()}
        await asyncio.sleep(65)
        assert held(coordinator) == {"a": (0,), "b": (1,)}

    virtually(main)


def test_hand_overs_leave_no_timers_behind() -> None:
    class Counted(SimClock):
        def __init__(self) -> None:
            super().__init__()
            self.pending: list[Any] = []

        def call_later(self, seconds: float, callback: Callable[..., Any], *args: Any) -> Timer:
            made = super().call_later(seconds, callback, *args)
            self.pending.append(made)
            return made

        def count(self) -> int:
            now = self.monotonic()
            return sum(not each.cancelled() and each.when() > now for each in self.pending)

    async def main(world: World) -> None:
        clock = world.clock = Counted()
        world.runtime = replace(world.runtime, clock=clock)
        group = SubscriptionMetadata(type="CHECKPOINT", created_at_epoch=0)
        await world.put_subscription(group)
        coordinator = (await world.leader()).coordinator(SegmentLayout.initial(2, 0), group)
        a = Client("a")
        told = await coordinator.register(ConsumerRegistration("a", 1, a, says_goodbye=True, hands_over=True))
        before = clock.count()
        for _ in range(20):
            b = Client("b")
            await coordinator.register(ConsumerRegistration("b", 1, b, says_goodbye=True, hands_over=True))
            await coordinator.report("a", a, PlaceReport(told.term, {1: b"5"}, frozenset({1})))
            await coordinator.unregister("b", b)
        assert clock.count() - before <= 2

    virtually(main)


def test_a_namespace_watch_that_cannot_begin_leaves_nothing() -> None:
    async def main(world: World) -> None:
        watches = NamespaceWatches(world.runtime, world.engine.handle("broker"), world.config)

        def push(_news: object) -> None:
            raise ValueError("cannot be encoded")

        with pytest.raises(ValueError, match="encoded"):
            await watches.open(1, NamespaceName("public", "default"), push)
        assert (watches.session_count, watches.feeds) == (0, {})
        await watches.close()

    virtually(main)


@pytest.mark.req("R468-36")
def test_a_topic_that_cannot_be_adopted_for_an_odd_reason_keeps_no_other_without_a_leader() -> None:
    async def main(world: fakes.World) -> None:
        first = await world.broker()
        topics = [TopicName.parse(f"topic://public/default/{name}") for name in ("a", "b")]
        await first.do(lambda service: service.create_topic(topics[0], 1))
        await first.do(lambda service: service.create_topic(topics[1], 1))
        second = await world.broker()
        world.owners.update(dict.fromkeys(topics, 2))
        store: Any = second.store
        get = store.get

        async def odd(key: str, **options: Any) -> Any:
            if key == topic_path(topics[0]):
                raise ValueError("nobody foresaw this")
            return await get(key, **options)

        store.get = odd
        first.die()
        await asyncio.sleep(world.config.adopt_seconds + 15)
        assert topics[1] in [each.topic for each in second.service.controllers()]
        store.get = get
        await asyncio.sleep(world.config.adopt_seconds + 15)
        assert topics[0] in [each.topic for each in second.service.controllers()]

    fakes.simulate(main)


@pytest.mark.inv("INV15")
def test_a_standby_goes_on_looking_whatever_one_look_met() -> None:
    async def main(world: fakes.World) -> None:
        first, second = await fakes.brokers_with_topic(world, 2)
        store: Any = second.store
        get, failed = store.get, list[str]()

        async def odd(key: str, **options: Any) -> Any:
            if key == topic_path(TOPIC):
                failed.append(key)
                raise ValueError("nobody foresaw this")
            return await get(key, **options)

        store.get = odd
        await asyncio.sleep(20)
        store.get = get
        assert len(failed) > 1
        await first.do(lambda service: service.delete_topic(TOPIC))
        await asyncio.sleep(20)
        assert second.service.controllers() == []

    fakes.simulate(main)


@pytest.mark.inv("INV15")
def test_the_topics_of_a_namespace_are_listed_again_whatever_one_look_met() -> None:
    async def main(world: World) -> None:
        handle: Any = world.engine.handle("broker")
        watches = NamespaceWatches(world.runtime, handle, world.config)
        heard: list[object] = []
        await watches.open(1, NamespaceName("public", "default"), heard.append)
        scan = handle.scan

        def deaf(*_arguments: object, **_options: object) -> object:
            raise StoreUnavailable("no watches today")

        handle.scan = lambda *_span, **_options: 1 // 0
        handle.watch = deaf
        world.engine.watches.end(StoreUnavailable("no more events"))
        await asyncio.sleep(20)
        handle.scan = scan
        await world.put_topic(SegmentLayout.initial(1, 0))
        await asyncio.sleep(20)
        assert len(heard) == 2
        await watches.close()

    virtually(main)


@pytest.mark.inv("INV6")
@pytest.mark.parametrize("moment", ["before", "after"])
def test_the_deletion_of_a_subscription_that_cannot_be_read_is_finished_by_the_next_leader(moment: Moment) -> None:
    async def main(world: fakes.World) -> None:
        first, second = await fakes.brokers_with_topic(world, 2, segments=1)
        key = subscription_path(TOPIC, "odd")
        await world.store.put(key, b"{")

        async def crash(name: str, now: Moment) -> None:
            if (name, now) == ("delete-subscription:intend", moment):
                await first.crash_here()

        controller = await fakes.controller_of(first)
        with watching(crash), pytest.raises(fakes.BrokerDied):
            await first.do(lambda _service: controller.delete_subscription("odd"))
        await fakes.until_led_by(world, second)
        await asyncio.sleep(5)
        found = await world.store.get(key, fresh=True)  # gone, or untouched; never a subscription that nobody made
        assert (found and found.value) == (b"{" if moment == "before" else None)

    fakes.simulate(main)


@pytest.mark.inv("INV17")
def test_a_group_whose_record_cannot_be_changed_does_not_keep_the_others() -> None:
    async def main(world: fakes.World) -> None:
        broker = await fakes.topic_with(world, 1)
        controller = await fakes.controller_of(broker)
        for name in ("first", "second", "third"):
            client = Client("a")
            registration = ConsumerRegistration("a", 1, client)
            await broker.do(
                lambda _service, name=name, of=registration: controller.register_consumer(name, of, "CHECKPOINT")  # type: ignore[misc]
            )
            await broker.do(lambda _service, name=name, of=client: controller.unregister_consumer(name, "a", of))  # type: ignore[misc]
        await world.store.put(subscription_path(TOPIC, "first"), b"{")
        await asyncio.sleep(130)
        assert await world.store.get(subscription_path(TOPIC, "second"), fresh=True) is None
        await broker.do(lambda _service: controller.create_subscription("sub"))
        term = controller._term
        assert term is not None
        assert set(term.coordinators) == {"first", "sub"}

    fakes.simulate(main, config=ScalableConfig(group_grace_seconds=100, max_subscriptions_per_topic=3))


@pytest.mark.inv("INV4")
def test_a_controller_whose_end_goes_wrong_gives_up_its_leadership_all_the_same() -> None:
    async def main(world: fakes.World) -> None:
        broker = await fakes.topic_with(world, 1)
        controller: Any = await fakes.controller_of(broker)

        async def fail(_term: object) -> None:
            raise ValueError("nobody foresaw this")

        controller._resigning = fail
        with pytest.raises(ValueError, match="foresaw"):
            await broker.do(lambda _service: controller.close())
        assert broker.service.controllers() == []
        assert await world.store.get(controller_path(TOPIC), fresh=True) is None
        await asyncio.sleep(world.config.reconcile_seconds * 3)
        assert await world.store.get(controller_path(TOPIC), fresh=True) is None

    fakes.simulate(main)


@pytest.mark.inv("INV17")
@pytest.mark.parametrize("kind", ["STREAM", "CHECKPOINT"])
def test_a_store_that_is_away_is_asked_now_and_then_however_much_happens(kind: Any) -> None:
    async def main(world: World) -> None:
        record = SubscriptionMetadata(type=kind, created_at_epoch=0)
        await world.put_subscription(record)
        layout = SegmentLayout.initial(4, 0)
        world.segments.fill(TOPIC, layout, 0, "sub")
        leader = await world.leader()
        coordinator = leader.coordinator(layout, record)
        clients = [Client(f"c{number}") for number in range(12)]
        for client in clients:
            await join(coordinator, client.name, client)
        store: Any = leader.store.inner
        asked = list[str]()

        async def away(key: str, *_arguments: Any, **_options: Any) -> Any:
            asked.append(key)
            await asyncio.sleep(0.01)
            raise StoreUnavailable("away")

        store.delete = store.put = away
        for client in clients[:10]:
            await asyncio.sleep(0.03)
            coordinator.disconnected(client.name, client)  # their grace periods end one after the other
        await asyncio.sleep(world.config.consumer_grace_seconds + 1)
        asked.clear()
        await asyncio.sleep(10)
        looks = 10 / RETRY_SECONDS
        assert len(asked) <= 4 * looks, f"{len(asked)} calls in {looks:.0f} retries"
        del store.delete, store.put
        await asyncio.sleep(5)
        assert set(held(coordinator)) == set(await world.registrations()) == {"c10", "c11"}

    virtually(main)


@pytest.mark.inv("INV17")
def test_a_layout_that_cannot_be_read_is_looked_at_now_and_then() -> None:
    async def main(world: World) -> None:
        await world.put_topic(SegmentLayout.initial(1, 5))
        broker = WatchingBroker(world)
        _, heard = await broker.open()
        store: Any = broker.store
        get, asked = store.get, list[str]()

        async def away(key: str, **_options: Any) -> Any:
            asked.append(key)
            await asyncio.sleep(0.01)
            raise StoreUnavailable("away")

        store.get = away
        for _ in range(50):  # a client that opens and gives up, or a hint that comes, each time
            await asyncio.sleep(0.037)
            broker.watches.feeds[TOPIC]._news.set()
        asked.clear()
        await asyncio.sleep(10)
        assert len(asked) <= 2 * 10 / RETRY_SECONDS
        store.get = get
        await world.put_topic(SegmentLayout.initial(1, 5).split(0, 6))
        await asyncio.sleep(1)
        assert len(heard) == 2
        await broker.watches.close()

    virtually(main)
