"""`SubscriptionCoordinator`: assignment, drain before assign, who is told, and what a new leader makes of it."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from tests.unit.scalable.coordination import TOPIC, Client, Leader, World, held, ids, join, virtually

from braid.errors import Closed, ConsumerBusy, InvalidArgument, NotReady, StoreUnavailable
from braid.metadata.api import Record
from braid.metadata.claims import StaleLeader
from braid.model.layout import SegmentLayout
from braid.model.segments import physical_name
from braid.scalable.api import ConsumerAssignment, ConsumerRegistration
from braid.scalable.config import ScalableConfig
from braid.scalable.records import SubscriptionMetadata


def four() -> SegmentLayout:
    return SegmentLayout.initial(4, 0)


@pytest.mark.req("R468-25", "R468-27", "R468-28", "R468-30")
def test_consumers_share_the_segments_and_only_those_whose_share_changed_are_told() -> None:
    async def main(world: World) -> None:
        layout = four()
        world.segments.fill(TOPIC, layout, 0, "sub")
        coordinator = (await world.leader()).coordinator(layout)
        a, mine = await join(coordinator, "a")
        assert mine == [0, 1, 2, 3]
        b, mine = await join(coordinator, "b")
        assert mine == [2, 3]
        assert b.pushed == []  # the answer says it
        assert [ids(each) for each in a.pushed] == [[0, 1]]
        assert a.pushed[0].layout_epoch == 0
        assert a.pushed[0].segments[0].topic == str(physical_name(TOPIC, layout.segment(0)))
        assert a.pushed[0].segments[0].hash_range == layout.segment(0).hash_range
        c, mine = await join(coordinator, "c")
        assert mine == [3]
        assert len(a.pushed) == 1
        assert [ids(each) for each in b.pushed] == [[2]]
        await coordinator.unregister("b", b)
        assert held(coordinator) == {"a": (0, 1), "c": (2, 3)}
        assert len(a.pushed) == 1
        assert ids(c.pushed[-1]) == [2, 3]

    virtually(main)


@pytest.mark.req("R468-31")
def test_checkpoint_consumers_share_all_segments_without_a_barrier() -> None:
    async def main(world: World) -> None:
        layout = SegmentLayout.initial(1, 0).split(0, 1)
        coordinator = (await world.leader()).coordinator(layout, SubscriptionMetadata(type="CHECKPOINT"))
        await join(coordinator, "a")
        await join(coordinator, "b")
        assert sorted(number for each in held(coordinator).values() for number in each) == [0, 1, 2]
        await asyncio.sleep(60)
        assert world.segments.trace == []  # they have no cursors to ask about
        assert coordinator.state().state == "RUNNING"

    virtually(main)


@pytest.mark.req("R468-51", "R468-52", "R468-72")
@pytest.mark.inv("INV8")
def test_children_are_assigned_when_all_their_ancestors_are_drained() -> None:
    async def main(world: World) -> None:
        layout = SegmentLayout.initial(1, 0)
        world.segments.fill(TOPIC, layout, 3, "sub")
        coordinator = (await world.leader()).coordinator(layout)
        a, _ = await join(coordinator, "a")
        layout = layout.split(0, world.clock.now_ms()).split(1, world.clock.now_ms())  # 0 -> 1, 2; 1 -> 3, 4
        world.segments.fill(TOPIC, layout, 1, "sub")
        coordinator.on_layout_change(layout)
        await asyncio.sleep(30)
        assert a.pushed == []
        assert coordinator.state().state == "DRAINING"
        root, child = world.segments.at(layout, 0), world.segments.at(layout, 1)
        child.read["sub"] = 1  # out of order: this alone opens nothing
        await asyncio.sleep(6)
        assert a.pushed == []
        root.read["sub"] = 3
        await asyncio.sleep(6)
        assert ids(a.pushed[-1]) == [3, 4, 2]
        assert coordinator.state().state == "RUNNING"
        assert coordinator.blocked_by() == []

    virtually(main)


def test_whoever_loses_a_segment_is_told_before_whoever_gets_it() -> None:
    """Else the one would try to attach to it while the other still reads."""
    told: list[tuple[str, list[int]]] = []

    class Noting(Client):
        def push(self, assignment: ConsumerAssignment) -> None:
            told.append((self.name, ids(assignment)))

    async def main(world: World) -> None:
        layout = SegmentLayout.initial(6, 0)
        world.segments.fill(TOPIC, layout, 0, "sub")
        coordinator = (await world.leader()).coordinator(layout)
        for name in ("a", "b"):
            await join(coordinator, name, Noting(name))
        assert held(coordinator) == {"a": (0, 1, 2), "b": (3, 4, 5)}
        told.clear()
        merged = layout.merge(0, 1, 5).merge(6, 2, 6)
        world.segments.fill(TOPIC, merged, 0, "sub")
        coordinator.on_layout_change(merged)
        await asyncio.sleep(20)
        assert held(coordinator) == {"a": (7, 5), "b": (3, 4)}
        has = {"a": {0, 1, 2}, "b": {3, 4, 5}}
        for name, segments in told:
            has[name] = set(segments)
            assert has["a"].isdisjoint(has["b"]), told

    virtually(main)


@pytest.mark.inv("INV8")
def test_drained_needs_a_terminated_segment_and_a_missing_sealed_topic_counts() -> None:
    async def main(world: World) -> None:
        layout = SegmentLayout.initial(2, 0).merge(0, 1, 5)
        world.segments.fill(TOPIC, layout, 0, "sub")
        world.segments.at(layout, 0).is_sealed = False  # empty, but the owner says that more may come
        del world.segments.topics[str(physical_name(TOPIC, layout.segment(1)))]
        coordinator = (await world.leader()).coordinator(layout)
        a, mine = await join(coordinator, "a")
        assert mine == [0]
        await asyncio.sleep(20)
        assert a.pushed == []
        world.segments.at(layout, 0).is_sealed = True
        await asyncio.sleep(6)
        assert [ids(each) for each in a.pushed] == [[2]]

    virtually(main)


@pytest.mark.inv("INV8")
def test_a_sealed_segment_without_a_cursor_gets_one() -> None:
    async def main(world: World) -> None:
        layout = SegmentLayout.initial(1, 0).split(0, 1)
        world.segments.fill(TOPIC, layout, 2)
        coordinator = (await world.leader()).coordinator(layout, SubscriptionMetadata(initial="latest", created_at_epoch=1))
        await join(coordinator, "a")
        await asyncio.sleep(1)
        assert world.segments.at(layout, 0).read == {"sub": 2}
        assert held(coordinator) == {"a": (1, 2)}

    virtually(main)


def test_drain_looks_come_soon_and_then_slower_and_stop_without_consumers() -> None:
    async def main(world: World) -> None:
        layout = SegmentLayout.initial(1, 0)
        world.segments.fill(TOPIC, layout, 3, "sub")
        coordinator = (await world.leader()).coordinator(layout)
        a, _ = await join(coordinator, "a")
        world.segments.at(layout, 0).attached.append("a")
        await asyncio.sleep(10)  # the look at who is attached has seen it and is quiet now
        layout = layout.split(0, 1)
        world.segments.fill(TOPIC, layout, 0, "sub")
        coordinator.on_layout_change(layout)
        world.segments.trace.clear()
        await asyncio.sleep(0.5)
        assert len(world.segments.trace) >= 2
        await asyncio.sleep(20)
        world.segments.trace.clear()
        await asyncio.sleep(50)
        assert 9 <= len(world.segments.trace) <= 11  # every drain_poll_seconds
        await coordinator.unregister("a", a)
        world.segments.trace.clear()
        await asyncio.sleep(60)
        assert world.segments.trace == []

    virtually(main)


def test_the_end_of_a_segment_that_is_being_read_is_noticed_soon() -> None:
    async def main(world: World) -> None:
        layout = SegmentLayout.initial(1, 0)
        world.segments.fill(TOPIC, layout, 100, "sub")
        coordinator = (await world.leader()).coordinator(layout)
        a, _ = await join(coordinator, "a")
        layout = layout.split(0, 1)
        world.segments.fill(TOPIC, layout, 0, "sub")
        coordinator.on_layout_change(layout)
        for _message in range(100):
            await asyncio.sleep(0.3)
            world.segments.at(layout, 0).read["sub"] += 1
        assert a.pushed == []
        await asyncio.sleep(0.6)
        assert [ids(each) for each in a.pushed] == [[1, 2]]

    virtually(main)


def test_segments_that_are_held_back_are_asked_once_and_again_when_they_are_not() -> None:
    async def main(world: World) -> None:
        layout = SegmentLayout.initial(1, 0)
        for _generation in range(12):
            layout = layout.split(max(layout.active_segments), 1)
        world.segments.fill(TOPIC, layout, 1, "sub")
        coordinator = (await world.leader()).coordinator(layout)
        a, _ = await join(coordinator, "a")
        world.segments.at(layout, 0).attached.append("a")
        await asyncio.sleep(30)
        world.segments.trace.clear()
        await asyncio.sleep(50)
        assert len(world.segments.trace) <= 11  # the one that is read, not all twelve
        for stored in world.segments.topics.values():
            stored.read["sub"] = 1
        await asyncio.sleep(10)
        assert set(ids(a.pushed[-1])) == set(layout.active_segments)

    virtually(main)


def test_an_owner_that_cannot_be_asked_holds_up_its_own_segment_only() -> None:
    async def main(world: World) -> None:
        layout = SegmentLayout.initial(2, 0).split(0, 1).split(1, 2)  # 0 -> 2, 3; 1 -> 4, 5
        world.segments.fill(TOPIC, layout, 0, "sub")
        broken = str(physical_name(TOPIC, layout.segment(0)))
        world.segments.fail = lambda _operation, segment: NotReady("not now") if segment == broken else None
        coordinator = (await world.leader()).coordinator(layout)
        await join(coordinator, "a")
        await asyncio.sleep(1)
        assert held(coordinator) == {"a": (0, 4, 5)}
        world.segments.fail = lambda _operation, _segment: None
        await asyncio.sleep(6)
        assert held(coordinator) == {"a": (2, 3, 4, 5)}

    virtually(main)


@pytest.mark.req("R468-67")
@pytest.mark.inv("INV8")
def test_a_new_leader_restores_the_assignment_and_the_barrier_and_moves_nothing() -> None:
    async def main(world: World) -> None:
        layout = SegmentLayout.initial(2, 0).split(0, 1)  # 0 -> 2, 3; 1 is active
        world.segments.fill(TOPIC, layout, 1, "sub")
        first = await world.leader()
        coordinator = first.coordinator(layout)
        await join(coordinator, "b")
        await join(coordinator, "a")
        world.segments.at(layout, 0).read["sub"] = 1
        await asyncio.sleep(6)
        before = held(coordinator)
        assert sorted(number for each in before.values() for number in each) == [1, 2, 3]
        layout = layout.split(1, 9)  # 1 -> 4, 5, not drained
        world.segments.fill(TOPIC, layout, 1, "sub")
        await first.crash()
        owners_are_down = [True]
        world.segments.fail = lambda _operation, _segment: NotReady("not now") if owners_are_down[0] else None
        second = await world.leader()
        restored = second.coordinator(layout)
        await restored.restore()
        assert held(restored) == before  # from the records alone, nobody asked
        a, mine = await join(restored, "a")
        assert tuple(mine) == before["a"]
        await asyncio.sleep(10)
        assert held(restored) == before
        owners_are_down[0] = False
        await asyncio.sleep(6)
        assert held(restored) == before
        assert a.pushed == []
        assert {number for each in held(restored).values() for number in each} == {1, 2, 3}

    virtually(main)


@pytest.mark.inv("INV8")
def test_a_new_leader_that_knows_nothing_gives_out_roots_only() -> None:
    async def main(world: World) -> None:
        layout = SegmentLayout.initial(1, 0).split(0, 1)
        world.segments.fill(TOPIC, layout, 1, "sub")
        world.segments.fail = lambda _operation, _segment: NotReady("not now")
        coordinator = (await world.leader()).coordinator(layout)
        _, mine = await join(coordinator, "a")
        assert mine == [0]

    virtually(main)


@pytest.mark.inv("INV4")
def test_a_deposed_leader_tells_nobody_anything_and_writes_nothing() -> None:
    async def main(world: World) -> None:
        layout = four()
        world.segments.fill(TOPIC, layout, 0, "sub")
        first = await world.leader()
        coordinator = first.coordinator(layout)
        a, _ = await join(coordinator, "a")
        first.election.abandon()
        first.handle.pause_heartbeat()
        await asyncio.sleep(60)
        second = await world.leader()
        successor = second.coordinator(layout)
        await successor.restore()
        await join(successor, "b")
        first.handle.resume_heartbeat()
        before = await world.registrations()
        coordinator.on_layout_change(layout.split(0, 1))
        with pytest.raises(StaleLeader):
            await join(coordinator, "c")
        with pytest.raises(StaleLeader):
            await coordinator.unregister("a", a)
        await asyncio.sleep(30)
        assert a.pushed == []
        assert await world.registrations() == before
        assert before["a"].leader_epoch == before["b"].leader_epoch == second.leadership.epoch

    virtually(main)


@pytest.mark.inv("INV4")
def test_a_leader_that_is_deposed_while_it_writes_tells_nobody() -> None:
    async def main(world: World) -> None:
        layout = four()
        world.segments.fill(TOPIC, layout, 0, "sub")
        leader = await world.leader()
        coordinator = leader.coordinator(layout)
        a, _ = await join(coordinator, "a")
        put = leader.store.inner.put

        async def lengthy(key: str, value: bytes, **options: Any) -> Record:
            made = await put(key, value, **options)
            if key.endswith("/b") and b'"segments"' in value:
                leader.leadership.step_down()
            return made

        leader.store.inner.put = lengthy  # type: ignore[method-assign]
        with pytest.raises(StaleLeader):
            await join(coordinator, "b")
        await asyncio.sleep(30)
        assert a.pushed == []

    virtually(main)


@pytest.mark.inv("INV4")
@pytest.mark.parametrize("is_join", [True, False])
def test_a_late_write_of_the_old_leader_is_refused_by_the_record(is_join: bool) -> None:
    """Its check was in time, its write was not: the registration was claimed meanwhile."""

    async def main(world: World) -> None:
        layout = four()
        first = await world.leader()
        coordinator = first.coordinator(layout)
        a, _ = await join(coordinator, "a")
        first.election.abandon()  # it never hears of its end
        await world.store.delete(first.leadership.key)
        second = await world.leader()
        await second.coordinator(layout).restore()
        assert first.leadership.holds()
        with pytest.raises(StaleLeader):
            await (join(coordinator, "b") if is_join else coordinator.unregister("a", a))
        assert not first.leadership.holds()
        assert (await world.registrations())["a"].segments == (0, 1, 2, 3)

    virtually(main)


def test_a_store_that_refuses_delays_the_record_but_not_the_consumers() -> None:
    async def main(world: World) -> None:
        layout = four()
        world.segments.fill(TOPIC, layout, 0, "sub")
        leader = await world.leader()
        coordinator = leader.coordinator(layout)
        a, _ = await join(coordinator, "a")
        b, _ = await join(coordinator, "b")
        leader.store.refuse = lambda key: StoreUnavailable("down") if key.endswith("/a") else None
        await coordinator.unregister("b", b)
        assert ids(a.pushed[-1]) == [0, 1, 2, 3]
        await asyncio.sleep(2)
        assert (await world.registrations())["a"].segments == (0, 1)
        leader.store.refuse = lambda _key: None
        await asyncio.sleep(2)
        assert (await world.registrations())["a"].segments == (0, 1, 2, 3)

    virtually(main)


async def interrupted(act: Coroutine[Any, Any, Any], leader: Leader, key: str) -> None:
    """Cancel an act while it writes a record for the second time, as the loss of its client's connection does."""
    task = asyncio.get_running_loop().create_task(act)
    writes = 0

    def is_second(written: str) -> bool:
        nonlocal writes
        writes += written.endswith(key)
        if writes == 2:
            task.cancel()
        return writes == 2

    leader.store.is_lost = is_second
    with pytest.raises(asyncio.CancelledError):
        await task
    leader.store.is_lost = lambda _key: False


