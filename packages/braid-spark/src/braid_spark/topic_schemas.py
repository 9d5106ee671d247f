"""The Avro schema that a topic has: what `valueFormat=avro` uses if the user gives none. Asks brokers, in the driver alone."""

from __future__ import annotations

import msgspec

from braid.errors import NotFound
from braid.wire import requests
from braid.wire.types import SchemaType
from braid_spark.connections import Link
from braid_spark.options import Options


def with_avro_schema(options: Options) -> Options:
    """The options, with the schema of the first topic if one is needed, none is given and the topic has one of this kind."""
    if options.value_format != "avro" or options.avro_schema is not None or not options.topics:
        return options
    topic = options.topics[0]
    with Link(options.url, options.client) as link:
        link.connect()
        found = link.run(lambda: _avro_schema(link, topic))
    return options if found is None else msgspec.structs.replace(options, avro_schema=found)


async def _avro_schema(link: Link, topic: str) -> str | None:
    connection = await link.client.service_connection()
    try:
        body = await connection.request(lambda number: requests.get_schema(number, topic))
    except NotFound:
        return None
    if int(body.schema.type) != SchemaType.AVRO:
        return None
    return bytes(body.schema.schema_data).decode()
