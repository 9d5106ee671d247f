"""`LocalLedgerReader`: reads confirmed entries, from memory if they are still there, from the ledger's file otherwise."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from braid.errors import Closed, LedgerError, LedgerNotFound, LedgerStoreFailed
from braid.ledger.api import check_entry_range
from braid.ledger.backends.local.ledgerfile import BlockReader
from braid.ledger.backends.local.state import LedgerState
from braid.runtime.threads import Worker

T = TypeVar("T")


class FileAccess:
    """The reading end of the ledger files with the thread it runs on."""

    __slots__ = ("blocks", "is_closed", "worker")

    def __init__(self, blocks: BlockReader, worker: Worker) -> None:
        self.blocks = blocks
        self.worker = worker
        self.is_closed = False


class LocalLedgerReader:
    """A view of one ledger up to the entry that was confirmed last when it was opened or refreshed."""

    __slots__ = ("_access", "_state", "is_closed", "last_confirmed", "ledger_id")

    def __init__(self, state: LedgerState, access: FileAccess) -> None:
        self._state = state
        self._access = access
        self.ledger_id = state.ledger_id
        self.last_confirmed = state.last
        self.is_closed = state.is_closed

    async def read(self, first: int, last: int, max_bytes: int = 0) -> list[bytes]:
        state = self._state
        self._check()
        check_entry_range(self.ledger_id, first, last, self.last_confirmed)
        found: list[bytes] = []
        size = 0
        while first <= last and first < state.file_entries:
            part = await self._from_file(first, min(last, state.file_entries - 1), max_bytes - size if max_bytes else 0)
            self._check()
            found += part
            first += len(part)
            if max_bytes > 0:
                size += sum(map(len, part))
                if size >= max_bytes or first < state.file_entries:
                    return found
        if first <= last:
            start = first - state.file_entries
            part = state.tail[start : start + last - first + 1]
            if max_bytes > 0:
                for count, data in enumerate(part):
                    size += len(data)
                    if size > max_bytes and (count or found):
                        del part[count:]
                        break
            found += part
        return found

    async def length_before(self, entry_id: int) -> int:
        state = self._state
        self._check()
        if entry_id:
            check_entry_range(self.ledger_id, entry_id - 1, entry_id - 1, self.last_confirmed)
        if entry_id >= state.file_entries:
            return state.file_length + sum(map(len, state.tail[: entry_id - state.file_entries]))
        return await self._in_file(
            partial(self._access.blocks.length_before, self.ledger_id, state.file_bytes, entry_id),
            f"The size of what precedes entry {entry_id}",
        )

    async def refresh(self) -> int:
        self._check()
        self.last_confirmed = self._state.last
        self.is_closed = self._state.is_closed
        return self.last_confirmed

    async def close(self) -> None:
        return None

    async def _from_file(self, first: int, last: int, max_bytes: int) -> list[bytes]:
        job = partial(self._access.blocks.read, self.ledger_id, self._state.file_bytes, first, last, max_bytes)
        return await self._in_file(job, f"What is stored as entries {first} to {last}")

    async def _in_file(self, job: Callable[[], T], what: str) -> T:
        try:
            return await self._access.worker.run(job)
        except OSError as exc:
            self._check()
            raise LedgerStoreFailed(f"{what} of ledger {self.ledger_id} cannot be read: {exc}.") from exc
        except LedgerError:
            self._check()  # a file that vanished with its ledger is not damage
            raise

    def _check(self) -> None:
        if self._state.is_deleted:
            raise LedgerNotFound(f"Ledger {self.ledger_id} was deleted.")
        if self._access.is_closed:
            raise Closed("The ledger store is closed.")
