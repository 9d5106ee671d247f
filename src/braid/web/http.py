"""`HttpServer`: HTTP/1.1 for an ASGI application on the broker's own loop.

Owns the listener and the connections, through the runtime's sockets; the HTTP protocol itself is uvicorn's, without its process
handling (signals, logging, its own sockets). Bounded in connections and header size (INV17).
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from braid.runtime.env import Runtime
from braid.runtime.network import Listener

MAX_CONNECTIONS = 1000
MAX_HEADER_BYTES = 64 << 10
STOP_SECONDS = 2.0
FIRST_REQUEST_SECONDS = 30.0
"""How long a connection may stay without saying anything."""


class _Connection(H11Protocol):
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
            return
        self.timeout_keep_alive_task = self.loop.call_later(FIRST_REQUEST_SECONDS, self.timeout_keep_alive_handler)


class HttpServer:
    """Serves `app` on one port; `async with` starts and stops it."""

    def __init__(self, runtime: Runtime, app: Any, host: str, port: int) -> None:
        self._runtime = runtime
        self._host = host
        self._wanted_port = port
        self._config = Config(
            app,
            interface="asgi3",
            lifespan="off",
            ws="none",
            http="h11",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        )
        self._state = ServerState()
        self._listener: Listener | None = None

    @property
    def port(self) -> int:
        if self._listener is None:
            raise RuntimeError("the HTTP server is not started")
        return self._listener.port

    async def __aenter__(self) -> HttpServer:
        self._config.load()
        self._listener = await self._runtime.network.listen(self._host, self._wanted_port, self._connection)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Finish the requests under way, for a short while; then close what is left."""
        if self._listener is not None:
            self._listener.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        if self._state.tasks:
            await asyncio.wait(set(self._state.tasks), timeout=STOP_SECONDS)
        for task in list(self._state.tasks):
            task.cancel()
        for connection in list(self._state.connections):
            if connection.transport is not None:
                connection.transport.abort()
        await asyncio.sleep(0)

    def _connection(self) -> asyncio.Protocol:
        return _Connection(config=self._config, server_state=self._state, app_state={})
