"""`LedgerStore`: the port through which logs, cursors and schemas are stored, with the semantics of a BookKeeper client.

A ledger is written by one writer, grows by entries numbered 0, 1, 2, ... and is closed once. Opening it with `fence=True` stops
its writer for good and settles its end; two openers always agree on that end. Ids are positive, grow with each `create` and are
never reused (INV3 rests on this). Nothing here knows topics.

The data path has no future and no task per entry: `LedgerWriter.append` queues an entry and returns its id at once; when a
commit group is durable the writer's listener is told the last confirmed id, in order, on the loop (INV1).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Protocol

import msgspec

from braid.errors import EntryNotFound, InvalidArgument, LedgerError

NO_ENTRY = -1
"""Last confirmed entry of an empty ledger."""


class LedgerMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a ledger without reading it."""

    ledger_id: int
    is_closed: bool
    last_entry: int = NO_ENTRY
    """Last entry; final only if closed."""
    length: int = 0
    """Sum of entry sizes in bytes; final only if closed."""
    created_ms: int = 0
    custom: Mapping[str, bytes] = {}


class LedgerListener(Protocol):
    """Who is told how far a writer got. Calls come on the loop, in order."""

    def ledger_advanced(self, last_confirmed: int) -> None:
        """Every entry up to `last_confirmed` is durable. At most one call per writer and commit group."""
        ...

    def ledger_failed(self, error: LedgerError) -> None:
        """No entry beyond the last confirmed one will ever be confirmed; the writer takes no more. Called once.

        Only a new `open` tells whether unconfirmed entries survived, except after `LedgerStoreReadOnly`: then they did not.
        """
        ...


class LedgerWriter(Protocol):
    """The one writer of a ledger."""

    ledger_id: int
    last_pushed: int
    """Id of the newest entry handed to `append`, -1 if none."""
    last_confirmed: int
    length: int
    """Bytes of all pushed entries."""

    def append(self, head: bytes, body: bytes) -> int:
        """Queue the entry `head + body` and return its id. Raises LedgerFenced, LedgerClosed, LedgerStoreReadOnly or
        LedgerOverloaded; then the entry was not taken."""
        ...

    async def add(self, data: bytes) -> int:
        """Append one entry and wait until it is confirmed."""
        ...

    async def close(self) -> LedgerMetadata:
        """Wait for what was pushed, then close the ledger durably. Idempotent; a fenced writer raises LedgerFenced."""
        ...


class LedgerReader(Protocol):
    """A view of a ledger's confirmed entries."""

    ledger_id: int
    last_confirmed: int
    is_closed: bool

    async def read(self, first: int, last: int, max_bytes: int = 0) -> list[bytes]:
        """Entries `first..last` inclusive, in order, each with its checksum verified.

        With `max_bytes` > 0 the list may end early, after at least one entry. Raises EntryNotFound beyond the last confirmed
        entry, EntryCorrupt, LedgerNotFound if it was deleted meanwhile.
        """
        ...

    async def length_before(self, entry_id: int) -> int:
        """Sum of the sizes of the entries before this one, in bytes; of all confirmed ones at `last_confirmed + 1`. Costs no
        more than reading one entry, wherever it is: BookKeeper stores this number with every entry. Raises as `read` does."""
        ...

    async def refresh(self) -> int:
        """Ask again how far the writer got; returns and stores `last_confirmed`."""
        ...

    async def close(self) -> None: ...


class LedgerStore(Protocol):
    """Creates, opens, lists and deletes ledgers. One object is one storage cluster."""

    async def create(
        self,
        *,
        listener: LedgerListener | None = None,
        custom: Mapping[str, bytes] | None = None,
        ledger_id: int | None = None,
    ) -> LedgerWriter:
        """A new ledger, durable before this returns. A given `ledger_id` must be free (LedgerExists) and pushes the
        allocator beyond itself."""
        ...

    async def open(self, ledger_id: int, *, fence: bool) -> LedgerReader:
        """With `fence`: stop any writer, settle the end, close the ledger durably, and only then return. Without: read what
        is confirmed, disturbing nobody."""
        ...

    async def metadata(self, ledger_id: int) -> LedgerMetadata:
        """Raises LedgerNotFound."""
        ...

    async def delete(self, ledger_id: int) -> None:
        """Remove the ledger; fine if it is gone. Its writer is fenced."""
        ...

    def ledgers(self) -> AsyncIterator[int]:
        """Ids of all ledgers, ascending."""
        ...

    async def close(self) -> None:
        """Make everything pushed durable and release the store."""
        ...


def check_entry_range(ledger_id: int, first: int, last: int, last_confirmed: int) -> None:
    """Refuse a read that is empty or reaches beyond the confirmed entries."""
    if first < 0 or last < first:
        raise InvalidArgument(f"Cannot read entries {first} to {last} of ledger {ledger_id}: the range is empty or negative.")
    if last > last_confirmed:
        raise EntryNotFound(f"Ledger {ledger_id} has confirmed entries up to {last_confirmed}; entry {last} is beyond that.")
