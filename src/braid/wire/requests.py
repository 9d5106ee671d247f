"""What a client says: one function per command, each returning a whole frame. The counterpart of `replies`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from braid.wire.commands import encode, enum_value, unsigned64
from braid.wire.messages import (
    AuthData,
    CommandAck,
    CommandAuthResponse,
    CommandCloseConsumer,
    CommandCloseProducer,
    CommandConnect,
    CommandFlow,
    CommandGetLastMessageId,
    CommandGetSchema,
    CommandGetTopicsOfNamespace,
    CommandLookupTopic,
    CommandPartitionedTopicMetadata,
    CommandProducer,
    CommandRedeliverUnacknowledgedMessages,
    CommandReportPlaces,
    CommandScalableTopicClose,
    CommandScalableTopicLookup,
    CommandScalableTopicSubscribe,
    CommandSeek,
    CommandSend,
    CommandSubscribe,
    CommandUnsubscribe,
    CommandWatchScalableTopics,
    CommandWatchScalableTopicsClose,
    FeatureFlags,
    KeyValue,
    MessageIdData,
    Schema,
)
from braid.wire.types import (
    PROTOCOL_VERSION,
    AckType,
    CommandType,
    InitialPosition,
    ProducerAccessMode,
    ScalableConsumerType,
    SubType,
    TopicsMode,
)


def connect(
    client_version: str,
    auth_method: str = "none",
    auth_data: bytes | None = None,
    proxy_to_broker_url: str | None = None,
    is_braid: bool = True,
) -> bytes:
    """CONNECT as Braid's own client, or as any other one with `is_braid=False`."""
    flags = FeatureFlags(supports_auth_refresh=True, supports_broker_entry_metadata=True, supports_partial_producer=True)
    if is_braid:
        flags.supports_braid = True
    body = CommandConnect(
        client_version=client_version,
        protocol_version=PROTOCOL_VERSION,
        auth_method_name=auth_method,
        auth_data=auth_data,
        proxy_to_broker_url=proxy_to_broker_url,
        feature_flags=flags,
    )
    return encode(CommandType.CONNECT, body)


def auth_response(client_version: str, auth_method: str, auth_data: bytes) -> bytes:
    """AUTH_RESPONSE to a challenge."""
    response = AuthData(auth_method_name=auth_method, auth_data=auth_data)
    body = CommandAuthResponse(client_version=client_version, response=response, protocol_version=PROTOCOL_VERSION)
    return encode(CommandType.AUTH_RESPONSE, body)


def partitioned_metadata(request_id: int, topic: str, may_create: bool = True) -> bytes:
    """PARTITIONED_METADATA: how many partitions a topic has."""
    body = CommandPartitionedTopicMetadata(topic=topic, request_id=request_id, metadata_auto_creation_enabled=may_create)
    return encode(CommandType.PARTITIONED_METADATA, body)


def lookup(request_id: int, topic: str, authoritative: bool = False, listener: str | None = None) -> bytes:
    """LOOKUP: which broker serves a topic."""
    body = CommandLookupTopic(
        topic=topic, request_id=request_id, authoritative=authoritative, advertised_listener_name=listener
    )
    return encode(CommandType.LOOKUP, body)


def topics_of_namespace(
    request_id: int,
    namespace: str,
    mode: TopicsMode = TopicsMode.PERSISTENT,
    pattern: str | None = None,
    topics_hash: str | None = None,
) -> bytes:
    """GET_TOPICS_OF_NAMESPACE."""
    body = CommandGetTopicsOfNamespace(
        request_id=request_id, namespace=namespace, mode=enum_value(mode), topics_pattern=pattern, topics_hash=topics_hash
    )
    return encode(CommandType.GET_TOPICS_OF_NAMESPACE, body)


def producer(
    request_id: int,
    producer_id: int,
    topic: str,
    name: str | None = None,
    access_mode: ProducerAccessMode = ProducerAccessMode.SHARED,
    epoch: int = 0,
    topic_epoch: int | None = None,
    schema: Schema | None = None,
    metadata: Mapping[str, str] | None = None,
    is_transactional: bool = False,
) -> bytes:
    """PRODUCER; without a name the broker gives one."""
    body = CommandProducer(
        topic=topic,
        producer_id=producer_id,
        request_id=request_id,
        producer_name=name,
        epoch=epoch,
        user_provided_producer_name=name is not None,
        producer_access_mode=enum_value(access_mode),
        topic_epoch=topic_epoch,
        schema=schema,
        metadata=_pairs(metadata),
        txn_enabled=is_transactional,
    )
    return encode(CommandType.PRODUCER, body)


