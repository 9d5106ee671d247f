"""Who is attached to segments: `Departures`, consumers that left without a word, and waiting until all have let go.

Pulsar's Java client closes a stream consumer by closing its segment consumers and tells the controller nothing, so that its
segments would stay with a ghost as long as the client lives. The owners of the segments know better: somebody who closed its
segment consumers itself and is attached nowhere has left. Careful, because a mistake takes segments from a live consumer: all
of them must have been seen, without any consumer, for a while, and while somebody else could read them. Clients that tell
when they leave (Braid's own) are never taken for gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from braid.errors import BraidError, InvariantBroken
from braid.model.layout import SegmentLayout
from braid.model.names import TopicName
from braid.model.segments import SegmentInfo, physical_name
from braid.runtime.clock import Clock
from braid.scalable.api import SegmentBacklog, SegmentOps
from braid.scalable.sessions import ConsumerSession

log = logging.getLogger(__name__)
LOOK_SECONDS: Final = 1.0
LEFT_SECONDS: Final = 3.0
"""Attached nowhere for so long, after having been seen attached, is gone; one never seen but known to have closed a segment
consumer gets twice as long, because that may have been an earlier one of its name."""
CONCURRENT: Final = 8
RELEASE_SECONDS: Final = 3.0
"""How long a revocation waits for consumers to let go of their segments; the reset closes those that do not."""


class Departures:
    """Looks at the connected consumers of one subscription."""

    def __init__(
        self,
        clock: Clock,
        segments: SegmentOps,
        topic: TopicName,
        subscription: str,
        sessions: Mapping[str, ConsumerSession],
        layout: Callable[[], SegmentLayout],
        *,
        left: Callable[[ConsumerSession], None],
    ) -> None:
        self._clock = clock
        self._segments = segments
        self._topic = topic
        self._subscription = subscription
        self._sessions = sessions
        self._layout = layout
        self._left = left

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await self._clock.sleep(LOOK_SECONDS)
            if not (looked_at := [session for session in self._sessions.values() if self._is_looked_at(session)]):
                continue
            turns = asyncio.Semaphore(CONCURRENT)
            async with asyncio.TaskGroup() as group:
                for session in looked_at:
                    group.create_task(self._look(session, turns))

    def _is_looked_at(self, session: ConsumerSession) -> bool:
        if not session.is_connected or session.says_goodbye or not session.segments:
            return False
        # Somebody who is alone is left in peace once it was seen; nobody waits for its segments.
        return len(self._sessions) > 1 or not session.attached

    async def _look(self, session: ConsumerSession, turns: asyncio.Semaphore) -> None:
        handle, assigned = session.handle, session.segments
        async with turns:
            is_missing = await self._is_missing(session)
        if session.handle is not handle or session.segments != assigned:
            return  # it moved meanwhile; what was seen says nothing
        if not is_missing or len(self._sessions) < 2:
            session.missing_since = None
            return
        now = self._clock.monotonic()
        if session.missing_since is None:
            session.missing_since = now
        elif now - session.missing_since >= (LEFT_SECONDS if session.attached else 2 * LEFT_SECONDS):
            log.info("consumer %s of %s closed its segments; it is taken for gone", session.name, self._subscription)
            self._left(session)

    async def _is_missing(self, session: ConsumerSession) -> bool:
        """Attached to none of its segments, all of them seen and without any consumer, one with work left closed by itself."""
        has_closed = False
        for number in session.segments:
            segment = self._layout().all_segments.get(number)
            if segment is None:
                return False
            found = await self._ask(segment)
            if found is None:
                return False
            names = {session.name, f"{session.name}-seg-{number}"}
            if not names.isdisjoint(found.consumers):
                session.attached.update({number}.intersection(session.segments))
                return False
            if found.consumers:
                return False  # the owner before it has not let go yet
            if found.is_drained:
                continue  # closed because there is nothing left in it
            has_closed = has_closed or not names.isdisjoint(found.closed)
        return has_closed

    async def _ask(self, segment: SegmentInfo) -> SegmentBacklog | None:
        try:
            return await self._segments.backlog(physical_name(self._topic, segment), self._subscription)
        except BraidError as error:
            log.debug("who is attached to segment %d is unknown: %s", segment.segment_id, error)
        except InvariantBroken:
            raise
        except Exception:  # or nobody would ever look at any consumer again
            log.exception("who is attached to segment %d could not be asked", segment.segment_id)
        return None


async def until_released(
    clock: Clock, segments: SegmentOps, topic: TopicName, subscription: str, left: Sequence[SegmentInfo]
) -> None:
    """Wait a little until nobody is attached to these segments any more."""
    ends = clock.monotonic() + RELEASE_SECONDS
    while clock.monotonic() < ends:
        left = [each for each in left if await _is_read(segments, physical_name(topic, each), subscription)]
        if not left:
            return
        await clock.sleep(0.05)


async def _is_read(segments: SegmentOps, segment: TopicName, subscription: str) -> bool:
    try:
        return bool((await segments.backlog(segment, subscription)).consumers)
    except BraidError as error:
        log.debug("who reads %s is unknown: %s", segment, error)
        return False
