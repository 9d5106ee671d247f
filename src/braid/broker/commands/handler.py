"""The shape of an asynchronous command handler."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from braid.errors import BraidError, wire_text
from braid.wire.replies import error


def error_reply(body: Any, failure: BraidError) -> bytes:
    """The plain ERROR, for requests whose answer has no error fields of its own."""
    return error(body.request_id, failure.code, wire_text(failure))


class Handler(msgspec.Struct, frozen=True):
    """What to run for a command, and how to say no."""

    run: Callable[[Any, Any], Coroutine[Any, Any, None]]
    fail: Callable[[Any, BraidError], bytes] = error_reply