def send(
    producer_id: int,
    sequence_id: int,
    entry: bytes,
    num_messages: int = 1,
    highest_sequence_id: int | None = None,
    txn: tuple[int, int] | None = None,
    is_chunk: bool = False,
) -> bytes:
    """SEND with its entry (see `entries.build_entry`). `txn` is (most, least) bits."""
    body = CommandSend(producer_id=producer_id, sequence_id=unsigned64(sequence_id))
    if num_messages != 1:
        body.num_messages = num_messages
    if txn is not None:
        body.txnid_most_bits, body.txnid_least_bits = txn
    if highest_sequence_id is not None:
        body.highest_sequence_id = unsigned64(highest_sequence_id)
    if is_chunk:
        body.is_chunk = True
    frame = encode(CommandType.SEND, body)
    return b"".join(((len(frame) - 4 + len(entry)).to_bytes(4, "big"), frame[4:], entry))


def subscribe(
    request_id: int,
    consumer_id: int,
    topic: str,
    subscription: str,
    sub_type: SubType,
    consumer_name: str | None = None,
    is_durable: bool = True,
    start: MessageIdData | None = None,
    initial_position: InitialPosition = InitialPosition.LATEST,
    priority_level: int = 0,
    schema: Schema | None = None,
    metadata: Mapping[str, str] | None = None,
    properties: Mapping[str, str] | None = None,
    consumer_epoch: int | None = None,
    resets: int | None = None,
) -> bytes:
    """SUBSCRIBE; a reader is a subscription that is not durable and has a start."""
    body = CommandSubscribe(
        topic=topic,
        subscription=subscription,
        subType=enum_value(sub_type),
        consumer_id=consumer_id,
        request_id=request_id,
        consumer_name=consumer_name,
        durable=is_durable,
        start_message_id=start,
        initialPosition=enum_value(initial_position),
        priority_level=priority_level,
        schema=schema,
        metadata=_pairs(metadata),
        subscription_properties=_pairs(properties),
        consumer_epoch=consumer_epoch,
        resets=resets,
    )
    return encode(CommandType.SUBSCRIBE, body)


def flow(consumer_id: int, permits: int) -> bytes:
    """FLOW: the broker may send so many messages more."""
    return encode(CommandType.FLOW, CommandFlow(consumer_id=consumer_id, messagePermits=permits))


def ack(
    consumer_id: int,
    ids: Iterable[MessageIdData],
    ack_type: AckType = AckType.INDIVIDUAL,
    request_id: int | None = None,
    txn: tuple[int, int] | None = None,
) -> bytes:
    """ACK; answered only with a request id."""
    body = CommandAck(consumer_id=consumer_id, ack_type=enum_value(ack_type), message_id=ids, request_id=request_id)
    if txn is not None:
        body.txnid_most_bits, body.txnid_least_bits = txn
    return encode(CommandType.ACK, body)


def redeliver(consumer_id: int, ids: Iterable[MessageIdData] = (), consumer_epoch: int | None = None) -> bytes:
    """REDELIVER_UNACKNOWLEDGED_MESSAGES; without ids everything that is unacknowledged."""
    body = CommandRedeliverUnacknowledgedMessages(consumer_id=consumer_id, message_ids=ids, consumer_epoch=consumer_epoch)
    return encode(CommandType.REDELIVER_UNACKNOWLEDGED_MESSAGES, body)


def seek(request_id: int, consumer_id: int, to: MessageIdData | int) -> bytes:
    """SEEK to a message id or to a time in ms."""
    body = CommandSeek(consumer_id=consumer_id, request_id=request_id)
    if isinstance(to, int):
        body.message_publish_time = to
    else:
        body.message_id.CopyFrom(to)
    return encode(CommandType.SEEK, body)


