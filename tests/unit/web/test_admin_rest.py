"""The admin API over real HTTP: statuses and shapes of the protocol sheet 9, and what bad input gets."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

import braid
from braid.testing.broker import BackgroundBroker

ROOT = "/admin/v2"
TOPICS = "/persistent/public/default"


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
            return [await producer.send(each, key="k", properties={"p": "é"}) for each in payloads]

    return broker.run(work())


def subscribe(broker: BackgroundBroker, topic: str, name: str, count: int, **options: Any) -> list[bytes]:
    """Receive and acknowledge `count` messages."""

    async def work() -> list[bytes]:
        async with braid.connect(broker.service_url) as client:
            consumer = await client.consumer(topic, name, **options)
            got = []
            for _number in range(count):
                message = await consumer.receive(5)
                await consumer.acknowledge(message, wait=True)
                got.append(message.payload)
            return got

    return broker.run(work())


def reason(response: httpx.Response) -> str:
    body = response.json()
    assert set(body) == {"reason"}
    assert "Traceback" not in body["reason"]
    return str(body["reason"])


# What is there.


def test_a_fresh_broker_lists_its_cluster_tenants_and_namespaces(http: httpx.Client) -> None:
    assert http.get("/clusters").json() == ["standalone"]
    assert {"public", "pulsar"} <= set(http.get("/tenants").json())
    assert http.get("/namespaces/public").json() == ["public/default"]
    assert http.get("/tenants/public").json() == {"adminRoles": [], "allowedClusters": ["standalone"]}


def test_health_ready_version_and_configuration(http: httpx.Client, broker: BackgroundBroker) -> None:
    for path in ("/brokers/health", "/brokers/ready"):
        response = http.get(path)
        assert (response.status_code, response.text) == (200, "ok")
    assert http.get("/brokers/version").text == braid.__version__
    assert http.get("/brokers").json() == [broker.http_url.removeprefix("http://")]
    assert http.get("/brokers/standalone").json() == http.get("/brokers").json()
    assert http.get("/brokers/nowhere").status_code == 404
    assert http.get("/brokers/configuration/runtime").json()["max_message_size"] == "5242880"


def test_the_api_describes_itself(http: httpx.Client, broker: BackgroundBroker) -> None:
    page = httpx.get(f"{broker.http_url}/docs")
    assert page.status_code == 200
    assert "/admin/v2/persistent/{tenant}/{namespace}/{topic}/partitions" in page.text
    assert "script-src" not in page.headers["content-security-policy"]
    assert "<script" not in page.text
    document = httpx.get(f"{broker.http_url}/openapi.json").json()
    assert document == httpx.get(f"{broker.http_url}/openapi/openapi.json").json()
    assert "/admin/v2/tenants/{tenant}" in document["paths"]
    ids = set()
    for path, item in document["paths"].items():
        for method, operation in item.items():
            assert operation["description"].endswith("."), path
            assert operation["summary"] and len(operation["tags"]) == 1, path
            named = {each["name"] for each in operation.get("parameters", []) if each["in"] == "path"}
            assert named == set(re.findall(r"{(\w+)}", path))
            assert all(each["description"] for each in operation.get("parameters", []))
            assert ("requestBody" in operation) <= (method in ("put", "post")), path
            refused = operation["responses"]["503"]["content"]["application/json"]["schema"]
            assert refused == {"$ref": "#/components/schemas/Refusal"}
            ids.add(operation["operationId"])
    assert len(ids) == sum(len(item) for item in document["paths"].values()) >= 128


def test_head_is_get_without_a_body(broker: BackgroundBroker) -> None:
    for path in ("/metrics", "/status.html", "/admin/v2/brokers/health"):
        response = httpx.head(f"{broker.http_url}{path}")
        assert (response.status_code, response.content) == (200, b"")


def test_an_empty_name_in_a_path_names_nothing(http: httpx.Client) -> None:
    response = http.put(f"{TOPICS}//empty-part")
    assert response.status_code == 404
    assert "empty part" in reason(response)
    assert http.get(f"{TOPICS}/empty-part/stats").status_code == 404


def test_the_root_says_where_to_look(broker: BackgroundBroker) -> None:
    response = httpx.get(f"{broker.http_url}/")
    assert response.status_code == 404
    assert (
        reason(response) == "There is nothing at /; the API is below /admin/v2 and described at /docs, metrics are at /metrics."
    )
    assert httpx.get(f"{broker.http_url}/docs").status_code == 200


def test_stats_of_a_partitioned_topic_name_the_call_to_make(http: httpx.Client) -> None:
    assert http.put(f"{TOPICS}/in-parts/partitions", json=2).status_code == 204
    for call, instead in (("stats", "partitioned-stats"), ("internalStats", "partitioned-internalStats")):
        response = http.get(f"{TOPICS}/in-parts/{call}")
        assert response.status_code == 404
        assert reason(response).endswith(f"is partitioned; ask for its {instead}.")
        assert http.get(f"{TOPICS}/in-parts/{instead}").status_code == 200


# Tenants and namespaces.


def test_the_life_of_a_tenant_and_its_namespace(http: httpx.Client) -> None:
    info = {"adminRoles": ["me"], "allowedClusters": ["standalone"]}
    assert http.put("/tenants/acme", json=info).status_code == 204
    assert http.put("/tenants/acme", json=info).status_code == 409
    assert http.post("/tenants/acme", json={"allowedClusters": ["standalone"]}).status_code == 204
    assert http.get("/tenants/acme").json() == {"adminRoles": [], "allowedClusters": ["standalone"]}
    assert http.put("/namespaces/acme/sales").status_code == 204
    assert http.put("/namespaces/acme/sales", json={}).status_code == 409
    assert http.delete("/tenants/acme").status_code == 409
    assert http.put("/persistent/acme/sales/t").status_code == 204
    assert http.delete("/namespaces/acme/sales").status_code == 409
    assert http.delete("/persistent/acme/sales/t").status_code == 204
    assert http.delete("/namespaces/acme/sales").status_code == 204
    assert http.delete("/tenants/acme").status_code == 204
    assert http.get("/tenants/acme").status_code == 404
    assert http.get("/namespaces/acme").status_code == 404


def test_policies_have_upstreams_defaults_and_keep_what_was_set(http: httpx.Client) -> None:
    path = "/namespaces/public/policies-test"
    given = {"replication_clusters": ["standalone"], "auth_policies": {"namespace_auth": {"a": ["produce"]}}, "future": 1}
    assert http.put(path, json=given).status_code == 204
    assert http.get(f"{path}/deduplication").status_code == 204
    assert http.post(f"{path}/deduplication", json=True).status_code == 204
    retention = {"retentionTimeInMinutes": 10, "retentionSizeInMB": -1}
    assert http.post(f"{path}/retention", json=retention).status_code == 204
    assert http.put(f"{path}/schemaCompatibilityStrategy", json="FORWARD").status_code == 204
    auto = {"allowAutoTopicCreation": True, "topicType": "partitioned", "defaultNumPartitions": 3}
    assert http.post(f"{path}/autoTopicCreation", json=auto).status_code == 204
    assert http.get(f"{path}/retention").json() == retention
    assert http.get(f"{path}/autoTopicCreation").json() == auto
    assert http.get(f"{path}/schemaCompatibilityStrategy").json() == "FORWARD"
    policies = http.get(path).json()
    assert policies["deduplicationEnabled"] is True
    assert policies["subscription_auth_mode"] == "None"
    assert policies["future"] == 1
    for name in ("deduplication", "retention", "autoTopicCreation"):
        assert http.delete(f"{path}/{name}").status_code == 204
    assert http.get(path).json()["retention_policies"] is None
    assert http.get("/namespaces/public/none/deduplication").status_code == 404


def test_policies_are_applied_to_loaded_topics(http: httpx.Client, broker: BackgroundBroker) -> None:
    assert http.put("/namespaces/public/applied").status_code == 204
    send(broker, "public/applied/t", [b"x"])
    assert http.post("/namespaces/public/applied/deduplication", json=True).status_code == 204
    assert http.get("/persistent/public/applied/t/stats").json()["deduplicationStatus"] == "Enabled"
    assert http.post("/namespaces/public/applied/deduplication", json=False).status_code == 204
    assert http.get("/persistent/public/applied/t/stats").json()["deduplicationStatus"] == "Disabled"


# Topics.


def test_partitioned_topics_are_created_grown_listed_and_deleted(http: httpx.Client) -> None:
    path = f"{TOPICS}/parts"
    assert http.put(f"{path}/partitions", json=2).status_code == 204
    assert http.put(f"{path}/partitions", json=2).status_code == 409
    assert http.put(path).status_code == 409
    assert http.get(f"{path}/partitions").json() == {"partitions": 2, "deleted": False}
    assert http.post(f"{path}/partitions", json=3).status_code == 204
    assert http.post(f"{path}/partitions", json=3).status_code == 204  # as many as there are: no change
    assert http.post(f"{path}/partitions", json=2).status_code == 422
    listed = http.get(TOPICS).json()
    assert [f"persistent://public/default/parts-partition-{number}" in listed for number in range(4)] == [True] * 3 + [False]
    assert "persistent://public/default/parts" in http.get(f"{TOPICS}/partitioned").json()
    assert http.get("/namespaces/public/default/topics").json() == http.get("/namespaces/public/default/topics?mode=ALL").json()
    assert http.get("/namespaces/public/default/topics?mode=NON_PERSISTENT").json() == []
    assert http.delete(path).status_code == 409
    assert http.delete(f"{path}/partitions").status_code == 204
    assert http.delete(f"{path}/partitions").status_code == 404
    assert not [name for name in http.get(TOPICS).json() if "/parts" in name]


def test_partitions_in_the_long_form(http: httpx.Client) -> None:
    body = json.dumps({"partitions": 2, "properties": {"a": "b"}})
    headers = {"content-type": "application/vnd.partitioned-topic-metadata+json"}
    assert http.put(f"{TOPICS}/long/partitions", content=body, headers=headers).status_code == 204
    assert http.get(f"{TOPICS}/long/partitions").json()["partitions"] == 2


@pytest.mark.parametrize("count", [0, -1, 10**9])
def test_absurd_numbers_of_partitions(http: httpx.Client, count: int) -> None:
    response = http.put(f"{TOPICS}/absurd/partitions", json=count)
    assert response.status_code == 406
    assert str(count) in reason(response)
    assert http.get(f"{TOPICS}/absurd/partitions").status_code == 404


def test_the_name_of_a_partition_cannot_be_partitioned(http: httpx.Client) -> None:
    response = http.put(f"{TOPICS}/x-partition-0/partitions", json=2)
    assert response.status_code == 412
    assert "choose a name without -partition-N" in reason(response)


def test_partitions_of_a_missing_topic(http: httpx.Client) -> None:
    assert http.get(f"{TOPICS}/missing/partitions").status_code == 404
    answer = http.get(f"{TOPICS}/missing/partitions?checkAllowAutoCreation=true")
    assert answer.json() == {"partitions": 0, "deleted": False}


def test_a_topic_in_use_is_deleted_only_by_force(http: httpx.Client, broker: BackgroundBroker) -> None:
    async def work() -> tuple[int, int, int]:
        async with braid.connect(broker.service_url) as client, httpx.AsyncClient(base_url=broker.http_url + ROOT) as admin:
            await client.producer("in-use")
            busy = await admin.delete(f"{TOPICS}/in-use")
            forced = await admin.delete(f"{TOPICS}/in-use?force=true")
            wrong = await admin.delete(f"{TOPICS}/in-use?force=maybe")
            return busy.status_code, forced.status_code, wrong.status_code

    assert broker.run(work()) == (412, 204, 400)


def test_stats_count_what_happened(http: httpx.Client, broker: BackgroundBroker) -> None:
    assert http.put(f"{TOPICS}/counted/subscription/s", json={"ledgerId": -1, "entryId": -1}).status_code == 204
    send(broker, "counted", [b"1", b"2", b"3"])
    assert subscribe(broker, "counted", "s", 2) == [b"1", b"2"]
    stats = http.get(f"{TOPICS}/counted/stats").json()
    assert (stats["msgInCounter"], stats["msgOutCounter"]) == (3, 3)
    assert stats["subscriptions"]["s"]["msgBacklog"] == 1
    assert stats["subscriptions"]["s"]["isDurable"] is True
    assert stats["storageSize"] > 0
    internal = http.get(f"{TOPICS}/counted/internalStats").json()
    assert internal["numberOfEntries"] == 3
    assert internal["state"] == "LedgerOpened"
    assert internal["cursors"]["s"]["markDeletePosition"].endswith(":1")


def test_stats_show_who_is_connected(broker: BackgroundBroker) -> None:
    async def work() -> dict[str, Any]:
        async with braid.connect(broker.service_url) as client, httpx.AsyncClient(base_url=broker.http_url + ROOT) as admin:
            await client.producer("who", name="writer")
            await client.consumer("who", "s", type="failover", name="reader")
            return dict((await admin.get(f"{TOPICS}/who/stats")).json())

    stats = broker.run(work())
    assert [each["producerName"] for each in stats["publishers"]] == ["writer"]
    subscription = stats["subscriptions"]["s"]
    assert (subscription["type"], subscription["activeConsumerName"]) == ("Failover", "reader")
    assert subscription["consumers"][0]["clientVersion"].startswith("Braid")
    assert subscription["consumers"][0]["availablePermits"] == 1000


def test_partitioned_stats_add_up(http: httpx.Client, broker: BackgroundBroker) -> None:
    assert http.put(f"{TOPICS}/sums/partitions", json=2).status_code == 204
    send(broker, "sums", [b"1"])
    send(broker, "sums-partition-0", [b"1", b"2"])
    stats = http.get(f"{TOPICS}/sums/partitioned-stats").json()
    assert stats["msgInCounter"] == 3
    assert stats["metadata"] == {"partitions": 2, "deleted": False}
    assert len(stats["partitions"]) == 2
    assert http.get(f"{TOPICS}/sums/partitioned-stats?perPartition=false").json()["partitions"] == {}
    assert http.get(f"{TOPICS}/sums/stats").status_code == 404
    assert http.get(f"{TOPICS}/nothing/partitioned-stats").status_code == 404


def test_terminate_answers_the_last_message(http: httpx.Client, broker: BackgroundBroker) -> None:
    last = send(broker, "finished", [b"1", b"2"])[-1]
    answer = http.post(f"{TOPICS}/finished/terminate")
    expected = {"ledgerId": last.ledger_id, "entryId": last.entry_id, "partitionIndex": -1}
    assert (answer.status_code, answer.json()) == (200, expected)
    assert http.get(f"{TOPICS}/finished/lastMessageId").json() == expected
    assert http.get(f"{TOPICS}/finished/internalStats").json()["state"] == "Terminated"
    assert http.put(f"{TOPICS}/many/partitions", json=2).status_code == 204
    assert http.post(f"{TOPICS}/many/terminate").status_code == 405
    assert http.post(f"{TOPICS}/nothing/terminate").status_code == 404


def test_unload_and_go_on(http: httpx.Client, broker: BackgroundBroker) -> None:
    assert http.put(f"{TOPICS}/unloaded/subscription/s").status_code == 204
    send(broker, "unloaded", [b"1"])
    assert http.put(f"{TOPICS}/unloaded/unload").status_code == 204
    assert http.put(f"{TOPICS}/unloaded/unload").status_code == 204
    assert http.put(f"{TOPICS}/nothing/unload").status_code == 404
    send(broker, "unloaded", [b"2"])
    assert subscribe(broker, "unloaded", "s", 2) == [b"1", b"2"]


def test_a_single_message_by_its_position(http: httpx.Client, broker: BackgroundBroker) -> None:
    where = send(broker, "single", [b"hello \xff" * 50], compression="zstd")[0]
    response = http.get(f"{TOPICS}/single/ledger/{where.ledger_id}/entry/{where.entry_id}")
    assert (response.status_code, response.content) == (200, b"hello \xff" * 50)
    assert response.headers["X-Pulsar-Message-ID"] == f"{where.ledger_id}:{where.entry_id}"
    assert json.loads(response.headers["X-Pulsar-PROPERTY"]) == {"p": "é"}
    assert response.headers["X-Pulsar-partition-key"] == "k"
    assert response.headers["X-Pulsar-compression"] == "ZSTD"
    assert response.headers["X-Pulsar-Broker-Entry-METADATA-index"] == "0"
    assert http.get(f"{TOPICS}/single/ledger/{where.ledger_id}/entry/999").status_code == 404
    for bad in ("-1", "x", str(1 << 63), "1.5"):
        assert http.get(f"{TOPICS}/single/ledger/{bad}/entry/0").status_code == 400


# Subscriptions.


def test_the_life_of_a_subscription(http: httpx.Client, broker: BackgroundBroker) -> None:
    path = f"{TOPICS}/subs/subscription/a%2Bb%20c"
    assert http.put(f"{TOPICS}/subs").status_code == 204
    assert http.put(path).status_code == 204
    assert http.put(path).status_code == 409
    assert http.get(f"{TOPICS}/subs/subscriptions").json() == ["a+b c"]
    send(broker, "subs", [b"1", b"2", b"3"])
    assert http.get(f"{TOPICS}/subs/stats").json()["subscriptions"]["a+b c"]["msgBacklog"] == 3
    assert http.post(f"{path}/skip_all").status_code == 204
    assert http.get(f"{TOPICS}/subs/stats").json()["subscriptions"]["a+b c"]["msgBacklog"] == 0
    assert http.post(f"{path}/resetcursor/0").status_code == 204
    assert subscribe(broker, "subs", "a+b c", 3) == [b"1", b"2", b"3"]
    assert http.delete(path).status_code == 204
    assert http.delete(path).status_code == 404
    assert http.post(f"{path}/skip_all").status_code == 404


def test_reset_to_a_position(http: httpx.Client, broker: BackgroundBroker) -> None:
    ids = send(broker, "reset", [b"1", b"2", b"3"])
    path = f"{TOPICS}/reset/subscription/s"
    assert http.put(path).status_code == 204
    body = {"ledgerId": ids[1].ledger_id, "entryId": ids[1].entry_id}
    assert http.post(f"{path}/resetcursor", json=body).status_code == 204
    assert subscribe(broker, "reset", "s", 2) == [b"2", b"3"]
    assert http.post(f"{path}/resetcursor", json={**body, "excluded": True}).status_code == 204
    assert subscribe(broker, "reset", "s", 1) == [b"3"]
    assert http.post(f"{path}/resetcursor", json={"ledgerId": -1, "entryId": -1}).status_code == 204
    assert subscribe(broker, "reset", "s", 1) == [b"1"]
    assert http.post(f"{path}/resetcursor", json={"ledgerId": 1 << 64, "entryId": 0}).status_code == 400
    assert http.post(f"{path}/resetcursor").status_code == 400


def test_a_subscription_on_all_partitions(http: httpx.Client) -> None:
    assert http.put(f"{TOPICS}/spread/partitions", json=2).status_code == 204
    assert http.put(f"{TOPICS}/spread/subscription/s").status_code == 204
    assert http.get(f"{TOPICS}/spread-partition-1/subscriptions").json() == ["s"]
    assert http.get(f"{TOPICS}/spread/subscriptions").json() == ["s"]
    assert http.delete(f"{TOPICS}/spread/subscription/s").status_code == 204
    assert http.get(f"{TOPICS}/spread-partition-0/subscriptions").json() == []


def test_a_subscription_in_use_is_deleted_only_by_force(broker: BackgroundBroker) -> None:
    async def work() -> tuple[int, int]:
        async with braid.connect(broker.service_url) as client, httpx.AsyncClient(base_url=broker.http_url + ROOT) as admin:
            await client.consumer("busy", "s")
            path = f"{TOPICS}/busy/subscription/s"
            return (await admin.delete(path)).status_code, (await admin.delete(f"{path}?force=true")).status_code

    assert broker.run(work()) == (412, 204)


# Bad input.

NAMES = ["%20", "%00", "a%2Fb", "%252F", "x" * 3000, "%ff", "..%2F..%2Fetc", "%E2%80%8B%2F"]


@pytest.mark.parametrize("name", NAMES)
def test_bad_tenants_and_namespaces_are_refused_and_nothing_is_stored(http: httpx.Client, name: str) -> None:
    before = http.get("/tenants").json()
    for response in (
        http.put(f"/tenants/{name}", json={"allowedClusters": ["standalone"]}),
        http.put(f"/namespaces/public/{name}"),
        http.put(f"/namespaces/{name}/x"),
        http.put(f"/persistent/{name}/default/t"),
    ):
        assert 400 <= response.status_code < 500, response.text
        assert reason(response)
    assert http.get("/tenants").json() == before


@pytest.mark.parametrize("name", ["%20", "a%2Fb", "x" * 3000, "%ff", "%20x", "x%20"])
def test_bad_topics_are_refused(http: httpx.Client, name: str) -> None:
    for response in (http.put(f"{TOPICS}/{name}"), http.put(f"{TOPICS}/{name}/partitions", json=1)):
        assert response.status_code in (400, 412), response.text
        assert reason(response)


def test_names_are_decoded_exactly_once(http: httpx.Client) -> None:
    """Decoded twice, %252F would be a path step and %252B a plus; decoded once they are escapes, which no new name holds."""
    for twice in ("once%252Ftwice", "once%252Btwice"):
        assert http.put(f"{TOPICS}/{twice}").status_code == 412
    assert http.put(f"{TOPICS}/once%2Bonly").status_code == 204
    assert "persistent://public/default/once+only" in http.get(TOPICS).json()
    assert http.get(f"{TOPICS}/once%2Bonly/stats").status_code == 200
    assert http.delete(f"{TOPICS}/once%2Bonly").status_code == 204


BODIES = [b"{", b"nul", b"\xff\xfe", b"[" * 5000, b'"text"', b"1.5", b"{}", b"[]", b"1e400", b'{"partitions": "x"}']


@pytest.mark.parametrize("body", BODIES)
def test_bad_bodies(http: httpx.Client, body: bytes) -> None:
    response = http.put(f"{TOPICS}/bad-body/partitions", content=body)
    assert response.status_code in (400, 406), response.text
    assert reason(response)
    assert http.get(f"{TOPICS}/bad-body/partitions").status_code == 404


def test_policies_of_the_wrong_shape_never_get_in(http: httpx.Client) -> None:
    shapes: list[dict[str, Any]] = [
        {"retention_policies": {"retentionTimeInMinutes": "x"}},
        {"autoTopicCreationOverride": []},
        {"deduplicationEnabled": "yes"},
        {"replication_clusters": ["nowhere"]},
        {"autoSubscriptionCreationOverride": {"allowAutoSubscriptionCreation": 3}},
    ]
    for body in shapes:
        response = http.put("/namespaces/public/wrong-shape", json=body)
        assert response.status_code in (400, 412), response.text
    assert http.get("/namespaces/public/wrong-shape").status_code == 404


def test_other_bad_values(http: httpx.Client) -> None:
    root = "/namespaces/public/default"
    assert http.post(f"{root}/retention", json={"retentionTimeInMinutes": -5, "retentionSizeInMB": 1}).status_code == 412
    assert http.post(f"{root}/retention", json={"retentionTimeInMinutes": 5, "retentionSizeInMB": 0}).status_code == 412
    assert http.post(f"{root}/autoTopicCreation", json={"topicType": "round"}).status_code == 412
    assert http.post(f"{root}/deduplication", json="yes").status_code == 400
    assert http.post(f"{root}/deduplication").status_code == 400
    assert http.put(f"{root}/schemaCompatibilityStrategy", json="SOMEHOW").status_code == 412
    assert http.get(f"{root}/topics?mode=SOME").status_code == 400
    assert http.put("/tenants/t1", json={"allowedClusters": []}).status_code == 412
    assert http.put("/tenants/t1", json={"allowedClusters": ["nowhere"]}).status_code == 412
    assert http.post(f"{TOPICS}/x/subscription/s/resetcursor/yesterday").status_code == 400


def test_a_body_beyond_the_bound(http: httpx.Client) -> None:
    response = http.put("/namespaces/public/too-much", content=b'{"a": "' + b"x" * (2 << 20) + b'"}')
    assert response.status_code == 413
    assert reason(response) == "The body is larger than 1048576 bytes."


def test_unknown_paths_and_methods(http: httpx.Client, broker: BackgroundBroker) -> None:
    for method, path, status in (
        ("GET", "/schemas/public/default/t/schema", 501),
        ("GET", "/bookies/all", 501),
        ("PATCH", "/tenants/public", 405),
        ("DELETE", "/clusters", 405),
    ):
        response = http.request(method, path)
        assert response.status_code == status, (path, response.text)
        assert "not available in this version" in reason(response)
    assert httpx.get(f"{broker.http_url}/nowhere").status_code == 404
    assert httpx.get(f"{broker.http_url}/status.html").text == "OK"


def test_non_persistent_names_get_a_clear_no(http: httpx.Client) -> None:
    response = http.put("/non-persistent/public/default/t/partitions", json=2)
    assert response.status_code == 501
