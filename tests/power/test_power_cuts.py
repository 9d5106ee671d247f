"""The short run of the power loop: 40 seeds keep every promise, and each planted bug breaks one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest
from tests.power.power_loop import CONFIG, KEPT, LEDGERS, PLANTS, ROUNDS, Client, Machine, MemoryNetwork, run_seed, turns

from braid.ledger.backends.local import open_store
from braid.runtime.env import Runtime
from braid.runtime.threads import Done, InlineThreads, InlineWorker, Worker
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


class SlowWorker(InlineWorker):
    """Reports its jobs some loop turns late."""

    turns = 0

    def post(self, job: Callable[[], Any], done: Done) -> None:
        def later(left: int, result: Any, error: BaseException | None) -> None:
            if left:
                asyncio.get_running_loop().call_soon(later, left - 1, result, error)
            else:
                done(result, error)

        super().post(job, partial(later, self.turns))


class SlowThreads(InlineThreads):
    """One worker is slower than the others."""

    def __init__(self, slow: str, turns: int) -> None:
        self._slow = slow
        self._turns = turns

    def worker(self, name: str) -> Worker:
        if name != self._slow:
            return super().worker(name)
        worker = SlowWorker(asyncio.get_running_loop())
        worker.turns = self._turns
        return worker


@pytest.mark.inv("INV3")
async def test_a_ledger_created_during_a_checkpoint_keeps_its_id() -> None:
    """The snapshot knew the ledger but not that its id was taken; after a restart the id was given away again."""
    for wait in range(40):
        disk = ForgetfulFiles(Random(1))
        runtime = replace(Runtime(), files=disk, threads=SlowThreads("ledger-files", 8), random=Random(2))
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
@pytest.mark.parametrize("wait", range(4))
async def test_what_is_acknowledged_while_it_is_read_is_not_delivered(sub_type: SubType, wait: int) -> None:
    """A client that comes back acknowledges at once what it got before, while the broker is reading just that from disk."""
    disk = ForgetfulFiles(Random(1))
    received: list[Any] = []
    slow_reads = SlowThreads("ledger-reads", 40)

    async def boot() -> tuple[Machine, Client]:
        network = MemoryNetwork()
        runtime = Runtime(clock=ManualClock(), random=Random(2), threads=slow_reads, files=disk, network=network)
        machine = await Machine(CONFIG, runtime, with_http=False).__aenter__()
        _, client = await network.connect("memory", 1, lambda: Client(received.append))
        client.send(hello("Braid-test"))
        await client.ask(
            lambda number: requests.subscribe(number, 1, KEPT, "s", sub_type, initial_position=InitialPosition.EARLIEST)
        )
        return cast(Machine, machine), client

    machine, client = await boot()
    await client.ask(lambda number: requests.producer(number, 1, KEPT, "p"))
    for number in range(5):
        client.send(requests.send(1, number, entry(bytes(500), number)))
    await turns(20)
    receipts = [each.body for each in received if each.type == CommandType.SEND_RECEIPT]
    positions = [position_of(body.message_id) for body in receipts]
    assert len(positions) == 5
    await machine.__aexit__(None, None, None)
    machine, client = await boot()
    received.clear()
    client.send(requests.flow(1, 100))
    await turns(wait)
    ack = client.ask(lambda number: requests.ack(1, [id_of(each) for each in positions[:4]], AckType.INDIVIDUAL, number))
    await ack
    before = len(received)
    await turns(100)
    delivered = [position_of(event.command.message_id) for event in received[before:] if isinstance(event, Delivery)]
    assert not set(delivered) & set(positions[:4]), "delivered after the receipt of its acknowledgment"
    await machine.__aexit__(None, None, None)
