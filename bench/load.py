"""The load generator: a process of its own that takes jobs as lines of JSON and answers each with a line.

    python -m bench.load

Entries and frames are made before a run starts, so that on the machine's few cores the generator takes as little as it can.
"""

from __future__ import annotations

import gc
import sys
import time

import msgspec
import uvloop
from bench.floor import Wanted
from bench.jobs import Job, Result
from bench.link import Consuming, Link, Meter, producer_frames, subscribe_frames
from bench.paced import paced, paced_client
from bench.shapes import send_head

CHUNK_ENTRIES = 100
CHUNK_BYTES = 1 << 20


class Sender:
    """Entries of a run, ready to be written, round robin over the topics."""

    def __init__(self, link: Link, job: Job) -> None:
        shape = job.shape
        self._link = link
        self._entry = shape.entry()
        size = len(self._entry)
        # The floor splits by size alone, so that all frames of a run must have the same.
        self._heads = [
            send_head(1, 100_000, shape.batch, size)
            if job.is_floor
            else send_head(number % shape.topics, number // shape.topics, shape.batch, size)
            for number in range(job.warm + job.entries)
        ]
        self._chunk = max(1, min(CHUNK_ENTRIES, CHUNK_BYTES // size))
        self._window = shape.window
        self._started = 0
        self.longest_pause = 0.0
        self.frame_bytes = len(self._heads[0]) + size

    async def send(self, count: int, done: Progress, meter: Meter | None, seconds: float) -> int:
        """Send up to `count` entries with the window's number under way; returns how many, all done, were sent."""
        link, entry, heads = self._link, self._entry, self._heads
        base = done()
        end = time.perf_counter() + seconds
        sent = 0
        while sent < count or done() - base < sent:
            while sent < count and sent - (done() - base) <= self._window - self._chunk:
                first = self._started + sent
                step = min(self._chunk, count - sent)
                link.write(b"".join([part for head in heads[first : first + step] for part in (head, entry)]))
                sent += step
            seen, waiting_since = done(), time.perf_counter()
            await link.until(lambda seen=seen: done() > seen)  # type: ignore[misc]
            self.longest_pause = max(self.longest_pause, time.perf_counter() - waiting_since)
            if meter is not None:
                meter.at(done() - base)
            if time.perf_counter() > end:
                count = sent
        self._started += sent
        return sent


class Progress:
    """How many entries are done: confirmed and, in a tail run, received as well."""

    def __init__(self, publisher: Link, consumer: Link | None) -> None:
        self._publisher = publisher
        self._consumer = consumer

    def __call__(self) -> int:
        if self._consumer is None:
            return self._publisher.receipts
        return min(self._publisher.receipts, self._consumer.received)


async def publish(job: Job) -> Result:
    link = await Link.open(job)
    sender = Sender(link, job)
    if job.is_floor:
        link.write(msgspec.json.encode(Wanted(mode="publish", shape=job.shape, frame_bytes=sender.frame_bytes)) + b"\n")
    else:
        await link.requests(producer_frames(job.shape, job.prefix))
    result = await _measured(job, sender, Progress(link, None))
    link.close()
    return result


async def _measured(job: Job, sender: Sender, done: Progress) -> Result:
    await sender.send(job.warm, done, None, job.seconds)
    meter = Meter(job.pid, job.entries)
    sent = await sender.send(job.entries, done, meter, job.seconds)
    return Result(slices=meter.end(sent), longest_pause=sender.longest_pause)


async def tail(job: Job) -> Result:
    """Publish and receive at the same time; a message counts as done when it is confirmed and received."""
    publisher, consumer = await Link.open(job), await Link.open(job)
    # Whatever comes to the consumer must wake the one who waits for both.
    consumer.news = publisher.news
    consuming = Consuming(consumer, job)
    await publisher.requests(producer_frames(job.shape, job.prefix))
    await consuming.subscribe(job, job.subscriptions[0])
    consuming.start()
    result = await _measured(job, Sender(publisher, job), Progress(publisher, consumer))
    await consuming.finish()
    publisher.close()
    consumer.close()
    return result


async def drain(job: Job) -> Result:
    """Receive and acknowledge a backlog of `entries`. One slice: the broker may be far ahead of what was received here."""
    link = await Link.open(job)
    consuming = Consuming(link, job)
    if job.is_floor:
        link.on_message = None
    else:
        await consuming.subscribe(job, job.subscriptions[0])
    meter = Meter(job.pid, job.entries)
    if job.is_floor:
        link.write(msgspec.json.encode(Wanted(mode="deliver", shape=job.shape, entries=job.entries)) + b"\n")
    else:
        consuming.start()
    while link.received < job.entries:
        seen = link.received
        await link.until(lambda seen=seen: link.received > seen)  # type: ignore[misc]
    if not job.is_floor:
        await consuming.finish()
    slices = meter.end(job.entries)
    link.close()
    return Result(slices=slices)


async def subscribe(job: Job) -> Result:
    """Make subscriptions that wait for a consumer."""
    for name in job.subscriptions:
        link = await Link.open(job)
        await link.requests(subscribe_frames(job.shape, job.prefix, name, job.kind))
        link.close()
    return Result()


MODES = {"publish": publish, "tail": tail, "drain": drain, "subscribe": subscribe, "pace": paced, "client": paced_client}


def main() -> None:
    gc.freeze()
    gc.set_threshold(50_000, 50, 1000)
    for line in sys.stdin:
        job = msgspec.json.decode(line, type=Job)
        try:
            result = uvloop.run(MODES[job.mode](job))
        except (RuntimeError, OSError, TimeoutError, ImportError) as error:
            result = Result(error=f"{type(error).__name__}: {error}"[:500])
        sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
