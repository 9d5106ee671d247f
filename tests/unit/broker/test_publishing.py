"""PRODUCER and SEND: order of checks, names and epochs, access modes, receipts, what happens when storage refuses."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from braid.errors import (
    LedgerFenced,
    NotAllowed,
    NotReady,
    ProducerBusy,
    ProducerFenced,
    TopicNotFound,
    TopicTerminated,
)
from braid.managedledger.config import ManagedLedgerConfig
from braid.managedledger.log import ManagedLedger
from braid.model.names import TopicName
from braid.model.positions import Position
from braid.testing.raw_client import RawClient, entry, payload_of, position_of
from braid.wire import requests
from braid.wire.entries import verify
from braid.wire.types import CommandType, InitialPosition, ProducerAccessMode, ServerError, SubType

TOPIC = "persistent://public/default/publishing"
SHARED = ProducerAccessMode.SHARED
EXCLUSIVE = ProducerAccessMode.EXCLUSIVE
WAIT = ProducerAccessMode.WAIT_FOR_EXCLUSIVE
FENCING = ProducerAccessMode.EXCLUSIVE_WITH_FENCING
EARLIEST = InitialPosition.EARLIEST


def slow_properties(monkeypatch: pytest.MonkeyPatch) -> tuple[asyncio.Event, asyncio.Event]:
    """From now on a log's properties (the topic epoch) are written when the second event is set; the first says: it began."""
    reached, go = asyncio.Event(), asyncio.Event()
    write = ManagedLedger.set_properties

    async def slow(log: ManagedLedger, changes: Any) -> Any:
        reached.set()
        await go.wait()
        return await write(log, changes)

    monkeypatch.setattr(ManagedLedger, "set_properties", slow)
    return reached, go


# 4.1 Creation.


async def test_4_1_producer_success_says_name_no_last_id_empty_schema_no_epoch(client: RawClient) -> None:
    reply = await client.producer(TOPIC)
    assert reply.producer_name.startswith("standalone-")
    assert reply.last_sequence_id == -1
    assert reply.schema_version == b""
    assert not reply.HasField("topic_epoch")
    assert reply.producer_ready


async def test_4_1_the_same_producer_id_again_is_answered_again(broker: Any, client: RawClient) -> None:
    first = await client.producer(TOPIC)
    again = await client.producer(TOPIC, name="ignored")
    assert again.producer_name == first.producer_name
    assert len(broker.topic(TOPIC).producers) == 1


async def test_4_1_a_producer_id_under_creation_is_not_ready(client: RawClient) -> None:
    client.send(requests.producer(1, 1, TOPIC), requests.producer(2, 1, TOPIC))
    with pytest.raises(NotReady):
        await client.answer(2)
    assert (await client.answer(1)).producer_ready


async def test_4_1_a_failed_creation_frees_its_id(client: RawClient) -> None:
    with pytest.raises(TopicNotFound):
        await client.producer("persistent://nobody/nothing/x")
    assert (await client.producer(TOPIC)).producer_ready


@pytest.mark.parametrize("topic", ["persistent://absent/ns/x", "persistent://public/absent/x"])
async def test_4_1_an_absent_namespace_is_topic_not_found(client: RawClient, topic: str) -> None:
    with pytest.raises(TopicNotFound):
        await client.producer(topic)


async def test_4_1_an_initial_subscription_is_created_at_the_start_of_the_topic(client: RawClient) -> None:
    await client.producer(TOPIC, initial_subscription_name="first")
    position = await client.store(b"one", 0)
    await client.subscribe(TOPIC, "first", permits=10)
    assert position_of((await client.messages(1))[0].command.message_id) == position


async def test_4_1_an_initial_subscription_needs_auto_creation_and_a_free_name(broker: Any, client: RawClient) -> None:
    with pytest.raises(ProducerBusy):
        await client.producer(TOPIC, initial_subscription_name="pulsar.dedup")
    await broker.policy("autoSubscriptionCreationOverride", {"allowAutoSubscriptionCreation": False})
    with pytest.raises(NotAllowed):
        await client.producer(TOPIC, initial_subscription_name="first")
    assert broker.topic(TOPIC).producers == {}


