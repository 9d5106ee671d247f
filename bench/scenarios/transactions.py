"""Transactions: how long a commit takes and when its messages can be read, what a transaction costs each message, and whether a
long history of finished transactions makes a take-over slower.

Latency and throughput are measured on a broker process from outside, over the raw protocol. For take-overs two brokers run in
this process, because one of them is to be killed without the other; its session is over at once, so that only the work counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import statistics
import time
from collections.abc import AsyncIterator, Iterator

import msgspec
from bench.broker_process import Process, cpu_seconds, fresh_dir, start_broker
from bench.report import Figure
from bench.scenarios.bench_run import Run

from braid.model.names import TopicName
from braid.model.txn import TxnId
from braid.testing.broker import InProcessBroker
from braid.testing.raw_client import RawClient, entry
from braid.txn.records import AbortedTxn, State, TxnHeader, position_text
from braid.txn.store import TransactionStore
from braid.web.config import StandaloneConfig
from braid.wire import requests, txn_requests
from braid.wire.client import Bulk, Delivery
from braid.wire.commands import Command
from braid.wire.types import CommandType, LookupResult, TxnAction

COMMIT_GROUP = "Transactions: commit with one message on each of so many segments"
COST_GROUP = "Transactions: messages of 100 B, 1,000 on their way, on one topic"
HISTORY_GROUP = "Transactions: take-over with a history of finished ones"
TOPIC = "persistent://public/default/"
HISTORY_TOPIC = TOPIC + "history"
COMMIT_TARGET_MS = 5.7
"""What Pulsar 5.0.0-M1 takes with one participant; it takes 28 ms with ten and 118 ms with a hundred."""
VISIBLE_TARGET_MS = 200.0
RATIO_TARGET = 1.5
PAYLOAD = b"x" * 100
WINDOW = 1000
QUIET_SECONDS = 0.02
"""Before each commit, so that nothing of the one before is under way."""
PER_TRANSACTION = 1000
TTL_MS = 600_000


def measure(run: Run) -> None:
    with start_broker(fresh_dir("transactions")).wait_ready() as broker:
        for participants in (1, 10, 100) if run.is_quick else (1, 10, 100, 1000):
            run.add(asyncio.run(_commits(broker, participants, run)))
        run.add(asyncio.run(_costs(broker, 10_000 if run.is_quick else 50_000, run)))
    run.add(asyncio.run(_histories(run)))


# Commits.


async def _commits(broker: Process, participants: int, run: Run) -> list[Figure]:
    rounds = {1: 200, 10: 200, 100: 100, 1000: 20}[participants]
    commits: list[float] = []
    visible: list[float] = []
    async with _connected(broker) as client:
        topics = [f"{TOPIC}commits-{participants}-{number}" for number in range(participants)]
        for number, topic in enumerate(topics):
            await client.producer(topic, number)
            await client.subscribe(topic, "s", consumer_id=number, permits=10 * rounds)
        for round_number in range(-5, rounds):  # the first ones warm up
            run.progress(f"{participants} participants: commit {round_number + 1} of {rounds}")
            txn = await _begin(client, round_number % 16)
            client.send(*(_send(number, round_number + 5, txn) for number in range(participants)))
            await _receipts(client, participants)
            client.inbox.clear()
            await asyncio.sleep(QUIET_SECONDS)
            began = time.perf_counter()
            await _end(client, txn, TxnAction.COMMIT)
            decided = time.perf_counter()
            await client.messages(participants)
            if round_number >= 0:
                commits.append((decided - began) * 1000)
                visible.append((time.perf_counter() - began) * 1000)
    label = f"{participants} segment{'s' if participants > 1 else ''}"
    note = f"{rounds} commits"
    return [
        *_percentiles(f"{label}: commit", commits, COMMIT_TARGET_MS, note),
        *_percentiles(f"{label}: commit to the last message read", visible, VISIBLE_TARGET_MS, note),
    ]


def _percentiles(name: str, values: list[float], target: float, note: str) -> list[Figure]:
    found = sorted(values)
    return [
        Figure(
            group=COMMIT_GROUP,
            name=f"{name}, p{percent}",
            value=found[min(int(len(found) * percent / 100), len(found) - 1)],
            unit="ms",
            low=found[0],
            high=found[-1],
            target=target,
            note=note,
        )
        for percent in (50, 99)
    ]


# What a transaction costs each message.


class Spent(msgspec.Struct, frozen=True):
    """What some messages cost."""

    us: float
    """CPU microseconds of the broker per message."""
    rate: float
    """Messages a second."""


class Publishing:
    """A producer of small messages, by transactions or without, that reads the broker's CPU time."""

    def __init__(self, broker: Process, client: RawClient) -> None:
        self._broker = broker
        self._client = client
        self._sequence = 0

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, broker: Process, topic: str) -> AsyncIterator[Publishing]:
        async with _connected(broker) as client:
            await client.producer(topic, 1)
            yield cls(broker, client)

    async def spend(self, count: int, partition: int | None) -> Spent:
        """Send `count` messages: in transactions of this coordinator partition, or in none."""
        before, began = cpu_seconds(self._broker.pid), time.perf_counter()
        for _ in range(count // PER_TRANSACTION):
            txn = None if partition is None else await _begin(self._client, partition)
            for _ in range(PER_TRANSACTION // WINDOW):
                self._client.send(*(_send(1, self._sequence + number, txn) for number in range(WINDOW)))
                self._sequence += WINDOW
                await _receipts(self._client, WINDOW)
            if txn is not None:
                await _end(self._client, txn, TxnAction.COMMIT)
        seconds = time.perf_counter() - began
        return Spent((cpu_seconds(self._broker.pid) - before) / count * 1e6, count / seconds)


async def _costs(broker: Process, count: int, run: Run) -> list[Figure]:
    spent: dict[str, list[Spent]] = {"plain": [], "in transactions": []}
    async with Publishing.open(broker, TOPIC + "costs") as publishing:
        for turn in range(3):
            for kind, found in spent.items():
                run.progress(f"{kind}: {count} messages, turn {turn + 1} of 3")
                found.append(await publishing.spend(count, None if kind == "plain" else turn))
    cpu = {kind: [each.us for each in found] for kind, found in spent.items()}
    rates = {kind: [each.rate for each in found] for kind, found in spent.items()}
    figures = [
        Figure(
            group=COST_GROUP,
            name=f"{kind}: CPU of the broker per message",
            value=statistics.median(cpu[kind]),
            unit="us",
            low=min(cpu[kind]),
            high=max(cpu[kind]),
            note=f"{statistics.median(rates[kind]):.0f} messages a second"
            + ("" if kind == "plain" else f", {PER_TRANSACTION} each"),
        )
        for kind in rates
    ]
    plain, within = (statistics.median(cpu[kind]) for kind in rates)
    figures.append(Figure(group=COST_GROUP, name="in transactions against plain", value=within / plain, unit="times"))
    return figures


# Histories.


async def _histories(run: Run) -> list[Figure]:
    """Two clusters that differ in the number of finished transactions only, measured in turn; the aborted ones retained in the
    segment are the same. The least of some tries counts, for the rest is other people's noise."""
    small, large, aborted = (1_000, 10_000, 1_000) if run.is_quick else (1_000, 100_000, 10_000)
    opens, take_overs = (5, 2) if run.is_quick else (9, 4)
    async with contextlib.AsyncExitStack() as stack:
        histories = [await stack.enter_async_context(_history(finished, aborted, run)) for finished in (small, large)]
        gc.collect()
        gc.freeze()  # as a broker's own process does: a long history must not be walked by the collector
        try:
            for number in range(opens):
                run.progress(f"open {number + 1} of {opens}")
                for history in histories:
                    await history.open()
            for number in range(take_overs):
                run.progress(f"take-over {number + 1} of {take_overs}")
                for history in histories:
                    await history.take_over(number)
        finally:
            gc.unfreeze()
    figures = []
    for what in histories[0].times:
        least = []
        for history in histories:
            values = history.times[what]
            least.append(min(values))
            figures.append(
                Figure(
                    group=HISTORY_GROUP,
                    name=f"{what}, {history.finished} finished",
                    value=min(values),
                    unit="ms",
                    low=min(values),
                    high=max(values),
                    note=f"{aborted} aborted ones retained in the segment",
                )
            )
        name = f"{what}: {large} against {small}"
        figures.append(Figure(group=HISTORY_GROUP, name=name, value=least[1] / least[0], unit="times", target=RATIO_TARGET))
    return figures


class History:
    """Two brokers with so many finished transactions."""

    def __init__(self, cluster: InProcessBroker, finished: int) -> None:
        self.finished = finished
        self.times: dict[str, list[float]] = {
            "segment opened": [],
            "take-over of a segment": [],
            "first transaction of a coordinator after it": [],
        }
        self._cluster = cluster

    async def open(self) -> None:
        service = self._cluster.nodes[0].service
        await service.unload(service.topics[HISTORY_TOPIC])
        with self._timed("segment opened"):
            await service.topic(TopicName.parse(HISTORY_TOPIC), create=False)

    async def take_over(self, number: int) -> None:
        """Broker `number` has the topic and is killed; the next one takes it."""
        cluster = self._cluster
        await cluster.kill(number)
        client = await RawClient.connect(cluster.nodes[number + 1].service_url, answers_pings=True)
        while _is_owned(cluster):  # noqa: ASYNC110 - until the session of the dead one is over
            await asyncio.sleep(0.005)
        with self._timed("take-over of a segment"):
            await _take(client, HISTORY_TOPIC)
            await client.producer(HISTORY_TOPIC, 1)
        for coordinator in range(16):
            with self._timed("first transaction of a coordinator after it"):
                await _end(client, await _begin(client, coordinator), TxnAction.COMMIT)
        client.close()
        await cluster.add_broker()

    @contextlib.contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.times[what].append((time.perf_counter() - began) * 1000)


@contextlib.asynccontextmanager
async def _history(finished: int, aborted: int, run: Run) -> AsyncIterator[History]:
    config = StandaloneConfig()
    config = msgspec.structs.replace(
        config,
        broker=msgspec.structs.replace(config.broker, default_bundles=1, balance=False),
        storage=msgspec.structs.replace(config.storage, session_timeout_seconds=3.0),
        transactions=msgspec.structs.replace(config.transactions, retention_seconds=86_400),
    )
    async with InProcessBroker(config=config, brokers=2, with_http=False) as cluster:
        owner = await RawClient.connect(cluster.nodes[0].service_url, answers_pings=True)
        await _take(owner, HISTORY_TOPIC)
        await owner.producer(HISTORY_TOPIC, 1)
        await owner.store(PAYLOAD, 0)
        await _fill(cluster, HISTORY_TOPIC, finished, aborted, run)
        yield History(cluster, finished)
        owner.close()


async def _fill(cluster: InProcessBroker, topic: str, finished: int, aborted: int, run: Run) -> None:
    """The records that so many finished transactions leave; those of the latest are not collected yet."""
    service = cluster.nodes[0].service
    store = service.transactions.store
    log = service.topics[topic].log
    record = AbortedTxn(last=position_text(log.last_position), incarnation=log.incarnation)
    for start in range(0, max(finished, aborted), 1000):
        run.progress(f"{start} of {finished} transactions")
        numbers = range(start, start + 1000)
        await asyncio.gather(
            *(_header(store, number, is_committed=number >= aborted) for number in numbers if number < finished)
        )
        await asyncio.gather(*(store.put_aborted(topic, _root(number), record) for number in numbers if number < aborted))


async def _header(store: TransactionStore, number: int, *, is_committed: bool) -> None:
    now = time.time_ns() // 1_000_000
    state: State = "COMMITTED" if is_committed else "ABORTED"
    await store.create_header(_root(number), TxnHeader(state=state, timeout_ms=now, created_ms=now, finalized_ms=now))


def _root(number: int) -> TxnId:
    return TxnId.of(number % 16, 10_000_000 + number)


def _is_owned(cluster: InProcessBroker) -> bool:
    rows = cluster.standalone.metadata.tables.rows
    return any(key.startswith("/namespace/public/default/0x") for key in rows)


async def _take(client: RawClient, topic: str) -> None:
    """Let this client's broker have the topic."""
    while True:
        request = client.next_request()
        client.send(requests.lookup(request, topic, authoritative=True))
        if (await client.answer(request)).response == LookupResult.CONNECT:
            return
        await asyncio.sleep(0.001)


# The raw protocol.


@contextlib.asynccontextmanager
async def _connected(broker: Process) -> AsyncIterator[RawClient]:
    client = await RawClient.connect(f"pulsar://127.0.0.1:{broker.port}", answers_pings=True)
    try:
        yield client
    finally:
        client.close()


async def _begin(client: RawClient, coordinator: int) -> TxnId:
    request = client.next_request()
    client.send(txn_requests.new(request, coordinator, TTL_MS))
    reply = await client.answer(request)
    if reply.HasField("error"):
        raise RuntimeError(f"A transaction could not be begun: {reply.message}")
    return TxnId(reply.txnid_most_bits, reply.txnid_least_bits)


async def _end(client: RawClient, txn: TxnId, action: TxnAction) -> None:
    request = client.next_request()
    client.send(txn_requests.end(request, txn, action))
    reply = await client.answer(request)
    if reply.HasField("error"):
        raise RuntimeError(f"The transaction {txn} could not be ended: {reply.message}")


def _send(producer_id: int, sequence_id: int, txn: TxnId | None) -> bytes:
    made = entry(PAYLOAD, sequence_id, producer_name=f"bench-{producer_id}")
    return requests.send(producer_id, sequence_id, made, txn=txn)


async def _receipts(client: RawClient, count: int) -> None:
    """Wait for so many receipts; other frames stay."""
    for _ in range(count):
        answer = await client.take(_is_answer, "a receipt")
        if answer.type != CommandType.SEND_RECEIPT:
            raise RuntimeError(f"A message was refused: {answer.body}")


def _is_answer(event: Command | Delivery | Bulk) -> bool:
    return isinstance(event, Command) and event.type in (CommandType.SEND_RECEIPT, CommandType.SEND_ERROR)
