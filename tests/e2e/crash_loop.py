"""A crash before and after every step of every plan: the points are listed at run time, and the broker at work is killed there.

    python -m tests.e2e.crash_loop

Three brokers on real sockets over one store, several such clusters at once. While an operation runs, a producer with
deduplication sends and a stream consumer reads. After each crash: within a bound nothing is pending or outside the DAG, every
active segment takes messages (and together they cover every hash), and the consumer has got every acknowledged message, in
order, once each in store. Prints how many points there were.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

from tests.e2e.churn_cluster import Cluster, patiently

from braid.client import Client, Producer
from braid.errors import BraidError, Closed, DeadlineExceeded
from braid.model.layout import SegmentLayout
from braid.model.names import TopicName
from braid.runtime.plans import Moment, watching
from braid.scalable.config import ScalableConfig
from braid.scalable.controller import ScalableTopicController
from braid.testing.sim import checkers, dag_checkers
from braid.testing.sim.checkers import Violation
from braid.web.node import BrokerNode

LANES = 10
SESSION_SECONDS = 2.0
BOUND = 45.0
"""Seconds after a crash in which everything must be well: a session, a take-over, the rest of the plan. Below the 60 s for
which a producer keeps a message, and long enough for a machine that does four times as much besides."""
SUBSCRIPTION = "reader"
BEFORE, AFTER = 12, 4
"""Messages sent before an operation, and to each segment after it."""
SCALABLE = ScalableConfig(
    consumer_grace_seconds=5.0, drain_poll_seconds=0.2, reconcile_seconds=0.5, prune_seconds=3600.0, adopt_seconds=0.3
)

log = logging.getLogger("crash")
Act = Callable[[ScalableTopicController], Awaitable[Any]]


class Operation(NamedTuple):
    """A plan and how to have it run."""

    name: str
    act: Act | None
    """None: creating the topic."""
    prefixes: tuple[str, ...]
    segments: int = 2
    prepare: Act | None = None


async def _split_first(controller: ScalableTopicController) -> None:
    await controller.split_segment(0)


async def _extra(controller: ScalableTopicController) -> None:
    await controller.create_subscription("extra")


OPERATIONS = (
    Operation("create", None, ("create:",)),
    Operation("split", lambda controller: controller.split_segment(0), ("split:",)),
    Operation("merge", lambda controller: controller.merge_segments(0, 1), ("merge:",)),
    Operation("prune", lambda controller: controller.prune(), ("prune:",), prepare=_split_first),
    Operation("delete", lambda controller: controller.delete(), ("delete:",)),
    Operation("create-subscription", _extra, ("create-subscription:",)),
    Operation(
        "delete-subscription",
        lambda controller: controller.delete_subscription("extra"),
        ("delete-subscription:",),
        prepare=_extra,
    ),
    Operation("seek", lambda controller: controller.seek("extra", 1), ("seek:",), prepare=_extra),
    Operation("clear-backlog", lambda controller: controller.clear_backlog("extra"), ("clear-backlog:",), prepare=_extra),
)


class Point(NamedTuple):
    """Where to crash: the n-th time that a step comes to this moment."""

    operation: Operation
    step: str
    moment: Moment
    occurrence: int

    def __str__(self) -> str:
        return f"{self.moment} {self.step}" + (f" ({self.occurrence + 1})" if self.occurrence else "")


class Crash(Closed):
    """The broker is dead; whatever ran in it ends here."""


LANE: ContextVar[Lane | None] = ContextVar("lane", default=None)
"""The cluster in whose plan we are: everything that a cluster starts inherits it."""


async def hook(step: str, moment: Moment) -> None:
    lane = LANE.get()
    if lane is not None:
        await lane.reached(step, moment)


class Lane:
    """A cluster that is crashed at one point after another."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.topic = ""
        self.point: Point | None = None
        self.seen: list[tuple[str, Moment]] = []
        self.crashed: int | None = None

    async def reached(self, step: str, moment: Moment) -> None:
        self.seen.append((step, moment))
        point = self.point
        if point is None or (step, moment) != (point.step, point.moment):
            return
        if self.seen.count((step, moment)) - 1 != point.occurrence:
            return
        self.point = None
        victim = self.cluster.leader(self.topic) or self.cluster.nodes[0]
        # In a task of its own: the death of the broker is the end of this one.
        await asyncio.shield(asyncio.create_task(self._kill(victim)))
        raise Crash("killed")

    async def _kill(self, victim: BrokerNode) -> None:
        self.crashed = await self.cluster.kill(victim)

    async def steps(self, operation: Operation) -> list[Point]:
        """What an undisturbed run goes through."""
        await self.run(operation, None)
        found = []
        for at, (step, moment) in enumerate(self.seen):
            if step.startswith(operation.prefixes):
                found.append(Point(operation, step, moment, self.seen[:at].count((step, moment))))
        return found

    async def run(self, operation: Operation, point: Point | None) -> None:
        """One topic, one operation, perhaps one crash; then everything must be well."""
        cluster = self.cluster
        self.topic = f"topic://public/default/{operation.name}-{time.monotonic_ns()}"
        name = TopicName.parse(self.topic)
        self.crashed, self.seen = None, []
        if operation.act is None:
            self.point = point
            await self._attempt(lambda: cluster.nodes[0].service.create_scalable_topic(name, operation.segments))
            if cluster.record(self.topic) is None:
                assert str(point) == "before create:intend"
                await cluster.nodes[1].service.create_scalable_topic(name, operation.segments)
        else:
            await patiently("creation", BOUND, lambda: self._create(name, operation.segments))
        async with (
            cluster.client() as client,
            self._reading(client),
            client.producer(self.topic, name="p", deduplication=True) as producer,
        ):
            await self._send(producer, "k", BEFORE)
            if operation.act is not None:
                if operation.prepare is not None:
                    prepare = operation.prepare
                    await patiently("preparation", BOUND, lambda: self._prepare(prepare))
                if operation.name == "prune":
                    await self._drained()
                await self._leader()
                self.seen, self.point = [], point
                act = operation.act
                await self._attempt(lambda: self._led(act))
            assert point is None or self.crashed is not None, f"{point} was not reached"
            began = time.monotonic()
            left = await cluster.quiet(BOUND)
            assert left == {}, f"{point}: {left} after {BOUND} s"
            if cluster.record(self.topic) is not None:
                await self._write_everywhere(producer)
                assert time.monotonic() - began < 2 * BOUND
                await self._everything_read()
        if self.crashed is not None:
            await cluster.restart(self.crashed)

    # The operation

    async def _create(self, name: TopicName, segments: int) -> None:
        if self.cluster.record(self.topic) is None:
            await self.cluster.up[0].service.create_scalable_topic(name, segments)

    async def _prepare(self, prepare: Act) -> None:
        record = self.cluster.record(self.topic)
        if record is None or record.epoch == 0:  # else it was done by an attempt whose answer was lost
            await self._led(prepare)

    async def _leader(self) -> BrokerNode:
        return await patiently("a leader", BOUND, self._find_leader)  # type: ignore[no-any-return]

    async def _find_leader(self) -> BrokerNode:
        node = self.cluster.leader(self.topic) or self.cluster.up[0]
        await node.service.scalable.lead(TopicName.parse(self.topic))
        return node

    async def _led(self, act: Act) -> None:
        node = await self._leader()
        controller = self.cluster.controller(node, self.topic)
        if controller is None:
            raise Closed("the leader has just gone")
        await act(controller)

    async def _attempt(self, work: Callable[[], Awaitable[Any]]) -> None:
        """Until it is done, or its broker is dead; a refusal (another leader, say) is no answer."""
        until = time.monotonic() + BOUND
        while self.crashed is None and time.monotonic() < until:
            self.seen = []
            task = asyncio.create_task(_succeeds(work()))
            while not task.done() and self.crashed is None:
                await asyncio.wait([task], timeout=0.02)
            if not task.done():
                await asyncio.wait([task], timeout=0.1)
                task.cancel()
                await asyncio.wait([task])
            elif task.result():
                return

    # Load

    async def _send(self, producer: Producer, prefix: str, count: int) -> None:
        history = self.cluster.history
        for number in range(count):
            key = f"{prefix}{number % 6}"
            sequence = self._numbers = self._numbers + 1
            value = [self.topic, "p", key, sequence]
            invoked = history.invoke("p", "send", value)
            message_id = await producer.send(f"p/{key}/{sequence}".encode(), key=key)
            history.add("p", "ok", "send", [*value, str(message_id)], number=invoked)

    _numbers = 0

    async def _write_everywhere(self, producer: Producer) -> None:
        record = self.cluster.record(self.topic)
        assert record is not None
        layout: SegmentLayout = record.layout
        layout.check()
        for segment in layout.active_in_order:
            key = next(each for each in (f"x{n}-" for n in range(10_000)) if _lands(layout, each, segment.segment_id))
            await _within(f"a message to segment {segment.segment_id}", self._send(producer, key, 1))

    @contextlib.asynccontextmanager
    async def _reading(self, client: Client) -> AsyncIterator[None]:
        async def read() -> None:
            self.cluster.history.add("admin", "ok", "subscribe", [self.topic, SUBSCRIPTION])
            consumer = await client.stream_consumer(self.topic, SUBSCRIPTION, name="c")
            ready.set()
            while True:
                try:
                    message = await consumer.receive(timeout=0.5)
                except DeadlineExceeded:
                    continue
                producer, key, sequence = message.payload.decode().split("/")
                value = [self.topic, SUBSCRIPTION, producer, key, int(sequence), str(message.id), message.redelivery_count]
                self.cluster.history.add("c", "ok", "deliver", value, segment=message.id.segment_id)
                await consumer.acknowledge_cumulative(message)

        ready = asyncio.Event()
        task = asyncio.create_task(_succeeds(read()))
        try:
            await _within("opening the consumer", ready.wait())
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def _everything_read(self) -> None:
        """The consumer has got all that was acknowledged."""
        until = time.monotonic() + BOUND
        events = self.cluster.history.events
        while time.monotonic() < until:
            mine = [event for event in events if event.op in ("send", "deliver") and event.value[0] == self.topic]
            sent = {event.value[3] for event in mine if event.op == "send" and event.kind == "ok"}
            if sent <= {event.value[4] for event in mine if event.op == "deliver"}:
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"{self.topic}: not everything reached its consumer within {BOUND} s")

    async def _drained(self) -> None:
        """Until the sealed segment has been read and acknowledged."""
        await self._everything_read()
        node = await self._leader()
        record = self.cluster.record(self.topic)
        assert record is not None
        parent = TopicName.parse(self.topic).segment(record.layout.segment(0).hash_range, 0)
        for _attempt in range(500):
            if (await node.service.segments.backlog(parent, SUBSCRIPTION)).is_drained:
                return
            await asyncio.sleep(0.02)


