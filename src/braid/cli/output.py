"""Standard output of a command: results and the ready line, and what becomes of them when nobody can take them."""

from __future__ import annotations

import os
import sys

from braid.errors import BraidError


class OutputFailed(BraidError):
    """Standard output takes no more."""


def emit(data: bytes, *, flush: bool = True) -> None:
    """Write to standard output; raises OutputFailed, or BrokenPipeError if the reader went away."""
    if sys.stdout is None:
        raise OutputFailed("Standard output is closed; give the command one.")
    try:
        sys.stdout.buffer.write(data)
        if flush:
            sys.stdout.buffer.flush()
    except OSError as error:
        _discard()
        if isinstance(error, BrokenPipeError):
            raise
        raise OutputFailed(f"Standard output cannot be written: {error.strerror or error}.") from error


def printable(text: str) -> str:
    """Text that moves no cursor and changes no colour."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def _discard() -> None:
    """Send what is left in the buffer nowhere: the interpreter would try it again at its end and complain."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
