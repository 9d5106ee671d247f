"""Consumer sessions: grace periods, names that come back, leaders that change, consumers that leave with or without a word."""

import asyncio

import pytest
from tests.unit.scalable.coordination import TOPIC, Client, World, held, ids, join, virtually

from braid.errors import ConsumerDisplaced, NotReady
from braid.model.layout import SegmentLayout
from braid.model.names import TopicName
from braid.model.segments import physical_name
from braid.scalable.api import ConsumerAssignment, ConsumerRegistration, RegistrationNumber, SegmentBacklog
from braid.scalable.config import ScalableConfig
from braid.scalable.coordinator import SubscriptionCoordinator
from braid.scalable.records import RegistrationRecord, consumer_path
from braid.scalable.sessions import grace_left

GRACE = 60.0


async def pair(world: World) -> tuple[SubscriptionCoordinator, Client, Client]:
    """Two consumers on four segments."""
    layout = SegmentLayout.initial(4, 0)
    world.segments.fill(TOPIC, layout, 0, "sub")
    coordinator = (await world.leader()).coordinator(layout)
    a, _ = await join(coordinator, "a")
    b, _ = await join(coordinator, "b")
    a.pushed.clear()
    return coordinator, a, b


@pytest.mark.req("R468-37", "R468-63")
def test_a_registration_is_stored_before_it_is_answered() -> None:
    async def main(world: World) -> None:
        leader = await world.leader()
        coordinator = leader.coordinator(SegmentLayout.initial(4, 0))
        await join(coordinator, "a")
        coordinator.kill()  # right after the answer
        stored = await world.store.get(consumer_path(TOPIC, "sub", "a"))
        assert stored is not None
        assert (await world.registrations())["a"] == RegistrationRecord(
            epoch=0, segments=(0, 1, 2, 3), leader_epoch=leader.leadership.epoch, mark=":0"
        )

    virtually(main)


def test_the_empty_registration_of_another_implementation_is_valid() -> None:
    async def main(world: World) -> None:
        await world.store.put(consumer_path(TOPIC, "sub", "old"), b"{}")
        coordinator = (await world.leader()).coordinator(SegmentLayout.initial(2, 0))
        await coordinator.restore()
        await asyncio.sleep(1)
        assert held(coordinator) == {"old": (0, 1)}

    virtually(main)


@pytest.mark.req("R468-64", "R468-65", "R468-38")
def test_a_consumer_that_comes_back_in_time_finds_everything_as_it_was_and_nothing_is_written() -> None:
    async def main(world: World) -> None:
        coordinator, a, b = await pair(world)
        writes = world.made[0]._registrations._store.writes  # type: ignore[attr-defined]
        writes.clear()
        before = held(coordinator)
        for _cycle in range(100):
            coordinator.disconnected("a", a)
            await asyncio.sleep(GRACE - 1)
            assert coordinator.state().connected_consumers == 1
            a, mine = await join(coordinator, "a")
            assert tuple(mine) == before["a"]
        assert held(coordinator) == before
        assert b.pushed == []
        assert writes == []

    virtually(main)


@pytest.mark.req("R468-66", "R468-71")
@pytest.mark.parametrize("grace", [5.0, 60.0])
def test_a_consumer_that_does_not_come_back_is_evicted_after_the_grace_period(grace: float) -> None:
    async def main(world: World) -> None:
        coordinator, a, b = await pair(world)
        coordinator.disconnected("a", a)
        await asyncio.sleep(grace - 0.1)
        assert b.pushed == []
        assert [(each.kind, each.detail["consumer"], each.detail["segments"]) for each in coordinator.blocked_by()] == [
            ("consumer-away", "a", [0, 1])
        ]
        assert coordinator.blocked_by()[0].since == pytest.approx(world.clock.now_ms() - (grace - 0.1) * 1000, abs=2)
        assert coordinator.blocked_by()[0].detail["evictedAtMs"] == pytest.approx(world.clock.now_ms() + 100, abs=2)
        await asyncio.sleep(0.2)
        assert [ids(each) for each in b.pushed] == [[0, 1, 2, 3]]
        assert list(await world.registrations()) == ["b"]
        assert coordinator.blocked_by() == []

    virtually(main, config=ScalableConfig(consumer_grace_seconds=grace))


