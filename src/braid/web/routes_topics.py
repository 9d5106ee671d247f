"""REST: persistent topics themselves: list, create, grow, delete, end, unload, properties, room."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from braid.broker.service import StillInUse
from braid.broker.topic import Topic
from braid.errors import Conflict, InvalidArgument, NotAllowed, TopicNotFound
from braid.model.bundles import Bundle, hash_of
from braid.model.names import TopicName
from braid.model.positions import LATEST, Position
from braid.web.admin import Admin
from braid.web.calls import MAX_INT64, Ask, Calls, Query
from braid.web.owners import Owners
from braid.web.policies import Int32, Properties, checked_properties
from braid.web.routes_clusters import FORCE
from braid.web.stats import topic_stats

Json = dict[str, Any]
LIST = "/persistent/{tenant}/{namespace}"
TOPIC = LIST + "/{topic}"


class PartitionedTopicMetadata(msgspec.Struct, frozen=True):
    """The long form of a number of partitions."""

    partitions: Int32
    deleted: bool = False
    properties: Properties | None = None


class MessageId(msgspec.Struct, frozen=True, rename="camel"):
    """Id of a message."""

    ledger_id: Annotated[int, msgspec.Meta(ge=-1, le=MAX_INT64)]
    entry_id: Annotated[int, msgspec.Meta(ge=-1, le=MAX_INT64)]
    partition_index: int = -1


def message_id(position: Position, partition: int) -> MessageId:
    return MessageId(position.ledger_id, position.entry_id, partition)


def topic_calls(admin: Admin) -> Calls:
    """Calls about topics as a whole."""
    calls = Calls("topics")
    _listing(admin, calls)
    _partitions(admin, calls)
    _deletion(admin, calls)
    _life(admin, calls)
    _room(admin, calls)
    _properties(admin, calls)
    return calls


def _listing(admin: Admin, calls: Calls) -> None:
    service = admin.service
    system = Query("includeSystemTopic", "There are none", bool, False)

    @calls.get(LIST, list[str], query=(Query("bundle", "Only topics of this bundle"), system))
    async def list_topics(ask: Ask) -> Any:
        """Topics of a namespace, partitions one by one."""
        name = ask.namespace
        found = await service.list_topics(name)
        if (text := ask.query["bundle"]) is None:
            return found
        bundle = Bundle.parse(text)
        if bundle not in await admin.ownership.bundles(name):
            raise InvalidArgument(f"The namespace {name} has no bundle {bundle}.")
        return [each for each in found if bundle.contains(hash_of(TopicName.parse(each)))]

    # Known to the router as any topic's path: a topic of the name `partitioned` shall stay reachable below it.
    @calls.get(f"{LIST}/partitioned", list[str], query=(system,), route=TOPIC)
    async def list_partitioned(ask: Ask) -> Any:
        """Partitioned topics of a namespace."""
        name = ask.namespace
        if ask.text("topic") != "partitioned":
            raise NotAllowed("There is nothing to get at the name of a topic itself; ask for its stats.")
        await service.namespaces.policies(name)
        return await service.namespaces.partitioned_topics(name)

    async def no_topics(ask: Ask) -> Any:
        """There are no non-persistent topics in this version: an empty list."""
        await service.namespaces.policies(ask.namespace)
        return []

    for path in ("", "/partitioned"):
        calls.get(f"/non-persistent/{{tenant}}/{{namespace}}{path}", list[str], query=(system,))(no_topics)

    @calls.put(TOPIC, body=Properties | None, body_default=None)
    async def create_topic(ask: Ask) -> None:
        """Create a plain topic, with properties if any are given."""
        name = ask.topic
        service.check_creatable(name)
        await service.namespaces.policies(name.namespace)
        await _check_partition(admin, name)
        await service.create_topic(name, checked_properties(ask.body or {}))

    @calls.delete(TOPIC, query=(FORCE,), owner=True)
    async def delete_topic(ask: Ask) -> None:
        """Delete a plain topic or one partition; with `force=true` even if it is in use."""
        name = ask.topic
        if await admin.partitions(name):
            raise Conflict(f"The topic {name} is partitioned; delete it with DELETE .../partitions.")
        await admin.check_exists(name)
        await service.delete_topic(name, force=ask.query["force"])


async def _check_not_plain(admin: Admin, name: TopicName) -> None:
    if not await admin.partitions(name) and await admin.service.logs.exists(name.managed_ledger_name):
        raise Conflict(f"The topic {name} is not partitioned; use the calls for plain topics, without /partitions.")


async def _check_partition(admin: Admin, name: TopicName) -> None:
    """A name that looks like a partition's is taken for one: its topic must have so many."""
    if name.is_partition:
        record = await admin.service.namespaces.partitions(name.base)
        if record is None or name.partition_index >= record.partitions:
            raise InvalidArgument(f"{name} is the name of a partition, but {name.base} has no such partition; choose another.")


