"""Third act of `make demo`: a Spark pipeline, exactly once, is killed on the way, while its topic splits and merges.

Orders of 48 users are sent all the time, each user's numbered. A pipeline (`examples/revenue.yaml`) reads them, works out the
revenue of each and writes it to another topic. Meanwhile the topic is split and merged, and the pipeline is killed with SIGKILL
in the middle of a batch, Java and all, and started again. The official Pulsar client reads the output. At the end the revenue
by product must be what the orders say, computed here without Spark; every order must have come once, each user's in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pulsar
from examples.demo_broker import Broker, say

import braid
from braid.client import MessageId, Producer
from braid.errors import BraidError

SALES = "topic://public/default/sales"
REVENUE = "persistent://public/default/revenue"
PIPELINE = Path(__file__).with_name("revenue.yaml")
PRODUCTS = {"anvil": 4999, "bellows": 2950, "chisel": 725, "dowel": 45}
USERS = 48
RATE = 600
"""Orders a second."""
PERIOD = 0.02
PATIENCE = 240.0
"""Seconds for any one step; a machine with little to do needs a tenth of it."""
QUICK_START = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""What makes Java start sooner and run slower in the long run."""
DROPPED = ("user-7", 5)
"""The order that a sabotaged pipeline leaves out."""
Order = tuple[str, int, str, int]
"""User, number, product, cents."""


class Shop:
    """Sends orders and keeps its own books."""

    def __init__(self) -> None:
        self.books: list[Order] = []
        self.failed = 0
        self._is_open = True

    def _sent(self, order: Order, future: asyncio.Future[MessageId]) -> None:
        if future.exception() is None:
            self.books.append(order)
        else:
            self.failed += 1

    async def sell(self, producer: Producer) -> None:
        names = list(PRODUCTS)
        for tick in itertools.count():
            for place in range(int(RATE * PERIOD)):
                serial = tick * int(RATE * PERIOD) + place
                user, number = f"user-{serial % USERS}", serial // USERS
                product, quantity = names[(serial * 7 + number) % len(names)], 1 + serial % 5
                order = {"user": user, "number": number, "product": product, "quantity": quantity, "cents": PRODUCTS[product]}
                await producer.room()
                done = producer.send_nowait(json.dumps(order).encode(), key=user)
                done.add_done_callback(partial(self._sent, (user, number, product, quantity * PRODUCTS[product])))
            await asyncio.sleep(PERIOD)
            if not self._is_open:
                break
        await producer.flush()

    def close(self) -> None:
        self._is_open = False


class Auditor(threading.Thread):
    """Reads the output with the official Pulsar client, from the beginning."""

    def __init__(self, url: str) -> None:
        super().__init__(name="auditor", daemon=True)
        self.orders: list[Order] = []
        self._is_done = False
        self._client = pulsar.Client(url, logger=pulsar.FileLogger(pulsar.LoggerLevel.Error, os.devnull))
        self._consumer = self._client.subscribe(REVENUE, "audit", initial_position=pulsar.InitialPosition.Earliest)

    def run(self) -> None:
        while True:
            try:
                message = self._consumer.receive(500)
            except pulsar.Timeout:
                if self._is_done:  # only now: what comes late may be what came before
                    return
                continue
            row = json.loads(message.data())
            self.orders.append((row["user"], row["number"], row["product"], row["cents"]))
            self._consumer.acknowledge(message)

    def wait_for(self, count: int, deadline: float) -> None:
        """Return when so many have come, or in vain after a while."""
        while len(self.orders) < count and time.monotonic() < deadline:
            time.sleep(0.05)

    def finish(self) -> None:
        self._is_done = True
        self.join()
        self._client.close()


