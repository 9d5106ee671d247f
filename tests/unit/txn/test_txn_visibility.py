"""`Visibility`: the read limit and the aborted set, against a plain model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.model.positions import LATEST, Position
from braid.model.txn import TxnId
from braid.txn.visibility import Visibility

A, B, C = TxnId.of(0, 1), TxnId.of(0, 2), TxnId.of(1, 1)


@pytest.mark.req("R473-24")
@pytest.mark.inv("INV13")
@pytest.mark.parametrize(
    ("pins", "limit"),
    [
        ({}, LATEST),
        ({A: Position(1, 4)}, Position(1, 4)),
        ({A: Position(1, 4), B: Position(1, 3)}, Position(1, 3)),
        ({A: Position(2, -1), B: Position(1, 9)}, Position(1, 9)),
        ({A: Position(-1, -1), B: Position(0, 0), C: Position(5, 5)}, Position(-1, -1)),
    ],
)
def test_the_lowest_pin_is_the_limit(pins: dict[TxnId, Position], limit: Position) -> None:
    seen = Visibility()
    for root, position in pins.items():
        seen.pin(root, position)
    assert seen.max_read_position == limit and seen.hides == bool(pins)
    for root in pins:
        seen.unpin(root)
    assert seen.max_read_position == LATEST and not seen.hides


def test_a_pin_is_only_lowered() -> None:
    seen = Visibility()
    seen.pin(A, Position(1, 4))
    seen.pin(A, Position(1, 6))
    assert seen.max_read_position == seen.pinned(A) == Position(1, 4)
    seen.pin(A, Position(1, 2))
    assert seen.max_read_position == Position(1, 2)
    seen.unpin(A)
    seen.unpin(A)
    assert seen.max_read_position == LATEST


@pytest.mark.req("R473-25")
def test_aborted_ones_stay_until_everything_of_them_is_trimmed() -> None:
    seen = Visibility()
    seen.abort(A, Position(1, 4))
    seen.abort(B, Position(2, 0))
    seen.abort(C, None)
    assert seen.hides and tuple(A) in seen.aborted
    assert seen.prunable(Position(1, 4)) == []
    assert seen.prunable(Position(1, 5)) == [A]
    assert seen.prunable(Position(9, 0)) == [A, B]  # what C's last one is nobody knows yet
    for txn in (A, B, C):
        seen.forget(txn)
    assert not seen.hides


ACTIONS = st.tuples(st.sampled_from(["pin", "unpin", "abort", "forget"]), st.integers(0, 5), st.integers(-1, 20))


@given(st.lists(ACTIONS, max_size=60))
def test_any_order_of_events_gives_the_lowest_pin(actions: list[tuple[str, int, int]]) -> None:
    seen = Visibility()
    pins: dict[TxnId, Position] = {}
    aborted: set[TxnId] = set()
    for action, number, entry in actions:
        txn, position = TxnId.of(0, number), Position(3, entry)
        if action == "pin":
            seen.pin(txn, position)
            pins[txn] = min(position, pins.get(txn, position))
        elif action == "unpin":
            seen.unpin(txn)
            pins.pop(txn, None)
        elif action == "abort":
            seen.abort(txn, position)
            aborted.add(txn)
        else:
            seen.forget(txn)
            aborted.discard(txn)
        assert seen.max_read_position == min(pins.values(), default=LATEST)
        assert seen.hides == bool(pins or aborted) and set(seen.aborted) == aborted


def test_a_pin_that_stays_lets_nothing_pile_up_behind_it() -> None:
    seen = Visibility()
    seen.pin(A, Position(1, 0))
    for number in range(10_000):
        root = TxnId.of(2, number + 1)
        seen.pin(root, Position(1, number + 1))
        seen.unpin(root)
    assert seen.max_read_position == Position(1, 0)
    assert len(seen._order) < 200
    seen.pin(B, Position(1, 7))
    seen.unpin(A)
    assert seen.max_read_position == Position(1, 7)
