"""`BrokerConnection`: one client connection: bytes to commands, commands to handlers, and the rules of staying connected.

Owns the producers and consumers of the connection, keep-alive, and back-pressure in both directions: reading stops while
too many publishes are unanswered, dispatch stops while the socket is full. A peer that breaks the protocol is logged once
and dropped; it disturbs no other connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeAlias

from braid import __version__
from braid.broker.commands import ASYNC_COMMANDS, SYNC_COMMANDS
from braid.broker.consumer import Consumer
from braid.broker.link import Link
from braid.broker.producer import Producer, refusal_frame
from braid.broker.scalable_consumers import ScalableConsumer
from braid.broker.service import BrokerService
from braid.broker.tc_watch import CoordinatorWatch
from braid.errors import BraidError, NotAllowed, Overloaded, ProtocolError
from braid.runtime.logs import LogOnce
from braid.runtime.tasks import Tasks
from braid.scalable.dag_watch import DagWatchSession
from braid.scalable.namespace_watch import NamespaceWatchSession
from braid.wire import messages
from braid.wire.commands import Command
from braid.wire.replies import PING, connected, error
from braid.wire.server import Event, Send, ServerProtocol, Stage
from braid.wire.types import CommandType

log = logging.getLogger(__name__)
_complaints = LogOnce(log)

RECENTLY_CLOSED = 1000
"""Producers closed by the broker whose late SENDs are still dropped without a complaint."""


COMMANDS_AT_ONCE = 64
"""Commands of one connection that are begun in one turn of the loop; the rest of what has arrived waits for the next one."""
ACKS_PER_COMMAND = 64
"""So many ids in an ACK count as one more command."""
CLOSED_AT_ONCE = 64
"""Watches of a lost connection that are ended in one turn of the loop."""
UNREAD_FACTOR = 4
"""Dispatch stops at the high water of unsent bytes, reading of further requests at this many times as much."""


Watching: TypeAlias = DagWatchSession | NamespaceWatchSession | CoordinatorWatch


class BrokerConnection(asyncio.Protocol):
    """The asyncio protocol of one accepted connection."""

    def __init__(self, service: BrokerService, connections: set[BrokerConnection]) -> None:
        self.service = service
        self.config = service.config
        self.clock = service.runtime.clock
        self._connections = connections
        self._protocol = ServerProtocol(self.config.max_message_size)
        self.link = Link(asyncio.get_running_loop(), self.clock)
        self.tasks = Tasks("connection")
        self.producers: dict[int, Producer] = {}
        self.consumers: dict[int, Consumer] = {}
        self.scalable_consumers: dict[int, ScalableConsumer] = {}
        self.watches: dict[int, DagWatchSession] = {}
        """Layout sessions, by their own ids."""
        self.namespace_watches: dict[int, NamespaceWatchSession] = {}
        self.coordinator_watches: dict[int, CoordinatorWatch] = {}
        self.creating: dict[tuple[str, int], bool] = {}
        """Producers, consumers and watches under way, by kind and id; True once the client has closed it again meanwhile."""
        self.fetching = asyncio.Semaphore(self.config.max_fetches_per_connection)
        """Bulk reads under way; the others wait for their turn."""
        self._closed_producers: OrderedDict[int, tuple[float, BraidError | None]] = OrderedDict()
        """Those closed by the broker: when, and what their late messages are answered with."""
        self._transport: asyncio.Transport | None = None
        self._later: list[Event] = []
        """What has arrived and waits for the next turn of the loop."""
        self._is_reading = True
        self._is_over = False
        """Dropped or closed by us: what still arrives is not served."""
        self._heard = False
        self._awaits_pong = False
        self._timer = self.clock.call_later(self.config.keep_alive_seconds, self._keep_alive)

    # The transport's calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self.link.opened(transport)  # type: ignore[arg-type]
        transport.set_write_buffer_limits(high=self.config.write_high_water_bytes)  # type: ignore[attr-defined]
        self._connections.add(self)
        if len(self._connections) > self.config.max_connections:
            self.refuse(NotAllowed(f"The broker has {self.config.max_connections} connections already; try another one."))

    def data_received(self, data: bytes) -> None:
        self._heard = True
        link = self.link
        link.heard()
        if self._is_over or self._protocol.stage is Stage.FAILED:
            return
        events = self._protocol.receive(data)
        if self._later:
            self._later += events
        else:
            self._serve(events)

    def _serve(self, events: list[Event]) -> None:
        """Take up what has arrived, in order. SENDs of producers go on at once; of anything else, so much in one turn."""
        link, producers = self.link, self.producers
        left = COMMANDS_AT_ONCE
        rest = iter(events)
        for event in rest:
            if type(event) is Send:
                producer = producers.get(event.producer_id)
                if producer is not None:
                    try:
                        producer.publish(event)
                    except ProtocolError as broken:
                        self._drop(broken)
                        return
                    continue
                self._send_without_producer(event)
            elif type(event) is Command:
                self._command(event)
                left -= 1 if event.type != CommandType.ACK else 1 + len(event.body.message_id) // ACKS_PER_COMMAND
            else:
                self._drop(event)  # type: ignore[arg-type]
            if self._is_over:
                return
            if left <= 0 and (later := list(rest)):
                self._later = later
                self._pause_reading()
                asyncio.get_running_loop().call_soon(self._go_on)
                return
        if link.pending_publishes >= self.config.max_pending_publishes_per_connection or self.service.budget.is_spent:
            self._pause_reading()
        elif not link.is_writable and self._unsent() > self.config.write_high_water_bytes * UNREAD_FACTOR:
            # It asks and does not read the answers: it is asked to wait.
            self._pause_reading()

    def _go_on(self) -> None:
        """With what has arrived and waits."""
        events, self._later = self._later, []
        if self._is_over or not self.link.is_open:
            return
        try:
            self._serve(events)
        except BaseException:
            # A bug. One in `data_received` makes the loop end the connection; this one would leave it open and unread for ever.
            self._is_over = True
            self.link.abort()
            raise
        if not self._later:
            self._resume_reading()

    def _unsent(self) -> int:
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def pause_writing(self) -> None:
        self.link.writable(False)

    def resume_writing(self) -> None:
        self.link.writable(True)
        self._resume_reading()
        for consumer in list(self.consumers.values()):
            consumer.subscription.pump()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._timer.cancel()
        self.link.lost()
        self.tasks.cancel()
        for producer in list(self.producers.values()):
            producer.topic.remove_producer(producer)
        self.producers.clear()
        for consumer in list(self.consumers.values()):
            consumer.subscription.detach(consumer)
        self.consumers.clear()
        for scalable in list(self.scalable_consumers.values()):
            scalable.lost()
        self.scalable_consumers.clear()
        watches: list[Watching] = [*self.watches.values(), *self.namespace_watches.values(), *self.coordinator_watches.values()]
        self.watches.clear()
        self.namespace_watches.clear()
        self.coordinator_watches.clear()
        _close_some(watches)

    # Commands.

    def _command(self, command: Command) -> None:
        kind = command.type
        run = SYNC_COMMANDS.get(kind)
        if run is not None:
            try:
                run(self, command.body)
            except ProtocolError as broken:
                self._drop(broken)
            return
        if kind == CommandType.CONNECT:
            self._connect(command.body)
            return
        handler = ASYNC_COMMANDS.get(kind)
        if handler is None:
            return
        if len(self.tasks) >= self.config.max_requests_per_connection:
            self._fail(handler.fail, command.body, Overloaded("Too many requests under way on this connection; slow down."))
            return
        self.tasks.spawn(self._run(handler.run, handler.fail, command.body), CommandType(kind).name)

    async def _run(self, run: Callable[..., Any], fail: Callable[..., bytes], body: Any) -> None:
        """Run one request; what it refuses becomes its answer."""
        try:
            await run(self, body)
        except ProtocolError as broken:
            self._drop(broken)
        except BraidError as failure:
            self._fail(fail, body, failure)
        except Exception:
            # A bug, not a refusal: the client is told, the log has the trace, other requests go on.
            log.exception("a request of %s failed", self.link.peer)
            self._fail(fail, body, BraidError("The broker failed to serve the request; its log says why."))

    def _fail(self, fail: Callable[..., bytes], body: Any, failure: BraidError) -> None:
        self.link.write(fail(body, failure))

    def _connect(self, body: messages.CommandConnect) -> None:
        link = self.link
        link.client_version = body.client_version
        link.protocol_version = body.protocol_version
        link.is_braid = body.feature_flags.supports_braid
        flags = messages.FeatureFlags(supports_get_partitioned_metadata_without_auto_creation=True)
        if self.service.has_scalable:
            flags.supports_scalable_topics = True
        if self.service.transactions.config.enabled:
            flags.supports_tc_metadata_discovery = True
        if link.is_braid:
            flags.supports_braid = True
        link.write(connected(f"Braid {__version__}", body.protocol_version, self.config.max_message_size, flags))

    def _send_without_producer(self, send: Send) -> None:
        closed, refusal = self._closed_producers.get(send.producer_id, (float("-inf"), None))
        if self.clock.monotonic() - closed < self.config.keep_alive_seconds:  # it crossed our CLOSE_PRODUCER on the way
            if refusal is not None:
                self.link.write(refusal_frame(send, refusal))
            return
        self._drop(ProtocolError(f"A SEND came for producer {send.producer_id}, which does not exist on this connection."))

    def _drop(self, broken: ProtocolError) -> None:
        """The peer broke the protocol: say so once, and close without a reply."""
        self._is_over = True
        _complaints.warning((self.link.peer.rpartition(":")[0], str(broken)), "dropping %s: %s", self.link.peer, broken)
        self.link.abort()

    def refuse(self, failure: BraidError) -> None:
        """Say why, then close."""
        self._is_over = True
        self.link.write(error(-1, failure.code, failure.message))
        self.link.close()

    # Producers and consumers.

    def add_producer(self, producer: Producer) -> None:
        replaced = self.producers.get(producer.producer_id)
        if replaced is not None:
            replaced.topic.remove_producer(replaced)
        self.producers[producer.producer_id] = producer
        producer.on_closed = self._producer_closed

    def _producer_closed(self, producer: Producer) -> None:
        """The broker closed it; SENDs that are already on the way are dropped for a while."""
        if self.producers.get(producer.producer_id) is producer:
            del self.producers[producer.producer_id]
        self._closed_producers[producer.producer_id] = (self.clock.monotonic(), producer.refusal)
        self._closed_producers.move_to_end(producer.producer_id)
        if len(self._closed_producers) > RECENTLY_CLOSED:
            self._closed_producers.popitem(last=False)

    def add_consumer(self, consumer: Consumer) -> None:
        self.consumers[consumer.info.consumer_id] = consumer
        consumer.on_closed = self._consumer_closed

    def _consumer_closed(self, consumer: Consumer) -> None:
        if self.consumers.get(consumer.info.consumer_id) is consumer:
            del self.consumers[consumer.info.consumer_id]

    # Back-pressure and keep-alive.

    def _pause_reading(self) -> None:
        if self._is_reading and self._transport is not None and not self._transport.is_closing():
            self._is_reading = False
            self._transport.pause_reading()
            self.link.when_drained = self._resume_reading
            if self.service.budget.is_spent:
                self.service.budget.wait(self._resume_reading)

    def _resume_reading(self) -> None:
        if self._is_reading or self._later:
            return
        if self.link.pending_publishes > self.config.max_pending_publishes_per_connection // 2:
            return
        if not self.link.is_writable and self._unsent() > self.config.write_high_water_bytes * UNREAD_FACTOR:
            return
        if self.service.budget.is_spent:
            # Its own receipts may all be out by then, so that nothing else would wake it.
            self.service.budget.wait(self._resume_reading)
            return
        self._is_reading = True
        self.link.when_drained = None
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _keep_alive(self) -> None:
        """Once per period: a peer that said nothing since the last PING is gone."""
        if self._protocol.stage is Stage.START or (self._awaits_pong and not self._heard and self._is_reading):
            self.link.abort()
            return
        self._heard = False
        if self.link.protocol_version >= 1:
            self._awaits_pong = True
            self.link.write(PING)
        self._timer = self.clock.call_later(self.config.keep_alive_seconds, self._keep_alive)

    async def close(self) -> None:
        """The broker stops: end the requests under way and the connection."""
        self._is_over = True
        await self.tasks.close()
        self.link.close()


def _close_some(watches: list[Watching]) -> None:
    """End watches that nobody hears any more, the others in the next turns: each has tasks of its own to end."""
    for watch in watches[:CLOSED_AT_ONCE]:
        watch.close()
    if len(watches) > CLOSED_AT_ONCE:
        asyncio.get_running_loop().call_soon(_close_some, watches[CLOSED_AT_ONCE:])
