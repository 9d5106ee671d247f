"""The stores of a simulated world as brokers see them: on a node of their own, with delays, and a record of what they do.

In the product one process holds brokers and stores; here they are told apart, so that a broker can be paused or killed while
the stores go on. A call runs on the stores' node and its continuation on the caller's. Owns the evidence for single writer and
unchanged bytes: each entry appended, confirmed, fenced and read is written to the history.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from braid.errors import Closed, LedgerError, LedgerFenced
from braid.ledger.api import LedgerListener, LedgerMetadata, LedgerReader, LedgerStore, LedgerWriter
from braid.managedledger.records import ROOT, LogRecord, decode_record
from braid.metadata.engine import Engine, IndexEntries, Storage
from braid.metadata.handle import Handle
from braid.metadata.journal import Row
from braid.metadata.sessions import Lease
from braid.metadata.tables import Tables
from braid.model.txn import TxnId
from braid.runtime.clock import Clock
from braid.runtime.env import Random, Runtime
from braid.testing.journal import FileJournal
from braid.testing.sim.history import History
from braid.testing.sim.layouts import LayoutNotes, is_segment_log
from braid.testing.sim.loop import NODE, Node, on
from braid.testing.sim.txn_notes import TxnNotes
from braid.wire.checksum import crc32c
from braid.wire.entries import split_entry

T = TypeVar("T")


class EpochNotes:
    """Writes to the history every owner epoch of a log that is new."""

    def __init__(self, history: History, tables: Tables) -> None:
        self._history = history
        self._tables = tables
        self._seen: dict[str, int] = {}
        self._touched: dict[str, None] = {}
        self._has_looked = False
        touched = self._touched

        class TouchedTables(type(tables)):  # type: ignore[misc]
            __slots__ = ()

            def apply(self, key: str, row: Row | None) -> Row | None:
                if key.startswith(ROOT):
                    touched[key] = None
                old: Row | None = super().apply(key, row)
                return old

        tables.__class__ = TouchedTables

    def look(self) -> None:
        """Look at the logs whose records have changed, in the order of the table; at all logs the first time."""
        rows = self._tables.rows
        if self._has_looked and len(self._touched) <= 1:
            keys = [key for key in self._touched if key in rows]
        else:
            keys = [key for key in rows if key.startswith(ROOT)]
        self._has_looked = True
        self._touched.clear()
        for key in keys:
            row = rows[key]
            if self._seen.get(key) != row[2]:
                self._seen[key] = row[2]
                if key.count("/") == 5 or is_segment_log(key):
                    record = decode_record(LogRecord, key, row[-1])
                    self._history.add("store", "info", "owner", [key, record.incarnation], epoch=record.owner_epoch)


class NodeEngine(Engine):
    """The metadata engine; whatever it schedules belongs to the node it was opened on."""

    home: Node
    epochs: EpochNotes

    def handle(self, name: str, *, clock: Clock | None = None) -> Handle:
        handle = super().handle(name, clock=clock)
        self._holders[handle] = NODE.get()
        return handle

    def node_died(self, node: Node) -> None:
        """The store notices that a peer is gone: its watches end; its sessions end when their time is up."""
        for handle in [each for each, holder in self._holders.items() if holder is node]:
            del self._holders[handle]
            self._handles.pop(handle, None)
            self.watches.end(Closed(f"The holder of {handle.name} is gone."), handle)

    def open_session(self, name: str) -> Lease:
        with on(self.home):
            return super().open_session(name)

    async def close_handle(self, handle: Handle, lease: Lease) -> None:
        with on(self.home):  # never around an await: the caller itself would move
            task = asyncio.get_running_loop().create_task(super().close_handle(handle, lease))
        self._holders.pop(handle, None)
        await asyncio.shield(task)

    def put(
        self, key: str, value: bytes, expected: int | None, owner: str | None, partition: str | None, index: IndexEntries
    ) -> asyncio.Future[Row]:
        with on(self.home):
            return super().put(key, value, expected, owner, partition, index)

    def append(
        self, prefix: str, value: bytes, deltas: Sequence[int], partition: str, index: IndexEntries
    ) -> asyncio.Future[Row]:
        with on(self.home):
            return super().append(prefix, value, deltas, partition, index)

    def delete(self, key: str, expected: int | None, partition: str | None) -> asyncio.Future[bool]:
        with on(self.home):
            return super().delete(key, expected, partition)

    def delete_all(self, keys: Sequence[str]) -> asyncio.Future[None]:
        with on(self.home):
            return super().delete_all(keys)

    def published(self, counter: int) -> None:
        super().published(counter)
        self.epochs.look()

    @property
    def _holders(self) -> dict[Handle, Node]:
        holders: dict[Handle, Node] = self.__dict__.setdefault("_holding_nodes", {})
        return holders


async def open_metadata(runtime: Runtime, path: Path, home: Node, history: History, session_timeout: float) -> NodeEngine:
    """The metadata store on the runtime's file layer."""
    journal = FileJournal(runtime.files, path, runtime.token(128))
    storage = Storage(journal, runtime.threads.worker("metadata-journal"), None, journal.close)
    engine = await NodeEngine.open(runtime, storage, session_timeout=session_timeout)
    assert isinstance(engine, NodeEngine)
    engine.home = home
    engine.epochs = EpochNotes(history, engine.tables)
    LayoutNotes(history).listen(engine.tables)
    TxnNotes(history).listen(engine.tables)
    return engine


