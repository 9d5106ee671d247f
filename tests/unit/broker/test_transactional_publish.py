"""SEND inside a transaction: stored at once, hidden until the outcome, refused after it; order, bounds and answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest

from braid.errors import InvalidTransactionStatus, OutcomeUnknown, StoreUnavailable
from braid.managedledger.config import ManagedLedgerConfig
from braid.model.positions import LATEST, Position
from braid.model.txn import TxnId
from braid.runtime.plans import watching
from braid.testing.raw_client import RawClient, entry, id_of, position_of
from braid.txn.config import TransactionConfig
from braid.txn.records import AbortedTxn
from braid.wire import requests
from braid.wire.types import CommandType, InitialPosition, ServerError, SubType

TOPIC = "persistent://public/default/transactional"
EARLIEST = InitialPosition.EARLIEST
NO_CACHE = ManagedLedgerConfig(cache_bytes=0)
KINDS = [SubType.EXCLUSIVE, SubType.FAILOVER, SubType.SHARED]


class Pause:
    """Holds the plan of the broker before or after one step until it is let go."""

    def __init__(self, name: str, moment: str = "before") -> None:
        self._at = (name, moment)
        self.reached = asyncio.Event()
        self._go_on = asyncio.Event()

    async def __call__(self, name: str, moment: str) -> None:
        if (name, moment) == self._at and not self.reached.is_set():
            self.reached.set()
            await self._go_on.wait()

    def go_on(self) -> None:
        self._go_on.set()


async def consumer(broker: Any, kind: SubType = SubType.EXCLUSIVE, **fields: Any) -> RawClient:
    client: RawClient = await broker.client()
    await client.subscribe(TOPIC, sub_type=kind, initial=EARLIEST, **fields)
    client.flow(100)
    return client


async def ops(broker: Any) -> list[Any]:
    found: list[Any] = await broker.service.transactions.store.writes_in(TOPIC)
    return found


async def aborted(broker: Any) -> list[TxnId]:
    return [txn async for txn, _value in broker.service.transactions.store.aborted_in(TOPIC)]


@pytest.fixture
def no_ops(until: Any) -> Callable[[Any], Any]:
    """Wait until everything is materialised."""

    async def wait(broker: Any) -> None:
        buffer = broker.topic(TOPIC).transactions
        await until(lambda: not buffer._held)
        assert await ops(broker) == []

    return wait


# Visibility.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("logs", [None, NO_CACHE], ids=["cached", "stored"])
@pytest.mark.req("R473-24")
@pytest.mark.req("R473-40")
@pytest.mark.inv("INV13")
async def test_entries_are_hidden_until_the_commit_and_hold_back_what_follows(
    world: Any, kind: SubType, logs: Any, no_ops: Any
) -> None:
    broker = await world.broker(logs)
    client = await broker.client()
    reader = await consumer(broker, kind)
    await client.producer(TOPIC)
    await client.producer(TOPIC, 2)
    await client.store(b"before", 0, 2)
    txn = await client.begin()
    first = await client.store(b"one", 0, txn=txn)
    await client.store(b"between", 1, 2)
    await client.store(b"two", 1, txn=txn)
    await client.store(b"after", 2, 2)
    assert await reader.payloads(1) == [b"before"]
    await reader.settle()
    assert CommandType.MESSAGE not in reader.kinds()
    buffer = broker.topic(TOPIC).transactions
    assert buffer.max_read_position == Position(first.ledger_id, first.entry_id - 1)
    (held,) = buffer.open_transactions()
    assert (held.txn, held.writes, held.position) == (txn, 2, str(buffer.max_read_position))
    await client.end(txn, commit=True)
    assert await reader.payloads(4) == [b"one", b"between", b"two", b"after"]
    assert buffer.max_read_position == LATEST
    await no_ops(broker)
    assert buffer.open_transactions() == [] and await aborted(broker) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("logs", [None, NO_CACHE], ids=["cached", "stored"])
@pytest.mark.req("R473-20")
@pytest.mark.req("R473-25")
@pytest.mark.inv("INV9")
async def test_aborted_entries_are_never_delivered_and_count_as_acknowledged(
    world: Any, kind: SubType, logs: Any, no_ops: Any, until: Any
) -> None:
    broker = await world.broker(logs)
    client = await broker.client()
    await client.producer(TOPIC)
    reader = await consumer(broker, kind)
    txn = await client.begin()
    for number in range(3):
        await client.store(b"aborted", number, txn=txn)
    last = await client.store(b"plain", 3)
    await client.end(txn, commit=False)
    (delivery,) = await reader.messages(1)
    assert position_of(delivery.command.message_id) == last
    reader.ack(last)
    cursor = broker.topic(TOPIC).subscriptions["sub"].cursor
    await until(lambda: cursor.backlog() == 0)
    assert cursor.mark_delete == last
    await no_ops(broker)
    assert await aborted(broker) == [txn]


@pytest.mark.req("R473-24")
async def test_open_transactions_of_several_producers_pin_the_lowest_first_entry(client: RawClient, broker: Any) -> None:
    await client.producer(TOPIC)
    await client.producer(TOPIC, 2)
    early, late = await client.begin(), await client.begin(1)
    first = await client.store(b"early", 0, txn=early)
    second = await client.store(b"late", 0, 2, txn=late)
    buffer = broker.topic(TOPIC).transactions
    assert buffer.max_read_position == Position(first.ledger_id, -1)
    await client.end(early, commit=True)
    assert buffer.max_read_position == Position(second.ledger_id, second.entry_id - 1)
    await client.end(late, commit=False)
    assert buffer.max_read_position == LATEST and buffer.is_aborted(late) and not buffer.is_aborted(early)


async def test_a_reader_skips_aborted_entries_too(client: RawClient, broker: Any) -> None:
    await client.producer(TOPIC)
    txn = await client.begin()
    await client.store(b"aborted", 0, txn=txn)
    await client.store(b"plain", 1)
    await client.end(txn, commit=False)
    reader = await consumer(broker, durable=False, start_message_id=id_of(Position(-1, -1)))
    assert await reader.payloads(1) == [b"plain"]
    assert await reader.settle() == []


@pytest.mark.req("R473-57")
@pytest.mark.parametrize("commit", [True, False])
async def test_a_sealed_log_takes_the_outcome_without_a_write(
    client: RawClient, broker: Any, commit: bool, no_ops: Any, until: Any
) -> None:
    await client.producer(TOPIC)
    reader = await consumer(broker)
    txn = await client.begin()
    stored = await client.store(b"in", 0, txn=txn)
    topic = broker.topic(TOPIC)
    await topic.terminate()
    assert await reader.settle() == []
    assert topic.subscriptions["sub"].cursor.backlog() == 1
    await client.end(txn, commit=commit)
    if commit:
        assert await reader.payloads(1) == [b"in"]
        reader.ack(stored)
    await until(lambda: topic.subscriptions["sub"].cursor.backlog() == 0)
    await no_ops(broker)
    assert topic.log.last_position == stored and topic.log.entries_added == 1


@pytest.mark.req("R473-3")
@pytest.mark.req("R473-4")
async def test_each_send_is_one_entry_and_outcomes_are_none(client: RawClient, broker: Any, no_ops: Any) -> None:
    await client.producer(TOPIC)
    for commit in (True, False):
        txn = await client.begin()
        for number in range(3):
            await client.store(b"x", number, txn=txn)
        await client.end(txn, commit=commit)
    await no_ops(broker)
    log = broker.topic(TOPIC).log
    assert log.total_entries == 6
    stored = await log.read(log.first_position, 100, 1 << 20)
    assert [each.txn is not None for each in stored] == [True] * 6
    assert list(broker.service.topics) == [TOPIC]


async def test_a_transaction_of_message_metadata_alone_counts(client: RawClient, broker: Any) -> None:
    await client.producer(TOPIC)
    reader = await consumer(broker)
    txn = await client.begin()
    await client.store(b"hidden", 0, txnid_most_bits=txn.most, txnid_least_bits=txn.least)
    await client.store(b"behind", 1)
    assert await reader.settle() == []
    await client.end(txn, commit=False)
    assert await reader.payloads(1) == [b"behind"]
    other = await client.begin()
    third = await client.begin()
    # The command wins over the metadata.
    await client.store(b"shown", 2, txnid_most_bits=other.most, txnid_least_bits=other.least, txn=third)
    await client.end(third, commit=True)
    assert await reader.payloads(1) == [b"shown"]


async def test_sub_transactions_live_and_die_with_the_winners(client: RawClient, broker: Any) -> None:
    await client.producer(TOPIC)
    reader = await consumer(broker)
    coordinator = broker.service.transactions.coordinator
    root = await coordinator.new(0, 60_000, owner=None, is_decider=True)
    loser, winner = await coordinator.new_sub(root), await coordinator.new_sub(root)
    await client.store(b"lost", 0, txn=loser)
    await client.store(b"won", 1, txn=winner)
    await client.store(b"own", 2, txn=root)
    assert await reader.settle() == []
    await coordinator.decide(root, [winner.sub])
    assert await reader.payloads(2) == [b"won", b"own"]
    assert await reader.settle() == []
    assert await aborted(broker) == [loser]


# Refusals.


@pytest.mark.req("R473-41")
@pytest.mark.parametrize("is_braid", [True, False])
@pytest.mark.parametrize("commit", [True, False])
async def test_a_decided_transaction_takes_nothing_more(broker: Any, is_braid: bool, commit: bool, no_ops: Any) -> None:
    client = await broker.client(is_braid=is_braid)
    await client.producer(TOPIC)
    txn = await client.begin()
    await client.store(b"in time", 0, txn=txn)
    await client.end(txn, commit=commit)
    client.publish(b"late", 1, txn=txn)
    client.publish(b"plain", 2)
    refused = await client.expect(CommandType.SEND_ERROR)
    state = "committed" if commit else "aborted"
    if is_braid:
        assert refused.error == ServerError.TRANSACTION_CONFLICT
    else:
        assert refused.error == ServerError.NOT_ALLOWED_ERROR and refused.message.startswith("TransactionConflict: ")
    assert refused.sequence_id == 1 and f"is {state} and takes nothing more" in refused.message
    assert (await client.receipt()).sequence_id == 2  # the refusal is one message's, and came first
    assert broker.topic(TOPIC).log.total_entries == 2
    await no_ops(broker)


async def test_half_a_transaction_id_is_refused(client: RawClient) -> None:
    await client.producer(TOPIC)
    frame = requests.send(1, 0, entry(b"x"), txn=(0, 7))
    half = frame.replace(b"\x20\x07\x28\x00", b"\x20\x07\x30\x00")  # most bits (5) become the highest sequence id (6)
    assert half != frame
    client.send(half)
    assert "half of a transaction id" in (await client.expect(CommandType.SEND_ERROR)).message


async def test_a_broker_without_transactions_says_so(world: Any) -> None:
    broker = await world.broker(transactions=TransactionConfig(enabled=False))
    client = await broker.client()
    await client.producer(TOPIC)
    client.publish(b"x", 0, txn=TxnId.of(0, 1))
    refused = await client.expect(CommandType.SEND_ERROR)
    assert refused.error == ServerError.NOT_ALLOWED_ERROR and "transactions.enabled" in refused.message
    await client.store(b"plain", 1)


@pytest.mark.req("R473-42")
@pytest.mark.inv("INV11")
async def test_a_decision_before_the_header_is_read_refuses_the_write(client: RawClient, broker: Any, no_ops: Any) -> None:
    await client.producer(TOPIC)
    ender = await broker.client()
    txn = await client.begin()
    pause = Pause("txn-write:header")
    with watching(pause):
        client.publish(b"late", 0, txn=txn)
        await pause.reached.wait()
        assert len(await ops(broker)) == 1  # the op is there before the header is read (INV10)
        await ender.end(txn, commit=True)
        pause.go_on()
        assert "TransactionConflict" in (await client.expect(CommandType.SEND_ERROR)).message
    assert broker.topic(TOPIC).log.total_entries == 0
    await no_ops(broker)


@pytest.mark.req("R473-42")
@pytest.mark.inv("INV12")
@pytest.mark.parametrize("commit", [True, False])
async def test_a_decision_after_the_header_was_read_covers_the_write(
    client: RawClient, broker: Any, commit: bool, no_ops: Any
) -> None:
    await client.producer(TOPIC)
    await client.producer(TOPIC, 2)
    ender, reader = await broker.client(), await consumer(broker)
    txn = await client.begin()
    pause = Pause("txn-write:append")
    with watching(pause):
        client.publish(b"just in time", 0, txn=txn)
        await pause.reached.wait()
        await ender.end(txn, commit=commit)
        await client.settle()
        assert len(await ops(broker)) == 1  # not materialised while an append may come
        pause.go_on()
        await client.receipt()
    await client.store(b"plain", 1, 2)
    expected = [b"just in time", b"plain"] if commit else [b"plain"]
    assert await reader.payloads(len(expected)) == expected
    await no_ops(broker)
    assert await aborted(broker) == ([] if commit else [txn])


@pytest.mark.inv("INV12")
async def test_an_abort_waits_for_the_append_in_flight(world: Any, client: RawClient, broker: Any, no_ops: Any) -> None:
    await client.producer(TOPIC)
    txn = await client.begin()
    await client.store(b"one", 0, txn=txn)
    world.ledgers.hold()
    client.publish(b"two", 1, txn=txn)
    await client.settle()
    ender = await broker.client()
    await ender.end(txn, commit=False)
    await world.advance(5)
    assert len(await ops(broker)) == 2 and await aborted(broker) == []
    world.ledgers.release()
    last = (await client.receipt()).message_id
    await no_ops(broker)
    (record,) = [value async for _txn, value in broker.service.transactions.store.aborted_in(TOPIC)]
    assert record.last == f"{last.ledgerId}:{last.entryId}"


# Order and bounds of a producer.


async def test_what_follows_a_transactional_message_waits_but_other_producers_do_not(client: RawClient, broker: Any) -> None:
    await client.producer(TOPIC)
    await client.producer(TOPIC, 2)
    reader = await consumer(broker)
    txn = await client.begin()
    pause = Pause("txn-write:op")
    with watching(pause):
        client.publish(b"1 in", 0, txn=txn)
        client.publish(b"2 plain", 1)
        client.publish(b"3 in", 2, txn=txn)
        client.publish(b"bad", 3, batch=[b"a", b"b"])
        await pause.reached.wait()
        await client.store(b"other", 0, 2)
        assert await client.settle() == []
        assert broker.topic(TOPIC).producers and broker.server.connections
        pause.go_on()
        assert [(await client.receipt()).sequence_id for _ in range(4)] == [0, 1, 2, 3]
    await client.end(txn, commit=True)
    assert (await reader.payloads(4)) == [b"other", b"1 in", b"2 plain", b"3 in"]


async def test_a_refusal_behind_a_waiting_message_keeps_its_place(client: RawClient, broker: Any) -> None:
    await client.producer(TOPIC)
    txn = await client.begin()
    pause = Pause("txn-write:op")
    with watching(pause):
        client.publish(b"in", 0, txn=txn)
        client.send(requests.send(1, 1, entry(b"wrong"), 5))
        await pause.reached.wait()
        assert await client.settle() == []
        pause.go_on()
        assert (await client.receipt()).sequence_id == 0
        assert "says it holds 5 messages" in (await client.expect(CommandType.SEND_ERROR)).message


async def test_a_run_of_messages_has_one_op(client: RawClient, broker: Any) -> None:
    await client.producer(TOPIC)
    txn = await client.begin()
    pause = Pause("txn-write:op")
    with watching(pause):
        for number in range(10):
            client.publish(b"x", number, txn=txn)
        await pause.reached.wait()
        await client.settle()
        pause.go_on()
        for _number in range(10):
            await client.receipt()
    assert sum(each.op.entries for each in await ops(broker)) == 10
    assert len(await ops(broker)) <= 2  # what came in one read of the socket, and what came while that waited


async def test_duplicates_are_judged_in_order_when_their_turn_comes(client: RawClient, broker: Any) -> None:
    await broker.policy("deduplicationEnabled", True)
    await client.producer(TOPIC, name="p")
    txn, gone = await client.begin(), await client.begin()
    await client.end(gone, commit=False)
    client.publish(b"refused", 0, txn=gone)
    client.publish(b"same number", 0, txn=txn)
    client.publish(b"next", 1)
    assert (await client.expect(CommandType.SEND_ERROR)).sequence_id == 0
    receipts = [await client.receipt() for _ in range(2)]
    assert [(each.sequence_id, each.message_id.entryId) for each in receipts] == [(0, 0), (1, 1)]  # nothing was remembered
    client.publish(b"again", 0, txn=txn)
    again = await client.receipt()
    assert (again.sequence_id, position_of(again.message_id)) == (0, (-1, -1))
    assert broker.topic(TOPIC).log.total_entries == 2
    assert sum(each.op.entries for each in await ops(broker)) <= 2  # the duplicate has no op of its own


async def test_waiting_messages_are_bounded_and_the_producer_comes_again(world: Any, until: Any) -> None:
    broker = await world.broker(transactions=TransactionConfig(max_waiting_per_producer=3))
    client = await broker.client()
    await client.producer(TOPIC)
    txn = await client.begin()
    pause = Pause("txn-write:op")
    with watching(pause):
        for number in range(4):
            client.publish(b"x", number, txn=txn)
        closed = await client.expect(CommandType.CLOSE_PRODUCER)
        assert closed.producer_id == 1
        pause.go_on()
        await until(lambda: not broker.topic(TOPIC).transactions._held)
    assert broker.topic(TOPIC).log.total_entries == 0 and await ops(broker) == []
    assert broker.service.budget.used == 0
    await client.producer(TOPIC)
    await client.store(b"again", 0, txn=txn)


async def test_waiting_messages_count_against_the_connection(world: Any, until: Any) -> None:
    broker = await world.broker(max_pending_publishes_per_connection=4)
    client = await broker.client()
    await client.producer(TOPIC)
    txn = await client.begin()
    (connection,) = broker.server.connections
    pause = Pause("txn-write:op")
    with watching(pause):
        client.publish(b"first", 0, txn=txn)
        await pause.reached.wait()
        for number in range(1, 10):
            client.publish(b"x", number, txn=txn)
        await until(lambda: not connection._is_reading)
        assert connection.link.pending_publishes >= 4 and broker.service.budget.used > 0
        pause.go_on()
        assert [(await client.receipt()).sequence_id for _ in range(10)] == list(range(10))
    assert connection.link.pending_publishes == 0 and broker.service.budget.used == 0


async def test_a_producer_is_closed_after_its_waiting_messages(client: RawClient, broker: Any) -> None:
    await client.producer(TOPIC)
    txn = await client.begin()
    pause = Pause("txn-write:op")
    with watching(pause):
        client.publish(b"x", 0, txn=txn)
        await pause.reached.wait()
        closing = asyncio.ensure_future(client.close_producer())
        await client.settle()
        assert not closing.done()
        pause.go_on()
        await closing
    assert client.kinds()[0] == CommandType.SEND_RECEIPT


async def test_a_lost_connection_takes_its_waiting_messages_along(client: RawClient, broker: Any, until: Any) -> None:
    await client.producer(TOPIC)
    other = await broker.client()
    txn = await other.begin()
    pause = Pause("txn-write:header")
    with watching(pause):
        client.publish(b"x", 0, txn=txn)
        await pause.reached.wait()
        client.close()
        await until(lambda: not broker.topic(TOPIC).producers)
        pause.go_on()
        await until(lambda: not broker.topic(TOPIC).transactions._held)
    assert broker.topic(TOPIC).log.total_entries == 0 and await ops(broker) == []
    assert broker.service.budget.used == 0


async def test_a_sealed_log_refuses_what_waits(client: RawClient, broker: Any, until: Any) -> None:
    await client.producer(TOPIC)
    txn = await client.begin()
    pause = Pause("txn-write:append")
    with watching(pause):
        client.publish(b"x", 0, txn=txn)
        await pause.reached.wait()
        await broker.topic(TOPIC).terminate()
        pause.go_on()
        await client.expect(CommandType.CLOSE_PRODUCER)
        await until(lambda: not broker.topic(TOPIC).transactions._held)
    assert await ops(broker) == [] and broker.topic(TOPIC).log.total_entries == 0


# Trouble with the stores.


@contextmanager
def failing(store: Any, name: str, error: Exception, *, times: int = 1, after: bool = False) -> Any:
    """Let calls of the store fail, `after` they had their effect."""
    real = getattr(store, name)
    left = [times]

    async def call(*given: Any, **named: Any) -> Any:
        if left[0]:
            left[0] -= 1
            if after:
                await real(*given, **named)
            raise error
        return await real(*given, **named)

    setattr(store, name, call)
    try:
        yield
    finally:
        setattr(store, name, real)


@pytest.mark.req("R473-22")
@pytest.mark.inv("INV10")
@pytest.mark.parametrize("is_stored", [True, False])
async def test_an_op_of_unknown_fate_appends_nothing_and_is_found_at_the_end(
    world: Any, client: RawClient, broker: Any, is_stored: bool, no_ops: Any
) -> None:
    await client.producer(TOPIC)
    reader = await consumer(broker)
    txn = await client.begin()
    with failing(broker.service.transactions.store, "append_op", OutcomeUnknown("No verdict."), after=is_stored):
        client.publish(b"x", 0, txn=txn)
        await client.expect(CommandType.CLOSE_PRODUCER)
    assert broker.topic(TOPIC).log.total_entries == 0 and len(await ops(broker)) == is_stored
    await client.producer(TOPIC)
    await client.store(b"plain", 0)
    assert await reader.payloads(1) == [b"plain"]  # nothing is pinned by a write that never came
    await client.end(txn, commit=False)
    await no_ops(broker)


async def test_an_unreadable_header_appends_nothing(client: RawClient, broker: Any) -> None:
    await client.producer(TOPIC)
    txn = await client.begin()
    with failing(broker.service.transactions.store, "header", StoreUnavailable("Away.")):
        client.publish(b"x", 0, txn=txn)
        await client.expect(CommandType.CLOSE_PRODUCER)
    assert broker.topic(TOPIC).log.total_entries == 0 and await ops(broker) == []


async def test_a_decided_transaction_is_refused_even_if_the_op_fails(client: RawClient, broker: Any, no_ops: Any) -> None:
    await client.producer(TOPIC)
    txn = await client.begin()
    await client.end(txn, commit=False)
    with failing(broker.service.transactions.store, "append_op", OutcomeUnknown("No verdict."), after=True):
        client.publish(b"x", 0, txn=txn)
        assert "TransactionConflict" in (await client.expect(CommandType.SEND_ERROR)).message
    await no_ops(broker)


@pytest.mark.parametrize("name", ["put_aborted", "delete_op"])
async def test_materialising_is_tried_again(world: Any, client: RawClient, broker: Any, name: str, no_ops: Any) -> None:
    await client.producer(TOPIC)
    txn = await client.begin()
    await client.store(b"x", 0, txn=txn)
    with failing(broker.service.transactions.store, name, StoreUnavailable("Away."), times=2):
        await client.end(txn, commit=False)
        await client.settle()
        assert len(await ops(broker)) == 1
        await world.advance(2)
        await no_ops(broker)
    assert await aborted(broker) == [txn]


@pytest.mark.parametrize("commit", [True, False])
async def test_entries_that_failed_and_may_be_stored_stay_hidden(
    world: Any, client: RawClient, broker: Any, commit: bool, until: Any, no_ops: Any
) -> None:
    """The log cannot say whether an entry is stored; it turns out that it is."""
    await client.producer(TOPIC)
    await client.producer(TOPIC, 2)
    reader = await consumer(broker)
    txn = await client.begin()
    await client.store(b"plain 0", 0, 2)
    assert await reader.payloads(1) == [b"plain 0"]
    topic = broker.topic(TOPIC)
    log = topic.log
    world.ledgers.hold()
    client.publish(b"doubtful", 0, txn=txn)
    await until(lambda: log.pending_entries == 1)
    world.ledgers.is_unreadable = True
    log._give_up(log.tail, StoreUnavailable("A call failed."))  # what was pushed may still become durable
    await client.expect(CommandType.CLOSE_PRODUCER)
    assert log.is_in_doubt and topic.transactions.in_flight == 0
    world.ledgers.is_unreadable = False
    world.ledgers.release()
    await client.store(b"plain 1", 1, 2)
    assert log.total_entries == 3 and await reader.settle() == []
    await client.end(txn, commit=commit)
    expected = [b"doubtful", b"plain 1"] if commit else [b"plain 1"]
    assert await reader.payloads(len(expected)) == expected
    await no_ops(broker)
    assert await aborted(broker) == ([] if commit else [txn])


# GET_LAST_MESSAGE_ID.


async def test_the_last_message_id_is_the_last_that_may_be_read(client: RawClient, broker: Any) -> None:
    await client.producer(TOPIC)
    reader = await consumer(broker)

    async def last() -> Position:
        return position_of((await reader.last_message_id()).last_message_id)

    gone = await client.begin()
    await client.store(b"aborted", 0, txn=gone)
    assert await last() == (-1, -1)
    await client.end(gone, commit=False)
    assert await last() == (-1, -1)
    shown = await client.store(b"plain", 1)
    assert await last() == shown
    gone = await client.begin()
    for number in range(250):
        client.publish(b"aborted", 2 + number, txn=gone)
    for _number in range(250):
        await client.receipt()
    assert await last() == shown
    await client.end(gone, commit=False)
    assert await last() == shown
    still_open = await client.begin()
    hidden = await client.store(b"open", 300, txn=still_open)
    assert await last() == shown
    await client.end(still_open, commit=True)
    assert await last() == hidden


# Trimming and deletion.


@pytest.mark.inv("INV13")
async def test_aborted_records_go_when_their_entries_are_trimmed(world: Any, until: Any) -> None:
    broker = await world.broker(ManagedLedgerConfig(max_entries_per_ledger=2, min_ledger_age_ms=0))
    client = await broker.client()
    await client.producer(TOPIC)
    reader = await consumer(broker)
    txn = await client.begin()
    await client.store(b"aborted", 0, txn=txn)
    await client.store(b"plain 0", 1)
    await client.end(txn, commit=False)
    kept = await client.begin()
    for number in range(2, 5):
        await client.store(b"more", number, txn=kept)
    await client.end(kept, commit=False)
    topic = broker.topic(TOPIC)
    await until(lambda: topic.transactions.is_aborted(kept) and not topic.transactions._held)
    assert await aborted(broker) == [txn, kept]
    (delivery,) = await reader.messages(1)
    reader.ack(position_of(delivery.command.message_id))
    await reader.settle()
    await topic.log.trim()
    await until(lambda: not topic.transactions.is_aborted(txn))
    assert await aborted(broker) == [kept] and topic.transactions.is_aborted(kept)


async def test_a_deleted_topic_leaves_nothing_of_its_transactions(client: RawClient, broker: Any) -> None:
    await client.producer(TOPIC)
    gone, still_open = await client.begin(), await client.begin()
    await client.store(b"x", 0, txn=gone)
    await client.end(gone, commit=False)
    await client.store(b"x", 1, txn=still_open)
    await broker.service.delete_topic(broker.topic(TOPIC).name, force=True)
    assert await ops(broker) == [] and await aborted(broker) == []
    # What it wrote is gone, so that it must not be committed by halves.
    await client.producer(TOPIC + "-2", 5)
    client.publish(b"x", 0, 5, txn=still_open)
    assert "TransactionConflict" in (await client.expect(CommandType.SEND_ERROR)).message
    with pytest.raises(InvalidTransactionStatus):
        await client.end(still_open, commit=True)


@pytest.mark.inv("INV5")
async def test_ops_and_records_of_an_earlier_log_count_for_nothing(client: RawClient, broker: Any) -> None:
    await client.producer(TOPIC)
    txn = await client.begin()
    await client.store(b"x", 0, txn=txn)
    store = broker.service.transactions.store
    (old,) = await ops(broker)
    topic = broker.topic(TOPIC)
    await broker.service.delete_topic(topic.name, force=True)
    await store.append_op(txn, old.op)  # as a broker that crashed in the middle of the deletion would have left it
    await store.put_aborted(TOPIC, txn, AbortedTxn(last="0:5", incarnation=topic.log.incarnation))
    await client.producer(TOPIC, 7)
    await client.store(b"new", 0, 7)
    reader = await consumer(broker)
    assert await reader.payloads(1) == [b"new"]
    await reader.settle()
    assert await ops(broker) == [] and await aborted(broker) == []


@pytest.mark.parametrize("kind", KINDS)
async def test_an_entry_that_arrives_after_its_abort_is_hidden_from_a_consumer_that_keeps_up(
    broker: Any, client: RawClient, kind: SubType
) -> None:
    """The outcome is known before the entry is: there is no moment in which it is neither pinned nor aborted."""
    await client.producer(TOPIC)
    reader = await consumer(broker, kind)
    txn = await client.begin()
    pause = Pause("txn-write:append")
    with watching(pause):
        client.publish(b"gone", 0, txn=txn)
        client.publish(b"plain", 1)
        await pause.reached.wait()
        ender = await broker.client()
        await ender.end(txn, commit=False)
        await ender.settle()
        pause.go_on()
        assert await reader.payloads(1) == [b"plain"]
    # From now on the fast path is taken again, past what is aborted.
    await client.store(b"more", 2)
    assert await reader.payloads(1) == [b"more"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("logs", [None, NO_CACHE], ids=["cached", "stored"])
@pytest.mark.req("R473-24")
async def test_a_consumer_that_comes_later_reads_up_to_the_limit_and_no_further(world: Any, kind: SubType, logs: Any) -> None:
    broker = await world.broker(logs)
    client = await broker.client()
    await client.subscribe(TOPIC, sub_type=kind, initial=EARLIEST)
    await client.close_consumer()
    await client.producer(TOPIC)
    gone, txn = await client.begin(), await client.begin()
    await client.store(b"gone", 0, txn=gone)
    await client.store(b"before", 1)
    await client.store(b"in", 2, txn=txn)
    await client.store(b"after", 3)
    await client.end(gone, commit=False)
    reader = await consumer(broker, kind)
    assert await reader.payloads(1) == [b"before"]
    await reader.settle()
    assert CommandType.MESSAGE not in reader.kinds()
    await client.end(txn, commit=True)
    assert await reader.payloads(2) == [b"in", b"after"]
