"""C5 by content: whoever is given a segment has got everything that counts in the segments it descends from.

`drained_first` sees a message that comes too late; this one sees messages that never come. A subscription that is read in order
begins at its earliest message or where an administrator set it; nothing may have been removed. Pure, as `checkers.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from braid.testing.sim.checkers import RESETS, MessageKey, Violation
from braid.testing.sim.dag_checkers import PARENTS, ancestors_of
from braid.testing.sim.history import Event

IN_SEGMENT = " in segment "
"""What stands in the place of a message before the number of its segment."""


class _Reading:
    """What one subscription has got since it was last set anew."""

    def __init__(self) -> None:
        self.since = float("-inf")
        """Messages whose send began after this moment count."""
        self.got: set[MessageKey] = set()
        self.begun: set[int] = set()
        self.resets = 0
        """Attempts to set it anew whose outcome is not known."""
        self.is_judged = True


def nothing_skipped(events: Sequence[Event], *, ordered: Iterable[str], start_ms: int) -> list[Violation]:
    """No segment is begun while a message is missing that was acknowledged before in a segment it descends from. `start_ms` is
    the brokers' time at the start of the run."""
    wanted = set(ordered)
    parents: dict[tuple[str, int], set[int]] = defaultdict(set)
    begun: dict[MessageKey, float] = {}
    stored: dict[tuple[str, int], dict[MessageKey, float]] = defaultdict(dict)
    readings: dict[tuple[str, str], _Reading] = defaultdict(_Reading)
    found: list[Violation] = []
    for event in events:
        if event.op == "layout":
            for number, each in event.value["segments"].items():
                parents[event.value["topic"], int(number)] |= set(each[PARENTS])
        elif event.op == "send" and event.kind in ("invoke", "ok"):
            topic, producer, key, sequence = event.value[:4]
            message = (topic, producer, key, sequence)
            if event.kind == "invoke":
                begun.setdefault(message, event.t)
            elif IN_SEGMENT in event.value[-1]:
                stored[topic, int(event.value[-1].rpartition(IN_SEGMENT)[2])][message] = event.t
        elif event.op in RESETS and event.value[1] in wanted:
            _reset(readings[event.value[0], event.value[1]], event, start_ms)
        elif event.op == "deliver" and event.value[1] in wanted:
            topic, subscription, producer, key, sequence = event.value[:5]
            reading = readings[topic, subscription]
            reading.got.add((topic, producer, key, sequence))
            if reading.resets or not reading.is_judged or event.segment in reading.begun:
                continue
            reading.begun.add(event.segment)
            for above in sorted(ancestors_of(parents, topic, event.segment)):
                found += [
                    Violation(
                        "C5",
                        f"{topic} {subscription}: segment {event.segment} was begun at {event.t}, and {message} of segment "
                        f"{above}, acknowledged at {moment}, had not come",
                    )
                    for message, moment in stored[topic, above].items()
                    if message not in reading.got and begun[message] > reading.since and moment < event.t
                ]
    return found


def _reset(reading: _Reading, event: Event, start_ms: int) -> None:
    """An administrator's attempt begins or ends; one without an answer may have an effect until the next that has one."""
    if event.kind == "invoke":
        if not reading.resets:
            reading.got = set()
        reading.resets += 1
    elif event.kind == "ok":
        reading.since = (event.value[2] - start_ms) / 1000 if event.op == "seek-to" else event.t
        reading.begun, reading.resets, reading.is_judged = set(), 0, True
    elif event.kind == "fail":
        reading.resets, reading.is_judged = 0, False
