"""`/metrics`: what Prometheus reads."""

from __future__ import annotations

import httpx

import braid
from braid.testing.broker import BackgroundBroker


def samples(text: str) -> dict[str, float]:
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if not line.startswith("#")}


def test_counters_and_gauges_follow_the_traffic(braid_broker: BackgroundBroker) -> None:
    async def work() -> None:
        async with braid.connect(braid_broker.service_url) as client:
            consumer = await client.consumer("measured", "s", initial="earliest")
            producer = await client.producer("measured", batching=False)
            for number in range(3):
                await producer.send(b"x" * 10 * number)
            message = await consumer.receive(5)
            await consumer.acknowledge(message, wait=True)
            async with httpx.AsyncClient(base_url=braid_broker.http_url) as http:
                seen.update(samples((await http.get("/metrics")).text))

    seen: dict[str, float] = {}
    braid_broker.run(work())
    labels = '{cluster="standalone",namespace="public/default",topic="persistent://public/default/measured"}'
    assert seen[f"pulsar_in_messages_total{labels}"] == 3
    assert seen[f"pulsar_out_messages_total{labels}"] == 3
    assert seen[f"pulsar_producers_count{labels}"] == 1
    assert seen[f"pulsar_consumers_count{labels}"] == 1
    assert seen[f"pulsar_storage_size{labels}"] > 60
    assert seen["pulsar_broker_topics_count"] == 1
    assert seen["pulsar_active_connections"] == 1
    assert seen["braid_publish_pending_bytes"] == 0
    assert seen["braid_storage_writable"] == 1
    assert "braid_event_loop_lag_seconds" in seen
    assert seen["process_resident_memory_bytes"] > 0
    backlog = labels.replace("topic=", 'subscription="s",topic=')
    assert seen[f"pulsar_subscription_back_log{backlog}"] == 2


def test_hostile_names_stay_inside_their_label(braid_broker: BackgroundBroker) -> None:
    async def work() -> str:
        async with braid.connect(braid_broker.service_url) as client:
            await client.producer('evil"} 1 \\ fake_metric 2')
            async with httpx.AsyncClient(base_url=braid_broker.http_url) as http:
                return (await http.get("/metrics")).text

    text = braid_broker.run(work())
    assert 'evil"}' not in text
    assert 'evil\\"} 1 \\\\ fake_metric 2' in text
