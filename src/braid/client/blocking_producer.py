"""`Producer` without `await`.

Owns the queue between the callers' threads and the loop: messages enter the producer in the order of the calls, and many share
one wake-up of the loop. The queue is bounded (INV17): a caller waits while it is full.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Concatenate, ParamSpec

from braid.client import producer
from braid.client.blocking_loop import LoopThread, Opened, waited
from braid.client.blocks import Block
from braid.client.messages import MessageId
from braid.client.transactions import Joinable
from braid.errors import BraidError, Overloaded

MAX_QUEUED = 1000

P = ParamSpec("P")
Start = Callable[[], "asyncio.Future[MessageId]"]


class Handover(Opened[producer.Producer]):
    """Calls on their way to the loop."""

    def __init__(self, inner: producer.Producer, thread: LoopThread) -> None:
        super().__init__(inner, thread)
        self._lock = threading.Lock()
        self._places = threading.Semaphore(MAX_QUEUED)
        self._queue: deque[tuple[Start | None, Future[Any]]] = deque()
        self._is_working = False

    def _enqueue(self, start: Start | None) -> Future[Any]:
        """Have the loop call this after everything before; without anything to call: when everything before was called."""
        self._thread.check()
        self._places.acquire()
        done: Future[Any] = Future()
        with self._lock:
            self._queue.append((start, done))
            is_idle, self._is_working = not self._is_working, True
        if is_idle:
            self._thread.submit(self._work)
        return done

    async def _work(self) -> None:
        start: Start | None
        done: Future[Any] | None = None
        try:
            while True:
                with self._lock:
                    if not self._queue:
                        self._is_working = False
                        return
                    start, done = self._queue.popleft()
                self._places.release()
                if start is None:
                    done.set_result(None)
                else:
                    await self._begin(start, done)
        finally:
            # Cancelled, because the client is closed: who waits must know.
            with self._lock:
                left = [each for _start, each in self._queue]
                self._queue.clear()
            for each in [done, *left]:
                if each is not None and not each.done() and self._thread.is_closed:
                    each.set_exception(self._thread.closed())

    async def _begin(self, start: Start, done: Future[MessageId]) -> None:
        while True:
            try:
                sent = start()
            except Overloaded:
                try:
                    await self._inner.room()
                except BraidError as error:
                    done.set_exception(error)
                    return
            except (BraidError, TypeError, ValueError) as error:
                done.set_exception(error)
                return
            else:
                sent.add_done_callback(functools.partial(_copy, done))
                return


def _copy(done: Future[Any], sent: asyncio.Future[Any]) -> None:
    if sent.cancelled():
        done.cancel()
    elif (error := sent.exception()) is not None:
        done.set_exception(error)
    else:
        done.set_result(sent.result())


def queued(
    method: Callable[Concatenate[producer.Producer, P], asyncio.Future[MessageId]],
) -> Callable[Concatenate[Handover, P], Future[MessageId]]:
    """The same method, called on the loop in the order of the calls; what it raises is in the future."""

    @functools.wraps(method)
    def call(self: Handover, /, *args: P.args, **kwargs: P.kwargs) -> Future[MessageId]:
        return self._enqueue(lambda: method(self._inner, *args, **kwargs))

    return call


def sent(
    method: Callable[Concatenate[producer.Producer, P], asyncio.Future[MessageId]],
) -> Callable[Concatenate[Handover, P], MessageId]:
    """The same, waited for."""

    def call(self: Handover, /, *args: P.args, **kwargs: P.kwargs) -> MessageId:
        found: MessageId = self._enqueue(lambda: method(self._inner, *args, **kwargs)).result()
        return found

    return functools.wraps(producer.Producer.send)(call)


class Producer(Handover):
    """Sends messages to a topic. Made by `Client.producer`; `with` closes it. Safe to use from several threads."""

    send = sent(producer.Producer.send_nowait)
    send_nowait = queued(producer.Producer.send_nowait)
    room = waited(producer.Producer.room)

    def send_block(self, block: Block, *, txn: Joinable | None = None) -> Future[None]:
        """Send the messages of a block, in order per key, after everything this thread sent before. Returns once the window
        has taken all of them; the future is done when the last one is durable, or has failed."""
        done: Future[None] = Future()

        async def start() -> None:
            taken = await self._inner.send_block(block, txn=txn)
            taken.add_done_callback(functools.partial(_copy, done))

        self._enqueue(None).result()
        self._thread.run(start)
        return done

    @property
    def topic(self) -> str:
        """The topic, by its full name."""
        return self._inner.topic

    @property
    def name(self) -> str:
        """The producer's name, given or taken from the broker."""
        return self._inner.name

    @property
    def last_sequence_id(self) -> int:
        """Sequence id of the newest message."""
        return self._inner.last_sequence_id

    @property
    def lanes_made(self) -> int:
        """How many lanes it has made since it was opened: on a scalable topic at most a few for each segment there ever was."""
        return self._inner.lanes_made

    @property
    def is_connected(self) -> bool:
        """Whether every segment or partition it sends to is attached right now."""
        return self._inner.is_connected

    def flush(self) -> None:
        """Return once everything sent so far is answered, well or badly."""
        self._enqueue(None).result()
        self._thread.run(self._inner.flush)

    def close(self) -> None:
        """Send what is left and close. Idempotent."""
        if not self._thread.is_closed:
            self._enqueue(None).result()
            self._thread.run(self._inner.close, is_closing=True)
