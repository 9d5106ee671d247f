"""Conformance: many handles, bad links and lost sessions, against a plain dictionary (points 6, 8, 11 and 14 of the suite).

The faults come from `FaultyMetadata`, so they are the same on every backend; what is checked is the store below (nothing that
was refused is there, nothing confirmed is missing, ephemerals end with their session, folds converge) and that the rule for
callers, "read again and look for your own write", is enough to get every write in exactly once.
"""

from __future__ import annotations

import asyncio
import random  # noqa: TID251 - seeded by the case itself
from contextlib import AsyncExitStack

import pytest

from braid.errors import OutcomeUnknown, StoreUnavailable, VersionConflict
from braid.metadata.api import ABSENT, MetadataStore, SessionState, Span
from braid.testing.conformance.metadata_world import Fold, StoreWorld, collect, collect_names, until, values, while_time_passes
from braid.testing.faulty_metadata import Fault, FaultyMetadata

HANDLES = 6
SEEDS = 12
STEPS = 60
NAMES = ["a", "b", "c", "d"]


class FaultCases:
    """What callers may rely on when links and sessions fail."""

    @pytest.mark.inv("INV15")
    async def test_random_operations_under_faults_agree_with_a_dictionary(self, world: StoreWorld) -> None:
        hits: dict[str, int] = {}
        for seed in range(SEEDS):
            run = _Run(world, f"/faulty{seed}", random.Random(seed))
            await run.play()
            for store in run.stores:
                for name, count in store.hits.items():
                    hits[name] = hits.get(name, 0) + count
        for fault in (Fault.CONFLICT, Fault.UNAVAILABLE, Fault.UNKNOWN_APPLIED, Fault.UNKNOWN_DROPPED):
            assert hits[fault.value] > SEEDS, "the faults hardly ever happened"

    async def test_each_write_gets_in_once_over_bad_links(self, world: StoreWorld) -> None:
        """Eight writers add their names to three lists by CAS; after an unknown outcome they look for themselves."""
        stores = []
        for number in range(8):
            store = FaultyMetadata(await world.handle(), world.clock, random.Random(number))
            faults = store.faults
            faults.conflict = faults.unavailable = faults.unknown_applied = faults.unknown_dropped = 0.1
            faults.unknown_late, faults.delay = 0.1, 0.5
            stores.append(store)

        async def write(store: FaultyMetadata, number: int) -> None:
            for turn in range(6):
                await _add(world, store, f"/lists/{turn % 3}", f"{number}.{turn}")

        async def write_all() -> None:
            await asyncio.gather(*[write(store, number) for number, store in enumerate(stores)])

        await while_time_passes(world, write_all())
        found: list[str] = []
        for record in await collect(stores[0].inner.scan(Span("/lists"), fresh=True)):
            found += record.value.decode().split()
        assert sorted(found) == sorted(f"{number}.{turn}" for number in range(8) for turn in range(6))
        assert sum(store.hits.get(Fault.UNKNOWN_LATE.value, 0) for store in stores) > 0

    async def test_unclear_append_leaves_none_or_one(self, world: StoreWorld) -> None:
        store = FaultyMetadata(await world.handle(), world.clock, random.Random(1))
        for fault, expected in ((Fault.UNKNOWN_DROPPED, 0), (Fault.UNKNOWN_APPLIED, 1), (Fault.UNAVAILABLE, 0)):
            store.plan(fault, "append")
            with pytest.raises((OutcomeUnknown, StoreUnavailable)):
                await store.append(f"/unclear/{fault.name}", b"", partition="p")
            span = Span("/unclear", fault.name, fault.name + "~")
            assert len(await collect_names(store.inner.names(span, fresh=True))) == expected

    async def test_sessions_of_many_handles_are_their_own(self, world: StoreWorld) -> None:
        """Of forty holders some are killed, some pause, some close: exactly their ephemerals go."""
        handles = [await world.handle() for _ in range(40)]
        observer = await world.handle()
        for number, handle in enumerate(handles):
            await handle.put(f"/holders/{number:02d}", b"", ephemeral=True)
        sessions = [handle.session for handle in handles]
        for handle in handles[0:40:4]:
            await world.kill(handle)
        for handle in handles[1:40:4]:
            await handle.close()
        await world.pause(handles[2], sessions[2].timeout * 0.6)
        await world.pause(handles[3], sessions[3].timeout * 1.2)
        lost = {*range(0, 40, 4), 3}
        await until(world, lambda: all(sessions[number].state is SessionState.LOST for number in lost))
        await world.advance(0.1)
        gone = lost | {*range(1, 40, 4)}
        names = await collect_names(observer.names(Span("/holders"), fresh=True))
        assert names == [f"{number:02d}" for number in range(40) if number not in gone]
        for number, handle in enumerate(handles):
            if number not in gone:
                assert handle.session is sessions[number]
                record = await handle.get(f"/holders/{number:02d}", fresh=True)
                assert record is not None
                assert record.mine

    async def test_lagging_and_coalescing_watches_converge(self, world: StoreWorld) -> None:
        writer = await world.handle()
        async with AsyncExitStack() as stack:
            views = []
            for number in range(5):
                store = FaultyMetadata(await world.handle(), world.clock, random.Random(number))
                store.faults.watch_lag, store.faults.watch_coalesce = number / 5, number % 2 == 0
                views.append(Fold(await stack.enter_async_context(store.watch(Span("/lagging")))))
            choose = random.Random(0)
            for number in range(200):
                key = f"/lagging/{choose.choice(NAMES)}"
                await (writer.delete(key) if choose.random() < 0.4 else writer.put(key, b"%d" % number))
            await writer.put("/lagging/~end", b"")
            expected = values(await collect(writer.scan(Span("/lagging"), fresh=True)))
            for view in views:
                await while_time_passes(world, view.until(lambda records: "/lagging/~end" in records))
                assert view.values() == expected
                assert view.synced == 1
            assert len(views[4].seen) < 200


