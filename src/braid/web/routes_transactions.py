"""REST: transactions: those that are open, by age, with what they hold back; one of them; abort.

Root `/admin/v3/transactions`. Everything is read from the records of the metadata store, so that any broker answers for the
whole cluster; an abort is the same compare-and-swap that a client's is. Bounded: `limit` transactions, `MAX_OPS` of their
operations (INV17).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from braid.client.admin_transaction_types import TransactionAcks, TransactionInfo, TransactionWrites
from braid.client.admin_transactions import DEFAULT_LIMIT, MAX_LIMIT
from braid.errors import InvalidArgument, StoreMismatch, TransactionNotFound
from braid.model.txn import TxnId
from braid.txn.records import position_text, text_position
from braid.txn.store import Header, StoredOp
from braid.web.admin import Admin
from braid.web.calls import Ask, Calls, Query

TRANSACTION = "/transactions/{most}/{least}"
MAX_OPEN = 1_000_000
"""Headers one listing looks at."""
MAX_OPS = 100_000
"""Operations one call looks at, over all transactions it shows."""
AT_ONCE = 50
"""Transactions whose operations are read before others get a turn."""
MIN_INT64 = -(1 << 63)
_WORD = 1 << 64


def transaction_calls(admin: Admin) -> Calls:
    """Calls about transactions."""
    calls = Calls("transactions", root="/admin/v3")
    transactions, clock = admin.service.transactions, admin.service.runtime.clock
    age = Query("minAgeMs", "Only those that were begun this many milliseconds ago or earlier", int, 0)
    limit = Query("limit", "How many, at most; the oldest", int, DEFAULT_LIMIT, least=1, most=MAX_LIMIT)

    @calls.get("/transactions", list[TransactionInfo], query=(age, limit))
    async def list_open(ask: Ask) -> Any:
        """Open transactions of the cluster, the oldest first, with what each holds back."""
        now_ms = clock.now_ms()
        headers = [
            each
            for each in await transactions.store.open_headers(MAX_OPEN)
            if now_ms - each.value.created_ms >= ask.query["minAgeMs"]
        ]
        headers.sort(key=lambda each: (each.value.created_ms, each.root))
        found, left = [], MAX_OPS
        for number, header in enumerate(headers[: ask.query["limit"]], 1):
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)
            try:
                ops = await transactions.store.ops(header.root, left + 1)
            except StoreMismatch:  # told to who asks for this one
                found.append(shown(header, [], now_ms, is_complete=False))
                continue
            found.append(shown(header, ops[:left], now_ms, is_complete=len(ops) <= left))
            left = max(0, left - len(ops))
        return found

    async def existing(txn: TxnId, limit: int) -> tuple[Header, list[StoredOp]]:
        try:
            header, ops = await transactions.coordinator.describe(txn.root, limit=limit)
        except TransactionNotFound as error:
            if not txn.sub:
                raise
            raise TransactionNotFound(f"The transaction {txn} does not exist, nor does {txn.root}, its root.") from error
        if txn.sub and not header.value.is_decider:
            raise TransactionNotFound(f"The transaction {txn} does not exist: {txn.root} has no sub-transactions.")
        return header, ops

    @calls.get(TRANSACTION, TransactionInfo)
    async def describe(ask: Ask) -> Any:
        """A transaction, open or lately finished, with what is not settled yet; of a sub-transaction only its own part."""
        txn = _transaction(ask)
        header, ops = await existing(txn, MAX_OPS + 1)
        is_complete = len(ops) <= MAX_OPS
        if txn.sub:
            ops = [each for each in ops if each.txn == txn]
        return shown(header, ops[:MAX_OPS], clock.now_ms(), sub=txn.sub, is_complete=is_complete)

    @calls.delete(TRANSACTION)
    async def abort(ask: Ask) -> None:
        """Abort an open transaction; one that is aborted already is fine, a committed one is refused with 409."""
        txn = _transaction(ask)
        if txn.sub:
            await existing(txn, 1)
            raise InvalidArgument(
                f"{txn} is sub-transaction {txn.sub} of {txn.root}, which decides about it; abort {txn.root} instead."
            )
        await transactions.coordinator.end(txn, commit=False)

    return calls


def _transaction(ask: Ask) -> TxnId:
    most = ask.number("most", "number of a coordinator: the most significant bits of a transaction id", MIN_INT64)
    least = ask.number("least", "number of a transaction: the least significant bits of its id", MIN_INT64)
    return TxnId(most % _WORD, least % _WORD)


def shown(header: Header, ops: Iterable[StoredOp], now_ms: int, *, sub: int = 0, is_complete: bool = True) -> TransactionInfo:
    """A transaction in the words of the admin API."""
    txn, value, ops = header.root.with_sub(sub), header.value, list(ops)
    most, _, least = str(txn).partition("_")
    return TransactionInfo(
        transaction=str(txn),
        most_bits=int(most),
        least_bits=int(least),
        state=value.outcome(sub),
        created_ms=value.created_ms,
        age_ms=max(0, now_ms - value.created_ms),
        deadline_ms=value.timeout_ms,
        finalized_ms=value.finalized_ms,
        owner=value.owner,
        is_decider=value.is_decider,
        winners=list(value.winners),
        sink=value.sink,
        batch=value.batch,
        run=value.run,
        operations=len(ops),
        is_complete=is_complete,
        writes=_writes(ops),
        acks=_acks(ops),
    )


def _writes(ops: Iterable[StoredOp]) -> list[TransactionWrites]:
    by_topic: dict[str, list[StoredOp]] = {}
    for each in ops:
        if each.op.kind == "write":
            by_topic.setdefault(each.op.segment, []).append(each)
    return [
        TransactionWrites(
            topic=topic,
            entries=sum(each.op.entries for each in found),
            floor=position_text(min(text_position(each.op.position) for each in found)),
            sub_transactions=_subs(found),
        )
        for topic, found in sorted(by_topic.items())
    ]


def _acks(ops: Iterable[StoredOp]) -> list[TransactionAcks]:
    by_subscription: dict[tuple[str, str], list[StoredOp]] = {}
    for each in ops:
        if each.op.kind == "ack":
            by_subscription.setdefault((each.op.segment, each.op.subscription or ""), []).append(each)
    found = []
    for (topic, subscription), acks in sorted(by_subscription.items()):
        cumulative = [text_position(each.op.position) for each in acks if each.op.is_cumulative]
        found.append(
            TransactionAcks(
                topic=topic,
                subscription=subscription,
                positions=len(acks) - len(cumulative),
                cumulative=position_text(max(cumulative)) if cumulative else None,
                sub_transactions=_subs(acks),
            )
        )
    return found


def _subs(ops: Iterable[StoredOp]) -> list[int]:
    return sorted({each.txn.sub for each in ops})
