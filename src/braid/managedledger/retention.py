"""Retention: which ledgers a log may forget, which one goes next and when. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from braid.managedledger.records import LedgerInfo
from braid.model.positions import LATEST, Position

MINUTE_MS = 60_000
MEGABYTE = 1 << 20

Rule = Literal["read", "unread", "time", "size", "needed", "newest"]
"""What decides about a ledger: nothing keeps it once it is read, the time for unread messages, the policy's time or size,
somebody needs it (a subscription, an open transaction), or it is the newest."""


class Limits(NamedTuple):
    """How long a log keeps what nobody needs; -1 = no limit."""

    minutes: int = 0
    megabytes: int = 0
    unread_minutes: int = 0
    """Of a log without any subscription, by the append time of a ledger's last entry; 0 = the other two alone decide."""


class Fate(NamedTuple):
    """What becomes of one ledger."""

    goes: bool
    rule: Rule
    at_ms: int | None = None
    """When it goes, as things stand; None if no time is known."""


def fate(
    info: LedgerInfo, slowest: Position | None, *, is_subscribed: bool, log_size: int, limits: Limits, now_ms: int
) -> Fate:
    """What becomes of a closed ledger that is the oldest one of its log. `log_size` are the bytes from it on; what is left
    without it must still be as large as the policy says, because ledgers may be larger than that."""
    if slowest is not None and (slowest.ledger_id, slowest.entry_id) < (info.ledger_id, info.entries - 1):
        return Fate(False, "needed")
    is_unread = bool(limits.unread_minutes) and not is_subscribed
    if is_unread:
        until = _until(info.last_append_ms or info.timestamp, limits.unread_minutes)
        if until is None or now_ms < until:
            return Fate(False, "unread", until)
    too_large = limits.megabytes >= 0 and log_size - info.size >= limits.megabytes * MEGABYTE
    until = _until(info.timestamp, limits.minutes)
    by_time: Rule = "time" if limits.minutes else "unread" if is_unread else "read"
    if until is not None and now_ms >= until:
        return Fate(True, by_time, until)
    if until is None or (too_large and limits.megabytes):
        return Fate(too_large, "size")
    return Fate(too_large, by_time, until)


def _until(start_ms: int, minutes: int) -> int | None:
    """The first moment that is more than so many minutes later; None for ever."""
    return None if minutes < 0 else start_ms + minutes * MINUTE_MS + 1


def fates(
    ledgers: Sequence[LedgerInfo],
    slowest: Position | None,
    *,
    total_size: int,
    limits: Limits,
    now_ms: int,
    is_subscribed: bool | None = None,
    readable: Position = LATEST,
) -> list[Fate]:
    """Of the oldest ledgers: those that go now, then the first one that stays; empty if there is none.

    `slowest` is the lowest mark-delete position of the durable cursors, None without any; some of them may be the broker's own,
    so that `is_subscribed` tells whether there is a subscription. What lies behind `readable` belongs to open transactions. The
    last ledger always stays.
    """
    if is_subscribed is None:
        is_subscribed = slowest is not None
    if readable != LATEST:
        slowest = readable if slowest is None else min(slowest, readable)
    found: list[Fate] = []
    size = total_size
    for info in ledgers[:-1]:
        found.append(fate(info, slowest, is_subscribed=is_subscribed, log_size=size, limits=limits, now_ms=now_ms))
        if not found[-1].goes:
            return found
        size -= info.size
    if ledgers:
        found.append(Fate(False, "newest"))
    return found
