"""Client processes on scalable topics: producers, stream, queue and checkpoint consumers.

A producer numbers its messages itself and never sends one again: a message whose outcome is unknown may be there or not, once.
Everything a process did and saw is written down; checkers judge.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from braid.client import Client, Message
from braid.client.checkpoints import Checkpoint
from braid.client.messages import EARLIEST
from braid.errors import BraidError, CheckpointOutdated, Conflict, DeadlineExceeded
from braid.runtime.env import Random
from braid.testing.sim.history import Kind
from braid.testing.sim.layouts import topic_records
from braid.testing.sim.processes import Process, read_payload
from braid.testing.sim.world import World


class LaneProducer(Process):
    """Sends `total` keyed messages, to a scalable topic most often; after a crash or a failure it goes on with the next one."""

    def __init__(self, world: World, name: str, topic: str, rng: Random, total: int, *, keys: int, seconds: float) -> None:
        """`seconds` is about how long it takes when nothing is in its way."""
        super().__init__(world, name)
        self.topic = topic
        self._rng = rng
        self._total = total
        self._keys = [min(int(rng.expovariate(3 / keys)), keys - 1) for _ in range(total)]
        self._batching = rng.random() < 0.5
        self._pace = 2 * seconds / total if rng.random() < 0.8 else 0.0
        self._window = rng.choice((1, 4, 12))
        self._next = 0

    async def work(self, client: Client) -> None:
        producer = await client.producer(self.topic, name=self.name, batching=self._batching, deduplication=True)
        pending: dict[int, asyncio.Future[Any]] = {}
        failure: BraidError | None = None
        while (self._next < self._total and failure is None) or pending:
            while self._next < self._total and len(pending) < self._window and failure is None:
                pending[self._next] = self._send(producer, self._next)
                self._next += 1
                await asyncio.sleep(self._pace * self._rng.random())
            await asyncio.wait(list(pending.values()), return_when=asyncio.FIRST_COMPLETED)
            for sequence in [each for each, future in pending.items() if future.done()]:
                error = pending.pop(sequence).exception()
                if error is not None and not isinstance(error, BraidError):
                    raise error
                failure = failure or error
            if failure is None and pending and self._rng.random() < 0.15:
                await self._flush(producer, pending)
        if failure is not None:
            raise failure
        await producer.close()
        record = topic_records(self.world.engine.tables.rows).get(self.topic)
        if record is not None:
            self.note("info", "lanes", [self.topic, self.name, producer.lanes_made, record.next_segment_id])
        self.is_done = True

    def _send(self, producer: Any, sequence: int) -> asyncio.Future[Any]:
        key = f"k{self._keys[sequence]}"
        value = [self.topic, self.name, key, sequence]
        number = self.world.history.invoke(self.name, "send", value)

        def ended(done: asyncio.Future[Any]) -> None:
            if done.cancelled() or done.exception() is not None:
                self.note("info", "send", value, number=number)
            else:
                message_id = done.result()
                self.note("ok", "send", [*value, str(message_id)], number=number)

        future: asyncio.Future[Any] = producer.send_nowait(f"{self.name}/{key}/{sequence}".encode(), key=key)
        future.add_done_callback(ended)
        return future

    async def _flush(self, producer: Any, pending: dict[int, asyncio.Future[Any]]) -> None:
        """Note which of the messages sent before have no answer when it returns: there must be none."""
        number = self.world.history.invoke(self.name, "flush", [self.topic, self.name])
        try:
            await producer.flush()
        except BraidError:
            self.note("info", "flush", [self.topic, self.name], number=number)
            return
        unanswered = [sequence for sequence, future in pending.items() if not future.done()]
        self.note("ok", "flush", [self.topic, self.name, unanswered], number=number)


class Reader(Process):
    """What consumers of scalable topics share."""

    def __init__(self, world: World, name: str, topic: str, subscription: str, rng: Random) -> None:
        super().__init__(world, name)
        self.topic = topic
        self.subscription = subscription
        self.last_message = 0.0
        self._rng = rng

    async def receive(self, consumer: Any) -> Message | None:
        """The next message, written down; None if none came for a second."""
        try:
            message: Message = await consumer.receive(timeout=1.0)
        except DeadlineExceeded:
            return None
        self.last_message = self.world.loop.time()
        self.note("ok", "deliver", self.value_of(message), epoch=self.incarnation, segment=message.id.segment_id)
        return message

    def value_of(self, message: Message) -> list[Any]:
        return [self.topic, self.subscription, *read_payload(message), str(message.id), message.redelivery_count]

    async def acknowledge(self, message: Message, work: Callable[..., Awaitable[None]]) -> None:
        """Acknowledge, most often waiting until that is durable; else nobody knows when it is."""
        value = self.value_of(message)[:6]
        wait = self._rng.random() < 0.7
        number = self.world.history.invoke(self.name, "ack", value)
        kind: Kind = "ok" if wait else "info"
        try:
            await work(message, wait=wait)
        except Conflict:
            kind = "info"  # the segment went to another consumer, and the message with it
        except BraidError:
            self.note("info", "ack", value, number=number)
            raise
        self.note(kind, "ack", value, number=number, segment=message.id.segment_id)


class StreamProcess(Reader):
    """Reads in order and acknowledges cumulatively; crashes, comes back under its name, leaves and joins again."""

    def __init__(
        self,
        world: World,
        name: str,
        topic: str,
        subscription: str,
        rng: Random,
        *,
        leaves: float = 0.0,
        every: int = 1,
        initial: Any = "earliest",
    ) -> None:
        """`leaves`: how likely it leaves after a message; `every`: messages per acknowledgment, at most."""
        super().__init__(world, name, topic, subscription, rng)
        self._initial = initial
        self._leaves = leaves
        self._every = every

    async def work(self, client: Client) -> None:
        where = [self.topic, self.subscription]
        number = self.world.history.invoke(self.name, "subscribe", where)
        consumer = await client.stream_consumer(self.topic, self.subscription, name=self.name, initial=self._initial)
        self.note("ok", "subscribe", where, number=number, epoch=self.incarnation)
        unacknowledged = 0
        last: Message | None = None
        while True:
            message = await self.receive(consumer)
            if message is not None:
                last, unacknowledged = message, unacknowledged + 1
            if last is not None and (message is None or unacknowledged >= self._rng.randint(1, self._every)):
                await self.acknowledge(last, consumer.acknowledge_cumulative)
                last, unacknowledged = None, 0
            if message is None and self.is_stopping:
                break
            if message is not None and not self.is_stopping and self._rng.random() < self._leaves:
                self.note("info", "leave", where)
                await consumer.close()
                return
        await consumer.close()
        self.is_done = True


class QueueProcess(Reader):
    """Takes messages in any order, acknowledges each, refuses some."""

    def __init__(
        self,
        world: World,
        name: str,
        topic: str,
        subscription: str,
        rng: Random,
        *,
        nacks: float = 0.0,
        initial: Any = "earliest",
    ) -> None:
        super().__init__(world, name, topic, subscription, rng)
        self._nacks = nacks
        self._initial = initial
        self.away = 0.0
        """Seconds for which it leaves as soon as its subscription is there, the first time."""

    async def work(self, client: Client) -> None:
        if self.away < 0:
            await asyncio.sleep(-self.away)
            self.away = 0.0
        where = [self.topic, self.subscription]
        number = self.world.history.invoke(self.name, "subscribe", where)
        consumer = await client.queue_consumer(self.topic, self.subscription, name=self.name, initial=self._initial)
        self.note("ok", "subscribe", where, number=number, epoch=self.incarnation)
        if self.away:
            self.away = -self.away
            await consumer.close()
            return
        while True:
            message = await self.receive(consumer)
            if message is None:
                if self.is_stopping:
                    break
            elif not self.is_stopping and self._rng.random() < self._nacks:
                await consumer.negative_acknowledge(message)
                self.note("ok", "nack", self.value_of(message)[:6])
            else:
                await self.acknowledge(message, consumer.acknowledge)
        await consumer.close()
        self.is_done = True


class Snapshots:
    """The checkpoints that readers of one topic have stored, as bytes, and the incarnation of the topic they were taken of."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, bytes]] = []
        self._count = 0

    def add(self, reader: str, data: bytes) -> str:
        self._count += 1
        name = f"{reader}#{self._count}"
        self.taken.append((name, data))
        return name


