"""The blocking SDK against a real broker, and the hand-over between threads by itself."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import signal
import threading
from collections.abc import Collection, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from braid.client import blocking
from braid.client.blocking_loop import LoopThread
from braid.client.blocking_producer import MAX_QUEUED
from braid.client.checkpoints import Checkpoint
from braid.client.config import ClientConfig
from braid.client.dead_letters import DeadLetterPolicy
from braid.client.messages import EARLIEST
from braid.errors import Closed, ConfigError, ConnectFailed, DeadlineExceeded, InvalidArgument, TransactionConflict
from braid.testing.broker import BackgroundBroker

NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def broker() -> Iterator[BackgroundBroker]:
    with BackgroundBroker() as running:
        yield running


@pytest.fixture
def client(broker: BackgroundBroker) -> Iterator[blocking.Client]:
    with blocking.connect(broker.service_url) as made:
        yield made


@pytest.fixture
def topic(broker: BackgroundBroker) -> str:
    name = f"topic://public/default/blocking-{next(NUMBERS)}"
    with blocking.AdminClient(broker.http_url) as admin:
        admin.scalable_topics.create(name, segments=2)
    return name


@dataclasses.dataclass
class Order:
    user: str
    amount: int


def threads(before: Collection[threading.Thread] = ()) -> set[str]:
    """Names of those that run, without those that ran before."""
    return {thread.name for thread in threading.enumerate() if thread not in before}


def test_produce_and_stream(client: blocking.Client, broker: BackgroundBroker, topic: str) -> None:
    with client.producer(topic, schema=Order) as producer:
        futures = [producer.send_nowait(Order(f"u{number % 4}", number), key=f"u{number % 4}") for number in range(100)]
        producer.flush()
        assert producer.is_connected
        with blocking.AdminClient(broker.http_url) as admin:
            admin.scalable_topics.split_segment(topic, 0)
        last = producer.send(Order("u0", 100), key="u0")
        producer.flush()
        assert all(future.done() for future in futures)
        assert futures[0].result().segment_id in (0, 1)
        assert last.segment_id >= 0
        assert producer.topic == topic
        assert producer.name
        assert producer.last_sequence_id >= 0
        producer.room()
    seen: dict[str, list[int]] = {}
    with client.stream_consumer(topic, "s", name="one", schema=Order) as consumer:
        assert (consumer.topic, consumer.subscription, consumer.name) == (topic, "s", "one")
        for message in consumer:
            seen.setdefault(message.value.user, []).append(message.value.amount)
            consumer.acknowledge_cumulative(message)
            if sum(map(len, seen.values())) == 101:
                break
        assert 1 in consumer.segments
        assert consumer.receive_nowait() is None
        with pytest.raises(DeadlineExceeded):
            consumer.receive(timeout=0.01)
    assert all(amounts == sorted(amounts) for amounts in seen.values())
    with client.stream_consumer(topic, "s", name="one", schema=Order) as consumer, pytest.raises(DeadlineExceeded):
        consumer.receive(timeout=0.3)


def test_queue_with_dead_letters(client: blocking.Client, topic: str) -> None:
    policy = DeadLetterPolicy(max_redeliveries=0, topic=f"{topic}-dead")
    with (
        client.producer(topic, schema=str) as producer,
        client.queue_consumer(topic, "q", initial="earliest", schema=str, dead_letter=policy) as consumer,
        client.queue_consumer(f"{topic}-dead", "q", initial="earliest", schema=str) as buried,
    ):
        producer.send("good", key="a")
        producer.send("bad", key="b")
        for message in itertools.islice(consumer, 2):
            if message.value == "bad":
                consumer.negative_acknowledge(message)
            else:
                consumer.acknowledge(message)
        letter = buried.receive(timeout=10)
        assert (letter.value, letter.key) == ("bad", "b")
        buried.acknowledge(letter)


def test_checkpoints(client: blocking.Client, topic: str) -> None:
    with client.producer(topic) as producer:
        for number in range(20):
            producer.send(b"%d" % number, key=f"k{number}")
    with client.checkpoint_consumer(topic, start=EARLIEST) as consumer:
        first = [message.payload for message in consumer.receive_batch(8, timeout=5)]
        place = consumer.checkpoint().to_bytes()
    with client.checkpoint_consumer(topic, start=Checkpoint.from_bytes(place)) as consumer:
        rest = [message.payload for message in consumer.receive_batch(12, timeout=5)]
    assert sorted(first + rest, key=int) == [b"%d" % number for number in range(20)]


def test_plain_consumer(client: blocking.Client) -> None:
    topic = f"persistent://public/default/blocking-plain-{next(NUMBERS)}"
    with client.consumer(topic, "s", initial="earliest") as consumer, client.producer(topic) as producer:
        ids = [producer.send(b"%d" % number) for number in range(5)]
        assert [message.payload for message in itertools.islice(consumer, 5)] == [b"0", b"1", b"2", b"3", b"4"]
        consumer.seek(ids[2])
        message = consumer.receive(timeout=5)
        assert message.payload == b"2"
        consumer.acknowledge(message, wait=True)
        consumer.unsubscribe(force=True)
        assert list(consumer) == []  # closed: iteration ends
    assert client.partitions(topic) == 0


def test_bad_values_and_addresses(client: blocking.Client, topic: str) -> None:
    with client.producer(topic, schema=Order) as producer:
        with pytest.raises(InvalidArgument):
            producer.send("no order")
        failed = producer.send_nowait("no order")
        assert isinstance(failed.exception(timeout=10), InvalidArgument)
        assert isinstance(producer.send_nowait(Order("u", 1)).result(timeout=10).segment_id, int)
    before = threads()
    with pytest.raises(ConfigError):
        blocking.connect("http://localhost")
    with pytest.raises(ConnectFailed), blocking.connect("pulsar://localhost:1", config=ClientConfig(connect_timeout=0.5)):
        pass
    assert threads() == before


def test_closing(broker: BackgroundBroker, topic: str) -> None:
    before = set(threading.enumerate())
    client = blocking.connect(broker.service_url)
    with client:
        assert client.url == broker.service_url
        assert client.config == ClientConfig()
        producer = client.producer(topic)
        consumer = client.stream_consumer(topic, "s")
        waiting: Future[Any] = Future()

        def wait() -> None:
            try:
                waiting.set_result(consumer.receive())
            except Closed as error:
                waiting.set_exception(error)

        thread = threading.Thread(target=wait)
        thread.start()
        producer.send(b"x")
        message = waiting.result(timeout=10)
        assert message.payload == b"x"
        waiting = Future()
        thread.join()
        thread = threading.Thread(target=wait)
        thread.start()
    assert isinstance(waiting.exception(timeout=10), Closed)  # told, not left hanging
    thread.join()
    client.close()
    producer.close()
    consumer.close()
    for call in (lambda: producer.send(b"x"), consumer.receive, lambda: client.producer(topic), producer.flush):
        with pytest.raises(Closed):
            call()
    assert "braid-client" not in threads(before)


def test_more_than_the_window_from_many_threads(broker: BackgroundBroker, topic: str) -> None:
    config = ClientConfig(max_pending_messages=10)
    count, workers = 400, 4
    assert workers * count > MAX_QUEUED
    with blocking.connect(broker.service_url, config=config) as client, client.producer(topic) as producer:
        futures = []

        def work(number: int) -> None:
            futures.extend([producer.send_nowait(b"%d" % turn, key=f"k{number}") for turn in range(count)])

        running = [threading.Thread(target=work, args=(number,)) for number in range(workers)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        producer.flush()
        assert [future.exception(timeout=10) for future in futures] == [None] * (workers * count)
        last: dict[str | None, int] = {}
        with client.stream_consumer(topic, "s") as consumer:
            for message in itertools.islice(consumer, workers * count):
                assert int(message.payload) == last.get(message.key, -1) + 1
                last[message.key] = int(message.payload)
                consumer.acknowledge_cumulative(message)


def test_refused_inside_a_running_loop(broker: BackgroundBroker, client: blocking.Client, topic: str) -> None:
    with client.producer(topic) as producer:

        async def wrong() -> None:
            with pytest.raises(RuntimeError, match=r"use braid\.connect with await"):
                blocking.connect(broker.service_url)
            with pytest.raises(RuntimeError, match=r"use braid\.connect with await"):
                producer.send(b"x")

        asyncio.run(wrong())
        producer.send(b"x")


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Whoever starts the tests in the background may have them ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_breaks_a_wait_off_and_loses_nothing(client: blocking.Client, topic: str) -> None:
    with client.producer(topic) as producer, client.stream_consumer(topic, "s") as consumer:
        for _ in range(3):
            timer = threading.Timer(0.1, interrupt)
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                consumer.receive()
            timer.join()
        producer.send(b"after")
        message = consumer.receive(timeout=10)
        assert message.payload == b"after"
        consumer.acknowledge_cumulative(message)


@pytest.mark.usefixtures("interruptible")
def test_a_result_that_comes_with_ctrl_c_is_kept() -> None:
    thread = LoopThread("test-loop", "thing", "another")
    try:

        async def late() -> str:
            interrupt()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return "the message"  # it was on its way when the wait was broken off
            return "?"

        assert thread.run(late) == "the message"

        async def nothing() -> None: ...

        closed: list[bool] = []

        async def close() -> None:
            closed.append(True)

        thread.run(close, is_closing=True)
        assert closed
        with pytest.raises(KeyboardInterrupt):
            thread.run(nothing)
        thread.run(nothing)
    finally:
        thread.close()
    with pytest.raises(Closed):
        thread.run(nothing)


def test_calls_under_way_end_with_the_thread() -> None:
    thread = LoopThread("test-loop", "thing", "another")
    started, outcome = threading.Event(), []

    async def forever() -> None:
        started.set()
        await asyncio.Event().wait()

    def wait() -> None:
        with pytest.raises(Closed) as caught:
            thread.run(forever)
        outcome.append(caught.value)

    waiting = threading.Thread(target=wait)
    waiting.start()
    started.wait(10)
    thread.close()
    waiting.join(10)
    assert len(outcome) == 1
    thread.close()


def test_a_transaction_block_under_which_the_client_is_closed_raises(broker: BackgroundBroker) -> None:
    client = blocking.connect(broker.service_url)
    with pytest.raises(TransactionConflict, match="The client was closed before"), client.transaction():
        client.close()
    client = blocking.connect(broker.service_url)
    with client.transaction() as txn:
        txn.commit()
        client.close()
    assert txn.state == "COMMITTED"
