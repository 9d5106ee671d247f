"""What acknowledgments inside transactions cost: as much as they are, and no more because of others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.steps import Steps
from tests.unit.txn.ack_model import ModelCursor, place
from tests.unit.txn.coordination_bench import SEGMENT, Bench, brokers
from tests.unit.txn.test_pending_acks import Listener, Owner

from braid.model.txn import TxnId
from braid.runtime.tasks import Tasks
from braid.txn import pending_acks, records
from braid.txn.ack_ops import op_of
from braid.txn.ack_recovery import recover_all
from braid.txn.api import Ack
from braid.txn.decisions import Decisions
from braid.txn.pending_acks import MetadataPendingAckStore
from braid.txn.records import TxnHeader

EACH = 20


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with brokers() as (made,):
        yield made


async def decoded(bench: Bench, transactions: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Ops that are decoded while one after the other of so many transactions is committed and materialised."""
    owner = Owner(bench, ModelCursor(transactions * EACH), reconcile_seconds=1000.0)
    txns = [await bench.begin() for _number in range(transactions)]
    for number, txn in enumerate(txns):
        await owner.ack(txn, *range(number * EACH, (number + 1) * EACH))
    count = 0
    decode = records.decode_op

    def counted(key: str, value: bytes) -> records.TxnOp:
        nonlocal count
        count += 1
        return decode(key, value)

    with monkeypatch.context() as patch:
        patch.setattr(records, "decode_op", counted)
        for txn in txns:
            await bench.coordinator.end(txn, commit=True)
        await owner.settled()
    assert owner.cursor.stored == {(entry, each) for entry in range(transactions * EACH) for each in range(3)}
    assert await bench.store.count_ops() == 0
    await owner.close()
    return count


