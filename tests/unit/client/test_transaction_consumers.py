"""Acknowledging under transactions, against real brokers: all or nothing, in order, over splits, and who may not commit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

import braid
from braid.client import Client, ClientConfig, Consumer, Message, QueueConsumer, StreamConsumer, blocking
from braid.client.transactions import IN_BLOCK
from braid.errors import (
    BraidError,
    DeadlineExceeded,
    InvalidArgument,
    InvalidTransactionStatus,
    NotAllowed,
    TransactionConflict,
)
from braid.model.names import TopicName
from braid.model.txn import TxnId
from braid.scalable.config import ScalableConfig
from braid.scalable.controller import ScalableTopicController
from braid.testing.broker import BackgroundBroker, InProcessBroker
from braid.txn.config import TransactionConfig
from braid.web.config import StandaloneConfig

IN = "topic://public/default/in"
OUT = "topic://public/default/out"
NAME = TopicName.parse(IN)
SECONDS = 20.0
CONFIG = StandaloneConfig(
    scalable_topics=ScalableConfig(drain_poll_seconds=0.1, consumer_grace_seconds=60.0, reconcile_seconds=1.0),
    transactions=TransactionConfig(timeout_sweep_seconds=0.1),
)


@asynccontextmanager
async def started(segments: int = 1) -> AsyncIterator[InProcessBroker]:
    async with InProcessBroker(config=CONFIG, with_http=False) as broker:
        await broker.nodes[0].service.create_scalable_topic(NAME, segments)
        yield broker


@pytest.fixture
async def broker() -> AsyncIterator[InProcessBroker]:
    async with started() as one:
        yield one


@pytest.fixture
async def client(broker: InProcessBroker) -> AsyncIterator[Client]:
    async with braid.connect(broker.service_url) as one:
        yield one


async def leader(broker: InProcessBroker) -> ScalableTopicController:
    found = await broker.nodes[0].service.scalable.lead(NAME)
    assert isinstance(found, ScalableTopicController)
    return found


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110 - brokers take their own time, no event tells
            await asyncio.sleep(0.005)


async def produce(client: Client, first: int, last: int, keys: int = 1, topic: str = IN) -> None:
    async with client.producer(topic, batching=False) as producer:
        for number in range(first, last):
            await producer.send(b"%d" % number, key=f"key-{number % keys}")


async def take(consumer: StreamConsumer | QueueConsumer, count: int) -> list[Message]:
    return [await consumer.receive(SECONDS) for _ in range(count)]


def numbers(messages: list[Message]) -> list[int]:
    return [int(each.payload) for each in messages]


async def nothing_more(consumer: StreamConsumer | QueueConsumer) -> None:
    with pytest.raises(DeadlineExceeded):
        await consumer.receive(0.3)


# Read, process, write.


@pytest.mark.req("R473-1", "R473-29", "R473-30")
async def test_all_of_it_or_none_of_it(client: Client) -> None:
    await produce(client, 0, 20)
    async with (
        client.stream_consumer(IN, "s") as consumer,
        client.producer(OUT) as out,
        client.stream_consumer(OUT, "check") as check,
    ):

        async def step(is_wanted: bool) -> list[int]:
            batch = await take(consumer, 10)
            async with client.transaction() as txn:
                for each in batch:
                    await out.send(each.payload, key=each.key, txn=txn)
                await consumer.acknowledge_cumulative(batch[-1], txn=txn)
                if not is_wanted:
                    raise KeyError
            return numbers(batch)

        with pytest.raises(KeyError):
            await step(False)
        await nothing_more(check)
        assert await step(True) == list(range(10))  # again, in order
        with pytest.raises(KeyError):
            await step(False)
        assert await step(True) == list(range(10, 20))
        assert numbers(await take(check, 20)) == list(range(20))
        await nothing_more(consumer)
        await nothing_more(check)
    async with client.stream_consumer(IN, "s") as consumer:
        await nothing_more(consumer)


async def test_messages_received_ahead_come_again_in_their_order(client: Client) -> None:
    """What is in the application's hands or queued when a transaction is aborted must not come before what it gave back."""
    await produce(client, 0, 30)
    async with client.stream_consumer(IN, "s") as consumer:
        txn = await client.begin_transaction()
        batch = await take(consumer, 10)
        await consumer.acknowledge_cumulative(batch[-1], txn=txn, wait=True)
        ahead = await take(consumer, 10)
        await txn.abort()
        with pytest.raises(TransactionConflict, match="read anew"):
            async with client.transaction() as other:
                await consumer.acknowledge_cumulative(ahead[-1], txn=other)
        assert numbers(await take(consumer, 30)) == list(range(30))
        await nothing_more(consumer)


