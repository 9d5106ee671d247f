"""Transactions over HTTP: open ones by age with what they hold back, one of them, abort, and ids that are none."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

import braid
from braid.broker.transactions import Transactions
from braid.metadata.api import Span
from braid.model.txn import TxnId
from braid.testing.broker import BackgroundBroker
from braid.testing.clock import ManualClock
from braid.txn.records import TxnOp, ops_of
from braid.web import routes_transactions

ROOT = "/admin/v3/transactions"
HOUR_MS = 3_600_000
SEGMENT = "segment://public/default/orders/0000-7fff-0"
TOPIC = "persistent://public/default/payments"


@pytest.fixture
def broker() -> Iterator[BackgroundBroker]:
    with BackgroundBroker(clock=ManualClock()) as running:
        yield running


@pytest.fixture
def http(broker: BackgroundBroker) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=broker.http_url, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def unchanged() -> Iterator[httpx.Client]:
    """A broker that is only asked what it refuses."""
    with BackgroundBroker() as running, httpx.Client(base_url=running.http_url, timeout=30) as client:
        yield client


def transactions(broker: BackgroundBroker) -> Transactions:
    return broker.broker.nodes[0].service.transactions


def begin(
    broker: BackgroundBroker,
    coordinator: int = 3,
    *,
    is_decider: bool = False,
    owner: str | None = None,
    timeout_ms: int = HOUR_MS,
) -> TxnId:
    coordinators = transactions(broker).coordinator
    return broker.run(coordinators.new(coordinator, timeout_ms, owner=owner, is_decider=is_decider))


def end(broker: BackgroundBroker, txn: TxnId, *, commit: bool) -> None:
    broker.run(transactions(broker).coordinator.end(txn, commit=commit))


def note(broker: BackgroundBroker, txn: TxnId, *ops: TxnOp) -> None:
    async def work() -> None:
        for op in ops:
            await transactions(broker).store.append_op(txn, op)

    broker.run(work())


def write(segment: str, floor: str, entries: int = 1) -> TxnOp:
    return TxnOp(kind="write", segment=segment, position=floor, entries=entries)


def ack(segment: str, subscription: str, position: str, *, cumulative: bool = False) -> TxnOp:
    return TxnOp(kind="ack", segment=segment, subscription=subscription, position=position, is_cumulative=cumulative)


def path(txn: TxnId) -> str:
    most, _, least = str(txn).partition("_")
    return f"{ROOT}/{most}/{least}"


def found(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(answer: httpx.Response, status: int, *words: str) -> None:
    assert answer.status_code == status, answer.text
    assert all(word in answer.json()["reason"] for word in words), answer.text


def test_open_ones_are_listed_by_age_with_what_they_hold_back(broker: BackgroundBroker, http: httpx.Client) -> None:
    assert found(http.get(ROOT)) == []
    old = begin(broker, owner="alice")
    broker.advance(60)
    # A younger one with a lower id and an earlier deadline: the order is that of age.
    young = begin(broker, coordinator=0, timeout_ms=HOUR_MS // 2)
    note(broker, old, write(SEGMENT, "7:9"), write(SEGMENT, "7:4", 3), write(TOPIC, "12:-1"))
    note(
        broker, old, ack(TOPIC, "billing", "12:1"), ack(TOPIC, "billing", "12:4"), ack(TOPIC, "audit", "12:3", cumulative=True)
    )
    listed = found(http.get(ROOT))
    assert [each["transaction"] for each in listed] == [str(old), str(young)]
    first = listed[0]
    assert (first["mostBits"], first["leastBits"]) == (old.most, old.least)
    assert {key: first[key] for key in ("state", "owner", "isDecider", "operations", "isComplete", "finalizedMs")} == {
        "state": "OPEN",
        "owner": "alice",
        "isDecider": False,
        "operations": 6,
        "isComplete": True,
        "finalizedMs": None,
    }
    assert first["ageMs"] == 60_000 and first["deadlineMs"] - first["createdMs"] == HOUR_MS
    assert first["writes"] == [
        {"topic": TOPIC, "entries": 1, "floor": "12:-1", "subTransactions": [0]},
        {"topic": SEGMENT, "entries": 4, "floor": "7:4", "subTransactions": [0]},
    ]
    assert first["acks"] == [
        {"topic": TOPIC, "subscription": "audit", "positions": 0, "cumulative": "12:3", "subTransactions": [0]},
        {"topic": TOPIC, "subscription": "billing", "positions": 2, "cumulative": None, "subTransactions": [0]},
    ]
    assert (listed[1]["writes"], listed[1]["acks"], listed[1]["ageMs"]) == ([], [], 0)


def test_the_age_and_the_limit_choose_among_them(broker: BackgroundBroker, http: httpx.Client) -> None:
    ids = []
    for coordinator in (5, 1, 3):
        ids.append(str(begin(broker, coordinator)))
        broker.advance(10)

    def listed(**query: int) -> list[str]:
        return [each["transaction"] for each in found(http.get(ROOT, params=query))]

    assert listed() == listed(minAgeMs=0) == listed(minAgeMs=10_000) == ids
    assert listed(minAgeMs=10_001) == listed(minAgeMs=20_000) == ids[:2]
    assert listed(minAgeMs=30_000) == ids[:1]
    assert listed(minAgeMs=30_001) == listed(minAgeMs=(1 << 63) - 1) == []
    assert listed(limit=2) == ids[:2]
    assert listed(limit=1, minAgeMs=5) == ids[:1]


@pytest.mark.parametrize(
    "query",
    ["minAgeMs=-1", "minAgeMs=1.5", "minAgeMs=soon", f"minAgeMs={1 << 63}", "limit=0", "limit=10001", "limit=-3", "limit=x"],
)
def test_ages_and_limits_that_are_none(unchanged: httpx.Client, query: str) -> None:
    refused(unchanged.get(f"{ROOT}?{query}"), 400, query.partition("=")[0])


def test_a_finished_one_is_shown_until_it_is_forgotten(broker: BackgroundBroker, http: httpx.Client) -> None:
    committed, aborted = begin(broker), begin(broker)
    note(broker, committed, write(TOPIC, "1:1"))
    broker.advance(5)
    end(broker, committed, commit=True)
    end(broker, aborted, commit=False)
    assert found(http.get(ROOT)) == []
    shown = found(http.get(path(committed)))
    assert (shown["state"], shown["finalizedMs"] - shown["createdMs"], shown["operations"]) == ("COMMITTED", 5000, 1)
    assert found(http.get(path(aborted)))["state"] == "ABORTED"


def test_abort(broker: BackgroundBroker, http: httpx.Client) -> None:
    txn, committed = begin(broker, owner="alice"), begin(broker)
    end(broker, committed, commit=True)
    assert http.delete(path(txn)).status_code == 204
    assert found(http.get(path(txn)))["state"] == "ABORTED"
    assert http.delete(path(txn)).status_code == 204
    refused(http.delete(path(committed)), 409, str(committed), "committed")
    assert found(http.get(path(committed)))["state"] == "COMMITTED"


def test_unknown_ones(broker: BackgroundBroker, http: httpx.Client) -> None:
    begin(broker)
    for unknown in ("3/0", "3/1048577048576", "0/-9223372036854775808", "-1/-1", "99/1048576"):
        for answer in (http.get(f"{ROOT}/{unknown}"), http.delete(f"{ROOT}/{unknown}")):
            refused(answer, 404, "does not exist")
    refused(http.get(f"{ROOT}/99/7"), 404, "99_7 does not exist")


@pytest.mark.parametrize(
    "text",
    ["x/1", "1/x", "1/1.0", "1/+5", "01/5", "1/0x10", f"{1 << 63}/1", f"1/{1 << 64}", "1/%20", "1/5%2F6", "None/None", "1/⁵"],
)
def test_ids_that_are_no_numbers(unchanged: httpx.Client, text: str) -> None:
    for answer in (unchanged.get(f"{ROOT}/{text}"), unchanged.delete(f"{ROOT}/{text}")):
        refused(answer, 400, "is expected")


def test_paths_that_are_none(unchanged: httpx.Client) -> None:
    refused(unchanged.get(f"{ROOT}/1"), 501)
    refused(unchanged.get(f"{ROOT}//5"), 404, "empty")
    refused(unchanged.get(f"{ROOT}/1/"), 404, "empty")
    refused(unchanged.put(f"{ROOT}/1/5"), 405)
    refused(unchanged.post(ROOT), 405)


def test_sub_transactions(broker: BackgroundBroker, http: httpx.Client) -> None:
    coordinator = transactions(broker).coordinator
    root, plain = begin(broker, is_decider=True), begin(broker)
    winner, loser = broker.run(coordinator.new_sub(root)), broker.run(coordinator.new_sub(root))
    note(broker, winner, write(SEGMENT, "7:4"), write(SEGMENT, "7:6"))
    note(broker, loser, write(SEGMENT, "7:2"))
    whole, part = found(http.get(path(root))), found(http.get(path(winner)))
    assert (whole["isDecider"], whole["operations"], whole["writes"][0]["floor"]) == (True, 3, "7:2")
    assert whole["writes"][0]["subTransactions"] == [winner.sub, loser.sub]
    assert (part["transaction"], part["operations"], part["writes"][0]["floor"]) == (str(winner), 2, "7:4")
    refused(http.delete(path(winner)), 412, str(winner), f"abort {root} instead")
    refused(http.get(path(plain.with_sub(1))), 404, "has no sub-transactions")
    refused(http.delete(path(plain.with_sub(1))), 404, "has no sub-transactions")
    broker.run(coordinator.decide(root, [winner.sub]))
    states = [found(http.get(path(txn)))["state"] for txn in (root, winner, loser)]
    assert states == ["COMMITTED", "COMMITTED", "ABORTED"]
    assert found(http.get(path(root)))["winners"] == [winner.sub]


@pytest.mark.inv("INV17")
def test_many_operations_are_counted_up_to_a_bound(
    broker: BackgroundBroker, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes_transactions, "MAX_OPS", 5)
    first, second, third = (begin(broker) for _ in range(3))
    for txn in (first, second, third):
        note(broker, txn, *(write(TOPIC, f"1:{number}") for number in range(3)))
    listed = {each["transaction"]: each for each in found(http.get(ROOT))}
    seen = [(listed[str(txn)]["operations"], listed[str(txn)]["isComplete"]) for txn in (first, second, third)]
    assert seen == [(3, True), (2, False), (0, False)]
    one = found(http.get(path(third)))
    assert (one["operations"], one["isComplete"]) == (3, True)
    note(broker, third, *(write(TOPIC, f"2:{number}") for number in range(3)))
    one = found(http.get(path(third)))
    assert (one["operations"], one["isComplete"]) == (5, False)


def test_the_document_describes_the_calls(unchanged: httpx.Client) -> None:
    paths = found(unchanged.get("/openapi.json"))["paths"]
    listing, one = paths[ROOT]["get"], paths[f"{ROOT}/{{most}}/{{least}}"]
    assert {each["name"] for each in listing["parameters"]} == {"minAgeMs", "limit"}
    assert listing["parameters"][0]["schema"]["minimum"] == 0
    assert set(one) == {"get", "delete"}
    assert [each["name"] for each in one["get"]["parameters"]] == ["most", "least"]
    assert {"204", "400", "404", "409"} <= set(one["delete"]["responses"])


def test_a_message_that_is_looked_at_says_what_its_transaction_makes_of_it() -> None:
    with BackgroundBroker() as broker, httpx.Client(base_url=broker.http_url, timeout=30) as http:
        marks = broker.run(_look(broker, http))
    assert marks == [(None, None), ("false", "true"), ("true", "false"), ("false", "false")]


async def _look(broker: BackgroundBroker, http: httpx.Client) -> list[tuple[str | None, str | None]]:
    """What is said of a plain message, of one whose transaction is open, then aborted, and of a committed one."""
    url = "/admin/v2/persistent/public/default/seen/examinemessage"

    async def marks(wanted: str | None) -> tuple[str | None, str | None]:
        found: tuple[str | None, str | None] = (None, None)
        for _attempt in range(200):
            headers = (await asyncio.to_thread(http.get, url)).headers
            found = headers.get("X-Pulsar-txn-aborted"), headers.get("X-Pulsar-txn-uncommitted")
            if found[1] == wanted:
                break
            await asyncio.sleep(0.01)
        return found

    async with braid.connect(broker.service_url) as client, client.producer("seen", batching=False) as producer:
        await producer.send(b"plain")
        seen = [await marks(None)]
        txn = await client.begin_transaction()
        await producer.send(b"undecided", txn=txn)
        seen.append(await marks("true"))
        await txn.abort()
        seen.append(await marks("false"))
        async with client.transaction() as other:
            await producer.send(b"committed", txn=other)
        seen.append(await marks("false"))
    return seen


def test_any_broker_answers_for_all() -> None:
    with BackgroundBroker(brokers=3) as several:
        urls = several.run(_urls(several))
        txn = begin(several)
        for number, url in enumerate(urls):
            assert [each["transaction"] for each in found(httpx.get(f"{url}{ROOT}"))] == [str(txn)], number
        assert httpx.delete(f"{urls[2]}{path(txn)}").status_code == 204
        assert found(httpx.get(f"{urls[1]}{path(txn)}"))["state"] == "ABORTED"


async def _urls(several: BackgroundBroker) -> list[str]:
    return [node.http_url for node in several.broker.nodes]


def test_an_operation_that_cannot_be_read_does_not_hide_the_others(broker: BackgroundBroker, http: httpx.Client) -> None:
    bad, good = begin(broker), begin(broker, 4)
    note(broker, bad, write(SEGMENT, "1:2"))
    note(broker, good, write(SEGMENT, "1:3"))

    async def spoil() -> None:
        store = transactions(broker).store.metadata
        async for record in store.scan(Span(ops_of(bad)), partition=str(bad), fresh=True):
            await store.put(record.key, b"[]", partition=str(bad))

    broker.run(spoil())
    shown = {each["transaction"]: each for each in found(http.get(ROOT))}
    assert shown.keys() == {str(bad), str(good)}
    assert [shown[str(each)]["isComplete"] for each in (bad, good)] == [False, True]
    refused(http.get(path(bad)), 503, "/txn-op/", "cannot be read")
    assert http.delete(path(bad)).status_code == 204
