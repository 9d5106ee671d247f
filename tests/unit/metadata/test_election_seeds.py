"""Elections, locks and claims on many seeds of bad luck, in memory where a seed costs milliseconds."""

from collections.abc import AsyncIterator

import pytest

from braid.metadata.backends import memory
from braid.testing.conformance.metadata_claims import random_reigns
from braid.testing.conformance.metadata_elections import random_life
from braid.testing.conformance.metadata_locks import random_locking
from braid.testing.conformance.metadata_world import EngineWorld

BATCH = 20


@pytest.fixture
async def world() -> AsyncIterator[EngineWorld]:
    made = EngineWorld(memory.open_store, is_durable=False)
    yield made
    await made.close()


@pytest.mark.inv("INV4", "INV15")
@pytest.mark.parametrize("start", range(1000, 1060, BATCH))
async def test_never_two_leaders(world: EngineWorld, start: int) -> None:
    for seed in range(start, start + BATCH):
        await random_life(world, seed)


@pytest.mark.inv("INV15")
@pytest.mark.parametrize("start", range(1000, 1060, BATCH))
async def test_never_two_holders_of_a_lock(world: EngineWorld, start: int) -> None:
    for seed in range(start, start + BATCH):
        await random_locking(world, seed)


@pytest.mark.inv("INV4")
@pytest.mark.parametrize("start", range(1000, 1020, BATCH))
async def test_no_guarded_write_of_a_stale_leader(world: EngineWorld, start: int) -> None:
    for seed in range(start, start + BATCH):
        await random_reigns(world, seed)
