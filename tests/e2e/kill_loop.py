"""kill -9 under load: a real `braid standalone` process dies again and again while real clients publish and acknowledge.

Three processes besides this one: the broker; `produce` (the official client: several producers per topic, batching on and off,
sends always in flight); `consume` (the SDK: acknowledgments with receipts). What was acknowledged to a client is known only to
that client. After the last kill everything is read back from the earliest message, by the official client and by the SDK:

- every acknowledged message is there, under the message id its receipt named, with the bytes that were sent;
- per producer and topic the messages stand in the order they were sent; a message stands there twice only if it was
  unacknowledged at a kill (its client sent it again), and never on the topic with deduplication;
- every acknowledged message reached each subscription; one whose acknowledgment got its receipt never came again from a
  later broker process.

`--plant` runs a broken broker from this file instead, to show that the checks would notice. Exit code 0: all promises held.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from random import Random, SystemRandom
from typing import Any, TextIO

HERE = Path(__file__).resolve()
PLAIN_TOPICS = [f"persistent://public/default/kill-{number}" for number in range(4)]
DEDUP_TOPIC = "persistent://public/once/kill-dedup"
TOPICS = [*PLAIN_TOPICS, DEDUP_TOPIC]
LANES = [(topic, f"{topic.rpartition('/')[2]}-{kind}", kind == "batch") for topic in TOPICS for kind in ("single", "batch")]
"""(topic, producer name, batching)"""
SUBSCRIPTIONS = ("single", "shared")
MAX_PENDING = 500
IN_FLIGHT_SHARE = 0.9
"""Least share of kills that must hit sends in flight; otherwise the run shows too little."""
PLANTS = ("early-receipt", "reorder", "forgotten-acks")
BROKER_SETTINGS = {
    "BRAID__LEDGER__SEGMENT_BYTES": str(16 << 20),
    "BRAID__LEDGER__CHECKPOINT_BYTES": str(24 << 20),
    "BRAID__BROKER__RETENTION_MINUTES": "-1",
    "BRAID__BROKER__RETENTION_MB": "-1",
    "BRAID__MANAGED_LEDGER__MAX_ENTRIES_PER_LEDGER": "3000",
    "BRAID__MANAGED_LEDGER__MIN_LEDGER_AGE_MS": "0",
    "BRAID__MANAGED_LEDGER__MAX_ENTRIES_PER_CURSOR_LEDGER": "100",
}
MessagePlace = tuple[int, int, int]
"""Ledger, entry, index in the batch."""


def say(text: str, out: TextIO = sys.stdout) -> None:
    out.write(text + "\n")
    out.flush()


def payload(lane: str, number: int) -> bytes:
    """What message `number` of a lane holds: its name and bytes that follow from it."""
    head = f"{lane}|{number}|".encode()
    mixed = number * 2654435761 & 0xFFFFFFFF
    return head + struct.pack(">I", mixed) * (5 + mixed % 200)


def named(data: bytes) -> tuple[str, int]:
    """Lane and number of a message; raises ValueError if the bytes are not what was sent."""
    lane, number, _ = data.split(b"|", 2)
    if payload(lane.decode(), int(number)) != data:
        raise ValueError(f"the payload of {lane.decode()} {int(number)} is not what was sent")
    return lane.decode(), int(number)


class Board:
    """Counters shared by the processes: sent and acknowledged per lane."""

    def __init__(self, path: Path) -> None:
        self._size = 16 * len(LANES)
        if not path.exists():
            path.write_bytes(bytes(self._size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), self._size)

    def get(self, slot: int) -> int:
        return int(struct.unpack_from(">Q", self._map, 8 * slot)[0])

    def put(self, slot: int, value: int) -> None:
        struct.pack_into(">Q", self._map, 8 * slot, value)

    def sent(self) -> list[int]:
        return [self.get(2 * lane) for lane in range(len(LANES))]

    def acked(self) -> list[int]:
        return [self.get(2 * lane + 1) for lane in range(len(LANES))]


# The producing client process.


class Sender:
    """One producer of the official client, always with sends in flight."""

    def __init__(self, client: Any, board: Board, number: int, seed: int) -> None:
        topic, self.name, self.is_batching = LANES[number]
        self.board = board
        self.number = number
        self.rng = Random(f"{seed}-{number}")
        self.receipts: list[MessagePlace] = []
        self.problems: list[str] = []
        self.sent = 0
        self.drained = threading.Condition()
        self.producer = client.create_producer(
            topic,
            producer_name=self.name,
            send_timeout_millis=0,
            max_pending_messages=2 * MAX_PENDING,
            block_if_queue_full=True,
            batching_enabled=self.is_batching,
            batching_max_publish_delay_ms=2,
            batching_max_messages=50,
        )

    def run(self, stop: threading.Event) -> None:
        """Batches come in bursts; single messages follow each other closely, with some always unanswered."""
        window = MAX_PENDING
        while not stop.is_set():
            with self.drained:
                while self.sent - len(self.receipts) >= window and not stop.is_set():
                    self.drained.wait(1)
            for _ in range(self.rng.randint(1, 40 if self.is_batching else 8)):
                number, self.sent = self.sent, self.sent + 1
                self.board.put(2 * self.number, self.sent)
                self.producer.send_async(payload(self.name, number), lambda res, at, n=number: self.answered(n, res, at))
            if self.is_batching:
                stop.wait(self.rng.random() * 0.06)
            else:
                window = self.rng.choice((20, 50, 100))

    def answered(self, number: int, result: Any, place: Any) -> None:
        with self.drained:
            if str(result) != "Result.Ok":
                self.problems.append(f"{self.name} {number} failed: {result}")
            elif number != len(self.receipts):
                self.problems.append(f"{self.name}: receipt {number} came when {len(self.receipts)} was due")
            self.receipts.append((place.ledger_id(), place.entry_id(), place.batch_index()))
            self.board.put(2 * self.number + 1, len(self.receipts))
            self.drained.notify_all()

    def wait_for_all(self, seconds: float) -> None:
        self.producer.flush()
        with self.drained:
            if not self.drained.wait_for(lambda: len(self.receipts) == self.sent, seconds):
                self.problems.append(f"{self.name}: {self.sent - len(self.receipts)} sends were never answered")


def quiet_client(url: str) -> Any:
    import pulsar

    return pulsar.Client(url, operation_timeout_seconds=60, logger=pulsar.FileLogger(pulsar.LoggerLevel.Error, os.devnull))


def produce(url: str, folder: Path, seed: int) -> None:
    """Publish until SIGTERM, then wait for every receipt and write down what was acknowledged."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    board = Board(folder / "board")
    client = quiet_client(url)
    senders = [Sender(client, board, number, seed) for number in range(len(LANES))]
    threads = [threading.Thread(target=sender.run, args=(stop,), daemon=True) for sender in senders]
    for thread in threads:
        thread.start()
    say("running")
    while not stop.is_set():
        time.sleep(0.1)
    for thread in threads:
        thread.join()
    for sender in senders:
        sender.wait_for_all(60)
    result = {sender.name: (sender.receipts, sender.problems) for sender in senders}
    (folder / "produced.pickle").write_bytes(pickle.dumps(result))
    os._exit(0)  # the client's own threads have nothing left to do


