"""Records of scalable topics in the metadata store: paths and JSON (scalable.md 2), and what they become in memory.

The shapes are those of PIP-468 with extra fields; unknown fields are ignored on reading. Fields with a default are left out
when they have it, except where the default comes from a function: those are always written. Names are encoded once, here, on
their way into a path. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec

from braid.errors import BraidError
from braid.metadata.values import MAX_INT64, read_json, unreadable
from braid.model.hashranges import MAX_HASH, HashRange
from braid.model.layout import SegmentLayout
from braid.model.names import NamespaceName, TopicName, encode
from braid.model.names import decode as decode_name
from braid.model.retention import RetentionPolicies
from braid.model.routing import Routing
from braid.model.segments import NOT_SEALED, SegmentEnd, SegmentInfo, SegmentState
from braid.model.subscriptions import Initial as Initial

TOPICS: Final = "/topics"
REGULAR: Final = "/regular-topics"
"""Where stream consumers of regular topics are coordinated."""
ALL_TOPICS: Final = "scalable-topics"
"""Index of the records of all scalable topics."""
FORMAT_VERSION: Final = 1
MAX_PRUNED_ENDS: Final = 1024
"""Removed segments whose ends a topic's record remembers: those with the highest ids."""

Number = Annotated[int, msgspec.Meta(ge=0, le=MAX_INT64)]
Since = Annotated[int, msgspec.Meta(ge=-1, le=MAX_INT64)]
"""-1 = not yet, or never."""
Hash = Annotated[int, msgspec.Meta(ge=0, le=MAX_HASH)]
OperationKind = Literal["create", "delete", "split", "merge", "prune"]
SubscriptionOperation = Literal["create", "delete", "seek", "clear-backlog"]
SubscriptionKind = Literal["STREAM", "QUEUE", "CHECKPOINT"]


class RangeRecord(msgspec.Struct, frozen=True):
    """A hash range in JSON."""

    start: Hash
    end: Hash


