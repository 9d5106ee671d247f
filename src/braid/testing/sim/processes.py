"""Client processes of the messaging workloads: producers and consumers that crash, come back and write down what they saw.

A process is a node with an SDK client. A producer gives its messages fixed sequence ids and, after a failure or a crash, asks
the broker for the last one it has and sends the rest again: with deduplication each message is stored exactly once. Checkers
judge; processes only record.
"""

from __future__ import annotations

import asyncio
from typing import Any

from braid.client import Client, Consumer, Message
from braid.client.client import SubscriptionType
from braid.errors import BraidError, DeadlineExceeded, Rejected
from braid.runtime.env import Random
from braid.testing.sim.loop import Node
from braid.testing.sim.world import World

RETRY_SECONDS = 0.5
PATIENCE = 60.0
"""Seconds of an operation before it is given up: above every timeout of the SDK."""


class Process:
    """A program that its supervisor starts again whenever it ends before its work is done."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.node = Node(name)
        self.delay = 0.0
        """Seconds before its first start."""
        self.is_done = False
        self.is_stopping = False
        self.is_running = False
        self.incarnation = 0
        self._task: asyncio.Task[Any] | None = None

    def start(self) -> None:
        if self.delay:
            self.world.loop.call_later(self.delay, self.start)
            self.delay = 0.0
            return
        self.incarnation += 1
        self.is_running = True
        self._task = self.world.spawn(self.node, self._live(), self.name)

    def crash(self) -> None:
        """End at once and start again after a while."""
        if self.is_done or not self.is_running:
            return
        self.is_running = False
        self.world.died(self.node, silently=self.world.trouble_random.random() < 0.3)
        self.note("info", "crash")
        self.node = Node(self.name)
        self.world.loop.call_later(1.0, self.start)

    def note(self, kind: Any, op: str, value: Any = None, **more: Any) -> None:
        self.world.history.add(self.name, kind, op, value, **more)

    async def _live(self) -> None:
        while not self.is_done:
            client = self.world.client(self.node)
            try:
                await self.work(client)
            except BraidError as error:
                self.world.history.remark(f"{self.name}: {type(error).__name__}: {error}")
            await close_quietly(client)
            if not self.is_done:
                await asyncio.sleep(RETRY_SECONDS)

    async def work(self, client: Client) -> None:
        raise NotImplementedError


async def close_quietly(client: Client) -> None:
    """Close, with patience for everything that has a timeout of its own: a close that is cut short leaves things behind."""
    try:
        async with asyncio.timeout(PATIENCE):
            await client.close()
    except (BraidError, TimeoutError):
        return


class ProducerProcess(Process):
    """Sends `total` messages with keys of its own, several at a time."""

    def __init__(
        self, world: World, name: str, topic: str, rng: Random, total: int, *, seconds: float, deduplicated: bool
    ) -> None:
        """`seconds` is about how long it takes when nothing is in its way."""
        super().__init__(world, name)
        self.topic = topic
        self._rng = rng
        self._total = total
        self._keys = [min(int(rng.expovariate(0.7)), 5) for _ in range(total)]
        self._batching = rng.random() < 0.5
        self._pace = 2 * seconds / total if rng.random() < 0.8 else 0.0
        self._window = rng.choice((1, 3, 10))
        self._deduplicated = deduplicated
        self._next = 0

    async def work(self, client: Client) -> None:
        producer = await client.producer(self.topic, name=self.name, batching=self._batching)
        if self._deduplicated:
            self._next = producer.last_sequence_id + 1
        pending: dict[asyncio.Task[Any], None] = {}
        try:
            while self._next < self._total or pending:
                while self._next < self._total and len(pending) < self._window:
                    pending[asyncio.get_running_loop().create_task(self._send(producer, self._next))] = None
                    self._next += 1
                    if self._pace:
                        await asyncio.sleep(self._pace * self._rng.random())
                    else:
                        await asyncio.sleep(0)
                done, _ = await asyncio.wait(list(pending), return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=hash):
                    del pending[task]
                    task.result()
        finally:
            for task in pending:
                task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        await producer.close()
        self.is_done = True

    async def _send(self, producer: Any, sequence: int) -> None:
        value = [self.topic, self.name, f"k{self._keys[sequence]}", sequence]
        number = self.world.history.invoke(self.name, "send", value)
        payload = f"{self.name}/k{self._keys[sequence]}/{sequence}".encode()
        try:
            message_id = await producer.send(payload, key=value[2], sequence_id=sequence)
        except BraidError as error:
            self.note("fail" if isinstance(error, Rejected) else "info", "send", value, number=number)
            raise
        self.note("ok", "send", [*value, str(message_id)], number=number)


class ConsumerProcess(Process):
    """Receives and acknowledges until told to stop and nothing more comes."""

    def __init__(
        self, world: World, name: str, topic: str, subscription: str, rng: Random, *, kind: SubscriptionType, nacks: float = 0.0
    ) -> None:
        super().__init__(world, name)
        self.topic = topic
        self.subscription = subscription
        self._kind = kind
        self._rng = rng
        self._nacks = nacks
        self._cumulative = kind != "shared" and rng.random() < 0.4
        self._wait = 1.0
        self.last_message = 0.0

    async def work(self, client: Client) -> None:
        where = [self.topic, self.subscription]
        number = self.world.history.invoke(self.name, "subscribe", where)
        consumer = await client.consumer(self.topic, self.subscription, type=self._kind, initial="earliest", name=self.name)
        self.note("ok", "subscribe", where, number=number, epoch=self.incarnation)
        while True:
            try:
                message = await consumer.receive(timeout=self._wait)
            except DeadlineExceeded:
                if self.is_stopping:
                    break
                continue
            self.last_message = self.world.loop.time()
            await self._handle(consumer, message)
        await consumer.close()
        self.is_done = True

    async def _handle(self, consumer: Consumer, message: Message) -> None:
        value = [self.topic, self.subscription, *read_payload(message), str(message.id), message.redelivery_count]
        self.note("ok", "deliver", value, epoch=self.incarnation)
        if not self.is_stopping and self._rng.random() < self._nacks:
            await consumer.negative_acknowledge(message)
            self.note("ok", "nack", value[:6])
            return
        number = self.world.history.invoke(self.name, "ack", value[:6])
        try:
            if self._cumulative:
                await consumer.acknowledge_cumulative(message, wait=True)
            else:
                await consumer.acknowledge(message, wait=True)
        except BraidError:
            self.note("info", "ack", value[:6], number=number)
            raise
        self.note("ok", "ack", value[:6], number=number)


def read_payload(message: Message) -> tuple[str, str, int]:
    """Producer, key and sequence, whatever comes after them; anything else is a phantom and shown as such."""
    parts = message.payload.decode("utf-8", "replace").split("/", 3)
    if len(parts) >= 3 and parts[2].isdigit():
        return parts[0], parts[1], int(parts[2])
    return "?", repr(message.payload), -1
