"""Structure-aware fuzzing of the binary protocol: a broker on a real socket, one bad peer after the other, one good client.

An input is one connection's bytes: a valid conversation of random commands, then broken in a random way (`mutate`), or a case
whose answer the protocol sheet fixes (`CASES`, section 1.9). After each input: the peer was closed or still gets PONG for PING,
a case got exactly its answer, nothing was logged with a traceback. Meanwhile a well-behaved client publishes, receives and
acknowledges, and everything it does must work; half-open and slow connections hang around; memory stays bounded.

Everything follows from the seed. A failing input is saved; `--replay FILE` sends it again to a fresh broker.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random, SystemRandom
from typing import Any

import msgspec
from google.protobuf.descriptor import FieldDescriptor

from braid.broker.config import BrokerConfig
from braid.managedledger.config import ManagedLedgerConfig
from braid.model.names import TopicName
from braid.testing.broker import InProcessBroker
from braid.testing.raw_client import RawClient, entry, hello, id_of, payload_of, position_of
from braid.web.config import StandaloneConfig
from braid.wire import messages, requests
from braid.wire.commands import FIELDS, encode
from braid.wire.replies import PING
from braid.wire.types import FROM_CLIENT, CommandType, InitialPosition, SubType
from braid.wire.varints import varint

MAX_MESSAGE = 64 << 10
CONFIG = StandaloneConfig(
    broker=BrokerConfig(port=0, max_message_size=MAX_MESSAGE, keep_alive_seconds=1, max_partitions=4),
    managed_ledger=ManagedLedgerConfig(max_entries_per_ledger=2000, min_ledger_age_ms=0),
)
GOOD_TOPIC = "persistent://public/default/good"
NAMES = [f"persistent://public/default/fuzz-{number}" for number in range(6)] + [
    "",
    "/",
    "fuzz-short",
    "persistent://public/default/",
    "persistent://public//x",
    "persistent://no-such/tenant/x",
    "nonsense://public/default/x",
    "non-persistent://public/default/x",
    "topic://public/default/x",
    "persistent://public/default/a/b/c",
    "persistent://public/default/x-partition-7",
    "persistent://public/default/x-partition--1",
    "persistent://public/default/\x00",
    "persistent://public/default/" + "y" * 5000,
    "../../etc/passwd",
    "persistent://public/default/ü💣",
]
NUMBERS = [0, 1, 2, 3, 7, 127, 128, 1 << 31, (1 << 31) - 1, (1 << 32) - 1, 1 << 53, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
PONG_SECONDS = 5.0
KEEP_INPUTS = 20
CLEAN_EVERY = 1000
GROWTH_BYTES = 200 << 20
HALF_OPEN = 30
HALF_OPEN_SECONDS = 60.0
"""By then one of them must be closed; the broker's keep-alive is much shorter."""

Pieces = list[bytes]


class Input(msgspec.Struct):
    """One connection's bytes, in the pieces they are written in, and what must come of it."""

    number: int
    kind: str
    pieces: Pieces
    expect: str = "any"
    """close, alive, or the name of the command that answers."""
    error: int = -1
    """Error code the answer must carry."""


# Making valid commands, filled at random by their descriptors.


def random_message(rng: Random, cls: Any, depth: int = 0) -> Any:
    """A message of this class: required fields always, others often; numbers and texts from the lists above."""
    body = cls()
    for field in cls.DESCRIPTOR.fields:
        required = field.is_required
        if not required and rng.random() < (0.5 if depth == 0 else 0.8):
            continue
        count = rng.choice((0, 1, 2, 5)) if field.is_repeated else 1
        for _ in range(count):
            value = random_value(rng, field, depth)
            if value is None:
                continue
            if field.type == FieldDescriptor.TYPE_MESSAGE:
                target = getattr(body, field.name).add() if field.is_repeated else getattr(body, field.name)
                target.CopyFrom(value)
                target.SetInParent()
            elif field.is_repeated:
                getattr(body, field.name).append(value)
            else:
                setattr(body, field.name, value)
    return body


