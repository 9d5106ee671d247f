"""Sockets: listening and connecting with asyncio protocols; the simulator replaces this by links of its own."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

P = TypeVar("P", bound=asyncio.BaseProtocol)


class Listener(Protocol):
    """An open listening socket."""

    host: str
    port: int

    def close(self) -> None:
        """Stop accepting; connections already made live on. One that was just accepted shows up in the next turns of the loop,
        and its protocol, or whoever made it, has to end it."""
        ...


class Network(Protocol):
    """Where connections come from."""

    async def listen(self, host: str, port: int, factory: Callable[[], asyncio.BaseProtocol]) -> Listener:
        """Accept connections on `port` (0 = any free one)."""
        ...

    async def connect(self, host: str, port: int, factory: Callable[[], P]) -> tuple[asyncio.Transport, P]: ...


class SystemListener:
    """One port, on every address the host name stands for."""

    def __init__(self, servers: list[asyncio.Server], host: str, port: int) -> None:
        self._servers = servers
        self.host = host
        self.port = port

    def close(self) -> None:
        """The loop accepts a connection in one turn and makes its transport in the next, which fails if the server is closed in
        between: nobody would have the socket then. So nothing is accepted from now on, and the server is closed behind what the
        loop has queued already."""
        loop = asyncio.get_running_loop()
        for server in self._servers:
            for sock in server.sockets:
                loop.remove_reader(sock.fileno())
            loop.call_soon(server.close)


class SystemNetwork:
    """The machine's TCP stack."""

    async def listen(self, host: str, port: int, factory: Callable[[], asyncio.BaseProtocol]) -> Listener:
        loop = asyncio.get_running_loop()
        infos = await loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        sockets = _bind_same_port(infos, port)
        servers = [await loop.create_server(factory, sock=sock, backlog=1024) for sock in sockets]
        return SystemListener(servers, host, sockets[0].getsockname()[1])

    async def connect(self, host: str, port: int, factory: Callable[[], P]) -> tuple[asyncio.Transport, P]:
        transport, protocol = await asyncio.get_running_loop().create_connection(factory, host, port)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return transport, protocol


def hand_over(protocol: asyncio.BaseProtocol, data: bytes) -> None:
    """Give received bytes to a protocol of either kind, as an event loop does. For networks that have no sockets."""
    if isinstance(protocol, asyncio.Protocol):
        protocol.data_received(data)
    elif isinstance(protocol, asyncio.BufferedProtocol):
        while data:
            room = memoryview(protocol.get_buffer(len(data)))
            room[: len(data)] = data[: len(room)]
            protocol.buffer_updated(min(len(room), len(data)))
            data = data[len(room) :]


def public_name(bind_address: str) -> str:
    """What others should call the host that listens on `bind_address`: the machine's name if it listens on all addresses."""
    return socket.gethostname() if bind_address in ("", "0.0.0.0", "::") else bind_address


def url_host(host: str) -> str:
    """A host as it stands in a URL: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host


def _bind_same_port(infos: list[tuple[Any, ...]], port: int) -> list[socket.socket]:
    """Bind every address on one port. With port 0 the first address picks it; a clash on the others picks anew."""
    addresses = list(dict.fromkeys((info[0], info[4]) for info in infos))
    for attempt in range(20):
        bound: list[socket.socket] = []
        chosen = port
        try:
            for family, address in addresses:
                try:
                    # Said to be TCP, so that asyncio sends small answers at once (it asks the socket).
                    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
                except OSError:  # the machine knows the family but does not have it (no IPv6)
                    continue
                bound.append(sock)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                try:
                    sock.bind((address[0], chosen, *address[2:]))
                except OSError as exc:
                    if exc.errno != errno.EADDRNOTAVAIL:
                        raise
                    bound.pop().close()
                    continue
                chosen = sock.getsockname()[1]
                sock.setblocking(False)
        except OSError:
            for sock in bound:
                sock.close()
            if port or attempt == 19:
                raise
            continue
        if bound:
            return bound
    raise OSError(errno.EADDRNOTAVAIL, "no address to listen on")
