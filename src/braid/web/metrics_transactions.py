"""Metrics of transactions: the four of PIP-473 and the life of transactions, from counters and the records of the store.

Counters are of this broker. What is counted in the store is of the whole cluster and shown by one broker each, so that sums
over brokers are right: open transactions of a coordinator by its leader, operation records by the leader of coordinator 0,
which collects them. They are counted at most every `COUNT_SECONDS`, whatever the scrapes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from braid.errors import BraidError
from braid.txn.counters import Histogram
from braid.web.admin import Admin

log = logging.getLogger(__name__)
COUNT_SECONDS = 5.0
STORE = "pulsar_txn_metadata_store"


class TransactionMetrics:
    """The part of `Metrics` that is about transactions."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin
        self._transactions = admin.service.transactions
        self._counted_at: float | None = None
        self._open: dict[int, int] = {}
        self._operations: int | None = None
        """None: another broker shows them."""

    async def count(self) -> None:
        """Count in the store what this broker is to show; what cannot be counted now stays as it was."""
        now = self._admin.service.runtime.clock.monotonic()
        if self._counted_at is not None and now - self._counted_at < COUNT_SECONDS:
            return
        self._counted_at = now
        partitions = self._transactions.partitions
        if partitions is None:
            return
        leads = partitions.leads
        led = [number for number in range(self._transactions.coordinators) if leads(number)]
        try:
            if led:
                await self._transactions.coordinator.recount()
            counts = self._transactions.coordinator.open_counts
            self._open = {number: counts.get(number, 0) for number in led}
            self._operations = await self._transactions.store.count_ops() if leads(0) else None
        except BraidError as error:
            log.warning("transactions cannot be counted for metrics at the moment: %s", error)

    def collect(self) -> Iterator[Any]:
        """What `prometheus_client` asks for at each scrape."""
        counters, cluster = self._transactions.store.counters, self._admin.clusters.own
        writes = CounterMetricFamily(f"{STORE}_op_writes", "Operation records written", labels=["cluster"])
        writes.add_metric([cluster], counters.op_writes)
        yield writes
        cas = CounterMetricFamily(
            f"{STORE}_header_cas",
            "Decisions: applied (ok), lost to another one (conflict), refused as the transaction was over or unknown (reject)",
            labels=["cluster", "result"],
        )
        for result, count in counters.header_cas.items():
            cas.add_metric([cluster, result], count)
        yield cas
        yield self._histogram(f"{STORE}_index_query_seconds", "Queries for the operations of a segment", counters.queries)
        yield self._histogram("braid_txn_duration_seconds", "From begin to decision, decided here", counters.durations)
        outstanding = GaugeMetricFamily(
            f"{STORE}_outstanding_op_records",
            "Operation records of the cluster that are not collected, at the broker that leads coordinator 0",
            labels=["cluster"],
        )
        if self._operations is not None:
            outstanding.add_metric([cluster], self._operations)
        yield outstanding
        yield self._by_coordinator(
            GaugeMetricFamily, "pulsar_txn_active_count", "Open transactions of the coordinators this broker leads", self._open
        )
        for name, text, counts in (
            ("pulsar_txn_created", "Transactions begun by this broker", counters.created),
            ("pulsar_txn_committed", "Transactions committed by this broker", counters.committed),
            ("pulsar_txn_aborted", "Transactions aborted by this broker, those that timed out included", counters.aborted),
            ("pulsar_txn_timeout", "Transactions aborted by this broker because of their deadline", counters.timed_out),
        ):
            yield self._by_coordinator(CounterMetricFamily, name, text, dict.fromkeys(self._open, 0) | counts)

    def _by_coordinator(self, kind: Any, name: str, text: str, counts: Mapping[int, int]) -> Any:
        family = kind(name, text, labels=["cluster", "coordinator_id"])
        for number, count in sorted(counts.items()):
            family.add_metric([self._admin.clusters.own, str(number)], count)
        return family

    def _histogram(self, name: str, text: str, values: Histogram) -> HistogramMetricFamily:
        family = HistogramMetricFamily(name, text, labels=["cluster"])
        family.add_metric([self._admin.clusters.own], values.cumulative(), values.sum)
        return family
