"""Brokers on shared stores in memory and a clock moved by hand, spoken to by clients that show every frame."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import msgspec
import pytest
from tests.unit.broker.record_kinds import unknown

from braid.broker.config import BrokerConfig
from braid.broker.ownership import Found, Ownership
from braid.broker.registry import BrokerInfo
from braid.broker.server import BrokerServer
from braid.broker.service import BrokerService
from braid.broker.topic import Topic
from braid.errors import ConnectFailed, LedgerStoreReadOnly, NotReady, StorageUnavailable
from braid.ledger.api import LedgerReader
from braid.ledger.backends import memory as memory_ledgers
from braid.managedledger.api import SingleStore
from braid.managedledger.cache import EntryCache
from braid.managedledger.config import ManagedLedgerConfig
from braid.managedledger.factory import ManagedLedgerFactory
from braid.managedledger.schemas import SchemaStorage
from braid.metadata.backends import memory as memory_metadata
from braid.model.names import NamespaceName, TopicName
from braid.runtime.env import Runtime
from braid.scalable.api import SegmentOps
from braid.scalable.config import ScalableConfig
from braid.testing.clock import ManualClock
from braid.testing.pausable import PausableClock
from braid.testing.raw_client import RawClient
from braid.txn.config import TransactionConfig

PUBLIC = NamespaceName.parse("public/default")


class FlakyLedgers(memory_ledgers.MemoryLedgerStore):
    """The memory store, whose disk a test can stop, and fill."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self.is_held = False
        self.is_unreadable = False
        self.refused = 0
        """Times that it was to be opened while it is unreadable."""

    async def open(self, ledger_id: int, *, fence: bool) -> LedgerReader:
        if self.is_unreadable:
            self.refused += 1
            raise StorageUnavailable("The disk does not answer.")
        return await super().open(ledger_id, fence=fence)

    def _confirm(self) -> None:
        if not self.is_held:
            super()._confirm()

    def hold(self) -> None:
        """Nothing becomes durable from now on."""
        self.is_held = True

    def release(self) -> None:
        self.is_held = False
        self._confirm()

    def fill(self) -> None:
        """Out of space: what is not durable yet is not stored, its writers take no more. Ends a hold."""
        self.is_held = False
        touched, self._touched = self._touched, {}
        for writer in touched:
            ledger = writer._ledger
            del ledger.entries[ledger.last + 1 :]
            writer.last_pushed = ledger.last
            writer._refusal = LedgerStoreReadOnly("The disk is full.")
            while writer._waiters:
                _entry_id, done = writer._waiters.popleft()
                if not done.done():
                    done.set_exception(LedgerStoreReadOnly("The disk is full."))
            if writer._listener is not None:
                writer._listener.ledger_failed(writer._refusal)
        self._confirm()


class Believer:
    """The ownership of a broker that takes everything for its own: what is left to protect a log then is the log."""

    def __init__(self, service: BrokerService) -> None:
        self._service = service
        self.incarnation = "believer"
        self.broker_id = ""

    async def start(self, me: BrokerInfo) -> None:
        self.me = self._me = me
        self.broker_id = me.broker_id

    def owns(self, topic: TopicName) -> bool:
        return True

    def broker(self, broker_id: str) -> BrokerInfo | None:
        return self._me if broker_id == self.broker_id else None

    async def owner_of(self, topic: TopicName) -> BrokerInfo:
        return self._me

    async def confirm(self, topic: TopicName) -> None:
        pass

    async def find(self, topic: TopicName, *, authoritative: bool = False) -> Found:
        await self._service.namespaces.policies(topic.namespace)
        return Found(self._me, True, True)

    async def forget(self, namespace: NamespaceName) -> None:
        pass

    async def leave(self) -> None:
        pass

    async def close(self) -> None:
        pass

    def kill(self) -> None:
        pass


