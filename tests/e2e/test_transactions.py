"""Transactions end to end: consume, transform, produce under crashes; layouts that change meanwhile; zombies; topics that go.

The first half runs the SDK against brokers in real time, the second half speaks the raw protocol to brokers whose time is the
test's.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from tests.e2e.churn_cluster import Cluster, patiently
from tests.e2e.txn_cluster import (
    RETENTION_SECONDS,
    SETTLE_SECONDS,
    TxnCluster,
    abort,
    ack,
    begin,
    commit,
    end,
    send,
    sent,
)

from braid.client import Client
from braid.client.admin import AdminClient
from braid.errors import BraidError, InvalidTransactionStatus, TransactionConflict
from braid.model.names import TopicName
from braid.testing.raw_client import RawClient, position_of
from braid.wire.client import Delivery
from braid.wire.types import CommandType, InitialPosition, SubType, TxnAction

TOPIC = "topic://public/default/layouts"
KEYS = [f"key-{number}" for number in range(16)]
BOUND = 30.0


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with Cluster(brokers=1, retention_minutes=60) as made:
        yield made


# Layouts that change while a transaction is open.


async def read_all(client: Client, topic: str, last: bytes, keys: list[str]) -> dict[str, list[bytes]]:
    """What a new stream consumer reads, by key, until each key has brought `last`."""
    found: dict[str, list[bytes]] = defaultdict(list)
    async with asyncio.timeout(BOUND), client.stream_consumer(topic, "reads all", initial="earliest") as consumer:
        while not all(last in found[key] for key in keys):
            for message in await consumer.receive_batch(100, timeout=0.2):
                found[message.key or ""].append(message.value)
                await consumer.acknowledge_cumulative(message)
    return dict(found)


async def active(admin: AdminClient, topic: str) -> list[int]:
    layout = await admin.scalable_topics.get_metadata(topic)
    found = [each for each in layout.segments.values() if each.is_active]
    return [each.segment_id for each in sorted(found, key=lambda each: each.hash_range.start)]


async def split(admin: AdminClient, topic: str) -> None:
    await admin.scalable_topics.split_segment(topic, (await active(admin, topic))[0])


async def merge(admin: AdminClient, topic: str) -> None:
    first, second, *_others = await active(admin, topic)
    await admin.scalable_topics.merge_segments(topic, first, second)


@pytest.mark.req("R473-1", "R473-2")
@pytest.mark.parametrize("is_commit", [True, False], ids=["commit", "abort"])
@pytest.mark.parametrize("change", [split, merge])
async def test_a_transaction_across_a_change_of_the_layout(
    cluster: Cluster, change: Callable[[AdminClient, str], Coroutine[Any, Any, None]], is_commit: bool
) -> None:
    async with cluster.admin() as admin, cluster.client() as client:
        await admin.scalable_topics.create(TOPIC, segments=2)
        async with client.producer(TOPIC) as producer:
            expected: dict[str, list[bytes]] = {key: [b"before"] for key in KEYS}
            await asyncio.gather(*(producer.send(b"before", key=key) for key in KEYS))
            txn = await client.begin_transaction(timeout=60)

            async def write(number: int) -> None:
                text = b"%d" % number
                await asyncio.gather(*(producer.send(text, key=key, txn=txn) for key in KEYS))
                if is_commit:
                    for key in KEYS:
                        expected[key].append(text)

            await write(0)
            changing = asyncio.create_task(change(admin, TOPIC))
            number = 1
            while not changing.done():
                await write(number)
                number += 1
            await changing
            await write(number)
            await (txn.commit() if is_commit else txn.abort())
            await asyncio.gather(*(producer.send(b"after", key=key) for key in KEYS))
            for key in KEYS:
                expected[key].append(b"after")
            assert await read_all(client, TOPIC, b"after", KEYS) == expected


@pytest.mark.req("R473-2", "R473-57")
@pytest.mark.inv("INV8", "INV12")
@pytest.mark.parametrize("is_commit", [True, False], ids=["commit", "abort"])
async def test_acknowledgments_across_a_split(cluster: Cluster, is_commit: bool) -> None:
    """The sealed parent is drained by the commit; after an abort its messages come again, before those of the children."""
    async with cluster.admin() as admin, cluster.client() as client:
        await admin.scalable_topics.create(TOPIC, segments=1)
        async with client.producer(TOPIC) as producer, client.stream_consumer(TOPIC, "s", initial="earliest") as consumer:
            for number in range(10):
                await producer.send(b"%d" % number, key="k")
            txn = await client.begin_transaction(timeout=60)
            got = [await consumer.receive(timeout=BOUND) for _ in range(10)]
            await consumer.acknowledge_cumulative(got[-1], txn=txn)
            await split(admin, TOPIC)
            for number in range(10, 20):
                await producer.send(b"%d" % number, key="k")
            # The children wait for the parent, which waits for the transaction: nothing can come, and it says so.
            async with asyncio.timeout(BOUND):
                while await consumer.receive_batch(10, timeout=BOUND):
                    pass
            await (txn.commit() if is_commit else txn.abort())
            first = 10 if is_commit else 0
            again = [await consumer.receive(timeout=BOUND) for _ in range(first, 10)]
            if again:
                assert [message.value for message in again] == [b"%d" % number for number in range(10)]
                await consumer.acknowledge_cumulative(again[-1])
            assert [(await consumer.receive(timeout=BOUND)).value for _ in range(10)] == [b"%d" % n for n in range(10, 20)]


@pytest.mark.req("R473-2")
async def test_a_transaction_open_for_longer_than_three_splits(cluster: Cluster) -> None:
    async with cluster.admin() as admin, cluster.client() as client:
        await admin.scalable_topics.create(TOPIC, segments=1)
        async with client.producer(TOPIC) as producer:
            txn = await client.begin_transaction(timeout=120)
            for number in range(4):
                for key in KEYS:
                    await producer.send(b"%d" % number, key=key, txn=txn)
                if number < 3:
                    await split(admin, TOPIC)
            assert len((await admin.scalable_topics.get_metadata(TOPIC)).segments) == 7
            async with client.stream_consumer(TOPIC, "early bird", initial="earliest") as consumer:
                assert await consumer.receive_batch(10, timeout=0.3) == []
            await txn.commit()
            found = await read_all(client, TOPIC, b"3", KEYS)
            assert found == {key: [b"0", b"1", b"2", b"3"] for key in KEYS}


# All or nothing while brokers die.


@pytest.mark.timeout(200)
@pytest.mark.req("R473-1", "R473-6")
@pytest.mark.inv("INV14")
async def test_consume_transform_produce_over_two_namespaces_while_brokers_die() -> None:
    count, source, first, second = (
        240,
        "topic://public/default/source",
        "topic://public/other/first",
        "persistent://public/default/second",
    )
    async with Cluster(brokers=3, retention_minutes=60) as cluster:
        async with cluster.admin() as admin, cluster.client() as client:
            await admin.namespaces.create("public/other")
            await admin.scalable_topics.create(source, segments=2)
            await admin.scalable_topics.create(first, segments=2)
            async with client.producer(source) as producer:
                await asyncio.gather(*(producer.send(b"%d" % number, key=f"k{number % 16}") for number in range(count)))
        done: set[bytes] = set()

        async def work() -> None:
            while len(done) < count:
                with suppress(BraidError):
                    await work_once()

        async def work_once() -> None:
            async with (
                cluster.client() as client,
                client.stream_consumer(source, "job", name="worker", initial="earliest") as consumer,
                client.producer(first) as one,
                client.producer(second) as two,
            ):
                while len(done) < count:
                    batch = []
                    async with client.transaction(timeout=10) as txn:
                        batch = await consumer.receive_batch(8, timeout=0.2)
                        for message in batch:
                            await one.send(message.value, key=message.key, txn=txn)
                            await two.send(message.value, key=message.key, txn=txn)
                        if batch:
                            await consumer.acknowledge_cumulative(batch[-1], txn=txn)
                    done.update(message.value for message in batch)

        working = asyncio.create_task(work())
        for number in range(2):
            share = count * (number + 1) // 4
            await _until(partial(_is_past, done, share, working))
            await cluster.kill(cluster.nodes[number])
            await asyncio.sleep(0.5)
            await patiently("a restart", BOUND, partial(cluster.restart, number))
        async with asyncio.timeout(100):
            await working
        expected = sorted(b"%d" % number for number in range(count))
        for topic in (first, second):
            assert sorted(await _everything(cluster, topic, count)) == expected, topic


def _is_past(done: set[bytes], share: int, working: asyncio.Task[None]) -> bool:
    return len(done) > share or working.done()


async def _until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not is_so():  # noqa: ASYNC110 - real time
            await asyncio.sleep(0.01)


async def _everything(cluster: Cluster, topic: str, count: int) -> list[bytes]:
    """All that can be read: until there are so many, and then whether there are more."""
    found: list[bytes] = []
    async with cluster.client() as client, client.checkpoint_consumer(topic) as consumer:
        async with asyncio.timeout(BOUND):
            while len(found) < count:
                found += [message.value for message in await consumer.receive_batch(100, timeout=0.5)]
        found += [message.value for message in await consumer.receive_batch(100, timeout=0.5)]
    return found


# Zombies.


async def delivered(client: RawClient, consumer_id: int) -> Delivery:
    found = await client.take(lambda each: isinstance(each, Delivery) and each.command.consumer_id == consumer_id, "a MESSAGE")
    assert isinstance(found, Delivery)
    return found


@pytest.mark.req("R473-1")
@pytest.mark.inv("INV14")
@pytest.mark.parametrize("is_first_committed", [True, False], ids=["the other committed", "the other is still open"])
async def test_a_zombie_read_process_write_is_refused(is_first_committed: bool) -> None:
    """Two readers process the same message, because one was taken for dead: what only one of them may commit is one output."""
    source, target = "persistent://public/default/source", "persistent://public/default/target"
    async with TxnCluster(brokers=1) as cluster:
        zombie, other = await cluster.client(0), await cluster.client(0)
        await other.producer(source, 1)
        position = await sent(other, b"in", 0, 1)
        for client in (zombie, other):
            await client.producer(target, 2)
        await zombie.subscribe(source, "s", SubType.SHARED, 3, initial=InitialPosition.EARLIEST, permits=10)
        assert position_of((await delivered(zombie, 3)).command.message_id) == position
        await zombie.close_consumer(3)
        await other.subscribe(source, "s", SubType.SHARED, 4, permits=10)
        assert position_of((await delivered(other, 4)).command.message_id) == position
        txn = await begin(other)
        await sent(other, b"out of the other", 0, 2, txn)
        assert not (await other.answer(ack(other, 4, position, txn))).HasField("error")
        if is_first_committed:
            await commit(other, txn)
            await cluster.advance(SETTLE_SECONDS)
        # The zombie comes back and goes on with what it has in its hands.
        await zombie.subscribe(source, "s", SubType.SHARED, 3, permits=10)
        late = await begin(zombie)
        await sent(zombie, b"out of the zombie", 0, 2, late)
        refused = await zombie.answer(ack(zombie, 3, position, late))
        assert refused.error == TransactionConflict.code
        await abort(zombie, late)  # as the SDK's commit() does after a refused acknowledgment
        if not is_first_committed:
            await commit(other, txn)
            await cluster.advance(SETTLE_SECONDS)
        await cluster.advance(SETTLE_SECONDS)
        await other.subscribe(target, "check", consumer_id=5, initial=InitialPosition.EARLIEST, permits=10)
        assert await other.payloads(1) == [b"out of the other"]
        await other.settle()
        await zombie.settle()
        assert CommandType.MESSAGE not in other.kinds() + zombie.kinds()
        await cluster.advance(RETENTION_SECONDS + SETTLE_SECONDS)
        assert cluster.ops() == {}
        assert cluster.headers() == {}


# Topics that go.


@pytest.mark.req("R473-1")
@pytest.mark.inv("INV5")
@pytest.mark.parametrize("action", [TxnAction.COMMIT, TxnAction.ABORT], ids=["commit", "abort"])
async def test_a_topic_deleted_under_an_open_transaction(action: TxnAction) -> None:
    gone, stays = "persistent://public/default/gone", "persistent://public/default/stays"
    async with TxnCluster(brokers=1) as cluster:
        client = await cluster.client(0)
        for number, topic in enumerate((gone, stays), 1):
            await client.producer(topic, number)
        await client.subscribe(gone, "s", consumer_id=1, initial=InitialPosition.EARLIEST, permits=10)
        position = await sent(client, b"plain", 0, 1)
        await delivered(client, 1)
        txn = await begin(client)
        for number in (1, 2):
            await sent(client, b"in txn", 1, number, txn)
        assert not (await client.answer(ack(client, 1, position, txn))).HasField("error")
        await cluster.nodes[0].service.delete_topic(TopicName.parse(gone), force=True)
        await cluster.advance(SETTLE_SECONDS)
        assert cluster.ops() == {}
        # What it wrote is gone, so that it must not be committed by halves: it was aborted, and takes nothing more.
        client = await cluster.client(0)
        await client.producer(gone, 1)
        await sent(client, b"new", 0, 1)
        send(client, b"late", 1, 1, txn)
        refused = await client.expect(CommandType.SEND_ERROR)
        assert refused.error == TransactionConflict.code
        answer = await end(client, txn, action)
        assert answer.HasField("error") == (action is TxnAction.COMMIT)
        if answer.HasField("error"):
            assert answer.error == InvalidTransactionStatus.code
        await cluster.advance(SETTLE_SECONDS)
        await client.subscribe(gone, "check", consumer_id=7, initial=InitialPosition.EARLIEST, permits=10)
        await client.subscribe(stays, "check", consumer_id=8, initial=InitialPosition.EARLIEST, permits=10)
        assert await client.payloads(1) == [b"new"]
        await client.settle()
        assert CommandType.MESSAGE not in client.kinds()
        await cluster.advance(RETENTION_SECONDS + SETTLE_SECONDS)
        assert cluster.ops() == {}
        assert cluster.headers() == {}
        assert (len(cluster.aborted(gone)), len(cluster.aborted(stays))) == (0, 1)
        await cluster.nodes[0].service.delete_topic(TopicName.parse(stays), force=True)
        assert cluster.aborted(stays) == {}


@pytest.mark.req("R473-42")
@pytest.mark.inv("INV13")
async def test_what_a_former_owner_writes_down_does_not_shorten_what_the_new_one_hides() -> None:
    """A transaction goes on at the new owner of its topic and is aborted; the old one wakes, still takes the topic for its own,
    and finishes what it knows of it."""
    topic = "persistent://public/default/moved"
    async with TxnCluster() as cluster:
        old, new = await cluster.client(0), await cluster.client(1)
        await cluster.take(old, topic)
        await old.producer(topic, 1)
        txn = await begin(new)
        early = await sent(old, b"early", 0, 1, txn)
        await cluster.move(0, new, topic)
        await new.producer(topic, 1)
        late = await sent(new, b"late", 1, 1, txn)
        assert late > early
        await abort(new, txn)
        await cluster.advance(SETTLE_SECONDS)
        (record,) = cluster.aborted(topic).values()
        assert record.last == f"{late.ledger_id}:{late.entry_id}"
        cluster.wake(0)
        await cluster.nodes[0].service.transactions.decisions.reconcile()
        await cluster.advance(SETTLE_SECONDS)
        assert cluster.aborted(topic)[txn].last == record.last
        assert cluster.ops() == {}


@pytest.mark.req("R473-38")
@pytest.mark.inv("INV15")
@pytest.mark.parametrize("is_told", [True, False], ids=["told by the watch", "watch lost"])
async def test_what_is_committed_can_be_read_at_once_and_without_any_hint_soon(is_told: bool) -> None:
    """Time stands still: what comes is due to the watch alone. Without it the outcome is found when headers are compared."""
    topic = "persistent://public/default/visible"
    async with TxnCluster(brokers=1) as cluster:
        client = await cluster.client(0)
        await client.producer(topic, 1)
        await client.subscribe(topic, "s", initial=InitialPosition.EARLIEST, permits=10)
        txn = await begin(client)
        await sent(client, b"in txn", 0, 1, txn)
        if not is_told:
            cluster.metadata(0).watching.clear()
        await commit(client, txn)
        if not is_told:
            await client.settle()
            assert CommandType.MESSAGE not in client.kinds()
            await cluster.advance(1.0)
        assert await client.payloads(1) == [b"in txn"]


@pytest.mark.req("R473-35")
async def test_a_transaction_past_its_deadline_is_aborted_and_its_messages_stay_hidden() -> None:
    topic = "persistent://public/default/deadline"
    async with TxnCluster(brokers=1) as cluster:
        client = await cluster.client(0)
        await client.producer(topic, 1)
        await client.subscribe(topic, "s", initial=InitialPosition.EARLIEST, permits=10)
        txn = await begin(client, 3.0)
        await sent(client, b"in txn", 0, 1, txn)
        await sent(client, b"plain", 1, 1)
        await client.settle()
        assert CommandType.MESSAGE not in client.kinds()
        await cluster.advance(2.5)
        assert cluster.headers()[txn].is_open
        await cluster.advance(2.0)
        assert cluster.headers()[txn].state == "ABORTED"
        assert await client.payloads(1) == [b"plain"]
        send(client, b"too late", 2, 1, txn)
        refused = await client.expect(CommandType.SEND_ERROR)
        assert refused.error == TransactionConflict.code
        reply = await end(client, txn, TxnAction.COMMIT)
        assert reply.error == 21  # InvalidTxnStatus
        await cluster.advance(SETTLE_SECONDS)
        assert CommandType.MESSAGE not in client.kinds()
