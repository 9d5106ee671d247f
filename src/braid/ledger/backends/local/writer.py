"""`LocalLedgerWriter`: the one writer of a ledger. `append` is the hottest call of the store: keep it small.

Owns the writer's own counters and whom to tell; what is queued belongs to `commit`, what is confirmed to `state`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from braid.errors import LedgerClosed, LedgerError, LedgerOverloaded
from braid.ledger.api import NO_ENTRY, LedgerListener, LedgerMetadata
from braid.ledger.backends.local.state import LedgerState

if TYPE_CHECKING:
    from braid.ledger.backends.local.commit import GroupCommit
    from braid.ledger.backends.local.store import LocalLedgerStore


class LocalLedgerWriter:
    """Queues entries and tells its listener how far they are durable."""

    __slots__ = (
        "_commit",
        "_is_given_up",
        "_is_told",
        "_listener",
        "_refusal",
        "_store",
        "_waiters",
        "last_confirmed",
        "last_pushed",
        "ledger_id",
        "length",
        "state",
    )

    def __init__(
        self, store: LocalLedgerStore, commit: GroupCommit, state: LedgerState, listener: LedgerListener | None
    ) -> None:
        self.ledger_id = state.ledger_id
        self.last_pushed = NO_ENTRY
        self.last_confirmed = NO_ENTRY
        self.length = 0
        self.state = state
        self._store = store
        self._commit = commit
        self._listener = listener
        self._refusal: LedgerError | None = None
        self._is_told = False
        self._is_given_up = False
        self._waiters: deque[tuple[int, asyncio.Future[int]]] = deque()

    def append(self, head: bytes, body: bytes) -> int:
        commit = self._commit
        if self._refusal is not None or commit.refusal is not None:
            self._refuse()
        size = len(head) + len(body)
        waiting = commit.pending_bytes + size
        if waiting > commit.max_pending_bytes:
            raise LedgerOverloaded(
                f"{commit.pending_bytes} bytes already wait for the disk; "
                f"an entry of {size} bytes for ledger {self.ledger_id} was refused."
            )
        commit.pending_bytes = waiting
        self.last_pushed = entry_id = self.last_pushed + 1
        self.length += size
        commit.pending.append((self, entry_id, head, body))
        if commit.is_idle:
            commit.wake()
        return entry_id

    async def add(self, data: bytes) -> int:
        entry_id = self.append(data, b"")
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiters.append((entry_id, done))
        try:
            return await done
        finally:
            del done  # an error would hold this frame and its data, and the frame the error, until a rare collection

    async def close(self) -> LedgerMetadata:
        if self._refusal is not None and not isinstance(self._refusal, LedgerClosed):
            self._refuse()
        self._refusal = LedgerClosed(f"Ledger {self.ledger_id} is closed; create a new one to write.")
        await self._store.settle(self.state)
        return self.state.metadata()

    @property
    def is_failed(self) -> bool:
        """Whether pushed entries were given up; the ledger then ends at its last confirmed entry."""
        return self._is_given_up

    def stop(self, error: LedgerError) -> None:
        """Take nothing more; the listener is told later, by `tell_stopped`, after what was pushed is confirmed."""
        if self._refusal is None:
            self._refusal = error

    def tell_stopped(self) -> None:
        """Tell the listener, once, why the writer was stopped; not after an orderly close."""
        if self._refusal is not None and not isinstance(self._refusal, LedgerClosed):
            self.fail(self._refusal)

    def advanced(self) -> None:
        """`last_confirmed` has moved."""
        if self._waiters:
            self._wake(self.last_confirmed)
        if self._listener is not None:
            self._listener.ledger_advanced(self.last_confirmed)

    def _wake(self, last: int) -> None:
        waiters = self._waiters
        while waiters and waiters[0][0] <= last:
            entry_id, done = waiters.popleft()
            if not done.done():
                done.set_result(entry_id)

    def fail(self, error: LedgerError) -> None:
        """Nothing beyond the last confirmed entry will be confirmed."""
        self._refusal = error
        self._is_given_up = True
        while self._waiters:
            done = self._waiters.popleft()[1]
            if not done.done():
                done.set_exception(type(error)(*error.args))
        if not self._is_told:
            self._is_told = True
            if self._listener is not None:
                self._listener.ledger_failed(error)

    def _refuse(self) -> None:
        error = self._refusal or self._commit.refusal
        if error is not None:
            raise type(error)(*error.args)  # a fresh one: an exception raised twice collects tracebacks
