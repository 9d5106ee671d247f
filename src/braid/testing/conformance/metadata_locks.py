"""Conformance: resource locks (point 10 of the suite)."""

from __future__ import annotations

import asyncio
import random  # noqa: TID251 - seeded by the case itself

import pytest

from braid.errors import BraidError, Closed, SessionLost, StoreError
from braid.metadata.api import Span
from braid.metadata.locks import LockBusy, ResourceLock, ResourceLocks
from braid.runtime.tasks import Tasks
from braid.testing.conformance.metadata_stage import RECONCILE, read
from braid.testing.conformance.metadata_world import StoreWorld, collect_names, until, while_time_passes
from braid.testing.faulty_metadata import Fault, FaultyMetadata

KEY = "/lock/k"
SEEDS = 10


class Holder:
    """A handle behind a fault injector, with its locks and what was lost."""

    def __init__(self, world: StoreWorld, store: FaultyMetadata, name: str) -> None:
        self.store = store
        self.name = name
        self.locks = ResourceLocks(store, world.clock, reconcile_seconds=RECONCILE)
        self.lost: list[ResourceLock] = []

    @classmethod
    async def of(cls, world: StoreWorld, name: str = "a", seed: int = 0) -> Holder:
        return cls(world, FaultyMetadata(await world.handle(), world.clock, random.Random(f"{seed} {name}")), name)

    async def acquire(self, key: str = KEY) -> ResourceLock:
        lock = await self.locks.acquire(key, self.name.encode())
        lock.on_lost = self.lost.append
        return lock


