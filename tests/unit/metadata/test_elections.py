"""Elections and locks at awkward moments: deadlines without a store, sessions that end during a call, listeners that fail."""

import asyncio
import random
from collections.abc import AsyncIterator

import pytest

from braid.errors import Closed, SessionLost
from braid.metadata.api import Record, SessionState
from braid.metadata.backends import memory
from braid.metadata.election import LeaderElection, Leadership
from braid.metadata.locks import LockBusy, ResourceLock, ResourceLocks
from braid.runtime.tasks import Tasks
from braid.testing.conformance.metadata_world import EngineWorld, folded, until, while_time_passes
from braid.testing.faulty_metadata import FaultyMetadata

KEY = "/key"
RECONCILE = 2.0


@pytest.fixture
async def world() -> AsyncIterator[EngineWorld]:
    made = EngineWorld(memory.open_store, is_durable=False)
    yield made
    await made.close()


async def faulty(world: EngineWorld) -> FaultyMetadata:
    return FaultyMetadata(await world.handle(), world.clock, random.Random(1))


async def to_the_deadline(world: EngineWorld, store: FaultyMetadata) -> None:
    """Heartbeats stop and the store is out of reach until just past the session's deadline, before its end."""
    store.is_cut = True
    await world.kill(store.inner)
    await world.advance(store.session.good_until() - world.clock.monotonic() + 0.01)
    assert store.session.state is SessionState.CONNECTED


async def test_leader_steps_down_at_its_deadline_without_asking_the_store(world: EngineWorld) -> None:
    store = await faulty(world)
    changes: list[Leadership | None] = []
    election = LeaderElection(store, world.clock, KEY, b"a", on_change=changes.append)
    await election.start()
    await to_the_deadline(world, store)
    assert election.leadership is None
    assert changes[1:] == [None]
    store.is_cut = False
    await election.close()


async def test_lock_is_lost_at_its_deadline_and_its_record_goes_if_the_session_lives_on(world: EngineWorld) -> None:
    store, other = await faulty(world), await world.handle()
    locks = ResourceLocks(store, world.clock, reconcile_seconds=RECONCILE)
    lost: list[ResourceLock] = []
    lock = await locks.acquire(KEY, b"a")
    lock.on_lost = lost.append
    for _ in range(2):
        await world.advance(RECONCILE)  # nothing about the acquiring is in doubt any more
    await to_the_deadline(world, store)
    assert lost == [lock]
    await world.pause(store.inner, 0)  # the session is renewed after all
    store.is_cut = False
    assert await other.get(KEY) is not None
    for _ in range(4):
        await world.advance(RECONCILE)
    assert await other.get(KEY) is None
    again = await locks.acquire(KEY, b"a")
    assert again.holds()
    assert not lock.holds()
    await locks.close()


async def test_win_of_a_session_that_ended_meanwhile_does_not_count(world: EngineWorld) -> None:
    """The answer to the creating put comes so late that the handle has another session by then."""
    store, observer = await faulty(world), await world.handle()
    wins: list[Leadership | None] = []
    election = LeaderElection(store, world.clock, KEY, b"a", on_change=wins.append, reconcile_seconds=RECONCILE)
    tasks = Tasks("test")
    engine = await world.root()
    engine.on_commit = lambda _counter: store.freeze()  # the put is done, its answer stays away
    starting = tasks.spawn(election.start(), "start")
    async with folded(observer.watch(KEY)) as view:
        await view.until(bool)
    engine.on_commit = None
    await world.advance(0)
    before = store.session
    await world.pause(store.inner, before.timeout * 2)
    await store.inner.get("/another/use")
    assert store.session is not before
    assert not wins
    store.thaw()
    await until(world, lambda: bool(wins))
    await starting
    found = await observer.get(KEY)
    assert found is not None
    assert wins[0] is not None
    assert wins[0].epoch == found.version
    assert wins[0].holds()
    await election.close()


async def test_resigning_for_an_ended_session_asks_nothing(world: EngineWorld) -> None:
    store = await faulty(world)
    election = LeaderElection(store, world.clock, KEY, b"a")
    await election.start()
    store.is_cut = True
    await world.pause(store.inner, store.session.timeout * 2)
    async with asyncio.timeout(5):
        await election.close()  # no attempt, so no time needs to pass
    assert election.leadership is None


async def test_two_of_one_name_do_not_depose_each_other_for_ever(world: EngineWorld) -> None:
    first, second = await faulty(world), await faulty(world)
    elections = [
        LeaderElection(
            store, world.clock, KEY, b"same/%d" % n, same=lambda v: v.startswith(b"same/"), reconcile_seconds=RECONCILE
        )
        for n, store in enumerate((first, second))
    ]
    for election in elections:
        await election.start()
        assert election.leadership is not None
    for _ in range(10):
        await world.advance(RECONCILE)
    assert elections[0].leadership is None
    assert elections[1].leadership is not None
    for election in elections:
        await election.close()


async def test_failing_listeners_stop_nothing(world: EngineWorld, caplog: pytest.LogCaptureFixture) -> None:
    store, observer = await faulty(world), await world.handle()

    def fail(_anything: object) -> None:
        raise ValueError("listener")

    election = LeaderElection(store, world.clock, KEY, b"a", on_change=fail, reconcile_seconds=RECONCILE)
    await election.start()
    locks = ResourceLocks(store, world.clock, reconcile_seconds=RECONCILE)
    lock = await locks.acquire("/lock", b"a")
    lock.on_lost = fail
    for key in (KEY, "/lock"):
        await observer.delete(key)
    await world.advance(RECONCILE)
    assert not lock.holds()
    found = await election.leader(fresh=True)
    assert found is not None
    assert election.leadership is not None
    assert election.leadership.epoch == found.version
    assert caplog.text.count("ValueError: listener") >= 3
    await election.close()
    await locks.close()


