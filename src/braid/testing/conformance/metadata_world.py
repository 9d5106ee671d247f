"""What the metadata conformance suite needs from a backend under test, and the worlds of the engine's backends.

A third party writes one class with the methods of `StoreWorld`. Handles of one world are separate sessions on the same store.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from braid.metadata.api import Delete, Event, MetadataStore, Put, Record, Synced
from braid.metadata.engine import Engine
from braid.metadata.handle import Handle
from braid.runtime.clock import Clock, Timer
from braid.runtime.env import Runtime
from braid.runtime.tasks import Tasks

T = TypeVar("T")

PATIENCE = 20.0
"""Seconds after which something that must happen is declared missing."""
TURNS = 10
"""Loop turns for tasks that a timer woke."""
STEP = 0.1
"""Seconds of the world's time between two looks."""


class StoreWorld(Protocol):
    """One store under test."""

    is_durable: bool
    """Records survive `restart`."""
    refuses_wrong_partition: bool
    """Naming another partition than a record's own is an error rather than a miss."""

    @property
    def clock(self) -> Clock:
        """The clock of the handles' holders."""
        ...

    async def handle(self) -> MetadataStore:
        """A new handle: a session of its own on the store."""
        ...

    async def pause(self, handle: MetadataStore, seconds: float) -> None:
        """Stop the heartbeat of one handle for so long, then let it go on; the others stay healthy."""
        ...

    async def kill(self, handle: MetadataStore) -> None:
        """The holder of a handle dies without a word: its heartbeat stops for good."""
        ...

    async def advance(self, seconds: float) -> None:
        """Let time pass; whatever falls due happens."""
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
        self._clock = SteppedClock()
        self._open = open_engine
        self._count = 0
        self.engine: Engine | None = None
        self._ticker: Handle | None = None

    @property
    def clock(self) -> SteppedClock:
        return self._clock

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
        self._clock.advance(seconds)
        handle.resume_heartbeat()

    async def kill(self, handle: MetadataStore) -> None:
        assert isinstance(handle, Handle)
        handle.pause_heartbeat()

    async def advance(self, seconds: float) -> None:
        self._clock.advance(seconds)
        for _turn in range(TURNS):
            await asyncio.sleep(0)
        # What the timers set off has been handed to the store by now; wait until it is durable, which takes real time.
        if self._ticker is None:
            self._ticker = (await self.root()).handle("ticker")
        await self._ticker.put("/conformance-tick", b"")
        for _turn in range(TURNS):
            await asyncio.sleep(0)

    async def restart(self) -> None:
        await self.close()
        await self.root()

    async def close(self) -> None:
        if self.engine is not None:
            await self.engine.close()
            self.engine = self._ticker = None


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


async def until(world: StoreWorld, happened: Callable[[], bool], *, step: float = STEP) -> float:
    """Let the world's time pass until something has happened; returns how much passed."""
    begin = world.clock.monotonic()
    async with asyncio.timeout(PATIENCE):
        while not happened():
            await world.advance(step)
    return world.clock.monotonic() - begin


async def while_time_passes(world: StoreWorld, work: Coroutine[Any, Any, T]) -> T:
    """Await something that needs the world's time to move."""
    task = Tasks("case").spawn(work, "work")
    try:
        await until(world, task.done)
    finally:
        task.cancel()
    result: T = task.result()
    return result


async def collect(items: AsyncIterator[Record]) -> list[Record]:
    return [item async for item in items]


async def collect_names(items: AsyncIterator[str]) -> list[str]:
    return [item async for item in items]


def values(records: Iterable[Record]) -> dict[str, bytes]:
    return {record.key: record.value for record in records}
