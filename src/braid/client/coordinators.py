"""`Coordinators`: which broker serves which transaction coordinator, and asking one until it answers.

Owns the watch at a broker (commands 79 to 81), opened by the first transaction and opened again whenever it is lost. What an
update leaves out is served where it was before; a coordinator whose broker cannot be reached is asked for at any other, because
every broker can serve all of them. Knows nothing of what transactions hold.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from braid.client.connection import Connection
from braid.errors import (
    BraidError,
    Closed,
    ConnectionLost,
    DeadlineExceeded,
    MetadataFailure,
    Overloaded,
    TransactionCoordinatorNotFound,
    TransactionNotFound,
    TransportError,
    Unavailable,
    from_code,
)
from braid.runtime.tasks import Tasks
from braid.wire import txn_requests

if TYPE_CHECKING:
    from braid.client.client import Client

log = logging.getLogger(__name__)
WATCH_BACKOFF_MAX = 30.0
"""Longest pause between attempts to open the watch again, in seconds."""
PASSING = (TransportError, Unavailable, MetadataFailure, TransactionCoordinatorNotFound)
"""Answers, or none, after which the same request is worth another attempt."""


class Coordinators:
    """Of one client."""

    def __init__(self, client: Client) -> None:
        self.count = 0
        """How many there are; 0 = not known yet."""
        self._client = client
        self._clock = client.runtime.clock
        self._config = client.config
        self._urls: dict[int, str] = {}
        self._turn = 0
        self._connection: Connection | None = None
        self._watch_id = -1
        self._first: asyncio.Future[None] | None = None
        self._is_lost = asyncio.Event()
        self._is_closed = False
        self._opening = asyncio.Lock()
        self._tasks = Tasks("transaction coordinators")

    async def next(self) -> int:
        """The coordinator for a new transaction: they take turns. Raises NotAllowed where transactions are off."""
        if not self.count:
            await self._open()
        self._turn += 1
        return self._turn % self.count

    async def of(self, name: str) -> int:
        """The coordinator for what has this name: always the same one, so that those who ask for it meet at one broker."""
        if not self.count:
            await self._open()
        return zlib.crc32(name.encode()) % self.count

    async def ask(self, coordinator: int, build: Callable[[int], bytes], deadline: float) -> Any:
        """The answer to a request; `build` is called for each attempt. What passes is tried again until the deadline and
        raised then, whether it was done or not."""
        pause = self._config.backoff_initial
        while True:
            try:
                connection = await self._client.connection_for(self._urls.get(coordinator))
                return await connection.request(build)
            except PASSING as error:
                if isinstance(error, TransactionCoordinatorNotFound):
                    await self._check(coordinator)
                if self._clock.monotonic() + pause >= deadline:
                    raise
                log.info("transaction coordinator %d did not answer, trying again: %s", coordinator, error)
            await self._clock.sleep(pause * (0.5 + self._client.runtime.random.random()))
            pause = min(pause * 2, self._config.backoff_max)

    async def begin(self, build: Callable[[int, int], bytes], deadline: float) -> Any:
        """The answer to a request that any coordinator can serve; `build` is given the number of the request and a coordinator.
        What passes is tried again with the next one, at once as long as each has refused no more often than the others: what is
        wrong with one (a record of its own, too many open transactions) is of no concern to the next."""
        pause, refused = self._config.backoff_initial, 0
        while True:
            coordinator = await self.next()
            try:
                connection = await self._client.connection_for(self._urls.get(coordinator))
                return await connection.request(partial(_for_coordinator, build, coordinator))
            except PASSING as error:
                if self._clock.monotonic() + pause >= deadline:
                    raise
                log.info("transaction coordinator %d begins nothing, trying the next one: %s", coordinator, error)
                if isinstance(error, MetadataFailure | Overloaded):
                    refused += 1
                    if refused % self.count:
                        continue
            await self._clock.sleep(pause * (0.5 + self._client.runtime.random.random()))
            pause = min(pause * 2, self._config.backoff_max)

    async def _check(self, coordinator: int) -> None:
        """Raise if there is none of this number, so that waiting for it is of no use."""
        if not self.count:
            await self._open()
        if coordinator >= self.count:
            raise TransactionNotFound(
                f"There is no transaction of coordinator {coordinator}; this cluster has coordinators 0 to {self.count - 1}."
            )

    async def close(self) -> None:
        """End the watch. Idempotent."""
        self._is_closed = True
        self._client.forget(self)
        self._leave()
        await self._tasks.close()

    # The connection's side.

    def update(self, body: Any) -> None:
        if body.watch_id != self._watch_id:
            return
        if body.HasField("error"):
            self._refused(from_code(body.error, body.message))
            return
        self.count = max(1, body.snapshot.parallelism)
        self._urls.update({each.tc_id: each.broker_service_url for each in body.snapshot.assignments})
        if self._first is not None and not self._first.done():
            self._first.set_result(None)

    def lost(self, error: BraidError) -> None:
        self._connection = None
        if self._first is not None and not self._first.done():
            self._first.set_exception(ConnectionLost(error.message))
        self._is_lost.set()

    # Inside.

    async def _open(self) -> None:
        """Wait for the first picture; what passes is tried again until the operation's deadline."""
        async with self._opening:
            if self.count:
                return
            if self._is_closed:
                raise Closed("The client was closed.")
            deadline = self._clock.monotonic() + self._config.operation_timeout
            pause = self._config.backoff_initial
            while True:
                try:
                    await self._start()
                    break
                except PASSING as error:
                    if self._clock.monotonic() + pause >= deadline:
                        raise
                    log.info("the transaction coordinators are not known yet: %s", error)
                await self._clock.sleep(pause)
                pause = min(pause * 2, self._config.backoff_max)
            self._turn = self._client.runtime.random.randrange(self.count)  # so that clients do not all begin with the first
            self._tasks.spawn(self._stay(), "stay told")

    async def _start(self) -> None:
        connection = await self._client.service_connection()
        first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._first = first
        self._watch_id = self._client.new_id()
        self._connection = connection
        connection.coordinator_watches[self._watch_id] = self
        timer = self._clock.call_later(self._config.operation_timeout, _late, first)
        try:
            connection.write(txn_requests.watch_assignments(self._watch_id))
            await first
        except BaseException:
            self._leave()
            raise
        finally:
            timer.cancel()
            self._first = None

    def _refused(self, error: BraidError) -> None:
        if self._first is not None and not self._first.done():
            self._first.set_exception(error)
        else:
            log.warning("the broker ended the watch of the transaction coordinators: %s", error)
            self._leave()
            self._is_lost.set()

    def _leave(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.coordinator_watches.pop(self._watch_id, None)
            if connection.is_open:
                connection.write(txn_requests.close_watch(self._watch_id))
        self._watch_id = -1

    async def _stay(self) -> None:
        """Open the watch again whenever it is lost: at once, then with growing pauses."""
        while True:
            await self._is_lost.wait()
            self._is_lost.clear()
            pause = self._config.backoff_initial
            while self._connection is None:
                try:
                    await self._start()
                except Closed:
                    return
                except BraidError as error:
                    log.info("the transaction coordinators cannot be watched yet: %s", error)
                    await self._clock.sleep(pause * (0.5 + self._client.runtime.random.random()))
                    pause = min(pause * 2, WATCH_BACKOFF_MAX)


def _for_coordinator(build: Callable[[int, int], bytes], coordinator: int, number: int) -> bytes:
    return build(number, coordinator)


def _late(first: asyncio.Future[None]) -> None:
    if not first.done():
        first.set_exception(DeadlineExceeded("No broker told where the transaction coordinators are in time."))