def test_a_consumer_that_leaves_frees_its_segments_at_once() -> None:
    async def main(world: World) -> None:
        coordinator, a, b = await pair(world)
        await coordinator.unregister("a", a)
        assert [ids(each) for each in b.pushed] == [[0, 1, 2, 3]]
        assert list(await world.registrations()) == ["b"]
        await coordinator.unregister("b", b)
        assert [each.kind for each in coordinator.blocked_by()] == ["no-consumer"]
        assert coordinator.blocked_by()[0].since == world.clock.now_ms()
        assert coordinator.state().state == "NO_CONSUMER"

    virtually(main)


def test_the_newest_connection_of_a_name_wins_and_the_old_ones_end_means_nothing() -> None:
    async def main(world: World) -> None:
        coordinator, a, b = await pair(world)
        newer, mine = await join(coordinator, "a")
        assert mine == [0, 1]
        assert a.was_displaced and not newer.was_displaced
        coordinator.disconnected("a", a)
        await coordinator.unregister("a", a)
        await asyncio.sleep(2 * GRACE)
        assert held(coordinator) == {"a": (0, 1), "b": (2, 3)}
        assert coordinator.state().connected_consumers == 2
        await coordinator.unregister("b", b)
        assert ids(newer.pushed[-1]) == [0, 1, 2, 3]
        assert a.pushed == []

    virtually(main)


def number_of(registered: ConsumerAssignment) -> RegistrationNumber:
    assert registered.number is not None
    return registered.number


@pytest.mark.parametrize("is_old_first", [True, False])
def test_the_newest_connection_keeps_the_name_when_both_register_again_with_the_next_leader(is_old_first: bool) -> None:
    """The old one's connection is half open: its broker has not heard that it was displaced."""

    async def main(world: World) -> None:
        layout = SegmentLayout.initial(2, 0)
        world.segments.fill(TOPIC, layout, 0, "sub")
        first = await world.leader()
        coordinator = first.coordinator(layout)
        old = number_of(await coordinator.register(ConsumerRegistration("a", 1, Client("old"))))
        new = number_of(await coordinator.register(ConsumerRegistration("a", 1, Client("new"))))
        assert old < new
        await first.crash()
        coordinator = (await world.leader()).coordinator(layout)
        await coordinator.restore()
        again = {name: Client(name) for name in ("old", "new")}
        numbers = {"old": old, "new": new}
        refused = []
        for name in ("old", "new") if is_old_first else ("new", "old"):
            try:
                made = await coordinator.register(ConsumerRegistration("a", 1, again[name], number=numbers[name]))
                assert made.number == numbers[name]
            except ConsumerDisplaced:
                refused.append(name)
        assert refused == ([] if is_old_first else ["old"])
        assert (again["old"].was_displaced, again["new"].was_displaced) == (is_old_first, False)
        assert coordinator.state().connected_consumers == 1
        # A connection made now is newer than any that an earlier leader knew.
        newest = Client("newest")
        assert number_of(await coordinator.register(ConsumerRegistration("a", 1, newest))) > new
        assert again["new"].was_displaced
        with pytest.raises(ConsumerDisplaced):
            await coordinator.register(ConsumerRegistration("a", 1, Client("new"), number=new))
        assert not newest.was_displaced

    virtually(main)


def test_a_coordinator_made_anew_under_the_same_leadership_goes_on_counting() -> None:
    """Else a connection of its predecessor's time, (E, 4), would be taken for newer than one of its own, (E, 1)."""

    async def main(world: World) -> None:
        layout = SegmentLayout.initial(2, 0)
        world.segments.fill(TOPIC, layout, 0, "sub")
        leader = await world.leader()
        coordinator = leader.coordinator(layout)
        older = [number_of(await coordinator.register(ConsumerRegistration("a", 1, Client()))) for _ in range(4)]
        await coordinator.close()
        again = leader.coordinator(layout)
        await again.restore()
        newest = Client("newest")
        assert number_of(await again.register(ConsumerRegistration("a", 1, newest))) > older[-1]
        with pytest.raises(ConsumerDisplaced):
            await again.register(ConsumerRegistration("a", 1, Client("old"), number=older[-1]))
        assert not newest.was_displaced

    virtually(main)


