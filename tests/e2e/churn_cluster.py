"""Brokers on real sockets in this process that are killed and started again on their old ports, and the history they leave.

Used by the churn run, the crash points and the stale leader: `Cluster` has the brokers, `outside` and the checkers of the
simulator judge what the metadata store went through.
"""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import msgspec

from braid.broker.config import BrokerConfig
from braid.client import Client, ClientConfig
from braid.client.admin import AdminClient
from braid.errors import BraidError, ConfigError
from braid.model.names import TopicName
from braid.scalable.config import ScalableConfig
from braid.scalable.controller import ScalableTopicController
from braid.scalable.records import ScalableTopicMetadata
from braid.testing.broker import InProcessBroker
from braid.testing.sim.history import History
from braid.testing.sim.layouts import LayoutNotes, outside, topic_records
from braid.web.config import StandaloneConfig, StorageConfig
from braid.web.node import BrokerNode

CLIENTS = ClientConfig(backoff_initial=0.02, backoff_max=0.5, connect_timeout=5.0, redelivery_delay=0.2)


class Cluster:
    """Brokers over one pair of stores; `async with` starts and stops them."""

    def __init__(
        self,
        *,
        brokers: int = 3,
        session_seconds: float = 2.0,
        scalable: ScalableConfig | None = None,
        retention_minutes: int = 0,
    ) -> None:
        began = time.monotonic()
        self.history = History(lambda: time.monotonic() - began)
        self._config = StandaloneConfig(
            broker=BrokerConfig(
                reconcile_seconds=0.5, retention_minutes=retention_minutes, retention_mb=-1 if retention_minutes else 0
            ),
            storage=StorageConfig(session_timeout_seconds=session_seconds),
            scalable_topics=scalable or ScalableConfig(),
        )
        self.inner = InProcessBroker(brokers=brokers, config=self._config)
        self._gates: dict[int, asyncio.Event] = {}

    async def __aenter__(self) -> Cluster:
        await self.inner.__aenter__()
        LayoutNotes(self.history).listen(self.inner.standalone.metadata.tables)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.inner.__aexit__(kind, error, trace)

    @property
    def nodes(self) -> list[BrokerNode]:
        return self.inner.nodes

    @property
    def up(self) -> list[BrokerNode]:
        return [node for node in self.nodes if not node.is_down]

    @property
    def rows(self) -> dict[str, Any]:
        rows: dict[str, Any] = self.inner.standalone.metadata.tables.rows
        return rows

    def client(self) -> Client:
        """A client that knows every broker's address."""
        addresses = ",".join(node.service_url.removeprefix("pulsar://") for node in self.nodes)
        return Client(f"pulsar://{addresses}", config=CLIENTS)

    def admin(self) -> AdminClient:
        return AdminClient([node.http_url for node in self.nodes], timeout=40.0)

    def record(self, topic: str) -> ScalableTopicMetadata | None:
        return topic_records(self.rows).get(topic)

    def leader(self, topic: str) -> BrokerNode | None:
        """The broker that leads a topic now."""
        for node in self.up:
            if self.controller(node, topic) is not None:
                return node
        return None

    def controller(self, node: BrokerNode, topic: str) -> ScalableTopicController | None:
        """The controller of a topic at a broker, if it leads there."""
        for each in node.service.scalable.controllers():
            if isinstance(each, ScalableTopicController) and each.topic == TopicName.parse(topic) and each.is_leading:
                return each
        return None

    async def kill(self, node: BrokerNode) -> int:
        """As a crash; returns its number."""
        number = self.nodes.index(node)
        await self.inner.kill(number)
        return number

    def pause(self, node: BrokerNode) -> None:
        """Stop a broker's timers and hold back whatever it asks of the metadata store, as if its process stood still."""
        self.inner.pause(self.nodes.index(node))
        gate = self._gates[id(node)] = asyncio.Event()
        handle: Any = node.metadata

        def held(honest: Any) -> Any:
            async def call(*args: Any, **options: Any) -> Any:
                await gate.wait()
                return await honest(*args, **options)

            return call

        for name in ("get", "put", "delete", "append"):
            setattr(handle, name, held(getattr(type(handle), name).__get__(handle)))

    def resume(self, node: BrokerNode) -> None:
        """Let a paused broker go on as if nothing had happened."""
        handle: Any = node.metadata
        for name in ("get", "put", "delete", "append"):
            delattr(handle, name)
        self._gates.pop(id(node)).set()
        self.inner.resume(self.nodes.index(node))

    async def restart(self, number: int) -> None:
        """A killed broker comes back, without any memory: under its old addresses, or under new ones if the system has given
        one of them to an outgoing connection meanwhile."""
        old = self.nodes[number]
        try:
            await self._start(number, urlsplit(old.service_url).port or 0, urlsplit(old.http_url).port or 0)
        except ConfigError:
            await self._start(number, 0, 0)

    async def _start(self, number: int, port: int, http_port: int) -> None:
        standalone = self.inner.standalone
        config, logs = standalone.config.broker, standalone.config.managed_ledger
        config = msgspec.structs.replace(config, port=port, http_port=http_port)
        runtime = self.inner._runtime_of(number)
        node = BrokerNode(
            runtime,
            config,
            msgspec.structs.replace(logs, cache_bytes=logs.cache_bytes // config.count),
            standalone._handle(f"broker-{number}", runtime),
            standalone.ledgers,
            scalable=standalone.config.scalable_topics,
            transactions=standalone.config.transactions,
        )
        await standalone._stack.enter_async_context(node)
        standalone.brokers[number] = node

    async def quiet(self, seconds: float) -> dict[str, list[str]]:
        """Wait until no operation is pending and nothing is outside the DAG; returns what is left after so long."""
        until = time.monotonic() + seconds
        while any((left := outside(self.rows)).values()) and time.monotonic() < until:  # noqa: ASYNC110 - real time
            await asyncio.sleep(0.02)
        return {what: names for what, names in left.items() if names}


async def patiently(what: str, seconds: float, attempt: Any) -> Any:
    """Try until it works; raises the last error after so many seconds."""
    until = time.monotonic() + seconds
    while True:
        try:
            return await attempt()
        except BraidError as error:
            if time.monotonic() > until:
                raise AssertionError(f"{what} did not work within {seconds:g} s: {type(error).__name__}: {error}") from error
        await asyncio.sleep(0.05)
