"""`ScalableConsumer`: a stream or checkpoint consumer of one client connection, kept registered with its topic's leader.

Any broker takes a registration (command 73): if it leads the topic itself it registers the consumer here, else it asks the
leader over a connection of its own, one for each such consumer, so that the consumer's end is the connection's end (L-25). When
the leadership moves, the consumer is registered again with the new leader and told its assignment; its client need not know.
The number that the first leader gave the registration goes with it, so that of two connections with one name the newer wins
whichever is registered again first. A client that closes the consumer meanwhile need not wait: the next leader is told.
The coordinator decides who reads what; nothing is decided here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from braid.client.client import parse_url
from braid.client.config import ClientConfig
from braid.client.connection import Connection, open_connection
from braid.errors import (
    BraidError,
    Closed,
    ConsumerAssignFailed,
    ConsumerDisplaced,
    DeadlineExceeded,
    Denied,
    KindConflict,
    LedElsewhere,
    NotFound,
    NotReady,
    Rejected,
    StoreError,
    TransportError,
    Unavailable,
)
from braid.model.hashranges import HashRange
from braid.model.names import TopicName
from braid.runtime.tasks import Tasks
from braid.scalable.api import AssignedSegment, ConsumerAssignment, ConsumerRegistration, RegistrationNumber
from braid.scalable.records import Initial
from braid.wire import messages, requests
from braid.wire.commands import encode, enum_value
from braid.wire.types import CommandType, InitialPosition, ScalableConsumerType

if TYPE_CHECKING:
    from braid.broker.service import BrokerService
    from braid.scalable.service import AnyController

log = logging.getLogger(__name__)
FIRST_PATIENCE_SECONDS: Final = 15.0
"""How long a client's request waits for a leader; clients themselves give up after 30 s."""
FIRST_PAUSE_SECONDS: Final = 0.05
LONGEST_PAUSE_SECONDS: Final = 2.0
LATER: Final = (Unavailable, TransportError, DeadlineExceeded, StoreError, Closed)
"""What a further try may cure."""
FINAL: Final = (NotFound, Rejected, Denied, ConsumerAssignFailed, KindConflict)
"""What none does; the fourth is how another broker says ConsumerDisplaced."""


class Wanted(msgspec.Struct, frozen=True):
    """What a client asks for with command 73."""

    topic: TopicName
    subscription: str
    consumer_name: str
    consumer_id: int
    kind: ScalableConsumerType
    initial: Initial
    is_relayed: bool
    says_goodbye: bool
    """Its client tells when it leaves."""
    number: RegistrationNumber | None = None
    """Of a relayed registration that another leader has taken before."""


