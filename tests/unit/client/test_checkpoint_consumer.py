"""Checkpoint consumers against real brokers: order over the DAG, restoring, where to begin, groups."""

from __future__ import annotations

import asyncio
import datetime
import random
from collections.abc import AsyncIterator, Callable

import pytest

import braid
from braid.broker.config import RetentionConfig
from braid.client import Client
from braid.client.checkpoint_consumer import CheckpointConsumer
from braid.client.checkpoints import END, Checkpoint
from braid.client.config import ClientConfig
from braid.client.connection import Connection
from braid.client.messages import EARLIEST, LATEST, Message, MessageId
from braid.errors import CheckpointInvalid, CheckpointOutdated, ConnectionLost, DeadlineExceeded, InvalidArgument, NotReady
from braid.model.names import TopicName
from braid.scalable.config import ScalableConfig
from braid.scalable.controller import ScalableTopicController
from braid.testing.broker import InProcessBroker
from braid.web.config import StandaloneConfig

TOPIC = "topic://public/default/orders"
NAME = TopicName.parse(TOPIC)
SECONDS = 10.0
KEYS = 8
NAIVE = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC).replace(tzinfo=None)
BEFORE_1970 = datetime.datetime(1960, 1, 1, tzinfo=datetime.UTC)


@pytest.fixture
async def broker() -> AsyncIterator[InProcessBroker]:
    config = StandaloneConfig(
        scalable_topics=ScalableConfig(drain_poll_seconds=0.1), retention=RetentionConfig(unread_minutes=0)
    )
    async with InProcessBroker(config=config, with_http=False) as one:
        await one.nodes[0].service.create_scalable_topic(NAME, 2)
        yield one


@pytest.fixture
async def client(broker: InProcessBroker) -> AsyncIterator[Client]:
    # So little is received ahead that a segment's end comes long after its successors could have begun.
    async with braid.connect(broker.service_url, config=ClientConfig(receiver_queue=8)) as one:
        yield one


async def leader(broker: InProcessBroker) -> ScalableTopicController:
    found = await broker.nodes[0].service.scalable.lead(NAME)
    assert isinstance(found, ScalableTopicController)
    return found


async def until(condition: Callable[[], bool], seconds: float = SECONDS) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - brokers take their own time, no event tells
            await asyncio.sleep(0.005)


async def produce(client: Client, first: int, last: int, topic: str = TOPIC) -> None:
    async with client.producer(topic) as producer:
        for number in range(first, last):
            await producer.send(b"%d" % number, key=f"key-{number % KEYS}")


async def take(consumer: CheckpointConsumer, count: int) -> list[Message]:
    return [await consumer.receive(SECONDS) for _ in range(count)]


