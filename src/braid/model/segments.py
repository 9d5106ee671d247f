"""`SegmentInfo`: one segment of a scalable topic as its layout shows it, and the name of the topic that stores it. Pure."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

from braid.model.hashranges import HashRange
from braid.model.names import TopicName

NOT_SEALED: Final = -1
"""In place of an epoch or a time: the segment is not sealed (decision D-3)."""


class SegmentState(StrEnum):
    """Whether producers may write to a segment."""

    ACTIVE = "ACTIVE"
    SEALED = "SEALED"


class SegmentEnd(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """Where a sealed segment ends, for ever: one above the index of its last message, and the position of its last entry."""

    index: int
    ledger_id: int
    entry_id: int
    hash_range: HashRange | None = None
    """Which keys it had, where that is remembered of a removed one."""


class SegmentInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A node of the DAG."""

    segment_id: int
    hash_range: HashRange
    state: SegmentState = SegmentState.ACTIVE
    parent_ids: tuple[int, ...] = ()
    child_ids: tuple[int, ...] = ()
    created_at_epoch: int = 0
    sealed_at_epoch: int = NOT_SEALED
    created_at_ms: int = 0
    sealed_at_ms: int = NOT_SEALED
    legacy_topic_name: str | None = None
    """The `persistent://` topic that stores the segment, if it was one before."""

    @property
    def is_active(self) -> bool:
        return self.state is SegmentState.ACTIVE

    @property
    def is_sealed(self) -> bool:
        return self.state is SegmentState.SEALED

    def sealed(self, children: tuple[int, ...], epoch: int, now_ms: int) -> SegmentInfo:
        """This segment after a split or merge made `children` of it."""
        return msgspec.structs.replace(
            self, state=SegmentState.SEALED, child_ids=children, sealed_at_epoch=epoch, sealed_at_ms=now_ms
        )


def physical_name(topic: TopicName, segment: SegmentInfo) -> TopicName:
    """The topic that stores the segment: `segment://...`, or the regular topic it was before. Used wherever one is named."""
    if segment.legacy_topic_name is not None:
        return TopicName.parse(segment.legacy_topic_name)
    return topic.scalable.segment(segment.hash_range, segment.segment_id)
