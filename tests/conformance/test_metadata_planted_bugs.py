"""The conformance suite is honest: each bug planted in the engine makes a case fail that passes without it."""

import asyncio
import copy
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from braid.errors import BraidError
from braid.metadata.api import SessionState
from braid.metadata.backends import memory
from braid.metadata.engine import Engine
from braid.metadata.handle import Handle
from braid.metadata.journal import INDEX
from braid.metadata.pipeline import Pipeline
from braid.metadata.sessions import Lease
from braid.metadata.tables import Tables
from braid.metadata.watches import Follow, Watch
from braid.testing.conformance import metadata_sessions, metadata_watches, metadata_world
from braid.testing.conformance.metadata import EngineWorld, MetadataStoreConformance, StoreWorld

SUITE = MetadataStoreConformance
Case = Callable[[Any, StoreWorld], Awaitable[None]]
Patch = Callable[[pytest.MonkeyPatch], None]


def skip_cas(patch: pytest.MonkeyPatch) -> None:
    put = Engine.put
    patch.setattr(Engine, "put", lambda self, key, value, _expected, *rest: put(self, key, value, None, *rest))


def skip_delete_cas(patch: pytest.MonkeyPatch) -> None:
    delete = Engine.delete
    patch.setattr(Engine, "delete", lambda self, key, _expected, partition: delete(self, key, None, partition))


def check_cas_against_committed_only(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pipeline, "expected", lambda self, key: self._tables.rows.get(key))


def refuse_before_the_pending_write_is_durable(patch: pytest.MonkeyPatch) -> None:
    answer = Pipeline.answer
    patch.setattr(Pipeline, "answer", lambda self, result, _pending: answer(self, result, None))


def answer_before_publishing(patch: pytest.MonkeyPatch) -> None:
    write = Pipeline.write

    def early(self: Pipeline, changes: Any, answer: Any, future: Any, size: int) -> None:
        write(self, changes, answer, future, size)
        if future is not None:
            future.set_result(answer)

    patch.setattr(Pipeline, "write", early)


def lose_a_delete_in_a_watch(patch: pytest.MonkeyPatch) -> None:
    changed = Watch.changed
    patch.setattr(Watch, "changed", lambda self, key, old, new: new is not None and changed(self, key, old, new))


def lose_changes_before_the_snapshot_is_read(patch: pytest.MonkeyPatch) -> None:
    changed = Watch.changed
    patch.setattr(Watch, "changed", lambda self, key, old, new: self._synced and changed(self, key, old, new))


def forget_exit_from_an_index(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Watch, "_covers", lambda self, key, row: row is not None)


def skip_what_a_follower_has_not_read(patch: pytest.MonkeyPatch) -> None:
    changed = Follow.changed

    def jump(self: Follow, key: str, old: Any, new: Any) -> None:
        changed(self, key, old, new)
        self._next = max(self._next, key)

    patch.setattr(Follow, "changed", jump)


def ignore_index_bounds(patch: pytest.MonkeyPatch) -> None:
    def index_span(self: Tables, span: Any, limit: int | None = None) -> list[Any]:
        return [row for row in self.rows.values() if any(name == span.name for name, _ in row[INDEX])]

    patch.setattr(Tables, "index_span", index_span)


def restart_sequences_within_a_group(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Engine, "_note_tails", lambda self, key, version: None)


def keep_ephemerals_after_expiry(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Engine, "_drop", lambda self, lease: None)


def never_transfer_ownership(patch: pytest.MonkeyPatch) -> None:
    change = Engine._change_owner
    patch.setattr(Engine, "_change_owner", lambda self, key, was, owner: change(self, key, None, owner))


def expire_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lease, "renew", lambda self: None)


def revive_lost_sessions(patch: pytest.MonkeyPatch) -> None:
    renew = Lease.renew

    def revive(self: Lease) -> None:
        if self.state is SessionState.LOST:
            self.state = SessionState.CONNECTED
        renew(self)

    patch.setattr(Lease, "renew", revive)


