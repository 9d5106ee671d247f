"""Tasks: background work with an owner, whose failure is seen and whose end is waited for.

`Tasks` is the only place that makes asyncio tasks outside a `TaskGroup`. A failing task is logged with its name and handed to
`on_failure`; cancelling the owner cancels its tasks and waits for them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

log = logging.getLogger(__name__)


class Tasks:
    """The background tasks of one owner (a broker, a connection, a store)."""

    def __init__(self, owner: str, on_failure: Callable[[BaseException], None] | None = None) -> None:
        self._owner = owner
        self._on_failure = on_failure
        self._running: dict[asyncio.Task[Any], None] = {}  # in order of start, so that a seeded run ends them in the same order
        self._closed = False

    def __len__(self) -> int:
        return len(self._running)

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Start `work`; it is cancelled when the owner closes."""
        if self._closed:
            work.close()
            raise RuntimeError(f"{self._owner} is closed")
        task = asyncio.get_running_loop().create_task(work, name=f"{self._owner}:{name}")
        self._running[task] = None
        task.add_done_callback(self._ended)
        return task

    def cancel(self) -> None:
        """Ask every task to stop, without waiting."""
        self._closed = True
        for task in list(self._running):
            task.cancel()

    async def close(self) -> None:
        """Cancel what runs and wait until all of it has ended."""
        self.cancel()
        current = asyncio.current_task()
        while waiting := [task for task in self._running if task is not current]:
            await asyncio.wait(waiting)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.pop(task, None)
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.error("task %s failed", task.get_name(), exc_info=error)
        if self._on_failure is not None:
            self._on_failure(error)
