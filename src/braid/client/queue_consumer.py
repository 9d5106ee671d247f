"""`QueueConsumer`: shares all segments of a topic with the other consumers of its subscription, message by message.

Follows the layout by itself, without the controller: it attaches to every segment, active and sealed, and leaves a sealed one
once everything in it is acknowledged. A lane is never closed while the application may still acknowledge messages of it. Owns
the timers of refused and unacknowledged messages; order is not promised.
"""

from __future__ import annotations

import heapq
import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from braid.client.consumer_lanes import LaneOptions, LaneOwner
from braid.client.consumer_origin import checked_name, checked_text, initial_position, is_none_or, is_seconds
from braid.client.consumer_segments import SegmentsConsumer
from braid.client.dead_letters import DeadLetterPolicy, DeadLetters
from braid.client.messages import Message, MessageId, is_of_one_entry
from braid.client.topic_consumer import TopicConsumer
from braid.client.transaction_acks import acknowledge_in
from braid.client.transactions import Joinable, Transaction, joined
from braid.errors import BraidError, Closed, DeadlineExceeded, InvalidArgument, NotFound, TransactionConflict
from braid.model.layout import SegmentLayout
from braid.model.positions import Position
from braid.model.segments import SegmentInfo, physical_name
from braid.runtime.clock import Timer
from braid.wire.types import InitialPosition, SubType

if TYPE_CHECKING:
    from braid.client.client import Client
    from braid.client.connection import Connection

log = logging.getLogger(__name__)
ACK_TIMEOUT_GRAIN = 0.05
"""Overdue messages are looked for at most so often, as a part of the ack timeout."""
RESET_SECONDS = 1.0
"""From a lane that was closed by its broker to a look at drained segments: by then all segments are set back."""


class Backoff(msgspec.Struct, frozen=True):
    """Seconds until a refused message comes again: doubled with each redelivery, up to a limit."""

    first: float = 1.0
    longest: float = 600.0

    def __post_init__(self) -> None:
        if not (_is_pause(self.first) and _is_pause(self.longest) and self.first <= self.longest):
            raise InvalidArgument(f"A back-off from {self.first} to {self.longest} s cannot be used; 0 <= first <= longest.")

    def pause(self, redeliveries: int) -> float:
        return min(self.first * 2.0 ** min(redeliveries, 60), self.longest)


