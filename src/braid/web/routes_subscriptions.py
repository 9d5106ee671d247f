"""REST: the subscriptions of a topic: list, create, delete, skip, reset, expire; of a partitioned topic, on all partitions.

A position is one topic's: on a partitioned topic only the two ends mean something, anything else is 405.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from braid.broker.held_up import passed_over
from braid.broker.service import StillInUse
from braid.broker.subscription import Subscription
from braid.broker.topic import Topic
from braid.errors import AlreadyExists, NotAllowed, SubscriptionNotFound
from braid.model.names import TopicName
from braid.model.positions import EARLIEST, LATEST, Position
from braid.web.admin import Admin
from braid.web.calls import MAX_INT64, Ask, Calls, Query
from braid.web.policies import Properties, checked_properties
from braid.web.routes_clusters import FORCE
from braid.web.routes_topics import TOPIC

SUBSCRIPTION = f"{TOPIC}/subscription/{{subscription}}"
Int64 = Annotated[int, msgspec.Meta(ge=-1, le=MAX_INT64)]
MAX_INT32 = (1 << 31) - 1


class ResetCursorData(msgspec.Struct, frozen=True, rename="camel"):
    """Where a subscription shall stand; without ids, at the end."""

    ledger_id: Int64 = MAX_INT64
    entry_id: Int64 = MAX_INT64
    partition_index: Annotated[int, msgspec.Meta(ge=-1, le=MAX_INT32)] = -1
    excluded: bool = False
    batch_index: Annotated[int, msgspec.Meta(ge=-1, le=1_000_000)] = -1
    properties: Properties | None = None

    @property
    def position(self) -> Position:
        return Position(self.ledger_id, self.entry_id)

    @property
    def is_end(self) -> bool:
        """Whether this is the beginning or the end of any topic."""
        return self.position in (EARLIEST, LATEST)


def find_one(topic: Topic, name: str) -> Subscription:
    """A subscription, which must exist."""
    topic.log.unreadable.check(name)
    found = topic.subscriptions.get(name)
    if found is None:
        raise SubscriptionNotFound(f"The subscription {name} of {topic.name} does not exist.")
    return found


def subscription_calls(admin: Admin) -> Calls:
    """Calls about subscriptions."""
    calls = Calls("subscriptions")
    _creation(admin, calls)
    _life(admin, calls)
    _properties(admin, calls)
    _move(admin, calls)
    _expire(admin, calls)
    return calls


async def _each(admin: Admin, ask: Ask, name: str, work: Any, if_unreadable: Any = None) -> list[Any]:
    """`work` for the subscription on each topic behind the call's name; 404 if it is on none of them. `if_unreadable` is done
    where its record cannot be read; without it that is an error."""

    is_partitioned = bool(await admin.partitions(ask.topic))

    async def one(topic: TopicName) -> Any:
        loaded = await admin.service.topic(topic, create=is_partitioned)
        if if_unreadable is not None and name in passed_over(loaded):
            return await if_unreadable(loaded)
        return await work(find_one(loaded, name))

    if not is_partitioned:
        return await admin.each(ask, one)

    async def tolerant(topic: TopicName) -> Any:
        try:
            return (await one(topic),)
        except SubscriptionNotFound:
            return None

    found = [each for each in await admin.each(ask, tolerant, tolerate=(404,)) if each is not None]
    if not found:
        raise SubscriptionNotFound(f"The subscription {name} of {ask.topic} does not exist.")
    return [each[0] if isinstance(each, tuple) else each for each in found]


def _life(admin: Admin, calls: Calls) -> None:
    service = admin.service

    @calls.get(f"{TOPIC}/subscriptions", list[str], owner=True)
    async def list_subscriptions(ask: Ask) -> Any:
        """Names of a topic's subscriptions."""

        async def names(topic: TopicName) -> list[str]:
            loaded = await service.topic(topic, create=bool(topic.is_partition))
            return [*loaded.subscriptions, *passed_over(loaded)]

        return sorted({name for found in await admin.each(ask, names) for name in found})

    @calls.delete(SUBSCRIPTION, query=(FORCE,), owner=True)
    async def remove(ask: Ask) -> None:
        """Delete a subscription; with `force=true` even if it has consumers. One whose record cannot be read goes too."""
        name, is_forced = ask.subscription, ask.query["force"]

        async def one(found: Subscription) -> None:
            if found.consumers and not is_forced:
                count = len(found.consumers)
                raise StillInUse(
                    f"The subscription {name} of {found.topic.name} has {count} consumers; close them or use force."
                )
            await found.topic.delete_subscription(name)

        await _each(admin, ask, name, one, lambda topic: topic.delete_subscription(name))


