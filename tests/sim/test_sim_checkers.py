"""Checkers on histories made by hand: each accepts a good one and names what is wrong with a bad one."""

from __future__ import annotations

from typing import Any

import pytest

from braid.testing.sim import checkers, watching
from braid.testing.sim.checkers import Violation
from braid.testing.sim.history import Event, History, load
from braid.testing.sim.linearizable import ANY, CONFLICT, NEVER, Operation, is_linearizable, linearizable

T = "persistent://public/default/t"


def history(*rows: tuple[Any, ...]) -> list[Event]:
    """Events from (proc, kind, op, value[, more]); time is their place."""
    return [Event(float(at), row[0], row[1], row[2], row[3], **(row[4] if len(row) > 4 else {})) for at, row in enumerate(rows)]


def sent(sequence: int, kind: str = "ok", key: str = "k") -> tuple[Any, ...]:
    place = [f"1:{sequence}"] if kind == "ok" else []
    return ("p", kind, "send", [T, "p", key, sequence, *place])


def got(
    sequence: int, place: str | None = None, *, proc: str = "c", key: str = "k", subscription: str = "s"
) -> tuple[Any, ...]:
    return (proc, "ok", "deliver", [T, subscription, "p", key, sequence, place or f"1:{sequence}", 0])


def acked(sequence: int) -> tuple[Any, ...]:
    return ("c", "ok", "ack", [T, "s", "p", "k", sequence, f"1:{sequence}"])


JOIN = ("c", "ok", "subscribe", [T, "s"])


def names(found: list[Violation]) -> list[str]:
    return [violation.checker for violation in found]


def test_no_loss() -> None:
    good = history(JOIN, sent(0, "invoke"), sent(0), sent(1, "invoke"), sent(1, "info"), got(0))
    assert checkers.no_loss(good) == []
    lost_rows = (JOIN, sent(0, "invoke"), sent(0), sent(1, "invoke"), sent(1), got(0))
    lost = history(*lost_rows)
    assert names(checkers.no_loss(lost)) == ["C1"] and "'p', 'k', 1" in checkers.no_loss(lost)[0].text
    late = history(sent(0, "invoke"), sent(0), JOIN)
    assert checkers.no_loss(late) == []
    meanwhile = history(sent(0, "invoke"), JOIN, sent(0))
    assert checkers.no_loss(meanwhile) == [], "it may have been stored before"
    assert checkers.no_loss(history(*lost_rows, ("a", "invoke", "unsubscribe", [T, "s"]))) == []


def test_flush_waits_for_every_answer() -> None:
    def flush(*unanswered: int) -> list[Event]:
        return history(("p", "ok", "flush", [T, "p", list(unanswered)]))

    assert checkers.no_loss(flush()) == []
    assert names(checkers.no_loss(flush(3))) == ["C1"]


def test_a_subscription_that_was_reset_begins_anew() -> None:
    def check(*rows: tuple[Any, ...]) -> list[str]:
        return names(checkers.begun_anew(history(*rows), subscription="s", start_ms=0))

    before = (sent(0, "invoke"), sent(0), sent(1, "invoke"), sent(1))
    seek, done = ("a", "invoke", "seek-to", [T, "s", 1500]), ("a", "ok", "seek-to", [T, "s", 1500])
    assert check(*before, seek, done, got(1)) == []
    assert check(*before, seek, got(1), done) == [], "it may come before the administrator is told"
    assert check(*before, got(1), seek, done) == ["C1"]
    assert check(*before, seek, done, got(0), got(1)) == ["C1"]
    clear, cleared = ("a", "invoke", "clear-backlog", [T, "s"]), ("a", "ok", "clear-backlog", [T, "s"])
    assert check(*before, clear, cleared) == []
    assert check(*before, clear, cleared, got(0)) == ["C1"]
    assert check(*before, clear, cleared, sent(2, "invoke"), sent(2)) == ["C1"]
    assert check(*before, seek, done, seek) == [], "nobody knows what became of the last one"


def test_no_phantom() -> None:
    good = history(sent(0, "invoke"), sent(0), sent(1, "invoke"), sent(1, "info"), got(1), got(0))
    assert checkers.no_phantom(good) == []
    assert names(checkers.no_phantom(history(got(0)))) == ["C2"]
    assert names(checkers.no_phantom(history(got(0), sent(0, "invoke")))) == ["C2"]
    assert names(checkers.no_phantom(history(sent(0, "invoke"), sent(0, "fail"), got(0)))) == ["C2"]
    append = ("b", "invoke", "append", ["log", 7, 3, 1234])
    assert checkers.no_phantom(history(append, ("b", "ok", "read", [7, 2, [99, 1234]]))) == []
    assert names(checkers.no_phantom(history(append, ("b", "ok", "read", [7, 2, [99, 1235]])))) == ["C2"]