@pytest.mark.req("R468-63")
def test_a_registration_that_is_interrupted_leaves_the_records_as_the_consumers_are_told() -> None:
    """W4: whoever came next under the name was told segments that its record did not have, and could attach to none."""

    async def main(world: World) -> None:
        layout = four()
        world.segments.fill(TOPIC, layout, 0, "sub")
        leader = await world.leader()
        coordinator = leader.coordinator(layout)
        await coordinator.restore()
        await interrupted(coordinator.register(ConsumerRegistration("a", 1, Client())), leader, "/a")
        _, mine = await join(coordinator, "a")
        assert mine == [0, 1, 2, 3]
        await asyncio.sleep(1)
        assert (await world.registrations())["a"].segments == (0, 1, 2, 3)

    virtually(main)


def test_whoever_loses_a_segment_by_an_act_that_is_interrupted_is_told() -> None:
    async def main(world: World) -> None:
        layout = four()
        world.segments.fill(TOPIC, layout, 0, "sub")
        leader = await world.leader()
        coordinator = leader.coordinator(layout)
        a, _ = await join(coordinator, "a")
        await interrupted(coordinator.register(ConsumerRegistration("b", 1, Client())), leader, "/b")
        await asyncio.sleep(1)
        assert [ids(each) for each in a.pushed] == [[0, 1]]
        found = await world.registrations()
        assert (found["a"].segments, found["b"].segments) == ((0, 1), (2, 3))

    virtually(main)


