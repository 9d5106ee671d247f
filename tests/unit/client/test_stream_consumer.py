"""Stream consumers against real brokers: order over splits and merges, cumulative acks, sharing, leaving, coming back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise

import pytest

import braid
from braid.client import Client
from braid.client.client import Initial
from braid.client.config import ClientConfig
from braid.client.connection import Connection
from braid.client.consumer_session import Assignment
from braid.client.messages import Message, MessageId
from braid.client.stream_consumer import StreamConsumer
from braid.errors import (
    BraidError,
    Closed,
    ConsumerDisplaced,
    DeadlineExceeded,
    InvalidArgument,
    NotAllowed,
    NotReady,
    TopicNotFound,
)
from braid.model.names import TopicName
from braid.model.segments import physical_name
from braid.scalable.config import ScalableConfig
from braid.scalable.controller import ScalableTopicController
from braid.testing.broker import InProcessBroker
from braid.web.config import StandaloneConfig, StorageConfig
from braid.wire import messages as pb

TOPIC = "topic://public/default/orders"
NAME = TopicName.parse(TOPIC)
SECONDS = 10.0
CONFIG = StandaloneConfig(
    scalable_topics=ScalableConfig(drain_poll_seconds=0.1, consumer_grace_seconds=60.0, reconcile_seconds=1.0)
)


@asynccontextmanager
async def started(segments: int = 2, config: StandaloneConfig = CONFIG) -> AsyncIterator[InProcessBroker]:
    async with InProcessBroker(config=config, with_http=False) as broker:
        await broker.nodes[0].service.create_scalable_topic(NAME, segments)
        yield broker


@pytest.fixture
async def broker() -> AsyncIterator[InProcessBroker]:
    async with started() as one:
        yield one


@pytest.fixture
async def client(broker: InProcessBroker) -> AsyncIterator[Client]:
    async with braid.connect(broker.service_url) as one:
        yield one


async def leader(broker: InProcessBroker) -> ScalableTopicController:
    found = await broker.nodes[0].service.scalable.lead(NAME)
    assert isinstance(found, ScalableTopicController)
    return found


async def until(condition: Callable[[], bool], seconds: float = SECONDS) -> None:
    """Wait for something that brokers do on their own."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - brokers take their own time, no event tells
            await asyncio.sleep(0.005)


async def produce(client: Client, first: int, last: int, keys: int = 8, topic: str = TOPIC) -> None:
    async with client.producer(topic) as producer:
        for number in range(first, last):
            await producer.send(b"%d" % number, key=f"key-{number % keys}")


class Seen:
    """What was received, by key."""

    def __init__(self) -> None:
        self.by_key: dict[str, list[int]] = {}

    def add(self, message: Message) -> None:
        self.by_key.setdefault(message.key or "", []).append(int(message.payload))

    def check(self, last: int, keys: int = 8) -> None:
        assert self.by_key == {f"key-{key}": list(range(key, last, keys)) for key in range(keys)}


async def drain(consumer: StreamConsumer, count: int, seen: Seen) -> None:
    for _ in range(count):
        message = await consumer.receive(SECONDS)
        seen.add(message)
        await consumer.acknowledge_cumulative(message)


@pytest.mark.req("R468-51", "R468-56", "R468-30")
async def test_order_per_key_over_a_split_and_a_merge(broker: InProcessBroker, client: Client) -> None:
    seen = Seen()
    controller = await leader(broker)
    async with client.stream_consumer(TOPIC, "s") as consumer:
        assert consumer.segments == [0, 1]
        await produce(client, 0, 40)
        await drain(consumer, 20, seen)
        await controller.split_segment(0)  # with a backlog
        await produce(client, 40, 80)
        await drain(consumer, 60, seen)
        await until(lambda: consumer.segments == [1, 2, 3])
        await produce(client, 80, 120)
        await controller.merge_segments(2, 3)
        await produce(client, 120, 160)
        await drain(consumer, 80, seen)
        await until(lambda: consumer.segments == [1, 4])
        assert (await consumer.receive_batch(10, 0.05)) == []
    seen.check(160)


