"""C10 and the rest of the metadata contract: watches, sequences, index queries. Pure functions over histories."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from braid.testing.sim.checkers import Violation
from braid.testing.sim.history import Event


def watch_contract(events: Sequence[Event]) -> list[Violation]:
    """C10: versions of a key never go back, and after all is quiet the folded events are the state of the store.

    Events: `watch` (a watch begins; what it knew before is void), `change` [key, version or None], `synced`, and at the end
    `state` {key: version}.
    """
    views: dict[str, dict[str, int]] = {}
    highest: dict[tuple[str, str], int] = {}
    state: dict[str, int] | None = None
    found = []
    for event in events:
        if event.op == "watch":
            views[event.proc] = {}
        elif event.op == "change":
            key, version = event.value
            if version is None:
                if key not in views[event.proc]:
                    found.append(Violation("C10", f"{event.proc} was told at {event.t} that {key} is gone, which it never had"))
                views[event.proc].pop(key, None)
                continue
            if version < highest.get((event.proc, key), -1):
                last = highest[event.proc, key]
                found.append(Violation("C10", f"{event.proc} saw {key} go back from version {last} to {version} at {event.t}"))
            highest[event.proc, key] = max(version, highest.get((event.proc, key), -1))
            views[event.proc][key] = version
        elif event.op == "state":
            state = event.value
    if state is not None:
        for proc, view in views.items():
            found += [
                Violation("C10", f"{proc} last saw {key} at {view.get(key)}, the store has {state.get(key)}")
                for key in sorted(view.keys() | state.keys())
                if view.get(key) != state.get(key)
            ]
    return found


def sequences_grow(events: Sequence[Event]) -> list[Violation]:
    """Numbers of a sequence are given once, and an append that began after another had ended gets a higher one."""
    ended: dict[str, list[tuple[int, str]]] = defaultdict(list)
    begun: dict[tuple[str, int], int] = {}
    owner: dict[str, str] = {}
    found = []
    for at, event in enumerate(events):
        if event.op != "sequence":
            continue
        if event.kind == "invoke":
            begun[event.proc, event.number] = at
        elif event.kind == "ok":
            prefix, key = event.value
            if owner.setdefault(key, event.proc + str(event.number)) != event.proc + str(event.number):
                found.append(Violation("C9", f"{key} was given twice"))
            before = [other for end, other in ended[prefix] if end < begun[event.proc, event.number] and other >= key]
            found += [Violation("C9", f"{key} was given at {event.t}, after {other}") for other in before[:1]]
            ended[prefix].append((at, key))
    return found


def index_agrees(events: Sequence[Event]) -> list[Violation]:
    """An index query yields records whose value says the same as the index, each of them once."""
    found = []
    for event in events:
        if event.op == "query" and event.kind == "ok":
            wanted, records = event.value
            wrong = [key for key, value in records if not value.endswith(wanted)]
            if wrong or len({key for key, _ in records}) < len(records):
                found.append(Violation("C9", f"the query for {wanted} at {event.t} yielded {wrong or 'a record twice'}"))
    return found


def one_leader(events: Sequence[Event]) -> list[Violation]:
    """C13 for elections: nobody leads while another does."""
    return [Violation("C13", f"{event.value} lead at the same time, at {event.t}") for event in events if event.op == "leaders"]
