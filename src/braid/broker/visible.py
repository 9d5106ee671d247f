"""What a subscription may read of its log: the limit and the filter of transactions, for every dispatcher alike.

Owns the step from entries read to entries shown (INV13). What is hidden is acknowledged for the subscription (INV9): nobody
else ever will, and a sealed segment would not drain. Must not know consumers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from braid.managedledger.api import Entry
from braid.model.positions import EARLIEST, LATEST, Position

if TYPE_CHECKING:
    from braid.broker.subscription import Subscription
    from braid.broker.topic import Topic

WINDOW_ENTRIES = 100
WINDOW_BYTES = 8 << 20


def visible(subscription: Subscription, entries: list[Entry]) -> list[Entry]:
    """Of entries at or below the read limit, those that are shown."""
    transactions = subscription.topic.transactions
    if not transactions.hides:
        return entries
    is_aborted = transactions.is_aborted
    hidden = [entry for entry in entries if entry.txn is not None and is_aborted(entry.txn)]
    if not hidden:
        return entries
    cursor = subscription.cursor
    cursor.acknowledge([Position(entry.ledger_id, entry.entry_id) for entry in hidden])
    if subscription.log.is_terminated:
        cursor.save_soon()  # as after any other acknowledgment: no later one covers it
    return [entry for entry in entries if entry.txn is None or not is_aborted(entry.txn)]


def within(subscription: Subscription, entries: list[Entry]) -> list[Entry]:
    """Of entries that the cursor read from storage, those at or below the read limit. It may have come down since the read
    began; what lies behind it is read again later."""
    limit = subscription.topic.transactions.max_read_position
    if limit is LATEST or not entries or (entries[-1].ledger_id, entries[-1].entry_id) <= limit:
        return entries
    shown = [entry for entry in entries if (entry.ledger_id, entry.entry_id) <= limit]
    first = entries[len(shown)]
    subscription.cursor.read_position = Position(first.ledger_id, first.entry_id)
    return shown


async def last_visible(topic: Topic) -> tuple[Position, Entry | None]:
    """The last entry that may be read. If that is certainly none, its position is (-1, -1); the entry is None also if it is
    trimmed."""
    last = min(topic.log.last_position, topic.transactions.max_read_position)
    if not topic.transactions.hides:
        return last, await _entry(topic, last)
    found = await _last_of(topic, last)
    return (EARLIEST, None) if found is None else (Position(found.ledger_id, found.entry_id), found)


async def last_shown(topic: Topic, last: Position) -> Position:
    """The last entry up to this one that is not hidden; (-1, -1) if all of them are."""
    if not topic.transactions.hides:
        return last
    found = await _last_of(topic, last)
    return EARLIEST if found is None else Position(found.ledger_id, found.entry_id)


async def _last_of(topic: Topic, last: Position) -> Entry | None:
    managed, transactions = topic.log, topic.transactions
    if not managed.map.contains(last):
        last = managed.position_before(last)
    while managed.map.contains(last):
        found: Entry | None = None
        # A window that ends with `last`: a long run of aborted entries is not read one by one.
        position = start = managed.map.at(managed.map.ordinal(last) - WINDOW_ENTRIES + 1)
        while position <= last and (entries := await managed.read(position, WINDOW_ENTRIES, WINDOW_BYTES)):
            for entry in entries:
                position = Position(entry.ledger_id, entry.entry_id)
                if position <= last and not (entry.txn is not None and transactions.is_aborted(entry.txn)):
                    found = entry
            position = managed.position_after(position)
        if found is not None:
            return found
        last = managed.position_before(start)
    return None


async def _entry(topic: Topic, position: Position) -> Entry | None:
    if position.ledger_id < 0:
        return None
    entries = topic.log.read_cached(position, 1, 1) or await topic.log.read(position, 1, 1)
    return entries[0] if entries else None
