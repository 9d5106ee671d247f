"""Operations on scalable topics and their segments. Pure."""

from __future__ import annotations

from types import NoneType

from braid.client.admin_scalable_types import (
    ScalableTopicInfo,
    ScalableTopicStats,
    SealedSegment,
    SegmentBacklogStats,
    SegmentCreation,
    SegmentLoad,
)
from braid.client.admin_types import Retention
from braid.client.operation import ROOT, Operation

LIST = f"{ROOT}/scalable/{{tenant}}/{{namespace}}"
TOPIC = f"{LIST}/{{topic}}"
SUBSCRIPTION = f"{TOPIC}/subscriptions/{{subscription}}"
SEGMENT = f"{ROOT}/segments/{{tenant}}/{{namespace}}/{{topic}}/{{descriptor}}"
SEGMENT_SUBSCRIPTION = f"{SEGMENT}/subscription/{{subscription}}"
EXAMPLE = "segment://public/default/orders/0000-7fff-0"

# Scalable topics.

SCALABLE_LIST = Operation(
    "scalable-topics",
    "list",
    "GET",
    LIST,
    list[str],
    "Scalable topics of a namespace; with properties only those that have all of them.",
    "acme/sales --property team=billing",
    query=("property",),
)
SCALABLE_CREATE = Operation(
    "scalable-topics",
    "create",
    "PUT",
    TOPIC,
    NoneType,
    "Create a scalable topic.",
    "topic://public/default/orders --segments 2",
    query=("numInitialSegments", "routing"),
    body=dict[str, str],
)
SCALABLE_METADATA = Operation(
    "scalable-topics",
    "get-metadata",
    "GET",
    TOPIC,
    ScalableTopicInfo,
    "The layout of a scalable topic: all its segments, what they came from and what became of them.",
    "orders",
)
SCALABLE_STATS = Operation(
    "scalable-topics",
    "stats",
    "GET",
    f"{TOPIC}/stats",
    ScalableTopicStats,
    "Rates and backlog of each segment, consumers of each subscription and what holds them up.",
    "orders",
    member="get_stats",
)
SCALABLE_RETENTION = Operation(
    "scalable-topics",
    "get-retention",
    "GET",
    f"{TOPIC}/retention",
    Retention,
    "How long a scalable topic keeps acknowledged messages, if it has a policy of its own.",
    "orders --applied",
    query=("applied",),
)
SCALABLE_SET_RETENTION = Operation(
    "scalable-topics",
    "set-retention",
    "POST",
    f"{TOPIC}/retention",
    NoneType,
    "Keep acknowledged messages for a time and up to a size; -1 is no limit. Less than before deletes messages.",
    "orders --minutes 1440 --megabytes -1 --yes",
    body=Retention,
    is_destructive=True,
    may_repeat=True,
)
SCALABLE_REMOVE_RETENTION = Operation(
    "scalable-topics",
    "remove-retention",
    "DELETE",
    f"{TOPIC}/retention",
    NoneType,
    "Let the namespace say how long a scalable topic keeps acknowledged messages.",
    "orders --yes",
    is_destructive=True,
    may_repeat=True,
)
SCALABLE_DELETE = Operation(
    "scalable-topics",
    "delete",
    "DELETE",
    TOPIC,
    NoneType,
    "Delete a scalable topic with its segments, messages and subscriptions.",
    "orders --yes",
    query=("force",),
    is_destructive=True,
)
SCALABLE_SPLIT = Operation(
    "scalable-topics",
    "split-segment",
    "POST",
    f"{TOPIC}/split/{{segment}}",
    NoneType,
    "Split an active segment into two halves; clients follow by themselves.",
    "orders 0",
)
SCALABLE_MERGE = Operation(
    "scalable-topics",
    "merge-segments",
    "POST",
    f"{TOPIC}/merge/{{segment}}/{{other}}",
    NoneType,
    "Merge two active segments whose ranges touch; clients follow by themselves.",
    "orders 1 2",
)
SCALABLE_CREATE_SUBSCRIPTION = Operation(
    "scalable-topics",
    "create-subscription",
    "PUT",
    SUBSCRIPTION,
    NoneType,
    "Create a subscription on all segments of a scalable topic.",
    "orders audit --kind queue --at earliest",
    query=("type", "initial"),
    may_repeat=True,
)
SCALABLE_DELETE_SUBSCRIPTION = Operation(
    "scalable-topics",
    "delete-subscription",
    "DELETE",
    SUBSCRIPTION,
    NoneType,
    "Delete a subscription from all segments of a scalable topic; its consumers are closed.",
    "orders audit --yes",
    is_destructive=True,
)
SCALABLE_SEEK = Operation(
    "scalable-topics",
    "seek",
    "POST",
    f"{SUBSCRIPTION}/seek",
    NoneType,
    "Put a subscription to a time on all segments.",
    "orders audit 2h --yes. Also: earliest, 90m or 2d (ago), 2026-01-31T12:00:00Z",
    query=("timestamp",),
    is_destructive=True,
    may_repeat=True,
)
SCALABLE_CLEAR_BACKLOG = Operation(
    "scalable-topics",
    "clear-backlog",
    "POST",
    f"{SUBSCRIPTION}/skip-all",
    NoneType,
    "Skip the whole backlog of a subscription on all segments.",
    "orders audit --yes",
    is_destructive=True,
    may_repeat=True,
)
SCALABLE_REMOVE_CONSUMER = Operation(
    "scalable-topics",
    "remove-consumer",
    "DELETE",
    f"{SUBSCRIPTION}/consumers/{{consumer}}",
    NoneType,
    "Remove the registration of a consumer that is gone, also one whose record cannot be read.",
    "orders audit worker-7 --yes",
    is_destructive=True,
)

