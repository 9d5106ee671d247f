"""`AdminClient.scalable_topics` and `AdminClient.segments`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Literal

from braid.client import operations_scalable as ops
from braid.client.admin_calls import Calls, Names, given, namespace_parts, number
from braid.client.admin_scalable_types import (
    ScalableTopicInfo,
    ScalableTopicStats,
    SegmentBacklogStats,
    SegmentCreation,
    SegmentLoad,
)
from braid.client.admin_types import Retention
from braid.client.messages import MessageId
from braid.errors import InvalidArgument
from braid.model.names import Domain, TopicName

DEFAULT_NAMESPACE = "public/default"
End = Literal["earliest", "latest"]
Kind = Literal["stream", "queue", "checkpoint"]
KINDS = ("stream", "queue", "checkpoint")
ENDS = ("earliest", "latest")
Moment = Literal["earliest"] | datetime
STORED_AS_TOPIC = "persistent"


class ScalableTopics(Calls):
    """Topics that split and merge. A name may be short (`orders`) or full (`topic://tenant/namespace/orders`)."""

    async def list(self, namespace: str = DEFAULT_NAMESPACE, *, properties: Mapping[str, str] | None = None) -> Names:
        """Scalable topics of a namespace; with properties only those that have all of them."""
        query = {"property": [f"{key}={value}" for key, value in (properties or {}).items()]}
        return await self._call(ops.SCALABLE_LIST, namespace_parts(namespace), query)

    async def create(
        self,
        topic: str,
        *,
        segments: int = 1,
        properties: Mapping[str, str] | None = None,
        routing: Literal["high16", "low16"] | None = None,
    ) -> None:
        """Create a scalable topic with so many segments; `routing="low16"` for clients of Pulsar 5.0.0-M1."""
        query = {"numInitialSegments": segments, "routing": routing}
        await self._call(ops.SCALABLE_CREATE, scalable_parts(topic), query, dict(properties or {}))

    async def get_metadata(self, topic: str) -> ScalableTopicInfo:
        """The layout: all segments, what they came from and what became of them."""
        return await self._call(ops.SCALABLE_METADATA, scalable_parts(topic))

    async def get_stats(self, topic: str) -> ScalableTopicStats:
        """Rates and backlog of each segment, consumers of each subscription and what holds them up."""
        return await self._call(ops.SCALABLE_STATS, scalable_parts(topic))

    async def get_retention(self, topic: str, *, applied: bool = False) -> Retention | None:
        """How long acknowledged messages are kept; None = the topic has no policy of its own. With `applied` what holds for
        it, whoever says so."""
        return await self._call_or_none(ops.SCALABLE_RETENTION, scalable_parts(topic), {"applied": applied})

    async def set_retention(self, topic: str, *, minutes: int, megabytes: int) -> None:
        """Keep acknowledged messages for a time and up to a size, whatever the namespace says; -1 is no limit."""
        body = Retention(retention_time_in_minutes=minutes, retention_size_in_mb=megabytes)
        await self._call(ops.SCALABLE_SET_RETENTION, scalable_parts(topic), body=body)

    async def remove_retention(self, topic: str) -> None:
        """Let the namespace's policy apply."""
        await self._call(ops.SCALABLE_REMOVE_RETENTION, scalable_parts(topic))

    async def delete(self, topic: str, *, force: bool = False) -> None:
        """Delete a topic with its segments, messages and subscriptions; with `force` even if it is in use."""
        await self._call(ops.SCALABLE_DELETE, scalable_parts(topic), {"force": force})

    async def split_segment(self, topic: str, segment: int) -> None:
        """Split an active segment into two halves."""
        await self._call(ops.SCALABLE_SPLIT, {**scalable_parts(topic), "segment": _segment_id(segment)})

    async def merge_segments(self, topic: str, segment: int, other: int) -> None:
        """Merge two active segments whose ranges touch."""
        names = {**scalable_parts(topic), "segment": _segment_id(segment), "other": _segment_id(other)}
        await self._call(ops.SCALABLE_MERGE, names)

    async def create_subscription(self, topic: str, subscription: str, *, kind: Kind = "stream", at: End = "earliest") -> None:
        """Create a subscription on all segments, at an end of the topic; one that exists stays as it is."""
        if kind not in KINDS:
            raise InvalidArgument(f"{kind!r} is no kind of subscription; use 'stream', 'queue' or 'checkpoint'.")
        query = {"type": kind.upper(), "initial": _end(at)}
        await self._call(ops.SCALABLE_CREATE_SUBSCRIPTION, _subscription_parts(topic, subscription), query)

    async def delete_subscription(self, topic: str, subscription: str) -> None:
        """Delete a subscription from all segments; its consumers are closed."""
        await self._call(ops.SCALABLE_DELETE_SUBSCRIPTION, _subscription_parts(topic, subscription))

    async def seek(self, topic: str, subscription: str, to: Moment) -> None:
        """Put a subscription to a time, or to the beginning, on all segments."""
        query = {"timestamp": _milliseconds(to)}
        await self._call(ops.SCALABLE_SEEK, _subscription_parts(topic, subscription), query)

    async def clear_backlog(self, topic: str, subscription: str) -> None:
        """Skip the whole backlog of a subscription on all segments."""
        await self._call(ops.SCALABLE_CLEAR_BACKLOG, _subscription_parts(topic, subscription))

    async def remove_consumer(self, topic: str, subscription: str, consumer: str) -> None:
        """Remove the registration of a consumer that is gone, also one whose record cannot be read; its segments are free at
        once. One that is connected is refused: close it."""
        names = {**_subscription_parts(topic, subscription), "consumer": given("consumer", consumer)}
        await self._call(ops.SCALABLE_REMOVE_CONSUMER, names)


