"""Acknowledging what another consumer received, and arguments of consumers that cannot be used."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import pytest

import braid
from braid.client import Client
from braid.client.consumer_origin import MAX_LEDGERS, Origin
from braid.client.dead_letters import DeadLetterPolicy
from braid.client.messages import Message, MessageId
from braid.client.queue_consumer import Backoff
from braid.errors import BraidError, DeadlineExceeded, InvalidArgument, InvalidTopicName, TopicNotFound
from braid.model.names import TopicName
from braid.testing.broker import InProcessBroker

ONE, OTHER = "topic://public/default/one", "topic://public/default/other"
SECONDS = 10.0


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with InProcessBroker(with_http=False) as broker, braid.connect(broker.service_url) as made:
        for topic in (ONE, OTHER):
            await broker.nodes[0].service.create_scalable_topic(TopicName.parse(topic), 2)
        yield made


async def produce(client: Client, *topics: str) -> None:
    for topic in topics:
        async with client.producer(topic) as producer:
            for number in range(10):
                await producer.send(b"%d" % number, key=f"key-{number}")


async def take(consumer: Any, count: int = 10) -> list[Message]:
    return [await consumer.receive(SECONDS) for _ in range(count)]


async def refused(consumer: Any, message: Message, other: str, *, is_cumulative: bool) -> None:
    acknowledge = consumer.acknowledge_cumulative if is_cumulative else consumer.acknowledge
    with pytest.raises(InvalidArgument) as caught:
        await acknowledge(message)
    assert other in str(caught.value)
    assert consumer.topic in str(caught.value)
    if message.topic != consumer.topic:
        with pytest.raises(InvalidArgument, match=consumer.topic):
            await acknowledge(message.id)
    with pytest.raises(InvalidArgument, match="MessageId"):
        await acknowledge("5:3")


async def test_a_stream_consumer_acknowledges_only_its_own(client: Client) -> None:
    await produce(client, ONE, OTHER)
    async with client.stream_consumer(ONE, "s") as consumer:
        await take(consumer)
        async with (
            client.stream_consumer(OTHER, "s") as foreign,
            client.stream_consumer(ONE, "s2") as cousin,
            client.checkpoint_consumer(ONE) as reader,
        ):
            for each, topic in ((foreign, OTHER), (cousin, ONE), (reader, ONE)):
                await refused(consumer, (await take(each))[-1], topic, is_cumulative=True)
    async with client.stream_consumer(ONE, "s") as consumer:
        own = await take(consumer)  # nothing was acknowledged
        await consumer.acknowledge_cumulative(own[-1].id, wait=True)
        await consumer.acknowledge_cumulative(own[-1], wait=True)
    async with client.stream_consumer(ONE, "s") as consumer:
        with pytest.raises(InvalidArgument):
            await consumer.acknowledge_cumulative(own[-1])  # of a consumer that is gone
        assert await consumer.receive_batch(10, timeout=0.05) == []


async def test_a_queue_consumer_acknowledges_only_its_own(client: Client) -> None:
    await produce(client, ONE, OTHER)
    async with (
        client.queue_consumer(ONE, "q", initial="earliest") as consumer,
        client.queue_consumer(OTHER, "q", initial="earliest") as foreign,
    ):
        own = await take(consumer)
        strange = (await take(foreign))[-1]
        await refused(consumer, strange, OTHER, is_cumulative=False)
        with pytest.raises(InvalidArgument, match=OTHER):
            await consumer.negative_acknowledge(strange)
        for each in own:
            await consumer.acknowledge(each.id, wait=True)


async def test_a_consumer_of_a_regular_topic_acknowledges_only_its_own(client: Client) -> None:
    one, other = "persistent://public/default/p", "persistent://public/default/r"
    async with (
        client.consumer(one, "s", initial="earliest") as consumer,
        client.consumer(other, "s", initial="earliest") as foreign,
    ):
        await produce(client, one, other)
        own, strange = await take(consumer), (await take(foreign))[-1]
        await refused(consumer, strange, other, is_cumulative=False)
        await refused(consumer, strange, other, is_cumulative=True)
    async with client.consumer(one, "s") as consumer:
        assert [each.payload for each in await take(consumer)] == [each.payload for each in own]
        await consumer.acknowledge_cumulative(own[-1].id, wait=True)
    async with client.consumer(one, "s") as consumer:
        with pytest.raises(DeadlineExceeded):
            await consumer.receive(0.05)


def test_only_so_many_ledgers_are_known() -> None:
    origin = Origin(ONE, "a")
    for number in range(MAX_LEDGERS + 1):
        origin.note(number)
    assert origin.own(MessageId(1, 0)) == MessageId(1, 0)
    with pytest.raises(InvalidArgument):
        origin.own(MessageId(0, 0))


BAD: list[tuple[str, dict[str, Any], str]] = [
    *((kind, {"subscription": "s", "initial": "middle"}, "earliest") for kind in ("stream", "queue", "plain")),
    *((kind, {"subscription": "s", "initial": 5}, "earliest") for kind in ("stream", "queue", "plain")),
    *((kind, {"subscription": ""}, "subscription=") for kind in ("stream", "queue", "plain")),
    *((kind, {"subscription": 5}, "subscription=") for kind in ("stream", "queue", "plain")),
    *((kind, {"subscription": "s", "name": ""}, "name=") for kind in ("stream", "queue", "plain")),
    *((kind, {"subscription": "s", "topic": 5}, "topic=") for kind in ("stream", "queue", "plain")),
    ("plain", {"subscription": "s", "type": "key"}, "failover"),
    ("queue", {"subscription": "s", "ack_timeout": "1"}, "ack_timeout="),
    ("queue", {"subscription": "s", "dead_letter": 3}, "DeadLetterPolicy"),
    ("queue", {"subscription": "s", "nack_backoff": 3}, "Backoff"),
    ("checkpoint", {"group": ""}, "group="),
    ("checkpoint", {"name": 5}, "name="),
    ("checkpoint", {"topic": ""}, "topic="),
]


async def test_arguments_that_cannot_be_used(client: Client) -> None:
    makers: dict[str, tuple[Any, str]] = {
        "stream": (client.stream_consumer, ONE),
        "queue": (client.queue_consumer, ONE),
        "checkpoint": (client.checkpoint_consumer, ONE),
        "plain": (client.consumer, "persistent://public/default/p"),
    }
    for kind, arguments, said in BAD:
        maker, topic = makers[kind]
        error: BraidError | None = None
        try:
            async with asyncio.timeout(SECONDS):
                await maker(**({"topic": topic} | arguments))
        except BraidError as raised:
            error = raised
        assert isinstance(error, InvalidArgument), (kind, arguments, error)
        assert said in str(error)
    for place in ("", 5, ONE, "persistent://public/default/one", "non-persistent://public/default/dead"):
        with pytest.raises(InvalidArgument, match=r"topic of the dead letters|Dead letters of topic://public/default/one"):
            await client.queue_consumer(ONE, "s", dead_letter=DeadLetterPolicy(1, place))  # type: ignore[arg-type]
    with pytest.raises(InvalidTopicName, match="unknown domain"):
        await client.queue_consumer(ONE, "s", dead_letter=DeadLetterPolicy(1, "foo://public/default/dead"))
    for pause in ("1", -1, None, math.nan):
        with pytest.raises(InvalidArgument, match="back-off"):
            Backoff(first=pause)  # type: ignore[arg-type]
    assert Backoff(longest=math.inf).pause(3) == 8.0
    with pytest.raises(InvalidArgument, match="max_redeliveries"):
        DeadLetterPolicy(max_redeliveries="3")  # type: ignore[arg-type]
    async with client.stream_consumer(ONE, "s") as consumer:
        with pytest.raises(InvalidArgument, match="batch of"):
            await consumer.receive_batch("x")  # type: ignore[arg-type]


async def test_after_its_topic_was_deleted_a_stream_consumer_says_so() -> None:
    """Whatever it is asked: also the acknowledgment of what it has."""
    async with InProcessBroker(with_http=False) as broker, braid.connect(broker.service_url) as client:
        service, name = broker.nodes[0].service, TopicName.parse(ONE)
        await service.create_scalable_topic(name, 2)
        await produce(client, ONE)
        async with client.stream_consumer(ONE, "s") as consumer:
            received = await take(consumer)
            await service.scalable.delete_topic(name, force=True)
            with pytest.raises(TopicNotFound, match=ONE):
                await consumer.receive(SECONDS)
            with pytest.raises(TopicNotFound, match=ONE):
                await consumer.acknowledge_cumulative(received[-1])


async def test_consumers_of_a_deleted_regular_topic_say_so() -> None:
    """Its partitions do not come back, and no layout tells of their end."""
    async with InProcessBroker(with_http=False) as broker, braid.connect(broker.service_url) as client:
        service, name = broker.nodes[0].service, TopicName.parse("persistent://public/default/parts")
        await service.create_partitioned(name, 3)
        made: list[Any] = [
            await client.stream_consumer(str(name), "s"),
            await client.queue_consumer(str(name), "q"),
            await client.checkpoint_consumer(str(name)),
            await client.checkpoint_consumer(str(name), group="g"),
        ]
        await service.delete_partitioned(name, force=True)
        for consumer in made:
            with pytest.raises(TopicNotFound, match="persistent://public/default/parts-partition-"):
                await consumer.receive(SECONDS)
            await consumer.close()
