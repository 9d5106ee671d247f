"""The workloads on scalable topics: W1 and W2 on `topic://`, W3 (checkpoints) and W6 (layout churn).

Phases as in `messaging.py`. Meanwhile an administrator splits and merges, in W6 without rest and with subscriptions that come
and go, seeks, cleared backlogs and prunes. In the end a subscription that nobody used, or one that was read all the time, must
have every acknowledged message, in order, and nothing may be outside the DAG.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from braid.client import Client
from braid.client.checkpoints import Checkpoint
from braid.errors import CheckpointOutdated, DeadlineExceeded
from braid.model.names import TopicName
from braid.runtime.env import Random
from braid.testing.sim import checkers, dag_checkers, faults
from braid.testing.sim.administrators import Administrator, Churn
from braid.testing.sim.checkers import Violation
from braid.testing.sim.layouts import outside, topic_records
from braid.testing.sim.loop import NODE, SimLoop
from braid.testing.sim.messaging import BOUNDS, FAULTS, HEALING, KEEPER, Messaging
from braid.testing.sim.ports import START_MS
from braid.testing.sim.processes import read_payload
from braid.testing.sim.scalable_processes import (
    CheckpointProcess,
    LaneProducer,
    QueueProcess,
    Snapshots,
    StreamProcess,
)

ORDERED = "ordered"
SOUGHT = "sought"
KEYS = 8
EXTRA_AUDITED = 4
"""Subscriptions made meanwhile that are read in the end, at most."""


class ScalableMessaging(Messaging):
    """What the workloads on scalable topics share."""

    churn_pace: tuple[float, ...] = (2.0, 5.0, 10.0)
    """Seconds between two operations of the administrator; one is drawn."""
    reader: str | None = None
    """A subscription that somebody reads all the time, in place of one that is kept for the audit."""

    def __init__(self, seed: int, loop: SimLoop, rng: Random) -> None:
        super().__init__(seed, loop, rng, deduplication=rng.random() < 0.5)
        self.topics = [f"topic://public/default/scalable-{number}" for number in range(rng.choice((1, 1, 2)))]
        self.possible = (*FAULTS, *faults.LEADERS)
        self.seconds = rng.uniform(8.0, 25.0)
        self.peace = rng.choice((0.0, 3.0, 6.0))
        self.churn: Churn

    async def prepare(self) -> None:
        admin = Administrator(self.world, "admin", Random(self.rng.random()))
        self.churn = Churn(
            self.world,
            "churn",
            Random(self.rng.random()),
            self.topics,
            pace=self.rng.choice(self.churn_pace),
            sought=self.sought(),
        )
        task = self.world.spawn(admin.node, self._make_topics(admin), "admin")
        await asyncio.wait([task])
        task.result()
        self.churn.start()

    async def _make_topics(self, admin: Administrator) -> None:
        for topic in self.topics:
            await admin.create(topic, self.rng.choice((1, 2, 3)))
            await admin.subscribe(topic, KEEPER)
            if self.sought() is not None:
                await admin.subscribe(topic, SOUGHT)

    def sought(self) -> str | None:
        """The subscription that is sought at random, if there is one."""
        return None

    def add_producers(self) -> None:
        rng = self.rng
        for number in range(rng.choice((1, 2))):
            self.processes.append(
                LaneProducer(
                    self.world,
                    f"p{number}",
                    rng.choice(self.topics),
                    Random(rng.random()),
                    rng.choice((60, 100, 150)),
                    keys=KEYS,
                    seconds=self.load_seconds(),
                )
            )

    def add_streams(self, subscription: str, prefix: str, count: int, *, leaves: float = 0.0) -> None:
        for at, topic in enumerate(self.topics):
            for number in range(count):
                self.processes.append(
                    StreamProcess(
                        self.world,
                        f"{prefix}{at}{number}",
                        topic,
                        subscription,
                        Random(self.rng.random()),
                        leaves=leaves,
                        every=self.rng.choice((1, 5, 8)),
                    )
                )

    async def finish(self) -> None:
        self.churn.is_stopping = True
        await self.settle("administrator", [self.churn])
        await self.settle("producers", [each for each in self.processes if isinstance(each, LaneProducer)])

    async def audit(self) -> bool:
        if not await self.on_node(KEEPER, self._audit_all):
            return False
        await self._quiet()
        await self._note_clients()
        return True

    async def _audit_all(self, client: Client) -> None:
        for topic in self.topics:
            await self._read_stream(client, topic, KEEPER)
        for number, (topic, name, kind) in enumerate(self.churn.made):
            if number >= EXTRA_AUDITED:
                self.history.add("world", "info", "unsubscribe", [topic, name])  # nobody looks what it holds
            elif kind == "STREAM":
                await self._read_stream(client, topic, name)
            else:
                await self._read_queue(client, topic, name)

    async def _read_stream(self, client: Client, topic: str, subscription: str) -> None:
        """Everything a subscription holds, acknowledged on the way: children come when their parents are drained."""
        consumer = await client.stream_consumer(topic, subscription, name=f"audit-{subscription}", initial="earliest")
        await self._read(consumer, topic, subscription, consumer.acknowledge_cumulative)

    async def _read_queue(self, client: Client, topic: str, subscription: str) -> None:
        consumer = await client.queue_consumer(topic, subscription, name=f"audit-{subscription}")
        await self._read(consumer, topic, subscription, consumer.acknowledge)

    async def _read(self, consumer: Any, topic: str, subscription: str, acknowledge: Callable[..., Awaitable[None]]) -> None:
        while True:
            try:
                message = await consumer.receive(timeout=8.0)
            except DeadlineExceeded:
                break
            value = [topic, subscription, *read_payload(message), str(message.id), message.redelivery_count]
            self.history.add(subscription, "ok", "deliver", value, segment=message.id.segment_id)
            await acknowledge(message)
        await consumer.close()

    async def _quiet(self) -> None:
        """Wait until nothing is pending any more; what is then outside the DAG stays so."""
        for _second in range(int(HEALING)):
            if not any(outside(self.world.engine.tables.rows).values()):
                return
            await asyncio.sleep(1.0)

    async def _note_clients(self) -> None:
        """All clients are closed: soon no broker knows any of them. A link that is half open is noticed after a while."""
        for _second in range(30):
            await asyncio.sleep(1.0)
            if not any(self._clients_left().values()):
                break
        self.history.add("world", "info", "left", self._clients_left())

    def _clients_left(self) -> dict[str, int]:
        services = [broker.service for broker in self.world.brokers]
        topics = [topic for service in services for topic in service.topics.values()]
        return {
            "layout sessions": sum(service.dag_watches.session_count for service in services),
            "producers": sum(len(topic.producers) for topic in topics),
            "consumers": sum(len(each.consumers) for topic in topics for each in topic.subscriptions.values()),
        }

    def left_over(self) -> dict[str, int]:
        found = outside(self.world.engine.tables.rows)
        for what, names in found.items():
            if names:
                self.history.remark(f"{what}: {names}")
        return {what: len(names) for what, names in found.items()}

    def judge(self) -> list[Violation]:
        events = self.history.events
        ordered = self.ordered()
        return [
            *checkers.no_loss(events),
            *checkers.no_phantom(events),
            *checkers.no_duplicate(events, once=self.once(), stored_once=True),
            *checkers.key_order(events, ordered=ordered),
            *dag_checkers.drained_first(events, ordered=[*ordered, SOUGHT]),
            *dag_checkers.dag(events),
            *dag_checkers.intent_first(events),
            *dag_checkers.leader_terms(events),
            *dag_checkers.stale_calls(events),
            *dag_checkers.handed_over(events, ordered=ordered),
            *dag_checkers.lanes_bounded(events),
            *dag_checkers.checkpoints(events),
            *checkers.single_writer(events),
            *checkers.terms_grow(events),
            *checkers.bounded_wait(events, bounds=BOUNDS, healing=3 * HEALING),
            *checkers.nothing_left(events),
        ]

    def ordered(self) -> list[str]:
        """Subscriptions that are read in order."""
        return [KEEPER, ORDERED, *(name for _topic, name, kind in self.churn.made if kind == "STREAM")]

    def once(self) -> list[str]:
        """Subscriptions that nobody touched before the audit. An owner that was fenced unnoticed finds out when the audit
        acknowledges, and then everything comes again."""
        return [KEEPER] if self.nemesis is not None and "usurp" not in self.nemesis.enabled else []


class KeyedSegments(ScalableMessaging):
    """W1 on a scalable topic: deduplicated producers, stream consumers that crash, leave and come back under their names."""

    def add_processes(self) -> None:
        self.add_producers()
        self.add_streams(ORDERED, "c", self.rng.choice((1, 2, 3)), leaves=self.rng.choice((0.0, 0.02)))


class SegmentQueue(ScalableMessaging):
    """W2 on a scalable topic: queue consumers on every segment; one of them joins late, at the latest position."""

    def add_processes(self) -> None:
        rng = self.rng
        self.add_producers()
        refusals = rng.choice((0.0, 0.05, 0.2))
        for at, topic in enumerate(self.topics):
            for number in range(rng.choice((1, 2, 3))):
                self.processes.append(
                    QueueProcess(self.world, f"q{at}{number}", topic, "workers", Random(rng.random()), nacks=refusals)
                )
            late = QueueProcess(self.world, f"l{at}", topic, "latecomers", Random(rng.random()), initial="latest")
            late.delay = rng.uniform(0.0, self.seconds)
            self.processes.append(late)


class Checkpoints(ScalableMessaging):
    """W3: checkpoint consumers that store snapshots, are killed and restored from any older one, at any epoch. In the end the
    topic is deleted and made anew, and must refuse every snapshot of the one before."""

    def __init__(self, seed: int, loop: SimLoop, rng: Random) -> None:
        super().__init__(seed, loop, rng)
        self.topics = self.topics[:1]
        self.snapshots = Snapshots()

    def add_processes(self) -> None:
        self.add_producers()
        for number in range(self.rng.choice((2, 3, 4))):
            self.processes.append(
                CheckpointProcess(self.world, f"r{number}", self.topics[0], Random(self.rng.random()), self.snapshots)
            )

    async def audit(self) -> bool:
        return await super().audit() and await self.on_node("successor", self._made_anew)

    async def _made_anew(self, client: Client) -> None:
        topic = self.topics[0]
        name = TopicName.parse(topic)
        admin = Administrator(self.world, "successor", Random(self.rng.random()))
        admin.node = NODE.get()
        await admin.delete(topic)
        await admin.create(topic, 4)
        incarnation = topic_records(self.world.engine.tables.rows)[str(name)].incarnation
        async with client.producer(topic, name="late") as producer:
            for number in range(5):
                await producer.send(b"again", key=f"k{number}")
        for base, data in [*self.snapshots.taken[:3], *self.snapshots.taken[-3:]]:
            reader = f"successor/{base}"
            try:
                consumer = await client.checkpoint_consumer(topic, start=Checkpoint.from_bytes(data))
            except CheckpointOutdated:
                self.history.add("successor", "fail", "restore", [topic, reader, base, incarnation])
                continue
            self.history.add("successor", "ok", "restore", [topic, reader, base, incarnation])
            await consumer.close()


class LayoutChurn(ScalableMessaging):
    """W6: the layout never rests, and neither do its readers: streams, a queue, a checkpoint reader, one that is sought."""

    churn_pace = (0.5, 1.0, 2.0)

    def __init__(self, seed: int, loop: SimLoop, rng: Random) -> None:
        super().__init__(seed, loop, rng)
        self.topics = self.topics[:1]
        self.is_kept = rng.random() < 0.5
        """Whether nobody reads the keeper's subscription before the audit: then nothing is ever pruned."""

    def sought(self) -> str | None:
        return SOUGHT

    def add_processes(self) -> None:
        rng, topic = self.rng, self.topics[0]
        self.add_producers()
        self.add_streams(ORDERED, "c", rng.choice((1, 2, 3)), leaves=rng.choice((0.05, 0.15, 0.3)))
        self.add_streams(SOUGHT, "s", rng.choice((1, 2)))
        if not self.is_kept:
            self.processes.append(StreamProcess(self.world, "k", topic, KEEPER, Random(rng.random()), every=3))
        self.processes.append(QueueProcess(self.world, "q", topic, "workers", Random(rng.random()), nacks=0.05))
        if self.is_kept:
            self.processes.append(CheckpointProcess(self.world, "r", topic, Random(rng.random()), Snapshots()))

    def once(self) -> list[str]:
        return super().once() if self.is_kept else []

    def judge(self) -> list[Violation]:
        anew = checkers.begun_anew(self.history.events, subscription=SOUGHT, start_ms=START_MS, is_kept=self.is_kept)
        return [*super().judge(), *anew]
