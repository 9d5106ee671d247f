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
        self._gone: set[tuple[str, int, int]] = set()

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

    def gone(self, topic: str, segment: int, wanted: int, end: int | None = None) -> None:
        """A whole segment is gone; it was to be read up to `end`, if that is known."""
        if self._is_fatal and end is not None:
            raise DataLost(
                f"Messages of segment {segment} of {topic} are lost, {end - wanted} in number: it was to be read from index "
                f"{wanted} to {end}, the segment is not stored any more. {_REMEDY}"
            )
        if self._is_fatal:
            raise DataLost(
                f"Messages of segment {segment} of {topic} may be lost: it was to be read from index {wanted}, the segment is "
                f"not stored any more. {_REMEDY}"
            )
        if (topic, segment, wanted) not in self._gone:
            missing = "an unknown number of" if end is None else end - wanted
            log.warning("segment %d of %s is gone with %s messages from index %d on", segment, topic, missing, wanted)
        self._gone.add((topic, segment, wanted))
        if end is not None:
            self._messages[topic, segment, wanted] = end - wanted

    def is_counted(self, topic: str, segment: int, wanted: int) -> bool:
        """Whether what was to be read from here on is known to be gone."""
        return (topic, segment, wanted) in self._gone

    def document(self) -> dict[str, int]:
        """The counts."""
        return {"messages": sum(self._messages.values()), "segments": len({place[:2] for place in self._gone})}
