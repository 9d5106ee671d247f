"""Ctrl-C and SIGTERM in a command: the first asks it to finish what it has begun, the second ends it at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from braid.errors import BraidError

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BraidError):
    """The user wants the command to end."""


class Interrupt:
    """While entered, notes the first signal; a wait inside `may_cancel` ends then with Interrupted."""

    def __init__(self) -> None:
        self.is_set = False
        self._can_cancel = False
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()

    def __enter__(self) -> Interrupt:
        for number in SIGNALS:
            self._loop.add_signal_handler(number, self._came)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number in SIGNALS:
            self._loop.remove_signal_handler(number)

    @contextmanager
    def may_cancel(self) -> Iterator[None]:
        """A wait that the first signal ends."""
        if self.is_set:
            raise Interrupted("interrupted")
        self._can_cancel = True
        try:
            yield
        except asyncio.CancelledError:
            if not self.is_set:
                raise
            if self._task is not None:
                self._task.uncancel()
            raise Interrupted("interrupted") from None
        finally:
            self._can_cancel = False

    def _came(self) -> None:
        is_second, self.is_set = self.is_set, True
        if self._task is not None and (self._can_cancel or is_second):
            self._task.cancel()
