"""PRODUCER and CLOSE_PRODUCER; SEND goes straight from the connection to its producer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from braid.broker import segments
from braid.broker.commands import schema
from braid.broker.dedup import MAX_PRODUCER_NAME
from braid.broker.producer import DEDUPLICATION, ProducerInfo
from braid.broker.topic import check_subscription_name
from braid.errors import NotAllowed, NotReady, Overloaded
from braid.model.names import TopicName
from braid.model.positions import EARLIEST
from braid.wire import messages, replies
from braid.wire.types import ProducerAccessMode

if TYPE_CHECKING:
    from braid.broker.connection import BrokerConnection


async def create(connection: BrokerConnection, body: messages.CommandProducer) -> None:
    """Attach a producer, in the order of checks of the protocol sheet 4.1."""
    name = TopicName.parse(body.topic)
    connection.service.check_served(name)
    slot = ("producer", body.producer_id)
    existing = connection.producers.get(body.producer_id)
    if slot in connection.creating:
        raise NotReady(f"Producer {body.producer_id} is being created already.")
    if existing is not None and not existing.is_closed and body.epoch <= existing.info.epoch:
        existing.info = msgspec.structs.replace(existing.info, request_id=body.request_id)
        connection.link.write(existing.topic.success_frame(existing))
        return
    if len(connection.producers) + len(connection.consumers) >= connection.config.max_handles_per_connection:
        raise Overloaded("This connection has too many producers and consumers; close some or open another connection.")
    if len(body.producer_name) > MAX_PRODUCER_NAME:
        raise NotAllowed(
            f"A producer's name has at most {MAX_PRODUCER_NAME} characters; this one has {len(body.producer_name)}."
        )
    connection.creating[slot] = False
    try:
        await _create(connection, body, name)
    finally:
        del connection.creating[slot]


async def _create(connection: BrokerConnection, body: messages.CommandProducer, name: TopicName) -> None:
    service = connection.service
    topic = await service.topic(name, create=True)
    version = b""
    if body.HasField("schema"):
        version = await schema.register(service, name, body.schema)
    if body.initial_subscription_name:
        check_subscription_name(body.initial_subscription_name)
        policies = await service.namespaces.policies(name.namespace)
        if not policies.auto_subscription_creation and body.initial_subscription_name not in topic.subscriptions:
            raise NotAllowed(
                f"The subscription {body.initial_subscription_name} of {name} cannot be created: auto-creation is off."
            )
        if topic.is_segment:
            await segments.subscribe(service, topic, body.initial_subscription_name, "earliest", may_create=True)
        else:
            await topic.subscription(body.initial_subscription_name, is_durable=True, start=None, initial=EARLIEST)
    info = ProducerInfo(
        producer_id=body.producer_id,
        name=body.producer_name or service.new_producer_name(),
        epoch=body.epoch,
        access_mode=ProducerAccessMode(body.producer_access_mode),
        topic_epoch=body.topic_epoch if body.HasField("topic_epoch") else None,
        metadata={pair.key: pair.value for pair in body.metadata},
        request_id=body.request_id,
        schema_version=version,
    )
    if info.metadata.get(DEDUPLICATION, "").lower() == "true":
        await topic.request_deduplication()
    producer = await topic.add_producer(info, connection.link)
    if connection.creating["producer", body.producer_id]:
        topic.remove_producer(producer)
        raise NotReady(f"Producer {body.producer_id} was closed while it was being created.")
    connection.add_producer(producer)
    connection.link.write(topic.success_frame(producer))


async def close(connection: BrokerConnection, body: messages.CommandCloseProducer) -> None:
    """Answer once every publish of the producer is answered; unknown ids succeed (idempotent)."""
    producer = connection.producers.pop(body.producer_id, None)
    frame = replies.success(body.request_id)
    if producer is None:
        slot = ("producer", body.producer_id)
        if slot in connection.creating:
            connection.creating[slot] = True
        connection.link.write(frame)
        return

    def finish() -> None:
        producer.topic.remove_producer(producer)
        connection.link.write(frame)

    producer.when_idle(finish)
