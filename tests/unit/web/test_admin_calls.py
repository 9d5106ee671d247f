"""The calls of the admin API one by one, on one broker: what each does, and its statuses as the protocol sheet gives them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

import braid
from braid.testing.broker import BackgroundBroker

ROOT = "/admin/v2"
TOPICS = "/persistent/public/default"
EARLIEST = {"ledgerId": -1, "entryId": -1}


@pytest.fixture(scope="module")
def broker() -> Iterator[BackgroundBroker]:
    with BackgroundBroker() as running:
        yield running


@pytest.fixture(scope="module")
def http(broker: BackgroundBroker) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=broker.http_url + ROOT, timeout=10) as client:
        yield client


def send(broker: BackgroundBroker, topic: str, payloads: list[bytes], **options: Any) -> list[Any]:
    async def work() -> list[Any]:
        async with braid.connect(broker.service_url) as client:
            producer = await client.producer(topic, batching=False, **options)
            return [await producer.send(each) for each in payloads]

    return broker.run(work())


def backlog(http: httpx.Client, topic: str, subscription: str = "s") -> int:
    return int(http.get(f"{TOPICS}/{topic}/stats").json()["subscriptions"][subscription]["msgBacklog"])


# Clusters, tenants, namespaces.


def test_the_life_of_a_cluster(http: httpx.Client, broker: BackgroundBroker) -> None:
    own = http.get("/clusters/standalone").json()
    assert own["brokerServiceUrl"] == broker.service_url
    data = {"serviceUrl": "http://far:8080", "brokerServiceUrl": "pulsar://far:6650", "fromTheFuture": 1}
    assert http.put("/clusters/far", json=data).status_code == 200
    assert http.put("/clusters/far", json=data).status_code == 409
    assert http.get("/clusters").json() == ["far", "standalone"]
    assert http.get("/clusters/far").json() == {"serviceUrl": "http://far:8080", "brokerServiceUrl": "pulsar://far:6650"}
    assert http.post("/clusters/far", json={"serviceUrl": "http://farther"}).status_code == 200
    assert http.get("/clusters/far").json() == {"serviceUrl": "http://farther"}
    assert http.post("/clusters/near", json={}).status_code == 404
    assert http.put("/tenants/wide", json={"allowedClusters": ["standalone", "far"]}).status_code == 204
    assert http.delete("/clusters/far").status_code == 412
    assert http.post("/tenants/wide", json={"allowedClusters": ["standalone"]}).status_code == 204
    assert http.delete("/clusters/far").status_code == 204
    assert http.delete("/clusters/far").status_code == 404
    assert http.delete("/clusters/standalone").status_code == 412
    assert http.put("/clusters/b%20ad", json={}).status_code == 412
    assert http.put("/clusters/near", json={"serviceUrl": "no url"}).status_code == 412
    assert http.put("/clusters/near", json={"peerClusterNames": ["nowhere"]}).status_code == 412


def test_permissions_are_kept(http: httpx.Client) -> None:
    name = "/namespaces/public/permitted"
    assert http.put(name, json={"auth_policies": {"namespace_auth": {"old": ["consume"]}}}).status_code == 204
    assert http.post(f"{name}/permissions/me", json=["produce", "consume", "produce"]).status_code == 204
    assert http.get(f"{name}/permissions").json() == {"old": ["consume"], "me": ["consume", "produce"]}
    assert http.post(f"{name}/permissions/me", json=["everything"]).status_code == 400
    assert http.post("/namespaces/public/nowhere/permissions/me", json=["produce"]).status_code == 404
    assert http.delete(f"{name}/permissions/old").status_code == 204
    topic = "/persistent/public/permitted/t"
    assert http.post(f"{topic}/permissions/you", json=["consume"]).status_code == 404
    assert http.put(topic).status_code == 204
    assert http.post(f"{topic}/permissions/you", json=["consume"]).status_code == 204
    assert http.get(f"{topic}/permissions").json() == {"me": ["consume", "produce"], "you": ["consume"]}
    assert http.delete(f"{topic}/permissions/you").status_code == 204
    assert http.delete(f"{topic}/permissions/you").status_code == 412
    assert http.post(f"{name}/permissions/subscription/s", json=["me", "you"]).status_code == 204
    assert http.delete(f"{name}/permissions/s/me").status_code == 204
    assert http.get(f"{name}/permissions/subscription").json() == {"s": ["you"]}
    assert http.get(name).json()["auth_policies"]["subscription_auth_roles"] == {"s": ["you"]}


def test_properties_of_a_namespace(http: httpx.Client) -> None:
    name = "/namespaces/public/proper"
    assert http.put(name, json={"properties": {"a": "1"}}).status_code == 204
    assert http.put(f"{name}/properties", json={"b": "2"}).status_code == 204
    assert http.put(f"{name}/property/c%2Fd/3%204").status_code == 204
    assert http.get(f"{name}/properties").json() == {"a": "1", "b": "2", "c/d": "3 4"}
    assert http.get(f"{name}/property/c%2Fd").text == "3 4"
    assert http.delete(f"{name}/property/a").text == "1"
    assert http.delete(f"{name}/property/a").status_code == 204
    assert http.get(f"{name}/property/a").status_code == 204
    assert http.delete(f"{name}/properties").status_code == 204
    assert http.get(f"{name}/properties").json() == {}


def test_a_policy_without_effect_is_refused_not_kept(http: httpx.Client) -> None:
    name = "/namespaces/public/default"
    before = http.get(name).json()
    for policy, value in (("messageTTL", 60), ("maxProducersPerTopic", 1), ("publishRate", {}), ("persistence", {})):
        assert http.get(f"{name}/{policy}").status_code == 204, policy
        answer = http.post(f"{name}/{policy}", json=value)
        assert (answer.status_code, "nothing was changed" in answer.json()["reason"]) == (405, True)
        assert http.delete(f"{name}/{policy}").status_code == 204
    assert http.get(f"{name}/encryptionRequired").json() is False
    assert http.get(f"{name}/nonsense").status_code == 404
    assert http.post("/namespaces/public/nowhere/messageTTL", json=1).status_code == 404
    assert http.get(name).json() == before
    assert http.put("/namespaces/public/limited", json={"max_producers_per_topic": 1}).status_code == 405
    assert http.put("/namespaces/public/limited", json={"backlog_quota_map": {}, "offload_threshold": -1}).status_code == 204


def test_policies_of_topics_are_off_but_for_retention(http: httpx.Client) -> None:
    assert http.put(f"{TOPICS}/unruled").status_code == 204
    for method in ("GET", "POST", "DELETE"):
        assert http.request(method, f"{TOPICS}/unruled/messageTTL").status_code == 405
    for policy in ("retention", "messageTTL"):
        assert http.get(f"{TOPICS}/no-such-topic/{policy}").status_code == 404
    assert http.get(f"{TOPICS}/unruled/nonsense").status_code == 404


def test_subscriptions_need_leave_where_the_namespace_says_so(http: httpx.Client, broker: BackgroundBroker) -> None:
    name = "/namespaces/public/strict"
    assert http.put(name).status_code == 204
    policy = {"allowAutoSubscriptionCreation": False}
    assert http.get(f"{name}/autoSubscriptionCreation").status_code == 204
    assert http.post(f"{name}/autoSubscriptionCreation", json=policy).status_code == 204
    assert http.get(f"{name}/autoSubscriptionCreation").json() == policy

    async def subscribe() -> None:
        async with braid.connect(broker.service_url) as client:
            await client.consumer("public/strict/t", "s")

    with pytest.raises(braid.errors.BraidError):
        broker.run(subscribe())
    assert http.put("/persistent/public/strict/t/subscription/s").status_code == 204
    broker.run(subscribe())
    assert http.delete(f"{name}/autoSubscriptionCreation").status_code == 204


def test_clusters_of_a_namespace(http: httpx.Client) -> None:
    assert http.get("/namespaces/public/default/replication").json() == ["standalone"]
    assert http.post("/namespaces/public/default/replication", json=["standalone"]).status_code == 204
    assert http.post("/namespaces/public/default/replication", json=["nowhere"]).status_code == 412
    assert http.put("/clusters/other", json={}).status_code == 200
    assert http.post("/namespaces/public/default/replication", json=["other"]).status_code == 405
    assert http.post("/namespaces/public/default/allowedClusters", json=["standalone"]).status_code == 204
    assert http.get("/namespaces/public/default/allowedClusters").json() == ["standalone"]
    assert http.delete("/clusters/other").status_code == 204


def test_bundles_at_creation(http: httpx.Client) -> None:
    given = {"boundaries": ["0x00000000", "0x10000000", "0xffffffff"], "numBundles": 2}
    assert http.put("/namespaces/public/cut", json={"bundles": given}).status_code == 204
    assert http.get("/namespaces/public/cut/bundles").json() == given
    for wrong in (
        {"numBundles": -1},
        {"numBundles": 1 << 40},
        {"boundaries": ["0x00000000"]},
        {"boundaries": ["0x00000000", "0x20000000", "0x10000000", "0xffffffff"]},
        {"boundaries": ["0x00000000", "half", "0xffffffff"]},
        {"boundaries": ["0x00000000", "0xffffffff"], "numBundles": 7},
    ):
        assert http.put("/namespaces/public/cut-wrong", json={"bundles": wrong}).status_code == 412, wrong
    assert http.put("/namespaces/public/cut-wrong", json={"bundles": 4}).status_code == 400
    assert http.get("/namespaces/public/cut-wrong").status_code == 404
    assert http.put("/namespaces/public/cut/unload").status_code == 204
    assert http.put("/namespaces/public/nowhere/unload").status_code == 404


# Topics.


def test_a_topic_called_partitioned(http: httpx.Client) -> None:
    assert http.put(f"{TOPICS}/partitioned").status_code == 204
    assert http.get(f"{TOPICS}/partitioned/stats").status_code == 200
    assert http.get(f"{TOPICS}/partitioned").json() == []
    assert http.delete(f"{TOPICS}/partitioned").status_code == 204


def test_there_are_no_non_persistent_topics(http: httpx.Client) -> None:
    """Pulsar's tools list both kinds and show them together."""
    assert http.get("/non-persistent/public/default").json() == []
    assert http.get("/non-persistent/public/default/partitioned").json() == []
    assert http.get("/non-persistent/public/nowhere").status_code == 404


