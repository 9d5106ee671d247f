"""W15: topics that are deleted and made anew under load, by clients that come and go, with controllers that rest.

Nobody uses a topic for long: visitors send a little, read a little and leave, so that leaders let go of topics that nobody
needs and are called back by the next visitor. Meanwhile an administrator deletes topics and makes them anew under the same
names. Whoever comes after a deletion must not see anything from before it, no checkpoint of the predecessor may be accepted
(INV5), and the last incarnation of each topic keeps every promise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, ClassVar

from braid.client import Client, Message
from braid.client.checkpoints import Checkpoint
from braid.client.messages import EARLIEST
from braid.errors import AlreadyExists, BraidError, CheckpointOutdated, DeadlineExceeded, RequestError
from braid.model.names import TopicName
from braid.runtime.env import Random
from braid.testing.sim import checkers, dag_checkers, incarnations
from braid.testing.sim.administrators import Administrator, Churn
from braid.testing.sim.checkers import Violation
from braid.testing.sim.loop import SimLoop
from braid.testing.sim.messaging import BOUNDS, HEALING, KEEPER
from braid.testing.sim.processes import Process, read_payload
from braid.testing.sim.scalable_processes import Snapshots
from braid.testing.sim.scalable_topics import ORDERED, ScalableMessaging
from braid.testing.sim.world import World

WORKERS = "workers"
KEYS = 6
LEAST_VISITS = 6
"""Of each visitor, even if it could do little while things broke."""


class Rebuilder(Churn):
    """Deletes topics and makes them anew; sometimes changes the layout of the first one."""

    async def _act(self, topic: str) -> None:
        if topic == self.topics[0] and self._rng.random() < 0.4:
            await self._resize(topic)
            return
        await self.until_done(topic, "delete", [], lambda controller: controller.delete(force=self._rng.random() < 0.5))
        await asyncio.sleep(self._rng.choice((0.0, 0.0, 0.5)))
        await self._make(topic)

    async def _make(self, topic: str) -> None:
        """Until the topic is there again, with the audit's subscription."""
        name, segments = TopicName.parse(topic), self._rng.choice((1, 2, 3))
        number = self.world.history.invoke(self.node.name, "make", [topic])
        while True:
            try:
                await self.world.calls.call(
                    self.node, self._any_host(), lambda service: service.create_scalable_topic(name, segments), 45.0
                )
                break
            except AlreadyExists:
                break  # by an attempt before, or the deletion was refused
            except (BraidError, TimeoutError) as error:
                self.world.history.remark(f"{self.node.name}: {type(error).__name__}: {error}")
                await asyncio.sleep(0.5)
        self.world.history.add(self.node.name, "ok", "make", [topic], number=number)
        while await self.subscribe(topic, KEEPER) != "ok":  # noqa: ASYNC110 - nobody else tells
            await asyncio.sleep(0.5)


