"""`Subscription`: a cursor with its consumers, and everything they ask of it: acknowledge, seek, redeliver, leave.

Owns the consumers' admission and the fence that keeps them out while the cursor is being reset. The dispatcher decides what
is sent to whom; the cursor decides what is acknowledged.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Coroutine, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from braid.broker.consumer import NO_GAPS, Consumer, ConsumerInfo
from braid.broker.cursor_acks import ManagedCursorAcks, acknowledge_around
from braid.broker.dispatch_shared import SharedDispatcher
from braid.broker.dispatch_single import SingleActiveDispatcher
from braid.broker.link import Link
from braid.errors import BraidError, ConsumerBusy, InvalidArgument, MetadataFailure, NotAllowed, NotReady, UnknownFailure
from braid.managedledger.api import Entry
from braid.managedledger.cursor import ManagedCursor
from braid.managedledger.log import ManagedLedger
from braid.model.ackset import from_words as mask_from_words
from braid.model.ackset import full
from braid.model.positions import Position
from braid.model.txn import TxnId
from braid.runtime.clock import Timer
from braid.txn.ack_conflicts import WHOLE, Hold
from braid.txn.api import Ack
from braid.txn.pending_acks import MetadataPendingAckStore
from braid.wire.replies import active_consumer_change, close_consumer, reached_end_of_topic
from braid.wire.types import SubType

if TYPE_CHECKING:
    from braid.broker.config import BrokerConfig
    from braid.broker.topic import Topic

log = logging.getLogger(__name__)

READ_RETRY_SECONDS = 1.0
READ_QUIET_SECONDS = 60.0
"""Between two log lines about reads that fail for the same reason: a damaged file stays so until somebody comes."""
END_RETRY_SECONDS = 1.0
REMEMBERED_LEAVERS = 64
TYPE_LABELS = {
    SubType.EXCLUSIVE: "Exclusive",
    SubType.SHARED: "Shared",
    SubType.FAILOVER: "Failover",
    SubType.KEY_SHARED: "Key_Shared",
}


class Subscription:
    """One named reading position of a topic."""

    def __init__(self, topic: Topic, name: str, cursor: ManagedCursor, *, is_durable: bool) -> None:
        self.topic = topic
        self.name = name
        self.cursor = cursor
        self.is_durable = is_durable
        self.pending_acks = self._made_pending_acks() if is_durable else None
        """Acknowledgments inside transactions; None for a reader."""
        self.sub_type = SubType.EXCLUSIVE
        self.is_fenced = False
        self.is_kept = False
        """Non-durable and without consumers, but kept for the client that is about to come back after its seek."""
        self.dispatcher: SingleActiveDispatcher | SharedDispatcher = SingleActiveDispatcher(self, is_failover=False)
        self.is_reading = False
        """A read from storage is under way. Of the subscription, not the dispatcher: one cursor, one read."""
        self.waits_to_read: Timer | None = None
        """Set between a read that failed and the next attempt: until then storage is not asked."""
        self._waits_to_end: Timer | None = None
        self._expiry: Timer | None = None
        self._reset: asyncio.Future[None] | None = None
        self._admission = asyncio.Lock()
        self._is_ending = False
        """The cursor is being made durable so that the end can be told."""
        self._read_failure = ("", float("-inf"))
        """What the log was told last, and until when that is enough."""
        self.messages_out = 0
        self.bytes_out = 0
        self.left_by: OrderedDict[str, None] = OrderedDict()
        """Names of consumers that closed themselves and have not come back, the last ones."""

    def _made_pending_acks(self) -> MetadataPendingAckStore:
        topic = self.topic
        shared = topic.service.transactions
        return MetadataPendingAckStore(
            str(topic.name),
            self.name,
            ManagedCursorAcks(topic.log, self.cursor),
            shared.store,
            shared.decisions,
            topic.clock,
            topic.tasks,
            self,
        )

    @property
    def log(self) -> ManagedLedger:
        return self.topic.log

    @property
    def config(self) -> BrokerConfig:
        return self.topic.config

    @property
    def consumers(self) -> list[Consumer]:
        return self.dispatcher.consumers

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self.topic.tasks.spawn(work, f"{self.name}:{name}")

    async def attach(self, info: ConsumerInfo, link: Link, sub_type: SubType) -> Consumer:
        """Admit a consumer, or say why not."""
        async with self._admission:
            while self._reset is not None:
                await asyncio.shield(self._reset)
            if self.consumers and sub_type is not self.sub_type:
                raise ConsumerBusy(
                    f"The subscription {self.name} of {self.topic.name} is in use as {TYPE_LABELS[self.sub_type]}; "
                    f"a consumer cannot join it as {TYPE_LABELS[sub_type]}."
                )
            if sub_type is SubType.KEY_SHARED and self.consumers:
                raise NotAllowed(
                    f"The Key_Shared subscription {self.name} of {self.topic.name} has a consumer; this broker serves "
                    "Key_Shared to one consumer at a time so far. Use Shared or Failover."
                )
            if sub_type is SubType.EXCLUSIVE and self.consumers:
                await self._drop_if_dead(self.consumers[0])
            self.topic.check_open()
            if self.topic.subscriptions.get(self.name) is not self:
                # Deleted meanwhile, or a reader that ended with its last consumer; the next try makes a new one.
                raise NotReady(f"The subscription {self.name} of {self.topic.name} has just been removed; try again.")
            if not self.consumers and sub_type is not self.sub_type:
                self._become(sub_type)
            consumer = Consumer(info, link, self, self.topic.clock.now_ms())
            self.left_by.pop(info.name, None)
            self.is_kept = False
            self.keep_until(None)
            self.dispatcher.add(consumer)
            return consumer

    def keep_until(self, expiry: Timer | None) -> None:
        """The timer that ends a kept reader; a new one replaces the old."""
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = expiry

    def _become(self, sub_type: SubType) -> None:
        self.sub_type = sub_type
        if sub_type in (SubType.SHARED, SubType.KEY_SHARED):
            self.dispatcher = SharedDispatcher(self)
        else:
            self.dispatcher = SingleActiveDispatcher(self, is_failover=sub_type is SubType.FAILOVER)

    async def _drop_if_dead(self, old: Consumer) -> None:
        """An Exclusive consumer that answers keeps the subscription; a silent one loses it."""
        if await old.link.probe(self.config.liveness_check_ms) and old in self.consumers:
            raise ConsumerBusy(
                f"The Exclusive subscription {self.name} of {self.topic.name} already has a consumer "
                f"({old.info.name or 'unnamed'} at {old.link.peer}); use Shared or Failover, or close that one."
            )
        if old in self.consumers:
            old.link.abort()
            self.detach(old)

    def detach(self, consumer: Consumer) -> None:
        """The consumer is gone; what it held can be sent to others. Idempotent."""
        if consumer.is_closed:
            return
        consumer.is_closed = True
        self.messages_out += consumer.messages_out
        self.bytes_out += consumer.bytes_out
        self.dispatcher.remove(consumer)
        if not self.consumers and not self.is_durable and not self.is_kept and self._reset is None:
            self.topic.drop_non_durable(self)

    def left(self, consumer: Consumer) -> None:
        """The client closed the consumer itself."""
        self.detach(consumer)
        if consumer.info.name:
            self.left_by[consumer.info.name] = None
            self.left_by.move_to_end(consumer.info.name)
            if len(self.left_by) > REMEMBERED_LEAVERS:
                self.left_by.popitem(last=False)

    def disconnect(self, consumer: Consumer) -> None:
        """Tell the client that its consumer is closed (it will subscribe again) and detach it."""
        if consumer.link.protocol_version >= 5:
            consumer.link.write(close_consumer(consumer.info.consumer_id))
        else:
            consumer.link.close()
        if consumer.on_closed is not None:
            consumer.on_closed(consumer)
        self.detach(consumer)

    def flow(self, consumer: Consumer, permits: int) -> None:
        consumer.permits += permits
        self.dispatcher.flow(consumer)

    def pump(self) -> None:
        self.dispatcher.pump()

    def redeliver(self, consumer: Consumer, positions: list[Position], epoch: int | None) -> None:
        if epoch is not None and consumer.epoch is not None and epoch > consumer.epoch:
            consumer.epoch = epoch
        self.dispatcher.redeliver(consumer, positions)

    def acknowledge(self, consumer: Consumer | None, positions: list[Position], masks: dict[Position, int]) -> None:
        """Individual acks: whole entries, and batch entries of which `masks` says what is still open."""
        last = self.log.last_position
        for position in (*positions, *masks):
            if position > last:
                raise InvalidArgument(
                    f"The position {position} lies beyond the end {last} of {self.topic.name}; acknowledge what was received."
                )
        if self.has_holds and self.pending_acks is not None:
            positions, masks = self.pending_acks.holds.unheld(positions, masks)
        done = list(positions)
        for position, mask in masks.items():
            if self.cursor.acknowledge_batch(position, mask):
                done.append(position)
            elif isinstance(self.dispatcher, SharedDispatcher):
                still_open = self.cursor.unacked_mask(position)
                if still_open is not None:
                    still_open &= ~self._held_bits(position)
                    self.dispatcher.partly_acknowledged(position, still_open.bit_count())
        if positions:
            self.cursor.acknowledge(positions)
        self._after_ack(consumer, done)

    def acknowledge_cumulative(self, consumer: Consumer, position: Position, words: list[int]) -> None:
        """Everything up to `position`; with ack-set words, only part of that entry itself."""
        if isinstance(self.dispatcher, SharedDispatcher):
            return  # meaningless there; clients refuse it themselves
        self.acknowledge_upto(position, mask_from_words(words) if words else None)
        self._after_ack(consumer, [])

    def acknowledge_upto(self, position: Position, mask: int | None = None) -> None:
        """Everything up to `position` that no transaction holds, whoever received it."""
        if self.has_holds and self.pending_acks is not None:
            acknowledge_around(self.log, self.cursor, self.pending_acks.holds, position, mask)
        else:
            self.cursor.acknowledge_cumulative(position, mask)

    # Acknowledgments inside transactions.

    def begin_acks(self, txn: TxnId, acks: Sequence[Ack], *, cumulative: bool) -> asyncio.Future[None]:
        """Hold these until the transaction is decided; the hold begins before this returns. Raises NotAllowed."""
        if self.pending_acks is None:
            raise NotAllowed(f"{self.name} of {self.topic.name} is a reader; transactions need a durable subscription.")
        if cumulative and isinstance(self.dispatcher, SharedDispatcher):
            raise NotAllowed(f"The subscription {self.name} of {self.topic.name} is shared; acknowledge one by one.")
        return self.pending_acks.begin(txn, acks, cumulative=cumulative)

    @property
    def has_holds(self) -> bool:
        """Whether a transaction holds anything here."""
        return self.pending_acks is not None and self.pending_acks.has_holds

    @property
    def has_masks(self) -> bool:
        """Whether `open_mask` can have an answer for any entry."""
        return self.cursor.has_partial_acks or self.has_holds

    def open_mask(self, entry: Entry) -> int | None:
        """Messages of an entry that are to be delivered: neither acknowledged nor held; None = all."""
        position = Position(entry.ledger_id, entry.entry_id)
        mask = self.cursor.unacked_mask(position)
        held = self._held_bits(position)
        return mask if not held else (full(entry.messages) if mask is None else mask) & ~held

    def is_partly_held(self, position: Position) -> bool:
        """Whether a transaction holds at least one message of the entry."""
        return self._held_bits(position) != 0

    def _held_bits(self, position: Position) -> int:
        return 0 if self.pending_acks is None else self.pending_acks.holds.held_bits(position)

    def held(self, holds: Sequence[Hold]) -> None:
        """A transaction holds these now."""
        if isinstance(self.dispatcher, SharedDispatcher):
            for position, bits, _is_cumulative in holds:
                self.dispatcher.held(position, None if bits == WHOLE else bits.bit_count())

    def settled(self, acknowledged: Sequence[Position], released: Sequence[Position]) -> None:
        """A transaction holds these no more; the released ones are delivered again."""
        # Of a batch, others may have messages that are not acknowledged: the entry stays with whoever has it.
        self._after_ack(None, [each for each in acknowledged if self.cursor.is_acknowledged(each)])
        if released:
            self.dispatcher.released(released)
        else:
            self.pump()

    def _after_ack(self, consumer: Consumer | None, done: list[Position]) -> None:
        if isinstance(self.dispatcher, SharedDispatcher) and done:
            self.dispatcher.acknowledged(consumer, done)
        if consumer is not None:
            consumer.last_acked_ms = self.topic.clock.now_ms()
        if self.topic.log.is_terminated:
            # No later acknowledgment will cover one that a crash takes, and some clients do not send one again.
            self.cursor.save_soon()
            self.caught_up()

    async def seek(self, position: Position, ack_set: int | None = None) -> None:
        """Fence, disconnect, reset, unfence: the client subscribes again and reads from `position` on (trap 2)."""
        if self._reset is not None:
            raise UnknownFailure(f"The subscription {self.name} of {self.topic.name} is being reset already; try again.")
        reset = self._reset = asyncio.get_running_loop().create_future()
        self.is_fenced = True
        try:
            self.is_kept = not self.is_durable
            # Chosen first: with Failover each one that goes makes another one active, which stays.
            for consumer in [each for each in self.consumers if self.is_active(each)]:
                self.disconnect(consumer)
            async with nullcontext() if self.pending_acks is None else self.pending_acks.resetting():
                await self.cursor.reset(position, ack_set)
        finally:
            self.is_fenced = False
            self._reset = None
            reset.set_result(None)
            if self.is_kept:
                self.topic.keep_reader(self)
            self.pump()

    def is_active(self, consumer: Consumer) -> bool:
        return isinstance(self.dispatcher, SharedDispatcher) or self.dispatcher.active is consumer

    def check_unsubscribe(self, consumer: Consumer, force: bool) -> None:
        """Only the last consumer may end the subscription, unless it insists."""
        others = [other for other in self.consumers if other is not consumer]
        if others and not force:
            raise MetadataFailure(
                f"The subscription {self.name} of {self.topic.name} has {len(others)} more consumers; close them or force it."
            )
        for other in others:
            self.disconnect(other)

    def close_consumers(self) -> None:
        for consumer in list(self.consumers):
            self.disconnect(consumer)

    def trimmed(self) -> None:
        """Entries were deleted from the log, which only durable subscriptions prevent. A reader that had some of them before it
        and must not skip any is closed; when it subscribes again it is told what it missed."""
        gone = self.log.trimmed_position
        if not self.is_durable and gone is not None and self.cursor.read_position <= gone:
            for consumer in [each for each in self.consumers if NO_GAPS in each.info.metadata]:
                self.disconnect(consumer)

    def tell_active(self, consumer: Consumer, is_active: bool) -> None:
        if consumer.link.protocol_version >= 12:
            consumer.link.write(active_consumer_change(consumer.info.consumer_id, is_active))

    def caught_up(self) -> None:
        """Nothing is left to send; on a terminated topic with no backlog that is the end.

        Consumers take the end for final and do not come back, so what they acknowledged must survive a crash before they are
        told: else it would be unread again with nobody to read it.
        """
        if not self._has_ended or self._is_ending or self._waits_to_end is not None:
            return
        if self.cursor.is_saved:
            self._tell_end()
        else:
            self._is_ending = True
            self.spawn(self._save_and_tell_end(), "end")

    @property
    def _has_ended(self) -> bool:
        return self.topic.log.is_terminated and self.cursor.backlog() == 0

    async def _save_and_tell_end(self) -> None:
        try:
            await self.cursor.flush()
        except BraidError as error:
            log.warning("the end of %s is not told to %s yet: %s", self.topic.name, self.name, error)
            if not self.topic.is_closing:
                self._waits_to_end = self.topic.clock.call_later(END_RETRY_SECONDS, self._end_again)
            return
        finally:
            self._is_ending = False
        if self._has_ended:  # unless it was reset meanwhile
            self._tell_end()

    def _end_again(self) -> None:
        self._waits_to_end = None
        self.caught_up()

    def _tell_end(self) -> None:
        for consumer in self.consumers:
            if self.topic.tells_end(consumer.link):
                consumer.link.write(reached_end_of_topic(consumer.info.consumer_id))

    def read_failed(self, error: BraidError) -> None:
        """Storage could not be read: say so and try again in a while."""
        told, quiet_until = self._read_failure
        now = self.topic.clock.monotonic()
        if str(error) != told or now >= quiet_until:
            self._read_failure = (str(error), now + READ_QUIET_SECONDS)
            log.warning("reading %s for subscription %s failed: %s", self.topic.name, self.name, error)
        if not self.topic.is_closing and self.waits_to_read is None:
            self.waits_to_read = self.topic.clock.call_later(READ_RETRY_SECONDS, self._read_again)

    def _read_again(self) -> None:
        self.waits_to_read = None
        self.pump()

    def refuse_other_durability(self, wants_durable: bool) -> None:
        if wants_durable != self.is_durable:
            kind = "durable" if self.is_durable else "non-durable"
            raise NotAllowed(f"The subscription {self.name} of {self.topic.name} is {kind}; choose another name.")
