"""`AdminClient` without `await`, for scripts and notebooks' plain cells.

    with AdminClient("http://localhost:8080") as admin:
        admin.topics.create("orders")

Every method here is the asynchronous one of the same name, waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from braid.client import admin, admin_namespaces, admin_scalable, admin_sinks, admin_topics, admin_transactions
from braid.client.blocking_loop import Blocking, LoopThread, waited


class Clusters(Blocking[admin.Clusters]):
    """`AdminClient.clusters`."""

    list = waited(admin.Clusters.list)
    get = waited(admin.Clusters.get)
    create = waited(admin.Clusters.create)
    update = waited(admin.Clusters.update)
    delete = waited(admin.Clusters.delete)


class Tenants(Blocking[admin.Tenants]):
    """`AdminClient.tenants`."""

    list = waited(admin.Tenants.list)
    get = waited(admin.Tenants.get)
    create = waited(admin.Tenants.create)
    update = waited(admin.Tenants.update)
    delete = waited(admin.Tenants.delete)


class Namespaces(Blocking[admin_namespaces.Namespaces]):
    """`AdminClient.namespaces`."""

    list = waited(admin_namespaces.Namespaces.list)
    create = waited(admin_namespaces.Namespaces.create)
    delete = waited(admin_namespaces.Namespaces.delete)
    policies = waited(admin_namespaces.Namespaces.policies)
    unload = waited(admin_namespaces.Namespaces.unload)
    topics = waited(admin_namespaces.Namespaces.topics)
    permissions = waited(admin_namespaces.Namespaces.permissions)
    grant = waited(admin_namespaces.Namespaces.grant)
    revoke = waited(admin_namespaces.Namespaces.revoke)
    retention = waited(admin_namespaces.Namespaces.retention)
    set_retention = waited(admin_namespaces.Namespaces.set_retention)
    remove_retention = waited(admin_namespaces.Namespaces.remove_retention)
    deduplication = waited(admin_namespaces.Namespaces.deduplication)
    set_deduplication = waited(admin_namespaces.Namespaces.set_deduplication)
    remove_deduplication = waited(admin_namespaces.Namespaces.remove_deduplication)
    auto_topics = waited(admin_namespaces.Namespaces.auto_topics)
    set_auto_topics = waited(admin_namespaces.Namespaces.set_auto_topics)
    remove_auto_topics = waited(admin_namespaces.Namespaces.remove_auto_topics)
    auto_subscriptions = waited(admin_namespaces.Namespaces.auto_subscriptions)
    set_auto_subscriptions = waited(admin_namespaces.Namespaces.set_auto_subscriptions)
    remove_auto_subscriptions = waited(admin_namespaces.Namespaces.remove_auto_subscriptions)
    schema_strategy = waited(admin_namespaces.Namespaces.schema_strategy)
    set_schema_strategy = waited(admin_namespaces.Namespaces.set_schema_strategy)
    properties = waited(admin_namespaces.Namespaces.properties)
    set_properties = waited(admin_namespaces.Namespaces.set_properties)
    remove_properties = waited(admin_namespaces.Namespaces.remove_properties)
    clear_backlog = waited(admin_namespaces.Namespaces.clear_backlog)
    unsubscribe = waited(admin_namespaces.Namespaces.unsubscribe)


class Topics(Blocking[admin_topics.Topics]):
    """`AdminClient.topics`."""

    list = waited(admin_topics.Topics.list)
    partitioned = waited(admin_topics.Topics.partitioned)
    create = waited(admin_topics.Topics.create)
    delete = waited(admin_topics.Topics.delete)
    partitions = waited(admin_topics.Topics.partitions)
    grow = waited(admin_topics.Topics.grow)
    stats = waited(admin_topics.Topics.stats)
    partitioned_stats = waited(admin_topics.Topics.partitioned_stats)
    internal_stats = waited(admin_topics.Topics.internal_stats)
    partitioned_internal_stats = waited(admin_topics.Topics.partitioned_internal_stats)
    lookup = waited(admin_topics.Topics.lookup)
    bundle = waited(admin_topics.Topics.bundle)
    unload = waited(admin_topics.Topics.unload)
    terminate = waited(admin_topics.Topics.terminate)
    terminate_partitions = waited(admin_topics.Topics.terminate_partitions)
    create_missed_partitions = waited(admin_topics.Topics.create_missed_partitions)
    trim = waited(admin_topics.Topics.trim)
    truncate = waited(admin_topics.Topics.truncate)
    last_message_id = waited(admin_topics.Topics.last_message_id)
    message = waited(admin_topics.Topics.message)
    permissions = waited(admin_topics.Topics.permissions)
    grant = waited(admin_topics.Topics.grant)
    revoke = waited(admin_topics.Topics.revoke)
    retention = waited(admin_topics.Topics.retention)
    set_retention = waited(admin_topics.Topics.set_retention)
    remove_retention = waited(admin_topics.Topics.remove_retention)
    properties = waited(admin_topics.Topics.properties)
    set_properties = waited(admin_topics.Topics.set_properties)
    remove_property = waited(admin_topics.Topics.remove_property)


class Subscriptions(Blocking[admin_topics.Subscriptions]):
    """`AdminClient.subscriptions`."""

    list = waited(admin_topics.Subscriptions.list)
    create = waited(admin_topics.Subscriptions.create)
    delete = waited(admin_topics.Subscriptions.delete)
    skip = waited(admin_topics.Subscriptions.skip)
    skip_all = waited(admin_topics.Subscriptions.skip_all)
    reset = waited(admin_topics.Subscriptions.reset)
    peek = waited(admin_topics.Subscriptions.peek)
    expire = waited(admin_topics.Subscriptions.expire)
    expire_all = waited(admin_topics.Subscriptions.expire_all)
    properties = waited(admin_topics.Subscriptions.properties)
    set_properties = waited(admin_topics.Subscriptions.set_properties)


class Brokers(Blocking[admin.Brokers]):
    """`AdminClient.brokers`."""

    list = waited(admin.Brokers.list)
    leader = waited(admin.Brokers.leader)
    health = waited(admin.Brokers.health)
    warnings = waited(admin.Brokers.warnings)
    ready = waited(admin.Brokers.ready)
    version = waited(admin.Brokers.version)
    owned = waited(admin.Brokers.owned)
    configuration = waited(admin.Brokers.configuration)
    topics = waited(admin.Brokers.topics)
    load = waited(admin.Brokers.load)
    drain = waited(admin.Brokers.drain)
    undrain = waited(admin.Brokers.undrain)


class Bundles(Blocking[admin.Bundles]):
    """`AdminClient.bundles`."""

    list = waited(admin.Bundles.list)
    unload = waited(admin.Bundles.unload)
    transfer = waited(admin.Bundles.transfer)
    split = waited(admin.Bundles.split)


class ScalableTopics(Blocking[admin_scalable.ScalableTopics]):
    """`AdminClient.scalable_topics`."""

    list = waited(admin_scalable.ScalableTopics.list)
    create = waited(admin_scalable.ScalableTopics.create)
    get_metadata = waited(admin_scalable.ScalableTopics.get_metadata)
    get_stats = waited(admin_scalable.ScalableTopics.get_stats)
    get_retention = waited(admin_scalable.ScalableTopics.get_retention)
    set_retention = waited(admin_scalable.ScalableTopics.set_retention)
    remove_retention = waited(admin_scalable.ScalableTopics.remove_retention)
    delete = waited(admin_scalable.ScalableTopics.delete)
    split_segment = waited(admin_scalable.ScalableTopics.split_segment)
    merge_segments = waited(admin_scalable.ScalableTopics.merge_segments)
    create_subscription = waited(admin_scalable.ScalableTopics.create_subscription)
    delete_subscription = waited(admin_scalable.ScalableTopics.delete_subscription)
    seek = waited(admin_scalable.ScalableTopics.seek)
    clear_backlog = waited(admin_scalable.ScalableTopics.clear_backlog)
    remove_consumer = waited(admin_scalable.ScalableTopics.remove_consumer)


class Segments(Blocking[admin_scalable.Segments]):
    """`AdminClient.segments`."""

    create = waited(admin_scalable.Segments.create)
    terminate = waited(admin_scalable.Segments.terminate)
    delete = waited(admin_scalable.Segments.delete)
    subscriptions = waited(admin_scalable.Segments.subscriptions)
    stats = waited(admin_scalable.Segments.stats)
    settle = waited(admin_scalable.Segments.settle)
    create_subscription = waited(admin_scalable.Segments.create_subscription)
    delete_subscription = waited(admin_scalable.Segments.delete_subscription)
    backlog = waited(admin_scalable.Segments.backlog)
    seek = waited(admin_scalable.Segments.seek)
    skip_all = waited(admin_scalable.Segments.skip_all)


class Transactions(Blocking[admin_transactions.Transactions]):
    """`AdminClient.transactions`."""

    list = waited(admin_transactions.Transactions.list)
    describe = waited(admin_transactions.Transactions.describe)
    abort = waited(admin_transactions.Transactions.abort)


class Sinks(Blocking[admin_sinks.Sinks]):
    """`AdminClient.sinks`."""

    list = waited(admin_sinks.Sinks.list)
    describe = waited(admin_sinks.Sinks.describe)
    delete = waited(admin_sinks.Sinks.delete)


class AdminClient:
    """Administers a cluster over HTTP; `with` closes it. Safe to use from several threads."""

    def __init__(self, urls: str | Sequence[str] = "http://localhost:8080", *, timeout: float = admin.DEFAULT_TIMEOUT) -> None:
        self._thread = thread = LoopThread("braid-admin", "AdminClient", "braid.AdminClient")
        try:
            self._inner = admin.AdminClient(urls, timeout=timeout)
        except BaseException:
            thread.close()
            raise
        self.clusters = Clusters(self._inner.clusters, thread)
        self.tenants = Tenants(self._inner.tenants, thread)
        self.namespaces = Namespaces(self._inner.namespaces, thread)
        self.topics = Topics(self._inner.topics, thread)
        self.subscriptions = Subscriptions(self._inner.subscriptions, thread)
        self.brokers = Brokers(self._inner.brokers, thread)
        self.bundles = Bundles(self._inner.bundles, thread)
        self.scalable_topics = ScalableTopics(self._inner.scalable_topics, thread)
        self.segments = Segments(self._inner.segments, thread)
        self.transactions = Transactions(self._inner.transactions, thread)
        self.sinks = Sinks(self._inner.sinks, thread)

    @property
    def urls(self) -> Sequence[str]:
        """The addresses that are asked."""
        return self._inner.urls

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections and end the thread. Idempotent."""
        if not self._thread.is_closed:
            self._thread.run(self._inner.close, is_closing=True)
            self._thread.close()
