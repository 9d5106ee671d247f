"""What the harness asks of the load generator, and what it gets back: one JSON line each way."""

from __future__ import annotations

import msgspec
from bench.shapes import Shape

PAUSE_SECONDS = 2.0
"""A pause that is worth a word."""
EXCLUSIVE = 0
SHARED = 1


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of load."""

    mode: str
    """subscribe, publish, drain, tail, pace or client (paced, with the official client)."""
    port: int
    pid: int = 0
    """The process whose CPU time is measured."""
    shape: Shape = Shape(batch=1, size=100, topics=1)
    prefix: str = "bench"
    """Names of topics begin so."""
    entries: int = 0
    warm: int = 0
    """Entries sent before measuring."""
    seconds: float = 10.0
    """A publishing run stops after this time even if it has more to send."""
    rate: int = 0
    subscriptions: tuple[str, ...] = ()
    kind: int = EXCLUSIVE
    is_floor: bool = False
    """The other side is the floor, which knows no commands."""


class Slice(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a run."""

    entries: int
    cpu: float
    wall: float

    @property
    def us(self) -> float:
        """CPU microseconds per entry of the measured process."""
        return self.cpu / self.entries * 1e6


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a job."""

    slices: tuple[Slice, ...] = ()
    latencies_ms: tuple[float, ...] = ()
    """Sorted."""
    late_ms: float = 0.0
    """Median lateness of the generator itself, in paced runs."""
    longest_pause: float = 0.0
    """Longest time in seconds in which nothing was confirmed, in publishing runs."""
    error: str = ""

    @property
    def entries(self) -> int:
        return sum(part.entries for part in self.slices)

    @property
    def rate(self) -> float:
        """Entries per second."""
        return self.entries / max(sum(part.wall for part in self.slices), 1e-9)

    @property
    def us(self) -> float:
        """CPU microseconds per entry: the median of the slices."""
        found = sorted(part.us for part in self.slices)
        middle = len(found) // 2
        return found[middle] if len(found) % 2 else (found[middle - 1] + found[middle]) / 2

    @property
    def remark(self) -> str:
        """Rates for a note, and a warning if the broker paused: its CPU time would not show that."""
        pause = f"; PAUSED FOR {self.longest_pause:.0f} s" if self.longest_pause > PAUSE_SECONDS else ""
        return f"{self.rate:,.0f} entries/s{pause}"

    @property
    def interval(self) -> tuple[float, float]:
        found = [part.us for part in self.slices]
        return min(found), max(found)

    def percentile(self, percent: float) -> float:
        return self.latencies_ms[min(int(len(self.latencies_ms) * percent / 100), len(self.latencies_ms) - 1)]