async def test_4_1_closing_while_the_producer_is_being_created_leaves_none_behind(
    broker: Any, client: RawClient, until: Any
) -> None:
    client.send(requests.producer(1, 1, TOPIC), requests.close_producer(2, 1))
    await client.answer(2)
    with pytest.raises(NotReady):
        await client.answer(1)
    assert broker.topic(TOPIC).producers == {}


async def test_a_connection_lost_while_a_producer_is_created_leaves_none_behind(broker: Any, until: Any) -> None:
    for turns in range(12):
        client = await broker.client()
        client.send(requests.producer(1, 1, TOPIC, name="fleeting", access_mode=EXCLUSIVE))
        for _ in range(turns):
            await asyncio.sleep(0)
        client.close()
        await until(lambda: not broker.server.connections)
        await asyncio.sleep(0)
        topic = broker.service.topics.get(TOPIC)
        assert topic is None or (topic.producers == {} and topic.access.owner is None)


# 4.2 Names and epochs.


async def test_4_2_generated_names_are_unique_and_kept_over_a_reconnect(broker: Any, client: RawClient) -> None:
    names = {(await client.producer(TOPIC, number)).producer_name for number in range(1, 6)}
    assert len(names) == 5
    client.close()
    name = min(names)
    back = await broker.client()
    assert (await back.producer(TOPIC, name=name, user_provided_producer_name=False)).producer_name == name


async def test_4_2_a_higher_epoch_of_the_same_id_on_the_same_connection_replaces(broker: Any, client: RawClient) -> None:
    await client.producer(TOPIC, name="mine", epoch=1)
    await client.producer(TOPIC, name="mine", epoch=2)
    producer = broker.topic(TOPIC).producers["mine"]
    assert producer.info.epoch == 2
    assert await client.store(b"x", 0)


async def test_4_2_a_producer_that_is_closing_keeps_its_name_unless_a_higher_epoch_comes(
    world: Any, broker: Any, until: Any
) -> None:
    client = await broker.client(answers_pings=True)
    await client.producer(TOPIC, name="mine", epoch=1)
    await client.store(b"0", 0)
    world.ledgers.hold()
    client.publish(b"1", 1)
    await until(lambda: broker.topic(TOPIC).log.pending_entries)
    client.send(requests.close_producer(70, 1))
    with pytest.raises(ProducerBusy):
        await client.producer(TOPIC, name="mine", epoch=1)
    assert (await client.producer(TOPIC, name="mine", epoch=2)).producer_ready
    world.ledgers.release()
    assert (await client.receipt()).sequence_id == 1
    await client.answer(70)
    assert await client.store(b"2", 2)
    assert list(broker.topic(TOPIC).producers) == ["mine"]


async def test_a_replaced_producer_with_another_name_or_topic_does_not_stay_behind(broker: Any, client: RawClient) -> None:
    await client.producer(TOPIC, name="old", epoch=1)
    await client.producer(TOPIC, name="new", epoch=2)
    assert list(broker.topic(TOPIC).producers) == ["new"]
    await client.producer(f"{TOPIC}-2", name="new", epoch=3)
    assert broker.topic(TOPIC).producers == {}


async def test_4_2_an_exclusive_owner_may_be_replaced_by_its_own_higher_epoch(client: RawClient) -> None:
    first = await client.producer(TOPIC, name="mine", mode=EXCLUSIVE, epoch=1)
    again = await client.producer(TOPIC, name="mine", mode=EXCLUSIVE, epoch=2, topic_epoch=first.topic_epoch)
    assert again.topic_epoch == first.topic_epoch


async def test_4_2_while_one_name_is_probed_other_producers_are_admitted(world: Any, broker: Any) -> None:
    old, new, other = [await broker.client() for _ in range(3)]
    await old.producer(TOPIC, name="same")
    new.send(requests.producer(5, 1, TOPIC, name="same"))
    await old.expect(CommandType.PING)
    assert (await other.producer(TOPIC, name="other")).producer_ready
    await world.advance(5.1)
    assert (await new.answer(5)).producer_ready
    assert sorted(broker.topic(TOPIC).producers) == ["other", "same"]


