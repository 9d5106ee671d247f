"""What the metadata store shows of scalable topics, as events: each version of a layout, segment topics as they are made and
sealed, and what is left over. Looks at rows; must not change anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from braid.managedledger.records import ROOT, LogRecord, decode_record
from braid.metadata.journal import Row
from braid.metadata.tables import Tables
from braid.model.names import TopicName
from braid.model.names import decode as decode_name
from braid.scalable import records
from braid.scalable.records import TOPICS, ScalableTopicMetadata, subscriptions_path
from braid.testing.sim.history import History

SEGMENT = "segment"


class LayoutNotes:
    """Writes down every change of the records of scalable topics and of their segments' logs."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._logs: dict[str, bool] = {}  # whether sealed

    def listen(self, tables: Tables) -> None:
        """Look at every row that `tables` is given from now on, and at those it has."""
        for key, row in sorted(tables.rows.items()):
            self.changed(key, row)
        notes = self

        class NotedTables(type(tables)):  # type: ignore[misc]
            __slots__ = ()

            def apply(self, key: str, row: Row | None) -> Row | None:
                old: Row | None = super().apply(key, row)
                notes.changed(key, row, old)
                return old

        tables.__class__ = NotedTables

    def changed(self, key: str, row: Row | None, old: Row | None = None) -> None:
        if is_topic(key):
            if row is not None:
                self._topic(key, row)
            elif old is not None:
                self._history.add("store", "info", "topic-gone", topic_of(key))
        elif is_registration(key):
            if row is None and old is not None:
                parts = key.split("/")
                self._history.add(
                    "store", "info", "unregistered", [topic_of(key), decode_name(parts[6]), decode_name(parts[8])]
                )
        elif is_segment_log(key):
            if row is not None:
                self._log(key, decode_record(LogRecord, key, row[-1]))
            else:
                self._logs.pop(key, None)

    def _topic(self, key: str, row: Row) -> None:
        record = records.decode(ScalableTopicMetadata, key, row[-1])
        name = topic_of(key)
        pending = record.pending_operation
        value = {
            "topic": name,
            "incarnation": record.incarnation,
            "leader": record.leader_epoch,
            "next": record.next_segment_id,
            "segments": {
                str(number): [
                    each.hash_range.start,
                    each.hash_range.end,
                    str(each.state),
                    list(each.parent_ids),
                    list(each.child_ids),
                ]
                for number, each in sorted(record.segments.items())
            },
            "pending": None
            if pending is None
            else {
                "kind": pending.kind,
                "stage": pending.stage,
                "parents": list(pending.parents),
                "children": [each.segment_id for each in pending.children],
            },
        }
        self._history.add("store", "info", "layout", value, epoch=record.epoch)
        if record.is_at_rest:
            self._history.add("store", "info", "rest", name, epoch=record.leader_epoch)

    def _log(self, key: str, record: LogRecord) -> None:
        segment = segment_of(key)
        value = [str(segment.parent), str(segment.descriptor.segment_id if segment.descriptor else -1)]
        if key not in self._logs:
            self._history.add("store", "info", "segment-made", value)
        is_sealed = not record.is_deleted and record.terminated_position is not None
        if is_sealed and not self._logs.get(key, False):
            self._history.add("store", "info", "segment-sealed", value)
        self._logs[key] = is_sealed


def is_topic(key: str) -> bool:
    """Whether it is the record of a scalable topic."""
    return key.startswith(TOPICS + "/") and key.count("/") == 4


def is_controller(key: str) -> bool:
    """Whether it is the election record of a scalable topic; its value is the leader's broker id."""
    return key.startswith(TOPICS + "/") and key.count("/") == 5 and key.endswith("/controller")


def is_registration(key: str) -> bool:
    """Whether it is the registration of a consumer of a scalable topic's subscription."""
    return key.startswith(TOPICS + "/") and key.count("/") == 8 and key.split("/")[7] == "consumers"


def is_segment_log(key: str) -> bool:
    """Whether it is the record of a segment's log (not of one of its cursors)."""
    return key.startswith(ROOT) and key.count("/") == 6 and key.split("/")[4] == SEGMENT


def topic_of(key: str) -> str:
    """Name of the topic whose record it is."""
    tenant, namespace, local = key.split("/")[2:5]
    return str(TopicName.from_managed_ledger_name(f"{tenant}/{namespace}/{local}"))


def segment_of(key: str) -> TopicName:
    return TopicName.from_managed_ledger_name(key.removeprefix(ROOT).strip("/"))


def topic_records(rows: Mapping[str, Row]) -> dict[str, ScalableTopicMetadata]:
    """The scalable topics there are, by name."""
    return {
        topic_of(key): records.decode(ScalableTopicMetadata, key, row[-1]) for key, row in sorted(rows.items()) if is_topic(key)
    }


def subscriptions_of(rows: Mapping[str, Row], topic: str) -> list[str]:
    """Names of a topic's subscriptions that have a record."""
    span = subscriptions_path(TopicName.parse(topic)) + "/"
    return [decode_name(key.removeprefix(span)) for key in sorted(rows) if key.startswith(span) and "/" not in key[len(span) :]]


def outside(rows: Mapping[str, Row]) -> dict[str, list[str]]:
    """What should not be there when nothing is under way: segment topics that no DAG lists and segments without a topic,
    operations that are pending, records of topics or subscriptions that are gone."""
    topics = topic_records(rows)
    listed: dict[str, bool] = {}
    for name, record in topics.items():
        topic = TopicName.parse(name)
        for each in record.segments.values():
            if each.legacy_topic_name is None:
                segment = topic.segment(records.from_record(each).hash_range, each.segment_id)
                listed[segment.managed_ledger_name] = each.state == "ACTIVE"
    logs = {key.removeprefix(ROOT).strip("/") for key in rows if is_segment_log(key)}
    orphans = [key for key in rows if key.startswith(TOPICS + "/") and key.count("/") > 4 and not _has_topic(key, rows)]
    return {
        "segment topics outside the DAG": sorted(logs - listed.keys()),
        "active segments without a topic": sorted(name for name, is_active in listed.items() if is_active and name not in logs),
        "pending operations": sorted(name for name, record in topics.items() if record.pending_operation is not None)
        + sorted(_pending_subscriptions(rows)),
        "records below a topic that is gone": sorted(orphans),
    }


def _has_topic(key: str, rows: Mapping[str, Row]) -> bool:
    return "/".join(key.split("/")[:5]) in rows


def _pending_subscriptions(rows: Mapping[str, Row]) -> Iterable[str]:
    for key, row in rows.items():
        parts = key.split("/")
        if key.startswith(TOPICS + "/") and len(parts) == 7 and parts[5] == "subscriptions":
            shape: Any = msgspec.json.decode(row[-1] or b"{}")
            if shape.get("pending") is not None:
                yield key
