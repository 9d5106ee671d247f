"""`Connection`: one socket to a broker: handshake, requests and their answers, keep-alive, and passing on what comes.

Owns the socket and the table of requests under way. Producers, consumers, sessions and watches register themselves by id and
are told what concerns them; they decide what to do when the connection ends. Frames that follow one another closely leave
together.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Protocol

from braid import __version__
from braid.client.config import ClientConfig
from braid.errors import BraidError, ConnectFailed, ConnectionLost, DeadlineExceeded, ProtocolError, from_code
from braid.runtime.clock import Timer
from braid.runtime.env import Runtime
from braid.wire import requests
from braid.wire.client import Bulk, ClientProtocol, Delivery
from braid.wire.commands import Command
from braid.wire.frames import DEFAULT_MAX_MESSAGE_SIZE
from braid.wire.replies import PING, PONG
from braid.wire.types import CommandType

log = logging.getLogger(__name__)
CLIENT_VERSION = f"Braid-Python-v{__version__}"
CLOSE_TOGETHER = 0.0001
"""Frames that follow one another within so many seconds leave together. Who awaits each answer comes later than that, and is
spared a turn of the loop at whose end nothing would be left to send."""
UNASKED = 0
"""Request id of a request whose answer nobody waits for."""


class ProducerSide(Protocol):
    """What a connection tells a producer."""

    def receipt(self, body: Any) -> None: ...

    def send_failed(self, body: Any) -> None: ...

    def detached(self, error: BraidError, *, is_settled: bool = False) -> None:
        """Its place is gone; `is_settled` if the broker has answered everything it stored."""


class ConsumerSide(Protocol):
    """What a connection tells a consumer."""

    def delivered(self, delivery: Delivery) -> None: ...

    def ended(self) -> None: ...

    def detached(self, error: BraidError) -> None: ...


class WatchSide(Protocol):
    """What a connection tells a layout session (commands 70 to 72), the watch of a namespace (76 to 78) or of coordinators
    (79 to 81)."""

    def update(self, body: Any) -> None: ...

    def lost(self, error: BraidError) -> None: ...


class ScalableConsumerSide(Protocol):
    """What a connection tells a consumer session at a topic's controller (commands 73 to 75)."""

    def assignment(self, body: Any) -> None: ...

    def displaced(self) -> None:
        """CLOSE_CONSUMER came without another address: another connection took the name over."""

    def lost(self, error: BraidError) -> None: ...


