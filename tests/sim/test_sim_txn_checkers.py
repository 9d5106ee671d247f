"""Checkers of transactions on histories made by hand: each accepts a good one and names what is wrong with a bad one."""

from __future__ import annotations

from typing import Any

import pytest

from braid.testing.sim import checkers, txn_checkers
from braid.testing.sim.checkers import Violation
from braid.testing.sim.history import Event
from braid.testing.sim.isolation import MOST_TRANSACTIONS, isolation
from braid.testing.sim.transactions import totals

T = "topic://public/default/t"
U = "topic://public/default/u"
A, B, C = "0_1048576", "0_2097152", "1_1048576"
Row = tuple[Any, ...]


def history(*rows: Row) -> list[Event]:
    """Events from (proc, kind, op, value[, more]); time is their place."""
    return [Event(float(at), row[0], row[1], row[2], row[3], **(row[4] if len(row) > 4 else {})) for at, row in enumerate(rows)]


def texts(found: list[Violation], checker: str) -> str:
    assert {violation.checker for violation in found} <= {checker}, found
    return "\n".join(violation.text for violation in found)


def begin(txn: str, seconds: float = 10.0) -> Row:
    return ("w", "ok", "begin", [seconds], {"txn": txn})


def send(txn: str, sequence: int, kind: str = "ok", *, topic: str = T) -> Row:
    """The invocation has the number of the answer."""
    place = [f"1:{sequence}"] if kind == "ok" else []
    return ("w", kind, "send", [topic, "w", "k", sequence, *place], {"txn": txn, "number": 100 + sequence})


def sent(txn: str, sequence: int, *, topic: str = T) -> tuple[Row, Row]:
    return send(txn, sequence, "invoke", topic=topic), send(txn, sequence, topic=topic)


def decided(txn: str, state: str = "COMMITTED") -> Row:
    return ("store", "info", "decided", state, {"txn": txn})


def ending(txn: str, kind: str = "ok", op: str = "commit") -> Row:
    return ("w", kind, op, None, {"txn": txn})


def got(sequence: int, reader: str = "r", *, topic: str = T, proc: str = "c") -> Row:
    return (proc, "ok", "deliver", [topic, reader, "w", "k", sequence, f"1:{sequence}", 0])


def acked(txn: str, sequence: int, kind: str = "ok", *, subscription: str = "s", proc: str = "w") -> Row:
    value = [T, subscription, "w", "k", sequence, f"1:{sequence}"]
    return (proc, kind, "ack", value, {"txn": txn, "number": 200 + sequence})


def audit(reader: str = "r", topic: str = T) -> Row:
    return ("c", "ok", "audit", [topic, reader])


def audited(reader: str = "r", topic: str = T) -> Row:
    return ("c", "ok", "audited", [topic, reader])


COMMIT_A = (ending(A, "invoke"), decided(A), ending(A))


@pytest.mark.inv("INV13")
def test_all_or_nothing_accepts_what_is_whole() -> None:
    rows = (
        *sent(A, 0),
        *sent(A, 1, topic=U),
        *sent(B, 2),
        *COMMIT_A,
        decided(B, "ABORTED"),
        audit(),
        got(0),
        audited(),
        audit("r", U),
        got(1, topic=U),
        audited("r", U),
    )
    assert txn_checkers.all_or_nothing(history(*rows)) == []


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ((*sent(A, 0), got(0), *COMMIT_A), "open until"),
        ((*sent(A, 0), got(0), decided(B)), "which is open"),
        ((*sent(A, 0), decided(A, "ABORTED"), got(0)), "aborted at"),
        ((*sent(A, 0), got(0), decided(A, "ABORTED")), "open and aborted at"),
        ((*sent(A, 0), *sent(A, 1), *COMMIT_A, audit(), got(0), audited()), "saw a part of"),
        ((*sent(A, 0), *COMMIT_A, audit(), audited()), "saw nothing of"),
        (
            (send(A, 0, "invoke"), send(A, 0, "info"), *COMMIT_A, audit("one"), got(0, "one"), audited("one"), audited("two")),
            "one saw",
        ),
    ],
)
def test_what_is_seen_by_halves_or_too_early_is_found(rows: tuple[Row, ...], text: str) -> None:
    assert text in texts(txn_checkers.all_or_nothing(history(*rows)), "C6")