def random_value(rng: Random, field: Any, depth: int) -> Any:  # noqa: PLR0911 - one per kind of field
    kind = field.type
    if kind == FieldDescriptor.TYPE_MESSAGE:
        if depth > 2:
            return None
        return random_message(rng, field.message_type._concrete_class, depth + 1)
    if kind == FieldDescriptor.TYPE_STRING:
        return (
            rng.choice(NAMES) if "topic" in field.name.lower() else rng.choice(["", "a", "sub", "name", "x" * 300, "\x00", "é"])
        )
    if kind == FieldDescriptor.TYPE_BYTES:
        return rng.randbytes(rng.choice((0, 1, 8, 100)))
    if kind == FieldDescriptor.TYPE_BOOL:
        return rng.random() < 0.5
    if kind == FieldDescriptor.TYPE_ENUM:
        return rng.choice(field.enum_type.values).number
    if kind in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return rng.random()
    value = rng.choice(NUMBERS[:6] if rng.random() < 0.6 else NUMBERS)
    if kind in (FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_SINT32, FieldDescriptor.TYPE_SFIXED32):
        return value % (1 << 31) * rng.choice((1, -1))
    if kind in (FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_FIXED32):
        return value % (1 << 32)
    if kind in (FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_SINT64, FieldDescriptor.TYPE_SFIXED64):
        return value % (1 << 63) * rng.choice((1, -1))
    return value


def command_class(kind: int) -> Any:
    return type(getattr(messages.BaseCommand(), FIELDS[kind]))


CLIENT_COMMANDS = sorted(int(kind) for kind in FROM_CLIENT if kind in FIELDS and kind != CommandType.CONNECT)


def random_entry(rng: Random) -> tuple[bytes, int]:
    """An entry and its number of messages."""
    if rng.random() < 0.3:
        count = rng.randint(1, 5)
        return entry(b"", rng.randrange(100), batch=[rng.randbytes(10)] * count), count
    return entry(rng.randbytes(rng.choice((0, 10, 1000))), rng.randrange(100)), 1


def random_frame(rng: Random) -> bytes:
    """One valid frame of a command a client may send."""
    draw = rng.random()
    if draw < 0.25:
        made, count = random_entry(rng)
        return requests.send(rng.choice((1, 2)), rng.choice(NUMBERS[:5]), made, count)
    kind = rng.choice(CLIENT_COMMANDS)
    if kind == CommandType.SEND:
        return PING
    return encode(kind, random_message(rng, command_class(kind)))


def conversation(rng: Random) -> list[bytes]:
    """CONNECT, usually a producer and a consumer, then anything."""
    frames = [hello(rng.choice(("Pulsar-CPP-v4.2.0", "Pulsar-Java-v4.0.0", "x")), rng.choice((1, 5, 12, 19, 21, 1000)))]
    topic = rng.choice(NAMES[:6])
    if rng.random() < 0.7:
        frames.append(requests.producer(1, 1, topic, rng.choice((None, "p", "q"))))
    if rng.random() < 0.7:
        kind = rng.choice((SubType.EXCLUSIVE, SubType.SHARED, SubType.FAILOVER))
        frames.append(requests.subscribe(2, 1, topic, rng.choice(("s", "t")), kind, initial_position=InitialPosition.EARLIEST))
        frames.append(requests.flow(1, rng.choice((1, 10, 1000, (1 << 32) - 1))))
    frames += [random_frame(rng) for _ in range(rng.randint(1, 12))]
    return frames


# Breaking them.


def mutate(rng: Random, frames: list[bytes]) -> tuple[str, list[bytes]]:
    """Break one frame (or the order of frames); returns what was done."""
    name = rng.choice(sorted(MUTATIONS))
    at = rng.randrange(len(frames))
    return name, MUTATIONS[name](rng, list(frames), at)


def _with(frames: list[bytes], at: int, frame: bytes) -> list[bytes]:
    frames[at] = frame
    return frames


def _flip(rng: Random, frames: list[bytes], at: int) -> list[bytes]:
    broken = bytearray(frames[at])
    for _ in range(rng.randint(1, 4)):
        broken[rng.randrange(len(broken))] ^= 1 << rng.randrange(8)
    return _with(frames, at, bytes(broken))


def _overwrite(rng: Random, frames: list[bytes], at: int) -> list[bytes]:
    frame = frames[at]
    start = rng.randrange(len(frame))
    return _with(frames, at, frame[:start] + rng.randbytes(rng.randint(1, 8)) + frame[start:][rng.randint(0, 8) :])


def _cut(rng: Random, frames: list[bytes], at: int) -> list[bytes]:
    return [*frames[:at], frames[at][: rng.randrange(len(frames[at]))]]


