"""The Avro schemas of a topic: the latest, which `valueFormat=avro` shows values by if the user gives none, and those that
values were written with, by the versions that messages name. Asks brokers; a process asks once for each version.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import msgspec

from braid.errors import IncompatibleSchema, InvalidArgument, NotFound
from braid.wire import requests
from braid.wire.types import SchemaType
from braid_spark.connections import Link, patiently
from braid_spark.options import Options


def with_avro_schema(options: Options) -> Options:
    """The options, with the schema of the first topic if one is needed, none is given and the topic has one of this kind."""
    if options.value_format != "avro" or options.avro_schema is not None or not options.topics:
        return options
    topic = options.topics[0]
    with Link(options.url, options.client) as link:
        link.connect()
        try:
            body = link.run(lambda: _schema(link, topic, None))
        except NotFound:
            return options
    if int(body.schema.type) != SchemaType.AVRO:
        return options
    return msgspec.structs.replace(options, avro_schema=bytes(body.schema.schema_data).decode())


@lru_cache(maxsize=1024)
def writer_schema(link: Link, topic: str, _incarnation: str, version: bytes) -> str | None:
    """The Avro schema that a topic has as this version; None if it is no schema at all, but bytes. (A topic that is deleted and
    made again numbers its schemas anew.) Raises InvalidArgument, whose message is a part of a sentence."""
    number = int.from_bytes(version, "big")
    try:
        body = patiently(link, partial(_schema, link, topic, version))
    except (NotFound, IncompatibleSchema):
        raise InvalidArgument(f"version {number} of the schema of {topic} cannot be found") from None
    kind = int(body.schema.type)
    if kind == SchemaType.NONE:
        return None
    if kind != SchemaType.AVRO:
        named = SchemaType(kind).name if kind in list(SchemaType) else str(kind)
        raise InvalidArgument(f"version {number} of the schema of {topic} is of the type {named}, not AVRO")
    return bytes(body.schema.schema_data).decode()


async def _schema(link: Link, topic: str, version: bytes | None) -> Any:
    connection = await link.client.service_connection()
    return await connection.request(lambda number: requests.get_schema(number, topic, version))
