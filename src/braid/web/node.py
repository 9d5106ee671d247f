"""`BrokerNode`: one broker of the process: its metadata session, its logs, its listener and its HTTP server.

Owns the composition of one broker over stores that it shares with others; started and stopped in order by `Standalone`. A
broker is announced to the others under its host and HTTP port: at once if that port is known, else when it is open.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection
from contextlib import AsyncExitStack
from math import inf
from types import TracebackType
from typing import TYPE_CHECKING, Any

from braid.broker.config import BrokerConfig, RetentionConfig
from braid.broker.server import BrokerServer
from braid.broker.service import BrokerService
from braid.errors import ConfigError
from braid.ledger.api import LedgerStore
from braid.managedledger.api import SingleStore
from braid.managedledger.cache import EntryCache
from braid.managedledger.config import ManagedLedgerConfig
from braid.managedledger.factory import ManagedLedgerFactory
from braid.managedledger.schemas import SchemaStorage
from braid.metadata.api import MetadataStore
from braid.runtime.env import Runtime
from braid.runtime.tasks import Tasks
from braid.scalable.config import ScalableConfig
from braid.txn.config import TransactionConfig

if TYPE_CHECKING:
    from braid.web.http import HttpServer
    from braid.web.remote_segments import RemoteSegmentsPool


class BrokerNode:
    """One broker; `async with` starts and stops it. `metadata` is its own handle, which it closes."""

    def __init__(
        self,
        runtime: Runtime,
        config: BrokerConfig,
        logs: ManagedLedgerConfig,
        metadata: MetadataStore,
        ledgers: LedgerStore,
        *,
        scalable: ScalableConfig | None = None,
        transactions: TransactionConfig | None = None,
        retention: RetentionConfig | None = None,
        on_claim: Callable[[str, Collection[int]], None] | None = None,
        with_http: bool = True,
    ) -> None:
        self.runtime = runtime
        self.config = config
        self.metadata = metadata
        self.is_down = False
        """Killed, or stopped."""
        self.http_url = ""
        self._ledgers = ledgers
        self._with_http = with_http
        self._http: HttpServer | None = None
        self._remote: RemoteSegmentsPool | None = None
        self._tasks = Tasks("web")
        self._stack = AsyncExitStack()
        resolver = SingleStore(ledgers)
        factory = ManagedLedgerFactory(runtime, metadata, resolver, logs, EntryCache(logs.cache_bytes), on_claim=on_claim)
        self.service = BrokerService(
            runtime,
            config,
            metadata,
            factory,
            SchemaStorage(runtime, metadata, resolver, skip_lost_ledgers=logs.skip_lost_ledgers),
            scalable=scalable or ScalableConfig(),
            transactions=transactions or TransactionConfig(),
            retention=retention or RetentionConfig(),
        )
        self.server = BrokerServer(self.service, with_http=with_http)

    @property
    def broker_id(self) -> str:
        return self.service.ownership.broker_id

    @property
    def service_url(self) -> str:
        return self.service.service_url

    async def __aenter__(self) -> BrokerNode:
        self._stack.push_async_callback(self.metadata.close)
        try:
            await self._listen("binary protocol", self.config.port, self._stack.enter_async_context(self.server))
            if self._with_http:
                await self._start_http()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def stop(self) -> None:
        """A clean end: topics closed, bundles free for the others. Idempotent."""
        if not self.is_down:
            self.is_down = True
            await self._stack.aclose()

    async def kill(self) -> None:
        """End at once, as a crash would: nothing is closed, flushed, released or told to anybody. Its session runs out."""
        if self.is_down:
            return
        self.is_down = True
        pause_heartbeat: Callable[[], None] | None = getattr(self.metadata, "pause_heartbeat", None)
        if pause_heartbeat is not None:
            pause_heartbeat()
        self._tasks.cancel()
        if self._http is not None:
            self._http.abort()
        await self.server.kill()
        if self._remote is not None:
            await self._remote.close()  # as the system does with a dead process's sockets

    async def _start_http(self) -> None:
        if self.config.http_port:
            # Before a web framework's half second is spent: clients of the binary protocol need not wait for it.
            await self._announce(self.config.http_port)
        from braid.web.admin import Admin
        from braid.web.app import make_app
        from braid.web.http import HttpServer
        from braid.web.metrics import watch_loop_lag
        from braid.web.remote_segments import RemoteSegmentsPool

        self._remote = self.service.remote_segments = RemoteSegmentsPool()
        self._stack.push_async_callback(self._remote.close)
        stores = (self._ledgers, self.metadata)
        admin = Admin(
            self.service,
            self.server,
            lambda: not any(getattr(store, "is_read_only", False) for store in stores),
            lambda: getattr(self._ledgers, "disk_bytes", None),
            getattr(self._ledgers, "space", lambda: (inf, 0)),
        )
        self._http = HttpServer(self.runtime, make_app(admin), self.config.bind_address, self.config.http_port)
        await self._listen("HTTP server", self.config.http_port, self._stack.enter_async_context(self._http))
        if not self.http_url:
            await self._announce(self._http.port)
        admin.http_url = self.http_url
        self._stack.push_async_callback(self._tasks.close)
        self._tasks.spawn(watch_loop_lag(admin), "loop-lag")

    async def _announce(self, http_port: int) -> None:
        broker_id = f"{self.server.host}:{http_port}"
        self.http_url = f"http://{broker_id}"
        await self.service.announce(broker_id, self.http_url)

    async def _listen(self, what: str, port: int, started: Any) -> Any:
        try:
            return await started
        except OSError as error:
            address = f"{self.config.bind_address}:{port}"
            remedy = "stop what uses it or choose another port"
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                remedy = "give an address of this machine (broker.bind_address), such as localhost or 0.0.0.0"
            raise ConfigError(f"The {what} cannot listen on {address}: {error.strerror or error}; {remedy}.") from error
