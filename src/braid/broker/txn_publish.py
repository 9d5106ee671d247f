"""`TransactionalLane`: messages of one producer that wait behind a transactional one, taken off in the order they came.

Owns the queue and the task that asks the transaction buffer for permission, run by run. Everything else about a message is
done when its turn comes, by its `Producer`, as if it had arrived then. What waits counts as a pending publish and against the
publish budget, and is bounded (INV17). Must not know how permission is given.
"""

from __future__ import annotations

from collections import deque
from itertools import islice, takewhile
from typing import TYPE_CHECKING, NamedTuple

from braid.errors import BraidError, NotAllowed, Overloaded, TransactionConflict
from braid.model.txn import TxnId
from braid.runtime.plans import step
from braid.wire.entries import entry_metadata
from braid.wire.server import Send

if TYPE_CHECKING:
    from braid.broker.producer import Producer

RUN_ENTRIES = 1000
"""Entries that one op covers, at most."""


class Waiting(NamedTuple):
    """A message whose turn has not come."""

    send: Send
    messages: int
    txn: TxnId | None
    refusal: BraidError | None
    """What it will be answered with, whatever happens."""


class TransactionalLane:
    """Of one producer, from its first waiting message until none is left."""

    __slots__ = ("_is_over", "_items", "_producer")

    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        self._items: deque[Waiting] = deque()
        self._is_over = False
        topic = producer.topic
        topic.tasks.spawn(self._run(), f"transactional messages of {producer.info.name}")

    def add(self, item: Waiting) -> None:
        producer = self._producer
        if len(self._items) >= producer.topic.service.transactions.config.max_waiting_per_producer:
            failure = Overloaded(f"{len(self._items)} messages of {producer.info.name} wait behind a transactional one.")
            producer.topic.add_refused(producer, failure, was_judged=False)
            return
        self._items.append(item)
        producer.link.pending_publishes += 1
        producer.topic.budget.used += len(item.send.entry)

    def drop(self) -> None:
        """The producer is closed: its client sends again what was not answered."""
        self._is_over = True
        while self._items:
            self._next()
        self._end()

    def refuse(self, failure: BraidError) -> None:
        """Everything that waits gets this answer."""
        self._is_over = True
        while self._items:
            self._producer.refuse(self._next().send, failure)
        self._end()

    def _next(self) -> Waiting:
        item = self._items.popleft()
        self._producer.link.pending_publishes -= 1
        self._producer.topic.budget.used -= len(item.send.entry)
        return item

    def _end(self) -> None:
        producer = self._producer
        if producer.lane is self:
            producer.lane = None
            producer.topic.gave_back(producer)
            producer.after_completions()

    async def _run(self) -> None:
        try:
            while self._items:
                if (txn := self._items[0].txn) is None:
                    self._take()
                else:
                    await self._take_run(txn)
                    self._producer.topic.gave_back(self._producer)
            if not self._is_over:
                self._end()
        except Exception:
            self._producer.topic.disconnect_producer(self._producer)  # a bug: the client must not wait for ever
            raise

    def _take(self) -> bool:
        """Publish or refuse the first one; True if it was handed to the log."""
        item = self._next()
        if item.refusal is not None:
            self._producer.refuse(item.send, item.refusal)
            return False
        return self._producer.append(item.send, item.messages, item.txn)

    async def _take_run(self, txn: TxnId) -> None:
        """Publish the run of messages of this transaction at the head, if the buffer permits it."""
        producer = self._producer
        buffer = producer.topic.transactions
        entries = len(list(takewhile(lambda item: item.txn == txn, islice(self._items, RUN_ENTRIES))))
        try:
            permit = await buffer.authorise(txn, entries)
        except TransactionConflict as conflict:
            for _ in range(0 if self._is_over else entries):
                producer.refuse(self._next().send, wire_refusal(producer, conflict))
            return
        except BraidError as failure:
            if not self._is_over:
                producer.topic.add_refused(producer, failure, was_judged=False)
            return
        async with step("txn-write:append"):
            count = 0
            for _ in range(entries):
                if self._is_over:  # closed, or the log refused one
                    break
                count += self._take()
            await buffer.appended(permit, count)


def wire_refusal(producer: Producer, conflict: TransactionConflict) -> BraidError:
    """Other clients than Braid's own take code 23 as the answer to a SEND for a reason to reconnect and send it again."""
    return conflict if producer.link.is_braid else NotAllowed(f"TransactionConflict: {conflict.message}")


def transaction_of(producer: Producer, send: Send, has_metadata: bool) -> TxnId | None:
    """The transaction of a message: what SEND says, else what its metadata says. Raises NotAllowed."""
    most, least = send.txn_most, send.txn_least
    if has_metadata and most is None and least is None:
        metadata = entry_metadata(send.entry)
        most, least = metadata.txnid_most_bits, metadata.txnid_least_bits
    if most is None and least is None:
        return None
    if most is None or least is None:
        raise NotAllowed(f"Message {send.sequence_id} names half of a transaction id; the producer's client is at fault.")
    if not producer.topic.service.transactions.config.enabled:
        raise NotAllowed("This broker has no transactions (transactions.enabled is off); send the message without one.")
    return TxnId(most, least)
