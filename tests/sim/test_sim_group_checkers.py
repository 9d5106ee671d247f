"""The checker of checkpoint groups on histories made by hand."""

from __future__ import annotations

from typing import Any

from braid.testing.sim.groups import handed_out_once
from braid.testing.sim.history import Event

WHERE = ["topic", "group"]


def names(*rows: tuple[Any, ...]) -> list[str]:
    events = [Event(t=float(at), proc=row[0], kind=row[1], op=row[2], value=row[3]) for at, row in enumerate(rows)]
    return [violation.checker for violation in handed_out_once(events, groups=["group"])]


def join(name: str) -> tuple[Any, ...]:
    return (name, "invoke", "join", WHERE)


def got(name: str, sequence: int = 1, group: str = "group") -> tuple[Any, ...]:
    return (name, "ok", "deliver", ["topic", group, "p", "k", sequence, "1:0", 0])


def gone(name: str) -> tuple[Any, ...]:
    return ("store", "info", "unregistered", [*WHERE, name])


def test_a_message_comes_once_while_the_members_live() -> None:
    assert names(join("a"), join("b"), got("a"), got("b", 2), got("b", 1, "another")) == []
    assert names(join("a"), join("b"), got("a"), got("b")) == ["C3"]
    assert names(join("a"), got("a"), got("a")) == ["C3"]


def test_one_that_left_has_handed_over() -> None:
    leave = ("a", "invoke", "leave", WHERE)
    assert names(join("a"), join("b"), got("a"), leave, gone("a"), got("b")) == ["C3"]
    assert names(join("a"), got("a"), leave, gone("a"), join("a"), got("a")) == ["C3"]
    assert names(join("a"), join("b"), got("a"), leave, gone("a"), got("b"), gone("a")) == [], "given up when it began to leave"
    late = [("world", "info", "fault", None)] * 10
    assert names(join("a"), join("b"), got("a"), leave, *late, gone("a"), got("b")) == [], "nobody heard its farewell"


def test_what_a_member_had_that_ended_otherwise_comes_again() -> None:
    for end in (("a", "info", "crash", None), ("a", "info", "lost", WHERE), gone("a")):
        assert names(join("a"), join("b"), got("a"), end, got("b")) == []
        assert names(join("a"), join("b"), end, got("b"), got("a")) == [], "it still had it when it was given up"
        assert names(join("a"), join("b"), got("a"), end, join("a"), got("b"), got("a")) == ["C3"], "of its new life"
