"""Threads: the few blocking calls (fsync, disk reads, compression) run here, off the loop.

A `Worker` is one thread that runs its jobs in order and reports each result on the loop. `InlineThreads` runs jobs in the
caller's thread, still reporting through the loop, so that a simulation has one thread only.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
Done = Callable[[Any, BaseException | None], None]


class Worker(Protocol):
    """One thread with a queue of jobs."""

    def post(self, job: Callable[[], Any], done: Done) -> None:
        """Queue `job`; later call `done(result, error)` on the loop. Jobs run one after the other, in order."""
        ...

    async def run(self, job: Callable[[], T]) -> T:
        """Run `job` after everything queued before it and return its result."""
        ...

    async def close(self) -> None:
        """Run what is queued, then end the thread. Idempotent."""
        ...


class Threads(Protocol):
    """Makes workers."""

    def worker(self, name: str) -> Worker: ...


def _future_done(future: asyncio.Future[Any]) -> Done:
    def done(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    return done


class ThreadWorker:
    """A real thread bound to the loop that made it."""

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Done] | None] = queue.SimpleQueue()
        self._ended = loop.create_future()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def post(self, job: Callable[[], Any], done: Done) -> None:
        if self._closing:
            raise RuntimeError("the worker is closed")
        self._jobs.put((job, done))

    async def run(self, job: Callable[[], T]) -> T:
        future: asyncio.Future[T] = self._loop.create_future()
        self.post(job, _future_done(future))
        return await future

    async def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._jobs.put(None)
        await asyncio.shield(self._ended)
        self._thread.join()

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, done = item
            try:
                result, error = job(), None
            except BaseException as exc:  # noqa: BLE001 - reported to the loop, which decides
                result, error = None, exc
            is_heard = self._report(done, result, error)
            del item, job, done, result, error  # or they live on until the next job, with every frame of an error
            if not is_heard:
                return
        self._report(self._end, None, None)

    def _end(self, _result: Any, _error: BaseException | None) -> None:
        if not self._ended.done():
            self._ended.set_result(None)

    def _report(self, done: Done, result: Any, error: BaseException | None) -> bool:
        try:
            self._loop.call_soon_threadsafe(done, result, error)
        except RuntimeError:  # the loop is closed: nobody is left to tell
            return False
        return True


class SystemThreads:
    """Real threads."""

    def worker(self, name: str) -> Worker:
        return ThreadWorker(name, asyncio.get_running_loop())


class InlineWorker:
    """Runs a job at once in the caller's thread and reports it in a later loop turn."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def post(self, job: Callable[[], Any], done: Done) -> None:
        try:
            result, error = job(), None
        except BaseException as exc:  # noqa: BLE001 - reported to the loop, which decides
            result, error = None, exc
        self._loop.call_soon(done, result, error)

    async def run(self, job: Callable[[], T]) -> T:
        future: asyncio.Future[T] = self._loop.create_future()
        self.post(job, _future_done(future))
        return await future

    async def close(self) -> None:
        await asyncio.sleep(0)


class InlineThreads:
    """No threads at all: for simulation and for deterministic tests."""

    def worker(self, name: str) -> Worker:
        return InlineWorker(asyncio.get_running_loop())
