"""`braid scalable-topics dag`: the segments of a scalable topic drawn over the ring of hashes, and what goes on in them.

A line for each generation, a box for each segment as wide as its hash range: below a box stands what became of it. Then every
subscription with what holds it up, every segment with its load. Looks once, or again and again; what a dead leader cannot say
(load, subscriptions) is left out, the layout is always shown. Bounded in rows and columns.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from braid.cli.admin_output import console, note, print_tables, show
from braid.cli.output import emit, printable
from braid.cli.scalable_output import (
    MAX_ROWS,
    WIDE,
    age,
    ended_segments,
    generations,
    segment_table,
    subscription_tables,
    warnings,
)
from braid.client.admin import AdminClient
from braid.client.admin_scalable import scalable_parts
from braid.client.admin_scalable_types import Pending, ScalableTopicInfo, ScalableTopicStats, SegmentNode
from braid.errors import BraidError, ConnectFailed, NotFound
from braid.model.hashranges import MAX_HASH
from braid.runtime.clock import Clock, SystemClock

if TYPE_CHECKING:
    from rich.console import RenderableType

MAX_DRAWN_COLUMNS = 160
PLAIN_COLUMNS = 100
"""Of the drawing when the output is no terminal."""
MIN_DRAWN_COLUMNS = 32
ROWS = 100
MIN_ROWS = 3
MIN_DRAWN = 2
HEADINGS = 5
"""Lines of a table that are no rows: title, names, rules."""
LOOKS = 3
"""Attempts to see the layout and the load of one and the same epoch."""


class DagOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for on the command line."""

    topic: str
    is_watching: bool
    interval: float
    rows: int | None
    """Segments in the table; None: as many as the screen has room for, or ROWS."""
    url: str
    is_json: bool
    timeout: float


