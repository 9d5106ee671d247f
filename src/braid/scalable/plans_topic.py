"""Create and delete a scalable topic: plans over the topic's record (INV5, INV6).

The record comes first and goes last: it says that the topic exists, and while it shows a pending create or delete, what is
left to do. A topic being deleted loses its segments and subscription records before its own record; only then does its leader
give up its office, so that nobody campaigns for a topic that is gone.
"""

from __future__ import annotations

import msgspec

from braid.errors import OutcomeUnknown, StoreUnavailable, VersionConflict
from braid.metadata.claims import ATTEMPTS
from braid.model.retention import RetentionPolicies
from braid.runtime.plans import step
from braid.scalable.plans import TopicGone, TopicWork, each, no_other
from braid.scalable.plans_layout import finish
from braid.scalable.records import PendingOperation, ScalableTopicMetadata, decode, from_record, topic_path


async def roll_create(work: TopicWork) -> None:
    """Finish the creation that the record shows."""
    pending = work.pending
    if pending is None:
        return
    async with step("create:clear-leftovers"):
        await work.delete_subscription_records()  # put by somebody who did not see an earlier topic of this name go
    async with step("create:segments"):
        await each(work.layout.active_in_order, lambda segment: work.create(segment, ()))
    async with step("create:finish"):
        await finish(work, pending)


async def delete(work: TopicWork, *, force: bool = False) -> None:
    """Say in the record that the topic is being deleted; `roll_delete` must follow. Raises Conflict if another operation is not
    finished, unless `force` is given: then the deletion takes its place, and its segments go too."""
    now, operation_id = work.runtime.clock.now_ms(), work.runtime.token()

    def modify(value: ScalableTopicMetadata) -> ScalableTopicMetadata:
        if value.is_deleting:
            return value
        if not force:
            no_other(value)
        other = value.pending_operation
        pending = PendingOperation(
            kind="delete",
            operation_id=operation_id,
            started_ms=now,
            children=() if other is None else other.children,
            pruned=() if other is None else other.pruned,
        )
        return msgspec.structs.replace(value, pending_operation=pending)

    async with step("delete:intend"):
        await work.change(modify)


async def roll_delete(work: TopicWork) -> None:
    """Finish the deletion that the record shows; coordinators were closed before."""
    pending = work.pending
    if pending is None:
        return
    async with step("delete:segments"):
        doomed = dict(work.layout.all_segments)
        doomed.update({record.segment_id: from_record(record) for record in (*pending.children, *pending.pruned)})
        await each(doomed.values(), work.delete)
    async with step("delete:subscriptions"):
        await work.delete_subscription_records()
    async with step("delete:record"):
        await _delete_record(work)


async def _delete_record(work: TopicWork) -> None:
    key = topic_path(work.topic)
    for _attempt in range(ATTEMPTS):
        record = await work.store.get(key, fresh=True)
        if record is None:
            return
        value = decode(ScalableTopicMetadata, key, record.value)
        if value.incarnation != work.incarnation:
            raise TopicGone(f"{work.topic} was deleted and made anew; this leader belongs to the old one.")
        if value.leader_epoch != work.leadership.epoch:
            await work.claim()  # raises if the other one came later
            continue
        work.check()
        try:
            await work.store.delete(key, expected=record.version)
        except (VersionConflict, OutcomeUnknown):
            continue
        return
    raise StoreUnavailable(f"{key} could not be removed in {ATTEMPTS} attempts; it is tried again after a while.")


async def set_retention(work: TopicWork, policy: RetentionPolicies | None) -> None:
    """Say how long the topic keeps messages, beside whatever is under way, which keeps what it does not know."""
    try:
        await work.change(lambda value: msgspec.structs.replace(value, retention_policies=policy))
    except OutcomeUnknown:
        await work.refresh()  # the next prune goes by what is written
        if work.metadata.retention_policies != policy:
            raise
