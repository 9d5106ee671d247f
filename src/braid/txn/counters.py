"""What a broker counts of its transactions, for metrics: never read by the product itself.

Pure. Counted where it happens: `TransactionStore` counts records, decisions and durations, the coordinator what it refuses, the
sweep what timed out.
"""

from __future__ import annotations

from typing import Final

from braid.model.txn import TxnId

BUCKETS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
"""Upper bounds, in seconds, of the histogram of index queries."""
DURATION_BUCKETS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 3600.0)
"""The same of ended transactions."""


class Histogram:
    """Counts by upper bound; the last one is of what lies above all bounds."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def note(self, value: float) -> None:
        self.sum += value
        for at, bound in enumerate(self.bounds):
            if value <= bound:
                self.counts[at] += 1
                return
        self.counts[-1] += 1

    def cumulative(self) -> list[tuple[str, float]]:
        """Bounds as text with what lies at or below them, as Prometheus wants it."""
        total, found = 0, []
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            total += count
            found.append((bound, float(total)))
        return found


class TxnCounters:
    """What the metrics show of this broker's calls."""

    def __init__(self) -> None:
        self.op_writes = 0
        self.op_deletes = 0
        self.header_cas = {"ok": 0, "conflict": 0, "reject": 0}
        """Decisions: applied; lost to another one; refused because the transaction was over or unknown."""
        self.queries = Histogram(BUCKETS)
        """Seconds that index queries took."""
        self.durations = Histogram(DURATION_BUCKETS)
        """Seconds from the begin to the decision, of transactions decided by this broker."""
        self.created: dict[int, int] = {}
        """By coordinator partition, as the next three."""
        self.committed: dict[int, int] = {}
        self.aborted: dict[int, int] = {}
        self.timed_out: dict[int, int] = {}
        """Of the aborted ones: because of their deadline."""

    def began(self, root: TxnId) -> None:
        _one(self.created, root)

    def decided(self, root: TxnId, *, is_commit: bool, duration_ms: int) -> None:
        _one(self.committed if is_commit else self.aborted, root)
        self.durations.note(max(0, duration_ms) / 1000)

    def timed_out_one(self, root: TxnId) -> None:
        """The sweep aborted it."""
        _one(self.timed_out, root)


def _one(counts: dict[int, int], root: TxnId) -> None:
    counts[root.most] = counts.get(root.most, 0) + 1