def get_last_message_id(request_id: int, consumer_id: int) -> bytes:
    """GET_LAST_MESSAGE_ID."""
    body = CommandGetLastMessageId(consumer_id=consumer_id, request_id=request_id)
    return encode(CommandType.GET_LAST_MESSAGE_ID, body)


def unsubscribe(request_id: int, consumer_id: int, force: bool = False) -> bytes:
    """UNSUBSCRIBE: delete the subscription."""
    body = CommandUnsubscribe(consumer_id=consumer_id, request_id=request_id, force=force)
    return encode(CommandType.UNSUBSCRIBE, body)


def close_producer(request_id: int, producer_id: int) -> bytes:
    """CLOSE_PRODUCER."""
    return encode(CommandType.CLOSE_PRODUCER, CommandCloseProducer(producer_id=producer_id, request_id=request_id))


def close_consumer(request_id: int, consumer_id: int) -> bytes:
    """CLOSE_CONSUMER."""
    return encode(CommandType.CLOSE_CONSUMER, CommandCloseConsumer(consumer_id=consumer_id, request_id=request_id))


def get_schema(request_id: int, topic: str, version: bytes | None = None) -> bytes:
    """GET_SCHEMA: the latest schema, or that of a version."""
    body = CommandGetSchema(request_id=request_id, topic=topic, schema_version=version)
    return encode(CommandType.GET_SCHEMA, body)


def scalable_topic_lookup(session_id: int, topic: str, may_create: bool = True) -> bytes:
    """SCALABLE_TOPIC_LOOKUP: open a session that is told the topic's layout now and whenever it changes."""
    body = CommandScalableTopicLookup(session_id=session_id, topic=topic, create_if_missing=may_create)
    return encode(CommandType.SCALABLE_TOPIC_LOOKUP, body)


def scalable_topic_close(session_id: int) -> bytes:
    """SCALABLE_TOPIC_CLOSE: end a layout session."""
    return encode(CommandType.SCALABLE_TOPIC_CLOSE, CommandScalableTopicClose(session_id=session_id))


def watch_scalable_topics(watch_id: int, namespace: str) -> bytes:
    """WATCH_SCALABLE_TOPICS: answered by a snapshot, and by what changes."""
    return encode(CommandType.WATCH_SCALABLE_TOPICS, CommandWatchScalableTopics(watch_id=watch_id, namespace=namespace))


def watch_scalable_topics_close(watch_id: int) -> bytes:
    """WATCH_SCALABLE_TOPICS_CLOSE; not answered."""
    return encode(CommandType.WATCH_SCALABLE_TOPICS_CLOSE, CommandWatchScalableTopicsClose(watch_id=watch_id))


def scalable_topic_subscribe(
    request_id: int,
    topic: str,
    subscription: str,
    consumer_name: str,
    consumer_id: int,
    consumer_type: ScalableConsumerType = ScalableConsumerType.STREAM,
    initial_position: InitialPosition = InitialPosition.EARLIEST,
    *,
    hands_over: bool = False,
) -> bytes:
    """SCALABLE_TOPIC_SUBSCRIBE: register at the topic's controller and be assigned segments. Only Braid's brokers know the
    initial position, which matters if the subscription does not exist yet, and `hands_over`: see `report_places`."""
    body = CommandScalableTopicSubscribe(
        request_id=request_id,
        topic=topic,
        subscription=subscription,
        consumer_name=consumer_name,
        consumer_id=consumer_id,
        consumer_type=enum_value(consumer_type),
        initial_position=enum_value(initial_position),
        hands_over=hands_over or None,
    )
    return encode(CommandType.SCALABLE_TOPIC_SUBSCRIBE, body)


def report_places(
    request_id: int, consumer_id: int, term: int, places: Mapping[int, bytes | None], released: Collection[int]
) -> bytes:
    """REPORT_PLACES: where a member of a checkpoint group stands, and which of these segments it has let go of."""
    body = CommandReportPlaces(request_id=request_id, consumer_id=consumer_id, term=term)
    for number, place in places.items():
        body.places.add(segment_id=number, place=place, is_released=number in released or None)
    return encode(CommandType.REPORT_PLACES, body)


def _pairs(values: Mapping[str, str] | None) -> list[KeyValue]:
    return [KeyValue(key=key, value=value) for key, value in values.items()] if values else []
