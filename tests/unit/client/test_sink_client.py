"""Batches of a sink through the SDK, against real brokers: written once, whatever is repeated, and who may not write."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

import braid
from braid.client import Client, ClientConfig, Decider, QueueConsumer, SinkBegin, SinkCurrent, SinkState, blocking
from braid.errors import (
    DeadlineExceeded,
    InvalidArgument,
    InvalidTransactionStatus,
    NotAllowed,
    SinkFenced,
    TransactionConflict,
)
from braid.model.txn import TxnId
from braid.testing.broker import BackgroundBroker, InProcessBroker
from braid.txn.config import TransactionConfig
from braid.web.config import StandaloneConfig

OUT = "topic://public/default/sink-out"
SINK = "8a2c/topic://public/default/sink-out"
SECONDS = 20.0
CONFIG = StandaloneConfig(
    transactions=TransactionConfig(timeout_sweep_seconds=0.05, collect_seconds=0.05, retention_seconds=0.1)
)


@pytest.fixture
async def broker() -> AsyncIterator[InProcessBroker]:
    async with InProcessBroker(config=CONFIG, with_http=False) as one:
        yield one


@pytest.fixture
async def client(broker: InProcessBroker) -> AsyncIterator[Client]:
    async with braid.connect(broker.service_url) as one:
        yield one


async def begun(client: Client, batch: int, run: str, timeout: float = 60.0) -> Decider:
    found = await client.begin_sink(SINK, batch, run, timeout=timeout)
    assert found.decider is not None and not found.is_duplicate
    return found.decider


async def take(consumer: QueueConsumer, count: int) -> list[bytes]:
    found = [(await consumer.receive(SECONDS)).payload for _ in range(count)]
    assert await consumer.receive_batch(1, timeout=0.3) == []
    return sorted(found)


async def settled(broker: InProcessBroker) -> None:
    """Nothing is open, and all headers of what ended are collected."""
    store = broker.nodes[0].service.transactions.store
    async with asyncio.timeout(SECONDS):
        while await store.open_headers(1) or [each async for each in store.finished(1 << 50)]:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_a_batch_from_two_processes_with_a_repeated_attempt(broker: InProcessBroker, client: Client) -> None:
    async with (
        braid.connect(broker.service_url) as elsewhere,
        client.producer(OUT) as out,
        elsewhere.producer(OUT) as far,
        client.queue_consumer(OUT, "check", initial="earliest") as check,
    ):
        here, there = await asyncio.gather(begun(client, 0, "a"), begun(elsewhere, 0, "a"))
        assert here.id == there.id
        await here.renew(120)
        failed, second, other = await here.sub(), await here.sub(), await there.sub()
        await out.send(b"0", txn=failed)
        await out.send(b"0", txn=second)
        await far.send(b"1", txn=other)
        await second.finish()
        await other.finish()
        assert await client.sink(SINK) == SinkState(SINK, None, SinkCurrent(0, "a", here.id))
        winners = [second.number, other.number]
        assert await client.decide_batch(SINK, 0, "a", str(here.id), winners) == "COMMITTED"
        assert await client.decide_batch(SINK, 0, "a", here.id, winners) == "COMMITTED"  # as after a lost answer
        assert await take(check, 2) == [b"0", b"1"]
        await client.abort_batch(str(here.id))  # Spark aborts after a commit whose answer was lost
        assert await client.sink(SINK) == SinkState(SINK, 0, None, "a")
        assert await client.begin_sink(SINK, 0, "a", timeout=60) == SinkBegin(None, True)
        await out.send(b"zombie")
        with pytest.raises(TransactionConflict):
            await out.send(b"late", txn=failed)
        assert await take(check, 1) == [b"zombie"]


async def test_a_new_run_finishes_and_fences_the_old_one(client: Client) -> None:
    old = await begun(client, 3, "old")
    sub = await old.sub()
    new = await begun(client, 3, "new")
    assert new.id != old.id
    with pytest.raises(SinkFenced, match=r"run new, which was started later.*Stop one of the two jobs"):
        await client.decide_batch(SINK, 3, "old", old.id, [sub.number])
    with pytest.raises(SinkFenced, match=r"run old has lost the sink .* to the run new"):
        await client.begin_sink(SINK, 3, "old", timeout=60)
    winner = await new.sub()
    assert await client.decide_batch(SINK, 3, "new", new.id, [winner.number]) == "COMMITTED"
    assert await client.decide_batch(SINK, 3, "old", old.id, [sub.number]) == "DUPLICATE"  # it is there, if not by this run
    with pytest.raises(SinkFenced):
        await client.begin_sink(SINK, 4, "old", timeout=60)


async def test_a_batch_that_a_later_one_of_another_job_aborted_is_not_called_written(client: Client) -> None:
    """As when two jobs write versions 5 and 7 of one application at the same time: 7 being under way does not bring 5 into the
    output, and whoever is told that it is there would leave it out for ever."""
    old = await begun(client, 5, "a")
    sub = await old.sub()
    later = await begun(client, 7, "b")
    with pytest.raises(SinkFenced, match=r"Batch 5 of the sink .* was not written by this run"):
        await client.decide_batch(SINK, 5, "a", old.id, [sub.number])
    await client.abort_batch(later.id)
    with pytest.raises(InvalidTransactionStatus, match=r"Batch 5 of the sink .* is not in the output"):
        await client.decide_batch(SINK, 5, "a", old.id, [sub.number])


async def test_what_was_committed_is_known_after_its_header_is_gone(broker: InProcessBroker, client: Client) -> None:
    decider = await begun(client, 7, "a")
    sub = await decider.sub()
    await client.decide_batch(SINK, 7, "a", decider.id, [sub.number])
    await settled(broker)
    assert await client.sink(SINK) == SinkState(SINK, 7, None, "a")
    assert (await client.begin_sink(SINK, 7, "b", timeout=60)).is_duplicate
    assert await client.decide_batch(SINK, 7, "a", decider.id, [sub.number]) == "DUPLICATE"
    await client.abort_batch(decider.id)


async def test_a_batch_whose_deadline_passed_is_refused_and_written_by_the_next_run(
    broker: InProcessBroker, client: Client
) -> None:
    decider = await begun(client, 1, "a", timeout=0.05)
    await settled(broker)
    for _ in range(2):
        with pytest.raises(
            InvalidTransactionStatus, match=r"Batch 1 of the sink .* is not in the output.* Start the job again"
        ):
            await client.decide_batch(SINK, 1, "a", decider.id, [])
        with pytest.raises(
            InvalidTransactionStatus, match=r"Batch 1 of the sink .* was aborted in this run.*start the job again"
        ):
            await client.begin_sink(SINK, 1, "a", timeout=60)
    again = await begun(client, 1, "b")
    assert await client.decide_batch(SINK, 1, "b", again.id, []) == "COMMITTED"


async def test_nothing_is_known_of_a_sink_that_nobody_used(client: Client) -> None:
    assert await client.sink("nobody's") is None


async def test_closing_the_client_ends_no_batch(broker: InProcessBroker, client: Client) -> None:
    async with braid.connect(broker.service_url) as elsewhere:
        decider = await begun(elsewhere, 0, "a")
    assert await client.sink(SINK) == SinkState(SINK, None, SinkCurrent(0, "a", decider.id))


async def test_winners_that_do_not_exist_decide_nothing(client: Client) -> None:
    decider = await begun(client, 0, "a")
    with pytest.raises(NotAllowed, match="has no sub-transaction 9"):
        await client.decide_batch(SINK, 0, "a", decider.id, [9])
    assert await client.decide_batch(SINK, 0, "a", decider.id, []) == "COMMITTED"


@pytest.mark.parametrize("wrong", ["", " ", None, 7, "x" * 5000])
async def test_names_that_no_sink_or_run_can_have(client: Client, wrong: object) -> None:
    with pytest.raises((InvalidArgument, NotAllowed), match=r"sink=|name a sink"):
        await client.begin_sink(wrong, 0, "a", timeout=60)  # type: ignore[arg-type]
    with pytest.raises((InvalidArgument, NotAllowed), match=r"run=|name a run"):
        await client.begin_sink("s", 0, wrong, timeout=60)  # type: ignore[arg-type]


async def test_numbers_that_no_batch_can_have(client: Client) -> None:
    for wrong in (-1, 1 << 63, True, "1", 1.0, None):
        with pytest.raises(InvalidArgument, match="numbered from 0"):
            await client.begin_sink("s", wrong, "a", timeout=60)  # type: ignore[arg-type]
    for seconds in (0, -1, "10", None):
        with pytest.raises(InvalidArgument, match="timeout"):
            await client.begin_sink("s", 0, "a", timeout=seconds)  # type: ignore[arg-type]
    for txn in ("x", 7, TxnId(1, 3)):
        with pytest.raises(InvalidArgument, match="id"):
            await client.decide_batch("s", 0, "a", txn, [])  # type: ignore[arg-type]


async def test_no_broker_answers() -> None:
    config = ClientConfig(operation_timeout=0.3, connect_timeout=0.2)
    async with InProcessBroker(config=CONFIG, with_http=False) as broker:
        client = braid.connect(broker.service_url, config=config)
        await client.__aenter__()
        decider = await begun(client, 0, "a")
    with pytest.raises(DeadlineExceeded, match=r"Whether batch 0 of the sink .* is not known"):
        await client.decide_batch(SINK, 0, "a", decider.id, [])
    await client.close()


def test_blocking() -> None:
    with BackgroundBroker() as broker, blocking.connect(broker.service_url) as client, client.producer(OUT) as out:
        found = client.begin_sink(SINK, 0, "a", timeout=60)
        assert found.decider is not None
        sub = found.decider.sub()
        out.send(b"0", txn=sub)
        sub.finish()
        assert client.decide_batch(SINK, 0, "a", found.decider.id, [sub.number]) == "COMMITTED"
        assert client.begin_sink(SINK, 0, "b", timeout=60) == blocking.SinkBegin(None, True)
        assert client.sink(SINK) == SinkState(SINK, 0, None, "a")
        client.abort_batch(found.decider.id)
        with client.queue_consumer(OUT, "check", initial="earliest") as check:
            assert check.receive(SECONDS).payload == b"0"
