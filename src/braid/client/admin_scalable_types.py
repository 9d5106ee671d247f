"""What the admin API says of scalable topics and segments, as types. Unknown fields are ignored. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from braid.client.messages import MessageId
from braid.model.hashranges import HashRange
from braid.model.retention import NextTrim


class _Answer(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A JSON object of the admin API."""


class Hashes(_Answer, frozen=True):
    """The hashes a segment covers, both ends included."""

    start: int
    end: int

    def __str__(self) -> str:
        return HashRange(self.start, self.end).hex


class SegmentNode(_Answer, frozen=True):
    """One segment of a layout."""

    segment_id: int
    hash_range: Hashes
    state: str = "ACTIVE"
    parent_ids: tuple[int, ...] = ()
    child_ids: tuple[int, ...] = ()
    created_at_epoch: int = 0
    sealed_at_epoch: int = -1
    created_at_ms: int = 0
    sealed_at_ms: int = -1
    legacy_topic_name: str | None = None

    @property
    def is_active(self) -> bool:
        return self.state == "ACTIVE"


class Pending(_Answer, frozen=True):
    """A change of the layout under way."""

    kind: str
    operation_id: str = ""
    stage: str = ""
    started_ms: int = 0
    parents: tuple[int, ...] = ()


class ScalableTopicInfo(_Answer, frozen=True):
    """The layout of a scalable topic."""

    epoch: int
    next_segment_id: int = 0
    segments: dict[int, SegmentNode] = {}
    properties: dict[str, str] = {}
    incarnation: str = ""
    routing: str = ""
    pending_operation: Pending | None = None
    created_ms: int = 0


class SegmentSummary(_Answer, frozen=True):
    """One segment in a topic's stats."""

    name: str = ""
    state: str = ""
    owner: str = ""
    msg_rate_in: float = 0.0
    bytes_rate_in: float = 0.0
    msg_rate_out: float = 0.0
    bytes_rate_out: float = 0.0
    messages: int = 0
    storage_size: int = 0
    producers: int = 0
    is_reachable: bool = True
    """Whether the owner said all this; else the numbers mean nothing."""
    is_terminated: bool = False
    """Whether it takes no more messages; an active one of which this is true must be split or merged."""
    backlog: dict[str, int] = {}
    """Entries by subscription; a batch of messages is one."""
    next_trim: NextTrim = NextTrim()
    """What of it is deleted next, and when; a sealed segment goes as a whole."""


class ConsumerSummary(_Answer, frozen=True):
    """A registered consumer."""

    segments: tuple[int, ...] = ()
    is_connected: bool = False


class Blocked(_Answer, frozen=True):
    """Why a subscription does not go on."""

    kind: str
    """draining-parent, consumer-away, no-consumer, open-transaction, unreadable-record."""
    segment: int | None = None
    detail: dict[str, Any] = {}
    since: int = 0
    """Milliseconds since 1970."""


class SubscriptionSummary(_Answer, frozen=True):
    """One subscription in a topic's stats."""

    type: str = ""
    consumer_count: int = 0
    connected_consumers: int = 0
    state: str = ""
    backlog: int | None = None
    """Entries, added up over the segments that answered; None: there are no cursors."""
    consumers: dict[str, ConsumerSummary] = {}
    blocked_by: list[Blocked] = msgspec.field(default_factory=list, name="blocked_by")


class ScalableTopicStats(_Answer, frozen=True):
    """A scalable topic as its leader sees it."""

    epoch: int
    total_segments: int = 0
    active_segments: int = 0
    sealed_segments: int = 0
    segments: dict[int, SegmentSummary] = {}
    subscriptions: dict[str, SubscriptionSummary] = {}
    pending_operation: Pending | None = None
    leader: str | None = None
    routing: str = ""
    incarnation: str = ""


class SegmentCreation(_Answer, frozen=True, omit_defaults=True):
    """What a new segment is to begin with."""

    subscriptions: dict[str, str] = {}
    """Where the cursor of each begins: earliest or latest."""
    producers: dict[str, int] = {}
    """Last sequence id by producer: what deduplication must know."""
    epoch: int | None = None
    incarnation: str | None = None


class SealedPosition(_Answer, frozen=True):
    """The end of a sealed segment."""

    ledger_id: int
    entry_id: int


class SealedSegment(_Answer, frozen=True):
    """Where a sealed segment ends, and what deduplication knew."""

    position: SealedPosition
    producers: dict[str, int] = {}

    @property
    def message_id(self) -> MessageId:
        return MessageId(self.position.ledger_id, self.position.entry_id, -1, -1)


class SegmentBacklogStats(_Answer, frozen=True):
    """What one subscription has left in one segment."""

    messages: int
    """Entries, in truth: a batch of messages is one."""
    is_terminated: bool = False
    consumers: tuple[str, ...] = ()
    """Names of the attached consumers."""
    closed: tuple[str, ...] = ()
    """Names of consumers that closed themselves lately."""


class SegmentLoad(_Answer, frozen=True):
    """Load and backlog of one segment, as its owner sees them."""

    owner: str = ""
    msg_rate_in: float = 0.0
    bytes_rate_in: float = 0.0
    msg_rate_out: float = 0.0
    bytes_rate_out: float = 0.0
    messages: int = 0
    storage_size: int = 0
    producers: int = 0
    is_terminated: bool = False
    backlog: dict[str, int] = {}
    """Entries by subscription; a batch of messages is one."""
    consumers: dict[str, tuple[str, ...]] = {}
    blocked_by: dict[str, tuple[Blocked, ...]] = {}
    """By subscription, if it is held up here: open transactions."""
