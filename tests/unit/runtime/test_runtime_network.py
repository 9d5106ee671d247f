"""Listening: one port on every address of a name, and what to call it."""

from __future__ import annotations

import asyncio
import socket

import pytest

from braid.runtime.network import SystemNetwork, public_name, url_host


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "0.0.0.0"])
async def test_a_free_port_is_the_same_on_every_address(host: str) -> None:
    listener = await SystemNetwork().listen(host, 0, asyncio.Protocol)
    try:
        assert listener.port > 0
        transport, _ = await SystemNetwork().connect("127.0.0.1", listener.port, asyncio.Protocol)
        transport.close()
    finally:
        listener.close()


async def test_a_port_in_use_is_refused() -> None:
    listener = await SystemNetwork().listen("127.0.0.1", 0, asyncio.Protocol)
    try:
        with pytest.raises(OSError, match="in use"):
            await SystemNetwork().listen("127.0.0.1", listener.port, asyncio.Protocol)
    finally:
        listener.close()


class Kept(asyncio.Protocol):
    """Notes its connection."""

    def __init__(self, made: list[asyncio.Transport], told: asyncio.Event) -> None:
        self.made = made
        self.told = told

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.made.append(transport)
        self.told.set()


async def test_a_connection_that_was_accepted_as_the_listener_closes_is_its_protocols() -> None:
    """The loop accepts in one turn and makes the transport in the next; a connection must not get lost between the two."""
    loop = asyncio.get_running_loop()
    made: list[asyncio.Transport] = []
    errors: list[dict[str, object]] = []
    told = asyncio.Event()

    def note(_loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        errors.append(context)
        told.set()

    loop.set_exception_handler(note)
    loop.set_debug(True)  # else the loop says nothing of a connection that it has lost

    def factory() -> asyncio.Protocol:  # called in the second turn, before the transport is made
        listener.close()
        return Kept(made, told)

    listener = await SystemNetwork().listen("127.0.0.1", 0, factory)
    transport, _ = await SystemNetwork().connect("127.0.0.1", listener.port, asyncio.Protocol)
    async with asyncio.timeout(10):
        await told.wait()
    assert errors == []
    made[0].abort()
    transport.abort()
    for _turn in range(3):
        await asyncio.sleep(0)
    with pytest.raises(ConnectionRefusedError):
        await SystemNetwork().connect("127.0.0.1", listener.port, asyncio.Protocol)


async def test_a_listener_that_is_closed_accepts_nothing_more() -> None:
    """What waits to be accepted is reset."""
    made: list[asyncio.Transport] = []
    listener = await SystemNetwork().listen("127.0.0.1", 0, lambda: Kept(made, asyncio.Event()))
    with socket.create_connection(("127.0.0.1", listener.port)) as waiting:
        listener.close()
        listener.close()
        for _turn in range(5):
            await asyncio.sleep(0)
        assert made == []
        with pytest.raises(ConnectionResetError):
            waiting.recv(1)


def test_clients_are_never_told_a_wildcard_address() -> None:
    assert public_name("localhost") == "localhost"
    for everywhere in ("", "0.0.0.0", "::"):
        assert public_name(everywhere) == socket.gethostname()
    assert url_host("::1") == "[::1]"
    assert url_host("broker-1") == "broker-1"
