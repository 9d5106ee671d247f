"""Prometheus metrics, computed from the broker's counters when they are scraped: nothing on the data path.

Names are Pulsar's where Pulsar has the same thing; ours begin with `braid_`. With more loaded topics than
`broker.metrics_max_topics` no topic gets lines of its own, only the namespaces do, so that a scrape and the number of series
stay bounded (INV17); `braid_topics_without_metrics` says how many topics that are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from braid.broker.subscription import Subscription
from braid.broker.topic import Topic
from braid.metadata.api import SessionState
from braid.web.admin import Admin
from braid.web.metrics_transactions import TransactionMetrics
from braid.web.stats import backlog_bytes, bytes_out, messages_out

LAG_PERIOD_SECONDS = 1.0
NAMESPACE_LABELS = ["cluster", "namespace"]
TOPICS_AT_ONCE = 50
"""Topics whose lines are made before others get a turn."""
Reads = dict[str, tuple[str, Callable[[Any], float]]]


class Metrics:
    """The broker's metrics as one collector."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin
        self._hidden = 0
        self._topic_reads = _TOPIC_READS | self._rates()
        self._of_transactions = TransactionMetrics(admin)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        GCCollector(registry=self._registry)

    async def exposition(self) -> bytes:
        """All metrics in Prometheus' text format. The loop is given back often: there may be thousands of topics."""
        topics = self._topics()
        is_shown = len(topics) <= self._admin.service.config.metrics_max_topics
        self._hidden = 0 if is_shown else len(topics)
        await self._of_transactions.count()
        parts = [generate_latest(self._registry)]
        of_topics, of_subscriptions = self._lines(self._topic_reads), self._lines(_SUBSCRIPTION_READS)
        for number, topic in enumerate(topics if is_shown else ()):
            if number % TOPICS_AT_ONCE == TOPICS_AT_ONCE - 1:
                await asyncio.sleep(0)
            labels = f'cluster="{self._cluster}",namespace="{topic.name.namespace}",topic="{_escaped(str(topic.name))}"'
            for sample, read, lines in of_topics:
                lines.append(f"{sample}{{{labels}}} {read(topic)}")
            for subscription in topic.subscriptions.values():
                named = f'{labels},subscription="{_escaped(subscription.name)}"'
                for sample, read, lines in of_subscriptions:
                    lines.append(f"{sample}{{{named}}} {read(subscription)}")
        for _sample, _read, lines in (*of_topics, *of_subscriptions):
            parts.append("\n".join([*lines, ""]).encode())
            await asyncio.sleep(0)
        return b"".join(parts)

    @staticmethod
    def _lines(reads: Reads) -> list[tuple[str, Callable[[Any], float], list[str]]]:
        """For each metric the name of its samples, how to read one, and its lines so far."""
        return [
            (name, read, [f"# HELP {name} {text}", f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}"])
            for name, (text, read) in reads.items()
        ]

    def totals(self) -> dict[str, float]:
        """The metrics of the broker as a whole."""
        return {name: value for name, _text, value in [*self._gauges(self._topics()), *self._counts()]}

    def collect(self) -> Iterator[Any]:
        """What `prometheus_client` asks for at each scrape."""
        topics = self._topics()
        for name, text, value in self._gauges(topics):
            yield self._labelled(GaugeMetricFamily, name, text, value)
        for name, text, value in self._counts():
            yield self._labelled(CounterMetricFamily, name, text, value)
        yield from self._slow()
        yield from self._operations()
        yield from self._of_transactions.collect()
        by_namespace: dict[str, list[Topic]] = {}
        for topic in topics:
            by_namespace.setdefault(str(topic.name.namespace), []).append(topic)
        for name, (text, read) in _NAMESPACE_GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=NAMESPACE_LABELS)
            for namespace, members in by_namespace.items():
                gauge.add_metric([self._cluster, namespace], read(members))
            yield gauge
        yield GaugeMetricFamily("braid_topics_without_metrics", "Loaded topics without lines of their own", self._hidden)

    def _labelled(self, kind: Any, name: str, text: str, value: float) -> Any:
        """One number of the broker. Pulsar's have its cluster as label, by which its dashboards choose."""
        if not name.startswith("pulsar_"):
            return kind(name, text, value)
        family = kind(name, text, labels=["cluster"])
        family.add_metric([self._cluster], value)
        return family

    @property
    def _cluster(self) -> str:
        return self._admin.clusters.own

    def _topics(self) -> list[Topic]:
        return [topic for topic in list(self._admin.service.topics.values()) if not topic.is_closing]

    def _gauges(self, topics: list[Topic]) -> Iterator[tuple[str, str, float]]:
        admin, service, ownership = self._admin, self._admin.service, self._admin.ownership
        rate = admin.rates.per_second
        subscriptions = [each for topic in topics for each in topic.subscriptions.values()]
        name = admin.broker_id
        yield "pulsar_broker_topics_count", "Loaded topics", len(topics)
        yield "pulsar_broker_producers_count", "Connected producers", sum(len(topic.producers) for topic in topics)
        yield "pulsar_broker_subscriptions_count", "Subscriptions of loaded topics", len(subscriptions)
        yield "pulsar_broker_consumers_count", "Connected consumers", sum(len(each.consumers) for each in subscriptions)
        yield "pulsar_broker_msg_backlog", "Entries not acknowledged", sum(each.cursor.backlog() for each in subscriptions)
        yield "pulsar_broker_storage_size", "Bytes stored of loaded topics", sum(topic.log.total_size for topic in topics)
        messages, size = sum(topic.messages_in for topic in topics), sum(topic.bytes_in for topic in topics)
        yield "pulsar_broker_rate_in", "Messages received per second", rate((name, "all in"), messages)
        yield "pulsar_broker_throughput_in", "Bytes received per second", rate((name, "all bytes in"), size)
        out, out_size = sum(map(messages_out, subscriptions)), sum(map(bytes_out, subscriptions))
        yield "pulsar_broker_rate_out", "Messages sent per second", rate((name, "all out"), out)
        yield "pulsar_broker_throughput_out", "Bytes sent per second", rate((name, "all bytes out"), out_size)
        yield "pulsar_active_connections", "Open client connections", len(admin.server.connections)
        bundles = sum(map(len, ownership.owned().values()))
        yield "pulsar_lb_bundles_count", "Bundles this broker owns", bundles
        yield "braid_owned_namespaces", "Namespaces of which this broker owns a bundle", len(ownership.owned())
        yield "braid_is_leader", "Whether this broker leads and balances", int(ownership.is_leader)
        yield "braid_is_draining", "Whether this broker gives its bundles away", int(ownership.is_draining)
        session = service.metadata.session
        is_down = session.state is not SessionState.CONNECTED
        yield "braid_metadata_session_down", "Whether the metadata session is in doubt or lost", int(is_down)
        yield "braid_publish_pending_bytes", "Bytes taken from producers and not yet acknowledged", service.budget.used
        yield "braid_event_loop_lag_seconds", "How late the last timer of one second came", admin.loop_lag
        longest = service.runtime.turns.longest
        yield "braid_loop_longest_turn_seconds", "Longest turn of the event loop since the process started", longest
        yield (
            "braid_retention_unread_bytes",
            "Bytes kept only because no subscription has read them, at the last look for something to trim",
            service.retention.unread_bytes,
        )
        yield "braid_lost_topics", "Topics that are refused because their store does not know their ledgers", len(service.lost)
        yield "braid_storage_writable", "Whether storage takes writes", int(admin.is_writable())
        free, reserved = admin.space()
        yield "braid_storage_free_bytes", "Free bytes of the disk of the ledgers; +Inf in memory", free
        yield "braid_storage_reserved_bytes", "Of these, kept in reserve: entries that would leave less are refused", reserved
        yield from service.scalable_gauges()

    def _operations(self) -> Iterator[Any]:
        counts = self._admin.service.scalable.counts
        for name, text, values in (
            ("braid_scalable_operations", "Operations on scalable topics led here that were done", counts.done),
            ("braid_scalable_operations_failed", "Of these, ended with an error; some are finished later", counts.failed),
            ("braid_scalable_operation_seconds", "Time that both took together", counts.seconds),
        ):
            family = CounterMetricFamily(name, text, labels=["operation"])
            for operation, value in sorted(values.items()):
                family.add_metric([operation], value)
            yield family

    def _counts(self) -> Iterator[tuple[str, str, float]]:
        admin = self._admin
        yield "pulsar_broker_lookup_answers", "Lookups answered with an address", admin.service.lookups
        yield "pulsar_broker_lookup_redirects", "Of these, to another broker", admin.service.lookup_redirects
        yield "braid_bundles_moved", "Bundles this broker gave up on purpose", admin.ownership.holdings.moves
        yield "braid_bundles_lost", "Bundles lost with a session, or taken away", admin.ownership.holdings.losses
        stalls = admin.service.runtime.turns.stalls
        yield "braid_loop_stalls", "Turns of the event loop above broker.loop_stall_ms", stalls
        yield "braid_admin_requests", "Calls of the admin API", admin.requests
        yield "braid_admin_redirects", "Calls that were sent to another broker", admin.redirects

    def _slow(self) -> Iterator[Any]:
        slow = CounterMetricFamily("braid_slow_operations", "Operations above broker.slow_operation_ms", labels=["operation"])
        for what, count in sorted(self._admin.slow.counts.items()):
            slow.add_metric([what], count)
        yield slow

    def _rates(self) -> Reads:
        rate = self._admin.rates.per_second
        return {
            "pulsar_rate_in": ("Messages received per second", lambda each: rate((str(each.name), "in"), each.messages_in)),
            "pulsar_throughput_in": (
                "Bytes received per second",
                lambda each: rate((str(each.name), "bytes in"), each.bytes_in),
            ),
            "pulsar_rate_out": ("Messages sent per second", lambda each: rate((str(each.name), "out"), _out(each))),
            "pulsar_throughput_out": (
                "Bytes sent per second",
                lambda each: rate((str(each.name), "bytes out"), _bytes_out(each)),
            ),
        }


