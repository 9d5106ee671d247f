"""Connections of the load generator: count what comes, acknowledge, keep the measured broker's peer cheap.

Nothing here checks entries: correctness is what the tests are for. A refusal by the broker fails the run, though.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import cast

from bench.broker_process import cpu_seconds
from bench.jobs import EXCLUSIVE, Job, Slice
from bench.shapes import Shape

from braid.wire import messages as pb
from braid.wire.commands import decode, encode
from braid.wire.frames import SIZES, FrameBuffer
from braid.wire.types import CommandType

STALL_SECONDS = 60.0
SLICES = 5
ACK_GROUP = 100
"""Acknowledgments per ACK command, as clients group them."""
MAX_UNACKED_MESSAGES = 20_000
"""Acknowledge at the latest then: a Shared consumer with 50,000 unacknowledged messages gets no more."""
SETUP_CHUNK = 500
"""Requests under way at the same time while a run is set up."""


class Meter:
    """CPU of the measured process over a run, in slices of about the same number of entries."""

    def __init__(self, pid: int, entries: int) -> None:
        self._pid = pid
        self._step = max(1, entries // SLICES)
        self._next = self._step
        self._last = (0, cpu_seconds(pid), time.perf_counter())
        self.slices: list[Slice] = []

    def at(self, entries: int) -> None:
        """So many entries are done."""
        if entries >= self._next:
            self._cut(entries)

    def end(self, entries: int) -> tuple[Slice, ...]:
        if entries - self._last[0] >= self._step // 2 or not self.slices:
            self._cut(entries)
        return tuple(self.slices)

    def _cut(self, entries: int) -> None:
        done, cpu, wall = self._last
        self._last = (entries, cpu_seconds(self._pid), time.perf_counter())
        if entries > done:
            self.slices.append(Slice(entries=entries - done, cpu=self._last[1] - cpu, wall=self._last[2] - wall))
        self._next = entries + self._step


class Link(asyncio.Protocol):
    """One connection to a broker or to the floor."""

    _transport: asyncio.Transport

    def __init__(self) -> None:
        self._buffer = FrameBuffer(64 << 20)
        self.news = asyncio.Event()
        self._failure = ""
        self._answers = 0
        self.receipts = 0
        self.received = 0
        self.on_message: Callable[[bytes], None] | None = None

    @classmethod
    async def open(cls, job: Job) -> Link:
        _, link = await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", job.port)
        if not job.is_floor:
            link.write(encode(CommandType.CONNECT, pb.CommandConnect(client_version="bench", protocol_version=20)))
            await link.until(lambda: link._answers > 0)
        return link

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self._transport.set_write_buffer_limits(high=64 << 20)

    def connection_lost(self, exc: Exception | None) -> None:
        self._failure = self._failure or "The connection was closed."
        self.news.set()

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def close(self) -> None:
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        data = self._buffer.join(data)
        at, end = 0, len(data)
        unpack = SIZES.unpack_from
        while at + 12 <= end:
            total, size = unpack(data, at)
            frame_end = at + 4 + total
            if frame_end > end:
                break
            kind = data[at + 9]
            if kind == CommandType.SEND_RECEIPT:
                self.receipts += 1
            elif kind == CommandType.MESSAGE:
                self.received += 1
                if self.on_message is not None:
                    self.on_message(data[at + 8 : at + 8 + size])
            else:
                self._take(kind, data[at + 8 : at + 8 + size])
            at = frame_end
        if at < end:
            self._buffer.keep(data, at)
        self.news.set()

    def _take(self, kind: int, raw: bytes) -> None:
        if kind == CommandType.PING:
            self.write(encode(CommandType.PONG, pb.CommandPong()))
        elif kind in (CommandType.ERROR, CommandType.SEND_ERROR, CommandType.CLOSE_PRODUCER, CommandType.CLOSE_CONSUMER):
            self._failure = f"The broker refused: {decode(raw)}"
        else:
            self._answers += 1

    async def until(self, is_done: Callable[[], bool]) -> None:
        """Wait for the next step of a run; fails if it does not come in time, whatever else comes."""
        try:
            async with asyncio.timeout(STALL_SECONDS):
                while not is_done():
                    if self._failure:
                        raise RuntimeError(self._failure)
                    self.news.clear()
                    await self.news.wait()
        except TimeoutError:
            raise RuntimeError(
                f"The broker stalled for {STALL_SECONDS:.0f} s after {self.receipts} receipts and {self.received} messages."
            ) from None

    async def requests(self, frames: list[bytes]) -> None:
        """Send commands that are answered, a bounded number at a time."""
        for start in range(0, len(frames), SETUP_CHUNK):
            chunk = frames[start : start + SETUP_CHUNK]
            wanted = self._answers + len(chunk)
            self.write(b"".join(chunk))
            await self.until(lambda wanted=wanted: self._answers >= wanted)  # type: ignore[misc]

    async def settle(self) -> None:
        """Wait until the broker has handled all that was sent: it answers a PING behind it."""
        await self.requests([encode(CommandType.PING, pb.CommandPing())])


class Consuming:
    """The consumers of one connection: one per topic, with permits and acknowledgments as clients send them."""

    def __init__(self, link: Link, job: Job) -> None:
        shape = job.shape
        self._link = link
        self._is_cumulative = job.kind == EXCLUSIVE
        self._queue = 1000 * shape.batch
        self._batch = shape.batch
        self._group = max(1, min(ACK_GROUP, MAX_UNACKED_MESSAGES // shape.batch))
        self._used = [0] * shape.topics
        self._ids: list[list[pb.MessageIdData]] = [[] for _ in range(shape.topics)]
        self._out: list[bytes] = []
        link.on_message = self._received

    async def subscribe(self, job: Job, subscription: str) -> None:
        await self._link.requests(subscribe_frames(job.shape, job.prefix, subscription, job.kind))

    def start(self) -> None:
        """Give the first permits."""
        self._link.write(b"".join([self._flow(consumer, self._queue) for consumer in range(len(self._used))]))

    def _flow(self, consumer: int, permits: int) -> bytes:
        return encode(CommandType.FLOW, pb.CommandFlow(consumer_id=consumer, messagePermits=permits))

    def _received(self, raw: bytes) -> None:
        # Behind type, tag and a size of one byte (ids are small here) stands the command itself.
        message = pb.CommandMessage.FromString(raw[4:])
        consumer = message.consumer_id
        ids = self._ids[consumer]
        ids.append(message.message_id)
        if len(ids) >= self._group:
            self._ack(consumer)
        self._used[consumer] += self._batch
        if self._used[consumer] >= self._queue // 2:
            self._out.append(self._flow(consumer, self._used[consumer]))
            self._used[consumer] = 0
        if self._out:
            self._link.write(b"".join(self._out))
            self._out.clear()

    def _ack(self, consumer: int) -> None:
        ids = self._ids[consumer]
        sent = ids[-1:] if self._is_cumulative else ids
        kind = pb.CommandAck.AckType.Cumulative if self._is_cumulative else pb.CommandAck.AckType.Individual
        self._out.append(encode(CommandType.ACK, pb.CommandAck(consumer_id=consumer, ack_type=kind, message_id=sent)))
        self._ids[consumer] = []

    async def finish(self) -> None:
        """Acknowledge the rest."""
        for consumer, ids in enumerate(self._ids):
            if ids:
                self._ack(consumer)
        self._link.write(b"".join(self._out))
        self._out.clear()
        await self._link.settle()


def subscribe_frames(shape: Shape, prefix: str, subscription: str, kind: int) -> list[bytes]:
    earliest = pb.CommandSubscribe.InitialPosition.Earliest
    return [
        encode(
            CommandType.SUBSCRIBE,
            pb.CommandSubscribe(
                topic=f"{prefix}-{number}",
                subscription=subscription,
                subType=pb.CommandSubscribe.SubType.Name(kind),
                consumer_id=number,
                request_id=number,
                initialPosition=earliest,
            ),
        )
        for number in range(shape.topics)
    ]


def producer_frames(shape: Shape, prefix: str) -> list[bytes]:
    return [
        encode(CommandType.PRODUCER, pb.CommandProducer(topic=f"{prefix}-{number}", producer_id=number, request_id=number))
        for number in range(shape.topics)
    ]
