"""`CursorWrites`: when one cursor's state becomes durable.

Owns whether the state has changed since the last write, the timer of the next one, the single write under way and those who
wait for it: calls made at the same time share one write, and a failed one is repeated. Must not know what the state means: the
cursor hands out a snapshot, `CursorStore` keeps it. Without a store nothing is ever written.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from braid.errors import BraidError, Closed, LedgerFenced
from braid.managedledger.cursor_store import CursorStore
from braid.managedledger.records import CursorPosition
from braid.runtime.clock import Timer

if TYPE_CHECKING:
    from braid.managedledger.log import ManagedLedger

log = logging.getLogger(__name__)


class CursorWrites:
    """See the module. `touch` is called after each change of the state."""

    __slots__ = (
        "_is_hurried",
        "_is_reported",
        "_is_stopped",
        "_joined",
        "_log",
        "_name",
        "_snapshot",
        "_store",
        "_timer",
        "_waiting",
        "is_dirty",
        "writing",
    )

    def __init__(
        self, owner: ManagedLedger, name: str, store: CursorStore | None, snapshot: Callable[[], CursorPosition]
    ) -> None:
        self._log = owner
        self._name = name
        self._store = store
        self._snapshot = snapshot
        self.is_dirty = False
        """The state has changed since it was last written."""
        self.writing: asyncio.Task[None] | None = None
        """The write under way."""
        self._is_hurried = False
        self._is_reported = False
        """The log says that the last write failed; it is repeated every `cursor_flush_ms`, its line is not."""
        self._is_stopped = False
        self._timer: Timer | None = None
        self._joined: list[asyncio.Future[None]] = []
        """Who waits for the write under way."""
        self._waiting: list[asyncio.Future[None]] = []
        """Who waits for the next write."""

    @property
    def is_saved(self) -> bool:
        """Whether the present state would survive a crash, as far as it ever does."""
        return self._store is None or (not self.is_dirty and self.writing is None)

    def touch(self) -> None:
        """The state has changed: write it after `cursor_flush_ms`."""
        self.is_dirty = True
        if self._timer is None and self._store is not None and not self._is_stopped and self.writing is None:
            self._timer = self._log.runtime.clock.call_later(self._log.config.cursor_flush_ms / 1000, self._start)

    def hurry(self) -> None:
        """Write the present state now rather than later; nobody waits for it."""
        if self._store is not None and self.is_dirty:
            self._is_hurried = True  # also if a write is under way: that one took an older state
            self._start()

    async def flush(self) -> None:
        """Return once the present state is durable. Calls made at the same time share one write."""
        if self._store is None:
            return
        if self._is_stopped:
            raise self._closed()
        if self.is_saved:
            return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.is_dirty:
            self._waiting.append(done)
            self._start()
        else:
            self._joined.append(done)
        await done

    def stop(self) -> None:
        """Write no more; what is not durable is lost."""
        self._is_stopped = True
        self._stop_timer()
        _tell(self._waiting, self._closed())
        self._waiting = []

    async def stop_and_wait(self) -> None:
        """`stop`, and wait for the write under way."""
        writing = self.writing
        self.stop()
        if writing is not None:
            await asyncio.wait([writing])

    def go_on(self) -> None:
        """After `stop`: write again."""
        self._is_stopped = False
        if self.is_dirty:
            self.touch()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start(self) -> None:
        self._stop_timer()
        if self.writing is None and not self._is_stopped and not self._log.is_closed:
            self.writing = self._log.tasks.spawn(self._write(), f"cursor {self._name}")

    async def _write(self) -> None:
        """One write, and further ones while somebody waits for them or wants them soon."""
        error: BraidError | None = self._closed()  # unless this comes to an end, it was cancelled
        try:
            while self.is_dirty:
                self.is_dirty = self._is_hurried = False
                self._joined, self._waiting = self._waiting, []
                if self._store is not None:
                    await self._store.save(self._snapshot())
                _tell(self._joined, None)
                self._is_reported = False
                if not self._waiting and not self._is_hurried:
                    break
            error = None
        except LedgerFenced as fenced:
            error = fenced
            self._is_stopped = True
            self._log.lost(fenced)
        except BraidError as failed:
            error = failed
            if not self._is_reported:
                self._is_reported = True
                log.warning("the position of cursor %s of log %s is not stored yet: %s", self._name, self._log.name, failed)
        finally:
            self.writing = None
            if error is not None:
                self.is_dirty = True
                _tell(self._joined + self._waiting, error)
                self._waiting = []
            if self.is_dirty:
                self.touch()

    def _closed(self) -> Closed:
        return Closed(f"The cursor {self._name} of log {self._log.name} is closed.")


def _tell(waiting: list[asyncio.Future[None]], error: BraidError | None) -> None:
    for done in waiting:
        if not done.done():
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)
