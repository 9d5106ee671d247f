"""The scalable side of a broker: its controllers, the watches it serves to clients, and the creation of topics.

Owns the composition of `braid.scalable` with this broker: what those parts may ask of it (who owns a segment, where a broker
is, how many partitions a regular topic has) and when they start and end. Must not know commands or HTTP.

A scalable topic and a regular one of the same name are never both usable. Each creation writes its record first, looks for the
other one then, and takes itself back if that is there; a scalable topic is looked at by its leader before its first segment is
made, so that a crash of the creator changes nothing. A regular topic that was made and never written to (its creator may have
crashed before it looked) is looked at when it is loaded: it is not served, and it is deleted where the scalable topic is led,
under the leader's claim and while no operation is pending, because until then either of the two may be the one that stays.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from braid.broker.catalog import TopicCatalog, is_scalable
from braid.broker.registry import BrokerInfo
from braid.broker.topic_records import find_segment
from braid.errors import AlreadyExists, BraidError, LedgerFenced, NotReady, TopicNotFound
from braid.model.names import NamespaceName, TopicName, check_new_topic
from braid.model.routing import Routing
from braid.runtime.tasks import Tasks
from braid.scalable.api import Retention, SegmentOps
from braid.scalable.controller import ScalableTopicController
from braid.scalable.dag_watch import DagWatches
from braid.scalable.namespace_watch import NamespaceWatches
from braid.scalable.service import ScalableTopicService

if TYPE_CHECKING:
    from braid.broker.ownership import Ownership
    from braid.managedledger.log import ManagedLedger
    from braid.metadata.api import MetadataStore
    from braid.runtime.env import Runtime
    from braid.scalable.config import ScalableConfig
    from braid.scalable.records import ScalableTopicMetadata

log = logging.getLogger(__name__)


class ScalableTopics(TopicCatalog):
    """See the module; `BrokerService` is one."""

    ownership: Ownership
    scalable: ScalableTopicService
    dag_watches: DagWatches
    namespace_watches: NamespaceWatches
    scalable_config: ScalableConfig
    service_url: str
    farewells: Tasks
    """Of consumers that were closed while nobody led their topic."""
    remote_segments: Callable[[BrokerInfo], SegmentOps] | None
    """How to reach segments of another broker; set by whoever starts this one with others."""

    def _compose(self, runtime: Runtime, store: MetadataStore, config: ScalableConfig, segments: SegmentOps) -> None:
        """Make the parts; `ownership` is there."""
        self.scalable_config = config
        self.remote_segments = None
        self.farewells = Tasks("farewells")
        self.scalable = ScalableTopicService(
            runtime,
            store,
            config,
            segments,
            broker_id=lambda: self.ownership.broker_id,
            retention=self._retention,
            owns=self._owns,
            partitions=self.regular_partitions,
            log_of=self.regular_log,
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
        await self.farewells.close()
        await self.dag_watches.close()
        await self.namespace_watches.close()
        await self.scalable.close()

    def _kill_scalable(self) -> None:
        self.farewells.cancel()
        self.dag_watches.kill()
        self.namespace_watches.kill()
        self.scalable.kill()

    def scalable_gauges(self) -> Iterator[tuple[str, str, float]]:
        """Metrics of what this broker does for scalable topics: name, meaning and value."""
        led = [each for each in self.scalable.controllers() if isinstance(each, ScalableTopicController) and each.is_leading]
        segments = sum(len(each.layout.active_segments) for each in led)
        yield "braid_scalable_topics_led", "Scalable topics whose controller leads here", len(led)
        yield "braid_scalable_segments_active", "Active segments of these topics, wherever they are", segments
        yield (
            "braid_scalable_consumers",
            "Registered stream and checkpoint consumers of these",
            sum(x.consumer_count for x in led),
        )
        yield "braid_layout_sessions", "Layout sessions of clients", self.dag_watches.session_count
        yield "braid_namespace_sessions", "Clients' watches of namespaces", self.namespace_watches.session_count

    # What the parts ask.

    async def _retention(self, namespace: NamespaceName) -> Retention:
        limits = (await self.namespaces.policies(namespace)).limits
        return Retention(limits.minutes, limits.unread_minutes)

    def _owns(self, topic: TopicName) -> bool:
        return self.ownership.owns(topic)

    async def _owner_url(self, topic: TopicName) -> str | None:
        return (await self.ownership.find(topic)).broker.service_url

    async def broker_url(self, broker_id: str) -> str | None:
        """Where clients reach a broker; None if it is not registered."""
        if broker_id == self.ownership.broker_id:
            return self.service_url
        return next((each.service_url for each in await self.ownership.brokers() if each.broker_id == broker_id), None)

    async def _record_of(self, segment: TopicName) -> ScalableTopicMetadata:
        """Of the topic a segment belongs to, which must know the segment (INV5)."""
        self.check_scalable()
        return (await self.records.listed(segment)).record

    async def check_unused(self, name: TopicName, opened: ManagedLedger) -> None:
        """A regular topic without any data is loaded: make up for what its creator may not have done. If a scalable topic has
        the name and does not keep a segment in this one, raises NotAllowed, or NotReady as long as the scalable one may still
        be taken back or changed. The log is gone then if it was never used and this broker leads the scalable topic."""
        record = await self.records.read(name)
        if record is None or _lists(record, name):
            return
        if record.pending_operation is not None:
            raise NotReady(f"The scalable topic {name.scalable} is just being made, changed or deleted; try {name} again.")
        was_used = bool(opened.cursors) or opened.ledgers.highest >= 0
        claimed = None if was_used else await self._claimed(name)
        if claimed is not None and claimed.pending_operation is None and not _lists(claimed, name):
            log.warning("%s was never written to and has the name of a scalable topic; it is deleted", name)
            with suppress(TopicNotFound, LedgerFenced):  # changed hands or deleted meanwhile
                await self.logs.delete(name.managed_ledger_name, owner_token=opened.owner_token)
        raise is_scalable(name)

    async def _claimed(self, name: TopicName) -> ScalableTopicMetadata | None:
        """The record of the scalable topic with this name, claimed at this moment; None if this broker does not lead it."""
        for each in self.scalable.controllers():
            if isinstance(each, ScalableTopicController) and each.topic == name.scalable:
                try:
                    return await each.claim()
                except BraidError as error:
                    log.info("whether %s is a leftover cannot be told now: %s", name, error)
        return None

    # What clients and administrators ask.

    async def create_scalable_topic(
        self, topic: TopicName, segments: int, *, properties: dict[str, str] | None = None, routing: Routing | None = None
    ) -> None:
        """Create a scalable topic, from any broker. Raises AlreadyExists, also if a regular topic has the name,
        InvalidArgument, InvalidTopicName, TopicNotFound (no such namespace)."""
        self.check_scalable()
        check_new_topic(topic)
        await self._check_room(topic)
        try:
            await self.scalable.create_topic(topic, segments, properties=properties, routing=routing)
        except TopicNotFound:
            await self._check_room(topic)  # taken back by its leader, because of a regular topic?
            raise
        try:
            # Who deletes the namespace looks for topics after its own write: one of both sees the other.
            await self.namespaces.check_takes_topics(topic.namespace)
        except TopicNotFound:
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


def _lists(record: ScalableTopicMetadata, name: TopicName) -> bool:
    """Whether the topic keeps one of its segments there, or is about to."""
    try:
        find_segment(record, name)
    except TopicNotFound:
        return False
    return True
