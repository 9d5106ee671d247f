"""`LoopWatch`: notices an event loop that does not turn, and says where it stands.

One loop serves everybody, so whoever holds it stops all of them. A timer on the loop notes the time several times a second; a
thread looks at that note, and when it is too old logs the stack the loop's thread stands in, once for each stall. When the loop
turns again, the timer counts the stall and logs how long it was. Nothing of it is on the path of a message. Runs on a real loop
in real time only, and is started where a broker process is built: where time is virtual or moved by hand there are no stalls.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType

log = logging.getLogger(__name__)

PERIOD_SECONDS = 0.1
"""How often the loop notes that it turns: what is said about durations is that much too short at most."""
SHOWN_FRAMES = 30


class LoopTurns:
    """What is known about the turns of a loop."""

    __slots__ = ("longest", "stalls")

    def __init__(self) -> None:
        self.longest = 0.0
        """Seconds of the longest turn so far."""
        self.stalls = 0
        """Turns that were longer than the limit."""


class LoopWatch:
    """A context manager inside a running loop. `limit` is in seconds; 0 watches nothing."""

    def __init__(self, turns: LoopTurns, limit: float, now: Callable[[], float] = time.monotonic) -> None:
        self._turns = turns
        self._limit = limit
        self._now = now
        self._beat = 0.0
        """When the loop turned last."""
        self._told = 0.0
        """The beat after which a stall was told."""
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> LoopWatch:
        if self._limit > 0:
            self._loop = asyncio.get_running_loop()
            self._beat = self._now()
            self._timer = self._loop.call_later(PERIOD_SECONDS, self._turned)
            self._thread = threading.Thread(
                target=self._watch, args=(threading.get_ident(),), name="braid-loop-watch", daemon=True
            )
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._timer is not None and self._thread is not None:
            self._timer.cancel()
            self._over.set()
            self._thread.join()

    def _turned(self) -> None:
        """On the loop."""
        now = self._now()
        seconds = now - self._beat - PERIOD_SECONDS
        self._beat = now
        self._timer = self._loop.call_later(PERIOD_SECONDS, self._turned)
        self._turns.longest = max(self._turns.longest, seconds)
        if seconds >= self._limit:
            self._turns.stalls += 1
            log.warning("the loop turns again; it stood still for %.1f s and served nobody", seconds)

    def _watch(self, watched: int) -> None:
        """In a thread of its own."""
        pause = self._limit / 4
        before = self._now()
        while not self._over.wait(pause):
            now, beat = self._now(), self._beat
            was_asleep, before = now - before > 2 * pause + self._limit / 2, now
            # When this thread did not run either, the whole process stood still: the loop gets time to turn first.
            if now - beat - PERIOD_SECONDS >= self._limit and self._told != beat and not was_asleep:
                self._told = beat
                self._tell(watched, now - beat)

    @staticmethod
    def _tell(watched: int, seconds: float) -> None:
        frame = sys._current_frames().get(watched)
        stack = "".join(traceback.format_stack(frame)[-SHOWN_FRAMES:])
        log.warning("the loop has not turned for %.1f s and serves nobody; it stands in:\n%s", seconds, stack.rstrip())
