"""`Standalone`: a whole broker in one process: stores, logs, broker and HTTP, started in order and stopped in reverse.

Owns the composition and nothing else; the CLI and the test kit run it. Before anything serves, the high-water mark in the
ledger journal is held against the metadata store (architecture 5.11): a metadata store older than the data it describes, or
another one, is refused and nothing is changed.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any

from braid.broker.server import BrokerServer
from braid.broker.service import BrokerService
from braid.errors import ConfigError, StoreMismatch
from braid.ledger.api import LedgerStore
from braid.managedledger.api import SingleStore
from braid.managedledger.cache import EntryCache
from braid.managedledger.factory import ManagedLedgerFactory
from braid.managedledger.orphans import OrphanSweep
from braid.managedledger.schemas import SchemaStorage
from braid.metadata.api import MetadataStore
from braid.runtime import plugins
from braid.runtime.env import Runtime
from braid.runtime.network import public_name, url_host
from braid.runtime.tasks import Tasks
from braid.web.config import StandaloneConfig

log = logging.getLogger(__name__)


class Standalone:
    """One broker with its stores and its HTTP server; `async with` starts and stops it.

    `on_fatal` is called once, on the loop, when the disk failed in a way after which the process must end.
    """

    def __init__(
        self,
        config: StandaloneConfig,
        runtime: Runtime | None = None,
        *,
        on_fatal: Callable[[BaseException], None] | None = None,
        with_http: bool = True,
    ) -> None:
        self.config = config
        self.runtime = runtime or Runtime()
        self.service: BrokerService
        self.server: BrokerServer
        self.metadata: Any = None
        """The metadata store's root, from which handles are made."""
        self.ledgers: LedgerStore
        self.service_url = ""
        self.http_url = ""
        self._with_http = with_http
        self._report_fatal = on_fatal
        self._is_failed = False
        self._is_vouched = False
        """The ledger store belongs to this process, and the metadata store knows every ledger in it."""
        self._stack = AsyncExitStack()

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
        await self._stack.aclose()

    async def _start(self) -> None:
        config, runtime = self.config, self.runtime
        if config.storage.ledger_backend != "memory" or config.storage.metadata_backend != "memory":
            await self._lock_data_dir()
        await self._open_stores()
        handle = self.metadata.handle("broker-0")
        self._stack.push_async_callback(handle.close)
        resolver = SingleStore(self.ledgers)
        cache = EntryCache(config.managed_ledger.cache_bytes)
        sweep = await self._make_sweep(handle)
        logs = ManagedLedgerFactory(
            runtime, handle, resolver, config.managed_ledger, cache, on_claim=None if sweep is None else sweep.claimed
        )
        schemas = SchemaStorage(runtime, handle, resolver)
        self.service = BrokerService(runtime, config.broker, handle, logs, schemas)
        self.server = BrokerServer(self.service)
        await self._listen("binary protocol", config.broker.port, self._stack.enter_async_context(self.server))
        self.service_url = self.service.service_url
        if sweep is not None:
            tasks = Tasks("orphans")
            self._stack.push_async_callback(tasks.close)
            tasks.spawn(sweep.run(), "sweep")
        if self._with_http:
            await self._start_http()

    async def _make_sweep(self, handle: MetadataStore) -> OrphanSweep | None:
        """The sweep, if it is wanted, safe and there can be anything to remove."""
        minutes = self.config.managed_ledger.orphan_sweep_minutes
        if not minutes or not self._is_vouched:
            return None
        sweep = OrphanSweep(self.runtime.clock, handle, self.ledgers, minutes)
        return sweep if await sweep.begin() else None

    async def _listen(self, what: str, port: int, started: Any) -> Any:
        try:
            return await started
        except OSError as error:
            address = f"{self.config.broker.bind_address}:{port}"
            remedy = "stop what uses it or choose another port"
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                remedy = "give an address of this machine (broker.bind_address), such as localhost or 0.0.0.0"
            raise ConfigError(f"The {what} cannot listen on {address}: {error.strerror or error}; {remedy}.") from error

    async def _start_http(self) -> None:
        # Imported late: the broker's port is open before a web framework's half second is spent.
        from braid.web.admin import Admin
        from braid.web.app import make_app
        from braid.web.http import HttpServer
        from braid.web.metrics import watch_loop_lag

        broker = self.config.broker
        admin = Admin(self.service, self.server, lambda: not getattr(self.ledgers, "is_read_only", False))
        http = HttpServer(self.runtime, make_app(admin), broker.bind_address, broker.http_port)
        await self._listen("HTTP server", broker.http_port, self._stack.enter_async_context(http))
        host = broker.advertised_address or public_name(broker.bind_address)
        self.http_url = admin.http_url = f"http://{url_host(host)}:{http.port}"
        tasks = Tasks("web")
        self._stack.push_async_callback(tasks.close)
        tasks.spawn(watch_loop_lag(admin), "loop-lag")

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
