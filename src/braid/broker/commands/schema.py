"""GET_SCHEMA and GET_OR_CREATE_SCHEMA: schemas are accepted, stored and answered; no compatibility rules yet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from braid.broker.service import BrokerService
from braid.errors import BraidError, IncompatibleSchema, TopicNotFound
from braid.model.names import TopicName
from braid.wire import messages, replies
from braid.wire.commands import enum_value
from braid.wire.types import SchemaType

if TYPE_CHECKING:
    from braid.broker.connection import BrokerConnection

UNSTORED = frozenset({SchemaType.NONE, SchemaType.AUTO_CONSUME})


async def register(service: BrokerService, topic: TopicName, given: messages.Schema) -> bytes:
    """Store a client's schema (the same one again keeps its version) and return its version bytes."""
    if SchemaType(given.type) in UNSTORED:
        return b""
    properties = {pair.key: pair.value for pair in _properties(given)}
    number = await service.schemas.put(topic.schema_id, int(given.type), given.schema_data, properties, name=given.name)
    return replies.schema_version(number)


def _properties(schema: messages.Schema) -> Any:
    """The schema's properties; untyped, because the generated types take `KeyValue` for the schema type of that name."""
    return schema.properties


async def get(connection: BrokerConnection, body: messages.CommandGetSchema) -> None:
    topic = TopicName.parse(body.topic)
    wanted: int | None = None
    if body.HasField("schema_version"):
        wanted = replies.read_schema_version(body.schema_version)
        if wanted is None:
            raise IncompatibleSchema(f"The schema version of {topic} must have 8 bytes, not {len(body.schema_version)}.")
    found = await connection.service.schemas.get(topic.schema_id, wanted)
    if found is None:
        which = "no schema" if wanted is None else f"no schema version {wanted}"
        raise TopicNotFound(f"The topic {topic} has {which}.")
    reply = messages.Schema(
        name=found.name,
        schema_data=found.data,
        type=enum_value(found.type),
    )
    for key, value in found.properties.items():
        _properties(reply).add(key=key, value=value)
    connection.link.write(replies.schema(body.request_id, reply, replies.schema_version(found.version)))


def get_failed(body: messages.CommandGetSchema, failure: BraidError) -> bytes:
    return replies.schema_failed(body.request_id, failure.code, failure.message)


async def get_or_create(connection: BrokerConnection, body: messages.CommandGetOrCreateSchema) -> None:
    topic = TopicName.parse(body.topic)
    await connection.service.topic(topic, create=False)
    version = await register(connection.service, topic, body.schema)
    connection.link.write(replies.schema_created(body.request_id, version))


def get_or_create_failed(body: messages.CommandGetOrCreateSchema, failure: BraidError) -> bytes:
    return replies.schema_create_failed(body.request_id, failure.code, failure.message)