class Visitor(Process):
    """Comes, uses a topic for a moment, leaves, and comes again."""

    def __init__(self, world: World, name: str, rng: Random, topics: list[str], visits: int, snapshots: Snapshots) -> None:
        super().__init__(world, name)
        self._rng = rng
        self._topics = topics
        self._visits = visits
        self._made = 0
        self._snapshots = snapshots
        self._sent = 0
        self._lives = 0

    async def work(self, client: Client) -> None:
        """One visit."""
        await asyncio.sleep(self._rng.choice((0.2, 1.0, 3.0)) * self._rng.random())
        self._made += 1
        if self._made > self._visits or (self.is_stopping and self._made > LEAST_VISITS):
            self.is_done = True
            return
        topic = self._rng.choice(self._topics)
        visit = self._rng.choice((self._produce, self._produce, self._stream, self._queue, self._checkpoint))
        await visit(client, topic)

    async def _produce(self, client: Client, topic: str) -> None:
        producer = await client.producer(topic, name=self.name, batching=self._rng.random() < 0.5)
        for _number in range(self._rng.randint(1, 8)):
            self._sent += 1
            key = f"k{self._rng.randrange(KEYS)}"
            value = [topic, self.name, key, self._sent]
            number = self.world.history.invoke(self.name, "send", value)
            try:
                place = await producer.send(f"{self.name}/{key}/{self._sent}".encode(), key=key)
            except BraidError:
                self.note("info", "send", value, number=number)
                raise
            self.note("ok", "send", [*value, str(place)], number=number)
            await asyncio.sleep(0.3 * self._rng.random())

    async def _stream(self, client: Client, topic: str) -> None:
        number = self.world.history.invoke(self.name, "subscribe", [topic, ORDERED])
        consumer = await client.stream_consumer(topic, ORDERED, name=self.name, initial="earliest")
        self.note("ok", "subscribe", [topic, ORDERED], number=number)
        await self._read(consumer, topic, ORDERED, consumer.acknowledge_cumulative)

    async def _queue(self, client: Client, topic: str) -> None:
        number = self.world.history.invoke(self.name, "subscribe", [topic, WORKERS])
        consumer = await client.queue_consumer(topic, WORKERS, name=self.name, initial="earliest")
        self.note("ok", "subscribe", [topic, WORKERS], number=number)
        await self._read(consumer, topic, WORKERS, consumer.acknowledge)

    async def _checkpoint(self, client: Client, topic: str) -> None:
        """Read on from any checkpoint that somebody took of this name, if there is one."""
        self._lives += 1
        reader = f"{self.name}.{self._lives}"
        taken = [each for each in self._snapshots.taken if each[0].startswith(topic)]
        base, data = self._rng.choice(taken) if taken and self._rng.random() < 0.8 else (None, b"")
        number = self.world.history.invoke(self.name, "open", [topic, reader])
        try:
            consumer = await client.checkpoint_consumer(topic, start=Checkpoint.from_bytes(data) if base else EARLIEST)
        except CheckpointOutdated:
            self.note("fail", "restore", [topic, reader, base], number=number)
            return
        self.note("ok", "restore", [topic, reader, base, consumer.layouts.incarnation], number=number)
        await self._read(consumer, topic, reader, None)
        self.note("ok", "checkpoint", [topic, reader, self._keep(topic, reader, consumer), consumer.layouts.incarnation])

    def _keep(self, topic: str, reader: str, consumer: Any) -> str:
        return self._snapshots.add(f"{topic} {reader}", consumer.checkpoint().to_bytes())

    async def _read(self, consumer: Any, topic: str, subscription: str, acknowledge: Any) -> None:
        for _number in range(self._rng.randint(1, 12)):
            try:
                message: Message = await consumer.receive(timeout=0.5)
            except DeadlineExceeded:
                break
            value = [topic, subscription, *read_payload(message), str(message.id), message.redelivery_count]
            self.note("ok", "deliver", value, segment=message.id.segment_id)
            if acknowledge is not None:
                await acknowledge(message)


class Recreated(ScalableMessaging):
    """See the module."""

    churn_pace = (1.0, 2.0, 4.0)
    scalable_settings: ClassVar[Mapping[str, float]] = {"idle_seconds": 0.3, "prune_seconds": 0.6, "adopt_seconds": 2.0}

    def __init__(self, seed: int, loop: SimLoop, rng: Random) -> None:
        super().__init__(seed, loop, rng)
        self.topics = [f"topic://public/default/again-{number}" for number in range(3)]
        self.seconds = rng.uniform(10.0, 25.0)

    async def prepare(self) -> None:
        admin = Administrator(self.world, "admin", Random(self.rng.random()))
        self.churn = Rebuilder(
            self.world, "churn", Random(self.rng.random()), self.topics, pace=self.rng.choice(self.churn_pace)
        )
        task = self.world.spawn(admin.node, self._make_topics(admin), "admin")
        await asyncio.wait([task])
        task.result()
        self.churn.start()

    def add_processes(self) -> None:
        rng, snapshots = self.rng, Snapshots()
        for number in range(rng.choice((4, 6))):
            visits = rng.choice((20, 40))
            self.processes.append(Visitor(self.world, f"v{number}", Random(rng.random()), self.topics, visits, snapshots))

    async def finish(self) -> None:
        self.churn.is_stopping = True
        await self.settle("administrator", [self.churn])
        for process in self.processes:
            process.is_stopping = True
        await self.settle("visitors", self.processes)

    async def _audit_all(self, client: Client) -> None:
        for topic in self.topics:
            await self._read_stream(client, topic, KEEPER)
            for subscription, is_stream in ((ORDERED, True), (WORKERS, False)):
                try:
                    await (self._read_stream if is_stream else self._read_queue)(client, topic, subscription)
                except RequestError as error:
                    self.history.remark(f"{subscription} of {topic}: {error}")
                    raise

    def judge(self) -> list[Violation]:
        events = self.history.events
        last = incarnations.last_of_each(events)
        return [
            *incarnations.nothing_old(events),
            *incarnations.checkpoints_of_their_own(events),
            *checkers.no_loss(last),
            *checkers.no_phantom(events),
            *checkers.key_order(last, ordered=[KEEPER]),
            *dag_checkers.dag(events),
            *dag_checkers.intent_first(events),
            *dag_checkers.leader_terms(events),
            *dag_checkers.stale_calls(events),
            *checkers.single_writer(events),
            *checkers.terms_grow(events),
            *checkers.bounded_wait(events, bounds=BOUNDS, healing=3 * HEALING),
            *checkers.nothing_left(events),
        ]
