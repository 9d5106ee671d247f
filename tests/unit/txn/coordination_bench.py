"""A metadata store with a clock that is moved by hand, and one broker's transactional side over a link that can fail."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from braid.metadata.api import MetadataStore
from braid.metadata.backends import memory
from braid.metadata.engine import Engine
from braid.model.txn import TxnId
from braid.runtime.env import Runtime
from braid.testing.conformance.metadata_world import EngineWorld, SteppedClock
from braid.testing.faulty_metadata import FaultyMetadata
from braid.txn.config import TransactionConfig
from braid.txn.coordinator import TransactionCoordinator
from braid.txn.records import TxnOp
from braid.txn.sinks import Sinks
from braid.txn.store import Header, TransactionStore

MINUTE_MS = 60_000
SEGMENT = "segment://public/default/orders/0000-7fff-1"


class Bench:
    """One broker."""

    def __init__(self, world: EngineWorld, handle: MetadataStore, config: TransactionConfig, seed: int = 1) -> None:
        self.world = world
        self.config = config
        self.faulty = FaultyMetadata(handle, world.clock, random.Random(seed))
        self.store = TransactionStore(self.faulty, world.clock)
        self.coordinator = TransactionCoordinator(self.store, world.clock, config)
        self.sinks = Sinks(self.store, self.coordinator, world.clock, config)

    @property
    def clock(self) -> SteppedClock:
        return self.world.clock

    async def begin(self, coordinator: int = 0, *, is_decider: bool = False, owner: str | None = None) -> TxnId:
        return await self.coordinator.new(coordinator, MINUTE_MS, owner=owner, is_decider=is_decider)

    async def header(self, txn: TxnId) -> Header:
        found = await self.store.header(txn.root, fresh=True)
        assert found is not None
        return found

    async def state(self, txn: TxnId) -> str:
        return (await self.header(txn)).value.outcome(txn.sub)


@asynccontextmanager
async def brokers(
    count: int = 1,
    config: TransactionConfig = TransactionConfig(),  # noqa: B008 - frozen
    open_store: Callable[[Runtime], Awaitable[Engine]] = memory.open_store,
) -> AsyncIterator[list[Bench]]:
    """Several, each with a handle of its own on one store."""
    world = EngineWorld(open_store, is_durable=False)
    made = [Bench(world, await world.handle(), config, seed) for seed in range(count)]
    try:
        yield made
    finally:
        for each in made:
            await each.faulty._late.close()
        await world.close()


def write(segment: str = SEGMENT, position: str = "3:7") -> TxnOp:
    return TxnOp(kind="write", segment=segment, position=position, incarnation="a1")


def ack(subscription: str, segment: str = SEGMENT, position: str = "3:7", *, is_cumulative: bool = False) -> TxnOp:
    return TxnOp(
        kind="ack",
        segment=segment,
        subscription=subscription,
        position=position,
        incarnation="a1",
        is_cumulative=is_cumulative,
    )