def test_no_duplicate() -> None:
    first = ("c", "invoke", "subscribe", [T, "s"])
    again = ("d", "invoke", "subscribe", [T, "s"])
    assert checkers.no_duplicate(history(first, got(0), again, got(0, proc="d"), acked(0))) == []
    assert checkers.no_duplicate(history(first, again, got(0), acked(0), got(0, proc="d"))) == []  # it was under way
    assert names(checkers.no_duplicate(history(first, got(0), acked(0), again, got(0, proc="d")))) == ["C3"]
    seek, done = ("a", "invoke", "seek-to", [T, "s", 0]), ("a", "ok", "seek-to", [T, "s", 0])
    assert checkers.no_duplicate(history(first, got(0), seek, acked(0), done, again, got(0, proc="d"))) == []
    assert names(checkers.no_duplicate(history(first, seek, done, got(0), acked(0), again, got(0, proc="d")))) == ["C3"]
    twice = history(got(0, "1:0"), got(0, "1:9"))
    assert checkers.no_duplicate(twice) == []
    assert names(checkers.no_duplicate(twice, stored_once=True)) == ["C3"]
    assert names(checkers.no_duplicate(history(got(0), got(0)), once=["s"])) == ["C3"]


def test_key_order() -> None:
    good = history(got(0), got(2), got(1, key="other"), got(0), got(2))
    assert checkers.key_order(good, ordered=["s"]) == []
    bad = history(got(0), got(2), got(1))
    assert names(checkers.key_order(bad, ordered=["s"])) == ["C4"]
    assert checkers.key_order(bad, ordered=["another"]) == []


def test_seek_by_time() -> None:
    before = (sent(0, "invoke"), sent(0), sent(1, "invoke"), sent(1))
    seek = ("s", "ok", "seek", [T, "s", 1.5])
    assert checkers.seek_by_time(history(*before, seek, got(1))) == []
    assert names(checkers.seek_by_time(history(*before, seek))) == ["C1"]
    assert names(checkers.seek_by_time(history(*before, seek, got(0), got(1)))) == ["C1"]


def confirmed(proc: str, ledger: int, last: int) -> tuple[Any, ...]:
    return (proc, "ok", "append", ["log", ledger, last, "managed-ledger"])


def test_single_writer() -> None:
    fence = ("b", "ok", "fence", [1, 4])
    assert checkers.single_writer(history(confirmed("a", 1, 4), fence, fence, confirmed("b", 2, 0))) == []
    assert checkers.single_writer(history(fence, confirmed("a", 1, 4))) == []  # told late
    assert names(checkers.single_writer(history(fence, confirmed("a", 1, 5)))) == ["C12"]
    assert names(checkers.single_writer(history(fence, ("c", "ok", "fence", [1, 3])))) == ["C12"]
    assert names(checkers.single_writer(history(confirmed("a", 1, 0), confirmed("b", 1, 1)))) == ["C12"]
    assert names(checkers.single_writer(history(confirmed("a", 2, 0), confirmed("b", 1, 0)))) == ["C12"]


def test_single_writer_of_a_log_that_was_made_anew() -> None:
    """W15, seed 867928668: a store may give a low id to a log whose predecessor had a higher one."""

    def owner(incarnation: str) -> tuple[Any, ...]:
        return ("store", "info", "owner", ["/managed-ledgers/log", incarnation])

    def created(proc: str, ledger: int) -> tuple[Any, ...]:
        return (proc, "ok", "create", [ledger, "log"])

    old = [owner("x"), created("a", 5), confirmed("a", 5, 0)]
    assert checkers.single_writer(history(*old, owner("y"), created("b", 2), confirmed("b", 2, 0), confirmed("a", 5, 1))) == []
    assert names(checkers.single_writer(history(*old, owner("x"), created("b", 2), confirmed("b", 2, 0)))) == ["C12"]


