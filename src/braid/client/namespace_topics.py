"""Patterns of names, and the topics of a namespace, asked for once.

Regular topics are told by their list, scalable ones by a watch that ends with its first answer.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from braid.client.connection import Connection
from braid.errors import BraidError, ConnectionLost, DeadlineExceeded, InvalidArgument, NotAllowed, from_code
from braid.model.names import Domain, NamespaceName, TopicName
from braid.wire import requests

if TYPE_CHECKING:
    from braid.client.client import Client


def parse_pattern(pattern: str) -> tuple[tuple[Domain, ...], NamespaceName, re.Pattern[str]]:
    """Kinds of topics, namespace and expression of `topic://tenant/namespace/expression`."""
    scheme, separator, rest = pattern.partition("://")
    domains: tuple[Domain, ...] = (Domain.PERSISTENT, Domain.TOPIC)
    if not separator:
        rest = pattern
    elif scheme in domains:
        domains = (Domain(scheme),)
    else:
        raise NotAllowed(f"The pattern {pattern!r:.200} cannot be used; begin it with topic:// or persistent://.")
    parts = rest.split("/", 2)
    if len(parts) == 1:
        parts = ["public", "default", rest]
    if len(parts) != 3 or not parts[2]:
        raise InvalidArgument(f"The pattern {pattern!r:.200} cannot be used; write topic://tenant/namespace/expression.")
    try:
        expression = re.compile(parts[2])
    except (re.error, RecursionError, OverflowError) as error:
        raise InvalidArgument(f"The pattern {pattern!r:.200} is no regular expression: {error}.") from None
    return domains, NamespaceName.parse(f"{parts[0]}/{parts[1]}"), expression


async def topics_of(client: Client, namespace: NamespaceName, domains: Collection[Domain]) -> set[str]:
    """Full names; a partitioned topic is named once."""
    connection = await client.service_connection()
    found: set[str] = set()
    if Domain.PERSISTENT in domains:
        body = await connection.request(lambda number: requests.topics_of_namespace(number, str(namespace)))
        found |= {str(TopicName.parse(name).base) for name in body.topics}
    if Domain.TOPIC in domains and connection.supports_scalable_topics:
        found |= await _Snapshot(client, connection).take(namespace)
    return found


class _Snapshot:
    """The first answer to a watch."""

    def __init__(self, client: Client, connection: Connection) -> None:
        self._client = client
        self._connection = connection
        self._number = client.new_id()
        self._topics: asyncio.Future[set[str]] = asyncio.get_running_loop().create_future()

    async def take(self, namespace: NamespaceName) -> set[str]:
        connection, number, topics = self._connection, self._number, self._topics
        timer = self._client.runtime.clock.call_later(self._client.config.operation_timeout, self._late, namespace)
        connection.namespace_watches[number] = self
        try:
            connection.write(requests.watch_scalable_topics(number, str(namespace)))
            return await topics
        finally:
            timer.cancel()
            if connection.namespace_watches.pop(number, None) is not None and connection.is_open:
                connection.write(requests.watch_scalable_topics_close(number))

    def update(self, body: Any) -> None:
        if self._topics.done():
            return
        if body.HasField("error"):
            self._topics.set_exception(from_code(body.error, body.message))
        elif body.HasField("snapshot"):
            self._topics.set_result({str(TopicName.parse(name)) for name in body.snapshot.topics})

    def lost(self, error: BraidError) -> None:
        if not self._topics.done():
            self._topics.set_exception(ConnectionLost(error.message))

    def _late(self, namespace: NamespaceName) -> None:
        if not self._topics.done():
            self._topics.set_exception(DeadlineExceeded(f"No broker told the topics of {namespace} in time."))
