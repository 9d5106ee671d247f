"""The writers that Spark is given, against a real broker and without Spark: what they carry to tasks, commit and abort."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterator

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.types import StringType, StructType

from braid.client import blocking
from braid.errors import ConfigError, DeadlineExceeded, InvalidTransactionStatus, NotAllowed
from braid.testing.broker import BackgroundBroker
from braid_spark import stream_writer, writer
from braid_spark.options import parse
from braid_spark.sink import Identity, SinkError, Written
from braid_spark.stream_writer import make_stream_writer
from braid_spark.writer import BraidWriter, make_writer

SCHEMA = StructType().add("value", StringType())
TOPIC = "persistent://public/default/writers"


@pytest.fixture
def broker() -> Iterator[BackgroundBroker]:
    with BackgroundBroker() as started, blocking.connect(started.service_url) as client:
        client.consumer(TOPIC, "check", initial="earliest").close()
        yield started


def job(broker: BackgroundBroker, **options: str) -> BraidWriter:
    """As Spark hands it to tasks: a copy."""
    given = {"service.url": broker.service_url, "topic": TOPIC, **options}
    made: BraidWriter = pickle.loads(pickle.dumps(make_writer(parse(given), SCHEMA, False)))
    return made


def rows(*values: str) -> Iterator[pa.RecordBatch]:
    return iter([pa.record_batch({"value": list(values)})])


def sent(message: WriterCommitMessage) -> WriterCommitMessage:
    """As it reaches the driver."""
    arrived: WriterCommitMessage = pickle.loads(pickle.dumps(message))
    return arrived


def seen(broker: BackgroundBroker, topic: str = TOPIC) -> Counter[bytes]:
    found: Counter[bytes] = Counter()
    with blocking.connect(broker.service_url) as client, client.consumer(topic, "check", initial="earliest") as consumer:
        try:
            while True:
                found[consumer.receive(0.5).payload] += 1
        except DeadlineExceeded:
            return found


def open_transactions(broker: BackgroundBroker) -> int:
    with blocking.AdminClient(broker.http_url) as admin:
        return len(admin.transactions.list())


def test_a_job_counts_as_a_whole(broker: BackgroundBroker) -> None:
    made = job(broker)
    messages = [sent(made.write(rows("a"))), sent(made.write(rows("b"))), sent(made.write(iter([])))]
    made.commit([*messages])
    assert seen(broker) == Counter([b"a", b"b"])
    assert open_transactions(broker) == 0


def test_a_job_that_failed_leaves_nothing_open(broker: BackgroundBroker) -> None:
    made = job(broker)
    message = sent(made.write(rows("a")))
    made.abort([message, None])
    assert open_transactions(broker) == 0
    with pytest.raises(InvalidTransactionStatus):
        made.commit([message])
    assert seen(broker) == Counter()


def test_a_job_whose_tasks_said_nothing_leaves_nothing_open(broker: BackgroundBroker) -> None:
    made = job(broker)
    made.write(rows("a"))
    made.abort([None])
    assert open_transactions(broker) == 0


def test_a_job_without_rows_leaves_nothing_open(broker: BackgroundBroker) -> None:
    made = job(broker)
    made.commit([sent(made.write(iter([])))])
    assert open_transactions(broker) == 0


def test_inside_for_each_batch_the_query_names_the_batch(broker: BackgroundBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    for run in ("run-1", "run-2"):
        monkeypatch.setattr(writer, "query_of", lambda _task, run=run: ("query", 7, run))
        made = job(broker)
        message = sent(made.write(rows("a")))
        assert isinstance(message, Written)
        assert message.identity == Identity(f"query/{TOPIC}", 7, run)
        made.commit([message])
    assert seen(broker) == Counter([b"a"])
    assert open_transactions(broker) == 0


def test_a_second_write_inside_for_each_batch_is_not_left_out_silently(
    broker: BackgroundBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "query_of", lambda _task: ("query", 7, "run-1"))
    first = job(broker)
    first.commit([sent(first.write(rows("a")))])
    with pytest.raises(SinkError, match="its own txnAppId"):
        job(broker).write(rows("b"))
    named = job(broker, txnAppId="query/second", txnVersion="7")
    named.commit([sent(named.write(rows("b")))])
    assert seen(broker) == Counter([b"a", b"b"])


def test_nor_is_it_when_the_query_was_started_again(broker: BackgroundBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first write is skipped, as the batch has it; the second one is another job of the same run."""
    for run in ("run-1", "run-2", "run-3"):
        monkeypatch.setattr(writer, "query_of", lambda _task, run=run: ("query", 7, run))
        first = job(broker)
        first.commit([sent(first.write(rows("a"))), sent(first.write(rows("b")))])
        with pytest.raises(SinkError, match="its own txnAppId"):
            job(broker).write(rows("c"))
    assert seen(broker) == Counter([b"a", b"b"])
    assert open_transactions(broker) == 0


def test_one_name_and_number_for_two_topics_leaves_out_neither(broker: BackgroundBroker) -> None:
    other = f"{TOPIC}-other"
    for topic in (TOPIC, other, other):
        named = job(broker, topic=topic, txnAppId="app", txnVersion="7")
        named.commit([sent(named.write(rows("a")))])
    assert seen(broker) == Counter([b"a"])
    assert seen(broker, other) == Counter([b"a"])