async def test_what_one_segment_gave_back_does_not_concern_the_others(client: Client) -> None:
    async with started(segments=2) as broker, braid.connect(broker.service_url) as client:
        layout = (await leader(broker)).layout
        keys = [
            next(str(each) for each in range(100) if layout.segment_of_key(str(each)).segment_id == segment_id)
            for segment_id in (0, 1)
        ]
        async with client.producer(IN) as producer, client.stream_consumer(IN, "s") as consumer:
            await producer.send(b"0", key=keys[0])
            txn = await client.begin_transaction()
            await consumer.acknowledge_cumulative(await consumer.receive(SECONDS), txn=txn, wait=True)
            await producer.send(b"1", key=keys[1])
            await until(lambda: len(consumer._queue) == 1)
            await txn.abort()
            other = await consumer.receive(SECONDS)
            assert other.payload == b"1"
            async with client.transaction() as txn:
                await consumer.acknowledge_cumulative(other, txn=txn)
            assert (await consumer.receive(SECONDS)).payload == b"0"


async def test_what_was_received_in_a_block_that_raised_comes_again(client: Client) -> None:
    """Also if it was not acknowledged yet: the next cumulative acknowledgment would cover it."""
    await produce(client, 0, 6)
    async with client.stream_consumer(IN, "s", initial="earliest") as consumer:
        before = await consumer.receive(SECONDS)
        await consumer.acknowledge_cumulative(before, wait=True)
        seen: list[list[bytes]] = []
        for fails in (True, True, False):
            try:
                async with client.transaction() as txn:
                    batch = [await consumer.receive(SECONDS) for _ in range(3)]
                    seen.append([message.payload for message in batch])
                    if fails:
                        raise ZeroDivisionError
                    await consumer.acknowledge_cumulative(batch[-1], txn=txn)
            except ZeroDivisionError:
                continue
        assert seen[0] == seen[1] == seen[2]
        left = [(await consumer.receive(SECONDS)).payload for _ in range(2)]
        assert len({before.payload, *seen[2], *left}) == 6
        assert IN_BLOCK.get() is None


async def test_what_was_received_in_a_block_that_commits_stays_with_the_application(client: Client) -> None:
    await produce(client, 0, 4)
    async with client.stream_consumer(IN, "s", initial="earliest") as consumer:
        async with client.transaction():
            first = await consumer.receive(SECONDS)
        rest = [(await consumer.receive(SECONDS)).payload for _ in range(3)]
        assert len({first.payload, *rest}) == 4


def test_a_block_without_await_gives_back_what_it_received() -> None:
    with BackgroundBroker() as running, blocking.connect(running.service_url) as client:
        topic = "persistent://public/default/blocks"
        with client.producer(topic) as producer:
            producer.send(b"one", key="k")
        with client.stream_consumer(topic, "s", initial="earliest") as consumer:
            with pytest.raises(ZeroDivisionError), client.transaction():
                assert consumer.receive(SECONDS).payload == b"one"
                raise ZeroDivisionError
            assert consumer.receive(SECONDS).payload == b"one"


