"""`TransactionAcks`: the acknowledgments of one consumer lane that are made under transactions.

Owns their grouping (those of one loop turn leave together) and sending them again after a lost place, which is harmless: for
brokers, a transaction that repeats itself is no conflict. So it is here that a message is noticed which the application got
twice, and would deal with twice, in one transaction (INV14). Each group is tracked by its transaction, so that nothing is
committed before the broker holds it. What the lane makes of a transaction's end is the lane's business.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from typing import TYPE_CHECKING
from weakref import ref

from braid.client.consumer_lanes import ACKS_PER_COMMAND, message_id_data, up_to_data
from braid.client.messages import Message, MessageId, is_after
from braid.client.transactions import Transaction
from braid.errors import (
    BraidError,
    Closed,
    ConsumerNotFound,
    DeadlineExceeded,
    MetadataFailure,
    TransactionConflict,
    TransportError,
    Unavailable,
)
from braid.model.ackset import full
from braid.wire import messages as pb
from braid.wire import requests
from braid.wire.types import AckType

if TYPE_CHECKING:
    from braid.client.topic_consumer import TopicConsumer

log = logging.getLogger(__name__)
PASSING = (TransportError, Unavailable, MetadataFailure, ConsumerNotFound)
"""Answers, or none, after which the same acknowledgment is sent again."""


class _Group:
    """Acknowledgments of one transaction that leave together."""

    __slots__ = ("done", "sizes", "still_open", "up_to")

    def __init__(self, done: asyncio.Future[None]) -> None:
        self.done = done
        self.still_open: dict[tuple[int, int], int] = {}
        """Entry -> messages of its batch that this group does not acknowledge."""
        self.sizes: dict[tuple[int, int], int] = {}
        self.up_to: MessageId | None = None
        """Cumulative: everything up to here."""

    def add(self, message_id: MessageId) -> None:
        position = message_id.ledger_id, message_id.entry_id
        if message_id.batch_index < 0:
            self.still_open[position] = 0
            return
        left = self.still_open.get(position)
        if left is None:
            left = full(message_id.batch_size)
            self.sizes[position] = message_id.batch_size
        self.still_open[position] = left & ~(1 << message_id.batch_index)

    def ids(self) -> list[pb.MessageIdData]:
        if self.up_to is not None:
            found = up_to_data(self.up_to)
            if found.ack_set:
                found.batch_size = self.up_to.batch_size
            return [found]
        wanted = []
        for position, mask in self.still_open.items():
            found = message_id_data(position, mask)
            if mask:
                found.batch_size = self.sizes[position]
            wanted.append(found)
        return wanted


class TransactionAcks:
    """Of one lane."""

    def __init__(self, lane: TopicConsumer) -> None:
        self._lane = lane
        self._groups: dict[tuple[Transaction, AckType], _Group] = {}
        self._full: list[tuple[Transaction, AckType, _Group]] = []
        """Groups that are as large as a command may be."""
        self._received: dict[Transaction, dict[MessageId, ref[Message]]] = {}
        """What open transactions have acknowledged one by one, as the application got it."""

    def deal_with(self, txn: Transaction, message: Message) -> None:
        """The application acknowledges what it received. Raises TransactionConflict, and the transaction fails, if it has done
        so in this transaction with the same message when it came before: after a lost connection, or an ack timeout."""
        txn.hold(self._lane)
        first = self._received.setdefault(txn, {}).setdefault(message.id, ref(message))
        if first() is not message:
            error = TransactionConflict(
                f"The message {message.id} of {self._lane.topic} was received a second time, after a lost connection or because"
                f" it took too long, and transaction {txn.id} has acknowledged it already; begin another with what comes then."
            )
            txn.fail(error)
            raise error

    def acknowledged_in(self, txn: Transaction) -> Collection[MessageId]:
        """The messages that `deal_with` has seen in it."""
        return self._received.get(txn, ())

    def forget(self, txn: Transaction) -> None:
        """The transaction has ended."""
        self._received.pop(txn, None)

    def one(self, txn: Transaction, message_id: MessageId) -> asyncio.Future[None]:
        """Acknowledge one message; the future is done when the broker holds that for the transaction."""
        group = self._group(txn, AckType.INDIVIDUAL)
        group.add(message_id)
        return group.done

    def up_to(self, txn: Transaction, message_id: MessageId) -> asyncio.Future[None]:
        """The same for everything up to a message."""
        group = self._group(txn, AckType.CUMULATIVE)
        if group.up_to is None or is_after(message_id, group.up_to):
            group.up_to = message_id
        return group.done

    def _group(self, txn: Transaction, kind: AckType) -> _Group:
        try:
            self._lane.check_usable()
        except BraidError as error:
            txn.fail(error)
            raise
        found = self._groups.get((txn, kind))
        if found is not None and len(found.still_open) >= ACKS_PER_COMMAND:
            self._full.append((txn, kind, self._groups.pop((txn, kind))))
            found = None
        if found is None:
            txn.check_open()
            loop = asyncio.get_running_loop()
            found = _Group(loop.create_future())
            txn.track(found.done)
            txn.hold(self._lane)
            if not self._groups and not self._full:
                loop.call_soon(self._send)
            self._groups[txn, kind] = found
        return found

    def _send(self) -> None:
        groups = [*self._full, *((txn, kind, group) for (txn, kind), group in self._groups.items())]
        self._full, self._groups = [], {}
        for txn, kind, group in groups:
            try:
                self._lane.spawn(self._confirm(txn, kind, group), f"ack in {txn.id}")
            except RuntimeError:  # closed in this very turn
                _fail(group, Closed(f"The use of {self._lane.topic} was closed."))

    async def _confirm(self, txn: Transaction, kind: AckType, group: _Group) -> None:
        try:
            await self._ask(txn, kind, group.ids())
        except BraidError as error:
            _fail(group, error)
        except asyncio.CancelledError:  # closed before the answer came
            _fail(group, Closed(f"The use of {self._lane.topic} was closed before it was acknowledged in {txn.id}."))
            raise
        else:
            if not group.done.done():
                group.done.set_result(None)

    async def _ask(self, txn: Transaction, kind: AckType, ids: list[pb.MessageIdData]) -> None:
        lane = self._lane
        deadline = lane.clock.monotonic() + lane.config.operation_timeout
        pause = lane.config.backoff_initial
        while True:
            await self._attached(deadline)
            connection = lane.attached_connection()
            try:
                await connection.request(lambda number: requests.ack(lane.consumer_id, ids, kind, number, txn.id))
                return
            except PASSING as error:
                if lane.clock.monotonic() + pause >= deadline or txn.state not in ("OPEN", "COMMITTING"):
                    raise
                log.info("acknowledging %s in transaction %s again: %s", lane.topic, txn.id, error)
            if connection.is_open:
                await lane.clock.sleep(pause)
                pause = min(pause * 2, lane.config.backoff_max)
            else:
                await asyncio.sleep(0)  # the connection tells its objects that it ended

    async def _attached(self, deadline: float) -> None:
        lane = self._lane
        if lane.attached.is_set():
            return
        try:
            async with asyncio.timeout(max(0.0, deadline - lane.clock.monotonic())):
                await lane.attached.wait()
        except TimeoutError:
            raise DeadlineExceeded(
                f"The consumer of {lane.topic} was not connected for {lane.config.operation_timeout:g} s, so what was "
                "acknowledged in a transaction did not reach the broker."
            ) from None


async def acknowledge_in(
    txn: Transaction, lane: TopicConsumer, message: Message | MessageId, message_id: MessageId, *, wait: bool
) -> None:
    """Acknowledge one message, all its chunks included, under a transaction."""
    if isinstance(message, Message):
        lane.transactional.deal_with(txn, message)
        for chunk in message.chunks:
            lane.transactional.one(txn, chunk)
    held = lane.transactional.one(txn, message_id)
    if wait:
        await asyncio.shield(held)


def _fail(group: _Group, error: BraidError) -> None:
    if not group.done.done():
        group.done.set_exception(error)
        group.done.exception()  # nobody may be waiting; that is no reason for a warning
