"""PING, LOOKUP, PARTITIONED_METADATA and GET_TOPICS_OF_NAMESPACE."""

from __future__ import annotations

from typing import TYPE_CHECKING

from braid.errors import BraidError, NotReady
from braid.model.names import NamespaceName, TopicName
from braid.wire import messages, replies
from braid.wire.checksum import topics_hash
from braid.wire.types import LookupResult, TopicsMode

if TYPE_CHECKING:
    from braid.broker.connection import BrokerConnection


def ping(connection: BrokerConnection, body: messages.CommandPing) -> None:
    connection.link.write(replies.PONG)


def pong(connection: BrokerConnection, body: messages.CommandPong) -> None:
    """Any received byte counts as a sign of life; nothing more to do."""


async def partitioned_metadata(connection: BrokerConnection, body: messages.CommandPartitionedTopicMetadata) -> None:
    name = TopicName.parse(body.topic)
    count = connection.service.transactions.partition_count(name)
    if count is None:
        count = await connection.service.partition_count(name, allow_create=body.metadata_auto_creation_enabled)
    connection.link.write(replies.partitions(body.request_id, count))


def partitioned_metadata_failed(body: messages.CommandPartitionedTopicMetadata, failure: BraidError) -> bytes:
    return replies.partitions_failed(body.request_id, failure.code, failure.message)


async def lookup(connection: BrokerConnection, body: messages.CommandLookupTopic) -> None:
    """Connect to this broker, or ask another. Neither creates nor loads the topic."""
    name = TopicName.parse(body.topic)
    connection.service.check_lookup(name)
    if body.advertised_listener_name:
        # Clients look for these words, so they are upstream's.
        raise NotReady(f"the broker do not have {body.advertised_listener_name} listener")
    if (coordinator := connection.service.transactions.find(name)) is not None:
        # Never a redirect: whoever is connected to serves it, even if another broker leads it by then.
        connection.service.lookups += 1
        url = coordinator.service_url
        connection.link.write(replies.lookup(body.request_id, LookupResult.CONNECT, url, authoritative=True))
        return
    found = await connection.service.ownership.find(name, authoritative=body.authoritative)
    result = LookupResult.CONNECT if found.is_mine else LookupResult.REDIRECT
    connection.service.lookups += 1
    connection.service.lookup_redirects += not found.is_mine
    connection.link.write(replies.lookup(body.request_id, result, found.broker.service_url, authoritative=found.authoritative))


def lookup_failed(body: messages.CommandLookupTopic, failure: BraidError) -> bytes:
    return replies.lookup_failed(body.request_id, failure.code, failure.message)


async def topics_of_namespace(connection: BrokerConnection, body: messages.CommandGetTopicsOfNamespace) -> None:
    """All topics of a namespace; a pattern is left to the client (`filtered` stays false), as a hostile one could stall us."""
    namespace = NamespaceName.parse(body.namespace)
    topics = [] if TopicsMode(body.mode) is TopicsMode.NON_PERSISTENT else await connection.service.list_topics(namespace)
    digest = topics_hash(topics)
    is_changed = not (body.HasField("topics_hash") and body.topics_hash == digest)
    connection.link.write(
        replies.topics_of_namespace(body.request_id, topics if is_changed else [], topics_hash=digest, changed=is_changed)
    )
