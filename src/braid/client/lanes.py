"""`TopicProducer`: a producer's lane to one topic, partition or segment: its own name there, its own sequence.

Owns its place at the broker: attaching, answers, and sending the unanswered entries again in order after a reconnect. A
*frozen* lane answers what is on its way and never attaches again; what is left is taken from it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from braid.client.connection import UNASKED, Connection
from braid.client.lane_messages import LaneMessages
from braid.client.producer_drafts import ProducerOptions, UnansweredEntry, Window
from braid.errors import (
    BraidError,
    ChecksumMismatch,
    Closed,
    ConnectionLost,
    NotAllowed,
    NotFound,
    ProducerBusy,
    QuotaExceeded,
    RequestError,
    TooLarge,
    TopicTerminated,
    TransactionConflict,
    from_code,
)
from braid.model.segments import SegmentInfo
from braid.wire import requests
from braid.wire.commands import signed64

if TYPE_CHECKING:
    from braid.client.client import Client

REFUSED = (ChecksumMismatch, NotAllowed, TooLarge, TransactionConflict)
"""Answers to a SEND that concern this one message; after any other the window is sent again."""
DEDUPLICATION = "__braid.dedup"
"""Producer metadata that asks for deduplication of this producer."""
MANAGED = "__pulsar.v5.managed"
"""Producer metadata on a regular topic by a client that follows layouts."""


class LaneOwner(Protocol):
    """Whom a lane tells what it cannot decide by itself."""

    def lane_ready(self, lane: TopicProducer) -> None:
        """Attached for the first time."""

    def lane_sealed(self, lane: TopicProducer) -> None:
        """The broker said that the segment takes no more messages."""

    def lane_missing(self, lane: TopicProducer) -> None:
        """The broker does not know the segment."""

    def lane_idle(self, lane: TopicProducer) -> None:
        """A frozen lane has nothing unanswered any more, or can get no more answers."""

    def lane_failed(self, lane: TopicProducer, error: BraidError) -> None:
        """The lane is of no more use; everything in it has failed."""

    def lane_expired(self, lane: TopicProducer, error: BraidError) -> None:
        """What waited in the lane has failed because it waited too long."""


class TopicProducer(LaneMessages):
    """One lane."""

    def __init__(
        self,
        client: Client,
        topic: str,
        name: str | None,
        options: ProducerOptions,
        window: Window,
        owner: LaneOwner,
        *,
        partition: int = -1,
        segment: SegmentInfo | None = None,
        is_managed: bool = False,
    ) -> None:
        super().__init__(client, topic, name, options, window, (partition, segment.segment_id if segment is not None else -1))
        self.segment = segment
        """Of a scalable topic; None for a regular one."""
        self.blockers: set[TopicProducer] = set()
        """Lanes with older messages of the same keys: until they are done, this one is not released."""
        self.is_frozen = False
        self.is_outdated = False
        """The broker said that the segment is sealed or gone; the layout may not yet."""
        self.is_patient = False
        """Whether a name that is taken is asked for again; else the first refusal is final."""
        self.has_attached = False
        self.is_uninformed = False
        """Whether it waits to hear which keys those segments had."""
        self.elder_numbers: dict[int, int] = {}
        """What the name stored last in the segments that this one came from, as its broker said."""
        self._doubtful = -1
        """Messages up to this number may be stored though nobody answered: their connection ended."""
        self._owner = owner
        self._metadata: dict[str, str] = {}
        if options.deduplication:
            self._metadata[DEDUPLICATION] = "true"
        if is_managed:
            self._metadata[MANAGED] = "true"
        self._epoch = 0

    def __repr__(self) -> str:
        return f"<lane {self.name} to {self.topic}>"

    @property
    def is_doubtful(self) -> bool:
        """Whether something unanswered may be stored nevertheless."""
        return bool(self.unanswered) and self.unanswered[0].sequence_id <= self._doubtful

    # The owner's side.

    def freeze(self) -> None:
        """The layout shows the segment sealed: never attach again; answers on their way are still taken."""
        self.hold_back()
        self.is_frozen = True
        self._tasks.cancel()

    def doubt(self) -> None:
        """What is unanswered may be stored: a broker that seals a segment answers first, one that is gone does not."""
        self._drop_unsure()
        if self.unanswered:
            self._doubtful = self.unanswered[-1].highest_sequence_id

    def abandon(self) -> None:
        """Expect no more answers."""
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.producers.pop(self.producer_id, None)
        self.attached.clear()

    async def leave(self) -> None:
        """Tell the broker that the lane is not used any more; what is unanswered fails."""
        if self.is_closed:
            return
        connection = self.connection
        if connection is not None:
            connection.producers.pop(self.producer_id, None)
            try:
                await connection.request(lambda number: requests.close_producer(number, self.producer_id))
            except BraidError:
                pass  # the connection's end closes the producer as well
            self.connection = None
        await self.shut()

    def stop(self) -> None:
        """As `leave`, but at once: whether the broker heard of it is not known."""
        if self.is_closed:
            return
        self.is_closed = True
        connection = self.connection
        self.abandon()
        if connection is not None and connection.is_open:
            connection.write(requests.close_producer(UNASKED, self.producer_id))
        self.failed(Closed(f"The use of {self.topic} was closed."))
        self._tasks.cancel()

    # The connection's side.

    async def attach(self, connection: Connection) -> None:
        self._epoch += 1
        connection.producers[self.producer_id] = self
        try:
            body = await connection.request(
                lambda number: requests.producer(
                    number,
                    self.producer_id,
                    self.topic,
                    self.name,
                    epoch=self._epoch,
                    schema=self._options.codec.schema,
                    metadata=self._metadata,
                )
            )
        except BaseException as error:
            connection.producers.pop(self.producer_id, None)
            if not isinstance(error, RequestError):
                self.is_patient = True  # the place may be ours by now: then it is we ourselves who have the name
                if connection.is_open:
                    connection.write(requests.close_producer(UNASKED, self.producer_id))
            raise
        self.name = body.producer_name
        self._max_size = connection.max_message_size
        if self._options.codec.schema is not None:
            self._schema_version = body.schema_version
        if not self.has_attached and body.HasField("last_sequence_id"):
            self._restored_id = signed64(body.last_sequence_id)
            self.last_sequence_id = max(self.last_sequence_id, self._restored_id)
            self.elder_numbers = {each.segment_id: each.last_sequence_id for each in body.elders}

    def begin(self, connection: Connection) -> None:
        self.is_outdated = False
        for each in self.unanswered:
            connection.write(each.frame(self.producer_id))
        if not self.has_attached:
            self.has_attached = True
            self._owner.lane_ready(self)

    def is_registered(self, connection: Connection) -> bool:
        return connection.producers.get(self.producer_id) is self

    def is_transient(self, error: BaseException) -> bool:
        if isinstance(error, QuotaExceeded):
            return False  # who makes a producer is told at once that nothing can be stored, as in other clients
        return super().is_transient(error) or (isinstance(error, ProducerBusy) and self.is_patient)

    def is_final(self, error: BraidError) -> bool:
        if isinstance(error, ProducerBusy):
            # Once attached, it is our own old place, which the broker has not given up yet.
            return not self.has_attached and not self.is_patient
        if self.segment is not None and isinstance(error, NotFound):
            return False  # the layout decides whether the topic is gone
        return super().is_final(error)

    def refused(self, error: BraidError) -> None:
        if self.segment is not None and isinstance(error, NotFound):
            self.is_outdated = True
            self._owner.lane_missing(self)
        elif isinstance(error, QuotaExceeded) and not self.is_frozen:
            self._no_room(error)

    def end(self, error: BraidError) -> None:
        if isinstance(error, TopicTerminated) and self.segment is not None:
            self._sealed()
        else:
            super().end(error)

    def detached(self, error: BraidError, *, is_settled: bool = False) -> None:
        if self.connection is not None:
            if not is_settled:
                self._drop_unsure()
            if not self.connection.is_open:
                self.doubt()
        super().detached(error)

    def lost(self) -> None:
        if self.is_frozen:
            self._owner.lane_idle(self)
        elif self.segment is not None:
            # If the segment was sealed, its new layout is on its way; else the lanes of all clients do not come back at once.
            self.hold = self.hold or self.config.backoff_initial

    def receipt(self, body: Any) -> None:
        unanswered = self.unanswered
        sequence_id = signed64(body.sequence_id)
        if not unanswered or sequence_id < unanswered[0].drafts[0].sequence_id:
            return  # of an entry that was sent again
        if sequence_id > unanswered[0].drafts[0].sequence_id:
            self._start_over(ConnectionLost(f"The broker skipped message {unanswered[0].sequence_id} of {self.topic}."))
            return
        self.hold = 0.0
        where = body.message_id
        self._answered(unanswered.popleft(), signed64(where.ledgerId), signed64(where.entryId))
        if self.is_frozen and not unanswered:
            self._owner.lane_idle(self)

    def send_failed(self, body: Any) -> None:
        error = from_code(body.error, body.message)
        if isinstance(error, TopicTerminated):
            self._sealed() if self.segment is not None else self.end(error)
            return
        if isinstance(error, REFUSED) and (refused := self._numbered(signed64(body.sequence_id))) is not None:
            self.unanswered.remove(refused)
            self._fail(refused.drafts, error)
            if self.is_frozen and not self.unanswered:
                self._owner.lane_idle(self)
            return
        self._start_over(error)

    def expired(self, error: BraidError) -> None:
        self._owner.lane_expired(self, error)

    def failed(self, error: BraidError) -> None:
        self.drop(error)
        self._owner.lane_failed(self, error)

    # Inside.

    def _numbered(self, sequence_id: int) -> UnansweredEntry | None:
        """The entry that an answer is about; a refusal may overtake the receipts of those before it."""
        for each in self.unanswered:
            if sequence_id in (each.sequence_id, each.highest_sequence_id):
                return each
        return None

    def _drop_unsure(self) -> None:
        """A transaction promises each message once and can be done anew by the application: without deduplication, what may be
        stored already is not sent again. A broker may also close a producer after a write of unknown outcome; one that moves a
        topic or seals a segment says that there is none."""
        if not self._options.deduplication:
            self.drop_transactional(
                ConnectionLost(
                    f"The place at the broker was lost before {self.topic} acknowledged a message of a transaction; it may be "
                    "stored, so the transaction cannot be committed. (With deduplication=True the producer sends it again.)"
                )
            )

    def _no_room(self, error: QuotaExceeded) -> None:
        """The storage takes nothing: what waits fails now, with the reason, rather than at its deadline without one. The lane
        goes on asking, about once a second; what is sent meanwhile waits for the next answer."""
        self.seal_batch()
        error = QuotaExceeded(
            f"{error} Messages sent before may be stored: nobody answered them." if self.is_doubtful else str(error)
        )
        drafts = self.take_back()
        if drafts:
            self._fail(drafts, error)
            self._owner.lane_expired(self, error)

    def _sealed(self) -> None:
        """TopicTerminated: what was stored has been answered, the rest waits for the layout."""
        self.is_outdated = True
        self.abandon()
        if not self.is_frozen:
            self.hold_back()
            self._tasks.cancel()
        self._owner.lane_sealed(self)

    def _start_over(self, error: BraidError) -> None:
        """Register anew and send the whole window again, so that order is kept."""
        connection = self.connection
        if connection is not None:
            connection.producers.pop(self.producer_id, None)
            self.hold = min(self.hold * 2 or self.config.backoff_initial, self.config.backoff_max)
            self.detached(error)
