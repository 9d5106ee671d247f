"""`Sinks`: which batch of a job is written, by which run, once.

A sink takes numbered batches. Each is held by a decider, one per (sink, batch, run); the sink's record names the decider that
was begun last, and what went before it is in the output for good. A new decider is installed by one compare-and-swap of that
record, only after the one before has an outcome and only if that outcome is not the same batch, committed. So no batch is
committed twice, whoever decides when, and no more than single-record writes are needed.

Owns the record: begin, look, fold, expiry, removal. Must not decide a batch (the coordinator does, asked by the job's driver)
nor know what is written under it. Every call can be repeated: whoever dies between the header of a new decider and the record
leaves a transaction that nobody knows, which its deadline ends.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from typing import Final
from weakref import WeakValueDictionary

import msgspec

from braid.errors import (
    Forbidden,
    InvalidArgument,
    InvalidTransactionStatus,
    OutcomeUnknown,
    RequestError,
    SinkFenced,
    SinkNotFound,
    StoreError,
    StoreUnavailable,
    VersionConflict,
)
from braid.metadata.names import MAX_NAME, encode_name
from braid.model.txn import TxnId
from braid.runtime.clock import Clock
from braid.txn.config import TransactionConfig
from braid.txn.coordinator import TransactionCoordinator
from braid.txn.records import SinkBatch, SinkCurrent, SinkRecord
from braid.txn.store import Header, Sink, TransactionStore

log = logging.getLogger(__name__)
ATTEMPTS: Final = 20
"""Re-reads of one change before it is given up."""
MAX_RETIRED: Final = 64
"""Retired runs a sink remembers. One that is forgotten can take the sink again, never write a batch twice."""
MAX_RUN: Final = 256
"""Characters of a run's name."""
MAX_BATCH: Final = (1 << 63) - 1


class SinkView(msgspec.Struct, frozen=True):
    """A sink's record and the header of its current decider, as they were at one moment."""

    sink: Sink
    header: Header | None
    """None: there is no current one, or it was aborted so long ago that it is forgotten."""

    @property
    def last(self) -> int | None:
        """The highest batch that is certainly in the output."""
        return self._settled.last

    @property
    def last_run(self) -> str | None:
        """The run that wrote it."""
        return self._settled.last_run

    @property
    def _settled(self) -> SinkRecord:
        value = self.sink.value
        return _folded(value) if self.header is not None and self.header.value.state == "COMMITTED" else value

    @property
    def open(self) -> SinkCurrent | None:
        """The batch that is under way."""
        return self.sink.value.current if self.header is not None and self.header.value.is_open else None


class _Step(msgspec.Struct, frozen=True):
    """What comes next in a begin."""

    record: SinkRecord | None = None
    """To be written; None: there is an answer."""
    is_install: bool = False
    """A new decider belongs into it, and is the answer then."""
    txn: TxnId | None = None
    """The answer; None: the batch is in the output."""


