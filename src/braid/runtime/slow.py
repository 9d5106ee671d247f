"""`SlowOperations`: one log line when something took long: what, which object, how long.

Owns the threshold and the rate at which it complains: per kind of operation at most one line in a while, which tells how many
more there were. Costs a comparison when nothing is slow.
"""

from __future__ import annotations

import logging

from braid.runtime.clock import Clock

log = logging.getLogger(__name__)
QUIET_SECONDS = 5.0
DEFAULT_MS = 1000


class SlowOperations:
    """Where components report how long their work took; a threshold of 0 turns it off."""

    def __init__(self, clock: Clock, threshold_ms: int = DEFAULT_MS) -> None:
        self._clock = clock
        self.threshold = 0.0
        """In seconds; callers on hot paths compare with it themselves."""
        self.set_threshold(threshold_ms)
        self.counts: dict[str, int] = {}
        """Slow operations so far, by kind."""
        self._quiet_until: dict[str, float] = {}
        self._unsaid: dict[str, int] = {}

    def set_threshold(self, ms: int) -> None:
        self.threshold = ms / 1000 if ms else float("inf")

    def note(self, what: str, which: str, seconds: float) -> None:
        """An operation of kind `what` on `which` took `seconds`."""
        if seconds < self.threshold:
            return
        self.counts[what] = self.counts.get(what, 0) + 1
        now = self._clock.monotonic()
        if now < self._quiet_until.get(what, float("-inf")):
            self._unsaid[what] = self._unsaid.get(what, 0) + 1
            return
        self._quiet_until[what] = now + QUIET_SECONDS
        more = self._unsaid.pop(what, 0)
        log.warning("slow %s: %s took %.0f ms%s", what, which, seconds * 1000, f"; {more} more since" if more else "")
