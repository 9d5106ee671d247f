"""Reading in a batch, and how any task reads its piece: fetches of whole entries, some ahead, decoded into record batches.

Owns the order of fetches and the check that what they cover leaves nothing out. What a piece is decides the planner; what bytes
mean, the decoder.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition

from braid.client.segment_reads import Fetched
from braid.errors import DataLost, ProtocolError
from braid.model.names import TopicName
from braid_spark.columns import Columns
from braid_spark.connections import Link, shared_link
from braid_spark.decode import SegmentDecoder
from braid_spark.options import Options
from braid_spark.planner import Piece, Planner
from braid_spark.reads import ClusterReads
from braid_spark.topic_schemas import writer_schema

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)
FETCH_BYTES = 4 << 20
"""Of entries that one fetch asks for."""
AHEAD = 2
"""Fetches under way or arrived while one is decoded."""


class PieceInput(InputPartition):
    """A partition of Spark: one piece of a segment."""

    def __init__(self, value: Piece) -> None:
        super().__init__(value)


class BraidReader(DataSourceReader):
    """Reads what is there between two points. Made in the driver, which plans; copies of it read in tasks."""

    def __init__(self, options: Options, columns: Columns) -> None:
        self._options = options
        self._columns = columns

    def partitions(self) -> list[InputPartition]:
        planner = Planner(self._options, time.monotonic)
        with Link(self._options.url, self._options.client) as link:
            link.connect()
            reads = ClusterReads(link, self._options.topics, self._options.topics_pattern)
            start, end = planner.batch(reads)
            return [PieceInput(piece) for piece in planner.partitions(start, end, reads)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_piece(self._options, self._columns, partition)


def check_topics(options: Options) -> None:
    """Raises ConnectFailed if nobody answers at the address, TopicNotFound if one of the named topics does not exist."""
    with Link(options.url, options.client) as link:
        link.connect()
        reads = ClusterReads(link, options.topics, options.topics_pattern)
        if options.topics_pattern is None:
            for topic in reads.topics():
                reads.view(topic)


def read_piece(options: Options, columns: Columns, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """The rows of a partition, in order."""
    piece = partition.value
    if piece is None:
        return  # what Spark makes of an empty plan
    link = shared_link(options.url, options.client)
    has_range = piece.hash_start is not None
    decoder = SegmentDecoder(
        columns,
        topic=piece.topic,
        segment=piece.segment,
        start=piece.start,
        stop=piece.stop,
        hash_range=(piece.hash_start, piece.hash_end) if has_range else None,
        partition=_partition_number(piece.physical),
        look_back=lambda start, stop: link.run(lambda: _fetch(link, piece, start, stop)),
        writer_schema=partial(writer_schema, link, piece.topic, piece.incarnation),
        is_loss_fatal=options.fail_on_data_loss,
    )
    with _Fetches(link, piece, options.fail_on_data_loss) as fetches:
        for fetched in fetches:
            yield from decoder.decode(fetched)


class _Fetches:
    """The fetches of a piece, in order; `AHEAD` of them run while the last one is used. `with` ends what still runs."""

    def __init__(self, link: Link, piece: Piece, is_loss_fatal: bool) -> None:
        self._link = link
        self._piece = piece
        self._is_loss_fatal = is_loss_fatal
        self._under_way: deque[Future[Fetched | None]] = deque()

    def __enter__(self) -> _Fetches:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for each in self._under_way:
            each.cancel()

    def __iter__(self) -> Iterator[Fetched]:
        last = self._begin(None)
        while True:
            while len(self._under_way) < AHEAD:
                last = self._begin(last)
            fetched = self._under_way.popleft().result()
            if fetched is None:
                return
            yield fetched

    def _begin(self, before: Future[Fetched | None] | None) -> Future[Fetched | None]:
        """Begin the fetch that follows another as soon as it is known where: None behind the last one."""
        piece = self._piece

        async def fetch() -> Fetched | None:
            start = piece.start
            if before is not None:
                told = await asyncio.wrap_future(before)
                if told is None:
                    return None
                start = told.covered_to
            return await self._fetch(start) if start < piece.stop else None

        begun = self._link.submit(fetch)
        self._under_way.append(begun)
        return begun

    async def _fetch(self, start: int) -> Fetched | None:
        piece = self._piece
        while True:
            try:
                fetched = await _fetch(self._link, piece, start, piece.stop)
            except DataLost as error:
                if self._is_loss_fatal:
                    raise DataLost(lost_message(piece, start, error.low), error.low) from None
                kept = min(max(error.low, start), piece.stop)
                log.warning("%s (left out, as failOnDataLoss=false says)", lost_message(piece, start, error.low))
                if kept >= piece.stop:
                    return None
                start = kept
                continue
            if not start < fetched.covered_to <= piece.stop:
                raise ProtocolError(
                    f"The owner of {piece.physical} was asked for the messages from {start} to {piece.stop} and says that it "
                    f"has covered them to {fetched.covered_to}; nothing is read past that."
                )
            return fetched


def lost_message(piece: Piece, wanted: int, low: int) -> str:
    """What is said of messages that were deleted before they were read."""
    return (
        f"Messages of segment {piece.segment} of {piece.topic} were deleted before they were read: wanted from index {wanted}, "
        f"available from {low}. Retain them longer, or go on without them by failOnDataLoss=false."
    )


async def _fetch(link: Link, piece: Piece, start: int, stop: int) -> Fetched:
    return await link.reads.fetch(piece.physical, piece.incarnation, start, stop, max_bytes=FETCH_BYTES)


def _partition_number(physical: str) -> int:
    """As ids of messages carry it: the partition of a partitioned topic, else -1."""
    return TopicName.parse(physical).partition_index
