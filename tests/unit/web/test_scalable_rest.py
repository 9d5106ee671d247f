"""Scalable topics over HTTP: the calls of scalable.md 7.6, their statuses, names that need escaping, and what stays refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from braid.model.names import TopicName
from braid.scalable.config import ScalableConfig
from braid.scalable.records import consumer_path
from braid.testing.broker import BackgroundBroker
from braid.testing.raw_client import RawClient
from braid.web.config import StandaloneConfig

ROOT = "/admin/v2/scalable/public/default"


@pytest.fixture(scope="module")
def broker() -> Iterator[BackgroundBroker]:
    with BackgroundBroker() as running:
        yield running


@pytest.fixture(scope="module")
def http(broker: BackgroundBroker) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=broker.http_url, timeout=30) as client:
        yield client


@pytest.fixture
def topic(http: httpx.Client, request: pytest.FixtureRequest) -> str:
    """The path of a new topic with two segments."""
    path = f"{ROOT}/t-{abs(hash(request.node.name))}"
    assert http.put(path, params={"numInitialSegments": 2}).status_code == 204
    return path


def layout(http: httpx.Client, path: str) -> dict[str, Any]:
    answer = http.get(path)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def refused(answer: httpx.Response, status: int, *words: str) -> None:
    assert answer.status_code == status, answer.text
    assert all(word in answer.json()["reason"] for word in words), answer.text


@pytest.mark.req("R468-76", "R468-77", "R468-78", "R468-79")
def test_a_topic_is_made_shown_listed_and_deleted(http: httpx.Client) -> None:
    path = f"{ROOT}/life"
    refused(http.get(path), 404, "topic://public/default/life")
    assert http.put(path, params={"numInitialSegments": 3}, json={"team": "billing", "tier": "1"}).status_code == 204
    refused(http.put(path), 409)
    found = layout(http, path)
    assert (found["epoch"], found["nextSegmentId"], found["properties"]) == (0, 3, {"team": "billing", "tier": "1"})
    assert found["routing"] == "high16" and found["incarnation"]
    assert {key: found["segments"]["1"][key] for key in found["segments"]["1"] if not key.startswith("createdAtMs")} == {
        "segmentId": 1,
        "hashRange": {"start": 0x5555, "end": 0xAAA9},
        "state": "ACTIVE",
        "parentIds": [],
        "childIds": [],
        "createdAtEpoch": 0,
        "sealedAtEpoch": -1,
        "sealedAtMs": -1,
        "sealed": False,
        "active": True,
        "root": True,
        "leaf": True,
        "legacy": False,
    }
    name = "topic://public/default/life"
    assert name in http.get(ROOT).json()
    for query, is_there in (
        ("property=team=billing", True),
        ("property=team=billing&property=tier=1", True),
        ("property=team=billing&property=tier=2", False),
        ("property=team=", False),
    ):
        assert (name in http.get(f"{ROOT}?{query}").json()) == is_there, query
    assert http.delete(path).status_code == 204
    refused(http.get(path), 404)
    refused(http.delete(path), 404)
    assert name not in http.get(ROOT).json()


@pytest.mark.req("R468-76")
def test_filters_that_are_none(http: httpx.Client) -> None:
    for query in ("property=x", "property==x", "property=a=1&property=a=2"):
        refused(http.get(f"{ROOT}?{query}"), 412, "filter")
    assert http.get(f"{ROOT}?" + "&".join(f"property=k{n}=v" for n in range(101))).status_code == 400
    refused(http.get("/admin/v2/scalable/public/nowhere"), 404)
    refused(http.get("/admin/v2/scalable/nobody/default"), 404)


@pytest.mark.req("R468-77")
@pytest.mark.parametrize("count", [0, -1, 1025, 65_537, 10**9])
def test_numbers_of_segments_that_cannot_be(http: httpx.Client, count: int) -> None:
    path = f"{ROOT}/too-many"
    refused(http.put(path, params={"numInitialSegments": count}), 412, str(count))
    refused(http.get(path), 404)


def test_other_arguments_that_cannot_be_used(http: httpx.Client) -> None:
    path = f"{ROOT}/wrong"
    for query in (
        "numInitialSegments=x",
        "numInitialSegments=1.5",
        "numInitialSegments=1&numInitialSegments=2",
        "routing=mod-N",
    ):
        assert http.put(f"{path}?{query}").status_code == 400
    assert http.put(path, json={"a": 1}).status_code == 400
    assert http.put(path, json={f"k{n}": "v" for n in range(2000)}).status_code == 412
    assert http.put(path, content=b"x", headers={"content-type": "text/plain"}).status_code == 415
    refused(http.put("/admin/v2/scalable/public/nowhere/x"), 404)
    for bad in ("orders-partition-3", "orders/0000-7fff-3", "__internal", "_braid.x", " x", "x ", "%2F", "a'b", "x" * 300):
        refused(http.put(f"{ROOT}/{quote(bad, safe='')}"), 412)
    assert [name for name in http.get(ROOT).json() if "wrong" in name or "orders" in name] == []


def test_the_name_of_a_partition_is_not_taken_for_its_topics(http: httpx.Client, topic: str) -> None:
    for method, below in (("GET", ""), ("GET", "/stats"), ("POST", "/split/0"), ("DELETE", "?force=true")):
        refused(http.request(method, f"{topic}-partition-3{below}"), 412, "partition")
    assert layout(http, topic)["epoch"] == 0


def test_routing_is_chosen_at_creation(http: httpx.Client) -> None:
    assert http.put(f"{ROOT}/low?routing=low16").status_code == 204
    assert layout(http, f"{ROOT}/low")["routing"] == "low16"


@pytest.mark.req("R468-83")
def test_split(http: httpx.Client, topic: str) -> None:
    assert http.post(f"{topic}/split/0").status_code == 204
    found = layout(http, topic)
    assert found["epoch"] == 1 and found["nextSegmentId"] == 4
    parent, child = found["segments"]["0"], found["segments"]["3"]
    assert (parent["state"], parent["childIds"], parent["sealedAtEpoch"], parent["leaf"]) == ("SEALED", [2, 3], 1, False)
    assert (child["hashRange"], child["parentIds"], child["root"]) == ({"start": 0x4000, "end": 0x7FFF}, [0], False)
    before = layout(http, topic)
    refused(http.post(f"{topic}/split/0"), 412, "sealed", "2, 3")
    refused(http.post(f"{topic}/split/77"), 404, "77")
    for bad in ("-1", "x", "1.5", str(1 << 63), "%31%2F"):
        assert http.post(f"{topic}/split/{bad}").status_code == 400, bad
    refused(http.post(f"{ROOT}/missing/split/0"), 404, "missing")
    assert layout(http, topic) == before


@pytest.mark.req("R468-84")
def test_merge(http: httpx.Client, topic: str) -> None:
    assert http.post(f"{topic}/split/0").status_code == 204  # 2, 3, 1 by range
    before = layout(http, topic)
    refused(http.post(f"{topic}/merge/2/1"), 412, "no neighbours")
    refused(http.post(f"{topic}/merge/2/2"), 412, "itself")
    refused(http.post(f"{topic}/merge/0/1"), 412, "sealed")
    refused(http.post(f"{topic}/merge/2/99"), 404, "99")
    assert http.post(f"{topic}/merge/2/x").status_code == 400
    assert layout(http, topic) == before
    assert http.post(f"{topic}/merge/1/3").status_code == 204
    found = layout(http, topic)
    assert found["segments"]["4"]["hashRange"] == {"start": 0x4000, "end": 0xFFFF}
    assert found["segments"]["4"]["parentIds"] == [3, 1]
    assert [found["segments"][each]["state"] for each in ("1", "3")] == ["SEALED"] * 2


def test_a_segment_of_one_hash_is_not_split(http: httpx.Client) -> None:
    path = f"{ROOT}/narrow"
    assert http.put(path).status_code == 204
    for _ in range(16):
        last = max(map(int, layout(http, path)["segments"]))
        assert http.post(f"{path}/split/{last}").status_code == 204
    last = max(map(int, layout(http, path)["segments"]))
    refused(http.post(f"{path}/split/{last}"), 412, "one hash")


@pytest.mark.req("R468-80")
def test_stats(http: httpx.Client, topic: str, broker: BackgroundBroker) -> None:
    assert http.put(f"{topic}/subscriptions/audit", params={"type": "QUEUE"}).status_code == 204
    assert http.put(f"{topic}/subscriptions/billing").status_code == 204
    assert http.post(f"{topic}/split/1").status_code == 204
    found = http.get(f"{topic}/stats").json()
    assert (found["epoch"], found["totalSegments"], found["activeSegments"], found["sealedSegments"]) == (1, 4, 3, 1)
    segment = found["segments"]["0"]
    assert segment["name"].endswith("/0000-7fff-0") and segment["name"].startswith("segment://public/default/t-")
    assert segment["state"] == "ACTIVE" and segment["owner"] == broker.http_url.removeprefix("http://")
    assert {"msgRateIn", "bytesRateIn", "msgRateOut", "bytesRateOut", "storageSize"} <= set(segment)
    assert segment["backlog"] == {"audit": 0, "billing": 0}
    billing, audit = found["subscriptions"]["billing"], found["subscriptions"]["audit"]
    assert (billing["type"], billing["consumerCount"], billing["state"], billing["backlog"]) == ("STREAM", 0, "NO_CONSUMER", 0)
    assert [each["kind"] for each in billing["blocked_by"]] == ["no-consumer"]
    assert (audit["type"], audit["consumerCount"]) == ("QUEUE", 0)
    assert found["leader"] == broker.http_url.removeprefix("http://")
    refused(http.get(f"{ROOT}/missing/stats"), 404)


@pytest.mark.req("R468-81", "R468-82")
def test_subscriptions_are_on_every_segment_and_leave_every_segment(http: httpx.Client, topic: str) -> None:
    name = quote("a b %é", safe="")
    assert http.post(f"{topic}/split/0").status_code == 204
    for _twice in range(2):
        assert http.put(f"{topic}/subscriptions/{name}", params={"type": "QUEUE", "initial": "latest"}).status_code == 204
    stats = http.get(f"{topic}/stats").json()
    assert list(stats["subscriptions"]) == ["a b %é"]
    assert all(each["backlog"] == {"a b %é": 0} for each in stats["segments"].values())
    assert http.post(f"{topic}/subscriptions/{name}/seek", params={"timestamp": 0}).status_code == 204
    assert http.post(f"{topic}/subscriptions/{name}/skip-all").status_code == 204
    assert http.delete(f"{topic}/subscriptions/{name}").status_code == 204
    stats = http.get(f"{topic}/stats").json()
    assert stats["subscriptions"] == {} and all(each["backlog"] == {} for each in stats["segments"].values())
    refused(http.delete(f"{topic}/subscriptions/{name}"), 404)
    refused(http.post(f"{topic}/subscriptions/{name}/skip-all"), 404)
    refused(http.post(f"{topic}/subscriptions/{name}/seek", params={"timestamp": 0}), 404)


def test_subscriptions_that_cannot_be_used(http: httpx.Client, topic: str) -> None:
    refused(http.post(f"{topic}/subscriptions/s/seek"), 412, "timestamp")
    for query in ("timestamp=-1", "timestamp=x", f"timestamp={1 << 63}"):
        assert http.post(f"{topic}/subscriptions/s/seek?{query}").status_code == 400
    for query in ("type=SHARED", "initial=middle"):
        assert http.put(f"{topic}/subscriptions/s?{query}").status_code == 400
    for bad in ("a/b", " s", "%2F", "x" * 300):
        refused(http.put(f"{topic}/subscriptions/{quote(bad, safe='')}"), 412)
    for method, below in (("PUT", ""), ("DELETE", ""), ("POST", "/seek?timestamp=0"), ("POST", "/skip-all")):
        refused(http.request(method, f"{ROOT}/missing/subscriptions/s{below}"), 404)
    assert http.get(f"{topic}/stats").json()["subscriptions"] == {}


@pytest.mark.parametrize("name", ["a/b", "a/b/c d", "100%", "é x", "{}", "a?b#c", "...", "orders/0000-7fff"])
def test_names_that_need_escaping(http: httpx.Client, name: str) -> None:
    path = f"{ROOT}/{quote(name, safe='').replace('.', '%2E')}"
    assert http.put(path).status_code == 204
    assert f"topic://public/default/{name}" in http.get(ROOT).json()
    assert http.put(f"{path}/subscriptions/{quote('é %', safe='')}").status_code == 204
    assert http.post(f"{path}/split/0").status_code == 204
    assert layout(http, path)["epoch"] == 1
    stats = http.get(f"{path}/stats").json()
    assert stats["segments"]["1"]["name"] == f"segment://public/default/{name}/0000-7fff-1"
    assert stats["segments"]["1"]["backlog"] == {"é %": 0}
    metrics = http.get("/metrics").text
    assert f'topic="segment://public/default/{name}/0000-7fff-1"' in metrics
    assert http.delete(f"{path}?force=true").status_code == 204
    assert f"topic://public/default/{name}" not in http.get(ROOT).json()


def test_the_designs_name_of_the_root_is_an_alias(http: httpx.Client) -> None:
    alias = "/admin/v2/scalable-topics/public/default"
    assert http.put(f"{alias}/aliased?numInitialSegments=2").status_code == 204
    assert layout(http, f"{alias}/aliased") == layout(http, f"{ROOT}/aliased")
    assert http.get(alias).json() == http.get(ROOT).json()
    assert http.post(f"{alias}/aliased/split/0").status_code == 204
    assert http.get(f"{alias}/aliased/stats").json()["epoch"] == 1
    assert http.get("/admin/v2/scalable-topics").status_code == 501
    assert http.delete(f"{alias}/aliased").status_code == 204


@pytest.mark.req("R468-62")
def test_generic_calls_refuse_segments_and_point_to_scalable_topics(http: httpx.Client, topic: str) -> None:
    name = topic.rpartition("/")[2]
    persistent = "/admin/v2/persistent/public/default"
    segment = quote(f"{name}/0000-7fff-0", safe="")
    document = http.get("/openapi.json").json()["paths"]
    asked = 0
    for path, item in document.items():
        if not path.startswith("/admin/v2/persistent/{tenant}/{namespace}/{topic}"):
            continue
        where = path.replace("{tenant}", "public").replace("{namespace}", "default").replace("{topic}", segment)
        for part in ("subscription", "role", "topic_policy"):
            where = where.replace(f"{{{part}}}", "s")
        where = where.replace("{timestamp}", "1").replace("{seconds}", "1").replace("{count}", "1").replace("{position}", "1")
        where = where.replace("{ledger}", "1").replace("{entry}", "1")
        assert "{" not in where, path
        for method in item:
            body = b"{}" if "requestBody" in item[method] else None
            answer = http.request(method.upper(), where, content=body, headers={"content-type": "application/json"})
            assert answer.status_code in (400, 405, 412), (method, where, answer.text)
            asked += 1
    assert asked > 30
    refused(http.get(f"{persistent}/{name}/stats"), 404, "scalable")
    refused(http.put(f"{persistent}/{name}"), 409, "scalable")
    refused(http.put(f"{persistent}/{name}/partitions", content=b"2"), 409, "scalable")
    assert http.get("/admin/v2/segment/public/default/x/stats").status_code == 501
    assert [each for each in http.get(persistent).json() if name in each] == []
    assert len(layout(http, topic)["segments"]) == 2


def test_a_regular_topic_and_a_scalable_one_cannot_share_a_name(http: httpx.Client) -> None:
    assert http.put("/admin/v2/persistent/public/default/taken").status_code == 204
    assert http.put("/admin/v2/persistent/public/default/taken-parts/partitions", content=b"2").status_code == 204
    refused(http.put(f"{ROOT}/taken"), 409)
    refused(http.put(f"{ROOT}/taken-parts"), 409)
    for method, below in (
        ("GET", ""),
        ("GET", "/stats"),
        ("POST", "/split/0"),
        ("POST", "/merge/0/1"),
        ("PUT", "/subscriptions/s"),
        ("DELETE", "/subscriptions/s"),
        ("POST", "/subscriptions/s/seek?timestamp=0"),
        ("POST", "/subscriptions/s/skip-all"),
        ("DELETE", "?force=true"),
    ):
        for name in ("taken", "taken-parts"):
            refused(http.request(method, f"{ROOT}/{name}{below}"), 404)
    assert http.get("/admin/v2/persistent/public/default/taken/subscriptions").json() == []


def test_lookup_over_http(http: httpx.Client, topic: str, broker: BackgroundBroker) -> None:
    name = topic.rpartition("/")[2]
    segment = quote(f"{name}/0000-7fff-0", safe="")
    found = http.get(f"/lookup/v2/topic/segment/public/default/{segment}").json()
    assert found["brokerUrl"] == broker.service_url
    assert http.get(f"/lookup/v2/topic/topic/public/default/{name}").json()["brokerUrl"] == broker.service_url
    refused(http.get("/lookup/v2/topic/topic/public/default/missing"), 404)
    refused(http.get(f"/lookup/v2/topic/segment/public/default/{quote(name + '/0000-7fff-9', safe='')}"), 404)
    refused(http.get("/lookup/v2/topic/other/public/default/x"), 412)


def test_of_many_equal_requests_one_wins(broker: BackgroundBroker, http: httpx.Client) -> None:
    def ask(method: str, path: str) -> int:
        return httpx.request(method, broker.http_url + path, timeout=30).status_code

    with ThreadPoolExecutor(10) as pool:
        assert sorted(pool.map(lambda _: ask("PUT", f"{ROOT}/once"), range(20))) == [204] + [409] * 19
        assert sorted(pool.map(lambda _: ask("POST", f"{ROOT}/once/split/0"), range(20))) == [204] + [412] * 19
        gone = list(pool.map(lambda _: ask("DELETE", f"{ROOT}/once"), range(10)))
    assert gone.count(204) >= 1 and set(gone) <= {204, 404, 409, 412}, gone
    refused(http.get(f"{ROOT}/once"), 404)


def test_load_shows_in_stats_and_in_the_brokers_own(http: httpx.Client, broker: BackgroundBroker, topic: str) -> None:
    name = topic.rpartition("/")[2]
    assert http.put(f"{topic}/subscriptions/s", params={"type": "QUEUE"}).status_code == 204

    async def send() -> None:
        client = await RawClient.connect(broker.service_url)
        await client.producer(f"segment://public/default/{name}/0000-7fff-0")
        for number in range(10):
            await client.store(b"%d" % number, number)
        client.close()

    broker.run(send())
    found = http.get(f"{topic}/stats").json()
    assert found["segments"]["0"]["backlog"] == {"s": 10} and found["segments"]["0"]["messages"] == 10
    assert found["subscriptions"]["s"]["backlog"] == 10
    served = http.get("/admin/v2/broker-stats/topics").json()["public/default"]
    segments = {name: stats for bundle in served.values() for name, stats in bundle.get("segment", {}).items()}
    assert segments[f"segment://public/default/{name}/0000-7fff-0"]["msgInCounter"] == 10
    assert not [each for bundle in served.values() for each in bundle["persistent"] if each.startswith("segment")]
    assert http.get("/admin/v2/namespaces/public/default/topics").status_code == 200
    assert http.post(f"{topic}/subscriptions/s/skip-all").status_code == 204
    assert http.get(f"{topic}/stats").json()["subscriptions"]["s"]["backlog"] == 0


def test_what_is_done_to_a_namespace_is_done_to_its_scalable_topics(http: httpx.Client, broker: BackgroundBroker) -> None:
    space = "/admin/v2/namespaces/public/whole"
    path = "/admin/v2/scalable/public/whole/t"
    assert http.put(space, json={}).status_code == 204
    assert http.put(f"{path}?numInitialSegments=2").status_code == 204
    for name in ("a", "b"):
        assert http.put(f"{path}/subscriptions/{name}").status_code == 204
    assert http.post(f"{space}/clearBacklog").status_code == 204
    assert http.post(f"{space}/clearBacklog/a").status_code == 204
    assert http.post(f"{space}/clearBacklog/missing").status_code == 204
    assert http.post(f"{space}/unsubscribe/a").status_code == 204
    assert list(http.get(f"{path}/stats").json()["subscriptions"]) == ["b"]
    refused(http.delete(space), 409)
    assert http.delete(f"{space}?force=true").status_code == 204
    refused(http.get(path), 404)
    assert json.loads(http.get("/admin/v2/namespaces/public").text) == ["public/default"]


@pytest.mark.req("R468-86")
def test_a_broker_without_scalable_topics_refuses_all_of_it() -> None:
    config = StandaloneConfig(scalable_topics=ScalableConfig(enabled=False))
    good = {"tenant": "public", "namespace": "default", "topic": "t", "subscription": "s", "descriptor": "0000-ffff-0"}
    good["consumer"] = "c"
    with BackgroundBroker(config=config) as off, httpx.Client(base_url=off.http_url) as http:
        paths = http.get("/openapi.json").json()["paths"]
        asked = 0
        for path, item in paths.items():
            if not path.startswith(("/admin/v2/scalable/", "/admin/v2/segments/")):
                continue
            for method in item:
                where = path.format(**good, segment="0", other="1") + ("?timestamp=0" if path.endswith("/seek") else "")
                body: dict[str, int] | None = {} if method == "post" and path.endswith("/retention") else None
                refused(http.request(method.upper(), where, json=body), 405, "scalable_topics.enabled")
                asked += 1
        assert asked == 26
        refused(http.get("/lookup/v2/topic/topic/public/default/t"), 405)
        refused(http.get("/lookup/v2/topic/segment/public/default/t%2F0000-ffff-0"), 405)
        assert http.put("/admin/v2/persistent/public/default/t").status_code == 204
        assert http.get("/admin/v2/persistent/public/default/t/stats").status_code == 200
        assert http.put("/admin/v2/namespaces/public/plain", json={}).status_code == 204
        assert http.post("/admin/v2/namespaces/public/plain/clearBacklog").status_code == 204
        assert http.delete("/admin/v2/namespaces/public/plain?force=true").status_code == 204


def test_a_registration_that_cannot_be_read_is_shown_and_removed(
    http: httpx.Client, topic: str, broker: BackgroundBroker
) -> None:
    consumer, local = "c/1 %é", topic.rpartition("/")[2]
    key = consumer_path(TopicName.parse(f"topic://public/default/{local}"), "s", consumer)

    async def spoil() -> None:
        handle = broker.broker.standalone.metadata.handle("somebody")
        await handle.put(key, b'{"segments":"x"}')
        await handle.close()

    broker.run(spoil())
    assert http.put(f"{topic}/subscriptions/s", params={"type": "STREAM"}).status_code == 204
    found = http.get(f"{topic}/stats").json()["subscriptions"]["s"]["blocked_by"]
    [held] = [each for each in found if each["kind"] == "unreadable-record"]
    assert held["detail"]["consumer"] == consumer and key in held["detail"]["error"]
    assert http.post(f"{topic}/split/0").status_code == 204
    path = f"{topic}/subscriptions/s/consumers/{quote(consumer, safe='')}"
    assert http.delete(path).status_code == 204
    found = http.get(f"{topic}/stats").json()["subscriptions"]["s"]["blocked_by"]
    assert "unreadable-record" not in {each["kind"] for each in found}
    refused(http.delete(path), 404, "no consumer")
    refused(http.delete(path.replace("/s/", "/none/")), 404, "no subscription")
