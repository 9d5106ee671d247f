"""Ops of acknowledgments: how they are written, many at a time, and what a committed one does to a cursor.

One op per position, one for a cumulative acknowledgment (PIP-473). Decides nothing: who may write one and when it counts is the
pending-ack store's part.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import Final

from braid.errors import BraidError
from braid.model.positions import Position
from braid.model.txn import TxnId
from braid.txn import records
from braid.txn.ack_conflicts import Hold, bits_of
from braid.txn.api import Ack, CursorAcks
from braid.txn.records import TxnHeader, TxnOp
from braid.txn.store import StoredOp, TransactionStore

log = logging.getLogger(__name__)
APPENDED_AT_ONCE: Final = 64
"""Ops that are on their way to the store at the same time."""


def op_of(segment: str, subscription: str, incarnation: str, ack: Ack, *, is_cumulative: bool) -> TxnOp:
    return TxnOp(
        kind="ack",
        segment=segment,
        subscription=subscription,
        position=records.position_text(ack.position),
        incarnation=incarnation,
        is_cumulative=is_cumulative,
        ack_set="" if ack.mask is None else f"{ack.mask:x}",
        batch_size=ack.batch_size,
    )


def hold_of(op: TxnOp) -> Hold:
    """What a stored op holds."""
    mask = int(op.ack_set, 16) if op.ack_set else None
    position = records.text_position(op.position)
    return Hold(position, bits_of(Ack(position, mask, op.batch_size)), op.is_cumulative)


async def append_ops(store: TransactionStore, todo: Sequence[tuple[TxnId, TxnOp]], ops: list[StoredOp]) -> None:
    """Write them; `ops` gets those that are known to be stored, also if this raises."""
    failures: list[BraidError] = []

    async def append(txn: TxnId, op: TxnOp) -> None:
        try:
            ops.append(await store.append_op(txn, op))
        except BraidError as error:
            failures.append(error)

    for start in range(0, len(todo), APPENDED_AT_ONCE):
        async with asyncio.TaskGroup() as tasks:
            for txn, op in todo[start : start + APPENDED_AT_ONCE]:
                tasks.create_task(append(txn, op))
        if failures:
            raise failures[0]


def apply_ops(cursor: CursorAcks, ops: Iterable[StoredOp], header: TxnHeader | None) -> bool:
    """Acknowledge what is committed of these; False if nothing is. May be done twice."""
    whole: list[Position] = []
    is_applied = False
    for stored in ops:
        op = stored.op
        if header is None or header.outcome(stored.txn.sub) != "COMMITTED" or op.incarnation != cursor.incarnation:
            continue
        position, mask = records.text_position(op.position), int(op.ack_set, 16) if op.ack_set else None
        if position > cursor.last_position:
            log.error("the log has no entry %s, which the op %s acknowledges", position, stored.key)
            continue
        is_applied = True
        if op.is_cumulative:
            cursor.acknowledge_cumulative(position, mask)
        elif mask is None:
            whole.append(position)
        else:
            cursor.acknowledge((), {position: mask})
    if whole:
        cursor.acknowledge(whole, {})
    return is_applied
