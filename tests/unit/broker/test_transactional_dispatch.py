"""Delivery of topics with transactions: by the same dispatchers as without, for every kind of topic, and out of memory."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.test_transaction_counts import Count
from tests.e2e.txn_cluster import SETTLE_SECONDS, TxnCluster, abort, begin, commit, sent

from braid.broker import dispatch_shared, dispatch_single, visible
from braid.model.names import TopicName
from braid.testing.raw_client import RawClient
from braid.wire.types import CommandType, InitialPosition, SubType

EARLIEST = InitialPosition.EARLIEST
KINDS = [SubType.EXCLUSIVE, SubType.FAILOVER, SubType.SHARED]
PERSISTENT = "persistent://public/default/t"
SEGMENT = "segment://public/default/t2/0000-ffff-0"


@pytest.mark.req("R473-25")
@pytest.mark.parametrize("kind", KINDS)
async def test_who_is_aborted_is_known_without_asking_any_store(kind: SubType) -> None:
    """Two hundred entries of open, committed and aborted transactions: while they are delivered no call reaches the metadata
    store and no byte is read from a ledger."""
    async with TxnCluster(brokers=1) as cluster:
        client = await cluster.client(0)
        await client.producer(PERSISTENT, 1)
        await client.subscribe(PERSISTENT, "s", sub_type=kind, initial=EARLIEST)
        shown = []
        for number in range(40):
            txn = await begin(client)
            text = b"%d" % number
            for part in range(4):
                await sent(client, text, 5 * number + part, 1, txn)
            await (abort if number % 2 else commit)(client, txn)
            await sent(client, b"plain", 5 * number + 4, 1)
            shown += ([] if number % 2 else [text] * 4) + [b"plain"]
        await sent(client, b"hidden", 600, 1, await begin(client))
        await cluster.advance(SETTLE_SECONDS)
        assert len(cluster.aborted(PERSISTENT)) == 20
        await client.settle()
        count = Count(cluster)
        client.flow(1000)
        assert await client.payloads(len(shown)) == shown
        await client.settle()
        assert CommandType.MESSAGE not in client.kinds()
        assert count.calls == {}
        assert count.bytes_read == 0


async def delivered(client: RawClient, topic: str, kind: SubType, number: int, *, transactional: bool) -> list[bytes]:
    """What a subscription is sent, `-` where nothing comes: before, in and after two transactions, one of them aborted."""
    await client.producer(topic, number)
    await client.subscribe(topic, f"s{number}", consumer_id=number, sub_type=kind, initial=InitialPosition.LATEST, permits=100)
    found: list[bytes] = []

    async def look() -> None:
        await client.settle()
        while CommandType.MESSAGE in client.kinds():
            found.extend(await client.payloads(1))
        found.append(b"-")

    kept, dropped = (await begin(client), await begin(client)) if transactional else (None, None)
    await sent(client, b"before", 0, number)
    await look()
    await sent(client, b"kept", 1, number, kept)
    await sent(client, b"dropped", 2, number, dropped)
    await sent(client, b"after", 3, number)
    await look()
    if kept is not None and dropped is not None:
        await commit(client, kept)
        await look()
        await abort(client, dropped)
        await look()
    await client.close_consumer(number)
    return found


@pytest.mark.req("R473-40")
@pytest.mark.parametrize("kind", KINDS)
async def test_segments_and_other_topics_share_the_dispatchers(kind: SubType) -> None:
    async with TxnCluster(brokers=1) as cluster:
        client = await cluster.client(0)
        service = cluster.nodes[0].service
        await service.create_scalable_topic(TopicName.parse("topic://public/default/t2"), 1)
        parts: list[list[type[Any]]] = []
        for number, topic in enumerate((PERSISTENT, SEGMENT)):
            plain = await delivered(client, topic, kind, 10 * number + 1, transactional=False)
            assert plain == [b"before", b"-", b"kept", b"dropped", b"after", b"-"]
            before = service.topics[topic].subscriptions[f"s{10 * number + 1}"].dispatcher
            held = await delivered(client, topic, kind, 10 * number + 2, transactional=True)
            assert held == [b"before", b"-", b"-", b"kept", b"-", b"after", b"-"]
            loaded = service.topics[topic]
            found = loaded.subscriptions[f"s{10 * number + 2}"]
            assert type(before) is type(found.dispatcher)
            parts.append([type(loaded), type(found), type(found.dispatcher), type(loaded.transactions), type(found.cursor)])
        assert parts[0] == parts[1]


@pytest.mark.req("R473-40")
@pytest.mark.parametrize("module", [dispatch_single, dispatch_shared], ids=["single", "shared"])
def test_dispatchers_know_neither_transactions_nor_kinds_of_topics(module: Any) -> None:
    """All they know of either is `visible`: which of the entries that were read are shown."""
    tree = ast.parse(Path(module.__file__).read_text())
    imported = {(each.module, name.name) for each in ast.walk(tree) if isinstance(each, ast.ImportFrom) for name in each.names}
    assert not {
        where for where, _name in imported if where and where.startswith(("braid.txn", "braid.model.txn", "braid.scalable"))
    }
    assert {name for _where, name in imported}.isdisjoint({"Domain", "TopicName", "TxnId"})
    assert {name for where, name in imported if where == visible.__name__} == {"visible", "within"}