class SegmentRecord(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """`SegmentInfo` in JSON, with the derived booleans that Pulsar writes."""

    segment_id: Number
    hash_range: RangeRecord
    state: SegmentState
    parent_ids: tuple[Number, ...]
    child_ids: tuple[Number, ...]
    created_at_epoch: Since
    sealed_at_epoch: Since
    created_at_ms: Number
    sealed_at_ms: Since
    legacy_topic_name: str | None = None


class PendingOperation(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """What the leader is doing to the topic (INV6); written before any segment is touched, removed when everything is done.

    `stage` says how far it is: `prepare` = the layout is still the old one; `finish` = the layout is the new one, and only the
    work behind it is left (late cursors, deletion of pruned segments)."""

    kind: OperationKind
    operation_id: str
    stage: Literal["prepare", "finish"] = "prepare"
    started_ms: Number = 0
    parents: tuple[Number, ...] = ()
    """Segments to be sealed (split, merge)."""
    children: tuple[SegmentRecord, ...] = ()
    """Segments to be created (split, merge, create)."""
    pruned: tuple[SegmentRecord, ...] = ()
    """Segments that left the layout and whose topics are still to be deleted (prune)."""

    def applied_to(self, layout: SegmentLayout, sealed_ms: int | None = None) -> SegmentLayout:
        """What a split or merge makes of the layout. Raises as `SegmentLayout.split` does, ValueError for a wrong number of
        parents."""
        if self.kind == "merge":
            first, second = self.parents
            return layout.merge(first, second, self.started_ms, sealed_ms=sealed_ms)
        (parent,) = self.parents
        return layout.split(parent, self.started_ms, sealed_ms=sealed_ms)


class ScalableTopicMetadata(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """`/topics/{tenant}/{namespace}/{encoded local name}`: the record that makes a scalable topic."""

    epoch: Number
    next_segment_id: Number
    segments: dict[Number, SegmentRecord]
    properties: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    auto_scale_policy: dict[str, Any] | None = None
    retention_policies: RetentionPolicies | None = None
    """Of the topic itself, for all its segments; None = its namespace's."""
    migrated_from: dict[str, Any] | None = None
    incarnation: str = ""
    routing: Routing = msgspec.field(default_factory=lambda: Routing.HIGH16)
    leader_epoch: Number = 0
    """Of the leader that claimed the record last (INV4)."""
    rested_epoch: Number = 0
    """Of the leader that left the topic because there was nothing to do; see `is_at_rest`."""
    pending_operation: PendingOperation | None = None
    created_ms: Number = 0
    format_version: int = msgspec.field(default_factory=lambda: FORMAT_VERSION)
    pruned_ends: dict[int, SegmentEnd] = {}
    """Where segments ended that are not in the layout any more: a reader that comes back learns whether it had read them."""

    def __post_init__(self) -> None:
        """Refuse what is no layout. Runs whenever one is read: everything else relies on it."""
        _check_segments(self.segments, self.next_segment_id)
        pending = self.pending_operation
        if pending is not None and pending.kind in ("split", "merge") and pending.stage == "prepare":
            _check_children(pending, self.layout)

    @property
    def layout(self) -> SegmentLayout:
        return SegmentLayout(
            self.epoch,
            self.next_segment_id,
            {number: from_record(each) for number, each in self.segments.items()},
            self.routing,
        )

    def with_layout(self, layout: SegmentLayout) -> ScalableTopicMetadata:
        """The same record, everything but the layout kept (scalable.md 2.2)."""
        return msgspec.structs.replace(
            self,
            epoch=layout.epoch,
            next_segment_id=layout.next_segment_id,
            segments={number: to_record(each) for number, each in layout.all_segments.items()},
        )

    def without(self, doomed: Iterable[int], ends: Mapping[int, SegmentEnd]) -> ScalableTopicMetadata:
        """The same record without these sealed segments; their ends are remembered as far as they are known, and their keys."""
        gone, layout = set(doomed), self.layout
        known = self.pruned_ends | {
            number: msgspec.structs.replace(end, hash_range=layout.segment(number).hash_range)
            for number, end in ends.items()
            if number in gone
        }
        newest = sorted(known)[-MAX_PRUNED_ENDS:]
        return msgspec.structs.replace(
            self.with_layout(layout.prune(gone)), pruned_ends={number: known[number] for number in newest}
        )

    @property
    def is_at_rest(self) -> bool:
        """Whether the last leader left nothing to do, so that nobody needs to lead the topic until somebody uses it. Whoever
        leads claims the record first, which ends this."""
        return self.pending_operation is None and 0 < self.rested_epoch == self.leader_epoch

    @property
    def is_deleting(self) -> bool:
        return self.pending_operation is not None and self.pending_operation.kind == "delete"


class SubscriptionChange(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """What the leader is doing to a subscription (INV6)."""

    kind: SubscriptionOperation
    operation_id: str
    timestamp_ms: Number = 0
    """Target of a seek."""
    started_ms: Number = 0


class SubscriptionMetadata(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """`.../subscriptions/{encoded name}`."""

    type: SubscriptionKind = msgspec.field(default_factory=lambda: "STREAM")
    initial: Initial = "earliest"
    created_at_epoch: Since = -1
    """Layout epoch when it was made: segments created later start at Earliest for it, whatever a consumer asks for (L-07)."""
    created_ms: Number = 0
    pending: SubscriptionChange | None = None
    leader_epoch: Number = 0
    incarnation: str = ""
    """Of the topic it was made for; empty for a regular topic's (INV5)."""
    resets: Number = 0
    """How often a seek or clear-backlog was finished, so that a consumer that was away learns of it."""
    places: dict[int, bytes] = {}
    """Of a checkpoint group: where it stands, by segment, as its members said last (`handover.py`)."""
    empty_since_ms: int | None = None
    """Of a checkpoint group: since when it has no members, once its leader has noticed."""
    partitions: Number = 0
    """Of a checkpoint group of a regular topic: how many that had when the group was made; it reads later ones from their
    beginning. 0: not known, or a scalable topic."""
    logs: dict[int, str] = {}
    """Of a checkpoint group of a regular topic: which log each partition was, by incarnation; places are in these (INV5)."""

    @property
    def is_resetting(self) -> bool:
        return self.pending is not None and self.pending.kind in ("seek", "clear-backlog")

    def is_foreign(self, incarnation: str) -> bool:
        """Whether it was left behind by an earlier topic of the name: then it is garbage, as if it were not there."""
        return bool(self.incarnation and incarnation) and self.incarnation != incarnation

    def mark(self, incarnation: str) -> str:
        """What tells the registrations of this subscription from those of an earlier one of the name."""
        return f"{incarnation}:{self.created_ms}"


class RegistrationRecord(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """`.../subscriptions/{name}/consumers/{encoded consumer name}`: the durable session; `{}` is valid (D-5)."""

    epoch: Since = -1
    """Layout epoch of the last assignment."""
    segments: tuple[Number, ...] = ()
    absent_since_ms: Number | None = None
    """Written once, by a new leader that restores the registration without a connection (hole 15)."""
    leader_epoch: Number = 0
    mark: str = ""
    """Of the subscription it belongs to (INV5); one without a mark belongs to whichever there is."""


R = TypeVar("R", ScalableTopicMetadata, SubscriptionMetadata, RegistrationRecord)


def partitions_of(kind: SubscriptionKind, layout: SegmentLayout) -> int:
    """What the record of a subscription that is made now says of partitions."""
    return len(layout.all_segments) if kind == "CHECKPOINT" and layout.routing is Routing.MOD_N else 0


def _check_segments(segments: Mapping[int, SegmentRecord], next_id: int) -> None:
    """Raise ValueError unless ids are what they are listed by and have been given out, and the active ranges cover every hash
    once."""
    active = []
    for number, each in segments.items():
        if each.segment_id != number or number >= next_id:
            raise ValueError(f"segment {each.segment_id} is listed as {number}, and the next one is {next_id}")
        if each.hash_range.start > each.hash_range.end:
            raise ValueError(f"the range of segment {number} ends before it begins")
        if each.state is SegmentState.ACTIVE:
            if each.legacy_topic_name is not None:
                return  # partitions share hashes
            active.append((each.hash_range.start, each.hash_range.end))
    expected = 0
    for start, end in sorted(active):
        if start != expected:
            raise ValueError(f"the active ranges do not follow each other at {min(start, expected):04x}")
        expected = end + 1
    if active and expected != MAX_HASH + 1:
        raise ValueError(f"no active segment covers the hashes from {expected:04x} on")


def _check_children(pending: PendingOperation, layout: SegmentLayout) -> None:
    """Raise ValueError unless they are what the operation makes of its parents (INV6)."""
    try:
        new = pending.applied_to(layout)
    except BraidError as error:
        raise ValueError(f"its {pending.kind} is none: {error.message}") from None
    made = tuple(to_record(new.segment(each)) for each in range(layout.next_segment_id, new.next_segment_id))
    if made != pending.children:
        raise ValueError(f"the children of its {pending.kind} do not come from their parents")


def to_record(segment: SegmentInfo) -> SegmentRecord:
    return SegmentRecord(
        segment_id=segment.segment_id,
        hash_range=RangeRecord(segment.hash_range.start, segment.hash_range.end),
        state=segment.state,
        parent_ids=segment.parent_ids,
        child_ids=segment.child_ids,
        created_at_epoch=segment.created_at_epoch,
        sealed_at_epoch=segment.sealed_at_epoch,
        created_at_ms=segment.created_at_ms,
        sealed_at_ms=segment.sealed_at_ms,
        legacy_topic_name=segment.legacy_topic_name,
    )


def from_record(record: SegmentRecord) -> SegmentInfo:
    return SegmentInfo(
        segment_id=record.segment_id,
        hash_range=HashRange.of(record.hash_range.start, record.hash_range.end),
        state=record.state,
        parent_ids=record.parent_ids,
        child_ids=record.child_ids,
        created_at_epoch=record.created_at_epoch,
        sealed_at_epoch=record.sealed_at_epoch if record.state is SegmentState.SEALED else NOT_SEALED,
        created_at_ms=record.created_at_ms,
        sealed_at_ms=record.sealed_at_ms if record.state is SegmentState.SEALED else NOT_SEALED,
        legacy_topic_name=record.legacy_topic_name,
    )


def namespace_path(namespace: NamespaceName) -> str:
    """The collection of a namespace's scalable topics."""
    return f"{TOPICS}/{namespace.tenant}/{namespace.local_name}"


def topic_path(topic: TopicName, root: str = TOPICS) -> str:
    """The record of a scalable topic; with `REGULAR` the place of a regular topic's coordination."""
    return f"{root}/{topic.tenant}/{topic.namespace_portion}/{encode(topic.scalable.local_name)}"


def controller_path(topic: TopicName, root: str = TOPICS) -> str:
    return f"{topic_path(topic, root)}/controller"


def subscriptions_path(topic: TopicName, root: str = TOPICS) -> str:
    return f"{topic_path(topic, root)}/subscriptions"


def subscription_path(topic: TopicName, subscription: str, root: str = TOPICS) -> str:
    return f"{subscriptions_path(topic, root)}/{encode(subscription)}"


def consumers_path(topic: TopicName, subscription: str, root: str = TOPICS) -> str:
    return f"{subscription_path(topic, subscription, root)}/consumers"


def consumer_path(topic: TopicName, subscription: str, consumer: str, root: str = TOPICS) -> str:
    return f"{consumers_path(topic, subscription, root)}/{encode(consumer)}"


def topic_of(key: str) -> TopicName:
    """The topic whose record this is; the inverse of `topic_path`."""
    _, tenant, namespace, local = key.removeprefix("/").split("/")
    return TopicName.parse(f"topic://{tenant}/{namespace}/{decode_name(local)}")


def index_of(namespace: NamespaceName, properties: Mapping[str, str]) -> dict[str, str]:
    """Index entries of a topic's record: one that every topic has, and one for each property (settled.md)."""
    return {ALL_TOPICS: f"{encode(namespace.tenant)}:{encode(namespace.local_name)}"} | {
        property_index(name): property_key(namespace, value) for name, value in properties.items()
    }


def property_index(name: str) -> str:
    return f"prop:{encode(name)}"


def property_key(namespace: NamespaceName, value: str) -> str:
    return f"{encode(namespace.tenant)}:{encode(namespace.local_name)}:{encode(value)}"


def decode(kind: type[R], key: str, value: bytes) -> R:
    """A record from JSON; StoreMismatch if it cannot be read."""
    found = read_json(kind, key, value or b"{}")
    if _lacks_segments(found):
        raise unreadable(key, "it has no segments, and none are being made")
    return found


def _lacks_segments(found: object) -> bool:
    if not isinstance(found, ScalableTopicMetadata) or found.segments:
        return False
    return found.pending_operation is None or found.pending_operation.kind not in ("create", "delete")
