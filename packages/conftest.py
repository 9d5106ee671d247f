"""Which tests of the packages run in one process, and which of them begin first.

Tests that use the Spark session run in one: each process that had some of them would start a JVM, its workers and a broker. The
others are shared by file. Beside the session run those that start a cluster, the longest first, one after the other: Spark
gives a Python process up that has not come within ten seconds, and two clusters at a time make that likelier.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

WITH_SPARK = "packages/braid-spark/tests/spark"
CLUSTERS = ("test_sink_faults.py", "test_spark_order.py")
SESSION = "session"
FIRST = (CLUSTERS[0], SESSION, *CLUSTERS[1:])


def group(nodeid: str) -> str:
    file = PurePosixPath(nodeid.partition("::")[0])
    return SESSION if str(file.parent) == WITH_SPARK and file.name not in CLUSTERS else file.name


class GroupScheduling(LoadFileScheduling):  # type: ignore[misc]
    """By file, all those with the session as if they were one."""

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> GroupScheduling | None:
    return GroupScheduling(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: FIRST.index(group(item.nodeid)) if group(item.nodeid) in FIRST else len(FIRST))
