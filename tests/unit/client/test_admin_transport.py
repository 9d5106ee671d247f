"""What `AdminClient` does when brokers are down, slow, elsewhere, or not brokers at all: scripted peers on real sockets."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from types import TracebackType
from typing import Any

import pytest

import braid
from braid.client.admin import AdminClient
from braid.client.messages import MessageId
from braid.errors import (
    Closed,
    ConfigError,
    Conflict,
    ConnectFailed,
    ConnectionLost,
    DeadlineExceeded,
    Forbidden,
    InvalidArgument,
    InvalidTopicName,
    NotAllowed,
    NotFound,
    NotReady,
    Overloaded,
    PreconditionFailed,
    ProtocolError,
    Rejected,
    RequestError,
    TooLarge,
    Unauthenticated,
    Unavailable,
    UnknownFailure,
)

Asked = tuple[str, str, bytes]


class Peer:
    """Listens on a free port, notes each request, and answers with the next of `answers`.

    An answer is bytes to send (then the connection is closed), None to close without a word, or an event to wait for.
    """

    def __init__(self, *answers: bytes | asyncio.Event | None) -> None:
        self.answers = list(answers)
        self.asked: list[Asked] = []
        self._serving: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Peer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        await self._server.wait_closed()
        for each in self._serving:
            each.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            await self._answer(reader, writer)
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, target, _version = head.split("\r\n")[0].split(" ")
        length = next((int(line[15:]) for line in head.split("\r\n") if line.lower().startswith("content-length:")), 0)
        self.asked.append((method, target, await reader.readexactly(length)))
        answer = self.answers.pop(0)
        if isinstance(answer, asyncio.Event):
            await answer.wait()
        elif answer is not None:
            writer.write(answer)
            await writer.drain()


def http(status: int, body: bytes = b"", kind: str = "application/json", **headers: str) -> bytes:
    extra = "".join(f"{key.replace('_', '-')}: {value}\r\n" for key, value in headers.items())
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n{extra}\r\n"
    return head.encode() + body


async def free_address() -> str:
    """An address where nobody listens."""
    async with Peer() as peer:
        return peer.url


async def test_the_next_address_is_asked_when_one_is_down_and_kept_while_it_answers() -> None:
    nobody = await free_address()
    async with Peer(http(200, b'["a"]'), http(200, b'["b"]')) as peer, AdminClient([nobody, peer.url]) as admin:
        assert await admin.clusters.list() == ["a"]
        assert await admin.clusters.list() == ["b"]
        assert [asked[1] for asked in peer.asked] == ["/admin/v2/clusters"] * 2


async def test_an_address_that_lost_an_answer_is_not_asked_again_while_another_answers() -> None:
    async with Peer(None) as shaky, Peer(http(200, b"[]"), http(200, b"[]")) as steady:
        async with AdminClient([shaky.url, steady.url]) as admin:
            await admin.clusters.list()
            await admin.clusters.list()
        assert (len(shaky.asked), len(steady.asked)) == (1, 2)


async def test_even_what_must_not_be_done_twice_goes_to_the_next_address_if_it_was_never_sent() -> None:
    nobody = await free_address()
    async with Peer(http(204)) as peer, AdminClient(f"{nobody},{peer.url}/") as admin:
        await admin.topics.create("orders", partitions=3)
        assert peer.asked == [("PUT", "/admin/v2/persistent/public/default/orders/partitions", b"3")]


async def test_nobody_answers() -> None:
    nobody = await free_address()
    async with AdminClient(nobody) as admin:
        with pytest.raises(ConnectFailed, match=rf"No broker answers at {nobody} \(connection refused\). Start one with"):
            await admin.topics.list()


async def test_a_lost_answer_is_asked_for_again_only_if_that_is_harmless() -> None:
    async with Peer(None, http(200, b"[]"), None) as peer, AdminClient(peer.url) as admin:
        assert await admin.topics.list() == []
        assert len(peer.asked) == 2
        with pytest.raises(ConnectionLost, match=r"without an answer.*binary protocol\. Whether it was done is not known"):
            await admin.subscriptions.skip("orders", "audit", 1)
        assert len(peer.asked) == 3


async def test_an_answer_that_breaks_off_says_that_nobody_knows() -> None:
    half = http(200, b'["abc"]')[:-3]
    async with Peer(half, half, half) as peer, AdminClient(peer.url) as admin:
        with pytest.raises(ConnectionLost, match=r"topics list: the connection to \S+ broke"):
            await admin.topics.list()
        assert len(peer.asked) == 2
        with pytest.raises(ConnectionLost, match="Whether it was done is not known; look before you try again"):
            await admin.topics.create("orders")
        assert len(peer.asked) == 3


async def test_a_redirect_to_the_owner_keeps_method_and_body() -> None:
    async with Peer(http(204)) as owner:
        location = f"{owner.url}/admin/v2/persistent/public/default/orders/partitions?authoritative=true"
        async with Peer(http(307, location=location)) as first, AdminClient(first.url) as admin:
            await admin.topics.grow("orders", 8)
    assert owner.asked == [("POST", "/admin/v2/persistent/public/default/orders/partitions?authoritative=true", b"8")]


@pytest.mark.inv("INV17")
async def test_an_endless_chain_of_redirects_ends() -> None:
    async with Peer() as peer:
        peer.answers = [http(307, location=f"{peer.url}/again")] * 20
        async with AdminClient(peer.url) as admin:
            with pytest.raises(NotReady, match="from broker to broker more than 10 times"):
                await admin.topics.stats("orders")


async def test_a_redirect_to_a_dead_broker_names_that_broker() -> None:
    nobody = await free_address()
    async with Peer(http(307, location=f"{nobody}/admin/v2/x")) as first, AdminClient(first.url) as admin:
        with pytest.raises(ConnectFailed, match=nobody):
            await admin.topics.unload("orders")


@pytest.mark.inv("INV17")
async def test_a_call_has_one_deadline() -> None:
    never = asyncio.Event()
    async with Peer(never, never) as peer:
        async with AdminClient(peer.url, timeout=0.05) as admin:
            with pytest.raises(DeadlineExceeded, match=r"topics list: .* did not answer within 0.05 s\."):
                await admin.topics.list()
            with pytest.raises(DeadlineExceeded, match="whether it was done is not known"):
                await admin.topics.create("orders")
        never.set()


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, Rejected),
        (401, Unauthenticated),
        (403, Forbidden),
        (404, NotFound),
        (405, NotAllowed),
        (406, Rejected),
        (409, Conflict),
        (412, PreconditionFailed),
        (413, TooLarge),
        (422, Rejected),
        (429, Overloaded),
        (500, UnknownFailure),
        (501, NotAllowed),
        (503, Unavailable),
        (599, Unavailable),
    ],
)
async def test_refusals_keep_their_status_and_their_words(status: int, kind: type[RequestError]) -> None:
    async with Peer(http(status, b'{"reason":"Because \xc3\xa9."}')) as peer, AdminClient(peer.url) as admin:
        with pytest.raises(kind) as refused:
            await admin.topics.stats("orders")
        assert (refused.value.message, refused.value.http_status) == ("Because é.", status)
        assert type(refused.value) is kind


@pytest.mark.parametrize("body", [b"<h1>Bad\ngateway</h1>", b"", b'{"reason":7}', b"[1]", b"\xff"])
async def test_refusals_by_others_than_brokers_are_told_as_they_are(body: bytes) -> None:
    async with Peer(http(502, body, "text/html")) as peer, AdminClient(peer.url) as admin:
        with pytest.raises(Unavailable, match=r"topics stats: http://\S+ answered 502 to GET") as refused:
            await admin.topics.stats("orders")
        assert "\n" not in refused.value.message


async def test_a_peer_that_speaks_something_else() -> None:
    async with Peer(b"SSH-2.0-x\r\n\r\n", b"SSH-2.0-x\r\n\r\n") as peer, AdminClient(peer.url) as admin:
        with pytest.raises(ProtocolError, match="does not answer in HTTP"):
            await admin.topics.list()
    async with Peer(http(200, b"<html>", "text/html"), http(200, b'{"a":1}')) as peer, AdminClient(peer.url) as admin:
        with pytest.raises(ProtocolError, match="cannot be read"):
            await admin.topics.list()
        with pytest.raises(ProtocolError, match="is this the admin API of a broker"):
            await admin.topics.list()


async def test_an_answer_that_is_no_message() -> None:
    bad = {"X_Pulsar_Message_ID": "1:2", "X_Pulsar_sequence_id": "many"}
    async with Peer(http(200, b"x"), http(200, b"x", **bad)) as peer, AdminClient(peer.url) as admin:
        with pytest.raises(ProtocolError, match="is no message"):
            await admin.topics.message("orders", MessageId(1, 2))
        with pytest.raises(ProtocolError, match="has a header that cannot be read"):
            await admin.subscriptions.peek("orders", "audit")


@pytest.mark.inv("INV17")
async def test_an_answer_without_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("braid.client.admin_transport.MAX_REPLY_BYTES", 100)
    async with Peer(http(200, b"x" * 101)) as peer, AdminClient(peer.url) as admin:
        with pytest.raises(TooLarge, match="more than 100 bytes"):
            await admin.topics.list()


async def test_unknown_fields_are_ignored_and_missing_ones_have_defaults() -> None:
    body = b'{"msgRateIn":1.5,"future":{"x":[1]},"subscriptions":{"s":{"msgBacklog":3,"new":1}}}'
    async with Peer(http(200, body)) as peer, AdminClient(peer.url) as admin:
        stats = await admin.topics.stats("orders")
    assert (stats.msg_rate_in, stats.subscriptions["s"].msg_backlog, stats.publishers) == (1.5, 3, [])


async def test_names_reach_the_broker_as_one_part_of_the_path() -> None:
    async with Peer(*[http(204)] * 3) as peer, AdminClient(peer.url) as admin:
        await admin.topics.unload("persistent://a/b/x y?#%ü")
        await admin.subscriptions.skip_all("t", "a/b")
        await admin.subscriptions.skip_all("t", "..")
    assert [asked[1] for asked in peer.asked] == [
        "/admin/v2/persistent/a/b/x%20y%3F%23%25%C3%BC/unload",
        "/admin/v2/persistent/public/default/t/subscription/a%2Fb/skip_all",
        "/admin/v2/persistent/public/default/t/subscription/%2E%2E/skip_all",
    ]


Call = Callable[[AdminClient], Coroutine[Any, Any, Any]]


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda admin: admin.topics.stats("a/b"), InvalidTopicName),
        (lambda admin: admin.topics.stats(""), InvalidTopicName),
        (lambda admin: admin.topics.stats("non-persistent://a/b/c"), NotAllowed),
        (lambda admin: admin.topics.list("public"), InvalidTopicName),
        (lambda admin: admin.tenants.get(" "), InvalidArgument),
        (lambda admin: admin.subscriptions.delete("t", ""), InvalidArgument),
        (lambda admin: admin.subscriptions.skip("t", "s", -1), InvalidArgument),
        (lambda admin: admin.subscriptions.peek("t", "s", 0), InvalidArgument),
        (lambda admin: admin.subscriptions.reset("t", "s", "middle"), InvalidArgument),
        (lambda admin: admin.topics.create("t", partitions=2, properties={"a": "b"}), InvalidArgument),
        (lambda admin: admin.topics.message("t", MessageId(-1, -1)), InvalidArgument),
        (lambda admin: admin.brokers.drain(""), InvalidArgument),
        (lambda admin: admin.bundles.unload("a/b", ""), InvalidArgument),
    ],
)
async def test_what_cannot_be_right_is_refused_before_anybody_is_asked(call: Call, kind: type[Exception]) -> None:
    async with Peer() as peer, AdminClient(peer.url) as admin:
        with pytest.raises(kind):
            await call(admin)
        assert peer.asked == []


@pytest.mark.parametrize(
    "url", ["", "localhost", "localhost:8080", "ftp://x", "http://", "http://x:99999", "http://x:0", "http://x?a=b", ","]
)
def test_addresses_that_cannot_be_used(url: str) -> None:
    with pytest.raises(ConfigError, match="write http://host:port"):
        AdminClient(url)


def test_other_wrong_uses() -> None:
    with pytest.raises(ConfigError, match="That is the binary protocol"):
        AdminClient("pulsar://localhost:6650")
    with pytest.raises(ConfigError, match="Give 1 to 100 admin URLs"):
        AdminClient([])
    with pytest.raises(ConfigError, match="must be above 0"):
        AdminClient(timeout=0)


async def test_a_closed_client_says_so() -> None:
    async with AdminClient() as admin:
        pass
    await admin.close()
    with pytest.raises(Closed):
        await admin.topics.list()


def test_without_the_http_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(ConfigError, match=r"braidmq\[server\]"):
        braid.AdminClient()
