"""REST: stats of topics, plain and partitioned, and what is inside their logs."""

from __future__ import annotations

from typing import Any

import msgspec

from braid.broker.subscription import Subscription
from braid.broker.topic import Topic
from braid.errors import TopicNotFound
from braid.managedledger.api import InternalStats
from braid.model.names import TopicName
from braid.model.positions import Position
from braid.web.admin import Admin
from braid.web.calls import Ask, Calls, Query
from braid.web.owners import Owners
from braid.web.routes_subscriptions import SUBSCRIPTION, ResetCursorData, find_one
from braid.web.routes_topics import TOPIC, MessageId, topic_path
from braid.web.stats import partitioned_stats, topic_stats
from braid.wire.entries import entry_metadata

Json = dict[str, Any]
MAX_ANALYZED = 10_000
"""Entries one analysis of a backlog reads."""
ANALYZED_BYTES = 5 << 20
DETAILS = (
    Query("getPreciseBacklog", "Has no effect: the backlog is always exact", bool, False),
    Query("subscriptionBacklogSize", "Whether to tell the backlog in bytes", bool, True),
    Query("getEarliestTimeInBacklog", "Whether to look up when the oldest message of each backlog was published", bool, False),
    Query("excludePublishers", "Leave the producers out", bool, False),
    Query("excludeConsumers", "Leave the consumers out", bool, False),
)


