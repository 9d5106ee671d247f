"""The SDK beside the official Python client: the same broker, the same shape of calls, the same batching.

One at a time, on topics of their own. The official client is C++ behind a thin layer, and blocking; the shape of a row is what
the application does: wait for each answer, or send on and count answers as they come.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import threading
import time
from collections.abc import Iterator

import pulsar
from bench.broker_process import fresh_dir, start_broker
from bench.report import Figure
from bench.scenarios.bench_run import Run

import braid
from braid.client.config import ClientConfig

CLIENT_GROUP = "SDK and official Python client, same shape of calls, 100 B"
PAYLOAD = b"x" * 100
BATCH_MESSAGES = 1000
BATCH_BYTES = 128 << 10
BATCH_DELAY = 0.001
WINDOW = 1000
ROUNDS = 3
PLAIN = "persistent://public/default/clients-"
SCALABLE = "topic://public/default/clients-"


def measure(run: Run) -> None:
    with start_broker(fresh_dir("clients")).wait_ready() as broker:
        run.add(_figures(f"pulsar://127.0.0.1:{broker.port}", run))


def _figures(url: str, run: Run) -> list[Figure]:
    few, many = (500, 20_000) if run.is_quick else (2000, 60_000)
    figures = []
    for name, batching, pipelined, count in (
        ("each send awaited, unbatched", False, False, few),
        ("pipelined, unbatched", False, True, many),
        ("pipelined, batched", True, True, many * 2),
    ):
        label = f"{'batched' if batching else 'plain'}-{'pipelined' if pipelined else 'awaited'}"
        rates: dict[str, list[float]] = {"ours": [], "scalable": [], "theirs": []}
        for turn in range(ROUNDS):  # in turn, so that what else the machine does hits all of them
            run.progress(f"clients: {name}, {turn + 1} of {ROUNDS}")
            rates["theirs"].append(_official_publish(url, f"{PLAIN}official-{label}", batching, pipelined, count))
            rates["ours"].append(asyncio.run(_sdk_publish(url, f"{PLAIN}sdk-{label}", batching, pipelined, count)))
            rates["scalable"].append(asyncio.run(_sdk_publish(url, f"{SCALABLE}{label}", batching, pipelined, count)))
        figures.append(_versus(f"publish, {name}", rates["ours"], rates["theirs"]))
        figures.append(_versus(f"publish, {name}, topic://", rates["scalable"], rates["theirs"]))
    ours, theirs = [], []
    for turn in range(ROUNDS):
        run.progress(f"clients: receiving, {turn + 1} of {ROUNDS}")
        theirs.append(_official_receive(url, f"{PLAIN}sdk-batched-pipelined", f"official-{turn}", many))
        ours.append(asyncio.run(_sdk_receive(url, f"{PLAIN}sdk-batched-pipelined", f"sdk-{turn}", many)))
    figures.append(_versus("receive and acknowledge each", ours, theirs))
    return figures


def _versus(name: str, ours: list[float], theirs: list[float]) -> Figure:
    value, other = statistics.median(ours), statistics.median(theirs)
    note = f"ratio {value / other:.2f}: official client {other:,.0f} ({min(theirs):,.0f} .. {max(theirs):,.0f})"
    return Figure(group=CLIENT_GROUP, name=name, value=value, unit="msg/s", low=min(ours), high=max(ours), note=note)


async def _sdk_publish(url: str, topic: str, batching: bool, pipelined: bool, count: int) -> float:
    config = ClientConfig(
        batch_max_messages=BATCH_MESSAGES, batch_max_bytes=BATCH_BYTES, batch_delay=BATCH_DELAY, max_pending_messages=WINDOW
    )
    async with braid.connect(url, config=config) as client, client.producer(topic, batching=batching) as producer:
        for _ in range(100):
            await producer.send(PAYLOAD)
        started = time.perf_counter()
        if pipelined:
            for _ in range(count):
                await producer.room()
                producer.send_nowait(PAYLOAD)
            await producer.flush()
        else:
            for _ in range(count):
                await producer.send(PAYLOAD)
        return count / (time.perf_counter() - started)


@contextlib.contextmanager
def _official(url: str) -> Iterator[pulsar.Client]:
    client = pulsar.Client(url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    try:
        yield client
    finally:
        client.close()


def _official_publish(url: str, topic: str, batching: bool, pipelined: bool, count: int) -> float:
    done = threading.Semaphore(0)

    def answered(result: pulsar.Result, _message_id: object) -> None:
        if result == pulsar.Result.Ok:
            done.release()

    with _official(url) as client:
        producer = client.create_producer(
            topic,
            batching_enabled=batching,
            batching_max_messages=BATCH_MESSAGES,
            batching_max_allowed_size_in_bytes=BATCH_BYTES,
            batching_max_publish_delay_ms=int(BATCH_DELAY * 1000),
            max_pending_messages=WINDOW,
            block_if_queue_full=True,
        )
        for _ in range(100):
            producer.send(PAYLOAD)
        started = time.perf_counter()
        if pipelined:
            for _ in range(count):
                producer.send_async(PAYLOAD, answered)
            producer.flush()
            for _ in range(count):
                done.acquire()
        else:
            for _ in range(count):
                producer.send(PAYLOAD)
        return count / (time.perf_counter() - started)


async def _sdk_receive(url: str, topic: str, subscription: str, count: int) -> float:
    async with (
        braid.connect(url) as client,
        client.consumer(topic, subscription, type="shared", initial="earliest") as consumer,
    ):
        await consumer.acknowledge(await consumer.receive(timeout=30))
        started = time.perf_counter()
        for _ in range(count):
            await consumer.acknowledge(await consumer.receive(timeout=30))
        return count / (time.perf_counter() - started)


def _official_receive(url: str, topic: str, subscription: str, count: int) -> float:
    with _official(url) as client:
        consumer = client.subscribe(
            topic, subscription, consumer_type=pulsar.ConsumerType.Shared, initial_position=pulsar.InitialPosition.Earliest
        )
        consumer.acknowledge(consumer.receive(30_000))
        started = time.perf_counter()
        for _ in range(count):
            consumer.acknowledge(consumer.receive(30_000))
        return count / (time.perf_counter() - started)
