"""Operations on namespaces and their policies. Pure."""

from __future__ import annotations

from types import NoneType

from braid.client.admin_types import (
    AutoSubscriptionCreation,
    AutoTopicCreation,
    Json,
    Retention,
)
from braid.client.operation import ROOT, Operation

NAMESPACE = f"{ROOT}/namespaces/{{tenant}}/{{namespace}}"

NAMESPACES_LIST = Operation(
    "namespaces", "list", "GET", f"{ROOT}/namespaces/{{tenant}}", list[str], "Names of a tenant's namespaces.", "public"
)
NAMESPACES_CREATE = Operation(
    "namespaces", "create", "PUT", NAMESPACE, NoneType, "Create a namespace.", "acme/sales --bundles 8", body=Json
)
NAMESPACES_DELETE = Operation(
    "namespaces",
    "delete",
    "DELETE",
    NAMESPACE,
    NoneType,
    "Delete a namespace without topics; with --force also its topics.",
    "acme/sales --yes",
    is_destructive=True,
)
NAMESPACES_POLICIES = Operation("namespaces", "policies", "GET", NAMESPACE, Json, "All policies of a namespace.", "acme/sales")
NAMESPACES_UNLOAD = Operation(
    "namespaces",
    "unload",
    "PUT",
    f"{NAMESPACE}/unload",
    NoneType,
    "Give all bundles of a namespace away: clients look their topics up again.",
    "acme/sales",
    may_repeat=True,
)
NAMESPACES_TOPICS = Operation(
    "namespaces",
    "topics",
    "GET",
    f"{NAMESPACE}/topics",
    list[str],
    "Topics of a namespace, partitions one by one.",
    "acme/sales",
    query=("mode",),
)
NAMESPACES_PERMISSIONS = Operation(
    "namespaces",
    "permissions",
    "GET",
    f"{NAMESPACE}/permissions",
    dict[str, list[str]],
    "What each role may do in a namespace.",
    "acme/sales",
)
NAMESPACES_GRANT = Operation(
    "namespaces",
    "grant",
    "POST",
    f"{NAMESPACE}/permissions/{{role}}",
    NoneType,
    "Let a role do something in a namespace.",
    "acme/sales billing --action produce --action consume",
    body=list[str],
    may_repeat=True,
)
NAMESPACES_REVOKE = Operation(
    "namespaces",
    "revoke",
    "DELETE",
    f"{NAMESPACE}/permissions/{{role}}",
    NoneType,
    "Take all permissions in a namespace from a role.",
    "acme/sales billing",
    may_repeat=True,
)
NAMESPACES_RETENTION = Operation(
    "namespaces",
    "retention",
    "GET",
    f"{NAMESPACE}/retention",
    Retention,
    "How long acknowledged messages are kept.",
    "acme/sales",
)
NAMESPACES_SET_RETENTION = Operation(
    "namespaces",
    "set-retention",
    "POST",
    f"{NAMESPACE}/retention",
    NoneType,
    "Keep acknowledged messages for a time and up to a size; -1 is no limit. Less than before deletes messages.",
    "acme/sales --minutes 1440 --megabytes -1 --yes",
    body=Retention,
    is_destructive=True,
    may_repeat=True,
)
NAMESPACES_REMOVE_RETENTION = Operation(
    "namespaces",
    "remove-retention",
    "DELETE",
    f"{NAMESPACE}/retention",
    NoneType,
    "Let the broker's setting say how long acknowledged messages are kept.",
    "acme/sales --yes",
    is_destructive=True,
    may_repeat=True,
)
NAMESPACES_DEDUPLICATION = Operation(
    "namespaces", "deduplication", "GET", f"{NAMESPACE}/deduplication", bool, "Whether deduplication is on.", "acme/sales"
)
NAMESPACES_SET_DEDUPLICATION = Operation(
    "namespaces",
    "set-deduplication",
    "POST",
    f"{NAMESPACE}/deduplication",
    NoneType,
    "Switch deduplication on, or off with --disable.",
    "acme/sales",
    body=bool,
    may_repeat=True,
)
NAMESPACES_REMOVE_DEDUPLICATION = Operation(
    "namespaces",
    "remove-deduplication",
    "DELETE",
    f"{NAMESPACE}/deduplication",
    NoneType,
    "Let the broker's setting say whether deduplication is on.",
    "acme/sales",
    may_repeat=True,
)
NAMESPACES_AUTO_TOPICS = Operation(
    "namespaces",
    "auto-topics",
    "GET",
    f"{NAMESPACE}/autoTopicCreation",
    AutoTopicCreation,
    "Whether and how topics come to be on first use.",
    "acme/sales",
)
NAMESPACES_SET_AUTO_TOPICS = Operation(
    "namespaces",
    "set-auto-topics",
    "POST",
    f"{NAMESPACE}/autoTopicCreation",
    NoneType,
    "Let topics come to be on first use, or not with --disable.",
    "acme/sales --partitions 4",
    body=AutoTopicCreation,
    may_repeat=True,
)
NAMESPACES_REMOVE_AUTO_TOPICS = Operation(
    "namespaces",
    "remove-auto-topics",
    "DELETE",
    f"{NAMESPACE}/autoTopicCreation",
    NoneType,
    "Let the broker's setting say how topics come to be.",
    "acme/sales",
    may_repeat=True,
)