def _length(rng: Random, frames: list[bytes], at: int) -> list[bytes]:
    frame = frames[at]
    size = rng.choice((0, 1, 3, 4, 7, len(frame), len(frame) - 3, MAX_MESSAGE + 10240, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF))
    packed = (size & 0xFFFFFFFF).to_bytes(4, "big")
    return _with(frames, at, packed + frame[4:] if rng.random() < 0.5 else frame[:4] + packed + frame[8:])


def _framed(raw: bytes, payload: bytes = b"") -> bytes:
    return (len(raw) + 4 + len(payload)).to_bytes(4, "big") + len(raw).to_bytes(4, "big") + raw + payload


def _unknown(rng: Random, frames: list[bytes], at: int) -> list[bytes]:
    number = rng.choice((0, 1, 41, 49, 69, 82, 127, 128, 300, 999, 1000, 1 << 31, (1 << 64) - 1))
    return _with(frames, at, _framed(b"\x08" + varint(number) + rng.randbytes(rng.choice((0, 3, 20)))))


def _no_required(rng: Random, frames: list[bytes], at: int) -> list[bytes]:
    kind = rng.choice(CLIENT_COMMANDS)
    body = random_message(rng, command_class(kind))
    for field in body.DESCRIPTOR.fields:
        if rng.random() < 0.5:
            body.ClearField(field.name)
    raw = body.SerializePartialToString()
    return _with(frames, at, _framed(b"\x08" + varint(kind) + varint(kind << 3 | 2) + varint(len(raw)) + raw))


def _no_body(rng: Random, frames: list[bytes], at: int) -> list[bytes]:
    return _with(frames, at, _framed(b"\x08" + varint(rng.choice(CLIENT_COMMANDS))))


def _wrong_wire_type(rng: Random, frames: list[bytes], at: int) -> list[bytes]:
    kind = rng.choice(CLIENT_COMMANDS)
    field = rng.randint(1, 12)
    raw = varint(field << 3 | rng.randrange(8)) + varint(rng.choice(NUMBERS)) + rng.randbytes(rng.randint(0, 12))
    return _with(frames, at, _framed(b"\x08" + varint(kind) + varint(kind << 3 | 2) + varint(len(raw)) + raw))


def _bad_text(rng: Random, frames: list[bytes], at: int) -> list[bytes]:
    """Invalid UTF-8 where a text is."""
    frame = requests.subscribe(9, 3, "persistent://public/default/XXXX", "XXXX", SubType.SHARED, "XXXX")
    return _with(frames, at, frame.replace(b"XXXX", rng.choice((b"\xff\xfe\xfd\xfc", b"\xc3\x28ab", b"\xed\xa0\x80a"))))


def _giant_text(rng: Random, frames: list[bytes], at: int) -> list[bytes]:
    size = rng.choice((10_000, MAX_MESSAGE, MAX_MESSAGE + 9000))
    return _with(frames, at, requests.producer(9, 3, "persistent://public/default/" + "z" * size))


def _payload_on_command(rng: Random, frames: list[bytes], at: int) -> list[bytes]:
    frame = frames[at]
    size = int.from_bytes(frame[4:8], "big")
    return _with(frames, at, _framed(frame[8 : 8 + size], rng.randbytes(rng.randint(1, 50))))


def _broken_entry(rng: Random, frames: list[bytes], at: int) -> list[bytes]:
    made, count = random_entry(rng)
    broken = bytearray(made)
    broken[rng.randrange(len(broken))] ^= 1 << rng.randrange(8)
    return _with(frames, at, requests.send(1, 5, rng.choice((bytes(broken), made[: rng.randrange(len(made))], b"")), count))


def _server_command(rng: Random, frames: list[bytes], at: int) -> list[bytes]:
    kind = rng.choice(sorted(int(kind) for kind in FIELDS if kind not in FROM_CLIENT))
    return _with(frames, at, encode(kind, random_message(rng, command_class(kind))))