# The acknowledging client process.


@dataclass
class Subscribed:
    """What one subscription was given and promised."""

    seen: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    promised: set[MessagePlace] = field(default_factory=set)
    """Acknowledged with a receipt."""
    problems: list[str] = field(default_factory=list)
    latest: float = 0.0


def place_of(message: Any) -> MessagePlace:
    return message.id.ledger_id, message.id.entry_id, message.id.batch_index


def watch_arrivals(consumer: Any, kept: Subscribed, where: str) -> None:
    """Look at each message the moment it arrives: behind the receipt on the wire, its broker knew of the acknowledgment."""
    queue = consumer.put

    def put(lane: Any, messages: list[Any]) -> None:
        for message in messages:
            if place_of(message) in kept.promised:
                kept.problems.append(
                    f"{where}: {message.payload[:30]!r} at {message.id} came again although its ack had a receipt"
                )
        queue(lane, messages)

    consumer.put = put


async def acknowledge_loop(consumer: Any, kept: Subscribed, rng: Random) -> None:
    from braid.errors import BraidError, Closed, DeadlineExceeded

    loop = asyncio.get_running_loop()
    while True:
        batch = []
        try:
            batch.append(await consumer.receive())
            while len(batch) < rng.randint(1, 200):
                batch.append(await consumer.receive(0.01))
        except DeadlineExceeded:
            pass
        except Closed:
            return
        kept.latest = loop.time()
        for message in batch:
            lane, number = named(message.payload)
            kept.seen[lane].add(number)
        try:
            if consumer.sub_type.name == "SHARED" or rng.random() < 0.5:
                chosen = [message for message in batch if rng.random() < 0.9] or batch[:1]
                await asyncio.gather(*(consumer.acknowledge(message, wait=True) for message in chosen))
            else:
                last = batch[-1]  # before it may stand newer ones, received before a reconnect
                chosen = [message for message in batch if place_of(message) <= place_of(last)]
                await consumer.acknowledge_cumulative(last, wait=True)
        except BraidError:
            continue  # no receipt, no promise
        kept.promised.update(place_of(message) for message in chosen)


