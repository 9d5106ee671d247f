"""Scalable topics as tables: layouts, load, subscriptions and, in words, what holds them up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from braid.cli.admin_output import pairs, table
from braid.client.admin_scalable_types import Blocked, ScalableTopicInfo, ScalableTopicStats, SegmentNode, SegmentSummary
from braid.model.hashranges import MAX_HASH

if TYPE_CHECKING:
    from rich.console import RenderableType

MAX_ROWS = 10_000
LOAD = ("owner", "in/s", "out/s", "bytes", "backlog")


def metadata_parts(found: ScalableTopicInfo) -> Iterator[RenderableType]:
    """A layout as a table."""
    pending = found.pending_operation
    yield pairs(
        [
            ("epoch", found.epoch),
            ("next segment id", found.next_segment_id),
            ("routing", found.routing),
            ("incarnation", found.incarnation),
            ("properties", found.properties),
            ("under way", None if pending is None else pending.kind),
        ]
    )
    yield segment_table(found, None, generations(found.segments.values()), MAX_ROWS)


def stats_parts(found: ScalableTopicStats, now_ms: int) -> Iterator[RenderableType]:
    """Load and subscriptions as tables."""
    pending = found.pending_operation
    yield pairs(
        [
            ("epoch", found.epoch),
            ("active segments", found.active_segments),
            ("sealed segments", found.sealed_segments),
            ("leader", found.leader),
            ("under way", None if pending is None else pending.kind),
        ]
    )
    rows = [(number, each.state.lower(), each.name, *_load(each)) for number, each in sorted(found.segments.items())]
    yield table(("segment", "state", "name", *LOAD), rows[:MAX_ROWS], "Segments")
    yield from subscription_tables(found, now_ms)


def generations(segments: Iterable[SegmentNode]) -> dict[int, int]:
    """The line each segment is drawn on: below everything that covered one of its hashes before. Needs no edges, which pruning
    removes."""
    nodes = sorted(segments, key=lambda each: each.segment_id)
    edges = sorted({0, MAX_HASH + 1, *(each.hash_range.start for each in nodes), *(each.hash_range.end + 1 for each in nodes)})
    place = {edge: number for number, edge in enumerate(edges)}
    depth = [0] * len(edges)
    """Lines used so far over each stretch between two edges."""
    found = {}
    for each in nodes:
        first, last = place[each.hash_range.start], place[each.hash_range.end + 1]
        line = max(depth[first:last])
        found[each.segment_id] = line
        depth[first:last] = [line + 1] * (last - first)
    return found


def segment_table(
    layout: ScalableTopicInfo, stats: ScalableTopicStats | None, lines: Mapping[int, int], rows: int
) -> RenderableType:
    """Every segment with its place in the DAG and its load, if that is known."""
    # What is in use comes first if not everything can be shown; then the newest.
    chosen = sorted(layout.segments.values(), key=lambda each: (not each.is_active, -each.segment_id))[:rows]
    chosen.sort(key=lambda each: (lines[each.segment_id], each.hash_range.start))
    hidden = len(layout.segments) - len(chosen)
    title = f"Segments ({hidden} more are not shown)" if hidden else "Segments"
    columns = ("segment", "state", "range", "from", "into")
    if stats is None:
        return table(columns, map(_node, chosen), title)
    found = [(*_node(each), *_load(stats.segments.get(each.segment_id))) for each in chosen]
    return table((*columns, *LOAD), found, title)


def _node(segment: SegmentNode) -> tuple[Any, ...]:
    name = f"{segment.segment_id} (legacy)" if segment.legacy_topic_name else segment.segment_id
    return (name, segment.state.lower(), str(segment.hash_range), list(segment.parent_ids), list(segment.child_ids))


def _load(found: SegmentSummary | None) -> tuple[Any, ...]:
    if found is None or not found.is_reachable:
        return ("-" if found is None else "does not answer", *(None,) * (len(LOAD) - 1))
    backlog = dict(sorted(found.backlog.items()))
    return (found.owner, found.msg_rate_in, found.msg_rate_out, found.storage_size, backlog)


def subscription_tables(stats: ScalableTopicStats, now_ms: int) -> Iterator[RenderableType]:
    """Every subscription with what holds it up, and who reads what."""
    if not stats.subscriptions:
        return
    rows = []
    for name, each in sorted(stats.subscriptions.items()):
        held = "; ".join(blocked(why, now_ms) for why in each.blocked_by) or "nothing"
        consumers = (
            f"{each.connected_consumers} of {each.consumer_count}" if each.type != "QUEUE" else str(each.connected_consumers)
        )
        rows.append((name, each.type.lower(), each.state.lower().replace("_", " "), consumers, each.backlog, held))
    yield table(("subscription", "type", "state", "consumers", "backlog", "held up by"), rows, "Subscriptions")
    segments = [
        (name, consumer, what.is_connected, sorted(what.segments))
        for name, each in sorted(stats.subscriptions.items())
        for consumer, what in sorted(each.consumers.items())
    ]
    if segments:
        yield table(("subscription", "consumer", "connected", "segments"), segments, "Consumers")


def blocked(why: Blocked, now_ms: int) -> str:
    """A reason in words."""
    detail = why.detail
    since = f" (for {age(now_ms - why.since)})" if why.since else ""
    if why.kind == "draining-parent":
        left = detail.get("messages")
        rest = f", {left} messages are left" if left is not None else ""
        waiting = f"; segments {_numbers(detail['waiting'])} wait for it" if detail.get("waiting") else ""
        reader = f" by {detail['consumer']}" if detail.get("consumer") else ""
        return f"segment {why.segment} is being read to its end{reader}{rest}{waiting}{since}"
    if why.kind == "consumer-away":
        until = detail.get("evictedAtMs")
        rest = f"; others get them in {age(until - now_ms)}" if isinstance(until, int) and until > now_ms else ""
        return (
            f"the consumer {detail.get('consumer', '?')} is away with segments {_numbers(detail.get('segments'))}{rest}{since}"
        )
    if why.kind == "no-consumer":
        return f"nobody consumes it{since}"
    if why.kind == "open-transaction":
        return f"an open transaction in segment {why.segment}{since}"
    return f"{why.kind}{since}"


def _numbers(values: Any) -> str:
    return ", ".join(map(str, values or ())) or "-"


def age(ms: int) -> str:
    """A time span, roughly."""
    seconds = max(0, ms) / 1000
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    if seconds < 172_800:
        return f"{seconds / 3600:.0f} h"
    return f"{seconds / 86_400:.0f} days"
