"""The policies of a namespace: their defaults, their shapes, and which of them this version applies.

Owns the promise that a policy which would have no effect is refused, not kept: nobody shall believe that a limit is set which
nothing keeps. Keys that Pulsar does not have are kept as they came (newer tools may send them).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from braid.broker.namespaces import BundlesData, bundles_json
from braid.errors import InvalidArgument, NotAllowed, TooLarge
from braid.model.bundles import Bundle
from braid.model.retention import RetentionPolicies
from braid.web.admin import Admin
from braid.web.calls import BadRequest, convert

Json = dict[str, Any]
Int32 = Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
Properties = dict[Annotated[str, msgspec.Meta(min_length=1, max_length=1000)], Annotated[str, msgspec.Meta(max_length=10_000)]]
Strategy = Literal[
    "UNDEFINED",
    "ALWAYS_INCOMPATIBLE",
    "ALWAYS_COMPATIBLE",
    "BACKWARD",
    "FORWARD",
    "FULL",
    "BACKWARD_TRANSITIVE",
    "FORWARD_TRANSITIVE",
    "FULL_TRANSITIVE",
]
MAX_POLICIES_BYTES = 256 << 10
MAX_PROPERTIES = 1000
MAX_PROPERTIES_BYTES = 128 << 10
POLICY_DEFAULTS: Json = {
    "auth_policies": {"namespace_auth": {}, "destination_auth": {}, "subscription_auth_roles": {}},
    "replication_clusters": [],
    "allowed_clusters": [],
    "bundles": None,
    "backlog_quota_map": {},
    "topicDispatchRate": {},
    "subscriptionDispatchRate": {},
    "replicatorDispatchRate": {},
    "clusterSubscribeRate": {},
    "publishMaxMessageRate": {},
    "latency_stats_sample_rate": {},
    "subscription_expiration_time_minutes": None,
    "persistence": None,
    "deduplicationEnabled": None,
    "autoTopicCreationOverride": None,
    "autoSubscriptionCreationOverride": None,
    "message_ttl_in_seconds": None,
    "retention_policies": None,
    "deleted": False,
    "encryption_required": False,
    "delayed_delivery_policies": None,
    "inactive_topic_policies": None,
    "subscription_auth_mode": "None",
    "max_producers_per_topic": None,
    "max_consumers_per_topic": None,
    "max_consumers_per_subscription": None,
    "max_unacked_messages_per_consumer": None,
    "max_unacked_messages_per_subscription": None,
    "max_subscriptions_per_topic": None,
    "compaction_threshold": None,
    "offload_threshold": -1,
    "offload_threshold_in_seconds": -1,
    "max_topics_per_namespace": None,
    "schema_compatibility_strategy": "UNDEFINED",
    "is_allow_auto_update_schema": None,
    "schema_validation_enforced": False,
    "subscription_types_enabled": [],
    "properties": {},
    "deduplicationSnapshotIntervalSeconds": None,
    "resource_group_name": None,
    "migrated": False,
    "scalableTopicAutoScalePolicy": None,
    "entryFilters": None,
}


class Retention(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """How long acknowledged messages are kept: -1 is no limit, 0 is not at all."""

    retention_time_in_minutes: Int32 = 0
    retention_size_in_mb: Int32 = msgspec.field(default=0, name="retentionSizeInMB")


class AutoTopics(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """What happens when a client names a topic that does not exist."""

    allow_auto_topic_creation: bool = True
    topic_type: str = "non-partitioned"
    default_num_partitions: Int32 | None = None


class AutoSubscriptions(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Whether consumers may make subscriptions."""

    allow_auto_subscription_creation: bool


class AuthPolicies(msgspec.Struct, frozen=True):
    """Permissions, as a namespace is created with them."""

    namespace_auth: dict[str, list[str]] | None = None
    destination_auth: dict[str, dict[str, list[str]]] | None = None
    subscription_auth_roles: dict[str, list[str]] | None = None


SHAPES: dict[str, Any] = {
    "auth_policies": AuthPolicies,
    "replication_clusters": list[str],
    "allowed_clusters": list[str],
    "bundles": BundlesData,
    "deduplicationEnabled": bool,
    "autoTopicCreationOverride": AutoTopics,
    "autoSubscriptionCreationOverride": AutoSubscriptions,
    "retention_policies": Retention,
    "schema_compatibility_strategy": Strategy,
    "properties": Properties,
    "deleted": bool,
}
"""The policies that mean something here; others of Pulsar's can only have their default."""


