"""`/metrics`: what Prometheus reads."""

from __future__ import annotations

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

import braid
from braid.broker.config import BrokerConfig
from braid.model import names
from braid.testing.broker import BackgroundBroker
from braid.web.config import StandaloneConfig


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
    assert seen['pulsar_broker_topics_count{cluster="standalone"}'] == 1
    assert seen['pulsar_active_connections{cluster="standalone"}'] == 1
    assert seen["braid_publish_pending_bytes"] == 0
    assert seen["braid_storage_writable"] == 1
    assert "braid_event_loop_lag_seconds" in seen
    assert seen["braid_loop_stalls_total"] == 0 and "braid_loop_longest_turn_seconds" in seen
    assert seen["process_resident_memory_bytes"] > 0
    backlog = f'{labels[:-1]},subscription="s"}}'
    assert seen[f"pulsar_subscription_back_log{backlog}"] == 2


@pytest.fixture
def older_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Topics as an earlier version may have made them, with quotes in their names."""
    monkeypatch.setattr(names, "_check_harmless", lambda _what, _name: None)


@pytest.mark.usefixtures("older_names")
def test_prometheus_reads_the_page_and_no_series_comes_twice(braid_broker: BackgroundBroker) -> None:
    async def work() -> str:
        async with braid.connect(braid_broker.service_url) as client:
            for topic in ("one", 'two"\\'):
                await client.consumer(topic, "s")
            async with httpx.AsyncClient(base_url=braid_broker.http_url) as http:
                return (await http.get("/metrics")).text

    families = list(text_string_to_metric_families(braid_broker.run(work())))
    series = [(each.name, tuple(sorted(each.labels.items()))) for family in families for each in family.samples]
    assert len(series) == len(set(series))
    assert len({family.name for family in families}) == len(families)
    (topics,) = [family for family in families if family.name == "pulsar_storage_size"]
    assert {each.labels["topic"] for each in topics.samples} == {
        "persistent://public/default/one",
        'persistent://public/default/two"\\',
    }
    for family in families:
        if family.name.startswith("pulsar_"):
            assert {each.labels.get("cluster") for each in family.samples} == {"standalone"}, family.name


@pytest.mark.usefixtures("older_names")
def test_hostile_names_stay_inside_their_label(braid_broker: BackgroundBroker) -> None:
    async def work() -> str:
        async with braid.connect(braid_broker.service_url) as client:
            await client.producer('evil"} 1 \\ fake_metric 2')
            async with httpx.AsyncClient(base_url=braid_broker.http_url) as http:
                return (await http.get("/metrics")).text

    text = braid_broker.run(work())
    assert 'evil"}' not in text
    assert 'evil\\"} 1 \\\\ fake_metric 2' in text


def test_with_too_many_topics_only_namespaces_have_lines() -> None:
    config = StandaloneConfig(broker=BrokerConfig(metrics_max_topics=2))
    with BackgroundBroker(config=config) as broker:

        async def scrape(topic: str) -> dict[str, float]:
            async with braid.connect(broker.service_url) as client:
                await client.consumer(topic, "s")
                async with httpx.AsyncClient(base_url=broker.http_url) as http:
                    return samples((await http.get("/metrics")).text)

        broker.run(scrape("one"))
        few = broker.run(scrape("two"))
        many = broker.run(scrape("three"))
    namespace = '{cluster="standalone",namespace="public/default"}'
    assert few[f"pulsar_topics_count{namespace}"] == 2
    assert many[f"pulsar_topics_count{namespace}"] == 3
    assert len([name for name in few if 'topic="' in name and name.startswith("pulsar_storage_size{")]) == 2
    assert [name for name in many if 'topic="' in name or 'subscription="' in name] == []
    assert (few["braid_topics_without_metrics"], many["braid_topics_without_metrics"]) == (0, 3)


def test_scalable_topics_are_shown(braid_broker: BackgroundBroker) -> None:
    async def work() -> dict[str, float]:
        async with httpx.AsyncClient(base_url=braid_broker.http_url, timeout=30) as http:
            topic = "/admin/v2/scalable/public/default/counted"
            assert (await http.put(f"{topic}?numInitialSegments=2")).status_code < 300
            assert (await http.post(f"{topic}/split/0")).status_code < 300
            assert (await http.post(f"{topic}/split/0")).status_code >= 400
            return samples((await http.get("/metrics")).text)

    seen = braid_broker.run(work())
    assert seen["braid_scalable_topics_led"] == 1
    assert seen["braid_scalable_segments_active"] == 3
    assert seen["braid_scalable_consumers"] == seen["braid_layout_sessions"] == seen["braid_namespace_sessions"] == 0
    assert seen['braid_scalable_operations_total{operation="split"}'] == 1
    assert seen['braid_scalable_operations_failed_total{operation="split"}'] == 1
    assert seen['braid_scalable_operation_seconds_total{operation="split"}'] == 0  # the clock stands still


def test_ownership_lookups_and_the_session_are_shown(braid_broker: BackgroundBroker) -> None:
    async def work() -> dict[str, float]:
        async with httpx.AsyncClient(base_url=braid_broker.http_url) as http:
            await http.get("/lookup/v2/topic/persistent/public/default/t")
            return samples((await http.get("/metrics")).text)

    seen = braid_broker.run(work())
    assert seen['pulsar_lb_bundles_count{cluster="standalone"}'] == 1
    assert seen["braid_owned_namespaces"] == 1
    assert seen['pulsar_broker_lookup_answers_total{cluster="standalone"}'] == 1
    assert seen['pulsar_broker_lookup_redirects_total{cluster="standalone"}'] == 0
    assert seen["braid_metadata_session_down"] == 0
    assert seen["braid_is_draining"] == 0
    assert seen["braid_admin_requests_total"] == 1
