"""The commit pipeline: queue, group, make durable, publish, answer.

Owns the order of writes, the overlay of writes under way and the journal's failures. One group at a time is handed to the
journal's worker and the next starts when the last ends (no timer): the time a sync takes is the batching window. **Nothing is
visible or acknowledged before it is durable**, refusals included: an answer that rests on a pending write waits for that write,
or a reader could see the store go back. Must not know sessions, indexes or sequences.

Out of room: the group and everything behind it is dropped (StoreUnavailable), the pipeline is read-only and probes until there
is room. Any other write error is final: pending calls get OutcomeUnknown. The queue and the groups are bounded (INV17).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from braid.errors import BraidError, Closed, OutcomeUnknown, StoreUnavailable
from braid.metadata.journal import Change, Journal, JournalFull, Row
from braid.metadata.tables import Tables
from braid.metadata.watches import WatchBook
from braid.runtime.clock import Clock, Timer
from braid.runtime.slow import SlowOperations
from braid.runtime.threads import Worker

log = logging.getLogger(__name__)

MAX_PENDING: Final = 100_000
"""Changes that may wait for a commit."""
MAX_PENDING_BYTES: Final = 64 << 20
MAX_GROUP: Final = 4096
"""Operations in one commit."""
MAX_GROUP_BYTES: Final = 8 << 20
PROBE_SECONDS: Final = 1.0
"""Between two attempts to write again after the disk was full."""
REMINDER_SECONDS: Final = 60.0
"""Between two lines in the log while the disk stays full."""
IDLE_SECONDS: Final = 1.0
"""Without a commit, after which the journal may tidy up."""


class Operation:
    """Changes that commit together, and the answer for whoever waits. Several changes in one operation are all removals."""

    __slots__ = ("answer", "changes", "future", "size")

    def __init__(self, changes: Sequence[Change], answer: Any, future: asyncio.Future[Any] | None, size: int) -> None:
        self.changes = changes
        self.answer = answer  # Row, bool, None or the error to raise
        self.future = future
        self.size = size


class PipelineOwner(Protocol):
    """Who is told how the pipeline fares."""

    def published(self, counter: int) -> None:
        """Everything up to commit `counter` is durable and visible; its writers are answered next."""
        ...

    def discarded(self, keys: set[str]) -> None:
        """Changes of these keys, and all other pending ones, were given up."""
        ...

    def resumed(self) -> None:
        """There is room again."""
        ...

    def failed(self, error: BaseException) -> None:
        """Final: nothing can be written any more."""
        ...


class Pipeline:
    """Takes validated changes to the journal and into the tables."""

    def __init__(
        self,
        clock: Clock,
        slow: SlowOperations,
        journal: Journal,
        worker: Worker,
        tables: Tables,
        watches: WatchBook,
        *,
        counter: int,
        owner: PipelineOwner,
        idle_job: Callable[[], None] | None = None,
    ) -> None:
        self.durable = counter
        """Highest commit that is durable."""
        self.given = counter
        """Highest commit number given out."""
        self.is_read_only = False
        self.failure: BraidError | None = None
        self._clock = clock
        self._slow = slow
        self._journal = journal
        self._worker = worker
        self._tables = tables
        self._watches = watches
        self._owner = owner
        self._idle_job = idle_job
        self._loop = asyncio.get_running_loop()
        self._overlay: dict[str, Operation] = {}  # key -> last operation under way that changes it
        self._queue: list[Operation] = []
        self._in_flight: list[Operation] = []
        self._pending = 0
        self._pending_bytes = 0
        self._flush_due = False
        self._is_stopping = False
        self._full_since = self._reminded = 0.0
        self._timers: dict[str, Timer] = {}
        self._durable_when_idle = counter

    def pending(self, key: str) -> Operation | None:
        """The last operation under way that changes the key."""
        return self._overlay.get(key)

    def expected(self, key: str) -> Row | None:
        """The row as it will be when everything under way is committed."""
        pending = self._overlay.get(key)
        if pending is None:
            return self._tables.rows.get(key)
        return pending.changes[0][1] if len(pending.changes) == 1 else None

    def write(self, changes: Sequence[Change], answer: Any, future: asyncio.Future[Any] | None, size: int) -> None:
        """Queue validated changes, whose versions are the numbers after `given`; `future` gets `answer` once durable."""
        if self.is_read_only:
            raise StoreUnavailable("The metadata store is read-only because the disk is full; it resumes when there is room.")
        if future is not None and (self._pending >= MAX_PENDING or self._pending_bytes >= MAX_PENDING_BYTES):
            raise StoreUnavailable(f"{self._pending} metadata writes are already waiting for the disk; try again later.")
        operation = Operation(changes, answer, future, size)
        for key, _row in changes:
            self._overlay[key] = operation
        self.given += len(changes)
        self._enqueue(operation)

    def answer(self, answer: Any, pending: Operation | None) -> asyncio.Future[Any]:
        """Answer without writing: at once, or when the pending write the answer rests on is durable."""
        future: asyncio.Future[Any] = self._loop.create_future()
        if pending is None:
            _resolve(future, answer)
        else:
            self._enqueue(Operation((), answer, future, 0))
        return future

    async def settle(self) -> None:
        """Return once everything queued before is durable or has failed."""
        if self._in_flight or self._queue:
            future: asyncio.Future[None] = self._loop.create_future()
            self._enqueue(Operation((), None, future, 0))
            try:
                await future
            except (StoreUnavailable, OutcomeUnknown) as error:
                log.warning("metadata writes under way were given up: %s", error)

    def stop(self) -> None:
        """No more timers; call after `settle`."""
        self._is_stopping = True
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _enqueue(self, operation: Operation) -> None:
        self._queue.append(operation)
        self._pending += len(operation.changes) or 1
        self._pending_bytes += operation.size
        if not self._in_flight and not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)  # everything issued in this loop turn shares the commit

    def _flush(self) -> None:
        self._flush_due = False
        if self._in_flight or not self._queue:
            return
        self._in_flight, self._queue = self._next_group()
        changes = [change for operation in self._in_flight for change in operation.changes]
        # Numbers are given out in queue order, so the group ends where the changes still queued begin.
        counter = self.given - sum([len(operation.changes) for operation in self._queue])
        if not changes:
            self._publish(counter)
            return
        journal, began, key = self._journal, self._clock.monotonic(), changes[0][0]

        def committed(_result: None, error: BaseException | None) -> None:
            self._slow.note("metadata write", f"{key} and {len(changes) - 1} more changes", self._clock.monotonic() - began)
            self._committed(counter, error)

        self._worker.post(lambda: journal.commit(changes, counter), committed)

    def _next_group(self) -> tuple[list[Operation], list[Operation]]:
        queue = self._queue
        if len(queue) <= MAX_GROUP and self._pending_bytes <= MAX_GROUP_BYTES:
            return queue, []
        size = 0
        for position, operation in enumerate(queue):
            size += operation.size
            if position and (position >= MAX_GROUP or size > MAX_GROUP_BYTES):
                return queue[:position], queue[position:]
        return queue, []

    def _committed(self, counter: int, error: BaseException | None) -> None:
        if error is None:
            self._publish(counter)
        elif isinstance(error, JournalFull):
            self._out_of_room(error)
        else:
            self._fail(error)

    def _publish(self, counter: int) -> None:
        """The group in flight is durable: make it visible, tell watchers, answer."""
        group, self._in_flight = self._in_flight, []
        overlay, apply, changed = self._overlay, self._tables.apply, self._watches.changed
        for operation in group:
            self._pending -= len(operation.changes) or 1
            self._pending_bytes -= operation.size
            for key, row in operation.changes:
                old = apply(key, row)
                if overlay[key] is operation:
                    del overlay[key]
                changed(key, old, row)
        if counter > self.durable:
            self.durable = counter
            self._owner.published(counter)
        for operation in group:
            if operation.future is not None:
                _resolve(operation.future, operation.answer)
        if self._queue:
            self._flush()
        elif self._idle_job is not None:
            self._arm("idle", IDLE_SECONDS, self._idle)

    def _discard(self, make_error: Callable[[], BraidError]) -> None:
        """Give up everything under way."""
        dropped = self._in_flight + self._queue
        self._in_flight, self._queue = [], []
        self._pending = self._pending_bytes = 0
        self._overlay.clear()
        self._owner.discarded({key for operation in dropped for key, _ in operation.changes})
        for operation in dropped:
            if operation.future is not None:
                _resolve(operation.future, make_error())

    def _out_of_room(self, error: JournalFull) -> None:
        log.error("the metadata store is read-only: %s", error)
        self.is_read_only = True
        self._full_since = self._reminded = self._clock.monotonic()
        self._discard(lambda: StoreUnavailable(f"The metadata store could not write and nothing was changed: {error}"))
        self._arm("probe", PROBE_SECONDS, self._probe)

    def _probe(self) -> None:
        journal, counter = self._journal, self.given
        self._worker.post(lambda: journal.commit((), counter), lambda _result, error: self._probed(counter, error))

    def _probed(self, counter: int, error: BaseException | None) -> None:
        if isinstance(error, JournalFull):
            if (now := self._clock.monotonic()) - self._reminded >= REMINDER_SECONDS:
                self._reminded = now
                log.warning("the metadata store is read-only since %.0f s: %s", now - self._full_since, error)
            self._arm("probe", PROBE_SECONDS, self._probe)
        elif error is not None:
            self._fail(error)
        else:
            log.warning("the metadata store can write again")
            self.is_read_only = False
            self.durable = counter
            self._owner.resumed()

    def _idle(self) -> None:
        if self.durable != self._durable_when_idle or self._in_flight:
            self._durable_when_idle = self.durable
            self._arm("idle", IDLE_SECONDS, self._idle)
        elif self._idle_job is not None:
            self._worker.post(self._idle_job, self._rested)

    def _rested(self, _result: None, error: BaseException | None) -> None:
        if error is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self.failure is not None:
            return
        log.critical("the metadata store closes after a write error", exc_info=error)
        self.failure = Closed(f"The metadata store stopped after a write error and must be reopened: {error}")
        self._discard(lambda: OutcomeUnknown(f"A metadata write failed and may or may not have been kept: {error}"))
        self.stop()
        self._owner.failed(error)

    def _arm(self, name: str, seconds: float, call: Callable[[], None]) -> None:
        if name not in self._timers and not self._is_stopping:
            self._timers[name] = self._clock.call_later(seconds, self._fire, name, call)

    def _fire(self, name: str, call: Callable[[], None]) -> None:
        del self._timers[name]
        call()


def _resolve(future: asyncio.Future[Any], answer: Any) -> None:
    if future.done():  # the caller was cancelled; the write stands
        return
    if isinstance(answer, BaseException):
        future.set_exception(answer)
    else:
        future.set_result(answer)
