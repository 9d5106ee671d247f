"""`TransactionStore`: every call that transactions make to the metadata store, named and counted.

Owns the conditions of each write (a header is created absent and changed by version only, an op is deleted by the version that
`append` gave it) and the counters of PIP-473. Decides nothing: state machines are the callers'.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence

import msgspec

from braid.errors import StoreMismatch, VersionConflict
from braid.metadata.api import ABSENT, IndexSpan, MetadataStore, Record, Span
from braid.metadata.names import decode_name
from braid.model.txn import MAX_SERIAL, TxnId
from braid.runtime.clock import Clock
from braid.txn import records
from braid.txn.counters import TxnCounters as TxnCounters
from braid.txn.records import AbortedTxn, SerialBlock, SinkRecord, TxnHeader, TxnOp

log = logging.getLogger(__name__)


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


class Sink(msgspec.Struct, frozen=True):
    """A sink's record and the version to condition on."""

    name: str
    value: SinkRecord
    version: int


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

    async def header_of_ops(self, root: TxnId) -> Header | None:
        """The header of a transaction whose ops were found, fresh. One that cannot be read counts as open: what belongs to it
        is held until it is repaired, and nothing else is."""
        try:
            return await self.header(root, fresh=True)
        except StoreMismatch as error:
            log.error("what the transaction %s wrote or acknowledged waits until its record is repaired: %s", root, error)
            now = self._clock.now_ms()
            return Header(root, TxnHeader(state="OPEN", timeout_ms=now, created_ms=now), ABSENT)

    async def create_header(self, root: TxnId, value: TxnHeader) -> Header:
        """Raises VersionConflict if there is one."""
        made = await self._put(root, value, ABSENT)
        self.counters.began(root)
        return made

    async def swap_header(self, old: Header, value: TxnHeader) -> Header:
        """Raises VersionConflict if it is no longer `old`."""
        if value.is_open:
            return await self._put(old.root, value, old.version)
        try:
            made = await self._put(old.root, value, old.version)
        except VersionConflict:
            self.counters.header_cas["conflict"] += 1
            raise
        self.counters.header_cas["ok"] += 1
        duration_ms = (value.finalized_ms or 0) - value.created_ms
        self.counters.decided(old.root, is_commit=value.state == "COMMITTED", duration_ms=duration_ms)
        return made

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

    async def expired(self, now_ms: int) -> AsyncGenerator[Header, None]:
        """Open transactions whose deadline is `now_ms` or earlier, oldest deadline first."""
        async for header in self._headers(IndexSpan(records.TXN_BY_DEADLINE, None, records.padded(now_ms + 1))):
            yield header

    async def open_headers(self, limit: int) -> list[Header]:
        """Open transactions by deadline."""
        return [header async for header in self._headers(IndexSpan(records.TXN_BY_DEADLINE), limit)]

    async def open_roots(self) -> AsyncIterator[TxnId]:
        """All open transactions, by deadline."""
        async for record in self.metadata.scan(IndexSpan(records.TXN_BY_DEADLINE), fresh=True):
            yield TxnId.parse(record.name)

    async def finished(self, until_ms: int) -> AsyncGenerator[Header, None]:
        """Finished transactions that ended at `until_ms` or earlier; by state, the oldest of each first."""
        for state in ("ABORTED", "COMMITTED"):
            span = IndexSpan(records.TXN_BY_FINAL_STATE, f"{state}:", f"{state}:{records.padded(until_ms + 1)}")
            async for header in self._headers(span):
                yield header

    async def _headers(self, span: IndexSpan, limit: int | None = None) -> AsyncIterator[Header]:
        async for record in self.metadata.scan(span, limit=limit, fresh=True):
            try:
                header = _header(record)
            except StoreMismatch as error:  # of another version, perhaps: the others have their deadlines nevertheless
                log.error("a transaction is left as it is: %s", error)
                continue
            yield header

    async def reserve_serials(self, coordinator: int, count: int) -> int:
        """Take a block of serials; the first of them. Raises VersionConflict if another broker took one at the same time, and
        after OutcomeUnknown a block may be lost. The first of all is 1, so that no transaction has an id of zeros. Raises
        StoreMismatch, before anything is written, if the record cannot be read or leaves no serials."""
        key = records.serial_key(coordinator)
        found = await self.metadata.get(key, fresh=True)
        first = 1 if found is None else max(1, records.decode_serials(key, found.value).next)
        if first + count - 1 > MAX_SERIAL:
            raise StoreMismatch(
                f"By the record {key} the transaction coordinator {coordinator} has used all ids below {first} and has none "
                "left; repair it, others go on."
            )
        value = records.encode(SerialBlock(next=first + count))
        await self.metadata.put(key, value, expected=ABSENT if found is None else found.version)
        return first

    # Ops.

    async def append_op(self, txn: TxnId, op: TxnOp) -> StoredOp:
        """After OutcomeUnknown there may be an op that nobody knows of; listings find it."""
        record = await self.metadata.append(
            records.op_prefix(txn), records.encode(op), partition=str(txn.root), index=records.op_index(txn, op)
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
        """Of every transaction."""
        start = records.acks_secondary(segment, subscription)
        found = await self._indexed(IndexSpan(records.ACKS_BY_SEGMENT_SUBSCRIPTION, f"{start}:", f"{start};"))
        return found + await self._indexed(IndexSpan.exactly(records.ACKS_BY_SEGMENT_SUBSCRIPTION, start))

    async def acks_of(self, segment: str, subscription: str, root: TxnId) -> list[StoredOp]:
        """Of one transaction and its sub-transactions; costs no more because of others."""
        secondary = records.acks_secondary_of(segment, subscription, root)
        return await self._indexed(IndexSpan.exactly(records.ACKS_BY_SEGMENT_SUBSCRIPTION, secondary))

    async def old_acks_of(self, segment: str, subscription: str, root: TxnId) -> list[StoredOp]:
        """Those of one transaction that were written by an earlier version, whose index entries do not name it."""
        secondary = records.acks_secondary(segment, subscription)
        found = await self._indexed(IndexSpan.exactly(records.ACKS_BY_SEGMENT_SUBSCRIPTION, secondary))
        return [op for op in found if op.txn.root == root]

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
        self.counters.queries.note(self._clock.monotonic() - began)
        return found

    # Sub-transactions.

    async def append_sub(self, root: TxnId) -> int:
        """A sub number that nobody else has."""
        record = await self.metadata.append(f"{records.subs_of(root)}/s", b"", partition=str(root))
        return int(record.name.rpartition("-")[2])

    async def subs(self, root: TxnId) -> set[int]:
        """The sub numbers that were handed out."""
        listed = self.metadata.names(Span(records.subs_of(root)), partition=str(root), fresh=True)
        return {int(name.rpartition("-")[2]) async for name in listed}

    async def delete_subs(self, root: TxnId) -> None:
        await self.metadata.delete_span(Span(records.subs_of(root)), partition=str(root))

    # Aborted transactions of a segment.

    async def put_aborted(
        self, segment: str, txn: TxnId, value: AbortedTxn, check_owner: Callable[[], Awaitable[None]] | None = None
    ) -> AbortedTxn:
        """What is recorded then: of one log the higher position counts, because an owner before or after this one may know of
        later entries. The record of another log of that name is replaced if `check_owner` lets it."""
        key, partition = records.aborted_key(segment, txn), str(txn.root)
        expected = ABSENT
        while True:
            try:
                await self.metadata.put(key, records.encode(value), expected=expected, partition=partition)
            except VersionConflict:
                found = await self.metadata.get(key, partition=partition, fresh=True)
            else:
                return value
            expected = ABSENT if found is None else found.version
            known = None if found is None else records.decode_aborted(found.key, found.value)
            if known is not None and known.incarnation == value.incarnation:
                if records.text_position(known.last) >= records.text_position(value.last):
                    return known
            elif known is not None and check_owner is not None:
                await check_owner()

    async def aborted_in(self, segment: str) -> AsyncIterator[tuple[TxnId, AbortedTxn]]:
        """One scan, fresh."""
        async for record in self.metadata.scan(Span(records.aborted_in(segment)), fresh=True):
            yield TxnId.parse(record.name), records.decode_aborted(record.key, record.value)

    async def delete_aborted(self, segment: str, txn: TxnId, wanted: Callable[[AbortedTxn], bool] | None = None) -> bool:
        """Delete the record, unless it is not the one that is `wanted`; True if it is not there any more."""
        key, partition = records.aborted_key(segment, txn), str(txn.root)
        while True:
            found = await self.metadata.get(key, partition=partition, fresh=True)
            if found is None:
                return True
            if wanted is not None and not wanted(records.decode_aborted(found.key, found.value)):
                return False
            try:
                await self.metadata.delete(key, expected=found.version, partition=partition)
            except VersionConflict:
                continue
            return True

    # Sinks. All reads are fresh: what they say is compared with headers, which live in other partitions.

    async def sink(self, name: str) -> Sink | None:
        found = await self.metadata.get(records.sink_key(name), fresh=True)
        return None if found is None else _sink(found)

    async def put_sink(self, name: str, value: SinkRecord, old: Sink | None) -> None:
        """Raises VersionConflict if it is no longer `old`."""
        await self.metadata.put(
            records.sink_key(name),
            records.encode(value),
            expected=ABSENT if old is None else old.version,
            index=records.sink_index(value),
        )

    async def delete_sink(self, old: Sink) -> None:
        """Raises VersionConflict if it is no longer `old`."""
        await self.metadata.delete(records.sink_key(old.name), expected=old.version)

    async def sinks(self, limit: int) -> list[Sink]:
        """By name."""
        return [each async for each in self._sinks(Span(records.SINKS), limit)]

    async def expired_sinks(self, now_ms: int) -> AsyncGenerator[Sink, None]:
        """Those that expire at `now_ms` or earlier, the oldest first."""
        async for sink in self._sinks(IndexSpan(records.SINKS_BY_EXPIRY, None, records.padded(now_ms + 1))):
            yield sink

    async def _sinks(self, span: Span | IndexSpan, limit: int | None = None) -> AsyncIterator[Sink]:
        async for record in self.metadata.scan(span, limit=limit, fresh=True):
            try:
                sink = _sink(record)
            except StoreMismatch as error:  # as with headers
                log.error("a sink is left as it is: %s", error)
                continue
            yield sink

    # Ends of topics and subscriptions.

    async def purge_subscription(self, segment: str, subscription: str, check_owner: Callable[[], Awaitable[None]]) -> None:
        """The subscription is gone, or was reset: so are the acknowledgments it would have got. `check_owner` is asked after
        they were listed, so that none of them is one that a later owner of the log accepted."""
        if ops := await self.acks_in(segment, subscription):
            await check_owner()
            await self._delete_all(ops)

    async def purge_segment(
        self, segment: str, living: Callable[[], Awaitable[str | None]], abort: Callable[[TxnId], Awaitable[None]]
    ) -> None:
        """The log is gone: its ops and its aborted records go too. There may be another one of that name already; `living` is
        asked for its incarnation after everything was listed, so that nothing of it is taken for old. Transactions whose
        writes are gone are given to `abort` first: they must not be committed by halves."""
        ops = [*await self.writes_in(segment), *await self.all_acks_in(segment)]
        aborted = [(txn, value.incarnation) async for txn, value in self.aborted_in(segment)]
        if ops or aborted:
            present = await living()
            for root in {op.txn.root: None for op in ops if op.op.kind == "write" and op.op.incarnation != present}:
                await abort(root)
            await self._delete_all([op for op in ops if op.op.incarnation != present])
            for txn, incarnation in aborted:
                if incarnation != present:
                    await self.delete_aborted(segment, txn, lambda record: record.incarnation != present)

    async def _delete_all(self, ops: Sequence[StoredOp]) -> None:
        for op in ops:
            await self.delete_op(op)


def _header(record: Record) -> Header:
    return Header(TxnId.parse(record.name), records.decode_header(record.key, record.value), record.version)


def _sink(record: Record) -> Sink:
    return Sink(decode_name(record.name), records.decode_sink(record.key, record.value), record.version)


def _op(record: Record) -> StoredOp:
    return StoredOp(record.key, record.version, records.op_txn(record.key), records.decode_op(record.key, record.value))
