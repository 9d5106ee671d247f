"""Rates from counters: the change of a counter between two looks at it. Nothing runs between requests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from braid.runtime.clock import Clock

MAX_COUNTERS = 50_000
LEAST_SECONDS = 1.0
"""Looks closer together than this see the rate of the last longer interval."""


class Rates:
    """Remembers the last look at each counter; bounded, the least recently seen is forgotten."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen: OrderedDict[Hashable, tuple[float, int, float]] = OrderedDict()

    def per_second(self, key: Hashable, count: int) -> float:
        """The rate at which `count` has grown; 0 at the first look."""
        now = self._clock.monotonic()
        before = self._seen.pop(key, None)
        if before is None or count < before[1]:
            entry = (now, count, 0.0)
        elif now - before[0] < LEAST_SECONDS:
            entry = before
        else:
            entry = (now, count, (count - before[1]) / (now - before[0]))
        self._seen[key] = entry
        if len(self._seen) > MAX_COUNTERS:
            self._seen.popitem(last=False)
        return entry[2]
