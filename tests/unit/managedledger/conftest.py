"""A world of logs on real stores: the memory and embedded/local backends, a clock moved by hand, and a fault injector."""

from __future__ import annotations

import asyncio
import heapq
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from braid.errors import BraidError, StoreUnavailable  # noqa: F401 - StoreUnavailable for tests
from braid.ledger.api import LedgerListener, LedgerMetadata, LedgerReader, LedgerStore, LedgerWriter
from braid.ledger.backends import local as local_ledgers
from braid.ledger.backends import memory as memory_ledgers
from braid.managedledger.api import Entry, SingleStore
from braid.managedledger.cache import EntryCache
from braid.managedledger.config import ManagedLedgerConfig
from braid.managedledger.factory import ManagedLedgerFactory
from braid.managedledger.log import ManagedLedger
from braid.metadata.api import MetadataStore
from braid.metadata.backends import embedded as embedded_metadata
from braid.metadata.backends import memory as memory_metadata
from braid.model.positions import Position
from braid.runtime.env import Runtime
from braid.wire.entries import build_entry, entry_metadata
from braid.wire.messages import MessageMetadata

NAME = "t/ns/persistent/topic"


class PowerCut(BaseException):
    """The process ends here. Not an Exception: nothing in the product may handle it."""


class HandClock:
    """Time that moves when the test says so."""

    def __init__(self) -> None:
        self.ms = 1_700_000_000_000
        self._timers: list[tuple[float, int, Any]] = []
        self._number = count()

    def now_ms(self) -> int:
        return self.ms

    def monotonic(self) -> float:
        return self.ms / 1000

    async def sleep(self, seconds: float) -> None:
        done = asyncio.Event()
        self.call_later(seconds, done.set)
        await done.wait()

    def call_later(self, seconds: float, callback: Callable[..., Any], *args: Any) -> Any:
        timer = _HandTimer(lambda: callback(*args))
        heapq.heappush(self._timers, (self.ms + seconds * 1000, next(self._number), timer))
        return timer

    def advance(self, ms: int) -> None:
        end = self.ms + ms
        while self._timers and self._timers[0][0] <= end:
            at, _number, timer = heapq.heappop(self._timers)
            self.ms = max(self.ms, int(at))
            timer.fire()
        self.ms = end


class _HandTimer:
    def __init__(self, call: Callable[[], Any]) -> None:
        self._call: Callable[[], Any] | None = call

    def cancel(self) -> None:
        self._call = None

    def fire(self) -> None:
        if self._call is not None:
            self._call()


class Faults:
    """Counts the calls to the stores; at the n-th one it cuts the power, or injects one error, before or after the call."""

    def __init__(self) -> None:
        self.calls = 0
        self.at = -1
        self.after = False
        self.error: BraidError | None = None
        self.only = ""
        """First words of the calls that may get the error; empty = all."""
        self.is_dead = False
        self.log: list[str] = []

    def arm(self, at: int, *, after: bool, error: BraidError | None = None) -> None:
        self.calls, self.at, self.after, self.error = 0, at, after, error

    def _hit(self, what: str) -> bool:
        if self.is_dead:
            raise PowerCut(what)
        self.calls += 1
        self.log.append(what)
        return self.calls == self.at and (not self.only or what.split()[0] in self.only.split())

    def _trip(self, what: str) -> None:
        if self.error is not None:
            raise self.error
        self.is_dead = True
        raise PowerCut(what)

    def call(self, what: str, work: Callable[[], Any]) -> Any:
        hit = self._hit(what)
        if hit and not self.after:
            self._trip(what)
        result = work()
        if hit:
            self._trip(what)
        return result

    async def run(self, what: str, work: Callable[[], Any]) -> Any:
        hit = self._hit(what)
        if hit and not self.after:
            self._trip(what)
        result = await work()
        if self.is_dead:
            raise PowerCut(what)
        if hit:
            self._trip(what)
        return result


