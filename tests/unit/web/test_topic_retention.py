"""A topic's own retention policy: over REST and the admin client, for plain, partitioned and scalable topics, through restarts;
it wins over the namespace's, and its parts follow it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.unit.web.test_unread_retention import NAMESPACE, PLAIN, SCALABLE, World, running

import braid
from braid.client.admin import AdminClient
from braid.client.admin_types import Retention
from braid.errors import NotAllowed, NotFound, Rejected
from braid.managedledger.retention import Limits
from braid.testing.broker import InProcessBroker

PARTITIONED = "persistent://public/default/parted"
KINDS = pytest.mark.parametrize("topic", [PLAIN, PARTITIONED, SCALABLE], ids=["plain", "partitioned", "scalable"])
PARTS = pytest.mark.parametrize("topic", [PARTITIONED, SCALABLE], ids=["partitioned", "scalable"])
FOR_EVER = Retention(retention_time_in_minutes=-1, retention_size_in_mb=-1)
HOUR = Retention(retention_time_in_minutes=60, retention_size_in_mb=-1)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with running() as made:
        yield made


async def create(world: World, topic: str) -> None:
    if topic == PARTITIONED:
        await world.admin.topics.create(topic, partitions=1)
    else:
        await world.create(topic)


async def get(admin: AdminClient, topic: str, *, applied: bool = False) -> Retention | None:
    if topic == SCALABLE:
        return await admin.scalable_topics.get_retention(topic, applied=applied)
    return await admin.topics.retention(topic, applied=applied)


async def put(admin: AdminClient, topic: str, minutes: int, megabytes: int) -> None:
    noun = admin.scalable_topics if topic == SCALABLE else admin.topics
    await noun.set_retention(topic, minutes=minutes, megabytes=megabytes)


async def remove(admin: AdminClient, topic: str) -> None:
    await (admin.scalable_topics if topic == SCALABLE else admin.topics).remove_retention(topic)


async def delete(admin: AdminClient, topic: str) -> None:
    await (admin.scalable_topics if topic == SCALABLE else admin.topics).delete(topic, force=True)


async def two_ledgers(world: World, topic: str) -> Any:
    """Ten messages in a ledger that may go, one in the newest; the log of the topic, or of its only part."""
    await create(world, topic)
    await world.produce(topic, 0, 10)
    await world.unload()
    await world.produce(topic, 10, 11)
    (loaded,) = world.service.topics.values()
    return loaded.log


@KINDS
async def test_it_is_set_shown_and_removed(world: World, topic: str) -> None:
    await create(world, topic)
    assert await get(world.admin, topic) is None
    await world.admin.namespaces.set_retention(NAMESPACE, minutes=60, megabytes=-1)
    assert await get(world.admin, topic, applied=True) == HOUR
    await put(world.admin, topic, -1, -1)
    assert await get(world.admin, topic) == await get(world.admin, topic, applied=True) == FOR_EVER
    await remove(world.admin, topic)
    await remove(world.admin, topic)
    assert (await get(world.admin, topic), await get(world.admin, topic, applied=True)) == (None, HOUR)


@KINDS
async def test_it_outlives_a_restart(tmp_path: Path, topic: str) -> None:
    for is_first in (True, False):
        async with (
            InProcessBroker(data_dir=tmp_path) as broker,
            braid.connect(broker.service_url) as client,
            AdminClient(broker.http_url) as admin,
        ):
            world = World(broker, client, admin)
            if is_first:
                await create(world, topic)
                await put(admin, topic, 60, -1)
                continue
            assert await get(admin, topic) == HOUR
            await world.produce(topic, 0, 1)
            assert {each.log.limits for each in world.service.topics.values()} == {Limits(60, -1, 0)}


@KINDS
async def test_it_wins_over_the_namespace_whichever_keeps_more(world: World, topic: str) -> None:
    log = await two_ledgers(world, topic)
    await world.admin.namespaces.set_retention(NAMESPACE, minutes=0, megabytes=0)
    await put(world.admin, topic, -1, -1)
    await world.service.retention.trim()
    assert len(log.infos) == 2
    await world.admin.namespaces.set_retention(NAMESPACE, minutes=-1, megabytes=-1)
    await put(world.admin, topic, 0, 0)
    assert await get(world.admin, topic) == Retention(retention_time_in_minutes=0, retention_size_in_mb=0)
    await world.service.retention.trim()
    assert await world.read(topic, 10) == [10]


@KINDS
async def test_a_topic_made_anew_has_none(world: World, topic: str) -> None:
    await create(world, topic)
    await put(world.admin, topic, -1, -1)
    await delete(world.admin, topic)
    await create(world, topic)
    assert await get(world.admin, topic) is None
    await world.produce(topic, 0, 1)
    assert {each.log.limits for each in world.service.topics.values()} == {Limits(0, 0, 10_080)}


@pytest.mark.inv("INV15")
@PARTS
async def test_a_policy_that_keeps_more_counts_before_the_next_deletion(world: World, topic: str) -> None:
    """Whoever set it: the log that is loaded has not heard of it."""
    log = await two_ledgers(world, topic)
    await put(world.admin, topic, -1, -1)
    assert log.policy is None
    await world.admin.namespaces.set_retention(NAMESPACE, minutes=0, megabytes=0)
    assert await log.trim() == 0
    assert (log.limits, len(log.infos)) == (Limits(-1, -1, 0), 2)


async def test_segments_made_later_and_sealed_ones_follow_it(world: World) -> None:
    await world.admin.namespaces.set_retention(NAMESPACE, minutes=0, megabytes=0)
    await world.create(SCALABLE)
    await put(world.admin, SCALABLE, -1, -1)
    await world.produce(SCALABLE, 0, 10)
    controller = await world.controller()
    await controller.split_segment(0)
    await world.produce(SCALABLE, 10, 20)
    await world.service.retention.trim()
    assert {each.log.limits for each in world.service.topics.values()} == {Limits(-1, -1, 0)}
    assert await controller.prune() == []
    assert (await world.admin.scalable_topics.get_stats(SCALABLE)).segments[0].next_trim.at_ms is None
    await put(world.admin, SCALABLE, 0, 0)
    assert await controller.prune() == [0]


async def test_partitions_made_later_follow_it(world: World) -> None:
    await create(world, PARTITIONED)
    await put(world.admin, PARTITIONED, 60, -1)
    await world.admin.topics.grow(PARTITIONED, 2)
    await world.produce(f"{PARTITIONED}-partition-1", 0, 1)
    (loaded,) = world.service.topics.values()
    assert loaded.log.limits == Limits(60, -1, 0)


async def test_what_cannot_be_set_is_refused(world: World) -> None:
    await create(world, PARTITIONED)
    await create(world, SCALABLE)
    for topic, minutes, megabytes in ((PARTITIONED, -2, 1), (PARTITIONED, 0, 1), (SCALABLE, 1, 0)):
        with pytest.raises(Rejected):
            await put(world.admin, topic, minutes, megabytes)
    with pytest.raises(NotAllowed, match="belongs to the whole topic"):
        await put(world.admin, f"{PARTITIONED}-partition-0", 1, 1)
    for topic in ("nowhere", PLAIN):  # a scalable topic has that name
        for call in (world.admin.topics.retention, world.admin.topics.remove_retention):
            with pytest.raises(NotFound):
                await call(topic)
    with pytest.raises(NotFound):
        await world.admin.scalable_topics.set_retention("nowhere", minutes=1, megabytes=1)


async def test_the_shapes_of_official_tools(world: World) -> None:
    """What Pulsar's admin clients send, and the answers they can read."""
    await create(world, PLAIN)
    async with httpx.AsyncClient(base_url=f"{world.broker.http_url}/admin/v2/persistent/public/default") as http:
        path = "/orders/retention"
        assert (await http.get(path, params={"applied": "false"})).status_code == 204
        body = {"retentionTimeInMinutes": 10, "retentionSizeInMB": 100}
        assert (await http.post(path, params={"isGlobal": "false"}, json=body)).status_code == 204
        assert (await http.get(path, params={"applied": "true"})).json() == body
        assert (await http.delete(path)).status_code == 204
        assert (await http.get(path)).content == b""


