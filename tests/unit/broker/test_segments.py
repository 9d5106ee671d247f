"""Segments at their owner: what a leader may do to them, what clients may, and what a seal means to producers and consumers."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from braid.broker.subscription import END_RETRY_SECONDS
from braid.broker.topic_records import INCARNATION
from braid.errors import (
    AlreadyExists,
    BraidError,
    Conflict,
    NotAllowed,
    NotReady,
    PreconditionFailed,
    StorageUnavailable,
    StoreUnavailable,
    SubscriptionNotFound,
    TopicNotFound,
    TopicTerminated,
)
from braid.managedledger.config import ManagedLedgerConfig
from braid.managedledger.cursor_store import CursorStore
from braid.managedledger.records import log_key
from braid.metadata.api import Span
from braid.metadata.claims import StaleLeader
from braid.model.layout import SegmentLayout
from braid.model.names import NamespaceName, TopicName
from braid.model.positions import EARLIEST, LATEST
from braid.model.segments import physical_name
from braid.scalable.config import ScalableConfig
from braid.scalable.records import (
    PendingOperation,
    ScalableTopicMetadata,
    SubscriptionChange,
    SubscriptionMetadata,
    subscription_path,
    to_record,
    topic_path,
)
from braid.testing.raw_client import JAVA, RawClient, hello, id_of, position_of
from braid.wire import requests
from braid.wire.types import CommandType, InitialPosition, ServerError, SubType

TOPIC = TopicName.parse("topic://public/default/orders")
EPOCH = 7
LIFE = "incarnation-1"
LEADER = {"epoch": EPOCH, "incarnation": LIFE}
BRAID = {"metadata": [{"key": "__braid.dedup", "value": "true"}]}


def record_of(layout: SegmentLayout, **fields: Any) -> ScalableTopicMetadata:
    empty = ScalableTopicMetadata(epoch=0, next_segment_id=0, segments={}, incarnation=LIFE, leader_epoch=EPOCH)
    return msgspec.structs.replace(empty.with_layout(layout), **fields)


def splitting(layout: SegmentLayout, parent: int) -> PendingOperation:
    """What is written down before a split is done."""
    children = [each for each in layout.split(parent, 5).all_segments.values() if each.segment_id >= layout.next_segment_id]
    return PendingOperation(
        kind="split", operation_id="a", started_ms=5, parents=(parent,), children=tuple(map(to_record, children))
    )


async def put(world: Any, record: ScalableTopicMetadata | None, topic: TopicName = TOPIC) -> None:
    """Write the topic's record as its controller would."""
    await with_handle(world, topic_path(topic), record)


async def with_handle(world: Any, key: str, record: Any) -> None:
    handle = world.brokers[0].service.metadata
    if record is None:
        await handle.delete(key)
    else:
        await handle.put(key, msgspec.json.encode(record))


def names(layout: SegmentLayout) -> dict[int, TopicName]:
    return {number: physical_name(TOPIC, each) for number, each in layout.all_segments.items()}


def made(broker: Any) -> Any:
    return broker.service.local_segments


async def create(broker: Any, segment: TopicName, *, epoch: int = EPOCH, life: str = LIFE, **options: Any) -> None:
    await made(broker).create(
        segment,
        subscriptions=options.get("subscriptions", {}),
        producers=options.get("producers", {}),
        epoch=epoch,
        incarnation=life,
    )


async def lookup(client: RawClient, topic: TopicName | str) -> Any:
    request_id = client.next_request()
    client.send(requests.lookup(request_id, str(topic)))
    return await client.answer(request_id)


@pytest.fixture
async def layout(world: Any, broker: Any) -> SegmentLayout:
    """One topic of two segments, whose record says so; its segments are not made yet."""
    made = SegmentLayout.initial(2, 1)
    await put(world, record_of(made))
    return made


# What clients may do.


@pytest.mark.req("R468-86")
async def test_topics_and_segments_are_looked_up_and_have_no_partitions(broker: Any, client: RawClient, layout: Any) -> None:
    for name in (TOPIC, names(layout)[0]):
        assert (await lookup(client, name)).brokerServiceUrl == broker.url
        request_id = client.next_request()
        client.send(requests.partitioned_metadata(request_id, str(name), True))
        assert (await client.answer(request_id)).partitions == 0
    with pytest.raises(NotAllowed, match="scalable topic"):
        await client.producer(str(TOPIC))
    with pytest.raises(NotAllowed, match="scalable topic"):
        await client.subscribe(str(TOPIC))


async def test_an_active_segment_is_made_by_its_first_client_and_no_other(world: Any, client: RawClient, layout: Any) -> None:
    await client.producer(str(names(layout)[0]), 1)
    assert (await client.store(b"x", 0, 1)).entry_id == 0
    split = layout.split(1, 5)
    sealed, child = names(split)[1], names(split)[2]
    for refused in (
        "segment://public/default/orders/0000-ffff-0",  # the id of another range
        "segment://public/default/orders/0000-7fff-9",
        "segment://public/default/unknown/0000-7fff-0",
        str(child),
    ):
        with pytest.raises(TopicNotFound):
            await client.producer(refused, 2)
    # A child of a pending split exists only once the leader has made it, and a sealed segment is not made again.
    await put(world, record_of(layout, pending_operation=splitting(layout, 1)))
    with pytest.raises(TopicNotFound):
        await client.producer(str(child), 3)
    await put(world, record_of(split))
    with pytest.raises(TopicNotFound):
        await client.subscribe(str(sealed), durable=False)
    await client.producer(str(child), 4)


async def test_a_topic_being_deleted_makes_no_segments(world: Any, client: RawClient, layout: Any) -> None:
    await put(world, record_of(layout, pending_operation=PendingOperation(kind="delete", operation_id="d")))
    with pytest.raises(TopicNotFound):
        await client.producer(str(names(layout)[0]))


