"""`Consumer`: receives the messages of a subscription, from one topic or all partitions of it.

Merges the lanes (`TopicConsumer`, one per partition) into one bounded queue, and finds the lane of a message.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from itertools import repeat
from typing import TYPE_CHECKING

from braid.client.consumer_lanes import LaneOptions, message_id_data
from braid.client.consumer_origin import Origin
from braid.client.messages import Message, MessageId, is_of_one_entry
from braid.client.topic_consumer import TopicConsumer
from braid.client.transaction_acks import acknowledge_in
from braid.client.transactions import Joinable, Transaction, joined
from braid.errors import BraidError, Closed, DeadlineExceeded, InvalidArgument, TopicTerminated
from braid.model.ackset import full
from braid.model.positions import Position
from braid.wire.types import InitialPosition, SubType

if TYPE_CHECKING:
    from braid.client.client import Client


class Consumer:
    """Receives messages of a topic. Made by `Client.consumer`."""

    def __init__(
        self, client: Client, topic: str, subscription: str, sub_type: SubType, initial: InitialPosition, name: str
    ) -> None:
        self.client = client
        self.topic = topic
        self.subscription = subscription
        self.sub_type = sub_type
        self.initial = initial
        self.name = name
        self._origin = Origin(topic, name)
        self._lanes: dict[int, TopicConsumer] = {}
        self._queue: deque[tuple[TopicConsumer, Message]] = deque()
        self._arrived = asyncio.Event()
        self._is_closed = False

    async def open(self, topics: list[str]) -> None:
        """Subscribe to every partition."""
        for number, topic in enumerate(topics):
            partition = number if len(topics) > 1 or topic != self.topic else -1
            options = LaneOptions(
                subscription=self.subscription,
                sub_type=self.sub_type,
                name=self.name,
                initial=self.initial,
                partition=partition,
                origin=self._origin,
            )
            lane = self._lanes[partition] = TopicConsumer(self.client, self, topic, options)
            await lane.open()

    async def receive(self, timeout: float | None = None) -> Message:
        """The next message. Raises DeadlineExceeded after `timeout` seconds, TopicTerminated where a terminated topic ends."""
        if not self._queue:
            await self._wait(timeout)
        lane, message = self._queue.popleft()
        lane.consumed(1)
        return message

    def receive_nowait(self) -> Message | None:
        """The next message if one is here already."""
        if not self._queue:
            return None
        lane, message = self._queue.popleft()
        lane.consumed(1)
        return message

    async def __aiter__(self) -> AsyncIterator[Message]:
        """Messages until the topic ends or the consumer is closed."""
        while True:
            try:
                yield await self.receive()
            except (TopicTerminated, Closed):
                return

    async def acknowledge(self, message: Message | MessageId, *, wait: bool = False, txn: Joinable | None = None) -> None:
        """This message is dealt with. With `wait`, return once the broker has that durable. With `txn`, that counts once the
        transaction is committed, and the message comes again if it is not."""
        if txn is not None:
            whole = joined(txn)
            message_id, lane = self._found_in(whole, message)
            await acknowledge_in(whole, lane, message, message_id, wait=wait)
            return
        message_id = self._origin.own(message)
        lane = self._lanes.get(message_id.partition) or self._lane_of(message_id)
        if isinstance(message, Message):
            for chunk in message.chunks:
                lane.acknowledge(chunk)
        lane.acknowledge(message_id)
        if wait:
            await lane.acknowledged()

    async def acknowledge_cumulative(
        self, message: Message | MessageId, *, wait: bool = False, txn: Joinable | None = None
    ) -> None:
        """This message and all before it (in its partition) are dealt with; with `txn`, once that is committed. Not for Shared
        subscriptions."""
        if txn is not None:
            whole = joined(txn)
            message_id, lane = self._found_in(whole, message, is_cumulative=True)
            held = lane.transactional.up_to(whole, message_id)
            if wait:
                await asyncio.shield(held)
            return
        message_id = self._origin.own(message)
        lane = self._lane_of(message_id)
        await lane.acknowledge_cumulative(message_id, wait=wait)

    async def negative_acknowledge(self, message: Message | MessageId) -> None:
        """This message could not be dealt with: it comes again after the redelivery delay."""
        message_id = self._origin.own(message)
        lane = self._lane_of(message_id)
        lane.negative_acknowledge(message_id)

    async def seek(self, target: MessageId | int) -> None:
        """Go to a message (it is the next one received) or to a time in milliseconds since the epoch."""
        if isinstance(target, int):
            for lane in self._lanes.values():
                await lane.seek(target)
            return
        lanes = list(self._lanes.values())
        if target.partition >= 0:
            lanes = [self._lane_of(target)]
        elif len(lanes) > 1 and 0 <= target.ledger_id < (1 << 63) - 1:
            raise InvalidArgument(
                f"{target} names no partition; on a partitioned topic seek by time, or to a message's own id."
            )
        mask = full(target.batch_size) & ~full(target.batch_index) if target.batch_index > 0 else 0
        for lane in lanes:
            await lane.seek(message_id_data(Position(target.ledger_id, target.entry_id), mask))

    async def unsubscribe(self, *, force: bool = False) -> None:
        """Delete the subscription and close."""
        for lane in self._lanes.values():
            await lane.unsubscribe(force)
        await self.close()

    async def close(self) -> None:
        """Leave the subscription; unacknowledged messages go to others or come again. Idempotent."""
        self._is_closed = True
        self.client.forget(self)
        for lane in self._lanes.values():
            await lane.close()
        self._queue.clear()
        self.wake()

    # For the lanes.

    def put(self, lane: TopicConsumer, messages: list[Message]) -> None:
        """New messages; bounded by the permits their lane granted. Brokers send whole entries again: what comes with a message
        of its batch and waits here anyway is not taken twice."""
        if messages[0].redelivery_count and messages[0].id.batch_index >= 0 and self._queue:
            entry = messages[0].id
            here = {each.id for other, each in self._queue if other is lane and is_of_one_entry(each.id, entry)}
            fresh = [message for message in messages if message.id not in here]
            lane.consumed(len(messages) - len(fresh))
            messages = fresh
        self._queue.extend(zip(repeat(lane), messages))
        self._arrived.set()

    def drop_queued(self, lane: TopicConsumer) -> None:
        """Forget what was received and not handed out yet: it comes again."""
        kept = deque(item for item in self._queue if item[0] is not lane)
        dropped = len(self._queue) - len(kept)
        self._queue = kept
        if dropped:
            lane.consumed(dropped)

    def window(self) -> int:
        return self.client.config.receiver_queue

    def lane_ended(self, lane: TopicConsumer) -> None:
        self.wake()

    def lane_failed(self, lane: TopicConsumer, error: BraidError) -> None:
        self.wake()

    def wake(self) -> None:
        self._arrived.set()

    async def _wait(self, timeout: float | None) -> None:
        """Return when there is a message; nothing is taken, so whoever gives up loses nothing."""
        clock = self.client.runtime.clock
        until = None if timeout is None else clock.monotonic() + timeout
        timer = None if timeout is None else clock.call_later(timeout, self.wake)
        try:
            while not self._queue:
                self._check()
                if until is not None and clock.monotonic() >= until:
                    raise DeadlineExceeded(f"No message came from {self.topic} within {timeout:g} s.")
                self._arrived.clear()
                await self._arrived.wait()
        finally:
            if timer is not None:
                timer.cancel()

    def _found_in(
        self, txn: Transaction, message: Message | MessageId, *, is_cumulative: bool = False
    ) -> tuple[MessageId, TopicConsumer]:
        """A message to acknowledge under a transaction, which cannot be committed without."""
        txn.check_open()
        try:
            message_id = self._origin.own(message)
            lane = self._lane_of(message_id)
            if is_cumulative:
                lane.check_cumulative()
        except BraidError as error:
            txn.fail(error)
            raise
        return message_id, lane

    def _lane_of(self, message_id: MessageId) -> TopicConsumer:
        lane = self._lanes.get(message_id.partition)
        if lane is None:
            raise InvalidArgument(f"The message {message_id} is not from {self.topic}.")
        return lane

    def _check(self) -> None:
        if self._is_closed:
            raise Closed(f"The consumer of {self.topic} was closed.")
        for lane in self._lanes.values():
            lane.check_usable()
        if self._lanes and all(lane.is_ended for lane in self._lanes.values()):
            raise TopicTerminated(f"The topic {self.topic} was terminated and everything in it has been received.")
