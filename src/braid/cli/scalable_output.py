"""Scalable topics as tables: layouts, load, subscriptions and, in words, what holds them up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from braid.cli.admin_output import BACKLOG, console, next_trim, pairs, table
from braid.cli.output import printable
from braid.client.admin_scalable_types import Blocked, ScalableTopicInfo, ScalableTopicStats, SegmentNode, SegmentSummary
from braid.model.hashranges import MAX_HASH

if TYPE_CHECKING:
    from rich.console import RenderableType

MAX_ROWS = 10_000
MANY_ROWS = 20
NARROW = 110
"""Below so many columns reasons stand on lines of their own."""
WIDE = 100_000
"""Columns of a table that is shown whole."""
LOAD = ("owner", "in/s", "out/s", "bytes", BACKLOG)
LEAST_WANTED = ("bytes", "from", "into", "owner", "out/s", "in/s", "range", "type", "consumers")
"""Columns in the order in which they are left out where there is no room for them."""


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
    yield segment_table(found, None, generations(found.segments.values()), MAX_ROWS, WIDE)


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
    rows = [
        (number, _state(each.state, each), each.name, *_load(each), next_trim(each.next_trim) if each.is_reachable else None)
        for number, each in sorted(found.segments.items())
    ]
    yield table(("segment", "state", "name", *LOAD, "deleted next"), rows[:MAX_ROWS], "Segments")
    yield from warnings(found)
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
    layout: ScalableTopicInfo, stats: ScalableTopicStats | None, lines: Mapping[int, int], rows: int, width: int
) -> RenderableType:
    """Every segment with its place in the DAG and its load, if that is known: one line each, with as much as `width` takes."""
    # What needs repair and what is in use come first if not everything can be shown; then the newest.
    ended = ended_segments(stats)
    order = sorted(
        layout.segments.values(), key=lambda each: (each.segment_id not in ended, not each.is_active, -each.segment_id)
    )
    chosen = order[:rows]
    chosen.sort(key=lambda each: (lines[each.segment_id], each.hash_range.start))
    hidden = len(layout.segments) - len(chosen)
    title = f"Segments ({hidden} more are not shown)" if hidden else "Segments"
    columns: tuple[str, ...] = ("segment", "state", "range", "from", "into")
    if stats is None:
        return fitted(columns, [_node(each, None) for each in chosen], title, width)
    found = []
    for each in chosen:
        load = stats.segments.get(each.segment_id)
        found.append((*_node(each, load), *_load(load)))
    return fitted((*columns, *LOAD), found, title, width)


def fitted(columns: Sequence[str], rows: Sequence[Sequence[Any]], title: str, width: int) -> RenderableType:
    """A table of one line for each row; the least wanted columns are left out until it fits."""
    kept = list(columns)
    screen = console()
    endless = screen.options.update(width=WIDE)
    left_out = [each for each in LEAST_WANTED if each in columns]
    while True:
        at = [columns.index(each) for each in kept]
        made = table(kept, [[row[index] for index in at] for row in rows], title, is_cut=True)
        if not left_out or screen.measure(made, options=endless).maximum <= width:
            return made
        kept.remove(left_out.pop(0))


def warnings(stats: ScalableTopicStats) -> Iterator[RenderableType]:
    """What an administrator has to repair."""
    from rich.text import Text

    ended = ended_segments(stats)
    if ended:
        yield Text(
            f"Segments that are terminated and not sealed: {_numbers(ended[:20])}{' ...' if len(ended) > 20 else ''}. Nothing "
            "can be sent to their hashes until the leader replaces them; split or merge them to have that now.",
            style="red",
        )


def ended_segments(stats: ScalableTopicStats | None) -> list[int]:
    """Active segments that take nothing, and no operation is about to replace them."""
    if stats is None:
        return []
    changing = stats.pending_operation.parents if stats.pending_operation is not None else ()
    return [number for number, each in sorted(stats.segments.items()) if _is_ended(each) and number not in changing]


def _node(segment: SegmentNode, load: SegmentSummary | None) -> tuple[Any, ...]:
    name = f"{segment.segment_id} (legacy)" if segment.legacy_topic_name else segment.segment_id
    return (name, _state(segment.state, load), str(segment.hash_range), list(segment.parent_ids), list(segment.child_ids))


def _state(state: str, load: SegmentSummary | None) -> str:
    return "terminated" if load is not None and state == "ACTIVE" and _is_ended(load) else state.lower()


def _is_ended(segment: SegmentSummary) -> bool:
    """Whether the layout has it for writing, but its owner takes nothing."""
    return segment.is_reachable and segment.is_terminated and segment.state == "ACTIVE"


def _load(found: SegmentSummary | None) -> tuple[Any, ...]:
    if found is None or not found.is_reachable:
        return ("-" if found is None else "does not answer", *(None,) * (len(LOAD) - 1))
    backlog = dict(sorted(found.backlog.items()))
    return (found.owner, found.msg_rate_in, found.msg_rate_out, found.storage_size, backlog)


def subscription_tables(
    stats: ScalableTopicStats, now_ms: int, width: int = WIDE, rows: int = MAX_ROWS
) -> Iterator[RenderableType]:
    """Every subscription with what holds it up, and who reads what; with few `rows`, those that are held up come first and
    consumers are left out."""
    from rich.text import Text

    is_short = len(stats.subscriptions) > rows
    known = sorted(stats.subscriptions.items(), key=lambda each: (is_short and not each[1].blocked_by, each[0]))
    if not known:
        return
    is_narrow = width < NARROW
    hidden = max(0, len(known) - rows)
    title = f"Subscriptions ({hidden} more are not shown)" if hidden else "Subscriptions"
    shown, reasons = [], []
    for name, each in known[:rows]:
        held = "; ".join(blocked(why, now_ms) for why in each.blocked_by)
        consumers = (
            f"{each.connected_consumers} of {each.consumer_count}" if each.type != "QUEUE" else str(each.connected_consumers)
        )
        row = (name, each.type.lower(), each.state.lower().replace("_", " "), consumers, each.backlog)
        shown.append(row if is_narrow else (*row, held or "nothing"))
        reasons += [Text(printable(f"{name} is held up: {held}"))] if held else []
    columns = ("subscription", "type", "state", "consumers", BACKLOG)
    if is_narrow:
        yield fitted(columns, shown, title, width)
        yield from reasons
    else:
        yield table((*columns, "held up by"), shown, title)
    segments = [
        (name, consumer, what.is_connected, sorted(what.segments))
        for name, each in known
        for consumer, what in sorted(each.consumers.items())
    ]
    if segments and rows >= MANY_ROWS:
        yield table(("subscription", "consumer", "connected", "segments"), segments[:rows], "Consumers")


def blocked(why: Blocked, now_ms: int) -> str:
    """A reason in words."""
    detail = why.detail
    since = f" (for {age(now_ms - why.since)})" if why.since else ""
    if why.kind == "draining-parent":
        left = detail.get("messages")
        rest = f", {left} entries are left" if left is not None else ""
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
        return f"{_open_transaction(why)}{since}"
    if why.kind == "unreadable-record":
        remedy = "remove-consumer" if "consumer" in detail else "delete-subscription"
        return f"{str(detail.get('error', 'a record cannot be read')).rstrip('.')}; repair it, or {remedy}{since}"
    return f"{why.kind}{since}"


def _open_transaction(why: Blocked) -> str:
    """Which one, and how it holds the subscription up; `braid transactions` tells more of it."""
    if "transaction" not in why.detail:  # of a broker that does not say
        return f"an open transaction in segment {why.segment}"
    where = f"segment {why.segment}" if why.segment is not None else str(why.detail.get("topic", "the topic"))
    what = [f"entries of {where} after {why.detail['after']}"] if why.detail.get("after") else []
    if acks := why.detail.get("acks"):
        what.append(f"{acks} acknowledgment{'s' if acks != 1 else ''} in {where}")
    rest = f", and {more} more" if (more := why.detail.get("others")) else ""
    return f"the open transaction {why.detail['transaction']} holds back {' and '.join(what) or where}{rest}"


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
