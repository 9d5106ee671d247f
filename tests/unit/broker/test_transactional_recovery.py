"""Crashes and new owners: transactional writes are neither lost nor shown too early, at every step of their plans."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from braid.ledger.backends.memory import MemoryLedgerReader
from braid.model.positions import LATEST, Position
from braid.model.txn import TxnId
from braid.runtime.plans import watching
from braid.testing.raw_client import RawClient, payload_of, position_of
from braid.wire.types import CommandType, InitialPosition

TOPIC = "persistent://public/default/recovered"
WRITE_STEPS = ["txn-write:op", "txn-write:header", "txn-write:append"]
MOMENTS = ["before", "after"]


class Halt:
    """Stops whoever comes to a moment of a step, for ever."""

    def __init__(self, name: str, moment: str) -> None:
        self._at = (name, moment)
        self.reached = asyncio.Event()

    async def __call__(self, name: str, moment: str) -> None:
        if (name, moment) == self._at and not self.reached.is_set():
            self.reached.set()
            await asyncio.Event().wait()


async def consumer(broker: Any, name: str = "sub") -> RawClient:
    client: RawClient = await broker.client()
    await client.subscribe(TOPIC, name, initial=InitialPosition.EARLIEST, permits=100)
    return client


async def producer(broker: Any) -> RawClient:
    """With a producer of the topic, of which a subscription keeps everything."""
    client: RawClient = await broker.client()
    await client.subscribe(TOPIC, "keeps everything", initial=InitialPosition.EARLIEST)
    await client.producer(TOPIC)
    return client


async def ops(broker: Any) -> list[Any]:
    found: list[Any] = await broker.service.transactions.store.writes_in(TOPIC)
    return found


async def aborted(broker: Any) -> list[TxnId]:
    return [txn async for txn, _value in broker.service.transactions.store.aborted_in(TOPIC)]


async def ended(broker: Any) -> None:
    """Everything that is decided is materialised."""
    async with asyncio.timeout(10):
        while broker.topic(TOPIC).transactions._held or await ops(broker):  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0)


async def shown(broker: Any) -> list[bytes]:
    """What a new reader is given, up to a plain message that is stored now."""
    client = await broker.client()
    await client.producer(TOPIC, 9)
    end = await client.store(b"end", 1_000, 9)
    reader = await consumer(broker, f"up to {end}")
    found: list[bytes] = []
    while True:
        (delivery,) = await reader.messages(1)
        if position_of(delivery.command.message_id) == end:
            return found
        found.append(payload_of(delivery))


@pytest.mark.req("R473-44")
@pytest.mark.req("R473-22")
@pytest.mark.inv("INV10")
@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("name", WRITE_STEPS)
async def test_a_crash_at_any_step_of_a_write_exposes_nothing(world: Any, name: str, moment: str, commit: bool) -> None:
    broker = await world.broker()
    client = await producer(broker)
    await client.store(b"plain", 0)
    txn = await client.begin()
    halt = Halt(name, moment)
    with watching(halt):
        client.publish(b"in", 1, txn=txn)
        await halt.reached.wait()
        await client.settle()
        was_answered = CommandType.SEND_RECEIPT in client.kinds()
        await broker.kill()
    successor = await world.broker()
    other = await successor.client()
    reader = await consumer(successor)
    assert await reader.payloads(1) == [b"plain"]
    await reader.settle()
    assert CommandType.MESSAGE not in reader.kinds()  # open, so not even an entry that was stored is shown
    await other.end(txn, commit=commit)
    reader.close()
    found = await shown(successor)
    was_stored = (name, moment) == ("txn-write:append", "after")
    assert was_answered <= was_stored
    assert found == [b"plain", b"in"] if commit and was_stored else [b"plain"]
    await ended(successor)
    assert (txn in await aborted(successor)) == (was_stored and not commit)


@pytest.mark.req("R473-39")
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(
    ("name", "commit"),
    [("txn-materialise:aborted", False), ("txn-materialise:delete-ops", False), ("txn-materialise:delete-ops", True)],
)
async def test_a_crash_while_materialising_is_finished_by_the_next_owner(
    world: Any, name: str, moment: str, commit: bool
) -> None:
    broker = await world.broker()
    client = await producer(broker)
    txn = await client.begin()
    await client.store(b"one", 0, txn=txn)
    last = await client.store(b"two", 1, txn=txn)
    halt = Halt(name, moment)
    with watching(halt):
        await client.end(txn, commit=commit)
        await halt.reached.wait()
        await broker.kill()
    successor = await world.broker()
    assert await shown(successor) == ([b"one", b"two"] if commit else [])
    await ended(successor)
    assert await aborted(successor) == ([] if commit else [txn])
    if not commit:
        (record,) = [value async for _txn, value in successor.service.transactions.store.aborted_in(TOPIC)]
        assert record.last == str(last)
    await successor.kill()
    third = await world.broker()
    assert await shown(third) == ([b"one", b"two"] if commit else []) + [b"end"]


@pytest.mark.req("R473-26")
@pytest.mark.req("R473-43")
@pytest.mark.req("R473-56")
async def test_a_new_owner_knows_everything_from_records_alone(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    broker = await world.broker()
    client = await producer(broker)
    await client.store(b"plain", 0)
    committed, gone, still_open = await client.begin(), await client.begin(), await client.begin()
    await client.store(b"committed", 1, txn=committed)
    await client.store(b"gone", 2, txn=gone)
    floor = await client.store(b"plain too", 3)
    await client.store(b"open", 4, txn=still_open)
    await client.end(committed, commit=True)
    await client.end(gone, commit=False)
    await client.settle()
    assert await aborted(broker) == [gone]
    await broker.kill()
    reads = 0
    real = MemoryLedgerReader.read

    async def counted(self: Any, *given: Any, **named: Any) -> list[bytes]:
        nonlocal reads
        reads += 1
        return await real(self, *given, **named)

    monkeypatch.setattr(MemoryLedgerReader, "read", counted)
    successor = await world.broker()
    other = await successor.client()
    await other.producer(TOPIC)
    assert reads == 1  # the log's own: where its last ledger ends
    buffer = successor.topic(TOPIC).transactions
    assert buffer.max_read_position == floor and buffer.is_aborted(gone) and not buffer.is_aborted(committed)
    (held,) = buffer.open_transactions()
    assert (held.txn, held.position) == (still_open, str(floor))
    reader = await consumer(successor)
    assert await reader.payloads(3) == [b"plain", b"committed", b"plain too"]
    await other.store(b"behind", 0)
    assert await reader.settle() == []
    await other.store(b"open again", 1, txn=still_open)  # and it goes on
    await other.end(still_open, commit=True)
    assert await reader.payloads(3) == [b"open", b"behind", b"open again"]
    assert buffer.max_read_position == LATEST


@pytest.mark.req("R473-39")
async def test_a_transaction_that_ended_while_nobody_served_is_hidden_from_the_start(world: Any) -> None:
    broker = await world.broker()
    client = await producer(broker)
    txn = await client.begin()
    await client.store(b"gone", 0, txn=txn)
    await broker.kill()
    successor = await world.broker()
    other = await successor.client()
    await other.end(txn, commit=False)  # decided before the topic is loaded
    assert await ops(successor)
    halt = Halt("txn-materialise:aborted", "before")
    with watching(halt):
        assert await shown(successor) == []  # nothing is written down yet, and it is hidden all the same
        await halt.reached.wait()
        await successor.service.unload(successor.topic(TOPIC))
    assert await shown(successor) == [b"end"]
    await ended(successor)
    assert await aborted(successor) == [txn]


async def test_an_op_without_entries_needs_no_aborted_record(world: Any) -> None:
    broker = await world.broker()
    client = await producer(broker)
    await client.store(b"plain", 0)
    txn = await client.begin()
    halt = Halt("txn-write:append", "before")
    with watching(halt):
        client.publish(b"never", 1, txn=txn)
        await halt.reached.wait()
        await broker.kill()
    successor = await world.broker()
    other = await successor.client()
    await other.end(txn, commit=False)
    assert await shown(successor) == [b"plain"]
    await ended(successor)
    assert await aborted(successor) == []


async def test_an_op_whose_header_is_missing_is_deleted_on_sight(world: Any) -> None:
    broker = await world.broker()
    client = await producer(broker)
    txn = await client.begin()
    stored = await client.store(b"x", 0, txn=txn)
    (op,) = await ops(broker)
    await client.end(txn, commit=True)
    await ended(broker)
    store = broker.service.transactions.store
    await store.append_op(TxnId.of(5, 77), op.op)
    await broker.service.unload(broker.topic(TOPIC))
    assert await shown(broker) == [b"x"]
    await ended(broker)
    assert broker.topic(TOPIC).transactions.max_read_position == LATEST and stored.entry_id == 0


@pytest.mark.inv("INV2")
@pytest.mark.inv("INV11")
@pytest.mark.parametrize("step", WRITE_STEPS)
@pytest.mark.parametrize("commit", [True, False])
async def test_a_late_write_of_a_former_owner_changes_nothing(world: Any, step: str, commit: bool) -> None:
    stale, owner = await world.broker(believes=True), await world.broker(believes=True)
    client = await producer(stale)
    await client.store(b"plain", 0)
    txn = await client.begin()
    await client.store(b"in time", 1, txn=txn)
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def pause(name: str, moment: str) -> None:
        if (name, moment) == (step, "before") and not reached.is_set():
            reached.set()
            await go_on.wait()

    with watching(pause):
        client.publish(b"late", 2, txn=txn)
        await reached.wait()
        other = await owner.client()
        await other.producer(TOPIC)  # takes the log over
        assert owner.topic(TOPIC).transactions.open_transactions()
        go_on.set()
        await client.expect(CommandType.CLOSE_PRODUCER)
    await other.end(txn, commit=commit)
    assert await shown(owner) == ([b"plain", b"in time"] if commit else [b"plain"])
    await owner.topic(TOPIC).transactions.relist()
    await ended(owner)


async def test_relisting_finds_ops_that_nobody_knows_and_leaves_the_others(world: Any) -> None:
    broker = await world.broker()
    client = await producer(broker)
    known, unknown, headless = await client.begin(), await client.begin(), TxnId.of(3, 99)
    await client.store(b"x", 0, txn=known)
    store = broker.service.transactions.store
    (op,) = await ops(broker)
    await store.append_op(unknown, op.op)
    await store.append_op(headless, op.op)
    buffer = broker.topic(TOPIC).transactions
    await buffer.relist()
    assert {each.txn for each in await ops(broker)} == {known, unknown}
    pinned = buffer.max_read_position
    assert pinned < Position(0, 0) or pinned == Position(op_ledger(broker), -1)
    await client.end(known, commit=True)
    assert buffer.max_read_position == LATEST  # an op without entries pins nothing
    await client.end(unknown, commit=False)
    await ended(broker)
    assert await aborted(broker) == []


def op_ledger(broker: Any) -> int:
    ledger: int = broker.topic(TOPIC).log.infos[-1].ledger_id
    return ledger


async def test_the_last_readable_entry_survives_an_unload(world: Any) -> None:
    broker = await world.broker()
    client = await producer(broker)
    plain = await client.store(b"plain", 0)
    txn = await client.begin()
    await client.store(b"gone", 1, txn=txn)
    await client.end(txn, commit=False)
    await ended(broker)
    await broker.service.unload(broker.topic(TOPIC))
    reader = await consumer(broker)
    assert position_of((await reader.last_message_id()).last_message_id) == plain
