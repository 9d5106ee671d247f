"""`Producer`: sends messages and completes each when the broker has it durable; order per partition is kept over reconnects.

`TopicProducer` is the lane to one topic or partition: batches, the bounded window of unacknowledged entries, re-sending them in
order after a reconnect. `Producer` chooses the lane.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from braid.client.attachment import Attachment
from braid.client.connection import Connection
from braid.client.messages import MessageId
from braid.errors import (
    BraidError,
    ChecksumMismatch,
    Closed,
    ConnectionLost,
    DeadlineExceeded,
    NotAllowed,
    Overloaded,
    TooLarge,
    TopicTerminated,
    TransportError,
    from_code,
)
from braid.model.hashing import masked, murmur3_x86_32
from braid.runtime.clock import Timer
from braid.wire import messages as pb
from braid.wire import requests
from braid.wire.batch import encode_batch
from braid.wire.commands import signed64, unsigned64
from braid.wire.compression import compress
from braid.wire.entries import build_entry
from braid.wire.frames import DEFAULT_MAX_MESSAGE_SIZE
from braid.wire.types import CompressionType

if TYPE_CHECKING:
    from braid.client.client import Client

REFUSED = (ChecksumMismatch, NotAllowed, TooLarge)
"""Answers to a SEND that concern this one message; after any other the window is sent again."""
Sent = asyncio.Future[MessageId]


class _Draft:
    """A message on its way into an entry."""

    __slots__ = ("done", "key", "payload", "properties", "sequence_id")

    def __init__(
        self, payload: bytes, key: str | None, properties: Mapping[str, str] | None, sequence_id: int, done: Sent
    ) -> None:
        self.payload = payload
        self.key = key
        self.properties = properties
        self.sequence_id = sequence_id
        self.done = done


class _Pending:
    """An entry sent and not answered yet."""

    __slots__ = ("deadline", "drafts", "entry", "is_batch")

    def __init__(self, drafts: list[_Draft], entry: bytes, is_batch: bool, deadline: float) -> None:
        self.drafts = drafts
        self.entry = entry
        self.is_batch = is_batch
        self.deadline = deadline

    @property
    def sequence_id(self) -> int:
        return self.drafts[0].sequence_id

    def frame(self, producer_id: int) -> bytes:
        highest = self.drafts[-1].sequence_id if self.is_batch else None
        return requests.send(producer_id, self.sequence_id, self.entry, len(self.drafts), highest)


class TopicProducer(Attachment):
    """The lane to one topic or partition."""

    def __init__(
        self, client: Client, topic: str, name: str | None, batching: bool, compression: CompressionType, partition: int
    ) -> None:
        super().__init__(client, topic)
        self.producer_id = client.new_id()
        self.name = name
        self.last_sequence_id = -1
        """Of the newest message handed in; restored from the broker when it deduplicates."""
        self._partition = partition
        self._is_named = name is not None
        self._batching = batching
        self._compression = compression
        self._epoch = 0
        self._max_size = DEFAULT_MAX_MESSAGE_SIZE
        self._batch: list[_Draft] = []
        self._batch_bytes = 0
        self._batch_timer: Timer | asyncio.Handle | None = None
        self._pending: deque[_Pending] = deque()
        self._waiting = 0
        self._room = asyncio.Event()
        self._room.set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._timeout: Timer | None = None

    # The application's side.

    def send(self, payload: bytes, key: str | None, properties: Mapping[str, str] | None, sequence_id: int | None) -> Sent:
        """Queue a message; the future is done when it is durable. Raises Overloaded if the window is full."""
        self.check_usable()
        if self._waiting >= self.config.max_pending_messages:
            raise Overloaded(
                f"The producer for {self.topic} has {self._waiting} unacknowledged messages, its limit; wait for `room()`."
            )
        if sequence_id is None:
            sequence_id = self.last_sequence_id + 1
        elif sequence_id <= self.last_sequence_id:
            raise NotAllowed(f"Sequence id {sequence_id} is not above the last one, {self.last_sequence_id}.")
        size = len(payload) + len(key or "") + sum(len(name) + len(value) for name, value in (properties or {}).items())
        if self._compression is CompressionType.NONE and size > self._max_size:
            raise TooLarge(f"A message of {size} bytes is above the broker's limit of {self._max_size} bytes.")
        self.last_sequence_id = sequence_id
        draft = _Draft(payload, key, properties, sequence_id, asyncio.get_running_loop().create_future())
        self._counted(1)
        if not self._batching:
            self._seal([draft], is_batch=False)
        else:
            limit = min(self.config.batch_max_bytes, self._max_size // 2)
            if self._batch and self._batch_bytes + size > limit:
                self.seal_batch()
            self._batch.append(draft)
            self._batch_bytes += size
            if len(self._batch) >= self.config.batch_max_messages or self._batch_bytes >= limit:
                self.seal_batch()
            elif self._batch_timer is None:
                delay = self.config.batch_delay
                loop = asyncio.get_running_loop()
                self._batch_timer = self.clock.call_later(delay, self.seal_batch) if delay else loop.call_soon(self.seal_batch)
        return draft.done

    async def room(self) -> None:
        """Return once the window takes another message and the socket takes bytes."""
        while self._waiting >= self.config.max_pending_messages:
            self.check_usable()
            await self._room.wait()
        if self.connection is not None:
            await self.connection.writable()

    async def flush(self) -> None:
        """Return once everything sent so far is answered."""
        self.seal_batch()
        await self._empty.wait()

    def seal_batch(self) -> None:
        """Make an entry of the messages collected and send it."""
        if self._batch_timer is not None:
            self._batch_timer.cancel()
            self._batch_timer = None
        if self._batch:
            batch, self._batch, self._batch_bytes = self._batch, [], 0
            self._seal(batch, is_batch=True)

    async def close(self) -> None:
        """Send what is left and leave the broker."""
        if self.is_closed:
            return
        if self.failure is None:
            self.seal_batch()
            if self.connection is not None:
                await self._empty.wait()
        connection = self.connection
        if connection is not None:
            connection.producers.pop(self.producer_id, None)
            try:
                await connection.request(lambda number: requests.close_producer(number, self.producer_id))
            except (TransportError, DeadlineExceeded):
                pass  # the connection's end closes the producer as well
        await self.shut()

    # The connection's side.

    async def attach(self, connection: Connection) -> None:
        self._epoch += 1
        connection.producers[self.producer_id] = self
        try:
            body = await connection.request(
                lambda number: requests.producer(number, self.producer_id, self.topic, self.name, epoch=self._epoch)
            )
        except BaseException:
            connection.producers.pop(self.producer_id, None)
            raise
        self.name = body.producer_name
        self._max_size = connection.max_message_size
        if self._epoch == 1 and body.HasField("last_sequence_id"):
            self.last_sequence_id = max(self.last_sequence_id, signed64(body.last_sequence_id))

    def begin(self, connection: Connection) -> None:
        for each in self._pending:
            connection.write(each.frame(self.producer_id))

    def is_registered(self, connection: Connection) -> bool:
        return connection.producers.get(self.producer_id) is self

    def receipt(self, body: Any) -> None:
        sequence_id = signed64(body.sequence_id)
        if not self._pending or sequence_id < self._pending[0].sequence_id:
            return  # of an entry that was sent again
        if sequence_id > self._pending[0].sequence_id:
            self._start_over(ConnectionLost(f"The broker skipped message {self._pending[0].sequence_id} of {self.topic}."))
            return
        done = self._pending.popleft()
        self.hold = 0.0
        ledger_id, entry_id = signed64(body.message_id.ledgerId), signed64(body.message_id.entryId)
        for index, draft in enumerate(done.drafts):
            if not draft.done.done():
                batch = (index, len(done.drafts)) if done.is_batch else (-1, 0)
                draft.done.set_result(MessageId(ledger_id, entry_id, self._partition, *batch))
        self._counted(-len(done.drafts))

    def send_failed(self, body: Any) -> None:
        error = from_code(body.error, body.message)
        if isinstance(error, TopicTerminated):
            self.failure = error
            self.failed(error)
            return
        if isinstance(error, REFUSED) and self._pending:
            refused = self._pending[0]
            if signed64(body.sequence_id) in (refused.sequence_id, refused.drafts[-1].sequence_id):
                self._pending.popleft()
                self._fail(refused, error)
                return
        self._start_over(error)

    def failed(self, error: BraidError) -> None:
        if self._timeout is not None:
            self._timeout.cancel()
            self._timeout = None
        self.seal_batch()
        while self._pending:
            self._fail(self._pending.popleft(), error)

    # Inside.

    def _seal(self, drafts: list[_Draft], *, is_batch: bool) -> None:
        metadata = pb.MessageMetadata(
            producer_name=self.name or "",
            sequence_id=unsigned64(drafts[0].sequence_id),
            publish_time=self.clock.now_ms(),
        )
        if is_batch:
            metadata.num_messages_in_batch = len(drafts)
            metadata.highest_sequence_id = unsigned64(drafts[-1].sequence_id)
            payload = encode_batch([(_describe(pb.SingleMessageMetadata(), each), each.payload) for each in drafts])
        else:
            _describe(metadata, drafts[0])
            payload = drafts[0].payload
        if self._compression is not CompressionType.NONE:
            metadata.compression = int(self._compression)  # type: ignore[assignment]
            metadata.uncompressed_size = len(payload)
            payload = compress(self._compression, payload)
        entry = build_entry(metadata, payload)
        pending = _Pending(drafts, entry, is_batch, self.clock.monotonic() + self.config.send_timeout)
        if len(entry) > self._max_size:
            text = f"A message of {len(entry)} bytes is above the broker's limit of {self._max_size} bytes."
            self._fail(pending, TooLarge(text))
            return
        self._pending.append(pending)
        if self._timeout is None:
            self._timeout = self.clock.call_later(self.config.send_timeout, self._check_timeout)
        if self.connection is not None:
            self.connection.write(pending.frame(self.producer_id))

    def _counted(self, change: int) -> None:
        self._waiting += change
        (self._room.clear if self._waiting >= self.config.max_pending_messages else self._room.set)()
        (self._empty.clear if self._waiting else self._empty.set)()

    def _fail(self, pending: _Pending, error: BraidError) -> None:
        for draft in pending.drafts:
            if not draft.done.done():
                draft.done.set_exception(type(error)(*error.args))
                draft.done.exception()  # nobody may be waiting; that is no reason for a warning
        self._counted(-len(pending.drafts))

    def _check_timeout(self) -> None:
        """Too old is too old for all: later ones must not overtake, so everything waiting fails."""
        self._timeout = None
        if not self._pending:
            return
        left = self._pending[0].deadline - self.clock.monotonic()
        if left > 0:
            self._timeout = self.clock.call_later(left, self._check_timeout)
            return
        error = DeadlineExceeded(
            f"{self.topic} acknowledged nothing for {self.config.send_timeout:g} s; it may still be stored."
        )
        while self._pending:
            self._fail(self._pending.popleft(), error)

    def _start_over(self, error: BraidError) -> None:
        """Register anew and send the whole window again, so that order is kept."""
        connection = self.connection
        if connection is not None:
            connection.producers.pop(self.producer_id, None)
            self.hold = min(self.hold * 2 or self.config.backoff_initial, self.config.backoff_max)
            self.detached(error)


def _describe(into: Any, draft: _Draft) -> Any:
    """Write a message's own fields into its metadata."""
    if draft.key is not None:
        into.partition_key = draft.key
    for name, value in (draft.properties or {}).items():
        into.properties.add(key=name, value=value)
    if isinstance(into, pb.SingleMessageMetadata):
        into.sequence_id = unsigned64(draft.sequence_id)
    return into