def _partitions(admin: Admin, calls: Calls) -> None:
    service = admin.service
    wanted = int | PartitionedTopicMetadata

    def given(ask: Ask) -> PartitionedTopicMetadata:
        body = ask.body
        return body if isinstance(body, PartitionedTopicMetadata) else PartitionedTopicMetadata(body)

    local = Query("createLocalTopicOnly", "There is one cluster only", bool, False)

    @calls.put(f"{TOPIC}/partitions", body=wanted, query=(local,), statuses=(406,))
    async def create_partitioned(ask: Ask) -> None:
        """Create a partitioned topic. The body is the number of partitions, or an object with it and properties."""
        name, body = ask.topic, given(ask)
        if name.is_partition:
            raise InvalidArgument(f"{name} is the name of a partition; choose a name without -partition-N.")
        await service.create_partitioned(name, body.partitions, checked_properties(body.properties or {}))

    grow = (
        Query("updateLocalTopicOnly", "There is one cluster only", bool, False),
        Query("force", "Has no effect: nothing has to be forced", bool, False),
    )

    @calls.post(f"{TOPIC}/partitions", body=wanted, query=grow, statuses=(406, 422))
    async def grow_partitioned(ask: Ask) -> None:
        """Add partitions. The body is the new number of partitions; as many as there are is no change."""
        name, partitions = ask.topic, given(ask).partitions
        await _check_not_plain(admin, name)
        if len(await admin.partitions(name)) != partitions or partitions < 1:
            await service.grow_partitioned(name, partitions)

    @calls.post(f"{TOPIC}/createMissedPartitions")
    async def create_missed(ask: Ask) -> None:
        """Create the partitions of a partitioned topic that are not there."""
        name = ask.topic
        await admin.check_exists(name)
        parts = await admin.partitions(name)
        if not parts:
            raise TopicNotFound(f"The topic {name} is not partitioned.")
        for part in parts:
            await service.logs.create(part.managed_ledger_name)

    may_create = Query("checkAllowAutoCreation", "For a missing topic: what it would be if it were used now", bool, False)

    @calls.get(f"{TOPIC}/partitions", PartitionedTopicMetadata, query=(may_create,))
    async def get_partitions(ask: Ask) -> Any:
        """Number of partitions; 0 for a plain topic."""
        name = ask.topic
        if (coordinators := service.transactions.partition_count(name)) is not None:
            return {"partitions": coordinators, "deleted": False}
        try:
            count = await service.partition_count(name, allow_create=ask.query["checkAllowAutoCreation"])
        except TopicNotFound as error:
            raise await admin.not_found(name, error.message) from None
        return {"partitions": count, "deleted": False}


def _deletion(admin: Admin, calls: Calls) -> None:
    service = admin.service

    @calls.delete(f"{TOPIC}/partitions", query=(FORCE,))
    async def delete_partitioned(ask: Ask) -> None:
        """Delete a partitioned topic with all partitions; with `force=true` even if it is in use."""
        name = ask.topic
        await _check_not_plain(admin, name)
        parts = await admin.partitions(name)
        if not parts:
            raise await admin.not_found(name, f"The partitioned topic {name} does not exist.")
        owners = Owners(ask)
        if not ask.query["force"]:
            await check_unused(owners, name, parts)

        async def delete(partition: TopicName) -> None:
            try:
                await service.delete_topic(partition, force=True)
            except TopicNotFound:
                return  # never used, or gone already

        await service.namespaces.begin_partitioned_deletion(name)
        await owners.each(parts, delete, path=topic_path, query={"force": "true"}, tolerate=(404,))
        await service.namespaces.delete_partitioned(name)

    async def check_unused(owners: Owners, name: TopicName, parts: list[TopicName]) -> None:
        async def attached(partition: TopicName) -> Json | None:
            topic = service.topics.get(str(partition))
            return None if topic is None else topic_stats(admin, topic)

        found = await owners.each(parts, attached, path=lambda each: f"{topic_path(each)}/stats", method="GET", tolerate=(404,))
        for stats in filter(None, found):
            if stats["publishers"] or any(sub["consumers"] for sub in stats["subscriptions"].values()):
                raise StillInUse(f"The topic {name} has producers or consumers; close them or use force.")


