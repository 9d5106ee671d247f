"""`AdminClient.topics` and `AdminClient.subscriptions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Literal

from braid.client import operations_topics as ops
from braid.client.admin_calls import Calls, Names, namespace_parts, number, subscription_parts, topic_parts
from braid.client.admin_types import (
    ENDS,
    InternalStats,
    Lookup,
    PartitionedInternalStats,
    PartitionedTopicStats,
    Retention,
    StoredMessage,
    TopicStats,
    reset_position,
)
from braid.client.messages import MessageId
from braid.errors import InvalidArgument

DEFAULT_NAMESPACE = "public/default"
End = Literal["earliest", "latest"]
Start = End | MessageId
Target = End | MessageId | datetime


class Topics(Calls):
    """Persistent topics. A topic's name may be short (`orders`) or full."""

    async def list(self, namespace: str = DEFAULT_NAMESPACE) -> Names:
        """Topics of a namespace, partitions one by one."""
        return await self._call(ops.TOPICS_LIST, namespace_parts(namespace))

    async def partitioned(self, namespace: str = DEFAULT_NAMESPACE) -> Names:
        """Partitioned topics of a namespace."""
        return await self._call(ops.TOPICS_PARTITIONED, namespace_parts(namespace))

    async def create(self, topic: str, *, partitions: int = 0, properties: Mapping[str, str] | None = None) -> None:
        """Create a topic: plain, or with partitions."""
        if partitions == 0:
            await self._call(ops.TOPICS_CREATE, topic_parts(topic), body=dict(properties or {}))
        elif properties:
            raise InvalidArgument("Properties are set at creation on plain topics only; create first, then set_properties.")
        else:
            await self._call(ops.TOPICS_CREATE_PARTITIONED, topic_parts(topic), body=partitions)

    async def delete(self, topic: str, *, force: bool = False) -> None:
        """Delete a topic with its messages and subscriptions; with `force` even if it is in use."""
        is_partitioned = await self.partitions(topic) > 0
        operation = ops.TOPICS_DELETE_PARTITIONED if is_partitioned else ops.TOPICS_DELETE
        await self._call(operation, topic_parts(topic), {"force": force})

    async def partitions(self, topic: str) -> int:
        """Number of partitions of a topic; 0 for a plain one."""
        return (await self._call(ops.TOPICS_PARTITIONS, topic_parts(topic))).partitions

    async def grow(self, topic: str, partitions: int) -> None:
        """Add partitions until there are so many."""
        await self._call(ops.TOPICS_GROW, topic_parts(topic), body=partitions)

    async def stats(self, topic: str) -> TopicStats:
        """Rates, backlog and clients of a plain topic or one partition."""
        return await self._call(ops.TOPICS_STATS, topic_parts(topic))

    async def partitioned_stats(self, topic: str, *, per_partition: bool = True) -> PartitionedTopicStats:
        """The same for a partitioned topic: sums and each partition."""
        return await self._call(ops.TOPICS_PARTITIONED_STATS, topic_parts(topic), {"perPartition": per_partition})

    async def internal_stats(self, topic: str) -> InternalStats:
        """Ledgers and cursors of a plain topic or one partition."""
        return await self._call(ops.TOPICS_INTERNAL_STATS, topic_parts(topic))

    async def partitioned_internal_stats(self, topic: str) -> PartitionedInternalStats:
        """Ledgers and cursors of each partition."""
        return await self._call(ops.TOPICS_PARTITIONED_INTERNAL_STATS, topic_parts(topic))

    async def lookup(self, topic: str) -> Lookup:
        """The broker that serves a topic."""
        return await self._call(ops.TOPICS_LOOKUP, {"domain": "persistent", **topic_parts(topic)})

    async def bundle(self, topic: str) -> str:
        """The bundle of its namespace a topic is in."""
        return await self._call(ops.TOPICS_BUNDLE, {"domain": "persistent", **topic_parts(topic)})

    async def unload(self, topic: str) -> None:
        """Close a topic, so that its clients look it up again."""
        await self._call(ops.TOPICS_UNLOAD, topic_parts(topic))

    async def terminate(self, topic: str) -> MessageId:
        """End a topic for good; returns the id of its last message."""
        return (await self._call(ops.TOPICS_TERMINATE, topic_parts(topic))).message_id

    async def terminate_partitions(self, topic: str) -> dict[str, MessageId]:
        """End all partitions of a topic for good; returns the id of the last message of each."""
        found = await self._call(ops.TOPICS_TERMINATE_PARTITIONS, topic_parts(topic))
        return {partition: each.message_id for partition, each in found.items()}

    async def create_missed_partitions(self, topic: str) -> None:
        """Create the partitions that do not exist yet."""
        await self._call(ops.TOPICS_CREATE_MISSED_PARTITIONS, topic_parts(topic))

    async def trim(self, topic: str) -> None:
        """Delete now what no subscription needs and retention does not keep."""
        await self._call(ops.TOPICS_TRIM, topic_parts(topic))

    async def truncate(self, topic: str) -> None:
        """Skip the backlog of all subscriptions and delete what retention does not keep."""
        await self._call(ops.TOPICS_TRUNCATE, topic_parts(topic))

    async def last_message_id(self, topic: str) -> MessageId:
        """Id of the newest message."""
        return (await self._call(ops.TOPICS_LAST_MESSAGE_ID, topic_parts(topic))).message_id

    async def message(self, topic: str, message_id: MessageId) -> StoredMessage:
        """One stored message."""
        where = {
            "ledger": number("The ledger id", message_id.ledger_id),
            "entry": number("The entry id", message_id.entry_id),
        }
        return await self._message(ops.TOPICS_MESSAGE, {**topic_parts(topic), **where})

    async def permissions(self, topic: str) -> dict[str, Names]:
        """What each role may do."""
        return await self._call(ops.TOPICS_PERMISSIONS, topic_parts(topic))

    async def grant(self, topic: str, role: str, *, actions: Sequence[str]) -> None:
        """Let a role do something: produce, consume, functions, sources, sinks, packages."""
        await self._call(ops.TOPICS_GRANT, {**topic_parts(topic), "role": role}, body=tuple(actions))

    async def revoke(self, topic: str, role: str) -> None:
        """Take all permissions on the topic from a role."""
        await self._call(ops.TOPICS_REVOKE, {**topic_parts(topic), "role": role})

    async def retention(self, topic: str, *, applied: bool = False) -> Retention | None:
        """How long acknowledged messages are kept; None = the topic has no policy of its own. With `applied` what holds for
        it, whoever says so."""
        return await self._call_or_none(ops.TOPICS_RETENTION, topic_parts(topic), {"applied": applied})

    async def set_retention(self, topic: str, *, minutes: int, megabytes: int) -> None:
        """Keep acknowledged messages for a time and up to a size, whatever the namespace says; -1 is no limit."""
        body = Retention(retention_time_in_minutes=minutes, retention_size_in_mb=megabytes)
        await self._call(ops.TOPICS_SET_RETENTION, topic_parts(topic), body=body)

    async def remove_retention(self, topic: str) -> None:
        """Let the namespace's policy apply."""
        await self._call(ops.TOPICS_REMOVE_RETENTION, topic_parts(topic))

    async def properties(self, topic: str) -> dict[str, str]:
        """The properties of a topic."""
        return await self._call(ops.TOPICS_PROPERTIES, topic_parts(topic))

    async def set_properties(self, topic: str, properties: Mapping[str, str]) -> None:
        """Set properties; others stay."""
        await self._call(ops.TOPICS_SET_PROPERTIES, topic_parts(topic), body=dict(properties))

    async def remove_property(self, topic: str, key: str) -> None:
        """Remove one property."""
        await self._call(ops.TOPICS_REMOVE_PROPERTY, topic_parts(topic), {"key": key})


