"""Create, delete, seek and clear-backlog of subscriptions: what they do, and what is left when they are cut anywhere."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.unit.scalable.coordination import TOPIC, Client, Leader, World, held, ids, join, virtually

from braid.errors import (
    Conflict,
    InvalidArgument,
    InvalidTopicName,
    LedgerLost,
    NotReady,
    OutcomeUnknown,
    PreconditionFailed,
    StoreMismatch,
    StoreUnavailable,
    SubscriptionLimit,
    SubscriptionNotFound,
    TopicNotFound,
)
from braid.metadata.api import Record
from braid.metadata.claims import StaleLeader
from braid.model.layout import SegmentLayout
from braid.model.segments import physical_name
from braid.runtime.plans import Moment, watching
from braid.scalable.api import ConsumerRegistration
from braid.scalable.config import ScalableConfig
from braid.scalable.records import SubscriptionMetadata
from braid.scalable.subscription_plans import SubscriptionPlans


def grown() -> SegmentLayout:
    """0 -> 2, 3; 1 is active; sealed at 50, children made at 50."""
    return SegmentLayout.initial(2, 10).split(0, 50)


async def coordinated(world: World, leader: Leader, layout: SegmentLayout, name: str = "sub") -> None:
    """A subscription with a coordinator, as the controller makes it."""
    record = await leader.plans(lambda: layout).create(name, "STREAM", "earliest")
    await leader.coordinator(layout, record, name=name).restore()


@pytest.mark.req("R468-37", "R468-81")
@pytest.mark.parametrize(("initial", "read"), [("earliest", 0), ("latest", 3)])
def test_a_new_subscription_has_cursors_on_every_segment_sealed_and_active(initial: str, read: int) -> None:
    async def main(world: World) -> None:
        layout = grown()
        world.segments.fill(TOPIC, layout, 3)
        plans = (await world.leader()).plans(lambda: layout)
        record = await plans.create("sub", "STREAM", initial)  # type: ignore[arg-type]
        assert [stored.read for stored in world.segments.topics.values()] == [{"sub": read}] * 4
        assert record == await world.subscription()
        assert (record.type, record.initial, record.created_at_epoch, record.pending) == ("STREAM", initial, 1, None)
        assert await plans.create("sub", "STREAM", "latest") == record  # the one that is there
        assert world.segments.at(layout, 1).read == {"sub": read}

    virtually(main)


def test_checkpoint_subscriptions_have_a_record_and_no_cursors() -> None:
    async def main(world: World) -> None:
        layout = grown()
        world.segments.fill(TOPIC, layout, 3)
        plans = (await world.leader()).plans(lambda: layout)
        assert (await plans.create("group", "CHECKPOINT", "earliest")).type == "CHECKPOINT"
        assert all(not stored.read for stored in world.segments.topics.values())
        with pytest.raises(PreconditionFailed, match="checkpoint"):
            await plans.seek("group", 5)
        await plans.delete("group")
        assert world.segments.trace == []
        assert await world.subscription("group") is None

    virtually(main)


def test_bad_input_has_its_error_and_changes_nothing() -> None:
    async def main(world: World) -> None:
        layout = grown()
        world.segments.fill(TOPIC, layout, 3)
        plans = (await world.leader()).plans(lambda: layout)
        await plans.create("sub", "QUEUE", "earliest")
        world.segments.trace.clear()
        with pytest.raises(Conflict, match="QUEUE"):
            await plans.create("sub", "STREAM", "earliest")
        for name in ("", " x", "a/b"):
            with pytest.raises(InvalidTopicName):
                await plans.create(name, "STREAM", "earliest")
        with pytest.raises(InvalidArgument, match="-1"):
            await plans.seek("sub", -1)
        for call in (plans.delete("none"), plans.seek("none", 1), plans.clear_backlog("none")):
            with pytest.raises(SubscriptionNotFound, match="none"):
                await call
        await plans.create("second", "STREAM", "earliest")
        with pytest.raises(SubscriptionLimit, match="max_subscriptions_per_topic"):
            await plans.create("third", "STREAM", "earliest")
        assert await world.subscription("third") is None

    virtually(main, config=ScalableConfig(max_subscriptions_per_topic=2))


@pytest.mark.req("R468-82")
def test_deleting_a_subscription_ends_its_consumers_and_removes_every_cursor_and_record() -> None:
    async def main(world: World) -> None:
        layout = grown()
        world.segments.fill(TOPIC, layout, 3)
        leader = await world.leader()
        await coordinated(world, leader, layout)
        client, _ = await join(leader.coordinators["sub"], "a")
        del world.segments.topics[str(physical_name(TOPIC, layout.segment(0)))]  # a missing sealed topic is no obstacle
        await leader.plans(lambda: layout).delete("sub")
        assert isinstance(client.error, SubscriptionNotFound)
        assert all(not stored.read for stored in world.segments.topics.values())
        assert await world.registrations() == {}
        assert await world.subscription() is None

    virtually(main)


@pytest.mark.inv("INV8")
def test_a_seek_takes_everything_away_resets_and_gives_back_in_order() -> None:
    async def main(world: World) -> None:
        layout = grown()
        world.segments.fill(TOPIC, layout, 4, "sub")
        for number, times in {0: [20, 30, 40, 45], 1: [20, 40, 60, 80], 2: [55, 56, 57, 58], 3: [51, 60, 70, 80]}.items():
            stored = world.segments.at(layout, number)
            stored.times, stored.read["sub"] = times, 4
        leader = await world.leader()
        await coordinated(world, leader, layout)
        coordinator = leader.coordinators["sub"]
        a, _ = await join(coordinator, "a")
        b, _ = await join(coordinator, "b")
        before = held(coordinator)
        assert sorted(number for each in before.values() for number in each) == [1, 2, 3]  # 0 is drained
        a.pushed.clear()
        world.segments.at(layout, 1).attached.append("somebody")

        def let_go(operation: str, segment: str) -> None:
            if operation == "seek":
                assert held(coordinator) == {"a": (), "b": ()}
                assert coordinator.state().state == "RESETTING"
                assert [ids(each) for each in a.pushed] == [[]]
            if a.pushed and operation == "backlog" and segment.endswith("-1"):
                world.segments.at(layout, 1).attached.clear()

        world.segments.hook = let_go
        began = asyncio.get_running_loop().time()
        await leader.plans(lambda: layout).seek("sub", 40)
        assert asyncio.get_running_loop().time() - began < 2.5  # it did not wait for longer than needed
        read = [world.segments.at(layout, number).read["sub"] for number in range(4)]
        assert read == [2, 1, 0, 0]  # the owner's append times decide; segments made later are read whole
        assert sorted(number for each in held(coordinator).values() for number in each) == [0, 1]  # the barrier is back
        world.segments.at(layout, 0).read["sub"] = 4
        await asyncio.sleep(6)
        assert sorted(number for each in held(coordinator).values() for number in each) == [1, 2, 3]
        assert (await world.subscription()).pending is None  # type: ignore[union-attr]
        assert b.pushed[0].segments == ()

    virtually(main)


@pytest.mark.inv("INV8")
def test_a_reset_waits_also_for_those_who_are_attached_and_not_registered_yet() -> None:
    async def main(world: World) -> None:
        layout = SegmentLayout.initial(2, 10)
        world.segments.fill(TOPIC, layout, 2, "sub")
        first = await world.leader()
        await coordinated(world, first, layout)
        await join(first.coordinators["sub"], "a")
        await first.crash()
        leader = await world.leader()
        coordinator = leader.coordinator(layout, await world.subscription())
        await coordinator.restore()
        attached = world.segments.at(layout, 1).attached
        attached.append("a-seg-1")
        loop = asyncio.get_running_loop()
        loop.call_later(1.0, attached.clear)
        resets: list[tuple[tuple[int, ...], bool]] = []

        def look(operation: str, _segment: str) -> None:
            if operation == "seek":
                resets.append((held(coordinator)["a"], bool(attached)))

        world.segments.hook = look
        await leader.plans(lambda: layout).seek("sub", 0)
        assert resets == [((), False)] * 2
        assert sorted(held(coordinator)["a"]) == [0, 1]

    virtually(main)


def test_assignments_tell_how_often_the_subscription_was_reset() -> None:
    async def main(world: World) -> None:
        layout = SegmentLayout.initial(2, 10)
        world.segments.fill(TOPIC, layout, 2, "sub")
        first = await world.leader()
        await coordinated(world, first, layout)
        coordinator = first.coordinators["sub"]
        a, _ = await join(coordinator, "a")
        plans = first.plans(lambda: layout)
        await plans.seek("sub", 0)
        await plans.clear_backlog("sub")
        told = [(ids(each), each.resets) for each in a.pushed]
        assert told == [([], 0), ([0, 1], 1), ([], 1), ([0, 1], 2)]
        await plans.roll_forward()
        assert (await world.subscription()).resets == 2  # type: ignore[union-attr]

        async def crash(step: str, when: Moment) -> None:
            if (step, when) == ("seek:finish", "after"):
                raise Crash

        with watching(crash), pytest.raises(Crash):
            await plans.seek("sub", 0)
        await first.crash()
        second = await world.leader()
        coordinator = second.coordinator(layout, await world.subscription())
        await second.plans(lambda: layout).roll_forward()
        a = Client("a")
        assert (await coordinator.register(ConsumerRegistration("a", 1, a))).resets == 3
        await asyncio.sleep(1)
        assert [(ids(each), each.resets) for each in a.pushed] == [([0, 1], 3)]

    virtually(main)


def test_after_a_reset_everyone_has_what_it_had() -> None:
    async def main(world: World) -> None:
        layout = SegmentLayout.initial(6, 10)
        world.segments.fill(TOPIC, layout, 2, "sub")
        leader = await world.leader()
        await coordinated(world, leader, layout)
        coordinator = leader.coordinators["sub"]
        for name in ("c", "a", "b"):
            await join(coordinator, name)
        before = held(coordinator)
        await leader.plans(lambda: layout).clear_backlog("sub")
        assert held(coordinator) == before
        assert all(stored.read == {"sub": 2} for stored in world.segments.topics.values())

    virtually(main)


def test_a_drained_look_that_began_before_a_seek_proves_nothing() -> None:
    async def main(world: World) -> None:
        layout = SegmentLayout.initial(1, 10).split(0, 50)
        world.segments.fill(TOPIC, layout, 2, "sub")
        leader = await world.leader()
        await coordinated(world, leader, layout)
        coordinator = leader.coordinators["sub"]
        await join(coordinator, "a")
        world.segments.at(layout, 0).read["sub"] = 2
        world.segments.hook = lambda operation, _segment: coordinator.drains.forget() if operation == "backlog" else None
        await coordinator.drains._look()
        assert coordinator.drains.drained == set()

    virtually(main)


def test_a_missing_cursor_is_made_and_a_missing_sealed_topic_is_skipped() -> None:
    async def main(world: World) -> None:
        layout = grown()
        world.segments.fill(TOPIC, layout, 2)
        await world.put_subscription(SubscriptionMetadata(type="QUEUE", created_at_epoch=0))
        del world.segments.topics[str(physical_name(TOPIC, layout.segment(0)))]
        plans = (await world.leader()).plans(lambda: layout)
        await plans.clear_backlog("sub")
        assert [stored.read for stored in world.segments.topics.values()] == [{"sub": 2}] * 3
        await plans.seek("sub", 0)
        assert [stored.read for stored in world.segments.topics.values()] == [{"sub": 0}] * 3
        del world.segments.topics[str(physical_name(TOPIC, layout.segment(1)))]  # an active one is needed
        with pytest.raises(TopicNotFound):
            await plans.seek("sub", 0)

    virtually(main)


def test_an_owner_that_fails_leaves_the_operation_pending_and_the_consumers_without_segments() -> None:
    async def main(world: World) -> None:
        layout = grown()
        world.segments.fill(TOPIC, layout, 2, "sub")
        leader = await world.leader()
        await coordinated(world, leader, layout)
        coordinator = leader.coordinators["sub"]
        await join(coordinator, "a")
        world.segments.fail = lambda operation, segment: NotReady("x") if operation == "seek" and "-1" in segment[-3:] else None
        plans = leader.plans(lambda: layout)
        with pytest.raises(NotReady):
            await plans.seek("sub", 5)
        record = await world.subscription()
        assert record is not None and record.pending is not None and record.pending.kind == "seek"
        await asyncio.sleep(30)
        assert held(coordinator) == {"a": ()}
        with pytest.raises(NotReady):
            await plans.roll_forward()
        world.segments.fail = lambda _operation, _segment: None
        await plans.roll_forward()
        assert held(coordinator) != {"a": ()}
        assert (await world.subscription()).pending is None  # type: ignore[union-attr]

    virtually(main)


class Crash(BaseException):
    """The leader dies here."""


Operation = Callable[[SubscriptionPlans], Awaitable[object]]
OPERATIONS: dict[str, Operation] = {
    "create": lambda plans: plans.create("new", "STREAM", "earliest"),
    "delete": lambda plans: plans.delete("sub"),
    "seek": lambda plans: plans.seek("sub", 40),
    "clear-backlog": lambda plans: plans.clear_backlog("sub"),
}


async def steps_of(world: World, operation: Operation) -> list[str]:
    seen: list[str] = []

    async def note(name: str, moment: Moment) -> None:
        if moment == "before":
            seen.append(name)

    plans = await prepared(world)
    with watching(note):
        await operation(plans)
    return seen


async def prepared(world: World) -> SubscriptionPlans:
    layout = grown()
    world.segments.fill(TOPIC, layout, 2, "sub")
    leader = await world.leader()
    world.segments.at(layout, 0).read["sub"] = 2
    await coordinated(world, leader, layout)
    await join(leader.coordinators["sub"], "a")
    await join(leader.coordinators["sub"], "b")
    world.leaders = [leader]  # type: ignore[attr-defined]
    return leader.plans(lambda: layout)


def points() -> list[tuple[str, str, Moment]]:
    found: list[tuple[str, str, Moment]] = []
    for kind, operation in OPERATIONS.items():
        for name in virtually(lambda world, operation=operation: steps_of(world, operation)):  # type: ignore[misc]
            found += [(kind, name, "before"), (kind, name, "after")]
    return found


@pytest.mark.inv("INV6", "INV8")
@pytest.mark.parametrize(("kind", "name", "moment"), points())
def test_an_operation_cut_anywhere_is_finished_by_the_next_leader_or_never_began(kind: str, name: str, moment: Moment) -> None:
    async def main(world: World) -> None:
        plans = await prepared(world)
        layout = grown()
        first: Leader = world.leaders[0]  # type: ignore[attr-defined]

        async def crash(step: str, when: Moment) -> None:
            if (step, when) == (name, moment):
                raise Crash

        with watching(crash), pytest.raises(Crash):
            await OPERATIONS[kind](plans)
        await first.crash()
        second = await world.leader()
        has_begun = (name.partition(":")[2], moment) != ("intend", "before")
        await second.plans(lambda: layout).roll_forward()
        sub, new = await world.subscription("sub"), await world.subscription("new")
        assert all(each is None or each.pending is None for each in (sub, new))
        reads = [stored.read for stored in world.segments.topics.values()]
        if kind == "create":
            assert (new is not None) == has_begun
            assert all(("new" in each) == has_begun for each in reads)
        if kind == "delete":
            assert (sub is None) == has_begun
            assert all(("sub" in each) != has_begun for each in reads)
            assert list(await world.registrations()) == ([] if has_begun else ["a", "b"])
        if kind in ("seek", "clear-backlog"):
            after = [2, 2, 0, 0] if kind == "seek" else [2, 2, 2, 2]
            expected = after if has_begun else [2, 0, 0, 0]
            assert [world.segments.at(layout, number).read["sub"] for number in range(4)] == expected
        if sub is not None:
            coordinator = second.coordinator(layout, sub)
            await coordinator.restore()
            for stored in world.segments.topics.values():
                stored.read["sub"] = 0  # as if everything were to be read again: what does the new leader take for drained?
            world.segments.fail = lambda _operation, _segment: NotReady("nobody can be asked")
            await asyncio.sleep(5)
            shares = {number for each in held(coordinator).values() for number in each}
            is_proof_gone = kind in ("seek", "clear-backlog") and has_begun and (name, moment) != (f"{kind}:give-back", "after")
            assert shares == ({0, 1} if is_proof_gone else {1, 2, 3})

    virtually(main)


def test_the_crash_points_were_found() -> None:
    assert len(points()) == 2 * (3 + 5 + 5 + 5)


def test_a_coordinator_made_while_a_seek_is_pending_gives_nothing_out_before_it_is_finished() -> None:
    async def main(world: World) -> None:
        plans = await prepared(world)
        layout = grown()
        first: Leader = world.leaders[0]  # type: ignore[attr-defined]
        world.segments.fail = lambda operation, _segment: NotReady("x") if operation == "seek" else None
        with pytest.raises(NotReady):
            await plans.seek("sub", 40)
        await first.crash()
        second = await world.leader()
        with pytest.raises(NotReady):
            await second.plans(lambda: layout).roll_forward()
        record = await world.subscription()
        coordinator = second.coordinator(layout, record)
        await coordinator.restore()
        _, mine = await join(coordinator, "a")
        await asyncio.sleep(10)
        assert mine == [] and held(coordinator) == {"a": (), "b": ()}
        world.segments.fail = lambda _operation, _segment: None
        await second.plans(lambda: layout).roll_forward()
        assert {number for each in held(coordinator).values() for number in each} == {1, 2, 3}

    virtually(main)


@pytest.mark.inv("INV4")
@pytest.mark.parametrize("operation", ["seek", "delete_subscription", "skip_all"])
def test_a_new_leader_claims_the_record_before_it_goes_on_with_what_it_shows(operation: str) -> None:
    """Otherwise the old leader, which has not heard yet, could finish the operation behind the new one's back."""

    async def main(world: World) -> None:
        plans = await prepared(world)
        first: Leader = world.leaders[0]  # type: ignore[attr-defined]
        world.segments.fail = lambda asked, _segment: NotReady("x") if asked == operation else None
        begun = {
            "seek": plans.seek("sub", 40),
            "delete_subscription": plans.delete("sub"),
            "skip_all": plans.clear_backlog("sub"),
        }
        for name, work in begun.items():
            if name != operation:
                work.close()
        with pytest.raises(NotReady):
            await begun[operation]
        await first.crash()
        second = await world.leader()
        with pytest.raises(NotReady):
            await second.plans(grown).roll_forward()
        record = await world.subscription()
        assert record is not None
        assert record.leader_epoch == second.leadership.epoch > first.leadership.epoch

    virtually(main)


