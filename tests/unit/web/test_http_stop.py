"""A server that stops while requests are being answered: it closes their connections, and logs nothing of it."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httpx
import pytest

from braid.runtime.env import Runtime
from braid.testing.broker import InProcessBroker
from braid.web import http as http_module
from braid.web.http import HttpServer


class Waiting:
    """An application that never ends its answer; if `has_begun`, some of it is sent. One that is busy has its next step before
    it always."""

    def __init__(self, *, has_begun: bool, is_busy: bool) -> None:
        self.has_begun = has_begun
        self.is_busy = is_busy
        self.is_asked = asyncio.Event()
        self.is_over = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self.has_begun:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"10")]})
            await send({"type": "http.response.body", "body": b"12345", "more_body": True})
        self.is_asked.set()
        try:
            while self.is_busy:  # noqa: ASYNC110 - to be scheduled again is the point
                await asyncio.sleep(0)
            await asyncio.Event().wait()
        finally:
            self.is_over.set()


@pytest.mark.parametrize("has_begun", [False, True])
@pytest.mark.parametrize("is_busy", [False, True])
@pytest.mark.parametrize("how", ["killed", "stopped"])
async def test_requests_under_way_are_given_up_quietly(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, has_begun: bool, is_busy: bool, how: str
) -> None:
    monkeypatch.setattr(http_module, "STOP_SECONDS", 0.01)
    caplog.set_level(logging.INFO)
    app = Waiting(has_begun=has_begun, is_busy=is_busy)
    async with httpx.AsyncClient(timeout=10) as client:
        async with HttpServer(Runtime(), app, "127.0.0.1", 0) as server:
            asking = asyncio.gather(client.get(f"http://127.0.0.1:{server.port}/"), return_exceptions=True)
            await app.is_asked.wait()
            if how == "killed":
                server.abort()
        await app.is_over.wait()
        (answer,) = await asking
    assert isinstance(answer, httpx.TransportError)
    assert [each.getMessage() for each in caplog.records if each.name.startswith(("uvicorn", "asyncio", "braid"))] == []


async def test_a_killed_broker_says_nothing_of_the_requests_it_had(caplog: pytest.LogCaptureFixture) -> None:
    async with InProcessBroker(brokers=2) as brokers, httpx.AsyncClient(timeout=10) as client:
        node = brokers.nodes[1]
        begun = asyncio.Event()

        async def held(*_arguments: Any, **_options: Any) -> Any:
            begun.set()
            await asyncio.Event().wait()

        node.service.namespaces.policies = held  # type: ignore[method-assign]
        asking = asyncio.gather(client.get(f"{node.http_url}/admin/v2/persistent/public/default"), return_exceptions=True)
        await begun.wait()
        await brokers.kill(1)
        (answer,) = await asking
        assert isinstance(answer, httpx.TransportError)
    assert [each.getMessage() for each in caplog.records if "ASGI" in each.getMessage()] == []


class StopsAsItAccepts(HttpServer):
    """Stopped between the turn that accepts a connection and the one that makes its transport."""

    def _connection(self) -> asyncio.Protocol:
        self.abort()
        return super()._connection()


async def test_a_connection_that_was_accepted_as_the_server_stops_is_dropped() -> None:
    async with StopsAsItAccepts(Runtime(), Waiting(has_begun=False, is_busy=False), "127.0.0.1", 0) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        try:
            async with asyncio.timeout(10):
                assert await reader.read() == b""
        finally:
            writer.close()
        assert server._state.connections == set()
