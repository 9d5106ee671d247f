"""The floor of a read: a format of Spark that yields record batches which are there already.

A module of its own that imports nothing of Braid: Spark's Python processes import it for every read, and that must not cost the
floor what it costs the connector.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

CORES = 2
SCHEMA = "value binary, __key binary, __index bigint, __publish_time timestamp"
KEYS = 1_000


def columns_of(size: int, rows: int, first: int = 0) -> tuple[pa.Array, pa.Array]:
    """Values of one size and keys of ten letters."""
    offsets = np.arange(0, (rows + 1) * size, size, dtype=np.int32)
    blob = np.random.default_rng(first).integers(32, 127, rows * size, dtype=np.uint8)
    values = pa.Array.from_buffers(pa.binary(), rows, [None, pa.py_buffer(offsets), pa.py_buffer(blob)])
    keys = pa.array([f"key-{number % KEYS:06d}" for number in range(first, first + rows)])
    return values, keys


class _Prebuilt(DataSourceReader):
    """Yields the same record batch again and again: what the way from Python to Spark costs, and nothing else."""

    def __init__(self, schema: StructType, size: int, rows: int) -> None:
        self._schema = schema
        self._size = size
        self._rows = rows

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(self._rows // CORES) for _ in range(CORES)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        count = max(1, (2 << 20) // (self._size + 30))
        values, keys = columns_of(self._size, count)
        columns = [
            values,
            keys.cast(pa.binary()),
            pa.array(range(count), pa.int64()),
            pa.array([0] * count, pa.timestamp("us", "UTC")),
        ]
        batch = pa.RecordBatch.from_arrays(columns, schema=to_arrow_schema(self._schema, timezone="UTC"))
        left = partition.value
        while left > 0:
            yield batch.slice(0, min(count, left))
            left -= count


class FloorSource(DataSource):
    """The floor as a format of Spark."""

    @classmethod
    def name(cls) -> str:
        return "braid-bench-floor"

    def schema(self) -> str:
        return SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        return _Prebuilt(schema, int(self.options["size"]), int(self.options["rows"]))