class Subscriptions(Calls):
    """The subscriptions of a topic; of a partitioned one, those of all partitions."""

    async def list(self, topic: str) -> Names:
        """Names of a topic's subscriptions."""
        return await self._call(ops.SUBSCRIPTIONS_LIST, topic_parts(topic))

    async def create(
        self, topic: str, subscription: str, *, at: Start = "latest", properties: Mapping[str, str] | None = None
    ) -> None:
        """Create a subscription at an end of the topic or at a message."""
        start = at if isinstance(at, MessageId) else _end(at)
        body = reset_position(start, properties=dict(properties or {}))
        await self._call(ops.SUBSCRIPTIONS_CREATE, subscription_parts(topic, subscription), body=body)

    async def delete(self, topic: str, subscription: str, *, force: bool = False) -> None:
        """Delete a subscription; with `force` even if it has consumers."""
        await self._call(ops.SUBSCRIPTIONS_DELETE, subscription_parts(topic, subscription), {"force": force})

    async def skip(self, topic: str, subscription: str, count: int) -> None:
        """Skip the next `count` messages."""
        names = {**subscription_parts(topic, subscription), "count": number("The count", count)}
        await self._call(ops.SUBSCRIPTIONS_SKIP, names)

    async def skip_all(self, topic: str, subscription: str) -> None:
        """Skip the whole backlog."""
        await self._call(ops.SUBSCRIPTIONS_SKIP_ALL, subscription_parts(topic, subscription))

    async def reset(self, topic: str, subscription: str, to: Target, *, excluded: bool = False) -> None:
        """Go to an end of the topic, to a message (with `excluded`: after it), or to a time."""
        names = subscription_parts(topic, subscription)
        if isinstance(to, datetime):
            if to.tzinfo is None:
                raise InvalidArgument(f"The time {to} has no time zone; give one, such as datetime.now(UTC).")
            ms = number("The time", int(to.timestamp() * 1000))
            await self._call(ops.SUBSCRIPTIONS_RESET_TO_TIME, {**names, "timestamp": ms})
        else:
            body = reset_position(to if isinstance(to, MessageId) else _end(to), excluded=excluded)
            await self._call(ops.SUBSCRIPTIONS_RESET, names, body=body)

    async def peek(self, topic: str, subscription: str, position: int = 1) -> StoredMessage:
        """The entry `position` entries ahead, 1 being the next one; nothing is consumed."""
        names = {**subscription_parts(topic, subscription), "position": number("The position", position, 1)}
        return await self._message(ops.SUBSCRIPTIONS_PEEK, names)

    async def expire(self, topic: str, subscription: str, seconds: int) -> None:
        """Skip messages older than so many seconds."""
        names = {**subscription_parts(topic, subscription), "seconds": number("The age", seconds)}
        await self._call(ops.SUBSCRIPTIONS_EXPIRE, names)

    async def expire_all(self, topic: str, seconds: int) -> None:
        """The same for every subscription of the topic."""
        await self._call(ops.SUBSCRIPTIONS_EXPIRE_ALL, {**topic_parts(topic), "seconds": number("The age", seconds)})

    async def properties(self, topic: str, subscription: str) -> dict[str, str]:
        """The properties of a subscription."""
        return await self._call(ops.SUBSCRIPTIONS_PROPERTIES, subscription_parts(topic, subscription))

    async def set_properties(self, topic: str, subscription: str, properties: Mapping[str, str]) -> None:
        """Replace the properties of a subscription."""
        await self._call(ops.SUBSCRIPTIONS_SET_PROPERTIES, subscription_parts(topic, subscription), body=dict(properties))


def _end(name: str) -> MessageId:
    if name not in ENDS:
        raise InvalidArgument(f"{name!r} is no end of a topic; use 'earliest', 'latest' or a MessageId.")
    return ENDS[name]
