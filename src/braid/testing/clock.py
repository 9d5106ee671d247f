"""`ManualClock`: time that stands still until a test moves it, on a real event loop with real sockets.

Timers due in the time moved over fire in order, each at its own moment, and the tasks they wake run before the next one fires;
so a loop that sleeps 10 s wakes six times in a minute.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from typing import Any

TURNS = 5
"""Loop turns given to woken tasks before the next timer fires."""
DEFAULT_START_MS = 1_750_000_000_000


class ManualTimer:
    """A pending call; see `braid.runtime.clock.Timer`."""

    __slots__ = ("args", "callback", "is_cancelled", "number", "when")

    def __init__(self, when: float, number: int, callback: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.when = when
        self.number = number
        self.callback = callback
        self.args = args
        self.is_cancelled = False

    def __lt__(self, other: ManualTimer) -> bool:
        return (self.when, self.number) < (other.when, other.number)

    def cancel(self) -> None:
        self.is_cancelled = True


class ManualClock:
    """A `Clock` for tests. All of it belongs to one event loop."""

    def __init__(self, start_ms: int = DEFAULT_START_MS) -> None:
        self._start_ms = start_ms
        self._now = 0.0
        self._timers: list[ManualTimer] = []
        self._count = 0

    def now_ms(self) -> int:
        return self._start_ms + int(self._now * 1000)

    def monotonic(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        timer = self.call_later(seconds, _wake, woken)
        try:
            await woken
        finally:
            timer.cancel()

    def call_later(self, seconds: float, callback: Callable[..., Any], *args: Any) -> ManualTimer:
        self._count += 1
        timer = ManualTimer(self._now + max(seconds, 0.0), self._count, callback, args)
        heapq.heappush(self._timers, timer)
        return timer

    async def advance(self, seconds: float) -> None:
        """Move time forward and let everything due happen."""
        end = self._now + seconds
        await self._settle()
        while self._timers and self._timers[0].when <= end:
            timer = heapq.heappop(self._timers)
            if timer.is_cancelled:
                continue
            self._now = max(self._now, timer.when)
            timer.callback(*timer.args)
            await self._settle()
        self._now = end

    @staticmethod
    async def _settle() -> None:
        for _turn in range(TURNS):
            await asyncio.sleep(0)


def _wake(sleeper: asyncio.Future[None]) -> None:
    if not sleeper.done():
        sleeper.set_result(None)
