"""Which segments may be read, and by whom."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.model.assignment import assign, assignable, in_order
from braid.model.layout import SegmentLayout
from braid.model.segments import SegmentInfo


def ids(segments: list[SegmentInfo]) -> list[int]:
    return [each.segment_id for each in segments]


def initial(count: int) -> list[SegmentInfo]:
    return list(SegmentLayout.initial(count, 0).all_segments.values())


@pytest.mark.req("R468-25")
@pytest.mark.parametrize(
    ("consumers", "expected"),
    [
        (["a"], {"a": (0, 1, 2, 3)}),
        (["a", "b"], {"a": (0, 2), "b": (1, 3)}),
        (["a", "b", "c"], {"a": (0, 3), "b": (1,), "c": (2,)}),
        (["a", "b", "c", "d", "e"], {"a": (0,), "b": (1,), "c": (2,), "d": (3,), "e": ()}),
        ([], {}),
    ],
)
def test_without_a_previous_assignment_it_is_round_robin_by_range_and_name(
    consumers: list[str], expected: dict[str, tuple[int, ...]]
) -> None:
    assert assign({}, initial(4), consumers) == expected


@pytest.mark.req("R468-26")
def test_the_order_of_the_input_does_not_matter() -> None:
    layout = SegmentLayout.initial(5, 0).split(2, 1).merge(0, 1, 2)
    segments = list(layout.all_segments.values())
    once = assign({"b": (3,), "a": (4, 2)}, segments, ["a", "b", "c"])
    assert once == assign({"a": (2, 4), "b": (3,)}, segments[::-1], ["c", "b", "a"])


names = st.sampled_from([f"c{number}" for number in range(8)])
previous = st.dictionaries(names, st.lists(st.integers(0, 30), max_size=12).map(tuple), max_size=8)


@given(previous, st.integers(1, 30), st.sets(names, min_size=1))
@pytest.mark.req("R468-25", "R468-26", "R468-30")
def test_every_segment_once_in_balance_with_as_few_moves_as_possible(
    before: dict[str, tuple[int, ...]], count: int, consumers: set[str]
) -> None:
    segments = initial(count)
    result = assign(before, segments, consumers)
    assert sorted(result) == sorted(consumers)
    assert sorted(number for each in result.values() for number in each) == list(range(count))
    sizes = sorted(len(each) for each in result.values())
    assert sizes[-1] - sizes[0] <= 1
    assert result == assign(before, segments[::-1], sorted(consumers, reverse=True))
    assert result == assign(result, segments, consumers)  # it stays where it is
    # Nobody could have kept more: each consumer keeps its own up to its share, and the larger shares go to those with most.
    owners: dict[int, str] = {}
    for name in sorted(consumers):
        for number in before.get(name, ()):
            if number < count:
                owners.setdefault(number, name)
    had = Counter(owners.values())
    share, larger = divmod(count, len(consumers))
    best = sum(min(had[name], share) for name in consumers)
    best += min(larger, sum(had[name] > share for name in consumers))
    assert sum(owners.get(number) == name for name, each in result.items() for number in each) == best


@given(previous, st.integers(1, 30), st.sets(names, min_size=1))
def test_with_nothing_of_worth_before_it_is_the_documents_round_robin(
    before: dict[str, tuple[int, ...]], count: int, consumers: set[str]
) -> None:
    strangers = {f"gone-{name}": segments for name, segments in before.items()}
    ordered = in_order(initial(count))
    turns = sorted(consumers)
    expected: dict[str, list[int]] = {name: [] for name in turns}
    for number, segment in enumerate(ordered):
        expected[turns[number % len(turns)]].append(segment.segment_id)
    assert assign(strangers, ordered, consumers) == {name: tuple(each) for name, each in expected.items()}


@pytest.mark.inv("INV8")
def test_a_segment_waits_for_every_ancestor_sealed_ones_too() -> None:
    layout = SegmentLayout.initial(1, 0).split(0, 1).split(1, 2)  # 0 -> 1, 2; 1 -> 3, 4
    assert ids(assignable(layout, set())) == [0]
    assert ids(assignable(layout, {1})) == [0]  # 3 and 4 wait for 0 as well
    assert ids(assignable(layout, {0})) == [1, 2]
    assert ids(assignable(layout, {0, 1})) == [3, 4, 2]


@pytest.mark.inv("INV8")
def test_a_merged_segment_waits_for_both_parents_and_a_pruned_parent_counts_as_drained() -> None:
    layout = SegmentLayout.initial(2, 0).merge(0, 1, 1)
    assert ids(assignable(layout, {0})) == [1]
    assert ids(assignable(layout, {0, 1})) == [2]
    assert ids(assignable(layout.prune([0]), set())) == [1]
    assert ids(assignable(layout.prune([0, 1]), set())) == [2]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 1000)), max_size=20), st.sets(st.integers(0, 60)))
@pytest.mark.inv("INV8")
def test_what_is_assignable_has_no_undrained_ancestor_and_nothing_else_is_held_back(
    operations: list[tuple[bool, int]], drained: set[int]
) -> None:
    layout = SegmentLayout.initial(2, 0)
    for is_split, choice in operations:
        active = layout.active_in_order
        at = choice % len(active)
        if is_split and active[at].hash_range.size > 1:
            layout = layout.split(active[at].segment_id, 1)
        elif not is_split and at + 1 < len(active):
            layout = layout.merge(active[at].segment_id, active[at + 1].segment_id, 1)
    found = {each.segment_id for each in assignable(layout, drained)}
    for number in layout.all_segments:
        assert (number in found) == (number not in drained and layout.ancestors(number) <= drained)
