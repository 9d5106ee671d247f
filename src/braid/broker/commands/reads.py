"""Commands 1010 to 1017, of Braid: what segments hold, where ranges end, reading ranges in bulk, moving a reader's cursor.

Refusals are answered in the command's own reply; those that have no number of their own are marked in the text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from braid.broker import segment_reads
from braid.broker.commands.handler import Handler
from braid.errors import BraidError, NotAllowed, wire_text
from braid.model.names import TopicName
from braid.wire import bulk, messages
from braid.wire.commands import encode, enum_value
from braid.wire.types import CommandType

if TYPE_CHECKING:
    from braid.broker.connection import BrokerConnection
    from braid.broker.topic import Topic

DESCRIBED_AT_ONCE: Final = 16
MAX_INDEX: Final = (1 << 63) - 1


async def describe(connection: BrokerConnection, body: messages.CommandDescribeSegments) -> None:
    """The indexes of topics that this broker serves, each with its own error; and which segments a topic had."""
    limit = connection.config.max_described_topics
    if len(body.topics) > limit:
        raise NotAllowed(f"{len(body.topics)} topics were asked for at once; ask for at most {limit}.")
    reply = messages.CommandDescribeSegmentsResponse(request_id=body.request_id)
    entries = [reply.segments.add(topic=topic) for topic in body.topics]
    waiting = iter(entries)

    async def work() -> None:
        for entry in waiting:
            try:
                found = await segment_reads.describe(connection.service, TopicName.parse(entry.topic))
            except BraidError as error:
                entry.error, entry.message = enum_value(error.code), wire_text(error)
                continue
            entry.incarnation = found.incarnation
            entry.low_index, entry.stable_index, entry.end_index = found.low, found.stable, found.end
            entry.is_sealed = found.is_sealed
            entry.stored_bytes = found.stored_bytes

    async with asyncio.TaskGroup() as group:
        for _ in range(min(DESCRIBED_AT_ONCE, len(entries))):
            group.create_task(work())
    if body.HasField("pruned_of"):
        await _tell_pruned(connection, TopicName.parse(body.pruned_of), reply)
    connection.link.write(encode(CommandType.DESCRIBE_SEGMENTS_RESPONSE, reply))


async def _tell_pruned(connection: BrokerConnection, topic: TopicName, reply: messages.CommandDescribeSegmentsResponse) -> None:
    """From the topic's record, read fresh: an end is noted there by the same write that takes the segment out of the layout."""
    record = await connection.service.records.read(topic)
    if record is not None:
        reply.incarnation = record.incarnation
        for number, end in record.pruned_ends.items():
            shown = reply.pruned.add(segment_id=number, end_index=end.index, ledger_id=end.ledger_id, entry_id=end.entry_id)
            if end.hash_range is not None:
                shown.hash_start, shown.hash_end = end.hash_range


async def find_index(connection: BrokerConnection, body: messages.CommandFindIndex) -> None:
    """By time, or by the size of a range."""
    by_time, by_size = body.HasField("timestamp"), body.HasField("from_index")
    if by_time == by_size:
        raise NotAllowed("FIND_INDEX says either a timestamp or where a range begins.")
    _check_indexes(body.timestamp, body.from_index)
    topic = await _topic(connection, body)
    if by_time:
        index = await segment_reads.index_at_time(topic, body.timestamp)
    else:
        index = await segment_reads.offset_for(
            topic,
            body.from_index,
            body.max_messages if body.HasField("max_messages") else None,
            body.max_bytes if body.HasField("max_bytes") else None,
        )
    reply = messages.CommandFindIndexResponse(request_id=body.request_id, index=index)
    connection.link.write(encode(CommandType.FIND_INDEX_RESPONSE, reply))


async def fetch(connection: BrokerConnection, body: messages.CommandFetchEntries) -> None:
    """Entries of a range. Holds its part of the budget until the socket took the answer."""
    config, service = connection.config, connection.service
    _check_indexes(body.from_index, body.to_index)
    limit = min(config.fetch_max_bytes, config.max_message_size)
    if body.HasField("max_bytes"):
        limit = max(1, min(limit, body.max_bytes))
    async with connection.fetching, service.read_budget.hold(limit):
        topic = await _topic(connection, body)
        found = await segment_reads.fetch(topic, body.from_index, body.to_index, limit)
        frame = bulk.fetched(
            body.request_id,
            found.covered_to,
            found.last_index,
            found.ledger_id,
            found.entry_id,
            found.append_ms,
            found.bodies,
        )
        del found
        await connection.link.deliver_bulk(frame)


async def move_cursor(connection: BrokerConnection, body: messages.CommandMoveCursor) -> None:
    """Answered once the cursor is durable."""
    _check_indexes(body.index)
    topic = await _topic(connection, body)
    await segment_reads.move_cursor(connection.service, topic, body.subscription, body.index)
    reply = messages.CommandMoveCursorResponse(request_id=body.request_id)
    connection.link.write(encode(CommandType.MOVE_CURSOR_RESPONSE, reply))


async def _topic(connection: BrokerConnection, body: Any) -> Topic:
    return await segment_reads.opened(connection.service, TopicName.parse(body.topic), body.incarnation)


def _check_indexes(*indexes: int) -> None:
    for index in indexes:
        if index > MAX_INDEX:
            raise NotAllowed(f"{index} is neither an index nor a time; both are at most {MAX_INDEX}.")


def _refusing(kind: CommandType, reply: Callable[..., Any]) -> Callable[[Any, BraidError], bytes]:
    def fail(body: Any, failure: BraidError) -> bytes:
        return encode(kind, reply(request_id=body.request_id, error=enum_value(failure.code), message=wire_text(failure)))

    return fail


HANDLERS: Final[dict[int, Handler]] = {
    CommandType.DESCRIBE_SEGMENTS: Handler(
        describe, _refusing(CommandType.DESCRIBE_SEGMENTS_RESPONSE, messages.CommandDescribeSegmentsResponse)
    ),
    CommandType.FIND_INDEX: Handler(find_index, _refusing(CommandType.FIND_INDEX_RESPONSE, messages.CommandFindIndexResponse)),
    CommandType.FETCH_ENTRIES: Handler(
        fetch, _refusing(CommandType.FETCH_ENTRIES_RESPONSE, messages.CommandFetchEntriesResponse)
    ),
    CommandType.MOVE_CURSOR: Handler(
        move_cursor, _refusing(CommandType.MOVE_CURSOR_RESPONSE, messages.CommandMoveCursorResponse)
    ),
}
