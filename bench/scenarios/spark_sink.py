"""Spark's sink: rows a second into a topic of a real broker process, as a batch and as a stream, through a real session.

Beside it in every round: the same rows into Parquet, into Spark's no-op sink (the floor: what reading them costs), and by a
sink that is given row by row. Rows come from plain Parquet files. Figures are medians, ratios those of the rounds' ratios.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from bench.broker_process import WORK, fresh_dir, start_broker
from bench.floor_source import CORES, columns_of
from bench.report import Figure
from bench.row_sink import RowSink
from bench.scenarios.bench_run import Run
from bench.spark_session import spark_session
from pyspark.sql import DataFrame, SparkSession

from braid.client import blocking

GROUP = "Spark sink: rows out of Parquet files, two tasks, into two segments"
FILES = 4 * CORES
ROUNDS = 3
ROW_TARGET = 3.0
"""At least so many times the rate of a sink that is given row by row."""
_NOTES = {
    "braid": "exactly once, as a batch",
    "stream": "exactly once, in micro-batches; without the first one, which starts the workers",
    "row by row": "one send per row of the same SDK with the same batching, no transaction",
    "parquet": "written by the JVM",
    "no-op": "read only",
}


def measure(run: Run) -> None:
    with start_broker(fresh_dir("spark-sink")).wait_ready() as broker, spark_session() as spark:
        spark.dataSource.register(RowSink)
        for size, many in ((100, 480_000), (1000, 240_000)):
            rows = many // 4 if run.is_quick else many
            topic = f"topic://public/default/written-{size}"
            with blocking.AdminClient(broker.http_url) as admin:
                admin.scalable_topics.create(topic, segments=CORES)
            options = {"service.url": f"pulsar://127.0.0.1:{broker.port}", "topic": topic}
            run.add(_rates(run, spark, options, size, rows))


def _rates(run: Run, spark: SparkSession, options: dict[str, str], size: int, rows: int) -> list[Figure]:
    files = _files(size, rows)
    out = tempfile.mkdtemp(prefix="spark-written-", dir=WORK)
    frame = spark.read.parquet(str(files)).coalesce(CORES)
    ways: dict[str, Callable[[], float]] = {
        "braid": lambda: _spent(lambda: frame.write.format("braid").options(**options).mode("append").save()),
        "stream": lambda: _stream_seconds(spark, frame, files, options, rows),
        "row by row": lambda: _spent(lambda: frame.write.format(RowSink.name()).options(**options).mode("append").save()),
        "parquet": lambda: _spent(lambda: frame.write.mode("overwrite").parquet(out)),
        "no-op": lambda: _spent(lambda: frame.write.format("noop").mode("overwrite").save()),
    }
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(-1, 1 if run.is_quick else ROUNDS):  # the first one warms up
        for name, way in ways.items():
            run.progress(f"{size} B: round {turn + 1}, {name}")
            seconds = way()
            if turn >= 0:
                spent[name].append(seconds)
    figures = [
        Figure(
            group=GROUP,
            name=f"{size} B: {name}",
            value=rows / statistics.median(seconds) / 1e6,
            low=rows / max(seconds) / 1e6,
            high=rows / min(seconds) / 1e6,
            unit="M rows/s",
            note=_NOTES[name],
        )
        for name, seconds in spent.items()
    ]
    for other in ("row by row", "parquet", "no-op"):
        ratio = statistics.median([theirs / ours for ours, theirs in zip(spent["braid"], spent[other], strict=True)])
        is_aim = other == "row by row"
        figures.append(
            Figure(
                group=GROUP,
                name=f"{size} B: {other} against braid",
                value=1 / ratio,
                unit="times",
                target=1 / ROW_TARGET if is_aim else None,
                note=f"braid writes {ratio:.2f} of its rate" + (f"; at least {ROW_TARGET:g}" if is_aim else ""),
            )
        )
    return figures


def _files(size: int, rows: int) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="spark-rows-", dir=WORK))
    for number in range(FILES):
        values, keys = columns_of(size, rows // FILES, number)
        table = pa.table([values, keys.cast(pa.binary())], names=["value", "__key"])
        pq.write_table(table, folder / f"{number}.parquet", compression="none", use_dictionary=False)
    return folder


def _spent(write: Callable[[], None]) -> float:
    began = time.perf_counter()
    write()
    return time.perf_counter() - began


def _stream_seconds(spark: SparkSession, frame: DataFrame, files: Path, options: dict[str, str], rows: int) -> float:
    """Seconds for all rows at the rate of the batches behind the first."""
    with tempfile.TemporaryDirectory(prefix="spark-checkpoint-", dir=WORK) as checkpoint:
        source = spark.readStream.schema(frame.schema).option("maxFilesPerTrigger", CORES).parquet(str(files))
        writer = source.writeStream.format("braid").options(**options).option("checkpointLocation", checkpoint)
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()
        done = [each for each in query.recentProgress if each["numInputRows"] > 0][1:]
        count = sum(each["numInputRows"] for each in done)
        return float(rows * sum(each["durationMs"]["addBatch"] for each in done) / 1000 / count)
