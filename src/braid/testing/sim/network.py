"""`Fabric`: the simulated network: named hosts, connections in memory, and everything that goes wrong between them.

Owns what is on the wire. Bytes of one direction of a connection arrive in order or not at all. Faults: a reset (both ends hear
of it, bytes under way are lost), half open (bytes vanish for good and nobody is told), a partition between two hosts (bytes and
attempts to connect wait until it heals), a clog (everything is late). Buffers are bounded as asyncio's are: a sender whose
bytes are not taken gets `pause_writing`. What arrives at a paused node waits with it.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from braid.runtime.env import Random
from braid.runtime.network import Listener, hand_over
from braid.testing.sim.loop import NODE, WORLD, Node, on

P = TypeVar("P", bound=asyncio.BaseProtocol)
HIGH_WATER = 64 << 10
_EOF = object()
_RESET = object()


class _Listening:
    """An open port of a node."""

    def __init__(self, fabric: Fabric, node: Node, host: str, port: int, factory: Callable[[], asyncio.BaseProtocol]) -> None:
        self.host = host
        self.port = port
        self.node = node
        self.factory = factory
        self.context = contextvars.copy_context()
        self._fabric = fabric

    def close(self) -> None:
        self._fabric.stop_listening(self)


class End(asyncio.Transport):
    """One end of a connection."""

    def __init__(self, fabric: Fabric, node: Node, host: str, remote: str, port: int) -> None:
        super().__init__()
        self.node = node
        self.host = host
        self.peer: End
        self._fabric = fabric
        self._remote = (remote, port)
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()
        self._protocol: Any = None
        self._wire: deque[tuple[float, Any]] = deque()  # what we sent and when it may arrive
        self._pump_due = False
        self._unread = 0  # bytes sent and not taken by the peer's protocol
        self._high = HIGH_WATER
        self._low = HIGH_WATER // 4
        self._is_write_paused = False
        self._is_reading = True
        self._inbox: deque[Any] = deque()
        self._is_closing = False
        self._is_over = False
        self.has_vanished = False

    # asyncio.Transport

    def write(self, data: Any) -> None:
        if self._is_closing or not data:
            return
        self._send(bytes(data))
        self._unread += len(data)
        if self._unread > self._high and not self._is_write_paused:
            self._is_write_paused = True
            self._protocol.pause_writing()

    def writelines(self, pieces: Iterable[Any]) -> None:
        self.write(b"".join(pieces))

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = HIGH_WATER if high is None else high
        self._low = self._high // 4 if low is None else low

    def get_write_buffer_size(self) -> int:
        return self._unread

    def pause_reading(self) -> None:
        self._is_reading = False

    def resume_reading(self) -> None:
        self._is_reading = True
        self._loop.call_soon(self._read, context=self._context)

    def is_closing(self) -> bool:
        return self._is_closing

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._remote if name == "peername" else default

    def get_protocol(self) -> Any:
        return self._protocol

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._send(_EOF)
            self._loop.call_soon(self._lose, None, context=self._context)

    def abort(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._wire.clear()
            self._send(_RESET)
            self._loop.call_soon(self._lose, None, context=self._context)

    # For the fabric.

    def open(self, protocol: Any) -> None:
        """Both ends are there: tell the protocol."""
        self._protocol = protocol
        protocol.connection_made(self)

    def die(self, *, silently: bool) -> None:
        """The process of this end is gone; its kernel says so, or the whole machine is silent."""
        self._is_closing = self._is_over = True
        if silently:
            self.vanish()
        else:
            self._wire.clear()
            self._send(_RESET)
        self._fabric.forget(self)

    def vanish(self) -> None:
        """Half open: nothing written by either end arrives any more."""
        for end in (self, self.peer):
            end.has_vanished = True
            end._wire.clear()
            end._inbox.clear()

    def reset(self) -> None:
        """Both ends are told that the connection broke."""
        for end in (self, self.peer):
            if not end._is_over:
                end._wire.clear()
                end._is_closing = True
                end._loop.call_soon(end._lose, ConnectionResetError("connection reset"), context=end._context)

    def pump(self) -> None:
        """Let arrive what is due."""
        self._pump_due = False
        if self.has_vanished or self._fabric.is_cut(self.host, self.peer.host):
            return
        now = self._loop.time()
        while self._wire and self._wire[0][0] <= now:
            self.peer._inbox.append(self._wire.popleft()[1])
            self._loop.call_soon(self.peer._read, context=self.peer._context)
        self._arm()

    def _send(self, item: Any) -> None:
        if self.has_vanished:
            return
        now = self._loop.time()
        due = now + self._fabric.latency(self.host, self.peer.host)
        if self._wire:
            due = max(due, self._wire[-1][0])
        self._wire.append((due, item))
        self._arm()

    def _arm(self) -> None:
        if self._wire and not self._pump_due:
            self._pump_due = True
            self._loop.call_at(self._wire[0][0], self.pump, context=self._fabric.context)

    def _read(self) -> None:
        """Hand the next piece to the protocol, in the context of our node."""
        if not self._is_reading or not self._inbox or self._is_over or self.has_vanished:
            return
        item = self._inbox.popleft()
        if isinstance(item, bytes):
            self.peer._taken(len(item))
            if not self._is_closing:
                hand_over(self._protocol, item)
        else:
            self._is_closing = True
            self._lose(None if item is _EOF else ConnectionResetError("connection reset by peer"))
        if self._inbox and self._is_reading:
            self._loop.call_soon(self._read, context=self._context)

    def _taken(self, size: int) -> None:
        self._unread -= size
        if self._is_write_paused and self._unread <= self._low:
            self._is_write_paused = False
            if not self._is_over:
                self._loop.call_soon(self._resume_writing, context=self._context)

    def _resume_writing(self) -> None:
        if not self._is_over and not self._is_write_paused:
            self._protocol.resume_writing()

    def _lose(self, error: Exception | None) -> None:
        if not self._is_over:
            self._is_over = True
            self._fabric.forget(self)
            self._protocol.connection_lost(error)


class Fabric:
    """All hosts and connections of a world."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._listening: dict[tuple[str, int], _Listening] = {}
        self._ends: dict[End, None] = {}
        self._cuts: set[frozenset[str]] = set()
        self._late: dict[frozenset[str], float] = {}
        self._healed = asyncio.Event()
        self._next_port = 40_000
        with on(WORLD):
            self.context = contextvars.copy_context()
            """In which bytes travel: they go on whatever becomes of the node that sent them."""
        self.slowest = 0.002
        """Seconds of the longest usual way."""

    def port(self, node: Node) -> SimNetwork:
        """The network as a node sees it."""
        return SimNetwork(self, node)

    # Faults

    def ends(self, node: Node | None = None) -> list[End]:
        """Open ends (of a node), oldest first."""
        return [end for end in self._ends if node is None or end.node is node]

    def cut(self, one: str, other: str) -> None:
        """Partition two hosts."""
        self._cuts.add(frozenset((one, other)))

    def heal(self, one: str, other: str) -> None:
        self._cuts.discard(frozenset((one, other)))
        self._mend()

    def heal_all(self) -> None:
        """No partitions and no clogs any more."""
        self._cuts.clear()
        self._late.clear()
        self._mend()

    def clog(self, one: str, other: str, seconds: float) -> None:
        """Everything between two hosts takes so much longer; 0 = no more."""
        self._late[frozenset((one, other))] = seconds

    def kill(self, node: Node, *, silently: bool) -> None:
        """A node is gone: its ports and connections with it."""
        for listening in [each for each in self._listening.values() if each.node is node]:
            listening.close()
        for end in self.ends(node):
            end.die(silently=silently)

    # For the ends

    def is_cut(self, one: str, other: str) -> bool:
        return bool(self._cuts) and frozenset((one, other)) in self._cuts

    def latency(self, one: str, other: str) -> float:
        late = self._late.get(frozenset((one, other)), 0.0) if self._late else 0.0
        return self.slowest * self._rng.random() ** 2 + late

    def forget(self, end: End) -> None:
        self._ends.pop(end, None)

    def stop_listening(self, listening: _Listening) -> None:
        if self._listening.get((listening.host, listening.port)) is listening:
            del self._listening[(listening.host, listening.port)]

    def _mend(self) -> None:
        self._healed.set()
        self._healed.clear()
        for end in list(self._ends):
            end.pump()

    async def wait_mended(self, one: str, other: str) -> None:
        while self.is_cut(one, other):
            await self._healed.wait()

    def listen(self, node: Node, host: str, port: int, factory: Callable[[], asyncio.BaseProtocol]) -> _Listening:
        if not port:
            self._next_port += 1
            port = self._next_port
        present = self._listening.get((host, port))
        if present is not None and not present.node.is_dead:
            raise OSError(98, "Address already in use")
        listening = self._listening[(host, port)] = _Listening(self, node, host, port, factory)
        return listening

    async def connect(self, node: Node, host: str, port: int, factory: Callable[[], P]) -> tuple[asyncio.Transport, P]:
        await self.wait_mended(node.name, host)
        await asyncio.sleep(2 * self.latency(node.name, host))
        await self.wait_mended(node.name, host)
        listening = self._listening.get((host, port))
        if listening is None or listening.node.is_dead:
            raise ConnectionRefusedError(111, "Connection refused")
        self._next_port += 1
        near = End(self, node, node.name, host, port)
        far = listening.context.run(End, self, listening.node, host, node.name, self._next_port)
        near.peer, far.peer = far, near
        self._ends[near] = self._ends[far] = None
        asyncio.get_running_loop().call_soon(lambda: far.open(listening.factory()), context=listening.context)
        protocol = factory()
        near.open(protocol)
        return near, protocol


class SimNetwork:
    """The network port of one node."""

    def __init__(self, fabric: Fabric, node: Node) -> None:
        self._fabric = fabric
        self._node = node

    async def listen(self, host: str, port: int, factory: Callable[[], asyncio.BaseProtocol]) -> Listener:
        with on(self._node):
            return self._fabric.listen(self._node, host, port, factory)

    async def connect(self, host: str, port: int, factory: Callable[[], P]) -> tuple[asyncio.Transport, P]:
        assert NODE.get() is self._node, "a node connects in its own name"
        return await self._fabric.connect(self._node, host, port, factory)