def test_terms_grow() -> None:
    def owner(epoch: int, incarnation: str = "x") -> tuple[Any, ...]:
        return ("store", "info", "owner", ["/log", incarnation], {"epoch": epoch})

    def lead(proc: str, epoch: int) -> tuple[Any, ...]:
        return (proc, "info", "lead", ["/leader"], {"epoch": epoch})

    assert checkers.terms_grow(history(owner(1), owner(2), owner(2), owner(1, "y"))) == []
    assert names(checkers.terms_grow(history(owner(2), owner(1)))) == ["C13"]
    assert checkers.terms_grow(history(lead("a", 1), lead("b", 5))) == []
    assert names(checkers.terms_grow(history(lead("a", 1), lead("b", 1)))) == ["C13"]
    assert names(watching.one_leader(history(("world", "info", "leaders", ["a", "b"])))) == ["C13"]


def test_bounded_wait() -> None:
    def check(*rows: tuple[Any, ...]) -> list[str]:
        return names(checkers.bounded_wait(history(*rows), bounds={"send": 2.0}, healing=2.0))

    begin = ("p", "invoke", "send", [0], {"number": 1})
    end = ("p", "ok", "send", [0], {"number": 1})
    pass_time = [("x", "info", "tick", None)] * 3
    healed, done = ("world", "info", "healed", None), ("world", "info", "finished", "producers")
    assert check(begin, end, healed, done) == []
    assert check(begin, *pass_time, end) == ["C18"]
    assert check(begin, *pass_time) == ["C18"]
    assert check(begin, ("p", "info", "crash", None), *pass_time) == []
    assert check(healed, *pass_time, done) == ["C18"]
    assert check(healed, ("world", "info", "stalled", "consumers")) == ["C18"]


def test_nothing_left() -> None:
    assert checkers.nothing_left(history(("world", "info", "left", {"watches": 0, "tasks": 0}))) == []
    assert names(checkers.nothing_left(history(("world", "info", "left", {"watches": 3, "tasks": 0})))) == ["C19"]


def test_watch_contract() -> None:
    def change(key: str, version: int | None) -> tuple[Any, ...]:
        return ("v", "info", "change", [key, version])

    begin = ("v", "info", "watch", None)
    state = ("world", "info", "state", {"/a": 3})
    good = history(begin, change("/a", 1), change("/b", 2), change("/b", None), change("/a", 3), state)
    assert watching.watch_contract(good) == []
    again = history(begin, change("/a", 1), begin, change("/a", 3), state)
    assert watching.watch_contract(again) == []
    back = history(begin, change("/a", 3), change("/a", 2), change("/a", 3), state)
    assert names(watching.watch_contract(back)) == ["C10"]
    missed = history(begin, change("/a", 1), state)
    assert names(watching.watch_contract(missed)) == ["C10"]
    lost_delete = history(begin, change("/a", 3), change("/b", 2), state)
    assert names(watching.watch_contract(lost_delete)) == ["C10"]
    unknown = history(begin, change("/a", 3), change("/z", None), state)
    assert names(watching.watch_contract(unknown)) == ["C10"]


def test_sequences_and_index_queries() -> None:
    def sequence(proc: str, kind: str, *value: str) -> tuple[Any, ...]:
        return (proc, kind, "sequence", ["/s", *value], {"number": 1})

    good = history(sequence("a", "invoke"), sequence("b", "invoke"), sequence("a", "ok", "/s-2"), sequence("b", "ok", "/s-1"))
    assert watching.sequences_grow(good) == []
    after = history(sequence("a", "invoke"), sequence("a", "ok", "/s-2"), sequence("b", "invoke"), sequence("b", "ok", "/s-1"))
    assert names(watching.sequences_grow(after)) == ["C9"]
    same = history(sequence("a", "invoke"), sequence("b", "invoke"), sequence("a", "ok", "/s-1"), sequence("b", "ok", "/s-1"))
    assert "C9" in names(watching.sequences_grow(same))
    assert watching.index_agrees(history(("w", "ok", "query", ["red", [["/a", "1.red"]]]))) == []
    assert names(watching.index_agrees(history(("w", "ok", "query", ["red", [["/a", "1.green"]]])))) == ["C9"]


def write(begin: int, end: int, written: str | None, expected: str | None = ANY, result: Any = True) -> Operation:
    kind = "put" if written is not None else "delete"
    return Operation(begin, end, kind, expected, written, result if end != NEVER else None, f"w{begin}")


def read(begin: int, end: int, value: str | None) -> Operation:
    return Operation(begin, end, "read", None, None, value, f"r{begin}")


