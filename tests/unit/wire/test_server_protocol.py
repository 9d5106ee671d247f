"""The broker's end of a connection: stages, refusals, and events that came before a bad frame."""

from __future__ import annotations

import pytest

from braid.errors import Closed, ProtocolError
from braid.wire import replies, requests, txn_requests
from braid.wire.commands import Command, encode
from braid.wire.entries import build_entry
from braid.wire.frames import FRAME_PADDING, MAX_COMMAND_SIZE
from braid.wire.messages import CommandAuthResponse, CommandFlow, MessageIdData, MessageMetadata
from braid.wire.server import Event, Send, ServerProtocol, Stage
from braid.wire.types import CommandType, SubType

MAX = 100_000
ENTRY = build_entry(MessageMetadata(producer_name="p", sequence_id=0, publish_time=1), b"payload")
CONNECT = requests.connect("test")
FLOW = requests.flow(3, 100)


def frame(command: bytes, payload: bytes = b"") -> bytes:
    return (4 + len(command) + len(payload)).to_bytes(4, "big") + len(command).to_bytes(4, "big") + command + payload


def connected() -> ServerProtocol:
    protocol = ServerProtocol(MAX)
    assert len(protocol.receive(CONNECT)) == 1
    return protocol


def failure(events: list[Event]) -> str:
    assert isinstance(events[-1], ProtocolError)
    assert not any(isinstance(event, ProtocolError) for event in events[:-1])
    return events[-1].message


def test_connect_then_commands_in_one_read() -> None:
    protocol = ServerProtocol(MAX)
    events = protocol.receive(CONNECT + FLOW + requests.send(1, 2, ENTRY) + replies.PING)
    assert [event.type if isinstance(event, Command) else type(event) for event in events] == [2, 11, Send, 18]
    assert protocol.stage is Stage.CONNECTED
    assert protocol.is_braid_peer
    assert isinstance(events[1], Command)
    assert events[1].body == CommandFlow(consumer_id=3, messagePermits=100)


def test_other_clients_are_not_braid_peers() -> None:
    protocol = ServerProtocol(MAX)
    protocol.receive(requests.connect("test", is_braid=False))
    assert not protocol.is_braid_peer


@pytest.mark.parametrize("first", [FLOW, requests.send(1, 2, ENTRY), encode(CommandType.AUTH_RESPONSE, CommandAuthResponse())])
def test_nothing_before_connect(first: bytes) -> None:
    protocol = ServerProtocol(MAX)
    assert "before CONNECT" in failure(protocol.receive(first))
    assert protocol.stage is Stage.FAILED


def test_ping_and_pong_at_any_stage() -> None:
    protocol = ServerProtocol(MAX, requires_auth=True)
    assert len(protocol.receive(replies.PING + replies.PONG)) == 2
    protocol.receive(CONNECT)
    assert len(protocol.receive(replies.PING)) == 1


def test_authentication_holds_everything_back() -> None:
    protocol = ServerProtocol(MAX, requires_auth=True)
    protocol.receive(CONNECT)
    stages = [protocol.stage]
    assert len(protocol.receive(requests.auth_response("c", "token", b"x"))) == 1
    protocol.accept()
    stages.append(protocol.stage)
    assert stages == [Stage.CONNECTING, Stage.CONNECTED]
    assert len(protocol.receive(requests.send(1, 2, ENTRY))) == 1

    for early in (FLOW, requests.send(1, 2, ENTRY)):
        protocol = ServerProtocol(MAX, requires_auth=True)
        assert "before its authentication" in failure(protocol.receive(CONNECT + early))
        protocol.accept()
        assert protocol.stage is Stage.FAILED


def test_second_connect() -> None:
    assert "CONNECT twice" in failure(connected().receive(CONNECT))


@pytest.mark.parametrize(
    "pushed",
    [replies.success(1), replies.connected("x", 21, 1), replies.close_consumer(1)[:8] + b"\x08\x1b\xda\x01\x02\x08\x01"],
)
def test_commands_only_brokers_send(pushed: bytes) -> None:
    command = pushed[8:]
    assert "which only brokers send" in failure(connected().receive(frame(command)))


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (b"", "without a type"),
        (b"\x0a\x00", "without a type"),
        (b"\x08\x0b", "without its flow message"),
        (b"\x08\x0b\x52\x04\x08\x01\x10\x00", "without its flow message"),
        (b"\x08\x0b\x5a\x02\x08\x01", "lacks the required field messagePermits"),
        (b"\x08\x0b\x5a\x05\x08\x01\x10\x01", "not valid protobuf"),
        (b"\x08\x0b\x5a\x03\x08\x01\xff", "not valid protobuf"),
        (b"\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "not valid protobuf"),
        (b"\x08\x06\x32\x02\x08\x01", "lacks the required field sequence_id"),
        (b"\x08\x06\x32\x03\x08\x01\x10", "not valid protobuf"),
        (b"\x08\x06\x32\x7f\x08\x01", "not valid protobuf"),
        (b"\x08\x17\xba\x01\x06\x0a\x02\xff\xfe\x10\x01", "not UTF-8"),
        (b"\x08\x05\x2a\x11\x0a\x01t\x10\x01\x18\x01\x32\x08\x0a\x02\xff\xfe\x12\x02ok", "not UTF-8"),
    ],
)
def test_malformed_commands(command: bytes, reason: str) -> None:
    assert reason in failure(connected().receive(frame(command)))


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        ((0, 0), "cannot hold a command"),
        ((3, 0), "cannot hold a command"),
        ((10, 7), "cannot hold a command"),
        ((10, 0xFFFFFFFF), "cannot hold a command"),
        ((0xFFFFFFFF, 4), "the limit is"),
        ((MAX + FRAME_PADDING - 3, 4), "the limit is"),
    ],
)
@pytest.mark.parametrize("extra", [0, 1, 50])
def test_impossible_lengths(head: tuple[int, int], reason: str, extra: int) -> None:
    total, size = head
    bad = total.to_bytes(4, "big") + size.to_bytes(4, "big") + bytes(extra)
    assert reason in failure(connected().receive(bad))


