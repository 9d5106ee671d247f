"""REST: single policies of namespaces and topics.

The policies this version applies can be read, set and removed. Each other policy of Pulsar can be read (nothing is set), and
setting it is refused with 405: it would have no effect. Of single topics only retention can be set; what else Pulsar has is
refused there, as Pulsar does without `topicLevelPoliciesEnabled`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from braid.errors import NotAllowed, NotFound
from braid.model.names import NamespaceName, TopicName
from braid.model.retention import RetentionPolicies
from braid.web.admin import Admin
from braid.web.calls import Ask, Calls, Query
from braid.web.policies import (
    POLICY_DEFAULTS,
    AutoSubscriptions,
    AutoTopics,
    Retention,
    Strategy,
    check_auto_topics,
    check_clusters,
    check_retention,
    policy_of,
)
from braid.web.routes_namespaces import NAMESPACE

Json = dict[str, Any]
NOT_APPLIED: dict[str, str | None] = {
    "antiAffinity": None,
    "backlogQuota": None,
    "backlogQuotaMap": "backlog_quota_map",
    "compactionThreshold": "compaction_threshold",
    "deduplicationSnapshotInterval": "deduplicationSnapshotIntervalSeconds",
    "delayedDelivery": "delayed_delivery_policies",
    "dispatchRate": None,
    "dispatcherPauseOnAckStatePersistent": None,
    "encryptionRequired": "encryption_required",
    "entryFilters": "entryFilters",
    "inactiveTopicPolicies": "inactive_topic_policies",
    "isAllowAutoUpdateSchema": "is_allow_auto_update_schema",
    "maxConsumersPerSubscription": "max_consumers_per_subscription",
    "maxConsumersPerTopic": "max_consumers_per_topic",
    "maxProducersPerTopic": "max_producers_per_topic",
    "maxSubscriptionsPerTopic": "max_subscriptions_per_topic",
    "maxTopicsPerNamespace": "max_topics_per_namespace",
    "maxUnackedMessagesPerConsumer": "max_unacked_messages_per_consumer",
    "maxUnackedMessagesPerSubscription": "max_unacked_messages_per_subscription",
    "messageTTL": "message_ttl_in_seconds",
    "offloadDeletionLagMs": None,
    "offloadPolicies": None,
    "offloadThreshold": None,
    "offloadThresholdInSeconds": None,
    "persistence": "persistence",
    "publishRate": None,
    "replicatorDispatchRate": None,
    "resourcegroup": "resource_group_name",
    "scalableTopicAutoScalePolicy": "scalableTopicAutoScalePolicy",
    "schemaAutoUpdateCompatibilityStrategy": None,
    "schemaValidationEnforced": "schema_validation_enforced",
    "subscribeRate": None,
    "subscriptionAuthMode": "subscription_auth_mode",
    "subscriptionDispatchRate": None,
    "subscriptionExpirationTime": "subscription_expiration_time_minutes",
    "subscriptionTypesEnabled": "subscription_types_enabled",
}
"""Policies of a namespace that nothing applies yet, with the key that holds them in the whole."""
TOPIC_POLICIES = (
    "autoSubscriptionCreation",
    "backlogQuotaMap",
    "backlogQuota",
    "compactionThreshold",
    "deduplicationEnabled",
    "deduplicationSnapshotInterval",
    "delayedDelivery",
    "dispatchRate",
    "dispatcherPauseOnAckStatePersistent",
    "entryFilters",
    "inactiveTopicPolicies",
    "maxConsumers",
    "maxConsumersPerSubscription",
    "maxMessageSize",
    "maxProducers",
    "maxSubscriptionsPerTopic",
    "maxUnackedMessagesOnConsumer",
    "maxUnackedMessagesOnSubscription",
    "messageTTL",
    "offloadPolicies",
    "persistence",
    "publishRate",
    "replication",
    "replicatorDispatchRate",
    "schemaCompatibilityStrategy",
    "schemaValidationEnforced",
    "shadowTopics",
    "subscribeRate",
    "subscriptionDispatchRate",
    "subscriptionExpirationTime",
    "subscriptionTypesEnabled",
)
TOPIC = "/persistent/{tenant}/{namespace}/{topic}"
APPLIED = Query("applied", "What holds for the topic, whoever says so", bool, False)


def policy_calls(admin: Admin) -> Calls:
    """Calls about policies."""
    calls = Calls("policies")
    names = admin.service.namespaces

    async def stored(name: NamespaceName, key: str) -> Any:
        """One policy as it was set; None if it was not."""
        return (await names.policies(name)).values.get(key, POLICY_DEFAULTS.get(key))

    async def change(name: NamespaceName, key: str, value: Any) -> None:
        """Set one policy (None removes it) and apply it to the topics that are loaded."""
        await names.policies(name)
        await names.set_policy(name, key, value)
        await admin.service.policies_changed(name)

    def policy(path: str, key: str, kind: Any, what: str, check: Callable[[Any], Awaitable[Any]], **options: Any) -> None:
        """Get, set and remove one applied policy."""

        async def read(ask: Ask) -> Any:
            return await stored(ask.namespace, key)

        async def write(ask: Ask) -> None:
            name = ask.namespace
            await change(name, key, await check(ask.body))

        async def remove(ask: Ask) -> None:
            await change(ask.namespace, key, None)

        read.__doc__ = f"{what}; 204 if the broker's setting applies."
        write.__doc__ = f"Set: {what[0].lower()}{what[1:]}."
        remove.__doc__ = f"Let the broker's setting apply again: {what[0].lower()}{what[1:]}."
        calls.get(f"{NAMESPACE}/{path}", kind, is_optional=True)(read)
        calls.post(f"{NAMESPACE}/{path}", body=kind, **options)(write)
        calls.delete(f"{NAMESPACE}/{path}")(remove)

    async def as_given(value: Any) -> Any:
        return value

    async def retention(value: Retention) -> Json:
        check_retention(value)
        stored: Json = msgspec.to_builtins(value)
        return stored

    async def auto_topics(value: AutoTopics) -> Json:
        return check_auto_topics(admin, value)

    async def auto_subscriptions(value: AutoSubscriptions) -> Json:
        stored: Json = msgspec.to_builtins(value)
        return stored

    policy("deduplication", "deduplicationEnabled", bool, "Whether messages are deduplicated", as_given)
    policy("retention", "retention_policies", Retention, "How long acknowledged messages are kept", retention)
    policy("autoTopicCreation", "autoTopicCreationOverride", AutoTopics, "How topics come to be on first use", auto_topics)
    policy(
        "autoSubscriptionCreation",
        "autoSubscriptionCreationOverride",
        AutoSubscriptions,
        "Whether consumers may make subscriptions",
        auto_subscriptions,
    )

    _strategy(admin, calls, stored)
    for path, key in (("replication", "replication_clusters"), ("allowedClusters", "allowed_clusters")):
        _cluster_policy(admin, calls, path, key, stored)
    _topic_retention(admin, calls)
    _refuse(admin, calls)
    return calls


def _strategy(admin: Admin, calls: Calls, stored: Any) -> None:
    @calls.get(f"{NAMESPACE}/schemaCompatibilityStrategy", Strategy)
    async def get_strategy(ask: Ask) -> Any:
        """The compatibility strategy that was set."""
        return await stored(ask.namespace, "schema_compatibility_strategy")

    @calls.put(f"{NAMESPACE}/schemaCompatibilityStrategy", body=str)
    async def set_strategy(ask: Ask) -> None:
        """Kept, not applied: schemas are stored without compatibility rules in this version."""
        name = ask.namespace
        try:
            strategy = msgspec.convert(ask.body, Strategy)
        except msgspec.ValidationError:
            raise InvalidStrategy(f"{ask.body[:40]!r} is no compatibility strategy of Pulsar's.") from None
        await admin.service.namespaces.policies(name)
        await admin.service.namespaces.set_policy(name, "schema_compatibility_strategy", strategy)


class InvalidStrategy(NotAllowed):
    """No strategy of this name."""

    status = 412


def _cluster_policy(admin: Admin, calls: Calls, path: str, key: str, stored: Any) -> None:
    """Clusters of a namespace: only the broker's own until there is replication."""

    async def read(ask: Ask) -> Any:
        return await stored(ask.namespace, key) or []

    async def write(ask: Ask) -> None:
        name = ask.namespace
        tenant = await admin.service.namespaces.tenant(name.tenant)
        await admin.service.namespaces.policies(name)
        await check_clusters(admin, ask.body, key, tenant.get("allowedClusters", []))
        await admin.service.namespaces.set_policy(name, key, sorted(set(ask.body)))

    read.__doc__ = f"The policy {key}: clusters of a namespace."
    write.__doc__ = f"Set the policy {key}; only the broker's own cluster can be named in this version."
    calls.get(f"{NAMESPACE}/{path}", list[str])(read)
    calls.post(f"{NAMESPACE}/{path}", body=list[str], statuses=(405,))(write)