@pytest.mark.req("R473-35")
async def test_a_transaction_that_timed_out_loses_nothing(client: Client) -> None:
    """The brokers give back what it held while the application, which does not know, goes on."""
    await produce(client, 0, 20)
    async with client.stream_consumer(IN, "s") as consumer:
        txn = await client.begin_transaction(timeout=0.2)
        batch = await take(consumer, 10)
        await consumer.acknowledge_cumulative(batch[-1], txn=txn, wait=True)
        await asyncio.sleep(1.0)  # the timeout and a sweep
        ahead = await take(consumer, 10)
        assert numbers(ahead) == list(range(10, 20))
        await nothing_more(consumer)  # what the brokers send again waits for the end of the transaction
        with pytest.raises(TransactionConflict, match="not ended; end it first"):
            async with client.transaction() as other:
                await consumer.acknowledge_cumulative(ahead[-1], txn=other)
        with pytest.raises(InvalidTransactionStatus):
            await txn.commit()
        assert txn.state == "ABORTED"
        again = await take(consumer, 20)
        assert numbers(again) == list(range(20))
        async with client.transaction() as last:
            await consumer.acknowledge_cumulative(again[-1], txn=last)
        await nothing_more(consumer)


@pytest.mark.inv("INV14")
async def test_a_message_is_acknowledged_in_one_transaction_only(client: Client) -> None:
    await produce(client, 0, 3)
    async with client.stream_consumer(IN, "s") as consumer:
        batch = await take(consumer, 3)
        async with client.transaction() as txn:
            await consumer.acknowledge_cumulative(batch[1], txn=txn)
            await consumer.acknowledge_cumulative(batch[0], txn=txn)  # covered already
        with pytest.raises(TransactionConflict, match="acknowledged already"):
            async with client.transaction() as txn:
                await consumer.acknowledge_cumulative(batch[1], txn=txn)
        async with client.transaction() as txn:
            await consumer.acknowledge_cumulative(batch[2], txn=txn)


async def test_everything_unacknowledged_can_be_had_again(client: Client) -> None:
    await produce(client, 0, 10)
    async with client.stream_consumer(IN, "s") as consumer:
        batch = await take(consumer, 6)
        await consumer.acknowledge_cumulative(batch[1])
        await consumer.redeliver_unacknowledged()
        assert numbers(await take(consumer, 8)) == list(range(2, 10))
        txn = await client.begin_transaction()
        await consumer.acknowledge_cumulative((await take_again(consumer))[-1], txn=txn)
        with pytest.raises(InvalidTransactionStatus, match=f"End transaction {txn.id} first"):
            await consumer.redeliver_unacknowledged()


async def take_again(consumer: StreamConsumer) -> list[Message]:
    await consumer.redeliver_unacknowledged()
    return await take(consumer, 8)


# Splits, and segments that are lost.


@pytest.mark.req("R473-2")
async def test_a_batch_does_not_wait_for_children_that_wait_for_its_transaction(
    broker: InProcessBroker, client: Client
) -> None:
    await produce(client, 0, 20, keys=4)
    controller = await leader(broker)
    async with client.stream_consumer(IN, "s") as consumer, asyncio.timeout(SECONDS):
        await controller.split_segment(0)
        await produce(client, 20, 40, keys=4)
        seen: list[Message] = []
        rounds = 0
        while len(seen) < 40:
            rounds += 1
            async with client.transaction() as txn:
                while batch := await consumer.receive_batch(7):  # without a timeout: would wait for ever for the children
                    seen += batch
                    await consumer.acknowledge_cumulative(batch[-1], txn=txn)
                    if len(seen) == 40:
                        break
        assert sorted(numbers(seen)) == list(range(40))
        for key in range(4):
            assert [number for number in numbers(seen) if number % 4 == key] == list(range(key, 40, 4))
        assert rounds >= 2
        await until(lambda: consumer.segments == [1, 2])


