"""`Sinks`: the order in which a begin decides, every write of it with every outcome, fold, expiry, removal."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import msgspec
import pytest
from tests.unit.txn.coordination_bench import MINUTE_MS, Bench, brokers

from braid.errors import (
    Forbidden,
    InvalidArgument,
    InvalidTransactionStatus,
    OutcomeUnknown,
    SinkFenced,
    SinkNotFound,
    StoreMismatch,
    StoreUnavailable,
)
from braid.model.txn import TxnId
from braid.testing.faulty_metadata import Fault
from braid.txn import records
from braid.txn.config import TransactionConfig
from braid.txn.records import SinkBatch, SinkRecord
from braid.txn.sinks import ATTEMPTS, MAX_RETIRED
from braid.txn.sweeps import TransactionSweeps

SINK = "8a2c/topic://public/default/out"
KEY = records.sink_key(SINK)
DAY_MS = 86_400_000
WRITE_FAULTS = [Fault.CONFLICT, Fault.UNAVAILABLE, Fault.UNKNOWN_APPLIED, Fault.UNKNOWN_DROPPED, Fault.UNKNOWN_LATE]


@pytest.fixture
async def benches() -> AsyncIterator[list[Bench]]:
    async with brokers(2, TransactionConfig(retention_seconds=60)) as made:
        yield made


@pytest.fixture
def bench(benches: list[Bench]) -> Bench:
    return benches[0]


async def begin(bench: Bench, batch: int, run: str, *, sink: str = SINK, owner: str | None = None) -> TxnId | None:
    return await bench.sinks.begin(SinkBatch(sink, batch, run), MINUTE_MS, owner=owner)


async def begun(bench: Bench, batch: int, run: str) -> TxnId:
    found = await begin(bench, batch, run)
    assert found is not None
    return found


async def written(bench: Bench, batch: int, run: str) -> TxnId:
    txn = await begun(bench, batch, run)
    await bench.coordinator.decide(txn, [])
    return txn


async def record(bench: Bench, sink: str = SINK) -> SinkRecord:
    found = await bench.store.sink(sink)
    assert found is not None
    return found.value


async def open_roots(bench: Bench) -> set[TxnId]:
    return {each.root for each in await bench.store.open_headers(1000)}


def sweeps(bench: Bench) -> TransactionSweeps:
    class Leader:
        def leads(self, _number: int) -> bool:
            return True

    async def load(_segment: str) -> bool:
        return True

    leader: Any = Leader()
    return TransactionSweeps(bench.store, bench.coordinator, leader, bench.clock, bench.config, load, bench.sinks)


async def collected(bench: Bench) -> int:
    """Everything that ended long ago goes."""
    await bench.world.advance(61)
    return await sweeps(bench).collect()


# The order of a begin.


async def test_the_first_batch_of_a_sink(bench: Bench) -> None:
    txn = await begun(bench, 5, "a")
    header = await bench.header(txn)
    assert header.value.is_open and header.value.is_decider
    assert (header.value.sink, header.value.batch, header.value.run) == (SINK, 5, "a")
    found = await record(bench)
    assert found.current == records.SinkCurrent(batch=5, txn=str(txn))
    assert (found.run, found.run_epoch, found.last, found.retired_runs) == ("a", 1, None, ())
    assert found.expires_ms == bench.clock.now_ms() + 30 * DAY_MS


async def test_everybody_of_a_run_gets_the_same_decider(benches: list[Bench]) -> None:
    found = await asyncio.gather(*[begun(each, 0, "a") for each in benches * 10])
    assert len(set(found)) == 1
    assert await open_roots(benches[0]) == set(found)  # whoever made another one has ended it


async def test_a_committed_batch_is_a_duplicate_for_every_run(bench: Bench) -> None:
    await written(bench, 3, "a")
    assert [await begin(bench, batch, "a") for batch in (0, 3)] == [None, None]
    assert [await begin(bench, batch, "b") for batch in (0, 3)] == [None, None]
    assert await begin(bench, 4, "b") is not None


async def test_a_lower_batch_than_the_one_under_way_is_a_duplicate_even_for_a_retired_run(bench: Bench) -> None:
    await written(bench, 0, "a")
    await begun(bench, 1, "b")
    assert await begin(bench, 0, "a") is None  # a late attempt of what is there
    assert await begin(bench, 0, "b") is None


async def test_a_retired_run_is_fenced(bench: Bench) -> None:
    first = await begun(bench, 0, "a")
    second = await begun(bench, 0, "b")
    assert await bench.state(first) == "ABORTED"
    with pytest.raises(SinkFenced, match=r"run a has lost the sink .* to the run b, .* Stop one of the two jobs"):
        await begin(bench, 0, "a")
    assert await bench.state(second) == "OPEN"
    found = await record(bench)
    assert (found.run, found.run_epoch, found.retired_runs) == ("b", 2, ("a",))


async def test_a_run_that_finds_its_batch_written_takes_the_sink_over_nevertheless(bench: Bench) -> None:
    await written(bench, 0, "a")
    assert await begin(bench, 0, "b") is None
    assert await record(bench) == SinkRecord(
        run="b", run_epoch=2, last=0, last_run="a", retired_runs=("a",), expires_ms=bench.clock.now_ms() + 30 * DAY_MS
    )
    with pytest.raises(SinkFenced):
        await begin(bench, 1, "a")


async def test_the_next_batch_folds_the_one_before(bench: Bench) -> None:
    await written(bench, 0, "a")
    txn = await begun(bench, 1, "a")
    found = await record(bench)
    assert (found.last, found.current) == (0, records.SinkCurrent(batch=1, txn=str(txn)))
    assert (found.run_epoch, found.retired_runs) == (1, ())


async def test_an_undecided_batch_of_the_same_run_is_never_aborted(bench: Bench) -> None:
    first = await begun(bench, 0, "a")
    with pytest.raises(
        InvalidTransactionStatus, match=r"Batch 0 of the sink .* is not decided yet .* decide or abort it first"
    ):
        await begin(bench, 1, "a")
    assert await bench.state(first) == "OPEN"
    await bench.coordinator.end(first, commit=False)
    assert await begin(bench, 1, "a") is not None


async def test_the_own_batch_that_was_aborted_is_refused(bench: Bench) -> None:
    txn = await begun(bench, 0, "a")
    await bench.coordinator.end(txn, commit=False)
    for _ in range(2):
        with pytest.raises(InvalidTransactionStatus, match=r"Batch 0 .* was aborted in this run .*; start the job again"):
            await begin(bench, 0, "a")
        await collected(bench)  # the second time nobody knows its header any more
    assert await begin(bench, 0, "b") is not None


async def test_a_batch_that_is_committed_while_another_run_comes(bench: Bench) -> None:
    """The decision falls between the new run's look at the header and its abort."""
    txn = await begun(bench, 0, "a")
    outcome = bench.coordinator.outcome

    async def late(root: TxnId) -> Any:
        await bench.coordinator.decide(txn, [])
        return await outcome(root)

    bench.coordinator.outcome = late  # type: ignore[method-assign]
    assert await begin(bench, 0, "b") is None
    assert await bench.state(txn) == "COMMITTED"
    assert (await record(bench)).last == 0


