"""Acknowledgments inside transactions when brokers end, when subscriptions are reset or deleted, and at every step between."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from braid.broker.topic import Topic
from braid.errors import NotReady, StoreUnavailable
from braid.managedledger.config import ManagedLedgerConfig
from braid.model.ackset import to_words
from braid.model.names import TopicName
from braid.model.positions import EARLIEST as FIRST
from braid.model.positions import Position
from braid.model.txn import TxnId
from braid.runtime.plans import Moment, watching
from braid.testing.raw_client import RawClient, id_of, position_of
from braid.txn import records
from braid.txn.records import TxnOp
from braid.txn.store import StoredOp, TransactionStore
from braid.wire import requests
from braid.wire.client import Delivery
from braid.wire.types import InitialPosition, SubType

TOPIC = "persistent://public/default/acks-recovery"
CURSOR = "/managed-ledgers/public/default/persistent/acks-recovery/sub"
EARLIEST = InitialPosition.EARLIEST
CONFLICT = 23


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


async def ops(broker: Any, name: str = "sub") -> list[StoredOp]:
    found: list[StoredOp] = await broker.service.transactions.store.acks_in(TOPIC, name)
    return found


async def settled(until: Any, broker: Any) -> None:
    await until(lambda: not subscription(broker).pending_acks._roots)


async def without_ops(broker: Any, name: str = "sub") -> None:
    async with asyncio.timeout(10):
        while await ops(broker, name):  # noqa: ASYNC110 - the store has no event for it
            await asyncio.sleep(0)


async def begun(world: Any, count: int = 5) -> tuple[Any, RawClient, list[Position]]:
    """A broker, and a client that has received everything."""
    broker = await world.broker()
    client = await broker.client()
    positions = await filled(broker, count)
    await client.subscribe(TOPIC, initial=EARLIEST, permits=100)
    await client.messages(count)
    return broker, client, positions


@pytest.mark.req("R473-31")
@pytest.mark.parametrize("outcome", ["commit after", "commit before", "abort after", "abort before"])
@pytest.mark.parametrize("cumulative", [True, False])
async def test_a_restart_between_ack_and_outcome_changes_nothing(
    world: Any, until: Any, outcome: str, cumulative: bool
) -> None:
    first, client, positions = await begun(world)
    txn = await client.begin()
    named = [positions[2]] if cumulative else [positions[1], positions[2]]
    assert not (await client.acked(*named, cumulative=cumulative, txn=txn)).HasField("error")
    await first.kill()
    second = await world.broker()
    client = await second.client()
    is_commit = outcome.startswith("commit")
    if outcome.endswith("before"):
        await client.end(txn, commit=is_commit)  # nobody has loaded the topic yet
        await client.subscribe(TOPIC, permits=100)
    else:
        await client.subscribe(TOPIC, permits=100)
        sent = positions[:0] if cumulative else positions[:1]
        assert [at(each) for each in await client.messages(len(sent))] == sent
        assert await client.settle() == []  # the hold is there again
        other = await client.begin()
        assert (await client.acked(positions[2], txn=other)).error == CONFLICT
        assert [each.acks for each in subscription(second).pending_acks.transactions()] == [1 if cumulative else 2]
        await client.end(txn, commit=is_commit)
    if is_commit:
        rest = positions[3:]
        if outcome == "commit before" and not cumulative:
            rest = [positions[0], *rest]
    else:
        rest = positions
    assert [at(each) for each in await client.messages(len(rest))] == rest
    assert await client.settle() == []
    await settled(until, second)
    await without_ops(second)
    done = [second.topic(TOPIC).subscriptions["sub"].cursor.is_acknowledged(each) for each in positions]
    assert done == ([cumulative, True, True, False, False] if is_commit else [False] * 5)


@pytest.mark.req("R473-31")
async def test_parts_of_batches_are_held_again(world: Any, until: Any) -> None:
    first = await world.broker()
    client = await first.client()
    [position] = await filled(first, 1, batch=3)
    await client.subscribe(TOPIC, sub_type=SubType.SHARED, initial=EARLIEST, permits=100)
    await client.messages(1)
    txn = await client.begin()
    named = id_of(position, to_words(0b101))
    named.batch_size = 3
    await client.acked(named, txn=txn)
    await first.kill()
    second = await world.broker()
    client = await second.client()
    await client.subscribe(TOPIC, sub_type=SubType.SHARED, permits=100)
    [again] = await client.messages(1)
    assert list(again.command.ack_set) == [0b101]
    await client.end(txn, commit=True)
    await settled(until, second)
    assert subscription(second).cursor.unacked_mask(position) == 0b101


STEPS = [
    (f"txn-ack:{name}", moment)
    for name in ("op", "header", "owner", "hold", "apply", "flush", "delete-ops")
    for moment in ("before", "after")
]


@pytest.mark.req("R473-39")
@pytest.mark.inv("INV12")
@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize(("name", "moment"), STEPS)
async def test_a_broker_that_ends_at_any_step_loses_and_applies_nothing_twice(
    world: Any, until: Any, name: str, moment: Moment, commit: bool
) -> None:
    first, client, positions = await begun(world)
    txn = await client.begin()
    paused = Paused(name, moment)
    with watching(paused):
        client.send(requests.ack(1, [id_of(positions[1])], request_id=900, txn=txn))
        is_answered = name in ("txn-ack:apply", "txn-ack:flush", "txn-ack:delete-ops")
        if is_answered:
            assert not (await client.answer(900)).HasField("error")
            await client.end(txn, commit=commit)
            if name == "txn-ack:flush" and not commit:
                await settled(until, first)
                return  # nothing to make durable
        await paused.reached.wait()
        await first.kill()
    second = await world.broker()
    client = await second.client()
    if not is_answered:
        await client.end(txn, commit=commit)
    await client.subscribe(TOPIC, permits=100)
    # An acknowledgment that was not answered is applied iff its op was written before the outcome.
    is_applied = commit and (name, moment) != ("txn-ack:op", "before")
    rest = [positions[0], *positions[2:]] if is_applied else positions
    assert [at(each) for each in await client.messages(len(rest))] == rest
    assert await client.settle() == []
    await settled(until, second)
    await without_ops(second)
    assert subscription(second).cursor.is_acknowledged(positions[1]) == is_applied


@pytest.mark.inv("INV12")
async def test_ops_go_only_after_the_cursor_is_durable(world: Any, until: Any) -> None:
    first, client, positions = await begun(world)
    txn = await client.begin()
    await client.acked(positions[4], cumulative=True, txn=txn)
    world.ledgers.hold()
    await client.end(txn, commit=True)
    await until(lambda: subscription(first).cursor.backlog() == 0)
    await client.settle(20)
    assert len(await ops(first)) == 1
    world.ledgers.release()
    await settled(until, first)
    assert await ops(first) == []
    await first.kill()
    second = await world.broker()
    client = await second.client()
    await client.subscribe(TOPIC, permits=100)
    assert await client.settle() == []
    assert subscription(second).cursor.backlog() == 0


@pytest.mark.inv("INV12")
async def test_ops_stay_while_they_say_more_than_a_cursor_stores(world: Any, until: Any) -> None:
    first = await world.broker(ManagedLedgerConfig(max_persisted_ranges=1))
    client = await first.client()
    positions = await filled(first, 6)
    await client.subscribe(TOPIC, initial=EARLIEST, permits=100)
    await client.messages(6)
    txn = await client.begin()
    await client.acked(positions[1], positions[3], positions[5], txn=txn)
    await client.end(txn, commit=True)
    await until(lambda: subscription(first).cursor.backlog() == 3)
    await world.advance(3)
    assert len(await ops(first)) == 3
    await first.kill()
    second = await world.broker(ManagedLedgerConfig(max_persisted_ranges=1))
    client = await second.client()
    await client.subscribe(TOPIC, permits=100)
    assert [at(each) for each in await client.messages(3)] == positions[::2]
    assert not (await client.acked(*positions[:3:2])).HasField("error")
    await world.advance(6)
    await settled(until, second)
    assert await ops(second) == []


@pytest.mark.inv("INV12")
async def test_a_commit_applies_what_the_store_has_not_what_memory_remembers(world: Any, until: Any) -> None:
    broker, client, positions = await begun(world)
    txn = await client.begin()
    await client.acked(positions[0], positions[1], txn=txn)
    gone, _kept = await ops(broker)
    await broker.service.transactions.store.delete_op(gone)
    await client.end(txn, commit=True)
    await settled(until, broker)
    cursor = subscription(broker).cursor
    assert [cursor.is_acknowledged(each) for each in positions[:2]] == [False, True]
    assert at((await client.messages(1))[0]) == positions[0]  # held by nobody any more


@pytest.mark.inv("INV11")
@pytest.mark.parametrize("commit", [True, False])
async def test_an_owner_that_is_none_any_more_holds_no_ack(world: Any, until: Any, commit: bool) -> None:
    """The zombie writes its op after the new owner has looked: nobody would ever apply it."""
    zombie = await world.broker(believes=True)
    client = await zombie.client()
    positions = await filled(zombie, 3)
    await client.subscribe(TOPIC, initial=EARLIEST, permits=100)
    await client.messages(3)
    txn = await client.begin()
    paused = Paused("txn-ack:op", "before")
    with watching(paused):
        client.send(requests.ack(1, [id_of(positions[0])], request_id=900, txn=txn))
        await paused.reached.wait()
        owner = await world.broker(believes=True)
        new = await owner.client()
        await new.subscribe(TOPIC, permits=100)
        assert [at(each) for each in await new.messages(3)] == positions
        paused.go_on.set()
        assert (await client.answer(900)).error == CONFLICT
    await without_ops(owner)
    await new.end(txn, commit=commit)
    other = await new.begin()
    assert not (await new.acked(positions[0], txn=other)).HasField("error")
    await new.end(other, commit=True)
    await settled(until, owner)
    assert subscription(owner).cursor.is_acknowledged(positions[0])


@pytest.mark.inv("INV11")
async def test_an_op_that_came_too_late_is_never_applied(world: Any, until: Any) -> None:
    broker, client, positions = await begun(world)
    txn = await client.begin()
    await client.acked(positions[0], txn=txn)
    late = TxnOp(
        kind="ack",
        segment=TOPIC,
        subscription="sub",
        position=records.position_text(positions[3]),
        incarnation=broker.topic(TOPIC).log.incarnation,
    )
    await broker.service.transactions.store.append_op(txn, late)  # as a former owner would, before it is refused
    await client.end(txn, commit=True)
    await settled(until, broker)
    cursor = subscription(broker).cursor
    assert [cursor.is_acknowledged(each) for each in positions] == [True, False, False, False, False]
    assert await ops(broker) == []


async def test_an_op_that_arrives_after_the_end_goes_when_it_is_looked_for(world: Any, until: Any) -> None:
    broker, client, positions = await begun(world)
    txn, still_open = await client.begin(), await client.begin()
    await client.end(txn, commit=True)
    store = broker.service.transactions.store
    for each in (txn, still_open):
        await store.append_op(
            each,
            TxnOp(
                kind="ack",
                segment=TOPIC,
                subscription="sub",
                position=records.position_text(positions[0]),
                incarnation=broker.topic(TOPIC).log.incarnation,
            ),
        )
    await store.append_op(txn, TxnOp(kind="ack", segment=TOPIC, subscription="gone", position="0:0"))
    await broker.topic(TOPIC).relist_acks()
    assert [each.txn for each in await ops(broker)] == [still_open]
    assert await ops(broker, "gone") == []
    assert not subscription(broker).cursor.is_acknowledged(positions[0])


@pytest.mark.inv("INV5")
async def test_ops_that_count_for_nothing_are_deleted_when_the_topic_is_loaded(world: Any, until: Any) -> None:
    first, client, positions = await begun(world)
    store = first.service.transactions.store
    txn = await client.begin()
    incarnation = first.topic(TOPIC).log.incarnation
    for name, of, made in [
        ("sub", TxnId.of(1, 99), incarnation),  # no header
        ("sub", txn, "of an earlier log"),
        ("nobody", txn, incarnation),
    ]:
        op = TxnOp(kind="ack", segment=TOPIC, subscription=name, position=str(positions[0]), incarnation=made)
        await store.append_op(of, op)
    await first.kill()
    second = await world.broker()
    client = await second.client()
    await client.subscribe(TOPIC, permits=100)
    assert [at(each) for each in await client.messages(5)] == positions
    await without_ops(second)
    await without_ops(second, "nobody")


# Resets.


@pytest.mark.parametrize("commit", [True, False])
async def test_a_seek_ends_what_open_transactions_hold(world: Any, until: Any, commit: bool) -> None:
    broker, client, positions = await begun(world)
    txn = await client.begin()
    await client.acked(positions[3], cumulative=True, txn=txn)
    await client.seek(positions[1])
    assert await ops(broker) == []
    assert not subscription(broker).has_holds
    await client.end(txn, commit=commit)
    await client.subscribe(TOPIC, permits=100)
    assert [at(each) for each in await client.messages(4)] == positions[1:]
    await world.advance(3)
    assert [each for each in await client.settle() if isinstance(each, Delivery)] == []
    assert subscription(broker).cursor.backlog() == 4


async def test_a_seek_lets_decided_transactions_finish_first(world: Any, until: Any) -> None:
    """Their acknowledgments belong to the time before the reset."""
    broker, client, positions = await begun(world)
    txn = await client.begin()
    await client.acked(positions[0], positions[4], txn=txn)
    paused = Paused("txn-ack:apply", "before")
    with watching(paused):
        await client.end(txn, commit=True)
        await paused.reached.wait()
        client.send(requests.seek(900, 1, id_of(FIRST)))
        assert not any(getattr(each.body, "request_id", 0) == 900 for each in await client.settle() if hasattr(each, "body"))
        paused.go_on.set()
        await client.answer(900)
    assert await ops(broker) == []
    assert subscription(broker).cursor.backlog() == 5
    await client.subscribe(TOPIC, permits=100)
    assert [at(each) for each in await client.messages(5)] == positions


async def test_an_ack_during_a_seek_is_refused(world: Any) -> None:
    broker, client, positions = await begun(world)
    one, two = await client.begin(), await client.begin()
    await client.acked(positions[0], txn=one)
    paused = Paused("txn-ack:reset", "before")
    with watching(paused):
        client.send(requests.seek(900, 1, id_of(positions[2])))
        await paused.reached.wait()
        refused = subscription(broker).begin_acks(two, [], cumulative=False)
        assert "being reset" in str(refused.exception())
        paused.go_on.set()
        await client.answer(900)
    assert not subscription(broker).pending_acks._roots


async def test_clearing_the_backlog_ends_holds_too(world: Any) -> None:
    broker, client, positions = await begun(world)
    txn = await client.begin()
    await client.acked(positions[0], txn=txn)
    await subscription(broker).seek(Position(2**62, 0))
    assert subscription(broker).cursor.backlog() == 0
    assert await ops(broker) == []
    assert subscription(broker).pending_acks.transactions() == []


# Deletions.


async def test_the_end_of_a_subscription_takes_its_ops_along(world: Any) -> None:
    broker, client, positions = await begun(world)
    txn = await client.begin()
    await client.acked(positions[0], txn=txn)
    await client.unsubscribe()
    assert await ops(broker) == []
    assert broker.service.transactions.decisions.held == 0
    await client.subscribe(TOPIC, initial=EARLIEST, permits=100)
    await client.end(txn, commit=True)
    assert [at(each) for each in await client.messages(5)] == positions
    await world.advance(3)
    assert subscription(broker).cursor.backlog() == 5


async def test_a_new_subscription_does_not_get_the_acks_of_an_old_one(world: Any, until: Any) -> None:
    broker, client, positions = await begun(world)
    txn = await client.begin()
    op = TxnOp(
        kind="ack",
        segment=TOPIC,
        subscription="again",
        position=str(positions[0]),
        incarnation=broker.topic(TOPIC).log.incarnation,
    )
    await broker.service.transactions.store.append_op(txn, op)  # left by an interrupted delete
    await client.subscribe(TOPIC, "again", consumer_id=2, initial=EARLIEST)
    assert await ops(broker, "again") == []


async def test_a_new_subscription_that_is_made_in_two_attempts_does_not_get_the_acks_of_an_old_one(
    world: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cursor is there only when they are gone: whoever loads the topic takes what it finds for the cursor's own."""
    broker, client, positions = await begun(world)
    txn = await client.begin()
    op = TxnOp(
        kind="ack",
        segment=TOPIC,
        subscription="again",
        position=str(positions[0]),
        incarnation=broker.topic(TOPIC).log.incarnation,
    )
    await broker.service.transactions.store.append_op(txn, op)  # left by an interrupted delete
    with monkeypatch.context() as patch:

        async def away(*_anything: object) -> None:
            raise StoreUnavailable("The store is away.")

        patch.setattr(TransactionStore, "purge_subscription", away)
        topic = broker.topic(TOPIC)
        with pytest.raises(StoreUnavailable):
            await topic.subscription("again", is_durable=True, start=None, initial=FIRST)
    await broker.service.unload(topic)
    late = await broker.client()
    await late.subscribe(TOPIC, "again", consumer_id=2, initial=EARLIEST, permits=100)
    await client.end(txn, commit=True)
    assert [at(each) for each in await late.messages(len(positions))] == positions


