"""SUBSCRIBE, FLOW, MESSAGE, ACK, REDELIVER: positions, types, permits, acknowledgment and redelivery."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from braid.errors import ConsumerBusy, MetadataFailure, NotAllowed, NotReady, ProducerBusy, SubscriptionNotFound, TopicNotFound
from braid.managedledger.config import ManagedLedgerConfig
from braid.model.names import TopicName
from braid.model.positions import Position
from braid.testing.raw_client import JAVA, RawClient, id_of, metadata_of, payload_of, position_of
from braid.wire import requests
from braid.wire.client import Delivery
from braid.wire.commands import encode
from braid.wire.messages import CommandConsumerStats
from braid.wire.types import CommandType, InitialPosition, ServerError, SubType

TOPIC = "persistent://public/default/consuming"
EARLIEST = InitialPosition.EARLIEST
EXCLUSIVE, SHARED, FAILOVER = SubType.EXCLUSIVE, SubType.SHARED, SubType.FAILOVER
NO_CACHE = ManagedLedgerConfig(cache_bytes=0)


def at(delivery: Delivery) -> Position:
    return position_of(delivery.command.message_id)


async def filled(broker: Any, count: int, topic: str = TOPIC) -> list[Position]:
    """A topic with messages b"0", b"1", ...; returns their positions."""
    client = await broker.client()
    await client.producer(topic)
    return [await client.store(b"%d" % number, number) for number in range(count)]


# 5.1 and 5.2: who may subscribe, and where reading begins.


async def test_5_1_no_message_comes_before_flow(broker: Any, client: RawClient) -> None:
    await filled(broker, 3)
    await client.subscribe(TOPIC, initial=EARLIEST)
    assert await client.settle() == []
    client.flow(2)
    assert await client.payloads(2) == [b"0", b"1"]
    assert await client.settle() == []


async def test_5_1_the_same_consumer_id_again_is_answered_again(broker: Any, client: RawClient) -> None:
    await client.subscribe(TOPIC)
    await client.subscribe(TOPIC)
    assert len(broker.topic(TOPIC).subscriptions["sub"].consumers) == 1
    client.send(requests.subscribe(50, 2, TOPIC, "b", SHARED), requests.subscribe(51, 2, TOPIC, "b", SHARED))
    with pytest.raises(NotReady):
        await client.answer(51)
    await client.answer(50)


async def test_5_1_closing_while_the_consumer_is_being_created_leaves_none_behind(broker: Any, client: RawClient) -> None:
    client.send(requests.subscribe(1, 1, TOPIC, "sub", EXCLUSIVE), requests.close_consumer(2, 1))
    await client.answer(2)
    with pytest.raises(NotReady):
        await client.answer(1)
    assert broker.topic(TOPIC).subscriptions["sub"].consumers == []


async def test_a_connection_lost_while_a_consumer_is_created_leaves_none_behind(broker: Any, until: Any) -> None:
    for turns in range(12):
        client = await broker.client()
        client.send(requests.subscribe(1, 1, TOPIC, "sub", EXCLUSIVE))
        for _ in range(turns):
            await asyncio.sleep(0)
        client.close()
        await until(lambda: not broker.server.connections)
        await asyncio.sleep(0)
        topic = broker.service.topics.get(TOPIC)
        assert topic is None or all(not sub.consumers for sub in topic.subscriptions.values())


@pytest.mark.parametrize("name", ["", "pulsar.repl.x", "pulsar.dedup", "__compaction"])
async def test_5_1_reserved_subscription_names_are_refused(client: RawClient, name: str) -> None:
    with pytest.raises(ProducerBusy):
        await client.subscribe(TOPIC, name)


async def test_5_1_too_much_consumer_metadata_is_refused(client: RawClient) -> None:
    await client.subscribe(TOPIC, metadata={"k": "v" * 1023})
    with pytest.raises(MetadataFailure):
        await client.subscribe(TOPIC, consumer_id=2, metadata={"k": "v" * 1024})


async def test_5_1_an_absent_topic_is_created_only_if_forced(broker: Any, client: RawClient) -> None:
    with pytest.raises(TopicNotFound):
        await client.subscribe(TOPIC, force_topic_creation=False)
    await client.subscribe(TOPIC)


async def test_5_1_a_new_durable_subscription_needs_auto_creation_a_reader_does_not(broker: Any, client: RawClient) -> None:
    await client.subscribe(TOPIC, "old", consumer_id=1)
    await broker.policy("autoSubscriptionCreationOverride", {"allowAutoSubscriptionCreation": False})
    with pytest.raises(SubscriptionNotFound):
        await client.subscribe(TOPIC, "new", consumer_id=2)
    await client.subscribe(TOPIC, "reader", consumer_id=3, durable=False)
    await client.close_consumer(1)
    await client.subscribe(TOPIC, "old", consumer_id=4)


async def test_5_1_a_second_exclusive_consumer_is_busy_if_the_first_answers(broker: Any, client: RawClient) -> None:
    first = await broker.client(answers_pings=True)
    await first.subscribe(TOPIC)
    with pytest.raises(ConsumerBusy):
        await client.subscribe(TOPIC)
    await first.settle()


async def test_5_1_a_dead_exclusive_consumer_is_dropped_for_the_new_one(world: Any, broker: Any, client: RawClient) -> None:
    positions = await filled(broker, 3)
    first = await broker.client()
    await first.subscribe(TOPIC, initial=EARLIEST, permits=10)
    await first.messages(3)
    await first.acked(positions[0])
    client.send(requests.subscribe(9, 1, TOPIC, "sub", EXCLUSIVE))
    await first.expect(CommandType.PING)
    await world.advance(5.1)
    await client.answer(9)
    await first.expect_close()
    client.flow(10)
    assert await client.payloads(2) == [b"1", b"2"]


async def test_a_dead_reader_of_the_same_name_does_not_leave_the_new_one_deaf(
    world: Any, broker: Any, client: RawClient
) -> None:
    """The old reader's subscription ends with it; the newcomer must be attached to a living one."""
    await filled(broker, 2)
    first = await broker.client()
    await first.subscribe(TOPIC, "reader", durable=False, start_message_id=id_of(Position(-1, -1)))
    client.send(requests.subscribe(9, 1, TOPIC, "reader", EXCLUSIVE, is_durable=False, start=id_of(Position(-1, -1))))
    await first.expect(CommandType.PING)
    await world.advance(5.1)
    with pytest.raises(NotReady):
        await client.answer(9)
    await client.subscribe(TOPIC, "reader", durable=False, start_message_id=id_of(Position(-1, -1)), permits=10)
    assert await client.payloads(2) == [b"0", b"1"]


