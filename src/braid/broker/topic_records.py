"""What the records of scalable topics say to an owner of segments: which segments there are, and who may do what to them.

Owns fresh reads of `/topics/...` for the broker and the checks of INV4, INV5 and INV7 that rest on them; changes nothing (the
controller does). A `persistent://` name and the `topic://` name beside it are one identity, so this is also where the broker
learns that a name is taken by a scalable topic.
"""

from __future__ import annotations

from typing import Final

import msgspec

from braid.errors import NotAllowed, StoreMismatch, TopicNotFound
from braid.metadata.api import MetadataStore, Span
from braid.metadata.claims import StaleLeader
from braid.model.names import Domain, NamespaceName, TopicName
from braid.model.names import decode as decode_name
from braid.model.segments import SegmentInfo, physical_name
from braid.scalable.records import (
    RegistrationRecord,
    ScalableTopicMetadata,
    SubscriptionMetadata,
    consumer_path,
    decode,
    from_record,
    namespace_path,
    subscription_path,
    subscriptions_path,
    topic_path,
)

INCARNATION: Final = "braid.incarnation"
"""Property of a segment's log: the topic's incarnation it was made for (INV5)."""


class Listed(msgspec.Struct, frozen=True):
    """A segment as its topic's record shows it."""

    record: ScalableTopicMetadata
    segment: SegmentInfo
    is_present: bool
    """In the layout; else only part of the pending operation."""
    is_pending: bool
    """Named by the pending operation, so that nothing of it may be trimmed (INV7)."""

    @property
    def may_materialise(self) -> bool:
        """Whether a client's attachment may make the segment's log (L-06)."""
        return self.is_present and self.segment.is_active and not self.record.is_deleting


class TopicRecords:
    """Reads the records of scalable topics, always fresh."""

    def __init__(self, store: MetadataStore) -> None:
        self._store = store

    async def read(self, name: TopicName) -> ScalableTopicMetadata | None:
        """The record of the scalable topic that has, or would have, the identity of `name`."""
        key = topic_path(name)
        found = await self._store.get(key, fresh=True)
        return None if found is None else decode(ScalableTopicMetadata, key, found.value)

    async def listed(self, segment: TopicName) -> Listed:
        """What its topic says about a segment; raises TopicNotFound if there is no topic or it does not know the segment."""
        record = await self.read(segment)
        if record is None:
            raise TopicNotFound(f"The topic {segment.scalable} of the segment {segment} does not exist.")
        return find_segment(record, segment)

    async def checked(self, segment: TopicName, epoch: int, incarnation: str) -> Listed:
        """The same for a call made in the name of a leader: refused unless the topic is the one it leads and it is not
        outdated (INV4, INV5). Raises TopicNotFound, StaleLeader."""
        listed = await self.listed(segment)
        if listed.record.incarnation != incarnation:
            raise StaleLeader(f"The topic {segment.scalable} was deleted and made anew; what was asked for was another one.")
        if epoch < listed.record.leader_epoch:
            raise StaleLeader(
                f"The call for {segment} comes from a leader of epoch {epoch}; the topic was claimed by one of epoch "
                f"{listed.record.leader_epoch}."
            )
        return listed

    async def check_leader(self, segment: TopicName, epoch: int, incarnation: str, subscription: str, operation: str) -> None:
        """The same for what is done to a subscription of a segment; if it is part of an `operation`, that must not be over. The
        segment may be a regular topic's partition: that has no layout and no record, so there is nothing to compare with."""
        if segment.domain is Domain.PERSISTENT and await self.read(segment) is None:
            return
        await self.checked(segment, epoch, incarnation)
        if operation:
            record = await self.subscription(segment.scalable, subscription, incarnation)
            if record is None or record.pending is None or record.pending.operation_id != operation:
                raise StaleLeader(f"The call for subscription {subscription} of {segment} comes after its operation has ended.")

    async def check_move(self, segment: TopicName, epoch: int, incarnation: str, subscription: str, operation: str) -> None:
        """The same for what moves or removes its cursor there. Without an operation that may be done only to a cursor that is
        nobody's: a subscription of the topic is one thing over all segments, and its order rests on that (INV8)."""
        await self.check_leader(segment, epoch, incarnation, subscription, operation)
        if operation or (segment.domain is Domain.PERSISTENT and await self.read(segment) is None):
            return
        if await self.subscription(segment.scalable, subscription, incarnation) is not None:
            raise NotAllowed(
                f"The subscription {subscription} is one of {segment.scalable} and is reset or deleted there, not in one "
                f"segment such as {segment}."
            )

    async def subscription(self, topic: TopicName, name: str, incarnation: str = "") -> SubscriptionMetadata | None:
        """The record of a subscription of the scalable topic; one of an earlier topic of the name does not count."""
        key = subscription_path(topic, name)
        found = await self._store.get(key, fresh=True)
        record = None if found is None else decode(SubscriptionMetadata, key, found.value)
        return None if record is None or record.is_foreign(incarnation) else record

    async def registration(self, topic: TopicName, subscription: str, consumer: str) -> RegistrationRecord | None:
        """What the leader has written down of a stream consumer."""
        key = consumer_path(topic, subscription, consumer)
        found = await self._store.get(key, fresh=True)
        return None if found is None else decode(RegistrationRecord, key, found.value)

    async def needing_cursors(self, topic: TopicName, incarnation: str) -> list[str]:
        """The topic's subscriptions that have a cursor on every segment. One that cannot be understood is taken for one."""
        found = []
        async for record in self._store.scan(Span(subscriptions_path(topic)), fresh=True):
            try:
                value = decode(SubscriptionMetadata, record.key, record.value)
            except StoreMismatch:
                value = SubscriptionMetadata()
            is_deleted = value.pending is not None and value.pending.kind == "delete"
            if value.type != "CHECKPOINT" and not is_deleted and not value.is_foreign(incarnation):
                found.append(decode_name(record.name))
        return found

    async def has_any(self, namespace: NamespaceName) -> bool:
        """Whether the namespace has a scalable topic."""
        async for _name in self._store.names(Span(namespace_path(namespace)), fresh=True):
            return True
        return False


def find_segment(record: ScalableTopicMetadata, segment: TopicName) -> Listed:
    """The segment in its topic's record; raises TopicNotFound."""
    topic = segment.scalable
    pending = record.pending_operation
    candidates = list(record.segments.values())
    if segment.descriptor is not None:
        found = record.segments.get(segment.descriptor.segment_id)
        candidates = [] if found is None else [found]
    for each in candidates:
        info = from_record(each)
        if physical_name(topic, info) == segment:
            is_pending = pending is not None and (pending.kind == "delete" or info.segment_id in _named(record))
            return Listed(record, info, True, is_pending)
    if pending is not None:
        for each in (*pending.children, *pending.pruned):
            info = from_record(each)
            if physical_name(topic, info) == segment:
                return Listed(record, info, False, True)
    raise TopicNotFound(f"The topic {topic} has no segment {segment}; read its layout again.")


def _named(record: ScalableTopicMetadata) -> set[int]:
    pending = record.pending_operation
    if pending is None:
        return set()
    return {*pending.parents, *(each.segment_id for each in (*pending.children, *pending.pruned))}
