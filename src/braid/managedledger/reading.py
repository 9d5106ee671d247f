"""`LogReader`: entries of a log out of its ledgers.

Owns the open readers (bounded) and the step from stored bytes to `Entry` (`decode`). Knows no cursors and no cache.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import NamedTuple

from braid.errors import StorageUnavailable
from braid.ledger.api import LedgerReader, LedgerStore
from braid.managedledger.api import Entry, LedgerResolver
from braid.wire.entries import message_count, split_entry


class LogReader:
    """The ledgers a log has open for reading, least recently used first."""

    __slots__ = ("_max_open", "_open", "_resolver")

    def __init__(self, resolver: LedgerResolver, max_open: int) -> None:
        self._resolver = resolver
        self._max_open = max_open
        self._open: OrderedDict[int, LedgerReader] = OrderedDict()

    async def read(self, ledger_id: int, properties: Mapping[str, str], first: int, last: int, max_bytes: int) -> list[bytes]:
        """Entries `first..last` as stored, confirmed by the writer; may end early by `max_bytes`, after at least one."""
        reader = await self._reader(ledger_id, properties)
        if reader.last_confirmed < last and (last := min(last, await reader.refresh())) < first:
            raise StorageUnavailable(f"Entry {first} of ledger {ledger_id} is confirmed but not readable yet; try again.")
        return await reader.read(first, last, max_bytes)

    async def length_before(self, ledger_id: int, properties: Mapping[str, str], entry_id: int) -> int:
        """Bytes, as stored, of the entries before this one."""
        reader = await self._reader(ledger_id, properties)
        if reader.last_confirmed + 1 < entry_id and await reader.refresh() + 1 < entry_id:
            raise StorageUnavailable(
                f"Entry {entry_id - 1} of ledger {ledger_id} is confirmed but not readable yet; try again."
            )
        return await reader.length_before(entry_id)

    async def forget(self, ledger_id: int) -> None:
        """The ledger is about to be deleted."""
        if (reader := self._open.pop(ledger_id, None)) is not None:
            await reader.close()

    async def close(self) -> None:
        while self._open:
            _ledger_id, reader = self._open.popitem()
            await reader.close()

    async def _reader(self, ledger_id: int, properties: Mapping[str, str]) -> LedgerReader:
        found = self._open.get(ledger_id)
        if found is not None:
            self._open.move_to_end(ledger_id)
            return found
        opened = await self._resolver.for_ledger(ledger_id, properties).open(ledger_id, fence=False)
        found = self._open.setdefault(ledger_id, opened)
        if found is not opened:  # somebody else opened it meanwhile
            await opened.close()
        while len(self._open) > self._max_open:
            _oldest, reader = self._open.popitem(last=False)
            await reader.close()
        return found


def decode(ledger_id: int, first: int, stored: list[bytes]) -> list[Entry]:
    """Consecutive stored entries as dispatched. Indexes are dense, so only the first entry's messages must be counted."""
    entries = []
    previous = None
    for entry_id, data in enumerate(stored, first):
        append_ms, index, txn, offset = split_entry(data)
        body = data[offset:]
        messages = message_count(body) if previous is None else index - previous
        previous = index
        entries.append(Entry(ledger_id, entry_id, index, messages, append_ms, txn, body))
    return entries


class LedgerEnd(NamedTuple):
    """What a ledger turned out to hold once it was fenced."""

    entries: int
    size: int
    last_index: int
    last_append_ms: int


async def settled(store: LedgerStore, ledger_id: int) -> LedgerEnd:
    """Fence the ledger and read where it ends; index and time are -1 and 0 if it is empty."""
    reader = await store.open(ledger_id, fence=True)
    try:
        last = reader.last_confirmed
        size = (await store.metadata(ledger_id)).length
        if last < 0:
            return LedgerEnd(0, size, -1, 0)
        append_ms, index, _txn, _offset = split_entry((await reader.read(last, last))[0])
        return LedgerEnd(last + 1, size, index, append_ms)
    finally:
        await reader.close()
