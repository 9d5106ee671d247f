"""Whether the machine itself stood still: a process that only sleeps for two milliseconds at a time and looks at the clock.

What is measured beside it may have waited as long for no fault of its own: virtual machines lose their cores to others.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from types import TracebackType

PERIOD = 0.002
NOTED = 0.01
"""Seconds from which on it is noted that the process was not woken."""


class Stalls:
    """Watches for as long as the block lasts."""

    def __init__(self) -> None:
        self._found: list[tuple[float, float]] = []
        self._process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Stalls:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()

    def within(self, begin: float, end: float) -> float:
        """Seconds between these two times of `perf_counter` in which the machine stood still."""
        return sum(max(0.0, min(end, last) - max(begin, first)) for first, last in list(self._found))

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            first, last = line.split()
            self._found.append((float(first), float(last)))


def watch() -> None:
    """Say when this process should have run and did."""
    before = time.perf_counter()
    while True:
        time.sleep(PERIOD)
        now = time.perf_counter()
        if now - before > NOTED:
            sys.stdout.write(f"{before + PERIOD} {now}\n")
            sys.stdout.flush()
        before = now


if __name__ == "__main__":
    watch()
