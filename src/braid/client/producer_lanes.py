"""`LaneSet`: the lanes of one producer, one per active segment or partition, and what becomes of them when the layout changes.

Owns the order of a key across splits and merges: the lane of a sealed segment is frozen, what it could not store is re-routed
in its order to the lanes of the children, and only then are newer messages of those keys let out. One wait per sealed segment,
never one per message.

With deduplication, what was stored and not answered is not sent again: a child knows the last number its parent stored of each
lane, so the frozen lane attaches there under its old name, only to be told that number. It never sends there: two children
would count its numbers each for itself, and a merge of them could not tell any more what is stored. A topic may deduplicate
producers that did not ask for it, which no broker says beforehand: after a lost connection the child is asked in any case, and
one that does not deduplicate names no number.

Synchronous: it decides, lanes attach in the background.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from braid.client.blocks import NO_KEY, Block, BlockDraft, BlockSending, check_largest, places
from braid.client.connection import Connection
from braid.client.lane_elders import ElderRanges, routing_key
from braid.client.lanes import TopicProducer
from braid.client.layouts import LayoutSession
from braid.client.producer_drafts import Draft, ProducerOptions, Window
from braid.errors import BraidError, Closed, ProducerBusy
from braid.model.layout import SegmentLayout
from braid.model.routing import Routing, ring_hash
from braid.model.segments import SegmentInfo, physical_name
from braid.model.txn import TxnId
from braid.runtime.clock import Timer
from braid.runtime.tasks import Tasks
from braid.wire.types import CompressionType

if TYPE_CHECKING:
    from braid.client.client import Client

log = logging.getLogger(__name__)
LONGEST_KEPT = 1024
"""Characters of a key whose segment is remembered; longer ones are hashed each time."""


class LaneSet:
    """Chooses the lane of a message and moves messages between lanes."""

    def __init__(self, client: Client, topic: str, name: str | None, options: ProducerOptions) -> None:
        self.topic = topic
        self.name = name
        self.options = options
        self.window = Window(client.config.max_pending_messages, client.config.max_pending_bytes)
        self.only: TopicProducer | None = None
        """The one lane every message takes, if there is but one."""
        self.lanes: dict[int, TopicProducer] = {}
        """By segment id: those that take messages."""
        self.made = 0
        """How many lanes there were so far, those that only asked included."""
        self.failure: BraidError | None = None
        """Why the producer is of no more use, if so."""
        self._is_closing = False
        self._is_stopped = False
        self._client = client
        self._session: LayoutSession | None = None
        self._layout: SegmentLayout | None = None
        self._frozen: list[TopicProducer] = []
        """Lanes of sealed segments whose messages are not re-routed yet, older ones first."""
        self._inquiries: dict[TopicProducer, TopicProducer] = {}
        """Of frozen lanes: their old name on a child, which tells how much of them was stored."""
        self._ranges = ElderRanges(client, topic)
        self._leaving: dict[TopicProducer, None] = {}
        self._by_key: dict[str, TopicProducer] = {}
        self._turn = 0
        self._refresh: Timer | None = None
        self._tasks = Tasks(f"producer {topic}")

    # Choosing.

    def route(self, key: str | None, sequence_id: int | None = None) -> TopicProducer:
        """The lane of a new message with this key, or else of the number that it was given; without one the lanes take turns.
        Raises why no more are taken."""
        layout = self._usable_layout()
        lane = self._route(layout, key if key is not None or sequence_id is None else str(sequence_id))
        if len(layout.active_in_order) == 1:
            self.only = lane
        return lane

    def pieces(self, block: Block) -> Sequence[Block]:
        """The block as the window takes it: about an entry for each lane, and never much beyond the window's size. Raises
        TooLarge for a row that no broker would take; of a compressed one, only the attempt tells."""
        config, lanes = self._client.config, len(self._usable_layout().active_in_order)
        if self.options.compression is CompressionType.NONE:
            check_largest(block, [lane.max_message_size for lane in self.lanes.values()])
        size = min(config.block_max_bytes * lanes, max(1, self.window.max_size // 4))
        return block.cut(size, config.block_max_messages * lanes)

    def send_block(self, block: Block, sending: BlockSending, deadline: float, txn: TxnId | None) -> None:
        """Hand rows to their lanes; those without a key go by turns, an entry's worth at a time."""
        layout, config = self._usable_layout(), self._client.config
        order = layout.active_in_order
        chosen: list[tuple[TopicProducer, Block]] = []
        for place, rows in block.spread(layout.routing, places(layout)[0]) if len(order) > 1 else [(0, block)]:
            if place != NO_KEY:
                chosen.append((self._lane_of(order[place]), rows))
                continue
            pieces = rows.cut(config.block_max_bytes, config.block_max_messages)
            chosen += [(self._route(layout, None), each) for each in pieces]
        for lane, _rows in chosen:
            lane.check_usable()  # all of it, or nothing
        for lane, rows in chosen:
            lane.send_block(rows, sending, deadline, txn)

    def _usable_layout(self) -> SegmentLayout:
        if self.failure is not None:
            raise type(self.failure)(*self.failure.args)
        if self._layout is None or self._is_closing:
            raise Closed(f"The producer for {self.topic} is {'not open' if self._layout is None else 'being closed'}.")
        return self._layout

    def everything(self) -> Iterator[TopicProducer]:
        """All lanes, those with older messages first."""
        yield from self._frozen
        yield from self.lanes.values()

    def busy_connection(self) -> Connection | None:
        """A connection of these lanes whose socket takes no more at the moment, if there is one."""
        for lane in self.lanes.values():
            if lane.connection is not None and not lane.connection.can_write:
                return lane.connection
        return None

    def hurry(self) -> None:
        """Send what is collected now: a transaction waits for it."""
        for lane in list(self.everything()):
            if not lane.is_held:
                lane.seal_batch()

    # Opening and closing.

    async def open_all(self, layout: SegmentLayout, session: LayoutSession | None) -> None:
        """A regular topic: attach to every partition now, so that the caller hears what is wrong."""
        for segment in layout.active_in_order:
            lane = self.lanes[segment.segment_id] = self._new(segment, is_managed=session is not None)
            await lane.open()
        self._session = session
        self._layout = layout  # from now on changes are followed
        self._settle_choice()
        if session is not None and len(session.layout.active_segments) > len(layout.active_segments):
            self.use(session.layout)

    def follow(self, session: LayoutSession) -> None:
        """A scalable topic: lanes are opened when they are needed."""
        self._session = session
        self._layout = session.layout
        self._settle_choice()

    def take_no_more(self) -> None:
        """The producer is being closed: new messages are refused, those taken go on."""
        self._is_closing = True
        self.only = None

    async def close(self) -> None:
        """Leave every broker; what is unanswered fails. Idempotent."""
        if self.failure is None:
            self.failure = Closed(f"The producer for {self.topic} was closed.")
        async with asyncio.TaskGroup() as group:
            for lane in (*self._inquiries.values(), *self.everything(), *self._leaving):
                group.create_task(lane.leave())
        await self._tasks.close()
        self.stop()

    def stop(self) -> None:
        """As `close`, but at once: whether the brokers heard of it is not known. Idempotent."""
        if self.failure is None:
            self.failure = Closed(f"The producer for {self.topic} was closed.")
        if self._refresh is not None:
            self._refresh.cancel()
        self._is_stopped = True
        for lane in (*self._inquiries.values(), *self.everything(), *self._leaving):
            lane.stop()
        self._tasks.cancel()
        self._forget_lanes()

    def fail(self, error: BraidError) -> None:
        """The topic is gone: everything fails, now and later."""
        if self._layout is not None and self._layout.routing is Routing.MOD_N:
            return  # the lanes of a regular topic find out by themselves
        if self.failure is not None:
            return
        self.failure = error
        for lane in [*self._inquiries.values(), *self.everything()]:
            lane.drop(error)
            self._retire(lane)
        self._forget_lanes()

    # A new layout.

    def use(self, layout: SegmentLayout) -> None:
        """Follow the layout: freeze the lanes of sealed segments, open those of their children, move what is unanswered."""
        if self.failure is not None or self._layout is None:
            return
        self._layout = layout
        self._by_key.clear()
        active = layout.active_segments
        for segment_id in [each for each in self.lanes if each not in active]:
            self._freeze(self.lanes.pop(segment_id))
        for lane, inquiry in list(self._inquiries.items()):
            if inquiry.segment is None or inquiry.segment.segment_id not in active:
                del self._inquiries[lane]  # asked again below, of a newer segment
                self._retire(inquiry)
        for segment in layout.active_in_order:
            if layout.routing is Routing.MOD_N or any(_overlap(each.segment, segment) for each in self._frozen):
                self._lane_of(segment)
        self._settle_choice()
        for lane in list(self._frozen):
            self._try_settle(lane)

    def _freeze(self, lane: TopicProducer) -> None:
        lane.freeze()
        self._frozen.append(lane)
        if lane.connection is not None and lane.unanswered:
            # The broker answers each message or closes the lane; one that does neither has lost the segment.
            self._client.runtime.clock.call_later(self._client.config.sealed_grace, self._overdue, lane)

    def _overdue(self, lane: TopicProducer) -> None:
        if lane in self._frozen and lane.connection is not None:
            lane.doubt()
            lane.abandon()
            self._try_settle(lane)

    # The lanes' side.

    def lane_ready(self, lane: TopicProducer) -> None:
        for frozen, inquiry in self._inquiries.items():
            if inquiry is lane:
                if lane.last_sequence_id <= frozen.last_sequence_id:  # else somebody else used the name: it tells nothing
                    frozen.settle(lane.last_sequence_id)
                self._move(frozen)
                return
        if lane.elder_numbers:
            self._meet_elders(lane)
        self._try_release(lane)

    def lane_sealed(self, lane: TopicProducer) -> None:
        if lane in self._frozen:
            self._try_settle(lane)
        else:
            self._ask_later()

    def lane_missing(self, lane: TopicProducer) -> None:
        self._ask_later()

    def lane_idle(self, lane: TopicProducer) -> None:
        self._try_settle(lane)

    def lane_failed(self, lane: TopicProducer, error: BraidError) -> None:
        self.window.wake()
        if isinstance(error, Closed):
            return
        for frozen, inquiry in list(self._inquiries.items()):
            if inquiry is lane:
                frozen.drop(error)
                self.lane_expired(frozen, error)
                return
        if isinstance(error, ProducerBusy) and lane.segment is not None:
            # Somebody else has the name there; the next message tries again.
            self.lanes.pop(lane.segment.segment_id, None)
            self._by_key.clear()
            self._settle_choice()
            self._retire(lane)

    def lane_expired(self, lane: TopicProducer, error: BraidError) -> None:
        self.window.wake()
        for each in self._blocked_by(lane):
            each.drop(error)  # newer messages of the same keys must not overtake
        if lane in self._frozen and self.failure is None:
            self._move(lane)

    # Inside.

    def _route(self, layout: SegmentLayout, key: str | None) -> TopicProducer:
        if key is None:
            order = layout.active_in_order
            self._turn += 1
            return self._lane_of(order[self._turn % len(order)])
        found = self._by_key.get(key)
        if found is None:
            found = self._lane_of(layout.segment_of_key(key))
            if len(self._by_key) >= self._client.config.key_cache:
                self._by_key.clear()
            if len(key) <= LONGEST_KEPT:
                self._by_key[key] = found
        return found

    def _lane_of(self, segment: SegmentInfo) -> TopicProducer:
        lane = self.lanes.get(segment.segment_id)
        if lane is None:
            is_regular = self._layout is not None and self._layout.routing is Routing.MOD_N
            lane = self.lanes[segment.segment_id] = self._new(segment, is_managed=is_regular)
            lane.blockers.update(each for each in self._frozen if _overlap(each.segment, segment))
            lane.start()
        return lane

    def _new(self, segment: SegmentInfo, *, is_managed: bool) -> TopicProducer:
        if segment.legacy_topic_name is not None:
            is_partition = segment.legacy_topic_name != self.topic
            return self._lane(
                segment.legacy_topic_name, self.name, None, segment.segment_id if is_partition else -1, is_managed=is_managed
            )
        return self._lane(self._physical(segment), f"{self.name}-seg-{segment.segment_id}", segment)

    def _physical(self, segment: SegmentInfo) -> str:
        if self._session is None:
            raise Closed(f"The producer for {self.topic} is not open.")
        return str(physical_name(self._session.resolved, segment))

    def _lane(
        self, topic: str, name: str | None, segment: SegmentInfo | None, partition: int = -1, *, is_managed: bool = False
    ) -> TopicProducer:
        self.made += 1
        return TopicProducer(
            self._client,
            topic,
            name,
            self.options,
            self.window,
            self,
            partition=partition,
            segment=segment,
            is_managed=is_managed,
        )

    def _settle_choice(self) -> None:
        layout = self._layout
        is_single = layout is not None and len(layout.active_segments) == 1 and not self._is_closing
        self.only = next(iter(self.lanes.values()), None) if is_single else None

    def _meet_elders(self, lane: TopicProducer) -> None:
        """Find out which keys the segments had of which the lane's broker told numbers."""
        layout, session = self._layout, self._session
        if layout is None or session is None or layout.routing is Routing.MOD_N:
            return
        lane.elders = self._ranges.elders(layout, lane.elder_numbers)
        if lane.elders.has_lost:
            lane.is_uninformed = True
            self._tasks.spawn(self._ask_for_removed(lane, layout, session), f"removed segments of {self.topic}")

    async def _ask_for_removed(self, lane: TopicProducer, layout: SegmentLayout, session: LayoutSession) -> None:
        await self._ranges.ask(session)
        lane.elders = self._ranges.elders(layout, lane.elder_numbers)
        lane.is_uninformed = False
        self._try_release(lane)

    def _try_release(self, lane: TopicProducer) -> None:
        if lane.has_attached and not (lane.blockers or lane.is_frozen or lane.is_uninformed):
            lane.release()

    def _try_settle(self, lane: TopicProducer) -> None:
        """Re-route a frozen lane's messages, unless older ones come first or answers are on their way."""
        if lane not in self._frozen or lane.blockers or (lane.connection is not None and lane.unanswered):
            return
        if self.failure is not None:
            return  # being closed: nothing goes anywhere any more
        if lane.segment is not None and (lane.is_doubtful or (self.options.deduplication and lane.unanswered)):
            self._inquire(lane)
        else:
            self._move(lane)

    def _inquire(self, lane: TopicProducer) -> None:
        """Ask a child how much of a sealed lane was stored."""
        if lane in self._inquiries or self._layout is None:
            return
        child = next(each for each in self._layout.active_in_order if _overlap(lane.segment, each))
        inquiry = self._inquiries[lane] = self._lane(self._physical(child), lane.name, child)
        inquiry.is_patient = True
        inquiry.start()

    def _move(self, lane: TopicProducer) -> None:
        """Hand a frozen lane's messages to the next lanes of their keys, which then need not wait for it any more.

        The next one may be frozen too and wait for others, with newer messages of these keys: they join it there. In a lane
        beyond it they would be overtaken, should that one be frozen as well before the one between has moved.
        """
        self._frozen.remove(lane)
        if (inquiry := self._inquiries.pop(lane, None)) is not None:
            self._retire(inquiry)
        drafts = lane.take_back()
        blocked = self._blocked_by(lane)
        between = [each for each in self._frozen if lane in each.blockers and each.failure is None]
        children = [each for each in self.lanes.values() if lane in each.blockers]
        by_next: dict[TopicProducer, list[Draft]] = {}
        for draft in drafts:
            if isinstance(draft, BlockDraft):
                parts = self._next_of_block(draft, between, children)
                self.window.messages += len(parts) - 1
            else:
                parts = [(self._next_of(draft, between, children), draft)]
            for each, part in parts:
                by_next.setdefault(each, []).append(part)
        for each, moved in by_next.items():
            each.take_over(moved)
        if drafts:
            log.info("%r: %d messages go to newer segments", lane, len(drafts))
        self._retire(lane)
        for each in blocked:
            each.blockers.discard(lane)
            if each in self._frozen:
                self._try_settle(each)
            else:
                self._try_release(each)

    def _next_of(self, draft: Draft, between: list[TopicProducer], children: list[TopicProducer]) -> TopicProducer:
        layout, key = self._layout, routing_key(draft.key, draft.wanted_id)
        if (key is not None or not children) and layout is not None:
            if between and key is not None:
                hash16 = ring_hash(layout.routing, key)
                for each in between:  # older ones first
                    if each.segment is None or each.segment.hash_range.covers(hash16):
                        return each
            return self._route(layout, key)
        self._turn += 1
        return children[self._turn % len(children)]

    def _next_of_block(
        self, draft: BlockDraft, between: list[TopicProducer], children: list[TopicProducer]
    ) -> list[tuple[TopicProducer, Draft]]:
        """As `_next_of`, for the rows of each place."""
        if (layout := self._layout) is None:
            return [(self._next_of(draft, between, children), draft)]
        starts, at = places(layout, [(each.segment.hash_range if each.segment is not None else None, each) for each in between])
        found: list[tuple[TopicProducer, Draft]] = []
        for place, rows in draft.block.spread(layout.routing, starts):
            part = draft.part(rows)
            lane = self._next_of(part, between, children) if place == NO_KEY else at[place]
            found.append((self._lane_of(lane) if isinstance(lane, SegmentInfo) else lane, part))
        return found

    def _blocked_by(self, lane: TopicProducer) -> list[TopicProducer]:
        return [each for each in (*self._frozen, *self.lanes.values()) if lane in each.blockers]

    def _retire(self, lane: TopicProducer) -> None:
        if not lane.is_closed and lane not in self._leaving and not self._is_stopped:
            self._leaving[lane] = None
            self._tasks.spawn(self._leave(lane), "leave a segment")

    async def _leave(self, lane: TopicProducer) -> None:
        try:
            await lane.leave()
        finally:
            self._leaving.pop(lane, None)

    def _forget_lanes(self) -> None:
        self.only = None
        self.lanes.clear()
        self._by_key.clear()
        self._frozen.clear()
        self._inquiries.clear()
        self.window.wake()

    def _ask_later(self) -> None:
        if self._refresh is None and self.failure is None:
            self._refresh = self._client.runtime.clock.call_later(self._client.config.layout_check, self._ask_again)

    def _ask_again(self) -> None:
        """A segment is sealed or gone and the layout does not say so yet: the notification may be lost."""
        self._refresh = None
        if self._session is not None and any(each.is_outdated for each in (*self.lanes.values(), *self._inquiries.values())):
            self._session.refresh()
            self._ask_later()


def _overlap(one: SegmentInfo | None, other: SegmentInfo | None) -> bool:
    """Whether a key can have gone to one and now go to the other; the ranges of regular topics mean nothing."""
    if one is None or other is None or one.legacy_topic_name is not None or other.legacy_topic_name is not None:
        return True
    return one.hash_range.start <= other.hash_range.end and other.hash_range.start <= one.hash_range.end
