"""`BraidStreamWriter`: writes the micro-batches of a streaming query to topics, each of them once.

Spark makes one on the driver for the tasks of a batch and another one to commit it, so that only options and the tasks'
messages carry anything from one to the other. Owns what identifies a batch; the steps are those of `sink`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage

from braid.errors import NotAllowed
from braid_spark import sink
from braid_spark.connections import Link, shared_link
from braid_spark.options import Options
from braid_spark.outgoing import Outgoing, producer_options
from braid_spark.sink import Attempt, ExactlyOnceAttempt, SinkError
from braid_spark.writer import of, query_of, sink_of

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

log = logging.getLogger(__name__)


class BraidStreamWriter(DataSourceStreamArrowWriter):
    """Made anew for each batch and each commit. Its constructor asks nobody."""

    exactly_once = ExactlyOnceAttempt
    at_least_once = Attempt

    def __init__(self, options: Options, schema: StructType) -> None:
        self._options = options
        self._outgoing = Outgoing(schema, options.topic)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        message = self._attempt().write(iterator)
        if message.is_duplicate and message.identity is not None:
            sink.check_replay(self._link(), message.identity)
        return message

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        written = of(messages)
        for each in written:
            if each is not None and each.identity is not None and each.identity.batch != batchId:
                raise SinkError(f"A task of batch {each.identity.batch} answered when batch {batchId} was to be committed.")
        rows = sink.decide(self._link(), written)
        log.info("batch %d: %d rows are in the output", batchId, rows)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        sink.give_up(self._link(), sink.txns_of(of(messages)))

    def _link(self) -> Link:
        return shared_link(self._options.url, self._options.client)

    def _attempt(self) -> Attempt:
        options = self._options
        if options.semantics == "at-least-once":
            return self.at_least_once(self._link(), self._outgoing, options)
        found = query_of(TaskContext.get())
        if found is None:
            raise SinkError(
                "Spark did not tell the task which query and batch it works for, so that nothing can be written exactly once; "
                "use semantics=at-least-once, or foreachBatch with txnAppId and txnVersion."
            )
        return self.exactly_once(self._link(), self._outgoing, options, sink_of(options, found))


def make_stream_writer(
    options: Options, schema: StructType, overwrite: bool, writer: type[BraidStreamWriter] = BraidStreamWriter
) -> BraidStreamWriter:
    """A writer for these options, which are checked here, on the driver. `overwrite`: in complete mode, every batch is the
    whole result, which is then added to the topic."""
    if options.is_progress_async and options.semantics == "exactly-once":
        raise NotAllowed(
            "A batch cannot be written exactly once if Spark notes its progress later; leave asyncProgressTrackingEnabled out, "
            "or use semantics=at-least-once."
        )
    if options.txn_app_id is not None or options.txn_version is not None:
        raise NotAllowed(
            "txnAppId and txnVersion are for batch writes, also inside foreachBatch: a streaming query numbers its batches "
            "itself. Leave them out, or use sinkId to name the sink."
        )
    producer_options(options)
    return writer(options.for_writing(), schema)
