"""`GroupReports`: what a member of a checkpoint group tells the group about its places.

Sends one report at a time, in order, until the topic's leader has taken it; what changes meanwhile is told by the next one.
What is to be told, and when, is the consumer's business. `further` says which of two places of one segment comes later.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from braid.client.checkpoints import END, Place, read_place, write_place
from braid.client.messages import MessageId, is_after
from braid.errors import BraidError, CheckpointInvalid, NotFound, Rejected
from braid.runtime.tasks import Tasks

if TYPE_CHECKING:
    from braid.client.consumer_session import Assignment, ConsumerSession

log = logging.getLogger(__name__)
AT_ONCE: Final = 1000
"""Places in one report."""
CHECKPOINT_SECONDS: Final = 5.0
"""Between two checkpoints of a member that its group is told."""


class GroupReports:
    """See the module."""

    def __init__(self, session: ConsumerSession, name: str) -> None:
        self._session = session
        self._name = name
        self._due: dict[int, tuple[Place | None, bool]] = {}
        """By segment: its place, and whether it was let go of."""
        self._expected: set[int] = set()
        """Segments whose place is being found out."""
        self._starts: set[int] = set()
        """Segments of which the group was not told yet where the member began, perhaps before the place that it knows."""
        self._is_settled = asyncio.Event()
        self._is_settled.set()
        self._news = asyncio.Event()
        self._tasks = Tasks(f"reports of {name}")
        self._is_running = False
        self._is_ended = False
        self._told_at = float("-inf")
        self._newest: Mapping[int, Place] = {}
        """The last checkpoint that the application took, of the segments that the member has had since."""

    def tell(self, segment_id: int, place: Place | None, *, is_released: bool = False, is_start: bool = False) -> None:
        """The member stands there; None if it does not know. A segment that it let go of is told so once."""
        if self._is_ended:
            return
        if is_start or segment_id in self._expected:
            self._starts.add(segment_id)
        self._expected.discard(segment_id)
        if not self._is_released(segment_id):
            self._due[segment_id] = (place, is_released)
        if self._due and not self._is_running:
            self._is_running = True
            self._tasks.spawn(self._run(), "report")
        self._settle()
        self._news.set()

    def expect(self, segment_id: int) -> None:
        """Its place will be told."""
        self._expected.add(segment_id)
        self._settle()

    def is_expected(self, segment_id: int) -> bool:
        """Whether its place is still to be told."""
        return segment_id in self._expected

    def is_start_untold(self, segment_id: int) -> bool:
        """Whether the group does not know yet that the member began there, perhaps before the place that it knows."""
        return segment_id in self._expected or (segment_id in self._starts and segment_id in self._due)

    def stop_expecting(self, segment_id: int) -> None:
        """Its place cannot be told."""
        self._expected.discard(segment_id)
        self._settle()

    def forget(self, segment_id: int) -> Place | None:
        """It is the member's again: returns where it was let go of, if that is not told yet."""
        place = None
        if self._is_released(segment_id):
            place = self._due.pop(segment_id)[0]
            self._starts.discard(segment_id)
        self._settle()
        return place

    def checkpoint_taken(self, places: Mapping[int, Place]) -> None:
        """Tell the one before this: an application that takes another has stored the last."""
        if not self._session.is_managed:
            return  # the controller does not know of places
        before, self._newest = self._newest, places
        now = self._session.client.runtime.clock.monotonic()
        if before and now - self._told_at >= CHECKPOINT_SECONDS:
            self._told_at = now
            for segment_id, place in before.items():
                self.tell(segment_id, place)

    def follow(self, assignment: Assignment) -> None:
        """Forget what is not to be told any more, also if the segment comes back: others have it, or had it while this member
        was away and stand further. Else the group would be set back to where this member was. That it was away is not always
        known here: its broker may have registered it again by itself."""
        assigned, owed, known = assignment.topics, assignment.owed, assignment.places
        self._newest = {
            number: place
            for number, place in self._newest.items()
            if number in assigned and not _is_behind(place, known.get(number), number)
        }
        for number, (place, is_released) in list(self._due.items()):
            if number not in assigned:
                is_void = number not in owed
            else:
                is_own = is_released or number in self._starts
                is_void = not is_own and _is_behind(place, known.get(number), number)
            if is_void:
                del self._due[number]
                self._starts.discard(number)
        self._settle()

    async def say_farewell(self, places: Mapping[int, Place]) -> None:
        """Leave the places to the others; if nobody takes them in time, they begin where the group was last. Ends it."""
        if self._session.is_managed and not self._is_ended:
            for segment_id, place in places.items():
                self.tell(segment_id, place)
            if not await self.flush(self._session.client.config.operation_timeout):
                log.warning("%s could not tell its group where it stopped", self._name)
        await self.close()

    async def flush(self, seconds: float) -> bool:
        """Wait until everything was taken: whether it was."""
        try:
            async with asyncio.timeout(seconds):
                await self._is_settled.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Tell nothing more. Idempotent."""
        self.stop()
        await self._tasks.close()

    def stop(self) -> None:
        """The group does not listen any more. Idempotent."""
        self._is_ended = True
        self._due.clear()
        self._expected.clear()
        self._settle()
        self._tasks.cancel()

    def _is_released(self, segment_id: int) -> bool:
        found = self._due.get(segment_id)
        return found is not None and found[1]

    def _settle(self) -> None:
        if self._due or self._expected:
            self._is_settled.clear()
        else:
            self._is_settled.set()

    async def _run(self) -> None:
        client = self._session.client
        pause = client.config.backoff_initial
        while True:
            await self._news.wait()
            self._news.clear()
            while self._due:
                some = dict(list(self._due.items())[:AT_ONCE])
                places = {number: None if place is None else write_place(place) for number, (place, _) in some.items()}
                try:
                    await self._session.report(places, [number for number, (_, is_released) in some.items() if is_released])
                except (NotFound, Rejected) as error:
                    log.warning("the places of %s are not taken, so they are known from earlier only: %s", self._name, error)
                except BraidError as error:
                    log.info("the places of %s are told again: %s", self._name, error)
                    await client.runtime.clock.sleep(pause * (0.5 + client.runtime.random.random()))
                    pause = min(pause * 2, client.config.backoff_max)
                    continue
                pause = client.config.backoff_initial
                for number, told in some.items():
                    if self._due.get(number) == told:
                        del self._due[number]
                        self._starts.discard(number)
                self._settle()


def _is_behind(place: Place | None, known: bytes | None, segment_id: int) -> bool:
    """Whether the group stands further in a segment."""
    try:
        return place is not None and bool(known) and further(read_place(known or b"", segment_id), place)
    except CheckpointInvalid:
        return False  # whoever takes the segment up is told


def further(one: Place, other: Place) -> bool:
    """Whether the first of two places of a segment comes after the second."""
    ranks = _rank(one), _rank(other)
    if ranks[0] == ranks[1] and isinstance(one, MessageId) and isinstance(other, MessageId):
        return is_after(one, other)
    return ranks[0] > ranks[1]


def _rank(place: Place) -> int:
    if place is END:
        return 2
    return 1 if isinstance(place, MessageId) and 0 <= place.ledger_id < 1 << 62 else 0
