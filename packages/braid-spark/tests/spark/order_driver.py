"""The queries of the order test, on a cluster: a stateful operator and a narrow sink over the same topic.

First both with `ordering=key`, until the file `--stop` exists and then to the end of the input; after that the control: both
with `ordering=none` over what is there. The stateful ones write what their handler saw to `stateful-<ordering>.jsonl`, the
narrow ones to the topic `<output>-<ordering>`. Exit code 0: done; 3: a query failed, its reason on standard error.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from fault_driver import session
from fault_points import parent_jvm
from pyspark import TaskContext
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from braid_spark import register

EXECUTORS = 2
SETTINGS = {
    "spark.speculation": "false",
    "spark.task.maxFailures": "2",
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
}
READ = "key string, number bigint, segment bigint, place bigint, batch bigint, task bigint, row bigint, reader bigint"
"""A message, and the task that read it: its place among the rows of this task, and the executor."""
SEEN = f"{READ}, last_number bigint, last_segment bigint, last_place bigint, arrival bigint, executor bigint"
"""The same with what the handler had seen of the key before, and at which place among the key's rows of the batch it came."""


class LastSeen(StatefulProcessor):
    """Keeps, per key, the row that came last, and says of each row what came before it.

    The rows of a key within one batch are sorted by segment and place in it, as the guide tells users: they come out of a
    shuffle, which promises no order. Everything before the batch is the source's promise."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._last = handle.getValueState("last", "number bigint, segment bigint, place bigint")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        last = self._last.get() or (-1, -1, -1)
        executor = parent_jvm()
        arrived = [(row["segment"], row["place"], arrival, row) for arrival, row in enumerate(rows)]
        for segment, place, arrival, row in sorted(arrived):
            before = dict(zip(("last_number", "last_segment", "last_place"), last, strict=True))
            yield Row(**row.asDict(), **before, arrival=arrival, executor=executor)
            last = row["number"], segment, place
        self._last.update(last)

    def close(self) -> None:
        pass


def stamp(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Give each row its place in the task that reads it."""
    task = TaskContext.get()
    assert task is not None
    batch_id, reader = int(task.getLocalProperty("streaming.sql.batchId") or -1), parent_jvm()
    row = 0
    for batch in batches:
        size = batch.num_rows
        added = {
            "batch": [batch_id] * size,
            "task": [task.partitionId()] * size,
            "row": list(range(row, row + size)),
            "reader": [reader] * size,
        }
        row += size
        arrays = [*batch.columns, *(pa.array(column, pa.int64()) for column in added.values())]
        yield pa.RecordBatch.from_arrays(arrays, [*batch.schema.names, *added])


class Queries:
    """Those with one `ordering`."""

    def __init__(self, spark: SparkSession, arguments: argparse.Namespace, ordering: str) -> None:
        self._spark = spark
        self._arguments = arguments
        self._ordering = ordering
        self._folder = Path(arguments.folder)

    def stateful(self, **trigger: Any) -> StreamingQuery:
        seen = self._folder / f"stateful-{self._ordering}.jsonl"

        def keep(frame: DataFrame, batch: int) -> None:
            rows = frame.collect()
            with seen.open("a") as file:
                file.writelines(json.dumps(row.asDict()) + "\n" for row in rows)

        states = self._input().groupBy("key").transformWithState(LastSeen(), SEEN, "append", "none")
        return self._start(states.writeStream.foreachBatch(keep), "stateful", trigger)

    def narrow(self, **trigger: Any) -> StreamingQuery:
        rows = self._input().selectExpr("key AS __key", "to_json(struct(*)) AS value")
        writer = rows.writeStream.format("braid").option("service.url", self._arguments.url)
        return self._start(writer.option("topic", f"{self._arguments.output}-{self._ordering}"), "narrow", trigger)

    def _input(self) -> DataFrame:
        reader = (
            self._spark.readStream.format("braid")
            .option("service.url", self._arguments.url)
            .option("topic", self._arguments.input)
            .option("startingOffsets", "earliest")
            .option("maxMessagesPerTrigger", self._arguments.rows)
            .option("ordering", self._ordering)
        )
        if self._ordering == "key":
            # Two tasks share a segment, each with its keys: these are in order too.
            reader = reader.option("keySplit", "2")
        number = "CAST(CAST(value AS STRING) AS BIGINT) AS number"
        rows = reader.load().selectExpr("CAST(__key AS STRING) AS key", number, "__segment AS segment", "__index AS place")
        return rows.mapInArrow(stamp, READ)

    def _start(self, writer: Any, kind: str, trigger: dict[str, Any]) -> StreamingQuery:
        checkpoint = self._folder / f"checkpoint-{kind}-{self._ordering}"
        writer = writer.option("checkpointLocation", str(checkpoint))
        started: StreamingQuery = writer.trigger(**trigger).start()
        return started


def wait_for_executors(spark: SparkSession) -> None:
    """With one alone nothing would be shown."""
    context: Any = spark.sparkContext._jsc
    while context.sc().getExecutorMemoryStatus().size() < EXECUTORS + 1:  # the driver is counted
        time.sleep(0.1)


def main() -> int:
    parser = argparse.ArgumentParser()
    for name in ("master", "scratch", "url", "input", "output", "folder", "stop"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--rows", type=int, required=True)
    arguments = parser.parse_args()
    spark = session(arguments, SETTINGS)
    register(spark)
    wait_for_executors(spark)
    try:
        ordered = Queries(spark, arguments, "key")
        # At the same pace, so that neither is done with a segment before its children are there.
        live = [ordered.narrow(processingTime="1 second"), ordered.stateful(processingTime="1 second")]
        while not Path(arguments.stop).exists() and all(query.isActive for query in live):
            time.sleep(0.1)
        for query in live:
            query.processAllAvailable()
        for query in live:
            query.stop()
        control = Queries(spark, arguments, "none")
        for query in [control.narrow(availableNow=True), control.stateful(availableNow=True)]:
            query.awaitTermination()
    except StreamingQueryException as error:
        sys.stderr.write(f"QUERY FAILED: {error}\n")
        return 3
    spark.stop()
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    sys.exit(code)
