"""Scalable topics on three whole brokers, which reach each other's segments over HTTP and each other's leaders over sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest

from braid.errors import BraidError, TopicTerminated
from braid.metadata.claims import StaleLeader
from braid.model.layout import SegmentLayout
from braid.model.names import TopicName
from braid.model.segments import physical_name
from braid.scalable.config import ScalableConfig
from braid.testing.broker import InProcessBroker
from braid.testing.raw_client import RawClient
from braid.web.config import StandaloneConfig, StorageConfig
from braid.wire import requests
from braid.wire.types import CommandType

TOPIC = TopicName.parse("topic://public/default/orders")
CONFIG = StandaloneConfig(
    storage=StorageConfig(session_timeout_seconds=1.0),
    scalable_topics=ScalableConfig(reconcile_seconds=0.2, adopt_seconds=0.5),
)


@pytest.fixture
async def brokers() -> AsyncIterator[InProcessBroker]:
    async with InProcessBroker(brokers=3, config=CONFIG) as broker:
        await broker.nodes[1].service.create_scalable_topic(TOPIC, 4)
        yield broker


async def eventually(condition: Callable[[], Awaitable[Any]]) -> Any:
    """What a condition gives once it gives something; sessions of dead brokers end by the machine's clock."""
    async with asyncio.timeout(15):
        while not (found := await condition()):  # noqa: ASYNC110 - any condition
            await asyncio.sleep(0.02)
        return found


async def controller(broker: InProcessBroker) -> Any:
    """The one that leads, wherever it is."""

    async def leading() -> Any:
        for node in broker.nodes:
            if not node.is_down and await node.service.scalable.leader_id(TOPIC) == node.broker_id:
                return await node.service.scalable.lead(TOPIC)
        return None

    return await eventually(leading)


async def _connected(controller: Any, count: int) -> bool:
    return bool((await controller.stats())["subscriptions"]["sub"]["connectedConsumers"] == count)


async def _is_split(controller: Any) -> bool:
    return bool(controller.layout.epoch == 1)


async def owner_url(broker: InProcessBroker, name: TopicName) -> str:
    return (await next(node for node in broker.nodes if not node.is_down).service.ownership.find(name)).broker.service_url


def names(layout: SegmentLayout) -> dict[int, TopicName]:
    return {number: physical_name(TOPIC, each) for number, each in layout.all_segments.items()}


async def register(client: RawClient, name: str, number: int = 9) -> set[int]:
    request_id = client.next_request()
    client.send(requests.scalable_topic_subscribe(request_id, str(TOPIC), "sub", name, number))
    reply = await client.answer(request_id)
    assert not reply.HasField("error"), reply.message
    return {each.segment_id for each in reply.assignment.segments}


@pytest.mark.req("R468-46", "R468-61")
async def test_splits_and_merges_over_brokers_hand_on_what_is_stored(brokers: InProcessBroker) -> None:
    leading = await controller(brokers)
    await leading.create_subscription("s", "STREAM", "earliest")
    owners = {await owner_url(brokers, name) for name in names(leading.layout).values()}
    assert len(owners) > 1
    first, second = leading.layout.active_in_order[:2]
    lanes = []
    for each in (first, second):
        name = physical_name(TOPIC, each)
        client = await RawClient.connect(await owner_url(brokers, name))
        lane = f"p-seg-{each.segment_id}"
        await client.producer(str(name), name=lane, metadata=[{"key": "__braid.dedup", "value": "true"}])
        for number in range(3):
            await client.store(b"x", number, producer_name=lane)
        lanes.append((client, name, lane))
    merged = await leading.merge_segments(first.segment_id, second.segment_id)
    child = names(merged)[max(merged.all_segments)]
    for client, name, _lane in lanes:
        await client.expect(CommandType.CLOSE_PRODUCER)
        with pytest.raises(TopicTerminated):
            await client.producer(str(name), 2)
        client.close()
    client = await RawClient.connect(await owner_url(brokers, child))
    for number, (_client, _name, lane) in enumerate(lanes):
        reply = await client.producer(str(child), number, name=lane, metadata=[{"key": "__braid.dedup", "value": "true"}])
        assert reply.last_sequence_id == 2
        assert (await client.store(b"again", 2, number)).entry_id == -1
        assert (await client.store(b"new", 3, number)).entry_id >= 0
    for node in brokers.nodes:
        assert (await node.service.segments.backlog(child, "s")).messages == 2
        with pytest.raises(StaleLeader):
            await node.service.segments.terminate(child, epoch=0, incarnation=leading.incarnation)
        with pytest.raises(StaleLeader):
            await node.service.segments.delete(child, epoch=1 << 60, incarnation="another")
    client.close()


@pytest.mark.req("R468-12", "R468-36")
async def test_the_survivors_lead_and_their_clients_notice_nothing(brokers: InProcessBroker) -> None:
    leading = await controller(brokers)
    at = next(number for number, node in enumerate(brokers.nodes) if leading in node.service.scalable.controllers())
    others = [node for number, node in enumerate(brokers.nodes) if number != at]
    clients = [await RawClient.connect(node.service_url, answers_pings=True) for node in others]
    given = [await register(client, f"c{number}") for number, client in enumerate(clients)]
    assert given[0] == {0, 1, 2, 3}
    for client in clients:
        client.send(requests.scalable_topic_lookup(1, str(TOPIC), False))
    await brokers.kill(at)
    successor = await controller(brokers)
    await eventually(lambda: _connected(successor, 2))
    with contextlib.suppress(BraidError):  # the segments of the dead broker may have no owner yet; it is finished all the same
        await successor.split_segment(0)
    await eventually(lambda: _is_split(successor))
    for client in clients:
        while (await client.expect(CommandType.SCALABLE_TOPIC_UPDATE)).dag.epoch < 1:
            pass
        assert CommandType.CLOSE_CONSUMER not in client.kinds()
        assert not client.is_closed
    record = await others[0].service.metadata.get("/topics/public/default/orders/controller", fresh=True)
    assert record is not None
    assert msgspec.json.decode(record.value) in {node.broker_id for node in others}
    for client in clients:
        client.close()