@pytest.mark.req("R473-2", "R473-57")
@pytest.mark.parametrize("end", ["commit", "abort"])
async def test_no_child_is_read_before_an_open_transaction_in_its_sealed_parent_has_ended(
    broker: InProcessBroker, client: Client, end: str
) -> None:
    async with (
        client.producer(IN) as producer,
        client.stream_consumer(IN, "s") as stream,
        client.checkpoint_consumer(IN) as checkpoint,
    ):
        await producer.send(b"0", key="k")
        txn = await client.begin_transaction()
        await producer.send(b"1", key="k", txn=txn)
        await (await leader(broker)).split_segment(0)
        await producer.send(b"2", key="k")
        first = await stream.receive(SECONDS)
        await stream.acknowledge_cumulative(first)
        assert numbers([first, await checkpoint.receive(SECONDS)]) == [0, 0]
        for consumer in (stream, checkpoint):
            with pytest.raises(DeadlineExceeded):
                await consumer.receive(0.3)
        await getattr(txn, end)()
        for expected in [1, 2] if end == "commit" else [2]:
            message = await stream.receive(SECONDS)
            await stream.acknowledge_cumulative(message)
            assert numbers([message, await checkpoint.receive(SECONDS)]) == [expected, expected]


async def test_an_idle_segment_does_not_keep_a_batch_waiting_either(client: Client) -> None:
    async with started(segments=2) as broker, braid.connect(broker.service_url) as client:
        controller = await leader(broker)
        async with client.producer(IN, batching=False) as producer:
            layout = controller.layout
            key = next(str(each) for each in range(100) if layout.segment_of_key(str(each)).segment_id == 0)
            for number in range(5):
                await producer.send(b"%d" % number, key=key)
        async with client.stream_consumer(IN, "s") as consumer, asyncio.timeout(SECONDS):
            await controller.split_segment(0)
            async with client.transaction() as txn:
                batch = await consumer.receive_batch(5, timeout=10)
                assert numbers(batch) == list(range(5))
                await consumer.acknowledge_cumulative(batch[-1], txn=txn)
                assert await consumer.receive_batch(5) == []
            await until(lambda: consumer.segments == [1, 2, 3])


@pytest.mark.inv("INV14")
async def test_losing_a_segment_aborts_the_transaction_that_acknowledged_it(broker: InProcessBroker) -> None:
    config = ClientConfig(release_wait=0.2)
    async with braid.connect(broker.service_url, config=config) as client:
        controller = await leader(broker)
        await controller.split_segment(0)
        await produce(client, 0, 40, keys=8)
        async with client.stream_consumer(IN, "s", name="one") as one:
            batch = await take(one, 40)
            txn = await client.begin_transaction()
            await one.acknowledge_cumulative(batch[-1], txn=txn, wait=True)
            async with client.stream_consumer(IN, "s", name="two") as two:
                await until(lambda: txn.state == "ABORTED")
                with pytest.raises(TransactionConflict, match=r"was taken away .*another consumer"):
                    await txn.commit()
                seen: list[Message] = []
                while len(seen) < 40:
                    seen += await one.receive_batch(100, timeout=0.1)
                    seen += await two.receive_batch(100, timeout=0.1)
                assert sorted(numbers(seen)) == list(range(40))


async def test_a_segment_is_given_away_once_the_transaction_is_committed(broker: InProcessBroker, client: Client) -> None:
    controller = await leader(broker)
    await controller.split_segment(0)
    await produce(client, 0, 40, keys=8)
    async with client.stream_consumer(IN, "s", name="one") as one:
        batch = await take(one, 40)
        async with client.transaction() as txn:
            await one.acknowledge_cumulative(batch[-1], txn=txn)
            opening = asyncio.ensure_future(client.stream_consumer(IN, "s", name="two").__aenter__())
            await until(lambda: len(one.segments) == 1)
        two = await opening
        await until(lambda: len(two.segments) == 1)
        await nothing_more(one)
        await nothing_more(two)


