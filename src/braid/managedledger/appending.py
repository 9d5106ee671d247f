"""`LogAppender`: the writing half of a log, from `add` to the confirmed entry, over one ledger after the other.

Owns order, the dense message index, the append time and the change from one ledger to the next; which ledgers there are is
kept by `ledger_list.py`. Upholds INV1 (adds are reported when durable), INV2 (a conflict on the record or a fenced ledger ends
this log for good) and INV3 (ledger ids grow).

Adds flow `add` -> tail -> `tail_confirmed`. While there is no tail (before the first add, while ledgers change, after a
failure) they wait in a bounded queue, and one task, `_drive`, makes the next tail. A failed append consumes no index: the
numbering goes back to the last confirmed entry.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Any, NamedTuple, NoReturn

from braid.errors import (
    BraidError,
    Closed,
    LedgerError,
    LedgerFenced,
    LedgerStoreReadOnly,
    OutcomeUnknown,
    StorageFull,
    StorageUnavailable,
    StoreError,
    TopicTerminated,
)
from braid.managedledger.api import Entry, LedgerResolver, LogListener
from braid.managedledger.cache import LogCache
from braid.managedledger.config import ManagedLedgerConfig
from braid.managedledger.labels import ledger_labels
from braid.managedledger.ledger_list import LedgerList, without_empty_end
from braid.managedledger.owned_record import FencedInDoubt, OwnedRecord
from braid.managedledger.reading import LogReader, settled
from braid.managedledger.records import LedgerInfo, LogRecord
from braid.managedledger.room import unavailable
from braid.managedledger.tail import Tail
from braid.model.positions import Position
from braid.runtime.env import Runtime
from braid.runtime.tasks import Tasks
from braid.wire.encode import broker_entry_metadata

log = logging.getLogger(__name__)


class Queued(NamedTuple):
    """An add that waits for a ledger."""

    body: bytes
    messages: int
    context: object
    txn: tuple[int, int] | None


class LogAppender:
    """See the module; `ManagedLedger` adds reading, cursors, trimming and the end of life."""

    __slots__ = (
        "_append_ms",
        "_cache",
        "_confirmed_append_ms",
        "_driving",
        "_fenced",
        "_is_cache_current",
        "_is_cached",
        "_is_closed",
        "_is_terminating",
        "_leaving",
        "_listener",
        "_loaded_end",
        "_now_ms",
        "_pushed_index",
        "_queue",
        "_queue_bytes",
        "_reader",
        "_record",
        "_roll_bytes",
        "_roll_entry",
        "_slow",
        "_unsettled",
        "config",
        "is_in_doubt",
        "last_creation_failure_ms",
        "last_index",
        "last_ledger_created_ms",
        "last_position",
        "ledgers",
        "map",
        "name",
        "pending_bytes",
        "resolver",
        "runtime",
        "tail",
        "tasks",
    )

    def __init__(
        self,
        name: str,
        record: OwnedRecord[LogRecord],
        *,
        runtime: Runtime,
        resolver: LedgerResolver,
        config: ManagedLedgerConfig,
        cache: LogCache,
        listener: LogListener,
    ) -> None:
        value = record.value
        self.name = name
        self.config = config
        self.runtime = runtime
        self.resolver = resolver
        self.tasks = Tasks(f"log {name}")
        self.ledgers = LedgerList(name, record, resolver, confirmed=self._confirmed_end, fenced=self._fence)
        self.map = self.ledgers.map
        self.last_position = self.map.last
        self.last_index = value.last_index
        self.pending_bytes = 0
        self._loaded_end = self.map.end
        self.last_ledger_created_ms = 0
        self.last_creation_failure_ms: int | None = None
        self.tail: Tail | None = None
        self._now_ms = runtime.clock.now_ms
        self._slow = runtime.slow
        self._record = record
        self._listener = listener
        self._reader = LogReader(resolver, config.max_open_readers)
        self._cache = cache
        self._is_cached = False
        """Somebody reads this log, so new entries are kept in memory."""
        self._is_cache_current = False
        self._pushed_index = value.last_index
        self._append_ms = value.last_append_ms
        self._confirmed_append_ms = value.last_append_ms
        self._queue: deque[Queued] = deque()
        self._queue_bytes = 0
        self._leaving: Tail | None = None
        """A tail that takes no more entries and is to be closed."""
        self._unsettled: Tail | None = None
        """A tail that failed; where its ledger really ends must be asked for before the log goes on."""
        self._driving: asyncio.Task[BraidError | None] | None = None
        self.is_in_doubt = False
        """Of the entries reported as failed some may be stored: a failed ledger was not asked for its end yet."""
        self._is_terminating = False
        self._is_closed = False
        self._fenced: LedgerError | None = None
        self._roll_entry = config.max_entries_per_ledger - 1
        self._roll_bytes = config.max_ledger_bytes

    def add(self, body: bytes, messages: int, context: object, txn: tuple[int, int] | None = None) -> None:
        """Append an entry of `messages` messages; the listener hears of it with `context` once it is durable.

        Raises TopicTerminated, Closed, LedgerFenced, or StorageUnavailable; then nothing was added.
        """
        tail = self.tail
        if tail is None:
            self._enqueue(Queued(body, messages, context, txn))
            return
        now = stamp = self._now_ms()
        if now < self._append_ms:
            stamp = self._append_ms  # of the entry only: a ledger's age is told by the clock, or one jump makes many ledgers
        index = self._pushed_index + messages
        try:
            entry_id = tail.append(broker_entry_metadata(stamp, index, txn), body)
        except LedgerError as error:
            self._refused(tail, error)
        self._append_ms = stamp
        self._pushed_index = index
        tail.pending.append(Entry(tail.ledger_id, entry_id, index, messages, stamp, txn, body, context))
        size = len(body)
        tail.pending_size += size
        self.pending_bytes += size
        if entry_id >= self._roll_entry or tail.writer.length >= self._roll_bytes or now >= tail.roll_ms:
            self._roll(tail, now)

    def tail_confirmed(self, entries: list[Entry], size: int) -> None:
        """Called by the tail: these entries are durable."""
        last = entries[-1]
        self.map.end += len(entries)
        self.last_position = Position(last.ledger_id, last.entry_id)
        self.last_index = last.index
        self._confirmed_append_ms = last.append_ms
        self.pending_bytes -= size
        if self._is_cached:
            self._cache.add(entries, size, follows=self._is_cache_current)
            self._is_cache_current = True
        elif self._is_cache_current:
            self._cache.clear()
            self._is_cache_current = False
        took = (self._now_ms() - entries[0].append_ms) / 1000
        if took >= self._slow.threshold:
            self._slow.note("publish", f"{len(entries)} entries of {self.name}", took)
        self._listener.entries_added(entries)

    def tail_failed(self, tail: Tail, error: LedgerError) -> None:
        """Called by the tail: its ledger takes no more; unconfirmed entries may or may not be there."""
        if tail is self.tail:
            self.tail = None
        elif tail is self._leaving:
            self._leaving = None
        else:  # not listed yet: `_create_ledger` looks at `is_failed`
            return
        self._unsettled = tail
        if isinstance(error, LedgerFenced):
            self._fence(error)
        elif isinstance(error, LedgerStoreReadOnly):
            self._fail_adds(error)
        else:
            self._start()

    def roll_if_needed(self) -> None:
        """Leave the ledger if it is old enough, also without a new entry; for a timer."""
        tail = self.tail
        if tail is not None and (tail.confirmed >= 0 or tail.pending) and (now := self._now_ms()) >= tail.roll_ms:
            self._roll(tail, now)

    @property
    def infos(self) -> list[LedgerInfo]:
        """The ledgers in order; entries and size of the last one are final only once it is closed."""
        return self.ledgers.infos

    @property
    def entries_added(self) -> int:
        """Entries that became durable since the log was loaded."""
        return self.map.end - self._loaded_end

    @property
    def tail_size(self) -> int:
        """Bytes of the ledger that is not closed yet."""
        tail = self.tail or self._leaving or self._unsettled
        return tail.writer.length - tail.refused_size if tail is not None else 0

    @property
    def pending_entries(self) -> int:
        """Adds that are not durable yet."""
        waiting = len(self._queue)
        for tail in (self.tail, self._leaving, self._unsettled):
            waiting += len(tail.pending) if tail is not None else 0
        return waiting

    def _enqueue(self, queued: Queued) -> None:
        self._check_open()
        if self._is_terminating:
            raise TopicTerminated(f"The log {self.name} is terminated and takes no more messages.")
        if len(self._queue) >= self.config.max_queued_entries or self._queue_bytes >= self.config.max_queued_bytes:
            raise StorageUnavailable(f"The log {self.name} has too many entries waiting for its next ledger; try again later.")
        self._queue.append(queued)
        self._queue_bytes += len(queued.body)
        self.pending_bytes += len(queued.body)
        self._start()

    def _refused(self, tail: Tail, error: LedgerError) -> NoReturn:
        """The writer refused an append at once. It tells its listener as well, but perhaps later."""
        self._give_up(tail, error)
        if isinstance(error, LedgerFenced):
            raise error
        raise unavailable(self.name, error) from error

    def _give_up(self, tail: Tail, error: LedgerError) -> None:
        """A call failed: unlike after the store's own report, what was pushed before may still become durable."""
        self.is_in_doubt |= bool(tail.pending)
        tail.ledger_failed(error)

    def _roll(self, tail: Tail, now: int) -> None:
        """Leave a full ledger; adds wait until the next one is there. A young one may hold more entries, not more bytes."""
        if now - tail.created_ms >= self.config.min_ledger_age_ms or tail.writer.length >= self._roll_bytes:
            self._leave(tail)
            self._start()

    def _leave(self, tail: Tail) -> None:
        self.tail = None
        self._leaving = tail

    def _fail_adds(self, error: BraidError) -> None:
        """Everything that waits, and everything in a ledger that is being left or has failed, has failed."""
        contexts: list[Any] = []
        for tail in (self._leaving, self._unsettled):
            if tail is not None and tail.pending:
                self.is_in_doubt |= not isinstance(error, LedgerStoreReadOnly)
                self.pending_bytes -= tail.pending_size
                contexts += [entry.context for entry in tail.take_back()]
                tail.is_failed = True  # what it still confirms was reported as failed: its end must be asked for
        if self._leaving is not None and self._leaving.is_failed:
            self._unsettled, self._leaving = self._leaving, None
        contexts += [queued.context for queued in self._queue]
        self._queue.clear()
        self.pending_bytes -= self._queue_bytes
        self._queue_bytes = 0
        if contexts or isinstance(error, LedgerFenced):
            self._listener.log_failed(error, contexts)

    def _fence(self, error: LedgerError) -> None:
        """Another owner is there: the end of this object (INV2)."""
        if self._fenced is None:
            self._fenced = error
            if self.tail is not None:
                self._leave(self.tail)
            self._fail_adds(error)

    def lost(self, error: LedgerFenced) -> None:
        """Called by a cursor whose record or ledger belongs to another owner now."""
        self._fence(error)

    def _check_open(self) -> None:
        if self._fenced is not None:
            raise LedgerFenced(f"The log {self.name} was taken over by another owner; look the topic up again.")
        if self._is_closed:
            raise Closed(f"The log {self.name} is closed.")

    # ---- changing ledgers -------------------------------------------------------------------------------------------------

    def _start(self) -> asyncio.Task[BraidError | None]:
        """Make sure that `_drive` runs."""
        if self._driving is None or self._driving.done():
            self._driving = self.tasks.spawn(self._drive(), "ledger")
        return self._driving

    async def _settle_down(self) -> None:
        """Wait until no add is under way and the last ledger is closed; the caller has stopped new adds."""
        while True:
            if self.tail is not None:
                self._leave(self.tail)
            if not (self._queue or self._leaving or self._unsettled or self.ledgers.has_news):
                return
            if (error := await asyncio.shield(self._start())) is not None:
                raise error

    async def _drive(self) -> BraidError | None:
        """Close what is to be closed, then make a tail if adds wait for one. Returns the error that the waiting adds got."""
        try:
            while True:
                if self._leaving is not None:
                    await self._close_ledger(self._leaving)
                if self._unsettled is not None:
                    await self._settle_ledger(self._unsettled)
                if self._queue:
                    await self._create_ledger()
                elif self.ledgers.has_news:
                    await self.ledgers.commit(list)  # adds may have come meanwhile: look again
                elif self._leaving is None and self._unsettled is None:
                    break
        except LedgerFenced as error:
            self._fence(error)
            return error
        except (LedgerError, StoreError, StorageUnavailable, Closed) as error:
            failure = unavailable(self.name, error)
            if not (self._queue or isinstance(failure, StorageFull)):  # else the listener, or the store, says so at its pace
                log.warning("log %s cannot go on for now: %s", self.name, error)
            self._fail_adds(failure)
            return failure
        return None

    async def _close_ledger(self, tail: Tail) -> None:
        try:
            await tail.writer.close()
        except LedgerFenced:
            raise
        except LedgerError as error:
            self._give_up(tail, error)
        if self._leaving is tail:
            self._leaving = None
        if not tail.is_failed:
            self.ledgers.ended(tail.ledger_id, tail.confirmed + 1, tail.writer.length, self._now_ms())

    async def _settle_ledger(self, tail: Tail) -> None:
        """Fence our own failed ledger to learn its end; what survived is confirmed, the rest is appended again, in order."""
        store = self.resolver.for_ledger(tail.ledger_id, self.infos[-1].properties)
        end = await settled(store, tail.ledger_id)
        if self._unsettled is tail:
            self._unsettled = None
            self.is_in_doubt = False
        if end.entries > tail.confirmed + 1:
            if tail.pending:
                tail.confirm(end.entries - 1)
            else:  # reported as failed already, and stored after all
                self.map.grow(end.entries)
                self.last_position = Position(tail.ledger_id, end.entries - 1)
                self.last_index = end.last_index
                self._confirmed_append_ms = end.last_append_ms
                self._cache.clear()
                self._is_cache_current = False
                self._listener.entries_added([])
        self._pushed_index = self.last_index
        self.ledgers.ended(tail.ledger_id, end.entries, end.size, self._now_ms())
        self._queue_bytes += tail.pending_size
        again = [Queued(entry.body, entry.messages, entry.context, entry.txn) for entry in tail.take_back()]
        self._queue.extendleft(reversed(again))

    async def _create_ledger(self) -> None:
        """The next ledger: created, then listed by one CAS, then written to. A crash leaves an orphan or an empty ledger."""
        now = self._now_ms()
        tail = Tail(self, now, now + self.config.max_ledger_age_ms)
        store = self.resolver.active()
        try:
            writer = await store.create(listener=tail, custom=self._custom())
        except BraidError:
            self.last_creation_failure_ms = now
            raise
        highest = self.ledgers.highest
        try:
            if writer.ledger_id <= highest:
                raise StorageUnavailable(
                    f"The store gave ledger {writer.ledger_id} to log {self.name}, which already has ledger {highest}; "
                    "ids must grow, so move the store's id allocator forward."
                )
            tail.attach(writer)
            dropped = await self.ledgers.commit(
                lambda infos: [*without_empty_end(infos), LedgerInfo(ledger_id=writer.ledger_id)]
            )
        except (OutcomeUnknown, FencedInDoubt):
            raise  # the record may name it: deleting it is up to whoever opens the log next
        except BraidError:
            await self.ledgers.discard(writer.ledger_id, {})
            raise
        self.last_ledger_created_ms = now
        self._ledger_listed(writer.ledger_id)
        if tail.is_failed:
            self._unsettled = tail
        else:
            self.tail = tail
            self._drain()
        for info in dropped:
            await self.ledgers.discard(info.ledger_id, info.properties)

    def _drain(self) -> None:
        """Append what waited, until the tail is full."""
        while self._queue and self.tail is not None:
            queued = self._queue[0]
            try:
                self.add(queued.body, queued.messages, queued.context, queued.txn)
            except BraidError:
                return  # `tail_failed` has decided what becomes of the queue
            self._queue.popleft()
            self._queue_bytes -= len(queued.body)
            self.pending_bytes -= len(queued.body)

    def _confirmed_end(self) -> tuple[int, int]:
        """Index and append time of the last durable entry."""
        return self.last_index, self._confirmed_append_ms

    def _ledger_listed(self, ledger_id: int) -> None:
        """The log goes on in this ledger."""

    def _custom(self) -> dict[str, bytes]:
        """What the ledger store keeps with each ledger, for audits."""
        return ledger_labels("managed-ledger", self.name, self._record.value.incarnation)
