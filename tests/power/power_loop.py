"""Power cuts of the whole broker: seeded load, the power goes in the middle of a file operation, reboot, check, again.

Broker, managed ledgers, the `local` ledger store and the metadata engine (on the file journal, since SQLite does its own I/O)
run in one thread on one disk that forgets every byte that was not synced. Clients speak the real binary protocol over
connections in memory. Small limits force ledger rollovers, cursor rollovers, checkpoints and trimming; a cut may hit any of
them and the recovery, too. After each reboot:

- every message with a receipt is there, at the position the receipt named, unless every subscription acknowledged it and
  the log was trimmed; nothing is there twice, nothing that was not sent; each producer's messages stand in the order sent;
- the dense index has no gap and an entry keeps its index;
- a message (or a part of a batch) whose acknowledgment got a receipt is not delivered again; what was not acknowledged is.

A seed repeats a run exactly. `--plant` breaks a promise on purpose; the exit code is 1 if any seed fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from braid.broker.config import BrokerConfig
from braid.errors import BraidError
from braid.ledger.backends import local
from braid.ledger.backends.local.ledgerfile import BlockWriter
from braid.managedledger.config import ManagedLedgerConfig
from braid.managedledger.cursor import ManagedCursor
from braid.model.ackset import acknowledged_up_to, from_words, to_words
from braid.model.positions import Position
from braid.runtime.env import Runtime
from braid.runtime.network import hand_over
from braid.runtime.threads import InlineThreads
from braid.testing import journal
from braid.testing.clock import ManualClock
from braid.testing.files import ForgetfulFiles
from braid.testing.raw_client import entry as make_entry
from braid.testing.raw_client import hello, id_of, position_of
from braid.web.config import StandaloneConfig, StorageConfig
from braid.web.standalone import Standalone
from braid.wire import requests
from braid.wire.client import ClientProtocol, Delivery
from braid.wire.commands import Command, signed64
from braid.wire.entries import entry_metadata, payload_offset
from braid.wire.types import AckType, CommandType, InitialPosition, SubType

TOPICS = ("persistent://public/default/kept", "persistent://public/default/trimmed", "persistent://public/default/batches")
SUBSCRIPTIONS = {"single": SubType.EXCLUSIVE, "shared": SubType.SHARED}
PRODUCERS = ("one", "two")
KEPT = TOPICS[0]
"""Has one more subscription, which never acknowledges anything."""
ROUNDS = 4
"""Cuts per seed."""
PLANTS = (
    "receipt-before-fsync",
    "metadata-before-fsync",
    "no-directory-sync",
    "checkpoint-before-file-sync",
    "ack-before-fsync",
)
LEDGERS = local.LocalSettings(
    group_bytes=4000,
    segment_bytes=8000,
    checkpoint_bytes=16000,
    checkpoint_seconds=3.0,
    buffer_bytes=16000,
    tail_bytes=600,
    block_bytes=500,
    open_files=6,
    reserve_bytes=0,
)
CONFIG = StandaloneConfig(
    broker=BrokerConfig(port=1, bind_address="memory"),
    storage=StorageConfig(data_dir="/data", session_timeout_seconds=3600),
    managed_ledger=ManagedLedgerConfig(
        max_entries_per_ledger=7, min_ledger_age_ms=0, max_entries_per_cursor_ledger=4, cache_bytes=4000
    ),
)


class Lost(AssertionError):
    """A promise is broken."""


def promise(holds: bool, text: str) -> None:
    if not holds:
        raise Lost(text)


# The machine: connections in memory, a disk that forgets, the broker on top.


class Wire(asyncio.Transport):
    """One end of a connection in memory: what is written arrives at the other end in a later loop turn."""

    def __init__(self, loop: asyncio.AbstractEventLoop, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._loop = loop
        self._protocol = protocol
        self._is_closed = False
        self._held: list[bytes] | None = None
        self.peer: Wire

    def write(self, data: Any) -> None:
        if not self._is_closed and data:
            self._loop.call_soon(self.peer._arrive, bytes(data))

    def writelines(self, pieces: Any) -> None:
        self.write(b"".join(pieces))

    def is_closing(self) -> bool:
        return self._is_closed

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Nothing piles up here."""

    def pause_reading(self) -> None:
        self._held = self._held or []

    def resume_reading(self) -> None:
        held, self._held = self._held or [], None
        for data in held:
            self._loop.call_soon(self._arrive, data)

    def close(self) -> None:
        for end in (self, self.peer):
            if not end._is_closed:
                end._is_closed = True
                self._loop.call_soon(end._protocol.connection_lost, None)

    abort = close

    def _arrive(self, data: bytes) -> None:
        if self._held is not None:
            self._held.append(data)
        elif not self._is_closed:
            hand_over(self._protocol, data)