def test_whoever_gets_a_segment_by_a_leave_that_is_interrupted_is_told() -> None:
    async def main(world: World) -> None:
        layout = four()
        world.segments.fill(TOPIC, layout, 0, "sub")
        leader = await world.leader()
        coordinator = leader.coordinator(layout)
        a, _ = await join(coordinator, "a")
        b, _ = await join(coordinator, "b")
        task = asyncio.get_running_loop().create_task(coordinator.unregister("b", b))
        leader.store.is_lost = lambda _key: task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        leader.store.is_lost = lambda _key: False
        await asyncio.sleep(1)
        assert ids(a.pushed[-1]) == [0, 1, 2, 3]
        assert set(await world.registrations()) == {"a"}

    virtually(main)


def test_a_consumer_that_cannot_be_recorded_is_not_registered() -> None:
    async def main(world: World) -> None:
        leader = await world.leader()
        coordinator = leader.coordinator(four())
        leader.store.refuse = lambda _key: StoreUnavailable("down")
        with pytest.raises(StoreUnavailable):
            await join(coordinator, "a")
        assert coordinator.state().consumer_count == 0
        leader.store.refuse = lambda _key: None
        _, mine = await join(coordinator, "a")
        assert mine == [0, 1, 2, 3]

    virtually(main)


