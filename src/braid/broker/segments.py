"""Segments as their controllers reach them: `LocalSegments` at the owner, `RoutedSegments` from anywhere.

Owns the owner's side of `SegmentOps`. What only a leader may do (all that changes something) is done after the topic's record
was read fresh and shows that the caller still leads this incarnation of the topic and that the record knows the segment (INV4,
INV5). What a leader concludes from an answer (sealed, drained, which cursors there are) was true of the log at that moment and
not of an outdated copy: after it was looked at, the log's record was read fresh and names this owner (INV2); if it does not,
the copy is dropped and the call is to be made again. Everything can be repeated. Must not decide anything about layouts.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from braid.broker.held_up import held_up_by, passed_over
from braid.broker.ownership import BundleUnloading, OwnedElsewhere
from braid.broker.rates import bytes_out, messages_out
from braid.broker.subscription import Subscription
from braid.broker.topic import Topic
from braid.broker.topic_records import INCARNATION
from braid.errors import BraidError, LedgerFenced, NotAllowed, NotReady, PreconditionFailed, SubscriptionNotFound, TopicNotFound
from braid.metadata.claims import StaleLeader
from braid.model.names import TopicName, is_reserved_subscription
from braid.model.positions import EARLIEST, LATEST
from braid.model.segments import SegmentEnd
from braid.model.subscriptions import cursor_start
from braid.scalable.api import Sealed, SegmentBacklog, SegmentOps, SegmentStats
from braid.scalable.records import Initial, SubscriptionMetadata
from braid.wire.types import SubType

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

    async def create(
        self,
        segment: TopicName,
        *,
        subscriptions: Mapping[str, Initial],
        producers: Mapping[str, int],
        epoch: int,
        incarnation: str,
    ) -> None:
        name = segment.managed_ledger_name
        known = await self._service.logs.properties(name)
        # After the log was looked at: if the topic is still the one that is meant, another one's log is older, never newer.
        listed = await self._records.checked(segment, epoch, incarnation)
        if known is not None and known.get(INCARNATION, "") != incarnation and segment.descriptor is not None:
            log.warning("%s is a leftover of an earlier topic of that name and is made anew", segment)
            await self._remove(segment, known.get(INCARNATION, ""))
            known = None
        if known is None:
            if listed.segment.is_sealed:
                raise TopicNotFound(f"The segment {segment} is sealed and its data is gone; it is not made again.")
            await self._service.logs.create(name, {INCARNATION: incarnation})
        topic = await self._topic(segment, incarnation)
        for subscription, initial in subscriptions.items():
            await self._subscribe(topic, subscription, initial)
        if producers:
            await topic.adopt_producers(producers)
        await topic.log.check_owner()  # of a cursor that was there nothing was written
        if known is None:
            await self._check_still_wanted(segment, epoch, incarnation)

    async def _check_still_wanted(self, segment: TopicName, epoch: int, incarnation: str) -> None:
        """A call that was held up may come after its leader's successor has finished: then what it made is in nobody's way."""
        try:
            await self._records.checked(segment, epoch, incarnation)
        except TopicNotFound:
            await self._remove(segment, incarnation)
            raise
        except StaleLeader:
            # A successor of the same topic may already use the segment, and lists it; another topic's leader would not.
            record = await self._records.read(segment)
            if record is None or record.incarnation != incarnation:
                await self._remove(segment, incarnation)
            raise

    async def terminate(self, segment: TopicName, *, epoch: int, incarnation: str, force: bool = False) -> Sealed:
        """As a step of a pending operation, or again; `force` is an administrator's, who asks for it without one."""
        listed = await self._records.checked(segment, epoch, incarnation)
        if not (listed.is_pending or listed.segment.is_sealed or force):
            raise PreconditionFailed(
                f"{segment} is active and no operation seals it; split or merge it instead. With force it is terminated, and "
                "the topic's leader replaces it later."
            )
        topic = await self._topic(segment, incarnation)
        position = await topic.terminate()
        return Sealed(position, topic.last_sequences())

    async def delete(self, segment: TopicName, *, epoch: int, incarnation: str, force: bool = False) -> None:
        """As a step of a pending operation; `force` is an administrator's, who asks for it without one."""
        known = await self._service.logs.properties(segment.managed_ledger_name)
        listed = await self._records.checked(segment, epoch, incarnation)  # after that, as in `create`
        if not (listed.is_pending or force):
            state = "active" if listed.segment.is_active else "sealed"
            raise PreconditionFailed(
                f"{segment} is {state} and part of its topic's layout; it goes when it was sealed and read and retention is "
                "over, or with its topic. With force its data is deleted now."
            )
        await self._remove(segment, incarnation if known is None else known.get(INCARNATION, ""))

    async def _topic(self, segment: TopicName, incarnation: str) -> Topic:
        """The loaded topic of a segment, which must be that of this incarnation: the caller's check may be some time ago."""
        topic = await self._service.topic(segment, create=False)
        if segment.descriptor is not None and topic.log.properties.get(INCARNATION, "") != incarnation:
            await topic.log.check_owner()  # else the copy is the one that is outdated
            raise StaleLeader(f"The topic of {segment} was deleted and made anew; what was asked for was another one.")
        return topic

    async def _remove(self, segment: TopicName, incarnation: str) -> None:
        """Remove the segment's topic if it is the one made for this incarnation."""
        try:
            await self._service.delete_topic(
                segment, force=True, properties=None if segment.descriptor is None else {INCARNATION: incarnation}
            )
        except TopicNotFound:
            log.debug("%s is gone already", segment)

    # Subscriptions.

    async def subscriptions(self, segment: TopicName) -> list[str]:
        topic = await self._service.topic(segment, create=False)
        durable = {name: each for name, each in topic.subscriptions.items() if each.is_durable}
        if topic.log.is_terminated:
            # Asked at the end of a split or merge: when that is answered, what was acknowledged before outlives a crash.
            for each in list(durable.values()):
                await self._save(each)
        await topic.log.check_owner()
        return sorted(durable.keys() | passed_over(topic).keys())

    async def _save(self, subscription: Subscription) -> None:
        try:
            await subscription.cursor.flush()
        except BraidError as error:
            log.info("the acknowledgments of %s are not saved yet: %s", subscription.name, error)

    async def create_subscription(
        self, segment: TopicName, subscription: str, initial: Initial, *, epoch: int, incarnation: str, operation: str = ""
    ) -> None:
        topic = await self._service.topic(segment, create=False)
        await self._records.check_leader(segment, epoch, incarnation, subscription, operation)
        await self._subscribe(topic, subscription, initial)
        await topic.log.check_owner()

    async def _subscribe(self, topic: Topic, subscription: str, initial: Initial) -> None:
        # The rules for new names are not for these: what is recorded, or has a cursor on a parent, must get one here.
        if is_reserved_subscription(subscription):
            log.warning("%s is the name of no subscription; %s gets no such cursor", subscription, topic.name)
            return
        await topic.subscription(
            subscription, is_durable=True, start=None, initial=EARLIEST if initial == "earliest" else LATEST
        )

    async def delete_subscription(
        self, segment: TopicName, subscription: str, *, epoch: int, incarnation: str, operation: str = ""
    ) -> None:
        async def check() -> None:
            await self._records.check_move(segment, epoch, incarnation, subscription, operation)

        try:
            topic = await self._service.topic(segment, create=False)
        except TopicNotFound:
            log.debug("%s is gone, with its subscription %s", segment, subscription)
            return
        try:
            # Under the topic's lock: who attaches puts the record first, so either it is seen or its cursor is made after this.
            await topic.delete_subscription(subscription, check)
        except TopicNotFound:
            log.debug("the topic of %s is gone, with its subscription %s", segment, subscription)
        except SubscriptionNotFound:
            await topic.log.check_owner()
            log.debug("%s has no subscription %s", segment, subscription)

    async def backlog(self, segment: TopicName, subscription: str) -> SegmentBacklog:
        found = await self._subscription(segment, subscription)
        is_terminated, left = found.log.is_terminated, found.cursor.backlog()
        if is_terminated and left == 0:
            # "Drained" lets others read on in the children, so it must still hold after a crash (INV8).
            await found.cursor.flush()
            left = found.cursor.backlog()
        answer = SegmentBacklog(
            messages=left,
            is_terminated=is_terminated,
            consumers=tuple(each.info.name for each in found.consumers),
            closed=tuple(found.left_by),
        )
        await found.log.check_owner()
        return answer

    async def seek(
        self, segment: TopicName, subscription: str, timestamp_ms: int, *, epoch: int, incarnation: str, operation: str = ""
    ) -> None:
        found = await self._subscription(segment, subscription)
        position = EARLIEST if timestamp_ms <= 0 else await found.log.find_time(timestamp_ms)
        # Last, because loading and searching take time: a call that was held up must not move what a successor has moved on.
        await self._records.check_move(segment, epoch, incarnation, subscription, operation)
        await found.seek(position)

    async def skip_all(
        self, segment: TopicName, subscription: str, *, epoch: int, incarnation: str, operation: str = ""
    ) -> None:
        found = await self._subscription(segment, subscription)
        await self._records.check_move(segment, epoch, incarnation, subscription, operation)
        await found.seek(LATEST)

    async def _subscription(self, segment: TopicName, name: str) -> Subscription:
        topic = await self._service.topic(segment, create=False)
        topic.log.unreadable.check(name)
        found = topic.subscriptions.get(name)
        if found is None or not found.is_durable:
            await topic.log.check_owner()
            raise SubscriptionNotFound(f"The segment {segment} has no subscription {name}.")
        return found

    async def stats(self, segment: TopicName) -> SegmentStats:
        topic = await self._service.topic(segment, create=False)
        key, rate = str(segment), self._service.rates.per_second
        subscriptions = {name: each for name, each in topic.subscriptions.items() if each.is_durable}
        unread = passed_over(topic)
        last = topic.log.terminated_position
        answer = SegmentStats(
            owner=self._service.ownership.broker_id,
            msg_rate_in=rate((key, "in"), topic.messages_in),
            bytes_rate_in=rate((key, "bytes in"), topic.bytes_in),
            msg_rate_out=rate((key, "out"), sum(map(messages_out, topic.subscriptions.values()))),
            bytes_rate_out=rate((key, "bytes out"), sum(map(bytes_out, topic.subscriptions.values()))),
            messages=topic.log.last_index + 1,
            trimmed=(-1 if topic.log.trimmed_index is None else topic.log.trimmed_index) + 1,
            storage_size=topic.log.total_size,
            producers=len(topic.producers),
            # Of one whose cursor cannot be read nobody knows; it needs everything, and there is no other to be made.
            backlog={name: each.cursor.backlog() for name, each in subscriptions.items()}
            | dict.fromkeys(unread, max(topic.log.total_entries, 1)),
            consumers={name: tuple(one.info.name for one in each.consumers) for name, each in subscriptions.items()},
            readers=sum(
                len(each.consumers)
                for each in topic.subscriptions.values()
                if not each.is_durable and each.cursor.read_position <= topic.log.last_position
            ),
            is_terminated=last is not None,
            end=None if last is None else SegmentEnd(topic.log.last_index + 1, *last),
            blocked_by={name: tuple(held) for name, each in subscriptions.items() if (held := held_up_by(topic, each))}
            | {name: (each,) for name, each in unread.items()},
            undecided=topic.transactions.undecided,
            last_append_ms=topic.log.last_append_ms,
            next_trim=topic.log.next_trim(),
        )
        await topic.log.check_owner()
        return answer

    # Transactions.

    async def settle(self, segment: TopicName) -> None:
        """Being loaded settles nearly everything; what is left are ops that came into being behind the owner's back."""
        topic = await self._service.topic(segment, create=False)
        await topic.transactions.relist()
        await topic.relist_acks()


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
            except (OwnedElsewhere, BundleUnloading, LedgerFenced) as error:
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

    async def create_subscription(
        self, segment: TopicName, subscription: str, initial: Initial, *, epoch: int, incarnation: str, operation: str = ""
    ) -> None:
        await self._call(
            segment,
            lambda at: at.create_subscription(
                segment, subscription, initial, epoch=epoch, incarnation=incarnation, operation=operation
            ),
        )

    async def delete_subscription(
        self, segment: TopicName, subscription: str, *, epoch: int, incarnation: str, operation: str = ""
    ) -> None:
        await self._call(
            segment,
            lambda at: at.delete_subscription(segment, subscription, epoch=epoch, incarnation=incarnation, operation=operation),
        )

    async def backlog(self, segment: TopicName, subscription: str) -> SegmentBacklog:
        return await self._call(segment, lambda at: at.backlog(segment, subscription))

    async def seek(
        self, segment: TopicName, subscription: str, timestamp_ms: int, *, epoch: int, incarnation: str, operation: str = ""
    ) -> None:
        await self._call(
            segment,
            lambda at: at.seek(segment, subscription, timestamp_ms, epoch=epoch, incarnation=incarnation, operation=operation),
        )

    async def skip_all(
        self, segment: TopicName, subscription: str, *, epoch: int, incarnation: str, operation: str = ""
    ) -> None:
        await self._call(
            segment, lambda at: at.skip_all(segment, subscription, epoch=epoch, incarnation=incarnation, operation=operation)
        )

    async def stats(self, segment: TopicName) -> SegmentStats:
        return await self._call(segment, lambda at: at.stats(segment))

    async def settle(self, segment: TopicName) -> None:
        await self._call(segment, lambda at: at.settle(segment))