def test_a_consumer_that_closed_before_there_was_a_new_leader_is_forgotten_by_it_at_once() -> None:
    async def main(world: World) -> None:
        layout = SegmentLayout.initial(4, 0)
        world.segments.fill(TOPIC, layout, 0, "sub")
        first = await world.leader()
        coordinator = first.coordinator(layout)
        gone = number_of(await coordinator.register(ConsumerRegistration("a", 1, Client("a"))))
        kept = number_of(await coordinator.register(ConsumerRegistration("b", 1, Client("b"))))
        await first.crash()
        coordinator = (await world.leader()).coordinator(layout)
        await coordinator.restore()
        b = Client("b")
        await coordinator.register(ConsumerRegistration("b", 1, b, number=kept))
        await coordinator.forget("a", gone)
        assert held(coordinator) == {"b": (0, 1, 2, 3)}
        assert ids(b.pushed[-1]) == [0, 1, 2, 3]
        assert list(await world.registrations()) == ["b"]
        await coordinator.forget("a", gone)
        await coordinator.register(ConsumerRegistration("b", 1, newer := Client("b")))
        await coordinator.forget("b", kept)  # of a connection that has lost the name since
        assert held(coordinator) == {"b": (0, 1, 2, 3)} and newer.error is None

    virtually(main)


@pytest.mark.req("R468-68", "R468-69")
def test_a_new_leader_gives_everyone_a_full_fresh_grace_period() -> None:
    async def main(world: World) -> None:
        layout = SegmentLayout.initial(4, 0)
        first = await world.leader()
        coordinator = first.coordinator(layout)
        a, _ = await join(coordinator, "a")
        await join(coordinator, "b")
        await join(coordinator, "c")
        coordinator.disconnected("a", a)
        await asyncio.sleep(50)
        await first.crash()
        restored = (await world.leader()).coordinator(layout)
        await restored.restore()
        await asyncio.sleep(50)
        before = held(restored)
        _, mine = await join(restored, "a")
        b, also = await join(restored, "b")
        assert (tuple(mine), tuple(also)) == (before["a"], before["b"])
        assert (await world.registrations())["a"].absent_since_ms is None
        assert (await world.registrations())["c"].absent_since_ms is not None
        await asyncio.sleep(11)
        assert list(held(restored)) == ["a", "b"]
        assert sorted(number for each in held(restored).values() for number in each) == [0, 1, 2, 3]
        assert list(await world.registrations()) == ["a", "b"]
        assert len(b.pushed) <= 1

    virtually(main)


def test_leaders_that_change_every_half_grace_do_not_keep_a_dead_consumer_alive_for_ever() -> None:
    """Hole 15: the first leader that misses it says since when; three grace periods later it is gone. The live one stays."""

    async def main(world: World) -> None:
        layout = SegmentLayout.initial(4, 0)
        leader = await world.leader()
        coordinator = leader.coordinator(layout)
        await join(coordinator, "dead")
        await join(coordinator, "live")
        began = asyncio.get_running_loop().time()
        while "dead" in held(coordinator):
            assert asyncio.get_running_loop().time() - began < 4 * GRACE
            await leader.crash()
            leader = await world.leader()
            coordinator = leader.coordinator(layout)
            await join(coordinator, "live")
            await asyncio.sleep(GRACE / 2)
        assert 3 * GRACE - 1 <= asyncio.get_running_loop().time() - began <= 3.5 * GRACE + 1
        await asyncio.sleep(1)
        assert held(coordinator) == {"live": (0, 1, 2, 3)}
        for _change in range(12):
            await leader.crash()
            leader = await world.leader()
            coordinator = leader.coordinator(layout)
            await asyncio.sleep(GRACE / 4)
            _, mine = await join(coordinator, "live")
            assert mine == [0, 1, 2, 3]
            await asyncio.sleep(GRACE / 4)

    virtually(main)


def test_the_arithmetic_of_grace() -> None:
    assert grace_left(None, 1_000_000, 60) == 60
    assert grace_left(1_000_000, 1_000_000, 60) == 60
    assert grace_left(1_000_000, 1_000_000 + 150_000, 60) == 30
    assert grace_left(1_000_000, 1_000_000 + 200_000, 60) == 0
    assert grace_left(9_000_000, 1_000_000, 60) == 60  # another broker's clock is ahead


