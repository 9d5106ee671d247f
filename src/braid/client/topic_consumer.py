"""`TopicConsumer`: a consumer's lane from one topic, partition or segment.

Owns permits, grouped acknowledgements, and subscribing again after a reconnect: what was received and not
handed out is dropped then, because it comes again. What is done with the messages is its owner's business.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from typing import TYPE_CHECKING, Any

from braid.client.attachment import Attachment
from braid.client.connection import UNASKED, Connection
from braid.client.consumer_entries import EntryReader, permits_of, position_of
from braid.client.consumer_lanes import NO_GAPS, LaneOptions, LaneOwner, in_commands, message_id_data, up_to_data
from braid.client.individual_acks import IndividualAcks
from braid.client.messages import MessageId, is_after
from braid.client.transaction_acks import TransactionAcks
from braid.errors import (
    BraidError,
    Closed,
    ConsumerBusy,
    DeadlineExceeded,
    NotAllowed,
    RequestError,
    TransportError,
)
from braid.model.positions import Position
from braid.wire import messages as pb
from braid.wire import requests
from braid.wire.client import Delivery
from braid.wire.commands import encode, signed64
from braid.wire.types import AckType, CommandType, SubType

if TYPE_CHECKING:
    from braid.client.client import Client
    from braid.client.transactions import Transaction

log = logging.getLogger(__name__)
BUSY_PAUSE = 1.0
"""Longest pause before asking again for a subscription that another consumer is about to leave, in seconds."""


class TopicConsumer(Attachment):
    """The lane from one topic, partition or segment."""

    def __init__(self, client: Client, owner: LaneOwner, topic: str, options: LaneOptions) -> None:
        super().__init__(client, topic)
        self.consumer_id = client.new_id()
        self.options = options
        self.segment_id = options.segment_id
        self.is_ended = False
        self.tried = asyncio.Event()
        """Set once the first attempt of `open_soon` has succeeded, or is refused for good or because others hold the place."""
        self._owner = owner
        self._is_shared = options.sub_type is SubType.SHARED
        self._epoch = 0
        self.attachments = 0
        """How often it was tried to attach."""
        self.was_attached = False
        """Whether the broker has let it in at least once: a durable subscription exists from then on."""
        self.is_busy = False
        """Whether the last attempt of `open_soon` was refused because others hold the place."""
        self._granted = 0
        """Messages the broker may send, is sending, or has sent and that are still in the owner's queue."""
        self._refill = 0
        """How few are left when it is granted more."""
        self._up_to: MessageId | None = None
        """A cumulative ack to send."""
        self._entries = EntryReader(topic, options, self.config)
        self._acks = IndividualAcks()
        self._ack_waiters: list[asyncio.Future[None]] = []
        self._are_acks_queued = False
        self._redeliver: dict[Position, None] = {}
        self.transactional = TransactionAcks(self)

    # The connection's side.

    def open_soon(self) -> None:
        """Attach in the background, for as long as it takes; a place that another consumer still holds is asked for again."""
        self._tasks.spawn(self._open_soon(), "attach")

    async def _open_soon(self) -> None:
        pause = self.config.backoff_initial
        while self.connection is None:
            try:
                await self._attach_once()
            except BraidError as error:
                if self.is_final(error):
                    self.end(error)
                    return
                if is_busy := isinstance(error, ConsumerBusy):
                    self.is_busy = True
                    self.tried.set()
                log.info("attaching to %s failed, trying again: %s", self.topic, error)
                await self.clock.sleep(pause * (0.5 + self.client.runtime.random.random()))
                pause = min(pause * 2, BUSY_PAUSE if is_busy else self.config.backoff_max, self.config.backoff_max)
        self.tried.set()
        await self._stay()

    async def attach(self, connection: Connection) -> None:
        self.attachments += 1
        await self._subscribe(connection)
        # Nothing comes before permits are given.
        self.is_ended = False  # told again, if it is still so
        self._owner.drop_queued(self)
        self._entries.clear()
        self._acks.forget_batches()
        self._granted = 0

    async def _subscribe(self, connection: Connection) -> None:
        options = self.options
        connection.consumers[self.consumer_id] = self
        try:
            await connection.request(
                lambda number: requests.subscribe(
                    number,
                    self.consumer_id,
                    self.topic,
                    options.subscription,
                    options.sub_type,
                    options.name,
                    is_durable=options.is_durable,
                    start=self._start(),
                    initial_position=options.initial,
                    schema=options.codec.schema,
                    metadata={NO_GAPS: "true"} if options.has_no_gaps else None,
                    consumer_epoch=None if self._is_shared else self._epoch,
                    resets=options.resets,
                )
            )
        except BaseException as error:
            self._leave(connection, is_refused=isinstance(error, RequestError))
            raise

    def _leave(self, connection: Connection, *, is_refused: bool = False) -> None:
        """Give up an attempt to attach: a consumer that is let in now would hold its place for nobody."""
        connection.consumers.pop(self.consumer_id, None)
        if not is_refused and connection.is_open:
            connection.write(requests.close_consumer(UNASKED, self.consumer_id))

    def _start(self) -> pb.MessageIdData | None:
        """Where a lane that is not durable begins."""
        return None

    def begin(self, connection: Connection) -> None:
        self.was_attached = True
        self._send_acks()
        window = self._granted = self._owner.window()
        self._refill = window // 2
        connection.write(requests.flow(self.consumer_id, window))

    def is_registered(self, connection: Connection) -> bool:
        return connection.consumers.get(self.consumer_id) is self

    def delivered(self, delivery: Delivery) -> None:
        command = delivery.command
        if command.HasField("consumer_epoch") and signed64(command.consumer_epoch) < self._epoch:
            self.consumed(permits_of(delivery))  # sent before our request to start again
            return
        found, permits, given_up, is_readable = self._entries.read(delivery)
        if given_up:
            self._ack_entries(given_up)
        if not is_readable:
            self._report_unreadable(position_of(delivery))
        if found:
            self._owner.put(self, found)
        if len(found) < permits:
            self.consumed(permits - len(found))

    def ended(self) -> None:
        self.is_ended = True
        self._owner.lane_ended(self)

    def failed(self, error: BraidError) -> None:
        for waiter in self._ack_waiters:
            if not waiter.done():
                waiter.set_exception(type(error)(*error.args))
        self._ack_waiters = []
        self.tried.set()
        self.attached.set()  # whoever waits for a connection finds the failure
        self._owner.lane_failed(self, error)

    # The application's side.

    def consumed(self, count: int) -> None:
        """Messages left the queue: grant the broker as many more, in portions."""
        self._granted -= count
        if self._granted <= self._refill and self.connection is not None:
            window = self._owner.window()  # it changes with the number of lanes
            self._refill = window // 2
            if self._granted <= self._refill:
                # At once: the application may go on with what is queued for a while, and the broker sends meanwhile.
                self.connection.write_now(requests.flow(self.consumer_id, window - self._granted))
                self._granted = window

    def acknowledge(self, message_id: MessageId) -> None:
        """Acknowledge one message; sent with the others of this loop turn."""
        if self._acks.extends_run(message_id):
            return  # what it follows is queued
        self._acks.add(message_id)
        if not self._are_acks_queued:
            self._queue_acks()

    async def acknowledged(self) -> None:
        """Return once the broker has every ack so far durable."""
        self.check_usable()
        if not self._acks:
            # Nothing is queued here, but earlier acks may have left without a receipt: an empty request covers them.
            await self._confirm({})
            return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ack_waiters.append(done)
        await done

    async def acknowledge_cumulative(self, message_id: MessageId, *, wait: bool) -> None:
        self.check_cumulative()
        self.check_usable()
        if not wait:
            self.acknowledge_up_to(message_id)
            return
        where = up_to_data(message_id)
        await self.attached.wait()
        connection = self._attached_connection()
        await connection.request(lambda number: requests.ack(self.consumer_id, [where], AckType.CUMULATIVE, number))

    def check_cumulative(self) -> None:
        if self._is_shared:
            raise NotAllowed("A Shared subscription cannot be acknowledged cumulatively; acknowledge each message.")

    def acknowledge_up_to(self, message_id: MessageId) -> None:
        """Acknowledge cumulatively; sent at the end of this loop turn, or when the lane is attached again."""
        if self._up_to is None or is_after(message_id, self._up_to):
            self._up_to = message_id
        if not self._are_acks_queued:
            self._queue_acks()

    def forget_acks(self) -> None:
        """Send nothing of what waits to be acknowledged: the subscription was set back since."""
        self._up_to = None
        self._acks.clear()

    async def confirm_up_to(self, message_id: MessageId) -> None:
        """Acknowledge cumulatively and return once the broker has that durable, over reconnects."""
        where = up_to_data(message_id)
        while True:
            await self.attached.wait()
            try:
                connection = self._attached_connection()
                await connection.request(lambda number: requests.ack(self.consumer_id, [where], AckType.CUMULATIVE, number))
                return
            except TransportError:
                await asyncio.sleep(0)  # the connection tells its objects that it ended, then we are attached again

    async def last_message_id(self) -> MessageId:
        """The last message stored at the moment; ledger id -1 if there is none."""
        await self.attached.wait()
        return await self.last_message_id_at(self._attached_connection())

    async def last_message_id_at(self, connection: Connection) -> MessageId:
        body = await connection.request(lambda number: requests.get_last_message_id(number, self.consumer_id))
        found, options = body.last_message_id, self.options
        index = found.batch_index if found.HasField("batch_index") else -1
        ledger_id, entry_id = signed64(found.ledgerId), signed64(found.entryId)
        return MessageId(ledger_id, entry_id, options.partition, index, segment_id=options.segment_id)

    def redeliver(self, positions: Iterable[Position]) -> None:
        """Have these entries sent again, to any consumer of the Shared subscription."""
        if self.connection is not None:  # a new attachment gets everything unacknowledged anyway
            self.connection.write(requests.redeliver(self.consumer_id, [message_id_data(each, 0) for each in positions]))

    def start_again(self) -> None:
        """Have everything unacknowledged sent again, from the first on; not for Shared subscriptions."""
        self._epoch += 1
        self._owner.drop_queued(self)
        self._send_acks()
        if self.connection is not None:
            self.connection.write(requests.redeliver(self.consumer_id, (), self._epoch))

    def negative_acknowledge(self, message_id: MessageId) -> None:
        if not self._redeliver:
            self.clock.call_later(self.config.redelivery_delay, self._send_redeliver)
        self._redeliver[Position(message_id.ledger_id, message_id.entry_id)] = None

    async def seek(self, target: pb.MessageIdData | int) -> None:
        """Move the subscription; the broker closes the consumer, which then subscribes again."""
        self.check_usable()
        await self.attached.wait()
        self._send_acks()  # those of before the seek must not come after it
        before = self.attachments
        connection = self._attached_connection()
        await connection.request(lambda number: requests.seek(number, self.consumer_id, target))
        if self.attachments == before and self.connection is not None:
            self._owner.drop_queued(self)
        self.is_ended = False
        await self.attached.wait()

    async def close(self) -> None:
        if self.is_closed:
            return
        connection = self.connection
        if connection is not None:
            self._send_acks()
            connection.consumers.pop(self.consumer_id, None)
            try:
                await connection.request(lambda number: requests.close_consumer(number, self.consumer_id))
            except (TransportError, DeadlineExceeded):
                pass  # the connection's end closes the consumer as well
            except RequestError as error:
                log.info("the broker does not know the consumer of %s: %s", self.topic, error)  # closed by it meanwhile
        await self.shut()

    async def unsubscribe(self, force: bool) -> None:
        connection = self._attached_connection()
        await connection.request(lambda number: requests.unsubscribe(number, self.consumer_id, force))

    # For transactions.

    def transaction_ended(self, txn: Transaction, /, *, is_committed: bool) -> None:
        """What it held comes again unless it is committed: one by one to anybody who shares the subscription, else in order
        from the first on, which the broker must not mix with what it sent before."""
        self.transactional.forget(txn)
        if not is_committed and not self._is_shared and not self.is_closed and self.failure is None:
            self.start_again()

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run something that ends with the lane."""
        self._tasks.spawn(work, name)

    def attached_connection(self) -> Connection:
        """Raises why there is none."""
        return self._attached_connection()

    # Inside.

    def _attached_connection(self) -> Connection:
        self.check_usable()
        if self.connection is None:
            raise TransportError(f"The consumer of {self.topic} has lost its connection; try again.")
        return self.connection

    def _queue_acks(self) -> None:
        self._are_acks_queued = True
        asyncio.get_running_loop().call_soon(self._send_acks)

    def _send_acks(self) -> None:
        self._are_acks_queued = False
        connection = self.connection
        if connection is None:
            return  # sent when the consumer is attached again
        if self._up_to is not None:
            connection.write(requests.ack(self.consumer_id, [up_to_data(self._up_to)], AckType.CUMULATIVE))
            self._up_to = None
        if not self._acks:
            return
        acks = self._acks.take()
        waiters, self._ack_waiters = self._ack_waiters, []
        if waiters:
            self._tasks.spawn(self._confirm_for(acks, waiters), "ack")
        else:
            for ids in in_commands(_ids(acks)):
                connection.write(requests.ack(self.consumer_id, ids))

    async def _confirm(self, acks: dict[tuple[int, int], int]) -> None:
        connection = self._attached_connection()
        await asyncio.gather(
            *(
                connection.request(lambda number, ids=ids: requests.ack(self.consumer_id, ids, request_id=number))  # type: ignore[misc]
                for ids in in_commands(_ids(acks))
            )
        )

    async def _confirm_for(self, acks: dict[tuple[int, int], int], waiters: list[asyncio.Future[None]]) -> None:
        try:
            await self._confirm(acks)
        except TransportError:
            # Nobody knows whether they arrived; they are sent again by the next attachment, which is harmless.
            self._acks.put_back(acks)
            self._ack_waiters += waiters
            if not self._are_acks_queued:
                self._queue_acks()
        except BraidError as error:
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_exception(type(error)(*error.args))
        except asyncio.CancelledError:  # closed before the answer came
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_exception(Closed(f"The consumer of {self.topic} was closed."))
            raise
        else:
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    def _ack_entries(self, positions: list[Position]) -> None:
        self._acks.add_entries(positions)
        if not self._are_acks_queued:
            self._queue_acks()

    def _report_unreadable(self, position: Position) -> None:
        """Tell the broker that this entry cannot be used by anybody; it is acknowledged with the reason."""
        if self.connection is not None:
            body = pb.CommandAck(consumer_id=self.consumer_id, ack_type=int(AckType.INDIVIDUAL))  # type: ignore[arg-type]
            body.message_id.append(message_id_data(position, 0))
            body.validation_error = 3  # type: ignore[assignment]
            self.connection.write(encode(CommandType.ACK, body))

    def _send_redeliver(self) -> None:
        wanted, self._redeliver = self._redeliver, {}
        if self.connection is None or not wanted:
            return  # a new attachment delivers everything unacknowledged anyway
        if self._is_shared:
            self.redeliver(wanted)
        else:  # one consumer at a time: the broker starts again at the first unacknowledged message
            self.start_again()


def _ids(acks: dict[tuple[int, int], int]) -> list[pb.MessageIdData]:
    return [message_id_data(position, mask) for position, mask in acks.items()]