async def subscribe(
    service: BrokerService,
    topic: Topic,
    name: str,
    asked: Initial,
    *,
    may_create: bool,
    properties: dict[str, str] | None = None,
    sub_type: SubType | None = None,
) -> Subscription:
    """The durable subscription of a segment, for a client; made if it has no cursor there yet (L-07).

    The topic's own record of the subscription comes first, so that no split misses it: a consumer's first attachment makes one
    of type QUEUE. A segment that is younger than the subscription is read from its beginning, whatever the consumer asks for.
    Stream consumers attach as Exclusive, where and when their coordinator tells them; whoever shares messages cannot be one of
    them (NotAllowed), and would be given what others may not read yet (INV8). Who deletes a subscription or the topic marks
    the record before cursors and segments go: while it is so marked, nobody attaches (NotReady), and it is looked at again
    after a cursor was made.
    """
    listed = await service.records.listed(topic.name)
    parent = topic.name.parent
    if listed.record.is_deleting:
        raise NotReady(f"The topic {parent} is being deleted; try again.")
    incarnation = listed.record.incarnation
    record = await service.records.subscription(parent, name, incarnation)
    if record is not None:
        _check_kind(parent, name, record, sub_type)
    found = topic.subscriptions.get(name)
    if found is not None and record is not None:
        found.refuse_other_durability(True)
        _check_not_deleted(parent, name, record)
        return found
    if record is None:
        if not may_create:
            raise SubscriptionNotFound(
                f"The subscription {name} of {parent} does not exist and may not be created by a consumer."
            )
        record = await service.scalable.register_queue_subscription(parent, name, asked, besides=topic.name)
        _check_kind(parent, name, record, sub_type)
    _check_not_deleted(parent, name, record)
    begins = cursor_start(record.initial, subscribed_at=record.created_at_epoch, created_at=listed.segment.created_at_epoch)
    initial = EARLIEST if begins == "earliest" else LATEST
    made = await topic.subscription(name, is_durable=True, start=None, initial=initial, properties=properties)
    try:
        _check_not_deleted(parent, name, await service.records.subscription(parent, name, incarnation))
    except NotReady:
        if not made.consumers and topic.subscriptions.get(name) is made:
            await topic.delete_subscription(name)
        raise
    return made