@pytest.mark.inv("INV8")
def test_what_was_assigned_before_a_pending_seek_proves_nothing_to_the_next_leader() -> None:
    async def main(world: World) -> None:
        plans = await prepared(world)
        first: Leader = world.leaders[0]  # type: ignore[attr-defined]
        layout = grown()

        async def crash(step: str, when: Moment) -> None:
            if (step, when) == ("seek:intend", "after"):
                raise Crash

        with watching(crash), pytest.raises(Crash):
            await plans.seek("sub", 0)
        await first.crash()
        assert {number for each in (await world.registrations()).values() for number in each.segments} == {1, 2, 3}
        second = await world.leader()
        coordinator = second.coordinator(layout, await world.subscription())  # before anybody finished the seek
        _, mine = await join(coordinator, "a")
        assert mine == []
        assert coordinator.drains.drained == set()
        await second.plans(lambda: layout).roll_forward()
        assert {number for each in held(coordinator).values() for number in each} == {0, 1}

    virtually(main)


@pytest.mark.inv("INV4")
def test_a_deposed_leader_finishes_nothing() -> None:
    async def main(world: World) -> None:
        plans = await prepared(world)
        first: Leader = world.leaders[0]  # type: ignore[attr-defined]
        first.election.abandon()
        await world.store.delete(first.leadership.key)
        second = await world.leader()
        successor = second.plans(grown)
        await successor.clear_backlog("sub")
        reads = [dict(stored.read) for stored in world.segments.topics.values()]
        for kind in ("delete", "seek"):
            with pytest.raises(StaleLeader):
                await OPERATIONS[kind](plans)
        assert not first.leadership.holds()
        with pytest.raises(StaleLeader):
            await OPERATIONS["create"](plans)
        assert [stored.read for stored in world.segments.topics.values()] == reads

    virtually(main)


