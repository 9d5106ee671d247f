"""`MetadataPendingAckStore`: acknowledgments inside transactions, of one subscription of one segment.

Owns what is held until a transaction is decided, and the order that makes it safe: hold in memory, append the ops (INV10), read
the header, look whether the log is still ours (INV11), answer. When the outcome is known and nothing of that transaction is
under way here, the ops are listed anew from the store (INV12): a commit applies those that were accepted to the cursor, makes
it durable and only then deletes them; an abort deletes them and gives the entries back. Everything about one root is done by
one task at a time, so that acknowledging and materialising never meet.

An op that is in the store and was neither found when the log was claimed nor accepted since is one that was refused (its delete
may be on its way) or that a former owner wrote too late: it is deleted and never applied. What is done to the store and to the
cursor, step by step, is `stored_acks.py`. Must not know dispatchers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager

from braid.errors import BraidError, Closed, LedgerFenced, NotAllowed, NotReady, TransactionConflict
from braid.model.positions import Position
from braid.model.txn import TxnId
from braid.runtime.clock import Clock
from braid.runtime.tasks import Tasks
from braid.runtime.waiting import wait_at_most
from braid.txn import records
from braid.txn.ack_conflicts import WHOLE, HeldByAnother, Hold, Holds, bits_of
from braid.txn.ack_ops import apply_ops, hold_of
from braid.txn.ack_requests import AckListener, AckRequest, AckRoot, answer
from braid.txn.api import Ack, CursorAcks, HeldTransaction
from braid.txn.decisions import Decisions
from braid.txn.records import TxnHeader
from braid.txn.store import StoredOp, TransactionStore
from braid.txn.stored_acks import StoredAcks, not_open

log = logging.getLogger(__name__)

FIRST_RETRY_SECONDS = 0.1
LAST_RETRY_SECONDS = 5.0
SETTLE_SECONDS = 10.0
"""How long an acknowledgment waits for a decided transaction that is in its way, at most."""
DRAIN_SECONDS = 5.0
CHECKED_AT_ONCE = 512
"""Acknowledgments that are judged, or taken over by a new owner, without a pause."""


class MetadataPendingAckStore:
    """See the module."""

    def __init__(
        self,
        segment: str,
        subscription: str,
        cursor: CursorAcks,
        store: TransactionStore,
        decisions: Decisions,
        clock: Clock,
        tasks: Tasks,
        listener: AckListener,
    ) -> None:
        self.segment = segment
        self.subscription = subscription
        self.holds = Holds()
        self._cursor = cursor
        self._stored = StoredAcks(segment, subscription, cursor, store)
        self._decisions = decisions
        self._clock = clock
        self._tasks = tasks
        self._listener = listener
        self._roots: dict[TxnId, AckRoot] = {}
        self._news = asyncio.Event()
        """Set, and replaced, whenever a root is decided or settled, or everything ends."""
        self._is_resetting = False
        self._is_closed = False

    # What others ask.

    @property
    def has_holds(self) -> bool:
        return bool(self.holds)

    def is_held(self, position: Position) -> bool:
        """Whether the whole entry is held."""
        return self.holds.held_bits(position) == WHOLE

    def held_mask(self, position: Position) -> int | None:
        """The messages of an entry that are held, all bits for the whole entry; None if none is."""
        return self.holds.held_bits(position) or None

    def transactions(self) -> list[HeldTransaction]:
        """Who holds something, oldest first."""
        found = []
        for state in self._roots.values():
            for txn in state.txns:
                if held := self.holds.of(txn):
                    first = self.holds.upto(txn) or held[0]
                    found.append(
                        HeldTransaction(
                            txn=txn,
                            since_ms=state.since_ms,
                            acks=len(held),
                            position=records.position_text(first.position),
                        )
                    )
        return sorted(found, key=lambda each: (each.since_ms, each.txn))

    # Acknowledging.

    async def acknowledge(self, txn: TxnId, acks: Sequence[Ack], *, cumulative: bool) -> None:
        """Hold these until the transaction is decided. Raises TransactionConflict."""
        await self.begin(txn, acks, cumulative=cumulative)

    def begin(self, txn: TxnId, acks: Sequence[Ack], *, cumulative: bool) -> asyncio.Future[None]:
        """`acknowledge`, of which the hold in memory begins before this returns."""
        request = AckRequest(txn, self._naming(acks, cumulative), self._clock.monotonic(), is_cumulative=cumulative)
        if self._is_closed:
            request.done.set_exception(NotReady(f"The segment {self.segment} is being closed; look it up again."))
            return request.done
        state = self._state(txn.root)
        try:
            self._check(request, state)
        except HeldByAnother:
            pass  # which may be decided already: the root's task finds out
        except BraidError as error:
            request.done.set_exception(error)
            self._forget_if_idle(txn.root, state)
            return request.done
        state.queue.append(request)
        self._kick(txn.root, state)
        return request.done

    def _naming(self, acks: Sequence[Ack], cumulative: bool) -> list[Ack]:
        """Without the masks that name no message of their entry."""
        if cumulative:
            before = self._cursor.position_before
            return [ack if bits_of(ack) else Ack(before(ack.position)) for ack in acks]
        return [ack for ack in acks if bits_of(ack)]

    def _state(self, root: TxnId) -> AckRoot:
        state = self._roots.get(root)
        if state is None:
            state = self._roots[root] = AckRoot(self._clock.now_ms())
            self._decisions.hold(root, self._decided)
        return state

    def _check(self, request: AckRequest, state: AckRoot) -> None:
        """Raise if the acknowledgment contradicts what is known, else hold what it names. May be asked twice."""
        if self._is_resetting:
            raise self._reset_error(request.txn)
        if state.is_decided:
            raise not_open(request.txn, state.header)
        cursor = self._cursor
        wanted: list[tuple[int, Hold]] = []
        for number, ack in enumerate(request.acks):
            if ack.position > cursor.last_position:
                raise NotAllowed(
                    f"The position {ack.position} lies beyond the end {cursor.last_position} of {self.segment}; "
                    "acknowledge what was received."
                )
            hold = Hold(ack.position, bits_of(ack), request.is_cumulative)
            if (conflict := self.holds.conflict(request.txn, hold, cursor)) is not None:
                text = f"{self._named}: {conflict.why}; the transaction {request.txn} cannot acknowledge it too."
                raise TransactionConflict(text) if conflict.holder is None else HeldByAnother(text, conflict.holder)
            wanted.append((number, hold))
        state.txns[request.txn] = None
        new: list[Hold] = []
        for number, hold in wanted:
            if (added := self.holds.add(request.txn, hold)) is not None:
                new.append(added)
            if added is not None or state.is_doubtful:
                request.unwritten[number] = None
        if new:
            request.held += new
            self._listener.held(new)

    async def _judge(self, request: AckRequest, state: AckRoot) -> None:
        """`_check`, after the end of those in the way that are decided and not materialised here yet: whoever commits one
        transaction and goes on with the next must not be refused because of the first."""
        if request.txn.sub:
            root = await self._stored.header(request.txn.root)
            if root is not None and not root.is_decider:
                raise not_open(request.txn, None)
        until = request.since + SETTLE_SECONDS
        while True:
            news = self._news
            try:
                self._check(request, state)
                return
            except HeldByAnother as conflict:
                if not await self._is_over(conflict.holder.root) or self._clock.monotonic() >= until:
                    raise
            if self._is_closed:
                raise self._closing()
            await wait_at_most(self._clock, news, until - self._clock.monotonic())

    async def _is_over(self, root: TxnId) -> bool:
        """Whether a root that holds something is decided, or gone meanwhile."""
        state = self._roots.get(root)
        if state is None or state.is_decided:
            return True
        header = await self._stored.header(root)
        if header is not None and header.is_open:
            return False
        self._decided(root, header)
        return True

    def _tell(self) -> None:
        """Something changed for those who wait."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _kick(self, root: TxnId, state: AckRoot) -> None:
        """Let the root's task run if there is something to do."""
        is_stopped = self._is_resetting or self._is_closed or state.is_restoring
        if state.worker is None and (state.queue or state.is_decided) and not is_stopped:
            state.worker = self._tasks.spawn(self._work(root, state), f"{self.subscription}: acks of {root}")

    async def _work(self, root: TxnId, state: AckRoot) -> None:
        try:
            while not self._is_resetting and not self._is_closed:
                if state.queue:
                    group, state.queue = state.queue, []
                    await self._hold_group(root, state, group)
                elif state.is_decided:
                    await self._materialise_at_last(root, state)
                    return
                else:
                    break
        except BaseException:
            answer(state.queue, self._closing())
            raise
        finally:
            state.worker = None
        self._forget_if_idle(root, state)

    def _forget_if_idle(self, root: TxnId, state: AckRoot) -> None:
        """A root of which nothing is held or under way need not be watched."""
        is_idle = state.worker is None and not state.queue and not state.accepted and not state.is_decided
        if is_idle and not any(map(self.holds.holds_any, state.txns)) and self._roots.get(root) is state:
            del self._roots[root]
            self._decisions.release(root, self._decided)

    async def _hold_group(self, root: TxnId, state: AckRoot, group: list[AckRequest]) -> None:
        """Accept or refuse the acknowledgments that came while the group before them was under way."""
        everybody = list(group)
        ops: list[StoredOp] = []
        try:
            await self._judge_all(group, state)
            if self._is_closed:  # some waited: `drain` has not, and what is written now would be a later subscription's
                self._refuse(group, self._closing())
                return
            state.is_accepting = True
            if any(request.unwritten for request in group):
                await self._stored.accept(root, state, group, ops)
        except LedgerFenced as error:
            conflict = TransactionConflict(f"{self._named} is served by another broker now ({error.message})")
            await self._undo(root, state, group, ops, conflict)
        except BraidError as error:
            await self._undo(root, state, group, ops, error)
        else:
            state.accepted.update((op.key, None) for op in ops)
            answer(group, None)
        finally:
            state.is_accepting = False
            answer(everybody, self._closing())  # whoever was not told: this ends before its time

    async def _judge_all(self, group: list[AckRequest], state: AckRoot) -> None:
        """Leave those that may be held; the others get their answer."""
        judged = 0
        for request in list(group):
            if (judged := judged + len(request.acks)) > CHECKED_AT_ONCE:
                judged = 0
                await asyncio.sleep(0)
            try:
                await self._judge(request, state)  # again: what it repeats may have been refused meanwhile
            except BraidError as error:
                group.remove(request)
                self._refuse([request], error)

    async def _undo(self, root: TxnId, state: AckRoot, group: list[AckRequest], ops: list[StoredOp], why: BraidError) -> None:
        """Refuse a group: its ops go first. If it is not certain that they are gone, and that none comes late, what it holds
        stays held until the transaction is decided, so that no other one can take it."""
        is_all_known = len(ops) == sum(len(each.unwritten) for each in group)
        if await self._stored.take_back(root, ops) and is_all_known:
            self._refuse(group, why)
        else:
            state.is_doubtful = True
            answer(group, why)

    def _refuse(self, group: Iterable[AckRequest], why: BraidError) -> None:
        """Answer, and let go of what these held."""
        released: list[Position] = []
        for request in group:
            for hold in request.held:
                self.holds.remove(request.txn, hold)
                released.append(hold.position)
            request.held = []
            answer([request], why)
        if released:
            self._listener.settled([], sorted(released))

    # Materialising.

    def _decided(self, root: TxnId, header: TxnHeader | None) -> None:
        """Told by `Decisions`, more than once perhaps."""
        state = self._roots.get(root)
        if state is None:
            self._decisions.release(root, self._decided)
            return
        state.is_decided = True
        state.header = header
        self._tell()
        self._kick(root, state)

    async def _materialise_at_last(self, root: TxnId, state: AckRoot) -> None:
        delay = FIRST_RETRY_SECONDS
        while not (self._is_closed or self._is_resetting):  # a reset waits for this, and does it itself
            try:
                await self._stored.materialise(root, state)
                self._settle(root, state)
                return
            except (LedgerFenced, Closed) as error:
                log.info("the acknowledgments of %s are left to the next owner of %s: %s", root, self.segment, error)
                return
            except BraidError as error:
                log.warning("the acknowledgments of %s in %s wait: %s", root, self._named, error)
            await self._clock.sleep(delay)
            delay = min(delay * 2, LAST_RETRY_SECONDS)

    def _settle(self, root: TxnId, state: AckRoot) -> None:
        """The ops are gone: forget the root, and deliver again what it held and did not acknowledge."""
        gone = [hold for txn in state.txns for hold in self.holds.forget(txn)]
        if self._roots.get(root) is state:
            del self._roots[root]
        self._tell()
        self._decisions.release(root, self._decided)
        released = sorted({hold.position for hold in gone if self._is_open(hold)})
        self._listener.settled(sorted({hold.position for hold in gone} - set(released)), released)

    def _is_open(self, hold: Hold) -> bool:
        """Whether something of it is still unacknowledged."""
        if self._cursor.is_acknowledged(hold.position):
            return False
        unacked = self._cursor.unacked_mask(hold.position)
        return unacked is None or bool(unacked & hold.bits) or hold.is_cumulative

    # Recovery, resets, the end.

    async def restore(self, root: TxnId, header: TxnHeader, ops: Sequence[StoredOp]) -> list[StoredOp]:
        """Hold or apply again what a former owner accepted of one transaction, before anybody is served; returns what is to be
        deleted. `ops` are the ones of this subscription, read after the log was claimed. Lets others have their turn; an
        outcome that comes meanwhile waits until everything is known."""
        useless: list[StoredOp] = []
        state = self._state(root)
        state.since_ms = header.created_ms
        state.is_restoring = True
        try:
            for start in range(0, len(ops), CHECKED_AT_ONCE):
                if start:
                    await asyncio.sleep(0)
                part: list[StoredOp] = []
                for op in ops[start : start + CHECKED_AT_ONCE]:
                    if op.op.incarnation != self._cursor.incarnation:
                        useless.append(op)
                    elif op.key not in state.accepted:
                        part.append(op)
                self._restore(state, header, part)
        finally:
            state.is_restoring = False
        if state.accepted and not header.is_open:
            self._decided(root, header)
        self._kick(root, state)
        self._forget_if_idle(root, state)
        return useless

    def _restore(self, state: AckRoot, header: TxnHeader, ops: Sequence[StoredOp]) -> None:
        state.accepted.update((op.key, None) for op in ops)
        if not header.is_open:
            apply_ops(self._cursor, ops, header)
            return
        for op in ops:
            state.txns[op.txn] = None
            self.holds.add(op.txn, hold_of(op.op))

    async def relist(self) -> None:
        """Look for ops that are not known here, as a refused acknowledgment can leave one, and end those that are decided."""
        await self._stored.end_strays(self._roots.__contains__)

    @asynccontextmanager
    async def resetting(self) -> AsyncIterator[None]:
        """While this lasts the cursor may be set anew: decided transactions are materialised before, and what the open ones
        hold is gone afterwards (the reset wins). If the reset fails, everything stays held."""
        self._is_resetting = True
        self._tell()
        try:
            while workers := [state.worker for state in self._roots.values() if state.worker is not None]:
                await asyncio.wait(workers)
            for root, state in list(self._roots.items()):
                self._refuse(state.queue, self._reset_error(root))
                state.queue = []
                header = await self._stored.header(root)
                if header is None or not header.is_open:
                    state.is_decided, state.header = True, header
                    try:
                        await self._stored.materialise(root, state)
                        self._settle(root, state)
                    except NotReady as error:  # more gaps than are stored: the reset is the end of these, and of the ops
                        log.info("%s is reset although %s is not materialised: %s", self._named, root, error)
            yield
            await self._stored.purge()
            for root in list(self._roots):
                self._decisions.release(root, self._decided)
            self._roots.clear()
            self.holds.clear()
        finally:
            self._is_resetting = False
            for root, state in list(self._roots.items()):
                self._kick(root, state)

    def close(self) -> None:
        """Hold and decide nothing more; the store has what the next owner needs."""
        self._is_closed = True
        self._tell()
        for root, state in self._roots.items():
            self._decisions.release(root, self._decided)
            answer(state.queue, self._closing())
            state.queue = []

    @property
    def is_accepting(self) -> bool:
        """Whether `drain` would wait."""
        return any(each.worker is not None and each.is_accepting for each in self._roots.values())

    async def drain(self) -> None:
        """After `close`: wait, for a while, until no ack is between its op and its answer, so that a refused one leaves
        nothing behind that the next owner would take for accepted."""
        workers = [each.worker for each in self._roots.values() if each.worker is not None and each.is_accepting]
        if not workers:
            return
        timer = self._clock.call_later(DRAIN_SECONDS, lambda: [each.cancel() for each in workers])
        try:
            await asyncio.wait(workers)
        finally:
            timer.cancel()

    # Words.

    @property
    def _named(self) -> str:
        return f"The subscription {self.subscription} of {self.segment}"

    def _closing(self) -> NotReady:
        return NotReady(f"{self._named} is being closed; look it up again.")

    def _reset_error(self, txn: TxnId) -> TransactionConflict:
        return TransactionConflict(f"{self._named} is being reset, which ends what {txn} would hold there.")
