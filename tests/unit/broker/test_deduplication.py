"""Deduplication by producer name and sequence id: the seven rules of protocol.md 4.4, over restarts and failures."""

from __future__ import annotations

from typing import Any, cast

import pytest

from braid.broker.dedup import CURSOR_NAME, MessageDeduplication
from braid.managedledger.config import ManagedLedgerConfig
from braid.model.positions import Position
from braid.testing.raw_client import RawClient, entry, payload_of, position_of
from braid.wire import requests
from braid.wire.types import CommandType, InitialPosition, ServerError

TOPIC = "persistent://public/default/dedup"
NOWHERE = Position(-1, -1)


@pytest.fixture
async def broker(world: Any) -> Any:
    return await world.broker(deduplication=True)


@pytest.fixture
async def client(broker: Any) -> RawClient:
    made: RawClient = await broker.client()
    return made


async def everything(client: RawClient, count: int, consumer_id: int = 90) -> list[bytes]:
    """All payloads of the topic; exactly `count`."""
    await client.subscribe(TOPIC, f"all-{consumer_id}", consumer_id=consumer_id, initial=InitialPosition.EARLIEST)
    client.flow(1000, consumer_id)
    deliveries = await client.messages(count)
    await client.settle()
    assert CommandType.MESSAGE not in client.kinds()
    return [payload_of(each) for each in deliveries]


async def test_rule_2_a_stored_id_is_a_duplicate_with_a_receipt_but_no_position(client: RawClient) -> None:
    await client.producer(TOPIC, name="p")
    first = await client.store(b"a", 0)
    assert first > NOWHERE
    assert await client.store(b"again", 0) == NOWHERE
    assert await client.store(b"b", 1) > first
    assert await client.store(b"older", 0) == NOWHERE
    assert await everything(client, 2) == [b"a", b"b"]


async def test_rule_1_the_state_is_per_producer_name_not_per_connection(broker: Any, client: RawClient) -> None:
    await client.producer(TOPIC, name="p")
    await client.store(b"a", 7)
    client.close()
    back = await broker.client()
    reply = await back.producer(TOPIC, 1, name="p")
    assert reply.last_sequence_id == 7
    assert (await back.producer(TOPIC, 2, name="q")).last_sequence_id == -1
    assert await back.store(b"dup", 7) == NOWHERE
    assert await back.store(b"other producer", 7, 2) > NOWHERE


async def test_rule_2_an_id_under_way_is_undetermined(world: Any, broker: Any, client: RawClient, until: Any) -> None:
    await client.producer(TOPIC, name="p")
    await client.store(b"0", 0)
    world.ledgers.hold()
    client.publish(b"1", 1)
    await until(lambda: broker.topic(TOPIC).log.pending_entries)
    client.publish(b"1", 1)
    client.publish(b"0", 0)
    await client.settle()
    assert client.inbox == []
    world.ledgers.release()
    answers = [await client.take(lambda event: True) for _ in range(3)]
    assert [CommandType(each.type) for each in answers] == [
        CommandType.SEND_RECEIPT,
        CommandType.SEND_ERROR,
        CommandType.SEND_RECEIPT,
    ]
    assert answers[1].body.error == ServerError.PERSISTENCE_ERROR
    assert position_of(answers[2].body.message_id) == NOWHERE


async def test_rule_3_the_highest_id_of_a_batch_counts_and_a_lower_one_is_ignored(client: RawClient) -> None:
    await client.producer(TOPIC, name="p")
    await client.store(b"", 0, batch=[b"a", b"b", b"c"], highest=2)
    for number in (1, 2):
        assert await client.store(b"dup", number) == NOWHERE
    assert await client.store(b"d", 3, highest=1) > NOWHERE
    assert await client.store(b"dup", 3) == NOWHERE
    assert await client.store(b"e", 4) > NOWHERE


async def test_rule_4_only_the_last_chunk_is_judged_and_remembered(broker: Any, client: RawClient) -> None:
    await client.producer(TOPIC, name="p")
    await client.store(b"0", 0)
    for number in range(3):
        assert await client.store(b"%d" % number, 1, chunk=("p-1", number, 3)) > NOWHERE
    assert await client.store(b"2", 1, chunk=("p-1", 2, 3)) == NOWHERE


async def test_rule_4_chunks_are_known_by_their_metadata_even_if_the_command_does_not_say_so(client: RawClient) -> None:
    await client.producer(TOPIC, name="p")
    for number in range(3):
        client.send(requests.send(1, 1, entry(b"x", 1, chunk=("p-1", number, 3))))
        assert position_of((await client.receipt()).message_id) > NOWHERE


