"""The broker's memory budget for publishes that are not durable yet (INV17).

Connections that publish while it is spent stop reading until half of it is free again.
"""

from __future__ import annotations

from collections.abc import Callable


class PublishBudget:
    """Bytes accepted from producers and not yet answered."""

    __slots__ = ("_waiting", "limit", "used")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._waiting: list[Callable[[], None]] = []

    @property
    def is_spent(self) -> bool:
        return self.used >= self.limit

    def wait(self, resume: Callable[[], None]) -> None:
        """Call `resume` once there is room again."""
        self._waiting.append(resume)

    def release(self, size: int) -> None:
        self.used -= size
        if self._waiting and self.used <= self.limit // 2:
            waiting, self._waiting = self._waiting, []
            for resume in waiting:
                resume()
