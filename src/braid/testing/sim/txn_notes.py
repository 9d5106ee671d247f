"""What the metadata store shows of transactions, as events: their operations, when each is decided and collected; and what is
left over.

Looks at rows; must not change anything.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from braid.metadata.journal import Row
from braid.metadata.tables import Tables
from braid.model.names import TopicName
from braid.model.txn import TxnId
from braid.testing.sim.history import History
from braid.txn import records


class TxnNotes:
    """Writes down every decision of a transaction."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._states: dict[str, str] = {}

    def listen(self, tables: Tables) -> None:
        """Look at every row that `tables` is given from now on, and at those it has."""
        for key, row in sorted(tables.rows.items()):
            self.changed(key, row)
        notes = self

        class NotedTables(type(tables)):  # type: ignore[misc]
            __slots__ = ()

            def apply(self, key: str, row: Row | None) -> Row | None:
                old: Row | None = super().apply(key, row)
                notes.changed(key, row)
                return old

        tables.__class__ = NotedTables

    def changed(self, key: str, row: Row | None) -> None:
        if key.startswith(records.OPS + "/") and row is not None:
            op = records.decode_op(key, row[-1])
            log = TopicName.parse(op.segment).managed_ledger_name
            self._history.add("store", "info", "txn-op", [log, op.kind], txn=str(records.op_txn(key)))
        if not is_header(key):
            return
        name = key.rpartition("/")[2]
        if row is None:
            if self._states.pop(name, None) is not None:
                self._history.add("store", "info", "collected", txn=name)
            return
        header = records.decode_header(key, row[-1])
        if header.state != self._states.get(name, "OPEN"):
            self._history.add("store", "info", "decided", header.state, txn=name)
        self._states[name] = header.state


def is_header(key: str) -> bool:
    return key.startswith(records.HEADERS + "/")


def open_transactions(rows: Mapping[str, Row]) -> list[TxnId]:
    """In the order of their keys."""
    return [
        TxnId.parse(key.rpartition("/")[2])
        for key, row in sorted(rows.items())
        if is_header(key) and records.decode_header(key, row[-1]).is_open
    ]


def coordinators(rows: Mapping[str, Row]) -> list[str]:
    """Hosts of the brokers that lead a coordinator partition, in the order of the partitions' paths."""
    leading = [msgspec.json.decode(row[-1]) for key, row in sorted(rows.items()) if key.startswith(records.COORDINATORS + "/")]
    return [str(each["brokerId"]).partition(":")[0] for each in leading]


def left_of_transactions(rows: Mapping[str, Row]) -> dict[str, list[str]]:
    """What should be gone when every transaction is over and collected. Aborted records stay until their data is trimmed."""
    return {
        what: sorted(key for key in rows if key.startswith(root + "/"))
        for what, root in (
            ("transaction headers", records.HEADERS),
            ("transaction operations", records.OPS),
            ("sub-transaction records", records.SUBS),
        )
    }
