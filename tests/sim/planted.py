"""Planted bugs: ways to break the product on purpose, to see that the simulator notices (numbers of the reliability sheet).

Nothing of this is in the product: a bug is a function or a default that is exchanged for the time of a context. Most are made
from the product's own source with one line changed; if that line is no longer there, planting fails loudly.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.sim.planted_repairs import REPAIRED
from tests.sim.planted_scalable import SCALABLE_PLANTS
from tests.sim.planted_survivors import SURVIVORS
from tests.sim.planted_txn import TXN_PLANTS
from tests.sim.planting import Patch, Plant, changed

from braid.ledger.backends.local.journal import Journal
from braid.ledger.backends.local.ledgerfile import BlockReader
from braid.managedledger.appending import LogAppender
from braid.managedledger.log import ManagedLedger
from braid.metadata.election import LeaderElection
from braid.metadata.watches import Watch
from braid.testing.sim.world import SimDisk
from braid.wire.entries import entry_metadata


def leaking_watches() -> list[Patch]:
    async def stay(_watch: Any, *_error: Any) -> None:
        """The watch is left and nobody is told."""

    return [(Watch, "__aexit__", stay)]


def early_receipts() -> list[Patch]:
    honest = SimDisk.__init__

    def lying(disk: Any, rng: Any, **options: Any) -> None:
        honest(disk, rng, **{**options, "early_receipt": "journal-"})

    return [(SimDisk, "__init__", lying)]


def no_reconcile() -> list[Patch]:
    honest = LeaderElection.__init__

    def never(election: Any, *args: Any, **options: Any) -> None:
        honest(election, *args, **{**options, "reconcile_seconds": 1e9})

    return [(LeaderElection, "__init__", never)]


PLANTS: dict[int, Plant] = {
    **SCALABLE_PLANTS,
    **TXN_PLANTS,
    **SURVIVORS,
    **REPAIRED,
    10: Plant("watch listener leak", "W9", 0, ("C19",), leaking_watches),
    18: Plant(
        "seek by the client's time",
        "W1",
        0,
        ("C1",),
        lambda: changed(
            ManagedLedger,
            "find_time",
            "entries[0].append_ms < ms",
            "entry_metadata(entries[0].body).publish_time < ms",
            entry_metadata=entry_metadata,
        ),
    ),
    19: Plant(
        "fsync skipped on segment roll",
        "W1",
        1,
        ("C1", "start", "C3", "C12"),
        lambda: changed(Journal, "_begin", "self._files.sync_dir(self._directory)", "pass"),
    ),
    20: Plant(
        "checksum not verified on read",
        "W1",
        0,
        ("C2",),
        lambda: changed(BlockReader, "_entries", " or crc32c(entry) != block.crcs[at]", ""),
    ),
    29: Plant("receipt sent before fsync", "W1", 1, ("C1", "start", "C3", "C12"), early_receipts),
    33: Plant(
        "a lower ledger id accepted",
        "W1",
        5,
        ("C12", "C1", "C4"),
        lambda: changed(LogAppender, "_create_ledger", "if writer.ledger_id <= highest:", "if False:"),
    ),
    37: Plant("no reconcile while every third notification is dropped", "W9", 1, ("C18",), no_reconcile),
}


@contextmanager
def planted(number: int | None) -> Iterator[None]:
    """Break one promise for the time of the context; None breaks none."""
    if number is None:
        yield
        return
    patches = PLANTS[number].apply()
    before = [owner.__dict__.get(name) for owner, name, _replacement in patches]
    for owner, name, replacement in patches:
        setattr(owner, name, replacement)
    try:
        yield
    finally:
        for (owner, name, _replacement), honest in zip(patches, before, strict=True):
            if honest is None:
                delattr(owner, name)
            else:
                setattr(owner, name, honest)
