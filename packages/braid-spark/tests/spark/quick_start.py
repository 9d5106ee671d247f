"""How the JVMs of the tests are started: they live for a minute, so without the second compiler and threads that collect, and
with the classes of Spark from an archive.

Reading, checking and linking ten thousand classes is half the work of a JVM that lives so short, and a run starts twenty. The
archive is made by `class_archive` once for an environment; a JVM that it does not fit, or that finds none, starts without it.
"""

from __future__ import annotations

import sys
from pathlib import Path

ARCHIVE = Path(sys.prefix) / "spark-classes.jsa"
BARE_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xlog:disable"
"""What Java itself would log is about archives alone, and goes to where Spark's launcher speaks."""


def java_options() -> str:
    """Options of a JVM that runs Spark. They are split at spaces."""
    is_there = ARCHIVE.exists() and ARCHIVE.stat().st_size > 0 and " " not in str(ARCHIVE)
    return f"{BARE_OPTIONS} -XX:SharedArchiveFile={ARCHIVE}" if is_there else BARE_OPTIONS


JAVA_OPTIONS = java_options()
SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}
"""Of every session."""
