"""A scalable topic under load whose layout never rests, with brokers killed meanwhile, on real sockets.

    python -m tests.e2e.churn_loop [--operations 200] [--messages 200000] [--keys 64] [--joins 50] [--kills 40] [--seed 1]

Two producers with deduplication send keyed messages; three stream consumers join and leave; a queue consumer and a checkpoint
consumer, restored from older checkpoints now and then, read along. Random splits and merges (at least 30 % of each) go on all
the time, and the leader or the owner of a segment is killed during many of them and started again. In the end the checkers of
the simulator look at the whole history: nothing lost, nothing out of order per key, nothing stored twice. Exit code 0 if so.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import random
import sys
import time
from functools import partial
from typing import Any

import msgspec
from tests.e2e.churn_cluster import Cluster, patiently

from braid.client import Message
from braid.client.checkpoints import Checkpoint
from braid.client.messages import EARLIEST
from braid.errors import BraidError, Conflict, DeadlineExceeded
from braid.model.layout import SegmentLayout
from braid.model.names import TopicName
from braid.model.segments import physical_name
from braid.scalable.config import ScalableConfig
from braid.testing.sim import checkers, dag_checkers
from braid.testing.sim.checkers import Violation

TOPIC = "topic://public/default/churn"
STREAM, QUEUE = "stream", "queue"
MOST_SEGMENTS = 12
WINDOW = 400
"""Messages of a producer without an answer, at most."""
SETTLE_SECONDS = 60.0
log = logging.getLogger("churn")


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How long and how hard."""

    operations: int = 200
    messages: int = 200_000
    keys: int = 64
    producers: int = 2
    consumers: int = 3
    joins: int = 50
    kills: int = 40
    session_seconds: float = 2.0
    seed: int = 1


class Report(msgspec.Struct):
    """What was done and what was found."""

    operations: int = 0
    splits: int = 0
    merges: int = 0
    refused: int = 0
    """Operations that were answered with an error, most often because the leader died."""
    kills: int = 0
    leaders_killed: int = 0
    joins: int = 0
    restores: int = 0
    acknowledged: int = 0
    stream_deliveries: int = 0
    queue_deliveries: int = 0
    checkpoint_deliveries: int = 0
    epoch: int = 0
    segments_ever: int = 0
    slowest_operation: float = 0.0
    longest_gap: float = 0.0
    """Seconds between two receipts of a producer."""
    seconds: float = 0.0
    violations: list[str] = []