async def shared_by_two(world: World, leader: Leader) -> tuple[SegmentLayout, Client]:
    """0 -> 1, 2, the parent drained; a has 1, b has 2. Returns the layout and b's connection."""
    layout = SegmentLayout.initial(1, 10).split(0, 50)
    world.segments.fill(TOPIC, layout, 5, "sub")
    await world.put_topic(layout)
    await coordinated(world, leader, layout)
    world.segments.at(layout, 0).read["sub"] = 5
    coordinator = leader.coordinators["sub"]
    await join(coordinator, "a")
    b, _mine = await join(coordinator, "b")
    await asyncio.sleep(10)
    assert held(coordinator) == {"a": (1,), "b": (2,)}
    return layout, b


async def read_from_the_parent(world: World, layout: SegmentLayout) -> dict[str, tuple[int, ...]]:
    """What the next leader gives to a, who is alone, while nobody reads."""
    leader = await world.leader()
    record = await world.subscription()
    coordinator = leader.coordinator(layout, record)
    await join(coordinator, "a")
    await asyncio.sleep(200)
    return held(coordinator)


@pytest.mark.inv("INV8")
@pytest.mark.req("R468-67")
def test_a_seek_takes_away_also_what_the_record_of_a_consumer_that_left_still_says() -> None:
    async def main(world: World) -> None:
        leader = await world.leader()
        layout, b = await shared_by_two(world, leader)
        refused = [StoreUnavailable("not now")]
        leader.store.refuse_delete = lambda _key: refused.pop() if refused else None
        coordinator = leader.coordinators["sub"]
        await coordinator.unregister("b", b)
        assert not refused
        assert (await world.registrations())["b"].segments == (2,)  # its removal is owed
        await leader.plans(lambda: layout).seek("sub", 0)
        await leader.crash()
        assert await read_from_the_parent(world, layout) == {"a": (0,)}

    virtually(main)


