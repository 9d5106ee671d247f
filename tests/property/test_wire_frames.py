"""Frames and commands under random input: hand-written paths agree with protobuf, and only typed errors come out."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from google.protobuf.message import DecodeError
from hypothesis import example, given, settings
from hypothesis import strategies as st

from braid.errors import ProtocolError
from braid.wire import replies, requests
from braid.wire.client import ClientProtocol
from braid.wire.commands import Command, decode, signed64
from braid.wire.messages import BaseCommand, CommandSend, MessageIdData
from braid.wire.server import Send, ServerProtocol
from braid.wire.varints import varint

MAX = 20_000
U64 = st.one_of(st.integers(0, 300), st.integers(0, 2**64 - 1), st.sampled_from([2**55, 2**56, 2**63 - 1, 2**63, 2**64 - 1]))
CONNECT = requests.connect("test")


def connected() -> ServerProtocol:
    protocol = ServerProtocol(MAX)
    protocol.receive(CONNECT)
    return protocol


def frame(command: bytes, payload: bytes = b"") -> bytes:
    return (4 + len(command) + len(payload)).to_bytes(4, "big") + len(command).to_bytes(4, "big") + command + payload


def by_protobuf(command: bytes, entry: bytes) -> Send | None:
    """What protobuf makes of a SEND; None if it is none."""
    try:
        base = BaseCommand.FromString(command)
    except DecodeError:
        return None
    if base.type != 6 or not base.HasField("type") or not base.HasField("send") or not base.send.IsInitialized():
        return None
    send = base.send
    return Send(
        send.producer_id,
        signed64(send.sequence_id),
        send.num_messages,
        signed64(send.highest_sequence_id) if send.HasField("highest_sequence_id") else -1,
        send.txnid_most_bits if send.HasField("txnid_most_bits") else None,
        send.txnid_least_bits if send.HasField("txnid_least_bits") else None,
        send.is_chunk,
        entry,
    )


SENDS = st.builds(
    CommandSend,
    producer_id=U64,
    sequence_id=U64,
    num_messages=st.none() | st.integers(-(2**31), 2**31 - 1),
    txnid_least_bits=st.none() | U64,
    txnid_most_bits=st.none() | U64,
    highest_sequence_id=st.none() | U64,
    is_chunk=st.none() | st.booleans(),
    marker=st.none() | st.booleans(),
    message_id=st.none() | st.builds(MessageIdData, ledgerId=U64, entryId=U64),
)


@settings(max_examples=300, deadline=None)
@given(SENDS, st.binary(max_size=40))
def test_send_equals_protobuf(send: CommandSend, entry: bytes) -> None:
    command = BaseCommand(type=BaseCommand.SEND, send=send).SerializeToString()
    assert connected().receive(frame(command, entry)) == [by_protobuf(command, entry)]


FIELD = st.tuples(st.integers(0, 12), st.sampled_from([0, 0, 0, 0, 1, 2, 5]), U64)


@settings(max_examples=500, deadline=None)
@given(st.lists(FIELD, max_size=9), st.integers(0, 3), st.binary(max_size=30))
@example([(1, 0, 1), (2, 0, 2), (0, 0, 5)], 0, b"")
@example([(1, 0, 1), (2, 0, 2), (3, 0, 2**31)], 0, b"")
@example([(1, 0, 1), (2, 0, 2), (7, 0, 2)], 1, b"\x01")
def test_send_of_any_fields_equals_protobuf(fields: list[tuple[int, int, int]], cut: int, entry: bytes) -> None:
    body = b"".join(varint(number << 3 | kind) + varint(value) for number, kind, value in fields)
    body = body[: len(body) - cut]
    command = b"\x08\x06\x32" + varint(len(body)) + body
    events = connected().receive(frame(command, entry))
    expected = by_protobuf(command, entry)
    if expected is None:
        assert isinstance(events[0], ProtocolError)
    else:
        assert events == [expected]


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=40), st.binary(max_size=20))
def test_send_of_any_bytes_equals_protobuf(body: bytes, entry: bytes) -> None:
    command = b"\x08\x06\x32" + varint(len(body)) + body
    events = connected().receive(frame(command, entry))
    expected = by_protobuf(command, entry)
    if expected is None:
        assert isinstance(events[0], ProtocolError)
    else:
        assert events == [expected]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.binary(max_size=60), max_size=8))
def test_any_bytes_give_events_or_a_typed_error(reads: list[bytes]) -> None:
    for protocol in (ServerProtocol(MAX), connected(), ClientProtocol(MAX)):
        receive: Any = protocol.receive
        for data in reads:
            events = receive(data)
            if events and isinstance(events[-1], ProtocolError):
                assert events[-1].message.endswith(".")
                break


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 100), st.binary(max_size=60))
def test_any_command_decodes_the_same_with_and_without_the_shortcut(kind: int, body: bytes) -> None:
    def outcome(raw: bytes) -> object:
        try:
            return decode(raw)
        except ProtocolError:
            return "refused"

    straight = b"\x08" + varint(kind) + varint(kind << 3 | 2) + varint(len(body)) + body
    # An unknown field behind the command forces the envelope to be parsed as a whole.
    assert outcome(straight) == outcome(straight + b"\xa0\x3f\x01")


STREAM = (
    CONNECT
    + requests.send(1, 1, b"e" * 50)
    + replies.PING
    + requests.lookup(1, "persistent://public/default/täpic")
    + requests.send(2, 2**40, b"f" * 300, 9, 2**40 + 8, (1, 2))
    + requests.flow(1, 2)
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_any_division_into_reads(cuts: list[int]) -> None:
    whole = ServerProtocol(MAX).receive(STREAM)
    protocol = ServerProtocol(MAX)
    edges = [0, *sorted(cuts), len(STREAM)]
    events = [event for a, b in pairwise(edges) for event in protocol.receive(STREAM[a:b])]
    assert events == whole
    assert [type(event) for event in events] == [Command, Send, Command, Command, Send, Command]
