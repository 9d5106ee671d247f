"""Checkers of incarnations and of segments that are skipped, on histories made by hand."""

from __future__ import annotations

from typing import Any

from braid.testing.sim import incarnations
from braid.testing.sim.checkers import Violation, no_loss
from braid.testing.sim.history import Event
from braid.testing.sim.skipped import nothing_skipped

T = "topic://public/default/t"
Row = tuple[Any, ...]
GONE: Row = ("store", "info", "topic-gone", T)


def history(*rows: Row) -> list[Event]:
    """Events from (proc, kind, op, value[, more]); time is their place."""
    return [Event(float(at), row[0], row[1], row[2], row[3], **(row[4] if len(row) > 4 else {})) for at, row in enumerate(rows)]


def names(found: list[Violation]) -> list[str]:
    return [violation.checker for violation in found]


def send(sequence: int, segment: int = 0) -> tuple[Row, Row]:
    value = [T, "p", "k", sequence]
    answer = ("p", "ok", "send", [*value, f"1:{sequence}:-1 in segment {segment}"], {"number": sequence + 1})
    return ("p", "invoke", "send", value, {"number": sequence + 1}), answer


def got(sequence: int, segment: int = 0, *, proc: str = "c") -> Row:
    return (proc, "ok", "deliver", [T, "s", "p", "k", sequence, f"1:{sequence}", 0], {"segment": segment})


def join(kind: str = "invoke", proc: str = "c") -> Row:
    return (proc, kind, "subscribe", [T, "s"], {"number": 77})


def test_whoever_comes_after_a_deletion_gets_nothing_from_before() -> None:
    old, new = send(0), send(1)
    assert incarnations.nothing_old(history(join(), *old, got(0), GONE, join(), *new, got(1))) == []
    assert incarnations.nothing_old(history(join(), *old, GONE, got(0))) == [], "it had it in its hands"
    assert names(incarnations.nothing_old(history(join(), *old, GONE, join(), got(0)))) == ["C2"]
    assert incarnations.nothing_old(history(old[0], GONE, join(), old[1], got(0))) == [], "stored in the new one"


def test_a_checkpoint_belongs_to_one_incarnation() -> None:
    taken = ("r", "ok", "checkpoint", [T, "r.1", "one", "i"])
    for incarnation, expected in (("i", []), ("j", ["C17"])):
        restored = ("r", "ok", "restore", [T, "r.2", "one", incarnation])
        assert names(incarnations.checkpoints_of_their_own(history(taken, restored))) == expected
    begun = ("r", "ok", "restore", [T, "r.3", None, "j"])
    refused = ("r", "fail", "restore", [T, "r.4", "one"])
    assert incarnations.checkpoints_of_their_own(history(taken, begun, refused)) == []


def test_the_last_incarnation_is_judged_alone() -> None:
    old, new = send(0), send(1)
    lost_before = history(join("invoke"), join("ok"), *old, GONE)
    assert names(no_loss(lost_before)) == ["C1"] and no_loss(incarnations.last_of_each(lost_before)) == []
    answered_late = history(join("invoke"), GONE, join("ok"), *new)
    assert no_loss(incarnations.last_of_each(answered_late)) == [], "it went with the topic"
    lost_after = history(GONE, join("invoke"), join("ok"), *new)
    assert names(no_loss(incarnations.last_of_each(lost_after))) == ["C1"]


def layout(**parents: list[int]) -> Row:
    segments = {name[1:]: [0, 0xFFFF, "ACTIVE", each, []] for name, each in parents.items()}
    return ("store", "info", "layout", {"topic": T, "segments": segments})


def seek(kind: str, moment: float) -> Row:
    return ("a", kind, "seek-to", [T, "s", int(moment * 1000)])


def skipped(*rows: Row) -> list[str]:
    return names(nothing_skipped(history(layout(s0=[], s1=[0], s2=[1]), *rows), ordered=["s"], start_ms=0))


def test_nothing_of_the_ancestors_is_skipped() -> None:
    above, below = send(0, 0), send(1, 2)
    assert skipped(*above, *below, got(0), got(1, 2)) == []
    assert skipped(*above, *below, got(1, 2)) == ["C5"]
    assert skipped(above[0], *below, got(1, 2), above[1]) == [], "not acknowledged yet"
    again = (*above, *below, got(0), got(1, 2))
    assert skipped(*again, seek("invoke", 0), seek("ok", 0), got(1, 2)) == ["C5"]
    assert skipped(*again, seek("invoke", 0), got(0), seek("ok", 0), got(1, 2)) == [], "it may have come after the reset"
    assert skipped(*again, seek("invoke", 2.5), seek("ok", 2.5), got(1, 2)) == [], "it was set behind it"
    assert skipped(*again, seek("invoke", 0), seek("info", 0), got(1, 2)) == [], "nobody knows"
    assert skipped(*again, seek("invoke", 0), seek("fail", 0), got(1, 2)) == []
    cleared = ("a", "ok", "clear-backlog", [T, "s"])
    assert skipped(*above, *below, ("a", "invoke", "clear-backlog", [T, "s"]), cleared, got(1, 2)) == []