MUTATIONS: dict[str, Callable[[Random, list[bytes], int], list[bytes]]] = {
    "nothing": lambda rng, frames, at: frames,
    "flip bits": _flip,
    "overwrite": _overwrite,
    "cut": _cut,
    "length": _length,
    "unknown command": _unknown,
    "no required field": _no_required,
    "no sub-message": _no_body,
    "wrong wire type": _wrong_wire_type,
    "invalid UTF-8": _bad_text,
    "giant text": _giant_text,
    "payload on a command": _payload_on_command,
    "broken entry": _broken_entry,
    "server's command": _server_command,
    "before CONNECT": lambda rng, frames, at: frames[1:] or frames,
    "twice": lambda rng, frames, at: frames[: at + 1] + frames[at:],
    "shuffled": lambda rng, frames, at: [frames[0], *rng.sample(frames[1:], len(frames) - 1)],
    "noise": lambda rng, frames, at: [rng.randbytes(rng.randint(1, 300))],
    "HTTP": lambda rng, frames, at: [b"GET /admin/v2/clusters HTTP/1.1\r\nHost: x\r\n\r\n"],
}


# Cases whose answer is fixed.


def case(rng: Random, number: int) -> Input:
    """One input of protocol sheet 1.9 with the reaction it names."""
    topic = f"persistent://public/default/case-{rng.randrange(4)}"
    odd = rng.choice(NUMBERS[3:12])
    made, count = random_entry(rng)
    broken = bytearray(made)
    broken[3] ^= 0x55
    producer = requests.producer(1, 1, topic)
    unknown = f"no-{rng.randrange(100)}"
    bad_name = rng.choice(("persistent://a", "nonsense://public/default/x", "persistent://public/default/"))
    cases: list[tuple[str, list[bytes], str, int]] = [
        ("command before CONNECT", [requests.lookup(1, topic)], "close", -1),
        ("SEND before CONNECT", [requests.send(1, 1, made, count)], "close", -1),
        ("second CONNECT", [hello(), hello()], "close", -1),
        ("frame over the limit", [hello(), (MAX_MESSAGE + 10240).to_bytes(4, "big") + b"\0\0\0\5abcde"], "close", -1),
        ("negative length", [hello(), b"\xff\xff\xff\xfe\0\0\0\5abcde"], "close", -1),
        (
            "command longer than its frame",
            [hello(), (20).to_bytes(4, "big") + (17).to_bytes(4, "big") + bytes(16)],
            "close",
            -1,
        ),
        ("not protobuf", [hello(), _framed(b"\x08\x04\x22\x05\xff\xff\xff\xff\xff")], "close", -1),
        ("no sub-message", [hello(), _framed(b"\x08\x05")], "close", -1),
        ("server's command", [hello(), encode(CommandType.SUCCESS, messages.CommandSuccess(request_id=1))], "close", -1),
        ("SEND without producer", [hello(), requests.send(odd, 0, made, count)], "close", -1),
        ("FLOW of nothing", [hello(), requests.flow(1, 0)], "close", -1),
        ("FLOW for nobody", [hello(), requests.flow(odd, 5)], "alive", -1),
        ("ACK for nobody", [hello(), requests.ack(odd, [id_of(position)])], "alive", -1),
        ("redeliver for nobody", [hello(), requests.redeliver(odd)], "alive", -1),
        ("UNSUBSCRIBE for nobody", [hello(), requests.unsubscribe(1, odd)], "ERROR", 1),
        ("SEEK for nobody", [hello(), requests.seek(1, odd, 5)], "ERROR", 1),
        ("last id for nobody", [hello(), requests.get_last_message_id(1, odd)], "ERROR", 1),
        ("CLOSE_PRODUCER for nobody", [hello(), requests.close_producer(1, odd)], "SUCCESS", -1),
        ("CLOSE_CONSUMER for nobody", [hello(), requests.close_consumer(1, odd)], "SUCCESS", -1),
        ("bad topic, PRODUCER", [hello(), requests.producer(1, 1, bad_name)], "ERROR", -1),
        ("bad topic, SUBSCRIBE", [hello(), requests.subscribe(1, 1, bad_name, "s", SubType.SHARED)], "ERROR", -1),
        ("bad topic, LOOKUP", [hello(), requests.lookup(1, bad_name)], "LOOKUP_RESPONSE", -1),
        ("bad topic, partitions", [hello(), requests.partitioned_metadata(1, bad_name)], "PARTITIONED_METADATA_RESPONSE", -1),
        ("bad checksum", [hello(), producer, requests.send(1, 0, bytes(broken), count)], "SEND_ERROR", 9),
        ("wrong message count", [hello(), producer, requests.send(1, 0, made, count + 1)], "SEND_ERROR", -1),
        ("no such namespace", [hello(), requests.producer(1, 1, f"persistent://public/{unknown}/x")], "ERROR", -1),
        ("empty subscription", [hello(), requests.subscribe(1, 1, topic, "", SubType.SHARED)], "ERROR", -1),
        ("unknown command", [hello(), _framed(b"\x08\x45")], "alive", -1),
    ]
    name, frames, expect, code = rng.choice(cases)
    pause = 2 if producer in frames else 0
    return Input(number, f"case: {name}", split(rng, frames, pause), expect, code)


