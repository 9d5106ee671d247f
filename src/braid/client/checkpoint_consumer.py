"""`CheckpointConsumer`: reads a topic without a subscription; the application keeps its position as a `Checkpoint`.

Alone, it reads the segments in the order of the DAG: a segment is begun once everything in all its ancestors has been received
by the application, so that what is read after a checkpoint is, key by key, what follows it (C17). In a group, the topic's
controller shares the segments out among the members, with no order between a segment and its successors. A segment that moves
is handed over: its member stops, says where, and only then another one goes on from there. The group remembers those places,
where each segment was begun and, from one checkpoint to the next, the one before; a member that is gone without a word
leaves no more than that. Positions advance when the application receives, never before. For a lone reader, brokers store
nothing.
"""

from __future__ import annotations

import datetime
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from braid.client.checkpoint_starts import CheckpointStart
from braid.client.checkpoints import (
    END,
    AtTime,
    Checkpoint,
    Place,
    missing,
    read_place,
    understood_start,
)
from braid.client.consumer_lanes import LaneOptions
from braid.client.consumer_origin import checked_name, checked_text
from braid.client.consumer_segments import SegmentsConsumer
from braid.client.consumer_session import Assignment, ConsumerSession
from braid.client.group_places import GroupReports, further
from braid.client.messages import EARLIEST, LATEST, Message, MessageId
from braid.client.reader_lanes import ReaderLane
from braid.client.topic_consumer import TopicConsumer
from braid.errors import (
    BraidError,
    CheckpointInvalid,
    CheckpointOutdated,
    Closed,
    DataLost,
    NotFound,
    NotReady,
)
from braid.model.layout import SegmentLayout
from braid.model.segments import physical_name
from braid.wire.types import InitialPosition, ScalableConsumerType, SubType

if TYPE_CHECKING:
    from braid.client.client import Client

log = logging.getLogger(__name__)
Start = MessageId | Checkpoint | bytes | datetime.datetime | int
"""EARLIEST, LATEST, a checkpoint (also as its bytes), or a time (in milliseconds since the epoch, or aware)."""


