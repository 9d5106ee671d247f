"""`TransactionalStream`: what a stream consumer does about transactions.

Owns which segments an open transaction has acknowledged, and giving everything back in order when it is not committed. One
transaction at a time: the next would begin behind what the first may give back. In a transaction nothing is left out quietly.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from braid.client.consumer_segments import SegmentsConsumer
from braid.client.messages import Message, MessageId, is_after
from braid.client.stream_lanes import PositionVector, StreamLane
from braid.client.transactions import Transaction
from braid.errors import BraidError, InvalidTransactionStatus, TransactionConflict

if TYPE_CHECKING:
    from braid.client.client import Client


class TransactionalStream(SegmentsConsumer[StreamLane]):
    """The part of `StreamConsumer` that knows transactions."""

    def __init__(self, client: Client, topic: str, name: str, schema: Any) -> None:
        super().__init__(client, topic, name, schema)
        self._settled: dict[int, MessageId] = {}
        """Segments that were given away: how far they were acknowledged then."""

    async def redeliver_unacknowledged(self) -> None:
        """Hand out again, in order, everything that was received and not acknowledged: for an application that could not deal
        with it. Raises InvalidTransactionStatus while a transaction is open that has acknowledged something."""
        self._check()
        for lane in self._lanes.values():
            if lane.holding is not None:
                raise InvalidTransactionStatus(f"End transaction {lane.holding.id} first, it has acknowledged messages.")
        for lane in list(self._lanes.values()):
            lane.let_go(is_committed=False)
            self._set_back(lane)

    def transaction_ended(self, txn: Transaction, /, *, is_committed: bool) -> None:
        for lane in list(self._lanes.values()):
            was_read = lane.read_in is txn
            if was_read:
                lane.read_in = None
            if lane.holding is txn or (was_read and lane.holding is None and not is_committed):
                lane.let_go(is_committed=is_committed)
                if not is_committed:
                    self._set_back(lane)
        self._queue.wake()

    # For subclasses.

    def _begin(self, lane: StreamLane) -> None:
        """From here on only new vectors speak of this lane."""
        raise NotImplementedError

    def _lane_with(self, position: MessageId, number: int | None) -> StreamLane | None:
        """The lane that has handed this out, if it is still ours and read on from there."""
        lane = self._lanes.get(position.segment_id)
        if lane is None or lane.handed is None or lane.is_leaving or (number is not None and number < lane.begun):
            return None
        return lane

    def _own(self, message: Message | MessageId) -> tuple[MessageId, PositionVector | None]:
        """Where a message is that can be acknowledged here, and what was handed out before it."""
        raise NotImplementedError

    async def _acknowledge_in(self, txn: Transaction, message: Message | MessageId, *, wait: bool) -> None:
        txn.check_open()
        try:
            answers = self._hold(txn, *self._own(message))
        except BraidError as error:
            txn.fail(error)
            raise
        if wait:
            for each in answers:
                await asyncio.shield(each)

    def _hold(self, txn: Transaction, own: MessageId, vector: PositionVector | None) -> list[asyncio.Future[None]]:
        """Acknowledge in every segment of the vector. A plain acknowledgment may leave out what was given away since, because
        that comes again; in a transaction it must not, because it would be dealt with twice."""
        others = [] if vector is None else [each for number, each in vector.positions.items() if number != own.segment_id]
        wanted: list[tuple[StreamLane, MessageId]] = []
        for position in (own, *others):
            lane = self._lane_with(position, None if vector is None else vector.number)
            up_to = position if lane is None or lane.handed is None or is_after(lane.handed, position) else lane.handed
            if self._is_settled(position.segment_id, up_to):
                if position is own:
                    raise TransactionConflict(f"The message {own} of {self.topic} is acknowledged already.")
            elif lane is None:
                raise TransactionConflict(
                    f"Segment {position.segment_id} of {self.topic} was given away or is read anew since {position} was "
                    "received, which comes again; begin another transaction with what is received now."
                )
            elif lane.holding is not None and lane.holding is not txn:
                raise TransactionConflict(
                    f"Transaction {lane.holding.id} has acknowledged messages of segment {lane.segment_id} of {self.topic} and "
                    "is not ended; end it first."
                )
            else:
                wanted.append((lane, up_to))
        txn.hold(self)
        answers = [lane.hold_up_to(txn, up_to) for lane, up_to in wanted]
        self._queue.wake()
        return [each for each in answers if each is not None]

    def _is_settled(self, segment_id: int, position: MessageId) -> bool:
        """Whether this is acknowledged for good."""
        lane = self._lanes.get(segment_id)
        acked = lane.acked if lane is not None and lane.acked is not None else self._settled.get(segment_id)
        return acked is not None and not is_after(position, acked)

    def _set_back(self, lane: StreamLane) -> None:
        """What was handed out and not acknowledged is sent again; what speaks of it means nothing any more."""
        self._begin(lane)
        if lane.releasing is None and not lane.is_leaving and not self.is_closed and self.failure is None:
            lane.start_again()

    def _is_held_up(self) -> bool:
        found = False
        for lane in self._lanes.values():
            if lane.holding is not None and not lane.is_leaving:
                info = self.layouts.layout.all_segments.get(lane.segment_id)
                if info is not None and info.is_sealed and not lane.is_exhausted:
                    self._ask_for_end(lane)
                found = found or lane.is_held_up
        return found
