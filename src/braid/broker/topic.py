"""`Topic`: a log with its producers and subscriptions.

Owns the receipts when the log reports entries durable (INV1), waking the dispatchers, and the topic's own life: terminate,
close, delete. Who may produce is decided in its base, `TopicProducers`. One `Topic` object is one owner of the log (INV2): when
the log says it was fenced, the topic disconnects everybody and is dropped, never reused.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from braid.broker.dedup import CURSOR_NAME, REQUESTED, MessageDeduplication
from braid.broker.link import Link
from braid.broker.producer import Producer, PublishContext, TransactionalPublish
from braid.broker.subscription import Subscription
from braid.broker.topic_producers import TopicProducers
from braid.broker.visible import last_shown
from braid.errors import (
    BraidError,
    Closed,
    LedgerFenced,
    NotReady,
    ProducerBusy,
    StorageFull,
    SubscriptionNotFound,
    TopicTerminated,
)
from braid.managedledger.api import Entry
from braid.managedledger.indexes import LogIndexes
from braid.managedledger.log import ManagedLedger
from braid.model import names
from braid.model.names import TopicName
from braid.model.positions import EARLIEST, LATEST, Position
from braid.txn.ack_recovery import recover_all
from braid.txn.buffer import MetadataTransactionBuffer
from braid.txn.pending_acks import MetadataPendingAckStore
from braid.txn.store import StoredOp
from braid.wire.encode import send_receipt

if TYPE_CHECKING:
    from braid.broker.service import BrokerService

log = logging.getLogger(__name__)

COMPLAINT_SECONDS = 10.0
KEPT_READER_SECONDS = 60.0
"""How long a reader's position survives the close that its own seek causes."""


def check_subscription_name(name: str) -> None:
    """Raise what clients are told of a name that no subscription can have."""
    if not name or names.is_reserved_subscription(name):
        raise ProducerBusy(f"{name!r} cannot be the name of a subscription; choose another.")
    names.check_subscription_name(name)


