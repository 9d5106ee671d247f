"""What transactions cost at the two store ports, counted by kind: metadata writes, ledger appends, ledger bytes read.

Clients are on real sockets. Time stands still while it is counted, so that nothing periodic is counted with it.
"""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from tests.e2e.txn_cluster import (
    SESSION_SECONDS,
    SETTLE_SECONDS,
    TxnCluster,
    abort,
    begin,
    commit,
    retried,
    send,
    sent,
    topic_log,
)

from braid.errors import TopicTerminated
from braid.managedledger.records import ROOT
from braid.model.names import TopicName
from braid.testing.raw_client import RawClient, id_of, position_of
from braid.txn import records
from braid.wire import requests
from braid.wire.types import AckType, CommandType, InitialPosition

SEGMENTS_OF_A_TOPIC = 100
WRITES = ("put", "append", "delete", "delete_span")


class Count:
    """Calls to the stores since it was made."""

    def __init__(self, cluster: TxnCluster) -> None:
        self._cluster = cluster
        self._calls = Counter(cluster.counts)
        self._appends = Counter(cluster.ledgers.appends)
        self._bytes_read = cluster.ledgers.bytes_read

    @property
    def calls(self) -> Counter[tuple[str, str]]:
        return self._cluster.counts - self._calls

    def writes(self, *, besides: str = "") -> dict[tuple[str, str], int]:
        """Metadata writes by operation and kind."""
        return {each: count for each, count in self.calls.items() if each[0] in WRITES and each[1] != besides}

    @property
    def appends(self) -> dict[str, int]:
        """Ledger appends by log."""
        return dict(self._cluster.ledgers.appends - self._appends)

    @property
    def bytes_read(self) -> int:
        return self._cluster.ledgers.bytes_read - self._bytes_read


async def segments_of(cluster: TxnCluster, count: int) -> list[str]:
    """Scalable topics with so many segments together, at most a hundred each; the segments' names."""
    for start in range(0, count, SEGMENTS_OF_A_TOPIC):
        topic = TopicName.parse(f"topic://public/default/x{start}")
        await cluster.nodes[0].service.create_scalable_topic(topic, min(count, SEGMENTS_OF_A_TOPIC))
    prefix = f"{ROOT}/public/default/segment/"
    found = [f"segment://public/default/{key.removeprefix(prefix)}" for key in sorted(cluster.rows) if key.startswith(prefix)]
    assert len(found) == count
    return found


async def written_before(client: RawClient, topics: list[str]) -> None:
    """A producer on each, by its number, and a plain message, so that there is a ledger to write to."""
    for number, topic in enumerate(topics):
        await client.producer(topic, number)
        await sent(client, b"plain", 0, number)


@pytest.mark.req("R473-3", "R473-34", "R473-46", "R473-47")
@pytest.mark.inv("INV10")
@pytest.mark.parametrize("segments", [1, 10, 100, 1000])
async def test_two_metadata_writes_besides_ops_and_one_append_per_send(segments: int) -> None:
    async with TxnCluster(brokers=1) as cluster:
        client = await cluster.client(0)
        topics = await segments_of(cluster, segments)
        await written_before(client, topics)
        await commit(client, await begin(client))  # the block of serials is reserved
        await cluster.advance(SETTLE_SECONDS)
        count = Count(cluster)
        txn = await begin(client)
        for number in range(segments):
            send(client, b"in txn", 1, number, txn)
        for _ in topics:
            await client.receipt()
        before_end = Count(cluster)
        await commit(client, txn)
        if segments >= 100:  # the answer did not wait for the participants
            assert before_end.calls["delete", "op"] <= segments // 2
        assert before_end.writes(besides="op") == {("put", "header"): 1}
        assert count.writes(besides="op") == {("put", "header"): 2}
        assert count.calls["append", "op"] == segments
        assert count.appends == {topic_log(topic): 1 for topic in topics}
        await cluster.advance(SETTLE_SECONDS)
        # Materialised: the ops are gone, and nothing was written into any log.
        assert cluster.ops() == {}
        assert count.calls["delete", "op"] == segments
        assert count.writes(besides="op") == {("put", "header"): 2}
        assert count.appends == {topic_log(topic): 1 for topic in topics}
        outcomes = cluster.nodes[0].service.transactions.store.counters.header_cas
        assert outcomes["conflict"] == 0 and outcomes["reject"] == 0


