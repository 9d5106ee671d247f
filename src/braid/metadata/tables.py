"""The committed state: records by key, sorted collections, sorted index entries.

Owns the data structure only: no clock, no sessions, no pending writes. A collection is a sorted list of whole keys (within one
collection keys are ordered like names), shared with the record table, so that it costs no second string per record.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from sortedcontainers import SortedDict, SortedList

from braid.metadata.api import IndexSpan
from braid.metadata.journal import INDEX, KEY, Row
from braid.metadata.names import sequence_numbers


class Tables:
    """Rows and the orders they are found by."""

    __slots__ = ("_collections", "_indexes", "rows")

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self.rows: dict[str, Row] = {}
        self._collections: Any = SortedDict()  # parent -> SortedList[key]
        self._indexes: dict[str, Any] = {}  # index name -> SortedList[(secondary, key)]
        members: dict[str, list[str]] = {}
        entries: dict[str, list[tuple[str, str]]] = {}
        for row in rows:
            key = row[KEY]
            self.rows[key] = row
            members.setdefault(key[: key.rindex("/")], []).append(key)
            for name, secondary in row[INDEX]:
                entries.setdefault(name, []).append((secondary, key))
        for parent, keys in members.items():
            self._collections[parent] = SortedList(keys)
        for name, found in entries.items():
            self._indexes[name] = SortedList(found)

    def apply(self, key: str, row: Row | None) -> Row | None:
        """Store or remove one row; returns the one before."""
        old = self.rows.get(key)
        if row is not None:
            self.rows[key] = row
            if old is None:
                parent = key[: key.rindex("/")]
                members = self._collections.get(parent)
                if members is None:
                    self._collections[parent] = SortedList((key,))
                else:
                    members.add(key)
                if row[INDEX]:
                    self._enter(key, row[INDEX])
            elif old[INDEX] != row[INDEX]:
                self._leave(key, old[INDEX])
                self._enter(key, row[INDEX])
        elif old is not None:
            del self.rows[key]
            parent = key[: key.rindex("/")]
            members = self._collections[parent]
            members.remove(key)
            if not members:
                del self._collections[parent]
            self._leave(key, old[INDEX])
        return old

    def keys(self, parent: str, low: str, high: str, limit: int | None = None) -> list[str]:
        """Keys of a collection with low <= key < high, in order."""
        members = self._collections.get(parent)
        if members is None:
            return []
        return list(islice(members.irange(low, high, (True, False)), limit))

    def span(self, parent: str, low: str, high: str, limit: int | None = None) -> list[Row]:
        """Rows of a collection with low <= key < high, in order."""
        rows = self.rows
        return [rows[key] for key in self.keys(parent, low, high, limit)]

    def index_span(self, span: IndexSpan, limit: int | None = None) -> list[Row]:
        """Rows with an entry in the span, ordered by (secondary, key)."""
        entries = self._indexes.get(span.name)
        if entries is None:
            return []
        low = None if span.lo is None else (span.lo, "")
        high = None if span.hi is None else (span.hi, "")
        rows = self.rows
        return [rows[key] for _, key in islice(entries.irange(low, high, (True, False)), limit)]

    def below(self, key: str) -> Iterator[Row]:
        """The row of a key and of everything below it, parents first."""
        if key in self.rows:
            yield self.rows[key]
        parents = [key] if key in self._collections else []
        parents.extend(self._collections.irange(key + "/", key + "0", (True, False)))
        for parent in parents:
            for member in self._collections[parent]:
                yield self.rows[member]

    def last_of_sequence(self, prefix: str) -> tuple[int, ...] | None:
        """Numbers of the highest stored member of a sequence."""
        members = self._collections.get(prefix[: prefix.rindex("/")])
        if members is None:
            return None
        for key in members.irange(prefix + "-0", prefix + "-:", (True, False), reverse=True):  # ':' follows '9'
            numbers = sequence_numbers(key, prefix)
            if numbers is not None:
                return numbers
        return None

    def _enter(self, key: str, index: tuple[tuple[str, str], ...]) -> None:
        for name, secondary in index:
            entries = self._indexes.get(name)
            if entries is None:
                self._indexes[name] = SortedList(((secondary, key),))
            else:
                entries.add((secondary, key))

    def _leave(self, key: str, index: tuple[tuple[str, str], ...]) -> None:
        for name, secondary in index:
            entries = self._indexes[name]
            entries.remove((secondary, key))
            if not entries:
                del self._indexes[name]
