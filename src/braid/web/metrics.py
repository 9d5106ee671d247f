"""Prometheus metrics, computed from the broker's counters when they are scraped: nothing on the data path.

Names are Pulsar's where Pulsar has the same thing; ours begin with `braid_`. Topics beyond a bound get no lines of their own,
so that a scrape stays bounded (INV17); `braid_topics_without_metrics` says how many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from braid.broker.topic import Topic
from braid.web.admin import Admin
from braid.web.stats import backlog_bytes, bytes_out, messages_out

MAX_TOPICS = 5000
LAG_PERIOD_SECONDS = 1.0
TOPIC_LABELS = ["cluster", "namespace", "topic"]
SUBSCRIPTION_LABELS = [*TOPIC_LABELS, "subscription"]


class Metrics:
    """The broker's metrics as one collector."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        GCCollector(registry=self._registry)

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Any]:
        """What `prometheus_client` asks for at each scrape."""
        service = self._admin.service
        topics = [topic for topic in list(service.topics.values()) if not topic.is_closing]
        yield from self._broker(topics)
        yield from self._topics(topics[:MAX_TOPICS])
        yield from self._subscriptions(topics[:MAX_TOPICS])
        yield GaugeMetricFamily(
            "braid_topics_without_metrics", "Loaded topics left out of these metrics", max(0, len(topics) - MAX_TOPICS)
        )

    def _broker(self, topics: list[Topic]) -> Iterator[Any]:
        admin, service = self._admin, self._admin.service
        subscriptions = sum(len(topic.subscriptions) for topic in topics)
        consumers = sum(len(each.consumers) for topic in topics for each in topic.subscriptions.values())
        for name, text, value in (
            ("pulsar_broker_topics_count", "Loaded topics", len(topics)),
            ("pulsar_broker_producers_count", "Connected producers", sum(len(topic.producers) for topic in topics)),
            ("pulsar_broker_subscriptions_count", "Subscriptions of loaded topics", subscriptions),
            ("pulsar_broker_consumers_count", "Connected consumers", consumers),
            ("pulsar_active_connections", "Open client connections", len(admin.server.connections)),
            ("braid_publish_pending_bytes", "Bytes taken from producers and not yet acknowledged", service.budget.used),
            ("braid_event_loop_lag_seconds", "How late the last timer of one second came", admin.loop_lag),
            ("braid_storage_writable", "Whether storage takes writes", int(admin.is_writable())),
        ):
            yield GaugeMetricFamily(name, text, value)

    def _topics(self, topics: list[Topic]) -> Iterator[Any]:
        counters: dict[str, tuple[str, Callable[[Topic], int]]] = {
            "pulsar_in_messages": ("Messages received", lambda topic: topic.messages_in),
            "pulsar_in_bytes": ("Bytes received", lambda topic: topic.bytes_in),
            "pulsar_out_messages": ("Messages sent", lambda topic: sum(map(messages_out, topic.subscriptions.values()))),
            "pulsar_out_bytes": ("Bytes sent", lambda topic: sum(map(bytes_out, topic.subscriptions.values()))),
        }
        gauges: dict[str, tuple[str, Callable[[Topic], int]]] = {
            "pulsar_topics_count": ("Always 1 per loaded topic", lambda topic: 1),
            "pulsar_producers_count": ("Connected producers", lambda topic: len(topic.producers)),
            "pulsar_subscriptions_count": ("Subscriptions", lambda topic: len(topic.subscriptions)),
            "pulsar_consumers_count": (
                "Connected consumers",
                lambda topic: sum(len(each.consumers) for each in topic.subscriptions.values()),
            ),
            "pulsar_storage_size": ("Bytes stored", lambda topic: topic.log.total_size),
            "pulsar_storage_logical_size": ("Bytes stored, one copy", lambda topic: topic.log.total_size),
            "pulsar_storage_backlog_size": ("Bytes the slowest subscription has to read", _slowest_bytes),
            "pulsar_msg_backlog": ("Entries not acknowledged, all subscriptions", _backlog),
        }
        for name, (text, read) in counters.items():
            counter = CounterMetricFamily(name, text, labels=TOPIC_LABELS)
            for topic in topics:
                counter.add_metric(self._labels(topic), read(topic))
            yield counter
        for name, (text, read) in gauges.items():
            gauge = GaugeMetricFamily(name, text, labels=TOPIC_LABELS)
            for topic in topics:
                gauge.add_metric(self._labels(topic), read(topic))
            yield gauge

    def _subscriptions(self, topics: list[Topic]) -> Iterator[Any]:
        backlog = GaugeMetricFamily("pulsar_subscription_back_log", "Entries not acknowledged", labels=SUBSCRIPTION_LABELS)
        unacked = GaugeMetricFamily(
            "pulsar_subscription_unacked_messages", "Messages sent and not acknowledged", labels=SUBSCRIPTION_LABELS
        )
        consumers = GaugeMetricFamily("pulsar_subscription_consumers_count", "Connected consumers", labels=SUBSCRIPTION_LABELS)
        out = CounterMetricFamily("pulsar_subscription_msg_out", "Messages sent", labels=SUBSCRIPTION_LABELS)
        for topic in topics:
            for subscription in topic.subscriptions.values():
                labels = [*self._labels(topic), subscription.name]
                backlog.add_metric(labels, subscription.cursor.backlog())
                unacked.add_metric(labels, sum(consumer.unacked for consumer in subscription.consumers))
                consumers.add_metric(labels, len(subscription.consumers))
                out.add_metric(labels, messages_out(subscription))
        yield from (backlog, unacked, consumers, out)

    def _labels(self, topic: Topic) -> list[str]:
        return [self._admin.service.config.cluster_name, str(topic.name.namespace), str(topic.name)]


def _backlog(topic: Topic) -> int:
    return sum(each.cursor.backlog() for each in topic.subscriptions.values())


def _slowest_bytes(topic: Topic) -> int:
    slowest = max((each.cursor.backlog() for each in topic.subscriptions.values()), default=0)
    return backlog_bytes(topic, slowest)


async def watch_loop_lag(admin: Admin) -> None:
    """Measure, once a second, how late the loop comes back to a timer."""
    clock = admin.service.runtime.clock
    while True:
        before = clock.monotonic()
        await clock.sleep(LAG_PERIOD_SECONDS)
        admin.loop_lag = max(0.0, clock.monotonic() - before - LAG_PERIOD_SECONDS)
