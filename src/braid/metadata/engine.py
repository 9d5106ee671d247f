"""The one engine of the `memory` and `embedded` backends: checks each write, numbers it, and owns the sessions.

A write is checked on the loop against the committed state plus the writes still under way and gets the next commit number as
its version, so versions never repeat and CAS is linearizable; `pipeline` makes it durable and visible. The engine also owns
which session owns which ephemeral, and the numbers of sequences. INV2 and INV4 rest on its CAS.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from braid.errors import Closed, InvalidArgument, VersionConflict
from braid.metadata.api import ABSENT, SessionState
from braid.metadata.handle import Handle
from braid.metadata.journal import CREATED, MODS, OWNER, PARTITION, VERSION, Change, Journal, Row
from braid.metadata.names import sequence_key, sequence_prefixes, wrong_partition
from braid.metadata.pipeline import Pipeline
from braid.metadata.sessions import Lease
from braid.metadata.tables import Tables
from braid.metadata.watches import WatchBook
from braid.runtime.clock import Clock
from braid.runtime.env import Runtime
from braid.runtime.threads import Worker

DEFAULT_SESSION_TIMEOUT: Final = 10.0
"""Seconds without a heartbeat after which a session ends."""

IndexEntries = tuple[tuple[str, str], ...]


class Storage(NamedTuple):
    """A journal, the worker it runs on, and the backend's own jobs for that worker."""

    journal: Journal
    worker: Worker
    idle_job: Callable[[], None] | None = None
    close_job: Callable[[], None] | None = None


