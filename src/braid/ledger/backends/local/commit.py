"""Group commit: the queue between the loop and the journal thread (INV1).

Appending is one tuple in a list. While one group is written and synced on the journal's worker, the next one gathers; it starts
when the last one ends, without timer or delay. One callback on the loop then confirms: one call per writer touched, no future,
task or closure per entry. Ledger operations (`Op`) travel in the same queue, so their order against entries is the order of
calls.

Out of space fails everything queued and makes the store read-only until `room` finds some; only operations that help to free
space are taken then, and may use the reserve. Any other failure of the disk stops the queue for good and is reported once to
`on_fatal`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import cast

from braid.errors import LedgerError, LedgerStoreFailed, LedgerStoreReadOnly, without_frames
from braid.ledger.backends.local.journal import FULL, Journal, no_space
from braid.ledger.backends.local.records import RECORD, Kind
from braid.ledger.backends.local.room import Room
from braid.ledger.backends.local.writer import LocalLedgerWriter
from braid.ledger.config import LocalSettings
from braid.runtime.clock import Clock
from braid.runtime.files import FileSystem
from braid.runtime.slow import SlowOperations
from braid.runtime.threads import Worker

log = logging.getLogger(__name__)

OP = -1
"""In place of an entry id: the item is an operation, its record ready made."""


class Op:
    """A ledger operation that waits for its record to be durable."""

    __slots__ = ("apply", "done", "failed", "frees")

    def __init__(
        self, done: asyncio.Future[None], apply: Callable[[], None], failed: Callable[[LedgerError], None] | None = None
    ) -> None:
        self.done = done
        self.apply = apply
        """Changes the catalog; runs on the loop at the operation's place in the order."""
        self.failed = failed
        self.frees = False


Item = tuple[LocalLedgerWriter | Op, int, bytes, bytes]
Runs = dict[LocalLedgerWriter, list[bytes]]
"""The entries of each writer in a group, in order."""


class Group:
    """What the worker made of a commit group."""

    __slots__ = ("entries", "length", "ops", "runs", "written")

    def __init__(self, runs: Runs, ops: list[Op], *, entries: int, length: int, written: int) -> None:
        self.runs = runs
        self.ops = ops
        self.entries = entries
        self.length = length
        """Bytes of all entries."""
        self.written = written


def write_group(journal: Journal, items: list[Item], mark: bytes, from_reserve: bool = False) -> Group:
    """Encode, write and sync one group; runs on the worker."""
    parts: list[bytes] = [mark] if mark else []
    runs: Runs = {}
    ops: list[Op] = []
    pack, kind = RECORD.pack, int(Kind.ENTRY)
    add = parts.append
    length = 0
    for owner, entry_id, head, body in items:
        if entry_id < 0:
            add(head)
            ops.append(cast(Op, owner))
            continue
        writer = cast(LocalLedgerWriter, owner)
        data = head + body
        size = len(data)
        length += size
        add(pack(kind, writer.ledger_id, entry_id, size))
        add(data)
        run = runs.get(writer)
        if run is None:
            runs[writer] = [data]
        else:
            run.append(data)
    written = journal.append_group(b"".join(parts), from_reserve=from_reserve)
    return Group(runs, ops, entries=len(items) - len(ops), length=length, written=written)


