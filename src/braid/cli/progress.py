"""Progress of long work on standard error: one line, rewritten on a terminal, now and then in a log."""

from __future__ import annotations

import sys
from typing import TextIO

from braid.runtime.clock import Clock

TERMINAL_SECONDS = 0.5
LOG_SECONDS = 5.0


class Progress:
    """Counts messages and bytes and says how fast they go."""

    def __init__(self, clock: Clock, verb: str, stream: TextIO | None = None) -> None:
        self._clock = clock
        self._verb = verb
        self._stream = stream or sys.stderr
        self._is_terminal = self._stream.isatty()
        self._period = TERMINAL_SECONDS if self._is_terminal else LOG_SECONDS
        self._start = self._last = clock.monotonic()
        self._last_count = 0
        self.count = 0
        self.size = 0

    @property
    def seconds(self) -> float:
        return max(self._clock.monotonic() - self._start, 1e-9)

    def add(self, size: int, count: int = 1) -> None:
        """So much more is done."""
        self.count += count
        self.size += size
        now = self._clock.monotonic()
        if now - self._last >= self._period:
            rate = (self.count - self._last_count) / (now - self._last)
            self._last, self._last_count = now, self.count
            self._show(f"{self._verb} {_messages(self.count)}, {rate:,.0f}/s, {self.size / 1e6:,.1f} MB")

    def done(self) -> None:
        """Say the total, with the mean rate."""
        per_second = self.count / self.seconds
        self._show(
            f"{self._verb} {_messages(self.count)} in {self.seconds:.2f} s, {per_second:,.0f}/s, {self.size / 1e6:,.1f} MB"
        )
        if self._is_terminal:
            self._stream.write("\n")

    def summary(self) -> dict[str, float | int]:
        """The same for machines."""
        return {
            "messages": self.count,
            "bytes": self.size,
            "seconds": round(self.seconds, 3),
            "messages_per_second": round(self.count / self.seconds, 1),
        }

    def _show(self, text: str) -> None:
        self._stream.write(f"\r\x1b[K{text}" if self._is_terminal else f"{text}\n")
        self._stream.flush()


class Steps:
    """Counts what is done of a known number of things."""

    def __init__(self, clock: Clock, text: str, total: int, stream: TextIO | None = None) -> None:
        self._clock = clock
        self._text = text
        self._total = total
        self._stream = stream or sys.stderr
        self._is_terminal = self._stream.isatty()
        self._period = TERMINAL_SECONDS if self._is_terminal else LOG_SECONDS
        self._last = clock.monotonic()

    def at(self, done: int) -> None:
        """So many are done; shown now and then."""
        now = self._clock.monotonic()
        if now - self._last >= self._period:
            self._last = now
            text = f"{self._text} {done:,} of {self._total:,}"
            self._stream.write(f"\r\x1b[K{text}" if self._is_terminal else f"{text}\n")
            self._stream.flush()

    def end(self) -> None:
        """Leave the line to whoever writes next."""
        if self._is_terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def _messages(count: int) -> str:
    return f"{count:,} message{'' if count == 1 else 's'}"
