"""Operations on topics and their subscriptions. Pure."""

from __future__ import annotations

from types import NoneType

from braid.client.admin_types import (
    Id,
    InternalStats,
    Lookup,
    PartitionedInternalStats,
    PartitionedTopicStats,
    Partitions,
    ResetPosition,
    Retention,
    TopicStats,
)
from braid.client.operation import ROOT, Operation

LIST = f"{ROOT}/persistent/{{tenant}}/{{namespace}}"
TOPIC = f"{LIST}/{{topic}}"
SUBSCRIPTION = f"{TOPIC}/subscription/{{subscription}}"
LOOKUP = "/lookup/v2/topic/{domain}/{tenant}/{namespace}/{topic}"

# Topics.

TOPICS_LIST = Operation("topics", "list", "GET", LIST, list[str], "Topics of a namespace, partitions one by one.", "acme/sales")
TOPICS_PARTITIONED = Operation(
    "topics", "partitioned", "GET", f"{LIST}/partitioned", list[str], "Partitioned topics of a namespace.", "acme/sales"
)
TOPICS_CREATE = Operation(
    "topics",
    "create",
    "PUT",
    TOPIC,
    NoneType,
    "Create a topic, with partitions or plain.",
    "orders --partitions 4",
    body=dict[str, str],
)
TOPICS_CREATE_PARTITIONED = Operation(
    "topics", "create", "PUT", f"{TOPIC}/partitions", NoneType, "Create a partitioned topic.", body=int
)
TOPICS_DELETE = Operation(
    "topics",
    "delete",
    "DELETE",
    TOPIC,
    NoneType,
    "Delete topics with their messages and subscriptions.",
    "orders --yes",
    query=("force",),
    is_destructive=True,
)
TOPICS_DELETE_PARTITIONED = Operation(
    "topics",
    "delete",
    "DELETE",
    f"{TOPIC}/partitions",
    NoneType,
    "Delete a partitioned topic.",
    query=("force",),
    is_destructive=True,
)
TOPICS_PARTITIONS = Operation(
    "topics",
    "partitions",
    "GET",
    f"{TOPIC}/partitions",
    Partitions,
    "Number of partitions of a topic; 0 for a plain one.",
    "orders",
)
TOPICS_GROW = Operation(
    "topics",
    "grow",
    "POST",
    f"{TOPIC}/partitions",
    NoneType,
    "Add partitions to a partitioned topic; keys move to other partitions.",
    "orders 8",
    body=int,
    may_repeat=True,
)
TOPICS_STATS = Operation(
    "topics", "stats", "GET", f"{TOPIC}/stats", TopicStats, "Rates, backlog and clients of a topic.", "orders"
)
TOPICS_PARTITIONED_STATS = Operation(
    "topics",
    "partitioned-stats",
    "GET",
    f"{TOPIC}/partitioned-stats",
    PartitionedTopicStats,
    "The same for a partitioned topic: sums and each partition.",
    "orders",
    query=("perPartition",),
)
TOPICS_INTERNAL_STATS = Operation(
    "topics",
    "internal-stats",
    "GET",
    f"{TOPIC}/internalStats",
    InternalStats,
    "Ledgers and cursors of a topic.",
    "orders-partition-0",
)
TOPICS_PARTITIONED_INTERNAL_STATS = Operation(
    "topics",
    "partitioned-internal-stats",
    "GET",
    f"{TOPIC}/partitioned-internalStats",
    PartitionedInternalStats,
    "Ledgers and cursors of each partition of a topic.",
    "orders",
)
TOPICS_LOOKUP = Operation("topics", "lookup", "GET", LOOKUP, Lookup, "The broker that serves a topic.", "orders")
TOPICS_BUNDLE = Operation("topics", "bundle", "GET", f"{LOOKUP}/bundle", str, "The bundle a topic is in.", "orders")
TOPICS_UNLOAD = Operation(
    "topics",
    "unload",
    "PUT",
    f"{TOPIC}/unload",
    NoneType,
    "Close a topic, so that its clients look it up again.",
    "orders",
    may_repeat=True,
)
TOPICS_TERMINATE = Operation(
    "topics",
    "terminate",
    "POST",
    f"{TOPIC}/terminate",
    Id,
    "End a topic for good: it takes no more messages. Shows the last message id.",
    "orders --yes",
    is_destructive=True,
    may_repeat=True,
)
TOPICS_TERMINATE_PARTITIONS = Operation(
    "topics",
    "terminate-partitions",
    "POST",
    f"{TOPIC}/terminate/partitions",
    dict[str, Id],
    "End all partitions of a topic for good. Shows the last message id of each.",
    "orders --yes",
    is_destructive=True,
    may_repeat=True,
)
TOPICS_CREATE_MISSED_PARTITIONS = Operation(
    "topics",
    "create-missed-partitions",
    "POST",
    f"{TOPIC}/createMissedPartitions",
    NoneType,
    "Create the partitions of a topic that do not exist yet; usually they come to be on first use.",
    "orders",
    may_repeat=True,
)
TOPICS_TRIM = Operation(
    "topics",
    "trim",
    "POST",
    f"{TOPIC}/trim",
    NoneType,
    "Delete now what no subscription needs and retention does not keep.",
    "orders",
    may_repeat=True,
)
TOPICS_TRUNCATE = Operation(
    "topics",
    "truncate",
    "DELETE",
    f"{TOPIC}/truncate",
    NoneType,
    "Skip the backlog of all subscriptions of a topic and delete what retention does not keep.",
    "orders --yes",
    is_destructive=True,
)
TOPICS_LAST_MESSAGE_ID = Operation(
    "topics", "last-message-id", "GET", f"{TOPIC}/lastMessageId", Id, "Id of the newest message of a topic.", "orders"
)
TOPICS_MESSAGE = Operation(
    "topics",
    "message",
    "GET",
    f"{TOPIC}/ledger/{{ledger}}/entry/{{entry}}",
    bytes,
    "One stored message by its id, ledger:entry.",
    "orders 7:42",
)
TOPICS_PERMISSIONS = Operation(
    "topics",
    "permissions",
    "GET",
    f"{TOPIC}/permissions",
    dict[str, list[str]],
    "What each role may do with a topic, its namespace's permissions included.",
    "orders",
)
TOPICS_GRANT = Operation(
    "topics",
    "grant",
    "POST",
    f"{TOPIC}/permissions/{{role}}",
    NoneType,
    "Let a role do something with a topic.",
    "orders billing --action consume",
    body=list[str],
    may_repeat=True,
)
TOPICS_REVOKE = Operation(
    "topics",
    "revoke",
    "DELETE",
    f"{TOPIC}/permissions/{{role}}",
    NoneType,
    "Take all permissions on a topic from a role.",
    "orders billing",
)
TOPICS_RETENTION = Operation(
    "topics",
    "retention",
    "GET",
    f"{TOPIC}/retention",
    Retention,
    "How long a topic keeps acknowledged messages, if it has a policy of its own.",
    "orders --applied",
    query=("applied",),
)
TOPICS_SET_RETENTION = Operation(
    "topics",
    "set-retention",
    "POST",
    f"{TOPIC}/retention",
    NoneType,
    "Keep a topic's acknowledged messages for a time and up to a size; -1 is no limit. Less than before deletes messages.",
    "orders --minutes 1440 --megabytes -1 --yes",
    body=Retention,
    is_destructive=True,
    may_repeat=True,
)
TOPICS_REMOVE_RETENTION = Operation(
    "topics",
    "remove-retention",
    "DELETE",
    f"{TOPIC}/retention",
    NoneType,
    "Let the namespace say how long a topic keeps acknowledged messages.",
    "orders --yes",
    is_destructive=True,
    may_repeat=True,
)
TOPICS_PROPERTIES = Operation(
    "topics", "properties", "GET", f"{TOPIC}/properties", dict[str, str], "The properties of a topic.", "orders"
)
TOPICS_SET_PROPERTIES = Operation(
    "topics",
    "set-properties",
    "PUT",
    f"{TOPIC}/properties",
    NoneType,
    "Set properties of a topic; others stay.",
    "orders owner=billing tier=1",
    body=dict[str, str],
    may_repeat=True,
)
TOPICS_REMOVE_PROPERTY = Operation(
    "topics",
    "remove-property",
    "DELETE",
    f"{TOPIC}/properties",
    NoneType,
    "Remove a property of a topic.",
    "orders tier",
    query=("key",),
)

