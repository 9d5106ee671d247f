"""Names that clients have: those that were not given must not meet, and those that were given need not be pretty."""

from __future__ import annotations

import pytest

import braid
from braid.client.checkpoint_consumer import CheckpointConsumer
from braid.client.queue_consumer import QueueConsumer
from braid.client.stream_consumer import StreamConsumer
from braid.errors import TopicNotFound
from braid.testing.broker import InProcessBroker

TOPIC = "topic://public/default/orders"
MANY = 2000


@pytest.mark.req("R468-63")
async def test_names_that_were_not_given_are_no_names_of_others() -> None:
    client = braid.connect("pulsar://localhost:1")
    streams = {StreamConsumer(client, TOPIC, "s").name for _ in range(MANY)}
    queues = {QueueConsumer(client, TOPIC, "s").name for _ in range(MANY)}
    members = {CheckpointConsumer(client, TOPIC, group="g").name for _ in range(MANY)}
    assert len(streams) == len(queues) == len(members) == MANY


@pytest.mark.parametrize("name", ["a/b", " x ", "..", "100 %", "é✓", "x" * 1000])
@pytest.mark.parametrize("group", [None, "g"])
async def test_a_checkpoint_consumer_may_have_any_name(name: str, group: str | None) -> None:
    async with InProcessBroker(with_http=False) as broker, braid.connect(broker.service_url) as client:
        async with client.producer(TOPIC) as producer:
            await producer.send(b"one")
        async with client.checkpoint_consumer(TOPIC, name=name, group=group) as consumer:
            assert (await consumer.receive(10.0)).payload == b"one"
            assert consumer.name == name


async def test_readers_of_one_name_are_not_in_each_others_way() -> None:
    """Each has a subscription of its own, whatever its name."""
    async with InProcessBroker(with_http=False) as broker, braid.connect(broker.service_url) as client:
        async with client.producer(TOPIC) as producer:
            await producer.send(b"one")
        made = [await client.checkpoint_consumer(TOPIC, name="same") for _ in range(60)]
        for consumer in made:
            assert (await consumer.receive(10.0)).payload == b"one"


async def test_a_partition_of_a_scalable_topic_is_refused_as_what_it_is() -> None:
    async with InProcessBroker(with_http=False) as broker, braid.connect(broker.service_url) as client:
        with pytest.raises(TopicNotFound, match="use topic://public/default/orders"):
            await client.producer(f"{TOPIC}-partition-1")