async def test_closing_the_consumer_aborts_the_transaction(client: Client) -> None:
    await produce(client, 0, 5)
    txn = await client.begin_transaction()
    async with client.stream_consumer(IN, "s") as consumer:
        await consumer.acknowledge_cumulative((await take(consumer, 5))[-1], txn=txn, wait=True)
    with pytest.raises(TransactionConflict, match="consumer was closed"):
        await txn.commit()
    async with client.stream_consumer(IN, "s") as consumer:
        assert numbers(await take(consumer, 5)) == list(range(5))


@pytest.mark.inv("INV14")
async def test_a_zombie_cannot_commit_what_another_one_has_done(broker: InProcessBroker, client: Client) -> None:
    """Both have received the same messages; the one that lost its place commits neither its output nor its acknowledgment."""
    await produce(client, 0, 5)
    async with client.producer(OUT) as out, braid.connect(broker.service_url) as second:
        zombie = await client.stream_consumer(IN, "s", name="worker")
        old = await take(zombie, 5)
        async with second.stream_consumer(IN, "s", name="worker") as worker:
            new = await take(worker, 5)
            async with second.transaction() as txn:
                async with second.producer(OUT) as other:
                    await other.send(b"done", txn=txn)
                await worker.acknowledge_cumulative(new[-1], txn=txn)
            with pytest.raises(BraidError):
                async with client.transaction() as txn:
                    await out.send(b"done", txn=txn)
                    await zombie.acknowledge_cumulative(old[-1], txn=txn)
            assert txn.state == "ABORTED"
    async with client.stream_consumer(OUT, "check") as check:
        assert len(await take(check, 1)) == 1
        await nothing_more(check)


# Queues.


async def test_queue_messages_come_again_after_an_abort(client: Client) -> None:
    await produce(client, 0, 10)
    async with client.queue_consumer(IN, "q", initial="earliest") as consumer:
        batch = await take(consumer, 10)
        txn = await client.begin_transaction()
        for each in batch[:4]:
            await consumer.acknowledge(each, txn=txn)
        await txn.abort()
        assert sorted(numbers(await take(consumer, 4))) == numbers(batch[:4])
        async with client.transaction() as txn:
            for each in batch[:4]:
                await consumer.acknowledge(each, txn=txn)
        for each in batch[4:]:
            await consumer.acknowledge(each, wait=True)
        await nothing_more(consumer)
    async with client.queue_consumer(IN, "q") as consumer:
        await nothing_more(consumer)


async def test_single_messages_of_a_batch(client: Client) -> None:
    async with client.producer(IN) as producer:
        await asyncio.gather(*[producer.send_nowait(b"%d" % number) for number in range(6)])
    async with client.queue_consumer(IN, "q", initial="earliest") as consumer:
        batch = await take(consumer, 6)
        assert len({(each.id.ledger_id, each.id.entry_id) for each in batch}) == 1
        await consumer.acknowledge(batch[5], wait=True)
        async with client.transaction() as txn:
            await consumer.acknowledge(batch[0], txn=txn)
            await consumer.acknowledge(batch[2], txn=txn, wait=True)
            await consumer.acknowledge(batch[3], txn=txn)
        with pytest.raises(TransactionConflict):
            async with client.transaction() as txn:
                await consumer.acknowledge(batch[2], txn=txn)
    async with client.queue_consumer(IN, "q") as consumer:
        assert numbers(await take(consumer, 2)) == [1, 4]
        await nothing_more(consumer)


@pytest.mark.inv("INV14")
async def test_a_conflict_is_raised_by_the_commit(client: Client) -> None:
    await produce(client, 0, 2)
    async with client.queue_consumer(IN, "q", initial="earliest") as consumer:
        batch = await take(consumer, 2)
        one, two = await client.begin_transaction(), await client.begin_transaction()
        await consumer.acknowledge(batch[0], txn=one, wait=True)
        await consumer.acknowledge(batch[0], txn=two)
        with pytest.raises(TransactionConflict):
            await two.commit()
        assert two.state == "ABORTED"
        await one.commit()