@pytest.mark.req("R468-70")
def test_an_owner_that_restarts_changes_no_assignment() -> None:
    async def main(world: World) -> None:
        coordinator, a, b = await pair(world)
        layout = SegmentLayout.initial(4, 0)
        for number in range(4):
            world.segments.at(layout, number).attached.append(f"{'a' if number < 2 else 'b'}-seg-{number}")
        await asyncio.sleep(5)
        world.segments.fail = lambda _operation, _segment: NotReady("the owner restarts")
        for number in range(4):
            world.segments.at(layout, number).attached.clear()
        await asyncio.sleep(30)
        world.segments.fail = lambda _operation, _segment: None
        await asyncio.sleep(300)  # they lost their connection and take their time, but nobody closed anything
        assert held(coordinator) == {"a": (0, 1), "b": (2, 3)}
        assert a.pushed == b.pushed == []

    virtually(main)


class TestDepartures:
    """A Java consumer that closes tells nobody; its segment consumers do (pulsar-reference.md 2)."""

    layout = SegmentLayout.initial(4, 0)

    def attach(self, world: World, name: str, *numbers: int) -> None:
        for number in numbers:
            world.segments.at(self.layout, number).attached.append(f"{name}-seg-{number}")

    def close(self, world: World, name: str, *numbers: int) -> None:
        for number in numbers:
            stored = world.segments.at(self.layout, number)
            stored.attached.remove(f"{name}-seg-{number}")
            stored.closed.append(f"{name}-seg-{number}")

    def test_one_that_closed_all_its_segment_consumers_has_left(self) -> None:
        async def main(world: World) -> None:
            coordinator, a, b = await pair(world)
            self.attach(world, "a", 0, 1)
            self.attach(world, "b", 2, 3)
            await asyncio.sleep(5)
            self.close(world, "a", 0, 1)
            await asyncio.sleep(2)
            assert b.pushed == []
            await asyncio.sleep(5)
            assert [ids(each) for each in b.pushed] == [[0, 1, 2, 3]]
            assert [ids(each) for each in a.pushed] == [[]]
            assert list(await world.registrations()) == ["b"]
            coordinator.disconnected("a", a)  # much later, with the whole client
            assert held(coordinator) == {"b": (0, 1, 2, 3)}

        virtually(main)

    def test_a_successor_under_another_name_gets_what_the_closed_one_had(self) -> None:
        async def main(world: World) -> None:
            world.segments.fill(TOPIC, self.layout, 0, "sub")
            coordinator = (await world.leader()).coordinator(self.layout)
            await join(coordinator, "first")
            self.attach(world, "first", 0, 1, 2, 3)
            await asyncio.sleep(3)
            self.close(world, "first", 0, 1, 2, 3)
            await asyncio.sleep(100)
            assert held(coordinator) == {"first": (0, 1, 2, 3)}  # nobody waits for them
            second, mine = await join(coordinator, "second")
            self.attach(world, "second", *mine)
            await asyncio.sleep(6)
            assert ids(second.pushed[-1]) == [0, 1, 2, 3]

        virtually(main)

    def test_one_that_is_still_on_one_segment_or_still_attaching_or_waits_for_another_has_not(self) -> None:
        async def main(world: World) -> None:
            coordinator, a, b = await pair(world)
            self.attach(world, "b", 2, 3)
            await asyncio.sleep(120)  # a has never attached: slow, but nobody closed anything
            assert held(coordinator) == {"a": (0, 1), "b": (2, 3)}
            self.attach(world, "a", 0, 1)
            await asyncio.sleep(5)
            self.close(world, "a", 0)
            await asyncio.sleep(120)
            assert held(coordinator) == {"a": (0, 1), "b": (2, 3)}
            self.close(world, "a", 1)
            self.attach(world, "other", 1)  # somebody has not let go of it yet
            await asyncio.sleep(120)
            assert held(coordinator) == {"a": (0, 1), "b": (2, 3)}
            assert a.pushed == b.pushed == []

        virtually(main)

    def test_one_that_closed_what_it_has_read_to_the_end_has_not(self) -> None:
        async def main(world: World) -> None:
            coordinator, _, b = await pair(world)
            self.attach(world, "a", 0, 1)
            self.attach(world, "b", 2, 3)
            await asyncio.sleep(5)
            for number in (0, 1):  # sealed by their owners; the layout does not say so yet
                world.segments.at(self.layout, number).is_sealed = True
            self.close(world, "a", 0, 1)
            await asyncio.sleep(120)
            assert held(coordinator) == {"a": (0, 1), "b": (2, 3)}
            assert b.pushed == []

        virtually(main)

    def test_one_that_came_and_closed_between_two_looks_has_left(self) -> None:
        async def main(world: World) -> None:
            coordinator, _, b = await pair(world)
            self.attach(world, "b", 2, 3)
            world.segments.at(self.layout, 0).closed.append("a-seg-0")
            await asyncio.sleep(5)
            assert b.pushed == []
            await asyncio.sleep(5)
            assert held(coordinator) == {"b": (0, 1, 2, 3)}

        virtually(main)

    def test_one_that_registers_under_the_name_of_one_that_closed_has_time_to_attach(self) -> None:
        async def main(world: World) -> None:
            coordinator, _, b = await pair(world)
            self.attach(world, "b", 2, 3)
            world.segments.at(self.layout, 0).closed.append("a-seg-0")  # of the one before it
            await asyncio.sleep(5)
            await join(coordinator, "a")
            await asyncio.sleep(5)
            self.attach(world, "a", 0, 1)
            await asyncio.sleep(60)
            assert held(coordinator) == {"a": (0, 1), "b": (2, 3)}
            assert b.pushed == []

        virtually(main)

    def test_what_was_seen_of_an_earlier_connection_says_nothing_of_the_next(self) -> None:
        """Owners are slow: a look takes eight seconds, and attaching takes its time too."""

        async def main(world: World) -> None:
            coordinator, _, b = await pair(world)
            self.attach(world, "a", 0, 1)
            self.attach(world, "b", 2, 3)
            await asyncio.sleep(5)
            backlog = world.segments.backlog

            async def slow(segment: TopicName, subscription: str) -> SegmentBacklog:
                found = await backlog(segment, subscription)
                await asyncio.sleep(4)
                return found

            world.segments.backlog = slow  # type: ignore[method-assign]
            self.close(world, "a", 0, 1)
            await asyncio.sleep(3)  # the first look has begun
            await join(coordinator, "a")
            await asyncio.sleep(12)  # the second one has looked at both
            self.attach(world, "a", 0, 1)
            await asyncio.sleep(60)
            assert held(coordinator) == {"a": (0, 1), "b": (2, 3)}
            assert b.pushed == []

        virtually(main)

    def test_one_whose_client_would_have_told_has_not(self) -> None:
        async def main(world: World) -> None:
            coordinator, _, b = await pair(world)
            registration = ConsumerRegistration("a", 1, Client("a"), says_goodbye=True)
            await coordinator.register(registration)
            self.attach(world, "a", 0, 1)
            self.attach(world, "b", 2, 3)
            await asyncio.sleep(5)
            self.close(world, "a", 0, 1)  # it may have its reasons
            await asyncio.sleep(120)
            assert held(coordinator) == {"a": (0, 1), "b": (2, 3)}
            assert b.pushed == []

        virtually(main)


def test_what_holds_a_subscription_up_is_named_with_how_far_it_is() -> None:
    async def main(world: World) -> None:
        layout = SegmentLayout.initial(1, 0)
        world.segments.fill(TOPIC, layout, 5, "sub")
        coordinator = (await world.leader()).coordinator(layout)
        await join(coordinator, "a")
        sealed_at = world.clock.now_ms() + 7
        layout = layout.split(0, sealed_at)
        world.segments.fill(TOPIC, layout, 0, "sub")
        coordinator.on_layout_change(layout)
        world.segments.topics[str(physical_name(TOPIC, layout.segment(0)))].read["sub"] = 2
        await asyncio.sleep(10)
        (blocked,) = coordinator.blocked_by()
        assert (blocked.kind, blocked.segment, blocked.since) == ("draining-parent", 0, sealed_at)
        assert blocked.detail == {"waiting": [1, 2], "messages": 3, "isTerminated": True, "consumer": "a"}

    virtually(main)