def reuse_versions(patch: pytest.MonkeyPatch) -> None:
    put = Engine.put

    def restart(self: Engine, key: str, *rest: Any) -> Any:
        if key not in self.tables.rows:
            self._pipeline.given = 100
        return put(self, key, *rest)

    patch.setattr(Engine, "put", restart)


def ignore_fresh(patch: pytest.MonkeyPatch) -> None:
    lag(patch, honours_fresh=False)


def lag(patch: pytest.MonkeyPatch, *, honours_fresh: bool = True) -> None:
    """Each handle reads a copy of the tables taken at its first read, except (if honoured) fresh reads."""
    originals: dict[str, Any] = {"get": Handle.get, "scan": Handle.scan, "names": Handle.names}
    for name in originals:

        def stale(self: Handle, *args: Any, _name: str = name, fresh: bool = False, **kwargs: Any) -> Any:
            view = copy.copy(self)
            if not (fresh and honours_fresh):
                if not hasattr(self, "old_tables"):
                    self.old_tables = Tables(list(self._engine.tables.rows.values()))  # type: ignore[attr-defined]
                view._engine = copy.copy(self._engine)
                view._engine.tables = self.old_tables  # type: ignore[attr-defined]
            return originals[_name](view, *args, fresh=fresh, **kwargs)

        patch.setattr(Handle, name, stale)


def close_span_at_the_top(patch: pytest.MonkeyPatch) -> None:
    def closed(self: Tables, parent: str, low: str, high: str, limit: int | None = None) -> list[str]:
        return sorted(key for key in self.rows if key[: key.rindex("/")] == parent and low <= key <= high)[:limit]

    patch.setattr(Tables, "keys", closed)


BUGS: list[tuple[Patch, Case]] = [
    (skip_cas, SUITE.test_creating_twice_is_one_conflict),
    (skip_cas, SUITE.test_concurrent_increments_lose_none),
    (skip_delete_cas, SUITE.test_replacing_needs_the_present_version),
    (check_cas_against_committed_only, SUITE.test_creating_twice_is_one_conflict),
    (refuse_before_the_pending_write_is_durable, SUITE.test_refusal_never_runs_ahead_of_what_can_be_read),
    (answer_before_publishing, SUITE.test_created_record_is_read_back),
    (lose_a_delete_in_a_watch, SUITE.test_fold_equals_scan_with_a_writer_running),
    (lose_changes_before_the_snapshot_is_read, SUITE.test_fold_equals_scan_with_a_writer_running),
    (forget_exit_from_an_index, SUITE.test_index_watch_sees_entry_and_exit),
    (skip_what_a_follower_has_not_read, SUITE.test_follow_delivers_each_append_once_in_order),
    (ignore_index_bounds, SUITE.test_index_follows_updates_and_deletes),
    (restart_sequences_within_a_group, SUITE.test_appends_are_unique_and_grow),
    (keep_ephemerals_after_expiry, SUITE.test_ephemeral_ends_when_heartbeats_stop),
    (never_transfer_ownership, SUITE.test_overwriting_transfers_ownership),
    (expire_early, SUITE.test_short_pause_keeps_the_session),
    (revive_lost_sessions, SUITE.test_lost_session_is_replaced_when_the_handle_is_used),
    (reuse_versions, SUITE.test_recreated_record_refuses_old_versions),
    (ignore_fresh, SUITE.test_fresh_reads_see_writes_of_other_handles),
    (close_span_at_the_top, SUITE.test_bounds_are_half_open),
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
    for module in (metadata_world, metadata_sessions, metadata_watches):
        monkeypatch.setattr(module, "PATIENCE", 0.3)  # what never comes is found out soon
    bug(monkeypatch)
    with pytest.raises((BaseExceptionGroup, AssertionError, TimeoutError, pytest.fail.Exception, BraidError)):
        await run_case(case)


async def test_lagging_reads_pass_if_fresh_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counterpart of `ignore_fresh`: the suite asks for no more than the interface promises."""
    lag(monkeypatch)
    await run_case(SUITE.test_fresh_reads_see_writes_of_other_handles)