async def test_regular_topics_and_their_consumers(client: Client) -> None:
    topic = "persistent://public/default/regular"
    async with client.consumer(topic, "s", initial="earliest") as consumer:
        await produce(client, 0, 6, topic=topic)
        batch = [await consumer.receive(SECONDS) for _ in range(4)]
        txn = await client.begin_transaction()
        await consumer.acknowledge_cumulative(batch[-1], txn=txn, wait=True)
        await txn.abort()
        batch = [await consumer.receive(SECONDS) for _ in range(6)]
        assert numbers(batch) == list(range(6))
        async with client.transaction() as txn:
            await consumer.acknowledge_cumulative(batch[2], txn=txn)
            await consumer.acknowledge(batch[4], txn=txn)
    async with client.consumer(topic, "s") as consumer:
        assert numbers([await consumer.receive(SECONDS) for _ in range(2)]) == [3, 5]
    async with client.consumer(topic, "shared", type="shared", initial="earliest") as shared:
        message = await shared.receive(SECONDS)
        txn = await client.begin_transaction()
        with pytest.raises(NotAllowed, match="Shared"):
            await shared.acknowledge_cumulative(message, txn=txn)
        with pytest.raises(TransactionConflict, match="Shared"):
            await txn.commit()


@pytest.mark.inv("INV14")
async def test_an_acknowledgment_that_is_refused_here_keeps_the_rest_from_being_committed(client: Client) -> None:
    regular = "persistent://public/default/regular"
    await produce(client, 0, 1)
    await produce(client, 0, 1, topic=regular)
    stream = await client.stream_consumer(IN, "s")
    queue = await client.queue_consumer(IN, "q", initial="earliest")
    plain = await client.consumer(regular, "p", initial="earliest")
    mine = {each: await each.receive(SECONDS) for each in (stream, queue, plain)}

    async def attempt(consumer: StreamConsumer | QueueConsumer | Consumer, message: Message) -> None:
        txn = await client.begin_transaction()
        with pytest.raises(BraidError):
            if isinstance(consumer, StreamConsumer):
                await consumer.acknowledge_cumulative(message, txn=txn)
            else:
                await consumer.acknowledge(message, txn=txn)
        with pytest.raises(TransactionConflict):
            await txn.commit()

    await attempt(stream, mine[queue])
    await attempt(queue, mine[plain])
    await attempt(plain, mine[stream])
    for consumer, message in mine.items():
        await consumer.close()
        await attempt(consumer, message)


async def test_acknowledgments_survive_a_lost_connection(broker: InProcessBroker, client: Client) -> None:
    await produce(client, 0, 10)
    async with client.queue_consumer(IN, "q", initial="earliest") as consumer:
        batch = await take(consumer, 10)
        async with client.transaction() as txn:
            for each in batch[:5]:
                await consumer.acknowledge(each, txn=txn)
            async with asyncio.timeout(SECONDS):
                while not any(each._requests for each in client.pool.connections.values()):  # noqa: ASYNC110
                    await asyncio.sleep(0)  # until they are sent, and not answered
            for connection in list(client.pool.connections.values()):
                connection.abort(DeadlineExceeded("cut by the test"))
            for each in batch[5:]:
                await consumer.acknowledge(each, txn=txn)
    async with client.queue_consumer(IN, "q") as consumer:
        await nothing_more(consumer)


async def test_an_aborted_message_does_not_bring_its_waiting_neighbours_along(client: Client) -> None:
    """The broker sends the whole batch again, of which the consumer has handed out but one message."""
    topic = "persistent://public/default/regular-in"
    async with (
        client.consumer(topic, "q", type="shared") as consumer,
        client.producer(topic) as producer,
        client.producer(OUT) as output,
    ):
        for number in range(20):
            producer.send_nowait(b"%d" % number)
        first = await consumer.receive(SECONDS)
        txn = await client.begin_transaction()
        await consumer.acknowledge(first, wait=True, txn=txn)
        await txn.abort()
        await until(lambda: any(message.id == first.id for _lane, message in consumer._queue))
        async with client.transaction() as txn:
            messages = [await consumer.receive(SECONDS) for _ in range(20)]
            assert sorted(int(each.payload) for each in messages) == list(range(20))
            assert consumer.receive_nowait() is None
            for each in messages:
                await output.send(each.payload, txn=txn)
                await consumer.acknowledge(each, txn=txn)


