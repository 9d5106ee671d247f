"""Checkers of messaging histories: pure functions from events to violations. Numbers are those of the reliability sheet.

A violation names its checker and says, in one sentence, which events contradict which promise.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from braid.managedledger.records import ROOT
from braid.testing.sim.history import Event


class Violation(NamedTuple):
    """A broken promise."""

    checker: str
    text: str

    def __str__(self) -> str:
        return f"{self.checker}: {self.text}"


RESETS = ("seek-to", "clear-backlog")
"""Operations of an administrator after which a subscription begins anew, at [topic, subscription, ms] or at the end."""
MessageKey = tuple[str, str, str, int]
"""Topic, producer, key, sequence."""


def _sends(events: Iterable[Event]) -> tuple[dict[MessageKey, Event], dict[MessageKey, Event], dict[MessageKey, list[Event]]]:
    """First invocations, first acknowledgments and failures, by message."""
    invoked: dict[MessageKey, Event] = {}
    acknowledged: dict[MessageKey, Event] = {}
    failed: dict[MessageKey, list[Event]] = defaultdict(list)
    for event in events:
        if event.op == "send":
            key = tuple(event.value[:4])
            if event.kind == "invoke":
                invoked.setdefault(key, event)
            elif event.kind == "ok":
                acknowledged.setdefault(key, event)
            elif event.kind == "fail":
                failed[key].append(event)
    return invoked, acknowledged, failed


def _deliveries(events: Iterable[Event]) -> dict[tuple[str, str], list[Event]]:
    """Deliveries by topic and subscription, in order."""
    found: dict[tuple[str, str], list[Event]] = defaultdict(list)
    for event in events:
        if event.op == "deliver":
            found[event.value[0], event.value[1]].append(event)
    return found


def _message(event: Event) -> MessageKey:
    topic, _subscription, producer, key, sequence = event.value[:5]
    return topic, producer, key, sequence


def no_loss(events: Sequence[Event]) -> list[Violation]:
    """C1: every acknowledged message reaches each subscription that existed when it was sent, unless that was deleted or reset
    (`begun_anew`); and a flush returns when everything sent before has its answer."""
    invoked, acknowledged, _ = _sends(events)
    created: dict[tuple[str, str], float] = {}
    found = []
    for event in events:
        if event.op == "subscribe" and event.kind == "ok":
            created.setdefault((event.value[0], event.value[1]), event.t)
        elif event.op in ("unsubscribe", *RESETS):
            created.pop((event.value[0], event.value[1]), None)
        elif event.op == "flush" and event.kind == "ok" and event.value[2]:
            found.append(
                Violation("C1", f"a flush of {event.proc} returned at {event.t} before {event.value[2]} were answered")
            )
    delivered = {where: {_message(event) for event in seen} for where, seen in _deliveries(events).items()}
    for key, receipt in acknowledged.items():
        for (topic, subscription), moment in created.items():
            begun = invoked.get(key, receipt)
            if topic == key[0] and moment <= begun.t and key not in delivered.get((topic, subscription), ()):
                found.append(
                    Violation(
                        "C1", f"{key} was acknowledged at {receipt.t} ({receipt.value[-1]}), never reached {subscription}"
                    )
                )
    return found


def no_phantom(events: Sequence[Event]) -> list[Violation]:
    """C2: every delivered message was sent, and not by a send that failed; every entry read is the one that was appended."""
    invoked, acknowledged, failed = _sends(events)
    found = []
    for seen in _deliveries(events).values():
        for event in seen:
            key = _message(event)
            if key not in invoked:
                found.append(Violation("C2", f"{key} was delivered to {event.value[1]} at {event.t} and never sent"))
            elif event.t < invoked[key].t:
                found.append(Violation("C2", f"{key} was delivered at {event.t}, before it was sent at {invoked[key].t}"))
            elif key in failed and key not in acknowledged:
                found.append(Violation("C2", f"{key} was delivered at {event.t} although its send was refused"))
    appended: dict[tuple[int, int], int] = {}
    for event in events:
        if event.op == "append" and event.kind == "invoke":
            _log, ledger, entry, checksum = event.value
            appended[ledger, entry] = checksum
        elif event.op == "read":
            ledger, first, checksums = event.value
            for entry, checksum in enumerate(checksums, first):
                if appended.get((ledger, entry), checksum) != checksum:
                    found.append(
                        Violation("C2", f"entry {ledger}:{entry} was read at {event.t} with other bytes than appended")
                    )
    return found


def no_duplicate(events: Sequence[Event], *, once: Iterable[str] = (), stored_once: bool = False) -> list[Violation]:
    """C3: a consumer that subscribed after an acknowledgment was confirmed does not get that message again; a subscription in
    `once` gets each message once; `stored_once` (producers are deduplicated): no message has two places in its topic."""
    acknowledged: dict[tuple[str, MessageKey, str], Event] = {}
    places: dict[MessageKey, str] = {}
    delivered: dict[tuple[str, MessageKey], Event] = {}
    subscribed: dict[str, float] = {}
    exact = set(once)
    resetting: set[str] = set()
    found = []
    for event in events:
        if event.op == "subscribe" and event.kind == "invoke":
            subscribed[event.proc] = event.t
        elif event.op in RESETS:  # until it has ended, acknowledgments mean nothing
            acknowledged = {at: done for at, done in acknowledged.items() if at[0] != event.value[1]}
            (resetting.discard if event.kind in ("ok", "fail") else resetting.add)(event.value[1])
        elif event.op == "ack" and event.kind == "ok" and event.value[1] not in resetting:
            acknowledged.setdefault((event.value[1], _message(event), event.value[5]), event)
        elif event.op == "deliver":
            subscription, place = event.value[1], event.value[5]
            what = (subscription, _message(event))
            done = acknowledged.get((*what, place))
            if done is not None and done.t < subscribed.get(event.proc, -1.0):
                found.append(
                    Violation(
                        "C3", f"{what} came to {event.proc} at {event.t}, which joined after its acknowledgment at {done.t}"
                    )
                )
            if stored_once and places.setdefault(what[1], place) != place:
                found.append(Violation("C3", f"{what[1]} is stored twice: at {places[what[1]]} and at {place}"))
            if subscription in exact and delivered.setdefault(what, event) is not event:
                found.append(Violation("C3", f"{what} was delivered at {delivered[what].t} and again at {event.t}"))
    return found


def seek_by_time(events: Sequence[Event]) -> list[Violation]:
    """C1 after a seek: whoever goes to a moment gets every message sent after it and none acknowledged before it."""
    invoked, acknowledged, _ = _sends(events)
    found = []
    for at, event in enumerate(events):
        if event.op != "seek" or event.kind != "ok":
            continue
        topic, subscription, moment = event.value
        got = {_message(each) for each in events[at:] if each.op == "deliver" and each.value[:2] == [topic, subscription]}
        for key, receipt in acknowledged.items():
            if key[0] != topic:
                continue
            if invoked[key].t > moment and key not in got:
                found.append(Violation("C1", f"{key} was sent at {invoked[key].t} and did not come after a seek to {moment}"))
            elif receipt.t < moment and key in got:
                found.append(Violation("C1", f"{key} was acknowledged at {receipt.t} and came after a seek to {moment}"))
    return found


def begun_anew(events: Sequence[Event], *, subscription: str, start_ms: int, is_kept: bool = True) -> list[Violation]:
    """C1 after an administrator reset a subscription: from its last reset on it gets every message sent after the moment chosen
    and none acknowledged before it. `start_ms` is the brokers' time at the start of the run; unless everything `is_kept`, what
    was sent before the reset may be gone."""
    invoked, acknowledged, _ = _sends(events)
    found = []
    for topic in sorted({event.value[0] for event in events if event.op in RESETS}):
        reset = _last_reset(events, topic, subscription)
        if reset is None:
            continue
        begun, ended, moment = reset
        if moment is None:
            after, before = events[ended].t, events[begun].t
        else:
            after = before = (moment - start_ms) / 1000
            if not is_kept:
                after = max(after, events[ended].t)
        where = [topic, subscription]
        got = {_message(each) for each in events[begun:] if each.op == "deliver" and each.value[:2] == where}
        late = {_message(each) for each in events[ended:] if each.op == "deliver" and each.value[:2] == where}
        for key, receipt in acknowledged.items():
            if key[0] != topic:
                continue
            if invoked[key].t > after and key not in got:
                found.append(Violation("C1", f"{key} was sent at {invoked[key].t} and did not come after a reset to {after}"))
            elif receipt.t < before and key in late:
                found.append(Violation("C1", f"{key} was acknowledged at {receipt.t} and came after a reset to {before}"))
    return found


def begins_where_asked(events: Sequence[Event], *, prefix: str) -> list[Violation]:
    """C1 for subscriptions whose names begin so and end with where they begin: `earliest` gets everything that was ever
    acknowledged (nothing may have been removed), `latest` nothing that was before somebody first asked for it."""
    _invoked, acknowledged, _ = _sends(events)
    asked: dict[tuple[str, str], float] = {}
    made: set[tuple[str, str]] = set()
    for event in events:
        if event.op == "subscribe" and event.value[1].startswith(prefix):
            where = (event.value[0], event.value[1])
            if event.kind == "invoke":
                asked.setdefault(where, event.t)
            elif event.kind == "ok":
                made.add(where)
    delivered = {where: {_message(event) for event in seen} for where, seen in _deliveries(events).items()}
    found = []
    for (topic, subscription), moment in asked.items():
        got = delivered.get((topic, subscription), set())
        for key, receipt in acknowledged.items():
            if key[0] != topic or (topic, subscription) not in made:
                continue
            if subscription.endswith("-earliest") and key not in got:
                found.append(Violation("C1", f"{key} was acknowledged at {receipt.t}, never reached {subscription}"))
            elif subscription.endswith("-latest") and receipt.t < moment and key in got:
                found.append(
                    Violation("C1", f"{key} was acknowledged at {receipt.t} and came to {subscription}, asked for at {moment}")
                )
    return found


def _last_reset(events: Sequence[Event], topic: str, subscription: str) -> tuple[int, int, int | None] | None:
    """Where the last reset began and ended, and its moment (None: the end). None if there was none or it has no verdict."""
    begun: int | None = None
    found: tuple[int, int, int | None] | None = None
    for at, event in enumerate(events):
        if event.op not in RESETS or event.value[:2] != [topic, subscription]:
            continue
        if event.kind == "invoke":
            begun, found = at if begun is None else begun, None
        elif event.kind == "ok" and begun is not None:
            found = (begun, at, event.value[2] if event.op == "seek-to" else None)
            begun = None
    return found


def key_order(events: Sequence[Event], *, ordered: Iterable[str]) -> list[Violation]:
    """C4: per producer, key and subscription the first deliveries follow the order of sending."""
    wanted = set(ordered)
    found = []
    for (topic, subscription), seen in _deliveries(events).items():
        if subscription not in wanted:
            continue
        known: set[MessageKey] = set()
        last: dict[tuple[str, str], int] = {}
        for event in seen:
            key = _message(event)
            if key in known:
                continue
            known.add(key)
            lane = (key[1], key[2])
            if key[3] < last.get(lane, -1):
                found.append(
                    Violation(
                        "C4", f"{topic} {subscription}: {key} came first at {event.t}, after {last[lane]} of the same key"
                    )
                )
            last[lane] = max(key[3], last.get(lane, -1))
    return found


def single_writer(events: Sequence[Event]) -> list[Violation]:
    """C12: after a ledger was fenced nothing more of it is confirmed, and no log goes back to an older ledger. A log that was
    deleted and made anew under its name is another one: it knows nothing of the ids of its predecessor."""
    ends: dict[int, tuple[int, Event]] = {}
    incarnation: dict[str, str] = {}
    home: dict[int, tuple[str, str]] = {}
    newest: dict[tuple[str, str], int] = {}
    writer: dict[int, str] = {}
    found = []
    for event in events:
        if event.op == "fence" and event.kind == "ok":
            ledger, end = event.value
            if ledger in ends and ends[ledger][0] != end:
                found.append(
                    Violation("C12", f"two fences of ledger {ledger} disagree on its end: {ends[ledger][0]} and {end}")
                )
            ends.setdefault(ledger, (end, event))
        elif event.op == "append" and event.kind == "ok":
            log, ledger, last, component = event.value
            if ledger in ends and last > ends[ledger][0]:
                end, fence = ends[ledger]
                found.append(
                    Violation(
                        "C12", f"{event.proc} got entry {ledger}:{last} confirmed at {event.t}; {fence.proc} fenced it at {end}"
                    )
                )
            if writer.setdefault(ledger, event.proc) != event.proc:
                found.append(Violation("C12", f"{event.proc} writes ledger {ledger} of {writer[ledger]}"))
            if component == "managed-ledger" and log:
                at = home.get(ledger, (log, ""))
                if ledger < newest.get(at, -1):
                    found.append(
                        Violation(
                            "C12",
                            f"{event.proc} appends to ledger {ledger} of {log} at {event.t}, after {newest[at]} was begun",
                        )
                    )
                newest[at] = max(ledger, newest.get(at, -1))
        elif event.op == "owner":
            incarnation[event.value[0].removeprefix(f"{ROOT}/")] = event.value[1]
        elif event.op == "create":
            ledger, log = event.value
            home[ledger] = (log, incarnation.get(log, ""))
    return found


def terms_grow(events: Sequence[Event]) -> list[Violation]:
    """C13: owner epochs of a log and epochs of leaders never go back, and no two leaders hold one epoch."""
    highest: dict[str, int] = {}
    holders: dict[tuple[str, int], str] = {}
    found = []
    for event in events:
        if event.op not in ("owner", "lead"):
            continue
        name = "/".join(event.value)
        if event.epoch < highest.get(name, -1):
            found.append(Violation("C13", f"the epoch of {name} went back from {highest[name]} to {event.epoch} at {event.t}"))
        highest[name] = max(event.epoch, highest.get(name, -1))
        if event.op == "lead" and holders.setdefault((name, event.epoch), event.proc) != event.proc:
            found.append(Violation("C13", f"{event.proc} and {holders[name, event.epoch]} both led {name} in {event.epoch}"))
    return found


def bounded_wait(events: Sequence[Event], *, bounds: dict[str, float], healing: float) -> list[Violation]:
    """C18: every operation ends within its bound, and after the faults ended everything finished in time."""
    open_operations: dict[tuple[str, int], Event] = {}
    found = []
    healed: Event | None = None
    end = events[-1].t if events else 0.0
    for event in events:
        if event.kind == "invoke" and event.op in bounds and event.number:
            open_operations[event.proc, event.number] = event
        elif event.number and (begun := open_operations.pop((event.proc, event.number), None)) is not None:
            if event.t - begun.t > bounds[event.op]:
                found.append(Violation("C18", f"{event.op} {begun.value} of {event.proc} took {event.t - begun.t:.1f} s"))
        elif event.op == "crash":
            open_operations = {at: begun for at, begun in open_operations.items() if at[0] != event.proc}
        elif event.op == "healed":
            healed = event
        elif event.op == "finished" and healed is not None and event.t - healed.t > healing:
            found.append(Violation("C18", f"{event.value} took {event.t - healed.t:.1f} s after all faults ended"))
        elif event.op == "stalled":
            found.append(Violation("C18", f"{event.value} did not finish after all faults ended"))
    found += [
        Violation("C18", f"{begun.op} {begun.value} of {begun.proc}, begun at {begun.t}, never ended")
        for begun in open_operations.values()
        if end - begun.t > bounds[begun.op]
    ]
    return found


def nothing_left(events: Sequence[Event]) -> list[Violation]:
    """C19: after everything was closed, nothing is left over."""
    found = []
    for event in events:
        if event.op == "left":
            found += [Violation("C19", f"{count} {what} left over") for what, count in _items(event.value) if count]
    return found


def _items(value: Any) -> list[tuple[str, int]]:
    return sorted(value.items())
