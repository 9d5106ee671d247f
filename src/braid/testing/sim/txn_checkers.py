"""Checkers of transactions: C6 all or nothing, C8 nothing joins a transaction that is over, and what the others need to know.

Pure functions from events to violations, as those in `checkers.py`. Events of a transaction carry its id as `txn`: `begin`
[timeout], `send` and `ack` as elsewhere, `commit`, `abort`. `txn_notes.py` adds what the metadata store shows: `decided`
(COMMITTED or ABORTED), the moment of truth. In a history without those, the answers to `commit` and `abort` stand for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from braid.model.txn import TxnId
from braid.testing.sim.checkers import MessageKey, Violation
from braid.testing.sim.history import Event

COMMITTED: Final = "COMMITTED"
ABORTED: Final = "ABORTED"
ENDS: Final = {"commit": COMMITTED, "abort": ABORTED}


class Verdict(NamedTuple):
    """How a transaction ended."""

    state: str
    at: int
    """Place in the history of the decision, or of what stands for it."""
    t: float
    since: int
    """Place from which its writes may be seen, if it was committed."""


def verdicts(events: Sequence[Event]) -> dict[str, Verdict]:
    """The outcome of each transaction that has one."""
    begun: dict[str, int] = {}
    decided: dict[str, Verdict] = {}
    answered: dict[str, Verdict] = {}
    for at, event in enumerate(events):
        if event.op == "decided":
            decided.setdefault(event.txn, Verdict(event.value, at, event.t, at))
        elif event.op in ENDS and event.kind == "invoke":
            begun.setdefault(event.txn, at)
        elif event.op in ENDS and event.kind == "ok":
            answered.setdefault(event.txn, Verdict(ENDS[event.op], at, event.t, begun.get(event.txn, at)))
    return decided or answered


def settled(events: Sequence[Event]) -> list[Event]:
    """The history for checkers that know no transactions: a send counts as refused unless its transaction was committed, and an
    acknowledgment counts when its transaction is committed, or not at all."""
    known = verdicts(events)
    late: dict[int, list[Event]] = defaultdict(list)
    placed: list[tuple[int, Event]] = []
    for at, event in enumerate(events):
        if not event.txn or event.op not in ("send", "ack"):
            placed.append((at, event))
            continue
        verdict = known.get(event.txn)
        is_committed = verdict is not None and verdict.state == COMMITTED
        if event.op == "send":
            placed.append((at, event if is_committed or event.kind == "invoke" else replaced(event, kind="fail")))
        elif event.kind == "ok" and verdict is not None and is_committed:
            late[max(at, verdict.at)].append(event)
    found: list[Event] = []
    for at, event in placed:
        found.append(event)
        found += [replaced(each, t=event.t) for each in late.pop(at, ())]
    for at in sorted(late):
        found += late[at]
    return found


def replaced(event: Event, **changes: Any) -> Event:
    return msgspec.structs.replace(event, **changes)


def one_outcome(events: Sequence[Event]) -> list[Violation]:
    """C6: a transaction is decided once, and whoever is told an outcome is told that one."""
    found = []
    decided: dict[str, Event] = {}
    for event in events:
        if event.op == "decided" and decided.setdefault(event.txn, event).value != event.value:
            first = decided[event.txn]
            found.append(
                Violation("C6", f"{event.txn} was {first.value} at {first.t} and {event.value} at {event.t}: decided twice")
            )
    known = verdicts(events)
    for event in events:
        if event.op not in ENDS or event.kind not in ("ok", "fail"):
            continue
        said, verdict = ENDS[event.op], known.get(event.txn)
        is_so = verdict is not None and verdict.state == said
        if event.kind == "ok" and not is_so:
            truth = "still open" if verdict is None else verdict.state
            found.append(Violation("C6", f"{event.proc} was told at {event.t} that {event.txn} is {said}; it is {truth}"))
        elif event.kind == "fail" and event.op == "commit" and is_so:
            found.append(Violation("C6", f"{event.proc} was told at {event.t} that {event.txn} is not committed; it is"))
    return found


def all_or_nothing(events: Sequence[Event]) -> list[Violation]:
    """C6: nobody gets a message of a transaction that is open or aborted; whoever has read everything (`audited` [topic,
    reader]) has every message of each transaction committed before it began, and what another had before it."""
    known = verdicts(events)
    writers = {_sent(event): event.txn for event in events if event.op == "send" and event.txn}
    return [*_early(events, known, writers), *_parts(events, known, writers)]


def _early(events: Sequence[Event], known: dict[str, Verdict], writers: dict[MessageKey, str]) -> list[Violation]:
    """Messages that came before their transaction was committed, or although it was aborted."""
    is_exact = any(event.op == "decided" for event in events)
    begun = _first(events, "commit")
    found = []
    for at, event in enumerate(events):
        if event.op == "deliver" and (txn := writers.get(_delivered(event))) is not None:
            text = _too_early(at, txn, known, begun, is_exact)
            if text is not None:
                found.append(Violation("C6", f"{event.value[1]} got {_delivered(event)} of {txn} at {event.t}, {text}"))
    return found


def _parts(events: Sequence[Event], known: dict[str, Verdict], writers: dict[MessageKey, str]) -> list[Violation]:
    """What audits did not see."""
    accepted: dict[str, list[tuple[MessageKey, str]]] = defaultdict(list)
    got: dict[tuple[str, str], set[MessageKey]] = defaultdict(set)
    shown: dict[str, dict[MessageKey, str]] = defaultdict(dict)
    audits: dict[tuple[str, str], int] = {}
    found = []
    for at, event in enumerate(events):
        if event.op == "send" and event.kind == "ok" and event.txn:
            accepted[event.value[0]].append((_sent(event), event.txn))
        elif event.op == "deliver":
            got[event.value[0], event.value[1]].add(_delivered(event))
        elif event.op == "audit":
            audits[event.value[0], event.value[1]] = at
        elif event.op == "audited":
            topic, reader = event.value
            before = audits.get((topic, reader), at)
            due = [each for each in accepted[topic] if _is_committed(known, each[1]) and known[each[1]].at < before]
            found += _unseen(reader, due, shown[topic], got[topic, reader], writers)
            for message in sorted(got[topic, reader] & writers.keys()):
                shown[topic].setdefault(message, reader)
    return found


def _unseen(
    reader: str,
    due: list[tuple[MessageKey, str]],
    shown: dict[MessageKey, str],
    mine: set[MessageKey],
    writers: dict[MessageKey, str],
) -> list[Violation]:
    """What one audit of a topic did not see: messages of committed transactions, and messages that another had seen."""
    found = []
    missing: dict[str, list[MessageKey]] = defaultdict(list)
    total: dict[str, int] = defaultdict(int)
    for message, txn in due:
        total[txn] += 1
        if message not in mine:
            missing[txn].append(message)
    for txn, messages in missing.items():
        what = "nothing" if len(messages) == total[txn] else "a part"
        found.append(Violation("C6", f"{reader} saw {what} of {txn}, which is committed: without {messages[0]}"))
    gone = {message for messages in missing.values() for message in messages}
    for message, other in shown.items():
        if message not in mine and message not in gone:
            found.append(Violation("C6", f"{other} saw {message} of {writers[message]} and {reader}, later, did not"))
    return found


def _too_early(at: int, txn: str, known: dict[str, Verdict], begun: dict[str, int], is_exact: bool) -> str | None:
    """What is wrong with seeing a message of this transaction at this place of the history."""
    verdict = known.get(txn)
    if verdict is None:
        return None if not is_exact and begun.get(txn, at) < at else "which is open"
    if verdict.state == ABORTED:
        return f"which was aborted at {verdict.t}" if verdict.at < at else f"which was open and aborted at {verdict.t}"
    return None if verdict.since < at else f"which was open until {verdict.t}"


class _Taken(NamedTuple):
    """Who took a message out of a subscription for good, and when."""

    who: str
    at: int
    t: float
    is_plain: bool


_Where = tuple[str, MessageKey]
"""Subscription and message."""


def consumed_once(events: Sequence[Event], *, subscriptions: Iterable[str], is_finished: bool = True) -> list[Violation]:
    """C6: in these subscriptions, whose messages are acknowledged one by one, each message that counts is acknowledged by one
    committed transaction, or by none and one plain acknowledgment; none is taken by two (INV14), and if the run `is_finished`
    none is left. Who joins after that acknowledgment was committed does not get the message again."""
    wanted = set(subscriptions)
    known = verdicts(events)
    taken: dict[_Where, _Taken] = {}
    found = []
    for at, event in enumerate(events):
        # Whoever commits without having waited for an answer relies on the commit, which does.
        if event.op != "ack" or event.value[1] not in wanted or event.kind not in (("ok", "info") if event.txn else ("ok",)):
            continue
        if event.txn and not _is_committed(known, event.txn):
            continue
        since = max(at, known[event.txn].at) if event.txn else at
        mine = _Taken(event.txn or event.proc, since, event.t, not event.txn)
        before = taken.setdefault((event.value[1], _delivered(event)), mine)
        if before.who != mine.who and not (before.is_plain and mine.is_plain):
            found.append(
                Violation(
                    "C6",
                    f"{_delivered(event)} at {event.value[5]} was acknowledged in {event.value[1]} by {before.who} "
                    f"at {before.t} and by {mine.who} at {mine.t}",
                )
            )
    found += _came_again(events, taken)
    return found + _left(events, wanted, known, taken) if is_finished else found


def _came_again(events: Sequence[Event], taken: dict[_Where, _Taken]) -> list[Violation]:
    """Messages that came to somebody who joined after they were taken."""
    joined: dict[tuple[str, str], int] = {}
    found = []
    for at, event in enumerate(events):
        if event.op == "subscribe" and event.kind == "invoke":
            joined[event.proc, event.value[0]] = at
        elif event.op == "deliver":
            done = taken.get((event.value[1], _delivered(event)))
            if done is not None and done.at < joined.get((event.proc, event.value[0]), -1):
                text = f"{_delivered(event)} came to {event.proc} at {event.t}, which joined after {done.who} took it"
                found.append(Violation("C6", text))
    return found


def _left(events: Sequence[Event], wanted: set[str], known: dict[str, Verdict], taken: dict[_Where, _Taken]) -> list[Violation]:
    """Messages that count and were never taken from one of the subscriptions."""
    where: dict[tuple[str, str], None] = {}
    sent: dict[str, list[MessageKey]] = defaultdict(list)
    for event in events:
        if event.op == "subscribe" and event.value[1] in wanted:
            where[event.value[0], event.value[1]] = None
        elif event.op == "send" and event.kind == "ok" and (not event.txn or _is_committed(known, event.txn)):
            sent[event.value[0]].append(_sent(event))
    return [
        Violation("C6", f"{message} was never taken from {subscription}: an acknowledgment is lost")
        for topic, subscription in where
        for message in sent[topic]
        if (subscription, message) not in taken
    ]


def late_writes(events: Sequence[Event]) -> list[Violation]:
    """C8: no send and no acknowledgment that began after its transaction was decided is accepted."""
    known = verdicts(events)
    begun: dict[tuple[str, int], int] = {}
    found = []
    for at, event in enumerate(events):
        if event.op not in ("send", "ack") or not event.txn:
            continue
        if event.kind == "invoke":
            begun[event.proc, event.number] = at
        elif event.kind == "ok" and (verdict := known.get(event.txn)) is not None:
            start = begun.get((event.proc, event.number), at)
            if start > verdict.at:
                found.append(
                    Violation(
                        "C8",
                        f"{event.op} {event.value} of {event.proc}, begun at {events[start].t}, was accepted in {event.txn}, "
                        f"which was {verdict.state} at {verdict.t}",
                    )
                )
    return found


def op_first(events: Sequence[Event]) -> list[Violation]:
    """C8 inside the stores: an entry of a transaction is appended after an operation record of it for that log was written, and
    that was before the transaction was decided (INV10, INV11). `append` [log, ...] with its `txn`, `txn-op` [log, kind]."""
    known = verdicts(events)
    written: dict[tuple[str, str], int] = {}
    found = []
    for at, event in enumerate(events):
        if event.op == "txn-op" and event.value[1] == "write":
            written.setdefault((event.txn, event.value[0]), at)
        elif event.op == "append" and event.kind == "invoke" and event.txn:
            op = written.get((event.txn, event.value[0]))
            verdict = known.get(root_of(event.txn))
            if op is None or (verdict is not None and op > verdict.at):
                late = "without an operation record" if op is None or verdict is None else f"its record came after {verdict.t}"
                where = f"{event.value[0]} at {event.value[1]}:{event.value[2]}"
                found.append(Violation("C8", f"{event.proc} appended an entry of {event.txn} to {where}, at {event.t}: {late}"))
    return found


def root_of(txn: str) -> str:
    """The transaction that decides this one."""
    return str(TxnId.parse(txn).root)


def ended_in_time(events: Sequence[Event], *, spare: float) -> list[Violation]:
    """C18: a transaction is decided at most `spare` seconds after the deadline it was given, or after all faults ended."""
    ends = {event.txn: event.t for event in reversed(events) if event.op == "decided"}
    healed = max((event.t for event in events if event.op == "healed"), default=0.0)
    end = events[-1].t if events else 0.0
    found = []
    for event in events:
        if event.op == "begin" and event.kind == "ok":
            bound = max(event.t + event.value[0], healed) + spare
            if ends.get(event.txn, end) > bound:
                found.append(
                    Violation("C18", f"{event.txn}, begun at {event.t} for {event.value[0]} s, was open until {bound:.1f}")
                )
    return found


def _is_committed(known: dict[str, Verdict], txn: str) -> bool:
    verdict = known.get(txn)
    return verdict is not None and verdict.state == COMMITTED


def _first(events: Sequence[Event], op: str) -> dict[str, int]:
    """By transaction, where this operation was first begun."""
    found: dict[str, int] = {}
    for at, event in enumerate(events):
        if event.op == op and event.kind == "invoke":
            found.setdefault(event.txn, at)
    return found


def _sent(event: Event) -> MessageKey:
    topic, producer, key, sequence = event.value[:4]
    return topic, producer, key, sequence


def _delivered(event: Event) -> MessageKey:
    topic, _subscription, producer, key, sequence = event.value[:5]
    return topic, producer, key, sequence
