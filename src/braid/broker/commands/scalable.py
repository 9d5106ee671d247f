"""Commands 70 to 78 and 1018: layout sessions, registrations of stream and checkpoint consumers, and watches of a namespace.

Bad input is answered with an error in the command's own reply; a session or consumer id is the connection's own business.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from braid.broker.consumer_places import Wanted, number_of, write_assignment
from braid.broker.scalable_consumers import ScalableConsumer
from braid.broker.topic import check_subscription_name
from braid.errors import BraidError, KindConflict, NotAllowed, NotReady, Overloaded, TopicNotFound
from braid.model.layout import SegmentLayout
from braid.model.names import Domain, NamespaceName, TopicName
from braid.model.names import encode as encode_name
from braid.model.segments import SegmentInfo
from braid.scalable.api import ConsumerAssignment, PlaceReport
from braid.scalable.dag_watch import DagUpdate
from braid.scalable.namespace_watch import NamespaceDiff, NamespaceSnapshot
from braid.wire import messages, replies
from braid.wire.commands import encode, enum_value
from braid.wire.types import CommandType, InitialPosition, ScalableConsumerType, SegmentState

if TYPE_CHECKING:
    from braid.broker.connection import BrokerConnection

MAX_CONSUMER_NAME = 1024
"""Characters of a consumer's name as a path has it."""
MAX_REPORTED = 10_000
"""Places in one report."""


# Layouts: 70, 71, 72.


async def lookup(connection: BrokerConnection, body: messages.CommandScalableTopicLookup) -> None:
    """Open a layout session; its first update is the answer."""
    service, number = connection.service, body.session_id
    service.check_scalable()
    name = TopicName.parse(body.topic)
    if name.domain in (Domain.NON_PERSISTENT, Domain.SEGMENT):
        raise NotAllowed(f"{name} has no layout: look up a topic:// or persistent:// name.")
    if name.is_partition:
        raise TopicNotFound(f"{name} is one partition and has no layout of its own; look up {name.base}.")
    slot = ("watch", number)
    if slot in connection.creating:
        raise NotReady(f"Session {number} is being opened already.")
    if (old := connection.watches.pop(number, None)) is not None:
        old.close()
    check_watches(connection)
    is_open = True

    def push(update: DagUpdate | BraidError) -> None:
        nonlocal is_open
        if isinstance(update, BraidError):
            is_open = False
            connection.watches.pop(number, None)
            connection.link.write(lookup_failed(body, update))
        else:
            connection.link.write(_update(number, update, is_braid=connection.link.is_braid))

    async def create() -> None:
        await service.create_on_first_use(name)
        if await service.records.read(name) is None:
            raise NotAllowed(f"A regular topic has the name of {name}; use persistent://{name.namespace}/{name.local_name}.")

    connection.creating[slot] = False
    try:
        await service.namespaces.policies(name.namespace)
        session = await service.dag_watches.open(number, name, push, create=create if body.create_if_missing else None)
        if connection.creating[slot] or not connection.link.is_open:
            session.close()
        elif is_open:
            connection.watches[number] = session
    finally:
        del connection.creating[slot]


def close_lookup(connection: BrokerConnection, body: messages.CommandScalableTopicClose) -> None:
    """End a layout session; an unknown one is fine."""
    close_soon(connection, connection.watches, "watch", body.session_id)


def close_soon(connection: BrokerConnection, watches: dict[int, Any], kind: str, number: int) -> None:
    """Close a watch after the requests that came before, so that it finds one that was asked for just now."""

    def close() -> None:
        session = watches.pop(number, None)
        if session is not None:
            session.close()
        elif (kind, number) in connection.creating:
            connection.creating[kind, number] = True

    asyncio.get_running_loop().call_soon(close)


def lookup_failed(body: messages.CommandScalableTopicLookup, failure: BraidError) -> bytes:
    reply = messages.CommandScalableTopicUpdate(
        session_id=body.session_id, error=enum_value(failure.code), message=failure.message
    )
    return encode(CommandType.SCALABLE_TOPIC_UPDATE, reply)


def check_watches(connection: BrokerConnection) -> None:
    limit = connection.service.scalable_config.max_watches_per_connection
    if len(connection.watches) + len(connection.namespace_watches) + len(connection.coordinator_watches) >= limit:
        raise Overloaded(f"This connection has {limit} watches; close some or open another connection.")


def _update(session_id: int, update: DagUpdate, *, is_braid: bool) -> bytes:
    dag = dag_message(update.layout)
    for number, url in sorted(update.segment_brokers.items()):
        dag.segment_brokers.add(segment_id=number, broker_url=url)
    if update.controller_url is not None:
        dag.controller_broker_url = update.controller_url
    if is_braid:
        dag.routing = update.layout.routing
        if update.incarnation:
            dag.incarnation = update.incarnation
    reply = messages.CommandScalableTopicUpdate(session_id=session_id, dag=dag, resolved_topic_name=update.resolved_topic_name)
    return encode(CommandType.SCALABLE_TOPIC_UPDATE, reply)