class MemoryNetwork:
    """The network port of one machine; it has one listener."""

    host = "memory"
    port = 1

    def __init__(self) -> None:
        self._factory: Callable[[], Any] | None = None
        self.wires: list[Wire] = []

    async def listen(self, host: str, port: int, factory: Callable[[], Any]) -> Any:
        self._factory = factory
        return self

    def close(self) -> None:
        self._factory = None

    async def connect(self, host: str, port: int, factory: Callable[[], Any]) -> Any:
        if self._factory is None:
            raise ConnectionRefusedError("nobody listens")
        loop = asyncio.get_running_loop()
        near, far = Wire(loop, factory()), Wire(loop, self._factory())
        near.peer, far.peer = far, near
        self.wires.append(near)
        far._protocol.connection_made(far)
        near._protocol.connection_made(near)
        return near, near._protocol


class NoDirectorySync(ForgetfulFiles):
    """The planted bug "a new file's name is never made durable"."""

    def sync_dir(self, directory: Path) -> None:
        self.check_power()

    def power_cut(self) -> ForgetfulFiles:
        found = super().power_cut()
        found.__class__ = NoDirectorySync
        return found


class Machine(Standalone):
    """The product's own composition, with the file journal under the metadata engine and small ledger limits."""

    async def _open_store(self, group: str, name: str, **options: Any) -> Any:
        if group == "braid.metadata_stores":
            return await journal.open_store(self.runtime, path=options["path"], session_timeout=3600)
        return await local.open_store(self.runtime, path=options["path"], settings=LEDGERS, on_fatal=options["on_fatal"])


# The clients.


class Client(asyncio.Protocol):
    """A raw connection that answers its owner's requests and hands everything else to `told`."""

    def __init__(self, told: Callable[[Any], None]) -> None:
        self._protocol = ClientProtocol()
        self._told = told
        self._requests = 0
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._transport: Any = None
        self.is_closed = False

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def connection_lost(self, exc: BaseException | None) -> None:
        self.is_closed = True
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_exception(ConnectionError("the connection is gone"))
        self._waiting.clear()

    def data_received(self, data: bytes) -> None:
        for event in self._protocol.receive(data):
            if isinstance(event, Command):
                if event.type == CommandType.PING:
                    continue
                number = signed64(event.body.request_id) if "request_id" in event.body.DESCRIPTOR.fields_by_name else -1
                waiter = self._waiting.pop(number, None)
                if waiter is not None:
                    if not waiter.done():
                        waiter.set_result(event)
                    continue
            self._told(event)

    def send(self, frame: bytes) -> None:
        self._transport.write(frame)

    async def ask(self, build: Callable[[int], bytes]) -> Command:
        """Send a request and return its answer; ConnectionError if the connection ends first."""
        if self.is_closed:
            raise ConnectionError("the connection is gone")
        self._requests += 1
        answer = self._waiting[self._requests] = asyncio.get_running_loop().create_future()
        self.send(build(self._requests))
        return await answer  # type: ignore[no-any-return]


@dataclass
class Subscribed:
    """What one subscription was asked and promised."""

    attempted: set[Position] = field(default_factory=set)
    """Whole entries for which an acknowledgment was sent, answered or not."""
    promised: set[Position] = field(default_factory=set)
    partly: dict[Position, int] = field(default_factory=dict)
    """Open messages of batches whose partial acknowledgment got a receipt."""
    is_created: bool = False


@dataclass
class TopicTruth:
    """What the clients of one topic know."""

    sent: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    receipts: dict[Position, bytes] = field(default_factory=dict)
    index: dict[Position, int] = field(default_factory=dict)
    subscriptions: dict[str, Subscribed] = field(default_factory=dict)


