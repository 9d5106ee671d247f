"""Conformance: leader election (point 10 of the suite, "Conformance for 6")."""

from __future__ import annotations

import asyncio

import pytest

from braid.metadata.api import ABSENT, MetadataStore, SessionState
from braid.metadata.election import LeaderElection
from braid.runtime.tasks import Tasks
from braid.testing.conformance.metadata_stage import RECONCILE, Stage, read
from braid.testing.conformance.metadata_world import StoreWorld, folded, until, while_time_passes
from braid.testing.faulty_metadata import Fault

FORCED_CHANGES = 50
SEEDS = 10


class ElectionCases:
    """One leader, a growing epoch, and nobody deletes what is not theirs."""

    @pytest.mark.inv("INV4")
    async def test_of_several_candidates_one_leads(self, world: StoreWorld) -> None:
        async with Stage(world) as stage:
            candidates = [await stage.add(campaigns=False) for _ in range(5)]
            await asyncio.gather(*[candidate.election.start() for candidate in candidates])
            leader = await stage.settled()
            assert [candidate.leads() for candidate in candidates].count(True) == 1
            await world.advance(RECONCILE * 3)
            assert stage.leader() is leader
            record = await leader.election.leader(fresh=True)
            assert record is not None
            assert (record.value, record.version, record.mods) == (leader.name.encode(), leader.wins[0].epoch, 0)
            assert record.owner == leader.store.session.id

    @pytest.mark.inv("INV4")
    async def test_epoch_grows_over_every_kind_of_change(self, world: StoreWorld) -> None:
        async with Stage(world) as stage:
            for _ in range(3):
                await stage.add()
            kinds = [stage.resign, stage.delete, stage.expire, stage.kill, stage.pause]
            for number in range(FORCED_CHANGES):
                leader = await stage.settled()
                epoch = leader.wins[-1].epoch
                await kinds[number % len(kinds)](leader)
                leader = await stage.settled()
                await until(world, lambda before=epoch: stage.epochs[-1] > before)  # type: ignore[misc]
                assert leader.wins[-1].epoch > epoch, kinds[number % len(kinds)].__name__
            assert len(stage.epochs) >= FORCED_CHANGES + 1
            assert stage.epochs == sorted(set(stage.epochs))

    async def test_epoch_grows_through_a_restart_of_the_store(self, world: StoreWorld) -> None:
        if not world.is_durable:
            return  # nothing of the old epochs is left anywhere
        epochs = []
        for _ in range(4):
            async with Stage(world) as stage:
                await stage.add()
                epochs.append((await stage.settled()).wins[0].epoch)
            await world.restart()
        assert epochs == sorted(set(epochs))

    async def test_a_leader_record_of_no_session_is_in_nobodys_way(self, world: StoreWorld) -> None:
        """Somebody edited the leader's record by hand, and no session takes it along: it goes, and one of them leads."""
        async with Stage(world) as stage:
            leader, _other = await stage.add(), await stage.add()
            epoch = leader.wins[0].epoch
            await (await world.handle()).put(stage.key, b"nonsense")
            await until(world, lambda: stage.epochs[-1] > epoch)
            record = await (await stage.settled()).election.leader(fresh=True)
            assert record is not None
            assert record.owner is not None

    async def test_short_flap_changes_nothing(self, world: StoreWorld) -> None:
        async with Stage(world) as stage:
            leader, other = await stage.add(), await stage.add()
            leadership = leader.election.leadership
            assert leadership is not None
            for _ in range(5):
                leader.store.is_cut = other.store.is_cut = True
                await world.pause(leader.store.inner, leader.store.session.timeout * 0.6)
                await world.advance(0.1)
                leader.store.is_cut = other.store.is_cut = False
                await world.advance(RECONCILE)
            assert leader.election.leadership is leadership
            assert leadership.holds()
            assert (leader.changes, other.changes) == (1, 0)

    async def test_holding_ends_with_time_alone(self, world: StoreWorld) -> None:
        """Nothing runs between the two questions, so only a fresh answer is right."""
        async with Stage(world) as stage:
            leader = await stage.add()
            leadership = leader.wins[0]
            session = leader.store.session
            assert leadership.holds()
            leader.store.freeze()
            await world.kill(leader.store.inner)
            left = session.good_until() - world.clock.monotonic()
            await world.advance(left - 0.01)
            assert leadership.holds()
            await world.advance(0.02)
            assert not leadership.holds()
            assert session.good_until() < world.clock.monotonic()

    @pytest.mark.inv("INV4")
    async def test_session_renewed_at_the_last_moment_begins_a_new_term(self, world: StoreWorld) -> None:
        """Past the deadline the leader steps down. If the session lives on, its record does too, and is replaced: whoever leads
        next, the same candidate or another, has a higher epoch, because what the first term left under its own counts less."""
        async with Stage(world) as stage:
            leader, _other = await stage.add(), await stage.add()
            epochs = [leader.wins[0].epoch]
            for _lapse in range(3):
                before = stage.leader()
                assert before is not None
                await lapse(world, before.store.inner)
                await until(world, lambda: stage.leader() is not None)
                after = stage.leader()
                assert after is not None
                epochs.append(after.wins[-1].epoch)
                record = await after.election.leader(fresh=True)
                assert record is not None
                assert record.version == epochs[-1], "and observers see it"
            assert epochs == sorted(set(epochs))

    @pytest.mark.inv("INV4")
    async def test_only_candidate_comes_back_with_a_higher_epoch(self, world: StoreWorld) -> None:
        async with Stage(world) as stage:
            leader = await stage.add()
            await lapse(world, leader.store.inner)
            await until(world, lambda: stage.leader() is not None)
            first, second = leader.wins
            assert second.epoch > first.epoch
            assert not first.holds()

    async def test_observers_see_every_settled_leader(self, world: StoreWorld) -> None:
        async with Stage(world) as stage:
            for _ in range(2):
                await stage.add()
            observer = await world.handle()
            asking = LeaderElection(observer, world.clock, stage.key, b"never campaigns")
            async with folded(observer.watch(stage.key)) as view:
                for _ in range(10):
                    leader = await stage.settled()
                    epoch = leader.wins[-1].epoch
                    await view.until(
                        lambda records, e=epoch: stage.key in records and records[stage.key].version == e  # type: ignore[misc]
                    )
                    found = await asking.leader(fresh=True)
                    assert found is not None
                    assert (found.value, found.version) == (leader.name.encode(), epoch)
                    await stage.resign(leader)

    async def test_lookup_never_misses_a_settled_leader(self, world: StoreWorld) -> None:
        async with Stage(world) as stage:
            for _ in range(3):
                await stage.add()
            observer = await world.handle()
            asking = LeaderElection(observer, world.clock, stage.key, b"")
            answers: list[bool] = []

            async def ask() -> None:
                while True:
                    before = stage.leader()
                    epoch = None if before is None else before.wins[-1].epoch
                    found = await asking.leader(fresh=True)
                    after = stage.leader()
                    if before is not None and before is after and after.wins[-1].epoch == epoch:
                        answers.append(found is not None and found.version == epoch)
                    await asyncio.sleep(0)

            tasks = Tasks("asker")
            tasks.spawn(ask(), "ask")
            for _ in range(10):
                await stage.resign(await stage.settled())
            await tasks.close()
            assert len(answers) > 20
            assert all(answers)

    async def test_deposed_leader_does_not_delete_its_successor(self, world: StoreWorld) -> None:
        """The record is removed by hand, another wins, and only then the first one hears of it, or resigns without."""
        for hears_of_it in (True, False):
            async with Stage(world, f"/election/deposed{hears_of_it}") as stage:
                stage.may_overlap = True
                deposed, successor = await stage.add(), await stage.add()
                assert deposed.leads()
                deposed.store.freeze()
                observer = await world.handle()
                await observer.delete(stage.key)
                await until(world, lambda leader=successor: leader.leads(), step=0.01)  # type: ignore[misc]
                epoch = successor.wins[-1].epoch
                if not hears_of_it:
                    deposed.store.faults.watch_drop = 1.0
                deposed.store.thaw()
                if not hears_of_it:
                    assert deposed.leads()
                    await deposed.election.close()
                await world.advance(RECONCILE * 2)
                assert not deposed.leads()
                record = await read(observer, stage.key)
                assert record is not None
                assert (record.value, record.version) == (successor.name.encode(), epoch)
                assert successor.leads()
                stage.may_overlap = False

    async def test_nothing_is_deleted_after_the_session_was_lost(self, world: StoreWorld) -> None:
        async with Stage(world) as stage:
            lost, successor = await stage.add(), await stage.add()
            lost.store.freeze()
            await world.kill(lost.store.inner)
            await until(world, successor.leads)
            epoch = successor.wins[-1].epoch
            lost.store.thaw()
            await lost.election.close()
            record = await read(await world.handle(), stage.key)
            assert record is not None
            assert record.version == epoch
            assert successor.leads()

    async def test_two_hundred_elections_on_one_session(self, world: StoreWorld) -> None:
        handle, observer = await world.handle(), await world.handle()
        elections = [LeaderElection(handle, world.clock, f"/many/{n:03d}", b"one") for n in range(200)]
        await asyncio.gather(*[election.start() for election in elections])
        leaderships = [election.leadership for election in elections if election.leadership is not None]
        assert len(leaderships) == 200
        assert all(leadership.holds() for leadership in leaderships)
        await asyncio.gather(*[election.close() for election in elections[:100]])
        assert [leadership.holds() for leadership in leaderships] == [False] * 100 + [True] * 100
        for number in (0, 99, 100, 199):
            assert (await read(observer, f"/many/{number:03d}") is None) == (number < 100)
        await world.pause(handle, handle.session.timeout * 2)
        assert not any(leadership.holds() for leadership in leaderships)
        rest = elections[100:]
        await until(world, lambda: all(e.leadership is not None and e.leadership.holds() for e in rest))
        for election, before in zip(rest, leaderships[100:], strict=True):
            assert election.leadership is not None
            assert election.leadership.epoch > before.epoch
        await asyncio.gather(*[election.close() for election in rest])

    @pytest.mark.inv("INV15")
    async def test_lost_events_cost_at_most_the_reconcile_time(self, world: StoreWorld) -> None:
        async with Stage(world) as stage:
            first, second = await stage.add(campaigns=False), await stage.add(campaigns=False)
            for candidate in (first, second):
                candidate.store.faults.watch_drop = 1.0
                await candidate.election.start()
            assert first.leads()
            await first.election.close()
            assert await until(world, second.leads) <= RECONCILE + 1
            stage.may_overlap = True
            before = second.wins[-1]
            await first.store.inner.delete(stage.key)
            assert await until(world, lambda: not before.holds()) <= RECONCILE + 1
            await stage.settled()
            stage.may_overlap = False
            assert second.store.hits["watch drop"] > 0

    @pytest.mark.parametrize("fault", [Fault.UNKNOWN_APPLIED, Fault.UNKNOWN_DROPPED, Fault.UNKNOWN_LATE])
    @pytest.mark.parametrize("can_read", [True, False])
    async def test_unknown_outcome_of_the_win(self, world: StoreWorld, fault: Fault, can_read: bool) -> None:
        """The winner that was not told finds its own record; no record stays without a leader."""
        async with Stage(world) as stage:
            leader = await stage.add(campaigns=False)
            leader.store.faults.delay = 1.0
            leader.store.plan(fault, "put")
            if not can_read:
                leader.store.plan(Fault.UNAVAILABLE, "get", skip=1)
            await while_time_passes(world, leader.election.start())
            await until(world, leader.leads)
            assert leader.store.hits[fault.value] == 1
            record = await read(leader.store.inner, stage.key)
            assert record is not None
            assert record.version == leader.wins[-1].epoch
            other = await stage.add()
            await while_time_passes(world, leader.election.close())
            await until(world, other.leads)

    async def test_closing_in_doubt_leaves_no_record(self, world: StoreWorld) -> None:
        async with Stage(world) as stage:
            leader = await stage.add(campaigns=False)
            leader.store.faults.watch_drop = 1.0
            leader.store.plan(Fault.UNKNOWN_APPLIED, "put")
            leader.store.plan(Fault.UNAVAILABLE, "get", skip=1)
            await leader.election.start()
            assert not leader.wins
            observer = await world.handle()
            assert await read(observer, stage.key) is not None
            await leader.election.close()
            assert await read(observer, stage.key) is None

    async def test_closing_during_the_win_leaves_no_record(self, world: StoreWorld) -> None:
        handle, observer = await world.handle(), await world.handle()
        for turns in range(12):
            election = LeaderElection(handle, world.clock, "/election/brief", b"one")
            tasks = Tasks("brief")
            starting = tasks.spawn(election.start(), "start")
            for _ in range(turns):
                await asyncio.sleep(0)
            await while_time_passes(world, election.close())
            await starting
            await world.advance(0.1)
            assert await read(observer, "/election/brief") is None, turns

    @pytest.mark.parametrize("fault", [Fault.UNAVAILABLE, Fault.UNKNOWN_APPLIED, Fault.UNKNOWN_DROPPED])
    async def test_resigning_over_a_bad_link(self, world: StoreWorld, fault: Fault) -> None:
        async with Stage(world) as stage:
            leader, other = await stage.add(), await stage.add()
            leader.store.plan(fault, "delete")
            await while_time_passes(world, leader.election.close())
            await until(world, other.leads)
            assert leader.store.hits[fault.value] == 1

    async def test_restarted_candidate_removes_its_leftover(self, world: StoreWorld) -> None:
        crashed, handle, third = await world.handle(), await world.handle(), await world.handle()
        old = await crashed.put("/election/same", b"broker-a/1", expected=ABSENT, ephemeral=True)

        def same(value: bytes) -> bool:
            return value.startswith(b"broker-a/")

        patient = LeaderElection(third, world.clock, "/election/same", b"broker-b/1", same=lambda v: v.startswith(b"broker-b/"))
        await patient.start()
        assert patient.leadership is None
        await patient.close()
        election = LeaderElection(handle, world.clock, "/election/same", b"broker-a/2", same=same)
        await election.start()
        assert election.leadership is not None
        assert election.leadership.epoch > old.version
        await election.close()

    @pytest.mark.inv("INV4", "INV15")
    async def test_random_faults_never_make_two_leaders(self, world: StoreWorld) -> None:
        for seed in range(SEEDS):
            await random_life(world, seed)


