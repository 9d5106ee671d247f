"""`Transaction`: sends and acknowledgments that take effect together or not at all.

Owns what the application began under it: `commit` waits until every send and acknowledgment is answered and aborts if one of
them failed or its outcome is not known (INV14), so that nothing is committed by halves. Those who hold something for it (lanes
of consumers) are told how it ended. What decides is the coordinator's one compare-and-swap; asking for it again is harmless.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol

from braid.client.consumer_origin import is_seconds
from braid.errors import (
    BraidError,
    Closed,
    DeadlineExceeded,
    InvalidArgument,
    InvalidTransactionStatus,
    TransactionConflict,
    TransactionNotFound,
)
from braid.model.txn import TxnId
from braid.wire import txn_requests
from braid.wire.types import TxnAction

if TYPE_CHECKING:
    from braid.client.client import Client

log = logging.getLogger(__name__)
State = Literal["OPEN", "COMMITTING", "COMMITTED", "ABORTING", "ABORTED", "UNKNOWN"]
"""UNKNOWN: the coordinator did not answer in time; `commit` and `abort` may ask again."""
LONGEST_MS = (1 << 63) - 1


class Holder(Protocol):
    """Who holds something until a transaction ends."""

    def transaction_ended(self, txn: Transaction, /, *, is_committed: bool) -> None:
        """Not committed: aborted, or nobody knows."""


class Writer(Protocol):
    """Who collects messages before they are sent."""

    def hurry(self) -> None:
        """Wait for no more messages."""


class Joinable(Protocol):
    """What `txn=` takes: a `Transaction`, or the blocking twin of one."""

    @property
    def _transaction(self) -> Transaction: ...


class Transaction:
    """Made by `Client.transaction` or `Client.begin_transaction`; given to `send` and `acknowledge` as `txn=`."""

    def __init__(self, client: Client, txn_id: TxnId) -> None:
        self._id = txn_id
        self._client = client
        self._state: State = "OPEN"
        self._failure: BraidError | None = None
        """Why it cannot be committed any more, if so."""
        self._under_way = 0
        """Sends and acknowledgments without an answer."""
        self._settled = asyncio.Event()
        self._settled.set()
        self._writers: dict[Writer, None] = {}
        self._holders: dict[Holder, None] = {}
        self._ending: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        return f"<transaction {self._id} {self._state}>"

    @property
    def id(self) -> TxnId:
        """How brokers call it; `str` of it is what `braid transactions describe` takes."""
        return self._id

    @property
    def state(self) -> State:
        """Where it stands, as far as this client knows: one that timed out looks OPEN until it is used or ended."""
        return self._state

    @property
    def _transaction(self) -> Transaction:
        return self

    @property
    def _is_committed(self) -> bool:
        return self._state == "COMMITTED"

    # The application's side.

    async def commit(self) -> None:
        """Make everything done under it take effect, and return once that is decided. Idempotent.

        Raises TransactionConflict if a send or acknowledgment failed or its outcome is not known: then it was aborted.
        InvalidTransactionStatus: it had been aborted, for example by its timeout. DeadlineExceeded: no coordinator answered
        and nobody knows; its state is UNKNOWN, and `commit` can be called again."""
        if self._state == "COMMITTED":
            return
        if self._ending is None:
            if self._state == "ABORTED":
                raise self._over()
            self._end(self._commit)
            await self._ended()
            return
        await self._ended()
        if not self._is_committed:
            raise self._over()

    async def abort(self) -> None:
        """Undo everything done under it: messages are never seen, acknowledged ones come again. Idempotent; raises
        InvalidTransactionStatus if it is committed."""
        if self._state == "ABORTED":
            return
        if self._state == "COMMITTED":
            raise InvalidTransactionStatus(f"Transaction {self._id} is committed and cannot be aborted any more.")
        if self._ending is None:
            self._end(self._abort)
        elif self._state == "COMMITTING":
            raise InvalidTransactionStatus(f"Transaction {self._id} is being committed and cannot be aborted.")
        await self._ended()

    async def close(self) -> None:
        """Abort it if it is open: the client is being closed. Never raises."""
        try:
            if self._ending is not None:
                await self._ended()
            elif self._state == "OPEN":
                # A block that goes on must not take this for an end that the application wanted.
                self.fail(Closed(f"The client was closed before transaction {self._id} was committed."))
                if self._client.is_connected:
                    await self.abort()
        except BraidError as error:
            log.info("transaction %s could not be ended, it times out: %s", self._id, error)

    # For producers and consumers.

    def check_open(self) -> None:
        """Raise why nothing more can be done under it, if so."""
        if self._state != "OPEN":
            raise self._over()

    def begin(self) -> None:
        """A send or acknowledgment begins; `done` or `failed` follows. Raises if the transaction is over."""
        if self._state != "OPEN":
            raise self._over()
        self._under_way += 1
        self._settled.clear()

    def done(self) -> None:
        self._under_way -= 1
        if not self._under_way:
            self._settled.set()

    def failed(self, error: BaseException) -> None:
        """What began has failed, or nobody knows."""
        self.fail(_understood(error))
        self.done()

    def track(self, answer: asyncio.Future[Any]) -> None:
        """As `begin`, for something whose answer this is."""
        self.begin()
        self.follow(answer)

    def follow(self, answer: asyncio.Future[Any]) -> None:
        """What began has this answer."""
        answer.add_done_callback(self._answered)

    def fail(self, error: BraidError) -> None:
        """It must not be committed any more."""
        if self._failure is None:
            self._failure = error

    def doom(self, error: BraidError) -> None:
        """As `fail`, and abort at once: others wait for what it holds."""
        self.fail(error)
        if self._state == "OPEN" and self._ending is None:
            log.warning("transaction %s is aborted: %s", self._id, error)
            self._end(self._abort)

    def hold(self, holder: Holder) -> None:
        """Tell this one how it ended."""
        self._holders[holder] = None

    def wrote(self, writer: Writer) -> None:
        """Hurry this one before the commit."""
        self._writers[writer] = None

    # Inside.

    def _answered(self, answer: asyncio.Future[Any]) -> None:
        if answer.cancelled():
            self.failed(asyncio.CancelledError())
        elif (error := answer.exception()) is not None:
            self.failed(error)
        else:
            self.done()

    def _end(self, work: Callable[[], Awaitable[None]]) -> None:
        """End it in the background: who gives up waiting does not leave it half ended."""
        ending: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            self._client.transaction_tasks.spawn(self._run(work, ending), f"end {self._id}")
        except RuntimeError:
            raise Closed(f"The client was closed before transaction {self._id} was ended, which its timeout does.") from None
        self._ending = ending

    async def _run(self, work: Callable[[], Awaitable[None]], ending: asyncio.Future[None]) -> None:
        try:
            await work()
        except BraidError as error:
            ending.set_exception(error)
            ending.exception()  # nobody may be waiting; that is no reason for a warning
        except BaseException as error:
            self._finish("UNKNOWN")
            ending.set_exception(Closed(f"The client was closed before the end of transaction {self._id} was known."))
            ending.exception()
            if not isinstance(error, asyncio.CancelledError):
                raise
        else:
            ending.set_result(None)
        if self._state == "UNKNOWN":
            self._ending = None  # it may be tried again

    async def _ended(self) -> None:
        if self._ending is not None:
            await asyncio.shield(self._ending)

    async def _commit(self) -> None:
        self._state = "COMMITTING"
        await self._settle()
        if self._failure is not None:
            await self._abort()
            raise self._over() from self._failure
        await self._decide()

    def _request(self, number: int) -> bytes:
        """What commits it."""
        return txn_requests.end(number, self._id, TxnAction.COMMIT)

    async def _settle(self) -> None:
        """Every send and acknowledgment is answered, well or badly."""
        for writer in self._writers:
            writer.hurry()
        await self._settled.wait()

    async def _decide(self) -> None:
        attempts = 0

        def attempt(number: int) -> bytes:
            nonlocal attempts
            attempts += 1
            return self._request(number)

        try:
            await self._ask(attempt)
        except InvalidTransactionStatus:
            self._finish("ABORTED")
            raise
        except TransactionNotFound:
            # Nobody else commits it. After an attempt without an answer it may have been committed and collected since.
            self._finish("ABORTED" if attempts == 1 else "UNKNOWN")
            raise
        except BraidError as error:
            self._finish("UNKNOWN")
            raise self._unknown(error) from error
        self._finish("COMMITTED")

    async def _abort(self) -> None:
        was_doubtful = self._state == "UNKNOWN"
        self._state = "ABORTING"
        try:
            await self._ask(lambda number: txn_requests.end(number, self._id, TxnAction.ABORT))
        except TransactionNotFound:
            if was_doubtful:
                self._finish("UNKNOWN")
                raise
        except InvalidTransactionStatus:
            self._finish("COMMITTED")
            raise
        except BraidError as error:
            self._finish("UNKNOWN")
            raise (self._unknown(error) if was_doubtful else self._not_aborted(error)) from error
        self._finish("ABORTED")

    async def _ask(self, build: Callable[[int], bytes]) -> Any:
        deadline = self._client.runtime.clock.monotonic() + self._client.config.operation_timeout
        return await self._client.coordinators.ask(self._id.most, build, deadline)

    def _finish(self, state: State) -> None:
        self._state = state
        self._client.forget(self)
        holders, self._holders = self._holders, {}
        for holder in holders:
            holder.transaction_ended(self, is_committed=state == "COMMITTED")

    def _unknown(self, error: BraidError) -> BraidError:
        return DeadlineExceeded(
            f"Whether transaction {self._id} is committed is not known, because no coordinator could tell ({error}); "
            "call commit() or abort() again, or read what it would have written before doing its work anew."
        )

    def _not_aborted(self, error: BraidError) -> BraidError:
        return DeadlineExceeded(
            f"Transaction {self._id} is not known to be aborted, because no coordinator could tell ({error}); "
            "call abort() again, or leave it to its timeout."
        )

    def _over(self) -> BraidError:
        """Why it is of no more use."""
        if self._failure is not None and self._state != "COMMITTED":
            error = TransactionConflict(f"Transaction {self._id} was aborted: {self._failure}")
            error.__cause__ = self._failure
            return error
        words = {"COMMITTING": "is being committed", "ABORTING": "is being aborted", "UNKNOWN": "has ended, nobody knows how"}
        return InvalidTransactionStatus(
            f"Transaction {self._id} {words.get(self._state, f'is {self._state.lower()}')}; begin another one."
        )


IN_BLOCK: ContextVar[Transaction | None] = ContextVar("in_block", default=None)
"""The transaction in whose block we are: what a stream consumer hands out there comes again if it is not committed."""


class TransactionScope:
    """What `client.transaction()` gives: `async with` begins a transaction, commits it at the end and aborts it if the block
    raises."""

    def __init__(self, start: Callable[[], Awaitable[Transaction]]) -> None:
        self._start = start
        self._begun: Transaction | None = None
        self._outer: Transaction | None = None

    async def __aenter__(self) -> Transaction:
        self._begun = await self._start()
        self._outer = IN_BLOCK.get()
        IN_BLOCK.set(self._begun)
        return self._begun

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        IN_BLOCK.set(self._outer)
        txn = self._begun
        if txn is None:
            return
        if kind is None:
            await leave(txn)
            return
        try:
            await give_up(txn)
        except BraidError as failure:  # what the application raised says more
            log.warning("transaction %s could not be aborted, it times out: %s", txn.id, failure)


async def leave(txn: Transaction) -> None:
    """The end of its block: commit it, unless the application has ended it itself."""
    if txn.state in ("COMMITTED", "UNKNOWN") or (txn.state in ("ABORTING", "ABORTED") and txn._failure is None):
        return
    await txn.commit()


def check_left(txn: Transaction) -> None:
    """As `leave`, after the client was closed: raises if it was aborted by that."""
    if txn.state != "COMMITTED" and txn._failure is not None:
        raise txn._over()


async def give_up(txn: Transaction) -> None:
    """Its block has raised: abort it, unless that raised because it has ended."""
    if txn.state == "OPEN":
        await txn.abort()


def joined(txn: Any) -> Transaction:
    """The transaction that `txn=` names; raises InvalidArgument."""
    found = getattr(txn, "_transaction", None)
    if not isinstance(found, Transaction):
        raise InvalidArgument(
            f"txn={txn!r:.100} cannot be used; give what `with client.transaction() as txn` or begin_transaction() gave."
        )
    return found


def milliseconds_of(timeout: Any) -> int:
    """A transaction's timeout on the wire; raises InvalidArgument."""
    if not is_seconds(timeout) or timeout * 1000 > LONGEST_MS:
        raise InvalidArgument(
            f"timeout={timeout!r:.100} cannot be used for a transaction; give seconds above 0, up to the brokers' "
            "transactions.max_timeout_seconds."
        )
    return max(1, int(timeout * 1000))


def _understood(error: BaseException) -> BraidError:
    if isinstance(error, BraidError):
        return error
    if isinstance(error, asyncio.CancelledError):
        return Closed("Somebody gave up waiting for a send or an acknowledgment, whose outcome is therefore not known.")
    return Closed(f"A send or an acknowledgment failed: {error!r}")