def test_partitions_by_name(http: httpx.Client) -> None:
    assert http.put(f"{TOPICS}/lone-partition-1").status_code == 412
    assert http.put(f"{TOPICS}/lone/partitions", json=2).status_code == 204
    assert http.put(f"{TOPICS}/lone-partition-1").status_code == 409
    assert http.put(f"{TOPICS}/lone-partition-2").status_code == 412
    assert http.delete(f"{TOPICS}/lone-partition-1").status_code == 204
    assert len([name for name in http.get(TOPICS).json() if "/lone-" in name]) == 1
    assert http.post(f"{TOPICS}/lone/createMissedPartitions").status_code == 204
    assert len([name for name in http.get(TOPICS).json() if "/lone-" in name]) == 2
    assert http.post(f"{TOPICS}/nothing/createMissedPartitions").status_code == 404


def test_properties_of_topics(http: httpx.Client) -> None:
    assert http.put(f"{TOPICS}/tagged", json={"a": "1"}).status_code == 204
    assert http.put(f"{TOPICS}/tags/partitions", json={"partitions": 2, "properties": {"a": "1"}}).status_code == 204
    for name in ("tagged", "tags"):
        path = f"{TOPICS}/{name}/properties"
        assert http.put(path, json={"b": "2"}).status_code == 204
        assert http.get(path).json() == {"a": "1", "b": "2"}
        assert http.delete(path, params={"key": "a"}).status_code == 204
        assert http.get(path).json() == {"b": "2"}
        assert http.delete(path).status_code == 412
        assert http.put(path, json={"b": 2}).status_code == 400
    assert http.get(f"{TOPICS}/nothing/properties").status_code == 404


