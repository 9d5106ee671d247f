"""Dispatch to many consumers: Shared subscriptions.

Owns the replay set (entries to be sent again), redelivery counts, round robin by priority, the unacknowledged limits and
the rule that all chunks of a message go to one consumer. Redelivered entries go out before new ones, in log order. Must not
acknowledge.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sortedcontainers import SortedSet

from braid.broker.consumer import Consumer
from braid.broker.visible import visible, within
from braid.errors import BraidError
from braid.managedledger.api import Entry
from braid.model.positions import LATEST, Position
from braid.wire.peek import chunk_of

if TYPE_CHECKING:
    from braid.broker.subscription import Subscription


MAX_CHUNKED_MESSAGES = 10_000
"""Messages of which only some chunks were sent; the oldest ones are forgotten beyond that (their producers gave up)."""


class SharedDispatcher:
    """Every entry goes to one of the consumers that can take it."""

    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription
        self.consumers: list[Consumer] = []
        self.unacked = 0
        self._is_blocked = False
        self.replay: SortedSet[Position] = SortedSet()
        self.counts: dict[Position, int] = {}
        self._chunk_owner: dict[str, Consumer] = {}
        self._turn = 0
        self._generation = 0

    def add(self, consumer: Consumer) -> None:
        if not self.consumers:
            self._restart()
        self.consumers.append(consumer)
        self.consumers.sort(key=lambda member: member.info.priority)
        self.pump()

    def remove(self, consumer: Consumer) -> None:
        self.consumers.remove(consumer)
        self.unacked -= consumer.unacked
        for uuid in [uuid for uuid, owner in self._chunk_owner.items() if owner is consumer]:
            del self._chunk_owner[uuid]
        if not self.consumers:
            self._restart()
            return
        self.replay.update(Position(*at) for at in consumer.pending)  # held ones are not among them
        consumer.pending = {}
        consumer.unacked = 0
        self._unblock()
        self.pump()

    def _restart(self) -> None:
        """Nobody holds anything: counts are forgotten and reading starts at the first unacknowledged entry."""
        self._generation += 1
        self.replay.clear()
        self.counts.clear()
        self._chunk_owner.clear()
        self.unacked = 0
        self._is_blocked = False
        self._subscription.cursor.rewind()

    def flow(self, consumer: Consumer) -> None:
        self.pump()

    def redeliver(self, consumer: Consumer, positions: list[Position]) -> None:
        """Put entries back that this consumer holds; without positions, all of them."""
        moved = 0
        for position in positions or [Position(*at) for at in consumer.pending]:
            messages = consumer.pending.pop(position, None)
            if messages is None:
                continue
            moved += messages
            self.replay.add(position)
            self.counts[position] = self.counts.get(position, 0) + 1
        consumer.unacked -= moved
        self.unacked -= moved
        self._unblock()
        self.pump()

    def acknowledged(self, acking: Consumer | None, positions: list[Position]) -> None:
        """Entries are done: drop them from whoever holds them."""
        own = {} if acking is None else acking.pending
        total = 0
        for position in positions:
            messages = own.pop(position, None)
            if messages is not None:
                total += messages
            elif (holder := self._holder(position)) is not None:
                messages = holder.pending.pop(position)
                holder.unacked -= messages
                self.unacked -= messages
        if acking is not None:
            acking.unacked -= total
            self.unacked -= total
        if self.replay or self.counts:
            for position in positions:
                self.replay.discard(position)
                self.counts.pop(position, None)
        self._unblock()

    def partly_acknowledged(self, position: Position, open_messages: int) -> None:
        """Some batch indexes of an entry are done."""
        holder = self._holder(position)
        if holder is not None:
            done = holder.pending[position] - open_messages
            holder.pending[position] = open_messages
            holder.unacked -= done
            self.unacked -= done
            self._unblock()

    def held(self, position: Position, messages: int | None) -> None:
        """A transaction holds so many more messages of an entry, None = all: nobody is to send or acknowledge these now."""
        holder = self._holder(position)
        if holder is not None:
            open_messages = 0 if messages is None else max(holder.pending[position] - messages, 0)
            holder.unacked -= holder.pending[position] - open_messages
            self.unacked -= holder.pending[position] - open_messages
            holder.pending[position] = open_messages
            if not open_messages:
                del holder.pending[position]
            self._unblock()
        if messages is None:
            self.replay.discard(position)

    def released(self, positions: Sequence[Position]) -> None:
        """Entries are not held any more and not acknowledged: they are sent again."""
        for position in positions:
            holder = self._holder(position)
            if holder is not None:
                messages = holder.pending.pop(position)
                holder.unacked -= messages
                self.unacked -= messages
            if position < self._subscription.cursor.read_position:  # else reading comes to it by itself
                self.replay.add(position)
                self.counts[position] = self.counts.get(position, 0) + 1
        self._unblock()
        self.pump()

    def _without_held(self, entries: list[Entry]) -> list[Entry]:
        """Entries of which something is to be delivered; the others come again when they are released."""
        wanted = []
        for entry in entries:
            if self._subscription.open_mask(entry) == 0:
                self.replay.discard(Position(entry.ledger_id, entry.entry_id))
            else:
                wanted.append(entry)
        return wanted

    def _holder(self, position: Position) -> Consumer | None:
        for consumer in self.consumers:
            if position in consumer.pending:
                return consumer
        return None

    def _unblock(self) -> None:
        """Resume at half of a limit that was hit."""
        config = self._subscription.config
        resumed = False
        if self._is_blocked and self.unacked <= config.max_unacked_per_subscription // 2:
            self._is_blocked = False
            resumed = True
        for consumer in self.consumers:
            if consumer.is_blocked and consumer.unacked <= config.max_unacked_per_consumer // 2:
                consumer.is_blocked = False
                resumed = True
        if resumed:
            self.pump()

    def added(self, entries: list[Entry]) -> None:
        """Entries were added to the log. Consumers that keep up get them at once, without a look into the cache."""
        subscription = self._subscription
        if subscription.is_reading or subscription.is_fenced or self._is_blocked:
            return
        if (
            self.replay
            or not entries
            or subscription.topic.transactions.max_read_position is not LATEST
            or self._next_consumer() is None
            or not subscription.cursor.take_new(entries)
        ):
            self.pump()
        else:
            self._spread(visible(subscription, entries), is_replay=False)

    def pump(self) -> None:
        """Send what can be sent now."""
        if self._subscription.is_reading or self._subscription.is_fenced:
            return
        config = self._subscription.config
        while not self._is_blocked and self._next_consumer() is not None:
            wanted = self._wanted()
            if self.replay:
                entries = self._replay_cached(wanted)
                start: Position | None = self.replay[0]
            else:
                upto = self._subscription.topic.transactions.max_read_position
                entries = self._subscription.cursor.read_cached(wanted, config.dispatch_batch_bytes, upto)
                start = None
            if entries is None:
                if self._subscription.waits_to_read is not None:
                    return
                self._subscription.is_reading = True
                self._subscription.spawn(self._read(start, wanted, self._generation), "read")
                return
            if not entries:
                if start is None:
                    self._subscription.caught_up()
                    return
                self.replay.discard(start)  # trimmed meanwhile: nothing is left to send
                continue
            if not self._spread(visible(self._subscription, entries), is_replay=start is not None):
                return

    def _wanted(self) -> int:
        """How many entries to read: what the consumers that can take some may get."""
        permits = sum([consumer.permits for consumer in self.consumers if consumer.is_available])
        return min(permits, self._subscription.config.dispatch_batch_entries)

    def _next_consumer(self) -> Consumer | None:
        """The next available consumer of the best priority, in turn; its turn is over once it was sent something."""
        consumers = self.consumers
        if len(consumers) == 1:
            return consumers[0] if consumers[0].is_available else None
        best: int | None = None
        for step in range(len(consumers)):
            at = (self._turn + step) % len(consumers)
            if consumers[at].is_available and (best is None or consumers[at].info.priority < consumers[best].info.priority):
                best = at
        return None if best is None else consumers[best]

    def _replay_cached(self, wanted: int) -> list[Entry] | None:
        first = self.replay[0]
        run = self._run_length(first, wanted)
        entries = self._subscription.log.read_cached(first, run, self._subscription.config.dispatch_batch_bytes)
        return None if entries is None else self._still_wanted(entries)

    def _run_length(self, first: Position, wanted: int) -> int:
        """How many entries from `first` on follow each other in the replay set."""
        run = 1
        for position in self.replay.islice(1, wanted):
            if position != (first.ledger_id, first.entry_id + run):
                break
            run += 1
        return run

    def _still_wanted(self, entries: list[Entry]) -> list[Entry]:
        return [entry for entry in entries if (entry.ledger_id, entry.entry_id) in self.replay]

    async def _read(self, start: Position | None, wanted: int, generation: int) -> None:
        """Fetch from storage, then go on pumping."""
        config = self._subscription.config
        try:
            if start is None:
                upto = self._subscription.topic.transactions.max_read_position
                entries = await self._subscription.cursor.read(wanted, config.dispatch_batch_bytes, upto)
            else:
                run = self._run_length(start, wanted) if start in self.replay else 1
                entries = await self._subscription.log.read(start, run, config.dispatch_batch_bytes)
        except BraidError as error:
            self._subscription.read_failed(error)
            return
        finally:
            self._subscription.is_reading = False
        if generation != self._generation:
            self._subscription.cursor.rewind()
        elif start is None:
            self._spread(visible(self._subscription, within(self._subscription, entries)), is_replay=False)
        else:
            entries = self._still_wanted(entries)
            if start in self.replay and not any((entry.ledger_id, entry.entry_id) == start for entry in entries):
                self.replay.discard(start)  # trimmed meanwhile
            if entries:
                self._spread(entries, is_replay=True)
        self._subscription.pump()

    def _spread(self, entries: list[Entry], *, is_replay: bool) -> bool:
        """Send entries to the consumers in turn; what nobody can take now is read again later. False if dispatch must wait,
        because the owner of a chunk cannot take it."""
        turn = self._subscription.config.shared_turn_entries
        if self._subscription.has_holds:
            entries = self._without_held(entries)
        at = 0
        is_stuck = False
        while at < len(entries) and not is_stuck and not self._is_blocked and (consumer := self._next_consumer()) is not None:
            self._turn = self.consumers.index(consumer) + 1
            part = entries if len(self.consumers) == 1 and not at else entries[at : at + turn]
            sent = self._send(consumer, part, is_replay=is_replay)
            at += sent
            is_stuck = sent < len(part) and consumer.is_available and not self._is_blocked
        if at < len(entries) and not is_replay:
            rest = entries[at]
            self._subscription.cursor.read_position = Position(rest.ledger_id, rest.entry_id)
        return not is_stuck

    def _send(self, consumer: Consumer, entries: list[Entry], *, is_replay: bool) -> int:
        """Send entries to `consumer` until it can take no more, or a chunk's owner cannot; returns how many were sent."""
        sent = 0
        has_masks = self._subscription.has_masks
        if not (is_replay or self.counts or has_masks):
            sent = self._send_usual(consumer, entries)
        for entry in entries[sent:] if sent else entries:
            if not consumer.is_available or self._is_blocked or (target := self._chunk_target(entry, consumer)) is None:
                break
            position = Position(entry.ledger_id, entry.entry_id)
            mask = self._subscription.open_mask(entry) if has_masks else None
            messages = target.deliver_one(entry, self.counts.get(position, 0), mask)
            self.replay.discard(position)
            target.pending[position] = messages
            self._hold(target, messages)
            sent += 1
        return sent

    def _send_usual(self, consumer: Consumer, entries: list[Entry]) -> int:
        """The hot path: entries that are no chunks and were never sent before, as many as permits and limits allow."""
        pending = consumer.pending
        room = self._room(consumer)
        sent = 0
        for entry in entries:
            if room <= 0 or chunk_of(entry.body) is not None:
                break
            pending[entry.ledger_id, entry.entry_id] = entry.messages
            room -= entry.messages
            sent += 1
        if sent:
            self._hold(consumer, consumer.deliver(entries[:sent] if sent < len(entries) else entries))
        return sent

    def _room(self, consumer: Consumer) -> int:
        """Messages the consumer may get: its permits, within the limits of unacknowledged ones."""
        config = self._subscription.config
        room = consumer.permits
        if self._subscription.is_durable:
            if config.max_unacked_per_consumer:
                room = min(room, config.max_unacked_per_consumer - consumer.unacked)
            if config.max_unacked_per_subscription:
                room = min(room, config.max_unacked_per_subscription - self.unacked)
        return room

    def _hold(self, consumer: Consumer, messages: int) -> None:
        """The consumer holds so many more unacknowledged messages."""
        consumer.unacked += messages
        self.unacked += messages
        if self._subscription.is_durable:
            config = self._subscription.config
            if config.max_unacked_per_consumer and consumer.unacked >= config.max_unacked_per_consumer:
                consumer.is_blocked = True
            if config.max_unacked_per_subscription and self.unacked >= config.max_unacked_per_subscription:
                self._is_blocked = True

    def _chunk_target(self, entry: Entry, consumer: Consumer) -> Consumer | None:
        """Who gets this entry: for a chunk, whoever got the first one; None if that consumer cannot take more now."""
        chunk = chunk_of(entry.body)
        if chunk is None:
            return consumer
        owner = self._chunk_owner.setdefault(chunk.uuid, consumer)
        if not owner.is_available:
            return None
        if chunk.chunk_id >= chunk.num_chunks - 1:
            del self._chunk_owner[chunk.uuid]
        elif len(self._chunk_owner) > MAX_CHUNKED_MESSAGES:
            del self._chunk_owner[next(iter(self._chunk_owner))]
        return owner
