"""`braid transactions` against a real broker: the list by age, one in full, abort, and what is no id or age."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from braid.cli import main as cli
from braid.cli.admin_output import print_tables
from braid.cli.scalable_output import blocked
from braid.cli.transactions_output import describe_parts, list_parts
from braid.client.admin_scalable_types import Blocked
from braid.client.admin_transaction_types import TransactionAcks, TransactionInfo, TransactionWrites
from braid.model.txn import TxnId
from braid.testing.broker import BackgroundBroker
from braid.txn.records import TxnOp

TOPIC = "persistent://public/default/payments"


@pytest.fixture(scope="module")
def broker() -> Iterator[BackgroundBroker]:
    with BackgroundBroker() as running:
        yield running


class Outcome:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code = code
        self.out = out
        self.err = err

    @property
    def json(self) -> Any:
        assert self.code == 0, self.err
        return json.loads(self.out)


Run = Callable[..., Outcome]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes], broker: BackgroundBroker) -> Run:
    monkeypatch.setenv("BRAID_ADMIN_URL", broker.http_url)

    def braid_command(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["braid", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        sys.stdout.flush()
        seen = capfdbinary.readouterr()
        assert b"Traceback" not in seen.err
        return Outcome(int(ended.value.code or 0), seen.out.decode(), seen.err.decode())

    return braid_command


def begin(broker: BackgroundBroker, *ops: TxnOp, owner: str | None = None) -> TxnId:
    async def work() -> TxnId:
        transactions = broker.broker.nodes[0].service.transactions
        txn = await transactions.coordinator.new(3, 3_600_000, owner=owner)
        for op in ops:
            await transactions.store.append_op(txn, op)
        return txn

    return broker.run(work())


def test_from_the_list_to_the_abort(run: Run, broker: BackgroundBroker) -> None:
    empty = run("transactions", "list")
    assert (empty.code, empty.out, empty.err) == (0, "", "No open transactions found.\n")
    assert run("transactions", "list", "--output", "json").json == []
    write = TxnOp(kind="write", segment=TOPIC, position="12:7", entries=2)
    ack = TxnOp(kind="ack", segment=TOPIC, subscription="billing", position="12:3", is_cumulative=True)
    txn = begin(broker, write, ack, owner="alice")
    listed = run("transactions", "list")
    assert (listed.code, listed.err) == (0, "")
    head, _rule, line = [each for each in listed.out.splitlines() if each.strip()]
    assert head.split()[0] == "transaction" and head.endswith("holds back")
    assert line.split()[0] == str(txn) and "alice" in line
    assert line.endswith(f"{TOPIC} after 12:7, billing of {TOPIC}")
    assert [each["transaction"] for each in run("transactions", "list", "--output", "json").json] == [str(txn)]
    assert run("transactions", "list", "--min-age", "2h").err == "No open transactions found.\n"
    assert run("transactions", "list", "--min-age", "0s", "--limit", "1", "--output", "json").json[0]["owner"] == "alice"
    for spelling in (str(txn), f"({txn.most},{txn.least})", f"{txn.most}:{txn.least}", f"{txn.most}, {txn.least}"):
        shown = run("transactions", "describe", spelling)
        assert (shown.code, shown.err) == (0, "")
        assert all(each in shown.out for each in (str(txn), "open", "alice", TOPIC, "12:7", "billing", "12:3"))
    asked = run("transactions", "abort", str(txn))
    assert (asked.code, asked.err.count("\n")) == (2, 1) and "add --yes" in asked.err
    assert run("transactions", "abort", str(txn), "--yes").out == f"done: transactions abort (transaction {txn})\n"
    assert run("transactions", "abort", str(txn), "--yes", "--output", "json").json == {
        "done": "transactions abort",
        "transaction": str(txn),
    }
    over = run("transactions", "describe", str(txn))
    assert "aborted" in over.out and "was open for" in over.out
    assert run("transactions", "list", "--output", "json").json == []


def test_what_is_over_or_unknown(run: Run, broker: BackgroundBroker) -> None:
    committed = begin(broker)
    broker.run(broker.broker.nodes[0].service.transactions.coordinator.end(committed, commit=True))
    refused = run("transactions", "abort", str(committed), "--yes")
    assert (refused.code, refused.out, refused.err.count("\n")) == (1, "", 1)
    assert str(committed) in refused.err and "committed" in refused.err
    for verb in (("describe",), ("abort", "--yes")):
        unknown = run("transactions", verb[0], "3_1048576000000", *verb[1:])
        assert (unknown.code, unknown.out, unknown.err.count("\n")) == (1, "", 1)
        assert "does not exist" in unknown.err and "`braid transactions list` shows what there is." in unknown.err


@pytest.mark.parametrize(
    "text", ["", "7", "x_1", "1_x", "1_2_3", f"1_{1 << 64}", "1.5_2", "persistent://public/default/t", "٣_٤"]
)
def test_what_is_no_id(run: Run, text: str) -> None:
    for verb in (("describe",), ("abort", "--yes")):
        outcome = run("transactions", verb[0], text, *verb[1:])
        assert (outcome.out, outcome.err.count("\n")) == ("", 1)
        assert outcome.code in (1, 2) and "is no transaction id" in outcome.err and "3_1048576" in outcome.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--min-age", "-5m"], "is no age"),
        (["--min-age", "soon"], "is no age"),
        (["--min-age", "5"], "30s, 90m, 12h or 2d"),
        (["--limit", "0"], "From 1 to 10000"),
        (["--limit", "many"], "--limit"),
        (["--output", "xml"], "--output must be one of text, json"),
    ],
)
def test_bad_options(run: Run, arguments: list[str], words: str) -> None:
    outcome = run("transactions", "list", *arguments)
    assert outcome.code in (1, 2) and outcome.out == "" and words in outcome.err


def shown(capfdbinary: pytest.CaptureFixture[bytes], parts: Any) -> str:
    print_tables(parts)
    sys.stdout.flush()
    return capfdbinary.readouterr().out.decode()


def info(**fields: Any) -> TransactionInfo:
    defaults: dict[str, Any] = {"transaction": "3_1048576", "most_bits": 3, "least_bits": 1 << 20, "state": "OPEN"}
    return TransactionInfo(**(defaults | {"created_ms": 1_000, "age_ms": 90_000, "deadline_ms": 301_000} | fields))


def test_a_line_names_a_few_and_counts_the_rest(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    writes = [TransactionWrites(topic=f"persistent://a/b/{number}", entries=2, floor="1:1") for number in range(5)]
    text = shown(capfdbinary, list_parts([info(writes=writes, operations=5, is_complete=False), info()]))
    assert "persistent://a/b/2 after 1:1, and 2 more" in text and "a/b/3" not in text
    assert "10 or more" in text and "nothing yet" in text
    assert "90 s" in text and "210 s" not in text and "4 min" in text


def test_everything_of_one(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    writes = [TransactionWrites(topic="persistent://a/b/[red]\x1b", entries=1, floor="1:1", sub_transactions=[1, 4])]
    acks = [TransactionAcks(topic="persistent://a/b/c", subscription="s", positions=3, sub_transactions=[0])]
    finished = info(
        state="COMMITTED", is_decider=True, winners=[4], finalized_ms=61_000, operations=4, writes=writes, acks=acks
    )
    text = shown(capfdbinary, describe_parts(finished))
    assert "committed, and being settled" in text and "1970-01-01T00:01:01+00:00" in text and "60 s" in text
    assert "[red]\\x1b" in text and "\x1b" not in text
    assert "1, 4" in text and "winners" in text and "sub-transactions" in text
    plain = shown(capfdbinary, describe_parts(info(acks=[TransactionAcks(topic="t", subscription="s", cumulative="5:5")])))
    assert "sub-transactions" not in plain and "5:5" in plain and "aborted at" in plain
    assert "9999999999999999 ms" in shown(capfdbinary, describe_parts(info(created_ms=9_999_999_999_999_999)))


def test_what_holds_a_subscription_up_is_told_in_words() -> None:
    detail = {"transaction": "3_1048576", "topic": "persistent://a/b/c", "writes": 2, "after": "7:4"}
    why = Blocked(kind="open-transaction", segment=3, detail=detail, since=10_000)
    assert blocked(why, 100_000) == ("the open transaction 3_1048576 holds back entries of segment 3 after 7:4 (for 90 s)")
    on_topic = Blocked(kind="open-transaction", detail={"transaction": "3_1048576", "topic": "persistent://a/b/c", "acks": 5})
    assert blocked(on_topic, 0) == "the open transaction 3_1048576 holds back 5 acknowledgments in persistent://a/b/c"
    both = Blocked(kind="open-transaction", segment=0, detail={**detail, "acks": 1, "others": 7})
    assert blocked(both, 0) == (
        "the open transaction 3_1048576 holds back entries of segment 0 after 7:4 and 1 acknowledgment in segment 0, and 7 more"
    )
