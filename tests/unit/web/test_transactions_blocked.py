"""What an open transaction holds up is named: in the stats of topics, partitioned and scalable ones, in lists, in metrics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from braid.broker import held_up
from braid.client.admin import AdminClient
from braid.errors import InvalidTransactionStatus
from braid.model.positions import Position
from braid.model.txn import TxnId
from braid.testing.broker import InProcessBroker
from braid.testing.raw_client import RawClient
from braid.wire.types import InitialPosition, SubType

EARLIEST = InitialPosition.EARLIEST
TOPIC = "persistent://public/default/payments"


@pytest.fixture
async def broker() -> AsyncIterator[InProcessBroker]:
    async with InProcessBroker() as running:
        yield running


@pytest.fixture
async def http(broker: InProcessBroker) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=broker.http_url, timeout=30) as client:
        yield client


@pytest.fixture
async def client(broker: InProcessBroker) -> AsyncIterator[RawClient]:
    made = await RawClient.connect(broker.service_url, is_braid=True, answers_pings=True)
    yield made
    made.close()


async def held(http: httpx.AsyncClient, path: str, subscription: str = "sub") -> list[Any]:
    answer = await http.get(path)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["subscriptions"][subscription]["blocked_by"])


async def until_free(http: httpx.AsyncClient, path: str, subscription: str = "sub") -> None:
    """Outcomes are applied a moment after they are decided."""
    for _ in range(600):
        if not await held(http, path, subscription):
            return
        await asyncio.sleep(0.02)
    raise AssertionError(await held(http, path, subscription))


@pytest.mark.parametrize("commit", [True, False])
async def test_a_topic_is_held_up_by_writes(http: httpx.AsyncClient, client: RawClient, commit: bool) -> None:
    stats = f"/admin/v2/{TOPIC.replace('://', '/')}/stats"
    await client.producer(TOPIC)
    await client.subscribe(TOPIC, initial=EARLIEST, permits=100)
    assert await held(http, stats) == []
    txn = await client.begin(3)
    first = await client.store(b"a", 1, txn=txn)
    await client.store(b"b", 2, txn=txn)
    await client.store(b"plain", 3)
    (why,) = await held(http, stats)
    assert why["kind"] == "open-transaction" and why["segment"] is None and why["since"] > 0
    assert why["detail"] == {"transaction": str(txn), "topic": TOPIC, "writes": 2, "after": _before(first)}
    answer = (await http.get(stats)).json()
    assert (answer["ongoingTxnCount"], answer["subscriptions"]["sub"]["msgBacklog"]) == (1, 3)
    (listed,) = (await http.get("/admin/v3/transactions")).json()
    assert (listed["transaction"], listed["writes"][0]["topic"], listed["writes"][0]["entries"]) == (str(txn), TOPIC, 2)
    await client.end(txn, commit=commit)
    await until_free(http, stats)
    assert (await http.get("/admin/v3/transactions")).json() == []
    assert await client.payloads(3 if commit else 1) == ([b"a", b"b", b"plain"] if commit else [b"plain"])


async def test_an_abort_by_hand_lets_readers_go_on(http: httpx.AsyncClient, client: RawClient, broker: InProcessBroker) -> None:
    """What an operator does about a client that hangs."""
    await client.producer(TOPIC)
    await client.subscribe(TOPIC, initial=EARLIEST, permits=100)
    await client.store(b"hidden", 1, txn=await client.begin(3))
    await client.store(b"plain", 2)
    async with AdminClient(broker.http_url) as admin:
        stats = await admin.topics.stats(TOPIC)
        (why,) = stats.subscriptions["sub"].blocked_by
        await admin.transactions.abort(why.detail["transaction"])
    assert await client.payloads(1) == [b"plain"]


async def test_a_subscription_is_held_up_by_acknowledgments(http: httpx.AsyncClient, client: RawClient) -> None:
    stats = f"/admin/v2/{TOPIC.replace('://', '/')}/stats"
    await client.producer(TOPIC)
    await client.subscribe(TOPIC, sub_type=SubType.SHARED, initial=EARLIEST, permits=100)
    await client.subscribe(TOPIC, "other", consumer_id=2, initial=EARLIEST)
    places = [await client.store(b"%d" % number, number) for number in range(1, 4)]
    await client.messages(3)
    txn = await client.begin(3)
    await client.acked(*places[:2], txn=txn)
    (why,) = await held(http, stats)
    assert why["detail"] == {"transaction": str(txn), "topic": TOPIC, "acks": 2}
    assert await held(http, stats, "other") == []  # only what it wrote would hold up others
    (listed,) = (await http.get("/admin/v3/transactions")).json()
    assert [(each["subscription"], each["positions"]) for each in listed["acks"]] == [("sub", 2)]
    await client.end(txn, commit=True)
    await until_free(http, stats)
    assert (await http.get(stats)).json()["subscriptions"]["sub"]["msgBacklog"] == 1


async def test_a_partitioned_topic_says_in_which_partition(http: httpx.AsyncClient, client: RawClient) -> None:
    path = f"/admin/v2/{TOPIC.replace('://', '/')}"
    assert (await http.put(f"{path}/partitions", json=2)).status_code == 204
    assert (await http.put(f"{path}/subscription/sub")).status_code == 204
    txn = await client.begin(3)
    for number in (0, 1):
        await client.producer(f"{TOPIC}-partition-{number}", number)
        await client.store(b"x", 1, number, txn=txn)
    found = await held(http, f"{path}/partitioned-stats")
    assert sorted(each["detail"]["topic"] for each in found) == [f"{TOPIC}-partition-0", f"{TOPIC}-partition-1"]
    assert {each["detail"]["transaction"] for each in found} == {str(txn)}


@pytest.mark.parametrize("kind", ["QUEUE", "STREAM"])
async def test_a_scalable_topic_says_in_which_segment(http: httpx.AsyncClient, client: RawClient, kind: str) -> None:
    path = "/admin/v2/scalable/public/default/orders"
    assert (await http.put(path, params={"numInitialSegments": 2})).status_code == 204
    assert (await http.put(f"{path}/subscriptions/sub", params={"type": kind})).status_code == 204
    segment = "segment://public/default/orders/8000-ffff-1"
    await client.producer(segment)
    txn = await client.begin(3)
    first = await client.store(b"a", 1, txn=txn)
    blocked = {each["kind"]: each for each in await held(http, f"{path}/stats")}
    assert set(blocked) == {"no-consumer", "open-transaction"}
    why = blocked["open-transaction"]
    assert (why["segment"], why["since"] > 0) == (1, True)
    assert why["detail"] == {"transaction": str(txn), "topic": segment, "writes": 1, "after": _before(first)}
    await client.end(txn, commit=True)
    for _ in range(600):
        if [each["kind"] for each in await held(http, f"{path}/stats")] == ["no-consumer"]:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("the committed transaction is still named")


async def test_other_brokers_segments_tell_it_too() -> None:
    async with InProcessBroker(brokers=3) as several, AdminClient(several.http_url) as admin:
        await admin.scalable_topics.create("orders", segments=8)
        await admin.scalable_topics.create_subscription("orders", "sub")
        stats = await admin.scalable_topics.get_stats("orders")
        owners = {each.owner for each in stats.segments.values()}
        assert len(owners) > 1
        urls = {node.broker_id: node.service_url for node in several.nodes}
        txn: TxnId | None = None
        for number, each in stats.segments.items():
            client = await RawClient.connect(urls[each.owner], is_braid=True, answers_pings=True)
            txn = txn or await client.begin(3)
            await client.producer(each.name)
            await client.store(b"%d" % number, 1, txn=txn)
            client.close()
        found = (await admin.scalable_topics.get_stats("orders")).subscriptions["sub"].blocked_by
        assert [why.segment for why in found if why.kind == "open-transaction"] == list(range(8))
        assert {why.detail["transaction"] for why in found if why.kind == "open-transaction"} == {str(txn)}


@pytest.mark.inv("INV17")
async def test_many_transactions_are_named_up_to_a_bound(
    http: httpx.AsyncClient, client: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_up, "MAX_SHOWN", 2)
    stats = f"/admin/v2/{TOPIC.replace('://', '/')}/stats"
    await client.producer(TOPIC)
    await client.subscribe(TOPIC, initial=EARLIEST)
    transactions = [await client.begin(3) for _ in range(5)]
    for number, txn in enumerate(transactions, 1):
        await client.store(b"x", number, txn=txn)
    found = await held(http, stats)
    assert len(found) == 2
    assert "others" not in found[0]["detail"] and found[1]["detail"]["others"] == 3


@pytest.mark.req("R473-49", "R473-50", "R473-51", "R473-52")
async def test_metrics_of_real_traffic(http: httpx.AsyncClient, client: RawClient) -> None:
    async def value(name: str) -> float:
        lines = (await http.get("/metrics")).text.splitlines()
        return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"pulsar_txn_metadata_store_{name}"))

    await client.producer(TOPIC)
    await client.subscribe(TOPIC, initial=EARLIEST, permits=10)
    queries = await value("index_query_seconds_count")
    assert queries >= 1  # the topic was loaded
    txn = await client.begin(3)
    place = await client.store(b"a", 1)
    await client.messages(1)
    await client.store(b"b", 2, txn=txn)
    await client.acked(place, txn=txn)
    assert await value("op_writes_total") == 2
    assert await value('header_cas_total{cluster="standalone",result="ok"}') == 0
    await client.end(txn, commit=True)
    assert await value('header_cas_total{cluster="standalone",result="ok"}') == 1
    with pytest.raises(InvalidTransactionStatus):
        await client.end(txn, commit=False)
    assert await value('header_cas_total{cluster="standalone",result="reject"}') == 1
    assert await value("outstanding_op_records") >= 0


def _before(position: Position) -> str:
    return f"{position.ledger_id}:{position.entry_id - 1}"
