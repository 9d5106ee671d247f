"""SUBSCRIBE, FLOW, ACK, REDELIVER, SEEK, UNSUBSCRIBE, CLOSE_CONSUMER and the questions a consumer asks."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from braid.broker import segments
from braid.broker.commands import schema
from braid.broker.consumer import NO_GAPS, Consumer, ConsumerInfo
from braid.broker.cursor_acks import acks_named, acks_read
from braid.broker.subscription import TYPE_LABELS, Subscription
from braid.broker.topic import check_subscription_name
from braid.broker.visible import last_visible
from braid.errors import (
    BraidError,
    ConsumerNotFound,
    DataLost,
    MetadataFailure,
    NotAllowed,
    NotReady,
    Overloaded,
    ProtocolError,
)
from braid.model.ackset import from_words as mask_from_words
from braid.model.names import TopicName
from braid.model.positions import EARLIEST, LATEST, Position
from braid.model.txn import TxnId
from braid.scalable.records import Initial
from braid.wire import messages, replies
from braid.wire.commands import encode, enum_value, signed64
from braid.wire.entries import entry_metadata
from braid.wire.types import AckType, CommandType, InitialPosition, SubType

if TYPE_CHECKING:
    from braid.broker.connection import BrokerConnection
    from braid.broker.topic import Topic


def position_of(message_id: messages.MessageIdData) -> Position:
    return Position(signed64(message_id.ledgerId), signed64(message_id.entryId))


async def subscribe(connection: BrokerConnection, body: messages.CommandSubscribe) -> None:
    """Attach a consumer, in the order of checks of the protocol sheet 5.1."""
    name = TopicName.parse(body.topic)
    connection.service.check_served(name)
    _check_supported(body)
    if sum(len(pair.key) + len(pair.value) for pair in body.metadata) > connection.config.max_consumer_metadata_chars:
        raise MetadataFailure(
            f"The consumer's metadata exceeds {connection.config.max_consumer_metadata_chars} characters; send less."
        )
    slot = ("consumer", body.consumer_id)
    if slot in connection.creating:
        raise NotReady(f"Consumer {body.consumer_id} is being created already.")
    if body.consumer_id in connection.consumers:
        connection.link.write(replies.success(body.request_id))
        return
    if len(connection.producers) + len(connection.consumers) >= connection.config.max_handles_per_connection:
        raise Overloaded("This connection has too many producers and consumers; close some or open another connection.")
    connection.creating[slot] = False
    try:
        await _subscribe(connection, body, name)
    finally:
        del connection.creating[slot]


def _check_supported(body: messages.CommandSubscribe) -> None:
    check_subscription_name(body.subscription)
    if body.read_compacted:
        raise NotAllowed("This broker has no compaction yet; subscribe without read_compacted.")


async def _subscribe(connection: BrokerConnection, body: messages.CommandSubscribe, name: TopicName) -> None:
    service = connection.service
    topic = await service.topic(name, create=body.force_topic_creation)
    if body.HasField("schema"):
        await schema.register(service, name, body.schema)
    policies = await service.namespaces.policies(name.namespace)
    start = position_of(body.start_message_id) if body.HasField("start_message_id") else None
    initial: Initial = "earliest" if InitialPosition(body.initialPosition) is InitialPosition.EARLIEST else "latest"
    may_create = policies.auto_subscription_creation
    properties = {pair.key: pair.value for pair in body.subscription_properties}
    resets = body.resets if body.HasField("resets") else None
    has_cursor_of_segment = topic.is_segment and body.durable
    if has_cursor_of_segment:
        if body.start_message_rollback_duration_sec > 0:
            raise _not_here(topic, body.subscription, "reset")
        await segments.check_assigned(service, topic, body.subscription, body.consumer_name, resets)
        subscription = await segments.subscribe(
            service,
            topic,
            body.subscription,
            initial,
            may_create=may_create,
            properties=properties,
            sub_type=SubType(body.subType),
        )
    else:
        subscription = await topic.subscription(
            body.subscription,
            is_durable=body.durable,
            start=start,
            initial=EARLIEST if initial == "earliest" else LATEST,
            properties=properties,
            allow_create=may_create,
        )
    if body.start_message_rollback_duration_sec > 0 and not subscription.consumers:
        since = connection.clock.now_ms() - body.start_message_rollback_duration_sec * 1000
        await subscription.seek(await topic.log.find_time(max(since, 0)))
    info = ConsumerInfo(
        consumer_id=body.consumer_id,
        name=body.consumer_name,
        priority=body.priority_level,
        metadata={pair.key: pair.value for pair in body.metadata},
        epoch=_epoch(body),
        partition=name.partition_index,
    )
    consumer = await subscription.attach(info, connection.link, SubType(body.subType))
    try:
        if has_cursor_of_segment:
            await segments.check_assigned(service, topic, body.subscription, body.consumer_name, resets)
        if NO_GAPS in info.metadata and start is not None:  # after it is attached: from now on it hears of trims
            _check_kept(topic, start, body.start_message_id)
        if connection.creating["consumer", body.consumer_id] or consumer.is_closed:
            raise NotReady(f"Consumer {body.consumer_id} was closed while it was being created.")
    except BaseException:
        subscription.detach(consumer)  # it has no permits yet
        raise
    connection.add_consumer(consumer)
    connection.link.write(replies.success(body.request_id))


def _check_kept(topic: Topic, start: Position, last_read: messages.MessageIdData) -> None:
    """Refuse a reader that has read up to `start`, perhaps not to the end of that batch, if what follows is gone."""
    gone = topic.log.trimmed_position
    if start.ledger_id < 0 or gone is None or start > gone:
        return
    if start < gone or last_read.batch_index + 1 < last_read.batch_size:
        raise DataLost(
            f"What follows {start} in {topic.name} is not stored any more: the first entry that is kept is "
            f"{topic.log.first_position}."
        )


def flow(connection: BrokerConnection, body: messages.CommandFlow) -> None:
    if body.messagePermits == 0:
        raise ProtocolError(f"A FLOW for consumer {body.consumer_id} grants no permits.")
    consumer = connection.consumers.get(body.consumer_id)
    if consumer is not None:
        consumer.subscription.flow(consumer, body.messagePermits)


def acknowledge(connection: BrokerConnection, body: messages.CommandAck) -> None:
    """Apply an ACK; it is answered only if it carries a request id, once the cursor is durable."""
    consumer = connection.consumers.get(body.consumer_id)
    wants_answer = body.HasField("request_id")
    if consumer is None:
        if wants_answer:
            _answer_ack(connection, body, ConsumerNotFound(f"Consumer {body.consumer_id} does not exist on this connection."))
        return
    if body.HasField("txnid_most_bits") or body.HasField("txnid_least_bits"):
        _acknowledge_in_transaction(connection, body, consumer)
        return
    try:
        _apply_ack(consumer, body)
    except BraidError as failure:
        if wants_answer:
            _answer_ack(connection, body, failure)
        return
    if not wants_answer:
        return
    if len(connection.tasks) >= connection.config.max_requests_per_connection:
        _answer_ack(connection, body, Overloaded("Too many requests under way on this connection; acknowledge again later."))
        return
    connection.tasks.spawn(_answer_when_durable(connection, body, consumer.subscription), "ack")


def _acknowledge_in_transaction(connection: BrokerConnection, body: messages.CommandAck, consumer: Consumer) -> None:
    """Hold what an ACK names until its transaction is decided; it is answered once that would survive a crash."""
    subscription = consumer.subscription
    txn = TxnId(body.txnid_most_bits, body.txnid_least_bits)
    is_cumulative = AckType(body.ack_type) is AckType.CUMULATIVE
    try:
        connection.service.transactions.check_enabled()
        if len(connection.tasks) >= connection.config.max_requests_per_connection:
            raise Overloaded("Too many requests under way on this connection; acknowledge again later.")
        if is_cumulative and len(body.message_id) != 1:
            raise NotAllowed(f"A cumulative ACK names one message; this one of consumer {body.consumer_id} does not.")
        acks = acks_named(subscription.log, body.message_id)
        begun = None if acks is None else subscription.begin_acks(txn, acks, cumulative=is_cumulative)
    except BraidError as failure:
        _answer_ack(connection, body, failure)
        return

    async def answer_when_held() -> None:
        try:
            if begun is not None:
                await begun
            else:  # the size of a batch has to be read
                read = await acks_read(subscription.log, body.message_id)
                await subscription.begin_acks(txn, read, cumulative=is_cumulative)
        except BraidError as failure:
            _answer_ack(connection, body, failure)
            return
        consumer.acked_messages += len(body.message_id)
        consumer.last_acked_ms = connection.clock.now_ms()
        _answer_ack(connection, body, None)

    connection.tasks.spawn(answer_when_held(), "ack in a transaction")


def _apply_ack(consumer: Consumer, body: messages.CommandAck) -> None:
    subscription = consumer.subscription
    ids = body.message_id
    if AckType(body.ack_type) is AckType.CUMULATIVE:
        if len(ids) == 1:
            subscription.acknowledge_cumulative(consumer, position_of(ids[0]), list(ids[0].ack_set))
        return
    whole: list[Position] = []
    masks: dict[Position, int] = {}
    for message_id in ids:
        position = position_of(message_id)
        if message_id.ack_set:
            masks[position] = masks.get(position, -1) & mask_from_words(message_id.ack_set)
        else:
            whole.append(position)
    subscription.acknowledge(consumer, whole, masks)
    consumer.acked_messages += len(ids)


def _answer_ack(connection: BrokerConnection, body: messages.CommandAck, failure: BraidError | None) -> None:
    if body.HasField("request_id"):
        connection.link.write(
            replies.ack_response(body.consumer_id, body.request_id)
            if failure is None
            else replies.ack_response(body.consumer_id, body.request_id, code=failure.code, text=failure.message)
        )


async def _answer_when_durable(connection: BrokerConnection, body: messages.CommandAck, subscription: Subscription) -> None:
    try:
        await subscription.cursor.flush()
    except BraidError as failure:
        _answer_ack(connection, body, failure)
    else:
        _answer_ack(connection, body, None)


def redeliver(connection: BrokerConnection, body: messages.CommandRedeliverUnacknowledgedMessages) -> None:
    consumer = connection.consumers.get(body.consumer_id)
    if consumer is not None:
        consumer.subscription.redeliver(consumer, [position_of(each) for each in body.message_ids], _epoch(body))


def _epoch(body: messages.CommandSubscribe | messages.CommandRedeliverUnacknowledgedMessages) -> int | None:
    """The consumer epoch a command states; -1 means none."""
    epoch = signed64(body.consumer_epoch) if body.HasField("consumer_epoch") else -1
    return epoch if epoch >= 0 else None


async def close(connection: BrokerConnection, body: messages.CommandCloseConsumer) -> None:
    """Unknown ids succeed (idempotent)."""
    consumer = connection.consumers.pop(body.consumer_id, None)
    slot = ("consumer", body.consumer_id)
    if consumer is not None:
        consumer.subscription.left(consumer)
    elif (scalable := connection.scalable_consumers.pop(body.consumer_id, None)) is not None:
        await scalable.leave()  # its segments go to others at once (L-15)
    elif ("scalable consumer", body.consumer_id) in connection.creating:
        connection.creating["scalable consumer", body.consumer_id] = True
    elif slot in connection.creating:
        connection.creating[slot] = True
    connection.link.write(replies.success(body.request_id))


def _consumer(connection: BrokerConnection, consumer_id: int) -> Consumer:
    consumer = connection.consumers.get(consumer_id)
    if consumer is None:
        raise MetadataFailure(f"Consumer {consumer_id} does not exist on this connection; subscribe first.")
    return consumer


def _check_own(subscription: Subscription, what: str) -> None:
    """A durable subscription of a scalable topic is one thing over all segments, and its order rests on that (INV8)."""
    if subscription.topic.is_segment and subscription.is_durable:
        raise _not_here(subscription.topic, subscription.name, what)


def _not_here(topic: Topic, subscription: str, what: str) -> NotAllowed:
    return NotAllowed(
        f"The subscription {subscription} is one of {topic.name.parent} and is {what} there (admin API), not in one segment."
    )


async def unsubscribe(connection: BrokerConnection, body: messages.CommandUnsubscribe) -> None:
    consumer = _consumer(connection, body.consumer_id)
    subscription = consumer.subscription
    _check_own(subscription, "deleted")
    subscription.check_unsubscribe(consumer, body.force)
    connection.consumers.pop(body.consumer_id, None)
    subscription.detach(consumer)
    if subscription.topic.subscriptions.get(subscription.name) is subscription:
        await subscription.topic.delete_subscription(subscription.name)
    connection.link.write(replies.success(body.request_id))


async def seek(connection: BrokerConnection, body: messages.CommandSeek) -> None:
    """CLOSE_CONSUMER leaves before SUCCESS, so that the client drops what it has queued (trap 2)."""
    subscription = _consumer(connection, body.consumer_id).subscription
    _check_own(subscription, "reset")
    if body.HasField("message_id"):
        mask = mask_from_words(body.message_id.ack_set) if body.message_id.ack_set else None
        await subscription.seek(position_of(body.message_id), mask)
    elif body.HasField("message_publish_time"):
        await subscription.seek(await subscription.log.find_time(body.message_publish_time))
    else:
        raise MetadataFailure("A SEEK needs a message id or a time.")
    connection.link.write(replies.success(body.request_id))


async def last_message_id(connection: BrokerConnection, body: messages.CommandGetLastMessageId) -> None:
    """The last entry that may be read, with the index of its last message inside a batch, and how far the subscription is
    acknowledged."""
    consumer = _consumer(connection, body.consumer_id)
    last, entry = await last_visible(consumer.subscription.topic)
    batch_index = -1
    if entry is not None:
        metadata = entry_metadata(entry.body)
        if metadata.HasField("num_messages_in_batch"):
            batch_index = metadata.num_messages_in_batch - 1
    mark_delete = consumer.subscription.cursor.mark_delete
    if mark_delete.ledger_id < 0 and NO_GAPS in consumer.info.metadata:  # nothing is stored: where that is must be known to it
        mark_delete = consumer.subscription.log.trimmed_position or Position(0, -1)
    connection.link.write(
        replies.last_message_id(
            body.request_id,
            replies.message_id(last.ledger_id, last.entry_id, consumer.info.partition, batch_index),
            replies.message_id(mark_delete.ledger_id, mark_delete.entry_id) if mark_delete.ledger_id >= 0 else None,
        )
    )


def stats(connection: BrokerConnection, body: messages.CommandConsumerStats) -> None:
    reply = messages.CommandConsumerStatsResponse(request_id=body.request_id)
    consumer = connection.consumers.get(body.consumer_id)
    if consumer is None:
        failure = ConsumerNotFound(f"Consumer {body.consumer_id} does not exist on this connection.")
        reply.error_code = enum_value(failure.code)
        reply.error_message = failure.message
    else:
        subscription = consumer.subscription
        reply.consumerName = consumer.info.name
        reply.availablePermits = max(consumer.permits, 0)
        reply.unackedMessages = consumer.unacked
        reply.blockedConsumerOnUnackedMsgs = consumer.is_blocked
        reply.address = consumer.link.peer
        reply.connectedSince = datetime.fromtimestamp(consumer.connected_ms / 1000, UTC).isoformat()
        reply.type = TYPE_LABELS[subscription.sub_type]
        reply.msgBacklog = subscription.cursor.backlog()
    connection.link.write(encode(CommandType.CONSUMER_STATS_RESPONSE, reply))