def shown(policies: Json, bundles: list[Bundle]) -> Json:
    """Policies as they are answered: with the bundles that apply."""
    return policies | {"bundles": bundles_json(bundles)}


async def checked_policies(admin: Admin, policies: Json, allowed: list[str]) -> Json:
    """Policies given at creation, as they are to be stored."""
    found: Json = {}
    for key, value in policies.items():
        if value is None or key == "deleted":
            continue
        if key in SHAPES:
            found[key] = _checked(admin, key, convert(value, SHAPES[key], key), value)
        elif key in POLICY_DEFAULTS:
            if value not in (POLICY_DEFAULTS[key], {}, []):
                raise NotAllowed(f"The policy {key} is not applied by this version of Braid; leave it out.")
        else:
            found[key] = value
    if len(msgspec.json.encode(found)) > MAX_POLICIES_BYTES:
        raise TooLarge(f"The policies of a namespace may have {MAX_POLICIES_BYTES} bytes as JSON.")
    checked_properties(found.get("properties", {}))
    for key in ("replication_clusters", "allowed_clusters"):
        await check_clusters(admin, found.get(key, []), key, allowed)
    return found


def _checked(admin: Admin, key: str, typed: Any, value: Any) -> Any:
    if isinstance(typed, Retention):
        check_retention(typed)
    elif isinstance(typed, AutoTopics):
        return check_auto_topics(admin, typed)
    elif isinstance(typed, AuthPolicies):
        return msgspec.to_builtins(typed)
    return value


def checked_properties(properties: dict[str, str]) -> dict[str, str]:
    """Properties of a namespace, topic or subscription within their bounds."""
    if len(properties) > MAX_PROPERTIES:
        raise InvalidArgument(f"There may be at most {MAX_PROPERTIES} properties, not {len(properties)}.")
    if sum(len(key.encode()) + len(value.encode()) for key, value in properties.items()) > MAX_PROPERTIES_BYTES:
        raise TooLarge(f"All properties together may have {MAX_PROPERTIES_BYTES} bytes.")
    for key in properties:
        if not key.strip() or not key.isprintable():
            raise InvalidArgument(f"{key[:100]!r} cannot be the name of a property.")
    return properties


def check_retention(retention: Retention) -> None:
    minutes, size = retention.retention_time_in_minutes, retention.retention_size_in_mb
    if minutes < -1 or size < -1:
        raise InvalidArgument("Retention must be -1 (no limit), 0 (none) or a positive number of minutes and megabytes.")
    if (minutes == 0) != (size == 0):
        raise InvalidArgument("Retention by time and by size must be both 0 or both not 0; use -1 for no limit.")


def policy_of(retention: Retention) -> RetentionPolicies:
    """As it is stored."""
    return RetentionPolicies(
        retention_time_in_minutes=retention.retention_time_in_minutes, retention_size_in_mb=retention.retention_size_in_mb
    )


def check_auto_topics(admin: Admin, override: AutoTopics) -> Json:
    """The override as it is stored."""
    most = admin.service.config.max_partitions
    if override.topic_type not in ("partitioned", "non-partitioned"):
        raise InvalidArgument(f"topicType must be partitioned or non-partitioned, not {override.topic_type[:40]!r}.")
    partitions = override.default_num_partitions
    if partitions is not None and not 1 <= partitions <= most:
        raise InvalidArgument(f"defaultNumPartitions must be 1 to {most}, not {partitions}.")
    return {
        "allowAutoTopicCreation": override.allow_auto_topic_creation,
        "topicType": override.topic_type,
        "defaultNumPartitions": partitions or 1,
    }


async def check_clusters(admin: Admin, clusters: list[str], what: str, allowed: list[str]) -> None:
    """Clusters a namespace may name: they exist and the tenant is allowed there; data stays on this broker's own."""
    if len(clusters) > 100:
        raise BadRequest(f"{what} names {len(clusters)} clusters; 100 are allowed.")
    unknown = set(clusters) - set(await admin.service.namespaces.clusters())
    if unknown:
        raise InvalidArgument(f"There is no cluster {', '.join(sorted(unknown))[:200]}; {what} cannot name it.")
    own = admin.clusters.own
    if foreign := sorted(set(clusters) - {own}):
        raise NotAllowed(f"Nothing is replicated to {', '.join(foreign)[:200]} in this version; {what} can only name {own}.")
    if allowed and set(clusters) - set(allowed):
        raise InvalidArgument(f"The tenant is not allowed on {', '.join(sorted(set(clusters) - set(allowed)))[:200]}.")