async def test_successors_wait_for_the_acknowledgement_of_their_parent(broker: InProcessBroker, client: Client) -> None:
    controller = await leader(broker)
    async with client.stream_consumer(TOPIC, "s") as consumer:
        await produce(client, 0, 8)
        got = [await consumer.receive(SECONDS) for _ in range(8)]
        await controller.split_segment(0)
        await controller.split_segment(1)
        await produce(client, 8, 16)
        with pytest.raises(DeadlineExceeded):
            await consumer.receive(0.4)
        await consumer.acknowledge_cumulative(got[-1])
        seen = Seen()
        for message in got:
            seen.add(message)
        await drain(consumer, 8, seen)
    seen.check(16)


async def test_receive_batch_does_not_wait_for_what_cannot_come(broker: InProcessBroker, client: Client) -> None:
    controller = await leader(broker)
    async with client.stream_consumer(TOPIC, "s") as consumer:
        await produce(client, 0, 8)
        await controller.split_segment(0)
        await controller.split_segment(1)
        await until(lambda: len(consumer.layouts.layout.active_segments) == 4)
        async with asyncio.timeout(5):  # far below the timeout of the call
            found: list[Message] = []
            while len(found) < 8:
                found += await consumer.receive_batch(100, 600.0)
        assert sorted(int(message.payload) for message in found) == list(range(8))


async def test_receive_batch_fills_up_and_ends_with_its_time(broker: InProcessBroker, client: Client) -> None:
    async with client.stream_consumer(TOPIC, "s") as consumer:
        assert await consumer.receive_batch(5, 0.05) == []
        await produce(client, 0, 7)
        assert len(await consumer.receive_batch(5, SECONDS)) == 5
        assert len(await consumer.receive_batch(5, 0.1)) == 2
        await produce(client, 7, 8)
        assert len(await consumer.receive_batch(5)) == 1
        with pytest.raises(InvalidArgument):
            await consumer.receive_batch(0)


async def test_one_acknowledgement_covers_all_segments(broker: InProcessBroker, client: Client) -> None:
    await produce(client, 0, 30)
    async with client.stream_consumer(TOPIC, "s") as consumer:
        got = [await consumer.receive(SECONDS) for _ in range(30)]
        assert {message.segment_id for message in got} == {0, 1}
        await consumer.acknowledge_cumulative(got[19], wait=True)
    async with client.stream_consumer(TOPIC, "s") as consumer:
        again = [await consumer.receive(SECONDS) for _ in range(10)]
        assert {message.payload for message in again} == {message.payload for message in got[20:]}
        # Only an id: its own segment.
        await consumer.acknowledge_cumulative(again[-1].id, wait=True)
    async with client.stream_consumer(TOPIC, "s") as consumer:
        rest = [message for message in again if message.segment_id != again[-1].segment_id]
        assert [(await consumer.receive(SECONDS)).payload for _ in rest] == [message.payload for message in rest]


async def test_waiting_covers_what_an_earlier_acknowledgement_left_under_way(broker: InProcessBroker, client: Client) -> None:
    """Of two messages with the same vector the first sends the other segment's position, without a receipt."""
    async with client.stream_consumer(TOPIC, "s") as consumer:
        await produce(client, 0, 40)
        got = [await consumer.receive(SECONDS) for _ in range(40)]
        *_, (one, other) = [pair for pair in pairwise(got) if pair[0].vector is pair[1].vector and pair[0].vector]
        confirmed: list[MessageId] = []
        for lane in consumer._lanes.values():
            lane.confirm_up_to = partial(_noted, lane.confirm_up_to, confirmed)  # type: ignore[method-assign]
        await consumer.acknowledge_cumulative(one)
        await consumer.acknowledge_cumulative(other, wait=True)
        assert sorted(each.segment_id for each in confirmed) == [0, 1]


async def _noted(confirm: Callable[[MessageId], Awaitable[None]], seen: list[MessageId], message_id: MessageId) -> None:
    seen.append(message_id)
    await confirm(message_id)


