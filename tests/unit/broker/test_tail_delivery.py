"""Delivery of what was just added: consumers that keep up get it without a look into the cache, in one write per connection."""

from __future__ import annotations

from typing import Any

import pytest

from braid.broker import link as link_module
from braid.managedledger.api import Entry
from braid.managedledger.config import ManagedLedgerConfig
from braid.managedledger.log import ManagedLedger
from braid.model.positions import Position
from braid.testing.raw_client import RawClient, payload_of
from braid.wire.types import InitialPosition, SubType

TOPIC = "persistent://public/default/tail"
EARLIEST = InitialPosition.EARLIEST
SHARED = SubType.SHARED
KINDS = pytest.mark.parametrize("kind", [SubType.EXCLUSIVE, SHARED])


@KINDS
async def test_new_entries_do_not_overtake_those_that_wait_for_permits(broker: Any, client: RawClient, kind: SubType) -> None:
    producer = await broker.client()
    await producer.producer(TOPIC)
    await client.subscribe(TOPIC, sub_type=kind, initial=EARLIEST)
    client.flow(2)
    for number in range(5):
        await producer.store(b"%d" % number, number)
    assert await client.payloads(2) == [b"0", b"1"]
    client.flow(1)
    assert await client.payloads(1) == [b"2"]
    await producer.store(b"5", 5)
    client.flow(10)
    assert await client.payloads(3) == [b"3", b"4", b"5"]
    assert await client.settle() == []


@KINDS
async def test_a_group_larger_than_the_permits_is_cut(world: Any, broker: Any, client: RawClient, kind: SubType) -> None:
    producer = await broker.client()
    await producer.producer(TOPIC)
    await producer.store(b"first", 0)
    await client.subscribe(TOPIC, sub_type=kind, initial=EARLIEST)
    client.flow(4)
    assert await client.payloads(1) == [b"first"]
    world.ledgers.hold()
    for number in range(10):
        producer.publish(b"%d" % number, number + 1)
    await producer.settle()
    world.ledgers.release()  # one commit group
    assert await client.payloads(3) == [b"0", b"1", b"2"]
    assert await client.settle() == []
    client.flow(100)
    assert await client.payloads(7) == [b"%d" % number for number in range(3, 10)]


async def test_without_a_cache_new_entries_still_come_once_and_in_order(world: Any) -> None:
    broker = await world.broker(logs=ManagedLedgerConfig(cache_bytes=0))
    producer, client = await broker.client(), await broker.client()
    await producer.producer(TOPIC)
    await client.subscribe(TOPIC, initial=EARLIEST)
    client.flow(1000)
    for number in range(50):
        await producer.store(b"%d" % number, number)
    assert await client.payloads(50) == [b"%d" % number for number in range(50)]
    assert await client.settle() == []


async def test_redelivered_entries_come_before_new_ones(broker: Any, client: RawClient) -> None:
    producer = await broker.client()
    await producer.producer(TOPIC)
    await client.subscribe(TOPIC, sub_type=SHARED, initial=EARLIEST)
    client.flow(2)
    first = await producer.store(b"0", 0)
    await producer.store(b"1", 1)
    await client.payloads(2)
    client.redeliver(first)
    await client.settle()
    await producer.store(b"2", 2)
    client.flow(10)
    found = await client.messages(2)
    assert [payload_of(each) for each in found] == [b"0", b"2"]
    assert found[0].command.redelivery_count == 1


