"""Failures at awkward moments: between a failed write and its repetition, during loading, in the middle of a deletion."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from braid.broker.dedup import CURSOR_NAME
from braid.errors import (
    BraidError,
    LedgerOverloaded,
    LedgerStoreReadOnly,
    Overloaded,
    StorageFull,
    StorageUnavailable,
    StoreUnavailable,
)
from braid.managedledger.config import ManagedLedgerConfig
from braid.model.names import TopicName
from braid.model.positions import Position
from braid.testing.raw_client import RawClient, id_of, payload_of
from braid.wire import requests
from braid.wire.types import AckType, CommandType, InitialPosition, ProducerAccessMode

TOPIC = "persistent://public/default/awkward"
NOWHERE = Position(-1, -1)


async def everything(client: RawClient, count: int) -> list[bytes]:
    """All payloads of the topic; exactly `count`."""
    await client.subscribe(TOPIC, "all", consumer_id=90, initial=InitialPosition.EARLIEST)
    client.flow(1000, 90)
    deliveries = await client.messages(count)
    await client.settle()
    assert CommandType.MESSAGE not in client.kinds()
    return [payload_of(each) for each in deliveries]


def refuse_once(broker: Any, what: str) -> None:
    """The next metadata call of that name fails without effect."""
    handle = broker.service.metadata
    call = getattr(handle, what)

    async def refused(*_args: Any, **_options: Any) -> Any:
        setattr(handle, what, call)
        raise StoreUnavailable("The metadata store does not answer.")

    setattr(handle, what, refused)


async def test_a_failed_write_also_closes_the_producer_that_came_back_meanwhile(world: Any, until: Any) -> None:
    """Otherwise what follows the failed message is stored before it, and deduplication then drops the repetition."""
    broker = await world.broker(deduplication=True)
    first = await broker.client()
    await first.producer(TOPIC, name="p")
    await first.store(b"0", 0)
    world.ledgers.hold()
    first.publish(b"1", 1)
    await until(lambda: broker.topic(TOPIC).log.pending_entries)
    first.close()
    await until(lambda: not broker.topic(TOPIC).producers)
    second = await broker.client()
    await second.producer(TOPIC, name="p")
    second.publish(b"1", 1)
    await second.expect(CommandType.SEND_ERROR)  # under way: nobody knows yet
    world.ledgers.fill()
    second.publish(b"2", 2)
    await second.settle()
    third = await broker.client()
    second.close()
    await until(lambda: not broker.topic(TOPIC).producers)
    await third.producer(TOPIC, name="p")
    await third.store(b"1", 1)
    await third.store(b"2", 2)
    assert await everything(third, 3) == [b"0", b"1", b"2"]


async def test_a_refused_chunk_leaves_the_deduplication_of_its_producer_alone(world: Any, until: Any) -> None:
    broker = await world.broker(ManagedLedgerConfig(max_queued_entries=1), deduplication=True)
    client = await broker.client()
    await client.producer(TOPIC, 1, name="q")
    await client.producer(TOPIC, 2, name="p")
    await client.store(b"q", 2000, 1, producer_name="q")
    await client.store(b"p", 0, 2)
    await broker.service.unload(broker.topic(TOPIC))  # the next add needs a new ledger
    client = await broker.client()
    await client.producer(TOPIC, 1, name="q")
    await client.producer(TOPIC, 2, name="p")
    world.ledgers.hold()
    client.publish(b"q", 3000, 1, producer_name="q")
    client.publish(b"half", 1, 2, chunk=("u", 0, 2))
    await client.expect(CommandType.CLOSE_PRODUCER)
    world.ledgers.release()
    await client.receipt()
    assert (await client.producer(TOPIC, 2, name="p")).last_sequence_id == 0
    assert await client.store(b"whole", 1, 2) > NOWHERE


async def test_nothing_is_trimmed_that_the_stored_deduplication_state_still_needs(world: Any, until: Any) -> None:
    logs = ManagedLedgerConfig(max_entries_per_ledger=3, min_ledger_age_ms=0)
    settings: dict[str, Any] = {"deduplication": True, "deduplication_snapshot_entries": 4}
    broker = await world.broker(logs, **settings)
    client = await broker.client()
    await client.producer(TOPIC, 1, name="p")
    await client.producer(TOPIC, 2, name="q")
    for number in range(3):
        await client.store(b"p", number)
    await client.store(b"q", 0, 2, producer_name="q")  # the fourth entry, in the second ledger: a snapshot
    await client.settle()
    assert broker.topic(TOPIC).log.cursors[CURSOR_NAME].mark_delete.entry_id == 0
    await broker.kill()
    broker = await world.broker(logs, **settings)
    client = await broker.client()
    assert (await client.producer(TOPIC, 1, name="p")).last_sequence_id == 2
    assert await client.store(b"again", 2) == NOWHERE


async def test_an_entry_reported_as_failed_and_stored_after_all_is_not_stored_twice(world: Any, until: Any) -> None:
    broker = await world.broker(deduplication=True)
    client = await broker.client()
    await client.producer(TOPIC, name="p")
    await client.store(b"0", 0)
    log = broker.topic(TOPIC).log
    world.ledgers.hold()
    world.ledgers.is_unreadable = True
    client.publish(b"1", 1)
    await until(lambda: log.pending_entries)

    def overloaded(_head: bytes, _body: bytes) -> int:
        raise LedgerOverloaded("Too much waits for the disk.")

    log.tail.append = overloaded
    client.publish(b"2", 2)
    await client.expect(CommandType.CLOSE_PRODUCER)
    await until(lambda: not log.pending_entries)
    world.ledgers.is_unreadable = False
    world.ledgers.release()
    client = await broker.client()
    await client.producer(TOPIC, name="p")
    assert await client.store(b"1", 1) == NOWHERE
    assert await client.store(b"2", 2) > NOWHERE
    assert await everything(client, 3) == [b"0", b"1", b"2"]


async def test_a_subscription_that_could_not_be_deleted_works_as_before(world: Any, until: Any) -> None:
    broker = await world.broker()
    client = await broker.client()
    await client.subscribe(TOPIC)
    await client.producer(TOPIC)
    position = await client.store(b"0", 0)
    refuse_once(broker, "delete")
    with pytest.raises(BraidError):
        await client.unsubscribe()
    await client.subscribe(TOPIC, consumer_id=2, permits=10)
    await client.messages(1)
    assert not (await client.acked(position, consumer_id=2)).HasField("error")
    await broker.kill()
    broker = await world.broker()
    topic = await broker.service.topic(TopicName.parse(TOPIC), create=False)
    assert topic.subscriptions["sub"].cursor.mark_delete == position


async def test_a_waiting_producer_that_cannot_be_let_in_is_told(world: Any) -> None:
    broker = await world.broker()
    owner = await broker.client()
    await owner.producer(TOPIC, name="owner", mode=ProducerAccessMode.EXCLUSIVE)
    waiter = await broker.client()
    reply = await waiter.producer(TOPIC, name="w", mode=ProducerAccessMode.WAIT_FOR_EXCLUSIVE, request_id=7)
    assert not reply.producer_ready
    refuse_once(broker, "put")
    await owner.close_producer()
    with pytest.raises(BraidError):
        await waiter.answer(7)
    assert (await waiter.producer(TOPIC, name="w", mode=ProducerAccessMode.EXCLUSIVE)).producer_ready


async def test_policies_changed_during_a_load_reach_the_loaded_topic(world: Any, until: Any) -> None:
    broker = await world.broker()
    client = await broker.client()
    await client.producer(TOPIC)
    await client.store(b"0", 0)
    await broker.kill()
    broker = await world.broker()
    world.ledgers.hold()  # the load waits for the old owner's ledger
    loading = asyncio.ensure_future(broker.service.topic(TopicName.parse(TOPIC), create=False))
    await until(lambda: world.ledgers._turn is not None)
    change = asyncio.ensure_future(broker.policy("retention_policies", {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1}))
    for _ in range(20):
        await asyncio.sleep(0)
    world.ledgers.release()
    topic = await loading
    await change
    assert topic.log.retention_minutes == topic.log.retention_mb == -1


async def test_acknowledgements_that_wait_for_the_disk_are_bounded(world: Any) -> None:
    broker = await world.broker(max_requests_per_connection=10)
    client = await broker.client()
    await client.producer(TOPIC)
    await client.subscribe(TOPIC, permits=100)
    position = await client.store(b"0", 0)
    await client.messages(1)
    world.ledgers.hold()
    for number in range(100, 200):
        client.send(requests.ack(1, [id_of(position)], AckType.INDIVIDUAL, number))
    await client.settle()
    assert max(len(connection.tasks) for connection in broker.server.connections) <= 10
    with pytest.raises(Overloaded):
        answer = await client.answer(199)
        if answer.HasField("error"):
            raise Overloaded(answer.message)
    world.ledgers.release()
    assert not (await client.answer(100)).HasField("error")


async def test_a_topic_fenced_while_it_was_loaded_is_not_served(world: Any, until: Any) -> None:
    broker = await world.broker(deduplication=True)
    client = await broker.client()
    await client.producer(TOPIC, name="p")
    await client.store(b"0", 0)
    await broker.kill()
    broker = await world.broker(deduplication=True)
    going = asyncio.Event()
    opened = world.ledgers.open

    async def slowly(ledger_id: int, *, fence: bool) -> Any:
        if not fence:
            await going.wait()
        return await opened(ledger_id, fence=fence)

    made: list[Any] = []
    open_log = broker.service.logs.open

    async def remember(*args: Any, **options: Any) -> Any:
        made.append(await open_log(*args, **options))
        return made[-1]

    broker.service.logs.open = remember
    world.ledgers.open = slowly
    loading = asyncio.ensure_future(broker.service.topic(TopicName.parse(TOPIC), create=False))
    await until(lambda: made)
    for _ in range(20):
        await asyncio.sleep(0)
    rival = await world.broker(believes=True)
    await rival.service.topic(TopicName.parse(TOPIC), create=False)
    with pytest.raises(BraidError):
        await made[0].check_owner()
    going.set()
    with pytest.raises(BraidError):
        await loading
    assert not broker.service.topics


async def test_clients_that_try_again_on_a_full_disk_do_not_fill_the_log(world: Any, caplog: pytest.LogCaptureFixture) -> None:
    broker = await world.broker()
    topic = await broker.service.topic(TopicName.parse("t"), create=True)
    for _ in range(50):
        topic.log_failed(StorageUnavailable("No answer."), [])
    assert caplog.text.count("No answer.") == 1
    await world.clock.advance(11)
    topic.log_failed(StorageUnavailable("No answer."), [])
    assert caplog.text.count("No answer.") == 2
    for error in (LedgerStoreReadOnly("No space left."), StorageFull("No space left.")):
        await world.clock.advance(11)
        topic.log_failed(error, [])
    assert "No space left." not in caplog.text, "of a full disk its store tells, once for all topics"
