"""Segments as their controllers reach them: `LocalSegments` at the owner, `RoutedSegments` from anywhere.

Owns the owner's side of `SegmentOps`. What only a leader may do (create, terminate, delete) is done after the topic's record
was read fresh and shows that the caller still leads this incarnation of the topic and that the record knows the segment (INV4,
INV5). Everything can be repeated. Must not decide anything about layouts.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from braid.broker.ownership import BundleUnloading, OwnedElsewhere
from braid.broker.rates import Rates
from braid.broker.topic import Topic, check_subscription_name
from braid.broker.topic_records import INCARNATION
from braid.errors import NotReady, SubscriptionNotFound, TopicNotFound
from braid.metadata.claims import StaleLeader
from braid.model.names import TopicName
from braid.model.positions import EARLIEST, LATEST
from braid.scalable.api import Sealed, SegmentBacklog, SegmentOps, SegmentStats
from braid.scalable.records import Initial, SubscriptionMetadata

if TYPE_CHECKING:
    from braid.broker.registry import BrokerInfo
    from braid.broker.service import BrokerService
    from braid.broker.subscription import Subscription

log = logging.getLogger(__name__)
T = TypeVar("T")
ATTEMPTS = 10
"""Of one call whose segment changes hands under it."""
RETRY_SECONDS = 0.1


class LocalSegments:
    """What this broker does to the segments it owns; raises OwnedElsewhere for others."""

    def __init__(self, service: BrokerService) -> None:
        self._service = service
        self._records = service.records
        self._rates = Rates(service.runtime.clock)

    async def create(
        self,
        segment: TopicName,
        *,
        subscriptions: Mapping[str, Initial],
        producers: Mapping[str, int],
        epoch: int,
        incarnation: str,
    ) -> None:
        listed = await self._records.checked(segment, epoch, incarnation)
        name = segment.managed_ledger_name
        known = await self._service.logs.properties(name)
        if known is not None and known.get(INCARNATION, "") != incarnation and segment.descriptor is not None:
            log.warning("%s is a leftover of an earlier topic of that name and is made anew", segment)
            await self._remove(segment)
            known = None
        if known is None:
            if listed.segment.is_sealed:
                raise TopicNotFound(f"The segment {segment} is sealed and its data is gone; it is not made again.")
            await self._service.logs.create(name, {INCARNATION: incarnation})
        topic = await self._service.topic(segment, create=False)
        for subscription, initial in subscriptions.items():
            await self._subscribe(topic, subscription, initial)
        if producers:
            await topic.adopt_producers(producers)
        if known is None:
            await self._check_still_wanted(segment, epoch, incarnation)

    async def _check_still_wanted(self, segment: TopicName, epoch: int, incarnation: str) -> None:
        """A call that was held up may come after its leader's successor has finished: then what it made is in nobody's way."""
        try:
            await self._records.checked(segment, epoch, incarnation)
        except TopicNotFound:
            await self._remove(segment)
            raise
        except StaleLeader:
            # A successor of the same topic may already use the segment, and lists it; another topic's leader would not.
            record = await self._records.read(segment)
            if record is None or record.incarnation != incarnation:
                await self._remove(segment)
            raise

    async def terminate(self, segment: TopicName, *, epoch: int, incarnation: str) -> Sealed:
        await self._records.checked(segment, epoch, incarnation)
        topic = await self._service.topic(segment, create=False)
        position = await topic.terminate()
        return Sealed(position, topic.last_sequences())

    async def delete(self, segment: TopicName, *, epoch: int, incarnation: str) -> None:
        await self._records.checked(segment, epoch, incarnation)
        await self._remove(segment)

    async def _remove(self, segment: TopicName) -> None:
        try:
            await self._service.delete_topic(segment, force=True)
        except TopicNotFound:
            log.debug("%s is gone already", segment)

    # Subscriptions.

    async def subscriptions(self, segment: TopicName) -> list[str]:
        topic = await self._service.topic(segment, create=False)
        return sorted(name for name, each in topic.subscriptions.items() if each.is_durable)

    async def create_subscription(self, segment: TopicName, subscription: str, initial: Initial) -> None:
        await self._subscribe(await self._service.topic(segment, create=False), subscription, initial)

    async def _subscribe(self, topic: Topic, subscription: str, initial: Initial) -> None:
        check_subscription_name(subscription)
        await topic.subscription(
            subscription, is_durable=True, start=None, initial=EARLIEST if initial == "earliest" else LATEST
        )

    async def delete_subscription(self, segment: TopicName, subscription: str) -> None:
        try:
            topic = await self._service.topic(segment, create=False)
            await topic.delete_subscription(subscription)
        except (TopicNotFound, SubscriptionNotFound):
            log.debug("%s has no subscription %s", segment, subscription)

    async def backlog(self, segment: TopicName, subscription: str) -> SegmentBacklog:
        found = await self._subscription(segment, subscription)
        is_terminated, left = found.log.is_terminated, found.cursor.backlog()
        if is_terminated and left == 0:
            # "Drained" lets others read on in the children, so it must still hold after a crash (INV8).
            await found.cursor.flush()
            left = found.cursor.backlog()
        return SegmentBacklog(
            messages=left,
            is_terminated=is_terminated,
            consumers=tuple(each.info.name for each in found.consumers),
            closed=tuple(found.left_by),
        )

    async def seek(self, segment: TopicName, subscription: str, timestamp_ms: int) -> None:
        found = await self._subscription(segment, subscription)
        await found.seek(EARLIEST if timestamp_ms <= 0 else await found.log.find_time(timestamp_ms))

    async def skip_all(self, segment: TopicName, subscription: str) -> None:
        await (await self._subscription(segment, subscription)).seek(LATEST)

    async def _subscription(self, segment: TopicName, name: str) -> Subscription:
        topic = await self._service.topic(segment, create=False)
        found = topic.subscriptions.get(name)
        if found is None or not found.is_durable:
            raise SubscriptionNotFound(f"The segment {segment} has no subscription {name}.")
        return found

    async def stats(self, segment: TopicName) -> SegmentStats:
        topic = await self._service.topic(segment, create=False)
        key, rate = str(segment), self._rates.per_second
        subscriptions = {name: each for name, each in topic.subscriptions.items() if each.is_durable}
        messages_out = bytes_out = 0
        for each in topic.subscriptions.values():
            messages_out += each.messages_out + sum(consumer.messages_out for consumer in each.consumers)
            bytes_out += each.bytes_out + sum(consumer.bytes_out for consumer in each.consumers)
        return SegmentStats(
            owner=self._service.ownership.broker_id,
            msg_rate_in=rate((key, "messages in"), topic.messages_in),
            bytes_rate_in=rate((key, "bytes in"), topic.bytes_in),
            msg_rate_out=rate((key, "messages out"), messages_out),
            bytes_rate_out=rate((key, "bytes out"), bytes_out),
            messages=topic.log.last_index + 1,
            storage_size=topic.log.total_size,
            producers=len(topic.producers),
            backlog={name: each.cursor.backlog() for name, each in subscriptions.items()},
            consumers={name: tuple(one.info.name for one in each.consumers) for name, each in subscriptions.items()},
        )


class RoutedSegments:
    """Segments wherever their owners are: done here, or asked of the owner."""

    def __init__(self, service: BrokerService, local: LocalSegments) -> None:
        self._service = service
        self._local = local

    async def _call(self, segment: TopicName, work: Callable[[SegmentOps], Awaitable[T]]) -> T:
        clock = self._service.runtime.clock
        for attempt in range(1, ATTEMPTS + 1):
            try:
                found = await self._service.ownership.find(segment)
                return await work(self._local if found.is_mine else self._remote(found.broker))
            except (OwnedElsewhere, BundleUnloading) as error:
                if attempt == ATTEMPTS:
                    raise NotReady(error.message) from error
            await clock.sleep(RETRY_SECONDS)
        raise AssertionError("unreachable")

    def _remote(self, broker: BrokerInfo) -> SegmentOps:
        if self._service.remote_segments is None:
            raise NotReady(f"The broker {broker.broker_id} owns the segment, and this one has no way to ask it; try again.")
        return self._service.remote_segments(broker)

    async def create(
        self,
        segment: TopicName,
        *,
        subscriptions: Mapping[str, Initial],
        producers: Mapping[str, int],
        epoch: int,
        incarnation: str,
    ) -> None:
        await self._call(
            segment,
            lambda at: at.create(
                segment, subscriptions=subscriptions, producers=producers, epoch=epoch, incarnation=incarnation
            ),
        )

    async def terminate(self, segment: TopicName, *, epoch: int, incarnation: str) -> Sealed:
        return await self._call(segment, lambda at: at.terminate(segment, epoch=epoch, incarnation=incarnation))

    async def delete(self, segment: TopicName, *, epoch: int, incarnation: str) -> None:
        await self._call(segment, lambda at: at.delete(segment, epoch=epoch, incarnation=incarnation))

    async def subscriptions(self, segment: TopicName) -> list[str]:
        return await self._call(segment, lambda at: at.subscriptions(segment))

    async def create_subscription(self, segment: TopicName, subscription: str, initial: Initial) -> None:
        await self._call(segment, lambda at: at.create_subscription(segment, subscription, initial))

    async def delete_subscription(self, segment: TopicName, subscription: str) -> None:
        await self._call(segment, lambda at: at.delete_subscription(segment, subscription))

    async def backlog(self, segment: TopicName, subscription: str) -> SegmentBacklog:
        return await self._call(segment, lambda at: at.backlog(segment, subscription))

    async def seek(self, segment: TopicName, subscription: str, timestamp_ms: int) -> None:
        await self._call(segment, lambda at: at.seek(segment, subscription, timestamp_ms))

    async def skip_all(self, segment: TopicName, subscription: str) -> None:
        await self._call(segment, lambda at: at.skip_all(segment, subscription))

    async def stats(self, segment: TopicName) -> SegmentStats:
        return await self._call(segment, lambda at: at.stats(segment))


async def subscribe(
    service: BrokerService,
    topic: Topic,
    name: str,
    asked: Initial,
    *,
    may_create: bool,
    properties: dict[str, str] | None = None,
) -> Subscription:
    """The durable subscription of a segment, for a client; made if it has no cursor there yet (L-07).

    The topic's own record of the subscription comes first, so that no split misses it: a consumer's first attachment makes one
    of type QUEUE. A segment that is younger than the subscription is read from its beginning, whatever the consumer asks for.
    Who deletes a subscription marks its record before its cursors go, so it is looked at again after a cursor was made.
    """
    found = topic.subscriptions.get(name)
    if found is not None:
        found.refuse_other_durability(True)
        return found
    listed = await service.records.listed(topic.name)
    parent = topic.name.parent
    record = await service.records.subscription(parent, name)
    if record is None:
        if not may_create:
            raise SubscriptionNotFound(
                f"The subscription {name} of {parent} does not exist and may not be created by a consumer."
            )
        record = await service.scalable.register_queue_subscription(parent, name, asked)
    _check_not_deleted(parent, name, record)
    is_younger = listed.segment.created_at_epoch > record.created_at_epoch
    initial = EARLIEST if is_younger or record.initial == "earliest" else LATEST
    made = await topic.subscription(name, is_durable=True, start=None, initial=initial, properties=properties)
    try:
        _check_not_deleted(parent, name, await service.records.subscription(parent, name))
    except NotReady:
        if not made.consumers and topic.subscriptions.get(name) is made:
            await topic.delete_subscription(name)
        raise
    return made


def _check_not_deleted(topic: TopicName, name: str, record: SubscriptionMetadata | None) -> None:
    if record is None or (record.pending is not None and record.pending.kind == "delete"):
        raise NotReady(f"The subscription {name} of {topic} is being deleted; try again.")
