"""The messaging workloads: W1 (keyed append, exactly once) and W2 (queue).

Phases: subscriptions are made in peace; then clients work while the nemesis breaks things; then everything heals, and what was
begun must finish within a bound; then a subscription that nobody used is read to the end (the audit); then everything is closed
and nothing may be left over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, ClassVar

from braid.client import Client, Consumer
from braid.errors import BraidError, DeadlineExceeded, EntryCorrupt
from braid.ledger.backends.local.recovery import LEDGER_FOLDER
from braid.runtime.env import Random
from braid.testing.sim import checkers, faults
from braid.testing.sim.checkers import Violation
from braid.testing.sim.faults import Nemesis
from braid.testing.sim.loop import Node, SimLoop
from braid.testing.sim.ports import START_MS
from braid.testing.sim.processes import ConsumerProcess, Process, ProducerProcess, close_quietly, read_payload
from braid.testing.sim.world import DATA, World

FAULTS = (
    *faults.NETWORK,
    *faults.PROCESS,
    *faults.STORAGE,
    *faults.STORE,
    *faults.CLIENTS,
    *faults.ALLOCATOR,
    *faults.OWNERSHIP,
)
HEALING = 90.0
"""Seconds after the last fault by which everything begun must be finished: a session, timeouts of the SDK, some tries."""
QUIET = 25.0
"""Seconds without a message after which nothing more is expected: a link that is half open is noticed, then the longest pause
before connecting again."""
BOUNDS = {"send": 45.0, "ack": 120.0}
"""Seconds an operation of the SDK may take. An acknowledgment has no timeout of its own: it waits until its consumer is back,
so its bound is the longest time of faults and the healing after it."""
KEEPER = "keeper"
"""A subscription that acknowledges nothing: what it holds is audited."""


SEEKER = "seeker"


class Messaging:
    """What both workloads share."""

    broker_counts: tuple[int, ...] = (1, 2, 3)
    scalable_settings: ClassVar[Mapping[str, float]] = {}
    """Settings of scalable topics that differ from the world's."""

    def __init__(self, seed: int, loop: SimLoop, rng: Random, *, deduplication: bool) -> None:
        self.rng = rng
        brokers = rng.choice(self.broker_counts)
        self.world = World(seed, loop, brokers=brokers, deduplication=deduplication, scalable=self.scalable_settings)
        self.history = self.world.history
        self.topics = [f"persistent://public/default/topic-{number}" for number in range(rng.choice((1, 2)))]
        self.seconds = rng.uniform(8.0, 40.0)
        """How long things break."""
        self.peace = 0.0
        """How long everything works before."""
        self.possible: tuple[str, ...] = FAULTS
        self.processes: list[Process] = []
        self.nemesis: Nemesis | None = None
        for number in range(6):
            if rng.random() < 0.3:
                self.world.skew_ms[f"p{number}"] = rng.choice((-600_000, -10_000, 10_000, 600_000))

    @property
    def faults(self) -> int:
        return 0 if self.nemesis is None else self.nemesis.count

    def load_seconds(self) -> float:
        """How long a producer shall take: most of the time in which things break."""
        return self.seconds * self.rng.uniform(0.3, 1.0)

    def add_processes(self) -> None:
        raise NotImplementedError

    def judge(self) -> list[Violation]:
        raise NotImplementedError

    def check(self) -> list[Violation]:
        found = [Violation("start", text) for text in self.world.failures]
        return found + self.judge()

    async def run(self) -> None:
        world = self.world
        await world.start()
        await self.prepare()
        self.add_processes()
        self.nemesis = Nemesis(
            world,
            self.rng,
            self.possible,
            clients=lambda: [each.name for each in self.processes],
            crash=self._crash,
            node_of=lambda name: next((each.node for each in self.processes if each.name == name), None),
        )
        for process in self.processes:
            process.start()
        await asyncio.sleep(self.peace)
        await self.disturb(self.nemesis)
        await self.nemesis.heal()
        await self.finish()
        await self.drain()
        if await self.audit():
            await self._close()

    # Phases

    async def prepare(self) -> None:
        """In peace, before anything happens."""
        await self.on_node("keeper", self._subscribe_all)

    async def disturb(self, nemesis: Nemesis) -> None:
        """Break things for as long as this run does."""
        await nemesis.run(self.seconds)

    async def finish(self) -> None:
        """Let end what was begun, now that nothing breaks any more."""
        await self.settle("producers", [each for each in self.processes if isinstance(each, ProducerProcess)])

    async def audit(self) -> bool:
        """Look at everything that is stored; False if that is not possible."""
        if await self.on_node("keeper", self._audit) and await self.on_node("seeker", self._seek):
            await self._within(self._decay(), "reading decayed ledgers")
            return True
        return False

    async def _subscribe_all(self, client: Client) -> None:
        for topic in self.topics:
            consumer = await client.consumer(topic, KEEPER, initial="earliest")
            self.history.add("keeper", "ok", "subscribe", [topic, KEEPER])
            await consumer.close()

    async def settle(self, what: str, processes: list[Any]) -> None:
        until = self.world.loop.time() + HEALING
        while not all(each.is_done for each in processes):
            if self.world.loop.time() > until:
                waiting = [each.name for each in processes if not each.is_done]
                self.history.add("world", "info", "stalled", f"{what} {waiting}")
                return
            await asyncio.sleep(0.5)
        self.history.add("world", "info", "finished", what)

    async def drain(self) -> None:
        """Everybody reads until nothing comes for a while."""
        consumers: list[Any] = [each for each in self.processes if hasattr(each, "last_message")]
        for consumer in consumers:
            consumer.last_message = max(consumer.last_message, self.world.loop.time())
        until = self.world.loop.time() + HEALING
        while any(self.world.loop.time() - each.last_message < QUIET for each in consumers):
            if self.world.loop.time() > until:
                break
            await asyncio.sleep(1.0)
        for consumer in consumers:
            consumer.is_stopping = True
        await self.settle("consumers", consumers)

    async def _audit(self, client: Client) -> None:
        """Read what the keeper's subscription holds, from its beginning."""
        for topic in self.topics:
            consumer = await client.consumer(topic, KEEPER, initial="earliest")
            await self._read_all(consumer, topic, KEEPER)
            await consumer.close()

    async def _read_all(self, consumer: Consumer, topic: str, subscription: str) -> None:
        while True:
            try:
                message = await consumer.receive(timeout=5.0)
            except DeadlineExceeded:
                return
            value = [topic, subscription, *read_payload(message), str(message.id), message.redelivery_count]
            self.history.add(subscription, "ok", "deliver", value)

    async def _seek(self, client: Client) -> None:
        """Go back to a moment between two sends and read from there. The producers' clocks are wrong, the brokers' are not."""
        for topic in self.topics:
            times = [each.t for each in self.history.events if each.op == "send" and each.value[0] == topic]
            moment = int(self.rng.choice(times) * 1000) if times else 0
            consumer = await client.consumer(topic, SEEKER, initial="earliest")
            await consumer.seek(START_MS + moment)
            self.history.add("seeker", "ok", "seek", [topic, SEEKER, moment / 1000])
            await self._read_all(consumer, topic, SEEKER)
            await consumer.close()

    async def _decay(self) -> None:
        """Bits flip on the disk: whatever is read afterwards is what was written, or refused."""
        world = self.world
        paths = [path for path in world.disk.paths() if DATA / "ledgers" / LEDGER_FOLDER in path.parents]
        for path in self.rng.sample(paths, min(len(paths), 3)):
            if size := world.disk.open(path).size():
                at = self.rng.randrange(size)
                world.fault("bit-flip", path.name, at)
                world.disk.flip(path, at, self.rng.randrange(8))
        ledgers = world.brokers[0].ledgers
        async for ledger_id in ledgers.ledgers():
            reader = await ledgers.open(ledger_id, fence=False)
            for entry in range(reader.last_confirmed + 1):
                try:
                    await reader.read(entry, entry)
                except EntryCorrupt:
                    self.history.add("world", "info", "refused", [ledger_id, entry])

    async def on_node(self, name: str, work: Any) -> bool:
        """Run one client's work to its end; False if it cannot be done."""
        node = Node(name)

        async def live() -> None:
            client = self.world.client(node)
            try:
                async with asyncio.timeout(HEALING):
                    await work(client)
            finally:
                await close_quietly(client)

        task = self.world.spawn(node, live(), name)
        await asyncio.wait([task])
        error = task.exception()
        if error is None:
            return True
        if not isinstance(error, BraidError | TimeoutError):
            raise error
        self.history.add("world", "info", "stalled", f"{name}: {type(error).__name__}: {error}")
        return False

    async def _close(self) -> None:
        await self._within(self.world.stop(), "the orderly stop")
        await asyncio.sleep(1.0)
        left = {
            "connections": len(self.world.fabric.ends()),
            "tasks": len([task for task in self.world.loop.unfinished() if task.node.name != "world"]),
            "watches": len(self.world.engine.watches),
            "sessions": len(self.world.engine._leases),
            "ephemerals": sum(1 for row in self.world.engine.tables.rows.values() if row[6] is not None),
        }
        self.history.add("world", "info", "left", {**left, **self.left_over()})

    def left_over(self) -> dict[str, int]:
        """What else must be gone when everything is closed."""
        return {}

    async def _within(self, work: Coroutine[Any, Any, Any], what: str) -> None:
        try:
            async with asyncio.timeout(HEALING):
                await work
        except TimeoutError:
            self.history.add("world", "info", "stalled", what)

    def _crash(self, name: str) -> None:
        for process in self.processes:
            if process.name == name:
                process.crash()


