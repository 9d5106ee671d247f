"""The admin API of three brokers: calls reach the owner from any of them, and what is spread over them comes together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest

import braid
from braid.testing.broker import BackgroundBroker

ROOT = "/admin/v2"
TOPICS = f"{ROOT}/persistent/public/default"
NAMESPACE = f"{ROOT}/namespaces/public/default"
LOOKUP = "/lookup/v2/topic/persistent/public/default"
PARTITIONS = 8


@pytest.fixture(scope="module")
def brokers() -> Iterator[BackgroundBroker]:
    with BackgroundBroker(brokers=3) as running:
        yield running


@pytest.fixture(scope="module")
def urls(brokers: BackgroundBroker) -> list[str]:
    return [node.http_url for node in brokers.broker.nodes]


@pytest.fixture(scope="module")
def http(urls: list[str]) -> Iterator[httpx.Client]:
    """Follows redirects, as every admin client does."""
    with httpx.Client(base_url=urls[0], timeout=20, follow_redirects=True) as client:
        yield client


@pytest.fixture(scope="module")
def plain() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=20) as client:
        yield client


def send(brokers: BackgroundBroker, topic: str, payloads: list[bytes]) -> None:
    async def work() -> None:
        async with braid.connect(brokers.service_url) as client:
            producer = await client.producer(topic, batching=False)
            for each in payloads:
                await producer.send(each)

    brokers.run(work())


def owner_of(http: httpx.Client, topic: str) -> str:
    """The HTTP address of the broker that serves a topic."""
    return str(http.get(f"{LOOKUP}/{topic}").json()["httpUrl"])


def not_owners(urls: list[str], owner: str) -> list[str]:
    return [url for url in urls if url != owner]


def test_every_broker_knows_the_brokers_and_the_leader(http: httpx.Client, plain: httpx.Client, urls: list[str]) -> None:
    ids = sorted(url.removeprefix("http://") for url in urls)
    leaders = set()
    for url in urls:
        assert plain.get(f"{url}{ROOT}/brokers").json() == ids
        assert plain.get(f"{url}{ROOT}/brokers/standalone").json() == ids
        leaders.add(plain.get(f"{url}{ROOT}/brokers/leaderBroker").json()["brokerId"])
        assert plain.get(f"{url}{ROOT}/brokers/health").text == "ok"
    assert len(leaders) == 1 and leaders < set(ids)


def test_a_call_about_a_topic_is_redirected_to_its_owner(http: httpx.Client, plain: httpx.Client, urls: list[str]) -> None:
    assert http.put(f"{TOPICS}/moved%2Bon").status_code == 204
    owner = owner_of(http, "moved%2Bon")
    for url in not_owners(urls, owner):
        answer = plain.get(f"{url}{TOPICS}/moved%2Bon/stats", params={"excludePublishers": "true"})
        assert answer.status_code == 307
        assert owner.removeprefix("http://") in answer.json()["reason"]
        where = urlsplit(answer.headers["location"])
        assert f"{where.scheme}://{where.netloc}" == owner
        assert where.path == f"{TOPICS}/moved%2Bon/stats"
        assert parse_qs(where.query) == {"excludePublishers": ["true"], "authoritative": ["true"]}
        assert plain.get(answer.headers["location"]).json()["ownerBroker"] == owner.removeprefix("http://")
    assert plain.get(f"{owner}{TOPICS}/moved%2Bon/stats").status_code == 200


def test_a_missing_topic_is_not_found_by_any_broker_and_owned_by_none(plain: httpx.Client, urls: list[str]) -> None:
    for url in urls:
        assert plain.get(f"{url}{TOPICS}/never-made/stats").status_code == 404


@pytest.mark.inv("INV17")
def test_redirects_end(http: httpx.Client, plain: httpx.Client, urls: list[str]) -> None:
    assert http.put(f"{TOPICS}/round-and-round").status_code == 204
    other = not_owners(urls, owner_of(http, "round-and-round"))[0]
    sent_on = plain.get(f"{other}{TOPICS}/round-and-round/stats?authoritative=true&hops=3")
    assert sent_on.status_code == 307
    assert "hops=4" in sent_on.headers["location"]
    ended = plain.get(f"{other}{TOPICS}/round-and-round/stats?authoritative=true&hops=5")
    assert ended.status_code == 503
    assert "try again" in ended.json()["reason"]


def test_every_write_reaches_the_owner_from_every_broker(urls: list[str]) -> None:
    for number, url in enumerate(urls):
        with httpx.Client(base_url=url, follow_redirects=True, timeout=20) as http:
            path = f"{TOPICS}/from-{number}"
            assert http.put(path).status_code == 204
            assert http.put(f"{path}/subscription/s").status_code == 204
            assert http.put(f"{path}/properties", json={"a": "b"}).status_code == 204
            assert http.get(f"{path}/properties").json() == {"a": "b"}
            assert http.get(f"{path}/subscriptions").json() == ["s"]
            assert http.post(f"{path}/subscription/s/skip_all").status_code == 204
            assert http.post(f"{path}/terminate").json()["partitionIndex"] == -1
            assert http.put(f"{path}/unload").status_code == 204
            assert http.delete(f"{path}/subscription/s").status_code == 204
            assert http.delete(path).status_code == 204
            assert http.get(f"{path}/stats").status_code == 404


def test_a_partitioned_topic_is_administered_as_one(http: httpx.Client, brokers: BackgroundBroker, urls: list[str]) -> None:
    path = f"{TOPICS}/spread"
    assert http.put(f"{path}/partitions", json=PARTITIONS).status_code == 204
    assert http.put(f"{path}/subscription/s", json={"ledgerId": -1, "entryId": -1}).status_code == 204
    assert http.put(f"{path}/subscription/s").status_code == 409
    owners = {owner_of(http, f"spread-partition-{number}") for number in range(PARTITIONS)}
    assert len(owners) > 1, "the topic shall be on several brokers"
    for number in range(PARTITIONS):
        send(brokers, f"spread-partition-{number}", [b"1", b"2"])
    for url in urls:
        with httpx.Client(base_url=url, timeout=20) as each:
            stats = each.get(f"{path}/partitioned-stats").json()
            assert stats["msgInCounter"] == 2 * PARTITIONS
            assert stats["subscriptions"]["s"]["msgBacklog"] == 2 * PARTITIONS
            assert len(stats["partitions"]) == PARTITIONS
            assert stats["ownerBroker"] is None
            assert {part["ownerBroker"] for part in stats["partitions"].values()} == {
                owner.removeprefix("http://") for owner in owners
            }
            inside = each.get(f"{path}/partitioned-internalStats").json()
            assert sum(part["numberOfEntries"] for part in inside["partitions"].values()) == 2 * PARTITIONS
            assert each.get(f"{path}/subscriptions").json() == ["s"]
    assert http.post(f"{path}/subscription/s/skip_all").status_code == 204
    assert backlog(http, path) == 0
    assert http.post(f"{path}/subscription/s/resetcursor/0").status_code == 204
    assert backlog(http, path) == 2 * PARTITIONS
    assert http.post(f"{path}/subscription/s/resetcursor", json={"ledgerId": 1, "entryId": 1}).status_code == 405
    assert http.post(f"{path}/all_subscription/expireMessages/0").status_code == 204
    assert http.put(f"{path}/subscription/s/properties", json={"k": "v"}).status_code == 204
    assert http.get(f"{path}/subscription/s/properties").json() == {"k": "v"}
    assert http.delete(f"{path}/subscription/s").status_code == 204
    assert http.delete(f"{path}/subscription/s").status_code == 404
    ended = http.post(f"{path}/terminate/partitions")
    assert (ended.status_code, sorted(ended.json())) == (200, sorted(map(str, range(PARTITIONS))))
    assert http.put(f"{path}/unload").status_code == 204
    assert http.delete(f"{path}/partitions").status_code == 204
    assert not [name for name in http.get(TOPICS).json() if "/spread" in name]


def backlog(http: httpx.Client, path: str) -> int:
    return int(http.get(f"{path}/partitioned-stats").json()["subscriptions"]["s"]["msgBacklog"])


def test_a_partitioned_topic_in_use_anywhere_is_kept(brokers: BackgroundBroker, urls: list[str]) -> None:
    async def work() -> list[int]:
        async with braid.connect(brokers.service_url) as client, httpx.AsyncClient(base_url=urls[0], timeout=20) as admin:
            path = f"{TOPICS}/used/partitions"
            await admin.put(path, json=4)
            await client.producer("used-partition-3")
            refused = await admin.delete(path)
            left = [name for name in (await admin.get(TOPICS)).json() if "/used-" in name]
            forced = await admin.delete(path, params={"force": "true"})
            return [refused.status_code, len(left), forced.status_code]

    assert brokers.run(work()) == [412, 4, 204]


def test_bundles_are_unloaded_moved_and_split(http: httpx.Client, plain: httpx.Client, urls: list[str]) -> None:
    name = f"{ROOT}/namespaces/public/bundled"
    assert http.put(name, json={"bundles": {"numBundles": 2}}).status_code == 204
    boundaries = ["0x00000000", "0x80000000", "0xffffffff"]
    assert http.get(f"{name}/bundles").json() == {"boundaries": boundaries, "numBundles": 2}
    assert http.get(name).json()["bundles"] == {"boundaries": boundaries, "numBundles": 2}
    assert http.put(f"{ROOT}/persistent/public/bundled/t").status_code == 204
    lookup = "/lookup/v2/topic/persistent/public/bundled/t"
    bundle = http.get(f"{lookup}/bundle").text
    owner = http.get(lookup).json()["httpUrl"]
    assert bundle in ("0x00000000_0x80000000", "0x80000000_0xffffffff")
    assert http.get(f"{ROOT}/persistent/public/bundled", params={"bundle": bundle}).json() == ["persistent://public/bundled/t"]
    for target in (*not_owners(urls, owner), owner):
        broker_id = target.removeprefix("http://")
        moved = http.put(f"{name}/{bundle}/unload", params={"destinationBroker": broker_id})
        assert moved.status_code == 204
        assert http.get(lookup).json()["brokerId"] == broker_id
        owned = plain.get(f"{target}{ROOT}/brokers/standalone/{broker_id}/ownedNamespaces").json()
        assert owned[f"public/bundled/{bundle}"]["is_active"] is True
    assert http.put(f"{name}/{bundle}/unload", params={"destinationBroker": "nowhere:1"}).status_code == 404
    assert http.put(f"{name}/0x00000000_0x40000000/unload").status_code == 404
    assert http.put(f"{name}/everything/unload").status_code == 412
    assert http.put(f"{name}/{bundle}/split").status_code == 204
    assert http.get(f"{name}/bundles").json()["numBundles"] == 3
    assert http.put(f"{name}/{bundle}/split").status_code == 404
    assert http.put(f"{name}/unload").status_code == 204
    assert http.get(lookup).status_code == 200
    positions = http.get(f"{name}/{http.get(f'{lookup}/bundle').text}/topicHashPositions").json()
    assert list(positions["hashPositions"]) == ["persistent://public/bundled/t"]


def test_calls_about_a_broker_go_to_that_broker(http: httpx.Client, plain: httpx.Client, urls: list[str]) -> None:
    other = urls[1].removeprefix("http://")
    answer = plain.get(f"{urls[0]}{ROOT}/brokers/standalone/{other}/ownedNamespaces")
    assert (answer.status_code, urlsplit(answer.headers["location"]).netloc) == (307, other)
    assert http.get(f"{ROOT}/brokers/health", params={"brokerId": other}).text == "ok"
    assert plain.get(f"{urls[0]}{ROOT}/brokers/health", params={"brokerId": other}).status_code == 307
    assert http.get(f"{ROOT}/brokers/health", params={"brokerId": "nowhere:1"}).status_code == 404
    assert http.get(f"{ROOT}/brokers/elsewhere/{other}/ownedNamespaces").status_code == 404


def test_a_drained_broker_has_nothing_until_it_is_undrained(http: httpx.Client, plain: httpx.Client, urls: list[str]) -> None:
    assert http.put(f"{TOPICS}/homeless").status_code == 204
    owner = owner_of(http, "homeless")
    broker_id = owner.removeprefix("http://")
    assert http.post(f"{ROOT}/brokers/{broker_id}/drain").status_code == 204
    assert plain.get(f"{owner}{ROOT}/brokers/standalone/{broker_id}/ownedNamespaces").json() == {}
    assert owner_of(http, "homeless") != owner
    assert http.get(f"{TOPICS}/homeless/stats").status_code == 200
    assert http.post(f"{ROOT}/brokers/{broker_id}/undrain").status_code == 204
    assert http.post(f"{ROOT}/brokers/nowhere:1/drain").status_code == 404


def test_a_namespace_is_cleared_and_deleted_wherever_its_topics_are(http: httpx.Client, brokers: BackgroundBroker) -> None:
    name = f"{ROOT}/namespaces/public/wide"
    assert http.put(name).status_code == 204
    for number in range(6):
        path = f"{ROOT}/persistent/public/wide/t{number}"
        assert http.put(path).status_code == 204
        for subscription in ("s", "r"):
            assert http.put(f"{path}/subscription/{subscription}").status_code == 204
        send(brokers, f"public/wide/t{number}", [b"x"])

    def backlogs() -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for number in range(6):
            stats: dict[str, Any] = http.get(f"{ROOT}/persistent/public/wide/t{number}/stats").json()["subscriptions"]
            for subscription, each in stats.items():
                found.setdefault(subscription, []).append(each["msgBacklog"])
        return found

    assert http.post(f"{name}/clearBacklog/s").status_code == 204
    assert backlogs() == {"s": [0] * 6, "r": [1] * 6}
    assert http.post(f"{name}/clearBacklog").status_code == 204
    assert backlogs() == {"s": [0] * 6, "r": [0] * 6}
    assert http.post(f"{name}/unsubscribe/r").status_code == 204
    assert list(backlogs()) == ["s"]
    assert http.put(f"{ROOT}/persistent/public/wide/parts/partitions", json=3).status_code == 204
    assert http.delete(name).status_code == 409
    assert http.delete(name, params={"force": "true"}).status_code == 204
    assert http.get(name).status_code == 404


def test_a_broker_that_died_is_said_not_to_answer_and_nothing_hangs() -> None:
    with BackgroundBroker(brokers=2) as running:
        alive, other = running.broker.nodes
        with httpx.Client(base_url=alive.http_url, timeout=20, follow_redirects=True) as http:
            assert http.put(f"{TOPICS}/halved/partitions", json=PARTITIONS).status_code == 204
            assert http.get(f"{TOPICS}/halved/partitioned-stats").status_code == 200
            names = [f"halved-partition-{number}" for number in range(PARTITIONS)]
            lost = next(name for name in names if owner_of(http, name) == other.http_url)
            running.run(other.kill())
            answer = http.get(f"{TOPICS}/halved/partitioned-stats")
            assert (answer.status_code, other.http_url in answer.json()["reason"]) == (503, True)
            assert http.get(f"{TOPICS}/halved/partitions").json()["partitions"] == PARTITIONS
            sent_on = http.get(f"{TOPICS}/{lost}/stats", follow_redirects=False)
            assert (sent_on.status_code, sent_on.headers["location"].startswith(other.http_url)) == (307, True)


@pytest.mark.req("R473-6")
def test_transaction_coordinators_are_found_over_http(brokers: BackgroundBroker, urls: list[str], plain: httpx.Client) -> None:
    """By clients that use the admin API for lookups: any broker names the leader, and none is redirected."""
    assign = "transaction_coordinator_assign"
    known = {node.service_url for node in brokers.broker.nodes}
    for number in range(16):
        answers = []
        for url in urls:
            found = plain.get(f"{url}/lookup/v2/topic/persistent/pulsar/system/{assign}-partition-{number}")
            assert found.status_code == 200, found.text
            answers.append(found.json()["brokerUrl"])
        assert len(set(answers)) == 1
        assert answers[0] in known
    for url in urls:
        assert plain.get(f"{url}{ROOT}/persistent/pulsar/system/{assign}/partitions").json()["partitions"] == 16
        assert plain.get(f"{url}/lookup/v2/topic/persistent/pulsar/system/{assign}-partition-16").status_code == 404
