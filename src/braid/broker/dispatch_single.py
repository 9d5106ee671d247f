"""Dispatch to one active consumer: Exclusive and Failover subscriptions.

Owns who is active and when the cursor is read. Entries go out in log order; after a change of the active consumer, or when
it asks for redelivery, reading starts again at the first unacknowledged entry. Must not acknowledge anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from braid.broker.consumer import Consumer
from braid.broker.visible import visible, within
from braid.errors import BraidError
from braid.managedledger.api import Entry
from braid.model.positions import LATEST, Position

if TYPE_CHECKING:
    from braid.broker.subscription import Subscription


class SingleActiveDispatcher:
    """One consumer receives; with Failover the others wait."""

    def __init__(self, subscription: Subscription, *, is_failover: bool) -> None:
        self._subscription = subscription
        self._is_failover = is_failover
        self.consumers: list[Consumer] = []
        self.active: Consumer | None = None
        self._generation = 0
        self._stop: Position | None = None
        """The entry at which reading stopped, because a transaction holds it or a part of it."""

    def add(self, consumer: Consumer) -> None:
        self.consumers.append(consumer)
        if not self._choose_active() and self._is_failover:
            self._subscription.tell_active(consumer, consumer is self.active)

    def remove(self, consumer: Consumer) -> None:
        self.consumers.remove(consumer)
        if consumer is self.active:
            self.active = None
        # Of a partition, also one less to choose from may change the choice.
        self._choose_active()

    def _choose_active(self) -> bool:
        """Pick the active consumer; True if it changed."""
        chosen = self._pick()
        if chosen is self.active:
            return False
        self.active = chosen
        self.rewind()
        if self._is_failover:
            for consumer in self.consumers:
                self._subscription.tell_active(consumer, consumer is chosen)
        self.pump()
        return True

    def _pick(self) -> Consumer | None:
        if not self.consumers:
            return None
        ranked = sorted(self.consumers, key=lambda consumer: (consumer.info.priority, consumer.info.name))
        best = [consumer for consumer in ranked if consumer.info.priority == ranked[0].info.priority]
        # Partitions of one topic spread over the consumers; a plain topic takes the first.
        return best[max(ranked[0].info.partition, 0) % len(best)]

    def flow(self, consumer: Consumer) -> None:
        """The consumer has new permits."""
        if consumer is self.active:
            self.pump()

    def redeliver(self, consumer: Consumer, positions: list[Position]) -> None:
        """Start again at the first unacknowledged entry; ids are ignored, as the protocol has it."""
        if consumer is self.active:
            self.rewind()
            self.pump()

    def released(self, positions: Sequence[Position]) -> None:
        """Entries are not held any more and not acknowledged: everything from there on is sent again, in order."""
        self.rewind()
        self.pump()

    def rewind(self) -> None:
        """Read again from the first unacknowledged entry."""
        self._generation += 1
        self._subscription.cursor.rewind()

    def added(self, entries: list[Entry]) -> None:
        """Entries were added to the log. A consumer that keeps up gets them at once, without a look into the cache."""
        consumer, subscription = self.active, self._subscription
        if consumer is None or subscription.is_reading or subscription.is_fenced:
            return
        if consumer.permits > 0 and consumer.link.is_writable:
            if (
                entries
                and subscription.topic.transactions.max_read_position is LATEST
                and subscription.cursor.take_new(entries)
            ):
                self._send(consumer, visible(subscription, entries))
            else:
                self.pump()

    def pump(self) -> None:
        """Send what can be sent now: called on new permits, and when the socket drains."""
        consumer = self.active
        if consumer is None or self._subscription.is_reading or self._subscription.is_fenced:
            return
        cursor = self._subscription.cursor
        config = self._subscription.config
        upto = self._subscription.topic.transactions.max_read_position
        if self._stop is not None and self._is_stopped():
            return
        while consumer.permits > 0 and consumer.link.is_writable:
            wanted = min(consumer.permits, config.dispatch_batch_entries)
            entries = cursor.read_cached(wanted, config.dispatch_batch_bytes, upto)
            if entries is None:
                if self._subscription.waits_to_read is not None:
                    return
                self._subscription.is_reading = True
                self._subscription.spawn(self._read(self._generation), "read")
                return
            if not entries:
                self._subscription.caught_up()
                return
            self._send(consumer, visible(self._subscription, entries))
            if self._stop is not None:
                return

    def _is_stopped(self) -> bool:
        """Whether the next entry is still held. What a transaction holds is not passed over here: if it is aborted, later
        entries must not have been sent and acknowledged before it."""
        stop = self._stop
        if stop is not None and self._subscription.cursor.read_position == stop and self._subscription.is_partly_held(stop):
            return True
        self._stop = None
        return False

    async def _read(self, generation: int) -> None:
        """Fetch the next entries from storage, then go on pumping."""
        config = self._subscription.config
        consumer = self.active
        entries: list[Entry] = []
        try:
            wanted = min(max(consumer.permits, 1), config.dispatch_batch_entries) if consumer is not None else 1
            upto = self._subscription.topic.transactions.max_read_position
            entries = await self._subscription.cursor.read(wanted, config.dispatch_batch_bytes, upto)
        except BraidError as error:
            self._subscription.read_failed(error)
            return
        finally:
            self._subscription.is_reading = False
        if generation != self._generation or self.active is None:
            # Somebody rewound meanwhile: what was read belongs to the past.
            self._subscription.cursor.rewind()
        elif entries := within(self._subscription, entries):
            self._send(self.active, visible(self._subscription, entries))
        self._subscription.pump()

    def _send(self, consumer: Consumer, entries: list[Entry]) -> None:
        """Send entries up to the consumer's permits; the rest is read again later."""
        permits = consumer.permits
        subscription = self._subscription
        cursor = subscription.cursor
        has_holds = subscription.has_holds
        sent = 0
        for entry in entries:
            if permits <= 0:
                break
            if has_holds and subscription.is_partly_held(at := Position(entry.ledger_id, entry.entry_id)):
                self._stop = at
                break
            permits -= entry.messages
            sent += 1
        if sent < len(entries):
            first = entries[sent]
            cursor.read_position = Position(first.ledger_id, first.entry_id)
            entries = entries[:sent]
        if not cursor.has_partial_acks:
            if entries:
                consumer.deliver(entries)
            return
        for entry in entries:
            mask = cursor.unacked_mask(Position(entry.ledger_id, entry.entry_id))
            consumer.deliver_one(entry, 0, mask)