class KeyedAppend(Messaging):
    """W1: deduplicated producers of keyed messages; consumers that crash and rejoin."""

    def __init__(self, seed: int, loop: SimLoop, rng: Random) -> None:
        super().__init__(seed, loop, rng, deduplication=True)

    def add_processes(self) -> None:
        rng = self.rng
        for number in range(rng.choice((2, 3))):
            topic = rng.choice(self.topics)
            self.processes.append(
                ProducerProcess(
                    self.world,
                    f"p{number}",
                    topic,
                    Random(rng.random()),
                    rng.choice((40, 80, 120)),
                    seconds=self.load_seconds(),
                    deduplicated=True,
                )
            )
        for at, topic in enumerate(self.topics):
            for number in range(rng.choice((1, 2))):
                self.processes.append(
                    ConsumerProcess(self.world, f"c{at}{number}", topic, "ordered", Random(rng.random()), kind="failover")
                )

    def judge(self) -> list[Violation]:
        events = self.history.events
        return [
            *checkers.no_loss(events),
            *checkers.no_phantom(events),
            *checkers.no_duplicate(events, once=[KEEPER], stored_once=True),
            *checkers.seek_by_time(events),
            *checkers.key_order(events, ordered=[KEEPER, "ordered"]),
            *checkers.single_writer(events),
            *checkers.terms_grow(events),
            *checkers.bounded_wait(events, bounds=BOUNDS, healing=2 * HEALING),
            *checkers.nothing_left(events),
        ]


