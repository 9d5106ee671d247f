"""`World`: brokers, stores and clients of one seed, and what can be done to them from outside.

Owns the composition (the stores of one process, brokers over them, each with its own session, sockets and clock) and the
verbs of a fault: kill, pause, resume, restart a broker; cut the power of everything; let storage fail. The process restarts by
itself after storage failed for good, as a supervisor would. What a run does with the world is the workload's business.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import msgspec

from braid.broker.config import BrokerConfig, RetentionConfig
from braid.broker.server import BrokerServer
from braid.broker.service import BrokerService
from braid.client import Client, ClientConfig
from braid.errors import BraidError
from braid.ledger.backends import local
from braid.managedledger.api import Entry, SingleStore
from braid.managedledger.cache import EntryCache
from braid.managedledger.config import ManagedLedgerConfig
from braid.managedledger.factory import ManagedLedgerFactory
from braid.managedledger.schemas import SchemaStorage
from braid.metadata.api import MetadataStore
from braid.runtime.env import Random, Runtime
from braid.scalable.config import ScalableConfig
from braid.testing.files import ForgetfulFiles
from braid.testing.sim.calls import Calls, CallServer, note_calls
from braid.testing.sim.history import History
from braid.testing.sim.loop import START, WORLD, Node, SimLoop, on
from braid.testing.sim.network import Fabric
from braid.testing.sim.ports import DiskSpeed, SimClock, SimThreads
from braid.testing.sim.stores import Bridge, NodeEngine, SimLedgers, open_metadata
from braid.testing.sim.trouble import USUAL_DELAY, FlakyMetadata, Trouble
from braid.txn.config import TransactionConfig

log = logging.getLogger(__name__)

SESSION_SECONDS = 10.0
PORT = 6650
DATA = Path("/data")
OPEN_ATTEMPTS = 5
RESERVED_IDS = 1000
"""Ledger ids below this are left free, so that a faulty allocator has something to hand out."""
LEDGERS = local.LocalSettings(
    group_bytes=4000,
    segment_bytes=8000,
    checkpoint_bytes=30_000,
    checkpoint_seconds=20.0,
    buffer_bytes=24_000,
    tail_bytes=600,
    block_bytes=500,
    open_files=6,
    reserve_bytes=0,
)
LOGS = ManagedLedgerConfig(
    max_entries_per_ledger=25, min_ledger_age_ms=0, max_entries_per_cursor_ledger=8, cache_bytes=8000, cursor_flush_ms=300
)
SCALABLE = ScalableConfig(
    consumer_grace_seconds=6.0,
    drain_poll_seconds=1.0,
    reconcile_seconds=2.0,
    prune_seconds=4.0,
    adopt_seconds=4.0,
)
TRANSACTIONS = TransactionConfig(
    coordinators=3, timeout_sweep_seconds=0.5, collect_seconds=2.0, retention_seconds=4.0, reconcile_seconds=1.0
)
RETENTION = RetentionConfig(unread_minutes=0)
"""What nobody reads goes at once, so that more is deleted in a run than with the default."""
CLIENTS = ClientConfig(
    connect_timeout=5.0,
    operation_timeout=15.0,
    send_timeout=20.0,
    keep_alive_seconds=5.0,
    receiver_queue=20,
    redelivery_delay=0.3,
)


class SimDisk(ForgetfulFiles):
    """The disk of a world."""

    def clear_faults(self) -> None:
        """No failing operations any more."""
        self._faults.clear()

    def used_bytes(self) -> int:
        return self._used()


class Broker:
    """One incarnation of a broker."""

    def __init__(self, node: Node, number: int) -> None:
        self.node = node
        self.number = number
        self.is_up = False
        self.server: BrokerServer
        self.service: BrokerService
        self.handle: Any = None
        self.ledgers: SimLedgers
        self.calls: CallServer


class World:
    """Everything that exists in one run."""

    def __init__(
        self,
        seed: int | str,
        loop: SimLoop,
        *,
        brokers: int = 1,
        deduplication: bool = True,
        scalable: Mapping[str, float] | None = None,
    ) -> None:
        """`scalable` are settings of scalable topics that differ from `SCALABLE`."""
        self.loop = loop
        self.seed = seed
        self.history = History(lambda: loop.time() - START)
        self.fabric = Fabric(Random(f"network-{seed}"))
        self.calls = Calls(self.fabric)
        self.trouble = Trouble()
        self.trouble_random = Random(f"trouble-{seed}")
        self.speed = DiskSpeed(Random(f"speed-{seed}"))
        self.disk = SimDisk(Random(f"disk-{seed}"))
        self.brokers: list[Broker] = []
        self.stores: Node = Node("stores")
        self.engine: NodeEngine
        self.ledgers: local.LocalLedgerStore
        self.failures: list[str] = []
        """Things that must not happen whatever the workload: a start that fails, say."""
        self.skew_ms: dict[str, int] = {}
        self.on_process_end: Callable[[], None] = _nothing
        """Called when the process of the stores ends, for those who live in it."""
        self._count = brokers
        self.deduplication = deduplication
        self._scalable = dict(scalable or {})
        self._random = Random(f"world-{seed}")
        self._ids = Random(f"ids-{seed}")
        self._rebooting: asyncio.Task[Any] | None = None
        self._life = asyncio.Lock()  # starts and restarts come one after the other
        self._failed: Node | None = None
        self._bridges = 0
        self._usurpers: list[Node] = []
        self._is_stopping = False

    @property
    def service_url(self) -> str:
        """All brokers' addresses, as a client is given them."""
        return "pulsar://" + ",".join(f"broker-{number}:{PORT}" for number in range(self._count))

    def runtime(self, node: Node) -> Runtime:
        """The ports of a node."""
        return Runtime(
            clock=SimClock(self.skew_ms.get(node.name, 0)),
            random=self._ids,
            threads=SimThreads(self.speed),
            files=self.disk,
            network=self.fabric.port(node),
        )

    def spawn(self, node: Node, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """A task of a node."""
        with on(node):
            return self.loop.create_task(work, name=name)

    def client(self, node: Node, config: ClientConfig = CLIENTS) -> Client:
        """An SDK client on a node; use it there only."""
        return Client(self.service_url, config=config, runtime=self.runtime(node))

    def fault(self, name: str, *details: Any) -> None:
        """Write down that the world did something nasty."""
        self.history.add("world", "info", "fault", [name, *details])

    @property
    def is_rebooting(self) -> bool:
        """Whether the process is being started after storage failed or the power went."""
        return self._rebooting is not None

    # Life of the process

    async def start(self) -> None:
        """Open the stores and start every broker."""
        await self._open_stores()
        self.brokers = [Broker(Node(f"broker-{number}"), number) for number in range(self._count)]
        for broker in self.brokers:
            await self._start_broker(broker)

    async def settle(self) -> None:
        """Return once every broker is up: restarts what is dead, resumes what is paused."""
        while True:
            if self._rebooting is not None:
                await asyncio.wait([self._rebooting])
            for broker in list(self.brokers):
                self.resume(broker.number)
                if broker.node.is_dead:
                    await self.restart(broker.number)
            if self._rebooting is None and all(broker.is_up for broker in self.brokers):
                return
            await asyncio.sleep(0.5)

    async def stop(self) -> None:
        """An orderly end of all brokers and stores."""
        self._is_stopping = True
        for broker in self.brokers:
            task = self.spawn(broker.node, self._stop_broker(broker), "stop")
            await asyncio.wait([task])
            task.result()
        for closing in (self.engine.close(), self.ledgers.close()):
            task = self.spawn(self.stores, closing, "close")
            await asyncio.wait([task])
            task.result()

    @staticmethod
    async def _stop_broker(broker: Broker) -> None:
        await broker.server.__aexit__(None, None, None)
        await broker.calls.close()
        await broker.handle.close()

    async def _open_stores(self) -> None:
        task = self.spawn(self.stores, self._open(), "open stores")
        await asyncio.wait([task])
        task.result()

    async def _open(self) -> None:
        runtime = self.runtime(self.stores)
        node = self.stores
        ledgers = await local.open_store(
            runtime, path=DATA / "ledgers", settings=LEDGERS, on_fatal=lambda error: self._storage_failed(node, error)
        )
        engine = await open_metadata(runtime, DATA / "metadata", node, self.history, SESSION_SECONDS)
        engine.on_failure = lambda error: self._storage_failed(node, error)
        mark = ledgers.metadata_mark()
        if mark is not None and (mark[0] != engine.store_id or engine.loaded_counter < mark[1]):
            self.failures.append(f"the metadata store lost commits: it has {engine.loaded_counter}, {mark[1]} was acknowledged")
        engine.on_commit = lambda commit: ledgers.note_metadata(engine.store_id, commit)
        ledgers.note_metadata(engine.store_id, engine.commit_counter)
        if mark is None:
            writer = await ledgers.create(ledger_id=RESERVED_IDS)
            await ledgers.delete(writer.ledger_id)
        self.engine, self.ledgers = engine, ledgers

    async def _start_broker(self, broker: Broker) -> None:
        task = self.spawn(broker.node, self._boot(broker), f"boot broker-{broker.number}")
        while not task.done() and not broker.node.is_dead:  # noqa: ASYNC110 - the task of a dead node never ends
            await asyncio.sleep(0.01)
        if task.done() and not task.cancelled() and (error := task.exception()) is not None and not broker.node.is_dead:
            if not isinstance(error, BraidError | OSError):
                raise error
            self.history.remark(f"broker-{broker.number} does not start: {error}")
            self.kill(broker.number)

    async def _boot(self, broker: Broker) -> None:
        runtime = self.runtime(broker.node)
        name = f"broker-{broker.number}"
        broker.handle = self.engine.handle(name, clock=runtime.clock)
        metadata = FlakyMetadata(broker.handle, runtime.clock, self.trouble_random, self.trouble)
        logs, broker.ledgers = self._logs(broker.node, runtime, metadata)
        config = BrokerConfig(
            bind_address=name, port=PORT, deduplication=self.deduplication, keep_alive_seconds=5, retention_check_seconds=5
        )
        broker.service = BrokerService(
            runtime,
            config,
            metadata,
            logs,
            SchemaStorage(runtime, metadata, SingleStore(broker.ledgers)),
            scalable=msgspec.structs.replace(SCALABLE, **self._scalable),
            transactions=TRANSACTIONS,
            retention=RETENTION,
        )
        note_calls(broker.service.local_segments, self.history, broker.node)
        broker.service.remote_segments = self.calls.segments(broker.node)
        broker.server = BrokerServer(broker.service)
        broker.calls = await self.calls.serve(broker.node, name, broker.service)
        await broker.server.__aenter__()
        broker.is_up = True

    def _logs(self, node: Node, runtime: Runtime, metadata: MetadataStore) -> tuple[ManagedLedgerFactory, SimLedgers]:
        """The logs as a node sees them."""
        self._bridges += 1
        bridge = Bridge(self.stores, node, Random(f"bridge-{self.seed}-{self._bridges}"), USUAL_DELAY)
        ledgers = SimLedgers(self.ledgers, bridge, self.history)
        logs = ManagedLedgerFactory(runtime, metadata, SingleStore(ledgers), LOGS, EntryCache(LOGS.cache_bytes))
        return logs, ledgers

    # Faults

    def kill(self, number: int, *, silently: bool = False) -> None:
        """End a broker without any clean-up. `silently`: its peers are not told by the kernel either."""
        broker = self.brokers[number]
        broker.node.is_dead = True
        broker.node.parked.clear()
        broker.is_up = False
        self.died(broker.node, silently=silently)

    def died(self, node: Node, *, silently: bool) -> None:
        """A node is dead: its sockets break, and the store stops telling it things."""
        node.is_dead = True
        self.fabric.kill(node, silently=silently)
        self.engine.node_died(node)

    def pause(self, number: int) -> None:
        """Stop scheduling a broker: tasks, callbacks and timers, its heartbeat included."""
        self.brokers[number].node.is_paused = True

    def resume(self, number: int) -> None:
        self.resume_node(self.brokers[number].node)

    def resume_node(self, node: Node) -> None:
        if node.is_paused:
            self.loop.resume(node)

    async def restart(self, number: int) -> None:
        """A new incarnation of a broker; the old one is killed if it still runs."""
        async with self._life:
            await self._restart(number)

    async def _restart(self, number: int) -> None:
        if not self.brokers[number].node.is_dead:
            self.kill(number)
        broker = self.brokers[number] = Broker(Node(f"broker-{number}"), number)
        await self._start_broker(broker)

    def usurp(self, log: str) -> None:
        """Somebody who owns nothing opens a log and leaves it again: its owner is fenced without being told."""
        node = Node("usurper")
        self._usurpers.append(node)
        self.spawn(node, self._usurp(node, log), "usurp")

    async def _usurp(self, node: Node, log: str) -> None:
        runtime = self.runtime(node)
        handle = self.engine.handle(node.name, clock=runtime.clock)
        try:
            logs = self._logs(node, runtime, handle)[0]
            opened = await logs.open(log, _Indifferent(), create=False)
            await opened.close()
        except BraidError as error:
            self.history.remark(f"the usurper of {log} gave up: {error}")
        finally:
            await handle.close()

    async def power_cut(self) -> None:
        """Everything stops at once; what was not synced is forgotten; then all of it starts again."""
        for broker in self.brokers:
            if not broker.node.is_dead:
                self.kill(broker.number, silently=True)
        self.stores.is_dead = True
        for node in self._usurpers:
            node.is_dead = True
        self.on_process_end()
        async with self._life:
            await self._power_up()

    async def _power_up(self) -> None:
        for attempt in range(OPEN_ATTEMPTS):
            self.stores.is_dead = True
            found = self.disk.power_cut()
            found.__class__ = SimDisk
            found.capacity = 1 << 40
            self.disk = found  # type: ignore[assignment]
            self.stores = Node("stores")
            try:
                await self._open_stores()
                break
            except (BraidError, OSError) as error:
                # A fault may have hit the start; the next attempt finds a disk without one.
                self.history.remark(f"the stores do not open: {error}")
                if attempt == OPEN_ATTEMPTS - 1:
                    self.failures.append(f"the stores do not open after a power cut: {type(error).__name__}: {error}")
                    raise
        for broker in list(self.brokers):
            await self._restart(broker.number)

    def _storage_failed(self, node: Node, error: BaseException) -> None:
        """The product ends its process; a supervisor starts it again, on the disk as a reboot finds it."""
        if node is not self.stores or self._is_stopping:
            return
        self.history.remark(f"the process ends: {error}")
        self._failed = node
        if self._rebooting is None:
            with on(WORLD):
                self._rebooting = self.loop.create_task(self._reboot())

    async def _reboot(self) -> None:
        try:
            while self._failed is self.stores:
                await self.power_cut()
        finally:
            self._rebooting = None


class _Indifferent:
    """The listener of a log that nobody uses."""

    def entries_added(self, entries: list[Entry]) -> None:
        """Nobody waits for them."""

    def log_failed(self, error: BraidError, contexts: list[Any]) -> None:
        """Nobody cares."""


def _nothing() -> None:
    """Nobody else lives in the process."""
