"""Latency at a fixed offered load: messages are sent when they are due, whatever has come back (open loop).

Latency counts from the moment a message was due, so that a generator that falls behind cannot hide a slow broker. Plain threads
and a blocking socket: an event loop's timers are too coarse for a fifth of a millisecond.
"""

from __future__ import annotations

import asyncio
import socket
import statistics
import threading
import time
from collections.abc import Callable

import msgspec
from bench.floor import Wanted
from bench.jobs import Job, Result
from bench.link import producer_frames
from bench.shapes import send_head

from braid.wire import messages as pb
from braid.wire.commands import encode
from braid.wire.frames import SIZES
from braid.wire.types import CommandType

TIMEOUT_SECONDS = 60.0


class Wire:
    """A blocking connection that counts frames."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), TIMEOUT_SECONDS)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._rest = b""

    def frames(self) -> list[int]:
        """Types of the commands that have arrived, at least one read's worth."""
        received = self.socket.recv(1 << 16)
        if not received:
            raise RuntimeError("The connection was closed.")
        data = self._rest + received
        found: list[int] = []
        at, end = 0, len(data)
        while at + 12 <= end:
            total, _ = SIZES.unpack_from(data, at)
            if at + 4 + total > end:
                break
            found.append(data[at + 9])
            at += 4 + total
        self._rest = data[at:]
        return found

    def wait(self, kind: CommandType) -> None:
        while kind not in (kinds := self.frames()):
            if CommandType.ERROR in kinds:
                raise RuntimeError(f"The broker answered with an error instead of {kind.name}; see its log.")

    def connect(self) -> None:
        self.socket.sendall(encode(CommandType.CONNECT, pb.CommandConnect(client_version="bench", protocol_version=20)))
        self.wait(CommandType.CONNECTED)


async def paced(job: Job) -> Result:
    """`entries` unbatched messages at `rate` per second, after `warm` more at the same rate."""
    return await asyncio.to_thread(_paced, job)


def _paced(job: Job) -> Result:
    wire = Wire(job.port)
    entry = job.shape.entry()
    total = job.warm + job.entries
    frames = [send_head(1 if job.is_floor else 0, 100_000 + number, 1, len(entry)) + entry for number in range(total)]
    if job.is_floor:
        line = msgspec.json.encode(Wanted(mode="publish", shape=job.shape, frame_bytes=len(frames[0])))
        wire.socket.sendall(line + b"\n")
    else:
        wire.connect()
        wire.socket.sendall(producer_frames(job.shape, job.prefix)[0])
        wire.wait(CommandType.PRODUCER_SUCCESS)
    confirmed: list[float] = []
    failures: list[Exception] = []

    def read() -> None:
        try:
            while len(confirmed) < total:
                kinds = wire.frames()
                now = time.perf_counter()
                for kind in kinds:
                    if kind == CommandType.SEND_RECEIPT:
                        confirmed.append(now)
                    elif kind != CommandType.PING:
                        raise RuntimeError(f"The broker answered with command {kind} instead of a receipt.")
        except (OSError, RuntimeError) as error:
            failures.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    due, late = _send_when_due(total, job.rate, lambda number: wire.socket.sendall(frames[number]))
    reader.join(TIMEOUT_SECONDS)
    wire.socket.close()
    if failures:
        raise failures[0]
    return _summary(job, due, confirmed, late)


def _send_when_due(total: int, rate: int, send: Callable[[int], object]) -> tuple[list[float], list[float]]:
    start = time.perf_counter() + 0.05
    due = [start + number / rate for number in range(total)]
    late: list[float] = []
    for number, moment in enumerate(due):
        wait = moment - time.perf_counter()
        if wait > 0:
            time.sleep(wait)
        late.append(time.perf_counter() - moment)
        send(number)
    return due, late


def _summary(job: Job, due: list[float], confirmed: list[float], late: list[float]) -> Result:
    if len(confirmed) < len(due):
        raise RuntimeError(f"Only {len(confirmed)} of {len(due)} messages were confirmed.")
    latencies = sorted((end - begin) * 1000 for begin, end in zip(due[job.warm :], confirmed[job.warm :], strict=True))
    return Result(latencies_ms=tuple(latencies), late_ms=statistics.median(late[job.warm :]) * 1000)


async def paced_client(job: Job) -> Result:
    """The same with the official Python client, whose own threads take part in the latency."""
    return await asyncio.to_thread(_paced_client, job)


def _paced_client(job: Job) -> Result:
    import pulsar

    client = pulsar.Client(f"pulsar://127.0.0.1:{job.port}", logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    try:
        producer = client.create_producer(f"{job.prefix}-client", batching_enabled=False, block_if_queue_full=True)
        payload = b"x" * job.shape.size
        total = job.warm + job.entries
        confirmed: list[float] = []
        failures: list[str] = []

        def done(result: object, _message_id: object) -> None:
            confirmed.append(time.perf_counter())
            if result != pulsar.Result.Ok:
                failures.append(str(result))

        due, late = _send_when_due(total, job.rate, lambda _number: producer.send_async(payload, done))
        producer.flush()
        if failures:
            raise RuntimeError(f"{len(failures)} messages were refused, the first with {failures[0]}.")
        return _summary(job, due, confirmed, late)
    finally:
        client.close()