class Topic(TopicProducers):
    """One loaded topic."""

    __slots__ = (
        "_dedup_lock",
        "_end_prefixes",
        "_quiet_until",
        "_subscription_lock",
        "budget",
        "bytes_in",
        "created_ms",
        "deduplicates_all",
        "indexes",
        "last_publish_ms",
        "messages_in",
        "service",
        "subscriptions",
        "transactions",
    )

    def __init__(self, service: BrokerService, name: TopicName) -> None:
        super().__init__(name, service.config, service.runtime.clock)
        self.service = service
        self.budget = service.budget
        self.transactions: MetadataTransactionBuffer
        self.indexes: LogIndexes
        self.deduplicates_all = False
        """Whether every producer is deduplicated; else only those that ask for it."""
        self.subscriptions: dict[str, Subscription] = {}
        self._dedup_lock = asyncio.Lock()
        self._subscription_lock = asyncio.Lock()
        self.messages_in = 0
        self.bytes_in = 0
        self.created_ms = self.clock.now_ms()
        self.last_publish_ms = 0
        self._quiet_until = float("-inf")
        self._end_prefixes = tuple(prefix for prefix in self.config.end_of_topic_clients.split(",") if prefix)

    async def opened(self, managed: ManagedLedger, *, deduplicate: bool) -> None:
        """The log is open: take over its transactions, make its durable subscriptions and restore the deduplication state."""
        self.log = managed
        self.indexes = LogIndexes(managed)
        shared = self.service.transactions
        self.transactions = MetadataTransactionBuffer(
            str(self.name), managed, shared.store, shared.decisions, self.clock, self.tasks, self._more_readable
        )
        await self.transactions.recover()
        managed.readable = lambda: self.transactions.max_read_position
        managed.last_shown = partial(last_shown, self)
        managed.on_trimmed = self._trimmed
        for name, cursor in managed.cursors.items():
            if name not in names.RESERVED_SUBSCRIPTIONS:
                self.subscriptions[name] = Subscription(self, name, cursor, is_durable=True)
        pending, unreadable = self._pending_acks(), managed.unreadable
        await recover_all(shared.store, str(self.name), pending, managed.check_owner, self.tasks, self.clock, unreadable)
        await self.set_deduplication(deduplicate)
        managed.request_trim()  # now it is known what transactions need

    async def set_deduplication(self, enabled: bool) -> None:
        """Turn deduplication on or off for all producers of this topic; takes effect at once."""
        async with self._dedup_lock:
            self.deduplicates_all = enabled
            cursor = self.log.cursors.get(CURSOR_NAME)
            is_requested = cursor is not None and REQUESTED in cursor.properties
            if enabled or is_requested:
                await self._load_deduplication(is_requested=is_requested)
            elif cursor is not None:
                self.dedup = None
                await self.log.delete_cursor(CURSOR_NAME)

    async def request_deduplication(self) -> None:
        """A producer asks for deduplication of its own messages; from then on this topic remembers what is stored."""
        async with self._dedup_lock:
            await self._load_deduplication(is_requested=True)
            cursor = self.log.cursors[CURSOR_NAME]
            if REQUESTED not in cursor.properties:
                await cursor.set_properties({REQUESTED: "true"})

    async def _load_deduplication(self, *, is_requested: bool) -> None:
        if self.dedup is None:
            self.dedup = await MessageDeduplication.load(
                self.log,
                snapshot_entries=self.config.deduplication_snapshot_entries,
                max_producers=self.config.deduplication_max_producers,
                is_requested=is_requested,
            )

    async def adopt_producers(self, producers: Mapping[str, int]) -> None:
        """What the parents of this segment have stored of these producers is a duplicate here too. Durable when it returns."""
        await self.request_deduplication()
        if self.dedup is not None:
            await self.dedup.adopt(producers)

    def last_sequences(self) -> dict[str, int]:
        """Highest stored sequence id by producer, as far as deduplication knows it."""
        return {} if self.dedup is None else self.dedup.last_stored

    # What the log reports.

    def entries_added(self, entries: list[Entry]) -> None:
        """Durable: answer the producers, then wake the subscriptions. Runs once per topic and commit group."""
        if self.transactions.in_flight:
            self.transactions.added(entries)
        producer: Producer | None = None
        receipts: list[bytes] = []
        messages = size = 0
        for entry in entries:
            context: PublishContext = entry.context
            owner, sequence_id, highest, length = context
            entry.context = None
            if owner is not producer:
                if producer is not None:
                    self._answer(producer, receipts, messages, size)
                    receipts = []
                    messages = size = 0
                producer = owner
            ledger_id, entry_id = entry.ledger_id, entry.entry_id
            receipts.append(send_receipt(owner.producer_id, sequence_id, None if highest < 0 else highest, ledger_id, entry_id))
            messages += entry.messages
            size += length
            if self.dedup is not None:
                self.dedup.stored(owner.info.name, sequence_id, highest, Position(ledger_id, entry_id))
        if producer is not None:
            self._answer(producer, receipts, messages, size)
            self.last_publish_ms = entries[-1].append_ms
        if self.subscriptions:
            for subscription in self.subscriptions.values():
                subscription.dispatcher.added(entries)

    def _answer(self, producer: Producer, receipts: list[bytes], messages: int, size: int) -> None:
        """Send a run of receipts to one producer, settle its counts and give the room of its publishes back."""
        count = len(receipts)
        if producer.deferred:
            receipts = self._in_order(producer, receipts)
        producer.link.extend(receipts)
        producer.messages_in += messages
        producer.bytes_in += size
        self.messages_in += messages
        self.bytes_in += size
        self._settle(producer, count, size)

    @staticmethod
    def _in_order(producer: Producer, receipts: list[bytes]) -> list[bytes]:
        """Receipts with the refusals and duplicates between them, each where it was published (trap 10)."""
        frames: list[bytes] = []
        for number, receipt in enumerate(receipts, producer.completed + 1):
            frames.append(receipt)
            while producer.deferred and producer.deferred[0][0] <= number:
                frames.append(producer.deferred.popleft()[1])
        return frames

    def _settle(self, producer: Producer, count: int, size: int) -> None:
        """Publishes of a producer were answered, well or badly."""
        producer.completed += count
        if producer.deferred or producer.idle_callback is not None:
            producer.after_completions()
        self.budget.used -= size
        producer.link.pending_publishes -= count
        self.gave_back(producer)

    def gave_back(self, producer: Producer) -> None:
        """There is room for more publishes."""
        if self.budget.waiting:
            self.budget.wake()
        if producer.link.when_drained is not None:
            producer.link.when_drained()

    def _more_readable(self) -> None:
        """Transactions hold back less than before."""
        for subscription in list(self.subscriptions.values()):
            subscription.pump()

    def log_failed(self, cause: BraidError, contexts: list[PublishContext]) -> None:
        """Not stored: close the producers concerned; a fenced log ends this topic object.

        Closing, rather than a SEND_ERROR per message, because what the client has sent after the failed messages must not be
        stored before they are: it is dropped now, and the client comes back and sends everything again in order. It also costs
        the client one producer instead of its whole connection (trap 5).
        """
        if contexts and self.transactions.in_flight:  # without entries this may come before the topic is opened
            self.transactions.failed([each.txn for each in contexts if isinstance(each, TransactionalPublish)])
        if contexts or not isinstance(cause, LedgerFenced):
            self._complain(f"storing {len(contexts)} entries failed", cause)
        failed: dict[Producer, None] = {}
        for producer, _sequence_id, _highest, length in contexts:
            failed[producer] = None
            producer.has_failed = True
            self._settle(producer, 1, length)
        for producer in failed:
            if self.dedup is not None:
                self.dedup.failed(producer.info.name)
            self.disconnect_producer(producer)
            if (newer := self.producers.get(producer.info.name)) is not None:
                # It came back while its messages were under way, and goes on after them: it must send them again first.
                self.disconnect_producer(newer)
        if isinstance(cause, LedgerFenced | Closed) or (self.dedup is not None and self.log.is_in_doubt):
            # In doubt: only a new load tells which of the failed messages are stored, and so are duplicates when sent again.
            self.service.topic_lost(self)

    def add_refused(self, producer: Producer, failure: BraidError, *, was_judged: bool) -> None:
        """The log did not take an entry, which deduplication had found new if it `was_judged`: close the producer, for the
        reasons of `log_failed`; its client learns more when it comes back. The producer of a segment that is being sealed is
        told at once instead, for this message and all that follow, so that it can look for the children."""
        if self.dedup is not None and was_judged:
            self.dedup.refused(producer.info.name)
        if isinstance(failure, TopicTerminated):
            if self.is_segment:
                producer.refuse_all(failure)
                return
        else:
            self._complain("an entry was not taken", failure)
        self.disconnect_producer(producer)
        if isinstance(failure, LedgerFenced | Closed):
            self.service.topic_lost(self)

    def _complain(self, what: str, cause: BraidError) -> None:
        """Log trouble with the storage, seldom: clients that try again must not fill the log. A full disk the store reports."""
        if cause.code == StorageFull.code:
            return
        now = self.clock.monotonic()
        if now >= self._quiet_until:
            self._quiet_until = now + COMPLAINT_SECONDS
            log.warning("%s: %s: %s", self.name, what, cause)

    def _trimmed(self) -> None:
        """Entries were deleted from the front of the log."""
        self.transactions.prune()
        for subscription in list(self.subscriptions.values()):
            subscription.trimmed()

    # Subscriptions.

    async def subscription(
        self,
        name: str,
        *,
        is_durable: bool,
        start: Position | None,
        initial: Position,
        properties: dict[str, str] | None = None,
        allow_create: bool = True,
    ) -> Subscription:
        """The subscription of that name, made if need be."""
        async with self._subscription_lock:
            self.check_open()
            found = self.subscriptions.get(name)
            if found is not None:
                found.refuse_other_durability(is_durable)
                return found
            self.log.unreadable.check(name)
            if is_durable:
                if not allow_create:
                    raise SubscriptionNotFound(
                        f"The subscription {name} of {self.name} does not exist and may not be created by a consumer."
                    )
                # Its name may have been another's, whose end was interrupted. First, or whoever loads the topic in between
                # takes that one's acknowledgments for this one's.
                await self.service.transactions.store.purge_subscription(str(self.name), name, self.log.check_owner)
                cursor = await self.log.open_cursor(
                    name, initial="earliest" if initial == EARLIEST else "latest", properties=properties or {}
                )
            else:
                cursor = self.log.non_durable_cursor(name, self._start_of(start, initial))
            subscription = self.subscriptions[name] = Subscription(self, name, cursor, is_durable=is_durable)
            return subscription

    def _start_of(self, start: Position | None, initial: Position) -> Position:
        """Where a reader begins; a start beyond the end means the initial position."""
        if start is None:
            return LATEST
        if start > self.log.last_position:
            return initial
        return start

    def drop_non_durable(self, subscription: Subscription) -> None:
        """A reader without consumers ends, and its position with it."""
        if self.subscriptions.get(subscription.name) is subscription:
            del self.subscriptions[subscription.name]
            self.log.drop_non_durable(subscription.cursor)

    def keep_reader(self, subscription: Subscription) -> None:
        """After a seek: the client comes back without a start position and must find this one (trap 3)."""

        def expire() -> None:
            if subscription.is_kept and not subscription.consumers:
                self.drop_non_durable(subscription)

        subscription.keep_until(self.clock.call_later(KEPT_READER_SECONDS, expire))

    async def delete_subscription(self, name: str, check: Callable[[], Awaitable[None]] | None = None) -> None:
        """Remove a subscription and its cursor, unless `check` raises: it is asked when nobody can come to need it any more
        without making it anew."""
        async with self._subscription_lock:
            if check is not None:
                await check()
            subscription = self.subscriptions.get(name)
            if subscription is None and name in self.log.unreadable:
                await self.log.delete_cursor(name)
                await self._purge_acks(name)
                return
            if subscription is None:
                raise SubscriptionNotFound(f"The subscription {name} of {self.name} does not exist.")
            subscription.close_consumers()
            self.subscriptions.pop(name, None)
            if subscription.is_durable:
                try:
                    await self.log.delete_cursor(name)
                except BaseException:
                    self.subscriptions[name] = subscription  # its cursor is still there
                    raise
                await self._end_acks(subscription)
            else:
                self.log.drop_non_durable(subscription.cursor)

    async def relist_acks(self) -> None:
        """Let no op of a decided transaction stay that its subscription does not know of, or that has none."""
        for pending in self._pending_acks().values():
            await pending.relist()
        store = self.service.transactions.store
        orphans = [op for op in await store.all_acks_in(str(self.name)) if self._is_orphan(op)]
        if orphans:
            await self.log.check_owner()  # else they may be those of subscriptions that a later owner made
        for op in orphans:
            async with self._subscription_lock:
                if self._is_orphan(op):
                    await store.delete_op(op)

    def _is_orphan(self, op: StoredOp) -> bool:
        """Of no subscription, not even of one that cannot be read now."""
        return op.op.subscription not in self.subscriptions and op.op.subscription not in self.log.unreadable

    async def _end_acks(self, subscription: Subscription) -> None:
        """The subscription is gone: so are the acknowledgments it would have got."""
        if subscription.pending_acks is not None:
            subscription.pending_acks.close()
            await subscription.pending_acks.drain()  # an op that is written later would be another subscription's of that name
        await self._purge_acks(subscription.name)

    async def _purge_acks(self, name: str) -> None:
        try:
            await self.service.transactions.store.purge_subscription(str(self.name), name, self.log.check_owner)
        except BraidError as error:  # they count for nothing, and go when the name is used or the topic is loaded again
            log.warning("acknowledgments of transactions in %s of %s are left: %s", name, self.name, error)

    def _pending_acks(self) -> dict[str, MetadataPendingAckStore]:
        return {name: each.pending_acks for name, each in self.subscriptions.items() if each.pending_acks is not None}

    def tells_end(self, link: Link) -> bool:
        """Whether this client survives being told the end of a topic (trap 1)."""
        return link.protocol_version >= 9 and link.client_version.startswith(self._end_prefixes)

    # The topic's own life.

    async def terminate(self) -> Position:
        """Take no more messages, durably. Producers have the receipts of all that is stored when they are closed; they learn
        why when they come back (the friendly path of 4.5), those of a segment also from each message they sent too late."""
        try:
            position = await self.log.terminate()
        except BraidError:
            for producer in list(self.producers.values()):
                if producer.refusal is not None:  # it was refused too early, and must send that again, in order
                    self.release_producer(producer)
            raise
        refusal = TopicTerminated(f"The topic {self.name} was terminated and takes no more messages.")
        self.access.refuse_waiters(refusal)
        for producer in list(self.producers.values()):
            if self.is_segment:
                producer.refuse_all(refusal)
                self.release_producer(producer)
            else:
                self.disconnect_producer(producer)
        for subscription in list(self.subscriptions.values()):
            subscription.cursor.save_soon()  # the last acknowledgments may be there already
            subscription.pump()
        return position

    def let_go(self) -> None:
        """Wait for no more decisions: what is stored of transactions is the next owner's."""
        if hasattr(self, "transactions"):  # else it was never opened
            self.transactions.close()
        for pending in self._pending_acks().values():
            pending.close()

    def disconnect_all(self) -> None:
        """Stop serving: clients are told to look the topic up again."""
        self.is_closing = True
        for producer in list(self.producers.values()):
            self.release_producer(producer)
        self.access.refuse_waiters(NotReady(f"The topic {self.name} is being closed; look it up again."))
        for subscription in list(self.subscriptions.values()):
            subscription.close_consumers()

    async def close(self) -> None:
        """Disconnect clients, make cursors durable, release the log."""
        self.disconnect_all()
        self.let_go()
        if accepting := [pending for pending in self._pending_acks().values() if pending.is_accepting]:
            await asyncio.gather(*(pending.drain() for pending in accepting))  # one after the other may take minutes
        await self.tasks.close()
        if self.dedup is not None:
            await self.dedup.close()
        try:
            await self.log.close()
        finally:
            for producer in self.released:  # however the log ended, nobody waits for ever
                if (tell := producer.idle_callback) is not None:
                    producer.idle_callback = None
                    tell()