class Bridge:
    """Calls from a broker's node to the stores' node and back."""

    def __init__(self, home: Node, caller: Node, rng: Random, slowest: float) -> None:
        self.home = home
        self.caller = caller
        self._rng = rng
        self._slowest = slowest
        self._loop = asyncio.get_running_loop()
        with on(caller):
            self._context = contextvars.copy_context()
        self._back: deque[tuple[Callable[..., None], Any]] = deque()

    async def call(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work` on the other side; it is finished there whatever becomes of the caller."""

        async def there() -> T:
            await asyncio.sleep(self._delay())
            return await work()

        answer: asyncio.Future[T] = self._loop.create_future()
        with on(self.home):
            task = self._loop.create_task(there())
            task.add_done_callback(lambda done: self.tell(partial(_settle, answer), done))
        return await answer

    def tell(self, callback: Callable[..., None], value: Any) -> None:
        """Call back on the caller's side, later, in order: an answer never overtakes what the store said before it."""
        self._back.append((callback, value))
        self._loop.call_later(self._delay(), self._arrive, context=self._context)

    def is_quiet(self) -> bool:
        """Whether this once nobody is told what nobody asked."""
        return self._rng.random() < 0.7

    def _arrive(self) -> None:
        callback, value = self._back.popleft()
        callback(value)

    def _delay(self) -> float:
        return self._slowest * self._rng.random() ** 2


def _transaction_of(head: bytes) -> str:
    """The transaction that an entry's head names; empty if it names none."""
    txn = split_entry(head)[2] if head else None
    return "" if txn is None else str(TxnId(*txn))


def _settle(answer: asyncio.Future[Any], done: asyncio.Task[Any]) -> None:
    if answer.done() or done.cancelled():
        return
    error = done.exception()
    if error is None:
        answer.set_result(done.result())
    else:
        answer.set_exception(error)


class SimWriter:
    """A writer whose appends are written down, and whose progress reaches its listener over the bridge."""

    def __init__(self, store: SimLedgers, listener: LedgerListener | None, custom: Mapping[str, bytes]) -> None:
        self.log = custom.get("braid/name", b"").decode()
        self.inner: LedgerWriter
        self._component = custom.get("component", b"").decode()
        self._store = store
        self._listener = listener
        self._waiters: deque[tuple[int, asyncio.Future[int]]] = deque()

    @property
    def ledger_id(self) -> int:
        return self.inner.ledger_id

    @property
    def last_pushed(self) -> int:
        return self.inner.last_pushed

    @property
    def last_confirmed(self) -> int:
        return self.inner.last_confirmed

    @property
    def length(self) -> int:
        return self.inner.length

    def append(self, head: bytes, body: bytes) -> int:
        store = self._store
        try:
            with on(store.bridge.home):
                entry = self.inner.append(head, body)
        except LedgerFenced:
            store.note("fail", "append", [self.log, self.ledger_id, self.last_pushed + 1])
            raise
        value = [self.log, self.ledger_id, entry, crc32c(head + body)]
        store.note("invoke", "append", value, txn=_transaction_of(head) if self._component == "managed-ledger" else "")
        return entry

    async def add(self, data: bytes) -> int:
        entry = self.append(data, b"")
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiters.append((entry, done))
        return await done

    async def close(self) -> LedgerMetadata:
        return await self._store.bridge.call(self.inner.close)

    # From the store, on its node.

    def ledger_advanced(self, last_confirmed: int) -> None:
        self._store.note("ok", "append", [self.log, self.ledger_id, last_confirmed, self._component])
        self._store.bridge.tell(self._advanced, last_confirmed)

    def ledger_failed(self, error: LedgerError) -> None:
        if isinstance(error, LedgerFenced) and self.last_pushed == self.last_confirmed and self._store.bridge.is_quiet():
            return  # a remote store tells a fenced writer nothing before it writes again
        self._store.bridge.tell(self._failed, error)

    # On the broker's node.

    def _advanced(self, last: int) -> None:
        while self._waiters and self._waiters[0][0] <= last:
            entry, done = self._waiters.popleft()
            if not done.done():
                done.set_result(entry)
        if self._listener is not None:
            self._listener.ledger_advanced(last)

    def _failed(self, error: LedgerError) -> None:
        while self._waiters:
            done = self._waiters.popleft()[1]
            if not done.done():
                done.set_exception(type(error)(*error.args))
        if self._listener is not None:
            self._listener.ledger_failed(error)


class SimReader:
    """A reader whose bytes are written down."""

    def __init__(self, store: SimLedgers, inner: LedgerReader) -> None:
        self._store = store
        self._inner = inner
        self.ledger_id = inner.ledger_id

    @property
    def last_confirmed(self) -> int:
        return self._inner.last_confirmed

    @property
    def is_closed(self) -> bool:
        return self._inner.is_closed

    async def read(self, first: int, last: int, max_bytes: int = 0) -> list[bytes]:
        entries = await self._store.bridge.call(lambda: self._inner.read(first, last, max_bytes))
        self._store.note("ok", "read", [self.ledger_id, first, [crc32c(entry) for entry in entries]])
        return entries

    async def length_before(self, entry_id: int) -> int:
        return await self._store.bridge.call(lambda: self._inner.length_before(entry_id))

    async def refresh(self) -> int:
        return await self._store.bridge.call(self._inner.refresh)

    async def close(self) -> None:
        await self._store.bridge.call(self._inner.close)


class SimLedgers:
    """The ledger store as one broker sees it."""

    def __init__(self, inner: LedgerStore, bridge: Bridge, history: History) -> None:
        self.bridge = bridge
        self._inner = inner
        self._history = history
        self.low_ids = False
        """A fault: the next ledger is created with an id below all others, if one is free."""

    def note(self, kind: Any, op: str, value: Any, *, txn: str = "") -> None:
        segment = value[0] if isinstance(value[0], int) else value[1]
        self._history.add(self.bridge.caller.name, kind, op, value, segment=segment, txn=txn)

    async def create(
        self,
        *,
        listener: LedgerListener | None = None,
        custom: Mapping[str, bytes] | None = None,
        ledger_id: int | None = None,
    ) -> LedgerWriter:
        writer = SimWriter(self, listener, custom or {})
        if self.low_ids and ledger_id is None:
            ledger_id = self._free_low_id()
        writer.inner = await self.bridge.call(lambda: self._inner.create(listener=writer, custom=custom, ledger_id=ledger_id))
        self.note("ok", "create", [writer.ledger_id, writer.log])
        return cast(LedgerWriter, writer)

    async def open(self, ledger_id: int, *, fence: bool) -> LedgerReader:
        reader = await self.bridge.call(lambda: self._inner.open(ledger_id, fence=fence))
        if fence:
            self.note("ok", "fence", [ledger_id, reader.last_confirmed])
        return cast(LedgerReader, SimReader(self, reader))

    async def metadata(self, ledger_id: int) -> LedgerMetadata:
        return await self.bridge.call(lambda: self._inner.metadata(ledger_id))

    async def delete(self, ledger_id: int) -> None:
        await self.bridge.call(lambda: self._inner.delete(ledger_id))

    async def ledgers(self) -> AsyncIterator[int]:
        async for ledger_id in self._inner.ledgers():
            yield ledger_id

    async def close(self) -> None:
        """The store outlives its brokers."""

    def _free_low_id(self) -> int | None:
        inner: Any = self._inner
        gaps = inner._catalog.ids.gaps
        self.low_ids = False
        return int(gaps[0][0]) if gaps else None