async def test_an_acknowledgement_never_covers_what_was_not_handed_out(broker: InProcessBroker, client: Client) -> None:
    """What was received ahead is dropped when a lane is attached again; later messages of others must not acknowledge it."""
    async with client.stream_consumer(TOPIC, "s") as consumer:
        await produce(client, 0, 40)
        await until(lambda: len(consumer._queue) == 40)
        lane = consumer._lanes[0]
        assert lane.connection is not None
        lane.connection.consumers.pop(lane.consumer_id)
        lane.detached(Closed("test"))
        await until(lambda: consumer._queue.count(lane) == 0)
        found = [consumer.receive_nowait() for _ in range(len(consumer._queue))]
        assert found[-1] is not None
        await consumer.acknowledge_cumulative(found[-1], wait=True)
        await until(lambda: lane.connection is not None)
    async with client.stream_consumer(TOPIC, "s") as consumer:
        left = 40 - len(found)
        got = [await consumer.receive(SECONDS) for _ in range(left)]
        assert len({message.payload for message in [*got, *found] if message is not None}) == 40


async def test_what_the_application_has_is_not_handed_out_again_after_a_reconnect(
    broker: InProcessBroker, client: Client
) -> None:
    seen = Seen()
    async with client.stream_consumer(TOPIC, "s") as consumer:
        await produce(client, 0, 40)
        got = [await consumer.receive(SECONDS) for _ in range(15)]
        for connection in list(client.pool.connections.values()):
            connection.abort(Closed("test"))
        await until(lambda: all(lane.connection is None for lane in consumer._lanes.values()))
        await consumer.acknowledge_cumulative(got[9])  # goes out when attached again
        got += [await consumer.receive(SECONDS) for _ in range(25)]
        for message in got:
            seen.add(message)
        await consumer.acknowledge_cumulative(got[-1], wait=True)
        with pytest.raises(DeadlineExceeded):
            await consumer.receive(0.2)
    seen.check(40)


@pytest.mark.req("R468-27")
async def test_consumers_share_the_segments_and_leave_at_once(broker: InProcessBroker, client: Client) -> None:
    async with client.stream_consumer(TOPIC, "s", name="a") as first:
        async with client.stream_consumer(TOPIC, "s", name="b") as second:
            await until(lambda: (first.segments, second.segments) in (([0], [1]), ([1], [0])))
            await produce(client, 0, 40)
            here = [await first.receive(SECONDS)]
            there = [await second.receive(SECONDS)]
            while len(here) + len(there) < 40:
                here += await first.receive_batch(50, 0.05)
                there += await second.receive_batch(50, 0.05)
            assert {message.segment_id for message in here} == set(first.segments)
            assert {message.key for message in here}.isdisjoint({message.key for message in there})
            await first.acknowledge_cumulative(here[-1])
            await second.acknowledge_cumulative(there[-1])
        await until(lambda: first.segments == [0, 1], 5.0)  # far below the grace period
        seen = Seen()
        await produce(client, 0, 40)
        await drain(first, 40, seen)
        seen.check(40)


@pytest.mark.req("R468-64", "R468-65")
async def test_coming_back_under_the_same_name_keeps_the_segments(broker: InProcessBroker, client: Client) -> None:
    async with client.stream_consumer(TOPIC, "s", name="a") as staying:
        async with braid.connect(broker.service_url) as other:
            gone = await other.stream_consumer(TOPIC, "s", name="b")
            await until(lambda: len(staying.segments) == len(gone.segments) == 1)
            before = gone.segments
            pushes: list[object] = []
            staying._session._assigned = pushes.append
            for connection in list(other.pool.connections.values()):
                connection.abort(Closed("test"))  # as a process that dies: no goodbye
            await gone._session._tasks.close()
        async with braid.connect(broker.service_url) as other, other.stream_consumer(TOPIC, "s", name="b") as back:
            await until(lambda: back.segments == before)
            await produce(client, 0, 16)
            got = [await back.receive(SECONDS)]
            assert got[0].segment_id == before[0]
            assert pushes == []


@pytest.mark.req("R468-66")
async def test_after_the_grace_period_the_others_get_the_segments() -> None:
    config = StandaloneConfig(scalable_topics=ScalableConfig(consumer_grace_seconds=0.3, drain_poll_seconds=0.1))
    async with (
        started(config=config) as broker,
        braid.connect(broker.service_url) as client,
        client.stream_consumer(TOPIC, "s", name="a") as staying,
    ):
        async with braid.connect(broker.service_url) as other:
            gone = await other.stream_consumer(TOPIC, "s", name="b")
            await until(lambda: len(staying.segments) == len(gone.segments) == 1)
            for connection in list(other.pool.connections.values()):
                connection.abort(Closed("test"))
            await gone._session._tasks.close()
        await until(lambda: staying.segments == [0, 1])