def test_what_a_partitioned_topic_cannot_do(http: httpx.Client) -> None:
    path = f"{TOPICS}/several"
    assert http.put(f"{path}/partitions", json=2).status_code == 204
    assert http.put(f"{path}/subscription/s").status_code == 204
    for method, suffix in (
        ("POST", "terminate"),
        ("GET", "lastMessageId"),
        ("GET", "messageid/0"),
        ("GET", "examinemessage"),
        ("GET", "ledger/0/entry/0"),
        ("GET", "getMessageIdByIndex?index=0"),
        ("GET", "subscription/s/position/1"),
        ("POST", "subscription/s/skip/1"),
    ):
        assert http.request(method, f"{path}/{suffix}").status_code == 405, suffix
    for suffix in ("subscription/s/expireMessages", "subscription/s/resetcursor"):
        assert http.post(f"{path}/{suffix}", json={"ledgerId": 0, "entryId": 0}).status_code == 405, suffix
        assert http.post(f"{path}/{suffix}", json=EARLIEST).status_code == 204, suffix
    assert http.put(f"{path}/subscription/new", json={"ledgerId": 0, "entryId": 0}).status_code == 405
    assert http.get(f"{path}/stats").status_code == http.get(f"{path}/internalStats").status_code == 404
    assert http.post(f"{TOPICS}/plain-one/terminate/partitions").status_code == 404
    assert http.put(f"{TOPICS}/plain-one").status_code == 204
    assert http.post(f"{TOPICS}/plain-one/terminate/partitions").status_code == 405
    assert http.get(f"{TOPICS}/plain-one/partitioned-internalStats").status_code == 404


