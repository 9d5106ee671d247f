"""The Segments API: what a leader does to segments that other brokers own, over HTTP, and what administrators may do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from braid.errors import TopicTerminated
from braid.model.names import TopicName
from braid.testing.broker import BackgroundBroker
from braid.testing.raw_client import RawClient
from braid.wire.types import CommandType

SCALABLE = "/admin/v2/scalable/public/default"
SEGMENTS = "/admin/v2/segments/public/default"


@pytest.fixture(scope="module")
def broker() -> Iterator[BackgroundBroker]:
    with BackgroundBroker() as running:
        yield running


@pytest.fixture(scope="module")
def http(broker: BackgroundBroker) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=broker.http_url, timeout=30) as client:
        yield client


@pytest.fixture
def name(http: httpx.Client, request: pytest.FixtureRequest) -> str:
    """A topic with two segments."""
    found = f"t-{abs(hash(request.node.name))}"
    assert http.put(f"{SCALABLE}/{found}", params={"numInitialSegments": 2}).status_code == 204
    return found


async def send(broker: BackgroundBroker, segment: str, count: int) -> None:
    """Messages into one segment, as a client that knows nothing of layouts sends them."""
    client = await RawClient.connect(broker.service_url)
    try:
        await client.producer(segment)
        for number in range(count):
            await client.store(b"%d" % number, number)
    finally:
        client.close()


def refused(answer: httpx.Response, status: int, *words: str) -> None:
    assert answer.status_code == status, answer.text
    assert all(word in answer.json()["reason"] for word in words), answer.text


def record(http: httpx.Client, name: str) -> dict[str, Any]:
    return dict(http.get(f"{SCALABLE}/{name}").json())


@pytest.mark.req("R468-57")
def test_creation_is_repeatable_and_makes_cursors(http: httpx.Client, name: str) -> None:
    segment = f"{SEGMENTS}/{name}/0000-7fff-0"
    for body in (
        ["a", "b c"],
        ["a"],
        None,
        {"subscriptions": ["d"]},
        {"subscriptions": {"e": "latest"}, "producers": {"p": 7}},
    ):
        assert http.put(segment, json=body).status_code == 204, body
    assert sorted(http.get(f"{segment}/subscriptions").json()) == ["a", "b c", "d", "e"]
    known = record(http, name)
    body = {"epoch": known["leaderEpoch"], "incarnation": known["incarnation"]}
    assert http.put(segment, json=body).status_code == 204


def test_creation_is_refused_to_whoever_does_not_lead(http: httpx.Client, name: str) -> None:
    known = record(http, name)
    good = {"epoch": known["leaderEpoch"], "incarnation": known["incarnation"]}
    segment = f"{SEGMENTS}/{name}/0000-7fff-0"
    for wrong in ({"epoch": 0}, {"incarnation": "another"}):
        answer = http.put(segment, json=good | wrong)
        refused(answer, 409)
        assert answer.headers["x-braid-error"] == "StaleLeader"
        query = {**good, **wrong}
        for method, path in (("POST", f"{segment}/terminate"), ("DELETE", f"{segment}?force=true")):
            answer = http.request(method, path, params=httpx.URL(path).params.merge(query))
            refused(answer, 409)
    for missing in (f"{SEGMENTS}/{name}/0000-7fff-9", f"{SEGMENTS}/{name}/0000-3fff-0", f"{SEGMENTS}/missing/0000-ffff-0"):
        answer = http.put(missing, json=good)
        refused(answer, 404)
        assert answer.headers["x-braid-error"] == "TopicNotFound"
        refused(http.put(missing), 404)
        refused(http.post(f"{missing}/terminate"), 404)


@pytest.mark.req("R468-58")
def test_a_sealed_segment_takes_no_more_messages(http: httpx.Client, name: str, broker: BackgroundBroker) -> None:
    segment, full = f"{SEGMENTS}/{name}/0000-7fff-0", f"segment://public/default/{name}/0000-7fff-0"
    broker.run(send(broker, full, 3))
    refused(http.post(f"{segment}/terminate"), 412, "active", "split or merge it")
    first = http.post(f"{segment}/terminate?force=true")
    assert first.status_code == 200
    assert first.json()["position"]["entryId"] == 2 and first.json()["position"]["ledgerId"] >= 0
    assert isinstance(first.json()["producers"], dict)
    assert http.post(f"{segment}/terminate?force=true").json() == first.json()
    with pytest.raises(TopicTerminated):
        broker.run(send(broker, full, 1))


@pytest.mark.req("R468-59")
def test_deletion_removes_the_topic(http: httpx.Client, name: str, broker: BackgroundBroker) -> None:
    segment = f"{SEGMENTS}/{name}/8000-ffff-1"
    full = f"segment://public/default/{name}/8000-ffff-1"

    async def while_attached() -> None:
        client = await RawClient.connect(broker.service_url)
        await client.producer(full)
        await client.store(b"x", 0)
        async with httpx.AsyncClient(base_url=broker.http_url) as inner:
            refused(await inner.delete(segment), 412, "producers and consumers")
            assert (await inner.delete(f"{segment}?force=true")).status_code == 204
        await client.expect(CommandType.CLOSE_PRODUCER)
        client.close()

    refused(http.delete(segment), 412, "active", "force")
    broker.run(while_attached())
    refused(http.get(f"{segment}/stats"), 404)
    refused(http.get(f"{segment}/subscriptions"), 404)
    assert http.delete(f"{segment}?force=true").status_code == 204
    service = broker.broker.nodes[0].service

    async def exists() -> bool:
        return await service.logs.exists(TopicName.parse(full).managed_ledger_name)

    assert not broker.run(exists())


@pytest.mark.req("R468-60")
@pytest.mark.parametrize(
    ("descriptor", "status"),
    [
        ("0000-7fff-0", 200),
        ("0-7fff-0", 200),
        ("0000-7FFF-0", 200),
        ("0000-7fff", 412),
        ("0000-7fff-x", 412),
        ("7fff-0000-0", 412),
        ("0000-1ffff-0", 412),
        ("0000-7fff--1", 412),
        ("zzzz-7fff-0", 412),
        ("0000-7fff-0%2Fx", 412),
        ("%20", 412),
        ("non-persistent", 412),
        ("0000-7fff-1", 404),
        ("0000-3fff-0", 404),
    ],
)
def test_descriptors(http: httpx.Client, broker: BackgroundBroker, descriptor: str, status: int) -> None:
    http.put(f"{SCALABLE}/described", params={"numInitialSegments": 2})
    answer = http.get(f"{SEGMENTS}/described/{descriptor}/stats")
    assert answer.status_code == status, answer.text
    if status == 200:
        assert answer.json()["owner"] == broker.http_url.removeprefix("http://")


def test_subscriptions_of_one_segment(http: httpx.Client, name: str, broker: BackgroundBroker) -> None:
    segment = f"{SEGMENTS}/{name}/0000-7fff-0"
    subscription = f"{segment}/subscription/{quote('é %', safe='')}"

    refused(http.get(f"{subscription}/backlog"), 404)
    refused(http.post(f"{subscription}/seek?timestamp=0"), 404)
    refused(http.post(f"{subscription}/skip-all"), 404)
    for _twice in range(2):
        assert http.put(subscription).status_code == 204
    broker.run(send(broker, f"segment://public/default/{name}/0000-7fff-0", 5))
    assert http.get(f"{subscription}/backlog").json() == 5
    detail = http.get(f"{subscription}/backlog?detail=true").json()
    assert (detail["messages"], detail["isTerminated"], detail["consumers"]) == (5, False, [])
    assert http.post(f"{subscription}/skip-all").status_code == 204
    assert http.get(f"{subscription}/backlog").json() == 0
    refused(http.post(f"{subscription}/seek"), 412, "timestamp")
    assert http.post(f"{subscription}/seek?timestamp=0").status_code == 204
    assert http.get(f"{subscription}/backlog").json() == 5
    stats = http.get(f"{segment}/stats").json()
    assert stats["messages"] == 5 and stats["backlog"] == {"é %": 5}
    assert http.put(f"{segment}/subscription/late?initial=latest").status_code == 204
    assert http.get(f"{segment}/subscription/late/backlog").json() == 0
    for _twice in range(2):
        assert http.delete(subscription).status_code == 204
    refused(http.get(f"{subscription}/backlog"), 404)
    missing = f"{SEGMENTS}/{name}/0000-7fff-77/subscription/s"
    refused(http.get(f"{missing}/backlog"), 404)
    refused(http.put(missing), 404)
    assert http.delete(missing).status_code in (204, 404)


def test_bodies_that_cannot_be_used(http: httpx.Client, name: str) -> None:
    segment = f"{SEGMENTS}/{name}/0000-7fff-0"
    body: Any
    for body in (
        {"subs": []},
        {"subscriptions": {"a": "middle"}},
        {"epoch": -1},
        {"producers": {"p": "x"}},
        [1],
        "x",
        {"epoch": 1.5},
    ):
        assert http.put(segment, json=body).status_code == 400, body
    for body in ([" a"], ["a/b"], {"subscriptions": {"%2F": "earliest"}}):
        assert http.put(segment, json=body).status_code == 412, body
    assert http.get(f"{segment}/subscriptions").json() == []


def test_a_segment_that_is_stored_in_a_regular_topic(http: httpx.Client) -> None:
    assert http.put("/admin/v2/persistent/public/default/regular/partitions", content=b"1").status_code == 204
    part = f"{SEGMENTS}/regular-partition-0/persistent"
    assert http.put(f"{part}/subscription/s").status_code == 204
    assert http.get(f"{part}/subscription/s/backlog").json() == 0
    assert http.get(f"{part}/subscriptions").json() == ["s"]
    # It belongs to no scalable topic, so nobody may end or delete it as if it did.
    refused(http.post(f"{part}/terminate"), 404)
    refused(http.delete(f"{part}?force=true"), 404)
    refused(http.put(part, json={"epoch": 1, "incarnation": "x"}), 404)
    assert http.get("/admin/v2/persistent/public/default/regular-partition-0/subscriptions").json() == ["s"]