@pytest.mark.req("R468-30")
async def test_a_segment_moves_only_when_its_messages_are_acknowledged(broker: InProcessBroker, client: Client) -> None:
    async with client.stream_consumer(TOPIC, "s", name="a") as first:
        await produce(client, 0, 40)
        got = [await first.receive(SECONDS) for _ in range(20)]
        assert {message.segment_id for message in got} == {0, 1}
        async with client.stream_consumer(TOPIC, "s", name="b") as second:
            await until(lambda: len(first.segments) == 1 and len(second.segments) == 1)
            moving = second.segments[0]
            with pytest.raises(DeadlineExceeded):
                await second.receive(0.5)  # the last messages of this segment are still with the first consumer
            await first.acknowledge_cumulative(got[-1])
            there = [await second.receive(SECONDS)]
            mine = [message for message in got if message.segment_id == moving]
            assert int(there[0].payload) > int(mine[-1].payload)
            here: list[Message] = []
            while len(got) + len(here) + len(there) < 40:
                here += await first.receive_batch(50, 0.05)
                there += await second.receive_batch(50, 0.05)
            seen = Seen()
            for message in [*got, *here, *there]:
                seen.add(message)
            seen.check(40)


async def test_a_segment_that_comes_back_while_it_is_given_away(broker: InProcessBroker, client: Client) -> None:
    async with client.stream_consumer(TOPIC, "s", name="a") as first:
        await produce(client, 0, 40)
        got = [await first.receive(SECONDS) for _ in range(10)]
        async with client.stream_consumer(TOPIC, "s", name="b") as second:
            await until(lambda: len(first.segments) == 1 and len(second.segments) == 1)
        await until(lambda: first.segments == [0, 1])  # the other one left again before anything was acknowledged
        got += [await first.receive(SECONDS) for _ in range(30)]
        await first.acknowledge_cumulative(got[-1], wait=True)
        seen = Seen()
        for message in got:
            seen.add(message)
        seen.check(40)


async def test_waiting_for_acknowledgements_has_a_bound(broker: InProcessBroker, caplog: pytest.LogCaptureFixture) -> None:
    config = ClientConfig(release_wait=0.3)
    async with (
        braid.connect(broker.service_url, config=config) as client,
        client.stream_consumer(TOPIC, "s", name="a") as first,
    ):
        await produce(client, 0, 16)
        got = [await first.receive(SECONDS) for _ in range(16)]
        with caplog.at_level(logging.WARNING, "braid.client.stream_consumer"):
            async with client.stream_consumer(TOPIC, "s", name="b") as second:
                again = await second.receive(SECONDS)
        mine = [message for message in got if message.segment_id == again.segment_id]
        assert again.payload == mine[0].payload  # never acknowledged on the application's behalf
        assert "was not acknowledged" in caplog.text
        # The acknowledgement comes too late for the segment that moved, and is good for the other one.
        await first.acknowledge_cumulative(got[-1])


