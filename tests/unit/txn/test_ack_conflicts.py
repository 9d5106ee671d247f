"""The rules of acknowledgments inside transactions (INV14), against a model that knows single messages."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.txn.ack_model import SIZE, Message, ModelCursor, bits, place, upto

from braid.model.ackset import full
from braid.model.positions import Position
from braid.model.txn import TxnId
from braid.txn.ack_conflicts import WHOLE, Hold, Holds, bits_of
from braid.txn.api import Ack

ENTRIES = 4
TXNS = [TxnId.of(0, 1), TxnId.of(1, 1), TxnId.of(0, 2, sub=1), TxnId.of(0, 2, sub=2)]


def test_the_messages_an_ack_names() -> None:
    at = Position(1, 1)
    assert bits_of(Ack(at)) == WHOLE
    assert bits_of(Ack(at, 0b101, 3)) == 0b010
    assert bits_of(Ack(at, 0b001, 3)) == 0b110
    assert bits_of(Ack(at, 0, 3)) == WHOLE
    assert bits_of(Ack(at, 0b111, 3)) == 0
    assert bits_of(Ack(at, ~0b101 & full(64), 3)) == 0b101  # bits beyond the batch mean nothing


names = st.sets(st.integers(0, SIZE - 1), min_size=1)
entries = st.integers(0, ENTRIES - 1)
txns = st.sampled_from(TXNS)
actions = st.one_of(
    st.tuples(st.just("one"), txns, entries, names),
    st.tuples(st.just("all before"), txns, entries, st.integers(0, SIZE - 1)),
    st.tuples(st.just("plain"), st.just(TXNS[0]), entries, names),
    st.tuples(st.just("commit"), txns, st.just(0), st.just(0)),
    st.tuples(st.just("abort"), txns, st.just(0), st.just(0)),
)


class Model:
    """Who holds which messages, one by one and up to which."""

    def __init__(self) -> None:
        self.one: dict[TxnId, set[Message]] = {}
        self.upto: dict[TxnId, Message] = {}

    def of(self, txn: TxnId) -> set[Message]:
        return self.one.get(txn, set()) | (upto(self.upto[txn]) if txn in self.upto else set())

    def others(self, txn: TxnId) -> set[Message]:
        return {each for other in TXNS if other != txn for each in self.of(other)}

    def all(self) -> set[Message]:
        return {each for txn in TXNS for each in self.of(txn)}


@pytest.mark.inv("INV14")
@settings(max_examples=400, deadline=None)
@given(st.lists(actions, max_size=14))
def test_the_rules_are_those_of_single_messages(script: list[tuple[str, TxnId, int, object]]) -> None:
    cursor, holds, model = ModelCursor(ENTRIES), Holds(), Model()
    for kind, txn, entry, what in script:
        if kind == "one":
            assert isinstance(what, set)
            named = {(entry, each) for each in what}
            expected = bool(named & (cursor.acked | model.others(txn)))
            hold = Hold(place(entry), bits_of(Ack(place(entry), full(SIZE) & ~bits(what), SIZE)), False)
            assert (holds.conflict(txn, hold, cursor) is not None) == expected
            if not expected:
                added = holds.add(txn, hold)
                # The whole entry may be added after all of its parts: how many these are is not known here.
                told = set() if added is None else {(entry, each) for each in range(SIZE) if added.bits >> each & 1}
                assert told == named - model.one.get(txn, set())
                model.one.setdefault(txn, set()).update(named)
        elif kind == "all before":
            assert isinstance(what, int)
            last = (entry, what)
            everything = upto(last)
            expected = (
                everything <= cursor.acked
                or any(other in model.upto for other in TXNS if other != txn)
                or any(everything & model.one.get(other, set()) for other in TXNS if other != txn)
            )
            mask = full(SIZE) & ~full(what + 1)
            hold = Hold(place(entry), bits_of(Ack(place(entry), mask, SIZE)), True)
            assert (holds.conflict(txn, hold, cursor) is not None) == expected
            if not expected:
                added = holds.add(txn, hold)
                assert (added is None) == (txn in model.upto and model.upto[txn] >= last)
                model.upto[txn] = max(last, model.upto.get(txn, last))
        elif kind == "plain":
            assert isinstance(what, set)
            named = {(entry, each) for each in what}
            before = set(cursor.acked)
            if len(what) == SIZE:
                cursor.acknowledge(*holds.unheld([place(entry)], {}))
            else:
                cursor.acknowledge(*holds.unheld([], {place(entry): full(SIZE) & ~bits(what)}))
            assert cursor.acked == before | (named - model.all())
        else:
            if kind == "commit":
                cursor.acked |= model.of(txn)
            assert bool(holds.forget(txn)) == bool(model.of(txn))
            model.one.pop(txn, None)
            model.upto.pop(txn, None)
        for number in range(ENTRIES):
            held = {each for at, each in model.all() if at == number}
            assert holds.held_bits(place(number)) & full(SIZE) == bits(held)
        assert bool(holds) == bool(model.all())
        for one in TXNS:
            # Nothing is held by two, and nobody holds one by one what is done.
            assert not (model.of(one) & model.others(one)) - cursor.acked
            assert not model.one.get(one, set()) & cursor.acked
            assert holds.holds_any(one) == bool(model.of(one))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(txns, entries, names, st.booleans()), max_size=8), st.data())
def test_what_is_taken_back_leaves_no_trace(script: list[tuple[TxnId, int, set[int], bool]], data: st.DataObject) -> None:
    holds = Holds()
    added: list[tuple[TxnId, Hold]] = []
    for txn, entry, what, is_cumulative in script:
        number = max(what)
        mask = full(SIZE) & ~(full(number + 1) if is_cumulative else bits(what))
        hold = holds.add(txn, Hold(place(entry), bits_of(Ack(place(entry), mask, SIZE)), is_cumulative))
        if hold is not None:
            added.append((txn, hold))
    for txn, hold in data.draw(st.permutations(added)):
        holds.remove(txn, hold)
    assert not holds
    assert not any(holds.of(txn) for txn in TXNS)