@dataclass
class Outcome:
    """What one seed did."""

    seed: int
    cuts: int = 0
    boots_cut: int = 0
    """Cuts that hit a start before it was over."""
    sent: int = 0
    receipts: int = 0
    promised: int = 0
    checked: int = 0
    ledgers: int = 0
    failure: str = ""


class Life:
    """One seed: the truth kept by clients over all reboots."""

    def __init__(self, seed: int, disk: ForgetfulFiles) -> None:
        self.rng = Random(f"load-{seed}")
        self.outcome = Outcome(seed)
        self.disk = disk
        self.clock = ManualClock()
        self.topics = {topic: TopicTruth(subscriptions={name: Subscribed() for name in SUBSCRIPTIONS}) for topic in TOPICS}
        self.died: list[BaseException] = []

    async def boot(self, steps: int | None) -> None:
        """Start, check, work until the power goes (after so many file operations), and reboot the disk."""
        self.died = []
        if steps is not None:
            self.disk.cut_after(steps)
        network = MemoryNetwork()
        runtime = Runtime(clock=self.clock, random=self.rng, threads=InlineThreads(), files=self.disk, network=network)
        machine = Machine(CONFIG, runtime, on_fatal=self.died.append, with_http=False)
        is_up = False
        try:
            await machine.__aenter__()
            is_up = True
            await self._check(machine, network)
            if steps is not None:
                await self._work(machine, network)
        except (BraidError, OSError) as error:
            if not self.disk_is_off:
                raise Lost(f"the broker does not start or serve: {type(error).__name__}: {error}") from error
            self.outcome.boots_cut += not is_up
        if steps is None:
            await machine.__aexit__(None, None, None)
            return
        promise(self.disk_is_off, "the broker refused without a reason")
        await turns(30)  # what it still says must be true
        for wire in network.wires:
            wire.close()
        await turns(3)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await turns(10)
        self.outcome.cuts += 1
        self.disk = self.disk.power_cut()

    @property
    def disk_is_off(self) -> bool:
        try:
            self.disk.check_power()
        except OSError:
            return True
        return False

    async def _connect(self, network: MemoryNetwork, told: Callable[[Any], None]) -> Client:
        _, client = await network.connect("memory", 1, lambda: Client(told))
        client.send(hello("Braid-test"))
        return client  # type: ignore[no-any-return]

    # Work.

    async def _work(self, machine: Machine, network: MemoryNetwork) -> None:
        """Publish, receive and acknowledge until the power is gone."""
        keeper = await self._connect(network, lambda _event: None)
        await keeper.ask(lambda number: requests.subscribe(number, 1, KEPT, "keeper", SubType.EXCLUSIVE))
        producers = []
        for topic, truth in self.topics.items():
            for name in PRODUCERS:
                worker = Publisher(self, topic, truth, name)
                worker.client = await self._connect(network, worker.told)
                await worker.client.ask(lambda number, w=worker: requests.producer(number, 1, w.topic, w.name))  # type: ignore[misc]
                producers.append(worker)
        consumers = []
        for topic, truth in self.topics.items():
            for name, kind in SUBSCRIPTIONS.items():
                consumers.append(await self._consumer(network, topic, name, kind, truth.subscriptions[name]))
        for _ in range(2000):
            if self.disk_is_off:
                return
            draw = self.rng.random()
            if draw < 0.55:
                self.rng.choice(producers).publish()
            elif draw < 0.8:
                self.rng.choice(consumers).acknowledge()
            elif draw < 0.95:
                await turns(self.rng.randint(1, 6))
            else:
                await self.clock.advance(self.rng.choice((0.01, 0.3, 1.1)))
        promise(False, "the power was never cut; raise the load")

    async def _consumer(self, network: MemoryNetwork, topic: str, name: str, kind: SubType, kept: Subscribed) -> Acknowledger:
        worker = Acknowledger(self, topic, name, kept)
        worker.client = await self._connect(network, worker.told)
        answer = await worker.client.ask(
            lambda number: requests.subscribe(number, 1, topic, name, kind, "c", initial_position=InitialPosition.EARLIEST)
        )
        if answer.type == CommandType.SUCCESS:
            kept.is_created = True
        worker.client.send(requests.flow(1, 10_000))
        return worker

    # Checks.

    async def _check(self, machine: Machine, network: MemoryNetwork) -> None:
        """Hold the log against the receipts, then every subscription against its promises."""
        for topic, truth in self.topics.items():
            if not truth.sent:
                continue
            present = await self._check_log(machine, network, topic, truth)
            for name, kind in SUBSCRIPTIONS.items():
                kept = truth.subscriptions[name]
                was_created = kept.is_created
                worker = await self._consumer(network, topic, name, kind, kept)
                await self._quiet(worker.delivered)
                if was_created:
                    missing = set(present) - worker.delivered - kept.attempted
                    promise(not missing, f"{topic} {name}: {len(missing)} unacknowledged entries are not delivered: {missing}")
                await worker.client.ask(lambda number: requests.close_consumer(number, 1))

    async def _check_log(self, machine: Machine, network: MemoryNetwork, topic: str, truth: TopicTruth) -> list[Position]:
        received: list[Delivery] = []
        client = await self._connect(network, lambda event: received.append(event) if isinstance(event, Delivery) else None)
        await client.ask(
            lambda n: requests.subscribe(
                n, 1, topic, "check", SubType.EXCLUSIVE, "r", is_durable=False, start=id_of(Position(-1, -1))
            )
        )
        client.send(requests.flow(1, 100_000))
        await self._quiet(received)
        await client.ask(lambda number: requests.close_consumer(number, 1))
        found = {position_of(each.command.message_id): each for each in received}
        positions = list(found)
        promise(len(found) == len(received), f"{topic}: an entry was delivered twice to a fresh reader")
        promise(positions == sorted(positions), f"{topic}: positions do not ascend")
        self._check_receipts(topic, truth, found)
        self._check_producers(topic, truth, found)
        await self._check_index(machine, topic, truth, positions)
        self.outcome.checked += len(found)
        return positions

    def _check_receipts(self, topic: str, truth: TopicTruth, found: dict[Position, Delivery]) -> None:
        first = min(found, default=None)
        for position, payload in truth.receipts.items():
            delivery = found.get(position)
            if delivery is not None:
                promise(payload_of(delivery) == payload, f"{topic}: {position} holds other bytes than its receipt was for")
                continue
            promise(topic != KEPT, f"{topic}: {position} has a receipt and is gone")
            acked = all(position in each.attempted for each in truth.subscriptions.values() if each.is_created)
            is_oldest = first is None or position < first
            who = [name for name, each in truth.subscriptions.items() if position not in each.attempted]
            promise(
                acked and is_oldest, f"{topic}: {position} has a receipt and is gone (first {first}, unacknowledged by {who})"
            )

    def _check_producers(self, topic: str, truth: TopicTruth, found: dict[Position, Delivery]) -> None:
        last: dict[str, int] = defaultdict(lambda: -1)
        for position, delivery in found.items():
            metadata = entry_metadata(delivery.entry)
            number = signed64(metadata.sequence_id)
            name = metadata.producer_name
            promise(number < truth.sent[name], f"{topic}: {position} was never sent")
            promise(number > last[name], f"{topic}: message {number} of {name} at {position} follows {last[name]}")
            last[name] = number

    async def _check_index(self, machine: Machine, topic: str, truth: TopicTruth, positions: list[Position]) -> None:
        log = machine.service.topics[topic].log
        before = None
        at = log.first_position
        while entries := await log.read(at, 1000, 1 << 30):
            for each in entries:
                position = Position(each.ledger_id, each.entry_id)
                promise(before is None or each.index == before + each.messages, f"{topic}: the index has a gap at {position}")
                promise(truth.index.get(position, each.index) == each.index, f"{topic}: the index of {position} changed")
                truth.index[position] = before = each.index
            at = log.position_after(Position(entries[-1].ledger_id, entries[-1].entry_id))
        self.outcome.ledgers = max(self.outcome.ledgers, len({position.ledger_id for position in positions}))

    async def _quiet(self, received: Sized) -> None:
        """Until nothing more arrives: everything runs in this thread, so some turns without news are enough."""
        before = -1
        while len(received) > before:
            before = len(received)
            await turns(80)
        self.disk.check_power()  # a check that was cut short says nothing