class Engine:
    """An open store, from which handles (= sessions) are made."""

    def __init__(
        self, runtime: Runtime, storage: Storage, tables: Tables, *, store_id: str, counter: int, session_timeout: float
    ) -> None:
        self.store_id = store_id
        self.loaded_counter = counter
        """Commit counter found at open, before anything was written."""
        self.on_commit: Callable[[int], None] | None = None
        """Called on the loop with the commit counter when a group is durable, before its writers are answered."""
        self.on_failure: Callable[[BaseException], None] | None = None
        """Called once after an error that closed the store; the process should end."""
        self.tables = tables
        self.watches = WatchBook()
        self._runtime = runtime
        self._clock = runtime.clock
        self._storage = storage
        self._loop = asyncio.get_running_loop()
        self._session_timeout = session_timeout
        self._pipeline = Pipeline(
            runtime.clock,
            runtime.slow,
            storage.journal,
            storage.worker,
            tables,
            self.watches,
            counter=counter,
            owner=self,
            idle_job=storage.idle_job,
        )
        self._tails: dict[str, tuple[tuple[int, ...], int]] = {}  # sequence -> highest pending numbers, newest version
        self._leases: dict[str, Lease] = {}
        self._handles: dict[Handle, None] = {}
        self._is_closing = False
        self._closed: asyncio.Future[None] | None = None

    @classmethod
    async def open(cls, runtime: Runtime, storage: Storage, *, session_timeout: float = DEFAULT_SESSION_TIMEOUT) -> Engine:
        """Load the journal, drop what earlier sessions left behind, and serve."""
        journal, worker = storage.journal, storage.worker

        def load() -> tuple[Tables, str, int, int]:
            image = journal.load()
            tables = Tables(image.rows)
            counter = image.counter
            leftovers: list[Change] = [(key, None) for key, row in tables.rows.items() if row[OWNER] is not None]
            if leftovers:
                counter += len(leftovers)
                journal.commit(leftovers, counter)
                for key, _ in leftovers:
                    tables.apply(key, None)
            return tables, image.store_id, counter, image.counter

        try:
            tables, store_id, counter, loaded = await worker.run(load)
        except BaseException:
            if storage.close_job is not None:
                await worker.run(storage.close_job)
            await worker.close()
            raise
        engine = cls(runtime, storage, tables, store_id=store_id, counter=counter, session_timeout=session_timeout)
        engine.loaded_counter = loaded
        return engine

    @property
    def commit_counter(self) -> int:
        """Highest commit that is durable."""
        return self._pipeline.durable

    def handle(self, name: str, *, clock: Clock | None = None) -> Handle:
        """A new handle with a session of its own; `clock` (the holder's) drives its heartbeat."""
        handle = Handle(self, name, clock or self._clock)
        self._handles[handle] = None
        return handle

    async def close(self) -> None:
        """End every session, settle what is under way and release the journal. Idempotent."""
        if self._closed is not None:
            await asyncio.shield(self._closed)
            return
        self._closed = self._loop.create_future()
        try:
            for handle in list(self._handles):
                await handle.close()
            self._is_closing = True
            await self._pipeline.settle()
            self._pipeline.stop()
            if self._storage.close_job is not None:
                await self._storage.worker.run(self._storage.close_job)
            await self._storage.worker.close()
        finally:
            self._closed.set_result(None)

    # For handles: sessions

    def check_open(self) -> None:
        """Raise if the store takes no more calls."""
        if self._pipeline.failure is not None:
            raise Closed(str(self._pipeline.failure))
        if self._is_closing:
            raise Closed("The metadata store was closed.")

    def open_session(self, name: str) -> Lease:
        """A new lease for a handle."""
        self.check_open()
        lease = Lease(f"{name}-{self._runtime.token()}", self._session_timeout, self._clock, self._drop)
        self._leases[lease.id] = lease
        return lease

    async def close_handle(self, handle: Handle, lease: Lease) -> None:
        """End a handle's session; returns once everything it wrote is settled and its ephemerals are gone."""
        self._handles.pop(handle, None)
        self.watches.end(Closed(f"The metadata handle {handle.name} was closed."), handle)
        lease.end(SessionState.CLOSED)
        self._drop(lease)
        await self._pipeline.settle()

    @property
    def is_read_only(self) -> bool:
        """Whether the disk is full: nothing is written until there is room again."""
        return self._pipeline.is_read_only

    def is_live(self, session_id: str) -> bool:
        lease = self._leases.get(session_id)
        return lease is not None and lease.state is SessionState.CONNECTED

    def _drop(self, lease: Lease) -> None:
        """Remove an ended session's ephemerals in one commit."""
        # A read-only store does it when it can write again, a failed one at the next open.
        if lease.owned and self._pipeline.failure is None and not self._pipeline.is_read_only:
            self._write([(key, None) for key in sorted(lease.owned)], None, None, 0)
        self._leases.pop(lease.id, None)

    # For handles: writes. Each checks, queues and returns the future of its answer.

    def put(
        self, key: str, value: bytes, expected: int | None, owner: str | None, partition: str | None, index: IndexEntries
    ) -> asyncio.Future[Row]:
        old = self._pipeline.expected(key)
        if old is not None and old[PARTITION] != partition:
            raise wrong_partition(key, old[PARTITION], partition)
        if expected is not None and expected != (ABSENT if old is None else old[VERSION]):
            return self._pipeline.answer(_conflict(key, expected, old), self._pipeline.pending(key))
        now = self._clock.now_ms()
        version = self._pipeline.given + 1
        if old is None:
            row: Row = (key, partition, version, 0, now, now, owner, index, value)
        else:
            row = (key, partition, version, old[MODS] + 1, old[CREATED], now, owner, index, value)
        future: asyncio.Future[Row] = self._loop.create_future()
        self._write(((key, row),), row, future, len(key) + len(value))
        return future

    def append(
        self, prefix: str, value: bytes, deltas: Sequence[int], partition: str, index: IndexEntries
    ) -> asyncio.Future[Row]:
        last = self.tables.last_of_sequence(prefix)
        tail = self._tails.get(prefix)
        if tail is not None:
            last = tail[0] if last is None else max(last, tail[0])
        if last is None:
            last = (0,) * len(deltas)
        newest = self._pipeline.expected(sequence_key(prefix, last))
        if newest is not None and newest[PARTITION] != partition:
            raise wrong_partition(prefix, newest[PARTITION], partition)
        if len(last) != len(deltas):
            raise InvalidArgument(f"The sequence {prefix} counts {len(last)} numbers, but the call gives {len(deltas)} deltas.")
        numbers = tuple(number + delta for number, delta in zip(last, deltas, strict=True))
        return self.put(sequence_key(prefix, numbers), value, None, None, partition, index)

    def delete(self, key: str, expected: int | None, partition: str | None) -> asyncio.Future[bool]:
        old = self._pipeline.expected(key)
        if old is not None and old[PARTITION] != partition:
            raise wrong_partition(key, old[PARTITION], partition)
        if expected is not None and expected != (ABSENT if old is None else old[VERSION]):
            return self._pipeline.answer(_conflict(key, expected, old), self._pipeline.pending(key))
        if old is None:
            return self._pipeline.answer(False, self._pipeline.pending(key))
        future: asyncio.Future[bool] = self._loop.create_future()
        self._write(((key, None),), True, future, len(key))
        return future

    def delete_all(self, keys: Sequence[str]) -> asyncio.Future[None]:
        """Remove those of the keys that are there, together."""
        future: asyncio.Future[None] = self._loop.create_future()
        self._write([(key, None) for key in keys if self._pipeline.expected(key) is not None], None, future, 0)
        return future

    def will_exist(self, key: str) -> bool:
        """Whether the key is there once everything under way is committed."""
        return self._pipeline.expected(key) is not None

    def _write(
        self, changes: Sequence[Change], answer: Row | bool | None, future: asyncio.Future[Any] | None, size: int
    ) -> None:
        before = [self._pipeline.expected(key) for key, _ in changes]
        self._pipeline.write(changes, answer, future, size)
        for (key, row), old in zip(changes, before, strict=True):
            was = None if old is None else old[OWNER]
            owner = None if row is None else row[OWNER]
            if was != owner:
                self._change_owner(key, was, owner)
            if old is None and row is not None and key[-21:-20] == "-":
                self._note_tails(key, row[VERSION])

    def _change_owner(self, key: str, before: str | None, after: str | None) -> None:
        if before in self._leases:
            self._leases[before].owned.discard(key)
        if after in self._leases:
            self._leases[after].owned.add(key)

    def _note_tails(self, key: str, version: int) -> None:
        """A key that looks like a member of a sequence pushes its numbers up before it is visible."""
        for prefix in sequence_prefixes(key):
            numbers = tuple([int(part) for part in key[len(prefix) + 1 :].split("-")])
            tail = self._tails.get(prefix)
            self._tails[prefix] = (numbers if tail is None else max(numbers, tail[0]), version)

    # From the pipeline

    def published(self, counter: int) -> None:
        if self._tails:
            self._tails = {prefix: tail for prefix, tail in self._tails.items() if tail[1] > counter}
        if self.on_commit is not None:
            self.on_commit(counter)

    def discarded(self, keys: set[str]) -> None:
        self._tails.clear()
        rows = self.tables.rows
        for lease in self._leases.values():
            lease.owned = {key for key in lease.owned | keys if key in rows and rows[key][OWNER] == lease.id}

    def resumed(self) -> None:
        # Sessions may have ended while nothing could be written, or their last commit was given up.
        owners = ((key, row[OWNER]) for key, row in self.tables.rows.items())
        left: list[Change] = [(key, None) for key, owner in owners if owner is not None and not self.is_live(owner)]
        if left:
            self._write(left, None, None, 0)

    def failed(self, error: BaseException) -> None:
        for lease in self._leases.values():
            lease.end(SessionState.LOST)
        self.watches.end(Closed(str(self._pipeline.failure)))
        if self.on_failure is not None:
            self.on_failure(error)


def _conflict(key: str, expected: int, row: Row | None) -> VersionConflict:
    wanted = "to be absent" if expected == ABSENT else f"at version {expected}"
    found = "does not exist" if row is None else f"is at version {row[VERSION]}"
    return VersionConflict(f"The record {key} was expected {wanted} but {found}; read it again before deciding.")
