"""Exactly once, whatever happens in whatever order: stories of `sink_model`, and that it notices what breaks the promise.

`SINK_STORIES=5000` in the environment plays so many more, by number.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.txn.sink_model import play

from braid.metadata.api import ABSENT
from braid.model.txn import TxnId
from braid.txn import records
from braid.txn.records import SinkBatch, SinkCurrent
from braid.txn.sinks import Sinks, _folded, _Step
from braid.txn.store import Header, Sink

STORIES = int(os.environ.get("SINK_STORIES", "0"))
SEEDS = 80
"""Within which a mistake is noticed."""


@given(st.lists(st.integers(0, 2**16), max_size=400), st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_every_row_once_and_nothing_left_open(script: list[int], seed: int) -> None:
    play(script, seed)


def test_the_stories_are_worth_telling() -> None:
    """Everything bad happens in some of them, and each ends well."""
    happened: Counter[str] = Counter()
    for seed in range(25 + STORIES):
        world = play([], seed, unknown_one_in=25 if seed % 3 else 8)
        happened.update(world.happened)
        happened["another run"] += world.runs - 1
        happened["unknown outcome"] += 12 - world.left_unknown
    assert set(happened) >= {
        "another run",
        "answer lost",
        "attempt died",
        "driver died after the decision",
        "driver killed",
        "duplicate begin",
        "lost",
        "rest",
        "speculation",
        "time passes",
        "unknown outcome",
    }, happened


class WithoutFold(Sinks):
    async def fold(self, header: Header) -> None:
        """The header goes, and nobody remembers what it said."""


class WithoutFinish(Sinks):
    async def _after(self, found: Sink, current: SinkCurrent, wanted: SinkBatch) -> _Step | None:
        """The batch of the run before stays undecided."""
        header = await self._store.header(TxnId.parse(current.txn), fresh=True)
        if found.value.run != wanted.run and header is not None and header.value.is_open:
            return _Step(record=self._adopted(found.value, wanted.run), is_install=True)
        return await super()._after(found, current, wanted)


class WithoutOutcome(Sinks):
    async def _after(self, found: Sink, current: SinkCurrent, wanted: SinkBatch) -> _Step | None:
        """That the run before had written the batch is not looked at."""
        step = await super()._after(found, current, wanted)
        return msgspec.structs.replace(step, is_install=True) if step is not None and step.record is not None else step


class WithoutSwap(Sinks):
    async def _begin(self, *args: Any) -> TxnId | None:
        """The record is written whatever has become of it."""

        async def put(name: str, value: records.SinkRecord, _old: Sink | None) -> None:
            now = await self._store.sink(name)
            await self._store.metadata.put(
                records.sink_key(name),
                records.encode(value),
                expected=ABSENT if now is None else now.version,
                index=records.sink_index(value),
            )

        self._store.put_sink = put  # type: ignore[method-assign, assignment]
        return await super()._begin(*args)


class WithoutLast(Sinks):
    def _adopted(self, value: records.SinkRecord, run: str) -> records.SinkRecord:
        """Batches that were folded are forgotten when the next run comes."""
        return msgspec.structs.replace(super()._adopted(value, run), last=None)


@pytest.mark.parametrize("broken", [WithoutFold, WithoutFinish, WithoutOutcome, WithoutSwap, WithoutLast])
def test_without_a_step_of_the_protocol_it_goes_wrong(broken: type[Sinks]) -> None:
    for seed in range(SEEDS):
        try:
            play([], seed, broken)
        except AssertionError as error:
            if "is committed twice" in str(error) or "has two deciders" in str(error):
                return
    pytest.fail(f"{SEEDS} stories with {broken.__name__} end well")


def test_what_is_folded() -> None:
    record = records.SinkRecord(run="a", last=7, current=SinkCurrent(batch=3, txn="0_0"), expires_ms=0)
    assert _folded(record).last == 7  # never back
    assert _folded(msgspec.structs.replace(record, current=None)).last == 7
