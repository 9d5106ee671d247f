"""REST: persistent topics: list, create, grow, delete, stats, terminate, unload, and single messages."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import delete, get, post, put
from litestar.enums import MediaType
from litestar.response import Response

from braid.errors import Conflict, InvalidArgument, TopicNotFound
from braid.model.positions import Position
from braid.web.admin import Admin, Part, Req, body_of, flag, namespace_of, number_of, topic_of
from braid.web.messages import message_response
from braid.web.stats import partitioned_stats, topic_stats

Json = dict[str, Any]
LIST = "/persistent/{tenant:str}/{namespace:str}"
TOPIC = LIST + "/{topic:str}"
MAX_MESSAGE_BYTES = 256 << 20


class PartitionedTopicMetadata(msgspec.Struct, frozen=True):
    """The long form of a number of partitions."""

    partitions: int
    properties: dict[str, str] | None = None


def listing_routes(admin: Admin) -> list[Any]:
    """What topics there are, and making and removing them."""
    service = admin.service

    @get(LIST)
    async def list_topics(tenant: Part, namespace: Part) -> list[str]:
        """Topics of a namespace, partitions one by one."""
        return await service.list_topics(namespace_of(tenant, namespace))

    @get(f"{LIST}/partitioned")
    async def list_partitioned(tenant: Part, namespace: Part) -> list[str]:
        """Partitioned topics of a namespace."""
        name = namespace_of(tenant, namespace)
        await service.namespaces.policies(name)
        return await service.namespaces.partitioned_topics(name)

    @put(TOPIC, status_code=204)
    async def create_topic(tenant: Part, namespace: Part, topic: Part, request: Req) -> None:
        """Create a plain topic. Body: properties, or nothing."""
        properties = await body_of(request, dict[str, str] | None, {}) or {}  # type: ignore[arg-type]
        await service.create_topic(topic_of(tenant, namespace, topic), properties)

    @delete(TOPIC)
    async def delete_topic(tenant: Part, namespace: Part, topic: Part, request: Req) -> None:
        """Delete a plain topic or one partition; with `force=true` even if it is in use."""
        name = topic_of(tenant, namespace, topic)
        if await admin.partitions(name):
            raise Conflict(f"The topic {name} is partitioned; delete it with DELETE .../partitions.")
        await service.delete_topic(name, force=flag(request, "force"))

    async def wanted(request: Req) -> PartitionedTopicMetadata:
        found = await body_of(request, int | PartitionedTopicMetadata)  # type: ignore[arg-type]
        return found if isinstance(found, PartitionedTopicMetadata) else PartitionedTopicMetadata(found)

    @put(f"{TOPIC}/partitions", status_code=204)
    async def create_partitioned(tenant: Part, namespace: Part, topic: Part, request: Req) -> None:
        """Create a partitioned topic. Body: the number of partitions."""
        name = topic_of(tenant, namespace, topic)
        body = await wanted(request)
        if name.is_partition:
            raise InvalidArgument(f"{name} is the name of a partition; choose a name without -partition-N.")
        await service.create_partitioned(name, body.partitions, body.properties or {})

    @post(f"{TOPIC}/partitions", status_code=204)
    async def grow_partitioned(tenant: Part, namespace: Part, topic: Part, request: Req) -> None:
        """Add partitions. Body: the new number of partitions."""
        name, partitions = topic_of(tenant, namespace, topic), (await wanted(request)).partitions
        if len(await admin.partitions(name)) != partitions or partitions < 1:  # as many as there are is no change
            await service.grow_partitioned(name, partitions)

    @get(f"{TOPIC}/partitions")
    async def get_partitions(tenant: Part, namespace: Part, topic: Part, request: Req) -> Json:
        """Number of partitions; 0 for a plain topic."""
        may_create = flag(request, "checkAllowAutoCreation")
        count = await service.partition_count(topic_of(tenant, namespace, topic), allow_create=may_create)
        return {"partitions": count, "deleted": False}

    @delete(f"{TOPIC}/partitions")
    async def delete_partitioned(tenant: Part, namespace: Part, topic: Part, request: Req) -> None:
        """Delete a partitioned topic; with `force=true` even if it is in use."""
        await service.delete_partitioned(topic_of(tenant, namespace, topic), force=flag(request, "force"))

    return [
        list_topics,
        list_partitioned,
        create_topic,
        delete_topic,
        create_partitioned,
        grow_partitioned,
        get_partitions,
        delete_partitioned,
    ]


def topic_routes(admin: Admin) -> list[Any]:
    """One topic: its state, its end, its messages."""
    service = admin.service

    @get(f"{TOPIC}/stats")
    async def stats(tenant: Part, namespace: Part, topic: Part) -> Json:
        """Rates, sizes, producers and subscriptions of a topic."""
        name = topic_of(tenant, namespace, topic)
        if await admin.partitions(name):
            raise TopicNotFound(f"The topic {name} is partitioned; ask for its partitioned-stats.")
        return topic_stats(admin, await admin.loaded(name))

    @get(f"{TOPIC}/partitioned-stats")
    async def all_stats(tenant: Part, namespace: Part, topic: Part, request: Req) -> Json:
        """The same for a partitioned topic: sums, and each partition."""
        name = topic_of(tenant, namespace, topic)
        parts = await admin.partitions(name)
        if not parts:
            raise TopicNotFound(f"The topic {name} is not partitioned or does not exist.")
        found = {str(each): topic_stats(admin, await admin.loaded(each)) for each in parts}
        return partitioned_stats(found, len(parts), flag(request, "perPartition", True))

    @get(f"{TOPIC}/internalStats")
    async def internal_stats(tenant: Part, namespace: Part, topic: Part) -> Response[bytes]:
        """Ledgers and cursors of a topic."""
        loaded = await admin.loaded(topic_of(tenant, namespace, topic))
        return Response(msgspec.json.encode(loaded.log.internal_stats()), media_type=MediaType.JSON)

    @post(f"{TOPIC}/terminate", status_code=200)
    async def terminate(tenant: Part, namespace: Part, topic: Part) -> Json:
        """End a topic: no more messages; answers the last one's id."""
        name = topic_of(tenant, namespace, topic)
        loaded = await admin.loaded(name)
        return _message_id(await loaded.terminate(), name.partition_index)

    @put(f"{TOPIC}/unload", status_code=204)
    async def unload(tenant: Part, namespace: Part, topic: Part) -> None:
        """Close a topic, so that its clients look it up again."""
        name = topic_of(tenant, namespace, topic)
        await admin.check_exists(name)
        for each in await admin.partitions(name) or [name]:
            found = service.topics.get(str(each))
            if found is not None:
                await service.unload(found)

    @get(f"{TOPIC}/lastMessageId")
    async def last_message_id(tenant: Part, namespace: Part, topic: Part) -> Json:
        """Id of the newest message."""
        name = topic_of(tenant, namespace, topic)
        loaded = await admin.loaded(name)
        return _message_id(loaded.log.last_position, name.partition_index)

    @get(f"{TOPIC}/ledger/{{ledger:str}}/entry/{{entry:str}}")
    async def get_message(tenant: Part, namespace: Part, topic: Part, ledger: Part, entry: Part) -> Response[bytes]:
        """One stored entry: payload as body, metadata as headers."""
        name = topic_of(tenant, namespace, topic)
        position = Position(number_of(ledger, "ledger id"), number_of(entry, "entry id"))
        log = (await admin.loaded(name)).log
        found = await log.read(position, 1, MAX_MESSAGE_BYTES) if log.map.contains(position) else []
        if not found or (found[0].ledger_id, found[0].entry_id) != position:
            raise TopicNotFound(f"The topic {name} has no message {position}.")
        return message_response(found[0])

    return [stats, all_stats, internal_stats, terminate, unload, last_message_id, get_message]


def _message_id(position: Position, partition: int) -> Json:
    return {"ledgerId": position.ledger_id, "entryId": position.entry_id, "partitionIndex": partition}