async def test_a_consumer_that_joins_while_its_subscription_is_deleted_is_told_to_try_again(
    world: Any, broker: Any, client: RawClient
) -> None:
    first = await broker.client()
    await first.subscribe(TOPIC)
    client.send(requests.subscribe(9, 1, TOPIC, "sub", EXCLUSIVE))
    await first.expect(CommandType.PING)
    await broker.topic(TOPIC).delete_subscription("sub")
    await world.advance(5.1)
    with pytest.raises(NotReady):
        await client.answer(9)
    await client.subscribe(TOPIC, permits=1)
    producer = await broker.client()
    await producer.producer(TOPIC)
    await producer.store(b"heard", 0)
    assert await client.payloads(1) == [b"heard"]


@pytest.mark.parametrize("taken", [EXCLUSIVE, SHARED, FAILOVER])
@pytest.mark.parametrize("wanted", [EXCLUSIVE, SHARED, FAILOVER])
async def test_5_1_another_type_is_busy_while_consumers_are_connected(
    broker: Any, client: RawClient, taken: SubType, wanted: SubType
) -> None:
    first = await broker.client(answers_pings=True)
    await first.subscribe(TOPIC, sub_type=taken)
    if wanted is taken and taken is not EXCLUSIVE:
        await client.subscribe(TOPIC, sub_type=wanted)
        return
    with pytest.raises(ConsumerBusy):
        await client.subscribe(TOPIC, sub_type=wanted)
    await first.close_consumer()
    await client.subscribe(TOPIC, sub_type=wanted)


async def test_5_1_durable_and_not_durable_do_not_share_a_name(client: RawClient) -> None:
    await client.subscribe(TOPIC, "durable", SHARED)
    await client.subscribe(TOPIC, "reader", SHARED, 2, durable=False)
    with pytest.raises(NotAllowed):
        await client.subscribe(TOPIC, "durable", SHARED, 3, durable=False)
    with pytest.raises(NotAllowed):
        await client.subscribe(TOPIC, "reader", SHARED, 4)


async def test_5_1_key_shared_and_compacted_reading_are_refused_clearly(broker: Any, client: RawClient) -> None:
    with pytest.raises(NotAllowed, match="compaction"):
        await client.subscribe(TOPIC, read_compacted=True)
    await client.subscribe(TOPIC, "ks", SubType.KEY_SHARED, 1)
    with pytest.raises(NotAllowed, match="Key_Shared"):
        await client.subscribe(TOPIC, "ks", SubType.KEY_SHARED, 2)


async def test_5_2_a_new_durable_subscription_begins_at_the_end_or_the_start(broker: Any, client: RawClient) -> None:
    positions = await filled(broker, 2)
    await client.subscribe(TOPIC, "latest", consumer_id=1, permits=10)
    await client.subscribe(TOPIC, "earliest", consumer_id=2, permits=10, initial=EARLIEST)
    assert [(each.command.consumer_id, at(each)) for each in await client.messages(2)] == [(2, at) for at in positions]
    producer = await broker.client()
    await producer.producer(TOPIC)
    await producer.store(b"new", 9)
    assert sorted(each.command.consumer_id for each in await client.messages(2)) == [1, 2]


async def test_5_2_an_existing_subscription_goes_on_where_it_was(broker: Any, client: RawClient) -> None:
    positions = await filled(broker, 3)
    await client.subscribe(TOPIC, initial=EARLIEST, permits=10)
    await client.messages(3)
    await client.acked(positions[0])
    await client.close_consumer()
    await client.subscribe(TOPIC, permits=10, start_message_id=id_of(positions[2]))
    assert await client.payloads(2) == [b"1", b"2"]


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        pytest.param(lambda all: None, [], id="absent is latest"),
        pytest.param(lambda all: Position(-1, -1), [b"0", b"1", b"2", b"3"], id="earliest"),
        pytest.param(lambda all: Position(2**63 - 1, 2**63 - 1), [], id="latest"),
        pytest.param(lambda all: all[1], [b"1", b"2", b"3"], id="inclusive"),
        pytest.param(lambda all: all[3], [b"3"], id="the last one"),
        pytest.param(lambda all: Position(all[0].ledger_id, -1), [b"0", b"1", b"2", b"3"], id="before a ledger"),
        pytest.param(lambda all: Position(all[3].ledger_id, 1000), [], id="beyond the end"),
    ],
)
async def test_5_2_trap_4_a_reader_starts_at_the_given_entry_inclusive(
    broker: Any, client: RawClient, start: Any, expected: list[bytes]
) -> None:
    positions = await filled(broker, 4)
    begin = start(positions)
    fields: dict[str, Any] = {} if begin is None else {"start_message_id": id_of(begin)}
    await client.subscribe(TOPIC, "reader", durable=False, permits=10, **fields)
    assert await client.payloads(len(expected)) == expected
    assert await client.settle() == []


