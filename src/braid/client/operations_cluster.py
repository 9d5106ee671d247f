"""Operations on clusters, tenants, bundles and brokers. Pure."""

from __future__ import annotations

from types import NoneType

from braid.client.admin_types import (
    BrokerTopics,
    Bundles,
    ClusterData,
    Leader,
    LoadReport,
    OwnedBundle,
    TenantInfo,
)
from braid.client.operation import ROOT, Operation

NAMESPACE = f"{ROOT}/namespaces/{{tenant}}/{{namespace}}"
BUNDLE = f"{NAMESPACE}/{{bundle}}"

# Clusters and tenants.

CLUSTERS_LIST = Operation("clusters", "list", "GET", f"{ROOT}/clusters", list[str], "Names of the clusters.")
CLUSTERS_GET = Operation(
    "clusters", "get", "GET", f"{ROOT}/clusters/{{cluster}}", ClusterData, "Addresses of a cluster.", "standalone"
)
CLUSTERS_CREATE = Operation(
    "clusters",
    "create",
    "PUT",
    f"{ROOT}/clusters/{{cluster}}",
    NoneType,
    "Make a cluster known.",
    "west --service-url http://west:8080 --broker-service-url pulsar://west:6650",
    body=ClusterData,
)
CLUSTERS_UPDATE = Operation(
    "clusters",
    "update",
    "POST",
    f"{ROOT}/clusters/{{cluster}}",
    NoneType,
    "Replace the addresses of a cluster.",
    "west --service-url http://west:8080",
    body=ClusterData,
    may_repeat=True,
)
CLUSTERS_DELETE = Operation(
    "clusters",
    "delete",
    "DELETE",
    f"{ROOT}/clusters/{{cluster}}",
    NoneType,
    "Forget a cluster that nobody uses.",
    "west --yes",
    is_destructive=True,
)
TENANTS_LIST = Operation("tenants", "list", "GET", f"{ROOT}/tenants", list[str], "Names of the tenants.")
TENANTS_GET = Operation(
    "tenants", "get", "GET", f"{ROOT}/tenants/{{tenant}}", TenantInfo, "Administrators and clusters of a tenant.", "public"
)
TENANTS_CREATE = Operation(
    "tenants",
    "create",
    "PUT",
    f"{ROOT}/tenants/{{tenant}}",
    NoneType,
    "Create a tenant; without clusters it may use all of them.",
    "acme --admin-role ops",
    body=TenantInfo,
)
TENANTS_UPDATE = Operation(
    "tenants",
    "update",
    "POST",
    f"{ROOT}/tenants/{{tenant}}",
    NoneType,
    "Replace the administrators and clusters of a tenant.",
    "acme --admin-role ops --admin-role sre",
    body=TenantInfo,
    may_repeat=True,
)
TENANTS_DELETE = Operation(
    "tenants",
    "delete",
    "DELETE",
    f"{ROOT}/tenants/{{tenant}}",
    NoneType,
    "Delete a tenant without namespaces.",
    "acme --yes",
    is_destructive=True,
)

# Bundles: the parts of a namespace that brokers own.

BUNDLES_LIST = Operation("bundles", "list", "GET", f"{NAMESPACE}/bundles", Bundles, "The bundles of a namespace.", "acme/sales")
BUNDLES_UNLOAD = Operation(
    "bundles",
    "unload",
    "PUT",
    f"{BUNDLE}/unload",
    NoneType,
    "Give a bundle away: its clients look their topics up again.",
    "acme/sales 0x00000000_0x40000000",
    query=("destinationBroker",),
    may_repeat=True,
)
BUNDLES_TRANSFER = Operation(
    "bundles",
    "transfer",
    "PUT",
    f"{BUNDLE}/unload",
    NoneType,
    "Give a bundle to a certain broker.",
    "acme/sales 0x00000000_0x40000000 broker-2:8080",
    query=("destinationBroker",),
    may_repeat=True,
)
BUNDLES_SPLIT = Operation(
    "bundles",
    "split",
    "PUT",
    f"{BUNDLE}/split",
    NoneType,
    "Split a bundle by half; bundles cannot be joined again.",
    "acme/sales 0x00000000_0x40000000 --yes",
    query=("unload",),
    is_destructive=True,
)

# Brokers.

BROKERS_LIST = Operation("brokers", "list", "GET", f"{ROOT}/brokers", list[str], "The brokers that are up.")
BROKERS_LEADER = Operation(
    "brokers", "leader", "GET", f"{ROOT}/brokers/leaderBroker", Leader, "The broker that leads the cluster."
)
BROKERS_HEALTH = Operation(
    "brokers",
    "health",
    "GET",
    f"{ROOT}/brokers/health",
    str,
    "`ok` if a broker can work: it reads and writes its stores.",
    "--broker localhost:8080",
    query=("brokerId",),
)
BROKERS_WARNINGS = Operation(
    "brokers",
    "warnings",
    "GET",
    f"{ROOT}/brokers/warnings",
    list[str],
    "What should be looked at while a broker is healthy.",
    "--broker localhost:8080",
    query=("brokerId",),
)
BROKERS_READY = Operation("brokers", "ready", "GET", f"{ROOT}/brokers/ready", str, "`ok` as soon as the broker serves.")
BROKERS_VERSION = Operation("brokers", "version", "GET", f"{ROOT}/brokers/version", str, "The version the broker runs.")
BROKERS_OWNED = Operation(
    "brokers",
    "owned",
    "GET",
    f"{ROOT}/brokers/{{cluster}}/{{broker}}/ownedNamespaces",
    dict[str, OwnedBundle],
    "The bundles a broker owns.",
    "localhost:8080",
)
BROKERS_CONFIGURATION = Operation(
    "brokers", "configuration", "GET", f"{ROOT}/brokers/configuration/runtime", dict[str, str], "The settings of the broker."
)
BROKERS_TOPICS = Operation(
    "brokers", "topics", "GET", f"{ROOT}/broker-stats/topics", BrokerTopics, "Stats of every topic the asked broker serves."
)
BROKERS_LOAD = Operation(
    "brokers", "load", "GET", f"{ROOT}/broker-stats/load-report", LoadReport, "How much the asked broker serves."
)
BROKERS_DRAIN = Operation(
    "brokers",
    "drain",
    "POST",
    f"{ROOT}/brokers/{{broker}}/drain",
    NoneType,
    "Let a broker give everything it owns away and take nothing, so that it can be stopped.",
    "localhost:8080",
    may_repeat=True,
)
BROKERS_UNDRAIN = Operation(
    "brokers",
    "undrain",
    "POST",
    f"{ROOT}/brokers/{{broker}}/undrain",
    NoneType,
    "Let a drained broker take part again.",
    "localhost:8080",
    may_repeat=True,
)
