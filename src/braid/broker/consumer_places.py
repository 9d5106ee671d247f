"""Where a stream or checkpoint consumer is registered: with the leader in this broker, or with another broker.

Owns the two kinds of places and what brokers tell each other of a registration (command 73 and its answers). Must not choose a
place, nor try again: that is `ScalableConsumer`'s part, which hears what happens at its places.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from braid.client.connection import Connection
from braid.errors import BraidError, NotReady
from braid.model.hashranges import HashRange
from braid.model.names import TopicName
from braid.scalable.api import AssignedSegment, ConsumerAssignment, PlaceReport, RegistrationNumber
from braid.scalable.records import Initial
from braid.wire import messages, requests
from braid.wire.commands import encode, enum_value
from braid.wire.types import CommandType, InitialPosition, ScalableConsumerType

if TYPE_CHECKING:
    from braid.broker.service import BrokerService
    from braid.scalable.service import AnyController


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
    hands_over: bool = False
    """A member of a checkpoint group that reports its places."""


class Place(Protocol):
    """Where a consumer is registered."""

    async def leave(self) -> None:
        """For good."""
        ...

    async def report(self, report: PlaceReport) -> None:
        """It says where it stands (checkpoint groups)."""
        ...

    def disconnect(self) -> None:
        """It may come back: its grace period begins."""
        ...

    async def is_right(self) -> bool:
        """Whether this is still the leader."""
        ...


class PlaceOwner(Protocol):
    """The consumer, which may be registered at one place while another is being left: each call names the place."""

    wanted: Wanted

    def assigned(self, place: Place, assignment: ConsumerAssignment) -> None:
        """It is to read these from now on."""
        ...

    def displaced(self, place: Place) -> None:
        """Another connection took the name."""
        ...

    def ended(self, place: Place, error: BraidError) -> None:
        """Nobody coordinates the consumer there any more."""
        ...


class Here:
    """This broker leads the topic; also the `ConsumerHandle` its coordinator knows."""

    def __init__(self, consumer: PlaceOwner, controller: AnyController) -> None:
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

    async def report(self, report: PlaceReport) -> None:
        await self._controller.report_places(self._wanted.subscription, self._wanted.consumer_name, self, report)

    def disconnect(self) -> None:
        self._controller.consumer_disconnected(self._wanted.subscription, self._wanted.consumer_name, self)

    async def is_right(self) -> bool:
        return self._controller.is_leading


class Elsewhere:
    """Another broker leads the topic: asked over a connection that lives as long as the registration."""

    def __init__(self, consumer: PlaceOwner, service: BrokerService, connection: Connection, broker_id: str) -> None:
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

    async def report(self, report: PlaceReport) -> None:
        await self._connection.request(
            lambda number: requests.report_places(number, self._wanted.consumer_id, report.term, report.places, report.released)
        )

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
        hands_over=wanted.hands_over,
    )


def number_of(
    body: messages.CommandScalableTopicSubscribe | messages.CommandScalableTopicSubscribeResponse,
) -> RegistrationNumber | None:
    """The number of a registration that brokers tell each other."""
    return (body.registration_epoch, body.registration_number) if body.HasField("registration_epoch") else None


def write_assignment(assignment: ConsumerAssignment) -> messages.ScalableConsumerAssignment:
    """An assignment for the wire."""
    made = messages.ScalableConsumerAssignment(layout_epoch=assignment.layout_epoch, resets=assignment.resets or None)
    if assignment.term:
        made.term, made.is_partial = assignment.term, assignment.is_partial
        made.owed.extend(assignment.owed)
    for each in assignment.segments:
        made.segments.add(
            segment_id=each.segment_id,
            hash_start=each.hash_range.start,
            hash_end=each.hash_range.end,
            segment_topic=each.topic,
            place=each.place,
        )
    return made


def read_assignment(body: messages.ScalableConsumerAssignment) -> ConsumerAssignment:
    """An assignment from the wire."""
    return ConsumerAssignment(
        body.layout_epoch,
        tuple(
            AssignedSegment(
                each.segment_id,
                HashRange.of(each.hash_start, each.hash_end),
                each.segment_topic,
                each.place if each.HasField("place") else None,
            )
            for each in body.segments
        ),
        resets=body.resets,
        term=body.term,
        is_partial=body.is_partial,
        owed=tuple(body.owed),
    )
