"""The engine: nothing is visible before it is durable; failures, bounds and sessions."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.errors import Closed, OutcomeUnknown, SessionLost, StoreUnavailable, VersionConflict
from braid.metadata import pipeline
from braid.metadata.api import ABSENT, Delete, Event, Put, Session, SessionState, Span, Synced
from braid.metadata.backends import memory
from braid.metadata.engine import Engine, Storage
from braid.metadata.journal import Change, Image, JournalFull
from braid.metadata.watches import Watch
from braid.runtime.env import Runtime
from braid.testing.conformance.metadata_world import SteppedClock, collect, collect_names


class ScriptedJournal:
    """Keeps what it is given; fails when told to."""

    def __init__(self) -> None:
        self.groups: list[list[Change]] = []
        self.counter = 0
        self.error: BaseException | None = None

    def load(self) -> Image:
        return Image("scripted", 0, ())

    def commit(self, changes: Sequence[Change], counter: int) -> None:
        if self.error is not None:
            raise self.error
        self.groups.append(list(changes))
        self.counter = counter


class HeldWorker:
    """A worker whose jobs wait until the test lets them run."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Callable[[], Any], Callable[[Any, BaseException | None], None]]] = []

    def post(self, job: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        self.jobs.append((job, done))

    async def run(self, job: Callable[[], Any]) -> Any:
        return job()

    async def close(self) -> None:
        return

    def release(self) -> None:
        job, done = self.jobs.pop(0)
        try:
            result = job()
        except (OSError, JournalFull) as exc:
            done(None, exc)
        else:
            done(result, None)


class Bench:
    """An engine whose every commit is let through by hand."""

    def __init__(self, engine: Engine, journal: ScriptedJournal, worker: HeldWorker, clock: SteppedClock) -> None:
        self.engine = engine
        self.journal = journal
        self.worker = worker
        self.clock = clock

    async def turns(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def commit(self) -> None:
        await self.turns()
        self.worker.release()
        await self.turns()


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    journal, worker, clock = ScriptedJournal(), HeldWorker(), SteppedClock()
    engine = await Engine.open(replace(Runtime(), clock=clock), Storage(journal, worker))
    made = Bench(engine, journal, worker, clock)
    yield made
    journal.error = None
    closing = asyncio.get_running_loop().create_task(engine.close())
    while not closing.done():
        await made.turns()
        if worker.jobs:
            worker.release()
    await closing


@pytest.mark.inv("INV1")
async def test_nothing_is_visible_or_acknowledged_before_it_is_durable(bench: Bench) -> None:
    store, other = bench.engine.handle("a"), bench.engine.handle("b")
    async with other.watch(Span("/d")) as events, asyncio.TaskGroup() as group:
        assert await anext(events) == Synced(rebuilt=False)
        event = group.create_task(following(events))
        put = group.create_task(store.put("/d/k", b"1", index={"i": "x"}))
        await bench.turns()
        assert len(bench.worker.jobs) == 1
        assert not put.done()
        assert not event.done()
        assert await other.get("/d/k", fresh=True) is None
        assert await collect(store.scan(Span("/d"))) == []
        assert bench.engine.commit_counter == 0
        bench.worker.release()
        assert (await other.get("/d/k")) is not None
        made = await put
        assert await event == Put(made)
        assert bench.engine.commit_counter == made.version == bench.journal.counter


async def following(events: AsyncIterator[Event]) -> Event:
    return await anext(events)


async def test_refusals_wait_for_the_write_they_rest_on(bench: Bench) -> None:
    store = bench.engine.handle("a")
    async with asyncio.TaskGroup() as group:
        group.create_task(store.put("/d/k", b"1"))
        loser = group.create_task(refused(store.put("/d/k", b"2", expected=ABSENT)))
        deleted = group.create_task(store.delete("/d/k"))
        missed = group.create_task(store.delete("/d/k"))
        await bench.turns()
        assert not loser.done()
        assert not missed.done()
        await bench.commit()
        assert loser.done()
        assert deleted.result() is True
        assert missed.result() is False
    with pytest.raises(VersionConflict):  # resting on the committed state alone: at once
        await store.put("/d/k", b"", expected=7)
    assert not bench.worker.jobs


async def refused(call: Any) -> None:
    with pytest.raises(VersionConflict):
        await call


async def test_writes_of_one_turn_share_a_commit_and_keep_their_own_outcome(bench: Bench) -> None:
    store = bench.engine.handle("a")
    async with asyncio.TaskGroup() as group:
        first = group.create_task(store.put("/g/0", b""))
        await bench.turns()
        taken = [group.create_task(store.put("/g/1", b"%d" % n)) for n in range(5)]
        for _ in range(5):
            group.create_task(refused(store.put("/g/1", b"", expected=ABSENT)))
        await bench.turns()
        assert len(bench.worker.jobs) == 1
        bench.worker.release()
        await bench.turns()
        assert first.done()
        assert not taken[0].done()
        await bench.commit()
    assert [len(changes) for changes in bench.journal.groups] == [1, 5]
    assert [task.result().mods for task in taken] == [0, 1, 2, 3, 4]


async def test_groups_are_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "MAX_GROUP", 4)
    store = bench.engine.handle("a")
    async with asyncio.TaskGroup() as group:
        for n in range(10):
            group.create_task(store.put(f"/g/{n}", b""))
        for _ in range(3):
            await bench.commit()
    assert [len(changes) for changes in bench.journal.groups] == [4, 4, 2]
    monkeypatch.setattr(pipeline, "MAX_GROUP_BYTES", 2500)
    async with asyncio.TaskGroup() as group:
        for n in range(4):
            group.create_task(store.put(f"/g/{n}", b"x" * 1000))
        for _ in range(2):
            await bench.commit()
    assert [len(changes) for changes in bench.journal.groups[3:]] == [2, 2]


async def test_waiting_writes_are_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "MAX_PENDING", 3)
    store = bench.engine.handle("a")
    async with asyncio.TaskGroup() as group:
        for n in range(3):
            group.create_task(store.put(f"/g/{n}", b""))
        await bench.turns()
        with pytest.raises(StoreUnavailable, match="waiting"):
            await store.put("/g/3", b"")
        await bench.commit()
        group.create_task(store.put("/g/3", b""))
        await bench.commit()