@pytest.mark.inv("INV17")
def test_bounds_and_impossible_names() -> None:
    async def main(world: World) -> None:
        coordinator = (await world.leader()).coordinator(four())
        await join(coordinator, "a")
        await join(coordinator, "b")
        with pytest.raises(ConsumerBusy, match="max_consumers_per_subscription"):
            await join(coordinator, "c")
        _, mine = await join(coordinator, "b")  # not a new one
        assert mine == [2, 3]
        for name in ("", "x" * 1025):
            with pytest.raises(InvalidArgument, match="name of 1 to"):
                await join(coordinator, name)
        await coordinator.close()

    virtually(main, config=ScalableConfig(max_consumers_per_subscription=2))


def test_names_with_slashes_and_percents_are_encoded_in_paths() -> None:
    async def main(world: World) -> None:
        first = await world.leader()
        coordinator = first.coordinator(four(), name="a/b%2F")
        await join(coordinator, "x/../y%")
        await first.crash()
        restored = (await world.leader()).coordinator(four(), name="a/b%2F")
        await restored.restore()
        assert held(restored) == {"x/../y%": (0, 1, 2, 3)}

    virtually(main)


def test_closing_tells_the_consumers_and_ends_everything() -> None:
    async def main(world: World) -> None:
        coordinator = (await world.leader()).coordinator(four())
        a, _ = await join(coordinator, "a")
        await coordinator.close()
        await coordinator.close()
        assert isinstance(a.error, NotReady)
        with pytest.raises(Closed):
            await join(coordinator, "b")
        coordinator.disconnected("a", a)
        await asyncio.sleep(100)
        assert list(await world.registrations()) == ["a"]  # nothing was written

    virtually(main)