position = position_of(messages.MessageIdData(ledgerId=1 << 40, entryId=3))


def split(rng: Random, frames: list[bytes], pause: int = 0) -> Pieces:
    """All at once, frame by frame, at every byte, or anywhere; an empty piece, put behind `pause` frames, waits for answers."""
    if pause:
        return [b"".join(frames[:pause]), b"", *(split(rng, frames[pause:]) if frames[pause:] else [])]
    draw = rng.random()
    data = b"".join(frames)
    if draw < 0.5:
        return [data]
    if draw < 0.7:
        return [frame for frame in frames if frame]
    if draw < 0.75 and len(data) < 600:
        return [data[at : at + 1] for at in range(len(data))]
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randint(1, 6)))
    return [piece for piece in (data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)) if piece]


def make_input(seed: int, number: int) -> Input:
    rng = Random(f"{seed}-{number}")
    if rng.random() < 0.3:
        return case(rng, number)
    name, frames = mutate(rng, conversation(rng))
    if rng.random() < 0.2:
        other, frames = mutate(rng, [frame for frame in frames if frame] or [PING])
        name = f"{name} + {other}"
    return Input(number, name, split(rng, frames or [PING], pause=4 if rng.random() < 0.7 else 0))


# Sending them.


class Watch(logging.Handler):
    """Everything the broker logs; tracebacks are remembered."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.tracebacks: list[str] = []
        self.drops: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info or "Traceback" in text or "exception" in text.lower():
            self.tracebacks.append(logging.Formatter().format(record))
        if text.startswith("dropping "):
            self.drops[text.split(": ", 1)[1]] += 1

    def failed(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """The loop's own reports: a task or callback that raised."""
        self.tracebacks.append(f"{context.get('message')}: {context.get('exception')!r}")


class Peer(asyncio.Protocol):
    """A connection without manners: writes what it is told and keeps what comes back."""

    def __init__(self) -> None:
        self.received = bytearray()
        self.is_closed = False
        self.news = asyncio.Event()
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += data
        self.news.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed = True
        self.news.set()

    def commands(self) -> list[Any]:
        """What the broker said, as (type, message)."""
        found, at = [], 0
        while at + 8 <= len(self.received):
            total = int.from_bytes(self.received[at : at + 4], "big")
            size = int.from_bytes(self.received[at + 4 : at + 8], "big")
            if at + 4 + total > len(self.received):
                break
            base = messages.BaseCommand.FromString(bytes(self.received[at + 8 : at + 8 + size]))
            found.append((base.type, getattr(base, FIELDS[base.type])))
            at += 4 + total
        return found


class Problem(AssertionError):
    """The broker did not do what it must."""


