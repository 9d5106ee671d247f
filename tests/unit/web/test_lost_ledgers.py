"""A broker whose store does not know ledgers that records name: those topics are refused by name, all others go on (INV16)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

import braid
from braid.client.admin import AdminClient
from braid.errors import NotAllowed, UnknownFailure
from braid.testing.broker import InProcessBroker

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
