"""Topic stats in the words and shapes of the admin API (protocol sheet 9.4), computed when asked."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec

from braid.broker.consumer import Consumer
from braid.broker.dispatch_shared import SharedDispatcher
from braid.broker.held_up import held_up_by, passed_over
from braid.broker.producer import Producer
from braid.broker.subscription import TYPE_LABELS, Subscription
from braid.broker.topic import Topic
from braid.scalable.api import BlockedBy
from braid.web.admin import Admin

Json = dict[str, Any]
ACCESS_MODES = ("Shared", "Exclusive", "WaitForExclusive", "ExclusiveWithFencing")
NO_SUM = ("averageMsgSize", "topicEpoch", "topicCreationTimeStamp", "lastPublishTimeStamp", "earliestMsgPublishTimeInBacklogs")


def iso(ms: int) -> str:
    """Milliseconds as ISO-8601 with offset."""
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds")


def backlog_bytes(topic: Topic, entries: int) -> int:
    """An estimate: the log's mean entry size times the backlog."""
    total = topic.log.total_entries
    return topic.log.total_size * entries // total if total else 0


def messages_out(subscription: Subscription) -> int:
    """Messages sent, by consumers that left and by those that are here."""
    return subscription.messages_out + sum(consumer.messages_out for consumer in subscription.consumers)


def bytes_out(subscription: Subscription) -> int:
    return subscription.bytes_out + sum(consumer.bytes_out for consumer in subscription.consumers)


def topic_stats(admin: Admin, topic: Topic) -> Json:
    """The stats of one plain topic or partition."""
    name = str(topic.name)
    rate = admin.rates.per_second
    subscriptions = {each.name: _subscription(admin, topic, each) for each in topic.subscriptions.values()}
    subscriptions |= {each: _unreadable(topic, why) for each, why in passed_over(topic).items()}
    log = topic.log
    return {
        "msgRateIn": rate((name, "in"), topic.messages_in),
        "msgThroughputIn": rate((name, "bytes in"), topic.bytes_in),
        "msgRateOut": sum(each["msgRateOut"] for each in subscriptions.values()),
        "msgThroughputOut": sum(each["msgThroughputOut"] for each in subscriptions.values()),
        "bytesInCounter": topic.bytes_in,
        "msgInCounter": topic.messages_in,
        "bytesOutCounter": sum(each["bytesOutCounter"] for each in subscriptions.values()),
        "msgOutCounter": sum(each["msgOutCounter"] for each in subscriptions.values()),
        "averageMsgSize": topic.bytes_in / topic.messages_in if topic.messages_in else 0.0,
        "msgChunkPublished": False,
        "storageSize": log.total_size,
        "backlogSize": max((each["backlogSize"] for each in subscriptions.values()), default=0),
        "publishRateLimitedTimes": 0,
        "earliestMsgPublishTimeInBacklogs": 0,
        "offloadedStorageSize": 0,
        "ongoingTxnCount": len(topic.transactions.open_transactions()),
        "abortedTxnCount": 0,
        "committedTxnCount": 0,
        "publishers": [_publisher(admin, topic, each) for each in topic.producers.values()],
        "waitingPublishers": len(topic.access.waiting),
        "subscriptions": subscriptions,
        "replication": {},
        "deduplicationStatus": "Enabled" if topic.dedup is not None else "Disabled",
        "topicEpoch": topic.access.epoch,
        "nonContiguousDeletedMessagesRanges": sum(
            each["nonContiguousDeletedMessagesRanges"] for each in subscriptions.values()
        ),
        "compaction": {
            "lastCompactionRemovedEventCount": 0,
            "lastCompactionSucceedTimestamp": 0,
            "lastCompactionFailedTimestamp": 0,
            "lastCompactionDurationTimeInMills": 0,
        },
        "nextTrim": msgspec.to_builtins(log.next_trim()),
        "ownerBroker": admin.broker_id,
        "topicCreationTimeStamp": log.created_ms,
        "lastPublishTimeStamp": topic.last_publish_ms,
    }