@pytest.mark.parametrize("end", ["stop", "kill"])
@pytest.mark.parametrize("snapshot", [1, 1000])
async def test_rule_4_a_message_of_which_only_some_chunks_are_stored_can_be_sent_again(
    world: Any, end: str, snapshot: int
) -> None:
    """Whatever is remembered of the first chunk: taking the last one for a duplicate would lose the message."""
    broker = await world.broker(deduplication=True, deduplication_snapshot_entries=snapshot)
    client = await broker.client()
    await client.producer(TOPIC, name="p")
    await client.store(b"first half", 1, chunk=("p-1", 0, 2))
    await world.advance(5)
    await (broker.stop() if end == "stop" else broker.kill())
    client = await (await world.broker(deduplication=True)).client()
    assert (await client.producer(TOPIC, name="p")).last_sequence_id == -1
    await client.store(b"first half", 1, chunk=("p-1", 0, 2))
    assert await client.store(b"second half", 1, chunk=("p-1", 1, 2)) > NOWHERE


async def test_a_message_that_was_not_stored_can_be_sent_again_and_the_ones_under_way_are_not_taken_twice(
    world: Any, broker: Any, client: RawClient, until: Any
) -> None:
    await client.producer(TOPIC, name="p")
    await client.store(b"0", 0)
    world.ledgers.hold()
    client.publish(b"1", 1)
    client.publish(b"2", 2)
    await until(lambda: broker.topic(TOPIC).log.pending_entries == 2)
    world.ledgers.fill()
    await client.expect(CommandType.CLOSE_PRODUCER)
    assert (await client.producer(TOPIC, name="p", epoch=1)).last_sequence_id == 0
    for number in (0, 1, 2):
        assert (await client.store(b"%d" % number, number) > NOWHERE) is (number > 0)
    assert await everything(client, 3) == [b"0", b"1", b"2"]


async def test_a_refused_add_forgets_only_itself_not_what_is_still_under_way(world: Any, until: Any) -> None:
    """The queue of adds is full; those in front are stored later, so sending them again must not store them twice."""
    broker = await world.broker(ManagedLedgerConfig(max_queued_entries=2), deduplication=True)
    client = await broker.client()
    await client.producer(TOPIC, name="p")
    world.ledgers.hold()
    client.send(*(requests.send(1, number, entry(b"%d" % number, number)) for number in range(4)))
    await client.expect(CommandType.CLOSE_PRODUCER)
    await client.producer(TOPIC, name="p", epoch=1)
    client.send(*(requests.send(1, number, entry(b"%d" % number, number)) for number in range(2)))
    world.ledgers.release()
    for _ in range(4):
        answer = await client.take(lambda event: True)
        if answer.type == CommandType.SEND_ERROR:
            assert answer.body.error == ServerError.PERSISTENCE_ERROR
    client.inbox.clear()
    assert await client.store(b"0", 0) == NOWHERE
    assert await client.store(b"1", 1) == NOWHERE
    assert await client.store(b"2", 2) > NOWHERE
    assert await everything(client, 3) == [b"0", b"1", b"2"]


async def test_rule_5_last_sequence_id_is_what_was_pushed(client: RawClient) -> None:
    await client.producer(TOPIC, name="p")
    await client.store(b"", 5, batch=[b"a", b"b"], highest=6)
    await client.close_producer()
    assert (await client.producer(TOPIC, name="p")).last_sequence_id == 6


@pytest.mark.inv("INV1")
@pytest.mark.parametrize("snapshot", [1, 3, 1000])
@pytest.mark.parametrize("end", ["stop", "kill"])
async def test_rule_6_the_state_survives_a_restart_by_snapshot_and_replay(world: Any, end: str, snapshot: int) -> None:
    broker = await world.broker(deduplication=True, deduplication_snapshot_entries=snapshot)
    client = await broker.client()
    await client.producer(TOPIC, 1, name="p")
    await client.producer(TOPIC, 2, name="q")
    for number in range(5):
        await client.store(b"p%d" % number, number, 1, producer_name="p")
    await client.store(b"", 40, 2, batch=[b"a", b"b"], highest=41, producer_name="q", highest_sequence_id=41)
    await (broker.stop() if end == "stop" else broker.kill())
    client = await (await world.broker(deduplication=True)).client()
    assert (await client.producer(TOPIC, 1, name="p")).last_sequence_id == 4
    assert (await client.producer(TOPIC, 2, name="q")).last_sequence_id == 41
    assert await client.store(b"dup", 4, 1) == NOWHERE
    assert await client.store(b"dup", 41, 2) == NOWHERE
    assert await client.store(b"new", 5, 1) > NOWHERE