async def test_closed_handle_ends_everything(world: EngineWorld) -> None:
    store = await faulty(world)
    election = LeaderElection(store, world.clock, KEY, b"a")
    await election.start()
    locks = ResourceLocks(store, world.clock)
    lock = await locks.acquire("/lock", b"a")
    leadership = election.leadership
    assert leadership is not None
    await store.close()
    assert not leadership.holds()
    assert not lock.holds()
    await world.advance(1)
    assert election.leadership is None
    await asyncio.gather(election.close(), election.close(), locks.close())
    with pytest.raises(Closed):
        await election.start()
    with pytest.raises(Closed):
        await locks.acquire("/lock", b"a")


async def test_update_of_a_lock_that_was_overwritten(world: EngineWorld) -> None:
    store, other = await faulty(world), await world.handle()
    store.faults.watch_drop = 1.0
    locks = ResourceLocks(store, world.clock, reconcile_seconds=RECONCILE)
    lost: list[ResourceLock] = []
    lock = await locks.acquire(KEY, b"a")
    lock.on_lost = lost.append
    taken = await other.put(KEY, b"a", ephemeral=True)
    with pytest.raises(SessionLost, match=KEY):
        await lock.update(b"b")
    assert lost == [lock]
    await lock.release()
    await locks.close()
    assert await other.get(KEY) == taken


async def test_locks_of_one_holder_take_turns(world: EngineWorld) -> None:
    store = await faulty(world)
    store.faults.delay = 0.3
    locks = ResourceLocks(store, world.clock, reconcile_seconds=RECONCILE)

    async def take_and_drop(number: int) -> bool:
        try:
            lock = await locks.acquire(KEY, b"%d" % number)
        except LockBusy as busy:
            assert busy.record.key == KEY
            return False
        assert lock.holds()
        await world.clock.sleep(0.1)
        assert lock.holds()
        await lock.release()
        return True

    async def all_at_once() -> list[bool]:
        return await asyncio.gather(*[take_and_drop(number) for number in range(10)])

    for _ in range(5):
        assert any(await while_time_passes(world, all_at_once()))
    store.faults.clear()
    await world.advance(RECONCILE)
    assert await store.get(KEY) is None
    await locks.close()


async def test_abandoned_ones_leave_their_records_to_the_session(world: EngineWorld) -> None:
    store, other = await faulty(world), await world.handle()
    election = LeaderElection(store, world.clock, KEY, b"a", reconcile_seconds=RECONCILE)
    await election.start()
    locks = ResourceLocks(store, world.clock, reconcile_seconds=RECONCILE)
    await locks.acquire("/lock", b"a")
    session = store.session
    election.abandon()
    locks.abandon()
    await world.advance(RECONCILE * 2)
    for key in (KEY, "/lock"):
        assert await other.get(key) is not None
    await election.close()
    with pytest.raises(Closed):
        await locks.acquire("/lock2", b"a")
    await world.kill(store.inner)
    await until(world, lambda: session.state is SessionState.LOST)
    await world.advance(0.1)
    for key in (KEY, "/lock"):
        assert await other.get(key) is None
    assert store.session is session  # nothing of the dead used the handle any more


async def test_a_look_at_a_lock_serves_only_those_who_asked_before_it_began(
    world: EngineWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks afterwards has a reason to, of which that look knows nothing; but all of them share the next one."""
    store, other = await faulty(world), await world.handle()
    store.faults.watch_drop = 1.0
    locks = ResourceLocks(store, world.clock, reconcile_seconds=RECONCILE)
    lock = await locks.acquire(KEY, b"a")
    await world.advance(RECONCILE)
    honest, looks = store.get, 0
    is_read, may_answer = asyncio.Event(), asyncio.Event()

    async def slow(key: str, *, partition: str | None = None, fresh: bool = False) -> Record | None:
        nonlocal looks
        looks += 1
        found = await honest(key, partition=partition, fresh=fresh)
        is_read.set()
        await may_answer.wait()
        return found

    monkeypatch.setattr(store, "get", slow)
    early = asyncio.create_task(lock.check())
    await is_read.wait()
    await other.delete(KEY)
    late = [asyncio.create_task(lock.check()) for _ in range(10)]
    await asyncio.sleep(0)  # they have asked
    may_answer.set()
    assert await early, "so it was when it asked"
    assert [await each for each in late] == [False] * 10
    assert looks == 2
    monkeypatch.undo()
    again = await locks.acquire(KEY, b"a")
    looks = 0
    may_answer.clear()
    monkeypatch.setattr(store, "get", slow)
    is_read.clear()
    asked = [asyncio.create_task(again.check())]
    await is_read.wait()
    asked += [asyncio.create_task(again.check()) for _ in range(10)]
    await asyncio.sleep(0)
    may_answer.set()
    assert [await each for each in asked] == [True] * 11
    assert looks == 2, "one for the first, one for all who came meanwhile"
    monkeypatch.undo()
    await locks.close()
