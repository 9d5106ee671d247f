"""REST: clusters, tenants, namespaces and the namespace policies that this version applies or keeps."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import delete, get, post, put
from litestar.enums import MediaType
from litestar.response import Response

from braid.broker.namespaces import AutoTopicCreation, RetentionPolicies
from braid.errors import InvalidArgument, NotAllowed, NotFound
from braid.model.names import NamespaceName, decode
from braid.web.admin import Admin, BadRequest, Part, Req, body_of, convert, flag, namespace_of, tenant_of

Json = dict[str, Any]
NAMESPACE = "/namespaces/{tenant:str}/{namespace:str}"
MODES = ("PERSISTENT", "NON_PERSISTENT", "ALL")
STRATEGIES = (
    "UNDEFINED",
    "ALWAYS_INCOMPATIBLE",
    "ALWAYS_COMPATIBLE",
    "BACKWARD",
    "FORWARD",
    "FULL",
    "BACKWARD_TRANSITIVE",
    "FORWARD_TRANSITIVE",
    "FULL_TRANSITIVE",
)
POLICY_DEFAULTS: Json = {
    "auth_policies": {"namespace_auth": {}, "destination_auth": {}, "subscription_auth_roles": {}},
    "replication_clusters": [],
    "allowed_clusters": [],
    "bundles": {"boundaries": ["0x00000000", "0xffffffff"], "numBundles": 1},
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


class TenantInfo(msgspec.Struct, frozen=True, rename="camel"):
    """Who administers a tenant, and where it may be."""

    admin_roles: list[str] | None = None
    allowed_clusters: list[str] | None = None


class AutoSubscriptionCreation(msgspec.Struct, frozen=True, rename="camel"):
    """Whether consumers may make subscriptions."""

    allow_auto_subscription_creation: bool


def cluster_and_tenant_routes(admin: Admin) -> list[Any]:
    """Clusters and tenants."""
    names = admin.service.namespaces

    @get("/clusters")
    async def list_clusters() -> list[str]:
        """Names of the clusters."""
        return await names.clusters()

    @get("/clusters/{cluster:str}")
    async def get_cluster(cluster: Part) -> Json:
        """Addresses of a cluster."""
        if decode(cluster) not in await names.clusters():
            raise NotFound(f"The cluster {decode(cluster)} does not exist.")
        return {"serviceUrl": admin.http_url, "brokerServiceUrl": admin.service.service_url}

    @get("/tenants")
    async def list_tenants() -> list[str]:
        """Names of the tenants."""
        return await names.tenants()

    @get("/tenants/{tenant:str}")
    async def get_tenant(tenant: Part) -> Json:
        """Roles and clusters of a tenant."""
        return await names.tenant(tenant_of(tenant))

    async def info_of(request: Req) -> Json:
        info = await body_of(request, TenantInfo, TenantInfo())
        clusters = info.allowed_clusters or []
        if not clusters:
            raise InvalidArgument("A tenant needs at least one allowed cluster (allowedClusters).")
        unknown = set(clusters) - set(await names.clusters())
        if unknown:
            raise InvalidArgument(f"There is no cluster {', '.join(sorted(unknown))}; known: {await names.clusters()}.")
        if any(not role.strip() for role in info.admin_roles or []):
            raise InvalidArgument("An admin role may not be empty.")
        return {"adminRoles": sorted(set(info.admin_roles or [])), "allowedClusters": sorted(set(clusters))}

    @put("/tenants/{tenant:str}", status_code=204)
    async def create_tenant(tenant: Part, request: Req) -> None:
        """Create a tenant. Body: `adminRoles`, `allowedClusters`."""
        await names.create_tenant(tenant_of(tenant), await info_of(request))

    @post("/tenants/{tenant:str}", status_code=204)
    async def update_tenant(tenant: Part, request: Req) -> None:
        """Change a tenant. Body: `adminRoles`, `allowedClusters`."""
        await names.update_tenant(tenant_of(tenant), await info_of(request))

    @delete("/tenants/{tenant:str}")
    async def delete_tenant(tenant: Part, request: Req) -> None:
        """Delete a tenant without namespaces."""
        if flag(request, "force"):
            raise NotAllowed("Deleting a tenant with everything in it is off; delete its namespaces first.")
        await names.delete_tenant(tenant_of(tenant))

    return [list_clusters, get_cluster, list_tenants, get_tenant, create_tenant, update_tenant, delete_tenant]


def namespace_routes(admin: Admin) -> list[Any]:
    """Namespaces themselves."""
    service = admin.service

    @get("/namespaces/{tenant:str}")
    async def list_namespaces(tenant: Part) -> list[str]:
        """Names of a tenant's namespaces."""
        return await service.namespaces.namespaces(tenant_of(tenant))

    @get(NAMESPACE)
    async def get_policies(tenant: Part, namespace: Part) -> Json:
        """All policies of a namespace."""
        return POLICY_DEFAULTS | (await service.namespaces.policies(namespace_of(tenant, namespace))).values

    @put(NAMESPACE, status_code=204)
    async def create_namespace(tenant: Part, namespace: Part, request: Req) -> None:
        """Create a namespace. Body: policies, or nothing."""
        name = namespace_of(tenant, namespace)
        policies = await body_of(request, dict[str, Any] | None, {}) or {}  # type: ignore[arg-type]
        await service.namespaces.create_namespace(name, await checked_policies(admin, policies))

    @delete(NAMESPACE)
    async def delete_namespace(tenant: Part, namespace: Part, request: Req) -> None:
        """Delete a namespace without topics."""
        name = namespace_of(tenant, namespace)
        if flag(request, "force"):
            raise NotAllowed(f"Deleting {name} with everything in it is off; delete its topics first.")
        await service.delete_namespace(name)

    @get(f"{NAMESPACE}/topics")
    async def topics(tenant: Part, namespace: Part, request: Req) -> list[str]:
        """Topics of a namespace, partitions one by one; `mode` is PERSISTENT, NON_PERSISTENT or ALL."""
        mode = request.query_params.get("mode", "PERSISTENT").upper()
        if mode not in MODES:
            raise BadRequest(f"The query parameter mode must be one of {', '.join(MODES)}.")
        found = await service.list_topics(namespace_of(tenant, namespace))
        return found if mode != "NON_PERSISTENT" else []

    return [list_namespaces, get_policies, create_namespace, delete_namespace, topics]


