"""Three brokers in a test, and what it does to their one scalable topic: changes of its layout; what is stored at the end."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from typing import Any

from braid.errors import BraidError
from braid.model.names import TopicName
from braid.model.positions import EARLIEST
from braid.model.segments import physical_name
from braid.scalable.config import ScalableConfig
from braid.testing.broker import InProcessBroker
from braid.web.config import StandaloneConfig, StorageConfig
from braid.wire.batch import decode_batch
from braid.wire.compression import decompress
from braid.wire.entries import entry_metadata, payload_offset

TOPIC = TopicName.parse("topic://public/default/orders")
CONFIG = StandaloneConfig(
    storage=StorageConfig(session_timeout_seconds=2.0), scalable_topics=ScalableConfig(reconcile_seconds=0.5)
)


class Cluster:
    """Brokers, and what a test does to their topic."""

    def __init__(self, broker: InProcessBroker) -> None:
        self.broker = broker

    @property
    def services(self) -> list[Any]:
        return [node.service for node in self.broker.nodes if not node.is_down]

    async def create(self, segments: int) -> None:
        await self.services[0].create_scalable_topic(TOPIC, segments)
        controller = await self.controller()
        await controller.create_subscription("all", "STREAM", "earliest")  # so that nothing is pruned

    async def controller(self) -> Any:
        """The leading controller, wherever it is."""
        while True:
            for service in self.services:
                try:
                    return await service.scalable.lead(TOPIC)
                except BraidError:
                    continue
            await asyncio.sleep(0.01)

    async def split(self, segment_id: int) -> None:
        await (await self.controller()).split_segment(segment_id)

    async def merge(self, first: int, second: int) -> None:
        await (await self.controller()).merge_segments(first, second)

    async def change(self, rng: random.Random) -> None:
        """A split or a merge of something."""
        controller = await self.controller()
        active = list(controller.layout.active_in_order)
        if len(active) > 1 and (len(active) > 4 or rng.random() < 0.4):
            at = rng.randrange(len(active) - 1)
            await controller.merge_segments(active[at].segment_id, active[at + 1].segment_id)
        else:
            await controller.split_segment(rng.choice(active).segment_id)

    async def change_often(self, times: int, *, seed: int) -> None:
        """Change after change, with little time in between."""
        rng = random.Random(seed)
        for _each in range(times):
            await self.change(rng)
            await asyncio.sleep(0.02)

    async def kill_during_a_split(self) -> None:
        """Split the first segment, then one of its halves while the owner of that is killed."""
        await asyncio.sleep(0.05)
        await self.split(0)
        await self.broker.kill(await self.owner(1))
        while await self.is_active(1):  # a refused split may be finished by the next leader
            try:
                await self.split(1)
            except BraidError:
                await asyncio.sleep(0.05)
        await asyncio.sleep(0.1)

    async def is_active(self, segment_id: int) -> bool:
        return segment_id in (await self.services[0].scalable.metadata(TOPIC)).layout.active_segments

    async def check_sealed(self) -> None:
        """Assert that no parent of a segment that clients are told to write to takes messages itself."""
        layout = (await self.services[0].scalable.metadata(TOPIC)).layout
        for segment in layout.active_segments.values():
            for parent in segment.parent_ids:
                name = physical_name(TOPIC, layout.segment(parent))
                topic = await (await self._service_of(name)).topic(name, create=False)
                assert topic.log.is_terminated, f"{name} and segment {segment.segment_id} take messages at the same time"

    async def owner(self, segment_id: int) -> int:
        """The number of the broker that owns a segment."""
        segment = (await self.services[0].scalable.metadata(TOPIC)).layout.segment(segment_id)
        found = await self.services[0].ownership.find(physical_name(TOPIC, segment))
        return next(
            number
            for number, node in enumerate(self.broker.nodes)
            if node.service.ownership.broker_id == found.broker.broker_id
        )

    async def _service_of(self, name: TopicName) -> Any:
        while True:  # until a killed broker's session has run out
            try:
                owner = await self.services[0].ownership.find(name)
            except BraidError:
                owner = None
            for service in self.services:
                if owner is not None and service.ownership.broker_id == owner.broker.broker_id:
                    return service
            await asyncio.sleep(0.05)

    async def stored(self) -> dict[str | None, list[bytes]]:
        """The messages of each key, parents before children."""
        found: dict[str | None, list[bytes]] = defaultdict(list)
        layout = (await self.services[0].scalable.metadata(TOPIC)).layout
        for _number, segment in sorted(layout.all_segments.items()):
            name = physical_name(TOPIC, segment)
            log = (await (await self._service_of(name)).topic(name, create=False)).log
            position = log.position_after(EARLIEST)
            while entries := await log.read(position, 1000, 8 << 20):
                for entry in entries:
                    metadata = entry_metadata(entry.body)
                    payload = entry.body[payload_offset(entry.body) :]
                    payload = decompress(metadata.compression, payload, metadata.uncompressed_size, 128 << 20)
                    for single, body in decode_batch(payload, metadata.num_messages_in_batch):
                        found[single.partition_key if single.HasField("partition_key") else None].append(body)
                position = log.position_after(type(position)(entries[-1].ledger_id, entries[-1].entry_id))
        return found
