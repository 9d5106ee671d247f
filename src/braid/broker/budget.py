"""The broker's memory budgets (INV17): for publishes that are not durable yet, and for bulk reads.

Connections that publish while theirs is spent stop reading until half of it is free again; bulk reads wait in line.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class PublishBudget:
    """Bytes accepted from producers and not yet answered."""

    __slots__ = ("limit", "used", "waiting")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.waiting: dict[Callable[[], None], None] = {}

    @property
    def is_spent(self) -> bool:
        return self.used >= self.limit

    def wait(self, resume: Callable[[], None]) -> None:
        """Call `resume` once there is room again; asking twice is asking once."""
        self.waiting[resume] = None

    def wake(self) -> None:
        """Let those who wait go on, once half of the budget is free; called after `used` went down."""
        if self.used <= self.limit // 2:
            waiting, self.waiting = self.waiting, {}
            for resume in waiting:
                resume()


class ReadBudget:
    """Bytes of bulk reads under way: read, or waiting in a socket. Who finds it spent waits in line."""

    __slots__ = ("_line", "limit", "used")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._line: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def hold(self, size: int) -> AsyncIterator[None]:
        """Hold so many bytes for a block; one that is larger than everything there is holds it all."""
        size = min(size, self.limit)
        if self._line or self.used + size > self.limit:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            place = (size, turn)
            self._line.append(place)
            try:
                await turn
            except BaseException:
                if turn.done() and not turn.cancelled():
                    self._give_back(size)  # its turn had come just then
                else:
                    self._line.remove(place)
                    self._next()
                raise
        else:
            self.used += size
        try:
            yield
        finally:
            self._give_back(size)

    def _give_back(self, size: int) -> None:
        self.used -= size
        self._next()

    def _next(self) -> None:
        while self._line and self.used + self._line[0][0] <= self.limit:
            size, turn = self._line.popleft()
            if not turn.done():
                self.used += size
                turn.set_result(None)