async def checked_policies(admin: Admin, policies: Json) -> Json:
    """Policies given at creation: those the broker reads must have their shape, the others are kept as they are."""
    clusters = policies.get("replication_clusters")
    if clusters is not None:
        unknown = set(convert(clusters, list[str], "replication_clusters")) - set(await admin.service.namespaces.clusters())
        if unknown:
            raise InvalidArgument(f"There is no cluster {', '.join(sorted(unknown))}; replication_clusters cannot name it.")
    for key, kind in (
        ("retention_policies", RetentionPolicies),
        ("autoTopicCreationOverride", AutoTopicCreation),
        ("autoSubscriptionCreationOverride", AutoSubscriptionCreation),
        ("deduplicationEnabled", bool),
    ):
        if policies.get(key) is not None:
            convert(policies[key], kind, key)
    return {key: value for key, value in policies.items() if value is not None}


async def change(admin: Admin, name: NamespaceName, key: str, value: Any) -> None:
    """Set one policy (None removes it) and apply it to the topics that are loaded."""
    await admin.service.namespaces.set_policy(name, key, value)
    await admin.service.policies_changed(name)


async def stored(admin: Admin, tenant: str, namespace: str, key: str) -> Response[bytes]:
    """One policy as it was set; 204 if it was not."""
    policies = await admin.service.namespaces.policies(namespace_of(tenant, namespace))
    value = policies.values.get(key, POLICY_DEFAULTS.get(key))
    if value is None:
        return Response(b"", status_code=204)
    return Response(msgspec.json.encode(value), media_type=MediaType.JSON)


