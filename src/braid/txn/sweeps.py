"""`TransactionSweeps`: aborts transactions past their deadline and collects those that ended long ago.

Both run where coordinator partition 0 is led, for all partitions; two brokers that believe to lead do no harm, because every
write carries the version that was read. The collection deletes a header only when none of its ops is left, and never forces:
ops that stay make it ask the segment's owner to load the segment, which then materialises them; only those of a topic that does
not exist go at once. What a header says of a sink is noted in the sink before it goes. Also forgets sinks that nobody uses any
more, and recounts open transactions, on every broker. Owns the rhythm and the order; decisions are the coordinator's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Final

from braid.errors import BraidError, Closed, InvariantBroken, OutcomeUnknown, StoreError, VersionConflict
from braid.runtime.clock import Clock
from braid.runtime.tasks import Tasks
from braid.txn.config import TransactionConfig
from braid.txn.coordinator import TransactionCoordinator
from braid.txn.partitions import CoordinatorPartitions
from braid.txn.sinks import Sinks
from braid.txn.store import Header, Sink, StoredOp, TransactionStore

log = logging.getLogger(__name__)
AT_ONCE: Final = 64
"""Transactions that a sweep works on at the same time."""
LOADS_AT_ONCE: Final = 8
"""Segments that are asked to load at the same time."""
OPS_AT_ONCE: Final = 1000
"""Ops of one transaction that one round looks at."""
LEFT_AT_MOST: Final = 10_000
"""Ops that one round remembers because they stayed."""
LoadSegment = Callable[[str], Awaitable[bool]]
"""Have a topic's owner load it and look for ops anew; False if there is no such topic."""


class TransactionSweeps:
    """One per broker."""

    def __init__(
        self,
        store: TransactionStore,
        coordinator: TransactionCoordinator,
        partitions: CoordinatorPartitions,
        clock: Clock,
        config: TransactionConfig,
        load_segment: LoadSegment,
        sinks: Sinks,
    ) -> None:
        self._store = store
        self._sinks = sinks
        self._coordinator = coordinator
        self._partitions = partitions
        self._clock = clock
        self._config = config
        self._load_segment = load_segment
        self._tasks = Tasks("transaction sweeps")

    def start(self) -> None:
        self._tasks.spawn(self._every(self._config.timeout_sweep_seconds, self.abort_expired), "deadlines")
        self._tasks.spawn(self._every(self._config.collect_seconds, self.collect), "collection")
        self._tasks.spawn(self._every(self._config.collect_seconds, self._coordinator.recount), "recount")
        self._tasks.spawn(self._every(self._config.collect_seconds, self.forget_sinks), "sinks")

    async def close(self) -> None:
        await self._tasks.close()

    def kill(self) -> None:
        self._tasks.cancel()

    async def _every(self, seconds: float, sweep: Callable[[], Awaitable[object]]) -> None:
        while True:
            await self._clock.sleep(seconds)
            try:
                await sweep()
            except Closed:
                return
            except BraidError as error:
                log.warning("a sweep of transactions waits for the metadata store: %s", error)
            except InvariantBroken:
                raise
            except Exception:  # or no transaction would ever be swept up again
                log.exception("a sweep of transactions failed in an unexpected way and is tried again")

    # Deadlines.

    async def abort_expired(self) -> int:
        """Abort what is past its deadline; how many there were."""
        return await self._each(self._store.expired(self._clock.now_ms()), self._expire)

    async def _expire(self, header: Header) -> bool:
        if not await self._coordinator.expire(header):
            return False
        log.info("the transaction %s was aborted: it was open for longer than it had asked for", header.root)
        return True

    # Collection.

    async def collect(self) -> int:
        """Delete what ended longer ago than the retention and is materialised everywhere; how many that were."""
        until = self._clock.now_ms() - int(self._config.retention_seconds * 1000)
        left: dict[str, list[StoredOp]] = {}
        count = 0

        async def one(header: Header) -> bool:
            nonlocal count
            ops = await self._store.ops(header.root, OPS_AT_ONCE)
            if not ops:
                return await self._delete(header)
            if count < LEFT_AT_MOST:
                count += len(ops)
                for op in ops:
                    left.setdefault(op.op.segment, []).append(op)
            return False

        collected = await self._each(self._store.finished(until), one)
        await self._drive(left)
        return collected

    async def _delete(self, header: Header) -> bool:
        await self._sinks.fold(header)
        if header.value.is_decider:
            await self._store.delete_subs(header.root)
        try:
            await self._store.delete_header(header)
        except VersionConflict:
            return False
        return True

    async def _drive(self, left: dict[str, list[StoredOp]]) -> None:
        """Ops stayed although their transaction ended long ago: their owner is gone, or missed something."""
        turns = asyncio.Semaphore(LOADS_AT_ONCE)

        async def one(segment: str, ops: list[StoredOp]) -> None:
            async with turns:
                if not self._partitions.leads(0):
                    return
                try:
                    if await self._load_segment(segment):
                        return
                    for op in ops:
                        await self._store.delete_op(op)
                except BraidError as error:
                    log.warning("%d ops of ended transactions stay in %s for now: %s", len(ops), segment, error)

        async with asyncio.TaskGroup() as group:
            for segment, ops in left.items():
                group.create_task(one(segment, ops))

    async def forget_sinks(self) -> int:
        """Delete what is known of sinks that were not used for longer than their retention; how many there were."""
        forgotten = 0
        if not self._partitions.leads(0):
            return forgotten
        async with aclosing(self._store.expired_sinks(self._clock.now_ms())) as found:
            async for sink in found:
                forgotten += await self._forget(sink)
        return forgotten

    async def _forget(self, sink: Sink) -> bool:
        try:
            if not await self._sinks.expire(sink):
                return False
        except StoreError as error:
            log.info("the sink %s is left to the next sweep: %s", sink.name, error)
            return False
        log.info("the sink %s was forgotten: it was not used for %g s", sink.name, self._config.sink_retention_seconds)
        return True

    # Both.

    async def _each(self, headers: AsyncGenerator[Header, None], work: Callable[[Header], Awaitable[bool]]) -> int:
        """Do some at a time while we lead; how many were done. What the store refuses now is left to the next round."""
        done = 0

        async def one(header: Header) -> None:
            nonlocal done
            try:
                if await work(header):
                    done += 1
            except OutcomeUnknown:
                pass  # seen as it is in the next round
            except StoreError as error:
                log.info("the transaction %s is left to the next sweep: %s", header.root, error)

        waiting: list[Header] = []

        async def do_waiting() -> None:
            async with asyncio.TaskGroup() as group:
                for header in waiting:
                    group.create_task(one(header))
            waiting.clear()

        if not self._partitions.leads(0):
            return 0
        async with aclosing(headers):
            async for header in headers:
                waiting.append(header)
                if len(waiting) == AT_ONCE:
                    await do_waiting()
                    if not self._partitions.leads(0):
                        return done
        await do_waiting()
        return done