class FaultyMetadata:
    """A metadata handle behind the fault injector."""

    def __init__(self, inner: MetadataStore, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults
        self.capabilities = inner.capabilities

    async def get(self, key: str, **options: Any) -> Any:
        return await self._faults.run(f"get {key}", lambda: self._inner.get(key, **options))

    async def put(self, key: str, value: bytes, **options: Any) -> Any:
        return await self._faults.run(f"put {key}", lambda: self._inner.put(key, value, **options))

    async def delete(self, key: str, **options: Any) -> Any:
        return await self._faults.run(f"delete {key}", lambda: self._inner.delete(key, **options))

    async def scan(self, span: Any, **options: Any) -> AsyncIterator[Any]:
        self._faults.call("scan", lambda: None)
        async for record in self._inner.scan(span, **options):
            yield record


class FaultyWriter:
    """A ledger writer behind the fault injector."""

    def __init__(self, inner: LedgerWriter, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults
        self.ledger_id = inner.ledger_id

    @property
    def last_pushed(self) -> int:
        return self._inner.last_pushed

    @property
    def last_confirmed(self) -> int:
        return self._inner.last_confirmed

    @property
    def length(self) -> int:
        return self._inner.length

    def append(self, head: bytes, body: bytes) -> int:
        result: int = self._faults.call("append", lambda: self._inner.append(head, body))
        return result

    async def add(self, data: bytes) -> int:
        result: int = await self._faults.run("add", lambda: self._inner.add(data))
        return result

    async def close(self) -> LedgerMetadata:
        result: LedgerMetadata = await self._faults.run("close ledger", self._inner.close)
        return result


class FaultyLedgers:
    """A ledger store behind the fault injector; a dead process hears nothing from its writers."""

    def __init__(self, inner: LedgerStore, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults

    async def create(
        self,
        *,
        listener: LedgerListener | None = None,
        custom: Mapping[str, bytes] | None = None,
        ledger_id: int | None = None,
    ) -> Any:
        deaf = None if listener is None else _Deafened(listener, self._faults)
        made = await self._faults.run(
            "create ledger", lambda: self._inner.create(listener=deaf, custom=custom, ledger_id=ledger_id)
        )
        return FaultyWriter(made, self._faults)

    async def open(self, ledger_id: int, *, fence: bool) -> LedgerReader:
        result: LedgerReader = await self._faults.run(
            f"open ledger {ledger_id}", lambda: self._inner.open(ledger_id, fence=fence)
        )
        return result

    async def metadata(self, ledger_id: int) -> LedgerMetadata:
        result: LedgerMetadata = await self._faults.run("ledger metadata", lambda: self._inner.metadata(ledger_id))
        return result

    async def delete(self, ledger_id: int) -> None:
        await self._faults.run(f"delete ledger {ledger_id}", lambda: self._inner.delete(ledger_id))

    def ledgers(self) -> AsyncIterator[int]:
        return self._inner.ledgers()

    async def close(self) -> None:
        return None


class _Deafened:
    def __init__(self, inner: LedgerListener, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults

    def ledger_advanced(self, last_confirmed: int) -> None:
        if not self._faults.is_dead:
            self._inner.ledger_advanced(last_confirmed)

    def ledger_failed(self, error: Any) -> None:
        if not self._faults.is_dead:
            self._inner.ledger_failed(error)


class Listener:
    """Remembers what a log reported."""

    def __init__(self) -> None:
        self.added: list[tuple[Entry, object]] = []
        self.failed: list[tuple[BraidError, list[object]]] = []
        self._changed = asyncio.Event()

    def entries_added(self, entries: list[Entry]) -> None:
        self.added += [(entry, entry.context) for entry in entries]
        for entry in entries:
            entry.context = None
        self._changed.set()

    def log_failed(self, error: BraidError, contexts: list[object]) -> None:
        self.failed.append((error, contexts))
        self._changed.set()

    @property
    def contexts(self) -> list[object]:
        return [context for _entry, context in self.added]

    @property
    def failed_contexts(self) -> list[object]:
        return [context for _error, contexts in self.failed for context in contexts]

    async def until(self, reports: int) -> None:
        """Wait until so many adds have ended, well or not."""
        while len(self.added) + len(self.failed_contexts) < reports:
            self._changed.clear()
            await self._changed.wait()


def body_of(number: int, messages: int = 1, size: int = 0) -> bytes:
    """A producer's entry."""
    metadata = MessageMetadata(producer_name="p", sequence_id=number, publish_time=1)
    if messages > 1:
        metadata.num_messages_in_batch = messages
    return build_entry(metadata, b"%d:" % number + b"x" * size)


class World:
    """Stores that outlive brokers, and the logs opened on them."""

    def __init__(self, runtime: Runtime, clock: HandClock, metadata: Any, ledgers: LedgerStore) -> None:
        self.runtime = runtime
        self.clock = clock
        self.engine = metadata
        self.ledgers = ledgers
        self.config = ManagedLedgerConfig(max_entries_per_ledger=5, min_ledger_age_ms=0)
        self._brokers = count()
        self.opened: list[ManagedLedger] = []

    def factory(
        self,
        *,
        config: ManagedLedgerConfig | None = None,
        cache: EntryCache | None = None,
        faults: Faults | None = None,
        resolver: Any = None,
        on_claim: Any = None,
    ) -> ManagedLedgerFactory:
        """A new broker's factory, with its own metadata handle."""
        handle: Any = self.engine.handle(f"broker-{next(self._brokers)}")
        ledgers: Any = self.ledgers
        if faults is not None:
            handle, ledgers = FaultyMetadata(handle, faults), FaultyLedgers(ledgers, faults)
        return ManagedLedgerFactory(
            self.runtime,
            handle,
            resolver or SingleStore(ledgers),
            config or self.config,
            cache or EntryCache(1 << 20),
            on_claim=on_claim,
        )

    async def open(self, name: str = NAME, *, create: bool = True, **options: Any) -> tuple[ManagedLedger, Listener]:
        """Open a log as a new broker would."""
        listener = Listener()
        opened = await self.factory(**options).open(name, listener, create=create)
        self.opened.append(opened)
        return opened, listener

    async def handle(self) -> Any:
        return self.engine.handle(f"test-{next(self._brokers)}")

    async def close(self) -> None:
        for log in self.opened:
            await log.close()
        await self.engine.close()
        await self.ledgers.close()


async def fill(log: ManagedLedger, listener: Listener, numbers: range, messages: Callable[[int], int] = lambda _: 1) -> None:
    """Add entries and wait until they are durable."""
    before = len(listener.added) + len(listener.failed_contexts)
    for number in numbers:
        log.add(body_of(number, messages(number)), messages(number), number)
    await listener.until(before + len(numbers))


async def everything(log: ManagedLedger, start: Position | None = None) -> list[Entry]:
    """All entries of a log, from storage."""
    found: list[Entry] = []
    position = start or Position(-1, -1)
    while entries := await log.read(position, 100, 1 << 20):
        found += entries
        position = Position(entries[-1].ledger_id, entries[-1].entry_id + 1)
    return found


def number_of(entry: Entry) -> int:
    """The number given to `body_of`."""
    return int(entry_metadata(entry.body).sequence_id)


@pytest.fixture
def kit() -> Any:
    """This module: test modules are no package and cannot import it."""
    return sys.modules[__name__]


async def memory_world() -> World:
    """Logs on the memory backends."""
    clock = HandClock()
    runtime = Runtime(clock=clock)
    return World(runtime, clock, await memory_metadata.open_store(runtime), await memory_ledgers.open_store(runtime))


@pytest.fixture
async def world() -> AsyncIterator[World]:
    """Logs on the memory backends."""
    made = await memory_world()
    yield made
    await made.close()


async def disk_world(path: Path) -> World:
    """Logs on the embedded metadata store and the local ledger store."""
    clock = HandClock()
    runtime = Runtime(clock=clock)
    metadata = await embedded_metadata.open_store(runtime, path=path / "metadata")
    return World(runtime, clock, metadata, await local_ledgers.open_store(runtime, path=path / "ledgers"))