def dag_message(layout: SegmentLayout) -> messages.ScalableTopicDAG:
    """A layout as every client understands it."""
    return messages.ScalableTopicDAG(
        epoch=layout.epoch, segments=[_segment(each) for _number, each in sorted(layout.all_segments.items())]
    )


def _segment(each: SegmentInfo) -> messages.SegmentInfoProto:
    made = messages.SegmentInfoProto(
        segment_id=each.segment_id,
        hash_start=each.hash_range.start,
        hash_end=each.hash_range.end,
        state=enum_value(SegmentState.SEALED if each.is_sealed else SegmentState.ACTIVE),
        parent_ids=each.parent_ids,
        child_ids=each.child_ids,
        created_at_epoch=each.created_at_epoch,
        created_at_ms=max(each.created_at_ms, 0),
        legacy_topic_name=each.legacy_topic_name,
    )
    if each.is_sealed:
        made.sealed_at_epoch = each.sealed_at_epoch
        made.sealed_at_ms = max(each.sealed_at_ms, 0)
    return made


# Consumers: 73, 74, 75.


async def subscribe(connection: BrokerConnection, body: messages.CommandScalableTopicSubscribe) -> None:
    """Register a stream or checkpoint consumer with the topic's leader, wherever that is."""
    wanted = _wanted(connection, body)
    await connection.service.namespaces.policies(wanted.topic.namespace)
    if wanted.is_relayed and body.is_leaving:
        await _forget(connection, body, wanted)
        return
    number = wanted.consumer_id
    slot = ("scalable consumer", number)
    if slot in connection.creating:
        raise NotReady(f"Consumer {number} is being registered already.")
    if (old := connection.scalable_consumers.pop(number, None)) is not None:
        old.lost()
    if len(connection.scalable_consumers) >= connection.config.max_handles_per_connection:
        raise Overloaded("This connection has too many consumers; close some or open another connection.")

    def tell(assignment: ConsumerAssignment) -> None:
        update = messages.CommandScalableTopicAssignmentUpdate(consumer_id=number, assignment=write_assignment(assignment))
        connection.link.write(encode(CommandType.SCALABLE_TOPIC_ASSIGNMENT_UPDATE, update))

    def closed(consumer: ScalableConsumer) -> None:
        if connection.scalable_consumers.get(number) is consumer:
            del connection.scalable_consumers[number]
        connection.link.write(replies.close_consumer(number))

    consumer = ScalableConsumer(connection.service, wanted, tell, closed)
    connection.creating[slot] = False
    try:
        try:
            assignment = await consumer.register()
        except TopicNotFound:
            if wanted.topic.domain is not Domain.PERSISTENT or wanted.is_relayed:
                raise
            await connection.service.create_on_first_use(wanted.topic)
            assignment = await consumer.register()
        if connection.creating[slot]:
            raise NotReady(f"Consumer {number} was closed while it was being registered.")
    except KindConflict as error:
        raise NotAllowed(error.message) from error  # or the client would try for ever
    except BaseException:
        await consumer.leave() if connection.creating.get(slot) else consumer.lost()
        raise
    finally:
        del connection.creating[slot]
    connection.scalable_consumers[number] = consumer
    reply = messages.CommandScalableTopicSubscribeResponse(request_id=body.request_id, assignment=write_assignment(assignment))
    if wanted.is_relayed and assignment.number is not None:
        reply.registration_epoch, reply.registration_number = assignment.number
    connection.link.write(encode(CommandType.SCALABLE_TOPIC_SUBSCRIBE_RESPONSE, reply))
    consumer.answered()


async def _forget(connection: BrokerConnection, body: messages.CommandScalableTopicSubscribe, wanted: Wanted) -> None:
    """A consumer of another broker's client left while nobody led the topic."""
    if wanted.number is not None:
        controller = await connection.service.scalable.lead(wanted.topic)
        await controller.forget_consumer(wanted.subscription, wanted.consumer_name, wanted.number)
    reply = messages.CommandScalableTopicSubscribeResponse(request_id=body.request_id)
    connection.link.write(encode(CommandType.SCALABLE_TOPIC_SUBSCRIBE_RESPONSE, reply))


