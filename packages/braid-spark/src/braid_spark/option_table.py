"""The options of format `braid`: names, types, defaults, meanings. A new one is one row here and a field of `Options`. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from braid_spark.option_values import address, duration, filled, flag, one_of, pattern, size, timestamp, topic, topics, whole

MAX_KEY_SPLIT: Final = 65_536


class Option(NamedTuple):
    """A row of the table."""

    name: str
    field: str
    parse: Callable[[str], Any]
    kind: str
    doc: str
    where: str = "rw"
    """`r` read, `w` write."""
    aliases: tuple[str, ...] = ()
    default: str = ""


TABLE: Final[tuple[Option, ...]] = (
    Option(
        "service.url",
        "service_url",
        address,
        "address",
        "The cluster, `pulsar://host:port`. Needed",
        aliases=("kafka.bootstrap.servers",),
    ),
    Option(
        "topic",
        "topic",
        topic,
        "topic",
        "The topic to read or to write to; of a sink, every row goes there, whatever `__topic` says",
        aliases=("path",),
    ),
    Option("topics", "topics", topics, "list of topics", "Topics to read, with commas between them", "r", ("subscribe",)),
    Option(
        "topicsPattern",
        "topics_pattern",
        pattern,
        "pattern",
        "Topics to read: `tenant/namespace/regex`, with `persistent://` or `topic://` before it for one kind only. "
        "Topics that appear later are read from their beginning",
        "r",
        ("subscribePattern",),
    ),
    Option(
        "startingOffsets",
        "starting_offsets",
        str,
        "position",
        '`earliest`, `latest`, JSON `{"topic": {"segment": index}}` (-2 earliest, -1 latest), or the offset of a checkpoint. '
        "A checkpoint goes before it",
        "r",
        default="`latest`; of a batch `earliest`",
    ),
    Option(
        "startingTimestamp",
        "starting_timestamp",
        timestamp,
        "time",
        "Start at the first message published at or after this: milliseconds since 1970, or ISO 8601",
        "r",
        ("startingTime",),
    ),
    Option(
        "endingOffsets",
        "ending_offsets",
        str,
        "position",
        "Where a batch read ends, written as `startingOffsets`",
        "r",
        default="`latest`",
    ),
    Option(
        "endingTimestamp",
        "ending_timestamp",
        timestamp,
        "time",
        "A batch read ends before the first message published at or after this",
        "r",
        ("endingTime",),
    ),
    Option(
        "maxMessagesPerTrigger",
        "max_messages_per_trigger",
        whole(1),
        "number",
        "Most messages of one micro-batch, shared among the segments by what waits in each, at least one each",
        "r",
        ("maxOffsetsPerTrigger",),
    ),
    Option(
        "maxBytesPerTrigger",
        "max_bytes_per_trigger",
        size,
        "size",
        "Most stored bytes of one micro-batch, at least one entry of each segment. Both limits apply if both are set",
        "r",
    ),
    Option(
        "minMessagesPerTrigger",
        "min_messages_per_trigger",
        whole(1),
        "number",
        "A micro-batch waits until so many messages are there",
        "r",
        ("minOffsetsPerTrigger",),
    ),
    Option(
        "maxTriggerDelay",
        "max_trigger_delay_ms",
        duration,
        "duration",
        "But no longer than this after the one before",
        "r",
        default="`15m`",
    ),
    Option(
        "ordering",
        "ordering",
        one_of("key", "none"),
        "`key`, `none`",
        "`key`: messages of a key come in order, also across splits and merges. `none`: all segments are read at once",
        "r",
        default="`key`",
    ),
    Option(
        "keySplit",
        "key_split",
        whole(1, MAX_KEY_SPLIT),
        "number",
        "Read each segment in so many partitions, each with its share of the keys",
        "r",
        default="`1`",
    ),
    Option(
        "minPartitions",
        "min_partitions",
        whole(1),
        "number",
        "Split segments, by keys or with `ordering=none` by position, until there are so many partitions",
        "r",
        default="`1`",
    ),
    Option(
        "maxMessagesPerPartition",
        "max_messages_per_partition",
        whole(1),
        "number",
        "Split segments by position into partitions of at most this; only with `ordering=none`",
        "r",
        ("maxRecordsPerPartition",),
    ),
    Option(
        "failOnDataLoss",
        "fail_on_data_loss",
        flag,
        "`true`, `false`",
        "Whether to stop if messages that were not read yet are not stored any more; else they are counted and left out",
        "r",
        default="`true`",
    ),
    Option(
        "subscription",
        "subscription",
        filled,
        "name",
        "A subscription that follows the query: it shows the lag and keeps what is not read yet. It is not removed at the end",
        "r",
        ("predefinedSubscription",),
    ),
    Option(
        "columnNames",
        "column_names",
        one_of("braid", "pulsar", "kafka"),
        "`braid`, `pulsar`, `kafka`",
        "How the columns are called. Kafka's if its name of the address or the topics is used, pulsar-spark's with `admin.url`",
        "r",
        default="`braid`",
    ),
    Option(
        "includeHeaders",
        "include_headers",
        flag,
        "`true`, `false`",
        "Whether Kafka's columns have `headers`, the properties of a message; its columns are meant if this is set",
        "r",
        default="`false`",
    ),
    Option(
        "valueFormat",
        "value_format",
        one_of("binary", "string", "json", "avro"),
        "`binary`, `string`, `json`, `avro`",
        "What the column `value` is, or which columns are made of it",
        "r",
        default="`binary`",
    ),
    Option(
        "avroSchema",
        "avro_schema",
        filled,
        "JSON",
        "The Avro schema whose fields are the columns. Each value is read by the version it was written with, if its message "
        "names one, and resolved to this",
        "r",
        default="the topic's latest",
    ),
    Option(
        "semantics",
        "semantics",
        one_of("exactly-once", "at-least-once"),
        "`exactly-once`, `at-least-once`",
        "Whether a batch is written in a transaction, or messages may come twice after a failure",
        "w",
        default="`exactly-once`",
    ),
    Option(
        "sinkId",
        "sink_id",
        filled,
        "name",
        "What the brokers know the sink by, the same in every run of the query",
        "w",
        default="query id and topic",
    ),
    Option(
        "publish",
        "publish",
        one_of("streaming", "atEnd"),
        "`streaming`, `atEnd`",
        "`atEnd` keeps a task's rows until it has all of them: the transaction is open for a shorter time",
        "w",
        default="`streaming`",
    ),
    Option(
        "publishBufferBytes",
        "publish_buffer_bytes",
        size,
        "size",
        "What a task keeps with `publish=atEnd` before it writes",
        "w",
        default="`256m`",
    ),
    Option(
        "transactionTimeout",
        "transaction_timeout_ms",
        duration,
        "duration",
        "Time after which the brokers abort the transaction of a batch that nobody goes on with",
        "w",
        default="`10m`",
    ),
    Option(
        "txnAppId",
        "txn_app_id",
        filled,
        "name",
        "With `txnVersion`: names a batch write, which is then done only once for each topic",
        "w",
    ),
    Option("txnVersion", "txn_version", whole(0), "number", "Number of the write; a lower or equal one is skipped", "w"),
)
HIDDEN: Final[tuple[Option, ...]] = (
    Option("checkpointLocation", "checkpoint_location", str, "", ""),
    Option("queryName", "query_name", str, "", ""),
    Option("asyncProgressTrackingEnabled", "is_progress_async", flag, "", ""),
)
"""Spark's own options that a sink looks at."""
READING: Final = frozenset(row.name for row in (*TABLE, *HIDDEN) if "r" in row.where)
WRITING: Final = frozenset(row.name for row in (*TABLE, *HIDDEN) if "w" in row.where)
BY_NAME: Final[dict[str, Option]] = {
    spelling.lower(): row for row in (*TABLE, *HIDDEN) for spelling in (row.name, *row.aliases)
}
"""Every spelling, in lower case."""