def test_the_largest_frame_passes_and_one_byte_more_does_not() -> None:
    head = requests.send(1, 2, b"")
    largest = requests.send(1, 2, bytes(MAX + FRAME_PADDING - len(head)))
    assert len(largest) == MAX + FRAME_PADDING
    for events in (connected().receive(largest), [*connected().receive(largest[:50]), *connected().receive(largest)]):
        assert len(events) == 1
        assert isinstance(events[0], Send)
    protocol = connected()
    assert protocol.receive(largest[:9]) == []
    assert len(protocol.receive(largest[9:])) == 1
    too_large = requests.send(1, 2, bytes(MAX + FRAME_PADDING + 1 - len(head)))
    assert "the limit is" in failure(connected().receive(too_large))
    assert "the limit is" in failure(connected().receive(too_large[:4])), "refused before its bytes are kept"


def test_the_largest_command() -> None:
    protocol = ServerProtocol(8 * MAX_COMMAND_SIZE)
    protocol.receive(CONNECT)
    many = requests.ack(1, [MessageIdData(ledgerId=1, entryId=2)] * (MAX_COMMAND_SIZE // 4))
    assert "the limit is 1048576" in failure(protocol.receive(many))


def test_unknown_types_are_left_out() -> None:
    protocol = connected()
    assert protocol.receive(frame(b"\x08\x45") + frame(b"\x08\x45\xaa\x04\x00") + FLOW)[0] == Command(
        11, CommandFlow(consumer_id=3, messagePermits=100)
    )
    assert "before the handshake" in failure(ServerProtocol(MAX).receive(frame(b"\x08\x45")))


def test_braid_commands_need_the_feature_flag() -> None:
    own = frame(b"\x08\xcf\x0f")  # 1999, which nobody defined
    assert connected().receive(own) == []
    stranger = ServerProtocol(MAX)
    stranger.receive(requests.connect("test", is_braid=False))
    assert "supports_braid" in failure(stranger.receive(own))
    known = txn_requests.new_sub(1, (0, 1 << 20))
    assert connected().receive(known)[0].type == CommandType.NEW_SUB_TXN  # type: ignore[union-attr]
    stranger = ServerProtocol(MAX)
    stranger.receive(requests.connect("test", is_braid=False))
    assert "supports_braid" in failure(stranger.receive(known))


def test_payload_only_with_send() -> None:
    assert "payload of 3 bytes" in failure(connected().receive(frame(FLOW[8:], b"abc")))


def test_events_before_a_bad_frame_are_delivered_and_nothing_after() -> None:
    protocol = connected()
    events = protocol.receive(requests.send(1, 1, ENTRY) + FLOW + frame(b"") + requests.send(1, 2, ENTRY))
    assert len(events) == 3
    assert isinstance(events[0], Send)
    assert events[0].sequence_id == 1
    failure(events)
    with pytest.raises(Closed):
        protocol.receive(FLOW)


def test_a_send_of_every_shape() -> None:
    for producer_id in (0, 127, 128, 1 << 40, (1 << 64) - 1):
        for sequence_id in (-1, 0, 127, 128, 1 << 20, 1 << 55, 1 << 56, (1 << 63) - 1):
            for txn in (None, (0, 0), (1, (1 << 64) - 1)):
                raw = requests.send(producer_id, sequence_id, ENTRY, 7, sequence_id, txn, is_chunk=True)
                most, least = txn or (None, None)
                expected = Send(producer_id, sequence_id, 7, sequence_id, most, least, True, ENTRY)
                assert connected().receive(raw) == [expected]


def test_a_send_does_not_read_its_numbers_from_the_payload() -> None:
    # The sequence id's last byte would have to come from the payload.
    assert "not valid protobuf" in failure(connected().receive(frame(b"\x08\x06\x32\x04\x08\x01\x10\x80", b"\x01" + ENTRY)))
    assert "not valid protobuf" in failure(connected().receive(frame(b"\x08\x06\x32\x04\x08\x01\x10\x80", b"\xff" * 9000)))
    assert "not valid protobuf" in failure(connected().receive(frame(b"\x08\x06\x32\x04\x08\x01\x10\x80")))


def test_every_split_of_a_conversation() -> None:
    subscribe = requests.subscribe(1, 2, "persistent://public/default/x", "s", SubType.SHARED, metadata={"a": "b"})
    stream = CONNECT + requests.send(1, 1, ENTRY) + replies.PING + subscribe + requests.send(1, 300, ENTRY, 5) + FLOW
    whole = ServerProtocol(MAX).receive(stream)
    assert len(whole) == 6
    for cut in range(len(stream) + 1):
        protocol = ServerProtocol(MAX)
        assert protocol.receive(stream[:cut]) + protocol.receive(stream[cut:]) == whole
    protocol = ServerProtocol(MAX)
    assert [event for i in range(len(stream)) for event in protocol.receive(stream[i : i + 1])] == whole


def test_a_large_frame_in_many_small_reads_is_joined_once() -> None:
    protocol = ServerProtocol(4_000_000)
    protocol.receive(CONNECT)
    entry = bytes(3_000_000)
    stream = requests.send(1, 1, entry)
    events: list[Event] = []
    for at in range(0, len(stream), 1000):
        events += protocol.receive(stream[at : at + 1000])
    assert events == [Send(1, 1, 1, -1, None, None, False, entry)]
