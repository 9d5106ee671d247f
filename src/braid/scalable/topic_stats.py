"""What the admin API shows of a scalable topic: one answer made of the layout, its segments' owners and the coordinators.

Reads only. A segment whose owner does not answer is shown without numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from braid.errors import BraidError, StoreMismatch
from braid.metadata.api import MetadataStore, Span
from braid.model.layout import SegmentLayout
from braid.model.names import TopicName
from braid.model.names import decode as decode_name
from braid.model.segments import SegmentInfo, physical_name
from braid.scalable.api import BlockedBy, SegmentOps, SegmentStats
from braid.scalable.coordinator import SubscriptionCoordinator
from braid.scalable.plans import each
from braid.scalable.records import ScalableTopicMetadata, SubscriptionMetadata, decode, subscriptions_path
from braid.scalable.subscription_state import UNREADABLE


async def topic_stats(
    store: MetadataStore,
    segments: SegmentOps,
    topic: TopicName,
    metadata: ScalableTopicMetadata,
    layout: SegmentLayout,
    *,
    leader: str | None,
    coordinators: Mapping[str, SubscriptionCoordinator],
) -> dict[str, Any]:
    """Upstream's flat shape (scalable.md 2.3) with more fields."""

    async def ask(segment: SegmentInfo) -> SegmentStats | None:
        try:
            return await segments.stats(physical_name(topic, segment))
        except BraidError:
            return None

    ordered = [layout.all_segments[number] for number in sorted(layout.all_segments)]
    measured = dict(zip((segment.segment_id for segment in ordered), await each(ordered, ask), strict=True))
    subscriptions: dict[str, Any] = {}
    async for record in store.scan(Span(subscriptions_path(topic))):
        name = decode_name(record.name)
        try:
            found = decode(SubscriptionMetadata, record.key, record.value)
        except StoreMismatch as error:
            subscriptions[name] = _unreadable(name, error, measured)
            continue
        if not found.is_foreign(metadata.incarnation):
            subscriptions[name] = _subscription(name, found, coordinators.get(name), measured)
    pending = metadata.pending_operation
    return {
        "epoch": layout.epoch,
        "totalSegments": len(layout.all_segments),
        "activeSegments": len(layout.active_segments),
        "sealedSegments": len(layout.all_segments) - len(layout.active_segments),
        "segments": {str(segment.segment_id): _segment(topic, segment, measured[segment.segment_id]) for segment in ordered},
        "subscriptions": subscriptions,
        "pendingOperation": None if pending is None else msgspec.to_builtins(pending),
        "leader": leader,
        "routing": metadata.routing.value,
        "incarnation": metadata.incarnation,
    }


def _segment(topic: TopicName, segment: SegmentInfo, stats: SegmentStats | None) -> dict[str, Any]:
    return {
        "name": str(physical_name(topic, segment)),
        "state": segment.state.value,
        "hashRange": {"start": segment.hash_range.start, "end": segment.hash_range.end},
        "parentIds": list(segment.parent_ids),
        "childIds": list(segment.child_ids),
        "isReachable": stats is not None,
        **msgspec.to_builtins(stats or SegmentStats()),
    }


def _subscription(
    name: str,
    record: SubscriptionMetadata,
    coordinator: SubscriptionCoordinator | None,
    measured: Mapping[int, SegmentStats | None],
) -> dict[str, Any]:
    known = {number: stats for number, stats in measured.items() if stats is not None}
    backlog = sum(stats.backlog.get(name, 0) for stats in known.values())
    pending = None if record.pending is None else msgspec.to_builtins(record.pending)
    shown: dict[str, Any] = {"type": record.type, "initial": record.initial, "backlog": backlog, "pendingOperation": pending}
    if coordinator is not None:
        shown.update(msgspec.to_builtins(coordinator.state()))
        shown["blocked_by"] = msgspec.to_builtins(coordinator.blocked_by() + _held_up(name, known))
        return shown
    consumers = sorted({consumer for stats in known.values() for consumer in stats.consumers.get(name, ())})
    shown["state"] = "RUNNING" if consumers else "NO_CONSUMER"
    shown["consumerCount"] = shown["connectedConsumers"] = len(consumers)
    shown["consumers"] = {
        consumer: {
            "segments": [number for number, stats in known.items() if consumer in stats.consumers.get(name, ())],
            "isConnected": True,
        }
        for consumer in consumers
    }
    blocked_by = [BlockedBy(kind="no-consumer", since=record.created_ms)] if backlog and not consumers else []
    shown["blocked_by"] = msgspec.to_builtins(blocked_by + _held_up(name, known))
    return shown


def _held_up(name: str, measured: Mapping[int, SegmentStats]) -> list[BlockedBy]:
    """What the owners of segments say that it waits for."""
    return [
        msgspec.structs.replace(each, segment=number)
        for number, stats in sorted(measured.items())
        for each in stats.blocked_by.get(name, ())
    ]


def _unreadable(name: str, error: StoreMismatch, measured: Mapping[int, SegmentStats | None]) -> dict[str, Any]:
    """A subscription whose record cannot be read (a newer version may): nobody looks after it here."""
    return {
        "type": "UNKNOWN",
        "state": "UNKNOWN",
        "error": error.message,
        "backlog": sum(stats.backlog.get(name, 0) for stats in measured.values() if stats is not None),
        "pendingOperation": None,
        "consumerCount": 0,
        "connectedConsumers": 0,
        "consumers": {},
        "blocked_by": msgspec.to_builtins([BlockedBy(kind=UNREADABLE, detail={"error": error.message})]),
    }
