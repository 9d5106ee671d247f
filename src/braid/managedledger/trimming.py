"""Trimming: a log forgets its oldest ledgers, says so, and tells which one goes next.

Owns the order of a trim (cursors durable, then the record by one CAS, then the ledgers) and its line in the log. What may go is
decided in `retention.py`; when a trim runs is the log's business.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from braid.errors import BraidError
from braid.managedledger.records import LedgerInfo
from braid.managedledger.retention import Fate, Rule, fates
from braid.managedledger.topic_names import topic_of
from braid.model.names import is_reserved_subscription
from braid.model.positions import LATEST, Position
from braid.model.retention import NextTrim

if TYPE_CHECKING:
    from braid.managedledger.log import ManagedLedger

log = logging.getLogger(__name__)


def is_subscribed(owner: ManagedLedger) -> bool:
    """Whether the log has a durable subscription; the broker's own cursors are none."""
    return bool(owner.unreadable) or any(
        cursor.is_durable and not is_reserved_subscription(cursor.name) for cursor in owner.cursors.values()
    )


def look(owner: ManagedLedger, *, keeps_unread: bool = True) -> list[Fate]:
    """Of the oldest ledgers: those that may go now, and the first one that stays."""
    needed = [cursor.mark_delete for cursor in owner.cursors.values() if cursor.is_durable]
    if owner.unreadable:  # who knows where they stand
        needed.append(Position(-1, -1))
    return fates(
        owner.infos,
        min(needed, default=None),
        total_size=owner.total_size,
        limits=owner.limits if keeps_unread else owner.limits._replace(unread_minutes=0),
        now_ms=owner.runtime.clock.now_ms(),
        is_subscribed=is_subscribed(owner),
        readable=LATEST if owner.readable is None else owner.readable(),
    )


def _count(found: list[Fate]) -> int:
    return sum(each.goes for each in found)


async def trim(owner: ManagedLedger, *, keeps_unread: bool = True) -> int:
    """Delete the oldest ledgers that nobody needs and retention no longer keeps; returns how many. One at a time.

    The cursors are made durable first: what they store must not lag behind what is gone, because a position carries more than a
    place (the deduplication state). So nothing goes that was still needed when their writing began, however far they have come
    since, nor while there is one that was not written. The guard is asked after everything else that takes time, because it
    knows of what begins meanwhile. Then the list shrinks by one CAS; only then are ledgers deleted. A crash in between leaves
    orphans, never a gap.
    """
    await owner.ledgers.discard_again()
    count, written = _count(look(owner, keeps_unread=keeps_unread)), set(owner.cursors.values())
    if not count:
        return 0
    for cursor in list(owner.cursors.values()):
        await cursor.flush()
    going = owner.infos[:count]
    shown = await _last_shown_of(owner, going)
    if not (owner.trim_guard is None or await owner.trim_guard(owner)):
        return 0
    found = look(owner, keeps_unread=keeps_unread)
    if _count(found) < count or any(each.is_durable and each not in written for each in owner.cursors.values()):
        return 0  # a cursor has gone back or come, or a policy keeps more: the next pass knows
    messages = messages_of(owner, going)
    gone = {info.ledger_id for info in going}
    dropped = await owner.ledgers.commit(
        lambda infos: [info for info in infos if info.ledger_id not in gone],
        last_shown=shown,
        trimmed_index=max((info.last_index for info in going), default=-1),
    )
    _report(owner, going, messages, {each.rule for each in found[:count]}, keeps_unread)
    if owner.on_trimmed is not None:
        owner.on_trimmed()
    for info in dropped:
        await owner.forget(info)
    return len(dropped)


async def _last_shown_of(owner: ManagedLedger, infos: list[LedgerInfo]) -> Position | None:
    """The last entry of these ledgers that a reader can have got; None if they have no entries."""
    last = next((Position(info.ledger_id, info.entries - 1) for info in reversed(infos) if info.entries), None)
    if last is None or owner.last_shown is None:
        return last
    try:
        return await owner.last_shown(last)
    except BraidError as error:  # it goes all the same; readers may be told of a gap that is none
        log.info("the end of what is trimmed of log %s cannot be read: %s", owner.name, error)
        return last


def messages_of(owner: ManagedLedger, oldest: list[LedgerInfo]) -> int | None:
    """Messages in these ledgers, the oldest of the log; None if that is not known, because an older version trimmed it."""
    before = owner.trimmed_index
    if before is None:
        return None
    return max(0, max((info.last_index for info in oldest), default=before) - before)


def next_trim(owner: ManagedLedger) -> NextTrim:
    """What goes next, and when, as things stand."""
    unread_minutes = 0 if is_subscribed(owner) else owner.limits.unread_minutes
    found = look(owner)
    if not found:
        return NextTrim(unread_minutes=unread_minutes)
    first = owner.infos[0]
    # A ledger that may go already waits for the next pass only.
    verdict = found[0]
    closed = verdict.rule != "newest"
    without = _count(look(owner, keeps_unread=False)) if owner.limits.unread_minutes else 0
    return NextTrim(
        rule=verdict.rule,
        at_ms=verdict.at_ms,
        entries=first.entries if closed else 0,
        messages=messages_of(owner, [first]) if closed else 0,
        bytes=first.size if closed else 0,
        unread_bytes=sum(info.size for info in owner.infos[_count(found) : without]),
        unread_minutes=unread_minutes,
    )


def _report(owner: ManagedLedger, infos: list[LedgerInfo], messages: int | None, rules: set[Rule], keeps_unread: bool) -> None:
    subscribed, limits = is_subscribed(owner), owner.limits
    reasons = {
        "read": "every subscription has read them" if subscribed else "the topic has no subscription",
        "time": f"they are older than the policy's {limits.minutes} minutes",
        "size": f"the topic is larger than the policy's {limits.megabytes} MB",
        "unread": f"no subscription wants them and they are older than {limits.unread_minutes} minutes "
        "(retention.unread_minutes)",
    }
    why = "; ".join(text for rule, text in reasons.items() if rule in rules)
    entries = sum(info.entries for info in infos)
    log.info(
        "deleted %s of %s (%d bytes, %s): %s%s",
        f"{entries} entries" if messages is None else f"{messages} messages",
        topic_of(owner.name),
        sum(info.size for info in infos),
        f"ledger {infos[0].ledger_id}" if len(infos) == 1 else f"ledgers {infos[0].ledger_id} to {infos[-1].ledger_id}",
        why,
        "" if keeps_unread else "; it was asked to be truncated",
    )
