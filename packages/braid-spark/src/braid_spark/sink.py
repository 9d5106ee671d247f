"""The sink protocol: what a task attempt does to publish its rows, and what the driver does to make them count.

One *decider* transaction stands for a micro-batch (or a batch job) in one run; every task attempt publishes under a
sub-transaction of its own, and the driver names the attempts that count in one compare-and-swap. An attempt that nobody names,
because it was retried, overtaken or its driver died, is never seen. Owns the order of these steps. Must not know Spark's plans
or how rows become messages.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage

from braid.client.deciders import Decider, SubTransaction
from braid.errors import BraidError, InvalidTransactionStatus, SinkFenced
from braid_spark.connections import Link, patiently
from braid_spark.open_producers import OpenProducers
from braid_spark.options import Options
from braid_spark.outgoing import Outgoing, producer_options

log = logging.getLogger(__name__)
RETIRE_SECONDS = 60.0
"""The deadline of a transaction that is begun to be aborted."""


class SinkError(BraidError):
    """The output of a batch cannot be made to count; the batch must be done again."""


@dataclass(frozen=True)
class Identity:
    """Which batch of which output this is, and who writes it."""

    sink: str
    """Stays the same when the query is started again."""
    batch: int
    run: str
    """Another one each time the query is started. Of a sink that the user named, `QUERY/RUN`: two queries may have got one
    name."""


@dataclass(frozen=True)
class Written(WriterCommitMessage):
    """What a task attempt tells the driver."""

    identity: Identity | None = None
    txn: str | None = None
    """The decider under which it published; None if it published nothing."""
    sub: int = 0
    """Its own sub-transaction."""
    rows: int = 0
    size: int = 0
    is_duplicate: bool = False
    """Nothing was published, because the batch is in the output already."""


class Attempt:
    """One task attempt. `write` does everything; its steps are methods of their own so that a test can stop between them."""

    def __init__(self, link: Link, outgoing: Outgoing, options: Options) -> None:
        self._link = link
        self._outgoing = outgoing
        self._buffer_bytes = options.publish_buffer_bytes if options.publish == "atEnd" else 0
        self._producers = OpenProducers(link, producer_options(options), self.producer_name)
        self.rows = 0
        self.size = 0

    # What differs by guarantee.

    def begin(self) -> bool:
        """Before the first row is published. False: the rows are in the output already."""
        return True

    def sub(self) -> SubTransaction | None:
        """What rows are published under."""
        return None

    def producer_name(self) -> str | None:
        return None

    def finish(self) -> Written:
        """All rows are handed over: wait until each is stored, and say so."""
        self.drain()
        return Written(rows=self.rows, size=self.size)

    # What does not.

    def write(self, batches: Iterable[pa.RecordBatch]) -> Written:
        """Publish all rows; returns once every one of them is stored."""
        try:
            for batch in self._held_back(each for each in batches if each.num_rows):
                if not self.rows and not self.begin():
                    return self._skip(batches)
                self.publish(batch)
                self.rows += batch.num_rows
                self.size += batch.nbytes
            return self.finish()
        finally:
            self.close()

    def publish(self, batch: pa.RecordBatch) -> None:
        """Hand rows over to the producers of their topics; waits while too much is on its way."""
        for topic, block in self._outgoing.blocks(batch, self._producers.topics):
            self._producers.send(topic, block, self.sub())

    def drain(self) -> None:
        """Everything handed over is stored; raises the first reason why not."""
        self._producers.drain()

    def close(self) -> None:
        """End what the attempt opened. Never raises: what counts is known by now."""
        self._producers.close()

    def _held_back(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The same batches; with a buffer, not before they end or it is full. A transaction that is open while rows are still
        being computed holds up everybody who reads the topic."""
        held: list[pa.RecordBatch] = []
        size = 0
        if self._buffer_bytes:
            for batch in batches:
                held.append(batch)
                size += batch.nbytes
                if size > self._buffer_bytes:
                    break
        yield from held
        held.clear()
        yield from batches

    def _skip(self, batches: Iterable[pa.RecordBatch]) -> Written:
        for _batch in batches:
            pass  # Spark expects its rows to be taken
        return Written(is_duplicate=True)


