"""`BraidWriter`: writes the rows of a batch job to topics, all of them or none.

Without further options the job is one transaction, which counts when the job ends. With `txnAppId` and `txnVersion`, and inside
`foreachBatch`, it is also idempotent: what was written once is not written again. Owns what identifies a job; the steps are
those of `sink`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING
from uuid import UUID

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from braid.errors import NotAllowed
from braid.runtime.env import Runtime
from braid_spark import sink
from braid_spark.connections import Link, patiently, shared_link
from braid_spark.options import Options
from braid_spark.outgoing import Outgoing, producer_options
from braid_spark.sink import Attempt, ExactlyOnceAttempt, Identity, SinkError, Written

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

log = logging.getLogger(__name__)
QUERY_ID = "sql.streaming.queryId"
BATCH_ID = "streaming.sql.batchId"
RUN_ID = "spark.jobGroup.id"
"""Properties that Spark gives to the tasks of a streaming query."""


class BraidWriter(DataSourceArrowWriter):
    """Made on the driver, used there and, as a copy, by every task."""

    exactly_once = ExactlyOnceAttempt
    at_least_once = Attempt

    def __init__(self, options: Options, schema: StructType) -> None:
        self._options = options
        self._outgoing = Outgoing(schema, options.topic)
        self._run = Runtime().token()

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        message = self._attempt().write(iterator)
        if message.is_duplicate and message.identity is not None and self._options.txn_app_id is None:
            self._check_replay(message.identity)
        return message

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        rows = sink.decide(self._link(), of(messages))
        log.info("the job wrote %d rows", rows)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        link, written, own = self._link(), of(messages), self._own_identity()
        sink.give_up(link, sink.txns_of(written))
        if own is not None and all(each is None or each.identity == own for each in written):
            sink.retire(link, own)

    def _link(self) -> Link:
        return shared_link(self._options.url, self._options.client)

    def _check_replay(self, identity: Identity) -> None:
        """A batch of a query is there already: rightly if an earlier run wrote it, and this job is the one that does it again.
        A second job of the batch has other rows, which must not get lost without a word."""
        link = self._link()
        state = patiently(link, lambda: link.client.sink(identity.sink))
        is_own = state is not None and (state.last, state.last_run) == (identity.batch, identity.run)
        if not is_own:
            sink.check_replay(link, identity)
        if is_own or not sink.is_only(link, Identity(f"{identity.sink}/again/{identity.run}", 0, self._run)):
            raise SinkError(
                f"Batch {identity.batch} of the sink {identity.sink} has another write already, so that a second write to the "
                "same topic would be left out. Give every write inside foreachBatch its own txnAppId, with the batch's number "
                "as txnVersion."
            )

    def _attempt(self) -> Attempt:
        options = self._options
        if options.semantics == "at-least-once":
            return self.at_least_once(self._link(), self._outgoing, options)
        found = None if options.txn_app_id is not None else query_of(TaskContext.get())
        identity = self._own_identity() if found is None else sink_of(options, found)
        if identity is None:
            raise SinkError("A job that is written at least once has no sink.")
        return self.exactly_once(self._link(), self._outgoing, options, identity)

    def _own_identity(self) -> Identity | None:
        """What the job is called outside of a streaming query: by its options, or by itself."""
        options = self._options
        if options.semantics == "at-least-once":
            return None
        if options.txn_app_id is not None and options.txn_version is not None:
            # With the topic: one name and number for the writes to several topics, as Delta's users write it, leaves none out.
            return Identity(f"{options.txn_app_id}/{options.topic or '*'}", options.txn_version, self._run)
        return Identity(f"job/{self._run}", 0, self._run)


def make_writer(options: Options, schema: StructType, overwrite: bool, writer: type[BraidWriter] = BraidWriter) -> BraidWriter:
    """A writer for these options, which are checked here, on the driver."""
    if overwrite:
        raise NotAllowed("A topic cannot be overwritten, only added to; use mode('append').")
    producer_options(options)
    return writer(options.for_writing(), schema)


def query_of(task: TaskContext | None) -> tuple[str, int, str] | None:
    """Query id, batch and run id of the streaming query that this task works for, if it does. Raises SinkError if the run is
    not to be seen."""
    if task is None:
        return None
    query, batch, run = (task.getLocalProperty(name) for name in (QUERY_ID, BATCH_ID, RUN_ID))
    if not query or not batch or not run:
        return None
    try:
        UUID(run)
    except ValueError:
        raise SinkError(
            f"The job group of the tasks is {run!r} and not the run of the streaming query, because setJobGroup was called "
            "inside foreachBatch, so that one run cannot be told from the next. Do not call it there, or give the write a "
            "txnAppId and the batch's number as txnVersion."
        ) from None
    return query, int(batch), run


def sink_of(options: Options, query: tuple[str, int, str]) -> Identity:
    """The batch of a streaming query that a task writes; the query's id lives in its checkpoint."""
    query_id, batch, run = query
    if options.sink_id is not None:
        return Identity(options.sink_id, batch, f"{query_id}/{run}")
    return Identity(f"{query_id}/{options.topic or '*'}", batch, run)


def of(messages: Sequence[WriterCommitMessage | None]) -> list[Written | None]:
    """Messages as they are: Spark hands them on unchanged."""
    for each in messages:
        if each is not None and not isinstance(each, Written):
            raise SinkError(f"A task sent {type(each).__name__} instead of what it wrote.")
    return list(messages)  # type: ignore[arg-type]
