"""`Decisions`: tells those who hold something of a transaction when it is decided.

The header is the truth; a watch on each held header is the hint, and every held header is also read afresh every
`reconcile_seconds` (INV15), so that a lost notification delays an outcome by no more than that. One per broker. Must not act on
a decision: that is the listeners' part.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from braid.errors import BraidError, Closed, InvariantBroken
from braid.metadata.api import Delete, MetadataStore, Put
from braid.model.txn import TxnId
from braid.runtime.clock import Clock
from braid.runtime.tasks import Tasks
from braid.txn import records
from braid.txn.records import TxnHeader
from braid.txn.store import TransactionStore

log = logging.getLogger(__name__)
TOLD_AT_ONCE = 4
"""Listeners that are told in one turn of the loop."""
Listener = Callable[[TxnId, TxnHeader | None], None]
"""Told the root and its decided header; None: there is no header, so that nothing of the transaction can have happened that is
still undecided. May be told more than once, until it lets go."""


class _Held:
    __slots__ = ("listeners", "watching")

    def __init__(self) -> None:
        self.listeners: dict[Listener, None] = {}
        self.watching = Tasks("txn header")


class Decisions:
    """See the module."""

    def __init__(self, metadata: MetadataStore, store: TransactionStore, clock: Clock, *, reconcile_seconds: float) -> None:
        self._metadata = metadata
        self._store = store
        self._clock = clock
        self._reconcile_seconds = reconcile_seconds
        self._held: dict[TxnId, _Held] = {}
        self._tasks = Tasks("txn decisions")

    @property
    def held(self) -> int:
        """Transactions somebody waits for."""
        return len(self._held)

    def start(self) -> None:
        self._tasks.spawn(self._reconcile_loop(), "reconcile")

    async def close(self) -> None:
        await self._tasks.close()
        for held in list(self._held.values()):
            await held.watching.close()
        self._held.clear()

    def kill(self) -> None:
        self._tasks.cancel()
        for held in self._held.values():
            held.watching.cancel()

    def hold(self, root: TxnId, listener: Listener) -> None:
        """Tell `listener` of the outcome of this root, until `release`. Idempotent."""
        held = self._held.get(root)
        if held is None:
            held = self._held[root] = _Held()
            held.watching.spawn(self._watch(root), f"watch {root}")
        held.listeners[listener] = None

    def release(self, root: TxnId, listener: Listener) -> None:
        held = self._held.get(root)
        if held is None:
            return
        held.listeners.pop(listener, None)
        if not held.listeners:
            del self._held[root]
            held.watching.cancel()

    async def _tell(self, root: TxnId, header: TxnHeader | None) -> None:
        """Tell those who hold the root, some in each turn of the loop: whoever ended a transaction with many participants gets
        the answer before all of them have done their part."""
        if header is not None and header.is_open:
            return
        held = self._held.get(root)
        if held is None:
            return
        for number, listener in enumerate(list(held.listeners)):
            if number % TOLD_AT_ONCE == 0:
                await asyncio.sleep(0)
            if listener not in held.listeners:
                continue
            try:
                listener(root, header)
            except Exception:  # a listener's mistake must not keep the outcome from the others
                log.exception("a listener failed on the outcome of transaction %s", root)

    async def _watch(self, root: TxnId) -> None:
        try:
            async with self._metadata.watch(records.header_key(root), partition=str(root)) as events:
                async for event in events:
                    if isinstance(event, Put):
                        await self._tell(root, records.decode_header(event.record.key, event.record.value))
                    elif isinstance(event, Delete):
                        await self._tell(root, None)
        except BraidError as error:
            log.info("the watch of transaction %s ended, the reconcile goes on: %s", root, error)

    async def _reconcile_loop(self) -> None:
        while True:
            await self._clock.sleep(self._reconcile_seconds)
            try:
                await self.reconcile()
            except InvariantBroken:
                raise
            except Exception:  # or an outcome that no watch tells would never be known
                log.exception("held transactions could not be compared with the store and are compared again")

    async def reconcile(self) -> None:
        """Read every held header afresh. One that cannot be read keeps no other from being told."""
        failure: BraidError | None = None
        for number, root in enumerate(list(self._held), 1):
            if number % TOLD_AT_ONCE == 0:
                await asyncio.sleep(0)  # a store in memory answers at once
            if root not in self._held:
                continue
            try:
                found = await self._store.header(root, fresh=True)
            except Closed:
                return
            except BraidError as error:
                failure = failure or error
            else:
                await self._tell(root, None if found is None else found.value)
        if failure is not None:
            log.warning("some held transactions cannot be compared with the store now: %s", failure)
