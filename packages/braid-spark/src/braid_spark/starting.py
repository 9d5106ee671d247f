"""Where a query begins and where a batch ends: words, times and named positions, turned into indexes of segments. Pure.

A resolved start lists every segment that is kept and not fully read, so that `next` is the topic's own and a segment that
retention removed before is never missed. Only the offset of a checkpoint stays as it is: it says by itself what was read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from braid.errors import ConfigError, IncarnationMismatch, NotReady
from braid_spark.losses import Losses
from braid_spark.offsets import EARLIEST, LATEST, Frontier, Positions, Start
from braid_spark.ports import Reads, StateLike, ViewLike, is_finished, is_legacy


def resolve_start(start: Start, topic: str, reads: Reads, losses: Losses) -> Frontier:
    """The frontier of a topic at a start. Raises ConfigError, IncarnationMismatch, DataLost, NotReady."""
    view = reads.view(topic)
    if start.timestamp_ms is not None:
        return _at_time(start.timestamp_ms, topic, view, reads)
    reached = None if start.reached is None else start.reached.get(topic)
    if reached is not None:
        return _checked(reached, topic, view, reads)
    said = start.word if start.named is None else start.named.get(topic)
    if said is None:
        raise ConfigError(f"startingOffsets says nothing of {topic}. Name it too, if only with {EARLIEST} or {LATEST}.")
    if isinstance(said, str):
        return _earliest(topic, view, reads) if said == EARLIEST else _latest(topic, view, reads)
    return _at_positions(said, topic, view, reads, losses)


def resolve_end(ending: Start, topic: str, begin: Mapping[int, int], reads: Reads) -> dict[int, int]:
    """Where a batch read stops in each of its segments, given where it begins in them."""
    view = reads.view(topic)
    states = reads.states(topic, begin)
    stable = {number: max(begin[number], states[number].stable) if number in states else begin[number] for number in begin}
    if ending.timestamp_ms is not None:
        for number in begin:
            at = reads.index_at_time(topic, number, ending.timestamp_ms) if stable[number] > begin[number] else 0
            stable[number] = max(begin[number], min(stable[number], at))
        return stable
    reached = None if ending.reached is None else ending.reached.get(topic)
    if reached is not None:
        check_incarnation(topic, reached.inc, view, reads)
        wanted: Positions = {number: LATEST if number < reached.next else first for number, first in begin.items()}
        wanted.update(reached.segs)
        return _stops(wanted, topic, view, begin, stable)
    said = ending.word if ending.named is None else ending.named.get(topic)
    if said == LATEST:
        return stable
    if said is None or isinstance(said, str):
        raise ConfigError(f"endingOffsets says no end of {topic}. Name its segments, or write {LATEST}.")
    return _stops(said, topic, view, begin, stable)


def check_incarnation(topic: str, noted: str, view: ViewLike, reads: Reads) -> None:
    """Raise if the topic is not the one that a position was noted for. One that became a scalable topic since is the same: the
    partitions it had are among its segments and keep their incarnation."""
    if not noted or noted == view.incarnation:
        return
    former = next((number for number, segment in view.segments.items() if is_legacy(segment)), None)
    state = None if former is None else reads.states(topic, [former]).get(former)
    if state is None or state.incarnation != noted:
        raise IncarnationMismatch(
            f"{topic} was deleted and created again since the offset was written (incarnation {noted}, now "
            f"{view.incarnation or 'none'}). Start with a new checkpoint to read the new topic."
        )


def _earliest(topic: str, view: ViewLike, reads: Reads) -> Frontier:
    states = _described(topic, view, view.segments, reads)
    return _frontier(view, states, {number: state.low for number, state in states.items()})


def _latest(topic: str, view: ViewLike, reads: Reads) -> Frontier:
    active = [number for number, segment in view.segments.items() if not segment.is_sealed]
    states = _described(topic, view, active, reads)
    return _frontier(view, states, {number: state.stable for number, state in states.items()})


def _at_time(timestamp_ms: int, topic: str, view: ViewLike, reads: Reads) -> Frontier:
    """A segment with an older message was alive by then, so everything it came from is older; what came from it is newer or
    finds its own first message. The youngest are asked first, so that ancestors need not be asked."""
    states = _described(topic, view, view.segments, reads)
    positions: dict[int, int] = {}
    older: set[int] = set()
    for number in sorted(states, reverse=True):
        if number not in older:
            positions[number] = max(states[number].low, reads.index_at_time(topic, number, timestamp_ms))
        if number in older or positions[number] > states[number].low:
            older.update(view.segments[number].parents)
    return _frontier(view, states, positions)


def _checked(reached: Frontier, topic: str, view: ViewLike, reads: Reads) -> Frontier:
    """What another query has read of a topic, if it can be of this one."""
    check_incarnation(topic, reached.inc, view, reads)
    _check_known(reached.segs, topic, view, "startingOffsets")
    for number, state in reads.states(topic, reached.segs).items():
        _index(reached.segs[number], state, f"startingOffsets names segment {number} of {topic}")
    return reached


def _at_positions(said: Positions, topic: str, view: ViewLike, reads: Reads, losses: Losses) -> Frontier:
    """Named segments begin where the user says, what came from them at 0; what they came from counts as read."""
    _check_known(said, topic, view, "startingOffsets")
    gone = {number: index if isinstance(index, int) else 0 for number, index in said.items() if number not in view.segments}
    ends = reads.pruned_ends(topic) if gone else {}
    for number, index in gone.items():
        if index < ends.get(number, index + 1):
            losses.gone(topic, number, index, ends.get(number))
    above, below = _ancestors(said, view), _descendants(said, view)
    states = _described(topic, view, [number for number in view.segments if number not in above or number in said], reads)
    positions: dict[int, int] = {}
    for number, state in states.items():
        if number in said:
            positions[number] = _index(said[number], state, f"startingOffsets names segment {number} of {topic}")
        elif number in below:
            positions[number] = 0
        elif not is_finished(state, state.low):
            raise ConfigError(
                f"startingOffsets says nothing of segment {number} of {topic}, nor of one it came from or became. Name it too."
            )
    return _frontier(view, states, positions)


def _stops(said: Positions, topic: str, view: ViewLike, begin: Mapping[int, int], stable: Mapping[int, int]) -> dict[int, int]:
    """Named segments end where the user says, what they came from is read to its end, what came from them not at all."""
    _check_known(said, topic, view, "endingOffsets")
    above, below = _ancestors(said, view), _descendants(said, view)
    found: dict[int, int] = {}
    for number, first in begin.items():
        wanted = said.get(number)
        if wanted == LATEST or (wanted is None and number in above):
            found[number] = stable[number]
        elif wanted is None and number in below:
            found[number] = first
        elif not isinstance(wanted, int):
            raise ConfigError(f"endingOffsets says no index of segment {number} of {topic}. Name it too.")
        elif wanted < first:
            raise ConfigError(f"endingOffsets ends segment {number} of {topic} at {wanted}, before its start at {first}.")
        elif wanted > stable[number]:
            raise ConfigError(
                f"endingOffsets ends segment {number} of {topic} at {wanted}, but only what is below {stable[number]} can "
                "be read now."
            )
        else:
            found[number] = wanted
    return found


def _check_known(said: Iterable[int], topic: str, view: ViewLike, option: str) -> None:
    for number in said:
        if number >= view.next_id:
            raise ConfigError(f"{option} names segment {number} of {topic}, which has only those below {view.next_id}.")


def _index(said: int | str, state: StateLike, what: str) -> int:
    if said == EARLIEST:
        return state.low
    if said == LATEST or not isinstance(said, int):
        return state.stable
    if said > state.end:
        raise ConfigError(f"{what} at {said}, but its last index is {state.end - 1}. Is the position of another topic?")
    return said


def _ancestors(named: Iterable[int], view: ViewLike) -> set[int]:
    """Segments that named ones came from, also those that are gone."""
    found: set[int] = set()
    waiting = list(named)
    while waiting:
        segment = view.segments.get(waiting.pop())
        for parent in segment.parents if segment is not None else ():
            if parent not in found:
                found.add(parent)
                waiting.append(parent)
    return found


def _descendants(named: Iterable[int], view: ViewLike) -> set[int]:
    """Segments that came from named ones, also from those that are gone: ids grow along every lineage."""
    found = set(named)
    for number in sorted(view.segments):
        if not found.isdisjoint(view.segments[number].parents):
            found.add(number)
    return found


def _described(topic: str, view: ViewLike, numbers: Iterable[int], reads: Reads) -> dict[int, StateLike]:
    """States of segments; a sealed one that was just removed is left out."""
    wanted = sorted(numbers)
    states = reads.states(topic, wanted)
    for number in wanted:
        if number not in states and not view.segments[number].is_sealed:
            raise NotReady(f"Segment {number} of {topic} cannot be found at the moment. Try again.")
    return {number: states[number] for number in wanted if number in states}


def _frontier(view: ViewLike, states: Mapping[int, StateLike], positions: Mapping[int, int]) -> Frontier:
    """Without those that are read to their ends."""
    segs = {number: at for number, at in positions.items() if not is_finished(states[number], at)}
    incs = {number: states[number].incarnation for number in segs if states[number].incarnation != view.incarnation}
    return Frontier(inc=view.incarnation, next=view.next_id, segs=segs, incs=incs)
