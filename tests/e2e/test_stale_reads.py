"""Ranges read from a former owner: a broker stands still past its session, another takes its topic over, and the transaction it
was waiting for is decided there. Whatever the former owner says afterwards of what is stable, and of what a stable range holds,
must be what its successor says (INV13; a range below the stable index denotes the same rows for ever)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Literal

import pytest
from tests.e2e.txn_cluster import (
    RETENTION_SECONDS,
    SETTLE_SECONDS,
    TxnCluster,
    abort,
    begin,
    commit,
    retried,
    sent,
    turns,
)

from braid.client import Client
from braid.errors import BraidError, NotReady, from_code
from braid.model.txn import TxnId
from braid.runtime.env import Runtime
from braid.testing.raw_client import RawClient, payload_of
from braid.wire import bulk
from braid.wire.client import Bulk, Delivery
from braid.wire.messages import MessageIdData

pytestmark = pytest.mark.inv("INV13")
TOPIC = "persistent://public/default/ranges"
OLD, NEW, THIRD = 0, 1, 2
"""The former owner, its successor, and the broker whose clients decide."""
FIRST = MessageIdData(ledgerId=(1 << 64) - 1, entryId=(1 << 64) - 1)
SECONDS = 20
Outcome = Literal["commit", "abort"]
outcomes = pytest.mark.parametrize("outcome", ["commit", "abort"])
collected = pytest.mark.parametrize("is_collected", [False, True], ids=["header-present", "header-collected"])


async def ask(client: RawClient, frame: Callable[[int], bytes]) -> Any:
    """The answer to a request, in real time: nothing here may wait for a clock that stands still."""
    number = client.next_request()
    client.send(frame(number))
    async with asyncio.timeout(SECONDS):
        event = await client.take(lambda each: getattr(getattr(each, "body", None), "request_id", None) == number, "an answer")
    if event.body.HasField("error"):
        raise from_code(event.body.error, event.body.message)
    return event


async def describe(client: RawClient) -> tuple[int, int]:
    """The stable index of the topic and its end."""
    (found,) = (await ask(client, lambda number: bulk.describe_segments(number, [TOPIC]))).body.segments
    if found.HasField("error"):
        raise from_code(found.error, found.message)
    return found.stable_index, found.end_index


async def rows(client: RawClient, start: int, stop: int) -> list[int]:
    """Indexes of the messages that a range shows."""
    found: list[int] = []
    while start < stop:
        at = start
        event = await ask(client, lambda number: bulk.fetch_entries(number, TOPIC, "", at, stop, 1 << 20))  # noqa: B023 - used at once
        assert isinstance(event, Bulk)
        assert event.body.covered_to > start
        found += event.body.last_index
        start = event.body.covered_to
    return found


class Case:
    """Messages 0 to 2 are plain, 3 and 4 belong to a transaction, 5 and 6 are plain: what is stable ends at 3 until the
    transaction is decided."""

    def __init__(self, cluster: TxnCluster, outcome: Outcome) -> None:
        self.cluster = cluster
        self.outcome = outcome
        self.old: RawClient
        self.new: RawClient
        self.third: RawClient
        self.txn: TxnId
        self.shown = [0, 1, 2, *([3, 4] if outcome == "commit" else []), 5, 6]

    async def prepare(self) -> None:
        cluster = self.cluster
        self.old, self.new, self.third = [await cluster.client(number) for number in (OLD, NEW, THIRD)]
        await cluster.take(self.old, TOPIC)
        await self.old.producer(TOPIC, 1)
        self.txn = await begin(self.third)
        for number in range(7):
            await sent(self.old, b"m%d" % number, number, 1, self.txn if number in (3, 4) else None)
        assert await describe(self.old) == (3, 7)

    async def take_over(self) -> None:
        await self.cluster.move(OLD, self.new, TOPIC)
        await retried(self.cluster, self.new.producer, TOPIC, 2)

    async def decide(self, *, is_collected: bool) -> None:
        """The outcome, and another transaction that only the new owner ever sees: aborted, at 7."""
        await (commit if self.outcome == "commit" else abort)(self.third, self.txn)
        other = await begin(self.third)
        await sent(self.new, b"m7", 7, 2, other)
        await abort(self.third, other)
        await sent(self.new, b"m8", 8, 2)
        await self.cluster.advance(SETTLE_SECONDS + (RETENTION_SECONDS if is_collected else 0))
        assert (self.txn in self.cluster.headers()) is not is_collected
        assert await describe(self.new) == (9, 9)
        assert await rows(self.new, 0, 9) == [*self.shown, 8]

    def believe(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The former owner goes by a clock that stood still with it, as after a machine was suspended: it takes the topic for
        its own. What is left to keep its answers right is what it does with what it hears."""
        monkeypatch.setattr(self.cluster.nodes[OLD].service.ownership, "owns", lambda name: True)

    async def check_answers(self) -> bool:
        """What the former owner says now is refused, or agrees with its successor; whether it said anything."""
        try:
            stable, end = await describe(self.old)
            assert stable <= end
            found = await rows(self.old, 0, stable)
        except NotReady:
            return False
        assert found == [each for each in [*self.shown, 8] if each < stable]
        return True

    async def check_refused(self) -> None:
        for request in (describe(self.old), rows(self.old, 0, 3), self._offset_for(), self._at_time()):
            with pytest.raises(BraidError) as refusal:
                await request
            assert isinstance(refusal.value, NotReady), refusal.value

    async def _offset_for(self) -> None:
        await ask(self.old, lambda number: bulk.offset_for(number, TOPIC, "", 0, 1, None))

    async def _at_time(self) -> None:
        await ask(self.old, lambda number: bulk.index_at_time(number, TOPIC, "", 0))


