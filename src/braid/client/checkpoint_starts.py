"""`CheckpointStart`: where a checkpoint consumer begins in a segment, from the start that its application gave.

Owns whether a given checkpoint fits the topic as it is now. Where a group stands already is not looked at here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from braid.client.checkpoints import END, AtTime, Checkpoint, Place, check_fits, removed
from braid.client.messages import EARLIEST, LATEST, MessageId
from braid.client.reader_lanes import BEGINNING
from braid.errors import CheckpointInvalid, NotReady
from braid.model.layout import SegmentLayout
from braid.model.segments import SegmentEnd

if TYPE_CHECKING:
    from braid.client.layouts import LayoutSession


class CheckpointStart:
    """See the module."""

    def __init__(self, layouts: LayoutSession, given: MessageId | Checkpoint | AtTime, group: str | None) -> None:
        self.given = given
        self._layouts = layouts
        self._group = group

    async def check(self) -> None:
        """Raise CheckpointInvalid or CheckpointOutdated if the checkpoint does not fit. A segment may have been sealed and
        removed since, after all of it was read: the checkpoint cannot know that, but the topic remembers where such segments
        ended."""
        await self._wait_for_layout()
        layouts, start = self._layouts, self.given
        if not isinstance(start, Checkpoint):
            return
        topic, incarnation, is_whole = str(layouts.resolved), layouts.incarnation, self._group is None
        ends: Mapping[int, SegmentEnd] = {}
        if incarnation and removed(start, layouts.layout, is_whole=is_whole):
            reads = layouts.client.segment_reads()
            try:
                found = await reads.pruned(topic)
            finally:
                await reads.close()
            if found.incarnation == incarnation:
                ends = found.ends
        check_fits(start, topic, incarnation, layouts.layout, is_whole=is_whole, ends=ends)

    async def _wait_for_layout(self) -> None:
        """A broker that is behind may not know segments yet of which the checkpoint speaks."""
        layouts, start = self._layouts, self.given
        clock, config = layouts.client.runtime.clock, layouts.client.config
        deadline = clock.monotonic() + config.operation_timeout
        while isinstance(start, Checkpoint) and start.incarnation == layouts.incarnation:
            if start.next_segment <= layouts.layout.next_segment_id:
                return
            if clock.monotonic() >= deadline:
                raise NotReady(f"The layout of {layouts.topic} is older than the checkpoint; try again.")
            layouts.refresh()
            await clock.sleep(config.backoff_initial)

    def place_of(self, segment_id: int, layout: SegmentLayout, *, is_new: bool) -> Place:
        """Where to begin a segment that was there at the start, or came later (then from its beginning)."""
        start = self.given
        if isinstance(start, Checkpoint) and start.boundary is None:
            place = start.places.get(segment_id)
            if place is not None:
                return place
            if start.topic and segment_id < start.next_segment and self._group is None:
                raise CheckpointInvalid(
                    f"The checkpoint says nothing of segment {segment_id} of {self._layouts.topic}, because it was taken by a "
                    "member of a group; use it in that group, or start from EARLIEST, LATEST or a time."
                )
            return self.beginning if start.topic and segment_id >= start.next_segment else EARLIEST
        if isinstance(start, Checkpoint):
            start = start.boundary or EARLIEST
        if is_new:
            return self.beginning
        if isinstance(start, MessageId) and start == LATEST:
            info = layout.all_segments.get(segment_id)
            return END if info is None or info.is_sealed else LATEST
        return start if isinstance(start, AtTime) else EARLIEST

    @property
    def beginning(self) -> MessageId:
        """Of a segment that came later. In a group another member may have read what is not there any more."""
        return BEGINNING if self._group is None else EARLIEST
