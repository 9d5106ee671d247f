"""The scalable side of a broker: its controllers, the watches it serves to clients, and the creation of topics.

Owns the composition of `braid.scalable` with this broker: what those parts may ask of it (who owns a segment, where a broker
is, how many partitions a regular topic has) and when they start and end. A scalable topic and a regular one of the same name
never exist together. Must not know commands or HTTP.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from braid.broker.catalog import TopicCatalog
from braid.broker.registry import BrokerInfo
from braid.errors import AlreadyExists, BraidError, TopicNotFound
from braid.model.names import NamespaceName, TopicName, check_new_topic
from braid.model.routing import Routing
from braid.scalable.api import SegmentOps
from braid.scalable.dag_watch import DagWatches
from braid.scalable.namespace_watch import NamespaceWatches
from braid.scalable.service import ScalableTopicService

if TYPE_CHECKING:
    from braid.broker.ownership import Ownership
    from braid.metadata.api import MetadataStore
    from braid.runtime.env import Runtime
    from braid.scalable.config import ScalableConfig

log = logging.getLogger(__name__)


class ScalableTopics(TopicCatalog):
    """See the module; `BrokerService` is one."""

    ownership: Ownership
    scalable: ScalableTopicService
    dag_watches: DagWatches
    namespace_watches: NamespaceWatches
    scalable_config: ScalableConfig
    service_url: str
    remote_segments: Callable[[BrokerInfo], SegmentOps] | None
    """How to reach segments of another broker; set by whoever starts this one with others."""

    def _compose(self, runtime: Runtime, store: MetadataStore, config: ScalableConfig, segments: SegmentOps) -> None:
        """Make the parts; `ownership` is there."""
        self.scalable_config = config
        self.remote_segments = None
        self.scalable = ScalableTopicService(
            runtime,
            store,
            config,
            segments,
            broker_id=lambda: self.ownership.broker_id,
            retention_minutes=self._retention_minutes,
            owns=self._owns,
            partitions=self.regular_partitions,
        )
        self.dag_watches = DagWatches(
            runtime,
            store,
            config,
            owner_url=self._owner_url,
            broker_url=self.broker_url,
            ensure_controller=self.scalable.controller,
            partitions=self.regular_partitions,
        )
        self.namespace_watches = NamespaceWatches(runtime, store, config)

    async def _start_scalable(self) -> None:
        if self.has_scalable:
            await self.scalable.start()

    async def _close_scalable(self) -> None:
        await self.dag_watches.close()
        await self.namespace_watches.close()
        await self.scalable.close()

    def _kill_scalable(self) -> None:
        self.dag_watches.kill()
        self.namespace_watches.kill()
        self.scalable.kill()

    # What the parts ask.

    async def _retention_minutes(self, namespace: NamespaceName) -> int:
        return (await self.namespaces.policies(namespace)).retention.retention_time_in_minutes

    def _owns(self, topic: TopicName) -> bool:
        return self.ownership.owns(topic)

    async def _owner_url(self, topic: TopicName) -> str | None:
        return (await self.ownership.find(topic)).broker.service_url

    async def broker_url(self, broker_id: str) -> str | None:
        """Where clients reach a broker; None if it is not registered."""
        if broker_id == self.ownership.broker_id:
            return self.service_url
        return next((each.service_url for each in await self.ownership.brokers() if each.broker_id == broker_id), None)

    async def _segment_incarnation(self, name: TopicName) -> str:
        """Of the topic a segment belongs to, which must know the segment (INV5)."""
        self.check_scalable()
        return (await self.records.listed(name)).record.incarnation

    async def _may_trim(self, name: TopicName) -> bool:
        """A segment that a pending operation names is kept whole (INV7)."""
        try:
            return not (await self.records.listed(name)).is_pending
        except TopicNotFound:
            return False

    # What clients and administrators ask.

    async def create_scalable_topic(
        self, topic: TopicName, segments: int, *, properties: dict[str, str] | None = None, routing: Routing | None = None
    ) -> None:
        """Create a scalable topic, from any broker. Raises AlreadyExists, also if a regular topic has the name,
        InvalidArgument, InvalidTopicName, TopicNotFound (no such namespace)."""
        self.check_scalable()
        check_new_topic(topic)
        await self._check_room(topic)
        await self.scalable.create_topic(topic, segments, properties=properties, routing=routing)
        try:
            await self._check_room(topic)  # who creates or deletes beside it looks after its own write: one sees the other
        except (TopicNotFound, AlreadyExists):
            try:
                await self.scalable.delete_topic(topic, force=True)
            except BraidError as error:
                log.warning("%s was created next to something else and could not be taken back: %s", topic, error)
            raise

    async def _check_room(self, topic: TopicName) -> None:
        await self.namespaces.check_takes_topics(topic.namespace)
        if await self.regular_partitions(topic) is not None:
            raise AlreadyExists(f"A regular topic has the name of {topic}; choose another, or migrate it.")

    async def create_on_first_use(self, name: TopicName) -> None:
        """Make a topic that a client names and that does not exist, if its namespace allows that: a scalable one with one
        segment, a regular one as the policies say. Raises TopicNotFound if it does not, and what creating raises."""
        policies = await self.namespaces.policies(name.namespace)
        if not policies.auto_topic_creation.allow_auto_topic_creation:
            raise TopicNotFound(f"The topic {name} does not exist, and its namespace creates none on first use.")
        try:
            if name.domain == "topic":
                await self.create_scalable_topic(name, 1)
            elif not await self.partition_count(name, allow_create=True):
                await self.create_topic(name)
        except AlreadyExists:
            log.debug("%s was created by somebody else meanwhile", name)