@pytest.mark.inv("INV8")
def test_a_seek_is_not_done_before_owed_removals_are() -> None:
    async def main(world: World) -> None:
        leader = await world.leader()
        layout, b = await shared_by_two(world, leader)
        leader.store.refuse_delete = lambda _key: StoreUnavailable("not now")
        await leader.coordinators["sub"].unregister("b", b)
        plans = leader.plans(lambda: layout)
        with pytest.raises(StoreUnavailable):
            await plans.seek("sub", 0)
        assert world.segments.at(layout, 0).read["sub"] == 5  # no cursor has moved
        leader.store.refuse_delete = lambda _key: None
        await plans.roll_forward()
        assert world.segments.at(layout, 0).read["sub"] == 0
        assert await world.registrations() == {"a": (await world.registrations())["a"]}

    virtually(main)


@pytest.mark.inv("INV8")
def test_a_seek_is_not_done_before_what_was_assigned_is_taken_away_in_the_records() -> None:
    async def main(world: World) -> None:
        leader = await world.leader()
        layout, _b = await shared_by_two(world, leader)
        leader.store.refuse = lambda key: StoreUnavailable("not now") if key.endswith("/b") else None
        plans = leader.plans(lambda: layout)
        with pytest.raises(StoreUnavailable):
            await plans.seek("sub", 0)
        assert world.segments.at(layout, 0).read["sub"] == 5  # no cursor has moved
        assert held(leader.coordinators["sub"]) == {"a": (), "b": ()}
        leader.store.refuse = lambda _key: None
        await plans.roll_forward()
        assert world.segments.at(layout, 0).read["sub"] == 0
        assert {name: each.segments for name, each in (await world.registrations()).items()} == {"a": (0,), "b": ()}

    virtually(main)


