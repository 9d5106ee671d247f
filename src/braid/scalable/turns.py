"""`OperationTurns`: operations on one topic run one after the other; a waiter gives up after a stated time.

Owns the order of turns and the name of the operation whose turn it is. Knows nothing of topics.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress

from braid.errors import Conflict
from braid.runtime.clock import Clock


class OperationTurns:
    """First come, first served."""

    def __init__(self, clock: Clock, owner: str) -> None:
        self.holder: str | None = None
        """What the operation whose turn it is calls itself."""
        self._clock = clock
        self._owner = owner
        self._waiting: deque[tuple[str, asyncio.Future[None]]] = deque()

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    async def take(self, what: str, patience: float | None = None) -> None:
        """Wait for our turn; raises Conflict, naming the operation in the way, if it does not come in time."""
        if self.holder is None:
            self.holder = what
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((what, turn))
        timer = None if patience is None else self._clock.call_later(patience, self._give_up, what, turn, patience)
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.give_back()  # our turn had come when we were cancelled
            else:
                with suppress(ValueError):  # passed over meanwhile
                    self._waiting.remove((what, turn))
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def give_back(self) -> None:
        """Our turn is over."""
        self.holder = None
        while self._waiting:
            what, turn = self._waiting.popleft()
            if not turn.done():
                self.holder = what
                turn.set_result(None)
                return

    def _give_up(self, what: str, turn: asyncio.Future[None], patience: float) -> None:
        if not turn.done():
            turn.set_exception(
                Conflict(
                    f"{self._owner}: the {what} waited {patience:g} s for another operation, the {self.holder}, which is still "
                    "under way; nothing was changed, try again later."
                )
            )
