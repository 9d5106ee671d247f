"""Calls between the processes of a world, in place of HTTP: administrators to brokers, brokers to each other.

A call is a connection of the simulated network that carries a number there and back; what the number stands for is kept here.
So a call meets everything that connections meet: delays, resets, half-open links, partitions, brokers that die or are paused.
The work is done at the callee whatever becomes of the caller; a caller without an answer does not know.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, cast

from braid.broker.registry import BrokerInfo
from braid.broker.service import BrokerService
from braid.errors import BraidError, ConnectFailed, ConnectionLost, DeadlineExceeded, NotReady
from braid.model.names import TopicName
from braid.runtime.network import Listener
from braid.runtime.tasks import Tasks
from braid.scalable.api import SegmentOps
from braid.testing.sim.history import History
from braid.testing.sim.loop import Node
from braid.testing.sim.network import Fabric

T = TypeVar("T")
Work = Callable[[BrokerService], Awaitable[Any]]
PORT = 8080
MAX_HOPS = 5
LEADERS_ONLY = ("create", "terminate", "delete")
"""Calls that an owner does for the topic's leader and for nobody else."""
SECONDS = 20.0
"""A caller's patience."""


class Calls:
    """All calls of a world."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._numbers = 0
        self._works: dict[int, Work] = {}  # of requests that may still arrive, if late
        self._answers: dict[int, tuple[Any, BaseException | None] | None] = {}  # of calls that somebody waits for
        self.ambush: Callable[[Node, str], None] | None = None
        """A fault that waits for the next thing a leader asks of another broker; told who asks whom."""

    async def call(self, node: Node, host: str, work: Callable[[BrokerService], Awaitable[T]], seconds: float = SECONDS) -> T:
        """Let a broker do `work` for a node. Raises what the work raises, ConnectFailed, and ConnectionLost or DeadlineExceeded
        if nobody knows whether it was done."""
        self._numbers += 1
        number = self._numbers
        self._works[number] = work
        self._answers[number] = None
        try:
            async with asyncio.timeout(seconds):
                return cast(T, await self._exchange(node, host, number))
        except TimeoutError as error:
            if isinstance(error, BraidError):
                raise
            raise DeadlineExceeded(f"{host} did not answer within {seconds:g} s; nobody knows whether it acted.") from None
        finally:
            del self._answers[number]

    async def _exchange(self, node: Node, host: str, number: int) -> Any:
        try:
            transport, caller = await self._fabric.port(node).connect(host, PORT, _Caller)
        except OSError as error:
            del self._works[number]
            raise ConnectFailed(f"{host} cannot be reached: {error}.") from error
        try:
            transport.write(b"%d" % number)
            await caller.answered
        finally:
            transport.close()
        answer = self._answers[number]
        assert answer is not None, "the number came back without an answer"
        if answer[1] is not None:
            raise answer[1]
        return answer[0]

    async def serve(self, node: Node, host: str, service: BrokerService) -> CallServer:
        """Take calls for a broker; run on its node."""
        server = CallServer(self, service)
        server.listener = await self._fabric.port(node).listen(host, PORT, lambda: _Callee(server))
        return server

    async def work(self, number: int, service: BrokerService) -> None:
        """Do what a number stands for, even if nobody waits any more."""
        answer: tuple[Any, BaseException | None]
        try:
            answer = (await self._works.pop(number)(service), None)
        except Exception as error:  # noqa: BLE001 - it is the caller's, whatever it is
            answer = (None, error)
        if number in self._answers:
            self._answers[number] = answer

    def segments(self, node: Node) -> Callable[[BrokerInfo], SegmentOps]:
        """How a broker reaches the segments of the others."""
        return lambda broker: cast(SegmentOps, FarSegments(self, node, broker.broker_id.partition(":")[0]))


class CallServer:
    """The end of a broker that takes calls."""

    def __init__(self, calls: Calls, service: BrokerService) -> None:
        self.calls = calls
        self.service = service
        self.tasks = Tasks("calls")
        self.listener: Listener
        self.open: dict[asyncio.Transport, None] = {}
        self.is_closed = False

    async def close(self) -> None:
        self.is_closed = True
        self.listener.close()
        for transport in list(self.open):
            transport.abort()
        await self.tasks.close()


class _Caller(asyncio.Protocol):
    def __init__(self) -> None:
        self.answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        if not self.answered.done():
            self.answered.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.answered.done():
            self.answered.set_exception(
                ConnectionLost("The connection broke before the answer came; nobody knows the outcome.")
            )
            self.answered.exception()  # whoever waits raises it; if nobody does, that is fine


class _Callee(asyncio.Protocol):
    def __init__(self, server: CallServer) -> None:
        self._server = server
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._server.open[self._transport] = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.open.pop(self._transport, None)

    def data_received(self, data: bytes) -> None:
        if self._server.is_closed:
            self._transport.close()
        else:
            self._server.tasks.spawn(self._answer(int(data)), "call")

    async def _answer(self, number: int) -> None:
        await self._server.calls.work(number, self._server.service)
        self._transport.write(b"%d" % number)


class FarSegments:
    """`SegmentOps` at another broker, as over HTTP: the call is made on its `local_segments`, or sent on to whom it names."""

    def __init__(self, calls: Calls, node: Node, host: str) -> None:
        self._calls = calls
        self._node = node
        self._host = host

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        async def far(segment: TopicName, *args: Any, **options: Any) -> Any:
            host, is_sent_on = self._host, False
            for _hop in range(MAX_HOPS):

                async def there(service: BrokerService, is_sent_on: bool = is_sent_on) -> Any:
                    found = await service.ownership.find(segment, authoritative=is_sent_on)
                    if not found.is_mine:
                        return found.broker
                    return await getattr(service.local_segments, name)(segment, *args, **options)

                if (ambush := self._calls.ambush) is not None and name in LEADERS_ONLY:
                    self._calls.ambush = None
                    ambush(self._node, host)
                answer = await self._calls.call(self._node, host, there)
                if not isinstance(answer, BrokerInfo):
                    return answer
                host, is_sent_on = answer.broker_id.partition(":")[0], True
            raise NotReady("The owner changes while brokers send this call on; try again in a moment.")

        return far


def note_calls(segments: Any, history: History, node: Node) -> None:
    """Write down what this owner does for leaders, with their terms."""

    def noted(what: str, honest: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def call(segment: TopicName, **options: Any) -> Any:
            value, epoch = [str(segment.scalable), str(segment), what], options["epoch"]
            number = history.invoke(node.name, "segment-call", value, epoch=epoch)
            result = await honest(segment, **options)
            history.add(node.name, "ok", "segment-call", value, number=number, epoch=epoch)
            return result

        return call

    for what in LEADERS_ONLY:
        setattr(segments, what, noted(what, getattr(segments, what)))