@outcomes
@collected
async def test_a_former_owner_refuses_from_the_end_of_its_session_on(outcome: Outcome, is_collected: bool) -> None:
    async with TxnCluster(brokers=3) as cluster:
        case = Case(cluster, outcome)
        await case.prepare()
        await case.take_over()
        await case.decide(is_collected=is_collected)
        cluster.wake(OLD)  # it knows nothing but the time
        await case.check_refused()
        cluster.resume(OLD)  # and now it learns everything
        await case.check_answers()
        await cluster.advance(SETTLE_SECONDS)
        await case.check_answers()
        assert await describe(case.new) == (9, 9)
        assert await rows(case.new, 0, 9) == [*case.shown, 8]


@outcomes
@collected
@pytest.mark.parametrize("hears", ["by watch", "by comparing"])
async def test_a_former_owner_that_believes_it_owns_shows_nothing_wrong(
    outcome: Outcome, is_collected: bool, hears: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with TxnCluster(brokers=3) as cluster:
        case = Case(cluster, outcome)
        await case.prepare()
        await case.old.subscribe(TOPIC, "reader", durable=False, start_message_id=FIRST, permits=100)
        await case.take_over()
        await case.decide(is_collected=is_collected)
        case.believe(monkeypatch)
        cluster.wake(OLD)
        assert await describe(case.old) == (3, 7), "it was told nothing yet"
        assert await case.check_answers()
        if hears == "by watch":
            cluster.metadata(OLD).watching.set()
        else:
            await cluster.nodes[OLD].service.transactions.decisions.reconcile()
        for _ in range(20):
            await turns(10)
            await case.check_answers()
        delivered = [payload_of(each) for each in case.old.inbox if isinstance(each, Delivery)]
        assert delivered == [b"m%d" % number for number in case.shown][: len(delivered)], "consumers see nothing wrong either"
        cluster.resume(OLD)
        await case.check_answers()
        monkeypatch.undo()
        assert await rows(case.new, 0, 9) == [*case.shown, 8]


@outcomes
@pytest.mark.parametrize("former_owner", ["standing-still", "awake", "silent"])
async def test_the_client_goes_on_with_the_new_owner(
    outcome: Outcome, former_owner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that knows the former owner, and has a connection to it, is told to look elsewhere. If that owner says nothing
    at all, as a stopped process does, one call does both: give up waiting and go on with the successor."""

    async def silent(*_given: object, **_named: object) -> None:
        await asyncio.Event().wait()

    async with TxnCluster(brokers=3) as cluster:
        case = Case(cluster, outcome)
        await case.prepare()
        async with Client(cluster.nodes[THIRD].service_url, runtime=Runtime(clock=cluster.clock)) as client:
            reads = client.segment_reads()
            assert (await reads.states([TOPIC]))[TOPIC].stable == 3
            await case.take_over()
            await case.decide(is_collected=False)
            if former_owner == "awake":
                cluster.wake(OLD)
            elif former_owner == "silent":
                monkeypatch.setattr(cluster.nodes[OLD].service, "topic", silent)
            # As a task: it waits between its attempts, and time is in this test's hand.
            asked = asyncio.create_task(reads.states([TOPIC]))
            await cluster.until("the indexes are told", asked.done)
            state = (await asked)[TOPIC]
            assert (state.stable, state.end) == (9, 9)
            fetched = await reads.fetch(TOPIC, state.incarnation, 0, 9, max_bytes=1 << 20)
            assert (fetched.last_index, fetched.covered_to) == ([*case.shown, 8], 9)