class _Place(Protocol):
    """Where a consumer is registered."""

    async def leave(self) -> None:
        """For good."""
        ...

    def disconnect(self) -> None:
        """It may come back: its grace period begins."""
        ...

    async def is_right(self) -> bool:
        """Whether this is still the leader."""
        ...


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
        self._place: _Place | None = None
        self._held: tuple[_Place, ConsumerAssignment] | None = None
        """Told by a leader, and by which, before the client has the answer that comes first."""
        self._is_answered = False
        self._early: tuple[_Place, BraidError] | None = None
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

    def _end(self) -> _Place | None:
        self._is_over = True
        self._tasks.cancel()
        place, self._place = self._place, None
        return place

    # What places tell.

    def assigned(self, place: _Place, assignment: ConsumerAssignment) -> None:
        if self._is_over or self._place not in (place, None):
            return
        if self._is_answered:
            self._tell(assignment)
        else:
            self._held = (place, assignment)

    def displaced(self, place: _Place) -> None:
        """Another connection took the name."""
        if self._place is place:
            self._finish()
        else:
            self._early = (place, ConsumerDisplaced(f"Another consumer took the name {self.wanted.consumer_name}."))

    def ended(self, place: _Place, error: BraidError) -> None:
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

    async def _is_right(self, place: _Place) -> bool:
        try:
            return await place.is_right()
        except BraidError as error:
            log.info("who leads %s is not known at the moment: %s", self.wanted.topic, error)
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
        place = _Here(self, controller)
        try:
            assignment = await controller.register_consumer(
                self.wanted.subscription,
                ConsumerRegistration(
                    self.wanted.consumer_name,
                    self.wanted.consumer_id,
                    place,
                    number=self._number,
                    says_goodbye=self.wanted.says_goodbye,
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
        place = _Elsewhere(self, self._service, connection, broker_id)
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

    def _settle(self, place: _Place, number: RegistrationNumber | None) -> None:
        self._number = number
        if self._is_over:  # the client went while the leader was asked
            place.disconnect()
            raise NotReady("The consumer was closed while it was being registered.")
        early, self._early = self._early, None
        if early is not None and early[0] is place:
            place.disconnect()
            raise early[1]
        self._place = place


class _Here:
    """This broker leads the topic; also the `ConsumerHandle` its coordinator knows."""

    def __init__(self, consumer: ScalableConsumer, controller: AnyController) -> None:
        self._consumer = consumer
        self._wanted = consumer.wanted
        self._controller = controller

    def push(self, assignment: ConsumerAssignment) -> None:
        self._consumer.assigned(self, assignment)

    def displaced(self) -> None:
        self._consumer.displaced(self)

    def ended(self, error: BraidError) -> None:
        self._consumer.ended(self, error)

    async def leave(self) -> None:
        await self._controller.unregister_consumer(self._wanted.subscription, self._wanted.consumer_name, self)

    def disconnect(self) -> None:
        self._controller.consumer_disconnected(self._wanted.subscription, self._wanted.consumer_name, self)

    async def is_right(self) -> bool:
        return self._controller.is_leading


class _Elsewhere:
    """Another broker leads the topic: asked over a connection that lives as long as the registration."""

    def __init__(self, consumer: ScalableConsumer, service: BrokerService, connection: Connection, broker_id: str) -> None:
        self._consumer = consumer
        self._wanted = consumer.wanted
        self._service = service
        self._connection = connection
        self._broker_id = broker_id

    async def register(self, number: RegistrationNumber | None) -> ConsumerAssignment:
        wanted = self._wanted
        self._connection.scalable_consumers[wanted.consumer_id] = self
        reply = await self._connection.request(
            lambda request_id: encode(CommandType.SCALABLE_TOPIC_SUBSCRIBE, relayed(wanted, request_id, number))
        )
        return msgspec.structs.replace(read_assignment(reply.assignment), number=number_of(reply))

    def assignment(self, body: Any) -> None:
        self._consumer.assigned(self, read_assignment(body.assignment))

    def displaced(self) -> None:
        self._consumer.displaced(self)
        self._connection.close()

    def lost(self, error: BraidError) -> None:
        self._consumer.ended(self, NotReady(error.message))

    async def leave(self) -> None:
        try:
            await self._connection.request(lambda number: requests.close_consumer(number, self._wanted.consumer_id))
        finally:
            self.disconnect()

    def disconnect(self) -> None:
        self._connection.scalable_consumers.pop(self._wanted.consumer_id, None)
        self._connection.close()

    async def is_right(self) -> bool:
        return await self._service.scalable.leader_id(self._wanted.topic) in (self._broker_id, None)


def relayed(
    wanted: Wanted, request_id: int, number: RegistrationNumber | None, *, is_leaving: bool = False
) -> messages.CommandScalableTopicSubscribe:
    """The request that is passed on to the leader."""
    initial = InitialPosition.EARLIEST if wanted.initial == "earliest" else InitialPosition.LATEST
    epoch, count = number or (None, None)
    return messages.CommandScalableTopicSubscribe(
        request_id=request_id,
        topic=str(wanted.topic),
        subscription=wanted.subscription,
        consumer_name=wanted.consumer_name,
        consumer_id=wanted.consumer_id,
        consumer_type=enum_value(wanted.kind),
        initial_position=enum_value(initial),
        is_relayed=True,
        registration_epoch=epoch,
        registration_number=count,
        says_goodbye=wanted.says_goodbye,
        is_leaving=is_leaving,
    )


def number_of(
    body: messages.CommandScalableTopicSubscribe | messages.CommandScalableTopicSubscribeResponse,
) -> RegistrationNumber | None:
    """The number of a registration that brokers tell each other."""
    return (body.registration_epoch, body.registration_number) if body.HasField("registration_epoch") else None


def write_assignment(assignment: ConsumerAssignment) -> messages.ScalableConsumerAssignment:
    """An assignment for the wire."""
    made = messages.ScalableConsumerAssignment(layout_epoch=assignment.layout_epoch, resets=assignment.resets or None)
    for each in assignment.segments:
        made.segments.add(
            segment_id=each.segment_id,
            hash_start=each.hash_range.start,
            hash_end=each.hash_range.end,
            segment_topic=each.topic,
        )
    return made


def read_assignment(body: messages.ScalableConsumerAssignment) -> ConsumerAssignment:
    """An assignment from the wire."""
    return ConsumerAssignment(
        body.layout_epoch,
        tuple(
            AssignedSegment(each.segment_id, HashRange.of(each.hash_start, each.hash_end), each.segment_topic)
            for each in body.segments
        ),
        resets=body.resets,
    )
