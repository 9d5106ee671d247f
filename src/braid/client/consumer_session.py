"""`ConsumerSession`: a consumer's registration at its topic's controller (commands 73 to 75), kept over reconnects.

Registers under the consumer's name, hands over the assignments that come, and registers again under the same name whenever the
connection is lost, so that the controller knows it as the same consumer. Assignments of an older layout are ignored inside one
registration. Reads no messages.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from braid.client.attachment import FINAL, TRANSIENT
from braid.client.connection import UNASKED, Connection
from braid.errors import (
    BraidError,
    Closed,
    ConnectionLost,
    ConsumerDisplaced,
    DeadlineExceeded,
    NotReady,
    RequestError,
    TransportError,
)
from braid.runtime.tasks import Tasks
from braid.wire import requests
from braid.wire.types import InitialPosition, ScalableConsumerType

if TYPE_CHECKING:
    from braid.client.layouts import LayoutSession

log = logging.getLogger(__name__)
REGISTER_BACKOFF_MAX = 30.0
"""Longest pause between attempts to register again, in seconds."""


class Assignment(msgspec.Struct, frozen=True):
    """The segments one consumer is to read."""

    layout_epoch: int
    topics: Mapping[int, str]
    """Physical name by segment id."""
    is_first: bool
    """Whether it answers a registration: what happened since the last one may have been missed."""
    resets: int
    """How often the subscription was reset."""
    places: Mapping[int, bytes | None] = {}
    """In a checkpoint group: where the group stands in these segments; empty is the beginning, None = not known."""
    owed: tuple[int, ...] = ()
    """In a checkpoint group: segments to let go of, saying where."""
    is_managed: bool = False
    """Whether the controller hands the places of a checkpoint group over."""
    is_partial: bool = False
    """In a checkpoint group: more will follow when others have let go of it."""


class ConsumerSession:
    """One registration."""

    def __init__(
        self,
        layouts: LayoutSession,
        subscription: str,
        name: str,
        kind: ScalableConsumerType,
        initial: InitialPosition,
        *,
        assigned: Callable[[Assignment], None],
        ended: Callable[[BraidError], None],
    ) -> None:
        self.client = layouts.client
        self.consumer_id = self.client.new_id()
        self.is_attached = False
        self._layouts = layouts
        self._subscription = subscription
        self._name = name
        self._kind = kind
        self._initial = initial
        self._assigned = assigned
        self._ended = ended
        self._connection: Connection | None = None
        self._epoch = -1
        self._term = 0
        self._is_registering = False
        self._early: list[Any] = []
        """Assignments that came before the answer to the registration was dealt with."""
        self._is_lost = asyncio.Event()
        self._failure: BraidError | None = None
        """Why it ended by itself, if so."""
        self._is_closed = False
        self._tasks = Tasks(f"session of {name} on {layouts.topic}")

    async def open(self) -> None:
        """Register; transient refusals are retried until the operation's deadline. The first assignment is handed over
        before this returns."""
        clock, config = self.client.runtime.clock, self.client.config
        deadline = clock.monotonic() + config.operation_timeout
        pause = config.backoff_initial
        while True:
            try:
                await self._register()
                break
            except TRANSIENT as error:
                if clock.monotonic() + pause >= deadline:
                    raise
                log.info("registering %s at %s failed, trying again: %s", self._name, self._layouts.topic, error)
            await clock.sleep(pause)
            pause = min(pause * 2, config.backoff_max)
        self._tasks.spawn(self._stay(), "stay registered")

    async def close(self) -> None:
        """Leave: the controller gives the segments to others at once. Idempotent."""
        self._is_closed = True
        connection = self._connection
        if connection is not None:
            connection.scalable_consumers.pop(self.consumer_id, None)
            try:
                await connection.request(lambda number: requests.close_consumer(number, self.consumer_id))
            except (TransportError, DeadlineExceeded, RequestError) as error:
                log.info("%s could not leave %s: %s", self._name, self._layouts.topic, error)
            self._connection = None
        await self._tasks.close()

    @property
    def is_managed(self) -> bool:
        """Whether the controller hands the places of a checkpoint group over."""
        return self._term > 0

    @property
    def is_over(self) -> bool:
        """Whether this consumer has no part in the subscription any more."""
        return self._failure is not None

    def check(self) -> None:
        """Raise why this consumer has no part in the subscription any more, if so."""
        if self._failure is not None:
            raise self._ending()

    async def report(self, places: Mapping[int, bytes | None], released: Collection[int]) -> None:
        """Say where this member of a checkpoint group stands. Raises NotReady if that has to be said again."""
        connection, term = self._connection, self._term
        if connection is None:
            raise NotReady(f"{self._name} is not registered with {self._layouts.topic} at the moment.")
        await connection.request(lambda number: requests.report_places(number, self.consumer_id, term, places, released))

    # The connection's side.

    def assignment(self, body: Any) -> None:
        if self._is_registering:
            self._early.append(body.assignment)
        else:
            self._take(body.assignment, is_first=False)

    def displaced(self) -> None:
        self._connection = None
        self.is_attached = False
        if not self._is_closed:
            self._end(
                ConsumerDisplaced(
                    f"Another consumer took the name {self._name} in the subscription {self._subscription} of "
                    f"{self._layouts.topic}, or the subscription was deleted; give each consumer its own name, or open it anew."
                )
            )

    def lost(self, error: BraidError) -> None:
        self._connection = None
        self.is_attached = False
        self._is_lost.set()

    # Inside.

    async def _register(self) -> None:
        connection = await self.client.connection_for(self._layouts.controller_url)  # others pass it on
        self._early = []
        self._is_registering = True
        connection.scalable_consumers[self.consumer_id] = self
        try:
            body = await connection.request(
                lambda number: requests.scalable_topic_subscribe(
                    number,
                    self._layouts.topic,
                    self._subscription,
                    self._name,
                    self.consumer_id,
                    self._kind,
                    self._initial,
                    hands_over=self._kind is ScalableConsumerType.CHECKPOINT,
                )
            )
        except BaseException as error:
            connection.scalable_consumers.pop(self.consumer_id, None)
            if not isinstance(error, RequestError) and connection.is_open:
                connection.write(requests.close_consumer(UNASKED, self.consumer_id))  # nobody waits for the answer any more
            raise
        finally:
            self._is_registering = False
        if self._is_closed:  # closed or displaced meanwhile
            if connection.scalable_consumers.pop(self.consumer_id, None) is not None and connection.is_open:
                connection.write(requests.close_consumer(UNASKED, self.consumer_id))
            raise self._ending()
        if not connection.is_open or connection.scalable_consumers.get(self.consumer_id) is not self:
            raise ConnectionLost(f"The connection to {connection.address} ended while {self._name} was being registered.")
        self._connection = connection
        self.is_attached = True
        self._is_lost.clear()
        self._epoch = -1
        self._take(body.assignment, is_first=True)
        for each in self._early:
            self._take(each, is_first=False)
        self._early = []

    def _ending(self) -> BraidError:
        """Why there is no point in going on."""
        if self._failure is not None:
            return type(self._failure)(*self._failure.args)
        return Closed(f"The consumer {self._name} of {self._layouts.topic} was closed.")

    def _take(self, body: Any, *, is_first: bool) -> None:
        if body.layout_epoch < self._epoch or self._is_closed:
            return
        self._epoch = body.layout_epoch
        self._term = body.term
        topics = {each.segment_id: each.segment_topic for each in body.segments}
        places = {each.segment_id: each.place if each.HasField("place") else None for each in body.segments}
        self._assigned(
            Assignment(
                body.layout_epoch, topics, is_first, body.resets, places, tuple(body.owed), body.term > 0, body.is_partial
            )
        )

    def _end(self, error: BraidError) -> None:
        self._failure = error
        self._is_closed = True
        self._tasks.cancel()
        self._ended(error)

    async def _stay(self) -> None:
        """Register again whenever the connection was lost: at once, then with growing pauses."""
        clock, config = self.client.runtime.clock, self.client.config
        while True:
            await self._is_lost.wait()
            pause = config.backoff_initial
            while self._connection is None:
                try:
                    await self._register()
                except FINAL as error:
                    self._end(error)
                    return
                except BraidError as error:
                    log.info("registering %s at %s again failed: %s", self._name, self._layouts.topic, error)
                    await clock.sleep(pause * (0.5 + self.client.runtime.random.random()))
                    pause = min(pause * 2, REGISTER_BACKOFF_MAX)
