"""Acknowledgments inside transactions, on the wire: held until the outcome, then applied or given back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from braid.managedledger.config import ManagedLedgerConfig
from braid.model.ackset import to_words
from braid.model.positions import Position
from braid.model.txn import TxnId
from braid.runtime.plans import Moment, watching
from braid.testing.raw_client import JAVA, RawClient, id_of, position_of
from braid.txn.config import TransactionConfig
from braid.txn.store import StoredOp
from braid.wire import requests
from braid.wire.client import Delivery
from braid.wire.types import CommandType, InitialPosition, SubType

TOPIC = "persistent://public/default/acks"
EARLIEST = InitialPosition.EARLIEST
EXCLUSIVE, SHARED, FAILOVER = SubType.EXCLUSIVE, SubType.SHARED, SubType.FAILOVER
CONFLICT, NOT_ALLOWED = 23, 22


class Paused:
    """Stops whoever comes to a step, once, until it is told to go on."""

    def __init__(self, name: str, moment: Moment) -> None:
        self.reached = asyncio.Event()
        self.go_on = asyncio.Event()
        self._where = (name, moment)

    async def __call__(self, name: str, moment: Moment) -> None:
        if (name, moment) == self._where and not self.reached.is_set():
            self.reached.set()
            await self.go_on.wait()


def at(delivery: Delivery) -> Position:
    return position_of(delivery.command.message_id)


async def filled(broker: Any, count: int, *, batch: int = 0) -> list[Position]:
    client = await broker.client(answers_pings=True)
    await client.producer(TOPIC)
    positions = []
    for number in range(count):
        members = {"batch": [b"%d.%d" % (number, each) for each in range(batch)]} if batch else {}
        positions.append(await client.store(b"%d" % number, number, **members))
    client.close()
    return positions


def subscription(broker: Any) -> Any:
    return broker.topic(TOPIC).subscriptions["sub"]


async def ops(broker: Any) -> list[StoredOp]:
    found: list[StoredOp] = await broker.service.transactions.store.acks_in(TOPIC, "sub")
    return found


async def settled(until: Any, broker: Any) -> None:
    """Everything decided is materialised."""
    await until(lambda: not subscription(broker).pending_acks._roots)


async def settled_of(until: Any, broker: Any, txn: TxnId) -> None:
    await until(lambda: txn.root not in subscription(broker).pending_acks._roots)


@pytest.mark.req("R473-27", "R473-29")
@pytest.mark.parametrize("sub_type", [EXCLUSIVE, SHARED, FAILOVER])
async def test_individual_acks_are_one_op_each_and_applied_by_the_commit(
    broker: Any, client: RawClient, until: Any, sub_type: SubType
) -> None:
    positions = await filled(broker, 4)
    await client.subscribe(TOPIC, sub_type=sub_type, initial=EARLIEST, permits=100)
    await client.messages(4)
    txn = await client.begin()
    assert not (await client.acked(positions[1], positions[2], txn=txn)).HasField("error")
    assert [(each.op.position, each.op.is_cumulative, each.txn) for each in await ops(broker)] == [
        (str(positions[1]), False, txn),
        (str(positions[2]), False, txn),
    ]
    assert subscription(broker).cursor.backlog() == 4
    await client.end(txn, commit=True)
    await settled(until, broker)
    assert subscription(broker).cursor.backlog() == 2
    assert await ops(broker) == []
    assert subscription(broker).cursor.is_saved


@pytest.mark.req("R473-28", "R473-29")
async def test_a_cumulative_ack_is_one_op(broker: Any, client: RawClient, until: Any) -> None:
    positions = await filled(broker, 5)
    await client.subscribe(TOPIC, initial=EARLIEST, permits=100)
    await client.messages(5)
    txn = await client.begin()
    assert not (await client.acked(positions[3], cumulative=True, txn=txn)).HasField("error")
    assert [(each.op.position, each.op.is_cumulative) for each in await ops(broker)] == [(str(positions[3]), True)]
    assert subscription(broker).cursor.backlog() == 5
    await client.end(txn, commit=True)
    await settled(until, broker)
    assert subscription(broker).cursor.mark_delete == positions[3]
    assert await ops(broker) == []


@pytest.mark.req("R473-30")
async def test_an_abort_gives_shared_entries_back(broker: Any, client: RawClient, until: Any) -> None:
    positions = await filled(broker, 4)
    await client.subscribe(TOPIC, sub_type=SHARED, initial=EARLIEST, permits=100)
    await client.messages(4)
    txn = await client.begin()
    await client.acked(positions[0], positions[2], txn=txn)
    client.redeliver()
    assert [at(each) for each in await client.messages(2)] == [positions[1], positions[3]]
    assert await client.settle() == []
    await client.end(txn, commit=False)
    again = await client.messages(2)
    assert [at(each) for each in again] == [positions[0], positions[2]]
    assert [each.command.redelivery_count for each in again] == [1, 1]
    assert await ops(broker) == []
    assert not (await client.acked(*positions)).HasField("error")
    assert subscription(broker).cursor.backlog() == 0


@pytest.mark.req("R473-30")
@pytest.mark.parametrize("sub_type", [EXCLUSIVE, FAILOVER])
async def test_an_abort_sends_everything_again_in_order_to_one_consumer(
    broker: Any, client: RawClient, sub_type: SubType
) -> None:
    positions = await filled(broker, 5)
    await client.subscribe(TOPIC, sub_type=sub_type, initial=EARLIEST, permits=100)
    await client.messages(5)
    await client.acked(positions[0])
    txn = await client.begin()
    await client.acked(positions[2], cumulative=True, txn=txn)
    await client.end(txn, commit=False)
    assert [at(each) for each in await client.messages(4)] == positions[1:]
    assert await ops(broker) == []


# What contradicts what (INV14).


@pytest.mark.inv("INV14")
@pytest.mark.parametrize("first_is_cumulative", [False, True])
@pytest.mark.parametrize("end", [None, True, False])
async def test_what_another_transaction_holds_or_acknowledged_is_refused(
    broker: Any, client: RawClient, until: Any, first_is_cumulative: bool, end: bool | None
) -> None:
    positions = await filled(broker, 5)
    await client.subscribe(TOPIC, initial=EARLIEST, permits=100)
    await client.messages(5)
    one, two = await client.begin(), await client.begin()
    await client.acked(positions[1], cumulative=first_is_cumulative, txn=one)
    if end is not None:
        await client.end(one, commit=end)
        await settled(until, broker)
    individual = await client.acked(positions[1], txn=two)
    assert (individual.error == CONFLICT) == (end is not False)
    if end is None:
        assert str(one) in individual.message
    if end is not False:
        assert not (await client.acked(positions[2], txn=two)).HasField("error")
    left = {str(each.op.position) for each in await ops(broker) if each.txn == two}
    assert left == ({str(positions[1])} if end is False else {str(positions[2])})


@pytest.mark.inv("INV14")
async def test_cumulative_acks_and_single_ones_exclude_each_other(broker: Any, client: RawClient) -> None:
    positions = await filled(broker, 6)
    await client.subscribe(TOPIC, initial=EARLIEST, permits=100)
    await client.messages(6)
    one, two = await client.begin(), await client.begin()
    await client.acked(positions[0])  # plain: the mark-delete position
    assert (await client.acked(positions[0], cumulative=True, txn=one)).error == CONFLICT
    assert (await client.acked(positions[0], txn=one)).error == CONFLICT
    assert not (await client.acked(positions[3], txn=one)).HasField("error")
    assert (await client.acked(positions[4], cumulative=True, txn=two)).error == CONFLICT
    assert (await client.acked(positions[3], cumulative=True, txn=two)).error == CONFLICT
    assert not (await client.acked(positions[2], cumulative=True, txn=two)).HasField("error")
    assert (await client.acked(positions[4], cumulative=True, txn=one)).error == CONFLICT
    assert (await client.acked(positions[1], txn=one)).error == CONFLICT
    assert not (await client.acked(positions[5], txn=one)).HasField("error")


@pytest.mark.inv("INV14")
async def test_a_transaction_may_repeat_itself_and_go_further(broker: Any, client: RawClient, until: Any) -> None:
    positions = await filled(broker, 5)
    await client.subscribe(TOPIC, initial=EARLIEST, permits=100)
    await client.messages(5)
    txn = await client.begin()
    for position, cumulative in [(1, True), (1, True), (3, True), (2, True), (0, False), (4, False), (4, False)]:
        assert not (await client.acked(positions[position], cumulative=cumulative, txn=txn)).HasField("error")
    assert len([each for each in await ops(broker) if not each.op.is_cumulative]) == 2
    assert len([each for each in await ops(broker) if each.op.is_cumulative]) == 2
    await client.end(txn, commit=True)
    await settled(until, broker)
    assert subscription(broker).cursor.mark_delete == positions[4]
    assert await ops(broker) == []


@pytest.mark.inv("INV14")
async def test_of_two_acks_at_the_same_time_one_is_held(broker: Any, client: RawClient) -> None:
    positions = await filled(broker, 1)
    await client.subscribe(TOPIC, sub_type=SHARED, initial=EARLIEST, permits=100)
    await client.messages(1)
    paused = Paused("txn-ack:op", "after")
    one, two = await client.begin(), await client.begin()
    with watching(paused):
        client.send(requests.ack(1, [id_of(positions[0])], request_id=901, txn=one))
        await paused.reached.wait()
        late = await client.acked(positions[0], txn=two)
        assert late.error == CONFLICT
        paused.go_on.set()
        assert not (await client.answer(901)).HasField("error")


# Plain acknowledgments of what is held.


@pytest.mark.parametrize("sub_type", [EXCLUSIVE, SHARED])
@pytest.mark.parametrize("commit", [True, False])
async def test_a_plain_ack_of_a_held_entry_succeeds_and_is_ignored(
    broker: Any, client: RawClient, until: Any, sub_type: SubType, commit: bool
) -> None:
    positions = await filled(broker, 3)
    await client.subscribe(TOPIC, sub_type=sub_type, initial=EARLIEST, permits=100)
    await client.messages(3)
    txn = await client.begin()
    await client.acked(positions[1], txn=txn)
    assert not (await client.acked(*positions)).HasField("error")
    cursor = subscription(broker).cursor
    assert cursor.backlog() == 1
    await client.end(txn, commit=commit)
    await settled(until, broker)
    assert cursor.backlog() == (0 if commit else 1)
    if not commit:
        assert [at(each) for each in await client.messages(1)] == [positions[1]]


@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("held", [[1], [1, 3], "cumulative"])
async def test_a_plain_cumulative_ack_goes_around_what_is_held(
    broker: Any, client: RawClient, until: Any, commit: bool, held: Any
) -> None:
    positions = await filled(broker, 6)
    await client.subscribe(TOPIC, initial=EARLIEST, permits=100)
    await client.messages(6)
    txn = await client.begin()
    if held == "cumulative":
        await client.acked(positions[1], cumulative=True, txn=txn)
        held = [0, 1]
    else:
        await client.acked(*[positions[each] for each in held], txn=txn)
    assert not (await client.acked(positions[4], cumulative=True)).HasField("error")
    cursor = subscription(broker).cursor
    assert [each for each in range(6) if not cursor.is_acknowledged(positions[each])] == [*held, 5]
    await client.end(txn, commit=commit)
    await settled(until, broker)
    expected = [5] if commit else [*held, 5]
    assert [each for each in range(6) if not cursor.is_acknowledged(positions[each])] == expected
    if not commit:
        assert [at(each) for each in await client.messages(len(expected))] == [positions[each] for each in expected]


# Held entries are not delivered.


async def test_shared_consumers_get_held_entries_neither_by_redelivery_nor_by_coming_anew(
    broker: Any, client: RawClient
) -> None:
    positions = await filled(broker, 4)
    await client.subscribe(TOPIC, sub_type=SHARED, initial=EARLIEST, permits=100)
    await client.messages(4)
    txn = await client.begin()
    await client.acked(positions[0], positions[2], txn=txn)
    client.redeliver(*positions)
    assert [at(each) for each in await client.messages(2)] == [positions[1], positions[3]]
    other = await broker.client()
    await other.subscribe(TOPIC, sub_type=SHARED, permits=100)
    await client.close_consumer()  # what it had goes to the other one
    assert [at(each) for each in await other.messages(2)] == [positions[1], positions[3]]
    await other.close_consumer()
    await other.subscribe(TOPIC, sub_type=SHARED, permits=100)  # nobody was left: reading starts anew
    assert [at(each) for each in await other.messages(2)] == [positions[1], positions[3]]
    assert await other.settle() == []
    assert subscription(broker).dispatcher.unacked == 2
    await client.end(txn, commit=False)
    assert [at(each) for each in await other.messages(2)] == [positions[0], positions[2]]
    assert subscription(broker).dispatcher.unacked == 4


async def test_an_entry_given_back_before_reading_came_to_it_is_sent_once(broker: Any, client: RawClient, until: Any) -> None:
    positions = await filled(broker, 4)
    await client.subscribe(TOPIC, sub_type=SHARED, initial=EARLIEST, permits=100)
    await client.messages(4)
    txn = await client.begin()
    await client.acked(positions[2], txn=txn)
    await client.close_consumer()
    await client.subscribe(TOPIC, sub_type=SHARED, permits=1)
    await client.messages(1)
    await client.end(txn, commit=False)
    await settled(until, broker)
    client.flow(100)
    rest = await client.messages(3)
    assert [(at(each), each.command.redelivery_count) for each in rest] == [(each, 0) for each in positions[1:]]
    assert await client.settle() == []


@pytest.mark.parametrize("logs", [ManagedLedgerConfig(), ManagedLedgerConfig(cache_bytes=0)], ids=["cached", "read"])
@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("cumulative", [True, False])
async def test_one_active_consumer_stops_at_a_held_entry_until_the_outcome(
    world: Any, until: Any, logs: ManagedLedgerConfig, commit: bool, cumulative: bool
) -> None:
    broker = await world.broker(logs)
    client = await broker.client()
    positions = await filled(broker, 6)
    await client.subscribe(TOPIC, initial=EARLIEST, permits=100)
    await client.messages(6)
    txn = await client.begin()
    await client.acked(positions[2], cumulative=cumulative, txn=txn)
    await client.close_consumer()
    await client.subscribe(TOPIC, permits=100)
    before = [] if cumulative else positions[:2]
    assert [at(each) for each in await client.messages(len(before))] == before
    await client.producer(TOPIC)
    new = await client.store(b"new", 100)
    assert await client.settle() == []
    await client.end(txn, commit=commit)
    rest = [*(positions[3:] if commit else positions), new]
    assert [at(each) for each in await client.messages(len(rest))] == rest
    assert await client.settle() == []


# Batches.


def part(position: Position, size: int, *named: int) -> Any:
    """A message id that names some messages of a batch."""
    mask = ((1 << size) - 1) & ~sum(1 << each for each in named)
    found = id_of(position, to_words(mask))
    found.batch_size = size
    return found


@pytest.mark.req("R473-29", "R473-30")
@pytest.mark.parametrize("says_size", [True, False])
@pytest.mark.parametrize("is_cached", [True, False])
async def test_transactions_share_a_batch_but_no_message_of_it(
    world: Any, until: Any, says_size: bool, is_cached: bool
) -> None:
    broker = await world.broker(ManagedLedgerConfig() if is_cached else ManagedLedgerConfig(cache_bytes=0))
    client = await broker.client()
    [position] = await filled(broker, 1, batch=4)
    await client.subscribe(TOPIC, sub_type=SHARED, initial=EARLIEST, permits=100)
    await client.messages(1)

    def named(*messages: int) -> Any:
        found = part(position, 4, *messages)
        if not says_size:
            found.ClearField("batch_size")
        return found

    one, two = await client.begin(), await client.begin()
    assert not (await client.acked(named(3), txn=one)).HasField("error")
    assert (await client.acked(named(2, 3), txn=two)).error == CONFLICT
    assert not (await client.acked(named(0, 1), txn=two)).HasField("error")
    assert (await client.acked(position, txn=two)).error == CONFLICT
    assert subscription(broker).dispatcher.unacked == 1
    client.redeliver()
    [again] = await client.messages(1)
    assert list(again.command.ack_set) == [0b0100]
    await client.end(one, commit=True)
    await settled_of(until, broker, one)
    for taken in (named(3), named(2, 3), position):
        assert (await client.acked(taken, txn=two)).error == CONFLICT  # one that is done is enough
    assert subscription(broker).cursor.unacked_mask(position) == 0b0111
    await client.end(two, commit=False)
    [again] = await client.messages(1)
    assert list(again.command.ack_set) == [0b0111]
    assert not (await client.acked(position)).HasField("error")
    assert subscription(broker).cursor.backlog() == 0
    assert await ops(broker) == []


async def test_a_plain_ack_of_a_batch_spares_its_held_messages(broker: Any, client: RawClient, until: Any) -> None:
    [position] = await filled(broker, 1, batch=3)
    await client.subscribe(TOPIC, sub_type=SHARED, initial=EARLIEST, permits=100)
    await client.messages(1)
    txn = await client.begin()
    await client.acked(part(position, 3, 1), txn=txn)
    await client.acked(position)
    assert subscription(broker).cursor.unacked_mask(position) == 0b010
    assert subscription(broker).dispatcher.unacked == 0
    client.redeliver()
    assert await client.settle() == []
    await client.end(txn, commit=False)
    [again] = await client.messages(1)
    assert list(again.command.ack_set) == [0b010]


@pytest.mark.parametrize("commit", [True, False])
async def test_a_cumulative_ack_inside_a_batch(broker: Any, client: RawClient, until: Any, commit: bool) -> None:
    positions = await filled(broker, 3, batch=3)
    await client.subscribe(TOPIC, initial=EARLIEST, permits=100)
    await client.messages(3)
    txn, other = await client.begin(), await client.begin()
    upto = part(positions[1], 3, 0, 1)
    assert not (await client.acked(upto, cumulative=True, txn=txn)).HasField("error")
    assert (await client.acked(part(positions[1], 3, 1), txn=other)).error == CONFLICT
    assert (await client.acked(positions[0], txn=other)).error == CONFLICT
    assert not (await client.acked(part(positions[1], 3, 2), txn=other)).HasField("error")
    await client.end(other, commit=False)
    await client.end(txn, commit=commit)
    await settled(until, broker)
    cursor = subscription(broker).cursor
    late = await client.begin()
    if commit:
        assert (cursor.mark_delete, cursor.unacked_mask(positions[1])) == (positions[0], 0b100)
        assert (await client.acked(upto, cumulative=True, txn=late)).error == CONFLICT
    else:
        assert cursor.backlog() == 3
        assert not (await client.acked(upto, cumulative=True, txn=late)).HasField("error")


# Who is refused.


@pytest.mark.req("R473-41")
@pytest.mark.inv("INV11")
@pytest.mark.parametrize("state", ["unknown", "committed", "aborted"])
async def test_no_ack_joins_a_transaction_that_is_not_open(broker: Any, client: RawClient, state: str) -> None:
    positions = await filled(broker, 2)
    await client.subscribe(TOPIC, sub_type=SHARED, initial=EARLIEST, permits=100)
    await client.messages(2)
    txn = TxnId.of(3, 77) if state == "unknown" else await client.begin()
    if state != "unknown":
        await client.end(txn, commit=state == "committed")
    refused = await client.acked(positions[0], txn=txn)
    assert refused.error == CONFLICT
    assert ("does not exist" if state == "unknown" else state.upper()) in refused.message
    assert await ops(broker) == []
    assert not subscription(broker).has_holds
    assert [at(each) for each in await client.messages(1)] == [positions[0]]  # it is not lost with the refusal
    assert not (await client.acked(positions[0])).HasField("error")


@pytest.mark.inv("INV11")
async def test_an_ack_whose_transaction_ends_between_op_and_header_is_refused(
    broker: Any, client: RawClient, until: Any
) -> None:
    positions = await filled(broker, 1)
    await client.subscribe(TOPIC, initial=EARLIEST, permits=100)
    await client.messages(1)
    paused = Paused("txn-ack:header", "before")
    txn = await client.begin()
    with watching(paused):
        client.send(requests.ack(1, [id_of(positions[0])], request_id=901, txn=txn))
        await paused.reached.wait()
        await client.end(txn, commit=True)
        paused.go_on.set()
        assert (await client.answer(901)).error == CONFLICT
    await settled(until, broker)
    assert await ops(broker) == []
    assert subscription(broker).cursor.backlog() == 1


@pytest.mark.inv("INV12")
async def test_an_ack_whose_transaction_ends_after_its_header_was_read_is_part_of_it(
    broker: Any, client: RawClient, until: Any
) -> None:
    positions = await filled(broker, 1)
    await client.subscribe(TOPIC, initial=EARLIEST, permits=100)
    await client.messages(1)
    paused = Paused("txn-ack:owner", "before")
    txn = await client.begin()
    with watching(paused):
        client.send(requests.ack(1, [id_of(positions[0])], request_id=901, txn=txn))
        await paused.reached.wait()
        await client.end(txn, commit=True)
        await client.settle(20)
        assert subscription(broker).cursor.backlog() == 1  # not while it is under way
        paused.go_on.set()
        assert not (await client.answer(901)).HasField("error")
    await settled(until, broker)
    assert subscription(broker).cursor.backlog() == 0
    assert await ops(broker) == []


async def test_refusals_that_need_no_store(world: Any, broker: Any, client: RawClient) -> None:
    positions = await filled(broker, 1)
    await client.subscribe(TOPIC, sub_type=SHARED, initial=EARLIEST, permits=100)
    txn = await client.begin()
    assert (await client.acked(positions[0], cumulative=True, txn=txn)).error == NOT_ALLOWED
    beyond = await client.acked(Position(positions[0].ledger_id, 9), txn=txn)
    assert beyond.error == NOT_ALLOWED
    assert "beyond the end" in beyond.message
    assert (await client.acked(cumulative=True, txn=txn)).error == NOT_ALLOWED
    await client.subscribe(TOPIC, "reader", consumer_id=2, durable=False)
    assert (await client.acked(positions[0], consumer_id=2, txn=txn)).error == NOT_ALLOWED
    assert await ops(broker) == []


async def test_switched_off_transactions_take_no_acks(world: Any) -> None:
    broker = await world.broker(transactions=TransactionConfig(enabled=False))
    client = await broker.client()
    positions = await filled(broker, 1)
    await client.subscribe(TOPIC, initial=EARLIEST, permits=100)
    assert (await client.acked(positions[0], txn=TxnId.of(0, 1))).error == NOT_ALLOWED


# Sub-transactions.


async def test_only_winners_acknowledge(broker: Any, client: RawClient, until: Any) -> None:
    positions = await filled(broker, 3)
    await client.subscribe(TOPIC, sub_type=SHARED, initial=EARLIEST, permits=100)
    await client.messages(3)
    coordinator = broker.service.transactions.coordinator
    root = await coordinator.new(0, 60_000, owner=None, is_decider=True)
    winner, loser = await coordinator.new_sub(root), await coordinator.new_sub(root)
    assert not (await client.acked(positions[0], txn=winner)).HasField("error")
    assert (await client.acked(positions[0], txn=loser)).error == CONFLICT
    assert not (await client.acked(positions[1], txn=loser)).HasField("error")
    await coordinator.decide(root, [winner.sub])
    assert [at(each) for each in await client.messages(1)] == [positions[1]]
    await settled(until, broker)
    cursor = subscription(broker).cursor
    assert [cursor.is_acknowledged(each) for each in positions] == [True, False, False]
    assert await ops(broker) == []


# The end of a topic.


async def test_the_end_of_a_terminated_topic_is_told_after_the_commit(broker: Any, until: Any) -> None:
    client = await broker.client(client_version=JAVA)
    positions = await filled(broker, 2)
    await client.subscribe(TOPIC, initial=EARLIEST, permits=100)
    await client.messages(2)
    txn = await client.begin()
    await client.acked(positions[1], cumulative=True, txn=txn)
    await broker.topic(TOPIC).terminate()
    assert CommandType.REACHED_END_OF_TOPIC not in [each.type for each in await client.settle()]
    await client.end(txn, commit=True)
    await client.expect(CommandType.REACHED_END_OF_TOPIC)
    assert subscription(broker).cursor.is_saved
