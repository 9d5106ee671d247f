"""A durable cursor against a plain set, with rollover, trimming, crashes and clean restarts in between."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from braid.ledger.backends import memory as memory_ledgers
from braid.managedledger.api import Entry, SingleStore
from braid.managedledger.cache import EntryCache
from braid.managedledger.config import ManagedLedgerConfig
from braid.managedledger.factory import ManagedLedgerFactory
from braid.metadata.backends import memory as memory_metadata
from braid.model.positions import Position
from braid.runtime.env import Runtime
from braid.wire.entries import build_entry
from braid.wire.messages import MessageMetadata

NAME = "t/ns/persistent/machine"
BATCH = 4
FULL = (1 << BATCH) - 1
BODY = build_entry(MessageMetadata(producer_name="p", sequence_id=0, publish_time=1, num_messages_in_batch=BATCH), b"x")


class CursorMachine(RuleBasedStateMachine):
    """The model keeps, for each entry, the mask of its unacknowledged messages; 0 is acknowledged."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.unacked: dict[Position, int] = {}
        self.durable: dict[Position, int] = {}
        self.added: list[Entry] = []
        self.wanted = 0
        self.arrived = asyncio.Event()
        self.loop.run_until_complete(self._set_up())

    async def _set_up(self) -> None:
        self.runtime = Runtime(random=random.Random(1))
        self.engine = await memory_metadata.open_store(self.runtime)
        self.ledgers = await memory_ledgers.open_store(self.runtime)
        await self._open()
        self.cursor = await self.log.open_cursor("s", initial="earliest")

    async def _open(self) -> None:
        config = ManagedLedgerConfig(
            max_entries_per_ledger=4, min_ledger_age_ms=0, max_entries_per_cursor_ledger=3, max_ranges_in_record=2
        )
        factory = ManagedLedgerFactory(
            self.runtime, self.engine.handle("b"), SingleStore(self.ledgers), config, EntryCache(2_000)
        )
        self.log = await factory.open(NAME, self, create=True)

    def entries_added(self, entries: list[Entry]) -> None:
        self.added += entries
        if len(self.added) >= self.wanted:
            self.arrived.set()

    def log_failed(self, error: Exception, contexts: list[object]) -> None:
        if contexts:
            self.arrived.set()

    def run(self, work: Any) -> Any:
        """Do the work, then let trimming in the background come to an end, so that the model knows what is left."""

        async def quietly() -> Any:
            result = await work
            if (trimming := self.log._trimming) is not None:
                await asyncio.wait([trimming])
            return result

        return self.loop.run_until_complete(quietly())

    def teardown(self) -> None:
        async def end() -> None:
            await self.log.close()
            await self.engine.close()
            await self.ledgers.close()

        self.run(end())
        self.loop.close()

    def pick(self, number: int) -> Position:
        return list(self.unacked)[number % len(self.unacked)]

    @rule(count=st.integers(1, 6))
    def add(self, count: int) -> None:
        async def work() -> None:
            self.wanted = len(self.added) + count
            self.arrived.clear()
            for _ in range(count):
                self.log.add(BODY, BATCH, None)
            await asyncio.wait_for(self.arrived.wait(), 10)
            assert len(self.added) == self.wanted

        self.run(work())
        for entry in self.added[-count:]:
            self.unacked[Position(entry.ledger_id, entry.entry_id)] = FULL

    @precondition(lambda self: self.unacked)
    @rule(numbers=st.lists(st.integers(0, 100), min_size=1, max_size=6))
    def acknowledge(self, numbers: list[int]) -> None:
        positions = [self.pick(number) for number in numbers]
        self._in_loop(lambda: self.cursor.acknowledge(positions))
        for position in positions:
            self.unacked[position] = 0

    @precondition(lambda self: self.unacked)
    @rule(number=st.integers(0, 100), mask=st.integers(0, FULL))
    def acknowledge_batch(self, number: int, mask: int) -> None:
        position = self.pick(number)
        before = self.unacked[position]
        is_done = self._in_loop(lambda: self.cursor.acknowledge_batch(position, mask))
        self.unacked[position] = before & mask
        assert is_done == (before != 0 and before & mask == 0)

    @precondition(lambda self: self.unacked)
    @rule(number=st.integers(0, 100), mask=st.one_of(st.none(), st.integers(1, FULL)))
    def acknowledge_cumulative(self, number: int, mask: int | None) -> None:
        upto = self.pick(number)
        self._in_loop(lambda: self.cursor.acknowledge_cumulative(upto, mask))
        for position in self.unacked:
            if position < upto:
                self.unacked[position] = 0
        self.unacked[upto] &= mask or 0

    @rule()
    def flush(self) -> None:
        self.run(self.cursor.flush())
        self.durable = dict(self.unacked)

    @rule()
    def trim(self) -> None:
        self.run(self.log.trim())

    @precondition(lambda self: self.unacked)
    @rule(number=st.integers(0, 100))
    def reset(self, number: int) -> None:
        position = self.pick(number)
        start = self.log.clamp(position)
        self.run(self.cursor.reset(position))
        for known in self.unacked:
            self.unacked[known] = FULL if known >= start else 0
        self.durable = dict(self.unacked)

    @rule()
    def restart(self) -> None:
        self.run(self.log.close())
        self.run(self._open())
        self.cursor = self.log.cursors["s"]

    @rule()
    def crash(self) -> None:
        """Open by another owner, with nothing flushed: at most what was acknowledged since the last flush comes back."""
        stale = self.log
        self.run(self._open())
        self.run(stale.close())
        self.cursor = self.log.cursors["s"]
        for position in self.unacked:
            mask = self._mask(position)
            if not self.log.map.contains(position) and position < self.log.first_position:
                assert self.unacked[position] == 0, "an unacknowledged entry was trimmed"
                mask = 0
            assert mask & ~self.durable.get(position, FULL) == 0, "a durable acknowledgment is gone"
            assert self.unacked[position] & ~mask == 0, "acknowledged by nobody"
            self.unacked[position] = mask
        self.durable = dict(self.unacked)

    def _mask(self, position: Position) -> int:
        if self.cursor.is_acknowledged(position):
            return 0
        mask = self.cursor.unacked_mask(position)
        return FULL if mask is None else mask

    def _in_loop(self, call: Any) -> Any:
        async def work() -> Any:
            return call()

        return self.run(work())

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.run(self._check())

    async def _check(self) -> None:
        left = [position for position, mask in self.unacked.items() if mask]
        assert self.cursor.backlog() == len(left)
        for position, mask in self.unacked.items():
            assert self._mask(position) == mask
        for use_cache in (False, True):
            self.cursor.rewind()
            seen: list[Position] = []
            while True:
                entries = self.cursor.read_cached(3, 1 << 20) if use_cache else None
                if entries is None:
                    entries = await self.cursor.read(3, 1 << 20)
                if not entries:
                    break
                seen += [Position(entry.ledger_id, entry.entry_id) for entry in entries]
            assert seen == left


TestCursorMachine = CursorMachine.TestCase
TestCursorMachine.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
