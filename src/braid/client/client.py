"""`Client`: the door to a cluster: the producers and consumers made from it.

Owns what it made, and closes it. Connections are the pool's business. Knows nothing of messages. Producers, consumers and
transactions are imported when the first is made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from braid.client.config import ClientConfig
from braid.client.connection import Connection
from braid.client.consumer_origin import checked_name, checked_text, initial_position, subscription_type
from braid.client.coordinators import Coordinators
from braid.client.messages import EARLIEST
from braid.client.opening import Closable, Opening
from braid.client.pool import ConnectionPool
from braid.client.segment_reads import SegmentReads
from braid.errors import Closed, NotAllowed
from braid.model.names import Domain, TopicName
from braid.model.txn import TxnId
from braid.runtime.env import Runtime
from braid.runtime.tasks import Tasks
from braid.wire import requests, txn_requests

if TYPE_CHECKING:
    from braid.client.checkpoint_consumer import CheckpointConsumer, Start
    from braid.client.consumer import Consumer
    from braid.client.dead_letters import DeadLetterPolicy
    from braid.client.deciders import Decider
    from braid.client.producer import Producer
    from braid.client.queue_consumer import Backoff, QueueConsumer
    from braid.client.sinks import SinkBegin, Sinks, SinkState
    from braid.client.stream_consumer import StreamConsumer
    from braid.client.transactions import Transaction, TransactionScope

SubscriptionType = Literal["exclusive", "shared", "failover"]
Initial = Literal["latest", "earliest"]
C = TypeVar("C", "StreamConsumer", "QueueConsumer", "CheckpointConsumer")
Compression = Literal["none", "lz4", "zlib", "zstd", "snappy"]


def connect(url: str, *, config: ClientConfig | None = None, runtime: Runtime | None = None) -> Client:
    """A client for the cluster at `url`, such as `pulsar://localhost:6650`. Use it with `async with`."""
    return Client(url, config=config, runtime=runtime)


class Client:
    """Makes producers and consumers; `async with` connects and closes."""

    def __init__(self, url: str, *, config: ClientConfig | None = None, runtime: Runtime | None = None) -> None:
        self.url = url
        self.config = config or ClientConfig()
        self.runtime = runtime or Runtime()
        self.pool = ConnectionPool(self.runtime, self.config, url)
        self._made: dict[Closable, None] = {}
        self._next_id = 0
        self.coordinators = Coordinators(self)
        self._segment_reads = SegmentReads(self)
        self._sinks: Sinks | None = None
        self.transaction_tasks = Tasks("transactions")
        self._is_closing = False

    async def __aenter__(self) -> Client:
        """Connect to the first address that answers; raises ConnectFailed."""
        await self.pool.to_any()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def producer(
        self,
        topic: str,
        *,
        name: str | None = None,
        batching: bool = True,
        compression: Compression = "none",
        schema: Any = None,
        deduplication: bool = False,
    ) -> Opening[Producer]:
        """A producer for a topic, all its partitions or segments included; `await` it or enter it with `async with`.

        Without a name it is given one. Values are bytes, or what `schema` says: `str`, a msgspec `Struct` class or a dataclass.
        With `deduplication` the brokers store no message twice that is sent again after a lost connection."""
        from braid.client.producer import Producer
        from braid.client.producer_drafts import ProducerOptions, compression_type
        from braid.client.values import codec_of

        full = TopicName.parse(checked_text("topic", topic))
        given = None if name is None else checked_text("name", name)
        options = ProducerOptions(
            batching=batching,
            compression=compression_type(compression),
            codec=codec_of(schema),
            deduplication=deduplication,
        )

        async def start() -> Producer:
            producer = Producer(self, full, given, options)
            self.keep(producer)
            try:
                await producer.open()
            except BaseException:
                await producer.close()
                raise
            return producer

        return Opening(start)

    def consumer(
        self,
        topic: str,
        subscription: str,
        *,
        type: SubscriptionType = "exclusive",
        initial: Initial = "latest",
        name: str | None = None,
    ) -> Opening[Consumer]:
        """A consumer of a topic, all its partitions included; `await` it or enter it with `async with`.

        A new subscription starts at `initial`."""
        from braid.client.consumer import Consumer

        async def start() -> Consumer:
            full = TopicName.parse(checked_text("topic", topic))
            if full.domain in (Domain.TOPIC, Domain.SEGMENT):
                raise NotAllowed(
                    f"{full} belongs to a scalable topic; read that by client.stream_consumer, queue_consumer or "
                    "checkpoint_consumer."
                )
            consumer = Consumer(
                self,
                str(full),
                checked_text("subscription", subscription),
                subscription_type(type),
                initial_position(initial),
                checked_name("name", name, self.runtime.token(32)),
            )
            await self._open(consumer, full)
            return consumer

        return Opening(start)

    def stream_consumer(
        self,
        topic: str,
        subscription: str,
        *,
        name: str | None = None,
        initial: Initial = "earliest",
        schema: Any = None,
    ) -> Opening[StreamConsumer]:
        """A consumer that reads in order per key and shares the topic with the others of its subscription, segment by segment;
        `await` it or enter it with `async with`.

        One that comes back under the same `name` in time keeps its segments. A new subscription starts at `initial`."""
        from braid.client.stream_consumer import StreamConsumer

        return self._opening(
            lambda: StreamConsumer(self, topic, subscription, name=name, initial=initial, schema=schema), is_shared=True
        )

    def queue_consumer(
        self,
        topic: str,
        subscription: str,
        *,
        name: str | None = None,
        initial: Initial = "latest",
        schema: Any = None,
        ack_timeout: float | None = None,
        dead_letter: DeadLetterPolicy | None = None,
        nack_backoff: Backoff | None = None,
    ) -> Opening[QueueConsumer]:
        """A consumer that shares all messages with the others of its subscription, in no order; `await` it or enter it with
        `async with`.

        Messages not acknowledged within `ack_timeout` seconds, or refused, come again; after too many times they go to the
        topic of `dead_letter`. A new subscription starts at `initial`."""
        from braid.client.queue_consumer import QueueConsumer

        return self._opening(
            lambda: QueueConsumer(
                self,
                topic,
                subscription,
                name=name,
                initial=initial,
                schema=schema,
                ack_timeout=ack_timeout,
                dead_letter=dead_letter,
                nack_backoff=nack_backoff,
            )
        )

    def checkpoint_consumer(
        self,
        topic: str,
        *,
        start: Start = EARLIEST,
        group: str | None = None,
        name: str | None = None,
        schema: Any = None,
    ) -> Opening[CheckpointConsumer]:
        """A reader whose position the application keeps itself, as a `Checkpoint`; `await` it or enter it with `async with`.

        It begins at `start`: EARLIEST, LATEST, a checkpoint or its bytes, an aware datetime or milliseconds since 1970. The
        members of a `group` share the segments out, in no order between a segment and its successors. While they live, they
        get each message once, whoever joins or leaves: a segment that moves is handed over where its member stopped. What one
        that crashed had received since the group last knew its position comes again; see `CheckpointConsumer`."""
        from braid.client.checkpoint_consumer import CheckpointConsumer

        return self._opening(
            lambda: CheckpointConsumer(self, topic, start=start, group=group, name=name, schema=schema),
            is_shared=group is not None,
        )

    def transaction(self, *, timeout: float | None = None) -> TransactionScope:
        """A transaction for an `async with` block: committed at its end, aborted if it raises. What is sent and acknowledged
        with `txn=` takes effect together or not at all.

        It is aborted by the brokers if it is not ended within `timeout` seconds, or else the `transaction_timeout` of the
        client's options."""
        from braid.client.transactions import TransactionScope

        return TransactionScope(lambda: self.begin_transaction(timeout=timeout))

    async def begin_transaction(self, *, timeout: float | None = None) -> Transaction:
        """A transaction that the application ends by itself: `await txn.commit()` or `await txn.abort()`."""
        from braid.client.transactions import Transaction

        txn = Transaction(self, await self._new_transaction(timeout, is_decider=False))
        self.keep(txn)
        return txn

    async def begin_decider(self, *, timeout: float | None = None) -> Decider:
        """A transaction with sub-transactions, of which some are chosen at its end: `await decider.decide(winners)`."""
        from braid.client.deciders import Decider

        decider = Decider(self, await self._new_transaction(timeout, is_decider=True))
        self.keep(decider)
        return decider

    def join_decider(self, decider: TxnId | str) -> Decider:
        """A decider that was begun elsewhere, by its id, to make sub-transactions of it here. Asks nobody."""
        from braid.client.deciders import Decider, decider_id

        return Decider(self, decider_id(decider), is_joined=True)

    async def begin_sink(self, sink: str, batch: int, run: str, *, timeout: float) -> SinkBegin:
        """Begin batch number `batch` of a sink, or learn that it is in the output already. Everybody who asks in the same `run`
        of a job gets the same decider; a new run takes the sink over, aborts what the one before left open and fences it.

        The decider is aborted by the brokers if it is not decided or renewed within `timeout` seconds. Raises SinkFenced if a
        later run has the sink, InvalidTransactionStatus if this run cannot write the batch any more."""
        return await self._sink_calls().begin(sink, batch, run, timeout)

    async def sink(self, sink: str) -> SinkState | None:
        """Which batches a sink has; None if nothing is in its output and nothing is under way."""
        return await self._sink_calls().state(sink)

    async def decide_batch(
        self, sink: str, batch: int, run: str, txn: TxnId | str, winners: Iterable[int]
    ) -> Literal["COMMITTED", "DUPLICATE"]:
        """Put a batch into the output: its decider is committed with these sub-transactions. Can be repeated. DUPLICATE:
        another run did so before, which is as good.

        Raises SinkFenced or InvalidTransactionStatus if the batch was aborted and is not in the output, DeadlineExceeded if
        nobody knows."""
        return await self._sink_calls().decide(sink, batch, run, txn, winners)

    async def abort_batch(self, txn: TxnId | str) -> None:
        """Abort the decider of a batch unless it is decided; how it was decided does not matter here."""
        await self._sink_calls().abort(txn)

    def segment_reads(self) -> SegmentReads:
        """Reading topics by ranges of message indexes, in bulk: for connectors that keep positions themselves."""
        return self._segment_reads

    async def partitions(self, topic: str) -> int:
        """How many partitions a topic has; 0 for a plain one."""
        connection = await self.pool.to_any()
        body = await connection.request(lambda number: requests.partitioned_metadata(number, topic))
        return int(body.partitions)

    async def close(self) -> None:
        """Close what was made and every connection. Who gives up waiting leaves no connection behind. Idempotent."""
        if self._is_closing:
            return
        self._is_closing = True
        try:
            await asyncio.gather(*[each.close() for each in list(self._made)])
        finally:  # what could not be closed ends when its connection does
            self.transaction_tasks.cancel()
            self.pool.close()
        await asyncio.sleep(0)

    # For producers and consumers.

    @property
    def is_connected(self) -> bool:
        """Whether any broker can be asked at the moment."""
        return self.pool.is_connected

    def new_id(self) -> int:
        """A producer or consumer id; never used twice by this client."""
        self._next_id += 1
        return self._next_id

    def keep(self, made: Closable) -> None:
        """Close this with the client, unless it is forgotten before. Raises Closed if it is too late for that."""
        if self._is_closing:
            raise Closed("The client was closed.")
        self._made[made] = None

    def forget(self, made: Closable) -> None:
        self._made.pop(made, None)

    async def service_connection(self) -> Connection:
        """A connection to any broker of the cluster."""
        return await self.pool.to_any()

    async def connection_for(self, url: str | None) -> Connection:
        """The connection to the broker at `url`, as brokers name each other; to any if none is named or it is not reachable."""
        return await self.pool.to_broker(url)

    async def locate(self, topic: str) -> Connection:
        """The connection to the broker that serves `topic`."""
        return await self.pool.locate(topic)

    def _opening(self, make: Callable[[], C], *, is_shared: bool = False) -> Opening[C]:
        """What opens a consumer and closes it with the client. One that `is_shared` is told its segments by the topic's
        controller."""

        async def start() -> C:
            consumer = make()
            self.keep(consumer)
            try:
                if is_shared:
                    await self._check_controllers(consumer.topic)
                await consumer.open()
            except BaseException:
                await consumer.close()
                raise
            return consumer

        return Opening(start)

    async def _new_transaction(self, timeout: float | None, *, is_decider: bool) -> TxnId:
        from braid.client.transactions import milliseconds_of

        ttl_ms = milliseconds_of(self.config.transaction_timeout if timeout is None else timeout)
        self.keep(self.coordinators)
        deadline = self.runtime.clock.monotonic() + self.config.operation_timeout
        body = await self.coordinators.begin(
            lambda request, coordinator: txn_requests.new(request, coordinator, ttl_ms, is_decider=is_decider), deadline
        )
        return TxnId(body.txnid_most_bits, body.txnid_least_bits)

    def _sink_calls(self) -> Sinks:
        from braid.client.sinks import Sinks

        if self._sinks is None:
            self._sinks = Sinks(self)
        return self._sinks

    async def _check_controllers(self, topic: str) -> None:
        connection = await self.pool.to_any()
        if not connection.supports_scalable_topics:
            raise NotAllowed(
                f"The broker at {connection.address} serves no scalable topics, so nobody shares out {topic} among its "
                "consumers; enable them there (scalable_topics.enabled), or read a persistent:// topic by client.consumer, "
                "queue_consumer or a checkpoint_consumer without a group."
            )

    async def _open(self, made: Consumer, name: TopicName) -> None:
        count = await self.partitions(str(name))
        self.keep(made)
        try:
            await made.open([str(name.partition(number)) for number in range(count)] or [str(name)])
        except BaseException:
            await made.close()
            raise
