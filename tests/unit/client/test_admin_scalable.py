"""`AdminClient.scalable_topics` and `.segments` against a real broker, typed, and their blocking twins."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta

import pytest

from braid.client.admin import AdminClient
from braid.client.admin_scalable import ScalableTopics, Segments, scalable_parts, segment_parts
from braid.client.admin_scalable_types import ScalableTopicInfo, ScalableTopicStats, SegmentLoad
from braid.client.blocking import AdminClient as BlockingAdminClient
from braid.errors import BraidError, Conflict, InvalidArgument, InvalidTopicName, NotAllowed, NotFound, PreconditionFailed
from braid.testing.broker import BackgroundBroker
from braid.testing.raw_client import RawClient


@pytest.fixture(scope="module")
def broker() -> Iterator[BackgroundBroker]:
    with BackgroundBroker() as running:
        yield running


@pytest.fixture
async def admin(broker: BackgroundBroker) -> AsyncIterator[AdminClient]:
    async with AdminClient(broker.http_url) as client:
        yield client


@pytest.mark.req("R468-85")
def test_the_surface() -> None:
    topics = {"list", "create", "get_metadata", "get_stats", "delete", "split_segment", "merge_segments"}
    topics |= {"create_subscription", "delete_subscription", "seek", "clear_backlog", "remove_consumer"}
    topics |= {"get_retention", "set_retention", "remove_retention"}
    assert topics == {name for name in vars(ScalableTopics) if not name.startswith("_")}
    assert {"create", "terminate", "delete"} <= {name for name in vars(Segments) if not name.startswith("_")}


@pytest.mark.req("R468-85")
@pytest.mark.parametrize("name", ["orders", "topic://public/default/a/b é%"])
async def test_a_topic_from_creation_to_deletion(admin: AdminClient, broker: BackgroundBroker, name: str) -> None:
    topics = admin.scalable_topics
    full = name if "://" in name else f"topic://public/default/{name}"
    await topics.create(name, segments=2, properties={"team": "billing", "é": "="})
    with pytest.raises(Conflict):
        await topics.create(name)
    assert await topics.list() == [full] == await topics.list("public/default", properties={"team": "billing", "é": "="})
    assert await topics.list(properties={"team": "other"}) == []
    info = await topics.get_metadata(name)
    assert isinstance(info, ScalableTopicInfo)
    assert (info.epoch, info.properties, info.routing, sorted(info.segments)) == (
        0,
        {"team": "billing", "é": "="},
        "high16",
        [0, 1],
    )
    assert str(info.segments[1].hash_range) == "8000-ffff"
    await topics.create_subscription(name, "a b", kind="queue", at="latest")
    await topics.create_subscription(name, "a b", kind="queue", at="latest")
    await topics.create_subscription(name, "billing")
    await topics.split_segment(name, 0)
    await topics.merge_segments(name, 1, 3)
    stats = await topics.get_stats(name)
    assert isinstance(stats, ScalableTopicStats)
    assert (stats.epoch, stats.total_segments, stats.active_segments, stats.sealed_segments) == (2, 5, 2, 3)
    assert stats.segments[4].name == full.replace("topic:", "segment:") + "/4000-ffff-4"
    assert stats.segments[4].backlog == {"a b": 0, "billing": 0} and stats.segments[4].is_reachable
    assert (stats.subscriptions["a b"].type, stats.subscriptions["billing"].type) == ("QUEUE", "STREAM")
    assert [each.kind for each in stats.subscriptions["billing"].blocked_by] == ["no-consumer"]
    assert stats.leader == broker.http_url.removeprefix("http://")
    await topics.seek(name, "billing", "earliest")
    await topics.seek(name, "billing", datetime.now(UTC) - timedelta(hours=1))
    await topics.clear_backlog(name, "billing")
    await topics.delete_subscription(name, "billing")
    assert list((await topics.get_stats(name)).subscriptions) == ["a b"]
    await topics.delete(name)
    for gone in (topics.get_metadata(name), topics.get_stats(name), topics.delete(name), topics.split_segment(name, 0)):
        with pytest.raises(NotFound):
            await gone


async def test_segments(admin: AdminClient, broker: BackgroundBroker) -> None:
    await admin.scalable_topics.create("parts", segments=2, routing="low16")
    segment = "segment://public/default/parts/0000-7fff-0"
    await admin.segments.create(segment, subscriptions=["s", "é %"], at="earliest")
    assert sorted(await admin.segments.subscriptions(segment)) == ["s", "é %"]

    async def send() -> None:
        client = await RawClient.connect(broker.service_url)
        await client.producer(segment)
        for number in range(4):
            await client.store(b"x", number)
        client.close()

    broker.run(send())
    load = await admin.segments.stats(segment)
    assert isinstance(load, SegmentLoad)
    assert load.messages == 4 and load.backlog == {"s": 4, "é %": 4} and load.owner
    assert (await admin.segments.backlog(segment, "é %")).messages == 4
    await admin.segments.skip_all(segment, "s")
    assert (await admin.segments.backlog(segment, "s")).messages == 0
    await admin.segments.seek(segment, "s", "earliest")
    assert (await admin.segments.backlog(segment, "s")).messages == 4
    await admin.segments.create_subscription(segment, "late", at="latest")
    assert (await admin.segments.backlog(segment, "late")).messages == 0
    await admin.segments.delete_subscription(segment, "late")
    last = await admin.segments.terminate(segment, force=True)
    assert last.entry_id == 3 and last == await admin.segments.terminate(segment, force=True)
    assert (await admin.segments.backlog(segment, "s")).is_terminated
    await admin.segments.delete(segment, force=True)
    with pytest.raises(NotFound):
        await admin.segments.stats(segment)
    await admin.scalable_topics.delete("parts", force=True)


async def test_refusals_have_a_class_and_a_status(admin: AdminClient) -> None:
    topics = admin.scalable_topics
    await topics.create("refusing", segments=3)
    for work, kind, status in (
        (topics.create("none", segments=0), PreconditionFailed, 412),
        (topics.create("none", segments=-1), PreconditionFailed, 412),
        (topics.create("none", segments=65_537), PreconditionFailed, 412),
        (topics.split_segment("refusing", 9), NotFound, 404),
        (topics.merge_segments("refusing", 0, 2), PreconditionFailed, 412),
        (topics.merge_segments("refusing", 1, 1), PreconditionFailed, 412),
        (topics.clear_backlog("refusing", "nobody"), NotFound, 404),
        (topics.remove_consumer("refusing", "nobody", "c"), NotFound, 404),
        (topics.list("public/nowhere"), NotFound, 404),
    ):
        with pytest.raises(kind) as refused:
            await work
        assert refused.value.http_status == status
    await topics.split_segment("refusing", 1)
    with pytest.raises(PreconditionFailed, match="sealed"):
        await topics.split_segment("refusing", 1)


async def test_what_is_refused_before_anything_is_sent() -> None:
    async with AdminClient("http://localhost:1") as admin:
        topics = admin.scalable_topics
        for work, kind in (
            (topics.split_segment("x", -1), InvalidArgument),
            (topics.merge_segments("x", 1, 1 << 63), InvalidArgument),
            (topics.create_subscription("x", " "), InvalidArgument),
            (topics.create_subscription("x", "s", kind="shared"), InvalidArgument),  # type: ignore[arg-type]
            (topics.create_subscription("x", "s", at="middle"), InvalidArgument),  # type: ignore[arg-type]
            (topics.seek("x", "s", datetime(2026, 1, 1)), InvalidArgument),  # noqa: DTZ001
            (topics.seek("x", "s", "latest"), InvalidArgument),  # type: ignore[arg-type]
            (topics.get_metadata("persistent://public/default/x"), InvalidArgument),
            (topics.get_metadata("segment://public/default/x/0000-7fff-0"), InvalidArgument),
            (topics.get_metadata(""), InvalidTopicName),
            (admin.segments.stats("orders"), InvalidArgument),
            (admin.segments.stats("topic://public/default/orders"), InvalidArgument),
            (admin.segments.stats("segment://public/default/orders"), InvalidTopicName),
            (admin.topics.stats("topic://public/default/orders"), NotAllowed),
            (admin.subscriptions.list("segment://public/default/orders/0000-7fff-0"), NotAllowed),
        ):
            with pytest.raises(kind) as refused:
                await work
            assert isinstance(refused.value, BraidError)
        with pytest.raises(NotAllowed, match="scalable-topics"):
            await admin.topics.delete("topic://public/default/orders")
        with pytest.raises(NotAllowed, match="a segment of topic://public/default/orders"):
            await admin.topics.stats("segment://public/default/orders/0000-7fff-0")


def test_names() -> None:
    base = {"tenant": "public", "namespace": "default"}
    assert scalable_parts("orders") == {**base, "topic": "orders"}
    assert scalable_parts("t/n/orders") == {"tenant": "t", "namespace": "n", "topic": "orders"}
    assert scalable_parts("topic://t/n/a/b") == {"tenant": "t", "namespace": "n", "topic": "a/b"}
    assert segment_parts("segment://t/n/a/b/0-7fff-3") == {
        "tenant": "t",
        "namespace": "n",
        "topic": "a/b",
        "descriptor": "0000-7fff-3",
    }
    assert segment_parts("persistent://t/n/x-partition-0")["descriptor"] == "persistent"


@pytest.mark.req("R468-85")
def test_the_blocking_twin(broker: BackgroundBroker) -> None:
    with BlockingAdminClient(broker.http_url) as admin:
        admin.scalable_topics.create("blocking", segments=2)
        admin.scalable_topics.split_segment("blocking", 0)
        assert admin.scalable_topics.get_metadata("blocking").epoch == 1
        assert admin.scalable_topics.get_stats("blocking").active_segments == 3
        assert admin.segments.subscriptions("segment://public/default/blocking/8000-ffff-1") == []
        admin.scalable_topics.delete("blocking")
        with pytest.raises(NotFound):
            admin.scalable_topics.get_metadata("blocking")