def test_trim_truncate_and_compaction(http: httpx.Client, broker: BackgroundBroker) -> None:
    assert http.put(f"{TOPICS}/roomy/subscription/s").status_code == 204
    send(broker, "roomy", [b"1", b"2"])
    assert http.post(f"{TOPICS}/roomy/trim").status_code == 204
    assert backlog(http, "roomy") == 2
    assert http.delete(f"{TOPICS}/roomy/truncate").status_code == 204
    assert backlog(http, "roomy") == 0
    assert http.get(f"{TOPICS}/roomy/compaction").json() == {"status": "NOT_RUN", "lastError": ""}
    assert http.put(f"{TOPICS}/roomy/compaction").status_code == 405
    assert http.delete(f"{TOPICS}/nothing/truncate").status_code == 404


def test_details_of_stats(http: httpx.Client, broker: BackgroundBroker) -> None:
    assert http.put(f"{TOPICS}/detailed/subscription/s", json=EARLIEST).status_code == 204
    send(broker, "detailed", [b"1", b"2"])

    async def connected() -> tuple[Any, Any]:
        async with braid.connect(broker.service_url) as client, httpx.AsyncClient(base_url=broker.http_url + ROOT) as admin:
            await client.producer("detailed")
            full = (await admin.get(f"{TOPICS}/detailed/stats?getEarliestTimeInBacklog=true")).json()
            short = (await admin.get(f"{TOPICS}/detailed/stats?excludePublishers=true&subscriptionBacklogSize=false")).json()
            return full, short

    full, short = broker.run(connected())
    assert full["subscriptions"]["s"]["earliestMsgPublishTimeInBacklog"] == full["earliestMsgPublishTimeInBacklogs"] > 0
    assert len(full["publishers"]) == 1
    assert short["publishers"] == []
    assert short["subscriptions"]["s"]["backlogSize"] == -1
    info = http.get(f"{TOPICS}/detailed/internal-info").json()
    assert info["ledgers"][0]["entries"] == 2
    assert list(info["cursors"]) == ["s"]
    everything = http.put(f"{TOPICS}/detailed/backlogSize", json=EARLIEST)
    assert (everything.status_code, everything.json()) == (200, full["storageSize"])
    assert http.put(f"{TOPICS}/detailed/backlogSize", json={"ledgerId": 1 << 62, "entryId": 0}).json() == 0


# Messages.


