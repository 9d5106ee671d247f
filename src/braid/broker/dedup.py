"""Deduplication: which sequence ids of a producer name are stored already.

Two maps per topic: highest id pushed to the log, highest id stored. An id at or below the stored one is a duplicate; one
that was pushed but is not stored yet is undetermined and must be sent again later. The stored map is snapshotted on an
internal cursor every so many entries and replayed from there on load.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from braid.managedledger.api import Entry
from braid.managedledger.cursor import ManagedCursor
from braid.managedledger.log import ManagedLedger
from braid.model.positions import Position
from braid.wire.commands import signed64
from braid.wire.entries import entry_metadata

CURSOR_NAME = "pulsar.dedup"
MAX_PRODUCER_NAME = 1024
"""Characters. Longer names (an entry can carry any) are not remembered: what is remembered is handed on in whole."""
REQUESTED = "braid.requested"
"""Property of the cursor: a producer asked for deduplication, so that it stays whatever the namespace's policy says."""
PARTIAL = -2
"""In place of a highest sequence id: a chunk that is not the last one of its message."""
LANE_MARK = "-seg-"
"""Between a producer's name and the number of a segment in the name of its lane there."""
MAX_DIGITS = 18
REPLAY_ENTRIES = 1000
REPLAY_BYTES = 8 << 20


class Verdict(Enum):
    NEW = "new"
    DUPLICATE = "duplicate"
    UNDETERMINED = "undetermined"


class MessageDeduplication:
    """Deduplication state of one topic."""

    def __init__(self, log: ManagedLedger, cursor: ManagedCursor, *, snapshot_entries: int, max_producers: int) -> None:
        self._log = log
        self._cursor = cursor
        self._snapshot_entries = snapshot_entries
        self._max_producers = max_producers
        self._pushed: dict[str, int] = {}
        self._before = -1
        """What `check` found pushed before the message it last took for new."""
        self._stored: dict[str, int] = {}
        self._since_snapshot = 0

    @classmethod
    async def load(
        cls, log: ManagedLedger, *, snapshot_entries: int, max_producers: int, is_requested: bool = False
    ) -> MessageDeduplication:
        """Restore the state from the snapshot and the entries behind it. A first use starts at the end of the log."""
        cursor = log.cursors.get(CURSOR_NAME) or await log.open_cursor(
            CURSOR_NAME, initial="latest", properties={REQUESTED: "true"} if is_requested else None
        )
        self = cls(log, cursor, snapshot_entries=snapshot_entries, max_producers=max_producers)
        for name, sequence_id in cursor.position_properties.items():
            self._remember(name, sequence_id)
        position = log.position_after(cursor.mark_delete)
        while entries := await log.read(position, REPLAY_ENTRIES, REPLAY_BYTES):
            for entry in entries:
                self._replay(entry)
            position = log.position_after(Position(entries[-1].ledger_id, entries[-1].entry_id))
        self._pushed.update(self._stored)
        return self

    def _replay(self, entry: Entry) -> None:
        metadata = entry_metadata(entry.body)
        if metadata.HasField("chunk_id") and metadata.chunk_id < metadata.num_chunks_from_msg - 1:
            return
        sequence_id = signed64(metadata.sequence_id)
        if metadata.HasField("highest_sequence_id"):
            sequence_id = max(sequence_id, signed64(metadata.highest_sequence_id))
        self._remember(metadata.producer_name, sequence_id)
        self._since_snapshot += 1

    def check(self, name: str, sequence_id: int, highest: int) -> Verdict:
        """Judge an arriving message and, if it is new, note it as pushed."""
        pushed = self._pushed.get(name, -1)
        if sequence_id <= pushed:
            return Verdict.DUPLICATE if sequence_id <= self._stored.get(name, -1) else Verdict.UNDETERMINED
        self._before = pushed
        self._pushed[name] = max(highest, sequence_id)
        return Verdict.NEW

    def refused(self, name: str) -> None:
        """The log did not take the message just found new; earlier ones of the same producer may still be under way."""
        if self._before < 0:
            self._pushed.pop(name, None)
        else:
            self._pushed[name] = self._before

    def stored(self, name: str, sequence_id: int, highest: int, position: Position) -> None:
        """A message that was new is durable now. A chunk that is not the last one of its message says nothing yet."""
        self._since_snapshot += 1
        if highest != PARTIAL:
            stored = max(highest, sequence_id)
            self._remember(name, stored)
            if stored > self._pushed.get(name, -1):
                self._pushed[name] = stored  # sent before deduplication was turned on
        if self._since_snapshot >= self._snapshot_entries:
            self.snapshot(position)

    def failed(self, name: str) -> None:
        """Messages of this producer were pushed and are not stored after all."""
        stored = self._stored.get(name)
        if stored is None:
            self._pushed.pop(name, None)
        else:
            self._pushed[name] = stored

    def snapshot(self, position: Position) -> None:
        """Record the stored map as of `position`; written with the cursor."""
        self._since_snapshot = 0
        self._cursor.acknowledge_cumulative(position, None, dict(self._stored))

    async def adopt(self, producers: Mapping[str, int]) -> None:
        """Learn what producers have stored elsewhere, in the segments this one follows; durable when this returns."""
        for name, sequence_id in producers.items():
            if name in self._stored:  # its place stays: a hand-over that is repeated must not push out who is active here
                self._stored[name] = max(self._stored[name], sequence_id)
            else:
                self._remember(name, sequence_id)
            self._pushed[name] = max(self._pushed.get(name, -1), sequence_id)
        self._cursor.acknowledge_cumulative(self._cursor.mark_delete, None, dict(self._stored))
        await self._cursor.flush()

    @property
    def last_stored(self) -> dict[str, int]:
        """Highest stored sequence id by producer."""
        return dict(self._stored)

    def last_sequence_id(self, name: str) -> int:
        return self._pushed.get(name, -1)

    def elders_of(self, lane: str) -> dict[int, int]:
        """What the lanes stored, by segment, that a producer had in the segments before this one: those of its name and a lower
        segment. They were handed on from there, and are final."""
        producer, mark, text = lane.rpartition(LANE_MARK)
        if not mark or not text.isascii() or not text.isdecimal() or len(text) > MAX_DIGITS:
            return {}
        stored, start, own = self._stored, f"{producer}{mark}", int(text)
        if own <= len(stored):
            return {number: stored[name] for number in range(own) if (name := f"{start}{number}") in stored}
        found: dict[int, int] = {}
        for name, last in stored.items():
            rest = name[len(start) :] if name.startswith(start) else ""
            if rest.isascii() and rest.isdecimal() and len(rest) <= MAX_DIGITS and int(rest) < own:
                found[int(rest)] = last
        return found

    def _remember(self, name: str, sequence_id: int) -> None:
        """Note the highest stored id; the producer heard from longest ago is forgotten above the limit."""
        if len(name) > MAX_PRODUCER_NAME:
            return
        previous = self._stored.pop(name, -1)
        self._stored[name] = max(previous, sequence_id)
        if len(self._stored) > self._max_producers:
            oldest = next(iter(self._stored))
            del self._stored[oldest]
            self._pushed.pop(oldest, None)

    async def close(self) -> None:
        if self._since_snapshot:
            self.snapshot(self._log.last_position)
