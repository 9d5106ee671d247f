"""A sink that writes to more topics than it has producers open: every row is stored once, and none before its predecessor."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, StringType, StructType

from braid.client import blocking
from braid.client.config import ClientConfig
from braid.errors import BraidError, Closed, DeadlineExceeded
from braid.runtime.clock import SystemClock
from braid.testing.broker import BackgroundBroker
from braid_spark import open_producers, sink
from braid_spark.connections import Link
from braid_spark.open_producers import OpenProducers
from braid_spark.options import parse
from braid_spark.outgoing import Outgoing
from braid_spark.sink import ExactlyOnceAttempt, Identity

MAX_OPEN = 3
SCHEMA = StructType().add("value", BinaryType()).add("topic", StringType())


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_producers, "MAX_OPEN", MAX_OPEN)


def rows(topics: list[str], first: int, count: int) -> pa.RecordBatch:
    """Rows that go to the topics by turns."""
    numbers = range(first, first + count)
    values = pa.array([b"%d" % number for number in numbers], pa.binary())
    return pa.record_batch({"value": values, "topic": [topics[number % len(topics)] for number in numbers]})


class _Brokers:
    """Topics that leave out what they take for duplicates, and tell no producer how far its name has got. What is sent is
    stored some time later."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.client = SimpleNamespace(
            runtime=SimpleNamespace(clock=SystemClock()), config=ClientConfig(), producer=self.producer
        )
        self.stored: dict[str, list[bytes]] = {}
        self.last: dict[tuple[str, str], int] = {}
        self.open: set[tuple[str, str]] = set()
        self.most_open = 0
        self.refused = b""

    def run(self, start: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        return self.loop.run_until_complete(start())

    async def producer(self, topic: str, *, name: str, deduplication: bool) -> _Producer:
        assert deduplication
        assert (topic, name) not in self.open
        self.open.add((topic, name))
        self.most_open = max(self.most_open, len(self.open))
        return _Producer(self, topic, name)


class _Producer:
    def __init__(self, brokers: _Brokers, topic: str, name: str) -> None:
        self.brokers = brokers
        self.place = (topic, name)
        self.sequence = -1
        self.unanswered: list[tuple[int, list[bytes], asyncio.Future[None]]] = []

    async def send_block(self, block: Any, *, txn: Any) -> asyncio.Future[None]:
        values = [row[4 + int.from_bytes(row[:4], "big") :] for row in block._rows.to_pylist()]
        done: asyncio.Future[None] = self.brokers.loop.create_future()
        self.unanswered.append((self.sequence + 1, values, done))
        self.sequence += len(values)
        self.brokers.loop.call_later(0.001, self.store)
        return done

    def store(self) -> None:
        brokers = self.brokers
        for sequence, values, done in self.unanswered:
            for number, value in enumerate(values, sequence):
                if number > brokers.last.get(self.place, -1):
                    brokers.last[self.place] = number
                    brokers.stored.setdefault(self.place[0], []).append(value)
            if brokers.refused in values:
                done.set_exception(BraidError("refused"))
            else:
                done.set_result(None)
        self.unanswered.clear()

    async def close(self) -> None:
        """What has no answer by now is given up."""
        for _, _, done in self.unanswered:
            done.set_exception(Closed("closed"))
        self.unanswered.clear()
        self.brokers.open.discard(self.place)


@pytest.fixture
def brokers() -> Iterator[_Brokers]:
    made = _Brokers()
    yield made
    made.loop.close()


def producers(brokers: _Brokers) -> OpenProducers:
    return OpenProducers(brokers, {}, lambda: "attempt")  # type: ignore[arg-type]


def send(brokers: _Brokers, into: OpenProducers, topics: list[str], total: int, at_once: int) -> None:
    outgoing = Outgoing(SCHEMA, None)
    for first in range(0, total, at_once):
        for topic, block in outgoing.blocks(rows(topics, first, at_once), into.topics):
            into.send(topic, block, None)


def test_no_row_is_left_out_or_doubled_when_producers_give_way(brokers: _Brokers) -> None:
    topics = [f"persistent://public/default/t{number}" for number in range(10)]
    into = producers(brokers)
    send(brokers, into, topics, 600, 40)
    into.drain()
    assert brokers.stored == {topic: [b"%d" % each for each in range(at, 600, 10)] for at, topic in enumerate(topics)}
    assert brokers.most_open == MAX_OPEN
    into.close()
    assert not brokers.open


def test_open_producers_are_used_before_others_give_way(brokers: _Brokers) -> None:
    topics = [f"t{number}" for number in range(MAX_OPEN + 1)]
    into = producers(brokers)
    send(brokers, into, topics, 200, 40)
    into.drain()
    opened = len(brokers.last)
    assert opened == len(topics) + 4  # one for each batch behind the first, not all of them


def test_a_refused_row_of_a_producer_that_gives_way_is_told(brokers: _Brokers) -> None:
    brokers.refused = b"1"
    into = producers(brokers)
    with pytest.raises(BraidError, match="refused"):
        send(brokers, into, [f"t{number}" for number in range(10)], 40, 40)
    into.close()
    assert not brokers.open


@pytest.mark.parametrize("kind", ["persistent", "topic"])
def test_a_batch_to_many_topics_counts_once(kind: str) -> None:
    topics = [f"{kind}://public/default/wide-{number}" for number in range(8)]
    with BackgroundBroker() as broker, Link(broker.service_url) as link:
        options = parse({"service.url": broker.service_url})
        attempt = ExactlyOnceAttempt(link, Outgoing(SCHEMA, None), options, Identity("wide", 0, "run"))
        written = attempt.write(rows(topics, first, 40) for first in range(0, 400, 40))
        assert sink.decide(link, [written]) == 400
        with blocking.connect(broker.service_url) as client:
            for at, topic in enumerate(topics):
                assert seen(client, topic, kind) == Counter(b"%d" % each for each in range(at, 400, 8))


def test_a_partitioned_topic_and_one_of_its_partitions_side_by_side() -> None:
    """Both producers end in the partition: under one name, the broker would take rows of one for rows of the other."""
    topic = "persistent://public/default/parted"
    with BackgroundBroker() as broker, Link(broker.service_url) as link:
        with blocking.AdminClient(broker.http_url) as admin:
            admin.topics.create(topic, partitions=1)
        options = parse({"service.url": broker.service_url})
        attempt = ExactlyOnceAttempt(link, Outgoing(SCHEMA, None), options, Identity("parted", 0, "run"))
        written = attempt.write(rows([topic, f"{topic}-partition-0"], first, 40) for first in range(0, 400, 40))
        assert sink.decide(link, [written]) == 400
        with blocking.connect(broker.service_url) as client:
            assert seen(client, topic, "persistent") == Counter(b"%d" % each for each in range(400))


def seen(client: blocking.Client, topic: str, kind: str) -> Counter[bytes]:
    found: Counter[bytes] = Counter()
    open_one = client.consumer if kind == "persistent" else client.queue_consumer
    with open_one(topic, "check", initial="earliest") as consumer:
        try:
            while True:
                found[consumer.receive(0.3).payload] += 1
        except DeadlineExceeded:
            return found
