"""Acknowledgments that come together in one transaction and wait for another one: their patience, and how they end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.unit.txn.ack_model import ModelCursor, place
from tests.unit.txn.coordination_bench import Bench, brokers
from tests.unit.txn.test_pending_acks import ENTRIES, Owner, later

from braid.errors import NotReady, TransactionConflict
from braid.model.txn import TxnId
from braid.txn.ack_requests import AckRoot
from braid.txn.api import Ack
from braid.txn.pending_acks import SETTLE_SECONDS
from braid.txn.stored_acks import StoredAcks


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with brokers() as (made,):
        yield made


@pytest.fixture
async def owner(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Owner]:
    """One whose entries 0 to 2 are held by a committed transaction that is not materialised."""

    async def never(_stored: StoredAcks, _root: TxnId, _state: AckRoot) -> None:
        await asyncio.Event().wait()

    made = Owner(bench, ModelCursor(ENTRIES))
    txn = await bench.begin()
    await made.ack(txn, 0, 1, 2)
    monkeypatch.setattr(StoredAcks, "materialise", never)
    await bench.coordinator.end(txn, commit=True)
    yield made
    await made.close()


def begun(owner: Owner, txn: TxnId, *entries: int) -> list[asyncio.Future[None]]:
    """One request for each."""
    return [owner.acks.begin(txn, [Ack(place(each))], cumulative=False) for each in entries]


@pytest.mark.inv("INV17")
async def test_acks_that_wait_together_share_their_patience(bench: Bench, owner: Owner) -> None:
    answers = begun(owner, await bench.begin(), 0, 1, 2)
    await later(bench, SETTLE_SECONDS - 1.0)
    assert not any(each.done() for each in answers)
    await later(bench, 2.0)
    assert all(each.done() for each in answers)
    for each in answers:
        with pytest.raises(TransactionConflict):
            await each


@pytest.mark.inv("INV14")
async def test_nothing_is_written_after_the_end_by_those_that_waited(bench: Bench, owner: Owner) -> None:
    """The subscription is deleted: what would be written now would count for the next one of its name."""
    before = await owner.ops()
    answers = begun(owner, await bench.begin(), 4, 0, 5)
    await later(bench, 1.0)
    assert not any(each.done() for each in answers)
    owner.acks.close()
    await owner.acks.drain()
    await later(bench, 1.0)
    for each in answers:
        with pytest.raises(NotReady):
            await each
    assert await owner.ops() == before


async def test_whoever_waits_is_answered_when_everything_is_ended(bench: Bench, owner: Owner) -> None:
    answers = begun(owner, await bench.begin(), 4, 0, 5)
    await later(bench, 1.0)
    await owner.tasks.close()
    for each in answers:
        assert each.done()
        with pytest.raises(NotReady):
            await each
