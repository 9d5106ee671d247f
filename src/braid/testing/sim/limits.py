"""`WallClock`: a run of the simulator that takes too long ends with the stack it stood in, whatever it does.

Virtual time does not pass while a task spins, and a task that never suspends never lets the loop count its steps: only another
thread can notice. That thread writes the verdict down first, for the loop to find at its next turn. If there is none, it raises
`Interrupted` in the thread that runs the seed, again and again, because a task may swallow it. Works in any thread, and takes
no signal that a test runner may want for itself. Must not know what it watches.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import traceback
from collections.abc import Callable
from types import TracebackType

SECONDS = 60.0
"""How long a seed may take on the clock of the wall; one takes about a second."""
GRACE_SECONDS = 0.5
"""How long the loop has to find the verdict itself, and between two interruptions."""
SHOWN_FRAMES = 25


class Interrupted(BaseException):
    """Raised in the thread of a run that is out of time; not an `Exception`, so that handlers of the product let it through."""


class WallClock:
    """A context manager around a run. What it interrupts ends inside it, and `verdict` says where that stood."""

    def __init__(self, seconds: float, tell: Callable[[str], None]) -> None:
        self.verdict = ""
        """Why the run is out of time and where it stood; empty while it is not."""
        self._seconds = seconds
        self._tell = tell
        self._watched = threading.get_ident()
        self._over = threading.Event()
        self._turn = threading.Lock()
        self._has_interrupted = False
        self._thread = threading.Thread(target=self._watch, name="braid-sim-wall-clock", daemon=True)

    def __enter__(self) -> WallClock:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        is_last = False
        while True:
            try:
                with self._turn:
                    self._over.set()  # none is sent from here on
                if not self._has_interrupted:
                    break
                is_last = True
                _raise_in(self._watched, Interrupted)  # takes the place of one that is still on its way
                while True:
                    pass
            except Interrupted:
                if is_last:
                    break
        self._thread.join()
        return isinstance(error, Interrupted)

    def _watch(self) -> None:
        if self._over.wait(self._seconds):
            return
        frame = sys._current_frames().get(self._watched)
        stack = "".join(traceback.format_stack(frame)[-SHOWN_FRAMES:]) if frame is not None else ""
        self.verdict = f"it was not over after {self._seconds:g} s of wall clock; it stood in:\n{stack}"
        self._tell(self.verdict)
        while not self._over.wait(GRACE_SECONDS):
            with self._turn:
                if not self._over.is_set():
                    self._has_interrupted = True
                    _raise_in(self._watched, Interrupted)


def _raise_in(thread: int, error: type[BaseException]) -> None:
    """Raise `error` in a thread at its next instruction, in place of one that has not been raised yet.

    Nothing must be taken back, which this call could do too: Python 3.11 then takes something to be on its way for good, runs
    more slowly, and a function that is traced never begins.
    """
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))
