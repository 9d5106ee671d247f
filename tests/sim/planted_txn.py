"""Planted bugs of transactions; see `planted.py`. Numbers are those of the reliability sheet; 1036 is its 36 once more, with an
owner that does not look whether the log is still its own."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.sim.planting import Patch, Plant, changed

from braid.broker import dispatch_shared, dispatch_single, visible
from braid.broker.cursor_acks import ManagedCursorAcks
from braid.broker.log_owners import LogOwners
from braid.broker.service import BrokerService
from braid.model.txn import TxnId
from braid.testing.sim import txn_faults
from braid.txn.ack_conflicts import Holds
from braid.txn.buffer import MetadataTransactionBuffer, _open_header
from braid.txn.coordinator import TransactionCoordinator
from braid.txn.held_writes import WritePermit
from braid.txn.records import TxnOp, position_text
from braid.txn.store import StoredOp, TransactionStore
from braid.txn.stored_acks import StoredAcks
from braid.txn.visibility import Visibility

PAUSE_SECONDS = 0.3
"""What lies between the two calls in the eyes of bug 3."""
EARLY_ROUNDS = 150
"""In the eyes of bug 26 a new owner fences the log so many fiftieths of a second after it has listed the ops, or as soon as
there is one that it has not seen."""


def unknown_is_aborted() -> list[Patch]:
    """Only what this owner has seen committed itself, and not yet forgotten with its topic, counts as committed."""
    honest = MetadataTransactionBuffer._apply

    def apply(buffer: Any, held: Any) -> None:
        honest(buffer, held)
        if held.header is not None and held.header.state == "COMMITTED":
            buffer.__dict__.setdefault("known", set()).add(held.root)

    def is_aborted(buffer: Any, txn: tuple[int, int]) -> bool:
        root = TxnId(*txn).root
        return txn in buffer.visibility.aborted or (root not in buffer._held and root not in buffer.__dict__.get("known", ()))

    return [
        (MetadataTransactionBuffer, "_apply", apply),
        (MetadataTransactionBuffer, "is_aborted", is_aborted),
        (MetadataTransactionBuffer, "hides", property(lambda _buffer: True)),
    ]


def op_after_append() -> list[Patch]:
    """The header is looked at, the entry is appended, and then the op is written."""

    async def authorise(buffer: Any, txn: TxnId, entries: int) -> WritePermit:
        header = _open_header(txn, await buffer._store.header(txn.root))
        held = buffer._hold(txn.root)
        held.in_flight += entries
        buffer.in_flight += entries
        held.since_ms = header.value.created_ms
        op = TxnOp(
            kind="write",
            segment=buffer._segment,
            position=position_text(buffer._log.last_position),
            incarnation=buffer._log.incarnation,
        )
        stored = StoredOp("", 0, txn, op)
        held.covered(stored)
        return WritePermit(txn, entries, stored)

    async def appended(buffer: Any, permit: WritePermit, count: int) -> None:
        held = buffer._hold(permit.txn.root)
        stored = await buffer._store.append_op(permit.txn, permit.op.op)
        held.ops[stored.key] = stored
        buffer._landed(held, permit.entries - count)
        buffer._settle(held)

    return [(MetadataTransactionBuffer, "authorise", authorise), (MetadataTransactionBuffer, "appended", appended)]


def header_before_op() -> list[Patch]:
    """The header is read first, and the transaction may end before the op is there."""
    check = (
        '        async with step("txn-write:header"):\n'
        "            header = _open_header(txn, await self._store.header(txn.root))\n"
    )
    first = '        async with step("txn-write:op"):\n'
    pause = f"        await asyncio.sleep({PAUSE_SECONDS})\n"
    return changed(MetadataTransactionBuffer, "authorise", check, "", (first, check + pause + first))


def state_before_fence() -> list[Patch]:
    """What the records say is read while the log still belongs to somebody else."""
    honest = TransactionStore.writes_in

    async def listed(service: Any, name: Any) -> None:
        store = service.transactions.store
        found = store.__dict__.setdefault("early", {})[str(name)] = await honest(store, str(name))
        for _round in range(EARLY_ROUNDS):
            if {op.key for op in await honest(store, str(name))} - {op.key for op in found}:
                await asyncio.sleep(0.02)
                return
            await asyncio.sleep(0.02)

    async def writes_in(store: Any, segment: str) -> list[StoredOp]:
        early: dict[str, list[StoredOp]] = store.__dict__.get("early", {})
        return early.pop(segment) if segment in early else await honest(store, segment)

    opening = "        managed = await self.logs.open(\n"
    return [
        (txn_faults, "DEEDS", ("replace",)),  # what it takes to see it, more often than the others
        *changed(BrokerService, "_open", opening, "        await listed(self, name)\n" + opening, listed=listed),
        (TransactionStore, "writes_in", writes_in),
    ]


def abort_in_flight() -> list[Patch]:
    """An abort does not wait for the appends under way, and what they bring is not looked at."""
    honest = MetadataTransactionBuffer.added

    def added(buffer: Any, entries: Any) -> None:
        known = []
        for entry in entries:
            if entry.txn is None or TxnId(*entry.txn).root in buffer._held:
                known.append(entry)
            else:
                buffer.in_flight -= 1
        honest(buffer, known)

    return [
        *changed(MetadataTransactionBuffer, "_settle", "if held.in_flight or self.is_closed", "if self.is_closed"),
        *changed(MetadataTransactionBuffer, "_finish", "if not held.in_flight:", "if True:"),
        (MetadataTransactionBuffer, "added", added),
    ]


def unacknowledged() -> list[Patch]:
    line = "cursor.acknowledge([Position(entry.ledger_id, entry.entry_id) for entry in hidden])"
    [(_module, name, changed_one)] = changed(visible, "visible", line, "pass")
    return [(module, name, changed_one) for module in (dispatch_shared, dispatch_single)]


def thousandfold() -> list[Patch]:
    honest = TransactionCoordinator.new

    async def new(coordinator: Any, number: int, timeout_ms: int, **options: Any) -> TxnId:
        return await honest(coordinator, number, 1000 * timeout_ms, **options)

    return [(TransactionCoordinator, "new", new)]


def pruned_at_once() -> list[Patch]:
    """Aborted records go when the transaction does, not when its entries are trimmed."""
    honest = MetadataTransactionBuffer._finish

    async def finish(buffer: Any, held: Any) -> None:
        await honest(buffer, held)
        buffer.prune()

    return [
        *changed(Visibility, "prunable", " and last < first", ""),
        *changed(MetadataTransactionBuffer, "_prune", "records.text_position(at.last) < first", "True"),
        (MetadataTransactionBuffer, "_finish", finish),
    ]


def no_owner_check() -> list[Patch]:
    async def ours(_cursor: Any) -> None:
        """It certainly is."""

    async def trust(_owners: Any, _topics: Any) -> None:
        """Whoever serves a log owns it."""

    return [
        (txn_faults, "DEEDS", ("replace",)),  # what it takes to see it, more often than the others
        (LogOwners, "look", trust),  # it would find out soon, and what is asked here is what happens before
        (ManagedCursorAcks, "check_owner", ours),
    ]


TXN_PLANTS: dict[int, Plant] = {
    1: Plant("unknown transaction treated as aborted after collection", "W4", 0, ("C6", "C1"), unknown_is_aborted),
    2: Plant("op record written after append", "W4", 0, ("C6", "C7", "C8"), op_after_append),
    3: Plant("header check and op write not atomic", "W4", 6, ("C6", "C7", "C8"), header_before_op),
    4: Plant("timeout multiplied by 1,000", "W5", 0, ("C18",), thousandfold),
    5: Plant(
        "terminal transactions never leave the cache",
        "W4",
        0,
        ("C19",),
        lambda: [(MetadataTransactionBuffer, "_drop", lambda _buffer, _held: None)],
    ),
    6: Plant("aborted record deleted before data is trimmed", "W5", 0, ("C6", "C7"), pruned_at_once),
    23: Plant(
        "maximum read position callback missed during recovery",
        "W4",
        1,
        ("C1", "C6", "C18", "C19"),
        lambda: changed(
            MetadataTransactionBuffer,
            "_recovered",
            "    elif writes.is_vague:\n",
            "    elif writes.is_vague:\n        self._decisions.release(op.txn.root, self._decided)\n",
        ),
    ),
    26: Plant("new owner loads transaction state before it fences the log", "W4", 12, ("C6", "C7"), state_before_fence),
    27: Plant("abort materialised while an append of it is in flight", "W4", 3, ("C6", "C7"), abort_in_flight),
    28: Plant(
        "filtered entries not acknowledged",
        "W4",
        5,
        ("C1", "C6", "C18"),
        unacknowledged,
    ),
    31: Plant(
        "acknowledgments deleted before the cursor is durable",
        "W4",
        0,
        ("C6", "C7"),
        lambda: changed(StoredAcks, "materialise", "if is_applied:", "if False:"),
    ),
    36: Plant(
        "transactional acknowledgment of a held or acknowledged position accepted",
        "W4",
        2,
        ("C6", "C7"),
        lambda: [(Holds, "conflict", lambda *_anything: None)],
    ),
    1036: Plant("transactional acknowledgment held by a stale owner", "W4", 15, ("C6", "C7"), no_owner_check),
}
