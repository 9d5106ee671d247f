"""No client can stop the loop of a broker: acknowledgments in transactions that wait for one which cannot be materialised."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.e2e.txn_cluster import SETTLE_SECONDS, TxnCluster, abort, ack, begin, commit, sent

from braid.errors import TransactionConflict
from braid.managedledger.config import ManagedLedgerConfig
from braid.testing.sim.limits import WallClock
from braid.txn.pending_acks import SETTLE_SECONDS as PATIENCE_SECONDS
from braid.wire.types import InitialPosition, SubType

TOPIC = "persistent://public/default/gaps"
MESSAGES = 14
STORED_RANGES = 3


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    """A task that spins is interrupted, again and again, and fails the test."""
    with WallClock(40.0, lambda _verdict: None) as limit:
        yield
    assert not limit.verdict, limit.verdict


@pytest.mark.inv("INV14")
async def test_waiting_for_a_transaction_that_stays_held_does_not_stop_the_broker() -> None:
    """More gaps than a cursor stores: what a committed transaction acknowledged stays held. Whoever wants it too is refused
    after a while, each time anew, and everybody else is served meanwhile."""
    gaps = ManagedLedgerConfig(max_persisted_ranges=STORED_RANGES)
    async with TxnCluster(brokers=1, managed_ledger=gaps) as cluster:
        client, bystander = await cluster.client(0), await cluster.client(0)
        await client.producer(TOPIC, 1)
        places = [await sent(client, b"%d" % number, number, 1) for number in range(MESSAGES)]
        await client.subscribe(TOPIC, "s", SubType.EXCLUSIVE, 2, initial=InitialPosition.EARLIEST, permits=100)
        await client.payloads(MESSAGES)
        for place in places[1:-3:2]:
            assert not (await client.answer(ack(client, 2, place, None))).HasField("error")
        first = await begin(client)
        assert not (await client.answer(ack(client, 2, places[-2], first))).HasField("error")
        await commit(client, first)
        await cluster.advance(SETTLE_SECONDS + 0.3)  # between two reconciles, which wake whoever waits
        for _time in range(3):
            one, two = await begin(client), await begin(client)
            waiting = ack(client, 2, places[-1], one, cumulative=True)
            await cluster.advance(PATIENCE_SECONDS / 2)
            later = ack(client, 2, places[-1], two, cumulative=True)
            await cluster.advance(PATIENCE_SECONDS / 2 + 1)  # the patience of the first ends here, not that of the second
            assert (await client.answer(waiting)).error == TransactionConflict.code
            await abort(bystander, await begin(bystander))  # is answered: the loop turns
            await cluster.advance(PATIENCE_SECONDS / 2)
            assert (await client.answer(later)).error == TransactionConflict.code
            await abort(client, one)
            await abort(client, two)
        # The gaps are closed: what was held is applied, and the next one is not refused.
        for place in places[:-2:2]:
            assert not (await client.answer(ack(client, 2, place, None))).HasField("error")
        await cluster.advance(PATIENCE_SECONDS)
        last = await begin(client)
        assert not (await client.answer(ack(client, 2, places[-1], last, cumulative=True))).HasField("error")
        await commit(client, last)
        await cluster.advance(SETTLE_SECONDS)
        assert cluster.ops() == {}
