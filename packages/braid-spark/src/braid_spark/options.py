"""The options of format `braid`: one table of names, types, defaults and meanings, for reading and writing alike.

Owns what an option may be called (in any case; Kafka's and pulsar-spark's names too where they mean the same), the checks, and
the page of the reference that lists them (`python -m braid_spark.options`). Opens nothing. Pure.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal

import msgspec

from braid.errors import ConfigError
from braid_spark.offsets import EARLIEST, LATEST, Start, parse_position
from braid_spark.option_table import BY_NAME, READING, TABLE, WRITING, Option
from braid_spark.option_values import NEAR, Refused

CLIENT_PREFIX: Final = "braid.client."
PRODUCER_PREFIX: Final = "braid.producer."
_SPARK_OWN: Final = frozenset({"outputmode", "asyncprogresstrackingcheckpointintervalms"})
"""Spark's own options, which it shows to sinks as well."""
_IGNORED: Final = frozenset({"admin.url"})
"""pulsar-spark's options that have no meaning here."""
_KAFKA_SIGNS: Final = frozenset({"kafka.bootstrap.servers", "subscribe", "subscribepattern", "includeheaders"})
"""Names by which a query taken from Kafka is known; its columns are then called as there."""

ColumnNames = Literal["braid", "pulsar", "kafka"]
ValueFormat = Literal["binary", "string", "json", "avro"]


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The options of one source or sink, checked. Times are in milliseconds. Pickles."""

    service_url: str | None = None
    topic: str | None = None
    topics: tuple[str, ...] = ()
    """Full names, from `topic` or `topics`."""
    topics_pattern: str | None = None
    starting: Start | None = None
    """None: latest for a stream, earliest for a batch."""
    ending: Start = Start(word="latest")
    is_ending_given: bool = False
    max_messages_per_trigger: int | None = None
    max_bytes_per_trigger: int | None = None
    min_messages_per_trigger: int | None = None
    max_trigger_delay_ms: int = 15 * 60_000
    ordering: Literal["key", "none"] = "key"
    key_split: int = 1
    min_partitions: int = 1
    max_messages_per_partition: int | None = None
    fail_on_data_loss: bool = True
    subscription: str | None = None
    column_names: ColumnNames = "braid"
    include_headers: bool = False
    value_format: ValueFormat = "binary"
    avro_schema: str | None = None
    semantics: Literal["exactly-once", "at-least-once"] = "exactly-once"
    sink_id: str | None = None
    publish: Literal["streaming", "atEnd"] = "streaming"
    publish_buffer_bytes: int = 256 << 20
    transaction_timeout_ms: int = 10 * 60_000
    txn_app_id: str | None = None
    txn_version: int | None = None
    checkpoint_location: str | None = None
    query_name: str | None = None
    is_progress_async: bool = False
    """Whether the query's progress is tracked asynchronously, which an exactly-once sink refuses."""
    client: dict[str, str] = {}
    """What was given under `braid.client.`, without that."""
    producer: dict[str, str] = {}
    """What was given under `braid.producer.`, without that."""
    given: frozenset[str] = frozenset()
    """Names of the options that were given, as the table spells them."""

    @property
    def url(self) -> str:
        """The address; only after `for_reading` or `for_writing`."""
        return self.service_url or ""

    def for_reading(self) -> Options:
        """These options, if a source can be made of them; raises ConfigError."""
        self._need_address("read")
        if not self.topics and self.topics_pattern is None:
            raise ConfigError("No topic to read is given. Set one of the options topic, topics and topicsPattern.")
        self._only(READING, "write", "read")
        return self

    def for_writing(self) -> Options:
        """These options, if a sink can be made of them; raises ConfigError."""
        self._need_address("write")
        if self.topics_pattern is not None or "topics" in self.given:
            raise ConfigError("A sink writes to one topic or to those of the column __topic. Set the option topic or none.")
        self._only(WRITING, "read", "write")
        if (self.txn_app_id is None) != (self.txn_version is None):
            raise ConfigError("The options txnAppId and txnVersion belong together. Set both or none.")
        return self

    def refuse_in_stream(self) -> None:
        """Raise ConfigError for what only a batch can do."""
        if self.is_ending_given:
            raise ConfigError("endingOffsets and endingTimestamp are for batch reads: a stream has no end. Leave them out.")

    def _need_address(self, verb: str) -> None:
        if self.service_url is None:
            raise ConfigError(f"No cluster to {verb} is given. Set the option service.url, such as pulsar://localhost:6650.")

    def _only(self, usable: frozenset[str], other: str, verb: str) -> None:
        for name in sorted(self.given - usable):
            raise ConfigError(f"The option {name} is of a query's {other} side and has no meaning to {verb}. Leave it out.")


def parse(raw: Mapping[str, str]) -> Options:
    """The options of a source or a sink; raises ConfigError with one sentence about the first that is wrong.

    Spark gives the names in lower case. Whether enough is given is for `for_reading` and `for_writing` to say."""
    fields: dict[str, Any] = {}
    origin: dict[str, str] = {}
    """Name of the table: name as given."""
    client: dict[str, str] = {}
    producer: dict[str, str] = {}
    for name, value in raw.items():
        lower = name.lower()
        if lower.startswith(CLIENT_PREFIX):
            client[name[len(CLIENT_PREFIX) :]] = str(value)
        elif lower.startswith(PRODUCER_PREFIX):
            producer[name[len(PRODUCER_PREFIX) :]] = str(value)
        elif (row := BY_NAME.get(lower)) is not None:
            name = next(known for known in (row.name, *row.aliases) if known.lower() == lower)  # as the documentation writes it
            parsed = _parsed(row, name, str(value))
            if row.name in origin and fields[row.field] != parsed:
                raise ConfigError(f"The options {origin[row.name]} and {name} mean the same but differ. Leave one out.")
            fields[row.field], origin[row.name] = parsed, name
        elif lower not in _SPARK_OWN and lower not in _IGNORED:
            raise ConfigError(f"There is no option {name} of the format braid. {_hint(lower)}")
    if "column_names" not in fields:
        spelled = {name.lower() for name in raw}
        fields["column_names"] = "kafka" if spelled & _KAFKA_SIGNS else "pulsar" if spelled & _IGNORED else "braid"
    return Options(**_combined(fields, origin), client=client, producer=producer, given=frozenset(origin))


