"""`TransactionStore`: every call that transactions make to the metadata store, named and counted.

Owns the conditions of each write (a header is created absent and changed by version only, an op is deleted by the version that
`append` gave it) and the counters of PIP-473. Decides nothing: state machines are the callers'.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Final

import msgspec

from braid.errors import VersionConflict
from braid.metadata.api import ABSENT, IndexSpan, MetadataStore, Record, Span
from braid.model.txn import TxnId
from braid.runtime.clock import Clock
from braid.txn import records
from braid.txn.records import AbortedTxn, TxnHeader, TxnOp

BUCKETS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
"""Upper bounds, in seconds, of the histogram of index queries."""


class Header(msgspec.Struct, frozen=True):
    """A header and the version to condition on."""

    root: TxnId
    value: TxnHeader
    version: int


class StoredOp(msgspec.Struct, frozen=True):
    """An op as it is stored."""

    key: str
    version: int
    txn: TxnId
    """Sub number included."""
    op: TxnOp


class TxnCounters:
    """What the metrics show of this broker's calls."""

    def __init__(self) -> None:
        self.op_writes = 0
        self.op_deletes = 0
        self.header_cas = {"ok": 0, "conflict": 0, "reject": 0}
        """Decisions: applied; lost to another one; refused because the transaction was over or unknown."""
        self.query_counts = [0] * (len(BUCKETS) + 1)
        self.query_seconds = 0.0

    def queried(self, seconds: float) -> None:
        self.query_seconds += seconds
        for at, bound in enumerate(BUCKETS):
            if seconds <= bound:
                self.query_counts[at] += 1
                return
        self.query_counts[-1] += 1


