"""Split and merge: plans that replace active segments by new ones (INV6, INV7).

The order is the safety argument. The intent is in the record before a segment is touched; children exist with a cursor for
every subscription before the parents are sealed; parents are sealed durably, and the children know the parents'
deduplication state, before the layout shows either; subscriptions that appeared meanwhile get their cursors before the
operation counts as done. Each step can be repeated; a leader that finds the intent begins again at the first step its stage
allows, and never goes back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest

import msgspec

from braid.errors import BraidError, NotFound, PreconditionFailed, TopicNotFound, invariant
from braid.model.layout import SegmentLayout
from braid.model.segments import SegmentInfo
from braid.runtime.plans import step
from braid.scalable.api import UNTIL_REPAIRED
from braid.scalable.draining import initial_for
from braid.scalable.plans import Notify, TopicWork, each, no_other
from braid.scalable.records import PendingOperation, ScalableTopicMetadata, from_record, to_record


async def split(work: TopicWork, segment_id: int, notify: Notify) -> None:
    """Replace an active segment by two halves. Raises NotFound, PreconditionFailed, Conflict and UNTIL_REPAIRED; nothing has
    changed then."""
    await _check_usable(work, segment_id)
    async with step("split:intend"):
        await _intend(work, "split", (segment_id,), lambda layout, now: layout.split(segment_id, now))
    await roll_forward(work, notify)


async def merge(work: TopicWork, first_id: int, second_id: int, notify: Notify) -> None:
    """Replace two adjacent active segments by one. Raises NotFound, PreconditionFailed, Conflict and UNTIL_REPAIRED; nothing
    has changed then."""
    await _check_usable(work, first_id, second_id)
    async with step("merge:intend"):
        await _intend(work, "merge", (first_id, second_id), lambda layout, now: layout.merge(first_id, second_id, now))
    await roll_forward(work, notify)


async def _check_usable(work: TopicWork, *segments: int) -> None:
    """Raise one of UNTIL_REPAIRED if the owner of one of these cannot serve it: nobody could seal it, and an operation that
    cannot be finished would stand in the way of all others."""
    for number in segments:
        segment = work.layout.active_segments.get(number)
        if segment is not None:
            try:
                await work.segments.stats(work.name(segment))
            except UNTIL_REPAIRED:
                raise
            except BraidError:  # the operation itself tells, makes the segment anew or tries again
                continue


async def replace(work: TopicWork, segment_id: int, notify: Notify) -> None:
    """Put others in the place of an active segment that takes no more messages: its halves, or what joins it with a neighbour
    if it covers one hash only. A topic that has all the segments it may have gets them all the same."""
    ordered = work.layout.active_in_order
    at = next(number for number, one in enumerate(ordered) if one.segment_id == segment_id)
    if ordered[at].hash_range.size > 1:
        async with step("split:intend"):
            await _intend(work, "split", (segment_id,), lambda layout, now: layout.split(segment_id, now), is_limited=False)
    else:
        left = at - 1 if at else at
        first, second = ordered[left].segment_id, ordered[left + 1].segment_id
        async with step("merge:intend"):
            await _intend(
                work, "merge", (first, second), lambda layout, now: layout.merge(first, second, now), is_limited=False
            )
    await roll_forward(work, notify)


async def roll_forward(work: TopicWork, notify: Notify) -> None:
    """Finish the split or merge that the record shows."""
    pending = work.pending
    if pending is None:
        return
    kind = pending.kind
    children = [from_record(each) for each in pending.children]
    if pending.stage == "prepare":
        parents = [work.layout.segment(each) for each in pending.parents]
        async with step(f"{kind}:discover"):
            subscriptions = await _discover(work, parents)
        async with step(f"{kind}:create-children"):
            for child in children:
                await work.create(child, subscriptions)
        known: list[Mapping[str, int]] = []
        for parent in parents:
            async with step(f"{kind}:seal-parent"):
                known.append((await work.terminate(parent)).producers)
        producers = _together(known)
        async with step(f"{kind}:hand-over-producers"):
            if producers:
                await each(children, lambda child: work.create(child, subscriptions, producers))
        async with step(f"{kind}:flip"):
            await _flip(work, pending)
    async with step(f"{kind}:late-cursors"):
        await _late_cursors(work, pending, children)
    async with step(f"{kind}:finish"):
        await finish(work, pending)
    async with step(f"{kind}:notify"):
        notify(work.layout)


def _together(known: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """The producers of all parents with their highest numbers, in each parent those it heard from longest ago first, and so
    together: a child that remembers fewer forgets the first, and must not forget those who are active in one of the parents."""
    latest_first = zip_longest(*[reversed(list(producers.items())) for producers in known])
    found: dict[str, int] = {}
    for name, last in (producer for rank in latest_first for producer in rank if producer is not None):
        found[name] = max(last, found.get(name, last))
    return dict(reversed(found.items()))


async def finish(work: TopicWork, pending: PendingOperation) -> None:
    """Take the operation out of the record."""

    def modify(value: ScalableTopicMetadata) -> ScalableTopicMetadata:
        if _is(value, pending):
            return msgspec.structs.replace(value, pending_operation=None)
        return value

    await work.change(modify)


async def _intend(
    work: TopicWork,
    kind: str,
    parents: tuple[int, ...],
    change: Callable[[SegmentLayout, int], SegmentLayout],
    *,
    is_limited: bool = True,
) -> None:
    now, operation_id = work.runtime.clock.now_ms(), work.runtime.token()
    limit = work.config.max_segments_per_topic

    def modify(value: ScalableTopicMetadata) -> ScalableTopicMetadata:
        no_other(value)
        old = value.layout
        try:
            new = change(old, now)
        except (NotFound, PreconditionFailed) as error:
            raise type(error)(f"The {kind} of {work.topic} is refused: {error.message}") from None  # a layout knows no names
        if is_limited and len(new.all_segments) > limit:
            has_sealed = len(old.all_segments) > len(old.active_segments)
            raise PreconditionFailed(
                f"{work.topic} would have {len(new.all_segments)} segments after the {kind}, sealed ones included; "
                f"{limit} are allowed. "
                + ("Wait until retention has removed sealed ones, or raise " if has_sealed else "Raise ")
                + "scalable_topics.max_segments_per_topic."
            )
        children = tuple(to_record(new.segment(each)) for each in range(old.next_segment_id, new.next_segment_id))
        pending = PendingOperation(
            kind="merge" if len(parents) > 1 else "split",
            operation_id=operation_id,
            started_ms=now,
            parents=parents,
            children=children,
        )
        return msgspec.structs.replace(value, pending_operation=pending)

    await work.change(modify)


async def _discover(work: TopicWork, parents: list[SegmentInfo]) -> set[str]:
    """Every subscription the children need: those of the topic, and those only a parent's owner knows (INV7)."""
    found = set(await work.cursors())
    for parent in parents:
        try:
            found.update(await _cursors_on(work, parent))
        except TopicNotFound:
            await work.create(parent, found)  # active but never made, or lost: an empty one can be sealed
    return found