def _topic_retention(admin: Admin, calls: Calls) -> None:
    """How long one topic keeps messages; wins over its namespace's policy. Kept in the topic's own record."""
    service, path = admin.service, f"{TOPIC}/retention"

    async def whole(ask: Ask) -> TopicName:
        """The topic the call names, which exists and is no partition."""
        name = ask.topic
        await admin.check_exists(name)
        if name.is_partition:
            raise NotAllowed(f"{name} is a partition; a policy belongs to the whole topic: use {name.base}.")
        return name

    async def own(ask: Ask, name: TopicName) -> RetentionPolicies | None:
        record = await service.namespaces.partitions(name, fresh=True)
        return (await admin.loaded(ask)).log.policy if record is None else record.retention_policies

    async def change(ask: Ask, policy: RetentionPolicies | None) -> None:
        name = await whole(ask)
        if await admin.partitions(name):
            await service.namespaces.set_partitioned_retention(name, policy)
        else:
            await (await admin.loaded(ask)).log.set_policy(policy)

    @calls.get(path, Retention, is_optional=True, query=(APPLIED,), owner=True)
    async def get_topic_retention(ask: Ask) -> Any:
        """How long a topic keeps acknowledged messages, if it has a policy of its own; 204 if not. With `applied=true` what
        holds for it, whoever says so."""
        name = await whole(ask)
        found = await own(ask, name)
        if found is None and ask.query["applied"]:
            return (await service.namespaces.policies(name.namespace)).retention
        return found

    @calls.post(path, body=Retention, owner=True)
    async def set_topic_retention(ask: Ask) -> None:
        """Set how long a topic keeps acknowledged messages, whatever its namespace says."""
        check_retention(ask.body)
        await change(ask, policy_of(ask.body))

    @calls.delete(path, owner=True)
    async def remove_topic_retention(ask: Ask) -> None:
        """Let the namespace say how long a topic keeps acknowledged messages."""
        await change(ask, None)


