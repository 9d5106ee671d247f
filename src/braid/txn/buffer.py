"""`MetadataTransactionBuffer`: the transactional writes of one log, from the first op record to the outcome.

Owns the order of a write (op, header, append: INV10, INV11), what may be read (INV13, in `visibility.py`), what becomes of the
writes of a decided transaction (INV12) and what a new owner of the log makes of the records it finds. Nothing is written into
the log, and nothing is read from it. Must not know producers, dispatchers or managed ledgers; the log is an `AppendLog`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

from braid.errors import BraidError, LedgerFenced, StoreError, TransactionConflict
from braid.model.positions import Position
from braid.model.txn import TxnId
from braid.runtime.clock import Clock
from braid.runtime.plans import step
from braid.runtime.tasks import Tasks
from braid.txn import records
from braid.txn.api import AppendLog, HeldTransaction
from braid.txn.decisions import Decisions
from braid.txn.held_writes import Appended, HeldWrites, WritePermit
from braid.txn.records import AbortedTxn, TxnHeader, TxnOp
from braid.txn.store import Header, StoredOp, TransactionStore
from braid.txn.visibility import Visibility

log = logging.getLogger(__name__)
RETRY_SECONDS = 0.1
MAX_RETRY_SECONDS = 5.0
HEADERS_AT_ONCE = 64
"""Headers that are read at the same time while a log is loaded."""
RECOVERED_AT_ONCE = 512
"""Ops that are taken over without a pause."""


class MetadataTransactionBuffer:
    """One per loaded log: `topic.transactions`."""

    def __init__(
        self,
        segment: str,
        owned: AppendLog,
        store: TransactionStore,
        decisions: Decisions,
        clock: Clock,
        tasks: Tasks,
        on_readable: Callable[[], None],
    ) -> None:
        self._segment = segment
        self._log = owned
        self._store = store
        self._decisions = decisions
        self._clock = clock
        self._tasks = tasks
        self._on_readable = on_readable
        """More may be read than before."""
        self._held: dict[TxnId, HeldWrites] = {}
        self.is_closed = False
        """Nobody serves this log here any more."""
        self.visibility = Visibility()
        self.in_flight = 0
        """Entries of any transaction on their way: 0, and added entries need no look."""
        self._is_recovering = False

    # What others see.

    @property
    def max_read_position(self) -> Position:
        """Nothing after it may be read; LATEST if no transaction holds anything back."""
        return self.visibility.max_read_position

    @property
    def hides(self) -> bool:
        """Whether some entries may not be read; False, and nobody needs to look at any."""
        return self.visibility.hides

    def is_aborted(self, txn: tuple[int, int]) -> bool:
        """Whether entries of this transaction (sub number included) are hidden. Answered from memory."""
        return txn in self.visibility.aborted

    def is_undecided(self, txn: tuple[int, int]) -> bool:
        """Whether entries of this transaction wait for its outcome."""
        return self.visibility.pinned(TxnId(*txn).root) is not None

    def open_transactions(self) -> list[HeldTransaction]:
        """Undecided transactions with writes here, the longest held first."""
        return [
            HeldTransaction(
                txn=held.root,
                since_ms=held.since_ms,
                writes=sum(writes.entries for writes in held.writes.values()),
                position=str(self.visibility.pinned(held.root) or ""),
            )
            for held in self._held.values()
            if not held.is_decided and any(writes.entries or writes.is_vague for writes in held.writes.values())
        ]

    @property
    def undecided(self) -> int:
        """Undecided transactions with ops here, whether or not there are entries under them: without the log they would be
        aborted."""
        return sum(not held.is_decided for held in self._held.values())

    # Writing.

    async def authorise(self, txn: TxnId, entries: int) -> WritePermit:
        """Ask for so many entries: write the op, then read the header; only an open transaction gets the permit. Hand it to
        `appended` after the appends. Raises TransactionConflict; a StoreError if nothing is known, and then nothing may be
        appended either."""
        held = self._hold(txn.root)
        held.in_flight += entries
        self.in_flight += entries
        op: StoredOp | None = None
        try:
            async with step("txn-write:op"):
                op = await self._append_op(held, txn, entries)
            async with step("txn-write:header"):
                header = _open_header(txn, await self._store.header(txn.root))
        except BraidError:
            if op is not None:
                await self._delete_op(held, op)
            self._landed(held, entries)
            self._settle(held)
            raise
        held.since_ms = header.value.created_ms
        held.covered(op)
        return WritePermit(txn, entries, op)

    async def _append_op(self, held: HeldWrites, txn: TxnId, entries: int) -> StoredOp:
        op = TxnOp(
            kind="write",
            segment=self._segment,
            position=records.position_text(self._log.last_position),
            incarnation=self._log.incarnation,
            entries=entries,
        )
        try:
            stored = await self._store.append_op(txn, op)
        except StoreError:
            held.misses_ops = True
            _open_header(txn, await self._store.header(txn.root))  # a clear refusal is better than none
            raise
        held.ops[stored.key] = stored
        return stored

    async def appended(self, permit: WritePermit, count: int) -> None:
        """So many of the permitted entries were handed to the log; the others never will be."""
        held = self._hold(permit.txn.root)
        if not count:
            await self._delete_op(held, permit.op)
        self._landed(held, permit.entries - count)
        self._settle(held)

    def added(self, entries: Iterable[Appended]) -> None:
        """These entries are durable, in log order. Call it before anybody is told that they can be read."""
        touched: dict[TxnId, HeldWrites] = {}
        for entry in entries:
            if entry.txn is None:
                continue
            txn, position = TxnId(*entry.txn), Position(entry.ledger_id, entry.entry_id)
            held = touched[txn.root] = self._hold(txn.root)
            writes = held.writes[txn]
            writes.entries += 1
            writes.last = position
            if self.visibility.pinned(txn.root) is None:
                self.visibility.pin(txn.root, self._log.position_before(position))
            self._landed(held, 1)
        for held in touched.values():
            self._settle(held)

    def failed(self, txns: Sequence[TxnId]) -> None:
        """Entries of these transactions, one each, were not stored, or nobody knows: then they are waited for behind the floor,
        because they may show up when the log learns its end."""
        for txn in txns:
            held = self._hold(txn.root)
            if self._log.is_in_doubt:
                writes = held.writes[txn]
                writes.is_vague = True
                self.visibility.pin(txn.root, writes.floor)
            self._landed(held, 1)
        for root in {txn.root: None for txn in txns}:
            self._settle(self._hold(root))

    def _landed(self, held: HeldWrites, entries: int) -> None:
        held.in_flight -= entries
        self.in_flight -= entries

    async def _delete_op(self, held: HeldWrites, op: StoredOp) -> None:
        """Nothing was appended under this op. If it cannot be deleted now, that is done with the root's other ops."""
        held.ops[op.key] = op
        try:
            await self._store.delete_op(op)
        except BraidError as error:
            log.info("%s: the op %s is deleted later: %s", self._segment, op.key, error)
        else:
            held.ops.pop(op.key, None)

    # Outcomes.

    def _hold(self, root: TxnId) -> HeldWrites:
        held = self._held.get(root)
        if held is None:
            held = self._held[root] = HeldWrites(root, self._clock.now_ms())
            if not self.is_closed:
                self._decisions.hold(root, self._decided)
        return held

    def _drop(self, held: HeldWrites) -> None:
        if self._held.get(held.root) is held:
            del self._held[held.root]
            self.visibility.unpin(held.root)
            self._decisions.release(held.root, self._decided)

    def _decided(self, root: TxnId, header: TxnHeader | None) -> None:
        held = self._held.get(root)
        if held is not None and not held.is_decided:
            held.is_decided = True
            held.header = header
            self._settle(held)

    def _settle(self, held: HeldWrites) -> None:
        """Go on with a root if nothing of it is in flight: materialise it if it is decided, forget it if nothing is left."""
        if held.in_flight or self.is_closed or self._is_recovering:
            return
        if held.is_decided:
            if not self._is_unexplained(held):
                self._apply(held)
            if not held.is_finishing:
                held.is_finishing = True
                self._tasks.spawn(self._finish(held), f"materialise {held.root}")
        elif not (held.ops or held.misses_ops):  # so that nothing was appended either
            self._drop(held)

    def _is_unexplained(self, held: HeldWrites) -> bool:
        """Entries are held back whose header is gone. Headers go after the ops of every owner: most likely a later owner has
        dealt with these, and only it knows the outcome. They stay held back until it is certain that there is none."""
        return held.header is None and self.visibility.pinned(held.root) is not None

    def _apply(self, held: HeldWrites) -> None:
        """Show or hide the entries of a decided root, in memory."""
        if held.header is None and any(writes.entries for writes in held.writes.values()):
            log.error(
                "%s: the header of %s is gone, but it has entries here; they count as committed", self._segment, held.root
            )
        for txn, writes in held.writes.items():
            if held.aborts(txn) and (writes.last is not None or writes.is_vague) and not self.is_aborted(txn):
                self.visibility.abort(txn, None)
        if self.visibility.pinned(held.root) is not None:
            self.visibility.unpin(held.root)
            self._on_readable()

    async def _finish(self, held: HeldWrites) -> None:
        """Make the outcome durable, then delete the ops; again and again until it is done or the log is not ours any more."""
        delay = RETRY_SECONDS
        while True:
            try:
                if not (self._log.is_in_doubt and any(writes.is_vague for writes in held.writes.values())):
                    await self._finish_once(held)
                    if not (held.ops or held.misses_ops):  # others may have been found meanwhile
                        break
            except LedgerFenced:
                return  # the next owner goes on with it
            except BraidError as error:
                log.warning("%s: the outcome of %s is not written down yet: %s", self._segment, held.root, error)
            await self._clock.sleep(delay)
            delay = min(2 * delay, MAX_RETRY_SECONDS)
        held.is_finishing = False
        if not held.in_flight:
            self._drop(held)

    async def _finish_once(self, held: HeldWrites) -> None:
        if self._is_unexplained(held):
            await self._log.check_owner()
            self._apply(held)
        aborted = self.visibility.aborted
        hidden = {txn: writes for txn, writes in held.writes.items() if txn in aborted and aborted[txn] is None}
        if hidden:
            async with step("txn-materialise:aborted"):
                for txn, writes in hidden.items():
                    last = self._log.last_position if writes.is_vague or writes.last is None else writes.last
                    value = AbortedTxn(last=records.position_text(last), incarnation=self._log.incarnation)
                    stored = await self._store.put_aborted(self._segment, txn, value, self._log.check_owner)
                    self.visibility.abort(txn, records.text_position(stored.last))
        async with step("txn-materialise:delete-ops"):
            if held.misses_ops:
                found = [op for op in await self._store.ops(held.root) if self._is_mine(op.op)]
                await self._log.check_owner()  # the ops of a later owner cover entries that this one does not know
                held.ops.update((op.key, op) for op in found)
                held.misses_ops = False
            for op in list(held.ops.values()):
                await self._store.delete_op(op)
                held.ops.pop(op.key, None)

    def _is_mine(self, op: TxnOp) -> bool:
        return op.kind == "write" and op.segment == self._segment and op.incarnation == self._log.incarnation

    # Recovery, trimming, the end.

    async def recover(self) -> None:
        """Take over what earlier owners left. The log is claimed and fenced (INV2); nobody is served before this returns.

        Ops are listed first and aborted records last: what has no op any more has its record, and what has no header any more
        has neither op nor anything to hide that has no record.
        """
        ops = await self._store.writes_in(self._segment)
        headers = await self._headers(list({op.txn.root: None for op in ops if self._is_mine(op.op)}))
        stale: list[TxnId] = []
        async for txn, value in self._store.aborted_in(self._segment):
            if value.incarnation == self._log.incarnation:
                self.visibility.abort(txn, records.text_position(value.last))
            else:
                stale.append(txn)
        if ops or stale:
            await self._log.check_owner()  # else a later owner's ops might be among them
        useless: list[StoredOp] = []
        self._is_recovering = True  # an outcome that comes meanwhile waits until all ops of its transaction are known
        try:
            for number, op in enumerate(ops, 1):
                if number % RECOVERED_AT_ONCE == 0:
                    await asyncio.sleep(0)
                header = headers.get(op.txn.root) if self._is_mine(op.op) else None
                if header is None:
                    useless.append(op)
                else:
                    self._recovered(op, header)
        finally:
            self._is_recovering = False
        for held in list(self._held.values()):
            self._settle(held)
        if useless or stale:
            self._tasks.spawn(self._clean_up(useless, stale), "leftovers of transactions")
        self.prune()

    async def _headers(self, roots: Sequence[TxnId]) -> dict[TxnId, Header | None]:
        found: dict[TxnId, Header | None] = {}
        failures: list[BraidError] = []

        async def read(root: TxnId) -> None:
            try:
                found[root] = await self._store.header_of_ops(root)
            except BraidError as error:
                failures.append(error)

        for start in range(0, len(roots), HEADERS_AT_ONCE):
            async with asyncio.TaskGroup() as group:
                for root in roots[start : start + HEADERS_AT_ONCE]:
                    group.create_task(read(root))
            if failures:
                raise failures[0]
        return found

    def _recovered(self, op: StoredOp, header: Header) -> None:
        held = self._hold(op.txn.root)
        held.since_ms = header.value.created_ms
        held.ops[op.key] = op
        writes = held.covered(op)
        writes.is_vague = writes.floor < self._log.last_position  # else there is nothing after its floor
        if not header.value.is_open:
            held.is_decided, held.header = True, header.value
            known = self.visibility.aborted.get(op.txn)
            if known is not None and writes.is_vague and held.aborts(op.txn):
                # Recorded by somebody who may not have known the entries of this op: it must reach as far as they can.
                self.visibility.abort(op.txn, None)
        elif writes.is_vague:
            self.visibility.pin(op.txn.root, writes.floor)

    async def _clean_up(self, ops: Sequence[StoredOp], aborted: Sequence[TxnId]) -> None:
        """Remove what says nothing: ops without header or of an earlier log, aborted records of an earlier log."""
        try:
            for op in ops:
                await self._store.delete_op(op)
            for txn in aborted:
                await self._store.delete_aborted(self._segment, txn, lambda record: record.incarnation != self._log.incarnation)
        except BraidError as error:
            log.info("%s: leftovers of transactions are removed when it is loaded again: %s", self._segment, error)

    async def relist(self) -> None:
        """Look for ops that nobody here knows of (an append that was given up, an owner before this one that was late) and
        materialise them. No entry can be under them."""
        found = [op for op in await self._store.writes_in(self._segment) if op.key not in self._known(op.txn.root)]
        if not found:
            return
        await self._log.check_owner()
        headers = await self._headers(list({op.txn.root: None for op in found}))
        unheld: list[StoredOp] = []
        for op in found:
            held = self._held.get(op.txn.root)
            header = headers[op.txn.root]
            if not self._is_mine(op.op) or (header is None and held is None):
                unheld.append(op)
            elif held is not None and held.in_flight:
                held.misses_ops = True  # it may be the op of that write
            elif header is not None:
                held = self._hold(op.txn.root)
                held.ops[op.key] = op
                if not (header.value.is_open or held.is_decided):
                    held.is_decided, held.header = True, header.value
                self._settle(held)
        await self._clean_up(unheld, ())

    def _known(self, root: TxnId) -> dict[str, StoredOp]:
        held = self._held.get(root)
        return {} if held is None else held.ops

    def prune(self) -> None:
        """The log may have been trimmed: forget the aborted transactions of which nothing is left."""
        if self.visibility.aborted and not self.is_closed:
            gone = [txn for txn in self.visibility.prunable(self._log.first_position) if txn.root not in self._held]
            if gone:
                self._tasks.spawn(self._prune(gone), "prune aborted transactions")

    async def _prune(self, gone: Sequence[TxnId]) -> None:
        first = self._log.first_position
        try:
            for txn in gone:
                if await self._store.delete_aborted(self._segment, txn, lambda at: records.text_position(at.last) < first):
                    self.visibility.forget(txn)
        except BraidError as error:
            log.info("%s: aborted transactions are pruned after the next trim: %s", self._segment, error)

    def close(self) -> None:
        """Let go; what is not materialised is the next owner's. Idempotent."""
        self.is_closed = True
        for root in self._held:
            self._decisions.release(root, self._decided)


def _open_header(txn: TxnId, header: Header | None) -> Header:
    if header is None or (txn.sub and not header.value.is_decider):
        raise TransactionConflict(
            f"The transaction {txn} does not exist: it ended some time ago or was never begun; begin a new one."
        )
    if not header.value.is_open:
        raise TransactionConflict(
            f"The transaction {txn} is {header.value.state.lower()} and takes nothing more; begin a new one."
        )
    return header
