"""What the leaders at this broker have done, in numbers: counted for metrics, never read by the product itself."""

from __future__ import annotations

from typing import Final

_ABOUT_SUBSCRIPTION: Final = " of subscription "


class OperationCounts:
    """By kind of operation, such as `split` or `seek of subscription`; a handful of kinds."""

    def __init__(self) -> None:
        self.done: dict[str, int] = {}
        self.failed: dict[str, int] = {}
        """The caller was told an error; some of these are finished later."""
        self.seconds: dict[str, float] = {}
        """All of both together, without the wait for their turn."""

    def note(self, what: str, seconds: float, *, is_done: bool) -> None:
        """An operation has ended, well or not."""
        kind = f"{what.split()[0]} of subscription" if _ABOUT_SUBSCRIPTION in what else what.split()[0]
        counts = self.done if is_done else self.failed
        counts[kind] = counts.get(kind, 0) + 1
        self.seconds[kind] = self.seconds.get(kind, 0.0) + seconds