def _publisher(admin: Admin, topic: Topic, producer: Producer) -> Json:
    key = (str(topic.name), "producer", producer.info.name)
    return {
        "accessMode": ACCESS_MODES[int(producer.info.access_mode)],
        "msgRateIn": admin.rates.per_second((*key, "messages"), producer.messages_in),
        "msgThroughputIn": admin.rates.per_second((*key, "bytes"), producer.bytes_in),
        "averageMsgSize": producer.bytes_in / producer.messages_in if producer.messages_in else 0.0,
        "chunkedMessageRate": 0.0,
        "producerId": producer.producer_id,
        "supportsPartialProducer": False,
        "producerName": producer.info.name,
        "address": producer.link.peer,
        "connectedSince": iso(producer.connected_ms),
        "clientVersion": producer.link.client_version,
        "metadata": producer.info.metadata,
    }


def _subscription(admin: Admin, topic: Topic, subscription: Subscription) -> Json:
    cursor = subscription.cursor
    dispatcher = subscription.dispatcher
    backlog = cursor.backlog()
    key = (str(topic.name), "subscription", subscription.name)
    is_shared = isinstance(dispatcher, SharedDispatcher)
    active = None if isinstance(dispatcher, SharedDispatcher) else dispatcher.active
    out = messages_out(subscription)
    return {
        "msgRateOut": admin.rates.per_second((*key, "messages"), out),
        "msgThroughputOut": admin.rates.per_second((*key, "bytes"), bytes_out(subscription)),
        "bytesOutCounter": bytes_out(subscription),
        "msgOutCounter": out,
        "msgRateRedeliver": 0.0,
        "messageAckRate": 0.0,
        "chunkedMessageRate": 0,
        "msgBacklog": backlog,
        "backlogSize": backlog_bytes(topic, backlog),
        "msgBacklogNoDelayed": backlog,
        "earliestMsgPublishTimeInBacklog": 0,
        "blockedSubscriptionOnUnackedMsgs": any(consumer.is_blocked for consumer in subscription.consumers),
        "msgDelayed": 0,
        "msgInReplay": len(dispatcher.replay) if isinstance(dispatcher, SharedDispatcher) else 0,
        "unackedMessages": sum(consumer.unacked for consumer in subscription.consumers),
        "type": TYPE_LABELS[subscription.sub_type] if subscription.consumers else "None",
        "activeConsumerName": active.info.name if active is not None else "",
        "msgRateExpired": 0.0,
        "totalMsgExpired": 0,
        "lastExpireTimestamp": 0,
        "lastConsumedFlowTimestamp": 0,
        "lastConsumedTimestamp": 0,
        "lastAckedTimestamp": max((consumer.last_acked_ms for consumer in subscription.consumers), default=0),
        "lastMarkDeleteAdvancedTimestamp": 0,
        "consumers": [_consumer(admin, key, each) for each in subscription.consumers],
        "isDurable": subscription.is_durable,
        "durable": subscription.is_durable,
        "isReplicated": False,
        "replicated": False,
        "allowOutOfOrderDelivery": is_shared,
        "keySharedMode": None,
        "consumersAfterMarkDeletePosition": {},
        "nonContiguousDeletedMessagesRanges": cursor.ranges_count,
        "nonContiguousDeletedMessagesRangesSerializedSize": 0,
        "subscriptionProperties": dict(cursor.properties),
        "filterProcessedMsgCount": 0,
        "filterAcceptedMsgCount": 0,
        "filterRejectedMsgCount": 0,
        "filterRescheduledMsgCount": 0,
        "blocked_by": msgspec.to_builtins(held_up_by(topic, subscription)),
    }