async def test_rule_6_a_snapshot_is_taken_every_so_many_entries(world: Any) -> None:
    """It bounds the replay of the next load, and lets old ledgers go."""
    broker = await world.broker(deduplication=True, deduplication_snapshot_entries=3)
    client = await broker.client()
    await client.producer(TOPIC, name="p")
    positions = [await client.store(b"x", number) for number in range(8)]
    cursor = broker.topic(TOPIC).log.cursors[CURSOR_NAME]
    assert cursor.mark_delete == positions[5]
    assert cursor.position_properties == {"p": 5}


async def test_rule_6_the_number_of_remembered_producers_is_bounded(world: Any) -> None:
    broker = await world.broker(deduplication=True, deduplication_max_producers=2)
    client = await broker.client()
    for number, name in enumerate("abc"):
        await client.producer(TOPIC, number, name=name)
        await client.store(b"x", 0, number)
    for number, last in ((10, -1), (11, 0), (12, 0)):
        await client.close_producer(number - 10)
        assert (await client.producer(TOPIC, number, name="abc"[number - 10])).last_sequence_id == last


async def test_rule_7_it_is_turned_on_and_off_for_a_loaded_topic(world: Any) -> None:
    broker = await world.broker()
    client = await broker.client()
    await client.producer(TOPIC, name="p")
    await client.store(b"x", 0)
    assert await client.store(b"not deduplicated", 0) > NOWHERE
    await broker.policy("deduplicationEnabled", True)
    assert await client.store(b"first since", 0) > NOWHERE
    assert await client.store(b"dup", 0) == NOWHERE
    await broker.policy("deduplicationEnabled", False)
    assert await client.store(b"again free", 0) > NOWHERE
    assert CURSOR_NAME not in broker.topic(TOPIC).log.cursors
    await broker.policy("deduplicationEnabled", None)
    await broker.policy("deduplicationEnabled", True)
    assert await client.store(b"x", 0) > NOWHERE


async def test_rule_7_what_was_under_way_when_it_was_turned_on_counts(world: Any, until: Any) -> None:
    broker = await world.broker()
    client = await broker.client()
    await client.producer(TOPIC, name="p")
    await client.store(b"0", 0)
    topic = broker.topic(TOPIC)
    await broker.service.namespaces.set_policy(topic.name.namespace, "deduplicationEnabled", True)
    await topic.log.open_cursor(CURSOR_NAME, initial="latest")
    world.ledgers.hold()
    client.publish(b"1", 1)
    await until(lambda: topic.log.pending_entries)
    await broker.service.policies_changed(topic.name.namespace)
    world.ledgers.release()
    await client.receipt()
    assert await client.store(b"1", 1) == NOWHERE


async def test_the_internal_cursor_is_no_subscription(broker: Any, client: RawClient) -> None:
    await client.producer(TOPIC)
    assert CURSOR_NAME in broker.topic(TOPIC).log.cursors
    assert CURSOR_NAME not in broker.topic(TOPIC).subscriptions


def test_lanes_of_earlier_segments_are_found_by_name() -> None:
    def known(*names: str) -> MessageDeduplication:
        made = MessageDeduplication(cast("Any", None), cast("Any", None), snapshot_entries=10, max_producers=100)
        for number, name in enumerate(names):
            made._remember(name, number)
        return made

    few = known("p-seg-0", "p-seg-3", "q-seg-1", "p-seg-9", "p-seg-x", "p-seg-", "p-seg-²", "p")
    many = known("p-seg-0", "p-seg-3", "q-seg-1", "p-seg-9", "p-seg-x", "p-seg-", "p-seg-²", "p", *map(str, range(20)))
    for dedup in (few, many):
        assert dedup.elders_of("p-seg-5") == {0: 0, 3: 1}
        assert dedup.elders_of("p-seg-9") == {0: 0, 3: 1}
        assert dedup.elders_of("p-seg-10") == {0: 0, 3: 1, 9: 3}
        assert dedup.elders_of("q-seg-2") == {1: 2}
        for name in ("p", "p-seg-", "p-seg-x", "p-seg-²", "p-seg-" + "9" * 100, "p-seg-0", ""):
            assert dedup.elders_of(name) == {}
