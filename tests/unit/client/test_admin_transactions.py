"""`AdminClient.transactions` against a real broker, typed, and its blocking twin."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from datetime import timedelta

import pytest

from braid.client.admin import AdminClient
from braid.client.admin_transaction_types import TransactionInfo
from braid.client.admin_transactions import transaction_parts
from braid.client.blocking import AdminClient as BlockingAdminClient
from braid.errors import Conflict, InvalidArgument, NotFound
from braid.model.txn import TxnId
from braid.testing.broker import BackgroundBroker, InProcessBroker
from braid.txn.records import TxnOp

TOPIC = "persistent://public/default/payments"


@pytest.fixture
async def broker() -> AsyncIterator[InProcessBroker]:
    async with InProcessBroker() as running:
        yield running


@pytest.fixture
async def admin(broker: InProcessBroker) -> AsyncIterator[AdminClient]:
    async with AdminClient(broker.http_url) as client:
        yield client


async def begin(broker: InProcessBroker, *ops: TxnOp) -> TxnId:
    transactions = broker.nodes[0].service.transactions
    txn = await transactions.coordinator.new(3, 3_600_000, owner=None)
    for op in ops:
        await transactions.store.append_op(txn, op)
    return txn


async def test_list_describe_and_abort(broker: InProcessBroker, admin: AdminClient) -> None:
    assert await admin.transactions.list() == []
    txn = await begin(broker, TxnOp(kind="write", segment=TOPIC, position="1:5", entries=2))
    (listed,) = await admin.transactions.list(min_age=timedelta(0), limit=5)
    assert type(listed) is TransactionInfo
    assert listed.is_open
    assert (listed.transaction, listed.writes[0].topic, listed.writes[0].floor, listed.writes[0].entries) == (
        str(txn),
        TOPIC,
        "1:5",
        2,
    )
    assert await admin.transactions.list(min_age=timedelta(hours=1)) == []
    described = await admin.transactions.describe(str(txn))
    assert (described.most_bits, described.least_bits, described.operations) == (txn.most, txn.least, 1)
    await admin.transactions.abort(str(txn))
    await admin.transactions.abort(f"({txn.most},{txn.least})")
    assert not (await admin.transactions.describe(str(txn))).is_open


async def test_what_is_refused(broker: InProcessBroker, admin: AdminClient) -> None:
    committed = await begin(broker)
    await broker.nodes[0].service.transactions.coordinator.end(committed, commit=True)
    with pytest.raises(Conflict, match=str(committed)) as refused:
        await admin.transactions.abort(str(committed))
    assert refused.value.http_status == 409
    for call in (admin.transactions.describe, admin.transactions.abort):
        with pytest.raises(NotFound, match="does not exist"):
            await call("3_1048576000000")
        with pytest.raises(InvalidArgument, match="is no transaction id"):
            await call("topic")
    with pytest.raises(InvalidArgument, match="negative"):
        await admin.transactions.list(min_age=timedelta(milliseconds=-1))
    for age in (5, "5m"):
        with pytest.raises(InvalidArgument, match="is no timedelta"):
            await admin.transactions.list(min_age=age)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=r"From 1 to 10000 .* not 'ten'"):
        await admin.transactions.list(limit="ten")  # type: ignore[arg-type]
    for limit in (0, -1, 10_001):
        with pytest.raises(InvalidArgument, match="From 1 to 10000"):
            await admin.transactions.list(limit=limit)


def test_ids_as_they_are_written() -> None:
    for text in ("3_1048576", "(3,1048576)", "3:1048576", "3,1048576", " 3 1048576 ", "(3, 1048576)"):
        assert transaction_parts(text) == {"most": "3", "least": "1048576"}
    assert transaction_parts(str(TxnId((1 << 64) - 1, 1 << 63))) == {"most": "-1", "least": str(-(1 << 63))}
    assert transaction_parts(f"{(1 << 64) - 1}_{1 << 63}") == {"most": "-1", "least": str(-(1 << 63))}
    for text in ("", "_", "3_", "_3", "a_b", "1_2_3", f"0_{1 << 64}", f"{-(1 << 63) - 1}_0", "3/1048576", "1_" + "9" * 30):
        with pytest.raises(InvalidArgument, match="is no transaction id"):
            transaction_parts(text)


@pytest.fixture(scope="module")
def background() -> Iterator[BackgroundBroker]:
    with BackgroundBroker() as running:
        yield running


def test_without_await(background: BackgroundBroker) -> None:
    txn = background.run(begin(background.broker))
    with BlockingAdminClient(background.http_url) as admin:
        assert [each.transaction for each in admin.transactions.list()] == [str(txn)]
        assert admin.transactions.describe(str(txn)).state == "OPEN"
        admin.transactions.abort(str(txn))
        assert admin.transactions.list() == []
