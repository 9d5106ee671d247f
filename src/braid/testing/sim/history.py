"""`History`: what the processes of a run did and saw, one event per line; the only thing checkers look at.

An event is `{t, proc, kind, op, value, ...}`: `kind` is `invoke`, `ok`, `fail` (certainly without effect) or `info` (outcome
unknown, or a remark of the world such as a fault). Pure apart from the clock it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec

Kind = Literal["invoke", "ok", "fail", "info"]
TRACE = 200
"""Events shown of a failing run."""


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the history."""

    t: float
    """Virtual seconds since the start."""
    proc: str
    kind: Kind
    op: str
    value: Any = None
    number: int = 0
    """Ties an invocation to its outcome."""
    epoch: int = 0
    segment: int = 0
    txn: str = ""
    """The transaction it belongs to."""


class History:
    """The events of one run, in order."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._count = 0
        self.events: list[Event] = []
        self.remarks: list[tuple[float, str]] = []
        """Log lines of the product: shown in traces, no part of the history."""

    def add(self, proc: str, kind: Kind, op: str, value: Any = None, **more: Any) -> None:
        self.events.append(Event(round(self._now(), 6), proc, kind, op, value, **more))

    def invoke(self, proc: str, op: str, value: Any = None, **more: Any) -> int:
        """Note the start of an operation; returns its number."""
        self._count += 1
        self.add(proc, "invoke", op, value, number=self._count, **more)
        return self._count

    def remark(self, text: str) -> None:
        self.remarks.append((self._now(), text))

    def lines(self) -> bytes:
        """All events as JSON lines."""
        encode = msgspec.json.encode
        return b"".join(encode(event) + b"\n" for event in self.events)

    def trace(self, count: int = TRACE) -> str:
        """The last events with the log lines between them, for people."""
        rows = [(event.t, 0, msgspec.json.encode(event).decode()) for event in self.events]
        rows += [(moment, 1, f"    log: {text}") for moment, text in self.remarks]
        rows.sort(key=lambda row: row[0])
        return "\n".join(f"{moment:10.4f} {text}" for moment, _, text in rows[-count:])


def load(lines: bytes) -> list[Event]:
    """Read a history back."""
    return [msgspec.json.decode(line, type=Event) for line in lines.splitlines()]
