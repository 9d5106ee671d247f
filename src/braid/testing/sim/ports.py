"""Clock and threads of simulated nodes: virtual time with a skew of its own, and jobs that take time in the only thread."""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from braid.runtime.clock import Timer
from braid.runtime.env import Random
from braid.runtime.threads import Done, Worker
from braid.testing.sim.loop import START

T = TypeVar("T")
START_MS = 1_750_000_000_000


class SimClock:
    """The clock of one node, on the loop's virtual time. `skew_ms` is what its wall clock is wrong by."""

    def __init__(self, skew_ms: int = 0) -> None:
        self.skew_ms = skew_ms

    def now_ms(self) -> int:
        return START_MS + self.skew_ms + int((asyncio.get_running_loop().time() - START) * 1000)

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()

    def sleep(self, seconds: float) -> Coroutine[Any, Any, None]:
        return asyncio.sleep(seconds)

    def call_later(self, seconds: float, callback: Callable[..., Any], *args: Any) -> Timer:
        return asyncio.get_running_loop().call_later(seconds, callback, *args)


class DiskSpeed:
    """How long jobs take; faults change it."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self.slowest = 0.004
        """Seconds of the longest usual job."""
        self.stall_until = 0.0
        """No job ends before."""

    def draw(self, now: float) -> float:
        """Seconds until a job that starts now is done."""
        seconds = self.slowest * self._rng.random() ** 3
        return max(seconds, self.stall_until - now)


class SimWorker:
    """Runs jobs one after the other, each after a seeded delay; the answer comes a little after the effect."""

    def __init__(self, speed: DiskSpeed) -> None:
        self._speed = speed
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()  # jobs belong to the node that made the worker, whoever posts them
        self._jobs: deque[tuple[Callable[[], Any], Done]] = deque()
        self._is_busy = False

    def post(self, job: Callable[[], Any], done: Done) -> None:
        self._jobs.append((job, done))
        if not self._is_busy:
            self._start()

    async def run(self, job: Callable[[], T]) -> T:
        future: asyncio.Future[T] = self._loop.create_future()

        def done(result: Any, error: BaseException | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        self.post(job, done)
        return await future

    async def close(self) -> None:
        while self._is_busy:
            await self.run(lambda: None)

    def _start(self) -> None:
        self._is_busy = True
        self._loop.call_later(self._speed.draw(self._loop.time()), self._work, context=self._context)

    def _work(self) -> None:
        job, done = self._jobs.popleft()
        try:
            result, error = job(), None
        except BaseException as exc:  # noqa: BLE001 - reported to the loop, which decides
            result, error = None, exc
        self._loop.call_later(self._speed.slowest * 0.1, self._tell, done, result, error, context=self._context)

    def _tell(self, done: Done, result: Any, error: BaseException | None) -> None:
        self._is_busy = False
        if self._jobs:
            self._start()
        done(result, error)


class SimThreads:
    """Workers of one disk."""

    def __init__(self, speed: DiskSpeed) -> None:
        self._speed = speed

    def worker(self, name: str) -> Worker:
        return SimWorker(self._speed)