async def test_4_2_of_many_that_want_a_dead_producer_s_name_one_gets_it(world: Any, broker: Any) -> None:
    old = await broker.client()
    await old.producer(TOPIC, name="same")
    rivals = [await broker.client(answers_pings=True) for _ in range(4)]
    for rival in rivals:
        rival.send(requests.producer(5, 1, TOPIC, name="same"))
    await old.expect(CommandType.PING)
    await rivals[-1].settle()
    await world.advance(5.1)
    results = await asyncio.gather(*(rival.answer(5) for rival in rivals), return_exceptions=True)
    assert sorted(type(each).__name__ for each in results) == ["CommandProducerSuccess", *["ProducerBusy"] * 3]
    assert list(broker.topic(TOPIC).producers) == ["same"]


async def test_the_dead_exclusive_owner_of_a_name_is_dropped_and_its_access_with_it(world: Any, broker: Any) -> None:
    old, new = await broker.client(), await broker.client()
    first = await old.producer(TOPIC, name="mine", mode=EXCLUSIVE)
    new.send(requests.producer(5, 1, TOPIC, name="mine", access_mode=EXCLUSIVE, topic_epoch=first.topic_epoch))
    await old.expect(CommandType.PING)
    await world.advance(5.1)
    assert (await new.answer(5)).topic_epoch == first.topic_epoch
    await old.expect_close()
    assert await new.store(b"x", 0)


# 4.3 Access modes, cell by cell. Rows: the newcomer; columns: what it meets.


async def nobody(broker: Any) -> list[RawClient]:
    return []


async def shared_producers(broker: Any) -> list[RawClient]:
    client = await broker.client()
    await client.producer(TOPIC, 1)
    await client.producer(TOPIC, 2)
    return [client]


async def exclusive_owner(broker: Any) -> list[RawClient]:
    client = await broker.client()
    await client.producer(TOPIC, mode=EXCLUSIVE)
    return [client]


async def waiters(broker: Any) -> list[RawClient]:
    owner, waiter = await broker.client(), await broker.client()
    await owner.producer(TOPIC, mode=EXCLUSIVE)
    assert not (await waiter.producer(TOPIC, mode=WAIT)).producer_ready
    return [owner, waiter]


@pytest.mark.parametrize(
    ("mode", "met", "outcome"),
    [
        (SHARED, nobody, "ok"),
        (SHARED, shared_producers, "ok"),
        (SHARED, exclusive_owner, ProducerBusy),
        (SHARED, waiters, ProducerBusy),
        (EXCLUSIVE, nobody, "epoch"),
        (EXCLUSIVE, shared_producers, ProducerFenced),
        (EXCLUSIVE, exclusive_owner, ProducerFenced),
        (EXCLUSIVE, waiters, ProducerFenced),
        (WAIT, nobody, "epoch"),
        (WAIT, shared_producers, "queued"),
        (WAIT, exclusive_owner, "queued"),
        (WAIT, waiters, "queued"),
        (FENCING, nobody, "epoch"),
        (FENCING, shared_producers, "epoch"),
        (FENCING, exclusive_owner, "epoch"),
        (FENCING, waiters, "epoch"),
    ],
)
async def test_4_3_access_modes(broker: Any, client: RawClient, mode: ProducerAccessMode, met: Any, outcome: Any) -> None:
    others = await met(broker)
    if isinstance(outcome, type):
        with pytest.raises(outcome):
            await client.producer(TOPIC, mode=mode)
        return
    reply = await client.producer(TOPIC, mode=mode)
    assert reply.producer_ready is (outcome != "queued")
    assert reply.HasField("topic_epoch") is (outcome == "epoch")
    if mode is FENCING and others:
        assert (await others[0].expect(CommandType.CLOSE_PRODUCER)).producer_id == 1
        if met is waiters:
            refused = await others[1].expect(CommandType.ERROR)
            assert refused.error == ServerError.PRODUCER_FENCED
        assert len(broker.topic(TOPIC).producers) == 1
    if reply.producer_ready:
        assert await client.store(b"x", 0)


async def test_4_3_a_waiter_is_promoted_by_a_second_success_with_the_same_request_id(broker: Any) -> None:
    owner, first, second = [await broker.client() for _ in range(3)]
    taken = await owner.producer(TOPIC, mode=EXCLUSIVE)
    assert taken.topic_epoch == 0
    for waiter in (first, second):
        reply = await waiter.producer(TOPIC, mode=WAIT, request_id=77)
        assert not reply.producer_ready
    await owner.close_producer()
    ready = await first.answer(77)
    assert (ready.producer_ready, ready.topic_epoch) == (True, 1)
    assert await first.store(b"x", 0)
    first.close()
    ready = await second.answer(77)
    assert (ready.producer_ready, ready.topic_epoch) == (True, 2)


