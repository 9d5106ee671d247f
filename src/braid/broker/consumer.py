"""`Consumer`: one consumer of a subscription: its permits, what it holds unacknowledged, and how entries reach its socket.

Permits count messages and may go negative, because a batch is never split (trap 11 of the protocol sheet).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from braid.broker.link import Link
from braid.managedledger.api import Entry
from braid.model.ackset import to_words as words_from_mask
from braid.wire.encode import MessageEncoder

if TYPE_CHECKING:
    from braid.broker.subscription import Subscription

NO_GAPS = "__braid.no-gaps"
"""In the metadata of a reader that is to be refused if what it has to read next is not stored any more. Others begin at the
first entry that is kept."""


class ConsumerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a SUBSCRIBE said about the consumer itself."""

    consumer_id: int
    name: str
    priority: int = 0
    metadata: dict[str, str] = {}
    epoch: int | None = None
    partition: int = -1


class Consumer:
    """One attached consumer."""

    __slots__ = (
        "_encoder",
        "acked_messages",
        "bytes_out",
        "connected_ms",
        "epoch",
        "info",
        "is_blocked",
        "is_closed",
        "last_acked_ms",
        "link",
        "messages_out",
        "on_closed",
        "pending",
        "permits",
        "redelivered",
        "subscription",
        "unacked",
    )

    def __init__(self, info: ConsumerInfo, link: Link, subscription: Subscription, connected_ms: int) -> None:
        self.info = info
        self.link = link
        self.subscription = subscription
        self.connected_ms = connected_ms
        self.permits = 0
        self.unacked = 0
        self.pending: dict[tuple[int, int], int] = {}
        """Shared only: entries sent and not yet acknowledged, with the messages still open in each."""
        self.epoch = info.epoch
        self.on_closed: Callable[[Consumer], None] | None = None
        """Told when the broker closes the consumer."""
        self.is_blocked = False
        self.is_closed = False
        self.messages_out = 0
        self.bytes_out = 0
        self.acked_messages = 0
        self.redelivered = 0
        self.last_acked_ms = 0
        self._encoder = MessageEncoder(info.consumer_id, info.partition)

    @property
    def is_available(self) -> bool:
        """Whether an entry may be sent now."""
        return self.permits > 0 and not self.is_blocked and self.link.is_writable and not self.is_closed

    def deliver(self, entries: list[Entry]) -> int:
        """Send entries that were never sent before and have no partial acks: the hot path. Returns the messages sent."""
        pieces: list[bytes] = []
        push = pieces.append
        header = self._encoder.header
        messages = size = 0
        for entry in entries:
            body = entry.body
            push(header(entry.ledger_id, entry.entry_id, 0, len(body)) if self.epoch is None else self._rare(entry, 0, None))
            push(body)
            messages += entry.messages
            size += len(body)
        self.permits -= messages
        self.messages_out += messages
        self.bytes_out += size
        self.link.deliver(pieces, size)
        return messages

    def deliver_one(self, entry: Entry, redelivery_count: int, open_mask: int | None) -> int:
        """Send one entry, with its redelivery count and its still unacknowledged batch indexes; returns the messages sent."""
        messages = entry.messages if open_mask is None else open_mask.bit_count()
        self.link.deliver([self._rare(entry, redelivery_count, open_mask), entry.body], len(entry.body))
        self.permits -= messages
        self.messages_out += messages
        self.bytes_out += len(entry.body)
        if redelivery_count:
            self.redelivered += messages
        return messages

    def _rare(self, entry: Entry, redelivery_count: int, open_mask: int | None) -> bytes:
        words = () if open_mask is None else words_from_mask(open_mask)
        return self._encoder.full_header(entry.ledger_id, entry.entry_id, redelivery_count, words, self.epoch, len(entry.body))
