"""Metrics of transactions, as Prometheus reads them: the four of PIP-473 with their exact names, counts, durations."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from braid.errors import BraidError, InvalidTransactionStatus, TransactionNotFound, VersionConflict
from braid.model.txn import TxnId
from braid.testing.broker import BackgroundBroker
from braid.testing.clock import ManualClock
from braid.txn.config import TransactionConfig
from braid.txn.counters import BUCKETS, Histogram
from braid.txn.records import TxnOp
from braid.web.config import StandaloneConfig

STORE = "pulsar_txn_metadata_store"
CLUSTER = 'cluster="standalone"'
TOPIC = "persistent://public/default/t"


@pytest.fixture
def broker() -> Iterator[BackgroundBroker]:
    with BackgroundBroker(clock=ManualClock()) as running:
        yield running


def samples(url: str) -> dict[str, float]:
    text = httpx.get(f"{url}/metrics").text
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if not line.startswith("#")}


def scrape(broker: BackgroundBroker) -> dict[str, float]:
    """What is shown after the last count is out of date."""
    broker.advance(6)
    return samples(broker.http_url)


def op(position: str = "1:1") -> TxnOp:
    return TxnOp(kind="write", segment=TOPIC, position=position)


async def work(broker: BackgroundBroker) -> None:
    """Two that commit, one that is aborted, one that stays open with two operations, and ends that are refused."""
    transactions = broker.broker.nodes[0].service.transactions
    coordinator, store = transactions.coordinator, transactions.store
    done = [await coordinator.new(2, 60_000, owner=None) for _ in range(4)]
    for txn in done[:2]:
        await coordinator.end(txn, commit=True)
    await coordinator.end(done[2], commit=False)
    stored = [await store.append_op(done[3], op(f"1:{number}")) for number in range(3)]
    await store.delete_op(stored[0])
    await store.writes_in(TOPIC)
    await store.acks_in(TOPIC, "s")
    for wrong, error in ((done[0], InvalidTransactionStatus), (TxnId.of(2, 999_999), TransactionNotFound)):
        with pytest.raises(error):
            await coordinator.end(wrong, commit=False)
    open_now = await store.header(done[3])
    decided = await store.header(done[0])
    assert open_now is not None and decided is not None
    stale = type(open_now)(open_now.root, open_now.value, open_now.version + 1)
    with pytest.raises(VersionConflict):
        await store.swap_header(stale, decided.value)


@pytest.mark.req("R473-49", "R473-50", "R473-51", "R473-52")
def test_the_four_of_the_document(broker: BackgroundBroker) -> None:
    broker.run(work(broker))
    seen = scrape(broker)
    assert seen[f"{STORE}_op_writes_total{{{CLUSTER}}}"] == 3
    results = {
        result: seen[f'{STORE}_header_cas_total{{{CLUSTER},result="{result}"}}'] for result in ("ok", "conflict", "reject")
    }
    assert results == {"ok": 3, "conflict": 1, "reject": 2}
    histogram = f"{STORE}_index_query_seconds"
    queries = seen[f"{histogram}_count{{{CLUSTER}}}"]
    # One for the writes; two for the acks, because those of an earlier version have their place in the index too.
    assert queries == 3 == seen[f'{histogram}_bucket{{{CLUSTER},le="+Inf"}}']
    assert seen[f"{histogram}_sum{{{CLUSTER}}}"] >= 0
    assert f'{histogram}_bucket{{{CLUSTER},le="0.0005"}}' in seen
    assert seen[f"{STORE}_outstanding_op_records{{{CLUSTER}}}"] == 2


def test_the_life_of_transactions(broker: BackgroundBroker) -> None:
    broker.run(work(broker))
    label = f'{{{CLUSTER},coordinator_id="2"}}'
    seen = scrape(broker)
    assert seen[f"pulsar_txn_active_count{label}"] == 1
    assert seen[f'pulsar_txn_active_count{{{CLUSTER},coordinator_id="15"}}'] == 0
    assert seen[f"pulsar_txn_created_total{label}"] == 4
    assert seen[f"pulsar_txn_committed_total{label}"] == 2
    assert seen[f"pulsar_txn_aborted_total{label}"] == 1
    assert seen[f"pulsar_txn_timeout_total{label}"] == 0
    duration = "braid_txn_duration_seconds"
    assert seen[f"{duration}_count{{{CLUSTER}}}"] == 3
    assert seen[f'{duration}_bucket{{{CLUSTER},le="0.01"}}'] == 3
    broker.advance(60)  # past the deadline of the open one
    seen = scrape(broker)
    assert seen[f"pulsar_txn_active_count{label}"] == 0
    assert (seen[f"pulsar_txn_aborted_total{label}"], seen[f"pulsar_txn_timeout_total{label}"]) == (2, 1)
    assert seen[f'{duration}_bucket{{{CLUSTER},le="30.0"}}'] == 3
    assert seen[f'{duration}_bucket{{{CLUSTER},le="300.0"}}'] == 4
    assert 60 <= seen[f"{duration}_sum{{{CLUSTER}}}"] < 70


def test_everything_is_described_and_of_the_right_kind(broker: BackgroundBroker) -> None:
    families = {
        each.name: each
        for each in text_string_to_metric_families(httpx.get(f"{broker.http_url}/metrics").text)
        if "_txn_" in each.name
    }
    kinds = {name: each.type for name, each in families.items()}
    assert kinds == {
        f"{STORE}_op_writes": "counter",
        f"{STORE}_header_cas": "counter",
        f"{STORE}_index_query_seconds": "histogram",
        f"{STORE}_outstanding_op_records": "gauge",
        "braid_txn_duration_seconds": "histogram",
        "pulsar_txn_active_count": "gauge",
        "pulsar_txn_created": "counter",
        "pulsar_txn_committed": "counter",
        "pulsar_txn_aborted": "counter",
        "pulsar_txn_timeout": "counter",
    }
    assert all(each.documentation for each in families.values())


@pytest.mark.req("R473-53")
def test_snapshots_and_replays_have_no_metrics_as_there_are_none(broker: BackgroundBroker) -> None:
    assert httpx.put(f"{broker.http_url}/admin/v2/scalable/public/default/orders").status_code == 204
    stats = httpx.get(f"{broker.http_url}/admin/v2/scalable/public/default/orders/stats").json()
    assert stats["segments"]["0"]["isReachable"]
    broker.run(work(broker))
    assert [name for name in scrape(broker) if name.startswith("pulsar_txn_tb_")] == []


def test_the_store_is_not_counted_at_every_scrape(broker: BackgroundBroker) -> None:
    """Who scrapes often, or from several places, does not make the broker read all operations each time."""
    store = broker.broker.nodes[0].service.transactions.store
    calls = 0
    count = store.count_ops

    async def counted() -> int:
        nonlocal calls
        calls += 1
        return await count()

    store.count_ops = counted  # type: ignore[method-assign]
    for _ in range(3):
        samples(broker.http_url)
    assert calls <= 1
    scrape(broker)
    scrape(broker)
    assert 2 <= calls <= 3


def test_a_store_that_does_not_answer_leaves_the_page_alone(broker: BackgroundBroker) -> None:
    broker.run(work(broker))
    before = scrape(broker)[f"{STORE}_outstanding_op_records{{{CLUSTER}}}"]
    store = broker.broker.nodes[0].service.transactions.store

    async def fail() -> int:
        raise BraidError("not now")

    store.count_ops = fail  # type: ignore[method-assign]
    assert scrape(broker)[f"{STORE}_outstanding_op_records{{{CLUSTER}}}"] == before == 2


def test_several_brokers_show_each_thing_once() -> None:
    with BackgroundBroker(brokers=3) as several:
        nodes = several.broker.nodes
        several.run(_settled(several))
        txn = several.run(nodes[1].service.transactions.coordinator.new(4, 60_000, owner=None))
        several.run(nodes[2].service.transactions.store.append_op(txn, op()))
        pages = [samples(node.http_url) for node in nodes]
    active = f'pulsar_txn_active_count{{{CLUSTER},coordinator_id="4"}}'
    assert [page[active] for page in pages if active in page] == [1]
    outstanding = f"{STORE}_outstanding_op_records{{{CLUSTER}}}"
    assert [page[outstanding] for page in pages if outstanding in page] == [1]
    assert sum(page[f"{STORE}_op_writes_total{{{CLUSTER}}}"] for page in pages) == 1


async def _settled(several: BackgroundBroker) -> None:
    """Wait until every coordinator is led."""
    nodes = several.broker.nodes
    for _ in range(600):
        led = [node.service.transactions.partitions for node in nodes]
        if all(sum(each is not None and each.leads(number) for each in led) == 1 for number in (0, 4)):
            return
        await several.broker.clock.sleep(0.05)
    raise AssertionError("coordinators 0 and 4 have no leader")


def test_switched_off_there_is_little_to_count() -> None:
    config = StandaloneConfig(transactions=TransactionConfig(enabled=False))
    with BackgroundBroker(config=config) as off:
        seen = samples(off.http_url)
        assert seen[f"{STORE}_op_writes_total{{{CLUSTER}}}"] == 0
        assert not any(value for name, value in seen.items() if name.startswith("pulsar_txn_active_count"))
        assert httpx.get(f"{off.http_url}/admin/v3/transactions").json() == []


def test_a_histogram_counts_at_and_above_its_bounds() -> None:
    values = Histogram((1.0, 2.0))
    for value in (0.0, 1.0, 1.5, 2.0, 2.1, 100.0):
        values.note(value)
    assert values.cumulative() == [("1.0", 2.0), ("2.0", 4.0), ("+Inf", 6.0)]
    assert values.sum == pytest.approx(106.6)
    assert list(BUCKETS) == sorted(BUCKETS)
