"""Client processes that use transactions: workers that take tokens, change them and put them back; a pipeline.

A token is a message that stands for one thing: a list, an account. Whoever wants to change it acknowledges it and sends its
next version, in one transaction, so that each version is replaced once and a chain of versions never branches. The subscription
of all workers is the lock: a transactional acknowledgment of what another one took is refused (INV14). Processes only record;
checkers judge.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from braid.client import Client, Message
from braid.errors import BraidError, DeadlineExceeded, InvalidTransactionStatus, TransactionConflict, TransactionNotFound
from braid.runtime.env import Random
from braid.testing.sim.processes import Process, read_payload
from braid.testing.sim.world import World

STATE = "state"
"""The subscription whose messages are the tokens."""
OVER = (TransactionConflict, InvalidTransactionStatus, TransactionNotFound)
"""Answers that say for certain: no."""
TIMEOUTS = (2.0, 6.0, 20.0)
"""Seconds a transaction is given; the short ones end while things are slow."""


class Token(NamedTuple):
    """A token as it came."""

    consumer: Any
    message: Message
    topic: str
    name: str
    content: str


class Habits(NamedTuple):
    """How likely a worker lets a transaction end otherwise than by its commit."""

    abort: float = 0.12
    vanish: float = 0.06
    """Does nothing more; the deadline ends the transaction."""
    linger: float = 0.04
    """Sleeps past the deadline and goes on: a zombie."""


PEACEFUL = Habits(0.0, 0.0, 0.0)


class TxnProcess(Process):
    """What processes share that use transactions."""

    def __init__(self, world: World, name: str, rng: Random, habits: Habits) -> None:
        super().__init__(world, name)
        self._rng = rng
        self.habits = habits
        self._sent = 0
        self._transactions = 0

    async def begin(self, client: Client) -> tuple[Any, float]:
        timeout = self._rng.choice(TIMEOUTS)
        number = self.world.history.invoke(self.name, "begin", [timeout])
        try:
            txn = await client.begin_transaction(timeout=timeout)
        except BraidError:
            self.note("info", "begin", [timeout], number=number)
            raise
        self._transactions += 1
        self.note("ok", "begin", [timeout], number=number, txn=str(txn.id))
        return txn, timeout

    async def send(self, producer: Any, topic: str, key: str, content: str, txn: Any) -> None:
        """One message; its payload is producer/key/sequence and, if there is one, /content."""
        self._sent += 1
        value = [topic, self.name, key, self._sent]
        number = self.world.history.invoke(self.name, "send", value, txn=str(txn.id))
        payload = f"{self.name}/{key}/{self._sent}" + (f"/{content}" if content else "")
        try:
            message_id = await producer.send(payload.encode(), key=key, txn=txn)
        except BraidError as error:
            self.note("fail" if isinstance(error, OVER) else "info", "send", value, number=number, txn=str(txn.id))
            raise
        self.note("ok", "send", [*value, str(message_id)], number=number, txn=str(txn.id))

    async def acknowledge(self, work: Callable[..., Awaitable[None]], value: list[Any], message: Message, txn: Any) -> None:
        """Most often waiting for the answer; else it is the commit that waits, and fails if the answer is no."""
        number = self.world.history.invoke(self.name, "ack", value, txn=str(txn.id))
        wait = self._rng.random() < 0.7
        try:
            await work(message, txn=txn, wait=wait)
        except BraidError as error:
            self.note("fail" if isinstance(error, OVER) else "info", "ack", value, number=number, txn=str(txn.id))
            raise
        self.note("ok" if wait else "info", "ack", value, number=number, txn=str(txn.id))

    async def end(self, txn: Any, op: str) -> bool:
        """Commit or abort; whether it is certain that this was done."""
        number = self.world.history.invoke(self.name, op, txn=str(txn.id))
        try:
            await (txn.commit() if op == "commit" else txn.abort())
        except BraidError as error:
            self.world.history.remark(f"{self.name}: {op} of {txn.id}: {type(error).__name__}: {error}")
            self.note("fail" if txn.state == "ABORTED" else "info", op, number=number, txn=str(txn.id))
            return False
        self.note("ok", op, number=number, txn=str(txn.id))
        return True

    async def finish(self, txn: Any) -> bool:
        """As its habits are, sometimes after a while; True if it was committed for certain."""
        if self._rng.random() < 0.3:
            await asyncio.sleep(self._rng.uniform(0.0, 1.0))
        chance = self._rng.random()
        habits = self.habits
        if chance < habits.abort:
            await self.end(txn, "abort")
            return False
        if chance < habits.abort + habits.vanish:
            self.note("info", "vanish", txn=str(txn.id))
            return False
        return await self.end(txn, "commit")

    async def maybe_linger(self, timeout: float) -> None:
        if timeout < 10 and self._rng.random() < self.habits.linger:
            await asyncio.sleep(timeout + self._rng.uniform(0.0, 2.0))


class TokenWorker(TxnProcess):
    """Takes some tokens, sends their next versions and perhaps messages to other topics, in one transaction."""

    def __init__(
        self,
        world: World,
        name: str,
        rng: Random,
        states: list[str],
        logs: list[str],
        *,
        total: int,
        pace: float,
        habits: Habits,
    ) -> None:
        """`states` are the topics of tokens, `logs` topics that get messages besides; `total` transactions, `pace` seconds
        between two."""
        super().__init__(world, name, rng, habits)
        self.states = states
        self.logs = logs
        self._total = total
        self._pace = pace
        self._is_pipelined = rng.random() < 0.5

    async def work(self, client: Client) -> None:
        consumers = []
        for topic in self.states:
            where = [topic, STATE]
            number = self.world.history.invoke(self.name, "subscribe", where)
            consumers.append((topic, await client.queue_consumer(topic, STATE, name=self.name, initial="earliest")))
            self.note("ok", "subscribe", where, number=number, epoch=self.incarnation)
        producers = {
            topic: await client.producer(topic, name=self.name, batching=self._rng.random() < 0.5)
            for topic in (*self.states, *self.logs)
        }
        while self._transactions < self._total and not self.is_stopping:
            await asyncio.sleep(self._rng.expovariate(1 / self._pace))
            if tokens := await self.gather(consumers, self.wanted()):
                await self._one(client, producers, tokens)
        self.is_done = True  # closing the client gives back what is queued

    def wanted(self) -> int:
        return self._rng.choice((1, 2, 2, 3))

    async def gather(self, consumers: list[tuple[str, Any]], count: int) -> list[Token]:
        """Tokens of different things, as many as come in time; one that came twice is noticed by the broker."""
        found: dict[str, Token] = {}
        patience = 6
        while len(found) < count and patience:
            topic, consumer = self._rng.choice(consumers)
            try:
                message = await consumer.receive(timeout=0.25)
            except DeadlineExceeded:
                patience -= 1
                continue
            token = Token(consumer, message, topic, *name_and_content(message))
            self.note("ok", "deliver", self.value_of(token, more=True), epoch=self.incarnation)
            if token.name in found:
                await consumer.negative_acknowledge(found[token.name].message)
            found[token.name] = token
        return list(found.values())

    def value_of(self, token: Token, *, more: bool = False) -> list[Any]:
        message = token.message
        value = [token.topic, STATE, *read_payload(message), str(message.id)]
        return [*value, message.redelivery_count] if more else value

    async def _one(self, client: Client, producers: dict[str, Any], tokens: list[Token]) -> None:
        held: list[Token] = []
        txn: Any = None
        try:
            txn, timeout = await self.begin(client)
            await self.maybe_linger(timeout)
            await self._do(producers, tokens, held, txn)
            await self.finish(txn)
            return
        except OVER as error:
            self.world.history.remark(f"{self.name}: {txn and txn.id}: {type(error).__name__}: {error}")
            if txn is None:
                raise
        await self.end(txn, "abort")
        for token in tokens:
            if token not in held:
                await token.consumer.negative_acknowledge(token.message)

    async def _do(self, producers: dict[str, Any], tokens: list[Token], held: list[Token], txn: Any) -> None:
        async def take(token: Token) -> None:
            await self.acknowledge(token.consumer.acknowledge, self.value_of(token), token.message, txn)
            held.append(token)

        works = [take(token) for token in tokens]
        works += [
            self.send(producers[token.topic], token.topic, token.name, content, txn)
            for token, content in self.change(tokens, str(txn.id))
        ]
        for topic in self.logs:
            for _number in range(self._rng.choice((0, 1, 2))):
                works.append(self.send(producers[topic], topic, f"k{self._rng.randrange(6)}", "", txn))
        await self.all_of(works)

    async def all_of(self, works: list[Any]) -> None:
        """One after the other or all at once; raises the first failure when all have ended."""
        if self._is_pipelined:
            results = await asyncio.gather(*works, return_exceptions=True)
        else:
            results = []
            for work in works:
                if any(isinstance(each, BaseException) for each in results):
                    work.close()
                    continue
                results += await asyncio.gather(work, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    def change(self, tokens: list[Token], txn: str) -> list[tuple[Token, str]]:
        """The next version of each token, in the order in which they are sent; written down."""
        raise NotImplementedError


class ListWorker(TokenWorker):
    """A token is a list; its next version has one element more, or two."""

    def change(self, tokens: list[Token], txn: str) -> list[tuple[Token, str]]:
        found = []
        for token in tokens:
            elements = [each for each in token.content.split(",") if each]
            self.note("ok", "list-read", [token.name, elements], txn=txn)
            for _number in range(self._rng.choice((1, 1, 2))):
                element = f"{self.name}.{self._next_element()}"
                self.note("invoke", "list-append", [token.name, element], txn=txn)
                elements = [*elements, element]
            found.append((token, ",".join(elements)))
        return found

    def _next_element(self) -> int:
        self._elements = getattr(self, "_elements", 0) + 1
        return self._elements


class Teller(TokenWorker):
    """A token is an account; two of them exchange some money, or all are counted."""

    accounts: int = 0
    """How many there are; a teller that counts takes them all."""
    counts: float = 0.2
    """How likely it counts."""

    def wanted(self) -> int:
        return self.accounts if self._rng.random() < self.counts else 2

    def change(self, tokens: list[Token], txn: str) -> list[tuple[Token, str]]:
        balances = [int(token.content) for token in tokens]
        if len(tokens) == self.accounts:
            self.note(
                "info", "counted", {token.name: balance for token, balance in zip(tokens, balances, strict=True)}, txn=txn
            )
        if len(tokens) > 1:
            amount = self._rng.randint(1, 30)
            balances[0] -= amount
            balances[1] += amount
        return [(token, str(balance)) for token, balance in zip(tokens, balances, strict=True)]


class Pipeline(TxnProcess):
    """Reads a topic in order and sends what it read to another one: each batch with its acknowledgment in one transaction.

    After a transaction that was not committed for certain it begins anew where its subscription stands."""

    def __init__(self, world: World, name: str, rng: Random, source: str, target: str, habits: Habits) -> None:
        super().__init__(world, name, rng, habits)
        self.source = source
        self.target = target
        self.subscription = "pipeline"
        self.last_message = 0.0
        self._batch = rng.choice((1, 4, 10))

    async def work(self, client: Client) -> None:
        where = [self.source, self.subscription]
        number = self.world.history.invoke(self.name, "subscribe", where)
        consumer = await client.stream_consumer(self.source, self.subscription, name=self.name, initial="earliest")
        self.note("ok", "subscribe", where, number=number, epoch=self.incarnation)
        producer = await client.producer(self.target, name=self.name, batching=self._rng.random() < 0.5)
        while True:
            messages = await consumer.receive_batch(self._batch, timeout=1.0)
            if not messages:
                if self.is_stopping:
                    break
                continue
            self.last_message = self.world.loop.time()
            for message in messages:
                value = [self.source, self.subscription, *read_payload(message), str(message.id), message.redelivery_count]
                self.note("ok", "deliver", value, epoch=self.incarnation, segment=message.id.segment_id)
            if not await self._one(client, consumer, producer, messages):
                return
        self.is_done = True

    async def _one(self, client: Client, consumer: Any, producer: Any, messages: list[Message]) -> bool:
        txn, timeout = await self.begin(client)
        try:
            await self.maybe_linger(timeout)
            sends = []
            for message in messages:
                origin, key, sequence = read_payload(message)
                sends.append(self.send(producer, self.target, key, f"{origin}.{sequence}", txn))
            for result in await asyncio.gather(*sends, return_exceptions=True):
                if isinstance(result, BaseException):
                    raise result
            last = messages[-1]
            value = [self.source, self.subscription, *read_payload(last), str(last.id)]
            await self.acknowledge(consumer.acknowledge_cumulative, value, last, txn)
            return await self.finish(txn)
        except BraidError:
            await self.end(txn, "abort")
            raise


def name_and_content(message: Message) -> tuple[str, str]:
    """Key and content of a token."""
    parts = message.payload.decode("utf-8", "replace").split("/", 3)
    return (parts[1], parts[3]) if len(parts) == 4 else (read_payload(message)[1], "")
