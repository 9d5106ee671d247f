"""What a leader looks after while nothing is asked of it (INV15): active segments are there, can be written and have the
cursors of every subscription; cursors that belong to no subscription go.

A missing topic is made anew (L-06), a missing cursor is made, and an active segment whose log was terminated without an
operation is replaced (L-04), because nobody could ever write to its range again. Runs as an operation of the topic, so no
layout changes meanwhile; each repair can be repeated. Where nothing is to be looked after, a topic is left at rest.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import msgspec

from braid.errors import NotAllowed, TopicNotFound
from braid.model.segments import SegmentInfo
from braid.runtime.plans import step
from braid.scalable.api import UNTIL_REPAIRED
from braid.scalable.draining import initial_for
from braid.scalable.plans import Notify, TopicWork, each
from braid.scalable.plans_layout import replace

log = logging.getLogger(__name__)


async def look_after(work: TopicWork, notify: Notify) -> list[int]:
    """Repair what is wrong; returns the ids of segments that were made anew or replaced."""
    await work.remove_foreign_subscriptions()
    needed = await work.cursors()

    async def look(segment: SegmentInfo) -> tuple[int, bool] | None:
        try:
            return await repair(segment)
        except UNTIL_REPAIRED as error:  # by somebody else; the other segments are looked after all the same
            log.info("%s cannot be looked after: %s", work.name(segment), error)
            return None

    async def repair(segment: SegmentInfo) -> tuple[int, bool] | None:
        """The segment's id if it had to be made, or (True) must be replaced."""
        name = work.name(segment)
        try:
            stats = await work.segments.stats(name)
        except TopicNotFound:
            async with step("heal:create"):
                await work.create(segment, needed)
            log.warning("the topic of %s was missing and was made anew; what was in it is lost", name)
            return segment.segment_id, False
        for subscription in sorted(needed.keys() - stats.backlog.keys()):
            record = needed[subscription]
            initial = "earliest" if record is None else initial_for(record, segment)
            log.info("subscription %s had no cursor on %s and gets one (%s)", subscription, name, initial)
            async with step("heal:cursor"):
                await work.create_cursor(segment, subscription, initial)
        await remove_strays(work, segment, stats.backlog)
        return (segment.segment_id, True) if stats.is_terminated else None

    found = [item for item in await each(work.layout.active_in_order, look) if item is not None]
    repaired = [number for number, _is_terminated in found]
    for number, is_terminated in found:
        if is_terminated and number in work.layout.active_segments:
            log.warning("segment %d of %s was terminated although it is active; it is replaced", number, work.topic)
            await replace(work, number, notify)
    return repaired


async def is_unneeded(work: TopicWork) -> bool:
    """Whether the topic can be left alone: nothing is sealed, under way or to be repaired, and no client is there."""
    if (
        work.pending is not None
        or any(work.strays.values())
        or len(work.layout.active_segments) < len(work.layout.all_segments)
    ):
        return False
    records = await work.subscriptions()
    if work.unreadable or any(record.pending is not None for record in records.values()):
        return False
    needed = {name for name, record in records.items() if record.type != "CHECKPOINT"}

    async def is_free(segment: SegmentInfo) -> bool:
        stats = await work.segments.stats(work.name(segment))
        is_used = stats.producers or stats.readers or any(stats.consumers.values())
        return not is_used and not stats.is_terminated and needed <= stats.backlog.keys()

    return all(await each(work.layout.active_in_order, is_free))


async def rest(work: TopicWork) -> None:
    """Note in the record that nobody needs to lead the topic. The last thing that a leader does: after it, nothing may be begun
    under its epoch, because nobody would finish that. Raises as `TopicWork.change`."""
    epoch = work.leadership.epoch
    await work.change(
        lambda value: value if value.pending_operation is not None else msgspec.structs.replace(value, rested_epoch=epoch)
    )


async def remove_strays(work: TopicWork, segment: SegmentInfo, cursors: Iterable[str]) -> bool:
    """Remove the cursors of deleted subscriptions: those seen without a record twice. A consumer's attachment puts the record
    before the cursor, so nobody needs them. Returns whether there are none left."""
    stray = {name for name in cursors if name not in work.known and not await work.has_record(name)}
    seen_before = work.strays.get(segment.segment_id, set())
    left = work.strays[segment.segment_id] = stray - seen_before
    for name in sorted(stray & seen_before):
        if not await work.has_record(name):
            log.info("the cursor of %s on %s belongs to no subscription and is removed", name, work.name(segment))
            try:
                async with step("heal:remove-cursor"):
                    await work.delete_cursor(segment, name)
            except NotAllowed as error:  # somebody has attached since, and has put the record
                log.info("the cursor of %s on %s stays: %s", name, work.name(segment), error)
    return not left
