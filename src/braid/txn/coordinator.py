"""`TransactionCoordinator`: begins transactions and decides them, each by one write to one header (PIP-473).

Owns the state machine of headers (only OPEN becomes COMMITTED or ABORTED, once), the numbers of transactions and their
limits. Every broker has one and any of them can serve any coordinator partition: the compare-and-swap decides, leading a
partition is a matter of where clients go. Must not call, list or wait for participants: they learn the outcome from the header.

An unknown outcome of a write is settled by reading the header again, so each call can be repeated by whoever missed its answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

import msgspec

from braid.errors import (
    InvalidArgument,
    InvalidTransactionStatus,
    NotAllowed,
    OutcomeUnknown,
    Overloaded,
    StoreError,
    StoreUnavailable,
    TransactionCoordinatorNotFound,
    TransactionNotFound,
    VersionConflict,
)
from braid.model.txn import MAX_SUB, TxnId
from braid.runtime.clock import Clock
from braid.txn.config import TransactionConfig
from braid.txn.records import SinkBatch, State, TxnHeader
from braid.txn.store import Header, StoredOp, TransactionStore

BLOCK: Final = 10_000
"""Serials that one broker reserves at a time."""
ATTEMPTS: Final = 20
"""Re-reads of one change before it is given up."""
RECOUNT_SECONDS: Final = 1.0
"""Between two counts of open transactions, when a coordinator is full as far as this broker knows."""


class TransactionCoordinator:
    """One per broker."""

    def __init__(self, store: TransactionStore, clock: Clock, config: TransactionConfig) -> None:
        self._store = store
        self._clock = clock
        self._config = config
        self._serials: dict[int, _Serials] = {}
        self._open: dict[int, dict[TxnId, None]] = {}
        self._beginning: dict[int, int] = {}
        """Calls of `new` under way, which take room too."""
        self._counting = asyncio.Lock()
        self._counted_at: float | None = None
        self._begun: dict[TxnId, None] = {}
        """Since the last count of open transactions began, as `_ended`."""
        self._ended: dict[TxnId, None] = {}

    @property
    def open_counts(self) -> dict[int, int]:
        """Open transactions by coordinator, as this broker knows them: those of the last `recount`, what it began since, less
        what it ended since."""
        return {number: len(self._open.get(number, ())) for number in range(self._config.coordinators)}

    # Life of a transaction.

    async def new(
        self,
        coordinator: int,
        timeout_ms: int,
        *,
        owner: str | None,
        is_decider: bool = False,
        batch: SinkBatch | None = None,
    ) -> TxnId:
        """Begin one, with one write; `batch` is what a decider of a sink holds. Raises TransactionCoordinatorNotFound,
        NotAllowed (timeout out of bounds), Overloaded."""
        if not 0 <= coordinator < self._config.coordinators:
            raise TransactionCoordinatorNotFound(
                f"There is no transaction coordinator {coordinator}; they are 0 to {self._config.coordinators - 1}."
            )
        self._check_timeout(timeout_ms)
        await self._admit(coordinator)
        self._beginning[coordinator] = self._beginning.get(coordinator, 0) + 1
        try:
            return await self._begin(coordinator, timeout_ms, owner, is_decider, batch)
        finally:
            self._beginning[coordinator] -= 1

    async def _begin(
        self, coordinator: int, timeout_ms: int, owner: str | None, is_decider: bool, batch: SinkBatch | None
    ) -> TxnId:
        serials = self._serials.get(coordinator)
        if serials is None:
            serials = self._serials[coordinator] = _Serials(self._store, coordinator)
        for _attempt in range(ATTEMPTS):
            root = TxnId.of(coordinator, await serials.take())
            now = self._clock.now_ms()
            header = TxnHeader(state="OPEN", timeout_ms=now + timeout_ms, created_ms=now, owner=owner, is_decider=is_decider)
            if batch is not None:
                header = msgspec.structs.replace(header, sink=batch.sink, batch=batch.batch, run=batch.run)
            if await self._create(root, header):
                self._note_begun(root)
                return root
            # If it comes into being after all, its deadline ends it.
        raise StoreUnavailable(f"No transaction could be begun in {ATTEMPTS} attempts; try again.")

    async def _create(self, root: TxnId, header: TxnHeader) -> bool:
        try:
            await self._store.create_header(root, header)
        except VersionConflict:
            return False
        except OutcomeUnknown:
            return await self._store.header(root, fresh=True) is not None
        return True

    async def end(self, txn: TxnId, *, commit: bool, principal: str | None = None, is_super: bool = True) -> None:
        """Decide, with one write. Of a decider, `commit` names no winners. Idempotent. Raises TransactionNotFound (also for a
        foreign one), InvalidTransactionStatus if it was decided otherwise, NotAllowed for a sub-transaction."""
        await self._finish(txn, "COMMITTED" if commit else "ABORTED", None, principal, is_super)

    async def give_up(self, root: TxnId) -> None:
        """Abort it unless it is decided."""
        try:
            await self.end(root, commit=False)
        except (TransactionNotFound, InvalidTransactionStatus):
            return

    async def outcome(self, root: TxnId) -> Header | None:
        """Abort it unless it is decided, and tell what became of it; None: its record was collected."""
        header = await self._store.header(root, fresh=True)
        if header is None or not header.value.is_open:
            return header
        await self.give_up(root)
        return await self._store.header(root, fresh=True)

    async def check(self, txn: TxnId, principal: str | None, *, is_super: bool = False) -> None:
        """That the caller may work in it and that it is open. Nothing is written: participants write down what they do."""
        header = await self._existing(txn, principal, is_super)
        if not header.value.is_open:
            raise InvalidTransactionStatus(f"The transaction {txn} is {header.value.state}; begin another one.")

    async def describe(self, root: TxnId, *, limit: int | None = None) -> tuple[Header, list[StoredOp]]:
        """The header, and what was begun and is not yet materialised. Raises TransactionNotFound."""
        header = await self._store.header(root.root, fresh=True)
        if header is None:
            raise self._unknown(root)
        return header, await self._store.ops(root.root, limit)

    async def expire(self, header: Header) -> bool:
        """Abort one whose deadline has passed, unless it was decided or renewed since it was read."""
        try:
            await self._store.swap_header(header, self._final(header.value, "ABORTED", ()))
        except VersionConflict:
            return False
        self._store.counters.timed_out_one(header.root)
        self._note_ended(header.root)
        return True

    # Sub-transactions of a decider.

    async def new_sub(self, root: TxnId, *, principal: str | None = None, is_super: bool = True) -> TxnId:
        """A sub-transaction that nobody else has. Raises as `end` does, and NotAllowed for what is no decider."""
        header = await self._existing(root, principal, is_super)
        self._check_root(root, "have sub-transactions")
        self._check_decider(header, "have sub-transactions")
        sub = await self._append_sub(root)
        # After the number is written down: what is collected meanwhile would not find it.
        found = await self._store.header(root, fresh=True)
        if found is None or not found.value.is_open:
            await self._store.delete_subs(root)
            if found is None:
                raise self._unknown(root)
            raise InvalidTransactionStatus(f"The transaction {root} is {found.value.state}; it gets no sub-transactions.")
        if sub > MAX_SUB:
            raise NotAllowed(f"The transaction {root} has {MAX_SUB} sub-transactions already, the most there can be.")
        return root.with_sub(sub)

    async def _append_sub(self, root: TxnId) -> int:
        for _attempt in range(ATTEMPTS):
            try:
                return await self._store.append_sub(root)
            except OutcomeUnknown:
                continue  # a number may be lost: a sub-transaction that nobody uses
        raise StoreUnavailable(f"No sub-transaction of {root} could be begun in {ATTEMPTS} attempts; try again.")

    async def decide(self, root: TxnId, winners: Iterable[int], *, principal: str | None = None, is_super: bool = True) -> None:
        """Commit a decider and these of its sub-transactions, and abort the others, with one write. Idempotent."""
        chosen = tuple(sorted(set(winners)))
        if chosen and not 1 <= chosen[0] <= chosen[-1] <= MAX_SUB:
            wrong = chosen[0] if chosen[0] < 1 else chosen[-1]
            raise InvalidArgument(f"{wrong} is no sub-transaction; winners are numbers from 1 to {MAX_SUB}.")
        await self._finish(root, "COMMITTED", chosen, principal, is_super)

    async def _check_winners(self, root: TxnId, winners: tuple[int, ...]) -> None:
        """A number that nobody has would let all real attempts lose, for ever."""
        if winners and (strangers := set(winners) - await self._store.subs(root)):
            raise InvalidArgument(f"The transaction {root} has no sub-transaction {min(strangers)}; it was not decided.")

    async def renew(self, root: TxnId, timeout_ms: int, *, principal: str | None = None, is_super: bool = True) -> None:
        """Let a decider live for so long from now, at least. Never brings its deadline forward."""
        self._check_timeout(timeout_ms)
        header = await self._existing(root, principal, is_super)
        self._check_root(root, "be renewed")
        self._check_decider(header, "be renewed")
        deadline = self._clock.now_ms() + timeout_ms
        for _attempt in range(ATTEMPTS):
            if not header.value.is_open:
                raise InvalidTransactionStatus(f"The transaction {root} is {header.value.state}; it cannot be renewed.")
            if header.value.timeout_ms >= deadline:
                return
            try:
                await self._store.swap_header(header, msgspec.structs.replace(header.value, timeout_ms=deadline))
            except (VersionConflict, OutcomeUnknown):
                header = await self._existing(root, principal, is_super, fresh=True)
            else:
                return
        raise StoreUnavailable(f"The transaction {root} could not be renewed in {ATTEMPTS} attempts; try again.")

    # The decision.

    async def _finish(
        self, root: TxnId, state: State, winners: tuple[int, ...] | None, principal: str | None, is_super: bool
    ) -> None:
        """`winners` None: of no interest to the caller."""
        try:
            header = await self._existing(root, principal, is_super)
        except TransactionNotFound:
            self._store.counters.header_cas["reject"] += 1
            raise
        self._check_root(root, "be ended" if winners is None else "decide")
        if winners is not None:
            self._check_decider(header, "decide")
            if header.value.is_open:
                await self._check_winners(root, winners)
        unsettled: OutcomeUnknown | None = None
        for _attempt in range(ATTEMPTS):
            if not header.value.is_open:
                self._note_ended(root)
                if header.value.state == state and winners in (None, header.value.winners):
                    return
                self._store.counters.header_cas["reject"] += 1
                raise InvalidTransactionStatus(f"The transaction {root} was {_ended(header.value)} already.")
            try:
                await self._store.swap_header(header, self._final(header.value, state, winners or ()))
            except VersionConflict:
                header = await self._reread(root, unsettled)
            except OutcomeUnknown as error:
                unsettled = error
                header = await self._reread(root, unsettled)
            else:
                self._note_ended(root)
                return
        raise unsettled or StoreUnavailable(f"The transaction {root} was changed by others {ATTEMPTS} times; try again.")

    async def _reread(self, root: TxnId, unsettled: OutcomeUnknown | None) -> Header:
        """Somebody else wrote, or nobody knows whether we did."""
        try:
            header = await self._store.header(root, fresh=True)
        except StoreError as error:
            if unsettled is None:
                raise
            raise OutcomeUnknown(f"Whether {root} was decided is unknown, and it cannot be read: {error}") from error
        if header is not None:
            return header
        self._note_ended(root)
        if unsettled is not None:
            raise OutcomeUnknown(f"The outcome of {root} is not known any more: its record was collected.") from unsettled
        raise self._unknown(root)

    def _final(self, header: TxnHeader, state: State, winners: tuple[int, ...]) -> TxnHeader:
        now = max(self._clock.now_ms(), header.created_ms)
        return msgspec.structs.replace(header, state=state, finalized_ms=now, winners=winners)

    # Checks.

    async def _existing(self, txn: TxnId, principal: str | None, is_super: bool, *, fresh: bool = False) -> Header:
        """The header that decides about it. What is read may be old: a final state is for ever, an open one is judged by the
        swap, and absence is asked twice."""
        header = await self._store.header(txn.root, fresh=fresh)
        if header is None and not fresh:
            header = await self._store.header(txn.root, fresh=True)
        if header is None:
            self._note_ended(txn.root)
            raise self._unknown(txn)
        if not is_super and header.value.owner not in (None, principal):
            raise self._unknown(txn)  # whose it is is nobody's business
        if txn.sub and not header.value.is_decider:
            raise self._unknown(txn)
        return header

    def _unknown(self, txn: TxnId) -> TransactionNotFound:
        return TransactionNotFound(
            f"The transaction {txn} does not exist, or not for you; what ended is forgotten after"
            f" {self._config.retention_seconds:g} s (transactions.retention_seconds)."
        )

    def _check_timeout(self, timeout_ms: int) -> None:
        longest = int(self._config.max_timeout_seconds * 1000)
        if not 1 <= timeout_ms <= longest:
            raise NotAllowed(
                f"A transaction cannot have a timeout of {timeout_ms} ms; it is 1 to {longest} ms"
                " (transactions.max_timeout_seconds)."
            )

    @staticmethod
    def _check_root(txn: TxnId, verb: str) -> None:
        if txn.sub:
            raise NotAllowed(f"{txn} is a sub-transaction and cannot {verb}; {txn.root} decides it.")

    @staticmethod
    def _check_decider(header: Header, verb: str) -> None:
        if not header.value.is_decider:
            raise NotAllowed(f"The transaction {header.root} is no decider, so it cannot {verb}; begin one as a decider.")

    # How many are open.

    async def recount(self) -> None:
        """Learn what other brokers began and ended."""
        async with self._counting:
            await self._count()

    async def _count(self) -> None:
        self._begun.clear()
        self._ended.clear()
        found: dict[int, dict[TxnId, None]] = {}
        async for root in self._store.open_roots():
            found.setdefault(root.most, {})[root] = None
        for root in self._begun:
            found.setdefault(root.most, {})[root] = None
        for root in self._ended:
            found.get(root.most, {}).pop(root, None)
        self._open = found
        self._begun.clear()
        self._ended.clear()
        self._counted_at = self._clock.monotonic()

    async def _admit(self, coordinator: int) -> None:
        if self._has_room(coordinator):
            return
        async with self._counting:
            # Asked in turn: a count reads every open transaction, and the first one's is as good for all others.
            if self._counted_at is None or self._clock.monotonic() - self._counted_at >= RECOUNT_SECONDS:
                await self._count()
        if not self._has_room(coordinator):
            raise Overloaded(
                f"The transaction coordinator {coordinator} has {self._config.max_open_per_coordinator} open transactions"
                " (transactions.max_open_per_coordinator); end some, or begin this one later."
            )

    def _has_room(self, coordinator: int) -> bool:
        taken = len(self._open.get(coordinator, ())) + self._beginning.get(coordinator, 0)
        return taken < self._config.max_open_per_coordinator

    def _note_begun(self, root: TxnId) -> None:
        self._open.setdefault(root.most, {})[root] = None
        if self._counting.locked():
            self._begun[root] = None

    def _note_ended(self, root: TxnId) -> None:
        self._open.get(root.most, {}).pop(root, None)
        if self._counting.locked():
            self._begun.pop(root, None)
            self._ended[root] = None


class _Serials:
    """The serials this broker may give out for one coordinator; what it reserved and did not use is lost, never reused."""

    def __init__(self, store: TransactionStore, coordinator: int) -> None:
        self._store = store
        self._coordinator = coordinator
        self._next = 0
        self._end = 0
        self._turn = asyncio.Lock()

    async def take(self) -> int:
        while self._next == self._end:
            async with self._turn:
                if self._next == self._end:
                    await self._reserve()
        self._next += 1
        return self._next - 1

    async def _reserve(self) -> None:
        for _attempt in range(ATTEMPTS):
            try:
                first = await self._store.reserve_serials(self._coordinator, BLOCK)
            except (VersionConflict, OutcomeUnknown):
                continue  # another broker was faster, or a block may be lost
            self._next, self._end = first, first + BLOCK
            return
        raise StoreUnavailable(f"No transaction ids could be reserved in {ATTEMPTS} attempts; try again.")


def _ended(header: TxnHeader) -> str:
    if header.state == "COMMITTED" and header.is_decider:
        return f"committed with the winners {', '.join(map(str, header.winners)) or 'none'}"
    return header.state.lower()
