"""What a broker says: one function per answer or push, each returning a whole frame.

Receipts and messages, which are written per entry, are in `encode`. Ids may be negative; they are written as two's complement.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from braid.wire.commands import encode, enum_value, unsigned64
from braid.wire.messages import (
    AuthData,
    CommandAckResponse,
    CommandActiveConsumerChange,
    CommandAuthChallenge,
    CommandCloseConsumer,
    CommandCloseProducer,
    CommandConnected,
    CommandError,
    CommandGetLastMessageIdResponse,
    CommandGetOrCreateSchemaResponse,
    CommandGetSchemaResponse,
    CommandGetTopicsOfNamespaceResponse,
    CommandLookupTopicResponse,
    CommandPartitionedTopicMetadataResponse,
    CommandPing,
    CommandPong,
    CommandProducerSuccess,
    CommandReachedEndOfTopic,
    CommandSendError,
    CommandSuccess,
    FeatureFlags,
    MessageIdData,
    Schema,
)
from braid.wire.types import PROTOCOL_VERSION, CommandType, LookupResult, PartitionsResult

NO_REQUEST = -1
"""Request id of pushes and of errors that answer no request."""

PING = encode(CommandType.PING, CommandPing())
PONG = encode(CommandType.PONG, CommandPong())


def message_id(ledger_id: int, entry_id: int, partition: int = -1, batch_index: int = -1) -> MessageIdData:
    """A message id for an answer; partition and batch index are left out at -1, their default."""
    made = MessageIdData(ledgerId=unsigned64(ledger_id), entryId=unsigned64(entry_id))
    if partition >= 0:
        made.partition = partition
    if batch_index >= 0:
        made.batch_index = batch_index
    return made


def connected(server_version: str, client_protocol: int, max_message_size: int, flags: FeatureFlags | None = None) -> bytes:
    """CONNECTED; never answers a higher protocol version than the client's."""
    body = CommandConnected(
        server_version=server_version,
        protocol_version=min(PROTOCOL_VERSION, client_protocol),
        max_message_size=max_message_size,
        feature_flags=flags,
    )
    return encode(CommandType.CONNECTED, body)


def auth_challenge(method: str, data: bytes, client_protocol: int) -> bytes:
    """AUTH_CHALLENGE, to begin or to refresh an authentication."""
    challenge = AuthData(auth_method_name=method, auth_data=data)
    body = CommandAuthChallenge(challenge=challenge, protocol_version=min(PROTOCOL_VERSION, client_protocol))
    return encode(CommandType.AUTH_CHALLENGE, body)


def success(request_id: int) -> bytes:
    """SUCCESS."""
    return encode(CommandType.SUCCESS, CommandSuccess(request_id=unsigned64(request_id)))


def error(request_id: int, code: int, text: str) -> bytes:
    """ERROR with a `ServerError` number."""
    return encode(CommandType.ERROR, CommandError(request_id=unsigned64(request_id), error=enum_value(code), message=text))


def partitions(request_id: int, count: int) -> bytes:
    """PARTITIONED_METADATA_RESPONSE: the number of partitions, 0 for a topic without."""
    body = CommandPartitionedTopicMetadataResponse(
        request_id=unsigned64(request_id), partitions=count, response=enum_value(PartitionsResult.SUCCESS)
    )
    return encode(CommandType.PARTITIONED_METADATA_RESPONSE, body)


def partitions_failed(request_id: int, code: int, text: str) -> bytes:
    """PARTITIONED_METADATA_RESPONSE that refuses."""
    body = CommandPartitionedTopicMetadataResponse(
        request_id=unsigned64(request_id),
        response=enum_value(PartitionsResult.FAILED),
        error=enum_value(code),
        message=text,
    )
    return encode(CommandType.PARTITIONED_METADATA_RESPONSE, body)


def lookup(
    request_id: int,
    result: LookupResult,
    broker_url: str,
    broker_url_tls: str | None = None,
    authoritative: bool = False,
    proxy_through_service_url: bool = False,
) -> bytes:
    """LOOKUP_RESPONSE that names a broker: CONNECT to it, or ask it (REDIRECT)."""
    body = CommandLookupTopicResponse(
        request_id=unsigned64(request_id),
        response=enum_value(result),
        brokerServiceUrl=broker_url,
        brokerServiceUrlTls=broker_url_tls,
        authoritative=authoritative,
        proxy_through_service_url=proxy_through_service_url,
    )
    return encode(CommandType.LOOKUP_RESPONSE, body)


def lookup_failed(request_id: int, code: int, text: str) -> bytes:
    """LOOKUP_RESPONSE that refuses."""
    body = CommandLookupTopicResponse(
        request_id=unsigned64(request_id), response=enum_value(LookupResult.FAILED), error=enum_value(code), message=text
    )
    return encode(CommandType.LOOKUP_RESPONSE, body)


def producer_success(
    request_id: int,
    producer_name: str,
    last_sequence_id: int = -1,
    schema_version: bytes | None = None,
    topic_epoch: int | None = None,
    producer_ready: bool = True,
    elders: Mapping[int, int] | None = None,
) -> bytes:
    """PRODUCER_SUCCESS; `producer_ready=False` tells a producer that waits for exclusive access to keep waiting. Only Braid's
    clients know of `elders`: what their lanes stored in earlier segments."""
    body = CommandProducerSuccess(
        request_id=unsigned64(request_id),
        producer_name=producer_name,
        last_sequence_id=last_sequence_id,
        schema_version=schema_version,
        topic_epoch=topic_epoch,
        producer_ready=producer_ready,
    )
    for segment_id, last in (elders or {}).items():
        body.elders.add(segment_id=segment_id, last_sequence_id=last)
    return encode(CommandType.PRODUCER_SUCCESS, body)


