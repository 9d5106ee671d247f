"""Queries whose batches a test looks at."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from braid.testing.broker import BackgroundBroker


class Batches(dict[int, list[Row]]):
    """Rows by batch, as the sink got them."""

    def __call__(self, frame: DataFrame, number: int) -> None:
        self[number] = frame.collect()

    @property
    def rows(self) -> list[Row]:
        return [row for number in sorted(self) for row in self[number]]

    @property
    def texts(self) -> list[str]:
        return [bytes(row["value"]).decode() for row in self.rows]

    @property
    def sizes(self) -> list[int]:
        return [len(self[number]) for number in sorted(self)]


def stream(
    spark: SparkSession, broker: BackgroundBroker, topic: str | None, schema: str | None = None, **options: str
) -> DataFrame:
    given = {"service.url": broker.service_url, "startingOffsets": "earliest", **options}
    reader = spark.readStream.format("braid").options(**given if topic is None else {**given, "topic": topic})
    return (reader if schema is None else reader.schema(schema)).load()


def run_to_the_end(frame: DataFrame, checkpoint: Path) -> Batches:
    """Everything that is there now; raises what made the query fail."""
    batches = Batches()
    query = (
        frame.writeStream.foreachBatch(batches).option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
    )
    query.awaitTermination()
    return batches


@contextmanager
def running(frame: DataFrame, checkpoint: Path, batches: Batches) -> Iterator[StreamingQuery]:
    """A query that goes on until the end of the block."""
    query = frame.writeStream.foreachBatch(batches).option("checkpointLocation", str(checkpoint)).start()
    try:
        yield query
    finally:
        query.stop()


def last_offset(checkpoint: Path, batch: int) -> dict[str, Any]:
    """The end of a batch, as the offset log has it."""
    lines = (checkpoint / "offsets" / str(batch)).read_text().splitlines()
    found: dict[str, Any] = json.loads(lines[2])
    return found


def forget_commit(checkpoint: Path, batch: int) -> None:
    """As if the driver had been killed behind the batch, before it was logged as done."""
    for name in (str(batch), f".{batch}.crc"):
        (checkpoint / "commits" / name).unlink(missing_ok=True)