class CheckpointProcess(Reader):
    """Reads without a subscription, stores a checkpoint now and then, and begins each life at any older one."""

    def __init__(self, world: World, name: str, topic: str, rng: Random, snapshots: Snapshots) -> None:
        super().__init__(world, name, topic, name, rng)
        self._snapshots = snapshots
        self._lives = 0
        self._span = rng.choice((5, 15, 40))

    async def work(self, client: Client) -> None:
        self._lives += 1
        self.subscription = f"{self.name}.{self._lives}"
        start: Any = EARLIEST
        base: str | None = None
        if self._snapshots.taken and self._rng.random() < 0.85:
            base, data = self._rng.choice(self._snapshots.taken)
            start = Checkpoint.from_bytes(data)
        try:
            consumer = await client.checkpoint_consumer(self.topic, start=start)
        except CheckpointOutdated:
            self.note("fail", "restore", [self.topic, self.subscription, base, self._incarnation()])
            self._snapshots.taken = [each for each in self._snapshots.taken if each[0] != base]
            return
        self.note("ok", "restore", [self.topic, self.subscription, base, self._incarnation()])
        while True:
            message = await self.receive(consumer)
            if message is None:
                if self.is_stopping:
                    break
            elif self._rng.random() < 1 / self._span:
                name = self._snapshots.add(self.subscription, consumer.checkpoint().to_bytes())
                self.note("ok", "checkpoint", [self.topic, self.subscription, name, self._incarnation()])
                if not self.is_stopping and self._rng.random() < 0.1:
                    await consumer.close()
                    return
        self.note("ok", "complete", [self.topic, self.subscription])
        await consumer.close()
        self.is_done = True

    def _incarnation(self) -> str:
        record = topic_records(self.world.engine.tables.rows).get(self.topic)
        return record.incarnation if record is not None else ""
