"""Pending acknowledgments of an owner that lost its log: it takes away nothing that a later owner accepted (INV12)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.unit.txn.ack_model import ModelCursor
from tests.unit.txn.coordination_bench import SEGMENT, Bench, ack, brokers
from tests.unit.txn.test_pending_acks import ENTRIES, Owner, later

from braid.errors import LedgerFenced, NotReady
from braid.model.txn import TxnId
from braid.txn.store import Header


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with brokers() as (made,):
        yield made


@pytest.fixture
async def late(bench: Bench) -> AsyncIterator[Owner]:
    """The former owner."""
    made = Owner(bench, ModelCursor(ENTRIES))
    yield made
    await made.close()


async def succeeded(bench: Bench, late: Owner) -> Owner:
    """The next owner, whose cursor cannot be made durable for the moment."""
    late.cursor.is_lost = True
    owner = Owner(bench, ModelCursor(ENTRIES))
    await owner.recover()
    owner.cursor.may_flush = asyncio.Event()
    return owner


async def check_kept(owner: Owner, entry: int) -> None:
    """The ack of this entry outlives a crash of the owner that accepted it."""
    after = await owner.crash()
    assert after.acked() == [entry]
    await after.settled()
    assert await after.ops() == 0
    await after.close()


@pytest.mark.inv("INV12")
async def test_materialising_late_deletes_no_op_of_the_next_owner(bench: Bench, late: Owner) -> None:
    root = await bench.begin(is_decider=True)
    loser, winner = await bench.coordinator.new_sub(root), await bench.coordinator.new_sub(root)
    await late.ack(loser, 1)
    owner = await succeeded(bench, late)
    await owner.ack(winner, 2)
    await bench.coordinator.decide(root, [winner.sub])
    await later(bench, 3)
    await check_kept(owner, 2)


@pytest.mark.inv("INV12")
async def test_materialising_late_gives_out_nothing_that_the_next_owner_applied(bench: Bench, late: Owner) -> None:
    """W5, seed 8: the ops are gone because they were applied, elsewhere; who reads here must not get the messages again."""
    txn = await bench.begin()
    await late.ack(txn, 1)
    late.decisions.kill()  # it hears of the outcome last
    owner = await succeeded(bench, late)
    owner.cursor.may_flush = None
    await bench.coordinator.end(txn, commit=True)
    await owner.settled()
    assert owner.acked() == [1] and await owner.ops() == 0
    header = await bench.store.header(txn)
    assert header is not None
    late.acks._decided(txn, header.value)
    await later(bench, 3)
    assert late.listener.released_now == []
    await owner.close()


@pytest.mark.inv("INV12")
async def test_looking_for_strays_late_deletes_no_op_of_the_next_owner(bench: Bench, late: Owner) -> None:
    txn = await bench.begin()
    owner = await succeeded(bench, late)
    await owner.ack(txn, 2)
    await bench.coordinator.end(txn, commit=True)
    await later(bench, 1)
    with pytest.raises(LedgerFenced):
        await late.acks.relist()
    await check_kept(owner, 2)


@pytest.mark.inv("INV12")
async def test_a_reset_that_ends_late_deletes_no_op_of_the_next_owner(bench: Bench, late: Owner) -> None:
    txn = await bench.begin()
    with pytest.raises(LedgerFenced):
        async with late.acks.resetting():  # its cursor is reset, and then it loses the log
            owner = await succeeded(bench, late)
            await owner.ack(txn, 2)
    await bench.coordinator.end(txn, commit=True)
    await later(bench, 1)
    await check_kept(owner, 2)


@pytest.mark.inv("INV2", "INV12")
async def test_one_that_lost_the_log_while_it_loads_deletes_no_op_of_unknown_subscriptions(bench: Bench, late: Owner) -> None:
    late.cursor.is_lost = True
    txn: TxnId = await bench.begin()
    await bench.store.append_op(txn, ack("made by the next owner"))
    with pytest.raises(LedgerFenced):
        await late.recover()
    await later(bench, 1)
    assert len(await bench.store.all_acks_in(SEGMENT)) == 1


async def test_a_reset_does_not_wait_for_a_cursor_that_has_more_gaps_than_it_stores(bench: Bench, late: Owner) -> None:
    """The gaps last until somebody acknowledges what is between them, and nobody can while the subscription is fenced."""
    owner = late
    txn = await bench.begin()
    await owner.ack(txn, 1, 3)
    owner.cursor.failures = [NotReady("There are too many gaps.") for _ in range(1000)]
    await bench.coordinator.end(txn, commit=True)
    await later(bench, 20)
    assert await owner.ops() == 2

    async def reset() -> None:
        async with owner.acks.resetting():
            owner.cursor.acked.clear()

    resetting = asyncio.ensure_future(reset())
    await later(bench, 10)
    assert resetting.done() and resetting.exception() is None
    assert await owner.ops() == 0 and owner.acked() == [] and owner.decisions.held == 0


@pytest.mark.inv("INV2")
async def test_a_new_owner_reads_headers_afresh(bench: Bench, late: Owner) -> None:
    """Its copy of the store may be behind, and an op whose header is gone counts for nothing."""
    txn = await bench.begin()
    await late.ack(txn, 2)
    late.decisions.kill()
    read = bench.store.header

    async def behind(root: TxnId, *, fresh: bool = False) -> Header | None:
        return await read(root, fresh=True) if fresh else None

    bench.store.header = behind  # type: ignore[method-assign]
    owner = await succeeded(bench, late)
    await later(bench, 3)
    await bench.coordinator.end(txn, commit=True)
    await later(bench, 3)
    await check_kept(owner, 2)
