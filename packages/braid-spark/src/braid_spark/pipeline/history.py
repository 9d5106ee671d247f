"""What a query has done so far: its finished batches, as Spark's progress reports tell them.

Pure: takes the reports as they come and holds a bounded number of them. Knows nothing of Spark's classes or of the screen.
"""

from __future__ import annotations

import json
from collections import deque
from datetime import datetime
from typing import Any

import msgspec

KEPT = 720
"""Batches that are remembered one by one; totals count all."""


class Lag(msgspec.Struct, frozen=True):
    """What the source holds behind the end of a batch."""

    total: int
    segments: dict[str, int]
    """Messages by `topic segment`."""
    lost: int = 0


class Batch(msgspec.Struct, frozen=True):
    """One micro-batch, committed."""

    number: int
    ended_ms: int
    seconds: float
    rows: int
    lag: Lag | None

    @property
    def rows_per_second(self) -> float:
        return self.rows / self.seconds if self.seconds > 0 else 0.0


class History:
    """The batches of one run."""

    def __init__(self, name: str, began_ms: int) -> None:
        self.name = name
        self.began_ms = began_ms
        self.batches: deque[Batch] = deque(maxlen=KEPT)
        self.count = 0
        self.rows = 0
        self.busy_seconds = 0.0

    @property
    def last(self) -> Batch | None:
        return self.batches[-1] if self.batches else None

    @property
    def lag(self) -> Lag | None:
        """As of the newest batch that knew."""
        return next((each.lag for each in reversed(self.batches) if each.lag is not None), None)

    def add(self, report: dict[str, Any]) -> Batch:
        """One report of progress, which Spark makes when a batch is committed."""
        took = report.get("durationMs", {}).get("triggerExecution", 0)
        began = datetime.fromisoformat(report["timestamp"])
        sources = report.get("sources", [])
        batch = Batch(
            number=report["batchId"],
            ended_ms=round(began.timestamp() * 1000) + took,
            seconds=took / 1000,
            rows=sum(max(each.get("numInputRows", 0), 0) for each in sources),
            lag=lag_of(sources),
        )
        self.batches.append(batch)
        self.count += 1
        self.rows += batch.rows
        self.busy_seconds += batch.seconds
        return batch

    def summary(self, now_ms: int) -> dict[str, Any]:
        """The run in numbers."""
        seconds = max(now_ms - self.began_ms, 1) / 1000
        last, lag = self.last, self.lag
        return {
            "name": self.name,
            "batches": self.count,
            "lastBatch": None if last is None else last.number,
            "rows": self.rows,
            "seconds": round(seconds, 1),
            "rowsPerSecond": round(self.rows / self.busy_seconds, 1) if self.busy_seconds else 0.0,
            "lag": None if lag is None else lag.total,
            "lost": 0 if lag is None else lag.lost,
        }


def lag_of(sources: list[dict[str, Any]]) -> Lag | None:
    """The lag that Braid sources report as their latest offset; None if there is no such source."""
    total = lost = 0
    segments: dict[str, int] = {}
    is_known = False
    for source in sources:
        latest = source.get("latestOffset")
        if isinstance(latest, str):
            try:
                latest = json.loads(latest)
            except ValueError:
                continue
        if not isinstance(latest, dict) or not isinstance(latest.get("topics"), dict) or "lag" not in latest:
            continue
        is_known = True
        for topic, by_segment in latest["topics"].items():
            for number, count in by_segment.items():
                segments[f"{topic} {number}"] = count
        total += latest["lag"]
        lost += latest.get("lost", {}).get("messages", 0)
    return Lag(total, segments, lost) if is_known else None
