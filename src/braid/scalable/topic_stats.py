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
from braid.model.retention import NextTrim
from braid.model.segments import SegmentInfo, physical_name
from braid.scalable.api import BlockedBy, Retention, SegmentOps, SegmentStats
from braid.scalable.coordinator import SubscriptionCoordinator
from braid.scalable.plans import each
from braid.scalable.plans_prune import MINUTE_MS
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
    retention: Retention,
) -> dict[str, Any]:
    """Upstream's flat shape (scalable.md 2.3) with more fields."""

    async def ask(segment: SegmentInfo) -> SegmentStats | None:
        try:
            return await segments.stats(physical_name(topic, segment))
        except BraidError:
            return None

    ordered = [layout.all_segments[number] for number in sorted(layout.all_segments)]
    measured: dict[int, SegmentStats | None] = dict(
        zip((segment.segment_id for segment in ordered), await each(ordered, ask), strict=True)
    )
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
    is_read = any(each["type"] != "CHECKPOINT" for each in subscriptions.values())
    ends = {segment.segment_id: _with_end(segment, measured[segment.segment_id], is_read, retention) for segment in ordered}
    return {
        "epoch": layout.epoch,
        "totalSegments": len(layout.all_segments),
        "activeSegments": len(layout.active_segments),
        "sealedSegments": len(layout.all_segments) - len(layout.active_segments),
        "segments": {
            str(segment.segment_id): _segment(topic, segment, _with_ancestors(segment, layout, ends)) for segment in ordered
        },
        "subscriptions": subscriptions,
        "pendingOperation": None if pending is None else msgspec.to_builtins(pending),
        "leader": leader,
        "routing": metadata.routing.value,
        "incarnation": metadata.incarnation,
    }


def _with_end(segment: SegmentInfo, stats: SegmentStats | None, is_read: bool, retention: Retention) -> SegmentStats | None:
    """The stats of a segment; a sealed one goes as a whole (`plans_prune.py`), not by its ledgers."""
    if stats is None or not segment.is_sealed:
        return stats
    rule, at_ms, unread_bytes = "time" if retention.minutes else "read", None, 0
    if stats.undecided or any(stats.backlog.values()):
        rule = "needed"
    elif retention.unread_minutes and not is_read and stats.messages:
        rule, unread_bytes = "unread", stats.storage_size
        if retention.unread_minutes > 0:
            at_ms = (stats.last_append_ms or segment.sealed_at_ms) + retention.unread_minutes * MINUTE_MS
    elif retention.minutes >= 0:
        at_ms = segment.sealed_at_ms + retention.minutes * MINUTE_MS
    return msgspec.structs.replace(
        stats,
        next_trim=NextTrim(
            rule=rule,
            at_ms=at_ms,
            messages=stats.messages - stats.trimmed,
            bytes=stats.storage_size,
            unread_bytes=unread_bytes,
            unread_minutes=0 if is_read else retention.unread_minutes,
        ),
    )


def _with_ancestors(
    segment: SegmentInfo, layout: SegmentLayout, ends: Mapping[int, SegmentStats | None]
) -> SegmentStats | None:
    """The stats of a segment; a sealed one waits for the last of its ancestors, however soon it could go itself."""
    stats = ends[segment.segment_id]
    if stats is None or not segment.is_sealed:
        return stats
    elders = [elder.next_trim for number in layout.ancestors(segment.segment_id) if (elder := ends.get(number)) is not None]
    last = max([stats.next_trim, *elders], key=lambda trim: (trim.rule == "needed", trim.at_ms is None, trim.at_ms or 0))
    return msgspec.structs.replace(stats, next_trim=msgspec.structs.replace(stats.next_trim, rule=last.rule, at_ms=last.at_ms))


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
