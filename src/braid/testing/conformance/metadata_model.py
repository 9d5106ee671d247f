"""Conformance: random operation sequences against a plain dictionary (point 14 of the suite)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from braid.errors import VersionConflict
from braid.metadata.api import ABSENT, IndexSpan, MetadataStore, Span
from braid.testing.conformance.metadata_world import StoreWorld, collect, collect_names

EXAMPLES = 120

_names = st.sampled_from(["a", "b", "ba", "é", "s-00000000000000000007"])
_secondary = st.none() | st.sampled_from(["", "x", "xy", "z"])
_expected = st.sampled_from(["any", "absent", "right", "stale"])
_handle = st.integers(0, 1)
_operations = st.lists(
    st.one_of(
        st.tuples(st.just("put"), _handle, _names, st.binary(max_size=3), _expected, _secondary),
        st.tuples(st.just("delete"), _handle, _names, _expected),
        st.tuples(st.just("append"), _handle, st.integers(1, 3), _secondary),
        st.tuples(st.just("delete_span"), _handle, st.none() | _names, st.none() | _names, st.booleans()),
    ),
    max_size=25,
)


class Model:
    """What a store is, in a dictionary."""

    def __init__(self) -> None:
        self.rows: dict[str, tuple[bytes, int, int, str | None]] = {}  # name -> value, version, mods, secondary
        self.old_versions: dict[str, int] = {}

    def resolve(self, name: str, expected: str) -> int | None:
        """The version to name, for a way of naming it."""
        if expected == "any":
            return None
        if expected == "absent":
            return ABSENT
        if expected == "right":
            return self.rows[name][1] if name in self.rows else ABSENT
        return self.old_versions.get(name, 987654321)

    def accepts(self, name: str, expected: int | None) -> bool:
        return expected is None or expected == (self.rows[name][1] if name in self.rows else ABSENT)

    def put(self, name: str, value: bytes, version: int, secondary: str | None) -> None:
        before = self.rows.get(name)
        self.forget(name)
        self.rows[name] = (value, version, 0 if before is None else before[2] + 1, secondary)

    def forget(self, name: str) -> bool:
        before = self.rows.pop(name, None)
        if before is not None:
            self.old_versions[name] = before[1]
        return before is not None

    def next_number(self, delta: int) -> int:
        numbers = [int(name[2:]) for name in self.rows if name.startswith("s-")]
        return max(numbers, default=0) + delta


async def check(stores: list[MetadataStore], parent: str, operations: list[tuple[Any, ...]]) -> None:
    """Run the operations on the store and on the model; every answer and the whole state must agree."""
    model = Model()
    index = parent.replace("/", "")
    for operation in operations:
        kind, handle, *arguments = operation
        await _STEPS[kind](model, stores[handle], parent, *arguments)
        records = await collect(stores[1 - handle].scan(Span(parent), fresh=True))
        found = {r.name: (r.value, r.version, r.mods, r.index.get(index)) for r in records}
        assert found == model.rows, operation
        assert [record.name for record in records] == sorted(model.rows, key=str.encode)
        assert await collect_names(stores[handle].names(Span(parent, "b"))) == sorted(n for n in model.rows if n >= "b")
        entries = sorted((row[3], name) for name, row in model.rows.items() if row[3] is not None and row[3] >= "x")
        scanned = await collect(stores[1 - handle].scan(IndexSpan(index, "x"), fresh=True))
        assert [(r.index[index], r.name) for r in scanned] == entries, operation


async def _put(
    model: Model, store: MetadataStore, parent: str, name: str, value: bytes, how: str, secondary: str | None
) -> None:
    expected = model.resolve(name, how)
    index = None if secondary is None else {parent.replace("/", ""): secondary}
    try:
        record = await store.put(f"{parent}/{name}", value, expected=expected, index=index, partition="p")
    except VersionConflict:
        assert not model.accepts(name, expected)
    else:
        assert model.accepts(name, expected)
        model.put(name, value, record.version, secondary)


async def _delete(model: Model, store: MetadataStore, parent: str, name: str, how: str) -> None:
    expected = model.resolve(name, how)
    try:
        was_there = await store.delete(f"{parent}/{name}", expected=expected, partition="p")
    except VersionConflict:
        assert not model.accepts(name, expected)
    else:
        assert model.accepts(name, expected)
        assert was_there == model.forget(name)


async def _append(model: Model, store: MetadataStore, parent: str, delta: int, secondary: str | None) -> None:
    index = None if secondary is None else {parent.replace("/", ""): secondary}
    record = await store.append(f"{parent}/s", b"appended", partition="p", deltas=(delta,), index=index)
    assert record.name == f"s-{model.next_number(delta):020d}"
    model.put(record.name, b"appended", record.version, secondary)


async def _delete_span(model: Model, store: MetadataStore, parent: str, lo: str | None, hi: str | None, keep: bool) -> None:
    await store.delete_span(Span(parent, lo, hi), partition="p", keep_last=keep)
    names = sorted(n for n in model.rows if (lo is None or lo <= n) and (hi is None or n < hi))
    for name in names[:-1] if keep else names:
        model.forget(name)


_STEPS: dict[str, Callable[..., Awaitable[None]]] = {
    "put": _put,
    "delete": _delete,
    "append": _append,
    "delete_span": _delete_span,
}


class ModelCases:
    """One test: the store is a dictionary with versions, order and an index."""

    def test_random_operations_agree_with_a_dictionary(self, make_world: Callable[[], StoreWorld]) -> None:
        with asyncio.Runner() as runner:
            world = make_world()

            async def two_handles() -> list[MetadataStore]:
                return [await world.handle(), await world.handle()]

            stores = runner.run(two_handles())
            rounds = iter(range(1_000_000))

            @settings(
                max_examples=EXAMPLES, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
            )
            @given(_operations)
            def run(operations: list[tuple[Any, ...]]) -> None:
                runner.run(check(stores, f"/model{next(rounds)}", operations))

            try:
                run()
            finally:
                runner.run(world.close())