class ExactlyOnceAttempt(Attempt):
    """One that counts only if the driver says so."""

    def __init__(self, link: Link, outgoing: Outgoing, options: Options, identity: Identity) -> None:
        super().__init__(link, outgoing, options)
        self._identity = identity
        self._seconds = options.transaction_timeout_ms / 1000
        self._decider: Decider | None = None
        self._sub: SubTransaction | None = None
        self._renewal: Renewal | None = None

    def write(self, batches: Iterable[pa.RecordBatch]) -> Written:
        self._renewal = Renewal(self._link, self._identity, self._seconds)
        return super().write(batches)

    def begin(self) -> bool:
        decider = self._begun()
        if decider is None:
            return False
        self._decider = decider
        if self._renewal is not None:
            self._renewal.begun(decider)
        self._sub = patiently(self._link, decider.sub)
        return True

    def _begun(self) -> Decider | None:
        client, identity = self._link.client, self._identity
        begun = patiently(
            self._link, lambda: client.begin_sink(identity.sink, identity.batch, identity.run, timeout=self._seconds)
        )
        if begun.is_duplicate:
            return None
        return begun.decider

    def sub(self) -> SubTransaction | None:
        return self._sub

    def producer_name(self) -> str | None:
        # Of this attempt alone: what it sends again after a lost connection is stored once.
        return None if self._sub is None else f"spark-{self._sub.id.most}-{self._sub.id.least}"

    def finish(self) -> Written:
        if self._sub is None or self._decider is None:
            return Written(identity=self._identity)
        self.drain()
        self._link.run(self._sub.finish)
        return Written(self._identity, str(self._decider.id), self._sub.number, self.rows, self.size)

    def _skip(self, batches: Iterable[pa.RecordBatch]) -> Written:
        super()._skip(batches)
        return Written(identity=self._identity, is_duplicate=True)

    def close(self) -> None:
        if self._renewal is not None:
            self._renewal.stop()
        super().close()


class Renewal:
    """Keeps the decider of a batch alive while a task of it runs. Also one that has no row yet: others may have written theirs
    and be done, and nobody else would tell that the batch goes on."""

    def __init__(self, link: Link, identity: Identity, seconds: float) -> None:
        self._link = link
        self._identity = identity
        self._seconds = seconds
        self._decider: Decider | None = None
        self._is_stopped = False
        self._changed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="braid-renewal", daemon=True)
        self._thread.start()

    def begun(self, decider: Decider) -> None:
        """It is this one; renew it at once, because others may have begun it long ago."""
        self._decider = decider
        self._changed.set()

    def stop(self) -> None:
        self._is_stopped = True
        self._changed.set()

    def _run(self) -> None:
        while True:
            self._changed.wait(self._seconds / 3)
            self._changed.clear()
            if self._is_stopped:
                return
            try:
                self._link.run(self._renew)
            except BraidError as error:
                # If it has ended, whatever is sent under it is refused, which says more.
                log.warning("batch %d of %s could not be renewed: %s", self._identity.batch, self._identity.sink, error)

    async def _renew(self) -> None:
        decider = self._decider
        if decider is None:
            identity, client = self._identity, self._link.client
            state = await client.sink(identity.sink)
            current = None if state is None else state.current
            if current is None or (current.batch, current.run) != (identity.batch, identity.run):
                return
            decider = client.join_decider(current.txn)
        await decider.renew(self._seconds)