def _is_pause(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


class QueueLane(TopicConsumer):
    """The lane of one segment."""

    def __init__(
        self, client: Client, owner: LaneOwner, topic: str, options: LaneOptions, attached_again: Callable[[], None]
    ) -> None:
        super().__init__(client, owner, topic, options)
        self._attached_again = attached_again
        self.held: dict[MessageId, float] = {}
        """Messages the application has and did not settle, oldest first, with the time when they are taken for lost."""

    def begin(self, connection: Connection) -> None:
        is_again = self.was_attached
        super().begin(connection)
        if is_again:
            self._attached_again()

    def transaction_ended(self, txn: Transaction, /, *, is_committed: bool) -> None:
        if not is_committed:  # what it was to acknowledge comes again, also where the application has got a second copy
            for message_id in self.transactional.acknowledged_in(txn):
                self.held.pop(message_id, None)
        super().transaction_ended(txn, is_committed=is_committed)

    def hand_out(self, message_id: MessageId, deadline: float) -> None:
        self.held.pop(message_id, None)  # so that it goes to the end
        self.held[message_id] = deadline

    def overdue(self, now: float) -> dict[Position, None]:
        """Entries with messages that were held for too long; they are not held any more."""
        found: dict[Position, None] = {}
        while self.held:
            message_id, deadline = next(iter(self.held.items()))
            if deadline > now:
                break
            del self.held[message_id]
            found[Position(message_id.ledger_id, message_id.entry_id)] = None
        return found

    def lost(self) -> None:
        self.held.clear()  # everything unacknowledged is delivered again by the next attachment


class QueueConsumer(SegmentsConsumer[QueueLane]):
    """Receives messages of a subscription that many consumers share. Made by `Client.queue_consumer`."""

    def __init__(
        self,
        client: Client,
        topic: str,
        subscription: str,
        *,
        name: str | None = None,
        initial: Literal["earliest", "latest"] = "latest",
        schema: Any = None,
        ack_timeout: float | None = None,
        dead_letter: DeadLetterPolicy | None = None,
        nack_backoff: Backoff | None = None,
    ) -> None:
        super().__init__(client, topic, checked_name("name", name, f"queue-{client.runtime.token()}"), schema)
        if ack_timeout is not None and not is_seconds(ack_timeout):
            raise InvalidArgument(f"ack_timeout={ack_timeout!r} cannot be used; give seconds above 0, or None for no limit.")
        if not is_none_or(dead_letter, DeadLetterPolicy) or not is_none_or(nack_backoff, Backoff):
            raise InvalidArgument("Give dead_letter=DeadLetterPolicy(...) and nack_backoff=Backoff(...), or None.")
        self.subscription = checked_text("subscription", subscription)
        self._initial = initial_position(initial)
        self._ack_timeout = ack_timeout
        self._backoff = nack_backoff or Backoff(first=self.config.redelivery_delay)
        self._dead_letters = DeadLetters(client, self.topic, subscription, dead_letter) if dead_letter is not None else None
        self._first_new = 0
        """Partitions from this number on were made after this consumer, which must miss nothing of them."""
        self._drained: dict[int, float] = {}
        """Sealed segments that everything of was acknowledged, with the time to look again."""
        self._refused: list[tuple[float, int, QueueLane, int, Position]] = []
        """Heap of entries to be sent again: time, a number to break ties, the lane and its attachment, where."""
        self._refused_entries: dict[tuple[QueueLane, int, Position], int] = {}
        """The same to be found, with their numbers; what is not here any more was sent again for another reason."""
        self._is_late = False
        """Whether opening waits for nothing any more."""
        self._number = 0
        self._refused_timer: tuple[float, Timer] | None = None
        self._ack_timer: Timer | None = None
        self._recheck: Timer | None = None

    async def open(self) -> None:
        """Attach to every segment: a segment that does not know the subscription would not keep messages for it."""
        await self.layouts.open()
        layout = self.layouts.layout
        self._first_new = layout.next_segment_id
        self.layouts.listen(self._follow, self._layout_failed)
        self._follow(layout)
        timer = self.clock.call_later(self.config.operation_timeout, self._give_up_trying)
        tried: list[QueueLane] = []
        try:
            # Segments may be split and removed meanwhile: those that follow them are waited for, too.
            while untried := [lane for lane in self._lanes.values() if lane not in tried]:
                for lane in untried:
                    await lane.tried.wait()
                tried.extend(untried)
        finally:
            timer.cancel()
        self._check()
        for lane in tried:
            if lane.failure is not None:
                info = self.layouts.layout.all_segments.get(lane.segment_id)
                if info is not None and info.is_active:
                    lane.check_usable()
            elif self._lanes.get(lane.segment_id) is lane and not lane.was_attached and not lane.is_busy:
                raise DeadlineExceeded(
                    f"The segment {lane.topic} could not be reached within {self.config.operation_timeout:g} s, so the "
                    f"subscription {self.subscription} is not complete; try again."
                )

    @property
    def segments(self) -> list[int]:
        """Ids of the segments this consumer is attached to."""
        return sorted(self._lanes)

    async def acknowledge(self, message: Message | MessageId, *, wait: bool = False, txn: Joinable | None = None) -> None:
        """This message is dealt with. With `wait`, return once the broker has that durable. With `txn`, that counts once the
        transaction is committed, and the message comes again, to any consumer, if it is not."""
        if txn is not None:
            await self._acknowledge_in(joined(txn), message, wait=wait)
            return
        message_id, lane = self._lane_of(message)
        if lane is None:
            return  # the segment was drained or removed: nobody will see the message again
        if isinstance(message, Message):
            for chunk in message.chunks:
                lane.acknowledge(chunk)
        lane.held.pop(message_id, None)
        lane.acknowledge(message_id)
        if wait:
            await lane.acknowledged()
        if lane.is_ended:
            self._leave_if_drained(lane)

    async def negative_acknowledge(self, message: Message | MessageId) -> None:
        """This message could not be dealt with: it comes again, to any consumer, later each time."""
        message_id, lane = self._lane_of(message)
        if lane is not None:
            lane.held.pop(message_id, None)
            self._refuse(lane, message_id, message.redelivery_count if isinstance(message, Message) else 0)

    async def close(self) -> None:
        """Leave the subscription; unacknowledged messages go to others or come again. Idempotent."""
        self.is_closed = True
        self.client.forget(self)
        for timer in (self._ack_timer, self._recheck, self._refused_timer[1] if self._refused_timer else None):
            if timer is not None:
                timer.cancel()
        self._queue.clear()
        self._queue.wake()
        await self._close_lanes()
        if self._dead_letters is not None:
            await self._dead_letters.close()
        await self.layouts.close()

    # For the lanes.

    def put(self, lane: TopicConsumer, messages: list[Message]) -> None:
        assert isinstance(lane, QueueLane)
        if self.is_closed:
            return
        if messages[0].redelivery_count:
            messages = self._not_here(lane, messages)
        if self._dead_letters is not None:
            letters = self._dead_letters
            for each in messages:
                if letters.is_due(each):
                    self._tasks.spawn(self._bury(letters, lane, each), "dead letter")
            messages = [each for each in messages if not letters.is_due(each)]
        if messages:
            self._queue.put(lane, messages)

    def lane_ended(self, lane: TopicConsumer) -> None:
        assert isinstance(lane, QueueLane)
        self._leave_if_drained(lane)

    def lane_failed(self, lane: TopicConsumer, error: BraidError) -> None:
        assert isinstance(lane, QueueLane)
        if self.is_closed or isinstance(error, Closed) or self._lanes.get(lane.segment_id) is not lane:
            return
        if isinstance(error, NotFound) and self.layouts.failure is None and not self.layouts.is_synthetic:
            log.info("segment %d of %s is gone: %s", lane.segment_id, self.topic, error)
            self._queue.drop(lane)
            del self._lanes[lane.segment_id]
            self._remember_drained(lane.segment_id)
        else:
            self.fail(error)

    # Following the layout.

    def _follow(self, layout: SegmentLayout) -> None:
        if self.is_closed:
            return
        self._drained = {number: when for number, when in self._drained.items() if number in layout.all_segments}
        for segment_id, lane in list(self._lanes.items()):
            if segment_id not in layout.all_segments:
                # Removed with its data. What is queued can still be handed out; acknowledging it has no meaning any more.
                del self._lanes[segment_id]
                self._close_lane(lane)
        for segment_id, info in layout.all_segments.items():
            if segment_id not in self._lanes and segment_id not in self._drained:
                self._add(info)

    def _add(self, info: SegmentInfo) -> None:
        topic = str(physical_name(self.layouts.resolved, info))
        # Of a segment the broker knows whether it is younger than the subscription. It must not be asked for the beginning: the
        # first attachment makes the subscription, and decides where it begins on all segments.
        is_younger = self.layouts.is_synthetic and info.segment_id >= self._first_new
        options = LaneOptions(
            subscription=self.subscription,
            sub_type=SubType.SHARED,
            name=self.name,
            initial=InitialPosition.EARLIEST if is_younger else self._initial,
            codec=self.codec,
            partition=self._partition_of(topic),
            segment_id=info.segment_id,
            shown_topic=self.topic,
            origin=self._origin,
        )
        lane = self._lanes[info.segment_id] = QueueLane(self.client, self, topic, options, self._attached_again)
        if self._is_late:
            lane.tried.set()
        lane.open_soon()

    def _leave_if_drained(self, lane: QueueLane) -> None:
        """Detach from a segment that is sealed and acknowledged, once nothing of it is queued or in the application's hands."""
        if self.is_closed or self._lanes.get(lane.segment_id) is not lane:
            return
        if not lane.is_ended or lane.held or self._queue.count(lane):
            return
        del self._lanes[lane.segment_id]
        self._remember_drained(lane.segment_id)
        self._close_lane(lane)

    def _remember_drained(self, segment_id: int) -> None:
        self._drained[segment_id] = self.clock.monotonic() + self.config.drained_check
        if self._recheck is None:
            self._recheck = self.clock.call_later(self.config.drained_check, self._look_again)

    def _attached_again(self) -> None:
        """A broker has closed a lane, as it does when the subscription is set back: then drained ones have messages again."""
        if self._drained and not self.is_closed:
            now = self.clock.monotonic()
            self._drained = {number: min(when, now + RESET_SECONDS) for number, when in self._drained.items()}
            if self._recheck is not None:
                self._recheck.cancel()
            self._recheck = self.clock.call_later(max(0.0, min(self._drained.values()) - now), self._look_again)

    def _look_again(self) -> None:
        """A subscription can be set back: after a while drained segments are attached to again, and left again if need be."""
        self._recheck = None
        if self.is_closed or self.failure is not None:
            return
        now = self.clock.monotonic()
        self._drained = {number: when for number, when in self._drained.items() if when > now}
        if self._drained:
            self._recheck = self.clock.call_later(min(self._drained.values()) - now, self._look_again)
        self._follow(self.layouts.layout)

    def _give_up_trying(self) -> None:
        self._is_late = True
        for lane in self._lanes.values():
            lane.tried.set()

    # Messages that come again.

    def _handed_out(self, lane: QueueLane, message: Message) -> None:
        limit = self._ack_timeout
        if limit is None:
            lane.held[message.id] = math.inf
            return
        lane.hand_out(message.id, self.clock.monotonic() + limit)
        if self._ack_timer is None:
            self._ack_timer = self.clock.call_later(limit, self._take_back, limit)

    def _take_back(self, limit: float) -> None:
        """Have messages sent again that the application keeps for too long."""
        now = self.clock.monotonic()
        next_deadline = math.inf
        for lane in self._lanes.values():
            if positions := lane.overdue(now):
                log.info("%d entries of %s were not acknowledged in %g s and are sent again", len(positions), lane.topic, limit)
                lane.redeliver(positions)
                for each in positions:  # what was refused in the same batch comes with it
                    self._refused_entries.pop((lane, lane.attachments, each), None)
            if lane.held:
                next_deadline = min(next_deadline, next(iter(lane.held.values())))
        self._ack_timer = None
        if next_deadline < math.inf:
            pause = max(next_deadline - now, limit * ACK_TIMEOUT_GRAIN)
            self._ack_timer = self.clock.call_later(pause, self._take_back, limit)

    def _not_here(self, lane: QueueLane, messages: list[Message]) -> list[Message]:
        """What comes again, without what the application has in its hands or in the queue: brokers send whole entries again,
        and neighbours of a refused message in its batch are neither refused nor lost."""
        fresh = [each for each in messages if each.id not in lane.held]
        if fresh and fresh[0].id.batch_index >= 0:  # else it has no neighbours
            here = {each.id for each in self._queue.of(lane) if is_of_one_entry(each.id, fresh[0].id)}
            fresh = [each for each in fresh if each.id not in here]
        if len(fresh) < len(messages):
            lane.consumed(len(messages) - len(fresh))
        return fresh

    def _refuse(self, lane: QueueLane, message_id: MessageId, redeliveries: int) -> None:
        """Have a message sent again after its pause, or with a neighbour in its batch that was refused before it: the broker
        counts how often it sends an entry, and each message of it is to be tried as often."""
        position = Position(message_id.ledger_id, message_id.entry_id)
        if (lane, lane.attachments, position) in self._refused_entries:
            return
        self._number += 1
        self._refused_entries[lane, lane.attachments, position] = self._number
        when = self.clock.monotonic() + self._backoff.pause(redeliveries)
        heapq.heappush(self._refused, (when, self._number, lane, lane.attachments, position))
        self._set_refused_timer()

    def _set_refused_timer(self) -> None:
        if not self._refused or self.is_closed:
            return
        when = self._refused[0][0]
        if self._refused_timer is not None:
            if self._refused_timer[0] <= when:
                return
            self._refused_timer[1].cancel()
        pause = max(0.0, when - self.clock.monotonic())
        self._refused_timer = when, self.clock.call_later(pause, self._send_refused)

    def _send_refused(self) -> None:
        self._refused_timer = None
        now = self.clock.monotonic()
        wanted: dict[QueueLane, dict[Position, None]] = {}
        while self._refused and self._refused[0][0] <= now:
            _when, number, lane, attachments, position = heapq.heappop(self._refused)
            if self._refused_entries.get((lane, attachments, position)) != number:
                continue
            del self._refused_entries[lane, attachments, position]
            if attachments == lane.attachments:  # else it was sent again when the lane was attached anew
                wanted.setdefault(lane, {})[position] = None
        for lane, positions in wanted.items():
            lane.redeliver(positions)
        self._set_refused_timer()

    async def _acknowledge_in(self, txn: Transaction, message: Message | MessageId, *, wait: bool) -> None:
        txn.check_open()
        try:
            message_id, lane = self._lane_of(message)
            if lane is None:
                raise TransactionConflict(
                    f"The message {message_id} of {self.topic} is acknowledged already: its segment is drained or removed."
                )
        except BraidError as error:
            txn.fail(error)
            raise
        await acknowledge_in(txn, lane, message, message_id, wait=wait)
        lane.held.pop(message_id, None)  # now it is the broker that holds it

    async def _bury(self, letters: DeadLetters, lane: QueueLane, message: Message) -> None:
        try:
            await letters.send(message)
        except BraidError as error:
            log.warning("the message %s cannot be stored in %s and comes again: %s", message.id, letters.topic, error)
            self._refuse(lane, message.id, message.redelivery_count)
        else:
            for chunk in message.chunks:
                lane.acknowledge(chunk)
            lane.acknowledge(message.id)
        lane.consumed(1)

    def _lane_of(self, message: Message | MessageId) -> tuple[MessageId, QueueLane | None]:
        if self.is_closed:
            raise Closed(f"The consumer of {self.topic} was closed; what it had not acknowledged comes again.")
        message_id = self._origin.own(message)
        lane = self._lanes.get(message_id.segment_id)
        if lane is None and not 0 <= message_id.segment_id < self.layouts.layout.next_segment_id:
            raise InvalidArgument(f"The message {message_id} is not from {self.topic}.")
        return message_id, lane
