"""`Producer`: sends messages and completes each when the broker has it durable; order per key is kept over reconnects, splits
and merges.

Owns the application's side: values, the bounded window with back-pressure, flush. Which lane a message takes, and what happens
when segments are sealed, is `LaneSet`'s business.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from braid.client.blocks import Block, BlockSending
from braid.client.layouts import LayoutSession
from braid.client.messages import MessageId
from braid.client.producer_drafts import ProducerOptions, Sent
from braid.client.producer_lanes import LaneSet
from braid.client.transactions import Joinable, Transaction, joined
from braid.client.values import BYTES
from braid.errors import BraidError, Closed, DeadlineExceeded, InvalidArgument, NotAllowed, Overloaded, TopicNotFound
from braid.model.layout import SegmentLayout
from braid.model.names import Domain, TopicName
from braid.model.txn import TxnId

if TYPE_CHECKING:
    from braid.client.client import Client

log = logging.getLogger(__name__)
LARGEST = (1 << 63) - 1
"""Of sequence ids and of times, on the wire."""


class Producer:
    """Sends messages to a topic. Made by `Client.producer`."""

    def __init__(self, client: Client, topic: TopicName, name: str | None, options: ProducerOptions) -> None:
        self.topic = str(topic)
        self._topic = topic
        self._client = client
        self._clock = client.runtime.clock
        self._is_plain = options.codec is BYTES
        self._codec = options.codec
        if name is None and topic.domain is Domain.TOPIC:
            name = f"braid-{client.runtime.token()}"
        self._lanes = LaneSet(client, self.topic, name, options)
        self._window = self._lanes.window
        self._session: LayoutSession | None = None
        self._is_closed = False

    @property
    def name(self) -> str:
        """The producer's name, given or taken from the broker. Its lanes on a scalable topic are called `{name}-seg-{id}`."""
        if self._lanes.name is not None or not self._lanes.lanes:
            return self._lanes.name or ""
        return next(iter(self._lanes.lanes.values())).name or ""

    @property
    def last_sequence_id(self) -> int:
        """The highest sequence id of a message sent, with deduplication also of earlier processes of this name; every partition
        or segment counts for itself, and one of a scalable topic is looked at when the first message goes there."""
        return max((lane.highest_id for lane in self._lanes.lanes.values()), default=-1)

    @property
    def is_connected(self) -> bool:
        """Whether every lane in use has its place at a broker at the moment."""
        return all(lane.connection is not None for lane in self._lanes.everything())

    @property
    def lanes_made(self) -> int:
        """How many lanes it has made since it was opened: on a scalable topic at most a few for each segment there ever was."""
        return self._lanes.made

    async def open(self) -> None:
        """Find the topic; on a regular one attach to every partition."""
        topic, client = self._topic, self._client
        if topic.domain not in (Domain.TOPIC, Domain.PERSISTENT):
            instead = f"topic://{topic.namespace}/..." if topic.domain is Domain.SEGMENT else "persistent://..."
            raise NotAllowed(f"A producer cannot be made for {topic}; give the name of a topic such as {instead}.")
        if topic.domain is Domain.TOPIC and topic.is_partition:
            raise TopicNotFound(f"{topic} is one partition, which scalable topics do not have; use {topic.scalable}.")
        connection = await client.service_connection()
        if connection.supports_scalable_topics and not topic.is_partition:
            session = LayoutSession(client, self.topic)
            try:
                await session.open()
            except BaseException as error:
                await session.close()
                if not isinstance(error, NotAllowed) or topic.domain is Domain.TOPIC:
                    raise
            else:
                self._session = session
                session.listen(self._lanes.use, self._lanes.fail)
                if not session.is_synthetic:
                    if self._lanes.name is None:
                        self._lanes.name = f"braid-{client.runtime.token()}"
                    self._lanes.follow(session)
                    return
        elif topic.domain is Domain.TOPIC:
            raise NotAllowed(
                f"The broker at {connection.address} serves no scalable topics, so {topic} cannot be used; enable them there "
                "(scalable_topics.enabled), or use a persistent:// topic."
            )
        count = await client.partitions(self.topic)
        topics = [str(topic.partition(number)) for number in range(count)] or [self.topic]
        await self._lanes.open_all(SegmentLayout.synthetic(topics), self._session)

    async def send(
        self,
        value: Any,
        *,
        key: str | None = None,
        properties: Mapping[str, str] | None = None,
        event_time: int | datetime | None = None,
        sequence_id: int | None = None,
        txn: Joinable | None = None,
    ) -> MessageId:
        """Send one message and return where it is stored, once it is durable. Waits while too much is unanswered; fails after
        the send timeout, counted from this call. With `txn`, the message is there for others once that is committed."""
        if txn is not None:
            whole = joined(txn)
            return await self._within(whole, self._send(value, key, properties, event_time, sequence_id, whole.id))
        return await self._send(value, key, properties, event_time, sequence_id, None)

    async def _within(self, txn: Transaction, sending: Coroutine[Any, Any, MessageId]) -> MessageId:
        """Send as part of a transaction, which cannot be committed if this fails."""
        try:
            txn.begin()
        except BraidError:
            sending.close()
            raise
        txn.wrote(self._lanes)
        try:
            sent = await sending
        except BaseException as error:
            txn.failed(error)
            raise
        txn.done()
        return sent

    async def _send(
        self,
        value: Any,
        key: str | None,
        properties: Mapping[str, str] | None,
        event_time: int | datetime | None,
        sequence_id: int | None,
        txn: TxnId | None,
    ) -> MessageId:
        payload = value if self._is_plain and type(value) is bytes else self._codec.encode(value)
        if key is not None or properties or sequence_id is not None:
            check_fields(key, properties, sequence_id)
        window, lanes = self._window, self._lanes
        deadline = 0.0
        lane = lanes.only or lanes.route(key, sequence_id)
        connection = lane.connection
        if (
            window.messages >= window.max_messages
            or window.size >= window.max_size
            or window.line
            or (connection is not None and not connection.can_write)
        ):
            deadline = self._clock.monotonic() + self._client.config.send_timeout
            await self._wait_for_room(deadline)
            lane = lanes.only or lanes.route(key, sequence_id)
        event_ms = 0 if event_time is None else milliseconds(event_time)
        return await lane.send(payload, key, properties, event_ms, sequence_id, deadline, txn)

    def send_nowait(
        self,
        value: Any,
        *,
        key: str | None = None,
        properties: Mapping[str, str] | None = None,
        event_time: int | datetime | None = None,
        sequence_id: int | None = None,
        txn: Joinable | None = None,
    ) -> Sent:
        """Send one message without waiting; the future gives its id. Raises Overloaded if the window is full: see `room()`."""
        if txn is None:
            return self._send_nowait(value, key, properties, event_time, sequence_id, None)
        whole = joined(txn)
        whole.check_open()
        try:
            sent = self._send_nowait(value, key, properties, event_time, sequence_id, whole.id)
        except Overloaded:
            raise  # not sent, and to be tried again
        except BraidError as error:
            whole.fail(error)
            raise
        whole.wrote(self._lanes)
        whole.track(sent)
        return sent

    def _send_nowait(
        self,
        value: Any,
        key: str | None,
        properties: Mapping[str, str] | None,
        event_time: int | datetime | None,
        sequence_id: int | None,
        txn: TxnId | None,
    ) -> Sent:
        payload = value if self._is_plain and type(value) is bytes else self._codec.encode(value)
        if key is not None or properties or sequence_id is not None:
            check_fields(key, properties, sequence_id)
        window, lanes = self._window, self._lanes
        lane = lanes.only or lanes.route(key, sequence_id)
        if window.messages >= window.max_messages or window.size >= window.max_size:
            raise Overloaded(
                f"The producer for {self.topic} has {window.messages} unacknowledged messages, {window.size} bytes, its limit; "
                "wait for `room()`."
            )
        event_ms = 0 if event_time is None else milliseconds(event_time)
        return lane.send(payload, key, properties, event_ms, sequence_id, 0.0, txn)

    async def send_block(self, block: Block, *, txn: Joinable | None = None) -> asyncio.Future[None]:
        """Send the messages of a block, in order per key. Returns once the window has taken all of them; the future that it
        returns is done when the last one is durable, or has failed. A message above the broker's limit is refused with
        TooLarge before anything is sent. With `txn`, they are there for others once that is committed."""
        if txn is None:
            return await self._send_block(block, None)
        whole = joined(txn)
        whole.begin()
        whole.wrote(self._lanes)
        try:
            sent = await self._send_block(block, whole.id)
        except BaseException as error:
            whole.failed(error)
            raise
        whole.follow(sent)
        return sent

    async def _send_block(self, block: Block, txn: TxnId | None) -> asyncio.Future[None]:
        sending = BlockSending(block.count, asyncio.get_running_loop().create_future())
        try:
            for piece in self._lanes.pieces(block):
                deadline = self._clock.monotonic() + self._client.config.send_timeout
                await self._wait_for_room(deadline)
                self._lanes.send_block(piece, sending, deadline, txn)
                if sending.not_taken:
                    await asyncio.sleep(0)  # encoding takes its time; others have theirs in between
        except BaseException as error:
            sending.give_up(error)
            raise
        return sending.done

    async def room(self) -> None:
        """Return once the window takes another message and the sockets take bytes."""
        window, only = self._window, self._lanes.only
        if only is not None and not window.line and not window.is_full:
            connection = only.connection
            if connection is None or connection.can_write:
                return
        await self._wait_for_room(None)

    async def flush(self) -> None:
        """Return once every message sent so far is answered, well or badly: its future is done."""
        futures: list[asyncio.Future[Any]] = []
        for lane in list(self._lanes.everything()):
            if not lane.is_held:
                lane.seal_batch()
            futures += [draft.done for draft in lane.waiting()]
        await _all_done(futures)

    async def close(self) -> None:
        """Send what is left and close; waits `close_timeout` seconds for answers at most, what has none by then fails with
        Closed. Who gives up waiting leaves nothing behind either. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._client.forget(self)
        try:
            await self._finish()
            await self._lanes.close()
            if self._session is not None:
                await self._session.close()
        finally:
            self._lanes.stop()
            if self._session is not None:
                self._session.stop()

    async def _finish(self) -> None:
        """Wait for answers that can be expected; without a broker nothing is waited for."""
        self._lanes.take_no_more()
        futures: list[asyncio.Future[Any]] = []
        for lane in list(self._lanes.everything()):
            if lane.connection is not None or self._client.is_connected:
                if not lane.is_held:
                    lane.seal_batch()
                futures += [draft.done for draft in lane.waiting()]
        if not all(future.done() for future in futures):
            late: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            timer = self._clock.call_later(self._client.config.close_timeout, late.set_result, None)
            try:
                await _all_done(futures, late)
            finally:
                timer.cancel()
        if missing := sum(not future.done() for future in futures):
            log.warning("%s: %d messages were not acknowledged when the producer was closed", self.topic, missing)

    async def _wait_for_room(self, deadline: float | None) -> None:
        """Wait in line until it is this caller's turn and there is room for one message; it must be sent without a pause."""
        window = self._window
        timer = None
        if deadline is not None:
            timer = self._clock.call_later(deadline - self._clock.monotonic(), window.wake)
        place = window.join()
        try:
            while True:
                self._check_open()
                if deadline is not None and self._clock.monotonic() >= deadline:
                    seconds = self._client.config.send_timeout
                    raise DeadlineExceeded(
                        f"{self.topic} acknowledged too little within {seconds:g} s: {window.messages} messages wait, "
                        "the limit of the window. This message was not sent."
                    )
                if window.line[0] is not place or window.is_full:
                    await place.wait()
                    place.clear()
                elif (busy := self._lanes.busy_connection()) is not None:
                    await busy.writable()
                else:
                    return
        finally:
            window.leave(place)
            if timer is not None:
                timer.cancel()

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed(f"The producer for {self.topic} was closed.")
        if (failure := self._lanes.failure) is not None:
            raise type(failure)(*failure.args)


