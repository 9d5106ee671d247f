"""Scalable topics: what a running producer sees of a split and of a merge, and what a long history of segments costs.

The broker is a process of its own. The topic of the first part has one segment, which is split and then merged again, so that
every change stops all keys at once: with other segments at work a gap would not show.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from bench.broker_process import Process, fresh_dir, start_broker
from bench.report import Figure
from bench.scenarios.bench_run import Run
from bench.stalls import Stalls

import braid
from braid.client import Client, MessageId, Producer
from braid.wire import requests
from braid.wire.commands import decode
from braid.wire.types import CommandType

GAP_GROUP = "Scalable topics: a split and a merge of all keys, seen by a producer of 2,000 messages a second"
DAG_GROUP = "Scalable topics: retained segments"
RATE = 2000
PERIOD = 0.005
KEYS = 64
SETTLE = 0.25
"""Seconds after a change in which its gap is looked for."""
SPLIT_TARGET_MS = 100.0
MERGE_TARGET_MS = 200.0
PRODUCERS_PER_SPLIT = 2
CLIENTS = 4
PAYLOAD = b"x" * 100
TOPIC = "topic://public/default/"


def measure(run: Run) -> None:
    with start_broker(fresh_dir("scalable")).wait_ready() as broker:
        run.add(asyncio.run(_gaps(broker, 10 if run.is_quick else 50, run)))
        run.add([asyncio.run(_producers_per_split(broker))])
    with start_broker(fresh_dir("dag")).wait_ready() as broker:
        run.add(asyncio.run(_histories(broker, (10, 100) if run.is_quick else (10, 100, 1000), run)))


# Gaps.


class Load:
    """A producer that sends at a steady rate whatever happens, and notes when answers come."""

    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        self._stop = asyncio.Event()
        self._latest = 0.0
        self.gap = self.slowest = 0.0
        self.gap_end = 0.0
        """When the longest gap was over."""
        self.failed = 0

    async def run(self) -> None:
        started, count = time.perf_counter(), 0
        self._latest = started
        while not self._stop.is_set():
            due = int((time.perf_counter() - started) * RATE)
            for number in range(count, due):
                await self._producer.room()
                began = time.perf_counter()
                sent = self._producer.send_nowait(PAYLOAD, key=f"key-{number % KEYS}")
                sent.add_done_callback(functools.partial(self._answered, began))
            count = due
            await asyncio.sleep(PERIOD)
        await self._producer.flush()

    def stop(self) -> None:
        self._stop.set()

    def reset(self) -> None:
        self.gap = self.slowest = 0.0

    def _answered(self, began: float, future: asyncio.Future[MessageId]) -> None:
        now = time.perf_counter()
        if future.exception() is not None:
            self.failed += 1
        if now - self._latest > self.gap:
            self.gap, self.gap_end = now - self._latest, now
        self.slowest = max(self.slowest, now - began)
        self._latest = now


async def _gaps(broker: Process, count: int, run: Run) -> list[Figure]:
    topic = TOPIC + "gaps"
    gaps: dict[str, list[float]] = {"split": [], "merge": []}
    slowest: dict[str, list[float]] = {"split": [], "merge": []}
    own: dict[str, list[float]] = {"split": [], "merge": []}  # gaps without the time in which the machine stood still
    took: dict[str, list[float]] = {"split": [], "merge": []}
    quiet: list[float] = []  # the same without any change: what the machine alone does
    async with contextlib.AsyncExitStack() as stack:
        stalls = stack.enter_context(Stalls())
        admin = await stack.enter_async_context(braid.AdminClient(broker.http_url))
        client = await stack.enter_async_context(braid.connect(_url(broker)))
        await admin.scalable_topics.create(topic, segments=1)
        async with client.producer(topic) as producer, asyncio.TaskGroup() as group:
            gc.collect()
            gc.freeze()  # this process has imported every scenario; to look through all of that took up to 136 ms at once
            load = Load(producer)
            group.create_task(load.run())
            await asyncio.sleep(1.0)
            for number in range(count):
                for kind in ("split", "merge"):
                    run.progress(f"{kind} {number + 1} of {count}")
                    load.reset()
                    began = time.perf_counter()
                    await (_split_first if kind == "split" else _merge_first)(admin, topic)
                    took[kind].append((time.perf_counter() - began) * 1000)
                    await asyncio.sleep(SETTLE)
                    gaps[kind].append(load.gap * 1000)
                    own[kind].append((load.gap - stalls.within(load.gap_end - load.gap, load.gap_end)) * 1000)
                    slowest[kind].append(load.slowest * 1000)
                load.reset()
                await asyncio.sleep(SETTLE)
                quiet.append(load.gap * 1000)
            load.stop()
    if load.failed:
        raise RuntimeError(f"{load.failed} sends failed while the topic was split and merged.")
    figures = []
    for kind, target in (("split", SPLIT_TARGET_MS), ("merge", MERGE_TARGET_MS)):
        for name, percent in (("p50", 50), ("p99", 99), ("max", 100)):
            note = f"without the time the machine stood still {_percentile(own[kind], percent):.0f} ms"
            note += f"; without any change of the topic {_percentile(quiet, percent):.0f} ms"
            if name == "p50":
                note += f"; {count} operations, {statistics.median(took[kind]):.0f} ms each at the admin API"
            value = _percentile(gaps[kind], percent)
            aim = target if name == "p99" else None
            figures.append(
                Figure(
                    group=GAP_GROUP,
                    name=f"{kind}: gap without an answer, {name}",
                    value=value,
                    unit="ms",
                    target=aim,
                    note=note,
                )
            )
        figures.append(
            Figure(
                group=GAP_GROUP,
                name=f"{kind}: slowest send, p50",
                value=_percentile(slowest[kind], 50),
                unit="ms",
                low=min(slowest[kind]),
                high=max(slowest[kind]),
            )
        )
    return figures


async def _producers_per_split(broker: Process) -> Figure:
    """How many producers each client opens because of one split."""
    topic, splits = TOPIC + "lanes", 5
    opened: list[tuple[str, ...]] = []
    real = requests.producer

    def counted(*args: Any, **kwargs: Any) -> bytes:
        opened.append(args[2:4])  # the segment, and the producer's name there
        return real(*args, **kwargs)

    async with contextlib.AsyncExitStack() as stack:
        admin = await stack.enter_async_context(braid.AdminClient(broker.http_url))
        await admin.scalable_topics.create(topic, segments=1)
        producers = []
        for _ in range(CLIENTS):
            client = await stack.enter_async_context(braid.connect(_url(broker)))
            producers.append(await stack.enter_async_context(client.producer(topic)))
        requests.producer = counted
        try:
            await _send_to_all(producers)
            before = len(set(opened))
            for _ in range(splits):
                await _split_first(admin, topic)
                await _send_to_all(producers)
        finally:
            requests.producer = real
    created = len(set(opened)) - before
    again = len(opened) - len(set(opened))
    return Figure(
        group=GAP_GROUP,
        name="producers created per split and client",
        value=created / splits / CLIENTS,
        unit="",
        target=PRODUCERS_PER_SPLIT,
        note=f"{CLIENTS} clients, {splits} splits; {again} attempts at segments just sealed",
    )


async def _send_to_all(producers: list[Producer]) -> None:
    for producer in producers:
        await asyncio.gather(*(producer.send(PAYLOAD, key=f"key-{number}") for number in range(KEYS)))


# Long histories.


async def _histories(broker: Process, sizes: tuple[int, ...], run: Run) -> list[Figure]:
    """A topic is split and merged until it has so many segments, nearly all sealed; then what its operations take."""
    topic = TOPIC + "history"
    figures = []
    async with braid.AdminClient(broker.http_url) as admin:
        await admin.scalable_topics.create(topic, segments=1)
        # A subscription that reads nothing: no segment may be pruned.
        await admin.scalable_topics.create_subscription(topic, "holds")
        async with braid.connect(_url(broker)) as client, client.producer(topic) as producer:
            for size in sizes:
                while (have := len((await admin.scalable_topics.get_metadata(topic)).segments)) < size:
                    run.progress(f"{have} of {size} segments")
                    for change in (_split_first, _merge_first):
                        await producer.send(PAYLOAD, key="k")
                        await change(admin, topic)
                figures += await _history(broker, admin, topic, have)
    return figures


async def _history(broker: Process, admin: braid.AdminClient, topic: str, size: int) -> list[Figure]:
    label = f"{size:,} segments"
    lookups = [await _timed(lambda: _layout_size(broker, topic)) for _ in range(5)]
    opens = [await _timed(lambda: _open_producer(broker, topic)) for _ in range(5)]
    splits, merges = [], []
    for _ in range(5):
        splits.append((await _timed(lambda: _split_first(admin, topic)))[0])
        merges.append((await _timed(lambda: _merge_first(admin, topic)))[0])
    figures = []
    for name, values, note in (
        ("layout asked for and received", [each for each, _ in lookups], f"{lookups[-1][1] / 1000:,.1f} kB a push"),
        ("producer opened", [each for each, _ in opens], ""),
        ("split", splits, ""),
        ("merge", merges, ""),
    ):
        middle = statistics.median(values)
        figures.append(
            Figure(
                group=DAG_GROUP,
                name=f"{label}: {name}",
                value=middle,
                unit="ms",
                low=min(values),
                high=max(values),
                note=note,
            )
        )
    return figures


async def _layout_size(broker: Process, topic: str) -> int:
    """Ask for the layout as a client does; returns the bytes of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", broker.port)
    try:
        writer.write(requests.connect("bench"))
        await _frame(reader, CommandType.CONNECTED)
        writer.write(requests.scalable_topic_lookup(1, topic))
        return len(await _frame(reader, CommandType.SCALABLE_TOPIC_UPDATE))
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _frame(reader: asyncio.StreamReader, kind: CommandType) -> bytes:
    while True:
        size = int.from_bytes(await reader.readexactly(4), "big")
        frame = await reader.readexactly(size)
        command = decode(frame[4 : 4 + int.from_bytes(frame[:4], "big")])
        if command is not None and command.type == kind:
            return frame


