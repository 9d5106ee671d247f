"""Sinks over HTTP: list, one of them, removal, and names that are none; what a transaction says of its sink."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from braid.broker.transactions import Transactions
from braid.model.txn import TxnId
from braid.testing.broker import BackgroundBroker
from braid.testing.clock import ManualClock
from braid.txn.records import SinkBatch

ROOT = "/admin/v3/sinks"
SINK = "8a2c/topic://public/default/out ü%"
MONTH_MS = 2_592_000_000


@pytest.fixture
def broker() -> Iterator[BackgroundBroker]:
    with BackgroundBroker(clock=ManualClock()) as running:
        yield running


@pytest.fixture
def http(broker: BackgroundBroker) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=broker.http_url, timeout=30) as client:
        yield client


def transactions(broker: BackgroundBroker) -> Transactions:
    return broker.broker.nodes[0].service.transactions


def begin(broker: BackgroundBroker, batch: int, run: str, sink: str = SINK) -> TxnId:
    found = broker.run(transactions(broker).sinks.begin(SinkBatch(sink, batch, run), 60_000))
    assert found is not None
    return found


def path(sink: str) -> str:
    return f"{ROOT}/{quote(sink, safe='')}"


def found(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_from_the_first_batch_to_the_removal(broker: BackgroundBroker, http: httpx.Client) -> None:
    assert found(http.get(ROOT)) == []
    first = begin(broker, 0, "a")
    described = found(http.get(path(SINK)))
    assert described == {
        "sink": SINK,
        "lastBatch": None,
        "lastRun": None,
        "current": {"batch": 0, "transaction": str(first), "state": "OPEN"},
        "run": "a",
        "runEpoch": 1,
        "retiredRuns": [],
        "owner": None,
        "expiresMs": described["expiresMs"],
    }
    assert described["expiresMs"] >= MONTH_MS
    broker.run(transactions(broker).coordinator.decide(first, []))
    described = found(http.get(path(SINK)))
    assert (described["lastBatch"], described["lastRun"], described["current"]["state"]) == (0, "a", "COMMITTED")
    second = begin(broker, 1, "b")
    begin(broker, 7, "x", "another")
    listed = found(http.get(ROOT))
    assert [each["sink"] for each in listed] == [SINK, "another"]
    assert (listed[0]["lastBatch"], listed[0]["run"], listed[0]["retiredRuns"]) == (0, "b", ["a"])
    assert len(found(http.get(ROOT, params={"limit": 1}))) == 1
    assert http.delete(path(SINK)).status_code == 204
    answer = http.delete(path(SINK))
    assert (answer.status_code, answer.json()["reason"].partition(";")[0]) == (404, f"The sink {SINK} does not exist")
    header = broker.run(transactions(broker).store.header(second, fresh=True))
    assert header is not None and header.value.state == "ABORTED"
    assert [each["sink"] for each in found(http.get(ROOT))] == ["another"]


def test_an_aborted_batch(broker: BackgroundBroker, http: httpx.Client) -> None:
    txn = begin(broker, 3, "a")
    broker.run(transactions(broker).coordinator.end(txn, commit=False))
    described = found(http.get(path(SINK)))
    assert (described["lastBatch"], described["current"]["state"]) == (None, "ABORTED")


def test_a_transaction_names_its_sink(broker: BackgroundBroker, http: httpx.Client) -> None:
    txn = begin(broker, 3, "a")
    described = found(http.get(f"/admin/v3/transactions/{txn.most}/{txn.least}"))
    assert (described["sink"], described["batch"], described["run"], described["isDecider"]) == (SINK, 3, "a", True)
    plain = broker.run(transactions(broker).coordinator.new(0, 60_000, owner=None))
    described = found(http.get(f"/admin/v3/transactions/{plain.most}/{plain.least}"))
    assert (described["sink"], described["batch"], described["run"]) == (None, None, None)


def test_what_is_refused(http: httpx.Client) -> None:
    for method, wanted in [("GET", 404), ("DELETE", 404), ("POST", 405)]:
        answer = http.request(method, path("nobody's"))
        assert answer.status_code == wanted, answer.text
    assert http.get(path("x" * 5000)).status_code == 404
    for limit in ("0", "10001", "x", "-1"):
        assert http.get(ROOT, params={"limit": limit}).status_code == 400
    assert http.get(f"{ROOT}/%FF").status_code in (400, 404, 412)
