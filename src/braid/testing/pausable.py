"""`PausableClock`: the clock of one broker that a test can stop while everybody else's goes on.

While it is paused no timer of its owner fires and no sleep ends, so heartbeats stop and the owner's session runs out without
its noticing; what came due meanwhile happens, in order, when it goes on. Reading the time stays possible: a process that is
stopped and woken sees the time that has passed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from braid.runtime.clock import Clock, Timer


class _Pending:
    """A call that may have to wait for the end of a pause."""

    __slots__ = ("args", "callback", "inner", "is_over", "owner")

    def __init__(self, owner: PausableClock, callback: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.owner = owner
        self.callback = callback
        self.args = args
        self.inner: Timer
        self.is_over = False

    def cancel(self) -> None:
        self.is_over = True
        self.inner.cancel()

    def fire(self) -> None:
        if self.is_over:
            return
        if self.owner.is_paused:
            self.owner.due.append(self)
            return
        self.is_over = True
        self.callback(*self.args)


class PausableClock:
    """A `Clock` over another one."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.is_paused = False
        self.due: list[_Pending] = []

    def now_ms(self) -> int:
        return self._clock.now_ms()

    def monotonic(self) -> float:
        return self._clock.monotonic()

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0 and not self.is_paused:
            await self._clock.sleep(0)
            return
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        timer = self.call_later(seconds, _wake, woken)
        try:
            await woken
        finally:
            timer.cancel()

    def call_later(self, seconds: float, callback: Callable[..., Any], *args: Any) -> Timer:
        pending = _Pending(self, callback, args)
        pending.inner = self._clock.call_later(seconds, pending.fire)
        return pending

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        """Go on; what is overdue happens now."""
        self.is_paused = False
        due, self.due = self.due, []
        for pending in due:
            pending.fire()


def _wake(sleeper: asyncio.Future[None]) -> None:
    if not sleeper.done():
        sleeper.set_result(None)
