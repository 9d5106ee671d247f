"""The client's end of a connection, and the commands it sends as a broker reads them."""

from __future__ import annotations

import pytest

from braid.errors import Closed, ProtocolError
from braid.wire import replies, requests
from braid.wire.client import ClientProtocol, Delivery
from braid.wire.commands import Command
from braid.wire.encode import MessageEncoder, broker_entry_metadata
from braid.wire.entries import build_entry
from braid.wire.messages import MessageIdData, MessageMetadata, Schema
from braid.wire.server import ServerProtocol
from braid.wire.types import AckType, CommandType, InitialPosition, LookupResult, ProducerAccessMode, SubType, TopicsMode

ENTRY = build_entry(MessageMetadata(producer_name="p", sequence_id=0, publish_time=1), b"payload")


def message(payload: bytes) -> bytes:
    return MessageEncoder(1, 2).full_header(5, 6, 3, [-1, 7], 9, len(payload)) + payload


def test_delivery_with_broker_metadata() -> None:
    (event,) = ClientProtocol().receive(message(broker_entry_metadata(17, 41, (1, 2)) + ENTRY))
    assert isinstance(event, Delivery)
    assert event.entry == ENTRY
    assert event.is_intact
    assert event.broker_metadata is not None
    assert (event.broker_metadata.broker_timestamp, event.broker_metadata.index) == (17, 41)
    assert event.command.redelivery_count == 3
    assert list(event.command.ack_set) == [-1, 7]
    assert event.command.consumer_epoch == 9
    assert event.command.message_id.partition == 2


def test_a_corrupt_entry_is_delivered_and_marked() -> None:
    (event,) = ClientProtocol().receive(message(ENTRY[:-1] + b"?"))
    assert isinstance(event, Delivery)
    assert not event.is_intact


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\x0e\x01",
        b"\x0e\x02",
        b"\x0e\x02\x00\x00\x00\x09",
        b"\x0e\x02\x00\x00\x00\x01\xff" + ENTRY,
        b"\x0e\x02\x00\x00\x00\x00",
    ],
)
def test_impossible_payloads(payload: bytes) -> None:
    protocol = ClientProtocol()
    (event,) = protocol.receive(message(payload))
    assert isinstance(event, ProtocolError)
    with pytest.raises(Closed):
        protocol.receive(b"")


def test_commands_before_a_bad_frame() -> None:
    events = ClientProtocol().receive(replies.success(1) + b"\x00\x00\x00\x00\x00\x00\x00\x00")
    assert isinstance(events[0], Command)
    assert isinstance(events[1], ProtocolError)
    assert len(events) == 2


def test_unknown_types_are_left_out() -> None:
    assert ClientProtocol().receive(b"\x00\x00\x00\x06\x00\x00\x00\x02\x08\x45") == []


def test_connected_sets_the_frame_limit_and_keeps_the_rest() -> None:
    protocol = ClientProtocol(1000)
    large = message(ENTRY + bytes(20_000))
    assert len(protocol.receive(replies.connected("b", 21, 15_000) + large[:10])) == 1
    (event,) = protocol.receive(large[10:])
    assert isinstance(event, Delivery)
    (event,) = protocol.receive(message(ENTRY + bytes(26_000)))
    assert isinstance(event, ProtocolError)


def test_every_split() -> None:
    stream = (
        replies.connected("b", 21, 1_000_000)
        + message(ENTRY)
        + replies.PING
        + message(broker_entry_metadata(1, 2, None) + ENTRY)
    )
    whole = ClientProtocol().receive(stream)
    assert len(whole) == 4
    for cut in range(len(stream) + 1):
        protocol = ClientProtocol()
        assert protocol.receive(stream[:cut]) + protocol.receive(stream[cut:]) == whole