# Subscriptions. On a partitioned topic: those of all its partitions.

SUBSCRIPTIONS_LIST = Operation(
    "subscriptions", "list", "GET", f"{TOPIC}/subscriptions", list[str], "Names of a topic's subscriptions.", "orders"
)
SUBSCRIPTIONS_CREATE = Operation(
    "subscriptions",
    "create",
    "PUT",
    SUBSCRIPTION,
    NoneType,
    "Create a subscription.",
    "orders audit --at earliest",
    body=ResetPosition,
)
SUBSCRIPTIONS_DELETE = Operation(
    "subscriptions",
    "delete",
    "DELETE",
    SUBSCRIPTION,
    NoneType,
    "Delete a subscription.",
    "orders audit --yes",
    query=("force",),
    is_destructive=True,
)
SUBSCRIPTIONS_SKIP = Operation(
    "subscriptions",
    "skip",
    "POST",
    f"{SUBSCRIPTION}/skip/{{count}}",
    NoneType,
    "Skip the next messages of a subscription.",
    "orders audit 10 --yes",
    is_destructive=True,
)
SUBSCRIPTIONS_SKIP_ALL = Operation(
    "subscriptions",
    "skip-all",
    "POST",
    f"{SUBSCRIPTION}/skip_all",
    NoneType,
    "Skip the whole backlog of a subscription.",
    "orders audit --yes",
    is_destructive=True,
    may_repeat=True,
)
SUBSCRIPTIONS_RESET = Operation(
    "subscriptions",
    "reset",
    "POST",
    f"{SUBSCRIPTION}/resetcursor",
    NoneType,
    "Put a subscription to an end of the topic, a message or a time.",
    "orders audit earliest --yes. Also: latest, 7:42 (a message), 90m, 12h or 2d (ago), 2026-01-31T12:00:00Z",
    body=ResetPosition,
    is_destructive=True,
    may_repeat=True,
)
SUBSCRIPTIONS_RESET_TO_TIME = Operation(
    "subscriptions",
    "reset",
    "POST",
    f"{SUBSCRIPTION}/resetcursor/{{timestamp}}",
    NoneType,
    "Put a subscription to a time.",
    is_destructive=True,
    may_repeat=True,
)
SUBSCRIPTIONS_PEEK = Operation(
    "subscriptions",
    "peek",
    "GET",
    f"{SUBSCRIPTION}/position/{{position}}",
    bytes,
    "Look at a message a subscription has not acknowledged, without consuming it; 1 is the next one.",
    "orders audit --count 3",
)
SUBSCRIPTIONS_EXPIRE = Operation(
    "subscriptions",
    "expire",
    "POST",
    f"{SUBSCRIPTION}/expireMessages/{{seconds}}",
    NoneType,
    "Skip the messages of a subscription that are older than so many seconds.",
    "orders audit 3600 --yes",
    is_destructive=True,
)
SUBSCRIPTIONS_EXPIRE_ALL = Operation(
    "subscriptions",
    "expire-all",
    "POST",
    f"{TOPIC}/all_subscription/expireMessages/{{seconds}}",
    NoneType,
    "The same for every subscription of a topic.",
    "orders 3600 --yes",
    is_destructive=True,
)
SUBSCRIPTIONS_PROPERTIES = Operation(
    "subscriptions",
    "properties",
    "GET",
    f"{SUBSCRIPTION}/properties",
    dict[str, str],
    "The properties of a subscription.",
    "orders audit",
)
SUBSCRIPTIONS_SET_PROPERTIES = Operation(
    "subscriptions",
    "set-properties",
    "PUT",
    f"{SUBSCRIPTION}/properties",
    NoneType,
    "Replace the properties of a subscription.",
    "orders audit owner=billing",
    body=dict[str, str],
    may_repeat=True,
)