async def consume(url: str, folder: Path, seed: int) -> None:
    """Receive and acknowledge until SIGTERM, then until nothing more comes."""
    from braid.client import ClientConfig, connect

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    kept = {(topic, name): Subscribed() for topic in TOPICS for name in SUBSCRIPTIONS}
    config = ClientConfig(backoff_max=0.5, receiver_queue=500)
    async with connect(url, config=config) as client, asyncio.TaskGroup() as group:
        consumers, tasks = [], []
        for number, (topic, name) in enumerate(kept):
            for copy in range(2 if name == "shared" else 1):
                kind: Any = "shared" if name == "shared" else "exclusive"
                consumer = await client.consumer(topic, name, type=kind, initial="earliest")
                consumers.append(consumer)
                rng = Random(f"{seed}-{number}-{copy}")
                where = f"{topic.rpartition('/')[2]}/{name}"
                watch_arrivals(consumer, kept[topic, name], where)
                tasks.append(group.create_task(acknowledge_loop(consumer, kept[topic, name], rng)))
        say("running")
        await stop.wait()
        quiet_at = loop.time() + 2
        while quiet_at > loop.time():
            await asyncio.sleep(quiet_at - loop.time())
            quiet_at = max(each.latest for each in kept.values()) + 2
        try:
            async with asyncio.timeout(20):
                for consumer in consumers:
                    await consumer.close()
                await asyncio.gather(*tasks)
        except TimeoutError:
            for task in tasks:
                if not task.done():
                    kept[TOPICS[0], SUBSCRIPTIONS[0]].problems.append(
                        f"an acknowledging consumer hangs: {task.get_stack()[-1]}"
                    )
                    task.cancel()
    result = {key: (dict(each.seen), len(each.promised), each.problems) for key, each in kept.items()}
    (folder / "consumed.pickle").write_bytes(pickle.dumps(result))


# Broken brokers, to show that the checks notice.


def run_planted(plant: str, arguments: list[str]) -> None:
    """`braid standalone` with one promise broken on purpose."""
    from braid.cli.main import main as run_braid
    from braid.ledger.backends.local import commit
    from braid.managedledger.cursor import ManagedCursor

    honest = commit.write_group
    held: list[Any] = []

    def early_receipt(journal: Any, items: Any, mark: bytes, from_reserve: bool = False) -> Any:
        """Confirm groups of entries before they are written: they go to the journal some groups later."""
        held.append(items)
        if any(item[1] < 0 for item in items):  # an operation: everything must be in the journal
            honest(journal, [item for group in held for item in group], mark)
            held.clear()
        elif len(held) > 5:
            honest(journal, held.pop(0), mark)
        runs: dict[Any, list[bytes]] = {}
        for owner, entry_id, head, body in items:
            if entry_id >= 0:
                runs.setdefault(owner, []).append(head + body)
        ops = [item[0] for item in items if item[1] < 0]
        sizes = [len(data) for run in runs.values() for data in run]
        return commit.Group(runs, ops, entries=len(sizes), length=sum(sizes), written=0)

    def reorder(journal: Any, items: Any, mark: bytes, from_reserve: bool = False) -> Any:
        """Swap the bodies of two neighbours now and then."""
        for at in range(len(items) - 1):
            (one, first, head, body), (two, second, next_head, next_body) = items[at], items[at + 1]
            if one is two and first >= 0 and second % 50 == 0 and b"-single|" in body and b"-single|" in next_body:
                items[at], items[at + 1] = (one, first, head, next_body), (two, second, next_head, body)
        return honest(journal, items, mark, from_reserve)

    async def flush(_cursor: Any) -> None:
        """An acknowledgment is confirmed before it is stored."""

    if plant == "early-receipt":
        commit.write_group = early_receipt
    elif plant == "reorder":
        commit.write_group = reorder
    else:
        ManagedCursor.flush = flush  # type: ignore[method-assign, assignment]
    sys.argv = ["braid", *arguments]
    run_braid()


