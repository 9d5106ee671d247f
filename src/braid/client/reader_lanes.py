"""`ReaderLane`: the lane of one segment that a checkpoint consumer reads, without a durable cursor.

Owns where to begin each time it is attached. A symbolic place (the beginning, the end) becomes a position when the lane is
attached first, and from a position on nothing is skipped: if what follows it is not stored any more, the broker refuses the
lane, and closes one that it has. What that means to the application is the consumer's business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from braid.client.checkpoints import AtTime
from braid.client.consumer_lanes import LaneOptions, message_id_data
from braid.client.consumer_segments import OrderedLane
from braid.client.messages import EARLIEST, LATEST, MessageId
from braid.errors import BraidError, DataLost
from braid.model.positions import Position
from braid.wire import messages as pb
from braid.wire import requests
from braid.wire.commands import signed64

if TYPE_CHECKING:
    from braid.client.client import Client
    from braid.client.connection import Connection
    from braid.client.consumer_lanes import LaneOwner

BEGINNING: Final = MessageId(0, -1)
"""Before the first message that a segment ever had, as a position: EARLIEST is before the first that is kept."""


class ReaderLane(OrderedLane):
    """See the module."""

    def __init__(self, client: Client, owner: LaneOwner, topic: str, options: LaneOptions, place: MessageId | AtTime) -> None:
        super().__init__(client, owner, topic, options)
        self.place: MessageId | AtTime = place
        """Where to begin as long as nothing was handed out."""
        if isinstance(place, MessageId) and place.entry_id >= 0 and place != LATEST:
            self.handed = place

    def is_final(self, error: BraidError) -> bool:
        return isinstance(error, DataLost) or super().is_final(error)

    async def attach(self, connection: Connection) -> None:
        await super().attach(connection)
        if self.handed is None:
            try:
                await self._find_place(connection)
            except BaseException:
                self._leave(connection)
                raise

    async def _find_place(self, connection: Connection) -> None:
        if isinstance(self.place, AtTime):
            time_ms = self.place.ms
            # The broker closes the consumer for a seek; permits are given only after it is back (trap 2 of the protocol sheet).
            await connection.request(lambda number: requests.seek(number, self.consumer_id, time_ms))
            await self._subscribe(connection)
        elif self.place == LATEST:
            # From here on "the end" is a position, so that a checkpoint taken before the first message misses nothing.
            last = await self.last_message_id_at(connection)
            if last.ledger_id < 0:
                self.place = EARLIEST
            else:
                self.place = self.handed = self.newest = last
                self.may_repeat = True
        elif self.place == EARLIEST:
            # So is the beginning, or what is trimmed before the first message is received would go unnoticed.
            body = await connection.request(lambda number: requests.get_last_message_id(number, self.consumer_id))
            if body.HasField("consumer_mark_delete_position"):
                at, options = body.consumer_mark_delete_position, self.options
                self.place = MessageId(
                    signed64(at.ledgerId), signed64(at.entryId), options.partition, segment_id=options.segment_id
                )

    def _start(self) -> pb.MessageIdData | None:
        place = self.handed or (self.place if isinstance(self.place, MessageId) else EARLIEST)
        start = message_id_data(Position(place.ledger_id, place.entry_id), 0)
        if place.batch_index >= 0:  # the rest of the batch is wanted too
            start.batch_index, start.batch_size = place.batch_index, place.batch_size
        return start
