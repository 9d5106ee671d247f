"""REST: clusters and tenants."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from braid.errors import InvalidArgument, NotAllowed
from braid.web.admin import Admin
from braid.web.calls import Ask, Calls, Query, word_of

Json = dict[str, Any]
FORCE = Query("force", "Also if it is in use or not empty", bool, False)
Text = Annotated[str, msgspec.Meta(max_length=4096)]
MAX_NAMES = 1000
Names = Annotated[list[Annotated[str, msgspec.Meta(max_length=1000)]], msgspec.Meta(max_length=MAX_NAMES)]


class ClusterData(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """Addresses of a cluster; fields of Pulsar that are not listed are ignored."""

    service_url: Text | None = None
    service_url_tls: Text | None = None
    broker_service_url: Text | None = None
    broker_service_url_tls: Text | None = None
    proxy_service_url: Text | None = None
    proxy_protocol: Text | None = None
    peer_cluster_names: Names | None = None
    listener_name: Text | None = None


class TenantInfo(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Who administers a tenant, and where it may be."""

    admin_roles: Names | None = None
    allowed_clusters: Names | None = None


def cluster_calls(admin: Admin) -> Calls:
    """Calls below `/clusters`."""
    calls = Calls("clusters")
    names, clusters = admin.service.namespaces, admin.clusters

    @calls.get("/clusters", list[str])
    async def list_clusters(ask: Ask) -> Any:
        """Names of the clusters."""
        return await names.clusters()

    @calls.get("/clusters/{cluster}", ClusterData)
    async def get_cluster(ask: Ask) -> Any:
        """Addresses of a cluster."""
        name = _cluster(ask)
        stored = await clusters.get(name)
        if name != clusters.own:
            return stored
        return {"serviceUrl": admin.http_url, "brokerServiceUrl": admin.service.service_url} | stored

    @calls.put("/clusters/{cluster}", status=200, body=ClusterData, body_default=ClusterData())
    async def create_cluster(ask: Ask) -> None:
        """Write down a cluster. Nothing is replicated to it in this version."""
        await clusters.create(_cluster(ask), await checked(ask.body))

    @calls.post("/clusters/{cluster}", status=200, body=ClusterData)
    async def update_cluster(ask: Ask) -> None:
        """Change the addresses of a cluster."""
        await clusters.update(_cluster(ask), await checked(ask.body))

    @calls.delete("/clusters/{cluster}")
    async def delete_cluster(ask: Ask) -> None:
        """Forget a cluster; the broker's own and one that tenants are allowed on stay."""
        name = _cluster(ask)
        await clusters.get(name)
        for tenant in await names.tenants():
            if name in (await names.tenant(tenant)).get("allowedClusters", []):
                raise InvalidArgument(f"The tenant {tenant} is allowed on the cluster {name}; take it off first.")
        await clusters.delete(name)

    async def checked(data: ClusterData) -> Json:
        unknown = set(data.peer_cluster_names or []) - set(await names.clusters())
        if unknown:
            raise InvalidArgument(f"There is no cluster {', '.join(sorted(unknown))}; peerClusterNames cannot name it.")
        for url in (data.service_url, data.service_url_tls, data.broker_service_url, data.broker_service_url_tls):
            if url and "://" not in url:
                raise InvalidArgument(f"{url[:100]!r} is no URL; write it with its scheme, such as http://host:8080.")
        values: Json = msgspec.to_builtins(data)
        return values

    return calls


def tenant_calls(admin: Admin) -> Calls:
    """Calls below `/tenants`."""
    calls = Calls("tenants")
    names = admin.service.namespaces

    @calls.get("/tenants", list[str])
    async def list_tenants(ask: Ask) -> Any:
        """Names of the tenants."""
        return await names.tenants()

    @calls.get("/tenants/{tenant}", TenantInfo)
    async def get_tenant(ask: Ask) -> Any:
        """Roles and clusters of a tenant."""
        return await names.tenant(ask.tenant)

    async def info_of(info: TenantInfo) -> Json:
        clusters = info.allowed_clusters or []
        if not clusters:
            raise InvalidArgument("A tenant needs at least one allowed cluster (allowedClusters).")
        known = await names.clusters()
        unknown = sorted(set(clusters) - set(known))
        if unknown:
            raise InvalidArgument(f"There is no cluster {', '.join(unknown)[:200]}; known: {', '.join(known)}.")
        if any(not role.strip() or not role.isprintable() for role in info.admin_roles or []):
            raise InvalidArgument("An admin role may not be empty, nor hold control characters.")
        return {"adminRoles": sorted(set(info.admin_roles or [])), "allowedClusters": sorted(set(clusters))}

    @calls.put("/tenants/{tenant}", body=TenantInfo, body_default=TenantInfo())
    async def create_tenant(ask: Ask) -> None:
        """Create a tenant that is allowed on at least one cluster."""
        await names.create_tenant(ask.tenant, await info_of(ask.body))

    @calls.post("/tenants/{tenant}", body=TenantInfo)
    async def update_tenant(ask: Ask) -> None:
        """Change the roles and clusters of a tenant."""
        await names.update_tenant(ask.tenant, await info_of(ask.body))

    @calls.delete("/tenants/{tenant}", query=(FORCE,), statuses=(405,))
    async def delete_tenant(ask: Ask) -> None:
        """Delete a tenant without namespaces; `force` is off in this version."""
        name = ask.tenant
        if ask.query["force"]:
            raise NotAllowed(f"Deleting the tenant {name} with everything in it is off; delete its namespaces first.")
        await names.delete_tenant(name)

    return calls


def _cluster(ask: Ask) -> str:
    return word_of(ask.text("cluster"), "the name of a cluster")
