"""Command handlers, by theme; the table of who handles what.

A synchronous handler runs inside the read of the connection (flow, acks, redelivery: cheap and ordered). An asynchronous
one runs as a task of the connection; what it raises becomes the answer that its command calls for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from braid.broker.commands import consume, lookup, publish, reads, scalable, schema, sinks, transactions, unsupported
from braid.broker.commands.handler import Handler
from braid.wire.types import CommandType

SYNC_COMMANDS: Final[dict[int, Callable[[Any, Any], None]]] = {
    CommandType.PING: lookup.ping,
    CommandType.PONG: lookup.pong,
    CommandType.FLOW: consume.flow,
    CommandType.ACK: consume.acknowledge,
    CommandType.REDELIVER_UNACKNOWLEDGED_MESSAGES: consume.redeliver,
    CommandType.CONSUMER_STATS: consume.stats,
    CommandType.SCALABLE_TOPIC_CLOSE: scalable.close_lookup,
    CommandType.WATCH_SCALABLE_TOPICS_CLOSE: scalable.close_watch,
    CommandType.WATCH_TC_ASSIGNMENTS_CLOSE: transactions.close_watch,
    **unsupported.SYNC,
}

ASYNC_COMMANDS: Final[dict[int, Handler]] = {
    CommandType.PARTITIONED_METADATA: Handler(lookup.partitioned_metadata, lookup.partitioned_metadata_failed),
    CommandType.LOOKUP: Handler(lookup.lookup, lookup.lookup_failed),
    CommandType.GET_TOPICS_OF_NAMESPACE: Handler(lookup.topics_of_namespace),
    CommandType.PRODUCER: Handler(publish.create),
    CommandType.SUBSCRIBE: Handler(consume.subscribe),
    # Not synchronous, so that a close finds the creation that was asked for just before it.
    CommandType.CLOSE_PRODUCER: Handler(publish.close),
    CommandType.CLOSE_CONSUMER: Handler(consume.close),
    CommandType.UNSUBSCRIBE: Handler(consume.unsubscribe),
    CommandType.SEEK: Handler(consume.seek),
    CommandType.GET_LAST_MESSAGE_ID: Handler(consume.last_message_id),
    CommandType.SCALABLE_TOPIC_LOOKUP: Handler(scalable.lookup, scalable.lookup_failed),
    CommandType.SCALABLE_TOPIC_SUBSCRIBE: Handler(scalable.subscribe, scalable.subscribe_failed),
    CommandType.REPORT_PLACES: Handler(scalable.report_places, scalable.report_failed),
    CommandType.WATCH_SCALABLE_TOPICS: Handler(scalable.watch, scalable.watch_failed),
    CommandType.GET_SCHEMA: Handler(schema.get, schema.get_failed),
    CommandType.GET_OR_CREATE_SCHEMA: Handler(schema.get_or_create, schema.get_or_create_failed),
    **transactions.HANDLERS,
    **reads.HANDLERS,
    **sinks.HANDLERS,
}
