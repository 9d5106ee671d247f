"""`ScalableConsumer`: a stream or checkpoint consumer of one client connection, kept registered with its topic's leader.

Any broker takes a registration (command 73): if it leads the topic itself it registers the consumer here, else it asks the
leader over a connection of its own, one for each such consumer, so that the consumer's end is the connection's end (L-25). When
the leadership moves, the consumer is registered again with the new leader and told its assignment; its client need not know.
The number that the first leader gave the registration goes with it, so that of two connections with one name the newer wins
whichever is registered again first. A client that closes the consumer meanwhile need not wait: the next leader is told.
The coordinator decides who reads what; nothing is decided here. What a registration is at either place: `consumer_places.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from braid.broker.consumer_places import Elsewhere, Here, Place, Wanted, relayed
from braid.client.config import ClientConfig
from braid.client.connection import Connection, open_connection
from braid.client.pool import parse_url
from braid.errors import (
    BraidError,
    Closed,
    ConsumerAssignFailed,
    ConsumerDisplaced,
    DeadlineExceeded,
    Denied,
    InvariantBroken,
    KindConflict,
    LedElsewhere,
    NotFound,
    NotReady,
    Rejected,
    StoreError,
    TransportError,
    Unavailable,
)
from braid.runtime.tasks import Tasks
from braid.scalable.api import ConsumerAssignment, ConsumerRegistration, PlaceReport, RegistrationNumber
from braid.wire.commands import encode
from braid.wire.types import CommandType, ScalableConsumerType

if TYPE_CHECKING:
    from braid.broker.service import BrokerService

log = logging.getLogger(__name__)
FIRST_PATIENCE_SECONDS: Final = 15.0
"""How long a client's request waits for a leader; clients themselves give up after 30 s."""
FIRST_PAUSE_SECONDS: Final = 0.05
LONGEST_PAUSE_SECONDS: Final = 2.0
LATER: Final = (Unavailable, TransportError, DeadlineExceeded, StoreError, Closed)
"""What a further try may cure."""
FINAL: Final = (NotFound, Rejected, Denied, ConsumerAssignFailed, KindConflict)
"""What none does; the fourth is how another broker says ConsumerDisplaced."""


