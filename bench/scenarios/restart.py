"""Restart after kill -9: time to the ready line against the bytes of journal that are replayed, and the slope.

Replay is Python on one core: about a microsecond per record and the checksum's share per byte. Checkpoints bound the journal
(128 MiB by default), and so the time.
"""

from __future__ import annotations

import statistics

from bench.broker_process import directory_bytes, fresh_dir, start_broker
from bench.jobs import Job
from bench.report import Figure
from bench.scenarios.bench_run import Run
from bench.shapes import Shape

MB = 1 << 20
GROUP = "Restart after kill -9"


def measure(run: Run) -> None:
    sizes = (0, 8, 24) if run.is_quick else (0, 16, 32, 64, 96)
    for shape in (Shape(batch=1, size=100, topics=1), Shape(batch=10, size=100, topics=10)):
        # Small entries have the most records; a third of the bytes is enough to see their slope.
        points = [_point(run, shape, size // 3 if shape.batch == 1 else size) for size in sizes]
        _report(run, shape, points)


def _point(run: Run, shape: Shape, megabytes: int) -> tuple[float, float]:
    """Journal MB and ms to the ready line."""
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
    times = []
    for _ in range(3):
        with start_broker(data).wait_ready() as broker:
            times.append(broker.ready_seconds * 1000)
            broker.kill()
    return journal, statistics.median(times)


def _report(run: Run, shape: Shape, points: list[tuple[float, float]]) -> None:
    slope, base = statistics.linear_regression([size for size, _ in points], [time for _, time in points])
    name = f"entries of {shape.batch} x {shape.size} B"
    figures = [Figure(group=GROUP, name=f"{name}: {size:.0f} MB of journal", value=time, unit="ms") for size, time in points]
    figures.append(
        Figure(group=GROUP, name=f"{name}: slope", value=slope, unit="ms per MB", note=f"and {base:.0f} ms without a journal")
    )
    run.add(figures)