class Queue(Messaging):
    """W2: a Shared subscription whose consumers acknowledge, refuse, crash and come back. The SDK has no dead-letter topics."""

    def __init__(self, seed: int, loop: SimLoop, rng: Random) -> None:
        super().__init__(seed, loop, rng, deduplication=rng.random() < 0.5)

    def add_processes(self) -> None:
        rng = self.rng
        deduplicated = self.world.deduplication
        for number in range(rng.choice((1, 2, 3))):
            topic = rng.choice(self.topics)
            total = rng.choice((40, 80, 120))
            self.processes.append(
                ProducerProcess(
                    self.world,
                    f"p{number}",
                    topic,
                    Random(rng.random()),
                    total,
                    seconds=self.load_seconds(),
                    deduplicated=deduplicated,
                )
            )
        refusals = rng.choice((0.0, 0.05, 0.3))
        for at, topic in enumerate(self.topics):
            for number in range(rng.choice((2, 3))):
                self.processes.append(
                    ConsumerProcess(
                        self.world, f"c{at}{number}", topic, "workers", Random(rng.random()), kind="shared", nacks=refusals
                    )
                )

    def judge(self) -> list[Violation]:
        events = self.history.events
        deduplicated = self.world.deduplication
        return [
            *checkers.no_loss(events),
            *checkers.no_phantom(events),
            *checkers.no_duplicate(events, once=[KEEPER] if deduplicated else [], stored_once=deduplicated),
            *(checkers.key_order(events, ordered=[KEEPER]) if deduplicated else ()),
            *checkers.single_writer(events),
            *checkers.terms_grow(events),
            *checkers.bounded_wait(events, bounds=BOUNDS, healing=2 * HEALING),
            *checkers.nothing_left(events),
        ]
