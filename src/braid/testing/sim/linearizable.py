"""C9: is the history of each metadata key linearizable? A search after Wing and Gong, with Lowe's memory of visited states.

Each key is a register whose written values are all different, so that its state is the last value and a conditional write names
the value it expects. Operations without a known outcome may have happened at any time after they began, or never. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from braid.testing.sim.checkers import Violation
from braid.testing.sim.history import Event

NEVER = 1 << 60
ANY = "*"
"""As the expected value of a conditional operation: whatever is there."""
CONFLICT = "conflict"
MAX_STATES = 300_000
"""Visited states after which a key is given up as too hard; reported, never passed over."""


class Operation(NamedTuple):
    """One operation on one key."""

    begin: int
    end: int
    """Where in the history; NEVER if its outcome is unknown."""
    kind: str
    """read, put, delete"""
    expected: str | None
    written: str | None
    result: Any
    """Of a read the value; of a write True, False (nothing was there) or CONFLICT; None if unknown."""
    proc: str


def _step(state: str | None, operation: Operation) -> tuple[bool, str | None]:
    """Whether the operation may take place in this state with the result it had, and the state after it."""
    _, end, kind, expected, written, result, _ = operation
    if kind == "read":
        return state == result, state
    matches = expected == ANY or state == expected
    if end == NEVER:
        return True, (written if matches else state)
    if result == CONFLICT:
        return not matches, state
    if kind == "delete" and result is False:
        return state is None, state
    if kind == "delete" and state is None:
        return False, state
    return matches, written


def is_linearizable(operations: Sequence[Operation], initial: str | None = None) -> bool | None:
    """Whether some order explains every result; None if the search was given up."""
    ordered = sorted(operations)
    count = len(ordered)
    required = sum(1 << at for at, operation in enumerate(ordered) if operation.end != NEVER)
    seen: set[tuple[int, str | None]] = set()
    stack: list[tuple[int, str | None]] = [(0, initial)]
    while stack:
        done, state = stack.pop()
        if done & required == required:
            return True
        if len(seen) > MAX_STATES:
            return None
        horizon = NEVER
        nexts: list[tuple[int, str | None]] = []
        for at in range(count):
            if done >> at & 1:
                continue
            operation = ordered[at]
            if operation.begin > horizon:
                break
            horizon = min(horizon, operation.end)
            possible, after = _step(state, operation)
            if possible and not (operation.end == NEVER and after == state):
                nexts.append((done | 1 << at, after))
        for after_step in nexts:
            if after_step not in seen:
                seen.add(after_step)
                stack.append(after_step)
    return False


def operations_of(events: Iterable[Event]) -> dict[str, list[Operation]]:
    """The operations on each key. A scan is a read of every key it covers."""
    begun: dict[tuple[str, int], tuple[int, Event]] = {}
    found: dict[str, list[Operation]] = defaultdict(list)
    keys: dict[str, None] = {}
    scans: list[tuple[int, int, Event]] = []
    for at, event in enumerate(events):
        if event.op not in ("get", "put", "delete", "scan"):
            continue
        if event.kind == "invoke":
            begun[event.proc, event.number] = (at, event)
            continue
        started = begun.pop((event.proc, event.number), None)
        if started is None or event.kind == "fail":
            continue
        if event.op == "scan":
            scans.append((started[0], at, event))
            continue
        keys[event.value[0]] = None
        _add(found, started, at if event.kind == "ok" else NEVER, event)
    for begin, event in begun.values():
        if event.op in ("put", "delete"):
            keys[event.value[0]] = None
            _add(found, (begin, event), NEVER, event)
    for begin, end, event in scans:
        if event.kind == "ok":
            prefix, contents = event.value
            for key in keys:
                if key.startswith(prefix):
                    found[key].append(Operation(begin, end, "read", None, None, contents.get(key), event.proc))
    return found


def _add(found: dict[str, list[Operation]], started: tuple[int, Event], end: int, event: Event) -> None:
    begin, invocation = started
    key = invocation.value[0]
    if invocation.op == "get":
        if end != NEVER:
            found[key].append(Operation(begin, end, "read", None, None, event.value[1], event.proc))
        return
    expected, written = invocation.value[1], invocation.value[2] if invocation.op == "put" else None
    result = event.value[-1] if end != NEVER else None
    found[key].append(Operation(begin, end, invocation.op, expected, written, result, event.proc))


def linearizable(events: Sequence[Event]) -> list[Violation]:
    """C9 for every key of a history."""
    found = []
    for key, operations in sorted(operations_of(events).items()):
        verdict = is_linearizable(operations)
        if verdict is None:
            found.append(Violation("C9", f"{key}: {len(operations)} operations are too many to decide"))
        elif not verdict:
            shortest = _shortest(operations)
            shown = "; ".join(_show(operation) for operation in shortest[-8:])
            found.append(Violation("C9", f"{key}: no order explains the first {len(shortest)} operations: ... {shown}"))
    return found


def _shortest(operations: Sequence[Operation]) -> list[Operation]:
    """The shortest beginning of the history that cannot be explained."""
    by_end = sorted(operations, key=lambda operation: operation.end)
    for count in range(1, len(by_end) + 1):
        last = by_end[count - 1].end
        beginning = [
            each if each.end <= last else each._replace(end=NEVER, result=None)
            for each in operations
            if each.begin < last and (each.end <= last or each.kind != "read")
        ]
        if is_linearizable(beginning) is False:
            return sorted(beginning)
    return list(operations)


def _show(operation: Operation) -> str:
    begin, end, kind, expected, written, result, proc = operation
    until = "?" if end == NEVER else end
    what = f"read {result}" if kind == "read" else f"{kind} {expected}->{written} = {result}"
    return f"[{begin}..{until}] {proc} {what}"