@pytest.mark.req("R468-30")
@pytest.mark.inv("INV8")
@pytest.mark.parametrize("seed", range(20))
def test_in_a_storm_every_segment_has_one_reader_at_most_and_never_before_its_ancestors_are_drained(seed: int) -> None:
    async def main(world: World) -> None:
        random = world.runtime.random
        layout = SegmentLayout.initial(2, 0)
        world.segments.fill(TOPIC, layout, 1, "sub")
        leader = await world.leader()
        coordinator = leader.coordinator(layout)
        clients: dict[str, Client] = {}

        def check() -> None:
            shares = [number for each in held(coordinator).values() for number in each]
            assert len(shares) == len(set(shares))
            for number in shares:
                for above in layout.ancestors(number):
                    stored = world.segments.at(layout, above)
                    assert stored.is_sealed and stored.read["sub"] == len(stored.times), (number, above)

        for _turn in range(60):
            action = random.random()
            name = f"c{random.randrange(5)}"
            if action < 0.25:
                clients[name], _ = await join(coordinator, name)
            elif action < 0.4 and name in clients:
                await coordinator.unregister(name, clients.pop(name))
            elif action < 0.5 and name in clients:
                coordinator.disconnected(name, clients[name])
            elif action < 0.7:
                active = layout.active_in_order
                at = random.randrange(len(active))
                if random.random() < 0.5 and len(active) < 8:
                    layout = layout.split(active[at].segment_id, world.clock.now_ms())
                elif at + 1 < len(active):
                    layout = layout.merge(active[at].segment_id, active[at + 1].segment_id, world.clock.now_ms())
                world.segments.fill(TOPIC, layout, 1, "sub")
                coordinator.on_layout_change(layout)
            elif action < 0.75:
                await leader.crash()
                leader = await world.leader()
                coordinator = leader.coordinator(layout)
                await coordinator.restore()
            else:
                for each in held(coordinator).values():
                    for number in each:
                        if random.random() < 0.5:
                            stored = world.segments.at(layout, number)
                            stored.read["sub"] = len(stored.times)
            await asyncio.sleep(random.random() * 2)
            check()
        await join(coordinator, "c0")
        for stored in world.segments.topics.values():
            stored.read["sub"] = len(stored.times)
        await asyncio.sleep(70)
        assert {number for each in held(coordinator).values() for number in each} == set(layout.active_segments)

    virtually(main, seed=seed)


