"""`TopicRecords`: what any broker does with the records of scalable topics, without leading one.

Owns how a topic's record comes into being (its name checked and free, its index entries, a pending create for the leader), how
topics are listed, and the topic-level record of a queue subscription. Changes no existing topic: that is its leader's.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Final

import msgspec

from braid.errors import (
    AlreadyExists,
    InvalidArgument,
    InvalidTopicName,
    NotReady,
    OutcomeUnknown,
    StoreMismatch,
    SubscriptionLimit,
    TopicNotFound,
    VersionConflict,
)
from braid.metadata.api import ABSENT, IndexSpan, MetadataStore, Record, Span
from braid.model.layout import SegmentLayout
from braid.model.names import Domain, NamespaceName, TopicName, check_new_topic, check_subscription_name
from braid.model.routing import Routing
from braid.runtime.env import Runtime
from braid.runtime.plans import step
from braid.scalable.config import ScalableConfig
from braid.scalable.records import (
    ALL_TOPICS,
    Initial,
    PendingOperation,
    ScalableTopicMetadata,
    SubscriptionMetadata,
    decode,
    index_of,
    namespace_path,
    property_index,
    property_key,
    subscription_path,
    subscriptions_path,
    topic_of,
    topic_path,
)

MAX_PROPERTIES: Final = 64
MAX_PROPERTY_LENGTH: Final = 256
"""Characters of a property's name and of its value."""


