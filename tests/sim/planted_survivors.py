"""Planted bugs that every test and seed let live once; see `planted.py`. They are numbered from 101 on.

Each is one line of the product; where the moment it takes is too short to be met by chance, it is made longer.
"""

from __future__ import annotations

import asyncio
from typing import Any

from tests.sim.planting import Patch, Plant, changed

from braid.broker.segments import LocalSegments
from braid.managedledger.cursor_store import CursorStore
from braid.scalable import plans_layout
from braid.scalable.coordinator import SubscriptionCoordinator
from braid.testing.sim import txn_faults
from braid.txn.buffer import MetadataTransactionBuffer

READING_SECONDS = 0.3
"""What lies between the two lists in the eyes of bug 104."""

WRITING_SECONDS = 0.5
"""How long a cursor's write takes in the eyes of bug 105."""


def aborted_before_ops() -> list[Patch]:
    """A new owner reads the aborted records first and lists the ops then."""
    listing = (
        "    ops = await self._store.writes_in(self._segment)\n"
        "    headers = await self._headers(list({op.txn.root: None for op in ops if self._is_mine(op.op)}))\n"
    )
    check = "    if ops or stale:\n"
    pause = f"    await asyncio.sleep({READING_SECONDS})\n"
    return [
        (txn_faults, "DEEDS", ("replace",)),  # what it takes to see it, more often than the others
        *changed(MetadataTransactionBuffer, "recover", listing, "", (check, pause + listing + check), asyncio=asyncio),
    ]


def drained_before_flush() -> list[Patch]:
    """An owner says that everything is acknowledged while that is still being written."""
    honest = CursorStore.save

    async def slow(store: Any, state: Any) -> None:
        await asyncio.sleep(WRITING_SECONDS)
        await honest(store, state)

    return [
        (CursorStore, "save", slow),
        *changed(LocalSegments, "backlog", "        await found.cursor.flush()\n", ""),
    ]


SURVIVORS: dict[int, Plant] = {
    101: Plant(
        "what a look finds drained during a reset is kept",
        "W12",
        12,
        ("C1", "C5"),
        lambda: changed(SubscriptionCoordinator, "resume", "    self.drains.forget()\n", ""),
    ),
    102: Plant(
        "cursors of subscriptions that came during a split begin at the end of the children",
        "W13",
        1,
        ("C1",),
        lambda: changed(
            plans_layout, "_late_cursors", '"earliest" if record is None else initial_for(record, child)', '"latest"'
        ),
    ),
    104: Plant("aborted records are read before ops are listed", "W12", 17, ("C6", "C7"), aborted_before_ops),
    105: Plant(
        "a segment counts as drained before its acknowledgments are durable",
        "W13",
        0,
        ("C19",),
        drained_before_flush,
    ),
}