class TransactionStore:
    """One per broker, over its handle."""

    def __init__(self, metadata: MetadataStore, clock: Clock) -> None:
        self.metadata = metadata
        self.counters = TxnCounters()
        self._clock = clock

    # Headers.

    async def header(self, root: TxnId, *, fresh: bool = False) -> Header | None:
        found = await self.metadata.get(records.header_key(root), partition=str(root), fresh=fresh)
        return None if found is None else _header(found)

    async def create_header(self, root: TxnId, value: TxnHeader) -> Header:
        """Raises VersionConflict if there is one."""
        return await self._put(root, value, ABSENT)

    async def swap_header(self, old: Header, value: TxnHeader) -> Header:
        """Raises VersionConflict if it is no longer `old`."""
        return await self._put(old.root, value, old.version)

    async def _put(self, root: TxnId, value: TxnHeader, expected: int) -> Header:
        record = await self.metadata.put(
            records.header_key(root),
            records.encode(value),
            expected=expected,
            partition=str(root),
            index=records.header_index(value),
        )
        return Header(root, value, record.version)

    async def delete_header(self, header: Header) -> None:
        """The last thing that goes of a transaction. Raises VersionConflict."""
        await self.metadata.delete(records.header_key(header.root), expected=header.version, partition=str(header.root))

    async def expired(self, now_ms: int, limit: int) -> list[Header]:
        """Open transactions whose deadline is `now_ms` or earlier, oldest deadline first."""
        return await self._headers(IndexSpan(records.TXN_BY_DEADLINE, None, records.padded(now_ms + 1)), limit)

    async def open_headers(self, limit: int) -> list[Header]:
        """Open transactions by deadline."""
        return await self._headers(IndexSpan(records.TXN_BY_DEADLINE), limit)

    async def finished(self, until_ms: int, limit: int) -> list[Header]:
        """Finished transactions that ended at `until_ms` or earlier."""
        found: list[Header] = []
        for state in ("ABORTED", "COMMITTED"):
            span = IndexSpan(records.TXN_BY_FINAL_STATE, f"{state}:", f"{state}:{records.padded(until_ms + 1)}")
            found += await self._headers(span, limit - len(found))
        return found

    async def _headers(self, span: IndexSpan, limit: int) -> list[Header]:
        if limit <= 0:
            return []
        return [_header(record) async for record in self.metadata.scan(span, limit=limit, fresh=True)]

    # Ops.

    async def append_op(self, txn: TxnId, op: TxnOp) -> StoredOp:
        """After OutcomeUnknown there may be an op that nobody knows of; listings find it."""
        record = await self.metadata.append(
            records.op_prefix(txn), records.encode(op), partition=str(txn.root), index=records.op_index(op)
        )
        self.counters.op_writes += 1
        return StoredOp(record.key, record.version, txn, op)

    async def delete_op(self, op: StoredOp) -> None:
        """Idempotent; one that changed is not the one that is meant (it never changes)."""
        try:
            await self.metadata.delete(op.key, expected=op.version, partition=str(op.txn.root))
        except VersionConflict:
            return
        self.counters.op_deletes += 1

    async def ops(self, root: TxnId, limit: int | None = None) -> list[StoredOp]:
        """All ops of a transaction and its sub-transactions."""
        span = Span(records.ops_of(root))
        return [_op(record) async for record in self.metadata.scan(span, partition=str(root), limit=limit, fresh=True)]

    async def writes_in(self, segment: str) -> list[StoredOp]:
        return await self._indexed(IndexSpan.exactly(records.WRITES_BY_SEGMENT, records.encoded(segment)))

    async def acks_in(self, segment: str, subscription: str) -> list[StoredOp]:
        secondary = records.acks_secondary(segment, subscription)
        return await self._indexed(IndexSpan.exactly(records.ACKS_BY_SEGMENT_SUBSCRIPTION, secondary))

    async def all_acks_in(self, segment: str) -> list[StoredOp]:
        """Of every subscription."""
        prefix = records.encoded(segment)
        return await self._indexed(IndexSpan(records.ACKS_BY_SEGMENT_SUBSCRIPTION, f"{prefix}:", f"{prefix};"))

    async def count_ops(self) -> int:
        """Op records in the whole store: what was begun and not yet materialised."""
        total = 0
        for name in (records.WRITES_BY_SEGMENT, records.ACKS_BY_SEGMENT_SUBSCRIPTION):
            async for _record in self.metadata.scan(IndexSpan(name)):
                total += 1
        return total

    async def _indexed(self, span: IndexSpan) -> list[StoredOp]:
        began = self._clock.monotonic()
        found = [_op(record) async for record in self.metadata.scan(span, fresh=True)]
        self.counters.queried(self._clock.monotonic() - began)
        return found

    # Sub-transactions.

    async def append_sub(self, root: TxnId) -> int:
        """A sub number that nobody else has."""
        record = await self.metadata.append(f"{records.subs_of(root)}/s", b"", partition=str(root))
        return int(record.name.rpartition("-")[2])

    async def delete_subs(self, root: TxnId) -> None:
        await self.metadata.delete_span(Span(records.subs_of(root)), partition=str(root))

    # Aborted transactions of a segment.

    async def put_aborted(self, segment: str, txn: TxnId, value: AbortedTxn) -> None:
        await self.metadata.put(records.aborted_key(segment, txn), records.encode(value), partition=str(txn.root))

    async def aborted_in(self, segment: str) -> AsyncIterator[tuple[TxnId, AbortedTxn]]:
        """One scan, fresh."""
        async for record in self.metadata.scan(Span(records.aborted_in(segment)), fresh=True):
            yield TxnId.parse(record.name), records.decode_aborted(record.key, record.value)

    async def delete_aborted(self, segment: str, txn: TxnId) -> None:
        await self.metadata.delete(records.aborted_key(segment, txn), partition=str(txn.root))

    # Ends of topics and subscriptions.

    async def purge_subscription(self, segment: str, subscription: str) -> None:
        """The subscription is gone: so are the acknowledgments it would have got."""
        await self._delete_all(await self.acks_in(segment, subscription))

    async def purge_segment(self, segment: str) -> None:
        """The log is gone: its ops and its aborted records go too."""
        await self._delete_all([*await self.writes_in(segment), *await self.all_acks_in(segment)])
        for txn in [txn async for txn, _value in self.aborted_in(segment)]:
            await self.delete_aborted(segment, txn)

    async def _delete_all(self, ops: Sequence[StoredOp]) -> None:
        for op in ops:
            await self.delete_op(op)


def _header(record: Record) -> Header:
    return Header(TxnId.parse(record.name), records.decode_header(record.key, record.value), record.version)


def _op(record: Record) -> StoredOp:
    return StoredOp(record.key, record.version, records.op_txn(record.key), records.decode_op(record.key, record.value))
