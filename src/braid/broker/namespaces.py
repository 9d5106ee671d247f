"""Tenants, namespaces and partitioned topics: the records behind them and the rules for creating topics.

Owns the records under `/admin`. Reads them from the store each time: the store answers from memory, and several brokers
share it. Policy values keep upstream's names and shapes; keys we do not know are kept as they came.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec

from braid.broker.config import BrokerConfig, RetentionConfig
from braid.errors import AlreadyExists, BraidError, Conflict, InvalidArgument, NotFound, TopicNotFound, VersionConflict
from braid.managedledger.retention import Limits
from braid.metadata.api import ABSENT, MetadataStore, Record, Span
from braid.metadata.values import read_json, unreadable
from braid.model.bundles import Bundle, boundaries_of, from_boundaries, split, split_evenly
from braid.model.names import NamespaceName, TopicName
from braid.model.names import decode as decode_name
from braid.model.names import encode as encode_name
from braid.model.retention import RetentionPolicies

FORMAT_VERSION = 1
MAX_STORED_PARTITIONS = 100_000
"""More than any broker may be told to take."""
_TENANTS = "/admin/tenants"
_NAMESPACES = "/admin/namespaces"
_PARTITIONED = "/admin/partitioned-topics"
_CLUSTERS = "/admin/clusters"
NAMESPACES = _NAMESPACES
"""Below it are the policies of every namespace, for watching."""
DEFAULT_RETENTION = RetentionConfig()
UNSTATED_BUNDLES = split_evenly(4)
"""Of a namespace whose record is older than bundles."""

Json = dict[str, Any]


class AutoTopicCreation(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A namespace's answer to clients that name a topic which does not exist."""

    allow_auto_topic_creation: bool = True
    topic_type: str = "non-partitioned"
    default_num_partitions: int = 1


