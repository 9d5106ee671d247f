"""`LaneMessages`: the messages of a producer's lane that are not answered yet, numbered, batched and timed.

Owns batches, the unanswered entries and how long all of them may wait. A lane may be *held*: it takes messages but sends none
until it is released, because it is not attached yet, because older messages must come first, or because its segment is sealed.
Knows of the wire only how to write a frame; what the broker answers is `TopicProducer`'s business.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from braid.client.attachment import Attachment
from braid.client.blocks import Block, BlockDraft, BlockSending
from braid.client.lane_elders import Elders, routing_key
from braid.client.messages import MessageId
from braid.client.producer_drafts import Draft, ProducerOptions, Sent, UnansweredEntry, Window, fail, make_entry
from braid.errors import BraidError, DeadlineExceeded, NotAllowed, TooLarge
from braid.model.txn import TxnId
from braid.runtime.clock import Timer
from braid.wire.frames import DEFAULT_MAX_MESSAGE_SIZE
from braid.wire.types import CompressionType

if TYPE_CHECKING:
    from braid.client.client import Client


class LaneMessages(Attachment):
    """The half of a lane that holds messages."""

    def __init__(
        self, client: Client, topic: str, name: str | None, options: ProducerOptions, window: Window, place: tuple[int, int]
    ) -> None:
        super().__init__(client, topic)
        self.producer_id = client.new_id()
        self.name = name
        self.last_sequence_id = -1
        """Of the newest message put into an entry or batch; restored from the broker when it deduplicates."""
        self.elders: Elders | None = None
        """What the name stored in earlier segments; None as long as nobody asked for it, or if that is nothing."""
        self.is_held = True
        self.unanswered: deque[UnansweredEntry] = deque()
        self._options = options
        self._window = window
        self._partition, self._segment_id = place
        self._restored_id = -1
        """Messages up to this number were sent under the name before this lane was made."""
        self._loop = asyncio.get_running_loop()
        self._max_size = DEFAULT_MAX_MESSAGE_SIZE
        self._schema_version = b""
        self._batch: list[Draft] = []
        self._batch_size = 0
        self._batch_timer: Timer | asyncio.Handle | None = None
        self._older: deque[Draft] = deque()
        """Held: messages that were re-routed here, before those sent to this lane."""
        self._newer: deque[Draft] = deque()
        self._timeout: Timer | None = None
        self._timeout_at = 0.0

    @property
    def max_message_size(self) -> int:
        """What the broker takes; until there is one, what brokers usually do."""
        return self._max_size

    def expired(self, error: BraidError) -> None:
        """What waited in the lane has failed because it waited too long."""

    # Messages in.

    def send(
        self,
        payload: bytes,
        key: str | None,
        properties: Mapping[str, str] | None,
        event_ms: int,
        sequence_id: int | None,
        deadline: float,
        txn: TxnId | None = None,
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
        if sequence_id is not None and sequence_id <= self.last_sequence_id and sequence_id > self._sent_before:
            raise NotAllowed(f"Sequence id {sequence_id} is not above the last one, {self.last_sequence_id}.")
        done: Sent = self._loop.create_future()
        draft = Draft(payload, key, properties, event_ms, sequence_id, size, deadline, done, txn)
        self._window.messages += 1
        self._window.size += size
        if self.is_held:
            draft.deadline = deadline or self.clock.monotonic() + self.config.send_timeout
            self._newer.append(draft)
            self._watch_time()
        else:
            self._put(draft)
        return done

    def send_block(self, block: Block, sending: BlockSending, deadline: float, txn: TxnId | None) -> None:
        """Take rows of a block, as `send` does a message."""
        draft = BlockDraft(block, sending, deadline, txn)
        sending.not_taken -= draft.count
        self._window.messages += 1
        self._window.size += draft.size
        if self.is_held:
            self._newer.append(draft)
            self._watch_time()
        else:
            self._put_block(draft)

    def take_over(self, drafts: list[Draft]) -> None:
        """Messages of a sealed segment, older than anything this lane has not sent yet."""
        if self.failure is not None:
            self._fail(drafts, self.failure)
        elif self.is_held:
            self._older.extend(drafts)
            if self._timeout is not None and min(draft.deadline for draft in drafts) < self._timeout_at:
                self._timeout.cancel()
                self._timeout = None
            self._watch_time()
        else:
            for draft in drafts:
                self._put_any(draft, is_moved=True)

    @property
    def highest_id(self) -> int:
        """Of the messages of this name that came here, those included that earlier segments stored."""
        return max(self.last_sequence_id, self._sent_before)

    @property
    def _sent_before(self) -> int:
        """Messages up to this number may have been stored by an earlier process."""
        return self._restored_id if self.elders is None else max(self._restored_id, self.elders.highest)

    def waiting(self) -> Iterator[Draft]:
        """Every message that is not answered, in order."""
        for entry in self.unanswered:
            yield from entry.drafts
        yield from self._batch
        yield from self._older
        yield from self._newer

    # Holding and releasing.

    def release(self) -> None:
        """Send what was held, older messages first, and everything from now on at once."""
        self.is_held = False
        older, self._older = self._older, deque()
        newer, self._newer = self._newer, deque()
        if all(draft.wanted_id is not None for draft in older):
            # Of several lanes: in the order in which they were sent, or one would need a number that is not its own.
            older = deque(sorted(older, key=lambda draft: draft.wanted_id or 0))
        for draft in older:
            self._put_any(draft, is_moved=True)
        for draft in newer:
            self._put_any(draft)
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

    def seal_batch(self) -> None:
        """Make an entry of the messages collected and send it."""
        if self._batch_timer is not None:
            self._batch_timer.cancel()
            self._batch_timer = None
        if self._batch:
            batch, self._batch = self._batch, []
            size, self._batch_size = self._batch_size, 0
            self._seal(batch, size, is_batch=True)

    # Messages out.

    def take_back(self) -> list[Draft]:
        """Everything unanswered, in order, to be sent elsewhere; the lane is held."""
        if self._timeout is not None:
            self._timeout.cancel()
            self._timeout = None
        drafts = []
        for entry in self.unanswered:
            for draft in entry.drafts:
                draft.deadline = entry.deadline
                if draft.wanted_id is not None and draft.wanted_id <= self._restored_id:
                    draft.sequence_id = -1  # perhaps stored by an earlier process: the next lane judges anew
            drafts += entry.drafts
        drafts += self._older
        drafts += self._newer
        self.unanswered.clear()
        self._older.clear()
        self._newer.clear()
        return drafts

    def settle(self, last_sequence_id: int) -> None:
        """Everything up to this number was stored before the segment was sealed, though nobody answered; where is not known."""
        stored = [each for each in self.unanswered if each.sequence_id <= last_sequence_id]
        self.unanswered = deque(each for each in self.unanswered if each.sequence_id > last_sequence_id)
        for each in stored:
            self._answered(each, -1, -1)

    def drop_transactional(self, error: BraidError) -> None:
        """Fail the unanswered messages of transactions that may be stored already: sent again they could be stored twice."""
        dropped = [entry for entry in self.unanswered if entry.txn is not None]
        if dropped:
            self.unanswered = deque(entry for entry in self.unanswered if entry.txn is None)
            for entry in dropped:
                self._fail(entry.drafts, error)

    def drop(self, error: BraidError) -> None:
        """Fail everything unanswered."""
        self.hold_back()
        self._fail(self.take_back(), error)

    # Inside.

    def _answered(self, answered: UnansweredEntry, ledger_id: int, entry_id: int) -> None:
        drafts, partition, segment_id = answered.drafts, self._partition, self._segment_id
        if isinstance(drafts[0], BlockDraft):
            drafts[0].stored()
        elif answered.is_batch:
            count = len(drafts)
            for index, draft in enumerate(drafts):
                if not draft.done.done():
                    draft.done.set_result(MessageId(ledger_id, entry_id, partition, index, count, segment_id))
        elif not drafts[0].done.done():
            drafts[0].done.set_result(MessageId(ledger_id, entry_id, partition, -1, 0, segment_id))
        self._window.give(len(drafts), answered.size)

    def _put_any(self, draft: Draft, is_moved: bool = False) -> None:
        if isinstance(draft, BlockDraft):
            self._put_block(draft)
        else:
            self._put(draft, is_moved)

    def _put_block(self, draft: BlockDraft) -> None:
        """Cut a block into entries of a size that the broker takes, and number and send them."""
        self.seal_batch()
        config = self.config
        pieces = draft.block.cut(min(config.block_max_bytes, self._max_size // 2), config.block_max_messages)
        self._window.messages += len(pieces) - 1
        for piece in pieces:
            part = draft if len(pieces) == 1 else draft.part(piece)
            part.sequence_id = self.last_sequence_id + 1
            self.last_sequence_id += part.count
            entry = part.entry(
                producer=self.name or "",
                publish_ms=self.clock.now_ms(),
                compression=self._options.compression,
                schema_version=self._schema_version,
            )
            self._send_entry([part], entry, part.size, is_batch=True)

    def _put(self, draft: Draft, is_moved: bool = False) -> None:
        """Number a message and put it into the batch, or into an entry of its own."""
        sequence_id = self.last_sequence_id + 1
        if draft.wanted_id is not None:
            if draft.wanted_id <= self._sent_before and draft.sequence_id < 0 and self._is_seen_to(draft, draft.wanted_id):
                return
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
        if self._batch and (self._batch_size + draft.size > limit or self._batch[0].txn != draft.txn):
            self.seal_batch()  # an entry is of one transaction, or of none
        if not self._batch and not draft.deadline:
            draft.deadline = self.clock.monotonic() + config.send_timeout
        self._batch.append(draft)
        self._batch_size += draft.size
        if len(self._batch) >= config.batch_max_messages or self._batch_size >= limit:
            self.seal_batch()
        elif self._batch_timer is None:
            delay = config.batch_delay
            self._batch_timer = (
                self.clock.call_later(delay, self.seal_batch) if delay else self._loop.call_soon(self.seal_batch)
            )

    def _is_seen_to(self, draft: Draft, number: int) -> bool:
        """Deal with a message that may have been stored under this name before: whether nothing is left to do. What an earlier
        segment stored is answered; of this one the broker judges, so it is sent alone, for an entry is judged as a whole."""
        try:
            is_stored = self.elders is not None and self.elders.have(routing_key(draft.key, number) or "", number)
        except NotAllowed as error:
            self._fail([draft], error)
            return True
        if is_stored:
            if not draft.done.done():
                draft.done.set_result(MessageId(-1, -1, self._partition, -1, 0, self._segment_id))
            self._window.give(1, draft.size)
        elif number <= self._restored_id:
            self.seal_batch()
            draft.sequence_id = number
            self._seal([draft], draft.size, is_batch=False)
        else:
            return False
        return True

    def _seal(self, drafts: list[Draft], size: int, *, is_batch: bool) -> None:
        entry = make_entry(
            drafts,
            is_batch=is_batch,
            producer=self.name or "",
            publish_ms=self.clock.now_ms(),
            compression=self._options.compression,
            schema_version=self._schema_version,
        )
        self._send_entry(drafts, entry, size, is_batch=is_batch)

    def _send_entry(self, drafts: list[Draft], entry: bytes, size: int, *, is_batch: bool) -> None:
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

    def _fail(self, drafts: list[Draft], error: BraidError) -> None:
        fail(drafts, error)
        self._window.give(len(drafts), sum(draft.size for draft in drafts))

    # Time.

    def _oldest(self) -> float | None:
        """When the first of those waiting is too old. Those re-routed here may come from several lanes."""
        if self.unanswered:
            return self.unanswered[0].deadline
        if self._older:
            return min(draft.deadline for draft in self._older)
        return self._newer[0].deadline if self._newer else None

    def _watch_time(self) -> None:
        if self._timeout is None and (oldest := self._oldest()) is not None:
            self._timeout_at = oldest
            self._timeout = self.clock.call_later(max(0.0, oldest - self.clock.monotonic()), self._check_time)

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
        self._fail(self.take_back(), error)
        self.expired(error)
