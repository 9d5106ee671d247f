"""Consumers that open while retention removes a sealed segment that the layout they have just read still lists."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from braid.client import Client
from braid.client.connection import Connection
from braid.client.messages import EARLIEST
from braid.model.names import TopicName
from braid.scalable.config import ScalableConfig
from braid.scalable.controller import ScalableTopicController
from braid.testing.broker import InProcessBroker
from braid.web.config import StandaloneConfig

TOPIC = "topic://public/default/orders"
NAME = TopicName.parse(TOPIC)
SECONDS = 10.0
OPENERS = {
    "queue": lambda client: client.queue_consumer(TOPIC, "q", initial="earliest"),
    "checkpoint": lambda client: client.checkpoint_consumer(TOPIC, start=EARLIEST),
    "group": lambda client: client.checkpoint_consumer(TOPIC, start=EARLIEST, group="g"),
}


class Slow(Client):
    """Finds some segments only when it is allowed to."""

    def __init__(self, url: str, *late: str) -> None:
        super().__init__(url)
        self.late = late
        self.is_looking, self.may_find = asyncio.Event(), asyncio.Event()

    async def locate(self, topic: str) -> Connection:
        if topic.startswith("segment://") and topic.endswith(self.late):
            self.is_looking.set()
            await self.may_find.wait()
        return await super().locate(topic)


@pytest.fixture
async def broker() -> AsyncIterator[InProcessBroker]:
    config = StandaloneConfig(scalable_topics=ScalableConfig(drain_poll_seconds=0.1))
    async with InProcessBroker(config=config, with_http=False) as one:
        await one.nodes[0].service.create_scalable_topic(NAME, 1)
        yield one


async def leader(broker: InProcessBroker) -> ScalableTopicController:
    found = await broker.nodes[0].service.scalable.lead(NAME)
    assert isinstance(found, ScalableTopicController)
    await found.create_subscription("other", "QUEUE", "latest")  # has read everything, so that what is sealed may go
    return found


async def opened(broker: InProcessBroker, kind: str, *late: str, change: Any) -> None:
    """Open while `change` happens to the topic, and receive what is sent afterwards."""
    client = Slow(broker.service_url, *late)
    async with asyncio.timeout(SECONDS), client:
        opening = asyncio.ensure_future(anext_of(OPENERS[kind](client)))
        await client.is_looking.wait()
        await change()
        client.may_find.set()
        manager, consumer = await opening
        try:
            async with client.producer(TOPIC) as producer:
                for number in range(8):
                    await producer.send(b"%d" % number, key=f"key-{number}")
            received = {(await consumer.receive(SECONDS)).payload for _ in range(8)}
            assert received == {b"%d" % number for number in range(8)}
        finally:
            await manager.__aexit__(None, None, None)


async def anext_of(manager: Any) -> tuple[Any, Any]:
    return manager, await manager.__aenter__()


@pytest.mark.parametrize("kind", OPENERS)
async def test_a_sealed_segment_pruned_between_the_layout_and_the_attachment(broker: InProcessBroker, kind: str) -> None:
    controller = await leader(broker)
    await controller.split_segment(0)

    async def prune() -> None:
        assert await controller.prune() == [0]

    await opened(broker, kind, "-0", change=prune)


@pytest.mark.parametrize("kind", ["queue", "checkpoint"])
async def test_the_only_segment_is_split_and_pruned_between_the_layout_and_the_attachment(
    broker: InProcessBroker, kind: str
) -> None:
    controller = await leader(broker)

    async def split_and_prune() -> None:
        await controller.split_segment(0)
        assert await controller.prune() == [0]

    await opened(broker, kind, "-0", change=split_and_prune)
