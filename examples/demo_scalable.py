"""Second act of `make demo`: a scalable topic is split and merged under load, and every key stays in order.

Two producers send orders of 64 users all the time, each user's orders numbered. Stream consumers share the topic; one joins and
one leaves on the way. Meanwhile the topic is split and merged over the admin API. At the end every user's orders must have come
once and in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import subprocess
import sys
import time
from collections import defaultdict
from functools import partial
from pathlib import Path

import msgspec
from examples.demo_broker import Broker, say

import braid
from braid.client import Client, Message, MessageId, Producer
from braid.errors import DeadlineExceeded

TOPIC = "topic://public/default/orders"
PRODUCERS = 2
USERS = 64
RATE = 1500
"""Messages a second of each producer."""
PERIOD = 0.01
PAUSE = 1.0
"""Seconds between two changes of the layout."""
PATIENCE = 20.0


class Order(msgspec.Struct):
    """What travels: JSON, checked on both ends."""

    user: str
    number: int


class Journal:
    """What was acknowledged and what came, per user."""

    def __init__(self) -> None:
        self.acknowledged: dict[str, int] = defaultdict(int)
        self.came: dict[str, list[int]] = defaultdict(list)
        self.by_consumer: dict[str, int] = defaultdict(int)
        self.failed = 0
        self.latest = time.monotonic()
        self.longest_gap = 0.0
        self._progress = asyncio.Event()

    def sent(self, user: str, future: asyncio.Future[MessageId]) -> None:
        if future.exception() is not None:
            self.failed += 1
            return
        self.acknowledged[user] += 1
        now = time.monotonic()
        self.longest_gap = max(self.longest_gap, now - self.latest)
        self.latest = now

    def received(self, name: str, messages: list[Message]) -> None:
        for message in messages:
            self.came[message.value.user].append(message.value.number)
        self.by_consumer[name] += len(messages)
        self._progress.set()

    async def wait_complete(self) -> None:
        """Return when everything acknowledged has come, or after a while."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE):
                while sum(map(len, self.came.values())) < sum(self.acknowledged.values()):
                    self._progress.clear()
                    await self._progress.wait()

    def take_gap(self) -> float:
        """Milliseconds of the longest time without an acknowledgment since the last call."""
        gap, self.longest_gap = self.longest_gap, 0.0
        return gap * 1000

    def report(self) -> bool:
        """Print the verdict; returns it."""
        lost = sum(count - len(set(self.came[user])) for user, count in self.acknowledged.items())
        doubled = sum(len(numbers) - len(set(numbers)) for numbers in self.came.values())
        disordered = sum(numbers != sorted(numbers) for numbers in self.came.values())
        good = lost == doubled == disordered == self.failed == 0
        print(f"\n{'acknowledged':>14} {'failed':>7} {'received':>9} {'lost':>5} {'doubled':>8} {'users out of order':>19}")
        received = sum(map(len, self.came.values()))
        print(f"{sum(self.acknowledged.values()):>14,} {self.failed:>7} {received:>9,} {lost:>5} {doubled:>8} {disordered:>19}")
        return good