class Publisher:
    """A producer that never waits for its receipts."""

    def __init__(self, life: Life, topic: str, truth: TopicTruth, name: str) -> None:
        self.life = life
        self.topic = topic
        self.truth = truth
        self.name = name
        self.client: Client
        self._sent: dict[int, bytes] = {}

    def publish(self) -> None:
        rng = self.life.rng
        if self.client.is_closed:
            return
        for _ in range(rng.randint(1, 5)):
            number = self.truth.sent[self.name]
            self.truth.sent[self.name] += 1
            self.life.outcome.sent += 1
            payload = f"{self.name}-{number}-".encode() + rng.randbytes(rng.choice((0, 10, 100, 400, 1500)))
            count = 1
            if self.topic == TOPICS[2] and rng.random() < 0.6:
                count = rng.randint(2, 5)
                made = make_entry(b"", number, producer_name=self.name, batch=[payload, *[b"x"] * (count - 1)])
            else:
                made = make_entry(payload, number, producer_name=self.name)
            self._sent[number] = made[payload_offset(made) :]
            self.client.send(requests.send(1, number, made, count))

    def told(self, event: Any) -> None:
        if isinstance(event, Command) and event.type == CommandType.SEND_RECEIPT:
            position = position_of(event.body.message_id)
            promise(position not in self.truth.receipts, f"{self.topic}: two receipts name {position}")
            self.truth.receipts[position] = self._sent.pop(signed64(event.body.sequence_id))
            self.life.outcome.receipts += 1


