"""`Producer`: one producer of a topic: checks arriving entries, hands them to the log and answers in publish order.

The hot path of publishing is `publish`, called for every SEND: no task, closure or future per entry. A receipt leaves only
when the log has reported the entry durable (INV1). Must not know sockets; it writes frames to its `Link`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from braid.broker.dedup import PARTIAL, Verdict
from braid.broker.link import Link
from braid.broker.txn_publish import TransactionalLane, Waiting, transaction_of
from braid.errors import BraidError, ChecksumMismatch, NotAllowed, ProtocolError, StorageUnavailable
from braid.model.txn import TxnId
from braid.wire.encode import send_receipt
from braid.wire.entries import admit
from braid.wire.peek import chunk_of, has_checksum, with_checksum
from braid.wire.replies import send_error
from braid.wire.server import Send
from braid.wire.types import ProducerAccessMode

if TYPE_CHECKING:
    from braid.broker.topic import Topic


class ProducerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a PRODUCER command said about the producer."""

    producer_id: int
    name: str
    epoch: int = 0
    access_mode: ProducerAccessMode = ProducerAccessMode.SHARED
    topic_epoch: int | None = None
    metadata: dict[str, str] = {}
    request_id: int = 0
    schema_version: bytes = b""


DEDUPLICATION = "__braid.dedup"
"""Key of a producer's metadata; the value `true` asks for deduplication of its messages (settled.md)."""
PublishContext = tuple["Producer", int, int, int]
"""What travels with an entry through the log: producer, sequence id, highest sequence id (-1 = none), bytes."""


class TransactionalPublish(tuple["Producer", int, int, int]):  # noqa: SLOT001 - it carries more than the tuple
    """The context of an entry in a transaction."""

    txn: TxnId


class Admission(msgspec.Struct, frozen=True):
    """The answer to a producer: let in (with its topic epoch, if exclusive), or queued until the owner leaves."""

    is_ready: bool
    topic_epoch: int | None = None