async def test_cancelled_write_still_commits(bench: Bench) -> None:
    store = bench.engine.handle("a")
    async with asyncio.TaskGroup() as group:
        cancelled = group.create_task(store.put("/c/1", b""))
        kept = group.create_task(store.put("/c/2", b""))
        await bench.turns()
        cancelled.cancel()
        await bench.commit()
    assert cancelled.cancelled()
    assert kept.result().name == "2"
    assert await collect_names(store.names(Span("/c"))) == ["1", "2"]


async def test_full_disk_makes_the_store_read_only_until_a_probe_succeeds(bench: Bench) -> None:
    store, doomed = bench.engine.handle("a"), bench.engine.handle("b")
    async with asyncio.TaskGroup() as group:
        group.create_task(doomed.put("/f/eph", b"", ephemeral=True))
        group.create_task(store.put("/f/old", b"1"))
        await bench.commit()
    bench.journal.error = JournalFull("no room")
    async with asyncio.TaskGroup() as group:
        group.create_task(unavailable(store.put("/f/old", b"2")))
        await bench.turns()
        group.create_task(unavailable(store.append("/f/s", b"", partition="p")))  # queued behind the group that fails
        group.create_task(unavailable(store.put("/f/old", b"3", expected=1234)))
        group.create_task(unavailable(doomed.put("/f/eph", b"")))
        await bench.commit()
    with pytest.raises(StoreUnavailable, match="read-only"):
        await store.put("/f/new", b"")
    doomed.pause_heartbeat()
    found = await store.get("/f/old")
    assert found is not None
    assert found.value == b"1"
    for _ in range(12):
        bench.clock.advance(pipeline.PROBE_SECONDS)
        if bench.worker.jobs:
            bench.worker.release()
    assert doomed.session.state is SessionState.LOST
    assert await store.get("/f/eph") is not None  # cannot be removed yet
    bench.journal.error = None
    bench.clock.advance(pipeline.PROBE_SECONDS)
    bench.worker.release()
    await bench.commit()
    assert await store.get("/f/eph") is None
    async with asyncio.TaskGroup() as group:
        appended = group.create_task(store.append("/f/s", b"", partition="p"))
        await bench.commit()
    assert appended.result().name == f"s-{1:020d}"
    assert bench.journal.counter == bench.engine.commit_counter == appended.result().version