@pytest.mark.req("R473-3", "R473-4")
async def test_every_send_is_one_append_and_nothing_else_is_in_any_log() -> None:
    async with TxnCluster(brokers=1) as cluster:
        client = await cluster.client(0)
        topics = [f"persistent://public/default/t{number}" for number in range(3)]
        await written_before(client, topics)
        expected = {topic_log(topic): [b"plain"] for topic in topics}
        sequence = 1
        for outcome in (commit, abort, commit):
            txn = await begin(client)
            for number, topic in enumerate(topics):
                for _ in range(5):
                    text = b"%d" % sequence
                    send(client, text, sequence, number, txn)
                    expected[topic_log(topic)].append(text)
                    sequence += 1
            for _ in range(15):
                await client.receipt()
            await outcome(client, txn)
        await cluster.advance(SETTLE_SECONDS)
        written = cluster.ledgers.appended
        # No other log either: no topic of the system's own.
        assert {
            log: [body[-len(text) :] for body, text in zip(written[log], texts, strict=True)] for log, texts in expected.items()
        } == expected
        assert set(written) == set(expected)


@pytest.mark.req("R473-26", "R473-43")
@pytest.mark.inv("INV2")
async def test_recovery_reads_no_byte_of_any_ledger() -> None:
    """A topic with open, aborted and committed transactions is loaded with the same reads as one without any."""
    read: dict[str, int] = {}
    scans: dict[str, dict[tuple[str, str], int]] = {}
    async with TxnCluster(brokers=1) as cluster:
        client = await cluster.client(0)
        topics = {"with": "persistent://public/default/with", "without": "persistent://public/default/without"}
        await written_before(client, list(topics.values()))
        sequence = 1
        expected: list[bytes] = [b"plain"]
        for number in range(60):
            txn = await begin(client)
            for producer, used in ((0, txn), (1, None)):
                await sent(client, b"m%04d" % number, sequence, producer, used)
            sequence += 1
            if number % 3 == 0:
                await commit(client, txn)
                expected.append(b"m%04d" % number)
            elif number < 57:  # the last two stay open
                await abort(client, txn)
        for producer in (0, 1):
            await sent(client, b"plain", sequence, producer)
        await cluster.advance(SETTLE_SECONDS)
        broker = await cluster.restart()
        client = await cluster.client(broker)
        await cluster.take(client, topics["with"])
        for what, topic in topics.items():
            count = Count(cluster)
            await retried(cluster, client.producer, topic, 1)
            read[what] = count.bytes_read
            scans[what] = {each: number for each, number in count.calls.items() if each[0] in ("scan", "names")}
            await client.close_producer(1)
        assert read["with"] == read["without"]
        assert scans["with"] == scans["without"]  # the same few however many have finished
        await client.subscribe(topics["with"], "s", initial=InitialPosition.EARLIEST, permits=1000)
        assert await client.payloads(len(expected)) == expected
        assert not any(each for each in await client.settle() if not hasattr(each, "type"))


@pytest.mark.req("R473-57", "R473-2")
@pytest.mark.parametrize("is_commit", [True, False], ids=["commit", "abort"])
async def test_a_sealed_log_materialises_without_a_ledger_write(is_commit: bool) -> None:
    async with TxnCluster(brokers=1) as cluster:
        client = await cluster.client(0)
        topic = "persistent://public/default/sealed"
        await written_before(client, [topic])
        txn = await begin(client)
        await sent(client, b"in txn", 1, 0, txn)
        loaded = await cluster.nodes[0].service.topic(TopicName.parse(topic), create=False)
        await loaded.terminate()
        with pytest.raises(TopicTerminated):
            await client.producer(topic, 5)
        count = Count(cluster)
        await (commit if is_commit else abort)(client, txn)
        await cluster.advance(SETTLE_SECONDS)
        assert count.appends == {}
        assert cluster.ops() == {}
        await client.subscribe(topic, "s", initial=InitialPosition.EARLIEST, permits=10)
        expected = [b"plain", b"in txn"] if is_commit else [b"plain"]
        assert await client.payloads(len(expected)) == expected
        await client.settle()
        assert CommandType.MESSAGE not in client.kinds()