class Producer:
    """Sends messages to a topic. Made by `Client.producer`."""

    def __init__(self, client: Client, topic: str, name: str | None, batching: bool, compression: CompressionType) -> None:
        self.topic = topic
        self._client = client
        self._lane = partial(TopicProducer, client, name=name, batching=batching, compression=compression)
        self._lanes: list[TopicProducer] = []
        self._turn = 0

    @property
    def name(self) -> str:
        """The producer's name, given or taken from the broker."""
        return (self._lanes[0].name or "") if self._lanes else ""

    @property
    def last_sequence_id(self) -> int:
        """Sequence id of the newest message (of the first partition)."""
        return self._lanes[0].last_sequence_id

    async def open(self, topics: list[str]) -> None:
        """Attach to every partition."""
        for number, topic in enumerate(topics):
            lane = self._lane(topic=topic, partition=number if len(topics) > 1 or topic != self.topic else -1)
            self._lanes.append(lane)
            await lane.open()

    async def send(
        self,
        payload: bytes,
        *,
        key: str | None = None,
        properties: Mapping[str, str] | None = None,
        sequence_id: int | None = None,
    ) -> MessageId:
        """Send one message and return where it is stored, once it is durable."""
        lane = self._choose(key)
        await lane.room()
        return await lane.send(payload, key, properties, sequence_id)

    def send_nowait(
        self,
        payload: bytes,
        *,
        key: str | None = None,
        properties: Mapping[str, str] | None = None,
        sequence_id: int | None = None,
    ) -> Sent:
        """Send one message without waiting; the future gives its id. Raises Overloaded if the window is full: see `room()`."""
        return self._choose(key).send(payload, key, properties, sequence_id)

    async def room(self) -> None:
        """Return once every partition's window takes another message."""
        for lane in self._lanes:
            await lane.room()

    async def flush(self) -> None:
        """Return once everything sent so far is answered, well or badly."""
        for lane in self._lanes:
            await lane.flush()

    async def close(self) -> None:
        """Send what is left and close. Idempotent."""
        self._client.forget(self)
        for lane in self._lanes:
            await lane.close()

    def _choose(self, key: str | None) -> TopicProducer:
        if not self._lanes:
            raise Closed(f"The producer for {self.topic} is not open.")
        if len(self._lanes) == 1:
            return self._lanes[0]
        if key is not None:
            return self._lanes[masked(murmur3_x86_32(key.encode())) % len(self._lanes)]
        self._turn += 1
        return self._lanes[self._turn % len(self._lanes)]