@pytest.mark.inv("INV12")
async def test_what_a_subscription_holds_outlives_a_cursor_that_cannot_be_read_for_a_while(world: Any, until: Any) -> None:
    """Everything is kept for it until its record is repaired, and what committed transactions acknowledged is part of that."""
    broker, client, positions = await begun(world)
    committed, still_open = await client.begin(), await client.begin()
    await client.acked(positions[0], txn=committed)
    await client.acked(positions[1], txn=still_open)
    store, name = broker.service.transactions.store, TopicName.parse(TOPIC)
    topic = broker.topic(TOPIC)
    await broker.service.unload(topic)
    found = await store.metadata.get(CURSOR)
    assert found is not None
    await store.metadata.put(CURSOR, b"nonsense")
    client = await broker.client()
    await client.end(committed, commit=True)
    await client.producer(TOPIC)
    assert "sub" in broker.topic(TOPIC).log.unreadable
    await broker.service.segments.settle(name)
    await client.settle()
    assert len(await ops(broker)) == 2
    await broker.service.unload(broker.topic(TOPIC))
    await store.metadata.put(CURSOR, found.value)
    client = await broker.client()
    await client.subscribe(TOPIC, initial=EARLIEST, permits=100)
    await until(lambda: list(subscription(broker).pending_acks._roots) == [still_open])
    assert subscription(broker).pending_acks.is_held(positions[1])
    await client.end(still_open, commit=False)
    assert [at(each) for each in await client.messages(len(positions) - 1)] == positions[1:]


