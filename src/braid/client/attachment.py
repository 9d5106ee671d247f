"""`Attachment`: a producer's or consumer's place at a broker, found by lookup and found again whenever it is lost.

Owns the order of things: one attach at a time, growing pauses with jitter between attempts, and the decision which errors end
the object for good. What attaching means is the subclass's business.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from braid.client.connection import Connection
from braid.errors import (
    BraidError,
    Closed,
    ConnectionLost,
    Denied,
    IncompatibleSchema,
    InvalidTopicName,
    NotAllowed,
    NotFound,
    ProducerFenced,
    QuotaExceeded,
    TopicTerminated,
    TransportError,
    Unavailable,
)
from braid.runtime.tasks import Tasks

if TYPE_CHECKING:
    from braid.client.client import Client

log = logging.getLogger(__name__)
FINAL = (TopicTerminated, ProducerFenced, InvalidTopicName, NotAllowed, NotFound, Denied, IncompatibleSchema, Closed)
"""Answers that stay the same however often one asks."""
FULL_PAUSE = 1.0
"""Seconds between two questions whether there is room again: messages sent meanwhile wait for the answer."""
TRANSIENT = (TransportError, Unavailable, TimeoutError)


class Attachment:
    """Base of the per-topic producer and consumer."""

    def __init__(self, client: Client, topic: str) -> None:
        self.topic = topic
        self.client = client
        self.config = client.config
        self.clock = client.runtime.clock
        self.connection: Connection | None = None
        self.failure: BraidError | None = None
        """Why this object is of no more use, if so."""
        self.is_closed = False
        self.attached = asyncio.Event()
        self.hold = 0.0
        """Seconds to wait before attaching again; set by a subclass whose last attachment did it no good."""
        self._is_lost = asyncio.Event()
        self._tasks = Tasks(f"client {topic}")

    async def open(self) -> None:
        """Attach for the first time; transient refusals are retried until the operation's deadline."""
        deadline = self.clock.monotonic() + self.config.operation_timeout
        pause = self.config.backoff_initial
        while True:
            try:
                await self._attach_once()
                break
            except (BraidError, TimeoutError) as error:
                if not self.is_transient(error) or self.clock.monotonic() + pause >= deadline:
                    raise
                log.info("attaching to %s failed, trying again: %s", self.topic, error)
            await self.clock.sleep(pause)
            pause = min(pause * 2, self.config.backoff_max)
        self._tasks.spawn(self._stay(), "stay attached")

    async def attach(self, connection: Connection) -> None:
        """Register at the broker behind this connection."""
        raise NotImplementedError

    def begin(self, connection: Connection) -> None:
        """Attached: go on with what waited."""

    def is_registered(self, connection: Connection) -> bool:
        """Whether the connection still knows us: the broker may have closed us right after it let us in."""
        raise NotImplementedError

    def is_final(self, error: BraidError) -> bool:
        """Whether asking again can only give the same answer."""
        return isinstance(error, FINAL)

    def is_transient(self, error: BaseException) -> bool:
        """Whether asking again is worth while when attaching for the first time."""
        return isinstance(error, TRANSIENT)

    def refused(self, error: BraidError) -> None:
        """Attaching failed and is tried again."""

    def start(self) -> None:
        """Attach in the background, and go on trying."""
        self._is_lost.set()
        self._tasks.spawn(self._stay(), "stay attached")

    def end(self, error: BraidError) -> None:
        """A final answer came while attaching."""
        self.failure = error
        self.failed(error)

    def lost(self) -> None:
        """The place at the broker is gone; a new one is being looked for."""

    def failed(self, error: BraidError) -> None:
        """There will be no place any more: tell everybody who waits."""

    def detached(self, error: BraidError) -> None:
        """From the connection: it ended, or the broker closed us."""
        if self.connection is None:
            return
        self.connection = None
        self.attached.clear()
        self.lost()
        self._is_lost.set()

    def check_usable(self) -> None:
        if self.is_closed:
            raise Closed(f"The use of {self.topic} was closed.")
        if self.failure is not None:
            raise type(self.failure)(*self.failure.args)

    async def shut(self) -> None:
        """End for good, without telling the broker."""
        self.is_closed = True
        self.failed(Closed(f"The use of {self.topic} was closed."))
        await self._tasks.close()

    async def _attach_once(self) -> None:
        connection = await self.client.locate(self.topic)
        await self.attach(connection)
        if not connection.is_open or not self.is_registered(connection):
            raise ConnectionLost(f"The connection to {connection.address} ended while {self.topic} was being attached.")
        self.connection = connection
        self.attached.set()
        self.begin(connection)

    async def _stay(self) -> None:
        while True:
            await self._is_lost.wait()
            self._is_lost.clear()
            if self.hold:
                await self.clock.sleep(self._jittered(self.hold))
            pause = self.config.backoff_initial
            while self.connection is None:
                try:
                    await self._attach_once()
                except BraidError as error:
                    if self.is_final(error):
                        self.end(error)
                        return
                    log.info("attaching to %s again failed: %s", self.topic, error)
                    self.refused(error)
                    await self.clock.sleep(self._jittered(pause))
                    longest = self.config.backoff_max
                    pause = min(pause * 2, min(FULL_PAUSE, longest) if isinstance(error, QuotaExceeded) else longest)

    def _jittered(self, pause: float) -> float:
        return pause * (0.5 + self.client.runtime.random.random())