async def _cursors_on(work: TopicWork, parent: SegmentInfo) -> set[str]:
    """A parent's cursors; those of deleted subscriptions, which only wait for their removal, are not passed on."""
    on_parent = set(await work.segments.subscriptions(work.name(parent)))
    seen_stray = set().union(*work.strays.values())
    return {name for name in on_parent if name not in seen_stray or await work.has_record(name)}


async def _flip(work: TopicWork, pending: PendingOperation) -> None:
    # Not before the seal: whoever looks for messages by time must not think that the parent ended earlier than it did.
    sealed_ms = max(work.runtime.clock.now_ms(), pending.started_ms)

    def modify(value: ScalableTopicMetadata) -> ScalableTopicMetadata:
        if not _is(value, pending) or value.pending_operation is None or value.pending_operation.stage == "finish":
            return value  # done already: the answer to an earlier attempt was lost
        old = value.layout
        new = pending.applied_to(old, sealed_ms)
        made = tuple(to_record(new.segment(each)) for each in range(old.next_segment_id, new.next_segment_id))
        invariant(made == pending.children, "INV6", f"the layout of {work.topic} changed under its pending {pending.kind}")
        return msgspec.structs.replace(value, pending_operation=msgspec.structs.replace(pending, stage="finish")).with_layout(
            new
        )

    await work.change(modify)


async def _late_cursors(work: TopicWork, pending: PendingOperation, children: list[SegmentInfo]) -> None:
    """Cursors for subscriptions made while the children were: on the topic, or on a parent before it was sealed. One that was
    made when the layout showed the children already begins in them where it wants to."""
    records = await work.cursors()
    wanted = set(records)
    for number in pending.parents:
        parent = work.layout.all_segments.get(number)
        if parent is not None:
            try:
                wanted.update(await _cursors_on(work, parent))
            except TopicNotFound:
                continue  # a sealed segment without a topic has nothing left to give

    async def complete(child: SegmentInfo) -> None:
        missing = wanted - set(await work.segments.subscriptions(work.name(child)))
        for name in sorted(missing):
            record = records.get(name)
            await work.create_cursor(child, name, "earliest" if record is None else initial_for(record, child))

    await each(children, complete)


def _is(value: ScalableTopicMetadata, pending: PendingOperation) -> bool:
    found = value.pending_operation
    return found is not None and found.operation_id == pending.operation_id
