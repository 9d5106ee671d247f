"""A broker whose store does not know ledgers that records name: those topics are refused by name, all others go on (INV16)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

import braid
from braid.broker.registry import BrokerInfo
from braid.client.admin import AdminClient
from braid.errors import LedgerLost, NotAllowed, UnknownFailure
from braid.model.names import TopicName
from braid.testing.broker import InProcessBroker
from braid.web.remote_segments import RemoteSegments

TOPIC = "persistent://public/default/orders"


@pytest.fixture
async def broker() -> AsyncIterator[InProcessBroker]:
    async with InProcessBroker() as made:
        yield made


@pytest.mark.inv("INV16")
async def test_a_topic_with_a_lost_ledger_is_refused_and_reported(broker: InProcessBroker) -> None:
    service: Any = broker.nodes[0].service
    async with braid.connect(broker.service_url) as client, AdminClient(broker.http_url) as admin:
        async with client.producer(TOPIC) as producer:
            await producer.send(b"0")
        topic = service.topics[TOPIC]
        (info,) = topic.log.infos
        await service.unload(topic)
        await broker.standalone.ledgers.delete(info.ledger_id)
        said = f"does not know ledger {info.ledger_id}, which the topic {TOPIC} needs"
        with pytest.raises(NotAllowed, match=said):  # at once: nobody tries this again and again
            await client.producer(TOPIC)
        with pytest.raises(NotAllowed, match=said):
            await client.consumer(TOPIC, "s")
        with pytest.raises(UnknownFailure, match=said):
            await admin.topics.stats(TOPIC)
        (warning,) = await admin.brokers.warnings()
        assert said in warning
        assert await admin.brokers.health() == "ok"
        async with httpx.AsyncClient() as http:
            assert "\nbraid_lost_topics 1.0\n" in (await http.get(f"{broker.http_url}/metrics")).text
        async with client.producer("other") as producer:
            await producer.send(b"1")
        await admin.topics.delete(TOPIC, force=True)  # which gives it up, too
        assert await admin.brokers.warnings() == []
        async with client.producer(TOPIC) as producer:
            await producer.send(b"2")


@pytest.mark.inv("INV6", "INV16")
@pytest.mark.parametrize("is_sealed", [False, True])
async def test_a_segment_with_a_lost_ledger_stops_nothing_else_of_its_topic(is_sealed: bool) -> None:
    """Whoever of the two brokers owns it, and whoever leads the topic."""
    scalable = "topic://public/default/orders"
    async with (
        InProcessBroker(brokers=2) as broker,
        braid.connect(broker.service_url) as client,
        AdminClient(broker.http_url) as admin,
    ):
        await admin.scalable_topics.create(scalable, segments=4)
        await admin.scalable_topics.create_subscription(scalable, "old")
        async with client.producer(scalable) as producer:
            for number in range(40):
                await producer.send(b"%d" % number, key=str(number))
        if is_sealed:
            await admin.scalable_topics.split_segment(scalable, 0)
        lost, segment = await lose_segment(broker, scalable, 0)
        said = f"does not know ledger {lost}, which the topic {segment} needs"
        for node in broker.nodes:  # the error is the same one for a leader that asks over HTTP
            remote = RemoteSegments(BrokerInfo(broker_id="owner", service_url=node.service_url, http_url=node.http_url))
            try:
                with pytest.raises(LedgerLost, match=said):
                    await remote.stats(TopicName.parse(segment))
            finally:
                await remote.close()
        with pytest.raises(UnknownFailure, match=said):
            await admin.scalable_topics.create_subscription(scalable, "new")
        with pytest.raises(NotAllowed, match=said):
            await client.stream_consumer(scalable, "new")
        with pytest.raises(UnknownFailure, match=said):
            await admin.scalable_topics.clear_backlog(scalable, "old")
        if not is_sealed:
            with pytest.raises(UnknownFailure, match=said):
                await admin.scalable_topics.split_segment(scalable, 0)
            with pytest.raises(UnknownFailure, match=said):
                await admin.scalable_topics.merge_segments(scalable, 0, 1)
        await admin.scalable_topics.split_segment(scalable, 1)
        await admin.scalable_topics.merge_segments(scalable, 2, 3)
        with pytest.raises(UnknownFailure, match=said):
            await admin.scalable_topics.delete_subscription(scalable, "old")  # begun; what is left of it waits for the segment
        async with httpx.AsyncClient() as http:
            found = await http.get(f"{broker.http_url}/admin/v2/scalable/public/default/orders/stats", follow_redirects=True)
        assert {name: each["pendingOperation"]["kind"] for name, each in found.json()["subscriptions"].items()} == {
            "old": "delete"
        }
        await admin.scalable_topics.create_subscription(scalable, "group", kind="checkpoint")
        await admin.scalable_topics.delete(scalable, force=True)


async def lose_segment(broker: InProcessBroker, topic: str, number: int) -> tuple[int, str]:
    """Delete what is stored of a segment behind its owner's back; the ledger and the segment's name."""
    name = TopicName.parse(topic)
    for node in broker.nodes:
        service: Any = node.service
        for key, loaded in list(service.topics.items()):
            if (
                loaded.name.descriptor is not None
                and loaded.name.parent == name
                and loaded.name.descriptor.segment_id == number
            ):
                ledger = loaded.log.infos[0].ledger_id
                await service.unload(loaded)
                await broker.standalone.ledgers.delete(ledger)
                return ledger, key
    raise AssertionError(f"segment {number} of {topic} is not loaded")
