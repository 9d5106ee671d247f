"""`Elders`: what a producer's name stored in the segments that the segment of a lane came from.

A lane counts for itself, under a name of its own, so its broker does not find a message that an earlier process stored in a
parent. It knows the parent's last number, though (the leader put it there when the parent was sealed), and the ranges say which
of several parents a key belonged to: two that were merged are judged each for itself. Only numbers that the application gave
are compared; those of a lane's own counting mean nothing in another lane.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from braid.errors import BraidError, NotAllowed
from braid.model.hashranges import HashRange
from braid.model.layout import SegmentLayout
from braid.model.routing import Routing, ring_hash

if TYPE_CHECKING:
    from braid.client.client import Client
    from braid.client.layouts import LayoutSession

log = logging.getLogger(__name__)


class Elders:
    """See the module. `numbers` are the last ones by segment id, `ranges` those of these segments, as far as they are known."""

    def __init__(self, topic: str, routing: Routing, numbers: Mapping[int, int], ranges: Mapping[int, HashRange]) -> None:
        self.highest = max(numbers.values(), default=-1)
        self._topic = topic
        self._routing = routing
        self._known = [(ranges[segment_id], last) for segment_id, last in numbers.items() if segment_id in ranges]
        self._lost = max(((last, each) for each, last in numbers.items() if each not in ranges), default=(-1, -1))

    @property
    def has_lost(self) -> bool:
        """Whether the keys of one of them are not known."""
        return self._lost[0] >= 0

    def have(self, key: str, number: int) -> bool:
        """Whether one of them stored the message of this key and number. Raises NotAllowed if that cannot be told."""
        at = ring_hash(self._routing, key)
        if any(number <= last and covered.covers(at) for covered, last in self._known):
            return True
        last, segment_id = self._lost
        if number <= last:
            raise NotAllowed(
                f"Whether message {number} is stored cannot be told: segment {segment_id} of {self._topic}, to which this name "
                f"sent before, was removed so long ago that its keys are not known any more. Use sequence ids above {last}."
            )
        return False


class ElderRanges:
    """Which keys the segments of a topic had, those included that it has no more. One of a producer."""

    def __init__(self, client: Client, topic: str) -> None:
        self._client = client
        self._topic = topic
        self._removed: dict[int, HashRange] = {}

    def elders(self, layout: SegmentLayout, numbers: Mapping[int, int]) -> Elders:
        """As far as it is known now; `ask` if that is not all."""
        present = {number: each.hash_range for number, each in layout.all_segments.items()}
        return Elders(self._topic, layout.routing, numbers, self._removed | present)

    async def ask(self, session: LayoutSession) -> None:
        """Ask the topic for its removed segments. If it does not answer, what was known stays."""
        reads = self._client.segment_reads()
        try:
            found = await reads.pruned(str(session.resolved))
            if found.incarnation == session.incarnation:
                self._removed = {number: end.hash_range for number, end in found.ends.items() if end.hash_range is not None}
        except BraidError as error:
            log.warning("which keys removed segments of %s had is not known: %s", self._topic, error)
        finally:
            await reads.close()


def routing_key(key: str | None, sequence_id: int | None) -> str | None:
    """What chooses the segment of a message: its key, else the number that the application gave, so that it goes the same way
    when it is sent again; None if it may go anywhere."""
    return key if key is not None or sequence_id is None else str(sequence_id)