class Segments(Calls):
    """Single segments, by their names (`segment://tenant/namespace/orders/0000-7fff-0`): for repairs, and to look closer.

    Layouts are changed by `scalable_topics.split_segment` and `merge_segments`; what is done here to a segment that its topic
    does not list is refused."""

    async def create(self, segment: str, *, subscriptions: Sequence[str] = (), at: End = "earliest") -> None:
        """Make the topic of a segment that the layout lists, if it is missing, with these subscriptions."""
        body = SegmentCreation(subscriptions=dict.fromkeys(subscriptions, _end(at)))
        await self._call(ops.SEGMENTS_CREATE, segment_parts(segment), body=body)

    async def terminate(self, segment: str, *, force: bool = False) -> MessageId:
        """Seal a segment by hand; returns the id of its last message. An active one only with `force`: nothing can be sent to
        its hashes until it is split or merged."""
        return (await self._call(ops.SEGMENTS_TERMINATE, segment_parts(segment), {"force": force})).message_id

    async def delete(self, segment: str, *, force: bool = False) -> None:
        """Delete a segment's topic with its messages; a missing one is fine. One that its topic still needs only with
        `force`: what nobody has read of it is lost."""
        await self._call(ops.SEGMENTS_DELETE, segment_parts(segment), {"force": force})

    async def subscriptions(self, segment: str) -> Names:
        """Subscriptions that the segment has."""
        return await self._call(ops.SEGMENTS_SUBSCRIPTIONS, segment_parts(segment))

    async def stats(self, segment: str) -> SegmentLoad:
        """Rates and backlog, as the segment's owner sees them."""
        return await self._call(ops.SEGMENTS_STATS, segment_parts(segment))

    async def settle(self, segment: str) -> None:
        """Finish what transactions that ended have left there; done by itself, too."""
        await self._call(ops.SEGMENTS_SETTLE, segment_parts(segment))

    async def create_subscription(self, segment: str, subscription: str, *, at: End = "earliest") -> None:
        """Make the cursor of a subscription, if it is missing."""
        names = {**segment_parts(segment), "subscription": given("subscription", subscription)}
        await self._call(ops.SEGMENTS_CREATE_SUBSCRIPTION, names, {"initial": _end(at)})

    async def delete_subscription(self, segment: str, subscription: str) -> None:
        """Remove the cursor of a subscription; a missing one is fine."""
        names = {**segment_parts(segment), "subscription": given("subscription", subscription)}
        await self._call(ops.SEGMENTS_DELETE_SUBSCRIPTION, names)

    async def backlog(self, segment: str, subscription: str) -> SegmentBacklogStats:
        """What a subscription has left in the segment."""
        names = {**segment_parts(segment), "subscription": given("subscription", subscription)}
        return await self._call(ops.SEGMENTS_BACKLOG, names, {"detail": True})

    async def seek(self, segment: str, subscription: str, to: Moment) -> None:
        """Put a subscription to a time, or to the beginning, on this segment."""
        names = {**segment_parts(segment), "subscription": given("subscription", subscription)}
        await self._call(ops.SEGMENTS_SEEK, names, {"timestamp": _milliseconds(to)})

    async def skip_all(self, segment: str, subscription: str) -> None:
        """Skip the whole backlog of a subscription on this segment."""
        names = {**segment_parts(segment), "subscription": given("subscription", subscription)}
        await self._call(ops.SEGMENTS_SKIP_ALL, names)


