"""What the admin commands show: JSON for programs, tables and lines for people.

Names come from other people: nothing in them is taken for markup or a terminal's control sequence.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from braid.cli.output import emit, printable
from braid.client.admin_scalable_types import ScalableTopicInfo, ScalableTopicStats, SegmentBacklogStats, SegmentNode
from braid.client.admin_transaction_types import SinkInfo, TransactionInfo
from braid.client.admin_types import (
    InternalStats,
    PartitionedInternalStats,
    PartitionedTopicStats,
    StoredMessage,
    TopicStats,
)
from braid.client.messages import MessageId
from braid.model.retention import NextTrim
from braid.runtime.clock import SystemClock

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

BACKLOG = "entries left"
"""What a subscription has not acknowledged, as Pulsar counts it: entries, of which a batch of messages is one."""
PLAIN_WIDTH = 1000
"""Columns when the output is no terminal: nothing is wrapped or cut."""


def show(value: Any, *, is_json: bool) -> None:
    """Bring out the result of a command."""
    if is_json:
        emit(msgspec.json.encode(_plain(value)) + b"\n")
        return
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        emit("".join(f"{printable(each)}\n" for each in value).encode())
    elif isinstance(value, str | int | float | MessageId):
        emit(f"{printable(str(value).lower() if isinstance(value, bool) else str(value))}\n".encode())
    else:
        print_tables(_parts(value))


def done(name: str, arguments: dict[str, Any], *, is_json: bool) -> None:
    """Say that a command without a result was done, to what."""
    shown = {key: value for key, value in arguments.items() if value is not None and value not in ([], ())}
    if is_json:
        emit(msgspec.json.encode({"done": name, **shown}) + b"\n")
    else:
        told = ", ".join(f"{key.replace('_', ' ')} {_short(value)}" for key, value in shown.items())
        emit(printable(f"done: {name} ({told})").encode() + b"\n")


def note(text: str) -> None:
    """Something for the user that is no result."""
    sys.stderr.write(f"{text}\n")


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str = "", *, is_cut: bool = False) -> RenderableType:
    """A table; numbers stand at the right. What is too wide is wrapped, or cut off."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    made = Table(title=Text(title) if title else None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    rows = [list(row) for row in rows]
    for index, column in enumerate(columns):
        is_number = bool(rows) and all(isinstance(row[index], int | float) for row in rows)
        made.add_column(
            column, justify="right" if is_number else "left", overflow="ellipsis" if is_cut else "fold", no_wrap=is_cut
        )
    for row in rows:
        made.add_row(*(Text(printable(_short(cell))) for cell in row))
    return made


def pairs(rows: Iterable[tuple[str, Any]], title: str = "") -> RenderableType:
    """Names and their values, one line each."""
    from rich.table import Table
    from rich.text import Text

    made = Table(title=Text(title) if title else None, title_justify="left", box=None, show_header=False, pad_edge=False)
    for name, value in rows:
        made.add_row(Text(printable(name)), Text(printable(_short(value))))
    return made


def console() -> Console:
    """Standard output with tables."""
    from rich.console import Console

    is_terminal = sys.stdout.isatty()
    return Console(file=sys.stdout, width=None if is_terminal else PLAIN_WIDTH, markup=False, highlight=False, emoji=False)


def print_tables(parts: Iterable[RenderableType]) -> None:
    """Bring out tables, without blanks at the ends of lines."""
    screen = console()
    with screen.capture() as captured:
        for part in parts:
            screen.print(part)
    lines = [line.rstrip() for line in captured.get().splitlines()]
    emit("".join(f"{line}\n" for line in lines).encode())


def _plain(value: Any) -> Any:
    if isinstance(value, MessageId):
        return {"ledgerId": value.ledger_id, "entryId": value.entry_id, "partitionIndex": value.partition}
    if isinstance(value, StoredMessage):
        return _message_json(value)
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return value


