"""Blocks: many messages held as columns, sent without an object per message.

Owns what a block must be able to do (`Block`), when all of its rows are answered (`BlockSending`), its place among the messages
of a lane (`BlockDraft`), and where its rows go. A block becomes entries of many messages each; when a segment is sealed its
rows are spread anew over the children, in their order. How columns become bytes is the block's own business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol, TypeVar

from braid.client.producer_drafts import Draft
from braid.errors import BraidError, Closed, TooLarge
from braid.model.hashranges import MAX_HASH, HashRange
from braid.model.layout import SegmentLayout
from braid.model.routing import Routing
from braid.model.segments import SegmentInfo
from braid.model.txn import TxnId
from braid.wire import messages as pb
from braid.wire.commands import unsigned64
from braid.wire.compression import compress
from braid.wire.entries import build_entry
from braid.wire.frames import DEFAULT_MAX_MESSAGE_SIZE
from braid.wire.types import CompressionType

T = TypeVar("T")
NO_KEY = -1
"""The place of rows without a key: any will do."""


class Block(Protocol):
    """Rows of messages. Immutable: it is kept until all rows are answered, and may be asked for its bytes again."""

    @property
    def count(self) -> int:
        """How many rows it has."""

    @property
    def size(self) -> int:
        """How many bytes `encode` gives."""

    @property
    def largest(self) -> int:
        """How many of them the largest row takes."""

    def spread(self, routing: Routing, starts: Sequence[int]) -> Sequence[tuple[int, Block]]:
        """The rows of each place that gets some, in their order. A place covers the 16-bit hashes from its start to the next
        one; under MOD_N a row's place is its masked hash modulo their number. Rows without a key are at `NO_KEY`."""

    def cut(self, max_size: int, max_count: int) -> Sequence[Block]:
        """The rows in their order, in pieces of at most so many bytes, or of one row, and at most so many rows."""

    def encode(self) -> bytes | memoryview:
        """The rows as the plain payload of one entry: size, SingleMessageMetadata and value of each."""


class BlockSending:
    """A block on its way: over when the last of its rows is."""

    def __init__(self, count: int, done: asyncio.Future[None]) -> None:
        self.done = done
        self.not_taken = count
        """Rows that no lane has yet."""
        self._left = count
        self._failure: BraidError | None = None
        if not count:
            done.set_result(None)

    def end(self, count: int, failure: BraidError | None = None) -> None:
        """So many rows are stored, or have failed."""
        self._failure = self._failure or failure
        self._left -= count
        if self._left or self.done.done():
            return
        if self._failure is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(self._failure)
            self.done.exception()  # nobody may be waiting; that is no reason for a warning

    def give_up(self, error: BaseException) -> None:
        """The rows that no lane has will not be sent."""
        rest, self.not_taken = self.not_taken, 0
        if rest:
            self.end(rest, error if isinstance(error, BraidError) else Closed("The block was given up before it was sent."))


class BlockDraft(Draft):
    """Rows of a block in a lane; in its turn an entry of its own."""

    __slots__ = ("block", "count", "sending")

    def __init__(self, block: Block, sending: BlockSending, deadline: float, txn: TxnId | None) -> None:
        super().__init__(b"", None, None, 0, None, block.size, deadline, sending.done, txn)
        self.block = block
        self.count: int = block.count
        self.sending = sending

    def part(self, rows: Block) -> BlockDraft:
        """Some of the rows, to take the place of these together with the other ones."""
        return BlockDraft(rows, self.sending, self.deadline, self.txn)

    def stored(self) -> None:
        self.sending.end(self.count)

    def fail(self, error: BraidError) -> None:
        self.sending.end(self.count, type(error)(*error.args))

    def entry(self, *, producer: str, publish_ms: int, compression: CompressionType, schema_version: bytes) -> bytes:
        """The bytes of the entry, once it is numbered."""
        metadata = pb.MessageMetadata(
            producer_name=producer,
            sequence_id=unsigned64(self.sequence_id),
            publish_time=publish_ms,
            num_messages_in_batch=self.count,
            highest_sequence_id=unsigned64(self.sequence_id + self.count - 1),
        )
        if schema_version:
            metadata.schema_version = schema_version
        if self.txn is not None:
            metadata.txnid_most_bits, metadata.txnid_least_bits = self.txn
        payload = self.block.encode()
        if compression is not CompressionType.NONE:
            metadata.compression = int(compression)  # type: ignore[assignment]
            metadata.uncompressed_size = len(payload)
            payload = compress(compression, payload)
        return build_entry(metadata, payload)


def check_largest(block: Block, limits: Sequence[int]) -> None:
    """Raise TooLarge for a row above these limits of brokers, before anything of its block is sent."""
    limit = min(limits, default=DEFAULT_MAX_MESSAGE_SIZE)
    if block.largest > limit:
        raise TooLarge(
            f"A message of {block.largest} bytes is above the broker's limit of {limit} bytes, so nothing of its block was "
            "sent; make it smaller."
        )


def places(
    layout: SegmentLayout, between: Sequence[tuple[HashRange | None, T]] = ()
) -> tuple[list[int], list[T | SegmentInfo]]:
    """The starts that `Block.spread` takes, and what is at each: the first of those `between` that covers the hash (None covers
    all), else the active segment."""
    order = layout.active_in_order
    if layout.routing is Routing.MOD_N:
        first = next((each for hashes, each in between if hashes is None), None)
        return list(range(len(order))), [first if first is not None else each for each in order]
    bounds = {each.hash_range.start for each in order}
    for hashes, _each in between:
        if hashes is not None:
            bounds |= {hashes.start, hashes.end + 1}
    starts = sorted(bound for bound in bounds if bound <= MAX_HASH)
    return starts, [
        next(
            (each for hashes, each in between if hashes is None or hashes.covers(start)),
            layout.find_active_segment(start),
        )
        for start in starts
    ]
