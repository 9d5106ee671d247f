"""The process that Spark's Python workers are forked from, with the connector imported before, not in every one of them.

Named by `spark.python.daemon.module` in sessions of the tests. Spark has one such process for each kind of worker: those that
run tasks are many, those that plan are few and import what they need. Owns no behaviour.
"""

from __future__ import annotations

import sys

from pyspark import daemon

TASKS = "pyspark.worker"

if __name__ == "__main__":
    if sys.argv[1:] == [TASKS]:
        import braid_spark.reader
        import braid_spark.sink
        import braid_spark.stream_reader
        import braid_spark.stream_writer  # noqa: F401
    daemon.manager()
