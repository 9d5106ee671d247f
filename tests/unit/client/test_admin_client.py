"""`AdminClient` against a real broker: every group of operations, typed, and its blocking twin."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta

import pytest

import braid
from braid.client import blocking
from braid.client.admin import AdminClient
from braid.client.admin_types import TopicStats
from braid.client.messages import MessageId
from braid.errors import Closed, Conflict, NotFound, PreconditionFailed, Rejected
from braid.testing.broker import BackgroundBroker


@pytest.fixture(scope="module")
def broker() -> Iterator[BackgroundBroker]:
    with BackgroundBroker() as running:
        yield running


@pytest.fixture
async def admin(broker: BackgroundBroker) -> AsyncIterator[AdminClient]:
    async with braid.AdminClient(broker.http_url) as client:
        yield client


async def send(broker: BackgroundBroker, topic: str, *payloads: bytes) -> list[MessageId]:
    async with braid.connect(broker.service_url) as client:
        producer = await client.producer(topic, batching=False)
        return [await producer.send(each, key="k", properties={"p": "é"}) for each in payloads]


async def test_clusters_and_tenants(admin: AdminClient) -> None:
    assert await admin.clusters.list() == ["standalone"]
    assert (await admin.clusters.get("standalone")).broker_service_url
    await admin.clusters.create("west", service_url="http://west:8080")
    with pytest.raises(Conflict):
        await admin.clusters.create("west")
    await admin.clusters.update("west", service_url="http://west:8081")
    assert (await admin.clusters.get("west")).service_url == "http://west:8081"
    await admin.clusters.delete("west")
    await admin.tenants.create("acme", admin_roles=["ops"])
    with pytest.raises(Conflict, match="acme"):
        await admin.tenants.create("acme")
    await admin.tenants.update("acme", admin_roles=["a", "b"], clusters=["standalone"])
    info = await admin.tenants.get("acme")
    assert (info.admin_roles, info.allowed_clusters) == (["a", "b"], ["standalone"])
    assert "acme" in await admin.tenants.list()
    await admin.tenants.delete("acme")
    with pytest.raises(NotFound) as missing:
        await admin.tenants.get("acme")
    assert missing.value.http_status == 404


async def test_namespaces_and_their_policies(admin: AdminClient) -> None:
    name = "public/policies"
    await admin.namespaces.create(name, bundles=2)
    assert name in await admin.namespaces.list("public")
    assert len(await admin.bundles.list(name)) == 2
    assert await admin.namespaces.retention(name) is None
    await admin.namespaces.set_retention(name, minutes=10, megabytes=-1)
    retention = await admin.namespaces.retention(name)
    assert retention is not None
    assert (retention.retention_time_in_minutes, retention.retention_size_in_mb) == (10, -1)
    await admin.namespaces.remove_retention(name)
    assert await admin.namespaces.retention(name) is None
    assert await admin.namespaces.deduplication(name) is None
    await admin.namespaces.set_deduplication(name, disable=True)
    assert await admin.namespaces.deduplication(name) is False
    await admin.namespaces.remove_deduplication(name)
    await admin.namespaces.set_auto_topics(name, partitions=3)
    created = await admin.namespaces.auto_topics(name)
    assert created is not None
    assert (created.topic_type, created.default_num_partitions) == ("partitioned", 3)
    await admin.namespaces.remove_auto_topics(name)
    await admin.namespaces.set_auto_subscriptions(name, disable=True)
    assert await admin.namespaces.auto_subscriptions(name) is False
    await admin.namespaces.remove_auto_subscriptions(name)
    assert await admin.namespaces.auto_subscriptions(name) is None
    await admin.namespaces.set_schema_strategy(name, "FORWARD")
    assert await admin.namespaces.schema_strategy(name) == "FORWARD"
    await admin.namespaces.set_properties(name, {"team": "billing"})
    assert await admin.namespaces.properties(name) == {"team": "billing"}
    await admin.namespaces.remove_properties(name)
    await admin.namespaces.grant(name, "ops", actions=["produce"])
    assert await admin.namespaces.permissions(name) == {"ops": ["produce"]}
    await admin.namespaces.revoke(name, "ops")
    assert (await admin.namespaces.policies(name))["schema_compatibility_strategy"] == "FORWARD"
    assert await admin.namespaces.topics(name) == []
    await admin.namespaces.delete(name)


async def test_the_life_of_topics(admin: AdminClient, broker: BackgroundBroker) -> None:
    await admin.topics.create("life")
    with pytest.raises(Conflict):
        await admin.topics.create("persistent://public/default/life")
    assert await admin.topics.partitions("life") == 0
    ids = await send(broker, "life", b"one", b"two")
    assert await admin.topics.last_message_id("life") == MessageId(ids[1].ledger_id, ids[1].entry_id)
    stats = await admin.topics.stats("life")
    assert isinstance(stats, TopicStats)
    assert (stats.msg_in_counter, stats.owner_broker) == (2, broker.http_url.removeprefix("http://"))
    internal = await admin.topics.internal_stats("life")
    assert (internal.number_of_entries, internal.state) == (2, "LedgerOpened")
    message = await admin.topics.message("life", ids[0])
    assert (message.payloads(), message.key, message.properties) == ([b"one"], "k", {"p": "é"})
    await admin.topics.grant("life", "ops", actions=["consume"])
    assert await admin.topics.permissions("life") == {"ops": ["consume"]}
    await admin.topics.revoke("life", "ops")
    await admin.topics.set_properties("life", {"tier": "1", "owner": "me"})
    await admin.topics.remove_property("life", "tier")
    assert await admin.topics.properties("life") == {"owner": "me"}
    assert (await admin.topics.lookup("life")).broker_url == broker.service_url
    assert await admin.topics.bundle("life") in await admin.bundles.list("public/default")
    await admin.topics.unload("life")
    assert await admin.topics.terminate("life") == MessageId(ids[1].ledger_id, ids[1].entry_id)
    assert "persistent://public/default/life" in await admin.topics.list()
    await admin.topics.delete("life")
    with pytest.raises(NotFound, match="life does not exist"):
        await admin.topics.stats("life")


async def test_partitioned_topics(admin: AdminClient, broker: BackgroundBroker) -> None:
    await admin.topics.create("parts", partitions=2)
    await admin.topics.grow("parts", 3)
    assert await admin.topics.partitions("parts") == 3
    assert "persistent://public/default/parts" in await admin.topics.partitioned()
    with pytest.raises(Rejected) as refused:
        await admin.topics.grow("parts", 1)
    assert refused.value.http_status == 422
    await send(broker, "parts", b"1", b"2", b"3")
    stats = await admin.topics.partitioned_stats("parts")
    assert (stats.msg_in_counter, stats.metadata.partitions, len(stats.partitions)) == (3, 3, 3)
    assert (await admin.topics.partitioned_stats("parts", per_partition=False)).partitions == {}
    internal = await admin.topics.partitioned_internal_stats("parts")
    assert sum(each.number_of_entries for each in internal.partitions.values()) == 3
    await admin.topics.delete("parts")
    assert not [name for name in await admin.topics.list() if "/parts" in name]


async def test_subscriptions_move(admin: AdminClient, broker: BackgroundBroker) -> None:
    await admin.topics.create("moves")
    await admin.subscriptions.create("moves", "audit", at="earliest", properties={"a": "b"})
    assert await admin.subscriptions.properties("moves", "audit") == {"a": "b"}
    await admin.subscriptions.set_properties("moves", "audit", {"c": "d"})
    assert await admin.subscriptions.properties("moves", "audit") == {"c": "d"}
    ids = await send(broker, "moves", b"1", b"2", b"3", b"4")

    async def backlog() -> int:
        return (await admin.topics.stats("moves")).subscriptions["audit"].msg_backlog

    assert await backlog() == 4
    await admin.subscriptions.skip("moves", "audit", 1)
    assert await backlog() == 3
    assert (await admin.subscriptions.peek("moves", "audit")).payload == b"2"
    assert (await admin.subscriptions.peek("moves", "audit", 3)).payload == b"4"
    with pytest.raises(NotFound):
        await admin.subscriptions.peek("moves", "audit", 4)
    await admin.subscriptions.skip_all("moves", "audit")
    assert await backlog() == 0
    await admin.subscriptions.reset("moves", "audit", ids[2])
    assert await backlog() == 2
    await admin.subscriptions.reset("moves", "audit", ids[2], excluded=True)
    assert await backlog() == 1
    await admin.subscriptions.reset("moves", "audit", datetime.now(UTC) - timedelta(hours=1))
    assert await backlog() == 4
    await admin.subscriptions.reset("moves", "audit", "latest")
    assert await backlog() == 0
    await admin.subscriptions.create("moves", "second", at=ids[1])
    assert await admin.subscriptions.list("moves") == ["audit", "second"]
    await admin.subscriptions.delete("moves", "second")
    with pytest.raises(NotFound, match="second"):
        await admin.subscriptions.delete("moves", "second")


async def test_what_is_in_use_is_deleted_by_force_only(admin: AdminClient, broker: BackgroundBroker) -> None:
    async with braid.connect(broker.service_url) as client:
        await client.consumer("used", "s")
        with pytest.raises(PreconditionFailed) as refused:
            await admin.subscriptions.delete("used", "s")
        assert refused.value.http_status == 412
        with pytest.raises(PreconditionFailed):
            await admin.topics.delete("used")
        await admin.topics.delete("used", force=True)


async def test_brokers(admin: AdminClient, broker: BackgroundBroker) -> None:
    name = broker.http_url.removeprefix("http://")
    assert await admin.brokers.list() == [name]
    assert (await admin.brokers.leader()).broker_id == name
    assert await admin.brokers.health() == await admin.brokers.ready() == "ok"
    assert await admin.brokers.version() == braid.__version__
    assert (await admin.brokers.configuration())["max_message_size"] == "5242880"
    await send(broker, "served", b"x")
    bundle = await admin.topics.bundle("served")
    assert f"public/default/{bundle}" in await admin.brokers.owned(name)
    served = await admin.brokers.topics()
    assert served["public/default"][bundle]["persistent"]["persistent://public/default/served"].msg_in_counter == 1
    await admin.bundles.unload("public/default", bundle)
    await admin.namespaces.unload("public/default")


def test_blocking(broker: BackgroundBroker) -> None:
    before = set(threading.enumerate())
    with blocking.AdminClient(broker.http_url) as admin:
        assert admin.urls == [broker.http_url]
        admin.topics.create("block", partitions=2)
        stats = admin.topics.partitioned_stats("block")
        assert stats.metadata.partitions == 2
        found: list[int] = []
        threads = [threading.Thread(target=lambda: found.append(admin.topics.partitions("block"))) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [2] * 5
        with pytest.raises(NotFound):
            admin.topics.stats("no-such-topic")
    admin.close()
    with pytest.raises(Closed):
        admin.topics.list()
    assert "braid-admin" not in {thread.name for thread in threading.enumerate() if thread not in before}


def test_blocking_inside_a_running_loop_is_refused(broker: BackgroundBroker) -> None:
    async def wrong() -> None:
        with pytest.raises(RuntimeError, match=r"use braid\.AdminClient with await"):
            blocking.AdminClient(broker.http_url)
        with pytest.raises(RuntimeError, match=r"use braid\.AdminClient with await"):
            client.topics.list()

    with blocking.AdminClient(broker.http_url) as client:
        asyncio.run(wrong())
        assert isinstance(client.topics.list(), list)


def test_help_of_the_blocking_client_is_that_of_the_other() -> None:
    assert str(inspect.signature(blocking.Topics.stats)) == "(self, topic: 'str') -> 'TopicStats'"
