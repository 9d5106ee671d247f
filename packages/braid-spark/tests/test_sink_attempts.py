"""The sink protocol against a real broker, without Spark: attempts that are repeated, overtaken, late or from a dead run, and a
driver that dies or misses an answer at any step. What a consumer sees is each row once.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator

import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, StringType, StructType

from braid.client import blocking
from braid.errors import BraidError, DeadlineExceeded, InvalidTransactionStatus, SinkFenced
from braid.testing.broker import BackgroundBroker
from braid.txn.config import TransactionConfig
from braid.web.config import StandaloneConfig
from braid_spark import sink
from braid_spark.connections import Link
from braid_spark.options import Options, parse
from braid_spark.outgoing import Outgoing
from braid_spark.sink import Attempt, ExactlyOnceAttempt, Identity, SinkError, Written

SCHEMA = StructType().add("value", BinaryType()).add("__key", StringType())
numbers = itertools.count()


@pytest.fixture(scope="module")
def broker() -> Iterator[BackgroundBroker]:
    with BackgroundBroker() as started:
        yield started


@pytest.fixture(scope="module")
def link(broker: BackgroundBroker) -> Iterator[Link]:
    with Link(broker.service_url) as made:
        yield made


class Job:
    """A query that writes to a topic of its own: attempts, decisions, and what consumers see."""

    def __init__(self, link: Link, broker: BackgroundBroker, **options: str) -> None:
        name = f"sink-{next(numbers)}"
        self.link = link
        self.broker = broker
        self.topic = f"persistent://public/default/{name}"
        self.sink = f"query-{name}/{self.topic}"
        self.options: Options = parse({"service.url": broker.service_url, "topic": self.topic, **options})
        with blocking.connect(broker.service_url) as client:
            client.consumer(self.topic, "check", initial="earliest").close()

    def attempt(self, batch: int, run: str = "run-1") -> ExactlyOnceAttempt:
        outgoing = Outgoing(SCHEMA, self.topic)
        return ExactlyOnceAttempt(self.link, outgoing, self.options, Identity(self.sink, batch, run))

    def decide(self, *messages: Written | None) -> int:
        return sink.decide(self.link, messages)

    def give_up(self, *messages: Written | None) -> None:
        sink.give_up(self.link, sink.txns_of(messages))

    def seen(self) -> Counter[bytes]:
        """Everything a consumer is given; ends when nothing more comes."""
        found: Counter[bytes] = Counter()
        with blocking.connect(self.broker.service_url) as client, client.consumer(self.topic, "check") as consumer:
            try:
                while True:
                    found[consumer.receive(0.5).payload] += 1
            except DeadlineExceeded:
                return found

    def open_transactions(self) -> int:
        with blocking.AdminClient(self.broker.http_url) as admin:
            return sum(any(w.topic == self.topic for w in each.writes) for each in admin.transactions.list())


@pytest.fixture
def job(link: Link, broker: BackgroundBroker) -> Job:
    return Job(link, broker)


def rows(first: int, count: int = 20, batch: int = 0) -> pa.RecordBatch:
    values = [b"%d-%d" % (batch, number) for number in range(first, first + count)]
    return pa.record_batch({"value": pa.array(values, pa.binary()), "__key": [str(n % 5) for n in range(first, first + count)]})


def expected(count: int, batch: int = 0) -> Counter[bytes]:
    return Counter(b"%d-%d" % (batch, number) for number in range(count))


def halfway(attempt: ExactlyOnceAttempt, batch: pa.RecordBatch) -> None:
    """Publish this much and no more, as an attempt does that dies."""
    assert attempt.begin()
    attempt.publish(batch)
    attempt.drain()


def test_rows_are_seen_when_the_driver_has_decided(job: Job) -> None:
    messages = [job.attempt(0).write(iter([rows(0)])), job.attempt(0).write(iter([rows(20)]))]
    assert job.seen() == Counter()
    assert job.decide(*messages) == 40
    assert job.seen() == expected(40)


def test_a_retried_attempt_leaves_nothing_behind(job: Job) -> None:
    halfway(job.attempt(0), rows(0, 13))
    job.decide(job.attempt(0).write(iter([rows(0)])))
    assert job.seen() == expected(20)
    assert job.open_transactions() == 0


def test_an_overtaken_attempt_that_finished_is_not_seen(job: Job) -> None:
    slow, quick = job.attempt(0), job.attempt(0)
    halfway(slow, rows(0, 10))
    message = quick.write(iter([rows(0)]))
    slow.publish(rows(10, 10))
    slow.finish()
    job.decide(message)
    assert job.seen() == expected(20)


def test_an_attempt_that_goes_on_after_the_decision_is_refused(job: Job) -> None:
    slow = job.attempt(0)
    halfway(slow, rows(0, 10))
    job.decide(job.attempt(0).write(iter([rows(0)])))
    with pytest.raises(BraidError):
        slow.publish(rows(10, 10))
        slow.finish()
    slow.close()
    assert job.seen() == expected(20)


def test_an_attempt_that_begins_after_the_decision_writes_nothing(job: Job) -> None:
    job.decide(job.attempt(0).write(iter([rows(0)])))
    late = job.attempt(0).write(iter([rows(0), rows(20)]))
    assert late.is_duplicate
    assert late.txn is None
    assert job.seen() == expected(20)


def test_a_driver_that_died_before_the_decision_is_replaced(job: Job) -> None:
    job.attempt(0).write(iter([rows(0)]))
    job.decide(job.attempt(0, "run-2").write(iter([rows(0)])))
    assert job.seen() == expected(20)
    assert job.open_transactions() == 0


def test_a_driver_that_died_after_the_decision_is_not_repeated(job: Job) -> None:
    job.decide(job.attempt(0).write(iter([rows(0)])))
    again = job.attempt(0, "run-2").write(iter([rows(0)]))
    assert again.is_duplicate
    assert job.decide(again) == 0
    job.decide(job.attempt(1, "run-2").write(iter([rows(0, batch=1)])))
    assert job.seen() == expected(20) + expected(20, batch=1)


def test_a_lost_answer_to_the_decision_is_followed_by_an_abort_that_changes_nothing(job: Job) -> None:
    message = job.attempt(0).write(iter([rows(0)]))
    job.decide(message)
    job.give_up(message, None)
    assert job.seen() == expected(20)


def test_a_decision_that_is_asked_for_twice_is_made_once(job: Job) -> None:
    message = job.attempt(0).write(iter([rows(0)]))
    job.decide(message)
    job.decide(message)
    assert job.seen() == expected(20)


def test_an_old_run_cannot_decide_what_a_new_one_has_taken_over(job: Job) -> None:
    old = job.attempt(0, "run-1").write(iter([rows(0)]))
    new = job.attempt(0, "run-2").write(iter([rows(0)]))
    with pytest.raises(SinkFenced):
        job.decide(old)
    with pytest.raises(SinkFenced):
        job.attempt(0, "run-1").write(iter([rows(0)]))
    job.decide(new)
    assert job.decide(old) == 0  # the batch is there, whoever wrote it
    assert job.seen() == expected(20)


def test_a_failed_batch_is_undone_at_once(job: Job) -> None:
    message = job.attempt(0).write(iter([rows(0)]))
    job.give_up(message, None)
    assert job.open_transactions() == 0
    with pytest.raises(InvalidTransactionStatus):
        job.decide(message)
    assert job.seen() == Counter()


def test_a_task_without_rows_opens_nothing_and_an_empty_batch_decides_nothing(job: Job) -> None:
    message = job.attempt(0).write(iter([rows(0, 0)]))
    assert message.txn is None
    assert job.decide(message) == 0
    with blocking.connect(job.broker.service_url) as client:
        assert client.sink(job.sink) is None


def test_a_task_that_said_nothing_is_an_error(job: Job) -> None:
    with pytest.raises(SinkError, match="has not said what it wrote"):
        job.decide(job.attempt(0).write(iter([rows(0)])), None)


def test_tasks_under_different_transactions_are_an_error(job: Job) -> None:
    first = job.attempt(0).write(iter([rows(0)]))
    second = job.attempt(0, "run-2").write(iter([rows(20)]))
    with pytest.raises(SinkError, match="several transactions"):
        job.decide(first, second)
    assert job.seen() == Counter()


def test_at_end_nothing_is_begun_before_the_last_row(link: Link, broker: BackgroundBroker) -> None:
    job = Job(link, broker, publish="atEnd")
    attempt = job.attempt(0)

    def batches() -> Iterator[pa.RecordBatch]:
        for first in (0, 20, 40):
            assert attempt.sub() is None
            yield rows(first)

    job.decide(attempt.write(batches()))
    assert job.seen() == expected(60)


def test_at_end_a_full_buffer_is_published(link: Link, broker: BackgroundBroker) -> None:
    job = Job(link, broker, publish="atEnd", publishBufferBytes="1")
    attempt = job.attempt(0)
    begun = []

    def batches() -> Iterator[pa.RecordBatch]:
        for first in (0, 20, 40):
            begun.append(attempt.sub() is not None)
            yield rows(first)

    job.decide(attempt.write(batches()))
    assert begun == [False, True, True]
    assert job.seen() == expected(60)


def test_a_task_that_computes_for_long_keeps_what_others_wrote() -> None:
    """The transaction's time is over twice before the second task has its first row; the first one is done long ago."""
    sweeps = StandaloneConfig(transactions=TransactionConfig(timeout_sweep_seconds=0.05))
    with BackgroundBroker(config=sweeps) as broker, Link(broker.service_url) as link:
        job = Job(link, broker, transactionTimeout="1500ms")
        first = job.attempt(0).write(iter([rows(0)]))

        def computed() -> Iterator[pa.RecordBatch]:
            time.sleep(3.5)
            yield rows(20)

        assert job.decide(first, job.attempt(0).write(computed())) == 40
        assert job.seen() == expected(40)


def test_at_least_once_is_there_at_once(link: Link, broker: BackgroundBroker) -> None:
    job = Job(link, broker, semantics="at-least-once")
    message = Attempt(link, Outgoing(SCHEMA, job.topic), job.options).write(iter([rows(0)]))
    assert message.rows == 20
    assert job.seen() == expected(20)
    assert job.decide(message) == 0


def test_what_cannot_be_published_fails_the_attempt(link: Link, broker: BackgroundBroker) -> None:
    job = Job(link, broker)
    outgoing = Outgoing(SCHEMA, "topic://nobody/nowhere/t")
    attempt = ExactlyOnceAttempt(link, outgoing, job.options, Identity(job.sink, 0, "run-1"))
    with pytest.raises(BraidError):
        attempt.write(iter([rows(0)]))