async def _open_producer(broker: Process, topic: str) -> int:
    async with _connected(broker) as client:
        producer = await client.producer(topic)
        await producer.close()
    return 0


@contextlib.asynccontextmanager
async def _connected(broker: Process) -> AsyncIterator[Client]:
    async with braid.connect(_url(broker)) as client:
        yield client


async def _timed(call: Callable[[], Awaitable[int]]) -> tuple[float, int]:
    """Milliseconds, and what the call returned."""
    started = time.perf_counter()
    result = await call()
    return (time.perf_counter() - started) * 1000, result


# Both.


async def _split_first(admin: braid.AdminClient, topic: str) -> int:
    segments = await _active(admin, topic)
    await admin.scalable_topics.split_segment(topic, segments[0])
    return segments[0]


async def _merge_first(admin: braid.AdminClient, topic: str) -> int:
    segments = await _active(admin, topic)
    await admin.scalable_topics.merge_segments(topic, segments[0], segments[1])
    return segments[0]


async def _active(admin: braid.AdminClient, topic: str) -> list[int]:
    layout = await admin.scalable_topics.get_metadata(topic)
    active = [each for each in layout.segments.values() if each.is_active]
    return [each.segment_id for each in sorted(active, key=lambda each: each.hash_range.start)]


def _url(broker: Process) -> str:
    return f"pulsar://127.0.0.1:{broker.port}"


def _percentile(values: list[float], percent: float) -> float:
    found = sorted(values)
    return found[min(int(len(found) * percent / 100), len(found) - 1)]
