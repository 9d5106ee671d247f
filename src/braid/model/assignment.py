"""Which segments may be read, and by whom: the two decisions behind every assignment of a stream subscription.

`assignable` is drain before assign (INV8); `assign` is the balance, a function of the previous assignment, the segments and the
consumers (decision 3), so that every leader gets the same result from the same records. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from braid.model.layout import SegmentLayout
from braid.model.segments import SegmentInfo


def in_order(segments: Collection[SegmentInfo]) -> list[SegmentInfo]:
    """By range, then id: the order in which segments are dealt out."""
    return sorted(segments, key=lambda each: (each.hash_range.start, each.hash_range.end, each.segment_id))


def assignable(layout: SegmentLayout, drained: Collection[int]) -> list[SegmentInfo]:
    """The segments that may be read now: not drained themselves, and every ancestor that the layout still has is drained.

    Sealed and active ones alike (L-11). A parent that was pruned counts as drained."""
    is_clear: dict[int, bool] = {}  # all ancestors drained; parents have lower ids, so they come first
    for number in sorted(layout.all_segments):
        parents = [each for each in layout.all_segments[number].parent_ids if each in layout.all_segments]
        is_clear[number] = all(each in drained and is_clear[each] for each in parents)
    return in_order([each for number, each in layout.all_segments.items() if is_clear[number] and number not in drained])


def assign(
    previous: Mapping[str, Sequence[int]], segments: Sequence[SegmentInfo], consumers: Collection[str]
) -> dict[str, tuple[int, ...]]:
    """Who reads what: every segment once, consumers within one segment of each other, as few moves as that allows.

    A consumer keeps what it had up to its share; the larger shares go to those that had most, then by name. What is left over
    is dealt round robin in order of range, so with no previous assignment this is the documents' round robin. The result has
    every consumer, its segments in order of range."""
    names = sorted(set(consumers))
    if not names:
        return {}
    ordered = [each.segment_id for each in in_order(segments)]
    place = {number: at for at, number in enumerate(ordered)}
    kept: dict[str, list[int]] = {}
    taken: set[int] = set()
    for name in names:
        mine = sorted({number for number in previous.get(name, ()) if number in place} - taken, key=place.__getitem__)
        taken.update(mine)
        kept[name] = mine
    share, larger = divmod(len(ordered), len(names))
    ranked = sorted(names, key=lambda name: (-len(kept[name]), name))
    room = {name: share + (rank < larger) for rank, name in enumerate(ranked)}
    for name in names:
        taken.difference_update(kept[name][room[name] :])
        del kept[name][room[name] :]
    free = iter([number for number in ordered if number not in taken])
    waiting = [name for name in names if len(kept[name]) < room[name]]
    while waiting:
        for name in waiting:
            kept[name].append(next(free))
        waiting = [name for name in waiting if len(kept[name]) < room[name]]
    return {name: tuple(sorted(kept[name], key=place.__getitem__)) for name in names}