class Sinks:
    """One per broker."""

    def __init__(
        self, store: TransactionStore, coordinator: TransactionCoordinator, clock: Clock, config: TransactionConfig
    ) -> None:
        self._store = store
        self._coordinator = coordinator
        self._clock = clock
        self._config = config
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """So that the tasks of a job, which all begin the same batch, do not each make a decider; the record decides."""

    # Begin.

    async def begin(self, wanted: SinkBatch, timeout_ms: int, *, owner: str | None = None) -> TxnId | None:
        """The decider of a batch; None if the batch is in the output already.

        Raises SinkFenced if a later run has the sink, InvalidTransactionStatus if the run's own batch was aborted or the one
        before is not decided, Forbidden if the sink is another principal's."""
        check_batch(wanted)
        turn = self._turns.get(wanted.sink)
        if turn is None:
            turn = self._turns[wanted.sink] = asyncio.Lock()
        async with turn:
            return await self._begin(wanted, timeout_ms, owner)

    async def _begin(self, wanted: SinkBatch, timeout_ms: int, owner: str | None) -> TxnId | None:
        made: TxnId | None = None
        for _attempt in range(ATTEMPTS):
            found = await self._store.sink(wanted.sink)
            try:
                step = await self._step(found, wanted, owner)
            except RequestError:
                await self._drop(made)
                raise
            if step is None:
                continue
            record = step.record
            if record is None:
                if made != step.txn:
                    await self._drop(made)
                return step.txn
            if step.is_install:
                if made is None:
                    made = await self._new(wanted, timeout_ms, owner)
                record = msgspec.structs.replace(record, current=SinkCurrent(batch=wanted.batch, txn=str(made)))
            try:
                await self._store.put_sink(wanted.sink, record, found)
            except (VersionConflict, OutcomeUnknown):
                # Somebody else was faster, or nobody knows: the record tells. What was made is kept, because its write may
                # still come to pass; it is dropped when the record has moved on without it.
                continue
            if step.is_install:
                return made
        raise StoreUnavailable(
            f"Batch {wanted.batch} of the sink {wanted.sink} could not be begun in {ATTEMPTS} attempts; try again."
        )

    async def _step(self, found: Sink | None, wanted: SinkBatch, owner: str | None) -> _Step | None:
        """None: what was read is old."""
        if found is None:
            first = SinkRecord(run=wanted.run, owner=owner, expires_ms=self._expiry())
            return _Step(record=first, is_install=True)
        value, current = found.value, found.value.current
        if owner is not None and value.owner not in (None, owner):
            raise Forbidden(f"The sink {wanted.sink} is another role's; give this job a sink of its own.")
        if value.last is not None and value.last >= wanted.batch:
            return _Step()
        if current is not None and current.batch > wanted.batch:
            return _Step()  # a run begins a batch only when the one before it is in the output
        if wanted.run in value.retired_runs:
            raise SinkFenced(
                f"The run {wanted.run} has lost the sink {wanted.sink} to the run {value.run}, which was started later;"
                f" its batch {wanted.batch} is not written. Stop one of the two jobs."
            )
        if current is None:
            return _Step(record=self._adopted(value, wanted.run), is_install=True)
        return await self._after(found, current, wanted)

    async def _after(self, found: Sink, current: SinkCurrent, wanted: SinkBatch) -> _Step | None:
        """What comes next where a batch was begun before: this one or a lower one, by this run or another one."""
        root, is_own = TxnId.parse(current.txn), found.value.run == wanted.run
        header = await self._store.header(root, fresh=True)
        if is_own and current.batch == wanted.batch:
            if header is not None and header.value.is_open:
                return _Step(txn=root)
            if header is not None and header.value.state == "COMMITTED":
                return _Step()
            if header is None and not await self._is_still(found):
                return None  # it was folded and collected meanwhile
            raise InvalidTransactionStatus(
                f"Batch {wanted.batch} of the sink {wanted.sink} was aborted in this run (transaction {root}, perhaps by its"
                " deadline) and cannot be written by it any more; start the job again."
            )
        if is_own and header is not None and header.value.is_open:
            raise InvalidTransactionStatus(
                f"Batch {current.batch} of the sink {wanted.sink} is not decided yet (transaction {root}), so that batch"
                f" {wanted.batch} cannot be begun in the same run; decide or abort it first."
            )
        if header is not None and header.value.is_open:
            header = await self._coordinator.outcome(root)
        if header is None or header.value.state != "COMMITTED":
            # It was aborted. If it is gone because it was folded and collected, the record has changed and the write fails.
            return _Step(record=self._adopted(found.value, wanted.run), is_install=True)
        folded = self._adopted(_folded(found.value), wanted.run)
        return _Step(record=folded, is_install=current.batch < wanted.batch)

    async def _new(self, wanted: SinkBatch, timeout_ms: int, owner: str | None) -> TxnId:
        coordinator = zlib.crc32(wanted.sink.encode()) % self._config.coordinators
        return await self._coordinator.new(coordinator, timeout_ms, owner=owner, is_decider=True, batch=wanted)

    async def _drop(self, made: TxnId | None) -> None:
        """A decider that was not installed and cannot be any more."""
        if made is None:
            return
        try:
            await self._coordinator.give_up(made)
        except StoreError as error:
            log.info("the transaction %s, which nobody uses, is left to its deadline: %s", made, error)

    def _adopted(self, value: SinkRecord, run: str) -> SinkRecord:
        """The record without a current batch, as this run's."""
        if value.run != run:
            retired = (*value.retired_runs, value.run)[-MAX_RETIRED:]
            value = msgspec.structs.replace(value, run=run, run_epoch=value.run_epoch + 1, retired_runs=retired)
        return msgspec.structs.replace(value, current=None, expires_ms=self._expiry())

    def _expiry(self) -> int:
        return self._clock.now_ms() + int(self._config.sink_retention_seconds * 1000)

    # Look.

    async def look(self, name: str) -> SinkView | None:
        """How a sink stands; None if nothing is known of it."""
        if not _is_name(name):
            return None
        for _attempt in range(ATTEMPTS):
            found = await self._store.sink(name)
            if found is None:
                return None
            view = await self.view(found)
            if view.header is not None or found.value.current is None or await self._is_still(found):
                return view
        raise StoreUnavailable(f"The sink {name} was changed by others {ATTEMPTS} times; try again.")

    async def view(self, found: Sink) -> SinkView:
        """The same for a record that was read just now; one that was folded and collected since looks as if it were aborted."""
        current = found.value.current
        header = None if current is None else await self._store.header(TxnId.parse(current.txn), fresh=True)
        return SinkView(found, header)

    async def _is_still(self, found: Sink) -> bool:
        now = await self._store.sink(found.name)
        return now is not None and now == found

    # Collection.

    async def fold(self, header: Header) -> None:
        """Note in the sink that this batch is in the output: the header that says so is about to be deleted. Raises StoreError
        if that is not certain."""
        batch, name = header.value.batch, header.value.sink
        if name is None or batch is None or header.value.state != "COMMITTED":
            return
        for _attempt in range(ATTEMPTS):
            found = await self._store.sink(name)
            if found is None or found.value.current is None or found.value.current.txn != str(header.root):
                return  # folded before, or forgotten
            folded = msgspec.structs.replace(_folded(found.value), current=None)
            try:
                await self._store.put_sink(name, folded, found)
            except (VersionConflict, OutcomeUnknown):
                continue
            return
        raise StoreUnavailable(f"Batch {batch} of the sink {name} could not be noted in {ATTEMPTS} attempts.")

    async def expire(self, found: Sink) -> bool:
        """Forget a sink whose time has come, unless something is under way or it was used since it was read."""
        view = await self.view(found)
        try:
            if view.open is not None:
                await self._store.put_sink(found.name, msgspec.structs.replace(found.value, expires_ms=self._expiry()), found)
                return False
            await self._store.delete_sink(found)
        except VersionConflict:
            return False
        return True

    async def delete(self, name: str) -> None:
        """Forget a sink; a batch that is under way is aborted. What is written to it from then on is written, also if it was
        written before. Raises SinkNotFound."""
        was_there = False
        for _attempt in range(ATTEMPTS):
            found = await self._store.sink(name) if _is_name(name) else None
            if found is None:
                if was_there:
                    return
                raise unknown(name)
            was_there = True
            if found.value.current is not None:
                await self._coordinator.outcome(TxnId.parse(found.value.current.txn))
            try:
                await self._store.delete_sink(found)
            except (VersionConflict, OutcomeUnknown):
                continue
            return
        raise StoreUnavailable(f"The sink {name} was changed by others {ATTEMPTS} times; try again.")


