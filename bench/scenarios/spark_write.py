"""The connector's hot paths without Spark: columns into a topic, beside one `send` for each row of the same columns.

Both writers use the same SDK, client, broker, batching and window, and take the rows as Spark hands them over: Arrow batches of
10,000 rows with a key and a value, or the same as Python objects. The broker is a process of its own and its disk is real.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pyarrow as pa
from bench.broker_process import Process, cpu_seconds, fresh_dir, start_broker
from bench.report import Figure
from bench.scenarios.bench_run import Run

import braid
from braid.client import Client
from braid.client.config import ClientConfig
from braid.client.deciders import SubTransaction
from braid.client.producer import Producer
from braid_spark.blocks import ArrowBlock

WRITE_GROUP = "Spark sink without Spark: Arrow batches of 10,000 rows, durable"
BATCH_ROWS = 10_000
KEYS = 1_000
ENTRY_BYTES, ENTRY_MESSAGES = 1 << 20, 100_000
ROUNDS = 3
SPEEDUP = 3.0
CONFIG = ClientConfig(
    batch_max_messages=ENTRY_MESSAGES,
    batch_max_bytes=ENTRY_BYTES,
    block_max_messages=ENTRY_MESSAGES,
    block_max_bytes=ENTRY_BYTES,
    max_pending_messages=1_000_000,
)
Write = Callable[[Producer, list[pa.RecordBatch], SubTransaction], Coroutine[Any, Any, None]]


def measure(run: Run) -> None:
    with start_broker(fresh_dir("spark-write")).wait_ready() as broker:
        run.add(asyncio.run(_write_figures(run, broker)))


async def _write_figures(run: Run, broker: Process) -> list[Figure]:
    figures = []
    url = f"pulsar://127.0.0.1:{broker.port}"
    async with braid.connect(url, config=CONFIG) as client, braid.AdminClient(broker.http_url) as admin:
        for size, segments in ((100, 1), (100, 4), (1000, 4)):
            topic = f"topic://public/default/write-{size}-{segments}"
            await admin.scalable_topics.create(topic, segments=segments)
            batches = _batches(size, (20_000_000 if run.is_quick else 80_000_000) // (size + 100))
            rates: dict[str, list[float]] = {"columns": [], "rows": []}
            spent: dict[str, list[float]] = {"columns": [], "rows": []}
            for turn in range(ROUNDS + 1):
                for name, write in (("columns", by_columns), ("rows", by_rows)):
                    run.progress(f"write: {size} B, {segments} segments, {name}, {turn} of {ROUNDS}")
                    before = cpu_seconds(broker.pid)
                    rate = await _rate(client, topic, batches, write)
                    if turn:  # the first one warms up
                        rates[name].append(rate)
                        spent[name].append((cpu_seconds(broker.pid) - before) / len(batches) / BATCH_ROWS * 1e6)
            figures += _compared(f"{size} B, {segments} segment{'s' * (segments > 1)}", size, rates, spent)
    return figures


def _batches(size: int, rows: int) -> list[pa.RecordBatch]:
    """So many rows of values of this size, rounded up to whole batches."""
    rng = np.random.default_rng(size)
    found = []
    for _each in range(-(-rows // BATCH_ROWS)):
        values = rng.integers(0, 256, BATCH_ROWS * size, np.uint8)
        ends = np.arange(BATCH_ROWS + 1, dtype=np.int32) * np.int32(size)
        value = pa.BinaryArray.from_buffers(pa.binary(), BATCH_ROWS, [None, pa.py_buffer(ends), pa.py_buffer(values)])
        key = pa.array([f"user-{number}" for number in rng.integers(0, KEYS, BATCH_ROWS)])
        found.append(pa.record_batch({"value": value, "__key": key}))
    return found


async def _rate(client: Client, topic: str, batches: list[pa.RecordBatch], write: Write) -> float:
    """Rows a second through one attempt of a sink, from its first row to the last answer."""
    decider = await client.begin_decider()
    sub = await decider.sub()
    async with client.producer(topic, name=f"attempt-{sub.id}", deduplication=True) as producer:
        await producer.send_block(ArrowBlock.of(pa.array([b"x"])), txn=sub)
        await producer.flush()
        started = time.perf_counter()
        await write(producer, batches, sub)
        await sub.finish()
        seconds = time.perf_counter() - started
    await decider.decide([sub])
    return len(batches) * BATCH_ROWS / seconds


async def by_columns(producer: Producer, batches: list[pa.RecordBatch], sub: SubTransaction) -> None:
    for batch in batches:
        await producer.send_block(ArrowBlock.of(batch.column("value"), keys=batch.column("__key")), txn=sub)


async def by_rows(producer: Producer, batches: list[pa.RecordBatch], sub: SubTransaction) -> None:
    for batch in batches:
        for value, key in zip(batch.column("value").to_pylist(), batch.column("__key").to_pylist(), strict=True):
            await producer.room()
            producer.send_nowait(value, key=key, txn=sub)


def _compared(name: str, size: int, rates: dict[str, list[float]], spent: dict[str, list[float]]) -> list[Figure]:
    ratios = [columns / rows for columns, rows in zip(rates["columns"], rates["rows"], strict=True)]
    figures = [
        Figure(
            group=WRITE_GROUP,
            name=f"{name}, {'by columns' if kind == 'columns' else 'row at a time'}",
            value=statistics.median(found),
            unit="rows/s",
            low=min(found),
            high=max(found),
            note=f"{statistics.median(found) * size / 1e6:,.0f} MB/s; broker CPU {statistics.median(spent[kind]):.2f} us/row",
        )
        for kind, found in rates.items()
    ]
    # Lower is better for figures with a target, so it is the share of time that columns need.
    share = [1 / each for each in ratios]
    figures.append(
        Figure(
            group=WRITE_GROUP,
            name=f"{name}, time by columns to time by rows",
            value=statistics.median(share),
            unit="x",
            low=min(share),
            high=max(share),
            target=1 / SPEEDUP,
            note=f"columns are {statistics.median(ratios):.1f} times as fast",
        )
    )
    return figures
