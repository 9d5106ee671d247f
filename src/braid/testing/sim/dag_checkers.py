"""Checkers of scalable topics: C5 drain before assign, C11 the DAG at every epoch, C13 leaders' terms, C17 checkpoints.

Pure functions from events to violations, as those in `checkers.py`; `layouts.py` writes the events of a layout.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from braid.model.hashranges import MAX_HASH
from braid.testing.sim.checkers import RESETS, Violation
from braid.testing.sim.history import Event

Segments = Mapping[str, Sequence[Any]]
"""By id: first hash, last hash, state, ids of parents, ids of children."""
START, END, STATE, PARENTS, CHILDREN = range(5)
ACTIVE = "ACTIVE"
SPARE_LANES = 2
"""Besides one to each segment and one that asks about it: lanes made anew after a name was taken, questions asked twice."""


def dag(events: Sequence[Event]) -> list[Violation]:
    """C11: at each epoch the active ranges cover every hash once, ids are never used twice, children lie inside their parents,
    and nothing that was sealed is written to again."""
    found: list[Violation] = []
    topics: dict[tuple[str, str], _Known] = {}
    for event in events:
        if event.op == "layout":
            value = event.value
            known = topics.setdefault((value["topic"], value["incarnation"]), _Known())
            found += [
                Violation("C11", f"{value['topic']} epoch {event.epoch} at {event.t}: {text}") for text in known.next(event)
            ]
    return found


class _Known:
    """What is known of one incarnation of a topic."""

    def __init__(self) -> None:
        self.epoch = -1
        self.next_id = 0
        self.segments: Segments = {}
        self.ranges: dict[str, tuple[int, int]] = {}
        self.gone: set[str] = set()

    def next(self, event: Event) -> list[str]:
        """Compare with the version before; returns what is wrong."""
        segments: Segments = event.value["segments"]
        found = _uncovered(segments)
        if event.epoch < self.epoch:
            found.append(f"the epoch went back from {self.epoch}")
        elif event.epoch == self.epoch and segments != self.segments:
            found.append("the segments changed and the epoch did not")
        if event.value["next"] < self.next_id:
            found.append(f"the counter of ids went back from {self.next_id} to {event.value['next']}")
        for number, each in segments.items():
            found += self._segment(number, each, segments, event)
        self.gone |= self.segments.keys() - segments.keys()
        self.epoch, self.segments = max(event.epoch, self.epoch), segments
        self.next_id = max(event.value["next"], self.next_id)
        return found

    def _segment(self, number: str, each: Sequence[Any], segments: Segments, event: Event) -> list[str]:
        found = []
        hashes = (each[START], each[END])
        if self.ranges.setdefault(number, hashes) != hashes:
            found.append(f"segment {number} has another range than before")
        if number in self.gone:
            found.append(f"segment {number} had left the layout and is used again")
        if int(number) >= event.value["next"]:
            found.append(f"segment {number} is not below the next id {event.value['next']}")
        before = self.segments.get(number)
        if before is None and self.epoch >= 0 and int(number) < self.next_id:
            found.append(f"segment {number} is new and its id is not")
        if before is not None and before[STATE] != ACTIVE and each[STATE] == ACTIVE:
            found.append(f"segment {number} was sealed and is active again")
        parents = [segments[str(parent)] for parent in each[PARENTS] if str(parent) in segments]
        if any(parent >= int(number) for parent in each[PARENTS]):
            found.append(f"segment {number} is older than a parent: {each[PARENTS]}")
        if before is None and parents and not _inside(hashes, parents):
            found.append(f"segment {number} reaches out of its parents {each[PARENTS]}")
        if each[STATE] == ACTIVE and any(parent[STATE] == ACTIVE for parent in parents):
            found.append(f"segment {number} and a parent of it are both active")
        if any(int(number) not in segments[str(child)][PARENTS] for child in each[CHILDREN] if str(child) in segments):
            found.append(f"segment {number} has a child that does not know it")
        return found


def _uncovered(segments: Segments) -> list[str]:
    expected = 0
    for start, end in sorted((each[START], each[END]) for each in segments.values() if each[STATE] == ACTIVE):
        if start != expected:
            return [f"the active segments leave a gap or overlap at hash {min(start, expected):04x}"]
        expected = end + 1
    return [] if expected == MAX_HASH + 1 else [f"no active segment covers hash {expected:04x}"]


def _inside(hashes: tuple[int, int], parents: Sequence[Sequence[Any]]) -> bool:
    """Whether the parents' ranges together cover a range."""
    expected = hashes[0]
    for start, end in sorted((each[START], each[END]) for each in parents):
        if start <= expected <= end:
            expected = end + 1
    return expected > hashes[1]


def leader_terms(events: Sequence[Event]) -> list[Violation]:
    """C13: a layout carries the term of the leader that wrote it; terms never go back."""
    highest: dict[tuple[str, str], int] = {}
    found = []
    for event in events:
        if event.op == "layout":
            name = (event.value["topic"], event.value["incarnation"])
            term = event.value["leader"]
            if term < highest.get(name, -1):
                found.append(
                    Violation("C13", f"a leader of term {term} wrote {name[0]} at {event.t}, after one of {highest[name]}")
                )
            highest[name] = max(term, highest.get(name, -1))
    return found


