"""The short run of the power loop: 40 seeds keep every promise, and each planted bug breaks one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.power.power_loop import CONFIG, KEPT, LEDGERS, PLANTS, ROUNDS, Client, Machine, MemoryNetwork, run_seed, turns

from braid.ledger.backends.local import open_store
from braid.model.positions import Position
from braid.runtime.env import Runtime
from braid.runtime.threads import InlineThreads
from braid.testing.clock import ManualClock
from braid.testing.files import ForgetfulFiles
from braid.testing.raw_client import entry, hello, id_of, position_of
from braid.wire import requests
from braid.wire.client import Delivery
from braid.wire.types import AckType, CommandType, InitialPosition, SubType

SEEDS = 40
PLANTED_SEEDS = 3


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """A broker whose power is gone has much to say."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.inv("INV1", "INV2", "INV3")
@pytest.mark.parametrize("block", range(8))
def test_nothing_acknowledged_is_lost(block: int) -> None:
    size = SEEDS // 8
    for seed in range(block * size, block * size + size):
        outcome = run_seed(seed)
        assert not outcome.failure, f"seed {seed}: {outcome.failure}"
        assert outcome.cuts == ROUNDS
        assert outcome.receipts >= 50, f"seed {seed} did too little"


@pytest.mark.inv("INV1")
@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_bug_is_caught(plant: str) -> None:
    failures = [run_seed(seed, plant).failure for seed in range(PLANTED_SEEDS)]
    assert any(failures), f"{plant} went unnoticed"


# What the loop has found, as tests of their own.


@pytest.mark.inv("INV3")
async def test_a_ledger_created_during_a_checkpoint_keeps_its_id() -> None:
    """The snapshot knew the ledger but not that its id was taken; after a restart the id was given away again."""
    for wait in range(40):
        disk = ForgetfulFiles(Random(1))
        runtime = replace(Runtime(), files=disk, threads=InlineThreads(), random=Random(2))
        store = await open_store(runtime, path=Path("/data"), settings=LEDGERS)
        await (await store.create()).add(b"x" * 1000)
        checkpoint = asyncio.get_running_loop().create_task(store.checkpoint())
        await turns(wait)
        made = await store.create()
        await made.add(b"kept")
        await checkpoint
        store = await open_store(replace(runtime, files=disk.power_cut()), path=Path("/data"), settings=LEDGERS)
        assert (await store.create()).ledger_id > made.ledger_id, f"created {wait} turns after the checkpoint began"
        assert await (await store.open(made.ledger_id, fence=True)).read(0, 0) == [b"kept"]
        await store.close()


@pytest.mark.parametrize("sub_type", [SubType.EXCLUSIVE, SubType.SHARED])
async def test_what_is_acknowledged_while_it_is_read_from_disk_is_not_delivered(sub_type: SubType) -> None:
    """A client that comes back acknowledges at once what it got before; the broker was reading just that."""
    disk = ForgetfulFiles(Random(1))
    received: list[Any] = []
    positions: list[Position] = []
    for boot in range(2):
        network = MemoryNetwork()
        runtime = Runtime(clock=ManualClock(), random=Random(2), threads=InlineThreads(), files=disk, network=network)
        async with Machine(CONFIG, runtime, with_http=False):
            _, client = await network.connect("memory", 1, lambda: Client(received.append))
            client.send(hello("Braid-test"))
            await client.ask(
                lambda number: requests.subscribe(number, 1, KEPT, "s", sub_type, initial_position=InitialPosition.EARLIEST)
            )
            if boot == 0:
                await client.ask(lambda number: requests.producer(number, 1, KEPT, "p"))
                for number in range(5):
                    client.send(requests.send(1, number, entry(b"%d" % number, number)))
                await turns(20)
                receipts = [each.body for each in received if each.type == CommandType.SEND_RECEIPT]
                positions = [position_of(body.message_id) for body in receipts]
                assert len(positions) == 5
                continue
            received.clear()
            ack = requests.ack(1, [id_of(each) for each in positions[:4]], AckType.INDIVIDUAL, 99)
            client.send(requests.flow(1, 100) + ack)
            await turns(60)
            delivered = [position_of(event.command.message_id) for event in received if isinstance(event, Delivery)]
            assert delivered == positions[4:]
