"""Settings of the broker; every bound a client can feel is here."""

from __future__ import annotations

from typing import Annotated

import msgspec

from braid.model.bundles import MAX_BUNDLES
from braid.runtime.config import setting


class BrokerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section `[broker]`."""

    cluster_name: Annotated[str, setting("Name of the cluster, shown in generated producer names", alias="clusterName")] = (
        "standalone"
    )
    bind_address: Annotated[str, setting("Address or host name to listen on", alias="bindAddress")] = "localhost"
    advertised_address: Annotated[
        str,
        setting(
            "Host name told to clients; empty = the bind address, or the machine's name if that is all addresses",
            alias="advertisedAddress",
        ),
    ] = ""
    port: Annotated[
        int, setting("Port of the binary protocol; 0 = any free one", ge=0, le=65535, alias="brokerServicePort")
    ] = 6650
    http_port: Annotated[int, setting("Port of REST and metrics; 0 = any free one", ge=0, le=65535, alias="webServicePort")] = (
        8080
    )
    count: Annotated[
        int, setting("Brokers in this process; the first has the ports above, the others any free ones", ge=1, le=64)
    ] = 1
    default_bundles: Annotated[
        int,
        setting("Bundles of a new namespace", ge=1, le=MAX_BUNDLES, alias="defaultNumberOfNamespaceBundles"),
    ] = 4
    balance: Annotated[bool, setting("Move bundles so that all brokers have about as many", alias="loadBalancerEnabled")] = True
    balance_seconds: Annotated[
        float, setting("Time between two moves, and between two looks at the counts", ge=0.1, le=86_400)
    ] = 10.0
    reconcile_seconds: Annotated[
        float,
        setting(
            "How often ownership, the owners of loaded logs and policies are compared with the metadata store", ge=0.1, le=3600
        ),
    ] = 5.0
    max_message_size: Annotated[
        int, setting("Largest message (metadata and payload) in bytes", ge=1024, le=128 << 20, alias="maxMessageSize")
    ] = 5 * 1024 * 1024
    keep_alive_seconds: Annotated[
        int, setting("Period of PING on each connection", ge=1, le=3600, alias="keepAliveIntervalSeconds")
    ] = 30
    liveness_check_ms: Annotated[
        int,
        setting(
            "How long an old connection may take to answer before its name is given to a new client",
            ge=100,
            le=60_000,
            alias="connectionLivenessCheckTimeoutMillis",
        ),
    ] = 5000
    max_pending_publishes_per_connection: Annotated[
        int,
        setting(
            "Unacknowledged SENDs of one connection before the broker stops reading from it",
            ge=1,
            le=1_000_000,
            alias="maxPendingPublishRequestsPerConnection",
        ),
    ] = 1000
    max_pending_publish_bytes: Annotated[
        int, setting("Unacknowledged publish bytes of the whole broker before it stops reading", ge=1 << 20, le=1 << 40)
    ] = 256 << 20
    max_connections: Annotated[int, setting("Connections accepted at the same time", ge=1, le=1_000_000)] = 10_000
    max_requests_per_connection: Annotated[
        int, setting("Requests of one connection under way at the same time", ge=1, le=1_000_000)
    ] = 5000
    max_fetches_per_connection: Annotated[
        int, setting("Bulk reads of one connection under way at the same time; further ones wait", ge=1, le=1000)
    ] = 4
    fetch_max_bytes: Annotated[
        int, setting("Bytes of entries in one answer to a bulk read, if not one entry is larger", ge=1024, le=64 << 20)
    ] = 4 << 20
    max_fetch_bytes: Annotated[
        int, setting("Bytes of bulk reads under way in the whole broker; further ones wait", ge=1 << 20, le=1 << 40)
    ] = 256 << 20
    max_described_topics: Annotated[int, setting("Topics whose indexes are asked for in one request", ge=1, le=100_000)] = 1000
    max_handles_per_connection: Annotated[int, setting("Producers plus consumers of one connection", ge=1, le=1_000_000)] = (
        20_000
    )
    write_high_water_bytes: Annotated[
        int, setting("Bytes waiting in one connection before dispatch to it pauses", ge=4096, le=1 << 30)
    ] = 1 << 20
    dispatch_batch_entries: Annotated[
        int, setting("Entries read at once for a subscription", ge=1, le=10_000, alias="dispatcherMaxReadBatchSize")
    ] = 100
    dispatch_batch_bytes: Annotated[
        int, setting("Bytes read at once for a subscription", ge=1024, le=1 << 30, alias="dispatcherMaxReadSizeBytes")
    ] = 5 * 1024 * 1024
    shared_turn_entries: Annotated[
        int,
        setting(
            "Entries one Shared consumer gets before the next one's turn",
            ge=1,
            le=10_000,
            alias="dispatcherMaxRoundRobinBatchSize",
        ),
    ] = 20
    max_unacked_per_consumer: Annotated[
        int,
        setting(
            "Unacknowledged messages of a Shared consumer; 0 = no limit",
            ge=0,
            le=10_000_000,
            alias="maxUnackedMessagesPerConsumer",
        ),
    ] = 50_000
    max_unacked_per_subscription: Annotated[
        int,
        setting(
            "Unacknowledged messages of a Shared subscription; 0 = no limit",
            ge=0,
            le=100_000_000,
            alias="maxUnackedMessagesPerSubscription",
        ),
    ] = 200_000
    max_consumer_metadata_chars: Annotated[
        int, setting("Size of a consumer's metadata map", ge=0, le=1 << 20, alias="maxConsumerMetadataSize")
    ] = 1024
    allow_auto_topic_creation: Annotated[bool, setting("Create topics on first use", alias="allowAutoTopicCreation")] = True
    auto_topic_partitions: Annotated[
        int,
        setting("Partitions of auto-created topics; 0 = a plain topic", ge=0, le=10_000, alias="defaultNumPartitions"),
    ] = 0
    allow_auto_subscription_creation: Annotated[
        bool, setting("Create subscriptions on first use", alias="allowAutoSubscriptionCreation")
    ] = True
    max_partitions: Annotated[
        int, setting("Partitions of one topic", ge=1, le=100_000, alias="maxNumPartitionsPerPartitionedTopic")
    ] = 10_000
    deduplication: Annotated[
        bool, setting("Deduplicate messages by producer name and sequence id", alias="brokerDeduplicationEnabled")
    ] = False
    deduplication_snapshot_entries: Annotated[
        int,
        setting(
            "Entries between two snapshots of the deduplication state",
            ge=1,
            le=1_000_000,
            alias="brokerDeduplicationEntriesInterval",
        ),
    ] = 1000
    deduplication_max_producers: Annotated[
        int,
        setting(
            "Producers remembered per topic for deduplication",
            ge=1,
            le=1_000_000,
            alias="brokerDeduplicationMaxNumberOfProducers",
        ),
    ] = 10_000
    retention_minutes: Annotated[
        int,
        setting("Keep acknowledged messages this long; 0 = not, -1 = for ever", ge=-1, alias="defaultRetentionTimeInMinutes"),
    ] = 0
    retention_mb: Annotated[
        int,
        setting("Keep acknowledged messages up to this size; 0 = none, -1 = no limit", ge=-1, alias="defaultRetentionSizeInMB"),
    ] = 0
    retention_check_seconds: Annotated[
        int, setting("How often logs are trimmed", ge=1, le=86_400, alias="retentionCheckIntervalInSeconds")
    ] = 120
    slow_operation_ms: Annotated[
        int, setting("Log operations that take longer, at a bounded rate; 0 = never", ge=0, le=3_600_000)
    ] = 1000
    loop_stall_ms: Annotated[
        int,
        setting(
            "Log where the event loop stands when it has not turned for so long, once per stall; 0 = never", ge=0, le=3_600_000
        ),
    ] = 1000
    metrics_max_topics: Annotated[
        int, setting("Topics with metrics of their own; with more loaded, only sums by namespace", ge=0, le=1_000_000)
    ] = 5000
    end_of_topic_clients: Annotated[
        str,
        setting(
            "Client version prefixes, by comma, that are told the end of a terminated topic; others would drop the connection"
        ),
    ] = "Pulsar-Java,pulsar-rs,Braid"

    def __post_init__(self) -> None:
        if (self.retention_minutes == 0) != (self.retention_mb == 0):  # it would keep nothing at all
            raise ValueError(
                "broker.retention_minutes and broker.retention_mb must be both 0 or both not 0; use -1 for no limit"
            )


class RetentionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section `[retention]`."""

    unread_minutes: Annotated[
        int,
        setting(
            "Keep messages of a topic without any subscription this long, unless a retention policy says otherwise; 0 = delete "
            "them as if they were acknowledged (Pulsar's rule), -1 = keep them for ever",
            ge=-1,
        ),
    ] = 10_080