async def test_4_3_a_waiter_must_not_publish(broker: Any) -> None:
    owner, waiter = await broker.client(), await broker.client()
    await owner.producer(TOPIC, mode=EXCLUSIVE)
    await waiter.producer(TOPIC, mode=WAIT)
    waiter.publish(b"not mine", 0)
    await waiter.expect_close()
    await owner.settle()
    assert broker.topic(TOPIC).log.last_position == Position(-1, -1)


@pytest.mark.parametrize("same_connection", [True, False])
async def test_4_3_a_waiter_that_dies_with_the_owner_is_never_promoted(broker: Any, until: Any, same_connection: bool) -> None:
    owner = await broker.client()
    dying = owner if same_connection else await broker.client()
    waiter = await broker.client()
    await owner.producer(TOPIC, 1, mode=EXCLUSIVE)
    await dying.producer(TOPIC, 2, mode=WAIT)
    await waiter.producer(TOPIC, mode=WAIT, request_id=9)
    dying.close()
    owner.close()
    assert (await waiter.answer(9)).producer_ready
    topic = broker.topic(TOPIC)
    assert [producer.link.is_open for producer in topic.producers.values()] == [True]
    waiter.close()
    await until(lambda: not topic.producers and topic.access.owner is None)
    assert (await (await broker.client()).producer(TOPIC, mode=EXCLUSIVE)).producer_ready


async def test_4_3_a_waiter_that_closes_leaves_the_queue(broker: Any) -> None:
    owner, first, second = [await broker.client() for _ in range(3)]
    await owner.producer(TOPIC, mode=EXCLUSIVE)
    await first.producer(TOPIC, mode=WAIT)
    await second.producer(TOPIC, mode=WAIT, request_id=5)
    await first.close_producer()
    await owner.close_producer()
    ready = await second.answer(5)
    assert (ready.producer_ready, ready.topic_epoch) == (True, 1)
    assert first.inbox == []


