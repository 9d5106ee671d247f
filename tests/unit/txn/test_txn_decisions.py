"""`Decisions`: who holds something of a transaction is told its outcome, by the watch or by the reconcile."""

from collections.abc import AsyncIterator

import pytest
from tests.unit.txn.coordination_bench import Bench, brokers

from braid.model.txn import TxnId
from braid.testing.conformance.metadata_world import until
from braid.txn import records
from braid.txn.decisions import Decisions
from braid.txn.records import TxnHeader

RECONCILE = 1.0


class Listener:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[TxnId, str | None]] = []

    def __call__(self, root: TxnId, header: TxnHeader | None) -> None:
        self.told.append((root, None if header is None else header.state))


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with brokers() as (made,):
        yield made


@pytest.fixture
async def decisions(bench: Bench) -> AsyncIterator[Decisions]:
    made = Decisions(bench.faulty, bench.store, bench.clock, reconcile_seconds=RECONCILE)
    made.start()
    yield made
    await made.close()


@pytest.mark.req("R473-23", "R473-38")
@pytest.mark.parametrize("commit", [True, False])
async def test_the_outcome_is_told_by_the_watch(bench: Bench, decisions: Decisions, commit: bool) -> None:
    """Without time passing: the reconcile has no part in it."""
    txn, other = await bench.begin(), await bench.begin()
    one, two, third = Listener(), Listener(), Listener()
    for listener in (one, two):
        decisions.hold(txn, listener)
        decisions.hold(txn, listener)
    decisions.hold(other, third)
    await bench.world.advance(0)
    assert one.told == []
    await bench.coordinator.end(txn, commit=commit)
    await bench.world.advance(0)
    assert one.told == two.told == [(txn, "COMMITTED" if commit else "ABORTED")]
    assert third.told == []
    assert decisions.held == 2


async def test_what_was_decided_before_is_told_at_once(bench: Bench, decisions: Decisions) -> None:
    txn = await bench.begin()
    await bench.coordinator.end(txn, commit=True)
    listener = Listener()
    decisions.hold(txn, listener)
    await bench.world.advance(0)
    assert listener.told == [(txn, "COMMITTED")]


@pytest.mark.inv("INV15")
async def test_a_lost_event_delays_the_outcome_by_one_reconcile_at_most(bench: Bench, decisions: Decisions) -> None:
    bench.faulty.faults.watch_drop = 1.0
    txn = await bench.begin()
    listener = Listener()
    decisions.hold(txn, listener)
    await bench.world.advance(0.5)
    await bench.coordinator.end(txn, commit=True)
    await bench.world.advance(0.3)
    assert listener.told == []
    await bench.world.advance(0.3)
    assert listener.told == [(txn, "COMMITTED")]
    assert bench.faulty.hits["watch drop"] > 0


@pytest.mark.inv("INV15")
async def test_a_store_that_was_away_is_asked_again(bench: Bench, decisions: Decisions) -> None:
    """The watch never came about and some reconciles failed."""
    txn = await bench.begin()
    bench.faulty.is_cut = True
    listener = Listener()
    decisions.hold(txn, listener)
    await bench.world.advance(3 * RECONCILE)
    bench.faulty.is_cut = False
    await bench.coordinator.end(txn, commit=False)
    await bench.world.advance(RECONCILE)
    assert listener.told == [(txn, "ABORTED")]


async def test_a_missing_header_is_told_too(bench: Bench, decisions: Decisions) -> None:
    gone, never = await bench.begin(), TxnId.of(0, 999)
    listener = Listener()
    decisions.hold(gone, listener)
    decisions.hold(never, listener)
    await bench.world.advance(0)
    await bench.coordinator.end(gone, commit=True)
    await bench.store.delete_header(await bench.header(gone))
    await bench.world.advance(RECONCILE)
    assert (gone, None) in listener.told
    assert (never, None) in listener.told


async def test_who_let_go_hears_nothing_and_the_others_do(bench: Bench, decisions: Decisions) -> None:
    txn = await bench.begin()
    one, two = Listener(), Listener()
    decisions.hold(txn, one)
    decisions.hold(txn, two)
    await bench.world.advance(0)
    decisions.release(txn, one)
    decisions.release(txn, one)
    await bench.coordinator.end(txn, commit=True)
    await bench.world.advance(0)
    assert one.told == []
    assert len(two.told) == 1
    decisions.release(txn, two)
    assert decisions.held == 0
    await bench.world.advance(2 * RECONCILE)
    assert len(two.told) == 1
    decisions.release(TxnId.of(0, 999), one)


async def test_who_does_not_let_go_is_told_again(bench: Bench, decisions: Decisions) -> None:
    """A listener whose work failed gets another chance."""
    txn = await bench.begin()
    listener = Listener()
    decisions.hold(txn, listener)
    await bench.coordinator.end(txn, commit=True)
    for _ in range(3):
        await bench.world.advance(RECONCILE)
    assert len(listener.told) >= 3
    assert set(listener.told) == {(txn, "COMMITTED")}


async def test_listeners_may_let_go_while_they_are_told(bench: Bench, decisions: Decisions) -> None:
    txn = await bench.begin()
    told: list[str] = []

    def one(root: TxnId, _header: TxnHeader | None) -> None:
        told.append("one")
        decisions.release(root, one)

    def two(root: TxnId, _header: TxnHeader | None) -> None:
        told.append("two")
        decisions.release(root, two)

    decisions.hold(txn, one)
    decisions.hold(txn, two)
    await bench.world.advance(0)
    await bench.coordinator.end(txn, commit=True)
    await bench.world.advance(2 * RECONCILE)
    assert told == ["one", "two"]
    assert decisions.held == 0


async def test_a_listener_that_fails_keeps_the_outcome_from_nobody(
    bench: Bench, decisions: Decisions, caplog: pytest.LogCaptureFixture
) -> None:
    txn = await bench.begin()
    listener = Listener()

    def fails(_root: TxnId, _header: TxnHeader | None) -> None:
        raise RuntimeError("a mistake")

    decisions.hold(txn, fails)
    decisions.hold(txn, listener)
    await bench.coordinator.end(txn, commit=True)
    await until(bench.world, lambda: len(listener.told) >= 3)
    assert "a listener failed on the outcome" in caplog.text


async def test_nobody_is_told_after_the_end(bench: Bench) -> None:
    txn = await bench.begin()
    closed = Decisions(bench.faulty, bench.store, bench.clock, reconcile_seconds=RECONCILE)
    killed = Decisions(bench.faulty, bench.store, bench.clock, reconcile_seconds=RECONCILE)
    listener = Listener()
    for each in (closed, killed):
        each.start()
        each.hold(txn, listener)
    await bench.world.advance(0)
    await closed.close()
    killed.kill()
    await bench.coordinator.end(txn, commit=True)
    await bench.world.advance(2 * RECONCILE)
    assert listener.told == []


@pytest.mark.inv("INV15")
async def test_a_header_that_cannot_be_read_keeps_no_other_from_being_told(bench: Bench, decisions: Decisions) -> None:
    bench.faulty.faults.watch_drop = 1.0
    broken, txn = await bench.begin(), await bench.begin()
    listener = Listener()
    for root in (broken, txn):
        decisions.hold(root, listener)
    await bench.world.advance(0)
    await bench.coordinator.end(txn, commit=True)
    await bench.faulty.inner.put(records.header_key(broken), b"not a header", partition=str(broken))
    await bench.world.advance(1.1)
    assert listener.told == [(txn, "COMMITTED")]