def scalable_parts(topic: str) -> dict[str, str]:
    """The parts of a scalable topic's name, short or full; raises InvalidTopicName or InvalidArgument."""
    name = TopicName.parse(topic if "://" in topic else f"{Domain.TOPIC}://{_long(topic)}")
    if name.domain is not Domain.TOPIC:
        hint = f"; its topic is {name.parent}" if name.descriptor is not None else "; use the commands for regular topics"
        raise InvalidArgument(f"{name} is no scalable topic (topic://tenant/namespace/name){hint}.")
    return {"tenant": name.tenant, "namespace": name.namespace_portion, "topic": name.local_name}


def _long(topic: str) -> str:
    """A short name with its namespace; one with two steps is `tenant/namespace/name`."""
    return topic if topic.count("/") >= 2 else f"{DEFAULT_NAMESPACE}/{topic}"


def segment_parts(segment: str) -> dict[str, str]:
    """The parts of a segment's path; also of a regular topic (`persistent://`) that stores one."""
    name = TopicName.parse(segment)
    parts = {"tenant": name.tenant, "namespace": name.namespace_portion}
    if name.descriptor is not None:
        return {**parts, "topic": name.parent.local_name, "descriptor": str(name.descriptor)}
    if name.domain is not Domain.PERSISTENT or "://" not in segment:
        raise InvalidArgument(f"{segment!r} names no segment; write segment://tenant/namespace/topic/0000-7fff-0.")
    return {**parts, "topic": name.local_name, "descriptor": STORED_AS_TOPIC}


def _subscription_parts(topic: str, subscription: str) -> dict[str, str]:
    return {**scalable_parts(topic), "subscription": given("subscription", subscription)}


def _segment_id(value: int) -> str:
    return number("The id of a segment", value)


def _end(name: str) -> End:
    if name == "earliest":
        return "earliest"
    if name == "latest":
        return "latest"
    raise InvalidArgument(f"{name!r} is no end of a topic; use 'earliest' or 'latest'.")


def _milliseconds(to: Moment) -> int:
    if isinstance(to, datetime):
        if to.tzinfo is None:
            raise InvalidArgument(f"The time {to} has no time zone; give one, such as datetime.now(UTC).")
        return int(number("The time", int(to.timestamp() * 1000)))
    if to != "earliest":
        raise InvalidArgument(f"{to!r} is no time; use 'earliest' or a datetime. The end is reached by clearing the backlog.")
    return 0