def stale_calls(events: Sequence[Event]) -> list[Violation]:
    """C13: no owner of a segment does what a leader asks for whose successor had claimed the topic before.

    `segment-call` [topic, segment, what] with the caller's term as `epoch`; `ok` means that it was done."""
    highest: dict[str, tuple[int, float]] = {}
    begun: dict[int, tuple[int, float]] = {}
    found = []
    for event in events:
        if event.op == "layout":
            name, term = event.value["topic"], event.value["leader"]
            if term > highest.get(name, (-1, 0.0))[0]:
                highest[name] = (term, event.t)
        elif event.op == "topic-gone":
            highest.pop(event.value, None)
        elif event.op == "segment-call":
            topic, segment, what = event.value
            if event.kind == "invoke":
                begun[event.number] = highest.get(topic, (-1, 0.0))
            elif event.kind == "ok" and (claimed := begun.pop(event.number))[0] > event.epoch:
                found.append(
                    Violation(
                        "C13",
                        f"{event.proc} did the {what} of {segment} at {event.t} for a leader of term {event.epoch}; "
                        f"{claimed[0]} had claimed {topic} at {claimed[1]}",
                    )
                )
    return found


def intent_first(events: Sequence[Event]) -> list[Violation]:
    """INV6 and INV7, reported as C11: no segment topic appears or is sealed before the record of its topic names it, and a
    layout shows a segment as sealed only after its topic is."""
    named: dict[str, set[str]] = defaultdict(set)
    sealing: dict[str, set[str]] = defaultdict(set)
    sealed: set[tuple[str, str]] = set()
    found = []
    for event in events:
        if event.op == "layout":
            topic, pending = event.value["topic"], event.value["pending"]
            named[topic] |= event.value["segments"].keys()
            if pending is not None:
                named[topic] |= {str(each) for each in pending["children"]}
                sealing[topic] |= {str(each) for each in pending["parents"]}
            for number, each in event.value["segments"].items():
                if each[STATE] != ACTIVE and (topic, number) not in sealed:
                    found.append(
                        Violation("C11", f"{topic} shows segment {number} as sealed at {event.t} and its topic is not sealed")
                    )
                    sealed.add((topic, number))
        elif event.op == "topic-gone":
            named.pop(event.value, None)
            sealing.pop(event.value, None)
            sealed = {each for each in sealed if each[0] != event.value}
        elif event.op == "segment-made":
            topic, number = event.value
            if number not in named[topic]:
                found.append(Violation("C11", f"the topic of segment {number} of {topic} appeared at {event.t} without intent"))
        elif event.op == "segment-sealed":
            topic, number = event.value
            sealed.add((topic, number))
            if number not in sealing[topic]:
                found.append(Violation("C11", f"segment {number} of {topic} was sealed at {event.t} without intent"))
    return found


def drained_first(events: Sequence[Event], *, ordered: Iterable[str]) -> list[Violation]:
    """C5: once a subscription got a message of a segment, no new one comes from the segments it descends from. A seek or a
    clear-backlog begins anew."""
    wanted = set(ordered)
    parents: dict[tuple[str, int], set[int]] = defaultdict(set)
    states: dict[tuple[str, str], _Barrier] = defaultdict(_Barrier)
    found = []
    for event in events:
        if event.op == "layout":
            for number, each in event.value["segments"].items():
                parents[event.value["topic"], int(number)] |= set(each[PARENTS])
        elif event.op in RESETS:
            states[event.value[0], event.value[1]].reset(event)
        elif event.op == "deliver" and event.value[1] in wanted:
            state = states[event.value[0], event.value[1]]
            message = tuple(event.value[2:5])
            if state.is_being_reset or message in state.known:
                continue
            state.known.add(message)
            if event.segment in state.closed:
                child, moment = state.closed[event.segment]
                found.append(
                    Violation(
                        "C5",
                        f"{event.value[0]} {event.value[1]}: {message} came first at {event.t} from segment {event.segment}, "
                        f"after its descendant {child} had begun at {moment}",
                    )
                )
            if event.segment not in state.begun:
                state.begun.add(event.segment)
                for ancestor in ancestors_of(parents, event.value[0], event.segment):
                    state.closed.setdefault(ancestor, (event.segment, event.t))
    return found


