"""What `braid pipeline run` shows on standard error while it runs: a table that is rewritten on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from braid_spark.pipeline.history import Batch, History

LINE_MS = 5000
"""Between two lines in a log."""
MAX_SEGMENTS = 12
"""Segments shown one by one; the ones furthest behind."""


class Screen:
    """Shows a history and what the query is at."""

    def __init__(self, history: History, stream: TextIO | None = None) -> None:
        self._history = history
        self._stream = stream or sys.stderr
        self._live: Live | None = None
        self._line_ms = 0
        self._shown = 0
        """Batches there were at the last line."""
        self.state = "starting"
        if self._stream.isatty():
            self._live = Live(console=Console(file=self._stream), auto_refresh=False, transient=True)

    def __enter__(self) -> Screen:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._live is not None:
            self._live.console.print(Text(text))
        else:
            self._stream.write(f"{text}\n")
            self._stream.flush()

    def refresh(self, now_ms: int) -> None:
        """Show how things stand."""
        if self._live is not None:
            self._live.update(panel(self._history, self.state, now_ms), refresh=True)
            return
        last = self._history.last
        is_due = self._shown == 0 or now_ms - self._line_ms >= LINE_MS
        if last is not None and self._history.count > self._shown and is_due:
            self._line_ms, self._shown = now_ms, self._history.count
            self.say(line(self._history, last))


def line(history: History, last: Batch) -> str:
    """The newest batch in one line."""
    behind = "" if history.lag is None else f", lag {history.lag.total:,}"
    lost = f", lost {history.lag.lost:,}" if history.lag is not None and history.lag.lost else ""
    return (
        f"batch {last.number:,}: {last.rows:,} rows in {last.seconds:.2f} s, {last.rows_per_second:,.0f} rows/s"
        f"{behind}{lost}, {history.rows:,} rows in all"
    )


def panel(history: History, state: str, now_ms: int) -> Group:
    """The table on a terminal."""
    last, lag = history.last, history.lag
    facts = Table.grid(padding=(0, 2))
    facts.add_row("query", f"{history.name}, {state}")
    if last is not None:
        committed = datetime.fromtimestamp(last.ended_ms / 1000, UTC).astimezone().strftime("%H:%M:%S")
        facts.add_row("last commit", f"batch {last.number:,} at {committed}, {_ago(now_ms - last.ended_ms)} ago")
        facts.add_row("rows/s", f"{last.rows_per_second:,.0f} ({last.rows:,} rows in {last.seconds:.2f} s)")
        facts.add_row("rows", f"{history.rows:,} in {history.count:,} batches")
    if lag is None:
        return Group(facts)
    facts.add_row("lag", f"{lag.total:,} messages" + (f", {lag.lost:,} lost" if lag.lost else ""))
    segments = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    segments.add_column("segment")
    segments.add_column("lag", justify="right")
    furthest = sorted(lag.segments.items(), key=lambda each: (-each[1], each[0]))
    for name, count in furthest[:MAX_SEGMENTS]:
        segments.add_row(Text(name), f"{count:,}")
    if len(furthest) > MAX_SEGMENTS:
        segments.add_row(f"{len(furthest) - MAX_SEGMENTS:,} more", "")
    return Group(facts, segments)


def summary_lines(summary: dict[str, Any], how: str) -> str:
    """The end of a run for people."""
    lag = "" if summary["lag"] is None else f", lag {summary['lag']:,}"
    lost = f", {summary['lost']:,} messages lost" if summary["lost"] else ""
    count = summary["batches"]
    return (
        f"{summary['name']} {how}: {summary['rows']:,} rows in {count:,} batch{'' if count == 1 else 'es'}, "
        f"{summary['seconds']:,.1f} s, {summary['rowsPerSecond']:,.0f} rows/s while busy{lag}{lost}"
    )


def _ago(milliseconds: int) -> str:
    seconds = max(milliseconds, 0) / 1000
    return f"{seconds:.1f} s" if seconds < 60 else f"{seconds / 60:.0f} min"
