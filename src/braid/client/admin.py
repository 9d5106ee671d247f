"""`AdminClient`: tenants, namespaces, topics, subscriptions, transactions, sinks, brokers and bundles of a cluster, typed.

    async with AdminClient("http://localhost:8080") as admin:
        await admin.topics.create("orders", partitions=4)
        stats = await admin.topics.partitioned_stats("orders")

One method per operation of `braid.client.operations`; what a broker refuses is raised as an error of `braid.errors` with the
broker's own words and its HTTP status (`http_status`). `braid.client.blocking.AdminClient` is the same without `await`.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from braid.client import operations_cluster as ops
from braid.client.admin_calls import Calls, Names, given, namespace_parts
from braid.client.admin_namespaces import Namespaces
from braid.client.admin_scalable import ScalableTopics, Segments
from braid.client.admin_sinks import Sinks
from braid.client.admin_topics import Subscriptions, Topics
from braid.client.admin_transactions import Transactions
from braid.client.admin_transport import AdminTransport, parse_urls
from braid.client.admin_types import (
    BrokerTopics,
    ClusterData,
    Leader,
    LoadReport,
    OwnedBundle,
    TenantInfo,
)
from braid.errors import ConfigError, NotFound

DEFAULT_TIMEOUT = 30.0


class Clusters(Calls):
    """The clusters that are known."""

    async def list(self) -> Names:
        """Names of the clusters."""
        return await self._call(ops.CLUSTERS_LIST, {})

    async def get(self, cluster: str) -> ClusterData:
        """Addresses of a cluster."""
        return await self._call(ops.CLUSTERS_GET, {"cluster": given("cluster", cluster)})

    async def create(self, cluster: str, *, service_url: str | None = None, broker_service_url: str | None = None) -> None:
        """Make a cluster known by its addresses: admin API and binary protocol."""
        body = ClusterData(service_url=service_url, broker_service_url=broker_service_url)
        await self._call(ops.CLUSTERS_CREATE, {"cluster": given("cluster", cluster)}, body=body)

    async def update(self, cluster: str, *, service_url: str | None = None, broker_service_url: str | None = None) -> None:
        """Replace the addresses of a cluster."""
        body = ClusterData(service_url=service_url, broker_service_url=broker_service_url)
        await self._call(ops.CLUSTERS_UPDATE, {"cluster": given("cluster", cluster)}, body=body)

    async def delete(self, cluster: str) -> None:
        """Forget a cluster that nobody uses."""
        await self._call(ops.CLUSTERS_DELETE, {"cluster": given("cluster", cluster)})


class Tenants(Calls):
    """Tenants: the owners of namespaces."""

    async def list(self) -> Names:
        """Names of the tenants."""
        return await self._call(ops.TENANTS_LIST, {})

    async def get(self, tenant: str) -> TenantInfo:
        """Administrators and clusters of a tenant."""
        return await self._call(ops.TENANTS_GET, {"tenant": given("tenant", tenant)})

    async def create(self, tenant: str, *, admin_roles: Sequence[str] = (), clusters: Sequence[str] = ()) -> None:
        """Create a tenant; without clusters it may use all of them."""
        body = await self._info(admin_roles, clusters)
        await self._call(ops.TENANTS_CREATE, {"tenant": given("tenant", tenant)}, body=body)

    async def update(self, tenant: str, *, admin_roles: Sequence[str] = (), clusters: Sequence[str] = ()) -> None:
        """Replace the administrators and clusters of a tenant."""
        body = await self._info(admin_roles, clusters)
        await self._call(ops.TENANTS_UPDATE, {"tenant": given("tenant", tenant)}, body=body)

    async def delete(self, tenant: str) -> None:
        """Delete a tenant without namespaces."""
        await self._call(ops.TENANTS_DELETE, {"tenant": given("tenant", tenant)})

    async def _info(self, admin_roles: Sequence[str], clusters: Sequence[str]) -> TenantInfo:
        allowed = [*clusters] or await self._call(ops.CLUSTERS_LIST, {})
        return TenantInfo(admin_roles=[*admin_roles], allowed_clusters=allowed)


class Bundles(Calls):
    """The parts of a namespace that brokers own, such as `0x00000000_0x40000000`."""

    async def list(self, namespace: str) -> Names:
        """The bundles of a namespace."""
        return (await self._call(ops.BUNDLES_LIST, namespace_parts(namespace))).names

    async def unload(self, namespace: str, bundle: str) -> None:
        """Give a bundle away: its clients look their topics up again."""
        await self._call(ops.BUNDLES_UNLOAD, _bundle_parts(namespace, bundle))

    async def transfer(self, namespace: str, bundle: str, broker: str) -> None:
        """Give a bundle to a certain broker (`host:port` of its admin API)."""
        query = {"destinationBroker": given("broker", broker)}
        await self._call(ops.BUNDLES_TRANSFER, _bundle_parts(namespace, bundle), query)

    async def split(self, namespace: str, bundle: str, *, unload: bool = False) -> None:
        """Split a bundle by half; with `unload` the halves are given away at once."""
        await self._call(ops.BUNDLES_SPLIT, _bundle_parts(namespace, bundle), {"unload": unload})


class Brokers(Calls):
    """The brokers of the cluster; a broker's id is `host:port` of its admin API."""

    async def list(self) -> Names:
        """The brokers that are up."""
        return await self._call(ops.BROKERS_LIST, {})

    async def leader(self) -> Leader:
        """The broker that leads the cluster."""
        return await self._call(ops.BROKERS_LEADER, {})

    async def health(self, *, broker: str | None = None) -> str:
        """`ok` if the broker that is asked, or the one told, can work; an error says why not."""
        return await self._call(ops.BROKERS_HEALTH, {}, {"brokerId": broker})

    async def warnings(self, *, broker: str | None = None) -> Sequence[str]:
        """What should be looked at while the broker that is asked, or the one told, is healthy; sentences."""
        return await self._call(ops.BROKERS_WARNINGS, {}, {"brokerId": broker})

    async def ready(self) -> str:
        """`ok` as soon as the broker serves."""
        return await self._call(ops.BROKERS_READY, {})

    async def version(self) -> str:
        """The version the broker runs."""
        return await self._call(ops.BROKERS_VERSION, {})

    async def owned(self, broker: str) -> dict[str, OwnedBundle]:
        """The bundles a broker owns, by `tenant/namespace/bundle`."""
        given("broker", broker)
        refused = NotFound(f"The broker {broker} belongs to no cluster.")
        for cluster in await self._call(ops.CLUSTERS_LIST, {}):
            try:
                return await self._call(ops.BROKERS_OWNED, {"cluster": cluster, "broker": broker})
            except NotFound as error:  # of another cluster, or not there
                if broker in error.message:
                    raise
                refused = error
        raise refused

    async def configuration(self) -> dict[str, str]:
        """The settings of the broker."""
        return await self._call(ops.BROKERS_CONFIGURATION, {})

    async def topics(self) -> BrokerTopics:
        """Stats of every topic the asked broker serves: namespace, bundle, `persistent`, topic."""
        return await self._call(ops.BROKERS_TOPICS, {})

    async def load(self) -> LoadReport:
        """How much the asked broker serves."""
        return await self._call(ops.BROKERS_LOAD, {})

    async def drain(self, broker: str) -> None:
        """Let a broker give everything it owns away and take nothing, so that it can be stopped; returns when it has none."""
        await self._call(ops.BROKERS_DRAIN, {"broker": given("broker", broker)})

    async def undrain(self, broker: str) -> None:
        """Let a drained broker take part again."""
        await self._call(ops.BROKERS_UNDRAIN, {"broker": given("broker", broker)})


