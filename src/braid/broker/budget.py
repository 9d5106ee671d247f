"""The broker's memory budget for publishes that are not durable yet (INV17).

Connections that publish while it is spent stop reading until half of it is free again.
"""

from __future__ import annotations

from collections.abc import Callable


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
