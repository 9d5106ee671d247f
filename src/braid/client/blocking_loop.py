"""`LoopThread`: an event loop on a thread of its own, and how a method of an asynchronous class becomes one that waits.

Owns the hand-over between the caller's thread and the loop. A wait that is broken off (Ctrl-C) cancels what was waited for; if
that was done already its result is not lost: the call returns it and the interruption is raised by the thread's next call.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from braid.client.opening import Closable
from braid.errors import Closed

CANCEL_SECONDS = 5.0
"""How long an interrupted call waits for the word that it was cancelled."""

A = TypeVar("A", covariant=True)
P = ParamSpec("P")
C = TypeVar("C", bound=Closable, covariant=True)
T = TypeVar("T")


class LoopThread:
    """One event loop, run by a thread until `close`. Used from any thread but one that runs an event loop itself."""

    def __init__(self, name: str, what: str, instead: str) -> None:
        """`what` it is for, as messages say it, and what to use `instead` where a loop runs already."""
        self._what = what
        self._instead = instead
        self._refuse_in_a_loop()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()
        self._lock = threading.Lock()
        self._waited_for: set[Future[Any]] = set()
        self._interrupted: dict[int, BaseException] = {}  # by thread
        self.is_closed = False

    def run(self, start: Callable[[], Coroutine[Any, Any, T]], *, is_closing: bool = False) -> T:
        """Make the coroutine on the loop and wait for its result."""
        self.check()
        late = None if is_closing else self._interrupted.pop(threading.get_ident(), None)
        if late is not None:
            raise late
        call = _Call(start)
        try:
            self._begin(call)
            return call.result.result()
        except BaseException as error:
            if call.result.done() and call.result.exception() is error:
                raise
            return self._broken_off(call, error)
        finally:
            with self._lock:
                self._waited_for.discard(call.result)

    def submit(self, start: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        """Start the coroutine on the loop."""
        return asyncio.run_coroutine_threadsafe(start(), self._loop)

    def check(self) -> None:
        """Raises Closed, or RuntimeError where waiting would stop an event loop."""
        self._refuse_in_a_loop()
        if self.is_closed:
            raise self.closed()

    def closed(self) -> Closed:
        return Closed(f"The {self._what} was closed.")

    def close(self) -> None:
        """Cancel what still runs and end the thread. Idempotent."""
        with self._lock:
            if self.is_closed:
                return
            self.is_closed = True
        self.submit(self._cancel_all).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        for result in self._waited_for:
            if not result.done():
                result.set_exception(self.closed())

    def _begin(self, call: _Call[Any]) -> None:
        with self._lock:
            if self.is_closed:
                raise self.closed()
            self._waited_for.add(call.result)
            self.submit(call.run)

    def _broken_off(self, call: _Call[T], error: BaseException) -> T:
        """The wait ended early, by Ctrl-C for one. Nobody would take the result, so the call is cancelled; if it is done for
        all that, its result is returned now and the error is raised later."""
        with self._lock:
            if self.is_closed or call.result not in self._waited_for:
                raise error
            self._loop.call_soon_threadsafe(call.cancel)
        wait([call.result], CANCEL_SECONDS)
        if not call.result.done() or call.result.exception() is not None:
            raise error
        self._interrupted[threading.get_ident()] = error
        return call.result.result()

    async def _cancel_all(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._loop.shutdown_asyncgens()

    def _refuse_in_a_loop(self) -> None:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return
        raise RuntimeError(
            f"The blocking {self._what} would stop the event loop that runs here; use {self._instead} with await instead."
        )


class _Call(Generic[T]):
    """One call from another thread: `run` and `cancel` happen on the loop, `result` is waited for elsewhere."""

    def __init__(self, start: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._start = start
        self._task: asyncio.Task[Any] | None = None
        self._is_cancelled = False
        self.result: Future[T] = Future()

    async def run(self) -> None:
        self._task = asyncio.current_task()
        try:
            if self._is_cancelled:
                raise asyncio.CancelledError
            value = await self._start()
        except asyncio.CancelledError:
            self.result.set_exception(Closed("The call was cancelled."))
        except BaseException as error:
            self.result.set_exception(error)
            raise
        else:
            self.result.set_result(value)

    def cancel(self) -> None:
        self._is_cancelled = True
        if self._task is not None:
            self._task.cancel()


class Blocking(Generic[A]):
    """An object of an asynchronous class whose methods are waited for."""

    def __init__(self, inner: A, thread: LoopThread) -> None:
        self._inner = inner
        self._thread = thread

    def _look(self, look: Callable[[], T]) -> T:
        """What `look` sees on the loop's thread, to which everything inside belongs."""

        async def there() -> T:
            return look()

        return self._thread.run(there)


class Opened(Blocking[C]):
    """One that is closed: `with` does it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close it. Idempotent; with the client closed already there is nothing to do."""
        if not self._thread.is_closed:
            self._thread.run(self._inner.close, is_closing=True)


def waited(method: Callable[Concatenate[A, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Blocking[A], P], T]:
    """The same method, which returns when it is done."""

    @functools.wraps(method)
    def call(self: Blocking[A], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._thread.run(lambda: method(self._inner, *args, **kwargs))

    return call


def on_loop(method: Callable[Concatenate[A, P], T]) -> Callable[Concatenate[Blocking[A], P], T]:
    """The same method, which does not wait, called on the loop's thread."""

    @functools.wraps(method)
    def call(self: Blocking[A], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._look(lambda: method(self._inner, *args, **kwargs))

    return call
