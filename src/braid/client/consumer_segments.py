"""What the consumers of segmented topics have in common: one queue over the lanes, receiving, and lanes that are read in order.

`SegmentsConsumer` hands messages to the application; which segments are read, and what acknowledging means, is up to its
subclasses. `OrderedLane` is the lane of one segment that one consumer reads in order: it knows what was handed out and leaves
out what comes again after a reconnect.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from braid.client.consumer_lanes import LaneOptions, LaneOwner
from braid.client.consumer_origin import Origin, checked_text, is_count
from braid.client.layouts import LayoutSession
from braid.client.messages import Message, MessageId, is_after
from braid.client.receive_queue import ReceiveQueue
from braid.client.topic_consumer import TopicConsumer
from braid.client.values import codec_of
from braid.errors import BraidError, Closed, DeadlineExceeded, InvalidArgument, NotAllowed
from braid.model.names import Domain, TopicName
from braid.runtime.tasks import Tasks

if TYPE_CHECKING:
    from braid.client.client import Client
    from braid.client.connection import Connection

log = logging.getLogger(__name__)
L = TypeVar("L", bound=TopicConsumer)


class OrderedLane(TopicConsumer):
    """The lane of a segment that is read in order by one consumer."""

    def __init__(self, client: Client, owner: LaneOwner, topic: str, options: LaneOptions) -> None:
        super().__init__(client, owner, topic, options)
        self.handed: MessageId | None = None
        """The last message handed to the application."""
        self.acked: MessageId | None = None
        """The last position acknowledged."""
        self.newest: MessageId | None = None
        """The last message received."""
        self.last_stored: MessageId | None = None
        """The last message of a sealed segment, once it was asked for."""
        self.is_asking = False
        self.may_repeat = False
        """Whether what comes may be what the application has already."""
        self.is_resumed = False
        """Attached again after a crash: the broker may have lost acknowledgements, nobody set the subscription back."""

    @property
    def is_exhausted(self) -> bool:
        """Whether the segment is sealed and everything in it has been received."""
        if self.is_ended:
            return True
        return self.last_stored is not None and _has_reached(self.newest, self.last_stored)

    async def attach(self, connection: Connection) -> None:
        await super().attach(connection)
        self.may_repeat = self.handed is not None
        self.newest = self.handed

    def start_again(self) -> None:
        self.may_repeat = self.handed is not None
        self.newest = self.handed
        super().start_again()

    def sift(self, messages: list[Message]) -> list[Message]:
        """The messages without those the application has already. A position below what is acknowledged means that the
        subscription was set back: then everything counts as new."""
        handed = self.handed
        if self.may_repeat and handed is not None:
            first, acked = messages[0].id, self.acked
            is_before = acked is not None and (first.ledger_id, first.entry_id) < (acked.ledger_id, acked.entry_id)
            if is_before and not self.is_resumed:
                log.info("the subscription of %s was set back to %s", self.topic, first)
                self.handed = self.acked = None
                self.may_repeat = False
            else:
                fresh = [each for each in messages if is_after(each.id, handed)]
                self.may_repeat = not fresh
                if len(fresh) < len(messages):
                    if acked is not None:
                        self.acknowledge_up_to(acked)  # the broker does not have it, or it would not send these
                    self.consumed(len(messages) - len(fresh))
                    messages = fresh
        if messages:
            self.newest = messages[-1].id
        return messages

    async def learn_end(self) -> None:
        """Ask where the sealed segment ends."""
        try:
            self.last_stored = await self.last_message_id()
        except BraidError as error:
            log.debug("the end of %s is not known yet: %s", self.topic, error)
        finally:
            self.is_asking = False


def _has_reached(position: MessageId | None, end: MessageId) -> bool:
    if end.ledger_id < 0:
        return True
    if position is None:
        return False
    return not is_after(end, position)


class SegmentsConsumer(Generic[L]):
    """Receives from the lanes of a topic's segments."""

    def __init__(self, client: Client, topic: str, name: str, schema: Any) -> None:
        parsed = TopicName.parse(checked_text("topic", topic))
        if parsed.domain not in (Domain.TOPIC, Domain.PERSISTENT):
            raise NotAllowed(f"{parsed} cannot be consumed so; give a topic:// or persistent:// name.")
        self.client = client
        self.topic = str(parsed)
        self.name = name
        self._origin = Origin(self.topic, name)
        self.config = client.config
        self.clock = client.runtime.clock
        self.codec = codec_of(schema)
        self.failure: BraidError | None = None
        """Why nothing more will come, if so."""
        self.is_closed = False
        self.layouts = LayoutSession(client, self.topic)
        self._lanes: dict[int, L] = {}
        self._closing: dict[L, None] = {}
        """Lanes that are of no more use and on their way out."""
        self._queue: ReceiveQueue[L, Message] = ReceiveQueue(self.clock, self.config.receiver_queue)
        self._tasks = Tasks(f"consumer of {self.topic}")

    # The application's side.

    async def receive(self, timeout: float | None = None) -> Message:
        """The next message. Raises DeadlineExceeded after `timeout` seconds."""
        message = self.receive_nowait()
        if message is None:
            until = None if timeout is None else self.clock.monotonic() + timeout
            while message is None:  # another waiter may be quicker
                left = None if until is None else until - self.clock.monotonic()
                if not await self._queue.wait(self._is_anything_here, left):
                    raise DeadlineExceeded(f"No message came from {self.topic} within {timeout:g} s.")
                message = self.receive_nowait()
        return message

    def receive_nowait(self) -> Message | None:
        """The next message if one is here already."""
        if (found := self._queue.take()) is None:
            return None
        lane, message = found
        self._handed_out(lane, message)
        lane.consumed(1)
        return message

    async def receive_batch(self, max_messages: int = 100, timeout: float | None = None) -> list[Message]:
        """Up to `max_messages` messages: as soon as so many are here (or half the receiver queue), else what is here after
        `timeout` seconds, maybe nothing; without a timeout, what is here as soon as anything is.

        Does not wait for what cannot come: where the segments being read are sealed and received to their end, their
        successors follow only after these messages are acknowledged. If they are, but in a transaction that is still open, it
        returns at once, with nothing if nothing is here: commit, and go on."""
        if not is_count(max_messages, 1):
            raise InvalidArgument(f"A batch of {max_messages} messages cannot be received; ask for 1 or more.")
        enough = 1 if timeout is None else min(max_messages, self.window() // 2 + 1)

        def is_ready() -> bool:
            here = len(self._queue)
            if not self._is_anything_here():
                return self._is_held_up()
            return here >= enough or self._is_waiting_for_application() or self._is_held_up()

        await self._queue.wait(is_ready, timeout)
        found: list[Message] = []
        while len(found) < max_messages and (message := self.receive_nowait()) is not None:
            found.append(message)
        if not found:
            await asyncio.sleep(0)  # so that others get their turn if the application asks again and again
        return found

    async def __aiter__(self) -> AsyncIterator[Message]:
        """Messages until the consumer is closed."""
        while True:
            try:
                message = await self.receive()
            except Closed:
                return
            yield message

    async def close(self) -> None:
        """Stop; what was not acknowledged comes again. Idempotent."""
        raise NotImplementedError

    # For the lanes.

    def put(self, lane: TopicConsumer, messages: list[Message]) -> None:
        raise NotImplementedError

    def drop_queued(self, lane: TopicConsumer) -> None:
        dropped = self._queue.drop(lane)  # type: ignore[arg-type]
        if dropped:
            lane.consumed(dropped)

    def window(self) -> int:
        return self._queue.share(len(self._lanes))

    def lane_ended(self, lane: TopicConsumer) -> None:
        raise NotImplementedError

    def lane_failed(self, lane: TopicConsumer, error: BraidError) -> None:
        raise NotImplementedError

    # For subclasses.

    def _handed_out(self, lane: L, message: Message) -> None:
        """A message goes to the application now."""

    def _is_waiting_for_application(self) -> bool:
        """Whether nothing more can come until the application deals with what it gets now."""
        return False

    def _is_held_up(self) -> bool:
        """Whether something cannot come before an open transaction of the application ends."""
        return False

    def _is_anything_here(self) -> bool:
        """Whether there is a message; raises if there never will be one."""
        if len(self._queue):
            return True
        self._check()
        return False

    def _check(self) -> None:
        """Raise what keeps this consumer from going on, if anything does."""
        if self.failure is not None:
            raise type(self.failure)(*self.failure.args)
        if self.is_closed:
            raise Closed(f"The consumer of {self.topic} was closed.")

    def _close_lane(self, lane: L) -> None:
        """Close a lane that nobody uses any more, in the background."""
        self._closing[lane] = None
        self._tasks.spawn(self._close_and_forget(lane), f"close segment {lane.options.segment_id}")

    async def _close_and_forget(self, lane: L) -> None:
        await lane.close()
        self._closing.pop(lane, None)

    async def _close_lanes(self) -> None:
        """Close everything, also what was being closed."""
        await self._tasks.close()
        async with asyncio.TaskGroup() as closing:  # together: each may have to wait for a broker that does not answer
            for lane in [*self._lanes.values(), *self._closing]:
                closing.create_task(lane.close())

    def fail(self, error: BraidError) -> None:
        """Nothing more will come."""
        if self.failure is None and not self.is_closed:
            self.failure = error
            self._queue.wake()

    def _are_lanes_exhausted(self, lanes: Sequence[OrderedLane]) -> bool:
        """Whether all these segments are sealed and received; where the end of one is not known, it is asked for."""
        layout = self.layouts.layout
        result = bool(lanes)
        for lane in lanes:
            if not lane.is_exhausted:
                result = False
                info = layout.all_segments.get(lane.segment_id)
                if info is not None and info.is_sealed:
                    self._ask_for_end(lane)
        return result

    def _ask_for_end(self, lane: OrderedLane) -> None:
        """Ask the broker where a sealed segment ends, unless that is known or being asked."""
        if lane.last_stored is None and not lane.is_asking and lane.connection is not None:
            lane.is_asking = True
            self._tasks.spawn(self._learn_end(lane), f"end of segment {lane.segment_id}")

    async def _learn_end(self, lane: OrderedLane) -> None:
        await lane.learn_end()
        if lane.last_stored is not None:
            self._queue.wake()

    def _layout_failed(self, error: BraidError) -> None:
        self.fail(error)

    def _partition_of(self, topic: str) -> int:
        return TopicName.parse(topic).partition_index