@pytest.mark.inv("INV12", "INV13")
@pytest.mark.parametrize("commit", [True, False])
async def test_a_transaction_that_cannot_be_read_holds_only_what_is_its_own_until_it_is_repaired(
    world: Any, until: Any, commit: bool
) -> None:
    broker, client, positions = await begun(world)
    await client.subscribe(TOPIC, "other", consumer_id=2, initial=EARLIEST)
    await client.producer(TOPIC)
    txn = await client.begin()
    await client.acked(positions[0], txn=txn)
    inside = await client.store(b"in", 77, txn=txn)
    after = await client.store(b"after", 78)
    store = broker.service.transactions.store
    key, partition = records.header_key(txn), str(txn)
    await broker.service.unload(broker.topic(TOPIC))
    await client.end(txn, commit=commit)
    found = await store.metadata.get(key, partition=partition)
    assert found is not None
    await store.metadata.put(key, b"nonsense", partition=partition)
    client = await broker.client()
    await client.subscribe(TOPIC, "other", consumer_id=2, initial=EARLIEST, permits=100)
    assert [at(each) for each in await client.messages(len(positions))] == positions
    topic = broker.topic(TOPIC)
    assert subscription(broker).pending_acks.is_held(positions[0])
    await broker.service.transactions.decisions.reconcile()
    await broker.service.segments.settle(TopicName.parse(TOPIC))
    assert topic.transactions.max_read_position == positions[-1] and len(await ops(broker)) == 1
    await store.metadata.put(key, found.value, partition=partition)
    await broker.service.transactions.decisions.reconcile()
    expected = [inside, after] if commit else [after]
    assert [at(each) for each in await client.messages(len(expected))] == expected
    await settled(until, broker)
    assert subscription(broker).cursor.is_acknowledged(positions[0]) == commit
    await without_ops(broker)