def _message_json(message: StoredMessage) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(message)
    found.pop("payload")
    payloads = message.payloads()
    try:
        found["payloads"] = [payload.decode() for payload in payloads]
    except UnicodeDecodeError:
        found["payloadsBase64"] = msgspec.to_builtins(payloads)
    return found


def _parts(value: Any) -> Iterable[RenderableType]:
    """Tables for one value."""
    if isinstance(value, StoredMessage):
        yield from _message(value)
    elif isinstance(value, list):
        yield from _listed(value)
    elif isinstance(value, ScalableTopicInfo | ScalableTopicStats | TransactionInfo | SinkInfo):
        yield from _elsewhere(value)
    elif isinstance(value, TopicStats):
        yield from _topic(value)
    elif isinstance(value, InternalStats):
        yield from _internal(value)
    elif isinstance(value, PartitionedInternalStats):
        for name, stats in value.partitions.items():
            yield from _internal(stats, name)
    elif isinstance(value, dict) and (found := list(_topics(value))):
        rows = [
            (name, bundle, each.msg_rate_in, each.msg_rate_out, backlog(each), each.storage_size)
            for bundle, name, each in found
        ]
        yield table(("topic", "bundle", "in/s", "out/s", BACKLOG, "bytes"), rows)
    elif isinstance(value, dict):
        yield pairs(sorted(value.items()))
    else:
        is_backlog = isinstance(value, SegmentBacklogStats)
        yield pairs((BACKLOG if is_backlog and name == "messages" else name, cell) for name, cell in _scalars(value))


def _listed(values: list[Any]) -> Iterable[RenderableType]:
    from braid.cli.transactions_output import list_parts, sink_list_parts

    if values and isinstance(values[0], TransactionInfo):
        yield from list_parts(values)
        return
    if values and isinstance(values[0], SinkInfo):
        yield from sink_list_parts(values)
        return
    for number, each in enumerate(values):
        if number:
            yield ""
        yield from _parts(each)


def _elsewhere(value: ScalableTopicInfo | ScalableTopicStats | TransactionInfo | SinkInfo) -> Iterable[RenderableType]:
    """What is shown by modules that use the tables of this one."""
    from braid.cli.scalable_output import metadata_parts, stats_parts
    from braid.cli.transactions_output import describe_parts, sink_parts

    if isinstance(value, SinkInfo):
        return sink_parts(value)
    if isinstance(value, TransactionInfo):
        return describe_parts(value)
    if isinstance(value, ScalableTopicInfo):
        return metadata_parts(value)
    return stats_parts(value, SystemClock().now_ms())


def _topics(value: Any, above: str = "") -> Iterable[tuple[str, str, TopicStats]]:
    """(bundle, topic, stats) of what a broker serves, which comes by namespace, bundle and domain."""
    for name, below in value.items():
        if isinstance(below, TopicStats):
            yield above.rpartition("/")[2] or "-", name, below
        elif isinstance(below, dict):
            yield from _topics(below, above if name in ("persistent", "segment") else f"{above}/{name}")


def _scalars(value: msgspec.Struct) -> list[tuple[str, Any]]:
    """The fields that are one value each; times as text."""
    found = []
    for field in msgspec.structs.fields(value):
        cell = getattr(value, field.name)
        if field.name.endswith(("_time_stamp", "_timestamp")) and isinstance(cell, int):
            cell = iso_seconds(cell) if cell > 0 else None
        if not isinstance(cell, dict | msgspec.Struct) and not (isinstance(cell, list) and cell and _is_record(cell[0])):
            found.append((field.name.replace("_", " "), cell))
    return found


def _is_record(value: Any) -> bool:
    return isinstance(value, msgspec.Struct)


