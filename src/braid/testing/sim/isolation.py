"""C7: the dependencies between transactions that append to lists form no cycle, and nobody read what was never there.

The method is that of Elle, for appends only: an element is appended once and by one transaction, so the lists that were read
show in which order the transactions wrote (ww), who read from whom (wr) and who overwrote what somebody had read (rw). Named as
usual: G0 is a cycle of writes, G1a a read of aborted data, G1b one of an intermediate version, G1c a cycle of writes and reads;
G2 has anti-dependencies too. Pure.

Events: `list-append` (invoke) [list, element] and `list-read` (ok) [list, elements], with their `txn`; a read outside
transactions is a transaction of its own.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

from braid.testing.sim.checkers import Violation
from braid.testing.sim.history import Event
from braid.testing.sim.txn_checkers import ABORTED, COMMITTED, verdicts

WW, WR, RW = "ww", "wr", "rw"
CLASSES: Final = (("G0", (WW,)), ("G1c", (WW, WR)), ("G2", (WW, WR, RW)))
"""A cycle is named after the first class whose edges are enough for it."""
MOST_TRANSACTIONS: Final = 2000
Graph = dict[str, dict[str, str]]
"""From each transaction to those that depend on it, with the kind of the dependency and the list it is about."""


class Read(NamedTuple):
    """A list as a committed transaction, or somebody outside, saw it."""

    reader: str
    elements: tuple[Any, ...]
    t: float


def isolation(events: Sequence[Event]) -> list[Violation]:
    """C7; see the module."""
    appended: dict[str, list[tuple[Any, str]]] = defaultdict(list)
    for event in events:
        if event.op == "list-append" and event.kind == "invoke":
            appended[event.value[0]].append((event.value[1], event.txn))
    writers = {(name, element): txn for name, pairs in appended.items() for element, txn in pairs}
    count = len(set(writers.values()))
    if count > MOST_TRANSACTIONS:
        return [Violation("C7", f"{count} transactions are too many to judge; at most {MOST_TRANSACTIONS}")]
    states = {txn: verdict.state for txn, verdict in verdicts(events).items()}
    reads = _reads(events, states)
    found: list[Violation] = []
    orders: dict[str, tuple[Any, ...]] = {}
    for name, seen in reads.items():
        lasts = _lasts(appended[name])
        longest = max(seen, key=lambda read: len(read.elements))
        orders[name] = longest.elements
        for read in seen:
            found += [Violation("C7", text) for text in _wrong(name, read, longest, writers, states, lasts)]
    if found:
        return found  # without an order of versions there is no graph
    return _cycles(_dependencies(orders, reads, writers))


def _reads(events: Sequence[Event], states: Mapping[str, str]) -> dict[str, list[Read]]:
    """By list. What an aborted transaction read does not count, nor what one read that is still open."""
    found: dict[str, list[Read]] = defaultdict(list)
    for at, event in enumerate(events):
        if event.op == "list-read" and event.kind == "ok" and (not event.txn or states.get(event.txn) == COMMITTED):
            found[event.value[0]].append(Read(event.txn or f"{event.proc}@{at}", tuple(event.value[1]), event.t))
    return found


def _lasts(pairs: Iterable[tuple[Any, str]]) -> dict[str, Any]:
    """The last element that each transaction appended to a list."""
    return {txn: element for element, txn in pairs}


def _wrong(
    name: str,
    read: Read,
    longest: Read,
    writers: Mapping[tuple[str, Any], str],
    states: Mapping[str, str],
    lasts: Mapping[str, Any],
) -> list[str]:
    """What one read shows by itself, or together with the longest one."""
    found = []
    where = f"{read.reader} read {name} at {read.t}"
    if len(set(read.elements)) < len(read.elements):
        found.append(f"{where} with an element twice: {_tail(read.elements)}")
    if longest.elements[: len(read.elements)] != read.elements:
        found.append(
            f"{where} as {_tail(read.elements)} and {longest.reader} as {_tail(longest.elements)}: the orders are incompatible"
        )
    for element in read.elements:
        writer = writers.get((name, element))
        if writer is None:
            found.append(f"{where} with {element!r}, which nobody appended")
        elif states.get(writer) == ABORTED:
            found.append(f"G1a: {where} with {element!r} of {writer}, which was aborted")
        elif states.get(writer) != COMMITTED:
            found.append(f"G1a: {where} with {element!r} of {writer}, which was never committed")
    if read.elements:
        last = read.elements[-1]
        writer = writers.get((name, last), "")
        if writer not in ("", read.reader) and lasts.get(writer) != last:
            found.append(f"G1b: {where} as far as {last!r}; {writer} went on to {lasts.get(writer)!r}")
    return found


def _tail(elements: tuple[Any, ...]) -> str:
    shown = ", ".join(map(str, elements[-4:]))
    return f"[{'... ' if len(elements) > 4 else ''}{shown}] ({len(elements)})"


def _dependencies(
    orders: Mapping[str, tuple[Any, ...]], reads: Mapping[str, list[Read]], writers: Mapping[tuple[str, Any], str]
) -> dict[str, Graph]:
    """The graph of each kind of dependency."""
    graphs: dict[str, Graph] = {kind: defaultdict(dict) for kind in (WW, WR, RW)}

    def edge(kind: str, first: str, then: str, name: str) -> None:
        if first != then:
            graphs[kind][first].setdefault(then, f"{kind} {name}")

    for name, order in orders.items():
        written = [writers[name, element] for element in order]
        for first, then in pairwise(written):
            edge(WW, first, then, name)
        for read in reads[name]:
            length = len(read.elements)
            if length:
                edge(WR, written[length - 1], read.reader, name)
            if length < len(written):
                edge(RW, read.reader, written[length], name)
    return graphs


def _cycles(graphs: Mapping[str, Graph]) -> list[Violation]:
    """One cycle per class, the strongest class first; a weaker one only if there is no stronger one."""
    for title, kinds in CLASSES:
        merged: Graph = defaultdict(dict)
        for kind in kinds:
            for first, edges in graphs[kind].items():
                for then, label in edges.items():
                    merged[first].setdefault(then, label)
        for component in _components(merged):
            return [Violation("C7", f"{title}: {_cycle(merged, component)}")]
    return []


def _components(graph: Graph) -> list[set[str]]:
    """Strongly connected components of more than one node (Tarjan's algorithm, without recursion)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    waiting: set[str] = set()
    found: list[set[str]] = []
    for root in sorted(graph):
        if root in index:
            continue
        work = [(root, iter(sorted(graph[root])))]
        index[root] = low[root] = len(index)
        stack.append(root)
        waiting.add(root)
        while work:
            node, following = work[-1]
            for then in following:
                if then not in index:
                    index[then] = low[then] = len(index)
                    stack.append(then)
                    waiting.add(then)
                    work.append((then, iter(sorted(graph.get(then, ())))))
                    break
                if then in waiting:
                    low[node] = min(low[node], index[then])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    component: set[str] = set()
                    while node not in component:
                        component.add(stack.pop())
                    waiting -= component
                    if len(component) > 1:
                        found.append(component)
    return found


def _cycle(graph: Graph, component: set[str]) -> str:
    """The shortest way from the first transaction of a component back to it, in words."""
    start = min(component)
    came: dict[str, str] = {}
    queue = deque([start])
    while queue:
        node = queue.popleft()
        for then in sorted(graph.get(node, ())):
            if then == start:
                path = [start, node]
                while path[-1] != start:
                    path.append(came[path[-1]])
                way = path[::-1]
                return " ".join(f"{a} -{graph[a][b]}->" for a, b in pairwise(way)) + f" {start}"
            if then in component and then not in came:
                came[then] = node
                queue.append(then)
    raise AssertionError("a component without a cycle")
