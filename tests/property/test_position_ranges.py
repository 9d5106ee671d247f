"""`PositionRanges` against a plain set."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from braid.model.positions import Position
from braid.model.ranges import PositionRanges

LEDGERS = st.integers(0, 3)
ENTRIES = st.integers(0, 25)


class RangesAgainstSet(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ranges = PositionRanges()
        self.model: set[tuple[int, int]] = set()

    @rule(ledger=LEDGERS, entry=ENTRIES)
    def add(self, ledger: int, entry: int) -> None:
        assert self.ranges.add((ledger, entry)) is ((ledger, entry) not in self.model)
        self.model.add((ledger, entry))

    @rule(ledger=LEDGERS, first=ENTRIES, length=st.integers(0, 8))
    def add_range(self, ledger: int, first: int, length: int) -> None:
        added = {(ledger, entry) for entry in range(first, first + length + 1)}
        assert self.ranges.add_range(ledger, first, first + length) == len(added - self.model)
        self.model |= added

    @rule(ledger=st.integers(-1, 4), entry=st.integers(-1, 30))
    def remove_up_to(self, ledger: int, entry: int) -> None:
        gone = {position for position in self.model if position <= (ledger, entry)}
        assert self.ranges.remove_up_to((ledger, entry)) == len(gone)
        self.model -= gone

    @rule()
    def clear(self) -> None:
        self.ranges.clear()
        self.model.clear()

    @rule(ledger=LEDGERS, entry=st.integers(-1, 30))
    def contiguous(self, ledger: int, entry: int) -> None:
        end = entry
        while (ledger, end + 1) in self.model:
            end += 1
        assert self.ranges.contiguous_from(Position(ledger, entry)) == (ledger, end)

    @invariant()
    def same_set(self) -> None:
        runs = list(self.ranges)
        listed = [(ledger, entry) for ledger, first, last in runs for entry in range(first, last + 1)]
        assert listed == sorted(self.model)
        assert self.ranges.count == len(self.model)
        assert len(self.ranges) == len(runs)
        assert all((ledger, last + 1) not in self.model for ledger, _, last in runs), "runs touch"
        for ledger in range(-1, 5):
            for entry in (0, 7, 25):
                assert ((ledger, entry) in self.ranges) is ((ledger, entry) in self.model)


TestRangesAgainstSet = RangesAgainstSet.TestCase
TestRangesAgainstSet.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_impossible_range() -> None:
    with pytest.raises(ValueError, match="no range of entries"):
        PositionRanges().add_range(1, 3, 2)
    with pytest.raises(ValueError, match="no range of entries"):
        PositionRanges().add((1, -1))


@settings(deadline=None)
@given(st.permutations(range(40)))
def test_any_order_ends_in_one_run(entries: list[int]) -> None:
    ranges = PositionRanges()
    for entry in entries:
        ranges.add((7, entry))
    assert list(ranges) == [(7, 0, 39)]
    assert ranges.contiguous_from(Position(7, -1)) == (7, 39)
