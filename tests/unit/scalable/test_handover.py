"""The hand-over of segments in a checkpoint group, at the leader: nothing is given before it was let go of, whoever leads."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from tests.unit.scalable.coordination import Client, Leader, World, held, ids, join, virtually

from braid.errors import BraidError, InvalidArgument, NotReady, StoreUnavailable
from braid.model.layout import SegmentLayout
from braid.scalable.api import ConsumerAssignment, ConsumerRegistration, PlaceReport
from braid.scalable.config import ScalableConfig
from braid.scalable.coordinator import SubscriptionCoordinator
from braid.scalable.records import SubscriptionMetadata

GROUP = SubscriptionMetadata(type="CHECKPOINT", created_at_epoch=0)


class Member(Client):
    """A member that reads numbered messages and hands over the number of the next one."""

    def __init__(self, name: str, log: list[tuple[int, int]]) -> None:
        super().__init__(name)
        self.log_of_all = log
        self.places: dict[int, int] = {}
        self.owed: dict[int, int | None] = {}
        self.term = 0
        self.is_partial = False

    def push(self, assignment: ConsumerAssignment) -> None:
        super().push(assignment)
        self.take(assignment)

    def take(self, assignment: ConsumerAssignment) -> None:
        self.term, self.is_partial = assignment.term, assignment.is_partial
        given = {each.segment_id: each for each in assignment.segments}
        known = {number: place for number, place in self.owed.items() if place is not None} | self.places
        self.owed = {number: known.get(number) for number in assignment.owed}
        self.places = {number: known[number] if number in known else int(each.place or b"0") for number, each in given.items()}

    def read(self) -> None:
        for number in self.places:
            self.log_of_all.append((number, self.places[number]))
            self.places[number] += 1

    async def register(self, coordinator: SubscriptionCoordinator) -> None:
        registration = ConsumerRegistration(self.name, 1, self, says_goodbye=True, hands_over=True)
        self.take(await coordinator.register(registration))

    async def answer(self, coordinator: SubscriptionCoordinator) -> None:
        """Let go of what is owed."""
        owed = dict(self.owed)
        places = {number: None if place is None else str(place).encode() for number, place in owed.items()}
        await coordinator.report(self.name, self, PlaceReport(self.term, places, frozenset(owed)))
        for number in owed:
            self.owed.pop(number, None)

    async def leave(self, coordinator: SubscriptionCoordinator) -> None:
        places = {number: str(place).encode() for number, place in self.places.items()}
        await coordinator.report(self.name, self, PlaceReport(self.term, places))
        await coordinator.unregister(self.name, self)
        self.places = {}


async def make(world: World) -> tuple[Leader, SubscriptionCoordinator]:
    if await world.subscription() is None:
        await world.put_subscription(GROUP)
    leader = await world.leader()
    record = await world.subscription()
    assert record is not None
    coordinator = leader.coordinator(SegmentLayout.initial(2, 0), record)
    await coordinator.restore()
    return leader, coordinator


@pytest.mark.req("R468-31")
def test_a_segment_is_given_after_it_was_let_go_of() -> None:
    async def main(world: World) -> None:
        _leader, coordinator = await make(world)
        a, b = Member("a", []), Member("b", [])
        await a.register(coordinator)
        for _ in range(5):
            a.read()
        await b.register(coordinator)
        assert (list(a.places), a.owed, b.places, b.is_partial) == ([0], {1: 5}, {}, True)
        assert {name: each.segments for name, each in (await world.registrations()).items()} == {"a": (0, 1), "b": ()}
        await asyncio.sleep(59)  # it has its time
        assert b.places == {}
        await a.answer(coordinator)
        assert (b.places, b.is_partial) == ({1: 5}, False)
        assert {name: each.segments for name, each in (await world.registrations()).items()} == {"a": (0,), "b": (1,)}
        record = await world.subscription()
        assert record is not None
        assert record.places == {1: b"5"}
        await b.leave(coordinator)
        assert a.places == {0: 5, 1: 5}

    virtually(main)


@pytest.mark.inv("INV17")
def test_a_member_that_is_there_and_does_not_answer_is_not_waited_for_ever() -> None:
    async def main(world: World) -> None:
        _leader, coordinator = await make(world)
        a, b = Member("a", []), Member("b", [])
        await a.register(coordinator)
        await coordinator.report("a", a, PlaceReport(a.term, {1: b"4"}))
        for _ in range(9):
            a.read()
        await b.register(coordinator)
        await asyncio.sleep(20)
        coordinator.disconnected("a", a)
        await a.register(coordinator)  # coming back does not give it more time
        await asyncio.sleep(9)
        assert (b.places, b.is_partial) == ({}, True)
        await asyncio.sleep(2)
        assert (b.places, b.is_partial) == ({1: 4}, False)
        assert (a.owed, list(a.places)) == ({}, [0])
        assert {name: each.segments for name, each in (await world.registrations()).items()} == {"a": (0,), "b": (1,)}
        await coordinator.report("a", a, PlaceReport(a.term, {0: b"9", 1: b"9"}, frozenset({1})))  # too late for that one
        record = await world.subscription()
        assert record is not None
        assert record.places == {0: b"9", 1: b"4"}

    virtually(main, config=ScalableConfig(handover_seconds=30, consumer_grace_seconds=10))


@pytest.mark.parametrize("gone", ["a", "b"])
@pytest.mark.parametrize("first", ["a", "b"])
def test_a_record_that_could_not_be_removed_takes_nothing_from_others(gone: str, first: str) -> None:
    """Two records with one segment would make the next leader take it from the member that reads it, unasked."""

    async def main(world: World) -> None:
        leader, coordinator = await make(world)
        log: list[tuple[int, int]] = []
        a, b = Member("a", log), Member("b", log)
        members = [a, b] if first == "a" else [b, a]
        for member in members:
            await member.register(coordinator)
        await members[0].answer(coordinator)
        leader.store.refuse_delete = lambda _key: StoreUnavailable("The store is away.")
        a.read()
        b.read()
        leaving, staying = (a, b) if gone == "a" else (b, a)
        with suppress(StoreUnavailable):
            await leaving.leave(coordinator)
        for _ in range(3):
            staying.read()
        await leader.crash()
        _leader, coordinator = await make(world)
        await staying.register(coordinator)
        for _ in range(100):
            staying.read()
            if staying.owed:
                await staying.answer(coordinator)
            await asyncio.sleep(1)
        assert sorted(staying.places) == [0, 1]
        for segment in (0, 1):
            read = [place for number, place in log if number == segment]
            assert read == list(range(len(read)))

    virtually(main)


def test_a_leader_that_comes_in_between_asks_again() -> None:
    async def main(world: World) -> None:
        leader, coordinator = await make(world)
        log: list[tuple[int, int]] = []
        a, b = Member("a", log), Member("b", log)
        await a.register(coordinator)
        a.read()
        await b.register(coordinator)
        stale = a.term
        await leader.crash()
        _leader, coordinator = await make(world)
        await b.register(coordinator)
        assert b.places == {}  # a may be reading it
        await a.register(coordinator)
        with pytest.raises(NotReady):
            await coordinator.report("a", a, PlaceReport(stale, {1: b"1"}, frozenset({1})))
        await asyncio.sleep(1)
        assert list(a.places) == [0]
        await a.answer(coordinator)
        assert b.places == {1: 1}

    virtually(main)


def test_a_member_that_is_gone_leaves_the_last_place_that_was_told() -> None:
    async def main(world: World) -> None:
        _leader, coordinator = await make(world)
        a, b = Member("a", []), Member("b", [])
        await a.register(coordinator)
        await coordinator.report("a", a, PlaceReport(a.term, {0: b"3", 1: b"4"}))
        await b.register(coordinator)
        coordinator.disconnected("a", a)
        await asyncio.sleep(59)
        assert b.places == {}
        await asyncio.sleep(2)
        assert b.places == {0: 3, 1: 4}
        with pytest.raises(NotReady):  # too late
            await a.answer(coordinator)

    virtually(main)


def test_another_process_of_the_name_need_not_know_what_is_owed() -> None:
    async def main(world: World) -> None:
        _leader, coordinator = await make(world)
        a, b = Member("a", []), Member("b", [])
        await a.register(coordinator)
        await coordinator.report("a", a, PlaceReport(a.term, {1: b"7"}))
        await b.register(coordinator)
        again = Member("a", [])
        await again.register(coordinator)
        assert a.was_displaced
        assert again.owed == {1: None}
        await again.answer(coordinator)
        assert b.places == {1: 7}

    virtually(main)


def test_members_that_do_not_hand_over_do_not_hold_others_up() -> None:
    """Other clients, and those of earlier versions."""

    async def main(world: World) -> None:
        leader, coordinator = await make(world)
        a, segments = await join(coordinator, "a")
        assert segments == [0, 1]
        b = Member("b", [])
        await b.register(coordinator)
        assert (b.places, a.pushed[-1].owed, a.pushed[-1].term) == ({1: 0}, (), 0)
        await leader.crash()
        _leader, coordinator = await make(world)
        await b.register(coordinator)
        c = Member("c", [])
        await c.register(coordinator)
        _a, segments = await join(coordinator, "a")
        await asyncio.sleep(1)
        assert sorted(number for each in held(coordinator).values() for number in each) == [0, 1]

    virtually(main)


def test_a_segment_younger_than_the_group_begins_at_its_beginning() -> None:
    async def main(world: World) -> None:
        _leader, coordinator = await make(world)
        a = Member("a", [])
        await a.register(coordinator)
        coordinator.on_layout_change(SegmentLayout.initial(2, 0).split(0, 1))
        await asyncio.sleep(1)
        found = {each.segment_id: each.place for each in a.pushed[-1].segments}
        assert found == {0: None, 1: None, 2: b"", 3: b""}
        with pytest.raises(InvalidArgument, match="segment 2"):
            await coordinator.report("a", a, PlaceReport(a.term, {2: b"x" * 65}))

    virtually(main)


def test_places_of_removed_segments_are_not_kept() -> None:
    async def main(world: World) -> None:
        _leader, coordinator = await make(world)
        a = Member("a", [])
        await a.register(coordinator)
        layout = SegmentLayout.initial(2, 0).split(0, 1)
        coordinator.on_layout_change(layout)
        await asyncio.sleep(1)
        await coordinator.report("a", a, PlaceReport(a.term, {0: b"1", 1: b"1", 9: b"1"}))
        coordinator.on_layout_change(layout.prune({0}))
        await asyncio.sleep(1)
        await coordinator.report("a", a, PlaceReport(a.term, {2: b"2"}))
        record = await world.subscription()
        assert record is not None
        assert record.places == {1: b"1", 2: b"2"}

    virtually(main)


@pytest.mark.parametrize("crash_after", [False, True])
@pytest.mark.parametrize("write", range(1, 26))
def test_each_message_once_wherever_the_leader_crashes(write: int, crash_after: bool) -> None:
    """A leader dies before or after any one of its writes; members come back to the next one and say again what it missed."""

    async def main(world: World) -> bool:
        log: list[tuple[int, int]] = []
        crashed = asyncio.Event()
        leader, coordinator = await make(world)
        members: dict[str, Member] = {}
        writes = 0
        inner = leader.store.inner

        async def count(call: Any, *arguments: Any, **options: Any) -> Any:
            nonlocal writes
            writes += 1
            if writes == write:
                result = await call(*arguments, **options) if crash_after else None
                crashed.set()
                await asyncio.Event().wait()
                return result
            return await call(*arguments, **options)

        class Store:
            def __getattr__(self, name: str) -> Any:
                call = getattr(inner, name)
                if name not in ("put", "delete"):
                    return call
                return lambda *arguments, **options: count(call, *arguments, **options)

        leader.store.inner = Store()

        async def attempt(act: Coroutine[Any, Any, None]) -> bool:
            """Whether it was done; if the leader died meanwhile, everybody registers with the next one."""
            nonlocal leader, coordinator
            work = asyncio.ensure_future(act)
            death = asyncio.ensure_future(crashed.wait())
            await asyncio.wait([work, death], return_when=asyncio.FIRST_COMPLETED)
            is_dead = crashed.is_set()
            death.cancel()
            if is_dead:
                work.cancel()
                crashed.clear()
                await leader.crash()
                leader, coordinator = await make(world)
                for member in members.values():
                    await member.register(coordinator)
                return False
            try:
                await work
            except BraidError:
                return False
            return True

        async def calm() -> None:
            """Everybody says what it owes, until nobody owes anything, reading meanwhile."""
            for _ in range(20):
                for member in list(members.values()):
                    member.read()
                    if member.owed:
                        await attempt(member.answer(coordinator))
                await attempt(asyncio.sleep(0.1))
            assert sorted(number for each in members.values() for number in each.places) == [0, 1]

        for action, name in [("join", "a"), ("join", "b"), ("leave", "a"), ("join", "c"), ("join", "a"), ("leave", "b")]:
            member = members.setdefault(name, Member(name, log))
            while True:
                done = await attempt(member.register(coordinator) if action == "join" else member.leave(coordinator))
                if done or (action == "leave" and name not in held(coordinator)):
                    break
            if action == "leave":
                del members[name]
            await calm()
        for segment in (0, 1):
            read = [place for number, place in log if number == segment]
            assert read == list(range(len(read)))
            assert len(read) > 50
        return writes >= write

    assert virtually(main) or write > 12


def test_the_record_of_a_group_ends_some_time_after_its_last_member() -> None:
    async def main(world: World) -> None:
        leader, coordinator = await make(world)
        a = Member("a", [])
        await a.register(coordinator)
        assert not await coordinator.end_if_empty(100)
        await a.leave(coordinator)
        assert not await coordinator.end_if_empty(100)
        await asyncio.sleep(50)
        await leader.crash()
        leader, coordinator = await make(world)
        await asyncio.sleep(40)
        assert not await coordinator.end_if_empty(100)
        b = Member("b", [])
        await b.register(coordinator)  # in time
        assert b.places == {0: 0, 1: 0}
        await asyncio.sleep(100)
        assert not await coordinator.end_if_empty(100)
        await b.leave(coordinator)
        await asyncio.sleep(99)
        assert not await coordinator.end_if_empty(100)
        await asyncio.sleep(2)
        assert await coordinator.end_if_empty(100)
        assert await coordinator.end_if_empty(100)  # its record could not be removed yet
        with pytest.raises(BraidError):
            await b.register(coordinator)

    virtually(main, config=ScalableConfig())


@pytest.mark.parametrize("seconds", [90, 110])
def test_a_group_that_should_have_ended_begins_anew(seconds: float) -> None:
    """The topic was left alone meanwhile, so nobody has looked."""

    async def main(world: World) -> None:
        leader, coordinator = await make(world)
        a = Member("a", [])
        await a.register(coordinator)
        a.read()
        a.read()
        await a.leave(coordinator)
        assert not await coordinator.end_if_empty(100)
        await leader.crash()
        await asyncio.sleep(seconds)
        _leader, coordinator = await make(world)
        b = Member("b", [])
        await b.register(coordinator)
        is_over = seconds > 100
        assert b.places == ({0: 0, 1: 0} if is_over else {0: 2, 1: 2})
        record = await world.subscription()
        assert record is not None
        assert (record.places == {}) is is_over
        assert record.empty_since_ms is None

    virtually(main, config=ScalableConfig(group_grace_seconds=100))


def test_partitions_that_are_added_begin_at_their_beginning() -> None:
    """Whoever gets them, and in whichever order: the layouts of a regular topic do not say which segments are younger."""

    def partitions(count: int) -> SegmentLayout:
        return SegmentLayout.synthetic([f"t-partition-{number}" for number in range(count)])

    async def main(world: World) -> None:
        await world.put_subscription(msgspec.structs.replace(GROUP, partitions=2))
        leader = await world.leader()
        record = await world.subscription()
        assert record is not None
        coordinator = leader.coordinator(partitions(2), record)
        await coordinator.restore()
        a = Member("a", [])
        registration = ConsumerRegistration("a", 1, a, says_goodbye=True, hands_over=True)
        assert [each.place for each in (await coordinator.register(registration)).segments] == [None, None]
        coordinator.on_layout_change(partitions(4))
        await asyncio.sleep(1)
        await coordinator.report("a", a, PlaceReport(leader.leadership.epoch, {3: b"7"}))
        await coordinator.unregister("a", a)
        assert [each.place for each in (await coordinator.register(registration)).segments] == [None, None, b"", b"7"]
        await coordinator.unregister("a", a)
        assert not await coordinator.end_if_empty(100)
        await asyncio.sleep(200)
        assert [each.place for each in (await coordinator.register(registration)).segments] == [None] * 4  # a new group
        coordinator.on_layout_change(partitions(5))
        await asyncio.sleep(1)
        assert [each.place for each in (await coordinator.register(registration)).segments] == [None] * 4 + [b""]

    virtually(main, config=ScalableConfig(group_grace_seconds=100))


def test_records_of_groups_are_read_as_they_were_written() -> None:
    record = SubscriptionMetadata(type="CHECKPOINT", places={3: b"\x00\xff"}, empty_since_ms=5)
    assert msgspec.json.decode(msgspec.json.encode(record), type=SubscriptionMetadata) == record
    assert ids(ConsumerAssignment(0)) == []
