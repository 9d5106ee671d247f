"""SEEK and GET_LAST_MESSAGE_ID: what the official clients rely on to rewind and to know whether there is more."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from braid.errors import MetadataFailure, UnknownFailure
from braid.managedledger.config import ManagedLedgerConfig
from braid.model.positions import EARLIEST as FIRST
from braid.model.positions import LATEST as LAST
from braid.model.positions import Position
from braid.testing.raw_client import RawClient, id_of, position_of
from braid.wire import requests
from braid.wire.client import Delivery
from braid.wire.commands import encode
from braid.wire.messages import CommandSeek
from braid.wire.types import CommandType, InitialPosition, SubType

TOPIC = "persistent://public/default/seeking"
EARLIEST = InitialPosition.EARLIEST
EXCLUSIVE, SHARED, FAILOVER = SubType.EXCLUSIVE, SubType.SHARED, SubType.FAILOVER
LOGS = [ManagedLedgerConfig(), ManagedLedgerConfig(cache_bytes=0)]


def at(delivery: Delivery) -> Position:
    return position_of(delivery.command.message_id)


async def filled(world: Any, broker: Any, count: int, step: float = 0) -> list[Position]:
    client = await broker.client(answers_pings=True)
    await client.producer(TOPIC)
    positions = []
    for number in range(count):
        positions.append(await client.store(b"%d" % number, number))
        if step:
            await world.advance(step)
    client.close()
    return positions


@pytest.mark.parametrize("sub_type", [EXCLUSIVE, SHARED, FAILOVER])
async def test_5_8_trap_2_close_consumer_comes_before_success_and_nothing_in_between(
    world: Any, broker: Any, client: RawClient, sub_type: SubType
) -> None:
    positions = await filled(world, broker, 5)
    await client.subscribe(TOPIC, sub_type=sub_type, initial=EARLIEST, permits=100)
    await client.messages(5)
    client.inbox.clear()
    client.send(requests.seek(40, 1, id_of(positions[2])))
    frames = [await client.take(lambda event: True) for _ in range(2)]
    assert [CommandType(each.type) for each in frames] == [CommandType.CLOSE_CONSUMER, CommandType.SUCCESS]
    assert frames[0].body.consumer_id == 1
    assert frames[0].body.request_id == 2**64 - 1
    assert await client.settle() == []
    await client.subscribe(TOPIC, sub_type=sub_type, permits=100)
    assert [at(each) for each in await client.messages(3)] == positions[2:]


@pytest.mark.parametrize("logs", LOGS, ids=["cached", "stored"])
@pytest.mark.parametrize(
    ("to", "expected"),
    [
        pytest.param(lambda all: FIRST, slice(0, None), id="first"),
        pytest.param(lambda all: LAST, slice(6, None), id="after the last"),
        pytest.param(lambda all: all[3], slice(3, None), id="inclusive"),
        pytest.param(lambda all: all[5], slice(5, None), id="the last one"),
        pytest.param(lambda all: Position(all[5].ledger_id, 10**6), slice(6, None), id="beyond the end"),
        pytest.param(lambda all: Position(all[5].ledger_id + 10**6, 0), slice(6, None), id="a later ledger"),
    ],
)
async def test_5_8_seek_by_id_resets_everything_to_the_position(
    world: Any, logs: ManagedLedgerConfig, to: Any, expected: slice
) -> None:
    broker = await world.broker(logs)
    client = await broker.client()
    positions = await filled(world, broker, 6)
    await client.subscribe(TOPIC, initial=EARLIEST, permits=100)
    await client.messages(6)
    await client.acked(positions[1], positions[4])
    await client.seek(to(positions))
    await client.subscribe(TOPIC, permits=100)
    assert [at(each) for each in await client.messages(len(positions[expected]))] == positions[expected]
    await client.settle()
    assert CommandType.MESSAGE not in client.kinds()


async def test_5_8_an_ack_set_in_the_id_marks_what_is_skipped_of_the_batch(broker: Any, client: RawClient) -> None:
    await client.producer(TOPIC)
    await client.subscribe(TOPIC, permits=100)
    batch = await client.store(b"", 0, batch=[b"x"] * 4)
    await client.seek(id_of(batch, [0b1100]))
    await client.subscribe(TOPIC, consumer_id=2, permits=100)
    await client.expect(CommandType.CLOSE_CONSUMER)
    again = [each for each in await client.messages(2) if each.command.consumer_id == 2]
    assert [(at(each), list(each.command.ack_set)) for each in again] == [(batch, [0b1100])]


@pytest.mark.parametrize("logs", LOGS, ids=["cached", "stored"])
@pytest.mark.parametrize(
    ("offset_ms", "first"),
    [(-5000, 0), (0, 0), (1, 1), (10_000, 1), (10_001, 2), (20_000, 2), (39_999, 4), (40_000, 4), (40_001, 5), (10**9, 5)],
)
async def test_5_8_seek_by_time_goes_to_the_first_entry_at_or_after_it(
    world: Any, logs: ManagedLedgerConfig, offset_ms: int, first: int
) -> None:
    broker = await world.broker(logs)
    start = world.clock.now_ms()
    positions = await filled(world, broker, 5, step=10)
    client = await broker.client()
    await client.subscribe(TOPIC, initial=EARLIEST)
    await client.seek(start + offset_ms)
    await client.subscribe(TOPIC, permits=100)
    assert [at(each) for each in await client.messages(5 - first)] == positions[first:]


async def test_5_8_a_seek_to_nowhere_is_a_metadata_error(client: RawClient) -> None:
    await client.subscribe(TOPIC)
    client.send(encode(CommandType.SEEK, CommandSeek(consumer_id=1, request_id=30)))
    with pytest.raises(MetadataFailure):
        await client.answer(30)
    assert client.inbox == []


async def test_5_8_a_concurrent_seek_is_refused(world: Any, broker: Any, client: RawClient) -> None:
    positions = await filled(world, broker, 3)
    other = await broker.client()
    await client.subscribe(TOPIC, sub_type=SHARED)
    await other.subscribe(TOPIC, sub_type=SHARED)
    subscription = broker.topic(TOPIC).subscriptions["sub"]
    world.ledgers.hold()
    first = asyncio.get_running_loop().create_task(subscription.seek(positions[1]))
    await asyncio.sleep(0)
    with pytest.raises(UnknownFailure):
        await subscription.seek(positions[2])
    world.ledgers.release()
    await first
    await client.expect(CommandType.CLOSE_CONSUMER)
    await other.expect(CommandType.CLOSE_CONSUMER)
    with pytest.raises(MetadataFailure):
        await other.seek(positions[0])


async def test_5_8_a_subscribe_during_the_seek_waits_for_it_and_reads_from_there(
    world: Any, broker: Any, client: RawClient
) -> None:
    positions = await filled(world, broker, 4)
    await client.subscribe(TOPIC, initial=EARLIEST, permits=100)
    await client.messages(4)
    subscription = broker.topic(TOPIC).subscriptions["sub"]
    world.ledgers.hold()
    seek = asyncio.get_running_loop().create_task(subscription.seek(positions[2]))
    await client.expect(CommandType.CLOSE_CONSUMER)
    client.send(requests.subscribe(50, 1, TOPIC, "sub", EXCLUSIVE))
    assert await client.settle() == []
    world.ledgers.release()
    await seek
    await client.answer(50)
    client.flow(100)
    assert [at(each) for each in await client.messages(2)] == positions[2:]


async def test_a_client_that_goes_away_during_its_seek_leaves_a_working_subscription(
    world: Any, broker: Any, until: Any
) -> None:
    positions = await filled(world, broker, 4)
    a, b = await broker.client(), await broker.client()
    await a.subscribe(TOPIC, sub_type=FAILOVER, consumer_name="a", initial=EARLIEST, permits=100)
    await b.subscribe(TOPIC, sub_type=FAILOVER, consumer_name="b", permits=100)
    await a.messages(4)
    await a.acked(*positions)
    subscription = broker.topic(TOPIC).subscriptions["sub"]
    world.ledgers.hold()
    a.send(requests.seek(9, 1, id_of(positions[1])))
    await a.expect(CommandType.CLOSE_CONSUMER)
    a.close()
    await until(lambda: len(broker.server.connections) == 1)
    world.ledgers.release()
    await until(lambda: not subscription.is_fenced)
    assert [at(each) for each in await b.messages(3)] == positions[1:]


async def test_5_8_failover_closes_only_the_active_consumer(world: Any, broker: Any) -> None:
    positions = await filled(world, broker, 3)
    a, b = await broker.client(), await broker.client()
    await a.subscribe(TOPIC, sub_type=FAILOVER, consumer_name="a", initial=EARLIEST, permits=100)
    await b.subscribe(TOPIC, sub_type=FAILOVER, consumer_name="b", permits=100)
    await a.messages(3)
    await a.seek(positions[1])
    await a.expect(CommandType.CLOSE_CONSUMER)
    assert [at(each) for each in await b.messages(2)] == positions[1:]
    assert CommandType.CLOSE_CONSUMER not in b.kinds()


async def test_seek_survives_a_kill(world: Any, broker: Any, client: RawClient) -> None:
    positions = await filled(world, broker, 3)
    await client.subscribe(TOPIC, initial=EARLIEST, permits=100)
    await client.messages(3)
    await client.acked(*positions)
    await client.seek(positions[1])
    await broker.kill()
    client = await (await world.broker()).client()
    await client.subscribe(TOPIC, permits=100)
    assert [at(each) for each in await client.messages(2)] == positions[1:]


# Readers.


async def test_trap_3_a_reader_s_position_survives_the_close_its_seek_causes(
    world: Any, broker: Any, client: RawClient
) -> None:
    """The client comes back under the same name, without a start, at Latest."""
    start = world.clock.now_ms()
    positions = await filled(world, broker, 4, step=10)
    await client.subscribe(TOPIC, "reader", durable=False, start_message_id=id_of(LAST))
    await client.seek(start + 20_000)
    await client.subscribe(TOPIC, "reader", durable=False, permits=100)
    assert [at(each) for each in await client.messages(2)] == positions[2:]


async def test_trap_3_the_kept_position_ends_after_a_minute_or_with_its_next_consumer(
    world: Any, broker: Any, client: RawClient
) -> None:
    await filled(world, broker, 4)
    client.answers_pings = True
    topic = broker.topic(TOPIC)
    await client.subscribe(TOPIC, "reader", durable=False)
    await client.seek(FIRST)
    for _ in range(3):
        await world.advance(19.9)
        await client.settle()
    assert "reader" in topic.subscriptions
    await world.advance(1)
    assert "reader" not in topic.subscriptions
    assert "reader" not in topic.log.cursors
    await client.subscribe(TOPIC, "reader", durable=False)
    await client.seek(FIRST)
    await client.subscribe(TOPIC, "reader", durable=False)
    await client.close_consumer()
    assert "reader" not in topic.subscriptions


async def test_trap_3_every_seek_keeps_the_position_for_a_whole_minute(world: Any, broker: Any, client: RawClient) -> None:
    """An earlier seek's timer must not end what a later one keeps."""
    await filled(world, broker, 4)
    client.answers_pings = True
    await client.subscribe(TOPIC, "reader", durable=False)
    await client.seek(FIRST)
    for _ in range(2):
        await world.advance(25)
        await client.settle()
    await client.subscribe(TOPIC, "reader", durable=False)
    await client.seek(FIRST)
    await world.advance(20)
    await client.subscribe(TOPIC, "reader", durable=False, permits=100)
    assert await client.payloads(4) == [b"0", b"1", b"2", b"3"]


