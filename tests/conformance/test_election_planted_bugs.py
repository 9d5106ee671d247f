"""The conformance of elections, locks and claims is honest: each planted bug makes a case fail that passes without it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from braid.errors import BraidError, VersionConflict
from braid.metadata import election, locks, tenure
from braid.metadata.api import SessionState
from braid.metadata.backends import memory
from braid.metadata.claims import GuardedRecord
from braid.metadata.election import LeaderElection
from braid.metadata.engine import Engine
from braid.metadata.locks import ResourceLocks
from braid.metadata.tenure import Tenure
from braid.testing.conformance import metadata_world
from braid.testing.conformance.metadata import EngineWorld, MetadataStoreConformance, StoreWorld
from braid.testing.faulty_metadata import Fault

SUITE = MetadataStoreConformance
Case = Callable[[Any, StoreWorld], Awaitable[None]]
Patch = Callable[[pytest.MonkeyPatch], None]


def remove_whatever_is_there(patch: pytest.MonkeyPatch) -> None:
    async def remove(store: Any, _clock: Any, key: str, _version: int, session: Any) -> bool:
        if session.state is SessionState.CONNECTED:
            await store.delete(key)
        return True

    patch.setattr(election, "remove", remove)
    patch.setattr(locks, "remove", remove)


def remove_after_session_loss(patch: pytest.MonkeyPatch) -> None:
    async def remove(store: Any, _clock: Any, key: str, *_rest: Any) -> bool:
        await store.delete(key)
        return True

    patch.setattr(election, "remove", remove)
    patch.setattr(Tenure, "has_lapsed", lambda self: False)
    patch.setattr(Tenure, "is_shown_by", lambda self, record: True)


def remember_that_it_held(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tenure, "holds", lambda self: not self.is_over)


def hold_until_told_otherwise(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tenure, "holds", lambda self: not self.is_over and self.session.state is SessionState.CONNECTED)


def trust_watches(patch: pytest.MonkeyPatch) -> None:
    attempt = LeaderElection._attempt

    async def never_again(self: LeaderElection) -> float:
        await attempt(self)
        return 1e6

    patch.setattr(LeaderElection, "_attempt", never_again)


def trust_watches_of_locks(patch: pytest.MonkeyPatch) -> None:
    async def mind(self: ResourceLocks) -> None: ...

    patch.setattr(ResourceLocks, "_mind", mind)


def forget_doubts(patch: pytest.MonkeyPatch) -> None:
    async def tidy_up(self: ResourceLocks) -> None: ...

    patch.setattr(ResourceLocks, "_tidy_up", tidy_up)


def never_recognise_own_record(patch: pytest.MonkeyPatch) -> None:
    for module in (election, tenure):
        patch.setattr(module, "is_own", lambda store, record, value: False)


def ignore_the_epoch(patch: pytest.MonkeyPatch) -> None:
    async def read(self: GuardedRecord[Any]) -> Any:
        record = await self._store.get(self._key, partition=self._partition, fresh=True)
        assert record is not None
        return record, self._decoder.decode(record.value)

    patch.setattr(GuardedRecord, "_read", read)


def ignore_epoch_and_time(patch: pytest.MonkeyPatch) -> None:
    ignore_the_epoch(patch)
    remember_that_it_held(patch)


def ignore_the_version(patch: pytest.MonkeyPatch) -> None:
    async def change(self: GuardedRecord[Any], modify: Any) -> Any:
        _record, value = await self._read()
        changed = self._with_epoch(modify(value))
        await self._store.put(self._key, msgspec.json.encode(changed))
        return changed

    patch.setattr(GuardedRecord, "change", change)


def claim_without_writing(patch: pytest.MonkeyPatch) -> None:
    async def claim(self: GuardedRecord[Any]) -> Any:
        return (await self._read())[1]

    patch.setattr(GuardedRecord, "claim", claim)


def restart_epochs(patch: pytest.MonkeyPatch) -> None:
    put = Engine.put

    def restart(self: Engine, key: str, *rest: Any) -> Any:
        if key not in self.tables.rows and key.startswith("/election"):
            self._pipeline.given = 5000 - self._pipeline.given % 1000
        return put(self, key, *rest)

    patch.setattr(Engine, "put", restart)


def overwrite_the_leader(patch: pytest.MonkeyPatch) -> None:
    take = tenure.take

    async def grab(store: Any, clock: Any, key: str, value: bytes, *, adopt: bool = False) -> Any:
        taken = await take(store, clock, key, value, adopt=adopt)
        if isinstance(taken, Tenure) or taken is None:
            return taken
        record = await store.put(key, value, ephemeral=True)
        return Tenure(clock, store.session, record)

    patch.setattr(locks, "take", grab)
    patch.setattr(election, "take", grab)


def keep_ephemerals_after_expiry(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Engine, "_drop", lambda self, lease: None)


def drop_ephemerals_of_all(patch: pytest.MonkeyPatch) -> None:
    def drop(self: Engine, lease: Any) -> None:
        for other in list(self._leases.values()):
            if other.owned:
                self._write([(key, None) for key in sorted(other.owned)], None, None, 0)

    patch.setattr(Engine, "_drop", drop)


def skip_cas(patch: pytest.MonkeyPatch) -> None:
    put = Engine.put
    patch.setattr(Engine, "put", lambda self, key, value, _expected, *rest: put(self, key, value, None, *rest))


def apply_what_is_refused(patch: pytest.MonkeyPatch) -> None:
    put = Engine.put

    def refuse(self: Engine, key: str, value: bytes, expected: int | None, *rest: Any) -> Any:
        answer = put(self, key, value, expected, *rest)
        if answer.done() and isinstance(answer.exception(), VersionConflict):
            self._write(((key, (*self.tables.rows[key][:-1], value)),) if key in self.tables.rows else (), None, None, 0)
        return answer

    patch.setattr(Engine, "put", refuse)


def case(method: Any, **arguments: Any) -> Case:
    async def run(suite: Any, world: StoreWorld) -> None:
        await method(suite, world, **arguments)

    run.__name__ = method.__name__
    return run


LOST_EVENTS = SUITE.test_lost_events_cost_at_most_the_reconcile_time
UNKNOWN_WIN = case(SUITE.test_unknown_outcome_of_the_win, fault=Fault.UNKNOWN_APPLIED, can_read=True)
UNDER_WAY = case(SUITE.test_write_under_way_when_its_leader_was_paused, has_claimed=True)
TAKEN_AWAY = case(SUITE.test_lock_taken_away_is_noticed_and_left_alone, drops=1.0)
UNKNOWN_LOCK = case(SUITE.test_unknown_outcome_of_acquiring_is_resolved, fault=Fault.UNKNOWN_APPLIED)

BUGS: list[tuple[Patch, Case]] = [
    (remove_whatever_is_there, SUITE.test_deposed_leader_does_not_delete_its_successor),
    (remove_whatever_is_there, SUITE.test_releasing_does_not_delete_a_successor),
    (remove_after_session_loss, SUITE.test_nothing_is_deleted_after_the_session_was_lost),
    (remember_that_it_held, SUITE.test_holding_ends_with_time_alone),
    (remember_that_it_held, SUITE.test_holding_a_lock_ends_with_time_alone),
    (remember_that_it_held, SUITE.test_paused_leader_cannot_write_any_more),
    (remember_that_it_held, SUITE.test_lost_session_loses_every_lock),
    (remember_that_it_held, SUITE.test_random_faults_never_make_two_leaders),
    (hold_until_told_otherwise, SUITE.test_holding_ends_with_time_alone),
    (trust_watches, LOST_EVENTS),
    (trust_watches_of_locks, TAKEN_AWAY),
    (forget_doubts, SUITE.test_failed_acquiring_leaves_no_record_for_long),
    (never_recognise_own_record, UNKNOWN_WIN),
    (never_recognise_own_record, SUITE.test_closing_in_doubt_leaves_no_record),
    (never_recognise_own_record, UNKNOWN_LOCK),
    (ignore_the_epoch, SUITE.test_higher_epoch_is_respected),
    (ignore_epoch_and_time, UNDER_WAY),
    (ignore_the_version, UNDER_WAY),
    (claim_without_writing, UNDER_WAY),
    (claim_without_writing, SUITE.test_claim_then_change),
    (restart_epochs, SUITE.test_epoch_grows_over_every_kind_of_change),
    (overwrite_the_leader, SUITE.test_lock_is_held_by_one),
    (overwrite_the_leader, SUITE.test_of_several_candidates_one_leads),
    (keep_ephemerals_after_expiry, SUITE.test_sessions_of_many_handles_are_their_own),
    (keep_ephemerals_after_expiry, SUITE.test_random_operations_under_faults_agree_with_a_dictionary),
    (drop_ephemerals_of_all, SUITE.test_random_operations_under_faults_agree_with_a_dictionary),
    (apply_what_is_refused, SUITE.test_random_operations_under_faults_agree_with_a_dictionary),
    (skip_cas, SUITE.test_each_write_gets_in_once_over_bad_links),
]


async def run_case(case: Case) -> None:
    world = EngineWorld(memory.open_store, is_durable=False)
    try:
        async with asyncio.timeout(20):
            await case(SUITE(), world)
    finally:
        await world.close()


@pytest.mark.parametrize(("bug", "case"), BUGS, ids=[f"{bug.__name__}-{case.__name__[5:]}" for bug, case in BUGS])
async def test_planted_bug_is_caught(monkeypatch: pytest.MonkeyPatch, bug: Patch, case: Case) -> None:
    await run_case(case)
    monkeypatch.setattr(metadata_world, "PATIENCE", 0.3)  # what never comes is found out soon
    bug(monkeypatch)
    with pytest.raises((BaseExceptionGroup, AssertionError, TimeoutError, pytest.fail.Exception, BraidError)):
        await run_case(case)