async def test_a_backlog_is_spread_over_shared_consumers_in_turns(world: Any, monkeypatch: Any) -> None:
    broker = await world.broker(ManagedLedgerConfig(cache_bytes=0), shared_turn_entries=5)
    producer, one, two = [await broker.client() for _ in range(3)]
    await producer.producer(TOPIC)
    await one.subscribe(TOPIC, sub_type=SHARED, initial=EARLIEST)
    await two.subscribe(TOPIC, sub_type=SHARED, initial=EARLIEST)
    for number in range(40):
        await producer.store(b"%d" % number, number)
    subscription = broker.topic(TOPIC).subscriptions["sub"]
    reads: list[int] = []
    honest = ManagedLedger.read

    async def counted(log: ManagedLedger, start: Position, entries: int, size: int) -> list[Entry]:
        reads.append(entries)
        return await honest(log, start, entries, size)

    monkeypatch.setattr(ManagedLedger, "read", counted)
    subscription.is_fenced = True  # until both have permits
    one.flow(20)
    two.flow(20)
    await two.settle()
    subscription.is_fenced = False
    subscription.pump()
    got_one, got_two = await one.payloads(20), await two.payloads(20)
    assert sorted(map(int, got_one + got_two)) == list(range(40))
    assert [int(got_one[at]) // 5 for at in (0, 5, 10, 15)] in ([0, 2, 4, 6], [1, 3, 5, 7])
    assert reads == [40], "the backlog is read at once, not turn by turn"


async def test_unacked_limit_stops_a_group_exactly(world: Any) -> None:
    broker = await world.broker(max_unacked_per_consumer=3)
    producer, client = await broker.client(), await broker.client()
    await producer.producer(TOPIC)
    await client.subscribe(TOPIC, sub_type=SHARED, initial=EARLIEST)
    client.flow(100)
    await producer.store(b"0", 0)
    world.ledgers.hold()
    for number in range(1, 8):
        producer.publish(b"%d" % number, number)
    await producer.settle()
    world.ledgers.release()
    assert await client.payloads(3) == [b"0", b"1", b"2"]
    assert await client.settle() == []


async def test_one_group_over_many_topics_leaves_in_one_write(world: Any, broker: Any, monkeypatch: Any) -> None:
    producer, client = await broker.client(), await broker.client()
    for number in range(20):
        await producer.producer(f"{TOPIC}-{number}", producer_id=number + 1)
        await client.subscribe(f"{TOPIC}-{number}", consumer_id=number + 1, initial=EARLIEST)
        client.flow(10, consumer_id=number + 1)
        await producer.store(b"first", 0, producer_id=number + 1)
    await client.payloads(20)
    flushes: list[int] = []
    honest = link_module.Link.flush

    def counted(link: link_module.Link) -> None:
        if link._out and len(link._out) > 1:
            flushes.append(len(link._out))
        honest(link)

    monkeypatch.setattr(link_module.Link, "flush", counted)
    world.ledgers.hold()
    for number in range(20):
        producer.publish(b"second", 1, producer_id=number + 1)
    await producer.settle()
    world.ledgers.release()
    await client.payloads(20)
    assert 40 in flushes, f"twenty messages were to leave together: {flushes}"


async def test_large_messages_reach_the_socket_before_the_group_is_through(world: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(link_module, "FLUSH_BYTES", 1000)
    broker = await world.broker()
    producer, client = await broker.client(), await broker.client()
    await producer.producer(TOPIC)
    await client.subscribe(TOPIC, sub_type=SHARED, initial=EARLIEST)
    client.flow(100)
    queued: list[int] = []
    honest = link_module.Link.deliver

    def counted(link: link_module.Link, pieces: list[bytes], size: int) -> None:
        honest(link, pieces, size)
        queued.append(sum(map(len, link._out)))

    monkeypatch.setattr(link_module.Link, "deliver", counted)
    for number in range(5):
        await producer.store(b"x" * 2000, number)
    await client.payloads(5)
    assert queued == [0] * 5


@KINDS
async def test_new_entries_do_not_overtake_those_that_cannot_be_read(world: Any, kind: SubType) -> None:
    broker = await world.broker(logs=ManagedLedgerConfig(cache_bytes=0))
    producer, client = await broker.client(), await broker.client()
    await producer.producer(TOPIC)
    for number in range(3):
        await producer.store(b"%d" % number, number)
    world.ledgers.is_unreadable = True
    await client.subscribe(TOPIC, sub_type=kind, initial=EARLIEST)
    client.flow(100)
    await client.settle()
    await producer.store(b"3", 3)
    assert await client.settle() == []
    world.ledgers.is_unreadable = False
    await world.advance(10)
    assert await client.payloads(4) == [b"0", b"1", b"2", b"3"]


@KINDS
async def test_what_cannot_be_read_is_tried_once_a_second_however_much_happens(world: Any, kind: SubType) -> None:
    broker = await world.broker(logs=ManagedLedgerConfig(cache_bytes=0))
    producer, client = await broker.client(), await broker.client()
    await producer.producer(TOPIC)
    await producer.store(b"0", 0)
    world.ledgers.is_unreadable = True
    await client.subscribe(TOPIC, sub_type=kind, initial=EARLIEST)
    for number in range(1, 21):
        client.flow(1)
        await client.settle()
        await world.advance(0.035)
        await producer.store(b"%d" % number, number)
    await client.settle()
    before = world.ledgers.refused
    for _ in range(100):
        await world.advance(0.05)
        await client.settle()
    assert 3 <= world.ledgers.refused - before <= 6
    world.ledgers.is_unreadable = False
    await world.advance(2)
    assert await client.payloads(20) == [b"%d" % number for number in range(20)]
