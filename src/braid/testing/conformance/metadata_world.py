"""What the metadata conformance suite needs from a backend under test, and the worlds of the engine's backends.

A third party writes one class with the methods of `StoreWorld`. Handles of one world are separate sessions on the same store.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Protocol

from braid.metadata.api import Delete, Event, MetadataStore, Put, Record, Synced
from braid.metadata.engine import Engine
from braid.metadata.handle import Handle
from braid.runtime.clock import Timer
from braid.runtime.env import Runtime

PATIENCE = 20.0
"""Seconds after which something that must happen is declared missing."""


class StoreWorld(Protocol):
    """One store under test."""

    is_durable: bool
    """Records survive `restart`."""
    refuses_wrong_partition: bool
    """Naming another partition than a record's own is an error rather than a miss."""

    async def handle(self) -> MetadataStore:
        """A new handle: a session of its own on the store."""
        ...

    async def pause(self, handle: MetadataStore, seconds: float) -> None:
        """Stop the heartbeat of one handle for so long, then let it go on; the others stay healthy."""
        ...

    async def restart(self) -> None:
        """Close the store in an orderly way and open it again; old handles are dead."""
        ...

    async def close(self) -> None: ...


class _Pending:
    """A timer of the stepped clock."""

    def __init__(self, callback: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.callback: Callable[..., Any] | None = callback
        self.args = args

    def cancel(self) -> None:
        self.callback = None


class SteppedClock:
    """Time that moves only when told to; timers fire in the order they are due."""

    def __init__(self) -> None:
        self._now = 1000.0
        self._count = 0
        self._timers: list[tuple[float, int, _Pending]] = []

    def now_ms(self) -> int:
        return int(self._now * 1000)

    def monotonic(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        done = asyncio.Event()
        self.call_later(seconds, done.set)
        await done.wait()

    def call_later(self, seconds: float, callback: Callable[..., Any], *args: Any) -> Timer:
        timer = _Pending(callback, args)
        self._count += 1
        heapq.heappush(self._timers, (self._now + seconds, self._count, timer))
        return timer

    def advance(self, seconds: float) -> None:
        """Move on, firing everything that falls due on the way."""
        end = self._now + seconds
        while self._timers and self._timers[0][0] <= end:
            due, _, timer = heapq.heappop(self._timers)
            self._now = max(self._now, due)
            if timer.callback is not None:
                timer.callback(*timer.args)
        self._now = end


class EngineWorld:
    """Any backend of the engine, with a clock that is moved by hand."""

    refuses_wrong_partition = True

    def __init__(self, open_engine: Callable[[Runtime], Awaitable[Engine]], *, is_durable: bool) -> None:
        self.is_durable = is_durable
        self.clock = SteppedClock()
        self._open = open_engine
        self._count = 0
        self.engine: Engine | None = None

    async def root(self) -> Engine:
        if self.engine is None:
            self.engine = await self._open(replace(Runtime(), clock=self.clock))
        return self.engine

    async def handle(self) -> MetadataStore:
        self._count += 1
        return (await self.root()).handle(f"handle{self._count}")

    async def pause(self, handle: MetadataStore, seconds: float) -> None:
        assert isinstance(handle, Handle)
        handle.pause_heartbeat()
        self.clock.advance(seconds)
        handle.resume_heartbeat()

    async def restart(self) -> None:
        await self.close()
        await self.root()

    async def close(self) -> None:
        if self.engine is not None:
            await self.engine.close()
            self.engine = None


class Fold:
    """The view that folding a watch's events gives."""

    def __init__(self, events: AsyncIterator[Event]) -> None:
        self._events = events
        self.records: dict[str, Record] = {}
        self.synced = 0
        self.seen: list[Event] = []

    async def step(self) -> Event:
        """Take one event."""
        async with asyncio.timeout(PATIENCE):
            event = await anext(self._events)
        self.seen.append(event)
        if isinstance(event, Put):
            self.records[event.record.key] = event.record
        elif isinstance(event, Delete):
            self.records.pop(event.key, None)
        else:
            assert isinstance(event, Synced)
            self.synced += 1
        return event

    async def until_synced(self) -> None:
        while self.synced == 0:
            await self.step()

    async def until(self, done: Callable[[dict[str, Record]], bool]) -> None:
        """Take events until the view satisfies `done`."""
        while not done(self.records):
            await self.step()

    def values(self) -> dict[str, bytes]:
        return {key: record.value for key, record in self.records.items()}


@asynccontextmanager
async def folded(watch: object) -> AsyncIterator[Fold]:
    """Enter a watch and fold it."""
    async with watch as events:  # type: ignore[attr-defined]
        yield Fold(events)


async def collect(items: AsyncIterator[Record]) -> list[Record]:
    return [item async for item in items]


async def collect_names(items: AsyncIterator[str]) -> list[str]:
    return [item async for item in items]


def values(records: Iterable[Record]) -> dict[str, bytes]:
    return {record.key: record.value for record in records}