class Fuzzer:
    """One broker under fire."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.watch = Watch()
        self.inputs: list[Input] = []
        self.count = 0
        self.closed = 0
        self.kinds: Counter[str] = Counter()
        self.good_messages = 0
        self.growth = 0
        self.broker: InProcessBroker
        self._half_open: list[Peer] = []
        self.half_open_closed = 0

    async def run(self, seconds: float, count: int | None = None, replay: list[Input] | None = None) -> None:
        """Fire until the time is over, or the count is reached, or everything was replayed."""
        asyncio.get_running_loop().set_exception_handler(self.watch.failed)
        root = logging.getLogger()
        level = root.level
        root.addHandler(self.watch)
        root.setLevel(logging.INFO)
        try:
            async with InProcessBroker(config=CONFIG, with_http=False) as self.broker, asyncio.TaskGroup() as group:
                good = group.create_task(self._good())
                try:
                    await (self._replay(replay) if replay else self._fire(seconds, count))
                    await self._end()
                finally:
                    good.cancel()
        except BaseExceptionGroup as broken:
            raise broken.exceptions[0] from None
        finally:
            root.removeHandler(self.watch)
            root.setLevel(level)

    async def _fire(self, seconds: float, count: int | None) -> None:
        end = time.perf_counter() + seconds
        base = 0
        while time.perf_counter() < end and (count is None or self.count < count):
            one = make_input(self.seed, self.count)
            await self._send(one)
            if self.count % 100 == 0:
                await self._loris()
            if self.count % CLEAN_EVERY == 0:
                await self._clean()
                now = rss()
                base = base or now
                self.growth = max(self.growth, now - base)
                if now - base > GROWTH_BYTES:
                    raise Problem(f"the process grew by {(now - base) >> 20} MB in {self.count} inputs")

    async def _replay(self, inputs: list[Input]) -> None:
        for one in inputs:
            await self._send(one)

    async def _send(self, one: Input) -> None:
        self.inputs = [*self.inputs[1 - KEEP_INPUTS :], one]
        self.count += 1
        self.kinds[one.kind] += 1
        peer = await self._connect()
        for piece in one.pieces:
            if peer.is_closed:
                break
            if piece:
                peer.transport.write(piece)
                await asyncio.sleep(0)
            else:
                await self._answered(peer)
        await self._judge(one, peer)
        peer.transport.abort()
        self.closed += peer.is_closed
        if self.watch.tracebacks:
            raise Problem(f"{one.kind}: the broker logged {self.watch.tracebacks[0]}")

    async def _connect(self) -> Peer:
        port = self.broker.standalone.server.port
        _, peer = await asyncio.get_running_loop().create_connection(Peer, "localhost", port)
        return peer

    async def _answered(self, peer: Peer) -> None:
        """Until the broker has read this peer's bytes and has no request of it under way."""
        name = peer.transport.get_extra_info("sockname")
        end = time.perf_counter() + 1
        quiet = 0
        while quiet < 5 and not peer.is_closed and time.perf_counter() < end:
            await asyncio.sleep(0.001 if quiet else 0)
            connections = self.broker.standalone.server.connections
            busy = [each for each in connections if each.link.peer.endswith(f":{name[1]}") and len(each.tasks)]
            quiet = 0 if busy else quiet + 1

    async def _judge(self, one: Input, peer: Peer) -> None:
        """Wait for the reaction: closed, or a PONG for our PING behind everything else."""
        if one.expect == "any" and not is_whole(one.pieces):
            return  # the broker waits for the rest of a frame, as it must
        if not peer.is_closed:
            peer.transport.write(PING)
        wanted = CommandType.PONG if one.expect in ("any", "close", "alive") else CommandType[one.expect]

        def is_over() -> bool:
            return peer.is_closed or any(kind == wanted for kind, _ in peer.commands())

        try:
            async with asyncio.timeout(PONG_SECONDS):
                while not is_over():
                    peer.news.clear()
                    await peer.news.wait()
        except TimeoutError:
            raise Problem(f"{one.kind}: neither closed nor answered with {wanted.name} in {PONG_SECONDS:g} s") from None
        if one.expect == "any":
            return
        if (one.expect == "close") != peer.is_closed:
            raise Problem(f"{one.kind}: expected {one.expect}, the connection is {'closed' if peer.is_closed else 'open'}")
        answers = [
            kind for kind, _ in peer.commands() if kind not in (CommandType.CONNECTED, CommandType.PING, CommandType.PONG)
        ]
        if one.expect == "close" and answers:
            raise Problem(f"{one.kind}: closed as it must, but with an answer: {answers}")
        if one.error >= 0:
            codes = [body.error for kind, body in peer.commands() if kind == wanted]
            if codes[0] != one.error:
                raise Problem(f"{one.kind}: the answer carries the error {codes[0]}, not {one.error}")

    async def _loris(self) -> None:
        """Connections that say nothing, or half a frame, and stay."""
        self._note_closed()
        while len(self._half_open) < HALF_OPEN:
            peer = await self._connect()
            size = len(self._half_open) % 3
            peer.transport.write((b"", b"\0\0", hello()[:9])[size])
            self._half_open.append(peer)
        for peer in self._half_open[::7]:
            peer.transport.write(b"\0")

    def _note_closed(self) -> None:
        """Count the half-open connections that the broker has closed, and forget them."""
        open_ones = [peer for peer in self._half_open if not peer.is_closed]
        self.half_open_closed += len(self._half_open) - len(open_ones)
        self._half_open = open_ones

    async def _good(self) -> None:
        """The client beside which all this happens; any error of it is a failure."""
        client = await RawClient.connect(self.broker.service_url, answers_pings=True)
        await client.producer(GOOD_TOPIC)
        await client.subscribe(GOOD_TOPIC, permits=1)
        while True:
            payload = b"good-%d" % self.good_messages
            stored = await client.store(payload, self.good_messages)
            [delivery] = await client.messages(1)
            if payload_of(delivery) != payload or position_of(delivery.command.message_id) != stored:
                raise Problem(f"the good client sent {payload!r} and got {payload_of(delivery)!r}")
            await client.acked(stored)
            client.flow(1)
            self.good_messages += 1

    async def _clean(self) -> None:
        """Delete what bad peers made, so that only leaks can grow."""
        service = self.broker.standalone.service
        for name in list(service.topics):
            if name != GOOD_TOPIC:
                await service.delete_topic(TopicName.parse(name), force=True)

    async def _end(self) -> None:
        try:
            async with asyncio.timeout(HALF_OPEN_SECONDS):
                while self._half_open and not self.half_open_closed:  # a short run may end before their time is over
                    await asyncio.sleep(0.05)
                    self._note_closed()
        except TimeoutError:
            raise Problem("half-open connections were not closed") from None
        for peer in self._half_open:
            peer.transport.abort()
        await asyncio.sleep(0.2)
        server = self.broker.standalone.server
        if len(server.connections) > 1:
            raise Problem(f"{len(server.connections) - 1} connections of bad peers are still there")
        if self.watch.tracebacks:
            raise Problem(f"the broker logged {self.watch.tracebacks[0]}")
        repeated = {text: count for text, count in self.watch.drops.items() if count > 1}
        if len(self.watch.drops) < 500 and repeated:
            raise Problem(f"logged more than once: {repeated}")

    def summary(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "inputs": self.count,
            "kinds": len(self.kinds),
            "closed_by_broker": self.closed,
            "good_messages": self.good_messages,
            "half_open_closed": self.half_open_closed,
            "complaints_logged": sum(self.watch.drops.values()),
            "growth_megabytes": round(self.growth / (1 << 20), 1),
        }


