"""The hand-over of segments inside a checkpoint group: what the group knows of its places, and who has to say one first.

Checkpoint consumers have no cursors, so where a group stands in a segment is known to the member that reads it. A segment that
is to move is therefore taken away first; its member stops handing out, says where it stopped, and only then, with that place in
the group's record, the next one is given it. A member that is gone says nothing: the segment goes on from the last place in the
record, so what was handed out since comes again. So it is with one that is there and says nothing for too long.

A place means nothing in another log of the name (INV5), and no record of a regular topic tells when it was deleted and made
anew. So the record says which log each partition was; one that is another by now is younger than the group and is read from its
beginning. Whoever reads it has to let go of it first, because it stands at an old place; only then the record says the new log,
so that a leader that comes in between asks again.

Owns the places, in memory and in the record, and the rule what may be given. A place is the members' own affair: bytes that are
kept and handed on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import msgspec

from braid.errors import InvalidArgument, StoreMismatch
from braid.metadata.claims import GuardedRecord
from braid.model.layout import SegmentLayout
from braid.model.names import TopicName
from braid.model.segments import SegmentInfo, physical_name
from braid.runtime.clock import Clock, Timer
from braid.scalable.api import LogOf, PlaceReport
from braid.scalable.plans import each
from braid.scalable.records import SubscriptionMetadata, partitions_of
from braid.scalable.sessions import ConsumerSession

log = logging.getLogger(__name__)
MAX_PLACE: Final = 64
"""Bytes of one place."""
LEAST_SECONDS: Final = 0.01
"""Until the next look whether somebody is late: timers and clocks differ by a little."""


class GroupPlaces:
    """Where one group stands."""

    def __init__(
        self,
        clock: Clock,
        record: GuardedRecord[SubscriptionMetadata],
        found: SubscriptionMetadata,
        topic: TopicName,
        *,
        patience_seconds: float,
        changed: Callable[[], None],
        log_of: LogOf | None = None,
    ) -> None:
        """A member is waited for so long; `changed` is called when that has ended. `log_of` is for regular topics."""
        self._clock = clock
        self._record = record
        self._patience_seconds = patience_seconds
        self._changed = changed
        self._created_at_epoch, self._partitions = found.created_at_epoch, found.partitions
        self._known = dict(found.places)
        self._topic, self._log_of = topic, log_of
        self._logs = dict(found.logs)  # as the record says
        self._void: dict[int, str | None] = {}  # partitions that are another log by now, which the record does not say yet
        self._timer: Timer | None = None  # when the first of those who owe something is late
        self._is_empty = found.empty_since_ms is not None  # as far as the record may say so
        self._empty_since_ms: int | None = None  # what it says, once we have written that

    def of(self, segment: SegmentInfo) -> bytes | None:
        """Where a member begins: the last place that is known, the beginning (empty) of a segment that is younger than the
        group, or None: it is the first one there and begins where it wants to."""
        known = self._known.get(segment.segment_id)
        if known is None and self._is_younger(segment):
            return b""
        return known

    def _is_younger(self, segment: SegmentInfo) -> bool:
        if segment.created_at_epoch > self._created_at_epoch >= 0:
            return True
        # Layouts of regular topics have one epoch for ever, but partitions are only added.
        return segment.legacy_topic_name is not None and 0 < self._partitions <= segment.segment_id

    def forget(self, segments: set[int]) -> None:
        """These ids mean other segments from now on."""
        for number in segments:
            self._known.pop(number, None)

    async def check_logs(self, layout: SegmentLayout, sessions: Mapping[str, ConsumerSession]) -> bool:
        """Whether a partition is another log than its place is in: then it is taken away, and `settle` has to be called. Raises
        as `learn`."""
        found = await self._current(layout.all_segments.values())
        before = {number: log for number, log in self._void.items() if number not in found}
        now = {number: log for number, log in found.items() if number in self._logs and log != self._logs[number]}
        self._void = before | now
        until = self._clock.monotonic() + self._patience_seconds
        for session in sessions.values():
            lost = self._void.keys() & set(session.segments)
            if lost:
                log.warning("%s reads segments %s of %s, which were made anew", session.name, sorted(lost), self._topic)
                session.give(tuple(number for number in session.segments if number not in lost))
                if session.hands_over:
                    session.owed |= dict.fromkeys(lost, until)
        new = {number: log for number, log in found.items() if log is not None and number not in self._logs}
        if new:
            await self._write(self._known, self._logs | new)
        return bool(self._void)

    async def settle(self, sessions: Mapping[str, ConsumerSession]) -> bool:
        """Write down the new logs of partitions that nobody reads or owes any more: whether it did. Raises as `learn`."""
        busy = {number for each in sessions.values() for number in each.kept}
        done = {number: log for number, log in self._void.items() if number not in busy}
        if not done:
            return False
        logs = {number: log for number, log in (self._logs | done).items() if log is not None}
        await self._write(self._known | dict.fromkeys(done, b""), logs)
        self._void = {number: log for number, log in self._void.items() if number in busy}
        return True

    async def _current(self, segments: Iterable[SegmentInfo]) -> dict[int, str | None]:
        """Which log each is now, as far as that can be read."""
        log_of = self._log_of
        found: dict[int, str | None] = {}
        if log_of is None:
            return found

        async def look(segment: SegmentInfo) -> None:
            try:
                found[segment.segment_id] = await log_of(physical_name(self._topic, segment))
            except StoreMismatch as error:  # nobody can read from it either
                log.info("which log %s of %s is cannot be told: %s", segment.segment_id, self._topic, error)

        await each(segments, look)
        return found

    async def _write(self, places: dict[int, bytes], logs: dict[int, str]) -> None:
        await self._record.change(lambda old: msgspec.structs.replace(old, places=places, logs=logs))
        self._known, self._logs = places, logs

    def restrained(
        self, wanted: Mapping[str, tuple[int, ...]], sessions: Mapping[str, ConsumerSession]
    ) -> dict[str, tuple[int, ...]]:
        """What may be given now of an assignment: nothing that somebody has still to say the place of, not even to itself, so
        that each time a segment is taken away is answered once. Those who lose something owe it from here on, for a while."""
        now = self._clock.monotonic()
        dealt = {number for each in wanted.values() for number in each}
        for name, session in sessions.items():
            late = sorted(number for number, until in session.owed.items() if until <= now)
            if late:
                log.warning("%s did not say in time where it stopped in segments %s; they move without that", name, late)
                session.is_untold = True
            session.owed = {number: until for number, until in session.owed.items() if number in dealt and until > now}
            lost = (set(session.segments) & dealt) - set(wanted[name])
            if session.hands_over and lost:
                session.owed |= dict.fromkeys(lost, now + self._patience_seconds)
        owed = {number for each in sessions.values() for number in each.owed}
        self.stop()
        if owed:
            first = min(until for each in sessions.values() for until in each.owed.values())
            self._timer = self._clock.call_later(max(LEAST_SECONDS, first - now), self._changed)
        owed |= self._void.keys()
        given = {name: tuple(number for number in each if number not in owed) for name, each in wanted.items()}
        for name, session in sessions.items():
            is_waiting = len(given[name]) < len(wanted[name])
            session.is_untold |= session.is_waiting and not is_waiting
            session.is_waiting = is_waiting
        return given

    def stop(self) -> None:
        """Nobody is waited for any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def hear(self, session: ConsumerSession, report: PlaceReport, layout: SegmentLayout) -> bool:
        """A member says where it stands: whether it let go of something that it owed. Raises as `learn`."""
        held = {*session.segments, *session.owed} - self._void.keys()
        await self.learn(
            {number: place for number, place in report.places.items() if place is not None and number in held}, layout
        )
        freed = report.released & session.owed.keys()
        for number in freed:
            del session.owed[number]
        return bool(freed)

    async def learn(self, places: Mapping[int, bytes], layout: SegmentLayout) -> None:
        """Members stand there; durable when this returns. Raises StaleLeader, NotFound, StoreError."""
        kept = {number: place for number, place in (self._known | dict(places)).items() if number in layout.all_segments}
        if kept == self._known:
            return
        unseen = [layout.segment(number) for number in places if number in kept and number not in self._logs]
        found = await self._current(unseen)  # made by the member that is there
        await self._write(kept, self._logs | {number: log for number, log in found.items() if log is not None})

    async def is_used(self, now_ms: int, grace_seconds: float, layout: SegmentLayout) -> None:
        """The group has a member: its record does not end. One that should have ended by now, but had no leader that looked,
        begins anew. Raises as `learn`."""

        def use(old: SubscriptionMetadata) -> SubscriptionMetadata:
            if old.empty_since_ms is not None and now_ms - old.empty_since_ms >= grace_seconds * 1000:
                partitions = partitions_of("CHECKPOINT", layout)
                old = msgspec.structs.replace(old, places={}, created_at_epoch=layout.epoch, partitions=partitions)
            return msgspec.structs.replace(old, empty_since_ms=None)

        if self._is_empty:
            self._empty_since_ms = None
            found = await self._record.change(use)
            self._known = dict(found.places)
            self._created_at_epoch, self._partitions = found.created_at_epoch, found.partitions
            self._is_empty = False

    async def is_empty(self, since_ms: int) -> int:
        """Nobody is left since then: returns since when the record says so. Raises as `learn`."""

        def note(old: SubscriptionMetadata) -> SubscriptionMetadata:
            return old if old.empty_since_ms is not None else msgspec.structs.replace(old, empty_since_ms=since_ms)

        if self._empty_since_ms is None:
            self._is_empty = True
            self._empty_since_ms = (await self._record.change(note)).empty_since_ms
        return since_ms if self._empty_since_ms is None else self._empty_since_ms


def check_places(places: Mapping[int, bytes | None]) -> None:
    """Raise InvalidArgument for what no member of a group reports."""
    for number, place in places.items():
        if place is not None and len(place) > MAX_PLACE:
            raise InvalidArgument(
                f"A place of {len(place)} bytes was reported for segment {number}; a place has at most {MAX_PLACE}."
            )