def test_a_stream_needs_to_know_its_batch(broker: BackgroundBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    options = parse({"service.url": broker.service_url, "topic": TOPIC})
    with pytest.raises(SinkError, match="did not tell the task which query"):
        make_stream_writer(options, SCHEMA, False).write(rows("a"))
    monkeypatch.setattr(stream_writer, "query_of", lambda _task: ("query", 3, "run-1"))
    message = sent(make_stream_writer(options, SCHEMA, False).write(rows("a")))
    with pytest.raises(SinkError, match="batch 3 answered when batch 4"):
        make_stream_writer(options, SCHEMA, False).commit([message], 4)
    make_stream_writer(options, SCHEMA, False).commit([message], 3)
    make_stream_writer(options, SCHEMA, False).abort([message, None], 3)
    assert seen(broker) == Counter([b"a"])


class Query:
    """A streaming query, batch by batch; inside `foreachBatch` or not."""

    def __init__(self, broker: BackgroundBroker, monkeypatch: pytest.MonkeyPatch, *, is_for_each_batch: bool) -> None:
        self.broker, self.monkeypatch, self.is_for_each_batch = broker, monkeypatch, is_for_each_batch

    def write(self, query: str, batch: int, run: str, value: str, **options: str) -> Written:
        for each in (writer, stream_writer):
            self.monkeypatch.setattr(each, "query_of", lambda _task: (query, batch, run))
        if self.is_for_each_batch:
            made = job(self.broker, **options)
            message = sent(made.write(rows(value)))
            made.commit([message])
        else:
            given = parse({"service.url": self.broker.service_url, "topic": TOPIC, **options})
            message = sent(make_stream_writer(given, SCHEMA, False).write(rows(value)))
            make_stream_writer(given, SCHEMA, False).commit([message], batch)
        assert isinstance(message, Written)
        return message


@pytest.mark.parametrize("is_for_each_batch", [False, True])
def test_a_checkpoint_older_than_the_output_is_told(
    broker: BackgroundBroker, monkeypatch: pytest.MonkeyPatch, is_for_each_batch: bool
) -> None:
    """Spark does only the newest batch again. One before it has other rows than the one of that number had: what came since."""
    query = Query(broker, monkeypatch, is_for_each_batch=is_for_each_batch)
    for batch in range(3):
        query.write("query", batch, "run-1", f"{batch}")
    assert query.write("query", 2, "run-2", "2").is_duplicate
    with pytest.raises(SinkError, match=r"Batch 1 .*output has batch 2 .*checkpoint .*sinkId"):
        query.write("query", 1, "run-3", "1 and all that came since")
    query.write("query", 3, "run-4", "3")
    assert seen(broker) == Counter([b"0", b"1", b"2", b"3"])


@pytest.mark.parametrize("is_for_each_batch", [False, True])
def test_one_name_for_the_sinks_of_two_queries_is_told(
    broker: BackgroundBroker, monkeypatch: pytest.MonkeyPatch, is_for_each_batch: bool
) -> None:
    query = Query(broker, monkeypatch, is_for_each_batch=is_for_each_batch)
    query.write("query-1", 0, "run-1", "a", sinkId="etl")
    assert query.write("query-1", 0, "run-2", "a", sinkId="etl").is_duplicate
    with pytest.raises(SinkError, match=r"Batch 0 .*sink etl .*another query.*sinkId"):
        query.write("query-2", 0, "run-3", "b", sinkId="etl")
    assert seen(broker) == Counter([b"a"])


def test_what_cannot_be_is_said_before_anything_is_asked() -> None:
    url = {"service.url": "pulsar://127.0.0.1:1", "topic": TOPIC}
    with pytest.raises(NotAllowed, match="cannot be overwritten"):
        make_writer(parse(url), SCHEMA, True)
    with pytest.raises(ConfigError, match="txnAppId and txnVersion belong together"):
        make_writer(parse({**url, "txnAppId": "a"}), SCHEMA, False)
    with pytest.raises(NotAllowed, match="asyncProgressTrackingEnabled"):
        make_stream_writer(parse({**url, "asyncProgressTrackingEnabled": "true"}), SCHEMA, False)
    with pytest.raises(NotAllowed, match="for batch writes"):
        make_stream_writer(parse({**url, "txnAppId": "a", "txnVersion": "1"}), SCHEMA, False)


class _Task:
    """What a task is told by Spark."""

    def __init__(self, group: str) -> None:
        self._told = {writer.QUERY_ID: "query", writer.BATCH_ID: "7", writer.RUN_ID: group}

    def getLocalProperty(self, name: str) -> str | None:
        return self._told.get(name)


def test_a_job_group_of_the_users_is_not_taken_for_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be the same after a restart, and a batch that was aborted once could never be written."""
    run = "0d8f7bd6-6b1c-4a35-9c0c-0a3a4d5f7c11"
    assert writer.query_of(_Task(run)) == ("query", 7, run)  # type: ignore[arg-type]
    monkeypatch.setattr(TaskContext, "get", classmethod(lambda _cls: _Task("nightly")))
    given = {"service.url": "pulsar://127.0.0.1:1", "topic": TOPIC}
    with pytest.raises(SinkError, match=r"'nightly'.*setJobGroup.*txnAppId.*txnVersion"):
        make_writer(parse(given), SCHEMA, False).write(rows("a"))
    named = make_writer(parse({**given, "txnAppId": "app", "txnVersion": "7"}), SCHEMA, False)
    assert named._attempt() is not None