async def test_a_reader_s_disconnect_without_seek_drops_it_also_while_it_reads(world: Any, until: Any) -> None:
    broker = await world.broker(ManagedLedgerConfig(cache_bytes=0))
    await filled(world, broker, 10)
    for turns in range(6):
        client = await broker.client()
        await client.subscribe(TOPIC, f"r{turns}", durable=False, start_message_id=id_of(FIRST), permits=5)
        for _ in range(turns):
            await asyncio.sleep(0)
        client.close()
        await until(lambda: not broker.server.connections)
    assert broker.topic(TOPIC).subscriptions == {}


# 5.9 GET_LAST_MESSAGE_ID.


async def test_5_9_an_empty_topic_has_no_last_message(client: RawClient) -> None:
    await client.subscribe(TOPIC)
    reply = await client.last_message_id()
    assert position_of(reply.last_message_id) == Position(-1, -1)
    assert reply.last_message_id.batch_index == -1


async def test_5_9_the_last_entry_its_batch_index_and_the_mark_delete_position(broker: Any, client: RawClient) -> None:
    await client.producer(TOPIC)
    await client.subscribe(TOPIC, permits=10)
    single = await client.store(b"x", 0)
    reply = await client.last_message_id()
    assert (position_of(reply.last_message_id), reply.last_message_id.batch_index) == (single, -1)
    assert reply.last_message_id.partition == -1
    batch = await client.store(b"", 1, batch=[b"x"] * 5)
    reply = await client.last_message_id()
    assert (position_of(reply.last_message_id), reply.last_message_id.batch_index) == (batch, 4)
    assert position_of(reply.consumer_mark_delete_position) == Position(single.ledger_id, -1)
    lone = await client.store(b"", 2, batch=[b"x"])
    reply = await client.last_message_id()
    assert (position_of(reply.last_message_id), reply.last_message_id.batch_index) == (lone, 0)
    await client.acked(lone, cumulative=True)
    reply = await client.last_message_id()
    assert position_of(reply.consumer_mark_delete_position) == lone


async def test_5_9_after_seek_to_the_end_mark_delete_equals_the_last_message(
    world: Any, broker: Any, client: RawClient
) -> None:
    positions = await filled(world, broker, 3)
    await client.subscribe(TOPIC, "reader", durable=False, start_message_id=id_of(FIRST))
    await client.seek(LAST)
    await client.subscribe(TOPIC, "reader", durable=False)
    reply = await client.last_message_id()
    assert position_of(reply.consumer_mark_delete_position) == position_of(reply.last_message_id) == positions[-1]


async def test_5_9_a_reader_at_the_end_of_a_fresh_ledger_sees_equal_positions(world: Any, broker: Any) -> None:
    positions = await filled(world, broker, 2)
    await broker.stop()
    client = await (await world.broker()).client()
    await client.subscribe(TOPIC, "reader", durable=False, start_message_id=id_of(LAST))
    reply = await client.last_message_id()
    assert position_of(reply.consumer_mark_delete_position) == position_of(reply.last_message_id) == positions[-1]


async def test_5_9_a_partition_is_named_in_the_id(client: RawClient) -> None:
    await client.subscribe(f"{TOPIC}-partition-3")
    assert (await client.last_message_id()).last_message_id.partition == 3