def _refuse(admin: Admin, calls: Calls) -> None:
    """Policies that nothing applies: unset for whoever asks, refused for whoever sets them."""
    names = admin.service.namespaces

    async def known(ask: Ask) -> str:
        path = ask.text("policy")
        await names.policies(ask.namespace)
        if path not in NOT_APPLIED:
            raise NotFound(f"There is no policy {path[:100]!r}.")
        return path

    @calls.get(f"{NAMESPACE}/{{policy}}", Any, is_optional=True)
    async def read(ask: Ask) -> Any:
        """A policy that this version does not apply: its default; 204 if that is nothing."""
        key = NOT_APPLIED[await known(ask)]
        return POLICY_DEFAULTS[key] if key else None

    async def write(ask: Ask) -> None:
        """Refused with 405: this version does not apply the policy, so it cannot be set."""
        path = await known(ask)
        raise NotAllowed(f"The policy {path} is not applied by this version of Braid; nothing was changed.")

    for add in (calls.post, calls.put):
        add(f"{NAMESPACE}/{{policy}}", statuses=(405,))(write)

    @calls.delete(f"{NAMESPACE}/{{policy}}")
    async def remove(ask: Ask) -> None:
        """Nothing to do: a policy that this version does not apply is never set."""
        await known(ask)

    async def off(ask: Ask) -> Any:
        """Refused with 405: this version applies no policy of single topics but retention."""
        path = ask.text("topic_policy")
        await admin.check_exists(ask.topic)
        if path not in TOPIC_POLICIES:
            raise NotFound(f"There is no policy {path[:100]!r}.")
        raise NotAllowed(f"Of single topics only retention can be set in this version of Braid; {path} can be set on no topic.")

    for add in (calls.post, calls.put, calls.delete):
        add(f"{TOPIC}/{{topic_policy}}")(off)
    calls.get(f"{TOPIC}/{{topic_policy}}", Any)(off)