async def _all_done(futures: list[asyncio.Future[Any]], late: asyncio.Future[None] | None = None) -> None:
    """Newest first: mostly, when that is done, all are. Gives up when it is late."""
    for future in reversed(futures):
        if not future.done() and (late is None or not late.done()):
            await asyncio.wait((future,) if late is None else (future, late), return_when=asyncio.FIRST_COMPLETED)


def check_fields(key: Any, properties: Any, sequence_id: Any) -> None:
    """Raises InvalidArgument for what cannot be written into a message."""
    if key is not None:
        _check_text(key, "key")
    if properties:
        if not isinstance(properties, Mapping):
            raise InvalidArgument(f"The properties are of type {type(properties).__name__}; give a dict of str to str.")
        for name, value in properties.items():
            _check_text(name, "name of a property")
            _check_text(value, f"property {name!r}")
    if sequence_id is not None and not (isinstance(sequence_id, int) and 0 <= sequence_id <= LARGEST):
        raise InvalidArgument(f"The sequence id {sequence_id!r} cannot be used; give a whole number from 0 to {LARGEST}.")


def _check_text(text: Any, what: str) -> None:
    if not isinstance(text, str):
        raise InvalidArgument(f"The {what} is of type {type(text).__name__}; give a str.")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgument(f"The {what} cannot be written as UTF-8: {error}.") from None


def milliseconds(moment: Any) -> int:
    """A point in time in milliseconds since the epoch; raises InvalidArgument for one without a time zone or before that."""
    if isinstance(moment, datetime):
        if moment.tzinfo is None:
            raise InvalidArgument(f"The time {moment} has no time zone; give one, such as datetime.now(UTC).")
        moment = int(moment.astimezone(UTC).timestamp() * 1000)
    if not isinstance(moment, int) or not 0 <= moment <= LARGEST:
        raise InvalidArgument(f"The time {moment!r} cannot be used; give milliseconds since 1970, or a datetime after that.")
    return moment