class Churn:
    """One run."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.chance = random.Random(options.seed)
        self.report = Report()
        self.cluster = Cluster(
            session_seconds=options.session_seconds,
            retention_minutes=2,
            scalable=ScalableConfig(
                consumer_grace_seconds=3.0, drain_poll_seconds=0.5, reconcile_seconds=1.0, prune_seconds=10.0, adopt_seconds=2.0
            ),
        )
        self.history = self.cluster.history
        self.allowed = 0
        """Messages that may be sent so far: the load lasts as long as the operations."""
        self.more = asyncio.Condition()
        self.sent_all = asyncio.Event()
        self.wanted: set[tuple[str, int]] = set()
        self.seen: dict[str, set[tuple[str, int]]] = {STREAM: set(), QUEUE: set(), "checkpoint": set()}
        self.is_over = False
        self.leaving: set[int] = set()
        """Stream consumers that shall leave."""
        self.snapshots: list[tuple[str, bytes, float]] = []

    async def run(self) -> Report:
        began = time.monotonic()
        async with self.cluster as cluster:
            async with cluster.admin() as admin:
                await admin.scalable_topics.create(TOPIC, segments=4)
                await admin.scalable_topics.create_subscription(TOPIC, STREAM)
                await admin.scalable_topics.create_subscription(TOPIC, QUEUE, kind="queue")
                for name in (STREAM, QUEUE):
                    self.history.add("admin", "ok", "subscribe", [TOPIC, name])
                async with asyncio.TaskGroup() as group:
                    producers = [group.create_task(self._produce(f"p{number}")) for number in range(self.options.producers)]
                    for number in range(self.options.consumers):
                        group.create_task(self._stream(number))
                    group.create_task(self._queue())
                    group.create_task(self._checkpoint())
                    await self._operate(admin)
                    await self._allow(self.options.messages)
                    await asyncio.wait(producers)
                    await self._everything_seen()
                    self.is_over = True
            left = await cluster.quiet(SETTLE_SECONDS)
            record = cluster.record(TOPIC)
        self.report.seconds = round(time.monotonic() - began, 1)
        if record is not None:
            self.report.epoch, self.report.segments_ever = record.epoch, record.next_segment_id
        violations = [*self._judge(), *(Violation("C19", f"{what}: {names}") for what, names in left.items())]
        self.report.violations = [str(each) for each in violations[:20]]
        return self.report

    # Load

    async def _produce(self, name: str) -> None:
        options = self.options
        quota = options.messages // options.producers
        sequence, last = 0, time.monotonic()
        pending: dict[asyncio.Future[Any], None] = {}
        chance = random.Random(f"{options.seed}-{name}")

        def answered(value: list[Any], number: int, done: asyncio.Future[Any]) -> None:
            nonlocal last
            pending.pop(done, None)
            now = time.monotonic()
            self.report.longest_gap = round(max(self.report.longest_gap, now - last), 3)
            last = now
            message_id = done.result()  # a message that is refused ends the run
            self.history.add(name, "ok", "send", [*value, str(message_id)], number=number)
            self.wanted.add((name, value[3]))
            self.report.acknowledged += 1

        async with self.cluster.client() as client, client.producer(TOPIC, name=name, deduplication=True) as producer:
            while sequence < quota:
                async with self.more:
                    while sequence * options.producers >= self.allowed:
                        await self.more.wait()
                    last = time.monotonic()
                while sequence < quota and sequence * options.producers < self.allowed:
                    key = f"k{chance.randrange(options.keys)}"
                    value = [TOPIC, name, key, sequence]
                    number = self.history.invoke(name, "send", value)
                    future = producer.send_nowait(f"{name}/{key}/{sequence}".encode(), key=key)
                    pending[future] = None
                    future.add_done_callback(partial(answered, value, number))
                    sequence += 1
                    while len(pending) >= WINDOW:
                        await asyncio.wait(list(pending), return_when=asyncio.FIRST_COMPLETED)
                    if sequence % 20 == 0:
                        await asyncio.sleep(0)
            await producer.flush()

    async def _allow(self, messages: int) -> None:
        async with self.more:
            self.allowed = messages
            self.more.notify_all()

    # Readers

    def _deliver(self, who: str, subscription: str, message: Message) -> None:
        producer, key, sequence = message.payload.decode().split("/")
        value = [TOPIC, subscription, producer, key, int(sequence), str(message.id), message.redelivery_count]
        self.history.add(who, "ok", "deliver", value, segment=message.id.segment_id)
        self.seen[subscription if subscription in self.seen else "checkpoint"].add((producer, int(sequence)))

    async def _stream(self, number: int) -> None:
        name = f"c{number}"
        while not self.is_over:
            async with self.cluster.client() as client:
                self.history.add(name, "invoke", "subscribe", [TOPIC, STREAM])
                async with client.stream_consumer(TOPIC, STREAM, name=name) as consumer:
                    self.report.joins += 1
                    self.leaving.discard(number)
                    while number not in self.leaving and not self._is_done():
                        if messages := await _batch(consumer):
                            for message in messages:
                                self._deliver(name, STREAM, message)
                            self.report.stream_deliveries += len(messages)
                            await consumer.acknowledge_cumulative(messages[-1])

    def _is_done(self) -> bool:
        return self.is_over

    async def _queue(self) -> None:
        async with self.cluster.client() as client, client.queue_consumer(TOPIC, QUEUE, name="q") as consumer:
            while not self.is_over:
                for message in await _batch(consumer):
                    self._deliver("q", QUEUE, message)
                    self.report.queue_deliveries += 1
                    await consumer.acknowledge(message)

    async def _checkpoint(self) -> None:
        """Reads everything once; each life begins at a checkpoint of the last seconds."""
        life = 0
        while not self.is_over:
            life += 1
            reader = f"r{life}"
            recent = [each for each in self.snapshots if each[2] > time.monotonic() - 20] or self.snapshots[-1:]
            base: str | None = None
            start: Any = EARLIEST
            if recent:
                base, data, _moment = self.chance.choice(recent)
                start = Checkpoint.from_bytes(data)
            async with self.cluster.client() as client, client.checkpoint_consumer(TOPIC, start=start) as consumer:
                self.history.add(reader, "ok", "restore", [TOPIC, reader, base, self._incarnation()])
                self.report.restores += base is not None
                await self._read_checkpoints(consumer, reader)

    async def _read_checkpoints(self, consumer: Any, reader: str) -> None:
        until = time.monotonic() + self.chance.uniform(3.0, 10.0)
        while not self.is_over:
            for message in await _batch(consumer):
                self._deliver(reader, reader, message)
                self.report.checkpoint_deliveries += 1
            name = f"{reader}#{len(self.snapshots)}"
            self.snapshots.append((name, consumer.checkpoint().to_bytes(), time.monotonic()))
            self.history.add(reader, "ok", "checkpoint", [TOPIC, reader, name, self._incarnation()])
            if time.monotonic() > until and not self.sent_all.is_set():
                return
        self.history.add(reader, "ok", "complete", [TOPIC, reader])

    def _incarnation(self) -> str:
        record = self.cluster.record(TOPIC)
        return record.incarnation if record is not None else ""

    async def _everything_seen(self) -> None:
        self.sent_all.set()
        until = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < until:
            if all(self.wanted <= seen for seen in self.seen.values()):
                return
            await asyncio.sleep(0.2)

    # Trouble

    async def _operate(self, admin: Any) -> None:
        options = self.options
        share = options.messages // options.operations
        deadly = set(self.chance.sample(range(options.operations), min(options.kills, options.operations)))
        still = max(0, options.joins - options.consumers)
        for number in range(options.operations):
            await self._allow((number + 1) * share)
            # One or more leave, as many as are due; whoever has just left must have come back first.
            due = still * (number + 1) // options.operations - still * number // options.operations
            for leaving in self.chance.sample(range(options.consumers), min(due, options.consumers)):
                await self._leave(leaving)
            began = time.monotonic()
            death = asyncio.create_task(self._kill()) if number in deadly else None
            await self._resize(admin)
            if death is not None:
                await death
            self.report.slowest_operation = round(max(self.report.slowest_operation, time.monotonic() - began), 3)
            await self._caught_up((number + 1) * share - WINDOW * options.producers)
            if number % 20 == 19:
                log.warning("%d operations, %d acknowledged", number + 1, self.report.acknowledged)

    async def _leave(self, consumer: int) -> None:
        """Let a stream consumer leave; it comes back by itself."""
        while consumer in self.leaving:  # noqa: ASYNC110 - real time
            await asyncio.sleep(0.01)
        self.leaving.add(consumer)

    async def _caught_up(self, messages: int) -> None:
        """Until so many are acknowledged: operations and load keep pace."""
        until = time.monotonic() + SETTLE_SECONDS
        while self.report.acknowledged < messages:
            if time.monotonic() > until:
                raise AssertionError(f"only {self.report.acknowledged} of {messages} messages were acknowledged")
            await asyncio.sleep(0.01)

    async def _resize(self, admin: Any) -> None:
        """One split or merge that happens; if the leader died before it wrote it down, another one is asked for."""
        before = self._layout().next_segment_id
        while True:
            is_split = await self._ask(admin)
            await patiently("the operation", SETTLE_SECONDS, self._nothing_pending)
            if self._layout().next_segment_id > before:
                break
        self.report.operations += 1
        self.report.splits += is_split
        self.report.merges += not is_split

    async def _ask(self, admin: Any) -> bool:
        """Ask for a split (then True) or a merge."""
        active = self._layout().active_in_order
        is_split = len(active) < 2 or (len(active) < MOST_SEGMENTS and self.chance.random() < 0.5)
        what = "split" if is_split else "merge"
        number = self.history.invoke("admin", what, [TOPIC])
        try:
            if is_split:
                await admin.scalable_topics.split_segment(TOPIC, self.chance.choice(active).segment_id)
            else:
                at = self.chance.randrange(len(active) - 1)
                await admin.scalable_topics.merge_segments(TOPIC, active[at].segment_id, active[at + 1].segment_id)
        except BraidError as error:
            log.info("refused: %s", error)
            self.report.refused += 1
            self.history.add("admin", "info", what, [TOPIC], number=number)
        else:
            self.history.add("admin", "ok", what, [TOPIC], number=number)
        return is_split

    def _layout(self) -> SegmentLayout:
        record = self.cluster.record(TOPIC)
        assert record is not None
        return record.layout

    async def _nothing_pending(self) -> None:
        record = self.cluster.record(TOPIC)
        if record is None or record.pending_operation is not None:
            raise Conflict("an operation is pending")

    async def _kill(self) -> None:
        """The leader, or the owner of an active segment, dies in the middle of what it does, and comes back some time later."""
        await asyncio.sleep(self.chance.random() * 0.05)
        leader = self.cluster.leader(TOPIC)
        victim = leader if leader is not None and self.chance.random() < 0.6 else self._owner() or leader
        if victim is None:
            victim = self.chance.choice(self.cluster.up)
        self.report.leaders_killed += victim is leader
        self.report.kills += 1
        self.history.add("world", "info", "fault", ["kill", victim.broker_id, victim is leader])
        number = await self.cluster.kill(victim)
        await asyncio.sleep(self.chance.choice((0.0, 0.3, self.options.session_seconds * 1.3)))
        await self.cluster.restart(number)

    def _owner(self) -> Any:
        segment = self.chance.choice(self._layout().active_in_order)
        name = physical_name(TopicName.parse(TOPIC), segment)
        return next((node for node in self.cluster.up if str(name) in node.service.topics), None)

    # Verdict

    def _judge(self) -> list[Violation]:
        events = self.history.events
        ended = Violation("C1", "the run did not end")
        found = (
            []
            if self.report.acknowledged == self.options.messages // self.options.producers * self.options.producers
            else [ended]
        )
        return [
            *found,
            *checkers.no_loss(events),
            *checkers.no_phantom(events),
            *checkers.no_duplicate(events, stored_once=True),
            *checkers.key_order(events, ordered=[STREAM]),
            *dag_checkers.drained_first(events, ordered=[STREAM]),
            *dag_checkers.dag(events),
            *dag_checkers.intent_first(events),
            *dag_checkers.leader_terms(events),
            *dag_checkers.checkpoints(events),
        ]


async def _batch(consumer: Any) -> list[Message]:
    try:
        found: list[Message] = await consumer.receive_batch(200, timeout=0.2)
    except DeadlineExceeded:
        return []
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for field in msgspec.structs.fields(Options):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=field.type, default=field.default)
    options = msgspec.convert(vars(parser.parse_args()), Options)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(message)s")
    gc.set_threshold(50_000, 20, 20)  # the history is large and has no cycles
    report = asyncio.run(Churn(options).run())
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(report)).decode() + "\n")
    is_clean = not report.violations and report.merges >= 0.3 * report.operations
    sys.exit(0 if is_clean else 1)


if __name__ == "__main__":
    main()
