"""`StreamConsumer`: reads a share of a topic's segments in order, as its controller assigns them.

Each message carries the positions handed out before it (its vector), taken in the same step as it leaves the queue, so that a
cumulative acknowledgement never covers a message the application does not have. Nothing is ever acknowledged implicitly. A
segment that goes to another consumer is given away only when everything handed out from it is acknowledged (or a bounded time
has passed), so that the next owner starts behind the last message and order per key holds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from braid.client.consumer_lanes import LaneOptions
from braid.client.consumer_origin import checked_name, checked_text, initial_position
from braid.client.consumer_session import Assignment, ConsumerSession
from braid.client.messages import LATEST, Message, MessageId, is_after
from braid.client.stream_lanes import PositionVector, StreamLane
from braid.client.stream_transactions import TransactionalStream
from braid.client.topic_consumer import TopicConsumer
from braid.client.transactions import IN_BLOCK, Joinable, joined
from braid.errors import BraidError, Closed, Conflict, InvalidArgument, NotFound
from braid.wire.types import ScalableConsumerType, SubType

if TYPE_CHECKING:
    from braid.client.client import Client
    from braid.model.layout import SegmentLayout

log = logging.getLogger(__name__)
_set = msgspec.structs.force_setattr
WARN_SECONDS = 10.0
"""How often an application is reminded of acknowledgements that hold a segment up."""


class StreamConsumer(TransactionalStream):
    """Receives messages in order per key, together with the other consumers of its subscription. Made by
    `Client.stream_consumer`.

    Acknowledge as you go: the successors of a segment that was split or merged follow once it is acknowledged to its end.
    """

    def __init__(
        self,
        client: Client,
        topic: str,
        subscription: str,
        *,
        name: str | None = None,
        initial: Literal["earliest", "latest"] = "earliest",
        schema: Any = None,
    ) -> None:
        super().__init__(client, topic, checked_name("name", name, f"stream-{client.runtime.token()}"), schema)
        self.subscription = checked_text("subscription", subscription)
        self._initial = initial_position(initial)
        self._session = ConsumerSession(
            self.layouts,
            subscription,
            self.name,
            ScalableConsumerType.STREAM,
            self._initial,
            assigned=self._assign,
            ended=self._session_ended,
        )
        self._wanted: Mapping[int, str] = {}
        """The assignment: physical names by segment id."""
        self._resets = 0
        """How often the subscription was reset, as far as is known."""
        self._gone: set[int] = set()
        """Assigned segments that do not exist any more."""
        self._handed: dict[int, MessageId] = {}
        """The position handed out last, by segment."""
        self._vector = PositionVector(0, {})
        self._vector_of: int | None = None
        """Segment whose messages get `_vector`; None = it must be made anew."""
        self._acked_vector: Mapping[int, MessageId] | None = None
        """The vector acknowledged last; most messages share theirs."""

    async def open(self) -> None:
        """Register and attach to what is assigned; segments that another consumer still holds follow by themselves."""
        await self.layouts.open()
        self.layouts.listen(self._layout_changed, self._layout_failed)
        await self._session.open()
        timer = self.clock.call_later(self.config.operation_timeout, self._give_up_trying)
        lanes = list(self._lanes.values())
        try:
            for lane in lanes:
                await lane.tried.wait()
        finally:
            timer.cancel()
        for lane in lanes:
            info = self.layouts.layout.all_segments.get(lane.segment_id)
            if lane.failure is not None and info is not None and info.is_active:
                lane.check_usable()
        self._check()

    @property
    def segments(self) -> list[int]:
        """Ids of the segments being read at the moment."""
        return sorted(number for number, lane in self._lanes.items() if lane.releasing is None)

    async def acknowledge_cumulative(
        self, message: Message | MessageId, *, wait: bool = False, txn: Joinable | None = None
    ) -> None:
        """This message and everything handed out before it, in all segments, is dealt with. With `wait`, return once the
        brokers have that durable. Given only an id, that is: everything before it in its own segment.

        With `txn`, that counts once the transaction is committed; if it is not, everything since the last acknowledgment comes
        again, in order. One transaction at a time."""
        if txn is not None:
            await self._acknowledge_in(joined(txn), message, wait=wait)
            return
        own, vector = self._own(message)
        number = None if vector is None else vector.number
        lane = self._acknowledge(own, number)
        if vector is not None and vector is not self._acked_vector:
            for segment_id, position in vector.positions.items():
                if segment_id != own.segment_id:
                    self._acknowledge(position, number)
            self._acked_vector = vector
        if wait:
            if lane is None:
                raise Conflict(
                    f"Segment {own.segment_id} of {self.topic} was given to another consumer before {own} was acknowledged; "
                    "the message comes again there."
                )
            others = [self._lanes.get(each) for each in vector or () if each != own.segment_id]
            for each in (lane, *others):
                if each is not None and not each.is_leaving and each.acked is not None:
                    try:
                        await each.confirm_up_to(each.acked)
                    except Closed:
                        self._session.check()
                        raise

    async def close(self) -> None:
        """Leave the subscription: acknowledgements are sent, segments go to other consumers at once. Idempotent."""
        self.is_closed = True
        for lane in self._lanes.values():
            lane.doom("was left, because the consumer was closed before the transaction was committed.")
        self.client.forget(self)
        self._queue.clear()
        self._queue.wake()
        await self._close_lanes()
        await self._session.close()
        await self.layouts.close()

    # For the lanes.

    def put(self, lane: TopicConsumer, messages: list[Message]) -> None:
        assert isinstance(lane, StreamLane)
        if self.is_closed or lane.releasing is not None or self._lanes.get(lane.segment_id) is not lane:
            lane.withheld += len(messages)  # the next owner gets them
            return
        before = lane.handed
        fresh = lane.sift(messages)
        if before is not None and lane.handed is None:
            self._begin(lane)
        if fresh:
            self._queue.put(lane, fresh)

    def lane_ended(self, lane: TopicConsumer) -> None:
        """The broker saw everything acknowledged. The lane stays until the controller has seen that too and takes the segment
        away: somebody who leaves a segment by himself may be taken for gone."""
        assert isinstance(lane, StreamLane)
        lane.resolved.set()
        self._queue.wake()

    def lane_failed(self, lane: TopicConsumer, error: BraidError) -> None:
        assert isinstance(lane, StreamLane)
        lane.resolved.set()
        if self.is_closed or isinstance(error, Closed):
            return
        if self._lanes.get(lane.segment_id) is not lane or lane.releasing is not None:
            return
        if isinstance(error, NotFound) and not self.layouts.is_synthetic:
            # Pruned, or the topic was deleted, which the layout session tells; of a regular one, nobody else does.
            log.info("segment %d of %s is gone: %s", lane.segment_id, self.topic, error)
            lane.doom("does not exist any more.")
            del self._lanes[lane.segment_id]
            self._settled[lane.segment_id] = LATEST  # nobody will see anything of it again
            self._gone.add(lane.segment_id)
            self._handed.pop(lane.segment_id, None)
            self._vector_of = None
        else:
            self.fail(error)

    # Assignments.

    def _assign(self, assignment: Assignment) -> None:
        if self.is_closed or self.failure is not None:
            return
        wanted = self._wanted = assignment.topics
        if assignment.resets > self._resets:
            self._resets = assignment.resets
            for lane in self._lanes.values():
                self._discard(lane)
        self._gone = set() if assignment.is_first else self._gone & wanted.keys()
        for segment_id, lane in list(self._lanes.items()):
            if segment_id not in wanted and lane.releasing is None:
                self._release(lane)
            elif segment_id in wanted and lane.releasing is not None and not lane.is_leaving:
                self._keep(lane, lane.releasing)
        for segment_id in wanted:
            if segment_id not in self._lanes and segment_id not in self._gone:
                self._add(segment_id)
        self._queue.wake()

    def _add(self, segment_id: int) -> None:
        topic = self._wanted[segment_id]
        options = LaneOptions(
            subscription=self.subscription,
            sub_type=SubType.EXCLUSIVE,
            name=f"{self.name}-seg-{segment_id}",
            initial=self._initial,
            codec=self.codec,
            partition=self._partition_of(topic),
            segment_id=segment_id,
            shown_topic=self.topic,
            origin=self._origin,
            resets=self._resets if topic.startswith("segment://") else None,
        )
        lane = self._lanes[segment_id] = StreamLane(self.client, self, topic, options)
        self._begin(lane)
        lane.open_soon()

    def _begin(self, lane: StreamLane) -> None:
        """From here on only new vectors speak of this lane."""
        self._handed.pop(lane.segment_id, None)
        self._vector_of = None
        lane.begun = self._vector.number + 1

    def _release(self, lane: StreamLane) -> None:
        lane.withheld = self._queue.drop(lane)
        lane.is_cut_off = lane.connection is None  # it is not let in again, so nothing can be acknowledged there any more
        lane.releasing = self._tasks.spawn(self._give_away(lane), f"release segment {lane.segment_id}")

    def _discard(self, lane: StreamLane) -> None:
        """The subscription was reset: what was handed out and acknowledged before means nothing any more. Another lane follows
        if the segment is ours."""
        lane.doom("was reset together with its subscription before the transaction was committed.")
        lane.forget_acks()
        lane.acked = None
        self._settled.pop(lane.segment_id, None)
        self._queue.drop(lane)
        self._handed.pop(lane.segment_id, None)
        self._vector_of = None
        if not lane.is_leaving:
            if lane.releasing is not None:
                lane.releasing.cancel()
            lane.is_leaving = True
            lane.releasing = self._tasks.spawn(self._replace(lane), f"leave segment {lane.segment_id}")

    def _keep(self, lane: StreamLane, releasing: asyncio.Task[Any]) -> None:
        """The segment came back before it was given away: what was dropped from the queue is sent again."""
        releasing.cancel()
        lane.releasing = None
        lane.is_cut_off = False
        lane.start_again()
        withheld, lane.withheld = lane.withheld, 0
        lane.consumed(withheld)

    async def _give_away(self, lane: StreamLane) -> None:
        begun = self.clock.monotonic()
        limit = self.config.release_wait
        while lane.is_unresolved and not lane.is_cut_off:
            waited = self.clock.monotonic() - begun
            if waited >= limit:
                log.warning(
                    "segment %d of %s goes to another consumer although the message %s was not acknowledged for %.0f s; "
                    "it comes again there",
                    lane.segment_id,
                    self.topic,
                    lane.handed,
                    waited,
                )
                break
            if waited >= WARN_SECONDS:
                log.warning(
                    "segment %d of %s is wanted by another consumer and waits for the acknowledgement of %s",
                    lane.segment_id,
                    self.topic,
                    lane.handed,
                )
            lane.resolved.clear()
            timer = self.clock.call_later(min(WARN_SECONDS, limit - waited), lane.resolved.set)
            try:
                await lane.resolved.wait()
            finally:
                timer.cancel()
        lane.doom(
            "was taken away before the transaction was committed: another consumer gets it, or the subscription was reset."
        )
        lane.is_leaving = True
        await self._replace(lane)

    async def _replace(self, lane: StreamLane) -> None:
        """Close a lane that is leaving, and open another one if the segment is ours again."""
        await lane.close()
        segment_id = lane.segment_id
        if self._lanes.get(segment_id) is lane:
            del self._lanes[segment_id]
            if lane.acked is not None:
                self._settled[segment_id] = lane.acked
            self._handed.pop(segment_id, None)
            self._vector_of = None
            if segment_id in self._wanted:  # given back to us meanwhile
                self._add(segment_id)
        self._queue.wake()

    # Inside.

    def _handed_out(self, lane: StreamLane, message: Message) -> None:
        """Note the position and give the message its vector, in one step."""
        segment_id = lane.segment_id
        if self._vector_of != segment_id:
            self._vector = PositionVector(self._vector.number + 1, dict(self._handed))
            self._vector_of = segment_id
        lane.handed = self._handed[segment_id] = message.id
        _set(message, "vector", self._vector)
        if (txn := IN_BLOCK.get()) is not None and txn.state == "OPEN":
            lane.read_in = txn
            txn.hold(self)

    def _own(self, message: Message | MessageId) -> tuple[MessageId, PositionVector | None]:
        if self.is_closed:
            raise Closed(f"The consumer of {self.topic} was closed; what it had not acknowledged comes again.")
        if isinstance(self.failure, NotFound):
            self._check()  # the topic is gone: that counts, not what else came of it
        self._session.check()
        own = self._origin.own(message)
        if own.segment_id < 0:
            raise InvalidArgument(f"The message {own} is not from a stream consumer of {self.topic}.")
        vector = message.vector if isinstance(message, Message) else None
        return own, vector if isinstance(vector, PositionVector) else None

    def _acknowledge(self, position: MessageId, number: int | None) -> StreamLane | None:
        """Acknowledge one segment up to a position that its lane has handed out; unchanged positions cost nothing. Returns the
        lane, or None if this is of no interest any more: the segment was given away, or is being read anew."""
        lane = self._lane_with(position, number)
        if lane is None or lane.handed is None:
            return None
        if position is not lane.acked:
            up_to = lane.handed if position is not lane.handed and is_after(position, lane.handed) else position
            if lane.acked is None or is_after(up_to, lane.acked):
                lane.acked = up_to
                lane.acknowledge_up_to(up_to)
        return lane

    def _is_waiting_for_application(self) -> bool:
        return self._are_lanes_exhausted([each for each in self._lanes.values() if each.releasing is None])

    def _layout_changed(self, layout: SegmentLayout) -> None:
        self._queue.wake()

    def _give_up_trying(self) -> None:
        for lane in self._lanes.values():
            lane.tried.set()

    def _session_ended(self, error: BraidError) -> None:
        """Displaced, or refused for good: others are to get the segments."""
        if self.is_closed:
            return
        self.fail(error)
        self._queue.clear()
        for lane in self._lanes.values():
            lane.doom("was taken away, because the consumer lost its place in the subscription.")
            if lane.releasing is not None and not lane.is_leaving:
                lane.releasing.cancel()
            if not lane.is_leaving:
                lane.is_leaving = True
                lane.releasing = self._tasks.spawn(lane.close(), f"close segment {lane.segment_id}")
