"""How long the end of a transaction takes, and until others see it: in the brokers' own time, which the test moves.

What needs no timer at all takes no time here; what waits for one takes exactly that long, on every machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

import pytest
from tests.e2e.txn_cluster import SETTLE_SECONDS, TxnCluster, abort, begin, commit, send, sent

from braid.model.names import TopicName
from braid.model.segments import physical_name
from braid.testing.clock import ManualClock
from braid.testing.raw_client import RawClient
from braid.wire.types import CommandType, InitialPosition

T = TypeVar("T")
TOPIC = TopicName.parse("topic://public/default/layouts")
END_SECONDS = 1.0
"""What the end of a transaction may take, whatever became of the segments it wrote to."""
VISIBLE_SECONDS = 0.2
"""Between the answer to a commit and the delivery of what was committed, 99 times of 100."""
STEP_SECONDS = 0.005
COMMITS = 100


async def by_clock(cluster: TxnCluster, work: Awaitable[T]) -> T:
    """The result of something that needs time to pass."""
    clock = cluster.clock
    assert isinstance(clock, ManualClock)
    task = asyncio.ensure_future(work)
    async with asyncio.timeout(30):
        while not task.done():
            await clock.advance(STEP_SECONDS)
    return await task


class Producers:
    """One on each active segment of the topic; those of sealed ones are closed by their broker."""

    def __init__(self, client: RawClient) -> None:
        self._client = client
        self._ids: dict[int, int] = {}
        self._next = 0

    async def write(self, layout: Any, payload: bytes, txn: Any) -> None:
        """A message to each segment that is active now."""
        for number, segment in sorted(layout.active_segments.items()):
            if number not in self._ids:
                self._ids[number] = len(self._ids) + 1
                await self._client.producer(str(physical_name(TOPIC, segment)), self._ids[number])
            self._next += 1
            await sent(self._client, payload, self._next, self._ids[number], txn)


@pytest.mark.req("R473-2")
@pytest.mark.parametrize("is_commit", [True, False], ids=["commit", "abort"])
async def test_sealed_parents_and_an_owner_that_stands_still_do_not_hold_up_the_end(is_commit: bool) -> None:
    """A split and a merge happen inside the transaction; then nobody who owns any of its segments does anything any more, and
    time stands still: the end is answered all the same, by another broker."""
    async with TxnCluster(brokers=2) as cluster:
        owner, other = await cluster.client(0), await cluster.client(1)
        service = cluster.nodes[0].service
        await cluster.take(owner, "persistent://public/default/any")  # all topics lie in one bundle
        await by_clock(cluster, service.create_scalable_topic(TOPIC, 2))
        controller = await by_clock(cluster, service.scalable.lead_scalable(TOPIC))
        producers = Producers(owner)
        await producers.write(controller.layout, b"before", None)
        txn = await begin(other)
        await producers.write(controller.layout, b"first", txn)
        await by_clock(cluster, controller.split_segment(0))
        await producers.write(controller.layout, b"second", txn)
        await by_clock(cluster, controller.merge_segments(3, 1))
        await producers.write(controller.layout, b"third", txn)
        sealed = [number for number, each in controller.layout.all_segments.items() if each.is_sealed]
        assert sorted(sealed) == [0, 1, 3]
        assert {str(physical_name(TOPIC, each)) for each in controller.layout.all_segments.values()} <= set(service.topics)
        cluster.pause(0)
        began = cluster.clock.monotonic()
        await (commit if is_commit else abort)(other, txn)
        assert cluster.clock.monotonic() - began < END_SECONDS
        assert cluster.headers()[txn].state == ("COMMITTED" if is_commit else "ABORTED")
        cluster.resume(0)
        await cluster.advance(SETTLE_SECONDS)
        assert cluster.ops() == {}
        seen = []
        reader = await cluster.client(0)
        for number, segment in controller.layout.all_segments.items():
            await reader.subscribe(
                str(physical_name(TOPIC, segment)), "r", consumer_id=number + 1, initial=InitialPosition.EARLIEST, permits=10
            )
            await reader.settle()
        for _ in range(9 if is_commit else 2):
            seen += await reader.payloads(1)
        await reader.settle()
        assert CommandType.MESSAGE not in reader.kinds()
        wrote = {b"first": 2, b"second": 3, b"third": 2} if is_commit else {}
        assert {text: seen.count(text) for text in set(seen)} == {b"before": 2, **wrote}


@pytest.mark.req("R473-38")
async def test_what_is_committed_is_seen_soon_over_a_store_that_takes_its_time() -> None:
    """Every call to the metadata store takes up to 10 ms here and every watch is up to 50 ms late; coordinator and owner are
    different brokers. The commit is answered as soon as it is decided, and what it shows follows within the watch's delay."""
    topic = "persistent://public/default/visible"
    async with TxnCluster(brokers=2) as cluster:
        writer, ender = await cluster.client(0), await cluster.client(1)
        clock = cluster.clock
        await cluster.take(writer, topic)
        await writer.producer(topic, 1)
        await writer.subscribe(topic, "s", initial=InitialPosition.EARLIEST, permits=2 * COMMITS)
        for number in range(2):
            cluster.metadata(number).faults.delay = 0.01
            cluster.metadata(number).faults.watch_lag = 0.05
        answered, seen = [], []
        try:
            for number in range(COMMITS):
                txn = await by_clock(cluster, begin(ender))
                send(writer, b"%d" % number, number, 1, txn)
                await by_clock(cluster, writer.receipt())
                assert CommandType.MESSAGE not in writer.kinds()
                began = clock.monotonic()
                await by_clock(cluster, commit(ender, txn))
                answered.append(clock.monotonic() - began)
                began = clock.monotonic()
                assert await by_clock(cluster, writer.payloads(1)) == [b"%d" % number]
                seen.append(clock.monotonic() - began)
        finally:  # what is left to do is not to take any time
            for number in range(2):
                cluster.metadata(number).faults.clear()
        assert sorted(seen)[COMMITS * 99 // 100] < VISIBLE_SECONDS, sorted(seen)[-10:]
        assert sorted(answered)[COMMITS * 99 // 100] < VISIBLE_SECONDS, sorted(answered)[-10:]
        assert sorted(seen)[COMMITS // 2] > STEP_SECONDS  # the watch was late indeed