class Acknowledger:
    """A consumer that acknowledges some of what it got, always with a receipt."""

    def __init__(self, life: Life, topic: str, name: str, kept: Subscribed) -> None:
        self.life = life
        self.where = f"{topic} {name}"
        self.is_shared = name == "shared"
        self.kept = kept
        self.client: Client
        self.delivered: set[Position] = set()
        self._open: dict[Position, int] = {}
        self._sizes: dict[Position, int] = {}
        self._asked: dict[int, tuple[set[Position], dict[Position, int]]] = {}
        self._number = 1_000_000

    def told(self, event: Any) -> None:
        if isinstance(event, Delivery):
            position = position_of(event.command.message_id)
            count = max(entry_metadata(event.entry).num_messages_in_batch, 1)
            still_open = from_words(event.command.ack_set) if event.command.ack_set else (1 << count) - 1
            promise(position not in self.kept.promised, f"{self.where}: {position} came again although its ack had a receipt")
            promised = self.kept.partly.get(position, -1)
            promise(not still_open & ~promised, f"{self.where}: acknowledged messages of {position} came again")
            self.delivered.add(position)
            self._open[position] = still_open
            self._sizes[position] = count
        elif isinstance(event, Command) and event.type == CommandType.ACK_RESPONSE and not event.body.HasField("error"):
            whole, partly = self._asked.pop(signed64(event.body.request_id))
            self.kept.promised |= whole
            self.life.outcome.promised += len(whole) + len(partly)
            for position, mask in partly.items():
                self.kept.partly[position] = self.kept.partly.get(position, -1) & mask

    def acknowledge(self) -> None:
        """Some whole entries, parts of a batch, or everything up to an entry."""
        if not self._open or self.client.is_closed:
            return
        rng = self.life.rng
        self._number += 1
        whole: set[Position] = set()
        partly: dict[Position, int] = {}
        kind = AckType.INDIVIDUAL
        if not self.is_shared and rng.random() < 0.3:
            kind = AckType.CUMULATIVE
            end = rng.choice(sorted(self._open))
            whole = {position for position in self._open if position <= end}
            ids = [id_of(end)]
            size = self._sizes[end]
            if size > 1 and rng.random() < 0.7:
                mask = acknowledged_up_to(size, rng.randrange(size - 1))
                ids = [id_of(end, to_words(mask))]
                if self._open[end] & mask:
                    whole.discard(end)
                    partly[end] = self._open[end] & mask
        else:
            chosen = rng.sample(sorted(self._open), min(len(self._open), rng.randint(1, 6)))
            ids = []
            for position in chosen:
                mask = self._open[position]
                if mask.bit_count() > 1 and rng.random() < 0.7:
                    mask &= mask - 1
                    partly[position] = mask
                    ids.append(id_of(position, to_words(mask)))
                else:
                    whole.add(position)
                    ids.append(id_of(position))
        self.kept.attempted |= whole
        for position in whole:
            del self._open[position]
        self._open.update(partly)
        self._asked[self._number] = (whole, partly)
        self.client.send(requests.ack(1, ids, kind, self._number))