@pytest.mark.parametrize("topic", [IN, "persistent://public/default/regular-in"])
async def test_a_message_that_came_twice_is_not_dealt_with_twice_in_one_transaction(client: Client, topic: str) -> None:
    """Both acknowledgments are of one transaction, so no broker sees a conflict; what the application made of them would be
    committed twice."""

    def opened() -> Any:
        if topic == IN:
            return client.queue_consumer(IN, "q", initial="earliest")
        return client.consumer(topic, "q", initial="earliest", type="shared")

    await produce(client, 0, 3, topic=topic)
    async with opened() as consumer, client.producer(OUT) as producer:
        begun = await client.begin_transaction()
        first = await take(consumer, 3)
        for connection in list(client.pool.connections.values()):
            connection.abort(DeadlineExceeded("cut by the test"))
        again = await take(consumer, 3)
        assert sorted(numbers(again)) == [0, 1, 2]
        for each in first:
            await producer.send(each.payload, key=each.key, txn=begun)
            await consumer.acknowledge(each, txn=begun)
            await consumer.acknowledge(each, txn=begun)  # the same one once more is harmless
        await producer.send(again[0].payload, key=again[0].key, txn=begun)
        with pytest.raises(TransactionConflict, match="received a second time"):
            await consumer.acknowledge(again[0], txn=begun)
        with pytest.raises(TransactionConflict, match="received a second time"):
            await begun.commit()
        assert begun.state == "ABORTED"
        async with client.transaction() as txn:
            for each in await take(consumer, 3):
                await producer.send(each.payload, key=each.key, txn=txn)
                await consumer.acknowledge(each, txn=txn)
        assert not any(lane.transactional._received for lane in consumer._lanes.values())
        async with client.queue_consumer(OUT, "all", initial="earliest") as reader:
            assert sorted(numbers(await take(reader, 3))) == [0, 1, 2]
            await nothing_more(reader)


@pytest.mark.inv("INV14")
async def test_a_message_that_came_twice_comes_again_after_the_abort(client: Client) -> None:
    """The second copy was in the application's hands; that must not keep the third one from it."""
    await produce(client, 0, 1)
    async with client.queue_consumer(IN, "q", initial="earliest") as consumer:
        begun = await client.begin_transaction()
        (first,) = await take(consumer, 1)
        await consumer.acknowledge(first, txn=begun, wait=True)
        (lane,) = [each for each in consumer._lanes.values() if each.segment_id == first.id.segment_id]
        consumer.put(lane, [msgspec.structs.replace(first, redelivery_count=1)])  # as after a lost connection
        (second,) = await take(consumer, 1)
        with pytest.raises(TransactionConflict, match="received a second time"):
            await consumer.acknowledge(second, txn=begun)
        with pytest.raises(TransactionConflict):
            await begun.commit()
        assert numbers(await take(consumer, 1)) == [0]


# Sub-transactions.


async def test_a_decider_chooses_the_winners(broker: InProcessBroker, client: Client) -> None:
    async with (
        client.producer(OUT) as out,
        braid.connect(broker.service_url) as elsewhere,
        elsewhere.producer(OUT) as far,
        client.stream_consumer(OUT, "check") as check,
    ):
        decider = await client.begin_decider(timeout=1)
        await decider.renew(30)
        first, second = await decider.sub(), await decider.sub()
        third = await elsewhere.join_decider(str(decider.id)).sub()
        assert len({first.number, second.number, third.number}) == 3
        assert {each.id.root for each in (first, second, third)} == {decider.id}
        await out.send(b"first", key="k", txn=first)
        out.send_nowait(b"second", key="k", txn=second)
        await far.send(b"third", key="k", txn=third)
        await out.send(b"own", key="k", txn=decider)
        with pytest.raises(NotAllowed, match="its decider"):
            await first.commit()
        with pytest.raises(NotAllowed, match="its decider"):
            await first.abort()
        await decider.decide([second, third.number])
        assert [each.state for each in (decider, first, second)] == ["COMMITTED", "ABORTED", "COMMITTED"]
        assert [each.payload for each in await take(check, 3)] == [b"second", b"third", b"own"]
        await nothing_more(check)
        await decider.decide([third.number, second])  # the same again
        with pytest.raises(TransactionConflict, match="other winners"):
            await decider.decide([first])
        with pytest.raises(InvalidTransactionStatus):
            await decider.sub()