@pytest.mark.parametrize(
    ("operations", "verdict"),
    [
        ([read(0, 1, None), write(2, 3, "a"), read(4, 5, "a")], True),
        ([write(0, 1, "a"), write(2, 3, "b"), read(4, 5, "a")], False),  # a stale read
        ([write(0, 1, "a"), write(2, 6, "b"), read(3, 4, "b"), read(5, 7, "a")], False),  # new, then old again
        ([write(0, 1, "a"), write(2, 6, "b"), read(3, 4, "a"), read(5, 7, "b")], True),
        ([write(0, NEVER, "a"), read(5, 6, None), read(7, 8, "a")], True),  # unknown: happened late
        ([write(0, NEVER, "a"), read(5, 6, "a"), read(7, 8, None)], False),  # unknown, but seen once
        ([write(0, 1, "a", None), write(2, 3, "b", "a"), write(4, 5, "c", "a", CONFLICT)], True),
        ([write(0, 1, "a", None), write(2, 3, "b", "a"), write(4, 5, "c", "a")], False),  # two swaps from one version
        ([write(0, 1, "a"), write(2, 3, "c", "a", CONFLICT), read(4, 5, "a")], False),  # refused without a reason
        ([write(0, 1, "a"), write(2, 3, None, ANY, True), read(4, 5, None)], True),
        ([write(0, 1, "a"), write(2, 3, None, ANY, False)], False),
    ],
)
def test_linearizability(operations: list[Operation], verdict: bool) -> None:
    assert is_linearizable(operations) is verdict


def test_one_stale_read_in_a_long_history_is_found_and_shown() -> None:
    rows: list[tuple[Any, ...]] = []
    for number in range(200):
        proc = f"w{number % 3}"
        rows.append((proc, "invoke", "put", ["/a", ANY, f"v{number}"], {"number": number + 1}))
        rows.append((proc, "ok", "put", ["/a", ANY, f"v{number}", True], {"number": number + 1}))
        rows.append(("r", "invoke", "get", ["/a"], {"number": 1000 + number}))
        seen = f"v{number - 1}" if number == 120 else f"v{number}"
        rows.append(("r", "ok", "get", ["/a", seen], {"number": 1000 + number}))
    found = linearizable(history(*rows))
    assert names(found) == ["C9"] and "r read v119" in found[0].text
    rows[120 * 4 + 3] = ("r", "ok", "get", ["/a", "v120"], {"number": 1120})
    assert linearizable(history(*rows)) == []


def test_a_scan_is_a_read_of_every_key_it_covers() -> None:
    rows: list[tuple[Any, ...]] = [
        ("w", "invoke", "put", ["/k/a", ANY, "1"], {"number": 1}),
        ("w", "ok", "put", ["/k/a", ANY, "1", True], {"number": 1}),
        ("r", "invoke", "scan", ["/k/"], {"number": 2}),
        ("r", "ok", "scan", ["/k/", {"/k/a": "1"}], {"number": 2}),
    ]
    assert linearizable(history(*rows)) == []
    rows[3] = ("r", "ok", "scan", ["/k/", {}], {"number": 2})
    assert names(linearizable(history(*rows))) == ["C9"]


def test_a_history_is_written_and_read_as_json_lines() -> None:
    log = History(lambda: 1.25)
    number = log.invoke("p", "send", [T, "p", "k", 0])
    log.add("p", "ok", "send", [T, "p", "k", 0, "1:0"], number=number, epoch=3)
    log.remark("a line of the log")
    assert load(log.lines()) == log.events
    assert "a line of the log" in log.trace() and '"op":"send"' in log.trace()


def test_a_subscription_begins_where_it_was_asked_to() -> None:
    def ask(kind: str, subscription: str) -> tuple[Any, ...]:
        return ("c", kind, "subscribe", [T, subscription])

    before, after = (sent(0, "invoke"), sent(0)), (sent(1, "invoke"), sent(1))
    for subscription, seen, expected in (
        ("new-earliest", (0, 1), []),
        ("new-earliest", (1,), ["C1"]),
        ("new-latest", (1,), []),
        ("new-latest", (0, 1), ["C1"]),
        ("old-earliest", (1,), []),
    ):
        asked = (ask("invoke", subscription), ask("ok", subscription))
        rows = (*before, *asked, *after, *(got(each, subscription=subscription) for each in seen))
        assert names(checkers.begins_where_asked(history(*rows), prefix="new-")) == expected
    meanwhile = (sent(0, "invoke"), ask("invoke", "new-latest"), sent(0), ask("ok", "new-latest"))
    assert checkers.begins_where_asked(history(*meanwhile, got(0, subscription="new-latest")), prefix="new-") == []
    unanswered = (*before, ask("invoke", "new-earliest"))
    assert checkers.begins_where_asked(history(*unanswered), prefix="new-") == []