def _unreadable(topic: Topic, why: BlockedBy) -> Json:
    """A subscription whose record cannot be read: everything is kept for it, and it has no consumers."""
    return {
        **dict.fromkeys(("msgRateOut", "msgThroughputOut"), 0.0),
        **dict.fromkeys(("bytesOutCounter", "msgOutCounter", "unackedMessages", "nonContiguousDeletedMessagesRanges"), 0),
        "msgBacklog": topic.log.total_entries,
        "backlogSize": topic.log.total_size,
        "type": "None",
        "consumers": [],
        "isDurable": True,
        "durable": True,
        "subscriptionProperties": {},
        "blocked_by": [msgspec.to_builtins(why)],
    }


def _consumer(admin: Admin, key: tuple[str, ...], consumer: Consumer) -> Json:
    key = (*key, consumer.info.name, str(consumer.info.consumer_id), consumer.link.peer)
    return {
        "appId": None,
        "msgRateOut": admin.rates.per_second((*key, "messages"), consumer.messages_out),
        "msgThroughputOut": admin.rates.per_second((*key, "bytes"), consumer.bytes_out),
        "bytesOutCounter": consumer.bytes_out,
        "msgOutCounter": consumer.messages_out,
        "msgRateRedeliver": admin.rates.per_second((*key, "redelivered"), consumer.redelivered),
        "messageAckRate": admin.rates.per_second((*key, "acked"), consumer.acked_messages),
        "chunkedMessageRate": 0.0,
        "consumerName": consumer.info.name,
        "availablePermits": consumer.permits,
        "unackedMessages": consumer.unacked,
        "avgMessagesPerEntry": 0,
        "blockedConsumerOnUnackedMsgs": consumer.is_blocked,
        "address": consumer.link.peer,
        "connectedSince": iso(consumer.connected_ms),
        "clientVersion": consumer.link.client_version,
        "lastAckedTimestamp": consumer.last_acked_ms,
        "lastConsumedTimestamp": 0,
        "firstMessagesSentTimestamp": 0,
        "firstConsumedFlowTimestamp": 0,
        "lastConsumedFlowTimestamp": 0,
        "keyHashRanges": None,
        "metadata": consumer.info.metadata,
    }


def partitioned_stats(parts: dict[str, Json], partitions: int, per_partition: bool) -> Json:
    """Sums over the partitions, with the partitions themselves if wanted."""
    total: Json = {"publishers": [], "subscriptions": {}, "replication": {}, "deduplicationStatus": None}
    for stats in parts.values():
        _add(total, stats)
        total["publishers"] += stats["publishers"]
        total["deduplicationStatus"] = stats["deduplicationStatus"]
        for name, subscription in stats["subscriptions"].items():
            into = total["subscriptions"].setdefault(name, {"consumers": [], "blocked_by": []})
            _add(into, subscription)
            into["consumers"] += subscription["consumers"]
            into["blocked_by"] += subscription.get("blocked_by", [])
    total["averageMsgSize"] = total.get("bytesInCounter", 0) / (total.get("msgInCounter", 0) or 1)
    trims = [stats["nextTrim"] for stats in parts.values() if "nextTrim" in stats]
    if trims:
        total["nextTrim"] = dict(min(trims, key=lambda each: (each["atMs"] is None, each["atMs"])))
        total["nextTrim"]["unreadBytes"] = sum(each["unreadBytes"] for each in trims)
    owners = {stats["ownerBroker"] for stats in parts.values()}
    total["ownerBroker"] = owners.pop() if len(owners) == 1 else None
    total["metadata"] = {"partitions": partitions, "deleted": False}
    total["partitions"] = parts if per_partition else {}
    return total


def _add(into: Json, stats: Json) -> None:
    """Add numbers, take the first of everything else; lists and maps are the caller's."""
    for key, value in stats.items():
        if isinstance(value, list | dict):
            continue
        if isinstance(value, int | float) and not isinstance(value, bool) and key not in NO_SUM:
            into[key] = into.get(key, 0) + value
        elif isinstance(value, int) and key in NO_SUM and not isinstance(value, bool):
            into[key] = max(into.get(key, 0), value)
        else:
            into.setdefault(key, value)