@pytest.mark.req("R473-28")
async def test_materialising_reads_no_more_than_what_is_materialised(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await decoded(bench, 10, monkeypatch) == 10 * EACH


async def test_a_transaction_in_many_subscriptions_is_read_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    txn = await bench.begin()
    for number in range(10):
        for entry in range(EACH):
            await bench.store.append_op(txn, op_of(SEGMENT, f"s{number}", "a1", Ack(place(entry)), is_cumulative=False))
    found = [await bench.store.acks_of(SEGMENT, f"s{number}", txn) for number in range(10)]
    assert [len(each) for each in found] == [EACH] * 10
    assert {op.op.subscription for op in found[3]} == {"s3"}


@pytest.mark.parametrize("is_commit", [True, False])
async def test_ops_that_an_earlier_version_wrote_are_materialised_too(bench: Bench, is_commit: bool) -> None:
    txn, other = await bench.begin(), await bench.begin()
    for each, entry in ((txn, 0), (txn, 2), (other, 3)):
        op = op_of(SEGMENT, "sub", "a1", Ack(place(entry)), is_cumulative=False)
        await bench.store.metadata.append(
            records.op_prefix(each),
            records.encode(op),
            partition=str(each.root),
            index={records.ACKS_BY_SEGMENT_SUBSCRIPTION: records.acks_secondary(SEGMENT, "sub")},
        )
    assert len(await bench.store.acks_in(SEGMENT, "sub")) == 3
    owner = Owner(bench, ModelCursor(6))
    await owner.recover()
    await owner.ack(txn, 1)
    await bench.coordinator.end(txn, commit=is_commit)
    await bench.coordinator.end(other, commit=True)
    await owner.settled()
    assert owner.acked() == ([0, 1, 2, 3] if is_commit else [3])
    assert await bench.store.count_ops() == 0
    await owner.close()


# Long walks let others have their turn.


async def recovering(bench: Bench, count: int) -> Steps:
    """A segment is taken over whose subscription has so many ops of one open transaction."""
    txn = await bench.begin()
    for entry in range(count):
        await bench.store.append_op(txn, op_of(SEGMENT, "sub", "a1", Ack(place(entry)), is_cumulative=False))
    owner = Owner(bench, ModelCursor(count), reconcile_seconds=1000.0)
    with Steps() as steps:
        await owner.recover()
    assert len(owner.acks.holds.of(txn)) == count
    await bench.coordinator.end(txn, commit=True)
    await owner.settled()
    assert len(owner.acked()) == min(count, 6)
    assert await bench.store.count_ops() == 0
    await owner.close()
    return steps


async def test_taking_over_many_acknowledgments_lets_others_have_their_turn(bench: Bench) -> None:
    one, many = await recovering(bench, 500), await recovering(bench, 3000)
    assert many.total > 4 * one.total
    assert many.longest < 2 * one.longest


async def test_what_is_decided_during_the_takeover_loses_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The outcome comes while half of a transaction's acknowledgments are known here."""
    txn, count = await bench.begin(), 1500
    for entry in range(count):
        await bench.store.append_op(txn, op_of(SEGMENT, "sub", "a1", Ack(place(entry)), is_cumulative=False))
    monkeypatch.setattr(pending_acks, "CHECKED_AT_ONCE", 10)  # so that it takes longer than materialising would
    owner = Owner(bench, ModelCursor(count))
    hold = owner.acks.holds.add
    header = (await bench.header(txn)).value
    known = 0

    def add(*args: object) -> object:
        nonlocal known
        known += 1
        if known == 700:
            decided = TxnHeader(state="COMMITTED", timeout_ms=header.timeout_ms, created_ms=header.created_ms, finalized_ms=1)
            owner.acks._decided(txn, decided)
        return hold(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(owner.acks.holds, "add", add)
    await owner.recover()
    await owner.settled()
    assert owner.cursor.stored == {(entry, each) for entry in range(count) for each in range(3)}
    await owner.close()


async def test_many_subscriptions_are_restored_by_one_look_at_the_ops(bench: Bench) -> None:
    async def steps(subscriptions: int) -> int:
        names = [f"s{number}" for number in range(subscriptions)]
        txn = await bench.begin()
        for name in names:
            for entry in range(2):
                await bench.store.append_op(txn, op_of(SEGMENT, name, "a1", Ack(place(entry)), is_cumulative=False))
        tasks, cursor = Tasks("owner"), ModelCursor(6)
        decisions = Decisions(bench.faulty, bench.store, bench.clock, reconcile_seconds=1000.0)
        pending = {
            name: MetadataPendingAckStore(SEGMENT, name, cursor, bench.store, decisions, bench.clock, tasks, Listener())
            for name in names
        }
        with Steps() as counted:
            await recover_all(bench.store, SEGMENT, pending, cursor.check_owner, tasks, bench.clock)
        assert all(len(each.holds.of(txn)) == 2 for each in pending.values())
        await tasks.close()
        await decisions.close()
        await bench.store._delete_all(await bench.store.all_acks_in(SEGMENT))
        return counted.total

    assert await steps(200) < 5 * await steps(50)


async def test_comparing_many_held_transactions_lets_others_have_their_turn(bench: Bench) -> None:
    decisions = Decisions(bench.faulty, bench.store, bench.clock, reconcile_seconds=1000.0)

    async def longest(count: int) -> int:
        roots = [await bench.begin() for _number in range(count)]
        for root in roots:
            decisions.hold(root, lambda _root, _header: None)
        with Steps() as steps:
            await decisions.reconcile()
        assert steps.total > count
        return steps.longest

    one = await longest(100)
    assert await longest(1000) < 2 * one
    await decisions.close()


def test_the_root_is_part_of_the_index_of_an_ack() -> None:
    root = TxnId(3, 5 << 20)
    op = op_of("persistent://t/n/x", "s:1", "a1", Ack(place(1)), is_cumulative=False)
    whole = records.acks_secondary("persistent://t/n/x", "s:1")
    assert records.op_index(root.with_sub(2), op) == {records.ACKS_BY_SEGMENT_SUBSCRIPTION: f"{whole}:3_5242880"}


async def test_many_acknowledgments_that_come_together_are_accepted_in_several_turns(bench: Bench) -> None:
    async def longest(count: int) -> int:
        owner, txn = Owner(bench, ModelCursor(count * 100), reconcile_seconds=1000.0), await bench.begin()
        answers = [
            owner.acks.begin(txn, [Ack(place(entry)) for entry in range(start, start + 100)], cumulative=False)
            for start in range(0, count * 100, 100)
        ]
        with Steps("txn") as steps:
            await asyncio.gather(*answers)
        assert await owner.ops() == count * 100
        await owner.close()
        await bench.store._delete_all(await bench.store.all_acks_in(SEGMENT))
        return steps.longest

    few = await longest(10)
    assert await longest(50) < 2 * few
