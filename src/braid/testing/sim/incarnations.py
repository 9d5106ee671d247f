"""Checkers of topics that are deleted and made anew (INV5, reported as C2 and C17): nothing of one comes in another.

Pure functions from events to violations, as those in `checkers.py`. `topic-gone` is the moment of a deletion; `subscribe` and
`open` [topic, reader] are invoked by whoever comes, `restore` and `checkpoint` carry the incarnation that the reader was told.
"""

from __future__ import annotations

from collections.abc import Sequence

from braid.testing.sim.checkers import MessageKey, Violation
from braid.testing.sim.history import Event

JOINING = ("subscribe", "open")


def nothing_old(events: Sequence[Event]) -> list[Violation]:
    """Who came after a topic was deleted gets no message that had been acknowledged before."""
    gone: dict[str, float] = {}
    stored: dict[MessageKey, float] = {}
    joined: dict[tuple[str, str, str], float] = {}
    found = []
    for event in events:
        if event.op == "topic-gone":
            gone[event.value] = event.t
        elif event.op == "send" and event.kind == "ok":
            topic, producer, key, sequence = event.value[:4]
            stored.setdefault((topic, producer, key, sequence), event.t)
        elif event.op in JOINING and event.kind == "invoke":
            joined[event.proc, event.value[0], event.value[1]] = event.t
        elif event.op == "deliver":
            topic, subscription, producer, key, sequence = event.value[:5]
            message = (topic, producer, key, sequence)
            end = gone.get(topic, -1.0)
            since = joined.get((event.proc, topic, subscription), -1.0)
            if message in stored and stored[message] < end < since:
                found.append(
                    Violation(
                        "C2",
                        f"{message} came to {subscription} of {event.proc} at {event.t}, which came at {since}; it was stored "
                        f"at {stored[message]}, before the topic was deleted at {end}",
                    )
                )
    return found


def checkpoints_of_their_own(events: Sequence[Event]) -> list[Violation]:
    """C17: a checkpoint is accepted by the incarnation of the topic it was taken of, and by no other."""
    taken: dict[str, str] = {}
    found = []
    for event in events:
        if event.op == "checkpoint":
            taken[event.value[2]] = event.value[3]
        elif event.op == "restore" and event.kind == "ok":
            topic, reader, base, incarnation = event.value
            if base is not None and taken[base] != incarnation:
                found.append(
                    Violation(
                        "C17", f"{topic}, made anew, accepted checkpoint {base} of its predecessor at {event.t} from {reader}"
                    )
                )
    return found


def last_of_each(events: Sequence[Event]) -> list[Event]:
    """The history of the last incarnation of each topic: what was begun on a name before its last deletion is left out, and so
    is its outcome."""
    cut = {event.value: at for at, event in enumerate(events) if event.op == "topic-gone"}
    begun: dict[tuple[str, int], int] = {}
    found = []
    for at, event in enumerate(events):
        if event.number and event.kind == "invoke":
            begun[event.proc, event.number] = at
        topic = event.value[0] if isinstance(event.value, list) and event.value and isinstance(event.value[0], str) else ""
        if begun.get((event.proc, event.number), at) > cut.get(topic, -1):
            found.append(event)
    return found