def test_requests_reach_the_broker() -> None:
    ids = [MessageIdData(ledgerId=1, entryId=2)]
    schema = Schema(name="s", schema_data=b"{}", type="Json")
    sent = [
        (CommandType.CONNECT, requests.connect("v", "token", b"jwt", "host:1")),
        (CommandType.AUTH_RESPONSE, requests.auth_response("v", "token", b"jwt")),
        (CommandType.PARTITIONED_METADATA, requests.partitioned_metadata(1, "t", may_create=False)),
        (CommandType.LOOKUP, requests.lookup(2, "t", authoritative=True, listener="l")),
        (CommandType.GET_TOPICS_OF_NAMESPACE, requests.topics_of_namespace(3, "t/n", TopicsMode.ALL, "a.*", "00000000")),
        (CommandType.PRODUCER, requests.producer(4, 0, "t", "n", ProducerAccessMode.EXCLUSIVE, 1, 2, schema, {"k": "v"}, True)),
        (
            CommandType.SUBSCRIBE,
            requests.subscribe(
                5,
                0,
                "t",
                "s",
                SubType.KEY_SHARED,
                "c",
                False,
                ids[0],
                InitialPosition.EARLIEST,
                1,
                schema,
                {"a": "b"},
                {"c": "d"},
                7,
            ),
        ),
        (CommandType.FLOW, requests.flow(0, 10)),
        (CommandType.ACK, requests.ack(0, ids, AckType.CUMULATIVE, 6, (1, 2))),
        (CommandType.REDELIVER_UNACKNOWLEDGED_MESSAGES, requests.redeliver(0, ids, 3)),
        (CommandType.SEEK, requests.seek(7, 0, ids[0])),
        (CommandType.SEEK, requests.seek(7, 0, 1_700_000_000_000)),
        (CommandType.GET_LAST_MESSAGE_ID, requests.get_last_message_id(8, 0)),
        (CommandType.UNSUBSCRIBE, requests.unsubscribe(9, 0, force=True)),
        (CommandType.CLOSE_PRODUCER, requests.close_producer(10, 0)),
        (CommandType.CLOSE_CONSUMER, requests.close_consumer(11, 0)),
        (CommandType.GET_SCHEMA, requests.get_schema(12, "t", bytes(8))),
    ]
    events = ServerProtocol(1_000_000).receive(b"".join(raw for _, raw in sent))
    assert [event.type for event in events if isinstance(event, Command)] == [kind for kind, _ in sent]
    bodies = [event.body for event in events if isinstance(event, Command)]
    assert bodies[0].feature_flags.supports_braid
    assert not bodies[2].metadata_auto_creation_enabled
    assert bodies[5].user_provided_producer_name
    assert bodies[6].metadata[0].key == "a"
    assert (bodies[8].txnid_most_bits, bodies[8].txnid_least_bits) == (1, 2)
    assert bodies[10].message_id == ids[0]
    assert bodies[11].message_publish_time == 1_700_000_000_000


def test_replies_reach_the_client() -> None:
    last = replies.message_id(-1, -1)
    sent = [
        (CommandType.AUTH_CHALLENGE, replies.auth_challenge("token", b"x", 20)),
        (CommandType.PARTITIONED_METADATA_RESPONSE, replies.partitions(1, 4)),
        (CommandType.PARTITIONED_METADATA_RESPONSE, replies.partitions_failed(1, 17, "no")),
        (CommandType.LOOKUP_RESPONSE, replies.lookup(1, LookupResult.CONNECT, "pulsar://a:1", authoritative=True)),
        (CommandType.LOOKUP_RESPONSE, replies.lookup_failed(1, 6, "later")),
        (CommandType.PRODUCER_SUCCESS, replies.producer_success(1, "n", schema_version=bytes(8), topic_epoch=3)),
        (CommandType.SEND_ERROR, replies.send_error(1, -1, 9, "corrupt")),
        (CommandType.CLOSE_PRODUCER, replies.close_producer(1)),
        (CommandType.CLOSE_CONSUMER, replies.close_consumer(1)),
        (CommandType.ACK_RESPONSE, replies.ack_response(1, 2, (3, 4), 23, "conflict")),
        (CommandType.ACTIVE_CONSUMER_CHANGE, replies.active_consumer_change(1, True)),
        (CommandType.REACHED_END_OF_TOPIC, replies.reached_end_of_topic(1)),
        (CommandType.GET_LAST_MESSAGE_ID_RESPONSE, replies.last_message_id(1, last, replies.message_id(1, 2, 3, 4))),
        (CommandType.GET_TOPICS_OF_NAMESPACE_RESPONSE, replies.topics_of_namespace(1, ["a", "b"], True, "00000000", False)),
        (CommandType.GET_SCHEMA_RESPONSE, replies.schema(1, Schema(name="", schema_data=b"", type="Avro"), bytes(8))),
        (CommandType.GET_SCHEMA_RESPONSE, replies.schema_failed(1, 11, "none")),
        (CommandType.GET_OR_CREATE_SCHEMA_RESPONSE, replies.schema_created(1, bytes(8))),
        (CommandType.GET_OR_CREATE_SCHEMA_RESPONSE, replies.schema_create_failed(1, 18, "bad")),
    ]
    events = ClientProtocol().receive(b"".join(raw for _, raw in sent))
    assert [event.type for event in events if isinstance(event, Command)] == [kind for kind, _ in sent]
    bodies = [event.body for event in events if isinstance(event, Command)]
    assert bodies[0].protocol_version == 20
    assert bodies[7].request_id == 2**64 - 1
    assert (bodies[9].txnid_most_bits, bodies[9].txnid_least_bits, bodies[9].error) == (3, 4, 23)
    assert bodies[12].last_message_id.ledgerId == 2**64 - 1
    assert not bodies[12].last_message_id.HasField("partition")
    assert bodies[12].consumer_mark_delete_position.batch_index == 4


def test_never_a_higher_protocol_version_than_the_client() -> None:
    for version, answered in ((12, 12), (21, 21), (99, 21)):
        (event,) = ClientProtocol().receive(replies.connected("b", version, 1000))
        assert isinstance(event, Command)
        assert event.body.protocol_version == answered


def test_an_incomplete_command_is_our_own_mistake() -> None:
    with pytest.raises(ValueError, match="incomplete"):
        replies.last_message_id(1, MessageIdData(ledgerId=1), None)
