"""`ConnectionPool`: the connections of a client, one per broker, and the lookup of the broker that serves a topic.

Owns which brokers are known and connected. Must not know what the connections are used for.
"""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

from braid.client.config import ClientConfig
from braid.client.connection import Connection, open_connection
from braid.errors import BraidError, Closed, ConfigError, ConnectFailed, MetadataFailure, NotReady
from braid.runtime.env import Runtime
from braid.wire import requests
from braid.wire.types import LookupResult

MAX_REDIRECTS = 20
DEFAULT_PORT = 6650
MAX_DEAD_BROKERS = 16


class ConnectionPool:
    """Connects when a connection is needed."""

    def __init__(self, runtime: Runtime, config: ClientConfig, url: str) -> None:
        """Raises ConfigError if the URL cannot be used."""
        self._runtime = runtime
        self._config = config
        self._url = url
        self._addresses = parse_url(url)
        self._locks: dict[tuple[str, int], asyncio.Lock] = {}
        self._is_closed = False
        self.connections: dict[tuple[str, int], Connection] = {}

    @property
    def is_connected(self) -> bool:
        """Whether any broker can be asked at the moment."""
        return any(connection.is_open for connection in self.connections.values())

    def close(self) -> None:
        """End all connections; none is made any more."""
        self._is_closed = True
        for connection in list(self.connections.values()):
            connection.close()
        self.connections.clear()
        self._locks.clear()

    async def to_any(self) -> Connection:
        """A connection to any broker of the cluster; raises ConnectFailed."""
        # One of the given addresses, if it is connected; else any broker that is: the given ones may be gone by now.
        known = [self.connections.get(address) for address in self._addresses]
        for connection in (*known, *self.connections.values()):
            if connection is not None and connection.is_open:
                return connection
        failure: BraidError | None = None
        for address in dict.fromkeys((*self._addresses, *self.connections)):
            try:
                return await self._to(*address)
            except ConnectFailed as error:
                failure = failure or error
        raise failure or ConnectFailed(f"No broker of {self._url} can be reached.")

    async def to_broker(self, url: str | None) -> Connection:
        """The connection to the broker at `url`, as brokers name each other; to any if none is named or it is not reachable."""
        if url is not None:
            try:
                return await self._to(*parse_url(url)[0])
            except (ConnectFailed, ConfigError):
                pass  # what is known of the broker may be old
        return await self.to_any()

    async def locate(self, topic: str) -> Connection:
        """The connection to the broker that serves `topic`."""
        connection = await self.to_any()
        is_authoritative = False
        for _hop in range(MAX_REDIRECTS):
            asked = is_authoritative
            try:
                body = await connection.request(lambda number: requests.lookup(number, topic, asked))  # noqa: B023 - used at once
            except MetadataFailure as error:  # what brokers say while a topic moves
                raise NotReady(error.message) from error
            if body.proxy_through_service_url:
                return await self.to_any()
            connection = await self._to(*parse_url(body.brokerServiceUrl)[0])
            if body.response == LookupResult.CONNECT:
                return connection
            is_authoritative = body.authoritative
        raise NotReady(f"The lookup of {topic} was sent from broker to broker more than {MAX_REDIRECTS} times.")

    async def _to(self, host: str, port: int) -> Connection:
        address = (host, port)
        async with self._locks.setdefault(address, asyncio.Lock()):
            if self._is_closed:
                raise Closed("The client was closed.")
            connection = self.connections.get(address)
            if connection is not None and connection.is_open:
                return connection
            connection = await open_connection(self._runtime, self._config, host, port)
            if self._is_closed:
                connection.close()
                raise Closed("The client was closed.")
            self.connections.pop(address, None)  # the newest come last
            self.connections[address] = connection
            self._forget_dead_brokers()
            return connection

    def _forget_dead_brokers(self) -> None:
        """Brokers come and go: only so many that were left are remembered, for a time when no other can be reached."""
        dead = [address for address, each in self.connections.items() if not each.is_open]
        for address in dead[: max(0, len(dead) - MAX_DEAD_BROKERS)]:
            del self.connections[address]
            if not self._locks[address].locked():
                del self._locks[address]


def parse_url(url: str) -> list[tuple[str, int]]:
    """The addresses in `pulsar://host:port,host:port`."""
    parts = urlsplit(url)
    if parts.scheme != "pulsar" or not parts.netloc:
        hint = " Encrypted connections are not available yet." if parts.scheme == "pulsar+ssl" else ""
        raise ConfigError(f"The service URL {url!r} cannot be used; write pulsar://host:port.{hint}")
    addresses = []
    for part in parts.netloc.split(","):
        try:
            one = urlsplit(f"pulsar://{part}")
            if not one.hostname:
                raise ValueError("it has an empty host")
            addresses.append((one.hostname, one.port or DEFAULT_PORT))
        except ValueError as error:
            raise ConfigError(f"The service URL {url!r} cannot be used: {error}.") from None
    return addresses
