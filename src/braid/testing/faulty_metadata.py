"""`FaultyMetadata`: a metadata handle that fails on purpose, as a bad network or a busy store would; for tests and simulation.

Wraps any `MetadataStore` and keeps its contract: a refusal says the truth (StoreUnavailable: not applied; OutcomeUnknown: done
or not), versions are real. Only watches may be made worse than promised, by losing events, because code above must not depend
on them (INV15). Everything random comes from the generator given, everything timed from the clock given, so a seed replays.
Sessions are not its business: stop the heartbeat of the handle below to lose one.
"""

from __future__ import annotations

import asyncio
import random  # noqa: TID251 - the generator is the caller's
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

from braid.errors import OutcomeUnknown, StoreUnavailable, VersionConflict
from braid.metadata.api import ABSENT, Capabilities, Event, IndexSpan, MetadataStore, Record, Session, SessionState, Span
from braid.runtime.clock import Clock
from braid.runtime.tasks import Tasks

T = TypeVar("T")

SLOW_TURNS = 50
"""Loop turns that a reader takes for one event when watches coalesce."""


class Fault(Enum):
    """What can happen to one call."""

    CONFLICT = "conflict"
    """A conditional put finds that somebody was faster."""
    UNAVAILABLE = "unavailable"
    """StoreUnavailable; nothing is done."""
    UNKNOWN_APPLIED = "unknown, applied"
    """The write is done and the answer is OutcomeUnknown."""
    UNKNOWN_DROPPED = "unknown, dropped"
    """The write is not done and the answer is OutcomeUnknown."""
    UNKNOWN_LATE = "unknown, late"
    """OutcomeUnknown at once; the write arrives up to `Faults.delay` later."""


@dataclass
class Faults:
    """Shares between 0 and 1 of calls (or events) that each fault befalls; change them at any time."""

    conflict: float = 0.0
    unavailable: float = 0.0
    unknown_applied: float = 0.0
    unknown_dropped: float = 0.0
    unknown_late: float = 0.0
    delay: float = 0.0
    """Seconds that a call waits at most, half before and half after it reached the store."""
    watch_drop: float = 0.0
    """Events lost, deletes included."""
    watch_lag: float = 0.0
    """Seconds by which events are late at most; their order is kept."""
    watch_coalesce: bool = False
    """Read so slowly that the store below folds the events of one key into the last."""

    def clear(self) -> None:
        self.__init__()  # type: ignore[misc]


@dataclass
class _Planned:
    """A fault for one particular call."""

    fault: Fault
    operation: str | None
    key: str | None
    skip: int


