"""The longest turn of a broker's event loop, which is how long everybody may have to wait for one client: acknowledgments with
many gaps, cumulative ones over many entries, many topics opened at once, a slow disk.

`bench/turns.py` runs this alone, also against the broker of another checkout.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
from bench.broker_process import ROOT, fresh_dir
from bench.report import Figure
from bench.scenarios.bench_run import Run

import braid
from braid.client import Client, ClientConfig, Message
from braid.errors import BraidError

GROUP = "Turns of the loop: the longest one"
TARGET_MS = 100.0
GAPS = 20_000
ENTRIES = 100_000
TOPICS = 10_000
OPENED_AT_ONCE = 1000
"""Requests of one connection on their way; the rest waits in the client."""
SLOW_MS = 200.0
SLOW_TOPICS = 200
REST_SECONDS = 12.0
"""Afterwards: long enough for every reconcile and trim to come round twice."""
PATIENT = ClientConfig(operation_timeout=300.0)
Say = Callable[[str], None]


class Broker:
    """A broker process that measures itself."""

    def __init__(self, source: Path, slow_ms: float = 0.0, data_dir: Path | None = None) -> None:
        self.data_dir = data_dir or fresh_dir("turns")
        self._process = subprocess.Popen(
            [sys.executable, str(ROOT / "bench" / "turns_broker.py"), str(self.data_dir), str(slow_ms)],
            env={**os.environ, "PYTHONPATH": str(source / "src")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        words = self._line().split()
        if len(words) != 3:
            raise RuntimeError("The broker did not start.")
        self.url, self.http_url = words[1:]

    def __enter__(self) -> Broker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()  # it ends in an orderly way
        self._process.wait()

    def turns(self) -> dict[str, Any]:
        """What was seen since the last call."""
        if self._process.stdin is None:
            raise RuntimeError("The broker is not running.")
        self._process.stdin.write("next\n")
        self._process.stdin.flush()
        found: dict[str, Any] = json.loads(self._line())
        return found

    def _line(self) -> str:
        return self._process.stdout.readline() if self._process.stdout is not None else ""


class Measurement:
    """The figures of one broker."""

    def __init__(self, source: Path, say: Say = lambda _text: None) -> None:
        self.source = source
        self.figures: list[Figure] = []
        self.say = say

    async def of(self, name: str, broker: Broker, work: Awaitable[Any]) -> Any:
        """The longest turn while the work is done."""
        self.say(name)
        broker.turns()
        began = time.perf_counter()
        result = await work
        taken = time.perf_counter() - began
        seen = broker.turns()
        note = f"{seen['cpu'] * 1000:.0f} ms of CPU; {taken:.1f} s in all; {seen['stalls']} stalls"
        if seen["longest"] * 1000 > TARGET_MS:
            note += f"; in {', '.join(seen['places'])}"
        self.figures.append(
            Figure(group=GROUP, name=name, value=seen["longest"] * 1000, unit="ms", target=TARGET_MS, note=note)
        )
        return result

    # Acknowledgments.

    async def gaps(self, scale: float) -> None:
        """Every second entry is acknowledged alone."""
        with Broker(self.source) as broker:
            async with braid.connect(broker.url) as client:
                count = int(2 * GAPS * scale)
                messages = await self._filled(client, "gaps", count)
                consumer = messages.consumer

                async def storm() -> None:
                    await asyncio.gather(*(consumer.acknowledge(each, wait=True) for each in messages.found[1::2]))
                    await asyncio.sleep(2.0)  # positions are stored a moment later

                await self.of(f"{count // 2:,} gaps: acknowledged", broker, storm())
                await self.of(f"{count // 2:,} gaps: statistics", broker, self._stats(broker, "gaps"))
                await self.of(
                    f"{count // 2:,} gaps: transactions in each other's way", broker, self._conflicts(client, messages)
                )

                async def close() -> None:
                    await consumer.acknowledge_cumulative(messages.found[-1], wait=True)
                    await asyncio.sleep(2.0)

                await self.of(f"{count // 2:,} gaps: closed by one", broker, close())

    async def cumulative(self, scale: float) -> None:
        """One acknowledgment of many entries, alone and beside a transaction that holds one of them."""
        count = int(ENTRIES * scale)
        with Broker(self.source) as broker:
            async with braid.connect(broker.url) as client:
                for held in (False, True):
                    topic = f"cumulative-{held}"
                    messages = await self._filled(client, topic, count)
                    if held:
                        txn = await client.begin_transaction(timeout=600)
                        await messages.consumer.acknowledge(messages.found[10], wait=True, txn=txn)

                    async def all_of_them(messages: _Messages = messages) -> None:
                        await messages.consumer.acknowledge_cumulative(messages.found[-1], wait=True)
                        await asyncio.sleep(2.0)

                    name = f"{count:,} entries cumulatively" + (", one held by a transaction" if held else "")
                    await self.of(name, broker, all_of_them())

    async def transactions(self, scale: float) -> None:
        """Many open transactions with many acknowledgments each, then committed at once."""
        for open_ones, each in ((int(40 * max(scale, 0.25)), 100), (1, int(GAPS * scale))):
            await self._transactions(open_ones, each)

    async def _transactions(self, open_ones: int, each: int) -> None:
        with Broker(self.source) as broker:
            async with braid.connect(broker.url) as client:
                messages = await self._filled(client, "txn", open_ones * each)
                txns = [await client.begin_transaction(timeout=600) for _number in range(open_ones)]

                async def acknowledge() -> None:
                    for at, txn in enumerate(txns):
                        part = messages.found[at * each : (at + 1) * each]
                        await asyncio.gather(*(messages.consumer.acknowledge(message, txn=txn) for message in part))

                async def commit() -> None:
                    await asyncio.gather(*(txn.commit() for txn in txns))
                    async with httpx.AsyncClient(base_url=broker.http_url, timeout=60) as http:
                        while True:  # until all of them are materialised
                            stats = (await http.get("/admin/v2/persistent/public/default/txn/stats")).json()
                            if stats["subscriptions"]["s"]["msgBacklog"] == 0:
                                return
                            await asyncio.sleep(0.05)

                await self.of(f"{open_ones} transactions x {each}: acknowledged", broker, acknowledge())
                await self.of(f"{open_ones} transactions x {each}: materialised", broker, commit())

    async def _conflicts(self, client: Client, messages: _Messages) -> None:
        """A committed transaction cannot be stored, because there are more gaps than a position keeps; others, which wait for
        it one after the other, are refused."""
        txn = await client.begin_transaction(timeout=600)
        await messages.consumer.acknowledge(messages.found[-2], wait=True, txn=txn)
        await txn.commit()
        for _number in range(3):
            other = await client.begin_transaction(timeout=600)
            with contextlib.suppress(BraidError):
                await messages.consumer.acknowledge_cumulative(messages.found[-1], wait=True, txn=other)
            await other.abort()

    async def _stats(self, broker: Broker, topic: str) -> None:
        async with httpx.AsyncClient(base_url=broker.http_url, timeout=60) as http:
            for page in ("stats", "internalStats"):
                (await http.get(f"/admin/v2/persistent/public/default/{topic}/{page}")).raise_for_status()
            (await http.get("/metrics")).raise_for_status()

    async def _filled(self, client: Client, topic: str, count: int) -> _Messages:
        """A topic with so many entries, all of them received and none acknowledged."""
        self.say(f"filling {topic}")
        consumer = await client.consumer(topic, "s", initial="earliest")
        async with client.producer(topic, batching=False) as producer:
            for first in range(0, count, 5000):
                await asyncio.gather(*(producer.send(b"x") for _number in range(first, min(first + 5000, count))))
        return _Messages(consumer, [await consumer.receive(timeout=60) for _number in range(count)])

    # Topics.

    async def topics(self, scale: float) -> None:
        """Made at once; then, by a new process, opened at once, listed and left in peace."""
        count = int(TOPICS * scale)
        names = [f"many-{number}" for number in range(count)]

        async def open_all(client: Client) -> None:
            turns = asyncio.Semaphore(OPENED_AT_ONCE)

            async def open_one(name: str) -> None:
                async with turns:
                    await client.producer(name)

            await asyncio.gather(*map(open_one, names))

        async def list_all(broker: Broker) -> None:
            async with httpx.AsyncClient(base_url=broker.http_url, timeout=120) as http:
                for page in ("/admin/v2/persistent/public/default", "/metrics", "/admin/v2/brokers/health"):
                    (await http.get(page)).raise_for_status()

        with Broker(self.source) as broker:
            data_dir = broker.data_dir
            async with braid.connect(broker.url, config=PATIENT) as client:
                await self.of(f"{count:,} topics: made at once", broker, open_all(client))
                await self.of(f"{count:,} topics: clients leave", broker, client.close())
        with Broker(self.source, data_dir=data_dir) as broker:
            async with braid.connect(broker.url, config=PATIENT) as client:
                await self.of(f"{count:,} topics: opened at once", broker, open_all(client))
                await self.of(f"{count:,} topics: listed", broker, list_all(broker))
                await self.of(f"{count:,} topics: left in peace", broker, asyncio.sleep(REST_SECONDS))

    async def slow(self, scale: float) -> None:
        """Every job of the disk takes long."""
        count = max(int(SLOW_TOPICS * scale), 10)
        with Broker(self.source, SLOW_MS) as broker:
            async with braid.connect(broker.url, config=PATIENT) as client:

                async def publish() -> None:
                    producers = await asyncio.gather(*(client.producer(f"slow-{number}") for number in range(count)))
                    for _round in range(20):
                        await asyncio.gather(*(producer.send(b"x") for producer in producers for _number in range(20)))

                await self.of(f"{count} topics on a disk that takes {SLOW_MS:g} ms longer", broker, publish())


class _Messages:
    def __init__(self, consumer: Any, found: list[Message]) -> None:
        self.consumer = consumer
        self.found = found


PARTS = ("gaps", "cumulative", "transactions", "topics", "slow")


def measure(run: Run) -> None:
    run.add(asyncio.run(measured(ROOT, PARTS, 0.1 if run.is_quick else 1.0, run.progress)))


async def measured(source: Path, parts: tuple[str, ...], scale: float, say: Say) -> list[Figure]:
    measurement = Measurement(source, say)
    for part in parts:
        await getattr(measurement, part)(scale)
    return measurement.figures