def payload_of(delivery: Delivery) -> bytes:
    return delivery.entry[payload_offset(delivery.entry) :]


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


# One seed, with or without a planted bug.


@contextmanager
def planted(plant: str) -> Iterator[None]:
    """Break a promise for the time of the context."""
    sync, flush = BlockWriter.sync, ManagedCursor.flush

    def no_sync(_writer: Any) -> None:
        """The checkpoint goes on as if the ledger files were durable."""

    async def no_flush(_cursor: Any) -> None:
        """The acknowledgment is confirmed as if the cursor were durable."""

    if plant == "checkpoint-before-file-sync":
        BlockWriter.sync = no_sync  # type: ignore[method-assign, assignment]
    elif plant == "ack-before-fsync":
        ManagedCursor.flush = no_flush  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        BlockWriter.sync, ManagedCursor.flush = sync, flush  # type: ignore[method-assign]


def run_seed(seed: int, plant: str = "") -> Outcome:
    """Several cuts, then a last check after the crash and one after an orderly stop; `Outcome.failure` says what broke."""
    early = {"receipt-before-fsync": "journal-", "metadata-before-fsync": "metadata.log"}.get(plant, "")
    disk_class = NoDirectorySync if plant == "no-directory-sync" else ForgetfulFiles
    rng = Random(f"cuts-{seed}")
    life = Life(seed, disk_class(Random(f"disk-{seed}"), early_receipt=early))

    async def live() -> None:
        broken: list[BaseException] = []
        asyncio.get_running_loop().set_exception_handler(
            lambda _loop, context: broken.append(context.get("exception") or Lost(context["message"]))
        )
        for number in range(ROUNDS):
            await life.boot(rng.randint(0, 60) if number and rng.random() < 0.3 else rng.randint(60, 700))
            for error in broken:
                if isinstance(error, Lost):
                    raise error
        for _ in range(2):
            await life.boot(None)
            for error in broken:
                if isinstance(error, Lost):
                    raise error

    with planted(plant):
        try:
            asyncio.run(live())
        except Lost as error:
            life.outcome.failure = str(error)
    return life.outcome


def main() -> int:
    """Run many seeds and print the sums."""
    parser = argparse.ArgumentParser(description="seeded power cuts of the whole broker")
    parser.add_argument("--cuts", type=int, default=200, help="seeds to run; each has several cuts")
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--plant", choices=PLANTS, default="")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    began = time.perf_counter()
    outcomes = []
    for seed in range(options.seed, options.seed + options.cuts):
        outcome = run_seed(seed, options.plant)
        outcomes.append(outcome)
        if outcome.failure:
            sys.stdout.write(f"seed {seed} FAILED: {outcome.failure}\n")
    summary: dict[str, Any] = {
        name: sum(getattr(each, name) for each in outcomes)
        for name in ("cuts", "boots_cut", "sent", "receipts", "promised", "checked")
    }
    summary = {
        "plant": options.plant,
        "seeds": len(outcomes),
        "failed_seeds": [each.seed for each in outcomes if each.failure],
        **summary,
        "most_ledgers_in_a_log": max(each.ledgers for each in outcomes),
        "seconds": round(time.perf_counter() - began, 1),
    }
    if options.json:
        sys.stdout.write(json.dumps(summary) + "\n")
    else:
        for key, value in summary.items():
            sys.stdout.write(f"{key.replace('_', ' '):28}{value}\n")
    return 1 if summary["failed_seeds"] else 0


if __name__ == "__main__":
    sys.exit(main())
