"""How a subscription looks in statistics: its consumers, its state, and what holds it up (settled.md, `blocked_by`).

Pure functions over a coordinator's memory; the shapes are those of the REST answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from braid.errors import StoreMismatch
from braid.model.layout import SegmentLayout
from braid.model.segments import SegmentInfo
from braid.scalable.api import BlockedBy, SegmentBacklog
from braid.scalable.records import SubscriptionKind
from braid.scalable.sessions import ConsumerSession

UNREADABLE: Final = "unreadable-record"
"""Kind of what holds up somebody whose record cannot be read; its error names the record."""


class ConsumerState(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A consumer as statistics show it."""

    segments: tuple[int, ...]
    is_connected: bool


class SubscriptionState(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A subscription as statistics show it."""

    type: SubscriptionKind
    state: str
    """RUNNING, DRAINING (a segment waits for its ancestors), RESETTING (seek or clear-backlog), NO_CONSUMER."""
    consumer_count: int
    connected_consumers: int
    consumers: dict[str, ConsumerState]


def shown_state(
    kind: SubscriptionKind, sessions: Mapping[str, ConsumerSession], holding_up: Sequence[SegmentInfo], *, is_resetting: bool
) -> SubscriptionState:
    """The subscription now."""
    if is_resetting:
        state = "RESETTING"
    elif not sessions:
        state = "NO_CONSUMER"
    else:
        state = "DRAINING" if holding_up else "RUNNING"
    return SubscriptionState(
        type=kind,
        state=state,
        consumer_count=len(sessions),
        connected_consumers=sum(each.is_connected for each in sessions.values()),
        consumers={
            name: ConsumerState(segments=each.segments, is_connected=each.is_connected)
            for name, each in sorted(sessions.items())
        },
    )


def draining(
    segment: SegmentInfo,
    layout: SegmentLayout,
    left: Mapping[int, SegmentBacklog],
    sessions: Mapping[str, ConsumerSession],
    since_ms: int,
) -> BlockedBy:
    """A sealed segment that must be read to its end first: how far it is, who reads it, and what waits for it."""
    number = segment.segment_id
    detail: dict[str, Any] = {"waiting": sorted(layout.descendants(number))}
    if (found := left.get(number)) is not None:
        detail |= {"messages": found.messages, "isTerminated": found.is_terminated}
    reader = next((name for name, each in sessions.items() if number in each.segments), None)
    if reader is not None:
        detail["consumer"] = reader
    return BlockedBy(kind="draining-parent", segment=number, detail=detail, since=max(segment.sealed_at_ms, since_ms))


def away(sessions: Mapping[str, ConsumerSession]) -> list[BlockedBy]:
    """Consumers in their grace period that hold segments nobody reads meanwhile."""
    return [
        BlockedBy(
            kind="consumer-away",
            detail={"consumer": name, "segments": list(each.segments), "evictedAtMs": each.evicted_at_ms},
            since=each.disconnected_ms or 0,
        )
        for name, each in sorted(sessions.items())
        if not each.is_connected and each.segments
    ]


def unreadable(records: Mapping[str, StoreMismatch], since_ms: int) -> list[BlockedBy]:
    """Registrations that were passed over because their records cannot be read: their consumers have no segments."""
    return [
        BlockedBy(kind=UNREADABLE, detail={"consumer": name, "error": error.message}, since=since_ms)
        for name, error in sorted(records.items())
    ]