class DagLook(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What there was to see."""

    topic: str
    metadata: ScalableTopicInfo
    stats: ScalableTopicStats | None
    """None if no leader answered."""
    generations: dict[int, int]
    """Line of the drawing by segment."""
    seen_ms: int


def run(options: DagOptions) -> None:
    """Draw the topic once, or until Ctrl-C."""
    try:
        asyncio.run(_watch(options))
    except ConnectFailed as error:
        raise ConnectFailed(f"{error.message} (--url or BRAID_ADMIN_URL)") from error
    except NotFound as error:
        raise NotFound(
            f"{error.message.rstrip('.')}. `braid scalable-topics list TENANT/NAMESPACE` shows what there is."
        ) from error


async def _watch(options: DagOptions) -> None:
    clock = SystemClock()
    async with AdminClient(options.url, timeout=options.timeout) as admin:
        if options.is_watching and sys.stdout.isatty() and not options.is_json:
            await _live(options, clock, admin)
            return
        while True:
            _emit(options, await look(admin, options.topic, clock.now_ms()))
            if not options.is_watching:
                return
            await clock.sleep(options.interval)
            if not options.is_json:
                emit(b"\n")


async def _live(options: DagOptions, clock: Clock, admin: AdminClient) -> None:
    from rich.console import Group
    from rich.live import Live

    with Live(console=console(), screen=True, auto_refresh=False) as live:
        while True:
            found = await look(admin, options.topic, clock.now_ms())
            width, height = live.console.size
            live.update(Group(*screen(found, options.rows, width, height)), refresh=True)
            await clock.sleep(options.interval)


def _emit(options: DagOptions, found: DagLook) -> None:
    if options.is_json:
        show(found, is_json=True)
        return
    is_terminal = sys.stdout.isatty()
    print_tables(screen(found, options.rows, console().width if is_terminal else None))
    if found.stats is None:
        note("The topic's leader did not answer: load and subscriptions are not shown.")


async def look(admin: AdminClient, topic: str, now_ms: int) -> DagLook:
    """The layout, and the load at the same epoch if it can be had."""
    stats: ScalableTopicStats | None = None
    metadata = await admin.scalable_topics.get_metadata(topic)
    for _attempt in range(LOOKS):
        try:
            stats = await admin.scalable_topics.get_stats(topic)
        except (NotFound, ConnectFailed):
            raise
        except BraidError:  # between two leaders; the layout is known all the same
            break
        if stats.epoch == metadata.epoch:
            break
        metadata = await admin.scalable_topics.get_metadata(topic)
    return DagLook(
        topic="topic://{tenant}/{namespace}/{topic}".format(**scalable_parts(topic)),
        metadata=metadata,
        stats=stats,
        generations=generations(metadata.segments.values()),
        seen_ms=now_ms,
    )


def screen(found: DagLook, rows: int | None, width: int | None, height: int | None = None) -> Iterator[RenderableType]:
    """Everything there is to show; on a screen of so many lines the newest generations and what is in use. Without a width it
    is for a file: nothing is left out of the tables."""
    from rich.text import Text

    columns = PLAIN_COLUMNS if width is None else max(MIN_DRAWN_COLUMNS, min(width, MAX_DRAWN_COLUMNS))
    wide = WIDE if width is None else width
    head: list[RenderableType] = [*(Text(printable(line)) for line in _head(found)), Text("")]
    drawn, below = list(drawing(found, columns)), []
    if found.stats is not None:
        few = MAX_ROWS if height is None else max(MIN_ROWS, height // 4)
        below = [*warnings(found.stats), *subscription_tables(found.stats, found.seen_ms, wide, few)]
    if height is not None:
        room = height - _lines([*head, *below], wide) - HEADINGS
        drawn = drawn[-max(MIN_DRAWN, min(height // 3, room - MIN_ROWS)) :]
        rows = max(MIN_ROWS, room - len(drawn)) if rows is None else rows
    yield from (*head, *drawn, *below)
    yield segment_table(found.metadata, found.stats, found.generations, ROWS if rows is None else rows, wide)


def _lines(parts: list[RenderableType], width: int) -> int:
    """How many lines these take."""
    measuring = console()
    return sum(len(measuring.render_lines(part, measuring.options.update(width=width))) for part in parts)


def _head(found: DagLook) -> Iterator[str]:
    layout, stats = found.metadata, found.stats
    active = sum(each.is_active for each in layout.segments.values())
    sealed = len(layout.segments) - active
    yield f"{found.topic}: epoch {layout.epoch}, {active} active and {sealed} sealed segments, routing {layout.routing or '-'}"
    leader = "not known at the moment" if stats is None or not stats.leader else stats.leader
    pending = layout.pending_operation or (stats.pending_operation if stats is not None else None)
    yield f"leader: {leader}; under way: {_pending(pending, found.seen_ms)}"


def _pending(pending: Pending | None, now_ms: int) -> str:
    if pending is None:
        return "nothing"
    of = f" of {', '.join(map(str, pending.parents))}" if pending.parents else ""
    stage = {"prepare": ", being prepared", "finish": ", the layout is changed, being finished"}.get(pending.stage, "")
    since = f", for {age(now_ms - pending.started_ms)}" if pending.started_ms else ""
    return f"{pending.kind}{of}{stage}{since}"


# The drawing.


def drawing(found: DagLook, width: int) -> Iterator[RenderableType]:
    """One line for each generation; boxes stand where their hashes are."""
    from rich.text import Text

    lines: dict[int, list[SegmentNode]] = {}
    for number, line in found.generations.items():
        lines.setdefault(line, []).append(found.metadata.segments[number])
    changing = found.metadata.pending_operation.parents if found.metadata.pending_operation is not None else ()
    ended = ended_segments(found.stats)
    for line in sorted(lines):
        drawn, column = Text(), 0
        for each in sorted(lines[line], key=lambda node: node.hash_range.start):
            start = each.hash_range.start * width // (MAX_HASH + 1)
            end = max(start + 1, (each.hash_range.end + 1) * width // (MAX_HASH + 1))
            if end <= column:
                continue  # narrower than a column, which another one has
            start = max(start, column)
            drawn.append(" " * (start - column))
            style = "yellow" if each.segment_id in changing else "green" if each.is_active else "dim"
            is_ended = each.segment_id in ended
            drawn.append(_box(each, end - start, is_ended), style="red" if is_ended else style)
            column = end
        yield drawn
    yield Text(f"0000{'ffff'.rjust(width - 4)}", style="dim")


def _box(segment: SegmentNode, width: int, is_ended: bool) -> str:
    """`[3 active 0000-7fff]`, as much of it as fits."""
    if width < 3:
        return "│" * width
    state, room = "terminated" if is_ended else segment.state.lower(), width - 2
    labels = (
        f"{segment.segment_id} {state} {segment.hash_range}",
        f"{segment.segment_id} {state}",
        str(segment.segment_id),
        "",
    )
    label = next(each for each in labels if len(each) <= room)
    padded = f" {label} " if label and len(label) + 2 <= room else label
    return f"[{padded.center(room, ' ' if segment.is_active else '·')}]"
