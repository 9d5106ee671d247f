"""The `memory` ledger store: the semantics of `local` without a disk, for tests and throw-away brokers.

One `MemoryLedgerStore` is one storage cluster; several may live in one process. Entries pushed in one loop turn are confirmed
together in a later one, so that callers meet the same asynchrony as with a disk. Everything is gone when the process ends.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

from braid.errors import Closed, LedgerClosed, LedgerError, LedgerFenced, LedgerNotFound
from braid.ledger.api import (
    NO_ENTRY,
    LedgerListener,
    LedgerMetadata,
    LedgerReader,
    LedgerStore,
    LedgerWriter,
    check_entry_range,
)
from braid.ledger.config import LocalSettings
from braid.ledger.ids import LedgerIds
from braid.runtime.env import Runtime


async def open_store(
    runtime: Runtime,
    *,
    path: Path | None = None,
    settings: LocalSettings | None = None,
    on_fatal: Callable[[BaseException], None] | None = None,
) -> LedgerStore:
    """A new, empty store. It has no use for a place, settings or a disk that fails, but is opened like the others."""
    return MemoryLedgerStore(runtime)


class _Ledger:
    """One ledger: its entries and how far they are confirmed."""

    __slots__ = ("created_ms", "custom", "entries", "is_closed", "is_deleted", "last", "ledger_id", "length", "writer")

    def __init__(self, ledger_id: int, created_ms: int, custom: Mapping[str, bytes]) -> None:
        self.ledger_id = ledger_id
        self.created_ms = created_ms
        self.custom = custom
        self.entries: list[bytes] = []
        self.is_closed = False
        self.is_deleted = False
        self.last = NO_ENTRY
        self.length = 0
        self.writer: MemoryLedgerWriter | None = None

    def metadata(self) -> LedgerMetadata:
        return LedgerMetadata(
            ledger_id=self.ledger_id,
            is_closed=self.is_closed,
            last_entry=self.last,
            length=self.length,
            created_ms=self.created_ms,
            custom=self.custom,
        )


class MemoryLedgerWriter:
    """The one writer of a ledger in memory."""

    __slots__ = (
        "_ledger",
        "_listener",
        "_refusal",
        "_store",
        "_waiters",
        "last_confirmed",
        "last_pushed",
        "ledger_id",
        "length",
    )

    def __init__(self, store: MemoryLedgerStore, ledger: _Ledger, listener: LedgerListener | None) -> None:
        self.ledger_id = ledger.ledger_id
        self.last_pushed = NO_ENTRY
        self.last_confirmed = NO_ENTRY
        self.length = 0
        self._store = store
        self._ledger = ledger
        self._listener = listener
        self._refusal: LedgerError | None = None
        self._waiters: deque[tuple[int, asyncio.Future[int]]] = deque()

    def append(self, head: bytes, body: bytes) -> int:
        if self._refusal is not None:
            raise type(self._refusal)(*self._refusal.args)  # a fresh one: a reused exception collects tracebacks
        data = head + body
        self._ledger.entries.append(data)
        self.last_pushed += 1
        self.length += len(data)
        self._store.touched(self)
        return self.last_pushed

    async def add(self, data: bytes) -> int:
        entry_id = self.append(data, b"")
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiters.append((entry_id, done))
        return await done

    async def close(self) -> LedgerMetadata:
        if self._refusal is not None and not isinstance(self._refusal, LedgerClosed):
            raise type(self._refusal)(*self._refusal.args)
        self._refusal = LedgerClosed(f"Ledger {self.ledger_id} is closed; create a new one to write.")
        await self._store.confirmed()
        if self._ledger.is_deleted:
            raise LedgerFenced(f"Ledger {self.ledger_id} was deleted.")
        self._ledger.is_closed = True
        return self._ledger.metadata()

    def fence(self, why: str) -> bool:
        """Refuse further appends; whether this call was the one that stopped the writer."""
        if self._refusal is not None:
            return False
        self._refusal = LedgerFenced(why)
        return True

    def confirm(self) -> None:
        ledger = self._ledger
        for data in ledger.entries[ledger.last + 1 : self.last_pushed + 1]:
            ledger.length += len(data)
        ledger.last = self.last_confirmed = self.last_pushed
        while self._waiters:
            entry_id, done = self._waiters.popleft()
            if not done.done():
                done.set_result(entry_id)
        if self._listener is not None:
            self._listener.ledger_advanced(self.last_confirmed)

    def tell_fenced(self) -> None:
        if self._listener is not None and self._refusal is not None:
            self._listener.ledger_failed(self._refusal)


class MemoryLedgerReader:
    """A view of a ledger in memory."""

    __slots__ = ("_ledger", "is_closed", "last_confirmed", "ledger_id")

    def __init__(self, ledger: _Ledger) -> None:
        self._ledger = ledger
        self.ledger_id = ledger.ledger_id
        self.last_confirmed = ledger.last
        self.is_closed = ledger.is_closed

    async def read(self, first: int, last: int, max_bytes: int = 0) -> list[bytes]:
        if self._ledger.is_deleted:
            raise LedgerNotFound(f"Ledger {self.ledger_id} was deleted.")
        check_entry_range(self.ledger_id, first, last, self.last_confirmed)
        found = self._ledger.entries[first : last + 1]
        if max_bytes > 0:
            size = 0
            for count, data in enumerate(found):
                size += len(data)
                if size > max_bytes and count:
                    return found[:count]
        return found

    async def length_before(self, entry_id: int) -> int:
        if self._ledger.is_deleted:
            raise LedgerNotFound(f"Ledger {self.ledger_id} was deleted.")
        if entry_id:
            check_entry_range(self.ledger_id, entry_id - 1, entry_id - 1, self.last_confirmed)
        return sum(map(len, self._ledger.entries[:entry_id]))

    async def refresh(self) -> int:
        if self._ledger.is_deleted:
            raise LedgerNotFound(f"Ledger {self.ledger_id} was deleted.")
        self.last_confirmed = self._ledger.last
        self.is_closed = self._ledger.is_closed
        return self.last_confirmed

    async def close(self) -> None:
        return None


class MemoryLedgerStore:
    """Ledgers in a dictionary."""

    def __init__(self, runtime: Runtime) -> None:
        self._clock = runtime.clock
        self._loop = asyncio.get_running_loop()
        self._ids = LedgerIds()
        self._ledgers: dict[int, _Ledger] = {}
        self._touched: dict[MemoryLedgerWriter, None] = {}
        self._turn: asyncio.Future[None] | None = None
        self._is_closed = False

    async def create(
        self,
        *,
        listener: LedgerListener | None = None,
        custom: Mapping[str, bytes] | None = None,
        ledger_id: int | None = None,
    ) -> LedgerWriter:
        self._check_open()
        if ledger_id is None:
            ledger_id = self._ids.take_next()
        else:
            self._ids.take(ledger_id)
        await self.confirmed()
        ledger = _Ledger(ledger_id, self._clock.now_ms(), dict(custom or {}))
        self._ledgers[ledger_id] = ledger
        ledger.writer = MemoryLedgerWriter(self, ledger, listener)
        return ledger.writer

    async def open(self, ledger_id: int, *, fence: bool) -> LedgerReader:
        self._check_open()
        ledger = self._find(ledger_id)
        if fence and not ledger.is_closed:
            writer = ledger.writer
            stopped = writer is not None and writer.fence(
                f"Ledger {ledger_id} was fenced by another owner; this writer is done."
            )
            await self.confirmed()
            if stopped and writer is not None:
                writer.tell_fenced()
            if ledger.is_deleted:
                raise LedgerNotFound(f"Ledger {ledger_id} was deleted.")
            ledger.is_closed = True
        return MemoryLedgerReader(ledger)

    async def metadata(self, ledger_id: int) -> LedgerMetadata:
        self._check_open()
        return self._find(ledger_id).metadata()

    async def delete(self, ledger_id: int) -> None:
        self._check_open()
        ledger = self._ledgers.get(ledger_id)
        if ledger is None:
            return
        writer = ledger.writer
        stopped = writer is not None and writer.fence(f"Ledger {ledger_id} was deleted; its writer is done.")
        await self.confirmed()
        if stopped and writer is not None:
            writer.tell_fenced()
        ledger.is_deleted = True
        self._ledgers.pop(ledger_id, None)

    async def ledgers(self) -> AsyncIterator[int]:
        self._check_open()
        for ledger_id in sorted(self._ledgers):
            yield ledger_id

    async def close(self) -> None:
        if not self._is_closed:
            await self.confirmed()
            self._is_closed = True
            for ledger in self._ledgers.values():
                if ledger.writer is not None:
                    ledger.writer.fence("The ledger store is closed.")

    def touched(self, writer: MemoryLedgerWriter) -> None:
        """Confirm this writer's entries in a later loop turn."""
        self._touched[writer] = None
        self._schedule()

    async def confirmed(self) -> None:
        """Return once everything pushed before this call is confirmed."""
        await asyncio.shield(self._schedule())

    def _schedule(self) -> asyncio.Future[None]:
        if self._turn is None:
            self._turn = self._loop.create_future()
            self._loop.call_soon(self._confirm)
        return self._turn

    def _confirm(self) -> None:
        touched, self._touched = self._touched, {}
        turn, self._turn = self._turn, None
        for writer in touched:
            writer.confirm()
        if turn is not None and not turn.done():
            turn.set_result(None)

    def _find(self, ledger_id: int) -> _Ledger:
        ledger = self._ledgers.get(ledger_id)
        if ledger is None:
            raise LedgerNotFound(f"Ledger {ledger_id} does not exist.")
        return ledger

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed("The ledger store is closed.")