class CheckpointConsumer(SegmentsConsumer[ReaderLane]):
    """Receives a topic's messages from a position of the application's own keeping. Made by `Client.checkpoint_consumer`.

    Brokers keep no data for it: how long data can be read is a matter of the namespace's retention.

    The members of a group get each message once while they live: a member lives until it is closed, unless it was away from
    the topic's leader for longer than `consumer_grace_seconds`, or another one took its name. Of one that does not live any
    more, the group knows the last hand-over and the last checkpoint but one: what it received after that comes again to the
    others (at least once, nothing is lost). Who is first in a segment decides by its `start` where the group begins there;
    a member that comes with a checkpoint takes the segments that it is given first from there, whatever the group knows.
    """

    def __init__(
        self,
        client: Client,
        topic: str,
        *,
        start: Start = EARLIEST,
        group: str | None = None,
        name: str | None = None,
        schema: Any = None,
    ) -> None:
        super().__init__(client, topic, checked_name("name", name, f"checkpoint-{client.runtime.token()}"), schema)
        self.group = None if group is None else checked_text("group", group)
        self._start = CheckpointStart(self.layouts, understood_start(start), self.group)
        self._places: dict[int, Place] = {}
        """Every segment of the layout (of the group's share, in a group) and how far it was received."""
        self._is_opening = True
        self._next_segment = 0
        """Segments from this id on were not seen yet."""
        self._left_at: dict[int, int] = {}
        """In a group: segments taken away unread by an assignment of a layout (its epoch) not known here yet."""
        self._assigned: Mapping[int, str] = {}
        self._restored: dict[int, Place] = {}
        """In a group: places of the checkpoint to start from, as long as their segments may come with the first share."""
        if group is not None and isinstance(self._start.given, Checkpoint):
            self._restored = dict(self._start.given.places)
        self._session: ConsumerSession | None = None
        self._reports: GroupReports | None = None
        self._seeking: set[int] = set()
        """In a group: segments to be handed over once their end is found."""
        self._first_layout = SegmentLayout(-1, 0, {})
        if group is not None:
            self._session = ConsumerSession(
                self.layouts,
                group,
                self.name,
                ScalableConsumerType.CHECKPOINT,
                InitialPosition.EARLIEST,
                assigned=self._assign,
                ended=self._session_ended,
            )
            self._reports = GroupReports(self._session, self.name)

    async def open(self) -> None:
        """Find the place to begin in every segment and attach. Raises CheckpointInvalid, CheckpointOutdated."""
        await self.layouts.open()
        await self._start.check()
        layout = self.layouts.layout
        self._next_segment = layout.next_segment_id
        self._first_layout = layout
        if self._session is None:
            for segment_id in layout.all_segments:
                self._places[segment_id] = self._start.place_of(segment_id, layout, is_new=False)
        self.layouts.listen(self._follow, self._layout_failed)
        if self._session is not None:
            await self._session.open()
        else:
            self._follow(self.layouts.layout)
        timer = self.clock.call_later(self.config.operation_timeout, self._give_up_trying)
        try:
            for lane in list(self._lanes.values()):
                await lane.tried.wait()
                if lane.place == LATEST and lane.connection is None:
                    lane.check_usable()
                    raise NotReady(f"The end of {lane.topic} could not be found in time; try again.")
            if self._reports is not None and not await self._reports.flush(self.config.operation_timeout):
                raise NotReady(f"The group {self.group} of {self.topic} could not be told where it begins; try again.")
        finally:
            timer.cancel()
        self._is_opening = False
        self._check()

    @property
    def segments(self) -> list[int]:
        """Ids of the segments being read at the moment."""
        return sorted(self._lanes)

    def checkpoint(self) -> Checkpoint:
        """Where the application stands: everything received so far, and nothing else. In a group: in the segments this member
        has; the group takes it for stored when the next one is taken, and would begin there should this member be lost."""
        found = {number: self._place_now(number, place) for number, place in self._places.items()}
        places = {number: place for number, place in found.items() if place != LATEST}
        if self._reports is not None:
            self._reports.checkpoint_taken(places)
        return Checkpoint(str(self.layouts.resolved), self.layouts.incarnation, self.layouts.layout.next_segment_id, places)

    async def close(self) -> None:
        """Stop reading. Idempotent."""
        self.is_closed = True
        self.client.forget(self)
        self._queue.clear()
        self._queue.wake()
        if self._reports is not None:
            places = {
                number: self._place_now(number, self._places[number]) for number in self._assigned if number in self._places
            }
            await self._reports.say_farewell({number: place for number, place in places.items() if place != LATEST})
        await self._close_lanes()
        if self._session is not None:
            await self._session.close()
        await self.layouts.close()

    # For the lanes.

    def put(self, lane: TopicConsumer, messages: list[Message]) -> None:
        assert isinstance(lane, ReaderLane)
        if self.is_closed or self.failure is not None or self._lanes.get(lane.segment_id) is not lane:
            return
        if fresh := lane.sift(messages):
            self._queue.put(lane, fresh)
        else:
            self._tell_received(lane)

    def lane_ended(self, lane: TopicConsumer) -> None:
        assert isinstance(lane, ReaderLane)
        self._finish_if_read(lane)

    def lane_failed(self, lane: TopicConsumer, error: BraidError) -> None:
        assert isinstance(lane, ReaderLane)
        if self.is_closed or isinstance(error, Closed) or self._lanes.get(lane.segment_id) is not lane:
            return
        if isinstance(error, DataLost):
            self._fail_outdated(lane.segment_id, error)
        elif not isinstance(error, NotFound) or self.layouts.is_synthetic:
            self.fail(error)  # partitions go only with their topic, which no layout tells
        elif self.layouts.failure is None:
            self._vanished(lane.segment_id)
            self._follow(self.layouts.layout)

    # Which segments are read.

    def _follow(self, layout: SegmentLayout) -> None:
        """The layout changed, or a segment was finished: begin what can be begun now."""
        if self.is_closed or self.failure is not None:
            return
        if self._session is None:
            for segment_id in [each for each in self._places if each not in layout.all_segments]:
                self._vanished(segment_id)
            for segment_id in missing(layout, self._next_segment):
                self._fail_outdated(segment_id)  # came and went while no layout arrived
            self._next_segment = max(self._next_segment, layout.next_segment_id)
            if self.failure is not None:
                return  # nothing may be begun: it could be what follows a gap
            for segment_id in layout.all_segments:
                if segment_id not in self._places:
                    self._places[segment_id] = self._start.place_of(segment_id, layout, is_new=True)
            for segment_id, info in sorted(layout.all_segments.items()):
                lane = self._lanes.get(segment_id)
                if lane is None and self._may_begin(segment_id, layout):
                    self._add(segment_id, str(physical_name(self.layouts.resolved, info)))
                elif lane is not None and info.is_sealed:
                    self._ask_for_end(lane)
        else:
            self._check_shared(layout)
        self._queue.wake()

    def _may_begin(self, segment_id: int, layout: SegmentLayout) -> bool:
        if self._places[segment_id] is END:
            return False
        # A lane whose segment is not in the layout any more may be an ancestor: layouts do not say so after its removal.
        if any(each < segment_id and each not in layout.all_segments for each in self._lanes):
            return False
        return all(self._places[ancestor] is END for ancestor in layout.ancestors(segment_id))

    def _check_shared(self, layout: SegmentLayout) -> None:
        """In a group: what this member was reading must not have been removed unread. What was assigned may be younger than the
        layout that is known here: the leader and the layout come by two ways."""
        for segment_id in [each for each in self._lanes if each < layout.next_segment_id and each not in layout.all_segments]:
            self._vanished(segment_id)
        for segment_id, epoch in list(self._left_at.items()):
            if epoch <= layout.epoch:
                del self._left_at[segment_id]
                if segment_id not in layout.all_segments:
                    self._fail_outdated(segment_id)

    def _assign(self, assignment: Assignment) -> None:
        if assignment.is_managed and self._reports is not None:
            self._reports.follow(assignment)
        if self.is_closed or self.failure is not None:
            return
        self._assigned = assignment.topics
        for lane in [each for number, each in self._lanes.items() if number not in self._assigned]:
            self._lose(lane, assignment)
        if assignment.is_managed:
            for segment_id in assignment.owed:
                self._let_go(segment_id)
            for segment_id in [each for each in self._places if each not in self._assigned]:
                del self._places[segment_id]  # others read it by now
        try:
            for segment_id, topic in self._assigned.items():
                self._take_up(segment_id, topic, assignment)
        except CheckpointInvalid as error:
            self.fail(error)
        if not assignment.is_partial:
            self._restored.clear()
        self._check_shared(self.layouts.layout)
        self._queue.wake()

    def _lose(self, lane: ReaderLane, assignment: Assignment) -> None:
        segment_id = lane.segment_id
        if not (lane.is_exhausted and not self._queue.count(lane)):  # else it was read to its end
            self._left_at[segment_id] = assignment.layout_epoch
        self._queue.drop(lane)
        self._places[segment_id] = self._place_now(segment_id, self._places[segment_id])
        if segment_id in assignment.owed and self._places[segment_id] == LATEST:
            self._find_end(lane)
        else:
            self._remove(lane)

    # Places that go from member to member.

    def _take_up(self, segment_id: int, topic: str, assignment: Assignment) -> None:
        """Read an assigned segment: from where it was left here or in the group, or as the first from where we start."""
        known = assignment.places.get(segment_id)
        group = None if known is None else read_place(known, segment_id) if known else self._start.beginning
        untold = None if self._reports is None else self._reports.forget(segment_id)
        lane, place = self._lanes.get(segment_id), self._places.get(segment_id, untold)
        is_start = place is None
        if lane is not None and place is not None:
            if group is None or not further(group, self._place_now(segment_id, place)):
                return
            if self._reports is not None and self._reports.is_start_untold(segment_id):
                return  # it begins before the group's place, as it was told to, and the group does not know yet
            self._queue.drop(lane)  # others had it while this member, or its broker, was away from the leader
            self._remove(lane)
            place = group
        elif place is None:
            place = self._restored.pop(segment_id, group)
            if place is None:
                is_new = segment_id not in self._first_layout.all_segments
                place = self._start.place_of(segment_id, self.layouts.layout, is_new=is_new)
        elif group is not None and further(group, place):
            place = group
        self._places[segment_id] = place
        if place is not END:
            self._add(segment_id, topic)
        if is_start and assignment.is_managed and place != group and self._reports is not None:
            self._reports.expect(segment_id)
            self._tasks.spawn(self._tell_start(segment_id, self._lanes.get(segment_id)), f"start of segment {segment_id}")

    async def _tell_start(self, segment_id: int, lane: ReaderLane | None) -> None:
        """The group does not know yet where it begins in this segment; the end is known once the lane is attached. What was
        received since is not told: only a checkpoint or a hand-over says that the application has it."""
        if lane is not None:
            await lane.tried.wait()
        assert self._reports is not None
        if not self._reports.is_expected(segment_id):
            return  # a checkpoint was told since, or the segment was let go of
        place = END if lane is None else lane.place
        if place != LATEST and segment_id in self._assigned and self._lanes.get(segment_id, lane) is lane:
            self._reports.tell(segment_id, place, is_start=True)
        else:
            self._reports.stop_expecting(segment_id)

    def _let_go(self, segment_id: int) -> None:
        """The segment goes to another member as soon as the group knows where this one has stopped."""
        place = self._places.get(segment_id)
        if self._reports is not None and segment_id not in self._seeking:
            self._reports.tell(segment_id, place, is_released=True)

    def _find_end(self, lane: ReaderLane) -> None:
        """A segment goes to another member before its end, where this one began, was found."""
        assert self._reports is not None
        del self._lanes[lane.segment_id]
        self._closing[lane] = None
        self._seeking.add(lane.segment_id)
        self._reports.expect(lane.segment_id)
        self._tasks.spawn(self._hand_over_end(lane, self._reports), f"end of segment {lane.segment_id}")

    async def _hand_over_end(self, lane: ReaderLane, reports: GroupReports) -> None:
        await lane.tried.wait()
        self._seeking.discard(lane.segment_id)
        if lane.segment_id not in self._assigned:
            reports.tell(lane.segment_id, None if lane.place == LATEST else lane.place, is_released=True)
        else:
            reports.stop_expecting(lane.segment_id)
        await self._close_and_forget(lane)

    def _add(self, segment_id: int, topic: str) -> None:
        place = self._places[segment_id]
        assert isinstance(place, MessageId | AtTime)
        options = LaneOptions(
            subscription=f"reader-{self.client.runtime.token()}",  # not of our name: that may be one no subscription can have
            sub_type=SubType.EXCLUSIVE,
            name=f"{self.name}-seg-{segment_id}",
            initial=InitialPosition.LATEST,
            is_durable=False,
            has_no_gaps=True,
            codec=self.codec,
            partition=self._partition_of(topic),
            segment_id=segment_id,
            shown_topic=self.topic,
            origin=self._origin,
        )
        lane = self._lanes[segment_id] = ReaderLane(self.client, self, topic, options, place)
        lane.open_soon()

    # The end of a segment.

    def _finish_if_read(self, lane: ReaderLane) -> None:
        """The segment is sealed and the broker saw everything received: once the application has it, successors follow."""
        if self.is_closed or not lane.is_ended or self._queue.count(lane) or self._lanes.get(lane.segment_id) is not lane:
            return
        self._remove(lane)
        self._places[lane.segment_id] = END
        layout = self.layouts.layout
        if isinstance(lane.place, AtTime) and lane.handed is not None:
            # Clocks of brokers differ: where a segment had messages of that time, its successors have nothing before it.
            for descendant in layout.descendants(lane.segment_id):
                if isinstance(self._places.get(descendant), AtTime):
                    self._places[descendant] = EARLIEST
        self._follow(layout)

    def _vanished(self, segment_id: int) -> None:
        """Retention removed the segment from the layout."""
        lane, place = self._lanes.get(segment_id), self._places.get(segment_id)
        if place is None or place is END:  # none: dealt with when another one was finished
            self._places.pop(segment_id, None)
        elif lane is not None and lane.is_exhausted:
            lane.is_ended = True
            self._finish_if_read(lane)
        elif (
            self._is_opening
            and segment_id < self.layouts.layout.next_segment_id
            and not isinstance(self._start.given, Checkpoint)
            and not (lane is not None and lane.was_attached)
        ):
            # Retention was quicker than the first attachment. What there is begins behind it; nobody was told of more.
            if lane is not None:
                self._remove(lane)
            self._places[segment_id] = END
        else:
            self._fail_outdated(segment_id)

    def _fail_outdated(self, segment_id: int, lost: DataLost | None = None) -> None:
        """Data is missing: what was received from before the gap can still be handed out, nothing that may come after it."""
        if lost is None:
            what = f"segment {segment_id} of {self.topic} before it was read to its end"
        else:
            what = f"messages of segment {segment_id} of {self.topic} before they were read ({lost.message.rstrip('.')})"
        begin = "start from EARLIEST"
        if self.group is not None:  # `start` alone does not help: the group's place goes before it
            begin = f"take another group, or delete the subscription {self.group}, and {begin}"
        self.fail(
            CheckpointOutdated(
                f"Retention has removed {what}; {begin}, and keep data longer, or keep a subscription, if that must not happen."
            )
        )
        for lane in self._lanes.values():
            if lane.segment_id > segment_id:  # descendants have higher ids
                self._queue.drop(lane)

    def _remove(self, lane: ReaderLane) -> None:
        del self._lanes[lane.segment_id]
        self._close_lane(lane)

    # Inside.

    def _handed_out(self, lane: ReaderLane, message: Message) -> None:
        lane.handed = self._places[lane.segment_id] = message.id
        if not self._queue.count(lane):
            self._tell_received(lane)
            self._finish_if_read(lane)

    def _tell_received(self, lane: ReaderLane) -> None:
        """The broker tells the end of a sealed segment to readers that have acknowledged everything in it."""
        if lane.handed is not None and not self._queue.count(lane):
            lane.acknowledge_up_to(lane.handed)

    def _place_now(self, segment_id: int, place: Place) -> Place:
        lane = self._lanes.get(segment_id)
        return lane.place if lane is not None and place in (LATEST, EARLIEST) else place

    def _is_waiting_for_application(self) -> bool:
        return self._session is None and self._are_lanes_exhausted(list(self._lanes.values()))

    def _give_up_trying(self) -> None:
        for lane in self._lanes.values():
            lane.tried.set()

    def _session_ended(self, error: BraidError) -> None:
        if self.is_closed:
            return
        self.fail(error)
        if self._reports is not None:
            self._reports.stop()
        self._queue.clear()
        for lane in list(self._lanes.values()):
            self._remove(lane)
