"""What the admin API answers and takes, as types. Field names on the wire are Pulsar's; unknown fields are ignored. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from braid.client.admin_scalable_types import Blocked
from braid.client.messages import EARLIEST, LATEST, MessageId
from braid.model.retention import NextTrim
from braid.wire.batch import decode_batch


class _Answer(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A JSON object of the admin API."""


class ClusterData(_Answer, frozen=True):
    """Addresses of a cluster."""

    service_url: str | None = None
    service_url_tls: str | None = None
    broker_service_url: str | None = None
    broker_service_url_tls: str | None = None


class TenantInfo(_Answer, frozen=True):
    """Who administers a tenant, and the clusters it may use."""

    admin_roles: list[str] = []
    allowed_clusters: list[str] = []


class Retention(_Answer, frozen=True):
    """How long acknowledged messages are kept; -1 is no limit."""

    retention_time_in_minutes: int
    retention_size_in_mb: int = msgspec.field(name="retentionSizeInMB")


class AutoTopicCreation(_Answer, frozen=True):
    """Whether and how topics come to be on first use."""

    allow_auto_topic_creation: bool
    topic_type: str = "non-partitioned"
    default_num_partitions: int | None = None


class AutoSubscriptionCreation(_Answer, frozen=True):
    """Whether subscriptions come to be on first use."""

    allow_auto_subscription_creation: bool


class Partitions(_Answer, frozen=True):
    """Number of partitions; 0 for a plain topic."""

    partitions: int
    deleted: bool = False


class Lookup(_Answer, frozen=True):
    """The broker that serves a topic."""

    broker_url: str = ""
    broker_url_tls: str | None = None
    http_url: str | None = None
    http_url_tls: str | None = None
    native_url: str | None = None
    broker_id: str | None = None


class Leader(_Answer, frozen=True):
    """The broker that leads the cluster."""

    service_url: str = ""
    broker_id: str = ""


class LoadReport(_Answer, frozen=True):
    """How much a broker serves."""

    web_service_url: str | None = None
    pulsar_service_url: str | None = None
    broker_version_string: str | None = None
    num_topics: int = 0
    num_bundles: int = 0
    num_producers: int = 0
    num_consumers: int = 0
    bundles: list[str] = []


class OwnedBundle(_Answer, frozen=True, rename=None):
    """How a broker holds a bundle."""

    broker_assignment: str = ""
    is_controlled: bool = False
    is_active: bool = False


class Bundles(_Answer, frozen=True):
    """The boundaries between the bundles of a namespace."""

    boundaries: list[str] = []
    num_bundles: int = 0

    @property
    def names(self) -> list[str]:
        """The bundles: `0x00000000_0x40000000`, ..."""
        return [f"{start}_{end}" for start, end in zip(self.boundaries, self.boundaries[1:], strict=False)]


class Id(_Answer, frozen=True):
    """A message id as the admin API writes it."""

    ledger_id: int
    entry_id: int
    partition_index: int = -1

    @property
    def message_id(self) -> MessageId:
        return MessageId(self.ledger_id, self.entry_id, self.partition_index)


class ResetPosition(_Answer, frozen=True):
    """Where a subscription shall stand."""

    ledger_id: int
    entry_id: int
    partition_index: int = -1
    batch_index: int = -1
    excluded: bool = False
    properties: dict[str, str] = {}


class ConsumerStats(_Answer, frozen=True):
    consumer_name: str = ""
    address: str | None = None
    connected_since: str | None = None
    client_version: str | None = None
    msg_rate_out: float = 0.0
    msg_throughput_out: float = 0.0
    msg_out_counter: int = 0
    bytes_out_counter: int = 0
    msg_rate_redeliver: float = 0.0
    message_ack_rate: float = 0.0
    available_permits: int = 0
    unacked_messages: int = 0
    blocked_consumer_on_unacked_msgs: bool = False
    last_acked_timestamp: int = 0
    last_consumed_timestamp: int = 0
    metadata: dict[str, str] | None = None


class SubscriptionStats(_Answer, frozen=True):
    type: str | None = None
    msg_backlog: int = 0
    """Entries not acknowledged: a batch is one."""
    backlog_size: int = 0
    unacked_messages: int = 0
    msg_rate_out: float = 0.0
    msg_throughput_out: float = 0.0
    msg_out_counter: int = 0
    bytes_out_counter: int = 0
    msg_rate_redeliver: float = 0.0
    message_ack_rate: float = 0.0
    msg_in_replay: int = 0
    msg_delayed: int = 0
    active_consumer_name: str | None = None
    blocked_subscription_on_unacked_msgs: bool = False
    total_msg_expired: int = 0
    last_expire_timestamp: int = 0
    last_consumed_timestamp: int = 0
    last_acked_timestamp: int = 0
    is_durable: bool = True
    consumers: list[ConsumerStats] = []
    subscription_properties: dict[str, str] = {}
    blocked_by: list[Blocked] = msgspec.field(default_factory=list, name="blocked_by")
    """Open transactions it waits for."""