async def test_5_2_a_reader_s_start_beyond_the_end_means_the_initial_position(broker: Any, client: RawClient) -> None:
    positions = await filled(broker, 2)
    beyond = id_of(Position(positions[0].ledger_id, 1000))
    await client.subscribe(TOPIC, "r", durable=False, start_message_id=beyond, initial=EARLIEST, permits=10)
    assert await client.payloads(2) == [b"0", b"1"]


async def test_5_2_a_reader_s_position_ends_with_its_last_consumer(broker: Any, client: RawClient) -> None:
    await filled(broker, 2)
    await client.subscribe(TOPIC, "reader", durable=False, permits=10, start_message_id=id_of(Position(-1, -1)))
    await client.messages(2)
    await client.close_consumer()
    assert broker.topic(TOPIC).subscriptions == {}
    assert "reader" not in broker.topic(TOPIC).log.cursors


async def test_start_message_rollback_begins_that_long_ago(world: Any, broker: Any, client: RawClient) -> None:
    producer = await broker.client()
    await producer.producer(TOPIC)
    for number in range(4):
        await producer.store(b"%d" % number, number)
        await world.advance(5)
        producer.inbox.clear()
    await client.subscribe(TOPIC, start_message_rollback_duration_sec=12, permits=10)
    assert await client.payloads(2) == [b"2", b"3"]


# 5.3 Types.


async def test_5_3_shared_goes_round_among_consumers_of_the_best_priority(world: Any) -> None:
    broker = await world.broker(shared_turn_entries=2)
    best, other, low = [await broker.client() for _ in range(3)]
    await low.subscribe(TOPIC, sub_type=SHARED, priority_level=1, permits=100)
    await best.subscribe(TOPIC, sub_type=SHARED, permits=4)
    await other.subscribe(TOPIC, sub_type=SHARED, permits=4)
    await filled(broker, 12)
    assert len(await best.messages(4)) == 4
    assert len(await other.messages(4)) == 4
    assert await low.payloads(4) == [b"8", b"9", b"10", b"11"]


async def test_5_3_failover_on_a_plain_topic_takes_the_first_by_priority_then_name(broker: Any) -> None:
    clients = {name: await broker.client() for name in ("b", "a", "c")}
    for name, client in clients.items():
        await client.subscribe(TOPIC, sub_type=FAILOVER, consumer_name=name, priority_level=1 if name == "a" else 0, permits=10)
    topic = broker.topic(TOPIC)
    assert topic.subscriptions["sub"].dispatcher.active.info.name == "b"
    positions = await filled(broker, 2)
    assert await clients["b"].payloads(2) == [b"0", b"1"]
    await clients["b"].acked(positions[0])
    clients["b"].close()
    assert await clients["c"].payloads(1) == [b"1"]
    clients["c"].close()
    assert await clients["a"].payloads(1) == [b"1"]


async def test_5_3_failover_tells_everybody_who_is_active(broker: Any) -> None:
    b, a, old = await broker.client(), await broker.client(), await broker.client(protocol_version=11)
    await b.subscribe(TOPIC, sub_type=FAILOVER, consumer_name="b")
    assert (await b.expect(CommandType.ACTIVE_CONSUMER_CHANGE)).is_active
    await a.subscribe(TOPIC, sub_type=FAILOVER, consumer_name="a")
    assert (await a.expect(CommandType.ACTIVE_CONSUMER_CHANGE)).is_active
    assert not (await b.expect(CommandType.ACTIVE_CONSUMER_CHANGE)).is_active
    await old.subscribe(TOPIC, sub_type=FAILOVER, consumer_name="z")
    await old.settle()
    assert old.inbox == []
    await a.settle()
    assert a.inbox == []
    a.close()
    assert (await b.expect(CommandType.ACTIVE_CONSUMER_CHANGE)).is_active


async def test_5_3_exclusive_and_shared_are_not_told(client: RawClient) -> None:
    await client.subscribe(TOPIC, "a", EXCLUSIVE, 1)
    await client.subscribe(TOPIC, "b", SHARED, 2)
    assert await client.settle() == []


async def test_5_3_failover_on_partitions_spreads_over_the_consumers(broker: Any, until: Any) -> None:
    await broker.service.create_partitioned(TopicName.parse("spread"), 4)
    clients = {name: await broker.client() for name in ("a", "b", "c")}
    for name, client in clients.items():
        for number in range(4):
            topic = f"persistent://public/default/spread-partition-{number}"
            await client.subscribe(topic, sub_type=FAILOVER, consumer_id=number, consumer_name=name)

    def actives() -> list[str]:
        return [
            broker.topic(f"persistent://public/default/spread-partition-{number}")
            .subscriptions["sub"]
            .dispatcher.active.info.name
            for number in range(4)
        ]

    assert actives() == ["a", "b", "c", "a"]
    clients["b"].close()
    await until(lambda: actives() == ["a", "c", "a", "c"])


async def test_5_3_failover_hands_over_at_the_first_unacknowledged_entry(broker: Any) -> None:
    a, b = await broker.client(), await broker.client()
    await a.subscribe(TOPIC, sub_type=FAILOVER, consumer_name="a", permits=100)
    await b.subscribe(TOPIC, sub_type=FAILOVER, consumer_name="b", permits=100)
    positions = await filled(broker, 5)
    await a.messages(5)
    await a.acked(positions[0], positions[1], positions[3])
    await a.close_consumer()
    assert await b.payloads(2) == [b"2", b"4"]
    assert CommandType.MESSAGE not in b.kinds()


# 5.4 and 5.5: permits and what a MESSAGE carries.


async def test_5_4_trap_11_permits_count_messages_and_may_go_negative(broker: Any, client: RawClient) -> None:
    producer = await broker.client()
    await producer.producer(TOPIC)
    await client.subscribe(TOPIC, permits=1)
    for number in range(3):
        await producer.store(b"", number, batch=[b"x"] * 5)
    assert len(await client.messages(1)) == 1
    client.flow(4)
    assert await client.settle() == []
    client.flow(1)
    assert len(await client.messages(1)) == 1
    client.flow(5)
    assert len(await client.messages(1)) == 1