@dataclass
class FaultyMetadata:
    """A `MetadataStore` around another one. `plan` hits one particular call, `faults` any call by chance, `cut` every call."""

    inner: MetadataStore
    clock: Clock
    random: random.Random
    faults: Faults = field(default_factory=Faults)
    is_cut: bool = False
    """The link is down: every call is refused."""
    hits: dict[str, int] = field(default_factory=dict)
    """How often each fault happened, so that a test can see that it tested something."""
    _plans: list[_Planned] = field(default_factory=list)
    _frozen: asyncio.Event | None = None
    _late: Tasks = field(default_factory=lambda: Tasks("late metadata writes"))

    def plan(self, fault: Fault, operation: str | None = None, key: str | None = None, *, skip: int = 0) -> None:
        """The next call (of that operation, on that key, after `skip` such calls) meets this fault, once."""
        self._plans.append(_Planned(fault, operation, key, skip))

    def freeze(self) -> None:
        """Calls and watches stop where they are, as in a process that was stopped."""
        if self._frozen is None:
            self._frozen = asyncio.Event()

    def thaw(self) -> None:
        """Go on."""
        if self._frozen is not None:
            self._frozen.set()
            self._frozen = None

    @property
    def session(self) -> Session:
        return self.inner.session

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    async def get(self, key: str, *, partition: str | None = None, fresh: bool = False) -> Record | None:
        return await self._read("get", key, lambda: self.inner.get(key, partition=partition, fresh=fresh))

    async def put(
        self,
        key: str,
        value: bytes,
        *,
        expected: int | None = None,
        ephemeral: bool = False,
        partition: str | None = None,
        index: Mapping[str, str] | None = None,
    ) -> Record:
        async def call() -> Record:
            return await self.inner.put(key, value, expected=expected, ephemeral=ephemeral, partition=partition, index=index)

        async def rival() -> None:
            """Somebody else who is a moment faster."""
            if expected == ABSENT:
                if await self.inner.get(key, partition=partition, fresh=True) is None:  # came and went
                    raise VersionConflict(f"The record {key} was expected to be absent; read it again before deciding.")
                return
            found = await self.inner.get(key, partition=partition, fresh=True)
            if found is not None and found.owner is None and found.version == expected:
                await self.inner.put(key, found.value, expected=expected, partition=partition, index=found.index or None)

        return await self._write("put", key, call, rival if expected is not None else None)

    async def append(
        self,
        prefix: str,
        value: bytes,
        *,
        partition: str,
        deltas: Sequence[int] = (1,),
        index: Mapping[str, str] | None = None,
    ) -> Record:
        return await self._write(
            "append", prefix, lambda: self.inner.append(prefix, value, partition=partition, deltas=deltas, index=index)
        )

    async def delete(self, key: str, *, expected: int | None = None, partition: str | None = None) -> bool:
        return await self._write("delete", key, lambda: self.inner.delete(key, expected=expected, partition=partition))

    async def delete_span(self, span: Span, *, partition: str | None = None, keep_last: bool = False) -> None:
        await self._write(
            "delete_span", span.parent, lambda: self.inner.delete_span(span, partition=partition, keep_last=keep_last)
        )

    async def names(self, span: Span, *, partition: str | None = None, fresh: bool = False) -> AsyncIterator[str]:
        await self._read("names", span.parent, _nothing)
        async for name in self.inner.names(span, partition=partition, fresh=fresh):
            yield name

    async def scan(
        self, span: Span | IndexSpan, *, partition: str | None = None, limit: int | None = None, fresh: bool = False
    ) -> AsyncIterator[Record]:
        await self._read("scan", span.parent if isinstance(span, Span) else span.name, _nothing)
        async for record in self.inner.scan(span, partition=partition, limit=limit, fresh=fresh):
            yield record

    def watch(
        self, what: str | Span | IndexSpan, *, recursive: bool = False, partition: str | None = None
    ) -> AbstractAsyncContextManager[AsyncIterator[Event]]:
        return self._watch(what, recursive, partition)

    def follow(
        self, prefix: str, *, partition: str, after: str | None = None
    ) -> AbstractAsyncContextManager[AsyncIterator[Record]]:
        return self.inner.follow(prefix, partition=partition, after=after)

    async def close(self) -> None:
        self.thaw()
        await self._late.close()
        await self.inner.close()

    async def _read(self, operation: str, key: str, call: Callable[[], Awaitable[T]]) -> T:
        await self._reach(operation, key, (Fault.UNAVAILABLE,))
        result = await call()
        await self._return()
        return result

    async def _write(
        self,
        operation: str,
        key: str,
        call: Callable[[], Awaitable[T]],
        rival: Callable[[], Awaitable[None]] | None = None,
    ) -> T:
        possible = [Fault.UNAVAILABLE, Fault.UNKNOWN_APPLIED, Fault.UNKNOWN_DROPPED, Fault.UNKNOWN_LATE]
        if rival is not None:
            possible.append(Fault.CONFLICT)
        fault = await self._reach(operation, key, possible)
        if fault is Fault.CONFLICT and rival is not None:
            await rival()
        elif fault is Fault.UNKNOWN_LATE:
            self._send_late(call)
        elif fault is Fault.UNKNOWN_APPLIED:
            try:
                await call()
            except VersionConflict:
                pass  # then nothing was applied, and nobody is told that either
        if fault in (Fault.UNKNOWN_APPLIED, Fault.UNKNOWN_DROPPED, Fault.UNKNOWN_LATE):
            raise OutcomeUnknown(f"The link failed during {operation} of {key}.")
        result = await call()
        await self._return()
        return result

    def _send_late(self, call: Callable[[], Awaitable[object]]) -> None:
        session = self.inner.session

        async def later() -> None:
            await self.clock.sleep(self.random.uniform(0, self.faults.delay))
            if self.inner.session is session and session.state is SessionState.CONNECTED:  # a store refuses it otherwise
                try:
                    await call()
                except (VersionConflict, StoreUnavailable):
                    pass  # nobody waits for the answer

        self._late.spawn(later(), "write")

    async def _reach(self, operation: str, key: str, possible: Sequence[Fault]) -> Fault | None:
        """The way to the store."""
        await self._wait(self.faults.delay / 2)
        if self.is_cut:
            raise StoreUnavailable(f"The link is cut; {operation} of {key} was not done.")
        fault = self._planned(operation, key, possible) or self._by_chance(possible)
        if fault is not None:
            self.hits[fault.value] = self.hits.get(fault.value, 0) + 1
        if fault is Fault.UNAVAILABLE:
            raise StoreUnavailable(f"The store refused {operation} of {key}.")
        return fault

    async def _return(self) -> None:
        await self._wait(self.faults.delay / 2)

    async def _wait(self, at_most: float) -> None:
        if at_most > 0:
            await self.clock.sleep(self.random.uniform(0, at_most))
        while self._frozen is not None:
            await self._frozen.wait()

    def _planned(self, operation: str, key: str, possible: Sequence[Fault]) -> Fault | None:
        for plan in self._plans:
            if plan.operation in (None, operation) and plan.key in (None, key) and plan.fault in possible:
                if plan.skip == 0:
                    self._plans.remove(plan)
                    return plan.fault
                plan.skip -= 1
        return None

    def _by_chance(self, possible: Sequence[Fault]) -> Fault | None:
        faults = self.faults
        shares = (
            (Fault.UNAVAILABLE, faults.unavailable),
            (Fault.CONFLICT, faults.conflict),
            (Fault.UNKNOWN_APPLIED, faults.unknown_applied),
            (Fault.UNKNOWN_DROPPED, faults.unknown_dropped),
            (Fault.UNKNOWN_LATE, faults.unknown_late),
        )
        drawn = self.random.random()
        for fault, share in shares:
            if fault in possible:
                if drawn < share:
                    return fault
                drawn -= share
        return None

    @asynccontextmanager
    async def _watch(
        self, what: str | Span | IndexSpan, recursive: bool, partition: str | None
    ) -> AsyncIterator[AsyncIterator[Event]]:
        await self._reach("watch", what if isinstance(what, str) else str(what), (Fault.UNAVAILABLE,))
        async with self.inner.watch(what, recursive=recursive, partition=partition) as events:
            yield self._worsen(events)

    async def _worsen(self, events: AsyncIterator[Event]) -> AsyncIterator[Event]:
        while True:
            event = await anext(events)
            await self._wait(self.faults.watch_lag)
            if self.faults.watch_coalesce:  # a slow reader is spared what was overtaken
                for _turn in range(SLOW_TURNS):
                    await asyncio.sleep(0)
            if self.random.random() < self.faults.watch_drop:
                self.hits["watch drop"] = self.hits.get("watch drop", 0) + 1
            else:
                yield event


async def _nothing() -> None:
    pass