@pytest.mark.inv("INV8")
def test_a_registration_that_fails_does_not_make_an_owed_removal_forgotten() -> None:
    """b leaves, its record stays; b comes back, its record cannot be written; then a seek and another leader."""

    async def main(world: World) -> None:
        leader = await world.leader()
        layout, b = await shared_by_two(world, leader)
        coordinator = leader.coordinators["sub"]
        leader.store.refuse_delete = lambda _key: StoreUnavailable("not now")
        await coordinator.unregister("b", b)
        leader.store.refuse = lambda key: StoreUnavailable("not now") if key.endswith("/b") else None
        with pytest.raises(StoreUnavailable):
            await join(coordinator, "b")
        leader.store.refuse = leader.store.refuse_delete = lambda _key: None
        await leader.plans(lambda: layout).seek("sub", 0)
        await leader.crash()
        assert await read_from_the_parent(world, layout) == {"a": (0,)}

    virtually(main)


@pytest.mark.inv("INV8")
@pytest.mark.parametrize("is_applied", [False, True])
def test_a_seek_takes_away_also_what_a_write_without_a_good_answer_has_given(is_applied: bool) -> None:
    """c comes; its record is written, those of the others are not, or nobody knows: c's segments must not outlive the seek."""

    async def main(world: World) -> None:
        leader = await world.leader()
        layout, b = await shared_by_two(world, leader)
        coordinator, put = leader.coordinators["sub"], leader.store.inner.put
        await coordinator.unregister("b", b)
        assert held(coordinator) == {"a": (1, 2)}

        async def without_an_answer(key: str, value: bytes, **options: Any) -> Record:
            if key.endswith("/c") and b'"segments"' in value:
                leader.store.refuse_read = lambda key: StoreUnavailable("down") if key.endswith("/c") else None
                await put(key, value, **options)
                raise OutcomeUnknown("no answer")
            return await put(key, value, **options)

        if is_applied:
            leader.store.inner.put = without_an_answer  # type: ignore[method-assign]
        else:
            leader.store.refuse = lambda key: StoreUnavailable("not now") if key.endswith("/a") else None
        await join(coordinator, "c")
        leader.store.refuse = leader.store.refuse_read = lambda _key: None
        leader.store.inner.put = put  # type: ignore[method-assign]
        assert (await world.registrations())["c"].segments  # written, and the leader was not told
        await leader.plans(lambda: layout).seek("sub", 0)
        await leader.crash()
        assert await read_from_the_parent(world, layout) == {"a": (0,)}

    virtually(main)


