"""Shapes of load: how many messages of which size stand in an entry, and over how many topics entries are spread.

Owns the bytes of an entry and of the frames around it, built on `braid.wire`; the generator and the floor share them.
"""

from __future__ import annotations

from itertools import product

import msgspec

from braid.wire.batch import encode_batch
from braid.wire.entries import build_entry
from braid.wire.frames import SIZES
from braid.wire.messages import MessageMetadata, SingleMessageMetadata
from braid.wire.varints import varint

BATCHES = (1, 10, 100, 1000)
SIZES_OF_MESSAGES = (100, 1000)
TOPICS = (1, 100, 1000)
WINDOW = 1000
"""Entries on their way at most, over all topics of a run: what the broker lets one connection have."""
WINDOW_BYTES = 64 << 20
"""The same in bytes: a thousand entries of a megabyte would only measure memory."""


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Load of one kind."""

    batch: int
    size: int
    topics: int

    @property
    def name(self) -> str:
        topics = "1 topic" if self.topics == 1 else f"{self.topics} topics"
        return f"{self.batch} x {self.size} B, {topics}"

    @property
    def entry_bytes(self) -> int:
        """About the size of an entry."""
        return self.batch * self.size

    @property
    def is_small(self) -> bool:
        """Small enough that the cost is per entry, not per byte: the entries the targets speak of."""
        return self.entry_bytes <= 1000

    @property
    def window(self) -> int:
        return max(4, min(WINDOW, WINDOW_BYTES // self.entry_bytes))

    def entries(self, limit: int, max_bytes: int) -> int:
        """How many entries a run has: the same number for each topic."""
        each = max(1, min(limit, max_bytes // self.entry_bytes) // self.topics)
        return each * self.topics

    def entry(self) -> bytes:
        """The checksummed entry; a real batch if it holds more than one message."""
        metadata = MessageMetadata(producer_name="bench", sequence_id=0, publish_time=1_700_000_000_000)
        if self.batch == 1:
            return build_entry(metadata, b"x" * self.size)
        metadata.num_messages_in_batch = self.batch
        return build_entry(metadata, encode_batch((SingleMessageMetadata(), b"x" * self.size) for _ in range(self.batch)))


def send_head(producer_id: int, sequence_id: int, batch: int, entry_bytes: int) -> bytes:
    """A SEND frame up to its entry."""
    raw = b"\x08" + varint(producer_id) + b"\x10" + varint(sequence_id)
    if batch > 1:
        raw += b"\x18" + varint(batch)
    command = b"\x08\x06\x32" + varint(len(raw)) + raw
    return SIZES.pack(4 + len(command) + entry_bytes, len(command)) + command


def all_shapes(topics: tuple[int, ...] = TOPICS) -> list[Shape]:
    return [Shape(batch=batch, size=size, topics=count) for count, size, batch in product(topics, SIZES_OF_MESSAGES, BATCHES)]