def test_what_was_committed_after_an_audit_began_may_be_missing_in_it() -> None:
    assert txn_checkers.all_or_nothing(history(*sent(A, 0), audit(), *COMMIT_A, audited())) == []


def test_without_the_store_answers_stand_for_decisions() -> None:
    asked, answered = ending(A, "invoke"), ending(A)
    assert txn_checkers.all_or_nothing(history(*sent(A, 0), asked, got(0), answered)) == []
    assert txn_checkers.all_or_nothing(history(*sent(A, 0), asked, got(0), ending(A, "info"))) == []
    assert "open" in texts(txn_checkers.all_or_nothing(history(*sent(A, 0), got(0), asked, answered)), "C6")
    aborted = (ending(A, "invoke", "abort"), ending(A, "ok", "abort"))
    assert "aborted" in texts(txn_checkers.all_or_nothing(history(*sent(A, 0), *aborted, got(0))), "C6")


def test_one_outcome() -> None:
    assert txn_checkers.one_outcome(history(*COMMIT_A, decided(A), ending(B, "fail"), decided(B, "ABORTED"))) == []
    twice = history(decided(A), decided(A, "ABORTED"))
    assert "decided twice" in texts(txn_checkers.one_outcome(twice), "C6")
    for rows, text in (
        ((decided(A, "ABORTED"), ending(A)), "it is ABORTED"),
        ((decided(B), ending(A)), "still open"),
        ((decided(A), ending(A, "fail")), "is not committed; it is"),
        ((decided(A), ending(A, "ok", "abort")), "it is COMMITTED"),
    ):
        assert text in texts(txn_checkers.one_outcome(history(*rows)), "C6")


JOIN = ("w", "invoke", "subscribe", [T, "s"])
PLAIN = (("p", "invoke", "send", [T, "w", "k", 0]), ("p", "ok", "send", [T, "w", "k", 0, "1:0"]))


@pytest.mark.inv("INV14")
def test_a_message_is_consumed_by_one_transaction() -> None:
    def judge(*rows: Row, is_finished: bool = True) -> str:
        found = txn_checkers.consumed_once(history(JOIN, *PLAIN, *rows), subscriptions=["s"], is_finished=is_finished)
        return texts(found, "C6")

    assert judge(acked(A, 0), decided(A)) == ""
    assert judge(acked(A, 0), decided(A, "ABORTED"), acked(B, 0), decided(B)) == ""
    assert judge(acked("", 0)) == ""
    assert "acknowledged in s by" in judge(acked(A, 0), decided(A), acked(B, 0), decided(B))
    assert "acknowledged in s by" in judge(acked("", 0), acked(B, 0), decided(B))
    assert "never taken" in judge(acked(A, 0), decided(A, "ABORTED"))
    assert judge(acked(A, 0), decided(A, "ABORTED"), is_finished=False) == ""
    again = (JOIN, got(0, "s", proc="w"))
    assert "joined after" in judge(acked(A, 0), decided(A), *again)
    assert judge(acked(A, 0), *again, decided(A)) == "", "it may have come before"


@pytest.mark.inv("INV11")
def test_nothing_joins_a_transaction_that_is_over() -> None:
    good = history(send(A, 0, "invoke"), decided(A, "ABORTED"), send(A, 0), send(A, 1, "invoke"), send(A, 1, "fail"))
    assert txn_checkers.late_writes(good) == []
    late = history(decided(A), *sent(A, 0))
    assert "send" in texts(txn_checkers.late_writes(late), "C8")
    late = history(decided(A, "ABORTED"), acked(A, 0, "invoke"), acked(A, 0))
    assert "ack" in texts(txn_checkers.late_writes(late), "C8")


