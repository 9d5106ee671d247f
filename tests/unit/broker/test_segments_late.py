"""Calls about segments that come late, and what one client must not be able to do to all others."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, ClassVar

import pytest

from braid.broker.consumer_places import Elsewhere, Wanted
from braid.broker.scalable_consumers import ScalableConsumer
from braid.errors import BraidError, DeadlineExceeded, InvalidTopicName, NotAllowed, NotFound, NotReady
from braid.managedledger.records import log_key
from braid.metadata.claims import StaleLeader
from braid.model.hashranges import HashRange
from braid.model.names import TopicName
from braid.model.segments import physical_name
from braid.scalable.api import AssignedSegment, ConsumerAssignment
from braid.testing.raw_client import RawClient
from braid.wire import messages as pb
from braid.wire.commands import encode, enum_value
from braid.wire.types import CommandType, ScalableConsumerType, ServerError

TOPIC = TopicName.parse("topic://public/default/orders")
BRAID: Any = {"metadata": [{"key": "__braid.dedup", "value": "true"}]}


async def drive(world: Any, work: Coroutine[Any, Any, Any], seconds: float = 60) -> Any:
    """The result of something that needs time to pass."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(work)
        for _ in range(int(seconds / 0.5)):
            for _turn in range(50):
                await asyncio.sleep(0)
            if task.done():
                break
            await world.advance(0.5)
        else:
            task.cancel()
    return task.result()


async def lead(broker: Any, segments: int = 1) -> tuple[Any, TopicName]:
    """The leader of a new topic and its first segment."""
    await broker.service.create_scalable_topic(TOPIC, segments)
    controller = await broker.service.scalable.lead(TOPIC)
    return controller, physical_name(TOPIC, controller.layout.segment(0))


class Held:
    """Holds up the first answer of `records.checked`."""

    def __init__(self, records: Any) -> None:
        self._records, self._checked = records, records.checked
        self.reached, self.go = asyncio.Event(), asyncio.Event()
        records.checked = self

    async def __call__(self, *given: Any) -> Any:
        found = await self._checked(*given)
        self._records.checked = self._checked
        self.reached.set()
        await self.go.wait()
        return found


@pytest.mark.parametrize("what", ["delete", "terminate", "create"])
async def test_a_call_of_the_old_topic_does_nothing_to_the_one_made_anew(world: Any, broker: Any, what: str) -> None:
    """INV5: held up at the owner between its check and its effect, while the topic is deleted and made anew."""
    controller, segment = await lead(broker)
    leader = {"epoch": controller.leadership.epoch, "incarnation": controller.incarnation}
    held, local = Held(broker.service.records), broker.service.local_segments
    more: Any = {"subscriptions": {}, "producers": {}} if what == "create" else {"force": True}

    async def late() -> None:
        with pytest.raises((StaleLeader, NotFound, NotReady)):
            await getattr(local, what)(segment, **leader, **more)
            raise NotFound("a deletion that finds nothing of its own is fine")

    async with asyncio.TaskGroup() as group:
        group.create_task(late())
        await held.reached.wait()
        await drive(world, broker.service.scalable.delete_topic(TOPIC, force=True))
        await drive(world, broker.service.create_scalable_topic(TOPIC, 1))
        client = await broker.client()
        await client.producer(str(segment), name="p")
        await client.store(b"acknowledged", 0)
        life = (await broker.service.topic(segment, create=False)).log.incarnation
        held.go.set()
    log = (await broker.service.topic(segment, create=False)).log
    assert (log.incarnation, log.is_terminated, log.total_entries) == (life, False, 1)


@pytest.mark.parametrize("what", ["skip_all", "seek", "delete_subscription"])
async def test_a_call_that_comes_after_its_operation_was_repeated_and_finished_is_refused(
    world: Any, broker: Any, what: str
) -> None:
    controller, segment = await lead(broker)
    service, client = broker.service, await broker.client()
    await controller.create_subscription("sub")
    await client.producer(str(segment), name="p")
    await client.store(b"old", 0)
    local = service.local_segments
    real = getattr(local, what)
    late: list[Any] = []

    async def lost(*given: Any, **named: Any) -> None:
        if late:
            await real(*given, **named)
            return
        late.append((given, named))  # on its way to the owner, while the caller's patience ends
        raise DeadlineExceeded("no answer")

    setattr(local, what, lost)
    operate = {
        "skip_all": lambda: controller.clear_backlog("sub"),
        "seek": lambda: controller.seek("sub", 0),
        "delete_subscription": lambda: controller.delete_subscription("sub"),
    }
    with pytest.raises(BraidError):
        await operate[what]()

    async def finished() -> None:
        while (record := await service.records.subscription(TOPIC, "sub")) is not None and record.pending is not None:  # noqa: ASYNC110
            await asyncio.sleep(0)

    await drive(world, finished())
    if what == "delete_subscription":
        await drive(world, controller.create_subscription("sub", "STREAM", "earliest"))
    await client.store(b"new", 1)
    before = (await service.segments.backlog(segment, "sub")).messages
    given, named = late[0]
    with pytest.raises(StaleLeader, match="after its operation"):
        await real(*given, **named)
    assert (await service.segments.backlog(segment, "sub")).messages == before > 0