async def test_a_full_disk_is_reported_once_and_then_once_a_minute(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    store = bench.engine.handle("a")
    bench.journal.error = JournalFull("no room")
    async with asyncio.TaskGroup() as group:
        group.create_task(unavailable(store.put("/f/new", b"")))
        await bench.commit()
    for _ in range(200):
        with pytest.raises(StoreUnavailable, match="read-only"):
            await store.put("/f/new", b"")
        store.heartbeat()
        bench.clock.advance(pipeline.PROBE_SECONDS)
        if bench.worker.jobs:
            bench.worker.release()
        await bench.turns()
    assert [record.getMessage()[:33] for record in caplog.records] == ["the metadata store is read-only: "] + [
        "the metadata store is read-only s"
    ] * 3
    assert store.is_read_only
    bench.journal.error = None
    bench.clock.advance(pipeline.PROBE_SECONDS)
    bench.worker.release()
    await bench.turns()
    assert not store.is_read_only


async def unavailable(call: Any) -> None:
    with pytest.raises(StoreUnavailable):
        await call


async def test_write_error_stops_the_store_for_good(bench: Bench) -> None:
    store = bench.engine.handle("a")
    failures: list[BaseException] = []
    bench.engine.on_failure = failures.append
    session = store.session
    bench.journal.error = OSError(5, "input/output error")
    async with store.watch("/e/k") as events, asyncio.TaskGroup() as group:
        assert isinstance(await anext(events), Synced)
        group.create_task(unknown(store.put("/e/k", b"1")))
        await bench.turns()
        group.create_task(unknown(store.put("/e/k", b"2")))
        await bench.commit()
        with pytest.raises(Closed, match="input/output error"):
            await anext(events)
    assert failures == [bench.journal.error]
    assert session.state is SessionState.LOST
    bench.journal.error = None
    for call in (store.get("/e/k"), store.put("/e/k", b"3")):
        with pytest.raises(Closed, match="must be reopened"):
            await call
    with pytest.raises(Closed):
        bench.engine.handle("late")
    assert bench.journal.groups == []


async def unknown(call: Any) -> None:
    with pytest.raises(OutcomeUnknown):
        await call


async def test_expiry_drops_all_ephemerals_in_one_commit(bench: Bench) -> None:
    store = bench.engine.handle("a")
    async with asyncio.TaskGroup() as group:
        for n in range(5):
            group.create_task(store.put(f"/x/{n}", b"", ephemeral=True))
        await bench.commit()
    store.pause_heartbeat()
    bench.clock.advance(10)
    await bench.commit()
    assert [key for key, row in bench.journal.groups[-1] if row is None] == [f"/x/{n}" for n in range(5)]


async def test_session_that_ends_under_a_write_is_reported(bench: Bench) -> None:
    store, other = bench.engine.handle("a"), bench.engine.handle("b")
    lost = store.session
    store.pause_heartbeat()
    async with asyncio.TaskGroup() as group:
        put = group.create_task(session_lost(store.put("/x/k", b"", ephemeral=True)))
        await bench.turns()
        bench.clock.advance(10)
        assert lost.state is SessionState.LOST
        await bench.commit()
        assert put.done()
        await bench.commit()
    assert await other.get("/x/k") is None
    assert await store.get("/x/k") is None
    assert store.session is not lost


async def session_lost(call: Any) -> None:
    with pytest.raises(SessionLost):
        await call


async def test_heartbeat_follows_the_holders_clock(bench: Bench) -> None:
    own = SteppedClock()
    store, other = bench.engine.handle("a", clock=own), bench.engine.handle("b")
    session = store.session
    for _ in range(5):
        own.advance(4)
        bench.clock.advance(4)
    assert session.state is SessionState.CONNECTED
    assert session.good_until() <= bench.clock.monotonic() + session.timeout
    bench.clock.advance(11)  # the holder's clock stands still: it is paused
    assert state_of(session) is SessionState.LOST
    assert other.session.state is SessionState.CONNECTED


def state_of(session: Session) -> SessionState:
    return session.state


async def test_on_commit_tells_the_counter_before_writers_are_answered(bench: Bench) -> None:
    told: list[int] = []
    bench.engine.on_commit = told.append
    store = bench.engine.handle("a")
    async with asyncio.TaskGroup() as group:
        put = group.create_task(store.put("/o/k", b""))
        await bench.turns()
        bench.worker.release()
        assert told == [1]
        assert not put.done()
    assert bench.engine.commit_counter == 1


async def test_watcher_memory_is_bounded_by_the_keys_in_range() -> None:
    root = await memory.open_store(Runtime())
    store = root.handle("a")
    await store.put("/m/known", b"")
    async with store.watch(Span("/m")) as events:
        assert isinstance(events, Watch)
        assert isinstance(await anext(events), Put)
        assert isinstance(await anext(events), Synced)
        for n in range(500):
            await store.put(f"/m/churn{n}", b"")
            await store.put("/m/same", b"%d" % n)
            await store.delete(f"/m/churn{n}")
        await store.delete("/m/known")
        assert events.unread() == 2
        assert [type(await anext(events)) for _ in range(2)] == [Put, Delete]
    assert len(root.watches) == 0
    await root.close()


async def test_watches_and_followers_leave_nothing_behind() -> None:
    root = await memory.open_store(Runtime())
    store = root.handle("a")
    watches = [
        store.watch("/k"),
        store.watch("/k", recursive=True),
        store.watch(Span("/k")),
        store.follow("/k/s", partition="p"),
    ]
    for watch in watches:
        async with watch:
            assert len(root.watches) == 1
        assert len(root.watches) == 0
    await root.close()


_burst = st.lists(
    # No deletes in the sequence: a number deleted in the same burst is not reused, which is allowed and would differ.
    st.tuples(st.sampled_from(["put", "create", "append"]), st.sampled_from(["a", "b", f"s-{2:020d}"]))
    | st.tuples(st.just("delete"), st.sampled_from(["a", "b"])),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.lists(_burst, max_size=5))
def test_concurrent_calls_behave_as_if_issued_one_by_one(bursts: list[list[tuple[str, str]]]) -> None:
    async def run(together: bool) -> list[Any]:
        root = await memory.open_store(replace(Runtime(), clock=SteppedClock()))
        store = root.handle("a")
        outcomes: list[Any] = []
        for burst in bursts:
            calls: list[Any] = []
            for kind, name in burst:
                if kind == "append":
                    calls.append(store.append("/o/s", b"", partition="p"))
                elif kind == "delete":
                    calls.append(store.delete(f"/o/{name}", partition="p"))
                else:
                    expected = ABSENT if kind == "create" else None
                    calls.append(store.put(f"/o/{name}", b"", expected=expected, partition="p"))
            if together:
                outcomes += await asyncio.gather(*calls, return_exceptions=True)
            else:
                for call in calls:
                    outcomes += await asyncio.gather(call, return_exceptions=True)
        outcomes += await collect(store.scan(Span("/o")))
        await root.close()
        return [str(outcome) if isinstance(outcome, BaseException) else outcome for outcome in outcomes]

    alone, together = asyncio.run(run(False)), asyncio.run(run(True))
    assert together == alone