def _escaped(text: str) -> str:
    """A value that cannot end its label."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _out(topic: Topic) -> int:
    return sum(map(messages_out, topic.subscriptions.values()))


def _bytes_out(topic: Topic) -> int:
    return sum(map(bytes_out, topic.subscriptions.values()))


def _consumers(topic: Topic) -> int:
    return sum(len(each.consumers) for each in topic.subscriptions.values())


def _backlog(topic: Topic) -> int:
    return sum(each.cursor.backlog() for each in topic.subscriptions.values())


def _slowest_bytes(topic: Topic) -> int:
    slowest = max((each.cursor.backlog() for each in topic.subscriptions.values()), default=0)
    return backlog_bytes(topic, slowest)


def _unacked(subscription: Subscription) -> int:
    return sum(consumer.unacked for consumer in subscription.consumers)


def _last_acked(subscription: Subscription) -> int:
    return max((consumer.last_acked_ms for consumer in subscription.consumers), default=0)


_NAMESPACE_GAUGES: Reads = {
    "pulsar_topics_count": ("Loaded topics of a namespace", len),
    "braid_namespace_msg_backlog": ("Entries not acknowledged, all topics", lambda topics: sum(map(_backlog, topics))),
    "braid_namespace_storage_size": ("Bytes stored, all topics", lambda topics: sum(each.log.total_size for each in topics)),
}
_TOPIC_READS: Reads = {
    "pulsar_in_messages_total": ("Messages received", lambda topic: topic.messages_in),
    "pulsar_in_bytes_total": ("Bytes received", lambda topic: topic.bytes_in),
    "pulsar_out_messages_total": ("Messages sent", _out),
    "pulsar_out_bytes_total": ("Bytes sent", _bytes_out),
    "pulsar_producers_count": ("Connected producers", lambda topic: len(topic.producers)),
    "pulsar_subscriptions_count": ("Subscriptions", lambda topic: len(topic.subscriptions)),
    "pulsar_consumers_count": ("Connected consumers", _consumers),
    "pulsar_storage_size": ("Bytes stored", lambda topic: topic.log.total_size),
    "pulsar_storage_logical_size": ("Bytes stored, one copy", lambda topic: topic.log.total_size),
    "pulsar_storage_backlog_size": ("Bytes the slowest subscription has to read", _slowest_bytes),
    "pulsar_msg_backlog": ("Entries not acknowledged, all subscriptions", _backlog),
}
_SUBSCRIPTION_READS: Reads = {
    "pulsar_subscription_msg_out_total": ("Messages sent", messages_out),
    "pulsar_subscription_bytes_out_total": ("Bytes sent", bytes_out),
    "pulsar_subscription_back_log": ("Entries not acknowledged", lambda each: each.cursor.backlog()),
    "pulsar_subscription_unacked_messages": ("Messages sent and not acknowledged", _unacked),
    "pulsar_subscription_consumers_count": ("Connected consumers", lambda each: len(each.consumers)),
    "pulsar_subscription_blocked_on_unacked_messages": (
        "Whether a consumer gets nothing until it acknowledges",
        lambda each: int(any(consumer.is_blocked for consumer in each.consumers)),
    ),
    "pulsar_subscription_last_acked_timestamp": ("When a connected consumer last acknowledged, in milliseconds", _last_acked),
}


async def watch_loop_lag(admin: Admin) -> None:
    """Measure, once a second, how late the loop comes back to a timer."""
    clock = admin.service.runtime.clock
    while True:
        before = clock.monotonic()
        await clock.sleep(LAG_PERIOD_SECONDS)
        admin.loop_lag = max(0.0, clock.monotonic() - before - LAG_PERIOD_SECONDS)
