"""The hand-over of segments inside a checkpoint group: what the group knows of its places, and who has to say one first.

Checkpoint consumers have no cursors, so where a group stands in a segment is known to the member that reads it. A segment that
is to move is therefore taken away first; its member stops handing out, says where it stopped, and only then, with that place in
the group's record, the next one is given it. A member that is gone says nothing: the segment goes on from the last place in the
record, so what was handed out since comes again. Owns the places, in memory and in the record, and the rule what may be given.
A place is the members' own affair: bytes that are kept and handed on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from braid.errors import InvalidArgument
from braid.metadata.claims import GuardedRecord
from braid.model.layout import SegmentLayout
from braid.model.segments import SegmentInfo
from braid.scalable.records import SubscriptionMetadata
from braid.scalable.sessions import ConsumerSession

MAX_PLACE: Final = 64
"""Bytes of one place."""


class GroupPlaces:
    """Where one group stands."""

    def __init__(self, record: GuardedRecord[SubscriptionMetadata], found: SubscriptionMetadata) -> None:
        self._record = record
        self._created_at_epoch = found.created_at_epoch
        self._known = dict(found.places)
        self._is_empty = found.empty_since_ms is not None

    def of(self, segment: SegmentInfo) -> bytes | None:
        """Where a member begins: the last place that is known, the beginning (empty) of a segment that is younger than the
        group, or None: it is the first one there and begins where it wants to."""
        known = self._known.get(segment.segment_id)
        if known is None and segment.created_at_epoch > self._created_at_epoch >= 0:
            return b""
        return known

    def forget(self, segments: set[int]) -> None:
        """These ids mean other segments from now on."""
        for number in segments:
            self._known.pop(number, None)

    async def learn(self, places: Mapping[int, bytes], layout: SegmentLayout) -> None:
        """Members stand there; durable when this returns. Raises StaleLeader, NotFound, StoreError."""
        kept = {number: place for number, place in (self._known | dict(places)).items() if number in layout.all_segments}
        if kept == self._known:
            return
        await self._record.change(lambda old: msgspec.structs.replace(old, places=kept))
        self._known = kept

    async def is_used(self) -> None:
        """The group has a member: its record does not end."""
        if self._is_empty:
            await self._record.change(lambda old: msgspec.structs.replace(old, empty_since_ms=None))
            self._is_empty = False

    async def is_empty(self, since_ms: int) -> int:
        """Nobody is left since then: returns since when the record says so. Raises as `learn`."""

        def note(old: SubscriptionMetadata) -> SubscriptionMetadata:
            return old if old.empty_since_ms is not None else msgspec.structs.replace(old, empty_since_ms=since_ms)

        self._is_empty = True
        found = await self._record.change(note)
        return since_ms if found.empty_since_ms is None else found.empty_since_ms


def restrained(wanted: Mapping[str, tuple[int, ...]], sessions: Mapping[str, ConsumerSession]) -> dict[str, tuple[int, ...]]:
    """What may be given now of an assignment: nothing that somebody has still to say the place of, not even to itself, so that
    each time a segment is taken away is answered once. Those who lose something owe it from here on."""
    dealt = {number for each in wanted.values() for number in each}
    for name, session in sessions.items():
        session.owed &= dealt
        if session.hands_over:
            session.owed |= (set(session.segments) & dealt) - set(wanted[name])
    owed = {number for each in sessions.values() for number in each.owed}
    given = {name: tuple(number for number in each if number not in owed) for name, each in wanted.items()}
    for name, session in sessions.items():
        is_waiting = len(given[name]) < len(wanted[name])
        session.is_untold |= session.is_waiting and not is_waiting
        session.is_waiting = is_waiting
    return given


def check_places(places: Mapping[int, bytes | None]) -> None:
    """Raise InvalidArgument for what no member of a group reports."""
    for number, place in places.items():
        if place is not None and len(place) > MAX_PLACE:
            raise InvalidArgument(
                f"A place of {len(place)} bytes was reported for segment {number}; a place has at most {MAX_PLACE}."
            )
