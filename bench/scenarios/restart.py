"""Restart after kill -9: time to the ready line against the bytes of journal that are replayed, and the slope.

Replay is Python on one core: about a microsecond per record and the checksum's share per byte. Checkpoints bound the journal
(128 MiB by default), and so the time.
"""

from __future__ import annotations

import statistics
from typing import NamedTuple

from bench.broker_process import cpu_seconds, directory_bytes, fresh_dir, start_broker
from bench.jobs import Job
from bench.report import Figure
from bench.scenarios.bench_run import Run
from bench.shapes import Shape

MB = 1 << 20
GROUP = "Restart after kill -9"


def measure(run: Run) -> None:
    small, larger = Shape(batch=1, size=100, topics=1), Shape(batch=10, size=100, topics=10)
    # Small entries have the most records for their bytes, so that fewer bytes show their slope.
    _report(run, small, [_point(run, small, size) for size in ((0, 8, 16) if run.is_quick else (0, 8, 16, 32))])
    if not run.is_quick:
        _report(run, larger, [_point(run, larger, size) for size in (0, 32, 64, 96)])


class Point(NamedTuple):
    """One journal and what it cost to start with it: the least of some tries, for the rest is other people's noise."""

    journal_mb: float
    wall_ms: float
    cpu_ms: float


def _point(run: Run, shape: Shape, megabytes: int) -> Point:
    data = fresh_dir("restart")
    with start_broker(data).wait_ready() as broker:
        entries = shape.entries(1 << 40, megabytes * MB) if megabytes else shape.topics
        while entries:
            count = min(entries, 100_000)
            run.load(
                Job(mode="publish", port=broker.port, pid=broker.pid, shape=shape, prefix="restart", entries=count, seconds=600)
            )
            entries -= count
        broker.kill()
    journal = directory_bytes(data / "ledgers" / "journal") / MB
    wall, cpu = [], []
    for _ in range(3):
        with start_broker(data).wait_ready() as broker:
            wall.append(broker.ready_seconds * 1000)
            cpu.append(cpu_seconds(broker.pid) * 1000)
            broker.kill()
    return Point(journal, min(wall), min(cpu))


def _report(run: Run, shape: Shape, points: list[Point]) -> None:
    name = f"entries of {shape.batch} x {shape.size} B"
    sizes = [point.journal_mb for point in points]
    figures = [
        Figure(
            group=GROUP,
            name=f"{name}: {point.journal_mb:.0f} MB of journal",
            value=point.wall_ms,
            unit="ms",
            note=f"{point.cpu_ms:.0f} ms of CPU",
        )
        for point in points
    ]
    for kind, times in (("time", [point.wall_ms for point in points]), ("CPU", [point.cpu_ms for point in points])):
        slope, base = statistics.linear_regression(sizes, times)
        note = f"and {base:.0f} ms without a journal"
        figures.append(Figure(group=GROUP, name=f"{name}: slope of {kind}", value=slope, unit="ms per MB", note=note))
    run.add(figures)
