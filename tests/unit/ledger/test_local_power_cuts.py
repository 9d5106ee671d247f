"""Power cuts under load: no confirmed entry is lost, order and ids are kept, whatever moment the power goes (INV1, INV3).

Each seed runs several rounds of load on a disk that forgets unsynced bytes; the power goes in the middle of a random file
operation, checkpoints, rolls, flushes and the recovery itself included.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import pytest

from braid.errors import LedgerError, LedgerNotFound
from braid.ledger.api import LedgerWriter
from braid.ledger.backends.local import LocalLedgerStore, LocalSettings, open_store
from braid.runtime.env import Runtime
from braid.runtime.threads import InlineThreads
from braid.testing.files import ForgetfulFiles

PATH = Path("/data/ledgers")
SMALL = LocalSettings(
    group_bytes=2000,
    segment_bytes=6000,
    checkpoint_bytes=15000,
    buffer_bytes=16000,
    tail_bytes=600,
    block_bytes=500,
    open_files=4,
    reserve_bytes=0,
)
ROUNDS = 4


class Lost(AssertionError):
    """The promise is broken."""


def promise(holds: bool, text: str) -> None:
    if not holds:
        raise Lost(text)


@dataclass
class Ledger:
    """What the test knows of a ledger."""

    ledger_id: int
    pushed: list[bytes] = field(default_factory=list)
    confirmed: int = -1
    end: int | None = None
    is_deleting: bool = False
    is_deleted: bool = False

    def ledger_advanced(self, last_confirmed: int) -> None:
        self.confirmed = last_confirmed

    def ledger_failed(self, error: LedgerError) -> None:
        pass


class Load:
    """Random work on one store until the power goes."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.ledgers: dict[int, Ledger] = {}
        self.highest = 0
        self.cuts = 0

    async def run(self, store: LocalLedgerStore) -> None:
        writers: dict[int, LedgerWriter] = {}
        rng = self.rng
        try:
            while True:
                draw = rng.random()
                if not writers or draw < 0.08:
                    ledger = Ledger(0)
                    writer = await store.create(listener=ledger, custom={"n": b"%d" % rng.randrange(99)})
                    ledger.ledger_id = writer.ledger_id
                    promise(writer.ledger_id > self.highest, "a ledger id came back")
                    self.highest = writer.ledger_id
                    self.ledgers[writer.ledger_id] = ledger
                    writers[writer.ledger_id] = writer
                    continue
                ledger_id = rng.choice(list(writers))
                ledger = self.ledgers[ledger_id]
                if draw < 0.12:
                    closed = await writers.pop(ledger_id).close()
                    ledger.end = closed.last_entry
                elif draw < 0.15:
                    writers.pop(ledger_id)
                    ledger.end = (await store.open(ledger_id, fence=True)).last_confirmed
                elif draw < 0.18:
                    writers.pop(ledger_id)
                    ledger.is_deleting = True
                    await store.delete(ledger_id)
                    ledger.is_deleted = True
                elif draw < 0.21:
                    await store.checkpoint()
                elif draw < 0.5:
                    for _ in range(rng.randint(1, 5)):
                        await asyncio.sleep(0)
                else:
                    for _ in range(rng.randint(1, 12)):
                        data = rng.randbytes(rng.choice((0, 10, 100, 100, 400, 1500)))
                        writers[ledger_id].append(b"%d:" % ledger_id, data)
                        ledger.pushed.append(b"%d:" % ledger_id + data)
        except LedgerError:
            return

    async def check(self, store: LocalLedgerStore) -> None:
        """Everything confirmed is there after the reboot; learn what else survived."""
        for ledger in list(self.ledgers.values()):
            try:
                reader = await store.open(ledger.ledger_id, fence=False)
            except LedgerNotFound:
                promise(ledger.is_deleting, f"ledger {ledger.ledger_id} is gone")
                ledger.is_deleted = True
                del self.ledgers[ledger.ledger_id]
                continue
            promise(not ledger.is_deleted, f"the deleted ledger {ledger.ledger_id} is back")
            ledger.is_deleting = False
            promise(reader.last_confirmed >= ledger.confirmed, f"ledger {ledger.ledger_id} lost confirmed entries")
            if ledger.end is not None:
                promise(reader.is_closed and reader.last_confirmed == ledger.end, "a settled end moved")
            found = await reader.read(0, reader.last_confirmed) if reader.last_confirmed >= 0 else []
            promise(found == ledger.pushed[: len(found)], f"ledger {ledger.ledger_id} has other entries than were written")
            ledger.pushed = found
            ledger.confirmed = reader.last_confirmed
            if ledger.end is None and self.rng.random() < 0.5:
                ledger.end = (await store.open(ledger.ledger_id, fence=True)).last_confirmed
                promise(ledger.end == ledger.confirmed, "recovery settled another end")


async def survive(seed: int, *, early_receipt: str = "") -> Load:
    """Run load and cuts; raises Lost if the promise is broken."""
    rng = Random(seed)
    disk = ForgetfulFiles(rng, early_receipt=early_receipt)
    load = Load(rng)
    for _ in range(ROUNDS):
        disk.cut_after(rng.randint(0, 250))
        died: list[BaseException] = []
        runtime = replace(Runtime(), files=disk, threads=InlineThreads(), random=rng)
        try:
            store = await open_store(runtime, path=PATH, settings=SMALL, on_fatal=died.append)
            await load.check(store)
            await load.run(store)
            promise(bool(died), "the store refused without a reason")
        except LedgerError as exc:
            if "power is off" not in str(exc) and not died:
                raise Lost(f"the store does not open or serve: {exc}") from exc
        disk = disk.power_cut()
        load.cuts += 1
    for _ in range(2):  # after the crash, and after an orderly close
        runtime = replace(Runtime(), files=disk, threads=InlineThreads(), random=rng)
        try:
            store = await open_store(runtime, path=PATH, settings=SMALL)
            await load.check(store)
            await store.close()
        except LedgerError as exc:
            raise Lost(f"the store does not open or serve: {exc}") from exc
    return load


@pytest.mark.inv("INV1", "INV3")
@pytest.mark.parametrize("block", range(10))
async def test_no_confirmed_entry_is_lost(block: int) -> None:
    cuts = 0
    for seed in range(block * 10, block * 10 + 10):
        try:
            cuts += (await survive(seed)).cuts
        except Lost as exc:
            raise AssertionError(f"seed {seed}: {exc}") from exc
    assert cuts == 10 * ROUNDS


@pytest.mark.inv("INV1")
async def test_a_receipt_before_the_sync_is_caught() -> None:
    caught = 0
    for seed in range(10):
        try:
            await survive(seed, early_receipt="journal-")
        except Lost:
            caught += 1
    assert caught > 0
