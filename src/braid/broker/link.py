"""`Link`: the sending side of a connection, as producers, consumers and dispatchers see it.

Owns the output buffer: frames queued in one loop turn leave in one socket write. Knows the peer's version, whether it can
take more bytes now, and how to find out if it is still alive. Must not decide anything about topics.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from braid.runtime.clock import Clock
from braid.wire.replies import PING

JOIN_BELOW = 4096
"""Frames smaller than this are copied together; larger ones go to the socket as they are (one gathering write)."""
FLUSH_BYTES = 1 << 16
"""Messages queued beyond this go to the socket at once."""


class Link:
    """The output of one client connection."""

    __slots__ = (
        "_clock",
        "_drained",
        "_flush_queued",
        "_loop",
        "_out",
        "_out_bytes",
        "_probes",
        "_transport",
        "client_version",
        "is_braid",
        "is_open",
        "is_writable",
        "peer",
        "pending_publishes",
        "principal",
        "protocol_version",
        "when_drained",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Clock) -> None:
        self._loop = loop
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._out: list[bytes] = []
        self._out_bytes = 0
        """Of messages only: answers are small, and bounded by what was asked."""
        self._flush_queued = False
        self._drained: list[asyncio.Future[None]] = []
        """Who waits until the socket takes more."""
        self._probes: list[asyncio.Future[bool]] = []
        self.peer = "?"
        self.client_version = ""
        self.protocol_version = 0
        self.is_braid = False
        """Whether the client knows Braid's own extensions of the protocol."""
        self.principal: str | None = None
        """Who the client is; None where nobody needs to say."""
        self.is_open = False
        self.is_writable = True
        self.pending_publishes = 0
        self.when_drained: Callable[[], None] | None = None
        """Called after each batch of receipts while reading is paused."""

    def opened(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.is_open = True
        name = transport.get_extra_info("peername")
        if isinstance(name, tuple):
            self.peer = f"{name[0]}:{name[1]}"

    def lost(self) -> None:
        """The connection is gone."""
        self.is_open = False
        self.is_writable = False
        self._transport = None
        self._out = []
        self._answer_probes(False)
        self._wake_drained()

    def write(self, frame: bytes) -> None:
        """Queue one frame for the socket."""
        self._out.append(frame)
        if not self._flush_queued:
            self._flush_queued = True
            self._loop.call_soon(self.flush)

    def extend(self, pieces: list[bytes]) -> None:
        """Queue many pieces at once: the hot path of receipts."""
        self._out += pieces
        if not self._flush_queued:
            self._flush_queued = True
            self._loop.call_soon(self.flush)

    def deliver(self, pieces: list[bytes], size: int) -> None:
        """Queue messages of `size` bytes. What belongs to one commit group leaves in one write, also over many topics; but a
        full socket must be noticed before much is put in front of it."""
        self._out += pieces
        self._out_bytes += size
        if self._out_bytes >= FLUSH_BYTES:
            self.flush()
        elif not self._flush_queued:
            self._flush_queued = True
            self._loop.call_soon(self.flush)

    async def deliver_bulk(self, frame: Sequence[bytes | memoryview]) -> None:
        """Send one large answer, in pieces; returns once the socket takes more, or the connection is gone."""
        self.flush()
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        transport.writelines(frame)
        if not self.is_writable and self.is_open:
            drained: asyncio.Future[None] = self._loop.create_future()
            self._drained.append(drained)
            await drained

    def writable(self, is_writable: bool) -> None:
        """The socket is full, or takes more again."""
        self.is_writable = is_writable
        if is_writable:
            self._wake_drained()

    def _wake_drained(self) -> None:
        drained, self._drained = self._drained, []
        for one in drained:
            if not one.done():
                one.set_result(None)

    def flush(self) -> None:
        """Hand everything queued to the socket."""
        self._flush_queued = False
        out = self._out
        if not out:
            return
        self._out = []
        self._out_bytes = 0
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if len(out[-1]) < JOIN_BELOW:
            transport.write(out[0] if len(out) == 1 else b"".join(out))
        else:
            transport.writelines(out)

    def close(self) -> None:
        """Send what is queued, then close the connection."""
        self.flush()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Drop the connection at once, queued bytes included."""
        self._out = []
        if self._transport is not None:
            self._transport.abort()

    def heard(self) -> None:
        """Something arrived from the peer: it is alive."""
        if self._probes:
            self._answer_probes(True)

    async def probe(self, timeout_ms: int) -> bool:
        """Whether the peer shows a sign of life within the time."""
        if not self.is_open:
            return False
        answer: asyncio.Future[bool] = self._loop.create_future()
        self._probes.append(answer)
        self.write(PING)
        timer = self._clock.call_later(timeout_ms / 1000, _set_once, answer, False)
        try:
            return await answer
        finally:
            timer.cancel()
            if answer in self._probes:
                self._probes.remove(answer)

    def _answer_probes(self, alive: bool) -> None:
        probes, self._probes = self._probes, []
        for answer in probes:
            _set_once(answer, alive)


def _set_once(answer: asyncio.Future[bool], alive: bool) -> None:
    if not answer.done():
        answer.set_result(alive)