def is_whole(pieces: Pieces) -> bool:
    """Whether the bytes end where a frame ends, so that a PING behind them is read as one."""
    data = b"".join(pieces)
    at = 0
    while at + 4 <= len(data):
        total = int.from_bytes(data[at : at + 4], "big")
        if total > MAX_MESSAGE + 10240:
            return True  # closed at once
        at += 4 + total
    return at == len(data)


def rss() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def save(fuzzer: Fuzzer, error: BaseException, folder: Path) -> Path:
    """Write the last inputs to a file that `--replay` reads."""
    path = folder / f"fuzz-{fuzzer.seed}-{fuzzer.count}.json"
    inputs = [{**msgspec.to_builtins(one), "pieces": [piece.hex() for piece in one.pieces]} for one in fuzzer.inputs]
    path.write_text(json.dumps({"seed": fuzzer.seed, "problem": str(error), "inputs": inputs}, indent=1))
    return path


def load(path: Path) -> tuple[int, list[Input]]:
    saved = json.loads(path.read_text())
    inputs = [Input(**{**one, "pieces": [bytes.fromhex(piece) for piece in one["pieces"]]}) for one in saved["inputs"]]
    return saved["seed"], inputs


def main() -> int:
    """Fuzz or replay."""
    parser = argparse.ArgumentParser(description="structure-aware fuzzing of the binary protocol")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--replay", type=Path, default=None, help="send the saved inputs again")
    parser.add_argument("--save", type=Path, default=Path(), help="folder for failing inputs")
    options = parser.parse_args()
    replay = None
    seed = SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    if options.replay is not None:
        seed, replay = load(options.replay)
    sys.stdout.write(f"seed {seed}\n")
    fuzzer = Fuzzer(seed)
    began = time.perf_counter()
    failure: BaseException | None = None
    try:
        asyncio.run(fuzzer.run(options.seconds, replay=replay))
    except (Problem, AssertionError, ConnectionError) as error:
        failure = error
        sys.stdout.write(f"FAILED: {error}\nthe last inputs are in {save(fuzzer, error, options.save)}\n")
    taken = time.perf_counter() - began
    for key, value in {**fuzzer.summary(), "inputs_per_second": round(fuzzer.count / taken)}.items():
        sys.stdout.write(f"{key.replace('_', ' '):24}{value}\n")
    return 1 if failure else 0


if __name__ == "__main__":
    sys.exit(main())