def handed_over(events: Sequence[Event], *, ordered: Iterable[str]) -> list[Violation]:
    """C3 in peace: until the first fault, a message comes to another consumer of its subscription only if the one before had
    left; a segment that is taken away is first acknowledged as far as it was handed out."""
    wanted = set(ordered)
    holder: dict[tuple[str, str, tuple[Any, ...]], tuple[str, float]] = {}
    left: dict[str, float] = {}
    found = []
    for event in events:
        if event.op == "fault":
            break
        if event.op == "leave":
            left[event.proc] = event.t
        elif event.op == "deliver" and event.value[1] in wanted:
            message = (event.value[0], event.value[1], tuple(event.value[2:5]))
            proc, moment = holder.setdefault(message, (event.proc, event.t))
            if left.get(proc, -1.0) < moment and (proc, moment) != (event.proc, event.t):
                found.append(
                    Violation("C3", f"{message} came to {proc} at {moment} and again, to {event.proc}, at {event.t}, in peace")
                )
            holder[message] = (event.proc, event.t)
    return found


def lanes_bounded(events: Sequence[Event]) -> list[Violation]:
    """C19: a producer's lanes are about two for each segment its topic ever had: one to send, one to ask what was stored.

    `lanes` [topic, producer, made, segments]."""
    return [
        Violation(
            "C19", f"{event.value[1]} made {event.value[2]} lanes to {event.value[0]}, which had {event.value[3]} segments"
        )
        for event in events
        if event.op == "lanes" and event.value[2] > 2 * event.value[3] + SPARE_LANES
    ]


class _Barrier:
    """How far one subscription is."""

    def __init__(self) -> None:
        self.known: set[tuple[Any, ...]] = set()
        self.begun: set[int] = set()
        self.closed: dict[int, tuple[int, float]] = {}
        self.is_being_reset = False

    def reset(self, event: Event) -> None:
        """An operation of the administrator began or ended; one without a verdict may take effect at any later time."""
        self.is_being_reset = event.kind in ("invoke", "info")
        self.known.clear()
        self.begun.clear()
        self.closed.clear()


def ancestors_of(parents: Mapping[tuple[str, int], set[int]], topic: str, segment: int) -> set[int]:
    """All segments that a segment descends from."""
    found: set[int] = set()
    waiting = [segment]
    while waiting:
        for each in sorted(parents.get((topic, waiting.pop()), ())):
            if each not in found:
                found.add(each)
                waiting.append(each)
    return found


def checkpoints(events: Sequence[Event]) -> list[Violation]:
    """C17: what a reader gets after a checkpoint is, key by key, what follows that checkpoint in the log, whoever reads and
    however often it was restored; and a checkpoint of a topic that was deleted is not accepted by its successor.

    `restore` [topic, reader, checkpoint or None, incarnation], `checkpoint` [topic, reader, id, incarnation]; `complete`
    [topic, reader]: the reader has read everything that was acknowledged so far. A reader's deliveries are under its name.
    """
    readers: dict[str, dict[str, list[tuple[str, int]]]] = {}
    known: dict[str, set[tuple[str, int]]] = {}
    taken: dict[str, tuple[dict[str, list[tuple[str, int]]], str]] = {}
    stored: dict[tuple[str, str], list[tuple[str, int]]] = defaultdict(list)
    acknowledged: dict[str, list[tuple[str, tuple[str, int]]]] = defaultdict(list)
    found = []
    for event in events:
        if event.op == "send" and event.kind == "ok":
            topic, producer, key, sequence = event.value[:4]
            acknowledged[topic].append((key, (producer, sequence)))
        elif event.op == "topic-gone":
            for at in [each for each in stored if each[0] == event.value]:
                del stored[at]
            acknowledged.pop(event.value, None)
        elif event.op == "restore" and event.kind == "ok":
            topic, reader, checkpoint, incarnation = event.value
            start, born = taken[checkpoint] if checkpoint is not None else ({}, incarnation)
            if born != incarnation:
                found.append(
                    Violation("C17", f"{topic}, made anew, accepted checkpoint {checkpoint} of its predecessor at {event.t}")
                )
                start = {}
            readers[reader] = {key: list(sequence) for key, sequence in start.items()}
            known[reader] = {each for sequence in start.values() for each in sequence}
        elif event.op == "checkpoint":
            _topic, reader, checkpoint, incarnation = event.value
            taken[checkpoint] = ({key: list(sequence) for key, sequence in readers[reader].items()}, incarnation)
        elif event.op == "deliver" and event.value[1] in readers:
            topic, reader, producer, key, sequence = event.value[:5]
            message = (producer, sequence)
            if message in known[reader]:
                found.append(Violation("C17", f"{topic}: {reader} got {message} of key {key} again at {event.t}"))
                continue
            known[reader].add(message)
            mine = readers[reader].setdefault(key, [])
            mine.append(message)
            log = stored[topic, key]
            if len(mine) > len(log):
                log.append(message)
            elif log[len(mine) - 1] != message:
                found.append(
                    Violation(
                        "C17",
                        f"{topic}: {reader} got {message} of key {key} at {event.t} where others had {log[len(mine) - 1]}",
                    )
                )
        elif event.op == "complete":
            topic, reader = event.value
            missing = [each for each in acknowledged[topic] if each[1] not in known[reader]]
            found += [
                Violation("C17", f"{topic}: {reader} read to the end at {event.t} and never got {message} of key {key}")
                for key, message in missing
            ]
    return found