class BacklogAnalysis(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What a subscription has to read. Nothing is filtered in this version."""

    entries: int
    messages: int
    marker_messages: int
    filter_rejected_entries: int
    filter_accepted_entries: int
    filter_rescheduled_entries: int
    filter_rejected_messages: int
    filter_accepted_messages: int
    filter_rescheduled_messages: int
    aborted: bool
    """There is more than was looked at."""
    first_message_id: str | None
    last_message_id: str | None


def stats_calls(admin: Admin) -> Calls:
    """Calls that tell the state of topics."""
    calls = Calls("stats")
    service = admin.service

    async def parts_of(name: TopicName) -> list[TopicName]:
        await admin.service.namespaces.policies(name.namespace)
        if not (parts := await admin.partitions(name)):
            raise await admin.not_found(name, f"The topic {name} is not partitioned or does not exist.")
        return parts

    @calls.get(f"{TOPIC}/stats", Json, query=DETAILS, owner=True)
    async def stats(ask: Ask) -> Any:
        """Rates, sizes, producers and subscriptions of a topic."""
        return await detailed(admin, await _plain(admin, ask), ask.query)

    @calls.get(f"{TOPIC}/partitioned-stats", Json, query=(Query("perPartition", "Each partition too", bool, True), *DETAILS))
    async def all_stats(ask: Ask) -> Any:
        """The same for a partitioned topic: sums, and each partition."""
        name = ask.topic
        parts = await parts_of(name)

        async def one(part: TopicName) -> Json:
            return await detailed(admin, await service.topic(part, create=True), ask.query)

        found = await Owners(ask).each(parts, one, path=lambda each: f"{topic_path(each)}/stats", tolerate=(404,))
        known = {str(part): each for part, each in zip(parts, found, strict=True) if each is not None}
        return partitioned_stats(known, len(parts), ask.query["perPartition"])

    metadata = Query("metadata", "Has no effect: ledgers carry none", bool, False)

    @calls.get(f"{TOPIC}/internalStats", InternalStats, query=(metadata,), owner=True)
    async def internal_stats(ask: Ask) -> Any:
        """Ledgers and cursors of a topic."""
        return (await _plain(admin, ask, "partitioned-internalStats")).log.internal_stats()

    @calls.get(f"{TOPIC}/partitioned-internalStats", Json)
    async def all_internal_stats(ask: Ask) -> Any:
        """Ledgers and cursors of each partition."""
        parts = await parts_of(ask.topic)

        async def one(part: TopicName) -> Json:
            inside: Json = msgspec.to_builtins((await service.topic(part, create=True)).log.internal_stats())
            return inside

        found = await Owners(ask).each(parts, one, path=lambda each: f"{topic_path(each)}/internalStats", tolerate=(404,))
        known = {str(part): each for part, each in zip(parts, found, strict=True) if each is not None}
        return {"metadata": {"partitions": len(parts), "deleted": False}, "partitions": known}

    _more(admin, calls)
    return calls


def _more(admin: Admin, calls: Calls) -> None:
    @calls.get(f"{TOPIC}/internal-info", Json, owner=True)
    async def internal_info(ask: Ask) -> Any:
        """What is stored of a topic: its ledgers and the positions of its cursors."""
        topic = await _plain(admin, ask)
        inside = topic.log.internal_stats()
        return {
            "version": topic.log.owner_epoch,
            "creationDate": inside.last_ledger_created_timestamp,
            "ledgers": [{"ledgerId": each.ledger_id, "entries": each.entries, "size": each.size} for each in inside.ledgers],
            "cursors": {
                name: {"markDelete": each.mark_delete_position, "cursorsLedgerId": each.cursor_ledger}
                for name, each in inside.cursors.items()
            },
            "properties": dict(topic.log.properties),
        }

    @calls.put(f"{TOPIC}/backlogSize", int, status=200, body=MessageId, owner=True)
    async def backlog_size(ask: Ask) -> Any:
        """Bytes stored after a message: an estimate from the mean size of an entry."""
        topic = await admin.loaded(ask)
        log = topic.log
        position = Position(ask.body.ledger_id, ask.body.entry_id)
        after = log.map.end - log.map.ordinal(log.map.clamp(Position(position.ledger_id, position.entry_id + 1)))
        return log.total_size * after // log.total_entries if log.total_entries else 0

    @calls.post(
        f"{SUBSCRIPTION}/analyzeBacklog", BacklogAnalysis, status=200, body=ResetCursorData, body_default=None, owner=True
    )
    async def analyze(ask: Ask) -> Any:
        """Count the entries and messages a subscription has not acknowledged, by reading them; ends early if there are many."""
        topic = await admin.loaded(ask)
        subscription = find_one(topic, ask.subscription)
        start = topic.log.position_after(subscription.cursor.mark_delete)
        if ask.body is not None and not ask.body.is_end:
            start = max(start, ask.body.position)
        return await _analyzed(topic, subscription, start)


async def _plain(admin: Admin, ask: Ask, instead: str = "partitioned-stats") -> Topic:
    """The topic itself; the name of a partitioned topic has no stats of its own."""
    if await admin.partitions(ask.topic):
        raise TopicNotFound(f"The topic {ask.topic} is partitioned; ask for its {instead}.")
    return await admin.loaded(ask)


async def _analyzed(topic: Topic, subscription: Subscription, start: Position) -> BacklogAnalysis:
    entries = messages = read = 0
    first = last = None
    while read < MAX_ANALYZED:
        found = await topic.log.read(start, 100, ANALYZED_BYTES)
        if not found:
            break
        read += len(found)
        for entry in found:
            position = Position(entry.ledger_id, entry.entry_id)
            if not subscription.cursor.is_acknowledged(position):
                first, last = first or position, position
                entries += 1
                messages += entry.messages
        start = Position(found[-1].ledger_id, found[-1].entry_id + 1)
    return BacklogAnalysis(
        entries=entries,
        messages=messages,
        marker_messages=0,
        filter_rejected_entries=0,
        filter_accepted_entries=entries,
        filter_rescheduled_entries=0,
        filter_rejected_messages=0,
        filter_accepted_messages=messages,
        filter_rescheduled_messages=0,
        aborted=read >= MAX_ANALYZED,
        first_message_id=None if first is None else str(first),
        last_message_id=None if last is None else str(last),
    )


async def detailed(admin: Admin, topic: Topic, query: Json) -> Json:
    """The stats of one topic with the details asked for."""
    found = topic_stats(admin, topic)
    if query["excludePublishers"]:
        found["publishers"] = []
    for name, each in found["subscriptions"].items():
        if query["excludeConsumers"]:
            each["consumers"] = []
        if not query["subscriptionBacklogSize"]:
            each["backlogSize"] = -1
        if query["getEarliestTimeInBacklog"] and name in topic.subscriptions:
            each["earliestMsgPublishTimeInBacklog"] = await _oldest(topic, name)
    if query["getEarliestTimeInBacklog"]:
        times = [each["earliestMsgPublishTimeInBacklog"] for each in found["subscriptions"].values()]
        found["earliestMsgPublishTimeInBacklogs"] = min(filter(None, times), default=0)
    return found


async def _oldest(topic: Topic, subscription: str) -> int:
    """When the first message was published that the subscription has not acknowledged; 0 if there is none."""
    cursor = topic.subscriptions[subscription].cursor
    if not cursor.backlog():
        return 0
    position = topic.log.position_after(cursor.mark_delete)
    entries = await topic.log.read(position, 1, 1)
    return entry_metadata(entries[0].body).publish_time if entries else 0