class Driver:
    """The pipeline's process, and what its checkpoint says."""

    def __init__(self, broker: Broker, directory: Path, *, is_sabotaged: bool) -> None:
        self._url = broker.service_url
        self._checkpoint = directory / "checkpoint"
        self._file = directory / "revenue.yaml"
        text = PIPELINE.read_text().replace("../.work/revenue", str(self._checkpoint))
        if is_sabotaged:
            user, number = DROPPED
            left_out = f"\n    WHERE NOT (o.user = '{user}' AND o.number = {number})\nsink:"
            text = text.replace("\nsink:", left_out, 1)
        self._file.write_text(text)
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        command = [str(Path(sys.executable).parent / "braid"), "pipeline", "run", str(self._file), "--url", self._url]
        # Spark's log goes to a temporary file, which a killed pipeline leaves behind: into the directory that is removed.
        environment = {**os.environ, "JDK_JAVA_OPTIONS": QUICK_START, "TMPDIR": str(self._file.parent)}
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)

    def newest(self, log: str) -> int:
        """The newest batch in a log of the checkpoint; -1 if there is none."""
        folder = self._checkpoint / log
        return max((int(each.name) for each in folder.iterdir() if each.name.isdigit()), default=-1) if folder.exists() else -1

    async def committed(self, batch: int) -> int:
        """Wait until `batch` is committed; returns the newest that is."""
        await self._until(lambda: self.newest("commits") >= batch, f"commit batch {batch}")
        return self.newest("commits")

    async def kill_in_a_batch(self) -> None:
        """SIGKILL for the driver, its Java and all workers while a batch is under way."""
        await self._until(lambda: self.newest("offsets") > self.newest("commits"), "begin a batch")
        assert self._process is not None
        family = [*psutil.Process(self._process.pid).children(recursive=True), psutil.Process(self._process.pid)]
        for each in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        self._process.wait()
        say(f"driver killed with SIGKILL in batch {self.newest('offsets')}: {len(family)} processes, Java among them")

    def stop(self) -> str:
        """End it as Ctrl-C would; returns what it said last."""
        assert self._process is not None
        self._process.send_signal(signal.SIGINT)
        out, err = self._process.communicate(timeout=PATIENCE)
        return out.strip() or err.strip()

    def end(self) -> None:
        """Make sure that nothing is left, however the demonstration ended."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    async def _until(self, is_so: Callable[[], bool], what: str) -> None:
        assert self._process is not None
        deadline = time.monotonic() + PATIENCE
        while not is_so():
            if self._process.poll() is not None:
                raise RuntimeError(f"The pipeline ended: {self._process.communicate()[1].strip()}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"The pipeline did not {what} within {PATIENCE:.0f} s.")
            await asyncio.sleep(0.005)


async def split(admin: braid.AdminClient) -> None:
    layout = await admin.scalable_topics.get_metadata(SALES)
    active = [each for each in layout.segments.values() if each.is_active]
    widest = max(active, key=lambda each: each.hash_range.end - each.hash_range.start).segment_id
    await admin.scalable_topics.split_segment(SALES, widest)
    say(f"split segment {widest} of the topic that the pipeline reads; now {len(active) + 1} segments")


async def merge(admin: braid.AdminClient) -> None:
    layout = await admin.scalable_topics.get_metadata(SALES)
    active = sorted((each for each in layout.segments.values() if each.is_active), key=lambda each: each.hash_range.start)
    one, other = active[0].segment_id, active[1].segment_id
    await admin.scalable_topics.merge_segments(SALES, one, other)
    say(f"merged segments {one} and {other}; now {len(active) - 1} segments")


async def show(broker: Broker, directory: Path, *, is_sabotaged: bool) -> bool:
    shop, driver = Shop(), Driver(broker, directory, is_sabotaged=is_sabotaged)
    auditor = Auditor(broker.service_url)
    auditor.start()
    try:
        async with braid.AdminClient(broker.http_url) as admin, braid.connect(broker.service_url) as client:
            await admin.scalable_topics.create(SALES, segments=2)
            await admin.scalable_topics.create_subscription(SALES, "revenue", kind="queue")
            async with client.producer(SALES, name="shop") as producer:
                say(f"{RATE} orders a second of {USERS} users go to {SALES}")
                sales = asyncio.create_task(shop.sell(producer))
                try:
                    began = time.monotonic()
                    driver.start()
                    say("braid pipeline run revenue.yaml: Spark starts")
                    batch = await driver.committed(1)
                    say(f"first batches committed after {time.monotonic() - began:.0f} s")
                    await split(admin)
                    batch = await driver.committed(batch + 2)
                    await split(admin)
                    await driver.committed(batch + 1)
                    await driver.kill_in_a_batch()
                    driver.start()
                    say("the same command again: it goes on from its checkpoint")
                    await split(admin)
                    batch = await driver.committed(driver.newest("offsets") + 1)
                    await merge(admin)
                    await driver.committed(batch + 2)
                    shop.close()
                    await sales
                finally:
                    sales.cancel()
            deadline = time.monotonic() + PATIENCE
            expected = len(shop.books) - is_sabotaged
            await asyncio.to_thread(auditor.wait_for, expected, deadline)
            said = await asyncio.to_thread(driver.stop)
            say(f"Ctrl-C; it says: {said}")
            open_ones = len(await admin.transactions.list())
    finally:
        driver.end()
        auditor.finish()
    return report(shop, auditor.orders, open_ones)


def report(shop: Shop, came: list[Order], open_ones: int) -> bool:
    """Print the verdict: what the shop's books say against what is in the output."""
    wanted, found = Counter(shop.books), Counter(came)
    good = shop.failed == 0 and open_ones == 0
    print(f"\n{'product':>10} {'orders':>8} {'by the books':>14} {'in the topic':>14} {'missing':>8} {'doubled':>8}")
    for product in PRODUCTS:
        mine = {order: count for order, count in wanted.items() if order[2] == product}
        there = {order: count for order, count in found.items() if order[2] == product}
        missing = sum((Counter(mine) - Counter(there)).values())
        doubled = sum((Counter(there) - Counter(mine)).values())
        booked = sum(order[3] * count for order, count in mine.items()) / 100
        written = sum(order[3] * count for order, count in there.items()) / 100
        good = good and missing == doubled == 0 and booked == written
        print(f"{product:>10} {sum(mine.values()):>8,} {booked:>14,.2f} {written:>14,.2f} {missing:>8} {doubled:>8}")
    numbers: dict[str, list[int]] = defaultdict(list)
    for user, number, _, _ in came:
        numbers[user].append(number)
    disordered = sum(each != sorted(each) for each in numbers.values())
    good = good and disordered == 0
    print(f"\n  users out of order: {disordered}; open transactions: {open_ones}")
    print(f"\n{'VERIFIED' if good else 'FAILED'}: {len(came):,} orders in the output of a pipeline that was killed on the way.")
    return good


def run(broker: Broker, directory: Path, *, is_sabotaged: bool) -> bool:
    """Whether the output is what the orders say."""
    try:
        return asyncio.run(show(broker, directory, is_sabotaged=is_sabotaged))
    except (RuntimeError, BraidError) as error:
        print(f"FAILED: {error}")
        return False