def _topic(stats: TopicStats) -> Iterable[RenderableType]:
    rows: list[tuple[Any, ...]]
    yield pairs([*(row for row in _scalars(stats) if row[0] != "publishers"), ("deleted next", next_trim(stats.next_trim))])
    if isinstance(stats, PartitionedTopicStats) and stats.partitions:
        rows = [
            (name, each.owner_broker, each.msg_rate_in, each.msg_rate_out, backlog(each), each.storage_size)
            for name, each in stats.partitions.items()
        ]
        yield table(("partition", "owner", "in/s", "out/s", BACKLOG, "bytes"), rows, "Partitions")
    if stats.subscriptions:
        rows = [
            (name, each.type, each.msg_backlog, each.unacked_messages, each.msg_rate_out, len(each.consumers))
            for name, each in stats.subscriptions.items()
        ]
        yield table(("subscription", "type", BACKLOG, "unacked", "out/s", "consumers"), rows, "Subscriptions")
        yield from _held_up(stats)
    if stats.publishers:
        rows = [
            (each.producer_name, each.address, each.client_version, each.msg_rate_in, each.access_mode)
            for each in stats.publishers
        ]
        yield table(("producer", "address", "client", "in/s", "access"), rows, "Producers")


def next_trim(found: NextTrim) -> str:
    """What is deleted next, when and by which rule, as one cell."""
    if found.rule == "newest":
        return "nothing: only the newest ledger is left"
    count = f"{found.entries:,} entries" if found.messages is None else f"{found.messages:,} messages"
    if found.rule == "needed":
        return f"{count}, once no subscription and no open transaction needs them"
    when = "never" if found.at_ms is None else f"after {iso_seconds(found.at_ms)}"
    why = {
        "unread": f"{when}; no subscription has read them",
        "time": f"{when}, by policy",
        "size": "when the topic is larger than its policy allows",
    }
    return f"{count}, {why.get(found.rule, 'at the next look: nobody needs them')}"


def iso_seconds(ms: int) -> str:
    """A time for people."""
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="seconds")


def _held_up(stats: TopicStats) -> Iterable[RenderableType]:
    from rich.text import Text

    from braid.cli.scalable_output import blocked  # which uses the tables of this module

    now_ms = SystemClock().now_ms()
    for name, each in stats.subscriptions.items():
        for why in each.blocked_by:
            yield Text(printable(f"{name} is held up: {blocked(why, now_ms)}"))


def backlog(stats: TopicStats) -> int:
    """Entries that subscriptions have not acknowledged, added up."""
    return sum(each.msg_backlog for each in stats.subscriptions.values())


def _internal(stats: InternalStats, title: str = "") -> Iterable[RenderableType]:
    yield pairs((row for row in _scalars(stats) if row[0] != "ledgers"), title)
    if stats.ledgers:
        yield table(("ledger", "entries", "bytes"), [(each.ledger_id, each.entries, each.size) for each in stats.ledgers])
    if stats.cursors:
        rows = [
            (name, each.mark_delete_position, each.read_position, each.individually_deleted_messages)
            for name, each in stats.cursors.items()
        ]
        yield table(("cursor", "acknowledged up to", "next", "also acknowledged"), rows)


def _message(message: StoredMessage) -> Iterable[RenderableType]:
    fields: list[tuple[str, Any]] = [
        (name, value) for name, value in _scalars(message) if name not in ("payload", "is encrypted") and value is not None
    ]
    if message.properties:
        fields.append(("properties", message.properties))
    for number, payload in enumerate(message.payloads(), 1):
        fields.append((f"payload {number}" if message.batch_messages else "payload", payload.decode(errors="backslashreplace")))
    yield pairs(fields)


def _short(value: Any) -> str:
    """One cell."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, SegmentNode):
        return f"{value.segment_id} [{value.hash_range}]"
    if isinstance(value, float):
        return f"{value:,.1f}"
    if isinstance(value, list | tuple):
        return ", ".join(map(_short, value)) or "-"
    if isinstance(value, msgspec.Struct) and not isinstance(value, MessageId):
        value = dict(_scalars(value))
    if isinstance(value, dict):
        return ", ".join(f"{key}={_short(each)}" for key, each in value.items()) or "-"
    return "-" if value is None or value == "" else str(value)
