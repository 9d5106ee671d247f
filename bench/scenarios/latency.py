"""Publish latency at a fixed, modest load: 5,000 unbatched messages of 100 B a second, open loop.

Nothing should be saturated: the time is one or two groups' `fdatasync` plus a few wake-ups. The floor says what of it is the
machine's.
"""

from __future__ import annotations

from bench.broker_process import fresh_dir, start_broker, start_floor
from bench.jobs import Job, Result
from bench.report import Figure
from bench.scenarios.bench_run import Run

RATE = 5000
TARGET_MS = 2.0
"""The better of Pulsar's two medians on the same kind of machine."""
GROUP = f"Publish latency at {RATE:,} messages/s, 1 x 100 B"


def measure(run: Run) -> None:
    seconds = 3 if run.is_quick else 8
    with start_broker(fresh_dir("latency")).wait_ready() as broker, start_floor(fresh_dir("floor")) as floor:
        job = Job(mode="pace", port=broker.port, rate=RATE, entries=seconds * RATE, warm=RATE, prefix="latency")
        machine = run.load(
            Job(mode="pace", port=floor.port, rate=RATE, entries=seconds * RATE // 2, warm=RATE // 2, is_floor=True)
        )
        raw = run.load(job)
        run.add([_figure("floor, p50", machine, 50), *_both("raw protocol", raw, machine)])
        client = run.load(Job(mode="client", port=job.port, rate=RATE, entries=job.entries, warm=RATE, prefix="latency"))
        run.add(_both("official Python client", client, machine))


def _both(name: str, result: Result, floor: Result) -> list[Figure]:
    note = f"{result.percentile(50) / floor.percentile(50):.1f}x floor; generator late by {result.late_ms:.2f} ms"
    return [
        _figure(f"{name}, p50", result, 50, TARGET_MS, note),
        _figure(f"{name}, p99", result, 99, None, f"slowest {result.latencies_ms[-1]:.1f} ms"),
    ]


def _figure(name: str, result: Result, percent: float, target: float | None = None, note: str = "") -> Figure:
    return Figure(group=GROUP, name=name, value=result.percentile(percent), unit="ms", target=target, note=note)
