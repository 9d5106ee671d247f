"""`TopicProducer`: a producer's lane to one topic, partition or segment: its own name there, its own sequence.

Owns batches, the unanswered entries and sending them again in order after a reconnect. A lane may be *held*: it takes messages
but sends none of them until it is released, because it is not attached yet, because older messages must come first, or because
its segment is sealed. A *frozen* lane answers what is on its way and never attaches again; what is left is taken from it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from braid.client.attachment import Attachment
from braid.client.connection import Connection
from braid.client.messages import MessageId
from braid.client.producer_drafts import Draft, ProducerOptions, Sent, UnansweredEntry, Window, fail, make_entry
from braid.errors import (
    BraidError,
    ChecksumMismatch,
    ConnectionLost,
    DeadlineExceeded,
    NotAllowed,
    NotFound,
    ProducerBusy,
    TooLarge,
    TopicTerminated,
    TransportError,
    from_code,
)
from braid.model.segments import SegmentInfo
from braid.runtime.clock import Timer
from braid.wire import requests
from braid.wire.commands import signed64
from braid.wire.frames import DEFAULT_MAX_MESSAGE_SIZE
from braid.wire.types import CompressionType

if TYPE_CHECKING:
    from braid.client.client import Client

REFUSED = (ChecksumMismatch, NotAllowed, TooLarge)
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

    def lane_idle(self, lane: TopicProducer) -> None:
        """A frozen lane has nothing unanswered any more, or can get no more answers."""

    def lane_failed(self, lane: TopicProducer, error: BraidError) -> None:
        """The lane is of no more use; everything in it has failed."""

    def lane_expired(self, lane: TopicProducer, error: BraidError) -> None:
        """What waited in the lane has failed because it waited too long."""


class TopicProducer(Attachment):
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
        super().__init__(client, topic)
        self.producer_id = client.new_id()
        self.name = name
        self.segment = segment
        """Of a scalable topic; None for a regular one."""
        self.last_sequence_id = -1
        """Of the newest message put into an entry or batch; restored from the broker when it deduplicates."""
        self.blockers: set[TopicProducer] = set()
        """Lanes with older messages of the same keys: until they are done, this one is not released."""
        self.is_held = True
        self.is_frozen = False
        self.is_sealed = False
        """The broker said so; the layout may not yet."""
        self.is_patient = False
        """Whether a name that is taken is asked for again; else the first refusal is final."""
        self.has_attached = False
        self.unanswered: deque[UnansweredEntry] = deque()
        self._partition = partition
        self._segment_id = segment.segment_id if segment is not None else -1
        self._options = options
        self._window = window
        self._owner = owner
        self._metadata: dict[str, str] = {}
        if options.deduplication:
            self._metadata[DEDUPLICATION] = "true"
        if is_managed:
            self._metadata[MANAGED] = "true"
        self._epoch = 0
        self._max_size = DEFAULT_MAX_MESSAGE_SIZE
        self._schema_version = b""
        self._batch: list[Draft] = []
        self._batch_size = 0
        self._batch_timer: Timer | asyncio.Handle | None = None
        self._older: deque[Draft] = deque()
        """Held: messages that were re-routed here, before those sent to this lane."""
        self._newer: deque[Draft] = deque()
        self._timeout: Timer | None = None

    def __repr__(self) -> str:
        return f"<lane {self.name} to {self.topic}>"

    # The application's side.

    def send(
        self,
        payload: bytes,
        key: str | None,
        properties: Mapping[str, str] | None,
        event_ms: int,
        sequence_id: int | None,
        deadline: float,
    ) -> Sent:
        """Take a message; the future is done when it is durable. The caller has asked the window."""
        if self.failure is not None or self.is_closed:
            self.check_usable()
        size = len(payload)
        if key is not None:
            size += len(key)
        if properties:
            size += sum(len(name) + len(value) for name, value in properties.items())
        if size > self._max_size and self._options.compression is CompressionType.NONE:
            raise TooLarge(f"A message of {size} bytes is above the broker's limit of {self._max_size} bytes.")
        if sequence_id is not None and sequence_id <= self.last_sequence_id:
            raise NotAllowed(f"Sequence id {sequence_id} is not above the last one, {self.last_sequence_id}.")
        done: Sent = asyncio.get_running_loop().create_future()
        draft = Draft(payload, key, properties, event_ms, sequence_id, size, deadline, done)
        self._window.messages += 1
        self._window.size += size
        if self.is_held:
            draft.deadline = deadline or self.clock.monotonic() + self.config.send_timeout
            self._newer.append(draft)
            self._watch_time()
        else:
            self._put(draft)
        return done

    def waiting(self) -> Iterator[Draft]:
        """Every message that is not answered, in order."""
        for entry in self.unanswered:
            yield from entry.drafts
        yield from self._batch
        yield from self._older
        yield from self._newer

    def seal_batch(self) -> None:
        """Make an entry of the messages collected and send it."""
        if self._batch_timer is not None:
            self._batch_timer.cancel()
            self._batch_timer = None
        if self._batch:
            batch, self._batch = self._batch, []
            size, self._batch_size = self._batch_size, 0
            self._seal(batch, size, is_batch=True)

    async def leave(self) -> None:
        """Tell the broker that the lane is not used any more; what is unanswered fails."""
        if self.is_closed:
            return
        connection = self.connection
        if connection is not None:
            connection.producers.pop(self.producer_id, None)
            try:
                await connection.request(lambda number: requests.close_producer(number, self.producer_id))
            except (TransportError, DeadlineExceeded):
                pass  # the connection's end closes the producer as well
        await self.shut()

    # The owner's side.

    def release(self) -> None:
        """Send what was held, older messages first, and everything from now on at once."""
        self.is_held = False
        older, self._older = self._older, deque()
        newer, self._newer = self._newer, deque()
        for draft in older:
            self._put(draft, is_moved=True)
        for draft in newer:
            self._put(draft)
        self.seal_batch()

    def hold_back(self) -> None:
        """The segment is sealed: take messages, send none, until the owner knows where they go."""
        self.is_held = True
        if self._batch_timer is not None:
            self._batch_timer.cancel()
            self._batch_timer = None
        self._newer.extendleft(reversed(self._batch))
        for draft in self._batch:
            draft.deadline = self._batch[0].deadline
        self._batch, self._batch_size = [], 0
        self._watch_time()

    def freeze(self) -> None:
        """The layout shows the segment sealed: never attach again; answers on their way are still taken."""
        self.hold_back()
        self.is_frozen = True
        self._tasks.cancel()

    def abandon(self) -> None:
        """Expect no more answers."""
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.producers.pop(self.producer_id, None)
        self.attached.clear()

    def take_back(self) -> tuple[list[UnansweredEntry], list[Draft]]:
        """Everything unanswered, in order: entries that may have been sent, then messages that were not."""
        self._stop_watching()
        entries, drafts = list(self.unanswered), [*self._older, *self._newer]
        self.unanswered.clear()
        self._older.clear()
        self._newer.clear()
        for entry in entries:
            for draft in entry.drafts:
                draft.deadline = entry.deadline
        return entries, drafts

    def take_over(self, drafts: list[Draft]) -> None:
        """Messages of a sealed segment, older than anything this lane has not sent yet."""
        if self.is_held:
            self._older.extend(drafts)
            self._watch_time()
        else:
            for draft in drafts:
                self._put(draft, is_moved=True)

    def settle(self, last_sequence_id: int) -> None:
        """Everything up to this number was stored before the segment was sealed, though nobody answered; where is not known."""
        while self.unanswered and self.unanswered[0].sequence_id <= last_sequence_id:
            self._answered(self.unanswered.popleft(), -1, -1)

    def drop(self, error: BraidError) -> None:
        """Fail everything unanswered."""
        self.hold_back()
        entries, drafts = self.take_back()
        for entry in entries:
            self._fail(entry.drafts, error)
        self._fail(drafts, error)

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
        except BaseException:
            connection.producers.pop(self.producer_id, None)
            raise
        self.name = body.producer_name
        self._max_size = connection.max_message_size
        if self._options.codec.schema is not None:
            self._schema_version = body.schema_version
        if not self.has_attached and body.HasField("last_sequence_id"):
            self.last_sequence_id = max(self.last_sequence_id, signed64(body.last_sequence_id))

    def begin(self, connection: Connection) -> None:
        for each in self.unanswered:
            connection.write(each.frame(self.producer_id))
        if not self.has_attached:
            self.has_attached = True
            self._owner.lane_ready(self)

    def is_registered(self, connection: Connection) -> bool:
        return connection.producers.get(self.producer_id) is self

    def is_final(self, error: BraidError) -> bool:
        if isinstance(error, ProducerBusy):
            # Once attached, it is our own old place, which the broker has not given up yet.
            return not self.has_attached and not self.is_patient
        if self.segment is not None and isinstance(error, NotFound):
            return False  # the layout decides whether the topic is gone
        return super().is_final(error)

    def end(self, error: BraidError) -> None:
        if isinstance(error, TopicTerminated) and self.segment is not None:
            self._sealed()
        else:
            super().end(error)

    def lost(self) -> None:
        if self.is_frozen:
            self._owner.lane_idle(self)

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
        if isinstance(error, REFUSED) and self.unanswered:
            refused = self.unanswered[0]
            if signed64(body.sequence_id) in (refused.sequence_id, refused.drafts[-1].sequence_id):
                self.unanswered.popleft()
                self._fail(refused.drafts, error)
                if self.is_frozen and not self.unanswered:
                    self._owner.lane_idle(self)
                return
        self._start_over(error)

    def failed(self, error: BraidError) -> None:
        self.drop(error)
        self._owner.lane_failed(self, error)

    # Inside.

    def _answered(self, answered: UnansweredEntry, ledger_id: int, entry_id: int) -> None:
        drafts, partition, segment_id = answered.drafts, self._partition, self._segment_id
        if answered.is_batch:
            count = len(drafts)
            for index, draft in enumerate(drafts):
                if not draft.done.done():
                    draft.done.set_result(MessageId(ledger_id, entry_id, partition, index, count, segment_id))
        elif not drafts[0].done.done():
            drafts[0].done.set_result(MessageId(ledger_id, entry_id, partition, -1, 0, segment_id))
        self._window.give(len(drafts), answered.size)

    def _put(self, draft: Draft, is_moved: bool = False) -> None:
        """Number a message and put it into the batch, or into an entry of its own."""
        sequence_id = self.last_sequence_id + 1
        if draft.wanted_id is not None and draft.wanted_id != sequence_id:
            if draft.wanted_id > self.last_sequence_id:
                sequence_id = draft.wanted_id
            elif not is_moved:  # what comes from another lane keeps its order, which counts, and takes the next number
                text = f"Sequence id {draft.wanted_id} is not above the last one, {self.last_sequence_id}."
                self._fail([draft], NotAllowed(text))
                return
        self.last_sequence_id = draft.sequence_id = sequence_id
        if not self._options.batching:
            self._seal([draft], draft.size, is_batch=False)
            return
        config = self.config
        limit = min(config.batch_max_bytes, self._max_size // 2)
        if self._batch and self._batch_size + draft.size > limit:
            self.seal_batch()
        if not self._batch and not draft.deadline:
            draft.deadline = self.clock.monotonic() + config.send_timeout
        self._batch.append(draft)
        self._batch_size += draft.size
        if len(self._batch) >= config.batch_max_messages or self._batch_size >= limit:
            self.seal_batch()
        elif self._batch_timer is None:
            delay = config.batch_delay
            loop = asyncio.get_running_loop()
            self._batch_timer = self.clock.call_later(delay, self.seal_batch) if delay else loop.call_soon(self.seal_batch)

    def _seal(self, drafts: list[Draft], size: int, *, is_batch: bool) -> None:
        entry = self._entry(drafts, is_batch=is_batch)
        if len(entry) > self._max_size:
            text = f"A message of {len(entry)} bytes is above the broker's limit of {self._max_size} bytes."
            self._fail(drafts, TooLarge(text))
            return
        deadline = drafts[0].deadline or self.clock.monotonic() + self.config.send_timeout
        unanswered = UnansweredEntry(drafts, entry, is_batch, size, deadline)
        self.unanswered.append(unanswered)
        if self._timeout is None:
            self._watch_time()
        if self.connection is not None:
            self.connection.write(unanswered.frame(self.producer_id))

    def _entry(self, drafts: list[Draft], *, is_batch: bool) -> bytes:
        return make_entry(
            drafts,
            is_batch=is_batch,
            producer=self.name or "",
            publish_ms=self.clock.now_ms(),
            compression=self._options.compression,
            schema_version=self._schema_version,
        )

    def _fail(self, drafts: list[Draft], error: BraidError) -> None:
        fail(drafts, error)
        self._window.give(len(drafts), sum(draft.size for draft in drafts))

    def _sealed(self) -> None:
        """TopicTerminated: what was stored has been answered, the rest waits for the layout."""
        self.is_sealed = True
        self.abandon()
        if not self.is_frozen:
            self.hold_back()
            self._tasks.cancel()
        self._owner.lane_sealed(self)

    def _oldest(self) -> float | None:
        if self.unanswered:
            return self.unanswered[0].deadline
        if self._older:
            return self._older[0].deadline
        return self._newer[0].deadline if self._newer else None

    def _watch_time(self) -> None:
        if self._timeout is None and (oldest := self._oldest()) is not None:
            self._timeout = self.clock.call_later(max(0.0, oldest - self.clock.monotonic()), self._check_time)

    def _stop_watching(self) -> None:
        if self._timeout is not None:
            self._timeout.cancel()
            self._timeout = None

    def _check_time(self) -> None:
        """Too old is too old for all: later ones must not overtake, so everything waiting fails."""
        self._timeout = None
        oldest = self._oldest()
        if oldest is None:
            return
        if oldest > self.clock.monotonic():
            self._watch_time()
            return
        seconds = self.config.send_timeout
        error = DeadlineExceeded(f"{self.topic} acknowledged nothing for {seconds:g} s; it may still be stored.")
        entries, drafts = self.take_back()
        for entry in entries:
            self._fail(entry.drafts, error)
        self._fail(drafts, error)
        self._owner.lane_expired(self, error)

    def _start_over(self, error: BraidError) -> None:
        """Register anew and send the whole window again, so that order is kept."""
        connection = self.connection
        if connection is not None:
            connection.producers.pop(self.producer_id, None)
            self.hold = min(self.hold * 2 or self.config.backoff_initial, self.config.backoff_max)
            self.detached(error)