async def test_retired_runs_are_bounded(bench: Bench) -> None:
    for number in range(MAX_RETIRED + 3):
        await begun(bench, 0, f"run {number}")
    found = await record(bench)
    assert found.run_epoch == MAX_RETIRED + 3
    assert found.retired_runs == tuple(f"run {number}" for number in range(2, MAX_RETIRED + 2))
    assert len(await open_roots(bench)) == 1
    await bench.coordinator.decide(await begun(bench, 0, f"run {MAX_RETIRED + 2}"), [])
    await collected(bench)
    assert await begin(bench, 0, "run 0") is None  # forgotten, and yet nothing is written twice


async def test_sinks_do_not_disturb_each_other(bench: Bench) -> None:
    one = await begin(bench, 0, "a")
    other = await begin(bench, 0, "b", sink="another")
    assert one is not None and other is not None
    assert await open_roots(bench) == {one, other}


async def test_a_sink_of_another_role(bench: Bench) -> None:
    txn = await begin(bench, 0, "a", owner="alice")
    assert txn is not None
    assert (await bench.header(txn)).value.owner == "alice"
    with pytest.raises(Forbidden, match=r"another role's; give this job a sink of its own"):
        await begin(bench, 0, "b", owner="bob")
    assert await bench.state(txn) == "OPEN"
    assert await begin(bench, 0, "a", owner="alice") == txn
    assert await begin(bench, 0, "a") == txn  # where nobody is asked who he is


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        (SinkBatch("", 0, "a"), "cannot name a sink"),
        (SinkBatch("/" * 1366, 0, "a"), "cannot name a sink"),
        (SinkBatch("s", 0, ""), "cannot name a run"),
        (SinkBatch("s", 0, "r" * 257), "cannot name a run"),
        (SinkBatch("s", -1, "a"), "numbered from 0"),
        (SinkBatch("s", 1 << 63, "a"), "numbered from 0"),
    ],
)
async def test_what_no_batch_can_be(bench: Bench, wanted: SinkBatch, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        await bench.sinks.begin(wanted, MINUTE_MS)
    assert await bench.store.sinks(10) == []


async def test_a_record_that_cannot_be_read_is_left_alone(bench: Bench) -> None:
    await bench.faulty.inner.put(KEY, b"{}")
    await begin(bench, 0, "a", sink="whole")
    with pytest.raises(StoreMismatch, match="/sinks/8a2c%2Ftopic"):
        await begin(bench, 0, "a")
    assert [each.name for each in await bench.store.sinks(10)] == ["whole"]


# Every write of a begin with every outcome, and a crash after each.


async def attempt(call: Awaitable[TxnId | None], bench: Bench) -> TxnId | str | None:
    """As a client asks: again after what passes."""
    try:
        return await call
    except (StoreUnavailable, OutcomeUnknown):
        return "again"
    finally:
        await bench.world.advance(2)  # what is late arrives


@pytest.mark.parametrize("fault", WRITE_FAULTS)
@pytest.mark.parametrize("skip", range(3))
@pytest.mark.parametrize("before", ["nothing", "committed", "open", "the batch itself"])
async def test_a_begin_is_repeated_until_it_is_known(bench: Bench, before: str, skip: int, fault: Fault) -> None:
    """`skip` is which write of the begin fails: of the old decider's header, the new one's, the record."""
    old: TxnId | None = None
    if before == "committed":
        old = await written(bench, 0, "a")
    elif before == "open":
        old = await begun(bench, 1, "a")
    elif before == "the batch itself":
        old = await written(bench, 1, "a")
    bench.faulty.plan(fault, "put", skip=skip)
    found = "again"
    for _ in range(3):
        if found == "again":
            answer = await attempt(begin(bench, 1, "b"), bench)
            found = answer if isinstance(answer, str) else ("duplicate" if answer is None else "begun")
    assert found == ("duplicate" if before == "the batch itself" else "begun")
    now = await record(bench)
    if found == "begun":
        assert now.current is not None and now.current.batch == 1 and now.run == "b"
        assert await bench.state(TxnId.parse(now.current.txn)) == "OPEN"
        assert await begun(bench, 1, "b") == TxnId.parse(now.current.txn)
    if old is not None:
        assert await bench.state(old) == ("ABORTED" if before == "open" else "COMMITTED")
        assert now.retired_runs == ("a",)
    assert now.last == {"nothing": None, "committed": 0, "open": None, "the batch itself": 1}[before]
    # What was made besides is not the sink's, and its deadline ends it.
    bench.faulty._plans.clear()  # of a begin with fewer writes
    await bench.world.advance(61)
    await sweeps(bench).abort_expired()
    assert await open_roots(bench) == set()


class Crash(Exception):
    """The broker is gone."""


@pytest.mark.parametrize("is_applied", [True, False], ids=["after", "before"])
@pytest.mark.parametrize("at", range(4))
async def test_a_broker_that_dies_at_any_write_of_a_begin_loses_and_repeats_nothing(
    benches: list[Bench], at: int, is_applied: bool
) -> None:
    dying, other = benches
    await written(dying, 0, "a")
    first = await begun(dying, 1, "a")
    put, writes = dying.faulty.inner.put, []

    async def dies(key: str, *args: Any, **kwargs: Any) -> Any:
        writes.append(key)
        if len(writes) - 1 < at:
            return await put(key, *args, **kwargs)
        if is_applied and len(writes) - 1 == at:
            await put(key, *args, **kwargs)
        raise Crash

    dying.store.metadata.put = dies  # type: ignore[method-assign]
    try:
        await begin(dying, 1, "b")
    except Crash:
        pass
    else:
        assert len(writes) == at == 3
    assert [key.partition("/")[2].partition("/")[0] for key in writes] == ["txn", "txn", "sinks"][: at + 1]
    again = await begun(other, 1, "b")
    assert again != first
    assert await begun(other, 1, "b") == again
    await other.coordinator.decide(again, [])
    await other.world.advance(61)
    await sweeps(other).abort_expired()  # the orphan of a crash between header and record
    assert await open_roots(other) == set()
    assert [await other.state(each) for each in (first, again)] == ["ABORTED", "COMMITTED"]
    committed = [each.value.batch async for each in other.store.finished(1 << 50) if each.value.state == "COMMITTED"]
    assert sorted(filter(None, committed)) == [1]


async def test_a_begin_that_never_gets_its_turn_says_so(bench: Bench) -> None:
    await begin(bench, 0, "a", sink="other")  # the coordinator has its numbers
    for _ in range(ATTEMPTS):
        bench.faulty.plan(Fault.UNKNOWN_DROPPED, "put", KEY)
    with pytest.raises(StoreUnavailable, match=f"Batch 0 of the sink .* {ATTEMPTS} attempts; try again"):
        await begin(bench, 0, "a")
    assert await begin(bench, 0, "a") is not None


# Collection.


async def test_a_committed_batch_is_noted_before_its_header_goes(bench: Bench) -> None:
    txn = await written(bench, 4, "a")
    bench.faulty.plan(Fault.UNAVAILABLE, "put", KEY)
    assert await collected(bench) == 0  # not noted, so the header stays
    assert await bench.state(txn) == "COMMITTED"
    assert await collected(bench) == 1
    assert await bench.store.header(txn, fresh=True) is None
    found = await record(bench)
    assert (found.last, found.current, found.run) == (4, None, "a")
    assert await begin(bench, 4, "b") is None
    assert await begin(bench, 5, "c") is not None
    with pytest.raises(SinkFenced):
        await begin(bench, 5, "a")  # who had it is remembered without its batch


@pytest.mark.parametrize("fault", [Fault.CONFLICT, Fault.UNKNOWN_APPLIED, Fault.UNKNOWN_DROPPED])
async def test_noting_survives_bad_luck(bench: Bench, fault: Fault) -> None:
    await written(bench, 4, "a")
    bench.faulty.plan(fault, "put", KEY)
    assert await collected(bench) == 1
    assert (await record(bench)).last == 4


async def test_an_aborted_batch_is_not_noted(bench: Bench) -> None:
    await bench.coordinator.end(await begun(bench, 4, "a"), commit=False)
    assert await collected(bench) == 1
    found = await record(bench)
    assert found.last is None
    view = await bench.sinks.look(SINK)
    assert view is not None and (view.last, view.open) == (None, None)


async def test_what_another_decider_followed_is_not_noted_again(bench: Bench) -> None:
    await written(bench, 4, "a")
    await begun(bench, 5, "a")
    before = await record(bench)
    await bench.coordinator.renew(await begun(bench, 5, "a"), 10 * MINUTE_MS)
    assert await collected(bench) == 1
    assert await record(bench) == before


@pytest.mark.parametrize("is_own", [True, False], ids=["the same run", "another run"])
async def test_a_batch_that_is_folded_and_collected_in_the_middle_of_a_begin(bench: Bench, is_own: bool) -> None:
    """The record is read, then the batch is noted and its header goes, then the header is looked for."""
    txn = await written(bench, 0, "a")
    look = bench.store.header

    async def late(root: TxnId, **fresh: bool) -> Any:
        bench.store.header = look  # type: ignore[method-assign]
        assert await collected(bench) == 1
        return await look(root, **fresh)

    bench.store.header = late  # type: ignore[method-assign]
    assert await begin(bench, 0, "a" if is_own else "b") is None
    assert await bench.store.header(txn, fresh=True) is None
    assert await open_roots(bench) == set()


async def test_a_look_in_the_middle_of_a_collection(bench: Bench) -> None:
    await written(bench, 0, "a")
    look = bench.store.header

    async def late(root: TxnId, **fresh: bool) -> Any:
        bench.store.header = look  # type: ignore[method-assign]
        assert await collected(bench) == 1
        return await look(root, **fresh)

    bench.store.header = late  # type: ignore[method-assign]
    view = await bench.sinks.look(SINK)
    assert view is not None and view.last == 0


async def test_a_look(bench: Bench) -> None:
    assert await bench.sinks.look(SINK) is None
    txn = await begun(bench, 0, "a")
    view = await bench.sinks.look(SINK)
    assert view is not None and view.open is not None
    assert (view.last, view.open.batch, view.open.txn) == (None, 0, str(txn))
    await bench.coordinator.decide(txn, [])
    view = await bench.sinks.look(SINK)
    assert view is not None and (view.last, view.open) == (0, None)


# Expiry and removal.


async def test_a_sink_is_forgotten_after_its_retention() -> None:
    async with brokers(1, TransactionConfig(sink_retention_seconds=600)) as (bench,):
        await written(bench, 0, "a")
        await begin(bench, 0, "a", sink="younger")
        await collected(bench)
        await bench.world.advance(538)
        await begin(bench, 1, "b", sink="younger")
        assert await sweeps(bench).forget_sinks() == 0
        assert await begin(bench, 0, "a") is None
        await bench.world.advance(1)
        assert await sweeps(bench).forget_sinks() == 1
        assert [each.name for each in await bench.store.sinks(10)] == ["younger"]
        assert await begin(bench, 0, "a") is not None  # that is the price


async def test_a_sink_with_a_batch_under_way_is_not_forgotten() -> None:
    config = TransactionConfig(sink_retention_seconds=60, max_timeout_seconds=3600)
    async with brokers(1, config) as (bench,):
        txn = await begun(bench, 0, "a")
        await bench.coordinator.renew(txn, 3_600_000)
        await bench.world.advance(61)
        assert await sweeps(bench).forget_sinks() == 0
        assert (await record(bench)).expires_ms == bench.clock.now_ms() + 60_000
        assert await begun(bench, 0, "a") == txn


async def test_a_sink_that_is_used_meanwhile_is_not_forgotten(bench: Bench) -> None:
    await written(bench, 0, "a")
    old = await bench.store.sink(SINK)
    assert old is not None
    await begun(bench, 1, "a")
    assert not await bench.sinks.expire(old)
    await bench.store.put_sink("broken link", msgspec.structs.replace(old.value, expires_ms=0), None)
    bench.faulty.plan(Fault.UNAVAILABLE, "delete")
    assert await sweeps(bench).forget_sinks() == 0
    assert await sweeps(bench).forget_sinks() == 1
    assert (await record(bench)).last == 0


async def test_deleting_a_sink_aborts_what_is_under_way(bench: Bench) -> None:
    txn = await begun(bench, 0, "a")
    await bench.sinks.delete(SINK)
    assert await bench.state(txn) == "ABORTED"
    with pytest.raises(SinkNotFound, match=r"does not exist; .*transactions\.sink_retention_seconds"):
        await bench.sinks.delete(SINK)
    assert await begin(bench, 0, "a") is not None


@pytest.mark.parametrize("fault", [Fault.UNKNOWN_APPLIED, Fault.UNKNOWN_DROPPED])
async def test_deleting_survives_bad_luck(bench: Bench, fault: Fault) -> None:
    await written(bench, 0, "a")
    bench.faulty.plan(fault, "delete", KEY)
    await bench.sinks.delete(SINK)
    assert await bench.store.sink(SINK) is None
