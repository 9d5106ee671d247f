"""Time: wall clock, monotonic clock, sleeping and timers.

Owns every use of time in Braid. A test replaces `SystemClock` by `braid.testing.clock.ManualClock` (real sockets, time
moved by hand) or runs `SystemClock` on a loop with virtual time. Timers that keep the product alive must come from here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Protocol


class Timer(Protocol):
    """A pending call that can be taken back."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """Where code gets its time from."""

    def now_ms(self) -> int:
        """Wall clock in integer milliseconds since the epoch."""
        ...

    def monotonic(self) -> float:
        """Seconds that never go back; for durations and deadlines."""
        ...

    async def sleep(self, seconds: float) -> None: ...

    def call_later(self, seconds: float, callback: Callable[..., Any], *args: Any) -> Timer: ...


class SystemClock:
    """The machine's clock, with timers on the running loop."""

    __slots__ = ()

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def call_later(self, seconds: float, callback: Callable[..., Any], *args: Any) -> Timer:
        return asyncio.get_running_loop().call_later(seconds, callback, *args)