class Producer:
    """One attached producer."""

    __slots__ = (
        "admission",
        "asks_dedup",
        "bytes_in",
        "completed",
        "connected_ms",
        "deferred",
        "has_failed",
        "idle_callback",
        "info",
        "is_closed",
        "lane",
        "link",
        "messages_in",
        "on_closed",
        "producer_id",
        "pushed",
        "refusal",
        "topic",
    )

    def __init__(self, info: ProducerInfo, link: Link, topic: Topic, connected_ms: int) -> None:
        self.info = info
        self.producer_id = info.producer_id
        self.link = link
        self.topic = topic
        self.connected_ms = connected_ms
        self.is_closed = False
        self.asks_dedup = info.metadata.get(DEDUPLICATION, "").lower() == "true"
        self.refusal: BraidError | None = None
        """What every further message is answered with."""
        self.admission = Admission(is_ready=False)
        self.pushed = 0
        """Entries handed to the log."""
        self.completed = 0
        """Entries the log has answered, well or badly."""
        self.messages_in = 0
        self.bytes_in = 0
        self.on_closed: Callable[[Producer], None] | None = None
        """Told when the broker closes the producer."""
        self.deferred: deque[tuple[int, bytes]] = deque()
        self.has_failed = False
        """Whether an entry of it was given to the log and reported as not stored: it may be stored after all."""
        self.idle_callback: Callable[[], None] | None = None
        self.lane: TransactionalLane | None = None
        """Messages that wait behind a transactional one; None if there are none."""

    def publish(self, send: Send) -> None:
        """Take one entry. Raises ProtocolError if its metadata cannot be read: the connection is closed then."""
        if not self.admission.is_ready:
            if self.refusal is not None:
                self.refuse(send, self.refusal)
                return
            raise ProtocolError(f"Producer {self.producer_id} sent a message while it waits for exclusive access.")
        messages = admit(send.entry)
        if (
            messages != send.num_messages
            or send.txn_most is not None
            or send.txn_least is not None
            or self.lane is not None
            or not messages
        ):
            self._publish_unusual(send, messages)
        else:
            self.append(send, messages, None)

    def _publish_unusual(self, send: Send, messages: int) -> None:
        """One that must be refused, belongs to a transaction, or comes behind one that does."""
        txn: TxnId | None = None
        refusal: BraidError | None = None
        if not messages:
            refusal = ChecksumMismatch(f"The checksum of message {send.sequence_id} does not fit its bytes.")
        elif abs(messages) != send.num_messages:
            refusal = NotAllowed(
                f"Message {send.sequence_id} says it holds {send.num_messages} messages, but its metadata says "
                f"{abs(messages)}; the producer's client is at fault."
            )
        else:
            try:
                txn = transaction_of(self, send, messages < 0)
            except NotAllowed as error:
                refusal = error
        if self.lane is None:
            if refusal is not None:
                self.refuse(send, refusal)
                return
            if self.topic.transactions.is_closed:
                return  # nobody serves the topic here any more; the client sends it again elsewhere
            self.lane = TransactionalLane(self)
        self.lane.add(Waiting(send, abs(messages), txn, refusal))

    def append(self, send: Send, messages: int, txn: TxnId | None) -> bool:
        """Hand an entry to the log, unless it is a duplicate; True if the log took it."""
        body = send.entry
        sequence_id = send.sequence_id
        topic = self.topic
        highest = send.highest_sequence_id
        was_judged = False
        if topic.dedup is not None and (topic.deduplicates_all or self.asks_dedup):
            if _is_partial(body):
                highest = PARTIAL  # only the last chunk is judged and remembered
            elif not self._is_new(send, highest):
                return False
            else:
                was_judged = True
        if not has_checksum(body):
            body = with_checksum(body)  # Go and Rust clients insist on it when they receive
        self.pushed += 1
        self.link.pending_publishes += 1
        topic.budget.used += len(body)
        context: PublishContext = (self, sequence_id, highest, len(body))
        if txn is not None:
            context = TransactionalPublish(context)
            context.txn = txn
        try:
            topic.log.add(body, messages, context, txn)
        except BraidError as error:
            topic.budget.used -= len(body)
            self.link.pending_publishes -= 1
            self.completed += 1
            topic.add_refused(self, error, was_judged=was_judged)
            if self.refusal is not None:
                self.refuse(send, self.refusal)
            self.after_completions()
            return False
        return True

    @property
    def is_judged(self) -> bool:
        """Whether duplicates of this producer are found."""
        return self.topic.dedup is not None and (self.topic.deduplicates_all or self.asks_dedup)

    def refuse_all(self, failure: BraidError) -> None:
        """From now on each message gets this answer, after those that were taken got theirs."""
        self.refusal = failure
        self.admission = Admission(is_ready=False)
        if self.lane is not None:
            self.lane.refuse(failure)

    def _is_new(self, send: Send, highest: int) -> bool:
        """Deduplicate: duplicates get a receipt without position, undetermined ones are to be sent again."""
        dedup = self.topic.dedup
        if dedup is None:
            return True
        verdict = dedup.check(self.info.name, send.sequence_id, highest)
        if verdict is Verdict.DUPLICATE:
            self.reply_in_order(send_receipt(self.producer_id, send.sequence_id, None if highest < 0 else highest, -1, -1))
        elif verdict is Verdict.UNDETERMINED:
            self.refuse(
                send, StorageUnavailable(f"Message {send.sequence_id} was sent before and is not stored yet; send it again.")
            )
        return verdict is Verdict.NEW

    def refuse(self, send: Send, error: BraidError) -> None:
        """Answer this message with an error, after those before it are answered."""
        self.reply_in_order(refusal_frame(send, error))

    def reply_in_order(self, frame: bytes) -> None:
        """Send `frame` once everything published before it has been answered."""
        if self.completed == self.pushed:
            self.link.write(frame)
        else:
            self.deferred.append((self.pushed, frame))

    def after_completions(self) -> None:
        """Some publishes were answered: send what waited for them."""
        while self.deferred and self.deferred[0][0] <= self.completed:
            self.link.write(self.deferred.popleft()[1])
        if self.idle_callback is not None and self.completed == self.pushed and self.lane is None:
            done, self.idle_callback = self.idle_callback, None
            done()

    @property
    def is_settled(self) -> bool:
        """Whether everything that may be stored of it was answered: the rest can be sent again without being stored twice."""
        return self.completed == self.pushed and self.lane is None and not self.has_failed

    def when_idle(self, done: Callable[[], None]) -> None:
        """Call `done` once every publish has been answered."""
        if self.completed == self.pushed and self.lane is None:
            done()
        else:
            self.idle_callback = done


def refusal_frame(send: Send, error: BraidError) -> bytes:
    """SEND_ERROR for one message."""
    return send_error(send.producer_id, max(send.sequence_id, send.highest_sequence_id), error.code, error.message)


def _is_partial(entry: bytes) -> bool:
    """Whether this is a chunk with more to follow. The metadata decides: not every client marks its SEND."""
    chunk = chunk_of(entry)
    return chunk is not None and chunk.chunk_id < chunk.num_chunks - 1
