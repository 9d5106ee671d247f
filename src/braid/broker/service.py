"""`BrokerService`: the topics this broker serves, loading, closing and deleting them.

Owns the registry of loaded topics; which topics exist is the catalog's part (`catalog.py`). A topic is loaded once however many
clients ask, by a task of the service (a client that goes away does not interrupt it), and only while this broker owns its
bundle (`ownership.py`), which is looked at before its log is opened, read from the store once the log is claimed, and looked at
again before it is served. Must not know frames or HTTP.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice

from braid import __version__
from braid.broker.budget import PublishBudget, ReadBudget
from braid.broker.config import BrokerConfig, RetentionConfig
from braid.broker.log_owners import LogOwners
from braid.broker.namespaces import DEFAULT_RETENTION, Namespaces
from braid.broker.ownership import BundleUnloading, OwnedElsewhere, Ownership
from braid.broker.policy_watch import PolicyWatch
from braid.broker.rates import MAX_SAMPLED_TOPICS, SAMPLE_SECONDS, Rates
from braid.broker.registry import BrokerInfo
from braid.broker.retention import TopicRetention, is_part
from braid.broker.scalable_topics import ScalableTopics
from braid.broker.segments import LocalSegments, RoutedSegments
from braid.broker.topic import Topic
from braid.broker.topic_records import INCARNATION, TopicRecords
from braid.broker.transactions import Transactions
from braid.errors import (
    BraidError,
    Conflict,
    LedgerFenced,
    LedgerLost,
    MetadataFailure,
    NotReady,
    TopicNotFound,
)
from braid.managedledger.factory import ManagedLedgerFactory
from braid.managedledger.records import log_key
from braid.managedledger.schemas import SchemaStorage
from braid.metadata.api import MetadataStore
from braid.model.bundles import Bundle, hash_of
from braid.model.names import Domain, NamespaceName, TopicName
from braid.model.positions import EARLIEST
from braid.runtime.env import Runtime
from braid.runtime.tasks import Tasks
from braid.scalable.config import ScalableConfig
from braid.txn.config import TransactionConfig

log = logging.getLogger(__name__)
DEFAULT_SCALABLE = ScalableConfig()
DEFAULT_TRANSACTIONS = TransactionConfig()
SAMPLED_AT_ONCE = 50
"""Topics that are looked at without a pause, for their counters or for what can be trimmed."""
MAX_LOST_TOPICS = 1000
"""Topics with lost ledgers that are remembered for administrators."""
CLOSING_AT_ONCE = 64
"""Topics that are closed at the same time: their last writes share commits."""


class BrokerService(ScalableTopics):
    """Everything a connection or an admin request can reach."""

    def __init__(
        self,
        runtime: Runtime,
        config: BrokerConfig,
        metadata: MetadataStore,
        logs: ManagedLedgerFactory,
        schemas: SchemaStorage,
        *,
        scalable: ScalableConfig = DEFAULT_SCALABLE,
        transactions: TransactionConfig = DEFAULT_TRANSACTIONS,
        retention: RetentionConfig = DEFAULT_RETENTION,
    ) -> None:
        super().__init__(Namespaces(metadata, config, retention), logs, TopicRecords(metadata), has_scalable=scalable.enabled)
        self.runtime = runtime
        self.config = config
        self.metadata = metadata
        self.schemas = schemas
        self.rates = Rates(runtime.clock)
        """Of the counters of loaded topics; whoever shows rates takes them from here."""
        self.ownership = Ownership(runtime, config, metadata, self.namespaces, self)
        self.local_segments = LocalSegments(self)
        """What this broker does to the segments it owns."""
        self.segments = RoutedSegments(self, self.local_segments)
        self._compose(runtime, metadata, scalable, self.segments)
        self.transactions = Transactions(self, runtime, metadata, transactions)
        self.budget = PublishBudget(config.max_pending_publish_bytes)
        self.read_budget = ReadBudget(config.max_fetch_bytes)
        self.topics: dict[str, Topic] = {}
        self._loading: dict[str, asyncio.Future[Topic]] = {}
        self._closing: dict[str, asyncio.Future[None]] = {}
        self._policy_watch = PolicyWatch(self)
        self.retention = TopicRetention(
            runtime.clock, self.topics, self.namespaces, self.records, seconds=config.retention_check_seconds
        )
        self._log_owners = LogOwners(runtime.clock, self.topics, self.topic_lost, seconds=config.reconcile_seconds)
        self._tasks = Tasks("broker")
        self._is_closed = False
        self._producer_names = 0
        self._instance = runtime.token(32)
        self.started_ms = runtime.clock.now_ms()
        self.lookups = 0
        """Answered with an address, over either protocol."""
        self.lookup_redirects = 0
        """Of these: sent to another broker."""
        self.lost: dict[str, str] = {}
        """Topics that could not be loaded because of lost ledgers, and what the error said."""
        self.service_url = ""
        """What lookups answer; set when the listener is open."""

    async def start(self) -> None:
        await self.namespaces.bootstrap()
        self._tasks.spawn(self.retention.run(), "trim")
        self._tasks.spawn(self._rates_loop(), "rates")
        self._tasks.spawn(self._log_owners.run(), "owners")
        self._policy_watch.start(self._tasks)

    async def announce(self, broker_id: str, http_url: str = "") -> None:
        """The listeners are open: join the other brokers. Until then lookups are asked to come again."""
        me = BrokerInfo(
            broker_id=broker_id,
            service_url=self.service_url,
            http_url=http_url,
            started_ms=self.started_ms,
            version=__version__,
            incarnation=self.ownership.incarnation,
        )
        await self.ownership.start(me)
        await self._start_scalable()
        await self.transactions.start()

    async def close(self) -> None:
        """Close every topic, then stop. Other brokers take over when the topics are closed."""
        self._is_closed = True
        await self.ownership.leave()
        await self.transactions.leave()
        await self._close_scalable()
        for loading in list(self._loading.values()):
            await asyncio.wait([loading])
        await self._close_topics(list(self.topics.values()))
        await self.transactions.close()
        await self._tasks.close()
        await self.ownership.close()

    async def kill(self) -> None:
        """End at once, as a crash would: nothing more is written, nobody is told anything."""
        self._is_closed = True
        self._kill_scalable()
        self.transactions.kill()
        self.ownership.kill()
        self._tasks.cancel()
        for topic in list(self.topics.values()):
            topic.let_go()
            topic.tasks.cancel()
            topic.log.lost(_no_longer_ours(topic.name))
            await topic.log.close()

    def new_producer_name(self) -> str:
        """A name nobody else was given."""
        self._producer_names += 1
        return f"{self.config.cluster_name}-{self._instance}-{self._producer_names}"

    # Loading.

    async def topic(self, name: TopicName, *, create: bool) -> Topic:
        """The loaded topic; loads it, and creates it if `create` and the namespace allow that. Takes the topic's bundle if that
        is nobody's and falls to this broker. Raises OwnedElsewhere."""
        key = str(name)
        while True:
            if self._is_closed:
                raise NotReady("The broker is shutting down; connect to another one or try again.")
            if not self.ownership.owns(name):
                await self._own(name)
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
                if await self.may_create(name):
                    continue
                raise

    async def _own(self, name: TopicName) -> None:
        try:
            found = await self.ownership.find(name)
        except BundleUnloading as error:
            raise NotReady(error.message) from None
        if not found.is_mine:
            raise OwnedElsewhere(f"The topic {name}", found.broker)

    async def _load(self, name: TopicName, loading: asyncio.Future[Topic], create: bool) -> None:
        key = str(name)
        began = self.runtime.clock.monotonic()
        try:
            topic = await self._open(name, create)
            self.runtime.slow.note("topic load", key, self.runtime.clock.monotonic() - began)
            if topic.log.is_fenced or not self.ownership.owns(name):
                # Lost while it was loaded. No wait from here to its place in `topics`, where a loss finds it.
                topic.log.lost(_no_longer_ours(name))
                await topic.close()
                raise NotReady(f"The topic {name} moved to another broker while it was loaded; look it up again.")
        except BraidError as error:
            if isinstance(error, LedgerLost):
                self._note_lost(key, error)
            del self._loading[key]
            loading.set_exception(error)
        except BaseException as error:
            # A bug or the end of the broker; those who wait need an answer either way.
            del self._loading[key]
            loading.set_exception(NotReady(f"The topic {key} could not be loaded ({type(error).__name__}); try again."))
            raise
        else:
            del self._loading[key]
            self.lost.pop(key, None)
            self.topics[key] = topic
            loading.set_result(topic)

    def _note_lost(self, key: str, error: LedgerLost) -> None:
        if key not in self.lost:
            log.error("%s cannot be served: %s", key, error)
            if len(self.lost) >= MAX_LOST_TOPICS:
                del self.lost[next(iter(self.lost))]
        self.lost[key] = error.message

    async def _open(self, name: TopicName, create: bool) -> Topic:
        policies = await self.namespaces.policies(name.namespace)
        whole = await self._record_of(name) if name.domain is Domain.SEGMENT else None
        incarnation = None if whole is None else whole.incarnation
        policy = None if whole is None else whole.retention_policies
        if whole is None and is_part(name):
            policy = await self.retention.of_part(name)
        known = await self.logs.properties(name.managed_ledger_name)
        is_known = known is not None
        if not is_known and not (create and await self.may_create(name)):
            raise TopicNotFound(f"The topic {name} does not exist; create it, or allow auto-creation in its namespace.")
        if known is not None and incarnation is not None and known.get(INCARNATION, "") != incarnation:
            raise NotReady(
                f"By the record {log_key(name.managed_ledger_name)}, what is stored of {name} belongs to an earlier topic of "
                "that name; it is not used, and the topic's leader replaces it when it makes the segment."
            )
        topic = Topic(self, name)
        properties = None if incarnation is None else {INCARNATION: incarnation}
        try:
            managed = await self.logs.open(
                name.managed_ledger_name,
                topic,
                create=not is_known,
                properties=properties,
                limits=policies.limits,
                policy=policy,
                readable=lambda: EARLIEST,  # until the topic knows its transactions
                trim_guard=partial(self.retention.may_trim, name) if is_part(name) else None,
                confirm=partial(self.ownership.confirm, name),
            )
        except TopicNotFound:
            raise TopicNotFound(f"The topic {name} does not exist; it was deleted a moment ago.") from None
        try:
            if not is_known:
                await self.check_created(name, properties)
            elif not managed.infos and name.domain is Domain.PERSISTENT:
                await self.check_unused(name, managed)
            await topic.opened(managed, deduplicate=policies.deduplication)
            if incarnation is not None and not is_known:
                # Before the first message: a subscription of the topic must not depend on who attaches first (INV7).
                for subscription in await self.records.needing_cursors(name.parent, incarnation):
                    await topic.subscription(subscription, is_durable=True, start=None, initial=EARLIEST)
        except BaseException:
            topic.let_go()
            await topic.tasks.close()
            await managed.close()
            raise
        return topic

    def topic_lost(self, topic: Topic) -> None:
        """Another owner took the log, or it failed for good: drop the topic; clients look it up again."""
        if self.topics.get(str(topic.name)) is topic and not topic.is_closing and not self._is_closed:
            topic.disconnect_all()
            closing = self._forget(topic)  # at once: who asks for it next must not be given this one
            self._tasks.spawn(self._close_topic(topic, closing), f"drop {topic.name}")

    async def unload(self, topic: Topic) -> None:
        """Close a topic and forget it; the next use loads it again."""
        key = str(topic.name)
        if self.topics.get(key) is not topic:
            if (closing := self._closing.get(key)) is not None:
                await asyncio.shield(closing)
            return
        await self._close_topic(topic, self._forget(topic))

    def _forget(self, topic: Topic) -> asyncio.Future[None]:
        """From now on the topic is not loaded, and cannot be until the future is done, which the caller sees to."""
        key = str(topic.name)
        del self.topics[key]
        closing = self._closing[key] = asyncio.get_running_loop().create_future()
        return closing

    async def _close_topic(self, topic: Topic, closing: asyncio.Future[None]) -> None:
        try:
            await topic.close()
        except BraidError as error:
            log.warning("closing %s: %s", topic.name, error)
        finally:
            del self._closing[str(topic.name)]
            closing.set_result(None)

    # Bundles, for `Ownership`.

    async def close_bundle(self, namespace: NamespaceName, bundle: Bundle) -> None:
        """Close the topics of a bundle that takes no more clients; returns when none is open or being opened or closed."""
        while True:
            if under_way := [
                future
                for futures in (self._loading, self._closing)
                for key, future in futures.items()
                if _is_in(TopicName.parse(key), namespace, bundle)
            ]:
                await asyncio.wait(under_way)
                continue
            topics = [topic for topic in self.topics.values() if _is_in(topic.name, namespace, bundle)]
            if not topics:
                return
            await self._close_topics(topics)

    async def _close_topics(self, topics: Sequence[Topic]) -> None:
        for topic in topics:
            topic.disconnect_all()
        for start in range(0, len(topics), CLOSING_AT_ONCE):
            async with asyncio.TaskGroup() as group:
                for topic in topics[start : start + CLOSING_AT_ONCE]:
                    group.create_task(self.unload(topic))

    def abandon_bundle(self, namespace: NamespaceName, bundle: Bundle) -> None:
        """Somebody else may own the bundle: its topics are dropped and write nothing more."""
        for topic in list(self.topics.values()):
            if _is_in(topic.name, namespace, bundle):
                topic.log.lost(_no_longer_ours(topic.name))
                self.topic_lost(topic)

    # What administrators ask.

    async def delete_topic(self, name: TopicName, *, force: bool, properties: Mapping[str, str] | None = None) -> None:
        """Delete a plain topic or one partition, with its data and subscriptions; given `properties`, only if its log has
        these. Raises OwnedElsewhere if another broker serves its bundle: only that one knows who uses the topic."""
        owner = await self.ownership.owner_of(name)
        if owner is not None and owner.broker_id != self.ownership.broker_id:
            raise OwnedElsewhere(f"The topic {name}", owner)
        topic = self.topics.get(str(name))
        if topic is not None:
            attached = len(topic.producers) + sum(len(sub.consumers) for sub in topic.subscriptions.values())
            if attached and not force:
                raise StillInUse(f"The topic {name} has {attached} producers and consumers; close them or use force.")
            await self.unload(topic)
        self.lost.pop(str(name), None)
        try:
            await self.logs.delete(name.managed_ledger_name, properties)  # also one whose deletion was begun and interrupted
        except TopicNotFound:
            raise TopicNotFound(f"The topic {name} does not exist.") from None
        finally:  # also what an interrupted deletion has left
            living = partial(self.logs.incarnation, name.managed_ledger_name)
            await self.transactions.store.purge_segment(str(name), living, self.transactions.coordinator.give_up)

    async def delete_partitioned(self, name: TopicName, *, force: bool) -> None:
        """Delete a partitioned topic whose partitions are all served here or nowhere. Raises OwnedElsewhere, before anything is
        deleted, if one is not."""
        record = await self.namespaces.partitions(name)
        if record is None:
            raise TopicNotFound(f"The partitioned topic {name} does not exist.")
        for number in range(record.partitions):
            owner = await self.ownership.owner_of(name.partition(number))
            if owner is not None and owner.broker_id != self.ownership.broker_id:
                raise OwnedElsewhere(f"The topic {name.partition(number)}", owner)
        if not force:
            for number in range(record.partitions):
                topic = self.topics.get(str(name.partition(number)))
                if topic is not None and (topic.producers or any(s.consumers for s in topic.subscriptions.values())):
                    raise StillInUse(f"The topic {topic.name} has producers or consumers; close them or use force.")
        await self.namespaces.begin_partitioned_deletion(name)
        for number in range(record.partitions):
            try:
                await self.delete_topic(name.partition(number), force=True)
            except TopicNotFound:
                continue
        await self.namespaces.delete_partitioned(name)

    async def delete_namespace(self, namespace: NamespaceName) -> None:
        mark = await self.namespaces.begin_deletion(namespace)
        if (
            await self.list_topics(namespace)
            or await self.namespaces.partitioned_topics(namespace)
            or await self.records.has_any(namespace)
        ):
            await self.namespaces.end_deletion(namespace)
            raise Conflict(f"The namespace {namespace} still has topics; delete them first.")
        await self.namespaces.finish_deletion(namespace, mark)
        await self.ownership.forget(namespace)

    async def policies_changed(self, namespace: NamespaceName) -> None:
        """Apply a namespace's policies to its loaded topics, and to those being loaded, which may have read the old ones.
        Raises what the first topic says that cannot follow them; the others do."""
        if loading := [load for key, load in self._loading.items() if TopicName.parse(key).namespace == namespace]:
            await asyncio.wait(loading)
        policies = await self.namespaces.policies(namespace)
        topics = [each for each in self.topics.values() if each.name.namespace == namespace and not each.is_closing]
        for topic in topics:  # first for all: the next step may fail for one
            topic.log.limits = policies.limits
        failures: list[BraidError] = []
        for topic in topics:
            if not topic.is_closing:
                try:
                    await topic.set_deduplication(policies.deduplication)
                except BraidError as error:  # costs this topic, and none behind it
                    failures.append(error)
        if failures:
            raise failures[0]
        self._policy_watch.applied(namespace, policies.version)

    async def _rates_loop(self) -> None:
        while True:
            await self.runtime.clock.sleep(SAMPLE_SECONDS)
            for number, topic in enumerate(list(islice(self.topics.values(), MAX_SAMPLED_TOPICS)), 1):
                if not topic.is_closing:
                    self.rates.sample(topic)
                if number % SAMPLED_AT_ONCE == 0:
                    await asyncio.sleep(0)  # clients come first


def _is_in(name: TopicName, namespace: NamespaceName, bundle: Bundle) -> bool:
    return name.namespace == namespace and bundle.contains(hash_of(name))


def _no_longer_ours(name: TopicName) -> LedgerFenced:
    return LedgerFenced(f"The topic {name} is no longer served by this broker; look it up again.")


class StillInUse(MetadataFailure):
    """Clients are attached to what is to be deleted."""

    status = 412
