"""`braid sinks` and `AdminClient.sinks` against a real broker: the list, one in full, removal, and what is no sink."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator

import pytest

from braid.cli import main as cli
from braid.client.admin import AdminClient
from braid.client.admin_transaction_types import SinkBatchInfo, SinkInfo
from braid.client.blocking import AdminClient as BlockingAdminClient
from braid.errors import InvalidArgument, NotFound
from braid.model.txn import TxnId
from braid.testing.broker import BackgroundBroker
from braid.txn.records import SinkBatch

SINK = "8a2c/topic://public/default/out"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def broker() -> Iterator[BackgroundBroker]:
    with BackgroundBroker() as running:
        yield running


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes], broker: BackgroundBroker) -> Run:
    monkeypatch.setenv("BRAID_ADMIN_URL", broker.http_url)
    monkeypatch.setenv("COLUMNS", "200")

    def braid_command(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["braid", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        sys.stdout.flush()
        seen = capfdbinary.readouterr()
        assert b"Traceback" not in seen.err
        return int(ended.value.code or 0), seen.out.decode(), seen.err.decode()

    return braid_command


def begin(broker: BackgroundBroker, batch: int, run: str, *, is_decided: bool = False) -> TxnId:
    transactions = broker.broker.nodes[0].service.transactions
    found = broker.run(transactions.sinks.begin(SinkBatch(SINK, batch, run), 60_000))
    assert found is not None
    if is_decided:
        broker.run(transactions.coordinator.decide(found, []))
    return found


def test_from_the_list_to_the_removal(run: Run, broker: BackgroundBroker) -> None:
    assert run("sinks", "list") == (0, "", "No sinks found.\n")
    begin(broker, 4, "first", is_decided=True)
    txn = begin(broker, 5, "second")
    _, out, _ = run("sinks", "list")
    assert all(text in out for text in (SINK, "4", f"batch 5 in {txn}", "second", "2"))
    code, out, _ = run("sinks", "describe", SINK)
    assert code == 0
    assert all(
        text in out for text in (SINK, f"batch 5, transaction {txn}, open", "second", "first", "unless it is used before")
    )
    (listed,) = json.loads(run("sinks", "list", "--output", "json", "--limit", "5")[1])
    assert (listed["sink"], listed["lastBatch"], listed["current"]["batch"]) == (SINK, 4, 5)
    code, out, _ = run("transactions", "describe", str(txn))
    assert code == 0 and SINK in out and "second" in out
    code, _, err = run("sinks", "delete", SINK)
    assert code != 0 and "cannot be undone; add --yes" in err
    assert run("sinks", "delete", SINK, "--yes")[0] == 0
    for command in (("describe",), ("delete", "--yes")):
        code, _, err = run("sinks", command[0], SINK, *command[1:])
        assert code != 0
        assert f"The sink {SINK} does not exist" in err
        assert "`braid sinks list` shows what there is" in err


def test_admin_client(broker: BackgroundBroker) -> None:
    txn = begin(broker, 4, "first")

    async def ask() -> None:
        async with AdminClient(broker.http_url) as admin:
            (listed,) = await admin.sinks.list(limit=5)
            assert type(listed) is SinkInfo
            assert listed == await admin.sinks.describe(SINK)
            assert listed.current == SinkBatchInfo(batch=4, transaction=str(txn), state="OPEN")
            for limit in (0, 10_001, "1", None):
                with pytest.raises(InvalidArgument, match="sinks can be listed"):
                    await admin.sinks.list(limit=limit)  # type: ignore[arg-type]
            with pytest.raises(InvalidArgument, match="name of the sink is empty"):
                await admin.sinks.describe(" ")
            assert (await admin.transactions.describe(str(txn))).sink == SINK

    asyncio.run(ask())
    with BlockingAdminClient(broker.http_url) as blocking:
        assert [each.sink for each in blocking.sinks.list()] == [SINK]
        blocking.sinks.delete(SINK)
        with pytest.raises(NotFound, match="does not exist"):
            blocking.sinks.describe(SINK)