def _lands(layout: SegmentLayout, prefix: str, segment_id: int) -> bool:
    return layout.segment_of_key(f"{prefix}0").segment_id == segment_id


async def _within(what: str, work: Awaitable[Any]) -> None:
    try:
        async with asyncio.timeout(BOUND):
            await work
    except TimeoutError:
        raise AssertionError(f"{what} took longer than {BOUND:g} s") from None


async def _succeeds(work: Awaitable[Any]) -> bool:
    """Whether it ends well; the end of a broker is the end of what it was asked."""
    try:
        await work
    except BraidError as error:
        log.info("refused: %s: %s", type(error).__name__, error)
        return False
    return True


async def _work(points: asyncio.Queue[Point], done: list[str], starting: asyncio.Lock) -> None:
    """One lane: its own cluster, point after point."""
    cluster = Cluster(session_seconds=SESSION_SECONDS, scalable=SCALABLE)
    lane = Lane(cluster)
    LANE.set(lane)
    async with contextlib.AsyncExitStack() as stack:
        async with starting:  # one after the other: a web framework's start holds up everybody's heartbeat
            await stack.enter_async_context(cluster)
        while not points.empty():
            point = points.get_nowait()
            try:
                await lane.run(point.operation, point)
            except (AssertionError, BraidError, TimeoutError) as error:
                raise AssertionError(f"crash {point}: {type(error).__name__}: {error}") from error
            done.append(str(point))
        assert _violations(cluster) == []


