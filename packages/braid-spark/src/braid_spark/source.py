"""`BraidDataSource`: the format `braid` as PySpark sees it.

Owns the door alone: options are checked where a user sees the message, then readers and writers are made. Must import little,
because every Python process of Spark does, and `__init__` asks no broker, because Spark makes one for every batch written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from braid.errors import BraidError
from braid_spark.options import Options, parse

if TYPE_CHECKING:
    from braid_spark.columns import Columns

FORMAT = "braid"


class BraidDataSource(DataSource):
    """Topics of Braid: `spark.readStream.format("braid")`, `read`, `write` and `writeStream`."""

    def __init__(self, options: Mapping[str, str]) -> None:
        """Raises ConfigError for options that are unknown or wrong, whatever they are for."""
        self.options = dict(options)
        self._parsed = parse(self.options)
        if self._parsed.client:
            from braid_spark.connections import client_config

            client_config(self._parsed.client)

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        """All columns of a topic. Spark asks for them when the user names none, at `load`: so this is where an address that
        nobody answers at, or a topic that does not exist, is told."""
        from pyspark.sql.pandas.types import from_arrow_schema

        from braid_spark.columns import default_schema
        from braid_spark.reader import check_topics
        from braid_spark.topic_schemas import with_avro_schema

        options = self._parsed.for_reading()
        check_topics(options)
        options = with_avro_schema(options)
        names, value_format, avro_schema = options.column_names, options.value_format, options.avro_schema
        return from_arrow_schema(default_schema(names, value_format, avro_schema, include_headers=options.include_headers))

    def reader(self, schema: StructType) -> DataSourceReader:
        from braid_spark.reader import BraidReader

        options = self._parsed.for_reading()
        return BraidReader(options, columns_of(options, schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from braid_spark.stream_reader import BraidStreamReader

        try:
            self._parsed.refuse_in_stream()
            return BraidStreamReader(self._parsed, columns_of(self._parsed.for_reading(), schema))
        except BraidError as error:
            return BraidStreamReader(self._parsed, error)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from braid_spark.writer import make_writer

        return make_writer(self._parsed, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from braid_spark.stream_writer import make_stream_writer

        return make_stream_writer(self._parsed, schema, overwrite)


def columns_of(options: Options, schema: StructType) -> Columns:
    """How messages become rows of `schema`; raises InvalidArgument if they cannot."""
    from pyspark.sql.pandas.types import to_arrow_schema

    from braid_spark.columns import Columns
    from braid_spark.topic_schemas import with_avro_schema

    options = with_avro_schema(options)
    wanted = to_arrow_schema(schema, timezone="UTC")
    return Columns.of(wanted, names=options.column_names, value_format=options.value_format, avro_schema=options.avro_schema)