@pytest.mark.req("R468-86")
async def test_switched_off_nothing_scalable_is_served_or_advertised(world: Any) -> None:
    broker = await world.broker(scalable=ScalableConfig(enabled=False))
    client = await broker.client(handshake=False)
    client.send(hello())
    assert not (await client.expect(CommandType.CONNECTED)).feature_flags.supports_scalable_topics
    await put(world, record_of(SegmentLayout.initial(1, 1)))
    segment = "segment://public/default/orders/0000-ffff-0"
    assert (await lookup(client, TOPIC)).error == ServerError.NOT_ALLOWED_ERROR
    assert (await lookup(client, segment)).error == ServerError.NOT_ALLOWED_ERROR
    for attempt in (client.producer(segment), client.subscribe(segment)):
        with pytest.raises(NotAllowed, match="switched off"):
            await attempt
    # Regular topics are as they were, and a name stays taken (R468-88).
    await client.producer("persistent://public/default/plain", 2)
    with pytest.raises(NotAllowed):
        await client.producer("persistent://public/default/orders", 3)


@pytest.mark.req("R468-87")
async def test_a_scalable_topic_and_a_regular_one_never_share_a_name(world: Any, broker: Any, client: RawClient) -> None:
    service = broker.service
    await put(world, record_of(SegmentLayout.initial(1, 1)))
    regular = TopicName.parse("persistent://public/default/orders")
    for name in (regular, regular.partition(3)):
        with pytest.raises(NotAllowed, match="scalable"):
            await client.producer(str(name))
    request_id = client.next_request()
    client.send(requests.partitioned_metadata(request_id, str(regular), True))
    assert (await client.answer(request_id)).error == ServerError.NOT_ALLOWED_ERROR
    with pytest.raises(AlreadyExists):
        await service.create_topic(regular)
    with pytest.raises(AlreadyExists):
        await service.create_partitioned(regular, 2)
    assert await service.list_topics(regular.namespace) == []
    assert await service.namespaces.partitioned_topics(regular.namespace) == []
    # The other way round.
    for local in ("plain", "parts"):
        assert await service.regular_partitions(TopicName.parse(f"topic://public/default/{local}")) is None
    await service.create_topic(TopicName.parse("plain"))
    await service.create_partitioned(TopicName.parse("parts"), 3)
    assert await service.regular_partitions(TopicName.parse("topic://public/default/plain")) == 0
    assert await service.regular_partitions(TopicName.parse("topic://public/default/parts")) == 3


@pytest.mark.req("R468-87")
async def test_a_regular_topic_whose_creator_crashed_before_it_looked_is_taken_back_when_it_is_loaded(
    world: Any, broker: Any, client: RawClient
) -> None:
    await put(world, record_of(SegmentLayout.initial(1, 1), leader_epoch=0))
    name = TopicName.parse("persistent://public/default/orders")
    await broker.service.logs.create(name.managed_ledger_name)  # and there the creator ended
    with pytest.raises(NotAllowed, match="scalable"):
        await client.producer(str(name))
    assert await broker.service.logs.exists(name.managed_ledger_name), "nobody leads the scalable topic here"
    await broker.service.scalable.lead_scalable(TOPIC)
    with pytest.raises(NotAllowed, match="scalable"):
        await client.producer(str(name))
    assert not await broker.service.logs.exists(name.managed_ledger_name)
    # One that stores a segment of the scalable topic is no such leftover.
    stored = SegmentLayout.synthetic([str(name)])
    await put(world, record_of(stored))
    await broker.service.logs.create(name.managed_ledger_name)
    await broker.service.topic(name, create=False)


