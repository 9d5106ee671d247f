"""Conformance: guarded records, "claim before act" (point 10 of the suite)."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest

from braid.errors import NotFound, OutcomeUnknown, StoreError, StoreMismatch
from braid.metadata.api import MetadataStore, Put
from braid.metadata.claims import GuardedRecord, StaleLeader
from braid.runtime.tasks import Tasks
from braid.testing.conformance.metadata_stage import RECONCILE, Candidate, Stage, read
from braid.testing.conformance.metadata_world import StoreWorld, folded, until, while_time_passes
from braid.testing.faulty_metadata import Fault

KEY = "/guarded/counter"
SEEDS = 6


class Counter(msgspec.Struct, frozen=True):
    """A guarded record."""

    leader_epoch: int = 0
    count: int = 0


def guarded(candidate: Candidate, key: str = KEY) -> GuardedRecord[Counter]:
    return GuardedRecord(candidate.store, candidate.wins[-1], key, Counter)


def increment(counter: Counter) -> Counter:
    return msgspec.structs.replace(counter, count=counter.count + 1)


async def stored(store: MetadataStore, key: str = KEY) -> Counter:
    record = await read(store, key)
    assert record is not None
    return msgspec.json.decode(record.value, type=Counter)


class ClaimCases:
    """Only the leader with the highest epoch changes a guarded record."""

    @pytest.mark.inv("INV4")
    async def test_claim_then_change(self, world: StoreWorld) -> None:
        async with Stage(world) as stage:
            leader, observer = await stage.add(), await world.handle()
            await observer.put(KEY, msgspec.json.encode(Counter(count=7)), index={"guarded": "x"})
            record = guarded(leader)
            epoch = leader.wins[0].epoch
            assert await record.claim() == Counter(epoch, 7)
            assert await record.change(increment) == Counter(epoch, 8) == await stored(observer)
            assert await record.change(lambda counter: Counter(epoch + 99, counter.count)) == Counter(epoch, 8)
            found = await read(observer, KEY)
            assert found is not None
            assert found.index == {"guarded": "x"}

    @pytest.mark.inv("INV4")
    async def test_higher_epoch_is_respected(self, world: StoreWorld) -> None:
        async with Stage(world) as stage:
            leader, observer = await stage.add(), await world.handle()
            leadership = leader.wins[0]
            claimed = Counter(leadership.epoch + 1, 5)
            await observer.put(KEY, msgspec.json.encode(claimed))
            with pytest.raises(StaleLeader, match=str(leadership.epoch + 1)):
                await guarded(leader).claim()
            assert not leadership.holds()
            with pytest.raises(StaleLeader):
                await guarded(leader).change(increment)
            assert await stored(observer) == claimed
            await until(world, lambda: len(leader.wins) == 2)  # it gave the record up and won anew
            assert leader.wins[1].epoch > leadership.epoch

    @pytest.mark.inv("INV4")
    async def test_paused_leader_cannot_write_any_more(self, world: StoreWorld) -> None:
        async with Stage(world) as stage:
            paused, successor, observer = await stage.add(), await stage.add(), await world.handle()
            await observer.put(KEY, msgspec.json.encode(Counter()))
            record = guarded(paused)
            await record.claim()
            await stage.pause(paused)
            with pytest.raises(StaleLeader):  # it knows by itself that its time is over, before anybody claimed
                await record.change(increment)
            await guarded(successor).claim()
            for _ in range(3):
                with pytest.raises(StaleLeader):
                    await record.change(increment)
            assert await stored(observer) == Counter(successor.wins[-1].epoch, 0)
            assert await guarded(successor).change(increment) == Counter(successor.wins[-1].epoch, 1)

    @pytest.mark.inv("INV4")
    @pytest.mark.parametrize("has_claimed", [True, False])
    async def test_write_under_way_when_its_leader_was_paused(self, world: StoreWorld, has_claimed: bool) -> None:
        """It was allowed when it set out, so only the claim of the successor can stop it."""
        async with Stage(world) as stage:
            paused, successor, observer = await stage.add(), await stage.add(), await world.handle()
            await observer.put(KEY, msgspec.json.encode(Counter()))
            record = guarded(paused)
            await record.claim()

            calls: list[Counter] = []

            def stop_here(counter: Counter) -> Counter:
                if not calls:
                    paused.store.freeze()
                calls.append(counter)
                return increment(counter)

            tasks = Tasks("paused")
            writing = tasks.spawn(_outcome(record, stop_here), "write")
            await world.kill(paused.store.inner)
            await until(world, successor.leads)
            if has_claimed:
                await guarded(successor).claim()
            paused.store.thaw()
            await until(world, writing.done)
            assert writing.result() == ("stale" if has_claimed else "done")
            await guarded(successor).claim()
            assert await stored(observer) == Counter(successor.wins[-1].epoch, 0 if has_claimed else 1)
            with pytest.raises(StaleLeader):
                await record.change(increment)

    @pytest.mark.parametrize("fault", [Fault.CONFLICT, Fault.UNKNOWN_APPLIED, Fault.UNKNOWN_DROPPED, Fault.UNAVAILABLE])
    async def test_each_change_happens_once(self, world: StoreWorld, fault: Fault) -> None:
        async with Stage(world) as stage:
            leader, observer = await stage.add(), await world.handle()
            await observer.put(KEY, msgspec.json.encode(Counter()))
            record = guarded(leader)
            done = 0
            for _ in range(10):
                leader.store.plan(fault, "put", KEY)
                done += await _outcome(record, increment) == "done"
            assert leader.store.hits[fault.value] == 10
            assert done == (0 if fault is Fault.UNAVAILABLE else 10)
            assert await stored(observer) == Counter(0 if done == 0 else leader.wins[0].epoch, done)

    async def test_unknown_stays_unknown_if_others_wrote_since(self, world: StoreWorld) -> None:
        async with Stage(world) as stage:
            leader, observer = await stage.add(), await world.handle()
            await observer.put(KEY, msgspec.json.encode(Counter()))
            leader.store.plan(Fault.UNKNOWN_APPLIED, "put", KEY)
            tasks = Tasks("unknown")
            leader.store.faults.delay = 2.0
            writing = tasks.spawn(_outcome(guarded(leader), increment), "write")
            async with folded(observer.watch(KEY)) as view:
                await view.until_synced()
                while (await stored(observer)).count == 0:
                    await world.advance(0.01)
                await observer.put(KEY, msgspec.json.encode(Counter(count=50)))
            await until(world, writing.done)
            assert writing.result() == "unknown"
            assert await stored(observer) == Counter(count=50)

    async def test_absent_and_unreadable_records_are_named(self, world: StoreWorld) -> None:
        async with Stage(world) as stage:
            leader = await stage.add()
            with pytest.raises(NotFound, match=KEY):
                await guarded(leader).claim()
            await leader.store.put(KEY, b'{"leader_epoch": "x"}')
            with pytest.raises(StoreMismatch, match=KEY):
                await guarded(leader).claim()

    @pytest.mark.inv("INV4")
    async def test_random_changes_of_leader_lose_no_write(self, world: StoreWorld) -> None:
        for seed in range(SEEDS):
            await random_reigns(world, seed)


async def _outcome(record: GuardedRecord[Counter], modify: object) -> str:
    try:
        await record.change(modify)  # type: ignore[arg-type]
    except StaleLeader:
        return "stale"
    except OutcomeUnknown:
        return "unknown"
    except StoreError:
        return "refused"
    return "done"


async def random_reigns(world: StoreWorld, seed: int) -> None:
    """Leaders count under faults while they are deposed in every way: each confirmed step is there, no epoch ever falls."""
    key = f"/guarded/random{seed}"
    outcomes: dict[str, int] = {}
    tasks = Tasks("reigns")
    async with Stage(world, f"/election/reigns{seed}", seed=seed) as stage:
        choose = stage.random
        observer = await world.handle()
        await observer.put(key, msgspec.json.encode(Counter()))
        history: list[Counter] = []

        async def remember() -> None:
            async with folded(observer.watch(key)) as view:
                while True:
                    event = await view.step()
                    if isinstance(event, Put):
                        history.append(msgspec.json.decode(event.record.value, type=Counter))

        async def reign(candidate: Candidate) -> None:
            while True:
                await world.clock.sleep(0.1)
                for leadership in candidate.wins[-2:]:  # a careless one keeps trying with its old leadership, too
                    record = GuardedRecord(candidate.store, leadership, key, Counter)
                    outcome = await _outcome(record, increment)
                    outcomes[outcome] = outcomes.get(outcome, 0) + 1

        tasks.spawn(remember(), "remember")
        for _ in range(3):
            candidate = await stage.add()
            faults = candidate.store.faults
            faults.conflict, faults.unavailable, faults.delay = choose.uniform(0, 0.3), choose.uniform(0, 0.1), 0.2
            faults.unknown_applied, faults.unknown_dropped = choose.uniform(0, 0.2), choose.uniform(0, 0.2)
            tasks.spawn(reign(candidate), candidate.name)
        for _ in range(6):
            leader = await stage.settled()
            await choose.choice([stage.resign, stage.delete, stage.expire, stage.pause])(leader)
            for _ in range(8):
                await world.advance(0.2)
        for candidate in stage.candidates:
            candidate.store.faults.clear()
        await while_time_passes(world, _settle(world))
        await tasks.close()
        final = await stored(observer, key)
    sure, unsure = outcomes.get("done", 0), outcomes.get("unknown", 0) + outcomes.get("stale", 0)
    assert sure <= final.count <= sure + unsure, (seed, outcomes, final)
    assert sure > 10
    for before, after in pairwise(history):
        assert before.leader_epoch <= after.leader_epoch, seed
        assert before.count <= after.count, seed


async def _settle(world: StoreWorld) -> None:
    await world.clock.sleep(RECONCILE)