def _life(admin: Admin, calls: Calls) -> None:
    service = admin.service

    @calls.post(f"{TOPIC}/terminate", MessageId, status=200, owner=True)
    async def terminate(ask: Ask) -> Any:
        """End a topic: it takes no more messages. Answers the id of the last one."""
        topic = await admin.loaded(ask)
        return message_id(await topic.terminate(), topic.name.partition_index)

    @calls.post(f"{TOPIC}/terminate/partitions", dict[str, MessageId], status=200)
    async def terminate_partitions(ask: Ask) -> Any:
        """End all partitions of a topic. Answers the id of the last message of each, by the number of the partition."""
        name = ask.topic
        await admin.check_exists(name)
        parts = await admin.partitions(name)
        if not parts:
            raise NotAllowed(f"The topic {name} is not partitioned; end it with POST .../terminate.")

        async def end(partition: TopicName) -> Any:
            topic = await service.topic(partition, create=True)
            return message_id(await topic.terminate(), partition.partition_index)

        found = await Owners(ask).each(parts, end, path=lambda each: f"{topic_path(each)}/terminate")
        return {str(number): each for number, each in enumerate(found)}

    @calls.put(f"{TOPIC}/unload", owner=True)
    async def unload(ask: Ask) -> None:
        """Close a topic, or all its partitions, so that clients look it up again."""

        async def close(name: TopicName) -> None:
            if (found := service.topics.get(str(name))) is not None:
                await service.unload(found)

        await admin.each(ask, close)


def _room(admin: Admin, calls: Calls) -> None:
    service = admin.service

    @calls.post(f"{TOPIC}/trim", owner=True)
    async def trim(ask: Ask) -> None:
        """Delete what no subscription needs and retention no longer keeps, now rather than later."""

        async def work(name: TopicName) -> None:
            topic = await service.topic(name, create=False)
            topic.log.roll_if_needed()
            await topic.log.trim()

        await admin.each(ask, work)

    @calls.delete(f"{TOPIC}/truncate", owner=True)
    async def truncate(ask: Ask) -> None:
        """Acknowledge everything for all subscriptions and delete it, except what a policy keeps and the newest ledger."""

        async def work(name: TopicName) -> None:
            topic = await service.topic(name, create=False)
            for subscription in list(topic.subscriptions.values()):
                await subscription.seek(LATEST)
            await topic.log.trim(keeps_unread=False)

        await admin.each(ask, work)

    @calls.get(f"{TOPIC}/compaction", Json)
    async def compaction(ask: Ask) -> Any:
        """State of the compaction of a topic: it has never run, as topics are not compacted in this version."""
        await admin.check_exists(ask.topic)
        return {"status": "NOT_RUN", "lastError": ""}

    @calls.put(f"{TOPIC}/compaction", statuses=(405,))
    async def compact(ask: Ask) -> None:
        """Refused with 405: topics are not compacted in this version."""
        await admin.check_exists(ask.topic)
        raise NotAllowed(f"Topics are not compacted by this version of Braid; {ask.topic} stays as it is.")


def _properties(admin: Admin, calls: Calls) -> None:
    service = admin.service
    path = f"{TOPIC}/properties"

    @calls.get(path, dict[str, str], owner=True)
    async def get_properties(ask: Ask) -> Any:
        """Properties of a topic, as they were given at its creation or set later."""
        name = ask.topic
        if await admin.partitions(name):
            record = await service.namespaces.partitions(name)
            return {} if record is None else record.properties
        return dict((await admin.loaded(ask)).log.properties)

    async def change(ask: Ask, changes: dict[str, str | None]) -> None:
        name = ask.topic
        if await admin.partitions(name):

            def alter(properties: dict[str, str]) -> None:
                for key, value in changes.items():
                    if value is None:
                        properties.pop(key, None)
                    else:
                        properties[key] = value
                checked_properties(properties)

            await service.namespaces.set_partitioned_properties(name, alter)
            return
        topic: Topic = await admin.loaded(ask)
        checked_properties({**topic.log.properties, **{key: value for key, value in changes.items() if value is not None}})
        await topic.log.set_properties(changes)

    @calls.put(path, body=Properties, owner=True)
    async def put_properties(ask: Ask) -> None:
        """Set these properties of a topic; others stay."""
        await change(ask, dict(checked_properties(ask.body)))

    @calls.delete(path, query=(Query("key", "Name of the property"),), owner=True)
    async def delete_property(ask: Ask) -> None:
        """Remove one property of a topic."""
        if ask.query["key"] is None:
            raise InvalidArgument("Which property to remove is told by the query parameter key.")
        await change(ask, {ask.query["key"]: None})


def topic_path(name: TopicName) -> str:
    """The path of a topic below `/admin/v2`."""
    return f"/persistent/{name.namespace}/{name.encoded_local_name}"
