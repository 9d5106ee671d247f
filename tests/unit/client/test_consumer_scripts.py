"""Consumers and a scripted broker: answers in the worst order, answers that do not come, permits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import braid
from braid.client import Client
from braid.client.config import ClientConfig
from braid.client.consumer_lanes import LaneOptions
from braid.client.consumer_session import Assignment, ConsumerSession
from braid.client.messages import LATEST, Message, MessageId, messages_of
from braid.client.messages import _message as one_message
from braid.client.reader_lanes import ReaderLane
from braid.client.stream_lanes import StreamLane
from braid.client.topic_consumer import TopicConsumer
from braid.client.values import BYTES
from braid.errors import BraidError, ConsumerDisplaced
from braid.runtime.env import Runtime
from braid.wire import messages as pb
from braid.wire import replies
from braid.wire.batch import encode_batch
from braid.wire.commands import Command
from braid.wire.encode import MessageEncoder
from braid.wire.entries import build_entry
from braid.wire.server import ServerProtocol
from braid.wire.types import CommandType, InitialPosition, LookupResult, ScalableConsumerType, SubType

SECONDS = 5.0


class Scripted:
    """A broker that answers as a test says, else in the simplest way. Answers of `silent` commands never come."""

    def __init__(self) -> None:
        self.seen: list[Command] = []
        self.changed = asyncio.Event()
        self.answers: dict[int, Callable[[Any], bytes]] = {}
        self.transports: list[asyncio.Transport] = []
        self.url = ""

    def kinds(self) -> list[int]:
        return [each.type for each in self.seen]

    async def saw(self, kind: int, count: int = 1) -> None:
        async with asyncio.timeout(SECONDS):
            while self.kinds().count(kind) < count:
                self.changed.clear()
                await self.changed.wait()


class Link(asyncio.Protocol):
    def __init__(self, broker: Scripted) -> None:
        self._broker = broker
        self._wire = ServerProtocol(5 << 20)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._broker.transports.append(transport)

    def data_received(self, data: bytes) -> None:
        for event in self._wire.receive(data):
            assert isinstance(event, Command)
            self._broker.seen.append(event)
            self._broker.changed.set()
            self._transport.write(self._answer(event.type, event.body))

    def _answer(self, kind: int, body: Any) -> bytes:
        if kind in self._broker.answers:
            return self._broker.answers[kind](body)
        if kind == CommandType.CONNECT:
            return replies.connected("script", body.protocol_version, 5 << 20, None)
        if kind == CommandType.PARTITIONED_METADATA:
            return replies.partitions(body.request_id, 0)
        if kind == CommandType.LOOKUP:
            return replies.lookup(body.request_id, LookupResult.CONNECT, self._broker.url, authoritative=True)
        if kind == CommandType.ACK or not hasattr(body, "request_id"):
            return b""
        return replies.success(body.request_id)


@pytest.fixture
async def scripted() -> AsyncIterator[Scripted]:
    broker = Scripted()
    listener = await Runtime().network.listen("localhost", 0, lambda: Link(broker))
    broker.url = f"pulsar://localhost:{listener.port}"
    yield broker
    listener.close()
    for transport in broker.transports:
        transport.abort()
    await asyncio.sleep(0)


@pytest.fixture
async def client(scripted: Scripted) -> AsyncIterator[Client]:
    config = ClientConfig(backoff_initial=0.001, backoff_max=0.01, operation_timeout=SECONDS, receiver_queue=4)
    async with braid.connect(scripted.url, config=config) as made:
        yield made


def batch(*singles: pb.SingleMessageMetadata, broken: bool = False) -> bytes:
    payload = encode_batch([(single, b"x") for single in singles])
    metadata = pb.MessageMetadata(producer_name="p", sequence_id=1, publish_time=5, num_messages_in_batch=len(singles))
    return build_entry(metadata, payload[:-1] if broken else payload)


@pytest.mark.parametrize("broken", [True, False])
async def test_messages_nobody_gets_give_their_permits_back(client: Client, scripted: Scripted, broken: bool) -> None:
    """A batch that cannot be read, or of which compaction left nothing."""
    entry = batch(*(pb.SingleMessageMetadata(compacted_out=not broken) for _ in range(3)), broken=broken)
    sent = False

    def flow(body: Any) -> bytes:
        nonlocal sent
        first, sent = not sent, True
        return MessageEncoder(body.consumer_id).header(7, 1, 0, len(entry)) + entry if first else b""

    scripted.answers[CommandType.FLOW] = flow
    async with client.consumer("t", "s"):
        await scripted.saw(CommandType.FLOW, 2)
        granted = [each.body.messagePermits for each in scripted.seen if each.type == CommandType.FLOW]
        assert granted == [4, 3]


class Owner:
    """Somebody who owns a lane and does nothing."""

    def put(self, lane: TopicConsumer, messages: list[Message], /) -> None: ...

    def drop_queued(self, lane: TopicConsumer, /) -> None: ...

    def window(self) -> int:
        return 4

    def lane_ended(self, lane: TopicConsumer, /) -> None: ...

    def lane_failed(self, lane: TopicConsumer, error: BraidError, /) -> None: ...


async def test_a_reader_closed_while_it_looks_for_its_place_leaves_nothing_behind(client: Client, scripted: Scripted) -> None:
    scripted.answers[CommandType.GET_LAST_MESSAGE_ID] = lambda _body: b""
    options = LaneOptions(subscription="r", sub_type=SubType.EXCLUSIVE, name="r", is_durable=False)
    lane = ReaderLane(client, Owner(), "persistent://public/default/t", options, LATEST)
    lane.open_soon()
    await scripted.saw(CommandType.GET_LAST_MESSAGE_ID)
    await lane.close()
    await scripted.saw(CommandType.CLOSE_CONSUMER)
    assert (await client.service_connection()).consumers == {}


@pytest.mark.parametrize("is_alone", [True, False], ids=["alone", "with a new one"])
async def test_what_was_acknowledged_and_comes_again_is_acknowledged_again(
    client: Client, scripted: Scripted, is_alone: bool
) -> None:
    """The broker has lost the acknowledgement: without another one the segment would never be drained."""
    options = LaneOptions(subscription="s", sub_type=SubType.EXCLUSIVE, name="r", segment_id=0)
    lane = StreamLane(client, Owner(), "segment://public/default/t/0000-ffff-0", options)
    lane.handed = lane.acked = MessageId(7, 1, segment_id=0)
    await lane.open()
    known = Message(lane.acked, "t", b"x")
    new = Message(MessageId(7, 2, segment_id=0), "t", b"y")
    assert lane.sift([known] if is_alone else [known, new]) == ([] if is_alone else [new])
    await scripted.saw(CommandType.ACK)
    where = scripted.seen[-1].body.message_id[0]
    assert (where.ledgerId, where.entryId) == (7, 1)
    await lane.close()


class Layouts:
    """What a session asks of its layouts."""

    topic = "topic://public/default/t"
    controller_url = None

    def __init__(self, client: Client) -> None:
        self.client = client


async def test_a_consumer_displaced_right_after_it_registered_does_not_register_again(
    client: Client, scripted: Scripted
) -> None:
    def answer(body: Any) -> bytes:
        response = pb.CommandScalableTopicSubscribeResponse(request_id=body.request_id)
        response.assignment.layout_epoch = 1
        from braid.wire.commands import encode

        close = pb.CommandCloseConsumer(consumer_id=body.consumer_id, request_id=0)
        return encode(CommandType.SCALABLE_TOPIC_SUBSCRIBE_RESPONSE, response) + encode(CommandType.CLOSE_CONSUMER, close)

    scripted.answers[CommandType.SCALABLE_TOPIC_SUBSCRIBE] = answer
    assigned: list[Assignment] = []
    ended: list[BraidError] = []
    session = ConsumerSession(
        Layouts(client),  # type: ignore[arg-type]
        "s",
        "a",
        ScalableConsumerType.STREAM,
        InitialPosition.EARLIEST,
        assigned=assigned.append,
        ended=ended.append,
    )
    with pytest.raises(ConsumerDisplaced):
        await session.open()
    assert [type(each) for each in ended] == [ConsumerDisplaced]
    assert assigned == []
    assert scripted.kinds().count(CommandType.SCALABLE_TOPIC_SUBSCRIBE) == 1
    await session.close()


singles = st.builds(
    lambda fields: pb.SingleMessageMetadata(**{name: value for name, value in fields.items() if value is not None}),
    st.fixed_dictionaries(
        {
            "partition_key": st.none() | st.text(max_size=3) | st.just("k" * 130),
            "sequence_id": st.none() | st.sampled_from([0, 1, 127, 128, 1 << 40, (1 << 64) - 1]),
            "event_time": st.none() | st.sampled_from([0, 5, 1 << 41]),
            "null_value": st.none() | st.booleans(),
            "null_partition_key": st.none() | st.booleans(),
            "ordering_key": st.none() | st.binary(max_size=2),
            "properties": st.just([]) | st.just([pb.KeyValue(key="a", value="b")]),
        }
    ),
)


@given(st.lists(st.tuples(singles, st.binary(max_size=200)), min_size=1, max_size=5))
def test_the_short_way_to_read_a_message_gives_what_the_long_one_gives(messages: list[tuple[Any, bytes]]) -> None:
    metadata = pb.MessageMetadata(producer_name="p", sequence_id=9, publish_time=5, num_messages_in_batch=len(messages))
    payload = encode_batch(messages)
    expected = [
        one_message("t", MessageId(3, 4, -1, index, len(messages), 2), metadata, single, body, 1, BYTES)
        for index, (single, body) in enumerate(messages)
    ]
    assert messages_of("t", MessageId(3, 4, segment_id=2), metadata, payload, 1, []) == expected
    if len(messages) > 1:
        assert messages_of("t", MessageId(3, 4, segment_id=2), metadata, payload, 1, [-2]) == expected[1:]