# The conductor.


def end_with_parent(parent: int) -> None:
    """A client does not outlive the run it belongs to."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(2)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("localhost", 0))
        return int(sock.getsockname()[1])


class Broker:
    """The process that is killed."""

    def __init__(self, folder: Path, plant: str) -> None:
        self.folder = folder
        self.port, self.http_port = free_port(), free_port()
        self.url = f"pulsar://localhost:{self.port}"
        self._plant = plant
        self._log = (folder / "broker.log").open("a")
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> float:
        """Start it and wait for the ready line; returns the seconds that took."""
        head = (
            [str(Path(sys.executable).parent / "braid")]
            if not self._plant
            else [sys.executable, str(HERE), "broker", self._plant]
        )
        command = [*head, "standalone", "--data-dir", str(self.folder / "data"), "--port", str(self.port)]
        command += ["--http-port", str(self.http_port), "--log-level", "warning"]
        began = time.perf_counter()
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self._log, text=True, env={**os.environ, **BROKER_SETTINGS}
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.startswith("ready "):
            raise RuntimeError(f"the broker did not start; see {self.folder / 'broker.log'}")
        return time.perf_counter() - began

    def kill(self) -> None:
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(f"the broker ended by itself with {self._process.returncode}; see {self.folder / 'broker.log'}")
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def end(self) -> None:
        """Orderly, if it still runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.wait(60)
        self._log.close()

    def journal_bytes(self) -> int:
        return sum(path.stat().st_size for path in (self.folder / "data" / "ledgers" / "journal").glob("journal-*"))

    def admin(self, method: str, path: str, body: bytes = b"") -> None:
        request = urllib.request.Request(
            f"http://localhost:{self.http_port}/admin/v2/{path}", body, {"Content-Type": "application/json"}, method=method
        )
        with urllib.request.urlopen(request, timeout=10):
            pass

    def errors(self) -> list[str]:
        text = (self.folder / "broker.log").read_text()
        return [line for line in text.splitlines() if "Traceback" in line or " ERROR " in line or " CRITICAL " in line]


@dataclass
class Kill:
    """One kill, as the clients saw it."""

    journal: int
    in_flight: int
    """Unbatched messages handed to the client before the kill that the killed process never answered."""
    unacked: list[tuple[int, int]]
    """Per lane, the first message unacknowledged at the kill and the first one not yet sent."""
    restart: float = 0.0