@pytest.mark.parametrize("sub_type", [EXCLUSIVE, SHARED])
async def test_trap_11_already_acknowledged_indexes_are_refunded(broker: Any, client: RawClient, sub_type: SubType) -> None:
    producer = await broker.client()
    await producer.producer(TOPIC)
    await client.subscribe(TOPIC, sub_type=sub_type, permits=10)
    position = await producer.store(b"", 0, batch=[b"x"] * 5)
    await producer.store(b"", 1, batch=[b"x"] * 5)
    await client.messages(2)
    await client.acked(id_of(position, [0b00011]))
    await client.close_consumer()
    await client.subscribe(TOPIC, sub_type=sub_type, permits=3)
    first, second = await client.messages(2)
    assert list(first.command.ack_set) == [0b00011]
    assert list(second.command.ack_set) == []
    consumer = broker.topic(TOPIC).subscriptions["sub"].consumers[0]
    assert consumer.permits == 3 - 2 - 5


async def test_5_4_permits_start_again_at_zero_after_a_new_subscribe(broker: Any, client: RawClient) -> None:
    await filled(broker, 1)
    await client.subscribe(TOPIC, initial=EARLIEST, permits=1000)
    await client.messages(1)
    await client.close_consumer()
    await client.subscribe(TOPIC)
    assert await client.settle() == []


async def test_5_5_a_message_names_its_consumer_entry_and_partition_and_omits_what_is_not_so(
    broker: Any, client: RawClient
) -> None:
    await broker.service.create_partitioned(TopicName.parse("parts"), 3)
    partition = "persistent://public/default/parts-partition-2"
    await client.subscribe(partition, consumer_id=7, permits=5)
    positions = await filled(broker, 1, partition)
    message = (await client.messages(1))[0]
    assert message.command.consumer_id == 7
    assert (at(message), message.command.message_id.partition) == (positions[0], 2)
    assert not message.command.HasField("redelivery_count")
    assert not message.command.HasField("consumer_epoch")
    assert list(message.command.ack_set) == []
    assert message.command.message_id.batch_index == -1
    assert message.broker_metadata is None
    assert message.is_intact


@pytest.mark.parametrize("logs", [ManagedLedgerConfig(), NO_CACHE], ids=["cached", "stored"])
async def test_5_5_entries_come_out_byte_for_byte_as_they_went_in(world: Any, logs: ManagedLedgerConfig) -> None:
    broker = await world.broker(logs)
    client = await broker.client()
    await client.producer(TOPIC)
    await client.subscribe(TOPIC, permits=10)
    await client.store(b"payload" * 1000, 4, producer_name="me", partition_key="key", compression=2, uncompressed_size=3)
    message = (await client.messages(1))[0]
    assert payload_of(message) == b"payload" * 1000
    assert metadata_of(message).partition_key == "key"


async def test_5_5_consumer_epochs_are_stamped_once_declared(broker: Any, client: RawClient) -> None:
    positions = await filled(broker, 2)
    await client.subscribe(TOPIC, initial=EARLIEST, permits=10, consumer_epoch=0)
    assert [each.command.consumer_epoch for each in await client.messages(2)] == [0, 0]
    client.redeliver(epoch=3)
    again = await client.messages(2)
    assert [(at(each), each.command.consumer_epoch) for each in again] == [(positions[0], 3), (positions[1], 3)]
    await client.subscribe(TOPIC, "none", consumer_id=2, initial=EARLIEST, permits=10, consumer_epoch=2**64 - 1)
    assert not (await client.messages(1))[0].command.HasField("consumer_epoch")


# 5.6 ACK.


async def test_5_6_individual_acks_move_the_mark_over_holes(broker: Any, client: RawClient) -> None:
    positions = await filled(broker, 5)
    await client.subscribe(TOPIC, initial=EARLIEST, permits=10)
    await client.messages(5)
    cursor = broker.topic(TOPIC).subscriptions["sub"].cursor
    assert not (await client.acked(positions[1], positions[3])).HasField("error")
    assert cursor.backlog() == 3
    await client.acked(positions[0])
    assert cursor.mark_delete == positions[1]
    await client.acked(positions[2])
    assert cursor.mark_delete == positions[3]


async def test_5_6_a_cumulative_ack_takes_one_id_and_is_ignored_on_shared(broker: Any, client: RawClient) -> None:
    positions = await filled(broker, 4)
    await client.subscribe(TOPIC, initial=EARLIEST, permits=10)
    await client.subscribe(TOPIC, "shared", SHARED, 2, initial=EARLIEST, permits=10)
    await client.messages(8)
    cursor = broker.topic(TOPIC).subscriptions["sub"].cursor
    await client.acked(positions[0], positions[2], cumulative=True)
    assert cursor.backlog() == 4
    await client.acked(positions[2], cumulative=True)
    assert cursor.mark_delete == positions[2]
    await client.acked(positions[2], consumer_id=2, cumulative=True)
    assert broker.topic(TOPIC).subscriptions["shared"].cursor.backlog() == 4


@pytest.mark.parametrize("sub_type", [EXCLUSIVE, SHARED])
async def test_5_6_trap_12_ack_set_bits_are_what_is_still_open(broker: Any, client: RawClient, sub_type: SubType) -> None:
    producer = await broker.client()
    await producer.producer(TOPIC)
    await client.subscribe(TOPIC, sub_type=sub_type, permits=10)
    position = await producer.store(b"", 0, batch=[b"x"] * 5)
    await client.messages(1)
    cursor = broker.topic(TOPIC).subscriptions["sub"].cursor
    await client.acked(id_of(position, [30]))
    await client.acked(id_of(position, [0b11101]))
    assert cursor.backlog() == 1
    assert cursor.unacked_mask(position) == 28
    await client.acked(id_of(position, [0b00011]))
    assert cursor.backlog() == 0
    assert broker.topic(TOPIC).subscriptions["sub"].consumers[0].unacked == 0