class AdminClient:
    """Administers a cluster over HTTP; `async with` closes it.

    `urls` is one address or several; the next one is asked when one is down. `timeout` is for a whole call, in seconds.
    """

    def __init__(self, urls: str | Sequence[str] = "http://localhost:8080", *, timeout: float = DEFAULT_TIMEOUT) -> None:
        if not 0 < timeout <= 86_400:
            raise ConfigError(f"The timeout of an admin client must be above 0 and at most 86,400 seconds, not {timeout}.")
        self._transport = AdminTransport(parse_urls(urls), timeout)
        self.clusters = Clusters(self._transport)
        self.tenants = Tenants(self._transport)
        self.namespaces = Namespaces(self._transport)
        self.topics = Topics(self._transport)
        self.subscriptions = Subscriptions(self._transport)
        self.brokers = Brokers(self._transport)
        self.bundles = Bundles(self._transport)
        self.scalable_topics = ScalableTopics(self._transport)
        self.segments = Segments(self._transport)
        self.transactions = Transactions(self._transport)
        self.sinks = Sinks(self._transport)

    @property
    def urls(self) -> Sequence[str]:
        """The addresses that are asked."""
        return self._transport.urls

    async def __aenter__(self) -> AdminClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        await self._transport.close()


def _bundle_parts(namespace: str, bundle: str) -> dict[str, str]:
    return {**namespace_parts(namespace), "bundle": given("bundle", bundle)}