class AutoSubscriptionCreation(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What happens when a consumer names a subscription that does not exist."""

    allow_auto_subscription_creation: bool = True


class PartitionedTopic(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The record of a partitioned topic."""

    partitions: Annotated[int, msgspec.Meta(ge=1, le=MAX_STORED_PARTITIONS)]
    format_version: int = FORMAT_VERSION
    deleted: bool = False
    properties: dict[str, str] = {}
    retention_policies: RetentionPolicies | None = None
    """Of the topic itself, for all its partitions; None = its namespace's."""


class BundlesData(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A namespace's bundles as REST shows and takes them."""

    boundaries: list[str] | None = None
    num_bundles: int = 0


class Policies:
    """The policies of one namespace, as stored."""

    def __init__(
        self, values: Json, broker: BrokerConfig, version: int = 0, retention: RetentionConfig = DEFAULT_RETENTION
    ) -> None:
        self.values = values
        self.version = version
        """Of the record; differs when the policies do."""
        self._broker = broker
        self._retention = retention

    def check(self) -> None:
        """Raise some error or other if one of them makes no sense: they are looked at one by one later, all over the place."""
        for each in (self.bundles, self.deduplication, self.limits, self.auto_topic_creation, self.auto_subscription_creation):
            del each

    @property
    def bundles(self) -> tuple[Bundle, ...]:
        stored = self.values.get("bundles")
        return UNSTATED_BUNDLES if stored is None else from_boundaries(tuple(stored["boundaries"]))

    @property
    def deduplication(self) -> bool:
        enabled = self.values.get("deduplicationEnabled")
        return self._broker.deduplication if enabled is None else msgspec.convert(enabled, bool)

    @property
    def retention(self) -> RetentionPolicies:
        stored = self.values.get("retention_policies")
        if stored is None:
            return RetentionPolicies(
                retention_time_in_minutes=self._broker.retention_minutes, retention_size_in_mb=self._broker.retention_mb
            )
        return msgspec.convert(stored, RetentionPolicies)

    @property
    def limits(self) -> Limits:
        """How long logs keep what nobody needs. The rule for topics without a subscription is a default: whatever the namespace
        or the broker's settings say of retention wins."""
        retention = self.retention
        is_stated = self.values.get("retention_policies") is not None or retention != RetentionPolicies()
        return Limits(
            retention.retention_time_in_minutes,
            retention.retention_size_in_mb,
            0 if is_stated else self._retention.unread_minutes,
        )

    @property
    def auto_topic_creation(self) -> AutoTopicCreation:
        stored = self.values.get("autoTopicCreationOverride")
        if stored is None:
            partitions = self._broker.auto_topic_partitions
            return AutoTopicCreation(
                allow_auto_topic_creation=self._broker.allow_auto_topic_creation,
                topic_type="partitioned" if partitions else "non-partitioned",
                default_num_partitions=partitions or 1,
            )
        return msgspec.convert(stored, AutoTopicCreation)

    @property
    def auto_subscription_creation(self) -> bool:
        stored = self.values.get("autoSubscriptionCreationOverride")
        if stored is None:
            return self._broker.allow_auto_subscription_creation
        return msgspec.convert(stored, AutoSubscriptionCreation).allow_auto_subscription_creation


class Namespaces:
    """Reads and writes tenants, namespaces and partitioned-topic records."""

    def __init__(self, store: MetadataStore, config: BrokerConfig, retention: RetentionConfig = DEFAULT_RETENTION) -> None:
        self._store = store
        self._config = config
        self._retention = retention
        self._understood: dict[NamespaceName, int] = {}
        """Versions of policies that were looked through; one for each namespace that was asked for."""

    async def bootstrap(self) -> None:
        """Make the cluster and the public and system namespaces of a fresh installation."""
        cluster = self._config.cluster_name
        await self._create_if_absent(f"{_CLUSTERS}/{encode_name(cluster)}", {})
        for tenant, namespace in (("public", "default"), ("pulsar", "system")):
            await self._create_if_absent(f"{_TENANTS}/{tenant}", {"adminRoles": [], "allowedClusters": [cluster]})
            await self._create_if_absent(
                f"{_NAMESPACES}/{tenant}/{namespace}",
                {"replication_clusters": [cluster], "bundles": bundles_json(split_evenly(self._config.default_bundles))},
            )

    async def clusters(self) -> list[str]:
        return [name async for name in self._store.names(Span(_CLUSTERS))]

    async def tenants(self) -> list[str]:
        return [name async for name in self._store.names(Span(_TENANTS))]

    async def tenant(self, tenant: str) -> Json:
        record = await self._store.get(f"{_TENANTS}/{encode_name(tenant)}")
        if record is None:
            raise NotFound(f"The tenant {tenant} does not exist; create it first.")
        return _public(_decode(record))

    async def create_tenant(self, tenant: str, info: Json) -> None:
        await self._create(f"{_TENANTS}/{encode_name(tenant)}", info, f"The tenant {tenant} already exists.")

    async def update_tenant(self, tenant: str, info: Json) -> None:
        await self.tenant(tenant)
        await self._store.put(f"{_TENANTS}/{encode_name(tenant)}", _encode(info))

    async def delete_tenant(self, tenant: str) -> None:
        await self.tenant(tenant)
        if await self.namespaces(tenant):
            raise Conflict(f"The tenant {tenant} still has namespaces; delete them first.")
        await self._store.delete(f"{_TENANTS}/{encode_name(tenant)}")

    async def namespaces(self, tenant: str) -> list[str]:
        """Full names `tenant/namespace`."""
        await self.tenant(tenant)
        return [f"{tenant}/{name}" async for name in self._store.names(Span(f"{_NAMESPACES}/{encode_name(tenant)}"))]

    async def create_namespace(self, name: NamespaceName, policies: Json) -> None:
        await self.tenant(name.tenant)
        bundles = bundles_json(self._new_bundles(policies.get("bundles")))
        policies = {"replication_clusters": [self._config.cluster_name], **policies, "bundles": bundles}
        await self._create(_namespace_key(name), policies, f"The namespace {name} already exists.")

    async def begin_deletion(self, name: NamespaceName) -> int:
        """Mark a namespace, so that it takes no more topics; returns the version of the mark. Who creates a topic looks for the
        mark after creating, who deletes looks for topics after marking: one of the two sees the other."""

        def mark(values: Json) -> None:
            values["deleted"] = True

        return await self.change_policies(name, mark)

    async def finish_deletion(self, name: NamespaceName, mark: int) -> None:
        """Remove a marked namespace, unless it was changed since."""
        try:
            await self._store.delete(_namespace_key(name), expected=mark)
        except VersionConflict:
            raise Conflict(f"The namespace {name} changed while it was deleted; try again.") from None

    async def end_deletion(self, name: NamespaceName) -> None:
        """It is not deleted after all."""
        await self.set_policy(name, "deleted", None)

    async def check_takes_topics(self, name: NamespaceName) -> None:
        """Raise TopicNotFound if the namespace does not exist or is being deleted."""
        if (await self.policies(name, fresh=True)).values.get("deleted"):
            raise TopicNotFound(f"The namespace {name} is being deleted and takes no topics; if that ended early, repeat it.")

    async def policies(self, name: NamespaceName, *, fresh: bool = False) -> Policies:
        """The namespace's policies; `TopicNotFound` is what clients are told when it is absent."""
        record = await self._store.get(_namespace_key(name), fresh=fresh)
        if record is None:
            raise TopicNotFound(f"The namespace {name} does not exist; create it, or check the spelling.")
        found = Policies(_public(_decode(record)), self._config, record.version, self._retention)
        if self._understood.get(name) != record.version:
            try:
                found.check()
            except (BraidError, msgspec.MsgspecError, ValueError, TypeError, LookupError, AttributeError) as error:
                raise unreadable(record.key, error) from error
            self._understood[name] = record.version
        return found

    async def split_bundle(self, name: NamespaceName, bundle: Bundle) -> None:
        """Replace a bundle by its halves. Raises NotFound if the namespace does not have it (any more)."""

        def halve(values: Json) -> None:
            bundles = Policies(values, self._config).bundles
            if bundle not in bundles:
                raise NotFound(f"The namespace {name} has no bundle {bundle}; list its bundles to see what it has.")
            values["bundles"] = bundles_json(split(bundles, bundle))

        await self.change_policies(name, halve)

    def _new_bundles(self, given: Any) -> tuple[Bundle, ...]:
        """The bundles asked for at creation: by their boundaries, by their number, or the default."""
        try:
            wanted = BundlesData() if given is None else msgspec.convert(given, BundlesData)
        except msgspec.ValidationError as error:
            raise InvalidArgument(f"The bundles of a namespace cannot be read: {error}.") from None
        if wanted.boundaries:
            bundles = from_boundaries(tuple(wanted.boundaries))
            if wanted.num_bundles and wanted.num_bundles != len(bundles):
                raise InvalidArgument(
                    f"{len(wanted.boundaries)} boundaries make {len(bundles)} bundles, not {wanted.num_bundles}."
                )
            return bundles
        return split_evenly(wanted.num_bundles or self._config.default_bundles)

    async def set_policy(self, name: NamespaceName, key: str, value: Any) -> None:
        """Set one policy, or remove it with None."""

        def change(values: Json) -> None:
            if value is None:
                values.pop(key, None)
            else:
                values[key] = value

        await self.change_policies(name, change)

    async def change_policies(self, name: NamespaceName, change: Callable[[Json], None]) -> int:
        """Let `change` alter the policies as they are now; it may raise to leave them alone. Returns the new version."""
        for _attempt in range(100):
            record = await self._store.get(_namespace_key(name), fresh=True)
            if record is None:
                raise NotFound(f"The namespace {name} does not exist.")
            values = _decode(record)
            change(values)
            try:
                return (await self._store.put(record.key, _encode(values), expected=record.version)).version
            except VersionConflict:
                continue
        raise Conflict(f"The policies of {name} keep changing; try again.")

    async def partitions(self, topic: TopicName, *, fresh: bool = False) -> PartitionedTopic | None:
        """The partitioned-topic record of `topic` (a base name), if it is partitioned."""
        record = await self._store.get(_partitioned_key(topic), fresh=fresh)
        return None if record is None else _partitioned(record)

    async def create_partitioned(self, topic: TopicName, partitions: int, properties: dict[str, str] | None = None) -> None:
        self._check_partitions(topic, partitions)
        record = PartitionedTopic(partitions=partitions, properties=properties or {})
        try:
            await self._store.put(_partitioned_key(topic), msgspec.json.encode(record), expected=ABSENT)
        except VersionConflict:
            raise AlreadyExists(f"The partitioned topic {topic} already exists.") from None

    async def grow_partitions(self, topic: TopicName, partitions: int) -> None:
        self._check_partitions(topic, partitions)
        record = await self._store.get(_partitioned_key(topic), fresh=True)
        if record is None:
            raise TopicNotFound(f"The topic {topic} is not partitioned or does not exist.")
        current = _partitioned(record)
        if partitions <= current.partitions:
            raise ShrinkRefused(
                f"The topic {topic} has {current.partitions} partitions; the new number must be larger, not {partitions}."
            )
        grown = msgspec.structs.replace(current, partitions=partitions)
        try:
            await self._store.put(record.key, msgspec.json.encode(grown), expected=record.version)
        except VersionConflict:
            raise Conflict(f"The topic {topic} changed at the same time; try again.") from None

    async def set_partitioned_properties(self, topic: TopicName, change: Callable[[dict[str, str]], None]) -> None:
        """Let `change` alter the properties of a partitioned topic."""

        def alter(current: PartitionedTopic) -> PartitionedTopic:
            properties = dict(current.properties)
            change(properties)
            return msgspec.structs.replace(current, properties=properties)

        await self._change_partitioned(topic, alter)

    async def set_partitioned_retention(self, topic: TopicName, policy: RetentionPolicies | None) -> None:
        """Set or remove the retention policy of a partitioned topic."""
        await self._change_partitioned(topic, lambda current: msgspec.structs.replace(current, retention_policies=policy))

    async def begin_partitioned_deletion(self, topic: TopicName) -> None:
        """Mark a partitioned topic before its partitions go, so that none of them is made anew by a client that comes back."""
        await self._change_partitioned(topic, lambda current: msgspec.structs.replace(current, deleted=True))

    async def _change_partitioned(self, topic: TopicName, change: Callable[[PartitionedTopic], PartitionedTopic]) -> None:
        record = await self._store.get(_partitioned_key(topic), fresh=True)
        if record is None:
            raise TopicNotFound(f"The partitioned topic {topic} does not exist.")
        changed = change(_partitioned(record))
        try:
            await self._store.put(record.key, msgspec.json.encode(changed), expected=record.version)
        except VersionConflict:
            raise Conflict(f"The topic {topic} changed at the same time; try again.") from None

    async def delete_partitioned(self, topic: TopicName) -> None:
        if not await self._store.delete(_partitioned_key(topic)):
            raise TopicNotFound(f"The partitioned topic {topic} does not exist.")

    async def partitioned_topics(self, name: NamespaceName) -> list[str]:
        parent = f"{_PARTITIONED}/{encode_name(name.tenant)}/{encode_name(name.local_name)}/persistent"
        return [
            str(TopicName.from_managed_ledger_name(f"{name}/persistent/{local}"))
            async for local in self._store.names(Span(parent))
        ]

    def _check_partitions(self, topic: TopicName, partitions: int) -> None:
        if partitions < 1:
            raise BadPartitionCount(f"The topic {topic} needs at least 1 partition, not {partitions}.")
        if partitions > self._config.max_partitions:
            raise BadPartitionCount(
                f"The topic {topic} may have at most {self._config.max_partitions} partitions (broker.max_partitions), "
                f"not {partitions}."
            )
        topic.partition(partitions - 1)  # whose name must not be too long

    async def _create(self, key: str, value: Json, taken: str) -> None:
        try:
            await self._store.put(key, _encode(value), expected=ABSENT)
        except VersionConflict:
            raise AlreadyExists(taken) from None

    async def _create_if_absent(self, key: str, value: Json) -> None:
        try:
            await self._store.put(key, _encode(value), expected=ABSENT)
        except VersionConflict:
            return


class BadPartitionCount(InvalidArgument):
    """A number of partitions outside its bounds."""

    status = 406


class ShrinkRefused(InvalidArgument):
    """A partitioned topic can only grow."""

    status = 422


def bundles_json(bundles: Sequence[Bundle]) -> Json:
    """Bundles in the shape of the policies."""
    return {"boundaries": boundaries_of(bundles), "numBundles": len(bundles)}


def namespace_of_key(key: str) -> NamespaceName:
    """The namespace whose policies are at a key below `NAMESPACES`. Raises Rejected if it is no such key."""
    parts = key.removeprefix(f"{NAMESPACES}/").split("/")
    if len(parts) != 2:
        raise InvalidArgument(f"The key {key} is not one of a namespace's policies.")
    return NamespaceName(*map(decode_name, parts))


def _namespace_key(name: NamespaceName) -> str:
    return f"{_NAMESPACES}/{encode_name(name.tenant)}/{encode_name(name.local_name)}"


def _partitioned_key(topic: TopicName) -> str:
    parent = f"{_PARTITIONED}/{encode_name(topic.tenant)}/{encode_name(topic.namespace_portion)}/persistent"
    return f"{parent}/{encode_name(topic.local_name)}"


def _partitioned(record: Record) -> PartitionedTopic:
    return read_json(PartitionedTopic, record.key, record.value)


def _encode(value: Json) -> bytes:
    return msgspec.json.encode({**value, "formatVersion": FORMAT_VERSION})


def _decode(record: Record) -> Json:
    return read_json(Json, record.key, record.value)


def _public(values: Json) -> Json:
    return {key: value for key, value in values.items() if key != "formatVersion"}
