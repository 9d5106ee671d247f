"""Spark's source: rows a second from a real broker process, beside Parquet and record batches that are there already.

Every round reads the same rows by each way in turn into Spark's no-op sink; figures are medians, ratios are medians of the
rounds' ratios. The split is measured in one process without Spark: what transfer and decoding alone take of the same pieces.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from bench.broker_process import WORK, Process, fresh_dir, start_broker
from bench.floor_source import CORES, SCHEMA, FloorSource, columns_of
from bench.report import Figure
from bench.scenarios.bench_run import Run
from bench.spark_session import spark_session
from pyspark.sql import DataFrame, SparkSession

from braid.client import blocking
from braid_spark.blocks import ArrowBlock
from braid_spark.columns import Columns
from braid_spark.connections import Link
from braid_spark.decode import SegmentDecoder
from braid_spark.options import Options, parse
from braid_spark.planner import Limits, Piece, Planner
from braid_spark.reader import PieceInput, _Fetches, read_piece
from braid_spark.reads import ClusterReads

GROUP = "Spark source: rows into the no-op sink, two segments, two tasks"
SPLIT_GROUP = "Spark source: where the time of a row goes, one process without Spark"
PLAN_GROUP = "Spark source: planning and memory"
BATCH_ROWS = 10_000
ROUNDS = 5
TARGETS: dict[int, dict[str, float | None]] = {
    100: {"parquet": 0.3, "plain parquet": None, "floor": 0.4},
    1000: {"parquet": 0.6, "plain parquet": None, "floor": 0.4},
}
"""At least so much of the rate of each. Parquet is what Spark itself writes unless told otherwise, which is what users have;
files without compression and dictionaries are shown as well."""


def measure(run: Run) -> None:
    with start_broker(fresh_dir("spark-read")).wait_ready() as broker, spark_session() as spark:
        for size in (100, 1000):
            rows = (60_000_000 if run.is_quick else 500_000_000) // (size + 30)
            topic = f"topic://public/default/read-{size}"
            _publish(run, broker, topic, size, rows)
            run.add(_rates(run, spark, broker, topic, size, rows))
            run.add(_split(broker, topic, size, rows))
        run.add(_memory(broker, "topic://public/default/read-1000"))
        run.add(_planning(run, broker))


# Data.


def _publish(run: Run, broker: Process, topic: str, size: int, rows: int) -> None:
    url = f"pulsar://127.0.0.1:{broker.port}"
    with blocking.AdminClient(broker.http_url) as admin, blocking.connect(url) as client:
        admin.scalable_topics.create(topic, segments=CORES)
        with client.producer(topic) as producer:
            under_way = []
            for first in range(0, rows, BATCH_ROWS):
                run.progress(f"publishing {first} of {rows} rows of {size} B")
                values, keys = columns_of(size, min(BATCH_ROWS, rows - first), first)
                under_way.append(producer.send_block(ArrowBlock.of(values, keys=keys)))
            for sent in under_way:
                sent.result()


# Rates.


def _drain(frame: DataFrame) -> float:
    began = time.perf_counter()
    frame.write.format("noop").mode("overwrite").save()
    return time.perf_counter() - began


def _rates(run: Run, spark: SparkSession, broker: Process, topic: str, size: int, rows: int) -> list[Figure]:
    spark.dataSource.register(FloorSource)
    plain = Path(tempfile.mkdtemp(prefix="spark-parquet-", dir=WORK))
    for number in range(CORES):
        values, keys = columns_of(size, rows // CORES, number)
        count = len(values)
        columns = [
            values,
            keys.cast(pa.binary()),
            pa.array(range(count), pa.int64()),
            pa.array([0] * count, pa.timestamp("us", "UTC")),
        ]
        table = pa.table(columns, names=["value", "__key", "__index", "__publish_time"])
        pq.write_table(table, plain / f"{number}.parquet", compression="none", use_dictionary=False)
    parquet = Path(tempfile.mkdtemp(prefix="spark-parquet-", dir=WORK))
    spark.read.parquet(str(plain)).write.mode("overwrite").parquet(str(parquet))
    options = {"service.url": f"pulsar://127.0.0.1:{broker.port}", "topic": topic}
    ways: dict[str, Callable[[], float]] = {
        "braid": lambda: _drain(spark.read.format("braid").schema(SCHEMA).options(**options).load()),
        "all columns": lambda: _drain(spark.read.format("braid").options(**options).load()),
        "parquet": lambda: _drain(spark.read.parquet(str(parquet))),
        "plain parquet": lambda: _drain(spark.read.parquet(str(plain))),
        "floor": lambda: _drain(spark.read.format("braid-bench-floor").options(size=size, rows=rows).load()),
        "stream": lambda: _stream_seconds(spark, options, rows),
    }
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(-1, 2 if run.is_quick else ROUNDS):  # the first one warms up
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
    for other, least in TARGETS[size].items():
        ratios = [theirs / ours for ours, theirs in zip(spent["braid"], spent[other], strict=True)]
        figures.append(
            Figure(
                group=GROUP,
                name=f"{size} B: {other} against braid",
                value=1 / statistics.median(ratios),
                unit="times",
                target=1 / least if least else None,
                note=f"braid reads {statistics.median(ratios):.2f} of its rate" + (f"; at least {least}" if least else ""),
            )
        )
    return figures


_NOTES = {
    "braid": "value, key, index, publish time, as in the others",
    "all columns": "all eleven columns of a topic",
    "parquet": "as Spark writes it (Snappy), read by the JVM",
    "plain parquet": "neither compressed nor with dictionaries",
    "floor": "record batches that are there already",
    "stream": "in micro-batches; without the first one, which starts the workers",
}


def _stream_seconds(spark: SparkSession, options: dict[str, str], rows: int) -> float:
    """Seconds for all rows at the rate of the batches behind the first."""
    with tempfile.TemporaryDirectory(prefix="spark-checkpoint-", dir=WORK) as checkpoint:
        frame = (
            spark.readStream.format("braid")
            .schema(SCHEMA)
            .options(**options, startingOffsets="earliest", maxMessagesPerTrigger=max(rows // 4, 1))
            .load()
        )
        writer = frame.writeStream.format("noop").option("checkpointLocation", checkpoint).trigger(availableNow=True)
        query = writer.start()
        query.awaitTermination()
        done = [each for each in query.recentProgress if each["numInputRows"] > 0][1:]
        count = sum(each["numInputRows"] for each in done)
        return float(rows * sum(each["durationMs"]["addBatch"] for each in done) / 1000 / count)


# The split.


def _pieces(options: Options, link: Link) -> list[Piece]:
    planner = Planner(options, time.monotonic)
    reads = ClusterReads(link, options.topics)
    start, end = planner.batch(reads)
    return planner.partitions(start, end, reads)


def _wanted(options: Options) -> Columns:
    schema = pa.schema(
        [("value", pa.binary()), ("__key", pa.binary()), ("__index", pa.int64()), ("__publish_time", pa.timestamp("us", "UTC"))]
    )
    return Columns.of(schema, names=options.column_names, value_format=options.value_format)


def _split(broker: Process, topic: str, size: int, rows: int) -> list[Figure]:
    options = parse({"service.url": f"pulsar://127.0.0.1:{broker.port}", "topic": topic})
    columns = _wanted(options)
    transfer, decode, both = [], [], []
    with Link(options.url) as link:
        pieces = _pieces(options, link)
        for _turn in range(3):
            fetching = decoding = 0.0
            for piece in pieces:
                decoder = SegmentDecoder(columns, topic=piece.topic, segment=piece.segment, start=piece.start, stop=piece.stop)
                with _Fetches(link, piece, is_loss_fatal=True) as fetches:
                    began = time.perf_counter()
                    for fetched in fetches:
                        arrived = time.perf_counter()
                        fetching += arrived - began
                        for _batch in decoder.decode(fetched):
                            pass
                        began = time.perf_counter()
                        decoding += began - arrived
            transfer.append(_alone(link, pieces))
            decode.append(decoding)
            both.append(fetching + decoding)
    names = (("transfer", transfer), ("decode", decode), ("both, one ahead of the other", both))
    return [
        Figure(
            group=SPLIT_GROUP,
            name=f"{size} B: {name}",
            value=statistics.median(seconds) / rows * 1e9,
            low=min(seconds) / rows * 1e9,
            high=max(seconds) / rows * 1e9,
            unit="ns/row",
        )
        for name, seconds in names
    ]


def _alone(link: Link, pieces: list[Piece]) -> float:
    """Seconds to get all entries and do nothing with them."""
    began = time.perf_counter()
    for piece in pieces:
        with _Fetches(link, piece, is_loss_fatal=True) as fetches:
            for _fetched in fetches:
                pass
    return time.perf_counter() - began


# Memory and planning.


def _peak(options: Options, piece: Piece, share: float, answer: Any) -> None:
    """In a process of its own: the most memory while reading a share of a piece."""
    stop = piece.start + max(1, int((piece.stop - piece.start) * share))
    part = Piece(piece.topic, piece.incarnation, piece.segment, piece.physical, piece.start, stop)
    for _batch in read_piece(options, _wanted(options), PieceInput(part)):
        pass
    answer.put(_most_memory())


def _most_memory() -> float:
    """Of this process so far, in MB. (What `getrusage` says is at least the memory of whoever started it.)"""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def _memory(broker: Process, topic: str) -> list[Figure]:
    options = parse({"service.url": f"pulsar://127.0.0.1:{broker.port}", "topic": topic})
    with Link(options.url) as link:
        piece = _pieces(options, link)[0]
    peaks = {}
    context = multiprocessing.get_context("spawn")
    for share in (0.25, 1.0):
        answer = context.Queue()
        child = context.Process(target=_peak, args=(options, piece, share, answer))
        child.start()
        peaks[share] = answer.get(timeout=300)
        child.join()
    return [
        Figure(
            group=PLAN_GROUP,
            name="memory of a task with 4 times the rows",
            value=peaks[1.0] / peaks[0.25],
            unit="times",
            target=1.25,
            note=f"{peaks[0.25]:.0f} MB and {peaks[1.0]:.0f} MB at most",
        )
    ]


def _planning(run: Run, broker: Process) -> list[Figure]:
    """What a running query takes to plan a batch while nearly all segments of its topic are sealed and read."""
    topic = "topic://public/default/planned"
    url = f"pulsar://127.0.0.1:{broker.port}"
    sizes = (10, 100) if run.is_quick else (10, 1000)
    spent: dict[int, list[float]] = {}
    with blocking.AdminClient(broker.http_url) as admin, blocking.connect(url) as client, Link(url) as link:
        admin.scalable_topics.create(topic)
        admin.scalable_topics.create_subscription(topic, "holds")  # nothing may be pruned
        options = parse({"service.url": url, "topic": topic, "startingOffsets": "earliest"})
        planner, reads = Planner(options, time.monotonic), ClusterReads(link, options.topics)
        with client.producer(topic) as producer:
            for size in sizes:
                while (have := len(reads.view(topic).segments)) < size:
                    run.progress(f"{have} of {size} segments")
                    for _change in range(10):
                        producer.send(b"x", key="k")
                        _change_layout(admin, topic)
                    reads.refresh()
                end = planner.initial()
                while (later := planner.latest(end, Limits(), reads)) != end:
                    end = later
                    reads.refresh()
                spent[size] = []
                for _turn in range(30):
                    producer.send(b"x", key="k")
                    reads.refresh()
                    began = time.perf_counter()
                    later = planner.latest(end, Limits(), reads)
                    if len(planner.partitions(end, later, reads)) != 1:
                        raise RuntimeError("The batch that was planned has more than the one message.")
                    spent[size].append((time.perf_counter() - began) * 1000)
                    end = later
    few, many = (statistics.median(spent[size]) for size in sizes)
    return [
        Figure(
            group=PLAN_GROUP,
            name=f"planning with {sizes[1]:,} segments against {sizes[0]}",
            value=many / few,
            unit="times",
            target=1.5,
            note=f"{few:.2f} ms and {many:.2f} ms",
        )
    ]


def _change_layout(admin: blocking.AdminClient, topic: str) -> None:
    """Split the one active segment, or merge the two."""
    layout = admin.scalable_topics.get_metadata(topic)
    active = sorted((each for each in layout.segments.values() if each.is_active), key=lambda each: each.hash_range.start)
    if len(active) == 1:
        admin.scalable_topics.split_segment(topic, active[0].segment_id)
    else:
        admin.scalable_topics.merge_segments(topic, active[0].segment_id, active[1].segment_id)
