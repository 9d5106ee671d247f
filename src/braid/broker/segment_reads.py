"""Reading a topic by ranges of message indexes: what it holds, where a range ends, the entries of a range, and a cursor that
follows a reader.

Owns what may be read of a log so that it stays the same for ever: everything below the *stable* index, without the entries of
aborted transactions (INV13), and only of the incarnation that is asked for (INV5). Reads by the log's reader and keeps nothing.
Must not know frames.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import msgspec

from braid.broker import segments
from braid.broker.topic import Topic, check_subscription_name
from braid.broker.topic_records import INCARNATION
from braid.errors import (
    Closed,
    ConsumerBusy,
    IncarnationMismatch,
    LedgerFenced,
    LedgerNotFound,
    NotAllowed,
    NotReady,
    TopicNotFound,
)
from braid.model.names import Domain, TopicName
from braid.model.positions import EARLIEST, LATEST, Position
from braid.wire.entries import StoredHead, message_count, split_entry
from braid.wire.frames import FRAME_PADDING
from braid.wire.types import SubType

if TYPE_CHECKING:
    from braid.broker.service import BrokerService

ENTRY_COST: Final = 32
"""What an entry adds to an answer beside its bytes, at most."""
READ_ENTRIES: Final = 2000
READ_BYTES: Final = 4 << 20
"""Of one read; others have their turn between two."""
SMALL: Final = 4096
"""Smaller entries are copied out of what is stored, larger ones only looked at: which is cheaper."""
MAX_HEAD: Final = 512
"""What an answer with a single entry has beside that entry, at most."""
HIDDEN_FACTOR: Final = 8
"""An answer ends, covering what it covers, after this many times its size was read of entries that are hidden."""


class Indexes(msgspec.Struct, frozen=True):
    """What a topic holds."""

    incarnation: str
    low: int
    stable: int
    end: int
    is_sealed: bool
    stored_bytes: int


class Fetched(msgspec.Struct):
    """Entries of a range, as lists, and how far the range is covered."""

    covered_to: int
    last_index: list[int]
    ledger_id: list[int]
    entry_id: list[int]
    append_ms: list[int]
    bodies: list[bytes | memoryview]


@contextmanager
def serving(name: TopicName) -> Iterator[None]:
    """What a log says that is closed, taken over or trimmed at this moment means to a reader: ask again."""
    try:
        yield
    except (Closed, LedgerFenced, LedgerNotFound) as error:
        raise NotReady(f"The topic {name} is being closed, or changes hands; look it up again. ({error.message})") from error


async def describe(service: BrokerService, name: TopicName) -> Indexes:
    """The indexes of a topic, which need not have been used yet. Raises TopicNotFound."""
    try:
        topic = await _topic(service, name)
    except TopicNotFound:
        if (unused := await _unused(service, name)) is None:
            raise
        return unused
    with serving(name):
        low = await topic.indexes.low()
        stable = await stable_index(topic)
        end = topic.indexes.end
        return Indexes(
            incarnation=incarnation_of(topic),
            low=low,
            stable=max(low, stable),
            end=end,
            is_sealed=topic.log.is_terminated,
            stored_bytes=topic.log.total_size,
        )


async def opened(service: BrokerService, name: TopicName, incarnation: str) -> Topic:
    """The loaded topic, if it is still the one that is meant."""
    topic = await _topic(service, name)
    if incarnation and incarnation != (found := incarnation_of(topic)):
        raise IncarnationMismatch(
            f"The topic {name} was deleted and created again: it is {found} now, and what is asked for is of {incarnation}. "
            "Positions of the earlier one mean nothing here; begin anew."
        )
    return topic


def incarnation_of(topic: Topic) -> str:
    """Of the scalable topic a segment belongs to; of the log of a regular one."""
    return topic.log.properties.get(INCARNATION, "") if topic.is_segment else topic.log.incarnation


async def stable_index(topic: Topic) -> int:
    """One above the last message that stays as it is for ever: what follows may belong to an undecided transaction."""
    limit = topic.transactions.max_read_position
    return topic.indexes.end if limit is LATEST else await topic.indexes.after(limit)


async def index_at_time(topic: Topic, timestamp_ms: int) -> int:
    """Index of the first message appended at this time or later; the end if there is none."""
    with serving(topic.name):
        return await topic.indexes.at_time(timestamp_ms)


async def offset_for(topic: Topic, start: int, max_messages: int | None, max_bytes: int | None) -> int:
    """Where a stable range that begins at `start` ends, so that it holds no more than this, but at least one message if there
    is one. Bytes are those of its entries as stored, exactly: an entry is read whole, so it counts whole."""
    with serving(topic.name):
        stable = await stable_index(topic)
        if start >= stable:
            return start
        if start < (low := await topic.indexes.low()):
            raise topic.indexes.lost(start, low)
        stop = stable if max_messages is None else min(stable, start + max(max_messages, 1))
        return stop if max_bytes is None else await topic.indexes.by_bytes(start, stop, max_bytes)


async def fetch(topic: Topic, start: int, stop: int, max_bytes: int) -> Fetched:
    """Whole entries that overlap `[start, stop)`, from its beginning on, as many as fit, at least one. Raises NotReady unless
    all of the range is stable, DataLost if its beginning is not stored any more."""
    if start > stop:
        raise NotAllowed(f"The range {start} to {stop} of {topic.name} ends before it begins.")
    with serving(topic.name):
        if stop > (stable := await stable_index(topic)):
            raise NotReady(
                f"{topic.name} can be read up to message {stable} at the moment, and {stop} is asked for; what follows is not "
                "there, or belongs to transactions that are not decided."
            )
        return await _fetch(topic, start, stop, max_bytes)


async def _fetch(topic: Topic, start: int, stop: int, max_bytes: int) -> Fetched:
    made = Fetched(start, [], [], [], [], [])
    if start == stop:
        return made
    indexes, is_aborted = topic.indexes, topic.transactions.is_aborted
    ordinal = await indexes.find(start)
    at = start  # everything before it is covered
    room, unread = max_bytes, max_bytes * HIDDEN_FACTOR
    while at < stop and room > 0 and unread > 0:
        position, entries = await _read(topic, at, ordinal, min(stop - at, READ_ENTRIES), min(room, READ_BYTES), at == start)
        for entry_id, ((append_ms, index, txn, offset), data) in enumerate(entries, position.entry_id):
            cost = len(data) + ENTRY_COST
            unread -= cost
            if txn is None or not is_aborted(txn):
                if cost > room and made.bodies:
                    room = 0
                    break
                room -= cost
                made.last_index.append(index)
                made.ledger_id.append(position.ledger_id)
                made.entry_id.append(entry_id)
                made.append_ms.append(append_ms)
                made.bodies.append(data[offset:] if cost < SMALL else memoryview(data)[offset:])
            at = index + 1
            ordinal += 1
            if at >= stop:
                break
    indexes.remember(at, ordinal)
    made.covered_to = min(at, stop)
    if made.bodies and len(made.bodies[0]) > topic.config.max_message_size + FRAME_PADDING - MAX_HEAD:
        raise NotAllowed(
            f"The entry {made.ledger_id[0]}:{made.entry_id[0]} of {topic.name} has {len(made.bodies[0])} bytes, more than an "
            "answer may have; raise broker.max_message_size."
        )
    return made


async def _read(
    topic: Topic, at: int, ordinal: int, entries: int, size: int, is_start: bool
) -> tuple[Position, Iterable[tuple[StoredHead, bytes]]]:
    """Some entries of one ledger, of which the first has this ordinal and holds message `at`: its position, and of each what
    the broker stored with it and its bytes. Raises DataLost if message `at` is gone."""
    log, ledgers = topic.log, topic.log.map
    position = ledgers.at(ordinal)
    found: list[tuple[StoredHead, bytes]] | zip[tuple[StoredHead, bytes]]
    if ledgers.start <= ordinal and (cached := log.read_cached(position, entries, size)):
        await asyncio.sleep(0)  # reading from a disk lets others have their turn; this must do so too
        first = cached[0].index - cached[0].messages + 1
        found = [((x.append_ms, x.index, x.txn, 0), x.body) for x in cached if x.ledger_id == position.ledger_id]
    else:
        where, stored = await log.read_stored(position, entries, size)
        if where != position or not stored:
            if ledgers.start > ordinal:
                raise topic.indexes.lost(at, await topic.indexes.low())
            raise NotReady(f"Entry {position} of {topic.name} cannot be read at the moment; try again.")
        first = at
        if is_start or position.entry_id == 0:  # elsewhere the numbers have no gaps
            _ms, index, _txn, offset = split_entry(stored[0])
            first = index - message_count(memoryview(stored[0])[offset:]) + 1
        found = zip(map(split_entry, stored), stored, strict=True)
    if first > at:
        raise topic.indexes.lost(at, first)
    return position, found


async def move_cursor(service: BrokerService, topic: Topic, subscription: str, index: int) -> None:
    """Everything below `index` is read: acknowledge its whole entries for a subscription, durably. It is made, at the
    beginning of the topic, if there is none; it never goes back."""
    check_subscription_name(subscription)
    with serving(topic.name):
        if index > topic.indexes.end:
            raise NotReady(f"{topic.name} has messages up to {topic.indexes.end}; {index} cannot be read already.")
        policies = await service.namespaces.policies(topic.name.namespace)
        may_create = policies.auto_subscription_creation
        if topic.is_segment:
            found = await segments.subscribe(
                service, topic, subscription, "earliest", may_create=may_create, sub_type=SubType.SHARED
            )
        else:
            found = await topic.subscription(
                subscription, is_durable=True, start=None, initial=EARLIEST, allow_create=may_create
            )
        if found.consumers:
            raise ConsumerBusy(
                f"The subscription {subscription} of {topic.name} has consumers, which acknowledge by themselves; choose "
                "another name for the cursor of a reader."
            )
        if index <= await topic.indexes.low():
            return
        position = topic.log.map.at(await topic.indexes.find(index) - 1)
        if position > found.cursor.mark_delete:
            found.acknowledge_upto(position)
        await found.cursor.flush()


async def _topic(service: BrokerService, name: TopicName) -> Topic:
    service.check_lookup(name)
    if name.domain is Domain.TOPIC:
        raise NotAllowed(f"{name} is a scalable topic: its segments are read, one by one.")
    is_partition = False
    if name.is_partition and not await service.logs.exists(name.managed_ledger_name):
        is_partition = name.partition_index < await service.partition_count(name.base, allow_create=False)
    topic = await service.topic(name, create=is_partition)
    if topic.is_closing:
        raise NotReady(f"The topic {name} is being closed; look it up again.")
    return topic


async def _unused(service: BrokerService, name: TopicName) -> Indexes | None:
    """Of a segment that its topic has and that nobody used so far; None if it has no such segment."""
    if name.domain is not Domain.SEGMENT:
        return None
    try:
        listed = await service.records.listed(name)
    except TopicNotFound:
        return None
    if not listed.is_present or listed.record.is_deleting:
        return None
    if await service.logs.exists(name.managed_ledger_name, fresh=True):
        # Used since it was looked for, perhaps sealed as well: a sealed segment without messages would be taken for read.
        raise NotReady(f"The segment {name} came into use at this moment; ask again.")
    return Indexes(listed.record.incarnation, 0, 0, 0, listed.segment.is_sealed, 0)
