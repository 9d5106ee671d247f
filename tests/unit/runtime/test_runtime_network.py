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


def test_clients_are_never_told_a_wildcard_address() -> None:
    assert public_name("localhost") == "localhost"
    for everywhere in ("", "0.0.0.0", "::"):
        assert public_name(everywhere) == socket.gethostname()
    assert url_host("::1") == "[::1]"
    assert url_host("broker-1") == "broker-1"