@pytest.mark.inv("INV4", "INV6")
@pytest.mark.parametrize("moment", ["pending", "pending at the claim", "another owner", "has a cursor"])
async def test_an_empty_log_is_deleted_only_while_no_operation_can_need_it(
    world: Any, broker: Any, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """A scalable topic that is just being made is taken back if a regular one has its name: deleting that one as well would
    leave nothing. And a log that another owner has opened meanwhile may have messages by now."""
    service = broker.service
    await put(world, record_of(SegmentLayout.initial(1, 1), leader_epoch=0))
    controller = await service.scalable.lead_scalable(TOPIC)
    name = TopicName.parse("persistent://public/default/orders")
    await service.logs.create(name.managed_ledger_name)
    epoch = controller.metadata.leader_epoch
    pending = record_of(
        SegmentLayout.initial(1, 1), leader_epoch=epoch, pending_operation=PendingOperation(kind="create", operation_id="c")
    )
    if moment == "pending":
        await put(world, pending)
        with pytest.raises(NotReady, match="just being made"):
            await service.topic(name, create=False)
    else:
        claim = controller.claim

        async def meanwhile() -> Any:
            assert moment != "has a cursor", "it is not asked"
            if moment == "another owner":
                found = await claim()
                await service.logs.open(name.managed_ledger_name, object(), create=False)
                return found
            await put(world, pending)
            return await claim()

        if moment == "has a cursor":
            used = await service.logs.open(name.managed_ledger_name, object(), create=False)
            await used.open_cursor("theirs", initial="earliest")
            await used.close()
        monkeypatch.setattr(controller, "claim", meanwhile)
        with pytest.raises(NotAllowed):
            await service.topic(name, create=False)
    assert await service.logs.exists(name.managed_ledger_name)


@pytest.mark.req("R468-87")
async def test_a_scalable_topic_whose_creator_crashed_before_it_looked_is_taken_back_by_its_leader(
    world: Any, broker: Any
) -> None:
    """The creator looked, then a regular topic was made, then the creator put its record and ended."""
    name = TopicName.parse("persistent://public/default/orders")
    await broker.service.create_topic(name)
    pending = PendingOperation(kind="create", operation_id="c")
    await put(world, record_of(SegmentLayout.initial(2, 1), leader_epoch=0, pending_operation=pending))
    with pytest.raises(BraidError):
        await broker.service.scalable.lead_scalable(TOPIC)
    async with asyncio.timeout(10):
        while await broker.service.records.read(TOPIC) is not None:
            await world.advance(0.1)
    assert await broker.service.logs.exists(name.managed_ledger_name)
    for segment in names(SegmentLayout.initial(2, 1)).values():
        assert not await broker.service.logs.exists(segment.managed_ledger_name)
    await broker.service.topic(name, create=False)


@pytest.mark.req("R468-87")
async def test_a_regular_topic_made_while_a_scalable_one_is_wins_cleanly(broker: Any, monkeypatch: Any) -> None:
    service = broker.service
    name = TopicName.parse("persistent://public/default/orders")
    create_topic = service.scalable.create_topic

    async def slow(*given: Any, **named: Any) -> None:
        await service.create_topic(name)  # after the first look
        await create_topic(*given, **named)

    monkeypatch.setattr(service.scalable, "create_topic", slow)
    with pytest.raises(AlreadyExists):
        await service.create_scalable_topic(TOPIC, 2)
    assert await service.records.read(TOPIC) is None
    await service.topic(name, create=False)


async def test_a_namespace_with_a_scalable_topic_is_not_deleted(world: Any, broker: Any) -> None:
    namespace = NamespaceName.parse("public/other")
    await broker.service.namespaces.create_namespace(namespace, {})
    topic = TopicName.parse("topic://public/other/a/b")
    await put(world, record_of(SegmentLayout.initial(1, 1)), topic)
    with pytest.raises(Conflict, match="still has topics"):
        await broker.service.delete_namespace(namespace)
    await put(world, None, topic)
    await broker.service.delete_namespace(namespace)


# What a leader may do.


@pytest.mark.req("R468-57", "R468-60")
async def test_creation_makes_topic_and_cursors_and_can_be_repeated(broker: Any, layout: Any, client: RawClient) -> None:
    segment = names(layout)[1]
    assert str(segment) == "segment://public/default/orders/8000-ffff-1"
    for _ in range(2):
        await create(broker, segment, subscriptions={"a": "earliest", "b c": "latest"})
    assert await made(broker).subscriptions(segment) == ["a", "b c"]
    await client.producer(str(segment))
    position = await client.store(b"x", 0)
    await create(broker, segment, subscriptions={"late": "earliest", "later": "latest"})
    backlogs = {name: (await made(broker).backlog(segment, name)).messages for name in ("a", "b c", "late", "later")}
    assert backlogs == {"a": 1, "b c": 1, "late": 1, "later": 0}
    assert position.entry_id == 0
    assert broker.topic(str(segment)).log.properties[INCARNATION] == LIFE


async def test_stale_leaders_and_others_are_refused_and_change_nothing(world: Any, broker: Any, layout: Any) -> None:
    segment, ops = names(layout)[0], made(broker)
    await create(broker, segment)
    for epoch, life in ((EPOCH - 1, LIFE), (EPOCH, "another"), (EPOCH + 5, "another")):
        with pytest.raises(StaleLeader):
            await create(broker, names(layout)[1], epoch=epoch, life=life)
        with pytest.raises(StaleLeader):
            await ops.terminate(segment, epoch=epoch, incarnation=life)
        with pytest.raises(StaleLeader):
            await ops.delete(segment, epoch=epoch, incarnation=life)
    unknown = TopicName.parse("segment://public/default/orders/0000-00ff-77")
    with pytest.raises(TopicNotFound):
        await create(broker, unknown)
    await put(world, None)
    for refused in (
        create(broker, segment),
        ops.terminate(segment, epoch=EPOCH, incarnation=LIFE, force=True),
        ops.delete(segment, epoch=EPOCH, incarnation=LIFE, force=True),
    ):
        with pytest.raises(TopicNotFound):
            await refused
    assert await broker.service.logs.exists(segment.managed_ledger_name)
    assert not broker.topic(str(segment)).log.is_terminated
    assert not await broker.service.logs.exists(names(layout)[1].managed_ledger_name)


async def test_a_stale_leader_that_wakes_up_moves_and_removes_no_cursor(world: Any, broker: Any, layout: Any) -> None:
    """INV4: a seek, skip or deletion that was held up on its way comes after the successor's consumers have gone on."""
    segment, ops, client = names(layout)[0], made(broker), await broker.client()
    await create(broker, segment, subscriptions={"s": "earliest", "t": "earliest"})
    await client.producer(str(segment))
    await client.store(b"x", 0)
    await ops.skip_all(segment, "t", epoch=EPOCH, incarnation=LIFE)
    await put(world, record_of(layout, leader_epoch=EPOCH + 1))  # claimed by a successor
    for epoch, life in ((EPOCH, LIFE), (EPOCH + 1, "another")):
        for late in (
            ops.skip_all(segment, "s", epoch=epoch, incarnation=life),
            ops.seek(segment, "s", world.clock.now_ms() + 1000, epoch=epoch, incarnation=life),
            ops.seek(segment, "t", 0, epoch=epoch, incarnation=life),
            ops.delete_subscription(segment, "s", epoch=epoch, incarnation=life),
            ops.create_subscription(segment, "u", "latest", epoch=epoch, incarnation=life),
        ):
            with pytest.raises(StaleLeader):
                await late
    assert await ops.subscriptions(segment) == ["s", "t"]
    assert [(await ops.backlog(segment, name)).messages for name in ("s", "t")] == [1, 0]
    await ops.skip_all(segment, "s", epoch=EPOCH + 1, incarnation=LIFE)
    assert (await ops.backlog(segment, "s")).messages == 0


async def test_a_seek_is_checked_after_the_search_for_its_position(world: Any, broker: Any, layout: Any) -> None:
    segment, ops, client = names(layout)[0], made(broker), await broker.client()
    await create(broker, segment, subscriptions={"s": "earliest"})
    await client.producer(str(segment))
    await client.store(b"x", 0)
    log = broker.topic(str(segment)).log
    find_time = log.find_time

    class Slow:
        """The log, in which a search lasts until there is a new leader."""

        def __getattr__(self, name: str) -> Any:
            return getattr(log, name)

        async def find_time(self, ms: int) -> Any:
            await put(world, record_of(layout, leader_epoch=EPOCH + 1))
            return await find_time(ms)

    broker.topic(str(segment)).log = Slow()
    try:
        with pytest.raises(StaleLeader):
            await ops.seek(segment, "s", world.clock.now_ms() + 1000, **LEADER)
    finally:
        broker.topic(str(segment)).log = log
    assert (await ops.backlog(segment, "s")).messages == 1


async def test_the_partition_of_a_regular_topic_has_no_leader_to_compare_with(broker: Any) -> None:
    name = TopicName.parse("persistent://public/default/plain")
    await broker.service.create_topic(name)
    ops = made(broker)
    await ops.create_subscription(name, "s", "earliest", epoch=1, incarnation="")
    await ops.seek(name, "s", 0, epoch=0, incarnation="")
    await ops.delete_subscription(name, "s", epoch=1, incarnation="")
    assert await ops.subscriptions(name) == []


async def test_a_pending_child_is_made_by_the_leader(world: Any, broker: Any, layout: Any) -> None:
    split = layout.split(0, 5)
    await put(world, record_of(layout, pending_operation=splitting(layout, 0)))
    await create(broker, names(split)[2], subscriptions={"s": "earliest"})
    assert await made(broker).subscriptions(names(split)[2]) == ["s"]


@pytest.mark.req("R468-59")
async def test_deletion_removes_topic_and_data_with_its_clients(
    broker: Any, layout: Any, client: RawClient, world: Any
) -> None:
    segment = names(layout)[0]
    await client.producer(str(segment))
    await client.subscribe(str(segment), durable=False)
    await client.store(b"x", 0)
    await made(broker).delete(segment, epoch=EPOCH, incarnation=LIFE, force=True)
    await client.expect(CommandType.CLOSE_PRODUCER)
    await client.expect(CommandType.CLOSE_CONSUMER)
    assert not await broker.service.logs.exists(segment.managed_ledger_name)
    assert world.ledgers._ledgers == {}
    await made(broker).delete(segment, epoch=EPOCH, incarnation=LIFE, force=True)
    with pytest.raises(TopicNotFound):
        await made(broker).backlog(segment, "sub")


async def test_a_deletion_that_was_interrupted_is_finished_by_the_next(world: Any, broker: Any, layout: Any) -> None:
    """Found by simulation: a record that was marked as deleted passed for a log that is gone."""
    segment, store = names(layout)[0], broker.service.metadata
    client = await broker.client()
    await create(broker, segment, subscriptions={"s": "earliest"})
    await client.producer(str(segment))
    await client.store(b"x", 0)
    delete = store.delete

    async def refused(key: str, **options: Any) -> None:
        raise StoreUnavailable("The store does not answer.")

    store.delete = refused
    with pytest.raises(StoreUnavailable):
        await made(broker).delete(segment, epoch=EPOCH, incarnation=LIFE, force=True)
    store.delete = delete
    assert not await broker.service.logs.exists(segment.managed_ledger_name)
    await made(broker).delete(segment, epoch=EPOCH, incarnation=LIFE, force=True)
    key = log_key(segment.managed_ledger_name)
    assert await store.get(key, fresh=True) is None
    assert [record.key async for record in store.scan(Span(key), fresh=True)] == []
    assert world.ledgers._ledgers == {}


async def test_what_an_earlier_topic_left_behind_is_refused_and_made_anew(world: Any, broker: Any, layout: Any) -> None:
    """INV5: delete and re-create never shows old data."""
    segment, client = names(layout)[0], await broker.client()
    await client.producer(str(segment))
    await client.store(b"old", 0)
    await put(world, record_of(layout, incarnation="incarnation-2"))
    await broker.service.unload(broker.topic(str(segment)))
    with pytest.raises(NotReady, match="earlier topic"):
        await client.producer(str(segment), 2)
    await create(broker, segment, life="incarnation-2", subscriptions={"s": "earliest"})
    assert (await made(broker).backlog(segment, "s")).messages == 0
    await client.producer(str(segment), 3)


# Seal.


@pytest.mark.req("R468-47", "R468-58")
async def test_a_seal_answers_what_is_stored_closes_producers_and_refuses_the_rest(
    broker: Any, layout: Any, client: RawClient, until: Any
) -> None:
    segment = names(layout)[0]
    await client.producer(str(segment), name="p")
    producer = broker.topic(str(segment)).producers["p"]
    for number in range(3):
        client.publish(b"x", number)
    await until(lambda: producer.pushed == 3)
    sealed = await made(broker).terminate(segment, epoch=EPOCH, incarnation=LIFE, force=True)
    receipts = [position_of((await client.receipt()).message_id) for _ in range(3)]
    await client.expect(CommandType.CLOSE_PRODUCER)
    assert sealed.position == receipts[-1]
    assert sealed.producers == {}
    client.publish(b"late", 3)
    refused = await client.expect(CommandType.SEND_ERROR)
    assert (refused.producer_id, refused.sequence_id, refused.error) == (1, 3, ServerError.TOPIC_TERMINATED_ERROR)
    with pytest.raises(TopicTerminated):
        await client.producer(str(segment), 2)
    assert await made(broker).terminate(segment, epoch=EPOCH, incarnation=LIFE, force=True) == sealed


async def test_sends_that_arrive_while_the_seal_is_written_are_refused_after_the_receipts_before_them(
    world: Any, broker: Any, layout: Any, client: RawClient, until: Any
) -> None:
    segment = names(layout)[0]
    await client.producer(str(segment))
    await client.store(b"first", 0)
    topic = broker.topic(str(segment))
    world.ledgers.hold()
    client.publish(b"on its way", 1)
    await until(lambda: topic.producers[next(iter(topic.producers))].pushed == 2)
    sealing = asyncio.ensure_future(made(broker).terminate(segment, epoch=EPOCH, incarnation=LIFE, force=True))
    await until(lambda: topic.log._is_terminating)
    client.publish(b"too late", 2)
    client.publish(b"too late as well", 3)
    await until(lambda: len(topic.producers[next(iter(topic.producers))].deferred) == 2)
    assert client.inbox == []
    world.ledgers.release()
    sealed = await sealing
    await client.settle()
    assert client.kinds() == [CommandType.SEND_RECEIPT] + [CommandType.SEND_ERROR] * 2 + [CommandType.CLOSE_PRODUCER]
    assert [each.body.sequence_id for each in client.inbox[:3]] == [1, 2, 3]  # type: ignore[union-attr]
    assert sealed.position.entry_id == 1


async def test_consumers_of_a_sealed_segment_read_it_to_its_end(broker: Any, layout: Any) -> None:
    segment, client = names(layout)[0], await broker.client(client_version=JAVA)
    await create(broker, segment, subscriptions={"s": "earliest"})
    await client.producer(str(segment))
    position = await client.store(b"x", 0)
    await client.subscribe(str(segment), "s", permits=10, consumer_name="one-seg-0")
    await client.messages(1)
    ops = made(broker)
    await ops.terminate(segment, epoch=EPOCH, incarnation=LIFE, force=True)
    before = await ops.backlog(segment, "s")
    assert (before.messages, before.is_terminated, before.is_drained, before.consumers) == (1, True, False, ("one-seg-0",))
    await client.acked(position)
    await client.expect(CommandType.REACHED_END_OF_TOPIC)
    assert (await ops.backlog(segment, "s")).is_drained
    await client.close_consumer()
    assert ((await ops.backlog(segment, "s")).consumers, (await ops.backlog(segment, "s")).closed) == ((), ("one-seg-0",))
    await client.subscribe(str(segment), "s", consumer_name="one-seg-0")
    assert (await ops.backlog(segment, "s")).closed == ()


async def test_a_drained_answer_survives_a_crash_of_the_owner(world: Any, broker: Any, layout: Any) -> None:
    """INV8: acknowledged in memory only would be undrained again after a crash, when others read the children already."""
    segment, client = names(layout)[0], await broker.client()
    await create(broker, segment, subscriptions={"s": "earliest"})
    await client.producer(str(segment))
    position = await client.store(b"x", 0)
    await client.subscribe(str(segment), "s", permits=10)
    await client.messages(1)
    await made(broker).terminate(segment, epoch=EPOCH, incarnation=LIFE, force=True)
    client.ack(position)
    await client.settle()
    assert (await made(broker).backlog(segment, "s")).is_drained
    await broker.kill()
    successor = await world.broker(believes=True)
    assert (await made(successor).backlog(segment, "s")).is_drained


@pytest.mark.inv("INV8")
async def test_a_segment_is_not_called_drained_while_its_last_acknowledgment_is_being_written(
    broker: Any, layout: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment, client = names(layout)[0], await broker.client()
    await create(broker, segment, subscriptions={"s": "earliest"})
    await client.producer(str(segment))
    position = await client.store(b"x", 0)
    await client.subscribe(str(segment), "s", permits=10)
    await client.messages(1)
    await made(broker).terminate(segment, epoch=EPOCH, incarnation=LIFE, force=True)
    honest, written = CursorStore.save, asyncio.Event()

    async def late(store: CursorStore, state: Any) -> None:
        await written.wait()
        await honest(store, state)

    monkeypatch.setattr(CursorStore, "save", late)
    client.ack(position)
    await client.settle()
    asked = asyncio.get_running_loop().create_task(made(broker).backlog(segment, "s"))
    await client.settle()
    is_said = asked.done()
    written.set()
    assert not is_said
    assert (await asked).is_drained


@pytest.mark.inv("INV8")
async def test_a_segment_set_back_while_its_end_is_written_is_not_called_drained(
    broker: Any, layout: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment, client = names(layout)[0], await broker.client()
    await create(broker, segment, subscriptions={"s": "earliest"})
    await client.producer(str(segment))
    await client.store(b"x", 0)
    subscription = broker.topic(str(segment)).subscriptions["s"]
    await subscription.seek(LATEST)
    await made(broker).terminate(segment, epoch=EPOCH, incarnation=LIFE, force=True)
    flush = subscription.cursor.flush

    async def sought_meanwhile() -> None:
        await flush()
        monkeypatch.setattr(subscription.cursor, "flush", flush)
        await subscription.seek(EARLIEST)

    monkeypatch.setattr(subscription.cursor, "flush", sought_meanwhile)
    found = await made(broker).backlog(segment, "s")
    assert (found.messages, found.is_drained) == (1, False)


async def test_acknowledgments_of_a_sealed_segment_are_saved_before_its_operation_ends(
    world: Any, broker: Any, layout: Any
) -> None:
    """Found with Pulsar's Java client: it never repeats an acknowledgment, and after a seal no later one covers a lost one."""
    segment, client = names(layout)[0], await broker.client()
    await create(broker, segment, subscriptions={"s": "earliest"})
    await client.producer(str(segment))
    position = await client.store(b"x", 0)
    await client.store(b"y", 1)
    await client.subscribe(str(segment), "s", permits=10)
    await client.messages(2)
    client.ack(position)
    await client.settle()
    await made(broker).terminate(segment, epoch=EPOCH, incarnation=LIFE, force=True)
    assert await made(broker).subscriptions(segment) == ["s"]
    await broker.kill()
    successor = await world.broker(believes=True)
    assert (await made(successor).backlog(segment, "s")).messages == 1


async def test_the_end_is_told_when_it_survives_a_crash_of_the_owner(world: Any, broker: Any, layout: Any, until: Any) -> None:
    """Found by simulation: who is told the end does not come back, so an acknowledgment lost after it is never repeated."""
    segment, client = names(layout)[0], await broker.client(client_version=JAVA)
    await create(broker, segment, subscriptions={"s": "earliest"})
    await client.producer(str(segment))
    position = await client.store(b"x", 0)
    await client.subscribe(str(segment), "s", permits=10)
    await client.messages(1)
    await made(broker).terminate(segment, epoch=EPOCH, incarnation=LIFE, force=True)
    await client.settle()
    client.inbox.clear()
    world.ledgers.hold()
    client.ack(position)
    cursor = broker.topic(str(segment)).subscriptions["s"].cursor
    await until(lambda: cursor.backlog() == 0)
    await client.settle()
    assert CommandType.REACHED_END_OF_TOPIC not in client.kinds()
    world.ledgers.release()
    await client.expect(CommandType.REACHED_END_OF_TOPIC)
    await broker.kill()
    successor = await world.broker(believes=True)
    assert (await made(successor).backlog(segment, "s")).is_drained


async def test_the_end_is_told_later_if_it_could_not_be_written_down(world: Any, broker: Any, layout: Any, until: Any) -> None:
    segment, client = names(layout)[0], await broker.client(client_version=JAVA)
    await create(broker, segment, subscriptions={"s": "earliest"})
    await client.producer(str(segment))
    position = await client.store(b"x", 0)
    await client.subscribe(str(segment), "s", permits=10)
    await client.messages(1)
    await made(broker).terminate(segment, epoch=EPOCH, incarnation=LIFE, force=True)
    await client.settle()
    client.inbox.clear()
    cursor = broker.topic(str(segment)).subscriptions["s"].cursor
    save = cursor._store.save

    async def refused(_position: Any) -> None:
        raise StorageUnavailable("The disk does not answer.")

    cursor._store.save = refused
    client.ack(position)
    await until(lambda: cursor.backlog() == 0)
    await client.settle()
    assert CommandType.REACHED_END_OF_TOPIC not in client.kinds()
    cursor._store.save = save
    await world.advance(END_RETRY_SECONDS)
    await client.expect(CommandType.REACHED_END_OF_TOPIC)


# Deduplication handed on.


async def test_children_know_what_the_parent_has_stored(world: Any, broker: Any, layout: Any) -> None:
    parent, client = names(layout)[0], await broker.client()
    reply = await client.producer(str(parent), name="lane", **BRAID)
    assert reply.last_sequence_id == -1
    await client.producer(str(parent), 2, name="other")
    for number in range(5):
        await client.store(b"x", number, producer_name="lane")
    await client.store(b"y", 0, 2, producer_name="other")
    assert (await client.store(b"x", 4)).entry_id == -1  # a duplicate
    assert (await client.store(b"y", 0, 2)).entry_id > 0  # nobody asked for deduplication of this one
    sealed = await made(broker).terminate(parent, epoch=EPOCH, incarnation=LIFE, force=True)
    assert sealed.producers["lane"] == 4
    split = layout.split(0, 5)
    await put(world, record_of(split))
    child = names(split)[2]
    await create(broker, child)
    await create(broker, child, producers=sealed.producers)
    await broker.kill()
    successor = await world.broker(believes=True)
    again = await successor.client()
    assert (await again.producer(str(child), name="lane", **BRAID)).last_sequence_id == 4
    assert (await again.store(b"x", 3)).entry_id == -1
    assert (await again.store(b"x", 4)).entry_id == -1
    assert (await again.store(b"x", 5)).entry_id == 0
    # Handing it over again does not lower what is known, and the child hands it on.
    await create(successor, child, producers={"lane": 2, "third": 9})
    assert (await made(successor).terminate(child, epoch=EPOCH, incarnation=LIFE, force=True)).producers["lane"] == 5
    assert (await made(successor).terminate(child, epoch=EPOCH, incarnation=LIFE, force=True)).producers["third"] == 9


async def test_deduplication_by_request_is_not_undone_by_the_namespace_policy(broker: Any, layout: Any) -> None:
    segment, client = names(layout)[0], await broker.client()
    await client.producer(str(segment), name="lane", **BRAID)
    await client.store(b"x", 3)
    await broker.policy("deduplicationEnabled", True)
    await broker.policy("deduplicationEnabled", False)
    assert (await client.store(b"x", 3)).entry_id == -1
    await broker.service.unload(broker.topic(str(segment)))
    assert (await client.producer(str(segment), 2, name="lane", **BRAID)).last_sequence_id == 3


# Subscriptions of queue consumers (L-07).


@pytest.mark.parametrize("created_at", [0, -1], ids=["known", "unknown"])
async def test_a_segment_younger_than_the_subscription_is_read_from_its_beginning(
    world: Any, broker: Any, layout: Any, created_at: int
) -> None:
    split = layout.split(0, 5)
    await put(world, record_of(split))
    old, child = names(split)[1], names(split)[2]
    for segment in (old, child):
        await create(broker, segment)
    await with_handle(
        world,
        subscription_path(TOPIC, "queue"),
        SubscriptionMetadata(type="QUEUE", initial="latest", created_at_epoch=created_at),
    )
    client = await broker.client()
    for number, segment in enumerate((old, child), 1):
        await client.producer(str(segment), number)
        await client.store(b"before", 0, number)
        await client.subscribe(str(segment), "queue", SubType.SHARED, number, initial=InitialPosition.LATEST)
    assert (await made(broker).backlog(old, "queue")).messages == 0
    assert (await made(broker).backlog(child, "queue")).messages == 1


@pytest.mark.inv("INV8")
async def test_who_shares_messages_cannot_attach_to_a_subscription_of_stream_consumers(
    world: Any, broker: Any, layout: Any, client: RawClient
) -> None:
    segment = names(layout)[0]
    await create(broker, segment, subscriptions={"stream": "earliest"})
    for kind in ("STREAM", "CHECKPOINT"):
        await with_handle(world, subscription_path(TOPIC, kind.lower()), SubscriptionMetadata(type=kind))
    for sub_type in (SubType.SHARED, SubType.FAILOVER, SubType.KEY_SHARED):
        with pytest.raises(NotAllowed, match=r"stream of .* is one of STREAM consumers; a QUEUE consumer needs one of its own"):
            await client.subscribe(str(segment), "stream", sub_type)
    await client.subscribe(str(segment), "stream", SubType.EXCLUSIVE, 2)
    for number, sub_type in enumerate((SubType.SHARED, SubType.EXCLUSIVE), 3):
        with pytest.raises(NotAllowed, match=r"checkpoint of .* is one of CHECKPOINT consumers"):
            await client.subscribe(str(segment), "checkpoint", sub_type, number)
    await client.subscribe(str(segment), "workers", SubType.SHARED, 5)
    await client.subscribe(str(names(layout)[1]), "workers", SubType.EXCLUSIVE, 6)  # that is nobody else's business


@pytest.mark.inv("INV7")
async def test_a_segment_made_by_an_attachment_has_the_cursors_of_every_subscription(
    world: Any, broker: Any, layout: Any, client: RawClient
) -> None:
    for name, record in {
        "sub": SubscriptionMetadata(type="STREAM"),
        "new": SubscriptionMetadata(type="QUEUE", initial="latest"),
        "marks": SubscriptionMetadata(type="CHECKPOINT"),
        "doomed": SubscriptionMetadata(pending=SubscriptionChange(kind="delete", operation_id="d")),
        "of another": SubscriptionMetadata(incarnation="another"),
    }.items():
        await with_handle(world, subscription_path(TOPIC, name), record)
    segment = names(layout)[0]
    await client.producer(str(segment))
    await client.store(b"x", 0)
    assert await made(broker).subscriptions(segment) == ["new", "sub"]
    for name in ("new", "sub"):
        assert (await made(broker).backlog(segment, name)).messages == 1


async def test_a_reader_counts_until_it_was_sent_everything(broker: Any, layout: Any, client: RawClient) -> None:
    segment = names(layout)[0]
    await client.producer(str(segment))
    for number in range(3):
        await client.store(b"x", number)
    await client.subscribe(str(segment), "reader", durable=False, start_message_id=id_of(EARLIEST))
    stats = await made(broker).stats(segment)
    assert (stats.readers, stats.consumers, stats.is_terminated) == (1, {}, False)
    client.flow(10)
    await client.messages(3)
    assert (await made(broker).stats(segment)).readers == 0
    await made(broker).terminate(segment, epoch=EPOCH, incarnation=LIFE, force=True)
    assert (await made(broker).stats(segment)).is_terminated


@pytest.mark.inv("INV5")
async def test_a_cursor_without_a_record_is_not_enough_to_attach(
    world: Any, broker: Any, layout: Any, client: RawClient
) -> None:
    segment = names(layout)[0]
    await create(broker, segment, subscriptions={"left": "earliest"})
    await client.subscribe(str(segment), "left", SubType.SHARED)
    assert await broker.service.records.subscription(TOPIC, "left") is not None


async def test_nobody_attaches_while_the_subscription_or_the_topic_is_being_deleted(
    world: Any, broker: Any, layout: Any, client: RawClient
) -> None:
    segment, key = names(layout)[0], subscription_path(TOPIC, "s")
    await create(broker, segment, subscriptions={"s": "earliest"})
    record = SubscriptionMetadata(type="QUEUE")
    doomed = SubscriptionMetadata(type="QUEUE", pending=SubscriptionChange(kind="delete", operation_id="d"))
    await with_handle(world, key, doomed)
    with pytest.raises(NotReady, match="being deleted"):
        await client.subscribe(str(segment), "s", SubType.SHARED)
    await with_handle(world, key, record)
    await client.subscribe(str(segment), "s", SubType.SHARED)
    await put(world, record_of(layout, pending_operation=PendingOperation(kind="delete", operation_id="d")))
    for subscription in ("s", "another"):
        with pytest.raises(NotReady, match="being deleted"):
            await client.subscribe(str(segment), subscription, SubType.SHARED, 2)
    assert await made(broker).subscriptions(segment) == ["s"]


async def test_the_durable_subscription_of_a_segment_is_neither_reset_nor_deleted_by_a_client(
    broker: Any, layout: Any, client: RawClient
) -> None:
    segment = names(layout)[0]
    await create(broker, segment, subscriptions={"s": "earliest"})
    await client.producer(str(segment))
    position = await client.store(b"x", 0)
    await client.subscribe(str(segment), "s")
    with pytest.raises(NotAllowed, match=r"topic://public/default/orders"):
        await client.unsubscribe()
    with pytest.raises(NotAllowed):
        await client.seek(position)
    await client.subscribe(str(segment), "reader", consumer_id=2, durable=False)
    await client.seek(position, 2)


@pytest.mark.inv("INV8")
@pytest.mark.parametrize("name", ["anybody", "c-seg-0"])
async def test_subscribing_with_a_rollback_resets_no_subscription_of_a_segment(
    world: Any, broker: Any, layout: Any, client: RawClient, name: str
) -> None:
    segment = names(layout)[0]
    await create(broker, segment, subscriptions={"s": "earliest"})
    await with_handle(world, subscription_path(TOPIC, "s"), SubscriptionMetadata(type="STREAM"))
    await client.producer(str(segment))
    await client.store(b"x", 0)
    topic = await broker.service.topic(segment, create=False)
    await topic.subscriptions["s"].seek(LATEST)
    await made(broker).terminate(segment, **LEADER, force=True)
    for subscription in ("s", "not there yet"):
        with pytest.raises(NotAllowed, match=r"topic://public/default/orders and is reset there"):
            await client.subscribe(
                str(segment), subscription, start_message_rollback_duration_sec=3600, consumer_name=name, permits=10
            )
    assert (await made(broker).backlog(segment, "s")).is_drained
    assert await made(broker).subscriptions(segment) == ["s"]  # nothing was made either
    await client.subscribe(str(segment), "reader", consumer_id=2, durable=False, start_message_rollback_duration_sec=3600)


@pytest.mark.inv("INV8")
@pytest.mark.parametrize("kind", ["STREAM", "QUEUE"])
@pytest.mark.parametrize("call", ["seek", "skip_all", "delete_subscription"])
async def test_only_an_operation_of_the_subscription_moves_or_removes_its_cursor(
    world: Any, broker: Any, layout: Any, client: RawClient, call: str, kind: Any
) -> None:
    segment, ops, key = names(layout)[0], made(broker), subscription_path(TOPIC, "s")
    await create(broker, segment, subscriptions={"s": "earliest"})
    await client.producer(str(segment))
    first = await client.store(b"x", 0)
    await client.store(b"y", 1)
    topic = await broker.service.topic(segment, create=False)
    await topic.subscriptions["s"].seek(topic.log.position_after(first))
    arguments: tuple[Any, ...] = ("s", 0) if call == "seek" else ("s",)
    await with_handle(world, key, SubscriptionMetadata(type=kind))
    with pytest.raises(NotAllowed, match=f"s is one of {TOPIC}"):
        await getattr(ops, call)(segment, *arguments, **LEADER)
    assert (await ops.backlog(segment, "s")).messages == 1
    doing = SubscriptionChange(kind="delete" if call == "delete_subscription" else "seek", operation_id="now")
    await with_handle(world, key, SubscriptionMetadata(type=kind, pending=doing))
    await getattr(ops, call)(segment, *arguments, operation="now", **LEADER)
    left = await ops.subscriptions(segment) and (await ops.backlog(segment, "s")).messages
    assert left == {"seek": 2, "skip_all": 0, "delete_subscription": []}[call]


@pytest.mark.inv("INV7")
async def test_a_stray_cursor_that_somebody_attaches_to_is_not_removed_under_it(
    world: Any, broker: Any, layout: Any, client: RawClient, monkeypatch: Any
) -> None:
    """The leader found no record of the subscription and asks for the removal; a queue consumer attaches meanwhile, with
    initial=latest, and adopts the cursor. Removed then, it would be made again behind what came in between."""
    segment, records = names(layout)[0], broker.service.records
    await create(broker, segment, subscriptions={"s": "earliest"})
    checked, allowed = asyncio.Event(), asyncio.Event()
    check = records.check_leader

    async def held_up(*arguments: Any) -> None:
        await check(*arguments)
        checked.set()
        await allowed.wait()

    monkeypatch.setattr(records, "check_leader", held_up)
    removal = asyncio.ensure_future(made(broker).delete_subscription(segment, "s", **LEADER))
    await checked.wait()
    monkeypatch.setattr(records, "check_leader", check)
    attachment = asyncio.ensure_future(client.subscribe(str(segment), "s", SubType.SHARED, permits=10))
    async with asyncio.timeout(10):
        while await records.subscription(TOPIC, "s") is None:  # noqa: ASYNC110 - it is a record
            await asyncio.sleep(0)
    allowed.set()
    with pytest.raises(NotAllowed, match=f"s is one of {TOPIC}"):
        await removal
    await attachment
    await client.producer(str(segment))
    await client.store(b"x", 0)
    assert await client.payloads(1) == [b"x"]


@pytest.mark.inv("INV7")
async def test_who_attaches_while_a_stray_cursor_goes_gets_one_of_its_own(
    broker: Any, layout: Any, client: RawClient, monkeypatch: Any
) -> None:
    """The same, a moment later: the owner looked and found no record. It looks under the topic's lock, so the consumer, which
    has put its record, does not adopt the cursor that is about to go."""
    segment, records = names(layout)[0], broker.service.records
    await create(broker, segment, subscriptions={"s": "earliest"})
    checked, allowed = asyncio.Event(), asyncio.Event()
    check = records.check_move

    async def held_up(*arguments: Any) -> None:
        await check(*arguments)
        checked.set()
        await allowed.wait()

    monkeypatch.setattr(records, "check_move", held_up)
    removal = asyncio.ensure_future(made(broker).delete_subscription(segment, "s", **LEADER))
    await checked.wait()
    attachment = asyncio.ensure_future(client.subscribe(str(segment), "s", SubType.SHARED, permits=10))
    async with asyncio.timeout(10):
        while await records.subscription(TOPIC, "s") is None:  # noqa: ASYNC110 - it is a record
            await asyncio.sleep(0)
    for _turn in range(200):  # it gets as far as it can
        await asyncio.sleep(0)
    assert not attachment.done()
    allowed.set()
    await removal
    await attachment
    await client.producer(str(segment))
    await client.store(b"x", 0)
    assert await client.payloads(1) == [b"x"]


async def test_subscription_calls_of_the_port(broker: Any, layout: Any, client: RawClient, world: Any) -> None:
    segment, ops = names(layout)[0], made(broker)
    with pytest.raises(TopicNotFound):
        await ops.subscriptions(segment)
    with pytest.raises(TopicNotFound):
        await ops.create_subscription(segment, "s", "earliest", **LEADER)
    await ops.delete_subscription(segment, "s", **LEADER)
    await create(broker, segment)
    await ops.create_subscription(segment, "s", "earliest", **LEADER)
    await ops.create_subscription(segment, "s", "latest", **LEADER)
    with pytest.raises(SubscriptionNotFound):
        await ops.backlog(segment, "t")
    await client.producer(str(segment))
    await client.store(b"one", 0)
    await world.advance(10)
    between = world.clock.now_ms() - 5000
    await client.store(b"two", 1)
    for when, left in ((0, 2), (between, 1), (world.clock.now_ms() + 60_000, 0), (0, 2)):
        await ops.seek(segment, "s", when, **LEADER)
        assert (await ops.backlog(segment, "s")).messages == left
    await ops.skip_all(segment, "s", **LEADER)
    assert (await ops.backlog(segment, "s")).messages == 0
    with pytest.raises(SubscriptionNotFound):
        await ops.seek(segment, "t", 0, **LEADER)
    with pytest.raises(SubscriptionNotFound):
        await ops.skip_all(segment, "t", **LEADER)
    stats = await ops.stats(segment)
    assert (stats.owner, stats.messages, stats.producers, stats.backlog) == (broker.ownership.broker_id, 2, 1, {"s": 0})
    for number in range(2, 12):
        await client.store(b"z", number)
    await world.advance(10)
    assert (await ops.stats(segment)).msg_rate_in == 1.1  # with the one before the first look, ten seconds ago
    await ops.delete_subscription(segment, "s", **LEADER)
    await ops.delete_subscription(segment, "s", **LEADER)
    assert await ops.subscriptions(segment) == []


# Trimming.


async def test_a_segment_named_by_a_pending_operation_is_not_trimmed(world: Any) -> None:
    broker = await world.broker(ManagedLedgerConfig(max_entries_per_ledger=1, min_ledger_age_ms=0))
    layout = SegmentLayout.initial(2, 1)
    split = layout.split(0, 5)
    children = tuple(to_record(split.all_segments[number]) for number in (2, 3))
    pending = PendingOperation(kind="split", operation_id="a", stage="finish", parents=(0,), children=children)
    await put(world, record_of(split, pending_operation=pending))
    client = await broker.client()
    child = names(split)[2]
    await client.producer(str(child))
    for number in range(5):
        await client.store(b"x", number)
    await world.advance(300)
    log = broker.topic(str(child)).log
    log.unread_minutes = 0
    assert await log.trim() == 0
    assert log.total_entries == 5
    await put(world, record_of(split))
    assert await log.trim() > 0


# Routing.


@pytest.mark.req("R468-61")
async def test_calls_reach_the_owner_from_any_broker(world: Any) -> None:
    brokers = [await world.broker() for _ in range(3)]
    layout = SegmentLayout.initial(8, 1)
    await put(world, record_of(layout))
    for broker in brokers:
        for segment in names(layout).values():
            await broker.service.segments.create(
                segment, subscriptions={"s": "earliest"}, producers={}, epoch=EPOCH, incarnation=LIFE
            )
    owners = {str(segment): [b for b in brokers if str(segment) in b.service.topics] for segment in names(layout).values()}
    assert all(len(found) == 1 for found in owners.values())
    assert len({found[0].url for found in owners.values()}) > 1
    for broker in brokers:
        for segment in names(layout).values():
            assert (await broker.service.segments.backlog(segment, "s")).messages == 0
            stats = await broker.service.segments.stats(segment)
            assert stats.owner == owners[str(segment)][0].ownership.broker_id
    first = names(layout)[0]
    with pytest.raises(PreconditionFailed, match=r"0000-1fff-0 is active and no operation seals it; split or merge it instead"):
        await brokers[0].service.segments.terminate(first, epoch=EPOCH, incarnation=LIFE)
    with pytest.raises(PreconditionFailed, match=r"0000-1fff-0 is active and part of its topic's layout"):
        await brokers[0].service.segments.delete(first, epoch=EPOCH, incarnation=LIFE)
    await put(world, record_of(layout, pending_operation=splitting(layout, 0)))
    assert (await brokers[0].service.segments.terminate(first, epoch=EPOCH, incarnation=LIFE)).producers == {}
    with pytest.raises(StaleLeader):
        await brokers[1].service.segments.delete(first, epoch=EPOCH - 1, incarnation=LIFE)