async def test_trap_12_an_empty_ack_set_means_the_whole_entry(broker: Any, client: RawClient) -> None:
    producer = await broker.client()
    await producer.producer(TOPIC)
    await client.subscribe(TOPIC, permits=10)
    position = await producer.store(b"", 0, batch=[b"x"] * 5)
    await client.messages(1)
    await client.acked(id_of(position, [30]))
    await client.acked(id_of(position))
    assert broker.topic(TOPIC).subscriptions["sub"].cursor.backlog() == 0


async def test_5_6_cumulative_with_an_ack_set_keeps_part_of_the_entry(broker: Any, client: RawClient) -> None:
    producer = await broker.client()
    await producer.producer(TOPIC)
    await client.subscribe(TOPIC, permits=100)
    await producer.store(b"0", 0)
    batch = await producer.store(b"", 1, batch=[b"x"] * 4)
    await client.messages(2)
    await client.acked(id_of(batch, [0b1100]), cumulative=True)
    await client.close_consumer()
    await client.subscribe(TOPIC, permits=100)
    again = await client.messages(1)
    assert (at(again[0]), list(again[0].command.ack_set)) == (batch, [0b1100])
    assert await client.settle() == []


async def test_5_6_old_and_unknown_positions_succeed_and_one_beyond_the_end_fails_alone(broker: Any, client: RawClient) -> None:
    positions = await filled(broker, 3)
    await client.subscribe(TOPIC, sub_type=SHARED, initial=EARLIEST, permits=10)
    await client.messages(3)
    assert not (await client.acked(positions[0])).HasField("error")
    assert not (await client.acked(positions[0], Position(0, 5))).HasField("error")
    refused = await client.acked(positions[1], Position(10**6, 0))
    assert refused.HasField("error")
    subscription = broker.topic(TOPIC).subscriptions["sub"]
    assert subscription.consumers[0].unacked == subscription.cursor.backlog() == 2
    assert (await client.acked(id_of(Position(10**6, 0), [1]))).HasField("error")
    assert (await client.acked(Position(10**6, 0), cumulative=True)).HasField("error") is False


async def test_5_6_on_shared_an_ack_may_name_what_another_consumer_got(broker: Any) -> None:
    a, b = await broker.client(), await broker.client()
    await a.subscribe(TOPIC, sub_type=SHARED, permits=10)
    await b.subscribe(TOPIC, sub_type=SHARED)
    positions = await filled(broker, 2)
    await a.messages(2)
    await b.acked(*positions)
    subscription = broker.topic(TOPIC).subscriptions["sub"]
    assert subscription.cursor.backlog() == 0
    assert [consumer.unacked for consumer in subscription.consumers] == [0, 0]
    assert subscription.dispatcher.unacked == 0


async def test_5_6_an_ack_without_request_id_is_never_answered_one_of_an_unknown_transaction_is_refused(
    broker: Any, client: RawClient
) -> None:
    positions = await filled(broker, 1)
    await client.subscribe(TOPIC, initial=EARLIEST, permits=10)
    await client.messages(1)
    client.ack(positions[0])
    client.ack(Position(10**6, 0))
    assert await client.settle() == []
    client.send(requests.ack(1, [id_of(positions[0])], request_id=88, txn=(0, 1)))
    refused = await client.expect(CommandType.ACK_RESPONSE)
    assert (refused.request_id, refused.error) == (88, ServerError.TRANSACTION_CONFLICT)


# Acknowledgments over restarts.


@pytest.mark.parametrize("end", ["stop", "kill"])
@pytest.mark.parametrize("sub_type", [EXCLUSIVE, SHARED])
async def test_receipted_acks_survive_a_restart_others_after_a_clean_one(world: Any, end: str, sub_type: SubType) -> None:
    broker = await world.broker()
    client = await broker.client()
    await client.producer(TOPIC)
    await client.subscribe(TOPIC, sub_type=sub_type, permits=100)
    positions = [await client.store(b"%d" % number, number) for number in range(5)]
    batch = await client.store(b"", 5, batch=[b"x"] * 3)
    await client.messages(6)
    await client.acked(positions[0], positions[2], id_of(batch, [0b110]))
    client.ack(positions[3])
    await client.settle()
    await (broker.stop() if end == "stop" else broker.kill())
    client = await (await world.broker()).client()
    await client.subscribe(TOPIC, sub_type=sub_type, permits=100)
    expected = [positions[1], positions[4], batch] if end == "stop" else [positions[1], positions[3], positions[4], batch]
    again = await client.messages(len(expected))
    assert [at(each) for each in again] == expected
    assert list(again[-1].command.ack_set) == [0b110]
    assert {each.command.redelivery_count for each in again} == {0}
    assert await client.settle() == []


@pytest.mark.inv("INV1")
@pytest.mark.parametrize("end", ["stop", "kill"])
async def test_receipted_messages_and_subscriptions_survive_a_restart(world: Any, end: str) -> None:
    broker = await world.broker()
    client = await broker.client()
    await client.subscribe(TOPIC, "sub", consumer_id=1)
    positions = await filled(broker, 50)
    await (broker.stop() if end == "stop" else broker.kill())
    client = await (await world.broker()).client()
    await client.subscribe(TOPIC, "sub", permits=1000)
    assert [at(each) for each in await client.messages(50)] == positions
    last = await client.last_message_id()
    assert position_of(last.last_message_id) == positions[-1]


# 5.7 Redelivery.


