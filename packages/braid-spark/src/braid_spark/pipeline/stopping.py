"""Tells a query to begin no further batch.

Spark can only be asked to stop a query at once, wherever it is. To look first whether a batch runs and to ask then is too late:
the next one may have begun between the two. So the query is told that it has ended, as Spark itself does at the last batch of a
run to the end: it looks at this before each batch, and finishes the one it is in. That is no public interface; a Spark that
does not have it says so, and the caller asks as everyone does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JError  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

STATES = "org.apache.spark.sql.execution.streaming.runtime"


def begin_no_more(spark: SparkSession, query: StreamingQuery) -> bool:
    """From now on the query says that it is not active, though a batch may run; False: nothing has changed."""
    try:
        jvm: Any = spark._jvm
        java: Any = query._jsq
        package = jvm
        for name in STATES.split("."):
            package = getattr(package, name)
        ended = getattr(getattr(package, "TERMINATED$"), "MODULE$")
        java.streamingQuery().state().set(ended)
    except (AttributeError, TypeError, Py4JError):
        return False
    return True