@pytest.mark.inv("INV8")
def test_what_a_look_finds_drained_while_cursors_are_moved_is_forgotten() -> None:
    """Its cursor may be moved back after the look, and a segment never stops being drained by itself."""

    async def main(world: World) -> None:
        layout = grown()
        world.segments.fill(TOPIC, layout, 4, "sub")
        for number in layout.all_segments:
            world.segments.at(layout, number).read["sub"] = 4
        leader = await world.leader()
        await coordinated(world, leader, layout)
        coordinator = leader.coordinators["sub"]
        await join(coordinator, "a")
        assert sorted(held(coordinator)["a"]) == [1, 2, 3]
        honest = world.segments.seek

        async def slow(*args: Any, **options: Any) -> None:
            await coordinator.drains.look_now()
            assert 0 in coordinator.drains.drained
            await asyncio.sleep(1.5)
            await honest(*args, **options)

        world.segments.seek = slow  # type: ignore[method-assign]
        await leader.plans(lambda: layout).seek("sub", 0)
        assert coordinator.drains.drained == set()
        assert sorted(held(coordinator)["a"]) == [0, 1]

    virtually(main)


@pytest.mark.parametrize("kind", ["seek", "clear-backlog"])
def test_a_cursor_that_cannot_be_read_is_in_nobody_elses_way(kind: str) -> None:
    """Refused before the record shows it; one that shows it already waits for a repair, and for nothing else."""

    async def main(world: World) -> None:
        layout = grown()
        world.segments.fill(TOPIC, layout, 3)
        plans = (await world.leader()).plans(lambda: layout)
        await plans.create("sub", "STREAM", "earliest")
        await plans.create("other", "STREAM", "earliest")
        before = await world.subscription()

        async def reset(name: str) -> None:
            await (plans.seek(name, 5) if kind == "seek" else plans.clear_backlog(name))

        world.segments.at(layout, 1).unreadable = ["sub"]
        with pytest.raises(StoreMismatch, match=r"The record x cannot be read\. Repair it, or delete"):
            await reset("sub")
        assert await world.subscription() == before
        await plans.roll_forward()
        await reset("other")

        world.segments.at(layout, 1).unreadable = []
        world.segments.fail = lambda operation, _segment: (
            StoreUnavailable("away") if operation in ("seek", "skip_all") else None
        )
        with pytest.raises(StoreUnavailable):
            await reset("sub")
        world.segments.fail = lambda _operation, _segment: None
        world.segments.at(layout, 1).unreadable = ["sub"]  # edited meanwhile
        await plans.roll_forward()
        left = await world.subscription()
        assert left is not None and left.pending is not None and left.pending.kind == kind
        await plans.delete("sub")
        assert await world.subscription() is None
        assert all(stored.read.keys() == {"other"} for stored in world.segments.topics.values())

    virtually(main)