def _creation(admin: Admin, calls: Calls) -> None:
    service = admin.service
    replicated = Query("replicated", "Must be false: nothing is replicated in this version", bool, False)

    @calls.put(SUBSCRIPTION, body=ResetCursorData, body_default=ResetCursorData(), query=(replicated,), owner=True)
    async def create(ask: Ask) -> None:
        """Create a subscription at a message, or at the end of the topic if there is no body."""
        name, start = ask.subscription, ask.body
        if ask.query["replicated"]:
            raise NotAllowed("Subscriptions are not replicated by this version of Braid.")
        checked_properties(start.properties or {})
        parts = await admin.partitions(ask.topic)
        if parts and not start.is_end:
            raise _no_position(ask.topic)

        async def one(topic: TopicName) -> bool:
            loaded = await service.topic(topic, create=True)
            being_made = (str(topic), name)
            if name in loaded.subscriptions or being_made in admin.being_made:
                if not parts:
                    raise AlreadyExists(f"The subscription {name} of {topic} already exists.")
                return False
            admin.being_made.add(being_made)
            try:
                await create_at(loaded, name, start)
            finally:
                admin.being_made.discard(being_made)
            return True

        if not parts:
            await admin.each(ask, one, create=True)
            return
        made = await admin.each(ask, one, tolerate=(409,))
        if not any(made):
            raise AlreadyExists(f"The subscription {name} of {ask.topic} already exists.")


def _properties(admin: Admin, calls: Calls) -> None:
    @calls.get(f"{SUBSCRIPTION}/properties", dict[str, str], owner=True)
    async def get_properties(ask: Ask) -> Any:
        """Properties of a subscription; of a partitioned topic's, those of all partitions together."""

        async def one(found: Subscription) -> dict[str, str]:
            return dict(found.cursor.properties)

        merged: dict[str, str] = {}
        for each in await _each(admin, ask, ask.subscription, one):
            merged.update(each)
        return merged

    @calls.put(f"{SUBSCRIPTION}/properties", body=Properties | None, body_default=None, owner=True)
    async def put_properties(ask: Ask) -> None:
        """Replace the properties of a subscription by these."""
        given = checked_properties(ask.body or {})

        async def one(found: Subscription) -> None:
            changes: dict[str, str | None] = dict.fromkeys(found.cursor.properties, None)
            changes.update(given)
            await found.cursor.set_properties(changes)

        await _each(admin, ask, ask.subscription, one)


def _move(admin: Admin, calls: Calls) -> None:
    @calls.post(f"{SUBSCRIPTION}/skip_all", owner=True)
    async def skip_all(ask: Ask) -> None:
        """Acknowledge everything."""

        async def one(found: Subscription) -> None:
            await found.seek(LATEST)

        await _each(admin, ask, ask.subscription, one)

    @calls.post(f"{SUBSCRIPTION}/skip/{{count}}", owner=True)
    async def skip(ask: Ask) -> None:
        """Acknowledge the next entries, as many as told, or all if there are fewer."""
        count, name = ask.number("count", "number of messages", 1, MAX_INT32), ask.subscription
        subscription = find_one(await admin.loaded(ask), name)
        position = subscription.cursor.nth_unacknowledged(count)
        await acknowledge_upto(subscription, subscription.log.last_position if position is None else position)

    @calls.post(f"{SUBSCRIPTION}/resetcursor/{{timestamp}}", owner=True)
    async def reset_to_time(ask: Ask) -> None:
        """Go to the first message stored at a time or later."""
        ms = ask.number("timestamp", "time in milliseconds")

        async def one(found: Subscription) -> None:
            await found.seek(await found.log.find_time(ms))

        await _each(admin, ask, ask.subscription, one)

    @calls.post(f"{SUBSCRIPTION}/resetcursor", body=ResetCursorData, owner=True)
    async def reset_to_position(ask: Ask) -> None:
        """Go to a message, or behind it if it is excluded; on a partitioned topic, to the beginning or the end."""
        await _check_position(admin, ask)

        async def one(found: Subscription) -> None:
            await move(found, ask.body)

        await _each(admin, ask, ask.subscription, one)


