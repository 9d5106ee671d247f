"""The format `braid-faults`: the sink as it is, which stops at named points and asks the fault run what happens there.

Imported by Spark's Python processes on the driver and on executors. `BRAID_FAULTS` names the address of the run. Owns the
points alone; what is killed, and when, is the run's business.
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pyarrow as pa
from fork_client import JVM
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceStreamWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from braid_spark.sink import Attempt, ExactlyOnceAttempt, Written
from braid_spark.source import BraidDataSource
from braid_spark.stream_writer import BraidStreamWriter, make_stream_writer

CONTROL = "BRAID_FAULTS"


class LostReply(RuntimeError):
    """What was asked for has happened, but nobody says so."""


def reach(point: str, **what: Any) -> None:
    """Tell the run that this point is reached, and go on when it says so."""
    host, _, port = os.environ[CONTROL].rpartition(":")
    task = TaskContext.get()
    if task is not None:
        what |= {"partition": task.partitionId(), "attempt": task.taskAttemptId()}
        what |= {"batch": int(task.getLocalProperty("streaming.sql.batchId") or -1)}
    said = {"point": point, "pid": os.getpid(), "jvm": parent_jvm(), **what}
    with socket.create_connection((host, int(port))) as control, control.makefile("rw") as lines:
        lines.write(json.dumps(said) + "\n")
        lines.flush()
        answer = lines.readline().strip()
        if answer == "die":
            os._exit(9)
        if answer == "raise":
            raise LostReply(f"the answer to {point!r} was lost on purpose")


def parent_jvm() -> int:
    """The process id of the JVM that this Python process works for."""
    if JVM in os.environ:
        return int(os.environ[JVM])
    pid = os.getpid()
    while pid > 1:
        status = dict(
            line.split(":\t", 1)
            for line in Path(f"/proc/{pid}/status").read_text().splitlines()
            if line.startswith(("Name", "PPid"))
        )
        if status["Name"] == "java":
            return pid
        pid = int(status["PPid"])
    return 0


class Points(Attempt):
    """The points of a task attempt."""

    def publish(self, batch: pa.RecordBatch) -> None:
        half = batch.num_rows // 2
        super().publish(batch.slice(0, half))
        self.drain()
        reach("partial publish")
        super().publish(batch.slice(half))

    def finish(self) -> Written:
        written = super().finish()
        reach("written", rows=written.rows)
        return written


class StoppingExactlyOnce(Points, ExactlyOnceAttempt):
    """One that counts only if the driver says so."""


class StoppingAtLeastOnce(Points):
    """One whose rows are there at once."""


class StoppingWriter(BraidStreamWriter):
    """The points of the driver."""

    exactly_once = StoppingExactlyOnce
    at_least_once = StoppingAtLeastOnce

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        rows = sum(getattr(each, "rows", 0) for each in messages)
        reach("before decide", batch=batchId, rows=rows)
        super().commit(messages, batchId)
        reach("after decide", batch=batchId, rows=rows)


class FaultySource(BraidDataSource):
    """The format itself."""

    @classmethod
    def name(cls) -> str:
        return "braid-faults"

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        return make_stream_writer(self._parsed, schema, overwrite, writer=StoppingWriter)
