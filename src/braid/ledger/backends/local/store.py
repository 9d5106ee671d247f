"""`LocalLedgerStore`: ledgers on the disk of one machine, shared by all brokers of the process.

Owns the catalog while the store is open, the buffer of confirmed entries, flushes and checkpoints. Three threads: the journal
(group commit), the files (flush, checkpoint, removal), the reads; none waits for another. Upholds INV1, INV3 and the
fencing half of INV2.

A checkpoint begins a new journal segment, moves large buffers to ledger files, syncs these, writes a snapshot that holds the
state of all ledgers with the small buffers, and removes the older segments. Commit groups go on meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from braid.errors import Closed, LedgerClosed, LedgerError, LedgerFenced, LedgerNotFound, LedgerStoreFailed, LedgerStoreReadOnly
from braid.ledger.api import LedgerListener, LedgerMetadata, LedgerReader, LedgerWriter
from braid.ledger.backends.local import records
from braid.ledger.backends.local.commit import Group, GroupCommit, Op
from braid.ledger.backends.local.ledgerfile import BlockReader, BlockWriter, open_file_share
from braid.ledger.backends.local.reader import FileAccess, LocalLedgerReader
from braid.ledger.backends.local.records import CreateBody, HeadBody, Kind, MarkBody
from braid.ledger.backends.local.recovery import LEDGER_FOLDER, Recovered
from braid.ledger.backends.local.snapshot import SnapshotWriter
from braid.ledger.backends.local.state import ENTRY_OVERHEAD, LedgerState
from braid.ledger.backends.local.writer import LocalLedgerWriter
from braid.ledger.config import LocalSettings
from braid.runtime.clock import Timer
from braid.runtime.env import Runtime
from braid.runtime.files import DirectoryLock
from braid.runtime.tasks import Tasks
from braid.runtime.threads import Worker

log = logging.getLogger(__name__)

_FLUSH_JOB_BYTES = 8 << 20
_CAPTURE_LEDGERS = 256
"""Ledgers copied into a snapshot per loop turn."""


class LocalLedgerStore:
    """See `LedgerStore`. Made by `open_store`."""

    def __init__(
        self,
        runtime: Runtime,
        path: Path,
        settings: LocalSettings,
        recovered: Recovered,
        lock: DirectoryLock,
        journal_worker: Worker,
        on_fatal: Callable[[BaseException], None] | None,
    ) -> None:
        self._runtime = runtime
        self._path = path
        self._settings = settings
        self._lock = lock
        self._store_id = recovered.store_id
        self._catalog = recovered.catalog
        self._journal = recovered.journal
        self._journal_worker = journal_worker
        self._files: BlockWriter = recovered.writer
        self._file_worker = runtime.threads.worker("ledger-files")
        self._access = FileAccess(
            BlockReader(
                runtime.files,
                path / LEDGER_FOLDER,
                self._store_id,
                open_files=open_file_share(runtime.files, settings.open_files),
            ),
            runtime.threads.worker("ledger-reads"),
        )
        self._buffered = recovered.buffered
        self._unchecked_bytes = recovered.replayed
        """Journal bytes since the last checkpoint."""
        self._is_mark_dirty = False
        self._is_closed = False
        self._is_failed = False
        self._checkpoint_lock = asyncio.Lock()
        self._flush_lock = asyncio.Lock()
        self._checkpointing: asyncio.Task[Any] | None = None
        self._flushing: asyncio.Task[Any] | None = None
        self._tasks = Tasks("ledger-store", self._task_failed)
        self._loop = asyncio.get_running_loop()
        self._report_fatal = on_fatal
        self._commit = GroupCommit(
            self._journal,
            journal_worker,
            runtime.clock,
            runtime.slow,
            runtime.files,
            path,
            settings,
            self._confirmed,
            self._space_changed,
            self._fatal,
        )
        self._timer: Timer = runtime.clock.call_later(settings.checkpoint_seconds, self._checkpoint_due)

    # The port

    async def create(
        self,
        *,
        listener: LedgerListener | None = None,
        custom: Mapping[str, bytes] | None = None,
        ledger_id: int | None = None,
    ) -> LedgerWriter:
        self._check_open()
        self._check_writable()
        given = ledger_id is not None
        if ledger_id is None:
            ledger_id = self._catalog.ids.take_next()
        else:
            self._catalog.ids.take(ledger_id)
        state = LedgerState(ledger_id, self._runtime.clock.now_ms(), dict(custom or {}))
        state.writer = writer = LocalLedgerWriter(self, self._commit, state, listener)

        def created() -> None:
            self._catalog.ledgers[state.ledger_id] = state

        def failed(error: LedgerError) -> None:
            if given and isinstance(error, LedgerStoreReadOnly):
                self._catalog.ids.give_back(state.ledger_id)

        body = records.encode_body(CreateBody(state.created_ms, state.custom))
        await self._submit(records.record(Kind.CREATE, ledger_id, 0, body), created, failed)
        return writer

    async def open(self, ledger_id: int, *, fence: bool) -> LedgerReader:
        self._check_open()
        state = self._catalog.find(ledger_id)
        if fence and not state.is_closed:
            if state.writer is not None:
                state.writer.stop(LedgerFenced(f"Ledger {ledger_id} was fenced by another owner; this writer is done."))
            await self.settle(state)
        return LocalLedgerReader(state, self._access)

    async def metadata(self, ledger_id: int) -> LedgerMetadata:
        self._check_open()
        return self._catalog.find(ledger_id).metadata()

    async def delete(self, ledger_id: int) -> None:
        self._check_open()
        state = self._catalog.ledgers.get(ledger_id)
        if state is None:
            return
        writer = state.writer
        if writer is not None:
            writer.stop(LedgerFenced(f"Ledger {ledger_id} was deleted; its writer is done."))

        def deleted() -> None:
            if self._catalog.ledgers.pop(ledger_id, None) is not None:
                self._forget(state)
            if writer is not None:
                writer.tell_stopped()

        await self._submit(records.record(Kind.DELETE, ledger_id, 0), deleted, frees=True)

    async def ledgers(self) -> AsyncIterator[int]:
        self._check_open()
        for ledger_id in sorted(self._catalog.ledgers):
            yield ledger_id

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._timer.cancel()
        for state in self._catalog.ledgers.values():
            if state.writer is not None:
                state.writer.stop(LedgerClosed("The ledger store is closed."))
        await self._commit.drain()
        if not self._is_failed:
            while self._checkpointing is not None:
                await asyncio.wait([self._checkpointing])
            await self.checkpoint()
        await self._tasks.close()
        self._commit.close()
        self._access.is_closed = True
        for worker, end in (
            (self._journal_worker, self._journal.close),
            (self._file_worker, self._files.close),
            (self._access.worker, self._access.blocks.close),
        ):
            if not self._is_failed:
                await worker.run(end)
            await worker.close()
        self._lock.release()

    # Beyond the port

    @property
    def store_id(self) -> str:
        """Random identity of this store, fixed when its directory was made."""
        return self._store_id.hex()

    @property
    def pending_bytes(self) -> int:
        """Bytes pushed and not yet handed to the disk; callers slow their clients down before `append` has to refuse."""
        return self._commit.pending_bytes

    @property
    def buffered_bytes(self) -> int:
        """Memory taken by confirmed entries that are not in ledger files yet."""
        return self._buffered

    @property
    def is_read_only(self) -> bool:
        return self._commit.refusal is not None

    @property
    def disk_bytes(self) -> int:
        """Size of the disk."""
        return self._runtime.files.total_bytes(self._path)

    @property
    def refusal(self) -> LedgerError | None:
        """Why nothing can be written at the moment, if so; to be told, not to be raised."""
        return self._commit.refusal

    def space(self) -> tuple[int, int]:
        """Free bytes of the disk, and how many of them are kept in reserve. One call that touches no disk (statvfs)."""
        return self._runtime.files.free_bytes(self._path), self._settings.reserve_bytes

    def note_metadata(self, store_id: str, commit: int) -> None:
        """Remember the highest acknowledged commit of the metadata store; durable with the next group or checkpoint."""
        mark = self._catalog.mark
        if mark is None or mark.store_id != store_id or mark.commit < commit:
            self._catalog.mark = MarkBody(store_id, commit)
            self._commit.mark = records.record(Kind.MARK, 0, 0, records.encode_body(self._catalog.mark))
            self._is_mark_dirty = True

    def metadata_mark(self) -> tuple[str, int] | None:
        """Store id and commit noted last."""
        mark = self._catalog.mark
        return None if mark is None else (mark.store_id, mark.commit)

    async def settle(self, state: LedgerState) -> None:
        """Close a ledger whose writer takes no more, after everything pushed; shared by `close` and fencing `open`."""
        while not state.is_closed:
            if state.is_deleted:
                raise LedgerNotFound(f"Ledger {state.ledger_id} was deleted.")
            if state.settling is not None:
                await asyncio.wait([state.settling])
                continue
            self._check_open()
            await self._submit_close(state)

    async def checkpoint(self) -> None:
        """Make the journal so far superfluous. Returns early when there is nothing to do; does not raise."""
        async with self._checkpoint_lock:
            if self._is_failed or not (self._unchecked_bytes or self._is_mark_dirty):
                return
            before, self._unchecked_bytes = self._unchecked_bytes, 0
            was_mark_dirty, self._is_mark_dirty = self._is_mark_dirty, False
            try:
                segment = await self._commit.roll()
                async with self._flush_lock:
                    # No flush may come between sync and snapshot: it would move entries into bytes that are not durable.
                    await self._flush(self._large_tails(self._settings.tail_bytes))
                    await self._file_worker.run(self._files.sync)
                    await self._write_snapshot(segment)
                await self._file_worker.run(partial(self._journal.remove_before, segment))
                self._commit.unmoved_bytes = 0
            except (OSError, LedgerError) as exc:
                self._unchecked_bytes += before
                self._is_mark_dirty |= was_mark_dirty
                self._no_room(exc)

    # Operations in the queue

    async def _submit(
        self,
        record: bytes,
        apply: Callable[[], None],
        failed: Callable[[LedgerError], None] | None = None,
        *,
        frees: bool = False,
    ) -> None:
        done: asyncio.Future[None] = self._loop.create_future()
        self._commit.submit(record, Op(done, apply, failed), frees=frees)
        try:
            await done
        finally:
            del done  # an error would hold this frame, and the frame the error, until a rare collection

    async def _submit_close(self, state: LedgerState) -> None:
        writer = state.writer
        last = state.last if writer is None or writer.is_failed else writer.last_pushed
        state.settling = done = self._loop.create_future()
        done.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # its waiters may have gone

        def closed() -> None:
            state.settling = None
            if not state.is_deleted:
                state.is_closed = True
            if writer is not None:
                writer.tell_stopped()

        def failed(error: LedgerError) -> None:
            state.settling = None
            if writer is not None:
                writer.fail(error)

        # Taken from the reserve if need be: a log must be closed to be opened, and opened to be read, trimmed or deleted.
        self._commit.submit(records.record(Kind.CLOSE, state.ledger_id, last), Op(done, closed, failed), frees=True)
        await asyncio.shield(done)

    def _forget(self, state: LedgerState) -> None:
        state.is_deleted = True
        self._buffered -= state.tail_memory
        state.tail = []
        state.length = state.file_length
        self._release()
        if state.file_bytes or self._flush_lock.locked():
            self._file_worker.post(partial(self._files.remove, (state.ledger_id,)), self._removed)
            self._access.worker.post(partial(self._access.blocks.forget, (state.ledger_id,)), self._removed)

    def _removed(self, _: Any, error: BaseException | None) -> None:
        if error is not None:
            log.warning("a file of a deleted ledger could not be removed; the next start tries again", exc_info=error)

    # Confirmations, flushes, checkpoints

    def _confirmed(self, group: Group) -> None:
        self._buffered += group.length + ENTRY_OVERHEAD * group.entries
        self._unchecked_bytes += group.written
        if self._buffered > self._settings.buffer_bytes // 2:
            self._commit.is_held = self._buffered > self._settings.buffer_bytes
            if self._flushing is None:
                self._flushing = self._tasks.spawn(self._relieve(), "flush")
        if self._unchecked_bytes >= self._settings.checkpoint_bytes:
            self._start_checkpoint()

    def _start_checkpoint(self) -> None:
        if self._checkpointing is None and not self._is_failed:
            self._checkpointing = self._tasks.spawn(self._run_checkpoint(), "checkpoint")

    async def _run_checkpoint(self) -> None:
        try:
            await self.checkpoint()
        finally:
            self._checkpointing = None

    def _checkpoint_due(self) -> None:
        if self._is_closed or self._is_failed:
            return
        self._timer = self._runtime.clock.call_later(self._settings.checkpoint_seconds, self._checkpoint_due)
        self._start_checkpoint()

    def _space_changed(self) -> None:
        """Out of space: a checkpoint may free some, from the reserve. Room again: catch up."""
        if not self._is_closed:
            self._start_checkpoint()
            if self._commit.is_held and self._flushing is None:
                self._flushing = self._tasks.spawn(self._relieve(), "flush")

    async def _relieve(self) -> None:
        """Flush the largest buffers until a quarter of the bound is left."""
        try:
            while True:
                async with self._flush_lock:
                    chosen: list[LedgerState] = []
                    excess = self._buffered - self._settings.buffer_bytes // 4
                    for state in self._large_tails(0):
                        if excess <= 0:
                            break
                        chosen.append(state)
                        excess -= state.tail_memory
                    await self._flush(chosen)
                if not chosen or not self._commit.is_held:
                    break  # else more came than was written, and nobody would start the next flush
        except (OSError, LedgerError) as exc:
            self._no_room(exc)
        finally:
            self._flushing = None

    def _no_room(self, error: OSError | LedgerError) -> None:
        """A flush or checkpoint failed. If that was for lack of room, more is taken only once there is enough for the next."""
        self._commit.unmoved_bytes = self._buffered
        self._commit.failed_job(error)

    def _large_tails(self, least: int) -> list[LedgerState]:
        """Ledgers with at least that much buffered, largest first."""
        found = [
            state
            for state in self._catalog.ledgers.values()
            if state.tail and state.tail_memory >= least and not state.is_file_missing
        ]
        found.sort(key=lambda state: state.tail_memory, reverse=True)
        return found

    async def _flush(self, states: list[LedgerState]) -> None:
        """Write the buffers of these ledgers to their files, a few at a time; not synced. Needs the flush lock."""
        at = 0
        while at < len(states):
            batch: list[tuple[LedgerState, list[bytes], int]] = []
            size = 0
            while at < len(states) and size < _FLUSH_JOB_BYTES:
                state = states[at]
                at += 1
                if state.tail:  # else it was deleted meanwhile
                    batch.append((state, state.tail[:], state.tail_length))
                    size += state.tail_memory
            jobs = [(state.ledger_id, state.file_bytes, state.file_entries, tail) for state, tail, _ in batch]
            sizes = await self._file_worker.run(partial(self._append_blocks, jobs))
            for (state, tail, length), file_bytes in zip(batch, sizes, strict=True):
                if not state.is_deleted:
                    state.flushed(len(tail), length, file_bytes)
                    self._buffered -= length + ENTRY_OVERHEAD * len(tail)
            self._release()

    def _release(self) -> None:
        if self._buffered <= self._settings.buffer_bytes:
            self._commit.release()

    def _append_blocks(self, jobs: list[tuple[int, int, int, list[bytes]]]) -> list[int]:
        return [self._files.append(*job) for job in jobs]

    async def _write_snapshot(self, segment: int) -> None:
        ids = self._catalog.ids
        head = HeadBody(segment, ids.next_id, ids.gaps)
        run = self._file_worker.run
        snapshot = await run(partial(SnapshotWriter, self._runtime.files, self._path, self._store_id, head))
        try:
            states = list(self._catalog.ledgers.values())
            for at in range(0, len(states), _CAPTURE_LEDGERS):
                captured = [
                    (state.ledger_id, state.body(), state.tail[:])
                    for state in states[at : at + _CAPTURE_LEDGERS]
                    if not state.is_deleted
                ]
                await run(partial(snapshot.add, captured))
            await run(partial(snapshot.finish, self._catalog.mark))
        except BaseException:
            snapshot.abandon()
            raise

    # Ends

    def _task_failed(self, error: BaseException) -> None:
        self._commit.failed_job(error)

    def _fatal(self, error: BaseException) -> None:
        self._is_failed = True
        self._timer.cancel()
        if self._report_fatal is not None:
            self._report_fatal(error)

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed("The ledger store is closed.")
        if self._is_failed:
            raise LedgerStoreFailed(f"The ledger store in {self._path} failed; restart the process.")

    def _check_writable(self) -> None:
        if (refusal := self._commit.refusal) is not None:
            raise type(refusal)(*refusal.args)
