"""Recovery of pending acknowledgments when a topic is loaded: one listing, one look at each header.

Runs after the log was claimed and fenced and before anybody is served (INV2), so that it sees every op that a former owner can
have accepted (INV11). Owns the deletion of ops that count for nothing any more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence

from braid.errors import BraidError
from braid.model.txn import TxnId
from braid.runtime.clock import Clock
from braid.runtime.tasks import Tasks
from braid.txn.pending_acks import FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS, MetadataPendingAckStore
from braid.txn.records import TxnHeader
from braid.txn.store import StoredOp, TransactionStore

log = logging.getLogger(__name__)
LOOKED_AT_ONCE = 512
"""Ops that are sorted without a pause."""


async def recover_all(
    store: TransactionStore,
    segment: str,
    subscriptions: Mapping[str, MetadataPendingAckStore],
    check_owner: Callable[[], Awaitable[None]],
    tasks: Tasks,
    clock: Clock,
    passed_over: Container[str] = (),
) -> None:
    """Restore the pending acknowledgments of every subscription of a segment, whose log is claimed and serves nobody yet.

    One listing and one look at each header found. Ops that count for nothing any more (no header, an earlier log of that name,
    no such subscription) are deleted in the background; those of subscriptions that are `passed_over` stay as they are.
    """
    ops = await store.all_acks_in(segment)
    headers: dict[TxnId, TxnHeader | None] = {}
    groups: dict[tuple[str, TxnId], list[StoredOp]] = {}
    for number, op in enumerate(ops, 1):
        if number % LOOKED_AT_ONCE == 0:
            await asyncio.sleep(0)
        if (op.op.subscription or "") in passed_over:
            continue
        groups.setdefault((op.op.subscription or "", op.txn.root), []).append(op)
        if op.txn.root not in headers:
            found = await store.header_of_ops(op.txn.root)
            headers[op.txn.root] = None if found is None else found.value
    if ops:
        await check_owner()  # else what a later owner accepted might be among them, for subscriptions unknown here
    useless: list[StoredOp] = []
    for number, ((name, root), group) in enumerate(groups.items(), 1):
        if number % LOOKED_AT_ONCE == 0:
            await asyncio.sleep(0)
        pending, header = subscriptions.get(name), headers[root]
        useless += group if pending is None or header is None else await pending.restore(root, header, group)
    if useless:
        tasks.spawn(_delete_at_last(store, useless, clock), "old acks")


async def _delete_at_last(store: TransactionStore, ops: Sequence[StoredOp], clock: Clock) -> None:
    delay = FIRST_RETRY_SECONDS
    for op in ops:
        while True:
            try:
                await store.delete_op(op)
                break
            except BraidError as error:
                log.warning("the op %s, which counts for nothing any more, stays for now: %s", op.key, error)
            await clock.sleep(delay)
            delay = min(delay * 2, LAST_RETRY_SECONDS)