def _parsed(row: Option, name: str, value: str) -> Any:
    try:
        return row.parse(value)
    except Refused as error:
        reason = str(error)
        raise ConfigError(
            f"The option {name} = {value!r} cannot be used: {reason}{'' if reason.endswith('?') else '.'}"
        ) from None


def _combined(fields: dict[str, Any], origin: Mapping[str, str]) -> dict[str, Any]:
    """What options say together."""
    chosen = [name for name in ("topic", "topics", "topicsPattern") if name in origin]
    if len(chosen) > 1:
        raise ConfigError(
            f"Only one of topic, topics and topicsPattern can be set, not {' and '.join(origin[each] for each in chosen)}."
        )
    if "topic" in fields:
        fields["topics"] = (fields["topic"],)
    fields["is_ending_given"] = "endingOffsets" in origin or "endingTimestamp" in origin
    for side in ("starting", "ending"):
        offsets, timestamp = fields.pop(f"{side}_offsets", None), fields.pop(f"{side}_timestamp", None)
        if offsets is not None and timestamp is not None:
            raise ConfigError(f"Only one of {side}Offsets and {side}Timestamp can be set.")
        if timestamp is not None:
            fields[side] = Start(timestamp_ms=timestamp)
        elif offsets is not None:
            fields[side] = _position(offsets, f"{side}Offsets", fields)
    if fields.get("max_messages_per_partition") is not None and fields.get("ordering", "key") == "key":
        raise ConfigError(
            f"{origin['maxMessagesPerPartition']} splits a segment by position, which breaks the order of its keys. "
            "Set ordering=none, or use minPartitions or keySplit."
        )
    if fields.get("include_headers") and fields["column_names"] != "kafka":
        raise ConfigError(
            f"includeHeaders is about Kafka's columns, and columnNames = {fields['column_names']} has the properties as "
            "__properties. Leave one of them out."
        )
    least, most = fields.get("min_messages_per_trigger"), fields.get("max_messages_per_trigger")
    if least is not None and most is not None and least > most:
        raise ConfigError(f"minMessagesPerTrigger = {least} is above maxMessagesPerTrigger = {most}. Lower it.")
    return fields


def _position(text: str, option: str, fields: Mapping[str, Any]) -> Start:
    """The position an option says, which may only name the topics that are read, and all of them."""
    start = parse_position(text, option)
    if start.word == EARLIEST and option == "endingOffsets":
        raise ConfigError(f"The option {option} cannot be {EARLIEST}: nothing would be read. Set {LATEST} or positions.")
    topics = fields.get("topics", ())
    said_of = start.said_of()
    if said_of is None or not topics:
        return start
    if others := sorted(said_of - set(topics)):
        raise ConfigError(f"The option {option} names {others[0]}, which is not read. The topics are {_listed(topics)}.")
    if missing := sorted(set(topics) - said_of):
        raise ConfigError(
            f"The option {option} says nothing of {missing[0]}. Name it too, if only with {EARLIEST} or {LATEST}."
        )
    return start


def _hint(lower: str) -> str:
    spellings = {**BY_NAME, **dict.fromkeys((CLIENT_PREFIX, PRODUCER_PREFIX))}
    if near := difflib.get_close_matches(lower, list(spellings), n=1, cutoff=NEAR):
        row = spellings[near[0]]
        return f"Did you mean {row.name if row is not None else near[0] + '*'}?"
    if lower.startswith(("kafka.", "pulsar.")):
        return f"Settings of the client go under {CLIENT_PREFIX}*, those of producers under {PRODUCER_PREFIX}*."
    return f"The options are {_listed(row.name for row in TABLE)}."


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


def markdown() -> str:
    """The page of the reference."""
    lines = [
        "# Options of the Spark format",
        "",
        "Generated from the code. Options of `spark.read`, `spark.readStream`, `df.write` and `df.writeStream` with",
        '`format("braid")`. Names may be written in any case; the names that Kafka\'s source or pulsar-spark have for the',
        "same thing are accepted too. A size may end in `k`, `m` or `g`, a duration in `ms`, `s`, `m`, `h` or `d`.",
    ]
    for title, where in (("Reading and writing", "rw"), ("Reading", "r"), ("Writing", "w")):
        lines += ["", f"## {title}", "", "| option | type | default | other names | meaning |", "|---|---|---|---|---|"]
        for row in TABLE:
            if row.where == where:
                others = _listed(f"`{name}`" for name in row.aliases)
                lines.append(f"| `{row.name}` | {row.kind} | {row.default} | {others} | {row.doc} |")
    lines += [
        "",
        f"`{CLIENT_PREFIX}NAME` sets an option of the client, `{PRODUCER_PREFIX}NAME` one of the producers, such as",
        f"`{CLIENT_PREFIX}operationTimeout` (seconds). `admin.url` is accepted and not needed.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    import sys

    sys.stdout.write(markdown())
