"""Tells a query to begin no further batch.

Spark can only be asked to stop a query at once, wherever it is. To look first whether a batch runs and to ask then is too late:
the next one may have begun between the two. So the query is told that it has ended, as Spark itself does at the last batch of a
run to the end: it looks at this before each batch, and finishes the one it is in. It looks once more when a batch is planned
and its offsets are written, and gives the batch up there; so it is told only while a job of a batch runs, which is behind that.
This is no public interface; with a Spark that does not have it, the caller asks as everyone does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JError  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

STATES = "org.apache.spark.sql.execution.streaming.runtime"


class LastBatch:
    """Makes the batch that a query is in its last one."""

    def __init__(self, spark: SparkSession, query: StreamingQuery) -> None:
        self._state: Any = None
        self._ended: Any = None
        try:
            self._jobs = spark.sparkContext.statusTracker()
            self._run = query.runId
            package: Any = spark._jvm
            for name in STATES.split("."):
                package = getattr(package, name)
            self._ended = getattr(getattr(package, "TERMINATED$"), "MODULE$")
            java: Any = query._jsq
            self._state = java.streamingQuery().state()
        except (AttributeError, TypeError, Py4JError):
            self._state = None

    @property
    def is_possible(self) -> bool:
        """Whether this Spark can be told."""
        return self._state is not None

    def tell(self) -> bool:
        """Tell the query, if a batch of it writes at the moment. From then on it says that it is not active, though the batch
        goes on."""
        running = set(self._jobs.getActiveJobsIds())
        if running.isdisjoint(self._jobs.getJobIdsForGroup(self._run)):
            return False
        self._state.set(self._ended)  # the batch has its sink's commit and its log before it; Spark looks again after those
        return True
