"""Transactions when things happen at the same time: reads from storage, deletions, owners that come late."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from braid.broker.topic import Topic
from braid.errors import LedgerFenced
from braid.managedledger.config import ManagedLedgerConfig
from braid.managedledger.reading import LogReader
from braid.model.names import TopicName
from braid.model.positions import LATEST
from braid.runtime.plans import Moment, watching
from braid.testing.raw_client import RawClient, id_of
from braid.txn.pending_acks import DRAIN_SECONDS
from braid.txn.records import TxnOp, position_text
from braid.wire import requests
from braid.wire.types import CommandType, InitialPosition, SubType

TOPIC = "persistent://public/default/races"
EARLIEST = InitialPosition.EARLIEST
NO_CACHE = ManagedLedgerConfig(cache_bytes=0)


class Gate:
    """Holds up whoever comes first until it is opened."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.opened = asyncio.Event()

    async def wait(self) -> None:
        if not self.reached.is_set():
            self.reached.set()
            await self.opened.wait()


@pytest.mark.parametrize("kind", [SubType.EXCLUSIVE, SubType.SHARED])
@pytest.mark.inv("INV13")
async def test_a_read_from_storage_does_not_pass_a_limit_that_came_while_it_ran(
    world: Any, kind: SubType, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = await world.broker(NO_CACHE)
    client: RawClient = await broker.client()
    await client.producer(TOPIC)
    for number in range(3):
        await client.store(b"old", number)
    reader: RawClient = await broker.client()
    await reader.subscribe(TOPIC, sub_type=kind, initial=EARLIEST)
    topic = broker.topic(TOPIC)
    gate = Gate()
    read = LogReader.read

    async def slow(*arguments: Any) -> Any:
        found = await read(*arguments)
        await gate.wait()
        return found

    monkeypatch.setattr(LogReader, "read", slow)
    reader.flow(100)
    await gate.reached.wait()
    subscription = topic.subscriptions["sub"]
    subscription.acknowledge_upto(topic.log.last_position)  # so that nothing of what was read is wanted any more
    txn = await client.begin()
    await client.store(b"in", 3, txn=txn)
    await client.store(b"after", 4)
    gate.opened.set()
    await reader.settle()
    assert CommandType.MESSAGE not in reader.kinds()
    await client.end(txn, commit=True)
    assert await reader.payloads(2) == [b"in", b"after"]
    assert topic.transactions.max_read_position is LATEST


async def test_the_end_of_a_subscription_waits_for_acks_under_way(world: Any) -> None:
    """Else their ops are written afterwards, and count for the next subscription of that name."""
    broker = await world.broker()
    client: RawClient = await broker.client()
    await client.producer(TOPIC)
    position = await client.store(b"one", 0)
    await client.subscribe(TOPIC, initial=EARLIEST, permits=10)
    await client.messages(1)
    txn = await client.begin()
    gate = Gate()

    async def hook(name: str, moment: Moment) -> None:
        if (name, moment) == ("txn-ack:op", "before"):
            await gate.wait()

    topic = broker.topic(TOPIC)
    with watching(hook):
        client.send(requests.ack(1, [id_of(position)], request_id=900, txn=txn))
        await gate.reached.wait()
        deleting = asyncio.ensure_future(topic.delete_subscription("sub"))
        for _turn in range(20):
            await asyncio.sleep(0)
        gate.opened.set()
        await deleting
        await client.answer(900)
    for _turn in range(20):
        await asyncio.sleep(0)
    assert await broker.service.transactions.store.all_acks_in(TOPIC) == []
    assert broker.service.transactions.decisions.held == 0


@pytest.mark.inv("INV12")
async def test_one_that_lost_the_log_takes_no_op_for_an_orphan(world: Any) -> None:
    """A subscription it does not know may be one that the next owner made."""
    late = await world.broker(believes=True)
    client: RawClient = await late.client()
    await client.producer(TOPIC)
    position = await client.store(b"one", 0)
    lost = late.topic(TOPIC)
    owner = await world.broker(believes=True)
    new: RawClient = await owner.client()
    await new.subscribe(TOPIC, "new", initial=EARLIEST, permits=10)
    await new.messages(1)
    txn = await new.begin()
    await new.acked(position, txn=txn)
    with pytest.raises(LedgerFenced):
        await lost.relist_acks()
    assert len(await owner.service.transactions.store.acks_in(TOPIC, "new")) == 1


@pytest.mark.req("R473-24")
async def test_an_op_without_an_entry_holds_nothing_back_after_a_restart(world: Any) -> None:
    first = await world.broker()
    client: RawClient = await first.client()
    await client.producer(TOPIC)
    await client.subscribe(TOPIC, initial=EARLIEST)
    position = await client.store(b"one", 0)
    txn = await client.begin()
    op = TxnOp(kind="write", segment=TOPIC, position=position_text(position), incarnation=first.topic(TOPIC).log.incarnation)
    await first.service.transactions.store.append_op(txn, op)  # as if it had ended before the append
    await first.kill()
    second = await world.broker()
    client = await second.client()
    await client.producer(TOPIC)
    await client.store(b"two", 1)
    reader: RawClient = await second.client()
    await reader.subscribe(TOPIC, initial=EARLIEST, permits=10)
    assert await reader.payloads(2) == [b"one", b"two"]
    await client.store(b"three", 2, txn=txn)  # it goes on, and is hidden as ever
    await reader.settle()
    assert CommandType.MESSAGE not in reader.kinds()
    await client.end(txn, commit=True)
    assert await reader.payloads(1) == [b"three"]


async def test_a_log_that_is_lost_while_its_topic_is_opened_is_no_bug(world: Any) -> None:
    broker = await world.broker()
    topic = Topic(broker.service, TopicName.parse(TOPIC))
    topic.log_failed(LedgerFenced("Another broker was faster."), [])
    topic.let_go()


@pytest.mark.req("R473-30")
@pytest.mark.parametrize("way", ["redeliver", "leave"])
async def test_the_rest_of_a_batch_is_still_its_consumers_after_a_commit(world: Any, until: Any, way: str) -> None:
    """Only some of its messages are acknowledged: whoever has the others can give them back, or leave them to others."""
    broker = await world.broker()
    client: RawClient = await broker.client()
    await client.producer(TOPIC)
    position = await client.store(b"", 0, batch=[b"a", b"b", b"c"])
    await client.subscribe(TOPIC, sub_type=SubType.SHARED, initial=EARLIEST, permits=100)
    await client.messages(1)
    other: RawClient = await broker.client()
    await other.subscribe(TOPIC, sub_type=SubType.SHARED)
    txn = await client.begin()
    named = id_of(position, [0b110])
    named.batch_size = 3
    assert not (await client.acked(named, txn=txn)).HasField("error")
    await client.end(txn, commit=True)
    subscription = broker.topic(TOPIC).subscriptions["sub"]
    await until(lambda: not subscription.pending_acks._roots)
    assert subscription.dispatcher.unacked == 2
    if way == "redeliver":
        client.redeliver(position)
        [again] = await client.messages(1)
    else:
        other.flow(10)
        await client.close_consumer()
        [again] = await other.messages(1)
    assert list(again.command.ack_set) == [0b110]


async def test_a_topic_is_closed_in_time_however_many_subscriptions_wait_for_the_store(world: Any) -> None:
    broker = await world.broker()
    client: RawClient = await broker.client(answers_pings=True)
    await client.producer(TOPIC)
    position = await client.store(b"one", 0)
    txn = await client.begin()
    stuck: list[str] = []

    async def hook(name: str, moment: Moment) -> None:
        if (name, moment) == ("txn-ack:op", "before"):
            stuck.append(name)
            await asyncio.Event().wait()

    with watching(hook):
        for number in range(1, 5):
            await client.subscribe(TOPIC, f"sub{number}", consumer_id=number, initial=EARLIEST)
            client.send(requests.ack(number, [id_of(position)], request_id=900 + number, txn=txn))
        await client.settle()
        assert len(stuck) == 4
        closing = asyncio.ensure_future(broker.service.unload(broker.topic(TOPIC)))
        for _turn in range(20):
            await asyncio.sleep(0)
        assert not closing.done()
        await world.advance(DRAIN_SECONDS)
        async with asyncio.timeout(5):
            await closing