# Segments: what the brokers do to each other's segments. All may be sent again.

SEGMENTS_CREATE = Operation(
    "segments",
    "create",
    "PUT",
    SEGMENT,
    NoneType,
    "Make the topic of a segment that the layout lists, if it is missing.",
    EXAMPLE,
    body=SegmentCreation,
    may_repeat=True,
)
SEGMENTS_TERMINATE = Operation(
    "segments",
    "terminate",
    "POST",
    f"{SEGMENT}/terminate",
    SealedSegment,
    "Seal a segment by hand: it takes no more messages. Use split-segment or merge-segments unless you repair something.",
    f"{EXAMPLE} --force --yes",
    query=("force", "epoch", "incarnation"),
    is_destructive=True,
    may_repeat=True,
)
SEGMENTS_DELETE = Operation(
    "segments",
    "delete",
    "DELETE",
    SEGMENT,
    NoneType,
    "Delete a segment's topic with its messages; a missing one is fine.",
    f"{EXAMPLE} --force --yes",
    query=("force", "epoch", "incarnation"),
    is_destructive=True,
    may_repeat=True,
)
SEGMENTS_SUBSCRIPTIONS = Operation(
    "segments", "subscriptions", "GET", f"{SEGMENT}/subscriptions", list[str], "Subscriptions that a segment has.", EXAMPLE
)
SEGMENTS_STATS = Operation(
    "segments",
    "stats",
    "GET",
    f"{SEGMENT}/stats",
    SegmentLoad,
    "Rates and backlog of one segment, as its owner sees them.",
    EXAMPLE,
)
SEGMENTS_SETTLE = Operation(
    "segments",
    "settle",
    "POST",
    f"{SEGMENT}/settle",
    NoneType,
    "Finish what transactions that ended have left on one segment; done by itself, too.",
    EXAMPLE,
    may_repeat=True,
)
SEGMENTS_CREATE_SUBSCRIPTION = Operation(
    "segments",
    "create-subscription",
    "PUT",
    SEGMENT_SUBSCRIPTION,
    NoneType,
    "Make the cursor of a subscription on one segment, if it is missing.",
    f"{EXAMPLE} audit",
    query=("initial",),
    may_repeat=True,
)
SEGMENTS_DELETE_SUBSCRIPTION = Operation(
    "segments",
    "delete-subscription",
    "DELETE",
    SEGMENT_SUBSCRIPTION,
    NoneType,
    "Remove the cursor of a subscription from one segment; a missing one is fine.",
    f"{EXAMPLE} audit --yes",
    is_destructive=True,
    may_repeat=True,
)
SEGMENTS_BACKLOG = Operation(
    "segments",
    "backlog",
    "GET",
    f"{SEGMENT_SUBSCRIPTION}/backlog",
    SegmentBacklogStats,
    "What a subscription has left in one segment.",
    f"{EXAMPLE} audit",
    query=("detail",),
)
SEGMENTS_SEEK = Operation(
    "segments",
    "seek",
    "POST",
    f"{SEGMENT_SUBSCRIPTION}/seek",
    NoneType,
    "Put a subscription to a time on one segment.",
    f"{EXAMPLE} audit 2h --yes",
    query=("timestamp",),
    is_destructive=True,
    may_repeat=True,
)
SEGMENTS_SKIP_ALL = Operation(
    "segments",
    "skip-all",
    "POST",
    f"{SEGMENT_SUBSCRIPTION}/skip-all",
    NoneType,
    "Skip the whole backlog of a subscription on one segment.",
    f"{EXAMPLE} audit --yes",
    is_destructive=True,
    may_repeat=True,
)