class Connection(asyncio.BufferedProtocol):
    """The asyncio protocol of one connection: what comes is received where it is decoded. Made by `open_connection`."""

    def __init__(self, runtime: Runtime, config: ClientConfig, address: str) -> None:
        self.address = address
        self.max_message_size = DEFAULT_MAX_MESSAGE_SIZE
        self.producers: dict[int, ProducerSide] = {}
        self.consumers: dict[int, ConsumerSide] = {}
        self.watches: dict[int, WatchSide] = {}
        self.scalable_consumers: dict[int, ScalableConsumerSide] = {}
        self.coordinator_watches: dict[int, WatchSide] = {}
        self.namespace_watches: dict[int, WatchSide] = {}
        self.supports_scalable_topics = False
        """Whether the broker said so in CONNECTED."""
        self._loop = asyncio.get_running_loop()
        self._clock = runtime.clock
        self._config = config
        self._wire = ClientProtocol()
        self._transport: asyncio.Transport | None = None
        self._out: list[bytes] = []
        self._is_collecting = False
        self._written_at = -1.0
        """When a frame was last sent alone."""
        self._requests: dict[int, asyncio.Future[Any]] = {}
        self._next_request = 0
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._lost: BraidError | None = None
        self._can_write = asyncio.Event()
        self._can_write.set()
        self._heard = True
        self._timer: Timer | None = None

    @property
    def is_open(self) -> bool:
        return self._transport is not None and self._lost is None

    @property
    def can_write(self) -> bool:
        """Whether the socket takes more at once."""
        return self._can_write.is_set()

    # The transport's calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self.write(requests.connect(CLIENT_VERSION))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._wire.room()

    def buffer_updated(self, nbytes: int) -> None:
        self._heard = True
        if self._lost is not None:
            return
        if not self._ready.done() and bytes(self._wire.room()[:5]) == b"HTTP/":
            self.abort(ProtocolError("It speaks HTTP; give the port of the binary protocol, such as pulsar://localhost:6650."))
            return
        for event in self._wire.received(nbytes):
            if self._lost is not None:
                return
            if isinstance(event, Delivery):
                self._delivery(event)
            elif isinstance(event, Command):
                self._command(event)
            elif isinstance(event, Bulk):
                self._bulk(event)
            else:
                self.abort(event)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._lost is None and (self.producers or self.consumers or self.watches or self.scalable_consumers):
            log.warning("lost the connection to %s, connecting again", self.address)
        self._end(ConnectionLost(f"The connection to {self.address} ended{f': {exc}' if exc else ''}."))

    def pause_writing(self) -> None:
        self._can_write.clear()

    def resume_writing(self) -> None:
        self._can_write.set()

    # For the client's objects.

    async def handshake(self) -> None:
        """Wait for CONNECTED."""
        timer = self._clock.call_later(self._config.connect_timeout, self._late)
        try:
            await self._ready
        finally:
            timer.cancel()
        self._timer = self._clock.call_later(self._config.keep_alive_seconds, self._keep_alive)

    async def request(self, build: Callable[[int], bytes], *, seconds: float | None = None) -> Any:
        """Send a request and return the body of its answer, which may take so long, or `operation_timeout`; raises what the
        broker answered, DeadlineExceeded or ConnectionLost."""
        if self._lost is not None:
            raise ConnectionLost(self._lost.message)
        self._next_request += 1
        number = self._next_request
        answer = self._requests[number] = self._loop.create_future()
        patience = self._config.operation_timeout if seconds is None else seconds
        timer = self._clock.call_later(patience, self._unanswered, number, patience)
        try:
            self.write(build(number))
            return await answer
        finally:
            timer.cancel()
            self._requests.pop(number, None)

    def write(self, frame: bytes) -> None:
        """Send one frame: at once if it is the first for a while, which is what a caller who awaits each answer waits for;
        what follows closely is collected until the end of the loop's turn."""
        if self._is_collecting:
            self._out.append(frame)
        elif self._transport is not None and not self._transport.is_closing():
            if self._loop.time() - self._written_at > CLOSE_TOGETHER:
                self._transport.write(frame)
                self._written_at = self._loop.time()  # now: the write itself takes its time, and frames wait behind it
            else:
                self._is_collecting = True
                self._out.append(frame)
                self._loop.call_soon(self._flush)

    def write_now(self, frame: bytes) -> None:
        """Send one frame, behind what is queued, without waiting for the end of this loop turn."""
        self.write(frame)
        self._flush()

    async def writable(self) -> None:
        """Return once the socket takes more."""
        await self._can_write.wait()

    def abort(self, error: BraidError) -> None:
        """Drop the connection; everybody who uses it is told why."""
        if self._lost is None and self._ready.done():
            log.warning("dropping the connection to %s: %s", self.address, error)
        self._end(error)
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Send what is queued and close."""
        self._flush()
        self._end(ConnectionLost("The client was closed."))
        if self._transport is not None:
            self._transport.close()

    # Inside.

    def _flush(self) -> None:
        self._is_collecting = False
        out, self._out = self._out, []
        if out and self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(out))

    def _end(self, error: BraidError) -> None:
        if self._lost is not None:
            return
        self._lost = error
        self._can_write.set()
        if self._timer is not None:
            self._timer.cancel()
        if not self._ready.done():
            self._ready.set_exception(ConnectFailed(f"The broker at {self.address} did not accept the connection: {error}"))
            self._ready.exception()  # whoever waited may have given up; that is no reason for a warning
        for answer in self._requests.values():
            if not answer.done():
                answer.set_exception(ConnectionLost(error.message))
        producers, self.producers = self.producers, {}
        consumers, self.consumers = self.consumers, {}
        watches, self.watches = self.watches, {}
        scalable, self.scalable_consumers = self.scalable_consumers, {}
        coordinators, self.coordinator_watches = self.coordinator_watches, {}
        namespaces, self.namespace_watches = self.namespace_watches, {}
        for producer in producers.values():
            producer.detached(error)
        for consumer in consumers.values():
            consumer.detached(error)
        for watch in (*watches.values(), *coordinators.values(), *namespaces.values()):
            watch.lost(error)
        for session in scalable.values():
            session.lost(error)

    def _late(self) -> None:
        self.abort(DeadlineExceeded(f"The broker at {self.address} did not answer the handshake in time."))

    def _unanswered(self, number: int, seconds: float) -> None:
        answer = self._requests.get(number)
        if answer is not None and not answer.done():
            answer.set_exception(DeadlineExceeded(f"The broker at {self.address} did not answer within {seconds:g} s."))

    def _keep_alive(self) -> None:
        if self._lost is not None:
            return
        if not self._heard:
            self.abort(ConnectionLost(f"The broker at {self.address} has been silent for too long."))
            return
        self._heard = False
        self.write(PING)
        self._timer = self._clock.call_later(self._config.keep_alive_seconds, self._keep_alive)

    def _delivery(self, delivery: Delivery) -> None:
        if not delivery.is_intact:
            # Brokers check what they store: this was damaged on the way, and comes again on a new connection.
            self.abort(ProtocolError(f"A message from {self.address} was damaged on its way (wrong checksum)."))
            return
        consumer = self.consumers.get(delivery.command.consumer_id)
        if consumer is not None:
            consumer.delivered(delivery)

    def _bulk(self, bulk: Bulk) -> None:
        """The answer to a request, whose result is the whole of it."""
        if bulk.data is None:
            self.abort(ProtocolError(f"An answer from {self.address} was damaged on its way (wrong checksum)."))
            return
        answer = self._requests.get(bulk.body.request_id)
        if answer is not None and not answer.done():
            answer.set_result(bulk)

    def _command(self, command: Command) -> None:
        kind, body = command.type, command.body
        if kind == CommandType.SEND_RECEIPT:
            if (producer := self.producers.get(body.producer_id)) is not None:
                producer.receipt(body)
        elif kind == CommandType.PING:
            self.write(PONG)
        elif kind == CommandType.CONNECTED:
            if body.max_message_size > 0:
                self.max_message_size = body.max_message_size
            self.supports_scalable_topics = body.feature_flags.supports_scalable_topics
            if not self._ready.done():
                self._ready.set_result(None)
        elif kind == CommandType.ERROR and not self._ready.done():
            self.abort(from_code(body.error, body.message))
        elif kind in _FOR_OWNERS:
            self._for_owner(kind, body)
        elif kind in _FOR_SESSIONS:
            self._for_session(kind, body)
        elif hasattr(body, "request_id"):
            self._answer(kind, body)

    def _for_owner(self, kind: int, body: Any) -> None:
        if kind == CommandType.SEND_ERROR:
            if (producer := self.producers.get(body.producer_id)) is not None:
                producer.send_failed(body)
        elif kind == CommandType.CLOSE_PRODUCER:
            if (producer := self.producers.pop(body.producer_id, None)) is not None:
                error = ConnectionLost(f"The broker at {self.address} closed the producer.")
                producer.detached(error, is_settled=body.is_settled)
        elif kind == CommandType.CLOSE_CONSUMER:
            self._close_consumer(body)
        elif kind == CommandType.REACHED_END_OF_TOPIC and (consumer := self.consumers.get(body.consumer_id)) is not None:
            consumer.ended()

    def _close_consumer(self, body: Any) -> None:
        if (consumer := self.consumers.pop(body.consumer_id, None)) is not None:
            consumer.detached(ConnectionLost(f"The broker at {self.address} closed the consumer."))
        elif (session := self.scalable_consumers.pop(body.consumer_id, None)) is not None:
            if body.HasField("assignedBrokerServiceUrl"):  # another broker leads the topic now: register there
                session.lost(ConnectionLost(f"The broker at {self.address} does not lead the topic any more."))
            else:
                session.displaced()

    def _for_session(self, kind: int, body: Any) -> None:
        if kind == CommandType.SCALABLE_TOPIC_UPDATE:
            if (watch := self.watches.get(body.session_id)) is not None:
                watch.update(body)
        elif kind == CommandType.WATCH_TC_ASSIGNMENTS_UPDATE:
            if (watch := self.coordinator_watches.get(body.watch_id)) is not None:
                watch.update(body)
        elif kind == CommandType.WATCH_SCALABLE_TOPICS_UPDATE:
            if (watch := self.namespace_watches.get(body.watch_id)) is not None:
                watch.update(body)
        elif (session := self.scalable_consumers.get(body.consumer_id)) is not None:
            session.assignment(body)

    def _answer(self, kind: int, body: Any) -> None:
        answer = self._requests.get(body.request_id)
        if answer is None or answer.done():
            return
        if kind == CommandType.PRODUCER_SUCCESS and not body.producer_ready:
            return  # queued for exclusive access: the real answer follows under the same request id
        code, text = _failure(kind, body)
        if code is None:
            answer.set_result(body)
        else:
            answer.set_exception(from_code(code, text))


_FOR_OWNERS = (
    CommandType.SEND_ERROR,
    CommandType.CLOSE_PRODUCER,
    CommandType.CLOSE_CONSUMER,
    CommandType.REACHED_END_OF_TOPIC,
    CommandType.ACTIVE_CONSUMER_CHANGE,
)
_FOR_SESSIONS = (
    CommandType.SCALABLE_TOPIC_UPDATE,
    CommandType.SCALABLE_TOPIC_ASSIGNMENT_UPDATE,
    CommandType.WATCH_TC_ASSIGNMENTS_UPDATE,
    CommandType.WATCH_SCALABLE_TOPICS_UPDATE,
)


_WITH_ERROR = (
    CommandType.LOOKUP_RESPONSE,
    CommandType.PARTITIONED_METADATA_RESPONSE,
    CommandType.ACK_RESPONSE,
    CommandType.SCALABLE_TOPIC_SUBSCRIBE_RESPONSE,
    CommandType.NEW_TXN_RESPONSE,
    CommandType.END_TXN_RESPONSE,
    CommandType.NEW_SUB_TXN_RESPONSE,
    CommandType.DECIDE_TXN_RESPONSE,
    CommandType.RENEW_TXN_RESPONSE,
    CommandType.BEGIN_SINK_RESPONSE,
    CommandType.GET_SINK_RESPONSE,
    CommandType.DESCRIBE_SEGMENTS_RESPONSE,
    CommandType.FIND_INDEX_RESPONSE,
    CommandType.FETCH_ENTRIES_RESPONSE,
    CommandType.MOVE_CURSOR_RESPONSE,
    CommandType.REPORT_PLACES_RESPONSE,
)
"""Answers that carry their error themselves."""


def _failure(kind: int, body: Any) -> tuple[int | None, str]:
    """The error an answer carries, if any."""
    if kind == CommandType.ERROR:
        return body.error, body.message
    if kind in _WITH_ERROR:
        return (body.error, body.message) if body.HasField("error") else (None, "")
    if kind == CommandType.GET_SCHEMA_RESPONSE and body.HasField("error_code"):
        return body.error_code, body.error_message
    return None, ""


async def open_connection(runtime: Runtime, config: ClientConfig, host: str, port: int) -> Connection:
    """Connect and shake hands; raises ConnectFailed."""
    address = f"{host}:{port}"
    try:
        async with asyncio.timeout(config.connect_timeout):
            transport, connection = await runtime.network.connect(host, port, lambda: Connection(runtime, config, address))
    except TimeoutError:
        raise ConnectFailed(f"Cannot connect to {address} within {config.connect_timeout:g} s; is it reachable?") from None
    except OSError as error:
        refused = isinstance(error, ConnectionRefusedError)  # asyncio puts the address where the reason should be
        reason = "Connection refused" if refused else error.strerror or str(error)
        raise ConnectFailed(f"Cannot connect to {address}: {reason}. Is a broker running there?") from error
    try:
        await connection.handshake()
    except BaseException:  # whoever gives up waiting must not leave the socket behind
        transport.abort()
        raise
    return connection