class PublisherStats(_Answer, frozen=True):
    producer_name: str | None = None
    producer_id: int = 0
    access_mode: str | None = None
    address: str | None = None
    connected_since: str | None = None
    client_version: str | None = None
    msg_rate_in: float = 0.0
    msg_throughput_in: float = 0.0
    average_msg_size: float = 0.0
    metadata: dict[str, str] | None = None


class TopicStats(_Answer, frozen=True):
    """Rates, sizes and clients of a topic."""

    owner_broker: str | None = None
    msg_rate_in: float = 0.0
    msg_throughput_in: float = 0.0
    msg_rate_out: float = 0.0
    msg_throughput_out: float = 0.0
    msg_in_counter: int = 0
    bytes_in_counter: int = 0
    msg_out_counter: int = 0
    bytes_out_counter: int = 0
    average_msg_size: float = 0.0
    storage_size: int = 0
    backlog_size: int = 0
    deduplication_status: str | None = None
    topic_epoch: int | None = None
    topic_creation_time_stamp: int = 0
    last_publish_time_stamp: int = 0
    waiting_publishers: int = 0
    next_trim: NextTrim = NextTrim()
    """What is deleted next, and when."""
    publishers: list[PublisherStats] = []
    subscriptions: dict[str, SubscriptionStats] = {}


class PartitionedTopicStats(TopicStats, frozen=True):
    """Sums over the partitions, and each partition."""

    metadata: Partitions = Partitions(partitions=0)
    partitions: dict[str, TopicStats] = {}


class LedgerStats(_Answer, frozen=True):
    ledger_id: int
    entries: int = 0
    size: int = 0
    offloaded: bool = False


class CursorStats(_Answer, frozen=True):
    mark_delete_position: str | None = None
    read_position: str | None = None
    messages_consumed_counter: int = 0
    cursor_ledger: int = -1
    cursor_ledger_last_entry: int = -1
    individually_deleted_messages: str | None = None
    total_non_contiguous_deleted_messages_range: int = 0
    state: str | None = None
    properties: dict[str, int] | None = None


class InternalStats(_Answer, frozen=True):
    """How a topic is stored."""

    state: str | None = None
    last_confirmed_entry: str | None = None
    entries_added_counter: int = 0
    number_of_entries: int = 0
    total_size: int = 0
    current_ledger_entries: int = 0
    current_ledger_size: int = 0
    last_ledger_created_timestamp: str | None = None
    waiting_cursors_count: int = 0
    pending_add_entries_count: int = 0
    ledgers: list[LedgerStats] = []
    cursors: dict[str, CursorStats] = {}


class PartitionedInternalStats(_Answer, frozen=True):
    """How each partition of a topic is stored."""

    metadata: Partitions = Partitions(partitions=0)
    partitions: dict[str, InternalStats] = {}


class StoredMessage(_Answer, frozen=True):
    """One entry of a topic, read without consuming it. A batch comes as a whole: see `payloads`."""

    message_id: str
    payload: bytes
    batch_messages: int = 0
    """Number of messages in the batch; 0 = not a batch."""
    key: str | None = None
    properties: dict[str, str] = {}
    producer_name: str | None = None
    sequence_id: int | None = None
    publish_time: str | None = None
    event_time: str | None = None
    is_encrypted: bool = False

    def payloads(self) -> list[bytes]:
        """The payload of each message; the whole entry if it is not a batch or cannot be read (encrypted)."""
        if not self.batch_messages or self.is_encrypted:
            return [self.payload]
        return [payload for _metadata, payload in decode_batch(self.payload, self.batch_messages)]


BrokerTopics = dict[str, dict[str, dict[str, dict[str, TopicStats]]]]
"""What one broker serves: namespace, bundle, `persistent`, topic."""
Json = dict[str, Any]


def reset_position(where: MessageId, *, excluded: bool = False, properties: dict[str, str] | None = None) -> ResetPosition:
    """A message id for the admin API."""
    return ResetPosition(
        ledger_id=where.ledger_id,
        entry_id=where.entry_id,
        partition_index=where.partition,
        batch_index=where.batch_index,
        excluded=excluded,
        properties=properties or {},
    )


ENDS = {"earliest": EARLIEST, "latest": LATEST}
"""The two ends of a topic by name."""