def decide(link: Link, messages: Sequence[Written | None]) -> int:
    """On the driver: make what these attempts published count, once. Returns how many rows that were; raises if the batch must
    be done again."""
    if any(each is None for each in messages):
        raise SinkError("A task of the batch has not said what it wrote, so the batch cannot be committed.")
    written = [each for each in messages if each is not None and each.txn is not None]
    if not written:
        return 0
    first = written[0]
    if any((each.identity, each.txn) != (first.identity, first.txn) for each in written):
        raise SinkError(
            f"The tasks of a batch wrote under several transactions: {', '.join(sorted({str(each.txn) for each in written}))}."
        )
    winners = sorted(each.sub for each in written)
    client, identity, txn = link.client, first.identity, first.txn or ""
    if identity is None:
        raise SinkError(f"A task wrote under transaction {txn} and has not said for which sink.")
    answer = patiently(link, lambda: client.decide_batch(identity.sink, identity.batch, identity.run, txn, winners))
    if answer == "DUPLICATE":
        log.warning(
            "batch %d of sink %s was in the output already; what was written now is not seen", identity.batch, identity.sink
        )
        return 0
    return sum(each.rows for each in written)


def check_replay(link: Link, identity: Identity) -> None:
    """The output has this batch of a query already, or a later one: rightly if it is the last one there and the same query
    wrote it, because Spark does only its newest batch again. All else are other rows, which must not get lost without a word.
    Raises SinkError."""
    state = patiently(link, lambda: link.client.sink(identity.sink))
    if state is None or state.last != identity.batch:
        known = "a later one was begun" if state is None or state.last is None else f"the output has batch {state.last} already"
        raise SinkError(
            f"Batch {identity.batch} of the sink {identity.sink} is not written, because {known}: the query's checkpoint is "
            "older than its output, or another run of the query goes on elsewhere. Go on from the newest checkpoint and start "
            "one run at a time; to write everything behind this checkpoint again, give the sink a new sinkId."
        )
    writer, mine = (each.rpartition("/")[0] for each in (state.last_run or "", identity.run))
    if writer and writer != mine:
        raise SinkError(
            f"Batch {identity.batch} of the sink {identity.sink} is not written, because another query ({writer}) has written "
            "its own batch of that number there. Give every query a sinkId of its own, also one with a new checkpoint."
        )


def is_only(link: Link, identity: Identity) -> bool:
    """Note a batch without rows, which shows who comes here first; whether that is this run."""
    client, name, number, run = link.client, identity.sink, identity.batch, identity.run

    async def note() -> bool:
        begun = await client.begin_sink(name, number, run, timeout=RETIRE_SECONDS)
        if begun.decider is not None:
            await client.decide_batch(name, number, run, str(begun.decider.id), ())
        state = await client.sink(name)
        return state is not None and state.last_run == run

    return patiently(link, note)


def give_up(link: Link, txns: Iterable[str]) -> None:
    """On the driver: the batch failed. Undo what was published, unless it counts already: Spark says so too when only the
    answer to a commit was lost. Never raises; what stays open times out."""
    for txn in txns:
        try:
            link.run(functools.partial(link.client.abort_batch, txn))
        except Exception as error:  # noqa: BLE001 - an abort that raises hides why the batch failed
            log.warning("transaction %s could not be aborted, it times out: %s", txn, error)


def retire(link: Link, identity: Identity) -> None:
    """On the driver: the job has failed. End what was begun, unless it counts already, and let none of its tasks begin again:
    one that still runs would leave a transaction open that nobody ends before its deadline. Never raises."""
    client = link.client

    async def take_over() -> None:
        # As the job itself first, so that the sink knows its run when the next one takes its place.
        begun = None
        for run in (identity.run, f"{identity.run}-failed"):
            try:
                begun = await client.begin_sink(identity.sink, identity.batch, run, timeout=RETIRE_SECONDS)
            except (InvalidTransactionStatus, SinkFenced) as error:
                log.info("the batch is over: %s", error)
        if begun is not None and begun.decider is not None:
            await client.abort_batch(str(begun.decider.id))

    try:
        link.run(take_over)
    except Exception as error:  # noqa: BLE001 - as above
        log.warning("the sink %s could not be taken from the failed job, what it has open times out: %s", identity.sink, error)


def txns_of(messages: Sequence[Written | None]) -> list[str]:
    """The deciders that these messages name."""
    return sorted({each.txn for each in messages if each is not None and each.txn is not None})