NAMESPACES_AUTO_SUBSCRIPTIONS = Operation(
    "namespaces",
    "auto-subscriptions",
    "GET",
    f"{NAMESPACE}/autoSubscriptionCreation",
    AutoSubscriptionCreation,
    "Whether subscriptions come to be on first use.",
    "acme/sales",
)
NAMESPACES_SET_AUTO_SUBSCRIPTIONS = Operation(
    "namespaces",
    "set-auto-subscriptions",
    "POST",
    f"{NAMESPACE}/autoSubscriptionCreation",
    NoneType,
    "Let subscriptions come to be on first use, or not with --disable.",
    "acme/sales --disable",
    body=AutoSubscriptionCreation,
    may_repeat=True,
)
NAMESPACES_REMOVE_AUTO_SUBSCRIPTIONS = Operation(
    "namespaces",
    "remove-auto-subscriptions",
    "DELETE",
    f"{NAMESPACE}/autoSubscriptionCreation",
    NoneType,
    "Let the broker's setting say whether subscriptions come to be.",
    "acme/sales",
    may_repeat=True,
)
NAMESPACES_SCHEMA_STRATEGY = Operation(
    "namespaces",
    "schema-strategy",
    "GET",
    f"{NAMESPACE}/schemaCompatibilityStrategy",
    str,
    "Which changes of a schema are compatible.",
    "acme/sales",
)
NAMESPACES_SET_SCHEMA_STRATEGY = Operation(
    "namespaces",
    "set-schema-strategy",
    "PUT",
    f"{NAMESPACE}/schemaCompatibilityStrategy",
    NoneType,
    "Say which changes of a schema are compatible.",
    "acme/sales FORWARD",
    body=str,
    may_repeat=True,
)
NAMESPACES_PROPERTIES = Operation(
    "namespaces", "properties", "GET", f"{NAMESPACE}/properties", dict[str, str], "The properties of a namespace.", "acme/sales"
)
NAMESPACES_SET_PROPERTIES = Operation(
    "namespaces",
    "set-properties",
    "PUT",
    f"{NAMESPACE}/properties",
    NoneType,
    "Set properties of a namespace; others stay.",
    "acme/sales team=billing",
    body=dict[str, str],
    may_repeat=True,
)
NAMESPACES_REMOVE_PROPERTIES = Operation(
    "namespaces",
    "remove-properties",
    "DELETE",
    f"{NAMESPACE}/properties",
    NoneType,
    "Remove all properties of a namespace.",
    "acme/sales --yes",
    is_destructive=True,
    may_repeat=True,
)
NAMESPACES_CLEAR_BACKLOG = Operation(
    "namespaces",
    "clear-backlog",
    "POST",
    f"{NAMESPACE}/clearBacklog",
    NoneType,
    "Skip the backlog of all subscriptions in a namespace, or of those with one name.",
    "acme/sales --subscription audit --yes",
    is_destructive=True,
    may_repeat=True,
)
NAMESPACES_CLEAR_BACKLOG_OF = Operation(
    "namespaces",
    "clear-backlog",
    "POST",
    f"{NAMESPACE}/clearBacklog/{{subscription}}",
    NoneType,
    "Skip the backlog of the subscriptions with one name.",
    is_destructive=True,
    may_repeat=True,
)
NAMESPACES_UNSUBSCRIBE = Operation(
    "namespaces",
    "unsubscribe",
    "POST",
    f"{NAMESPACE}/unsubscribe/{{subscription}}",
    NoneType,
    "Delete a subscription from every topic of a namespace.",
    "acme/sales audit --yes",
    is_destructive=True,
)