async def test_5_7_shared_redelivers_in_order_before_new_ones_and_counts(broker: Any, client: RawClient) -> None:
    positions = await filled(broker, 4)
    await client.subscribe(TOPIC, sub_type=SHARED, initial=EARLIEST, permits=4)
    await client.messages(4)
    client.redeliver(positions[2], positions[0])
    producer = await broker.client()
    await producer.producer(TOPIC)
    new = await producer.store(b"new", 9)
    client.flow(10)
    again = await client.messages(3)
    assert [(at(each), each.command.redelivery_count) for each in again] == [(positions[0], 1), (positions[2], 1), (new, 0)]
    client.redeliver()
    again = await client.messages(5)
    assert [each.command.redelivery_count for each in again] == [2, 1, 2, 1, 1]


async def test_5_7_an_acknowledged_entry_is_not_redelivered_and_its_count_forgotten(broker: Any, client: RawClient) -> None:
    positions = await filled(broker, 3)
    await client.subscribe(TOPIC, sub_type=SHARED, initial=EARLIEST, permits=3)
    await client.messages(3)
    client.redeliver(positions[0], positions[1])
    await client.acked(positions[0])
    client.redeliver(positions[0])
    client.flow(10)
    assert [at(each) for each in await client.messages(1)] == [positions[1]]
    assert await client.settle() == []
    assert broker.topic(TOPIC).subscriptions["sub"].dispatcher.counts.keys() == {positions[1]}


async def test_5_7_a_disconnect_gives_entries_to_the_others_without_counting(broker: Any) -> None:
    a, b = await broker.client(), await broker.client()
    positions = await filled(broker, 4)
    await a.subscribe(TOPIC, sub_type=SHARED, initial=EARLIEST, permits=4)
    await a.messages(4)
    await a.acked(positions[1])
    await b.subscribe(TOPIC, sub_type=SHARED, permits=100)
    a.close()
    again = await b.messages(3)
    assert [(at(each), each.command.redelivery_count) for each in again] == [
        (position, 0) for number, position in enumerate(positions) if number != 1
    ]


async def test_5_7_counts_are_forgotten_when_the_last_consumer_leaves(broker: Any, client: RawClient) -> None:
    await filled(broker, 1)
    await client.subscribe(TOPIC, sub_type=SHARED, initial=EARLIEST, permits=10)
    await client.messages(1)
    client.redeliver()
    assert (await client.messages(1))[0].command.redelivery_count == 1
    await client.close_consumer()
    await client.subscribe(TOPIC, sub_type=SHARED, permits=10)
    assert (await client.messages(1))[0].command.redelivery_count == 0


@pytest.mark.parametrize("sub_type", [EXCLUSIVE, FAILOVER])
async def test_5_7_exclusive_and_failover_rewind_and_never_count(broker: Any, client: RawClient, sub_type: SubType) -> None:
    positions = await filled(broker, 3)
    await client.subscribe(TOPIC, sub_type=sub_type, initial=EARLIEST, permits=100)
    await client.messages(3)
    await client.acked(positions[1])
    client.redeliver(positions[2])
    again = await client.messages(2)
    assert [(at(each), each.command.redelivery_count) for each in again] == [(positions[0], 0), (positions[2], 0)]


async def test_5_7_only_the_active_failover_consumer_may_ask(broker: Any) -> None:
    a, b = await broker.client(), await broker.client()
    await filled(broker, 2)
    await a.subscribe(TOPIC, sub_type=FAILOVER, consumer_name="a", initial=EARLIEST, permits=100)
    await b.subscribe(TOPIC, sub_type=FAILOVER, consumer_name="b", permits=100)
    await a.messages(2)
    b.redeliver()
    await b.settle()
    await a.settle()
    assert CommandType.MESSAGE not in a.kinds()


@pytest.mark.parametrize("logs", [ManagedLedgerConfig(), NO_CACHE], ids=["cached", "stored"])
async def test_redelivery_works_from_memory_and_from_storage(world: Any, logs: ManagedLedgerConfig) -> None:
    broker = await world.broker(logs)
    client = await broker.client()
    positions = await filled(broker, 30)
    await client.subscribe(TOPIC, sub_type=SHARED, initial=EARLIEST, permits=1000)
    assert [at(each) for each in await client.messages(30)] == positions
    client.redeliver(*positions[::3])
    assert [at(each) for each in await client.messages(10)] == positions[::3]
    client.redeliver()
    assert [at(each) for each in await client.messages(30)] == positions


async def test_a_type_change_while_a_read_is_under_way_delivers_each_entry_once(world: Any) -> None:
    """The old dispatcher's read must not move the cursor under the new one."""
    broker = await world.broker(NO_CACHE)
    positions = await filled(broker, 20)
    for turns in range(8):
        client = await broker.client()
        name = f"sub-{turns}"
        await client.subscribe(TOPIC, name, EXCLUSIVE, 1, initial=EARLIEST)
        client.send(requests.flow(1, 1000), requests.close_consumer(91, 1), requests.subscribe(92, 2, TOPIC, name, SHARED))
        for _ in range(turns):
            await asyncio.sleep(0)
        await client.answer(92)
        client.flow(1000, 2)
        mine: list[Delivery] = []
        while len(mine) < 20:
            mine += [each for each in await client.messages(1) if each.command.consumer_id == 2]
        await client.settle()
        assert [at(each) for each in mine] == positions
        assert CommandType.MESSAGE not in client.kinds()
        assert broker.topic(TOPIC).subscriptions[name].dispatcher.unacked == 20


# Chunks and 5.14 unacknowledged limits.


