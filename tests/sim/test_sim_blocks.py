"""Blocks of messages under W1's faults and layout changes: every acknowledged row is there once and in the order of its key."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.unit.client.row_block import RowBlock

from braid.client import Client, MessageId
from braid.errors import BraidError
from braid.runtime.env import Random
from braid.testing.sim.run import run_seed
from braid.testing.sim.scalable_processes import LaneProducer
from braid.testing.sim.scalable_topics import KEYS, KeyedSegments

SEEDS = 8
NOWHERE = MessageId(-1, -1)
"""Where a row of a block is stored is not told."""


class BlockProducer(LaneProducer):
    """Sends its messages by blocks of several, and now and then one by itself."""

    async def work(self, client: Client) -> None:
        producer = await client.producer(self.topic, name=self.name, deduplication=True)
        pending: set[asyncio.Future[Any]] = set()
        failure: BraidError | None = None
        while (self._next < self._total and failure is None) or pending:
            while self._next < self._total and len(pending) < self._window and failure is None:
                first = self._next
                self._next = min(self._total, first + self._rng.choice((1, 3, 12)))
                if self._next == first + 1:
                    pending.add(self._send(producer, first))
                else:
                    pending.add(await self._send_block(producer, range(first, self._next)))
                await asyncio.sleep(self._pace * self._rng.random())
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                error = each.exception()
                if error is not None and not isinstance(error, BraidError):
                    raise error
                failure = failure or error
        if failure is not None:
            raise failure
        await producer.close()
        self.is_done = True

    async def _send_block(self, producer: Any, rows: range) -> asyncio.Future[Any]:
        notes: list[tuple[int, list[Any]]] = []
        for sequence in rows:
            value = [self.topic, self.name, f"k{self._keys[sequence]}", sequence]
            notes.append((self.world.history.invoke(self.name, "send", value), value))

        def ended(done: asyncio.Future[Any]) -> None:
            is_stored = not done.cancelled() and done.exception() is None
            for number, value in notes:
                if is_stored:
                    self.note("ok", "send", [*value, str(NOWHERE)], number=number)
                else:
                    self.note("info", "send", value, number=number)

        block = RowBlock((value[2], f"{self.name}/{value[2]}/{value[3]}".encode()) for _number, value in notes)
        sent: asyncio.Future[Any] = await producer.send_block(block)
        sent.add_done_callback(ended)
        return sent


class KeyedBlocks(KeyedSegments):
    """W1 on scalable topics, written by blocks."""

    def add_producers(self) -> None:
        rng = self.rng
        for number in range(rng.choice((1, 2))):
            topic, seed, total = rng.choice(self.topics), Random(rng.random()), rng.choice((60, 150, 300))
            self.processes.append(
                BlockProducer(self.world, f"p{number}", topic, seed, total, keys=KEYS, seconds=self.load_seconds())
            )


@pytest.mark.inv("INV1", "INV6")
@pytest.mark.req("R468-51")
@pytest.mark.parametrize("seed", range(SEEDS))
def test_rows_are_stored_once_and_in_order(seed: int) -> None:
    outcome = run_seed("blocks", seed, KeyedBlocks)
    assert outcome.violations == []
    assert len(outcome.history.events) > 100
