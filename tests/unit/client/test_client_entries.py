"""What a consumer makes of entries it did not expect: chunks, damage, unreadable payloads. The broker here is a script."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

import braid
from braid.client import Client, ClientConfig
from braid.errors import ConnectionLost
from braid.runtime.env import Runtime
from braid.runtime.network import Listener
from braid.testing.clock import ManualClock
from braid.wire import messages as pb
from braid.wire import replies
from braid.wire.chunks import mark_chunk
from braid.wire.commands import Command
from braid.wire.encode import MessageEncoder
from braid.wire.entries import build_entry
from braid.wire.server import ServerProtocol
from braid.wire.types import CommandType, LookupResult


class Script(asyncio.Protocol):
    """Accepts everything a client asks; a test says which entries its consumer is sent."""

    url = ""

    def __init__(self, broker: ScriptedBroker) -> None:
        self._broker = broker
        self._wire = ServerProtocol(5 << 20)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._broker.connections.append(self)

    def data_received(self, data: bytes) -> None:
        for event in self._wire.receive(data):
            assert isinstance(event, Command)
            self._broker.seen.append(event)
            self._answer(event.type, event.body)

    def _answer(self, kind: int, body: Any) -> None:
        write = self.transport.write
        if kind == CommandType.CONNECT:
            write(replies.connected("script", body.protocol_version, 5 << 20, None))
        elif kind == CommandType.PARTITIONED_METADATA:
            write(replies.partitions(body.request_id, 0))
        elif kind == CommandType.LOOKUP:
            write(replies.lookup(body.request_id, LookupResult.CONNECT, self._broker.url, authoritative=True))
        elif kind == CommandType.FLOW:
            if self._broker.scripts:
                write(b"".join(self._broker.scripts.popleft()(body.consumer_id)))
        elif kind == CommandType.ACK:
            if body.HasField("request_id"):
                write(replies.ack_response(body.consumer_id, body.request_id))
        elif hasattr(body, "request_id"):
            write(replies.success(body.request_id))


class ScriptedBroker:
    def __init__(self) -> None:
        self.connections: list[Script] = []
        self.seen: list[Command] = []
        self.scripts: deque[Callable[[int], list[bytes]]] = deque()
        self.url = ""
        self.listener: Listener

    def entries(self, *entries: bytes) -> None:
        """Send these when a consumer grants permits, each call of this method for another grant."""

        def frames(consumer: int) -> list[bytes]:
            encoder = MessageEncoder(consumer)
            return [encoder.header(7, number, 0, len(entry)) + entry for number, entry in enumerate(entries)]

        self.scripts.append(frames)

    def acks(self) -> list[tuple[int, int]]:
        """Acknowledged entry ids, with the validation error if any."""
        bodies = [command.body for command in self.seen if command.type == CommandType.ACK]
        return [
            (where.entryId, body.validation_error if body.HasField("validation_error") else -1)
            for body in bodies
            for where in body.message_id
        ]


@pytest.fixture
async def scripted() -> AsyncIterator[ScriptedBroker]:
    broker = ScriptedBroker()
    broker.listener = await Runtime().network.listen("localhost", 0, lambda: Script(broker))
    broker.url = f"pulsar://localhost:{broker.listener.port}"
    yield broker
    broker.listener.close()
    for connection in broker.connections:
        connection.transport.abort()
    await asyncio.sleep(0)


@pytest.fixture
async def client(scripted: ScriptedBroker) -> AsyncIterator[Client]:
    config = ClientConfig(backoff_initial=0.001, backoff_max=0.01, operation_timeout=5, max_chunked_messages=1)
    async with braid.connect(scripted.url, config=config) as made:
        yield made


def metadata(**fields: Any) -> pb.MessageMetadata:
    return pb.MessageMetadata(producer_name="p", sequence_id=1, publish_time=5, **fields)


def chunk(uuid: str, number: int, parts: list[bytes]) -> bytes:
    described = metadata()
    mark_chunk(described, uuid, number, len(parts), sum(map(len, parts)))
    return build_entry(described, parts[number])


async def test_chunks_become_one_message_and_are_acknowledged_together(client: Client, scripted: ScriptedBroker) -> None:
    parts = [b"aa", b"bb", b"c"]
    scripted.entries(*(chunk("u", number, parts) for number in range(3)))
    consumer = await client.consumer("t", "s")
    message = await consumer.receive(5)
    assert message.payload == b"aabbc"
    assert message.id.entry_id == 2
    await consumer.acknowledge(message, wait=True)
    assert sorted(scripted.acks()) == [(0, -1), (1, -1), (2, -1)]


async def test_unfinished_chunks_are_given_up_when_there_are_too_many(client: Client, scripted: ScriptedBroker) -> None:
    parts = [b"aa", b"bb"]
    scripted.entries(chunk("lost", 0, parts), chunk("whole", 0, parts), chunk("whole", 1, parts))
    consumer = await client.consumer("t", "s")
    message = await consumer.receive(5)
    assert message.payload == b"aabb"
    await consumer.acknowledge(message, wait=True)
    assert (0, -1) in scripted.acks()


async def test_a_damaged_message_drops_the_connection_and_comes_again(client: Client, scripted: ScriptedBroker) -> None:
    good = build_entry(metadata(), b"good")
    scripted.entries(good[:-1] + b"?")
    scripted.entries(good)
    consumer = await client.consumer("t", "s")
    assert (await consumer.receive(5)).payload == b"good"
    assert len(scripted.connections) == 2
    assert scripted.acks() == []


@pytest.mark.parametrize(
    ("fields", "payload"),
    [
        ({"compression": 3, "uncompressed_size": 10}, b"not zstd"),
        ({"compression": 1, "uncompressed_size": 1 << 30}, b"bomb"),
        ({"num_messages_in_batch": 3}, b"\x00\x00\x00\x01x"),
    ],
)
async def test_an_unreadable_entry_is_reported_and_the_next_one_comes(
    client: Client, scripted: ScriptedBroker, fields: dict[str, Any], payload: bytes
) -> None:
    scripted.entries(build_entry(metadata(**fields), payload), build_entry(metadata(), b"good"))
    consumer = await client.consumer("t", "s")
    message = await consumer.receive(5)
    assert message.payload == b"good"
    await consumer.acknowledge(message, wait=True)
    assert [entry for entry, error in scripted.acks() if error >= 0] == [0]


async def test_a_consumer_closed_right_after_it_was_let_in_subscribes_again(client: Client, scripted: ScriptedBroker) -> None:
    """SUCCESS and CLOSE_CONSUMER in one read: nothing may be left hanging."""
    closes = 1

    def answer(self: Script, kind: int, body: Any) -> None:
        nonlocal closes
        if kind == CommandType.SUBSCRIBE and closes:
            closes -= 1
            self.transport.write(replies.success(body.request_id) + replies.close_consumer(body.consumer_id))
        else:
            original(self, kind, body)

    original = Script._answer
    Script._answer = answer  # type: ignore[method-assign]
    try:
        scripted.entries(build_entry(metadata(), b"good"))
        consumer = await client.consumer("t", "s")
        assert (await consumer.receive(5)).payload == b"good"
    finally:
        Script._answer = original  # type: ignore[method-assign]
    assert [command.type for command in scripted.seen].count(CommandType.SUBSCRIBE) == 2


async def test_a_link_on_which_nothing_comes_back_is_dropped(scripted: ScriptedBroker) -> None:
    """The script answers no PING."""
    clock = ManualClock()
    async with braid.connect(scripted.url, runtime=Runtime(clock=clock)) as client:
        connection = await client.locate("persistent://public/default/t")
        await clock.advance(30)
        assert connection.is_open
        await clock.advance(30)
        assert not connection.is_open
        with pytest.raises(ConnectionLost):
            await connection.request(lambda number: b"")
        assert await client.locate("persistent://public/default/t") is not connection
