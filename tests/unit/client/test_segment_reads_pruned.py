"""Segments that were sealed and removed while a reader was away, against real brokers: where they ended is remembered, so that
one who had read them goes on and one who had not is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

import braid
from braid.broker.config import RetentionConfig
from braid.client import Client
from braid.client.config import ClientConfig
from braid.client.messages import EARLIEST
from braid.client.segment_reads import Pruned
from braid.errors import BraidError, CheckpointOutdated
from braid.model.names import TopicName
from braid.scalable.config import ScalableConfig
from braid.scalable.controller import ScalableTopicController
from braid.testing.broker import InProcessBroker
from braid.web.config import StandaloneConfig

TOPIC = "topic://public/default/orders"
NAME = TopicName.parse(TOPIC)
CONFIG = StandaloneConfig(
    scalable_topics=ScalableConfig(prune_seconds=3600.0, drain_poll_seconds=0.1),
    retention=RetentionConfig(unread_minutes=0),
)


@pytest.fixture
async def broker() -> AsyncIterator[InProcessBroker]:
    async with InProcessBroker(config=CONFIG, with_http=False) as one:
        await one.nodes[0].service.create_scalable_topic(NAME, 1)
        yield one


@pytest.fixture
async def client(broker: InProcessBroker) -> AsyncIterator[Client]:
    async with braid.connect(broker.service_url, config=ClientConfig(operation_timeout=5, backoff_initial=0.01)) as one:
        yield one


async def leader(broker: InProcessBroker) -> ScalableTopicController:
    for node in broker.nodes:
        try:
            found = await node.service.scalable.lead(NAME)
        except BraidError:
            continue
        assert isinstance(found, ScalableTopicController)
        return found
    pytest.fail("nobody leads")


async def produce(client: Client, first: int, last: int, *, batching: bool = True) -> None:
    async with client.producer(TOPIC, batching=batching) as producer:
        await asyncio.gather(*[producer.send(b"%d" % number, key=f"key-{number % 8}") for number in range(first, last)])


@pytest.mark.inv("INV5")
async def test_the_end_of_a_removed_segment_is_the_one_it_had(broker: InProcessBroker, client: Client) -> None:
    reads = client.segment_reads()
    view = await reads.topic(TOPIC)
    await produce(client, 0, 20)
    await produce(client, 20, 25, batching=False)
    transaction = await client.begin_transaction()
    async with client.producer(TOPIC) as producer:
        await producer.send(b"never seen", key="key-1", txn=transaction)
    await transaction.abort()
    assert await reads.pruned(TOPIC) == Pruned(view.incarnation, {})
    controller = await leader(broker)
    await controller.split_segment(0)
    ended = (await reads.states([view.segments[0].topic]))[view.segments[0].topic]
    assert (ended.is_sealed, ended.stable) == (True, ended.end)
    assert await controller.prune() == [0]
    found = await reads.pruned(TOPIC)
    assert found.incarnation == view.incarnation
    assert {number: end.index for number, end in found.ends.items()} == {0: ended.end}
    await controller.merge_segments(1, 2)  # both are empty
    assert await controller.prune() == [1, 2]
    assert {number: end.index for number, end in (await reads.pruned(TOPIC)).ends.items()} == {0: ended.end, 1: 0, 2: 0}


async def test_other_topics_have_no_removed_segments(client: Client) -> None:
    reads = client.segment_reads()
    async with client.producer("persistent://public/default/plain") as producer:
        await producer.send(b"1")
    for name in ("persistent://public/default/plain", "topic://public/default/none", "plain"):
        assert await reads.pruned(name) == Pruned("", {})


@pytest.mark.inv("INV5")
async def test_a_topic_that_was_made_anew_remembers_nothing_of_the_old_one(broker: InProcessBroker, client: Client) -> None:
    reads, service = client.segment_reads(), broker.nodes[0].service
    await produce(client, 0, 5)
    controller = await leader(broker)
    await controller.split_segment(0)
    assert await controller.prune() == [0]
    old = await reads.pruned(TOPIC)
    await service.scalable.delete_topic(NAME, force=True)
    await service.create_scalable_topic(NAME, 1)
    new = await reads.pruned(TOPIC)
    assert new.incarnation not in ("", old.incarnation)
    assert new.ends == {}


async def test_ends_are_told_by_whoever_owns_the_segments() -> None:
    """The leader asks the owners, one of which is another broker, over HTTP."""
    async with InProcessBroker(config=CONFIG, brokers=2) as broker, braid.connect(broker.service_urls) as client:
        await broker.nodes[0].service.create_scalable_topic(NAME, 8)
        await produce(client, 0, 64, batching=False)
        reads = client.segment_reads()
        view = await reads.topic(TOPIC)
        names = {each.topic: number for number, each in view.segments.items()}
        ends = {names[name]: state.end for name, state in (await reads.states(list(names))).items()}
        assert sum(ends.values()) == 64
        controller = await leader(broker)
        for first in range(0, 8, 2):
            await controller.merge_segments(first, first + 1)
        owners = {(await controller.stats())["segments"][str(number)]["owner"] for number in ends}
        assert len(owners) == 2
        assert await controller.prune() == list(range(8))
        assert {number: end.index for number, end in (await reads.pruned(TOPIC)).ends.items()} == ends


@pytest.mark.parametrize("batching", [True, False])
async def test_a_checkpoint_at_the_end_of_a_removed_segment_goes_on_behind_it(
    broker: InProcessBroker, client: Client, batching: bool
) -> None:
    await produce(client, 0, 16, batching=batching)
    async with client.checkpoint_consumer(TOPIC, start=EARLIEST) as consumer:
        for _ in range(15):
            await consumer.receive(10)
        unread = consumer.checkpoint()
        await consumer.receive(10)
        read = consumer.checkpoint()
    controller = await leader(broker)
    await controller.split_segment(0)
    await controller.merge_segments(1, 2)  # two that come and go, empty
    assert await controller.prune() == [0, 1, 2]
    await produce(client, 16, 24, batching=batching)
    async with client.checkpoint_consumer(TOPIC, start=read) as consumer:
        got = sorted([int((await consumer.receive(10)).payload) for _ in range(8)])
        assert got == list(range(16, 24))
        later = consumer.checkpoint()
    async with client.checkpoint_consumer(TOPIC, start=later.to_bytes()):
        pass
    with pytest.raises(CheckpointOutdated, match=r"Retention has removed segments \(0\)"):
        await client.checkpoint_consumer(TOPIC, start=unread)
