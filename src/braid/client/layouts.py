"""`LayoutSession`: a topic's layout as a broker tells it, now and whenever it changes (commands 70 to 72).

Owns the session at a broker and opens a new one whenever it is lost, with growing pauses. A lower epoch is ignored inside one
session, and in a new one too if the topic is known to be the same; else a new session is believed. Works for `topic://` and
for `persistent://` names, whose partitions are shown as a layout; brokers without scalable topics are asked for those once.
Knows nothing of messages.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from braid.client.connection import Connection
from braid.errors import (
    BraidError,
    Closed,
    ConnectFailed,
    ConnectionLost,
    DeadlineExceeded,
    InvalidArgument,
    NotAllowed,
    NotFound,
    NotReady,
    ProtocolError,
    TopicNotFound,
    TransportError,
    Unavailable,
    from_code,
)
from braid.model.hashranges import HashRange
from braid.model.layout import SegmentLayout
from braid.model.names import Domain, TopicName
from braid.model.routing import Routing
from braid.model.segments import NOT_SEALED, SegmentInfo, SegmentState
from braid.runtime.tasks import Tasks
from braid.wire import messages as pb
from braid.wire import requests
from braid.wire import types as wire

if TYPE_CHECKING:
    from braid.client.client import Client

log = logging.getLogger(__name__)
SESSION_BACKOFF_MAX = 30.0
"""Longest pause between attempts to open a session again, in seconds."""


class LayoutSession:
    """The layout of one topic. `open` returns with the first one; listeners hear of the others."""

    def __init__(self, client: Client, topic: str, *, may_create: bool = True) -> None:
        self.client = client
        self.topic = topic
        self.incarnation = ""
        """Of the topic; empty for a regular one."""
        self.resolved: TopicName = TopicName.parse(topic)
        """The topic's identity, as the broker resolved it."""
        self.controller_url: str | None = None
        """Of the broker that leads the topic; None if nobody does at the moment, or for a regular topic."""
        self.segment_brokers: Mapping[int, str] = {}
        """Owner of each active segment when the layout was sent; a hint, lookups decide."""
        self.failure: BraidError | None = None
        """Why there will be no more layouts, if so: the topic was deleted."""
        self._may_create = may_create
        self._layout: SegmentLayout | None = None
        self._listeners: list[tuple[Callable[[SegmentLayout], None], Callable[[BraidError], None]]] = []
        self._waiters: list[asyncio.Future[None]] = []
        self._connection: Connection | None = None
        self._session_id = -1
        self._floor = -1
        """Lowest epoch this session may tell."""
        self._first: asyncio.Future[None] | None = None
        self._is_lost = asyncio.Event()
        self._tasks = Tasks(f"layout of {topic}")

    @property
    def layout(self) -> SegmentLayout:
        """The newest layout; only after `open`."""
        if self._layout is None:
            raise Closed(f"The layout of {self.topic} is not known; the session is not open.")
        return self._layout

    @property
    def is_synthetic(self) -> bool:
        """Whether this is a regular topic, shown as a layout."""
        return self.layout.routing is Routing.MOD_N

    @property
    def is_attached(self) -> bool:
        """Whether a broker will tell changes at the moment."""
        return self._connection is not None

    async def open(self) -> None:
        """Wait for the first layout; transient refusals are retried until the operation's deadline. Raises TopicNotFound,
        NotAllowed (the feature is off, or the name has no layout) and what keeps the cluster from answering."""
        clock, config = self.client.runtime.clock, self.client.config
        deadline = clock.monotonic() + config.operation_timeout
        pause = config.backoff_initial
        while True:
            try:
                await self._start()
                break
            except (TransportError, Unavailable) as error:
                if clock.monotonic() + pause >= deadline:
                    raise
                log.info("the layout of %s cannot be had yet: %s", self.topic, error)
            await clock.sleep(pause)
            pause = min(pause * 2, config.backoff_max)
        if self.failure is not None:  # stopped, or the topic was deleted, since the answer came
            self._leave()
            raise type(self.failure)(*self.failure.args)
        self._tasks.spawn(self._stay(), "stay told")

    def listen(self, changed: Callable[[SegmentLayout], None], failed: Callable[[BraidError], None]) -> None:
        """Call `changed` with every layout from now on, and `failed` once there will be no more."""
        self._listeners.append((changed, failed))

    async def wait_newer(self, epoch: int) -> SegmentLayout:
        """The first layout above this epoch; raises why there will be none. Bounded by the caller."""
        while self.layout.epoch <= epoch:
            if self.failure is not None:
                raise type(self.failure)(*self.failure.args)
            change: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(change)
            try:
                await change
            finally:
                if change in self._waiters:
                    self._waiters.remove(change)
        return self.layout

    def refresh(self) -> None:
        """Ask again, in case a notification was lost on its way; not if the answer to that question is still awaited."""
        if self._connection is not None and self._first is None:
            self._leave()
            self._is_lost.set()

    async def close(self) -> None:
        """End the session. Idempotent."""
        self.stop()
        await self._tasks.close()

    def stop(self) -> None:
        """End the session without waiting for what runs. Idempotent."""
        self._leave()
        if self.failure is None:
            self.failure = Closed(f"The layout of {self.topic} is not followed any more.")
        if self._first is not None and not self._first.done():
            self._first.set_exception(Closed(f"The layout of {self.topic} is not followed any more."))
        self._listeners.clear()
        self._wake()
        self._tasks.cancel()

    # The connection's side.

    def update(self, body: Any) -> None:
        if body.session_id != self._session_id:
            return  # of a session that was given up
        if body.HasField("error"):
            self._refused(self._explained(from_code(body.error, body.message)))
            return
        try:
            self._take(layout_of(body.dag), body)
        except BraidError as error:
            log.error("the layout of %s that came from the broker is not valid and is ignored: %s", self.topic, error)
            self._refused(ProtocolError(f"The broker sent a layout of {self.topic} that is not valid: {error}"))

    def lost(self, error: BraidError) -> None:
        self._connection = None
        if self._first is not None and not self._first.done():
            self._first.set_exception(ConnectionLost(error.message))
        else:
            self._is_lost.set()

    # Inside.

    async def _start(self) -> None:
        """Open a session and wait for its first layout."""
        client = self.client
        connection = await self._connect()
        if not connection.supports_scalable_topics:
            await self._show_partitions(connection)
            return
        self._floor = -1
        self._session_id = client.new_id()
        first = self._first = asyncio.get_running_loop().create_future()
        connection.watches[self._session_id] = self
        self._connection = connection
        timer = client.runtime.clock.call_later(client.config.operation_timeout, self._late, first)
        try:
            connection.write(requests.scalable_topic_lookup(self._session_id, self.topic, self._may_create))
            await first
        except BaseException:
            self._leave()
            raise
        finally:
            timer.cancel()
            self._first = None

    async def _connect(self) -> Connection:
        try:
            return await self.client.locate(self.topic)
        except (Unavailable, NotAllowed, NotFound, ConnectFailed):
            return await self.client.service_connection()  # any broker can tell layouts, also while an owner is gone

    async def _show_partitions(self, connection: Connection) -> None:
        """The broker tells no layouts: a regular topic is shown as the partitions it has now, and stays that way."""
        if self._layout is not None:
            raise NotReady(
                f"The broker at {connection.address} serves no scalable topics, so it does not tell of {self.topic}."
            )
        name = self.resolved
        if name.domain is not Domain.PERSISTENT:
            raise NotAllowed(
                f"The broker at {connection.address} serves no scalable topics, so {name} cannot be used; enable them there "
                "(scalable_topics.enabled), or use a persistent:// topic."
            )
        count = await self.client.partitions(self.topic)
        self._layout = SegmentLayout.synthetic([str(name.partition(number)) for number in range(count)] or [self.topic])

    def _late(self, first: asyncio.Future[None]) -> None:
        if not first.done():
            first.set_exception(DeadlineExceeded(f"No broker told the layout of {self.topic} in time."))

    def _take(self, layout: SegmentLayout, body: Any) -> None:
        if layout.epoch < self._floor:
            return
        known = self._layout
        incarnation = body.dag.incarnation
        if self.incarnation and incarnation and incarnation != self.incarnation:
            self._fail(TopicNotFound(f"The topic {self.topic} was deleted and created again; open it anew."))
            return
        if known is not None and incarnation and layout.epoch < known.epoch:
            # Of a broker that lags behind. Sealed segments do not come back: what follows the layout must not go back either.
            log.info("%s: a broker told a layout of the past, epoch %d", self.topic, layout.epoch)
            self._answer()
            return
        self._floor = layout.epoch
        self._layout = layout
        self.incarnation = incarnation or self.incarnation
        self.controller_url = body.dag.controller_broker_url or None
        self.segment_brokers = {each.segment_id: each.broker_url for each in body.dag.segment_brokers}
        if body.resolved_topic_name:
            self.resolved = TopicName.parse(body.resolved_topic_name)
        self._answer()
        if known is not None and known != layout:
            log.info("%s has a new layout: %r", self.topic, layout)
            for changed, _failed in list(self._listeners):
                changed(layout)
        self._wake()

    def _answer(self) -> None:
        if self._first is not None and not self._first.done():
            self._first.set_result(None)

    def _refused(self, error: BraidError) -> None:
        if self._first is not None and not self._first.done():
            self._first.set_exception(error)
        elif isinstance(error, TopicNotFound):
            self._fail(error)
        else:
            log.warning("the broker ended the layout session of %s: %s", self.topic, error)
            self._leave()
            self._is_lost.set()

    def _explained(self, error: BraidError) -> BraidError:
        if isinstance(error, NotAllowed) and TopicName.parse(self.topic).domain is Domain.TOPIC:
            return NotAllowed(
                f"{error.message} (Scalable topics are refused for {self.topic}; enable them on the brokers "
                "(scalable_topics.enabled), or use a persistent:// topic.)"
            )
        return error

    def _fail(self, error: BraidError) -> None:
        if self.failure is not None:
            return
        self.failure = error
        self._leave()
        if self._first is not None and not self._first.done():
            self._first.set_exception(error)
        for _changed, failed in list(self._listeners):
            failed(error)
        self._wake()

    def _leave(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None and connection.watches.pop(self._session_id, None) is not None and connection.is_open:
            connection.write(requests.scalable_topic_close(self._session_id))
        self._session_id = -1

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def _stay(self) -> None:
        """Open a session again whenever it is lost: at once, then with growing pauses."""
        clock, config = self.client.runtime.clock, self.client.config
        while self.failure is None:
            await self._is_lost.wait()
            self._is_lost.clear()
            pause = config.backoff_initial
            while self._connection is None and self.failure is None:
                try:
                    await self._start()
                except (TopicNotFound, Closed) as error:  # the topic is gone, or the client closed
                    self._fail(error)
                except BraidError as error:
                    log.info("the layout of %s cannot be had yet: %s", self.topic, error)
                    await clock.sleep(pause * (0.5 + self.client.runtime.random.random()))
                    pause = min(pause * 2, SESSION_BACKOFF_MAX)


def layout_of(dag: pb.ScalableTopicDAG) -> SegmentLayout:
    """The layout a broker sent; raises InvalidArgument if it cannot be one."""
    segments = {each.segment_id: _segment(each) for each in dag.segments}
    active = [each for each in segments.values() if each.is_active]
    if not active:
        raise NotReady("The layout has no active segment.")
    routing = Routing.HIGH16
    if dag.routing:
        if dag.routing not in list(Routing):
            raise InvalidArgument(f"The layout is routed by {dag.routing!r}, which this client does not know; use a newer one.")
        routing = Routing(dag.routing)
    elif all(each.legacy_topic_name is not None for each in active):
        routing = Routing.MOD_N  # brokers that do not say: a regular topic's partitions
    layout = SegmentLayout(dag.epoch, max(segments) + 1, segments, routing)
    layout.check()
    return layout


def _segment(each: pb.SegmentInfoProto) -> SegmentInfo:
    is_sealed = int(each.state) == wire.SegmentState.SEALED
    return SegmentInfo(
        segment_id=each.segment_id,
        hash_range=HashRange.of(each.hash_start, each.hash_end),
        state=SegmentState.SEALED if is_sealed else SegmentState.ACTIVE,
        parent_ids=tuple(each.parent_ids),
        child_ids=tuple(each.child_ids),
        created_at_epoch=each.created_at_epoch,
        sealed_at_epoch=each.sealed_at_epoch if is_sealed else NOT_SEALED,
        created_at_ms=each.created_at_ms,
        sealed_at_ms=each.sealed_at_ms if is_sealed else NOT_SEALED,
        legacy_topic_name=each.legacy_topic_name if each.HasField("legacy_topic_name") else None,
    )