class GroupCommit:
    """The queue, the group under way, and the two ways to stop."""

    def __init__(
        self,
        journal: Journal,
        worker: Worker,
        clock: Clock,
        slow: SlowOperations,
        files: FileSystem,
        path: Path,
        settings: LocalSettings,
        on_confirmed: Callable[[Group], None],
        on_space: Callable[[], None],
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        self._journal = journal
        self._worker = worker
        self._clock = clock
        self._slow = slow
        self._began = 0.0
        self._room = Room(
            files,
            path,
            settings,
            clock,
            worker,
            unmoved=lambda: self.unmoved_bytes,
            still_full=self._checkpoint_if_freed,
            ended=self._room_ended,
        )
        self._path = path
        self._settings = settings
        self._on_confirmed = on_confirmed
        self._on_space = on_space
        self._on_fatal = on_fatal
        self._loop = asyncio.get_running_loop()
        self._is_busy = False
        self._writing: list[Item] = []
        self._rolls: list[asyncio.Future[int]] = []
        self._drained: list[asyncio.Future[None]] = []
        self._owed: LedgerError | None = None
        """Why everything in the queue fails as soon as the group under way has ended."""
        self._has_freed = False
        """Ledgers were deleted or closed while nothing else could be written: a checkpoint may free their space."""
        self._is_failed = False
        self.pending: list[Item] = []
        self.pending_bytes = 0
        self.max_pending_bytes = settings.pending_bytes
        self.is_idle = True
        self.is_held = False
        """Set while the buffer above has no room: groups wait, so do their writers."""
        self.refusal: LedgerError | None = None
        """Why nothing can be written, if so."""
        self.unmoved_bytes = 0
        """What the last flush or checkpoint of the buffer above found no room for."""
        self.mark = b""
        """A record to put in front of the next group."""

    def wake(self) -> None:
        """Start the next group in a later loop turn, unless one is under way; to be called when the queue was idle."""
        self.is_idle = False
        self._loop.call_soon(self._next)

    def submit(self, record: bytes, op: Op, *, frees: bool = False) -> None:
        """Queue an operation. One that `frees` space is taken by a read-only store too: or nobody could make room by deleting.
        Behind entries that are about to fail it fails with them: it may say where their ledger ends."""
        if self.refusal is not None and (self._is_failed or not frees):
            error = type(self.refusal)(*self.refusal.args)
            if op.failed is not None:
                op.failed(error)
            op.done.set_exception(error)
            return
        op.frees = frees
        self.pending.append((op, OP, record, b""))
        self.pending_bytes += len(record)
        if self.is_idle:
            self.wake()

    async def roll(self) -> int:
        """Begin a new journal segment between two groups; returns its number. What was confirmed before lies below it."""
        if self._is_failed:
            raise LedgerStoreFailed("The ledger store failed; restart the process.")
        rolled: asyncio.Future[int] = self._loop.create_future()
        self._rolls.append(rolled)
        self.wake()  # also when groups are held back: a checkpoint is what makes room
        return await rolled

    async def drain(self) -> None:
        """Return once nothing is queued or under way."""
        while not self.is_idle:
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._drained.append(waiter)
            await waiter

    def release(self) -> None:
        """The buffer above has room again."""
        if self.is_held:
            self.is_held = False
            self._next()

    def close(self) -> None:
        """Stop the probe; nothing may be queued any more."""
        self._room.stop()

    def failed_job(self, error: BaseException) -> None:
        """A flush or checkpoint failed: out of space makes the store read-only, anything else ends it."""
        if isinstance(error, OSError) and error.errno in FULL:
            error = LedgerStoreReadOnly(no_space(self._path))
        if isinstance(error, LedgerStoreReadOnly):
            self._read_only(error)
        else:
            self._fatal(error)

    def _next(self) -> None:
        if self._is_busy or self._is_failed:
            return
        if self._rolls:
            self._is_busy = True
            self._worker.post(self._journal.roll, self._rolled)
        elif not self.pending:
            self._idle()
        elif self._owed is not None:
            self._fail_queued(self._owed)
            self._idle()
        elif not self.is_held or self.refusal is not None:  # what is queued by a read-only store takes no memory
            self._is_busy = True
            self._writing = items = self._take()
            self._began = self._clock.monotonic()
            mark, self.mark = self.mark, b""
            from_reserve = self.refusal is not None or all(isinstance(item[0], Op) and item[0].frees for item in items)
            self._worker.post(partial(write_group, self._journal, items, mark, from_reserve), self._written)

    def _take(self) -> list[Item]:
        pending, limit = self.pending, self._settings.group_bytes
        if self.pending_bytes <= limit:
            self.pending, self.pending_bytes = [], 0
            return pending
        size = count = 0
        for _, _, head, body in pending:
            size += len(head) + len(body)
            if size > limit and count:
                size -= len(head) + len(body)
                break
            count += 1
        self.pending = pending[count:]
        self.pending_bytes -= size
        return pending[:count]

    def _idle(self) -> None:
        self.is_idle = True
        waiters, self._drained = self._drained, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _rolled(self, segment: int, error: BaseException | None) -> None:
        self._is_busy = False
        rolls, self._rolls = self._rolls, []
        if error is not None:
            self.failed_job(error)
        for waiter in rolls:
            if waiter.done():
                continue
            if error is None:
                waiter.set_result(segment)
            else:
                waiter.set_exception(error)
        self._next()

    def _written(self, group: Group, error: BaseException | None) -> None:
        if self._is_failed:
            return  # the group was already reported as failed; confirming it now would contradict that
        if error is not None:
            self.failed_job(error)  # still busy: no other group begins before those of this one are told
            self._fail_queued(self.refusal or LedgerStoreFailed(str(error)))
            self._is_busy = False
            self._next()
            return
        self._is_busy = False
        self._writing = []
        took = self._clock.monotonic() - self._began
        if took >= self._slow.threshold:
            self._slow.note("ledger flush", f"a group of {group.entries} entries in {self._path}", took)
        self._has_freed |= self.refusal is not None
        for writer, run in group.runs.items():
            writer.last_confirmed = writer.state.grow(run)
        self._on_confirmed(group)
        if self.refusal is None:
            self._next()  # keep the disk busy before anyone is told
        self._tell(iter(group.runs), iter(group.ops))
        if self.refusal is not None:
            self._next()  # fails what is queued; in order, so after the confirmations

    def _tell(self, writers: Iterator[LocalLedgerWriter], ops: Iterator[Op]) -> None:
        try:
            for writer in writers:
                writer.advanced()
            for op in ops:
                op.apply()
                if not op.done.done():
                    op.done.set_result(None)
        except BaseException:
            self._loop.call_soon(self._tell, writers, ops)  # a bug in one listener must not silence the others
            raise

    def _fail_queued(self, error: LedgerError) -> None:
        """Nothing that is queued or under way will ever be confirmed."""
        items = self._writing + self.pending
        self._writing, self.pending, self.pending_bytes, self._owed = [], [], 0, None
        for owner in dict.fromkeys(item[0] for item in items):
            if isinstance(owner, Op):
                if owner.failed is not None:
                    owner.failed(error)
                if not owner.done.done():
                    owner.done.set_exception(type(error)(*error.args))
            else:
                owner.fail(error)

    def _read_only(self, error: LedgerStoreReadOnly) -> None:
        if self._is_failed:
            return
        without_frames(error)  # it is kept, and its frames hold the group
        if self.refusal is None:
            self.refusal = error
            self._owed = error if self.pending else None
            self._room.wanted(error, self._journal.refused_bytes)
            self._on_space()
        self._next()

    def _fatal(self, error: BaseException) -> None:
        if self._is_failed:
            return
        self._is_failed = True
        log.critical("the ledger store in %s failed and takes nothing more", self._path, exc_info=error)
        self.refusal = LedgerStoreFailed(f"The ledger store in {self._path} failed ({error}); restart the process.")
        self._fail_queued(self.refusal)
        rolls, self._rolls = self._rolls, []
        for waiter in rolls:
            if not waiter.done():
                waiter.set_exception(LedgerStoreFailed(*self.refusal.args))
        self._idle()
        self._on_fatal(error)

    def _checkpoint_if_freed(self, free_bytes: int | None) -> None:
        has_room = free_bytes is not None and 0 < self.unmoved_bytes <= free_bytes  # out of the reserve; then the journal goes
        if self._has_freed or has_room:
            self._has_freed = False
            self._on_space()

    def _room_ended(self, error: BaseException | None) -> None:
        if self._is_failed:
            return
        if error is not None:
            self._fatal(error)
            return
        self.refusal = None
        self._on_space()
