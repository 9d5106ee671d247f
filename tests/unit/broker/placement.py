"""Three whole brokers on a clock moved by hand, and who of them leads a topic and who owns its segments, as a test wants it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from braid.errors import Advice, BraidError
from braid.model.bundles import Bundle, hash_of
from braid.model.layout import SegmentLayout
from braid.model.names import NamespaceName, TopicName
from braid.model.segments import physical_name
from braid.testing.broker import InProcessBroker
from braid.testing.clock import ManualClock
from braid.testing.raw_client import RawClient
from braid.web.node import BrokerNode
from braid.wire import requests
from braid.wire.types import CommandType

TOPIC = TopicName.parse("topic://public/default/orders")
NAMESPACE = NamespaceName.parse("public/default")
STEP_SECONDS = 0.01
"""How far `until` moves the clock at a time: little, because what brokers ask of each other over HTTP takes turns of the loop,
and more of them on a busy machine."""


class Placement:
    """The brokers, reached over their sockets: segments over HTTP, leaders over the binary protocol. Time moves only when a
    test says so, so that a duration is exact on any machine."""

    def __init__(self, brokers: InProcessBroker) -> None:
        self.brokers = brokers
        self.clients: list[RawClient] = []

    @property
    def nodes(self) -> list[BrokerNode]:
        return [node for node in self.brokers.nodes if not node.is_down]

    @property
    def clock(self) -> ManualClock:
        assert isinstance(self.brokers.clock, ManualClock)
        return self.brokers.clock

    async def leader(self, topic: TopicName = TOPIC) -> BrokerNode:
        """The broker that leads, as the lock in the store says."""

        async def found() -> BrokerNode | None:
            broker_id = await self.nodes[0].service.scalable.leader_id(topic)
            return next((node for node in self.nodes if node.broker_id == broker_id), None)

        made: BrokerNode = await self.until(found)
        return made

    async def controller(self, topic: TopicName = TOPIC) -> Any:
        node = await self.leader(topic)
        return await node.service.scalable.lead(topic)

    async def owner(self, name: TopicName) -> BrokerNode:
        async def found() -> BrokerNode | None:
            broker = (await self.nodes[0].service.ownership.find(name)).broker
            return next((node for node in self.nodes if node.broker_id == broker.broker_id), None)

        made: BrokerNode = await self.until(found)
        return made

    async def owners(self, layout: SegmentLayout, *numbers: int) -> list[str]:
        """Broker ids of the owners of segments, of all active ones unless told."""
        wanted = numbers or tuple(layout.active_segments)
        return [(await self.owner(physical_name(TOPIC, layout.segment(number)))).broker_id for number in wanted]

    async def own(self, name: TopicName, to: BrokerNode) -> None:
        """Move the bundle of a segment to a broker."""
        await self._move(await self.bundle(name), to)

    async def bundle(self, name: TopicName) -> Bundle:
        """The bundle that a segment lies in."""
        return next(each for each in await self.nodes[0].service.ownership.bundles(NAMESPACE) if each.contains(hash_of(name)))

    async def own_all(self, to: BrokerNode) -> None:
        """Move every bundle of the namespace to a broker: all segments, those that come too."""
        for bundle in await self.nodes[0].service.ownership.bundles(NAMESPACE):
            await self._move(bundle, to)

    async def _move(self, bundle: Bundle, to: BrokerNode) -> None:
        async def moved() -> bool:
            held = await to.service.ownership.owner(NAMESPACE, bundle, fresh=True)
            if held is not None and held.broker_id == to.broker_id:
                return True
            holder = next((each for each in self.nodes if held is not None and each.broker_id == held.broker_id), to)
            await holder.service.ownership.unload(NAMESPACE, bundle, destination=to.broker_id)
            return False

        await self.until(moved)

    async def client(self, node: BrokerNode) -> RawClient:
        made = await RawClient.connect(node.service_url, answers_pings=True)
        self.clients.append(made)
        return made

    async def until(self, condition: Callable[[], Awaitable[Any]], *, moves: bool = True) -> Any:
        """What a condition gives once it gives something; time moves meanwhile, unless it shall stand."""
        async with asyncio.timeout(30):
            while True:
                try:
                    if found := await condition():
                        return found
                except BraidError as error:
                    if error.advice is Advice.NEVER:
                        raise
                await (self.clock.advance(STEP_SECONDS) if moves else asyncio.sleep(0))

    async def by_clock(self, work: Awaitable[Any]) -> Any:
        """The result of something that needs time to pass."""
        task = asyncio.ensure_future(work)
        async with asyncio.timeout(30):
            while not task.done():
                await self.clock.advance(STEP_SECONDS)
        return await task


async def layout(client: RawClient, topic: TopicName = TOPIC, number: int = 1) -> Any:
    """Open a layout session and return its first update."""
    client.send(requests.scalable_topic_lookup(number, str(topic), False))
    return await client.expect(CommandType.SCALABLE_TOPIC_UPDATE)
