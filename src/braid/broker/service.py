"""`BrokerService`: the topics this broker serves, loading and closing them, and the rules for creating them.

Owns the registry of loaded topics. A topic is loaded once however many clients ask, by a task of the service (a client that
goes away does not interrupt it). Must not know frames or HTTP.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from braid.broker.budget import PublishBudget
from braid.broker.config import BrokerConfig
from braid.broker.namespaces import Namespaces
from braid.broker.topic import Topic
from braid.errors import (
    AlreadyExists,
    BraidError,
    Closed,
    Conflict,
    InvalidTopicName,
    MetadataFailure,
    NotAllowed,
    NotReady,
    TopicNotFound,
)
from braid.managedledger.factory import ManagedLedgerFactory
from braid.managedledger.schemas import SchemaStorage
from braid.metadata.api import MetadataStore
from braid.model.names import Domain, NamespaceName, TopicName
from braid.runtime.env import Runtime
from braid.runtime.tasks import Tasks

log = logging.getLogger(__name__)


class BrokerService:
    """Everything a connection or an admin request can reach."""

    def __init__(
        self,
        runtime: Runtime,
        config: BrokerConfig,
        metadata: MetadataStore,
        logs: ManagedLedgerFactory,
        schemas: SchemaStorage,
    ) -> None:
        self.runtime = runtime
        self.config = config
        self.metadata = metadata
        self.logs = logs
        self.schemas = schemas
        self.namespaces = Namespaces(metadata, config)
        self.budget = PublishBudget(config.max_pending_publish_bytes)
        self.topics: dict[str, Topic] = {}
        self._loading: dict[str, asyncio.Future[Topic]] = {}
        self._closing: dict[str, asyncio.Future[None]] = {}
        self._tasks = Tasks("broker")
        self._is_closed = False
        self._producer_names = 0
        self._instance = runtime.token(32)
        self.started_ms = runtime.clock.now_ms()
        self.service_url = ""
        """What lookups answer; set when the listener is open."""

    async def start(self) -> None:
        await self.namespaces.bootstrap()
        self._tasks.spawn(self._trim_loop(), "trim")

    async def close(self) -> None:
        """Close every topic, then stop."""
        self._is_closed = True
        for loading in list(self._loading.values()):
            await asyncio.wait([loading])
        for topic in list(self.topics.values()):
            topic.disconnect_all()
        for topic in list(self.topics.values()):
            await self.unload(topic)
        await self._tasks.close()

    def new_producer_name(self) -> str:
        """A name nobody else was given."""
        self._producer_names += 1
        return f"{self.config.cluster_name}-{self._instance}-{self._producer_names}"

    # Loading.

    async def topic(self, name: TopicName, *, create: bool) -> Topic:
        """The loaded topic; loads it, and creates it if `create` and the namespace allow that."""
        key = str(name)
        while True:
            if self._is_closed:
                raise NotReady("The broker is shutting down; connect to another one or try again.")
            topic = self.topics.get(key)
            if topic is not None:
                return topic
            if (closing := self._closing.get(key)) is not None:
                await asyncio.shield(closing)
                continue
            loading = self._loading.get(key)
            if loading is None:
                loading = self._loading[key] = asyncio.get_running_loop().create_future()
                loading.add_done_callback(lambda done: done.cancelled() or done.exception())
                self._tasks.spawn(self._load(name, loading, create), f"load {key}")
            try:
                return await asyncio.shield(loading)
            except TopicNotFound:
                # Whoever started the load may not have been allowed to create; this caller may be.
                if not create or key in self.topics or self._loading.get(key) is not None:
                    if create and (key in self.topics or key in self._loading):
                        continue
                    raise
                if await self._may_create(name):
                    continue
                raise

    async def _load(self, name: TopicName, loading: asyncio.Future[Topic], create: bool) -> None:
        key = str(name)
        try:
            topic = await self._open(name, create)
        except BraidError as error:
            del self._loading[key]
            loading.set_exception(error)
        except BaseException as error:
            # A bug or the end of the broker; those who wait need an answer either way.
            del self._loading[key]
            loading.set_exception(NotReady(f"The topic {key} could not be loaded ({type(error).__name__}); try again."))
            raise
        else:
            del self._loading[key]
            self.topics[key] = topic
            loading.set_result(topic)

    async def _open(self, name: TopicName, create: bool) -> Topic:
        policies = await self.namespaces.policies(name.namespace)
        is_known = await self.logs.exists(name.managed_ledger_name)
        if not is_known and not (create and await self._may_create(name)):
            raise TopicNotFound(f"The topic {name} does not exist; create it, or allow auto-creation in its namespace.")
        topic = Topic(self, name)
        retention = policies.retention
        managed = await self.logs.open(
            name.managed_ledger_name,
            topic,
            create=True,
            retention_minutes=retention.retention_time_in_minutes,
            retention_mb=retention.retention_size_in_mb,
        )
        try:
            await topic.opened(managed, deduplicate=policies.deduplication)
        except BaseException:
            await managed.close()
            raise
        return topic

    async def _may_create(self, name: TopicName) -> bool:
        """Whether a client's first use may create this topic (protocol sheet 6.5)."""
        base = name.base
        if name.partition_index >= 0:
            record = await self.namespaces.partitions(base)
            if record is not None:
                return name.partition_index < record.partitions
        elif await self.namespaces.partitions(base) is not None:
            raise NotAllowed(f"The topic {name} is partitioned; use its partitions.")
        if not name.is_trimmed:
            raise InvalidTopicName(f"The topic name {name} begins or ends with white space.")
        policies = await self.namespaces.policies(name.namespace)
        return policies.auto_topic_creation.allow_auto_topic_creation

    def topic_lost(self, topic: Topic) -> None:
        """Another owner took the log, or it failed for good: drop the topic; clients look it up again."""
        if self.topics.get(str(topic.name)) is topic and not topic.is_closing:
            topic.disconnect_all()
            self._tasks.spawn(self.unload(topic), f"drop {topic.name}")

    async def unload(self, topic: Topic) -> None:
        """Close a topic and forget it; the next use loads it again."""
        key = str(topic.name)
        if self.topics.get(key) is not topic:
            if (closing := self._closing.get(key)) is not None:
                await asyncio.shield(closing)
            return
        del self.topics[key]
        closing = self._closing[key] = asyncio.get_running_loop().create_future()
        try:
            await topic.close()
        except (BraidError, Closed) as error:
            log.warning("closing %s: %s", key, error)
        finally:
            del self._closing[key]
            closing.set_result(None)

    # What clients and administrators ask.

    async def partition_count(self, name: TopicName, *, allow_create: bool) -> int:
        """Partitions of a topic, 0 for a plain one; creates the record of an auto-partitioned topic (6.2)."""
        check_served(name)
        policies = await self.namespaces.policies(name.namespace)
        record = await self.namespaces.partitions(name.base) if name.partition_index < 0 else None
        if record is not None:
            return record.partitions
        if await self.logs.exists(name.managed_ledger_name):
            return 0
        if name.partition_index >= 0:
            parent = await self.namespaces.partitions(name.base)
            if parent is not None and name.partition_index < parent.partitions:
                return 0
        auto = policies.auto_topic_creation
        if not allow_create or not auto.allow_auto_topic_creation:
            raise TopicNotFound(f"The topic {name} does not exist and is not created on first use.")
        is_special = name.local_name.endswith(("-DLQ", "-RETRY"))
        if auto.topic_type != "partitioned" or name.partition_index >= 0 or is_special:
            return 0
        try:
            await self.create_partitioned(name, auto.default_num_partitions)
        except AlreadyExists:
            return await self.partition_count(name, allow_create=False)
        return auto.default_num_partitions

    async def create_partitioned(self, name: TopicName, partitions: int, properties: dict[str, str] | None = None) -> None:
        """Create a partitioned topic: its record first, then the partitions' logs."""
        self.check_creatable(name)
        await self.namespaces.policies(name.namespace)
        if await self.logs.exists(name.managed_ledger_name):
            raise AlreadyExists(f"A topic {name} exists already and is not partitioned.")
        await self.namespaces.create_partitioned(name, partitions, properties)
        await self._create_partitions(name, range(partitions))

    async def grow_partitioned(self, name: TopicName, partitions: int) -> None:
        await self.namespaces.grow_partitions(name, partitions)
        await self._create_partitions(name, range(partitions))

    async def _create_partitions(self, name: TopicName, numbers: Iterable[int]) -> None:
        for number in numbers:
            await self.topic(name.partition(number), create=True)

    async def create_topic(self, name: TopicName, properties: dict[str, str] | None = None) -> None:
        """Create a plain topic."""
        self.check_creatable(name)
        await self.namespaces.policies(name.namespace)
        if await self.logs.exists(name.managed_ledger_name) or await self.namespaces.partitions(name) is not None:
            raise AlreadyExists(f"The topic {name} already exists.")
        managed = await self.logs.open(name.managed_ledger_name, Topic(self, name), create=True, properties=properties or {})
        await managed.close()

    def check_creatable(self, name: TopicName) -> None:
        check_served(name)
        if not name.is_trimmed:
            raise InvalidTopicName(f"The topic name {name} begins or ends with white space.")

    async def delete_topic(self, name: TopicName, *, force: bool) -> None:
        """Delete a plain topic or one partition, with its data and subscriptions."""
        topic = self.topics.get(str(name))
        if topic is None and not await self.logs.exists(name.managed_ledger_name):
            raise TopicNotFound(f"The topic {name} does not exist.")
        if topic is not None:
            attached = len(topic.producers) + sum(len(sub.consumers) for sub in topic.subscriptions.values())
            if attached and not force:
                raise StillInUse(f"The topic {name} has {attached} producers and consumers; close them or use force.")
            await self.unload(topic)
        await self.logs.delete(name.managed_ledger_name)

    async def delete_partitioned(self, name: TopicName, *, force: bool) -> None:
        record = await self.namespaces.partitions(name)
        if record is None:
            raise TopicNotFound(f"The partitioned topic {name} does not exist.")
        if not force:
            for number in range(record.partitions):
                topic = self.topics.get(str(name.partition(number)))
                if topic is not None and (topic.producers or any(s.consumers for s in topic.subscriptions.values())):
                    raise StillInUse(f"The topic {topic.name} has producers or consumers; close them or use force.")
        for number in range(record.partitions):
            try:
                await self.delete_topic(name.partition(number), force=True)
            except TopicNotFound:
                continue
        await self.namespaces.delete_partitioned(name)

    async def list_topics(self, namespace: NamespaceName) -> list[str]:
        """Names of the persistent topics of a namespace, partitions one by one."""
        await self.namespaces.policies(namespace)
        parent = f"{namespace}/persistent"
        return [str(TopicName.from_managed_ledger_name(f"{parent}/{local}")) async for local in self.logs.names(parent)]

    async def delete_namespace(self, namespace: NamespaceName) -> None:
        if await self.list_topics(namespace) or await self.namespaces.partitioned_topics(namespace):
            raise Conflict(f"The namespace {namespace} still has topics; delete them first.")
        await self.namespaces.delete_namespace(namespace)

    async def policies_changed(self, namespace: NamespaceName) -> None:
        """Apply a namespace's policies to its loaded topics, and to those being loaded, which may have read the old ones."""
        if loading := [load for key, load in self._loading.items() if TopicName.parse(key).namespace == namespace]:
            await asyncio.wait(loading)
        policies = await self.namespaces.policies(namespace)
        topics = [each for each in self.topics.values() if each.name.namespace == namespace and not each.is_closing]
        for topic in topics:  # first for all: the next step may fail for one
            topic.log.retention_minutes = policies.retention.retention_time_in_minutes
            topic.log.retention_mb = policies.retention.retention_size_in_mb
        for topic in topics:
            if not topic.is_closing:
                await topic.set_deduplication(policies.deduplication)

    async def _trim_loop(self) -> None:
        while True:
            await self.runtime.clock.sleep(self.config.retention_check_seconds)
            for topic in list(self.topics.values()):
                if topic.is_closing:
                    continue
                try:
                    topic.log.roll_if_needed()
                    await topic.log.trim()
                except BraidError as error:
                    log.warning("trimming %s failed: %s", topic.name, error)


def check_served(name: TopicName) -> None:
    """Only `persistent://` topics are served so far; the others get a clear no."""
    if name.domain is Domain.NON_PERSISTENT:
        raise NotAllowed(f"This broker has no non-persistent topics yet; {name} cannot be used.")
    if name.domain is not Domain.PERSISTENT:
        raise NotAllowed(f"This broker has no scalable topics yet; {name} cannot be used.")


class StillInUse(MetadataFailure):
    """Clients are attached to what is to be deleted."""

    status = 412
