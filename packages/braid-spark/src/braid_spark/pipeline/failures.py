"""What went wrong in a query, in one sentence.

Spark wraps the words of a data source into Python tracebacks, and those into Java ones; the user needs the innermost sentence.
"""

from __future__ import annotations

import re

from braid.errors import BraidError

MAX_CHARS = 600
_RAISED = re.compile(r"^\s*([A-Za-z_][\w.]*(?:Error|Exception|Exit|[A-Z]\w+)): (.+)$")
_SAYS_LITTLE = ("KeyError", "IndexError", "AssertionError", "StopIteration", "AttributeError", "ZeroDivisionError")
"""Errors of Python whose words mean nothing without their name: of a missing key, the key."""
_NOISE = ("py4j.", "java.", "org.apache.spark.SparkException", "org.apache.spark.api.python.PythonException")
_CLASS = re.compile(r"^\[[A-Z][A-Z0-9_.]*\]\s*")
_STATE = re.compile(r"\s*SQLSTATE: \w+")
_PLACE = re.compile(r"[.;\s]*;\s*line (\d+),? pos (\d+);?\.?$")


class PipelineFailed(BraidError):
    """The query ended by an error."""


def is_java_gone(error: BaseException) -> bool:
    """Whether Spark's Java process has ended under a call."""
    return isinstance(error, ConnectionError) or type(error).__name__ in ("Py4JNetworkError", "Py4JError")


def sentence(error: BaseException) -> str:
    """The innermost message of an error of Spark, on one line."""
    if is_java_gone(error):
        return "Spark's Java process has ended; it was killed, or ran out of memory."
    kind = type(error).__name__
    text = f"{kind}: {error}" if kind in _SAYS_LITTLE and str(error) else str(error) or kind
    inner = _innermost(text)
    lines = [line.strip() for line in (inner or text).strip().splitlines() if line.strip()]
    first = _STATE.sub("", _CLASS.sub("", lines[0] if lines else type(error).__name__)).strip()
    first = _PLACE.sub(r" (line \1, position \2)", first)
    if len(first) > MAX_CHARS:
        first = first[:MAX_CHARS] + "..."
    return first if first.endswith((".", "?", "!", "...")) else f"{first}."


def _innermost(text: str) -> str | None:
    """What the last Python exception in `text` said; None if there is none."""
    found = None
    is_inside = False
    for line in text.splitlines():
        if "Traceback (most recent call last)" in line:
            is_inside = True
        elif is_inside and (match := _RAISED.match(line)) and not line.startswith((" ", "\t")):
            if not match[1].startswith(_NOISE):
                found = match[0].strip() if match[1] in _SAYS_LITTLE else match[2]
            is_inside = False
    return found