async def test_a_segment_lost_without_a_connection_holds_up_no_acknowledgement(
    broker: InProcessBroker, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W6, seed 235: its place was lost, then it was given to another consumer; who acknowledged waited for `release_wait`."""
    async with client.stream_consumer(TOPIC, "s", name="a") as consumer:
        await produce(client, 0, 16)
        got = [await consumer.receive(SECONDS) for _ in range(16)]
        assert {message.segment_id for message in got} == {0, 1}
        lane = consumer._lanes[1]

        async def refused() -> None:
            raise NotReady("Segment 1 is not assigned to a.")

        monkeypatch.setattr(lane, "_attach_once", refused)
        lane.detached(Closed("test"))
        acknowledged = asyncio.ensure_future(consumer.acknowledge_cumulative(got[-1], wait=True))
        await asyncio.sleep(0)
        topics = {0: consumer._lanes[0].topic}
        consumer._assign(Assignment(layout_epoch=0, topics=topics, is_first=True, resets=0))
        async with asyncio.timeout(SECONDS):
            await acknowledged
        assert consumer.segments == [0]


async def test_closing_acknowledges_nothing(broker: InProcessBroker, client: Client) -> None:
    await produce(client, 0, 16)
    async with client.stream_consumer(TOPIC, "s") as consumer:
        got = [await consumer.receive(SECONDS) for _ in range(16)]
    async with client.stream_consumer(TOPIC, "s") as consumer:
        assert len({(await consumer.receive(SECONDS)).payload for _ in got}) == 16
    with pytest.raises(Closed):
        await consumer.acknowledge_cumulative(got[0])
    with pytest.raises(Closed):
        await consumer.receive()
    await consumer.close()


async def test_the_newest_consumer_of_a_name_wins(broker: InProcessBroker, client: Client) -> None:
    old = await client.stream_consumer(TOPIC, "s", name="a")
    await produce(client, 0, 1)
    message = await old.receive(SECONDS)
    async with braid.connect(broker.service_url) as other, other.stream_consumer(TOPIC, "s", name="a") as new:
        with pytest.raises(ConsumerDisplaced, match="own name"):
            await old.receive(SECONDS)
        for wait in (False, True):
            with pytest.raises(ConsumerDisplaced, match="own name"):
                await old.acknowledge_cumulative(message, wait=wait)
        assert (await new.receive(SECONDS)).payload == message.payload
        seen = Seen()
        await produce(client, 0, 16)
        await drain(new, 16, seen)
        seen.check(16)
        await old.close()
        await produce(client, 16, 17)
        await new.receive(SECONDS)  # the displaced one's end does not disturb it


@pytest.mark.parametrize(("initial", "count"), [("earliest", 16), ("latest", 0)])
async def test_where_a_new_subscription_begins(broker: InProcessBroker, client: Client, initial: Initial, count: int) -> None:
    await produce(client, 0, 8)
    await (await leader(broker)).split_segment(0)
    await produce(client, 8, 16)
    async with client.stream_consumer(TOPIC, "s", initial=initial) as consumer:
        seen = Seen()
        await drain(consumer, count, seen)
        await until(lambda: consumer.segments == [1, 2, 3])
        await produce(client, 0, 16)
        await drain(consumer, 16, seen)
        assert sum(map(len, seen.by_key.values())) == count + 16


async def test_seeking_brings_messages_again(broker: InProcessBroker, client: Client) -> None:
    controller = await leader(broker)
    async with client.stream_consumer(TOPIC, "s") as consumer:
        await produce(client, 0, 16)
        await controller.split_segment(0)
        await produce(client, 16, 32)
        old: list[Message] = []
        for _ in range(32):
            old.append(await consumer.receive(SECONDS))
            await consumer.acknowledge_cumulative(old[-1])
        await controller.seek("s", 0)
        for _ in range(8):
            await consumer.receive(SECONDS)
        for message in old:
            await consumer.acknowledge_cumulative(message)  # of before the seek: says nothing of what came after it
    async with client.stream_consumer(TOPIC, "s") as consumer:
        new = Seen()
        await drain(consumer, 32, new)
        new.check(32)


@pytest.mark.parametrize("is_early", [False, True], ids=["told first", "attaching first"])
async def test_a_consumer_that_is_away_during_a_seek_gets_everything_again(
    broker: InProcessBroker, client: Client, monkeypatch: pytest.MonkeyPatch, is_early: bool
) -> None:
    """It takes what it gets for new, and does not send its acknowledgements of before again."""
    controller = await leader(broker)
    async with client.stream_consumer(TOPIC, "s") as consumer:
        await produce(client, 0, 16)
        old = [await consumer.receive(SECONDS) for _ in range(16)]
        await consumer.acknowledge_cumulative(old[-1], wait=True)
        may_attach, may_register = asyncio.Event(), asyncio.Event()
        locate, register = client.locate, consumer._session._register

        async def located(topic: str) -> Connection:
            await may_attach.wait()
            return await locate(topic)

        async def registered() -> None:
            await may_register.wait()
            await register()

        monkeypatch.setattr(client, "locate", located)
        monkeypatch.setattr(consumer._session, "_register", registered)
        lanes = list(consumer._lanes.values())
        for connection in list(client.pool.connections.values()):
            connection.abort(Closed("test"))
        await until(lambda: all(lane.connection is None for lane in lanes))
        await consumer.acknowledge_cumulative(old[-1])
        await controller.seek("s", 0)
        if is_early:
            may_attach.set()
            await until(lambda: all(lane.attachments > 2 for lane in lanes))  # it tries, and is not let in
        may_register.set()
        await until(lambda: consumer._resets == 1)
        may_attach.set()
        for message in old:
            await consumer.acknowledge_cumulative(message)
        new = Seen()
        await drain(consumer, 16, new)
        new.check(16)


async def test_a_reset_makes_lanes_anew_that_are_being_given_away(broker: InProcessBroker, client: Client) -> None:
    async with client.stream_consumer(TOPIC, "s") as consumer:
        await produce(client, 0, 16)
        old = [await consumer.receive(SECONDS) for _ in range(16)]
        lanes = dict(consumer._lanes)

        def push(resets: int, topics: dict[int, str]) -> None:
            consumer._assign(Assignment(0, topics, False, resets))

        topics = dict(consumer._wanted)
        push(0, {0: topics[0]})
        assert consumer.segments == [0]  # 1 waits for acknowledgements
        await consumer.acknowledge_cumulative(old[-1])  # too late: not sent yet
        push(1, topics)
        await until(lambda: consumer.segments == [0, 1])
        assert not set(lanes.values()) & set(consumer._lanes.values())
        await consumer.acknowledge_cumulative(old[-1])  # says nothing any more
        new = Seen()
        await drain(consumer, 16, new)
        new.check(16)


async def test_regular_topics_have_stream_consumers_too(broker: InProcessBroker, client: Client) -> None:
    topic = "persistent://public/default/regular"
    await broker.nodes[0].service.create_partitioned(TopicName.parse(topic), 3)
    async with client.stream_consumer(topic, "s", name="a") as first:
        await until(lambda: first.segments == [0, 1, 2])
        await produce(client, 0, 24, topic=topic)
        seen = Seen()
        await drain(first, 24, seen)
        seen.check(24)
        async with client.stream_consumer(topic, "s", name="b") as second:
            await until(lambda: len(first.segments) + len(second.segments) == 3 and bool(second.segments))
            await produce(client, 24, 48, topic=topic)
            got: list[Message] = []
            while len(got) < 24:
                got += await first.receive_batch(50, 0.05)
                got += await second.receive_batch(50, 0.05)
            assert sorted(int(message.payload) for message in got) == list(range(24, 48))


async def test_a_plain_regular_topic(broker: InProcessBroker, client: Client) -> None:
    topic = "persistent://public/default/plain"
    async with client.stream_consumer(topic, "s") as consumer:
        await produce(client, 0, 8, topic=topic)
        seen = Seen()
        await drain(consumer, 8, seen)
        seen.check(8)


async def test_what_was_queued_and_dropped_comes_again_when_the_segment_comes_back(client: Client) -> None:
    async with client.stream_consumer(TOPIC, "s") as consumer:
        await produce(client, 0, 16)
        await until(lambda: len(consumer._queue) == 16)  # nothing handed out
        topics = dict(consumer._wanted)
        consumer._assign(Assignment(0, {0: topics[0]}, False, 0))
        consumer._assign(Assignment(0, topics, False, 0))
        seen = Seen()
        await drain(consumer, 16, seen)
        seen.check(16)


async def test_assignments_of_an_older_layout_are_ignored(broker: InProcessBroker, client: Client) -> None:
    await (await leader(broker)).split_segment(0)
    async with client.stream_consumer(TOPIC, "s", name="a") as consumer:
        await until(lambda: consumer.segments == [1, 2, 3])

        def push(epoch: int) -> None:
            assignment = pb.ScalableConsumerAssignment(layout_epoch=epoch)
            consumer._session.assignment(pb.CommandScalableTopicAssignmentUpdate(consumer_id=1, assignment=assignment))

        push(0)
        assert consumer.segments == [1, 2, 3]
        push(1)
        assert consumer.segments == []


async def test_a_deleted_topic_ends_its_consumers(broker: InProcessBroker, client: Client) -> None:
    async with client.stream_consumer(TOPIC, "s") as consumer:
        waiting = asyncio.ensure_future(consumer.receive(SECONDS))
        await asyncio.sleep(0)
        await broker.nodes[0].service.scalable.delete_topic(NAME, force=True)
        with pytest.raises((TopicNotFound, ConsumerDisplaced)):
            await waiting


async def test_bad_arguments(broker: InProcessBroker, client: Client) -> None:
    with pytest.raises(NotAllowed, match="topic://"):
        await client.stream_consumer("non-persistent://public/default/x", "s")
    async with client.stream_consumer(TOPIC, "s") as consumer:
        with pytest.raises(InvalidArgument):
            await consumer.acknowledge_cumulative(MessageId(1, 1))
        with pytest.raises(InvalidArgument, match="not received"):
            await consumer.acknowledge_cumulative(MessageId(1, 1, segment_id=77))


async def test_a_client_takes_its_consumers_with_it(broker: InProcessBroker) -> None:
    async with braid.connect(broker.service_url) as client:
        consumer = await client.stream_consumer(TOPIC, "s", name="a")
        iterating = asyncio.ensure_future(anext(aiter(consumer), None))
        await asyncio.sleep(0)
    assert await iterating is None
    async with braid.connect(broker.service_url) as client, client.stream_consumer(TOPIC, "s", name="b") as other:
        assert other.segments == [0, 1]


# Several brokers.


async def lead(broker: InProcessBroker) -> tuple[int, ScalableTopicController]:
    """Number of the broker that leads the topic, and its controller."""
    async with asyncio.timeout(30):
        while True:
            for number, node in enumerate(broker.nodes):
                if not node.is_down:
                    try:
                        found = await node.service.scalable.lead(NAME)
                    except BraidError:
                        continue
                    assert isinstance(found, ScalableTopicController)
                    return number, found
            await asyncio.sleep(0.05)


@pytest.mark.req("R468-5", "R468-63", "R468-67")
async def test_a_killed_leader_and_its_successor() -> None:
    config = StandaloneConfig(storage=StorageConfig(session_timeout_seconds=2.0), scalable_topics=CONFIG.scalable_topics)
    quick = ClientConfig(backoff_initial=0.02, backoff_max=0.2)
    async with InProcessBroker(brokers=3, config=config) as broker:
        await broker.nodes[0].service.create_scalable_topic(NAME, 4)
        number, _controller = await lead(broker)
        async with (
            braid.connect(broker.service_urls, config=quick) as client,
            client.stream_consumer(TOPIC, "s", name="a") as first,
            client.stream_consumer(TOPIC, "s", name="b") as second,
        ):
            leading = broker.nodes[number].service_url
            assert first._session._connection is not None
            assert leading.endswith(first._session._connection.address.split(":")[1])
            await until(lambda: len(first.segments) == len(second.segments) == 2)
            before = (first.segments, second.segments)
            seen = Seen()

            async def read(count: int) -> None:
                async with asyncio.timeout(30):
                    while count > 0:
                        for consumer in (first, second):
                            for message in await consumer.receive_batch(50, 0.02):
                                seen.add(message)
                                await consumer.acknowledge_cumulative(message)
                                count -= 1

            await produce(client, 0, 32)
            await read(32)
            await broker.kill(number)
            number, controller = await lead(broker)
            await until(lambda: first._session.is_attached and second._session.is_attached, 30)
            assert (first.segments, second.segments) == before
            await produce(client, 32, 64)
            await read(32)
            await controller.split_segment(0)
            await produce(client, 64, 96)
            await read(32)
            seen.check(96)  # also without a message twice: what the owner forgot with its death is acknowledged again


async def test_nothing_is_left_behind(broker: InProcessBroker) -> None:
    """C19: after closing, neither the client nor the broker knows anything of the consumers."""
    controller = await leader(broker)
    async with braid.connect(broker.service_url) as client:
        stream = await client.stream_consumer(TOPIC, "s")
        queue = await client.queue_consumer(TOPIC, "q", initial="earliest")
        reader = await client.checkpoint_consumer(TOPIC)
        member = await client.checkpoint_consumer(TOPIC, group="g")
        await produce(client, 0, 40)
        await controller.split_segment(0)
        await drain(stream, 20, Seen())
        for consumer in (queue, reader, member):
            await consumer.receive(SECONDS)
        for each in (stream, queue, reader, member):
            await each.close()
        for connection in client.pool.connections.values():
            assert not connection.consumers
            assert not connection.scalable_consumers
            assert not connection.watches
        service = broker.nodes[0].service
        for info in controller.layout.all_segments.values():
            topic = await service.topic(physical_name(NAME, info), create=False)
            assert [each for subscription in topic.subscriptions.values() for each in subscription.consumers] == []
