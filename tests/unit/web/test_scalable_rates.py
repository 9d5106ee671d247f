"""Stats of a scalable topic under a known load: what is shown is what was sent."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from braid.testing.broker import InProcessBroker
from braid.testing.clock import ManualClock
from braid.testing.raw_client import RawClient
from braid.wire.types import InitialPosition, SubType

TOPIC = "/admin/v2/scalable/public/default/busy"
SEGMENT = "segment://public/default/busy"
LOAD = {"0000-7fff-0": 20, "8000-ffff-1": 5}
"""Messages in each second."""
SECONDS = 20


class Segment:
    """A producer of one segment and a consumer that takes everything."""

    def __init__(self, name: str, client: RawClient) -> None:
        self.name = f"{SEGMENT}/{name}"
        self.client = client
        self.sent = 0

    async def second(self, count: int) -> None:
        for _ in range(count):
            await self.client.store(b"x" * 100, self.sent)
            self.sent += 1


@pytest.mark.req("R468-80")
async def test_rates_counts_and_backlogs_are_those_of_the_load() -> None:
    clock = ManualClock()
    async with InProcessBroker(clock=clock) as broker, httpx.AsyncClient(base_url=broker.http_url, timeout=20) as http:
        assert (await http.put(f"{TOPIC}?numInitialSegments=2")).status_code == 204
        assert (await http.put(f"{TOPIC}/subscriptions/billing")).status_code == 204
        segments = []
        for name in LOAD:
            client = await RawClient.connect(broker.service_url)
            segment = Segment(name, client)
            await client.producer(segment.name)
            await client.subscribe(
                segment.name,
                "audit",
                permits=1000,
                consumer_name=name,
                sub_type=SubType.SHARED,
                initial=InitialPosition.EARLIEST,
            )
            segments.append(segment)
        for _second in range(SECONDS):
            for segment, count in zip(segments, LOAD.values(), strict=True):
                await segment.second(count)
            await broker.advance(1)
            await asyncio.sleep(0)
        found: dict[str, Any] = (await http.get(f"{TOPIC}/stats")).json()
        assert (found["totalSegments"], found["activeSegments"], found["sealedSegments"]) == (2, 2, 0)
        for number, (name, rate) in enumerate(LOAD.items()):
            shown = found["segments"][str(number)]
            assert shown["name"] == f"{SEGMENT}/{name}"
            assert shown["msgRateIn"] == pytest.approx(rate, rel=0.1)
            assert shown["msgRateOut"] == pytest.approx(rate, rel=0.1)
            assert shown["bytesRateIn"] == pytest.approx(rate * shown["storageSize"] / (rate * SECONDS), rel=0.2)
            assert (shown["messages"], shown["producers"]) == (rate * SECONDS, 1)
            assert shown["backlog"] == {"billing": rate * SECONDS, "audit": rate * SECONDS}  # received, not acknowledged
        assert found["subscriptions"]["billing"]["backlog"] == sum(LOAD.values()) * SECONDS
        assert found["subscriptions"]["audit"]["connectedConsumers"] == 2
        for _second in range(12):
            await broker.advance(1)
        quiet = (await http.get(f"{TOPIC}/stats")).json()["segments"]
        assert [each["msgRateIn"] for each in quiet.values()] == [0.0, 0.0]
        for segment in segments:
            segment.client.close()