async def test_4_3_a_waiter_lost_while_its_epoch_is_written_makes_way_for_the_next(
    broker: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, dying, waiter = [await broker.client() for _ in range(3)]
    await owner.producer(TOPIC, mode=EXCLUSIVE)
    await dying.producer(TOPIC, mode=WAIT)
    await waiter.producer(TOPIC, mode=WAIT, request_id=5)
    reached, go = slow_properties(monkeypatch)
    await owner.close_producer()
    await reached.wait()
    dying.close()
    await until(lambda: len(broker.server.connections) == 2)
    go.set()
    assert (await waiter.answer(5)).producer_ready
    assert len(broker.topic(TOPIC).producers) == 1


async def test_4_3_the_topic_epoch_grows_and_fences_over_a_restart(world: Any, broker: Any) -> None:
    client = await broker.client()
    old = await client.producer(TOPIC, name="a", mode=EXCLUSIVE)
    await client.close_producer()
    newer = await client.producer(TOPIC, name="b", mode=EXCLUSIVE)
    assert (old.topic_epoch, newer.topic_epoch) == (0, 1)
    await broker.stop()
    again = await world.broker()
    client = await again.client()
    with pytest.raises(ProducerFenced):
        await client.producer(TOPIC, name="a", mode=EXCLUSIVE, topic_epoch=old.topic_epoch)
    kept = await client.producer(TOPIC, name="b", mode=EXCLUSIVE, topic_epoch=newer.topic_epoch)
    assert kept.topic_epoch == 1
    await client.close_producer()
    assert (await client.producer(TOPIC, name="c", mode=FENCING)).topic_epoch == 2


async def test_4_3_the_fenced_owner_comes_back_and_learns_it(broker: Any) -> None:
    owner, thief = await broker.client(), await broker.client()
    had = await owner.producer(TOPIC, name="owner", mode=EXCLUSIVE)
    await thief.producer(TOPIC, name="thief", mode=FENCING)
    await owner.expect(CommandType.CLOSE_PRODUCER)
    owner.publish(b"late", 0)
    with pytest.raises(ProducerFenced):
        await owner.producer(TOPIC, name="owner", mode=EXCLUSIVE, epoch=1, topic_epoch=had.topic_epoch)
    await owner.settle()
    assert broker.topic(TOPIC).log.last_position == Position(-1, -1)


async def test_waiters_are_told_when_the_topic_is_terminated_or_closed(broker: Any) -> None:
    for end, expected in (("terminate", TopicTerminated), ("close", NotReady)):
        topic = f"{TOPIC}-{end}"
        owner, waiter = await broker.client(), await broker.client()
        await owner.producer(topic, mode=EXCLUSIVE)
        await waiter.producer(topic, mode=WAIT, request_id=3)
        await (broker.topic(topic).terminate() if end == "terminate" else broker.service.unload(broker.topic(topic)))
        with pytest.raises(expected):
            await waiter.answer(3)


# 4.4 SEND and receipts.


@pytest.mark.inv("INV1")
async def test_4_4_trap_10_receipts_come_in_order_with_the_ids_as_sent(client: RawClient) -> None:
    await client.producer(TOPIC)
    for sequence_id in (0, 5, 6, 2**40, 2**62):
        client.publish(b"x", sequence_id)
    receipts = [await client.receipt() for _ in range(5)]
    assert [receipt.sequence_id for receipt in receipts] == [0, 5, 6, 2**40, 2**62]
    positions = [position_of(receipt.message_id) for receipt in receipts]
    assert positions == sorted(positions)
    assert {receipt.producer_id for receipt in receipts} == {1}
    assert all(receipt.message_id.batch_index == -1 and receipt.message_id.partition == -1 for receipt in receipts)


async def test_trap_10_a_batch_is_answered_by_its_first_id_and_echoes_the_highest_as_sent(client: RawClient) -> None:
    await client.producer(TOPIC)
    client.publish(b"", 10, batch=[b"a", b"b", b"c"])
    receipt = await client.receipt()
    assert (receipt.sequence_id, receipt.highest_sequence_id) == (10, 0)
    client.publish(b"", 13, batch=[b"d", b"e"], highest=14)
    receipt = await client.receipt()
    assert (receipt.sequence_id, receipt.highest_sequence_id) == (13, 14)


async def test_trap_10_refusals_keep_their_place_between_the_receipts(client: RawClient) -> None:
    await client.producer(TOPIC)
    good, bad = entry(b"good"), entry(b"bad")[:-1] + b"?"
    client.send(*(requests.send(1, number, bad if number in (1, 3, 4) else good) for number in range(6)))
    order = []
    for _ in range(6):
        event = await client.take(lambda event: True)
        order.append(event.body.sequence_id)
    assert order == [0, 1, 2, 3, 4, 5]


async def test_1_2_a_wrong_checksum_is_refused_and_the_connection_kept(broker: Any, client: RawClient) -> None:
    await client.producer(TOPIC)
    client.send(requests.send(1, 0, entry(b"damaged")[:-1] + b"?"))
    refused = await client.expect(CommandType.SEND_ERROR)
    assert (refused.sequence_id, refused.error) == (0, ServerError.CHECKSUM_ERROR)
    assert await client.store(b"fine", 1)


async def test_trap_9_an_entry_sent_without_checksum_is_delivered_with_one(client: RawClient) -> None:
    await client.producer(TOPIC)
    await client.subscribe(TOPIC, permits=5)
    client.send(requests.send(1, 0, entry(b"bare")[6:]))
    await client.receipt()
    delivered = (await client.messages(1))[0]
    assert delivered.entry[:2] == b"\x0e\x01"
    assert verify(delivered.entry)
    assert payload_of(delivered) == b"bare"


async def test_unreadable_message_metadata_closes_the_connection(client: RawClient) -> None:
    await client.producer(TOPIC)
    client.send(requests.send(1, 0, b"\x00\x00\x00\x04\xff\xff\xff\xffpayload"))
    await client.expect_close()


@pytest.mark.parametrize("claimed", [1, 2, 4])
async def test_settled_a_count_that_disagrees_with_the_metadata_is_refused(
    broker: Any, client: RawClient, claimed: int
) -> None:
    await client.producer(TOPIC)
    client.send(requests.send(1, 0, entry(b"", batch=[b"a", b"b", b"c"]), claimed))
    refused = await client.expect(CommandType.SEND_ERROR)
    assert refused.error == ServerError.NOT_ALLOWED_ERROR
    assert await client.store(b"single", 1)
    assert broker.topic(TOPIC).log.last_index == 0


async def test_settled_the_index_is_dense_and_counts_messages(world: Any, broker: Any, client: RawClient) -> None:
    """One per message; refused and duplicate entries take none, a chunk counts as one; it goes on after a restart."""
    await broker.policy("deduplicationEnabled", True)
    await client.producer(TOPIC, name="p")
    log = broker.topic(TOPIC).log
    await client.store(b"one", 0)
    await client.store(b"", 1, batch=[b"a", b"b", b"c"], highest=3)
    await client.store(b"dup", 2)
    client.send(requests.send(1, 4, entry(b"damaged")[:-1] + b"?"))
    await client.expect(CommandType.SEND_ERROR)
    await client.store(b"ch", 5, chunk=("p-5", 0, 2))
    await client.store(b"unk", 5, chunk=("p-5", 1, 2))
    entries = [each for ledger in log.infos for each in await log.read(Position(ledger.ledger_id, 0), 100, 1 << 20)]
    assert [(each.messages, each.index) for each in entries] == [(1, 0), (3, 3), (1, 4), (1, 5)]
    await broker.stop()
    again = await world.broker()
    client = await again.client()
    await client.producer(TOPIC)
    await client.store(b"", 9, batch=[b"x", b"y"])
    assert again.topic(TOPIC).log.last_index == 7


async def test_settled_append_time_is_the_broker_s_and_never_goes_back(world: Any, broker: Any, client: RawClient) -> None:
    await client.producer(TOPIC)
    log = broker.topic(TOPIC).log
    start = world.clock.now_ms()
    for step, back in ((0, 0), (5, 0), (0, 3000), (1, 0)):
        await world.advance(step)
        world.clock._now -= back / 1000
        await client.store(b"x", 0)
    entries = await log.read(log.first_position, 10, 1 << 20)
    assert [each.append_ms - start for each in entries] == [0, 5000, 5000, 5000]


async def test_a_transactional_send_is_refused_clearly(client: RawClient) -> None:
    await client.producer(TOPIC)
    client.send(requests.send(1, 0, entry(b"x"), txn=(0, 0)))
    refused = await client.expect(CommandType.SEND_ERROR)
    assert refused.error == ServerError.NOT_ALLOWED_ERROR
    assert "TransactionConflict: The transaction 0_0 does not exist" in refused.message


async def test_4_5_close_producer_is_answered_after_the_receipts(client: RawClient) -> None:
    await client.producer(TOPIC)
    for sequence_id in range(20):
        client.publish(b"x", sequence_id)
    client.send(requests.close_producer(99, 1))
    await client.answer(99)
    assert client.kinds() == [CommandType.SEND_RECEIPT] * 20
    client.inbox.clear()
    client.publish(b"after", 20)
    await client.expect_close()


# 4.5 Terminated topics and failing storage.


async def test_4_5_trap_5_termination_closes_producers_and_refuses_them_when_they_come_back(
    broker: Any, client: RawClient
) -> None:
    await client.producer(TOPIC)
    await client.store(b"last", 0)
    await broker.topic(TOPIC).terminate()
    closed = await client.expect(CommandType.CLOSE_PRODUCER)
    assert closed.producer_id == 1
    client.publish(b"late", 1)
    assert await client.settle() == []
    with pytest.raises(TopicTerminated):
        await client.producer(TOPIC, epoch=1)
    await client.subscribe(TOPIC, initial=EARLIEST, permits=5)
    assert await client.payloads(1) == [b"last"]


async def test_4_5_sends_during_termination_are_stored_or_dropped_never_half(broker: Any, client: RawClient) -> None:
    await client.producer(TOPIC)
    for sequence_id in range(50):
        client.publish(b"%d" % sequence_id, sequence_id)
    await asyncio.sleep(0)
    await broker.topic(TOPIC).terminate()
    await client.expect(CommandType.CLOSE_PRODUCER)
    await client.settle()
    assert set(client.kinds()) <= {CommandType.SEND_RECEIPT}
    entries = await broker.topic(TOPIC).log.read(broker.topic(TOPIC).log.first_position, 100, 1 << 20)
    assert len(entries) == len(client.inbox)


async def test_4_5_termination_survives_a_restart(world: Any, broker: Any, client: RawClient) -> None:
    await client.producer(TOPIC)
    await client.store(b"x", 0)
    await broker.topic(TOPIC).terminate()
    await broker.kill()
    client = await (await world.broker()).client()
    with pytest.raises(TopicTerminated):
        await client.producer(TOPIC)


async def test_4_5_a_peer_too_old_for_close_producer_is_disconnected_instead(broker: Any) -> None:
    client = await broker.client(protocol_version=4)
    await client.producer(TOPIC)
    await broker.topic(TOPIC).terminate()
    await client.expect_close()


async def test_trap_5_a_storage_failure_closes_the_producer_and_nothing_sent_later_overtakes(
    world: Any, broker: Any, client: RawClient, until: Any
) -> None:
    """Messages behind a failed one are dropped, not stored in front of it; the client sends all again, in order."""
    await client.producer(TOPIC, name="p")
    await client.subscribe(TOPIC, permits=100)
    await client.store(b"0", 0)
    world.ledgers.hold()
    client.publish(b"1", 1)
    await until(lambda: broker.topic(TOPIC).log.pending_entries)
    world.ledgers.fill()
    await client.expect(CommandType.CLOSE_PRODUCER)
    client.publish(b"2", 2)
    await client.settle()
    assert CommandType.SEND_ERROR not in client.kinds()
    assert CommandType.SEND_RECEIPT not in client.kinds()
    await client.producer(TOPIC, name="p", epoch=1)
    await client.store(b"1", 1)
    await client.store(b"2", 2)
    assert await client.payloads(3) == [b"0", b"1", b"2"]
    assert broker.service.budget.used == 0
    assert next(iter(broker.server.connections)).link.pending_publishes == 0


async def test_a_failed_group_closes_its_producers_and_gives_everything_back(
    world: Any, broker: Any, client: RawClient, until: Any
) -> None:
    await client.producer(TOPIC, 1, name="a")
    await client.producer(TOPIC, 2, name="b")
    await client.producer(TOPIC, 3, name="idle")
    await client.store(b"0", 0, 1)
    topic = broker.topic(TOPIC)
    world.ledgers.hold()
    for producer_id in (1, 2):
        client.publish(b"x", 1, producer_id)
        client.publish(b"x", 2, producer_id)
    await until(lambda: topic.log.pending_entries == 4)
    world.ledgers.fill()
    closed = {(await client.expect(CommandType.CLOSE_PRODUCER)).producer_id for _ in range(2)}
    assert closed == {1, 2}
    await client.settle()
    assert list(topic.producers) == ["idle"]
    assert broker.service.budget.used == 0
    assert next(iter(broker.server.connections)).link.pending_publishes == 0


async def test_adds_refused_while_ledgers_change_are_sent_again(world: Any) -> None:
    """The queue in front of the next ledger is bounded; a full one closes the producer."""
    broker = await world.broker(ManagedLedgerConfig(max_queued_entries=2))
    client = await broker.client()
    await client.producer(TOPIC, name="p")
    client.send(*(requests.send(1, number, entry(b"%d" % number)) for number in range(6)))
    await client.expect(CommandType.CLOSE_PRODUCER)
    assert [(await client.receipt()).sequence_id for _ in range(2)] == [0, 1]
    await client.settle()
    assert client.inbox == []
    await client.producer(TOPIC, name="p", epoch=1)
    for number in range(2, 6):
        assert await client.store(b"%d" % number, number)


@pytest.mark.inv("INV2")
async def test_a_log_taken_over_refuses_the_stale_owner_and_its_clients_come_back(world: Any) -> None:
    """Two brokers own one topic one after the other; the first does not know yet."""
    stale, owner = await world.broker(believes=True), await world.broker(believes=True)
    client, other = await stale.client(), await owner.client()
    await client.producer(TOPIC, name="p")
    await client.subscribe(TOPIC, permits=100)
    await client.store(b"1", 0)
    await other.producer(TOPIC, name="q")
    await other.store(b"2", 0)
    client.publish(b"refused", 1)
    await client.expect(CommandType.CLOSE_PRODUCER)
    await client.expect(CommandType.CLOSE_CONSUMER)
    await client.settle()
    assert CommandType.SEND_RECEIPT not in client.kinds()
    back = await client.producer(TOPIC, name="p", epoch=1)
    assert back.producer_ready
    await client.store(b"3", 1)
    other.publish(b"refused too", 1)
    await other.expect(CommandType.CLOSE_PRODUCER)
    reader = await stale.client()
    await reader.subscribe(TOPIC, "all", initial=EARLIEST, permits=100)
    assert await reader.payloads(3) == [b"1", b"2", b"3"]
    assert await reader.settle() == []


@pytest.mark.inv("INV2")
async def test_a_stale_owner_learns_it_from_an_acknowledgment_too(world: Any, until: Any) -> None:
    stale, owner = await world.broker(believes=True), await world.broker(believes=True)
    client = await stale.client()
    await client.producer(TOPIC)
    await client.subscribe(TOPIC, permits=100)
    position = await client.store(b"1", 0)
    await (await owner.client()).producer(TOPIC)
    reply = await client.acked(position)
    assert reply.HasField("error")
    await client.expect(CommandType.CLOSE_CONSUMER)
    await client.expect(CommandType.CLOSE_PRODUCER)
    await until(lambda: TOPIC not in stale.service.topics)


async def test_a_fenced_topic_is_dropped_once_and_loaded_anew(broker: Any, client: RawClient, until: Any) -> None:
    await client.producer(TOPIC)
    topic = broker.topic(TOPIC)
    topic.log.lost(LedgerFenced("Somebody else has it."))
    await client.expect(CommandType.CLOSE_PRODUCER)
    await until(lambda: TOPIC not in broker.service.topics)
    await client.producer(TOPIC, epoch=1)
    assert broker.topic(TOPIC) is not topic


async def test_a_producer_admitted_while_the_topic_closes_is_refused(
    broker: Any, client: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The epoch of an exclusive owner is being written when the topic is unloaded."""
    await client.subscribe(TOPIC)
    topic = broker.topic(TOPIC)
    reached, go = slow_properties(monkeypatch)
    client.send(requests.producer(50, 1, TOPIC, access_mode=EXCLUSIVE))
    await reached.wait()
    topic.disconnect_all()
    go.set()
    with pytest.raises(NotReady):
        await client.answer(50)
    assert topic.producers == {}
    assert topic.access.owner is None


async def test_many_loads_of_one_topic_make_one_and_the_first_may_create(broker: Any) -> None:
    """A caller that may not create must not spoil it for one that may."""
    service = broker.service
    name = TopicName.parse(TOPIC)
    results = await asyncio.gather(
        *(service.topic(name, create=number % 2 == 1) for number in range(10)), return_exceptions=True
    )
    created = {id(each) for each in results[1::2]}
    assert created == {id(broker.topic(TOPIC))}
    assert all(isinstance(each, TopicNotFound) or each is broker.topic(TOPIC) for each in results[::2])


async def test_a_load_that_fails_by_a_bug_answers_those_who_wait(
    broker: Any, client: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **options: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(broker.service.logs, "open", broken)
    with pytest.raises(NotReady, match="could not be loaded"):
        await client.producer(TOPIC)
    monkeypatch.undo()
    assert (await client.producer(TOPIC)).producer_ready


async def test_shared_type_needs_no_exclusive_access(broker: Any) -> None:
    clients = [await broker.client() for _ in range(3)]
    for number, client in enumerate(clients):
        await client.producer(TOPIC, name=f"p{number}")
        await client.subscribe(TOPIC, sub_type=SubType.SHARED)
    assert len(broker.topic(TOPIC).producers) == 3


async def test_no_publish_is_forgotten_while_the_log_changes_ledgers(world: Any) -> None:
    """An entry that arrives while the end of the last ledger is being written down must be stored without another push."""
    broker = await world.broker(ManagedLedgerConfig(max_entries_per_ledger=2, min_ledger_age_ms=0))
    client = await broker.client()
    await client.producer(TOPIC)
    for number in range(20):
        assert await client.store(b"%d" % number, number)
