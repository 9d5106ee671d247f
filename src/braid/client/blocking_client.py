"""`Client` without `await`, and the consumers it makes.

Every object here is the asynchronous one of the same name, waited for. A client owns one thread, on which everything made by it
lives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Concatenate, ParamSpec, TypeVar

from braid.client import checkpoint_consumer, client, consumer, queue_consumer, stream_consumer
from braid.client.blocking_loop import LoopThread, Opened, on_loop, waited
from braid.client.blocking_producer import Producer
from braid.client.blocking_transactions import Decider, SinkBegin, Transaction, TransactionScope
from braid.client.config import ClientConfig
from braid.client.consumer_segments import SegmentsConsumer
from braid.client.messages import Message
from braid.client.opening import Closable, Opening
from braid.errors import Closed, TopicTerminated
from braid.model.txn import TxnId
from braid.runtime.env import Runtime

P = ParamSpec("P")
T = TypeVar("T", bound=Closable)
W = TypeVar("W")
S = TypeVar("S", bound=SegmentsConsumer[Any], covariant=True)


def connect(url: str, *, config: ClientConfig | None = None, runtime: Runtime | None = None) -> Client:
    """A client for the cluster at `url`, such as `pulsar://localhost:6650`. Use it with `with`."""
    return Client(url, config=config, runtime=runtime)


class Consumer(Opened[consumer.Consumer]):
    """Receives messages of a topic. Made by `Client.consumer`."""

    receive = waited(consumer.Consumer.receive)
    receive_nowait = on_loop(consumer.Consumer.receive_nowait)
    acknowledge = waited(consumer.Consumer.acknowledge)
    acknowledge_cumulative = waited(consumer.Consumer.acknowledge_cumulative)
    negative_acknowledge = waited(consumer.Consumer.negative_acknowledge)
    seek = waited(consumer.Consumer.seek)
    unsubscribe = waited(consumer.Consumer.unsubscribe)

    @property
    def topic(self) -> str:
        """The topic, by its full name."""
        return self._inner.topic

    @property
    def subscription(self) -> str:
        """The subscription it receives for."""
        return self._inner.subscription

    @property
    def name(self) -> str:
        """The consumer's name."""
        return self._inner.name

    def __iter__(self) -> Iterator[Message]:
        """Messages until the topic ends or the consumer is closed."""
        return _until(self.receive, (TopicTerminated, Closed))


class _SegmentsConsumer(Opened[S]):
    """What the consumers of segmented topics have in common."""

    receive = waited(SegmentsConsumer.receive)
    receive_nowait = on_loop(SegmentsConsumer.receive_nowait)
    receive_batch = waited(SegmentsConsumer.receive_batch)

    @property
    def topic(self) -> str:
        """The topic, by its full name."""
        return self._inner.topic

    def __iter__(self) -> Iterator[Message]:
        """Messages until the consumer is closed."""
        return _until(self.receive, (Closed,))


class StreamConsumer(_SegmentsConsumer[stream_consumer.StreamConsumer]):
    """Receives messages in order per key. Made by `Client.stream_consumer`."""

    acknowledge_cumulative = waited(stream_consumer.StreamConsumer.acknowledge_cumulative)
    redeliver_unacknowledged = waited(stream_consumer.StreamConsumer.redeliver_unacknowledged)

    @property
    def subscription(self) -> str:
        """The subscription it receives for."""
        return self._inner.subscription

    @property
    def name(self) -> str:
        """The consumer's name, under which it finds its segments again."""
        return self._inner.name

    @property
    def segments(self) -> list[int]:
        """Ids of the segments being read at the moment."""
        return self._look(lambda: self._inner.segments)


class QueueConsumer(_SegmentsConsumer[queue_consumer.QueueConsumer]):
    """Shares the messages of a topic with other consumers, one by one. Made by `Client.queue_consumer`."""

    acknowledge = waited(queue_consumer.QueueConsumer.acknowledge)
    negative_acknowledge = waited(queue_consumer.QueueConsumer.negative_acknowledge)

    @property
    def subscription(self) -> str:
        """The subscription it receives for."""
        return self._inner.subscription

    @property
    def name(self) -> str:
        """The consumer's name."""
        return self._inner.name

    @property
    def segments(self) -> list[int]:
        """Ids of the segments being read at the moment."""
        return self._look(lambda: self._inner.segments)