class ScalableConsumer:
    """One registration of one connection. `tell` hears assignments, `closed` that the consumer is over, once."""

    def __init__(
        self,
        service: BrokerService,
        wanted: Wanted,
        tell: Callable[[ConsumerAssignment], None],
        closed: Callable[[ScalableConsumer], None],
    ) -> None:
        self.wanted = wanted
        self._service = service
        self._clock = service.runtime.clock
        self._tell = tell
        self._closed = closed
        self._place: Place | None = None
        self._held: tuple[Place, ConsumerAssignment] | None = None
        """Told by a leader, and by which, before the client has the answer that comes first."""
        self._is_answered = False
        self._early: tuple[Place, BraidError] | None = None
        """A place that ended before it was known here that it had begun."""
        self._is_over = False
        self._number = wanted.number
        self._moved = asyncio.Event()
        self._tasks = Tasks(f"consumer {wanted.consumer_name}")

    async def register(self) -> ConsumerAssignment:
        """Register for the first time; `answered` is to be called when the client has the result. Raises what the leader says,
        NotReady if none can be found in time."""
        deadline = self._clock.monotonic() + FIRST_PATIENCE_SECONDS
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                return await self._register()
            except LATER as error:
                if self.wanted.is_relayed or self._clock.monotonic() + pause > deadline:
                    raise error if isinstance(error, NotReady) else NotReady(error.message) from error
            await self._clock.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE_SECONDS)

    def answered(self) -> None:
        """The client knows its first assignment: from now on it is told changes."""
        self._release()
        if not self._is_over:
            self._tasks.spawn(self._keep(), "keep")

    def _release(self) -> None:
        self._is_answered = True
        held, self._held = self._held, None
        if held is not None and held[0] is self._place and not self._is_over:
            self._tell(held[1])

    async def leave(self) -> None:
        """The client closed the consumer: its segments are free at once, or as soon as there is a leader. A relayed one raises
        what goes wrong, because the broker of its client sees to that."""
        place = self._end()
        try:
            if place is not None:
                await place.leave()
                return
            if self.wanted.is_relayed:
                raise NotReady(f"This broker does not lead {self.wanted.topic} any more.")
        except BraidError as error:
            if self.wanted.is_relayed:
                raise
            log.debug("%s leaves %s with its next leader: %s", self.wanted.consumer_name, self.wanted.topic, error)
        if self._number is not None:
            self._service.farewells.spawn(self._say_goodbye(self._number), self.wanted.consumer_name)

    async def report(self, report: PlaceReport) -> None:
        """The client says where it stands. Raises NotReady while no leader knows it."""
        place = self._place
        if place is None or self._is_over:
            raise NotReady(f"{self.wanted.consumer_name} is not registered with a leader of {self.wanted.topic} at the moment.")
        try:
            await place.report(report)
        except LATER as error:
            raise NotReady(error.message) from error

    async def _say_goodbye(self, number: RegistrationNumber) -> None:
        """Tell whoever leads next; when the grace period is over, that is no longer needed."""
        wanted = self.wanted
        ends = self._clock.monotonic() + self._service.scalable_config.consumer_grace_seconds
        pause = FIRST_PAUSE_SECONDS
        while self._clock.monotonic() < ends:
            try:
                try:
                    controller = await self._service.scalable.lead(wanted.topic)
                    await controller.forget_consumer(wanted.subscription, wanted.consumer_name, number)
                except LedElsewhere as error:
                    if error.broker_id is None:
                        raise
                    connection = await self._connect(error.broker_id)
                    try:
                        await connection.request(
                            lambda request_id: encode(
                                CommandType.SCALABLE_TOPIC_SUBSCRIBE, relayed(wanted, request_id, number, is_leaving=True)
                            )
                        )
                    finally:
                        connection.close()
                return
            except FINAL:
                return
            except BraidError as error:
                log.debug("%s has not left %s yet: %s", wanted.consumer_name, wanted.topic, error)
            await self._clock.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE_SECONDS)

    def lost(self) -> None:
        """The client's connection is gone."""
        place = self._end()
        if place is not None:
            place.disconnect()

    def _end(self) -> Place | None:
        self._is_over = True
        self._tasks.cancel()
        place, self._place = self._place, None
        return place

    # What places tell.

    def assigned(self, place: Place, assignment: ConsumerAssignment) -> None:
        if self._is_over or self._place not in (place, None):
            return
        if self._is_answered:
            self._tell(assignment)
        else:
            self._held = (place, assignment)

    def displaced(self, place: Place) -> None:
        """Another connection took the name."""
        if self._place is place:
            self._finish()
        else:
            self._early = (place, ConsumerDisplaced(f"Another consumer took the name {self.wanted.consumer_name}."))

    def ended(self, place: Place, error: BraidError) -> None:
        """Nobody coordinates the consumer there any more."""
        if self._place is not place:
            self._early = (place, error)
            return
        self._place = None
        if isinstance(error, NotFound):
            self._finish()
        else:
            self._moved.set()

    def _finish(self) -> None:
        self._place = None
        if not self._is_over:
            self._end()
            self._closed(self)

    # Staying registered.

    async def _keep(self) -> None:
        seconds = self._service.scalable_config.reconcile_seconds
        while True:
            timer = self._clock.call_later(seconds, self._moved.set)
            try:
                await self._moved.wait()
            finally:
                timer.cancel()
            self._moved.clear()
            if self._place is None or not await self._is_right(self._place):
                await self._register_again()

    async def _is_right(self, place: Place) -> bool:
        try:
            return await place.is_right()
        except BraidError as error:
            log.info("who leads %s is not known at the moment: %s", self.wanted.topic, error)
        except InvariantBroken:
            raise
        except Exception:  # or the consumer would never be registered with another leader
            log.exception("who leads %s could not be asked, and is asked again", self.wanted.topic)
        return True

    async def _register_again(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        while True:
            if self._place is not None:
                self._place.disconnect()
                self._place = None
            self._is_answered = False
            try:
                self._tell(await self._register())
                self._release()
                return
            except FINAL as error:
                log.info("%s of %s is refused by the new leader: %s", self.wanted.consumer_name, self.wanted.topic, error)
                self._finish()
                return
            except BraidError as error:
                log.debug("%s is not registered with a leader yet: %s", self.wanted.consumer_name, error)
            except InvariantBroken:
                raise
            except Exception:
                log.exception("%s could not be registered with a leader and tries again", self.wanted.consumer_name)
            await self._clock.sleep(pause * (0.5 + self._service.runtime.random.random()))
            pause = min(pause * 2, LONGEST_PAUSE_SECONDS)

    async def _register(self) -> ConsumerAssignment:
        scalable = self._service.scalable
        try:
            controller = await scalable.lead(self.wanted.topic)
        except LedElsewhere as error:
            if error.broker_id is None or self.wanted.is_relayed:
                raise
            return await self._relay(error.broker_id)
        place = Here(self, controller)
        try:
            assignment = await controller.register_consumer(
                self.wanted.subscription,
                ConsumerRegistration(
                    self.wanted.consumer_name,
                    self.wanted.consumer_id,
                    place,
                    number=self._number,
                    says_goodbye=self.wanted.says_goodbye,
                    hands_over=self.wanted.hands_over,
                ),
                "CHECKPOINT" if self.wanted.kind is ScalableConsumerType.CHECKPOINT else "STREAM",
                initial=self.wanted.initial,
            )
        except BaseException:
            place.disconnect()  # interrupted, it may be known there nevertheless
            raise
        self._settle(place, assignment.number)
        return assignment

    async def _relay(self, broker_id: str) -> ConsumerAssignment:
        connection = await self._connect(broker_id)
        place = Elsewhere(self, self._service, connection, broker_id)
        try:
            assignment = await place.register(self._number)
        except BaseException:
            connection.close()
            raise
        self._settle(place, assignment.number)
        return assignment

    async def _connect(self, broker_id: str) -> Connection:
        url = await self._service.broker_url(broker_id)
        if url is None or broker_id == self._service.ownership.broker_id:
            raise NotReady(f"The leader {broker_id} of {self.wanted.topic} is not known here yet; try again.")
        host, port = parse_url(url)[0]
        # A dead leader must be noticed well before the next one would give the consumer up.
        grace = self._service.scalable_config.consumer_grace_seconds
        keep_alive = max(0.1, min(self._service.config.keep_alive_seconds, grace / 4))
        return await open_connection(self._service.runtime, ClientConfig(keep_alive_seconds=keep_alive), host, port)

    def _settle(self, place: Place, number: RegistrationNumber | None) -> None:
        self._number = number
        if self._is_over:  # the client went while the leader was asked
            place.disconnect()
            raise NotReady("The consumer was closed while it was being registered.")
        early, self._early = self._early, None
        if early is not None and early[0] is place:
            place.disconnect()
            raise early[1]
        self._place = place