class TopicRecords:
    """The records of scalable topics as one broker sees them."""

    def __init__(
        self,
        runtime: Runtime,
        store: MetadataStore,
        config: ScalableConfig,
        partitions: Callable[[TopicName], Awaitable[int | None]],
    ) -> None:
        self._runtime = runtime
        self._store = store
        self._config = config
        self._partitions = partitions

    # Topics.

    async def put_new(
        self,
        topic: TopicName,
        segments: int,
        *,
        properties: Mapping[str, str] | None = None,
        routing: Routing | None = None,
    ) -> ScalableTopicMetadata:
        """Put the record of a new topic, for its leader to go on with. Raises AlreadyExists, also if a regular topic has the
        name, InvalidArgument, InvalidTopicName."""
        if not self._config.enabled:
            raise InvalidArgument("Scalable topics are switched off ([scalable_topics] enabled = false).")
        if topic.domain is not Domain.TOPIC:
            raise InvalidArgument(f"{topic} is no name of a scalable topic; use topic://{topic.namespace}/...")
        check_new_topic(topic)
        if topic.is_partition:
            raise InvalidTopicName(
                f"{topic} ends like the name of a partition, which a scalable topic has not; use another name."
            )
        wanted = dict(properties or {})
        _check_properties(wanted)
        routing = Routing(self._config.default_routing) if routing is None else routing
        if routing is Routing.MOD_N:
            raise InvalidArgument(f"A scalable topic cannot be routed by {routing.value}; use high16 or low16.")
        limit = self._config.max_segments_per_topic
        if not 1 <= segments <= limit:
            raise InvalidArgument(
                f"{topic} cannot begin with {segments} segments; 1 to {limit} are allowed "
                "(scalable_topics.max_segments_per_topic)."
            )
        await self._check_name_is_free(topic)
        now = self._runtime.clock.now_ms()
        metadata = ScalableTopicMetadata(
            epoch=0,
            next_segment_id=0,
            segments={},
            properties=wanted,
            incarnation=self._runtime.token(128),
            routing=routing,
            pending_operation=PendingOperation(kind="create", operation_id=self._runtime.token(), started_ms=now),
            created_ms=now,
        ).with_layout(SegmentLayout.initial(segments, now, routing))
        async with step("create:intend"):
            await self._put(topic, metadata)
        return metadata

    async def read(self, topic: TopicName, *, fresh: bool = True) -> ScalableTopicMetadata | None:
        """The topic's record, if there is one."""
        key = topic_path(topic)
        record = await self._store.get(key, fresh=fresh)
        return None if record is None else decode(ScalableTopicMetadata, key, record.value)

    async def living(self, topic: TopicName) -> ScalableTopicMetadata:
        """The record of a topic that is neither being made nor being deleted."""
        found = await self.metadata(topic)
        if found.is_deleting:
            raise TopicNotFound(f"{topic} is being deleted; it can be made again when that is done.")
        if found.pending_operation is not None and found.pending_operation.kind == "create":
            raise NotReady(f"{topic} is being made; try again.")
        return found

    async def metadata(self, topic: TopicName, *, fresh: bool = True) -> ScalableTopicMetadata:
        """The topic's record. Raises TopicNotFound."""
        found = await self.read(topic.scalable, fresh=fresh)
        if found is None:
            raise TopicNotFound(f"The scalable topic {topic.scalable} does not exist.")
        return found

    async def topics(
        self, namespace: NamespaceName, properties: Mapping[str, str] | None = None, *, living: bool = False
    ) -> list[str]:
        """Names of the namespace's scalable topics, in order; with properties those that have all of them, with `living` those
        that are not being deleted."""
        wanted = dict(properties or {})
        span: Span | IndexSpan = Span(namespace_path(namespace))
        if wanted:
            name, value = min(wanted.items())
            _check_properties(wanted)
            span = IndexSpan.exactly(property_index(name), property_key(namespace, value))
        return sorted([str(topic_of(record.key)) async for record in self._scan(span) if _is_meant(record, wanted, living)])

    async def topics_to_lead(self) -> AsyncIterator[TopicName]:
        """Every scalable topic of the cluster that is not at rest."""
        async for record in self._scan(IndexSpan(ALL_TOPICS)):
            try:
                is_at_rest = decode(ScalableTopicMetadata, record.key, record.value).is_at_rest
            except StoreMismatch:
                is_at_rest = False  # whoever tries to lead it says what is wrong
            if not is_at_rest:
                yield topic_of(record.key)

    async def _put(self, topic: TopicName, metadata: ScalableTopicMetadata) -> None:
        key, value = topic_path(topic), msgspec.json.encode(metadata)
        try:
            record = await self._store.put(key, value, expected=ABSENT, index=index_of(topic.namespace, metadata.properties))
        except (VersionConflict, OutcomeUnknown) as error:
            found = await self._store.get(key, fresh=True)
            if found is None:
                raise NotReady(f"Whether {topic} was made is not known; try again.") from error
            existing = decode(ScalableTopicMetadata, key, found.value)
            if existing.incarnation != metadata.incarnation:
                is_going = existing.is_deleting
                reason = "is being deleted; it can be made again when that is done" if is_going else "already exists"
                raise AlreadyExists(f"The scalable topic {topic} {reason}.") from error
            record = found
        try:
            await self._check_name_is_free(topic)  # again: who makes the regular topic looks for our record after making it
        except AlreadyExists:
            with suppress(VersionConflict):  # a leader has it already: both exist, and one must be deleted by hand
                await self._store.delete(key, expected=record.version)
            raise

    async def _check_name_is_free(self, topic: TopicName) -> None:
        """A regular topic and a scalable one cannot share a name."""
        if "/" in topic.local_name:
            return  # no regular topic can have it
        regular = TopicName.parse(f"persistent://{topic.namespace}/{topic.local_name}")
        if await self._partitions(regular) is not None:
            raise AlreadyExists(f"The regular topic {regular} has this name; a scalable topic needs another one.")

    def _scan(self, span: Span | IndexSpan) -> AsyncIterator[Record]:
        return self._store.scan(span, fresh=True)

    # Subscriptions.

    async def register_queue_subscription(
        self, topic: TopicName, subscription: str, initial: Initial
    ) -> tuple[SubscriptionMetadata, ScalableTopicMetadata | None]:
        """Make the topic-level record of a subscription that a queue consumer attaches to, or return the one there is (L-07);
        with the topic's record as it was after a new one was put. Raises TopicNotFound, NotReady while the topic is made."""
        topic = topic.scalable
        check_subscription_name(subscription)
        key = subscription_path(topic, subscription)
        before = await self.living(topic)
        existing = await self._store.get(key, fresh=True)
        if existing is not None:
            known = decode(SubscriptionMetadata, key, existing.value)
            if not known.is_foreign(before.incarnation):
                return _usable(subscription, known), None
            with suppress(VersionConflict):  # left behind by an earlier topic of the name, and removed by somebody else
                await self._store.delete(key, expected=existing.version)
        limit = self._config.max_subscriptions_per_topic
        if len([name async for name in self._store.names(Span(subscriptions_path(topic)))]) >= limit:
            raise SubscriptionLimit(
                f"{topic} has {limit} subscriptions, the limit scalable_topics.max_subscriptions_per_topic; delete one."
            )
        record = SubscriptionMetadata(
            type="QUEUE",
            initial=initial,
            created_at_epoch=before.epoch,
            created_ms=self._runtime.clock.now_ms(),
            incarnation=before.incarnation,
        )
        try:
            version = (await self._store.put(key, msgspec.json.encode(record), expected=ABSENT)).version
        except (VersionConflict, OutcomeUnknown):
            found = await self._store.get(key, fresh=True)
            if found is None:
                raise NotReady(f"Subscription {subscription} of {topic} could not be registered; try again.") from None
            record = _usable(subscription, decode(SubscriptionMetadata, key, found.value))
            version = found.version
        # A deletion lists these records after it has said so in the topic's record: if it missed ours, we see that here.
        try:
            after = await self.living(topic)
            if after.incarnation != before.incarnation:
                raise TopicNotFound(f"{topic} was deleted and made anew meanwhile.")
        except TopicNotFound:
            if not record.is_foreign(before.incarnation):
                with suppress(VersionConflict):  # the deletion did see it
                    await self._store.delete(key, expected=version)
            raise
        return record, after


def _is_meant(record: Record, properties: Mapping[str, str], living: bool) -> bool:
    if properties and not properties.items() <= decode(ScalableTopicMetadata, record.key, record.value).properties.items():
        return False
    # Few are being deleted; the others are not decoded for that.
    return not (living and b'"delete"' in record.value and decode(ScalableTopicMetadata, record.key, record.value).is_deleting)


def _usable(subscription: str, record: SubscriptionMetadata) -> SubscriptionMetadata:
    if record.pending is not None and record.pending.kind == "delete":
        raise NotReady(f"Subscription {subscription} is being deleted; try again.")
    return record


def _check_properties(properties: Mapping[str, str]) -> None:
    if len(properties) > MAX_PROPERTIES:
        raise InvalidArgument(f"A topic may have {MAX_PROPERTIES} properties, not {len(properties)}.")
    for name, value in properties.items():
        if not name or max(len(name), len(value)) > MAX_PROPERTY_LENGTH:
            raise InvalidArgument(
                f"The property {name[:40]!r} cannot be kept: a name needs a character, and neither it nor its value may have "
                f"more than {MAX_PROPERTY_LENGTH}."
            )