@pytest.mark.inv("INV6", "INV16")
def test_a_segment_with_a_lost_ledger_refuses_what_needs_all_before_it_is_begun() -> None:
    async def main(world: World) -> None:
        layout = grown()
        world.segments.fill(TOPIC, layout, 3)
        plans = (await world.leader()).plans(lambda: layout)
        await plans.create("old", "STREAM", "earliest")
        before = await world.subscription("old")
        world.segments.lost = {str(physical_name(TOPIC, layout.segment(0)))}
        for _again in range(2):
            with pytest.raises(LedgerLost, match=r"does not know ledger 7, which the topic segment://.*/0000-7fff-0 needs"):
                await plans.create("new", "STREAM", "earliest")
        assert await world.subscription("new") is None
        for reset in (plans.seek("old", 5), plans.clear_backlog("old")):
            with pytest.raises(LedgerLost):
                await reset
        assert await world.subscription("old") == before
        assert all("new" not in stored.read for stored in world.segments.topics.values())
        await plans.create("group", "CHECKPOINT", "earliest")  # which has no cursors
        await plans.roll_forward()

    virtually(main)


@pytest.mark.inv("INV6", "INV16")
def test_a_creation_whose_segment_is_lost_meanwhile_waits_alone_and_can_be_deleted() -> None:
    """What the deletion cannot reach it removes when that is back; until then nobody gets the name, and the old position."""

    async def main(world: World) -> None:
        layout = grown()
        world.segments.fill(TOPIC, layout, 3)
        plans = (await world.leader()).plans(lambda: layout)
        name = str(physical_name(TOPIC, layout.segment(0)))

        def lose(operation: str, _segment: str) -> None:
            if operation == "create_subscription":
                world.segments.lost = {name}

        world.segments.hook = lose
        with pytest.raises(LedgerLost):
            await plans.create("sub", "STREAM", "earliest")
        world.segments.hook = lambda _operation, _segment: None
        left = await world.subscription()
        assert left is not None and left.pending is not None and left.pending.kind == "create"
        await plans.roll_forward()

        with pytest.raises(LedgerLost):
            await plans.delete("sub")
        left = await world.subscription()
        assert left is not None and left.pending is not None and left.pending.kind == "delete"
        others = {key: stored for key, stored in world.segments.topics.items() if key != name}
        assert all(stored.read == {} for stored in others.values())
        await plans.roll_forward()
        with pytest.raises(LedgerLost):
            await plans.create("sub", "STREAM", "earliest")
        assert all(stored.read == {} for stored in others.values())

        world.segments.lost = set()
        world.segments.topics[name].read["sub"] = 3
        await plans.roll_forward()
        assert await world.subscription() is None
        await plans.create("sub", "STREAM", "earliest")
        assert {stored.read["sub"] for stored in world.segments.topics.values()} == {0}

    virtually(main)