def by_key(messages: list[Message]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for message in messages:
        found.setdefault(message.key or "", []).append(int(message.payload))
    return found


def expected(first: int, last: int) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for number in range(first, last):
        found.setdefault(f"key-{number % KEYS}", []).append(number)
    return found


async def grown(broker: InProcessBroker, client: Client) -> int:
    """A topic with a history: three generations, merged and split again. Returns the number of messages."""
    controller = await leader(broker)
    await produce(client, 0, 40)
    await controller.split_segment(0)
    await produce(client, 40, 80)
    await controller.split_segment(1)
    await produce(client, 80, 100)
    await controller.merge_segments(3, 4)
    await produce(client, 100, 140)
    await controller.split_segment(6)
    await produce(client, 140, 160)
    return 160


async def test_segments_are_read_in_the_order_of_the_dag(broker: InProcessBroker, client: Client) -> None:
    count = await grown(broker, client)
    async with client.checkpoint_consumer(TOPIC) as consumer:
        got = await take(consumer, count)
        assert by_key(got) == expected(0, count)
        with pytest.raises(DeadlineExceeded):
            await consumer.receive(0.1)


@pytest.mark.parametrize("seed", range(6))
async def test_what_is_read_after_restoring_is_what_followed(broker: InProcessBroker, client: Client, seed: int) -> None:
    """C17, over splits and merges that happen meanwhile."""
    choice = random.Random(seed)
    controller = await leader(broker)
    sent = 0
    read: list[Message] = []
    checkpoints: list[tuple[int, bytes]] = []

    async def change() -> None:
        nonlocal sent
        await produce(client, sent, sent + 20)
        sent += 20
        active = controller.layout.active_in_order
        if choice.random() < 0.4 and len(active) > 1:
            at = choice.randrange(len(active) - 1)
            await controller.merge_segments(active[at].segment_id, active[at + 1].segment_id)
        else:
            await controller.split_segment(choice.choice(active).segment_id)

    async with client.checkpoint_consumer(TOPIC) as consumer:
        for _ in range(5):
            await change()
            read += await take(consumer, choice.randrange(sent - len(read)))
            checkpoints.append((len(read), consumer.checkpoint().to_bytes()))
        read += await take(consumer, sent - len(read))
        checkpoints.append((len(read), consumer.checkpoint().to_bytes()))
    assert by_key(read) == expected(0, sent)
    for position, data in checkpoints:
        async with client.checkpoint_consumer(TOPIC, start=Checkpoint.from_bytes(data)) as consumer:
            again = await take(consumer, sent - position)
            assert by_key(again) == by_key(read[position:])
            with pytest.raises(DeadlineExceeded):
                await consumer.receive(0.05)


async def test_a_finished_segment_is_marked_and_not_read_again(broker: InProcessBroker, client: Client) -> None:
    count = await grown(broker, client)
    async with client.checkpoint_consumer(TOPIC) as consumer:
        await take(consumer, count)
        layout = consumer.layouts.layout
        await until(lambda: set(consumer.segments) == set(layout.active_segments))
        places = consumer.checkpoint().places
        assert {number for number, place in places.items() if place is END} == set(layout.all_segments) - set(
            layout.active_segments
        )
        start = consumer.checkpoint()
    async with client.checkpoint_consumer(TOPIC, start=start) as consumer:
        assert set(consumer.segments) == set(layout.active_segments)


async def test_positions_advance_when_the_application_receives(broker: InProcessBroker, client: Client) -> None:
    await produce(client, 0, 20)
    async with client.checkpoint_consumer(TOPIC) as consumer:
        await until(lambda: len(consumer._queue) == 8)  # received ahead, but not by the application
        nothing = consumer.checkpoint()
        await take(consumer, 20)
    async with client.checkpoint_consumer(TOPIC, start=nothing) as consumer:
        assert by_key(await take(consumer, 20)) == expected(0, 20)


async def test_the_end_is_a_position_and_new_segments_are_read_whole(broker: InProcessBroker, client: Client) -> None:
    await produce(client, 0, 16)
    controller = await leader(broker)
    await controller.split_segment(0)
    await produce(client, 16, 32)
    async with client.checkpoint_consumer(TOPIC, start=LATEST) as consumer:
        before = consumer.checkpoint()
        await controller.split_segment(1)
        await produce(client, 32, 48)
        assert by_key(await take(consumer, 16)) == expected(32, 48)
    async with client.checkpoint_consumer(TOPIC, start=before) as consumer:
        assert by_key(await take(consumer, 16)) == expected(32, 48)
    async with client.checkpoint_consumer(TOPIC, start=Checkpoint(boundary=LATEST)) as consumer:
        with pytest.raises(DeadlineExceeded):
            await consumer.receive(0.1)


async def test_the_end_inside_a_batch(broker: InProcessBroker, client: Client) -> None:
    async with client.producer(TOPIC) as producer:
        await asyncio.gather(*[producer.send_nowait(b"%d" % number, key="same") for number in range(10)])
        async with client.checkpoint_consumer(TOPIC) as consumer:
            await take(consumer, 4)
            middle = consumer.checkpoint()
        async with client.checkpoint_consumer(TOPIC, start=middle) as consumer:
            assert [int(message.payload) for message in await take(consumer, 6)] == [4, 5, 6, 7, 8, 9]
        async with client.checkpoint_consumer(TOPIC, start=LATEST) as consumer:
            await producer.send(b"10", key="same")
            assert int((await consumer.receive(SECONDS)).payload) == 10


@pytest.mark.parametrize("is_number", [True, False])
async def test_beginning_at_a_time(broker: InProcessBroker, client: Client, is_number: bool) -> None:
    controller = await leader(broker)
    await produce(client, 0, 16)
    await controller.split_segment(0)
    await produce(client, 16, 32)
    await asyncio.sleep(0.02)
    start = broker.clock.now_ms()
    await asyncio.sleep(0.02)
    await produce(client, 32, 48)
    await controller.split_segment(1)
    await produce(client, 48, 64)
    given = start if is_number else datetime.datetime.fromtimestamp(start / 1000, datetime.UTC)
    async with client.checkpoint_consumer(TOPIC, start=given) as consumer:
        fresh = consumer.checkpoint()
        assert by_key(await take(consumer, 32)) == expected(32, 64)
        with pytest.raises(DeadlineExceeded):
            await consumer.receive(0.05)
    async with client.checkpoint_consumer(TOPIC, start=Checkpoint.from_bytes(fresh.to_bytes())) as consumer:
        assert by_key(await take(consumer, 32)) == expected(32, 64)


async def test_reading_goes_on_after_a_reconnect(broker: InProcessBroker, client: Client) -> None:
    count = await grown(broker, client)
    async with client.checkpoint_consumer(TOPIC) as consumer:
        got = await take(consumer, 30)
        for connection in list(client.pool.connections.values()):
            connection.abort(CheckpointInvalid("test"))
        got += await take(consumer, count - 30)
        assert by_key(got) == expected(0, count)


async def test_receive_batch_goes_through_the_dag(broker: InProcessBroker, client: Client) -> None:
    count = await grown(broker, client)
    async with client.checkpoint_consumer(TOPIC) as consumer:
        got: list[Message] = []
        async with asyncio.timeout(20):
            while len(got) < count:
                got += await consumer.receive_batch(1000, 0.2)
        assert by_key(got) == expected(0, count)


@pytest.mark.inv("INV5")
async def test_checkpoints_that_do_not_fit(broker: InProcessBroker, client: Client) -> None:
    service = broker.nodes[0].service
    await produce(client, 0, 16)
    async with client.checkpoint_consumer(TOPIC) as consumer:
        await take(consumer, 8)
        old = consumer.checkpoint()
    other = "topic://public/default/other"
    await service.create_scalable_topic(TopicName.parse(other), 2)
    with pytest.raises(CheckpointInvalid, match="orders"):
        await client.checkpoint_consumer(other, start=old)
    controller = await leader(broker)
    await controller.split_segment(0)
    assert await controller.prune() == [0]
    with pytest.raises(CheckpointOutdated, match="Retention"):
        await client.checkpoint_consumer(TOPIC, start=old)
    await service.scalable.delete_topic(NAME, force=True)
    await service.create_scalable_topic(NAME, 2)
    with pytest.raises(CheckpointOutdated, match="created again"):
        await client.checkpoint_consumer(TOPIC, start=old)


class Straying(Client):
    """A client that may lose its way to segments."""

    is_lost = False

    async def locate(self, topic: str) -> Connection:
        if self.is_lost and topic.startswith("segment://"):
            raise NotReady(f"{topic} has no owner at the moment.")
        return await super().locate(topic)


async def test_a_segment_removed_unread_is_an_error(broker: InProcessBroker, client: Client) -> None:
    narrow = Straying(broker.service_url, config=ClientConfig(receiver_queue=2, backoff_initial=0.01))
    controller = await leader(broker)
    await produce(client, 0, 40)
    async with narrow, narrow.checkpoint_consumer(TOPIC) as consumer:
        await consumer.receive(SECONDS)
        await controller.split_segment(0)
        await controller.split_segment(1)
        assert await controller.prune() == []  # somebody reads them
        narrow.is_lost = True
        (await narrow.service_connection()).abort(ConnectionLost("Cut by the test."))
        removed: set[int] = set()
        async with asyncio.timeout(SECONDS):
            while removed != {0, 1}:
                removed |= set(await controller.prune())
        with pytest.raises(CheckpointOutdated, match="keep data longer"):
            for _ in range(40):
                await consumer.receive(SECONDS)


@pytest.mark.parametrize("is_checkpoint", [False, True])
async def test_a_segment_removed_before_the_first_attachment(
    broker: InProcessBroker, client: Client, is_checkpoint: bool
) -> None:
    """Who comes with a checkpoint wants what follows it; who wants what there is gets what there is."""
    straying = Straying(broker.service_url, config=ClientConfig(backoff_initial=0.01, layout_check=0.05))
    straying.is_lost = True
    controller = await leader(broker)
    await produce(client, 0, 40)
    async with client.checkpoint_consumer(TOPIC) as consumer:
        await consumer.receive(SECONDS)
        place = consumer.checkpoint()
    await controller.split_segment(0)
    async with straying:
        consumer = CheckpointConsumer(straying, TOPIC, start=place if is_checkpoint else EARLIEST)
        opening = asyncio.create_task(consumer.open())
        await until(lambda: 0 in consumer._lanes)
        assert await controller.prune() == [0]
        await until(lambda: 0 not in consumer._lanes or consumer.failure is not None)
        straying.is_lost = False
        if is_checkpoint:
            with pytest.raises(CheckpointOutdated, match="segment 0"):
                await opening
        else:
            await opening
            assert consumer.segments == [1, 2, 3]
        await consumer.close()


async def test_several_segments_removed_at_once(broker: InProcessBroker, client: Client) -> None:
    """One of them was read to its end, but its broker has not said so yet."""
    controller = await leader(broker)
    async with client.checkpoint_consumer(TOPIC) as consumer:
        await produce(client, 0, 16)
        consumer._lanes[0].ended = lambda: None  # type: ignore[method-assign]
        await controller.split_segment(0)
        await controller.split_segment(1)
        for _ in range(16):
            await consumer.receive(SECONDS)
        await until(lambda: consumer._places[1] is END and consumer._lanes[0].is_exhausted)
        connection = await client.service_connection()
        assert await controller.prune() == [0, 1]
        await until(lambda: consumer.segments == [2, 3, 4, 5])
        assert connection.is_open
        await produce(client, 16, 32)
        assert sorted([int((await consumer.receive(SECONDS)).payload) for _ in range(16)]) == list(range(16, 32))


@pytest.mark.parametrize("group", [None, "g"])
async def test_nothing_behind_a_gap_is_handed_out(broker: InProcessBroker, client: Client, group: str | None) -> None:
    """The application could not tell, and would store the results and the checkpoint."""
    straying = Straying(broker.service_url, config=ClientConfig(receiver_queue=8, backoff_initial=0.01, layout_check=0.05))
    controller = await leader(broker)
    await produce(client, 0, 80)
    async with straying, straying.checkpoint_consumer(TOPIC, group=group) as consumer:
        got = [await consumer.receive(SECONDS)]
        straying.is_lost = True
        (await straying.service_connection()).abort(ConnectionLost("Cut by the test."))
        await controller.split_segment(0)
        await controller.split_segment(1)
        await produce(client, 80, 120)
        removed: set[int] = set()
        async with asyncio.timeout(SECONDS):
            while removed != {0, 1}:
                removed |= set(await controller.prune())
        straying.is_lost = False
        with pytest.raises(CheckpointOutdated, match="keep data longer"):
            while len(got) < 120:
                got.append(await consumer.receive(SECONDS))
        assert {each.segment_id for each in got} <= {0, 1}
        place = consumer.checkpoint()
    with pytest.raises(CheckpointOutdated):
        await client.checkpoint_consumer(TOPIC, start=place.to_bytes(), group=group)


async def test_successors_wait_for_what_is_queued_of_a_removed_segment(broker: InProcessBroker, client: Client) -> None:
    straying = Straying(broker.service_url, config=ClientConfig(receiver_queue=100, backoff_initial=0.01))
    controller = await leader(broker)
    await produce(client, 0, 16)
    async with straying, straying.checkpoint_consumer(TOPIC) as consumer:
        await until(lambda: len(consumer._queue) == 16)
        await controller.split_segment(0)
        await controller.split_segment(1)
        await until(lambda: len(consumer._lanes) == 2 and all(lane.is_exhausted for lane in consumer._lanes.values()))
        straying.is_lost = True
        (await straying.service_connection()).abort(ConnectionLost("Cut by the test."))
        removed: set[int] = set()
        async with asyncio.timeout(SECONDS):
            while removed != {0, 1}:
                removed |= set(await controller.prune())
        await until(lambda: set(consumer.layouts.layout.all_segments) == {2, 3, 4, 5})
        assert consumer.segments == [0, 1]
        straying.is_lost = False
        got = await take(consumer, 16)
        await produce(client, 16, 32)
        assert by_key(got + await take(consumer, 16)) == expected(0, 32)


async def test_segments_that_came_and_went_since_a_checkpoint(broker: InProcessBroker, client: Client) -> None:
    controller = await leader(broker)
    async with client.checkpoint_consumer(TOPIC) as consumer:
        found = consumer.checkpoint()
    await controller.split_segment(0)
    await produce(client, 0, 16)
    await controller.split_segment(2)
    assert await controller.prune() == [0, 2]
    early = Checkpoint(found.topic, found.incarnation, 2, {0: END, 1: EARLIEST})
    with pytest.raises(CheckpointOutdated, match=r"\(2\)"):
        await client.checkpoint_consumer(TOPIC, start=early)
    async with client.checkpoint_consumer(TOPIC, start=early, group="g"):
        pass  # other members may have read it


async def test_a_stored_checkpoint_can_be_given_as_it_was_stored(broker: InProcessBroker, client: Client) -> None:
    await produce(client, 0, 16)
    async with client.checkpoint_consumer(TOPIC) as consumer:
        got = await take(consumer, 5)
        stored = consumer.checkpoint().to_bytes()
    async with client.checkpoint_consumer(TOPIC, start=stored) as consumer:
        assert by_key(got + await take(consumer, 11)) == expected(0, 16)
    with pytest.raises(CheckpointInvalid):
        await client.checkpoint_consumer(TOPIC, start=b"")
    with pytest.raises(InvalidArgument, match="bytes"):
        Checkpoint.from_bytes("abc")  # type: ignore[arg-type]


@pytest.mark.req("R468-31")
async def test_a_group_shares_the_segments(broker: InProcessBroker, client: Client) -> None:
    async with (
        client.checkpoint_consumer(TOPIC, group="g", name="a") as first,
        client.checkpoint_consumer(TOPIC, group="g", name="b") as second,
    ):
        await until(lambda: (first.segments, second.segments) in (([0], [1]), ([1], [0])))
        await produce(client, 0, 40)
        got: list[Message] = []
        while len(got) < 40:
            got += await first.receive_batch(50, 0.05)
            got += await second.receive_batch(50, 0.05)
        assert sorted(int(message.payload) for message in got) == list(range(40))
        await (await leader(broker)).split_segment(0)
        await until(lambda: sorted(first.segments + second.segments) == [1, 2, 3])
        await produce(client, 40, 80)
        while len(got) < 80:
            got += await first.receive_batch(50, 0.05)
            got += await second.receive_batch(50, 0.05)
        assert sorted(int(message.payload) for message in got) == list(range(80))
        part = first.checkpoint()
    async with client.checkpoint_consumer(TOPIC, group="g", name="a", start=part) as first:
        await until(lambda: len(first.segments) == 3)


async def test_a_members_checkpoint_is_no_checkpoint_of_the_topic(broker: InProcessBroker, client: Client) -> None:
    part = Checkpoint(TOPIC, (await broker.nodes[0].service.scalable.metadata(NAME)).incarnation, 2, {0: EARLIEST})
    with pytest.raises(CheckpointInvalid, match="group"):
        await client.checkpoint_consumer(TOPIC, start=part)


async def test_regular_topics(broker: InProcessBroker, client: Client) -> None:
    topic = "persistent://public/default/parts"
    await broker.nodes[0].service.create_partitioned(TopicName.parse(topic), 3)
    await produce(client, 0, 24, topic)
    async with client.checkpoint_consumer(topic) as consumer:
        got = await take(consumer, 10)
        middle = consumer.checkpoint()
    async with client.checkpoint_consumer(topic, start=middle) as consumer:
        got += await take(consumer, 14)
        assert by_key(got) == expected(0, 24)


@pytest.mark.parametrize(
    "start", [MessageId(1, 2), -1, True, "earliest", NAIVE, BEFORE_1970, 1 << 63], ids=lambda value: str(value)[:10]
)
async def test_starts_that_cannot_be_used(broker: InProcessBroker, client: Client, start: object) -> None:
    with pytest.raises(InvalidArgument, match="start="):
        await client.checkpoint_consumer(TOPIC, start=start)  # type: ignore[arg-type]
