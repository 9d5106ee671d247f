"""`HttpServer`: HTTP/1.1 for an ASGI application on the broker's own loop.

Owns the listener and the connections, through the runtime's sockets; the HTTP protocol itself is uvicorn's, without its process
handling (signals, logging, its own sockets). Bounded in connections, header size and the time a request may take to arrive
(INV17).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from types import TracebackType
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from braid.runtime.env import Runtime
from braid.runtime.network import Listener

log = logging.getLogger(__name__)
MAX_CONNECTIONS = 1000
MAX_HEADER_BYTES = 64 << 10
MAX_UNWANTED_BYTES = 8 << 20
"""How much of a body nobody reads is taken off the socket, so that its sender gets to read the answer."""
STOP_SECONDS = 2.0
READ_SECONDS = 30.0
"""How long a connection may stay without saying anything, and how long the headers or the body of a request may take."""
TOO_SLOW = (
    b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: 62\r\n\r\n"
    b'{"reason":"The request did not arrive in time; send it anew."}'
)


class _Connection(H11Protocol):
    """One client; closed when it is too slow or sends what nobody wants."""

    def __init__(self, *args: Any, read_seconds: float, is_over: Callable[[], bool], **options: Any) -> None:
        super().__init__(*args, **options)
        self._is_over = is_over
        self._read_seconds = read_seconds
        self._deadline: asyncio.TimerHandle | None = None
        self._unwanted = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS or self._is_over():  # accepted just before the server stopped
            transport.abort()
            return
        self.timeout_keep_alive_task = self.loop.call_later(self._read_seconds, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        self._await_more(False)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_answered and self.conn.their_state is h11.SEND_BODY:
            self._unwanted += len(data)
            if self._unwanted > MAX_UNWANTED_BYTES:
                self.transport.abort()
                return
        super().data_received(data)
        has_begun = self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
        self._await_more(has_begun or self.conn.their_state is h11.SEND_BODY)

    @property
    def _is_answered(self) -> bool:
        cycle: Any = self.cycle  # none before the first request
        return cycle is not None and bool(cycle.response_complete)

    def _await_more(self, is_needed: bool) -> None:
        """Whether the client has more to send of what it began; it has one deadline for all of it."""
        if not is_needed and self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        elif is_needed and self._deadline is None:
            self._deadline = self.loop.call_later(self._read_seconds, self._too_slow)

    def _too_slow(self) -> None:
        if self.transport.is_closing():
            return
        cycle: Any = self.cycle
        if cycle is None or cycle.response_complete or not cycle.response_started:
            self.transport.write(TOO_SLOW)
        self.transport.close()


def _given_up_quietly(app: Any) -> Any:
    """The application, whose requests are cancelled only by a server that stops: that is no failure of the application."""

    async def serve(scope: Any, receive: Any, send: Any) -> None:
        try:
            await app(scope, receive, send)
        except asyncio.CancelledError:
            log.debug("the server stops; %s is not answered any more", scope.get("path"))

    return serve


class HttpServer:
    """Serves `app` on one port; `async with` starts and stops it."""

    def __init__(self, runtime: Runtime, app: Any, host: str, port: int, read_seconds: float = READ_SECONDS) -> None:
        self._runtime = runtime
        self._read_seconds = read_seconds
        self._host = host
        self._wanted_port = port
        self._config = Config(
            _given_up_quietly(app),
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
        self._is_over = False

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
        self._is_over = True
        if self._listener is not None:
            self._listener.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        if self._state.tasks:
            await asyncio.wait(set(self._state.tasks), timeout=STOP_SECONDS)
        self._drop()
        await asyncio.sleep(0)

    def abort(self) -> None:
        """Close the port and drop every connection at once."""
        self._is_over = True
        if self._listener is not None:
            self._listener.close()
        self._drop()

    def _drop(self) -> None:
        """Close every connection; what is being answered on them is given up."""
        for connection in list(self._state.connections):
            cycle: Any = getattr(connection, "cycle", None)
            if cycle is not None:
                cycle.disconnected = True  # the protocol would miss the answer, and say so in the log
            if connection.transport is not None:
                connection.transport.abort()
        for task in list(self._state.tasks):
            task.cancel()

    def _connection(self) -> asyncio.Protocol:
        return _Connection(
            config=self._config,
            server_state=self._state,
            app_state={},
            read_seconds=self._read_seconds,
            is_over=lambda: self._is_over,
        )