def _expire(admin: Admin, calls: Calls) -> None:
    clock = admin.service.runtime.clock

    async def expire(found: Subscription, seconds: int) -> None:
        """Acknowledge what is older."""
        first = await found.log.find_time(max(clock.now_ms() - seconds * 1000, 0))
        await acknowledge_upto(found, found.log.position_before(first))

    @calls.post(f"{SUBSCRIPTION}/expireMessages/{{seconds}}", owner=True)
    async def expire_by_time(ask: Ask) -> None:
        """Acknowledge messages older than so many seconds."""
        seconds = ask.number("seconds", "age in seconds", 0, MAX_INT32)

        async def one(found: Subscription) -> None:
            await expire(found, seconds)

        await _each(admin, ask, ask.subscription, one)

    @calls.post(f"{SUBSCRIPTION}/expireMessages", body=ResetCursorData, owner=True)
    async def expire_by_position(ask: Ask) -> None:
        """Acknowledge messages up to this one, and this one unless it is excluded."""
        await _check_position(admin, ask)

        async def one(found: Subscription) -> None:
            log, position = found.log, min(ask.body.position, found.log.last_position)
            await acknowledge_upto(found, log.position_before(position) if ask.body.excluded else position)

        await _each(admin, ask, ask.subscription, one)

    @calls.post(f"{TOPIC}/all_subscription/expireMessages/{{seconds}}", owner=True)
    async def expire_all(ask: Ask) -> None:
        """Acknowledge messages older than so many seconds, for all subscriptions."""
        seconds = ask.number("seconds", "age in seconds", 0, MAX_INT32)

        async def one(topic: TopicName) -> None:
            loaded = await admin.service.topic(topic, create=bool(topic.is_partition))
            for each in list(loaded.subscriptions.values()):
                await expire(each, seconds)

        await admin.each(ask, one)


async def _check_position(admin: Admin, ask: Ask) -> None:
    if not ask.body.is_end and await admin.partitions(ask.topic):
        raise _no_position(ask.topic)


def _no_position(topic: TopicName) -> NotAllowed:
    return NotAllowed(f"The topic {topic} is partitioned; a position is one partition's. Use the beginning or the end.")


async def acknowledge_upto(subscription: Subscription, position: Position) -> None:
    """Acknowledge everything up to a position, durably; a position already passed changes nothing."""
    cursor = subscription.cursor
    if position > cursor.mark_delete and subscription.log.total_entries:
        subscription.acknowledge_upto(min(position, subscription.log.last_position))
        await cursor.flush()
        subscription.pump()


async def create_at(topic: Topic, name: str, start: ResetCursorData) -> None:
    """A new durable subscription at a position; Latest unless told otherwise."""
    subscription = await topic.subscription(
        name,
        is_durable=True,
        start=None,
        initial=EARLIEST if start.position == EARLIEST else LATEST,
        properties=start.properties or {},
    )
    if not start.is_end:
        await move(subscription, start)


async def move(subscription: Subscription, target: ResetCursorData) -> None:
    """Reset a subscription to a message: to it, after it, or into a batch."""
    log, position = subscription.log, target.position
    mask = None
    if target.batch_index >= 0 and log.map.contains(position):
        entries = await log.read(position, 1, 1)
        first = target.batch_index + target.excluded
        count = entries[0].messages if entries else 0
        if first < count:
            mask = (1 << count) - (1 << first)
        else:
            position = log.position_after(position)
    elif target.excluded and log.map.contains(position):
        position = log.position_after(position)
    await subscription.seek(position, mask)
