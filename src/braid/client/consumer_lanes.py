"""What a consumer and its lanes agree on: `LaneOwner`, who gets a lane's messages, `LaneOptions`, how a lane subscribes, and
how messages are named on the wire. Holds no state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from braid.client.consumer_origin import Origin
from braid.client.messages import Message, MessageId
from braid.client.values import BYTES, Codec
from braid.errors import BraidError
from braid.model.ackset import acknowledged_up_to, to_words
from braid.wire import messages as pb
from braid.wire.commands import unsigned64
from braid.wire.types import InitialPosition, SubType

if TYPE_CHECKING:
    from braid.client.topic_consumer import TopicConsumer

NO_GAPS: Final = "__braid.no-gaps"
ACKS_PER_COMMAND: Final = 1000
"""Entries that one ACK names at most."""


class LaneOwner(Protocol):
    """Who gets a lane's messages."""

    def put(self, lane: TopicConsumer, messages: list[Message], /) -> None:
        """New messages; each is to be reported to the lane as `consumed` when it leaves the owner's queue."""

    def drop_queued(self, lane: TopicConsumer, /) -> None:
        """Forget what was received and not handed out yet: it comes again."""

    def window(self) -> int:
        """How many messages a lane may have received ahead."""
        ...

    def lane_ended(self, lane: TopicConsumer, /) -> None:
        """The topic was terminated and the subscription has acknowledged everything in it."""

    def lane_failed(self, lane: TopicConsumer, error: BraidError, /) -> None:
        """The lane is of no more use: it was closed, or the broker refuses it for good."""


class LaneOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a lane subscribes."""

    subscription: str
    sub_type: SubType
    name: str
    initial: InitialPosition = InitialPosition.LATEST
    is_durable: bool = True
    codec: Codec = BYTES
    partition: int = -1
    segment_id: int = -1
    shown_topic: str | None = None
    """Topic named in messages, if it is not the lane's own."""
    origin: Origin | None = None
    """The consumer named in messages."""
    has_no_gaps: bool = False
    """Of a reader: to be refused, or closed, if what it has to read next is not stored any more, instead of skipping it."""
    resets: int | None = None
    """Of a stream consumer: how many resets of the subscription it knows of; the broker lets it in only if these are all."""


def in_commands(ids: list[pb.MessageIdData]) -> list[list[pb.MessageIdData]]:
    """What to acknowledge, as one or more commands: a broker deals with each in one piece."""
    return [ids[start : start + ACKS_PER_COMMAND] for start in range(0, len(ids), ACKS_PER_COMMAND)] or [[]]


def message_id_data(position: tuple[int, int], mask: int) -> pb.MessageIdData:
    """An entry (ledger id, entry id) on the wire; `mask` says which messages of its batch are still open."""
    found = pb.MessageIdData(ledgerId=unsigned64(position[0]), entryId=unsigned64(position[1]))
    if mask:
        found.ack_set.extend(to_words(mask))
    return found


def up_to_data(message_id: MessageId) -> pb.MessageIdData:
    """A message on the wire, as the last one that is acknowledged."""
    mask = 0
    if message_id.batch_index >= 0:
        mask = acknowledged_up_to(message_id.batch_size, message_id.batch_index)
    return message_id_data((message_id.ledger_id, message_id.entry_id), mask)
