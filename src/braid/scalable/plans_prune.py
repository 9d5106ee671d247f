"""Prune: sealed segments that retention no longer keeps and nobody needs leave the layout, then their topics are deleted.

One CAS takes them out, keeps their names in the record until the topics are gone (L-12), and notes where each of them ended: a
reader that had read all of it before it was sealed learns so, and does not take it for a loss. A segment goes only together
with all its ancestors: edges are cut when it goes, and a child that lost its parent but not its grandparent would be handed out
before the grandparent is drained (INV8). Must not be run beside a seek: both are operations of the topic and take turns.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec

from braid.errors import Conflict, SubscriptionNotFound, TopicNotFound
from braid.model.layout import SegmentLayout
from braid.model.segments import SegmentEnd, SegmentInfo
from braid.runtime.plans import step
from braid.scalable.api import UNTIL_REPAIRED, Retention, SegmentStats
from braid.scalable.plans import Notify, TopicWork, each, no_other
from braid.scalable.plans_layout import finish
from braid.scalable.plans_upkeep import remove_strays
from braid.scalable.records import PendingOperation, ScalableTopicMetadata, SubscriptionMetadata, from_record, to_record

log = logging.getLogger(__name__)
MINUTE_MS = 60_000


async def prune(work: TopicWork, retention: Retention, notify: Notify) -> list[int]:
    """Remove what can go and return its ids; a negative retention keeps everything."""
    if retention.minutes < 0:
        return []
    old_enough = work.runtime.clock.now_ms() - retention.minutes * MINUTE_MS
    candidates = [
        each
        for each in sorted(work.layout.all_segments.values(), key=lambda each: each.segment_id)
        if each.is_sealed and 0 < each.sealed_at_ms <= old_enough
    ]
    if not candidates:
        return []
    found: dict[int, SegmentStats] = {}
    async with step("prune:discover"):
        subscriptions = {name: record for name, record in (await work.subscriptions()).items() if record.type != "CHECKPOINT"}
        kept = dict.fromkeys(work.unreadable) | subscriptions
        doomed = await _prunable(work, candidates, kept, retention.unread_minutes, found)
    if not doomed:
        return []
    async with step("prune:flip"):
        await _flip(work, doomed, {number: stats.end for number, stats in found.items() if stats.end is not None})
    why = _reason(retention, is_read=bool(kept))
    for segment in candidates:
        stats = found.get(segment.segment_id)
        if segment.segment_id in doomed and stats is not None and (count := stats.messages - stats.trimmed) > 0:
            log.info("deleted %d messages of %s (%d bytes): %s", count, work.name(segment), stats.storage_size, why)
    await roll_forward(work, notify)
    return doomed


def _reason(retention: Retention, *, is_read: bool) -> str:
    """Why segments go, in the words of a trim (`managedledger/trimming.py`)."""
    if is_read:
        why = "every subscription has read them"
    elif retention.unread_minutes:
        return (
            f"no subscription wants them and they are older than {retention.unread_minutes} minutes (retention.unread_minutes)"
        )
    else:
        why = "the topic has no subscription"
    return f"{why}; the segment was sealed more than the policy's {retention.minutes} minutes ago" if retention.minutes else why


async def roll_forward(work: TopicWork, notify: Notify) -> None:
    """Finish the prune that the record shows."""
    pending = work.pending
    if pending is None:
        return
    async with step("prune:delete-topics"):
        await each([from_record(record) for record in pending.pruned], work.delete)
    async with step("prune:finish"):
        await finish(work, pending)
    async with step("prune:notify"):
        notify(work.layout)


async def _prunable(
    work: TopicWork,
    candidates: list[SegmentInfo],
    kept: Mapping[str, SubscriptionMetadata | None],
    unread_minutes: int,
    found: dict[int, SegmentStats],
) -> list[int]:
    """Ids of those that can go; `found` gets what the owners of segments say of them."""
    unread_since = None
    if unread_minutes and not kept:
        unread_since = -1 if unread_minutes < 0 else work.runtime.clock.now_ms() - unread_minutes * MINUTE_MS

    async def look(segment: SegmentInfo) -> bool:
        try:
            return await _is_drained(work, segment, kept, unread_since, found)
        except UNTIL_REPAIRED as error:  # it stays, with what comes after it; the others are none of its business
            log.info("%s is kept: %s", work.name(segment), error)
            return False

    drained = {segment.segment_id for segment, done in zip(candidates, await each(candidates, look), strict=True) if done}
    return sorted(number for number in drained if work.layout.ancestors(number) <= drained)


def _is_kept(segment: SegmentInfo, stats: SegmentStats, unread_since: int | None) -> bool:
    """Whether a segment must stay whatever subscriptions have read: somebody without one is in the middle of it, a transaction
    that wrote to it is open (to delete its writes would abort it), or its messages have not been kept long enough."""
    if stats.readers or stats.undecided:
        return True
    return unread_since is not None and stats.messages > 0 and (stats.last_append_ms or segment.sealed_at_ms) > unread_since


async def _is_drained(
    work: TopicWork,
    segment: SegmentInfo,
    subscriptions: Mapping[str, SubscriptionMetadata | None],
    unread_since: int | None,
    found: dict[int, SegmentStats],
) -> bool:
    """Whether nobody needs the segment. What has a message later than `unread_since` is kept because nobody has read it."""
    name = work.name(segment)
    try:
        found[segment.segment_id] = stats = await work.segments.stats(name)
        if _is_kept(segment, stats, unread_since):
            return False
        if not await remove_strays(work, segment, stats.backlog):
            return False
        for subscription in sorted(stats.backlog.keys() | subscriptions.keys()):
            try:
                backlog = await work.segments.backlog(name, subscription)
            except SubscriptionNotFound:
                if subscription in subscriptions and not _never_needs(segment, subscriptions[subscription]):
                    return False
                continue
            if not backlog.is_drained:
                return False
    except TopicNotFound:
        return True  # a sealed segment without a topic has nothing left to give (L-86)
    return True


def _never_needs(segment: SegmentInfo, record: SubscriptionMetadata | None) -> bool:
    """Whether a subscription without a cursor there will never want the segment, because it began behind its end. Nobody knows
    what one needs whose record is not understood."""
    return record is not None and record.initial == "latest" and segment.sealed_at_epoch <= record.created_at_epoch


async def _flip(work: TopicWork, doomed: list[int], ends: Mapping[int, SegmentEnd]) -> None:
    now, operation_id, epoch = work.runtime.clock.now_ms(), work.runtime.token(), work.layout.epoch

    def modify(value: ScalableTopicMetadata) -> ScalableTopicMetadata:
        no_other(value)
        old: SegmentLayout = value.layout
        if old.epoch != epoch:
            raise Conflict(f"The layout of {work.topic} changed from epoch {epoch} to {old.epoch} meanwhile.")
        pending = PendingOperation(
            kind="prune",
            operation_id=operation_id,
            stage="finish",
            started_ms=now,
            pruned=tuple(to_record(old.segment(number)) for number in doomed),
        )
        return msgspec.structs.replace(value.without(doomed, ends), pending_operation=pending)

    await work.change(modify)
