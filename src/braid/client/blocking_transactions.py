"""`Transaction` without `await`, and the others that decide by one compare-and-swap."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

import msgspec

from braid.client import deciders, transactions
from braid.client.blocking_loop import Blocking, LoopThread, waited
from braid.errors import BraidError
from braid.model.txn import TxnId


class Transaction(Blocking[transactions.Transaction]):
    """Made by `Client.transaction` or `Client.begin_transaction`; given to `send` and `acknowledge` as `txn=`."""

    commit = waited(transactions.Transaction.commit)
    abort = waited(transactions.Transaction.abort)

    def __repr__(self) -> str:
        return repr(self._inner)

    @property
    def id(self) -> TxnId:
        """How brokers call it."""
        return self._inner.id

    @property
    def state(self) -> transactions.State:
        """Where it stands, as far as this client knows."""
        return self._inner.state

    @property
    def _transaction(self) -> transactions.Transaction:
        return self._inner


class SubTransaction(Blocking[deciders.SubTransaction]):
    """Made by `Decider.sub`; takes effect if its decider's `decide` names it. Has no end of its own."""

    commit = waited(deciders.SubTransaction.commit)
    abort = waited(deciders.SubTransaction.abort)
    finish = waited(deciders.SubTransaction.finish)

    def __repr__(self) -> str:
        return repr(self._inner)

    @property
    def id(self) -> TxnId:
        """How brokers call it."""
        return self._inner.id

    @property
    def number(self) -> int:
        """What `decide` calls it."""
        return self._inner.number

    @property
    def state(self) -> transactions.State:
        """Where it stands, as far as this client knows."""
        return self._inner.state

    @property
    def _transaction(self) -> transactions.Transaction:
        return self._inner


class Decider(Blocking[deciders.Decider]):
    """A transaction with sub-transactions. Made by `Client.begin_decider` or `Client.join_decider`."""

    commit = waited(deciders.Decider.commit)
    abort = waited(deciders.Decider.abort)
    decide = waited(deciders.Decider.decide)
    renew = waited(deciders.Decider.renew)

    def __repr__(self) -> str:
        return repr(self._inner)

    def sub(self) -> SubTransaction:
        """A further sub-transaction, with a number that no other one has."""
        return SubTransaction(self._thread.run(self._inner.sub), self._thread)

    @property
    def id(self) -> TxnId:
        """How brokers call it."""
        return self._inner.id

    @property
    def state(self) -> transactions.State:
        """Where it stands, as far as this client knows."""
        return self._inner.state

    @property
    def _transaction(self) -> transactions.Transaction:
        return self._inner


class SinkBegin(msgspec.Struct, frozen=True):
    """What `Client.begin_sink` gives."""

    decider: Decider | None
    """Under whose sub-transactions the batch is written; None of a duplicate."""
    is_duplicate: bool
    """The batch is in the output: nothing is to be written."""


class TransactionScope:
    """What `client.transaction()` gives: `with` begins a transaction and ends it: commits it, or aborts if the block raises."""

    def __init__(self, start: Callable[[], Transaction], thread: LoopThread) -> None:
        self._start = start
        self._thread = thread
        self._begun: Transaction | None = None
        self._outer: transactions.Transaction | None = None

    def __enter__(self) -> Transaction:
        self._begun = self._start()
        self._outer = transactions.IN_BLOCK.get()
        transactions.IN_BLOCK.set(self._begun._inner)  # calls take it with them to the loop
        return self._begun

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._begun is None:
            return
        transactions.IN_BLOCK.set(self._outer)
        inner = self._begun._inner
        if self._thread.is_closed:
            if kind is None:
                transactions.check_left(inner)
            return
        if kind is None:
            self._thread.run(lambda: transactions.leave(inner))
            return
        try:
            self._thread.run(lambda: transactions.give_up(inner), is_closing=True)
        except BraidError as failure:  # what the application raised says more
            transactions.log.warning("transaction %s could not be aborted, it times out: %s", inner.id, failure)