async def _add(world: StoreWorld, store: MetadataStore, key: str, name: str) -> None:
    while True:
        try:
            found = await store.get(key, fresh=True)
            names = [] if found is None else found.value.decode().split()
            if name in names:
                return
            expected = ABSENT if found is None else found.version
            await store.put(key, " ".join([*names, name]).encode(), expected=expected)
        except (VersionConflict, OutcomeUnknown, StoreUnavailable):
            await world.clock.sleep(0.1)
        else:
            return


class _Run:
    """One seeded sequence of operations on several handles, mirrored in a dictionary."""

    def __init__(self, world: StoreWorld, parent: str, choose: random.Random) -> None:
        self.stores: list[FaultyMetadata] = []
        self._world = world
        self._parent = parent
        self._choose = choose
        self._rows: dict[str, tuple[bytes, str | None]] = {}  # name -> value, owning session

    async def play(self) -> None:
        choose = self._choose
        observer = await self._world.handle()
        for _ in range(HANDLES):
            store = FaultyMetadata(await self._world.handle(), self._world.clock, random.Random(choose.random()))
            faults = store.faults
            faults.conflict, faults.unavailable = choose.uniform(0, 0.2), choose.uniform(0, 0.2)
            faults.unknown_applied, faults.unknown_dropped = choose.uniform(0, 0.2), choose.uniform(0, 0.2)
            faults.watch_coalesce = choose.random() < 0.5
            self.stores.append(store)
        async with AsyncExitStack() as stack:
            views = [await self._view(stack, store) for store in self.stores[:3]]
            for step in range(STEPS):
                await self._step(choose.choice(self.stores), b"%d" % step)
                found = await collect(observer.scan(Span(self._parent), fresh=True))
                assert {record.name: (record.value, record.owner) for record in found} == self._rows, step
            await observer.put(f"{self._parent}/~end", b"")
            for view in views:
                await view.until(lambda records: f"{self._parent}/~end" in records)
                del view.records[f"{self._parent}/~end"]
                got = {key.rpartition("/")[2]: (record.value, record.owner) for key, record in view.records.items()}
                assert got == self._rows
        for store in self.stores:
            await store.close()

    async def _view(self, stack: AsyncExitStack, store: FaultyMetadata) -> Fold:
        while True:
            try:
                return Fold(await stack.enter_async_context(store.watch(Span(self._parent))))
            except StoreUnavailable:
                continue

    async def _step(self, store: FaultyMetadata, value: bytes) -> None:
        choose = self._choose
        if choose.random() < 0.05:
            await self._expire(store)
            return
        name = choose.choice(NAMES)
        key = f"{self._parent}/{name}"
        current = await store.inner.get(key, fresh=True)
        expected = choose.choice([None, ABSENT, 1, None if current is None else current.version])
        is_right = expected is None or expected == (ABSENT if current is None else current.version)
        ephemeral = choose.random() < 0.4
        is_delete = choose.random() < 0.3
        after = None if is_delete else (value, store.session.id if ephemeral else None)
        conflicts = store.hits.get(Fault.CONFLICT.value, 0)
        try:
            if is_delete:
                assert await store.delete(key, expected=expected) == (current is not None)
            else:
                await store.put(key, value, expected=expected, ephemeral=ephemeral)
        except VersionConflict:
            assert not is_right or store.hits[Fault.CONFLICT.value] > conflicts
        except StoreUnavailable:
            pass
        except OutcomeUnknown:
            found = await store.inner.get(key, fresh=True)
            state = None if found is None else (found.value, found.owner)
            assert state == self._rows.get(name) or (is_right and state == after)
            self._set(name, state)
        else:
            assert is_right
            self._set(name, after)

    async def _expire(self, store: FaultyMetadata) -> None:
        session = store.session
        await self._world.pause(store.inner, session.timeout * 1.5)
        await until(self._world, lambda: session.state is SessionState.LOST)
        await self._world.advance(0.1)
        await store.inner.get(f"{self._parent}/a")  # the handle takes a new session when it is used
        assert store.session is not session
        for name, (_value, owner) in list(self._rows.items()):
            if owner == session.id:
                del self._rows[name]

    def _set(self, name: str, state: tuple[bytes, str | None] | None) -> None:
        if state is None:
            self._rows.pop(name, None)
        else:
            self._rows[name] = state
