"""Logs: structured lines, one event each, on standard error.

`setup` is called once by a composition root. Fields given by `extra={"fields": {...}}` are appended as `key=value`.
`LogOnce` keeps a misbehaving peer from filling the disk: one line per key, bounded.
"""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Hashable

import msgspec


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        fields = getattr(record, "fields", None)
        return f"{line} {' '.join(f'{key}={value}' for key, value in fields.items())}" if fields else line


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        event: dict[str, object] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **(getattr(record, "fields", None) or {}),
        }
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return json.dumps(event, default=str)


class LogSettings(msgspec.Struct, frozen=True):
    """How a process logs."""

    level: str = "info"
    json: bool = False


def setup(settings: LogSettings) -> None:
    """Send Braid's logs to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        _JsonFormatter() if settings.json else _TextFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(settings.level.upper())
    logging.getLogger("httpx").setLevel(max(logging.WARNING, root.level))  # it says a line for every call to another broker


class LogOnce:
    """Says each thing once, remembering a bounded number of them."""

    def __init__(self, log: logging.Logger, limit: int = 1024) -> None:
        self._log = log
        self._limit = limit
        self._said: OrderedDict[Hashable, None] = OrderedDict()

    def warning(self, key: Hashable, message: str, *args: object) -> None:
        if key in self._said:
            return
        self._said[key] = None
        if len(self._said) > self._limit:
            self._said.popitem(last=False)
        self._log.warning(message, *args)
