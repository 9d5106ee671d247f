"""Imports what Spark's Python workers need before they are forked, not in every one of them.

Python runs this at the start of each process that has this folder in its PYTHONPATH; it does something only in
`python -m pyspark.daemon <kind>`, the process from which Spark forks its workers of one kind. What plans the reading of a
stream is started for each query on its own, and imports what it needs. Owns no behaviour.
"""

from __future__ import annotations

import importlib
import sys

DAEMON = "pyspark.daemon"
CONNECTOR = ("braid_spark.reader", "braid_spark.sink", "braid_spark.stream_reader", "braid_spark.stream_writer")

if DAEMON in sys.orig_argv[:-1]:
    for name in (sys.orig_argv[-1], *CONNECTOR):
        importlib.import_module(name)
