"""`Decider` and `SubTransaction`: many attempts, of which some count.

A decider is a transaction with sub-transactions. Each of them is used like a transaction, by whoever knows the decider's id, in
any process; what counts is settled by one `decide` with the winners: these are committed together with the decider, all others
are aborted. Owns no state beyond that of its transactions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

from braid.client.transactions import Transaction, milliseconds_of
from braid.errors import InvalidArgument, NotAllowed, TransactionConflict
from braid.model.txn import MAX_SUB, TxnId
from braid.wire import txn_requests

if TYPE_CHECKING:
    from braid.client.client import Client


class Numbered(Protocol):
    """A sub-transaction, or the blocking twin of one."""

    @property
    def number(self) -> int: ...


class SubTransaction(Transaction):
    """Made by `Decider.sub`; takes effect if its decider's `decide` names it. Has no end of its own."""

    @property
    def number(self) -> int:
        """What `decide` calls it."""
        return self.id.sub

    async def commit(self) -> None:
        """Raises NotAllowed: its decider decides."""
        raise self._not_by_itself()

    async def abort(self) -> None:
        """Raises NotAllowed: its decider decides."""
        raise self._not_by_itself()

    async def finish(self) -> None:
        """Return once everything sent and acknowledged under it is answered, after which it takes no more. Raises
        TransactionConflict if something failed or is not known: then it must not win."""
        if self._state == "OPEN":
            self._state = "COMMITTING"
        await self._settle()
        if self._failure is not None:
            raise self._unfit() from self._failure

    def _unfit(self) -> TransactionConflict:
        return TransactionConflict(f"Sub-transaction {self.id} is not complete and must not win: {self._failure}")

    def _not_by_itself(self) -> NotAllowed:
        return NotAllowed(
            f"Transaction {self.id} is a sub-transaction; its decider {self.id.root} ends it, by decide() or abort()."
        )

    def doom(self, error: Any) -> None:
        self.fail(error)

    async def close(self) -> None:
        """Nothing to do: its decider ends it."""


class Decider(Transaction):
    """A transaction with sub-transactions. Made by `Client.begin_decider` or `Client.join_decider`."""

    def __init__(self, client: Client, txn_id: TxnId, *, is_joined: bool = False) -> None:
        super().__init__(client, txn_id)
        self._is_joined = is_joined
        """Begun elsewhere: closing this client does not end it."""
        self._subs: list[SubTransaction] = []
        self._winners: tuple[int, ...] = ()

    async def sub(self) -> SubTransaction:
        """A further sub-transaction, with a number that no other one has."""
        self.check_open()
        body = await self._ask(lambda number: txn_requests.new_sub(number, self.id))
        made = SubTransaction(self._client, TxnId(body.txnid_most_bits, body.txnid_least_bits))
        self._subs.append(made)
        return made

    async def decide(self, winners: Iterable[int | Numbered]) -> None:
        """Commit the decider and these sub-transactions, given as such or by number, and abort all others. Returns once that is
        decided; raises as `commit` does. A winner of this client whose sends and acknowledgments are not all answered well is
        refused before anything is decided."""
        chosen = numbers_of(winners)
        if not self._is_committed:
            for each in self._subs:
                if each.number in chosen:
                    await each.finish()
            self._winners = chosen
        elif chosen != self._winners:
            raise TransactionConflict(f"Transaction {self.id} is decided already, with other winners.")
        await self.commit()

    async def renew(self, timeout: float) -> None:
        """It times out so many seconds after now, instead of what was said before."""
        self.check_open()
        ttl_ms = milliseconds_of(timeout)
        await self._ask(lambda number: txn_requests.renew(number, self.id, ttl_ms))

    async def close(self) -> None:
        """Abort it if it is open and was begun here: the client is being closed."""
        if not self._is_joined:
            await super().close()

    def _request(self, number: int) -> bytes:
        return txn_requests.decide(number, self.id, self._winners)

    def _finish(self, state: Any) -> None:
        super()._finish(state)
        for each in self._subs:
            is_won = state == "COMMITTED" and each.number in self._winners
            each._finish("UNKNOWN" if state == "UNKNOWN" else "COMMITTED" if is_won else "ABORTED")


def numbers_of(winners: Any) -> tuple[int, ...]:
    if not isinstance(winners, Iterable) or isinstance(winners, str | bytes):
        raise InvalidArgument(f"winners={winners!r:.100} cannot be used; give a list of sub-transactions or their numbers.")
    found = []
    for each in winners:
        number = getattr(each, "number", each)
        if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= MAX_SUB:
            raise InvalidArgument(f"{each!r:.100} cannot be a winner; give sub-transactions or their numbers, from 1 on.")
        found.append(number)
    return tuple(sorted(set(found)))


def decider_id(given: Any) -> TxnId:
    """The id of a decider as an application gives it; raises InvalidArgument."""
    found = TxnId.parse(given) if isinstance(given, str) else given
    if not isinstance(found, TxnId) or found.sub:
        raise InvalidArgument(f"{given!r:.100} names no decider; give the id of what begin_decider() gave, or the text of it.")
    return found
