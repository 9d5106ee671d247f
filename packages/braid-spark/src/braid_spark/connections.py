"""Clients of the processes that Spark runs: one for each address and settings, kept for as long as the process lives.

Spark hands tasks to a pool of Python workers in no order, so a client belongs to the process and never to a partition or to a
query. Owns the thread with the event loop on which everything of a client happens. Holds no positions.
"""

from __future__ import annotations

import difflib
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from braid.client.blocking_loop import LoopThread
from braid.client.client import Client
from braid.client.config import ClientConfig
from braid.client.segment_reads import SegmentReads
from braid.errors import Advice, BraidError, ConfigError

log = logging.getLogger(__name__)
T = TypeVar("T")
PREFIX = "braid.client."
"""How users write options of the SDK."""
PATIENCE_SECONDS = 120.0
"""How long a call of a query tries again, unless the user says otherwise: a broker that is away for a minute ends no query."""
Settings = Mapping[str, Any]
"""Options of the SDK by the names of `ClientConfig`."""


class Link:
    """A client and the thread it lives on. `run` waits; everything given to it is made and awaited on the loop.

    with Link(url) as link:
        link.run(lambda: link.client.partitions("orders"))
    """

    def __init__(self, url: str, settings: Settings | None = None, *, patience: float | None = None) -> None:
        """Asks nobody; a broker is needed at the first call. Raises ConfigError for an address that is none."""
        self.client = Client(url, config=client_config(settings, patience=patience))
        self._thread = LoopThread("braid-spark", "client", "braid.connect")
        self._reads: SegmentReads | None = None

    def __enter__(self) -> Link:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def connect(self) -> None:
        """Connect to the first address that answers; raises ConnectFailed at once if none does. Calls do it on their own, but
        go on trying."""
        self.run(self.client.__aenter__)

    @property
    def reads(self) -> SegmentReads:
        """Reading ranges of segments; use it inside `run`."""
        if self._reads is None:
            self._reads = self.client.segment_reads()
        return self._reads

    def run(self, start: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Make the coroutine on the loop and wait for its result."""
        return self._thread.run(start)

    def submit(self, start: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        """Start the coroutine on the loop."""
        return self._thread.submit(start)

    def close(self) -> None:
        """Close the client and end its thread. Idempotent."""
        if not self._thread.is_closed:
            try:
                self._thread.run(self.client.close, is_closing=True)
            finally:
                self._thread.close()


_lock = threading.Lock()
_links: dict[tuple[str, bytes], Link] = {}
_owner = os.getpid()


def shared_link(url: str, settings: Settings | None = None) -> Link:
    """The process's link to a cluster with these settings; made when it is first asked for, and never closed."""
    global _owner, _lock  # noqa: PLW0603 - the state of a process
    if _owner != os.getpid():
        # A child of a process that had links: their threads are not here, and their sockets are the parent's.
        _lock = threading.Lock()
        _links.clear()
        _owner = os.getpid()
    key = (url, msgspec.json.encode(dict(settings or {}), order="sorted"))
    with _lock:
        link = _links.get(key)
        if link is None:
            link = _links[key] = Link(url, settings, patience=PATIENCE_SECONDS)
        return link


def patiently(link: Link, start: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """What a call gives, which may be made again while no broker is there to answer it, for as long as an operation may take.
    Spark would try a failed task again at once, and give up before a broker has come back."""

    async def persist() -> T:
        clock, config = link.client.runtime.clock, link.client.config
        deadline, pause = clock.monotonic() + config.operation_timeout, config.backoff_initial
        while True:
            try:
                return await start()
            except BraidError as error:
                if error.advice is Advice.NEVER or clock.monotonic() + pause >= deadline:
                    raise
                log.info("no broker could answer, trying again: %s", error)
            await clock.sleep(pause)
            pause = min(2 * pause, config.backoff_max)

    return link.run(persist)


def client_config(settings: Settings | None, *, patience: float | None = None) -> ClientConfig:
    """Options of the SDK. Spark hides the case of letters, so names may be written in any, with or without underlines.
    `patience` is the operation timeout if they do not say one; what is sent is then waited for as long as anything else.

    Raises ConfigError that names the one which is wrong."""
    known = {field.name.replace("_", ""): field.name for field in msgspec.structs.fields(ClientConfig)}
    values: dict[str, Any] = {} if patience is None else {"operation_timeout": patience}
    for given, value in (settings or {}).items():
        name = known.get(_plain(given))
        if name is None:
            near = difflib.get_close_matches(_plain(given), known, n=1)
            hint = f"Did you mean {PREFIX}{known[near[0]]}?" if near else f"Known: {', '.join(sorted(known.values()))}."
            raise ConfigError(f"There is no option {PREFIX}{given}. {hint}")
        try:
            msgspec.convert({name: value}, ClientConfig, strict=False)
        except msgspec.ValidationError as error:
            reason = str(error).partition(" - at ")[0]
            raise ConfigError(f"The option {PREFIX}{name} cannot be {value!r}: {reason[:1].lower()}{reason[1:]}.") from None
        values[name] = value
    made = msgspec.convert(values, ClientConfig, strict=False)
    if patience is None or "send_timeout" in values:
        return made
    return msgspec.structs.replace(made, send_timeout=max(made.send_timeout, made.operation_timeout))


def _plain(name: str) -> str:
    return name.lower().replace("_", "")
