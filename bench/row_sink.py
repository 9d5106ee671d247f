"""A sink of Spark that is given rows and sends each by itself: what the connector's sink, which takes columns, is held against.

A format of its own; the same SDK with the same batching, and no transaction.
"""

from __future__ import annotations

from collections.abc import Iterator

from pyspark.sql import Row
from pyspark.sql.datasource import DataSource, DataSourceWriter, WriterCommitMessage
from pyspark.sql.types import StructType


class _RowWriter(DataSourceWriter):
    def __init__(self, url: str, topic: str) -> None:
        self._url = url
        self._topic = topic

    def write(self, iterator: Iterator[Row]) -> WriterCommitMessage:
        from braid.client import blocking
        from braid.client.config import ClientConfig

        config = ClientConfig(batch_max_messages=100_000, batch_max_bytes=1 << 20, max_pending_messages=1_000_000)
        with blocking.connect(self._url, config=config) as client, client.producer(self._topic) as producer:
            for row in iterator:
                producer.send_nowait(bytes(row[0]), key=row[1].decode())
            producer.flush()
        return WriterCommitMessage()


class RowSink(DataSource):
    """Rows of `value` and `__key`."""

    @classmethod
    def name(cls) -> str:
        return "braid-bench-rows"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        return _RowWriter(self.options["service.url"], self.options["topic"])