@pytest.mark.inv("INV10", "INV11")
def test_an_entry_comes_after_its_operation_record() -> None:
    op = ("store", "info", "txn-op", ["log", "write"], {"txn": A})
    entry = ("b", "invoke", "append", ["log", 7, 0, 1], {"txn": A})
    plain = ("b", "invoke", "append", ["log", 7, 1, 1])
    assert txn_checkers.op_first(history(plain, op, entry, decided(A))) == []
    assert txn_checkers.op_first(history(op, decided(A, "ABORTED"), entry)) == [], "it was on its way"
    assert "without" in texts(txn_checkers.op_first(history(entry, op)), "C8")
    assert "without" in texts(txn_checkers.op_first(history((*op[:3], ["log", "ack"], op[4]), entry)), "C8")
    assert "without" in texts(txn_checkers.op_first(history((*op[:3], ["other", "write"], op[4]), entry)), "C8")
    assert "came after" in texts(txn_checkers.op_first(history(decided(A), op, entry)), "C8")


def test_transactions_end_in_time() -> None:
    assert txn_checkers.ended_in_time(history(begin(A, 1), decided(A)), spare=1) == []
    pause = [("x", "info", "note", None)] * 20
    assert "was open" in texts(txn_checkers.ended_in_time(history(begin(A, 5), *pause, decided(A)), spare=3), "C18")
    assert "was open" in texts(txn_checkers.ended_in_time(history(begin(A, 5), *pause), spare=3), "C18")
    healed = ("world", "info", "healed", None)
    assert txn_checkers.ended_in_time(history(begin(A, 5), *pause, healed, decided(A)), spare=3) == []


def test_settled_histories_are_those_without_transactions() -> None:
    join = ("c", "ok", "subscribe", [T, "r"])
    rows = (join, *sent(A, 0), *sent(B, 1), *COMMIT_A, decided(B, "ABORTED"), got(0))
    assert checkers.no_loss(txn_checkers.settled(history(*rows))) == []
    assert checkers.no_phantom(txn_checkers.settled(history(*rows))) == []
    assert [each.checker for each in checkers.no_loss(txn_checkers.settled(history(*rows[:-1])))] == ["C1"]
    assert [each.checker for each in checkers.no_phantom(txn_checkers.settled(history(*rows, got(1))))] == ["C2"]
    early = (JOIN, acked(A, 0), JOIN, got(0, "s", proc="w"), decided(A))
    assert checkers.no_duplicate(txn_checkers.settled(history(*early))) == []
    late = (JOIN, acked(A, 0), decided(A), JOIN, got(0, "s", proc="w"))
    assert [each.checker for each in checkers.no_duplicate(txn_checkers.settled(history(*late)))] == ["C3"]


def test_the_bank_counts_the_same_every_time() -> None:
    def judge(*rows: Row) -> str:
        return texts(totals(history(*rows), total=10), "C6")

    def counted(txn: str, *balances: int) -> Row:
        return ("t", "info", "counted", {f"a{number}": each for number, each in enumerate(balances)}, {"txn": txn})

    left = [("s", "info", "token", ["a0", "4"]), ("s", "info", "token", ["a1", "6"])]
    assert judge(acked(A, 0), acked(A, 1), counted(A, 3, 7), *left) == ""
    assert judge(acked(A, 0), counted(A, 3, 8)) == "", "it did not hold both"
    assert ": 11" in judge(acked(A, 0), acked(A, 1), counted(A, 3, 8))
    assert "in the end" in judge(left[0], ("s", "info", "token", ["a1", "7"]))


# C7


def append(txn: str, name: str, element: Any) -> Row:
    return ("w", "invoke", "list-append", [name, element], {"txn": txn})


def read(txn: str, name: str, *elements: Any) -> Row:
    return ("w", "ok", "list-read", [name, list(elements)], {"txn": txn})


DONE = (decided(A), decided(B), decided(C))


