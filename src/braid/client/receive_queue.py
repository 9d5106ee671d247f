"""`ReceiveQueue`: what came from several lanes and was not handed out yet, in order of arrival.

Bounded, because a lane gets no more permits than its `share` (INV17), and fair, because shares are equal: a fast lane fills its
own share and no more. Nothing is taken out before it is handed to somebody, so a waiter that gives up loses nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from itertools import repeat
from typing import Generic, TypeVar

from braid.runtime.clock import Clock

L = TypeVar("L", bound=Hashable)
T = TypeVar("T")


class ReceiveQueue(Generic[L, T]):
    """Items of lanes."""

    def __init__(self, clock: Clock, size: int) -> None:
        self._clock = clock
        self._size = size
        self._items: deque[tuple[L, T]] = deque()
        self._counts: dict[L, int] = {}
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._items)

    def share(self, lanes: int) -> int:
        """How many items each of so many lanes may have on their way or here."""
        return max(1, self._size // max(lanes, 1))

    def count(self, lane: L) -> int:
        """How many items of a lane are here."""
        return self._counts.get(lane, 0)

    def of(self, lane: L) -> list[T]:
        """The items of a lane, oldest first."""
        return [item for each, item in self._items if each is lane] if lane in self._counts else []

    def put(self, lane: L, items: Sequence[T]) -> None:
        self._items.extend(zip(repeat(lane), items))
        self._counts[lane] = self._counts.get(lane, 0) + len(items)
        self._changed.set()

    def take(self) -> tuple[L, T] | None:
        """The oldest item, with its lane."""
        if not self._items:
            return None
        found = self._items.popleft()
        lane = found[0]
        if left := self._counts[lane] - 1:
            self._counts[lane] = left
        else:
            del self._counts[lane]
        return found

    def drop(self, lane: L) -> int:
        """Forget the items of a lane; returns how many there were."""
        dropped = self._counts.pop(lane, 0)
        if dropped:
            self._items = deque(each for each in self._items if each[0] is not lane)
        return dropped

    def clear(self) -> None:
        self._items.clear()
        self._counts.clear()

    def wake(self) -> None:
        """Let everybody who waits look again at what they wait for."""
        self._changed.set()

    async def wait(self, until: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until the condition holds, at most `timeout` seconds; it is asked again after every change. What it raises is
        raised. Returns whether it holds."""
        if until():
            return True
        deadline = None if timeout is None else self._clock.monotonic() + timeout
        timer = None if timeout is None else self._clock.call_later(timeout, self.wake)
        try:
            while True:
                if deadline is not None and self._clock.monotonic() >= deadline:
                    return False
                self._changed.clear()
                await self._changed.wait()
                if until():
                    return True
        finally:
            if timer is not None:
                timer.cancel()
