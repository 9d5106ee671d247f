"""Scalable topics on three brokers: any of them takes any call, the leader or the owner answers it, errors keep their class."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote

import httpx
import msgspec
import pytest

from braid.broker.registry import BrokerInfo
from braid.errors import (
    ConnectFailed,
    DeadlineExceeded,
    InvalidArgument,
    NotReady,
    PreconditionFailed,
    SubscriptionNotFound,
    TopicNotFound,
)
from braid.metadata.claims import StaleLeader
from braid.model.names import TopicName
from braid.scalable.api import Sealed
from braid.scalable.config import ScalableConfig
from braid.testing.broker import InProcessBroker
from braid.web.calls import MAX_BODY_BYTES
from braid.web.config import StandaloneConfig
from braid.web.remote_segments import RemoteSegments, RemoteSegmentsPool, _parts

ROOT = "/admin/v2/scalable/public/default"
NAME = "a/b é%"
ENCODED = quote(NAME, safe="")


@pytest.fixture
async def brokers() -> AsyncIterator[InProcessBroker]:
    config = StandaloneConfig(scalable_topics=ScalableConfig(operation_wait_seconds=0.2))
    async with InProcessBroker(brokers=3, config=config) as running:
        yield running


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=30) as client:
        yield client


def urls(brokers: InProcessBroker) -> dict[str, str]:
    return {node.broker_id: node.http_url for node in brokers.nodes}


async def patiently(http: httpx.AsyncClient, method: str, url: str) -> httpx.Response:
    """Ask until there is a leader: each call waits for one, but not for long."""
    while (answer := await http.request(method, url, follow_redirects=True)).status_code == 503:
        pass
    return answer


async def make(brokers: InProcessBroker, http: httpx.AsyncClient, segments: int = 8) -> str:
    """A topic; returns the address of its leader."""
    base = brokers.nodes[1].http_url
    made = await patiently(http, "PUT", f"{base}{ROOT}/{ENCODED}?numInitialSegments={segments}")
    assert made.status_code in (204, 409), made.text
    answer = await patiently(http, "GET", f"{base}{ROOT}/{ENCODED}/stats")
    assert answer.status_code == 200, answer.text
    return urls(brokers)[answer.json()["leader"]]


@pytest.mark.req("R468-6")
async def test_calls_for_the_leader_are_sent_there_by_every_other_broker(
    brokers: InProcessBroker, http: httpx.AsyncClient
) -> None:
    leader = await make(brokers, http)
    path = f"{ROOT}/{ENCODED}"
    asked = [
        ("GET", "/stats"),
        ("PUT", "/subscriptions/s%20%C3%A9?type=QUEUE&initial=latest"),
        ("POST", "/subscriptions/s%20%C3%A9/seek?timestamp=0"),
        ("POST", "/subscriptions/s%20%C3%A9/skip-all"),
        ("POST", "/split/0"),
        ("POST", "/merge/8/9"),
        ("DELETE", "/subscriptions/s%20%C3%A9"),
        ("DELETE", ""),
    ]
    for method, below in asked:
        for other in sorted(set(urls(brokers).values()) - {leader}):
            answer = await http.request(method, f"{other}{path}{below}")
            assert answer.status_code == 307, (method, below, answer.text)
            there = httpx.URL(answer.headers["location"])
            assert f"{there.scheme}://{there.netloc.decode()}" == leader
            assert there.raw_path.decode().startswith(f"{path}{below.partition('?')[0]}?")
            assert all(pair in str(there.query.decode()) for pair in below.partition("?")[2].split("&"))
        answer = await http.request(method, f"{other}{path}{below}", follow_redirects=True)
        assert answer.status_code in (200, 204), (method, below, answer.text)
    for url in urls(brokers).values():
        assert (await http.get(f"{url}{path}", follow_redirects=True)).status_code == 404
        assert (await http.post(f"{url}{path}/split/0", follow_redirects=True)).status_code == 404


async def test_names_and_layouts_are_answered_by_every_broker(brokers: InProcessBroker, http: httpx.AsyncClient) -> None:
    await make(brokers, http)
    found = []
    for url in urls(brokers).values():
        assert (await http.get(f"{url}{ROOT}")).json() == [f"topic://public/default/{NAME}"]
        found.append((await http.get(f"{url}{ROOT}/{ENCODED}")).json())
        assert (await http.put(f"{url}{ROOT}/{ENCODED}")).status_code == 409
    assert found[0] == found[1] == found[2] and len(found[0]["segments"]) == 8


async def owned_elsewhere(brokers: InProcessBroker) -> tuple[TopicName, BrokerInfo, BrokerInfo]:
    """A segment, its owner, and a broker that is not."""
    service = brokers.nodes[0].service
    record = await service.scalable.metadata(TopicName.parse(f"topic://public/default/{NAME}"))
    for each in record.layout.all_segments.values():
        segment = TopicName.parse(f"topic://public/default/{NAME}").segment(each.hash_range, each.segment_id)
        owner = (await service.ownership.find(segment)).broker
        if owner.broker_id != service.ownership.broker_id:
            return segment, owner, service.ownership.me
    raise AssertionError("all segments are on one broker")


@pytest.mark.req("R468-61")
async def test_calls_about_a_segment_are_sent_to_its_owner(brokers: InProcessBroker, http: httpx.AsyncClient) -> None:
    await make(brokers, http)
    segment, owner, other = await owned_elsewhere(brokers)
    path = f"/admin/v2/segments/public/default/{ENCODED}/{segment.descriptor}"
    for method, below in (
        ("PUT", ""),
        ("GET", "/subscriptions"),
        ("PUT", "/subscription/s"),
        ("GET", "/subscription/s/backlog?detail=true"),
        ("POST", "/subscription/s/seek?timestamp=5"),
        ("POST", "/subscription/s/skip-all"),
        ("GET", "/stats"),
        ("DELETE", "/subscription/s"),
        ("POST", "/terminate?force=true"),
        ("DELETE", "?force=true"),
    ):
        answer = await http.request(method, f"{other.http_url}{path}{below}")
        assert answer.status_code == 307, (method, below, answer.text)
        assert answer.headers["location"].startswith(f"{owner.http_url}{path}{below.partition('?')[0]}?")
        answer = await http.request(method, f"{other.http_url}{path}{below}", follow_redirects=True)
        assert answer.status_code in (200, 204), (method, below, answer.text)


@pytest.mark.req("R468-8", "R468-61")
@pytest.mark.parametrize("whom", ["owner", "another broker"])
async def test_remote_segments_are_like_near_ones(brokers: InProcessBroker, http: httpx.AsyncClient, whom: str) -> None:
    await make(brokers, http)
    segment, owner, other = await owned_elsewhere(brokers)
    record = await brokers.nodes[0].service.scalable.metadata(segment.parent)
    name: Any = {"epoch": record.leader_epoch, "incarnation": record.incarnation}
    remote = RemoteSegments(owner if whom == "owner" else other)
    try:
        await remote.create(segment, subscriptions={"a b": "earliest", "é": "latest"}, producers={"p": 41}, **name)
        assert sorted(await remote.subscriptions(segment)) == ["a b", "é"]
        await remote.create_subscription(segment, "c", "latest", **name)
        await remote.delete_subscription(segment, "c", **name)
        await remote.delete_subscription(segment, "c", **name)
        found = await remote.backlog(segment, "é")
        assert (found.messages, found.is_terminated, found.consumers) == (0, False, ())
        await remote.seek(segment, "é", 0, **name)
        await remote.skip_all(segment, "é", **name)
        stale: Any = {**name, "epoch": record.leader_epoch - 1}
        for late in (
            remote.create_subscription(segment, "c", "latest", **stale),
            remote.delete_subscription(segment, "é", **stale),
            remote.seek(segment, "é", 0, **stale),
            remote.skip_all(segment, "é", **stale),
        ):
            with pytest.raises(StaleLeader):
                await late
        stats = await remote.stats(segment)
        assert stats.owner == owner.broker_id and stats.backlog == {"a b": 0, "é": 0}
        with pytest.raises(SubscriptionNotFound, match="missing"):
            await remote.backlog(segment, "missing")
        with pytest.raises(SubscriptionNotFound):
            await remote.seek(segment, "missing", 0, **name)
        unknown = segment.parent.segment(segment.descriptor.hash_range, 99)  # type: ignore[union-attr]
        with pytest.raises(TopicNotFound):
            await remote.subscriptions(unknown)
        with pytest.raises(TopicNotFound):
            await remote.create(unknown, subscriptions={}, producers={}, **name)
        for wrong in ({"epoch": 0}, {"incarnation": "earlier"}):
            with pytest.raises(StaleLeader):
                await remote.create(segment, subscriptions={}, producers={}, **{**name, **wrong})
            with pytest.raises(StaleLeader):
                await remote.terminate(segment, **{**name, **wrong})
            with pytest.raises(StaleLeader):
                await remote.delete(segment, **{**name, **wrong})
        with pytest.raises(PreconditionFailed, match="no operation seals it"):
            await remote.terminate(segment, **name)
        with pytest.raises(PreconditionFailed, match="part of its topic's layout"):
            await remote.delete(segment, **name)
        sealed = await remote.terminate(segment, force=True, **name)
        assert sealed == await remote.terminate(segment, force=True, **name)
        assert sealed.producers["p"] == 41
        assert (await remote.backlog(segment, "é")).is_terminated
        await remote.delete(segment, force=True, **name)
        await remote.delete(segment, force=True, **name)
        with pytest.raises(TopicNotFound):
            await remote.stats(segment)
    finally:
        await remote.close()


@pytest.mark.inv("INV15")
async def test_a_far_owner_with_a_stale_copy_is_asked_again_as_a_near_one_is(
    brokers: InProcessBroker, http: httpx.AsyncClient
) -> None:
    """It drops its copy when it is asked; whoever asks need not know that it had one, wherever it is."""
    await make(brokers, http)
    segment, owner, other = await owned_elsewhere(brokers)
    nodes = {node.broker_id: node.service for node in brokers.nodes}
    stale = await nodes[owner.broker_id].topic(segment, create=True)
    logs = nodes[other.broker_id].logs
    await (await logs.open(segment.managed_ledger_name, stale, create=False)).close()
    assert not stale.log.is_fenced, "nothing has told it"
    stats = await nodes[other.broker_id].segments.stats(segment)
    assert stats.owner == owner.broker_id
    assert nodes[owner.broker_id].topics[str(segment)] is not stale


async def test_segments_of_a_broker_that_does_not_answer() -> None:
    segment = TopicName.parse("segment://public/default/x/0000-7fff-0")
    dead = BrokerInfo(broker_id="localhost:1", service_url="pulsar://localhost:1", http_url="http://localhost:1")
    pool = RemoteSegmentsPool()
    assert pool(dead) is pool(dead)
    with pytest.raises(ConnectFailed, match="localhost:1, which owns the segment"):
        await pool(dead).subscriptions(segment)
    with pytest.raises(NotReady):
        RemoteSegments(BrokerInfo(broker_id="x:1", service_url="pulsar://x:1", http_url=""))
    with pytest.raises(InvalidArgument):
        await pool(dead).subscriptions(TopicName.parse("topic://public/default/x"))
    await pool.close()
    await pool.close()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        await writer.wait_closed()
        ended.set()

    ended = asyncio.Event()
    server = await asyncio.start_server(silent, "localhost", 0)
    port = server.sockets[0].getsockname()[1]
    mute = BrokerInfo(broker_id=f"localhost:{port}", service_url="", http_url=f"http://localhost:{port}")
    remote = RemoteSegments(mute, timeout=0.2)
    with pytest.raises(DeadlineExceeded):
        await remote.terminate(segment, epoch=1, incarnation="x")
    await remote.close()
    await ended.wait()
    server.close()
    await server.wait_closed()


def test_many_names_are_sent_in_parts_that_fit_a_body() -> None:
    producers = {"\u0001" * 200 + str(number): number for number in range(3000)}
    subscriptions = {f"s{number}": "earliest" for number in range(1000)}
    parts = list(_parts(subscriptions, producers))  # type: ignore[arg-type]
    assert len(parts) > 3
    assert {key: value for _some, others in parts for key, value in others.items()} == producers
    assert {key: value for some, _others in parts for key, value in some.items()} == subscriptions
    assert list(_parts({}, {})) == [({}, {})]


def test_a_name_that_fits_no_body_is_left_out_and_told(caplog: pytest.LogCaptureFixture) -> None:
    """Else the hand-over would be refused for ever, and with it every message for the range."""
    producers = {"a": 1, "\u0001" * 200_000: 2, "b" * 700_000: 3, "c" * 100_000: 4}
    parts = list(_parts({"s" * 900_000: "latest"}, producers))
    assert [sorted(name[0] for name in others) for _some, others in parts] == [["a", "b"], ["c"]]
    assert not any(some for some, _others in parts)
    assert all(len(msgspec.json.encode(others)) < MAX_BODY_BYTES for _some, others in parts)
    assert [record.getMessage().count("is not handed over") for record in caplog.records] == [1, 1]


async def test_many_producers_reach_the_owner(brokers: InProcessBroker, http: httpx.AsyncClient) -> None:
    await make(brokers, http)
    segment, owner, _other = await owned_elsewhere(brokers)
    record = await brokers.nodes[0].service.scalable.metadata(segment.parent)
    producers = {f"{'p' * 200}-{number}": number for number in range(9_000)}
    remote = RemoteSegments(owner)
    authority = {"epoch": record.leader_epoch, "incarnation": record.incarnation}
    await remote.create(segment, subscriptions={"s": "earliest"}, producers=producers, **authority)  # type: ignore[arg-type]
    sealed = await remote.terminate(segment, force=True, **authority)  # type: ignore[arg-type]
    assert sealed.producers == producers
    await remote.close()


class Held(RemoteSegments):
    """Segments of another broker, the sealing and deleting of which waits until it is let go on."""

    begun = asyncio.Event()
    go_on = asyncio.Event()

    async def terminate(self, segment: TopicName, *, epoch: int, incarnation: str, force: bool = False) -> Sealed:
        self.begun.set()
        await self.go_on.wait()
        return await super().terminate(segment, epoch=epoch, incarnation=incarnation)

    async def delete(self, segment: TopicName, *, epoch: int, incarnation: str, force: bool = False) -> None:
        self.begun.set()
        await self.go_on.wait()
        await super().delete(segment, epoch=epoch, incarnation=incarnation)


@pytest.mark.parametrize("what", ["split", "delete"])
async def test_while_something_is_under_way_other_changes_are_refused(
    brokers: InProcessBroker, http: httpx.AsyncClient, what: str
) -> None:
    leader = await make(brokers, http)
    path = f"{leader}{ROOT}/{ENCODED}"
    service = next(node.service for node in brokers.nodes if node.http_url == leader)
    links: list[Held] = []
    number = None
    for text, each in (await http.get(f"{path}/stats")).json()["segments"].items():
        if each["owner"] != service.ownership.broker_id:
            number = int(text)
    assert number is not None
    Held.begun, Held.go_on = asyncio.Event(), asyncio.Event()

    def held(broker: BrokerInfo) -> Held:
        links.append(Held(broker))
        return links[-1]

    before, service.remote_segments = service.remote_segments, held
    work = asyncio.ensure_future(http.post(f"{path}/split/{number}") if what == "split" else http.delete(path))
    try:
        await asyncio.wait_for(Held.begun.wait(), 20)
        found = (await http.get(path)).json()["pendingOperation"]
        assert found["kind"] == what and found["operationId"]
        for method, below in (("POST", f"/split/{number}"), ("POST", "/merge/0/1"), ("PUT", "/subscriptions/s")):
            answer = await http.request(method, f"{path}{below}")
            assert answer.status_code == 409, (below, answer.status_code, answer.text)
            assert what[:5] in answer.json()["reason"]  # the deletion, the split
        assert (await http.delete(path)).status_code == 409
        assert (await http.put(path)).status_code == 409
    finally:
        Held.go_on.set()
        done = await work
    assert done.status_code == 204
    service.remote_segments = before
    after = await http.get(path)
    if what == "split":
        assert after.json()["epoch"] == 1 and "pendingOperation" not in after.json()
    else:
        assert after.status_code == 404
        assert (await http.put(path)).status_code == 204
    for link in links:
        await link.close()


async def test_a_broker_that_is_being_closed_says_so_and_fails_in_no_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found with killed brokers: the HTTP client's own error went through to the log."""
    remote = RemoteSegments(BrokerInfo(broker_id="other:1", service_url="", http_url="http://localhost:1"))
    segment = TopicName.parse("segment://public/default/orders/0000-ffff-0")
    is_ending = False

    async def send(*_given: Any) -> Any:
        if is_ending:
            await remote.close()  # under the call
        raise RuntimeError("Cannot send a request, as the client has been closed.")

    monkeypatch.setattr(remote._transport, "send", send)
    with pytest.raises(RuntimeError, match="Cannot send"):  # a bug stays visible as one
        await remote.subscriptions(segment)
    is_ending = True
    for _ in range(2):
        with pytest.raises(NotReady, match="being closed"):
            await remote.subscriptions(segment)
