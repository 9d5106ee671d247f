"""`Handle`: one holder's `MetadataStore` on an engine, with its own session and heartbeat.

Owns argument checks, the handle's session and the conversion of rows to records. A handle whose session was lost gets a new one
when it is next used; records of the old session are then no longer `mine`. The heartbeat runs on the holder's clock and can be
paused, which is how a test (or a paused process) loses its session.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Final, Generic, Self, TypeVar

from braid.errors import Closed, InvalidArgument, SessionLost, ValueTooLarge
from braid.metadata.api import Capabilities, Event, IndexSpan, Record, Session, SessionState, Span
from braid.metadata.journal import KEY, PARTITION, Row, record_of
from braid.metadata.names import MAX_NAME, check_index, check_index_span, check_key, span_bounds, wrong_partition
from braid.metadata.sessions import Heartbeat, Lease
from braid.metadata.watches import Follow, Watch
from braid.runtime.clock import Clock

if TYPE_CHECKING:
    from braid.metadata.engine import Engine

T = TypeVar("T")

MAX_VALUE: Final = 1 << 20
"""Bytes of one value."""
DELETE_CHUNK: Final = 1000
"""Records that one commit of `delete_span` removes at most."""
TURN: Final = 512
"""Items a scan yields before it lets other tasks run."""

CAPABILITIES: Final = Capabilities(
    linearizable_get=True,
    snapshot_scan=True,
    unique_versions=True,
    native_index=True,
    targeted_index_watch=True,
    max_value=MAX_VALUE,
    max_name=MAX_NAME,
)


class Handle:
    """A session and everything that can be done in it."""

    def __init__(self, engine: Engine, name: str, clock: Clock) -> None:
        self.name = name
        self._engine = engine
        self._lease: Lease = engine.open_session(name)
        self._is_closed = False
        self._heartbeat = Heartbeat(clock, self._lease.timeout, self.heartbeat)
        self._heartbeat.start()

    @property
    def session(self) -> Session:
        return self._lease

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    @property
    def is_read_only(self) -> bool:
        """Whether the disk is full."""
        return self._engine.is_read_only

    def heartbeat(self) -> None:
        """Renew the session now; without effect on one that ended."""
        self._lease.renew()

    def pause_heartbeat(self) -> None:
        """Stop renewing by itself, as a paused or killed holder would."""
        self._heartbeat.stop()

    def resume_heartbeat(self) -> None:
        """Renew now and by itself again."""
        if not self._is_closed:
            self.heartbeat()
            self._heartbeat.start()

    async def get(self, key: str, *, partition: str | None = None, fresh: bool = False) -> Record | None:
        session = self._live()
        row = self._engine.tables.rows.get(key)
        if row is None:
            check_key(key)
            return None
        self._check_partition(row, partition)
        return record_of(row, session.id)

    async def put(
        self,
        key: str,
        value: bytes,
        *,
        expected: int | None = None,
        ephemeral: bool = False,
        partition: str | None = None,
        index: Mapping[str, str] | None = None,
    ) -> Record:
        session = self._live()
        if key not in self._engine.tables.rows:
            check_key(key)
        _check_value(key, value)
        if ephemeral and index:
            raise InvalidArgument(f"The ephemeral record {key} cannot have index entries.")
        entries = check_index(index) if index else ()
        owner = session.id if ephemeral else None
        row = await self._engine.put(key, value, expected, owner, partition, entries)
        if owner is not None and not self._engine.is_live(owner):
            raise SessionLost(f"The session {owner} ended while it wrote {key}; the record is gone with it.")
        return record_of(row, session.id)

    async def append(
        self,
        prefix: str,
        value: bytes,
        *,
        partition: str,
        deltas: Sequence[int] = (1,),
        index: Mapping[str, str] | None = None,
    ) -> Record:
        session = self._live()
        check_key(prefix)
        _check_value(prefix, value)
        if not deltas or deltas[0] < 1 or any(delta < 0 for delta in deltas):
            raise InvalidArgument(
                f"Deltas of the sequence {prefix} must be positive (the first) or not negative, not {deltas}."
            )
        entries = check_index(index) if index else ()
        return record_of(await self._engine.append(prefix, value, deltas, partition, entries), session.id)

    async def delete(self, key: str, *, expected: int | None = None, partition: str | None = None) -> bool:
        self._live()
        check_key(key)
        return await self._engine.delete(key, expected, partition)

    async def delete_span(self, span: Span, *, partition: str | None = None, keep_last: bool = False) -> None:
        self._live()
        engine = self._engine
        rows = engine.tables.span(*span_bounds(span))
        self._check_partitions(rows, partition)
        keys = [row[KEY] for row in rows if engine.will_exist(row[KEY])]
        if keep_last and keys:
            keys.pop()
        for start in range(0, len(keys), DELETE_CHUNK):
            await engine.delete_all(keys[start : start + DELETE_CHUNK])

    def names(self, span: Span, *, partition: str | None = None, fresh: bool = False) -> AsyncIterator[str]:
        self._live()
        rows = self._engine.tables.span(*span_bounds(span))
        self._check_partitions(rows, partition)
        start = len(span.parent.rstrip("/")) + 1
        return _Listing(rows, lambda row: row[KEY][start:])

    def scan(
        self, span: Span | IndexSpan, *, partition: str | None = None, limit: int | None = None, fresh: bool = False
    ) -> AsyncIterator[Record]:
        session = self._live()
        if limit is not None and limit < 0:
            raise InvalidArgument(f"The limit of a scan cannot be {limit}.")
        if isinstance(span, Span):
            rows = self._engine.tables.span(*span_bounds(span), limit)
        else:
            check_index_span(span)
            rows = self._engine.tables.index_span(span, limit)
        self._check_partitions(rows, partition)
        return _Listing(rows, lambda row: record_of(row, session.id))

    def watch(
        self, what: str | Span | IndexSpan, *, recursive: bool = False, partition: str | None = None
    ) -> AbstractAsyncContextManager[AsyncIterator[Event]]:
        self._live()
        if recursive and not isinstance(what, str):
            raise InvalidArgument("Only a watch on a key can be recursive; a span is one collection or index.")
        is_point = isinstance(what, str) and not recursive
        engine = self._engine

        def to_record(row: Row) -> Record:
            if is_point or partition is not None:
                self._check_partition(row, partition)
            return record_of(row, self._lease.id)

        return Watch(engine.watches, engine.tables, what, recursive=recursive, holder=self, to_record=to_record)

    def follow(
        self, prefix: str, *, partition: str, after: str | None = None
    ) -> AbstractAsyncContextManager[AsyncIterator[Record]]:
        self._live()
        engine = self._engine

        def to_record(row: Row) -> Record:
            self._check_partition(row, partition)
            return record_of(row, self._lease.id)

        return Follow(engine.watches, engine.tables, prefix, after=after, holder=self, to_record=to_record)

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._heartbeat.stop()
        await self._engine.close_handle(self, self._lease)

    def _live(self) -> Lease:
        """The session to act in; a lost one is replaced."""
        if self._is_closed:
            raise Closed(f"The metadata handle {self.name} was closed.")
        self._engine.check_open()
        if self._lease.state is SessionState.LOST:
            self._lease = self._engine.open_session(self.name)
        return self._lease

    def _check_partition(self, row: Row, partition: str | None) -> None:
        if row[PARTITION] != partition:
            raise wrong_partition(row[KEY], row[PARTITION], partition)

    def _check_partitions(self, rows: Sequence[Row], partition: str | None) -> None:
        """A listing that names a partition finds only that one's records elsewhere, so others are a caller's mistake."""
        if partition is not None:
            for row in rows:
                self._check_partition(row, partition)


class _Listing(Generic[T]):
    """An async iterator over a snapshot that lets other tasks run now and then."""

    def __init__(self, rows: list[Row], convert: Callable[[Row], T]) -> None:
        self._rows = rows
        self._convert = convert
        self._next = 0

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        position = self._next
        if position >= len(self._rows):
            raise StopAsyncIteration
        self._next = position + 1
        if self._next % TURN == 0:
            await asyncio.sleep(0)
        return self._convert(self._rows[position])


def _check_value(key: str, value: bytes) -> None:
    if type(value) is not bytes:
        raise InvalidArgument(f"The value of {key} must be bytes, not {type(value).__name__}.")
    if len(value) > MAX_VALUE:
        raise ValueTooLarge(f"The value of {key} has {len(value)} bytes, above the limit of {MAX_VALUE}.")
