"""REST: single messages of a topic: by position, by order, by time, by index, and the last one."""

from __future__ import annotations

from typing import Any

from litestar.response import Response

from braid.broker.topic import Topic
from braid.errors import InvalidArgument, TopicNotFound
from braid.managedledger.api import Entry
from braid.model.positions import Position
from braid.web.admin import Admin
from braid.web.calls import Ask, Calls, Query
from braid.web.messages import message_response
from braid.web.routes_subscriptions import SUBSCRIPTION, find_one
from braid.web.routes_topics import TOPIC, MessageId, message_id

MAX_MESSAGE_BYTES = 256 << 20
MAX_INT32 = (1 << 31) - 1


def message_calls(admin: Admin) -> Calls:
    """Calls about single messages."""
    calls = Calls("messages")

    async def shown(topic: Topic, position: Position) -> Response[bytes]:
        found = await topic.log.read(position, 1, MAX_MESSAGE_BYTES) if topic.log.map.contains(position) else []
        if not found or (found[0].ledger_id, found[0].entry_id) != position:
            raise TopicNotFound(f"The topic {topic.name} has no message {position}.")
        entry, transactions = found[0], topic.transactions
        is_aborted = entry.txn is not None and transactions.is_aborted(entry.txn)
        is_undecided = entry.txn is not None and transactions.is_undecided(entry.txn)
        return message_response(entry, is_aborted=is_aborted, is_undecided=is_undecided)

    @calls.get(f"{TOPIC}/lastMessageId", MessageId, owner=True)
    async def last_message_id(ask: Ask) -> Any:
        """Id of the newest message."""
        topic = await admin.loaded(ask)
        return message_id(topic.log.last_position, topic.name.partition_index)

    @calls.get(f"{TOPIC}/messageid/{{timestamp}}", MessageId, owner=True)
    async def id_by_time(ask: Ask) -> Any:
        """Id of the first message stored at this time or later; where the next one will be, if there is none."""
        ms = ask.number("timestamp", "time in milliseconds")
        topic = await admin.loaded(ask)
        return message_id(await topic.log.find_time(ms), topic.name.partition_index)

    @calls.get(f"{TOPIC}/getMessageIdByIndex", MessageId, query=(Query("index", "Index of a message", int),), owner=True)
    async def id_by_index(ask: Ask) -> Any:
        """Id of the entry that holds the message with this index."""
        if (index := ask.query["index"]) is None:
            raise InvalidArgument("Which message is told by the query parameter index.")
        topic = await admin.loaded(ask)
        entry = await _by_index(topic, index)
        if entry is None:
            raise TopicNotFound(f"The topic {topic.name} has no message with index {index}.")
        return message_id(Position(entry.ledger_id, entry.entry_id), topic.name.partition_index)

    @calls.get(f"{TOPIC}/ledger/{{ledger}}/entry/{{entry}}", bytes, owner=True)
    async def get_message(ask: Ask) -> Any:
        """One stored entry: payload as body, metadata as headers."""
        position = Position(ask.number("ledger", "ledger id"), ask.number("entry", "entry id"))
        return await shown(await admin.loaded(ask), position)

    examine = (
        Query("initialPosition", "From which end to count", str, "latest", ("latest", "earliest")),
        Query("messagePosition", "Which message, the first is 1", int, 1, least=1, most=MAX_INT32),
    )

    @calls.get(f"{TOPIC}/examinemessage", bytes, query=examine, owner=True)
    async def examine_message(ask: Ask) -> Any:
        """The n-th entry from the beginning or from the end of a topic."""
        topic = await admin.loaded(ask)
        log, count = topic.log, ask.query["messagePosition"]
        if count > log.total_entries:
            raise InvalidArgument(f"The topic {topic.name} has {log.total_entries} entries; there is none at {count}.")
        at = log.map.start + count - 1 if ask.query["initialPosition"] == "earliest" else log.map.end - count
        return await shown(topic, log.map.at(at))

    @calls.get(f"{SUBSCRIPTION}/position/{{position}}", bytes, owner=True)
    async def peek(ask: Ask) -> Any:
        """The n-th entry, from 1, that a subscription has not acknowledged. Nothing is acknowledged by this."""
        count = ask.number("position", "position of a message", 1, MAX_INT32)
        topic = await admin.loaded(ask)
        subscription = find_one(topic, ask.subscription)
        position = subscription.cursor.nth_unacknowledged(count)
        if position is None:
            raise TopicNotFound(f"The subscription {subscription.name} of {topic.name} has no message {count} to read.")
        return await shown(topic, position)

    return calls


async def _by_index(topic: Topic, index: int) -> Entry | None:
    """The entry whose messages include this index; a binary search, as indexes grow with positions."""
    log = topic.log
    low, high = log.map.start, log.map.end
    while low < high:
        middle = (low + high) // 2
        position = log.map.at(middle)
        entries = log.read_cached(position, 1, 1) or await log.read(position, 1, 1)
        if not entries:
            return None
        entry = entries[0]
        if entry.index < index:
            low = middle + 1
        elif entry.index - entry.messages < index:
            return entry
        else:
            high = middle
    return None