async def test_whoever_deletes_a_subscription_that_cannot_be_read_deletes_what_it_holds(world: Any) -> None:
    broker, client, positions = await begun(world)
    txn = await client.begin()
    await client.acked(positions[0], txn=txn)
    topic = broker.topic(TOPIC)
    await broker.service.unload(topic)
    await broker.service.transactions.store.metadata.put(CURSOR, b"nonsense")
    client = await broker.client()
    await client.producer(TOPIC)
    await broker.topic(TOPIC).delete_subscription("sub")
    assert await ops(broker) == []


async def test_a_closed_topic_waits_for_no_decision(world: Any) -> None:
    broker, client, positions = await begun(world)
    txn = await client.begin()
    await client.acked(positions[0], txn=txn)
    assert broker.service.transactions.decisions.held == 1
    await broker.service.unload(broker.topic(TOPIC))
    assert broker.service.transactions.decisions.held == 0
    assert len(await ops(broker)) == 1


async def test_a_topic_that_could_not_be_opened_waits_for_no_decision(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first, client, positions = await begun(world)
    txn = await client.begin()
    await client.acked(positions[0], txn=txn)
    await first.kill()
    second = await world.broker()
    client = await second.client()

    async def fails(topic: Topic, enabled: bool) -> None:
        raise NotReady("not now")

    with monkeypatch.context() as patched:
        patched.setattr(Topic, "set_deduplication", fails)
        with pytest.raises(NotReady):
            await client.subscribe(TOPIC)
    assert second.service.transactions.decisions.held == 0
    await client.subscribe(TOPIC)
    assert second.service.transactions.decisions.held == 1