async def test_3_6_all_chunks_of_a_message_go_to_one_shared_consumer(world: Any) -> None:
    broker = await world.broker(shared_turn_entries=1)
    a, b, producer = [await broker.client() for _ in range(3)]
    for client in (a, b):
        await client.subscribe(TOPIC, sub_type=SHARED, permits=100)
    await producer.producer(TOPIC, 1, name="x")
    await producer.producer(TOPIC, 2, name="y")
    for number in range(4):
        for producer_id, name in ((1, "x"), (2, "y")):
            await producer.store(b"%d" % number, 0, producer_id, chunk=(f"{name}-0", number, 4))
    await a.settle()
    await b.settle()
    got = [{metadata_of(each).uuid for each in client.inbox if isinstance(each, Delivery)} for client in (a, b)]
    assert sorted(map(len, got)) == [1, 1]
    assert got[0] != got[1]
    assert broker.topic(TOPIC).subscriptions["sub"].dispatcher._chunk_owner == {}


async def test_3_6_when_the_owner_of_a_chunk_leaves_another_gets_all_of_it(world: Any) -> None:
    broker = await world.broker(shared_turn_entries=1)
    a, b, producer = [await broker.client() for _ in range(3)]
    await a.subscribe(TOPIC, sub_type=SHARED, permits=1)
    await b.subscribe(TOPIC, sub_type=SHARED)
    await producer.producer(TOPIC, name="x")
    for number in range(3):
        await producer.store(b"%d" % number, 0, chunk=("x-0", number, 3))
    await a.messages(1)
    b.flow(100)
    assert CommandType.MESSAGE not in [kind for _ in [await b.settle()] for kind in b.kinds()]
    a.close()
    assert await b.payloads(3) == [b"0", b"1", b"2"]


@pytest.mark.inv("INV17")
async def test_5_14_a_consumer_stops_at_its_limit_and_resumes_at_half(world: Any) -> None:
    broker = await world.broker(max_unacked_per_consumer=4)
    client = await broker.client()
    positions = await filled(broker, 12)
    await client.subscribe(TOPIC, sub_type=SHARED, initial=EARLIEST, permits=100)
    await client.messages(4)
    assert await client.settle() == []
    await client.acked(positions[0])
    assert await client.settle() == []
    await client.acked(positions[1])
    assert [at(each) for each in await client.messages(2)] == positions[4:6]
    assert await client.settle() == []
    client.redeliver(positions[4], positions[5])
    assert len(await client.messages(2)) == 2


@pytest.mark.inv("INV17")
async def test_5_14_a_subscription_stops_at_its_limit_and_resumes_at_half(world: Any) -> None:
    broker = await world.broker(max_unacked_per_subscription=6, shared_turn_entries=3)
    a, b = await broker.client(), await broker.client()
    for client in (a, b):
        await client.subscribe(TOPIC, sub_type=SHARED, permits=100)
    await filled(broker, 20)
    await a.settle()
    await b.settle()
    assert len(a.inbox) + len(b.inbox) == 6
    held = [at(each) for each in [*a.inbox, *b.inbox] if isinstance(each, Delivery)]
    a.inbox.clear()
    b.inbox.clear()
    await a.acked(*held[:2])
    await b.settle()
    assert a.inbox == b.inbox == []
    await a.acked(held[2])
    await a.settle()
    await b.settle()
    assert len(a.inbox) + len(b.inbox) == 3


async def test_5_14_a_disconnect_frees_the_limit_of_the_subscription(world: Any) -> None:
    broker = await world.broker(max_unacked_per_subscription=4)
    a, b = await broker.client(), await broker.client()
    positions = await filled(broker, 4)
    await a.subscribe(TOPIC, sub_type=SHARED, initial=EARLIEST, permits=4)
    await a.messages(4)
    await b.subscribe(TOPIC, sub_type=SHARED, permits=100)
    a.close()
    assert [at(each) for each in await b.messages(4)] == positions


async def test_5_14_exclusive_and_readers_have_no_limit(world: Any) -> None:
    broker = await world.broker(max_unacked_per_consumer=2, max_unacked_per_subscription=2)
    client = await broker.client()
    await filled(broker, 6)
    await client.subscribe(TOPIC, initial=EARLIEST, permits=100)
    await client.messages(6)
    start = id_of(Position(-1, -1))
    await client.subscribe(TOPIC, "reader", SHARED, 2, durable=False, start_message_id=start, permits=100)
    await client.messages(6)


# 5.10, 5.11, 5.16.


async def test_5_10_only_the_last_consumer_may_unsubscribe_unless_it_insists(broker: Any) -> None:
    a, b = await broker.client(), await broker.client()
    await a.subscribe(TOPIC, sub_type=SHARED)
    await b.subscribe(TOPIC, sub_type=SHARED)
    with pytest.raises(MetadataFailure):
        await a.unsubscribe()
    await a.unsubscribe(force=True)
    await b.expect(CommandType.CLOSE_CONSUMER)
    topic = broker.topic(TOPIC)
    assert topic.subscriptions == {}
    assert "sub" not in topic.log.cursors
    with pytest.raises(MetadataFailure):
        await b.unsubscribe()


async def test_5_10_an_unsubscribed_name_starts_afresh(broker: Any, client: RawClient) -> None:
    await client.subscribe(TOPIC)
    await filled(broker, 2)
    await client.unsubscribe()
    await client.subscribe(TOPIC, permits=100)
    assert await client.settle() == []


@pytest.mark.parametrize(("version", "told"), [(JAVA, True), ("Pulsar-CPP-v4.2.0", False), ("Pulsar-Go-0.1", False)])
async def test_5_11_trap_1_only_clients_that_understand_it_are_told_the_end_of_a_topic(
    broker: Any, version: str, told: bool
) -> None:
    client = await broker.client(client_version=version)
    positions = await filled(broker, 1)
    await client.subscribe(TOPIC, initial=EARLIEST, permits=100)
    await client.messages(1)
    await broker.topic(TOPIC).terminate()
    await client.settle()
    assert client.inbox == []
    await client.acked(positions[0])
    await client.settle()
    assert (CommandType.REACHED_END_OF_TOPIC in client.kinds()) is told
    client.inbox.clear()
    await client.close_consumer()
    await client.subscribe(TOPIC, permits=100)
    await client.settle()
    assert (CommandType.REACHED_END_OF_TOPIC in client.kinds()) is told


