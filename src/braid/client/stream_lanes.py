"""`StreamLane`: the lane of one segment as a stream consumer reads it, and `PositionVector`, how far it had read everything.

Owns what is known of one segment: handed out, acknowledged, held by a transaction, being given away. Does not decide which
segments are read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from braid.client.consumer_lanes import LaneOptions, LaneOwner
from braid.client.consumer_segments import OrderedLane
from braid.client.messages import Message, MessageId, is_after
from braid.client.transactions import Transaction
from braid.errors import BraidError, TransactionConflict

if TYPE_CHECKING:
    from braid.client.client import Client
    from braid.client.connection import Connection


class PositionVector(Mapping[int, MessageId]):
    """What was handed out from each segment when a message was; immutable, and shared by a run of messages of one segment (the
    position in that segment itself is the message's own)."""

    __slots__ = ("number", "positions")

    def __init__(self, number: int, positions: dict[int, MessageId]) -> None:
        self.number = number
        """Counts the vectors of one consumer."""
        self.positions = positions

    def __getitem__(self, segment_id: int) -> MessageId:
        return self.positions[segment_id]

    def __iter__(self) -> Iterator[int]:
        return iter(self.positions)

    def __len__(self) -> int:
        return len(self.positions)


class StreamLane(OrderedLane):
    """The lane of a segment that is assigned to this consumer, or on its way to another one."""

    def __init__(self, client: Client, owner: LaneOwner, topic: str, options: LaneOptions) -> None:
        super().__init__(client, owner, topic, options)
        self.begun = 0
        """Number of the first vector that speaks of this lane: older ones mean what was read before it was given away, or
        before the subscription was set back."""
        self.releasing: asyncio.Task[Any] | None = None
        """Set while the segment is being given away."""
        self.withheld = 0
        """Messages that came and were dropped because the segment is being given away; their permits are not given back."""
        self.is_leaving = False
        """Given away: there is no way back."""
        self.is_cut_off = False
        """Lost its place while it was being given away: the next owner may have it already."""
        self.resolved = asyncio.Event()
        """Set when acknowledgements changed."""
        self.holding: Transaction | None = None
        """The open transaction that has acknowledged something here."""
        self.held: MessageId | None = None
        """How far it has."""
        self.read_in: Transaction | None = None
        """The open transaction in whose block messages were handed out last."""

    @property
    def is_unresolved(self) -> bool:
        """Whether the application has messages of this segment that it did not acknowledge, or acks have not left yet."""
        if self.handed is None or self.is_ended or self.failure is not None:
            return False
        return self.acked is None or is_after(self.handed, self.acked) or self._up_to is not None

    @property
    def is_held_up(self) -> bool:
        """Whether nothing more comes before the open transaction ends: the segment is received to its end or wanted by another
        consumer, and everything handed out is acknowledged in that transaction."""
        if self.holding is None or self.handed is None or self.held is None or is_after(self.handed, self.held):
            return False
        return self.releasing is not None or (self.is_exhausted and self.newest == self.handed)

    def hold_up_to(self, txn: Transaction, up_to: MessageId) -> asyncio.Future[None] | None:
        """Acknowledge up to here in the transaction; None if it has done so already."""
        if self.held is not None and not is_after(up_to, self.held):
            return None
        answer = self.transactional.up_to(txn, up_to)
        self.holding, self.held = txn, up_to
        return answer

    def let_go(self, *, is_committed: bool) -> None:
        """The transaction has ended: what it acknowledged is acknowledged, or was never handed out."""
        held, self.holding, self.held = self.held, None, None
        if not is_committed:
            self.handed = self.newest = self.acked
        elif held is not None and (self.acked is None or is_after(held, self.acked)):
            self.acked = held
        self.resolved.set()

    def doom(self, why: str) -> None:
        """The segment is lost: an open transaction that acknowledged something of it cannot be committed, and the next owner
        waits for its end."""
        if self.holding is not None:
            self.holding.doom(TransactionConflict(f"Segment {self.segment_id} of {self.options.shown_topic} {why}"))

    def transaction_ended(self, txn: Transaction, /, *, is_committed: bool) -> None:
        """The consumer is told too, and sees to all its lanes."""

    def sift(self, messages: list[Message]) -> list[Message]:
        newest = self.newest
        if newest is not None and not self.may_repeat and not is_after(messages[0].id, newest):
            # The broker went back, because a transaction was aborted that is still open here; its end is dealt with then.
            fresh = [each for each in messages if is_after(each.id, newest)]
            self.consumed(len(messages) - len(fresh))
            return super().sift(fresh) if fresh else []
        return super().sift(messages)

    def detached(self, error: BraidError) -> None:
        # Acknowledgements may be lost when a broker crashes, or loses a topic to another one and closes its consumers. So they
        # are sent again, unless the subscription may have been set back: a segment by its controller, which takes it away
        # first; a regular topic by anybody.
        self.is_resumed = self.topic.startswith("segment://")
        super().detached(error)

    def lost(self) -> None:
        if self.releasing is not None:
            self.is_cut_off = True
            self.resolved.set()

    def _send_acks(self) -> None:
        super()._send_acks()
        self.resolved.set()

    def begin(self, connection: Connection) -> None:
        self.withheld = 0
        if self.is_resumed and self.acked is not None and self._up_to is None:
            self._up_to = self.acked
        super().begin(connection)