def send_error(producer_id: int, sequence_id: int, code: int, text: str) -> bytes:
    """SEND_ERROR. C++ clients answer any code but ChecksumError by reconnecting and sending again, for ever."""
    body = CommandSendError(
        producer_id=unsigned64(producer_id), sequence_id=unsigned64(sequence_id), error=enum_value(code), message=text
    )
    return encode(CommandType.SEND_ERROR, body)


def close_producer(producer_id: int, request_id: int = NO_REQUEST, is_settled: bool = False) -> bytes:
    """CLOSE_PRODUCER pushed by the broker; `is_settled` if nothing is stored that was not answered."""
    body = CommandCloseProducer(producer_id=unsigned64(producer_id), request_id=unsigned64(request_id))
    if is_settled:
        body.is_settled = True
    return encode(CommandType.CLOSE_PRODUCER, body)


def close_consumer(consumer_id: int, request_id: int = NO_REQUEST) -> bytes:
    """CLOSE_CONSUMER pushed by the broker."""
    body = CommandCloseConsumer(consumer_id=unsigned64(consumer_id), request_id=unsigned64(request_id))
    return encode(CommandType.CLOSE_CONSUMER, body)


def ack_response(
    consumer_id: int, request_id: int, txn: tuple[int, int] | None = None, code: int | None = None, text: str | None = None
) -> bytes:
    """ACK_RESPONSE; with a code it refuses."""
    body = CommandAckResponse(consumer_id=unsigned64(consumer_id), request_id=unsigned64(request_id), message=text)
    if txn is not None:
        body.txnid_most_bits, body.txnid_least_bits = txn
    if code is not None:
        body.error = enum_value(code)
    return encode(CommandType.ACK_RESPONSE, body)


def active_consumer_change(consumer_id: int, is_active: bool) -> bytes:
    """ACTIVE_CONSUMER_CHANGE, for Failover subscriptions."""
    body = CommandActiveConsumerChange(consumer_id=unsigned64(consumer_id), is_active=is_active)
    return encode(CommandType.ACTIVE_CONSUMER_CHANGE, body)


def reached_end_of_topic(consumer_id: int) -> bytes:
    """REACHED_END_OF_TOPIC. Only for peers that know it: C++ and Go clients drop the connection."""
    return encode(CommandType.REACHED_END_OF_TOPIC, CommandReachedEndOfTopic(consumer_id=unsigned64(consumer_id)))


def last_message_id(request_id: int, last: MessageIdData, mark_delete: MessageIdData | None) -> bytes:
    """GET_LAST_MESSAGE_ID_RESPONSE."""
    body = CommandGetLastMessageIdResponse(
        request_id=unsigned64(request_id), last_message_id=last, consumer_mark_delete_position=mark_delete
    )
    return encode(CommandType.GET_LAST_MESSAGE_ID_RESPONSE, body)


def topics_of_namespace(
    request_id: int, topics: Iterable[str], filtered: bool = False, topics_hash: str | None = None, changed: bool = True
) -> bytes:
    """GET_TOPICS_OF_NAMESPACE_RESPONSE."""
    body = CommandGetTopicsOfNamespaceResponse(
        request_id=unsigned64(request_id), topics=topics, filtered=filtered, topics_hash=topics_hash, changed=changed
    )
    return encode(CommandType.GET_TOPICS_OF_NAMESPACE_RESPONSE, body)


def schema(request_id: int, found: Schema, version: bytes) -> bytes:
    """GET_SCHEMA_RESPONSE."""
    body = CommandGetSchemaResponse(request_id=unsigned64(request_id), schema=found, schema_version=version)
    return encode(CommandType.GET_SCHEMA_RESPONSE, body)


def schema_failed(request_id: int, code: int, text: str) -> bytes:
    """GET_SCHEMA_RESPONSE that refuses; TopicNotFound when there is no schema."""
    body = CommandGetSchemaResponse(request_id=unsigned64(request_id), error_code=enum_value(code), error_message=text)
    return encode(CommandType.GET_SCHEMA_RESPONSE, body)


def schema_created(request_id: int, version: bytes) -> bytes:
    """GET_OR_CREATE_SCHEMA_RESPONSE."""
    body = CommandGetOrCreateSchemaResponse(request_id=unsigned64(request_id), schema_version=version)
    return encode(CommandType.GET_OR_CREATE_SCHEMA_RESPONSE, body)


def schema_create_failed(request_id: int, code: int, text: str) -> bytes:
    """GET_OR_CREATE_SCHEMA_RESPONSE that refuses."""
    body = CommandGetOrCreateSchemaResponse(request_id=unsigned64(request_id), error_code=enum_value(code), error_message=text)
    return encode(CommandType.GET_OR_CREATE_SCHEMA_RESPONSE, body)


def schema_version(number: int) -> bytes:
    """The bytes of a schema version."""
    return number.to_bytes(8, "big", signed=True)


def read_schema_version(raw: bytes) -> int | None:
    """The number of a schema version; only the first eight bytes count, None if there are fewer."""
    return int.from_bytes(raw[:8], "big", signed=True) if len(raw) >= 8 else None