def _wanted(connection: BrokerConnection, body: messages.CommandScalableTopicSubscribe) -> Wanted:
    connection.service.check_scalable()
    name = TopicName.parse(body.topic)
    if name.domain not in (Domain.TOPIC, Domain.PERSISTENT) or name.is_partition:
        raise NotAllowed(f"{name} has no consumers of its own kind; register with a topic:// or persistent:// name.")
    check_subscription_name(body.subscription)
    if not body.consumer_name.strip() or len(encode_name(body.consumer_name)) > MAX_CONSUMER_NAME:
        raise NotAllowed(f"A consumer needs a name, of at most {MAX_CONSUMER_NAME} characters when percent-encoded.")
    is_latest = body.HasField("initial_position") and InitialPosition(body.initial_position) is InitialPosition.LATEST
    return Wanted(
        topic=name,
        subscription=body.subscription,
        consumer_name=body.consumer_name,
        consumer_id=body.consumer_id,
        kind=ScalableConsumerType(body.consumer_type),
        initial="latest" if is_latest else "earliest",
        is_relayed=body.is_relayed,
        says_goodbye=body.says_goodbye if body.is_relayed else connection.link.is_braid,
        number=number_of(body) if body.is_relayed else None,
        hands_over=body.hands_over,
    )


def subscribe_failed(body: messages.CommandScalableTopicSubscribe, failure: BraidError) -> bytes:
    reply = messages.CommandScalableTopicSubscribeResponse(
        request_id=body.request_id, error=enum_value(failure.code), message=failure.message
    )
    return encode(CommandType.SCALABLE_TOPIC_SUBSCRIBE_RESPONSE, reply)


async def report_places(connection: BrokerConnection, body: messages.CommandReportPlaces) -> None:
    """A member of a checkpoint group says where it stands, and what it has let go of."""
    if len(body.places) > MAX_REPORTED:
        raise NotAllowed(f"{len(body.places)} places were reported at once; report at most {MAX_REPORTED}.")
    consumer = connection.scalable_consumers.get(body.consumer_id)
    if consumer is None:
        raise NotReady(f"Consumer {body.consumer_id} is not registered on this connection; register it first.")
    report = PlaceReport(
        body.term,
        {each.segment_id: each.place if each.HasField("place") else None for each in body.places},
        frozenset(each.segment_id for each in body.places if each.is_released),
    )
    await consumer.report(report)
    reply = messages.CommandReportPlacesResponse(request_id=body.request_id)
    connection.link.write(encode(CommandType.REPORT_PLACES_RESPONSE, reply))


def report_failed(body: messages.CommandReportPlaces, failure: BraidError) -> bytes:
    reply = messages.CommandReportPlacesResponse(
        request_id=body.request_id, error=enum_value(failure.code), message=failure.message
    )
    return encode(CommandType.REPORT_PLACES_RESPONSE, reply)


# Topics of a namespace: 76, 77, 78.


async def watch(connection: BrokerConnection, body: messages.CommandWatchScalableTopics) -> None:
    """Tell which scalable topics a namespace has, and every change; what the client knows already is not told again."""
    service, number = connection.service, body.watch_id
    service.check_scalable()
    namespace = NamespaceName.parse(body.namespace)
    slot = ("namespace watch", number)
    if slot in connection.creating:
        raise NotReady(f"Watch {number} is being opened already.")
    if (old := connection.namespace_watches.pop(number, None)) is not None:
        old.close()
    check_watches(connection)

    def push(news: NamespaceSnapshot | NamespaceDiff | BraidError) -> None:
        if isinstance(news, BraidError):
            connection.namespace_watches.pop(number, None)
            connection.link.write(watch_failed(body, news))
            return
        reply = messages.CommandWatchScalableTopicsUpdate(watch_id=number)
        if isinstance(news, NamespaceSnapshot):
            reply.snapshot.SetInParent()
            reply.snapshot.topics.extend(news.topics)
        else:
            reply.diff.added.extend(news.added)
            reply.diff.removed.extend(news.removed)
        connection.link.write(encode(CommandType.WATCH_SCALABLE_TOPICS_UPDATE, reply))

    connection.creating[slot] = False
    try:
        await service.namespaces.policies(namespace)
        session = await service.namespace_watches.open(
            number,
            namespace,
            push,
            filters={pair.key: pair.value for pair in body.property_filters},
            current_hash=body.current_hash if body.HasField("current_hash") else None,
        )
        if connection.creating[slot] or not connection.link.is_open:
            session.close()
        else:
            connection.namespace_watches[number] = session
    finally:
        del connection.creating[slot]


def close_watch(connection: BrokerConnection, body: messages.CommandWatchScalableTopicsClose) -> None:
    """End a watch; an unknown one is fine."""
    close_soon(connection, connection.namespace_watches, "namespace watch", body.watch_id)


def watch_failed(body: messages.CommandWatchScalableTopics, failure: BraidError) -> bytes:
    reply = messages.CommandWatchScalableTopicsUpdate(
        watch_id=body.watch_id, error=enum_value(failure.code), message=failure.message
    )
    return encode(CommandType.WATCH_SCALABLE_TOPICS_UPDATE, reply)