async def test_5_16_consumer_stats(broker: Any, client: RawClient) -> None:
    await filled(broker, 3)
    await client.subscribe(TOPIC, sub_type=SHARED, initial=EARLIEST, permits=2, consumer_name="me")
    await client.messages(2)
    client.send(encode(CommandType.CONSUMER_STATS, CommandConsumerStats(request_id=70, consumer_id=1)))
    stats = await client.answer(70)
    assert (stats.consumerName, stats.type, stats.unackedMessages, stats.msgBacklog) == ("me", "Shared", 2, 3)


async def test_trimmed_entries_are_skipped_by_redelivery(world: Any) -> None:
    """Retention deleted what a consumer still held: it cannot be sent again, and nothing hangs on it."""
    broker = await world.broker(
        ManagedLedgerConfig(max_entries_per_ledger=2, min_ledger_age_ms=0, cache_bytes=0), retention_minutes=-1, retention_mb=-1
    )
    client = await broker.client()
    await client.producer(TOPIC)
    positions = []
    for number in range(6):
        positions.append(await client.store(b"%d" % number, number))
        await client.settle()
    await client.subscribe(TOPIC, "reader", SHARED, durable=False, start_message_id=id_of(Position(-1, -1)), permits=100)
    await client.messages(6)
    await broker.policy("retention_policies", {"retentionTimeInMinutes": 0, "retentionSizeInMB": 0})
    log = broker.topic(TOPIC).log
    assert await log.trim() == 2
    client.redeliver()
    assert [at(each) for each in await client.messages(2)] == positions[4:]
    assert await client.settle() == []
    await client.close_consumer()
    await client.subscribe(TOPIC, "reader", durable=False, start_message_id=id_of(positions[0]), permits=100)
    assert [at(each) for each in await client.messages(2)] == positions[4:]


# The topic ends under its consumers.


@pytest.mark.parametrize("sub_type", [EXCLUSIVE, SHARED])
async def test_an_unload_in_the_middle_of_reading_loses_nothing(
    world: Any, sub_type: SubType, caplog: pytest.LogCaptureFixture
) -> None:
    broker = await world.broker(NO_CACHE)
    positions = await filled(broker, 30)
    for turns in range(10):
        client = await broker.client()
        name = f"sub-{turns}"
        await client.subscribe(TOPIC, name, sub_type, initial=EARLIEST, permits=1000)
        for _ in range(turns):
            await asyncio.sleep(0)
        await broker.service.unload(broker.topic(TOPIC))
        await client.expect(CommandType.CLOSE_CONSUMER)
        await client.settle()
        client.inbox.clear()
        await client.subscribe(TOPIC, name, sub_type, permits=1000)
        assert [at(each) for each in await client.messages(30)] == positions
        client.close()
    assert [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")] == []


async def test_clients_that_come_back_during_an_unload_get_the_new_topic(broker: Any, client: RawClient) -> None:
    for epoch in range(5):
        await client.producer(TOPIC, epoch=2 * epoch)
        old = broker.topic(TOPIC)
        unload = asyncio.get_running_loop().create_task(broker.service.unload(old))
        await client.expect(CommandType.CLOSE_PRODUCER)
        await client.producer(TOPIC, epoch=2 * epoch + 1)
        await unload
        assert broker.topic(TOPIC) is not old
        assert await client.store(b"x", epoch)
        await client.close_producer()


async def test_a_broker_that_stops_tells_its_clients_and_answers_no_more(
    broker: Any, client: RawClient, caplog: pytest.LogCaptureFixture, until: Any
) -> None:
    await client.producer(TOPIC)
    await client.subscribe(TOPIC, permits=1000)
    stop = asyncio.get_running_loop().create_task(broker.stop())
    for number in range(50):
        client.publish(b"x", number)
        client.send(requests.lookup(1000 + number, TOPIC), requests.ack(1, [], request_id=2000 + number))
        await asyncio.sleep(0)
        if client.is_closed:
            break
    await stop
    await client.expect_close()
    assert CommandType.CLOSE_PRODUCER in client.kinds()
    assert CommandType.CLOSE_CONSUMER in client.kinds()
    assert [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")] == []


@pytest.mark.parametrize("sub_type", [EXCLUSIVE, SHARED])
async def test_a_read_that_goes_on_failing_is_logged_once_a_minute(
    world: Any, sub_type: SubType, caplog: pytest.LogCaptureFixture
) -> None:
    """A damaged ledger stays so until somebody comes, and it is tried every second."""
    broker = await world.broker(NO_CACHE)
    await filled(broker, 5)
    client = await broker.client()
    world.ledgers.is_unreadable = True
    await client.subscribe(TOPIC, sub_type=sub_type, initial=EARLIEST, permits=100)
    await client.settle()
    for _second in range(70):
        await world.advance(1)
        await client.settle()
    assert caplog.text.count("for subscription sub failed") == 2
    world.ledgers.is_unreadable = False
    await world.advance(1)
    await client.messages(5)


@pytest.mark.parametrize("sub_type", [EXCLUSIVE, SHARED])
async def test_a_failing_read_is_tried_again_and_loses_nothing(world: Any, sub_type: SubType) -> None:
    broker = await world.broker(NO_CACHE)
    positions = await filled(broker, 5)
    client = await broker.client()
    world.ledgers.is_unreadable = True
    await client.subscribe(TOPIC, sub_type=sub_type, initial=EARLIEST, permits=100)
    await client.settle()
    await world.advance(1)
    assert await client.settle() == []
    world.ledgers.is_unreadable = False
    await world.advance(1)
    assert [at(each) for each in await client.messages(5)] == positions
    client.redeliver()
    assert [at(each) for each in await client.messages(5)] == positions
