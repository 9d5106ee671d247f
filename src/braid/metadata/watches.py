"""Watches: folded views of a range, fed by the engine's commits and read at the caller's own speed.

Owns who watches what and what each watcher has not read yet. A watcher keeps, per key, only the newest unread state and whether
its reader knows the key; a key that came and went unread is forgotten. Memory is bounded by the keys in range (INV17). Never
decides anything about the store. The engine has no gaps, so a watch has exactly one `Synced`, after the snapshot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Protocol, Self, TypeAlias

from braid.errors import BraidError
from braid.metadata.api import Delete, Event, IndexSpan, Put, Record, Span, Synced
from braid.metadata.journal import INDEX, KEY, VERSION, Row
from braid.metadata.names import check_index_span, check_key, sequence_numbers, span_bounds
from braid.metadata.tables import Tables

FOLLOW_CHUNK = 256
"""Records a follower reads ahead."""

ToRecord: TypeAlias = Callable[[Row], Record]


class Watcher(Protocol):
    """Something that is told of each committed change in its range."""

    holder: object
    """The handle it belongs to."""

    def changed(self, key: str, old: Row | None, new: Row | None) -> None: ...

    def end(self, error: BraidError) -> None:
        """The store or the handle is closing."""
        ...


# Insertion-ordered, so that a seeded run wakes readers in the same order every time.
_Places: TypeAlias = dict[str, dict[Watcher, None]]


class WatchBook:
    """All watchers, found by what they watch."""

    def __init__(self) -> None:
        self._by_key: _Places = {}
        self._by_parent: _Places = {}
        self._by_ancestor: _Places = {}
        self._by_index: _Places = {}
        self._places: dict[Watcher, tuple[_Places, str]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def add_key(self, key: str, watcher: Watcher) -> None:
        self._add(self._by_key, key, watcher)

    def add_parent(self, parent: str, watcher: Watcher) -> None:
        self._add(self._by_parent, parent, watcher)

    def add_ancestor(self, key: str, watcher: Watcher) -> None:
        self._add(self._by_ancestor, key, watcher)

    def add_index(self, name: str, watcher: Watcher) -> None:
        self._add(self._by_index, name, watcher)

    def remove(self, watcher: Watcher) -> None:
        """Forget a watcher; fine if it is gone."""
        place = self._places.pop(watcher, None)
        if place is not None:
            table, where = place
            del table[where][watcher]
            if not table[where]:
                del table[where]

    def end(self, error: BraidError, holder: object | None = None) -> None:
        """Every reader (of one holder) is told why no more will come."""
        for watcher in list(self._places):
            if holder is None or watcher.holder is holder:
                watcher.end(error)

    def changed(self, key: str, old: Row | None, new: Row | None) -> None:
        """A commit replaced `old` by `new`."""
        if not self._places:
            return
        for watcher in self._by_key.get(key, ()):
            watcher.changed(key, old, new)
        if self._by_parent:
            for watcher in self._by_parent.get(key[: key.rindex("/")], ()):
                watcher.changed(key, old, new)
        if self._by_ancestor:
            path = key
            while path:
                for watcher in self._by_ancestor.get(path, ()):
                    watcher.changed(key, old, new)
                path = path[: path.rindex("/")]
        if self._by_index:
            indexes = {name for row in (old, new) if row is not None for name, _ in row[INDEX]}
            for name in sorted(indexes & self._by_index.keys()):
                for watcher in self._by_index[name]:
                    watcher.changed(key, old, new)

    def _add(self, table: _Places, where: str, watcher: Watcher) -> None:
        table.setdefault(where, {})[watcher] = None
        self._places[watcher] = (table, where)


class _Reader:
    """The waiting side of a watcher: one reader, woken when there is something to read."""

    def __init__(self, book: WatchBook, holder: object) -> None:
        self.holder = holder
        self._book = book
        self._error: BraidError | None = None
        self._waiting: asyncio.Future[None] | None = None

    def end(self, error: BraidError) -> None:
        self._error = error
        self._book.remove(self)  # type: ignore[arg-type]  # every subclass has `changed`
        self._wake()

    def _wake(self) -> None:
        waiting = self._waiting
        if waiting is not None:
            self._waiting = None
            if not waiting.done():
                waiting.set_result(None)

    async def _wait(self) -> None:
        self._waiting = asyncio.get_running_loop().create_future()
        await self._waiting

    async def __aexit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._book.remove(self)  # type: ignore[arg-type]


class Watch(_Reader):
    """One folded view; an async context manager that is its own iterator."""

    def __init__(
        self,
        book: WatchBook,
        tables: Tables,
        what: str | Span | IndexSpan,
        *,
        recursive: bool,
        holder: object,
        to_record: ToRecord,
    ) -> None:
        super().__init__(book, holder)
        self._tables = tables
        self._what = what
        self._recursive = recursive
        self._to_record = to_record
        self._low = self._high = self._parent = ""
        if isinstance(what, Span):
            self._parent, self._low, self._high = span_bounds(what)
        elif isinstance(what, IndexSpan):
            check_index_span(what)
        else:
            check_key(what)
        self._unread: dict[str, tuple[Row | None, bool]] = {}  # key -> newest state, does the reader know the key
        self._batch: list[tuple[str, Row | None]] = []  # reversed: read from the end
        self._synced = False

    async def __aenter__(self) -> Self:
        book, what = self._book, self._what
        rows: Iterable[Row]
        if isinstance(what, Span):
            book.add_parent(self._parent, self)
            rows = self._tables.span(self._parent, self._low, self._high)
        elif isinstance(what, IndexSpan):
            book.add_index(what.name, self)
            rows = self._tables.index_span(what)
        elif self._recursive:
            book.add_ancestor(what, self)
            rows = self._tables.below(what)
        else:
            book.add_key(what, self)
            row = self._tables.rows.get(what)
            rows = () if row is None else (row,)
        self._batch = [(row[KEY], row) for row in rows]
        self._batch.reverse()
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        while True:
            if self._error is not None:
                raise self._error
            if self._batch:
                key, row = self._batch.pop()
                return Delete(key) if row is None else Put(self._to_record(row))
            if not self._synced:
                self._synced = True
                return Synced(rebuilt=False)
            if self._unread:
                self._batch = [(key, row) for key, (row, _known) in self._unread.items()]
                self._batch.reverse()
                self._unread.clear()
            else:
                await self._wait()

    def changed(self, key: str, old: Row | None, new: Row | None) -> None:
        if not self._covers(key, old):
            old = None
        if not self._covers(key, new):
            new = None
        if old is None and new is None:
            return
        unread = self._unread.pop(key, None)  # re-entered at the end: unread keys stay in commit order
        known = old is not None if unread is None else unread[1]
        if new is not None or known:
            self._unread[key] = (new, known)
            self._wake()

    def unread(self) -> int:
        """How many keys wait for the reader."""
        return len(self._unread) + len(self._batch)

    def _covers(self, key: str, row: Row | None) -> bool:
        what = self._what
        if row is None:
            return False
        if isinstance(what, Span):
            return self._low <= key < self._high
        if isinstance(what, IndexSpan):
            return any(
                name == what.name and (what.lo is None or what.lo <= entry) and (what.hi is None or entry < what.hi)
                for name, entry in row[INDEX]
            )
        return True


class Follow(_Reader):
    """A reader of a sequence that never falls behind for good: it reads from the tables, commits only wake it."""

    def __init__(
        self, book: WatchBook, tables: Tables, prefix: str, *, after: str | None, holder: object, to_record: ToRecord
    ) -> None:
        super().__init__(book, holder)
        check_key(prefix)
        self._tables = tables
        self._prefix = prefix
        self._parent = prefix[: prefix.rindex("/")]
        self._next = prefix + "-0" if after is None else max(after + "\x00", prefix + "-0")
        self._to_record = to_record
        self._ahead: list[Row] = []  # reversed: read from the end

    async def __aenter__(self) -> Self:
        self._book.add_parent(self._parent, self)
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Record:
        while True:
            if self._error is not None:
                raise self._error
            while self._ahead:
                row = self._ahead.pop()
                now = self._tables.rows.get(row[KEY])
                if now is not None and now[VERSION] >= row[VERSION]:  # it may have been trimmed meanwhile
                    return self._to_record(now)
            found = self._tables.span(self._parent, self._next, self._prefix + "-:", FOLLOW_CHUNK)
            if not found:
                await self._wait()
                continue
            self._next = found[-1][KEY] + "\x00"
            self._ahead = [row for row in reversed(found) if sequence_numbers(row[KEY], self._prefix)]

    def changed(self, key: str, old: Row | None, new: Row | None) -> None:
        if new is not None and key >= self._next:
            self._wake()