async def test_any_broker_is_asked(tmp_path: Path) -> None:
    async with InProcessBroker(brokers=3) as broker:
        for number, node in enumerate(broker.nodes):
            async with AdminClient(node.http_url) as admin:
                if number == 0:
                    await admin.topics.create(PLAIN)
                    await admin.scalable_topics.create("topic://public/default/scaled")
                await put(admin, PLAIN, number + 1, -1)
                await admin.scalable_topics.set_retention("scaled", minutes=number + 1, megabytes=-1)
                for other in broker.nodes:
                    async with AdminClient(other.http_url) as asked:
                        for found in (await get(asked, PLAIN), await asked.scalable_topics.get_retention("scaled")):
                            assert found is not None
                            assert found.retention_time_in_minutes == number + 1


async def test_one_unreadable_record_stops_the_trimming_of_no_other_topic(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    log = await two_ledgers(world, PLAIN)
    await create(world, PARTITIONED)
    await world.produce(f"{PARTITIONED}-partition-0", 0, 1)
    await put(world.admin, PLAIN, 0, 0)
    topics = world.service.topics
    topics[PLAIN] = topics.pop(PLAIN)  # comes after the other
    key = "/admin/partitioned-topics/public/default/persistent/parted"
    await world.service.metadata.put(key, b'{"partitions":1,"retentionPolicies":{"retentionTimeInMinutes":"x"}}')
    await world.service.retention.trim()
    assert len(log.infos) == 1
    assert key in caplog.text
