"""`Losses`: what could not be read because it is not stored any more. Raises or counts, as `failOnDataLoss` says. Pure."""

from __future__ import annotations

import logging

from braid.errors import DataLost

log = logging.getLogger(__name__)
_REMEDY = (
    "Set failOnDataLoss=false to go on without them. To keep what is not read yet, set the option subscription or a longer "
    "retention."
)


class Losses:
    """Of one query. The same loss counts once, however often it is met."""

    def __init__(self, *, is_fatal: bool) -> None:
        self._is_fatal = is_fatal
        self._messages: dict[tuple[str, int, int], int] = {}
        self._segments: set[tuple[str, int]] = set()

    def trimmed(self, topic: str, segment: int, wanted: int, low: int) -> None:
        """The beginning of a segment is gone."""
        if self._is_fatal:
            raise DataLost(
                f"Messages of segment {segment} of {topic} are lost: it was to be read from index {wanted}, the first one "
                f"stored is {low}. {_REMEDY}",
                low,
            )
        if (topic, segment, wanted) not in self._messages:
            log.warning("segment %d of %s: %d messages from index %d on are lost", segment, topic, low - wanted, wanted)
        self._messages[topic, segment, wanted] = low - wanted

    def gone(self, topic: str, segment: int, wanted: int) -> None:
        """A whole segment is gone."""
        if self._is_fatal:
            raise DataLost(
                f"Messages of segment {segment} of {topic} may be lost: it was to be read from index {wanted}, the segment is "
                f"not stored any more. {_REMEDY}"
            )
        if (topic, segment) not in self._segments:
            log.warning("segment %d of %s is gone; index %d was to be read next", segment, topic, wanted)
        self._segments.add((topic, segment))

    def document(self) -> dict[str, int]:
        """The counts."""
        return {"messages": sum(self._messages.values()), "segments": len(self._segments)}