async def test_a_winner_must_be_complete(client: Client) -> None:
    async with client.producer(OUT) as out:
        decider = await client.begin_decider()
        good, bad = await decider.sub(), await decider.sub()
        await out.send(b"good", txn=good)
        with pytest.raises(BraidError):
            await out.send(b"x" * (6 << 20), txn=bad)
        with pytest.raises(TransactionConflict, match="must not win"):
            await decider.decide([good, bad])
        assert decider.state == "OPEN"
        await decider.decide([good])


async def test_what_cannot_win_or_decide(client: Client) -> None:
    decider = await client.begin_decider()
    for wrong in (0, -1, 1 << 20, "1", True, None):
        with pytest.raises(InvalidArgument, match="winner"):
            await decider.decide([wrong])  # type: ignore[list-item]
    sub = await decider.sub()
    for no_list in (None, 1, "1", sub):
        with pytest.raises(InvalidArgument, match=r"winners=.* give a list"):
            await decider.decide(no_list)  # type: ignore[arg-type]
    for named in ("x", sub.id, 5, "1"):
        with pytest.raises(InvalidArgument):
            client.join_decider(named)  # type: ignore[arg-type]
    plain = await client.begin_transaction()
    with pytest.raises(BraidError):
        await client.join_decider(plain.id).sub()
    await decider.abort()
    assert sub.state == "ABORTED"
    assert isinstance(sub.id, TxnId)


# Without await.


def test_blocking() -> None:
    with BackgroundBroker() as broker, blocking.connect(broker.service_url) as client:
        topic, out = "topic://public/default/b-in", "topic://public/default/b-out"
        with client.producer(topic) as producer:
            for number in range(4):
                producer.send(b"%d" % number)
        with (
            client.stream_consumer(topic, "s") as consumer,
            client.producer(out) as producer,
            client.queue_consumer(out, "q", initial="earliest") as queue,
        ):

            def step(is_wanted: bool) -> blocking.Transaction:
                with client.transaction(timeout=20) as txn:
                    batch = consumer.receive_batch(4, timeout=SECONDS)
                    assert numbers(batch) == list(range(4))
                    for each in batch[:2]:
                        producer.send(each.payload, txn=txn)
                    for each in batch[2:]:
                        producer.send_nowait(each.payload, txn=txn)
                    consumer.acknowledge_cumulative(batch[-1], txn=txn)
                    assert txn.state == "OPEN"
                    if not is_wanted:
                        raise KeyError(txn.id)
                return txn

            with pytest.raises(KeyError):
                step(False)
            assert step(True).state == "COMMITTED"
            got = [queue.receive(SECONDS) for _ in range(4)]
            assert sorted(numbers(got)) == list(range(4))
            txn = client.begin_transaction()
            queue.acknowledge(got[0], txn=txn, wait=True)
            txn.commit()
            decider = client.begin_decider()
            sub, other = decider.sub(), client.join_decider(decider.id).sub()
            producer.send(b"77", txn=sub)
            producer.send(b"78", txn=other)
            sub.finish()
            decider.renew(10)
            decider.decide([sub])
            assert queue.receive(SECONDS).payload == b"77"
            assert [decider.state, sub.state, sub.number, sub.id.root] == ["COMMITTED", "COMMITTED", 1, decider.id]
            assert "COMMITTED" in repr(decider)
