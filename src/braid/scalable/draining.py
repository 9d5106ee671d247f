"""`DrainWatch`: which sealed segments one subscription has read to the end (INV8).

Owns the drained set and the looks that fill it: drained means terminated and nothing left, or a sealed topic that is gone
(L-86). A segment never stops being drained by itself; a seek does that, and `forget` makes every look under way worthless. The
first look after news comes soon, later ones ever more slowly up to a bound (L-18). Decides nothing about assignment.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Final

from braid.errors import BraidError, InvariantBroken, SubscriptionNotFound, TopicNotFound
from braid.model.assignment import assignable
from braid.model.layout import SegmentLayout
from braid.model.names import TopicName
from braid.model.segments import SegmentInfo, physical_name
from braid.model.subscriptions import cursor_start
from braid.runtime.clock import Clock
from braid.scalable.api import SegmentBacklog, SegmentOps
from braid.scalable.records import Initial, SubscriptionMetadata

log = logging.getLogger(__name__)
FIRST_SECONDS: Final = 0.1
"""Until the next look after something new."""
PROGRESS_SECONDS: Final = 0.5
"""Until the next look at the longest, while somebody reads on."""
PATIENCE_SECONDS: Final = 1.0
"""How long a caller waits for a look before it goes on with what is known."""
CONCURRENT: Final = 16
"""Segments asked at the same time."""


def initial_for(record: SubscriptionMetadata, segment: SegmentInfo) -> Initial:
    """Where a cursor that is missing on a segment begins (L-07)."""
    return cursor_start(record.initial, subscribed_at=record.created_at_epoch, created_at=segment.created_at_epoch)


class DrainWatch:
    """The drained set of one subscription."""

    def __init__(
        self,
        clock: Clock,
        segments: SegmentOps,
        topic: TopicName,
        subscription: str,
        record: SubscriptionMetadata,
        layout: SegmentLayout,
        *,
        epoch: int,
        incarnation: str,
        poll_seconds: float,
        is_wanted: Callable[[], bool],
        changed: Callable[[], None],
    ) -> None:
        self.drained: set[int] = set()
        self.left: dict[int, SegmentBacklog] = {}
        """What the last look found in segments that are not drained."""
        self._clock = clock
        self._segments = segments
        self._topic = topic
        self._subscription = subscription
        self._record = record
        self._layout = layout
        self._epoch = epoch
        self._incarnation = incarnation
        self._poll = poll_seconds
        self._is_wanted = is_wanted
        self._changed = changed
        self._generation = 0
        self._delay = FIRST_SECONDS
        self._due = 0.0  # monotonic time of the next look
        self._wake = asyncio.Event()
        self._looked: list[asyncio.Event] = []

    @property
    def waiting(self) -> list[SegmentInfo]:
        """Sealed segments that are not known to be drained."""
        return [each for number, each in self._layout.all_segments.items() if each.is_sealed and number not in self.drained]

    def know(self, drained: Iterable[int]) -> None:
        """Segments known to be drained from records."""
        self.drained.update(drained)

    def forget(self) -> None:
        """Cursors were or will be moved back: nothing is known any more."""
        self._generation += 1
        self.drained.clear()
        self.left.clear()

    def follow(self, layout: SegmentLayout) -> None:
        """The layout changed."""
        self._layout = layout
        self.drained.intersection_update(layout.all_segments)
        self.left = {number: each for number, each in self.left.items() if number in layout.all_segments}
        self.hurry()

    def hurry(self) -> None:
        """Look again soon."""
        self._delay = FIRST_SECONDS
        self._due = min(self._due, self._clock.monotonic() + FIRST_SECONDS)
        self._wake.set()

    async def look_now(self) -> None:
        """Return after a look that began after this call, or when patience ends."""
        if not self.waiting:
            return
        looked = asyncio.Event()
        self._looked.append(looked)
        self.hurry()
        timer = self._clock.call_later(PATIENCE_SECONDS, looked.set)
        try:
            await looked.wait()
        finally:
            timer.cancel()
            if looked in self._looked:
                self._looked.remove(looked)

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            self._wake.clear()
            if not self._looked and not await self._is_time():
                continue
            told, self._looked = self._looked, []
            await self._look()
            for each in told:
                each.set()
            self._due = self._clock.monotonic() + self._delay
            self._delay = min(self._delay * 2, self._poll)

    async def _is_time(self) -> bool:
        """Whether a look is due; if not, wait until it may be."""
        if not (self._is_wanted() and self.waiting):
            await self._wake.wait()
            return False
        if (rest := self._due - self._clock.monotonic()) <= 0:
            return True
        timer = self._clock.call_later(rest, self._wake.set)
        try:
            await self._wake.wait()
        finally:
            timer.cancel()
        return False

    async def _look(self) -> None:
        turns = asyncio.Semaphore(CONCURRENT)
        generation = self._generation
        # Nobody reads what is held back, so one look at it is enough until it is not.
        readable = {each.segment_id for each in assignable(self._layout, self.drained)}
        async with asyncio.TaskGroup() as group:
            for each in self.waiting:
                if each.segment_id in readable or each.segment_id not in self.left:
                    group.create_task(self._check(each, generation, turns))

    async def _check(self, segment: SegmentInfo, generation: int, turns: asyncio.Semaphore) -> None:
        name = physical_name(self._topic, segment)
        found: SegmentBacklog | None = None
        async with turns:
            try:
                found = await self._segments.backlog(name, self._subscription)
            except TopicNotFound:
                pass  # sealed and gone
            except SubscriptionNotFound:
                await self._heal(name, segment)
                return
            except BraidError as error:
                log.debug("whether %s is drained for %s is unknown: %s", name, self._subscription, error)
                return
            except InvariantBroken:
                raise
            except Exception:  # or nobody would ever look at any segment again
                log.exception("whether %s is drained for %s could not be asked", name, self._subscription)
                return
        if generation != self._generation or segment.segment_id not in self._layout.all_segments:
            return
        if found is None or found.is_drained:
            self.drained.add(segment.segment_id)
            self.left.pop(segment.segment_id, None)
            self.hurry()
            self._changed()
        else:
            before = self.left.get(segment.segment_id)
            self.left[segment.segment_id] = found
            if before is not None and found.messages < before.messages:
                self._delay = min(self._delay, PROGRESS_SECONDS)

    async def _heal(self, name: TopicName, segment: SegmentInfo) -> None:
        """A segment without a cursor never drains: make the one that is missing."""
        try:
            await self._segments.create_subscription(
                name,
                self._subscription,
                initial_for(self._record, segment),
                epoch=self._epoch,
                incarnation=self._incarnation,
            )
            self.hurry()
        except BraidError as error:
            log.info("the cursor of %s on %s is missing and could not be made: %s", self._subscription, name, error)