async def check_assigned(service: BrokerService, topic: Topic, name: str, consumer: str, resets: int | None) -> None:
    """A stream consumer reads a segment only while the leader's records give it to it (INV8), and only if it knows of every
    reset (`resets`, if its client counts them), because it would acknowledge anew what was set back. Raises NotReady: it is
    told its segments, and tries again. Other names than those that stream consumers have in segments are not looked at.

    To be asked before the consumer is attached, and again before it gets anything: whoever takes the segment away meanwhile
    has written that down before it looks who is attached.
    """
    descriptor = topic.name.descriptor
    session, separator, number = consumer.rpartition("-seg-")
    if descriptor is None or not separator or number != str(descriptor.segment_id):
        return
    parent, incarnation = topic.name.parent, topic.log.properties.get(INCARNATION, "")
    # In this order: if no reset is found afterwards, none came between the two.
    registration = await service.records.registration(parent, name, session)
    record = await service.records.subscription(parent, name, incarnation)
    if record is None or record.type != "STREAM":
        return
    if record.is_resetting or (resets is not None and resets < record.resets):
        raise NotReady(f"The subscription {name} of {parent} was reset, which {session} is about to be told; try again.")
    is_known = registration is not None and registration.mark in ("", record.mark(incarnation))
    if registration is None or not is_known or descriptor.segment_id not in registration.segments:
        raise NotReady(
            f"Segment {number} of {parent} is not assigned to {session} in {name} at the moment; it will be told when it is."
        )


def _check_kind(topic: TopicName, name: str, record: SubscriptionMetadata, sub_type: SubType | None) -> None:
    is_exclusive = sub_type in (None, SubType.EXCLUSIVE)
    if record.type == "QUEUE" or (record.type == "STREAM" and is_exclusive):
        return
    wanted = "a consumer with a cursor" if is_exclusive else "a QUEUE consumer"
    raise NotAllowed(f"Subscription {name} of {topic} is one of {record.type} consumers; {wanted} needs one of its own.")


def _check_not_deleted(topic: TopicName, name: str, record: SubscriptionMetadata | None) -> None:
    if record is None or (record.pending is not None and record.pending.kind == "delete"):
        raise NotReady(f"The subscription {name} of {topic} is being deleted; try again.")
