"""Counts what the product does in one piece: a cost that depends neither on the machine nor on what else it does.

A step is one instruction of the interpreter in a frame of `src/braid`. A piece is what runs without giving the event loop
back: one callback, or one stretch of a task between two suspensions. Sorting and slicing inside the interpreter count as one.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import braid

PRODUCT = str(Path(braid.__file__).parent)


class Steps:
    """A context manager; only one at a time. Given a package of the product, only its own steps count."""

    def __init__(self, package: str = "") -> None:
        self._place = str(Path(PRODUCT) / package)
        self.total = 0
        self.longest = 0
        """Steps of the longest piece."""
        self._before = 0

    def __enter__(self) -> Steps:
        self._run = asyncio.Handle._run

        def run(handle: Any) -> None:
            self._before = self.total
            try:
                self._run(handle)
            finally:
                self._note()

        asyncio.Handle._run = run  # type: ignore[method-assign, assignment]
        self._trace = sys.gettrace()
        sys.settrace(self._called)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        sys.settrace(self._trace)
        asyncio.Handle._run = self._run  # type: ignore[method-assign]
        self._note()

    def _note(self) -> None:
        self.longest = max(self.longest, self.total - self._before)

    def _called(self, frame: FrameType, _event: str, _value: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self._place):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return self._stepped

    def _stepped(self, _frame: FrameType, event: str, _value: Any) -> Any:
        if event == "opcode":
            self.total += 1
        return self._stepped