class LockCases:
    """Held by one, never deleted by another, never left behind."""

    async def test_a_record_of_no_session_is_in_nobodys_way(self, world: StoreWorld) -> None:
        """Somebody edited a lock by hand, and no session takes the record along: its holder loses it, the next one has it."""
        holder, next_one = await Holder.of(world), await Holder.of(world, "b")
        lock = await holder.acquire()
        await (await world.handle()).put(KEY, b"nonsense")
        assert not await lock.check()
        assert (await next_one.acquire()).epoch > lock.epoch
        with pytest.raises(LockBusy):
            await holder.acquire()
        for each in (holder, next_one):
            await each.locks.close()

    async def test_lock_is_held_by_one(self, world: StoreWorld) -> None:
        holders = [await Holder.of(world, f"holder{n}") for n in range(5)]
        outcomes = await asyncio.gather(*[holder.acquire() for holder in holders * 3], return_exceptions=True)
        won = [outcome for outcome in outcomes if isinstance(outcome, ResourceLock)]
        assert len(won) == 1
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                assert isinstance(outcome, LockBusy)
                assert (outcome.record.key, outcome.record.value) == (KEY, won[0].value)
        assert won[0].holds()
        record = await read(await world.handle(), KEY)
        assert record is not None
        assert (record.value, record.version) == (won[0].value, won[0].epoch)
        for holder in holders:
            await holder.locks.close()
        assert not won[0].holds()
        assert not any(holder.lost for holder in holders)

    async def test_released_lock_can_be_taken_with_a_higher_epoch(self, world: StoreWorld) -> None:
        a, b = await Holder.of(world, "a"), await Holder.of(world, "b")
        epochs = []
        for _ in range(5):
            for holder, other in ((a, b), (b, a)):
                lock = await holder.acquire()
                epochs.append(lock.epoch)
                with pytest.raises(LockBusy):
                    await other.acquire()
                await lock.release()
                assert not lock.holds()
                await lock.release()
        assert epochs == sorted(set(epochs))
        await a.locks.close()
        await b.locks.close()

    async def test_update_keeps_the_lock_and_its_epoch(self, world: StoreWorld) -> None:
        a, observer = await Holder.of(world), await world.handle()
        lock = await a.acquire()
        for fault in (None, Fault.UNKNOWN_APPLIED, Fault.UNKNOWN_DROPPED):
            if fault is not None:
                a.store.plan(fault, "put")
            value = f"value after {fault}".encode()
            await lock.update(value)
            record = await read(observer, KEY)
            assert record is not None
            assert record.value == lock.value == value
            assert lock.holds()
            assert lock.epoch < record.version
        await world.advance(RECONCILE * 2)
        assert lock.holds()
        assert not a.lost
        await a.locks.close()
        assert await read(observer, KEY) is None
        with pytest.raises(SessionLost):
            await lock.update(b"late")
        with pytest.raises(Closed):
            await a.acquire()

    async def test_lost_session_loses_every_lock(self, world: StoreWorld) -> None:
        a, b = await Holder.of(world, "a"), await Holder.of(world, "b")
        locks = [await a.acquire(f"/lock/{n}") for n in range(20)]
        assert all(lock.holds() for lock in locks)
        await world.pause(a.store.inner, a.store.session.timeout * 2)
        assert not any(lock.holds() for lock in locks)
        await until(world, lambda: len(a.lost) == 20)
        taken = await b.acquire("/lock/0")
        assert taken.epoch > locks[0].epoch
        for lock in locks:
            await lock.release()
            with pytest.raises(SessionLost):
                await lock.update(b"late")
        await world.advance(RECONCILE * 2)
        assert taken.holds()
        again = await a.acquire("/lock/1")
        assert again.epoch > locks[1].epoch
        assert len(a.lost) == 20
        await a.locks.close()
        await b.locks.close()

    async def test_holding_a_lock_ends_with_time_alone(self, world: StoreWorld) -> None:
        a = await Holder.of(world)
        lock = await a.acquire()
        a.store.freeze()
        await world.kill(a.store.inner)
        await world.advance(a.store.session.good_until() - world.clock.monotonic() - 0.01)
        assert lock.holds()
        await world.advance(0.02)
        assert not lock.holds()
        a.store.thaw()
        await a.locks.close()

    async def test_lock_given_up_for_lost_and_taken_again_has_a_higher_epoch(self, world: StoreWorld) -> None:
        """The session lived on, and with it the record."""
        a = await Holder.of(world)
        lock = await a.acquire()
        a.locks.lose(lock)
        assert not lock.holds()
        again = await a.acquire()
        assert again.holds()
        assert again.epoch > lock.epoch
        await a.locks.close()

    @pytest.mark.inv("INV15")
    @pytest.mark.parametrize("drops", [0.0, 1.0])
    async def test_lock_taken_away_is_noticed_and_left_alone(self, world: StoreWorld, drops: float) -> None:
        a, b = await Holder.of(world, "a"), await Holder.of(world, "b")
        a.store.faults.watch_drop = drops
        lock = await a.acquire()
        await b.store.delete(KEY)
        successor = await b.acquire()
        waited = await until(world, lambda: bool(a.lost))
        assert waited <= RECONCILE + 1
        assert not lock.holds()
        await lock.release()
        await a.locks.close()
        record = await read(b.store, KEY)
        assert record is not None
        assert record.version == successor.epoch
        assert successor.holds()
        await b.locks.close()

    async def test_releasing_does_not_delete_a_successor(self, world: StoreWorld) -> None:
        """Released before the holder could hear that the lock is another's."""
        a, b = await Holder.of(world, "a"), await Holder.of(world, "b")
        a.store.faults.watch_drop = 1.0
        lock = await a.acquire()
        await b.store.delete(KEY)
        successor = await b.acquire()
        assert not a.lost
        await lock.release()
        await world.advance(0.1)
        assert successor.holds()
        assert await read(b.store, KEY) is not None
        await a.locks.close()
        await b.locks.close()

    @pytest.mark.parametrize("fault", [Fault.UNKNOWN_APPLIED, Fault.UNKNOWN_DROPPED, Fault.UNKNOWN_LATE])
    async def test_unknown_outcome_of_acquiring_is_resolved(self, world: StoreWorld, fault: Fault) -> None:
        a = await Holder.of(world)
        a.store.faults.delay = 1.0
        a.store.plan(fault, "put")
        lock = await while_time_passes(world, a.acquire())
        assert lock.holds()
        assert a.store.hits[fault.value] == 1
        record = await read(a.store.inner, KEY)
        assert record is not None
        assert record.version == lock.epoch
        a.store.faults.clear()
        await world.advance(RECONCILE * 2)
        assert lock.holds()
        await a.locks.close()
        assert await read(a.store.inner, KEY) is None

    async def test_failed_acquiring_leaves_no_record_for_long(self, world: StoreWorld) -> None:
        """Neither an outcome that stays unknown nor a cancelled call blocks the lock for everybody."""
        a, b = await Holder.of(world, "a"), await Holder.of(world, "b")
        a.store.plan(Fault.UNKNOWN_APPLIED, "put")
        a.store.plan(Fault.UNAVAILABLE, "get")
        with pytest.raises(StoreError):
            await a.acquire()
        a.store.faults.delay = 0.5
        tasks = Tasks("cancelled")
        acquiring = tasks.spawn(a.acquire("/lock/cancelled"), "acquire")
        await world.advance(0.3)  # the put has been sent, its answer is on the way
        acquiring.cancel()
        await tasks.close()
        a.store.faults.clear()
        observer = await world.handle()
        await world.advance(RECONCILE + 1)
        await world.advance(RECONCILE + 1)
        assert await collect_names(observer.names(Span("/lock"), fresh=True)) == []
        for key in (KEY, "/lock/cancelled"):
            assert (await b.acquire(key)).holds()
        await a.locks.close()
        await b.locks.close()

    @pytest.mark.parametrize("fault", [Fault.UNAVAILABLE, Fault.UNKNOWN_APPLIED, Fault.UNKNOWN_DROPPED])
    async def test_releasing_over_a_bad_link(self, world: StoreWorld, fault: Fault) -> None:
        a, b = await Holder.of(world, "a"), await Holder.of(world, "b")
        lock = await a.acquire()
        a.store.plan(fault, "delete")
        await while_time_passes(world, lock.release())
        assert (await b.acquire()).holds()
        again = await a.acquire("/lock/cut")
        await world.advance(RECONCILE + 1)
        await world.advance(RECONCILE + 1)
        a.store.is_cut = True
        await while_time_passes(world, again.release())
        a.store.is_cut = False
        await world.advance(RECONCILE * 2)
        await world.advance(RECONCILE * 2)
        assert (await b.acquire("/lock/cut")).holds()
        await a.locks.close()
        await b.locks.close()

    async def test_restarted_holder_removes_its_leftover(self, world: StoreWorld) -> None:
        crashed, a, b = await Holder.of(world, "a/1"), await Holder.of(world, "a/2"), await Holder.of(world, "b/1")
        old = await crashed.acquire()
        crashed.store.freeze()
        with pytest.raises(LockBusy):
            await b.locks.acquire(KEY, b"b/1", same=lambda value: value.startswith(b"b/"))
        lock = await a.locks.acquire(KEY, b"a/2", same=lambda value: value.startswith(b"a/"))
        assert lock.epoch > old.epoch
        with pytest.raises(LockBusy):  # its own one is no leftover
            await a.locks.acquire(KEY, b"a/2", same=lambda value: value.startswith(b"a/"))
        crashed.store.thaw()
        await crashed.locks.close()
        assert lock.holds()
        await a.locks.close()

    @pytest.mark.inv("INV15")
    async def test_random_faults_never_make_two_holders(self, world: StoreWorld) -> None:
        for seed in range(SEEDS):
            await random_locking(world, seed)


