"""Golden bytes: the fact sheet's vectors, made and read by our code."""

from __future__ import annotations

import pytest

from braid.wire import replies, requests
from braid.wire.batch import decode_batch, encode_batch
from braid.wire.checksum import crc32c, topics_hash
from braid.wire.client import ClientProtocol, Delivery
from braid.wire.commands import encode
from braid.wire.encode import MessageEncoder, broker_entry_metadata, message_header
from braid.wire.entries import build_entry, entry_metadata, message_count, payload_offset, split_entry, verify
from braid.wire.messages import (
    CommandScalableTopicClose,
    CommandScalableTopicLookup,
    CommandScalableTopicUpdate,
    MessageMetadata,
    SingleMessageMetadata,
)
from braid.wire.server import Send, ServerProtocol
from braid.wire.types import CommandType, ServerError

METADATA = MessageMetadata(producer_name="p", sequence_id=0, publish_time=1)
ENTRY = bytes.fromhex("0e01 92cd300c 00000007 0a017010001801 68656c6c6f")
SEND = bytes.fromhex("00000022 00000008 0806320408001000 0e01 92cd300c 00000007 0a017010001801 68656c6c6f")
MESSAGE = bytes.fromhex(
    "00000031 00000017 08094a130800120f0805100318ffffffffffffffffff01 0e01 92cd300c 00000007 0a017010001801 68656c6c6f"
)


@pytest.mark.parametrize(
    ("frame", "golden"),
    [
        (replies.PING, "00000009 00000005 0812920100"),
        (replies.PONG, "00000009 00000005 08139a0100"),
        (replies.connected("Braid", 21, 5242880), "00000016 00000012 08031a0e0a0542726169641015188080c002"),
        (replies.success(7), "0000000a 00000006 080d6a020807"),
        (
            replies.error(-1, ServerError.AUTHENTICATION_ERROR, "Failed to authenticate"),
            "0000002d 00000029 080e722508ffffffffffffffffff0110031a164661696c656420746f2061757468656e746963617465",
        ),
    ],
)
def test_command_frames(frame: bytes, golden: str) -> None:
    assert frame == bytes.fromhex(golden)


@pytest.mark.req("R468-75")
def test_scalable_commands_have_their_numbers() -> None:
    lookup = CommandScalableTopicLookup(session_id=1, topic="t")
    assert encode(CommandType.SCALABLE_TOPIC_LOOKUP, lookup) == bytes.fromhex("0000000e 0000000a 0846 b204 05 0801 120174")
    update = CommandScalableTopicUpdate(session_id=1)
    assert encode(CommandType.SCALABLE_TOPIC_UPDATE, update) == bytes.fromhex("0000000b 00000007 0847 ba04 02 0801")
    close = CommandScalableTopicClose(session_id=1)
    assert encode(CommandType.SCALABLE_TOPIC_CLOSE, close) == bytes.fromhex("0000000b 00000007 0848 c204 02 0801")


def test_checksum() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes.fromhex("00000007 0a017010001801") + b"hello") == 0x92CD300C


def test_entry() -> None:
    assert METADATA.SerializeToString() == bytes.fromhex("0a017010001801")
    assert build_entry(METADATA, b"hello") == ENTRY
    assert verify(ENTRY)
    assert not verify(ENTRY[:-1] + b"O")
    assert entry_metadata(ENTRY) == METADATA
    assert message_count(ENTRY) == 1
    assert ENTRY[payload_offset(ENTRY) :] == b"hello"


def test_send() -> None:
    assert requests.send(0, 0, ENTRY) == SEND
    broker = ServerProtocol(5242880)
    broker.receive(requests.connect("test"))
    assert broker.receive(SEND) == [Send(0, 0, 1, -1, None, None, False, ENTRY)]


def test_message() -> None:
    assert MessageEncoder(0, -1).header(5, 3, 0, len(ENTRY)) + ENTRY == MESSAGE
    assert message_header(0, 5, 3, -1, 0, (), None, len(ENTRY)) + ENTRY == MESSAGE
    (event,) = ClientProtocol().receive(MESSAGE)
    assert isinstance(event, Delivery)
    assert event.is_intact
    assert event.entry == ENTRY
    assert event.broker_metadata is None
    assert (event.command.message_id.ledgerId, event.command.message_id.entryId) == (5, 3)
    assert event.command.message_id.partition == -1


def test_broker_entry_metadata() -> None:
    head = bytes.fromhex("0e02 00000009 0880d095ffbc311029")
    assert broker_entry_metadata(1700000000000, 41, None) == head
    assert split_entry(head + ENTRY) == (1700000000000, 41, None, len(head))


def test_batch() -> None:
    payload = bytes.fromhex("00000002 1802 6d30 00000005 12016b1803 6d2d31")
    messages = [(SingleMessageMetadata(), b"m0"), (SingleMessageMetadata(partition_key="k"), b"m-1")]
    assert encode_batch(messages) == payload
    first, second = decode_batch(payload, 2)
    assert (first[1], second[1], second[0].partition_key) == (b"m0", b"m-1", "k")


@pytest.mark.parametrize(
    ("names", "golden"),
    [
        ([], "00000000"),
        (["persistent://public/default/a"], "e4a876e3"),
        (["persistent://public/default/b", "persistent://public/default/a"], "c7559e98"),
    ],
)
def test_topics_hash(names: list[str], golden: str) -> None:
    assert topics_hash(names) == golden


def test_schema_versions() -> None:
    assert replies.schema_version(0) == bytes(8)
    assert replies.schema_version(1) == bytes.fromhex("0000000000000001")
    assert replies.read_schema_version(bytes.fromhex("0000000000000001") + bytes(56)) == 1
    assert replies.read_schema_version(b"") is None
