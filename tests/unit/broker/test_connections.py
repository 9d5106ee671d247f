"""Connections: handshake, keep-alive, what closes a connection and what is merely refused, back-pressure both ways."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from braid.errors import InvalidTopicName, MetadataFailure, ProducerBusy
from braid.model.positions import Position
from braid.testing.raw_client import CPP, RawClient, entry, hello
from braid.wire import requests
from braid.wire.commands import encode
from braid.wire.messages import (
    CommandConsumerStats,
    CommandSuccess,
)
from braid.wire.replies import PING, PONG, success
from braid.wire.types import CommandType, LookupResult, PartitionsResult, ServerError, SubType

TOPIC = "persistent://public/default/connections"


# Handshake.


async def test_connected_answers_with_the_lower_protocol_version_and_the_message_size(broker: Any) -> None:
    for theirs, ours in ((12, 12), (20, 20), (21, 21), (99, 21)):
        client = await broker.client(handshake=False)
        client.send(hello(CPP, theirs))
        reply = await client.expect(CommandType.CONNECTED)
        assert reply.protocol_version == ours
        assert reply.max_message_size == broker.service.config.max_message_size
        assert reply.server_version.startswith("Braid")
        assert reply.feature_flags.supports_get_partitioned_metadata_without_auto_creation
        assert not reply.feature_flags.supports_topic_watchers
        assert reply.feature_flags.supports_scalable_topics
        assert not reply.feature_flags.supports_braid  # this client did not say that it knows


async def test_ping_and_pong_are_taken_before_connect(broker: Any) -> None:
    client = await broker.client(handshake=False)
    client.send(PONG, PING)
    await client.expect(CommandType.PONG)


@pytest.mark.parametrize(
    "frames",
    [
        pytest.param((requests.lookup(1, TOPIC),), id="command before CONNECT"),
        pytest.param((hello(), hello()), id="second CONNECT"),
        pytest.param((hello(), b"\x00\x00\x00\x08\x00\x00\x00\x04\x08\x05\x08\x05"), id="missing sub-message"),
        pytest.param((hello(), b"\x00\x00\x00\x09\x00\x00\x00\x05\xff\xff\xff\xff\xff"), id="protobuf parse error"),
        pytest.param((hello(), b"\x7f\xff\xff\xff\x00\x00\x00\x05"), id="oversize frame"),
        pytest.param((hello(), b"\x00\x00\x00\x09\x00\x00\x00\x50\x00\x00\x00\x00\x00"), id="command larger than its frame"),
        pytest.param((hello(), success(4)), id="a broker's command"),
        pytest.param((hello(), requests.flow(1, 0)), id="FLOW with 0 permits"),
        pytest.param((hello(), requests.send(7, 0, entry(b"x"))), id="SEND for an unknown producer"),
    ],
)
async def test_1_9_a_broken_protocol_closes_the_connection_and_no_other(broker: Any, client: RawClient, frames: Any) -> None:
    bad = await broker.client(handshake=False)
    bad.send(*frames)
    await bad.expect_close()
    assert [kind for kind in bad.kinds() if kind is not CommandType.CONNECTED] == []
    await client.settle()


async def test_nothing_after_a_broken_command_is_executed(broker: Any, client: RawClient, until: Any) -> None:
    """What follows in the same read of the socket must not be served: the connection is over."""
    client.send(requests.flow(1, 0), requests.producer(1, 1, TOPIC))
    await client.expect_close()
    await (await broker.client()).settle()
    assert str(broker.service.topics) == "{}"
    other = await broker.client()
    await other.producer(TOPIC)
    other.send(requests.send(9, 0, entry(b"x")), requests.send(1, 0, entry(b"late")))
    await other.expect_close()
    await (await broker.client()).settle()
    assert broker.topic(TOPIC).log.last_position == Position(-1, -1)


async def test_unknown_command_types_are_ignored(client: RawClient) -> None:
    raw = PING[8:].replace(b"\x08\x12", b"\x08\x5f")
    client.send((len(raw) + 4).to_bytes(4, "big") + len(raw).to_bytes(4, "big") + raw)
    await client.settle()


async def test_1_9_send_for_a_producer_the_broker_just_closed_is_dropped_silently(
    world: Any, broker: Any, client: RawClient
) -> None:
    await client.producer(TOPIC)
    await broker.service.unload(broker.topic(TOPIC))
    await client.expect(CommandType.CLOSE_PRODUCER)
    client.publish(b"late", 0)
    assert await client.settle() == []
    await world.advance(29)
    client.inbox.clear()
    client.publish(b"late", 1)
    await client.settle()
    assert CommandType.SEND_RECEIPT not in client.kinds()
    await world.advance(2)
    client.publish(b"far too late", 2)
    await client.expect_close()


async def test_1_9_flow_ack_and_redeliver_for_an_unknown_consumer_are_ignored(client: RawClient) -> None:
    client.flow(10, consumer_id=5)
    client.ack(Position(1, 1), consumer_id=5)
    client.redeliver(Position(1, 1), consumer_id=5)
    assert await client.settle() == []


async def test_1_9_consumer_stats_for_an_unknown_consumer_says_so(client: RawClient) -> None:
    client.send(encode(CommandType.CONSUMER_STATS, CommandConsumerStats(request_id=3, consumer_id=5)))
    reply = await client.answer(3)
    assert reply.error_code == ServerError.CONSUMER_NOT_FOUND


async def test_1_9_requests_for_an_unknown_consumer_get_metadata_error(client: RawClient) -> None:
    for ask in (client.unsubscribe, client.last_message_id):
        with pytest.raises(MetadataFailure):
            await ask(5)
    with pytest.raises(MetadataFailure):
        await client.seek(Position(1, 1), 5)


async def test_1_9_closing_an_unknown_producer_or_consumer_succeeds(client: RawClient) -> None:
    assert isinstance(await client.close_producer(5), CommandSuccess)
    assert isinstance(await client.close_consumer(5), CommandSuccess)


@pytest.mark.parametrize("name", ["persistent://public/default/cluster/x", "a/b", "nonsense://a/b/c", "persistent://a//x", ""])
async def test_trap_17_bad_and_v1_names_are_invalid_in_the_reply_of_each_command(client: RawClient, name: str) -> None:
    client.send(requests.lookup(1, name), requests.partitioned_metadata(2, name))
    lookup = await client.answer(1)
    assert (lookup.response, lookup.error) == (LookupResult.FAILED, ServerError.INVALID_TOPIC_NAME)
    partitions = await client.answer(2)
    assert (partitions.response, partitions.error) == (PartitionsResult.FAILED, ServerError.INVALID_TOPIC_NAME)
    with pytest.raises(InvalidTopicName):
        await client.producer(name, request_id=50)
    with pytest.raises(InvalidTopicName):
        await client.subscribe(name)


async def test_1_9_connections_above_the_limit_are_told_and_closed(world: Any) -> None:
    broker = await world.broker(max_connections=2)
    first, second = await broker.client(), await broker.client()
    third = await broker.client(handshake=False)
    refused = await third.expect(CommandType.ERROR)
    assert refused.error == ServerError.NOT_ALLOWED_ERROR
    await third.expect_close()
    await first.settle()
    second.close()
    await first.settle()
    await broker.client()


async def test_requests_above_the_limit_of_a_connection_are_refused(world: Any) -> None:
    broker = await world.broker(max_requests_per_connection=3)
    client = await broker.client()
    client.send(*(requests.lookup(number, TOPIC) for number in range(1, 11)))
    replies = [await client.answer(number) for number in range(1, 11)]
    refused = [reply for reply in replies if reply.response == LookupResult.FAILED]
    assert refused
    assert {reply.error for reply in refused} == {ServerError.TOO_MANY_REQUESTS}
    assert len(refused) < 10


async def test_producers_and_consumers_above_the_limit_of_a_connection_are_refused(world: Any) -> None:
    broker = await world.broker(max_handles_per_connection=2)
    client = await broker.client()
    await client.producer(TOPIC, 1)
    await client.subscribe(TOPIC, consumer_id=1)
    for attempt in (client.producer(TOPIC, 2), client.subscribe(TOPIC, "other", consumer_id=2)):
        with pytest.raises(Exception, match="too many producers and consumers"):
            await attempt


# Trap 7 and trap 8.


async def test_trap_7_the_same_request_id_may_be_under_way_twice(client: RawClient) -> None:
    client.send(
        requests.lookup(2, TOPIC),
        requests.subscribe(2, 1, TOPIC, "sub", SubType.SHARED),
        requests.lookup(2, TOPIC),
        requests.producer(2, 1, TOPIC),
    )
    for kind in (CommandType.LOOKUP_RESPONSE, CommandType.LOOKUP_RESPONSE, CommandType.SUCCESS, CommandType.PRODUCER_SUCCESS):
        assert (await client.expect(kind)).request_id == 2


async def test_trap_8_the_frame_limit_is_the_message_size_plus_10240(world: Any) -> None:
    broker = await world.broker(max_message_size=10_240)
    client = await broker.client()
    await client.producer(TOPIC)
    limit = 10_240 + 10_240
    frame = requests.send(1, 0, entry(b"", 0))
    client.send(requests.send(1, 0, entry(b"x" * (limit - len(frame)), 0)))
    await client.receipt()
    client.send(requests.send(1, 1, entry(b"x" * (limit + 1 - len(frame)), 1)))
    await client.expect_close()


async def test_an_oversize_frame_is_refused_by_its_length_before_its_bytes_come(world: Any) -> None:
    broker = await world.broker(max_message_size=10_240)
    client = await broker.client()
    client.send((10_240 + 10_240 - 3).to_bytes(4, "big") + b"\x00\x00\x00\x10")
    await client.expect_close()


# 1.4 Keep-alive and the liveness probe.


async def test_1_4_a_peer_that_never_connects_is_dropped_at_the_first_tick(world: Any, broker: Any) -> None:
    client = await broker.client(handshake=False)
    await world.advance(30)
    await client.expect_close()


async def test_1_4_ping_comes_every_period_and_silence_closes_at_the_next(world: Any, broker: Any, client: RawClient) -> None:
    await world.advance(30)
    await client.expect(CommandType.PING)
    client.send(PONG)
    await client.settle()
    await world.advance(30)
    await client.expect(CommandType.PING)
    assert not client.is_closed
    await world.advance(30)
    await client.expect_close()


async def test_1_4_any_command_counts_as_a_sign_of_life(world: Any, client: RawClient) -> None:
    for _ in range(3):
        await world.advance(30)
        await client.expect(CommandType.PING)
        client.flow(1, consumer_id=77)
        client.send(PING)
        await client.expect(CommandType.PONG)


async def test_1_4_a_peer_of_version_0_is_never_pinged_nor_dropped(world: Any, broker: Any) -> None:
    client = await broker.client(protocol_version=0)
    for _ in range(4):
        await world.advance(30)
    await client.settle()
    assert client.inbox == []


async def test_1_4_the_old_connection_of_a_name_is_probed_and_dropped_if_dead(world: Any, broker: Any) -> None:
    old, new = await broker.client(), await broker.client()
    await old.producer(TOPIC, name="same")
    new.send(requests.producer(5, 1, TOPIC, name="same"))
    await old.expect(CommandType.PING)
    await world.advance(4.9)
    assert not old.is_closed
    await world.advance(0.2)
    assert (await new.answer(5)).producer_name == "same"
    await old.expect_close()
    assert await new.store(b"x", 0)


async def test_1_4_the_new_producer_is_refused_if_the_old_connection_answers(broker: Any) -> None:
    old, new = await broker.client(answers_pings=True), await broker.client()
    await old.producer(TOPIC, name="same")
    with pytest.raises(ProducerBusy, match="same"):
        await new.producer(TOPIC, name="same")
    await old.settle()


# 1.10 Back-pressure.


async def test_1_10_reading_pauses_at_the_limit_of_pending_publishes_and_resumes(world: Any, until: Any) -> None:
    broker = await world.broker(max_pending_publishes_per_connection=4)
    client = await broker.client()
    await client.producer(TOPIC)
    connection = next(iter(broker.server.connections))
    world.ledgers.hold()
    for sequence_id in range(100):
        client.publish(b"x" * 60_000, sequence_id)
    await until(lambda: not connection._is_reading)
    await (await broker.client()).settle()
    assert 4 <= connection.link.pending_publishes < 20
    world.ledgers.release()
    assert [(await client.receipt()).sequence_id for _ in range(100)] == list(range(100))
    assert connection.link.pending_publishes == 0
    await client.settle()


def room(connection: Any, client: Any, size: int) -> None:
    """How much the kernel keeps between broker and client."""
    connection._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
    client._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)


@pytest.mark.inv("INV17")
async def test_a_peer_that_asks_and_never_reads_costs_bounded_memory(world: Any, until: Any) -> None:
    broker = await world.broker(write_high_water_bytes=4096)
    client = await broker.client()
    connection = next(iter(broker.server.connections))
    client.stop_reading()
    room(connection, client, 65_536)
    ask = encode(CommandType.CONSUMER_STATS, CommandConsumerStats(request_id=1, consumer_id=5))
    count = 20_000
    client.send(ask * count)
    await until(lambda: not connection._is_reading)
    await (await broker.client()).settle()
    assert connection._transport.get_write_buffer_size() < 1_000_000
    client.start_reading()
    await until(lambda: len(client.inbox) == count)


@pytest.mark.inv("INV17")
async def test_1_10_the_publish_budget_of_the_broker_stops_all_publishing_connections(world: Any, until: Any) -> None:
    broker = await world.broker(max_pending_publish_bytes=1 << 20)
    clients = [await broker.client() for _ in range(3)]
    for number, client in enumerate(clients):
        await client.producer(f"{TOPIC}-{number}")
    for client in clients:
        for sequence_id in range(30):
            client.publish(b"x" * 100_000, sequence_id)
    most = 0
    for client in clients:
        for _ in range(30):
            while CommandType.SEND_RECEIPT not in client.kinds():
                most = max(most, broker.service.budget.used)
                await asyncio.sleep(0)
            await client.receipt()
    assert broker.service.budget.used == 0
    assert 0 < most < (1 << 20) + 3 * 400_000


async def test_1_10_a_connection_paused_by_its_own_limit_resumes_although_the_budget_was_spent_meanwhile(
    world: Any, until: Any
) -> None:
    """The budget may be spent by others at the moment its own last receipt arrives; it must not sleep for ever."""
    broker = await world.broker(max_pending_publishes_per_connection=1)
    client = await broker.client()
    await client.producer(TOPIC)
    budget = broker.service.budget
    connection = next(iter(broker.server.connections))
    client.publish(b"a", 0)
    await until(lambda: not connection._is_reading)
    budget.used += budget.limit
    await client.receipt()
    client.publish(b"b", 1)
    budget.used -= budget.limit
    budget.wake()
    await client.receipt()


@pytest.mark.inv("INV17")
@pytest.mark.parametrize("sub_type", [SubType.EXCLUSIVE, SubType.SHARED])
async def test_1_10_a_slow_consumer_costs_bounded_memory_and_gets_everything_later(
    world: Any, until: Any, sub_type: SubType
) -> None:
    """The socket is full: dispatch pauses although permits are left and entries are in memory."""
    broker = await world.broker(write_high_water_bytes=65_536)
    producer, slow = await broker.client(), await broker.client()
    await producer.producer(TOPIC)
    await slow.subscribe(TOPIC, sub_type=sub_type)
    count, size = 300, 50_000
    for sequence_id in range(count):
        producer.publish(b"%05d" % sequence_id + b"x" * size, sequence_id)
        await producer.receipt()
    slow.stop_reading()
    connection = next(each for each in broker.server.connections if each.consumers)
    slow.flow(1_000_000)
    await until(lambda: not connection.link.is_writable)
    await producer.settle()
    waiting = connection._transport.get_write_buffer_size() + sum(len(piece) for piece in connection.link._out)
    assert waiting < 6_000_000, f"{waiting} bytes of {count * size} wait in memory"
    slow.start_reading()
    assert [payload[:5] for payload in await slow.payloads(count)] == [b"%05d" % number for number in range(count)]
