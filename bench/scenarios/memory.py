"""Memory and start: what the broker holds when much is stored, when many are connected, and how soon it serves."""

from __future__ import annotations

import socket
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

from bench.broker_process import Process, fresh_dir, rss_bytes, start_broker
from bench.jobs import Job
from bench.paced import Wire
from bench.report import Figure
from bench.scenarios.bench_run import Run
from bench.shapes import Shape, send_head

from braid.wire import messages as pb
from braid.wire.commands import encode
from braid.wire.types import CommandType

STORED_GROUP = "Memory with one consumer stopped"
IDLE_GROUP = "Idle connections"
START_GROUP = "Start"
MB = 1 << 20
SETTLE_SECONDS = 2.0
RATIO = 1.1
IDLE = 1000
IDLE_MB = 200.0
START_MS = 1000.0


def measure(run: Run) -> None:
    """RSS at some millions of messages stored and at five times as many."""
    shape = Shape(batch=1 if run.is_unbatched else 10, size=100, topics=1)
    scale = 1_000_000 if run.is_quick else 2_000_000
    with start_broker(fresh_dir("memory")).wait_ready() as broker:
        empty = rss_bytes(broker.pid)
        stopped = Wire(broker.port)
        stopped.connect()
        _subscribe_and_stop(stopped)
        first = _store(run, broker, shape, scale)
        second = _store(run, broker, shape, 4 * scale)
        stopped.socket.close()
    kind = "unbatched" if shape.batch == 1 else f"batches of {shape.batch}"
    run.add(
        [
            Figure(group=STORED_GROUP, name="after start", value=empty / MB, unit="MB"),
            Figure(group=STORED_GROUP, name=f"{scale:,} messages of 100 B ({kind})", value=first / MB, unit="MB"),
            Figure(group=STORED_GROUP, name=f"{5 * scale:,} messages of 100 B ({kind})", value=second / MB, unit="MB"),
            Figure(group=STORED_GROUP, name="ratio", value=second / first, unit="x", target=RATIO),
        ]
    )


def _subscribe_and_stop(wire: Wire) -> None:
    """A consumer that takes a thousand messages at most, acknowledges none and then reads nothing more."""
    wire.socket.sendall(
        encode(
            CommandType.SUBSCRIBE,
            pb.CommandSubscribe(
                topic="memory-0",
                subscription="stopped",
                subType=pb.CommandSubscribe.SubType.Exclusive,
                consumer_id=0,
                request_id=1,
            ),
        )
    )
    wire.wait(CommandType.SUCCESS)
    wire.socket.sendall(encode(CommandType.FLOW, pb.CommandFlow(consumer_id=0, messagePermits=1000)))


def _store(run: Run, broker: Process, shape: Shape, messages: int) -> int:
    """Publish, in runs that are over before the stopped connection's keep-alive matters; RSS once it is quiet."""
    left = messages // shape.batch
    while left:
        count = min(left, 100_000)
        run.load(
            Job(mode="publish", port=broker.port, pid=broker.pid, shape=shape, prefix="memory", entries=count, seconds=600)
        )
        left -= count
    time.sleep(SETTLE_SECONDS)
    return rss_bytes(broker.pid)


def measure_idle(run: Run) -> None:
    with start_broker(fresh_dir("idle")).wait_ready() as broker:
        before = rss_bytes(broker.pid)
        wires = []
        for _ in range(IDLE):
            wire = Wire(broker.port)
            wire.connect()
            wires.append(wire)
        time.sleep(0.5)
        after = rss_bytes(broker.pid)
        for wire in wires:
            wire.socket.close()
    each = (after - before) / IDLE / 1024
    run.add(
        [
            Figure(
                group=IDLE_GROUP,
                name=f"RSS with {IDLE:,} connections",
                value=after / MB,
                unit="MB",
                target=IDLE_MB,
                note=f"{before / MB:.0f} MB without them, {each:.1f} kB each",
            )
        ]
    )


def measure_start(run: Run) -> None:
    """From the start of the process, on an empty directory, to the ready line and to the first confirmed message."""
    ready, first = [], []
    for _ in range(3 if run.is_quick else 5):
        port = _free_port()
        with ThreadPoolExecutor(1) as client, start_broker(fresh_dir("start"), port=port) as broker:
            receipt = client.submit(_first_receipt, port)
            ready.append(broker.wait_ready().ready_seconds * 1000)
            first.append((receipt.result() - broker.started) * 1000)
    run.add(
        [_start_figure("to the first confirmed message", first), _start_figure("to the ready line (HTTP serves too)", ready)]
    )


def _start_figure(name: str, found: list[float]) -> Figure:
    middle = statistics.median(found)
    return Figure(group=START_GROUP, name=name, value=middle, unit="ms", low=min(found), high=max(found), target=START_MS)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _first_receipt(port: int) -> float:
    wire = _connect_when_open(port)
    wire.connect()
    wire.socket.sendall(encode(CommandType.PRODUCER, pb.CommandProducer(topic="first", producer_id=0, request_id=1)))
    wire.wait(CommandType.PRODUCER_SUCCESS)
    entry = Shape(batch=1, size=100, topics=1).entry()
    wire.socket.sendall(send_head(0, 0, 1, len(entry)) + entry)
    wire.wait(CommandType.SEND_RECEIPT)
    now = time.perf_counter()
    wire.socket.close()
    return now


def _connect_when_open(port: int) -> Wire:
    end = time.perf_counter() + 60
    while True:
        try:
            return Wire(port)
        except ConnectionRefusedError:
            if time.perf_counter() > end:
                raise
            time.sleep(0.002)