def judged(*rows: Row) -> str:
    return texts(isolation(history(*rows, *DONE)), "C7")


def test_lists_that_grow_in_one_order_are_isolated() -> None:
    rows = (
        read(A, "x"),
        append(A, "x", 1),
        append(A, "x", 2),
        append(A, "y", 1),
        read(B, "x", 1, 2),
        append(B, "x", 3),
        read(C, "x", 1, 2, 3),
        read(C, "y", 1),
        append(C, "y", 2),
        read("", "x", 1, 2, 3),
        read("", "y", 1, 2),
    )
    assert judged(*rows) == ""


def test_g0_two_orders_of_writes() -> None:
    rows = (
        append(A, "x", 1),
        append(B, "x", 2),
        append(A, "y", 1),
        append(B, "y", 2),
        read("", "x", 1, 2),
        read("", "y", 2, 1),
    )
    assert judged(*rows).startswith("G0: ") and A in judged(*rows) and B in judged(*rows)


def test_g0_a_write_between_two_of_one_transaction() -> None:
    rows = (append(A, "x", 1), append(B, "x", 2), append(A, "x", 3), read("", "x", 1, 2, 3))
    assert judged(*rows).startswith("G0: ")


def test_g1a_a_read_of_aborted_data() -> None:
    found = isolation(history(append(A, "x", 1), read(B, "x", 1), decided(A, "ABORTED"), decided(B)))
    assert texts(found, "C7").startswith("G1a: ")
    found = isolation(history(append(A, "x", 1), read("", "x", 1), decided(B)))
    assert "never committed" in texts(found, "C7")
    found = isolation(history(append(A, "x", 1), read(B, "x", 1), decided(A, "ABORTED"), decided(B, "ABORTED")))
    assert found == [], "what an aborted transaction read does not count here"


def test_g1b_a_read_of_an_intermediate_version() -> None:
    rows = (append(A, "x", 1), append(A, "x", 2), read(B, "x", 1), read("", "x", 1, 2))
    assert "G1b: " in judged(*rows)
    own = (append(A, "x", 1), read(A, "x", 1), append(A, "x", 2), read("", "x", 1, 2))
    assert judged(*own) == "", "a transaction sees its own steps"


def test_g1c_two_transactions_that_read_from_each_other() -> None:
    rows = (append(A, "x", 1), read(A, "y", 1), append(B, "y", 1), read(B, "x", 1))
    assert judged(*rows).startswith("G1c: ")


def test_g2_a_write_that_both_have_missed() -> None:
    rows = (read(A, "x"), append(A, "y", 1), read(B, "y"), append(B, "x", 1), read("", "x", 1), read("", "y", 1))
    assert judged(*rows).startswith("G2: ")
    longer = (
        *(read(A, "x"), append(A, "y", 1), read(B, "y"), append(B, "z", 1), read(C, "z"), append(C, "x", 1)),
        *(read("", "x", 1), read("", "y", 1), read("", "z", 1)),
    )
    assert judged(*longer).startswith("G2: ") and judged(*longer).count("->") == 3


def test_lists_that_branch_repeat_or_come_from_nowhere() -> None:
    assert "incompatible" in judged(append(A, "x", 1), append(B, "x", 2), read("", "x", 1), read(C, "x", 2))
    assert "twice" in judged(append(A, "x", 1), read("", "x", 1, 1))
    assert "nobody appended" in judged(read("", "x", 7))


def test_too_many_transactions_are_refused() -> None:
    rows = [append(f"0_{number}", "x", number) for number in range(MOST_TRANSACTIONS + 1)]
    assert "too many" in texts(isolation(history(*rows)), "C7")
    some = [append(f"0_{number}", "x", number) for number in range(MOST_TRANSACTIONS)]
    ends = [decided(f"0_{number}") for number in range(MOST_TRANSACTIONS)]
    assert isolation(history(*some, read("", "x", *range(MOST_TRANSACTIONS)), *ends)) == []
