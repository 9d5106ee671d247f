"""`Standalone`: one or several brokers in one process over one metadata store and one ledger store.

Owns the composition and nothing else: stores first, then the brokers (`node.py`), stopped in reverse; the CLI and the test kit
run it. Each broker has its own sockets, metadata session and share of the entry cache. Before anything serves, the high-water
mark in the ledger journal is held against the metadata store (architecture 5.11): a metadata store older than the data it
describes, or another one, is refused and nothing is changed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any

import msgspec

from braid.broker.server import BrokerServer
from braid.broker.service import BrokerService
from braid.errors import ConfigError, StoreMismatch
from braid.ledger.api import LedgerStore
from braid.managedledger.orphans import OrphanSweep
from braid.metadata.api import MetadataStore
from braid.runtime import plugins
from braid.runtime.env import Runtime
from braid.runtime.tasks import Tasks
from braid.web.config import StandaloneConfig
from braid.web.node import BrokerNode

log = logging.getLogger(__name__)


class Standalone:
    """The brokers of a process with their stores; `async with` starts and stops them.

    `on_fatal` is called once, on the loop, when the disk failed in a way after which the process must end. `runtime_of` gives
    each broker, by its number, a runtime of its own; the stores use `runtime`.
    """

    def __init__(
        self,
        config: StandaloneConfig,
        runtime: Runtime | None = None,
        *,
        on_fatal: Callable[[BaseException], None] | None = None,
        with_http: bool = True,
        runtime_of: Callable[[int], Runtime] | None = None,
    ) -> None:
        self.config = config
        self.runtime = runtime or Runtime()
        self.brokers: list[BrokerNode] = []
        self.metadata: Any = None
        """The metadata store's root, from which handles are made."""
        self.ledgers: LedgerStore
        self._with_http = with_http
        self._report_fatal = on_fatal
        self._runtime_of = runtime_of or (lambda _number: self.runtime)
        self._sweep: OrphanSweep | None = None
        self._is_failed = False
        self._is_vouched = False
        """The ledger store belongs to this process, and the metadata store knows every ledger in it."""
        self._stack = AsyncExitStack()

    @property
    def service(self) -> BrokerService:
        """Of the first broker."""
        return self.brokers[0].service

    @property
    def server(self) -> BrokerServer:
        return self.brokers[0].server

    @property
    def service_url(self) -> str:
        return self.brokers[0].service_url

    @property
    def http_url(self) -> str:
        return self.brokers[0].http_url

    @property
    def ready_line(self) -> str:
        """What a started process says: the addresses of all brokers."""
        pulsar = ",".join(node.service_url.removeprefix("pulsar://") for node in self.brokers)
        http = ",".join(node.http_url.removeprefix("http://") for node in self.brokers)
        return f"ready pulsar://{pulsar} http://{http}"

    async def __aenter__(self) -> Standalone:
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for node in self.brokers:  # first for all: topics must not wander from one that stops to the next
            if not node.is_down:
                await node.service.ownership.leave()
        await self._stack.aclose()

    async def _start(self) -> None:
        storage = self.config.storage
        if storage.ledger_backend != "memory" or storage.metadata_backend != "memory":
            await self._lock_data_dir()
        await self._open_stores()
        if self.config.managed_ledger.orphan_sweep_minutes and self._is_vouched:
            await self._begin_sweep()
        for _number in range(self.config.broker.count):
            await self.add_broker()
        if self._sweep is not None:
            tasks = Tasks("orphans")
            self._stack.push_async_callback(tasks.close)
            tasks.spawn(self._sweep.run(), "sweep")

    async def add_broker(self) -> BrokerNode:
        """Start one more broker: the first on the ports of the settings, any further one on free ports."""
        number = len(self.brokers)
        config, logs = self.config.broker, self.config.managed_ledger
        if number:
            config = msgspec.structs.replace(config, port=0, http_port=0)
        runtime = self._runtime_of(number)
        node = BrokerNode(
            runtime,
            config,
            msgspec.structs.replace(logs, cache_bytes=logs.cache_bytes // config.count),
            self._handle(f"broker-{number}", runtime),
            self.ledgers,
            scalable=self.config.scalable_topics,
            transactions=self.config.transactions,
            retention=self.config.retention,
            on_claim=None if self._sweep is None else self._sweep.claimed,
            with_http=self._with_http,
        )
        await self._stack.enter_async_context(node)
        self.brokers.append(node)
        return node

    def _handle(self, name: str, runtime: Runtime) -> MetadataStore:
        handle: MetadataStore = self.metadata.handle(name, clock=runtime.clock)
        return handle

    async def _begin_sweep(self) -> None:
        """The sweep, if there can be anything to remove; it must begin before anything is served."""
        handle = self._handle("orphans", self.runtime)
        self._stack.push_async_callback(handle.close)
        sweep = OrphanSweep(self.runtime.clock, handle, self.ledgers, self.config.managed_ledger.orphan_sweep_minutes)
        if await sweep.begin():
            self._sweep = sweep

    async def _lock_data_dir(self) -> None:
        path, files = self.config.storage.path, self.runtime.files
        if not self.config.storage.data_dir.strip():
            raise ConfigError("The data directory (storage.data_dir) has an empty name; give it one.")
        worker = self.runtime.threads.worker("data-directory")
        try:
            await worker.run(lambda: files.make_dir(path))
            lock = await worker.run(lambda: files.lock(path))
        except OSError as error:
            raise ConfigError(f"The data directory {path} cannot be used: {error.strerror or error}.") from error
        finally:
            await worker.close()
        self._stack.callback(lock.release)

    async def _open_stores(self) -> None:
        storage = self.config.storage
        self.ledgers = await self._open_store(
            "braid.ledger_stores",
            storage.ledger_backend,
            path=storage.path / "ledgers",
            settings=self.config.ledger,
            on_fatal=self._fatal,
        )
        self._stack.push_async_callback(self.ledgers.close)
        self.metadata = await self._open_store(
            "braid.metadata_stores",
            storage.metadata_backend,
            path=storage.path / "metadata",
            session_timeout=storage.session_timeout_seconds,
        )
        self._stack.push_async_callback(self.metadata.close)
        self.metadata.on_failure = self._fatal
        if hasattr(self.ledgers, "metadata_mark"):
            mark = self.ledgers.metadata_mark()
            self._check_mark(mark)
            self._is_vouched = mark is not None
            store_id, note = self.metadata.store_id, self.ledgers.note_metadata  # type: ignore[attr-defined]
            self.metadata.on_commit = lambda commit: note(store_id, commit)
            note(store_id, self.metadata.commit_counter)

    async def _open_store(self, group: str, name: str, **options: object) -> Any:
        """Open a backend by name; all of one group take the same options."""
        opener = plugins.load(group, name)
        try:
            return await opener(self.runtime, **options)
        except OSError as error:
            raise ConfigError(f"The {name} store in {self.config.storage.path} cannot be opened: {error}.") from error

    def _check_mark(self, mark: tuple[str, int] | None) -> None:
        if mark is None:
            return
        store_id, commit = mark
        path = self.config.storage.path
        if store_id != self.metadata.store_id:
            raise StoreMismatch(
                f"The metadata store in {path} has id {self.metadata.store_id}, but the ledgers there belong to the metadata "
                f"store {store_id}; put back the metadata directory that belongs to them."
            )
        if self.metadata.loaded_counter < commit:
            raise StoreMismatch(
                f"The metadata store in {path} is older than the ledgers there: it has commit {self.metadata.loaded_counter}, "
                f"commit {commit} was acknowledged; put back the newest copy of both directories, taken together."
            )

    def _fatal(self, error: BaseException) -> None:
        if self._is_failed:
            return
        self._is_failed = True
        log.critical("storage failed and nothing can be trusted any more: %s", error)
        if self._report_fatal is not None:
            self._report_fatal(error)