class Broker:
    """One broker of the world, with its own metadata session and socket."""

    def __init__(
        self,
        world: World,
        config: BrokerConfig,
        logs: ManagedLedgerConfig,
        scalable: ScalableConfig,
        transactions: TransactionConfig,
        *,
        believes: bool,
    ) -> None:
        self.clock = PausableClock(world.clock)
        runtime = Runtime(clock=self.clock)
        handle = world.metadata.handle(f"broker-{len(world.brokers)}", clock=self.clock)
        resolver = SingleStore(world.ledgers)
        factory = ManagedLedgerFactory(runtime, handle, resolver, logs, EntryCache(logs.cache_bytes))
        self.service = BrokerService(
            runtime,
            config,
            handle,
            factory,
            SchemaStorage(runtime, handle, resolver),
            scalable=scalable,
            transactions=transactions,
        )
        self.service.remote_segments = world.segments_of
        if believes:
            self.service.ownership = Believer(self.service)  # type: ignore[assignment]
        self.server = BrokerServer(self.service)
        self.is_down = False
        self._handle = handle
        self._world = world

    @property
    def ownership(self) -> Ownership:
        return self.service.ownership

    @property
    def bundles(self) -> list[str]:
        """Bundles of public/default that it owns."""
        return [str(bundle) for bundle in self.ownership.owned().get(PUBLIC, [])]

    @property
    def url(self) -> str:
        return self.service.service_url

    async def client(self, **options: Any) -> RawClient:
        client = await RawClient.connect(self.url, **options)
        self._world.clients.append(client)
        return client

    async def stop(self) -> None:
        """A clean end."""
        if not self.is_down:
            self.is_down = True
            await self.server.__aexit__(None, None, None)
            await self._handle.close()

    async def kill(self) -> None:
        """Gone without any clean-up: nothing is flushed, closed or told to anybody. Its session ends at once, so that a test
        which is about something else need not wait for it."""
        self.is_down = True
        self.service._kill_scalable()
        self.service.transactions.kill()
        self.service.ownership.kill()
        self.server._listener.close()  # type: ignore[union-attr]
        for topic in self.service.topics.values():
            for info in topic.log.infos:
                ledger = self._world.ledgers._ledgers.get(info.ledger_id)  # gone if another owner trimmed it meanwhile
                if ledger is not None and ledger.writer is not None:
                    ledger.writer._listener = None  # the dead hear nothing
            topic.log.tasks.cancel()
            topic.tasks.cancel()
            for cursor in topic.log.cursors.values():
                cursor.stop()
        self.service._tasks.cancel()
        for _turn in range(10):  # a connection accepted just before shows up a few turns of the loop later
            for connection in list(self.server.connections):
                connection.link.abort()
            await asyncio.sleep(0)
        while self.server.connections:  # noqa: ASYNC110 - the loop's own work, no event tells
            await asyncio.sleep(0)
        await self._handle.close()

    def topic(self, name: str) -> Topic:
        """A loaded topic."""
        return self.service.topics[str(TopicName.parse(name))]

    async def policy(self, key: str, value: Any) -> None:
        await self.service.namespaces.set_policy(PUBLIC, key, value)
        await self.service.policies_changed(PUBLIC)


class Asked:
    """The segments of a broker as another one asks for them: it takes what it is asked for, as over HTTP."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def __getattr__(self, name: str) -> Any:
        async def call(segment: TopicName, *given: Any, **named: Any) -> Any:
            if not (await self._broker.ownership.find(segment, authoritative=True)).is_mine:
                raise NotReady(f"{segment} is somebody else's.")
            return await getattr(self._broker.service.local_segments, name)(segment, *given, **named)

        return call


class World:
    """Stores that outlive their brokers."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.ledgers: FlakyLedgers
        self.metadata: Any = None
        self.brokers: list[Broker] = []
        self.clients: list[RawClient] = []

    async def open(self) -> None:
        runtime = Runtime(clock=self.clock)
        self.ledgers = FlakyLedgers(runtime)
        self.metadata = await memory_metadata.open_store(runtime)

    async def broker(
        self,
        logs: ManagedLedgerConfig | None = None,
        *,
        believes: bool = False,
        scalable: ScalableConfig | None = None,
        transactions: TransactionConfig | None = None,
        **settings: Any,
    ) -> Broker:
        """Start a broker; settings of section `[broker]` by name. One that `believes` takes every topic for its own."""
        config = msgspec.structs.replace(BrokerConfig(port=0), **settings)
        broker = Broker(
            self,
            config,
            logs or ManagedLedgerConfig(),
            scalable or ScalableConfig(),
            transactions or TransactionConfig(),
            believes=believes,
        )
        await broker.server.__aenter__()
        self.brokers.append(broker)
        return broker

    def segments_of(self, info: BrokerInfo) -> SegmentOps:
        """How one broker reaches the segments of another: without any network in between."""
        for broker in self.brokers:
            if not broker.is_down and broker.ownership.broker_id == info.broker_id:
                return cast(SegmentOps, Asked(broker))
        raise ConnectFailed(f"The broker {info.broker_id} is not there.")

    async def advance(self, seconds: float) -> None:
        await self.clock.advance(seconds)

    async def close(self) -> None:
        self.ledgers.release()
        for client in self.clients:
            client.close()
        strange = [] if self.metadata is None else unknown(self.metadata.tables.rows)
        for broker in self.brokers:
            await broker.stop()
        with contextlib.suppress(Exception):
            await self.metadata.close()
        await self.ledgers.close()
        assert not strange, f"records of a kind that tests/unit/broker/record_kinds.py does not list: {strange}"


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    await world.open()
    yield world
    await world.close()
    for _ in range(3):
        await asyncio.sleep(0)


@pytest.fixture
async def broker(world: World) -> Broker:
    return await world.broker()


@pytest.fixture
async def client(broker: Broker) -> RawClient:
    return await broker.client()


@pytest.fixture
def until() -> Callable[[Callable[[], Any]], Any]:
    """Wait, bounded, until something on the broker's side is so."""

    async def wait(condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(10):
            while not condition():  # noqa: ASYNC110 - any condition
                await asyncio.sleep(0)

    return wait