async def lapse(world: StoreWorld, handle: MetadataStore) -> None:
    """The session's own deadline passes, everybody notices, and then it is renewed before the store ends it."""
    session = handle.session
    await world.kill(handle)
    await world.advance(session.good_until() - world.clock.monotonic() + 0.01)
    assert session.state is SessionState.CONNECTED
    await world.pause(handle, 0.0)
    assert session.good_until() > world.clock.monotonic()


async def random_life(world: StoreWorld, seed: int) -> None:
    """Three candidates, bad links, lost sessions, pauses; then everything heals and somebody leads soon."""
    async with Stage(world, f"/election/random{seed}", seed=seed) as stage:
        choose = stage.random
        for _ in range(3):
            candidate = await stage.add(campaigns=False)
            faults = candidate.store.faults
            faults.unavailable, faults.unknown_applied, faults.unknown_dropped = (choose.uniform(0, 0.2) for _ in range(3))
            faults.conflict, faults.unknown_late, faults.delay = choose.uniform(0, 0.2), choose.uniform(0, 0.2), choose.random()
            faults.watch_drop, faults.watch_lag = choose.uniform(0, 0.5), choose.uniform(0, 2)
            faults.watch_coalesce = choose.random() < 0.5
            await while_time_passes(world, candidate.election.start())
        for _ in range(12):
            candidate = choose.choice(stage.candidates)
            match choose.randrange(5):
                case 0:
                    await world.pause(candidate.store.inner, candidate.store.session.timeout * choose.uniform(0.5, 1.5))
                case 1:
                    candidate.store.is_cut = not candidate.store.is_cut
                case 2:
                    candidate.store.freeze()
                case 3:
                    candidate.store.thaw()
                case _:
                    candidate.store.thaw()
                    await while_time_passes(world, candidate.election.close())
                    await while_time_passes(world, candidate.campaign_again())
            for _ in range(choose.randrange(6)):
                await world.advance(choose.uniform(0, 1.0))
        for candidate in stage.candidates:
            candidate.store.is_cut = False
            candidate.store.faults.clear()
            candidate.store.thaw()
        begin = world.clock.monotonic()
        leader = await stage.settled()
        assert world.clock.monotonic() - begin <= leader.store.session.timeout + 3 * RECONCILE, seed
