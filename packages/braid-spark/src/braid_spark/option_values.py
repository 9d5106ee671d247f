"""The values of options, from text. Each function returns what the text means or raises `Refused` with the end of a sentence.

Names of options are not known here. Pure.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Final

from braid.errors import InvalidTopicName
from braid.model.names import TopicName

NEAR: Final = 0.6
"""How alike a misspelt name must be to be suggested."""
_UNITS_MS: Final = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_UNITS_BYTES: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_DURATION: Final = re.compile(r"(\d+)\s*(ms|milliseconds?|s|sec(?:onds?)?|m|min(?:utes?)?|h|hours?|d|days?)?", re.ASCII)
_SIZE: Final = re.compile(r"(\d+)\s*(k|m|g)?(?:i?b)?", re.ASCII)


class Refused(Exception):
    """The end of the sentence about a value that cannot be used."""


def filled(value: str) -> str:
    if not value.strip():
        raise Refused("it must not be empty")
    return value.strip()


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    def parse(value: str) -> int:
        text = value.strip()
        if not re.fullmatch(r"-?\d{1,19}", text, re.ASCII) or int(text) < least or (most is not None and int(text) > most):
            raise Refused(f"it must be a whole number of at least {least}" + (f" and at most {most}" if most else ""))
        return int(text)

    return parse


def flag(value: str) -> bool:
    text = value.strip().lower()
    if text not in ("true", "false"):
        raise Refused("it must be true or false")
    return text == "true"


def one_of(*choices: str) -> Callable[[str], str]:
    def parse(value: str) -> str:
        found = {choice.lower(): choice for choice in choices}
        text = value.strip().lower()
        if text not in found:
            near = difflib.get_close_matches(text, found, n=1, cutoff=NEAR)
            hint = f"; did you mean {found[near[0]]}?" if near else ""
            raise Refused(f"it must be one of {', '.join(choices)}{hint}")
        return found[text]

    return parse


def duration(value: str) -> int:
    match = _DURATION.fullmatch(value.strip().lower())
    if match is None:
        raise Refused("write a time such as 500ms, 30s, 15m or 1h")
    unit = match[2] or "ms"
    return int(match[1]) * _UNITS_MS["ms" if unit.startswith(("ms", "milli")) else unit[0]]


def size(value: str) -> int:
    match = _SIZE.fullmatch(value.strip().lower())
    if match is None or int(match[1]) == 0:
        raise Refused("write a number of bytes of at least 1, such as 1048576, 64m or 1g")
    return int(match[1]) * _UNITS_BYTES[match[2] or ""]


def timestamp(value: str) -> int:
    """Milliseconds since 1970, or ISO 8601 with its distance from UTC."""
    text = value.strip()
    if re.fullmatch(r"\d{1,15}", text, re.ASCII):
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise Refused("write milliseconds since 1970, or a time such as 2026-01-31T12:00:00Z") from None
    if moment.tzinfo is None:
        raise Refused("say how far the time is from UTC, such as 2026-01-31T12:00:00Z or +02:00 at the end")
    since = moment - datetime.fromisoformat("1970-01-01T00:00:00+00:00")
    if since < timedelta(0):
        raise Refused("it must not be before 1970")
    return since // timedelta(milliseconds=1)


def topic(value: str) -> str:
    try:
        return str(TopicName.parse(filled(value)))
    except InvalidTopicName as error:
        raise Refused(str(error).rstrip(".")) from None


def topics(value: str) -> tuple[str, ...]:
    names = [each for each in value.split(",") if each.strip()]
    if not names:
        raise Refused("write the names of topics with commas between them")
    return tuple(dict.fromkeys(topic(each) for each in names))


def pattern(value: str) -> str:
    """A bare regular expression is about the default namespace."""
    text = filled(value)
    try:
        re.compile(text.rpartition("/")[2])
    except re.error as error:
        raise Refused(f"what follows the last slash must be a regular expression ({error})") from None
    return text if "/" in text else f"public/default/{text}"


def address(value: str) -> str:
    """Kafka's addresses have no scheme; all of a list lead to the same cluster, so the first one will do."""
    text = filled(value)
    return text if "://" in text else f"pulsar://{text.split(',')[0].strip()}"
