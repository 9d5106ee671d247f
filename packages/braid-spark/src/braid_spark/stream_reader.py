"""`BraidStreamReader`: the source of a streaming query.

Owns the conversation with Spark's engine: limits, the target of a run to the end, the durable cursor. Positions are in the
offsets that Spark keeps, never here; what they mean knows the planner. One object lives in the driver for as long as the query
does, copies of another one read in tasks: only options and columns are common to them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)

from braid.errors import DeadlineExceeded, NotReady, TransportError, Unavailable
from braid_spark.columns import Columns
from braid_spark.connections import shared_link
from braid_spark.offsets import Frontier, Offset, read_offset
from braid_spark.options import Options
from braid_spark.planner import Cap, Limits, Planner
from braid_spark.reader import PieceInput, read_piece
from braid_spark.reads import ClusterReads

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)
T = TypeVar("T")
LAYOUT_SECONDS = 30.0
"""How long is waited for brokers that know all that a checkpoint does; they compare their layouts every few seconds."""


class BraidStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans micro-batches in the driver and reads their pieces in tasks."""

    def __init__(self, options: Options, columns: Columns | Exception) -> None:
        """What stands in the way of reading is given as `columns` and raised by the first call: what is raised while a reader
        is made, Spark hides behind an error of its own."""
        self._options = options
        self._columns = columns
        self._planner: Planner | None = None
        self._reads: ClusterReads | None = None
        self._target: Cap | None = None
        self._end: dict[str, Any] | None = None
        self._pinned: set[str] = set()
        """Topics whose durable cursor is known to exist."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_planner": None, "_reads": None, "_target": None, "_end": None, "_pinned": set()}

    def initialOffset(self) -> dict[str, Any]:
        return self._plan().initial()

    def getDefaultReadLimit(self) -> ReadLimit:
        """Spark takes one limit: the other ones are kept in `latestOffset`, which knows them all by the options."""
        options = self._options
        if options.max_messages_per_trigger is not None:
            return ReadMaxRows(options.max_messages_per_trigger)
        if options.max_bytes_per_trigger is not None:
            return ReadMaxBytes(options.max_bytes_per_trigger)
        if options.min_messages_per_trigger is not None:
            return ReadMinRows(options.min_messages_per_trigger)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        reads = self._cluster()
        reads.refresh()
        self._target = self._patiently(lambda: self._plan().cap(reads))

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        reads = self._cluster()
        reads.refresh()
        limits = Limits() if isinstance(limit, ReadAllAvailable) else Limits.of(self._options)
        self._end = self._patiently(lambda: self._plan().latest(start, limits, reads, until=self._target))
        if self._options.subscription is not None and not self._pinned.issuperset(self._end.get("topics", ())):
            self._pin(start, self._end)
        return self._end

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Shown by the query's progress: how far each segment goes, and how much is not read yet."""
        end, reads = self._end, self._cluster()
        return None if end is None else self._patiently(lambda: self._plan().lag(end, reads))

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        reads = self._cluster()
        return [PieceInput(piece) for piece in self._patiently(lambda: self._plan().partitions(start, end, reads))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_piece(self._options, self._checked(), partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Move the durable cursor, if the user named one, to the end of a batch that is done. It trails behind by one batch."""
        if self._options.subscription is not None:
            offset = read_offset(end)
            for topic, place in offset.topics.items() if isinstance(offset, Offset) else ():
                self._move(topic, place, {**place.drained, **place.segs})

    def _pin(self, start: dict[str, Any], end: dict[str, Any]) -> None:
        """Make the cursor of topics that this process meets for the first time, where they begin: before the first batch is
        done, so that nothing of it is deleted meanwhile."""
        begin, offset = read_offset(start), read_offset(end)
        if isinstance(offset, Offset):
            known = begin.topics if isinstance(begin, Offset) else {}
            for topic in offset.topics.keys() - self._pinned:
                place = known.get(topic) or offset.base.get(topic)
                if place is not None and topic not in known:
                    place = self._with_the_past(topic, place)
                if place is not None and self._move(topic, place, place.segs):
                    self._pinned.add(topic)

    def _with_the_past(self, topic: str, place: Frontier) -> Frontier:
        """With the ends of the segments before a query's beginning: a new cursor is at the first message of every segment, and
        would keep for ever what nobody is going to read."""
        reads = self._cluster()
        past = reads.states(topic, [number for number in reads.view(topic).segments if number < place.next])
        return Frontier(
            inc=place.inc,
            next=place.next,
            segs={number: state.end for number, state in past.items()} | place.segs,
            incs={number: state.incarnation for number, state in past.items()} | place.incs,
        )

    def _move(self, topic: str, place: Frontier, positions: Mapping[int, int]) -> bool:
        """Move the cursor of each segment; returns whether all are where they should be."""
        subscription = self._options.subscription or ""
        is_done = True
        for segment, index in positions.items():
            try:
                self._cluster().move_cursor(topic, segment, place.incs.get(segment, place.inc), subscription, index)
            except (Unavailable, TransportError, DeadlineExceeded) as error:
                # Messages are kept a while longer, no more; the next batch moves it further.
                log.warning("the cursor %s of segment %d of %s was not moved: %s", subscription, segment, topic, error)
                is_done = False
        return is_done

    def _patiently(self, plan: Callable[[], T]) -> T:
        """A plan; a query that comes back may know more segments, or more of one, than what it is told first."""
        deadline = time.monotonic() + LAYOUT_SECONDS
        while True:
            try:
                return plan()
            except NotReady:
                if time.monotonic() >= deadline:
                    raise
            self._cluster().refresh()

    def stop(self) -> None:
        """Nothing depends on it: Spark does not call it."""

    def _checked(self) -> Columns:
        if isinstance(self._columns, Exception):
            raise self._columns
        return self._columns

    def _plan(self) -> Planner:
        self._checked()
        if self._planner is None:
            self._planner = Planner(self._options, time.monotonic)
        return self._planner

    def _cluster(self) -> ClusterReads:
        if self._reads is None:
            link = shared_link(self._options.url, self._options.client)
            self._reads = ClusterReads(link, self._options.topics, self._options.topics_pattern)
        return self._reads