async def _listed() -> list[Point]:
    cluster = Cluster(session_seconds=SESSION_SECONDS, scalable=SCALABLE)
    lane = Lane(cluster)
    LANE.set(lane)
    async with cluster:
        found = [point for operation in OPERATIONS for point in await lane.steps(operation)]
        assert _violations(cluster) == []
    return found


def _violations(cluster: Cluster) -> list[Violation]:
    events = cluster.history.events
    return [
        *checkers.no_loss(_without_deleted(events)),
        *checkers.no_phantom(events),
        *checkers.no_duplicate(events, stored_once=True),
        *checkers.key_order(events, ordered=[SUBSCRIPTION]),
        *dag_checkers.drained_first(events, ordered=[SUBSCRIPTION]),
        *dag_checkers.dag(events),
        *dag_checkers.intent_first(events),
        *dag_checkers.leader_terms(events),
    ]


def _without_deleted(events: list[Any]) -> list[Any]:
    """What was in a topic that is deleted need not have been read."""
    gone = {event.value for event in events if event.op == "topic-gone"}
    return [event for event in events if event.op not in ("send", "subscribe", "deliver") or event.value[0] not in gone]


async def crash_everywhere() -> tuple[list[Point], float]:
    """All points, and how long it took. Raises AssertionError for the first one after which something is wrong."""
    began = time.monotonic()
    with watching(hook):
        found = await asyncio.create_task(_listed())
        points: asyncio.Queue[Point] = asyncio.Queue()
        for point in found:
            points.put_nowait(point)
        done: list[str] = []
        starting = asyncio.Lock()
        async with asyncio.TaskGroup() as group:
            for _lane in range(LANES):
                group.create_task(_work(points, done, starting))
    assert sorted(done) == sorted(str(point) for point in found)
    return found, time.monotonic() - began


def main() -> None:
    logging.basicConfig(level=logging.ERROR)
    try:
        points, seconds = asyncio.run(crash_everywhere())
    except* AssertionError as group:
        for error in group.exceptions:
            sys.stdout.write(f"{error}\n")
        sys.exit(1)
    by_plan = {each.name: sum(1 for point in points if point.operation is each) for each in OPERATIONS}
    sys.stdout.write(f"{len(points)} crash points in {seconds:.0f} s: {by_plan}\n")
    assert all(by_plan.values()), "a plan without a step"


if __name__ == "__main__":
    main()
