"""Sessions: the leases that ephemeral records hang on.

A `Lease` lives on the store's clock and ends when no heartbeat came for its timeout; the heartbeat is driven by the holder's
own clock (`Heartbeat`), so that a paused or killed broker loses its session while the others keep theirs. Whether ephemerals
are dropped is the engine's business; a lease only knows when it ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from braid.metadata.api import SessionState
from braid.runtime.clock import Clock, Timer

MARGIN = 0.1
"""Share of the timeout by which a holder stops trusting its session early."""
BEATS_PER_TIMEOUT = 3


class Lease:
    """One session."""

    __slots__ = ("_beat", "_clock", "_ended", "_expired", "_timer", "id", "owned", "state", "timeout")

    def __init__(self, session_id: str, timeout: float, clock: Clock, expired: Callable[[Lease], None]) -> None:
        self.id = session_id
        self.timeout = timeout
        self.state = SessionState.CONNECTED
        self.owned: set[str] = set()
        """Keys of this session's ephemerals, writes still under way included."""
        self._clock = clock
        self._expired = expired
        self._ended = asyncio.Event()
        self._beat = clock.monotonic()
        self._timer: Timer | None = clock.call_later(timeout, self._check)

    def good_until(self) -> float:
        return self._beat + self.timeout * (1 - MARGIN)

    async def wait_lost(self) -> None:
        await self._ended.wait()

    def renew(self) -> None:
        """A heartbeat arrived. A session that ended stays ended."""
        if self.state is SessionState.CONNECTED:
            self._beat = self._clock.monotonic()

    def end(self, state: SessionState) -> None:
        """LOST or CLOSED, for good."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.state is SessionState.CONNECTED:
            self.state = state
            self._ended.set()

    def _check(self) -> None:
        # Heartbeats only note the time; the timer finds out how much of the lease is left.
        left = self._beat + self.timeout - self._clock.monotonic()
        if left > 0:
            self._timer = self._clock.call_later(left, self._check)
            return
        self._timer = None
        self.end(SessionState.LOST)
        self._expired(self)


class Heartbeat:
    """Calls `beat` a few times per session timeout on the holder's clock, until stopped."""

    __slots__ = ("_beat", "_clock", "_interval", "_timer")

    def __init__(self, clock: Clock, timeout: float, beat: Callable[[], None]) -> None:
        self._clock = clock
        self._interval = timeout / BEATS_PER_TIMEOUT
        self._beat = beat
        self._timer: Timer | None = None

    def start(self) -> None:
        if self._timer is None:
            self._timer = self._clock.call_later(self._interval, self._tick)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self._timer = self._clock.call_later(self._interval, self._tick)
        self._beat()