class CheckpointConsumer(_SegmentsConsumer[checkpoint_consumer.CheckpointConsumer]):
    """Reads a topic and knows how far. Made by `Client.checkpoint_consumer`."""

    checkpoint = on_loop(checkpoint_consumer.CheckpointConsumer.checkpoint)

    @property
    def name(self) -> str:
        """The consumer's name."""
        return self._inner.name

    @property
    def segments(self) -> list[int]:
        """Ids of the segments being read at the moment."""
        return self._look(lambda: self._inner.segments)


def _until(receive: Callable[[], Message], ends: tuple[type[Exception], ...]) -> Iterator[Message]:
    while True:
        try:
            message = receive()
        except ends:
            return
        yield message


def _opened(
    method: Callable[Concatenate[client.Client, P], Opening[T]], wrap: Callable[[T, LoopThread], W]
) -> Callable[Concatenate[Client, P], W]:
    """The same method, which returns the opened object."""

    @functools.wraps(method)
    def call(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> W:
        async def start() -> T:
            return await method(self._inner, *args, **kwargs)

        return wrap(self._thread.run(start), self._thread)

    return call


class Client(Opened[client.Client]):
    """Makes producers and consumers; `with` connects and closes. What it makes is open already, and `with` closes it."""

    def __init__(self, url: str, *, config: ClientConfig | None = None, runtime: Runtime | None = None) -> None:
        thread = LoopThread("braid-client", "client", "braid.connect")
        try:
            super().__init__(client.Client(url, config=config, runtime=runtime), thread)
        except BaseException:
            thread.close()
            raise

    producer = _opened(client.Client.producer, Producer)
    consumer = _opened(client.Client.consumer, Consumer)
    stream_consumer = _opened(client.Client.stream_consumer, StreamConsumer)
    queue_consumer = _opened(client.Client.queue_consumer, QueueConsumer)
    checkpoint_consumer = _opened(client.Client.checkpoint_consumer, CheckpointConsumer)
    partitions = waited(client.Client.partitions)
    sink = waited(client.Client.sink)
    decide_batch = waited(client.Client.decide_batch)
    abort_batch = waited(client.Client.abort_batch)

    def transaction(self, *, timeout: float | None = None) -> TransactionScope:
        """A transaction for a `with` block: committed at its end, aborted if it raises."""
        return TransactionScope(lambda: self.begin_transaction(timeout=timeout), self._thread)

    def begin_transaction(self, *, timeout: float | None = None) -> Transaction:
        """A transaction that the application ends by itself: `txn.commit()` or `txn.abort()`."""
        return Transaction(self._thread.run(lambda: self._inner.begin_transaction(timeout=timeout)), self._thread)

    def begin_decider(self, *, timeout: float | None = None) -> Decider:
        """A transaction with sub-transactions, of which some are chosen at its end: `decider.decide(winners)`."""
        return Decider(self._thread.run(lambda: self._inner.begin_decider(timeout=timeout)), self._thread)

    def join_decider(self, decider: TxnId | str) -> Decider:
        """A decider that was begun elsewhere, by its id, to make sub-transactions of it here. Asks nobody."""
        return Decider(self._look(lambda: self._inner.join_decider(decider)), self._thread)

    def begin_sink(self, sink: str, batch: int, run: str, *, timeout: float) -> SinkBegin:
        """Begin batch number `batch` of a sink, or learn that it is in the output already. Everybody who asks in the same `run`
        of a job gets the same decider; a new run takes the sink over, aborts what the one before left open and fences it."""
        found = self._thread.run(lambda: self._inner.begin_sink(sink, batch, run, timeout=timeout))
        return SinkBegin(None if found.decider is None else Decider(found.decider, self._thread), found.is_duplicate)

    @property
    def url(self) -> str:
        """The address it was made with."""
        return self._inner.url

    @property
    def config(self) -> ClientConfig:
        """Its options."""
        return self._inner.config

    def __enter__(self) -> Client:
        """Connect to the first address that answers; raises ConnectFailed."""
        try:
            self._thread.run(self._inner.__aenter__)
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """Close what was made, every connection and the thread. Idempotent."""
        if not self._thread.is_closed:
            try:
                super().close()
            finally:
                self._thread.close()
