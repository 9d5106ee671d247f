"""REST: the subscriptions of a topic: list, create, delete, skip, reset; on a partitioned topic, those of all partitions."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from litestar import delete, get, post, put

from braid.broker.service import StillInUse
from braid.broker.subscription import Subscription
from braid.broker.topic import RESERVED_SUBSCRIPTIONS, Topic
from braid.errors import AlreadyExists, InvalidArgument, SubscriptionNotFound
from braid.model.names import TopicName, decode
from braid.model.positions import EARLIEST, LATEST, Position
from braid.web.admin import MAX_INT64, Admin, Part, Req, body_of, flag, number_of, topic_of
from braid.web.routes_topics import TOPIC

SUBSCRIPTION = f"{TOPIC}/subscription/{{subscription:str}}"
Int64 = Annotated[int, msgspec.Meta(ge=-1, le=MAX_INT64)]


class ResetCursorData(msgspec.Struct, frozen=True, rename="camel"):
    """Where a subscription shall stand."""

    ledger_id: Int64 = MAX_INT64
    entry_id: Int64 = MAX_INT64
    partition_index: int = -1
    excluded: bool = False
    batch_index: Annotated[int, msgspec.Meta(ge=-1, le=1_000_000)] = -1
    properties: dict[str, str] | None = None

    @property
    def position(self) -> Position:
        return Position(self.ledger_id, self.entry_id)


async def find(admin: Admin, name: TopicName, subscription: str) -> list[Subscription]:
    """The subscription on each topic behind the name; at least one."""
    found = [topic.subscriptions.get(subscription) for topic in await admin.targets(name)]
    present = [each for each in found if each is not None]
    if not present:
        raise SubscriptionNotFound(f"The subscription {subscription} of {name} does not exist.")
    return present


def subscription_routes(admin: Admin) -> list[Any]:
    """List, create, delete."""

    @get(f"{TOPIC}/subscriptions")
    async def list_subscriptions(tenant: Part, namespace: Part, topic: Part) -> list[str]:
        """Names of a topic's subscriptions."""
        topics = await admin.targets(topic_of(tenant, namespace, topic))
        return sorted({name for each in topics for name in each.subscriptions})

    @put(SUBSCRIPTION, status_code=204)
    async def create(tenant: Part, namespace: Part, topic: Part, subscription: Part, request: Req) -> None:
        """Create a subscription. Body: a message id, or nothing for the end of the topic."""
        name, subscription = topic_of(tenant, namespace, topic), name_of(subscription)
        start = await body_of(request, ResetCursorData, ResetCursorData())
        topics = await admin.targets(name, create=True)
        if all(subscription in each.subscriptions for each in topics):
            raise AlreadyExists(f"The subscription {subscription} of {name} already exists.")
        for each in topics:
            if subscription not in each.subscriptions:
                await create_at(each, subscription, start)

    @delete(SUBSCRIPTION)
    async def remove(tenant: Part, namespace: Part, topic: Part, subscription: Part, request: Req) -> None:
        """Delete a subscription; with `force=true` even if it has consumers."""
        name, subscription = topic_of(tenant, namespace, topic), decode(subscription)
        found = await find(admin, name, subscription)
        attached = sum(len(each.consumers) for each in found)
        if attached and not flag(request, "force"):
            raise StillInUse(f"The subscription {subscription} of {name} has {attached} consumers; close them or use force.")
        for each in found:
            await each.topic.delete_subscription(subscription)

    return [list_subscriptions, create, remove]


def move_routes(admin: Admin) -> list[Any]:
    """Change where a subscription stands."""

    @post(f"{SUBSCRIPTION}/skip_all", status_code=204)
    async def skip_all(tenant: Part, namespace: Part, topic: Part, subscription: Part) -> None:
        """Acknowledge everything."""
        for each in await find(admin, topic_of(tenant, namespace, topic), decode(subscription)):
            await each.seek(LATEST)

    @post(f"{SUBSCRIPTION}/resetcursor/{{timestamp:str}}", status_code=204)
    async def reset_to_time(tenant: Part, namespace: Part, topic: Part, subscription: Part, timestamp: Part) -> None:
        """Go to a time in milliseconds since 1970."""
        ms = number_of(timestamp, "time in milliseconds")
        for each in await find(admin, topic_of(tenant, namespace, topic), decode(subscription)):
            await each.seek(await each.log.find_time(ms))

    @post(f"{SUBSCRIPTION}/resetcursor", status_code=204)
    async def reset_to_position(tenant: Part, namespace: Part, topic: Part, subscription: Part, request: Req) -> None:
        """Go to a message. Body: `ledgerId`, `entryId`, `excluded`, `batchIndex`."""
        target = await body_of(request, ResetCursorData)
        for each in await find(admin, topic_of(tenant, namespace, topic), decode(subscription)):
            await move(each, target)

    return [skip_all, reset_to_time, reset_to_position]


def name_of(text: str) -> str:
    """A subscription name that may be created."""
    name = decode(text)
    if not name.strip() or name in RESERVED_SUBSCRIPTIONS:
        raise InvalidArgument(f"{name!r} cannot be the name of a subscription; choose another one.")
    return name


async def create_at(topic: Topic, name: str, start: ResetCursorData) -> None:
    """A new durable subscription at a position; Latest unless told otherwise."""
    subscription = await topic.subscription(
        name,
        is_durable=True,
        start=None,
        initial=EARLIEST if start.position == EARLIEST else LATEST,
        properties=start.properties or {},
    )
    if start.position not in (EARLIEST, LATEST):
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
