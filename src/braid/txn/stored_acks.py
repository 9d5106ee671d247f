"""`StoredAcks`: what acknowledgments of one subscription inside transactions do to the store and to the cursor, step by step.

Owns the order of each of these procedures: accepting (ops, header, owner), taking back what was refused, and materialising
(list, apply, flush, delete). Keeps nothing in memory and decides nothing: what is held, which ops count and when something is
done is up to `MetadataPendingAckStore`, which lets only one of these run for a root at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from braid.errors import BraidError, TransactionConflict
from braid.model.txn import TxnId
from braid.runtime.plans import step
from braid.txn.ack_ops import APPENDED_AT_ONCE, append_ops, apply_ops, op_of
from braid.txn.ack_requests import AckRequest, AckRoot
from braid.txn.api import CursorAcks
from braid.txn.records import TxnHeader
from braid.txn.store import StoredOp, TransactionStore

log = logging.getLogger(__name__)
APPLIED_AT_ONCE: Final = 512
"""Acknowledgments that are applied without a pause."""


class StoredAcks:
    """See the module."""

    def __init__(self, segment: str, subscription: str, cursor: CursorAcks, store: TransactionStore) -> None:
        self.segment = segment
        self.subscription = subscription
        self._cursor = cursor
        self._store = store

    async def header(self, root: TxnId) -> TxnHeader | None:
        """A transaction's header, read fresh; None if there is none."""
        found = await self._store.header(root, fresh=True)
        return None if found is None else found.value

    async def accept(self, root: TxnId, state: AckRoot, group: Iterable[AckRequest], ops: list[StoredOp]) -> None:
        """Return if the transaction may hold these; `ops` gets what was written, also if this raises."""
        async with step("txn-ack:op"):
            name, subscription, incarnation = self.segment, self.subscription, self._cursor.incarnation
            wanted = [(each, number) for each in group for number in each.unwritten]
            for start in range(0, len(wanted), APPENDED_AT_ONCE):  # each made when it is its turn: there may be thousands
                part = [
                    (each.txn, op_of(name, subscription, incarnation, each.acks[number], is_cumulative=each.is_cumulative))
                    for each, number in wanted[start : start + APPENDED_AT_ONCE]
                ]
                await append_ops(self._store, part, ops)
        async with step("txn-ack:header"):
            found = await self._store.header(root)
            if found is None or not found.value.is_open:
                raise not_open(root, None if found is None else found.value)
            state.since_ms = found.value.created_ms
        async with step("txn-ack:owner"):
            await self._cursor.check_owner()
        async with step("txn-ack:hold"):
            pass  # from here on it counts

    async def take_back(self, root: TxnId, ops: Sequence[StoredOp]) -> bool:
        """Delete the ops of refused acknowledgments; False if they may still be there."""
        try:
            for op in ops:
                await self._store.delete_op(op)
        except BraidError as error:
            log.warning("what the refused acknowledgments of %s left is cleaned up when it ends: %s", root, error)
            return False
        return True

    async def materialise(self, root: TxnId, state: AckRoot) -> None:
        """Apply a decision. Idempotent: it begins with what the store has. Costs as much as is materialised, whatever else is
        held, and lets others have their turn."""
        listed = await self._store.acks_of(self.segment, self.subscription, root)
        keys = {op.key for op in listed}
        if not state.accepted.keys() <= keys:
            listed += await self._store.old_acks_of(self.segment, self.subscription, root)
            keys = {op.key for op in listed}
        if keys != state.accepted.keys():
            # Else those that are new may be what a later owner accepted and has not applied yet, and those that are gone what
            # it applied: they must not be given out again here.
            await self._cursor.check_owner()
        async with step("txn-ack:apply"):
            is_applied = await self._apply([op for op in listed if op.key in state.accepted], state.header)
        if is_applied:
            async with step("txn-ack:flush"):
                await self._cursor.flush()
        async with step("txn-ack:delete-ops"):
            for op in listed:
                await self._store.delete_op(op)

    async def _apply(self, ops: Sequence[StoredOp], header: TxnHeader | None) -> bool:
        """`apply_ops` in several turns. Meanwhile everything is held as before; if this is not finished, it is repeated."""
        is_applied = False
        for start in range(0, len(ops), APPLIED_AT_ONCE):
            if start:
                await asyncio.sleep(0)
            is_applied |= apply_ops(self._cursor, ops[start : start + APPLIED_AT_ONCE], header)
        return is_applied

    async def end_strays(self, is_known: Callable[[TxnId], bool]) -> None:
        """Delete the ops of decided roots that are not known here, as a refused acknowledgment can leave them."""
        strays: dict[TxnId, list[StoredOp]] = {}
        for op in await self._store.acks_in(self.segment, self.subscription):
            if not is_known(op.txn.root):
                strays.setdefault(op.txn.root, []).append(op)
        if strays:
            await self._cursor.check_owner()  # else they may be what a later owner accepted
        for root, ops in strays.items():
            header = await self.header(root)
            if not is_known(root) and (header is None or not header.is_open):
                for op in ops:
                    await self._store.delete_op(op)

    async def purge(self) -> None:
        """Delete every op: a reset of the subscription wins over what is held."""
        async with step("txn-ack:reset"):
            await self._store.purge_subscription(self.segment, self.subscription, self._cursor.check_owner)


def not_open(txn: TxnId, header: TxnHeader | None) -> TransactionConflict:
    """The refusal of a transaction that is decided or gone."""
    what = "does not exist" if header is None else f"is {header.state} already"
    return TransactionConflict(f"The transaction {txn} {what}; nothing can be acknowledged in it. Begin another one.")