async def test_whether_a_segment_is_gone_is_read_fresh(world: Any, broker: Any) -> None:
    """A store's plain reads may lag; a sealed segment that is gone counts as drained, so its data would be."""
    controller, segment = await lead(broker)
    service, client = broker.service, await broker.client()
    await controller.create_subscription("sub")
    await client.producer(str(segment), name="p")
    await client.store(b"unread", 0)
    await drive(world, controller.split_segment(0))
    await service.unload(service.topics[str(segment)])
    get = service.metadata.get

    async def lagging(key: str, **options: Any) -> Any:
        if key == log_key(segment.managed_ledger_name) and not options.get("fresh"):
            return None
        return await get(key, **options)

    service.metadata.get = lagging
    assert await drive(world, controller.prune()) == []
    assert (await service.segments.backlog(segment, "sub")).messages == 1


@pytest.mark.parametrize("name", ["pulsar.dedup", "__compaction", "pulsar.repl.x"])
async def test_a_name_that_brokers_use_themselves_is_refused_before_anything_is_written(
    world: Any, broker: Any, name: str
) -> None:
    controller, _segment = await lead(broker)
    with pytest.raises(InvalidTopicName, match="themselves"):
        await controller.create_subscription(name)
    assert await broker.service.records.subscription(TOPIC, name) is None
    await drive(world, controller.split_segment(0))


async def test_a_cursor_with_a_name_of_older_rules_is_handed_on(world: Any, broker: Any) -> None:
    controller, segment = await lead(broker)
    topic = await broker.service.topic(segment, create=False)
    await topic.log.open_cursor("a<b>", initial="earliest")
    await broker.service.unload(topic)
    layout = await drive(world, controller.split_segment(0))
    child = physical_name(TOPIC, layout.segment(1))
    assert await broker.service.local_segments.subscriptions(child) == ["a<b>"]


async def test_producers_have_names_that_can_be_handed_on(broker: Any, client: RawClient) -> None:
    _controller, segment = await lead(broker)
    with pytest.raises(NotAllowed, match="1024"):
        await client.producer(str(segment), name="\x01" * 1025, **BRAID)
    await client.producer(str(segment), 2, name="é" * 1024, **BRAID)
    topic = broker.topic(str(segment))
    await topic.adopt_producers({"x" * 1025: 5, "y": 6})
    assert topic.last_sequences() == {"y": 6}


async def test_a_hand_over_that_is_repeated_pushes_nobody_out(world: Any) -> None:
    broker = await world.broker(deduplication_max_producers=2)
    _controller, segment = await lead(broker)
    topic = await broker.service.topic(segment, create=False)
    await topic.adopt_producers({"old": 1, "active": 2})
    await topic.adopt_producers({"old": 1})
    await topic.adopt_producers({"new": 3})
    assert topic.last_sequences() == {"active": 2, "new": 3}


async def register(client: RawClient, topic: str, kind: ScalableConsumerType, consumer_id: int) -> Any:
    request_id = client.next_request()
    body = pb.CommandScalableTopicSubscribe(
        request_id=request_id,
        topic=topic,
        subscription="sub",
        consumer_name=f"c{consumer_id}",
        consumer_id=consumer_id,
        consumer_type=enum_value(kind),
    )
    client.send(encode(CommandType.SCALABLE_TOPIC_SUBSCRIBE, body))
    return await client.answer(request_id)


async def test_registrations_that_cannot_be_are_answered_for_good(broker: Any, client: RawClient) -> None:
    await lead(broker)
    assert not (await register(client, str(TOPIC), ScalableConsumerType.STREAM, 1)).HasField("error")
    other = await register(client, str(TOPIC), ScalableConsumerType.CHECKPOINT, 2)
    assert other.error == ServerError.NOT_ALLOWED_ERROR
    missing = await register(client, "persistent://nope/nope/x", ScalableConsumerType.STREAM, 3)
    assert missing.HasField("error")
    assert await broker.service.metadata.get("/regular-topics/nope/nope/x/subscriptions/sub", fresh=True) is None


async def test_what_a_leader_said_before_it_went_is_not_told_after_what_the_next_one_says(world: Any, broker: Any) -> None:
    told: list[ConsumerAssignment] = []
    wanted = Wanted(TOPIC, "sub", "c", 1, ScalableConsumerType.STREAM, "earliest", False, True)
    consumer = ScalableConsumer(broker.service, wanted, told.append, lambda _consumer: None)

    class Connection:
        scalable_consumers: ClassVar[dict[int, Any]] = {}

        def close(self) -> None:
            return None

    def given(*numbers: int) -> ConsumerAssignment:
        return ConsumerAssignment(3, tuple(AssignedSegment(each, HashRange.of(0, 65535), f"s{each}") for each in numbers))

    attempts = 0

    async def relay() -> ConsumerAssignment:
        nonlocal attempts
        attempts += 1
        place = Elsewhere(consumer, broker.service, Connection(), "x")  # type: ignore[arg-type]
        if attempts == 1:  # response, assignment and the end of the connection in one read
            consumer.assigned(place, given(1, 2))
            place.lost(NotReady("the leader went"))
        consumer._settle(place, None)
        return given(3)

    consumer._register = relay  # type: ignore[method-assign]
    assert await drive(world, consumer.register()) == given(3)
    consumer.answered()
    consumer.lost()
    assert told == []


async def test_a_broker_that_has_no_address_yet_leads_nothing(world: Any, broker: Any) -> None:
    scalable = broker.service.scalable
    await broker.service.create_scalable_topic(TOPIC, 1)
    broker_id, scalable._broker_id = scalable._broker_id, lambda: ""
    with pytest.raises(NotReady, match="starting"):
        await scalable.controller(TOPIC)
    scalable._broker_id = broker_id
    await scalable.controller(TOPIC)