def check_batch(wanted: SinkBatch) -> None:
    """Raise InvalidArgument for names and numbers that no sink can have."""
    if not _is_name(wanted.sink):
        raise InvalidArgument(f"{wanted.sink[:100]!r} cannot name a sink; give 1 to {MAX_NAME} bytes of text.")
    if not wanted.run or len(wanted.run) > MAX_RUN:
        raise InvalidArgument(f"{wanted.run[:100]!r} cannot name a run; give 1 to {MAX_RUN} characters.")
    if not 0 <= wanted.batch <= MAX_BATCH:
        raise InvalidArgument(f"{wanted.batch} cannot be a batch of a sink; they are numbered from 0 to {MAX_BATCH}.")


def unknown(name: str) -> SinkNotFound:
    return SinkNotFound(
        f"The sink {name[:200]} does not exist; one that is not used is forgotten (transactions.sink_retention_seconds)."
    )


def _is_name(sink: str) -> bool:
    return bool(sink) and len(encode_name(sink).encode()) <= MAX_NAME


def _folded(value: SinkRecord) -> SinkRecord:
    """The record when its current batch is in the output."""
    if value.current is None or (value.last is not None and value.last >= value.current.batch):
        return value
    return msgspec.structs.replace(value, last=value.current.batch, last_run=value.run)