def test_messages_by_order_time_and_index(http: httpx.Client, broker: BackgroundBroker) -> None:
    ids = send(broker, "ordered", [b"1", b"2", b"3"])
    path = f"{TOPICS}/ordered"

    def examine(**query: Any) -> httpx.Response:
        return http.get(f"{path}/examinemessage", params=query)

    assert examine().content == b"3"
    assert examine(messagePosition=2).content == b"2"
    assert examine(initialPosition="earliest").content == b"1"
    assert examine(initialPosition="earliest", messagePosition=3).content == b"3"
    assert examine(messagePosition=4).status_code == 412
    assert examine(messagePosition=0).status_code == 400
    assert examine(initialPosition="middle").status_code == 400
    expected = [{"ledgerId": each.ledger_id, "entryId": each.entry_id, "partitionIndex": -1} for each in ids]
    assert http.get(f"{path}/messageid/0").json() == expected[0]
    assert http.get(f"{path}/messageid/{(1 << 62)}").json()["entryId"] == ids[-1].entry_id + 1
    for index, each in enumerate(expected):
        assert http.get(f"{path}/getMessageIdByIndex", params={"index": index}).json() == each
    assert http.get(f"{path}/getMessageIdByIndex", params={"index": 3}).status_code == 404
    assert http.get(f"{path}/getMessageIdByIndex").status_code == 412


def test_peek_skip_and_expire(http: httpx.Client, broker: BackgroundBroker) -> None:
    path = f"{TOPICS}/peeked/subscription/s"
    assert http.put(path, json=EARLIEST).status_code == 204
    ids = send(broker, "peeked", [b"%d" % number for number in range(10)])
    assert [http.get(f"{path}/position/{number}").content for number in (1, 2, 10)] == [b"0", b"1", b"9"]
    assert http.get(f"{path}/position/1").headers["X-Pulsar-Message-ID"] == f"{ids[0].ledger_id}:{ids[0].entry_id}"
    assert http.get(f"{path}/position/11").status_code == 404
    assert http.get(f"{path}/position/0").status_code == 400
    assert backlog(http, "peeked") == 10

    async def acknowledge_two() -> None:
        async with braid.connect(broker.service_url) as client:
            consumer = await client.consumer("peeked", "s", type="shared")
            got = [await consumer.receive(5) for _number in range(10)]
            for number in (1, 3):
                await consumer.acknowledge(got[number], wait=True)

    broker.run(acknowledge_two())
    assert [http.get(f"{path}/position/{number}").content for number in (1, 2, 3, 8)] == [b"0", b"2", b"4", b"9"]
    analysis = http.post(f"{path}/analyzeBacklog").json()
    assert (analysis["entries"], analysis["messages"], analysis["aborted"]) == (8, 8, False)
    assert analysis["lastMessageId"] == f"{ids[9].ledger_id}:{ids[9].entry_id}"
    fourth = {"ledgerId": ids[4].ledger_id, "entryId": ids[4].entry_id}
    assert http.post(f"{path}/analyzeBacklog", json=fourth).json()["entries"] == 6
    assert http.post(f"{path}/skip/3").status_code == 204
    assert http.get(f"{path}/position/1").content == b"5"
    assert backlog(http, "peeked") == 5
    sixth = {"ledgerId": ids[6].ledger_id, "entryId": ids[6].entry_id}
    assert http.post(f"{path}/expireMessages", json={**sixth, "excluded": True}).status_code == 204
    assert backlog(http, "peeked") == 4
    assert http.post(f"{path}/expireMessages", json=sixth).status_code == 204
    assert backlog(http, "peeked") == 3
    assert http.post(f"{path}/expireMessages/3600").status_code == 204
    assert backlog(http, "peeked") == 3
    assert http.post(f"{path}/skip/100").status_code == 204
    assert backlog(http, "peeked") == 0
    assert http.post(f"{path}/skip/1").status_code == 204