@dataclass
class Result:
    """Everything the run shows."""

    seed: int
    plant: str
    kills: list[Kill] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    acknowledged: int = 0
    read_official: int = 0
    read_own: int = 0
    duplicates: int = 0
    promised_acks: int = 0
    seconds: float = 0.0

    @property
    def in_flight_kills(self) -> int:
        return sum(1 for kill in self.kills if kill.in_flight)

    def summary(self) -> dict[str, Any]:
        restarts = sorted(kill.restart for kill in self.kills)
        return {
            "seed": self.seed,
            "plant": self.plant,
            "kills": len(self.kills),
            "kills_with_sends_in_flight": self.in_flight_kills,
            "topics": len(TOPICS),
            "producers": len(LANES),
            "acknowledged": self.acknowledged,
            "read_back_official": self.read_official,
            "read_back_sdk": self.read_own,
            "copies_of_unacknowledged": self.duplicates,
            "acks_with_receipt": self.promised_acks,
            "restart_seconds": [round(restarts[0], 3), round(restarts[len(restarts) // 2], 3), round(restarts[-1], 3)],
            "journal_megabytes_at_most": round(max(kill.journal for kill in self.kills) / 1e6, 1),
            "restart_seconds_per_100_megabytes": round(self._slope() * 1e8, 3),
            "problems": len(self.problems),
            "seconds": round(self.seconds, 1),
        }

    def _slope(self) -> float:
        count = len(self.kills)
        x_mean = sum(kill.journal for kill in self.kills) / count
        y_mean = sum(kill.restart for kill in self.kills) / count
        spread = sum((kill.journal - x_mean) ** 2 for kill in self.kills)
        return sum((kill.journal - x_mean) * (kill.restart - y_mean) for kill in self.kills) / spread if spread else 0.0


def run_loop(kills: int, seed: int, plant: str, folder: Path) -> Result:
    """The whole loop in `folder`."""
    began = time.perf_counter()
    rng = Random(seed)
    result = Result(seed, plant)
    board = Board(folder / "board")
    broker = Broker(folder, plant)
    clients: list[subprocess.Popen[str]] = []
    try:
        broker.start()
        broker.admin("PUT", "namespaces/public/once")
        broker.admin("POST", "namespaces/public/once/deduplication", b"true")
        for role in ("produce", "consume"):
            command = [sys.executable, str(HERE), role, broker.url, str(folder), str(seed)]
            clients.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        for client in clients:
            assert client.stdout is not None
            if client.stdout.readline() != "running\n":
                raise RuntimeError("a client did not start")
        for _ in range(kills):
            result.kills.append(kill_once(broker, board, rng))
        time.sleep(0.5)
        for client in clients:
            client.terminate()
            client.wait(90)
        read_back(broker, folder, result)
        if result.in_flight_kills < int(kills * IN_FLIGHT_SHARE):
            result.problems.append(
                f"only {result.in_flight_kills} of {kills} kills hit sends in flight: the run shows too little"
            )
        for line in broker.errors():
            result.problems.append(f"the broker logged: {line}")
    finally:
        for client in clients:
            if client.poll() is None:
                client.kill()
                client.wait()
            if client.stdout is not None:
                client.stdout.close()
        broker.end()
    result.seconds = time.perf_counter() - began
    return result


def kill_once(broker: Broker, board: Board, rng: Random) -> Kill:
    """Wait for traffic, kill at a random moment at which sends are in flight, note what hung in the air, start again."""
    singles = [number for number, lane in enumerate(LANES) if not lane[2]]
    base = board.acked()
    deadline = time.perf_counter() + 60
    while any(now <= before for now, before in zip(board.acked(), base, strict=True)):
        if time.perf_counter() > deadline:
            raise RuntimeError("the producers make no progress")
        time.sleep(0.01)
    time.sleep(rng.random() * 0.8)
    deadline = time.perf_counter() + 2  # a busy machine may let the senders wait
    while True:
        sent, answered = board.sent(), board.acked()
        if any(sent[number] > answered[number] for number in singles) or time.perf_counter() > deadline:
            break
    broker.kill()
    acked = board.acked()
    while True:  # receipts that had left the broker are still being read
        time.sleep(0.05)
        if board.acked() == acked:
            break
        acked = board.acked()
    in_flight = sum(max(0, sent[number] - acked[number]) for number in singles)
    kill = Kill(broker.journal_bytes(), in_flight, list(zip(acked, board.sent(), strict=True)))
    kill.restart = broker.start()
    return kill


def read_back(broker: Broker, folder: Path, result: Result) -> None:
    """Hold what the broker has against what the clients were told."""
    produced = pickle.loads((folder / "produced.pickle").read_bytes())
    consumed = pickle.loads((folder / "consumed.pickle").read_bytes())
    for name, (receipts, problems) in produced.items():
        result.problems += problems
        result.acknowledged += len(receipts)
        for (topic, subscription), (seen, _promised, _problems) in consumed.items():
            if topic.endswith("/" + name.rpartition("-")[0]):
                missing = set(range(len(receipts))) - seen.get(name, set())
                if missing:
                    result.problems.append(
                        f"{name}: {len(missing)} messages never reached {subscription}: {sorted(missing)[:5]}"
                    )
    for _seen, promised, problems in consumed.values():
        result.promised_acks += promised
        result.problems += problems
    for topic in TOPICS:
        official = read_official(broker.url, topic)
        own = asyncio.run(read_own(broker.url, topic, len(official)))
        result.read_official += len(official)
        result.read_own += len(own)
        if own != official:
            result.problems.append(f"{topic}: the SDK and the official client read different things")
        check_topic(topic, official, produced, result)


def read_official(url: str, topic: str) -> list[tuple[MessagePlace, bytes]]:
    import pulsar

    client = quiet_client(url)
    reader = client.create_reader(topic, pulsar.MessageId.earliest, receiver_queue_size=5000)
    found = []
    while reader.has_message_available():
        message = reader.read_next(10_000)
        at = message.message_id()
        found.append(((at.ledger_id(), at.entry_id(), at.batch_index()), message.data()))
    client.close()
    return found


async def read_own(url: str, topic: str, expected: int) -> list[tuple[MessagePlace, bytes]]:
    """One more than expected is waited for, briefly: there must be none."""
    from braid.client import connect
    from braid.errors import DeadlineExceeded

    found: list[tuple[MessagePlace, bytes]] = []
    async with connect(url) as client:
        consumer = await client.consumer(topic, "read-back", initial="earliest")
        try:
            while True:
                message = await consumer.receive(10 if len(found) < expected else 0.2)
                found.append(((message.id.ledger_id, message.id.entry_id, message.id.batch_index), message.payload))
        except DeadlineExceeded:
            return found


def check_topic(topic: str, found: list[tuple[MessagePlace, bytes]], produced: dict[str, Any], result: Result) -> None:
    """Loss, order, duplicates, ids of one topic."""
    problems = result.problems
    places = [place for place, _ in found]
    if places != sorted(set(places)):
        problems.append(f"{topic}: the message ids do not ascend")
    streams: dict[str, list[int]] = defaultdict(list)
    at: dict[tuple[str, int], list[MessagePlace]] = defaultdict(list)
    for place, data in found:
        try:
            lane, number = named(data)
        except ValueError as error:
            problems.append(f"{topic} at {place}: {error}")
            continue
        streams[lane].append(number)
        at[lane, number].append(place)
    for number, (lane_topic, name, _) in enumerate(LANES):
        if lane_topic != topic:
            continue
        receipts = produced[name][0]
        for message, place in enumerate(receipts):
            if not at[name, message]:
                problems.append(f"LOST: {name} {message} was acknowledged at {place} and is not there")
            elif place[0] >= 0 and place not in at[name, message]:
                problems.append(f"{name} {message} was acknowledged at {place} but stands at {at[name, message]}")
        unacked = [kill.unacked[number] for kill in result.kills]
        check_order(name, streams[name], unacked if topic != DEDUP_TOPIC else [], result)


def check_order(name: str, stream: list[int], unacked: list[tuple[int, int]], result: Result) -> None:
    """Each message follows its predecessor; a step back is a client that sends its unacknowledged messages again."""
    highest = last = -1
    for number in stream:
        if number <= highest:
            result.duplicates += 1
            if not any(first <= number < end for first, end in unacked):
                result.problems.append(f"DUPLICATE: {name} {number} stands twice and was not unacknowledged at any kill")
            is_in_order = number == last + 1 or any(first == number for first, _ in unacked)
        else:
            is_in_order = number == highest + 1
        if not is_in_order:
            result.problems.append(f"ORDER: {name} {number} follows {last}")
        highest, last = max(highest, number), number


def main() -> int:
    """Parse, run, print."""
    roles = {"produce": produce, "consume": lambda *args: asyncio.run(consume(*args))}
    if len(sys.argv) > 1 and sys.argv[1] in roles:
        threading.Thread(target=end_with_parent, args=(os.getppid(),), daemon=True).start()
        roles[sys.argv[1]](sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
        return 0
    if len(sys.argv) > 1 and sys.argv[1] == "broker":
        run_planted(sys.argv[2], sys.argv[3:])
        return 0
    parser = argparse.ArgumentParser(description="kill -9 a broker under load and look for lost or reordered messages")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--plant", choices=PLANTS, default="", help="run a broker that breaks a promise")
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object")
    parser.add_argument("--folder", type=Path, default=None, help="work here and keep everything")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))  # so that the processes below are ended, too
    seed = SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    say(f"seed {seed}", sys.stderr)
    with tempfile.TemporaryDirectory(prefix="braid-kill-") as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        result = run_loop(options.kills, seed, options.plant, folder)
    summary = result.summary()
    if options.json:
        say(json.dumps({**summary, "first_problems": result.problems[:10]}))
    else:
        for key, value in summary.items():
            say(f"{key.replace('_', ' '):36}{value}")
        for problem in result.problems[:50]:
            say(f"PROBLEM {problem}")
    return 1 if result.problems else 0


if __name__ == "__main__":
    sys.exit(main())
