"""Awkward moments of consumers: closing while something is under way, permits of messages nobody gets, refusals in batches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

import braid
from braid.client import Client
from braid.client.config import ClientConfig
from braid.client.connection import Connection
from braid.client.dead_letters import DeadLetterPolicy
from braid.client.messages import Message
from braid.client.queue_consumer import Backoff
from braid.errors import BraidError, Closed, DeadlineExceeded, NotReady
from braid.model.names import TopicName
from braid.runtime.env import Runtime
from braid.scalable.config import ScalableConfig
from braid.testing.broker import InProcessBroker
from braid.testing.clock import ManualClock
from braid.web.config import StandaloneConfig

TOPIC = "topic://public/default/orders"
NAME = TopicName.parse(TOPIC)
SECONDS = 10.0


@pytest.fixture
async def broker() -> AsyncIterator[InProcessBroker]:
    config = StandaloneConfig(scalable_topics=ScalableConfig(drain_poll_seconds=0.1))
    async with InProcessBroker(config=config, with_http=False) as one:
        await one.nodes[0].service.create_scalable_topic(NAME, 2)
        yield one


@pytest.fixture
async def client(broker: InProcessBroker) -> AsyncIterator[Client]:
    async with braid.connect(broker.service_url) as one:
        yield one


async def until(condition: Callable[[], bool], seconds: float = SECONDS) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - brokers take their own time, no event tells
            await asyncio.sleep(0.005)


async def produce(client: Client, first: int, last: int, topic: str = TOPIC) -> None:
    async with client.producer(topic, batching=False) as producer:
        for number in range(first, last):
            await producer.send(b"%d" % number, key=f"key-{number % 8}")


async def produce_batch(client: Client, count: int, topic: str) -> None:
    """All in one entry."""
    async with client.producer(topic) as producer:
        sent = [producer.send_nowait(b"%d" % number) for number in range(count)]
        assert len({(found.ledger_id, found.entry_id) for found in await asyncio.gather(*sent)}) == 1


async def attached(broker: InProcessBroker, topic: str, subscription: str) -> list[str]:
    """Names of the consumers the broker knows."""
    found = await broker.nodes[0].service.topic(TopicName.parse(topic), create=False)
    return [each.info.name for each in found.subscriptions[subscription].consumers]


async def test_a_segment_that_comes_back_with_a_small_queue(broker: InProcessBroker) -> None:
    """What was dropped when the segment was to be given away took permits with it."""
    config = ClientConfig(receiver_queue=8)
    async with (
        braid.connect(broker.service_url, config=config) as client,
        client.stream_consumer(TOPIC, "s", name="a") as first,
    ):
        await produce(client, 0, 80)
        got: list[Message] = []
        while {each.segment_id for each in got} != {0, 1}:
            got.append(await first.receive(SECONDS))
        await until(lambda: len(first._queue) == sum(lane._granted for lane in first._lanes.values()))  # all it may send
        async with client.stream_consumer(TOPIC, "s", name="b") as second:
            await until(lambda: len(first.segments) == 1 and len(second.segments) == 1)
        await until(lambda: first.segments == [0, 1])
        while len(got) < 80:
            got.append(await first.receive(SECONDS))
        assert sorted(int(each.payload) for each in got) == list(range(80))


async def test_waiting_for_an_acknowledgement_that_cannot_be_sent(broker: InProcessBroker, client: Client) -> None:
    consumer = await client.consumer("plain", "s", initial="earliest")
    await produce(client, 0, 2, "persistent://public/default/plain")
    message = await consumer.receive(SECONDS)
    await consumer.close()
    async with asyncio.timeout(SECONDS):
        with pytest.raises(Closed):
            await consumer.acknowledge(message, wait=True)


class HalfBlind(Client):
    """A client that does not find the owner of one segment."""

    missing = "segment://"

    async def locate(self, topic: str) -> Connection:
        if topic.startswith("segment://") and self.missing in topic:
            raise NotReady(f"{topic} has no owner at the moment.")
        return await super().locate(topic)


async def test_a_queue_consumer_is_not_open_before_every_segment_knows_its_subscription(broker: InProcessBroker) -> None:
    config = ClientConfig(operation_timeout=0.3, backoff_initial=0.01)
    client = HalfBlind(broker.service_url, config=config)
    async with client:
        with pytest.raises(DeadlineExceeded, match="segment"):
            await client.queue_consumer(TOPIC, "q")
        assert client._made == {}
        client.missing = "nothing"
        async with client.queue_consumer(TOPIC, "q") as consumer:
            assert consumer.segments == [0, 1]


@pytest.mark.parametrize("turns", [0, 1, 2, 5])
async def test_closing_again_after_a_close_that_was_given_up(broker: InProcessBroker, client: Client, turns: int) -> None:
    queue = await client.queue_consumer(TOPIC, "q")
    stream = await client.stream_consumer(TOPIC, "s")
    reader = await client.checkpoint_consumer(TOPIC)
    lanes = [each.topic for each in stream._lanes.values()]
    for consumer in (queue, stream, reader):
        closing = asyncio.ensure_future(consumer.close())
        for _ in range(turns):
            await asyncio.sleep(0)
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        await consumer.close()
        assert len(consumer._tasks) == 0
    for topic in lanes:
        assert await attached(broker, topic, "q") == []
        assert await attached(broker, topic, "s") == []
    controller = await broker.nodes[0].service.scalable.lead(NAME)
    assert (await controller.stats())["subscriptions"]["s"]["consumerCount"] == 0


async def test_a_client_closed_while_consumers_are_being_opened(broker: InProcessBroker) -> None:
    """Whatever moment it is, the caller gets an error of ours, and soon."""
    for turns in range(0, 60, 3):
        client = Client(broker.service_url)
        await client.__aenter__()
        openings = [client.stream_consumer(TOPIC, "s"), client.queue_consumer(TOPIC, "q"), client.checkpoint_consumer(TOPIC)]

        async def opened(opening: object) -> object:
            return await opening  # type: ignore[misc]

        under_way = [asyncio.ensure_future(opened(each)) for each in openings]
        for _ in range(turns):
            await asyncio.sleep(0)
        async with asyncio.timeout(SECONDS):
            await client.close()
            for result in await asyncio.gather(*under_way, return_exceptions=True):
                assert not isinstance(result, BaseException) or isinstance(result, BraidError), (turns, repr(result))


async def test_refusing_one_message_of_a_batch_brings_only_that_one_again(broker: InProcessBroker) -> None:
    clock = ManualClock()
    async with braid.connect(broker.service_url, runtime=Runtime(clock=clock)) as client:
        options = Backoff(first=1.0, longest=1.0)
        topic = "persistent://public/default/plain"
        async with client.queue_consumer(
            topic, "q", initial="earliest", nack_backoff=options, dead_letter=DeadLetterPolicy(2)
        ) as consumer:
            await produce_batch(client, 6, topic)
            got = [await consumer.receive() for _ in range(4)]  # two more wait in the queue
            for count in range(1, 3):
                await consumer.negative_acknowledge(got[1])
                await clock.advance(1.0)
                again = [await consumer.receive() for _ in range(3 if count == 1 else 1)]
                assert [each.payload for each in again if each.redelivery_count] == [b"1"]
                if count == 1:
                    assert [each.payload for each in again] == [b"4", b"5", b"1"]
                got[1] = again[-1]
            await consumer.negative_acknowledge(got[1])
            await clock.advance(1.0)
            async with client.consumer(f"{topic}-DLQ", "s", initial="earliest") as dead:
                assert (await dead.receive()).payload == b"1"  # its neighbours were never refused
                assert dead.receive_nowait() is None
            for message in (got[0], got[2], got[3]):
                await consumer.acknowledge(message, wait=True)
            assert consumer.receive_nowait() is None