async def random_locking(world: StoreWorld, seed: int) -> None:
    """Three holders take and drop two locks over bad links; then everything heals and both can be taken."""
    choose = random.Random(seed)
    keys = [f"/lock/random{seed}-{n}" for n in range(2)]
    holders = [await Holder.of(world, f"holder{n}", seed) for n in range(3)]
    held: list[ResourceLock] = []
    epochs: dict[str, int] = dict.fromkeys(keys, 0)

    def check() -> None:
        for key in keys:
            assert sum(lock.holds() for lock in held if lock.key == key) <= 1, (seed, key)

    async def act(holder: Holder) -> None:
        own = [lock for lock in held if lock.value.startswith(holder.name.encode()) and lock.holds()]
        try:
            if own and choose.random() < 0.3:
                await own[0].update(holder.name.encode() + b"+")
            elif own and choose.random() < 0.5:
                await own[0].release()
            else:
                lock = await holder.acquire(choose.choice(keys))
                held.append(lock)
                check()
                assert lock.epoch > epochs[lock.key], seed
                epochs[lock.key] = lock.epoch
        except StoreError:
            pass

    for holder in holders:
        faults = holder.store.faults
        faults.unavailable, faults.unknown_applied, faults.unknown_dropped = (choose.uniform(0, 0.2) for _ in range(3))
        faults.unknown_late, faults.delay = choose.uniform(0, 0.2), choose.random()
        faults.watch_drop, faults.watch_lag = choose.uniform(0, 0.5), choose.uniform(0, 2)
    for _ in range(20):
        holder = choose.choice(holders)
        if choose.random() < 0.15:
            await world.pause(holder.store.inner, holder.store.session.timeout * choose.uniform(0.5, 1.5))
        else:
            await while_time_passes(world, act(holder))
        check()
        await world.advance(choose.uniform(0, 1.0))
        check()
    for holder in holders:
        holder.store.faults.clear()
    await world.advance(1.0)  # what was sent late has landed
    for holder in holders:
        await while_time_passes(world, holder.locks.close())
    check()
    last = await Holder.of(world, "last")
    for key in keys:
        await while_time_passes(world, _take_soon(world, last, key))
    await last.locks.close()


async def _take_soon(world: StoreWorld, holder: Holder, key: str) -> None:
    deadline = world.clock.monotonic() + holder.store.session.timeout + 2 * RECONCILE
    while True:
        try:
            await holder.acquire(key)
        except BraidError:
            assert world.clock.monotonic() < deadline, f"{key} stayed locked"
            await world.clock.sleep(0.5)
        else:
            return