@pytest.mark.parametrize("call", ["subscription/s/expireMessages/5", "all_subscription/expireMessages/5"])
def test_expiry_by_time(call: str) -> None:
    from braid.testing.clock import ManualClock

    with BackgroundBroker(clock=ManualClock()) as broker, httpx.Client(base_url=broker.http_url + ROOT) as http:
        assert http.put(f"{TOPICS}/aged/subscription/s", json=EARLIEST).status_code == 204
        send(broker, "aged", [b"old"])
        broker.advance(8)
        send(broker, "aged", [b"new"])
        assert http.post(f"{TOPICS}/aged/{call}").status_code == 204
        assert http.get(f"{TOPICS}/aged/subscription/s/position/1").content == b"new"
        assert http.get(f"{TOPICS}/aged/subscription/s/position/2").status_code == 404


def test_properties_and_names_of_subscriptions(http: httpx.Client) -> None:
    path = f"{TOPICS}/subbed/subscription/s"
    assert http.put(path, json={**EARLIEST, "properties": {"a": "1", "b": "2"}}).status_code == 204
    assert http.get(f"{path}/properties").json() == {"a": "1", "b": "2"}
    assert http.put(f"{path}/properties", json={"c": "3"}).status_code == 204
    assert http.get(f"{path}/properties").json() == {"c": "3"}
    assert http.get(f"{TOPICS}/subbed/subscription/x/properties").status_code == 404
    assert http.put(f"{TOPICS}/subbed/subscription/__compaction").status_code == 412
    assert http.put(f"{TOPICS}/subbed/subscription/x?replicated=true").status_code == 405


# Brokers and lookup.


def test_lookup_over_http(broker: BackgroundBroker) -> None:
    url = f"{broker.http_url}/lookup/v2/topic"
    found = httpx.get(f"{url}/persistent/public/default/anything").json()
    assert found == {
        "brokerId": broker.http_url.removeprefix("http://"),
        "brokerUrl": broker.service_url,
        "brokerUrlTls": "",
        "httpUrl": broker.http_url,
        "httpUrlTls": "",
        "nativeUrl": broker.service_url,
        "brokerUrlSsl": "",
    }
    bundle = httpx.get(f"{url}/persistent/public/default/anything/bundle")
    assert (bundle.headers["content-type"].split(";")[0], len(bundle.text)) == ("text/plain", 21)
    assert httpx.get(f"{url}/persistent/public/nowhere/t").status_code == 404
    assert httpx.get(f"{url}/non-persistent/public/default/t").status_code == 405
    assert httpx.get(f"{url}/other/public/default/t").status_code == 412
    assert httpx.get(f"{url}/persistent/public/default/t?listenerName=inside").status_code == 405
    assert httpx.get(f"{url}/persistent/public/default/t", headers={"X-Pulsar-ListenerName": "in"}).status_code == 405
    with httpx.Client(base_url=broker.http_url + ROOT) as http:
        assert http.put("/namespaces/public/closed").status_code == 204
        http.post("/namespaces/public/closed/autoTopicCreation", json={"allowAutoTopicCreation": False})
        assert httpx.get(f"{url}/persistent/public/closed/t").status_code == 404


def test_broker_state_and_settings(http: httpx.Client, broker: BackgroundBroker) -> None:
    assert http.get("/brokers/configuration").json() == []
    assert http.get("/brokers/configuration/values").json() == {}
    assert http.post("/brokers/configuration/max_message_size/1").status_code == 412
    assert http.delete("/brokers/configuration/max_message_size").status_code == 412
    assert "ledgersRootPath" in http.get("/brokers/internal-configuration").json()
    assert http.post("/brokers/shutdown").status_code == 405
    me = http.get("/brokers/leaderBroker").json()["brokerId"]
    assert http.post(f"/brokers/{me}/drain").status_code == 409  # nobody could take what it has
    send(broker, "measured", [b"x"])
    assert http.get("/broker-stats/load-report").json()["numTopics"] >= 1
    by_bundle = http.get("/broker-stats/topics").json()["public/default"]
    assert any("persistent://public/default/measured" in each["persistent"] for each in by_bundle.values())
    totals = http.get("/broker-stats/metrics").json()
    assert totals[0]["dimensions"]["broker"] == me
    assert totals[0]["metrics"]["pulsar_broker_topics_count"] >= 1
