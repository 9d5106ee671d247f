"""`TopicConsumer`: a consumer's lane from one topic or partition.

Owns permits, unpacking entries, grouped acknowledgements, and subscribing again after a reconnect: what was received and not
handed out is dropped then, because it comes again.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import msgspec

from braid.client.attachment import Attachment
from braid.client.connection import Connection
from braid.client.messages import MessageId, messages_of
from braid.errors import BraidError, Closed, DeadlineExceeded, NotAllowed, ProtocolError, TooLarge, TransportError
from braid.model.ackset import acknowledged_up_to, full, to_words
from braid.model.positions import Position
from braid.wire import messages as pb
from braid.wire import requests
from braid.wire.chunks import ChunkAssembler, is_chunk
from braid.wire.client import Delivery
from braid.wire.commands import encode, signed64, unsigned64
from braid.wire.compression import decompress
from braid.wire.entries import entry_metadata, payload_offset
from braid.wire.types import AckType, CommandType, SubType

if TYPE_CHECKING:
    from braid.client.consumer import Consumer

log = logging.getLogger(__name__)


class TopicConsumer(Attachment):
    """The lane from one topic or partition."""

    def __init__(self, owner: Consumer, topic: str, partition: int) -> None:
        super().__init__(owner.client, topic)
        self.consumer_id = owner.client.new_id()
        self.partition = partition
        self.is_ended = False
        self._owner = owner
        self._is_shared = owner.sub_type is SubType.SHARED
        self._epoch = 0
        self._attachments = 0
        self._used = 0
        """Permits used up and not yet granted again."""
        self._chunks = ChunkAssembler(self.config.max_chunked_messages, self.config.max_message_bytes)
        self._open_batches: dict[Position, int] = {}
        self._acks: dict[Position, int] = {}
        """Individual acks to send: entry -> mask of what is still open in it."""
        self._ack_waiters: list[asyncio.Future[None]] = []
        self._are_acks_queued = False
        self._redeliver: dict[Position, None] = {}

    # The connection's side.

    async def attach(self, connection: Connection) -> None:
        owner = self._owner
        self._attachments += 1
        owner.drop_queued(self)
        self._chunks.clear()
        self._open_batches.clear()
        self._used = 0
        connection.consumers[self.consumer_id] = self
        try:
            await connection.request(
                lambda number: requests.subscribe(
                    number,
                    self.consumer_id,
                    self.topic,
                    owner.subscription,
                    owner.sub_type,
                    owner.name,
                    initial_position=owner.initial,
                    consumer_epoch=None if self._is_shared else self._epoch,
                )
            )
        except BaseException:
            connection.consumers.pop(self.consumer_id, None)
            raise

    def begin(self, connection: Connection) -> None:
        connection.write(requests.flow(self.consumer_id, self.config.receiver_queue))
        if self._acks:
            self._queue_acks()

    def is_registered(self, connection: Connection) -> bool:
        return connection.consumers.get(self.consumer_id) is self

    def delivered(self, delivery: Delivery) -> None:
        command = delivery.command
        if command.HasField("consumer_epoch") and signed64(command.consumer_epoch) < self._epoch:
            self.consumed(_count(delivery.entry))  # sent before our request to start again
            return
        where = command.message_id
        message_id = MessageId(signed64(where.ledgerId), signed64(where.entryId), self.partition)
        try:
            metadata = entry_metadata(delivery.entry)
            payload = delivery.entry[payload_offset(delivery.entry) :]
            chunks: tuple[MessageId, ...] = ()
            if is_chunk(metadata):
                whole, given_up = self._chunks.add(metadata, payload, Position(message_id.ledger_id, message_id.entry_id))
                for lost in given_up:
                    log.warning("chunks of message %s on %s do not fit together and are dropped", lost.uuid, self.topic)
                    self._ack_entries(lost.positions)
                if whole is None:
                    self.consumed(1)
                    return
                payload = whole.payload
                chunks = tuple(MessageId(*position, self.partition) for position in whole.positions[:-1])
            payload = decompress(metadata.compression, payload, metadata.uncompressed_size, self.config.max_message_bytes)
            found = messages_of(self.topic, message_id, metadata, payload, command.redelivery_count, list(command.ack_set))
        except (ProtocolError, TooLarge) as error:
            log.error("the entry %s of %s cannot be read and is left out: %s", message_id, self.topic, error)
            self._report_unreadable(message_id)
            return
        if chunks:
            found = [msgspec.structs.replace(found[0], chunks=chunks)]
        self._owner.put(self, found)

    def ended(self) -> None:
        self.is_ended = True
        self._owner.wake()

    def failed(self, error: BraidError) -> None:
        for waiter in self._ack_waiters:
            if not waiter.done():
                waiter.set_exception(type(error)(*error.args))
        self._ack_waiters = []
        self._owner.wake()

    # The application's side.

    def consumed(self, count: int) -> None:
        """Messages left the queue: grant the broker as many more, in portions."""
        self._used += count
        if self._used >= max(1, self.config.receiver_queue // 2) and self.connection is not None:
            self.connection.write(requests.flow(self.consumer_id, self._used))
            self._used = 0

    def acknowledge(self, message_id: MessageId) -> None:
        """Acknowledge one message; sent with the others of this loop turn."""
        position = Position(message_id.ledger_id, message_id.entry_id)
        still_open = 0
        if message_id.batch_index >= 0:
            mask = self._open_batches.get(position, full(message_id.batch_size))
            still_open = mask & ~(1 << message_id.batch_index)
            if still_open:
                self._open_batches[position] = still_open
            else:
                self._open_batches.pop(position, None)
        self._acks[position] = self._acks.get(position, -1) & still_open  # one that waits for a connection knows of others
        self._queue_acks()

    async def acknowledged(self) -> None:
        """Return once the broker has every ack so far durable."""
        if not self._acks:
            # Nothing is queued here, but earlier acks may have left without a receipt: an empty request covers them.
            await self._confirm({})
            return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ack_waiters.append(done)
        await done

    async def acknowledge_cumulative(self, message_id: MessageId, *, wait: bool) -> None:
        if self._is_shared:
            raise NotAllowed("A Shared subscription cannot be acknowledged cumulatively; acknowledge each message.")
        mask = 0
        if message_id.batch_index >= 0:
            mask = acknowledged_up_to(message_id.batch_size, message_id.batch_index)
        where = message_id_data(Position(message_id.ledger_id, message_id.entry_id), mask)
        await self.attached.wait()
        connection = self._attached_connection()
        if wait:
            await connection.request(lambda number: requests.ack(self.consumer_id, [where], AckType.CUMULATIVE, number))
        else:
            connection.write(requests.ack(self.consumer_id, [where], AckType.CUMULATIVE))

    def negative_acknowledge(self, message_id: MessageId) -> None:
        if not self._redeliver:
            self.clock.call_later(self.config.redelivery_delay, self._send_redeliver)
        self._redeliver[Position(message_id.ledger_id, message_id.entry_id)] = None

    async def seek(self, target: pb.MessageIdData | int) -> None:
        """Move the subscription; the broker closes the consumer, which then subscribes again."""
        self.check_usable()
        await self.attached.wait()
        before = self._attachments
        connection = self._attached_connection()
        await connection.request(lambda number: requests.seek(number, self.consumer_id, target))
        if self._attachments == before and self.connection is not None:
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
        await self.shut()

    async def unsubscribe(self, force: bool) -> None:
        connection = self._attached_connection()
        await connection.request(lambda number: requests.unsubscribe(number, self.consumer_id, force))

    # Inside.

    def _attached_connection(self) -> Connection:
        self.check_usable()
        if self.connection is None:
            raise TransportError(f"The consumer of {self.topic} has lost its connection; try again.")
        return self.connection

    def _queue_acks(self) -> None:
        if not self._are_acks_queued:
            self._are_acks_queued = True
            asyncio.get_running_loop().call_soon(self._send_acks)

    def _send_acks(self) -> None:
        self._are_acks_queued = False
        connection = self.connection
        if connection is None or not self._acks:
            return  # sent when the consumer is attached again
        acks, self._acks = self._acks, {}
        waiters, self._ack_waiters = self._ack_waiters, []
        if waiters:
            self._tasks.spawn(self._confirm_for(acks, waiters), "ack")
        else:
            connection.write(requests.ack(self.consumer_id, _ids(acks)))

    async def _confirm(self, acks: dict[Position, int]) -> None:
        connection = self._attached_connection()
        await connection.request(lambda number: requests.ack(self.consumer_id, _ids(acks), request_id=number))

    async def _confirm_for(self, acks: dict[Position, int], waiters: list[asyncio.Future[None]]) -> None:
        try:
            await self._confirm(acks)
        except TransportError:
            # Nobody knows whether they arrived; they are sent again by the next attachment, which is harmless.
            for position, mask in acks.items():
                self._acks[position] = self._acks.get(position, -1) & mask
            self._ack_waiters += waiters
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
        for position in positions:
            self._acks[position] = 0
        self._queue_acks()

    def _report_unreadable(self, message_id: MessageId) -> None:
        """Tell the broker that this entry cannot be used by anybody; it is acknowledged with the reason."""
        self.consumed(1)
        if self.connection is not None:
            body = pb.CommandAck(consumer_id=self.consumer_id, ack_type=int(AckType.INDIVIDUAL))  # type: ignore[arg-type]
            body.message_id.append(message_id_data(Position(message_id.ledger_id, message_id.entry_id), 0))
            body.validation_error = 3  # type: ignore[assignment]
            self.connection.write(encode(CommandType.ACK, body))

    def _send_redeliver(self) -> None:
        wanted, self._redeliver = self._redeliver, {}
        if self.connection is None or not wanted:
            return  # a new attachment delivers everything unacknowledged anyway
        if self._is_shared:
            self.connection.write(requests.redeliver(self.consumer_id, [message_id_data(position, 0) for position in wanted]))
            return
        # One consumer at a time: the broker starts again at the first unacknowledged message.
        self._epoch += 1
        self._owner.drop_queued(self)
        self.connection.write(requests.redeliver(self.consumer_id, (), self._epoch))


def message_id_data(position: Position, mask: int) -> pb.MessageIdData:
    """An entry on the wire; `mask` says which messages of its batch are still open."""
    found = pb.MessageIdData(ledgerId=unsigned64(position.ledger_id), entryId=unsigned64(position.entry_id))
    if mask:
        found.ack_set.extend(to_words(mask))
    return found


def _ids(acks: dict[Position, int]) -> list[pb.MessageIdData]:
    return [message_id_data(position, mask) for position, mask in acks.items()]


def _count(entry: bytes) -> int:
    return max(entry_metadata(entry).num_messages_in_batch, 1)