def test_a_connection_lost_during_registration_is_not_registered_as_alive() -> None:
    async def main(world: World) -> None:
        layout = SegmentLayout.initial(1, 0).split(0, 1)
        world.segments.fill(TOPIC, layout, 1, "sub")
        coordinator = (await world.leader()).coordinator(layout)
        await coordinator.restore()
        client = Client()
        task = asyncio.get_running_loop().create_task(coordinator.register(ConsumerRegistration("a", 1, client)))
        await asyncio.sleep(0.0005)
        coordinator.disconnected("a", client)
        with pytest.raises(Closed):
            await task
        assert coordinator.state().connected_consumers == 0
        await asyncio.sleep(61)
        assert coordinator.state().consumer_count == 0

    virtually(main)


@pytest.mark.inv("INV15")
def test_a_consumer_that_cannot_be_told_costs_the_others_nothing() -> None:
    class Deaf(Client):
        def push(self, assignment: ConsumerAssignment) -> None:
            raise ValueError("cannot be encoded")

    async def main(world: World) -> None:
        layout = four()
        world.segments.fill(TOPIC, layout, 0, "sub")
        coordinator = (await world.leader()).coordinator(layout)
        await join(coordinator, "a", Deaf("a"))
        b, _ = await join(coordinator, "b")
        c, _ = await join(coordinator, "c")
        assert [ids(each) for each in b.pushed] == [[2]]
        coordinator.on_layout_change(layout.split(3, 5))
        world.segments.fill(TOPIC, layout.split(3, 5), 0, "sub")
        await asyncio.sleep(30)
        await coordinator.unregister("c", c)
        await asyncio.sleep(30)
        held_now = held(coordinator)
        assert ids(b.pushed[-1]) == list(held_now["b"])
        assert sorted(number for each in held_now.values() for number in each) == [0, 1, 2, 4, 5]

    virtually(main)