@pytest.mark.req("R473-45")
async def test_a_coordinator_that_dies_is_followed_without_any_replay() -> None:
    async with TxnCluster() as cluster:
        first, second = await cluster.client(0), await cluster.client(1)
        topic = "persistent://public/default/failover"
        await cluster.take(second, topic)
        await second.producer(topic, 1)
        for number in range(20):
            await commit(first, await begin(first, coordinator=number % 4))
        left_open = [await begin(first, coordinator=number % 4) for number in range(8)]
        for number, txn in enumerate(left_open):
            await sent(second, b"m%d" % number, number, 1, txn)
        await cluster.nodes[0].kill()
        count = Count(cluster)
        # At once, before its session has run out: the other broker serves every partition.
        for number, txn in enumerate(left_open):
            await (commit if number % 2 else abort)(second, txn)
        begun = [await begin(second, coordinator=number % 4) for number in range(8)]
        assert not {*begun} & {*left_open}
        assert count.calls["scan", "header"] == count.calls["names", "header"] == count.bytes_read == 0
        await cluster.advance(SESSION_SECONDS + SETTLE_SECONDS)
        partitions = cluster.nodes[1].service.transactions.partitions
        assert partitions is not None and all(partitions.leads(number) for number in range(4))
        await second.subscribe(topic, "s", initial=InitialPosition.EARLIEST, permits=100)
        assert await second.payloads(4) == [b"m1", b"m3", b"m5", b"m7"]


@pytest.mark.req("R473-12")
async def test_a_transaction_of_a_hundred_thousand_writes() -> None:
    """No limit on its size: each goes over the wire to the topic's owner, as do thousands of acknowledgments, which have a
    record each; the end is one write; and then all of it is there, in order, and no record is left."""
    writes, acks, group = 100_000, 5000, 1000
    async with TxnCluster(brokers=1) as cluster:
        client = await cluster.client(0)
        source, target = "persistent://public/default/source", "persistent://public/default/target"
        await written_before(client, [source, target])
        await client.subscribe(source, "s", initial=InitialPosition.EARLIEST)
        places = []
        for first in range(1, acks, group):
            for number in range(first, first + group):
                send(client, b"input", number, 0)
            places += [position_of((await client.receipt()).message_id) for _ in range(group)]
        txn = await begin(client)
        count = Count(cluster)
        for first in range(0, acks, group):
            request = client.next_request()
            named = [id_of(place) for place in places[first : first + group]]
            client.send(requests.ack(1, named, AckType.INDIVIDUAL, request, txn=txn))
            assert not (await client.answer(request)).HasField("error")
        assert count.calls["append", "op"] == acks
        for first in range(1, writes, group):
            for number in range(first, first + group):
                send(client, b"%d" % number, number, 1, txn)
            for _ in range(group):
                await client.receipt()
        assert count.appends == {topic_log(target): writes}
        cursor = cluster.nodes[0].service.topics[source].subscriptions["s"].cursor
        assert cursor.backlog() == acks + 1
        before_end = Count(cluster)
        await commit(client, txn)
        assert before_end.writes(besides="op") == {("put", "header"): 1}
        while any(key.startswith(records.OPS + "/") for key in cluster.rows):  # noqa: ASYNC110 - the owner takes its own time
            await asyncio.sleep(0)
        assert cursor.backlog() == 1
        await client.subscribe(target, "t", consumer_id=2, initial=InitialPosition.EARLIEST, permits=writes + 1)
        assert await client.payloads(writes + 1) == [b"plain", *(b"%d" % number for number in range(1, writes + 1))]