def policy_routes(admin: Admin) -> list[Any]:
    """Deduplication and retention of a namespace."""

    @get(f"{NAMESPACE}/deduplication")
    async def get_deduplication(tenant: Part, namespace: Part) -> Response[bytes]:
        """Whether deduplication is on; 204 if the broker's setting applies."""
        return await stored(admin, tenant, namespace, "deduplicationEnabled")

    @post(f"{NAMESPACE}/deduplication", status_code=204)
    async def set_deduplication(tenant: Part, namespace: Part, request: Req) -> None:
        """Switch deduplication. Body: true or false."""
        await change(admin, namespace_of(tenant, namespace), "deduplicationEnabled", await body_of(request, bool))

    @delete(f"{NAMESPACE}/deduplication")
    async def remove_deduplication(tenant: Part, namespace: Part) -> None:
        """Let the broker's setting apply."""
        await change(admin, namespace_of(tenant, namespace), "deduplicationEnabled", None)

    @get(f"{NAMESPACE}/retention")
    async def get_retention(tenant: Part, namespace: Part) -> Response[bytes]:
        """How long acknowledged messages are kept; 204 if the broker's setting applies."""
        return await stored(admin, tenant, namespace, "retention_policies")

    @post(f"{NAMESPACE}/retention", status_code=204)
    async def set_retention(tenant: Part, namespace: Part, request: Req) -> None:
        """Keep acknowledged messages. Body: `retentionTimeInMinutes`, `retentionSizeInMB`; -1 is no limit."""
        retention = await body_of(request, RetentionPolicies)
        minutes, size = retention.retention_time_in_minutes, retention.retention_size_in_mb
        if not (-1 <= minutes < 1 << 31 and -1 <= size < 1 << 31):
            raise InvalidArgument("Retention must be -1 (no limit), 0 (none) or a positive number of minutes and megabytes.")
        if (minutes == 0) != (size == 0):
            raise InvalidArgument("Retention by time and by size must be both 0 or both not 0; use -1 for no limit.")
        await change(admin, namespace_of(tenant, namespace), "retention_policies", msgspec.to_builtins(retention))

    @delete(f"{NAMESPACE}/retention")
    async def remove_retention(tenant: Part, namespace: Part) -> None:
        """Let the broker's setting apply."""
        await change(admin, namespace_of(tenant, namespace), "retention_policies", None)

    return [get_deduplication, set_deduplication, remove_deduplication, get_retention, set_retention, remove_retention]


def creation_routes(admin: Admin) -> list[Any]:
    """How topics and schemas come to be in a namespace."""
    service = admin.service

    @get(f"{NAMESPACE}/autoTopicCreation")
    async def get_auto_topics(tenant: Part, namespace: Part) -> Response[bytes]:
        """How topics come to be on first use; 204 if the broker's setting applies."""
        return await stored(admin, tenant, namespace, "autoTopicCreationOverride")

    @post(f"{NAMESPACE}/autoTopicCreation", status_code=204)
    async def set_auto_topics(tenant: Part, namespace: Part, request: Req) -> None:
        """Body: `allowAutoTopicCreation`, `topicType`, `defaultNumPartitions`."""
        override = await body_of(request, AutoTopicCreation)
        if override.topic_type not in ("partitioned", "non-partitioned"):
            raise InvalidArgument(f"topicType must be partitioned or non-partitioned, not {override.topic_type[:40]!r}.")
        if not 1 <= override.default_num_partitions <= service.config.max_partitions:
            raise InvalidArgument(f"defaultNumPartitions must be 1 to {service.config.max_partitions}.")
        await change(admin, namespace_of(tenant, namespace), "autoTopicCreationOverride", msgspec.to_builtins(override))

    @delete(f"{NAMESPACE}/autoTopicCreation")
    async def remove_auto_topics(tenant: Part, namespace: Part) -> None:
        """Let the broker's setting apply."""
        await change(admin, namespace_of(tenant, namespace), "autoTopicCreationOverride", None)

    @get(f"{NAMESPACE}/schemaCompatibilityStrategy")
    async def get_strategy(tenant: Part, namespace: Part) -> Response[bytes]:
        """The compatibility strategy that was set."""
        return await stored(admin, tenant, namespace, "schema_compatibility_strategy")

    @put(f"{NAMESPACE}/schemaCompatibilityStrategy", status_code=204)
    async def set_strategy(tenant: Part, namespace: Part, request: Req) -> None:
        """Kept, not applied: schemas are stored without compatibility rules in this version."""
        strategy = await body_of(request, str)
        if strategy not in STRATEGIES:
            raise InvalidArgument(f"{strategy[:40]!r} is no compatibility strategy; known: {', '.join(STRATEGIES)}.")
        await service.namespaces.set_policy(namespace_of(tenant, namespace), "schema_compatibility_strategy", strategy)

    return [get_auto_topics, set_auto_topics, remove_auto_topics, get_strategy, set_strategy]