async def produce(producer: Producer, users: list[str], journal: Journal, stop: asyncio.Event) -> None:
    """Send in turn for each user, at a steady rate, without waiting for each answer."""
    number = 0
    while not stop.is_set():
        for _ in range(int(RATE * PERIOD)):
            user = users[number % len(users)]
            await producer.room()
            order = Order(user, number // len(users))
            producer.send_nowait(order, key=user).add_done_callback(partial(journal.sent, user))
            number += 1
        await asyncio.sleep(PERIOD)
    await producer.flush()


async def consume(client: Client, name: str, journal: Journal, stop: asyncio.Event) -> None:
    """Read one's share of the topic until told to leave."""
    async with client.stream_consumer(TOPIC, "billing", name=name, schema=Order) as consumer:
        while not stop.is_set():
            try:
                messages = await consumer.receive_batch(500, timeout=0.2)
            except DeadlineExceeded:
                continue
            if messages:
                journal.received(name, messages)
                await consumer.acknowledge_cumulative(messages[-1])


async def reshape(admin: braid.AdminClient, journal: Journal, change: str) -> None:
    """Split the widest segment, or merge the two narrowest neighbours, and say how it went."""
    await asyncio.sleep(PAUSE)
    layout = await admin.scalable_topics.get_metadata(TOPIC)
    active = sorted((each for each in layout.segments.values() if each.is_active), key=lambda each: each.hash_range.start)
    widths = {each.segment_id: each.hash_range.end - each.hash_range.start for each in active}
    journal.take_gap()
    began = time.monotonic()
    if change == "split":
        widest = max(widths, key=lambda number: widths[number])
        await admin.scalable_topics.split_segment(TOPIC, widest)
        what = f"split segment {widest}"
    else:
        pairs = [(one.segment_id, other.segment_id) for one, other in itertools.pairwise(active)]
        one, other = min(pairs, key=lambda pair: widths[pair[0]] + widths[pair[1]])
        await admin.scalable_topics.merge_segments(TOPIC, one, other)
        what = f"merged segments {one} and {other}"
    took = (time.monotonic() - began) * 1000
    await asyncio.sleep(0.1)
    say(f"{what} in {took:.0f} ms; longest pause between two acknowledgments: {journal.take_gap():.0f} ms")


def draw(broker: Broker) -> None:
    """The topic's segments as the command line draws them."""
    command = [str(Path(sys.executable).parent / "braid"), "scalable-topics", "dag", TOPIC, "--url", broker.http_url]
    environment = {**os.environ, "COLUMNS": "110", "NO_COLOR": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=30, check=True)
    print("\n" + "\n".join(f"  {line}".rstrip() for line in done.stdout.strip().splitlines()))


async def show(broker: Broker) -> bool:
    journal, stop_sending = Journal(), asyncio.Event()
    async with braid.AdminClient(broker.http_url) as admin, braid.connect(broker.service_url) as client:
        await admin.scalable_topics.create(TOPIC, segments=2)
        await admin.scalable_topics.create_subscription(TOPIC, "billing")
        say(f"{TOPIC} has 2 segments; {PRODUCERS} producers send {PRODUCERS * RATE:,} orders a second of {USERS} users")
        leave = {name: asyncio.Event() for name in ("billing-1", "billing-2", "billing-3")}
        producers = [await client.producer(TOPIC, name=f"shop-{number}", schema=Order) for number in range(PRODUCERS)]
        users = [[f"user-{user}" for user in range(USERS) if user % PRODUCERS == number] for number in range(PRODUCERS)]
        async with asyncio.TaskGroup() as group:
            for name in ("billing-1", "billing-2"):
                group.create_task(consume(client, name, journal, leave[name]))
            senders = [
                group.create_task(produce(producer, mine, journal, stop_sending))
                for producer, mine in zip(producers, users, strict=True)
            ]
            began = time.monotonic()
            for change in ("split", "split", "split"):
                await reshape(admin, journal, change)
            say("billing-3 joins, billing-1 leaves")
            group.create_task(consume(client, "billing-3", journal, leave["billing-3"]))
            leave["billing-1"].set()
            for change in ("merge", "split", "merge", "merge"):
                await reshape(admin, journal, change)
            await asyncio.to_thread(draw, broker)
            stop_sending.set()
            await asyncio.wait(senders)
            seconds = time.monotonic() - began
            await journal.wait_complete()
            for event in leave.values():
                event.set()
        for producer in producers:
            await producer.close()
    good = journal.report()
    shares = ", ".join(f"{name} {count:,}" for name, count in sorted(journal.by_consumer.items()))
    rate = sum(journal.acknowledged.values()) / seconds
    print(f"\n{'VERIFIED' if good else 'FAILED'}: 4 splits and 3 merges under {rate:,.0f} messages a second ({shares}).")
    return good


def run(broker: Broker) -> bool:
    """Whether every user's orders came once and in order."""
    return asyncio.run(show(broker))
