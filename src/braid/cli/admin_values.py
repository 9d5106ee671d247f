"""What users write on the command line as the values `AdminClient` takes: places in a topic, times, properties."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from braid.client.admin_scalable import Moment
from braid.client.admin_topics import End, Start, Target
from braid.client.messages import MessageId
from braid.errors import ConfigError

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_ID = re.compile(r"(\d{1,19}):(\d{1,19})(?::(-?\d{1,10}))?(?::(-?\d{1,10}))?")
_AGO = re.compile(r"(\d{1,9})([smhd])")
_NEXT_PAIR = re.compile(r",(?=[^,=]+=)")
"""A comma that is followed by another pair: one inside a value is part of it."""
_TIMES = "an age such as 90m, 12h or 2d, or a time such as 2026-01-31T12:00:00Z"


def message_id_of(text: str) -> MessageId:
    """`ledger:entry`, also with partition and index in the batch, as message ids are shown."""
    match = _ID.fullmatch(text)
    if match is None:
        raise ConfigError(f"{text[:100]!r} is no message id; write ledger:entry, such as 7:42.")
    return MessageId(int(match[1]), int(match[2]), int(match[3] or -1), int(match[4] or -1))


def start_of(text: str) -> Start:
    """An end of a topic or a message."""
    end = _end(text)
    if end is not None:
        return end
    if _ID.fullmatch(text):
        return message_id_of(text)
    raise ConfigError(f"{text[:100]!r} is no place in a topic; write earliest, latest or a message id such as 7:42.")


def target_of(text: str, now_ms: int) -> Target:
    """An end of a topic, a message, a time, or a time ago."""
    end = _end(text)
    if end is not None:
        return end
    if _ID.fullmatch(text):
        return message_id_of(text)
    found = _time(text, now_ms)
    if found is None:
        raise ConfigError(
            f"{text[:100]!r} is no place in a topic; write earliest, latest, a message id such as 7:42, {_TIMES}."
        )
    return found


def end_of(text: str) -> End:
    """An end of a topic: what a new subscription of a scalable topic can begin at."""
    end = _end(text)
    if end is None:
        raise ConfigError(f"{text[:100]!r} is no end of a topic; write earliest or latest.")
    return end


def moment_of(text: str, now_ms: int) -> Moment:
    """A time, or the beginning: where a subscription of a scalable topic can be put. Message ids are those of one segment."""
    if _end(text) == "earliest":
        return "earliest"
    found = _time(text, now_ms)
    if found is None:
        raise ConfigError(
            f"{text[:100]!r} is no time; write earliest, {_TIMES}. For the end of a scalable topic use clear-backlog."
        )
    return found


def _time(text: str, now_ms: int) -> datetime | None:
    """A time, or a time ago; None if it is neither."""
    ago = _AGO.fullmatch(text)
    try:
        if ago is not None:
            return datetime.fromtimestamp(now_ms / 1000, UTC) - timedelta(seconds=int(ago[1]) * UNITS[ago[2]])
        when = datetime.fromisoformat(text)
        return when.astimezone() if when.tzinfo is None else when
    except (ValueError, OverflowError):
        return None


def age_of(text: str) -> timedelta:
    """A time span."""
    match = _AGO.fullmatch(text)
    if match is None:
        raise ConfigError(f"{text[:100]!r} is no age; write a number and s, m, h or d, such as 30s, 90m, 12h or 2d.")
    return timedelta(seconds=int(match[1]) * UNITS[match[2]])


def pairs_of(texts: Sequence[str], *, may_be_joined: bool = False) -> dict[str, str]:
    """`key=value` each; if they may be joined, also `key=value,key=value`."""
    found: dict[str, str] = {}
    for text in [part for each in texts for part in (_NEXT_PAIR.split(each) if may_be_joined else [each])]:
        key, separator, value = text.partition("=")
        if not separator or not key:
            raise ConfigError(f"{text[:100]!r} is no property; write key=value.")
        if found.setdefault(key, value) != value:
            raise ConfigError(f"The property {key[:100]!r} is given twice.")
    return found


def _end(text: str) -> End | None:
    if text.lower() == "earliest":
        return "earliest"
    return "latest" if text.lower() == "latest" else None
